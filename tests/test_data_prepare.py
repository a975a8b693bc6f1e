"""`train prepare`: the same rows each time, however often it was interrupted."""

import functools
import json
import signal
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_refused, run, start
from text_targets import write_text_target

from mlx_dflash2.conversations import read_conversations
from mlx_dflash2.data import prepare as preparing
from mlx_dflash2.data.prepare import PrepareOptions, plan, prepare
from mlx_dflash2.data.rows import RowSet
from mlx_dflash2.data.split import KEYS, held_out_below, prompt_key
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.errors import DFlash2Error

UNIT, TEXTS, HELD_OUT, PATIENCE = 4, 14, 4, 120
load = functools.cache(load_target_text)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_text_target(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Conversations of growing length; two of them ask the same."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(TEXTS):
            asked = f"Question {number % (TEXTS - 1)}?"
            messages = [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": f"Answer {number}. " * (1 + number)},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(preparing, "UNIT", UNIT)
    monkeypatch.setattr(preparing, "load_target_text", load)


@pytest.fixture
def options(target, data, tmp_path):
    """Options of a small run, changed by keywords."""
    base = {"data": (data,), "row_length": 128, "held_out": HELD_OUT}
    return lambda **changes: PrepareOptions(
        str(target), **{"out": tmp_path / "out", **base, **changes}
    )


def prepared(options):
    return prepare(options, lambda _: None)


def tree(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def texts(target, folder):
    """Each document of a folder's rows, decoded."""
    decode = load(str(target)).tokenizer.decode
    return [
        decode(row.tokens[row.document == number])
        for row in RowSet(folder)
        for number in range(row.document[-1] + 1)
    ]


def asked(text):
    return text.partition("user\n")[2].partition("<|im_end|>")[0]


def test_every_conversation_becomes_one_document(options, target, data):
    report = prepared(options(held_out=0, row_length=4096))
    found = texts(target, report.folder / "train")
    assert sorted(found) == sorted(
        f"<|im_start|>user\n{c.messages[0]['content']}<|im_end|>\n"
        f"<|im_start|>assistant\n{c.messages[1]['content']}<|im_end|>"
        for c in read_conversations(data)
    )
    assert report.read == TEXTS and report.documents == {"train": TEXTS, "held_out": 0}


def test_a_prompt_is_on_one_side_only(options, target):
    report = prepared(options())
    sides = [
        {asked(text) for text in texts(target, report.folder / side)}
        for side in ("train", "held_out")
    ]
    assert len(sides[1]) == HELD_OUT and not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == TEXTS - 1


def test_packed_rows_are_fewer_and_hold_the_same_documents(options, target, tmp_path):
    packed = prepared(options(row_length=512))
    plain = prepared(options(row_length=512, pack=False, out=tmp_path / "plain"))
    assert packed.rows["train"] < plain.rows["train"] == plain.documents["train"]
    found = [sorted(texts(target, r.folder / "train")) for r in (packed, plain)]
    assert found[0] == found[1]


def test_long_documents_lose_their_end_and_its_label(options):
    report = prepared(options(row_length=60, pack=False, held_out=0))
    rows = list(RowSet(report.folder / "train"))
    assert max(len(row.tokens) for row in rows) == 60
    cut = [row for row in rows if len(row.tokens) == 60]
    assert len(cut) > 5 and all(row.tokens[-1] != 2 for row in cut)
    assert all(row.supervised[-1] for row in cut)


def test_documents_with_little_to_learn_are_left_out_and_counted(options, tmp_path):
    whole = prepared(options(held_out=0, pack=False))
    learnt = [int(row.supervised.sum()) for row in RowSet(whole.folder / "train")]
    few = sum(count < 40 for count in learnt)
    report = prepared(options(min_supervised=40, held_out=0, out=tmp_path / "few"))
    assert 0 < few < TEXTS
    assert report.dropped == {"fewer than 40 tokens to learn": few}
    assert report.documents["train"] == TEXTS - few


def test_the_manifest_says_what_the_rows_were_made_from(options, target, data):
    report = prepared(options(enable_thinking=False))
    manifest = RowSet(report.folder / "train").manifest
    assert manifest["enable_thinking"] is False
    assert manifest["row_length"] == 128 and manifest["pack"] is True
    assert manifest["target"] == load(str(target)).facts
    assert manifest["split"] == "train"
    (source,) = manifest["sources"]
    assert source["name"] == data.name and source["revision"].startswith("sha256 ")
    assert manifest["rows"] == report.rows["train"]
    assert RowSet(report.folder / "held_out").manifest["split"] == "held_out"


def test_the_rows_do_not_depend_on_where_they_lie(options, tmp_path):
    folders = [prepared(options(out=tmp_path / name)).folder for name in "ab"]
    assert tree(folders[0]) == tree(folders[1])


class Killed(BaseException):
    """Nothing catches this."""


def test_a_run_killed_anywhere_goes_on_to_the_same_bytes(
    options, tmp_path, monkeypatch
):
    whole = tree(prepared(options(out=tmp_path / "whole")).folder)
    rename, survived = Path.rename, 0
    for last in range(40):
        done = 0

        def rename_until_killed(path, other, last=last):
            nonlocal done
            if done == last:
                raise Killed
            done += 1
            return rename(path, other)

        resumed = options(out=tmp_path / str(last))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", rename_until_killed)
            try:
                prepared(resumed)
                break
            except Killed:
                survived += 1
        assert tree(prepared(resumed).folder) == whole
    assert survived > 8


def test_finished_units_are_not_written_again(options, monkeypatch):
    first = prepared(options())

    def fail(*_):
        raise AssertionError("written again")

    monkeypatch.setattr("mlx_dflash2.data.units.write_shard", fail)
    assert prepared(options()) == first


@pytest.mark.parametrize(
    "change, name",
    [
        ({"row_length": 64}, "row_length"),
        ({"pack": False}, "pack"),
        ({"held_out": 0.5}, "held_out"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"last_turn_only": True}, "last_turn_only"),
        ({"min_supervised": 2}, "min_supervised"),
        ({"limit": 3}, "limit"),
        ({"data": ()}, "data"),
    ],
)
def test_other_settings_are_refused(options, data, tmp_path, change, name):
    prepared(options())
    if not change.get("data", True):
        other = tmp_path / data.name
        other.write_text(data.read_text() + "\n")
        change = {"data": (other,)}
    with pytest.raises(DFlash2Error, match=f"prepare.json: {name} is .* asks for"):
        prepared(options(**change))


def test_a_folder_of_something_else_is_refused(options, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(DFlash2Error, match="was not written by `train prepare`"):
        prepared(options())


def test_unfinished_rows_are_not_read(options, monkeypatch):
    def fail(*_):
        raise Killed

    monkeypatch.setattr(preparing, "_finish", fail)
    with pytest.raises(Killed):
        prepared(options())
    with pytest.raises(DFlash2Error, match="no finished rows"):
        RowSet(options().out / "train")


@pytest.mark.parametrize(
    "change, said",
    [
        ({"data": ()}, "nothing to prepare"),
        ({"data": (Path("absent.jsonl"),)}, "absent.jsonl: cannot be read"),
        ({"held_out": 1.5}, "--held-out is 1.5, expected a share below 1"),
        ({"held_out": 99}, "nothing is left to learn \\(all is held out\\)"),
        ({"enable_thinking": True}, "no finished reasoning, but thinking is on: 14"),
        ({"min_supervised": 9999}, "fewer than 9999 tokens to learn: 14"),
    ],
)
def test_what_cannot_be_prepared_is_said(options, change, said):
    with pytest.raises(DFlash2Error, match=said):
        prepared(options(**change))


def test_a_limit_reads_the_first_of_each_file(options, data, tmp_path):
    report = prepared(options(limit=3, data=(data, data), held_out=0))
    assert report.read == 6


def keyed(text):
    return prompt_key(text)


def test_writing_a_prompt_differently_does_not_change_its_side():
    alike = ["What is  π?", " what is\nΠ? ", "WHAT IS π?"]
    assert len({keyed(text) for text in alike}) == 1
    assert keyed("What is π") != keyed("What is π?")


def test_a_share_holds_out_about_that_many_and_the_same_everywhere():
    prompts = [f"Prompt {number}" for number in range(2000)]
    below = held_out_below(0.1, [])
    held = {text for text in prompts if keyed(text) < below}
    assert 150 < len(held) < 250 and below < KEYS
    smaller = {text for text in prompts if keyed(text) < held_out_below(0.05, [])}
    assert smaller < held


def test_a_number_holds_out_that_many_different_prompts():
    prompts = [f"Prompt {number % 50}" for number in range(200)]
    below = held_out_below(7, prompts)
    assert len({text for text in prompts if keyed(text) < below}) == 7


def test_a_plan_names_everything_and_writes_nothing(options, data):
    said = "\n".join(plan(options(recipe="published", phase=2, limit=9)))
    assert str(data) in said and "up to 128 tokens, packed" in said
    assert "bigcode/self-oss-instruct" in said and "9 rows after 6000" in said
    assert not options().out.exists()


def prepare_command(target, data, out):
    return ["train", "prepare", "--model", target, "--data", data, "--out", out]


def test_the_command_prepares_and_reports(target, data, tmp_path):
    arguments = prepare_command(target, data, tmp_path / "out")
    done = run(*arguments, "--held-out", 3, "--row-length", 128)
    assert done.exit_code == 0, done.stderr
    assert f"{TEXTS} texts read" in done.stdout and "held_out: " in done.stdout
    assert len(RowSet(tmp_path / "out" / "train"))
    assert_refused(run(*arguments, "--no-pack"), "prepare.json: ", "choose another")


def test_the_command_plans(target, data, tmp_path):
    done = run(*prepare_command(target, data, tmp_path / "out"), "--plan")
    assert done.exit_code == 0 and "held out: 0.02 of the prompts" in done.stdout
    assert not (tmp_path / "out").exists()


def test_a_killed_process_goes_on_to_the_same_bytes(target, data, options, tmp_path):
    whole = tree(prepared(options(out=tmp_path / "whole")).folder)
    command = [*prepare_command(target, data, tmp_path / "out"), "--row-length", "128"]
    command += ["--held-out", str(HELD_OUT)]
    before = (
        "import os, signal\n"
        "from mlx_dflash2.data import prepare, units\n"
        f"prepare.UNIT = {UNIT}\n"
        "write = units.write_shard\n"
        "def write_and_die(path, rows):\n"
        "    shard = write(path, rows)\n"
        "    if path.name == 'rows-00001.safetensors':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return shard\n"
        "units.write_shard = write_and_die"
    )
    killed = start(*map(str, command), before=before)
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "out" / "units" / "00000.json").is_file()
    assert tree(prepared(options()).folder) == whole


def test_rows_are_typed_as_training_reads_them(options):
    row = RowSet(prepared(options()).folder / "train")[0]
    kinds = (row.tokens.dtype, row.supervised.dtype, row.document.dtype)
    assert kinds == (np.int32, np.bool_, np.int32)
