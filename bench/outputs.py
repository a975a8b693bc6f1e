"""Where the results of a bench go. Files appear whole, and none is overwritten."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlx_dflash2.checkpoint import new_folder, refuse_existing
from mlx_dflash2.errors import DFlash2Error

from .analysis import analyse
from .files import STDOUT, as_json, refuse_unwritable, write_whole
from .plots import draw, require_matplotlib
from .record import Record
from .release import Gate, judge_gates, measured_results, summary
from .table import render

GATE_FAILED = 3


@dataclass(frozen=True)
class Outputs:
    """The files a command line asked for.

    Attributes:
        json_file: The whole report; - is stdout, and the table goes to stderr.
        plot: A folder.
        measured_results: As drafter cards carry it.
        summary: Without prompts and texts.
        gates: Speedups that must be reached.
    """

    json_file: str | None = None
    markdown: str | None = None
    plot: str | None = None
    measured_results: str | None = None
    summary: str | None = None
    gates: Sequence[Gate] = ()

    def check(self, *, resuming: bool = False) -> None:
        """Raise DFlash2Error for a file that exists or cannot be written.

        Args:
            resuming: The JSON file is there, and goes on.
        """
        if self.plot is not None:
            require_matplotlib()
        kept = None if resuming or self.json_file == STDOUT else self.json_file
        others = (self.markdown, self.measured_results, self.summary, self.plot)
        names = [name for name in (kept, *others) if name is not None]
        if len(set(names)) < len(names):
            raise DFlash2Error(f"one name for two files: {', '.join(names)}")
        for name in names:
            refuse_unwritable(Path(name))

    def save(self, record: Record) -> None:
        """Bring the JSON file up to date."""
        if self.json_file not in (None, STDOUT):
            write_whole(Path(self.json_file), as_json(report_of(record)))

    def write(self, report: dict[str, Any]) -> int:
        """Print the tables and write every other file; the exit code."""
        to_stdout = self.json_file == STDOUT
        contents = {
            self.markdown: lambda: render(report, markdown=True),
            self.measured_results: lambda: as_json(
                measured_results(report, self.gates)
            ),
            self.summary: lambda: as_json(summary(report)),
        }
        texts = {name: text() for name, text in contents.items() if name is not None}
        click.echo(render(report), err=to_stdout)
        if to_stdout:
            click.echo(as_json(report), nl=False)
        for name, text in texts.items():
            refuse_existing(Path(name))
            write_whole(Path(name), text)
        if self.plot is not None:
            with new_folder(Path(self.plot)) as folder:
                draw(report, folder)
        return _judge(judge_gates(report, self.gates))


def report_of(record: Record) -> dict[str, Any]:
    """What was measured and what follows from it, as the JSON file holds it."""
    return {**record.as_dict(), "results": asdict(analyse(record))}


def _judge(gates: list[dict[str, Any]]) -> int:
    """Say how the gates ended; the exit code."""
    failed = [gate for gate in gates if not gate["passed"]]
    for gate in gates:
        word = "passed" if gate["passed"] else "failed"
        line = f"Gate {word}, {gate['arm']}: {gate['gate']} ({gate['reason']})"
        click.echo(line, err=True)
    return GATE_FAILED if failed else 0
