"""Every flag of `convert`, its report, its refusals and exit codes."""

import json
import shutil
import sys

import pytest
from command_line import assert_refused, models, run
from drafter_files import content, read_config, read_file, read_tensors

import mlx_dflash2.cli as cli

TESTED: set[str] = set()


def concerns(*names):
    """Note which parameters of the command a test is about."""

    def note(test):
        TESTED.update(names)
        return test

    return note


def test_every_parameter_has_a_test():
    assert TESTED == {parameter.name for parameter in cli.convert.params}


@pytest.fixture(scope="module")
def made(pair):
    """Always right, and wide enough to quantize in groups of 64."""
    return pair(hidden=128, eos="off")


@pytest.fixture
def no_torch(monkeypatch):
    """`--check` compares block logits only where torch is."""
    monkeypatch.setitem(sys.modules, "torch", None)


def convert(*arguments):
    result = run("convert", *arguments)
    assert result.exit_code == 0, result.stderr
    return result


def tokens(made, drafter):
    flags = "generate", "a", "-m", 17, "--json", *models(made), "--drafter", drafter
    result = run(*flags)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@concerns("source", "destination", "to_mlx", "to_torch")
@pytest.mark.parametrize(("flag", "form"), [("--to-mlx", "mlx"), ("--to-torch", "pt")])
def test_both_directions_write_a_folder_that_generates(made, tmp_path, flag, form):
    out = tmp_path / "out"
    result = convert(made.drafter, out, flag)
    lines = result.stdout.splitlines()
    assert lines[0] == f"{made.drafter} -> {out}"
    assert lines[1].startswith(f"{len(read_tensors(made.drafter))} tensors (")
    assert lines[2] == "written: config.json, model.safetensors"
    assert result.stderr == ""
    assert read_file(out / "model.safetensors")[0]["format"] == form
    assert read_tensors(out) == read_tensors(made.drafter)
    ours, theirs = tokens(made, out), tokens(made, made.drafter)
    assert ours["tokens"] == theirs["tokens"]
    assert ours["stats"] == theirs["stats"]


def test_there_and_back_is_where_it_began(made, tmp_path):
    convert(made.drafter, tmp_path / "mlx", "--to-mlx")
    convert(tmp_path / "mlx", tmp_path / "torch", "--to-torch")
    assert read_tensors(tmp_path / "torch") == read_tensors(made.drafter)
    convert(tmp_path / "torch", tmp_path / "again", "--to-mlx")
    assert content(tmp_path / "again") == content(tmp_path / "mlx")


@concerns("dtype")
@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "F32"), ("float16", "F16"), ("bfloat16", "BF16")]
)
def test_dtype_casts_what_is_written(made, tmp_path, dtype, stored):
    convert(made.drafter, tmp_path / "out", "--to-mlx", "--dtype", dtype)
    kinds = {tensor.dtype for tensor in read_tensors(tmp_path / "out").values()}
    assert kinds == {stored}
    assert dtype in json.dumps(read_config(tmp_path / "out"))


@concerns("quantize", "q_bits", "q_group_size")
@pytest.mark.parametrize(
    ("flags", "bits", "group"),
    [
        (["-q"], 4, 64),
        (["--quantize", "--q-bits", "8"], 8, 64),
        (["-q", "--q-group-size", "32"], 4, 32),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_quantizing_uses_the_asked_bits_and_groups(made, tmp_path, flags, bits, group):
    convert(made.drafter, tmp_path / "out", "--to-mlx", *flags)
    quantization = read_config(tmp_path / "out")["quantization"]
    assert quantization == {"group_size": group, "bits": bits}
    told = tokens(made, tmp_path / "out")
    assert told["tokens"] == tokens(made, made.drafter)["tokens"]


@concerns("dequantize")
@pytest.mark.parametrize("flag", ["-d", "--dequantize"])
def test_dequantizing_gives_a_plain_folder_for_torch(made, tmp_path, flag):
    convert(made.drafter, tmp_path / "q", "--to-mlx", "-q", "--q-bits", 8)
    refused = run("convert", tmp_path / "q", tmp_path / "out", "--to-torch")
    assert_refused(refused, "is quantized", "add -d")
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "q", tmp_path / "out", "--to-torch", flag)
    assert "quantization" not in read_config(tmp_path / "out")
    assert read_tensors(tmp_path / "out").keys() == read_tensors(made.drafter).keys()


@concerns("revision")
def test_a_folder_has_no_revision(made, tmp_path):
    flags = "--to-mlx", "--revision", "v1"
    result = run("convert", made.drafter, tmp_path / "out", *flags)
    assert_refused(result, "'v1'", "local folder has no revisions")


@concerns("offline")
def test_offline_needs_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    result = run("convert", "a/b", tmp_path / "out", "--to-mlx", "--offline")
    assert_refused(result, "a/b", "not in the local Hub cache")


@concerns("check")
def test_check_prints_that_nothing_differs(made, tmp_path, no_torch):
    plain = convert(made.drafter, tmp_path / "a", "--to-mlx").stdout
    checked = convert(made.drafter, tmp_path / "b", "--to-mlx", "--check").stdout
    assert len(checked.splitlines()) == len(plain.splitlines()) + 3
    count = len(read_tensors(made.drafter))
    assert checked.splitlines()[-3:] == [
        f"{count} of {count} modules as asked for, bit for bit",
        "largest gap to the source: 0",
        "block logits: not compared, torch is not installed",
    ]


def test_check_names_the_largest_gap_of_a_cast(made, tmp_path, no_torch):
    flags = "--to-mlx", "--dtype", "bfloat16", "--check"
    lines = convert(made.drafter, tmp_path / "out", *flags).stdout.splitlines()
    gap, where = lines[-2].removeprefix("largest gap to the source: ").split(" in ")
    assert float(gap) > 0
    assert where in read_tensors(made.drafter)


def test_check_compares_both_backends_where_torch_is(pair, tmp_path):
    pytest.importorskip("torch")
    source = pair("random").drafter
    lines = convert(source, tmp_path / "out", "--to-torch", "--check").stdout
    last = lines.splitlines()[-1]
    gap = last.removeprefix("largest gap between torch and MLX block logits: ")
    assert 0 <= float(gap) < 1e-2


def test_check_ends_with_1_where_something_is_wrong(
    made, tmp_path, no_torch, monkeypatch
):
    import mlx_dflash2.convert as rooms

    check = rooms.check

    def spoil(report, destination):
        file = destination / "model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        return check(report, destination)

    monkeypatch.setattr(rooms, "check", spoil)
    result = run("convert", made.drafter, tmp_path / "out", "--to-mlx", "--check")
    assert result.exit_code == 1
    count = len(read_tensors(made.drafter))
    assert f"{count - 1} of {count} modules as asked for" in result.stdout
    assert "wrong: " in result.stdout


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["--to-mlx or --to-torch"]),
        (["--to-mlx", "--to-torch"], ["--to-mlx", "--to-torch"]),
        (["--to-torch", "--to-mlx"], ["--to-mlx", "--to-torch"]),
        (["--to-torch", "-q"], ["-q"]),
        (["--to-mlx", "--q-bits", "4"], ["need -q"]),
        (["--to-mlx", "--q-group-size", "64"], ["need -q"]),
        (["--to-mlx", "-q", "--q-bits", "7"], ["7"]),
        (["--to-mlx", "-q", "--q-bits", "0"], ["0"]),
        (["--to-mlx", "-q", "--q-group-size", "0"], ["0"]),
        (["--to-mlx", "-q", "--q-group-size", "48"], ["48"]),
        (["--to-mlx", "-d"], ["is not quantized"]),
        (["--to-mlx", "--dtype", "int8"], ["int8", "bfloat16"]),
        (["--to-mlx", "--bogus"], ["--bogus"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_request_that_does_not_fit_is_one_line(made, tmp_path, flags, parts):
    result = run("convert", made.drafter, tmp_path / "out", *flags)
    assert_refused(result, *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["a"], ["a", "b", "c", "--to-mlx"]])
def test_source_and_destination_are_needed(arguments):
    assert_refused(run("convert", *arguments))


def test_an_existing_destination_is_kept(made, tmp_path):
    (tmp_path / "mine").mkdir()
    result = run("convert", made.drafter, tmp_path / "mine", "--to-mlx")
    assert_refused(result, str(tmp_path / "mine"), "already exists")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("source", ["missing", "empty", "target", "file"])
def test_a_source_that_is_no_drafter_is_one_line(made, tmp_path, source):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    folder = made.target if source == "target" else tmp_path / source
    result = run("convert", folder, tmp_path / "out", "--to-mlx")
    assert_refused(result, str(folder))
    assert not (tmp_path / "out").exists()


def test_a_broken_config_is_one_line(made, tmp_path):
    shutil.copytree(made.drafter, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text("{")
    result = run("convert", tmp_path / "copy", tmp_path / "out", "--to-mlx")
    assert_refused(result, "config.json")
    assert not (tmp_path / "out").exists()
