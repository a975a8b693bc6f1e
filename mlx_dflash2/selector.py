"""Choice of one path through the candidates of every drafted slot."""

import mlx.core as mx
import mlx.nn as nn

from .drafter import Proposal
from .families.dflash2 import DFlash2Config

CHUNK = 128
LOW_WORD = 0xFFFFFFFF


def top_candidates(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest logits of each row: value descending, then id ascending.

    Only the best chunks of a row are sorted: its `count` best entries lie in the
    `count` chunks that come first by maximum, then by position.

    Args:
        logits: Shape: (g, V).

    Returns:
        Ids (int32) and float32 logits, both of shape (g, count).
    """
    slots, size = logits.shape
    chunks = -(-size // CHUNK)
    if chunks <= count:
        return _sorted(logits, mx.arange(size), count)
    padding = mx.full((slots, chunks * CHUNK - size), -mx.inf, logits.dtype)
    table = mx.concatenate([logits, padding], axis=-1).reshape(slots, chunks, CHUNK)
    best, _ = _sorted(table.max(axis=-1), mx.arange(chunks), count)
    rows = mx.take_along_axis(table, best[..., None], axis=1).reshape(slots, -1)
    ids = best[..., None] * CHUNK + mx.arange(CHUNK)
    return _sorted(rows, ids.reshape(slots, -1), count)


def _sorted(values: mx.array, ids: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """The first `count` ids and values by value descending, then id ascending.

    Value and id are packed into one integer, so that the order of equal values never
    depends on how a backend sorts.
    """
    values = values.astype(mx.float32) + 0.0  # -0.0 and 0.0 are equal
    bits = values.view(mx.int32)
    rising = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    packed = mx.left_shift(rising, mx.array(32, mx.int64)) | (
        LOW_WORD - ids.astype(mx.int64)
    )
    packed = mx.sort(packed, axis=-1)[:, ::-1][:, :count]
    rising = mx.right_shift(packed, mx.array(32, mx.int64)).astype(mx.int32)
    bits = mx.where(rising < 0, rising ^ 0x7FFFFFFF, rising)
    return (LOW_WORD - (packed & LOW_WORD)).astype(mx.int32), bits.view(mx.float32)


class CandidateSelector(nn.Module):
    """A low-rank score for each pair of neighbouring tokens, on top of their logits.

    `score(c | p) = logit(c) + sum_r A[p, r] * (W h)[r] * S[c, r]` with A and S the
    predecessor and successor codebooks and h the hidden row of c's slot. Slots are
    decided left to right, each given the one before.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.hidden_projection = nn.Linear(
            config.hidden_size, config.selector_rank, bias=False
        )
        self.predecessor_codebook = mx.zeros(shape)
        self.successor_codebook = mx.zeros(shape)

    def pair_scores(
        self, hidden: mx.array, anchor: mx.array, candidates: mx.array
    ) -> list[mx.array]:
        """The pairwise part of the scores, float32.

        Args:
            hidden: Post-norm rows of the slots. Shape: (g, D).
            anchor: The token before the first slot. Shape: (1,).
            candidates: Shape: (g, K).

        Returns:
            Per slot, predecessors by candidates: (1, K), then (K, K).
        """
        weights = self.hidden_projection(hidden).astype(mx.float32)
        after = self.successor_codebook[candidates].astype(mx.float32)
        scores = []
        for slot in range(candidates.shape[0]):
            before = anchor if slot == 0 else candidates[slot - 1]
            before = self.predecessor_codebook[before].astype(mx.float32)
            scores.append((before * weights[slot]) @ after[slot].T)
        return scores

    def propose(
        self,
        hidden: mx.array,
        anchor: mx.array,
        candidates: mx.array,
        logits: mx.array,
        *,
        temperature: float,
        key: mx.array | None,
    ) -> Proposal:
        """Walk the slots: the best candidate, or with a temperature a drawn one.

        Args:
            hidden: Post-norm rows of the slots. Shape: (g, D).
            anchor: Shape: (1,).
            candidates: In order of preference among equal scores. Shape: (g, K).
            logits: Transformed logits of the candidates, float32. Shape: (g, K).
            temperature: 0 is greedy.
            key: Random key, needed for sampling.
        """
        pairs = self.pair_scores(hidden, anchor, candidates)
        keys = None if key is None else mx.random.split(key, len(pairs))
        choice: mx.array | int = 0
        choices, probabilities = [], []
        for slot, table in enumerate(pairs):
            scores = logits[slot] + table[choice]
            if temperature == 0:
                choice = mx.argmax(scores)
            else:
                q = mx.softmax(scores / temperature)
                choice = mx.random.categorical(mx.log(q), key=keys[slot])
                probabilities.append(q)
            choices.append(choice)
        index = mx.stack(choices)[:, None]
        tokens = mx.take_along_axis(candidates, index, axis=-1)[:, 0]
        q = mx.stack(probabilities) if probabilities else None
        return Proposal(tokens, candidates, q)
