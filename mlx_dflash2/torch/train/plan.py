"""What a run would do and need, found without loading a model."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.data.rows import MANIFEST
from mlx_dflash2.data.units import TRAIN
from mlx_dflash2.names import expected_shapes
from mlx_dflash2.sources import find_target

from .config import Batch, TrainConfig
from .feature_cache import bytes_a_token
from .geometry import new_drafter, read_geometry
from .optim import UNDECAYED
from .setup import inherited
from .warm_start import Parent

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
CONTEXT = 0.9e9  # of CUDA, its libraries, and fragmentation
USABLE = 15.6e9  # of a GPU sold with 16 GB
COPIES = 4  # of a chunk's logits: the drafter's, the target's, softmax, gradient


def plan(config: TrainConfig, precision: str) -> list[str]:
    """The plan as `train run --plan` prints it.

    Args:
        config: Of the run.
        precision: The format it would compute in.

    Raises:
        DFlash2Error: Target, warm start or settings do not fit.
    """
    config.need("target")
    source = find_target(
        config.target,
        revision=config.revision,
        offline=config.offline,
        files=("config.json",),
    )
    target = read_json(source.folder / "config.json")
    parent = None
    if config.warm_start:
        parent = Parent.find(
            config.warm_start,
            revision=config.warm_start_revision,
            offline=config.offline,
        )
    drafter = read_geometry(new_drafter(inherited(config.drafter, parent), target))
    config.objective.check(drafter)
    data = _manifest(config.data)
    return [
        f"target: {source.name}, {target['num_hidden_layers']} layers, "
        f"{_millions(target_parameters(target))} parameters, frozen",
        *_drafter_lines(config, drafter),
        *_data_lines(config, data),
        *_cache_lines(config, drafter),
        *_step_lines(config, drafter, data),
        *config.warnings(),
        *_memory_lines(config, drafter, target, data, precision),
    ]


def parameter_counts(config: DrafterConfig) -> dict[str, int]:
    """Parameters of a drafter by part."""
    counts: dict[str, int] = {}
    for name, shape in expected_shapes(config).items():
        if "_conv." in name:
            part = "convolutions"
        elif name.startswith("layers."):
            part = "layers"
        elif name.startswith(("candidate_selector.", "markov_head.")):
            part = "selector" if name.startswith("candidate") else "Markov head"
        else:
            part = "confidence" if name.startswith("confidence") else "fusion and norms"
        counts[part] = counts.get(part, 0) + math.prod(shape)
    return counts


def target_parameters(target: Mapping[str, Any]) -> int:
    """Parameters of a llama target, from its config.json."""
    size, inner = target["hidden_size"], target["intermediate_size"]
    head = target.get("head_dim") or size // target["num_attention_heads"]
    queries = target["num_attention_heads"] * head
    pairs = target["num_key_value_heads"] * head
    layer = 2 * size * (queries + pairs) + 3 * size * inner + 2 * size
    tables = 1 if target.get("tie_word_embeddings") else 2
    return (
        target["num_hidden_layers"] * layer
        + tables * target["vocab_size"] * size
        + size
    )


def memory(
    config: TrainConfig,
    drafter: DrafterConfig,
    target: Mapping[str, Any],
    *,
    row_length: int,
    precision: str,
) -> dict[str, float]:
    """Bytes of a process on a GPU, by what needs them.

    Activations of the drafter are counted as what its layers keep for the gradient:
    ten rows of the hidden size and four of the MLP's for each row of a block.
    """
    width = BYTES[precision]
    shapes = expected_shapes(drafter)
    tables = sum(
        math.prod(shape)
        for name, shape in shapes.items()
        if name.endswith(UNDECAYED) and len(shape) == 2
    )
    count = sum(map(math.prod, shapes.values()))
    moment = 2 if config.optimizer.eight_bit else 8
    return {
        "CUDA context and fragmentation": CONTEXT,
        "target": target_parameters(target) * width,
        "drafter, fp32": 4 * count,
        "autocast copies": 0 if precision == "fp32" else width * (count - tables),
        "gradients, fp32": 4 * count,
        "AdamW moments": 8 * tables + moment * (count - tables),
        "target forward": config.batch.rows_at_once
        * row_length
        * width
        * (3 * target["intermediate_size"] + 8 * drafter.hidden_size),
    } | _activations(config.batch, drafter, row_length, width)


def _activations(
    batch: Batch, drafter: DrafterConfig, row_length: int, width: int
) -> dict[str, float]:
    """What the drafter's forward keeps, of numbers of `width` bytes."""
    size, layers = drafter.hidden_size, drafter.num_hidden_layers
    joined = len(drafter.target_layer_ids) * size
    keys = 2 * drafter.num_key_value_heads * drafter.head_dim
    rows = batch.rows_at_once * batch.anchors * drafter.block_size
    kept = rows * (10 * size + 4 * drafter.intermediate_size) * width
    position = joined * (4 + 2 * width) + layers * keys * width + 8 * size
    slots = batch.blocks_at_once * drafter.num_draft_tokens
    return {
        "drafter activations": kept * (1 if batch.recompute else layers),
        "context": batch.rows_at_once * row_length * position,
        "logits of a chunk": COPIES
        * 4
        * slots
        * (batch.head_tokens or drafter.vocab_size),
    }


def _drafter_lines(config: TrainConfig, drafter: DrafterConfig) -> list[str]:
    counts = parameter_counts(drafter)
    parts = ", ".join(f"{part} {_millions(count)}" for part, count in counts.items())
    origin = f", from {config.warm_start}" if config.warm_start else ""
    return [
        f"drafter: {drafter.title}, {drafter.num_hidden_layers} layers, taps "
        f"{list(drafter.target_layer_ids)}, {drafter.num_draft_tokens} drafted "
        f"tokens{origin}",
        f"  {_millions(sum(counts.values()))} parameters: {parts}",
    ]


def _data_lines(config: TrainConfig, data: Mapping[str, Any] | None) -> list[str]:
    if data is None:
        return [f"data: {config.data or 'not named yet'} (no finished rows there)"]
    return [
        f"data: {config.data}, {data['rows']} rows, {data['tokens']} tokens, "
        f"{data['supervised']} to learn"
    ]


def _manifest(folder: str) -> dict[str, Any] | None:
    """What the training rows of a folder say of themselves."""
    path = Path(folder) / TRAIN / MANIFEST
    return read_json(path) if folder and path.exists() else None


def _cache_lines(config: TrainConfig, drafter: DrafterConfig) -> list[str]:
    """What cached features take."""
    if not config.cache_features:
        return []
    token = bytes_a_token(drafter, config.objective)
    found = [_manifest(folder) for folder in (config.data, config.anneal_data)]
    tokens = sum(data["tokens"] for data in found if data)
    return [f"cached features: {token} bytes a token, {token * tokens / 1e9:.2f} GB"]


def _step_lines(
    config: TrainConfig, drafter: DrafterConfig, data: Mapping[str, Any] | None
) -> list[str]:
    batch = config.batch
    visits = config.steps * batch.rows
    blocks = visits * batch.anchors
    lines = [
        f"steps: {config.steps}, {batch.rows} rows each ({batch.rows_at_once} at "
        f"once), {batch.anchors} blocks a row",
        f"  at most {blocks} blocks and {blocks * drafter.num_draft_tokens} labels",
    ]
    if data is not None:
        lines.append(f"  every row {visits / data['rows']:.2f} times")
    return lines


def _memory_lines(
    config: TrainConfig,
    drafter: DrafterConfig,
    target: Mapping[str, Any],
    data: Mapping[str, Any] | None,
    precision: str,
) -> list[str]:
    length = (data or {}).get("row_length") or 1536
    needs = memory(config, drafter, target, row_length=length, precision=precision)
    total = sum(needs.values())
    fits = "fits" if total < USABLE else "does not fit"
    return [
        f"memory on a GPU, {precision}, rows of {length} tokens (GB):",
        *(f"  {what:<32}{need / 1e9:8.2f}" for what, need in needs.items()),
        f"  {'sum':<32}{total / 1e9:8.2f}",
        f"  {fits} into a GPU of 16 GB, of which {USABLE / 1e9:.1f} can be used",
    ]


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}M"
