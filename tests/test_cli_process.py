"""The command line as a process: signals, pipes, imports, bytes it is given."""

import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from command_line import ROOT, answer, models, start

ENDLESS = ["-m", "-1", "--logit-bias", '{"1": -100, "2": -100}']  # no end of sequence
PATIENCE = 120  # seconds: for a loaded machine, not for the command
BACKENDS = {"mlx", "mlx_lm", "torch", "transformers", "huggingface_hub", "numpy"}


def finish(process):
    """Its exit code and what was left on stdout and stderr, decoded."""
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out.decode(), err.decode()


def assert_quiet(err):
    assert "Traceback" not in err and "Exception ignored" not in err, err


@pytest.mark.parametrize("flags", [[], ["--plain"]], ids=["speculative", "plain"])
def test_ctrl_c_flushes_the_text_and_prints_the_footer(pair, flags):
    process = start("generate", "a", *models(pair(eos="off")), *ENDLESS, *flags)
    first = process.stdout.read(1).decode()  # it streams: the end never comes
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130
    assert (first + out).endswith("\n") and len(first + out) > 1
    assert re.search(r"^Generation: \d+ tokens", err, re.M)
    assert re.search(r"^Engine: " + ("plain" if flags else "speculative"), err, re.M)
    assert_quiet(err)


def test_ctrl_c_while_loading_is_quiet(pair):
    wait = "import mlx_dflash2.loading as loading, time\n" + (
        "def load(*_, **__): print('loading', flush=True); time.sleep(600)\n"
        "loading.load_target = load\n"
    )
    process = start("generate", "a", *models(pair(eos="off")), before=wait)
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out, err.strip()) == (130, "", "")


@pytest.mark.parametrize("flags", [[], ["--json", "-m", "9"]], ids=["text", "json"])
def test_a_closed_pipe_is_quiet(pair, flags):
    reader, writer = os.pipe()
    process = start(
        "generate", "a", *models(pair(eos="off")), *ENDLESS, *flags, stdout=writer
    )
    os.close(writer)
    if not flags:
        assert os.read(reader, 1)
    os.close(reader)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert err.decode() == ""


def test_bytes_that_are_no_text_are_one_line(pair):
    process = start("generate", b"a\xff", *models(pair(eos="off")))
    code, out, err = finish(process)
    assert (code, out) == (2, "")
    assert err.startswith("Error: the prompt is not Unicode text")
    assert err.count("\n") == 1


def test_what_the_terminal_cannot_show_is_replaced(pair):
    made = pair(eos="off")
    text = answer(made, "a", "-m", 20)["text"]
    assert not text.isascii()
    flags = ["generate", "a", *models(made), "-m", "20"]
    process = start(*flags, variables={"PYTHONIOENCODING": "latin-1"})
    code, out, err = finish(process)
    expected = "".join(letter if letter.isascii() else "?" for letter in text)
    assert (code, out) == (0, expected + "\n"), err


def python(*arguments):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--help"], ["--version"], ["-h"], ["generate", "-h"], ["convert", "--help"]),
        *(["bench", "-h"], ["bench", "cycle", "-h"], ["train", "-h"]),
        *(["train", "run", "-h"], ["train", "prepare", "-h"]),
        *(["doctor", "-h"], ["models", "-h"], ["models"], ["models", "--json"]),
    ],
    ids=" ".join,
)
def test_help_version_and_models_import_no_backend(arguments):
    code = (
        "import sys\nfrom mlx_dflash2.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit as end: assert not end.code\n"
        "print(*sys.modules)"
    )
    *shown, modules = python("-c", code, *arguments).splitlines()
    assert shown
    assert BACKENDS.isdisjoint(modules.split())


def test_version_prints_what_decides_the_numbers():
    import mlx_dflash2

    lines = python("-m", "mlx_dflash2", "--version").splitlines()
    assert lines == [
        f"mlx-dflash2 {mlx_dflash2.__version__}",
        *(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm")),
        f"transformers {metadata.version('transformers')}",
    ]


def test_the_module_runs_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mlx_dflash2", "generate"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(ROOT))},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
