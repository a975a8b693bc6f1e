"""Sums over the cycles of several generations."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from statistics import median

from mlx_dflash2.stats import AcceptanceStats

from .record import Coverage
from .results import Acceptance, Slot, SlotCoverage


def acceptance(counts: Sequence[AcceptanceStats], slots: int) -> Acceptance:
    """Add counts up; `slots` is what a cycle drafts at most."""
    cycles = [cycle for stats in counts for cycle in _cycles(stats)]
    drafted = sum(cycle[0] for cycle in cycles)
    accepted = sum(cycle[1] for cycle in cycles)
    emitted = sum(cycle[2] for cycle in cycles)
    histogram = [0] * (slots + 1)
    for _, kept, _ in cycles:
        histogram[kept] += 1
    return Acceptance(
        cycles=len(cycles),
        drafted=drafted,
        accepted=accepted,
        emitted=emitted,
        length=_ratio(emitted, len(cycles)),
        per_cycle=_ratio(accepted, len(cycles)),
        rate=_ratio(accepted, drafted),
        usual=median(cycle[0] for cycle in cycles) if cycles else None,
        slots=[_slot(cycles, slot) for slot in range(1, slots + 1)],
        histogram=histogram,
    )


def _cycles(stats: AcceptanceStats) -> Iterator[tuple[int, int, int]]:
    """Drafted, accepted and emitted tokens of each cycle."""
    return zip(
        stats.drafted_per_cycle,
        stats.accepted_per_cycle,
        stats.emitted_per_cycle,
        strict=True,
    )


def _slot(cycles: list[tuple[int, int, int]], slot: int) -> Slot:
    """A cycle that emitted no more than it accepted was cut by an end of sequence
    inside its drafted tokens: what stood behind was never judged."""
    judged = [
        accepted
        for drafted, accepted, emitted in cycles
        if slot <= (accepted if emitted == accepted else drafted)
    ]
    reached = sum(accepted >= slot - 1 for accepted in judged)
    hits = sum(accepted >= slot for accepted in judged)
    return Slot(_ratio(hits, reached), reached, _ratio(hits, len(judged)), len(judged))


def coverage(found: Sequence[Coverage | None]) -> SlotCoverage | None:
    """Add coverage up; None where a drafter has no candidates or no cycle was run."""
    measured = [each for each in found if each is not None]
    reachable = [count for each in measured for count in each.reachable_per_cycle]
    if not reachable:
        return None
    return SlotCoverage(
        _summed([each.trials for each in measured]),
        _summed([each.hits for each in measured]),
        1 + sum(reachable) / len(reachable),
    )


def _summed(rows: list[list[int]]) -> list[int]:
    """Per slot; a short generation may not have drafted the last ones."""
    return [sum(slot) for slot in zip_longest(*rows, fillvalue=0)]


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
