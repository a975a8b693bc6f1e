"""What the frozen target computes for a batch: context features and final rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..target import Target
from .batch import Batch
from .precision import check_taps

LOOKED_AT = 8  # rows whose taps are checked before a run

if TYPE_CHECKING:
    from mlx_dflash2.data.rows import Row


@dataclass(frozen=True)
class Captured:
    """The target's states of a batch; those of padding mean nothing.

    Attributes:
        features: Taps joined in the order of the config. Shape: (B, S, T*D).
        last: Rows after the final norm, of which the target's head makes the
            distribution of the token after each. Shape: (B, S, D).
    """

    features: Tensor
    last: Tensor


@torch.no_grad()
def capture(target: Target, batch: Batch, taps: Sequence[int]) -> Captured:
    """Run the target's layers, never its head, over the documents of a batch.

    A document sees only itself. Where no row holds a second one, plain causal
    attention does, without a mask: padding comes last, so nothing looks back at it.
    """
    several = bool((batch.document > 0).any())
    features, last = target.trunk(
        batch.tokens,
        taps=taps,
        positions=batch.positions,
        mask=document_mask(batch.document)[:, None] if several else None,
    )
    return Captured(features, last)


def document_mask(document: Tensor) -> Tensor:
    """Causal attention inside each document.

    Args:
        document: Shape: (B, S). Padding counts as one more document, so that each of
            its rows sees something.

    Returns:
        True where the row of a query sees the column of a key. Shape: (B, S, S).
    """
    same = document[:, :, None] == document[:, None, :]
    return same.tril()


def largest_tap(target: Target, taps: Sequence[int], rows: Sequence["Row"]) -> float:
    """The largest value in the taps of the first rows.

    Raises:
        DFlash2Error: One is not finite in the target's dtype.
    """
    found = []
    for index in range(min(LOOKED_AT, len(rows))):
        batch = Batch.of([rows[index]], target.device)
        found.append(check_taps(capture(target, batch, taps).features[0], taps))
    return max(found)
