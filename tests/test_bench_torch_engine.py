"""The bench's PyTorch engine: the counts on paper, and those of the MLX engine."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from engines import (
    BUDGET,
    ORACLES,
    PLAIN,
    RANDOM,
    assert_counts_on_paper,
    options_of,
    planted,
    prompt_of,
    spec,
    write_template,
)
from pair_files import EOS, EOS2
from test_tokenizer import TEXTS, copy_of
from transformers import PreTrainedTokenizerFast

from mlx_dflash2.bench.mlx_engine import load_mlx
from mlx_dflash2.bench.record import Coverage
from mlx_dflash2.errors import DFlash2Error

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from mlx_dflash2.bench.torch_engine import load_torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
PROMPT = [7, 30, 41, 9, 8]
MESSAGES = [{"role": "user", "content": "the tea"}]


@pytest.fixture(scope="module")
def loaded(pair):
    """`loaded(**options)`: the pair, its torch and its MLX engine, loaded once."""
    made = {}

    def load(kind="oracle", **options):
        folders = pair(kind, **options)
        if folders.target not in made:
            given = options_of(folders)
            made[folders.target] = load_torch(**given), load_mlx(**given)
        return folders, *made[folders.target]

    return load


def target_alone(load, folder):
    return load([str(folder)], [], revisions=[None], draft_revisions=[])


@pytest.mark.parametrize("options", ORACLES, ids=["right", "partial", "wrong"])
@pytest.mark.parametrize("width", [7, 3])
def test_every_count_is_the_one_on_paper(loaded, options, width):
    made, engine, _ = loaded(**options)
    run = engine.run(spec(width), prompt_of(made), max_tokens=BUDGET)
    assert_counts_on_paper(run, made, width)
    assert run.prefill_seconds > 0 and run.decode_seconds > 0


@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_both_engines_count_alike(loaded, family):
    made, engine, other = loaded(family=family, partial=0.3)
    prompt = prompt_of(made)
    for arm in (PLAIN, spec(5)):
        ours, theirs = (e.run(arm, prompt, max_tokens=BUDGET) for e in (engine, other))
        assert ours.tokens == theirs.tokens
        assert ours.stats == theirs.stats
        assert ours.finish_reason == theirs.finish_reason
    coverages = [
        e.coverage(spec(5), prompt, ours.tokens, ours) for e in (engine, other)
    ]
    assert coverages[0] == coverages[1]
    assert (coverages[0] is None) == (family != "dflash2")


def test_both_engines_cover_alike_on_a_random_pair(loaded):
    _, engine, other = loaded("random", **RANDOM)
    tokens = engine.run(PLAIN, PROMPT, max_tokens=24).tokens
    run = engine.run(spec(7), PROMPT, max_tokens=24)
    found = engine.coverage(spec(7), PROMPT, tokens, run)
    assert found == other.coverage(spec(7), PROMPT, tokens, run)
    assert 0 < sum(found.hits) < sum(found.trials)


def test_a_run_ends_where_the_walk_does(loaded):
    made, engine, _ = loaded()
    prompt = prompt_of(made)
    whole = made.oracle.walk(prompt, 2000)
    run = engine.run(spec(7), prompt, max_tokens=2000)
    assert (run.tokens, run.finish_reason) == (whole, "stop")


def test_a_tokenizers_own_end_stops_too(pair):
    """The model's files name one end, the tokenizer the other."""
    options = options_of(pair(eos_token_ids=(EOS2,)))
    ends = load_torch(**options)._ends(PLAIN)
    assert ends == load_mlx(**options)._tokenizers[0].eos_token_ids == {EOS, EOS2}


def test_sampled_runs_repeat_by_seed(loaded):
    _, engine, _ = loaded("random", **RANDOM)

    def sample(arm, seed):
        return engine.run(arm, PROMPT, max_tokens=8, temperature=1.0, seed=seed).tokens

    for arm in (PLAIN, spec(7)):
        assert sample(arm, 1) == sample(arm, 1)
        assert len({tuple(sample(arm, seed)) for seed in range(4)}) > 1


def test_compare_finds_a_planted_difference_as_the_other_engine_does(loaded):
    made, engine, other = loaded()
    prompt = prompt_of(made)
    tokens = made.oracle.walk(prompt, BUDGET)
    wrong = planted(tokens, 17)
    found, theirs = (
        e.compare(spec(7), prompt, wrong, max_tokens=BUDGET) for e in (engine, other)
    )
    assert found["kind"] == "difference" and found["position"] == 17
    assert (found["plain"], found["speculative"]) == (tokens[17], wrong[17])
    assert found["gap"] == found["plain_logit"] - found["speculative_logit"]
    assert found.keys() == theirs.keys()
    for name in ("plain_logit", "speculative_logit", "gap"):
        assert found[name] == pytest.approx(theirs[name], abs=1e-3)


def test_compare_says_identical_and_who_ended(loaded):
    made, engine, _ = loaded()
    prompt = prompt_of(made)
    whole = made.oracle.walk(prompt, 2000)
    for tokens, count in ((whole[:12], 12), (whole, 2000)):
        found = engine.compare(spec(7), prompt, tokens, max_tokens=count)
        assert found["kind"] == "identical"
    longer = engine.compare(spec(7), prompt, [*whole, 9], max_tokens=2000)
    assert (longer["position"], longer["speculative"]) == (len(whole), 9)
    assert longer["plain"] is longer["gap"] is None


def test_a_tie_in_bfloat16_is_a_near_tie(loaded):
    from mlx_dflash2.comparison import compare
    from mlx_dflash2.torch.decode import PlainToken

    row = torch.tensor([20.0, 20.0 - 0.125, 20.0 - 0.5], dtype=torch.bfloat16)
    for token, ulps, kind in ((1, 1.0, "near tie"), (2, 4.0, "difference")):
        found = compare([token], [PlainToken(0, row)], torch.finfo)
        assert (found.ulps, found.kind) == (ulps, kind)


def test_costs_are_those_of_the_middle_of_the_run(loaded):
    made, engine, _ = loaded()
    prompt = prompt_of(made)
    tokens = made.oracle.walk(prompt, 9)
    costs = engine.costs(spec(3), prompt, tokens, repeats=2)
    assert costs.context == len(prompt) + 4
    assert min(costs.decode, costs.verify, costs.draft) > 0


def test_a_run_of_one_token_has_costs_but_no_cycle(loaded):
    made, engine, _ = loaded()
    prompt = prompt_of(made)
    run = engine.run(spec(3), prompt, max_tokens=1)
    assert engine.costs(spec(3), prompt, run.tokens, repeats=1).context == len(prompt)
    found = engine.coverage(spec(3), prompt, run.tokens, run)
    assert found == Coverage([0] * 3, [0] * 3, [])


def test_measured_parts_leave_the_caches_as_they_were(loaded):
    made, engine, _ = loaded()
    prompt = prompt_of(made)
    [target], [drafter] = engine._targets, engine._drafters
    parts = engine._parts(target, drafter, prompt)
    parts.forward(1, tapped=False)
    parts.forward(8)
    parts.draft(7)
    assert parts.cache.get_seq_length() == parts.context.length == len(prompt)
    walk = made.oracle.walk(prompt, 9)
    proposal = drafter.propose(parts.anchor, target, parts.context)
    assert [parts.anchor, *proposal.tokens.tolist()] == walk[:8]
    logits, _ = target.forward(torch.tensor([[parts.anchor]]), parts.cache)
    assert logits[0, -1].argmax().item() == walk[1]


def test_both_engines_tell_the_same_facts(loaded):
    _, engine, other = loaded()
    assert engine.targets == other.targets
    assert engine.drafters == other.drafters


def test_everything_computes_in_the_dtype_that_is_asked_for(pair):
    engine = load_torch(**options_of(pair()), dtype="bfloat16")
    assert engine.targets[0].dtype == engine.drafters[0].dtype == "bfloat16"


def test_the_backend_says_where_it_computes(loaded):
    _, engine, _ = loaded()
    assert engine.environment() == {"backend": "torch", "device": "cpu", "threads": 1}


@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("unaware", [False, True])
def test_texts_have_the_ids_of_the_other_engine(
    pair, tmp_path, monkeypatch, name, unaware
):
    """Also where transformers lets a llama class replace a byte-level file."""
    if unaware:
        monkeypatch.setattr(
            PreTrainedTokenizerFast,
            "_tokenizer_json_has_byte_level",
            classmethod(lambda *_, **__: False),
            raising=False,
        )
    made = pair("random", thinking=True)
    folder = copy_of(made, tmp_path / "t", tokenizer_class=name)
    engine, other = (target_alone(load, folder) for load in (load_torch, load_mlx))
    for text in filter(None, TEXTS):
        given = [{"role": "user", "content": text}]
        for thinking, template in ((None, False), (None, True), (True, True)):
            ids, theirs = (
                e.encode(0, given, tools=None, thinking=thinking, template=template)
                for e in (engine, other)
            )
            assert ids == theirs, text
            assert engine.decode(0, ids) == other.decode(0, ids)


def test_tools_reach_the_template(pair, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(pair("random").target, folder)
    template = "{% if tools %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}"
    write_template(folder, template)
    engine = target_alone(load_torch, folder)
    ids = engine.encode(0, MESSAGES, tools=[{"name": "find"}], thinking=None)
    assert engine.decode(0, ids) == "findthe tea"


def test_a_tokenizer_without_a_template_is_refused_by_name(pair, tmp_path):
    folder = copy_of(pair("random"), tmp_path / "t", chat_template=None)
    engine = target_alone(load_torch, folder)
    with pytest.raises(DFlash2Error, match="has no chat template"):
        engine.encode(0, MESSAGES, tools=None, thinking=None)


def test_a_drafter_must_fit_every_target(pair):
    made, other = pair("random"), pair("random", hidden=128)
    options = options_of(made) | {
        "models": [str(made.target), str(other.target)],
        "revisions": [None, None],
    }
    with pytest.raises(DFlash2Error) as caught:
        load_torch(**options)
    assert "hidden_size is 96, but the target's is 128" in str(caught.value)


def test_a_device_that_is_not_there_is_refused(pair, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DFlash2Error, match="device cuda: .* use cpu"):
        load_torch(**options_of(pair()), device="cuda")


def test_the_torch_engine_imports_no_mlx():
    code = (
        "import sys, mlx_dflash2\n"
        f"mlx_dflash2.__path__.append({str(ROOT)!r})\n"
        "import mlx_dflash2.bench.torch_engine\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('mlx', 'mlx_lm')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr
