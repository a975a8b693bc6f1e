"""Drafter attention over context and block, with the masks both need."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mlx_dflash2.config import DrafterConfig

from .rope import rotate


class RMSNorm(nn.Module):
    """Root mean square norm: computed in float32, rounded, then weighted."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def visible(
    queries: Tensor, keys: Tensor, *, causal: bool, window: int | None
) -> Tensor:
    """Which keys each query may see, by distance = query position - key position.

    Args:
        queries: Positions of the block rows. Shape: (..., L).
        keys: Positions of context and block. Shape: (..., S+L).
        causal: Hide keys at a negative distance.
        window: Hide keys `window` or more away, on either side; None hides none.

    Returns:
        True where visible. Shape: (..., L, S+L).
    """
    distance = queries[..., :, None] - keys[..., None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance.abs() < window
    return seen


class DrafterAttention(nn.Module):
    """Attention of block rows over the context and the block, with one set of weights.

    Keys and values of the context come from the context features, those of the block
    from its own rows. Keys and queries are normed per head, then rotated.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size = config.hidden_size
        self.head_dim = config.head_dim
        self.config = config
        width = config.num_attention_heads * self.head_dim
        pairs = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(size, width, bias=False)
        self.k_proj = nn.Linear(size, pairs, bias=False)
        self.v_proj = nn.Linear(size, pairs, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of context features or block rows.

        Args:
            rows: Shape: (B, S, D).
            positions: Shape: (S,) or (B, S).

        Returns:
            Two tensors of shape (B, H, S, head_dim), H the key/value heads.
        """
        keys = self._rotate(self.k_norm(self._heads(self.k_proj(rows))), positions)
        return keys, self._heads(self.v_proj(rows))

    def forward(
        self,
        x: Tensor,
        context: tuple[Tensor, Tensor],
        positions: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """Attend.

        Args:
            x: Rows of N blocks. Shape: (B, N, L, D).
            context: Keys and values, as `keys_values` returns them.
            positions: Of the rows, block after block. Shape: (N*L,) or (B, N*L).
            mask: True where visible; broadcasts to (B, H, N*L, S + N*L).

        Returns:
            Shape: (B, N, L, D).
        """
        rows = x.flatten(1, 2)
        queries = self._rotate(self.q_norm(self._heads(self.q_proj(rows))), positions)
        keys, values = (
            torch.cat(parts, dim=2)
            for parts in zip(context, self.keys_values(rows, positions), strict=True)
        )
        # Repeated here: on CUDA no kernel takes a mask together with grouped heads.
        groups = queries.shape[1] // keys.shape[1]
        attended = F.scaled_dot_product_attention(
            queries,
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=mask,
            scale=self.head_dim**-0.5,
        )
        output = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output.unflatten(1, x.shape[1:3])

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions, self.config)
