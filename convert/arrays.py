"""Tensor values: read, cast, quantize, compare and save, bit for bit.

The one file that knows the arrays of both backends. Values are read and written by
MLX, which moves bytes and never interprets them, so NaN payloads survive.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.names import quantizable

from .stored import StoredDrafter, parts

if TYPE_CHECKING:
    import torch

BITS = {
    mx.float32: mx.uint32,
    mx.uint32: mx.uint32,
    mx.float16: mx.uint16,
    mx.bfloat16: mx.uint16,
}


@dataclass(frozen=True)
class Recipe:
    """What is done to the values: dequantize first, then cast, then quantize.

    Attributes:
        dequantize: Turn quantized weights into plain ones.
        dtype: Floating type of the result; None keeps each tensor's own.
        bits: Bits of quantized weights; None quantizes nothing.
        group_size: Weights that share a scale.
    """

    dequantize: bool = False
    dtype: str | None = None
    bits: int | None = None
    group_size: int | None = None


def check_quantization(bits: int, group_size: int) -> None:
    """Raise DFlash2Error unless MLX can quantize this way."""
    numbers = [type(number) is int for number in (bits, group_size)]
    if not all(numbers) or not 1 <= bits <= 32 or not 1 <= group_size <= 4096:
        raise DFlash2Error(
            f"quantization to {bits} bits in groups of {group_size}: expected whole "
            "numbers, as 4 and 64"
        )
    try:
        mx.quantize(mx.zeros((1, group_size)), group_size=group_size, bits=bits)
    except (ValueError, TypeError) as error:
        reason = str(error).removeprefix("[quantize] ")
        raise DFlash2Error(
            f"quantization to {bits} bits in groups of {group_size}: {reason}"
        ) from None


def converted(drafter: StoredDrafter, name: str, recipe: Recipe) -> dict[str, mx.array]:
    """One module's tensors after `recipe`, evaluated, by published name.

    Args:
        drafter: Where the values are read.
        name: One of `drafter.modules`.
        recipe: What is done to them.
    """
    if drafter.holds_quantized(name):
        values = {part: read(drafter, part) for part in parts(name)}
        if recipe.dequantize:
            values = {name: dequantized(drafter, name)}
    else:
        values = {name: read(drafter, name)}
    if recipe.dtype is not None:
        values = {part: _cast(part, values[part], recipe.dtype) for part in values}
    if recipe.bits is not None and quantizable(name):
        values = _quantized(name, values[name], recipe)
    mx.eval(values)
    return values


def read(drafter: StoredDrafter, name: str) -> mx.array:
    """One tensor as it is stored."""
    return mx.load(str(drafter.tensors[name].file))[drafter.spelled[name]]


def dequantized(drafter: StoredDrafter, name: str) -> mx.array:
    """One tensor as plain numbers, in the type of its scales if it is quantized."""
    if not drafter.holds_quantized(name):
        return read(drafter, name)
    packed, scales, biases = (read(drafter, part) for part in parts(name))
    return mx.dequantize(packed, scales, biases, **drafter.config.quantization)


def _cast(name: str, array: mx.array, dtype: str) -> mx.array:
    if array.dtype == mx.uint32:
        return array
    cast = array.astype(getattr(mx, dtype))
    if mx.any(mx.isinf(cast) & ~mx.isinf(array)).item():
        largest = mx.max(mx.where(mx.isfinite(array), mx.abs(array), 0)).item()
        raise DFlash2Error(
            f"{name}: a value of size {largest:.4g} does not fit into {dtype}; choose "
            "bfloat16 or float32"
        )
    return cast


def _quantized(name: str, array: mx.array, recipe: Recipe) -> dict[str, mx.array]:
    values = mx.quantize(array, group_size=recipe.group_size, bits=recipe.bits)
    return dict(zip(parts(name), values, strict=True))


def save(file: Path, values: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    """Write one safetensors file, the same bytes for the same values."""
    ordered = {name: values[name] for name in sorted(values)}
    try:
        mx.save_safetensors(str(file), ordered, metadata=metadata)
    except RuntimeError as error:  # a full disk, above all
        raise OSError(str(error)) from None
    mx.clear_cache()


def dtype_name(array: mx.array) -> str:
    """The type's plain name, such as `bfloat16`."""
    return str(array.dtype).removeprefix("mlx.core.")


def metadata_of(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself."""
    return mx.load(str(file), return_metadata=True)[1]


def same_bits(one: mx.array, other: mx.array) -> bool:
    """Whether two arrays have one type, one shape and the same bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    bits = BITS[one.dtype]
    return mx.array_equal(one.view(bits), other.view(bits)).item()


def largest_gap(one: mx.array, other: mx.array) -> float:
    """Largest absolute difference; infinite where only one of them is NaN."""
    one, other = one.astype(mx.float32), other.astype(mx.float32)
    both = (mx.isnan(one) & mx.isnan(other)) | (one == other)
    gap = mx.where(both, 0.0, mx.abs(one - other))
    return mx.max(mx.where(mx.isnan(gap), mx.inf, gap)).item()


def torch_tensor(array: mx.array) -> "torch.Tensor":
    """The same bytes as a torch tensor; numpy has no bfloat16, so bits are carried."""
    import torch

    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def mlx_array(tensor: "torch.Tensor") -> mx.array:
    """The same bytes as an MLX array."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())
