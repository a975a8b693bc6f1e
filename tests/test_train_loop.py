"""Whole runs: they learn, stop, go on exactly, and refuse what does not fit."""

import json
import re

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import (  # noqa: E402
    TINY,
    answers,
    assert_same_weights,
    metrics_of,
    row_of,
    write_data,
)

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.config import read_config  # noqa: E402
from mlx_dflash2.torch.train.start import find_saved, train  # noqa: E402


@pytest.fixture(scope="module")
def models(pair):
    return pair("oracle")


@pytest.fixture(scope="module")
def data(models, tmp_path_factory):
    rows = [
        row_of(prompt, decoded.tokens)
        for prompt, decoded in answers(models, 9, tokens=24)
    ]
    folder = tmp_path_factory.mktemp("rows") / "data"
    return write_data(folder, models, rows[:7], rows[7:])


@pytest.fixture(scope="module")
def start(models, data):
    """`start(out, **settings)`: a tiny run; its exit code."""

    def call(out, *, resume=False, **settings):
        named = {name.replace("__", "."): value for name, value in settings.items()}
        flags = TINY | {"target": str(models.target), "data": str(data)} | named
        return train(read_config(flags=flags | {"out": str(out)}), resume=resume)

    return call


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """A run of twenty steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert start(out) == 0
    return out


def test_a_run_logs_every_step_and_learns(whole):
    lines = metrics_of(whole)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss_ce"] < lines[0]["loss_ce"]
    assert "loss_selector_ce" not in lines[3] and "loss_selector_ce" in lines[4]
    assert lines[-1]["blocks"] == 20 * 4 * 6
    assert {"acceptance_length", "recall", "selector_lift"} <= {
        *lines[-1]["evaluation"]
    }
    assert find_saved(whole).progress.step == 20


def test_stopping_and_going_on_changes_no_bit(start, whole, tmp_path):
    out = tmp_path / "run"
    assert start(out, minutes=1e-9) == 0
    assert find_saved(out).progress.step == 1
    while find_saved(out).progress.step < 3:
        assert start(out, resume=True, minutes=1e-9) == 0
    assert start(out, resume=True) == 0
    one, other = find_saved(out), find_saved(whole)
    assert_same_weights(one.weights(), other.weights())
    for mine, theirs in zip(metrics_of(out), metrics_of(whole), strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}
