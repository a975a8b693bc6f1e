"""Rotary positions, plain and stretched by yarn."""

import math

import torch
from torch import Tensor

from mlx_dflash2.config import DrafterConfig


def rotate(x: Tensor, positions: Tensor, config: DrafterConfig) -> Tensor:
    """Rotary embedding over all of a head's dimensions, angles in float32.

    Args:
        x: Shape: (B, H, S, head_dim).
        positions: Absolute positions. Shape: (S,) or (B, S).
        config: Its rope base, layout and scaling.
    """
    frequencies, scale = rope_frequencies(config, x.device)
    angles = positions.float()[..., None] * frequencies
    if angles.dim() == 3:
        angles = angles[:, None]
    cos, sin = angles.cos() * scale, angles.sin() * scale
    wide = x.float()
    if config.rope_interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = wide.chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if config.rope_interleaved:
        return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)
    return torch.cat(turned, dim=-1).to(x.dtype)


def rope_frequencies(
    config: DrafterConfig, device: torch.device
) -> tuple[Tensor, float]:
    """Radians a position for each pair of dimensions, and a factor on the result.

    yarn slows the pairs that turn seldom over the original length by `factor`, keeps
    those that turn often, and blends between. (Peng et al. 2023, "YaRN: Efficient
    context window extension of large language models", section 3.2.)

    Returns:
        Frequencies of shape (head_dim/2,), float32, and the attention factor.
    """
    size, base = config.head_dim, config.rope_theta
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=device)
    plain = base ** (-steps / size)
    yarn = config.rope_scaling
    if yarn is None:
        return plain, 1.0
    original = yarn["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        turns = original / (times * 2 * math.pi)
        return size * math.log(turns) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(yarn.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(yarn.get("beta_slow", 1))), size - 1)
    width = max(high - low, 0.001)
    slowed = ((torch.arange(size // 2, device=device) - low) / width).clamp(0, 1)
    factor = yarn["factor"]
    blended = plain / factor * slowed + plain * (1 - slowed)
    return blended, 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
