"""The loss of a batch of blocks, in chunks: the logits of all never exist at once."""

from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..drafter import Drafter
from ..target import Target
from .blocks import Blocks
from .heads import Heads
from .objective import Objective
from .report import LossReport
from .slots import Slots
from .terms import measure


@dataclass(frozen=True)
class Criterion:
    """Measures what a drafter says against what it should.

    Attributes:
        drafter: Its head, and its selector or Markov head, are trained with it.
        target: The teacher, and the owner of the head.
        objective: Checked against the drafter's config by whoever reads it.
        chunk: Blocks whose logits exist at a time. Their gradient computes them a
            second time, unless one chunk holds all blocks.
        head_tokens: Token ids to which the vocabulary is cut, together with every
            label of the batch; None for all of it. `Heads` says what that means.
    """

    drafter: Drafter
    target: Target
    objective: Objective
    chunk: int = 16
    head_tokens: Tensor | None = None

    def __call__(self, hidden: Tensor, last: Tensor, blocks: Blocks) -> LossReport:
        """Losses and counts of a batch.

        Args:
            hidden: Post-norm rows of the slots. Shape: (B, N, G, D).
            last: The target's rows after its final norm. Shape: (B, S, D).
            blocks: N of each row.
        """
        slots = Slots.of(hidden, last, blocks)
        heads = Heads(self.drafter, self.target, self._tokens(slots))
        if len(slots) <= self.chunk:
            return measure(heads, self.objective, slots)
        return reduce(
            add,
            (
                checkpoint(
                    measure,
                    heads,
                    self.objective,
                    slots[start : start + self.chunk],
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
                for start in range(0, len(slots), self.chunk)
            ),
        )

    def _tokens(self, slots: Slots) -> Tensor | None:
        if self.head_tokens is None:
            return None
        return torch.cat([self.head_tokens, slots.labels[slots.valid]]).unique()
