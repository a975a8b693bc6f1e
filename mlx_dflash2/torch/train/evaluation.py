"""Evaluate a checkpoint of a run, or any drafter, on held-out rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..drafter import Drafter
from ..loading import load_drafter
from .checkpoints import Saved
from .config import TrainConfig, read_config
from .features import largest_tap
from .metrics import Evaluator
from .precision import Precision
from .setup import choose_held_out, open_target, target_source
from .start import CHECKPOINTS, find_saved, load_saved
from .world import World


@dataclass(frozen=True)
class Subject:
    """What is evaluated, and the settings that say on what.

    Attributes:
        name: As it is printed.
        saved: The checkpoint; None for a drafter's folder or repository.
    """

    name: str
    config: TrainConfig
    saved: Saved | None

    def drafter(self) -> Drafter:
        """In float32 on the CPU."""
        if self.saved is not None:
            return load_saved(self.saved)
        return load_drafter(self.name, dtype=torch.float32, offline=self.config.offline)


def find_subject(name: str, which: str, flags: dict[str, Any]) -> Subject:
    """A run's folder, or else a drafter.

    Args:
        name: A folder, or a Hub repository.
        which: The checkpoint of a run: "best", "latest" or a step.
        flags: Settings that override those of the run.
    """
    if (Path(name) / CHECKPOINTS).is_dir():
        saved = find_saved(Path(name), which)
        config = read_config(flags=saved.config | flags)
        return Subject(f"{name} step {saved.progress.step}", config, saved)
    return Subject(name, read_config(flags=flags), None)


def evaluate(subject: Subject) -> dict[str, Any]:
    """Measure it; see `metrics.Tally.summary`.

    Raises:
        DFlash2Error: Target or rows are missing, or do not fit.
    """
    config = subject.config
    config.need("target", "data")
    world = World.join(config.device)
    source = target_source(config)
    rows = choose_held_out(config, source)
    precision = Precision.choose(config.precision, world.device)
    target = open_target(config, source, precision)
    drafter = subject.drafter().to(world.device).eval()
    objective = config.objective
    if subject.saved is None:
        objective = read_config(flags={"drafter.family": drafter.config.kind}).objective
    evaluator = Evaluator(
        drafter,
        target,
        objective,
        precision,
        world,
        config.evaluation.blocks_at_once,
        precision.tap_scale(largest_tap(target, drafter.config.target_layer_ids, rows)),
    )
    return evaluator(rows)
