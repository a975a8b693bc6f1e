"""DFlash and DSpark at T > 0: q is what was drawn from, and the output is p exactly.

Drawn drafts carry a q over the whole vocabulary, the best ones a one-hot q; a DSpark
proposal may be cut where it is unsure. None of it may show in the output.
"""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from by_hand import probabilities
from chi_square import chi_square
from sampled_runs import PROMPT, SIZES, VOCAB, Count, RememberingTarget, small_target
from tiny import drafter_config, drafter_numbers, mlx_drafter

from mlx_dflash2.accept import accept_sampled
from mlx_dflash2.decode import Decoding
from mlx_dflash2.drafter import Draws
from mlx_dflash2.sampling import SamplingConfig, TokenRule

OPTIONS = {"temperature": 0.8, "top_p": 0.95, "top_k": 6}
LENGTH, SLOTS = 4, 3
DRAWS, RUNS = 20_000, 1_000
LEVEL = 1e-4  # of one p-value; the wrong rules below are far beneath it


def drafter_of(family: str):
    """A small drafter that decides for real; its rows are handed to it."""
    own = {"dspark": {"block_size": SLOTS, "markov_rank": 4}}
    config = drafter_config(
        "full",
        family,
        **SIZES,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_target_layers=2,
        mask_token_id=VOCAB - 1,
        target_layer_ids=[0],
        **own.get(family, {"block_size": SLOTS + 1}),
    )
    numbers = drafter_numbers(config, seed=3)
    for name in numbers:
        if name.startswith("markov_head."):
            numbers[name] = np.float32(0.6) * numbers[name]
    if family == "dspark":
        numbers["confidence_head.proj.bias"][:] = 0
    return mlx_drafter(config, numbers)


def row_of(seed: int, size: int = VOCAB, spread: float = 1.5) -> np.ndarray:
    noise = np.random.default_rng(seed).standard_normal(size, dtype=np.float32)
    return np.float32(spread) * noise


# One decision


def test_dflash_tokens_follow_their_q():
    """One row decided 20,000 times."""
    row = row_of(0)
    rows = mx.broadcast_to(mx.array(row), (DRAWS, VOCAB))
    drafter = drafter_of("dflash")
    proposal = drafter.decide(
        mx.zeros((DRAWS, 32)), rows, mx.array([3]), Draws(0.8, mx.random.key(1))
    )
    q = np.exp(row / 0.8) / np.exp(row / 0.8).sum()
    np.testing.assert_allclose(np.array(proposal.probabilities[7]), q, rtol=1e-5)
    assert proposal.candidates is None
    counts = np.bincount(np.array(proposal.tokens), minlength=VOCAB)
    assert chi_square(counts, q) > LEVEL


def test_dspark_tokens_follow_their_q_given_the_token_before():
    """A chain of 4,000 slots: each step is counted under the token it came from."""
    drafter, length, row = drafter_of("dspark"), 4000, row_of(1)
    proposal = drafter.decide(
        mx.zeros((length, 32)),
        mx.broadcast_to(mx.array(row), (length, VOCAB)),
        mx.array([3]),
        Draws(1.5, mx.random.key(1)),
    )
    mx.eval(proposal.tokens, proposal.probabilities)
    tokens = np.array(proposal.tokens)
    before = np.concatenate([[3], tokens[:-1]])
    head = drafter.markov_head
    scores = np.array(head.markov_w1.weight) @ np.array(head.markov_w2.weight).T + row
    q = np.exp((scores - scores.max(axis=-1, keepdims=True)) / 1.5)
    q /= q.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(
        np.array(proposal.probabilities), q[before], rtol=1e-4, atol=1e-7
    )
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (before, tokens), 1)
    assert (counts.sum(axis=-1) > 50).sum() >= 8
    assert chi_square(counts, q) > LEVEL


@pytest.mark.parametrize("family", ["dflash", "dspark"])
@pytest.mark.parametrize("way", ["sample", "argmax"])
def test_what_is_emitted_after_one_draft_follows_the_target(family, way):
    """20,000 decisions on a q far from p, and as many accepted as min(p, q) says."""
    drafter, row = drafter_of(family), row_of(2)
    near = 0.5 * row_of(9) + 0.5 * row
    logits = mx.broadcast_to(mx.array(row), (DRAWS, VOCAB))
    draws = Draws(0.8 if way == "sample" else 0.0, mx.random.key(1))
    proposal = decided_one_by_one(drafter, logits, draws)
    p = mx.softmax(mx.array(near))
    verdict = accept_sampled(
        proposal,
        mx.broadcast_to(p, (DRAWS, 2, VOCAB)),
        mx.random.uniform(shape=(DRAWS, 1), key=mx.random.key(2)),
        mx.random.key(3),
    )
    accepted = np.array(verdict.accepted)
    drafted, bonus = np.array(proposal.tokens)[:, 0], np.array(verdict.bonus)
    emitted = np.where(accepted == 1, drafted, bonus)
    assert chi_square(np.bincount(emitted, minlength=VOCAB), np.array(p)) > LEVEL
    after = np.bincount(bonus[accepted == 1], minlength=VOCAB)
    assert chi_square(after, np.array(p)) > LEVEL
    q = dense(proposal)[0, 0]
    chance = np.minimum(np.array(p), q).sum()
    assert 0.02 < chance < 0.98
    spread = np.sqrt(chance * (1 - chance) / DRAWS)
    assert abs(accepted.mean() - chance) < 4 * spread


def decided_one_by_one(drafter, logits, draws):
    """The first slot of many independent proposals after one anchor."""
    if drafter.config.kind == "dspark":
        row = drafter.markov_head.markov_w1(mx.array([3]))
        logits = logits + drafter.markov_head.markov_w2(row)
        drafter = drafter_of("dflash")  # what is left is a row by itself
    hidden = mx.zeros((logits.shape[0], 32))
    proposal = drafter.decide(hidden, logits, mx.array([3]), draws)
    if draws.temperature == 0:
        proposal = proposal.as_certain()
    names = ("tokens", "candidates", "probabilities")
    parts = {name: getattr(proposal, name) for name in names}
    grown = {n: a[:, None] for n, a in parts.items() if a is not None}
    return replace(proposal, **grown)


def dense(proposal) -> np.ndarray:
    """q over the vocabulary. Shape: (runs, g, V)."""
    if proposal.candidates is None:
        return np.array(proposal.probabilities)
    q = np.zeros((*proposal.tokens.shape, VOCAB))
    np.put_along_axis(
        q, np.array(proposal.candidates), np.array(proposal.probabilities), axis=-1
    )
    return q


# The whole loop


class Lookup:
    """Decides as its family does, on rows looked up by the anchor."""

    def __init__(self, family: str, target):
        self.drafter = drafter_of(family)
        self.config = self.drafter.config
        rng = np.random.default_rng(2)
        self._rows = {}
        self.lengths: list[tuple[int, int]] = []  # asked for and proposed
        for anchor in range(VOCAB):
            hidden, _ = target.forward(mx.array([[anchor]]), target.make_cache())
            noise = mx.array(rng.standard_normal((SLOTS, VOCAB), np.float32))
            logits = 0.8 * target.head(hidden)[0] + 0.3 * noise
            rows = mx.array(rng.standard_normal((SLOTS, 32), np.float32))
            self._rows[anchor] = (rows, logits)
        mx.eval(self._rows)

    def make_context(self) -> list[Count]:
        return [Count()]

    def extend(self, features: mx.array, context: list[Count]) -> None:
        context[0].end += features.shape[1]

    def propose(self, anchor, target, context, *, count, **draws):
        hidden, logits = (rows[:count] for rows in self._rows[anchor])
        names = ("temperature", "key", "confidence_threshold")
        chosen = Draws(**{name: draws[name] for name in names})
        proposal = self.drafter.decide(hidden, logits, mx.array([anchor]), chosen)
        self.lengths.append((count, len(proposal.tokens)))
        return proposal


class CutByItsOwnToken(Lookup):
    """The mistake: a slot is cut by the chance of the very token that was drawn."""

    def propose(self, *args, **options):
        proposal = super().propose(*args, **options)
        own = mx.take_along_axis(
            proposal.probabilities, proposal.tokens[:, None], axis=-1
        )[:, 0].tolist()
        kept = next((i for i, chance in enumerate(own) if chance < 0.2), len(own))
        return replace(
            proposal,
            tokens=proposal.tokens[:kept],
            probabilities=proposal.probabilities[:kept],
        )


class BestWithSoftQ(Lookup):
    """The mistake: the best token with the q it would have been drawn from."""

    def propose(self, *args, **options):
        proposal = super().propose(*args, **options)
        best = mx.argmax(proposal.probabilities, axis=-1).astype(mx.int32)
        return replace(proposal, tokens=best)


@pytest.fixture(scope="module")
def target():
    return RememberingTarget(small_target())


@pytest.fixture(scope="module")
def chances():
    """Of every sequence of LENGTH tokens after the prompt. Shape: (V,) * LENGTH."""
    model, paths = small_target().model, {(): 1.0}
    for _ in range(LENGTH):
        histories = [PROMPT + list(path) for path in paths]
        logits = np.array(model(mx.array(histories))[:, -1])
        longer = {}
        for (path, chance), row in zip(paths.items(), logits, strict=True):
            p = probabilities(row, **OPTIONS)
            longer |= {(*path, t): chance * p[t] for t in np.flatnonzero(p).tolist()}
        paths = longer
    found = np.zeros((VOCAB,) * LENGTH)
    for path, chance in paths.items():
        found[path] = chance
    return found


def runs(target, drafter, way: str, threshold: float):
    """Emitted tokens (RUNS, LENGTH), and drafted and accepted of every cycle."""
    rule = TokenRule(SamplingConfig(**OPTIONS))
    emitted, cycles = [], []
    for seed in range(RUNS):
        loop = Decoding(
            target,
            drafter,
            rule,
            seed=seed,
            draft_sampling=way,
            confidence_threshold=threshold,
        )
        emissions = list(
            loop.run(PROMPT, max_tokens=LENGTH, eos=frozenset(), num_draft_tokens=SLOTS)
        )
        emitted.append([token for each in emissions for token in each.tokens])
        cycles += [(each.drafted, each.accepted) for each in emissions[1:]]
    return np.array(emitted), np.array(cycles)


def least_p_value(emitted: np.ndarray, chances: np.ndarray) -> float:
    """Of each token after the first, and of neighbouring pairs."""
    values = []
    for places in [(1,), (2,), (3,), (1, 2), (2, 3)]:
        others = tuple(axis for axis in range(LENGTH) if axis not in places)
        counts = np.zeros((VOCAB,) * len(places))
        np.add.at(counts, tuple(emitted[:, place] for place in places), 1)
        values.append(chi_square(counts.ravel(), chances.sum(others).ravel()))
    return min(values)


@pytest.mark.parametrize(
    ("family", "way", "threshold"),
    [
        ("dflash", "sample", 0.0),
        ("dflash", "argmax", 0.0),
        ("dspark", "sample", 0.0),
        ("dspark", "argmax", 0.0),
        ("dspark", "sample", 0.5),
        ("dspark", "argmax", 0.5),
    ],
)
def test_generations_follow_the_exact_distribution(
    target, chances, family, way, threshold
):
    """Cycles that keep nothing, a part and all of their drafts occur often."""
    drafter = Lookup(family, target.target)
    emitted, cycles = runs(target, drafter, way, threshold)
    assert least_p_value(emitted, chances) > LEVEL
    drafted, accepted = cycles.T
    assert (accepted[drafted > 0] == 0).sum() > RUNS / 20
    assert ((accepted > 0) & (accepted < drafted)).sum() > RUNS / 50
    assert ((accepted > 0) & (accepted == drafted)).sum() > RUNS / 20
    asked, proposed = np.array(drafter.lengths).T
    assert (proposed < asked).any() == (threshold > 0)
    if threshold > 0:
        assert (proposed == 0).sum() > RUNS / 20
        assert ((proposed > 0) & (proposed < asked)).sum() > RUNS / 20


@pytest.mark.parametrize("wrong", [CutByItsOwnToken, BestWithSoftQ])
def test_a_wrong_rule_would_be_noticed(target, chances, wrong):
    emitted, _ = runs(target, wrong("dspark", target.target), "sample", 0.0)
    assert least_p_value(emitted, chances) < LEVEL
