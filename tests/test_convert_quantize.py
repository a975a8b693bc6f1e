"""Casting, quantizing and dequantizing while converting."""

import mlx.core as mx
import numpy as np
import pytest
from drafter_files import (
    Stored,
    content,
    random_tensors,
    read_config,
    read_tensors,
    small_config,
    stored,
    write_drafter,
)

from mlx_dflash2.convert import to_mlx, to_torch
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.names import quantizable

PACKED = {"fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
PACKED |= {"down_proj"}


@pytest.fixture
def source(tmp_path):
    return write_drafter(tmp_path / "source", shards=2)


@pytest.fixture
def quantized(source, tmp_path):
    to_mlx(source, tmp_path / "quantized", quantize_bits=4, quantize_group_size=32)
    return tmp_path / "quantized"


def as_floats(tensor: Stored) -> np.ndarray:
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return bits.view("<f4").reshape(tensor.shape)
    kind = {"F16": "<f2", "F32": "<f4"}[tensor.dtype]
    return np.frombuffer(tensor.data, kind).astype("<f4").reshape(tensor.shape)


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64])
def test_only_the_backbones_linear_layers_are_quantized(tmp_path, bits, group_size):
    source = write_drafter(tmp_path / "source")
    to_mlx(source, tmp_path / "q", quantize_bits=bits, quantize_group_size=group_size)
    plain, packed = read_tensors(source), read_tensors(tmp_path / "q")
    scaled = {name.removesuffix(".scales") for name in packed if "scales" in name}
    assert scaled == {
        name.removesuffix(".weight")
        for name in plain
        if name.removesuffix(".weight").split(".")[-1] in PACKED
    }
    for name, tensor in plain.items():
        if quantizable(name):
            columns = tensor.shape[1]
            assert packed[name].dtype == "U32"
            assert packed[name].shape[1] == columns * bits // 32
            for part in ("scales", "biases"):
                other = packed[name.replace("weight", part)]
                assert (other.dtype, other.shape[1]) == ("BF16", columns // group_size)
        else:
            assert packed[name] == tensor
    expected = {"group_size": group_size, "bits": bits}
    assert read_config(tmp_path / "q")["quantization"] == expected


def test_quantized_weights_are_those_of_mlx(source, quantized):
    weight = mx.array(as_floats(read_tensors(source)["fc.weight"])).astype(mx.bfloat16)
    parts = mx.quantize(weight, group_size=32, bits=4)
    found = read_tensors(quantized)
    for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
        width = mx.uint32 if part == "weight" else mx.uint16
        assert found[f"fc.{part}"].data == np.array(value.view(width)).tobytes()


def test_a_group_size_is_64_unless_given(source, tmp_path):
    to_mlx(source, tmp_path / "q", quantize_bits=4)
    assert read_config(tmp_path / "q")["quantization"]["group_size"] == 64


def test_a_quantized_folder_stays_as_it_is(quantized, tmp_path):
    to_mlx(quantized, tmp_path / "again")
    assert content(quantized) == content(tmp_path / "again")


@pytest.mark.parametrize("convert", [to_mlx, to_torch])
def test_dequantizing_gives_plain_weights_near_the_first_ones(
    source, quantized, tmp_path, convert
):
    convert(quantized, tmp_path / "plain", dequantize=True)
    first, last = read_tensors(source), read_tensors(tmp_path / "plain")
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert last[name].dtype == tensor.dtype
        if not quantizable(name):
            assert last[name] == tensor
            continue
        one, other = as_floats(tensor), as_floats(last[name])
        assert not np.array_equal(one, other)
        step = np.ptp(one) / 15  # 4 bits: 15 steps over the range, or a finer one
        assert np.abs(one - other).max() < step
    assert "quantization" not in read_config(tmp_path / "plain")


def test_dequantizing_finds_parts_that_lie_in_different_files(quantized, tmp_path):
    split = write_drafter(
        tmp_path / "split",
        dict(sorted(read_tensors(quantized).items())),
        config=read_config(quantized),
        shards=3,
    )
    to_torch(quantized, tmp_path / "one", dequantize=True)
    to_torch(split, tmp_path / "other", dequantize=True)
    assert read_tensors(tmp_path / "one") == read_tensors(tmp_path / "other")


def test_requantizing_dequantizes_first(quantized, tmp_path):
    to_mlx(quantized, tmp_path / "plain", dequantize=True)
    to_mlx(tmp_path / "plain", tmp_path / "steps", quantize_bits=8)
    to_mlx(quantized, tmp_path / "once", dequantize=True, quantize_bits=8)
    assert content(tmp_path / "steps") == content(tmp_path / "once")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_casting_comes_before_quantizing_and_after_dequantizing(
    source, tmp_path, dtype
):
    to_mlx(source, tmp_path / "cast", dtype=dtype)
    to_mlx(tmp_path / "cast", tmp_path / "steps", quantize_bits=4)
    to_mlx(source, tmp_path / "once", dtype=dtype, quantize_bits=4)
    assert content(tmp_path / "steps") == content(tmp_path / "once")
    to_mlx(tmp_path / "once", tmp_path / "back", dequantize=True, dtype="bfloat16")
    dtypes = {tensor.dtype for tensor in read_tensors(tmp_path / "back").values()}
    assert dtypes == {"BF16"}


def test_casting_a_quantized_folder_casts_what_is_not_packed(quantized, tmp_path):
    to_mlx(quantized, tmp_path / "cast", dtype="float32")
    before, after = read_tensors(quantized), read_tensors(tmp_path / "cast")
    for name, tensor in before.items():
        if tensor.dtype == "U32":
            assert after[name] == tensor
        else:
            assert after[name].dtype == "F32"
            assert np.array_equal(as_floats(after[name]), as_floats(tensor))


def test_casting_rounds_to_the_nearest_value(tmp_path):
    config = small_config()
    source = write_drafter(tmp_path / "s", random_tensors(config, "float32"))
    to_torch(source, tmp_path / "t", dtype="bfloat16")
    assert read_tensors(tmp_path / "t") == random_tensors(config, "bfloat16")


def test_a_cast_that_would_overflow_is_refused(tmp_path):
    tensors = random_tensors(small_config())
    tensors["norm.weight"] = stored(np.full(64, 1e5), "bfloat16")
    source = write_drafter(tmp_path / "source", tensors)
    with pytest.raises(DFlash2Error, match="norm.weight.*does not fit into float16"):
        to_mlx(source, tmp_path / "mlx", dtype="float16")
    assert not (tmp_path / "mlx").exists()


def test_a_quantized_folder_goes_to_torch_only_dequantized(quantized, tmp_path):
    with pytest.raises(DFlash2Error, match="add -d"):
        to_torch(quantized, tmp_path / "torch")
    assert not (tmp_path / "torch").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"quantize_bits": 7}, "7 bits in groups of 64: .*not supported"),
        ({"quantize_bits": 4, "quantize_group_size": 48}, "48.*not supported"),
        ({"quantize_bits": 4, "quantize_group_size": 128}, "has 64 columns"),
        ({"quantize_group_size": 32}, "without quantize_bits"),
        ({"dequantize": True}, "is not quantized"),
        ({"dtype": "int8"}, "choose float32, float16, bfloat16"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(source, tmp_path, arguments, message):
    with pytest.raises(DFlash2Error, match=message):
        to_mlx(source, tmp_path / "mlx", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_quantizing_twice_is_refused(quantized, tmp_path):
    with pytest.raises(DFlash2Error, match="quantized already; add -d"):
        to_mlx(quantized, tmp_path / "twice", quantize_bits=4)


def test_scales_of_a_type_that_cannot_be_carried_over_are_named(quantized, tmp_path):
    tensors = read_tensors(quantized)
    scales = tensors["fc.scales"]
    tensors["fc.scales"] = Stored("I16", scales.shape, scales.data)
    odd = write_drafter(tmp_path / "odd", tensors, config=read_config(quantized))
    with pytest.raises(DFlash2Error, match="fc.scales is stored as I16"):
        to_mlx(odd, tmp_path / "mlx")
