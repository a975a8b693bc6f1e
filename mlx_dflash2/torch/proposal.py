"""Drafted tokens, and the ways to choose them."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlx_dflash2.config import DrafterConfig


@dataclass(frozen=True)
class Proposal:
    """What one block drafted.

    Attributes:
        tokens: Drafted tokens. Shape: (g,).
        candidates: The tokens each slot chose among. Shape: (g, K).
        probabilities: The distribution over `candidates` that each token was drawn
            from; one-hot if it was the best one. Shape: (g, K), float32.
    """

    tokens: Tensor
    candidates: Tensor
    probabilities: Tensor

    def first(self, count: int) -> "Proposal":
        """The proposal cut to its first `count` tokens."""
        return replace(
            self,
            tokens=self.tokens[:count],
            candidates=self.candidates[:count],
            probabilities=self.probabilities[:count],
        )


@dataclass(frozen=True)
class Draws:
    """How a proposal is chosen.

    Attributes:
        temperature: 0 takes the best token, more draws one.
        generator: Where draws come from.
        confidence_threshold: Cut before the first slot less sure than this; 0 never.
    """

    temperature: float = 0.0
    generator: torch.Generator | None = None
    confidence_threshold: float = 0.0

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """One index of each row and the distribution it came from.

        Args:
            scores: Shape: (..., N).

        Returns:
            Indices (...) and probabilities (..., N), one-hot if greedy.
        """
        if self.temperature == 0:
            choice = scores.argmax(dim=-1)
            return choice, torch.zeros_like(scores).scatter(-1, choice[..., None], 1.0)
        chances = torch.softmax(scores / self.temperature, dim=-1)
        rows = chances.reshape(-1, chances.shape[-1])
        choice = torch.multinomial(rows, 1, generator=self.generator)
        return choice.reshape(chances.shape[:-1]), chances


def transform_logits(logits: Tensor, config: DrafterConfig) -> Tensor:
    """Scale logits, then cap them softly; in float32."""
    logits = logits.float()
    if config.output_multiplier != 1:
        logits = logits * config.output_multiplier
    cap = config.final_logit_softcapping
    return cap * torch.tanh(logits / cap) if cap else logits


def every_token(like: Tensor) -> Tensor:
    """Candidates of slots that choose among the whole vocabulary. Shape: (g, V)."""
    return torch.arange(like.shape[-1], device=like.device).expand(like.shape)
