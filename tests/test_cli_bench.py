"""`bench`, `bench report` and `bench compare` on pairs whose counts are known."""

import json
import re
import signal
from pathlib import Path
from unittest import mock

import pytest
from command_line import assert_refused, models, run, start

from mlx_dflash2.loading import load_target
from mlx_dflash2.text import encode_prompt

TEXTS = {"coding": ["sort a list", "a loop"], "math": ["seven times six", "a proof"]}
BUDGET = 12
SHORT = ["-m", BUDGET, "--cost-repeats", 1]
WIDE = {"hidden": 128}  # groups of 64 divide it


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Four conversations in two domains."""
    return write_data(tmp_path_factory.mktemp("data") / "held-out.jsonl", TEXTS)


@pytest.fixture(scope="module")
def enough(tmp_path_factory) -> Path:
    """Four conversations in one domain, enough for a headline."""
    texts = {"math": ["one", "two", "three", "four"]}
    return write_data(tmp_path_factory.mktemp("data") / "enough.jsonl", texts)


def write_data(path: Path, texts: dict[str, list[str]]) -> Path:
    lines = [
        {
            "domain": domain,
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "the answer"},
            ],
        }
        for domain, given in texts.items()
        for text in given
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def saved(pair, data, tmp_path_factory) -> Path:
    """The report of one whole bench."""
    path = tmp_path_factory.mktemp("report") / "report.json"
    result = bench(pair(partial=0.3), data, "--json", path)
    assert result.exit_code == 0, result.stderr
    return path


def bench(made, data, *arguments):
    return run("bench", *models(made), "--data", data, *SHORT, *arguments)


def report_of(made, data, *arguments) -> dict:
    """What `--json -` printed, alone on stdout."""
    result = bench(made, data, "--json", "-", *arguments)
    assert result.exit_code == 0, result.stderr
    assert "Speculative decoding bench" in result.stderr
    return json.loads(result.stdout)


def prompts_of(made) -> list[list[int]]:
    """The token ids of the fixture's prompts, in order."""
    _, tokenizer = load_target(made.target)
    return [
        encode_prompt(tokenizer, [{"role": "user", "content": text}])
        for texts in TEXTS.values()
        for text in texts
    ]


def overall(report: dict) -> dict:
    (table,) = report["results"]["tables"]
    return table["overall"]


@pytest.mark.parametrize("partial", [0.0, 0.3, 1.0])
def test_every_count_of_a_report_is_the_one_on_paper(pair, data, partial):
    made = pair(partial=partial)
    report = report_of(made, data)
    accepted = []
    for prompt, measured in zip(prompts_of(made), report["prompts"], strict=True):
        tokens = made.oracle.walk(prompt, BUDGET)
        counts = measured["speculation"][0]["counts"]
        assert counts["accepted_per_cycle"] == made.oracle.cycles(prompt, BUDGET, 7)
        assert [r["tokens"] for r in measured["runs"]] == [len(tokens)] * 4
        emitted = sum(counts["emitted_per_cycle"])
        assert 1 + emitted + counts["plain_steps"] == len(tokens)
        assert measured["prompt_tokens"] == len(prompt)
        accepted += counts["accepted_per_cycle"]
    found = overall(report)["acceptance"]
    assert found["cycles"] == len(accepted)
    assert found["per_cycle"] == pytest.approx(sum(accepted) / len(accepted))
    assert found["histogram"] == [accepted.count(kept) for kept in range(8)]


def test_the_order_of_runs_is_there_and_back(saved):
    report = json.loads(saved.read_text())
    for measured in report["prompts"]:
        assert [r["arm"] for r in measured["runs"]] == [0, 1, 1, 0]


def test_a_wrong_drafter_is_said_to_be_wrong(pair, data):
    result = bench(pair(partial=1.0), data, "--json", "-")
    assert overall(json.loads(result.stdout))["acceptance"]["length"] == 1.0
    assert "nothing was accepted" in result.stderr
    assert "mlx-dflash2 doctor" in result.stderr
    assert result.exit_code == 0


def test_the_printed_projection_follows_from_the_costs_in_the_json(pair, enough):
    result = bench(pair(partial=0.3), enough, "--json", "-")
    report = json.loads(result.stdout)
    group = overall(report)
    costs, length = group["costs"], group["acceptance"]["length"]
    projected = length * costs["decode"] / (costs["verify"] + costs["draft"])
    line = re.search(r"^overall .*\] +([\d.]+)x +([\d.]+) +4/4$", result.stderr, re.M)
    assert line, result.stderr
    assert float(line[1]) == pytest.approx(projected, abs=6e-4)
    assert float(line[2]) == pytest.approx(length, abs=6e-4)


def test_few_prompts_give_no_headline(pair, data):
    report = report_of(pair(), data)
    (table,) = report["results"]["tables"]
    assert "2" in table["no_headline"] and "4" in table["no_headline"]
    assert table["overall"]["speeds"] is None


def test_a_report_names_models_machine_and_workload(saved, pair):
    report = json.loads(saved.read_text())
    made = pair(partial=0.3)
    assert report["targets"][0]["name"] == str(made.target)
    assert report["drafters"][0]["kind"] == "dflash2"
    assert len(report["targets"][0]["files"]["model.safetensors"]) == 64
    assert report["workload"]["domains"] == {"coding": 2, "math": 2}
    assert report["environment"]["backend"] == "mlx"
    assert {"mlx", "mlx-lm", "python"} <= report["environment"]["versions"].keys()
    assert report["settings"]["max_tokens"] == BUDGET
    assert report["partial"] is False


@pytest.mark.parametrize(
    "flags, check",
    [
        (["--domain", "math"], lambda r: r["workload"]["domains"] == {"math": 2}),
        (["--prompts-per-domain", 1], lambda r: len(r["prompts"]) == 2),
        (["-m", 5], lambda r: r["prompts"][0]["runs"][0]["tokens"] == 5),
        (["--repeats", 2], lambda r: len(r["prompts"][0]["runs"]) == 8),
        (["--seed", 4], lambda r: r["settings"]["seed"] == 4),
        (["--no-thinking"], lambda r: r["prompts"][0]["thinking"] is False),
        (
            ["--block-size", "2,4"],
            lambda r: [arm["num_draft_tokens"] for arm in r["arms"]] == [0, 1, 3],
        ),
        (["--draft-bits", 8], lambda r: r["drafters"][0]["quantization"]["bits"] == 8),
        (["--ignore-chat-template"], lambda r: r["prompts"][0]["prompt_tokens"] < 15),
        (
            ["--sampled", "--samples", 20],
            lambda r: len(r["sampled"][0]["p_values"]) == 3,
        ),
        (
            ["--sampled", "--samples", 20, "--temp", 0.5],
            lambda r: r["sampled"][0]["temperature"] == 0.5,
        ),
        (["--group-by", "domain"], lambda r: len(r["prompts"]) == 4),
        (
            ["--backend", "torch", "--device", "cpu", "--dtype", "bfloat16"],
            lambda r: (
                (r["environment"]["backend"], r["targets"][0]["dtype"])
                == ("torch", "bfloat16")
            ),
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_flags_have_their_effect(pair, data, flags, check):
    if "torch" in flags:
        pytest.importorskip("torch")
    made = pair(**WIDE) if "--draft-bits" in flags else pair()
    assert check(report_of(made, data, *flags))


def test_widths_are_compared_and_the_best_is_named(pair, enough):
    result = bench(pair(), enough, "--block-size", "2,8")
    assert "drafter, block 2" in result.stdout and "drafter, block 8" in result.stdout
    assert re.search(r"best width|no width pays, the best is", result.stdout)


def test_drafters_are_compared_on_the_same_prompts(pair, data):
    good, bad = pair(), pair(partial=1.0)
    report = report_of(good, data, "--draft-model", bad.drafter)
    lengths = [
        table["overall"]["acceptance"]["length"]
        for table in report["results"]["tables"]
    ]
    assert lengths[0] > 5 and lengths[1] == 1.0
    assert [r["arm"] for r in report["prompts"][0]["runs"]] == [0, 1, 2, 2, 1, 0]


def test_precisions_are_compared_each_with_its_own_plain_decoding(pair, data):
    exact, coarse = pair(), pair(dtype="bfloat16")
    report = report_of(exact, data, "--model", coarse.target)
    assert [facts["dtype"] for facts in report["targets"]] == ["float32", "bfloat16"]
    assert [arm["target"] for arm in report["arms"]] == [0, 0, 1, 1]
    assert len({arm["label"] for arm in report["arms"]}) == 4


def test_both_thinking_modes_have_tables_of_their_own(pair, data):
    report = report_of(pair(thinking=True), data, "--thinking", "both")
    assert [table["thinking"] for table in report["results"]["tables"]] == [True, False]
    assert_refused(bench(pair(), data, "--thinking", "both"), "--thinking")


def test_files_hold_what_was_printed(pair, data, tmp_path):
    files = {
        name: tmp_path / f"{name}.out"
        for name in ("json", "markdown", "measured-results", "summary")
    }
    flags = [part for name, path in files.items() for part in (f"--{name}", path)]
    result = bench(pair(), data, *flags, "--plot", tmp_path / "plots")
    assert result.exit_code == 0, result.stderr
    assert "| domain |" in files["markdown"].read_text()
    results = json.loads(files["measured-results"].read_text())
    assert results["domains"]["math"]["identical"] == "2/2"
    text = files["summary"].read_text()
    assert json.loads(text)["results"] and "sort a list" not in text
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {
        *("speedup.png", "acceptance.png", "cost.png"),
    }
    again = run("bench", "report", files["json"])
    assert again.stdout == result.stdout
    assert run("bench", "report", files["summary"]).exit_code == 0


def test_gates_decide_the_exit_code(saved):
    easy, hard = ["--gate", "math >= 0.0001x"], ["--gate", "coding >= 1000x"]
    for gates in (easy, hard):  # two prompts a domain are too few for either
        result = run("bench", "report", saved, *gates)
        assert result.exit_code == 3
        assert "Gate failed, drafter: " in result.stderr
    assert_refused(run("bench", "report", saved, "--gate", "math > 2"), "--gate")


def test_a_gate_that_was_reached_passes(pair, enough):
    gates = ["--gate", "math >= 0.0001x", "--gate", "overall>=0.0001x"]
    result = bench(pair(), enough, *gates)
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("Gate passed, drafter: ") == 2
    assert bench(pair(), enough, *gates, "--gate", "coding >= 1x").exit_code == 3


@pytest.mark.parametrize(
    "flag", ["--json", "--markdown", "--measured-results", "--summary", "--plot"]
)
def test_what_exists_is_refused_before_anything_is_loaded(flag, data, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    result = run("bench", "--model", "nowhere", "--data", data, flag, taken)
    assert_refused(result, str(taken), "already exists")
    assert taken.read_text() == "mine"
    result = run("bench", "--model", "nowhere", flag, tmp_path / "no" / "where")
    assert_refused(result, "there is no folder")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--temp", 1], "--temp is the temperature of --sampled"),
        (["--samples", 50], "--samples counts"),
        (["--resume"], "--json FILE"),
        (["--resume", "--json", "-"], "--json FILE"),
        (["--domain", "poetry"], "no domain 'poetry'"),
        (["--block-size", "2,9"], "blocks of 8"),
        (["--block-size", "1"], "at least 2"),
        (["--device", "cpu"], "--device is for --backend torch"),
        (["--dtype", "float16"], "--dtype is for --backend torch"),
        (["--backend", "torch", "--draft-bits", 4], "--draft-bits"),
        (["--thinking", "both", "--no-thinking"], "--thinking both"),
        (["--ignore-chat-template", "--no-thinking"], "chat template"),
        (["--gate", "fast"], "--gate 'fast'"),
        (["--draft-kind", "dspark"], "dspark"),
        (["--group-by", "topic"], "topic"),
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--draft-model", "nowhere"], "nowhere"),
        (["--json", "a", "--markdown", "./a"], "one name for two files"),
        (["--markdown", "-"], "no name for a file"),
        (["--json", ""], "no name for a file"),
        (["--json", b"t\xff".decode("utf-8", "surrogateescape")], "not Unicode text"),
        (["--measured-results", "r", "--block-size", "2,4"], "--block-size"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(pair, data, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(bench(pair(), data, *flags), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "line, message",
    [
        (
            '{"domain": "overall", "messages": [{"role": "user", "content": "a"}]}',
            "all",
        ),
        ('{"domain": "a\\nb", "messages": [{"role": "user", "content": "a"}]}', "name"),
        (
            '{"domain": "\\ud800", "messages": [{"role": "user", "content": "a"}]}',
            "text",
        ),
    ],
)
def test_group_names_that_would_spoil_a_report_are_refused(
    pair, tmp_path, line, message
):
    file = tmp_path / "data.jsonl"
    file.write_text(line + "\n")
    assert_refused(bench(pair(), file), "data.jsonl: line 1", message)


def test_a_report_that_appears_meanwhile_is_not_replaced(pair, data, tmp_path):
    file = tmp_path / "report.json"

    def write_first(*_, **__):
        file.write_text("another's")

    with mock.patch("mlx_dflash2.bench.run.Bench._warm_up", write_first):
        result = bench(pair(), data, "--json", file)
    assert result.exit_code == 2 and result.stdout == ""
    assert "already exists" in result.stderr and "Traceback" not in result.stderr
    assert file.read_text() == "another's"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_one_folder_in_two_spellings_is_one_drafter(pair, data):
    made = pair()
    again = made.drafter.parent / ".." / made.drafter.parent.name / "drafter"
    result = bench(made, data, "--draft-model", again)
    assert_refused(result, "--draft-model names the same twice")


def test_a_report_with_a_foreign_prompt_is_not_resumed(saved, pair, data, tmp_path):
    report = json.loads(saved.read_text())
    report["prompts"][0]["name"] = "foreign-1"
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    result = bench(pair(partial=0.3), data, "--json", file, "--resume")
    assert_refused(result, "--resume", "foreign-1")


def test_group_by_needs_data(pair):
    result = run("bench", *models(pair()), "--group-by", "domain")
    assert_refused(result, "--group-by", "--data")


def test_one_revision_is_of_one_model(pair, data):
    made = pair()
    twice = ["--model", "other/model", "--revision", "main"]
    assert_refused(bench(made, data, *twice), "--revision", "--model")


def test_the_same_model_twice_is_refused(pair, data):
    made = pair()
    result = bench(made, data, "--draft-model", made.drafter)
    assert_refused(result, "--draft-model names the same twice")


def test_options_before_a_subcommand_are_refused(saved):
    result = run("bench", "--seed", 3, "report", saved)
    assert_refused(result, "--seed before report has no effect")


def test_an_interrupted_bench_is_kept_and_resumed(pair, data, tmp_path):
    made, file = pair(partial=0.3), tmp_path / "report.json"
    arguments = ["bench", *models(made), "--data", data, "--json", file]
    arguments += map(str, SHORT)
    stop = (
        "import mlx_dflash2.bench.mlx_engine as engine\n"
        "import os, signal\n"
        "run, calls = engine.MLXEngine.run, []\n"
        "def stopping(*arguments, **options):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 9: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return run(*arguments, **options)\n"
        "engine.MLXEngine.run = stopping\n"
    )
    process = start(*arguments, before=stop)
    out, err = (stream.decode() for stream in process.communicate(timeout=120))
    assert process.returncode == 128 + signal.SIGINT, err
    assert "Traceback" not in err
    assert "--resume goes on" in err and "partial" in out
    report = json.loads(file.read_text())
    assert report["partial"] is True and len(report["prompts"]) == 1
    other = run(*arguments, "--resume", "--seed", 5)
    assert_refused(other, "--resume", "settings")
    result = run(*arguments, "--resume")
    assert result.exit_code == 0, result.stderr
    whole = json.loads(file.read_text())
    assert whole["partial"] is False and len(whole["prompts"]) == 4
    assert whole["prompts"][0] == report["prompts"][0]
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_a_report_of_another_machine_is_not_resumed(saved, pair, data, tmp_path):
    report = json.loads(saved.read_text())
    report["environment"]["processor"] = "another"
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    result = bench(pair(partial=0.3), data, "--json", file, "--resume")
    assert_refused(result, "--resume", "processor")
    assert json.loads(file.read_text()) == report


def test_reports_of_one_workload_are_compared(saved, pair, data, tmp_path):
    other = tmp_path / "other.json"
    made = pair(partial=0.3)
    result = bench(made, data, "--block-size", 4, "--json", other)
    assert result.exit_code == 0, result.stderr
    result = run("bench", "compare", saved, other)
    assert result.exit_code == 0, result.stderr
    assert "overall" in result.stdout
    bench(made, data, "--seed", 1, "--json", tmp_path / "seed.json")
    assert_refused(run("bench", "compare", saved, tmp_path / "seed.json"), "seed")


def test_a_file_that_is_no_report_is_refused(tmp_path, data):
    assert_refused(run("bench", "report", tmp_path / "none.json"), "none.json")
    assert_refused(run("bench", "report", data), str(data))


def test_plots_need_matplotlib(pair, data, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = bench(pair(), data, "--plot", tmp_path / "plots")
    assert_refused(result, "pip install 'mlx-dflash2[plot]'")


def test_torch_must_be_there_for_its_backend(pair, data, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    result = bench(pair(), data, "--backend", "torch")
    assert_refused(result, "pip install 'mlx-dflash2[torch]'")
