"""Numbers, indices and lengths of a report that cannot be right, and where."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from .record import Coverage, Record, Speculation
from .report import Report
from .results import SlotCoverage, Table

LARGEST = 1e100  # far above any number of a bench, and safe to multiply
Damage = tuple[tuple[str | int, ...], str]  # the place, and what is wrong there


def wild_numbers(content: Any, *place: str | int) -> Iterator[Damage]:
    """Numbers that are none, or too large to compute with, wherever they stand."""
    match content:
        case dict():
            for name, value in content.items():
                yield from wild_numbers(value, *place, name)
        case list():
            for index, value in enumerate(content):
                yield from wild_numbers(value, *place, index)
        case int() | float() if not abs(content) <= LARGEST:
            yield place, f"expected a finite number, found {str(content)[:12]}"


def damaged_arms(saved: Record | Report) -> Iterator[Damage]:
    """Every arm has its models, and a plain arm to be held against."""
    plain = {arm.target for arm in saved.arms if arm.drafter is None}
    for index, arm in enumerate(saved.arms):
        if arm.target >= len(saved.targets):
            yield ("arms", index, "target"), f"there is no target {arm.target}"
        if arm.drafter is not None and arm.drafter >= len(saved.drafters):
            yield ("arms", index, "drafter"), f"there is no drafter {arm.drafter}"
        if arm.target not in plain:
            yield ("arms", index), f"no arm decodes target {arm.target} plainly"


def damaged_prompts(record: Record) -> Iterator[Damage]:
    """Every prompt was decoded by every arm."""
    arms, widths = range(len(record.arms)), _widths(record)
    yield from _unknown_arms(record.drift, arms, "drift")
    yield from _unknown_arms(record.sampled, widths, "sampled")
    for number, prompt in enumerate(record.prompts):
        place = "prompts", number
        if prompt.domain not in record.workload["domains"]:
            yield (*place, "domain"), "the workload has no such domain"
        if {run.arm for run in prompt.runs} != set(arms):
            yield (*place, "runs"), "they are not those of the arms"
        if [done.arm for done in prompt.speculation] != list(widths):
            yield (*place, "speculation"), "it is not that of the arms with a drafter"
        for index, done in enumerate(prompt.speculation):
            for part, what in _damaged_speculation(done, widths[done.arm]):
                yield (*place, "speculation", index, part), what


def damaged_results(report: Report) -> Iterator[Damage]:
    """What was found is of the arms, and all tables of a mode have the same rows."""
    arms, widths = range(len(report.arms)), _widths(report)
    known = {"tables": widths, "widths": widths, "drift": arms, "sampled": widths}
    for name, indices in known.items():
        found = getattr(report.results, name)
        yield from _unknown_arms(found, indices, "results", name)
    domains: dict[bool | None, list[str]] = {}
    for index, table in enumerate(report.results.tables):
        place = "results", "tables", index
        names = [group.name for group in table.domains]
        if domains.setdefault(table.thinking, names) != names:
            yield (*place, "domains"), "they are not those of the first table"
        for part, what in _damaged_table(table, widths[table.arm]):
            yield (*place, *part), what


def _widths(saved: Record | Report) -> dict[int, int]:
    """What the speculative arms draft at most, by their index."""
    arms = enumerate(saved.arms)
    return {i: arm.num_draft_tokens for i, arm in arms if arm.drafter is not None}


def _unknown_arms(
    found: Sequence[Any], known: Collection[int], *place: str
) -> Iterator[Damage]:
    for index, each in enumerate(found):
        if each.arm not in known:
            yield (*place, index, "arm"), f"arm {each.arm} is none that this is about"


def _damaged_speculation(done: Speculation, width: int) -> Iterator[tuple[str, str]]:
    counts, split = done.counts, done.comparison
    drafted, accepted, emitted = (
        counts.drafted_per_cycle,
        counts.accepted_per_cycle,
        counts.emitted_per_cycle,
    )
    if not len(drafted) == len(accepted) == len(emitted):
        yield "counts", "the lists are of different lengths"
    for cycle in zip(drafted, accepted, emitted, strict=True):
        if not _possible(*cycle, width):
            yield "counts", f"no cycle can draft, accept and emit {cycle} tokens"
    signs = split["identical"], split["kind"] == "identical", split["position"] is None
    if len(set(signs)) > 1:
        yield "comparison", "identical, kind and position contradict each other"
    if not _covers(done.coverage, width):
        yield "coverage", f"it is not of {width} slots"


def _possible(drafted: int, accepted: int, emitted: int, width: int) -> bool:
    """An end of sequence among the accepted tokens leaves no bonus token."""
    kept = 0 <= accepted <= drafted <= width
    return kept and max(accepted, 1) <= emitted <= accepted + 1


def _damaged_table(table: Table, width: int) -> Iterator[Damage]:
    if (table.no_headline is None) != (table.overall.speeds is not None):
        yield ("overall", "speeds"), "they and no_headline contradict each other"
    for index, group in enumerate(table.domains):
        if (group.speeds is None) != (group.timed == 0):
            yield ("domains", index, "speeds"), "they and timed contradict each other"
    groups = {("domains", i): group for i, group in enumerate(table.domains)}
    groups["overall",] = table.overall
    for place, group in groups.items():
        if len(group.acceptance.slots) != width:
            yield (*place, "acceptance"), f"it is not of {width} slots"
        if not _covers(group.coverage, width):
            yield (*place, "coverage"), f"it is not of {width} slots"


def _covers(coverage: Coverage | SlotCoverage | None, width: int) -> bool:
    """A short generation may not have drafted the last slots."""
    return coverage is None or len(coverage.trials) == len(coverage.hits) <= width
