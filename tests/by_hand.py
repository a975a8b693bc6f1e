"""The documented distribution of the next token, in float64 and without mlx-lm."""

import math
from collections.abc import Sequence

import numpy as np


def probabilities(
    logits: np.ndarray,
    *,
    temperature: float,
    xtc_on: bool = False,
    special: Sequence[int] = (),
    **options,
) -> np.ndarray:
    """p of one row: top-p, min-p, XTC and top-k at temperature 1, then temperature.

    Args:
        logits: After the penalties. Shape: (V,).
        xtc_on: What the row's coin says; `xtc_threshold` is among the options then.
        special: Tokens XTC never removes.
        options: The filters that are on.
    """
    logp = logits.astype(np.float64)
    logp = logp - logp.max()
    logp -= np.log(np.exp(logp).sum())
    if "top_p" in options:
        order = np.argsort(-logp)
        above = np.cumsum(np.exp(logp[order])) - np.exp(logp[order])
        logp[order[above >= options["top_p"]]] = -np.inf
    if "min_p" in options:
        logp[logp < logp.max() + math.log(options["min_p"])] = -np.inf
    if xtc_on:
        p = np.exp(logp) / np.exp(logp).sum()
        strong = [t for t in np.argsort(-p) if p[t] > options["xtc_threshold"]]
        cut = [token for token in strong[:-1] if token not in special]
        logp[cut] = -np.inf
    if "top_k" in options:
        logp[np.argsort(-logp)[options["top_k"] :]] = -np.inf
    p = np.exp((logp - logp.max()) / temperature)
    return p / p.sum()


def penalised(logits: np.ndarray, history: Sequence[int], **options) -> np.ndarray:
    """One row after bias and penalties.

    Args:
        logits: Shape: (V,).
        history: All tokens before; each penalty looks back on a part of it.
    """
    row = logits.astype(np.float64)
    for token, bias in options.get("logit_bias", {}).items():
        row[token] += bias
    penalty = options.get("repetition_penalty")
    for token in set(history[-options.get("repetition_context_size", 20) :]):
        if penalty is not None:
            row[token] *= penalty if row[token] < 0 else 1 / penalty
    recent = list(history[-20:])
    for token in set(recent):
        row[token] -= options.get("presence_penalty", 0)
        row[token] -= options.get("frequency_penalty", 0) * recent.count(token)
    return row
