"""The weights of a new drafter."""

import torch
from torch import nn

from mlx_dflash2.config import DrafterConfig

from ..drafter import Drafter
from ..target import Target

DEVIATION = 0.02


def make_drafter(
    config: DrafterConfig, target: Target, *, seed: int, final_norm: str
) -> Drafter:
    """A drafter that has learned nothing, in float32 on the CPU.

    Linear layers and tables are drawn from a normal distribution, norms are 1, and
    convolutions pass everything through, so a DFlash 2 drafter begins as a DFlash one
    whose selector hardly counts.

    Args:
        config: Of any family.
        target: Its final norm, if that is wanted.
        seed: Of the draws.
        final_norm: "target" copies the target's, "ones" does not.
    """
    drafter = config.network("mlx_dflash2.torch")(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and not name.endswith("kernel_projection.weight"):
                nn.init.normal_(parameter, std=DEVIATION, generator=generator)
            elif name.endswith("proj.bias"):
                nn.init.zeros_(parameter)
        if final_norm == "target":
            drafter.norm.weight.copy_(target.model.model.norm.weight)
    return drafter
