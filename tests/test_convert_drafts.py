"""A converted drafter drafts what its source drafts, in both backends."""

import mlx.core as mx
import numpy as np
import pytest
from drafter_files import (
    PREDECESSOR,
    SUCCESSOR,
    read_config,
    read_tensors,
    run_python,
    write_drafter,
)

from mlx_dflash2.convert import to_mlx, to_torch

ANCHORS = range(20, 36)


def features(config: dict) -> np.ndarray:
    """Context features for 20 positions. Shape: (1, S, T*D)."""
    width = len(config["dflash_config"]["target_layer_ids"]) * config["hidden_size"]
    return np.random.default_rng(0).standard_normal((1, 20, width), np.float32)


def mlx_drafts(folder, target_folder) -> list[list[int]]:
    """The greedy blocks after each anchor."""
    from mlx_dflash2 import load_drafter, load_target

    target, _ = load_target(target_folder)
    drafter = load_drafter(folder, target)
    context = drafter.make_context()
    drafter.extend(mx.array(features(read_config(folder))), context)
    return [drafter.propose(a, target, context).tokens.tolist() for a in ANCHORS]


def torch_drafts(folder, target_folder) -> list[list[int]]:
    import torch

    from mlx_dflash2.torch.loading import load_drafter, load_target

    target = load_target(target_folder)
    drafter = load_drafter(folder, target)
    context = drafter.make_context()
    with torch.no_grad():
        given = torch.from_numpy(features(read_config(folder)))
        drafter.extend(given, context)
        return [drafter.propose(a, target, context).tokens.tolist() for a in ANCHORS]


def respelled(pair, tmp_path):
    """The pair's drafter as a trainer exports it: other names, everything on top."""
    config, tensors = read_config(pair.drafter), read_tensors(pair.drafter)
    config |= config.pop("dflash_config")
    config |= {"architectures": None, "model_type": "qwen3_dflash2"}
    config["target_num_hidden_layers"] = config["num_target_layers"]
    config["num_target_layers"] = len(config["target_layer_ids"])
    names = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
        PREDECESSOR: f"{PREDECESSOR}.weight",
        SUCCESSOR: f"{SUCCESSOR}.weight",
    }
    tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    return write_drafter(tmp_path / "trained", tensors, config=config, shards=2)


def test_every_spelling_drafts_the_same(pair, tmp_path):
    given = pair(kind="random")
    expected = mlx_drafts(given.drafter, given.target)
    assert len({tuple(block) for block in expected}) == len(ANCHORS)
    to_torch(respelled(given, tmp_path), tmp_path / "torch")
    to_mlx(tmp_path / "torch", tmp_path / "mlx")
    for folder in ("torch", "mlx"):
        assert mlx_drafts(tmp_path / folder, given.target) == expected


def test_what_goes_to_torch_drafts_the_same_there(pair, tmp_path):
    pytest.importorskip("torch")
    given = pair(kind="random")
    to_mlx(respelled(given, tmp_path), tmp_path / "mlx")
    to_torch(tmp_path / "mlx", tmp_path / "torch")
    expected = mlx_drafts(given.drafter, given.target)
    assert torch_drafts(tmp_path / "torch", given.target) == expected
    assert torch_drafts(tmp_path / "mlx", given.target) == expected


def test_a_quantized_folder_drafts_as_its_dequantized_values_do(pair, tmp_path):
    pytest.importorskip("torch")
    given = pair(kind="random")
    to_mlx(given.drafter, tmp_path / "q", quantize_bits=4, quantize_group_size=32)
    to_torch(tmp_path / "q", tmp_path / "plain", dequantize=True)
    expected = mlx_drafts(tmp_path / "q", given.target)
    assert expected != mlx_drafts(given.drafter, given.target)
    assert torch_drafts(tmp_path / "plain", given.target) == expected


def test_a_published_file_can_be_read_by_the_torch_reference_without_mlx(
    pair, tmp_path
):
    pytest.importorskip("torch")
    to_torch(pair(kind="random").drafter, tmp_path / "torch")
    code = """
from mlx_dflash2.torch.loading import load_drafter
drafter = load_drafter(sys.argv[1])
print(sum(p.numel() for p in drafter.parameters()), "mlx" in sys.modules)
"""
    done = run_python(code, tmp_path / "torch")
    sizes = [np.prod(t.shape) for t in read_tensors(tmp_path / "torch").values()]
    assert done.stdout == f"{int(sum(sizes))} False\n", done.stderr
