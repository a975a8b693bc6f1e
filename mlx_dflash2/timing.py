"""Times of several things, measured in turn."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")


def measure(
    parts: Mapping[Name, Callable[[], None]], rounds: int
) -> dict[Name, list[float]]:
    """Milliseconds of every part, in turn, once a round.

    Args:
        parts: Each waits until its work is done.
    """
    taken: dict[Name, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            taken[name].append((time.perf_counter() - began) * 1e3)
    return taken
