"""Logits of drafter and target over the vocabulary, or over a part of it."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..drafter import Drafter
from ..proposal import transform_logits
from ..target import Target


class Heads:
    """The heads of a drafter and its target, cut to the same tokens.

    Over a part of the vocabulary all distributions are renormalised to it: as if no
    model ever said another token. That is an approximation, good where the part holds
    what the models would say; a loss over it is lower than over everything.

    Attributes:
        tokens: Ids of the columns, rising; None for the whole vocabulary.
    """

    def __init__(self, drafter: Drafter, target: Target, tokens: Tensor | None):
        self.drafter, self.target, self.tokens = drafter, target, tokens
        if tokens is not None:
            taught = target.model.get_output_embeddings()
            drafted = taught if drafter.lm_head is None else drafter.lm_head
            self._drafted, self._taught = drafted.weight[tokens], taught.weight[tokens]

    def draft(self, hidden: Tensor) -> Tensor:
        """The drafter's logits (..., C) of post-norm rows (..., D), in float32."""
        if self.tokens is None:
            logits = self.drafter.logits(hidden, self.target)
        else:
            logits = F.linear(hidden.to(self._drafted.dtype), self._drafted)
        return transform_logits(logits, self.drafter.config)

    @torch.no_grad()
    def teach(self, last: Tensor) -> Tensor:
        """The target's log probabilities (..., C) of its rows (..., D), in float32."""
        if self.tokens is None:
            logits = self.target.head(last)
        else:
            logits = F.linear(last.to(self._taught.dtype), self._taught)
        return logits.float().log_softmax(dim=-1)

    def markov(self, row: Tensor) -> Tensor:
        """DSpark's scores (..., C) after the tokens of Markov rows (..., R)."""
        head = self.drafter.markov_head.markov_w2
        if self.tokens is None:
            return head(row).float()
        return F.linear(row, head.weight[self.tokens]).float()

    def column(self, tokens: Tensor) -> Tensor:
        """Columns of token ids (...); of ids that have none, any column."""
        if self.tokens is None:
            return tokens
        place = torch.searchsorted(self.tokens, tokens)
        return place.clamp(max=len(self.tokens) - 1)

    def token(self, columns: Tensor) -> Tensor:
        """Token ids of columns (...)."""
        return columns if self.tokens is None else self.tokens[columns]
