"""The bench's MLX engine: counts on paper, coverage by brute force, facts."""

import hashlib
import shutil

import mlx.core as mx
import pytest
from engines import (
    BUDGET,
    ORACLES,
    PLAIN,
    RANDOM,
    WRONG,
    assert_counts_on_paper,
    options_of,
    planted,
    prompt_of,
    spec,
    write_template,
)

from mlx_dflash2.bench.facts import TOKENIZER_FILES
from mlx_dflash2.bench.mlx_engine import load_mlx
from mlx_dflash2.bench.record import Arm, Coverage
from mlx_dflash2.cycle_parts import CycleParts
from mlx_dflash2.errors import DFlash2Error

PROMPT = [7, 30, 41, 9, 8]
MESSAGES = [{"role": "user", "content": "the tea"}]


@pytest.fixture(scope="module")
def loaded(pair):
    """`loaded(**options)`: the pair and an engine over it, loaded once."""
    made = {}

    def load(kind="oracle", **options):
        folders = pair(kind, **options)
        if folders.target not in made:
            made[folders.target] = load_mlx(**options_of(folders))
        return folders, made[folders.target]

    return load


@pytest.mark.parametrize("options", ORACLES, ids=["right", "partial", "wrong"])
@pytest.mark.parametrize("width", [7, 3, 1])
def test_every_count_is_the_one_on_paper(loaded, options, width):
    made, engine = loaded(**options)
    run = engine.run(spec(width), prompt_of(made), max_tokens=BUDGET)
    assert_counts_on_paper(run, made, width)
    assert run.prefill_seconds > 0 and run.decode_seconds > 0


def test_a_wrong_drafter_gives_one_token_a_cycle(loaded):
    made, engine = loaded(**WRONG)
    run = engine.run(spec(7), prompt_of(made), max_tokens=BUDGET)
    assert run.stats.acceptance_length == 1.0
    assert run.stats.cycles == len(run.tokens) - 1


def test_a_plain_arm_runs_no_cycle(loaded):
    made, engine = loaded()
    run = engine.run(PLAIN, prompt_of(made), max_tokens=BUDGET)
    assert run.tokens == made.oracle.walk(prompt_of(made), BUDGET)
    assert (run.stats.cycles, run.stats.plain_steps) == (0, len(run.tokens) - 1)


def test_a_run_ends_where_the_walk_does(loaded):
    made, engine = loaded()
    prompt = prompt_of(made)
    whole = made.oracle.walk(prompt, 2000)
    assert len(whole) < 2000, "this prompt must reach an end"
    run = engine.run(spec(7), prompt, max_tokens=2000)
    assert (run.tokens, run.finish_reason) == (whole, "stop")


def test_sampled_runs_repeat_by_seed(loaded):
    _, engine = loaded("random", **RANDOM)

    def sample(arm, seed):
        return engine.run(arm, PROMPT, max_tokens=8, temperature=1.0, seed=seed).tokens

    for arm in (PLAIN, spec(7)):
        assert sample(arm, 1) == sample(arm, 1)
        assert len({tuple(sample(arm, seed)) for seed in range(4)}) > 1


def test_an_oracle_set_of_candidates_covers_what_its_path_misses(loaded):
    made, engine = loaded(**WRONG)
    prompt = prompt_of(made)
    run = engine.run(spec(7), prompt, max_tokens=BUDGET)
    found = engine.coverage(spec(7), prompt, run.tokens, run)
    drafted = run.stats.drafted_per_cycle
    assert found.trials == [sum(d > slot for d in drafted) for slot in range(7)]
    assert found.hits == found.trials
    assert found.reachable_per_cycle == drafted
    assert run.stats.accepted == 0


@pytest.mark.parametrize("width", [7, 3])
def test_coverage_equals_brute_force(loaded, width):
    """Every cycle anew: prefill up to its anchor, then draft."""
    _, engine = loaded("random", **RANDOM)
    [target], [drafter] = engine._targets, engine._drafters
    tokens = engine.run(PLAIN, PROMPT, max_tokens=24).tokens
    run = engine.run(spec(width), PROMPT, max_tokens=24)
    found = engine.coverage(spec(width), PROMPT, tokens, run)
    trials, hits, reachable, anchor = [0] * width, [0] * width, [], 0
    for drafted, emitted in zip(
        run.stats.drafted_per_cycle, run.stats.emitted_per_cycle, strict=True
    ):
        fresh = CycleParts(target, drafter, [*PROMPT, *tokens[:anchor]])
        proposal = drafter.propose(tokens[anchor], target, fresh.context)
        reach = 0
        for slot in range(min(drafted, len(tokens) - anchor - 1)):
            hit = tokens[anchor + 1 + slot] in proposal.candidates[slot].tolist()
            trials[slot] += 1
            hits[slot] += hit
            reach += hit and reach == slot
        reachable.append(reach)
        anchor += emitted
    assert (found.trials, found.hits) == (trials, hits)
    assert found.reachable_per_cycle == reachable
    assert 0 < sum(hits) < sum(trials)


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_drafters_without_candidates_have_no_coverage(loaded, family):
    made, engine = loaded(family=family)
    run = engine.run(spec(3), prompt_of(made), max_tokens=12)
    assert engine.coverage(spec(3), prompt_of(made), run.tokens, run) is None


def test_compare_finds_a_planted_difference_and_its_two_logits(loaded):
    made, engine = loaded()
    prompt = prompt_of(made)
    tokens = engine.run(spec(7), prompt, max_tokens=BUDGET).tokens
    wrong = planted(tokens, 17)
    found = engine.compare(spec(7), prompt, wrong, max_tokens=BUDGET)
    assert found["kind"] == "difference" and found["position"] == 17
    assert (found["plain"], found["speculative"]) == (tokens[17], wrong[17])
    target = engine._targets[0]
    history = mx.array([[*prompt, *tokens[:17]]])
    hidden, _ = target.forward(history, target.make_cache())
    row = target.head(hidden)[0, -1]
    assert found["plain_logit"] == pytest.approx(row[tokens[17]].item(), abs=1e-3)
    assert found["speculative_logit"] == pytest.approx(row[wrong[17]].item(), abs=1e-3)
    assert found["gap"] == found["plain_logit"] - found["speculative_logit"]


def test_compare_says_identical_and_who_ended(loaded):
    made, engine = loaded()
    prompt = prompt_of(made)
    tokens = engine.run(spec(7), prompt, max_tokens=12).tokens
    same = engine.compare(spec(7), prompt, tokens, max_tokens=12)
    assert same["identical"] and same["kind"] == "identical"
    short = engine.compare(spec(7), prompt, tokens[:9], max_tokens=12)
    assert (short["position"], short["plain"]) == (9, tokens[9])
    assert short["speculative"] is short["gap"] is None


def test_costs_are_those_of_the_middle_of_the_run(loaded):
    made, engine = loaded()
    prompt = prompt_of(made)
    tokens = made.oracle.walk(prompt, 9)
    costs = engine.costs(spec(3), prompt, tokens, repeats=2)
    assert costs.context == len(prompt) + 4
    assert min(costs.decode, costs.verify, costs.draft) > 0


def test_a_run_of_one_token_has_costs_but_no_cycle(loaded):
    made, engine = loaded()
    prompt = prompt_of(made)
    run = engine.run(spec(3), prompt, max_tokens=1)
    assert engine.costs(spec(3), prompt, run.tokens, repeats=1).context == len(prompt)
    found = engine.coverage(spec(3), prompt, run.tokens, run)
    assert found == Coverage([0] * 3, [0] * 3, [])


def test_measured_parts_leave_the_caches_as_they_were(loaded):
    made, engine = loaded()
    prompt = prompt_of(made)
    [target], [drafter] = engine._targets, engine._drafters
    parts = engine._parts(target, drafter, prompt)
    before = drafter.propose(parts.anchor, target, parts.context).tokens.tolist()
    parts.forward(1, tapped=False)
    parts.forward(8)
    parts.draft(7)
    assert {held.offset for held in parts.cache} == {len(prompt)}
    assert {held.end for held in parts.context} == {len(prompt)}
    after = drafter.propose(parts.anchor, target, parts.context).tokens.tolist()
    assert after == before
    hidden, _ = target.forward(mx.array([[parts.anchor]]), parts.cache)
    following = mx.argmax(target.head(hidden)[0, -1]).item()
    assert [parts.anchor, following] == made.oracle.walk(prompt, 2)


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_facts_hash_the_config_and_every_weight_file(pair):
    made = pair("random", shards=3)
    engine = load_mlx(**options_of(made))
    [target], [drafter] = engine.targets, engine.drafters
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for facts, folder, weights in (
        (target, made.target, shards),
        (drafter, made.drafter, ["model.safetensors"]),
    ):
        names = ["config.json", *weights]
        assert facts.files == {name: sha256(folder / name) for name in names}
        assert (facts.name, facts.revision) == (str(folder), None)
        assert (facts.dtype, facts.quantization) == ("float32", None)
    assert (target.kind, target.num_draft_tokens) == ("llama", None)
    assert (drafter.kind, drafter.num_draft_tokens) == ("dflash2", 7)
    assert drafter.tokenizer is None


def test_the_tokenizer_hash_is_of_its_files_and_chat_template(pair, tmp_path):
    made = pair("random")

    def hash_of(name, change=lambda folder: None):
        folder = tmp_path / name
        shutil.copytree(made.target, folder)
        change(folder)
        engine = load_mlx([str(folder)], [], revisions=[None], draft_revisions=[])
        return engine.targets[0].tokenizer

    plain = hash_of("plain")
    assert hash_of("same") == plain
    assert hash_of("notes", lambda f: (f / "notes.txt").write_text("x")) == plain
    assert hash_of("template", lambda f: write_template(f, "x")) != plain
    present = [name for name in TOKENIZER_FILES if (made.target / name).exists()]
    assert "tokenizer.json" in present
    for name in present:
        spaced = hash_of(name, lambda f, n=name: append_space(f / n))
        assert spaced != plain, name


def append_space(path):
    path.write_bytes(path.read_bytes() + b" ")


def test_facts_tell_of_quantization_and_dtype(pair):
    made = pair("random", hidden=128, dtype="bfloat16")
    engine = load_mlx(**options_of(made), draft_bits=4)
    assert engine.drafters[0].quantization == {"group_size": 64, "bits": 4}
    assert engine.drafters[0].dtype == engine.targets[0].dtype == "bfloat16"
    assert engine.targets[0].quantization is None


def test_a_quantized_target_is_named_so(pair, tmp_path):
    from mlx_lm.convert import convert

    made = pair("random", hidden=128)
    convert(
        str(made.target), str(tmp_path / "q"), quantize=True, q_bits=8, q_group_size=32
    )
    engine = load_mlx([str(tmp_path / "q")], [], revisions=[None], draft_revisions=[])
    settings = engine.targets[0].quantization
    assert (settings["bits"], settings["group_size"]) == (8, 32)


def test_the_backend_says_where_it_computes(loaded):
    _, engine = loaded()
    found = engine.environment()
    assert found["backend"] == "mlx"
    assert found["device"] == mx.default_device().type.name
    assert found["device_name"]


@pytest.mark.parametrize("thinking", [None, True, False])
def test_prompts_are_rendered_by_the_template(loaded, thinking):
    _, engine = loaded("random", thinking=True)
    ids = engine.encode(0, MESSAGES, tools=None, thinking=thinking)
    end = {None: "", True: "<think>\n", False: "<think>\n\n</think>\n\n"}[thinking]
    text = f"<|im_start|>user\nthe tea<|im_end|>\n<|im_start|>assistant\n{end}"
    assert engine.decode(0, ids) == text


def test_tools_reach_the_template(pair, tmp_path):
    made = pair("random")
    folder = tmp_path / "target"
    shutil.copytree(made.target, folder)
    template = "{% if tools %}{{ tools[0].name }}{% endif %}{{ messages[0].content }}"
    write_template(folder, template)
    engine = load_mlx([str(folder)], [], revisions=[None], draft_revisions=[])
    for tools, text in (([{"name": "find"}], "findthe tea"), (None, "the tea")):
        ids = engine.encode(0, MESSAGES, tools=tools, thinking=None)
        assert engine.decode(0, ids) == text


def test_without_a_template_the_bare_text_counts(loaded):
    _, engine = loaded("random")
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "assistant", "content": None},
        *MESSAGES,
    ]
    ids = engine.encode(0, messages, tools=None, thinking=None, template=False)
    assert engine.decode(0, ids) == "be short\n\nthe tea"


def test_a_drafter_must_fit_every_target(pair):
    made, other = pair("random"), pair("random", hidden=128)
    options = options_of(made) | {
        "models": [str(made.target), str(other.target)],
        "revisions": [None, None],
    }
    with pytest.raises(DFlash2Error) as caught:
        load_mlx(**options)
    assert "hidden_size is 96, but the target's is 128" in str(caught.value)
    assert str(other.target) in str(caught.value)


def test_arms_index_their_models(pair):
    right, wrong = pair(), pair(**WRONG)
    engine = load_mlx(
        [str(right.target), str(wrong.target)],
        [str(right.drafter), str(wrong.drafter)],
        revisions=[None] * 2,
        draft_revisions=[None] * 2,
    )
    assert [facts.name for facts in engine.targets] == [
        str(right.target),
        str(wrong.target),
    ]
    for target in (0, 1):
        for drafter, length in ((0, 8.0), (1, 1.0)):
            arm = Arm("one", target, drafter, 7)
            run = engine.run(arm, prompt_of(right), max_tokens=17)
            assert run.stats.acceptance_length == length
