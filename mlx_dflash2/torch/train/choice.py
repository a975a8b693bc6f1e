"""DFlash 2's selector on true predecessors: its losses, and how often it is right."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .heads import Heads
from .objective import SELECTOR_TERMS, Objective
from .slots import Slots


@dataclass(frozen=True)
class Choice:
    """Candidates of every slot and how the selector scores them.

    Attributes:
        columns: Of the candidates, best logit first. Shape: (M, G, K).
        scores: After the true token before. Shape: (M, G, K).
        gold: The candidate is the label; at most one is. Shape: (M, G, K).
    """

    columns: Tensor
    scores: Tensor
    gold: Tensor

    @property
    def found(self) -> Tensor:
        """The label is a candidate. Shape: (M, G)."""
        return self.gold.any(dim=-1)

    @property
    def right(self) -> Tensor:
        """The best score is the label's. Shape: (M, G)."""
        best = self.scores.argmax(dim=-1, keepdim=True)
        return self.gold.gather(-1, best)[..., 0]

    def losses(self, log_p: Tensor | None) -> dict[str, Tensor]:
        """The selector's terms, by name; (M, G).

        Args:
            log_p: The target's log probabilities, (M, G, C); without them there is
                no `selector_tv`.
        """
        log_q = self.scores.log_softmax(dim=-1)
        losses = {"selector_ce": -torch.where(self.gold, log_q, 0.0).sum(dim=-1)}
        if log_p is not None:
            p = log_p.gather(-1, self.columns).softmax(dim=-1)
            losses["selector_tv"] = 1 - torch.minimum(p, log_q.exp()).sum(dim=-1)
        return losses


def choose(
    heads: Heads, objective: Objective, slots: Slots, logits: Tensor, labels: Tensor
) -> Choice:
    """Score the candidates as decoding does, but after the true tokens.

    Args:
        heads: Of a DFlash 2 drafter.
        objective: Whether scores train anything, and more than the selector.
        slots: M blocks of G slots.
        logits: Transformed. Shape: (M, G, C).
        labels: Columns of the labels. Shape: (M, G).
    """
    selector, hidden = heads.drafter.candidate_selector, slots.hidden
    trains = torch.is_grad_enabled() and not SELECTOR_TERMS.isdisjoint(objective.mix)
    with torch.set_grad_enabled(trains):
        unary, columns = logits.topk(selector.config.selector_top_k, dim=-1)
        if objective.detach_selector:
            unary, hidden = unary.detach(), hidden.detach()
        scores = selector.scores(
            selector.hidden_projection(hidden),
            unary,
            heads.token(columns),
            slots.previous,
        )
    return Choice(columns, scores, gold=columns == labels[..., None])
