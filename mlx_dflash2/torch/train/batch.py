"""Rows of a data set side by side, as tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from mlx_dflash2.data.rows import Row

PADDING = -1  # the document of a position that belongs to none


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to one length; every tensor has the shape (B, S).

    Attributes:
        tokens: 0 on padding.
        supervised: Tokens the target wrote or would have written.
        document: Which document of its row a token belongs to; PADDING for none.
        positions: Counted from the start of the document.
    """

    tokens: Tensor
    supervised: Tensor
    document: Tensor
    positions: Tensor

    @classmethod
    def of(cls, rows: Sequence["Row"], device: str | torch.device = "cpu") -> Self:
        """The rows, in order, on a device."""
        length = max(len(row.tokens) for row in rows)
        shape = (len(rows), length)
        tokens = np.zeros(shape, np.int64)
        supervised = np.zeros(shape, bool)
        document = np.full(shape, PADDING, np.int64)
        for index, row in enumerate(rows):
            filled = index, slice(len(row.tokens))
            tokens[filled] = row.tokens
            supervised[filled] = row.supervised
            document[filled] = row.document
        arrays = tokens, supervised, document, document_positions(document)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


def document_positions(document: np.ndarray) -> np.ndarray:
    """Positions counted from the start of each document. Shape of both: (B, S)."""
    index = np.broadcast_to(np.arange(document.shape[1]), document.shape)
    begins = np.ones(document.shape, bool)
    begins[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
