"""The demo pair as it is shipped: complete, true to its record, and lossless."""

import hashlib
import json
import os

import pytest
from command_line import run

from mlx_dflash2.demo import CACHE, demo_drafter
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.pairs import drafter_for, fingerprint

pytestmark = pytest.mark.real

LARGEST = 32e6  # bytes of the weights
PROMPTS = {
    "short": "What is the capital of France?",
    "code": "Write a Python function that adds two numbers.",
}


@pytest.fixture
def cache(smollm2, monkeypatch):
    """The user's cache with the demo target in it."""
    monkeypatch.setenv(CACHE, str(smollm2.parent))


def read(name):
    return json.loads((demo_drafter() / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_demo_pair_writes_what_plain_decoding_writes(cache, prompt):
    flags = ["--model", "demo", "--offline", "-m", 48, "--verify", "--json"]
    result = run("generate", prompt, *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["model"], found["draft_model"]) == ("demo", "demo")
    exact_kernels = "openblas" not in os.environ.get("LD_PRELOAD", "")
    assert found["verify"]["identical"] or not exact_kernels, found["verify"]
    assert sum(found["stats"]["accepted_per_cycle"]) > 0


def test_the_shipped_drafter_is_small_enough():
    assert (demo_drafter() / "model.safetensors").stat().st_size <= LARGEST


def test_the_release_manifest_is_true_of_the_shipped_files():
    listed = {file["name"]: file for file in read("release_manifest.json")["files"]}
    there = {file.name for file in demo_drafter().iterdir()}
    assert there == listed.keys() | {"release_manifest.json"}
    assert there >= {
        *("config.json", "model.safetensors", "README.md", "SOURCE_TERMS.md"),
        "dflash2_training_meta.json",
    }
    for name, file in listed.items():
        content = (demo_drafter() / name).read_bytes()
        assert file["bytes"] == len(content), name
        assert file["sha256"] == hashlib.sha256(content).hexdigest(), name


def test_the_training_record_is_of_these_weights_and_this_target(smollm2):
    contract = read("dflash2_training_meta.json")["contract"]
    assert contract["drafter"] | {"dtype": "bfloat16"} == read("config.json")
    assert contract["target"]["fingerprint"] == fingerprint(smollm2)
    assert contract["target"] == read("release_manifest.json")["target"]
    assert read_drafter_config(demo_drafter()).kind == drafter_for("demo").kind


def test_a_folder_of_the_target_is_known(smollm2):
    assert drafter_for(str(smollm2)).drafter == "demo"
