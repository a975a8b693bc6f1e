"""The pictures show the numbers of the report."""

import struct
import sys
from dataclasses import replace
from pathlib import Path

import matplotlib
import pytest
from bench_records import make_record, report_of, sample_record
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager

from mlx_dflash2.bench import plots
from mlx_dflash2.bench.analysis import analyse
from mlx_dflash2.bench.fonts import find_fonts
from mlx_dflash2.bench.saved import report_from
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


def named(domain):
    """The sample's prompts, all in one domain."""
    record = sample_record()
    prompts = [replace(prompt, domain=domain) for prompt in record.prompts]
    workload = record.workload | {"domains": {domain: len(prompts)}}
    return replace(record, prompts=prompts, workload=workload)


def font_of(folder, family, characters):
    """A font file whose glyphs are all the same square."""
    builder = FontBuilder(1000)
    builder.setupGlyphOrder([".notdef", "square"])
    builder.setupCharacterMap({ord(each): "square" for each in characters})
    pen = TTGlyphPen(None)
    for step, corner in enumerate([(0, 0), (0, 800), (800, 800), (800, 0)]):
        (pen.lineTo if step else pen.moveTo)(corner)
    pen.closePath()
    square = pen.glyph()
    builder.setupGlyf({".notdef": square, "square": square})
    builder.setupHorizontalMetrics({".notdef": (900, 50), "square": (900, 50)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    path = folder / f"{family}.ttf"
    builder.save(path)
    return path


@pytest.fixture
def only_matplotlibs(monkeypatch):
    """Fonts that come with matplotlib, and what a test adds."""
    own = Path(matplotlib.get_data_path())
    fonts = [f for f in fontManager.ttflist if own in Path(f.fname).parents]
    monkeypatch.setattr(fontManager, "ttflist", fonts)


@pytest.mark.parametrize(
    ("domain", "shown"),
    [
        ("编程 é", r"\u7f16\u7a0b é"),
        ("a\x07\tb\u200d", r"a\x07\tb\u200d"),
        ("$x^$ costs", "$x^$ costs"),
    ],
)
def test_what_no_font_can_draw_is_escaped_without_a_warning(
    only_matplotlibs, tmp_path, recwarn, domain, shown
):
    fonts = find_fonts([domain])
    assert (fonts.families, fonts.shown(domain)) == (["DejaVu Sans"], shown)
    plots.draw(report_of(named(domain)), tmp_path)
    assert [str(warning.message) for warning in recwarn] == []


def test_an_installed_font_draws_what_matplotlibs_cannot(
    only_matplotlibs, tmp_path, recwarn
):
    fontManager.addfont(font_of(tmp_path, "Squares", "编程"))
    fonts = find_fonts(["编程 a", "学"])
    assert fonts.families == ["DejaVu Sans", "Squares"]
    assert fonts.shown("编程 a学") == r"编程 a\u5b66"
    plots.draw(report_of(named("编程")), tmp_path)
    assert [str(warning.message) for warning in recwarn] == []


def test_missing_matplotlib_is_told_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DFlash2Error, match=r"pip install 'mlx-dflash2\[plot\]'"):
        plots.draw(report_of(sample_record()), tmp_path)


def test_nothing_to_draw_is_told(tmp_path):
    with pytest.raises(DFlash2Error, match="no prompt was finished"):
        plots.draw(report_of(make_record([], partial=True)), tmp_path)
