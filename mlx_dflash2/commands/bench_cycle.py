"""`mlx-dflash2 bench cycle`: build a pair, measure its parts, print them."""

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import DFlash2Error
from .drafters import load_named_drafter, name_drafter


def run_cycle(options: dict[str, Any]) -> int:
    """Measure, print, write; the exit code."""
    from mlx_dflash2.bench.cycle import Plan, measure_cycle, refuse_long_prompts
    from mlx_dflash2.bench.cycle_report import CycleReport
    from mlx_dflash2.bench.environment import describe_machine
    from mlx_dflash2.bench.files import (
        STDOUT,
        as_json,
        refuse_unwritable,
        write_whole,
    )

    from ..checks import draft_width

    file = options["json_file"]
    if file not in (None, STDOUT):
        refuse_unwritable(file)
    target, drafter = _models(options)
    plan = Plan(
        prompt_tokens=options["prompt_tokens"],
        generation_tokens=options["generation_tokens"],
        trials=options["num_trials"],
        num_draft_tokens=draft_width(drafter, options["num_draft_tokens"]),
        prefill_step_size=options["prefill_step_size"],
        seed=options["seed"],
    )
    refuse_long_prompts(target, drafter, plan)
    steps = len(plan.prompt_tokens) * (plan.trials + 1)
    with click.progressbar(length=steps, label="Trials", file=sys.stderr) as bar:
        measured = measure_cycle(target, drafter, plan, tell=lambda: bar.update(1))
    models = _describe(target, drafter, options["random_weights"])
    report = CycleReport(describe_machine(), models, plan, measured)
    if file == STDOUT:
        click.echo(as_json(report.as_dict()), nl=False)
        return 0
    click.echo("\n".join(report.lines()))
    if file is not None:
        write_whole(Path(file), as_json(report.as_dict()))
    return 0


def _models(options: dict[str, Any]):
    """Target and drafter, loaded or with random weights; the drafter may be None."""
    named = options["draft_model"] is not None
    if named:
        name_drafter(options)
    else:
        _refuse_without_drafter(options)
    if options["random_weights"]:
        return _random_models(options)
    if options["dtype"] is not None:
        raise DFlash2Error("--dtype needs --random-weights; files have their own")
    from ..loading import load_target

    target, _ = load_target(
        options["model"], revision=options["revision"], offline=options["offline"]
    )
    return target, load_named_drafter(options, target) if named else None


def _refuse_without_drafter(options: dict[str, Any]) -> None:
    for name in ("draft_kind", "draft_revision", "num_draft_tokens"):
        if options[name] is not None:
            flag = name.replace("_", "-")
            raise DFlash2Error(f"--{flag} needs --draft-model")


def _random_models(options: dict[str, Any]):
    from mlx_dflash2.bench.random_models import random_drafter, random_target

    same = {name: options[name] for name in ("dtype", "seed", "offline")}
    target = random_target(options["model"], revision=options["revision"], **same)
    if options["draft_model"] is None:
        return target, None
    drafter = random_drafter(
        options["draft_model"],
        target,
        kind=options["draft_kind"],
        revision=options["draft_revision"],
        **same,
    )
    return target, drafter


def _describe(target, drafter, random: bool) -> dict[str, Any]:
    """What was measured, in the order it is printed."""
    weights = "random" if random else "loaded"
    found = {
        "model": target.source.name,
        "revision": target.source.revision,
        "dtype": _dtype(target),
        "quantization": target.config.get("quantization"),
        "layers": target.num_layers,
        "weights": weights,
    }
    if drafter is not None:
        config = drafter.config
        found |= {
            "draft_model": drafter.source.name,
            "draft_revision": drafter.source.revision,
            "draft_kind": config.kind,
            "draft_dtype": _dtype(drafter),
            "draft_quantization": config.quantization,
            "trained_to_draft": config.num_draft_tokens,
        }
    return found


def _dtype(model) -> str:
    return str(model.dtype).removeprefix("mlx.core.")
