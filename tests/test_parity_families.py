"""DFlash and DSpark, torch against MLX, float32: rows, paths, chances, loops."""

import mlx.core as mx
import numpy as np
import pytest
from test_parity_decode import counts_of, mlx_cycles, recorded
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
)

from mlx_dflash2.decode import Decoding
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.names import expected_shapes
from mlx_dflash2.sampling import SamplingConfig, TokenRule

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from mlx_dflash2.torch import sampling as torch_sampling  # noqa: E402
from mlx_dflash2.torch.decode import decode  # noqa: E402

HIDDEN = 2e-5  # post-norm rows
SURE = 1e-5  # confidence
FAR = 2e-4  # rows at positions up to 2,000, whose angles the backends round apart
STEPS = [3, 1, 8, 2, 1, 1, 5, 8, 1, 4]  # rows appended between two blocks

LAYERS = pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
CAUSAL = pytest.mark.parametrize("causal", [None, False, True])
TWO = pytest.mark.parametrize("family", ["dflash", "dspark"])


@pytest.fixture(scope="module")
def targets():
    return torch_target(), mlx_target()


class Driven:
    """One drafter in both backends, fed the same features."""

    def __init__(self, config, targets, **own):
        self.config, self.targets = config, targets
        numbers = drafter_numbers(config, seed=4)
        self.reference = torch_drafter(config, numbers, **own)
        self.ours = mlx_drafter(config, numbers, **own)
        self.contexts = self.reference.make_context(), self.ours.make_context()
        self.features = features_of(config, 2100, seed=4)
        self.length = 0

    def append(self, rows: int) -> None:
        new = self.features[:, self.length : self.length + rows]
        self.reference.extend(torch.from_numpy(new), self.contexts[0])
        self.ours.extend(mx.array(new), self.contexts[1])
        self.length += rows

    def rows(self, anchor: int) -> tuple[torch.Tensor, mx.array]:
        """One block's rows after the final norm, in both backends."""
        block = self.reference.embed_block(anchor, self.targets[0])
        found = self.ours.hidden(mx.array(block.numpy()), self.contexts[1])
        return self.reference.hidden(block, self.contexts[0]), found

    def paths(self, anchor: int, **options) -> tuple[list[int], list[int]]:
        """One block's greedy tokens, in both backends."""
        return tuple(
            drafter.propose(anchor, target, context, **options).tokens.tolist()
            for drafter, target, context in zip(
                (self.reference, self.ours), self.targets, self.contexts, strict=True
            )
        )

    def compare(self, anchor: int, tolerance: float = HIDDEN) -> list[int]:
        where = f"context {self.length}:"
        expected, found = self.rows(anchor)
        assert_close(found, expected, tolerance, what=where)
        path, drafted = self.paths(anchor)
        assert drafted == path, where
        assert len(path) == self.config.num_draft_tokens
        return path

    def confidence(self, anchor: int) -> tuple[np.ndarray, np.ndarray]:
        """How sure each slot of the greedy path is, in both backends."""
        expected, found = self.rows(anchor)
        before = [anchor, *self.paths(anchor)[0][:-1]]
        first, sure = self.config.first_row, ([], [])
        for slot, token in enumerate(before):
            row = self.reference.markov_head.markov_w1(torch.tensor(token))
            hidden = expected[0, first + slot]
            sure[0].append(self.reference.confidence(hidden, row).item())
            row = self.ours.markov_head.markov_w1(mx.array([token]))
            hidden = found[0, first + slot][None]
            sure[1].append(self.ours.confidence(hidden, row).item())
        return tuple(map(np.array, sure))


@TWO
@LAYERS
@CAUSAL
@pytest.mark.parametrize("start", [5, 30])
def test_contexts_grown_by_every_size(targets, family, layers, causal, start):
    """From below and above the window of twelve, single rows included."""
    driven = Driven(drafter_config(layers, family, is_causal=causal), targets)
    driven.append(start)
    paths = [driven.compare(anchor=start)]
    for anchor, rows in enumerate(STEPS, 40):
        driven.append(rows)
        paths.append(driven.compare(anchor))
    assert len(set(map(tuple, paths))) > len(paths) - 3


@TWO
@pytest.mark.parametrize("row", [0, 1])
def test_either_row_may_be_the_first_to_predict(targets, family, row):
    config = drafter_config("full", family, logits_start=row)
    driven = Driven(config, targets)
    for anchor, rows in enumerate([20, 1, 8, 3]):
        driven.append(rows)
        path = driven.compare(anchor)
        assert len(path) == config.block_size - row


def test_the_first_row_moves_what_a_slot_reads(targets):
    """DFlash decides rows by themselves, so the later start drops the first one."""
    early, late = (
        Driven(drafter_config("full", "dflash", logits_start=row), targets)
        for row in (0, 1)
    )
    for driven in (early, late):
        driven.append(20)
    for anchor in range(5):
        assert early.compare(anchor)[1:] == late.compare(anchor)


@LAYERS
@CAUSAL
def test_confidence_is_equal(targets, layers, causal):
    driven = Driven(drafter_config(layers, "dspark", is_causal=causal), targets)
    seen = []
    for anchor, rows in enumerate([20, 1, 8, 3]):
        driven.append(rows)
        expected, found = driven.confidence(anchor)
        assert_close(found, expected, SURE)
        seen += expected.tolist()
    assert min(seen) < 0.4 and max(seen) > 0.6


@pytest.mark.parametrize("sees_token", [False, True])
def test_a_proposal_is_cut_before_the_first_unsure_slot(targets, sees_token):
    config = drafter_config(
        "full", "dspark", confidence_head_with_markov=sees_token, block_size=7
    )
    driven, lengths = Driven(config, targets), set()
    driven.append(20)
    for anchor in range(30):
        sure, _ = driven.confidence(anchor)
        whole = driven.paths(anchor)[0]
        for threshold in (0.3, 0.5, 0.75):
            assert abs(sure - threshold).min() > 2 * SURE
            below = np.flatnonzero(sure < threshold)
            kept = int(below[0]) if below.size else len(sure)
            cut = driven.paths(anchor, confidence_threshold=threshold)
            assert cut == (whole[:kept], whole[:kept])
            lengths.add(kept)
    assert {0, 1, 2, 3} <= lengths


def test_the_confidence_of_a_slot_may_not_see_its_token(targets):
    """Another last token of the path leaves every earlier decision alone."""
    driven = Driven(drafter_config("full", "dspark"), targets)
    driven.append(20)
    before = driven.confidence(3)[1]
    path = driven.paths(3)[0]
    table = driven.ours.markov_head.markov_w1.weight
    unseen = path[-1] if path[-1] not in [3, *path[:-1]] else None
    assert unseen is not None
    table[unseen] = table[unseen] + 5.0
    assert (driven.confidence(3)[1] == before).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_cut_draws_what_the_whole_proposal_begins_with(targets, temperature):
    """With one key: the cut changes how many tokens there are, not which."""
    driven = Driven(drafter_config("full", "dspark"), targets)
    driven.append(20)
    lengths = set()
    for anchor in range(20):
        options = {"temperature": temperature, "key": mx.random.key(anchor)}
        whole, cut = (
            driven.ours.propose(
                anchor,
                targets[1],
                driven.contexts[1],
                confidence_threshold=threshold,
                **options,
            )
            for threshold in (0.0, 0.5)
        )
        kept = len(cut.tokens)
        assert cut.tokens.tolist() == whole.tokens.tolist()[:kept]
        if temperature:
            assert mx.array_equal(cut.probabilities, whole.probabilities[:kept])
        lengths.add(kept)
    assert len(lengths) > 2


def test_markov_scores_are_added_to_the_logits_by_hand(targets):
    """q of every slot at temperature 1, along the path that was drawn."""
    driven = Driven(drafter_config("full", "dspark"), targets)
    driven.append(20)
    proposal = driven.ours.propose(
        7, targets[1], driven.contexts[1], temperature=1.0, key=mx.random.key(0)
    )
    w1, w2 = (
        np.array(getattr(driven.ours.markov_head, name).weight)
        for name in ("markov_w1", "markov_w2")
    )
    logits = np.array(targets[1].head(driven.rows(7)[1][0]))
    before = [7, *proposal.tokens.tolist()[:-1]]
    for slot, token in enumerate(before):
        scores = logits[slot] + w2 @ w1[token]
        q = np.exp(scores - scores.max())
        assert_close(proposal.probabilities[slot], q / q.sum(), 1e-5)


def test_dflash_rows_are_drawn_by_themselves(targets):
    """q of every slot at temperature 0.7 is the softmax of its row."""
    driven = Driven(drafter_config("full", "dflash"), targets)
    driven.append(20)
    proposal = driven.ours.propose(
        7, targets[1], driven.contexts[1], temperature=0.7, key=mx.random.key(0)
    )
    logits = np.array(targets[1].head(driven.rows(7)[1][0, 1:])) / 0.7
    q = np.exp(logits - logits.max(axis=-1, keepdims=True))
    assert_close(proposal.probabilities, q / q.sum(axis=-1, keepdims=True), 1e-5)


@TWO
def test_multiplier_softcap_and_embedding_scale(targets, family):
    transforms = {
        "final_logit_softcapping": 5.0,
        "output_multiplier": 0.3,
        "input_embedding_scale": 1.7,
    }
    driven = Driven(drafter_config("full", family, **transforms), targets)
    plain = Driven(drafter_config("full", family), targets)
    paths = []
    for anchor, rows in enumerate([20, 1, 8]):
        for each in (driven, plain):
            each.append(rows)
            paths.append(each.compare(anchor))
    assert paths[::2] != paths[1::2]


@TWO
def test_its_own_embedding_and_head(targets, family):
    config = drafter_config("full", family)
    driven = Driven(config, targets)
    generator = np.random.default_rng(4)
    numbers = drafter_numbers(config, seed=4) | {
        name: generator.standard_normal((256, 64), dtype=np.float32)
        for name in ("embed_tokens.weight", "lm_head.weight")
    }
    own = {"own_embedding": True, "own_head": True}
    borrowed = driven.reference, driven.ours
    driven.reference = torch_drafter(config, numbers, **own)
    driven.ours = mlx_drafter(config, numbers, **own)
    driven.append(20)
    own_path = driven.compare(7)
    driven.reference, driven.ours = borrowed
    assert driven.compare(7) != own_path


TENSORS = [
    (f, name)
    for f in ("dflash", "dspark")
    for name in expected_shapes(drafter_config("mixed", f))
]


@pytest.mark.parametrize(("family", "name"), TENSORS)
def test_every_tensor_matters_to_both(targets, family, name):
    config = drafter_config("mixed", family)
    driven, changed = Driven(config, targets), Driven(config, targets)
    numbers = drafter_numbers(config, seed=4)
    noise = np.random.default_rng(5).standard_normal(numbers[name].shape)
    numbers[name] = numbers[name] + 0.5 * noise.astype(np.float32)
    changed.reference = torch_drafter(config, numbers)
    changed.ours = mlx_drafter(config, numbers)
    drafts = []
    for each in (driven, changed):
        each.append(20)
        options = {"confidence_threshold": 0.5} if family == "dspark" else {}
        both = [each.paths(anchor, **options) for anchor in range(6)]
        assert all(one == other for one, other in both)
        drafts.append(both)
    assert drafts[0] != drafts[1]


# Rotary positions


YARN = {
    "rope_theta": 1e4,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
@pytest.mark.parametrize("neox", [True, False])
def test_yarn_stretches_positions_alike(targets, family, neox):
    """At every depth up to 2,000, where the plain rope is far away."""
    yarn = drafter_config("full", family, rope_parameters=YARN, is_neox_style=neox)
    plain = drafter_config(
        "full", family, rope_parameters={"rope_theta": 1e4}, is_neox_style=neox
    )
    driven, other = Driven(yarn, targets), Driven(plain, targets)
    for anchor, rows in enumerate([4, 500, 8, 1000, 1, 480]):
        for each in (driven, other):
            each.append(rows)
        tolerance = FAR * (10 if family == "dflash2" else 1)
        expected, found = driven.rows(anchor)
        assert_close(found, expected, tolerance, what=f"context {driven.length}:")
        assert np.abs(expected.numpy() - other.rows(anchor)[0].numpy()).max() > 0.1


def test_yarn_is_transformers_yarn():
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from mlx_dflash2.torch.rope import rope_frequencies

    for changes in ({}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"factor": 8.0}):
        rope = YARN | changes
        config = drafter_config("full", "dspark", rope_parameters=rope)
        found, scale = rope_frequencies(config, torch.device("cpu"))
        theirs = Qwen3Config(head_dim=16, rope_parameters=rope, hidden_size=64)
        expected, theirs_scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, "cpu")
        assert_close(found, expected, 1e-7)
        assert abs(scale - theirs_scale) < 1e-9


# Loops


VOCAB = 16  # so few tokens that a random drafter is right now and then
PROMPT = [15, 10, 10, 14, 9, 12, 13, 3, 0]
SMALL = {"vocab_size": VOCAB, "mask_token_id": 15}


@pytest.fixture(scope="module")
def small():
    config = TARGET | {"vocab_size": VOCAB}
    return torch_target(config), mlx_target(config)


def both(layers, family, **changes):
    config = drafter_config(layers, family, **SMALL | changes)
    numbers = drafter_numbers(config)
    return torch_drafter(config, numbers), mlx_drafter(config, numbers)


@TWO
@LAYERS
@CAUSAL
def test_random_pairs_draft_accept_and_emit_alike(small, family, layers, causal):
    """Thirty tokens; contexts pass the window of twelve, most appends are one row."""
    drafters = both(layers, family, is_causal=causal)
    expected_drafts, drafts = map(recorded, drafters)
    expected = decode(small[0], drafters[0], PROMPT, max_tokens=30, eos=())
    tokens, counts = mlx_cycles(small[1], drafters[1], PROMPT, max_tokens=30, eos=())
    assert tokens == expected.tokens
    assert counts == counts_of(expected.stats)
    for cycle, (one, other) in enumerate(zip(drafts, expected_drafts, strict=True)):
        assert one == other[: len(one)], f"cycle {cycle}"
    assert tokens == decode(small[0], None, PROMPT, max_tokens=30, eos=()).tokens


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_they_cut_alike(small, threshold):
    drafters = both("mixed", "dspark", block_size=4)
    expected = decode(
        small[0],
        drafters[0],
        PROMPT,
        max_tokens=30,
        eos=(),
        confidence_threshold=threshold,
    )
    rule = TokenRule(SamplingConfig())
    loop = Decoding(small[1], drafters[1], rule, seed=0, confidence_threshold=threshold)
    emissions = list(
        loop.run(PROMPT, max_tokens=30, eos=frozenset(), num_draft_tokens=4)
    )
    tokens = [token for emission in emissions for token in emission.tokens]
    counts = [(e.drafted, e.accepted, len(e.tokens)) for e in emissions[1:]]
    assert tuple(tokens) == expected.tokens
    assert counts == counts_of(expected.stats)
    drafted = expected.stats.drafted_per_cycle
    assert min(drafted) == 0 and len(set(drafted)) > 2
    assert tuple(tokens) == decode(small[0], None, PROMPT, max_tokens=30, eos=()).tokens


@pytest.mark.parametrize(
    ("family", "option", "match"),
    [
        ("dflash", {"confidence_threshold": 0.5}, "DFlash drafter has no confidence"),
        ("dflash2", {"confidence_threshold": 0.5}, "DFlash 2 drafter has no confid"),
        ("dspark", {"confidence_threshold": 1.5}, "is 1.5, expected a number from 0"),
        ("dspark", {"draft_sampling": "best"}, "draft_sampling is 'best', expected"),
    ],
)
def test_torch_refuses_what_a_drafter_cannot_do(small, family, option, match):
    drafter, _ = both("full", family)
    with pytest.raises(DFlash2Error, match=match):
        decode(small[0], drafter, PROMPT, max_tokens=4, **option)


def test_a_drafter_without_a_confidence_head_is_never_cut(small):
    drafter, _ = both("full", "dspark", enable_confidence_head=False)
    assert decode(small[0], drafter, PROMPT, max_tokens=8, eos=()).stats.drafted
    with pytest.raises(DFlash2Error, match="DSpark drafter has no confidence head"):
        decode(small[0], drafter, PROMPT, max_tokens=8, confidence_threshold=0.5)


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
@pytest.mark.parametrize("way", ["sample", "argmax"])
def test_torch_drafts_by_drawing_or_by_the_best(small, family, way):
    """Drawn q is spread out, the best token's is one-hot; the family has a default."""
    drafter, _ = both("full", family)
    proposals, propose = [], drafter.propose

    def record(*args, **options):
        proposals.append(propose(*args, **options))
        return proposals[-1]

    object.__setattr__(drafter, "propose", record)
    sampling = torch_sampling.SamplingConfig(temperature=1.0, seed=3)
    run = {"max_tokens": 12, "eos": (), "sampling": sampling}
    decode(small[0], drafter, PROMPT, draft_sampling=way, **run)
    largest = [proposal.probabilities.max().item() for proposal in proposals]
    assert (min(largest) == 1.0) if way == "argmax" else (min(largest) < 1.0)
    tokens = [proposal.tokens.tolist() for proposal in proposals]
    proposals.clear()
    decode(small[0], drafter, PROMPT, **run)
    default = "argmax" if family == "dflash" else "sample"
    assert (tokens == [p.tokens.tolist() for p in proposals]) == (way == default)
