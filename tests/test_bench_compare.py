"""Saved reports are read with care, and compared only if the work was the same."""

import json
from dataclasses import replace

import pytest
from bench_records import Outcome, make_record, one_prompt, report_of, sample_record

from mlx_dflash2.bench.compare import compare, read_record, read_report
from mlx_dflash2.bench.release import summary
from mlx_dflash2.errors import DFlash2Error

CHANGED = "model.safetensors"


def record(cycle_ms=16.0, **fields):
    made = Outcome([(3, 3, 4), (3, 0, 1)], cycle_ms=cycle_ms)
    return make_record(
        [one_prompt(f"coding-{n}", "coding", [made]) for n in range(4)], **fields
    )


def saved(tmp_path, content, name="report.json"):
    path = tmp_path / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def test_saved_report_is_read_as_it_was(tmp_path):
    report = report_of(sample_record())
    assert read_report(saved(tmp_path, report)) == report
    assert read_record(saved(tmp_path, report)) == sample_record()


def test_summary_is_read_but_no_record(tmp_path):
    path = saved(tmp_path, summary(report_of(sample_record())))
    assert read_report(path)["format"] == "mlx-dflash2 bench summary"
    with pytest.raises(DFlash2Error, match="is a summary, which has no prompts"):
        read_record(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no report of a bench"),
        ({"format": "other"}, "is no report of a bench"),
        (report_of(record()) | {"version": 2}, "has version 2 .* reads 1"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, content, message):
    with pytest.raises(DFlash2Error, match=f"report.json: {message}"):
        read_report(saved(tmp_path, content))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DFlash2Error, match="none.json: cannot be read"):
        read_report(tmp_path / "none.json")


def test_reports_are_laid_side_by_side_by_domain():
    text = compare(report_of(record()), report_of(record(cycle_ms=10.0)))
    rows = [line.split() for line in text.splitlines() if "drafted" in line]
    assert [(row[0], row[1]) for row in rows] == [
        *(("coding", "A:"), ("coding", "B:"), ("overall", "A:"), ("overall", "B:"))
    ]
    assert rows[0][5:] == "100.00 156.25 1.562x [1.562, 1.562] 2.500 4/4".split()
    assert rows[1][5:] == "100.00 250.00 2.500x [2.500, 2.500] 2.500 4/4".split()
    assert "Note" not in text


def test_report_is_compared_with_a_summary():
    assert "A: drafter" in compare(report_of(record()), summary(report_of(record())))


def other_target(**fields):
    target = record().targets[0]
    return {"targets": [replace(target, **fields)]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"workload": {"sha256": "9" * 64, "source": "x", "domains": {"coding": 4}}},
            "prompts (sha256) is ffffffffffff in A and 999999999999 in B",
        ),
        (
            other_target(
                files={"config.json": "a" * 64, "model.safetensors": "8" * 64}
            ),
            f"target 1 {CHANGED} is bbbbbbbbbbbb in A and 888888888888 in B",
        ),
        (
            other_target(files={"config.json": "a" * 64}),
            "target 1 model.safetensors is bbbbbbbbbbbb in A and missing in B",
        ),
        (other_target(tokenizer="7" * 64), "target 1 tokenizer is cccccccccccc in A"),
        (other_target(dtype="float16"), "target 1 dtype is bfloat16 in A and float16"),
        (
            {"settings": record().settings | {"seed": 5}},
            "setting seed is 0 in A and 5 in B",
        ),
        (
            {"settings": record().settings | {"max_tokens": 64}},
            "setting max_tokens is 256 in A and 64 in B",
        ),
        ({"targets": record().targets * 2}, "target 2 config.json is missing in A"),
    ],
)
def test_reports_of_other_work_are_refused_with_what_differs(changed, message):
    with pytest.raises(DFlash2Error) as caught:
        compare(report_of(record()), report_of(record(**changed)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_differences_are_told_together():
    settings = record().settings | {"seed": 5, "max_tokens": 64}
    with pytest.raises(DFlash2Error, match="setting seed .*; setting max_tokens"):
        compare(report_of(record()), report_of(record(settings=settings)))


def test_names_and_drafters_may_differ():
    other = replace(record().drafters[0], name="other", files={"config.json": "5" * 64})
    renamed = record(drafters=[other], **other_target(name="folder", revision=None))
    assert "B: drafter" in compare(report_of(record()), report_of(renamed))


def test_other_machine_or_version_is_noted():
    environment = record().environment | {"processor": "Apple M2", "cores": 8}
    there = report_of(record(environment=environment))
    assert (
        "Note: the machines differ (processor, cores), so speeds are not comparable; "
        "counts and acceptance are." in compare(report_of(record()), there)
    )
    versions = {**environment["versions"], "mlx": "0.33.0"}
    newer = report_of(record(environment=record().environment | {"versions": versions}))
    assert "Note: the versions differ: mlx is 0.32.4 in A and 0.33.0 in B." in compare(
        report_of(record()), newer
    )


def test_interrupted_report_is_noted():
    text = compare(report_of(record()), report_of(record(partial=True)))
    assert "Note: B was interrupted." in text
