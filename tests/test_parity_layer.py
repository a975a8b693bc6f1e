"""Sub-blocks of the drafter, torch against MLX, float32: inward to outward."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    assert_close,
    drafter_config,
    drafter_numbers,
    features_of,
    mlx_drafter,
    torch_drafter,
)

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

FINE = 2e-5  # one sub-block
LAYER = 2e-5  # a whole layer, in units of its largest output, which is not normed


def both(config, seed: int = 0):
    numbers = drafter_numbers(config, seed)
    return torch_drafter(config, numbers), mlx_drafter(config, numbers)


def rows(length: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return generator.standard_normal((1, length, 64), dtype=np.float32)


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_convolution(length, taps):
    reference, ours = both(drafter_config(conv_kernel_size=taps))
    x, output = rows(length), rows(length, 1)
    for name in ("attention_conv", "mlp_conv"):
        reference_conv = getattr(reference.layers[1], name)
        conv = getattr(ours.layers[1], name)
        expected, delta = reference_conv.prepare(torch.from_numpy(x))
        inner, kept = conv.prepare(mx.array(x))
        assert_close(inner, expected, FINE, what=f"{name} before")
        expected = reference_conv.finish(torch.from_numpy(output), delta)
        finished = conv.finish(mx.array(output), kept)
        assert_close(finished, expected, FINE, what=f"{name} after")


@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_mlx_convolution_equals_a_triple_loop(length):
    _, ours = both(drafter_config())
    conv = ours.layers[0].mlp_conv
    x, output = rows(length), rows(length, 1)
    base = np.array(conv.base_kernel)
    kernels = x[0] @ np.array(conv.kernel_projection.weight).T
    kernels = kernels.reshape(length, 2, 2, 4)
    inner, kept = conv.prepare(mx.array(x))
    finished = conv.finish(mx.array(output), kept)
    for side, (before, after) in enumerate(((x, inner), (output, finished))):
        expected = np.zeros_like(before)
        for row in range(length):
            for channel in range(64):
                for tap in range(min(2, row + 1)):
                    weight = base[side, tap, channel]
                    weight += kernels[row, side, tap, channel // 16]
                    expected[0, row, channel] += weight * before[0, row - tap, channel]
        assert_close(after, expected, FINE, what=f"side {side}")


def test_fuse():
    reference, ours = both(drafter_config())
    features = features_of(reference.config, 9)
    expected = reference.fuse(torch.from_numpy(features))
    fused = ours.hidden_norm(ours.fc(mx.array(features)))
    assert_close(fused, expected, FINE)


def test_swapped_taps_are_told_apart():
    reference, ours = both(drafter_config())
    features = features_of(reference.config, 9)
    swapped = np.concatenate([features[..., 64:], features[..., :64]], axis=-1)
    expected = reference.fuse(torch.from_numpy(features)).numpy()
    fused = np.array(ours.hidden_norm(ours.fc(mx.array(swapped))))
    assert np.abs(fused - expected).max() > 1


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("position", [0, 1, 37, 1500])
def test_keys_and_values_of_a_position(interleaved, position):
    reference, ours = both(drafter_config(is_neox_style=not interleaved))
    x = rows(6)
    positions = torch.arange(position, position + 6)
    expected = reference.layers[0].self_attn.keys_values(torch.from_numpy(x), positions)
    found = ours.layers[0].self_attn.keys_values(mx.array(x), position)
    tolerance = FINE + 2e-7 * position  # an angle's rounding grows with the position
    for name, one, other in zip(("keys", "values"), found, expected, strict=True):
        assert_close(one, other, tolerance, what=name)


def masked_attention(kind: str, causal: bool | None, context_rows: int, length: int):
    """One attention over random context and block rows: torch's result and MLX's."""
    from mlx_dflash2.attention import block_mask
    from mlx_dflash2.torch.attention import visible

    reference, ours = both(drafter_config(kind, is_causal=causal))
    config = reference.config
    sight = config.layer_window(0), config.layer_is_causal(0)
    fused, block = rows(context_rows, 3), rows(length, 4)

    attention = reference.layers[0].self_attn
    at = torch.arange(context_rows, context_rows + length)
    keys_values = attention.keys_values(
        torch.from_numpy(fused), torch.arange(context_rows)
    )
    mask = visible(
        at, torch.arange(context_rows + length), window=sight[0], causal=sight[1]
    )
    expected = attention(torch.from_numpy(block)[None], keys_values, at, mask)[0]

    attention, context = ours.layers[0].self_attn, ours.make_context()[0]
    context.append(*attention.keys_values(mx.array(fused), 0))
    context.make_room(length)
    mask = block_mask(context.rows, length, *sight)
    return expected, attention(mx.array(block), context, mask)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("causal", [None, False, True])
@pytest.mark.parametrize("context_rows", [1, 5, 11, 12, 30])
def test_attention(kind, causal, context_rows):
    for length in (1, 2, 8):
        expected, found = masked_attention(kind, causal, context_rows, length)
        assert_close(found, expected, FINE, what=f"{length} rows")


def test_mlp():
    reference, ours = both(drafter_config())
    x = rows(8)
    expected = reference.layers[0].mlp(torch.from_numpy(x))
    assert_close(ours.layers[0].mlp(mx.array(x)), expected, FINE)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("causal", [None, False, True])
def test_layer(kind, causal):
    from mlx_dflash2.attention import block_mask

    reference, ours = both(drafter_config(kind, is_causal=causal))
    config = reference.config
    features, x = features_of(config, 30), rows(8)
    expected_context, context = reference.make_context(), ours.make_context()
    reference.extend(torch.from_numpy(features), expected_context)
    ours.extend(mx.array(features), context)
    at = torch.arange(30, 38)
    for index in range(2):
        sight = config.layer_window(index), config.layer_is_causal(index)
        keys = torch.cat([expected_context.positions(index), at])
        distance = at[:, None] - keys
        mask = torch.ones_like(distance, dtype=torch.bool)
        mask &= distance.abs() < (sight[0] or 1000)
        mask &= (distance >= 0) | (not sight[1])
        expected = reference.layers[index](
            torch.from_numpy(x)[None], expected_context[index], at, mask
        )[0]
        context[index].make_room(8)
        mask = block_mask(context[index].rows, 8, *sight)
        found = ours.layers[index](mx.array(x), context[index], mask)
        largest = expected.abs().max().item()
        assert_close(
            np.array(found) / largest, expected / largest, LAYER, what=f"layer {index}"
        )


def test_both_norms_round_before_the_weight():
    """In bfloat16; folding the weight in first would change a quarter of the values."""
    reference, ours = both(drafter_config())
    x = rows(200)
    expected = reference.norm.bfloat16()(torch.from_numpy(x).bfloat16()).float()
    ours.norm.weight = ours.norm.weight.astype(mx.bfloat16)
    found = ours.norm(mx.array(x).astype(mx.bfloat16)).astype(mx.float32)
    assert (np.array(found) != expected.numpy()).mean() < 0.01
