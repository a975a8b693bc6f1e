"""What a cycle's parts cost at the middle of a finished run."""

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Protocol

from mlx_dflash2.timing import measure

from .record import Costs

WARM_UP = 2  # rounds: the first compiles and allocates


class Parts(Protocol):
    """A cycle's parts over caches that hold a context; each leaves them as they were.

    Attributes:
        length: Positions of the context.
    """

    length: int

    def forward(self, rows: int, *, tapped: bool = True) -> None:
        """A target forward and the choice of every row's token."""

    def draft(self, count: int) -> None:
        """One proposal of `count` tokens."""


def middle(prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Prompt and first half of the emitted tokens: the context to measure over."""
    return [*prompt, *tokens[: len(tokens) // 2]]


def measure_costs(parts: Parts, width: int, repeats: int) -> Costs:
    """Medians of the parts, measured in turn after a warm-up.

    Args:
        width: Drafted tokens a cycle verifies.
        repeats: Measurements of each part.
    """
    alone = {
        "decode": partial(parts.forward, 1, tapped=False),
        "verify": partial(parts.forward, width + 1),
        "draft": partial(parts.draft, width),
    }
    measure(alone, WARM_UP)
    taken = measure(alone, repeats)
    return Costs(parts.length, **{name: median(ms) for name, ms in taken.items()})
