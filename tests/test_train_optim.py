"""Parameter groups, learning rates, clipping."""

import sys
import types

import pytest
from tiny import drafter_config

torch = pytest.importorskip("torch")

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.config import Optimizer  # noqa: E402
from mlx_dflash2.torch.train.optim import (  # noqa: E402
    anneal_start,
    clip,
    make_optimizer,
    rate_at,
    set_rate,
)


def drafter_of(family):
    config = drafter_config(family=family)
    return config.network("mlx_dflash2.torch")(config)


def settings_of(drafter, optimizer):
    """The group of each parameter, by name."""
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    return {
        names[id(parameter)]: group
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_every_parameter_is_in_one_group(family):
    drafter = drafter_of(family)
    optimizer = make_optimizer(drafter, Optimizer())
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(set(map(id, grouped))) == len(list(drafter.parameters()))


def test_norms_convolution_bases_and_tables_do_not_decay():
    for family in ("dflash2", "dspark"):
        drafter = drafter_of(family)
        groups = settings_of(
            drafter, make_optimizer(drafter, Optimizer(weight_decay=1))
        )
        spared = {name for name, group in groups.items() if not group["weight_decay"]}
        assert {
            name
            for name in groups
            if "norm" in name
            or "codebook" in name
            or "markov" in name
            or name.endswith(("base_kernel", "bias"))
        } == spared


def test_tables_and_new_parts_train_at_the_high_rate():
    drafter = drafter_of("dflash2")
    options = Optimizer(lr=1e-4, high_lr=1e-3)
    groups = settings_of(drafter, make_optimizer(drafter, options, {"fc.weight"}))
    fast = {name for name, group in groups.items() if group["lr"] == 1e-3}
    assert fast == {
        "fc.weight",
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
    }


def test_the_rate_warms_up_stays_and_falls():
    options = Optimizer(warmup=10, decay=0.2, lr_end=0.1)
    rates = [rate_at(options, step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0
    assert set(rates[9:80]) == {1.0}
    assert rates[80] < 1.0 and rates[99] == pytest.approx(0.1)
    assert rates[80:] == sorted(rates[80:], reverse=True)
    assert rates[89] == pytest.approx(0.55)
    assert anneal_start(options, 100) == 80


def test_the_cosine_falls_from_the_warm_up_on():
    options = Optimizer(warmup=4, schedule="cosine", lr_end=0.0)
    rates = [rate_at(options, step, 24) for step in range(24)]
    assert rates[3] == 1.0 and rates[4] < 1.0
    assert rates[13] == pytest.approx(0.5)
    assert rates[23] == pytest.approx(0.0)


def test_the_rate_of_a_step_is_a_share_of_each_groups_own():
    drafter = drafter_of("dflash2")
    optimizer = make_optimizer(drafter, Optimizer(lr=1e-4, high_lr=1e-3))
    set_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-5, 5e-4}


def test_gradients_are_clipped_by_their_norm():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert clip([weight], 1.0) == pytest.approx(5.0)
    assert torch.linalg.vector_norm(weight.grad) == pytest.approx(1.0)


def test_eight_bits_need_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(DFlash2Error, match="needs bitsandbytes; install it"):
        make_optimizer(drafter_of("dflash2"), Optimizer(eight_bit=True))


def test_in_eight_bits_norms_and_tables_keep_theirs(monkeypatch):
    kept = []
    manager = types.SimpleNamespace(
        override_config=lambda parameter, key, bits: kept.append((parameter, key, bits))
    )
    optim = types.SimpleNamespace(
        GlobalOptimManager=types.SimpleNamespace(get_instance=lambda: manager),
        AdamW8bit=torch.optim.AdamW,
    )
    module = types.SimpleNamespace(optim=optim)
    monkeypatch.setitem(sys.modules, "bitsandbytes", module)
    drafter = drafter_of("dflash2")
    make_optimizer(drafter, Optimizer(eight_bit=True))
    wide = {id(parameter) for parameter, key, bits in kept if bits == 32}
    names = {name for name, p in drafter.named_parameters() if id(p) in wide}
    assert "norm.weight" in names
    assert "candidate_selector.successor_codebook" in names
    assert "fc.weight" not in names
