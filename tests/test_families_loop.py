"""The loop with a drafter of every family: exact text, counts known on paper."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from lossless import assert_cycles_add_up, assert_lossless, mlx_lm_tokens

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.generation import generate, stream_generate
from mlx_dflash2.loading import load_drafter, load_target

FAMILIES = ("dflash2", "dflash", "dspark")
NEW = FAMILIES[1:]
BUDGET = 44


@pytest.fixture(scope="module")
def loaded(pair):
    """`loaded(kind, **options)`: target, drafter and tokenizer, loaded once."""
    made = {}

    def load(kind="oracle", bits=None, **options):
        folders = pair(kind, **options)
        if (folders.target, bits) not in made:
            target, tokenizer = load_target(folders.target)
            drafter = load_drafter(folders.drafter, target, bits=bits)
            made[folders.target, bits] = target, drafter, tokenizer
        return made[folders.target, bits]

    return load


# Oracle pairs: what must come out is known on paper.


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"partial": 0.2},
        {"partial": 0.6, "eos": "off"},
        {"block_size": 2},
        {"block_size": 5, "partial": 0.2},
        {"block_size": 16, "lag": 16},
        {"rope_theta": 5e6, "partial": 0.2, "rope": "nested"},
        {"layer_types": "sliding", "sliding_window": 28, "partial": 0.2},
        {"layer_types": "mixed", "sliding_window": 28},
        {"is_causal": True},
        {"eos": "off", "seed": 3, "taps": (2, 0)},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_an_oracle_pair_accepts_exactly_what_it_must(pair, loaded, family, options):
    options = options | {"family": family}
    oracle = pair(**options).oracle
    for length, budget in ((2 * oracle.lag + 1, BUDGET), (75, BUDGET + 1)):
        prompt = oracle.prompt(length, start=length)
        result = generate(*loaded(**options), prompt, max_tokens=budget)
        assert result.tokens == oracle.walk(prompt, budget)
        assert result.stats.accepted_per_cycle == oracle.cycles(prompt, budget)
        assert_cycles_add_up(result, budget=budget)


@pytest.mark.parametrize(
    "options", [{"block_size": 1}, {"block_size": 8, "first_row": 1}], ids=str
)
def test_a_dspark_block_counts_from_its_first_row(pair, loaded, options):
    options = options | {"family": "dspark"}
    oracle, (_, drafter, _) = pair(**options).oracle, loaded(**options)
    drafted = options["block_size"] - options.get("first_row", 0)
    assert drafter.config.num_draft_tokens == oracle.drafted == drafted
    prompt = oracle.prompt(40)
    result = generate(*loaded(**options), prompt, max_tokens=1 + 2 * (drafted + 1))
    assert result.stats.accepted_per_cycle == [drafted, drafted]


@pytest.mark.parametrize("slots", [2, 3, 5, 7])
def test_dflash_rows_are_right_up_to_a_slot(loaded, pair, slots):
    options = {"family": "dflash", "lag": slots - 1, "eos": "off"}
    oracle, budget = pair(**options).oracle, 1 + 3 * (slots + 1)
    prompt = oracle.prompt(20)
    result = generate(*loaded(**options), prompt, max_tokens=budget)
    assert result.stats.accepted_per_cycle == [slots] * 3
    assert result.tokens == oracle.walk(prompt, budget)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [1, 2, 8, 9, 17])
def test_the_budget_is_met_exactly(pair, loaded, family, budget):
    options = {"family": family, "eos": "off"}
    oracle = pair(**options).oracle
    prompt = oracle.prompt(30)
    result = generate(*loaded(**options), prompt, max_tokens=budget)
    assert len(result.tokens) == budget and result.finish_reason == "length"
    assert result.stats.accepted_per_cycle == oracle.cycles(prompt, budget)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", [1, 4, 7, 8, 9])
def test_an_end_at_any_place_of_a_block_is_the_last_token(pair, loaded, family, place):
    options = {"family": family, "eos": "off"}
    target, drafter, tokenizer = loaded(**options)
    prompt = pair(**options).oracle.prompt(30)
    walk = pair(**options).oracle.walk(prompt, 20)
    result = generate(
        *(target, drafter, tokenizer, prompt),
        max_tokens=20,
        extra_eos_token_ids=[walk[place]],
    )
    assert result.tokens == walk[: walk.index(walk[place]) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("width", [1, 3, 6])
@pytest.mark.parametrize("family", NEW)
def test_fewer_drafted_tokens_are_a_limit_on_the_cycle(pair, loaded, family, width):
    options = {"family": family, "partial": 0.2}
    oracle = pair(**options).oracle
    prompt = oracle.prompt(30)
    result = generate(
        *loaded(**options), prompt, max_tokens=BUDGET, num_draft_tokens=width
    )
    assert result.tokens == oracle.walk(prompt, BUDGET)
    assert result.stats.accepted_per_cycle == oracle.cycles(prompt, BUDGET, width)


# DSpark's confidence.


@pytest.mark.parametrize(
    ("partial", "eos", "width"),
    [(0.0, "ring", 7), (0.3, "ring", 7), (0.3, "off", 3), (0.7, "off", 7)],
)
def test_confidence_cuts_exactly_before_the_wrong_slot(
    pair, loaded, partial, eos, width
):
    options = {"family": "dspark", "partial": partial, "eos": eos}
    oracle = pair(**options).oracle
    for length in (17, 60):
        prompt = oracle.prompt(length, start=length)
        result = generate(
            *loaded(**options),
            prompt,
            max_tokens=BUDGET,
            confidence_threshold=0.5,
            num_draft_tokens=width,
        )
        stats = result.stats
        counts = zip(stats.drafted_per_cycle, stats.accepted_per_cycle, strict=True)
        assert list(counts) == oracle.cut_cycles(prompt, BUDGET, width)
        assert result.tokens == oracle.walk(prompt, BUDGET)
        assert_cycles_add_up(result, budget=BUDGET)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
def test_a_drafter_sure_of_nothing_leaves_single_steps(loaded, temp, draft_sampling):
    target, drafter, tokenizer = loaded("random", family="dspark")
    prompt = list(range(8, 30))
    result = generate(
        *(target, drafter, tokenizer, prompt),
        max_tokens=9,
        temp=temp,
        seed=5,
        confidence_threshold=1,
        draft_sampling=draft_sampling,
        extra_eos_token_ids=[],
    )
    count = len(result.tokens)
    assert result.stats.drafted_per_cycle == [0] * (count - 1)
    assert result.stats.emitted_per_cycle == [1] * (count - 1)
    if temp == 0:
        plain = generate(target, None, tokenizer, prompt, max_tokens=9)
        assert_lossless(result, plain.tokens, target, tokenizer, prompt)


def test_a_threshold_of_0_asks_no_confidence_head(pair, loaded, monkeypatch):
    from mlx_dflash2.dspark import DSparkDrafter

    def fail(*_):
        raise AssertionError("the head was asked")

    monkeypatch.setattr(DSparkDrafter, "confidence", fail)
    options = {"family": "dspark"}
    prompt = pair(**options).oracle.prompt(30)
    assert generate(*loaded(**options), prompt, max_tokens=9).tokens
    with pytest.raises(AssertionError, match="was asked"):
        generate(*loaded(**options), prompt, max_tokens=9, confidence_threshold=0.1)


# Random pairs: whatever is drafted, the text is the target's.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
def test_greedy_tokens_are_those_of_plain_decoding(loaded, family, layers):
    options = {"family": family, "layer_types": layers, "sliding_window": 12}
    target, drafter, tokenizer = loaded("random", **options)
    prompt = list(range(8, 38))
    expected = mlx_lm_tokens(target, prompt, 40, eos=tokenizer.eos_token_ids)
    for extra in ({}, {"confidence_threshold": 0.5})[: 1 + (family == "dspark")]:
        result = generate(target, drafter, tokenizer, prompt, max_tokens=40, **extra)
        assert_lossless(result, expected, target, tokenizer, prompt)
        assert_cycles_add_up(result, budget=40)


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": {40: 5.0, 1: -100.0}, "repetition_penalty": 1.3},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"prefill_step_size": 5},
    ],
    ids=lambda options: ",".join(options),
)
def test_generation_options_change_the_same_tokens(loaded, family, options):
    target, drafter, tokenizer = loaded("random", family=family)
    prompt = list(range(8, 30))
    plain = generate(target, None, tokenizer, prompt, max_tokens=30, **options)
    result = generate(target, drafter, tokenizer, prompt, max_tokens=30, **options)
    assert_lossless(result, plain.tokens, target, tokenizer, prompt, **options)


@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
@pytest.mark.parametrize(
    ("family", "threshold"),
    [("dflash2", 0.0), ("dflash", 0.0), ("dspark", 0.0), ("dspark", 0.5)],
)
def test_one_token_above_zero_temperature_is_greedy(
    loaded, family, draft_sampling, threshold
):
    target, drafter, tokenizer = loaded("random", family=family)
    prompt = list(range(8, 30))
    expected = generate(target, None, tokenizer, prompt, max_tokens=24).tokens
    result = generate(
        *(target, drafter, tokenizer, prompt),
        max_tokens=24,
        temp=0.8,
        top_k=1,
        draft_sampling=draft_sampling,
        confidence_threshold=threshold,
    )
    assert_lossless(result, expected, target, tokenizer, prompt)
    assert_cycles_add_up(result, budget=24)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("draft_sampling", ["sample", "argmax"])
def test_a_seed_repeats_a_sampled_run(pair, loaded, family, draft_sampling):
    options = {"family": family, "partial": 0.2, "eos": "off"}
    prompt = pair(**options).oracle.prompt(30)
    first, again, other = (
        generate(
            *loaded(**options),
            prompt,
            max_tokens=40,
            temp=4.0,
            seed=seed,
            draft_sampling=draft_sampling,
            confidence_threshold=0.5 if family == "dspark" else 0,
        )
        for seed in (1, 1, 2)
    )
    assert first.tokens == again.tokens != other.tokens
    assert first.stats == again.stats
    assert_cycles_add_up(first, budget=40)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("dflash2", "sample"), ("dflash", "argmax"), ("dspark", "sample")],
)
def test_each_family_drafts_its_faster_way_by_default(
    loaded, monkeypatch, family, expected
):
    target, drafter, tokenizer = loaded("random", family=family)
    asked, propose = [], type(drafter).propose

    def note(self, *arguments, temperature, **options):
        asked.append(temperature)
        return propose(self, *arguments, temperature=temperature, **options)

    monkeypatch.setattr(type(drafter), "propose", note)
    stream = stream_generate(target, drafter, tokenizer, [8, 9, 10], temp=0.9, seed=1)
    for _ in zip(range(4), stream, strict=False):
        pass
    assert set(asked) == {0.9 if expected == "sample" else 0.0}


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_drafter_changes_no_text(pair, loaded, family, bits):
    options = {"family": family, "hidden": 128, "eos": "off"}
    oracle = pair(**options).oracle
    target, drafter, tokenizer = loaded(bits=bits, **options)
    assert isinstance(drafter.fc, nn.QuantizedLinear)
    if family == "dspark":
        head = drafter.markov_head
        assert head.markov_w2.weight.dtype == mx.float32
        assert not isinstance(drafter.confidence_head.proj, nn.QuantizedLinear)
    prompt = oracle.prompt(30)
    result = generate(target, drafter, tokenizer, prompt, max_tokens=30)
    assert result.tokens == oracle.walk(prompt, 30)
    assert_cycles_add_up(result, budget=30)


# What does not apply is refused.


@pytest.mark.parametrize("family", FAMILIES)
def test_confidence_needs_a_confidence_head(loaded, family):
    made = loaded("random", family=family, confidence=False)
    with pytest.raises(DFlash2Error, match="drafter has no confidence head"):
        stream_generate(*made, [8, 9], confidence_threshold=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_sampling": "best"}, "draft_sampling is 'best', expected"),
        ({"confidence_threshold": 1.5}, "confidence_threshold is 1.5, expected"),
        ({"confidence_threshold": float("nan")}, "confidence_threshold is nan"),
        ({"num_draft_tokens": 8}, r"8 \(block size 9\).*7 \(block size 8\)"),
    ],
)
def test_drafting_options_out_of_range_are_refused(loaded, options, message):
    with pytest.raises(DFlash2Error, match=message):
        stream_generate(*loaded("random", family="dspark"), [8, 9], **options)
