"""The drafter writer on a tiny target, and the real model's folder."""

import json

import numpy as np
import pytest
from mlx_lm import load
from safetensors.numpy import load_file
from smollm2 import write_quantized_smollm2, write_random_drafter

from mlx_dflash2.checkpoint import stored_tensors
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.names import check_tensors


def test_a_random_drafter_fits_its_target(pair, tmp_path):
    target = pair("random", tied=True).target
    out = write_random_drafter(target, tmp_path / "drafter", 5, mask_token_id=77)
    config = read_drafter_config(out)
    shapes = {name: tensor.shape for name, tensor in stored_tensors(out).items()}
    check_tensors(shapes, config, where="drafter")
    assert config.hidden_size == 96 and config.num_target_layers == 4
    assert config.mask_token_id == 77


def test_identity_convolutions_are_the_identity(pair, tmp_path):
    target = pair("random").target
    out = write_random_drafter(target, tmp_path / "drafter", identity_convolutions=True)
    tensors = load_file(out / "model.safetensors")
    base = tensors["layers.0.mlp_conv.base_kernel"]
    assert np.array_equal(base[:, 0], np.ones_like(base[:, 0]))
    assert not base[:, 1:].any()
    assert not tensors["layers.0.mlp_conv.kernel_projection.weight"].any()


def test_random_drafters_differ_by_seed(pair, tmp_path):
    target = pair("random").target
    drafters = [
        load_file(write_random_drafter(target, tmp_path / str(seed), seed) / name)
        for seed in (0, 1)
        for name in ["model.safetensors"]
    ]
    assert not np.array_equal(drafters[0]["fc.weight"], drafters[1]["fc.weight"])


@pytest.mark.real
def test_smollm2_knows_the_capital_of_france(smollm2):
    from mlx_lm import generate

    model, tokenizer = load(str(smollm2))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    assert "Paris" in generate(model, tokenizer, prompt, max_tokens=12)


@pytest.mark.real
def test_smollm2_keeps_its_own_groups(tmp_path):
    folder = write_quantized_smollm2(tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    model, tokenizer = load(str(folder))
    assert "Paris" in "".join(
        tokenizer.decode(_greedy(model, tokenizer, "The capital of France is", 6))
    )


def _greedy(model, tokenizer, text, count):
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    prompt = mx.array(tokenizer.encode(text))
    return [int(token) for token, _ in generate_step(prompt, model, max_tokens=count)]
