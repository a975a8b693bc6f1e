"""Documents into rows."""

from collections.abc import Sequence

import numpy as np

from .formatting import Document
from .rows import Row


def pack(documents: Sequence[Document], row_length: int) -> list[Row]:
    """Put each document into the first row that has room for it, whole.

    Args:
        documents: Each of at most `row_length` tokens.
    """
    contents: list[list[Document]] = []
    room = np.zeros(len(documents), int)  # of the rows begun, in order
    for document in documents:
        length = len(document.tokens)
        fitting = np.flatnonzero(room[: len(contents)] >= length)
        if len(fitting):
            at = int(fitting[0])
            contents[at].append(document)
        else:
            at = len(contents)
            contents.append([document])
            room[at] = row_length
        room[at] -= length
    return [_row(content) for content in contents]


def unpacked(documents: Sequence[Document]) -> list[Row]:
    """One row for each document."""
    return [_row([document]) for document in documents]


def _row(documents: list[Document]) -> Row:
    lengths = [len(document.tokens) for document in documents]
    return Row(
        np.concatenate([document.tokens for document in documents]),
        np.concatenate([document.supervised for document in documents]),
        np.repeat(np.arange(len(documents), dtype=np.int32), lengths),
    )
