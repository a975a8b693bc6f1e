"""The state of a run on disk, from which it goes on as if it had never stopped.

    RUN/checkpoints/step-000500/  the drafter's weights, the optimizer's, state.json
    RUN/checkpoints/latest        the name of the newest one
    RUN/checkpoints/best          the name of the one with the best evaluation

Each is written beside its place and renamed; a pointer moves when its folder is on
disk. Rows and anchors are functions of the step's number, so no more state than this
decides what comes next.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mlx_dflash2.checkpoint import new_folder
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error

from .contract import Contract, Progress

SCHEMA = 1
LATEST, BEST = "latest", "best"
WEIGHTS, MOMENTS, STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"
GENERATORS = "generators."  # torch's random states, which nothing here draws from


@dataclass(frozen=True)
class Saved:
    """A checkpoint, its tensors still on disk.

    Attributes:
        contract: As plain data.
        config: The whole configuration, as plain data.
        device: What it was trained on.
        scaler: State of fp16's loss scale.
    """

    folder: Path
    contract: dict[str, Any]
    config: dict[str, Any]
    progress: Progress
    device: str
    scaler: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Saved":
        """Read a checkpoint's folder.

        Raises:
            DFlash2Error: It is none, or one of another schema.
        """
        raw = read_json(folder / STATE)
        if raw.get("schema") != SCHEMA:
            raise DFlash2Error(
                f"{folder / STATE}: schema is {raw.get('schema')!r}, this version "
                f"reads {SCHEMA}; use the version that wrote it"
            )
        progress = Progress(
            **raw["progress"] | {"best": tuple(raw["progress"]["best"])}
        )
        return cls(
            folder,
            raw["contract"],
            raw["config"],
            progress,
            raw["device"],
            raw["scaler"],
        )

    def weights(self) -> dict[str, Tensor]:
        """The drafter's, in float32, by published name."""
        return _load(self.folder / WEIGHTS)

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer, made as the saved one was, its state back."""
        tensors = _load(self.folder / MOMENTS)
        numbers = read_json(self.folder / STATE)["optimizer"]
        torch.set_rng_state(tensors.pop(f"{GENERATORS}cpu"))
        for name in [name for name in tensors if name.startswith(GENERATORS)]:
            number = int(name.removeprefix(GENERATORS))
            state = tensors.pop(name)
            if number < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, number)
        state: dict[int, dict[str, Any]] = {}
        for name, value in (tensors | numbers).items():
            index, part = name.split(".", 1)
            state.setdefault(int(index), {})[part] = value
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


@dataclass(frozen=True)
class Store:
    """The checkpoints of a run.

    Attributes:
        folder: RUN/checkpoints.
        keep: How many of the newest stay.
    """

    folder: Path
    keep: int = 2

    def find(self, which: str = LATEST) -> Path | None:
        """A checkpoint's folder.

        Args:
            which: "latest", "best", or a step's number.
        """
        if which.isdigit():
            found = self.folder / _name(int(which))
            return found if found.is_dir() else None
        try:
            name = (self.folder / which).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        return self.folder / name

    def save(
        self,
        drafter: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        *,
        progress: Progress,
        contract: Contract,
        config: dict[str, Any],
        best: bool,
    ) -> Path:
        """Write a checkpoint, move the pointers, remove what is no longer kept.

        Args:
            best: This is the best evaluation so far.
        """
        destination = self.folder / _name(progress.step)
        shutil.rmtree(destination, ignore_errors=True)  # of a part that was cut off
        tensors, numbers = _optimizer_state(optimizer)
        state = {
            "schema": SCHEMA,
            "contract": asdict(contract),
            "config": config,
            "progress": asdict(progress),
            "device": _device_name(drafter),
            "scaler": scaler.state_dict(),
            "optimizer": numbers,
        }
        with new_folder(destination) as partial:
            save_file(drafter.state_dict(), partial / WEIGHTS)
            save_file(tensors | _generators(), partial / MOMENTS)
            (partial / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
        _sync(self.folder)
        for pointer in (LATEST, BEST) if best else (LATEST,):
            self._point(pointer, destination.name)
        self._prune()
        return destination

    def _point(self, pointer: str, name: str) -> None:
        partial = self.folder / f".{pointer}.partial"
        partial.write_text(f"{name}\n", encoding="utf-8")
        _sync(partial)
        partial.rename(self.folder / pointer)
        _sync(self.folder)

    def _prune(self) -> None:
        """Keep the newest up to `latest`, and the best.

        What is later than `latest` is of a part of the run that was given up.
        """
        steps = sorted(self.folder.glob("step-*"))
        latest, best = self.find(LATEST), self.find(BEST)
        current = [step for step in steps if step <= latest]
        kept = {*current[-self.keep :], best}
        for step in [*steps, *self.folder.glob(".step-*.partial-*")]:
            if step not in kept:
                shutil.rmtree(step)


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _optimizer_state(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Its tensors and its plain numbers, each by the parameter's place and a name."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, float] = {}
    for index, state in optimizer.state_dict()["state"].items():
        for part, value in state.items():
            kind = tensors if isinstance(value, Tensor) else numbers
            kind[f"{index}.{part}"] = value
    return tensors, numbers


def _device_name(drafter: torch.nn.Module) -> str:
    device = next(drafter.parameters()).device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _generators() -> dict[str, Tensor]:
    states = {f"{GENERATORS}cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"{GENERATORS}{number}"] = state
    return states


def _load(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise DFlash2Error(
            f"{file}: cannot be read ({error}); go on from another checkpoint"
        ) from None


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
