"""The terms of the loss for one chunk of blocks; `objective.py` defines them."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dflash2 import DFlash2Drafter
from ..dspark import DSparkDrafter
from .choice import choose
from .heads import Heads
from .objective import SELECTOR_TERMS, Objective
from .report import LossReport
from .slots import Slots, dpace_weights, slot_weights

SMALLEST_OVERLAP = 1e-20  # of two distributions, before its logarithm


def measure(heads: Heads, objective: Objective, slots: Slots) -> LossReport:
    """Every term and count of some slots."""
    return measure_logits(heads, objective, slots, heads.draft(slots.hidden))


def measure_logits(
    heads: Heads, objective: Objective, slots: Slots, logits: Tensor
) -> LossReport:
    """The same, of slots whose own logits, (M, G, C), are there already."""
    drafter, labels = heads.drafter, heads.column(slots.labels)
    if isinstance(drafter, DSparkDrafter):
        markov = drafter.markov_head.markov_w1(slots.previous)
        logits = logits + heads.markov(markov)
    log_q = logits.log_softmax(dim=-1)
    log_p = heads.teach(slots.last) if objective.needs_teacher else None
    losses, means = {"ce": cross_entropy(log_q, labels, slots.valid, objective)}, {}
    if log_p is not None:
        losses |= divergences(log_p, log_q, objective)
        means["overlap"] = 1 - losses["tv"].detach()
    if objective.confidence:
        stated = drafter.confidence_logits(slots.hidden, markov)
        losses["confidence"] = F.binary_cross_entropy_with_logits(
            stated, means["overlap"], reduction="none"
        )
        means["confidence"] = stated.detach().sigmoid()
    weights = dict.fromkeys(objective.mix, slot_weights(objective, slots.valid))
    if isinstance(drafter, DFlash2Drafter):
        choice = choose(heads, objective, slots, logits, labels)
        losses |= choice.losses(log_p)
        for term in SELECTOR_TERMS & weights.keys():
            weights[term] = weights[term] * choice.found
        hits = {"hits": choice.gold[..., 0], "recall": choice.found}
        hits["selector"] = choice.right
    else:
        hits = {"hits": logits.argmax(dim=-1) == labels}
    return LossReport(
        totals={
            term: (losses[term] * weight).sum() for term, weight in weights.items()
        },
        weights={term: weight.sum() for term, weight in weights.items()},
        counts=slot_counts(slots.valid, hits, means),
    )


def cross_entropy(
    log_q: Tensor, labels: Tensor, valid: Tensor, objective: Objective
) -> Tensor:
    """The term `ce` of each slot, D-PACE's weight included.

    Args:
        log_q: The drafter's log probabilities. Shape: (..., G, C).
        labels: Columns. Shape: (..., G).
        valid: Shape: (..., G).
        objective: Its weighting.
    """
    found = log_q.gather(-1, labels[..., None])[..., 0]
    if objective.weighting == "decay":
        return -found
    return -found * dpace_weights(found.exp(), valid, objective)


def divergences(
    log_p: Tensor, log_q: Tensor, objective: Objective
) -> dict[str, Tensor]:
    """The terms that compare the drafter with the target, by name; (...).

    Args:
        log_p: The target's log probabilities. Shape: (..., C).
        log_q: The drafter's. Shape: (..., C).
        objective: `kl` and `lk` are left out where it has neither.
    """
    p = log_p.exp()
    overlap = torch.minimum(p, log_q.exp()).sum(dim=-1)
    tv = 1 - overlap
    found = {"tv": tv, "nla": -overlap.clamp(min=SMALLEST_OVERLAP).log()}
    if objective.kl or objective.lk:
        kl = (p * (log_p - log_q)).sum(dim=-1)
        share = torch.exp(-3 * overlap.detach())
        found |= {"kl": kl, "lk": share * kl + (1 - share) * tv}
    return found


def slot_counts(
    valid: Tensor, hits: dict[str, Tensor], means: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The counts of a LossReport.

    Args:
        valid: Shape: (M, G).
        hits: What holds or does not; also counted over runs of slots. Shape: (M, G).
        means: What is summed as it is. Shape: (M, G).
    """
    counts = {"valid": valid.float()}
    for name, hit in hits.items():
        counts[name] = (hit & valid).float()
        counts[f"{name}_run"] = counts[name].cumprod(dim=-1)
    counts |= {name: mean * valid for name, mean in means.items()}
    return {name: count.sum(dim=0) for name, count in counts.items()}
