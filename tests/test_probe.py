"""The probe names the field that is read wrongly, and leaves right readings alone."""

import json
import shutil
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.probe import Score, _read_as, diagnose, near_misses

FAMILIES = ("dflash2", "dflash", "dspark")
TAPS = {"layers": 6, "taps": (1, 3)}


@pytest.fixture(scope="module")
def probed(pair, tmp_path_factory):
    """`probed(changes, **options)`: the diagnosis of a config.json with changes."""

    def probe(changes=None, kind="oracle", **options):
        made = pair(kind, eos="off", **options)
        folder = made.drafter
        if changes:
            folder = tmp_path_factory.mktemp("misread") / "drafter"
            shutil.copytree(made.drafter, folder)
            path = folder / "config.json"
            config = json.loads(path.read_text())
            nested = changes.pop("dflash_config", {})
            config |= changes
            if nested:
                config["dflash_config"] |= nested
            path.write_text(json.dumps(config))
        target, _ = load_target(made.target)
        drafter = load_drafter(folder, target)
        draw = (
            made.oracle.prompt
            if made.oracle
            else lambda length, start: [
                (7 + start * i) % 500 + 8 for i in range(length)
            ]
        )
        prompts = [draw(24, start=start) for start in (1, 2)]
        return diagnose(target, drafter, prompts, tokens=12)

    return probe


def taps(family, ids):
    changes = {"target_layer_ids": ids}
    return changes if family == "dspark" else {"dflash_config": changes}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [TAPS, {"rope_theta": 5e6}, {"partial": 0.3}])
def test_a_right_reading_is_healthy(probed, family, options):
    diagnosis = probed(family=family, **options)
    assert diagnosis.better is None
    assert diagnosis.configured.mean > (1.2 if "partial" in options else 6.9)
    fields = {score.reading.field for score in diagnosis.others}
    assert {"is_neox_style", "is_causal", "dtype"} <= fields
    assert ("target_layer_ids" in fields) == (options is TAPS)
    assert ("rope_theta" in fields) == ("rope_theta" in options)
    assert ("logits_start" in fields) == (family != "dflash2")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_off_by_one_are_found(probed, family, shift):
    wrong = [tap + shift for tap in TAPS["taps"]]
    diagnosis = probed(taps(family, wrong), family=family, **TAPS)
    assert_found(diagnosis, "target_layer_ids", "[1, 3]")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_rope_base_is_found(probed, family):
    diagnosis = probed({"rope_theta": 5e6}, family=family)
    assert_found(diagnosis, "rope_theta", "10000")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rope_base_unlike_the_targets_is_found(probed, family):
    # At some lags the wrong base finds the next source, which row 0 then makes right.
    diagnosis = probed({"rope_theta": 10000.0}, family=family, rope_theta=5e6, lag=9)
    assert_found(diagnosis, "rope_theta", "5000000")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_wrong_rope_layout_is_found(probed, family):
    diagnosis = probed({"is_neox_style": False}, family=family)
    assert_found(diagnosis, "is_neox_style", "true")


@pytest.mark.parametrize(
    ("options", "wrong", "right"),
    [
        ({"family": "dspark"}, {"sample_from_anchor": False}, "0"),
        ({"family": "dspark", "block_size": 8, "first_row": 1}, {}, "1"),
        ({"family": "dflash"}, {"logits_start": 0}, "1"),
    ],
)
def test_the_wrong_anchor_row_is_found(probed, options, wrong, right):
    wrong = wrong or {"sample_from_anchor": True}
    assert_found(probed(wrong, **options), "logits_start", right)


def assert_found(diagnosis, field, value):
    better = diagnosis.better
    assert better is not None, [(s.reading, s.mean) for s in diagnosis.others]
    assert (better.reading.field, better.reading.value) == (field, value)
    assert better.mean > 6.9 > 2 > diagnosis.configured.mean


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_drafter_accepts_nothing_under_any_reading(probed, family):
    diagnosis = probed(kind="random", family=family)
    assert diagnosis.better is None
    assert diagnosis.configured.mean < 0.2


def test_a_quantized_drafter_is_probed_as_it_is(pair):
    made = pair(hidden=128, eos="off")
    target, _ = load_target(made.target)
    drafter = load_drafter(made.drafter, target, bits=8)
    diagnosis = diagnose(target, drafter, [made.oracle.prompt(24)], tokens=9)
    assert diagnosis.configured.mean > 6


def test_every_reading_is_measured_at_the_same_anchors(probed):
    diagnosis = probed(family="dspark", block_size=4)
    counts = {len(score.accepted) for score in diagnosis.others}
    assert counts == {len(diagnosis.configured.accepted)} == {8}


def test_a_near_miss_differs_in_one_field(pair):
    made = pair(**TAPS, rope_theta=5e6, family="dspark")
    target, _ = load_target(made.target)
    config = load_drafter(made.drafter, target).config
    changed = {
        "target_layer_ids": "target_layer_ids",
        "logits_start": "first_row",
        "rope_theta": "rope_theta",
        "is_neox_style": "rope_interleaved",
        "is_causal": "is_causal",
    }
    for reading in near_misses(config, 10000.0):
        name = changed.get(reading.field)
        back = {} if name is None else {name: getattr(config, name)}
        assert (reading.config != config) == (name is not None)
        assert replace(reading.config, **back) == config


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("is_causal", [None, True])
def test_every_near_miss_but_the_type_is_another_network(pair, family, is_causal):
    made = pair("random", family=family, is_causal=is_causal, rope_theta=5e6)
    target, _ = load_target(made.target)
    drafter = load_drafter(made.drafter, target)
    size = drafter.config.hidden_size
    features = mx.random.normal((1, 12, len(made.options.taps) * size))
    block = mx.random.normal((1, drafter.config.block_size, size))

    def hidden(network):
        context = network.make_context()
        network.extend(features, context)
        return network.hidden(block, context)

    expected, seen = hidden(drafter), set()
    for reading in near_misses(drafter.config, 10000.0):
        gap = mx.abs(hidden(_read_as(drafter, reading)) - expected).max().item()
        if reading.field in ("rope_theta", "is_neox_style", "is_causal"):
            assert gap > 0.1
        elif reading.field == "dtype":
            assert 0 < gap < 0.1
        seen.add(reading.field)
    assert {"rope_theta", "is_neox_style", "is_causal", "dtype"} <= seen


def test_a_gain_counts_when_it_is_large_and_certain():
    few = Score(None, (1, 1, 1, 1))
    assert Score(None, (2, 2, 2, 2)).beats(few)
    assert not Score(None, (1, 1, 1, 1)).beats(few)
    assert not Score(None, (5, 1, 0, 0)).beats(few)  # by chance
    even = Score(None, (1,) * 100)
    assert not Score(None, (1,) * 95 + (2,) * 5).beats(even)  # too little
