"""Damaged or absurd model files: one line and exit code 2, whatever is wrong."""

import json
import shutil

import pytest
from command_line import assert_refused, run
from drafter_files import read_tensors, write_file
from safetensors.numpy import load_file, save_file

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.loading import load_drafter, load_target


@pytest.fixture
def copy(pair, tmp_path):
    """A private copy of an oracle pair, to be damaged."""
    shutil.copytree(pair("oracle").target, tmp_path / "target")
    shutil.copytree(pair("oracle").drafter, tmp_path / "drafter")
    return tmp_path


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def generate(folder):
    pair = ("--model", folder / "target", "--draft-model", folder / "drafter")
    return run("generate", "x", "-m", 2, *pair)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": [1]},
        {"rope_parameters": "x"},
        {"layer_types": 5},
        {"model_type": []},
        {"num_attention_heads": 0},
        {"rope_scaling": "foo"},
        {"vocab_size": 0},
        {"rope_theta": "x"},
        {"rope_theta": 0},
        {"rope_traditional": "x"},
        {"num_hidden_layers": 1000000000},
        {"num_hidden_layers": 3},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": "yes"},
    ],
)
def test_a_broken_target_config_is_one_line(copy, fields):
    change(copy / "target" / "config.json", **fields)
    assert_refused(generate(copy), "target")


@pytest.mark.parametrize("text", ["[]", '{"eos_token', "[" * 200000])
def test_a_broken_generation_config_is_one_line(copy, text):
    (copy / "target" / "generation_config.json").write_text(text)
    assert_refused(generate(copy), "generation_config.json")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 10**400},
        {"rms_norm_eps": 0},
        {"quantization": {"bits": 7, "group_size": 64}},
        {"block_size": 60000, "dflash_config": None},
    ],
)
def test_a_broken_drafter_config_is_one_line(copy, fields):
    path = copy / "drafter" / "config.json"
    raw = json.loads(path.read_text())
    if "block_size" in fields:
        fields = {"dflash_config": raw["dflash_config"] | {"block_size": 60000}}
    change(path, **fields)
    assert_refused(generate(copy), "drafter")


def test_a_stored_head_that_is_the_embedding_may_be_tied(copy):
    path = copy / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, path)
    change(copy / "target" / "config.json", tie_word_embeddings=True)
    target, _ = load_target(copy / "target")
    assert "lm_head" not in target.model


def test_an_unset_tying_follows_the_files(copy):
    change(copy / "target" / "config.json", tie_word_embeddings=None)
    target, _ = load_target(copy / "target")
    assert "lm_head" in target.model


def test_a_weight_that_is_no_number_is_named(copy):
    target, _ = load_target(copy / "target")
    tensors = read_tensors(copy / "drafter")
    damaged = tensors["norm.weight"]
    data = bytearray(damaged.data)
    data[:4] = b"\x00\x00\xc0\x7f"
    tensors["norm.weight"] = type(damaged)(damaged.dtype, damaged.shape, bytes(data))
    write_file(copy / "drafter" / "model.safetensors", tensors)
    with pytest.raises(DFlash2Error, match=r"norm\.weight holds values that are not"):
        load_drafter(copy / "drafter", target)


def test_convert_refuses_what_cannot_be_a_destination(copy):
    for place in ("~nobody-of-this-name/x", "a" * 300):
        result = run("convert", copy / "drafter", place, "--to-mlx")
        assert_refused(result, place)
    huge = ("-q", "--q-group-size", 10**12)
    result = run("convert", copy / "drafter", copy / "out", "--to-mlx", *huge)
    assert_refused(result, "1000000000000")
    assert not (copy / "out").exists()


@pytest.mark.parametrize("flag", ["--kv-group-size", "--quantized-kv-start"])
def test_a_flag_that_refines_another_needs_it(copy, flag):
    pair = ("--model", copy / "target", "--draft-model", copy / "drafter")
    assert_refused(run("generate", "x", flag, 32, *pair), flag, "--kv-bits")


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "conversation"])
def test_template_variables_are_not_the_tokenizers_arguments(copy, name):
    pair = ("--model", copy / "target", "--draft-model", copy / "drafter")
    options = ("--chat-template-config", json.dumps({name: "x"}))
    assert_refused(run("generate", "x", *options, *pair), name)
