"""The whole drafter, torch against MLX, float32, over growing contexts."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import (
    TARGET,
    assert_close,
    drafter_config,
    drafter_numbers,
    features_of,
    mlx_drafter,
    mlx_target,
    torch_drafter,
    torch_target,
    with_identity_convs,
)

from mlx_dflash2.names import expected_shapes

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

HIDDEN = 2e-4  # post-norm rows; a wrong mask or position gives gaps above 1
SEED = 4  # no two best scores nearer than 1e-3: rounding must not decide a path
STEPS = [3, 1, 8, 2, 1, 1, 5, 8, 1, 4, 6, 7, 9]  # rows appended between two blocks

GRID = [
    (kind, causal)
    for kind in ("full", "sliding", "mixed")
    for causal in (None, False, True)
]


@pytest.fixture(scope="module")
def targets():
    return torch_target(), mlx_target()


class Driven:
    """The same drafter in both backends, fed the same features."""

    def __init__(self, config, targets, numbers=None, **own):
        numbers = numbers or drafter_numbers(config)
        self.config = config
        self.targets = targets
        self.reference = torch_drafter(config, numbers, **own)
        self.ours = mlx_drafter(config, numbers, **own)
        self.contexts = self.reference.make_context(), self.ours.make_context()
        self.features = features_of(config, 120, SEED)
        self.length = 0

    def append(self, rows: int) -> None:
        new = self.features[:, self.length : self.length + rows]
        self.reference.extend(torch.from_numpy(new), self.contexts[0])
        self.ours.extend(mx.array(new), self.contexts[1])
        self.length += rows

    def compare(self, anchor: int) -> None:
        """Compare one block's hidden rows, and its greedy path."""
        where = f"context {self.length}:"
        block = self.reference.embed_block(anchor, self.targets[0])
        expected = self.reference.hidden(block, self.contexts[0])
        found = self.ours.hidden(mx.array(block.numpy()), self.contexts[1])
        assert_close(found, expected, HIDDEN, what=where)
        proposal = self.reference.propose(anchor, self.targets[0], self.contexts[0])
        drafted = self.ours.propose(anchor, self.targets[1], self.contexts[1])
        path = proposal.tokens.tolist()
        assert np.array(drafted.tokens).tolist() == path, where


@pytest.mark.parametrize(("kind", "causal"), GRID)
@pytest.mark.parametrize("start", [5, 11, 12, 30])
def test_contexts_of_every_length_grown_by_every_size(targets, kind, causal, start):
    """Shorter than, equal to and longer than the window of twelve."""
    driven = Driven(drafter_config(kind, is_causal=causal), targets)
    driven.append(start)
    driven.compare(anchor=start)
    for anchor, rows in enumerate(STEPS, 40):
        driven.append(rows)
        driven.compare(anchor)


@pytest.mark.parametrize("causal", [None, False, True])
def test_single_rows_on_a_saturated_window(targets, causal):
    """Twenty-five appends of one row: the oldest goes each time, never the newest."""
    driven = Driven(drafter_config("sliding", is_causal=causal), targets)
    driven.append(30)
    for anchor in range(25):
        driven.append(1)
        driven.compare(anchor)


@pytest.mark.parametrize("causal", [None, False, True])
def test_a_window_that_is_never_full(targets, causal):
    config = drafter_config("sliding", is_causal=causal, sliding_window=64)
    driven = Driven(config, targets)
    for anchor, rows in enumerate([5, 1, 8, 20]):
        driven.append(rows)
        driven.compare(anchor)


def test_contexts_far_longer_than_the_window_and_than_any_buffer(targets):
    """Large appends, then 330 rows in small ones: buffers grow and are compacted."""
    driven = Driven(drafter_config("mixed", is_causal=False), targets)
    driven.features = features_of(driven.config, 900, SEED)
    for anchor, rows in enumerate([250, 1, 240, 9, *[10, 9, 1, 8, 10, 6] * 8]):
        driven.append(rows)
        driven.compare(anchor)


@pytest.mark.parametrize("block", [2, 3, 5, 12])
def test_other_block_sizes(targets, block):
    """Up to a block as long as the window."""
    for causal in (False, True):
        config = drafter_config("sliding", is_causal=causal, block_size=block)
        driven = Driven(config, targets)
        for anchor, rows in enumerate([9, 1, 5, 1]):
            driven.append(rows)
            driven.compare(anchor)


def test_multiplier_softcap_and_embedding_scale(targets):
    config = drafter_config(
        final_logit_softcapping=5.0, output_multiplier=0.3, input_embedding_scale=1.7
    )
    driven = Driven(config, targets)
    plain = Driven(drafter_config(), targets)
    for each in (driven, plain):
        each.append(20)
    paths = []
    for anchor in range(12):
        driven.compare(anchor)
        for each in (driven, plain):
            proposal = each.ours.propose(anchor, targets[1], each.contexts[1])
            paths.append(np.array(proposal.tokens).tolist())
    assert paths[::2] != paths[1::2]


@pytest.mark.parametrize("field", ["output_multiplier", "final_logit_softcapping"])
def test_a_transform_reaches_q_once(targets, field):
    """q of the first slot at temperature 1, computed by hand from the raw logits."""
    value = {"output_multiplier": 0.3, "final_logit_softcapping": 5.0}[field]
    driven = Driven(drafter_config(**{field: value}), targets)
    driven.append(20)
    block = driven.reference.embed_block(7, targets[0])
    hidden = driven.reference.hidden(block, driven.contexts[0])[0, 1].numpy()
    logits = targets[0].head(torch.from_numpy(hidden)).numpy()
    ids = np.argsort(-logits, kind="stable")[:4]
    unary = logits[ids] * value if value < 1 else value * np.tanh(logits[ids] / value)
    selector = driven.reference.candidate_selector
    before = selector.predecessor_codebook[7].numpy()
    weights = selector.hidden_projection.weight.numpy() @ hidden
    scores = unary + (before * weights * selector.successor_codebook[ids].numpy()).sum(
        -1
    )
    q = np.exp(scores - scores.max())
    proposal = driven.ours.propose(
        7, targets[1], driven.contexts[1], temperature=1.0, key=mx.random.key(0)
    )
    assert np.array(proposal.candidates)[0].tolist() == ids.tolist()
    assert_close(proposal.probabilities[0], q / q.sum(), 2e-4)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_interleaved_rope(targets, kind):
    driven = Driven(drafter_config(kind, is_neox_style=False), targets)
    halves = Driven(drafter_config(kind), targets)
    for anchor, rows in enumerate([20, 1, 8]):
        driven.append(rows)
        driven.compare(anchor)
    halves.append(29)
    block = mx.array(driven.reference.embed_block(7, targets[0]).numpy())
    gap = mx.abs(
        driven.ours.hidden(block, driven.contexts[1])
        - halves.ours.hidden(block, halves.contexts[1])
    )
    assert gap.max().item() > 0.1


def test_its_own_embedding_and_head(targets):
    config = drafter_config()
    generator = np.random.default_rng(4)
    own = {
        name: generator.standard_normal((256, 64), dtype=np.float32)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    numbers = drafter_numbers(config) | own
    driven = Driven(config, targets, numbers, own_embedding=True, own_head=True)
    for anchor, rows in enumerate([20, 1, 8]):
        driven.append(rows)
        driven.compare(anchor)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_mlx_identity_kernels_make_it_the_network_without_convolutions(targets, kind):
    config = drafter_config(kind, is_causal=False)
    driven = Driven(config, targets, with_identity_convs(drafter_numbers(config)))
    driven.append(20)
    driven.compare(7)
    block = mx.array(driven.reference.embed_block(7, targets[0]).numpy())
    context = driven.contexts[1]
    convolved = driven.ours.hidden(block, context)
    for layer in driven.ours.layers:
        layer.attention_conv = layer.mlp_conv = Nothing()
    assert mx.abs(driven.ours.hidden(block, context) - convolved).max().item() == 0


class Nothing:
    """A convolution bypassed."""

    def prepare(self, rows):
        return rows, None

    def finish(self, rows, _):
        return rows


@pytest.mark.parametrize("name", expected_shapes(drafter_config("mixed")))
def test_every_tensor_matters_to_both(targets, name):
    config = drafter_config("mixed")
    numbers = drafter_numbers(config)
    noise = np.random.default_rng(5).standard_normal(numbers[name].shape)
    changed = numbers | {name: numbers[name] + 0.5 * noise.astype(np.float32)}
    before, after = (Driven(config, targets, each) for each in (numbers, changed))
    drafts = []
    for driven in (before, after):
        driven.append(20)
        for anchor in range(6):
            proposal = driven.ours.propose(anchor, targets[1], driven.contexts[1])
            drafts.append(np.array(proposal.tokens).tolist())
    assert drafts[:6] != drafts[6:]
    after.compare(7)


def test_a_wrong_rope_base_would_show(targets):
    """Theta 1e4 instead of 5e6, already at a few context rows."""
    driven = Driven(drafter_config(), targets)
    wrong = drafter_config(rope_parameters={"rope_theta": 1e4})
    other = mlx_drafter(wrong, drafter_numbers(wrong))
    driven.append(4)
    context = other.make_context()
    other.extend(mx.array(driven.features[:, :4]), context)
    block = driven.reference.embed_block(7, targets[0])
    expected = driven.reference.hidden(block, driven.contexts[0]).numpy()
    gap = np.abs(np.array(other.hidden(mx.array(block.numpy()), context)) - expected)
    assert float(gap.max()) > 0.1


def test_tied_targets_lend_embedding_and_head():
    config = TARGET | {"tie_word_embeddings": True}
    driven = Driven(drafter_config(), (torch_target(config), mlx_target(config)))
    for anchor, rows in enumerate([20, 1, 8]):
        driven.append(rows)
        driven.compare(anchor)


def test_in_bfloat16_neither_backend_is_further_from_float32(targets):
    """They round at different places; both errors stay of one size."""
    config = drafter_config()
    errors = {"torch": [], "mlx": []}
    for seed in range(3):
        numbers = drafter_numbers(config, seed)
        exact = Driven(config, targets, numbers)
        rounded = Driven(config, targets, numbers)
        rounded.reference.to(torch.bfloat16)
        rounded.ours.set_dtype(mx.bfloat16)
        rounded.contexts = (
            rounded.reference.make_context(),
            rounded.ours.make_context(),
        )
        for driven in (exact, rounded):
            driven.append(20)
        block = exact.reference.embed_block(7, targets[0])
        expected = exact.reference.hidden(block, exact.contexts[0])
        found = rounded.reference.hidden(block, rounded.contexts[0]).float()
        errors["torch"].append((found - expected).abs().mean().item())
        found = rounded.ours.hidden(mx.array(block.numpy()), rounded.contexts[1])
        gap = mx.abs(found.astype(mx.float32) - mx.array(expected.numpy()))
        errors["mlx"].append(gap.mean().item())
    means = [sum(each) / 3 for each in errors.values()]
    assert 0 < max(means) < 0.3, errors
    assert max(means) < 1.5 * min(means), errors
