"""The choice of one path through each row's candidates."""

import torch
from torch import Tensor, nn

from mlx_dflash2.families.dflash2 import DFlash2Config

from .proposal import Proposal, transform_logits


class CandidateSelector(nn.Module):
    """Scores a row's candidates by their logit and by the token chosen before them."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.config = config
        rank, vocab = config.selector_rank, config.vocab_size
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(vocab, rank) * 0.02)

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The `selector_top_k` best tokens of each row; of equal ones the lower id.

        Args:
            logits: The head's own, not yet transformed. Shape: (..., V).

        Returns:
            Token ids and their transformed logits in float32, best first. Shape of
            both: (..., K).
        """
        best, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        count = self.config.selector_top_k
        return ids[..., :count], transform_logits(best[..., :count], self.config)

    def scores(
        self, projected: Tensor, unary: Tensor, candidates: Tensor, previous: Tensor
    ) -> Tensor:
        """Score candidates after a given token, in float32.

        Args:
            projected: `hidden_projection` of the rows. Shape: (..., R).
            unary: Transformed logits of the candidates. Shape: (..., K).
            candidates: Token ids. Shape: (..., K).
            previous: The token before each row. Shape: (...).

        Returns:
            Shape: (..., K).
        """
        left = self.predecessor_codebook[previous].float() * projected.float()
        right = self.successor_codebook[candidates].float()
        return unary + (right * left[..., None, :]).sum(-1)

    def walk(
        self,
        hidden: Tensor,
        logits: Tensor,
        anchor: int,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Choose row by row, each choice deciding the next row's scores.

        Args:
            hidden: Post-norm rows after the anchor's. Shape: (L-1, D).
            logits: Their raw logits. Shape: (L-1, V).
            anchor: The token before the first row.
            temperature: 0 takes the best candidate, more draws one.
            generator: Where draws come from, on the device of `hidden`.
        """
        candidates, unary = self.candidates(logits)
        projected = self.hidden_projection(hidden)
        previous = torch.tensor(anchor, device=hidden.device)
        tokens, probabilities = [], []
        for row in range(hidden.shape[0]):
            scores = self.scores(projected[row], unary[row], candidates[row], previous)
            if temperature == 0:
                choice = scores.argmax()
                chances = torch.zeros_like(scores).index_fill_(0, choice, 1.0)
            else:
                chances = torch.softmax(scores / temperature, dim=-1)
                choice = torch.multinomial(chances, 1, generator=generator)[0]
            previous = candidates[row, choice]
            tokens.append(previous)
            probabilities.append(chances)
        return Proposal(torch.stack(tokens), candidates, torch.stack(probabilities))
