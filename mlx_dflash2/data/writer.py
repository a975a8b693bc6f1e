"""What writes text: a target behind one small protocol, whichever backend runs it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus of the distribution at temperature 1.
    """

    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Written:
    """What the target wrote after a prompt.

    Attributes:
        tokens: Without the token that ended it.
        finish_reason: "stop", or "length" when it was cut off.
    """

    tokens: list[int]
    finish_reason: str


class Writer(Protocol):
    """A target that continues many prompts at once."""

    def write(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> list[Written]:
        """Continue every prompt; the same again for the same arguments."""
        ...


def loops(tokens: Sequence[int], *, length: int = 20, most: int = 4) -> bool:
    """Whether some run of `length` tokens occurs more than `most` times."""
    runs = zip(*(tokens[start:] for start in range(length)), strict=False)
    return max(Counter(runs).values(), default=0) > most
