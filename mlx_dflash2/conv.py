"""Grouped dynamic causal convolution over the rows of a block."""

import mlx.core as mx
import mlx.nn as nn


class DynamicConv(nn.Module):
    """A short causal convolution whose kernel depends on the row it computes.

    One projection of the sublayer's input gives the kernels of both sides: `prepare`
    convolves that input (side 0), `finish` the sublayer's output (side 1). A kernel is
    the learned base plus the projected part, which the channels of a group share. With
    an identity base and a zero projection both sides pass rows through unchanged.

    Args:
        size: Channels D.
        group: Channels per group, so `G = D / group`.
        kernel: Taps; tap `t` reads the row `t` places back, zero before the block.
    """

    def __init__(self, size: int, group: int, kernel: int):
        super().__init__()
        self.group, self.kernel = group, kernel
        base = mx.zeros((2, kernel, size))
        base[:, 0] = 1
        self.base_kernel = base
        self.kernel_projection = nn.Linear(
            size, 2 * kernel * (size // group), bias=False
        )
        self.kernel_projection.weight = mx.zeros_like(self.kernel_projection.weight)

    def prepare(self, rows: mx.array) -> tuple[mx.array, mx.array]:
        """Convolve a sublayer's input; also return what `finish` needs.

        Args:
            rows: Normed sublayer input. Shape: (B, L, D).

        Returns:
            The convolved rows, shape (B, L, D), and the output side's projected
            kernels, shape (B, L, kernel, G).
        """
        batch, length, _ = rows.shape
        projected = self.kernel_projection(rows)
        projected = projected.reshape(batch, length, 2, self.kernel, -1)
        return self._convolve(rows, 0, projected[:, :, 0]), projected[:, :, 1]

    def finish(self, rows: mx.array, projected: mx.array) -> mx.array:
        """Convolve a sublayer's output with the kernels `prepare` returned."""
        return self._convolve(rows, 1, projected)

    def _convolve(self, rows: mx.array, side: int, projected: mx.array) -> mx.array:
        batch, length, size = rows.shape
        base = self.base_kernel[side].reshape(self.kernel, -1, self.group)
        grouped = rows.reshape(batch, length, -1, self.group)
        total = (base[0] + projected[:, :, 0, :, None]) * grouped
        for tap in range(1, self.kernel):
            shifted = mx.pad(grouped, [(0, 0), (tap, 0), (0, 0), (0, 0)])[:, :length]
            total = total + (base[tap] + projected[:, :, tap, :, None]) * shifted
        return total.reshape(batch, length, size)
