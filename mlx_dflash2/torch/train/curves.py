"""Pictures of a run's metrics."""

import json
from pathlib import Path
from typing import Any

from mlx_dflash2.errors import DFlash2Error

from .loop import METRICS


def require_matplotlib() -> None:
    """Raise DFlash2Error where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DFlash2Error(
            "--plot needs matplotlib, which is not installed; pip install "
            "'mlx-dflash2[plot]'"
        ) from None


def draw_curves(run: Path, picture: Path) -> None:
    """Draw loss, accuracy of the first slots, and held-out acceptance over the steps.

    Raises:
        DFlash2Error: matplotlib is missing, or the run has no metrics.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = read_metrics(run)
    figure = Figure(figsize=(8, 9), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, acceptance = figure.subplots(3, sharex=True)
    for term in sorted({name for line in lines for name in line if "loss_" in name}):
        points = [(line["step"], line[term]) for line in lines if term in line]
        loss.plot(*zip(*points, strict=True), label=term.removeprefix("loss_"))
    loss.set(ylabel="loss", yscale="log")
    for slot in range(min(3, len(lines[0]["accuracy"]))):
        points = [(line["step"], line["accuracy"][slot]) for line in lines]
        accuracy.plot(*zip(*points, strict=True), label=f"slot {slot + 1}")
    accuracy.set(ylabel="accuracy in training", ylim=(0, 1))
    found = [
        (line["step"], line["evaluation"]) for line in lines if "evaluation" in line
    ]
    for name in ("oracle_acceptance_length", "acceptance_length"):
        points = [(step, e[name]) for step, e in found if name in e]
        if points:
            label = name.removesuffix("_length").replace("_", " ")
            acceptance.plot(*zip(*points, strict=True), marker="o", label=label)
    acceptance.set(ylabel="held-out acceptance length", xlabel="step")
    for axes in (loss, accuracy, acceptance):
        axes.grid(color="#e4e6e8")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False)
    figure.savefig(picture)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, one for each step.

    Raises:
        DFlash2Error: There are none.
    """
    path = run / METRICS
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    lines = [json.loads(line) for line in text.splitlines()]
    if not lines:
        raise DFlash2Error(f"{path}: holds no step yet; nothing can be drawn")
    return lines
