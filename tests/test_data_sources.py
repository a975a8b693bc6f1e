"""`train prepare` with data sets of a Hub, and with text of the target's own."""

import contextlib
import functools
import json
from pathlib import Path

import pytest
from command_line import assert_refused, run
from fake_hub import FakeHub
from text_targets import write_text_target

from mlx_dflash2.conversations import read_conversations
from mlx_dflash2.data import prepare as preparing
from mlx_dflash2.data import rewriting as rewriting_module
from mlx_dflash2.data.prepare import PrepareOptions, prepare
from mlx_dflash2.data.recipes import read_recipe
from mlx_dflash2.data.rewriting import Rewriting
from mlx_dflash2.data.rows import RowSet
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.errors import DFlash2Error

CHATS, PAGES = 6, 4
RECIPE = """\
[datasets.chats]
repo = "maker/chats"
files = "*.jsonl"
prompt = "ask"
answer = "reply"
licence = "MIT"
obligations = "Keep the notice."
effect = "none known"

[datasets.pages]
repo = "maker/pages"
files = "*.jsonl"
text = "body"
licence = "ODC-By 1.0"
obligations = "Attribute."
effect = "attribution"

[[phases]]
name = "one"
take = { chats = 4, pages = 9 }

[[phases]]
name = "two"
take = { chats = 2 }
"""
load = functools.cache(load_target_text)


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A target, a recipe, and the files of two data sets."""
    root = tmp_path_factory.mktemp("root")
    write_text_target(root / "target")
    (root / "recipe.toml").write_text(RECIPE)
    chats = [{"ask": f"Question {n}?", "reply": f"Answer {n}."} for n in range(CHATS)]
    write_lines(root / "chats" / "train.jsonl", chats)
    pages = [{"body": f"Page {n} of a book."} for n in range(PAGES)]
    write_lines(root / "pages" / "train.jsonl", [*pages, {"body": None}])
    return root


@pytest.fixture
def hub(root, monkeypatch, tmp_path):
    with contextlib.closing(FakeHub()) as hub:
        hub.chats = hub.add("datasets/maker/chats", root / "chats", licence="mit")
        hub.pages = hub.add(
            "datasets/maker/pages", root / "pages", licence="cc-by-nc-4.0"
        )
        hub.used_by(monkeypatch, tmp_path / "cache")
        yield hub


@pytest.fixture
def options(root, monkeypatch, tmp_path):
    monkeypatch.setattr(preparing, "load_target_text", load)
    base = {"recipe": str(root / "recipe.toml"), "held_out": 0, "pack": False}
    return lambda **changes: PrepareOptions(
        str(root / "target"), **{"out": tmp_path / "out", **base, **changes}
    )


def prepared(options):
    said = []
    return prepare(options, said.append), said


def learnt(root, folder):
    decode = load(str(root / "target")).tokenizer.decode
    rows = RowSet(folder / "train")
    return sorted(decode(row.tokens[row.supervised]) for row in rows)


def test_a_phase_of_a_recipe_becomes_rows(hub, root, options):
    report, said = prepared(options())
    assert report.read == 4 + PAGES
    answers = [f"Answer {n}.<|im_end|>" for n in range(4)]
    found = learnt(root, report.folder)
    assert found[:4] == answers and len(found) == 8
    assert all(text.endswith(" of a book.") for text in found[4:])
    assert "maker/pages: 4 usable of 5 rows, of 9 wanted" in said


def test_the_next_phase_takes_other_rows(hub, root, options):
    report, _ = prepared(options(phase=2))
    assert learnt(root, report.folder) == [
        f"Answer {n}.<|im_end|>" for n in range(4, 6)
    ]


def test_sources_and_their_terms_are_recorded(hub, options):
    report, _ = prepared(options())
    sources = RowSet(report.folder / "train").manifest["sources"]
    assert [(s["name"], s["revision"]) for s in sources] == [
        ("maker/chats", hub.chats),
        ("maker/pages", hub.pages),
    ]
    text = (report.folder / "SOURCE_TERMS.md").read_text(encoding="utf-8")
    assert f"| maker/chats | {hub.chats} | MIT | mit |" in text
    assert len(report.warnings) == 2
    assert all("cc-by-nc-4.0" in warning for warning in report.warnings)


def test_the_pinned_recipe_gives_the_same_rows_when_the_data_set_has_moved(
    hub, root, options, tmp_path
):
    report, _ = prepared(options())
    write_lines(tmp_path / "moved" / "train.jsonl", [{"ask": "a", "reply": "other"}])
    hub.add("datasets/maker/chats", tmp_path / "moved")
    pinned = report.folder / "recipe.toml"
    assert read_recipe(str(pinned)).datasets["chats"].revision == hub.chats
    again, _ = prepared(options(recipe=str(pinned), out=tmp_path / "again"))
    sums = [RowSet(r.folder / "train").sha256 for r in (report, again)]
    assert sums[0] == sums[1]
    moved, _ = prepared(options(out=tmp_path / "other"))
    assert RowSet(moved.folder / "train").sha256 != sums[0]


def test_a_finished_folder_needs_no_connection(hub, options):
    report, _ = prepared(options())
    hub.requests.clear()
    assert prepared(options(offline=True))[0] == report
    assert hub.requests == []


def test_an_interrupted_stream_goes_on_with_the_next_data_set(hub, options):
    pages = hub.repositories.pop("datasets/maker/pages")
    with pytest.raises(DFlash2Error, match="maker/pages"):
        prepared(options())
    hub.repositories["datasets/maker/pages"] = pages
    hub.requests.clear()
    report, _ = prepared(options())
    assert report.read == 4 + PAGES
    assert not any("maker/chats" in path for _, path in hub.requests)


def test_a_limit_holds_for_each_data_set(hub, options):
    assert prepared(options(limit=2))[0].read == 4


@pytest.fixture
def writing(monkeypatch):
    """A target that answers at once; the calls it got."""
    calls = []

    def write(options, say):
        calls.append(options)
        asked = [{"role": "user", "content": "Mine?"}]
        questions = [asked] * 9
        if options.regenerate:
            given = read_conversations(options.regenerate)
            questions = [c.messages[:1] for c in given]
        answer = {"role": "assistant", "content": "By the target."}
        lines = [{"messages": [*messages, answer]} for messages in questions]
        write_lines(options.out, lines)

    monkeypatch.setattr(rewriting_module, "write", write)
    return calls


def test_regenerated_answers_take_the_place_of_all_others(hub, root, options, writing):
    rewriting = Rewriting(regenerate=True, greedy=0.25, temperature=0.7, backend="mlx")
    report, _ = prepared(options(rewriting=rewriting, enable_thinking=False))
    found = learnt(root, report.folder)
    assert found[:4] == ["By the target.<|im_end|>"] * 4
    assert len(found) == 4 + PAGES
    (call,) = writing
    assert call.conversations == 4 and call.enable_thinking is False
    assert (call.greedy, call.temperature, call.backend) == (0.25, 0.7, "mlx")
    given = list(read_conversations(call.regenerate))
    assert {c.fields["source"] for c in given} == {"maker/chats"}
    text = (report.folder / "SOURCE_TERMS.md").read_text(encoding="utf-8")
    assert "| maker/chats |" in text and "the licence of the target governs" in text


def test_self_prompted_text_needs_no_data(root, options, writing):
    rewriting = Rewriting(self_prompt=5)
    report, _ = prepared(options(recipe=None, rewriting=rewriting))
    assert report.read == 5  # the target may write more than it was asked for
    assert [(c.conversations, c.size, c.regenerate) for c in writing] == [(5, 5, None)]
    assert learnt(root, report.folder) == ["By the target.<|im_end|>"] * 5


def test_other_writing_is_refused_in_the_same_folder(options, writing):
    prepared(options(recipe=None, rewriting=Rewriting(self_prompt=5)))
    with pytest.raises(DFlash2Error, match="prepare.json: rewriting is"):
        prepared(options(recipe=None, rewriting=Rewriting(self_prompt=6)))


def test_the_command_takes_a_recipe_and_writing(root, hub, writing, tmp_path):
    arguments = ["train", "prepare", "--model", root / "target", "--held-out", 0]
    arguments += ["--recipe", root / "recipe.toml", "--out", tmp_path / "out"]
    chosen = ["--regenerate", "--self-prompt", 3, "--greedy-share", 1, "--temp", 0.9]
    planned = run(*arguments, *chosen, "--plan")
    assert "regenerate all answers: 100% greedily" in planned.stdout
    assert "self-prompt 3 conversations" in planned.stdout
    assert not Path(tmp_path / "out").exists() and not writing
    done = run(*arguments, *chosen, "--max-tokens", 99, "--backend", "mlx")
    assert done.exit_code == 0, done.stderr
    assert f"{4 + PAGES + 3} texts read" in done.stdout
    assert "note: maker/pages: licence cc-by-nc-4.0 bars" in done.stdout
    assert [(c.max_tokens, c.greedy, c.temperature) for c in writing] == [
        (99, 1.0, 0.9)
    ] * 2
    assert_refused(run(*arguments, "--phase", 3), "--phase is 3")
