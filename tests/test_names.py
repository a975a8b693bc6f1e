"""Stored names map to published ones, and every tensor is accounted for."""

import math
import re

import pytest

from mlx_dflash2.checkpoint import stored_tensors
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import DFlash2Config, read_drafter_config
from mlx_dflash2.names import (
    SPELLINGS,
    check_tensors,
    expected_shapes,
    published_names,
    quantizable,
)

CODEBOOKS = [
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
]


def config(**changes):
    raw = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "num_target_layers": 6,
        "block_size": 8,
        "mask_token_id": 3,
        "target_layer_ids": [1, 2, 4],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
    }
    return DFlash2Config.from_dict(raw | changes)


def check(shapes, **changes):
    check_tensors(shapes, config(**changes), where="drafter")


def refused(match, shapes, **changes):
    with pytest.raises(DFlash2Error, match=match):
        check(shapes, **changes)


def test_a_published_drafter_has_81_tensors_and_335_million_parameters():
    shapes = expected_shapes(
        config(
            hidden_size=2048,
            num_hidden_layers=5,
            intermediate_size=6144,
            num_attention_heads=16,
            head_dim=128,
            vocab_size=130560,
            num_target_layers=42,
            target_layer_ids=[1, 10, 20, 30, 39],
            selector_rank=256,
        )
    )
    assert len(shapes) == 81
    assert sum(map(math.prod, shapes.values())) == 334_865_664
    assert shapes["fc.weight"] == (2048, 10240)
    assert shapes["layers.4.mlp_conv.kernel_projection.weight"] == (512, 2048)


def test_a_written_drafter_is_complete(pair):
    made = pair("random", layer_types="mixed")
    shapes = {n: t.shape for n, t in stored_tensors(made.drafter).items()}
    check_tensors(shapes, read_drafter_config(made.drafter), where="drafter")


# Spellings


@pytest.mark.parametrize(("stored", "published"), SPELLINGS.items())
@pytest.mark.parametrize("prefix", ["", "model."])
def test_every_spelling_maps_to_the_published_one(stored, published, prefix):
    found = published_names([prefix + stored], where="drafter")
    assert found == {prefix + stored: published}


def test_published_names_stay_and_no_codebook_gets_a_suffix():
    names = list(expected_shapes(config()))
    assert published_names(names, where="drafter") == dict(
        zip(names, names, strict=True)
    )
    assert set(CODEBOOKS) <= set(names)


def test_an_optional_prefix_goes():
    names = [f"model.{name}" for name in expected_shapes(config())]
    found = published_names(names, where="drafter")
    assert set(found.values()) == set(expected_shapes(config()))


def test_quantized_spellings_keep_their_parts():
    found = published_names(
        ["context_proj.weight", "context_proj.scales", "context_proj.biases"],
        where="drafter",
    )
    assert list(found.values()) == ["fc.weight", "fc.scales", "fc.biases"]


def test_rotary_buffers_are_left_out():
    names = ["rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq"]
    assert published_names(names, where="drafter") == {}


@pytest.mark.parametrize(
    "names",
    [
        [CODEBOOKS[0], f"{CODEBOOKS[0]}.weight"],
        ["fc.weight", "context_proj.weight"],
        ["norm.weight", "model.norm.weight"],
        ["encoder.fc.weight", "context_proj.weight"],
    ],
)
def test_two_spellings_of_one_tensor_are_refused(names):
    message = f"drafter: {re.escape(names[0])} and {re.escape(names[1])} are two"
    with pytest.raises(DFlash2Error, match=message):
        published_names(names, where="drafter")


# Every tensor accounted for


@pytest.mark.parametrize("name", list(expected_shapes(config())))
def test_each_missing_tensor_is_named(name):
    shapes = expected_shapes(config())
    del shapes[name]
    refused(f"missing {re.escape(name)}$|missing {re.escape(name)};", shapes)


def test_missing_codebooks_are_both_named():
    shapes = expected_shapes(config())
    for name in CODEBOOKS:
        del shapes[name]
    refused(f"missing {CODEBOOKS[0]}, {CODEBOOKS[1]}", shapes)


@pytest.mark.parametrize(
    "name", ["extra.weight", "layers.2.mlp.up_proj.weight", "fc.bias", "extra.d2t"]
)
def test_each_unknown_tensor_is_named(name):
    shapes = expected_shapes(config()) | {name: (1,)}
    refused(f"unknown {re.escape(name)}", shapes)


def test_a_long_list_is_cut_but_counted():
    shapes = expected_shapes(config()) | {f"extra.{i}": (1,) for i in range(7)}
    refused(r"unknown extra\.0, extra\.1, extra\.2, extra\.3 and 3 more", shapes)


def test_the_family_that_was_expected_is_named():
    shapes = {
        name: shape
        for name, shape in expected_shapes(config()).items()
        if "_conv." not in name and "selector" not in name
    }
    refused("not a DFlash 2 drafter: missing candidate_selector", shapes)


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_the_table_of_a_reduced_vocabulary_is_called_one(name):
    shapes = expected_shapes(config()) | {name: (128,)}
    refused(f"holds {name}.*reduced vocabularies are not supported", shapes)


@pytest.mark.parametrize("name", list(expected_shapes(config())))
def test_each_wrong_shape_is_named(name):
    shapes = expected_shapes(config())
    shapes[name] = (*shapes[name][:-1], shapes[name][-1] + 1)
    refused(f"{re.escape(name)} has shape .* but config.json asks for", shapes)


def test_fc_is_held_against_the_number_of_taps():
    shapes = expected_shapes(config())
    refused(
        r"fc\.weight has shape \[64, 192\], but config.json asks for \[64, 128\]",
        shapes,
        target_layer_ids=[1, 2],
    )


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_an_own_embedding_or_head_is_optional(name):
    shapes = expected_shapes(config())
    check(shapes | {name: (128, 64)})
    refused(f"{name} has shape", shapes | {name: (127, 64)})


# Quantized drafters


def quantized_shapes(*names):
    shapes = expected_shapes(config())
    for name in names:
        rows, columns = shapes[name]
        stem = name.removesuffix("weight")
        shapes[name] = (rows, columns * 4 // 32)
        shapes[stem + "scales"] = shapes[stem + "biases"] = (rows, columns // 32)
    return shapes


FOUR_BITS = {"quantization": {"bits": 4, "group_size": 32}}


def test_quantized_linear_layers_are_accepted():
    shapes = quantized_shapes("fc.weight", "layers.1.mlp.down_proj.weight")
    check(shapes, **FOUR_BITS)
    check(expected_shapes(config()), **FOUR_BITS)


def test_quantized_tensors_need_the_config_to_say_so():
    refused("fc.weight is quantized, but config.json", quantized_shapes("fc.weight"))


def test_a_quantized_tensor_without_biases_is_refused():
    shapes = quantized_shapes("fc.weight")
    del shapes["fc.biases"]
    refused(r"missing fc\.biases", shapes, **FOUR_BITS)


def test_other_bits_than_the_config_says_are_refused():
    eight = {"quantization": {"bits": 8, "group_size": 32}}
    refused("fc.weight has shape", quantized_shapes("fc.weight"), **eight)


@pytest.mark.parametrize(
    "name",
    [
        "candidate_selector.hidden_projection.weight",
        "layers.0.mlp_conv.kernel_projection.weight",
        CODEBOOKS[0],
    ],
)
def test_what_picks_the_token_is_never_quantized(name):
    assert not quantizable(name)
    stem = name.removesuffix(".weight")
    shapes = expected_shapes(config()) | {f"{stem}.scales": (8, 2)}
    refused("unknown .*scales", shapes, **FOUR_BITS)


def test_only_the_backbone_linear_layers_are_quantizable():
    names = [name for name in expected_shapes(config()) if quantizable(name)]
    assert len(names) == 1 + 2 * 7
    assert quantizable("layers.0.self_attn.q_proj")
