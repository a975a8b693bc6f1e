"""`check` finds every bit that is not what the conversion asked for."""

import importlib.util

import mlx.core as mx
import numpy as np
import pytest
from drafter_files import (
    PREDECESSOR,
    Stored,
    random_tensors,
    read_config,
    read_file,
    read_tensors,
    small_config,
    stored,
    write_drafter,
    write_file,
)

from mlx_dflash2.convert import check, to_mlx, to_torch
from mlx_dflash2.errors import DFlash2Error


@pytest.fixture
def source(tmp_path):
    return write_drafter(tmp_path / "source")


@pytest.fixture
def no_torch(monkeypatch):
    """Leave the block logits out: these tests are about the tensors."""
    find_spec = importlib.util.find_spec

    def hide(name, *arguments):
        return None if name == "torch" else find_spec(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", hide)


def spoil(folder, name: str, byte: int = 0) -> None:
    """Flip the lowest bit of one byte of a tensor."""
    metadata, tensors = read_file(folder / "model.safetensors")
    data = bytearray(tensors[name].data)
    data[byte] ^= 1
    tensors[name] = tensors[name]._replace(data=bytes(data))
    write_file(folder / "model.safetensors", tensors, **metadata)


@pytest.mark.parametrize("convert", [to_mlx, to_torch])
def test_an_exact_conversion_has_no_gap(source, tmp_path, no_torch, convert):
    report = convert(source, tmp_path / "out")
    for asked in (report, source):
        found = check(asked, tmp_path / "out")
        assert found.passed and found.wrong == ()
        assert found.modules == report.tensors
        assert (found.largest_gap, found.largest_gap_tensor) == (0.0, None)
        assert found.logits_gap is None
        assert "torch is not installed" in found.lines()[-1]


@pytest.mark.parametrize("name", [PREDECESSOR, "layers.1.mlp.down_proj.weight"])
def test_one_flipped_bit_is_found(source, tmp_path, no_torch, name):
    report = to_mlx(source, tmp_path / "out")
    spoil(tmp_path / "out", name)
    found = check(report, tmp_path / "out")
    assert not found.passed and found.wrong == (name,)
    assert found.largest_gap > 0 and found.largest_gap_tensor == name
    assert f"wrong: {name}" in found.lines()


def test_a_changed_nan_payload_is_found_though_no_number_differs(tmp_path, no_torch):
    tensors = random_tensors(small_config())
    nans = np.full(64, 0x7FC1, "<u2").tobytes()
    tensors["norm.weight"] = Stored("BF16", (64,), nans)
    source = write_drafter(tmp_path / "source", tensors)
    report = to_mlx(source, tmp_path / "out")
    assert check(report, tmp_path / "out").passed
    spoil(tmp_path / "out", "norm.weight")
    found = check(report, tmp_path / "out")
    assert found.wrong == ("norm.weight",) and found.largest_gap == 0


@pytest.mark.parametrize("part", ["weight", "scales", "biases"])
def test_one_flipped_bit_of_a_quantized_module_is_found(
    source, tmp_path, no_torch, part
):
    report = to_mlx(source, tmp_path / "out", quantize_bits=4)
    for asked in (report, source):
        found = check(asked, tmp_path / "out")
        assert found.passed and found.largest_gap > 0
        assert found.largest_gap_tensor.endswith("_proj.weight") or (
            found.largest_gap_tensor == "fc.weight"
        )
    spoil(tmp_path / "out", f"layers.0.self_attn.q_proj.{part}")
    for asked in (report, source):
        wrong = check(asked, tmp_path / "out").wrong
        assert wrong == ("layers.0.self_attn.q_proj.weight",)


def test_the_largest_gap_of_a_cast_is_its_rounding(tmp_path, no_torch):
    config = small_config()
    tensors = random_tensors(config, "float32")
    values = np.ones(64, np.float32)
    values[5] = 1000 + 3  # bfloat16 has steps of 4 here
    tensors["layers.1.input_layernorm.weight"] = stored(values, "float32")
    source = write_drafter(tmp_path / "source", tensors, config=config)
    report = to_mlx(source, tmp_path / "out", dtype="bfloat16")
    for asked in (report, source):
        found = check(asked, tmp_path / "out")
        assert found.passed and found.largest_gap == 1.0
        assert found.largest_gap_tensor == "layers.1.input_layernorm.weight"
        assert "1 in layers.1.input_layernorm.weight" in found.lines()[1]


def test_dequantizing_and_quantizing_again_are_recognised(source, tmp_path, no_torch):
    to_mlx(source, tmp_path / "q", quantize_bits=4, quantize_group_size=32)
    plain = to_torch(tmp_path / "q", tmp_path / "plain", dequantize=True)
    assert check(plain, tmp_path / "plain").passed
    assert check(plain, tmp_path / "plain").largest_gap == 0
    assert check(tmp_path / "q", tmp_path / "plain").passed
    again = to_mlx(tmp_path / "q", tmp_path / "q8", dequantize=True, quantize_bits=8)
    assert check(again, tmp_path / "q8").passed
    assert check(tmp_path / "q", tmp_path / "q8").passed


def test_a_folder_that_was_not_cast_as_asked_is_wrong(source, tmp_path, no_torch):
    report = to_mlx(source, tmp_path / "cast", dtype="float32")
    to_mlx(source, tmp_path / "plain")
    found = check(report, tmp_path / "plain")
    assert len(found.wrong) == found.modules and found.largest_gap == 0


def test_a_tensor_lost_on_the_way_is_wrong(tmp_path, no_torch):
    tensors = random_tensors(small_config())
    head = Stored("BF16", (512, 64), tensors[PREDECESSOR].data[: 512 * 64 * 2])
    full = tensors | {"lm_head.weight": head}
    source = write_drafter(tmp_path / "source", full)
    out = write_drafter(tmp_path / "out", tensors)
    assert check(source, out).wrong == ("lm_head.weight",)
    assert check(out, source).wrong == ("lm_head.weight",)


def test_an_incomplete_folder_is_an_error(source, tmp_path, no_torch):
    report = to_mlx(source, tmp_path / "out")
    tensors = read_tensors(tmp_path / "out")
    del tensors["fc.weight"]
    write_file(tmp_path / "out" / "model.safetensors", tensors)
    with pytest.raises(DFlash2Error, match="missing fc.weight"):
        check(report, tmp_path / "out")


def test_gaps_see_every_kind_of_number():
    from mlx_dflash2.convert import arrays

    inf, nan = float("inf"), float("nan")
    known = mx.array([1.0, inf, nan, -inf])
    assert arrays.largest_gap(known, known) == 0
    assert arrays.largest_gap(known, mx.array([1.5, inf, nan, -inf])) == 0.5
    assert arrays.largest_gap(known, mx.array([1.0, inf, 0.0, -inf])) == inf
    assert arrays.largest_gap(known, mx.array([1.0, -inf, nan, -inf])) == inf
    assert not arrays.same_bits(mx.array([0.0]), mx.array([-0.0]))
    assert not arrays.same_bits(mx.zeros((2,)), mx.zeros((2, 1)))
    assert not arrays.same_bits(mx.zeros((2,)), mx.zeros((2,), mx.float16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_both_backends_give_the_same_block_logits(pair, tmp_path, dtype, layers):
    pytest.importorskip("torch")
    drafter = pair(
        kind="random", dtype=dtype, layer_types=layers, sliding_window=16
    ).drafter
    report = to_mlx(drafter, tmp_path / "mlx")
    found = check(report, tmp_path / "mlx")
    assert found.logits_gap < 2e-4
    assert "block logits" in found.lines()[-1]
    back = to_torch(tmp_path / "mlx", tmp_path / "torch")
    assert check(back, tmp_path / "torch").logits_gap == found.logits_gap


def test_block_logits_show_a_wrong_tensor(pair, tmp_path):
    pytest.importorskip("torch")
    drafter = pair(kind="random").drafter
    for convert in (to_mlx, to_torch):
        out = tmp_path / convert.__name__
        report = convert(drafter, out)
        metadata, tensors = read_file(out / "model.safetensors")
        first, second = "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"
        tensors[first], tensors[second] = tensors[second], tensors[first]
        write_file(out / "model.safetensors", tensors, **metadata)
        found = check(report, out)
        assert found.wrong == (first, second) and found.logits_gap > 0.01


def test_block_logits_include_what_quantization_costs(pair, tmp_path):
    pytest.importorskip("torch")
    drafter = pair(kind="random").drafter
    gaps = []
    for bits in (8, 4):
        out = tmp_path / f"q{bits}"
        report = to_mlx(drafter, out, quantize_bits=bits, quantize_group_size=32)
        gaps.append(check(report, out).logits_gap)
        assert read_config(out)["quantization"]["bits"] == bits
    assert 2e-4 < gaps[0] < gaps[1]
    plain = to_torch(tmp_path / "q4", tmp_path / "plain", dequantize=True)
    assert check(plain, tmp_path / "plain").logits_gap < 2e-4


def test_a_drafter_with_its_own_embedding_and_head_is_compared_too(pair, tmp_path):
    pytest.importorskip("torch")
    given = pair(kind="random").drafter
    config, tensors = read_config(given), read_tensors(given)
    size = config["vocab_size"], config["hidden_size"]
    for name in ("embed_tokens.weight", "lm_head.weight"):
        tensors[name] = stored(np.ones(size, np.float32), "float32")
    source = write_drafter(tmp_path / "source", tensors, config=config)
    report = to_mlx(source, tmp_path / "mlx")
    found = check(report, tmp_path / "mlx")
    assert found.passed and found.logits_gap < 2e-4


def test_a_quantized_folder_is_wrong_where_a_plain_one_was_asked_for(
    source, tmp_path, no_torch
):
    plain = to_mlx(source, tmp_path / "plain")
    packed = to_mlx(source, tmp_path / "q", quantize_bits=4)
    wrong = check(plain, tmp_path / "q").wrong
    assert "fc.weight" in wrong and "norm.weight" not in wrong
    assert check(packed, tmp_path / "plain").wrong == wrong
