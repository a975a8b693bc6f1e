"""Rotary positions, masks and norm of the torch drafter against their definitions."""

import numpy as np
import pytest
from tiny import assert_close, drafter_config, drafter_numbers, torch_drafter

torch = pytest.importorskip("torch")
torch.set_num_threads(1)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_multiplies_pairs_by_unit_complex_numbers(interleaved):
    from mlx_dflash2.torch.rope import rotate

    x = np.random.default_rng(0).standard_normal((1, 2, 5, 16)).astype(np.float32)
    positions = np.array([0, 1, 7, 50, 400])
    angles = positions[:, None] * 5e6 ** (-np.arange(8) / 8)
    pairs = (x[..., ::2], x[..., 1::2]) if interleaved else np.split(x, 2, axis=-1)
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angles)
    expected = np.empty_like(x)
    if interleaved:
        expected[..., ::2], expected[..., 1::2] = turned.real, turned.imag
    else:
        expected[..., :8], expected[..., 8:] = turned.real, turned.imag
    rotated = rotate(
        torch.from_numpy(x),
        torch.from_numpy(positions),
        drafter_config(is_neox_style=not interleaved),
    )
    assert_close(rotated, expected, 1e-4)


def test_positions_may_differ_by_batch_row():
    from mlx_dflash2.torch.rope import rotate

    x = torch.randn(2, 4, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2], [9, 20, 21]])
    together = rotate(x, positions, drafter_config())
    for row in range(2):
        alone = rotate(x[row : row + 1], positions[row], drafter_config())
        assert_close(together[row : row + 1], alone, 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 4])
def test_a_key_is_seen_by_its_distance(causal, window):
    from mlx_dflash2.torch.attention import visible

    queries, keys = torch.arange(10, 15), torch.arange(3, 15)
    mask = visible(queries, keys, causal=causal, window=window)
    for row, query in enumerate(queries.tolist()):
        for column, key in enumerate(keys.tolist()):
            near = window is None or abs(query - key) < window
            assert mask[row, column] == (near and (key <= query or not causal))


def test_causal_rows_see_the_whole_context_before_them():
    """Two queries, three context keys: the last query sees all five keys."""
    from mlx_dflash2.torch.attention import visible

    mask = visible(torch.arange(3, 5), torch.arange(5), causal=True, window=None)
    assert mask.tolist() == [[True] * 4 + [False], [True] * 5]


def test_attention_equals_a_loop_over_heads_and_rows():
    config = drafter_config()
    layer = torch_drafter(config, drafter_numbers(config)).layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(1, 6, 64, generator=generator)
    x = torch.randn(1, 1, 3, 64, generator=generator)
    positions = torch.arange(6, 9)
    keys, values = layer.keys_values(context, torch.arange(6))
    mask = torch.rand(3, 9, generator=generator) < 0.7
    mask[:, 0] = True
    result = layer(x, (keys, values), positions, mask)

    block = layer.keys_values(x[0], positions)
    keys = torch.cat([keys, block[0]], 2)[0].double()
    values = torch.cat([values, block[1]], 2)[0].double()
    queries = layer.q_norm(layer.q_proj(x[0, 0]).view(3, 4, 16)).transpose(0, 1)
    queries = layer._rotate(queries[None], positions)[0].double()
    expected = torch.zeros(3, 64, dtype=torch.float64)
    for head in range(4):
        for row in range(3):
            scores = (keys[head // 2] @ queries[head, row]) / 4
            scores[~mask[row]] = -torch.inf
            weights = torch.softmax(scores, 0)
            expected[row, head * 16 : head * 16 + 16] = weights @ values[head // 2]
    expected = expected @ layer.o_proj.weight.double().T
    assert_close(result[0, 0], expected, 1e-5)


def test_norm_rounds_before_the_weight_is_applied():
    from mlx_dflash2.torch.attention import RMSNorm

    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(64, 1e-6).requires_grad_(False)
    norm.weight.copy_(1 + 0.2 * torch.randn(64, generator=generator))
    norm = norm.to(torch.bfloat16)
    x = torch.randn(400, 64, generator=generator).to(torch.bfloat16)
    wide = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    rounded_first = wide.to(torch.bfloat16) * norm.weight
    rounded_last = (wide * norm.weight.float()).to(torch.bfloat16)
    assert (norm(x) != rounded_first).float().mean() < 0.01
    assert (norm(x) != rounded_last).float().mean() > 0.1
