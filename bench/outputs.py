"""Where the results of a bench go. Files appear whole, and none is overwritten."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlx_dflash2.checkpoint import new_folder
from mlx_dflash2.errors import DFlash2Error

from .analysis import analyse
from .files import STDOUT, as_json, refuse_unwritable, write_whole
from .plots import draw, require_matplotlib
from .record import Record
from .release import Gate, judge_gates, measured_results, summary
from .table import render

GATE_FAILED = 3


@dataclass
class Outputs:
    """The files a command line asked for.

    Attributes:
        json_file: The whole report; - is stdout, and the table goes to stderr.
        plot: A folder.
        measured_results: As drafter cards carry it.
        summary: Without prompts and texts.
        gates: Speedups that must be reached.
        begun: The JSON file is ours: one to go on with, or written before.
    """

    json_file: str | None = None
    markdown: str | None = None
    plot: str | None = None
    measured_results: str | None = None
    summary: str | None = None
    gates: Sequence[Gate] = ()
    begun: bool = False

    def check(self) -> None:
        """Raise DFlash2Error for a file that exists or cannot be written."""
        if self.plot is not None:
            require_matplotlib()
        if self.json_file == STDOUT and sys.stdout is None:
            raise DFlash2Error("--json - writes to stdout, which is closed")
        kept = None if self.json_file == STDOUT else self.json_file
        others = (self.markdown, self.measured_results, self.summary, self.plot)
        names = [name for name in (kept, *others) if name is not None]
        if len({Path(name).resolve() for name in names}) < len(names):
            raise DFlash2Error(f"one name for two files: {', '.join(names)}")
        for name in names:
            if not (self.begun and name == kept):
                refuse_unwritable(name)

    def save(self, record: Record) -> None:
        """Bring the JSON file up to date."""
        if self.json_file not in (None, STDOUT):
            text = as_json(report_of(record))
            write_whole(Path(self.json_file), text, new=not self.begun)
            self.begun = True

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
            write_whole(Path(name), text)
        if self.plot is not None:
            _draw(report, Path(self.plot))
        return _judge(judge_gates(report, self.gates))


def _draw(report: dict[str, Any], destination: Path) -> None:
    try:
        with new_folder(destination) as folder:
            draw(report, folder)
    except OSError as error:
        raise DFlash2Error(
            f"{destination}: cannot be written ({error.strerror})"
        ) from None


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
