"""The tables of one speculative arm in one thinking mode."""

from .blocks import Block, Grid, Heading, Lines
from .estimates import Estimate
from .report import Report
from .results import Group, Pace, Table


def table_blocks(report: Report, table: Table) -> list[Block]:
    """The table that drafter cards publish first, what explains it behind."""
    slots = len(table.overall.acceptance.slots)
    return [
        Heading(report.name(table)),
        _published(table),
        _costs(table, slots + 1),
        *_noise(table),
        Lines(table.verdict),
        Heading("Decode-only and end-to-end speeds, with 95% intervals", 3),
        _paces(table),
        Heading("Acceptance, named in three ways, and splits of greedy outputs", 3),
        _names(table),
        Heading("Acceptance by slot and accepted tokens per cycle, all prompts", 3),
        _slots(table.overall),
        _histogram(table.overall),
        *_oracle(table.overall),
        *_splits(table),
    ]


def _published(table: Table) -> Grid:
    header = "domain, plain tok/s, spec tok/s, speedup, proj, acceptance length"
    rows = []
    for group in table.groups:
        if group.speeds is None:
            continue
        decode, lossless = group.speeds.decode, group.lossless
        rows.append(
            [
                group.name,
                f"{decode.plain.median:.2f}",
                f"{decode.speculative.median:.2f}",
                interval(decode.speedup, 3, "x"),
                number(group.speeds.projected, 3, "x"),
                number(group.acceptance.length),
                f"{lossless.identical}/{lossless.compared}",
            ]
        )
    return Grid([*header.split(", "), "greedy-identical"], rows)


def _costs(table: Table, verify_width: int) -> Grid:
    header = (
        f"cost per cycle, target decode ms/token, target verify({verify_width}) ms, "
        "draft block ms, loop overhead ms, context, break-even"
    )
    return Grid(
        header.split(", "),
        [
            [
                group.name,
                number(group.costs.decode),
                number(group.costs.verify),
                number(group.costs.draft),
                number(group.costs.overhead),
                number(group.costs.context, 0),
                number(group.speeds and group.speeds.break_even),
            ]
            for group in table.groups
        ],
    )


def _noise(table: Table) -> list[Block]:
    overheads = [group.costs.overhead or 0.0 for group in table.groups]
    if min(overheads) >= 0:
        return []
    return [
        Lines(
            [
                "A loop overhead below 0 is within noise: the loop costs next to "
                "nothing beyond its verify and draft, which took longer alone."
            ]
        )
    ]


def _paces(table: Table) -> Grid:
    rows = []
    for group in table.groups:
        if group.speeds is not None:
            rows.append(_pace(group, "decode", group.speeds.decode))
            rows.append(_pace(group, "end to end", group.speeds.end_to_end))
    return Grid(["domain", "speed", "plain tok/s", "spec tok/s", "speedup"], rows)


def _pace(group: Group, kind: str, pace: Pace) -> list[str]:
    return [
        group.name,
        kind,
        interval(pace.plain, 2),
        interval(pace.speculative, 2),
        interval(pace.speedup, 3, "x"),
    ]


def _names(table: Table) -> Grid:
    header = (
        "domain, acceptance length, accepted per cycle, acceptance rate, cycles, "
        "near ties, differences, runs at limit"
    )
    return Grid(
        header.split(", "),
        [
            [
                group.name,
                number(group.acceptance.length),
                number(group.acceptance.per_cycle),
                percent(group.acceptance.rate),
                str(group.acceptance.cycles),
                str(group.lossless.near_ties),
                str(group.lossless.differences),
                percent(group.at_limit),
            ]
            for group in table.groups
        ],
    )


def _slots(group: Group) -> Grid:
    slots = group.acceptance.slots
    rows = [
        ["conditional", *(percent(slot.conditional) for slot in slots)],
        ["  of cycles", *(str(slot.conditional_trials) for slot in slots)],
        ["cumulative", *(percent(slot.cumulative) for slot in slots)],
        ["  of cycles", *(str(slot.cumulative_trials) for slot in slots)],
    ]
    if group.coverage is not None:
        covered = zip(group.coverage.hits, group.coverage.trials, strict=True)
        shares = [percent(hits / of if of else None) for hits, of in covered]
        shares += ["-"] * (len(slots) - len(shares))
        rows.append(["among candidates", *shares])
    return Grid(["slot", *(str(slot + 1) for slot in range(len(slots)))], rows)


def _histogram(group: Group) -> Grid:
    histogram, cycles = group.acceptance.histogram, group.acceptance.cycles
    return Grid(
        ["accepted", *map(str, range(len(histogram)))],
        [
            ["cycles", *map(str, histogram)],
            ["share", *(percent(n / cycles if cycles else None) for n in histogram)],
        ],
    )


def _oracle(group: Group) -> list[Block]:
    if group.coverage is None:
        return []
    return [
        Lines(
            [
                "A selector that always chose the right candidate would reach an "
                f"acceptance length of {group.coverage.oracle_length:.3f}."
            ]
        )
    ]


def _splits(table: Table) -> list[Block]:
    if not table.splits:
        return [Lines(["Every greedy output is identical to plain decoding's."])]
    header = (
        "split in, domain, token, plain, its logit, speculative, its logit, gap, "
        "ulps, class"
    )
    rows = [
        [
            split.prompt or "-",
            split.domain,
            str(split.position),
            number(split.plain, 0),
            number(split.plain_logit, 4),
            number(split.speculative, 0),
            number(split.speculative_logit, 4),
            "-" if split.gap is None else f"{split.gap:.3g}",
            number(split.ulps, 1),
            split.kind,
        ]
        for split in table.splits
    ]
    return [Grid(header.split(", "), rows)]


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def interval(estimate: Estimate, digits: int, unit: str = "") -> str:
    """The median and its interval, as 1.104x [1.090, 1.118]."""
    text = number(estimate.median, digits, unit)
    if estimate.low is None:
        return text
    return f"{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
