"""DSpark: a Markov chain over the slots, and how sure the drafter is of each."""

import mlx.core as mx
import mlx.nn as nn

from .drafter import Drafter, Draws, Proposal
from .families.dspark import DSparkConfig


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
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, draws: Draws
    ) -> Proposal:
        logits = self.transform(logits)
        count = logits.shape[0]
        keys = None if draws.key is None else mx.random.split(draws.key, count)
        previous, tokens, chances, sure = anchor, [], [], []
        for slot in range(count):
            row = self.markov_head.markov_w1(previous)
            if draws.confidence_threshold > 0:
                sure.append(self.confidence(hidden[slot : slot + 1], row))
            scores = self.markov_head.markov_w2(row).astype(mx.float32)
            scores = logits[slot : slot + 1] + scores
            if draws.temperature == 0:
                previous = mx.argmax(scores, axis=-1)
            else:
                q = mx.softmax(scores / draws.temperature, axis=-1)
                previous = mx.random.categorical(mx.log(q), key=keys[slot])
                chances.append(q)
            tokens.append(previous)
        kept = _sure_slots(sure, draws.confidence_threshold) if sure else count
        tokens = mx.concatenate(tokens).astype(mx.int32)[:kept]
        q = mx.concatenate(chances)[:kept] if chances else None
        return Proposal(tokens, probabilities=q)

    def confidence(self, hidden: mx.array, row: mx.array) -> mx.array:
        """The chance that a slot is right, seeing only what is before it.

        Args:
            hidden: The slot's row. Shape: (1, D).
            row: The Markov row of the token before. Shape: (1, R).

        Returns:
            Shape: (1, 1).
        """
        seen = hidden
        if self.config.confidence_sees_token:
            seen = mx.concatenate([hidden, row.astype(hidden.dtype)], axis=-1)
        return mx.sigmoid(self.confidence_head.proj(seen).astype(mx.float32))


def _sure_slots(sure: list[mx.array], threshold: float) -> int:
    """How many slots come before the first that is less sure than `threshold`."""
    chances = mx.concatenate(sure)[:, 0].tolist()
    return next((i for i, c in enumerate(chances) if c < threshold), len(chances))
