"""Drafter folders written and read byte by byte, for tests of conversion.

Reads and writes safetensors by its own few lines, so that a conversion is not held
against the libraries it uses itself.
"""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pair_files import encode, write_json

from mlx_dflash2.families import DFlash2Config
from mlx_dflash2.names import expected_shapes

ROOT = Path(__file__).resolve().parent.parent
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
INDEX = "model.safetensors.index.json"
PREDECESSOR = "candidate_selector.predecessor_codebook"
SUCCESSOR = "candidate_selector.successor_codebook"


class Stored(NamedTuple):
    """One tensor as safetensors holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def small_config(**changes) -> dict:
    """The config.json of a small published drafter; None removes a field."""
    config = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "num_target_layers": 6,
        "layer_types": ["full_attention"] * 2,
        "sliding_window": None,
        "dtype": "bfloat16",
        "dflash_config": {
            "block_size": 8,
            "mask_token_id": 3,
            "target_layer_ids": [1, 3],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 128,
            "selector_top_k": 4,
        },
    } | changes
    return {
        name: value
        for name, value in config.items()
        if name not in changes or value is not None
    }


def random_tensors(
    config: dict, dtype: str = "bfloat16", seed: int = 0
) -> dict[str, Stored]:
    """Values for every tensor of a config, of ordinary size."""
    random = np.random.default_rng(seed)
    shapes = expected_shapes(DFlash2Config.from_dict(config))
    return {
        name: stored(random.normal(size=shape), dtype) for name, shape in shapes.items()
    }


def stored(values: np.ndarray, dtype: str) -> Stored:
    return Stored(CODES[dtype], values.shape, encode(values, dtype))


def write_drafter(
    folder: Path,
    tensors: dict[str, Stored] | None = None,
    *,
    config: dict | None = None,
    dtype: str = "bfloat16",
    shards: int = 1,
    index: bool = True,
) -> Path:
    """Write a drafter's folder, in `shards` files with or without an index."""
    config = small_config(dtype=dtype) if config is None else config
    tensors = random_tensors(config, dtype) if tensors is None else tensors
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        write_file(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    if index:
        size = sum(len(tensor.data) for tensor in tensors.values())
        content = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(folder / INDEX, content)
    return folder


def write_file(path: Path, tensors: dict[str, Stored], **metadata: str) -> None:
    """Write one safetensors file."""
    header: dict = {"__metadata__": {"format": "pt"} | metadata}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    body = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)


def read_file(path: Path) -> tuple[dict[str, str], dict[str, Stored]]:
    """Metadata and tensors of one safetensors file."""
    content = path.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", {})
    return metadata, {
        name: Stored(
            entry["dtype"],
            tuple(entry["shape"]),
            content[
                start + entry["data_offsets"][0] : start + entry["data_offsets"][1]
            ],
        )
        for name, entry in header.items()
    }


def read_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder's safetensors files."""
    tensors: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= read_file(file)[1]
    return tensors


def read_config(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh process that finds this package, installed or not."""
    find = f"""
import importlib.util, sys
sys.path.insert(0, {str(ROOT)!r})
import mlx_dflash2
if importlib.util.find_spec("mlx_dflash2.convert") is None:
    mlx_dflash2.__path__.append({str(ROOT)!r})
"""
    return subprocess.run(
        [sys.executable, "-c", find + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
