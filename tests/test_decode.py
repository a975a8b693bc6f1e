"""The cycle loop: exact tokens, counts, budgets, ends, caches and contexts."""

from dataclasses import replace

import mlx.core as mx
import pytest
from lossless import (
    EXACT_WIDTHS,
    assert_cycles_add_up,
    assert_lossless,
    mlx_lm_tokens,
    run_scripted,
)
from mlx.utils import tree_flatten
from pair_files import MASK
from tiny import assert_close

from mlx_dflash2.decode import Decoding
from mlx_dflash2.generation import generate, stream_generate
from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.sampling import SamplingConfig, TokenRule

WIDE = {"block_size": 16, "lag": 15, "top_k": 32}


@pytest.fixture(scope="module")
def loaded(pair):
    """`loaded(kind, **options)`: target, tokenizer and drafter, loaded once."""
    made = {}

    def load(kind="oracle", **options):
        folders = pair(kind, **options)
        if folders.target not in made:
            target, tokenizer = load_target(folders.target)
            drafter = load_drafter(folders.drafter, target)
            made[folders.target] = target, tokenizer, drafter
        return made[folders.target]

    return load


@pytest.fixture
def caches(monkeypatch):
    """`caches(target)`: a list every target cache made from now on is added to."""

    def watch(target):
        made = []
        make = target.make_cache
        monkeypatch.setattr(
            target, "make_cache", lambda: made.append(make()) or made[-1]
        )
        return made

    return watch


def lengths(cache):
    return {held.offset for held in cache}


def decode(loaded, prompt, count, eos=(), **options):
    """The loop alone; the finished Decoding."""
    target, _, drafter = loaded
    decoding = Decoding(target, drafter, TokenRule(SamplingConfig()), seed=0, **options)
    width = drafter.config.num_draft_tokens
    for _ in decoding.run(
        prompt, max_tokens=count, eos=frozenset(eos), num_draft_tokens=width
    ):
        pass
    return decoding


# Oracle pairs: what must come out is known on paper.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bfloat16", "seed": 3},
        {"dtype": "float16", "seed": 4},
        {"partial": 0.2},
        {"partial": 0.5, "eos": "off"},
        {"partial": 0.8, "dtype": "bfloat16"},
        {"block_size": 2},
        {"block_size": 5, "partial": 0.2},
        WIDE,
        WIDE | {"partial": 0.2, "eos": "off"},
        {"tied": True, "hidden": 160},
        {"rope_theta": 5e6, "partial": 0.2, "rope": "nested"},
        {"layer_types": "sliding", "sliding_window": 20, "partial": 0.2},
        {"layer_types": "mixed", "sliding_window": 20},
        {"is_causal": True},
        {"layer_types": "sliding", "is_causal": False},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "plain",
)
def test_an_oracle_pair_accepts_exactly_what_it_must(pair, loaded, options):
    oracle = pair(**options).oracle
    for length, budget in ((2 * oracle.lag + 1, 48), (75, 50)):
        prompt = oracle.prompt(length, start=length)
        result = generate(*_order(loaded(**options)), prompt, max_tokens=budget)
        assert result.tokens == oracle.walk(prompt, budget)
        assert result.stats.accepted_per_cycle == oracle.cycles(prompt, budget)
        assert_cycles_add_up(result, budget=budget)


def _order(loaded):
    """(target, tokenizer, drafter) as `generate` takes them."""
    target, tokenizer, drafter = loaded
    return target, drafter, tokenizer


def test_a_long_prompt_in_chunks_leaves_every_draft_right(pair, loaded):
    oracle = pair(eos="off").oracle
    prompt = oracle.prompt(270)
    for step in (1, 5, 100, 2048):
        result = generate(
            *_order(loaded(eos="off")), prompt, max_tokens=33, prefill_step_size=step
        )
        assert result.tokens == oracle.walk(prompt, 33)
        assert result.stats.accepted_per_cycle == [7, 7, 7, 7]


@pytest.mark.parametrize("partial", [0.0, 0.5])
@pytest.mark.parametrize("width", range(8))
def test_fewer_drafted_tokens_verify_fewer(pair, loaded, width, partial):
    oracle = pair(eos="off", partial=partial).oracle
    prompt = oracle.prompt(40)
    result = generate(
        *_order(loaded(eos="off", partial=partial)),
        prompt,
        max_tokens=30,
        num_draft_tokens=width,
    )
    assert result.tokens == oracle.walk(prompt, 30)
    if width == 0:
        assert result.stats.cycles == 0
        assert result.stats.plain_steps == 29
    else:
        assert result.stats.accepted_per_cycle == oracle.cycles(prompt, 30, width)
        assert max(result.stats.drafted_per_cycle) == width
    assert_cycles_add_up(result, budget=30)


@pytest.mark.parametrize("partial", [0.0, 0.5])
def test_an_end_at_every_position_of_a_block_ends_it_there(
    pair, loaded, caches, partial
):
    options = {"eos": "off", "partial": partial}
    oracle = pair(**options).oracle
    target, tokenizer, drafter = loaded(**options)
    prompt = oracle.prompt(40)
    for end in oracle.walk(prompt, 18):  # prefill, 8 of a full cycle, 8 of the next
        made = caches(target)
        ending = replace(oracle, ends=frozenset({end}))
        result = generate(
            target, drafter, tokenizer, prompt, max_tokens=60, extra_eos_token_ids=[end]
        )
        walk = ending.walk(prompt, 60)
        assert result.tokens == walk
        assert result.finish_reason == "stop"
        assert result.stats.accepted_per_cycle == ending.cycles(prompt, 60)
        assert_cycles_add_up(result, budget=60)
        assert lengths(made[-1]) == {len(prompt) + len(walk) - 1}


@pytest.mark.parametrize("which", [0, 1])
def test_each_end_of_the_configs_list_stops(pair, loaded, which):
    oracle = pair().oracle
    end = int(oracle.ring.order[which])
    ring = len(oracle.ring.order)
    prompts = (oracle.prompt(40, start=i * ring - 30) for i in range(1, 40))
    prompt = next(p for p in prompts if oracle.walk(p, 60)[-1] == end)
    result = generate(*_order(loaded()), prompt, max_tokens=-1)
    assert result.tokens == oracle.walk(prompt, 60)
    assert result.finish_reason == "stop"
    assert result.stats.accepted_per_cycle == oracle.cycles(prompt, 60)


def test_the_loop_itself_ends_there(pair, loaded):
    oracle = pair(eos="off").oracle
    target, _, drafter = loaded(eos="off")
    prompt = oracle.prompt(40)
    walk = oracle.walk(prompt, 10)
    for count, end in enumerate(walk, start=1):
        decoding = Decoding(target, drafter, TokenRule(SamplingConfig()), seed=0)
        options = {"eos": frozenset({end}), "num_draft_tokens": 7}
        *_, last = decoding.run(prompt, max_tokens=60, **options)
        assert decoding.tokens == prompt + walk[:count]
        assert last.tokens[-1] == end
        assert len(last.rows) == len(last.tokens)
        assert last.accepted == (0 if count == 1 else min(len(last.tokens), 7))
        assert lengths(decoding.cache) == {40 + count - 1}


# Scripted drafters: right for n tokens of each block, then wrong.


@pytest.fixture(scope="module")
def plain(loaded):
    """A prompt, and 320 tokens after it by mlx-lm."""
    target, *_ = loaded("random")
    prompt = [7, 300, 41, 9, 8, 255, 100]
    return prompt, mlx_lm_tokens(target, prompt, 320)


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_the_budget_is_met_exactly(loaded, plain, right, width):
    prompt, expected = plain
    for budget in range(1, 21):
        result, script = run_scripted(
            loaded("random"),
            prompt,
            expected,
            right,
            max_tokens=budget,
            num_draft_tokens=width,
        )
        assert result.tokens == expected[:budget]
        assert result.finish_reason == "length"
        left, drafted = budget - 1, []
        for emitted in result.stats.emitted_per_cycle:
            drafted.append(min(width, left - 1))
            left -= emitted
        assert left == 0
        assert result.stats.drafted_per_cycle == drafted
        assert script.calls == [count for count in drafted if count]
        assert_cycles_add_up(result, budget=budget)


def test_with_one_token_left_no_drafter_runs(loaded, plain):
    prompt, expected = plain
    result, script = run_scripted(loaded("random"), prompt, expected, 7, max_tokens=10)
    assert script.calls == [7]
    assert result.stats.drafted_per_cycle == [7, 0]
    assert result.stats.accepted_per_cycle == [7, 0]
    assert result.stats.emitted_per_cycle == [8, 1]


@pytest.mark.parametrize("right", range(8))
def test_drafts_are_kept_as_far_as_they_are_right(loaded, plain, right):
    prompt, expected = plain
    result, _ = run_scripted(loaded("random"), prompt, expected, right, max_tokens=57)
    assert result.tokens == expected[:57]
    assert set(result.stats.accepted_per_cycle[:-2]) == {right}


# Caches and contexts.


def test_the_cache_ends_before_the_last_token_after_a_budget(pair, loaded, caches):
    oracle = pair(eos="off", partial=0.5).oracle
    target, tokenizer, drafter = loaded(eos="off", partial=0.5)
    prompt, made = oracle.prompt(40), caches(target)
    for budget in (1, 2, 9, 10, 23):
        generate(target, drafter, tokenizer, prompt, max_tokens=budget)
        generate(target, None, tokenizer, prompt, max_tokens=budget)
        assert lengths(made[-1]) == lengths(made[-2]) == {40 + budget - 1}


@pytest.mark.parametrize("drafting", [True, False])
def test_the_cache_fits_the_tokens_handed_out_when_closed_early(
    pair, loaded, caches, drafting
):
    oracle = pair(eos="off").oracle
    target, tokenizer, drafter = loaded(eos="off")
    prompt, made = oracle.prompt(40), caches(target)
    for count in range(1, 12):
        stream = stream_generate(
            target, drafter if drafting else None, tokenizer, prompt, max_tokens=50
        )
        tokens = [next(stream).token for _ in range(count)]
        stream.close()
        assert tokens == stream.generation.tokens == oracle.walk(prompt, count)
        assert stream.generation.finish_reason is None
        assert_cycles_add_up(stream.generation)
        assert lengths(made[-1]) == {40 + count - 1}


def test_the_cache_fits_the_tokens_kept_before_a_stop_string(pair, loaded, caches):
    oracle = pair(eos="off").oracle
    target, tokenizer, drafter = loaded(eos="off")
    prompt, made = oracle.prompt(40), caches(target)
    walk = oracle.walk(prompt, 9)
    texts = [tokenizer.decode([token]) for token in walk]
    for position in range(1, 9):
        stop = texts[position]
        if stop == "\ufffd" or stop in "".join(texts[:position]):
            continue
        result = generate(
            target, drafter, tokenizer, prompt, max_tokens=50, stop=[stop]
        )
        assert result.tokens == walk[: position + 1]
        assert result.finish_reason == "stop"
        assert_cycles_add_up(result)
        assert lengths(made[-1]) == {40 + position}


@pytest.mark.parametrize("place", ["prefill", "draft", "verify"])
def test_an_interrupt_leaves_a_usable_target(pair, loaded, caches, monkeypatch, place):
    oracle = pair(eos="off").oracle
    target, tokenizer, drafter = loaded(eos="off")
    prompt, made, calls = oracle.prompt(40), caches(target), []

    def interrupting(function, when):
        def called(*args, **kwargs):
            result = function(*args, **kwargs)
            calls.append(place)
            if len(calls) == when:
                raise KeyboardInterrupt
            return result

        return called

    with monkeypatch.context() as patch:
        if place == "draft":
            patch.setattr(
                drafter, "propose", interrupting(drafter.propose, 2), raising=False
            )
        else:
            when = 2 if place == "prefill" else 6  # the second verify
            patch.setattr(target, "forward", interrupting(target.forward, when))
        stream = stream_generate(
            target, drafter, tokenizer, prompt, max_tokens=50, prefill_step_size=15
        )
        with pytest.raises(KeyboardInterrupt):
            for _ in stream:
                pass
    kept = stream.generation.tokens
    assert len(kept) == {"prefill": 0, "draft": 9, "verify": 9}[place]
    assert kept == oracle.walk(prompt, 50)[: len(kept)]
    assert_cycles_add_up(stream.generation) if kept else None
    done = 15 if place == "prefill" else len(prompt) + len(kept)
    assert lengths(made[-1]) == {done - 1}
    again = generate(target, drafter, tokenizer, prompt, max_tokens=20)
    assert again.tokens == oracle.walk(prompt, 20)
    assert again.stats.accepted_per_cycle == oracle.cycles(prompt, 20)


@pytest.mark.parametrize("layer_types", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("kind", ["oracle", "random"])
def test_the_context_after_cycles_is_that_of_a_fresh_prefill(
    pair, loaded, kind, layer_types
):
    options = {"layer_types": layer_types, "sliding_window": 24}
    if kind == "oracle":
        options |= {"partial": 0.5, "eos": "off"}
    made = loaded(kind, **options)
    prompt = list(range(7, 47))
    cycled = decode(made, prompt, 42)
    fresh = decode(made, cycled.tokens[:-1], 1)
    for ours, theirs in zip(cycled.context, fresh.context, strict=True):
        assert ours.end == theirs.end == 40 + 41
        assert_same_rows(ours, theirs)


def assert_same_rows(ours, theirs):
    """Equal keys and values for the newest rows, as many as a block can see."""
    count = min(ours.rows, theirs.rows)
    assert count == ours.end or count >= ours.window - 1
    for one, two in zip(ours.arrays, theirs.arrays, strict=True):
        one = one[:, :, ours.rows - count : ours.rows]
        two = two[:, :, theirs.rows - count : theirs.rows]
        assert_close(one, two, 0 if EXACT_WIDTHS else 1e-4, what="context")


@pytest.mark.parametrize("layer_types", ["full", "sliding"])
def test_the_context_does_not_depend_on_the_prefill_step(loaded, layer_types):
    made = loaded("random", layer_types=layer_types, sliding_window=24)
    prompt = [7 + (i * i) % 400 for i in range(43)]
    whole = decode(made, prompt, 1)
    for step in (1, 5, 42):
        chunked = decode(made, prompt, 1, prefill_step_size=step)
        assert chunked.tokens == whole.tokens
        for ours, theirs in zip(chunked.context, whole.context, strict=True):
            assert_same_rows(ours, theirs)


# Equal to mlx-lm, whatever the drafter proposes.


@pytest.mark.parametrize("is_causal", [None, False, True])
@pytest.mark.parametrize("layer_types", ["full", "sliding", "mixed"])
def test_random_pairs_decode_as_mlx_lm_does(loaded, layer_types, is_causal):
    target, tokenizer, drafter = loaded(
        "random", layer_types=layer_types, sliding_window=16, is_causal=is_causal
    )
    for seed, step in ((0, 5), (1, 2048)):
        prompt = mx.random.randint(6, 512, (20,), key=mx.random.key(seed)).tolist()
        options = {"prefill_step_size": step}
        result = generate(target, drafter, tokenizer, prompt, max_tokens=30, **options)
        expected = mlx_lm_tokens(target, prompt, 30, eos=tokenizer.eos_token_ids)
        assert_lossless(result, expected, target, tokenizer, prompt, **options)
        assert_cycles_add_up(result)


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"block_size": 16},
        {"heads": 6, "kv_heads": 3, "head_dim": 16},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_other_targets_decode_as_mlx_lm_does(loaded, options):
    target, tokenizer, drafter = loaded("random", **options)
    prompt = list(range(7, 30))
    result = generate(target, drafter, tokenizer, prompt, max_tokens=60)
    expected = mlx_lm_tokens(target, prompt, 60, eos=tokenizer.eos_token_ids)
    assert_lossless(result, expected, target, tokenizer, prompt)


def check_penalties(loaded, plain, count, right, **options):
    made = loaded("random")
    target, tokenizer, _ = made
    prompt, unpenalized = plain
    expected = mlx_lm_tokens(
        target, prompt, count, eos=tokenizer.eos_token_ids, **options
    )
    assert len(expected) == count
    assert expected != unpenalized[:count]
    result, _ = run_scripted(made, prompt, expected, right, max_tokens=count, **options)
    assert_lossless(result, expected, target, tokenizer, prompt, **options)
    assert set(result.stats.accepted_per_cycle[:-2]) == {right}


@pytest.mark.parametrize("right", [0, 3, 7])
def test_a_repetition_penalty_holds_for_300_tokens(loaded, plain, right):
    check_penalties(loaded, plain, 300, right, repetition_penalty=1.3)


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "repetition_context_size": 300},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.7},
        {"logit_bias": {9: 3.0, 100: -50.0, MASK: 2.0}, "repetition_penalty": 0.8},
    ],
    ids=["long", "presence", "frequency", "bias"],
)
def test_penalties_act_row_by_row(loaded, plain, options, right):
    check_penalties(loaded, plain, 40, right, **options)


@pytest.mark.parametrize("right", [0, 3, 7])
def test_processors_see_what_plain_decoding_shows_them(loaded, plain, right):
    made = loaded("random")
    prompt, _ = plain

    def recording(seen):
        def processor(tokens, logits):
            seen[tuple(tokens.tolist())] = logits[:]
            return logits - 2 * (mx.arange(512) % 7 == len(tokens) % 7)

        return processor

    plainly, drafting = {}, {}
    expected = mlx_lm_tokens(made[0], prompt, 30, processors=[recording(plainly)])
    result, _ = run_scripted(
        made,
        prompt,
        expected,
        right,
        max_tokens=30,
        logits_processors=[recording(drafting)],
    )
    assert result.tokens == expected
    for count in range(30):
        history = tuple(prompt + expected[:count])
        assert_close(drafting[history], plainly[history], 0 if EXACT_WIDTHS else 1e-4)


@pytest.mark.parametrize("right", [0, 3, 7])
def test_the_mask_is_an_ordinary_token(loaded, plain, right):
    made = loaded("random")
    prompt, _ = plain
    options = {"logit_bias": {MASK: 100.0}}
    result, _ = run_scripted(made, prompt, [MASK] * 12, right, max_tokens=12, **options)
    assert result.tokens == [MASK] * 12
    assert result.text == "<|MASK|>" * 12
    result, _ = run_scripted(
        made,
        prompt,
        [MASK] * 12,
        right,
        max_tokens=12,
        extra_eos_token_ids=[MASK],
        **options,
    )
    assert result.tokens == [MASK]
    assert result.text == ""
    assert result.finish_reason == "stop"


# A quantized cache: mlx-lm's rule, to the token.


@pytest.mark.parametrize("right", [0, 3, 7])
@pytest.mark.parametrize("start", [0, 16, 19, 1000])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_cache_decodes_as_mlx_lm_does(
    loaded, plain, caches, monkeypatch, bits, start, right
):
    made = loaded("random")
    target, tokenizer, _ = made
    prompt, _ = plain
    kv = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}
    expected = mlx_lm_tokens(target, prompt, 40, **kv)
    held, spans = caches(target), []
    forward = target.forward

    def spy(tokens, cache, taps=()):
        spans.append((cache[0].offset, cache[0].offset + tokens.shape[1]))
        return forward(tokens, cache, taps)

    monkeypatch.setattr(target, "forward", spy)
    result, _ = run_scripted(made, prompt, expected, right, max_tokens=40, **kv)
    monkeypatch.undo()
    assert_lossless(result, expected, target, tokenizer, prompt, **kv)
    verifies = spans[2:]
    assert all(end <= start or begin >= start for begin, end in verifies)
    quantized = {type(layer).__name__ for layer in held[0]}
    beyond = start > len(prompt) + 40
    assert quantized == {"KVCache" if beyond else "QuantizedKVCache"}


def test_a_quantized_cache_takes_less_memory(loaded, plain, caches):
    target, tokenizer, drafter = loaded("random")
    prompt, _ = plain
    held = caches(target)
    for bits in (None, 8, 4):
        kv = {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": 0}
        generate(target, drafter, tokenizer, prompt, max_tokens=20, **kv)
    full, eight, four = (sum(layer.nbytes for layer in cache) for cache in held)
    assert four < eight < full / 2


# Several generations.


def test_generations_of_decreasing_length_equal_fresh_ones(pair, loaded):
    oracle = pair(partial=0.2, eos="off").oracle
    target, tokenizer, drafter = loaded(partial=0.2, eos="off")
    for length, count in ((300, 40), (60, 20), (18, 9)):
        prompt = oracle.prompt(length)
        result = generate(target, drafter, tokenizer, prompt, max_tokens=count)
        assert result.tokens == oracle.walk(prompt, count)
        assert result.stats.accepted_per_cycle == oracle.cycles(prompt, count)


def test_streams_advanced_in_turn_do_not_disturb_each_other(pair, loaded):
    oracle = pair(partial=0.2, eos="off").oracle
    target, tokenizer, drafter = loaded(partial=0.2, eos="off")
    prompts = [oracle.prompt(length, start=length) for length in (40, 90, 25)]
    streams = [
        stream_generate(target, drafter, tokenizer, prompt, max_tokens=25)
        for prompt in prompts
    ]
    for _ in zip(*streams, strict=True):
        pass
    for prompt, stream in zip(prompts, streams, strict=True):
        assert stream.generation.tokens == oracle.walk(prompt, 25)
        accepted = stream.generation.stats.accepted_per_cycle
        assert accepted == oracle.cycles(prompt, 25)


def test_drafters_with_other_taps_share_a_target(pair, tmp_path, loaded):
    target, tokenizer, first = loaded("random")
    before = dict(tree_flatten(target.model.parameters()))
    second = load_drafter(pair("random", taps=(2, 0, 1), seed=5).drafter, target)
    prompt = list(range(7, 30))
    expected = mlx_lm_tokens(target, prompt, 12)
    for drafter in (first, second, first):
        fresh = decode((target, tokenizer, drafter), prompt, 12)
        assert fresh.tokens[len(prompt) :] == expected
        width = len(drafter.config.target_layer_ids) * 96
        assert drafter.fc.weight.shape == (96, width)
        assert "embed_tokens" not in drafter
        assert not any("model" in n for n, _ in tree_flatten(drafter.parameters()))
    after = dict(tree_flatten(target.model.parameters()))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)
