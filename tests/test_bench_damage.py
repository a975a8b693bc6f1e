"""A damaged report is refused in one line that says where; nothing else happens."""

import copy
import json
from dataclasses import replace

import pytest
from bench_records import report_of, sample_record
from command_line import assert_refused, run

from mlx_dflash2.bench import estimates
from mlx_dflash2.bench.compare import compare, read_record, read_report
from mlx_dflash2.bench.release import judge_gates, parse_gate, summary
from mlx_dflash2.bench.table import render
from mlx_dflash2.errors import DFlash2Error

GATES = [parse_gate("coding >= 1x"), parse_gate("overall >= 1x")]
DROP = object()
MUTATIONS = {
    "dropped": DROP,
    "null": None,
    "text": "x",
    "list": [],
    "nine": 9,
    "zero": 0,
    "nan": float("nan"),
    "huge": 10**400,
}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """How sure the numbers are does not matter here."""
    monkeypatch.setattr(estimates, "RESAMPLES", 20)


@pytest.fixture(scope="module")
def content():
    """A report with something in every field."""
    record = sample_record()
    workload = record.workload | {"domains": {"coding": 4}}
    return as_saved(replace(record, prompts=record.prompts[:4], workload=workload))


def as_saved(record):
    return json.loads(json.dumps(report_of(record)))


def places(content, place=(), kinds=None, kind=()):
    """A path to one value of every kind: the last of several in one list."""
    kinds = {} if kinds is None else kinds
    parts = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in parts:
        same = (*kind, "*" if isinstance(content, list) else name)
        kinds[same] = (*place, name)
        if isinstance(value, dict | list):
            places(value, (*place, name), kinds, same)
    return kinds.values()


def mutated(content, place, value):
    """A copy with one value in the place of another, or without it."""
    changed, (name, *rest) = copy.copy(content), place
    if rest:
        changed[name] = mutated(content[name], rest, value)
    elif value is DROP:
        del changed[name]
    else:
        changed[name] = value
    return changed


def use(path, other):
    """All that a saved report is for, but for pictures."""
    content = read_report(path)
    render(content)
    judge_gates(content, GATES)
    json.dumps(summary(content), allow_nan=False)
    try:
        compare(content, other)
    except DFlash2Error as error:
        assert str(error).startswith("A and B did not do the same work")
    if content["prompts"] != other["prompts"]:
        json.dumps(report_of(read_record(path)), allow_nan=False)


@pytest.mark.parametrize("value", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_any_field_may_be_damaged(content, tmp_path, value):
    path, refused = tmp_path / "report.json", 0
    for place in places(content):
        path.write_text(json.dumps(mutated(content, place, value)))
        try:
            use(path, content)
        except DFlash2Error as error:
            refused += 1
            assert str(error).startswith(f"{path}: ") and "\n" not in str(error), place
        except Exception as error:
            raise AssertionError(f"{place} as {value!r}: {error!r}") from error
    assert refused > 20


TABLE = "results", "tables", 0
OVERALL = *TABLE, "overall"
DAMAGES = [
    (("environment", "machine"), DROP, "environment.machine: field required"),
    (("environment", "versions"), None, "environment.versions: input should be"),
    (("workload", "sha256"), DROP, "workload.sha256: field required"),
    (("workload", "domains"), ["coding"], "workload.domains: input should be"),
    (("settings",), None, "settings: input should be an object, found null"),
    (("targets",), [], "arms[0].target: there is no target 0"),
    (("targets", 0, "files"), None, "targets[0].files: input should be"),
    (("arms", 0), DROP, "arms[0]: no arm decodes target 0 plainly"),
    (("arms", 1, "num_draft_tokens"), 0, "arms[1]: an arm drafts tokens if"),
    (("results", "tables"), None, "results.tables: input should be"),
    ((*TABLE, "arm"), 9, "results.tables[0].arm: arm 9 is none that this is about"),
    ((*TABLE, "arm"), "x", "results.tables[0].arm: input should be a valid integer, f"),
    ((*TABLE, "verdict"), None, "results.tables[0].verdict: input should be"),
    ((*TABLE, "domains"), [], "results.tables[1].domains: they are not those of"),
    (OVERALL, None, "results.tables[0].overall: input should be an object"),
    ((*OVERALL, "speeds"), None, "overall.speeds: they and no_headline contradict"),
    ((*OVERALL, "acceptance", "slots"), [], "acceptance.slots: list should have"),
    ((*OVERALL, "acceptance", "histogram", 0), DROP, "acceptance: slots and histogram"),
    ((*OVERALL, "coverage", "hits", 0), DROP, "overall.coverage: it is not of 3 slots"),
    ((*OVERALL, "costs", "decode"), "x", "costs.decode: input should be a valid num"),
    (
        (*OVERALL, "speeds", "decode", "speedup", "low"),
        None,
        "speeds.decode.speedup: an interval has two ends or none",
    ),
    (
        (*OVERALL, "speeds", "decode", "speedup", "low"),
        9.0,
        "speeds.decode.speedup: the median lies outside of its interval",
    ),
    (("prompts",), DROP, "prompts: field required"),
    (("prompts", 1, "runs"), DROP, "prompts[1].runs: field required"),
    (("prompts", 1, "runs"), [], "prompts[1].runs: they are not those of the arms"),
    (("prompts", 1, "domain"), "x", "prompts[1].domain: the workload has no such"),
    (("prompts", 1, "speculation", 0), DROP, "prompts[1].speculation: it is not that"),
    (("prompts", 0, "runs", 0, "decode_seconds"), None, "decode_seconds: input should"),
    (("prompts", 0, "runs", 0, "decode_seconds"), 0, "tokens were decoded in no time"),
    (("prompts", 0, "messages", 0, "content"), float("nan"), "content: expected a fin"),
]
COUNTS = "prompts", 0, "speculation", 0, "counts"
DAMAGES += [
    ((*COUNTS, "accepted_per_cycle", 0), DROP, "counts: the lists are of different"),
    ((*COUNTS, "accepted_per_cycle", 0), 2, "accept and emit (3, 2, 4) tokens"),
    ((*COUNTS, "drafted_per_cycle", 0), 7, "no cycle can draft, accept and emit (7"),
    ((*COUNTS[:-1], "comparison", "identical"), False, "kind and position contradict"),
]


@pytest.mark.parametrize(("place", "value", "message"), DAMAGES)
def test_a_damage_is_named_with_its_place(content, tmp_path, place, value, message):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(mutated(content, place, value)))
    for command in (["report", path], ["compare", path, path]):
        refused = run("bench", *command)
        assert_refused(refused, f"{path}: the report is damaged: ", message)


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', "[" * 5000, "\ufeff{}", "{}x"])
def test_text_that_is_no_json_is_refused(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DFlash2Error, match="report.json: is not JSON"):
        read_report(path)
