"""What decoding would draft greedily, for many blocks at once."""

import torch
from torch import Tensor

from ..dflash2 import DFlash2Drafter
from ..drafter import Drafter
from ..dspark import DSparkDrafter


def draft_paths(
    drafter: Drafter, hidden: Tensor, logits: Tensor, anchors: Tensor
) -> Tensor:
    """The tokens that each family's `decide` takes at temperature 0.

    Args:
        drafter: Of any family.
        hidden: Post-norm rows of the slots. Shape: (M, G, D).
        logits: Of these rows, transformed. Shape: (M, G, V).
        anchors: The tokens before the first slots. Shape: (M,).

    Returns:
        Shape: (M, G).
    """
    if isinstance(drafter, DFlash2Drafter):
        return _select(drafter, hidden, logits, anchors)
    if isinstance(drafter, DSparkDrafter):
        return _chain(drafter, logits, anchors)
    return logits.argmax(dim=-1)


def _select(
    drafter: DFlash2Drafter, hidden: Tensor, logits: Tensor, previous: Tensor
) -> Tensor:
    selector = drafter.candidate_selector
    unary, candidates = logits.topk(selector.config.selector_top_k, dim=-1)
    projected = selector.hidden_projection(hidden)
    path = []
    for slot in range(hidden.shape[1]):
        of_slot = candidates[:, slot]
        scores = selector.scores(projected[:, slot], unary[:, slot], of_slot, previous)
        previous = of_slot.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]
        path.append(previous)
    return torch.stack(path, dim=1)


def _chain(drafter: DSparkDrafter, logits: Tensor, previous: Tensor) -> Tensor:
    head, path = drafter.markov_head, []
    for slot in range(logits.shape[1]):
        bias = head.markov_w2(head.markov_w1(previous)).float()
        previous = (logits[:, slot] + bias).argmax(dim=-1)
        path.append(previous)
    return torch.stack(path, dim=1)
