"""Every figure of a bench recomputed by hand from records with known numbers."""

import math
from dataclasses import replace

import pytest
from bench_records import (
    COSTS,
    DIFFERENCE,
    NEAR_TIE,
    Outcome,
    make_record,
    one_prompt,
    report_of,
    sample_record,
)

from mlx_dflash2.bench.acceptance import acceptance, coverage
from mlx_dflash2.bench.analysis import analyse
from mlx_dflash2.bench.record import Arm, Costs, Coverage, Drift, SampledTest
from mlx_dflash2.bench.saved import report_from
from mlx_dflash2.stats import AcceptanceStats

EIGHT_TOKENS = [(3, 3, 4), (3, 0, 1), (3, 1, 2)]  # in three cycles, 7 of 8 tokens


def prompts(count, domain="coding", **outcome):
    """Prompts that decode 10 ms a token plainly."""
    made = Outcome(**{"cycles": EIGHT_TOKENS, **outcome})
    return [one_prompt(f"{domain}-{n}", domain, [made]) for n in range(count)]


def only_table(record):
    (table,) = analyse(record).tables
    return table


def test_speeds_are_those_of_the_runs():
    # 8 tokens: 7 decoded in 70 ms plainly, in 3 cycles of 14 ms speculatively.
    table = only_table(make_record(prompts(4, cycle_ms=14.0)))
    speeds = table.overall.speeds
    assert speeds.decode.plain.median == pytest.approx(100.0)
    assert speeds.decode.speculative.median == pytest.approx(7 / 0.042)
    assert speeds.decode.speedup.median == pytest.approx(70 / 42)
    assert speeds.end_to_end.plain.median == pytest.approx(8 / 0.110)
    assert speeds.end_to_end.speculative.median == pytest.approx(8 / 0.082)
    assert speeds.end_to_end.speedup.median == pytest.approx(110 / 82)


def test_speedup_is_of_seconds_a_token_where_lengths_differ():
    (prompt,) = prompts(1, cycle_ms=14.0)
    runs = [
        replace(run, tokens=15, decode_seconds=0.14) if run.arm == 0 else run
        for run in prompt.runs
    ]
    table = only_table(make_record([replace(prompt, runs=runs)]))
    assert table.domains[0].speeds.decode.speedup.median == pytest.approx(10 / 6)


def test_medians_are_over_prompts():
    made = [
        one_prompt(f"p{ms}", "coding", [Outcome(EIGHT_TOKENS, cycle_ms=ms)])
        for ms in (14.0, 20.0, 7.0, 28.0, 10.0)
    ]
    speedup = only_table(make_record(made)).overall.speeds.decode.speedup
    assert speedup.median == pytest.approx(70 / 42)
    assert speedup.low == pytest.approx(70 / 84)
    assert speedup.high == pytest.approx(70 / 21)


def test_costs_are_medians_of_the_domain_and_of_all_prompts():
    made = [
        one_prompt(
            f"p{n}",
            "math" if n < 4 else "coding",
            [
                Outcome(
                    EIGHT_TOKENS, 16.0, costs=Costs(50 * n, 10 + n, 12 + n, 3 - n / 4)
                )
            ],
        )
        for n in range(8)
    ]
    table = only_table(make_record(made))
    math_costs, overall = table.domains[0].costs, table.overall.costs
    assert (math_costs.decode, math_costs.verify) == (11.5, 13.5)
    assert math_costs.draft == pytest.approx(3 - 1.5 / 4)
    assert (overall.context, overall.decode, overall.verify) == (175, 13.5, 15.5)
    overheads = [16 - (12 + n) - (3 - n / 4) for n in range(8)]
    assert overall.overhead == pytest.approx(sum(sorted(overheads)[3:5]) / 2)


def test_projection_follows_from_the_printed_costs():
    for group in only_table(make_record(prompts(4))).groups:
        costs, length = group.costs, group.acceptance.length
        projected = length * costs.decode / (costs.verify + costs.draft)
        assert group.speeds.projected == projected == pytest.approx(7 / 3 * 10 / 15)


def test_published_table_closes():
    cycles = [(7, 1, 2)] * 248 + [(7, 0, 1)] * 752
    costs = Costs(100, 58.215, 53.248, 14.6)
    outcome = Outcome(cycles, cycle_ms=68.2, costs=costs)
    made = [one_prompt(f"p{n}", "coding", [outcome], plain_ms=58.2) for n in range(4)]
    overall = only_table(make_record(made, widths=(7,))).overall
    assert overall.acceptance.length == 1.248
    assert overall.speeds.projected == pytest.approx(1.248 * 58.215 / 67.848)
    assert f"{overall.speeds.projected:.3f}" == "1.071"
    assert overall.speeds.break_even == pytest.approx(68.2 / 58.2)


def test_speedup_is_acceptance_length_over_break_even():
    overall = only_table(make_record(prompts(4))).overall
    assert overall.speeds.break_even == pytest.approx(1.6)
    assert overall.speeds.decode.speedup.median == pytest.approx(
        overall.acceptance.length / overall.speeds.break_even
    )


def test_acceptance_is_a_ratio_of_sums():
    made = [
        one_prompt("short", "coding", [Outcome([(3, 3, 4)])]),
        one_prompt("long", "coding", [Outcome([(3, 0, 1)] * 9)]),
    ]
    found = only_table(make_record(made)).overall.acceptance
    assert (found.cycles, found.drafted, found.accepted, found.emitted) == (
        10,
        30,
        3,
        13,
    )
    assert (found.length, found.per_cycle, found.rate) == (1.3, 0.3, 0.1)
    assert found.histogram == [9, 0, 0, 1]


def stats(*cycles):
    return AcceptanceStats(*map(list, zip(*cycles, strict=True)))


def slots(found):
    return [
        (
            *(slot.conditional, slot.conditional_trials),
            *(slot.cumulative, slot.cumulative_trials),
        )
        for slot in found.slots
    ]


def test_slots_count_only_cycles_that_drafted_them():
    found = acceptance([stats((3, 3, 4), (3, 1, 2)), stats((1, 1, 2), (0, 0, 1))], 3)
    assert slots(found) == [
        (3 / 3, 3, 3 / 3, 3),
        (1 / 2, 2, 1 / 2, 2),
        (1 / 1, 1, 1 / 2, 2),
    ]


def test_cycle_cut_by_an_end_of_sequence_is_no_trial_behind_the_cut():
    # The second accepted drafted token ended the sequence: the third was not judged.
    cut = acceptance([stats((3, 1, 2), (3, 2, 2))], 3)
    assert slots(cut) == [
        (2 / 2, 2, 2 / 2, 2),
        (1 / 2, 2, 1 / 2, 2),
        (None, 0, 0 / 1, 1),
    ]
    whole = acceptance([stats((3, 1, 2), (3, 2, 3))], 3)
    assert slots(whole)[2] == (0 / 1, 1, 0 / 2, 2)


def test_without_cut_cycles_cumulative_acceptance_adds_up_to_the_acceptance_length():
    found = acceptance([stats(*EIGHT_TOKENS)], 3)
    total = 1 + sum(slot.cumulative for slot in found.slots)
    assert total == pytest.approx(found.length)


def test_without_a_cycle_there_are_no_ratios():
    found = acceptance([AcceptanceStats()], 2)
    assert (found.length, found.per_cycle, found.rate) == (None, None, None)
    assert slots(found) == [(None, 0, None, 0)] * 2


def test_coverage_adds_up_and_gives_the_oracle_length():
    long, short = Coverage([4, 4, 3], [4, 2, 0], [1, 2, 2, 1]), Coverage([1], [1], [1])
    found = coverage([long, None, short])
    assert (found.trials, found.hits) == ([5, 4, 3], [5, 2, 0])
    assert found.oracle_length == 1 + 7 / 5
    assert coverage([None, None]) is None


def test_lossless_counts_classes_and_shows_each_split():
    made = [
        one_prompt("same", "coding", [Outcome(EIGHT_TOKENS)]),
        one_prompt("tie", "coding", [Outcome(EIGHT_TOKENS, comparison=NEAR_TIE)]),
        one_prompt(
            "wrong",
            "math",
            [Outcome(EIGHT_TOKENS, comparison=DIFFERENCE, repeated=False)],
        ),
    ]
    results = analyse(make_record(made))
    (table,) = results.tables
    lossless = table.overall.lossless
    assert (lossless.compared, lossless.identical) == (3, 1)
    assert (lossless.near_ties, lossless.differences) == (1, 1)
    assert lossless.repeated == 2
    tie, wrong = table.splits
    assert (tie.prompt, tie.domain, tie.position) == ("tie", "coding", 5)
    assert (tie.plain_logit, tie.speculative_logit, tie.gap) == (20.5, 20.4995, 0.0005)
    assert (wrong.kind, wrong.plain, wrong.speculative) == ("difference", 3, 4)
    assert results.warnings == [
        "drafter, 3 drafted: outputs that differ from plain decoding by more than a "
        "near tie: 1 of 3",
        "drafter, 3 drafted: outputs that changed from run to run: 1 of 3",
    ]


def test_share_of_runs_at_the_token_limit():
    at_limit = one_prompt(
        "a", "coding", [Outcome(EIGHT_TOKENS)], finish_reason="length"
    )
    table = only_table(make_record([at_limit, *prompts(3)]))
    assert table.overall.at_limit == 0.25


def test_prompt_of_one_token_has_counts_but_no_speed():
    (ended,) = prompts(1)
    ended = replace(
        ended,
        runs=[replace(run, tokens=1, decode_seconds=0.0) for run in ended.runs],
        speculation=[replace(ended.speculation[0], counts=AcceptanceStats())],
    )
    table = only_table(make_record([ended, *prompts(4)]))
    assert (table.overall.prompts, table.overall.timed) == (5, 4)
    assert table.overall.speeds.decode.plain.median == pytest.approx(100)
    assert table.overall.lossless.compared == 5
    alone = only_table(make_record([ended]))
    assert alone.domains[0].speeds is None
    assert "no cycle was run" in alone.verdict[-1]


def test_no_headline_from_fewer_than_four_prompts_of_a_domain():
    table = only_table(make_record([*prompts(4), *prompts(3, "math")]))
    assert table.overall.speeds is None
    assert [group.speeds is None for group in table.domains] == [False, False]
    assert table.no_headline == "timed prompts: math 3; at least 4 are needed"
    assert table.verdict[0] == f"no headline: {table.no_headline}"


def test_no_headline_from_an_interrupted_bench():
    results = analyse(make_record(prompts(4), partial=True))
    assert results.tables[0].overall.speeds is None
    assert results.warnings == [
        "partial: the bench was interrupted; prompts measured: 4"
    ]


def test_bench_interrupted_before_its_first_prompt_has_no_table():
    assert analyse(make_record([], partial=True)).tables == []


def test_thinking_modes_are_separate_tables():
    made = prompts(4)
    thinking = [replace(prompt, thinking=True) for prompt in made]
    plainly = [replace(prompt, thinking=False) for prompt in made[:2]]
    modes = [
        (table.thinking, table.overall.prompts)
        for table in analyse(make_record(thinking + plainly)).tables
    ]
    assert modes == [(True, 4), (False, 2)]


def test_each_arm_is_held_against_the_plain_arm_of_its_own_target():
    (prompt,) = prompts(1, cycle_ms=14.0)
    moved = [
        replace(run, arm={0: 0, 1: 2}[run.arm], decode_seconds=run.decode_seconds)
        for run in prompt.runs
    ]
    slow = [replace(run, arm=1, decode_seconds=0.14) for run in moved if run.arm == 0]
    record = make_record(
        [
            replace(
                prompt,
                runs=moved + slow,
                speculation=[replace(prompt.speculation[0], arm=2)],
            )
        ]
    )
    arms = [Arm("plain a", 0), Arm("plain b", 1), Arm("b with drafter", 1, 0, 3)]
    record = replace(record, targets=record.targets * 2, arms=arms)
    speeds = only_table(record).domains[0].speeds
    assert speeds.decode.plain.median == pytest.approx(50)
    assert speeds.decode.speedup.median == pytest.approx(140 / 42)


def test_verdict_pays_where_the_interval_is_above_one():
    (sentence,) = only_table(make_record(prompts(4))).verdict
    assert sentence == (
        "speculation pays here: 1.46x [1.46, 1.46], break-even acceptance length 1.60, "
        "reached 2.33"
    )


def test_verdict_does_not_pay_and_names_the_part_that_costs():
    costs = Costs(100, 10.0, 24.0, 3.0)
    verdict = only_table(make_record(prompts(4, cycle_ms=28.0, costs=costs))).verdict
    assert verdict[0] == (
        "speculation does not pay here: measured 0.83x [0.83, 0.83], break-even "
        "acceptance length 2.80, reached 2.33; predicted from the costs 0.86x"
    )
    assert verdict[1].startswith("verify too expensive: 2.33 tokens a cycle")
    assert "a verify of 4 rows costs 2.40, the draft 0.30, the loop 0.10" in verdict[1]


@pytest.mark.parametrize(
    ("part", "costs", "cycle_ms"),
    [("draft", Costs(100, 10.0, 11.0, 16.0), 28.0), ("loop", COSTS, 30.0)],
)
def test_draft_or_loop_may_be_what_costs(part, costs, cycle_ms):
    table = only_table(make_record(prompts(4, cycle_ms=cycle_ms, costs=costs)))
    assert table.verdict[1].startswith(f"{part} too expensive")


def test_parts_of_a_cycle_that_is_too_expensive_add_up_to_the_break_even():
    # Decoding alone took 9.1 ms, in the loop 10; the loop took less than its parts.
    costs = Costs(100, 9.1, 21.234, 4.567)
    table = only_table(make_record(prompts(4, cycle_ms=25.5, costs=costs)))
    assert table.overall.speeds.break_even == pytest.approx(2.55)
    assert (
        "of the 2.55 plain steps that a cycle takes, a verify of 4 rows costs 2.12, "
        "the draft 0.46, less 0.03 that is within noise;" in table.verdict[1]
    )


def test_costs_are_not_to_blame_where_the_break_even_was_reached():
    # Three prompts of two tokens a cycle lose; one long prompt of four tokens a cycle
    # lifts the ratio of sums above the break-even of 2.4.
    losing = [Outcome([(3, 1, 2)] * 4, cycle_ms=24.0)]
    made = [one_prompt(f"p{n}", "coding", losing) for n in range(3)]
    made.append(one_prompt("q", "coding", [Outcome([(3, 3, 4)] * 90, cycle_ms=24.0)]))
    table = only_table(make_record(made))
    assert table.overall.acceptance.length > table.overall.speeds.break_even
    (sentence,) = table.verdict
    assert sentence.startswith("undecided")


def test_verdict_is_undecided_where_the_interval_includes_one():
    made = [
        one_prompt(f"p{ms}", "coding", [Outcome(EIGHT_TOKENS, cycle_ms=ms)])
        for ms in (20.0, 22.0, 23.0, 24.0, 25.0, 27.0)
    ]
    assert only_table(make_record(made)).verdict[0].startswith("undecided")


def test_drafter_that_is_always_wrong_is_told():
    table = only_table(make_record(prompts(4, cycles=[(3, 0, 1)] * 7, cycle_ms=20)))
    assert table.overall.acceptance.length == 1.0
    assert table.verdict[0].startswith("speculation does not pay here: measured 0.50x")
    assert table.verdict[1].startswith("nothing was accepted: the drafter may belong")


def test_runs_too_short_to_draft_are_not_blamed_on_the_drafter():
    results = analyse(make_record(prompts(4, cycles=[(0, 0, 1)], cycle_ms=20)))
    (table,) = results.tables
    assert table.verdict == ["nothing was drafted: the runs were too short for it (-m)"]
    assert table.overall.speeds.projected is table.overall.costs.overhead is None


@pytest.mark.parametrize(("whole", "projected"), [(3, True), (1, False)])
def test_nothing_is_projected_from_blocks_that_were_seldom_drafted(whole, projected):
    cycles = [(3, 1, 2)] * whole + [(1, 1, 2), (0, 0, 1)]
    results = analyse(make_record(prompts(4, cycles=cycles, cycle_ms=22)))
    overall = results.tables[0].overall
    assert (overall.speeds.projected is not None) is projected
    assert (overall.costs.overhead is not None) is projected
    assert overall.speeds.break_even == pytest.approx(2.2)
    said = [text for text in results.warnings if "no proj and no loop overhead" in text]
    assert ["for coding, overall: most cycles" in text for text in said] == (
        [] if projected else [True]
    )
    sentences = " ".join(results.tables[0].verdict)
    assert ("predicted from the costs" in sentences) is projected
    assert ("too expensive" in sentences) is projected


def test_fewer_than_four_prompts_give_no_interval():
    table = only_table(make_record([*prompts(4), *prompts(3, "math")]))
    coding, math_speeds = (group.speeds.decode.speedup for group in table.domains)
    assert (coding.low is None, math_speeds.low is None) == (False, True)
    assert math_speeds.median == pytest.approx(coding.median)


def test_low_acceptance_names_likely_causes_also_without_a_headline():
    cycles = [(3, 1, 2)] + [(3, 0, 1)] * 6
    table = only_table(make_record(prompts(1, cycles=cycles)))
    assert table.verdict[1].startswith("low acceptance, 14.3% of first tokens")
    assert "mlx-dflash2 doctor" in table.verdict[1]


def test_best_width_gains_over_the_trained_one_prompt_by_prompt():
    narrow = [(1, 1, 2)] * 3 + [(1, 0, 1)]
    made = [
        one_prompt(
            f"p{n}",
            "coding",
            [
                Outcome(EIGHT_TOKENS, cycle_ms=(20 + n)),  # 60 + 3n ms
                Outcome(narrow, cycle_ms=0.75 * (20 + n) / 1.25),  # 1.25 times as fast
            ],
        )
        for n in range(5)
    ]
    results = analyse(make_record(made, widths=(3, 1)))
    (best,) = results.widths
    assert (best.arm, best.trained) == (2, 3)
    for value in (best.gain.median, best.gain.low, best.gain.high):
        assert value == pytest.approx(1.25)
    assert results.verdict[0].startswith("best width: 1 drafted tokens a cycle")
    assert results.verdict[0].endswith("1.25x [1.25, 1.25] the speed of the trained 3")


def test_one_width_has_no_best():
    assert analyse(make_record(prompts(4))).widths == []


def test_sweep_without_the_trained_width_says_so():
    outcomes = [Outcome(EIGHT_TOKENS, cycle_ms=40), Outcome(EIGHT_TOKENS, cycle_ms=30)]
    made = [one_prompt(f"p{n}", "coding", outcomes) for n in range(4)]
    results = analyse(make_record(made, widths=(4, 5)))
    assert results.widths[0].gain is None
    assert results.verdict[0].startswith("no width pays, the best is: 5 drafted")
    assert results.verdict[0].endswith("the trained 3 were not measured")


@pytest.mark.parametrize(("last", "warned"), [(10.4, 0), (10.6, 1), (9.4, 1)])
def test_drift_above_five_percent_is_warned_of(last, warned):
    record = make_record(prompts(4), drift=[Drift(0, "coding-0", 10.0, last)])
    results = analyse(record)
    assert results.drift[0].drift == pytest.approx(last / 10 - 1)
    assert len(results.warnings) == warned


@pytest.mark.parametrize(("least", "same"), [(0.00034, True), (0.00033, False)])
def test_sampled_test_is_corrected_for_its_three_tokens(least, same):
    test = SampledTest(1, "coding-0", 1.0, 400, [0.5, least, 0.9])
    results = analyse(make_record(prompts(4), sampled=[test]))
    assert results.sampled[0].same is same
    assert len(results.warnings) == (not same)


@pytest.mark.parametrize(("tools", "warned"), [(None, 0), (True, 0), (False, 1)])
def test_tools_that_the_template_ignored_are_warned_of(tools, warned):
    made = [replace(prompt, tools=tools) for prompt in prompts(4)]
    found = analyse(make_record(made)).warnings
    assert found == ["prompts whose tools the chat template ignored: 4"] * warned


def test_analysis_repeats_itself_and_survives_json():
    record = sample_record()
    report = report_of(record)
    assert report_from(report).results == analyse(record)
    numbers = [g.speeds.decode.speedup.low for g in analyse(record).tables[0].groups]
    assert all(math.isfinite(number) for number in numbers)
