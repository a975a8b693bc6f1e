"""Hold speculative output against plain decoding, token by token."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import mlx.core as mx

from .generation import Response

TIE_GAP = 1e-3  # kernels for one row and for several sum in different orders:
TIE_ULPS = 2  # logits this close may change places, anything further is an error


@dataclass(frozen=True)
class Comparison:
    """Where two decodings split, if they do.

    Attributes:
        position: Index of the first differing token; None if identical.
        plain, speculative: The two tokens there; None where one had ended.
        gap: Plain decoding's logit of its token minus that of the other.
        ulps: The gap in units in the last place of the larger logit's dtype.
    """

    position: int | None = None
    plain: int | None = None
    speculative: int | None = None
    gap: float | None = None
    ulps: float | None = None

    @property
    def identical(self) -> bool:
        return self.position is None

    @property
    def near_tie(self) -> bool:
        """The gap is below 1e-3 or at most two units in the last place."""
        return self.gap is not None and (
            abs(self.gap) < TIE_GAP or abs(self.ulps) <= TIE_ULPS
        )

    @property
    def kind(self) -> str:
        if self.identical:
            return "identical"
        return "near tie" if self.near_tie else "difference"

    def as_dict(self) -> dict:
        """The comparison as `--json` prints it."""
        return {"identical": self.identical, "kind": self.kind} | asdict(self)

    def __str__(self) -> str:
        if self.identical:
            return "identical to plain decoding"
        if self.gap is None:
            return f"difference: one decoding ended at token {self.position}"
        return (
            f"{self.kind}: first split at token {self.position}, plain decoding has "
            f"{self.plain}, speculative {self.speculative}; logit gap {self.gap:.6g} "
            f"({self.ulps:.1f} units in the last place)"
        )


def compare(tokens: Sequence[int], plain: Iterable[Response]) -> Comparison:
    """Compare tokens with a plain decoding, run as far as the first difference."""
    count = 0
    for response in plain:
        if count == len(tokens):
            return Comparison(count, plain=response.token)
        if response.token != tokens[count]:
            gap, ulps = _gap(response.logits, response.token, tokens[count])
            return Comparison(count, response.token, tokens[count], gap, ulps)
        count += 1
    if count < len(tokens):
        return Comparison(count, speculative=tokens[count])
    return Comparison()


def _gap(logits: mx.array, first: int, second: int) -> tuple[float, float]:
    """Difference of two logits, plainly and in units in the last place."""
    a, b = logits[first], logits[second]
    gap = (a.astype(mx.float32) - b.astype(mx.float32)).item()
    kind = mx.finfo(logits.dtype)
    size = max(abs(a.item()), abs(b.item()), kind.smallest_normal)
    _, exponent = math.frexp(size)  # of a mantissa below 1
    return gap, gap / (2.0 ** (exponent - 1) * kind.eps)
