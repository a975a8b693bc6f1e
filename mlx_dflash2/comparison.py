"""Where two decodings split, and whether rounding can explain it."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

TIE_GAP = 1e-3  # kernels for one row and for several sum in different orders:
TIE_ULPS = 2  # logits this close may change places, anything further is an error


class Decided(Protocol):
    """A token and the row it was chosen from, an array of shape (V,)."""

    token: int
    logits: Any


@dataclass(frozen=True)
class Comparison:
    """Where two decodings split, if they do.

    Attributes:
        position: Index of the first differing token; None if identical.
        plain, speculative: The two tokens there; None where one had ended.
        plain_logit, speculative_logit: Plain decoding's logits of the two.
        gap: The first of them minus the second.
        ulps: The gap in units in the last place of the larger logit's dtype.
    """

    position: int | None = None
    plain: int | None = None
    speculative: int | None = None
    plain_logit: float | None = None
    speculative_logit: float | None = None
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
            f"{self.plain}, speculative {self.speculative}; logits "
            f"{self.plain_logit:.6g} and {self.speculative_logit:.6g}, gap "
            f"{self.gap:.6g} ({self.ulps:.1f} units in the last place)"
        )


def compare(
    tokens: Sequence[int], plain: Iterable[Decided], finfo: Callable[[Any], Any]
) -> Comparison:
    """Compare tokens with a plain decoding, run as far as the first difference.

    Args:
        finfo: The backend's description of a float dtype: its `eps` and
            `smallest_normal`.
    """
    count = 0
    for decided in plain:
        if count == len(tokens):
            return Comparison(count, plain=decided.token)
        if decided.token != tokens[count]:
            return _split(count, decided, tokens[count], finfo)
        count += 1
    if count < len(tokens):
        return Comparison(count, speculative=tokens[count])
    return Comparison()


def _split(
    position: int, decided: Decided, token: int, finfo: Callable[[Any], Any]
) -> Comparison:
    """The two tokens at a split with their logits in plain decoding's row."""
    logits = decided.logits
    first, second = logits[decided.token].item(), logits[token].item()
    kind, gap = finfo(logits.dtype), first - second
    size = max(abs(first), abs(second), kind.smallest_normal)
    _, exponent = math.frexp(size)  # of a mantissa below 1
    ulps = gap / (2.0 ** (exponent - 1) * kind.eps)
    return Comparison(position, decided.token, token, first, second, gap, ulps)
