"""Text in, text out: responses, prompts, options, threads and memory."""

import dataclasses
import gc
import json
import shutil
import threading

import mlx.core as mx
import pytest
from drafter_files import run_python
from lossless import (
    EXACT_WIDTHS,
    Scripted,
    assert_cycles_add_up,
    assert_lossless,
    mlx_lm_tokens,
    run_scripted,
)
from mlx_lm.generate import GenerationResponse, generate_step
from mlx_lm.generate import stream_generate as mlx_lm_stream
from mlx_lm.sample_utils import make_logits_processors
from pair_files import write_json
from tiny import assert_close

import mlx_dflash2
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.generation import Cycle, generate, stream_generate
from mlx_dflash2.loading import load_drafter, load_target

PROMPT = [7, 300, 41, 9, 8, 255, 100]


@pytest.fixture(scope="module")
def loaded(pair):
    folders = pair("random")
    target, tokenizer = load_target(folders.target)
    return target, tokenizer, load_drafter(folders.drafter, target)


@pytest.fixture(scope="module")
def expected(loaded):
    return mlx_lm_tokens(loaded[0], PROMPT, 60)


def scripted(loaded, expected, right, **options):
    """Responses of a drafter that is right for `right` tokens of each block."""
    target, tokenizer, drafter = loaded
    script = Scripted(drafter.config, len(PROMPT), expected, right)
    return list(stream_generate(target, script, tokenizer, PROMPT, **options))


# Responses.


def test_a_response_has_every_field_mlx_lm_has(loaded, expected):
    ours = scripted(loaded, expected, 3, max_tokens=20)
    theirs = list(
        mlx_lm_stream(loaded[0].model, loaded[1], mx.array(PROMPT), max_tokens=20)
    )
    for field in dataclasses.fields(GenerationResponse):
        assert all(hasattr(response, field.name) for response in ours), field.name
    assert [r.token for r in ours] == [r.token for r in theirs]
    assert "".join(r.text for r in ours) == "".join(r.text for r in theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.prompt_tokens == other.prompt_tokens == len(PROMPT)
        assert mine.generation_tokens == other.generation_tokens
        assert mine.finish_reason == other.finish_reason
        assert mine.logprobs.shape == other.logprobs.shape
        assert mine.logprobs.dtype == other.logprobs.dtype
        assert mine.prompt_tps > 0 and mine.peak_memory > 0
    assert ours[-1].generation_tps > 0
    assert ours[-1].finish_reason == "length"


@pytest.mark.parametrize("right", [0, 3, 7])
def test_logprobs_are_mlx_lms_for_the_token(loaded, expected, right):
    options = {"repetition_penalty": 1.3}
    steps = generate_step(
        mx.array(PROMPT),
        loaded[0].model,
        max_tokens=20,
        logits_processors=make_logits_processors(**options),
    )
    theirs = [(token, logprobs) for token, logprobs in steps]
    tokens = [token for token, _ in theirs]
    ours = scripted(loaded, [*tokens, *[0] * 9], right, max_tokens=20, **options)
    for response, (token, logprobs) in zip(ours, theirs, strict=True):
        assert response.token == token
        assert_close(response.logprobs, logprobs, 0 if EXACT_WIDTHS else 1e-4)
        assert mx.argmax(response.logits).item() == token


def test_logprobs_are_computed_only_when_read(loaded, expected, monkeypatch):
    import mlx_dflash2.generation as generation

    made = []
    log_softmax = generation.log_softmax
    monkeypatch.setattr(
        generation, "log_softmax", lambda row: made.append(row) or log_softmax(row)
    )
    responses = scripted(loaded, expected, 3, max_tokens=20)
    assert made == []
    assert responses[4].logprobs.shape == (512,)
    assert len(made) == 1


@pytest.mark.parametrize("right", [0, 3, 7])
def test_a_cycle_stands_on_its_last_token_only(loaded, expected, right):
    responses = scripted(loaded, expected, right, max_tokens=30)
    assert responses[0].cycle is None and not responses[0].from_draft
    tokens, cycles = [], []
    for response in responses[1:]:
        tokens.append(response.token)
        if response.cycle is not None:
            cycle = response.cycle
            assert isinstance(cycle, Cycle)
            assert cycle.tokens == tokens
            marks = [r.from_draft for r in responses][-len(tokens) :]
            cycles.append(cycle)
            tokens = []
    assert tokens == []
    assert sum(len(cycle.tokens) for cycle in cycles) == 29
    drafted = [r.from_draft for r in responses[1:]]
    for cycle in cycles:
        marks, drafted = drafted[: len(cycle.tokens)], drafted[len(cycle.tokens) :]
        assert marks == [i < cycle.accepted for i in range(len(cycle.tokens))]
    assert cycles[0].accepted == right


def test_plain_responses_have_no_cycle(loaded, expected):
    target, tokenizer, _ = loaded
    for options in ({"drafter": None}, {"num_draft_tokens": 0}):
        stream = stream_generate(
            target,
            options.get("drafter", loaded[2]),
            tokenizer,
            PROMPT,
            max_tokens=12,
            num_draft_tokens=options.get("num_draft_tokens"),
        )
        responses = list(stream)
        assert [r.token for r in responses] == expected[:12]
        assert all(r.cycle is None and not r.from_draft for r in responses)
        assert stream.generation.stats.plain_steps == 11
        assert stream.generation.stats.cycles == 0
        assert_cycles_add_up(stream.generation)


def test_a_generation_is_what_its_stream_gave(loaded, expected):
    stream = stream_generate(*_order(loaded), PROMPT, max_tokens=25)
    responses = list(stream)
    result = stream.generation
    assert result.tokens == [r.token for r in responses]
    assert result.text == "".join(r.text for r in responses)
    assert result.finish_reason == responses[-1].finish_reason == "length"
    assert result.prompt_tokens == len(PROMPT)
    assert result.prefill_seconds > 0 and result.decode_seconds > 0
    assert result.tokens_per_second == 24 / result.decode_seconds
    one = generate(*_order(loaded), PROMPT, max_tokens=1)
    assert one.tokens == expected[:1]
    assert one.tokens_per_second is None
    assert one.stats.acceptance_length is None


def _order(loaded):
    """(target, drafter, tokenizer) as `generate` takes them."""
    target, tokenizer, drafter = loaded
    return target, drafter, tokenizer


def test_a_stream_not_yet_begun_or_finished_can_be_closed(loaded):
    stream = stream_generate(*_order(loaded), PROMPT, max_tokens=5)
    stream.close()
    assert stream.generation.tokens == []
    assert stream.generation.finish_reason is None
    with pytest.raises(StopIteration):
        next(stream)
    done = stream_generate(*_order(loaded), PROMPT, max_tokens=5)
    assert len(list(done)) == 5
    done.close()
    assert done.generation.finish_reason == "length"


def test_progress_tells_positions_of_the_prompt(loaded):
    calls = []
    generate(
        *_order(loaded),
        list(range(7, 30)),
        max_tokens=2,
        prefill_step_size=10,
        prompt_progress_callback=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(0, 23), (10, 23), (20, 23), (22, 23), (23, 23)]


# Ends.


@pytest.mark.parametrize("right", [0, 3, 7])
def test_the_text_ends_before_a_stop_string(loaded, expected, right):
    whole, _ = run_scripted(loaded, PROMPT, expected, right, max_tokens=20)
    texts = [r.text for r in scripted(loaded, expected, right, max_tokens=20)]
    for position in (0, 1, 5, 8, 13):
        before, stop = "".join(texts[:position]), texts[position]
        if not stop or stop in before:
            continue
        result, _ = run_scripted(
            loaded, PROMPT, expected, right, max_tokens=20, stop=[stop]
        )
        assert result.text == whole.text[: whole.text.index(stop)]
        assert result.tokens == expected[: position + 1]
        assert result.finish_reason == "stop"
        assert_cycles_add_up(result)


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop(loaded, expected):
    end = expected[4]
    assert end not in expected[:4]
    for drafter in (loaded[2], None):
        result = generate(
            loaded[0],
            drafter,
            loaded[1],
            PROMPT,
            max_tokens=5,
            extra_eos_token_ids=[end],
        )
        assert result.tokens == expected[:5]
        assert result.finish_reason == "stop"


def test_an_end_is_a_token_but_no_text(loaded, expected):
    whole = generate(*_order(loaded), PROMPT, max_tokens=5)
    result = generate(
        *_order(loaded), PROMPT, max_tokens=9, extra_eos_token_ids=[expected[5]]
    )
    assert result.tokens == expected[:6]
    assert result.text == whole.text


# Prompts and options.


def test_a_prompt_may_be_text_ids_an_array_or_messages(loaded):
    target, drafter, tokenizer = _order(loaded)
    text = "the cat"
    ids = tokenizer.encode(text)
    wanted = mlx_lm_tokens(target, ids, 8)
    for prompt in (text, ids, mx.array(ids)):
        result = generate(target, drafter, tokenizer, prompt, max_tokens=8)
        assert result.tokens == wanted
        assert result.prompt_tokens == len(ids)
    messages = [{"role": "user", "content": text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    result = generate(target, drafter, tokenizer, messages, max_tokens=8)
    assert result.tokens == mlx_lm_tokens(target, ids, 8)
    assert result.prompt_tokens == len(ids)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_prompt_may_be_a_single_token(loaded, length):
    prompt = PROMPT[:length]
    result = generate(*_order(loaded), prompt, max_tokens=20)
    wanted = mlx_lm_tokens(loaded[0], prompt, 20, eos=loaded[1].eos_token_ids)
    assert_lossless(result, wanted, loaded[0], loaded[1], prompt)


def test_a_plain_tokenizer_is_wrapped(loaded, expected):
    target, drafter, tokenizer = _order(loaded)
    result = generate(target, drafter, tokenizer._tokenizer, PROMPT, max_tokens=9)
    assert result.tokens == expected[:9]


def test_an_opaque_sampler_serves_plain_decoding_only(loaded, expected):
    target, drafter, tokenizer = _order(loaded)
    second = lambda logprobs: mx.argsort(logprobs, axis=-1)[:, -2]  # noqa: E731
    options = {"max_tokens": 9, "sampler": second}
    result = generate(target, None, tokenizer, PROMPT, **options)
    theirs = generate_step(mx.array(PROMPT), target.model, max_tokens=9, sampler=second)
    assert result.tokens == [token.item() for token, _ in _as_arrays(theirs)]
    assert result.tokens != expected[:9]
    with pytest.raises(DFlash2Error, match="an opaque sampler returns tokens"):
        generate(target, drafter, tokenizer, PROMPT, **options)


def _as_arrays(steps):
    return ((mx.array(token), logprobs) for token, logprobs in steps)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"prefill_step_size": 0}, "prefill_step_size is 0"),
        ({"num_draft_tokens": 8}, r"num_draft_tokens is 8 \(block size 9\)"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"kv_bits": 7}, "kv_bits is 7"),
        ({"kv_bits": 8, "kv_group_size": 64}, "kv_group_size is 64"),
        (
            {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": -1},
            "quantized_kv_start is -1",
        ),
        ({"temp": -1}, "temperature is -1"),
        ({"top_k": 512}, "top_k is 512, expected a whole number, 0 to 511"),
        ({"logit_bias": {512: 1.0}}, "logit_bias token is 512"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_refused(loaded, options, message):
    with pytest.raises(DFlash2Error, match=message):
        stream_generate(*_order(loaded), PROMPT, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([5, 512], "the prompt holds token 512"),
        ([5, -1], "the prompt holds token -1"),
        ([5.5], "flat list or array of token ids"),
        ([[5, 6]], "flat list or array of token ids"),
    ],
    ids=str,
)
def test_prompts_that_are_none_are_refused(loaded, prompt, message):
    with pytest.raises(DFlash2Error, match=message):
        stream_generate(*_order(loaded), prompt)


def test_drafted_tokens_without_a_drafter_are_refused(loaded):
    with pytest.raises(DFlash2Error, match="there is no drafter"):
        stream_generate(loaded[0], None, loaded[1], PROMPT, num_draft_tokens=3)


def test_the_public_names_lead_here(pair):
    folders = pair("random")
    target, tokenizer = mlx_dflash2.load_target(str(folders.target))
    drafter = mlx_dflash2.load_drafter(str(folders.drafter), target)
    result = mlx_dflash2.generate(target, drafter, tokenizer, "cat", max_tokens=3)
    assert isinstance(result, mlx_dflash2.Generation)
    assert isinstance(result.stats, mlx_dflash2.AcceptanceStats)
    stream = mlx_dflash2.stream_generate(target, drafter, tokenizer, "cat")
    assert next(stream).token == result.tokens[0]
    stream.close()


# Threads and processes.


def in_a_thread(work):
    """The result of `work` in a thread that ends as MLX wants it to."""
    results = []

    def run():
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)
        finally:
            mx.clear_streams()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "top_p": 0.9, "seed": 3}])
@pytest.mark.parametrize("scaling", [None, LLAMA3], ids=["rope", "llama3"])
def test_what_one_thread_loads_others_generate_with(pair, tmp_path, options, scaling):
    made = pair("random")
    folder = tmp_path / "target"
    shutil.copytree(made.target, folder)
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"rope_scaling": scaling})
    target, tokenizer = load_target(folder)
    drafter = load_drafter(made.drafter, target)

    def work():
        return generate(
            target, drafter, tokenizer, PROMPT, max_tokens=20, **options
        ).tokens

    first, second, third = (in_a_thread(work) for _ in range(3))
    assert first == second == third == work()


@pytest.mark.parametrize("drafting", [True, False])
@pytest.mark.parametrize("options", [{}, {"temp": 1.0, "logit_bias": {9: 2.0}}])
def test_a_stream_goes_on_in_another_thread(loaded, options, drafting):
    target, drafter, tokenizer = _order(loaded)
    drafter = drafter if drafting else None
    options = {"max_tokens": 15, "seed": 3, **options}
    whole = generate(target, drafter, tokenizer, PROMPT, **options)
    stream = stream_generate(target, drafter, tokenizer, PROMPT, **options)
    first = [next(stream).token for _ in range(3)]
    middle = in_a_thread(lambda: [next(stream).token for _ in range(5)])
    last = in_a_thread(lambda: [response.token for response in stream])
    assert first + middle + last == whole.tokens


def test_a_process_whose_threads_generated_ends_well(pair):
    made = pair(eos="off", partial=0.2)
    prompts = [made.oracle.prompt(length) for length in (60, 30, 20)]
    code = """
import json, threading
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_dflash2 import generate, load_drafter, load_target
target, tokenizer = load_target(sys.argv[1])
drafter = load_drafter(sys.argv[2], target)
def work(prompt, out):
    result = generate(target, drafter, tokenizer, prompt, max_tokens=20)
    out.append([result.tokens, result.stats.accepted_per_cycle])
    mx.clear_streams()
out = []
for prompt in json.loads(sys.argv[3]):
    thread = threading.Thread(target=work, args=(prompt, out))
    thread.start()
    thread.join()
print(json.dumps(out))
"""
    done = run_python(code, made.target, made.drafter, json.dumps(prompts))
    assert done.returncode == 0, done.stderr
    for prompt, (tokens, accepted) in zip(
        prompts, json.loads(done.stdout), strict=True
    ):
        assert tokens == made.oracle.walk(prompt, 20)
        assert accepted == made.oracle.cycles(prompt, 20)


# Memory.


def test_a_long_prompt_keeps_no_features(pair):
    folders = pair("random", vocab=64, tokenizer="wordlevel")
    target, tokenizer = load_target(folders.target)
    drafter = load_drafter(folders.drafter, target)

    def peak(drafter, length):
        prompt = [7 + i % 50 for i in range(length)]
        gc.collect()  # what earlier tests left must not be freed in between
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        options = {"max_tokens": 2, "prefill_step_size": 32}
        generate(target, drafter, tokenizer, prompt, **options)
        return mx.get_peak_memory() - before

    def growth(drafter):
        """Bytes of peak memory that a position of the prompt costs."""
        short, long = (  # 20 and 40 prefill steps; work in flight only adds
            min(peak(drafter, length) for _ in range(3)) for length in (640, 1280)
        )
        return (long - short) / 640

    context = 4 * 2 * 2 * 32 * 2  # keys and values of two layers
    features = 4 * len(drafter.config.target_layer_ids) * 96
    assert growth(drafter) - growth(None) < context + features / 3
