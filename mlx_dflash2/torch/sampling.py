"""From logits to the target's distribution, and the two rules of acceptance."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mlx_dflash2.errors import DFlash2Error

from .proposal import Proposal


@dataclass(frozen=True)
class SamplingConfig:
    """How the target's distribution is made of its logits; mlx-lm's definition.

    Attributes:
        temperature: 0 always takes the most likely token.
        top_p: Keep the most likely tokens that reach this mass; 0 and 1 keep all.
        min_p: Keep tokens of at least this share of the best one's probability.
        top_k: Keep this many tokens; 0 keeps all.
        seed: Of the random draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise DFlash2Error(
                f"temperature is {self.temperature}, expected 0 or a positive number"
            )
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise DFlash2Error(
                    f"{name} is {getattr(self, name)}, expected 0 (off) to 1"
                )
        if self.top_k < 0:
            raise DFlash2Error(f"top_k is {self.top_k}, expected 0 (off) or more")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Verdict:
    """How much of a proposal is kept, and the target's own token after it."""

    accepted: int
    bonus: int


def probabilities(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """The distribution each row's next token is drawn from, in float32.

    Top-p, min-p and top-k, in this order, look at the log-softmax of the logits; the
    temperature comes last.

    Args:
        logits: Shape: (S, V).
        sampling: With a temperature above 0.

    Raises:
        DFlash2Error: `top_k` is not below the vocabulary's size.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    if 0 < sampling.top_p < 1:
        logprobs = _keep_top_p(logprobs, sampling.top_p)
    if sampling.min_p:
        floor = logprobs.amax(-1, keepdim=True) + math.log(sampling.min_p)
        logprobs = logprobs.masked_fill(logprobs < floor, -math.inf)
    if sampling.top_k:
        logprobs = _keep_top_k(logprobs, sampling.top_k)
    return torch.softmax(logprobs * (1.0 / sampling.temperature), dim=-1)


def _keep_top_p(logprobs: Tensor, top_p: float) -> Tensor:
    ascending = logprobs.sort(dim=-1).values
    chances = ascending.exp()
    mass = chances.flip(-1).cumsum(-1).flip(-1)
    above = F.pad(mass[..., 1:], (0, 1))  # of the tokens more likely than this one
    dropped = (above >= top_p * mass[..., :1]).sum(-1, keepdim=True)
    threshold = ascending.gather(-1, dropped)
    return logprobs.masked_fill(logprobs < threshold, -math.inf)


def _keep_top_k(logprobs: Tensor, top_k: int) -> Tensor:
    if top_k >= logprobs.shape[-1]:
        raise DFlash2Error(
            f"top_k is {top_k}, expected less than the vocabulary of "
            f"{logprobs.shape[-1]}"
        )
    order = logprobs.sort(dim=-1, descending=True, stable=True).indices
    return logprobs.scatter(-1, order[..., top_k:], -math.inf)


def draw(weights: Tensor, generator: torch.Generator) -> int:
    """Draw an index in proportion to `weights`, (V,)."""
    return int(torch.multinomial(weights, 1, generator=generator))


def accept_greedy(drafted: Tensor, logits: Tensor) -> Verdict:
    """Keep the drafted prefix that matches the target's greedy choice.

    Args:
        drafted: Proposed tokens. Shape: (L-1,).
        logits: Target logits for anchor and drafted tokens. Shape: (L, V).
    """
    chosen = logits.argmax(dim=-1)
    agrees = (drafted == chosen[:-1]).long()
    accepted = int(agrees.cumprod(0).sum())
    return Verdict(accepted, bonus=int(chosen[accepted]))


def accept_sampled(
    proposal: Proposal | None, chances: Tensor, generator: torch.Generator
) -> Verdict:
    """Keep drafted tokens so that what is emitted follows the target's distribution.

    A token drawn from q is kept with probability min(1, p/q); the first one that is
    not is replaced by a draw from max(p - q, 0), renormalised. See Leviathan et al.,
    "Fast Inference from Transformers via Speculative Decoding", 2023.

    Args:
        proposal: L-1 drafted tokens with their q; None for none.
        chances: p for anchor and drafted tokens. Shape: (L, V).
        generator: On the device of `chances`.
    """
    drafted = len(proposal.tokens) if proposal else 0
    # drawn for every slot, so a cycle uses the generator alike whatever is kept
    uniform = torch.rand(drafted, generator=generator, device=chances.device)
    for slot in range(drafted):
        candidates = proposal.candidates[slot]
        q = torch.zeros_like(chances[slot])
        q[candidates] = proposal.probabilities[slot].to(q.dtype)
        token = int(proposal.tokens[slot])
        if uniform[slot] * q[token] < chances[slot, token]:
            continue
        residual = (chances[slot] - q).clamp(min=0)
        return Verdict(
            slot, draw(residual if residual.any() else chances[slot], generator)
        )
    return Verdict(drafted, draw(chances[drafted], generator))
