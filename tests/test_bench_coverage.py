"""Coverage is counted over the cycles that began on plain decoding's path."""

import pytest

from mlx_dflash2.bench.coverage import (
    Cycle,
    count_coverage,
    covered,
    cycles_on_path,
)
from mlx_dflash2.bench.engine import Run
from mlx_dflash2.bench.record import Coverage
from mlx_dflash2.stats import AcceptanceStats


def run_of(tokens, drafted, emitted, plain_steps=0):
    stats = AcceptanceStats(drafted, [e - 1 for e in emitted], emitted, plain_steps)
    return Run(tokens, "length", 0.0, 0.0, stats)


TOKENS = [10, 11, 12, 13, 14, 15, 16]
EMITTED = [2, 1, 3]  # anchors at 0, 2 and 3


def test_each_cycle_starts_after_what_came_before_it():
    run = run_of(TOKENS, [3, 3, 2], EMITTED)
    assert cycles_on_path(run, TOKENS) == [
        Cycle(0, 2, [11, 12, 13]),
        Cycle(2, 1, [13, 14, 15]),
        Cycle(3, 3, [14, 15]),
    ]


def test_slots_past_the_end_of_plain_decoding_have_no_right_token():
    run = run_of(TOKENS[:5], [3, 3, 3], [2, 1, 1])
    rights = [cycle.right for cycle in cycles_on_path(run, TOKENS[:5])]
    assert rights == [[11, 12, 13], [13, 14], [14]]


@pytest.mark.parametrize(("split", "kept"), [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3)])
def test_cycles_behind_a_split_count_nowhere(split, kept):
    tokens = [*TOKENS[:split], 99, *TOKENS[split + 1 :]]
    run = run_of(tokens, [3, 3, 2], EMITTED)
    cycles = cycles_on_path(run, TOKENS)
    assert cycles == cycles_on_path(run_of(TOKENS, [3, 3, 2], EMITTED), TOKENS)[:kept]


def test_a_run_longer_than_plain_decoding_counts_up_to_its_end():
    run = run_of(TOKENS, [3, 3, 2], EMITTED)
    assert [cycle.anchor for cycle in cycles_on_path(run, TOKENS[:3])] == [0, 2]


def test_a_run_with_plain_steps_between_its_cycles_is_not_replayed():
    with pytest.raises(AssertionError, match="plain steps"):
        cycles_on_path(run_of(TOKENS, [3], [2], plain_steps=4), TOKENS)


def test_a_slot_is_covered_by_its_own_candidates_only():
    cycle = Cycle(0, 1, [5, 6, 7])
    assert covered(cycle, [[5, 1], [5, 7], [7], [8]]) == [True, False, True]


def test_counts_by_slot_and_reach_up_to_the_first_slot_that_is_not_covered():
    cycles = [[True, True, True], [True, False, True], [False, True], [True], []]
    assert count_coverage(cycles, 4) == Coverage(
        trials=[4, 3, 2, 0], hits=[3, 2, 2, 0], reachable_per_cycle=[3, 1, 0, 1, 0]
    )
