"""Checkpoints: whole or not there, the right ones kept, nothing that runs code."""

import json
import re

import pytest
from tiny import drafter_config

torch = pytest.importorskip("torch")

from train_runs import assert_same_weights  # noqa: E402

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.checkpoints import Saved, Store  # noqa: E402
from mlx_dflash2.torch.train.config import Optimizer  # noqa: E402
from mlx_dflash2.torch.train.contract import Contract, Progress  # noqa: E402
from mlx_dflash2.torch.train.optim import make_optimizer  # noqa: E402

CONTRACT = Contract({"steps": 9}, {"name": "there"}, {}, {}, None, "1")


class Trained:
    """A drafter that steps with gradients of a seed, and its store."""

    def __init__(self, folder):
        config = drafter_config()
        torch.manual_seed(0)
        self.drafter = config.network("mlx_dflash2.torch")(config)
        self.optimizer = make_optimizer(self.drafter, Optimizer())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**13)
        self.store = Store(folder / "checkpoints")

    def step(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.drafter.named_parameters():
            if "selector" not in name or seed > 2:  # as in a first stage
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def save(self, step, best=False):
        return self.store.save(
            self.drafter,
            self.optimizer,
            self.scaler,
            progress=Progress(step=step),
            contract=CONTRACT,
            config={},
            best=best,
        )

    def load(self, folder):
        saved = Saved.read(folder)
        self.drafter.load_state_dict(saved.weights())
        saved.restore(self.optimizer)


@pytest.fixture
def trained(tmp_path):
    return Trained(tmp_path)


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_weights_and_moments_come_back_exactly(trained, tmp_path):
    for seed in (1, 2, 3):
        trained.step(seed)
    folder = trained.save(3)
    other = Trained(tmp_path / "other")
    other.load(folder)
    for each in (trained, other):
        each.step(4)
    assert_same_weights(other.drafter.state_dict(), trained.drafter.state_dict())


def test_parameters_without_a_gradient_so_far_have_no_moments(trained, tmp_path):
    trained.step(1)
    other = Trained(tmp_path / "other")
    other.load(trained.save(1))
    assert len(other.optimizer.state) == len(trained.optimizer.state)
    assert len(other.optimizer.state) < len(list(other.drafter.parameters()))


def test_torchs_random_state_comes_back(trained):
    folder = trained.save(1)
    drawn = torch.rand(3)
    trained.load(folder)
    assert torch.equal(torch.rand(3), drawn)


def test_the_newest_and_the_best_are_kept(trained):
    for step in (1, 2, 3, 4, 5):
        trained.save(step, best=step == 2)
    kept = ["step-000002", "step-000004", "step-000005"]
    assert names(trained.store) == ["best", "latest", *kept]
    assert trained.store.find().name == "step-000005"
    assert trained.store.find("best").name == "step-000002"
    assert trained.store.find("4").name == "step-000004"
    assert trained.store.find("3") is None


def test_saving_removes_what_was_later_and_what_was_cut_off(trained):
    for step in (1, 2, 3):
        trained.save(step)
    (trained.store.folder / ".step-000009.partial-abcd").mkdir()
    (trained.store.folder / "step-000003/state.json").unlink()
    trained.save(3)
    trained.save(2)
    assert names(trained.store) == ["latest", "step-000002"]


def test_a_failed_save_leaves_the_last_checkpoint(trained, monkeypatch):
    trained.save(1)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trained.save(2)
    assert names(trained.store) == ["latest", "step-000001"]


def test_no_file_can_run_code(trained):
    kinds = {file.suffix for file in trained.save(1).iterdir()}
    assert kinds == {".safetensors", ".json"}


def test_a_damaged_checkpoint_is_named(trained):
    folder = trained.save(1)
    (folder / "drafter.safetensors").write_bytes(b"short")
    with pytest.raises(DFlash2Error, match="drafter.safetensors: cannot be read"):
        Saved.read(folder).weights()
    state = folder / "state.json"
    state.write_text(state.read_text().replace('"schema": 1', '"schema": 7'))
    with pytest.raises(DFlash2Error, match="schema is 7, this version reads 1"):
        Saved.read(folder)


def test_the_contract_names_every_difference(tmp_path):
    known = {"settings": {"steps": 8, "seed": 1}, "target": {"name": "elsewhere"}}
    known |= {"data": {}, "drafter": {}, "parent": None, "code": "2"}
    message = "settings.seed was 1 and is None; settings.steps was 8 and is 9; restore"
    with pytest.raises(DFlash2Error, match=re.escape(message)):
        CONTRACT.demand(known, tmp_path)
    CONTRACT.demand(known | {"settings": {"steps": 9}}, tmp_path)
