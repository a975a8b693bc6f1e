"""The target: mlx-lm's own numbers, exact taps, and a careful load."""

import json
import logging
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from lossless import assert_lossless, mlx_lm_tokens
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from pair_files import write_json, write_safetensors
from tiny import TARGET, mlx_target

from mlx_dflash2.checkpoint import INDEX
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.generation import generate
from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.target import Target

PROMPT = [int(token) for token in np.random.default_rng(5).integers(6, 512, 37)]


def write_quantized(source, folder, bits):
    """A folder as mlx-lm's conversion writes it."""
    target, _ = load_target(source)
    nn.quantize(target.model, group_size=32, bits=bits)
    shutil.copytree(source, folder)
    weights = dict(tree_flatten(target.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = json.loads((folder / "config.json").read_text())
    config["quantization"] = {"group_size": 32, "bits": bits, "mode": "affine"}
    write_json(folder / "config.json", config)
    return folder


@pytest.fixture(scope="module")
def quantized(pair, tmp_path_factory):
    """`quantized(bits, **options)`: a random target in 4 or 8 bits."""
    made = {}

    def make(bits, **options):
        key = (bits, *options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("quantized") / "target"
            made[key] = write_quantized(pair("random", **options).target, folder, bits)
        return made[key]

    return make


@pytest.fixture
def copied(pair, tmp_path):
    """`copied(changes, **options)`: a target's folder with another config.json."""

    def copy(changes=None, **options):
        folder = tmp_path / "target"
        shutil.copytree(pair("random", **options).target, folder)
        config = json.loads((folder / "config.json").read_text()) | (changes or {})
        kept = {name: value for name, value in config.items() if value != "absent"}
        write_json(folder / "config.json", kept)
        return folder

    return copy


def logits_of(target, tokens, cache=None, taps=()):
    hidden, _ = target.forward(mx.array([tokens]), cache or target.make_cache(), taps)
    return target.head(hidden)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "tied", "4 bit", "4 bit tied"])
def test_logits_with_taps_are_mlx_lms_bit_for_bit(pair, quantized, kind):
    options = {"tied": True} if "tied" in kind else {}
    if kind == "bfloat16":
        options["dtype"] = "bfloat16"
    folder = (
        quantized(4, **options) if "4" in kind else pair("random", **options).target
    )
    target, _ = load_target(folder)
    ours, theirs = target.make_cache(), make_prompt_cache(target.model)
    tokens = PROMPT
    for _ in range(65):
        tapped = logits_of(target, tokens, ours, (2, 0))
        plain = target.model(mx.array([tokens]), cache=theirs)
        assert tapped.dtype == plain.dtype
        assert mx.array_equal(tapped, plain)
        tokens = [mx.argmax(plain[0, -1]).item()]


def test_a_tap_is_the_output_of_its_layer():
    target = mlx_target()
    for index, layer in enumerate(target.model.layers):
        silent = {n: mx.zeros_like(w) for n, w in tree_flatten(layer.parameters())}
        layer.load_weights(list(silent.items()))
        layer.mlp = Constant(10.0**index)
    embedded = target.embed(mx.array([[5, 6, 7]]))
    for taps in ((0, 1, 2, 3), (2, 0), (3,)):
        _, features = target.forward(mx.array([[5, 6, 7]]), target.make_cache(), taps)
        assert features.shape == (1, 3, len(taps) * 64)
        for place, tap in enumerate(taps):
            added = features[..., 64 * place : 64 * (place + 1)] - embedded
            wanted = sum(10.0**index for index in range(tap + 1))
            assert mx.allclose(added, mx.full(added.shape, wanted), rtol=1e-5)


class Constant(nn.Module):
    """Stands for an MLP that writes one value everywhere."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def __call__(self, rows):
        return mx.full(rows.shape, self.value, rows.dtype)


def test_without_taps_no_features_are_made():
    target = mlx_target()
    _, features = target.forward(mx.array([[5, 6]]), target.make_cache())
    assert features is None


def test_rolling_back_forgets_exactly_the_rejected_rows():
    target = mlx_target()
    cache, fresh = target.make_cache(), target.make_cache()
    logits_of(target, [5, 6, 7, 8], cache)
    for rejected in ([9, 10, 11], [12], [13, 14]):
        logits_of(target, rejected, cache)
        target.roll_back(cache, 4)
    logits_of(target, [5, 6, 7, 8], fresh)
    assert mx.array_equal(
        logits_of(target, [20], cache), logits_of(target, [20], fresh)
    )


def test_dtype_is_what_it_computes_in(pair, quantized):
    assert load_target(pair("random", dtype="bfloat16").target)[0].dtype == mx.bfloat16
    assert load_target(quantized(4))[0].dtype == mx.float32


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_targets_decode_as_mlx_lm_does(pair, quantized, bits, tied):
    options = {"tied": tied} if tied else {}
    target, tokenizer = load_target(quantized(bits, **options))
    assert isinstance(target.model.model.embed_tokens, nn.QuantizedEmbedding)
    drafter = load_drafter(pair("random", **options).drafter, target)
    result = generate(target, drafter, tokenizer, PROMPT, max_tokens=40)
    expected = mlx_lm_tokens(target, PROMPT, 40, eos=tokenizer.eos_token_ids)
    assert_lossless(result, expected, target, tokenizer, PROMPT)


# Loading.


def test_a_sliding_target_is_refused(copied):
    mixed = ["sliding_attention", "full_attention"] * 2
    folder = copied({"layer_types": mixed, "sliding_window": 32})
    with pytest.raises(DFlash2Error, match="cannot be rolled back"):
        load_target(folder)


def test_a_target_that_slides_everywhere_is_refused(copied):
    folder = copied({"layer_types": ["sliding_attention"] * 4, "sliding_window": 32})
    with pytest.raises(DFlash2Error, match="cannot be rolled back"):
        load_target(folder)


@pytest.mark.parametrize("flat", ["absent", None, 5e6])
def test_a_theta_under_rope_parameters_counts(pair, copied, flat):
    known, _ = load_target(pair("random", rope_theta=5e6).target)
    folder = copied({"rope_theta": flat}, rope_theta=5e6, target_rope="nested")
    target, _ = load_target(folder)
    assert target.model.layers[0].self_attn.rope.base == 5e6
    assert mx.array_equal(logits_of(target, PROMPT), logits_of(known, PROMPT))
    other, _ = load_target(pair("random").target)
    assert not mx.allclose(logits_of(target, PROMPT), logits_of(other, PROMPT))


def test_two_thetas_that_differ_are_refused(copied):
    folder = copied({"rope_parameters": {"rope_theta": 5e6}})
    with pytest.raises(DFlash2Error, match="rope_theta is 10000.0 but .* 5000000.0"):
        load_target(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_without_tie_word_embeddings_the_tensors_decide(pair, copied, tied):
    known, _ = load_target(pair("random", tied=tied).target)
    target, _ = load_target(copied({"tie_word_embeddings": "absent"}, tied=tied))
    assert ("lm_head" in target.model) != tied
    assert mx.array_equal(logits_of(target, PROMPT), logits_of(known, PROMPT))


def test_code_that_a_config_names_is_never_run(copied, caplog):
    folder = copied(
        {
            "model_file": "evil.py",
            "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        }
    )
    code = f"open({str(folder / 'proof')!r}, 'w').close()\n"
    (folder / "evil.py").write_text(code)
    with caplog.at_level(logging.WARNING):
        load_target(folder)
    assert not (folder / "proof").exists()
    assert "model_file is ignored" in caplog.text
    assert "auto_map is ignored" in caplog.text


def test_a_stale_shard_is_ignored(copied):
    folder = copied(shards=3)
    before = logits_of(load_target(folder)[0], PROMPT)
    stale = {"model.norm.weight": np.full(96, 100.0)}
    write_safetensors(folder / "model-00004-of-00004.safetensors", stale, "float32")
    assert mx.array_equal(logits_of(load_target(folder)[0], PROMPT), before)


def test_a_missing_shard_is_named(copied):
    folder = copied(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DFlash2Error, match="model-00002-of-00003.safetensors"):
        load_target(folder)


def test_a_missing_tensor_is_named(copied):
    folder = copied(shards=3)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    write_json(folder / INDEX, index)
    with pytest.raises(DFlash2Error, match="model.norm.weight"):
        load_target(folder)


def test_other_model_types_are_refused(copied):
    with pytest.raises(DFlash2Error, match="model_type is 'qwen3'"):
        load_target(copied({"model_type": "qwen3"}))


def test_a_target_says_what_it_is(pair):
    target, tokenizer = load_target(pair("random").target)
    assert isinstance(target, Target)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 96, 512)
    assert set(tokenizer.eos_token_ids) == {1, 2}
    assert mlx_target(TARGET).vocab_size == 256
