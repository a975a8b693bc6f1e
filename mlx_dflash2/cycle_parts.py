"""The parts of a cycle, each alone, over caches that hold a context."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import mlx.core as mx

from .decode import Decoding
from .drafter import Drafter, Draws
from .sampling import SamplingConfig, TokenRule
from .target import Target

Name = TypeVar("Name")


class CycleParts:
    """What a greedy cycle is made of.

    Every part waits for the device and leaves the caches as it found them.

    Args:
        drafter: None for the target's parts alone.
        tokens: The context.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        tokens: Sequence[int],
        *,
        prefill_step_size: int = 2048,
    ):
        self.target, self.drafter, self.length = target, drafter, len(tokens)
        held = Decoding(
            target,
            drafter,
            TokenRule(SamplingConfig()),
            seed=0,
            prefill_step_size=prefill_step_size,
        )
        [first] = held.run(tokens, max_tokens=1, eos=frozenset())
        self.anchor = first.tokens[0]
        self.cache, self.context, self.taps = held.cache, held.context, held.taps

    def forward(self, rows: int) -> None:
        """A target forward with its taps, and the choice of every row's token."""
        tokens = mx.full((1, rows), self.anchor, mx.int32)
        hidden, features = self.target.forward(tokens, self.cache, self.taps)
        chosen = mx.argmax(self.target.head(hidden), axis=-1)
        mx.eval(chosen, [] if features is None else features)
        self.target.roll_back(self.cache, self.length)

    def draft(self, count: int) -> None:
        """One proposal of `count` tokens."""
        proposal = self.drafter.propose(
            self.anchor, self.target, self.context, count=count
        )
        mx.eval(proposal.tokens)

    def decision(self, count: int) -> Callable[[], None]:
        """The part of a draft that chooses tokens from logits, random ones here."""
        config, anchor = self.drafter.config, mx.array([self.anchor])
        keys = mx.random.split(mx.random.key(0))
        hidden = mx.random.normal((count, config.hidden_size), key=keys[0])
        logits = mx.random.normal((count, config.vocab_size), key=keys[1])
        hidden = hidden.astype(self.drafter.dtype)
        logits = logits.astype(self.target.dtype)
        mx.eval(hidden, logits)

        def decide() -> None:
            mx.eval(self.drafter.decide(hidden, logits, anchor, Draws()).tokens)

        return decide


def measure(
    parts: Mapping[Name, Callable[[], None]], rounds: int
) -> dict[Name, list[float]]:
    """Milliseconds of every part, in turn, once a round."""
    taken: dict[Name, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            began = time.perf_counter()
            part()
            taken[name].append((time.perf_counter() - began) * 1e3)
    return taken
