"""The parts of a cycle, each alone, over caches that hold a context."""

from collections.abc import Callable, Sequence

import mlx.core as mx

from .decode import Decoding
from .drafter import Drafter, Draws
from .sampling import SamplingConfig, TokenRule
from .target import Target


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

    def forward(self, rows: int, *, tapped: bool = True) -> None:
        """A target forward and the choice of every row's token.

        Args:
            tapped: Read the drafter's taps too, as a verify does.
        """
        tokens = mx.full((1, rows), self.anchor, mx.int32)
        taps = self.taps if tapped else ()
        hidden, features = self.target.forward(tokens, self.cache, taps)
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
