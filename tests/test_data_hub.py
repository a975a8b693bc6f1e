"""Data sets of the Hub, streamed once: what was asked, at one commit, resumably."""

import contextlib
import json
import sys
from dataclasses import replace

import pyarrow as pa
import pytest
from fake_hub import FakeHub
from pyarrow import parquet

from mlx_dflash2.data.hub import as_entry, fetch, share
from mlx_dflash2.data.recipes import Dataset, Take
from mlx_dflash2.errors import DFlash2Error

REPO = "maker/chats"
CHATS = Dataset(
    "chats",
    REPO,
    None,
    "data/train-*.parquet",
    {"messages": "messages"},
    licence="MIT",
    obligations="Keep the notice.",
    effect="none known",
)
PAIRS = replace(CHATS, files="*.jsonl", columns={"prompt": "ask", "answer": "reply"})
TEXTS = replace(CHATS, files="pages/*.parquet", columns={"text": "body"})
FILES, ROWS = 3, 10  # of CHATS


def chat(number):
    return [
        {"role": "user", "content": f"Question {number}?"},
        {"role": "assistant", "content": f"Answer {number}."},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A data set in three forms; rows of one file go on where the last one ended."""
    root = tmp_path_factory.mktemp("data set")
    (root / "README.md").write_text("# Chats\n")
    for name in ("data", "pages"):
        (root / name).mkdir()
    for file in range(FILES):
        numbers = range(ROWS * file, ROWS * (file + 1))
        table = pa.table({"id": numbers, "messages": [chat(n) for n in numbers]})
        path = root / "data" / f"train-{file:05d}-of-{FILES:05d}.parquet"
        parquet.write_table(table, path, row_group_size=4)
    (root / "data" / "test-00000.parquet").write_bytes(b"not for training")
    bodies = pa.table({"body": ["First page.", " ", None, "Last page."]})
    parquet.write_table(bodies, root / "pages" / "0.parquet")
    lines = [
        json.dumps({"ask": "2+2?", "reply": "4"}),
        json.dumps({"ask": "3+3?", "reply": None}),
        "not JSON",
        json.dumps(["a list"]),
        json.dumps({"ask": "4+4?", "reply": "8"}),
    ]
    (root / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def hub(folder, monkeypatch, tmp_path):
    """A Hub with the data set, used by this process."""
    with contextlib.closing(FakeHub()) as hub:
        hub.commit = hub.add(f"datasets/{REPO}", folder, licence="mit")
        hub.used_by(monkeypatch, tmp_path / "cache")
        yield hub


def fetched(take, folder, *, offline=False):
    return fetch(take, folder, offline=offline, say=lambda _: None)


def entries(parts):
    return [
        json.loads(line)
        for part in parts
        for line in part.path.read_text(encoding="utf-8").splitlines()
    ]


def numbers(parts):
    """Which rows of CHATS were taken."""
    questions = [entry["messages"][0]["content"] for entry in entries(parts)]
    return [int(question.split()[1].rstrip("?")) for question in questions]


def test_all_files_give_alike(hub, tmp_path):
    download, parts = fetched(Take(CHATS, 0, 7), tmp_path / "out")
    assert numbers(parts) == [0, 1, 2, 10, 11, 20, 21]
    assert entries(parts)[0] == {"messages": chat(0)}
    assert [(part.read, part.kept) for part in parts] == [(3, 3), (2, 2), (2, 2)]
    assert len(download.files) == FILES


def test_takes_of_later_phases_go_on_where_earlier_ones_ended(hub, tmp_path):
    found = []
    for name, (first, count) in {"a": (0, 7), "b": (7, 5), "c": (12, 18)}.items():
        found += numbers(fetched(Take(CHATS, first, count), tmp_path / name)[1])
    assert sorted(found) == list(range(FILES * ROWS))


def test_shares_add_up_and_never_meet():
    for files in (1, 2, 3, 7):
        for first in range(0, 30, 4):
            take, later = Take(CHATS, 0, first), Take(CHATS, first, 11)
            before = [share(take, n, files) for n in range(files)]
            shares = [share(later, n, files) for n in range(files)]
            assert sum(stop - start for start, stop in shares) == 11
            assert [stop for _, stop in before] == [start for start, _ in shares]


def test_a_file_that_ends_early_gives_what_it_has(hub, tmp_path):
    _, parts = fetched(Take(CHATS, 27, 9), tmp_path / "out")
    assert numbers(parts) == [9, 19, 29]


def test_pairs_and_texts_are_read_and_unusable_rows_are_not(hub, tmp_path):
    _, (pairs,) = fetched(Take(PAIRS, 0, 100), tmp_path / "pairs")
    assert [entry["messages"][1]["content"] for entry in entries([pairs])] == ["4", "8"]
    assert (pairs.read, pairs.kept) == (5, 2)
    _, (texts,) = fetched(Take(TEXTS, 0, 100), tmp_path / "texts")
    assert entries([texts]) == [{"text": "First page."}, {"text": "Last page."}]
    assert (texts.read, texts.kept) == (4, 2)


def test_only_the_ranges_with_the_rows_move(hub, tmp_path):
    fetched(Take(CHATS, 0, 1), tmp_path / "out")
    touched = {path.rpartition("/")[2] for path in hub.downloads()}
    assert touched == {"README.md", f"train-00000-of-{FILES:05d}.parquet"}


def test_the_commit_and_the_card_are_recorded(hub, tmp_path):
    download, _ = fetched(Take(CHATS, 0, 3), tmp_path / "out")
    assert download.revision == hub.commit
    assert download.card_licence == "mit"
    assert len(download.card_sha256) == 64


def test_a_finished_download_opens_no_connection(hub, tmp_path):
    first = fetched(Take(CHATS, 0, 7), tmp_path / "out")
    hub.requests.clear()
    assert fetched(Take(CHATS, 0, 7), tmp_path / "out", offline=True) == first
    assert hub.requests == []


def test_an_interrupted_download_goes_on_at_the_same_commit(hub, folder, tmp_path):
    whole = fetched(Take(CHATS, 0, 7), tmp_path / "whole")
    hub.absent = f"train-00001-of-{FILES:05d}.parquet"
    with pytest.raises(DFlash2Error, match=f"{REPO}/data/train-00001"):
        fetched(Take(CHATS, 0, 7), tmp_path / "out")
    hub.absent = None
    moved = hub.add(f"datasets/{REPO}", folder, licence="cc-by-nc-4.0")
    hub.requests.clear()
    resumed = fetched(Take(CHATS, 0, 7), tmp_path / "out")
    assert resumed[0] == whole[0] and resumed[0].revision != moved
    assert numbers(resumed[1]) == numbers(whole[1])
    assert not any("train-00000" in path for path in hub.downloads())
    assert not any(moved in path for _, path in hub.requests)


def test_a_revision_can_be_pinned(hub, folder, tmp_path):
    hub.add(f"datasets/{REPO}", folder)
    pinned = replace(CHATS, revision=hub.commit)
    assert fetched(Take(pinned, 0, 3), tmp_path / "a")[0].revision == hub.commit
    assert fetched(Take(CHATS, 0, 3), tmp_path / "b")[0].revision != hub.commit


def test_another_take_is_refused(hub, tmp_path):
    fetched(Take(CHATS, 0, 3), tmp_path / "out")
    with pytest.raises(DFlash2Error, match=f"is of another take of {REPO}"):
        fetched(Take(CHATS, 0, 4), tmp_path / "out")


def test_offline_is_refused_until_all_is_there(hub, tmp_path):
    with pytest.raises(DFlash2Error, match="run once without --offline"):
        fetched(Take(CHATS, 0, 7), tmp_path / "out", offline=True)
    assert hub.requests == []


@pytest.mark.parametrize(
    "change, said",
    [
        ({"files": "nothing/*"}, "no Parquet or JSONL file matches 'nothing/\\*'"),
        ({"files": "README.md"}, "no Parquet or JSONL file matches"),
        ({"repo": "maker/absent"}, "maker/absent: .* repository on the Hub"),
        ({"revision": "v9"}, "maker/chats@v9: the Hub knows no such revision"),
        ({"columns": {"messages": "turns"}}, "has no column turns, but id, messages"),
        ({"files": "data/test-*"}, "test-00000.parquet@.*: download failed"),
    ],
)
def test_what_cannot_be_had_is_said(hub, tmp_path, change, said):
    with pytest.raises(DFlash2Error, match=said):
        fetched(Take(replace(CHATS, **change), 0, 3), tmp_path / "out")


def test_a_gated_data_set_is_said_to_be(hub, folder, tmp_path):
    hub.add("datasets/maker/gated", folder, gated=True)
    with pytest.raises(DFlash2Error, match="maker/gated: access is gated"):
        fetched(Take(replace(CHATS, repo="maker/gated"), 0, 3), tmp_path / "out")


def test_parquet_without_pyarrow_says_what_to_install(hub, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DFlash2Error, match=r"pip install 'mlx-dflash2\[train\]'"):
        fetched(Take(CHATS, 0, 3), tmp_path / "out")


def test_both_forms_of_conversations_are_entries():
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert as_entry({"turns": shared}, {"messages": "turns"}) == {"messages": shared}
    with pytest.raises(DFlash2Error, match="expected a list of messages"):
        as_entry({"turns": "a"}, {"messages": "turns"})
