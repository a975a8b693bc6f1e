"""Every place of every field is read, and places that disagree are refused."""

import copy
import json

import pytest

from mlx_dflash2.config_fields import FULL, SLIDING
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import (
    DFlash2Config,
    DFlashConfig,
    check_agreement,
    read_drafter_config,
)
from mlx_dflash2.names import expected_shapes

PUBLISHED = {
    "architectures": ["DFlash2DraftModel"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "num_hidden_layers": 5,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 130560,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "rope_scaling": None,
    "attention_bias": False,
    "num_target_layers": 42,
    "is_causal": False,
    "torch_dtype": "bfloat16",
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 75982,
        "target_layer_ids": [1, 10, 20, 30, 39],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}


def changed(**fields):
    """PUBLISHED with dotted fields set (`dflash_config__block_size=8`) or removed."""
    config = copy.deepcopy(PUBLISHED)
    for path, value in fields.items():
        *parents, last = path.split("__")
        at = config
        for parent in parents:
            if at.get(parent) is None:
                at[parent] = {}
            at = at[parent]
        if value is REMOVED:
            at.pop(last, None)
        else:
            at[last] = value
    return config


REMOVED = object()


TENSORS = expected_shapes(DFlash2Config.from_dict(PUBLISHED))


def read(**fields):
    """The config of a drafter that has DFlash 2's tensors."""
    raw = changed(**fields)
    check_agreement(DFlash2Config, raw, where="config.json")
    return DFlash2Config.from_dict(raw)


def refused(match, **fields):
    with pytest.raises(DFlash2Error, match=match):
        read(**fields)


def test_the_published_config_reads_as_described():
    config = read()
    assert config.block_size == 8 and config.num_draft_tokens == 7
    assert config.mask_token_id == 75982
    assert config.target_layer_ids == (1, 10, 20, 30, 39)
    assert config.num_target_layers == 42
    assert config.head_dim == 128 and config.rope_theta == 5e6
    assert config.layer_types == (FULL,) * 5 and config.sliding_window is None
    assert config.is_causal is False
    assert (config.conv_kernel_size, config.conv_group_size) == (2, 16)
    assert (config.selector_rank, config.selector_top_k) == (256, 16)
    assert config.output_multiplier == config.input_embedding_scale == 1.0
    assert config.final_logit_softcapping == 0.0
    assert not config.rope_interleaved and config.quantization is None


NESTED = "dflash_config__"
PLACES = [
    ("block_size", 6, [f"{NESTED}block_size", "block_size", "dspark_block_size"]),
    (
        "mask_token_id",
        77,
        [f"{NESTED}mask_token_id", "mask_token_id", "dspark_noise_token_id"],
    ),
    (
        "target_layer_ids",
        [2, 9],
        [
            f"{NESTED}target_layer_ids",
            "target_layer_ids",
            "dspark_target_layer_ids",
        ],
    ),
    ("conv_kernel_size", 3, [f"{NESTED}conv_kernel_size", "conv_kernel_size"]),
    ("conv_group_size", 32, [f"{NESTED}conv_group_size", "conv_group_size"]),
    ("selector_rank", 64, [f"{NESTED}selector_rank", "selector_rank"]),
    ("selector_top_k", 9, [f"{NESTED}selector_top_k", "selector_top_k"]),
    (
        "rope_theta",
        2e5,
        ["rope_theta", "rope_parameters__rope_theta", "rope_scaling__rope_theta"],
    ),
    ("output_multiplier", 0.3, [f"{NESTED}output_multiplier", "output_multiplier"]),
    (
        "final_logit_softcapping",
        5.0,
        [f"{NESTED}final_logit_softcapping", "final_logit_softcapping"],
    ),
    (
        "input_embedding_scale",
        1.7,
        [f"{NESTED}input_embedding_scale", "input_embedding_scale"],
    ),
    (
        "is_causal",
        True,
        [
            "is_causal",
            "dflash_config__is_causal",
            "dflash_config__causal",
            "dflash_query_causal",
        ],
    ),
]
EVERY_PLACE = [(f, v, places, p) for f, v, places in PLACES for p in places]
OPTIONAL = {
    "output_multiplier",
    "final_logit_softcapping",
    "input_embedding_scale",
    "is_causal",
}


@pytest.mark.parametrize(
    ("field", "value", "places", "place"), EVERY_PLACE, ids=lambda value: str(value)
)
def test_a_field_is_read_from_each_of_its_places(field, value, places, place):
    fields = dict.fromkeys(places, REMOVED) | {place: value}
    found = getattr(read(**fields), field)
    assert found == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("field", "value", "places", "place"), EVERY_PLACE, ids=lambda value: str(value)
)
def test_null_in_one_place_leaves_the_others(field, value, places, place):
    fields = dict.fromkeys(places) | {place: value}
    found = getattr(read(**fields), field)
    assert found == (tuple(value) if isinstance(value, list) else value)


PAIRS = [
    (value, places, one, two)
    for _, value, places in PLACES
    for i, one in enumerate(places)
    for two in places[i + 1 :]
]


@pytest.mark.parametrize(
    ("value", "places", "one", "two"), PAIRS, ids=lambda value: str(value)
)
def test_two_places_that_disagree_are_both_named(value, places, one, two):
    other = {True: False}.get(value) if value is True else None
    if other is None:
        other = [3, 8] if isinstance(value, list) else value + 1
    names = [place.replace("__", r"\.") for place in (one, two)]
    fields = dict.fromkeys(places, REMOVED) | {one: value, two: other}
    refused(f"{names[0]} is .* but {names[1]} is", **fields)
    agreeing = dict.fromkeys(places, REMOVED) | {one: value, two: value}
    read(**agreeing)


@pytest.mark.parametrize(
    ("field", "places"), [(f, p) for f, _, p in PLACES if f not in OPTIONAL]
)
def test_a_field_that_changes_the_result_has_no_default(field, places):
    refused(f"{field}.* is missing", **dict.fromkeys(places, REMOVED))


@pytest.mark.parametrize(
    "field",
    [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
        "num_target_layers",
    ],
)
def test_a_size_has_no_default(field):
    refused(f"{field} is missing", **{field: REMOVED})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "2048"),
        ("hidden_size", 2048.0),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("block_size", 0),
        ("dflash_config__mask_token_id", -1),
        ("dflash_config__selector_top_k", 0),
        ("rope_theta", "5e6"),
        ("rope_theta", 0),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rms_norm_eps", -1e-6),
        ("is_causal", "false"),
        ("is_causal", 0),
        ("dflash_config__target_layer_ids", []),
        ("dflash_config__target_layer_ids", 5),
        ("dflash_config__target_layer_ids", ["1"]),
        ("dflash_config__target_layer_ids", [1, True]),
        ("dflash_config__final_logit_softcapping", True),
    ],
)
def test_a_wrong_type_or_range_names_the_place(field, value):
    removed = {"dflash_config__block_size": REMOVED} if field == "block_size" else {}
    refused(field.replace("__", r"\.") + " is ", **removed, **{field: value})


def test_a_block_must_draft_something():
    refused(
        "block_size 1 drafts nothing when row 1 is the first",
        dflash_config__block_size=1,
    )
    assert read(dflash_config__block_size=2).num_draft_tokens == 1


@pytest.mark.parametrize(
    "part",
    ["dflash_config", "rope_parameters", "rope_scaling", "quantization"],
)
def test_a_part_that_is_no_object_is_refused(part):
    refused(f"{part} is 3, expected an object", **{part: 3})


def test_softcap_zero_and_null_are_off():
    for value in (0, 0.0, None):
        config = read(dflash_config__final_logit_softcapping=value)
        assert config.final_logit_softcapping == 0.0
    refused("must not be negative", dflash_config__final_logit_softcapping=-1)
    refused("output_multiplier must be above 0", dflash_config__output_multiplier=0)


def test_head_dim_defaults_to_hidden_over_heads():
    assert read(head_dim=REMOVED).head_dim == 128
    assert read(head_dim=64).head_dim == 64
    refused("head_dim is 63.*must be even", head_dim=63)


def test_the_output_dtype_is_never_read_from_the_config():
    without = read(torch_dtype=REMOVED)
    assert read(torch_dtype="float16") == without
    assert read(torch_dtype=REMOVED, dtype="float32") == without
    assert read(dflash_config__dtype="bfloat16") == without


# Rope


def test_rope_flat_nested_and_both_are_one_config():
    flat = read()
    nested = {"rope_theta": 5e6, "rope_type": "default"}
    assert read(rope_theta=REMOVED, rope_parameters=nested) == flat
    assert read(rope_parameters=nested) == flat
    assert read(rope_theta=REMOVED, rope_scaling={"rope_theta": 5000000}) == flat
    refused(
        r"rope_theta is 10000.* but rope_parameters\.rope_theta is 5000000",
        rope_theta=10000.0,
        rope_parameters=nested,
    )


PARTS = pytest.mark.parametrize("part", ["rope_parameters", "rope_scaling"])
YARN = {"factor": 4, "original_max_position_embeddings": 4096}


@PARTS
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_other_rope_types_are_refused(part, key):
    assert read(**{part: {key: "default"}}).rope_scaling is None
    refused(f"{part}.{key} is 'llama3'", **{part: {key: "llama3", "factor": 4}})


@PARTS
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_yarn_is_read_in_each_spelling(part, key):
    found = read(**{part: {key: "yarn", "beta_fast": 16} | YARN}).rope_scaling
    assert found == {"rope_type": "yarn", "beta_fast": 16} | YARN
    assert read(**{part: {key: "yarn", "truncate": True} | YARN}).rope_scaling == {
        "rope_type": "yarn",
        **YARN,
    }


@PARTS
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"factor": None}, "factor.* is missing"),
        ({"factor": 0.5}, "factor is 0.5, expected a finite number of at least 1"),
        ({"original_max_position_embeddings": None}, "original_max.* is missing"),
        ({"original_max_position_embeddings": "x"}, "original_max.* is 'x', expected"),
        ({"beta_slow": "1"}, "beta_slow is '1', expected a number"),
        ({"mscale": 0.7}, "mscale is 0.7; yarn with it is not supported"),
        ({"attention_factor": 1.2}, "attention_factor is 1.2; yarn with it is not"),
        ({"truncate": False}, "yarn with truncate false is not supported"),
    ],
)
def test_yarn_has_what_it_needs_and_nothing_unknown(part, changes, match):
    refused(match, **{part: {"rope_type": "yarn"} | YARN | changes})


def test_yarn_in_two_places_must_agree():
    yarn = {"rope_type": "yarn"} | YARN
    assert read(rope_parameters=yarn, rope_scaling=yarn).rope_scaling == yarn
    refused(
        r"rope_parameters\.factor is 4 but rope_scaling\.factor is 8",
        rope_parameters=yarn,
        rope_scaling=yarn | {"factor": 8},
    )


def test_a_rope_factor_without_a_type_is_refused():
    read(rope_scaling={"factor": 1.0})
    refused("rope_scaling.factor is 4", rope_scaling={"factor": 4})


def test_the_longest_position_is_a_number_or_absent():
    assert read().max_position_embeddings is None
    assert read(max_position_embeddings=4096).max_position_embeddings == 4096
    refused("max_position_embeddings is 'x'", max_position_embeddings="x")


@pytest.mark.parametrize("place", ["is_neox_style", "rope_is_neox_style"])
def test_interleaved_rope_is_read(place):
    assert read(**{place: False}).rope_interleaved
    assert not read(**{place: True}).rope_interleaved


def test_rope_styles_that_disagree_are_refused():
    refused("is_neox_style is True", is_neox_style=True, rope_is_neox_style=False)


# Layers, windows and causality


@pytest.mark.parametrize("causal", [None, False, True])
def test_without_a_word_only_sliding_layers_are_causal(causal):
    types = [FULL, SLIDING, FULL, SLIDING, SLIDING]
    config = read(layer_types=types, sliding_window=64, is_causal=causal)
    found = [config.layer_is_causal(layer) for layer in range(5)]
    assert found == [t == SLIDING if causal is None else causal for t in types]
    windows = [config.layer_window(layer) for layer in range(5)]
    assert windows == [64 if t == SLIDING else None for t in types]


def test_a_non_causal_window_is_the_negation():
    assert read(is_causal=None, sliding_window_non_causal=True).is_causal is False
    assert read(is_causal=None, sliding_window_non_causal=False).is_causal is True
    assert read(is_causal=True, sliding_window_non_causal=False).is_causal is True
    refused(
        "sliding_window_non_causal is True but",
        is_causal=True,
        sliding_window_non_causal=True,
    )


def test_layer_types_decide_over_use_sliding_window():
    types = [SLIDING] * 5
    config = read(layer_types=types, sliding_window=64, use_sliding_window=False)
    assert config.layer_types == tuple(types) and config.sliding_window == 64
    refused("layer_types is missing", use_sliding_window=True, sliding_window=64)


def test_a_sliding_layer_needs_its_window():
    refused("sliding_window.* is missing", layer_types=[SLIDING] * 5)
    refused(
        "sliding_window 7 is smaller than block_size 8",
        layer_types=[SLIDING] * 5,
        sliding_window=7,
    )
    assert read(layer_types=[SLIDING] * 5, sliding_window=8).sliding_window == 8


def test_the_nested_window_spelling_is_read():
    config = read(dflash_config__use_swa=True, dflash_config__swa_window_size=99)
    assert config.layer_types == (SLIDING,) * 5 and config.sliding_window == 99
    assert read(dflash_config__use_swa=False).layer_types == (FULL,) * 5
    refused(
        "sliding_window is 64 but dflash_config.swa_window_size is 99",
        dflash_config__use_swa=True,
        dflash_config__swa_window_size=99,
        sliding_window=64,
    )
    refused("use_swa is True but", dflash_config__use_swa=True, layer_types=[FULL] * 5)


def test_layer_types_must_fit():
    refused("layer_types must list 5 layers", layer_types=[FULL] * 4)
    refused("layer_types must list 5 layers", layer_types=FULL)
    refused("layer_types has .*'linear'", layer_types=[FULL] * 4 + ["linear"])


# Taps and depth


def test_depth_is_found_in_each_spelling():
    assert (
        read(target_num_hidden_layers=42, num_target_layers=5).num_target_layers == 42
    )
    assert read(target_num_hidden_layers=42).num_target_layers == 42
    alone = read(target_num_hidden_layers=42, num_target_layers=REMOVED)
    assert alone.num_target_layers == 42
    nested = read(num_target_layers=REMOVED, dflash_config__num_target_layers=42)
    assert nested.num_target_layers == 42


def test_a_count_of_taps_beside_the_depth_is_no_contradiction():
    counted = read(num_target_layers=5, dflash_config__num_target_layers=42)
    assert counted.num_target_layers == 42
    refused("num_target_layers 5 is the number of taps", num_target_layers=5)


def test_depths_that_disagree_are_refused():
    refused(
        "num_target_layers is 40 but num_target_layers is 42",
        dflash_config__num_target_layers=40,
    )
    refused(
        "target_num_hidden_layers is 40 but num_target_layers is 42",
        target_num_hidden_layers=40,
    )


def test_a_small_target_may_have_as_many_layers_as_taps():
    config = read(num_target_layers=3, dflash_config__target_layer_ids=[0, 1, 1])
    assert config.num_target_layers == 3


def test_taps_keep_their_order():
    taps = [30, 1, 20]
    config = read(dflash_config__target_layer_ids=taps)
    assert config.target_layer_ids == (30, 1, 20)


@pytest.mark.parametrize(
    ("tap", "match"),
    [
        (41, "has 41.*must be 0 to 40.*before or after the final norm"),
        (42, "has 42.*must be 0 to 40$"),
        (-1, "has -1.*must be 0 to 40$"),
    ],
)
def test_a_tap_outside_the_target_is_refused(tap, match):
    refused(match, dflash_config__target_layer_ids=[1, tap])


# Other networks


@pytest.mark.parametrize(
    "name",
    [
        "DFlashDraftModel",
        "Qwen3DSparkModel",
        "DFlash2DSparkModel",
        "LlamaForCausalLM",
        "Eagle3Speculator",
    ],
)
def test_other_architectures_are_named(name):
    refused(f"architectures names {name}", architectures=[name])
    refused(f"architectures names {name}", architectures=name)
    refused(f"names {name}", architectures=["DFlash2DraftModel", name])


def test_a_config_without_architectures_is_left_to_its_tensors():
    assert read(architectures=REMOVED) == read(architectures=[]) == read()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("markov_rank", 256),
        ("markov_head_type", "vanilla"),
        ("enable_confidence_head", True),
        ("dspark_config", {"markov_rank": 256}),
        ("dflash_config__markov_rank", 256),
    ],
)
def test_a_hybrid_with_dspark_is_refused(field, value):
    refused("belongs to DSpark", **{field: value})


@pytest.mark.parametrize("field", ["conv_kernel_size", "selector_top_k"])
@pytest.mark.parametrize("part", ["", "dflash_config__"])
def test_a_dflash_config_with_dflash_2_fields_is_refused(part, field):
    own = ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]
    none = {f"dflash_config__{name}": REMOVED for name in own}
    plain = changed(architectures=["DFlashDraftModel"], **none)
    check_agreement(DFlashConfig, plain, where="config.json")
    mixed = changed(
        **{"architectures": ["DFlashDraftModel"]} | none | {part + field: 2}
    )
    with pytest.raises(DFlash2Error, match=f"{field} is 2, which belongs to DFlash 2"):
        check_agreement(DFlashConfig, mixed, where="config.json")


def test_fields_switched_off_make_no_hybrid():
    assert read(markov_rank=0, enable_confidence_head=False) == read()


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("hidden_act", "gelu", "silu"),
        ("attention_bias", True, False),
        ("mlp_bias", True, False),
        ("partial_rotary_factor", 0.5, 1.0),
        ("rope_parameters__partial_rotary_factor", 0.5, 1.0),
        ("dflash_config__projector_type", "dspark", "dflash2"),
        ("transformer_layer_config", {"a": 1}, None),
        ("speculators_config", {"a": 1}, {}),
        ("draft_vocab_size", 32000, 130560),
        ("quantization_config", {"quant_method": "awq"}, None),
    ],
)
def test_what_the_network_does_not_compute_is_refused(field, value, supported):
    refused("support", **{field: value})
    assert read(**{field: supported}) == read()


@pytest.mark.parametrize("part", ["", "dflash_config__"])
@pytest.mark.parametrize(
    ("field", "anchors", "next_row"),
    [("logits_start", 0, 1), ("sample_from_anchor", True, False)],
)
def test_dflash_2_never_drafts_from_the_anchors_row(part, field, anchors, next_row):
    silent, said = read(), read(**{part + field: next_row})
    assert (silent.first_row, silent.explicit_first_row) == (1, False)
    assert (said.first_row, said.explicit_first_row) == (1, True)
    refused("not supported for DFlash 2", **{part + field: anchors})


def test_quantization_is_read_in_mlx_spelling():
    config = read(quantization={"group_size": 64, "bits": 4, "mode": "affine"})
    assert config.quantization == {"group_size": 64, "bits": 4}
    refused("mode must be affine", quantization={"group_size": 32, "bits": 4} | FP4)
    refused(r"quantization\.bits is missing", quantization={"group_size": 32})


FP4 = {"mode": "mxfp4"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_key_value_heads": 3}, "16, not a multiple of num_key_value_heads 3"),
        ({"dflash_config__conv_group_size": 24}, "24 does not divide hidden_size 2048"),
        ({"dflash_config__mask_token_id": 130560}, "outside the vocabulary of 130560"),
        ({"vocab_size": 75983, "dflash_config__selector_top_k": 75984}, "exceeds"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(fields, match):
    refused(match, **fields)


def test_nothing_a_config_names_is_imported(tmp_path):
    trap = tmp_path / "trap.txt"
    (tmp_path / "evil.py").write_text(f"open({str(trap)!r}, 'w').close()")
    config = changed(auto_map={"AutoModel": "evil.Model"}, model_file="evil.py")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_drafter_config(tmp_path, tensors=TENSORS) == read()
    assert not trap.exists()


# Files


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed(hidden_size=REMOVED)))
    where = str(tmp_path / "config.json")
    with pytest.raises(DFlash2Error, match=f"{where}: hidden_size is missing"):
        read_drafter_config(tmp_path, tensors=TENSORS)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no such file"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content, match):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DFlash2Error, match=match):
        read_json(tmp_path / "config.json")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    with pytest.raises(DFlash2Error, match="cannot be read"):
        read_json(tmp_path)
