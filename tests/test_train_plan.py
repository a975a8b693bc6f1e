"""The plan of a run: parameters and memory by arithmetic, and the shapes behind it."""

import json

import pytest

pytest.importorskip("torch")

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.config import Shape, read_config  # noqa: E402
from mlx_dflash2.torch.train.geometry import (  # noqa: E402
    new_drafter,
    read_geometry,
    spread_taps,
)
from mlx_dflash2.torch.train.plan import (  # noqa: E402
    memory,
    parameter_counts,
    plan,
    target_parameters,
)

MINICPM5 = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 42,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 130560,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def shape_of(**changes):
    return Shape(**({"mask_token_id": 75982} | changes))


def drafter_of(**changes):
    return read_geometry(new_drafter(shape_of(**changes), MINICPM5))


@pytest.mark.parametrize(
    "depth, count, taps",
    [
        (42, 5, (1, 10, 20, 30, 39)),
        (30, 5, (1, 8, 14, 20, 27)),
        (24, 5, (1, 6, 11, 16, 21)),
        (42, 1, (21,)),
        (42, 3, (1, 20, 39)),
    ],
)
def test_taps_are_spread_as_published_drafters_have_them(depth, count, taps):
    assert spread_taps(depth, count) == taps


def test_more_taps_than_layers_are_refused():
    with pytest.raises(DFlash2Error, match="num_taps is 5, more than a target of 6"):
        spread_taps(6, 5)


@pytest.mark.parametrize(
    "family, parameters, first_row",
    [
        ("dflash2", 334_865_664, 1),
        ("dflash", 256_926_976, 1),
        ("dspark", 323_776_001, 0),
    ],
)
def test_a_new_drafter_has_the_size_of_the_published_one(family, parameters, first_row):
    config = drafter_of(family=family)
    assert sum(parameter_counts(config).values()) == parameters
    assert (config.num_draft_tokens, config.first_row) == (7, first_row)
    assert config.target_layer_ids == (1, 10, 20, 30, 39)
    assert config.rope_theta == 5e6 and config.is_causal is False


def test_a_shape_may_differ_from_the_target():
    config = drafter_of(
        layers=2, taps=(3, 9), heads=8, kv_heads=4, head_dim=64, intermediate=1024
    )
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
    assert (config.head_dim, config.intermediate_size) == (64, 1024)
    assert config.num_hidden_layers == len(config.layer_types) == 2


def test_the_mask_token_has_no_default():
    with pytest.raises(DFlash2Error, match="mask_token_id is missing; give a token"):
        new_drafter(Shape(), MINICPM5)


@pytest.mark.parametrize(
    "anchors, eight_bit, gigabytes",
    [(128, False, 12.7), (256, False, 13.2), (512, False, 14.1), (512, True, 12.5)],
)
def test_the_memory_of_a_t4_is_planned_as_reckoned_by_hand(
    anchors, eight_bit, gigabytes
):
    flags = {"batch.anchors": anchors, "optimizer.eight_bit": eight_bit}
    needs = memory(
        read_config(flags=flags),
        drafter_of(),
        MINICPM5,
        row_length=1536,
        precision="fp16",
    )
    assert sum(needs.values()) / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_a_target_is_counted_from_its_config():
    assert target_parameters(MINICPM5) == 2_516_756_480
    tied = MINICPM5 | {"tie_word_embeddings": True}
    assert target_parameters(MINICPM5) - target_parameters(tied) == 130560 * 2048


def test_a_plan_needs_no_weights_and_no_data(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINICPM5))
    flags = {"target": str(tmp_path), "drafter.mask_token_id": 75982, "steps": 100}
    text = "\n".join(plan(read_config(flags=flags), "fp16"))
    for part in (
        "42 layers, 2516.8M parameters, frozen",
        "DFlash 2, 5 layers, taps [1, 10, 20, 30, 39], 7 drafted tokens",
        "334.9M parameters: fusion and norms 21.0M",
        "data: not named yet",
        "steps: 100, 16 rows each (1 at once), 128 blocks a row",
        "at most 204800 blocks and 1433600 labels",
        "fits into a GPU of 16 GB",
    ):
        assert part in text


def test_a_plan_says_what_cached_features_take(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINICPM5))
    (tmp_path / "train").mkdir()
    counts = {"rows": 9, "tokens": 100_000, "supervised": 7}
    (tmp_path / "train/manifest.json").write_text(json.dumps(counts))
    flags = {"target": str(tmp_path), "drafter.mask_token_id": 75982}
    flags |= {"cache_features": True, "data": str(tmp_path)}
    for changes, line in (
        ({}, "cached features: 20480 bytes a token, 2.05 GB"),
        ({"objective.kl": 1.0}, "cached features: 24576 bytes a token, 2.46 GB"),
        ({"anneal_data": str(tmp_path)}, "20480 bytes a token, 4.10 GB"),
    ):
        text = "\n".join(plan(read_config(flags=flags | changes), "fp16"))
        assert line in text
