"""The slots of all blocks of a batch, and how much each counts."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .blocks import Blocks
from .objective import Objective


@dataclass(frozen=True)
class Slots:
    """The slots of M blocks.

    Attributes:
        hidden: The drafter's post-norm rows. Shape: (M, G, D).
        last: The target's rows that predict the same tokens. Shape: (M, G, D).
        previous, labels, valid: As in Blocks. Shape: (M, G).
    """

    hidden: Tensor
    last: Tensor
    previous: Tensor
    labels: Tensor
    valid: Tensor

    @classmethod
    def of(cls, hidden: Tensor, last: Tensor, blocks: Blocks) -> "Slots":
        """Those of all real blocks of a batch.

        Args:
            hidden: Shape: (B, N, G, D).
            last: The target's rows of the batch. Shape: (B, S, D).
            blocks: N of each row.
        """
        real = blocks.real
        row = real.nonzero()[:, :1]
        return cls(
            hidden=hidden[real],
            last=last[row, blocks.sources[real]],
            previous=blocks.previous[real],
            labels=blocks.labels[real],
            valid=blocks.valid[real],
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, part: slice) -> "Slots":
        return Slots(*(getattr(self, field.name)[part] for field in fields(self)))


def slot_weights(objective: Objective, valid: Tensor) -> Tensor:
    """How much each slot counts, before anything is known of its tokens.

    Args:
        objective: Its weighting.
        valid: Shape: (..., G).

    Returns:
        float32, 0 where not valid. Shape: (..., G).
    """
    weights = valid.float()
    if objective.weighting != "decay" or not objective.gamma:
        return weights
    slot = torch.arange(valid.shape[-1], device=valid.device)
    return weights * torch.exp(-slot / objective.gamma)


def dpace_weights(chance: Tensor, valid: Tensor, objective: Objective) -> Tensor:
    """D-PACE's weight of each slot (arXiv 2605.18810), held constant.

    Args:
        chance: The drafter's probability of the label. Shape: (..., G).
        valid: Shape: (..., G).
        objective: Its weighting and alpha.
    """
    kept = (1 - objective.alpha) * chance.detach() + objective.alpha
    if objective.weighting == "dpace_p":
        return kept.cumprod(dim=-1)
    onward, after = [], torch.zeros_like(kept[..., 0])
    for slot in reversed(range(kept.shape[-1])):
        onward.append(valid[..., slot] * (1 + after))  # no division, so never 0/0
        after = kept[..., slot] * onward[-1]
    worth = torch.stack(onward[::-1], dim=-1)
    return worth if objective.weighting == "dpace_f" else worth * kept.cumprod(dim=-1)
