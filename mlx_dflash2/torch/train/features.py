"""What the frozen target computes for a batch: context features and final rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..target import Target
from .batch import Batch
from .precision import check_finite

LOOKED_AT = 8  # rows whose taps are checked before a run
CURE = "use --precision bf16 or fp32, or other drafter.taps"

if TYPE_CHECKING:
    from mlx_dflash2.data.rows import Row

    from .feed import Part


@dataclass(frozen=True)
class Captured:
    """The target's states of a batch; those of padding mean nothing.

    Attributes:
        features: Taps joined in the order of the config. Shape: (B, S, T*D).
        last: Rows after the final norm, of which the target's head makes the
            distribution of the token after each. Shape: (B, S, D), or (B, S, 0) from
            a cache for an objective that has no use for them.
    """

    features: Tensor
    last: Tensor


class Features(Protocol):
    """Where the target's states of training rows come from."""

    def __call__(self, part: "Part") -> Captured: ...


@dataclass(frozen=True)
class Online:
    """They are computed at every visit."""

    target: Target
    taps: tuple[int, ...]

    def __call__(self, part: "Part") -> Captured:
        return capture(self.target, part.batch, self.taps)


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
        features = capture(target, batch, taps).features[0]
        found.append(check_finite(features, tap_names(taps), cure=CURE))
    return max(found)


def tap_names(taps: Sequence[int]) -> list[str]:
    return [f"tap {tap}" for tap in taps]
