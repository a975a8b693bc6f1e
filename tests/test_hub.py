"""The command line with models from a Hub."""

import contextlib
import json
import shutil

import pytest
from command_line import assert_refused, run, start
from fake_hub import FakeHub

TARGET, DRAFTER = "maker/target", "maker/drafter"
FETCHED = {"config.json", "model.safetensors"}
TARGET_ONLY = {
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}
LEFT = ("modeling.py", "pytorch_model.bin", "README.md", "onnx/model.safetensors")
PATIENCE = 120


@pytest.fixture(scope="module")
def repositories(pair, tmp_path_factory):
    """A pair as it would be uploaded, with files nobody should fetch."""
    made, root = pair(eos="off"), tmp_path_factory.mktemp("repositories")
    for name in ("target", "drafter"):
        shutil.copytree(getattr(made, name), root / name)
        for file in LEFT:
            (root / name / file).parent.mkdir(exist_ok=True)
            (root / name / file).write_text("raise SystemExit('this ran')")
    return root


@pytest.fixture
def hub(repositories):
    """A Hub with a target, and a drafter in two revisions."""
    with contextlib.closing(FakeHub()) as hub:
        hub.target = hub.add(TARGET, repositories / "target")
        hub.old = hub.add(DRAFTER, repositories / "drafter", refs=("main", "v1"))
        hub.new = hub.add(DRAFTER, repositories / "drafter", refs=("main",))
        yield hub


@pytest.fixture
def used(hub, monkeypatch, tmp_path):
    """The same Hub, used by this process with an empty cache."""
    hub.used_by(monkeypatch, tmp_path / "cache")
    return hub


GENERATE = ["generate", "a", "-m", "9", "--model", TARGET, "--draft-model", DRAFTER]


def found(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def assert_refused_with_progress(result, *parts):
    """As `assert_refused`, after the progress of a download on stderr."""
    assert result.exit_code == 2 and result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("Error: ") and result.stderr.count("Error: ") == 1
    for part in parts:
        assert part in last, last


def test_a_process_downloads_a_pair_once_and_then_needs_no_socket(hub, pair, tmp_path):
    variables = hub.environment(tmp_path / "cache")
    process = start(*GENERATE, "--json", variables=variables)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    first = json.loads(out)
    local = pair(eos="off")
    folders = "--model", local.target, "--draft-model", local.drafter
    expected = found(run("generate", "a", "-m", 9, *folders, "--json"))
    assert first["tokens"] == expected["tokens"]
    assert (first["model"], first["revision"]) == (TARGET, hub.target)
    assert (first["draft_model"], first["draft_revision"]) == (DRAFTER, hub.new)
    downloads = hub.downloads()
    assert set(downloads) == FETCHED | TARGET_ONLY
    assert all(downloads[name] == 2 for name in FETCHED)  # once a repository
    assert all(downloads[name] == 1 for name in TARGET_ONLY)

    asked = len(hub.requests)
    block = (
        "import socket\n"
        "def refuse(*_, **__): raise AssertionError('a socket was opened')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "socket.create_connection = refuse"
    )
    process = start(*GENERATE, "--json", "--offline", before=block, variables=variables)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err.decode()
    again = json.loads(out)
    assert len(hub.requests) == asked
    assert again["tokens"] == first["tokens"]
    assert again["revision"] == hub.target and again["draft_revision"] == hub.new


@pytest.mark.parametrize("revision", ["v1", "commit"])
def test_a_revision_is_recorded_as_its_commit(used, revision):
    revision = used.old if revision == "commit" else revision
    flags = "--draft-revision", revision, "--revision", "main", "--json"
    told = found(run(*GENERATE, *flags))
    assert told["draft_revision"] == used.old
    assert told["revision"] == used.target


def test_a_second_run_downloads_nothing(used):
    run(*GENERATE)
    first = used.downloads()
    found(run(*GENERATE, "--json"))
    assert used.downloads() == first


def test_a_target_and_drafter_of_one_repository_share_its_files(
    used, repositories, tmp_path
):
    folder = tmp_path / "both"
    shutil.copytree(repositories / "target", folder)
    used.add("maker/both", folder)
    # The target is no drafter: what counts is that its files came once.
    result = run("generate", "a", "--model", "maker/both", "--drafter", "maker/both")
    assert_refused_with_progress(result, "models--maker--both", "LlamaForCausalLM")
    assert set(used.downloads().values()) == {1}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--revision", "v9"], [f"{TARGET}@v9", "no such revision"]),
        (["--draft-revision", "v9"], [f"{DRAFTER}@v9", "no such revision"]),
        (["--revision", "../x"], ["not a revision"]),
        (["--model", "maker/none"], ["maker/none", "nor a repository on the Hub"]),
        (["--draft-model", "maker/none"], ["maker/none", "nor a repository"]),
        (["--model", "maker/gated"], ["maker/gated", "access is gated"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_the_hub_does_not_give_is_told_at_the_end(
    used, repositories, flags, parts
):
    used.add("maker/gated", repositories / "target", gated=True)
    assert_refused_with_progress(run(*GENERATE, *flags), *parts)


def test_offline_with_an_empty_cache_says_how_to_go_on(used):
    result = run(*GENERATE, "--offline")
    assert_refused(result, TARGET, "not in the local Hub cache", "without --offline")
    assert used.requests == []


def test_offline_with_an_incomplete_cache_names_the_file(used, tmp_path):
    run(*GENERATE)
    cached = list((tmp_path / "cache").rglob("snapshots/*/tokenizer.json"))
    assert len(cached) == 1
    cached[0].unlink()
    asked = len(used.requests)
    assert_refused(run(*GENERATE, "--offline"), TARGET, "tokenizer.json")
    assert len(used.requests) == asked


def test_the_hub_out_of_reach_is_one_line(used):
    used.close()
    assert_refused(run(*GENERATE), TARGET, "the Hub cannot be reached")


def test_convert_takes_a_revision_from_the_hub_and_records_it(used, tmp_path):
    out = tmp_path / "out"
    converted = run("convert", DRAFTER, out, "--to-mlx", "--revision", "v1")
    assert converted.exit_code == 0, converted.stderr
    assert converted.stdout.startswith(f"{DRAFTER} at {used.old} -> {out}\n")
    assert used.old in (out / "config.json").read_text()
    assert not list(out.rglob("*.py")) and not list(out.rglob("*.bin"))
    assert not any(name.endswith((".py", ".bin")) for name in used.downloads())
    ours = found(run(*GENERATE, "--draft-model", out, "--json"))
    theirs = found(run(*GENERATE, "--json"))
    assert ours["stats"] == theirs["stats"]
    assert ours["draft_revision"] is None  # a folder has none

    asked = len(used.requests)
    flags = "--to-torch", "--revision", used.old, "--offline"
    assert run("convert", DRAFTER, tmp_path / "torch", *flags).exit_code == 0
    assert len(used.requests) == asked


@pytest.mark.parametrize(
    ("source", "flags", "part"),
    [
        (DRAFTER, ["--revision", "v9"], "no such revision"),
        ("maker/none", [], "nor a repository on the Hub"),
        (DRAFTER, ["--offline"], "not in the local Hub cache"),
    ],
    ids=lambda value: "".join(value),
)
def test_convert_says_in_one_line_what_the_hub_does_not_give(
    used, tmp_path, source, flags, part
):
    result = run("convert", source, tmp_path / "out", "--to-mlx", *flags)
    assert_refused(result, source, part)
    assert not (tmp_path / "out").exists()
