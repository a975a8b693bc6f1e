"""SmolLM2-135M-Instruct with a random drafter: the tokens of mlx-lm, every one."""

import os

import pytest
from smollm2 import write_random_drafter

from mlx_dflash2 import load_drafter, load_target
from mlx_dflash2.bench.lossless import compare_prompt, read_prompts

NAMES = ("short-chat", "short-code", "math-train", "chinese-chat", "emoji")


@pytest.fixture(scope="module")
def loaded(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafter") / "drafter"
    write_random_drafter(smollm2, folder, seed=0)
    target, tokenizer = load_target(smollm2)
    return target, load_drafter(folder, target), tokenizer


@pytest.mark.real
@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_mlx_lms(loaded, name):
    result = compare_prompt(*loaded, name, read_prompts()[name])
    exact_kernels = "openblas" not in os.environ.get("LD_PRELOAD", "")
    assert result.comparison.identical or (
        not exact_kernels and result.comparison.near_tie
    ), str(result.comparison)
