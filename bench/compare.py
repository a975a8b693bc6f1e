"""Saved reports: read one, or lay two side by side."""

from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mlx_dflash2.errors import DFlash2Error

from .blocks import Block, Grid, Heading, Lines, as_text
from .record import FORMAT, VERSION, Record
from .report import SUMMARY_FORMAT, Report
from .results import Group
from .saved import record_from, report_from
from .sections import interval, number

MACHINE = ("machine", "processor", "cores", "system", "backend", "device")


def read_report(path: str | Path) -> dict[str, Any]:
    """A report or its summary, all of it checked.

    Raises:
        DFlash2Error: The file is none, is of another version, or is damaged.
    """
    try:
        content = from_json(Path(path).read_bytes())
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise DFlash2Error(f"{path}: is not JSON ({error})") from None
    kind = content.get("format") if isinstance(content, dict) else None
    if kind not in (FORMAT, SUMMARY_FORMAT):
        raise DFlash2Error(
            f"{path}: is no report of a bench; expected a file that --json or "
            "--summary wrote"
        )
    if content.get("version") != VERSION:
        raise DFlash2Error(
            f"{path}: has version {content.get('version')} of the report format, but "
            f"this program reads {VERSION}"
        )
    try:
        report_from(content)
        if kind == FORMAT:
            record_from(content)
    except DFlash2Error as error:
        raise DFlash2Error(f"{path}: {error}") from None
    return content


def read_record(path: str | Path) -> Record:
    """What a report was made from, to go on with it."""
    content = read_report(path)
    if content["format"] == SUMMARY_FORMAT:
        raise DFlash2Error(f"{path}: is a summary, which has no prompts to go on from")
    return record_from(content)


def compare(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Two reports of the same work, side by side.

    Raises:
        DFlash2Error: They differ in prompts, targets, tokenizer, seed or settings.
    """
    reports = {"A": report_from(first), "B": report_from(second)}
    differing = _differences(*(_identity(report) for report in reports.values()))
    if differing:
        raise DFlash2Error(
            "A and B did not do the same work, so they cannot be compared: "
            + "; ".join(differing)
        )
    return as_text(
        [
            Heading("Comparison of two reports", level=1),
            *(Lines([_about(letter, report)]) for letter, report in reports.items()),
            *_notes(*reports.values()),
            _grid(reports),
        ]
    )


def _identity(report: Report) -> dict[str, Any]:
    """All that must be equal, by what to call it."""
    found = {"prompts (sha256)": report.workload["sha256"]}
    for place, facts in enumerate(report.targets, 1):
        target = f"target {place}"
        found |= {f"{target} {name}": digest for name, digest in facts.files.items()}
        found |= {
            f"{target} tokenizer": facts.tokenizer,
            f"{target} dtype": facts.dtype,
        }
    return found | {f"setting {name}": value for name, value in report.settings.items()}


def _differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    return [
        f"{name} is {_short(first.get(name))} in A and {_short(second.get(name))} in B"
        for name in first | second
        if first.get(name) != second.get(name)
    ]


def _short(value: Any) -> str:
    """Enough of a value to see a difference."""
    return "missing" if value is None else str(value)[:12]


def _about(letter: str, report: Report) -> str:
    machine = report.environment
    return (
        f"{letter}: {machine['date']}, {machine['processor']}, "
        f"{machine['backend']} on {machine['device']}"
    )


def _notes(first: Report, second: Report) -> list[Block]:
    notes = []
    here, there = first.environment, second.environment
    machine = [name for name in MACHINE if here[name] != there[name]]
    if machine:
        notes.append(
            f"Note: the machines differ ({', '.join(machine)}), so speeds are not "
            "comparable; counts and acceptance are."
        )
    versions = _differences(here["versions"], there["versions"])
    if versions:
        notes.append(f"Note: the versions differ: {'; '.join(versions)}.")
    notes += [
        f"Note: {letter} was interrupted."
        for letter, report in (("A", first), ("B", second))
        if report.partial
    ]
    return [Lines(notes)] if notes else []


def _grid(reports: dict[str, Report]) -> Grid:
    """A row for every domain, report and arm."""
    header = "domain, arm, plain tok/s, spec tok/s, speedup, acceptance length"
    tables = [
        (f"{letter}: {report.name(table)}", table)
        for letter, report in reports.items()
        for table in report.results.tables
    ]
    domains = dict.fromkeys(g.name for _, table in tables for g in table.groups)
    rows = [
        _row(name, group)
        for domain in domains
        for name, table in tables
        for group in table.groups
        if group.name == domain
    ]
    return Grid([*header.split(", "), "greedy-identical"], rows)


def _row(arm: str, group: Group) -> list[str]:
    pace = group.speeds and group.speeds.decode
    return [
        group.name,
        arm,
        number(pace and pace.plain.median, 2),
        number(pace and pace.speculative.median, 2),
        interval(pace.speedup, 3, "x") if pace else "-",
        number(group.acceptance.length),
        f"{group.lossless.identical}/{group.lossless.compared}",
    ]
