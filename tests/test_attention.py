"""The drafter's context, its masks, and attention against plain loops."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import assert_close, drafter_config, drafter_numbers, mlx_drafter

from mlx_dflash2.attention import LayerContext, block_mask

WINDOW = 12


def rows_of(first, count):
    """Keys and values that name their position. Shape: (1, 2, count, 4)."""
    numbers = mx.arange(first, first + count, dtype=mx.float32)
    keys = mx.broadcast_to(numbers[None, None, :, None], (1, 2, count, 4))
    return keys, -keys


def held_positions(context):
    """Positions of the context's rows, from keys and values alike."""
    keys, values = context.with_block(*rows_of(1000, 0))
    assert mx.array_equal(keys, -values)
    assert mx.array_equal(keys, mx.broadcast_to(keys[:1, :1, :, :1], keys.shape))
    return keys[0, 0, :, 0].tolist()


def grow(context, sizes, start=0):
    for size in sizes:
        context.append(*rows_of(start, size))
        start += size
    return start


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    "sizes",
    [[1] * 40, [3, 1, 8, 2, 1, 1, 5, 8, 1, 4], [30, 1, 1, 1], [11], [12, 1], [500, 1]],
    ids=str,
)
def test_rows_stay_in_time_order(window, sizes):
    context, end = LayerContext(window), 0
    for size in sizes:
        end = grow(context, [size], end)
        positions = held_positions(context)
        assert positions == list(range(end - len(positions), end))
        assert context.end == end
        seen = end if window is None else min(end, window - 1)
        assert len(positions) >= seen


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_block_is_attended_to_but_never_kept(window):
    context, end = LayerContext(window), 0
    for size in (5, 1, 20, 1, 1, 3):
        end = grow(context, [size], end)
        before = held_positions(context)
        for _ in range(2):
            keys, values = context.with_block(*rows_of(900, 8))
            assert keys[0, 0, :, 0].tolist() == before + list(range(900, 908))
            assert mx.array_equal(keys, -values)
        assert context.end == end
        assert held_positions(context) == before


def test_without_a_window_nothing_is_lost_over_several_buffers():
    context = LayerContext()
    end = grow(context, [100, 156, 1, 255, 1, 300, 7] + [1] * 30)
    assert held_positions(context) == list(range(end))
    assert end > 3 * LayerContext.step


def test_a_window_keeps_its_buffer_small():
    context, end = LayerContext(WINDOW), 0
    for _ in range(3 * LayerContext.step):
        end = grow(context, [1], end)
        context.make_room(8)
        assert context.rows >= min(end, WINDOW - 1)
    assert context.keys.shape[2] == LayerContext.step
    assert context.end == end
    assert held_positions(context)[-11:] == list(range(end - 11, end))


def test_an_empty_context_has_nothing_to_evaluate():
    context = LayerContext()
    assert context.arrays == []
    keys, _ = context.with_block(*rows_of(0, 8))
    assert keys.shape == (1, 2, 8, 4)
    assert context.rows == context.end == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [8, WINDOW])
@pytest.mark.parametrize("rows", [0, 3, 11, 30])
def test_a_mask_follows_the_distance(rows, window, causal):
    mask = block_mask(rows, 8, window, causal)
    assert mask.shape == (8, rows + 8)
    for query in range(8):
        for key in range(rows + 8):
            distance = rows + query - key
            wanted = abs(distance) < window and (distance >= 0 or not causal)
            assert mask[query, key].item() == wanted


def test_without_a_window_the_shorthands_are_used():
    assert block_mask(5, 8, None, False) is None
    assert block_mask(5, 8, None, True) == "causal"


def test_the_causal_shorthand_lets_each_row_see_the_whole_context():
    queries = mx.random.normal((1, 2, 3, 16), key=mx.random.key(0))
    keys = mx.random.normal((1, 2, 8, 16), key=mx.random.key(1))
    values = mx.random.normal((1, 2, 8, 16), key=mx.random.key(2))
    seen = mx.arange(5, 8)[:, None] >= mx.arange(8)[None]
    attend = mx.fast.scaled_dot_product_attention
    ours = attend(queries, keys, values, scale=0.25, mask="causal")
    assert_close(ours, attend(queries, keys, values, scale=0.25, mask=seen), 1e-6)


def naive_attention(numbers, config, fused, block, sees):
    """One layer's attention by its definition, a pair of rows at a time."""
    stem = "layers.0.self_attn."
    weight = {n[len(stem) : -7]: w for n, w in numbers.items() if n.startswith(stem)}
    dim, heads, pairs = config.head_dim, 4, 2

    def normed(rows, name):
        rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + config.rms_norm_eps)
        return rows * weight[name]

    def roped(row, position):
        half = dim // 2
        angle = position * config.rope_theta ** (-np.arange(half) / half)
        low, high = row[..., :half], row[..., half:]
        return np.concatenate(
            [
                low * np.cos(angle) - high * np.sin(angle),
                low * np.sin(angle) + high * np.cos(angle),
            ],
            -1,
        )

    start, rows = len(fused), np.concatenate([fused, block])
    keys = normed((rows @ weight["k_proj"].T).reshape(-1, pairs, dim), "k_norm")
    keys = np.stack([roped(row, at) for at, row in enumerate(keys)])
    values = (rows @ weight["v_proj"].T).reshape(-1, pairs, dim)
    out = np.zeros((len(block), heads * dim))
    for index, row in enumerate(block):
        query = normed((row @ weight["q_proj"].T).reshape(heads, dim), "q_norm")
        query = roped(query, start + index)
        seen = [at for at in range(len(rows)) if sees(start + index, at)]
        for head in range(heads):
            scores = keys[seen, head // 2] @ query[head] / np.sqrt(dim)
            share = np.exp(scores - scores.max())
            mixed = share @ values[seen, head // 2] / share.sum()
            out[index, head * dim : (head + 1) * dim] = mixed
    return out @ weight["o_proj"].T


SIGHTS = {
    ("full", None): lambda query, key: True,
    ("full", True): lambda query, key: key <= query,
    ("full", False): lambda query, key: True,
    ("sliding", None): lambda query, key: 0 <= query - key < WINDOW,
    ("sliding", True): lambda query, key: 0 <= query - key < WINDOW,
    ("sliding", False): lambda query, key: abs(query - key) < WINDOW,
}


@pytest.mark.parametrize(("kind", "is_causal"), SIGHTS)
@pytest.mark.parametrize("sizes", [[4], [11], [30], [30, 1, 1], [3, 8, 1, 6]], ids=str)
def test_attention_is_what_its_definition_says(kind, is_causal, sizes):
    config = drafter_config(kind, is_causal=is_causal)
    numbers = drafter_numbers(config)
    attention = mlx_drafter(config, numbers).layers[0].self_attn
    generator = np.random.default_rng(4)
    fused = generator.standard_normal((sum(sizes), 64), dtype=np.float32)
    block = generator.standard_normal((8, 64), dtype=np.float32)
    context, done = LayerContext(config.layer_window(0)), 0
    for size in sizes:
        part = mx.array(fused[None, done : done + size])
        context.append(*attention.keys_values(part, context.end))
        done += size
    context.make_room(8)
    mask = block_mask(
        context.rows, 8, config.layer_window(0), config.layer_is_causal(0)
    )
    ours = attention(mx.array(block[None]), context, mask)
    numbers = {name: array.astype(np.float64) for name, array in numbers.items()}
    sees = SIGHTS[kind, is_causal]
    assert_close(ours[0], naive_attention(numbers, config, fused, block, sees), 1e-4)
