"""The files a drafter is published with: measured results, gates, a summary."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_dflash2.errors import DFlash2Error

from .analysis import LEAST_PROMPTS
from .record import VERSION
from .report import SUMMARY_FORMAT, Report
from .results import Group, Results, Split, Table
from .saved import report_from

MEASURED_FORMAT = "mlx-dflash2 measured results"
GATE = re.compile(r"\s*(\S|\S.*\S)\s*>=\s*(\d+(?:\.\d+)?)x\s*")


@dataclass(frozen=True)
class Gate:
    """A speedup that a domain, or "overall", has to reach."""

    group: str
    least: float

    def __str__(self) -> str:
        return f"{self.group} >= {self.least}x"


def parse_gate(text: str) -> Gate:
    """Read a gate such as `coding >= 2.0x`."""
    match = GATE.fullmatch(text)
    if match is None:
        raise DFlash2Error(
            f"--gate {text!r}: expected a domain or overall, >= and a speedup, as in "
            "'coding >= 2.0x'"
        )
    return Gate(match[1], float(match[2]))


def judge_gates(content: dict[str, Any], gates: Sequence[Gate]) -> list[dict[str, Any]]:
    """Hold the speedups of every speculative arm against the gates."""
    report = report_from(content)
    return [
        _judged(gate, table, report.name(table))
        for table in report.results.tables
        for gate in gates
    ]


def _judged(gate: Gate, table: Table, name: str) -> dict[str, Any]:
    """What a gate measured; what was not measured has not passed."""
    group = next((group for group in table.groups if group.name == gate.group), None)
    missing = _missing(group, table)
    measured = None if missing else group.speeds.decode.speedup.median
    return {
        "gate": str(gate),
        "arm": name,
        "measured": measured,
        "passed": measured is not None and measured >= gate.least,
        "reason": missing or f"measured {measured:.3f}x",
    }


def _missing(group: Group | None, table: Table) -> str | None:
    """Why a group has no speedup that may be published; None if it has."""
    if group is None:
        measured = ", ".join(found.name for found in table.groups)
        return f"not measured; there is {measured}"
    if group is table.overall:
        return table.no_headline and f"no headline: {table.no_headline}"
    if group.timed < LEAST_PROMPTS:
        return f"{group.timed} timed prompts, at least {LEAST_PROMPTS} are needed"
    return None


def measured_results(content: dict[str, Any], gates: Sequence[Gate]) -> dict[str, Any]:
    """The numbers as a drafter's card carries them.

    Raises:
        DFlash2Error: The report holds several drafters, widths or thinking modes.
    """
    report = report_from(content)
    if len(report.results.tables) != 1:
        names = "; ".join(report.name(table) for table in report.results.tables)
        raise DFlash2Error(
            "measured results describe one drafter, at one width, in one thinking "
            f"mode; this report has: {names or 'none'}"
        )
    table = report.results.tables[0]
    arm = report.arms[table.arm]
    costs = table.overall.costs
    return {
        "format": MEASURED_FORMAT,
        "version": VERSION,
        "partial": report.partial,
        "target": asdict(report.targets[arm.target]),
        "drafter": asdict(report.drafters[arm.drafter]),
        "num_draft_tokens": arm.num_draft_tokens,
        "thinking": table.thinking,
        "domains": {group.name: _numbers(group) for group in table.domains},
        "overall": _numbers(table.overall),
        "no_headline": table.no_headline,
        "costs": {
            "t_decode_ms": costs.decode,
            "t_verify_ms": costs.verify,
            "t_draft_ms": costs.draft,
            "loop_overhead_ms": costs.overhead,
        },
        "verdict": table.verdict,
        "warnings": report.results.warnings,
        "gates": judge_gates(content, gates),
        "settings": report.settings,
        "prompt_set": report.workload,
        "environment": report.environment,
    }


def _numbers(group: Group) -> dict[str, Any]:
    """A domain's line of the published table; joint@k is cumulative acceptance."""
    lossless, slots = group.lossless, group.acceptance.slots
    return {
        "prompts": group.prompts,
        **_speeds(group),
        "acceptance_length": group.acceptance.length,
        "joint": {f"joint@{k}": slot.cumulative for k, slot in enumerate(slots, 1)},
        "identical": f"{lossless.identical}/{lossless.compared}",
        "near_ties": lossless.near_ties,
    }


def _speeds(group: Group) -> dict[str, Any]:
    if group.speeds is None:
        return {}
    decode = group.speeds.decode
    return {
        "plain_tok_s": decode.plain.median,
        "spec_tok_s": decode.speculative.median,
        "speedup": decode.speedup.median,
        "speedup_interval": [decode.speedup.low, decode.speedup.high],
        "projected": group.speeds.projected,
    }


def summary(content: dict[str, Any]) -> dict[str, Any]:
    """A report without prompts, their names and anything that was written."""
    report = report_from(content)
    shared: Report = replace(report, results=_nameless(report.results))
    return {"format": SUMMARY_FORMAT, "version": VERSION, **asdict(shared)}


def _nameless(results: Results) -> Results:
    tables = [
        replace(table, splits=[_wordless(split) for split in table.splits])
        for table in results.tables
    ]
    return replace(
        results,
        tables=tables,
        drift=[replace(found, prompt=None) for found in results.drift],
        sampled=[replace(test, prompt=None) for test in results.sampled],
    )


def _wordless(split: Split) -> Split:
    return replace(split, prompt=None, plain=None, speculative=None)
