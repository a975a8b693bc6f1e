"""What `bench cycle` prints and writes."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .cycle import Measured, Plan
from .estimates import Estimate

FORMAT, VERSION = "mlx-dflash2 bench cycle", 1

TITLES = {  # of what a trial measures; times are milliseconds
    "prefill": "prefill, plain (tokens/s)",
    "drafter_prefill": "prefill with the drafter (tokens/s)",
    "plain": "plain step of the loop",
    "draft": "draft block",
    "decision": "  of it the choice of tokens",
    "cycle": "cycle of the loop",
    "overhead": "  beyond verify and draft",
    "over_parts": "  over verify and draft (ratio)",
    "break_even": "break-even acceptance length",
}


@dataclass(frozen=True)
class CycleReport:
    """All prompt lengths.

    Attributes:
        models: Names, types and widths of the pair.
    """

    environment: dict[str, Any]
    models: dict[str, Any]
    plan: Plan
    measured: list[Measured]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it: raw trials and their medians."""
        lengths = [
            asdict(found)
            | {
                "medians": {
                    name: asdict(estimate)
                    for name, estimate in found.estimates(self.plan.seed).items()
                }
            }
            for found in self.measured
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "environment": self.environment,
            "models": self.models,
            "settings": asdict(self.plan),
            "lengths": lengths,
        }

    def lines(self) -> list[str]:
        """A table: what was measured by prompt length, in medians with intervals."""
        estimates = [found.estimates(self.plan.seed) for found in self.measured]
        heads = [f"{found.prompt_tokens} tokens" for found in self.measured]
        rows = [["median [95% interval], ms", *heads]]
        for name in estimates[0]:
            if not name.startswith("ratio_"):
                cells = [_cell(found, name) for found in estimates]
                rows.append([_title(name), *cells])
        rows += self._memory_rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        about = [
            f"{name.replace('_', ' ')}: {value}"
            for name, value in self.models.items()
            if value is not None
        ]
        plan = [
            f"drafted tokens verified per cycle: {self.plan.num_draft_tokens}",
            f"tokens emitted per trial: {self.plan.generation_tokens}",
            f"trials: {self.plan.trials}",
        ]
        return [*about, *plan, *padded, *_noise(estimates)]

    def _memory_rows(self) -> Iterator[list[str]]:
        plain = [f"{found.plain_memory / 1e6:.1f}" for found in self.measured]
        yield ["peak memory, plain (MB)", *plain]
        if self.measured[0].memory is not None:
            both = [f"{found.memory / 1e6:.1f}" for found in self.measured]
            yield ["peak memory with the drafter (MB)", *both]


def _noise(estimates: list[dict[str, Estimate]]) -> list[str]:
    if all(found["overhead"].median >= 0 for found in estimates if "overhead" in found):
        return []
    return ["Below 0 beyond verify and draft is within noise: both took longer alone."]


def _title(name: str) -> str:
    kind, _, rows = name.partition("_")
    if kind != "forward":
        return TITLES[name]
    return f"target forward, {rows} row{'s' if int(rows) > 1 else ''}"


def _cell(estimates: dict[str, Estimate], name: str) -> str:
    """A median, its interval, and of a forward the ratio to one row."""
    found = estimates[name]
    text = _number(found.median)
    if found.low is not None:
        text += f" [{_number(found.low)}, {_number(found.high)}]"
    ratio = estimates.get(name.replace("forward", "ratio")) if "_" in name else None
    return text if ratio is None or ratio is found else f"{text} {ratio.median:.2f}x"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"
