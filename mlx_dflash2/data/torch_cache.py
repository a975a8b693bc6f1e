"""A key/value cache with room to grow, for batches that are continued for long.

The usual one is copied whole at every token, which takes as long as the computation.
"""

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

ROOM = 64  # positions made room for at a time


class RoomyLayer(DynamicLayer):
    """Keys and values as views of larger tensors, which new ones are written behind."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys = self._larger_keys = key_states[..., :0, :]
        self.values = self._larger_values = value_states[..., :0, :]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Append and return everything. Shapes: (B, H, L, D) to (B, H, S+L, D)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self._larger_keys = _appended(
            self.keys, key_states, self._larger_keys
        )
        self.values, self._larger_values = _appended(
            self.values, value_states, self._larger_values
        )
        return self.keys, self.values


def _appended(held: Tensor, new: Tensor, larger: Tensor) -> tuple[Tensor, Tensor]:
    """`held` and `new` together, and the larger tensor they are a view of.

    `held` is copied when it is no view of `larger`, as after a choice of rows, or when
    that is full.
    """
    used, end = held.shape[-2], held.shape[-2] + new.shape[-2]
    if held.data_ptr() != larger.data_ptr() or end > larger.shape[-2]:
        *batch, _, size = new.shape
        larger = torch.empty(
            *batch, end + ROOM, size, dtype=new.dtype, device=new.device
        )
        larger[..., :used, :] = held
    larger[..., used:end, :] = new
    return larger[..., :end, :], larger


def roomy_cache(layers: int) -> Cache:
    """An empty cache."""
    return Cache(layers=[RoomyLayer() for _ in range(layers)])
