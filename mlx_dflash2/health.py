"""What this machine can run: versions, device, memory, types that work."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import mlx.core as mx

from .checkpoint import stored_tensors
from .config_reader import read_json
from .cycle_parts import CycleParts
from .target import Target
from .timing import measure

SIZE, ROWS = 512, 5
WIDTHS = range(1, 9)  # rows of a verify, up to a usual block
ROUNDS = 5
POSITIONS = 4096  # a long chat
TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}


@dataclass(frozen=True)
class TypeCheck:
    """A few-row matrix product in one dtype, as a verify does it.

    Attributes:
        error: Largest difference from float32, relative to its largest value; None if
            the product could not be computed.
        seconds: For one product.
    """

    dtype: str
    error: float | None
    seconds: float | None
    works: bool


def check_types() -> list[TypeCheck]:
    """Multiply five rows by a matrix in each dtype and compare with float32."""
    key = mx.random.key(0)
    rows = mx.random.normal((ROWS, SIZE), key=key)
    weight = mx.random.normal((SIZE, SIZE), key=mx.random.split(key)[0])
    return [_check_type(dtype, rows, weight) for dtype in TOLERANCE]


def _check_type(dtype: mx.Dtype, rows: mx.array, weight: mx.array) -> TypeCheck:
    name = str(dtype).removeprefix("mlx.core.")
    low, table = rows.astype(dtype), weight.astype(dtype)
    exact = low.astype(mx.float32) @ table.astype(mx.float32).T
    try:
        mx.eval(low @ table.T)
        began = time.perf_counter()
        product = low @ table.T
        mx.eval(product)
        seconds = time.perf_counter() - began
    except (RuntimeError, ValueError):
        return TypeCheck(name, None, None, False)
    gap = mx.abs(product.astype(mx.float32) - exact).max() / mx.abs(exact).max()
    return TypeCheck(name, gap.item(), seconds, gap.item() < TOLERANCE[dtype])


def row_costs(target: Target, prompt: Sequence[int]) -> list[float]:
    """Milliseconds of a target forward of each of `WIDTHS` rows after a prompt."""
    parts = CycleParts(target, None, prompt)
    forwards = {rows: partial(parts.forward, rows) for rows in WIDTHS}
    measure(forwards, 1)
    return [median(taken) for taken in measure(forwards, ROUNDS).values()]


def available_memory() -> int | None:
    """Bytes a model may take; None where the system does not say."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit is not None:
        return int(limit)
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except (OSError, ValueError):
        pass
    return None


def needed_memory(target: Path, drafter: Path) -> int:
    """Bytes of both models' weights and of their caches at `POSITIONS` tokens."""
    return sum(_weight_bytes(f) + _cache_bytes(f) for f in (target, drafter))


def _weight_bytes(folder: Path) -> int:
    files = {tensor.file for tensor in stored_tensors(folder).values()}
    return sum(file.stat().st_size for file in files)


def _cache_bytes(folder: Path) -> int:
    """Keys and values in 16 bits; 0 where config.json does not give the sizes."""
    config = read_json(folder / "config.json")
    heads, size = config.get("num_attention_heads"), config.get("hidden_size")
    pairs = config.get("num_key_value_heads") or heads
    layers, dim = config.get("num_hidden_layers"), config.get("head_dim")
    if dim is None and type(heads) is type(size) is int and heads > 0:
        dim = size // heads
    if not all(type(number) is int for number in (layers, pairs, dim)):
        return 0
    return POSITIONS * layers * pairs * dim * 2 * 2


def blas_library() -> str | None:
    """A BLAS preloaded on Linux, which changes the last bits of matrix products."""
    preload = os.environ.get("LD_PRELOAD", "")
    return next((part for part in preload.split(":") if "blas" in part.lower()), None)
