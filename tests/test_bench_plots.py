"""The pictures show the numbers of the report."""

import struct
import sys
from dataclasses import replace

import pytest
from bench_records import make_record, report_of, sample_record

from mlx_dflash2.bench import plots
from mlx_dflash2.bench.analysis import analyse
from mlx_dflash2.bench.report import report_from
from mlx_dflash2.errors import DFlash2Error


def axes_of(picture, record, tmp_path):
    with plots._axes(tmp_path / "picture.png") as axes:
        picture(axes, report_from(report_of(record)))
    return axes


def test_three_pictures_are_written(tmp_path):
    paths = plots.draw(report_of(sample_record()), tmp_path)
    assert [path.name for path in paths] == [
        *("speedup.png", "acceptance.png", "cost.png")
    ]
    for path in paths:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert struct.unpack(">2I", head[16:]) == (1280, 720)


def test_speedup_bars_are_the_medians_with_their_intervals(tmp_path):
    record = sample_record()
    axes = axes_of(plots._speedup, record, tmp_path)
    wide, narrow = analyse(record).tables
    heights = [[bar.get_height() for bar in bars] for bars in axes.containers[1::2]]
    assert heights == [
        [group.speeds.decode.speedup.median for group in table.groups]
        for table in (wide, narrow)
    ]
    spans = axes.containers[0].lines[2][0].get_segments()
    for span, group in zip(spans, wide.groups, strict=True):
        speedup = group.speeds.decode.speedup
        assert list(span[:, 1]) == pytest.approx([speedup.low, speedup.high])
    assert list(axes.lines[-1].get_ydata()) == [1, 1]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [
        *("coding", "general", "overall")
    ]


def test_domains_without_a_speed_have_no_bar(tmp_path):
    axes = axes_of(plots._speedup, replace(sample_record(), partial=True), tmp_path)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["coding", "general"]


def test_acceptance_lines_are_the_slots(tmp_path):
    axes = axes_of(plots._acceptance, sample_record(), tmp_path)
    slots = analyse(sample_record()).tables[0].overall.acceptance.slots
    conditional, cumulative = axes.lines[:2]
    assert list(conditional.get_ydata()) == [100 * slot.conditional for slot in slots]
    assert list(cumulative.get_ydata()) == [100 * slot.cumulative for slot in slots]
    assert list(conditional.get_xdata()) == [1, 2, 3]


def test_cost_bars_add_up_to_the_cycle(tmp_path):
    axes = axes_of(plots._cost, sample_record(), tmp_path)
    costs = analyse(sample_record()).tables[0].overall.costs
    plain, verify, draft, overhead = (bars[0] for bars in axes.containers[:4])
    assert plain.get_width() == costs.decode
    assert (verify.get_width(), draft.get_width()) == (costs.verify, costs.draft)
    assert draft.get_x() == costs.verify
    assert overhead.get_x() == costs.verify + costs.draft
    assert overhead.get_width() == pytest.approx(costs.overhead)
    assert axes.texts[0].get_text().strip() == "1.53 plain steps"


def test_missing_matplotlib_is_told_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlash2Error, match=r"pip install 'mlx-dflash2\[plot\]'"):
        plots.draw(report_of(sample_record()), tmp_path)


def test_nothing_to_draw_is_told(tmp_path):
    with pytest.raises(DFlash2Error, match="no prompt was finished"):
        plots.draw(report_of(make_record([], partial=True)), tmp_path)
