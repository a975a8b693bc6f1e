"""What a loss pass found, as sums: whoever has all of them takes the ratios."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from .objective import Objective

SMALLEST = 1e-6  # sum of weights; of a single slot far above it


@dataclass(frozen=True)
class LossReport:
    """Sums over slots, in float32; reports of several batches add up.

    Attributes:
        totals: Weighted sum of each term of the objective; carries the gradient.
        weights: What to divide each by.
        counts: Sums per slot, each of shape (G,), over its valid labels.
            `valid`: how many there are. `hits`: the drafter's best token is the label
            (DSpark: after the true token before). `recall`: the label is among the
            candidates, and `selector`: the selector's best after the true token
            before is the label (DFlash 2). Each of these three also as `hits_run` and
            so on: it holds in this slot and all before. `overlap`: sum min(p, q), where
            a term needs the target's distribution. `confidence`: the chance that the
            confidence head states, where that is a term.
    """

    totals: dict[str, Tensor]
    weights: dict[str, Tensor]
    counts: dict[str, Tensor]

    def __add__(self, other: Self) -> Self:
        return type(self)(
            *(
                {name: part + theirs[name] for name, part in ours.items()}
                for ours, theirs in (
                    (self.totals, other.totals),
                    (self.weights, other.weights),
                    (self.counts, other.counts),
                )
            )
        )

    def mean(self, term: str) -> Tensor:
        """A term's mean; 0 where it counted nothing. Shape: ()."""
        return self.totals[term] / self.weights[term].clamp(min=SMALLEST)

    def loss(self, objective: Objective, share: float | Tensor = 1.0) -> Tensor:
        """The mix of the terms' means. Shape: ().

        Args:
            objective: The one the report was made with.
            share: The part of this batch in an optimizer step of several: its
                `slot_weights` over those of all. The sum over them is then the loss
                of one large batch; only the selector's terms, whose weights are not
                known beforehand, are first averaged within each.
        """
        means = [weight * self.mean(term) for term, weight in objective.mix.items()]
        return torch.stack(means).sum() * share

    def detach(self) -> Self:
        """The same sums without the gradient."""
        return type(self)(
            {name: total.detach() for name, total in self.totals.items()},
            self.weights,
            self.counts,
        )
