"""What a generation refuses before it computes anything, each in one sentence."""

import mlx.core as mx
import pytest

from mlx_dflash2 import (
    DFlash2Error,
    generate,
    load_drafter,
    load_target,
    stream_generate,
)


@pytest.fixture(scope="module")
def loaded(pair):
    folders = pair("oracle")
    target, tokenizer = load_target(folders.target)
    return target, load_drafter(folders.drafter, target), tokenizer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": "5"}, "max_tokens is '5'"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"max_tokens": 5.5}, "max_tokens is 5.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"num_draft_tokens": 2.0}, "num_draft_tokens is 2.0"),
        ({"num_draft_tokens": True}, "num_draft_tokens is True"),
        ({"prefill_step_size": "2"}, "prefill_step_size is '2'"),
        ({"stop": [None]}, "a stop string is None"),
        ({"stop": [b"x"]}, "a stop string is b'x'"),
        ({"extra_eos_token_ids": 5}, "extra_eos_token_ids is 5"),
        ({"extra_eos_token_ids": ["</s>"]}, "extra_eos_token_ids holds token '</s>'"),
        ({"extra_eos_token_ids": [99999]}, "outside the vocabulary of 512"),
        ({"logits_processors": lambda tokens, row: row}, "a list of functions"),
        ({"logits_processors": [5]}, "a list of functions"),
        ({"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": "x"}, "is 'x'"),
        ({"kv_bits": 7, "kv_group_size": 32}, "kv_bits is 7"),
        ({"kv_bits": 8}, r"divides the head dimension 32: \[32\]"),
    ],
)
def test_a_wrong_argument_is_named(loaded, options, message):
    with pytest.raises(DFlash2Error, match=message):
        stream_generate(*loaded, [9, 10], **options)


def test_what_load_target_returns_is_not_a_target(loaded):
    target, drafter, tokenizer = loaded
    with pytest.raises(DFlash2Error, match="pass the first of them"):
        generate((target, tokenizer), drafter, tokenizer, [9])
    with pytest.raises(DFlash2Error, match="the drafter is a str"):
        generate(target, "drafter", tokenizer, [9])


def test_a_drafter_of_another_size_is_refused(loaded, pair):
    target, _, tokenizer = loaded
    other = pair("random", vocab=64, tokenizer="wordlevel")
    small, _ = load_target(other.target)
    with pytest.raises(DFlash2Error, match="another size"):
        generate(target, load_drafter(other.drafter, small), tokenizer, [9])


def test_a_processor_must_keep_the_shape(loaded):
    def cut(tokens, logits):
        return logits[:, :5]

    with pytest.raises(DFlash2Error, match=r"returned \(1, 5\)"):
        generate(*loaded, [9, 10], max_tokens=3, logits_processors=[cut])


@pytest.mark.parametrize("value", [None, 5, 2.5])
def test_a_path_of_another_type_is_refused(loaded, value):
    with pytest.raises(DFlash2Error, match="expected a folder or a Hub repository"):
        load_target(value)
    with pytest.raises(DFlash2Error, match="expected a folder or a Hub repository"):
        load_drafter(value, loaded[0])


def test_mlx_still_draws_after_refusals(loaded):
    with pytest.raises(DFlash2Error):
        generate(*loaded, [9], temp=1.0, top_k=512)
    assert mx.random.uniform(shape=(3,)).shape == (3,)
