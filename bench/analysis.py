"""From what a bench measured to what it found."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median

from . import verdict
from .acceptance import acceptance, coverage
from .cases import Case, decode_seconds, find_cases, total_seconds
from .estimates import LEAST_VALUES, Estimate, median_interval
from .record import Record, RunRecord, Speculation
from .results import (
    Acceptance,
    BestWidth,
    CycleCosts,
    Group,
    Lossless,
    Pace,
    Results,
    SampledResult,
    Speeds,
    Split,
    Table,
    TargetDrift,
)
from .workload import TOTAL

LEAST_PROMPTS = LEAST_VALUES  # of every domain, before all of them give one number
LEVEL = 0.001  # of the p-values of one sampled test together
SPLIT_FIELDS = (
    *("position", "kind", "plain", "speculative"),
    *("plain_logit", "speculative_logit", "gap", "ulps"),
)


def analyse(record: Record) -> Results:
    """Compute all a report shows. The settings' seed makes it repeatable."""
    modes = dict.fromkeys(prompt.thinking for prompt in record.prompts)
    arms = [index for index, arm in enumerate(record.arms) if arm.drafter is not None]
    tables = [_table(record, arm, mode) for mode in modes for arm in arms]
    widths = _best_widths(record, tables)
    drift = [
        TargetDrift(**vars(found), drift=found.last / found.first - 1)
        for found in record.drift
    ]
    sampled = [
        SampledResult(  # by Bonferroni's correction
            **vars(test), same=min(test.p_values) >= LEVEL / len(test.p_values)
        )
        for test in record.sampled
    ]
    return Results(
        tables=tables,
        widths=widths,
        drift=drift,
        sampled=sampled,
        verdict=[verdict.best_width(record.arms, best) for best in widths],
        warnings=verdict.warnings(record, tables, drift, sampled),
    )


def _table(record: Record, arm: int, thinking: bool | None) -> Table:
    cases = find_cases(record, arm, thinking)
    slots, seed = record.arms[arm].num_draft_tokens, record.settings["seed"]
    domains = [
        _group(name, inside, slots, seed)
        for name in record.workload["domains"]
        if (inside := [case for case in cases if case.prompt.domain == name])
    ]
    no_headline = _no_headline(record, domains)
    overall = _group(TOTAL, cases, slots, seed)
    if no_headline:
        overall = replace(overall, speeds=None)
    return Table(
        arm=arm,
        thinking=thinking,
        domains=domains,
        overall=overall,
        no_headline=no_headline,
        splits=[
            _split(case) for case in cases if not case.done.comparison["identical"]
        ],
        verdict=verdict.judge(overall, no_headline, verify_width=slots + 1),
    )


def _no_headline(record: Record, domains: list[Group]) -> str | None:
    """Why the domains together give no speed; None if they do."""
    if record.partial:
        return "the bench was interrupted"
    few = [f"{g.name} {g.timed}" for g in domains if g.timed < LEAST_PROMPTS]
    if few:
        return f"timed prompts: {', '.join(few)}; at least {LEAST_PROMPTS} are needed"
    return None


def _group(name: str, cases: list[Case], slots: int, seed: int) -> Group:
    runs = [run for case in cases for run in case.runs]
    counts = acceptance([case.done.counts for case in cases], slots)
    costs = _costs(cases)
    if counts.curtailed:
        costs = replace(costs, overhead=None)
    timed = [case for case in cases if case.timed]
    return Group(
        name=name,
        prompts=len(cases),
        timed=len(timed),
        speeds=_speeds(timed, counts, costs, seed) if timed else None,
        at_limit=fmean(run.finish_reason == "length" for run in runs),
        acceptance=counts,
        costs=costs,
        lossless=_lossless([case.done for case in cases]),
        coverage=coverage([case.done.coverage for case in cases]),
    )


def _speeds(
    timed: list[Case], counts: Acceptance, costs: CycleCosts, seed: int
) -> Speeds:
    step = 1e3 * median(decode_seconds(case.plain) for case in timed)
    cycles = [case.cycle for case in timed if case.cycle is not None]
    cycle = median(cycles) if cycles else None
    return Speeds(
        decode=_pace(timed, decode_seconds, seed),
        end_to_end=_pace(timed, total_seconds, seed),
        projected=_projected(counts, costs),
        step=step,
        cycle=cycle,
        break_even=cycle and cycle / step,
    )


def _projected(counts: Acceptance, costs: CycleCosts) -> float | None:
    if counts.length is None or counts.curtailed:
        return None
    return counts.length * costs.decode / (costs.verify + costs.draft)


def _pace(
    timed: list[Case], seconds: Callable[[list[RunRecord]], float], seed: int
) -> Pace:
    plain = [seconds(case.plain) for case in timed]
    speculative = [seconds(case.speculative) for case in timed]
    ratios = [slow / fast for slow, fast in zip(plain, speculative, strict=True)]
    return Pace(
        plain=median_interval([1 / each for each in plain], seed),
        speculative=median_interval([1 / each for each in speculative], seed),
        speedup=median_interval(ratios, seed),
    )


def _costs(cases: list[Case]) -> CycleCosts:
    def middle(part: str) -> float:
        return median(getattr(case.done.costs, part) for case in cases)

    overheads = [
        case.cycle - case.done.costs.verify - case.done.costs.draft
        for case in cases
        if case.cycle is not None
    ]
    return CycleCosts(
        context=middle("context"),
        decode=middle("decode"),
        verify=middle("verify"),
        draft=middle("draft"),
        overhead=median(overheads) if overheads else None,
    )


def _lossless(done: list[Speculation]) -> Lossless:
    kinds = Counter(each.comparison["kind"] for each in done)
    return Lossless(
        compared=len(done),
        identical=kinds["identical"],
        near_ties=kinds["near tie"],
        differences=kinds["difference"],
        repeated=sum(each.repeated for each in done),
    )


def _split(case: Case) -> Split:
    found = {name: case.done.comparison[name] for name in SPLIT_FIELDS}
    return Split(case.prompt.name, case.prompt.domain, **found)


def _best_widths(record: Record, tables: list[Table]) -> list[BestWidth]:
    """For each drafter with several measured widths and a headline for each."""
    sweeps: dict[tuple, list[Table]] = {}
    for table in tables:
        arm = record.arms[table.arm]
        key = (table.thinking, arm.target, arm.drafter)
        sweeps.setdefault(key, []).append(table)
    return [
        _best_width(record, sweep)
        for sweep in sweeps.values()
        if len(sweep) > 1 and all(table.overall.speeds for table in sweep)
    ]


def _best_width(record: Record, sweep: list[Table]) -> BestWidth:
    best = max(sweep, key=lambda table: table.overall.speeds.decode.speedup.median)
    trained = record.drafters[record.arms[best.arm].drafter].num_draft_tokens
    usual = [t for t in sweep if record.arms[t.arm].num_draft_tokens == trained]
    return BestWidth(
        arm=best.arm,
        thinking=best.thinking,
        speedup=best.overall.speeds.decode.speedup,
        trained=trained,
        gain=_gain(record, best, usual[0]) if usual else None,
    )


def _gain(record: Record, best: Table, usual: Table) -> Estimate:
    """The speed of one arm over that of another, prompt by prompt."""
    ratios = [
        decode_seconds(slow.speculative) / decode_seconds(fast.speculative)
        for slow, fast in zip(
            find_cases(record, usual.arm, usual.thinking),
            find_cases(record, best.arm, best.thinking),
            strict=True,
        )
        if slow.timed and fast.timed
    ]
    return median_interval(ratios, record.settings["seed"])
