"""`mlx-dflash2 train run`, `evaluate` and `export` as a user meets them."""

import json
import subprocess
import sys

import pytest
from command_line import ROOT, assert_refused, run

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import metrics_of, trainable  # noqa: E402

from mlx_dflash2.torch.train.config import EXAMPLE  # noqa: E402


@pytest.fixture(scope="module")
def tiny(pair, tmp_path_factory):
    return trainable(tmp_path_factory.mktemp("rows") / "data", pair("oracle"))


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """The folder of a run, and what the command said."""
    out = tmp_path_factory.mktemp("trained") / "run"
    result = run("train", "run", *tiny.arguments(out, steps=4), "--plot")
    assert result.exit_code == 0, result.output
    return out, result


def test_a_run_says_how_far_it_came(trained):
    out, result = trained
    assert result.stdout == ""
    assert "step 4: held-out acceptance length" in result.stderr
    assert "step 4 of 4, 96 blocks" in result.stderr
    assert len(metrics_of(out)) == 4


def test_a_plot_is_a_picture(trained, tmp_path):
    out, _ = trained
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_the_work(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("train", "run", *tiny.arguments(tmp_path / "run"), "--plot")
    assert_refused(result, "--plot needs matplotlib")
    assert not (tmp_path / "run").exists()


def test_flags_override_a_file(tiny, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 9\n[batch]\nanchors = 3\n[drafter]\nmask_token_id = 3\n")
    models = ["--model", tiny.pair.target, "--data", tiny.data, "--config", file]
    flags = ["--steps", 7, "--family", "dspark", "--rows", 2, "--layers", 1, "--plan"]
    flags += ["--set", "drafter.num_taps=1"]
    result = run("train", "run", *models, *flags)
    assert result.exit_code == 0, result.output
    assert "DSpark, 1 layers, taps [2]" in result.stdout
    assert "steps: 7, 2 rows each (1 at once), 3 blocks a row" in result.stdout
    assert "7 rows" in result.stdout and "every row 2.00 times" in result.stdout


def test_the_example_can_be_printed():
    result = run("train", "run", "--example")
    assert result.stdout == EXAMPLE.read_text(encoding="utf-8")


def test_going_on_needs_the_folder_alone(tiny, tmp_path):
    out = tmp_path / "run"
    stopped = run("train", "run", *tiny.arguments(out, steps=3, minutes=1e-9))
    assert stopped.exit_code == 0 and len(metrics_of(out)) == 1
    result = run("train", "run", "--resume", "--out", out, "--minutes", 0)
    assert result.exit_code == 0, result.output
    assert len(metrics_of(out)) == 3
    again = run("train", "run", "--resume", "--out", out)
    assert again.exit_code == 0 and "step 3 of 3" in again.stderr


def test_what_a_run_lacks_is_named(tmp_path):
    assert_refused(run("train", "run"), "target is missing", "--target")
    assert_refused(run("train", "run", "--resume"), "--resume needs --out")
    assert_refused(run("train", "run", "--set", "lr"), "expected NAME=VALUE")
    nothing = ["--resume", "--out", tmp_path]
    assert_refused(run("train", "run", *nothing), "holds no checkpoint")
    both = ["--warm-start", "some/drafter", *nothing]
    assert run("train", "run", *both).exit_code == 2


def test_without_pytorch_training_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert_refused(run("train", "run"), "training needs PyTorch", "mlx-dflash2[torch]")


def test_a_checkpoint_is_evaluated(trained):
    out, _ = trained
    result = run("train", "evaluate", out, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    logged = metrics_of(out)[-1]["evaluation"]
    assert found == {"subject": f"{out} step 4"} | logged
    text = run("train", "evaluate", out, "--rows", 1)
    assert "acceptance length: " in text.stdout


def test_an_export_is_evaluated_like_any_drafter(tiny, trained, tmp_path):
    out, _ = trained
    result = run("train", "export", out, tmp_path / "drafter")
    assert result.exit_code == 0 and "DFlash 2" in result.stdout
    models = ["--model", tiny.pair.target, "--data", tiny.data, "--threads", 1]
    result = run("train", "evaluate", tmp_path / "drafter", *models, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["cycles"] > 0
    assert_refused(run("train", "evaluate", tmp_path / "drafter"), "target is missing")


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "mlx_dflash2.torch.train", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in ("prepare", "run", "evaluate", "export"):
        assert f"  {name} " in done.stdout
