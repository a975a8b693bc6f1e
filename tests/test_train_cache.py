"""Cached features: the same at every visit, whole or not there, of one contract."""

import shutil
from collections import namedtuple

import numpy as np
import pytest
from tiny import assert_close, torch_target

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_runs import assert_same_weights, metrics_of, trainable  # noqa: E402
from train_tiny import row_of  # noqa: E402

from mlx_dflash2.data.rows import RowSet, write_rows  # noqa: E402
from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train import feature_cache, learner  # noqa: E402
from mlx_dflash2.torch.train.batch import Batch  # noqa: E402
from mlx_dflash2.torch.train.feature_cache import FeatureCache  # noqa: E402
from mlx_dflash2.torch.train.features import capture  # noqa: E402
from mlx_dflash2.torch.train.feed import Part  # noqa: E402
from mlx_dflash2.torch.train.start import find_saved  # noqa: E402

TAPS = (0, 2)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(scope="module")
def target():
    return torch_target()


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A packed row, a long one and a short one."""
    folder = tmp_path_factory.mktemp("few") / "rows"
    write_rows(folder, [row_of(9, 5), row_of(20, seed=1), row_of(7, seed=2)], {})
    return RowSet(folder)


@pytest.fixture(scope="module")
def tiny(pair, tmp_path_factory):
    return trainable(tmp_path_factory.mktemp("rows") / "data", pair("oracle"))


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A run of twenty steps with cached features."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert tiny.run(out, cache_features=True) == 0
    return out


def cache_of(target, folder, **changes):
    settings = {"taps": TAPS, "teaches": True, "fingerprint": "tiny"}
    return FeatureCache(target, **settings | changes, folder=folder)


def part_of(rows, *numbers):
    batch = Batch.of([rows[number] for number in numbers])
    return Part(batch, None, rows, numbers)


def files(folder):
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def test_cached_features_are_the_targets_in_float16(target, rows, tmp_path):
    part = part_of(rows, 1, 0)
    found = cache_of(target, tmp_path)(part)
    exact = capture(target, part.batch, TAPS)
    real = part.batch.document >= 0
    for name in ("features", "last"):
        kept, wanted = (getattr(each, name)[real] for each in (found, exact))
        assert kept.dtype == torch.float32
        assert torch.equal(kept, kept.half().float())
        assert_close(kept, wanted, 1e-3 * float(wanted.abs().max()), what=name)


def test_a_row_is_the_same_in_every_batch_and_at_every_visit(target, rows, tmp_path):
    cache = cache_of(target, tmp_path / "one")
    first = cache(part_of(rows, 0, 2))
    again = cache(part_of(rows, 1, 2, 0))
    alone = cache_of(target, tmp_path / "other")(part_of(rows, 2))
    assert torch.equal(first.features[1, :7], again.features[1, :7])
    assert torch.equal(first.features[0, :14], again.features[2, :14])
    assert torch.equal(first.features[1, :7], alone.features[0])


def test_the_target_runs_on_a_row_once(target, rows, tmp_path, monkeypatch):
    cache_of(target, tmp_path)(part_of(rows, 1))
    monkeypatch.setattr(target, "trunk", None)
    assert cache_of(target, tmp_path)(part_of(rows, 1)).last.shape == (1, 20, 64)
    with pytest.raises(TypeError):
        cache_of(target, tmp_path)(part_of(rows, 0))


def test_final_rows_are_kept_for_a_teacher_only(target, rows, tmp_path):
    taught = cache_of(target, tmp_path)(part_of(rows, 1))
    alone = cache_of(target, tmp_path, teaches=False)(part_of(rows, 1))
    assert alone.last.shape == (1, 20, 0)
    assert torch.equal(taught.features, alone.features)


@pytest.mark.parametrize("change", [{"taps": (2, 0)}, {"fingerprint": "another"}])
def test_what_is_of_another_contract_is_not_read(target, rows, tmp_path, change):
    cache_of(target, tmp_path)(part_of(rows, 2))
    cache_of(target, tmp_path, **change)(part_of(rows, 2))
    assert files(tmp_path) == ["facts.json"] * 2 + ["row-000002.npy"] * 2


def test_other_rows_and_another_precision_lie_elsewhere(rows, tmp_path):
    write_rows(tmp_path / "rows", [row_of(8, seed=number) for number in range(3)], {})
    for data in (rows, RowSet(tmp_path / "rows")):
        cache_of(torch_target(), tmp_path / "cache")(part_of(data, 2))
    double = torch_target()
    double.model.double()
    cache_of(double, tmp_path / "cache")(part_of(rows, 2))
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_a_write_that_breaks_off_leaves_no_row(target, rows, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    cache = cache_of(target, tmp_path)
    whole = cache(part_of(rows, 0)).features
    monkeypatch.setattr(feature_cache.os, "fsync", full)
    with pytest.raises(DFlash2Error, match="row-000002.npy: cannot be written .No spa"):
        cache(part_of(rows, 2))
    assert files(tmp_path) == ["facts.json", "row-000000.npy"]
    assert torch.equal(cache(part_of(rows, 0)).features, whole)


@pytest.mark.parametrize("name, place", [("features", "tap 2"), ("last", "final norm")])
def test_values_beyond_float16_are_refused(
    target, rows, tmp_path, monkeypatch, name, place
):
    def large(*arguments):
        captured = capture(*arguments)
        getattr(captured, name)[0, 3, -1] = 70_000
        return captured

    monkeypatch.setattr(feature_cache, "capture", large)
    with pytest.raises(DFlash2Error, match=f"{place}: .*float16.*leave out cache_feat"):
        cache_of(target, tmp_path)(part_of(rows, 1))
    assert files(tmp_path) == ["facts.json"]


def test_room_is_demanded_for_what_is_missing(target, rows, tmp_path, monkeypatch):
    cache = cache_of(target, tmp_path / "later")
    tokens = sum(len(row.tokens) for row in rows)
    room = Usage(0, 0, tokens * 10 - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: room)
    with pytest.raises(DFlash2Error, match=f"later: the features of {tokens} tokens"):
        cache.demand_room([rows], 10)
    cache(part_of(rows, 2))
    cache.demand_room([rows], 10)


def test_a_run_without_room_leaves_no_folder(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))
    with pytest.raises(DFlash2Error, match="or leave out cache_features"):
        tiny.run(tmp_path / "run", cache_features=True)
    assert not (tmp_path / "run").exists()


def test_a_run_reads_what_it_wrote(tiny, whole):
    names = files(whole / "features")
    assert names == ["facts.json"] + [f"row-{number:06d}.npy" for number in range(7)]
    lines = metrics_of(whole)
    assert lines[-1]["loss_ce"] < lines[0]["loss_ce"]


def test_filling_and_reading_and_going_on_change_no_bit(
    tiny, whole, tmp_path, monkeypatch
):
    """Half of it in another part, its cache filled by a run that was given up."""
    shared = tmp_path / "features"
    shutil.copytree(whole / "features", shared)
    for row in (1, 4):
        (next(shared.glob("*")) / f"row-{row:06d}.npy").unlink()
    settings = {"cache_features": True, "features": str(shared)}
    out = tmp_path / "run"
    assert tiny.run(out, minutes=1e-9, **settings) == 0
    assert find_saved(out).progress.step == 1
    assert tiny.run(out, resume=True, **settings) == 0
    assert_same_weights(find_saved(out).weights(), find_saved(whole).weights())
    for mine, theirs in zip(metrics_of(out), metrics_of(whole), strict=True):
        assert mine | {"seconds": 0} == theirs | {"seconds": 0}


def test_a_run_does_not_change_over_to_cached_features(tiny, whole):
    with pytest.raises(DFlash2Error, match="cache_features was True and is False"):
        tiny.run(whole, resume=True)


def test_annealing_rows_are_cached_apart(tiny, tmp_path):
    other = trainable(tmp_path / "data", tiny.pair, rows=4, tokens=9)
    settings = {"anneal_data": str(other.data), "drafter__family": "dspark"}
    out = tmp_path / "run"
    assert tiny.run(out, cache_features=True, steps=6, **settings) == 0
    caches = sorted(len(list(place.glob("*.npy"))) for place in out.glob("features/*"))
    assert caches == [2, 7]
    width = np.load(next(out.glob("features/*/row-000000.npy"))).shape[1]
    assert width == 3 * 96  # two taps and the final rows


def test_evaluation_is_exact(tiny, tmp_path, monkeypatch):
    """It sees no cache: the target runs for it as often as without one."""
    seen = []
    original = learner.BatchLoss.forward

    def forward(self, *arguments):
        seen.append(type(self.features).__name__)
        return original(self, *arguments)

    monkeypatch.setattr(learner.BatchLoss, "forward", forward)
    flags = {"steps": 1, "optimizer__lr": 1e-12, "optimizer__high_lr": 1e-12}
    for out, cached in (("one", True), ("other", False)):
        assert tiny.run(tmp_path / out, cache_features=cached, **flags) == 0
    assert set(seen) == {"FeatureCache", "Online"}
    one, other = (metrics_of(tmp_path / out)[0] for out in ("one", "other"))
    assert one["loss"] != other["loss"]
    assert one["evaluation"]["loss"] == pytest.approx(
        other["evaluation"]["loss"], rel=1e-6
    )
