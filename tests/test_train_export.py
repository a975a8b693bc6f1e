"""Exports: what is written, what is refused, and that MLX drafts what was learned."""

import hashlib
import json
import shutil

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from safetensors.torch import load_file, save_file  # noqa: E402
from train_runs import Trainable, answers, row_of, trainable, write_data  # noqa: E402

from mlx_dflash2 import loading as mlx_loading  # noqa: E402
from mlx_dflash2.decode import Decoding  # noqa: E402
from mlx_dflash2.errors import DFlash2Error  # noqa: E402
from mlx_dflash2.sampling import SamplingConfig, TokenRule  # noqa: E402
from mlx_dflash2.torch.train.evaluation import evaluate, find_subject  # noqa: E402
from mlx_dflash2.torch.train.export import export  # noqa: E402
from mlx_dflash2.torch.train.start import find_saved  # noqa: E402

FILES = {
    *("config.json", "model.safetensors", "README.md", "SOURCE_TERMS.md"),
    *("dflash2_training_meta.json", "release_manifest.json"),
}
MEASURED = {
    "domains": {
        "coding": {
            "plain_tok_s": 17.7,
            "spec_tok_s": 19.53,
            "speedup": 1.104,
            "acceptance_length": 1.261,
            "identical": "6/6",
        }
    },
    "overall": {"acceptance_length": 1.248, "identical": "21/24"},
}


@pytest.fixture(scope="module")
def tiny(pair, tmp_path_factory):
    return trainable(tmp_path_factory.mktemp("rows") / "data", pair("oracle"))


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    out = tmp_path_factory.mktemp("short") / "run"
    assert tiny.run(out, steps=6, checkpoints__every=3) == 0
    return out


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    out = tmp_path_factory.mktemp("export") / "drafter"
    export(find_saved(run), out)
    return out


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def test_an_export_is_complete_and_its_manifest_true(exported):
    assert {file.name for file in exported.iterdir()} == FILES
    listed = read(exported, "release_manifest.json")["files"]
    assert {file["name"] for file in listed} == FILES - {"release_manifest.json"}
    for file in listed:
        content = (exported / file["name"]).read_bytes()
        assert file["bytes"] == len(content)
        assert file["sha256"] == hashlib.sha256(content).hexdigest()


def test_the_weights_are_the_checkpoints_in_bf16(run, exported):
    weights = load_file(exported / "model.safetensors")
    saved = find_saved(run).weights()
    assert weights.keys() == saved.keys()
    assert "candidate_selector.predecessor_codebook" in weights
    for name, tensor in weights.items():
        assert torch.equal(tensor, saved[name].to(torch.bfloat16)), name


def test_checkpoints_can_be_averaged(run, tmp_path):
    latest = find_saved(run)
    export(latest, tmp_path / "drafter", average=2)
    mean = load_file(tmp_path / "drafter/model.safetensors")
    before = find_saved(run, "3").weights()
    for name, tensor in latest.weights().items():
        half = (tensor + before[name]) / 2
        assert torch.equal(mean[name], half.to(torch.bfloat16)), name
    meta = read(tmp_path / "drafter", "dflash2_training_meta.json")
    assert meta["averaged"] == ["step-000003", "step-000006"]
    card = (tmp_path / "drafter/README.md").read_text()
    assert "mean of 2 checkpoints, which was not evaluated here" in card


def test_more_checkpoints_than_a_run_keeps_are_refused(run, tmp_path):
    with pytest.raises(DFlash2Error, match="keeps 2 checkpoints, fewer than --average"):
        export(find_saved(run), tmp_path / "drafter", average=3)


def test_the_config_is_in_the_published_spelling(exported):
    config = read(exported, "config.json")
    assert config["architectures"] == ["DFlash2DraftModel"]
    assert config["model_type"] == "qwen3" and config["dtype"] == "bfloat16"
    assert config["num_target_layers"] == 4 and config["is_causal"] is False
    assert config["dflash_config"] == {
        "block_size": 8,
        "mask_token_id": 3,
        "target_layer_ids": [0, 2],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 4,
    }


def test_the_record_says_how_the_weights_came_to_be(run, exported):
    meta = read(exported, "dflash2_training_meta.json")
    assert meta["contract"] == find_saved(run).contract
    assert meta["progress"]["blocks"] == 6 * 4 * 6 and meta["hours"] > 0
    assert [point["step"] for point in meta["curve"]] == [1, 2, 3, 4, 5, 6]
    assert meta["device"] == "cpu" and meta["evaluation"]["step"] == 6


def test_the_card_has_the_table_of_a_bench(run, tmp_path):
    results = tmp_path / "measured_results.json"
    results.write_text(json.dumps(MEASURED))
    export(find_saved(run), tmp_path / "drafter", results=results)
    card = (tmp_path / "drafter/README.md").read_text()
    assert (
        "| domain | plain tok/s | spec tok/s | speedup | acceptance length | "
        "greedy-identical |\n|---|---|---|---|---|---|\n"
        "| coding | 17.700 | 19.530 | 1.104 | 1.261 | 6/6 |\n"
        "| overall | - | - | - | 1.248 | 21/24 |" in card
    )
    assert read(tmp_path / "drafter", "measured_results.json") == MEASURED


def test_a_name_no_server_reads_is_refused(run, tmp_path):
    for case, change in (
        ("prefixed", lambda w: {f"draft_model.{name}": t for name, t in w.items()}),
        ("missing", lambda w: {n: t for n, t in w.items() if n != "fc.weight"}),
        ("endless", lambda w: w | {"fc.weight": w["fc.weight"] * float("inf")}),
    ):
        copy = tmp_path / case
        shutil.copytree(run, copy)
        file = find_saved(copy).folder / "drafter.safetensors"
        save_file(change(load_file(file)), file)
        with pytest.raises(DFlash2Error, match="missing|not finite"):
            export(find_saved(copy), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_without_source_terms_there_is_no_export(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "SOURCE_TERMS.md").unlink()
    with pytest.raises(DFlash2Error, match="SOURCE_TERMS.md: cannot be read"):
        export(find_saved(copy), tmp_path / "out")


def test_an_export_overwrites_nothing(run, exported):
    with pytest.raises(DFlash2Error, match="already exists"):
        export(find_saved(run), exported)


def mlx_walk(folder, pair, rows):
    """Cycles and emitted tokens of real decoding after the prompts of rows."""
    target, _ = mlx_loading.load_target(pair.target)
    drafter = mlx_loading.load_drafter(folder, target)
    cycles = emitted = 0
    for prompt, answer in rows:
        rule = TokenRule(SamplingConfig())
        tokens = []
        for emission in Decoding(target, drafter, rule, seed=0).run(
            prompt, max_tokens=len(answer), eos=frozenset(), num_draft_tokens=7
        ):
            tokens += emission.tokens
            cycles += emission.drafted is not None
        assert tuple(tokens) == answer
        emitted += len(tokens) - 1
    return cycles, emitted


def test_an_overfitted_drafter_drafts_in_mlx_what_it_learned(pair, tmp_path):
    """The gate of the whole path, from features and masks to decoding."""
    models = pair("oracle", eos="off")
    decoded = [(p, each.tokens) for p, each in answers(models, 3, tokens=33)]
    rows = [row_of(prompt, answer) for prompt, answer in decoded]
    data = write_data(tmp_path / "data", models.target, rows, rows)
    tiny = Trainable(models, data)
    code = tiny.run(
        tmp_path / "run",
        steps=90,
        batch__rows=3,
        batch__rows_at_once=3,
        batch__anchors=24,
        batch__blocks_at_once=100,
        optimizer__lr=5e-3,
        optimizer__high_lr=5e-3,
        optimizer__warmup=10,
        stages__backbone=20,
        stages__selector=20,
        checkpoints__every=90,
    )
    assert code == 0
    saved = find_saved(tmp_path / "run")
    trained = saved.progress.evaluation["acceptance_length"]
    assert trained >= 0.9 * 8
    export(saved, tmp_path / "drafter")
    flags = {"target": str(models.target), "data": str(tiny.data), "threads": 1}
    found = evaluate(find_subject(str(tmp_path / "drafter"), "best", flags))
    cycles, emitted = mlx_walk(tmp_path / "drafter", models, decoded)
    assert (found["cycles"], found["tokens"]) == (cycles, emitted)
    assert emitted / cycles == pytest.approx(trained, rel=0.02)  # bf16 may move a draft
