"""DFlash (v1): each row decides its token by itself."""

import mlx.core as mx

from .drafter import Drafter, Draws, Proposal


class DFlashDrafter(Drafter):
    """The backbone alone."""

    def decide(
        self, hidden: mx.array, logits: mx.array, anchor: mx.array, draws: Draws
    ) -> Proposal:
        logits = self.transform(logits)
        if draws.temperature == 0:
            return Proposal(mx.argmax(logits, axis=-1).astype(mx.int32))
        q = mx.softmax(logits / draws.temperature, axis=-1)
        tokens = mx.random.categorical(mx.log(q), key=draws.key)
        return Proposal(tokens.astype(mx.int32), probabilities=q)
