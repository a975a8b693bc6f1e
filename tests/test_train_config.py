"""The configuration of a training run: where it comes from, what it refuses."""

import json
import re
import tomllib
from dataclasses import fields, is_dataclass

import pytest

pytest.importorskip("torch")

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.config import (  # noqa: E402
    EXAMPLE,
    TrainConfig,
    read_config,
)
from mlx_dflash2.torch.train.settings import read_flag  # noqa: E402


def names_of(config) -> set[str]:
    """Dotted names of every setting."""
    found = set()
    for item in fields(config):
        value = getattr(config, item.name)
        inner = names_of(value) if is_dataclass(value) else [""]
        found |= {".".join(filter(None, (item.name, name))) for name in inner}
    return found


def test_the_example_has_every_setting_and_no_other():
    found, section = set(), ""
    for line in EXAMPLE.read_text(encoding="utf-8").splitlines():
        if table := re.match(r"\[(\w+)\]", line):
            section = f"{table[1]}."
        elif key := re.match(r"(?:# )?(\w+) = ", line):
            found.add(section + key[1])
    assert found == names_of(TrainConfig())


def test_the_example_holds_the_defaults():
    assert read_config(EXAMPLE) == read_config() == TrainConfig()


def test_toml_and_json_say_the_same(tmp_path):
    toml = tmp_path / "run.toml"
    toml.write_text("steps = 7\n[optimizer]\nlr = 1\n[drafter]\ntaps = [1, 2]\n")
    plain = tmp_path / "run.json"
    plain.write_text(json.dumps(tomllib.loads(toml.read_text())))
    assert read_config(toml) == read_config(plain)
    assert read_config(toml).drafter.taps == (1, 2)


def test_flags_override_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("steps = 7\n[optimizer]\nlr = 1.0\nclip = 2.0\n")
    flags = dict(map(read_flag, ["optimizer.lr=3e-4", "target=some/model", "steps=9"]))
    config = read_config(file, flags)
    assert (config.optimizer.lr, config.optimizer.clip) == (3e-4, 2.0)
    assert (config.target, config.steps) == ("some/model", 9)


def test_a_preset_is_overridden_by_what_is_said():
    config = read_config(flags={"preset": "published", "batch.rows": 4})
    assert (config.batch.anchors, config.batch.rows, config.steps) == (4, 4, 1985)
    assert config.objective.mix == {"ce": 0.1, "kl": 1.0, "selector_ce": 1.0}


@pytest.mark.parametrize(
    "family, mix",
    [
        ("dflash2", {"ce": 1.0, "selector_ce": 0.1}),
        ("dflash", {"ce": 1.0}),
        ("dspark", {"ce": 0.1, "tv": 1.8, "confidence": 1.0}),
    ],
)
def test_each_family_has_its_own_objective(family, mix):
    assert read_config(flags={"drafter.family": family}).objective.mix == mix


def test_the_selector_comes_in_by_stages():
    config = read_config(flags={"stages.backbone": 2, "stages.selector": 3})
    stages = [config.objective_at(step) for step in range(6)]
    assert [bool(stage.selector_ce) for stage in stages] == [False] * 2 + [True] * 4
    assert [stage.detach_selector for stage in stages] == [
        *([False] * 2),
        *([True] * 3),
        False,
    ]


@pytest.mark.parametrize(
    "flag, message",
    [
        ("rows=3", "rows is no setting; known are"),
        ("batch.row=3", "batch.row is no setting; known are anchors"),
        ("batch=3", "batch is 3, expected a table"),
        ("steps=0", "steps is 0, expected 1 or more"),
        ("steps=1.5", "steps is 1.5, expected a whole number"),
        ("steps=true", "steps is True, expected a whole number"),
        ("optimizer.lr=nan", "optimizer.lr is nan, expected a number"),
        ("optimizer.lr=0", "optimizer.lr is 0.0, expected more than 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas is [0.9], expected two numbers"),
        ("optimizer.decay=2", "optimizer.decay is 2.0, expected 0 to 1"),
        ("drafter.family=medusa", "drafter.family is 'medusa', expected one of"),
        ("drafter.taps=3", "drafter.taps is 3, expected a list"),
        ("precision=fp8", "precision is 'fp8', expected one of auto, fp32"),
        ("preset=best", "preset is 'best', expected one of default, published"),
        ("batch.rows_at_once=3", "batch.rows is 16, expected a multiple of"),
        ("evaluation.every=-1", "evaluation.every is -1, expected 0 or more"),
        ("offline=1", "offline is 1, expected true or false"),
        ("target=1", "target is 1, expected text"),
    ],
)
def test_what_is_wrong_is_named(flag, message):
    with pytest.raises(DFlash2Error, match=re.escape(message)):
        read_config(flags=dict([read_flag(flag)]))


def test_annealing_data_needs_the_schedule_that_anneals():
    flags = {"anneal_data": "rows", "optimizer.schedule": "cosine"}
    with pytest.raises(DFlash2Error, match="only optimizer.schedule 'wsd'"):
        read_config(flags=flags)


def test_files_that_cannot_be_read_are_named(tmp_path):
    broken = tmp_path / "run.toml"
    with pytest.raises(DFlash2Error, match="run.toml: cannot be read"):
        read_config(broken)
    broken.write_text("steps =")
    with pytest.raises(DFlash2Error, match="run.toml: cannot be parsed"):
        read_config(broken)
    with pytest.raises(DFlash2Error, match="expected NAME=VALUE"):
        read_flag("steps")


def test_a_missing_field_names_its_flag():
    with pytest.raises(DFlash2Error, match="give it in the configuration or as --data"):
        TrainConfig(target="somewhere").need("target", "data")


def test_cadence_may_change_between_runs_and_the_recipe_may_not():
    settled = TrainConfig().settled()
    assert settled["optimizer.lr"] == 6e-4 and settled["batch.anchors"] == 128
    free = ("minutes", "checkpoints.every", "evaluation.rows", "threads", "out")
    assert not set(free) & set(settled)


def test_what_only_suits_a_longer_run_is_said():
    assert TrainConfig().warnings() == []
    short = read_config(flags={"steps": 1000})
    assert "take 1000 steps, and the run has 1000: none is left" in short.warnings()[0]
    shorter = read_config(flags={"steps": 200, "drafter.family": "dspark"})
    assert shorter.warnings() == [
        "warning: optimizer.warmup is 200 steps, and the run has 200: the full "
        "learning rate is never reached"
    ]
