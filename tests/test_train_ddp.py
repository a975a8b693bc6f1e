"""Processes of their own: two that train together, and one that is told to stop."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import assert_same_weights, metrics_of, trainable  # noqa: E402

from mlx_dflash2.torch.train.interruption import Interruption  # noqa: E402
from mlx_dflash2.torch.train.start import find_saved  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MODULE = ["-m", "mlx_dflash2.torch.train", "run"]
ROWS = {"batch__rows_at_once": 1, "cache_features": True}


@pytest.fixture(scope="module")
def tiny(pair, tmp_path_factory):
    return trainable(tmp_path_factory.mktemp("rows") / "data", pair("oracle"))


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """What one process makes of it."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert tiny.run(out, **ROWS) == 0
    return out


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_make_the_weights_of_one(tiny, alone, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    out = tmp_path / "run"
    together = start(*torchrun, *MODULE, *tiny.arguments(out, **ROWS))
    text, _ = together.communicate(timeout=300)
    assert together.returncode == 0, text
    assert_same_weights(
        find_saved(out).weights(), find_saved(alone).weights(), within=2e-5
    )
    for mine, theirs in zip(metrics_of(out), metrics_of(alone), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["blocks"] == theirs["blocks"]
    mine, theirs = (metrics_of(run)[-1]["evaluation"] for run in (out, alone))
    assert mine["cycles"] == theirs["cycles"]


def test_sigterm_ends_a_run_after_a_step_that_is_saved(tiny, alone, tmp_path):
    out = tmp_path / "run"
    settings = tiny.arguments(out, **ROWS)
    process = start(*MODULE, *settings)
    log = out / "metrics.jsonl"
    until = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert process.poll() is None and time.monotonic() < until, (
            process.stdout.read()
        )
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 143, text
    steps = find_saved(out).progress.step
    assert 3 <= steps < 20 and len(metrics_of(out)) == steps
    assert f"step {steps} of 20" in text
    assert tiny.run(out, resume=True, **ROWS) == 0
    assert_same_weights(find_saved(out).weights(), find_saved(alone).weights())


def test_the_second_signal_has_its_usual_effect():
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        assert interruption.number is None
        signal.raise_signal(signal.SIGINT)
        assert interruption.number == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before
