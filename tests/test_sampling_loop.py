"""Sampled generations through the whole loop are plain decoding's in distribution."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from by_hand import penalised, probabilities
from chi_square import chi_square
from mlx_lm.sample_utils import make_sampler
from sampled_runs import (
    LENGTH,
    OPTIONS,
    PROMPT,
    SPECIAL,
    VOCAB,
    LookupDrafter,
    shared_runs,
    small_drafter,
    small_target,
)

from mlx_dflash2.decode import Decoding
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.generation import generate, stream_generate
from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.sampling import SamplingConfig, TokenRule

GENERATIONS = 20_000
LEVEL = 0.001 / 11


def exact_chances() -> np.ndarray:
    """Of every sequence of LENGTH tokens after the prompt: all paths are walked.

    The rows come from mlx-lm's own forward without a cache, p is computed by hand, and
    XTC is mixed over its coin.

    Returns:
        Shape: (V,) * LENGTH.
    """
    model, x = small_target().model, OPTIONS["xtc_probability"]
    chances = np.zeros((VOCAB,) * LENGTH)
    paths = {(): 1.0}
    for _ in range(LENGTH):
        histories = [PROMPT + list(path) for path in paths]
        logits = np.array(model(mx.array(histories))[:, -1])
        longer = {}
        for (path, chance), row in zip(paths.items(), logits, strict=True):
            row = penalised(row, PROMPT + list(path), **OPTIONS)
            off, on = (
                probabilities(row, xtc_on=xtc_on, special=SPECIAL, **OPTIONS)
                for xtc_on in (False, True)
            )
            p = (1 - x) * off + x * on
            longer |= {(*path, t): chance * p[t] for t in np.flatnonzero(p).tolist()}
        paths = longer
    for path, chance in paths.items():
        chances[path] = chance
    return chances


def counted(runs: list[list[int]]) -> np.ndarray:
    """Shape: (V,) * LENGTH."""
    counts = np.zeros((VOCAB,) * LENGTH, np.int64)
    for run in runs:
        counts[tuple(run[:LENGTH])] += 1
    return counts


def p_values(counts: np.ndarray, chances: np.ndarray) -> dict[str, float]:
    """Of each token alone and of whole sequences."""
    values = {"sequence": chi_square(counts.ravel(), chances.ravel())}
    for place in range(LENGTH):
        others = tuple(axis for axis in range(LENGTH) if axis != place)
        values[f"token {place + 1}"] = chi_square(
            counts.sum(others), chances.sum(others)
        )
    return values


def test_20000_generations_follow_the_exact_distribution():
    """Top-p, top-k, XTC, a repetition penalty and a temperature, all at once.

    Every token of every generation lies in plain decoding's support, and cycles that
    keep nothing, a part and the whole of their drafts all occur often.
    """
    chances = exact_chances()
    assert abs(chances.sum() - 1) < 1e-9
    for place in range(LENGTH):
        others = tuple(axis for axis in range(LENGTH) if axis != place)
        assert chances.sum(others).max() < 0.5
    runs = shared_runs(GENERATIONS, lookup=True)
    assert len(runs) == GENERATIONS
    values = p_values(counted(runs), chances)
    assert min(values.values()) > LEVEL, values
    first_cycles = np.bincount([run[LENGTH] for run in runs], minlength=3)
    assert first_cycles.min() > GENERATIONS / 20, first_cycles


def test_the_whole_networks_follow_it_too():
    """Target and drafter run in every cycle, caches and context are rolled back."""
    values = p_values(counted(shared_runs(600, lookup=False)), exact_chances())
    assert min(values.values()) > LEVEL, values


class WatchedRule(TokenRule):
    """Keeps the coins it was given."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.coins: list[mx.array] = []

    def probabilities(self, logprobs: mx.array, coin: mx.array) -> mx.array:
        self.coins.append(coin)
        return super().probabilities(logprobs, coin)


def test_every_row_of_a_cycle_has_a_coin_of_its_own():
    """Fair, and independent of its neighbour's."""
    rule = WatchedRule(SamplingConfig(temperature=1.0, xtc_probability=0.4))
    target, drafter = small_target(), small_drafter()
    decoding = Decoding(target, drafter, rule, seed=5)
    limits = {"max_tokens": 400, "eos": frozenset(), "num_draft_tokens": 3}
    drafted = [emission.drafted for emission in decoding.run(PROMPT, **limits)]
    coins = np.array(mx.stack(rule.coins))
    assert len(coins) == sum(1 if rows is None else rows + 1 for rows in drafted)
    assert len(set(coins.tolist())) == len(coins)
    assert chi_square(np.histogram(coins, 10, (0, 1))[0], np.ones(10)) > LEVEL
    full = [i for i, rows in enumerate(drafted) if rows == 3]
    starts = np.cumsum([0, *(1 if rows is None else rows + 1 for rows in drafted)])
    cut = (coins[starts[full][:, None] + np.arange(4)] <= 0.4).astype(int)
    patterns = np.bincount(cut @ [8, 4, 2, 1], minlength=16)
    chances = [
        np.prod([0.4 if bit else 0.6 for bit in bits])
        for bits in product((0, 1), repeat=4)
    ]
    assert chi_square(patterns, chances) > LEVEL


@pytest.fixture(scope="module")
def loaded(pair):
    """Target, tokenizer and drafter of a random pair, and their folders."""
    folders = pair("random", vocab=64, block_size=4, eos="off")
    target, tokenizer = load_target(folders.target)
    return target, tokenizer, load_drafter(folders.drafter, target), folders


HOT = {"temp": 1.0, "top_k": 20, "max_tokens": 12}
SHORT = [10, 20, 30]


def tokens_of(loaded, seed, *, plain: bool = False, **options) -> list[int]:
    target, tokenizer, drafter, _ = loaded
    drafter = None if plain else drafter
    return generate(
        target, drafter, tokenizer, SHORT, seed=seed, **HOT | options
    ).tokens


@pytest.mark.parametrize("plain", [False, True], ids=["speculative", "plain"])
@pytest.mark.parametrize("xtc", [0.0, 0.5])
def test_a_seed_repeats_a_run_whatever_ran_before(loaded, plain, xtc):
    """0 included; MLX's global seed and other generations have no say."""
    options = {"plain": plain, "xtc_probability": xtc}
    made = {}
    for seed in (0, 1, 2**64 - 1):
        mx.random.seed(1)
        made[seed] = tokens_of(loaded, seed, **options)
    assert len({tuple(tokens) for tokens in made.values()}) == 3
    mx.random.seed(2)
    tokens_of(loaded, 7, **options, max_tokens=5)
    assert {seed: tokens_of(loaded, seed, **options) for seed in made} == made


def test_without_a_seed_runs_differ(loaded):
    mx.random.seed(0)
    first = tokens_of(loaded, None)
    mx.random.seed(0)
    assert tokens_of(loaded, None) != first


FRESH = """
import json, sys
import mlx.core as mx
mx.set_default_device(mx.Device(getattr(mx, sys.argv[3])))
from mlx_dflash2 import generate, load_drafter, load_target
target, tokenizer = load_target(sys.argv[1])
drafter = load_drafter(sys.argv[2], target)
options = json.loads(sys.argv[4])
print(json.dumps(generate(target, drafter, tokenizer, **options).tokens))
"""


def test_a_seed_repeats_a_run_in_a_fresh_process(loaded):
    folders = loaded[3]
    device = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
    options = json.dumps({"prompt": SHORT, "seed": 0, **HOT})
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [
            *(sys.executable, "-c", FRESH),
            *(str(folders.target), str(folders.drafter), device, options),
        ],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert json.loads(done.stdout) == tokens_of(loaded, 0)


@pytest.mark.parametrize("seed", [-1, 2**64, 1.0, True, "0"])
def test_other_seeds_are_refused(loaded, seed):
    with pytest.raises(DFlash2Error, match=r"seed is .*, expected a whole number"):
        tokens_of(loaded, seed)


def test_a_run_without_xtc_leaves_the_global_random_state_alone(loaded):
    mx.random.seed(3)
    expected = mx.random.uniform(shape=(2,)).tolist()
    mx.random.seed(3)
    tokens_of(loaded, 0, top_p=0.9, min_p=0.01)
    assert mx.random.uniform(shape=(2,)).tolist() == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 64}, "top_k is 64, expected a whole number, 0 to 63"),
        ({"top_k": 1000}, "top_k is 1000"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"min_p": 2}, "min_p is 2"),
        ({"temp": -1}, "temperature is -1"),
        ({"xtc_probability": 2}, "xtc_probability is 2"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"logit_bias": {64: 1.0}}, "logit_bias token is 64"),
    ],
)
def test_a_refused_value_spoils_nothing_that_comes_after(loaded, options, message):
    expected = tokens_of(loaded, 0)
    for plain in (False, True):
        with pytest.raises(DFlash2Error, match=message):
            tokens_of(loaded, 0, plain=plain, **options)
    assert tokens_of(loaded, 0) == expected
    assert 0 <= mx.random.uniform().item() < 1


def test_none_and_0_switch_everything_off(loaded):
    off = {
        "top_p": 0,
        "min_p": 0,
        "xtc_probability": 0,
        "repetition_penalty": None,
        "presence_penalty": 0,
        "frequency_penalty": None,
        "logit_bias": None,
        "logits_processors": None,
    }
    assert tokens_of(loaded, 0, **off) == tokens_of(loaded, 0)
    assert tokens_of(loaded, 0, repetition_penalty=0) == tokens_of(loaded, 0)


def test_an_opaque_sampler_is_for_plain_decoding_only(loaded):
    def second_best(logprobs: mx.array) -> mx.array:
        return mx.argsort(logprobs, axis=-1)[..., -2]

    target, tokenizer, drafter, _ = loaded
    with pytest.raises(DFlash2Error, match="sampler: .*drafter=None"):
        generate(target, drafter, tokenizer, SHORT, sampler=second_best)
    alone = generate(
        target, None, tokenizer, SHORT, sampler=second_best, max_tokens=9
    ).tokens
    best = generate(target, None, tokenizer, SHORT, max_tokens=9).tokens
    greedy = generate(
        target, None, tokenizer, SHORT, sampler=make_sampler(temp=0.0), max_tokens=9
    ).tokens
    logits = target.model(mx.array([SHORT + alone[:-1]]))[0, len(SHORT) - 1 :]
    assert alone == second_best(logits).tolist()
    assert greedy == best != alone


@pytest.mark.parametrize("plain", [False, True], ids=["speculative", "plain"])
def test_extra_ends_of_sequence_are_safe_from_xtc(loaded, plain):
    """As mlx-lm's, whose extra ends are the tokenizer's own."""
    target, tokenizer, drafter, _ = loaded
    row = np.full((1, 64), -np.inf, np.float32)
    row[0, [40, 41, 42]] = np.log([0.3, 0.31, 0.39])  # XTC keeps the least likely
    options = {
        "temp": 1.0,
        "xtc_probability": 1.0,
        "logits_processors": [lambda tokens, logits: mx.array(row)],
        "max_tokens": 30,
        "seed": 0,
    }
    drafter = None if plain else drafter
    without = generate(target, drafter, tokenizer, SHORT, **options)
    ended = generate(
        target, drafter, tokenizer, SHORT, extra_eos_token_ids=[42], **options
    )
    assert without.tokens == [40] * 30
    assert ended.finish_reason == "stop"
    assert ended.tokens[-1] == 42


@pytest.mark.parametrize("plain", [False, True], ids=["speculative", "plain"])
def test_processors_get_the_prompt_and_every_token_before_the_row(loaded, plain):
    """And what they forbid is never emitted, drafted or not."""
    target, tokenizer, drafter, _ = loaded
    histories = []

    def no_neighbours(tokens: mx.array, logits: mx.array) -> mx.array:
        """Only tokens of the other parity than the number of tokens before; no end."""
        histories.append(tokens.tolist())
        ids = mx.arange(64)
        return mx.where((ids % 2 == len(tokens) % 2) | (ids < 3), -mx.inf, logits)

    stream = stream_generate(
        target,
        None if plain else drafter,
        tokenizer,
        SHORT,
        temp=1.5,
        max_tokens=40,
        seed=3,
        logits_processors=[no_neighbours],
    )
    emitted = []
    for response in stream:
        histories.clear()
        assert response.logits[response.token].item() > -np.inf
        assert histories == [SHORT + emitted]
        emitted.append(response.token)
    assert all((len(SHORT) + i) % 2 != token % 2 for i, token in enumerate(emitted))
    assert len(emitted) == 40
    assert plain or sum(stream.generation.stats.accepted_per_cycle) > 0


def test_the_lookup_drafter_proposes_from_the_q_it_returns():
    """The shortcut of the counted generations is itself a fair drafter."""
    target, config = small_target(), small_drafter().config
    drafter = LookupDrafter(config, target)
    drawn = [
        drafter.propose(
            10, target, [], count=1, temperature=0.8, key=mx.random.key(seed)
        )
        for seed in range(2000)
    ]
    counts = np.bincount([d.tokens.item() for d in drawn], minlength=VOCAB)
    q = np.zeros(VOCAB)
    q[np.array(drawn[0].candidates[0])] = np.array(drawn[0].probabilities[0])
    assert chi_square(counts, q) > LEVEL
