"""Measured results, gates and the summary that may be shared."""

import json
from dataclasses import replace

import pytest
from bench_records import Outcome, make_record, one_prompt, report_of, sample_record

from mlx_dflash2.bench.release import Gate, judge_gates, measured_results, parse_gate
from mlx_dflash2.bench.release import summary as summarise
from mlx_dflash2.errors import DFlash2Error


def prompts(count, domain="coding", cycle_ms=16.0):
    made = Outcome([(3, 3, 4), (3, 0, 1)], cycle_ms=cycle_ms)
    return [one_prompt(f"{domain}-{n}", domain, [made]) for n in range(count)]


def report(*made, **fields):
    return report_of(make_record([p for some in made for p in some], **fields))


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("coding >= 2.0x", Gate("coding", 2.0)),
        ("overall>=1.5x", Gate("overall", 1.5)),
        (" APIGen-MT v1 >= 2x ", Gate("APIGen-MT v1", 2.0)),
    ],
)
def test_gate_is_read(text, gate):
    assert parse_gate(text) == gate
    assert parse_gate(str(gate)) == gate


@pytest.mark.parametrize(
    "text",
    ["", "coding", "coding > 2.0x", "coding >= 2.0", ">= 2x", "a >= x", "a>=-1x"],
)
def test_gate_that_cannot_be_read_is_refused(text):
    with pytest.raises(DFlash2Error, match="expected a domain or overall"):
        parse_gate(text)


def test_gates_pass_from_their_speedup_on():
    content = report(prompts(4))
    speedup = content["results"]["tables"][0]["domains"][0]["speeds"]["decode"]
    exact = Gate("coding", speedup["speedup"]["median"])
    above = Gate("overall", speedup["speedup"]["median"] + 1e-6)
    passed, failed = judge_gates(content, [exact, above])
    assert (passed["passed"], passed["arm"]) == (True, "drafter, 3 drafted")
    assert failed["passed"] is False
    assert failed["reason"] == "measured 1.562x"
    assert failed["measured"] == speedup["speedup"]["median"]


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("chat", "not measured; there is coding, math, overall"),
        ("math", "3 timed prompts, at least 4 are needed"),
        ("overall", "no headline: timed prompts: math 3; at least 4 are needed"),
    ],
)
def test_gate_on_what_has_no_number_fails_and_says_why(group, reason):
    content = report(prompts(4), prompts(3, "math"))
    (judged,) = judge_gates(content, [Gate(group, 0.1)])
    assert judged["reason"] == reason
    assert (judged["passed"], judged["measured"]) == (False, None)


def test_gates_hold_for_every_arm():
    judged = judge_gates(report_of(sample_record()), [Gate("coding", 1.2)])
    assert [(each["arm"], each["passed"]) for each in judged] == [
        ("drafter, 3 drafted", True),
        ("drafter, 1 drafted", False),
    ]


def test_measured_results_hold_what_a_card_publishes():
    content = report(prompts(4), prompts(4, "math", cycle_ms=10.0))
    found = measured_results(content, [Gate("overall", 3.0)])
    assert list(found["domains"]) == ["coding", "math"]
    numbers = found["domains"]["coding"]
    assert numbers["plain_tok_s"] == pytest.approx(100)
    assert numbers["spec_tok_s"] == pytest.approx(156.25)
    assert numbers["speedup"] == pytest.approx(1.5625)
    assert numbers["projected"] == pytest.approx(2.5 * 10 / 15)
    assert numbers["acceptance_length"] == 2.5
    assert numbers["joint"] == {"joint@1": 0.5, "joint@2": 0.5, "joint@3": 0.5}
    assert numbers["identical"] == "4/4"
    assert found["overall"]["prompts"] == 8
    assert found["costs"]["t_decode_ms"] == 10.0
    assert (found["costs"]["t_verify_ms"], found["costs"]["t_draft_ms"]) == (12.0, 3.0)
    assert found["settings"] == content["settings"]
    assert found["prompt_set"]["sha256"] == "f" * 64
    assert found["target"]["files"]["model.safetensors"] == "b" * 64
    assert found["drafter"]["files"]["model.safetensors"] == "e" * 64
    assert [gate["passed"] for gate in found["gates"]] == [False]
    json.dumps(found, allow_nan=False)


def test_measured_results_give_no_overall_speed_without_a_headline():
    found = measured_results(report(prompts(3)), [])
    assert "speedup" not in found["overall"]
    assert found["no_headline"].startswith("timed prompts: coding 3")


def test_measured_results_are_of_one_drafter_at_one_width():
    with pytest.raises(DFlash2Error, match="drafter, 3 drafted; drafter, 1 drafted"):
        measured_results(report_of(sample_record()), [])


def test_summary_holds_no_prompt_and_nothing_that_was_written():
    record = sample_record()
    summary = summarise(report_of(record))
    text = json.dumps(summary)
    for prompt in record.prompts:
        assert f'"{prompt.name}"' not in text
    assert "secret" not in text
    assert record.prompts[0].sha256 not in text
    for split in summary["results"]["tables"][0]["splits"]:
        assert split["plain"] is split["speculative"] is split["prompt"] is None
        assert split["gap"] == 0.0005
    assert summary["workload"] == record.workload


def test_summary_keeps_every_number():
    full = report_of(replace(sample_record(), drift=[], sampled=[]))
    for table in full["results"]["tables"]:
        table["splits"] = []
    assert summarise(full)["results"] == full["results"]
