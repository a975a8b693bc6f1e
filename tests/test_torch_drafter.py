"""The torch drafter as a whole: names, context, positions, masks, every tensor."""

import numpy as np
import pytest
from tiny import (
    WINDOW,
    assert_close,
    drafter_config,
    drafter_numbers,
    features_of,
    torch_drafter,
    torch_target,
    with_identity_convs,
)

from mlx_dflash2.names import expected_shapes

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

HIDDEN = 2e-4  # post-norm rows in float32; a wrong mask gives gaps above 1
CAUSALITIES = [None, False, True]


@pytest.fixture(scope="module")
def target():
    return torch_target()


def context_of(drafter, rows: int, sizes: list[int] | None = None, seed: int = 1):
    features = torch.from_numpy(features_of(drafter.config, rows, seed))
    context = drafter.make_context()
    start = 0
    for size in sizes or [rows]:
        drafter.extend(features[:, start : start + size], context)
        start += size
    assert context.length == rows
    return context


def block_of(drafter, target, anchor: int = 7):
    with torch.no_grad():
        return drafter.embed_block(anchor, target)


def test_parameters_are_the_published_tensors():
    config = drafter_config()
    drafter = torch_drafter(config, drafter_numbers(config))
    shapes = {name: tuple(p.shape) for name, p in drafter.state_dict().items()}
    assert shapes == expected_shapes(config)


def test_the_target_is_not_registered_in_the_drafter(target):
    config = drafter_config()
    drafter = torch_drafter(config, drafter_numbers(config))
    before = drafter.state_dict().keys()
    drafter.propose(7, target, context_of(drafter, 5))
    assert drafter.state_dict().keys() == before


@pytest.mark.parametrize("kind", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("sizes", [[10, 10], [19, 1], [7, 6, 7], [1] * 20])
def test_context_appended_in_parts_equals_the_whole(target, kind, sizes):
    config = drafter_config(kind)
    drafter = torch_drafter(config, drafter_numbers(config))
    block = block_of(drafter, target)
    whole = drafter.hidden(block, context_of(drafter, 20))
    parts = drafter.hidden(block, context_of(drafter, 20, sizes))
    assert_close(parts, whole, HIDDEN)


@pytest.mark.parametrize("causal", CAUSALITIES)
def test_a_window_drops_only_what_its_mask_hides(target, causal):
    """The sliding drafter against one that keeps every row and hides by distance."""
    config = drafter_config("sliding", is_causal=causal)
    drafter = torch_drafter(config, drafter_numbers(config))
    context = context_of(drafter, 30, [11, 1, 1, 8, 1, 8])
    assert context[0][0].shape[2] == WINDOW - 1
    assert context.positions(0).tolist() == list(range(30 - WINDOW + 1, 30))

    full = torch_drafter(drafter_config(), drafter_numbers(config))
    everything = context_of(full, 30)
    rows, keys = torch.arange(30, 38), torch.arange(38)
    distance = rows[:, None] - keys[None]
    mask = distance.abs() < WINDOW
    if causal is not False:
        mask &= distance >= 0
    block = block_of(drafter, target)
    x = block[:, None]
    for index, layer in enumerate(full.layers):
        x = layer(x, everything[index], rows, mask)
    assert_close(drafter.hidden(block, context), full.norm(x[:, 0]), HIDDEN)


def test_a_block_leaves_the_context_as_it_was(target):
    config = drafter_config("mixed")
    drafter = torch_drafter(config, drafter_numbers(config))
    context = context_of(drafter, 20)
    first = drafter.propose(7, target, context)
    before = [[part.clone() for part in context[layer]] for layer in range(2)]
    drafter.propose(9, target, context)
    for layer, parts in enumerate(before):
        for kept, part in zip(context[layer], parts, strict=True):
            assert torch.equal(kept, part)
    again = drafter.propose(7, target, context)
    assert torch.equal(first.tokens, again.tokens)


def test_the_block_starts_where_the_context_ends(target):
    """Moved by 100 positions together, context and block give the same rows."""
    config = drafter_config()
    drafter = torch_drafter(config, drafter_numbers(config))
    block = block_of(drafter, target)
    near = drafter.hidden(block, context_of(drafter, 20))
    context = drafter.make_context()
    context.length = 100
    drafter.extend(torch.from_numpy(features_of(config, 20)), context)
    assert context.positions(0).tolist() == list(range(100, 120))
    assert_close(drafter.hidden(block, context), near, HIDDEN)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("causal", CAUSALITIES)
def test_only_a_causal_block_may_be_shortened(target, kind, causal):
    config = drafter_config(kind, is_causal=causal)
    drafter = torch_drafter(config, drafter_numbers(config))
    context = context_of(drafter, 20)
    block = block_of(drafter, target)
    whole = drafter.hidden(block, context)[:, :4]
    short = drafter.hidden(block[:, :4], context)
    if config.layer_is_causal(0):
        assert_close(short, whole, HIDDEN)
    else:
        assert (short - whole).abs().max() > 0.1


@pytest.mark.parametrize("causal", CAUSALITIES)
def test_several_blocks_at_once_equal_one_after_the_other(target, causal):
    """Training runs many blocks over one sequence; the layers take them together."""
    from mlx_dflash2.torch.attention import visible

    config = drafter_config(is_causal=causal)
    drafter = torch_drafter(config, drafter_numbers(config))
    features = torch.from_numpy(features_of(config, 24))
    starts = [5, 11, 24]
    blocks = torch.stack([block_of(drafter, target, a)[0] for a in (3, 4, 5)])[None]
    positions = torch.cat([torch.arange(s, s + 8) for s in starts])
    owner = torch.arange(3).repeat_interleave(8)
    context_seen = torch.arange(24)[None] < torch.tensor(starts)[owner][:, None]
    block_seen = owner[:, None] == owner[None]
    if config.layer_is_causal(0):
        block_seen &= visible(positions, positions, causal=True, window=None)
    mask = torch.cat([context_seen, block_seen], dim=1)
    fused = drafter.fuse(features)
    x = blocks
    for layer in drafter.layers:
        context = layer.self_attn.keys_values(fused, torch.arange(24))
        x = layer(x, context, positions, mask)
    together = drafter.norm(x)
    for index, start in enumerate(starts):
        context = drafter.make_context()
        drafter.extend(features[:, :start], context)
        alone = drafter.hidden(blocks[:, index], context)
        assert_close(together[:, index], alone, HIDDEN, what=f"block {index}")


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("causal", CAUSALITIES)
def test_identity_kernels_make_it_the_network_without_convolutions(
    target, kind, causal
):
    config = drafter_config(kind, is_causal=causal)
    drafter = torch_drafter(config, with_identity_convs(drafter_numbers(config)))
    context = context_of(drafter, 20)
    block = block_of(drafter, target)
    convolved = drafter.hidden(block, context)
    for layer in drafter.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.prepare = lambda x: (x, None)
            conv.finish = lambda output, _: output
    assert torch.equal(drafter.hidden(block, context), convolved)


@pytest.mark.parametrize("name", expected_shapes(drafter_config("mixed")))
def test_every_tensor_matters(target, name):
    config = drafter_config("mixed")
    numbers = drafter_numbers(config)

    def outcome(numbers):
        drafter = torch_drafter(config, numbers)
        context = context_of(drafter, 20)
        drafts = [drafter.propose(a, target, context).tokens for a in range(12)]
        return drafter.hidden(block_of(drafter, target), context), torch.stack(drafts)

    hidden, drafts = outcome(numbers)
    noise = np.random.default_rng(5).standard_normal(numbers[name].shape)
    changed = numbers | {name: numbers[name] + noise.astype(np.float32)}
    other_hidden, other_drafts = outcome(changed)
    assert not torch.equal(drafts, other_drafts)
    assert name.startswith("candidate_selector") == torch.equal(hidden, other_hidden)


def test_the_embedding_scale_is_applied_once(target):
    plain = drafter_config()
    scaled = drafter_config(input_embedding_scale=1.7)
    numbers = drafter_numbers(plain)
    block = block_of(torch_drafter(plain, numbers), target)
    tokens = torch.tensor([[7] + [255] * 7])
    assert torch.equal(block, target.embed(tokens))
    assert torch.equal(block_of(torch_drafter(scaled, numbers), target), block * 1.7)


def test_its_own_embedding_and_head_are_used_if_it_has_them(target):
    config = drafter_config()
    generator = np.random.default_rng(4)
    own = {
        name: generator.standard_normal((256, 64), dtype=np.float32)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    drafter = torch_drafter(
        config, drafter_numbers(config) | own, own_embedding=True, own_head=True
    )
    embedding, head = map(torch.from_numpy, own.values())
    tokens = torch.tensor([[7] + [255] * 7])
    assert torch.equal(block_of(drafter, target), embedding[tokens])
    rows = torch.ones(2, 64)
    assert_close(drafter.logits(rows, target), rows @ head.T, 1e-4)
    drafter.propose(7, None, context_of(drafter, 5))  # needs nothing of a target


def test_features_and_rows_of_another_dtype_are_cast_to_the_drafters(target):
    config = drafter_config()
    drafter = torch_drafter(config, drafter_numbers(config)).to(torch.bfloat16)
    context = context_of(drafter, 9)
    assert context[0][0].dtype == torch.bfloat16
    assert drafter.hidden(block_of(drafter, target), context).dtype == torch.bfloat16
    assert drafter.propose(7, target, context).probabilities.dtype == torch.float32


def test_a_new_drafter_has_no_uninitialised_numbers():
    from mlx_dflash2.torch.dflash2 import DFlash2Drafter

    for name, tensor in DFlash2Drafter(drafter_config()).state_dict().items():
        assert tensor.isfinite().all() and tensor.abs().max() < 10, name
