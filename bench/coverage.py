"""Whether the right tokens were among a drafter's candidates, cycle by cycle."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .record import Coverage

if TYPE_CHECKING:
    from .engine import Run


@dataclass(frozen=True)
class Cycle:
    """A cycle of a run, held against what plain decoding emitted.

    Attributes:
        anchor: Index of its anchor among the emitted tokens.
        emitted: Tokens it gave out.
        right: What belongs in the slots it drafted, as far as that is known.
    """

    anchor: int
    emitted: int
    right: list[int]


def cycles_on_path(run: "Run", plain: Sequence[int]) -> list[Cycle]:
    """The cycles of a run that began where plain decoding went as well.

    Args:
        run: All of its tokens but the first come from cycles.
        plain: What plain decoding emitted.
    """
    assert not run.stats.plain_steps, "between plain steps no anchor is known"
    cycles, anchor = [], 0
    for drafted, emitted in zip(
        run.stats.drafted_per_cycle, run.stats.emitted_per_cycle, strict=True
    ):
        if list(run.tokens[: anchor + 1]) != list(plain[: anchor + 1]):
            break
        right = list(plain[anchor + 1 : anchor + 1 + drafted])
        cycles.append(Cycle(anchor, emitted, right))
        anchor += emitted
    return cycles


def covered(cycle: Cycle, candidates: Iterable[Sequence[int]]) -> list[bool]:
    """Whether the right token of each slot was a candidate.

    Args:
        candidates: Of each slot, at least as many slots as have a right token.
    """
    return [
        token in set(known)
        for token, known in zip(cycle.right, candidates, strict=False)
    ]


def count_coverage(cycles: Sequence[Sequence[bool]], width: int) -> Coverage:
    """Counts over cycles, each given by whether its slots were covered.

    Args:
        width: Slots of the arm.
    """
    return Coverage(
        trials=[sum(len(slots) > k for slots in cycles) for k in range(width)],
        hits=[sum(any(slots[k : k + 1]) for slots in cycles) for k in range(width)],
        reachable_per_cycle=[[*slots, False].index(False) for slots in cycles],
    )
