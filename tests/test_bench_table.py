"""Reports as people read them: golden files, and what depends on the record."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_records import (
    DIFFERENCE,
    Outcome,
    make_record,
    one_prompt,
    report_of,
    sample_record,
)

from mlx_dflash2.bench.blocks import Grid, Heading, Lines, as_markdown, as_text
from mlx_dflash2.bench.release import summary
from mlx_dflash2.bench.table import render

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize(("name", "markdown"), [("txt", False), ("md", True)])
def test_report_is_rendered_as_in_the_golden_file(name, markdown):
    # To renew a golden file, write the rendered text over it and read the difference.
    golden = (GOLDEN / f"bench_report.{name}").read_text(encoding="utf-8")
    assert render(report_of(sample_record()), markdown=markdown) == golden


def prompts(count, domain="coding", **outcome):
    made = Outcome(**{"cycles": [(3, 3, 4), (3, 0, 1)], **outcome})
    return [one_prompt(f"{domain}-{n}", domain, [made]) for n in range(count)]


def row(text, start):
    return next(line.split() for line in text.splitlines() if line.startswith(start))


def test_published_table_has_its_columns_in_order():
    text = render(report_of(make_record(prompts(4))))
    columns = (
        "domain plain tok/s spec tok/s speedup proj acceptance length greedy-identical"
    )
    assert columns.split() in [line.split() for line in text.splitlines()]
    assert row(text, "coding") == (
        "coding 100.00 156.25 1.562x [1.562, 1.562] 1.667x 2.500 4/4".split()
    )
    assert row(text, "overall") == (
        "overall 100.00 156.25 1.562x [1.562, 1.562] 1.667x 2.500 4/4".split()
    )


def test_overall_row_is_missing_without_a_headline():
    text = render(report_of(make_record([*prompts(4), *prompts(1, "math")])))
    assert "no headline: timed prompts: math 1; at least 4 are needed" in text
    published = text.split("cost per cycle")[0]
    assert "overall" not in published
    assert row(published, "math")[:4] == ["math", "100.00", "156.25", "1.562x"]


def test_definitions_name_acceptance_in_three_ways():
    text = render(report_of(make_record(prompts(4))))
    for name in ("acceptance length (AL):", "accepted per cycle:", "acceptance rate:"):
        assert name in text.split("Definitions")[1]
    assert row(text.split("three ways")[1], "overall")[1:4] == [
        "2.500",
        "1.500",
        "50.0%",
    ]


@pytest.mark.parametrize(("cycle_ms", "noted"), [(14.9, True), (15.1, False)])
def test_loop_overhead_below_zero_is_noted_as_noise(cycle_ms, noted):
    text = render(report_of(make_record(prompts(4, cycle_ms=cycle_ms))))
    assert row(text, "cost per cycle")
    assert ("A loop overhead below 0 is within noise" in text) is noted


def test_comparison_is_there_for_several_drafters_only():
    assert "tok/s (AL)" not in render(report_of(make_record(prompts(4))))
    text = render(report_of(sample_record()))
    assert text.index("tok/s (AL)") < text.index("plain tok/s")


def test_thinking_modes_are_named():
    both = [replace(p, thinking=mode) for mode in (True, False) for p in prompts(4)]
    text = render(report_of(make_record(both)))
    assert "drafter, 3 drafted, thinking\n" in text
    assert "drafter, 3 drafted, no thinking\n" in text
    assert "Comparison" not in text


def test_splits_are_shown_with_both_logits_and_the_gap():
    text = render(report_of(make_record(prompts(1, comparison=DIFFERENCE))))
    assert row(text, "coding-0") == (
        "coding-0 coding 9 3 17.0000 4 15.0000 2 4096.0 difference".split()
    )
    same = render(report_of(make_record(prompts(1))))
    assert "Every greedy output is identical to plain decoding's." in same


def test_models_are_named_with_revision_type_and_quantization():
    text = render(report_of(make_record(prompts(4))))
    assert (
        "target: example/target, revision 1234567890abcdef, llama, bfloat16, quantized "
        "(bits 8, group_size 64)\n" in text
    )
    assert "drafter: drafter, dflash2, bfloat16, trained for 3 drafted tokens\n" in text
    assert "versions: python 3.12.3, mlx 0.32.4, mlx-lm 0.32.2\n" in text


def test_report_without_a_prompt_is_rendered():
    text = render(report_of(make_record([], partial=True)))
    assert "Warning: partial: the bench was interrupted; prompts measured: 0" in text


def test_summary_is_rendered_but_for_names_and_tokens():
    record = sample_record()
    full, shared = render(report_of(record)), render(summary(report_of(record)))
    differing = [
        (before, after)
        for before, after in zip(full.splitlines(), shared.splitlines(), strict=True)
        if before.split() != after.split()
    ]
    assert len(differing) == 4  # two splits, the drift, the sampled test
    for before, after in differing:
        assert "-0" in before or "-2" in before
        assert "-0" not in after and "-2" not in after


def test_text_aligns_names_left_and_numbers_right():
    blocks = [Heading("T", 1), Heading("S"), Heading("G", 3), Lines(["a", "b"])]
    grid = Grid(["name", "n"], [["a", "1"], ["long name", "200"]])
    assert as_text([*blocks, grid]) == (
        "T\n=\n\nS\n-\n\nG:\n\na\nb\n\nname         n\na            1\nlong name  200\n"
    )


def test_markdown_escapes_bars_in_cells():
    blocks = [Heading("S"), Lines(["a"]), Grid(["x", "y"], [["a|b", "1"]])]
    assert as_markdown(blocks) == (
        "## S\n\n- a\n\n| x | y |\n| --- | ---: |\n| a\\|b | 1 |\n"
    )
