"""What travels with a conversion, what is refused, and what a kill leaves."""

import errno
import shutil
import signal
from pathlib import Path

import pytest
from drafter_files import (
    INDEX,
    Stored,
    content,
    random_tensors,
    read_config,
    read_file,
    read_tensors,
    run_python,
    small_config,
    write_drafter,
    write_file,
)
from fake_hub import FakeHub

from mlx_dflash2.convert import to_mlx, to_torch
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import DFlash2Config
from mlx_dflash2.names import expected_shapes

SIDECARS = {
    "README.md": b"---\nlicense: apache-2.0\n---\r\n# card \xff\xfe\n",
    "LICENSE": b"terms",
    "LICENSE-MODEL.txt": b"more terms",
    "NOTICE": b"notice",
    "SOURCE_TERMS.md": b"source terms",
    "dflash2_training_meta.json": b'{"steps":1e3 }',
    "measured_results.json": b"{}",
    "evaluation-v4.json": b"not even JSON",
    "release_manifest.json": b"[]\n\n",
    "notes.txt": b"",
}
CODE = ("modeling.py", "weights.bin", "state.pt", "LICENSE.py", "run.sh", "a.pkl")


@pytest.fixture
def source(tmp_path):
    return write_drafter(tmp_path / "source", shards=3)


@pytest.mark.parametrize("convert", [to_mlx, to_torch])
def test_card_licence_and_results_travel_byte_for_byte(source, tmp_path, convert):
    for name, data in SIDECARS.items():
        (source / name).write_bytes(data)
    report = convert(source, tmp_path / "out")
    assert report.copied == tuple(sorted(SIDECARS))
    written = content(tmp_path / "out")
    assert {name: written[name] for name in SIDECARS} == SIDECARS
    assert written.keys() == SIDECARS.keys() | set(report.written)


def test_nothing_that_can_run_code_travels_and_the_rest_is_named(source, tmp_path):
    for name in CODE:
        (source / name).write_bytes(b"\x80\x04boom")
    (source / "extra").mkdir()
    (source / "pytorch_model.bin.index.json").write_text("{}")
    (source / "stale.safetensors").write_bytes(b"not read")
    (source / ".gitattributes").write_text("")
    report = to_mlx(source, tmp_path / "out")
    assert set(content(tmp_path / "out")) == set(report.written)
    behind = ", ".join(sorted([*CODE, "extra/", "stale.safetensors"]))
    assert report.notes == (f"not taken over: {behind}",)


def test_links_of_a_hub_cache_are_copied_as_files(source, tmp_path):
    (source / "README.md").write_text("card")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in source.iterdir():
        (snapshot / path.name).symlink_to(Path("..") / "source" / path.name)
    to_mlx(snapshot, tmp_path / "linked")
    to_mlx(source, tmp_path / "plain")
    assert not any(path.is_symlink() for path in (tmp_path / "linked").iterdir())
    assert content(tmp_path / "linked") == content(tmp_path / "plain")


def test_a_link_that_leads_nowhere_is_named(source, tmp_path):
    (source / "README.md").symlink_to("gone")
    with pytest.raises(DFlash2Error, match="README.md: a link that leads nowhere"):
        to_mlx(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hub_repository_is_recorded_with_its_commit(source, tmp_path, monkeypatch):
    hub = FakeHub()
    try:
        (source / "README.md").write_text("card")
        commit = hub.add("someone/drafter", source, refs=("main", "v1"))
        hub.used_by(monkeypatch, tmp_path / "cache")
        report = to_mlx("someone/drafter", tmp_path / "out", revision="v1")
        again = to_torch(
            "someone/drafter", tmp_path / "torch", revision="v1", offline=True
        )
    finally:
        hub.close()
    assert report.revision == again.revision == commit
    assert report.copied == ("README.md",)
    assert any(commit in line for line in report.lines())
    assert set(hub.downloads().values()) == {1}
    origin = {"repository": "someone/drafter", "revision": commit}
    assert read_config(tmp_path / "out")["mlx_dflash2_source"] == origin
    assert read_tensors(tmp_path / "out") == read_tensors(source)
    to_mlx(tmp_path / "out", tmp_path / "twice")
    assert content(tmp_path / "twice") == content(tmp_path / "out")


def test_an_existing_destination_is_refused_before_any_download(
    source, tmp_path, monkeypatch
):
    hub = FakeHub()
    try:
        hub.add("someone/drafter", source)
        hub.used_by(monkeypatch, tmp_path / "cache")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("kept")
        with pytest.raises(DFlash2Error, match="already exists"):
            to_mlx("someone/drafter", tmp_path / "out")
    finally:
        hub.close()
    assert hub.requests == []
    assert content(tmp_path / "out") == {"mine": b"kept"}


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link", "source"])
def test_whatever_is_at_the_destination_is_kept(source, tmp_path, kind):
    out = source if kind == "source" else tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("kept")
    elif kind == "dangling link":
        out.symlink_to(tmp_path / "gone")
    before = content(source)
    with pytest.raises(DFlash2Error, match="already exists"):
        to_mlx(source, out)
    assert content(source) == before
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("inside", ["out", "deep/out"])
def test_a_destination_inside_the_source_is_refused(source, tmp_path, inside):
    (tmp_path / "link").symlink_to(source)
    before = content(source)
    for start in (source, tmp_path / "link"):
        with pytest.raises(DFlash2Error, match="inside the source"):
            to_mlx(source, start / inside)
    assert content(source) == before


def test_parents_of_the_destination_are_made(source, tmp_path):
    to_mlx(source, tmp_path / "new" / "deep" / "out")
    assert read_tensors(tmp_path / "new" / "deep" / "out") == read_tensors(source)


def test_a_file_in_the_way_is_one_clear_line(source, tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(DFlash2Error, match="cannot be written"):
        to_mlx(source, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_read_only_parent_is_one_clear_line(source, tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DFlash2Error, match="cannot be written.*Permission denied"):
        to_mlx(source, tmp_path / "out")


def test_a_full_disk_under_the_weights_leaves_nothing(source, tmp_path):
    code = """
import resource
from mlx_dflash2.convert import to_mlx
from mlx_dflash2.errors import DFlash2Error
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    to_mlx(*sys.argv[1:])
except DFlash2Error as error:
    print(error)
"""
    done = run_python(code, source, tmp_path / "out")
    assert "out: could not be written" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_full_disk_under_the_other_files_leaves_nothing(
    source, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    (source / "README.md").write_text("card")
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DFlash2Error, match="could not be written.*No space left"):
        to_mlx(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_interrupt_leaves_nothing(source, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    (source / "README.md").write_text("card")
    monkeypatch.setattr(shutil, "copyfile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        to_mlx(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_kill_leaves_no_folder_of_that_name_and_a_rerun_works(source, tmp_path):
    code = """
import os, signal
from mlx_dflash2.convert import to_mlx, weights
write = weights.Weights.write
def write_and_die(self, *arguments):
    write(self, *arguments)
    if len(self.files) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
weights.Weights.write = write_and_die
to_mlx(*sys.argv[1:])
"""
    done = run_python(code, source, tmp_path / "out")
    assert done.returncode == -signal.SIGKILL, done.stderr
    (partial,) = set(tmp_path.iterdir()) - {source}
    assert partial.name.startswith(".out.partial-")
    assert len(list(partial.glob("*.safetensors"))) == 2
    to_mlx(source, tmp_path / "out")
    assert read_tensors(tmp_path / "out") == read_tensors(source)


def test_a_missing_shard_is_named(source, tmp_path):
    (source / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DFlash2Error, match="model-00002-of-00003.safetensors"):
        to_mlx(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_stale_shard_is_not_read(source, tmp_path):
    expected = read_tensors(source)
    stale = {"norm.weight": Stored("BF16", (64,), bytes(128))}
    write_file(source / "model-00009-of-00009.safetensors", stale)
    to_mlx(source, tmp_path / "out")
    assert read_tensors(tmp_path / "out") == expected


def test_overlapping_files_without_an_index_are_refused(source, tmp_path):
    (source / INDEX).unlink()
    file = source / "model-00001-of-00003.safetensors"
    tensors = read_file(file)[1]
    other = source / "model-00002-of-00003.safetensors"
    write_file(other, read_file(other)[1] | dict([next(iter(tensors.items()))]))
    with pytest.raises(DFlash2Error, match="is in model-00001.* and in model-00002"):
        to_mlx(source, tmp_path / "out")


@pytest.mark.parametrize("where", ["../outside.safetensors", "/outside.safetensors"])
def test_an_index_that_leads_outside_is_refused(source, tmp_path, where):
    text = (source / INDEX).read_text()
    text = text.replace("model-00002-of-00003.safetensors", where)
    (source / INDEX).write_text(text)
    with pytest.raises(DFlash2Error, match="leads outside"):
        to_mlx(source, tmp_path / "out")


def test_a_target_is_not_converted(pair, tmp_path):
    for convert in (to_mlx, to_torch):
        with pytest.raises(DFlash2Error, match="a target.*mlx-lm loads it as it is"):
            convert(pair(kind="random").target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_target_without_architectures_is_not_converted(tmp_path):
    config = small_config(architectures=None, model_type="llama", dflash_config=None)
    source = write_drafter(tmp_path / "s", {}, config=config)
    with pytest.raises(DFlash2Error, match="a target .llama., not a drafter"):
        to_mlx(source, tmp_path / "out")


def test_a_drafter_under_a_plain_architecture_is_not_called_a_target(tmp_path):
    tensors = random_tensors(small_config())
    config = small_config(architectures=["Qwen3ForCausalLM"])
    source = write_drafter(tmp_path / "source", tensors, config=config)
    with pytest.raises(DFlash2Error, match="architectures names Qwen3ForCausalLM"):
        to_torch(source, tmp_path / "out")


def test_another_kind_of_drafter_is_refused(tmp_path):
    config = small_config(architectures=["Qwen3DSparkModel"])
    tensors = random_tensors(small_config())
    other = write_drafter(tmp_path / "other", tensors, config=config)
    with pytest.raises(DFlash2Error, match="Qwen3DSparkModel"):
        to_mlx(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_more_than_one_file_is_held_in_memory(tmp_path):
    config = small_config(
        hidden_size=256, intermediate_size=2048, num_hidden_layers=24, layer_types=None
    )
    shapes = expected_shapes(DFlash2Config.from_dict(config))
    tensors = {}
    for name, shape in shapes.items():
        count = 1
        for length in shape:
            count *= length
        tensors[name] = Stored("BF16", shape, bytes(2 * count))
    source = write_drafter(tmp_path / "many", tensors, config=config, shards=12)
    code = """
import resource
import mlx.core as mx
from mlx_dflash2.convert import to_mlx
to_mlx(sys.argv[1], sys.argv[3])
mx.reset_peak_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
to_mlx(sys.argv[2], sys.argv[4])
unit = 1 if sys.platform == "darwin" else 1024
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(mx.get_peak_memory(), grown * unit)
"""
    small = write_drafter(tmp_path / "small")
    done = run_python(code, small, source, tmp_path / "a", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    peak, grown = map(int, done.stdout.split())
    files = [path.stat().st_size for path in source.glob("*.safetensors")]
    assert max(files) * 6 < sum(files)
    assert max(files) <= peak + 100_000 and peak < 1.5 * max(files)
    assert grown < 3 * max(files)


def test_importing_the_package_loads_no_backend():
    code = """
import mlx_dflash2.convert
print([name for name in ("mlx", "torch", "transformers") if name in sys.modules])
"""
    assert run_python(code).stdout == "[]\n"


def test_a_source_is_found_like_any_model(tmp_path):
    with pytest.raises(DFlash2Error, match="no such folder"):
        to_mlx("./nowhere", tmp_path / "out")
    write_drafter(tmp_path / "source")
    with pytest.raises(DFlash2Error, match="no revisions"):
        to_mlx(tmp_path / "source", tmp_path / "out", revision="main")
