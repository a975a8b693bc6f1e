"""DSpark: a Markov chain over the slots, and how sure the drafter is of each."""

import torch
from torch import Tensor, nn

from mlx_dflash2.families.dspark import DSparkConfig

from .drafter import Drafter
from .proposal import Draws, Proposal, every_token, transform_logits


class MarkovHead(nn.Module):
    """A low-rank table of next-token scores: `w2 @ w1[previous]`."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)


class ConfidenceHead(nn.Module):
    """The chance that a slot's token is right, before that token is known."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        width = config.hidden_size
        width += config.markov_rank if config.confidence_sees_token else 0
        self.proj = nn.Linear(width, 1)


class DSparkDrafter(Drafter):
    """Adds to each slot's logits a score given the token chosen before it."""

    def __init__(self, config: DSparkConfig, **options):
        super().__init__(config, **options)
        self.markov_head = MarkovHead(config)
        if config.has_confidence:
            self.confidence_head = ConfidenceHead(config)

    def decide(
        self, hidden: Tensor, logits: Tensor, anchor: int, draws: Draws
    ) -> Proposal:
        logits = transform_logits(logits, self.config)
        previous = torch.tensor(anchor, device=hidden.device)
        tokens, rows, kept = [], [], len(logits)
        for slot in range(len(logits)):
            row = self.markov_head.markov_w1(previous)
            if draws.confidence_threshold > 0:
                if self.confidence(hidden[slot], row) < draws.confidence_threshold:
                    kept = slot
                    break
            scores = logits[slot] + self.markov_head.markov_w2(row).float()
            previous, chances = draws.choose(scores)
            tokens.append(previous)
            rows.append(chances)
        if not kept:
            empty = logits[:0]
            return Proposal(empty[:, 0].long(), every_token(empty), empty)
        chances = torch.stack(rows)
        return Proposal(torch.stack(tokens), every_token(chances), chances)

    def confidence(self, hidden: Tensor, row: Tensor) -> Tensor:
        """The chance that a slot is right, seeing only what is before it. Shape: (...).

        Args:
            hidden: The slot's row. Shape: (..., D).
            row: The Markov row of the token before. Shape: (..., R).
        """
        return torch.sigmoid(self.confidence_logits(hidden, row))

    def confidence_logits(self, hidden: Tensor, row: Tensor) -> Tensor:
        """What `confidence` squashes into a chance, in float32. Shape: (...)."""
        if self.config.confidence_sees_token:
            hidden = torch.cat([hidden, row.to(hidden.dtype)], dim=-1)
        return self.confidence_head.proj(hidden).float()[..., 0]
