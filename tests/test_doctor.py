"""`doctor`: what it reads, what it doubts, and how it ends."""

import contextlib
import json
import shutil

import pytest
from command_line import models, run
from fake_hub import FakeHub

import mlx_dflash2.health as health
from mlx_dflash2.errors import DFlash2Error

FIELDS = {
    *("family", "target_layer_ids", "logits_start", "logits_start_given"),
    *("block_rows", "num_draft_tokens", "mask_token_id", "rope_theta"),
    *("rope_layout", "rope_scaling", "layer_types", "sliding_window"),
    *("causal_layers", "dtype", "quantization", "read_from"),
}


@pytest.fixture(autouse=True)
def one_prompt(monkeypatch):
    """Eleven blocks are enough where a reading is right in all or in few."""
    import mlx_dflash2.commands.doctor as doctor

    monkeypatch.setattr(doctor, "PROMPTS", doctor.PROMPTS[-1:])


def changed(made, folder, **changes):
    """A copy of a pair's drafter with another config.json."""
    shutil.copytree(made.drafter, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return "--model", made.target, "--draft-model", folder


def examined(*flags, code):
    result = run("doctor", *flags, "--json")
    assert result.exit_code == code, result.output
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_a_right_pair_is_healthy(pair, family):
    made = pair(family=family, eos="off")
    found = examined(*models(made), code=0)
    assert found["doubts"] == found["pair"]["doubts"] == []
    assert found["pair"]["accepted_per_block"] > 6
    reading = found["pair"]["reading"]
    assert reading.keys() == FIELDS
    assert (reading["mask_token_id"], reading["num_draft_tokens"]) == (3, 7)
    assert reading["target_layer_ids"] == list(made.options.taps)
    assert reading["logits_start_given"] is False
    place = "" if family == "dspark" else "dflash_config."
    assert {"rope_theta", f"{place}target_layer_ids"} <= set(reading["read_from"])
    misses = found["pair"]["near_misses"]
    assert {"is_neox_style", "is_causal", "dtype"} <= {m["field"] for m in misses}
    assert all(m["accepted_per_block"] >= 0 for m in misses)


def test_the_machine_is_described(pair):
    machine = examined(*models(pair(eos="off")), code=0)["machine"]
    assert machine.keys() == {
        *("versions", "system", "device", "memory_available", "blas", "types")
    }
    assert {"mlx-dflash2", "mlx", "mlx-lm"} <= machine["versions"].keys()
    types = {check["dtype"]: check for check in machine["types"]}
    assert types.keys() == {"float32", "float16", "bfloat16"}
    for check in types.values():
        assert check["works"] and check["error"] < 0.05 and check["seconds"] > 0


def test_the_report_in_words_says_the_same(pair):
    made = pair(family="dspark", eos="off")
    result = run("doctor", *models(made))
    assert (result.exit_code, result.stderr) == (0, "")
    for part in (
        "float32: ",
        f"Target: {made.target}\n",
        f"read from {made.drafter}/config.json:\n",
        'family: "DSpark"\n',
        "logits_start: 0\n",
        "logits_start_given: false\n",
        "block_rows: 7\n",
        "num_draft_tokens: 7\n",
        "Memory: ",
        "Accepted per block as configured: ",
        "with logits_start 1: ",
    ):
        assert part in result.stdout, result.stdout
    assert result.stdout.endswith("\nHealthy.\n")


def test_the_cost_of_rows_is_measured_over_a_prompt(pair, monkeypatch):
    from mlx_dflash2.loading import load_target
    from mlx_dflash2.target import Target

    target, _ = load_target(pair(eos="off").target)
    rows, forward = [], Target.forward

    def note(self, tokens, cache, taps=()):
        rows.append((tokens.shape[1], cache[0].offset))
        return forward(self, tokens, cache, taps)

    monkeypatch.setattr(Target, "forward", note)
    costs = health.row_costs(target, [5, 6, 7])
    assert len(costs) == 8 and min(costs) > 0
    prefill, measured = rows[:2], rows[2:]
    assert prefill == [(2, 0), (1, 2)]
    assert measured == [(count, 3) for count in range(1, 9)] * (health.ROUNDS + 1)


@pytest.mark.parametrize("most", [1.5, 2.5])
def test_an_expensive_verify_is_said_and_no_doubt(pair, monkeypatch, most):
    made, costs = pair(eos="off"), [4.0] * 7 + [4.0 * most]
    monkeypatch.setattr(health, "row_costs", lambda target, prompt: costs)
    assert examined(*models(made), code=0)["pair"]["forward_ms"] == costs
    shown = run("doctor", *models(made)).stdout
    line = "in forwards of one row: " + "1.00 " * 7 + f"{most:.2f}\n"
    assert f"Target forward of 1 to 8 rows, {line}" in shown
    expensive = "Verify is expensive here: 8 rows cost 2.5 plain steps"
    assert (expensive in shown) == (most > 2)
    assert shown.endswith("\nHealthy.\n")


def test_a_misread_field_is_named_with_both_numbers(pair, tmp_path):
    flags = changed(pair(eos="off"), tmp_path / "drafter", is_neox_style=False)
    found = examined(*flags, code=1)
    [doubt] = found["doubts"]
    configured = found["pair"]["accepted_per_block"]
    best = max(m["accepted_per_block"] for m in found["pair"]["near_misses"])
    assert doubt.startswith("is_neox_style true accepts")
    assert f"{configured:.2f}" in doubt and f"{best:.2f}" in doubt
    assert found["pair"]["reading"]["rope_layout"] == "interleaved"
    shown = run("doctor", *flags)
    assert shown.exit_code == 1
    assert shown.stdout.endswith(f"\nDoubts:\n{doubt}\n")


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_a_drafter_that_knows_nothing_is_doubted(pair, family):
    [doubt] = examined(*models(pair("random", family=family)), code=1)["doubts"]
    assert "hardly trained, or for another target" in doubt


@pytest.mark.parametrize(
    "changes", [{"head_dim": "32"}, {"num_hidden_layers": "2"}], ids=str
)
def test_a_malformed_config_cannot_run(pair, tmp_path, changes):
    flags = changed(pair(eos="off"), tmp_path / "drafter", **changes)
    result = run("doctor", *flags, "--json")
    assert result.exit_code == 2
    assert next(iter(changes)) in json.loads(result.stdout)["error"]


@pytest.mark.parametrize("taps", [[4, 6], [4, 2]], ids=str)
def test_a_misreading_that_is_not_tried_is_still_doubted(pair, tmp_path, taps):
    made = pair(eos="off", layers=8, taps=(2, 4))
    nested = json.loads((made.drafter / "config.json").read_text())["dflash_config"]
    dflash = nested | {"target_layer_ids": taps}
    flags = changed(made, tmp_path / "drafter", dflash_config=dflash)
    [doubt] = examined(*flags, code=1)["doubts"]
    assert "it is weak, hardly trained, or for another target" in doubt


@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_a_drafter_of_another_target_of_this_shape_is_doubted(pair, family):
    target = pair(family=family, eos="off").target
    drafter = pair(family=family, eos="off", seed=5).drafter
    flags = "--model", target, "--draft-model", drafter
    [doubt] = examined(*flags, code=1)["doubts"]
    assert "for another target" in doubt


def test_too_little_memory_is_doubted(pair, monkeypatch):
    monkeypatch.setattr(health, "available_memory", lambda: 1000)
    [doubt] = examined(*models(pair(eos="off")), code=1)["doubts"]
    assert "weights and caches take" in doubt


def test_too_little_memory_is_said_before_anything_is_loaded(pair, monkeypatch):
    import mlx_dflash2.health as health
    import mlx_dflash2.loading as loading

    def refuse(*arguments, **options):
        raise DFlash2Error("loading begins")

    monkeypatch.setattr(health, "available_memory", lambda: 1000)
    monkeypatch.setattr(loading, "load_target", refuse)
    result = run("doctor", *models(pair(eos="off")), "--json")
    assert result.exit_code == 2
    warning, error = result.stderr.splitlines()
    assert "weights and caches take" in warning and "loading begins" in error


def test_a_type_that_computes_wrongly_is_doubted(pair, monkeypatch):
    import mlx.core as mx

    monkeypatch.setitem(health.TOLERANCE, mx.float16, -1.0)
    [doubt] = examined(*models(pair(eos="off")), code=1)["doubts"]
    assert "float16 matrix products are wrong" in doubt


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": 128}, "hidden_size"),
        ({"rope_theta": None}, "rope_theta"),
        ({"architectures": ["Qwen3DSparkModel"]}, "DSpark"),
    ],
    ids=["shape", "missing", "family"],
)
def test_a_pair_that_cannot_run_ends_with_2(pair, tmp_path, changes, part):
    flags = changed(pair(eos="off"), tmp_path / "drafter", **changes)
    result = run("doctor", *flags, "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert found.keys() == {"machine", "error"} and part in found["error"]
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    shown = run("doctor", *flags)
    assert shown.exit_code == 2
    assert "float32: " in shown.stdout and "Target: " not in shown.stdout


def test_another_family_than_expected_ends_with_2(pair):
    result = run("doctor", *models(pair(eos="off")), "--draft-kind", "dspark")
    assert result.exit_code == 2 and "but dspark was expected" in result.stderr


def test_a_doctor_needs_no_names(pair, monkeypatch, tmp_path):
    made = pair(family="dspark", eos="off")
    with contextlib.closing(FakeHub()) as hub:
        hub.add("openbmb/MiniCPM5-2B", made.target)
        commit = hub.add("openbmb/MiniCPM5-2B-DSpark", made.drafter)
        hub.used_by(monkeypatch, tmp_path / "cache")
        result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["pair"]
    assert found["draft_model"] == "openbmb/MiniCPM5-2B-DSpark"
    assert found["draft_revision"] == commit
    assert "Drafter: openbmb/MiniCPM5-2B-DSpark (dspark)" in result.stderr


def test_a_quantized_pair_is_probed(pair, tmp_path):
    made = pair(hidden=128, eos="off")
    out = tmp_path / "q8"
    quantize = "convert", made.drafter, out, "--to-mlx", "-q", "--q-bits", 8
    assert run(*quantize).exit_code == 0
    found = examined("--model", made.target, "--draft-model", out, code=0)
    assert found["pair"]["reading"]["quantization"] == {"group_size": 64, "bits": 8}
