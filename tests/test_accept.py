"""The accept rules emit what plain decoding would, whatever the drafter proposes."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from chi_square import chi_square, upper_gamma
from tiny import drafter_config

from mlx_dflash2.accept import accept_greedy, accept_sampled, drafted_probability
from mlx_dflash2.drafter import Proposal
from mlx_dflash2.sampling import SamplingConfig, TokenRule, log_softmax
from mlx_dflash2.selector import CandidateSelector, top_candidates

DRAWS, VOCAB, SLOTS, NEWLINE = 20_000, 16, 2, 3
PROMPT = [4, 9, 4, 2]
TEMPERATURES = (0.7, 1.0, 1.5)
XTC = {"xtc_probability": 0.4, "xtc_threshold": 0.12}
PENALTIES = {
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 1.5, 6: -2.0},
}
FILTERS = {
    "none": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "xtc": XTC,
    "penalties": PENALTIES,
    "all": {"top_p": 0.95, "top_k": 6, "min_p": 0.02} | XTC | PENALTIES,
}
DISTANCES = ("far", "near", "equal")
TESTS = len(TEMPERATURES) * len(FILTERS) * len(DISTANCES) * 6 + 8
LEVEL = 0.001 / TESTS


@cache
def target_logits() -> np.ndarray:
    """Logits after each last token. Shape: (V, V)."""
    table = np.random.default_rng(0).standard_normal((VOCAB, VOCAB))
    return (1.6 * table).astype(np.float32)


@cache
def target_rows(name: str, temperature: float, length: int) -> np.ndarray:
    """p after every drafted prefix of this length, without XTC's cut and with it.

    By the production rule: penalties see the prompt and the prefix.

    Returns:
        Shape: (V ** length, 2, V).
    """
    config = SamplingConfig(temperature=temperature, **FILTERS[name])
    config.check(VOCAB)
    rule = TokenRule(config, xtc_special_tokens=[NEWLINE])
    logits = mx.array(target_logits())
    made = []
    for prefix in product(range(VOCAB), repeat=length):
        history = PROMPT + list(prefix)
        row = rule.processed(logits[history[-1]][None], mx.array(history))
        row = log_softmax(row)
        made.append([rule.probabilities(row, mx.array(coin)) for coin in (0.99, 0.0)])
    return np.array(mx.stack([mx.stack(pair) for pair in made]))


@dataclass(frozen=True)
class Drafts:
    """Candidates and q after every prefix of one length. Shapes: (V ** length, K)."""

    candidates: np.ndarray
    q: np.ndarray

    def dense(self) -> np.ndarray:
        """Shape: (V ** length, V)."""
        table = np.zeros((len(self.q), VOCAB))
        np.put_along_axis(table, self.candidates, self.q.astype(np.float64), axis=1)
        return table


def drafts(distance: str, p: np.ndarray, seed: int) -> Drafts:
    """q far from, near or equal to p. `p` has shape (prefixes, V)."""
    rng = np.random.default_rng(seed)
    order = np.argsort(-p, axis=1, kind="stable")
    if distance == "equal":
        candidates = rng.permuted(order, axis=1)
        return Drafts(candidates, np.take_along_axis(p, candidates, axis=1))
    keep = [0, 1, 2, 3, 4, 8] if distance == "near" else [0, 2, 5, 10, 13, 15]
    candidates = rng.permuted(order[:, keep], axis=1)
    q = np.take_along_axis(p, candidates, axis=1) + 0.03
    q = q * np.exp(0.3 * rng.standard_normal(q.shape))
    if distance == "far":
        q = 1 / q
    return Drafts(candidates, (q / q.sum(1, keepdims=True)).astype(np.float32))


def draw_drafts(drafts: Drafts, prefix: np.ndarray, key: mx.array) -> np.ndarray:
    """One token after each prefix. Shape: (N,)."""
    q = mx.array(drafts.q.astype(np.float32)[prefix])
    index = np.array(mx.random.categorical(mx.log(q), key=key))
    return drafts.candidates[prefix, index]


@dataclass(frozen=True)
class Outcome:
    """What DRAWS independent cycles drafted and emitted."""

    first: np.ndarray
    second: np.ndarray
    accepted: np.ndarray
    bonus: np.ndarray

    def emitted(self, slot: int) -> np.ndarray:
        """Of the cycles that reached this slot. Shape: (reached,)."""
        reached = self.accepted >= slot
        kept = (self.first, self.second, self.bonus)[slot]
        return np.where(self.accepted > slot, kept, self.bonus)[reached]


def run_cycles(
    p: list[np.ndarray], q: list[Drafts], xtc_probability: float, seed: int
) -> Outcome:
    """Draft, toss a coin a row, and judge in one call of the production rule."""
    keys = mx.random.split(mx.random.key(seed), 5)
    start = np.zeros(DRAWS, np.int64)
    first = draw_drafts(q[0], start, keys[0])
    second = draw_drafts(q[1], first, keys[1])
    prefixes = [start, first, first * VOCAB + second]
    coins = np.array(mx.random.uniform(shape=(DRAWS, SLOTS + 1), key=keys[2]))
    cut = (coins <= xtc_probability).astype(np.int64)
    rows = [p[i][prefix, cut[:, i]] for i, prefix in enumerate(prefixes)]
    proposal = Proposal(
        mx.array(np.stack([first, second], 1).astype(np.int32)),
        mx.array(np.stack([q[i].candidates[prefixes[i]] for i in (0, 1)], 1)),
        mx.array(np.stack([q[i].q[prefixes[i]] for i in (0, 1)], 1).astype(np.float32)),
    )
    uniforms = mx.random.uniform(shape=(DRAWS, SLOTS), key=keys[3])
    verdict = accept_sampled(proposal, mx.array(np.stack(rows, 1)), uniforms, keys[4])
    return Outcome(first, second, np.array(verdict.accepted), np.array(verdict.bonus))


def table(prefix: np.ndarray, value: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """How often each value followed each prefix."""
    counts = np.zeros(shape, np.int64)
    np.add.at(counts, (prefix, value.astype(np.int64)), 1)
    return counts


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", FILTERS)
def test_every_emitted_token_follows_the_target(name, temperature, distance):
    """Slots after the first are judged among the cycles that reached them."""
    p = [target_rows(name, temperature, length) for length in range(3)]
    q = [drafts(distance, p[i][:, 0], seed=i) for i in (0, 1)]
    xtc = FILTERS[name].get("xtc_probability", 0.0)
    seed = list(FILTERS).index(name) * 100 + int(temperature * 10)
    out = run_cycles(p, q, xtc, seed)
    weights = np.array([1 - xtc, xtc])
    mixed = [np.einsum("c,pcv->pv", weights, rows.astype(np.float64)) for rows in p]
    reached = [out.accepted >= slot for slot in range(3)]
    prefixes = [np.zeros(DRAWS, int), out.first, out.first * VOCAB + out.second]
    results = {}
    for slot in range(3):
        counts = table(
            prefixes[slot][reached[slot]], out.emitted(slot), mixed[slot].shape
        )
        results[f"emitted {slot}"] = chi_square(counts, mixed[slot])
    for slot in range(2):
        here = reached[slot]
        kept = table(prefixes[slot][here], out.accepted[here] > slot, (len(p[slot]), 2))
        dense = q[slot].dense()[:, None]
        rate = np.minimum(p[slot], dense).sum(-1) @ weights
        rate = np.where(rate > 1 - 1e-6, 1, rate)  # p and q sum to 1 in float32 only
        results[f"accepted {slot}"] = chi_square(kept, np.stack([1 - rate, rate], 1))
    rejected = out.bonus[out.accepted == 0]
    residual = weights @ np.maximum(p[0][0] - q[0].dense(), 0)
    if len(rejected):
        counts = np.bincount(rejected, minlength=VOCAB)
        results["residual"] = chi_square(counts, residual)
    assert min(results.values()) > LEVEL, results
    assert (len(rejected) == 0) == (distance == "equal" and not xtc)
    assert reached[2].sum() > (100 if distance == "far" else 1500)


@pytest.mark.parametrize("name", ["none", "all"])
def test_equal_distributions_reject_nothing_and_give_no_nan(name):
    """Also where XTC is on: q is then the distribution after the same coin."""
    for cut in (0, 1):
        p = [target_rows(name, 1.0, length)[:, [cut, cut]] for length in range(3)]
        q = [drafts("equal", p[i][:, 0], seed=i) for i in (0, 1)]
        out = run_cycles(p, q, 0.5, seed=cut)
        assert (out.accepted == SLOTS).all()
        assert ((out.bonus >= 0) & (out.bonus < VOCAB)).all()


def single(tokens, candidates, q) -> Proposal:
    """Independent proposals of one token each."""
    return Proposal(
        mx.array(tokens, mx.int32)[:, None],
        mx.array(candidates, mx.int32)[:, None],
        mx.array(q, mx.float32)[:, None],
    )


@pytest.mark.parametrize("token", range(4))
def test_a_single_candidate_is_a_one_hot_q(token):
    """Kept with its own probability, else replaced by one of the others."""
    p = np.array([0.5, 0.3, 0.2, 0.0])
    ones = np.ones((DRAWS, 1))
    proposal = single([token] * DRAWS, token * ones, ones)
    rows = mx.broadcast_to(mx.array(p, mx.float32), (DRAWS, 2, 4))
    keys = mx.random.split(mx.random.key(token), 2)
    uniforms = mx.random.uniform(shape=(DRAWS, 1), key=keys[0])
    verdict = accept_sampled(proposal, rows, uniforms, keys[1])
    kept, bonus = np.array(verdict.accepted) == 1, np.array(verdict.bonus)
    emitted = np.bincount(np.where(kept, token, bonus), minlength=4)
    assert chi_square(emitted, p) > LEVEL
    assert not (bonus[~kept] == token).any()
    assert kept.sum() == emitted[token]


def test_a_token_without_a_chance_is_never_kept_even_at_uniform_0():
    rows = mx.array([[[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]]])
    verdicts = [
        accept_sampled(
            single([token], [[0, 1]], [[0.5, 0.5]]),
            rows,
            mx.zeros((1, 1)),
            mx.random.key(0),
        )
        for token in (0, 1)
    ]
    assert [verdict.accepted.item() for verdict in verdicts] == [0, 1]
    assert verdicts[0].bonus.item() == 2  # the only token that p gives more than q
    assert verdicts[1].bonus.item() == 0


def test_where_nothing_is_left_of_p_minus_q_the_bonus_comes_from_p():
    """Rounding can reject a draft though p is nowhere above q."""
    step = 2.0**-25
    p = mx.array([[[0.5 - step, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    p = mx.broadcast_to(p, (4000, 2, 3))
    proposal = single([0] * 4000, [[0, 1]] * 4000, [[0.5, 0.5]] * 4000)
    uniforms = mx.full((4000, 1), 1 - 2.0**-24)
    verdict = accept_sampled(proposal, p, uniforms, mx.random.key(0))
    assert verdict.accepted.sum().item() == 0
    counts = np.bincount(np.array(verdict.bonus), minlength=3)
    assert chi_square(counts, [0.5, 0.5, 0.0]) > LEVEL


def test_the_first_rejection_ends_the_prefix():
    """A later draft that would stand by itself is dropped with its prefix."""
    p = mx.array([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    proposal = Proposal(mx.array([0, 0]), mx.array([[0], [0]]), mx.array([[1.0], [1]]))
    verdict = accept_sampled(proposal, p, mx.array([0.5, 0.5]), mx.random.key(0))
    assert (verdict.accepted.item(), verdict.bonus.item()) == (0, 1)


@pytest.mark.parametrize("accepted", range(4))
def test_greedy_keeps_the_prefix_the_target_chose(accepted):
    """Two cycles at once: one is cut after `accepted`, the other stands whole."""
    chosen = np.array([[5, 6, 7, 8], [1, 2, 3, 4]])
    drafted = chosen[:, :3].copy()
    drafted[0, accepted:] = 0
    verdict = accept_greedy(mx.array(drafted), mx.array(chosen))
    assert verdict.accepted.tolist() == [accepted, 3]
    assert verdict.bonus.tolist() == [chosen[0, accepted], 4]


RUN = 200  # slots a selector walks in one proposal


def selector_and_rows() -> tuple[CandidateSelector, mx.array, mx.array, mx.array]:
    """A selector whose pairwise part moves scores by less than a bfloat16 step."""
    rng = np.random.default_rng(5)
    config = drafter_config(vocab_size=VOCAB, mask_token_id=VOCAB - 1)
    selector = CandidateSelector(config)
    shape = selector.successor_codebook.shape
    for name in ("predecessor_codebook", "successor_codebook"):
        codes = rng.uniform(-0.15, 0.15, shape)
        setattr(selector, name, mx.array(codes, mx.float32))
    weight = rng.standard_normal(selector.hidden_projection.weight.shape) / 8
    selector.hidden_projection.weight = mx.array(weight, mx.float32)
    slots = RUN
    hidden = mx.broadcast_to(
        mx.array(rng.standard_normal(config.hidden_size), mx.float32),
        (slots, config.hidden_size),
    )
    logits = np.full(VOCAB, 10.0)
    logits[[3, 7, 8, 12]] = 20.0  # bfloat16 steps are 0.125 here
    row = mx.array(logits, mx.float32).astype(mx.bfloat16)
    candidates, scores = top_candidates(mx.broadcast_to(row, (slots, VOCAB)), 4)
    return selector, hidden, candidates, scores


def test_drafts_that_tie_in_bfloat16_come_from_the_q_that_is_returned():
    """And they are judged by that q: the emitted tokens follow p."""
    selector, hidden, candidates, logits = selector_and_rows()
    drawn = []
    for seed in range(4000 // RUN):
        proposal = selector.propose(
            hidden,
            mx.array([3]),
            candidates,
            logits,
            temperature=0.1,
            key=mx.random.key(seed),
        )
        drawn.append([np.array(proposal.tokens), np.array(proposal.probabilities)])
    tokens = np.concatenate([drawn[i][0] for i in range(len(drawn))])
    q = np.concatenate([drawn[i][1] for i in range(len(drawn))])
    ids = np.array(candidates[0])
    assert ids.tolist() == [3, 7, 8, 12]
    index = np.searchsorted(ids, tokens)
    before = np.roll(index.reshape(-1, RUN), 1, axis=1)
    before[:, 0] = 0  # the anchor is candidate 0
    before = before.ravel()
    weights = np.array(selector.hidden_projection(hidden[:1]))[0]
    after = np.array(selector.successor_codebook)[ids]
    pairs = (np.array(selector.predecessor_codebook)[ids] * weights) @ after.T
    assert 0.02 < np.ptp(pairs) < 0.125
    expected = np.exp(pairs / 0.1)
    expected /= expected.sum(1, keepdims=True)
    np.testing.assert_allclose(q, expected[before], rtol=1e-5)
    assert chi_square(table(before, index, (4, 4)), expected) > LEVEL

    p = np.array([0.1, 0.2, 0.3, 0.4])
    rows = np.zeros((4000, 2, VOCAB), np.float32)
    rows[:, :, ids] = p
    proposal = single(tokens, np.tile(ids, (4000, 1)), q)
    np.testing.assert_array_equal(
        drafted_probability(proposal)[:, 0], q[np.arange(4000), index]
    )
    keys = mx.random.split(mx.random.key(1), 2)
    uniforms = mx.random.uniform(shape=(4000, 1), key=keys[0])
    verdict = accept_sampled(proposal, mx.array(rows), uniforms, keys[1])
    kept = np.array(verdict.accepted) == 1
    emitted = np.where(kept, tokens, np.array(verdict.bonus))
    assert chi_square(np.bincount(emitted, minlength=VOCAB), rows[0, 0]) > LEVEL


def test_the_chi_square_agrees_with_known_values():
    """Survival functions at textbook quantiles; two of them have closed forms."""
    known = {(1, 3.841459): 0.05, (4, 18.466827): 0.001, (10, 3.940299): 0.95}
    for (freedom, statistic), expected in known.items():
        assert abs(upper_gamma(freedom / 2, statistic / 2) - expected) < 1e-6
    for x in (0.1, 1.0, 7.5, 40.0):
        assert abs(upper_gamma(1, x) / np.exp(-x) - 1) < 1e-9
        assert abs(upper_gamma(2, x) / (np.exp(-x) * (1 + x)) - 1) < 1e-9
    counts = np.array([[30, 50, 20], [10, 10, 0]])
    chances = np.array([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0]])
    statistic = 25 / 25 + 25 / 25  # the second sample adds 0 and one degree
    assert abs(chi_square(counts, chances) - upper_gamma(1.5, statistic / 2)) < 1e-12
    with pytest.raises(AssertionError, match=r"without a chance: \[\[0, 1\]\]"):
        chi_square([5, 1], [1.0, 0.0])


def test_the_chi_square_notices_a_small_bias():
    """20,000 draws whose chances are off by a tenth of the largest."""
    rng = np.random.default_rng(0)
    chances = np.array([0.4, 0.3, 0.2, 0.1])
    fair = rng.multinomial(DRAWS, chances)
    biased = rng.multinomial(DRAWS, [0.44, 0.27, 0.19, 0.1])
    assert chi_square(fair, chances) > 0.001
    assert chi_square(biased, chances) < LEVEL
