"""The target's distribution is what mlx-lm samples from, and every value is checked."""

import math

import mlx.core as mx
import numpy as np
import pytest
from by_hand import penalised, probabilities
from chi_square import chi_square
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_dflash2 import sampling
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.sampling import SamplingConfig, TokenRule, draw, log_softmax

VOCAB, DRAWS, SPECIAL = 16, 20_000, (2, 7)
XTC = {"xtc_probability": 1.0, "xtc_threshold": 0.1}
FILTERS = {
    "none": {},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k": {"top_k": 5},
    "xtc": XTC,
    "all": {"top_p": 0.9, "min_p": 0.03, "top_k": 4} | XTC,
}
SAMPLED = [("top_p", 0.7), ("min_p", 1.5), ("top_k", 1.0), ("all", 0.7)]
LEVEL = 0.001 / (len(SAMPLED) + 3)


def logprobs(seed: int = 0, dtype: mx.Dtype = mx.float32) -> mx.array:
    """One row. Shape: (1, V)."""
    row = 1.5 * np.random.default_rng(seed).standard_normal((1, VOCAB))
    return log_softmax(mx.array(row, mx.float32).astype(dtype))


def by_hand(row: mx.array, options: dict, temperature: float) -> np.ndarray:
    """XTC is on if it is among the options."""
    return probabilities(
        np.array(row)[0],
        temperature=temperature,
        xtc_on="xtc_threshold" in options,
        special=SPECIAL,
        **options,
    )


def rule_of(options: dict, temperature: float = 1.0, **more) -> TokenRule:
    config = SamplingConfig(**{"temperature": temperature} | options)
    config.check(VOCAB)
    return TokenRule(config, xtc_special_tokens=SPECIAL, **more)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("name", FILTERS)
def test_p_is_the_documented_distribution(name, temperature):
    rule = rule_of(FILTERS[name], temperature)
    for seed in range(10):
        row = logprobs(seed)
        p = np.array(rule.probabilities(row, mx.array(0.5)))
        expected = by_hand(row, FILTERS[name], temperature)
        np.testing.assert_allclose(p, expected, rtol=2e-5, atol=0)
        assert p.dtype == np.float32


@pytest.mark.parametrize(("name", "temperature"), SAMPLED)
def test_p_is_what_mlx_lm_samples_from(name, temperature):
    """XTC is certain here: mlx-lm tosses one coin for all the rows of a call."""
    row = logprobs(1)
    sampler = make_sampler(
        temp=temperature, xtc_special_tokens=list(SPECIAL), **FILTERS[name]
    )
    mx.random.seed(3)
    drawn = np.array(sampler(mx.broadcast_to(row, (DRAWS, VOCAB))))
    p = rule_of(FILTERS[name], temperature).probabilities(row, mx.array(0.5))
    assert chi_square(np.bincount(drawn, minlength=VOCAB), np.array(p)) > LEVEL


def test_xtc_that_is_not_certain_mixes_as_in_mlx_lm():
    options = FILTERS["all"] | {"xtc_probability": 0.5}
    row = logprobs(1)
    sampler = make_sampler(temp=0.7, xtc_special_tokens=list(SPECIAL), **options)
    mx.random.seed(4)
    drawn = [sampler(row) for _ in range(5000)]
    counts = np.bincount(np.array(mx.concatenate(drawn)), minlength=VOCAB)
    rule = rule_of(options, 0.7)
    halves = [rule.probabilities(row, mx.array(coin)) for coin in (0.25, 0.75)]
    assert chi_square(counts, np.array(halves[0] + halves[1])) > LEVEL


def test_the_rule_draws_plainly_from_its_own_p():
    """With a coin of its own for each draw."""
    options = FILTERS["all"] | {"xtc_probability": 0.5}
    rule, row = rule_of(options, 0.7), logprobs(1)
    drawn = [rule.choose(row, mx.random.key(seed)) for seed in range(3000)]
    counts = np.bincount(np.array(mx.stack(drawn)), minlength=VOCAB)
    halves = [rule.probabilities(row, mx.array(coin)) for coin in (0.25, 0.75)]
    assert chi_square(counts, np.array(halves[0] + halves[1])) > LEVEL


def test_draw_follows_p_and_never_leaves_its_support():
    p = np.array([0.5, 0.0, 0.3, 0.0, 0.2])
    rows = mx.broadcast_to(mx.array(p, mx.float32), (DRAWS, 5))
    drawn = np.array(draw(rows, mx.random.key(0)))
    assert chi_square(np.bincount(drawn, minlength=5), p) > LEVEL


def test_the_coin_decides_whether_xtc_cuts_this_row():
    """The boundary is mlx-lm's: XTC is off for a number above the probability."""
    rule, row = rule_of({"xtc_probability": 0.4, "xtc_threshold": 0.1}), logprobs(1)
    cut = by_hand(row, XTC, 1.0)
    whole = by_hand(row, {}, 1.0)
    assert (cut > 0).sum() < VOCAB
    for coin, expected in ((0.0, cut), (0.4, cut), (0.41, whole), (0.99, whole)):
        p = np.array(rule.probabilities(row, mx.array(coin)))
        np.testing.assert_allclose(p, expected, rtol=2e-5, atol=0)


def test_xtc_never_removes_special_tokens():
    """Newline and end of sequence stay, however likely."""
    row = np.full(VOCAB, 1e-3)
    row[[0, 1, 2, 7]] = 0.2, 0.25, 0.26, 0.24
    row = log_softmax(mx.array(np.log(row), mx.float32)[None])
    p = np.array(rule_of(XTC).probabilities(row, mx.array(0.0)))
    assert p[2] > 0.3 and p[7] > 0.3
    assert p[1] == 0 and p[0] > 0  # of the strong ones the least likely stays
    bare = TokenRule(SamplingConfig(temperature=1.0, **XTC))
    p = np.array(bare.probabilities(row, mx.array(0.0)))
    assert (p[[1, 2, 7]] == 0).all()


PENALTIES = {
    "bias": {"logit_bias": {0: 2.0, 5: -1.5, 9: -math.inf}},
    "repetition": {"repetition_penalty": 1.4, "repetition_context_size": 6},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "all": {
        "logit_bias": {0: 2.0, 5: -1.5},
        "repetition_penalty": 1.4,
        "repetition_context_size": 6,
        "presence_penalty": -0.7,
        "frequency_penalty": 0.4,
    },
}


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_mlx_lms_and_leave_the_callers_row_alone(name):
    """History is shorter and longer than what each penalty looks back on."""
    options = PENALTIES[name]
    rule = rule_of(options, 0.0)
    rng = np.random.default_rng(2)
    for length in (1, 5, 40):
        history = rng.integers(0, VOCAB, length).tolist()
        before = 2 * rng.standard_normal((1, VOCAB)).astype(np.float32)
        logits = mx.array(before)
        result = np.array(rule.processed(logits, mx.array(history)))
        np.testing.assert_array_equal(np.array(logits), before)
        theirs = mx.array(before)
        for processor in make_logits_processors(**options):
            theirs = processor(mx.array(history), theirs)
        np.testing.assert_array_equal(result, np.array(theirs))
        expected = penalised(before[0], history, **options)
        np.testing.assert_allclose(result[0], expected, rtol=1e-5, atol=1e-5)


def test_a_processor_that_writes_in_place_does_not_reach_the_callers_row():
    def ban_last(tokens: mx.array, logits: mx.array) -> mx.array:
        logits[:, tokens[-1:]] = -mx.inf
        return logits

    rule = rule_of({}, 0.0, processors=[ban_last])
    logits = mx.zeros((1, 3, VOCAB))[:, 1]
    result = rule.processed(logits, mx.array([1, 4]))
    assert result[0, 4].item() == -math.inf
    assert (logits == 0).all().item()


def test_processors_come_after_the_penalties_in_order():
    seen = []

    def note(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append((tokens.tolist(), logits[0, 3].item()))
        return logits + 1

    rule = rule_of({"logit_bias": {3: 5.0}}, 0.0, processors=[note, note])
    result = rule.processed(mx.zeros((1, VOCAB)), mx.array([1, 2]))
    assert seen == [([1, 2], 5.0), ([1, 2], 6.0)]
    assert result[0, 3].item() == 7.0


def test_greedy_equals_mlx_lm_where_bfloat16_ties():
    """mlx-lm takes the best log-probability, and those tie where logits do not."""
    rng = np.random.default_rng(0)
    greedy, theirs = rule_of({}, 0.0), make_sampler(temp=0.0)
    moved = 0
    for _ in range(200):
        logits = np.zeros((1, 4000))
        logits[0, rng.integers(0, 4000, 3)] = 1.0, 1.0078125, 1.015625
        logits = mx.array(logits, mx.float32).astype(mx.bfloat16)
        row = logits - mx.logsumexp(logits, keepdims=True)
        chosen = greedy.choose(log_softmax(logits), None).item()
        assert chosen == theirs(row).item()
        moved += chosen != mx.argmax(logits).item()
    assert moved > 50


def test_off_values_change_nothing():
    row = logprobs(3)
    plain = rule_of({}).probabilities(row, None)
    off = {
        "top_p": 0.0,
        "min_p": 0.0,
        "top_k": 0,
        "xtc_probability": 0.0,
        "repetition_penalty": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": None,
        "logit_bias": None,
    }
    rule = rule_of(off)
    assert mx.array_equal(rule.probabilities(row, None), plain).item()
    assert rule.processors == []
    assert rule_of({"repetition_penalty": None}).processors == []


OUT_OF_RANGE = [
    ("temperature", value) for value in (-1, math.nan, math.inf, True, "1", None, 1e5)
]
OUT_OF_RANGE += [("temperature", 1e-9), ("temperature", 10**400)]
OUT_OF_RANGE += [
    ("top_p", value) for value in (-0.1, 1.1, math.nan, True, "0.9", None, 1e-300)
]
OUT_OF_RANGE += [("min_p", value) for value in (-0.1, 2, math.nan, math.inf, False)]
OUT_OF_RANGE += [
    ("top_k", value) for value in (-1, VOCAB, VOCAB + 1, 2.0, True, "5", None)
]
OUT_OF_RANGE += [("xtc_probability", value) for value in (-0.1, 1.5, math.nan, "1")]
OUT_OF_RANGE += [("xtc_threshold", value) for value in (-0.1, 0.6, math.nan)]
OUT_OF_RANGE += [
    ("repetition_penalty", value) for value in (-1.0, math.nan, math.inf, "", "a", True)
]
OUT_OF_RANGE += [("repetition_context_size", value) for value in (0, -3, 2.5, None)]
OUT_OF_RANGE += [
    (f"{kind}_penalty", value)
    for kind in ("presence", "frequency")
    for value in (math.nan, math.inf, -math.inf, 1e300, "1", False)
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused_by_name(name, value):
    config = SamplingConfig(**{"temperature": 1.0, name: value})
    with pytest.raises(DFlash2Error, match=rf"^{name} is .*, expected "):
        config.check(VOCAB)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        ({VOCAB: 1.0}, "logit_bias token is 16, expected a whole number, 0 to 15"),
        ({-1: 1.0}, "logit_bias token is -1"),
        ({"3": 1.0}, "logit_bias token is '3'"),
        ({True: 1.0}, "logit_bias token is True"),
        ({3: math.nan}, "logit_bias of token 3 is nan"),
        ({3: math.inf}, "logit_bias of token 3 is inf"),
        ({3: "1"}, "logit_bias of token 3 is '1'"),
        ({3: True}, "logit_bias of token 3 is True"),
        ([3, 1.0], "logit_bias is .*expected token ids"),
    ],
)
def test_biases_out_of_range_are_refused(bias, message):
    with pytest.raises(DFlash2Error, match=message):
        SamplingConfig(logit_bias=bias).check(VOCAB)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-3},
        {"temperature": 1e4, "top_p": 0.9},
        {"temperature": 1, "top_p": 1e-6},
        {"temperature": 1, "top_k": VOCAB - 1},
        {"temperature": 1, "min_p": 1},
        {"temperature": 1, "min_p": 1e-300},
        {"temperature": 1, "top_p": 1, "xtc_probability": 1, "xtc_threshold": 0},
        {"temperature": 1, "xtc_probability": 1, "xtc_threshold": 0.5},
        {"temperature": 1, "logit_bias": {15: -math.inf}},
    ],
)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_the_ends_of_every_range_give_a_distribution(options, dtype):
    rule = rule_of(options)
    logits = rule.processed(logprobs(6, dtype), mx.array([1]))
    if rule.greedy:
        assert rule.choose(log_softmax(logits), None).item() == logits.argmax().item()
        return
    p = np.array(rule.probabilities(log_softmax(logits), mx.array(0.5)))
    assert np.isfinite(p).all() and abs(p.sum() - 1) < 1e-5


def test_a_refusal_runs_no_mlx_lm_function_and_randomness_still_works(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("an mlx-lm function saw a value that is out of range")

    names = ("apply_top_k", "apply_top_p", "apply_min_p", "apply_xtc")
    for name in (*names, "make_logits_processors"):
        monkeypatch.setattr(sampling, name, never)
    mx.random.seed(11)
    expected = mx.random.uniform(shape=(4,)).tolist()
    mx.random.seed(11)
    for name, value in OUT_OF_RANGE:
        with pytest.raises(DFlash2Error):
            SamplingConfig(**{"temperature": 1.0, name: value}).check(VOCAB)
    assert mx.random.uniform(shape=(4,)).tolist() == expected


def test_only_xtc_moves_the_global_random_state():
    """mlx-lm's XTC draws a number there; the result does not depend on it."""
    row, results = logprobs(1), []
    for seed in (1, 2):
        mx.random.seed(seed)
        untouched = mx.random.uniform().item()
        mx.random.seed(seed)
        options = {"top_p": 0.9, "min_p": 0.03, "top_k": 4}
        p = rule_of(options, 0.7).choose(row, mx.random.key(0)).item()
        assert mx.random.uniform().item() == untouched
        rule = rule_of(options | XTC, 0.7)
        results.append([p, rule.probabilities(row, mx.array(0.3)).tolist()])
    assert results[0] == results[1]
