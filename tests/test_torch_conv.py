"""The torch convolution against its formula, written as loops."""

import numpy as np
import pytest
from tiny import assert_close, drafter_config, drafter_numbers, torch_drafter

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


def loops(base: np.ndarray, projection: np.ndarray, x: np.ndarray, z: np.ndarray, side):
    """One side of the convolution of z with kernels from x. Shape: (L, D) each."""
    length, size = x.shape
    taps = base.shape[1]
    groups = projection.shape[0] // (2 * taps)
    kernels = (x @ projection.T).reshape(length, 2, taps, groups)
    out = np.zeros_like(x)
    for row in range(length):
        for channel in range(size):
            group = channel // (size // groups)
            for tap in range(min(taps, row + 1)):
                weight = base[side, tap, channel] + kernels[row, side, tap, group]
                out[row, channel] += weight * z[row - tap, channel]
    return out


@pytest.fixture(scope="module", params=[2, 3], ids=["two taps", "three taps"])
def conv(request):
    config = drafter_config(conv_kernel_size=request.param)
    numbers = drafter_numbers(config)
    return torch_drafter(config, numbers).layers[0].attention_conv


def rows(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, 64), dtype=np.float32)


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_both_sides_equal_a_triple_loop(conv, length):
    base = conv.base_kernel.numpy()
    projection = conv.kernel_projection.weight.numpy()
    x, output = rows(length), rows(length, seed=1)
    inner, delta = conv.prepare(torch.from_numpy(x)[None])
    finished = conv.finish(torch.from_numpy(output)[None], delta)
    assert_close(inner[0], loops(base, projection, x, x, 0), 1e-4, what="before")
    assert_close(finished[0], loops(base, projection, x, output, 1), 1e-4, what="after")


def test_blocks_side_by_side_do_not_leak_into_each_other(conv):
    blocks = torch.from_numpy(np.stack([rows(8, seed) for seed in range(3)]))
    together, delta = conv.prepare(blocks[None])
    finished = conv.finish(blocks[None], delta)
    for index, block in enumerate(blocks):
        alone, delta_alone = conv.prepare(block[None])
        assert_close(together[0, index], alone[0], 1e-5)
        assert_close(finished[0, index], conv.finish(block[None], delta_alone)[0], 1e-5)


def test_a_new_convolution_changes_nothing():
    from mlx_dflash2.torch.conv import DynamicConv

    conv = DynamicConv(drafter_config()).requires_grad_(False)
    x = torch.from_numpy(rows(8))[None]
    inner, delta = conv.prepare(x)
    assert torch.equal(inner, x)
    assert torch.equal(conv.finish(2 * x, delta), 2 * x)
