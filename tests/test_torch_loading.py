"""Loading drafters and targets into PyTorch: what is read, what is refused."""

import json
import shutil

import pytest
from tiny import (
    TARGET,
    assert_close,
    drafter_config,
    drafter_numbers,
    drafter_raw,
    target_numbers,
    torch_drafter,
    torch_target,
)

from mlx_dflash2.errors import DFlash2Error

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from safetensors.torch import save_file  # noqa: E402

from mlx_dflash2.torch.loading import load_drafter, load_target  # noqa: E402

CODEBOOK = "candidate_selector.predecessor_codebook"


def tensors_of(numbers, dtype=torch.float32):
    return {name: torch.from_numpy(a).to(dtype) for name, a in numbers.items()}


def write(folder, config: dict, tensors: dict):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def write_drafter(folder, tensors=None, **changes):
    config = drafter_config()
    tensors = tensors_of(drafter_numbers(config)) if tensors is None else tensors
    return write(folder, drafter_raw(**changes), tensors)


def write_target(folder, tensors=None, **changes):
    config = {name: v for name, v in (TARGET | changes).items() if v is not None}
    return write(folder, config, tensors or tensors_of(target_numbers()))


def test_every_tensor_arrives_bit_for_bit(tmp_path):
    config = drafter_config()
    expected = tensors_of(drafter_numbers(config), torch.bfloat16)
    loaded = load_drafter(write_drafter(tmp_path / "d", expected)).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype


def test_codebooks_and_prefixes_are_read_in_every_spelling(tmp_path):
    config = drafter_config()
    tensors = tensors_of(drafter_numbers(config))
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    renamed[f"model.{CODEBOOK}.weight"] = renamed.pop(f"model.{CODEBOOK}")
    renamed["model.context_proj.weight"] = renamed.pop("model.fc.weight")
    renamed["rotary_emb.inv_freq"] = torch.ones(8)
    loaded = load_drafter(write_drafter(tmp_path / "d", renamed)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_two_spellings_of_one_codebook_are_refused(tmp_path):
    tensors = tensors_of(drafter_numbers(drafter_config()))
    tensors[f"{CODEBOOK}.weight"] = tensors[CODEBOOK].clone()
    with pytest.raises(DFlash2Error, match="two spellings"):
        load_drafter(write_drafter(tmp_path / "d", tensors))


def test_a_missing_or_unknown_tensor_is_refused(tmp_path):
    tensors = tensors_of(drafter_numbers(drafter_config()))
    kept = {name: tensor for name, tensor in tensors.items() if name != CODEBOOK}
    with pytest.raises(DFlash2Error, match=f"missing {CODEBOOK}"):
        load_drafter(write_drafter(tmp_path / "a", kept))
    with pytest.raises(DFlash2Error, match="unknown extra.weight"):
        more = tensors | {"extra.weight": torch.ones(2)}
        load_drafter(write_drafter(tmp_path / "b", more))


@pytest.mark.parametrize(
    ("stored", "fc", "asked", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, None, torch.bfloat16),
        (torch.float32, torch.float32, None, torch.float32),
        (torch.float16, torch.float16, None, torch.float32),
        (torch.bfloat16, torch.float32, None, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_it_computes_in_one_dtype_and_never_unasked_in_float16(
    tmp_path, stored, fc, asked, expected
):
    tensors = tensors_of(drafter_numbers(drafter_config()), stored)
    tensors["fc.weight"] = tensors["fc.weight"].to(fc)
    drafter = load_drafter(write_drafter(tmp_path / "d", tensors), dtype=asked)
    assert {tensor.dtype for tensor in drafter.state_dict().values()} == {expected}


def test_a_stored_integer_tensor_is_refused(tmp_path):
    tensors = tensors_of(drafter_numbers(drafter_config()))
    tensors["norm.weight"] = torch.ones(64, dtype=torch.int32)
    with pytest.raises(DFlash2Error, match="norm.weight is stored as I32"):
        load_drafter(write_drafter(tmp_path / "d", tensors))


def test_a_drafter_quantized_by_mlx_is_refused_with_the_way_out(tmp_path):
    folder = write_drafter(
        tmp_path / "d", quantization={"group_size": 64, "bits": 4, "mode": "affine"}
    )
    with pytest.raises(DFlash2Error, match="convert --to-torch -d"):
        load_drafter(folder)


def test_its_own_embedding_and_head_are_loaded(tmp_path):
    own = {
        "embed_tokens.weight": torch.randn(256, 64),
        "lm_head.weight": torch.randn(256, 64),
    }
    tensors = tensors_of(drafter_numbers(drafter_config()))
    for name, tensor in own.items():
        folder = write_drafter(tmp_path / name, tensors | {name: tensor})
        drafter = load_drafter(folder)
        assert torch.equal(drafter.state_dict()[name], tensor)
        assert (drafter.embed_tokens is None) == name.startswith("lm_head")
        assert (drafter.lm_head is None) == name.startswith("embed")


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_size", 128), ("num_target_layers", 6), ("vocab_size", 300)],
)
def test_a_drafter_for_another_target_is_refused_with_both_numbers(
    tmp_path, field, value
):
    folder = write_drafter(tmp_path / "d", **{field: value})
    theirs = {"hidden_size": 64, "num_target_layers": 4, "vocab_size": 256}[field]
    message = f"{field} is {value}, but the target's is {theirs}"
    with pytest.raises(DFlash2Error, match=message):
        load_drafter(folder, torch_target())


def test_the_loaded_pair_is_the_one_that_was_written(tmp_path):
    target = load_target(write_target(tmp_path / "t"))
    drafter = load_drafter(write_drafter(tmp_path / "d"), target)
    ids = torch.tensor([[4, 5, 6]])
    logits, features = target.forward(ids, taps=drafter.config.target_layer_ids)
    assert torch.equal(logits, torch_target().forward(ids)[0])
    made = torch_drafter(drafter.config, drafter_numbers(drafter.config))
    contexts = drafter.make_context(), made.make_context()
    drafter.extend(features, contexts[0])
    made.extend(features, contexts[1])
    proposals = (
        drafter.propose(6, target, contexts[0]).tokens,
        made.propose(6, target, contexts[1]).tokens,
    )
    assert torch.equal(*proposals)


def test_the_rope_base_is_read_wherever_it_is(tmp_path):
    nested = {"rope_theta": 5e6, "rope_type": "default"}
    places = {
        "flat": {},
        "nested": {"rope_theta": None, "rope_parameters": nested},
        "both": {"rope_parameters": nested},
    }
    ids = torch.arange(3, 40)[None]
    logits = {
        name: load_target(write_target(tmp_path / name, **changes)).forward(ids)[0]
        for name, changes in places.items()
    }
    assert torch.equal(logits["flat"], logits["nested"])
    assert torch.equal(logits["flat"], logits["both"])
    other = load_target(write_target(tmp_path / "other", rope_theta=1e4))
    assert (other.forward(ids)[0] - logits["flat"]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"layer_types": ["sliding_attention"] * 4}, "cannot be rolled back"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantized by MLX"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta is .*in use"),
    ],
)
def test_targets_it_cannot_run_rightly_are_refused(tmp_path, changes, message):
    with pytest.raises(DFlash2Error, match=message):
        load_target(write_target(tmp_path / "t", **changes))


def test_an_incomplete_target_is_refused(tmp_path):
    tensors = tensors_of(target_numbers())
    del tensors["lm_head.weight"]
    with pytest.raises(DFlash2Error, match="missing tensors: lm_head.weight"):
        load_target(write_target(tmp_path / "t", tensors, tie_word_embeddings=False))


@pytest.mark.parametrize("said", [True, None])
def test_a_tied_target_needs_no_head(tmp_path, said):
    tensors = tensors_of(target_numbers())
    del tensors["lm_head.weight"]
    folder = write_target(tmp_path / "t", tensors, tie_word_embeddings=said)
    target = load_target(folder)
    rows = torch.ones(1, 64)
    expected = rows @ tensors["model.embed_tokens.weight"].T
    assert_close(target.head(rows), expected, 1e-4)


@pytest.mark.parametrize("said", ["bfloat16", "float32", None])
def test_the_targets_dtype_is_its_tensors_or_the_one_asked_for(tmp_path, said):
    tensors = tensors_of(target_numbers(), torch.bfloat16)
    folder = write_target(tmp_path / "t", tensors, torch_dtype=said)
    assert load_target(folder).model.dtype == torch.bfloat16
    assert load_target(folder, dtype=torch.float32).model.dtype == torch.float32


def test_no_code_of_a_folder_is_run_and_no_pickle_opened(tmp_path):
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w').close()\n"
    changes = {
        "auto_map": {"AutoModelForCausalLM": "trap.Model", "AutoConfig": "trap.Config"},
        "model_file": "trap.py",
    }
    folder = write_target(tmp_path / "t", **changes)
    drafter = write_drafter(tmp_path / "d", **changes)
    for place in (folder, drafter):
        (place / "trap.py").write_text(code)
        (place / "pytorch_model.bin").write_bytes(b"cbuiltins\nexec\n.")
    load_drafter(drafter, load_target(folder))
    assert not mark.exists()
    (folder / "model.safetensors").unlink()
    with pytest.raises(DFlash2Error, match="pickle"):
        load_target(folder)


def test_shards_of_target_and_drafter_are_read(pair):
    made = pair(kind="random", shards=3, draft_shards=3)
    whole = pair(kind="random")
    pairs = [
        (load_drafter(folder.drafter), load_target(folder.target).model)
        for folder in (made, whole)
    ]
    for kind in zip(*pairs, strict=True):
        one, other = (module.state_dict() for module in kind)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_missing_shard_is_named(pair, tmp_path):
    folder = tmp_path / "t"
    shutil.copytree(pair(kind="random", shards=3, draft_shards=3).target, folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(DFlash2Error, match="model-00002-of-00003.safetensors"):
        load_target(folder)
