"""Hold speculative output against plain decoding, token by token."""

from collections.abc import Iterable, Sequence

import mlx.core as mx

from . import comparison
from .comparison import Comparison
from .generation import Response


def compare(tokens: Sequence[int], plain: Iterable[Response]) -> Comparison:
    """Compare tokens with a plain decoding, run as far as the first difference."""
    return comparison.compare(tokens, plain, mx.finfo)
