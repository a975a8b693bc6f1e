"""Number formats: which one a device gets, and what fp16 needs."""

import pytest

torch = pytest.importorskip("torch")

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.precision import Precision, check_finite  # noqa: E402

CPU = torch.device("cpu")
GPU = torch.device("cuda")


@pytest.mark.parametrize(
    "capability, name", [((7, 5), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")]
)
def test_a_gpu_gets_bf16_only_where_it_has_its_own(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    chosen = Precision.choose("auto", GPU)
    assert chosen.name == name
    assert chosen.target_dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[name]


def test_a_cpu_gets_fp32_unless_told_otherwise():
    assert Precision.choose("auto", CPU).name == "fp32"
    assert Precision.choose("fp16", CPU).name == "fp16"
    assert Precision.choose("fp16", CPU).target_dtype == torch.float32


def test_autocast_computes_in_the_chosen_format():
    linear, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
    for name, dtype in (
        ("fp32", torch.float32),
        ("fp16", torch.float16),
        ("bf16", torch.bfloat16),
    ):
        with Precision(name, CPU).autocast():
            assert linear(x).dtype == dtype


def test_only_fp16_scales_the_loss_and_skips_what_overflows():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = Precision("fp16", CPU).scaler()
    assert scaler.get_scale() == 2.0**13
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1.0 and scaler.get_scale() == 2.0**12
    assert not Precision("bf16", CPU).scaler().is_enabled()


def test_large_taps_are_scaled_for_fp16_alone():
    assert Precision("fp16", CPU).tap_scale(1000.0) == 1.0
    assert Precision("fp16", CPU).tap_scale(9000.0) == 0.125
    assert Precision("bf16", CPU).tap_scale(9000.0) == 1.0


def test_an_infinite_tap_is_named_with_the_largest_value():
    features = torch.ones(3, 8, dtype=torch.float16)
    features[1, 6] = 900.0
    names = ["tap 1", "tap 7"]
    assert check_finite(features, names, cure="do") == 900.0
    features[2, 5] = float("inf")
    with pytest.raises(DFlash2Error, match=r"tap 7: .*float16 .*value 900\); do"):
        check_finite(features, names, cure="do")
    features[2, 5] = float("nan")
    with pytest.raises(DFlash2Error, match="tap 7"):
        check_finite(features, names, cure="do")
