"""The grouped dynamic causal convolution around a sublayer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlx_dflash2.families.dflash2 import DFlash2Config

BEFORE, AFTER = 0, 1  # sides of the sublayer; index of `base_kernel`


class DynamicConv(nn.Module):
    """Mixes each block row with the rows before it, by weights the row itself chooses.

    A row's weights are a learned base plus a projection of its input, one value per
    group of `conv_group_size` neighbouring channels. They belong to the row written,
    not to the row shifted in. Rows before the first count as zero.

    A new instance is the identity, so the drafter starts as one without convolutions.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        size, taps = config.hidden_size, config.conv_kernel_size
        self.group_size = config.conv_group_size
        base = torch.zeros(2, taps, size)
        base[:, 0] = 1.0
        self.base_kernel = nn.Parameter(base)
        groups = size // self.group_size
        self.kernel_projection = nn.Linear(size, 2 * taps * groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a sublayer's input.

        Args:
            x: Normed rows of one or more blocks. Shape: (..., L, D).

        Returns:
            The sublayer's input, and what `finish` needs. Both sides' weights come
            from `x`, before any convolution.
        """
        taps = self.base_kernel.shape[1]
        delta = self.kernel_projection(x).unflatten(-1, (2, taps, -1))
        return self._convolve(x, BEFORE, delta), delta

    def finish(self, output: Tensor, delta: Tensor) -> Tensor:
        """Convolve a sublayer's output, (..., L, D), with what `prepare` kept."""
        return self._convolve(output, AFTER, delta)

    def _convolve(self, rows: Tensor, side: int, delta: Tensor) -> Tensor:
        length = rows.shape[-2]
        total = torch.zeros_like(rows)
        for tap, base in enumerate(self.base_kernel[side]):
            shifted = F.pad(rows, (0, 0, tap, 0))[..., :length, :]
            weights = delta[..., side, tap, :].repeat_interleave(self.group_size, -1)
            total = total + (base + weights) * shifted
        return total
