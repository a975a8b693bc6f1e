"""Training blocks: where they start, what their slots must predict, what rows see."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mlx_dflash2.config import DrafterConfig

from ..attention import visible
from .batch import Batch


def anchors_of(supervised: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Every position a block may start at.

    Decoding drafts after a token it has emitted, to learn the one that follows; so
    both must be supervised, in one document.

    Args:
        supervised: Of one row. Shape: (S,).
        document: Shape: (S,).
    """
    both = supervised[:-1] & supervised[1:]
    return np.flatnonzero(both & (document[:-1] == document[1:]))


def draw_anchors(
    supervised: np.ndarray,
    document: np.ndarray,
    count: int,
    *,
    seed: int,
    epoch: int,
    row: int,
) -> np.ndarray:
    """At most `count` anchors of one row, each position as likely, in order.

    The draw depends on seed, epoch and row alone: it keeps no state, and differs from
    visit to visit.

    Args:
        supervised: Shape: (S,).
        document: Shape: (S,).
        count: Wanted; all there are, if fewer.
        seed: Of the run.
        epoch: Counts the visits of the row.
        row: Its number in the data set.
    """
    possible = anchors_of(supervised, document)
    generator = np.random.default_rng((seed, epoch, row))
    return np.sort(generator.permutation(possible)[:count])


@dataclass(frozen=True)
class Blocks:
    """N blocks of each row of a batch, G slots each; slot g drafts the token g+1 on.

    Attributes:
        anchors: Where they start; 0 for padded blocks. Shape: (B, N).
        real: Not padded. Shape: (B, N).
        sources: Positions of the tokens before the slots: of their predecessors, and
            of the target's rows that predict the same tokens. Shape: (B, N, G).
        previous: Those tokens. Shape: (B, N, G).
        labels: The tokens that follow. Shape: (B, N, G).
        valid: The label is supervised and of the anchor's document, and so are those
            of all slots before. Shape: (B, N, G).
    """

    anchors: Tensor
    real: Tensor
    sources: Tensor
    previous: Tensor
    labels: Tensor
    valid: Tensor

    @classmethod
    def at(cls, batch: Batch, anchors: Sequence[np.ndarray], slots: int) -> "Blocks":
        """Blocks of `slots` slots at the given anchors of each row.

        Rows with fewer anchors than the fullest one get padded blocks.
        """
        starts, real = _padded(anchors, batch.tokens.device)
        length = batch.tokens.shape[1]
        steps = torch.arange(slots, device=starts.device)
        sources = (starts[..., None] + steps).clamp(max=length - 1)
        targets = starts[..., None] + steps + 1
        inside = targets < length
        targets = targets.clamp(max=length - 1)
        allowed = inside & _at(batch.supervised, targets) & real[..., None]
        allowed &= (
            _at(batch.document, targets) == _at(batch.document, starts)[..., None]
        )
        return cls(
            anchors=starts,
            real=real,
            sources=sources,
            previous=_at(batch.tokens, sources),
            labels=_at(batch.tokens, targets),
            valid=allowed.cumprod(dim=-1).bool(),
        )

    def positions(self, batch: Batch, rows: int) -> Tensor:
        """Positions of the `rows` rows of each block. Shape: (B, N, rows)."""
        starts = _at(batch.positions, self.anchors)
        return starts[..., None] + torch.arange(rows, device=starts.device)


def block_mask(
    batch: Batch,
    blocks: Blocks,
    config: DrafterConfig,
    layer: int,
) -> Tensor:
    """What the rows of all blocks see in one layer.

    A row sees the context of its document strictly before its anchor, and its own
    block; both by the distances of the layer's kind. A padded block sees itself, as a
    row that sees nothing has no softmax.

    Returns:
        True where visible. Shape: (B, 1, N*L, S + N*L).
    """
    rows = blocks.positions(batch, config.block_size)
    kind = {
        "causal": config.layer_is_causal(layer),
        "window": config.layer_window(layer),
    }
    index = torch.arange(batch.tokens.shape[1], device=rows.device)
    before = index < blocks.anchors[..., None]
    home = _at(batch.document, blocks.anchors)
    before &= batch.document[:, None] == home[..., None]
    context = visible(rows, batch.positions[:, None], **kind) & before[:, :, None]
    inside = visible(rows, rows, **kind)
    count = rows.shape[1]
    own = torch.eye(count, dtype=torch.bool, device=rows.device)
    block = inside[:, :, :, None] & own[:, None, :, None]  # (B, N, L, N, L)
    seen = [context.flatten(1, 2), block.flatten(3).flatten(1, 2)]
    return torch.cat(seen, dim=-1)[:, None]


def _padded(
    anchors: Sequence[np.ndarray], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Anchors of all rows, 0 where there is none, and where there is one: (B, N)."""
    most = max(1, *(len(row) for row in anchors))
    starts = np.zeros((len(anchors), most), np.int64)
    real = np.zeros((len(anchors), most), bool)
    for index, row in enumerate(anchors):
        starts[index, : len(row)] = row
        real[index, : len(row)] = True
    return torch.from_numpy(starts).to(device), torch.from_numpy(real).to(device)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """`values` (B, S) of each row at `index` (B, ...) of the same row."""
    return values.gather(1, index.flatten(1)).view_as(index)
