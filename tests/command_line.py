"""The command line, run in this process or in one of its own."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from click.testing import CliRunner, Result
from pairs import Pair

from mlx_dflash2 import loading
from mlx_dflash2.cli import main

ROOT = Path(__file__).resolve().parent.parent

# What `mlx-dflash2` does, on the device of the tests and without PyTorch, which costs
# seconds to import and which nothing here needs. A shell that runs the tests in the
# background has them ignore SIGINT, and their processes would inherit that.
START = f"""
import importlib.util, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["torch"] = None
sys.path.insert(0, {str(ROOT)!r})
import mlx_dflash2
if importlib.util.find_spec("mlx_dflash2.convert") is None:
    mlx_dflash2.__path__.append({str(ROOT)!r})
import mlx.core as mx
if os.environ.get("MLX_DFLASH2_TEST_DEVICE", "cpu") != "gpu":
    mx.set_default_device(mx.cpu)
from mlx_dflash2.cli import main
"""


def models(pair: Pair) -> list[str]:
    return ["--model", str(pair.target), "--draft-model", str(pair.drafter)]


def run(*arguments: object, stdin: bytes | str | None = None) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(main, list(map(str, arguments)), input=stdin)


def generate(pair: Pair, *arguments: object, stdin: bytes | str | None = None):
    """`generate` with a pair, which is loaded once and shared by all calls."""
    with (
        mock.patch("mlx_dflash2.loading.load_target", _load_target),
        mock.patch("mlx_dflash2.loading.load_drafter", _load_drafter),
    ):
        return run("generate", *models(pair), *arguments, stdin=stdin)


_load_target = functools.cache(loading.load_target)
_load_drafter = functools.cache(loading.load_drafter)


def answer(pair: Pair, *arguments: object, **options) -> dict:
    """What a successful `generate --json` printed."""
    result = generate(pair, *arguments, "--json", **options)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def assert_refused(result: Result, *parts: str, code: int = 2) -> None:
    """Ended with one line on stderr that holds `parts`, and with nothing on stdout."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1 and result.stderr.endswith("\n")
    for part in parts:
        assert part in result.stderr, result.stderr


def start(*arguments: object, before: str = "", **options) -> subprocess.Popen:
    """The command line in a process of its own, its output piped."""
    variables = dict(os.environ) | options.pop("variables", {})
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{START}\n{before}\nmain()",
            *map(os.fspath, arguments),
        ],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        env=variables,
        **options,
    )
