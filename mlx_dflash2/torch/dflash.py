"""DFlash (v1): each row decides its token by itself."""

from torch import Tensor

from .drafter import Drafter
from .proposal import Draws, Proposal, every_token, transform_logits


class DFlashDrafter(Drafter):
    """The backbone alone."""

    def decide(
        self, hidden: Tensor, logits: Tensor, anchor: int, draws: Draws
    ) -> Proposal:
        tokens, chances = draws.choose(transform_logits(logits, self.config))
        return Proposal(tokens, every_token(chances), chances)
