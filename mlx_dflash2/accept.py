"""Which drafted tokens stand: the greedy and the rejection rule.

Both work on the last axes, so one call can also decide many independent cycles.
"""

from dataclasses import dataclass

import mlx.core as mx

from .drafter import Proposal
from .sampling import draw


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verify.

    Attributes:
        accepted: Length of the drafted prefix that is kept. Shape: (...).
        bonus: The target's own token after it. Shape: (...).
    """

    accepted: mx.array
    bonus: mx.array


def accept_greedy(drafted: mx.array, chosen: mx.array) -> Verdict:
    """Keep the drafted prefix that matches the target's greedy choice.

    Args:
        drafted: Shape: (..., g).
        chosen: The target's choice after the anchor and each drafted token. Shape:
            (..., g + 1).
    """
    agrees = drafted == chosen[..., :-1]
    accepted = _prefix(agrees)
    bonus = mx.take_along_axis(chosen, accepted[..., None], axis=-1)[..., 0]
    return Verdict(accepted, bonus)


def accept_sampled(
    proposal: Proposal, p: mx.array, uniforms: mx.array, key: mx.array
) -> Verdict:
    """Rejection sampling: the emitted tokens are distributed exactly as p.

    A drafted token d stands if `u * q(d) < p(d)`. After the first that does not, the
    bonus token is drawn from `max(p - q, 0)` normalised, or from p where that is zero
    everywhere; after a full block it is drawn from p. (Leviathan et al. 2023,
    "Fast inference from transformers via speculative decoding", algorithm 1.)

    Args:
        proposal: g drafted tokens with the q they were drawn from. Leading axes may be
            added to all its arrays.
        p: The target's distribution after the anchor and after each drafted token.
            Shape: (..., g + 1, V).
        uniforms: In [0, 1). Shape: (..., g).
        key: For the bonus token.
    """
    drafted = proposal.tokens[..., None]
    p_drafted = mx.take_along_axis(p[..., :-1, :], drafted, axis=-1)[..., 0]
    accepted = _prefix(uniforms * drafted_probability(proposal) < p_drafted)
    row = accepted[..., None, None]
    p_row = mx.take_along_axis(p, row, axis=-2)[..., 0, :]
    residual = mx.maximum(p_row - _dense_row(proposal, row, p_row), 0)
    nothing_left = residual.sum(axis=-1, keepdims=True) == 0
    bonus = draw(mx.where(nothing_left, p_row, residual), key)
    return Verdict(accepted, bonus)


def drafted_probability(proposal: Proposal) -> mx.array:
    """q of each drafted token. Shape: (..., g)."""
    drafted = proposal.tokens[..., None]
    if proposal.candidates is None:
        return mx.take_along_axis(proposal.probabilities, drafted, axis=-1)[..., 0]
    chosen = proposal.candidates == drafted
    return mx.where(chosen, proposal.probabilities, 0).sum(axis=-1)


def _prefix(stands: mx.array) -> mx.array:
    return mx.cumprod(stands.astype(mx.int32), axis=-1).sum(axis=-1)


def _dense_row(proposal: Proposal, row: mx.array, like: mx.array) -> mx.array:
    """q of slot `row` over the vocabulary; zero past the last slot."""
    q = _row_or_zeros(proposal.probabilities, row)
    if proposal.candidates is None:
        return q
    ids = _row_or_zeros(proposal.candidates, row)
    return mx.put_along_axis(mx.zeros_like(like), ids, q, axis=-1)


def _row_or_zeros(slots: mx.array, row: mx.array) -> mx.array:
    """Row (..., K) of (..., g, K) at index (..., 1, 1); zeros at index g."""
    pad = [(0, 0)] * (slots.ndim - 2) + [(0, 1), (0, 0)]
    return mx.take_along_axis(mx.pad(slots, pad), row, axis=-2)[..., 0, :]
