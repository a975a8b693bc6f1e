"""Starting a drafter from another one's weights."""

import json

import pytest
from tiny import drafter_config, drafter_numbers, drafter_raw, torch_target

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.torch.train.init import make_drafter  # noqa: E402
from mlx_dflash2.torch.train.warm_start import Parent, warm_start  # noqa: E402

CODEBOOKS = {
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
}


@pytest.fixture(scope="module")
def target():
    return torch_target()


def write_parent(folder, family="dflash2", card="", **changes):
    """A drafter's folder; its weights by name."""
    config = drafter_config(family=family, **changes)
    numbers = drafter_numbers(config, seed=5)
    weights = {name: torch.from_numpy(array) for name, array in numbers.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    raw = drafter_raw(family=family, **changes)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "README.md").write_text(card)
    return weights


def start(folder, target, family="dflash2", **changes):
    """A new drafter, as it was and as the warm start left it, and the report."""
    config = drafter_config(family=family, **changes)
    drafter = make_drafter(config, target, seed=0, final_norm="ones")
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    parent = Parent.find(str(folder), revision=None, offline=True)
    return drafter, before, warm_start(drafter, parent)


def test_the_same_family_is_taken_whole(tmp_path, target):
    weights = write_parent(tmp_path / "parent")
    drafter, _, report = start(tmp_path / "parent", target)
    for name, value in drafter.state_dict().items():
        assert torch.equal(value, weights[name]), name
    assert set(report.taken) == set(weights)
    assert not report.fresh and not report.unused and not report.differences


def test_a_dflash_drafter_keeps_its_function_as_dflash_2(tmp_path, target):
    weights = write_parent(tmp_path / "parent", "dflash")
    drafter, _, report = start(tmp_path / "parent", target)
    plain = drafter_config(family="dflash").network("mlx_dflash2.torch")(
        drafter_config(family="dflash")
    )
    plain.load_state_dict(weights)
    features = torch.randn(1, 5, 128, generator=torch.Generator().manual_seed(0))
    rows = []
    for network in (plain, drafter):
        context = network.make_context()
        network.extend(features, context)
        rows.append(network.hidden(network.embed_block(9, target), context))
    assert torch.equal(*rows)
    assert all("conv" in name or "selector" in name for name in report.fresh)


def test_dsparks_tables_become_a_selector_that_is_silent_at_first(tmp_path, target):
    weights = write_parent(tmp_path / "parent", "dspark")
    drafter, _, report = start(tmp_path / "parent", target)
    selector = drafter.candidate_selector
    first = weights["markov_head.markov_w1.weight"]
    second = weights["markov_head.markov_w2.weight"]
    assert torch.equal(selector.predecessor_codebook, first)
    assert torch.equal(selector.successor_codebook, second)
    assert not selector.hidden_projection.weight.any()
    assert set(report.taken) >= CODEBOOKS
    assert report.unused == ("confidence_head.proj.bias", "confidence_head.proj.weight")
    assert report.differences == ("first_row 0 there, 1 here",)


def test_tables_of_another_rank_stay_unused(tmp_path, target):
    write_parent(tmp_path / "parent", "dspark", markov_rank=4)
    drafter, before, report = start(tmp_path / "parent", target)
    assert "markov_head.markov_w1.weight" in report.unused
    for name in CODEBOOKS:
        assert name in report.fresh
        assert torch.equal(drafter.state_dict()[name], before[name])


def test_layers_that_come_on_top_add_nothing(tmp_path, target):
    layers = ["full_attention"]
    write_parent(tmp_path / "parent", num_hidden_layers=1, layer_types=layers)
    drafter, before, report = start(tmp_path / "parent", target)
    new = drafter.layers[1]
    assert not new.self_attn.o_proj.weight.any() and not new.mlp.down_proj.weight.any()
    name = "layers.1.self_attn.q_proj.weight"
    assert name in report.fresh and torch.equal(
        drafter.state_dict()[name], before[name]
    )


def test_what_does_not_fit_is_reported(tmp_path, target):
    write_parent(tmp_path / "parent", intermediate_size=64, mask_token_id=254)
    _, _, report = start(tmp_path / "parent", target)
    shaped = {f"layers.{i}.mlp.{n}_proj.weight" for i in (0, 1) for n in NARROW}
    assert set(report.other_shape) == shaped == set(report.fresh)
    assert report.differences == ("mask_token_id 254 there, 255 here",)
    assert "mask_token_id 254" in "\n".join(report.lines())


NARROW = ("gate", "up", "down")


def test_a_fusion_of_other_taps_is_not_taken(tmp_path, target):
    write_parent(tmp_path / "parent", target_layer_ids=[1, 2])
    _, _, report = start(tmp_path / "parent", target)
    assert report.fresh == ("fc.weight",)
    assert report.differences == ("target_layer_ids (1, 2) there, (0, 2) here",)


def test_a_part_of_a_selector_is_refused(tmp_path, target):
    write_parent(tmp_path / "parent", vocab_size=256)
    config = drafter_config(vocab_size=300)
    drafter = make_drafter(config, target, seed=0, final_norm="ones")
    parent = Parent.find(str(tmp_path / "parent"), revision=None, offline=True)
    with pytest.raises(DFlash2Error, match="of the selector only .*hidden_projection"):
        warm_start(drafter, parent)


def test_a_drafter_of_another_size_is_refused(tmp_path, target):
    changes = {"hidden_size": 32, "head_dim": 8, "selector_rank": 4}
    write_parent(tmp_path / "parent", **changes, intermediate_size=80)
    with pytest.raises(DFlash2Error, match="no tensor has the name and shape"):
        start(tmp_path / "parent", target)


def test_a_quantized_parent_is_refused(tmp_path, target):
    write_parent(tmp_path / "parent", quantization={"bits": 4, "group_size": 32})
    with pytest.raises(DFlash2Error, match="is quantized"):
        start(tmp_path / "parent", target)


@pytest.mark.parametrize(
    "card, licence",
    [("---\nlicense: apache-2.0\ntags: []\n---\ntext", "apache-2.0"), ("", None)],
)
def test_the_parents_licence_travels(tmp_path, target, card, licence):
    write_parent(tmp_path / "parent", card=card)
    _, _, report = start(tmp_path / "parent", target)
    assert report.licence == licence
    assert (licence or "not stated") in report.lines()[0]
