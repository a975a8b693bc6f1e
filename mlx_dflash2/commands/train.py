"""`mlx-dflash2 train run`, `evaluate` and `export`."""

import json
from pathlib import Path
from typing import Any

import click

from ..errors import DFlash2Error

PLACES = {  # flags whose setting has another name
    "model": "target",
    "family": "drafter.family",
    "layers": "drafter.layers",
    "mask_token_id": "drafter.mask_token_id",
    "anchors": "batch.anchors",
    "lr": "optimizer.lr",
}
CURVES = "curves.png"


def run_train(options: dict[str, Any]) -> int:
    """Train, or say what would be done; the exit code."""
    from ..torch.train.config import EXAMPLE, read_config
    from ..torch.train.settings import read_flag

    asked = {name: options.pop(name) for name in ("resume", "plan", "plot", "example")}
    if asked["example"]:
        click.echo(EXAMPLE.read_text(encoding="utf-8"), nl=False)
        return 0
    file, settings = options.pop("config_file"), options.pop("settings")
    flags = _settings(options, rows="batch.rows") | dict(map(read_flag, settings))
    _need_torch()
    if asked["resume"] and file is None:
        flags = _begun_with(flags) | flags
    config = read_config(Path(file) if file else None, flags)
    if asked["plan"]:
        return _print_plan(config)
    if asked["plot"]:
        from ..torch.train.curves import require_matplotlib

        require_matplotlib()
    from ..torch.train.start import train

    code = train(config, resume=asked["resume"])
    if asked["plot"]:
        from ..torch.train.curves import draw_curves

        draw_curves(Path(config.out), Path(config.out) / CURVES)
    return code


def run_evaluate(options: dict[str, Any]) -> int:
    """Evaluate and print; the exit code."""
    subject, which = options.pop("subject"), options.pop("checkpoint")
    plot, as_json = options.pop("plot"), options.pop("as_json")
    _need_torch()
    from ..torch.train.evaluation import evaluate, find_subject

    found = find_subject(subject, which, _settings(options, rows="evaluation.rows"))
    if plot is not None:
        from ..torch.train.curves import draw_curves

        draw_curves(Path(subject), Path(plot))
    measured = evaluate(found)
    if as_json:
        click.echo(json.dumps({"subject": found.name} | measured))
        return 0
    click.echo(found.name)
    for name, value in measured.items():
        click.echo(f"  {name.replace('_', ' ')}: {_shown(value)}")
    return 0


def run_export(options: dict[str, Any]) -> int:
    """Export and print; the exit code."""
    _need_torch()
    from ..torch.train.export import export
    from ..torch.train.start import find_saved

    results = options["results"]
    lines = export(
        find_saved(Path(options["run_folder"]), options["checkpoint"]),
        Path(options["destination"]),
        results=Path(results) if results else None,
        average=options["average"],
    )
    click.echo("\n".join(lines))
    return 0


def _settings(options: dict[str, Any], *, rows: str) -> dict[str, Any]:
    """Flags that were given, by the name of their setting."""
    places = PLACES | {"rows": rows}
    return {
        places.get(name, name): value
        for name, value in options.items()
        if value is not None
    }


def _begun_with(flags: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the run that goes on."""
    from ..torch.train.start import find_saved

    if not flags.get("out"):
        raise DFlash2Error("--resume needs --out, the folder of the run that goes on")
    saved = find_saved(Path(flags["out"])).config
    return saved | {"warm_start": ""}


def _print_plan(config) -> int:
    from ..torch.train.plan import plan
    from ..torch.train.precision import Precision
    from ..torch.train.world import find_device

    precision = Precision.choose(config.precision, find_device(config.device))
    click.echo("\n".join(plan(config, precision.name)))
    return 0


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise DFlash2Error(
            "training needs PyTorch, which is not installed; pip install "
            "'mlx-dflash2[torch]'"
        ) from None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
