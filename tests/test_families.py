"""The family comes from the tensors, and config.json must agree."""

import json
import shutil

import pytest
from command_line import answer, generate
from tiny import KINDS, OWN, drafter_config, drafter_numbers, drafter_raw

from mlx_dflash2.checkpoint import stored_tensors
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import check_agreement, family_of, read_drafter_config
from mlx_dflash2.names import check_tensors, expected_shapes, published_names

EACH = pytest.mark.parametrize("family", list(OWN))
NAMES = {family: list(expected_shapes(drafter_config(family=family))) for family in OWN}


def read(family, tmp_path, *, tensors=None, kind=None, **changes):
    """Read a folder of this family's tensors whose config.json has `changes`."""
    raw = drafter_raw(family=family) | changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    names = NAMES[family] if tensors is None else tensors
    return read_drafter_config(tmp_path, kind=kind, tensors=names)


@EACH
def test_the_tensors_tell_the_family(family, tmp_path):
    assert family_of(NAMES[family], where="drafter") is KINDS[family]
    config = read(family, tmp_path)
    assert type(config) is KINDS[family] and config.kind == family


@EACH
def test_one_tensor_of_its_own_is_enough(family):
    own = set(NAMES[family]) - set(NAMES["dflash"])
    for name in own:
        tensors = [*NAMES["dflash"], name]
        assert family_of(tensors, where="drafter") is KINDS[family]


@EACH
@pytest.mark.parametrize("architectures", [None, []])
def test_architectures_may_be_missing(family, tmp_path, architectures):
    assert read(family, tmp_path, architectures=architectures).kind == family


ARCHITECTURES = {
    "dflash": ["DFlashDraftModel", "DFlashModel", "Qwen3DFlashForCausalLM"],
    "dflash2": ["DFlash2DraftModel", "Qwen3DFlash2Model"],
    "dspark": ["Qwen3DSparkModel", "DSparkDraftModel", "DFlash2DSparkModel"],
}
CLAIMS = [(f, name) for f, names in ARCHITECTURES.items() for name in names]


@EACH
@pytest.mark.parametrize(("claimed", "name"), CLAIMS)
def test_the_architecture_must_be_of_the_tensors_family(
    family, tmp_path, claimed, name
):
    if claimed == family:
        assert read(family, tmp_path, architectures=[name]).kind == family
        return
    with pytest.raises(DFlash2Error) as refusal:
        read(family, tmp_path, architectures=[name])
    assert f"architectures names {name} ({KINDS[claimed].title})" in str(refusal.value)
    assert f"the tensors are those of {KINDS[family].title}" in str(refusal.value)


@EACH
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Eagle3Speculator"])
def test_an_unknown_architecture_is_refused(family, tmp_path, name):
    with pytest.raises(DFlash2Error, match=f"{name} .no family known here"):
        read(family, tmp_path, architectures=[name])


@EACH
@pytest.mark.parametrize("projector", list(OWN))
def test_the_projector_type_refines_a_dflash_architecture(family, tmp_path, projector):
    nested = drafter_raw(family=family)["dflash_config"] | {"projector_type": projector}
    changes = {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    if projector == family:
        assert read(family, tmp_path, **changes).kind == family
        return
    with pytest.raises(DFlash2Error, match=f"projector_type is '{projector}', but"):
        read(family, tmp_path, **changes)


@EACH
@pytest.mark.parametrize("kind", list(OWN))
def test_another_family_than_the_expected_one_is_an_error(family, tmp_path, kind):
    if kind == family:
        assert read(family, tmp_path, kind=kind).kind == family
        return
    title = KINDS[family].title
    with pytest.raises(DFlash2Error, match=rf"{title} drafter .*{kind} was expected"):
        read(family, tmp_path, kind=kind)


@pytest.mark.parametrize(
    ("family", "other"),
    [
        ("dflash", "dflash2"),
        ("dflash", "dspark"),
        ("dflash2", "dspark"),
        ("dspark", "dflash2"),
    ],
)
def test_settings_of_another_family_contradict_the_tensors(family, tmp_path, other):
    for name in KINDS[other].own_settings:
        value = {"dspark_config": {"x": 1}, "markov_head_type": "vanilla"}.get(name, 4)
        for changes in (
            {name: value},
            {"dflash_config": drafter_raw(family=family)["dflash_config"] | {name: 4}},
        ):
            match = f"{name} is .* belongs to {KINDS[other].title}, but the tensors"
            with pytest.raises(DFlash2Error, match=match):
                read(family, tmp_path, **changes)
        assert read(family, tmp_path, **{name: None}).kind == family


@pytest.mark.parametrize(
    ("one", "other"), [("dflash2", "dspark"), ("dspark", "dflash2")]
)
def test_a_hybrid_of_two_families_is_refused(tmp_path, one, other):
    tensors = NAMES[one] + [n for n in NAMES[other] if n not in NAMES[one]]
    with pytest.raises(DFlash2Error, match="holds .* of DFlash 2 and .* of DSpark"):
        read(one, tmp_path, tensors=tensors)


@pytest.mark.parametrize("head", ["gated", "rnn", "Vanilla2"])
@pytest.mark.parametrize("part", ["", "dflash_config", "dspark_config"])
def test_other_markov_heads_are_refused(tmp_path, head, part):
    changes = {"markov_head_type": head}
    if part:
        changes = {part: changes, "markov_head_type": None}
    with pytest.raises(DFlash2Error, match=f"markov_head_type is '{head}'; only"):
        read("dspark", tmp_path, **changes)


def test_a_head_of_more_tensors_is_refused():
    config = drafter_config(family="dspark")
    shapes = expected_shapes(config) | {"markov_head.gate_proj.weight": (8, 72)}
    with pytest.raises(DFlash2Error, match="not a DSpark drafter: unknown markov_head"):
        check_tensors(shapes, config, where="drafter")


def test_the_confidence_head_must_be_there_just_when_it_is_enabled():
    both, none = (
        drafter_config(family="dspark", enable_confidence_head=enabled)
        for enabled in (True, False)
    )
    for config, match in (
        (both, "missing confidence_head.proj.bias"),
        (none, "unknown confidence_head.proj.bias"),
    ):
        other = none if config is both else both
        with pytest.raises(DFlash2Error, match=match):
            check_tensors(expected_shapes(other), config, where="drafter")


@EACH
def test_reduced_vocabularies_are_refused(family, tmp_path):
    assert read(family, tmp_path, draft_vocab_size=256).vocab_size == 256
    with pytest.raises(DFlash2Error, match="draft_vocab_size 128 differs.*reduced"):
        read(family, tmp_path, draft_vocab_size=128)
    config = drafter_config(family=family)
    for table in ("d2t", "t2d"):
        with pytest.raises(DFlash2Error, match=f"holds {table}.*reduced vocab"):
            check_tensors(
                expected_shapes(config) | {table: (256,)}, config, where="drafter"
            )


@EACH
@pytest.mark.parametrize("part", ["transformer_layer_config", "speculators_config"])
def test_the_speculators_schema_is_refused_before_anything_else(family, tmp_path, part):
    changes = {part: {"a": 1}, "architectures": ["DFlashSpeculator"], "vocab_size": {}}
    with pytest.raises(DFlash2Error, match="the speculators schema is not supported"):
        read(family, tmp_path, **changes)


def test_a_folders_name_never_matters(tmp_path):
    from drafter_files import stored, write_drafter

    folder = tmp_path / "MiniCPM5-2B-DFlash2"
    config = drafter_config(family="dspark")
    numbers = drafter_numbers(config)
    write_drafter(
        folder,
        {name: stored(array, "float32") for name, array in numbers.items()},
        config=drafter_raw(family="dspark"),
    )
    moved = shutil.copytree(folder, tmp_path / "dflash")
    for each in (folder, moved):
        names = published_names(stored_tensors(each), where=str(each)).values()
        assert set(names) == set(NAMES["dspark"])
        assert read_drafter_config(each) == config
        with pytest.raises(DFlash2Error, match="dflash2 was expected"):
            read_drafter_config(each, kind="dflash2")


# Which row is first


FIRST_ROWS = {"dflash2": 1, "dflash": 1, "dspark": 0}


def with_setting(family, part, **setting):
    if not part:
        return setting
    return {part: drafter_raw(family=family).get(part, {}) | setting}


@EACH
def test_without_a_word_the_family_knows_the_first_row(family, tmp_path):
    config = read(family, tmp_path)
    assert config.first_row == FIRST_ROWS[family]
    assert config.explicit_first_row is False


WHERE = [(f, part) for f in OWN for part in ("", "dflash_config")]
WHERE.append(("dspark", "dspark_config"))


@pytest.mark.parametrize(("family", "part"), WHERE)
@pytest.mark.parametrize("row", [0, 1])
def test_the_first_row_is_read_in_both_words_and_every_place(
    family, tmp_path, part, row
):
    for setting in ({"logits_start": row}, {"sample_from_anchor": row == 0}):
        changes = with_setting(family, part, **setting)
        if (family, row) == ("dflash2", 0):
            with pytest.raises(DFlash2Error, match="not supported for DFlash 2"):
                read(family, tmp_path, **changes)
            continue
        config = read(family, tmp_path, **changes)
        assert (config.first_row, config.explicit_first_row) == (row, True)
        assert config.num_draft_tokens == config.block_size - row


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_first_rows_that_disagree_are_refused(family, tmp_path):
    nested = drafter_raw(family=family)["dflash_config"]
    for changes in (
        {"logits_start": 0, "sample_from_anchor": False},
        {"logits_start": 1, "dflash_config": nested | {"logits_start": 0}},
        {
            "sample_from_anchor": True,
            "dflash_config": nested | {"sample_from_anchor": False},
        },
    ):
        with pytest.raises(DFlash2Error, match="contradict each other"):
            read(family, tmp_path, **changes)
    with pytest.raises(DFlash2Error, match="logits_start is 2, expected 0 or 1"):
        read(family, tmp_path, logits_start=2)


@EACH
def test_published_blocks_of_every_family_draft_seven_and_verify_eight(family):
    config = drafter_config(family=family)
    assert config.block_size == (7 if family == "dspark" else 8)
    assert config.num_draft_tokens == 7


def test_dspark_blocks_of_one_row_draft_one_token():
    assert drafter_config(family="dspark", block_size=1).num_draft_tokens == 1


# Causality


@EACH
@pytest.mark.parametrize("causal", [None, False, True])
def test_dspark_rows_see_each_other_unless_marked(family, causal):
    config = drafter_config("mixed", family, is_causal=causal)
    unsaid = [family != "dspark", False]
    found = [config.layer_is_causal(layer) for layer in range(2)]
    assert found == (unsaid if causal is None else [causal] * 2)


# The agreement itself


@EACH
def test_an_agreeing_config_passes(family):
    check_agreement(KINDS[family], drafter_raw(family=family), where="config.json")


def test_published_dspark_has_62_tensors_and_324_million_parameters():
    config = drafter_config(
        family="dspark",
        hidden_size=2048,
        num_hidden_layers=5,
        intermediate_size=6144,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=130560,
        num_target_layers=42,
        target_layer_ids=[1, 10, 20, 30, 39],
        layer_types=["full_attention"] * 5,
        markov_rank=256,
        mask_token_id=75982,
    )
    shapes = expected_shapes(config)
    sizes = [
        shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes.values()
    ]
    assert (len(shapes), sum(sizes)) == (62, 323_776_001)


# What is printed


@EACH
@pytest.mark.parametrize("stated", [False, True])
def test_verbose_names_the_family_and_who_says_which_row_is_first(family, stated, pair):
    row = FIRST_ROWS[family]
    said = {"draft_config": {"logits_start": row}} if stated else {}
    made = pair(kind="random", family=family, **said)
    shown = generate(made, "a", "-m", 9, "--verbose").stderr
    assert f", {KINDS[family].title}, " in shown
    assert "block size 8 (7 drafted), row" in shown
    who = "config.json" if stated else "its family"
    assert f"row {row} is the first to predict (says {who})" in shown


@EACH
@pytest.mark.parametrize("block", [2, 5, 8])
def test_a_block_size_counts_the_rows_of_a_verify_in_every_family(family, block, pair):
    made = pair(kind="random", family=family)
    by_rows = answer(made, "a", "-m", 12, "--block-size", block)
    by_drafts = answer(made, "a", "-m", 12, "--num-draft-tokens", block - 1)
    for found in (by_rows, by_drafts):
        assert found["draft_kind"] == family
        assert found["block_size"] == block
        assert found["num_draft_tokens"] == block - 1
        assert max(found["stats"]["emitted_per_cycle"]) <= block
    assert by_rows["tokens"] == by_drafts["tokens"]
    assert by_rows["stats"] == by_drafts["stats"]
