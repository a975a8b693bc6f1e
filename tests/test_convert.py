"""Conversion keeps every bit, both ways, and changes nothing the second time."""

import numpy as np
import pytest
from drafter_files import (
    INDEX,
    PREDECESSOR,
    SUCCESSOR,
    Stored,
    content,
    random_tensors,
    read_config,
    read_file,
    read_tensors,
    small_config,
    write_drafter,
    write_file,
)

from mlx_dflash2.convert import to_mlx, to_torch
from mlx_dflash2.errors import DFlash2Error

ROTARY = Stored("F32", (8,), bytes(32))


def there_and_back(source, tmp_path):
    to_mlx(source, tmp_path / "mlx")
    to_torch(tmp_path / "mlx", tmp_path / "torch")
    return tmp_path / "mlx", tmp_path / "torch"


def every_pattern(dtype: str) -> bytes:
    """All 65,536 bit patterns of 16 bits, or the float32 ones that end in them."""
    patterns = np.arange(65536, dtype="<u4")
    if dtype != "F32":
        return patterns.astype("<u2").tobytes()
    upper = patterns.copy() << 16
    return (upper | (patterns ^ 0x5AA5)).astype("<u4").tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_bit_pattern_survives_both_ways(tmp_path, dtype):
    tensors = random_tensors(small_config())
    tensors[PREDECESSOR] = Stored(dtype, (512, 128), every_pattern(dtype))
    source = write_drafter(tmp_path / "source", tensors)
    for folder in there_and_back(source, tmp_path):
        assert read_tensors(folder) == tensors


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_round_trip_is_exact(tmp_path, dtype, shards):
    source = write_drafter(tmp_path / "source", dtype=dtype, shards=shards)
    tensors = read_tensors(source)
    for folder in there_and_back(source, tmp_path):
        assert read_tensors(folder) == tensors
        assert read_config(folder)["dtype"] == dtype


def test_mixed_types_stay_mixed_and_the_config_names_the_leading_one(tmp_path):
    config = small_config()
    tensors = random_tensors(config, "float32")
    for name, tensor in random_tensors(config, "float16").items():
        if "norm" in name:
            tensors[name] = tensor
    source = write_drafter(tmp_path / "source", tensors, config=config)
    report = to_mlx(source, tmp_path / "mlx")
    assert read_tensors(tmp_path / "mlx") == tensors
    assert read_config(tmp_path / "mlx")["dtype"] == "float32"
    norms = sum("norm" in name for name in tensors)
    assert report.dtypes == {"float16": norms, "float32": len(tensors) - norms}


def test_torch_reads_what_was_written_bit_for_bit(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    tensors = random_tensors(small_config())
    tensors[PREDECESSOR] = Stored("BF16", (512, 128), every_pattern("BF16"))
    source = write_drafter(tmp_path / "source", tensors)
    _, folder = there_and_back(source, tmp_path)
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert tensor.view(torch.int16).numpy().tobytes() == tensors[name].data


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_arrays_cross_between_the_backends_bit_for_bit(dtype):
    pytest.importorskip("torch")
    import mlx.core as mx

    from mlx_dflash2.convert import arrays

    kind = getattr(mx, dtype)
    code = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]
    width = np.uint32 if dtype == "float32" else np.uint16
    array = mx.array(np.frombuffer(every_pattern(code), width)).view(kind)
    tensor = arrays.torch_tensor(array)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert arrays.same_bits(arrays.mlx_array(tensor), array)


def test_converting_twice_changes_nothing(tmp_path):
    source = write_drafter(tmp_path / "source", shards=3)
    to_mlx(source, tmp_path / "once")
    to_mlx(tmp_path / "once", tmp_path / "twice")
    to_torch(source, tmp_path / "torch once")
    to_torch(tmp_path / "torch once", tmp_path / "torch twice")
    assert content(tmp_path / "once") == content(tmp_path / "twice")
    assert content(tmp_path / "torch once") == content(tmp_path / "torch twice")


def test_a_full_circle_ends_in_the_same_files(tmp_path):
    source = write_drafter(tmp_path / "source", shards=2)
    to_torch(source, tmp_path / "published")
    to_mlx(tmp_path / "published", tmp_path / "mlx")
    to_torch(tmp_path / "mlx", tmp_path / "back")
    assert content(tmp_path / "published") == content(tmp_path / "back")


def test_metadata_names_the_form_and_keeps_the_rest(tmp_path):
    source = write_drafter(tmp_path / "source")
    tensors = read_tensors(source)
    write_file(source / "model.safetensors", tensors, trained_by="someone")
    for folder, form in zip(
        there_and_back(source, tmp_path), ("mlx", "pt"), strict=True
    ):
        metadata, _ = read_file(folder / "model.safetensors")
        assert metadata == {"format": form, "trained_by": "someone"}


def test_codebooks_are_written_bare_whatever_their_spelling(tmp_path):
    tensors = random_tensors(small_config())
    renamed = dict(tensors)
    for name in (PREDECESSOR, SUCCESSOR):
        renamed[f"{name}.weight"] = renamed.pop(name)
    source = write_drafter(tmp_path / "source", renamed)
    for folder in there_and_back(source, tmp_path):
        assert read_tensors(folder) == tensors


def test_other_spellings_become_the_published_ones(tmp_path):
    tensors = random_tensors(small_config())
    spelled = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }
    renamed = {f"model.{spelled.get(n, n)}": t for n, t in tensors.items()}
    renamed["model.rotary_emb.inv_freq"] = ROTARY
    source = write_drafter(tmp_path / "source", renamed)
    report = to_torch(source, tmp_path / "torch")
    assert read_tensors(tmp_path / "torch") == tensors
    assert any("model.rotary_emb.inv_freq" in note for note in report.notes)


def test_both_spellings_of_a_codebook_are_refused(tmp_path):
    tensors = random_tensors(small_config())
    tensors[f"{PREDECESSOR}.weight"] = tensors[PREDECESSOR]
    source = write_drafter(tmp_path / "source", tensors)
    with pytest.raises(DFlash2Error, match="two spellings of one"):
        to_mlx(source, tmp_path / "mlx")
    assert not (tmp_path / "mlx").exists()


@pytest.mark.parametrize("name", [PREDECESSOR, "layers.1.mlp_conv.base_kernel"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = random_tensors(small_config())
    del tensors[name]
    source = write_drafter(tmp_path / "source", tensors)
    with pytest.raises(DFlash2Error, match=f"missing {name}"):
        to_mlx(source, tmp_path / "mlx")


def test_an_unknown_tensor_is_named(tmp_path):
    tensors = random_tensors(small_config())
    tensors["layers.0.self_attn.q_proj.bias"] = tensors["norm.weight"]
    source = write_drafter(tmp_path / "source", tensors)
    with pytest.raises(DFlash2Error, match="unknown layers.0.self_attn.q_proj.bias"):
        to_mlx(source, tmp_path / "mlx")


def test_an_own_embedding_and_head_travel_along(tmp_path):
    tensors = random_tensors(small_config())
    other = random_tensors(small_config(), seed=1)
    for name, part in (("embed_tokens.weight", 0), ("lm_head.weight", 1)):
        size = 512 * 64 * 2
        data = other[PREDECESSOR].data[part * size : (part + 1) * size]
        tensors[name] = Stored("BF16", (512, 64), data)
    source = write_drafter(tmp_path / "source", tensors)
    for folder in there_and_back(source, tmp_path):
        assert read_tensors(folder) == tensors


@pytest.mark.parametrize("dtype, size", [("F64", 8), ("I32", 4), ("F8_E4M3", 1)])
def test_a_type_that_cannot_be_carried_over_is_named(tmp_path, dtype, size):
    tensors = random_tensors(small_config())
    tensors["norm.weight"] = Stored(dtype, (64,), bytes(64 * size))
    source = write_drafter(tmp_path / "source", tensors)
    with pytest.raises(DFlash2Error, match=f"norm.weight is stored as {dtype}"):
        to_mlx(source, tmp_path / "mlx")


def test_the_division_into_files_is_kept(tmp_path):
    source = write_drafter(tmp_path / "source", shards=3)
    to_mlx(source, tmp_path / "mlx")
    for i in (1, 2, 3):
        file = f"model-{i:05d}-of-00003.safetensors"
        one, other = read_file(source / file)[1], read_file(tmp_path / "mlx" / file)[1]
        assert one == other
    index = read_config_file(tmp_path / "mlx" / INDEX)
    assert index == read_config_file(source / INDEX)


def test_files_without_an_index_get_one(tmp_path):
    source = write_drafter(tmp_path / "source", shards=2, index=False)
    tensors = read_tensors(source)
    to_mlx(source, tmp_path / "mlx")
    index = read_config_file(tmp_path / "mlx" / INDEX)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in tensors.values())
    assert read_tensors(tmp_path / "mlx") == tensors


def test_one_file_of_any_name_becomes_model_safetensors(tmp_path):
    source = write_drafter(tmp_path / "source")
    (source / "model.safetensors").rename(source / "drafter.safetensors")
    to_mlx(source, tmp_path / "mlx")
    assert sorted(content(tmp_path / "mlx")) == ["config.json", "model.safetensors"]


def test_the_report_counts_what_was_written(tmp_path):
    source = write_drafter(tmp_path / "source")
    tensors = read_tensors(source)
    report = to_mlx(source, tmp_path / "mlx")
    assert report.destination == tmp_path / "mlx"
    assert report.tensors == len(tensors)
    assert report.bytes == sum(len(tensor.data) for tensor in tensors.values())
    assert report.dtypes == {"bfloat16": len(tensors)}
    assert report.written == ("config.json", "model.safetensors")
    assert report.copied == () and report.notes == () and report.revision is None
    assert any(f"{len(tensors)} tensors" in line for line in report.lines())


def read_config_file(path):
    import json

    return json.loads(path.read_text())
