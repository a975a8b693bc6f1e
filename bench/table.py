"""A report as people read it, on a terminal or in markdown."""

from typing import Any

from .blocks import Block, Grid, Heading, Lines, as_markdown, as_text
from .estimates import LEAST_VALUES
from .record import ModelFacts
from .report import Report
from .results import Group, Table
from .saved import report_from
from .sections import number, table_blocks
from .verdict import mode_name

DEFINITIONS = [
    "plain, spec tok/s: decode only, without the prompt and the token it gives; for "
    "each prompt the mean of its runs, then the median over prompts.",
    "speedup: for each prompt plain over speculative seconds a token, then the median "
    "over prompts; in brackets a bootstrap 95% interval over prompts, from "
    f"{LEAST_VALUES} of them on.",
    "end to end: the same with the prompt's time and all tokens.",
    "acceptance length (AL): tokens emitted per cycle, the target's own bonus token "
    "counted; 1.0 means that nothing was accepted.",
    "accepted per cycle: drafted tokens kept per cycle, without the bonus token.",
    "acceptance rate: drafted tokens kept over drafted tokens verified.",
    "proj: AL * target decode / (target verify + draft block), the speedup that the "
    "parts, each measured alone, promise.",
    "loop overhead: a cycle of the loop less its verify and its draft.",
    "break-even: milliseconds a cycle over milliseconds a plain token, the AL at which "
    "speculation starts to pay; speedup is about AL / break-even.",
    "greedy-identical: outputs equal to plain decoding's, token by token; near tie: a "
    "split where plain decoding's two logits are less than 0.001 or at most two units "
    "in the last place apart.",
    "conditional: accepted, given that all slots before it were; cumulative: accepted, "
    "of all cycles that drafted it. Slots behind an end of sequence are not counted.",
]


def render(content: dict[str, Any], *, markdown: bool = False) -> str:
    """A report, or its summary, as text.

    Args:
        content: As its JSON file holds it.
    """
    report = report_from(content)
    blocks = [
        Heading("Speculative decoding bench", level=1),
        Lines(_environment(report)),
        *_lines("Warning: ", report.results.warnings),
        *_comparisons(report),
        *(block for t in report.results.tables for block in table_blocks(report, t)),
        *_drift(report),
        *_sampled(report),
        Heading("Definitions"),
        Lines(DEFINITIONS),
    ]
    return as_markdown(blocks) if markdown else as_text(blocks)


def _environment(report: Report) -> list[str]:
    machine = report.environment
    about = "{machine}, {processor}, {cores} cores, {memory_gb} GB, {system}"
    return [
        f"machine: {about.format(**machine)}",
        f"backend: {machine['backend']} on {machine['device']}, {machine['date']}",
        f"versions: {_pairs(machine['versions'])}",
        *(f"target: {_model(facts)}" for facts in report.targets),
        *(f"drafter: {_model(facts)}" for facts in report.drafters),
        f"prompts: {report.workload['source']}, {_pairs(report.workload['domains'])}, "
        f"sha256 {report.workload['sha256']}",
        f"settings: {_pairs(report.settings)}",
    ]


def _model(facts: ModelFacts) -> str:
    parts = [facts.name, facts.kind, facts.dtype]
    if facts.revision:
        parts.insert(1, f"revision {facts.revision}")
    if facts.quantization:
        parts.append(f"quantized ({_pairs(facts.quantization)})")
    if facts.num_draft_tokens:
        parts.append(f"trained for {facts.num_draft_tokens} drafted tokens")
    return ", ".join(parts)


def _pairs(content: dict[str, Any]) -> str:
    """Names and values, but for what was not asked for."""
    given = {name: value for name, value in content.items() if value is not None}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _lines(start: str, lines: list[str]) -> list[Block]:
    return [Lines([start + line for line in lines])] if lines else []


def _comparisons(report: Report) -> list[Block]:
    """A row a drafter, a column a domain, where there are several drafters."""
    tables = report.results.tables
    modes = dict.fromkeys(table.thinking for table in tables)
    sets = {mode: [t for t in tables if t.thinking == mode] for mode in modes}
    blocks: list[Block] = []
    for mode, compared in sets.items():
        if len(compared) > 1:
            blocks += [
                Heading(f"Comparison{mode_name(mode)}"),
                _comparison(report, compared),
            ]
    return blocks + _lines("", report.results.verdict)


def _comparison(report: Report, tables: list[Table]) -> Grid:
    names = [group.name for group in tables[0].groups]
    rows = []
    for index, arm in enumerate(report.arms):
        same = [
            table for table in tables if report.arms[table.arm].target == arm.target
        ]
        if arm.drafter is None and same:
            cells = [_plain_speed(group) for group in same[0].groups]
            rows.append([arm.label, *cells, "1.000x"])
        for table in same:
            if table.arm == index:
                rows.append(_drafter_row(arm.label, table))
    return Grid(["tok/s (AL)", *names, "overall speedup"], rows)


def _plain_speed(group: Group) -> str:
    return number(group.speeds and group.speeds.decode.plain.median, 2)


def _drafter_row(label: str, table: Table) -> list[str]:
    cells = [
        number(group.speeds and group.speeds.decode.speculative.median, 2)
        + f" ({number(group.acceptance.length, 2)})"
        for group in table.groups
    ]
    speeds = table.overall.speeds
    return [label, *cells, number(speeds and speeds.decode.speedup.median, 3, "x")]


def _drift(report: Report) -> list[Block]:
    if not report.results.drift:
        return []
    rows = [
        [
            report.arms[found.arm].label,
            found.prompt or "-",
            number(found.first),
            number(found.last),
            f"{found.drift:+.1%}",
        ]
        for found in report.results.drift
    ]
    header = ["plain decoding", "prompt", "first ms/token", "last ms/token", "drift"]
    return [Heading("Drift"), Grid(header, rows)]


def _sampled(report: Report) -> list[Block]:
    if not report.results.sampled:
        return []
    rows = [
        [
            report.arms[test.arm].label,
            test.prompt or "-",
            f"{test.temperature:g}",
            str(test.samples),
            ", ".join(f"{p:.2g}" for p in test.p_values),
            "same distribution" if test.same else "different distribution",
        ]
        for test in report.results.sampled
    ]
    header = ["drafter", "prompt", "temperature", "samples", "p-values", "verdict"]
    return [Heading("Sampled output"), Grid(header, rows)]
