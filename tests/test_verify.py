"""Comparing with plain decoding: what is reported, and how large a gap is."""

import math
from dataclasses import dataclass

import mlx.core as mx
import pytest

from mlx_dflash2.comparison import Comparison
from mlx_dflash2.verify import compare


@dataclass
class Plain:
    """What `compare` reads of a response."""

    token: int
    logits: mx.array


def plain(tokens, gap=1.0, dtype=mx.float32, top=4.0):
    """Responses whose best token leads every other one by `gap`."""
    for token in tokens:
        logits = mx.full((10,), top - gap)
        logits[token] = top
        yield Plain(token, logits.astype(dtype))


def test_equal_tokens_are_identical():
    found = compare([1, 2, 3], plain([1, 2, 3]))
    assert found == Comparison()
    assert found.identical and found.kind == "identical" and not found.near_tie
    assert found.as_dict() == {
        "identical": True,
        "kind": "identical",
        "position": None,
        "plain": None,
        "speculative": None,
        "plain_logit": None,
        "speculative_logit": None,
        "gap": None,
        "ulps": None,
    }
    assert str(found) == "identical to plain decoding"


def test_a_clear_gap_is_a_difference():
    found = compare([1, 2, 4, 9], plain([1, 2, 3, 9], gap=0.5))
    assert (found.position, found.plain, found.speculative) == (2, 3, 4)
    assert (found.plain_logit, found.speculative_logit, found.gap) == (4.0, 3.5, 0.5)
    assert found.kind == "difference"
    assert "first split at token 2" in str(found)
    assert "plain decoding has 3, speculative 4; logits 4 and 3.5, gap 0.5" in str(
        found
    )


@pytest.mark.parametrize("gap", [0.0, 4e-4, 9e-4])
def test_a_gap_below_a_thousandth_is_a_near_tie(gap):
    found = compare([1, 4], plain([1, 3], gap=gap))
    assert found.kind == "near tie"
    assert found.gap == pytest.approx(gap, abs=1e-6)
    assert not found.identical


def test_two_units_in_the_last_place_are_a_near_tie_in_bfloat16():
    unit = 2.0**4 / 128  # of a bfloat16 between 16 and 32
    for units, kind in ((1, "near tie"), (2, "near tie"), (3, "difference")):
        responses = plain([3], gap=units * unit, dtype=mx.bfloat16, top=20.0)
        found = compare([4], responses)
        assert (found.ulps, found.kind) == (units, kind)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(mx.float32, 23), (mx.bfloat16, 7), (mx.float16, 10)]
)
@pytest.mark.parametrize("top", [1.0, 1.5, 8.0, 20.0, 0.25, -1.0, -3.0])
def test_units_in_the_last_place_are_those_of_the_larger_logit(dtype, bits, top):
    step = 1.0 if top > 0 else 0.5
    largest = max(abs(top), abs(top - step))
    unit = 2.0 ** (math.floor(math.log2(largest)) - bits)
    found = compare([4], plain([3], gap=step, dtype=dtype, top=top))
    assert found.gap == step
    assert found.ulps == pytest.approx(step / unit, rel=1e-6)


def test_a_logit_just_below_a_power_of_two_has_the_smaller_unit():
    below = 8 - 2.0**-21  # the largest float32 below 8
    logits = mx.array([below, below - 2.0**-21, 0.0])
    found = compare([1], iter([Plain(0, logits)]))
    assert found.ulps == 1.0


def test_a_tie_of_zeros_is_a_gap_of_zero():
    found = compare([1], iter([Plain(0, mx.zeros((3,)))]))
    assert (found.gap, found.ulps, found.kind) == (0.0, 0.0, "near tie")


@pytest.mark.parametrize(
    ("ours", "theirs", "position", "left"),
    [
        ([1, 2], [1, 2, 3], 2, {"plain": 3, "speculative": None}),
        ([1, 2, 3], [1, 2], 2, {"plain": None, "speculative": 3}),
        ([], [1], 0, {"plain": 1, "speculative": None}),
    ],
    ids=["speculative", "plain", "empty"],
)
def test_one_that_ended_early_is_a_difference(ours, theirs, position, left):
    found = compare(ours, plain(theirs))
    assert found == Comparison(position, **left)
    assert found.kind == "difference"
    assert f"one decoding ended at token {position}" in str(found)


def test_plain_decoding_runs_only_as_far_as_the_first_difference():
    def limited():
        yield from plain([1, 2])
        raise AssertionError("read past the difference")

    assert compare([1, 5, 6], limited()).position == 1
