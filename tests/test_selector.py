"""Candidates in a fixed order, scores in float32, a walk left to right."""

import mlx.core as mx
import numpy as np
import pytest
from tiny import assert_close, drafter_config, drafter_numbers

from mlx_dflash2.selector import CandidateSelector, top_candidates

SLOTS, COUNT = 7, 4


def in_order(logits, count):
    """Ids by value descending, then id ascending, by a sort that keeps order."""
    return np.argsort(-logits, axis=-1, kind="stable")[:, :count]


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("levels", [1, 3, 40, 10**6])
@pytest.mark.parametrize("vocab", [16, 500, 5000, 130560])
def test_equal_logits_come_by_id(vocab, levels, count):
    generator = np.random.default_rng(vocab + levels)
    logits = generator.integers(-levels, levels, (3, vocab)).astype(np.float32) / 8
    wanted = in_order(logits, count)
    ids, values = top_candidates(mx.array(logits), count)
    assert ids.dtype == mx.int32
    assert np.array_equal(np.array(ids), wanted)
    assert np.array_equal(np.array(values), np.take_along_axis(logits, wanted, -1))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("vocab", [300, 5000])
def test_half_precision_logits_tie_often_and_come_by_id(vocab, dtype):
    logits = mx.random.normal((3, vocab), key=mx.random.key(2)).astype(dtype)
    exact = np.array(logits.astype(mx.float32))
    ids, values = top_candidates(logits, 16)
    wanted = in_order(exact, 16)
    assert np.array_equal(np.array(ids), wanted)
    assert values.dtype == mx.float32
    assert np.array_equal(np.array(values), np.take_along_axis(exact, wanted, -1))


@pytest.mark.parametrize("vocab", [16, 500, 5000])
@pytest.mark.parametrize("finite", [0, 2, 9])
def test_excluded_tokens_come_last(vocab, finite):
    logits = np.full((2, vocab), -np.inf, np.float32)
    places = np.linspace(0, vocab - 1, finite).astype(int)
    logits[:, places] = np.arange(finite)
    logits[1] = logits[1, ::-1]
    ids, values = top_candidates(mx.array(logits), 8)
    wanted = in_order(logits, 8)
    assert np.array_equal(np.array(ids), wanted)
    assert np.array_equal(np.array(values), np.take_along_axis(logits, wanted, -1))


def test_zeros_of_both_signs_are_equal():
    logits = np.array([[-0.0, 0.0, -1.0, 0.0, -0.0]], np.float32)
    ids, _ = top_candidates(mx.array(logits), 4)
    assert ids.tolist() == [[0, 1, 3, 4]]


def make_selector(**changes):
    config = drafter_config(**changes)
    numbers = drafter_numbers(config)
    stem = "candidate_selector."
    held = {n[len(stem) :]: w for n, w in numbers.items() if n.startswith(stem)}
    selector = CandidateSelector(config)
    selector.load_weights([(n, mx.array(w)) for n, w in held.items()])
    return selector, held


def make_inputs(seed=0):
    generator = np.random.default_rng(seed)
    hidden = generator.standard_normal((SLOTS, 64), dtype=np.float32)
    logits = -np.sort(-generator.standard_normal((SLOTS, COUNT), dtype=np.float32))
    candidates = np.stack(
        [generator.permutation(256)[:COUNT] for _ in range(SLOTS)]
    ).astype(np.int32)
    return hidden, candidates, 3 * logits


def score(held, hidden, before, token, logit):
    """The formula, a product at a time."""
    total = float(logit)
    weights = held["hidden_projection.weight"] @ hidden
    for rank, weight in enumerate(weights):
        total += (
            float(held["predecessor_codebook"][before, rank])
            * float(weight)
            * float(held["successor_codebook"][token, rank])
        )
    return total


def propose(selector, hidden, candidates, logits, anchor=9, temperature=0.0, key=None):
    return selector.propose(
        mx.array(hidden),
        mx.array([anchor]),
        mx.array(candidates),
        mx.array(logits),
        temperature=temperature,
        key=key,
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_takes_the_best_score_after_each_choice(seed):
    selector, held = make_selector()
    hidden, candidates, logits = make_inputs(seed)
    before, path = 9, []
    for slot in range(SLOTS):
        scores = [
            score(held, hidden[slot], before, token, logit)
            for token, logit in zip(candidates[slot], logits[slot], strict=True)
        ]
        before = int(candidates[slot][int(np.argmax(scores))])
        path.append(before)
    proposal = propose(selector, hidden, candidates, logits)
    assert proposal.tokens.tolist() == path
    assert proposal.tokens.dtype == mx.int32
    assert proposal.probabilities is None


def test_swapped_codebooks_would_take_other_paths():
    selector, held = make_selector()
    paths = [propose(selector, *make_inputs(seed)).tokens.tolist() for seed in range(5)]
    selector.predecessor_codebook, selector.successor_codebook = (
        selector.successor_codebook,
        selector.predecessor_codebook,
    )
    others = [propose(selector, *make_inputs(s)).tokens.tolist() for s in range(5)]
    assert all(one != other for one, other in zip(paths, others, strict=True))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_sampled_walk_returns_the_distributions_it_drew_from(temperature):
    selector, held = make_selector()
    hidden, candidates, logits = make_inputs()
    for seed in range(5):
        key = mx.random.key(seed)
        options = {"temperature": temperature, "key": key}
        proposal = propose(selector, hidden, candidates, logits, **options)
        q = np.array(proposal.probabilities)
        assert q.dtype == np.float32 and q.shape == (SLOTS, COUNT)
        befores = [9, *proposal.tokens.tolist()]
        for slot in range(SLOTS):
            scores = np.array(
                [
                    score(held, hidden[slot], befores[slot], token, logit)
                    for token, logit in zip(candidates[slot], logits[slot], strict=True)
                ]
            )
            wanted = np.exp((scores - scores.max()) / temperature)
            assert_close(q[slot], wanted / wanted.sum(), 1e-5)
            assert befores[slot + 1] in candidates[slot]
        again = propose(selector, hidden, candidates, logits, **options)
        assert mx.array_equal(again.tokens, proposal.tokens)


def test_slots_are_drawn_independently_and_as_q_says():
    selector, _ = make_selector()
    selector.predecessor_codebook = mx.zeros_like(selector.predecessor_codebook)
    hidden, candidates, _ = make_inputs()
    logits = np.log(np.tile([[0.5, 0.25, 0.125, 0.125]], (SLOTS, 1))).astype("f")
    firsts, pairs, draws = np.zeros((SLOTS, COUNT)), np.zeros((COUNT, COUNT)), 600
    for seed in range(draws):
        key = mx.random.key(seed)
        drawn = propose(selector, hidden, candidates, logits, temperature=1, key=key)
        at = (np.array(drawn.tokens)[:, None] == candidates).argmax(-1)
        firsts[np.arange(SLOTS), at] += 1
        pairs[at[0], at[1]] += 1
    q = np.exp(logits[0])
    for observed, wanted in [
        *((counts, q * draws) for counts in firsts),
        (pairs.ravel(), np.outer(q, q).ravel() * draws),
    ]:
        chi = ((observed - wanted) ** 2 / wanted).sum()
        assert chi < 50  # far beyond the 0.001 quantile of 3 and of 15 degrees


def test_the_decision_is_made_in_float32():
    selector, _ = make_selector()
    selector.set_dtype(mx.bfloat16)
    selector.predecessor_codebook = mx.zeros_like(selector.predecessor_codebook)
    logits = np.tile(np.array([[20.0, 20.05, 19.0, 18.0]], np.float32), (SLOTS, 1))
    assert mx.array(20.0, mx.bfloat16) == mx.array(20.05, mx.bfloat16)
    hidden, candidates, _ = make_inputs()
    drawn = propose(selector, mx.array(hidden, mx.bfloat16), candidates, logits)
    assert drawn.tokens.tolist() == candidates[:, 1].tolist()


def test_a_pair_score_breaks_a_tie_of_bfloat16_logits():
    selector, _ = make_selector(selector_rank=1)
    selector.set_dtype(mx.bfloat16)
    selector.hidden_projection.weight = mx.ones((1, 64), mx.bfloat16) / 64
    selector.predecessor_codebook = mx.ones((256, 1), mx.bfloat16)
    codes = mx.zeros((256, 1), mx.bfloat16)
    codes[8] = 0.05
    selector.successor_codebook = codes
    candidates = mx.array([[7, 8], [7, 8]], mx.int32)
    proposal = selector.propose(
        mx.ones((2, 64), mx.bfloat16),
        mx.array([3]),
        candidates,
        mx.full((2, 2), 20.0),
        temperature=0.0,
        key=None,
    )
    assert proposal.tokens.tolist() == [8, 8]
