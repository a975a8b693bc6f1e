"""The drafter: what it borrows, computes in, quantizes, and which pairs it refuses."""

import json
import logging
import shutil

import mlx.core as mx
import mlx.nn as nn
import pytest
from lossless import assert_lossless, mlx_lm_tokens
from mlx.utils import tree_flatten
from pair_files import write_json
from tiny import (
    drafter_config,
    drafter_numbers,
    features_of,
    mlx_drafter,
    mlx_target,
    target_numbers,
    with_identity_convs,
)

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import read_drafter_config
from mlx_dflash2.generation import generate
from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.names import expected_shapes

KINDS = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
QUIET = ("conv", "candidate_selector", "norm")  # parts of names never quantized


@pytest.fixture(scope="module")
def target():
    return mlx_target()


@pytest.fixture(scope="module")
def random_target(pair):
    return load_target(pair("random").target)


@pytest.fixture
def copied(pair, tmp_path):
    """`copied(changes, **options)`: a drafter's folder with another config.json."""

    def copy(changes=None, **options):
        folder = tmp_path / "drafter"
        shutil.copytree(pair("random", **options).drafter, folder)
        config = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", config | (changes or {}))
        return folder

    return copy


@pytest.fixture
def rewritten(pair, tmp_path):
    """`rewritten(change)`: a drafter's folder, `change` applied to its tensors."""

    def rewrite(change):
        folder = tmp_path / "drafter"
        shutil.copytree(pair("random").drafter, folder, dirs_exist_ok=True)
        weights = change(mx.load(str(pair("random").drafter / "model.safetensors")))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return folder

    return rewrite


def stored_in(dtype):
    """A change for `rewritten`; "mixed" takes every dtype in turn."""
    order = list(KINDS.values()) if dtype == "mixed" else [KINDS[dtype]]
    return lambda weights: {
        name: weights[name].astype(order[i % len(order)])
        for i, name in enumerate(sorted(weights))
    }


def tiny_drafter(kind="full", change=lambda numbers: numbers, own=(), **changes):
    config = drafter_config(kind, **changes)
    flags = {f"own_{name}": True for name in own}
    return mlx_drafter(config, change(drafter_numbers(config)), **flags)


def draft(drafter, target, rows=20, anchor=5, seed=1, **options):
    """A proposal after `rows` random context rows."""
    context = drafter.make_context()
    drafter.extend(mx.array(features_of(drafter.config, rows, seed)), context)
    return drafter.propose(anchor, target, context, **options)


def test_it_drafts_a_block_after_the_anchor(target):
    proposal = draft(tiny_drafter(), target)
    assert proposal.tokens.shape == (7,)
    assert proposal.candidates.shape == (7, 4)
    assert proposal.probabilities is None
    assert (proposal.candidates == proposal.tokens[:, None]).any(axis=1).all()


def test_drafting_counts_nothing_as_context(target):
    drafter = tiny_drafter("mixed")
    context = drafter.make_context()
    drafter.extend(mx.array(features_of(drafter.config, 20)), context)
    first = drafter.propose(5, target, context)
    again = drafter.propose(5, target, context)
    assert mx.array_equal(first.tokens, again.tokens)
    assert [held.end for held in context] == [20, 20]


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("is_causal", [None, False, True])
def test_proposing_fewer_does_not_change_them(target, kind, is_causal):
    drafter = tiny_drafter(kind, is_causal=is_causal)
    whole = draft(drafter, target).tokens.tolist()
    for count in range(1, 8):
        assert draft(drafter, target, count=count).tokens.tolist() == whole[:count]


def test_causality_and_windows_change_the_draft(target):
    hidden = []
    for kind, is_causal in (("full", None), ("full", True), ("sliding", False)):
        drafter = tiny_drafter(kind, is_causal=is_causal)
        context = drafter.make_context()
        drafter.extend(mx.array(features_of(drafter.config, 30)), context)
        hidden.append(drafter.hidden(target.embed(mx.arange(8)[None]), context))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert mx.abs(hidden[one] - hidden[other]).max().item() > 0.1


@pytest.mark.parametrize("name", expected_shapes(drafter_config()))
def test_every_tensor_changes_what_is_drafted(target, name):
    sampled = {"temperature": 1.0, "key": mx.random.key(0)}
    moved = tiny_drafter(change=lambda n: n | {name: 1.5 * n[name] + 0.1})
    one, other = (draft(d, target, **sampled) for d in (tiny_drafter(), moved))
    if mx.array_equal(one.candidates, other.candidates):
        assert not mx.allclose(one.probabilities, other.probabilities)


def test_identity_convolutions_change_nothing(target):
    drafter = tiny_drafter(change=with_identity_convs)
    rows = mx.random.normal((1, 8, 64), key=mx.random.key(1))
    for conv in (drafter.layers[0].attention_conv, drafter.layers[1].mlp_conv):
        inner, kernels = conv.prepare(rows)
        assert mx.array_equal(inner, rows)
        assert mx.array_equal(conv.finish(rows, kernels), rows)


# Borrowing.


def test_the_target_is_never_part_of_the_drafter(pair, random_target):
    target, tokenizer = random_target
    before = {name: w.shape for name, w in tree_flatten(target.model.parameters())}
    folder = pair("random").drafter
    drafter = load_drafter(folder, target)
    generate(target, drafter, tokenizer, [7, 8, 9], max_tokens=12)
    names = {name for name, _ in tree_flatten(drafter.parameters())}
    assert names == expected_shapes(read_drafter_config(folder)).keys()
    after = {name: w.shape for name, w in tree_flatten(target.model.parameters())}
    assert after == before


def test_its_own_embedding_and_head_are_used(target):
    numbers = target_numbers()
    ours = {
        "embed_tokens.weight": numbers["model.embed_tokens.weight"],
        "lm_head.weight": numbers["lm_head.weight"],
    }

    def owning(held):
        return tiny_drafter(change=lambda n: n | held, own=("embedding", "head"))

    borrowed = draft(tiny_drafter(), target).tokens
    assert mx.array_equal(draft(owning(ours), None).tokens, borrowed)
    for name, array in ours.items():
        other = owning(ours | {name: array[::-1].copy()})
        assert not mx.array_equal(draft(other, target).tokens, borrowed)


def test_an_own_embedding_in_the_file_is_loaded(rewritten, random_target):
    target, tokenizer = random_target
    own = {"embed_tokens.weight": mx.zeros((512, 96))}
    drafter = load_drafter(rewritten(lambda weights: weights | own), target)
    assert mx.array_equal(drafter.embed_tokens.weight, mx.zeros((512, 96)))
    assert "lm_head" not in drafter
    prompt = [7, 8, 9]
    result = generate(target, drafter, tokenizer, prompt, max_tokens=12)
    expected = mlx_lm_tokens(target, prompt, 12)
    assert_lossless(result, expected, target, tokenizer, prompt)


# Dtypes.


@pytest.mark.parametrize("dtype", [*KINDS, "mixed"])
def test_the_stored_dtype_decides_what_it_computes_in(rewritten, random_target, dtype):
    target, tokenizer = random_target
    drafter = load_drafter(rewritten(stored_in(dtype)), target)
    wanted = mx.bfloat16 if dtype == "bfloat16" else mx.float32
    assert drafter.dtype == wanted
    assert {w.dtype for _, w in tree_flatten(drafter.parameters())} == {wanted}
    context = drafter.make_context()
    drafter.extend(mx.ones((1, 3, drafter.fc.weight.shape[1])), context)
    assert context[0].keys.dtype == wanted
    assert drafter.hidden(mx.ones((1, 8, 96)), context).dtype == wanted
    prompt = list(range(7, 20))
    result = generate(target, drafter, tokenizer, prompt, max_tokens=20)
    expected = mlx_lm_tokens(target, prompt, 20)
    assert_lossless(result, expected, target, tokenizer, prompt)


@pytest.mark.parametrize("dtype", KINDS)
def test_huge_activations_of_the_target_stay_finite(rewritten, random_target, dtype):
    target, _ = random_target
    drafter = load_drafter(rewritten(stored_in(dtype)), target)
    features = features_of(drafter.config, 20)
    features[..., 3], features[..., 100] = 1e5, -1e5
    context = drafter.make_context()
    drafter.extend(mx.array(features).astype(mx.bfloat16), context)
    hidden = drafter.hidden(target.embed(mx.arange(8)[None]), context)
    assert mx.isfinite(hidden).all()
    assert all(mx.isfinite(array).all() for held in context for array in held.arrays)


# Quantization.


@pytest.mark.parametrize("bits", [4, 8])
def test_draft_bits_quantize_the_backbone_only(pair, bits):
    options = {"hidden": 128, "draft_intermediate": 192}
    made = pair("random", **options)
    target, tokenizer = load_target(made.target)
    drafter = load_drafter(made.drafter, target, bits=bits)
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            quiet = any(part in name for part in QUIET)
            assert isinstance(module, nn.Linear) == quiet, name
    for name, array in tree_flatten(drafter.parameters()):
        if any(part in name for part in QUIET):
            assert array.dtype == mx.float32, name
    prompt = list(range(7, 30))
    result = generate(target, drafter, tokenizer, prompt, max_tokens=30)
    expected = mlx_lm_tokens(target, prompt, 30, eos=tokenizer.eos_token_ids)
    assert_lossless(result, expected, target, tokenizer, prompt)
    assert result.stats.drafted > 0


def test_eight_bits_draft_almost_the_same(pair):
    oracle = pair(hidden=128, eos="off").oracle
    made = pair(hidden=128, eos="off")
    target, tokenizer = load_target(made.target)
    drafter = load_drafter(made.drafter, target, bits=8)
    prompt = oracle.prompt(40)
    result = generate(target, drafter, tokenizer, prompt, max_tokens=60)
    assert result.tokens == oracle.walk(prompt, 60)
    assert result.stats.acceptance_length > 4


def test_other_draft_bits_are_refused(pair, random_target):
    with pytest.raises(DFlash2Error, match="draft bits is 3, expected 4 or 8"):
        load_drafter(pair("random").drafter, random_target[0], bits=3)


def test_columns_that_groups_do_not_divide_are_refused(pair, random_target):
    with pytest.raises(DFlash2Error, match="96 columns"):
        load_drafter(pair("random").drafter, random_target[0], bits=4)


# Pairs.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 128}, "hidden_size is 128, but the target's is 96"),
        ({"layers": 6}, "num_target_layers is 6, but the target's is 4"),
        ({"vocab": 600}, "vocab_size is 600, but the target's is 512"),
    ],
    ids=["hidden", "layers", "vocab"],
)
def test_a_drafter_of_another_target_is_refused(pair, random_target, options, message):
    with pytest.raises(DFlash2Error, match=message):
        load_drafter(pair("random", **options).drafter, random_target[0])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda w: w | {"fc.weight": mx.zeros((96, 96))}, "fc.weight"),
        (lambda w: w | {"extra.weight": mx.zeros((1,))}, "extra.weight"),
        (lambda w: {n: w[n] for n in w if n != "norm.weight"}, "norm.weight"),
        (lambda w: w | {"norm.weight": mx.zeros((96,), mx.int32)}, "int32"),
    ],
    ids=["shape", "unknown", "missing", "integer"],
)
def test_a_wrong_tensor_is_refused(rewritten, random_target, change, name):
    with pytest.raises(DFlash2Error, match=name):
        load_drafter(rewritten(change), random_target[0])


def test_codebooks_are_read_in_both_spellings(rewritten, pair, random_target):
    def suffixed(weights):
        return {
            f"{name}.weight" if "codebook" in name else name: array
            for name, array in weights.items()
        }

    one = load_drafter(rewritten(suffixed), random_target[0])
    other = load_drafter(pair("random").drafter, random_target[0])
    for ours, theirs in zip(
        tree_flatten(one.parameters()), tree_flatten(other.parameters()), strict=True
    ):
        assert ours[0] == theirs[0]
        assert mx.array_equal(ours[1], theirs[1])


def test_code_that_a_config_names_is_never_run(copied, random_target, caplog):
    folder = copied({"auto_map": {"AutoModel": "evil.M"}, "model_file": "evil.py"})
    (folder / "evil.py").write_text(f"open({str(folder / 'proof')!r}, 'w').close()\n")
    with caplog.at_level(logging.WARNING):
        load_drafter(folder, random_target[0])
    assert not (folder / "proof").exists()
    assert "auto_map is ignored" in caplog.text
    assert "model_file is ignored" in caplog.text


def test_a_theta_in_any_place_gives_the_same_rope(pair, random_target):
    rows = mx.random.normal((1, 4, 96), key=mx.random.key(0))
    target, keys = random_target[0], {}
    for rope in ("flat", "nested", "both"):
        folder = pair("random", rope=rope, draft_rope_theta=5e6).drafter
        layer = load_drafter(folder, target).layers[0].self_attn
        keys[rope], _ = layer.keys_values(rows, 100)
    assert mx.array_equal(keys["flat"], keys["nested"])
    assert mx.array_equal(keys["flat"], keys["both"])
    other = load_drafter(pair("random").drafter, target).layers[0].self_attn
    assert not mx.allclose(keys["flat"], other.keys_values(rows, 100)[0])
