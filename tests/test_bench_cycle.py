"""`bench cycle`: the parts of a cycle and the loop over them."""

import contextlib
import json
import shutil
from dataclasses import replace
from statistics import median

import pytest
from command_line import assert_refused, models, run
from fake_hub import FakeHub

import mlx_dflash2.cli_bench as cli_bench
from mlx_dflash2.bench import cycle
from mlx_dflash2.bench.cycle import Measured, Plan, measure_cycle
from mlx_dflash2.bench.cycle_report import CycleReport
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.loading import load_drafter, load_target

SHORT = "-p", "6", "-g", "10", "-n", "1"
FORWARDS = [f"forward_{rows}" for rows in range(1, 10)]
RATIOS = [f"ratio_{rows}" for rows in range(1, 10)]
PLAIN = ["prefill", "plain", *FORWARDS, *RATIOS]
BOTH = [
    *("prefill", "drafter_prefill", "plain", *FORWARDS, *RATIOS),
    *("draft", "decision", "cycle", "overhead", "over_parts", "break_even"),
]
TESTED: set[str] = set()


def concerns(*names):
    """Note which parameters of the command a test is about."""

    def note(test):
        TESTED.update(names)
        return test

    return note


def test_every_parameter_has_a_test():
    assert TESTED == {parameter.name for parameter in cli_bench.cycle.params}


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    """What is measured matters here, not how surely."""
    monkeypatch.setattr(cycle, "ROUNDS", 1)


@pytest.fixture(scope="module")
def oracle(pair):
    """Drafts are always right and no walk ends by itself."""
    return pair(eos="off")


@pytest.fixture(scope="module")
def loaded(oracle):
    target, _ = load_target(oracle.target)
    return target, load_drafter(oracle.drafter, target)


@pytest.fixture
def loops(monkeypatch):
    """Every run of the loop: its drafter, prompt length and options."""
    seen, run_ = [], cycle.Decoding.run

    def note(self, prompt, **options):
        seen.append((self.drafter, len(prompt), options))
        return run_(self, prompt, **options)

    monkeypatch.setattr(cycle.Decoding, "run", note)
    return seen


def reported(*flags):
    result = run("bench", "cycle", *flags, "--json", "-")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_a_trial_measures_every_part_and_what_follows(pair, family):
    target, _ = load_target(pair(eos="off", family=family).target)
    drafter = load_drafter(pair(eos="off", family=family).drafter, target)
    plan = Plan((6,), generation_tokens=12, trials=2, num_draft_tokens=5)
    [found] = measure_cycle(target, drafter, plan)
    assert (found.prompt_tokens, found.context) == (6, 12)
    assert len(found.trials) == 2
    for trial in found.trials:
        assert list(trial) == BOTH
        assert all(trial[name] > 0 for name in BOTH if name != "overhead")
        alone = trial["forward_6"] + trial["draft"]
        assert trial["overhead"] == trial["cycle"] - alone
        assert trial["over_parts"] == trial["cycle"] / alone
        assert trial["break_even"] == trial["cycle"] / trial["plain"]
        for forward, ratio in zip(FORWARDS, RATIOS, strict=True):
            assert trial[ratio] == trial[forward] / trial["forward_1"]
    assert found.plain_memory > 0 and found.memory > 0


def test_without_a_drafter_only_the_target_is_measured(loaded):
    told = []
    plan = Plan((6, 9), generation_tokens=2, trials=1)
    found = measure_cycle(loaded[0], None, plan, tell=lambda: told.append(1))
    assert [list(trial) for f in found for trial in f.trials] == [PLAIN] * 2
    assert [f.memory for f in found] == [None, None]
    assert len(told) == 4  # a warm-up and a trial of each


def test_trials_go_back_and_forth(loaded, loops):
    target, drafter = loaded
    plan = Plan((6,), generation_tokens=10, trials=3, num_draft_tokens=7)
    measure_cycle(target, drafter, plan)
    fill = (drafter, 11, {"max_tokens": 1, "eos": frozenset()})
    plain = (None, 6, {"max_tokens": 10, "eos": frozenset(), "num_draft_tokens": 0})
    both = (drafter, 6, plain[2] | {"num_draft_tokens": 7})
    assert loops == [plain, both, fill, plain, both, both, plain, plain, both]


def test_only_whole_cycles_count(loaded, monkeypatch):
    """Of one, two, four ... seconds an emission: the first cycle, not the cut one."""
    target, drafter = loaded
    clock = iter(2.0**number for number in range(20))
    monkeypatch.setattr(cycle.time, "perf_counter", lambda: next(clock))
    plan = Plan((6,), generation_tokens=12, num_draft_tokens=7)
    speed, taken = cycle._Loops(target, drafter, plan, 6).run(drafter)
    assert (speed, taken) == (6 / 1.0, 2000.0)
    clock = iter(2.0**number for number in range(20))
    _, taken = cycle._Loops(target, drafter, plan, 6).run(None)
    assert taken == median(2000.0 * 2**number for number in range(11))


def test_a_cycle_that_cannot_be_whole_is_refused():
    with pytest.raises(DFlash2Error, match="give at least 9"):
        Plan((6,), generation_tokens=8, num_draft_tokens=7)


def test_a_wide_block_is_measured_to_its_width(pair):
    made = pair("random", block_size=12)
    found = reported(*models(made), "-p", 6, "-g", 14, "-n", 1)
    [trial] = found["lengths"][0]["trials"]
    assert "forward_12" in trial and "forward_13" not in trial
    assert trial["overhead"] == trial["cycle"] - trial["forward_12"] - trial["draft"]


def synthetic(**more):
    trials = [
        dict.fromkeys(BOTH, 4.0)
        | {"prefill": 1234.5, "forward_8": 6.0 + i, "ratio_8": 1.5 + i / 4}
        for i in range(5)
    ]
    plan = Plan((128,), trials=5, num_draft_tokens=7)
    measured = [Measured(128, 160, 5_000_000, 7_000_000, trials)]
    named = {"model": "t", "revision": None, "draft_model": "d"}
    return CycleReport({"machine": "m"}, named | more, plan, measured)


def test_the_table_shows_medians_intervals_and_ratios():
    lines = synthetic().lines()
    assert lines[:2] == ["model: t", "draft model: d"]
    assert "drafted tokens verified per cycle: 7" in lines
    title = "target forward, 8 rows".ljust(len("prefill with the drafter (tokens/s)"))
    assert f"{title}  8.00 [6.00, 10.0] 2.00x" in lines
    cells = {line[: len(title)].strip(): line[len(title) :].strip() for line in lines}
    assert cells["target forward, 1 row"] == "4.00 [4.00, 4.00] 4.00x"
    assert cells["prefill, plain (tokens/s)"] == "1234 [1234, 1234]"
    assert cells["peak memory with the drafter (MB)"] == "7.0"
    assert not any("ratio_" in line for line in lines)


@pytest.mark.parametrize(("overhead", "noted"), [(0.1, False), (-0.1, True)])
def test_parts_that_took_longer_alone_are_noted_as_noise(overhead, noted):
    report = synthetic()
    trials = [trial | {"overhead": overhead} for trial in report.measured[0].trials]
    measured = [replace(report.measured[0], trials=trials)]
    lines = replace(report, measured=measured).lines()
    assert (
        lines[-1].startswith("Below 0 beyond verify and draft is within noise")
    ) is noted


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_prompt_beyond_the_positions_of_a_model_is_refused(pair, tmp_path, part):
    made = pair(eos="off")
    named = {"target": made.target, "drafter": made.drafter}
    folder = tmp_path / part
    shutil.copytree(named[part], folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 40
    (folder / "config.json").write_text(json.dumps(config))
    named[part] = folder
    asked = "--model", named["target"], "--draft-model", named["drafter"], "-n", 1
    for lengths, fits in (("8,41", False), ("8,40", True)):
        result = run("bench", "cycle", *asked, "-p", lengths, "-g", 9)
        assert (result.exit_code == 0) is fits, result.output
    refused = run("bench", "cycle", *asked, "-p", "8,41")
    assert_refused(refused, "max_position_embeddings is 40", "has 41 tokens")


def test_the_report_holds_raw_trials_and_their_medians():
    found = json.loads(json.dumps(synthetic().as_dict()))
    assert (found["format"], found["version"]) == ("mlx-dflash2 bench cycle", 1)
    [length] = found["lengths"]
    assert [trial["forward_8"] for trial in length["trials"]] == [6, 7, 8, 9, 10]
    assert length["medians"]["forward_8"] == {"median": 8.0, "low": 6.0, "high": 10.0}
    assert list(length["medians"]) == BOTH


@concerns("model", "draft_model")
def test_the_command_prints_a_table(oracle):
    result = run("bench", "cycle", *models(oracle), *SHORT)
    assert result.exit_code == 0, result.output
    assert f"model: {oracle.target}\n" in result.stdout
    assert "trained to draft: 7\n" in result.stdout
    assert "\n  beyond verify and draft " in result.stdout
    assert result.stderr == "Trials\n"
    alone = run("bench", "cycle", "--model", oracle.target, *SHORT)
    assert "draft" not in alone.stdout.replace("drafted tokens verified", "")


@concerns("prompt_tokens", "generation_tokens", "num_trials")
@pytest.mark.parametrize(
    "flags",
    [
        ("-p", "5,8", "-g", 12, "-n", 2),
        ("--prompt-tokens", "5,8", "--generation-tokens", 12, "--num-trials", 2),
    ],
    ids=["short", "long"],
)
def test_lengths_tokens_and_trials_are_as_asked(oracle, flags):
    found = reported("--model", oracle.target, *flags)
    assert found["settings"]["prompt_tokens"] == [5, 8]
    assert [length["prompt_tokens"] for length in found["lengths"]] == [5, 8]
    assert [length["context"] for length in found["lengths"]] == [11, 14]
    assert all(len(length["trials"]) == 2 for length in found["lengths"])
    assert found["environment"]["versions"]["mlx"]


@concerns("num_draft_tokens")
def test_a_cycle_verifies_as_many_as_asked(oracle):
    found = reported(*models(oracle), *SHORT, "--num-draft-tokens", 2)
    assert found["settings"]["num_draft_tokens"] == 2
    [trial] = found["lengths"][0]["trials"]
    assert trial["overhead"] == trial["cycle"] - trial["forward_3"] - trial["draft"]


@concerns("prefill_step_size", "seed")
def test_step_and_seed_reach_the_loop(oracle, monkeypatch):
    prompts, seen, run_ = [], [], cycle.Decoding.run

    def note(self, prompt, **options):
        prompts.append((self.prefill_step_size, tuple(prompt[:6])))
        return run_(self, prompt, **options)

    monkeypatch.setattr(cycle.Decoding, "run", note)
    asked = "--model", oracle.target, *SHORT
    for flags in ((), ("--prefill-step-size", 3), ("--seed", 1), ("--seed", 0)):
        reported(*asked, *flags)
        assert (
            len(set(prompts)) == 1
        )  # of all loops, and where the parts' context starts
        seen.append(prompts[0])
        prompts.clear()
    usual, steps, other, same = seen
    assert steps == (3, usual[1]) and usual[0] == 2048
    assert other[1] != usual[1] and same == usual


@concerns("random_weights", "dtype", "revision", "draft_revision", "offline")
def test_random_weights_fetch_only_the_configs(oracle, monkeypatch, tmp_path):
    with contextlib.closing(FakeHub()) as hub:
        commits = [
            hub.add(name, folder, refs=("v1",))
            for name, folder in (("a/t", oracle.target), ("a/d", oracle.drafter))
        ]
        hub.used_by(monkeypatch, tmp_path)
        asked = (
            *("--model", "a/t", "--draft-model", "a/d", "--random-weights", *SHORT),
            *("--revision", "v1", "--draft-revision", "v1", "--dtype", "bfloat16"),
        )
        refused = run("bench", "cycle", *asked, "--offline")
        assert_refused(refused, "a/t@v1", "not in the local Hub cache")
        found = reported(*asked)["models"]
        paths = [path for method, path in hub.requests if method == "GET"]
    assert [found["revision"], found["draft_revision"]] == commits
    assert found["weights"] == "random"
    assert found["dtype"] == found["draft_dtype"] == "bfloat16"
    fetched = {path for path in paths if "/resolve/" in path}
    assert {path.rsplit("/", 1)[1] for path in fetched} == {"config.json"}


@concerns("draft_kind")
@pytest.mark.parametrize("weights", [(), ("--random-weights",)], ids=["file", "random"])
def test_another_family_than_expected_is_refused(oracle, weights):
    asked = *models(oracle), *SHORT, *weights
    refused = run("bench", "cycle", *asked, "--draft-kind", "dspark")
    assert_refused(refused, "dspark" if not weights else "DSpark")
    assert reported(*asked, "--draft-kind", "dflash2")["models"]["draft_kind"]


@concerns("json_file")
def test_a_report_is_written_once(oracle, tmp_path):
    file = tmp_path / "report.json"
    asked = "bench", "cycle", "--model", oracle.target, *SHORT, "--json", file
    result = run(*asked)
    assert result.exit_code == 0 and "plain step of the loop" in result.stdout
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["models"]["model"] == str(oracle.target)
    assert_refused(run(*asked), "report.json", "already exists")
    assert json.loads(file.read_text(encoding="utf-8")) == content
    elsewhere = tmp_path / "no" / "report.json"
    assert_refused(run(*asked[:-1], elsewhere), "there is no folder")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["-p", "0"], "0 is too small"),
        (["-p", "4,x"], "expected whole numbers, as 2,4,8"),
        (["-p", "4,4"], "names a number twice"),
        (["-g", "1"], "x>=2"),
        (["-n", "0"], "x>=1"),
        (["-g", "8"], "give at least 9"),
        (["--num-draft-tokens", "8"], "num_draft_tokens is 8"),
        (["--dtype", "float16"], "--dtype needs --random-weights"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(oracle, flags, part):
    assert_refused(run("bench", "cycle", *models(oracle), *flags), part)


@pytest.mark.parametrize(
    "flags",
    [("--num-draft-tokens", 3), ("--draft-kind", "dspark"), ("--draft-revision", "a")],
    ids=lambda flags: flags[0],
)
def test_a_flag_of_the_drafter_needs_one(oracle, flags):
    result = run("bench", "cycle", "--model", oracle.target, *flags)
    assert_refused(result, f"{flags[0]} needs --draft-model")


def test_a_config_without_sizes_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_theta": 1e4}')
    result = run("bench", "cycle", "--random-weights", "--model", tmp_path)
    assert_refused(result, "config.json", "hidden_size")
