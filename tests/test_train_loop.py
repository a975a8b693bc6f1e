"""Whole runs: they learn, stop, go on exactly, and refuse what does not fit."""

import json
import re
import shutil

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import assert_same_weights, metrics_of, trainable  # noqa: E402

from mlx_dflash2.data.rows import RowSet  # noqa: E402
from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.config import read_config  # noqa: E402
from mlx_dflash2.torch.train.export import export  # noqa: E402
from mlx_dflash2.torch.train.feed import Feed  # noqa: E402
from mlx_dflash2.torch.train.head_tokens import (  # noqa: E402
    HeadTokens,
    frequent_tokens,
)
from mlx_dflash2.torch.train.learner import Learner  # noqa: E402
from mlx_dflash2.torch.train.start import find_saved  # noqa: E402
from mlx_dflash2.torch.train.world import World  # noqa: E402


@pytest.fixture(scope="module")
def tiny(pair, tmp_path_factory):
    return trainable(tmp_path_factory.mktemp("rows") / "data", pair("oracle"))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A run of twenty steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert tiny.run(out) == 0
    return out


def test_a_run_logs_every_step_and_learns(whole):
    lines = metrics_of(whole)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["loss_ce"] < lines[0]["loss_ce"]
    assert "loss_selector_ce" not in lines[3] and "loss_selector_ce" in lines[4]
    assert lines[-1]["blocks"] == 20 * 4 * 6
    found = lines[-1]["evaluation"]
    assert {"acceptance_length", "recall", "selector_lift"} <= found.keys()
    progress = find_saved(whole).progress
    assert progress.step == 20
    assert progress.best == (found["acceptance_length"], found["loss"])


def test_stopping_and_going_on_changes_no_bit(tiny, whole, tmp_path):
    out = tmp_path / "run"
    assert tiny.run(out, minutes=1e-9) == 0
    assert tiny.run(out, resume=True, minutes=1e-9) == 0
    assert find_saved(out).progress.step == 2
    assert tiny.run(out, resume=True) == 0
    assert_same_weights(find_saved(out).weights(), find_saved(whole).weights())
    for mine, theirs in zip(metrics_of(out), metrics_of(whole), strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}


def test_steps_after_the_checkpoint_are_done_again(tiny, whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints/step-000020")
    (out / "checkpoints/latest").write_text("step-000010\n")
    (out / "checkpoints/best").unlink()
    assert tiny.run(out, resume=True) == 0
    assert_same_weights(find_saved(out).weights(), find_saved(whole).weights())
    assert [line["step"] for line in metrics_of(out)] == list(range(1, 21))


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_the_other_families_train_too(tiny, tmp_path, family):
    flags = {"drafter__family": family, "steps": 8}
    assert tiny.run(tmp_path / "run", **flags) == 0
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert ("confidence_bias" in lines[-1]) == (family == "dspark")


@pytest.mark.parametrize(
    "changes",
    [
        {"batch__recompute": True},
        {"batch__blocks_at_once": 100},
        {"batch__rows_at_once": 4},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_how_memory_is_saved_hardly_changes_the_loss(tiny, tmp_path, changes):
    # Micro-batches average the selector's terms apart, so these stay out.
    flags = {"steps": 3, "objective__selector_ce": 0.0}
    assert tiny.run(tmp_path / "one", **flags) == 0
    assert tiny.run(tmp_path / "other", **flags, **changes) == 0
    # Not the weights: AdamW's first steps are as large for a gradient of rounding
    # noise as for any other.
    losses = [metrics_of(tmp_path / name)[-1]["loss"] for name in ("one", "other")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_part_of_the_vocabulary_may_stand_for_all_of_it(tiny, tmp_path):
    for name, count in (("part", 100), ("whole", 0)):
        flags = {"steps": 2, "batch__head_tokens": count}
        assert tiny.run(tmp_path / name, **flags) == 0
    one, other = (metrics_of(tmp_path / name)[0] for name in ("part", "whole"))
    assert one["loss_ce"] < other["loss_ce"]


def test_fp16_skips_an_overflow_and_learns_on(tiny, tmp_path, monkeypatch):
    original = Learner._gradient

    def overflowing(self, *given):
        report = original(self, *given)
        if self.scaler.get_scale() == 2.0**13:
            next(self.drafter.parameters()).grad.fill_(float("inf"))
        return report

    monkeypatch.setattr(Learner, "_gradient", overflowing)
    assert tiny.run(tmp_path / "run", precision="fp16", steps=10) == 0
    lines = metrics_of(tmp_path / "run")
    assert [line["skipped"] for line in lines] == [1] * 10
    assert [line["scale"] for line in lines] == [2.0**13, *[2.0**12] * 9]
    assert lines[0]["norm"] is None
    assert lines[0]["rate"] == lines[1]["rate"] < lines[2]["rate"]
    assert lines[-1]["loss_ce"] < lines[0]["loss_ce"]
    saved = find_saved(tmp_path / "run")
    assert saved.scaler["scale"] == 2.0**12 and saved.progress.skipped == 1


def test_without_fp16_a_gradient_that_is_not_finite_ends_the_run(
    tiny, tmp_path, monkeypatch
):
    original = Learner._gradient

    def broken(self, *given):
        report = original(self, *given)
        next(self.drafter.parameters()).grad.fill_(float("nan"))
        return report

    monkeypatch.setattr(Learner, "_gradient", broken)
    with pytest.raises(DFlash2Error, match="step 0: the gradient is not finite"):
        tiny.run(tmp_path / "run")


def test_a_warm_start_begins_where_its_parent_ended(tiny, whole, tmp_path):
    export(find_saved(whole), tmp_path / "parent")
    flags = {"warm_start": str(tmp_path / "parent"), "drafter__mask_token_id": None}
    assert tiny.run(tmp_path / "run", **flags, steps=2) == 0
    first, scratch = metrics_of(tmp_path / "run")[0], metrics_of(whole)[0]
    assert first["loss_ce"] < scratch["loss_ce"]
    saved = find_saved(tmp_path / "run")
    assert saved.contract["parent"]["parent"] == str(tmp_path / "parent")
    assert not saved.contract["parent"]["fresh"]
    again = {"resume": True, "drafter__mask_token_id": None, "steps": 2}
    assert tiny.run(tmp_path / "run", **again) == 0


def test_a_warm_start_and_going_on_exclude_each_other(tiny, whole):
    with pytest.raises(DFlash2Error, match="warm_start and --resume exclude"):
        tiny.run(whole, resume=True, warm_start="some/drafter")


@pytest.mark.parametrize(
    "change, named",
    [
        ({"optimizer__clip": 2.0}, r"settings.optimizer.clip was 1.0 and is 2.0"),
        ({"batch__anchors": 5}, r"settings.batch.anchors was 6 and is 5"),
        ({"objective__gamma": 3.0}, r"settings.objective.gamma was 4.0 and is 3.0"),
        ({"seed": 1, "steps": 30}, r"settings.seed was 0 and is 1; settings.steps"),
        ({"precision": "bf16"}, r"settings.precision was 'fp32' and is 'bf16'"),
    ],
)
def test_a_run_does_not_go_on_under_other_conditions(tiny, whole, change, named):
    with pytest.raises(DFlash2Error, match=named):
        tiny.run(whole, resume=True, **change)


def test_a_run_does_not_go_on_with_other_data(tiny, whole, pair, tmp_path):
    other = trainable(tmp_path / "data", tiny.pair, rows=5)
    with pytest.raises(DFlash2Error, match=r"data.rows.documents was 7 and is 3"):
        other.run(whole, resume=True)


def test_data_of_another_target_is_refused(tiny, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(tiny.data, data)
    manifest = data / "train/manifest.json"
    content = json.loads(manifest.read_text())
    content["target"]["tokenizer_sha256"] = "0000"
    manifest.write_text(json.dumps(content))
    with pytest.raises(DFlash2Error, match="whose tokenizer_sha256 is 0000, but that"):
        tiny.run(tmp_path / "run", data=str(data))


def test_a_folder_in_use_is_not_written_over(tiny, whole, tmp_path):
    with pytest.raises(DFlash2Error, match="is not empty; go on with --resume"):
        tiny.run(whole)
    with pytest.raises(DFlash2Error, match="holds no checkpoint 'latest'"):
        tiny.run(tmp_path / "none", resume=True)


def test_a_term_of_another_family_is_refused(tiny, tmp_path):
    flags = {"drafter__family": "dflash", "objective__selector_ce": 1.0}
    with pytest.raises(DFlash2Error, match="has no selector; set it to 0"):
        tiny.run(tmp_path / "run", **flags)


def feed_of(tiny, world=None, anneal=None, **settings):
    config = read_config(flags=tiny.flags("out", **settings))
    rows = RowSet(tiny.data / "train")
    return Feed(config, world or World(torch.device("cpu")), rows, anneal, 7)


def firsts(parts):
    """What a step is made of: the tokens and anchors of each of its rows."""
    return [
        (part.batch.tokens[i].tolist(), part.blocks.anchors[i].tolist())
        for part in parts
        for i in range(len(part.batch.tokens))
    ]


def test_a_feed_goes_on_where_it_is_told(tiny):
    steps = [firsts(parts) for parts in feed_of(tiny).steps(0)]
    assert len(steps) == 20
    assert [firsts(parts) for parts in feed_of(tiny).steps(13)] == steps[13:]
    rows = {json.dumps(tokens) for step in steps for tokens, _ in step}
    assert len(rows) >= 7  # all of them, some with padding too


def test_processes_share_the_rows_of_a_step(tiny):
    flags = {"batch__rows_at_once": 1}
    alone = [firsts(parts) for parts in feed_of(tiny, **flags).steps(0)]
    cpu = torch.device("cpu")
    shares = [
        [firsts(parts) for parts in feed_of(tiny, World(cpu, r, 2), **flags).steps(0)]
        for r in range(2)
    ]
    for step, first, second in zip(alone, *shares, strict=True):
        assert sorted(map(json.dumps, first + second)) == sorted(map(json.dumps, step))
        assert len(first) == len(second) == 2


def test_a_feed_turns_to_other_rows_when_the_rate_falls(tiny, pair, tmp_path):
    other = trainable(tmp_path / "data", pair("oracle"), rows=4, tokens=9)
    feed = feed_of(tiny, anneal=RowSet(other.data / "train"), optimizer__decay=0.25)
    lengths = [
        max(len(tokens) for tokens, _ in firsts(parts)) for parts in feed.steps(0)
    ]
    assert lengths[:15] == [44] * 15 and max(lengths[15:]) <= 29
    late = [firsts(parts) for parts in feed.steps(16)]
    assert late == [firsts(parts) for parts in feed.steps(0)][16:]


def test_rows_that_do_not_divide_are_refused(tiny):
    with pytest.raises(DFlash2Error, match=re.escape("rows_at_once 2 times 3 proc")):
        feed_of(tiny, World(torch.device("cpu"), 0, 3))


def test_the_most_frequent_tokens_are_those_of_the_answers(tiny):
    rows = RowSet(tiny.data / "train")
    learned = torch.cat([torch.from_numpy(r.tokens[r.supervised]) for r in rows])
    found, counts = learned.long().unique(return_counts=True)
    assert torch.equal(frequent_tokens(rows, 10_000), found)
    few = frequent_tokens(rows, 5)
    assert counts[torch.isin(found, few)].min() >= counts[~torch.isin(found, few)].max()


def test_all_other_tokens_take_turns_at_the_losses(tiny):
    rows = RowSet(tiny.data / "train")
    part = HeadTokens.of(rows, 60, vocab=512, device=torch.device("cpu"))
    assert torch.equal(part.kept, frequent_tokens(rows, 45))
    steps = [part.at(step) for step in range(len(part.others) // 15 + 1)]
    assert all(len(step.unique()) == 60 for step in steps)
    assert torch.equal(torch.cat(steps).unique(), torch.arange(512))


def test_a_part_as_large_as_the_vocabulary_is_the_vocabulary(tiny):
    rows = RowSet(tiny.data / "train")
    part = HeadTokens.of(rows, 9999, vocab=512, device=torch.device("cpu"))
    assert torch.equal(part.at(7).sort().values, torch.arange(512))
