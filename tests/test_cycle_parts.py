"""The parts of a cycle, each alone."""

import mlx.core as mx
import pytest
from tiny import (
    LAYER_TYPES,
    drafter_config,
    drafter_numbers,
    mlx_drafter,
    mlx_target,
)

from mlx_dflash2.cycle_parts import CycleParts
from mlx_dflash2.timing import measure

TOKENS = [7, 3, 40, 41, 5, 90, 17, 200, 33, 12, 6, 8, 9, 77, 21]


@pytest.fixture(scope="module")
def target():
    return mlx_target()


def tiny_drafter(family="dflash2", layers="full"):
    config = drafter_config(layers, family)
    return mlx_drafter(config, drafter_numbers(config))


def positions(parts):
    target = [held.offset for held in parts.cache]
    return target, [(held.rows, held.end) for held in parts.context]


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
@pytest.mark.parametrize("layers", LAYER_TYPES)
def test_every_part_leaves_the_caches_as_they_were(target, family, layers):
    drafter = tiny_drafter(family, layers)
    parts = CycleParts(target, drafter, TOKENS, prefill_step_size=4)
    before = positions(parts)
    assert before[0] == [len(TOKENS)] * target.num_layers
    assert {end for _, end in before[1]} == {len(TOKENS)}
    expected = drafter.propose(parts.anchor, target, parts.context).tokens.tolist()
    decide = parts.decision(3)
    for part in (
        lambda: parts.forward(9),
        lambda: parts.forward(1, tapped=False),
        lambda: parts.draft(7),
        decide,
    ):
        part()
        assert positions(parts) == before
    again = drafter.propose(parts.anchor, target, parts.context).tokens.tolist()
    assert again == expected


def test_the_anchor_is_what_the_target_writes_next(target):
    parts = CycleParts(target, None, TOKENS)
    hidden, _ = target.forward(mx.array([TOKENS]), target.make_cache())
    assert parts.anchor == mx.argmax(target.head(hidden)[0, -1]).item()


def test_only_a_tapped_forward_reads_taps(target, monkeypatch):
    seen, forward = [], type(target).forward

    def note(self, tokens, cache, taps=()):
        seen.append((tokens.shape, tuple(taps)))
        return forward(self, tokens, cache, taps)

    parts = CycleParts(target, tiny_drafter(), TOKENS)
    monkeypatch.setattr(type(target), "forward", note)
    parts.forward(5)
    parts.forward(2, tapped=False)
    assert seen == [((1, 5), (0, 2)), ((1, 2), ())]


def test_a_decision_gets_what_a_proposal_gives_it(target, monkeypatch):
    drafter, seen = tiny_drafter(), []
    decide = type(drafter).decide

    def note(self, hidden, logits, anchor, draws):
        seen.append([(a.shape, a.dtype) for a in (hidden, logits, anchor)])
        return decide(self, hidden, logits, anchor, draws)

    monkeypatch.setattr(type(drafter), "decide", note)
    parts = CycleParts(target, drafter, TOKENS)
    parts.draft(4)
    parts.decision(4)()
    assert seen[0] == seen[1]


def test_things_are_timed_in_turn():
    order = []
    parts = {name: lambda name=name: order.append(name) for name in "abc"}
    taken = measure(parts, 2)
    assert "".join(order) == "abcabc"
    assert list(taken) == ["a", "b", "c"]
    assert all(len(times) == 2 and min(times) >= 0 for times in taken.values())
