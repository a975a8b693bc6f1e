"""Every flag of `generate` does something, or is refused and says why."""

import contextlib
import json
import shutil

import mlx.nn as nn
import pytest
from command_line import answer, assert_refused, generate, models, run
from fake_hub import FakeHub
from transformers import AutoTokenizer

import mlx_dflash2.cli as cli

TESTED: set[str] = set()


def concerns(*names):
    """Note which parameters of the command a test is about."""

    def note(test):
        TESTED.update(names)
        return test

    return note


def test_every_parameter_has_a_test():
    assert TESTED == {parameter.name for parameter in cli.generate.params}


@pytest.fixture(scope="module")
def oracle(pair):
    """Drafts are always right and no walk ends by itself."""
    return pair(eos="off")


@pytest.fixture(scope="module")
def random(pair):
    """A pair with a template in MiniCPM5's three ways, which writes the bos itself."""
    return pair("random", thinking=True, template_bos=True)


@pytest.fixture
def prompts(monkeypatch):
    """The token ids of every prompt that reached the loop, in order."""
    import mlx_dflash2.generation as generation

    seen, encode = [], generation.encode_prompt

    def note(*arguments):
        seen.append(encode(*arguments))
        return seen[-1]

    monkeypatch.setattr(generation, "encode_prompt", note)
    return seen


def rendered(pair, *messages, **variables):
    """Ids of role and content pairs by Hugging Face's own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    return tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        add_generation_prompt=messages[-1][0] != "assistant",
        continue_final_message=messages[-1][0] == "assistant",
        return_dict=False,
        **variables,
    )


@concerns("text", "prompt")
def test_a_prompt_is_an_argument_an_option_or_stdin(random, prompts):
    answer(random, "a\\n\\tb", "-m", 1)
    answer(random, "--prompt", "a\\n\\tb", "-m", 1)
    answer(random, "-p", "-", "-m", 1, stdin="a\n\tb")
    answer(random, "-", "-m", 1, stdin="a\n\tb")
    assert prompts == [rendered(random, ("user", "a\n\tb"))] * 4


def test_stdin_is_taken_as_it_is(random, prompts):
    answer(random, "-", "-m", 1, stdin="你好 \\n ".encode())
    assert prompts == [rendered(random, ("user", "你好 \\n "))]


@concerns("model", "draft_model")
def test_both_names_of_a_model_flag_are_the_same(oracle):
    ours = run(
        "generate", "a", "--json", "-m", 3,
        "--target", oracle.target, "--drafter", oracle.drafter,
    )  # fmt: skip
    found = json.loads(ours.stdout)
    assert found["model"] == str(oracle.target)
    assert found["draft_model"] == str(oracle.drafter)
    assert found["tokens"] == answer(oracle, "a", "-m", 3)["tokens"]


@concerns("revision", "draft_revision")
@pytest.mark.parametrize("flag", ["--revision", "--draft-revision"])
def test_a_folder_has_no_revision(oracle, flag):
    result = generate(oracle, "a", flag, "v1")
    assert_refused(result, "'v1'", "local folder has no revisions")


@concerns("offline")
def test_offline_opens_no_connection(monkeypatch, tmp_path):
    with contextlib.closing(FakeHub()) as hub:
        hub.used_by(monkeypatch, tmp_path)
        asked = ["generate", "a", "--plain", "--model", "a/b"]
        assert_refused(run(*asked, "--offline"), "a/b", "not in the local Hub cache")
        assert hub.requests == []
        assert_refused(run(*asked), "a/b", "nor a repository on the Hub")
        assert hub.requests != []


@concerns("system_prompt")
def test_a_system_prompt_comes_first(random, prompts):
    answer(random, "b", "--system-prompt", "a", "-m", 1)
    assert prompts == [rendered(random, ("system", "a"), ("user", "b"))]


@concerns("max_tokens")
@pytest.mark.parametrize("flag", ["--max-tokens", "-m"])
def test_max_tokens_is_the_number_of_tokens(oracle, flag):
    found = answer(oracle, "a", flag, 5)
    assert len(found["tokens"]) == 5
    assert found["finish_reason"] == "length"


def test_max_tokens_of_minus_one_is_no_limit(pair):
    found = answer(pair(), "a", "-m", -1)
    assert len(found["tokens"]) > 5
    assert found["finish_reason"] == "stop"


def sampled(pair, *flags):
    return answer(pair, "a", "-m", 12, "--temp", 1, "--seed", 3, *flags)["tokens"]


@concerns("temp")
def test_a_temperature_samples(random):
    assert sampled(random) != sampled(random, "--temp", 0)


@concerns("top_p", "top_k", "min_p")
@pytest.mark.parametrize(
    "flags", [("--top-p", 1e-6), ("--top-k", 1), ("--min-p", 1)], ids=lambda f: f[0]
)
def test_a_filter_that_leaves_one_token_is_greedy(random, flags):
    assert sampled(random, *flags) == sampled(random, "--temp", 0)


@concerns("xtc_probability", "xtc_threshold")
def test_xtc_removes_all_but_the_least_likely_above_its_threshold(random):
    plain = sampled(random)
    certain = "--xtc-probability", 1
    assert sampled(random, *certain, "--xtc-threshold", 0.5) == plain
    assert sampled(random, *certain, "--xtc-threshold", 0) != plain
    assert sampled(random, "--xtc-probability", 0, "--xtc-threshold", 0) == plain


@concerns("seed")
def test_a_seed_repeats_a_run_and_0_is_one(random):
    first = sampled(random, "--seed", 0)
    assert sampled(random, "--seed", 0) == first
    assert sampled(random, "--seed", 1) != first


FORCED = "--logit-bias", '{"40": 100}'


@concerns("logit_bias")
def test_a_logit_bias_forces_a_token(random):
    assert answer(random, "a", "-m", 6, *FORCED)["tokens"] == [40] * 6


@concerns("repetition_penalty", "presence_penalty", "frequency_penalty")
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_a_penalty_ends_a_forced_repetition(random, name):
    penalty = f"--{name}-penalty", 1000
    tokens = answer(random, "a", "-m", 6, *FORCED, *penalty)["tokens"]
    assert tokens.count(40) == 1


@concerns("repetition_context_size")
def test_the_repetition_penalty_looks_back_so_many_tokens(random):
    penalty = "--repetition-penalty", 1000, "--repetition-context-size", 2
    tokens = answer(random, "a", "-m", 9, *FORCED, *penalty)["tokens"]
    assert [i for i, token in enumerate(tokens) if token == 40] == [0, 3, 6]


@concerns("stop")
def test_the_first_of_several_stop_strings_ends_the_text(oracle):
    whole = answer(oracle, "a", "-m", 40)["text"]
    early, late = whole[9:12], whole[20:23]
    found = answer(oracle, "a", "-m", 40, "--stop", late, "--stop", early)
    assert found["text"] == whole[: whole.index(early)]
    assert found["finish_reason"] == "stop"


@concerns("extra_eos_token")
def test_an_extra_eos_token_ends_as_number_or_text(random):
    forced = "--logit-bias", '{"7": 100}'  # </think>
    assert answer(random, "a", "-m", 4, *forced)["tokens"] == [7] * 4
    for name in ("7", "</think>"):
        found = answer(random, "a", "-m", 4, *forced, "--extra-eos-token", name)
        assert (found["tokens"], found["text"]) == ([7], "")
        assert found["finish_reason"] == "stop"


def test_extra_eos_tokens_add_up_and_a_number_is_an_id(random):
    extra = "--extra-eos-token", "7", "--extra-eos-token", "<think>"
    for token in (6, 7):
        forced = "--logit-bias", json.dumps({token: 100})
        assert answer(random, "a", "-m", 4, *forced, *extra)["tokens"] == [token]
    digit = AutoTokenizer.from_pretrained(random.target).convert_tokens_to_ids("7")
    assert digit != 7
    forced = "--logit-bias", json.dumps({digit: 100})
    assert answer(random, "a", "-m", 4, *forced, *extra)["tokens"] == [digit] * 4


@concerns("enable_thinking", "chat_template_config")
@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ([], {}),
        (["--enable-thinking"], {"enable_thinking": True}),
        (["--no-thinking"], {"enable_thinking": False}),
        (
            ["--chat-template-config", '{"enable_thinking": true}'],
            {"enable_thinking": True},
        ),
        (
            ["--chat-template-config", '{"enable_thinking": false}', "--no-thinking"],
            {"enable_thinking": False},
        ),
    ],
    ids=["unset", "on", "off", "config", "both"],
)
def test_thinking_is_what_the_template_makes_of_it(random, prompts, flags, variables):
    found = answer(random, "a", "-m", 1, *flags)
    assert prompts == [rendered(random, ("user", "a"), **variables)]
    assert found["prompt_tokens"] == len(prompts[0])
    assert prompts[0].count(0) == 1  # the template's own bos, not doubled
    value = variables.get("enable_thinking")
    said = "unset, the template decides" if value is None else str(value).lower()
    assert found["thinking"] == said
    footer = generate(random, "a", "-m", 1, *flags).stderr
    assert f"thinking: {said}\n" in footer


@concerns("ignore_chat_template")
def test_without_the_template_a_prompt_is_plain_text(random, prompts):
    found = answer(random, "a b", "-m", 1, "--ignore-chat-template")
    assert prompts == [AutoTokenizer.from_pretrained(random.target).encode("a b")]
    assert found["thinking"] == "no chat template"


@concerns("prefill_response")
def test_a_prefilled_response_is_continued(random, prompts):
    answer(random, "a", "-m", 1, "--prefill-response", "b c")
    expected = rendered(random, ("user", "a"), ("assistant", "b c"))
    assert prompts == [expected]
    tokenizer = AutoTokenizer.from_pretrained(random.target)
    assert tokenizer.decode(expected).endswith("<|im_start|>assistant\nb c")


@concerns("block_size", "num_draft_tokens")
def test_a_block_is_one_more_than_its_drafted_tokens(oracle):
    by_block = answer(oracle, "a", "-m", 17, "--block-size", 4)
    by_count = answer(oracle, "a", "-m", 17, "--num-draft-tokens", 3)
    assert by_block["stats"]["accepted_per_cycle"] == [3] * 4
    assert by_block["stats"] == by_count["stats"]
    assert by_block["tokens"] == by_count["tokens"]
    both = answer(oracle, "a", "-m", 17, "--block-size", 4, "--num-draft-tokens", 3)
    assert both["stats"] == by_block["stats"]


@pytest.mark.parametrize("flags", [("--block-size", 1), ("--num-draft-tokens", 0)])
def test_no_drafted_tokens_is_plain_decoding(oracle, flags):
    found = answer(oracle, "a", "-m", 6, *flags)
    assert found["engine"] == "plain"
    assert found["engine_reason"] == "no drafted tokens were asked for"
    assert found["draft_model"] is None


@concerns("draft_bits")
@pytest.mark.parametrize("bits", [4, 8])
def test_draft_bits_quantize_the_drafter(pair, monkeypatch, bits):
    import mlx_dflash2.loading as loading

    loaded, load = [], loading.load_drafter

    def note(*arguments, **options):
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(loading, "load_drafter", note)
    made = pair("random", hidden=128)
    flags = "a", "-m", 9, "--json"
    found = run("generate", *models(made), *flags, "--draft-bits", bits)
    kinds = {
        module.bits
        for module in loaded[0].modules()
        if isinstance(module, nn.QuantizedLinear)
    }
    assert kinds == {bits}
    assert json.loads(found.stdout)["tokens"] == answer(made, *flags)["tokens"]


def test_draft_bits_that_do_not_fit_say_what_to_do(oracle):
    result = generate(oracle, "a", "--draft-bits", 4)
    assert_refused(result, "96 columns", "groups of 64", "--q-group-size 32")


@concerns("prefill_step_size")
def test_a_prompt_is_read_in_steps(oracle, monkeypatch):
    from mlx_dflash2.target import Target

    rows, forward = [], Target.forward

    def note(self, tokens, *others):
        rows.append(tokens.shape[1])
        return forward(self, tokens, *others)

    monkeypatch.setattr(Target, "forward", note)
    result = generate(oracle, "abc", "-m", 1, "--prefill-step-size", 5)
    assert set(rows[:-2]) == {5} and rows[-1] == 1
    assert sum(rows) == answer(oracle, "abc", "-m", 1)["prompt_tokens"]
    assert result.stderr.startswith("Prompt\n")  # the bar, where there is no terminal


@concerns("kv_bits", "kv_group_size", "quantized_kv_start")
def test_the_cache_is_quantized_as_asked(oracle, monkeypatch):
    import mlx_dflash2.decode as decode

    asked, quantize = [], decode.maybe_quantize_kv_cache

    def note(cache, *how):
        quantize(cache, *how)
        asked.append((how, hasattr(cache[0], "bits")))

    monkeypatch.setattr(decode, "maybe_quantize_kv_cache", note)
    flags = "--kv-bits", 8, "--kv-group-size", 32, "--quantized-kv-start", 25
    answer(oracle, "a", "-m", 20, *flags)
    assert {how for how, _ in asked} == {(25, 32, 8)}
    assert [done for _, done in asked] == sorted(done for _, done in asked)
    assert {done for _, done in asked} == {False, True}


@concerns("max_kv_size")
def test_a_rotating_cache_is_refused_with_the_reason(oracle):
    result = generate(oracle, "a", "--max-kv-size", 128)
    assert_refused(result, "--max-kv-size", "cannot be rolled back")


@concerns("plain")
def test_plain_decodes_the_same_without_a_drafter(oracle):
    found = answer(oracle, "a", "-m", 9, "--plain")
    assert (found["engine"], found["engine_reason"]) == ("plain", "--plain")
    assert found["tokens"] == answer(oracle, "a", "-m", 9)["tokens"]
    alone = run("generate", "a", "-m", 9, "--plain", "--model", oracle.target)
    assert alone.exit_code == 0, alone.stderr


@concerns("allow_fallback")
def test_a_drafter_that_cannot_be_used_is_done_without_only_if_allowed(
    oracle, tmp_path
):
    broken = tmp_path / "drafter"
    shutil.copytree(oracle.drafter, broken)
    path = broken / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 64}))
    asked = "generate", "a", "-m", 9, "--model", oracle.target, "--draft-model", broken
    refused = run(*asked)
    assert_refused(refused, str(broken), "has shape")
    result = run(*asked, "--allow-fallback", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    reason = refused.stderr.removeprefix("Error: ").removesuffix("\n")
    assert (found["engine"], found["engine_reason"]) == ("plain", reason)
    assert (found["draft_model"], found["num_draft_tokens"]) == (None, 0)
    assert found["tokens"] == answer(oracle, "a", "-m", 9)["tokens"]
    said, *footer = result.stderr.splitlines()
    assert said == f"Decoding plainly, the drafter cannot be used: {reason}"
    assert f"Engine: plain ({reason})" in footer


def test_a_fallback_is_also_for_a_target_without_a_known_drafter(oracle):
    asked = "generate", "a", "-m", 3, "--model", oracle.target, "--json"
    found = json.loads(run(*asked, "--allow-fallback").stdout)
    assert found["engine"] == "plain"
    assert "no published drafter is known" in found["engine_reason"]


def test_a_fallback_that_is_not_needed_changes_nothing(oracle):
    asked = "a", "-m", 9
    found = answer(oracle, *asked, "--allow-fallback")
    assert (found["engine"], found["engine_reason"]) == ("speculative", None)
    assert found["stats"] == answer(oracle, *asked)["stats"]


def test_a_fallback_does_not_excuse_the_target(oracle, tmp_path):
    asked = "generate", "a", "--model", tmp_path, "--draft-model", oracle.drafter
    assert_refused(run(*asked, "--allow-fallback"), str(tmp_path), "config.json")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--plain"], "--allow-fallback has no effect: --plain"),
        (["--num-draft-tokens", 0], "--allow-fallback has no effect: no drafted"),
        (["--verify"], "--verify needs the drafter"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_fallback_without_effect_is_refused(oracle, flags, part):
    assert_refused(generate(oracle, "a", "--allow-fallback", *flags), part)


@concerns("verify")
def test_verify_says_identical(oracle):
    result = generate(oracle, "a", "-m", 20, "--verify")
    assert result.exit_code == 0
    assert "Verify: identical to plain decoding\n" in result.stderr


@concerns("as_json")
def test_json_is_all_there_is_on_stdout(oracle):
    result = generate(oracle, "a", "-m", 9, "--json")
    assert result.stdout.count("\n") == 1
    assert isinstance(json.loads(result.stdout), dict)


@concerns("verbose")
def test_verbose_is_a_switch_that_says_what_was_loaded(oracle):
    quiet = generate(oracle, "a", "-m", 17)
    loud = generate(oracle, "--verbose", "a", "-m", 17)
    assert loud.stdout == quiet.stdout
    assert "Target: " in loud.stderr and "Drafter: " in loud.stderr
    assert "mask token 3" in loud.stderr
    assert "accepted per cycle [7, 7]" in loud.stderr
    assert "Target: " not in quiet.stderr and "per cycle" not in quiet.stderr


def test_the_default_pair_is_minicpm5_and_its_strongest_drafter(monkeypatch):
    import mlx_dflash2.loading as loading

    asked = []
    monkeypatch.setattr(
        loading,
        "load_target",
        lambda name, **options: (asked.append((name, options)), (None, None))[1],
    )

    def stop(name, target, **options):
        asked.append((name, options))
        raise cli.DFlash2Error("far enough")

    monkeypatch.setattr(loading, "load_drafter", stop)
    result = run("generate", "a", "--revision", "r", "--draft-revision", "d")
    assert result.exit_code == 2
    assert result.stderr == (
        "Drafter: openbmb/MiniCPM5-2B-DSpark (dspark) for openbmb/MiniCPM5-2B\n"
        "Error: far enough\n"
    )
    assert asked == [
        ("openbmb/MiniCPM5-2B", {"revision": "r", "offline": False}),
        (
            "openbmb/MiniCPM5-2B-DSpark",
            {"revision": "d", "offline": False, "bits": None, "kind": "dspark"},
        ),
    ]


def test_another_target_needs_its_drafter_named(oracle):
    result = run("generate", "a", "--model", oracle.target)
    assert_refused(result, "no published drafter is known", "--draft-model", "--plain")
    base = run("generate", "a", "--model", "openbmb/MiniCPM5-2B-Base")
    assert_refused(base, "MiniCPM5-2B-Base", "no published drafter is known")


@concerns("draft_kind")
@pytest.mark.parametrize("family", ["dflash2", "dflash", "dspark"])
def test_a_draft_kind_is_what_must_be_found(pair, family):
    made = pair("random", family=family)
    flags = "a", "-m", 4, "--json"
    found = run("generate", *models(made), *flags, "--draft-kind", family)
    assert json.loads(found.stdout)["draft_kind"] == family
    other = {"dflash2": "dflash", "dflash": "dspark", "dspark": "dflash2"}[family]
    result = run("generate", *models(made), *flags, "--draft-kind", other)
    assert_refused(result, f"({family})", f"but {other} was expected")


@concerns("draft_sampling")
def test_draft_sampling_changes_the_draws_and_not_greedy_text(pair):
    made = pair("random", family="dspark", vocab=64)
    draw, best = ("--draft-sampling", "sample"), ("--draft-sampling", "argmax")
    hot = "a", "-m", 40, "--temp", 1, "--seed", 3
    drawn, certain = answer(made, *hot, *draw), answer(made, *hot, *best)
    assert answer(made, *hot)["tokens"] == drawn["tokens"]  # the family's own way
    assert drawn["stats"] != certain["stats"]
    greedy = [answer(made, "a", "-m", 12, *how)["tokens"] for how in (draw, best, ())]
    assert greedy[0] == greedy[1] == greedy[2]


@concerns("confidence_threshold")
def test_a_confidence_threshold_cuts_and_changes_no_text(pair):
    made = pair(family="dspark", partial=0.3, eos="off")
    whole, cut = (
        answer(made, "a", "-m", 60, "--confidence-threshold", threshold)
        for threshold in (0, 0.5)
    )
    assert cut["tokens"] == whole["tokens"]
    assert cut["stats"]["accepted_per_cycle"] == whole["stats"]["accepted_per_cycle"]
    assert cut["stats"]["drafted"] == cut["stats"]["accepted"]
    assert whole["stats"]["drafted"] > whole["stats"]["accepted"]


@pytest.mark.parametrize("options", [{}, {"family": "dflash"}, {"family": "dspark"}])
def test_a_confidence_threshold_needs_a_confidence_head(pair, options):
    made = pair("random", confidence=False, **options)
    result = generate(made, "a", "--confidence-threshold", 0.5)
    assert_refused(result, "confidence_threshold is 0.5", "no confidence head")


@pytest.mark.parametrize("flag", ["--confidence-threshold", "--draft-sampling"])
def test_drafting_flags_take_what_they_say(oracle, flag):
    assert_refused(generate(oracle, "a", flag, "2"), flag)
    assert answer(oracle, "a", "-m", 3, "--confidence-threshold", 0)["tokens"]
