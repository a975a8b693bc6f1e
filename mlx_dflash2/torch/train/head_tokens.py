"""The part of the vocabulary that the losses of a step are computed over."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mlx_dflash2.data.rows import order

if TYPE_CHECKING:
    from mlx_dflash2.data.rows import Row

KEPT = 0.75  # of the part, at most


@dataclass(frozen=True)
class HeadTokens:
    """The most frequent tokens in every step, and all others in turn.

    Decoding chooses among the whole vocabulary. A token that no loss ever sees is
    never held down, and is drafted where nothing is sure; so none may be left out for
    good.

    Attributes:
        kept: Ids of the data's most frequent tokens.
        others: Of all other tokens, in random order.
        turn: How many of these a step has.
    """

    kept: Tensor
    others: Tensor
    turn: int

    @classmethod
    def of(
        cls, rows: Iterable["Row"], count: int, *, vocab: int, device: torch.device
    ) -> "HeadTokens":
        """A part of `count` tokens, or all there are.

        Args:
            rows: The data.
            vocab: Tokens of the target.
            device: Of the ids.
        """
        kept = frequent_tokens(rows, max(1, int(KEPT * count)))
        mixed = torch.from_numpy(order(vocab, seed=0, epoch=0))
        others = mixed[~torch.isin(mixed, kept)]
        turn = min(count - len(kept), len(others))
        return cls(kept.to(device), others.to(device), turn)

    def at(self, step: int) -> Tensor:
        """The ids of a step, each once; it depends on the step's number alone."""
        return torch.cat([self.kept, self.others.roll(-step * self.turn)[: self.turn]])


def frequent_tokens(rows: Iterable["Row"], count: int) -> Tensor:
    """The `count` most frequent supervised tokens, of equals the lower id; rising."""
    totals = np.zeros(0, np.int64)
    for row in rows:
        found = np.bincount(row.tokens[row.supervised], minlength=len(totals))
        found[: len(totals)] += totals
        totals = found
    best = np.argsort(-totals, kind="stable")[:count]
    return torch.from_numpy(np.sort(best[totals[best] > 0]))
