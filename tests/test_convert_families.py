"""DFlash and DSpark drafters through convert: exact, heads never quantized."""

import numpy as np
import pytest
from drafter_files import (
    content,
    read_config,
    read_tensors,
    stored,
    write_drafter,
)
from test_dialects import drafts, torch_drafts
from tiny import KINDS, drafter_numbers, drafter_raw, mlx_target, torch_target

from mlx_dflash2.convert import check, to_mlx, to_torch
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.names import quantizable

TWO = pytest.mark.parametrize("family", ["dflash", "dspark"])
HEADS = ("markov_head.", "confidence_head.")


def made(folder, family, dtype="float32", extra=(), **changes):
    raw = drafter_raw(family=family, **changes)
    numbers = drafter_numbers(KINDS[family].from_dict(raw), seed=4)
    tensors = {name: stored(array, dtype) for name, array in numbers.items()}
    return write_drafter(folder, tensors | dict(extra), config=raw)


@TWO
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_round_trip_is_exact(family, dtype, tmp_path):
    source = made(tmp_path / "source", family, dtype)
    report = to_mlx(source, tmp_path / "mlx")
    to_torch(tmp_path / "mlx", tmp_path / "torch")
    to_mlx(tmp_path / "torch", tmp_path / "again")
    assert read_tensors(tmp_path / "torch") == read_tensors(source)
    assert content(tmp_path / "again") == content(tmp_path / "mlx")
    assert report.tensors == len(read_tensors(source))
    result = check(report, tmp_path / "mlx")
    assert result.passed and result.largest_gap == 0


@TWO
def test_both_backends_run_the_block_of_a_converted_drafter_alike(family, tmp_path):
    pytest.importorskip("torch")
    source = made(tmp_path / "source", family)
    report = to_mlx(source, tmp_path / "mlx")
    assert 0 <= check(report, tmp_path / "mlx").logits_gap < 1e-4


@TWO
@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_leaves_the_heads_as_they_are(family, bits, tmp_path):
    source = made(tmp_path / "source", family)
    report = to_mlx(source, tmp_path / "q", quantize_bits=bits, quantize_group_size=32)
    before, after = read_tensors(source), read_tensors(tmp_path / "q")
    packed = {name.removesuffix(".scales") for name in after if "scales" in name}
    linear = {n.removesuffix(".weight") for n in before if quantizable(n)}
    assert packed == linear and len(linear) == 15
    assert not any(name.startswith(HEADS) for name in packed)
    kept = {name for name in before if name.removesuffix(".weight") not in packed}
    assert any(name.startswith(HEADS) for name in kept) == (family == "dspark")
    for name in kept:
        assert after[name] == before[name], name
    assert check(report, tmp_path / "q").passed


@TWO
def test_a_quantized_drafter_drafts_as_its_dequantized_values_do(family, tmp_path):
    pytest.importorskip("torch")
    source = made(tmp_path / "source", family)
    to_mlx(source, tmp_path / "q", quantize_bits=4, quantize_group_size=32)
    to_torch(tmp_path / "q", tmp_path / "plain", dequantize=True)
    target = mlx_target()
    expected = drafts(tmp_path / "q", target)
    assert drafts(tmp_path / "plain", target) == expected
    assert drafts(source, target) != expected
    whole = [block for block in expected if len(block) == 7]
    for block in torch_drafts(tmp_path / "plain", torch_target()):
        assert block in whole


@TWO
def test_another_dtype_is_written_for_every_tensor(family, tmp_path):
    source = made(tmp_path / "source", family)
    to_mlx(source, tmp_path / "half", dtype="bfloat16")
    assert {t.dtype for t in read_tensors(tmp_path / "half").values()} == {"BF16"}
    assert read_config(tmp_path / "half")["dtype"] == "bfloat16"


def test_the_published_dspark_config_only_gains_what_few_runtimes_look_for(tmp_path):
    """Its rope base stands under rope_parameters alone; the flat one is added."""
    source = made(tmp_path / "source", "dspark", draft_vocab_size=256)
    to_torch(source, tmp_path / "out")
    before, after = read_config(source), read_config(tmp_path / "out")
    assert after == before | {"rope_theta": 5e6, "dtype": "float32"}


def test_the_published_dflash_config_keeps_its_block_size_at_the_top(tmp_path):
    source = made(tmp_path / "source", "dflash")
    to_torch(source, tmp_path / "out")
    after = read_config(tmp_path / "out")
    assert after["block_size"] == 8
    assert after["dflash_config"] == drafter_raw(family="dflash")["dflash_config"]


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_yarn_and_a_stated_first_row_survive(family, tmp_path):
    yarn = {
        "rope_theta": 1e4,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    row = {"dflash2": 1, "dflash": 0, "dspark": 1}[family]
    source = made(tmp_path / "source", family, rope_parameters=yarn, logits_start=row)
    to_mlx(source, tmp_path / "mlx")
    config = read_drafter_config(tmp_path / "mlx")
    assert config == read_drafter_config(source)
    assert config.rope_scaling["factor"] == 4 and config.explicit_first_row


@TWO
@pytest.mark.parametrize("tables", [1, 2])
def test_its_own_embedding_and_head_are_carried_over(family, tables, tmp_path):
    values = np.random.default_rng(0).standard_normal((256, 64))
    own = [
        (name, stored(values, "float32"))
        for name in ("embed_tokens.weight", "lm_head.weight")[:tables]
    ]
    source = made(tmp_path / "source", family, extra=own)
    to_mlx(source, tmp_path / "mlx", quantize_bits=8, quantize_group_size=32)
    tensors = read_tensors(tmp_path / "mlx")
    assert [name for name, tensor in own if tensors[name] == tensor] == [
        name for name, _ in own
    ]


def test_a_hybrid_is_refused_and_nothing_is_left(tmp_path):
    conv = {"layers.0.mlp_conv.base_kernel": stored(np.zeros((2, 2, 64)), "float32")}
    source = made(tmp_path / "source", "dspark", extra=conv.items())
    with pytest.raises(DFlash2Error, match="a drafter is of one family"):
        to_mlx(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_dspark_drafter_under_a_dflash_2_config_is_refused(tmp_path):
    source = made(tmp_path / "source", "dspark", architectures=["DFlash2DraftModel"])
    with pytest.raises(DFlash2Error, match=r"\(DFlash 2\), but .* those of DSpark"):
        to_torch(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
