"""Models that a config.json alone describes."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from tiny import TARGET, drafter_raw

from mlx_dflash2.bench.random_models import random_drafter, random_target
from mlx_dflash2.errors import DFlash2Error

PROMPT = mx.array([[7, 3, 40]])


def write(folder, config):
    folder.mkdir(exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.fixture
def target(tmp_path):
    return random_target(write(tmp_path / "target", TARGET), dtype="float32")


def arrays(model):
    return dict(tree_flatten(model.parameters()))


def kinds(model, kind):
    return {name for name, m in model.named_modules() if isinstance(m, kind)}


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
def test_any_config_gives_a_pair_that_computes(target, tmp_path, family, layers):
    path = write(tmp_path / "drafter", drafter_raw(layers, family))
    drafter = random_drafter(path, target, dtype="float32")
    assert drafter.config.kind == family
    hidden, features = target.forward(PROMPT, target.make_cache(), (0, 2))
    assert mx.isfinite(target.head(hidden)).all().item()
    context = drafter.make_context()
    drafter.extend(features, context)
    rows = drafter.hidden(target.embed(mx.array([[5] + [255] * 7])), context)
    assert mx.isfinite(rows).all().item()
    assert len(drafter.propose(5, target, context).tokens) == 7


@pytest.mark.parametrize("as_folder", [True, False], ids=["folder", "file"])
def test_a_folder_or_a_file_will_do(tmp_path, as_folder):
    path = write(tmp_path / "target", TARGET)
    name = str(tmp_path / "target") if as_folder else path
    target = random_target(name)
    assert target.source.name == name
    assert target.source.folder == tmp_path / "target"


@pytest.mark.parametrize(
    ("said", "asked", "dtype"),
    [
        ({}, None, mx.bfloat16),
        ({"dtype": "float32"}, None, mx.float32),
        ({"torch_dtype": "float16"}, None, mx.float16),
        ({"dtype": "float32"}, "bfloat16", mx.bfloat16),
    ],
)
def test_the_dtype_is_the_asked_or_the_configs(tmp_path, said, asked, dtype):
    target = random_target(write(tmp_path / "t", TARGET | said), dtype=asked)
    assert target.dtype == dtype
    assert {array.dtype for array in arrays(target.model).values()} == {dtype}
    path = write(tmp_path / "d", drafter_raw() | said)
    assert random_drafter(path, target, dtype=asked).dtype == dtype


def test_a_seed_repeats_the_weights(tmp_path):
    path = write(tmp_path / "t", TARGET)
    first, same, other = (
        arrays(random_target(path, seed=seed).model) for seed in (1, 1, 2)
    )
    name = "model.layers.0.mlp.up_proj.weight"
    assert mx.array_equal(first[name], same[name]).item()
    assert not mx.array_equal(first[name], other[name]).item()


@pytest.mark.parametrize("tied", [True, False, None])
def test_the_head_is_the_embedding_only_where_the_config_says_so(tmp_path, tied):
    config = dict(TARGET, tie_word_embeddings=tied)
    model = random_target(write(tmp_path / "t", config)).model
    assert ("lm_head" in model) is (not tied)


def test_a_quantized_config_gives_quantized_models(tmp_path):
    settings = {"group_size": 32, "bits": 4}
    own = {"model.layers.0.mlp.up_proj": {"group_size": 64, "bits": 8}}
    kept = {"lm_head": False}
    config = TARGET | {"quantization": settings | own | kept}
    target = random_target(write(tmp_path / "t", config))
    quantized = kinds(target.model, nn.QuantizedLinear)
    assert len(quantized) == 7 * TARGET["num_hidden_layers"]
    up = target.model.layers[0].mlp.up_proj
    assert (up.bits, target.model.layers[1].mlp.up_proj.bits) == (8, 4)
    raw = drafter_raw() | {"quantization": settings}
    drafter = random_drafter(write(tmp_path / "d", raw), target)
    assert len(kinds(drafter, nn.QuantizedLinear)) == 7 * 2 + 1
    assert isinstance(drafter.candidate_selector.hidden_projection, nn.Linear)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": -64}, ["hidden_size is -64", "at least 1"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "at least 1"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0", "at least 1"]),
        ({"head_dim": 1.5}, ["head_dim is 1.5", "a whole number"]),
        ({"rms_norm_eps": "x"}, ["rms_norm_eps is 'x'", "a number"]),
        ({"rms_norm_eps": 0}, ["cannot build a llama model"]),
        ({"model_type": "qwen3"}, ["only llama-type targets"]),
        ({"dtype": "int8"}, ["dtype is 'int8'", "bfloat16"]),
        ({"quantization": {"bits": 4, "group_size": 16}}, ["cannot build"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config without"]),
        ({"layer_types": ["sliding_attention"] * 4}, ["cannot be rolled back"]),
    ],
    ids=str,
)
def test_a_target_that_cannot_be_built_says_why(tmp_path, changes, parts):
    config = {k: v for k, v in (TARGET | changes).items() if v is not None}
    path = write(tmp_path / "t", config)
    with pytest.raises(DFlash2Error) as error:
        random_target(path)
    assert str(error.value).startswith(path)
    assert all(part in str(error.value) for part in parts), error.value


def test_a_drafter_that_does_not_fit_says_why(target, tmp_path):
    path = write(tmp_path / "d", drafter_raw(vocab_size=128, mask_token_id=5))
    with pytest.raises(DFlash2Error, match="vocab_size is 128, but the target's is"):
        random_drafter(path, target)


def test_a_kind_settles_what_a_config_leaves_open(target, tmp_path):
    raw = drafter_raw(family="dflash")
    del raw["architectures"]
    path = write(tmp_path / "d", raw)
    with pytest.raises(DFlash2Error, match="say which with --draft-kind"):
        random_drafter(path, target)
    assert random_drafter(path, target, kind="dflash").config.kind == "dflash"


def test_a_kind_must_agree_with_the_config(target, tmp_path):
    path = write(tmp_path / "d", drafter_raw(family="dspark"))
    with pytest.raises(DFlash2Error, match="architectures names Qwen3DSparkModel"):
        random_drafter(path, target, kind="dflash2")


def test_a_file_has_no_revision(tmp_path):
    with pytest.raises(DFlash2Error, match="local folder has no revisions"):
        random_target(write(tmp_path / "t", TARGET), revision="v1")
