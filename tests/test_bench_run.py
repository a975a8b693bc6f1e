"""The order in which a bench measures, and what it keeps."""

from dataclasses import dataclass, field, replace

import pytest

from mlx_dflash2.bench.engine import Run
from mlx_dflash2.bench.record import Arm, Costs, ModelFacts, Record
from mlx_dflash2.bench.run import SAMPLED_TOKENS, Bench, Plan
from mlx_dflash2.bench.workload import Prompt
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.stats import AcceptanceStats

PLAIN, FAST, SLOW = Arm("plain", 0), Arm("fast", 0, 0, 7), Arm("slow", 0, 1, 3)
TARGET = ModelFacts("target", None, "llama", "float32", None, {}, "0")


@dataclass
class FakeEngine:
    """Emits 11 tokens in a time that grows with every run, and counts its calls."""

    wrong: Arm | None = None
    thinks: bool = True
    skewed: bool = False
    stop_after: int | None = None
    calls: list[tuple[Arm, tuple, int, float, int]] = field(default_factory=list)
    compared: list[Arm] = field(default_factory=list)
    targets: tuple = (TARGET,)

    def encode(self, target, messages, *, tools, thinking, template=True):
        mode = int(bool(thinking)) if self.thinks else 0
        text = [7] * len(messages[0]["content"])
        return [mode, int(tools is not None), int(template), *text]

    def decode(self, target, tokens):
        return " ".join(map(str, tokens))

    def run(self, arm, prompt, *, max_tokens, temperature=0.0, seed=0):
        if self.stop_after == len(self.calls):
            raise KeyboardInterrupt
        self.calls.append((arm, tuple(prompt), max_tokens, temperature, seed))
        tokens = list(range(min(max_tokens, 11)))
        if temperature:
            shift = 1 if self.skewed and arm.drafter is not None else 0
            tokens = [(seed * 7919 + place * 31) % 5 + shift for place in tokens]
        elif arm == self.wrong:
            tokens[5] = 99
        stats = AcceptanceStats()
        if arm.drafter is not None:
            stats.record_cycle(arm.num_draft_tokens, 1, 2)
        return Run(tokens, "length", 0.5, 0.01 * len(self.calls), stats)

    def compare(self, arm, prompt, tokens, *, max_tokens):
        self.compared.append(arm)
        return {"kind": "difference", "position": 5}

    def costs(self, arm, prompt, tokens, *, repeats):
        return Costs(len(prompt) + len(tokens) // 2, 1.0, 2.0, float(repeats))

    def coverage(self, arm, prompt, tokens, run):
        return None


def prompt(name: str, length: int = 3, tools=None) -> Prompt:
    messages = [{"role": "user", "content": "x" * length}]
    return Prompt(name, "coding", messages, tools)


def plan(*prompts: Prompt, **options) -> Plan:
    return Plan(prompts or [prompt("a"), prompt("b", 2)], max_tokens=11, **options)


def bench(engine, plan: Plan, record: Record | None = None, arms=(PLAIN, FAST, SLOW)):
    saved = []
    empty = Record({}, {}, {}, [TARGET], [], list(arms))
    made = Bench(engine, plan, record or empty, save=saved.append, tell=lambda _: None)
    return made, saved


def test_arms_run_there_and_back_after_a_warm_up():
    engine = FakeEngine()
    made, _ = bench(engine, plan(repeats=2))
    record = made.run()
    there_and_back = [0, 1, 2, 2, 1, 0]
    for measured in record.prompts:
        assert [run.arm for run in measured.runs] == there_and_back * 2
    ran = [call[0] for call in engine.calls]
    assert ran[:3] == [PLAIN, FAST, SLOW]
    assert len(ran) == 3 + 2 * 12 + 1
    assert not record.partial


def test_a_run_that_equals_plain_decoding_is_not_decoded_again():
    engine = FakeEngine(wrong=SLOW)
    record = bench(engine, plan())[0].run()
    assert engine.compared == [SLOW, SLOW]
    fast, slow = record.prompts[0].speculation
    assert fast.comparison["kind"] == "identical"
    assert slow.comparison == {"kind": "difference", "position": 5}
    assert (fast.arm, slow.arm) == (1, 2)


def test_costs_are_measured_as_often_as_asked():
    record = bench(FakeEngine(), plan(cost_repeats=3))[0].run()
    assert {s.costs.draft for p in record.prompts for s in p.speculation} == {3.0}


def test_drift_is_the_first_prompt_once_more():
    engine = FakeEngine()
    record = bench(engine, plan())[0].run()
    (drift,) = record.drift
    assert (drift.arm, drift.prompt) == (0, "a")
    assert drift.first == pytest.approx(
        1e3 * record.prompts[0].runs[0].decode_seconds / 10
    )
    assert drift.last == pytest.approx(1e3 * 0.01 * len(engine.calls) / 10)


def test_an_interrupted_bench_keeps_whole_prompts_and_goes_on():
    whole = bench(FakeEngine(), plan())[0].run()
    engine = FakeEngine(stop_after=12)  # warm-up, the first prompt, half the second
    made, saved = bench(engine, plan())
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert [p.name for p in made.record.prompts] == ["a"]
    assert saved[-1] == made.record and made.record.partial
    again = FakeEngine()
    record = bench(again, plan(), made.record)[0].run()
    assert record.prompts[0] == made.record.prompts[0]
    assert [p.name for p in record.prompts] == ["a", "b"]
    assert [p.speculation for p in record.prompts] == [
        p.speculation for p in whole.prompts
    ]
    assert [drift.prompt for drift in record.drift] == ["a"]
    assert len(again.calls) == 3 + 6 + 1


def test_drift_is_measured_by_whoever_finishes():
    engine = FakeEngine(stop_after=3 + 2 * 6)  # all prompts, not the drift
    made, _ = bench(engine, plan())
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert len(made.record.prompts) == 2 and not made.record.drift
    record = bench(FakeEngine(), plan(), made.record)[0].run()
    assert [drift.prompt for drift in record.drift] == ["a"]
    assert not record.partial


def test_a_finished_bench_measures_nothing_again():
    record = bench(FakeEngine(), plan(samples=20))[0].run()
    engine = FakeEngine()
    assert bench(engine, plan(samples=20), record)[0].run() == record
    assert engine.calls == []


def test_both_thinking_modes_are_measured_apart():
    record = bench(FakeEngine(), plan(modes=(True, False)))[0].run()
    assert [(p.name, p.thinking) for p in record.prompts] == [
        *(("a", True), ("a", False)),
        *(("b", True), ("b", False)),
    ]


def test_a_template_without_a_thinking_switch_has_no_two_modes():
    made, _ = bench(FakeEngine(thinks=False), plan(modes=(True, False)))
    with pytest.raises(DFlash2Error, match="target: its chat template .* --thinking"):
        made.run()


def test_tools_count_only_where_the_template_writes_them():
    tools = [{"type": "function", "function": {"name": "f"}}]
    one, two = prompt("a", tools=tools), prompt("b")
    record = bench(FakeEngine(), plan(one, two))[0].run()
    assert [p.tools for p in record.prompts] == [True, None]

    class Deaf(FakeEngine):
        def encode(self, target, messages, *, tools, thinking, template=True):
            return [len(messages)]

    record = bench(Deaf(), plan(one, two))[0].run()
    assert [p.tools for p in record.prompts] == [False, None]


def test_bare_text_reaches_the_engine():
    engine = FakeEngine()
    bench(engine, plan(template=False))[0].run()
    assert {call[1][2] for call in engine.calls} == {0}


def test_sampled_runs_share_no_seed_and_take_the_shortest_prompt():
    engine = FakeEngine()
    record = bench(engine, plan(samples=30, temperature=0.7, seed=3))[0].run()
    sampled = [call for call in engine.calls if call[3]]
    assert {call[3] for call in sampled} == {0.7}
    assert {len(call[1]) for call in sampled} == {3 + 2}
    assert {call[2] for call in sampled} == {SAMPLED_TOKENS + 1}
    by_arm = {arm: {c[4] for c in sampled if c[0] == arm} for arm in (FAST, SLOW)}
    plain = [call[4] for call in sampled if call[0].drafter is None]
    assert len(by_arm[FAST]) == len(by_arm[SLOW]) == len(plain) == 30
    assert len(set(plain)) == 30 and not by_arm[FAST] & set(plain)
    assert [(t.arm, t.prompt, t.samples) for t in record.sampled] == [
        (1, "b", 30),
        (2, "b", 30),
    ]
    for test in record.sampled:
        assert len(test.p_values) == 3 and min(test.p_values) > 0.01


def test_a_drafter_that_changes_the_distribution_is_found():
    engine = FakeEngine(skewed=True)
    record = bench(engine, plan(samples=100), arms=(PLAIN, FAST))[0].run()
    assert max(record.sampled[0].p_values) < 1e-3


def test_runs_of_one_arm_that_differ_are_noted():
    class Moody(FakeEngine):
        def run(self, arm, *arguments, **options):
            run = super().run(arm, *arguments, **options)
            return replace(run, tokens=[len(self.calls)]) if arm == FAST else run

    record = bench(Moody(), plan())[0].run()
    assert [s.repeated for s in record.prompts[0].speculation] == [False, True]
