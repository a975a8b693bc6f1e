"""Folders and repositories are found, their tensors listed, folders written whole."""

import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from fake_hub import FakeHub
from pair_files import write_safetensors
from safetensors.numpy import save_file

from mlx_dflash2.checkpoint import (
    DRAFTER_FILES,
    EVERY_FILE,
    INDEX,
    TARGET_FILES,
    find_source,
    new_folder,
    refuse_existing,
    stored_tensors,
)
from mlx_dflash2.errors import DFlash2Error

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process uses, with an empty cache."""
    with contextlib.closing(FakeHub()) as hub:
        hub.used_by(monkeypatch, tmp_path / "cache")
        yield hub


@pytest.fixture
def closed_port(monkeypatch, tmp_path):
    """As `hub`, but nothing listens there."""
    hub = FakeHub()
    hub.close()
    hub.used_by(monkeypatch, tmp_path / "cache")
    return hub


@pytest.fixture
def folder(tmp_path):
    """A folder with a config and one tensor, and files nobody should fetch."""
    made = tmp_path / "made"
    made.mkdir()
    (made / "config.json").write_text("{}")
    write_safetensors(made / "model.safetensors", {"a": np.ones((2, 3))}, "float32")
    (made / "modeling.py").write_text("raise SystemExit('this code ran')")
    (made / "pytorch_model.bin").write_bytes(b"pickle")
    (made / "README.md").write_text("card")
    (made / "onnx").mkdir()
    (made / "onnx" / "model.safetensors").write_bytes(b"another format")
    return made


@pytest.fixture
def sharded(pair, tmp_path):
    """A private copy of a target in three shards."""
    copy = tmp_path / "sharded"
    shutil.copytree(pair("random", shards=3).target, copy)
    return copy


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


# Local folders


def test_a_folder_is_taken_as_it_is(folder):
    source = find_source(folder)
    assert (source.folder, source.revision) == (folder, None)
    assert find_source(str(folder)) == source


def test_a_folder_with_a_revision_is_refused(folder):
    with pytest.raises(DFlash2Error, match="has no revisions; leave out.*'v1'"):
        find_source(folder, revision="v1")


def test_a_file_is_not_a_model_folder(folder):
    with pytest.raises(DFlash2Error, match="expected a model folder, found a file"):
        find_source(folder / "config.json")


@pytest.mark.parametrize(
    "name", ["./drafter", "/no/drafter", "a/b/c", "../x", "", "-x y", "~/no such dir"]
)
def test_what_cannot_be_a_repository_is_not_asked_for(hub, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may hold a drafter of that name
    with pytest.raises(DFlash2Error, match="no such folder"):
        find_source(name)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
def test_a_name_the_system_rejects_is_one_clear_error(hub, name):
    with pytest.raises(DFlash2Error, match="no folder can be had there"):
        find_source(name)


@pytest.mark.parametrize("name", ["a/b--c", "a..b", "x" * 120])
def test_a_name_the_hub_rejects_is_one_clear_error(hub, name):
    with pytest.raises(DFlash2Error, match="no such folder, nor a repository id"):
        find_source(name)


# Repositories


def test_a_repository_resolves_to_its_commit(hub, folder):
    commit = hub.add("someone/drafter", folder)
    source = find_source("someone/drafter")
    assert source.revision == commit
    assert stored_tensors(source.folder)["a"].shape == (2, 3)


def test_no_code_pickle_or_other_format_is_fetched(hub, folder):
    hub.add("someone/drafter", folder)
    find_source("someone/drafter")
    assert set(hub.downloads()) == {"config.json", "model.safetensors"}
    find_source("someone/drafter", files=TARGET_FILES)
    assert set(hub.downloads()) == {"config.json", "model.safetensors"}
    find_source("someone/drafter", files=EVERY_FILE)
    assert set(hub.downloads()) == {"config.json", "model.safetensors", "README.md"}


@pytest.mark.parametrize("patterns", [DRAFTER_FILES, TARGET_FILES, EVERY_FILE])
def test_no_pattern_matches_code_or_pickles(patterns):
    for name in ("modeling.py", "model.bin", "model.pt", "model.pth", "model.pkl"):
        assert not any(fnmatch(name, pattern) for pattern in patterns)


def test_a_file_is_downloaded_once(hub, folder):
    hub.add("someone/pair", folder)
    first = find_source("someone/pair", files=TARGET_FILES)
    second = find_source("someone/pair", files=DRAFTER_FILES)
    third = find_source("someone/pair", revision=first.revision)
    assert first.folder == second.folder == third.folder
    assert set(hub.downloads().values()) == {1}


def test_a_revision_picks_branch_tag_or_commit(hub, folder, tmp_path):
    old = hub.add("someone/drafter", folder, refs=("main", "v1"))
    newer = tmp_path / "newer"
    shutil.copytree(folder, newer)
    (newer / "config.json").write_text('{"layers": 80}')
    new = hub.add("someone/drafter", newer, refs=("main",))
    assert find_source("someone/drafter").revision == new
    assert find_source("someone/drafter", revision="v1").revision == old
    at_commit = find_source("someone/drafter", revision=old)
    assert at_commit.revision == old
    assert (at_commit.folder / "config.json").read_text() == "{}"


@pytest.mark.parametrize("revision", ["v9", "feature/x", "0" * 40])
def test_an_unknown_revision_is_named(hub, folder, revision):
    hub.add("someone/drafter", folder)
    with pytest.raises(DFlash2Error, match=f"@{revision}: the Hub knows no such"):
        find_source("someone/drafter", revision=revision)


@pytest.mark.parametrize("revision", ["", "../../x", "/x", "a b", "a:b"])
@pytest.mark.parametrize("offline", [False, True])
def test_what_cannot_be_a_revision_is_refused_at_once(hub, revision, offline):
    with pytest.raises(DFlash2Error, match="is not a revision"):
        find_source("someone/drafter", revision=revision, offline=offline)
    assert hub.requests == []


def test_an_unknown_repository_is_named(hub):
    message = "someone/typo: neither a folder here nor a repository on the Hub"
    with pytest.raises(DFlash2Error, match=message):
        find_source("someone/typo")


def test_a_gated_repository_says_what_to_do(hub, folder):
    hub.add("someone/gated", folder, gated=True)
    with pytest.raises(DFlash2Error, match="access is gated; accept its terms"):
        find_source("someone/gated")


def test_a_broken_hub_is_reported_in_one_line(hub):
    hub.broken = True
    with pytest.raises(DFlash2Error, match="cannot be reached.*503") as caught:
        find_source("someone/drafter")
    assert "\n" not in str(caught.value)


def test_an_answer_that_is_no_hub_answer_is_reported(hub, folder, monkeypatch):
    hub.add("someone/drafter", folder)
    monkeypatch.setattr(json, "dumps", lambda content: "<html>log in to the wifi")
    with pytest.raises(DFlash2Error, match="someone/drafter: download failed"):
        find_source("someone/drafter")


def test_a_download_cut_off_is_reported_and_resumes(hub, folder, monkeypatch):
    import time

    hub.add("someone/drafter", folder)
    hub.cut_off = "model.safetensors"
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between its own retries
    with pytest.raises(DFlash2Error, match="download failed.*run again to resume"):
        find_source("someone/drafter")
    with pytest.raises(
        DFlash2Error, match=r"incomplete.*missing model\.safetensors.*--offline"
    ):
        find_source("someone/drafter", offline=True)
    hub.cut_off = None
    assert stored_tensors(find_source("someone/drafter").folder)["a"].shape == (2, 3)


def test_without_a_network_the_name_and_the_reason_are_given(closed_port):
    message = "someone/drafter: no folder here and not in the local.*cannot be reached"
    with pytest.raises(DFlash2Error, match=message):
        find_source("someone/drafter")


def test_without_a_network_a_complete_cache_still_works(hub, folder):
    commit = hub.add("someone/drafter", folder)
    find_source("someone/drafter")
    hub.close()
    assert find_source("someone/drafter").revision == commit


def test_offline_needs_no_socket(hub, folder, monkeypatch):
    import socket

    commit = hub.add("someone/drafter", folder, refs=("main", "v1"))
    find_source("someone/drafter")
    find_source("someone/drafter", revision="v1")

    def refuse(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert find_source("someone/drafter", offline=True).revision == commit
    named = find_source("someone/drafter", revision="v1", offline=True)
    assert named.revision == commit
    with pytest.raises(DFlash2Error, match="@v2: no folder here and not in the local"):
        find_source("someone/drafter", revision="v2", offline=True)


def test_the_variable_for_offline_needs_no_socket(hub, folder, tmp_path):
    commit = hub.add("someone/drafter", folder)
    find_source("someone/drafter")
    before = len(hub.requests)
    code = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('a socket was opened')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from mlx_dflash2.checkpoint import find_source\n"
        "print(find_source('someone/drafter').revision)\n"
    )
    variables = hub.environment(tmp_path / "cache", offline=True)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == commit, done.stderr
    assert len(hub.requests) == before


def test_offline_an_incomplete_cache_names_the_missing_file(hub, folder):
    hub.add("someone/drafter", folder)
    find_source("someone/drafter", files=("*.json",))
    with pytest.raises(DFlash2Error, match=r"missing model\.safetensors"):
        find_source("someone/drafter", offline=True)


# Tensors of a folder


def test_shards_and_one_file_list_the_same_tensors(pair, sharded):
    whole = stored_tensors(pair("random").target)
    parts = stored_tensors(sharded)
    assert {n: (t.shape, t.dtype) for n, t in whole.items()} == {
        n: (t.shape, t.dtype) for n, t in parts.items()
    }
    assert len({tensor.file for tensor in parts.values()}) == 3


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    message = "lists model-00002-of-00003.safetensors, which is not there"
    with pytest.raises(DFlash2Error, match=message):
        stored_tensors(sharded)


def test_a_stale_shard_beside_an_index_is_ignored(sharded):
    before = stored_tensors(sharded)
    stale = {"model.norm.weight": np.zeros(96), "left.over": np.zeros(3)}
    write_safetensors(sharded / "model-00004-of-00004.safetensors", stale, "float32")
    assert stored_tensors(sharded) == before


def test_an_index_that_misses_a_tensor_is_refused(sharded):
    edit_index(sharded, lambda weight_map: weight_map.pop("model.norm.weight"))
    with pytest.raises(DFlash2Error, match=r"does not list model\.norm\.weight"):
        stored_tensors(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded):
    first = "model-00001-of-00003.safetensors"
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": first}))
    with pytest.raises(DFlash2Error, match=r"lm_head\.weight in .*00001.*has it too"):
        stored_tensors(sharded)


def test_an_index_with_a_tensor_nobody_holds_is_refused(sharded):
    first = "model-00001-of-00003.safetensors"
    edit_index(sharded, lambda weight_map: weight_map.update({"ghost": first}))
    with pytest.raises(DFlash2Error, match="lists ghost in .*does not hold it"):
        stored_tensors(sharded)


@pytest.mark.parametrize(
    "escape", ["../model.safetensors", "/etc/model.safetensors", "sub/x.safetensors"]
)
def test_an_index_that_leads_outside_is_refused(sharded, escape):
    edit_index(sharded, lambda weight_map: weight_map.update({"x": escape}))
    with pytest.raises(DFlash2Error, match="leads outside the folder"):
        stored_tensors(sharded)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "..", "x.pt", 5, None])
def test_an_index_of_anything_but_safetensors_is_refused(sharded, name):
    edit_index(sharded, lambda weight_map: weight_map.update({"x": name}))
    with pytest.raises(DFlash2Error, match="leads outside|not a safetensors file"):
        stored_tensors(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": 3}'])
def test_an_index_without_a_map_is_refused(sharded, content):
    (sharded / INDEX).write_text(content)
    with pytest.raises(DFlash2Error, match="weight_map is missing or empty"):
        stored_tensors(sharded)


def test_disjoint_shards_without_an_index_load(pair, sharded):
    (sharded / INDEX).unlink()
    whole = stored_tensors(pair("random").target)
    assert stored_tensors(sharded).keys() == whole.keys()


def test_a_missing_shard_without_an_index_is_named(sharded):
    (sharded / INDEX).unlink()
    (sharded / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(DFlash2Error, match="model-00003-of-00003.*is missing"):
        stored_tensors(sharded)


def test_overlapping_files_without_an_index_are_refused(folder):
    write_safetensors(folder / "model-more.safetensors", {"a": np.ones(2)}, "float32")
    message = r"a is in model-more\.safetensors and in model\.safetensors"
    with pytest.raises(DFlash2Error, match=message):
        stored_tensors(folder)


def test_a_file_of_any_name_is_read(tmp_path):
    write_safetensors(tmp_path / "drafter.safetensors", {"a": np.ones(2)}, "bfloat16")
    (tensor,) = stored_tensors(tmp_path).values()
    assert (tensor.shape, tensor.dtype) == ((2,), "BF16")


@pytest.mark.parametrize("keep", [0, 4, 20, -4])
def test_a_truncated_file_is_named(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    message = r"model\.safetensors: not a complete safetensors file.*fetch it again"
    with pytest.raises(DFlash2Error, match=message):
        stored_tensors(folder)


class Trap:
    """Unpickling this writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.write_text, (self.path, "unpickled"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_pickle_is_never_opened(tmp_path, name):
    trap = tmp_path / "trap.txt"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Trap(trap)))
    with pytest.raises(DFlash2Error, match=f"{name} is a pickle.*never opened"):
        stored_tensors(folder)
    (folder / name).rename(folder / "model.safetensors")
    with pytest.raises(DFlash2Error, match="not a complete safetensors file"):
        stored_tensors(folder)
    assert not trap.exists()


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(DFlash2Error, match=f"{tmp_path}: no safetensors file$"):
        stored_tensors(tmp_path)


# Writing


def test_a_new_folder_appears_whole(tmp_path):
    destination = tmp_path / "deep" / "out"
    with new_folder(destination) as partial:
        (partial / "config.json").write_text("{}")
        assert not destination.exists()
    assert [file.name for file in destination.iterdir()] == ["config.json"]
    assert [entry.name for entry in destination.parent.iterdir()] == ["out"]


def test_who_may_read_a_new_folder_may_read_its_files(tmp_path):
    destination = tmp_path / "out"
    with new_folder(destination) as partial:
        partial.chmod(0o750)
        save_file({"a": np.zeros(2)}, partial / "model.safetensors")
        (partial / "within").mkdir()
    assert (destination / "model.safetensors").stat().st_mode & 0o777 == 0o640
    assert (destination / "within").is_dir()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_writing_leaves_nothing(tmp_path, error):
    with pytest.raises(error), new_folder(tmp_path / "out") as partial:
        (partial / "half").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_refused_and_kept(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("empty", "file", "link"):
        with pytest.raises(DFlash2Error, match=f"{name}: already exists"):
            refuse_existing(tmp_path / name)
        with pytest.raises(DFlash2Error), new_folder(tmp_path / name):
            raise AssertionError("never entered")
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 3


def test_what_appears_meanwhile_is_kept(tmp_path):
    with (
        pytest.raises(DFlash2Error, match="already exists"),
        new_folder(tmp_path / "out") as partial,
    ):
        (partial / "ours").write_text("ours")
        (tmp_path / "out").write_text("theirs")
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out").read_text() == "theirs"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(DFlash2Error, match="cannot be written"),
        new_folder(tmp_path / "file" / "out"),
    ):
        raise AssertionError("never entered")


def test_a_kill_leaves_only_a_partial_folder(tmp_path):
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from mlx_dflash2.checkpoint import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'half').write_text('half')\n"
        "    print('writing', flush=True)\n    time.sleep(60)\n"
    )
    destination = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(destination)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
    with new_folder(destination) as partial:
        (partial / "whole").write_text("whole")
    assert (destination / "whole").exists()
