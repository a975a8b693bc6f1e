"""One block through both backends, from the two folders of a conversion."""

import importlib.util
from dataclasses import dataclass

import numpy as np

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.names import BORROWED

from .stored import StoredDrafter

CONTEXT_ROWS, HEAD_ROWS = 24, 256


@dataclass(frozen=True)
class _Material:
    """Random input, the same for both backends, in float32.

    Attributes:
        features: Context features. Shape: (1, S, T*D).
        block: Embedded block. Shape: (1, L, D).
        head: Rows of a head. Shape: (HEAD_ROWS, D).
    """

    features: np.ndarray
    block: np.ndarray
    head: np.ndarray


def logits_gap(source: StoredDrafter, written: StoredDrafter) -> float | None:
    """Largest difference between the backends' block logits; None without torch.

    Both drafters compute in float32 on the same random context features, embedding
    and head. MLX runs the folder that was made for it, torch the other one.
    """
    if importlib.util.find_spec("torch") is None:
        return None
    from . import arrays

    made_for = arrays.metadata_of(next(iter(written.tensors.values())).file)
    pair = (source, written) if made_for.get("format") == "pt" else (written, source)
    for_mlx, for_torch = pair
    material = _draw(source.config)
    of_mlx = _mlx_logits(for_mlx, material)
    of_torch = _torch_logits(for_torch, material)
    return arrays.largest_gap(of_mlx, arrays.mlx_array(of_torch))


def _draw(config: DrafterConfig) -> _Material:
    random, size = np.random.default_rng(0), config.hidden_size
    taps = len(config.target_layer_ids)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    return _Material(
        features=normal(1, CONTEXT_ROWS, taps * size),
        block=normal(1, config.block_size, size),
        head=normal(HEAD_ROWS, size) / np.float32(size**0.5),
    )


def _names(drafter: StoredDrafter) -> list[str]:
    return [name for name in drafter.modules if name not in BORROWED]


def _mlx_logits(stored: StoredDrafter, material: _Material):
    import mlx.core as mx

    from . import arrays

    drafter = stored.config.network("mlx_dflash2")(stored.config)
    weights = [
        (name, arrays.dequantized(stored, name).astype(mx.float32))
        for name in _names(stored)
    ]
    drafter.load_weights(weights, strict=True)
    context = drafter.make_context()
    drafter.extend(mx.array(material.features), context)
    hidden = drafter.hidden(mx.array(material.block), context)
    return hidden @ mx.array(material.head).T


def _torch_logits(stored: StoredDrafter, material: _Material):
    import torch

    from . import arrays

    with torch.device("meta"):
        drafter = stored.config.network("mlx_dflash2.torch")(stored.config)
    weights = {
        name: arrays.torch_tensor(arrays.dequantized(stored, name)).float()
        for name in _names(stored)
    }
    drafter.load_state_dict(weights, strict=True, assign=True)
    with torch.no_grad():
        context = drafter.make_context()
        drafter.extend(torch.from_numpy(material.features), context)
        hidden = drafter.hidden(torch.from_numpy(material.block), context)
        return hidden @ torch.from_numpy(material.head).T
