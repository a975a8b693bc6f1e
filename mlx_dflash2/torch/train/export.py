"""A checkpoint as the folder a drafter is served from and published as."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mlx_dflash2 import __version__
from mlx_dflash2.checkpoint import new_folder
from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.names import check_tensors

from ..loading import load_drafter
from .card import model_card
from .checkpoints import Saved
from .curves import read_metrics
from .geometry import read_geometry
from .start import TERMS

META, MANIFEST = "dflash2_training_meta.json", "release_manifest.json"
RESULTS = "measured_results.json"
POINTS = 20  # of the loss curve that the training record keeps


def export(
    saved: Saved, destination: Path, *, results: Path | None = None, average: int = 1
) -> list[str]:
    """Write config, weights in bf16, training record, terms, card and manifest.

    Args:
        saved: Of a run's folder, which holds its metrics and source terms as well.
        destination: A new folder; it appears when all is written.
        results: measured_results.json of a bench; its table goes into the card.
        average: Checkpoints whose weights to average: it and the last ones before it.

    Returns:
        What to say of it.

    Raises:
        DFlash2Error: Something is missing or does not fit, or the folder exists.
    """
    run = saved.folder.parent.parent
    raw = saved.contract["drafter"] | {"dtype": "bfloat16"}
    config = read_geometry(raw)
    averaged = last_checkpoints(saved.folder, average)
    weights = published_weights(mean_weights(averaged), config, where=saved.folder)
    record = training_record(saved, run) | {"averaged": [f.name for f in averaged]}
    measured = read_json(results) if results else None
    terms = _text(run / TERMS)
    with new_folder(destination) as partial:
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        _write_json(partial / "config.json", raw)
        _write_json(partial / META, record)
        (partial / TERMS).write_text(terms, encoding="utf-8")
        if measured is not None:
            _write_json(partial / RESULTS, measured)
        card = model_card(saved, config, measured, averaged=average)
        (partial / "README.md").write_text(card, encoding="utf-8")
        _write_json(partial / MANIFEST, manifest(partial, saved))
        load_drafter(partial)  # refuses what it cannot serve
    size = sum(tensor.numel() for tensor in weights.values())
    return [
        f"{destination}: {config.title}, {size / 1e6:.1f}M parameters, "
        f"{2 * size / 1e6:.1f} MB in bfloat16, step {saved.progress.step}"
    ]


def last_checkpoints(folder: Path, count: int) -> list[Path]:
    """A checkpoint's folder and those of the last ones before it, in order.

    Raises:
        DFlash2Error: The run keeps fewer.
    """
    steps = sorted(folder.parent.glob("step-*"))
    found = steps[: steps.index(folder) + 1][-count:]
    if len(found) < count:
        raise DFlash2Error(
            f"{folder}: with it the run keeps {len(found)} checkpoints, fewer than "
            f"--average {count}; choose a later --checkpoint, or train with a larger "
            "checkpoints.keep"
        )
    return found


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each tensor over checkpoints."""
    first, *rest = (Saved.read(folder).weights() for folder in folders)
    for name, tensor in first.items():
        for other in rest:
            tensor += other[name]
        tensor /= len(folders)
    return first


def published_weights(
    weights: Mapping[str, Tensor], config: DrafterConfig, *, where: Path
) -> dict[str, Tensor]:
    """The tensors in bf16, checked to be exactly those a server reads.

    Raises:
        DFlash2Error: A name is missing or unknown, such as one with a prefix; servers
            pass over those without a word. Or a value is not finite.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    check_tensors(shapes, config, where=str(where))
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    for name, tensor in rounded.items():
        if not tensor.isfinite().all():
            raise DFlash2Error(
                f"{where}: {name} holds values that are not finite; export an earlier "
                "checkpoint"
            )
    return rounded


def training_record(saved: Saved, run: Path) -> dict[str, Any]:
    """Everything that made the weights: contract, configuration, progress, curve."""
    lines = read_metrics(run)[: saved.progress.step]
    chosen = sorted({round(i * (len(lines) - 1) / (POINTS - 1)) for i in range(POINTS)})
    names = ("step", "loss", "loss_ce", "accuracy", "slots", "seconds")
    curve = [{name: lines[at].get(name) for name in names} for at in chosen]
    progress = asdict(saved.progress)
    return {
        "format": "mlx-dflash2 training record",
        "code": __version__,
        "contract": saved.contract,
        "config": saved.config,
        "progress": progress,
        "hours": saved.progress.seconds / 3600,
        "evaluation": progress.pop("evaluation"),
        "device": saved.device,
        "curve": curve,
    }


def manifest(folder: Path, saved: Saved) -> dict[str, Any]:
    """Names, sizes and hashes of a folder's files, and what they were made from."""
    files = []
    for file in sorted(folder.iterdir()):
        with file.open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        size = file.stat().st_size
        files.append({"name": file.name, "bytes": size, "sha256": sha256})
    target, parent = saved.contract["target"], saved.contract["parent"]
    return {
        "format": "mlx-dflash2 release",
        "files": files,
        "target": target,
        "data": saved.contract["data"],
        "parent": parent and {n: parent[n] for n in ("parent", "revision", "licence")},
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DFlash2Error(
            f"{path}: cannot be read ({error.strerror}); a drafter is published with "
            "the terms of what it was trained on"
        ) from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")
