"""Attention of a block over the drafter's context and the block itself."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import initialize_rope

from .config import DrafterConfig


class LayerContext:
    """Keys and values of one layer for the committed positions, oldest first.

    Rows are normed and roped at their absolute position. A block's rows are written
    behind the context to be attended to, but never counted: the next append or block
    overwrites them. With a window only rows a later block can see are kept.

    Attributes:
        rows: Context rows held.
        end: Absolute position after the last one; positions dropped by a window count.
    """

    step = 256

    def __init__(self, window: int | None = None):
        self.window = window
        self.rows = self.end = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Commit rows. Shape of both: (B, H, S, head_dim)."""
        added = keys.shape[2]
        self.end += added
        if self.window is not None and added >= self.window - 1:
            self.rows = 0
            first = added - (self.window - 1)
            keys, values = keys[:, :, first:], values[:, :, first:]
        self._write(keys, values)
        self.rows += keys.shape[2]

    def with_block(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Context and block rows together, the block not committed."""
        self._write(keys, values)
        total = self.rows + keys.shape[2]
        return self.keys[:, :, :total], self.values[:, :, :total]

    def _write(self, keys: mx.array, values: mx.array) -> None:
        if self.keys is None:
            shape = [*keys.shape[:2], 0, keys.shape[3]]
            self.keys = mx.zeros(shape, keys.dtype)
            self.values = mx.zeros(shape, values.dtype)
        self.make_room(keys.shape[2])
        end = self.rows + keys.shape[2]
        self.keys[:, :, self.rows : end] = keys
        self.values[:, :, self.rows : end] = values

    def make_room(self, count: int) -> None:
        """Let `count` rows fit behind the context; may drop rows no block will see."""
        if self.keys is None or self.rows + count <= self.keys.shape[2]:
            return
        kept = self.rows if self.window is None else min(self.rows, self.window - 1)
        capacity = -(-(kept + count) // self.step) * self.step
        self.keys = self._moved(self.keys, kept, capacity)
        self.values = self._moved(self.values, kept, capacity)
        self.rows = kept

    def _moved(self, held: mx.array, kept: int, capacity: int) -> mx.array:
        """The newest `kept` rows at the start of a buffer of `capacity` rows."""
        room = [*held.shape[:2], capacity - kept, held.shape[3]]
        newest = held[:, :, self.rows - kept : self.rows]
        return mx.concatenate([newest, mx.zeros(room, held.dtype)], axis=2)

    @property
    def arrays(self) -> list[mx.array]:
        """What to evaluate to have all appended rows computed."""
        return [] if self.keys is None else [self.keys, self.values]


def block_mask(
    rows: int, length: int, window: int | None, causal: bool
) -> mx.array | str | None:
    """Which keys each block row sees, for keys ordered context then block.

    A key at distance `d = query - key` is seen if `|d| < window` and, when causal,
    `d >= 0`.

    Args:
        rows: Context rows before the block.
        length: Block rows L.

    Returns:
        A boolean array of shape (L, rows + L), or the shorthand that
        `mx.fast.scaled_dot_product_attention` has for it.
    """
    if window is None:
        return "causal" if causal else None
    query = mx.arange(rows, rows + length)[:, None]
    distance = query - mx.arange(rows + length)[None]
    seen = mx.abs(distance) < window
    return seen & (distance >= 0) if causal else seen


class Attention(nn.Module):
    """Grouped-query attention with normed query and key heads.

    Context and block share the key and value projections. Order: project, norm each
    head, rope; values get neither norm nor rope.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.heads, self.pairs = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.scale = dim, dim**-0.5
        self.q_proj = nn.Linear(size, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(size, self.pairs * dim, bias=False)
        self.v_proj = nn.Linear(size, self.pairs * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, size, bias=False)
        self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps)
        self.rope = initialize_rope(
            dim,
            config.rope_theta,
            config.rope_interleaved,
            config.rope_scaling,
            config.max_position_embeddings,
        )

    def keys_values(self, rows: mx.array, position: int) -> tuple[mx.array, mx.array]:
        """Keys and values of rows whose first one stands at `position`.

        Args:
            rows: Fused context features or convolved block rows. Shape: (B, S, D).

        Returns:
            Two arrays of shape (B, H, S, head_dim).
        """
        keys = self.k_norm(self._split(self.k_proj(rows), self.pairs))
        keys = self.rope(keys.transpose(0, 2, 1, 3), offset=position)
        values = self._split(self.v_proj(rows), self.pairs).transpose(0, 2, 1, 3)
        return keys, values

    def __call__(
        self, rows: mx.array, context: LayerContext, mask: mx.array | str | None
    ) -> mx.array:
        """Attend from block rows (B, L, D) that start where the context ends."""
        batch, length, _ = rows.shape
        queries = self.q_norm(self._split(self.q_proj(rows), self.heads))
        queries = self.rope(queries.transpose(0, 2, 1, 3), offset=context.end)
        keys, values = context.with_block(*self.keys_values(rows, context.end))
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.scale, mask=mask
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(batch, length, -1))

    def _split(self, rows: mx.array, heads: int) -> mx.array:
        return rows.reshape(*rows.shape[:2], heads, self.head_dim)
