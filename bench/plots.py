"""Three pictures of a report: speedup, acceptance, and what a cycle costs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_dflash2.errors import DFlash2Error

from .fonts import Fonts, find_fonts
from .report import Report
from .results import Table
from .saved import report_from

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ["#2f6db5", "#d9822b", "#3b9c6d", "#a54a8e", "#8a6d3b", "#5b6b7a"]
PARTS = {"verify": "#2f6db5", "draft": "#8fbbe8", "overhead": "#d4d8dc"}
DARK, LIGHT = "#3d4248", "#e4e6e8"


def require_matplotlib() -> None:
    """Raise DFlash2Error where there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise DFlash2Error(
            "--plot needs matplotlib, which is not installed; "
            "pip install 'mlx-dflash2[plot]'"
        ) from None


def draw(content: dict[str, Any], folder: Path) -> list[Path]:
    """Write speedup.png, acceptance.png and cost.png into a folder."""
    require_matplotlib()
    from matplotlib import rc_context

    report = report_from(content)
    if not report.results.tables:
        raise DFlash2Error("--plot: no prompt was finished, there is nothing to draw")
    fonts = find_fonts(_names(report))
    report = _drawable(report, fonts)
    pictures = {"speedup": _speedup, "acceptance": _acceptance, "cost": _cost}
    paths = []
    for name, picture in pictures.items():
        path = folder / f"{name}.png"
        look = {"font.family": fonts.families, "text.parse_math": False}
        with rc_context(look), _axes(path) as axes:
            picture(axes, report)
        paths.append(path)
    return paths


def _names(report: Report) -> list[str]:
    groups = [group for table in report.results.tables for group in table.groups]
    return [*(arm.label for arm in report.arms), *(group.name for group in groups)]


def _drawable(report: Report, fonts: Fonts) -> Report:
    """The report with what has no glyph escaped in the names of arms and domains."""

    def renamed(table: Table) -> Table:
        domains = [replace(g, name=fonts.shown(g.name)) for g in table.domains]
        return replace(table, domains=domains)

    arms = [replace(arm, label=fonts.shown(arm.label)) for arm in report.arms]
    tables = [renamed(table) for table in report.results.tables]
    return replace(report, arms=arms, results=replace(report.results, tables=tables))


@contextmanager
def _axes(path: Path) -> Iterator["Axes"]:
    """Axes of the house style; the picture is saved in the end."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    yield axes
    figure.savefig(path)


def _speedup(axes: "Axes", report: Report) -> None:
    """Bars by domain with their intervals, and the line at 1."""
    tables = report.results.tables
    timed = [[group for group in table.groups if group.speeds] for table in tables]
    names = list(dict.fromkeys(group.name for groups in timed for group in groups))
    width = 0.8 / len(tables)
    for place, (table, groups) in enumerate(zip(tables, timed, strict=True)):
        shift = (place - (len(tables) - 1) / 2) * width
        speedups = [group.speeds.decode.speedup for group in groups]
        axes.bar(
            [names.index(group.name) + shift for group in groups],
            [each.median for each in speedups],
            0.92 * width,
            yerr=[
                [each.median - (each.low or each.median) for each in speedups],
                [(each.high or each.median) - each.median for each in speedups],
            ],
            color=_color(place),
            error_kw={"ecolor": DARK, "elinewidth": 1.4, "capsize": 3},
            label=report.name(table),
        )
    axes.axhline(1, color=DARK, linewidth=1.2, linestyle="--", label="plain decoding")
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("speedup")
    axes.set_title("Speedup over plain decoding, with 95% intervals", loc="left")
    _legend_below(axes)


def _acceptance(axes: "Axes", report: Report) -> None:
    """Conditional and cumulative acceptance of each slot, all prompts."""
    for place, table in enumerate(report.results.tables):
        slots = table.overall.acceptance.slots
        at = range(1, len(slots) + 1)
        look = {"color": _color(place), "linewidth": 1.8, "markersize": 5}
        name = report.name(table)
        conditional = [_percent(slot.conditional) for slot in slots]
        cumulative = [_percent(slot.cumulative) for slot in slots]
        axes.plot(at, conditional, "o-", label=f"{name}, conditional", **look)
        axes.plot(at, cumulative, "s--", label=f"{name}, cumulative", **look)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 104)
    axes.set_xlabel("drafted token of the cycle")
    axes.set_ylabel("accepted, %")
    axes.set_title("Acceptance by slot", loc="left")
    _legend_below(axes)


def _cost(axes: "Axes", report: Report) -> None:
    """The parts of a cycle end to end, under the plain step they replace."""
    tables = report.results.tables
    for at, table in enumerate(tables):
        costs = table.overall.costs
        axes.barh(at - 0.26, costs.decode, 0.2, color=DARK, label=_once("plain", at))
        start = 0.0
        for part, color in PARTS.items():
            length = max(getattr(costs, part) or 0.0, 0.0)  # noise may be below 0
            look = {"left": start, "color": color, "label": _once(part, at)}
            axes.barh(at + 0.06, length, 0.4, **look)
            start += length
        text = f"  {start / costs.decode:.2f} plain steps"
        axes.text(start, at + 0.06, text, va="center", color=DARK)
    axes.set_yticks(range(len(tables)), map(report.name, tables))
    axes.set_ylim(len(tables) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.grid(visible=False, axis="y")
    axes.grid(axis="x", color=LIGHT, linewidth=0.8)
    axes.set_xlabel("milliseconds")
    axes.set_title("What a cycle and a plain step cost", loc="left")
    _legend_below(axes)


def _once(part: str, at: int) -> str | None:
    """A label for the legend, which names each kind of bar once."""
    names = {"plain": "plain step", "overhead": "loop overhead"}
    return names.get(part, part) if at == 0 else None


def _percent(share: float | None) -> float:
    """A point of a line; a slot without trials leaves a gap."""
    return math.nan if share is None else 100 * share


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _legend_below(axes: "Axes") -> None:
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False)
