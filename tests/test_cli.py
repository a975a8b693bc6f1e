"""What `generate` prints, and how it ends."""

import io
import json
import shutil

import mlx.core as mx
import pytest
from command_line import answer, assert_refused, generate, models, run
from pair_files import EOS, EOS2

from mlx_dflash2.cli_options import TARGET
from mlx_dflash2.comparison import Comparison

KEYS = {
    "text": str,
    "tokens": list,
    "finish_reason": str,
    "prompt_tokens": int,
    "engine": str,
    "engine_reason": None,
    "stats": dict,
    "timing": dict,
    "peak_memory_bytes": int,
    "model": str,
    "draft_model": str,
    "draft_kind": str,
    "block_size": int,
    "num_draft_tokens": int,
    "revision": None,
    "draft_revision": None,
    "thinking": str,
    "versions": dict,
}
STATS = {
    "cycles": int,
    "drafted": int,
    "accepted": int,
    "plain_steps": int,
    "acceptance_length": float,
    "acceptance_rate": float,
    "accepted_per_cycle": list,
    "emitted_per_cycle": list,
}
TIMING = {
    "load_s": float,
    "prefill_s": float,
    "decode_s": float,
    "tokens_per_second": float,
}


@pytest.fixture(scope="module")
def oracle(pair):
    """Drafts are always right and no walk ends by itself."""
    return pair(eos="off")


def assert_shape(found, expected):
    assert found.keys() == expected.keys()
    for name, kind in expected.items():
        if kind is None:
            assert found[name] is None, name
        else:
            assert type(found[name]) is kind, name


def assert_accounts(found):
    """The identities that hold for every generation."""
    stats, count = found["stats"], len(found["tokens"])
    emitted, accepted = stats["emitted_per_cycle"], stats["accepted_per_cycle"]
    assert 1 + sum(emitted) + stats["plain_steps"] == count
    assert stats["cycles"] == len(emitted) == len(accepted)
    assert stats["accepted"] == sum(accepted) <= stats["drafted"]
    assert all(0 <= a <= e for a, e in zip(accepted, emitted, strict=True))
    if stats["cycles"]:
        assert stats["acceptance_length"] == sum(emitted) / stats["cycles"]
    else:
        assert stats["acceptance_length"] is None
    if stats["drafted"]:
        assert stats["acceptance_rate"] == stats["accepted"] / stats["drafted"]
    else:
        assert stats["acceptance_rate"] is None


def test_the_json_object_has_the_promised_keys(oracle):
    found = answer(oracle, "a", "-m", 20)
    assert_shape(found, KEYS)
    assert_shape(found["stats"], STATS)
    assert_shape(found["timing"], TIMING)
    assert set(found["versions"]) == {"mlx-dflash2", "mlx", "mlx-lm", "transformers"}
    assert found["engine"] == "speculative"
    assert found["draft_kind"] == "dflash2"
    assert (found["block_size"], found["num_draft_tokens"]) == (8, 7)
    assert found["stats"]["accepted_per_cycle"] == [7, 7, 2]
    assert found["stats"]["emitted_per_cycle"] == [8, 8, 3]
    assert found["stats"]["drafted"] == 16
    assert all(type(token) is int for token in found["tokens"])
    timing = found["timing"]
    assert timing["tokens_per_second"] == pytest.approx(19 / timing["decode_s"])
    assert found["peak_memory_bytes"] > 0


def test_plain_decoding_counts_steps_and_no_cycles(oracle):
    found = answer(oracle, "a", "-m", 20, "--plain")
    assert_shape(
        found["stats"] | {"acceptance_length": 0.0, "acceptance_rate": 0.0}, STATS
    )
    assert found["stats"]["plain_steps"] == 19
    assert found["stats"]["cycles"] == found["stats"]["drafted"] == 0
    assert found["draft_model"] is None
    assert_accounts(found)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 10, 17])
@pytest.mark.parametrize("kind", ["oracle", "random"])
@pytest.mark.parametrize("flags", [[], ["--plain"], ["--num-draft-tokens", 2]])
def test_the_counts_add_up(pair, kind, count, flags):
    found = answer(pair(kind, eos="off"), "a", "-m", count, *flags)
    assert len(found["tokens"]) == count
    assert_accounts(found)


@pytest.mark.parametrize("flags", [[], ["--plain"]])
def test_tokens_end_with_the_eos_and_text_does_not_hold_it(pair, flags):
    found = answer(pair(), "a", "-m", 2000, *flags)
    assert found["tokens"][-1] in (EOS, EOS2)
    assert found["finish_reason"] == "stop"
    assert "</s>" not in found["text"] and "<|im_end|>" not in found["text"]
    assert_accounts(found)


@pytest.mark.parametrize("end", [EOS, EOS2])
def test_each_of_two_eos_ids_stops_at_once(pair, end):
    forced = json.dumps({end: 100})
    found = answer(pair("random"), "a", "-m", 9, "--logit-bias", forced)
    assert (found["tokens"], found["text"]) == ([end], "")
    assert found["finish_reason"] == "stop"


def test_text_on_stdout_is_that_of_the_json_object(oracle):
    shown = generate(oracle, "a", "-m", 30)
    assert shown.stdout == answer(oracle, "a", "-m", 30)["text"] + "\n"


@pytest.mark.parametrize("flags", [[], ["--plain"], ["--num-draft-tokens", 2]])
def test_a_stop_string_is_cut_and_its_tokens_are_kept(oracle, flags):
    whole = answer(oracle, "a", "-m", 60, *flags)
    stop = whole["text"][25:30]
    found = answer(oracle, "a", "-m", 60, "--stop", stop, *flags)
    assert found["text"] == whole["text"][: whole["text"].index(stop)]
    assert found["finish_reason"] == "stop"
    count = len(found["tokens"])
    assert found["tokens"] == whole["tokens"][:count]
    # With one token fewer the stop string is not complete: none was dropped or added.
    before = answer(oracle, "a", "-m", count - 1, *flags)["text"]
    after = answer(oracle, "a", "-m", count, *flags)["text"]
    assert stop not in before and stop in after
    assert_accounts(found)
    shown = generate(oracle, "a", "-m", 60, "--stop", stop, *flags)
    assert shown.stdout == found["text"] + "\n"


def test_a_partial_match_at_the_limit_is_text(oracle):
    whole = answer(oracle, "a", "-m", 9)["text"]
    found = answer(oracle, "a", "-m", 9, "--stop", whole[-3:] + "never")
    assert found["text"] == whole
    assert found["finish_reason"] == "length"


def test_the_footer_reports_speed_acceptance_memory_and_engine(oracle):
    lines = generate(oracle, "a", "-m", 20).stderr.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("Prompt: 15 tokens, ")
    assert lines[1].startswith("Generation: 20 tokens, ")
    assert lines[2].startswith("Peak memory: ") and lines[2].endswith(" GB")
    assert lines[3] == (
        "Engine: speculative, block size 8 (7 drafted), acceptance length 6.333 over "
        "3 cycles"
    )
    plain = generate(oracle, "a", "-m", 20, "--plain").stderr
    assert "Engine: plain (--plain)\n" in plain


def test_low_acceptance_is_said(pair):
    flags = "a", "-m", 40, "--logit-bias", '{"1": -100, "2": -100}'
    assert "accepts little here" in generate(pair("random"), *flags).stderr
    assert "accepts little" not in generate(pair(eos="off"), *flags).stderr


def test_a_loop_in_the_text_is_said(oracle):
    forced = generate(oracle, "a", "-m", 70, "--logit-bias", '{"40": 1000}')
    assert "repeats itself every 1 tokens" in forced.stderr
    assert "--repetition-penalty" in forced.stderr
    assert "repeats" not in generate(oracle, "a", "-m", 70).stderr


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["one prompt"]),
        (["a", "-p", "b"], ["one prompt"]),
        (["", "--ignore-chat-template"], ["prompt is empty"]),
        (["a\udcff"], ["not Unicode text", "'\\udcff'"]),
        (["a", "--system-prompt", "\udcff"], ["not Unicode text"]),
        (["a", "--prefill-response", "\udcff"], ["not Unicode text"]),
        (["a", "--ignore-chat-template", "-p", "b"], ["one prompt"]),
        (["\udcff", "--ignore-chat-template"], ["not Unicode text"]),
        (["a", "--stop", "\udcff"], ["stop string", "not Unicode text"]),
        (["a", "--stop", ""], ["--stop is empty"]),
        (["a", "--extra-eos-token", "nope"], ["'nope'"]),
        (["a", "--extra-eos-token", "512"], ["'512'"]),
        (["a", "--extra-eos-token", ""], ["''"]),
        (["a", "--logit-bias", "{"], ["--logit-bias", "not valid JSON"]),
        (["a", "--logit-bias", "[1]"], ["expected a JSON object"]),
        (["a", "--logit-bias", '{"x": 1}'], ["expected token ids"]),
        (["a", "--logit-bias", '{"1": "x"}'], ["expected token ids"]),
        (["a", "--logit-bias", '{"512": 1}'], ["512", "0 to 511"]),
        (["a", "--logit-bias", '{"1": NaN}'], ["nan"]),
        (["a", "--chat-template-config", "no"], ["not valid JSON"]),
        (["a", "--chat-template-config", "7"], ["expected a JSON object"]),
        (["a", "-m", "0"], ["max_tokens is 0", "at least 1, or -1"]),
        (["a", "-m", "-2"], ["-2", "at least 1, or -1"]),
        (["a", "-m", "x"], ["'x' is not a valid integer"]),
        (["a", "--temp", "-1"], ["-1", "x>=0"]),
        (["a", "--temp", "nan"], ["temperature", "nan"]),
        (["a", "--temp", "inf"], ["inf"]),
        (["a", "--temp", "1e-9"], ["1e-09", "0.001"]),
        (["a", "--top-p", "0"], ["0<x<=1"]),
        (["a", "--top-p", "1.1"], ["0<x<=1"]),
        (["a", "--top-p", "nan"], ["nan", "between 0 and 1"]),
        (["a", "--min-p", "2"], ["0<=x<=1"]),
        (["a", "--top-k", "-1"], ["x>=0"]),
        (["a", "--top-k", "512"], ["512", "0 to 511"]),
        (["a", "--xtc-probability", "2"], ["0<=x<=1"]),
        (["a", "--xtc-threshold", "0.7"], ["0<=x<=0.5"]),
        (["a", "--repetition-penalty", "0"], ["x>0"]),
        (["a", "--repetition-penalty", "-1"], ["x>0"]),
        (["a", "--repetition-penalty", "inf"], ["inf"]),
        (["a", "--repetition-context-size", "0"], ["x>=1"]),
        (["a", "--presence-penalty", "nan"], ["presence_penalty", "nan"]),
        (["a", "--frequency-penalty", "inf"], ["frequency_penalty", "inf"]),
        (["a", "--seed", "-1"], ["0<=x<=18446744073709551615"]),
        (["a", "--seed", str(2**64)], ["0<=x<=18446744073709551615"]),
        (["a", "--prefill-step-size", "0"], ["x>=1"]),
        (["a", "--kv-bits", "7"], ["kv_bits is 7", "(2, 3, 4, 5, 6, 8)"]),
        (
            ["a", "--kv-bits", "8", "--kv-group-size", "48"],
            ["dimension 32: [32]"],
        ),
        (["a", "--quantized-kv-start", "-1"], ["x>=0"]),
        (["a", "--draft-bits", "5"], ["'5'", "'4', '8'"]),
        (["a", "--block-size", "0"], ["--block-size is 0"]),
        (["a", "--block-size", "9"], ["block size 9", "trained for 7", "0 to 7"]),
        (["a", "--num-draft-tokens", "8"], ["trained for 7 (block size 8)"]),
        (["a", "--num-draft-tokens", "-1"], ["x>=0"]),
        (
            ["a", "--block-size", "4", "--num-draft-tokens", "4"],
            ["--block-size 4 means --num-draft-tokens 3", "is 4"],
        ),
        (
            ["a", "--enable-thinking", "--chat-template-config"]
            + ['{"enable_thinking": false}'],
            ["enable_thinking to false", "true"],
        ),
        (["a", "--ignore-chat-template", "--system-prompt", "b"], ["--system-prompt"]),
        (
            ["a", "--ignore-chat-template", "--prefill-response", "b"],
            ["--prefill-response"],
        ),
        (["a", "--ignore-chat-template", "--no-thinking"], ["thinking"]),
        (
            ["a", "--ignore-chat-template", "--chat-template-config", "{}"],
            ["--chat-template-config"],
        ),
        (["a", "--verify", "--plain"], ["--verify", "--plain"]),
        (["a", "--verify", "--block-size", "1"], ["--verify", "nothing to compare"]),
        (["a", "--verify", "--temp", "1"], ["--verify", "--temp 0"]),
        (["a", "--bogus"], ["--bogus"]),
        (["a", "b"], ["unexpected extra argument"]),
        (["a", "--temp"], ["--temp", "requires an argument"]),
    ],
    ids=lambda value: " ".join(map(ascii, value)) if value else "",
)
def test_bad_input_is_one_line(oracle, arguments, parts):
    assert_refused(generate(oracle, *arguments), *parts)


def test_bad_bytes_on_stdin_are_one_line(oracle):
    assert_refused(generate(oracle, "-", stdin=b"a\xff"), "stdin is not UTF-8")


def test_an_empty_stdin_is_an_empty_prompt(oracle):
    assert generate(oracle, "-", "-m", 1, stdin=b"").exit_code == 0
    result = generate(oracle, "-", "--ignore-chat-template", stdin=b"")
    assert_refused(result, "prompt is empty")


@pytest.mark.parametrize("prompt", ["", " ", "\\n"])
def test_an_empty_message_is_a_message(oracle, prompt):
    assert len(answer(oracle, prompt, "-m", 2)["tokens"]) == 2


def test_spaces_alone_are_a_prompt(oracle):
    found = answer(oracle, "  ", "-m", 2, "--ignore-chat-template")
    assert found["prompt_tokens"] == 2


@pytest.mark.parametrize("name", ["--model", "--draft-model"])
@pytest.mark.parametrize(
    ("break_it", "parts"),
    [
        (lambda folder: shutil.rmtree(folder), ["no such folder"]),
        (
            lambda folder: (shutil.rmtree(folder), folder.write_text("")),
            ["found a file"],
        ),
        (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
        (lambda folder: (folder / "config.json").write_text("[]"), ["config.json"]),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "model.bin"),
            ["no safetensors file", "model.bin is a pickle"],
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"1234"),
            ["model.safetensors", "not a complete safetensors file"],
        ),
    ],
    ids=["gone", "file", "config gone", "config cut", "config a list", "bin", "cut"],
)
def test_a_broken_folder_is_one_line(oracle, tmp_path, name, break_it, parts):
    which = "target" if name == "--model" else "drafter"
    copy = tmp_path / which
    shutil.copytree(getattr(oracle, which), copy)
    break_it(copy)
    result = run("generate", "a", *models(oracle), name, copy)
    assert_refused(result, str(copy), *parts)


@pytest.mark.parametrize("content", ["{", "[]", "7", '{"model": {"type": "?"}}'])
def test_a_broken_tokenizer_is_one_line(oracle, tmp_path, content):
    copy = tmp_path / "target"
    shutil.copytree(oracle.target, copy)
    (copy / "tokenizer.json").write_text(content)
    result = run("generate", "a", *models(oracle), "--model", copy)
    assert_refused(result, str(copy), "tokenizer")


def test_a_target_without_tokenizer_is_one_line(oracle, tmp_path):
    copy = tmp_path / "target"
    shutil.copytree(oracle.target, copy)
    for file in copy.glob("*token*"):
        file.unlink()
    result = run("generate", "a", *models(oracle), "--model", copy)
    assert_refused(result, str(copy), "tokenizer")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden": 128}, "hidden_size"),
        ({"layers": 5, "taps": (0, 1, 2)}, "num_target_layers"),
        ({"vocab": 520}, "vocab_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_wrong_pair_is_refused_with_both_numbers(pair, change, name):
    one, other = pair("random"), pair("random", **change)
    numbers = {
        "hidden_size": (128, 96),
        "num_target_layers": (5, 4),
        "vocab_size": (520, 512),
    }[name]
    result = run("generate", "a", *models(one), "--drafter", other.drafter)
    here, there = numbers
    assert_refused(result, f"{name} is {here}, but the target's is {there}")


def test_a_target_as_drafter_is_refused(oracle):
    result = run("generate", "a", *models(oracle), "--drafter", oracle.target)
    assert_refused(result, str(oracle.target))


def test_a_drafter_as_target_is_refused(oracle):
    result = run("generate", "a", *models(oracle), "--target", oracle.drafter)
    assert_refused(result, "model_type is 'qwen3'", "llama")


def test_a_tokenizer_without_template_says_how_to_go_on(oracle, tmp_path):
    copy = tmp_path / "target"
    shutil.copytree(oracle.target, copy)
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    given = ["generate", "a", "-m", 2, "--json", *models(oracle), "--model", copy]
    assert_refused(run(*given), "no chat template", "--ignore-chat-template")
    assert run(*given, "--ignore-chat-template").exit_code == 0


def test_a_template_that_raises_is_one_line(oracle, tmp_path):
    copy = tmp_path / "target"
    shutil.copytree(oracle.target, copy)
    path = copy / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = "{{ raise_exception('two\nlines') }}"
    path.write_text(json.dumps(settings))
    result = run("generate", "a", *models(oracle), "--model", copy)
    assert_refused(result, "chat template failed: two lines")


def test_code_named_by_a_folder_is_never_run(oracle, tmp_path, caplog):
    ran = tmp_path / "ran"
    copies = []
    for which in ("target", "drafter"):
        copy = tmp_path / which
        shutil.copytree(getattr(oracle, which), copy)
        (copy / "evil.py").write_text(
            f"open({str(ran)!r}, 'w')\nModel = Args = Tok = 1"
        )
        for file in ("config.json", "tokenizer_config.json"):
            path = copy / file
            settings = json.loads(path.read_text()) if path.exists() else {}
            settings["model_file"] = "evil.py"
            settings["auto_map"] = {
                "AutoConfig": "evil.Args",
                "AutoModel": "evil.Model",
                "AutoTokenizer": ["evil.Tok", "evil.Tok"],
            }
            if file == "tokenizer_config.json":
                settings["tokenizer_class"] = "Tok"
            path.write_text(json.dumps(settings))
        copies.append(copy)
    flags = "--model", copies[0], "--draft-model", copies[1]
    result = run("generate", "a", "-m", 9, *flags)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == generate(oracle, "a", "-m", 9).stdout
    assert not ran.exists()
    assert [m.endswith("no code of a model is run") for m in caplog.messages] == [
        True
    ] * 6


def accept_everything(monkeypatch):
    """Break the greedy rule: every drafted token is taken for right."""
    import mlx_dflash2.decode as decode
    from mlx_dflash2.accept import Verdict

    monkeypatch.setattr(
        decode,
        "accept_greedy",
        lambda drafted, chosen: Verdict(mx.array(drafted.size), chosen[-1]),
    )


ENDLESS = "--logit-bias", '{"1": -100, "2": -100}'


def test_verify_finds_a_true_difference(pair, monkeypatch):
    made = pair("random")
    right = answer(made, "a", "-m", 20, *ENDLESS)["tokens"]
    accept_everything(monkeypatch)
    wrong = answer(made, "a", "-m", 20, *ENDLESS)["tokens"]
    split = next(i for i in range(20) if right[i] != wrong[i])
    result = generate(made, "a", "-m", 20, "--verify", *ENDLESS)
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith(
        f"Verify: difference: first split at token {split}, plain decoding has "
        f"{right[split]}, speculative {wrong[split]}; logits "
    )
    assert line.endswith("units in the last place)")
    result = generate(made, "a", "-m", 20, "--verify", "--json", *ENDLESS)
    assert result.exit_code == 1
    found = json.loads(result.stdout)["verify"]
    assert found["kind"] == "difference" and found["identical"] is False
    assert found["position"] == split
    assert (found["plain"], found["speculative"]) == (right[split], wrong[split])
    assert found["gap"] > 0 and found["ulps"] > 2
    assert found["plain_logit"] - found["speculative_logit"] == found["gap"]


def test_verify_lets_a_near_tie_pass(pair, monkeypatch):
    import mlx_dflash2.comparison as comparison

    accept_everything(monkeypatch)
    monkeypatch.setattr(comparison, "TIE_GAP", float("inf"))
    flags = "a", "-m", 20, "--verify", *ENDLESS
    result = generate(pair("random"), *flags)
    assert result.exit_code == 0
    assert "Verify: near tie: first split at token " in result.stderr
    assert answer(pair("random"), *flags)["verify"]["kind"] == "near tie"


def test_verify_in_json_says_identical(oracle):
    found = answer(oracle, "a", "-m", 9, "--verify")
    assert found["verify"] == {
        "identical": True,
        "kind": "identical",
        "position": None,
        "plain": None,
        "speculative": None,
        "plain_logit": None,
        "speculative_logit": None,
        "gap": None,
        "ulps": None,
    }


@pytest.mark.parametrize(
    ("gap", "ulps", "kind"),
    [
        (0.0, 0.0, "near tie"),
        (9e-4, 5000.0, "near tie"),
        (-9e-4, -5000.0, "near tie"),
        (0.25, 2.0, "near tie"),
        (1e-3, 2.1, "difference"),
        (-0.5, -3.0, "difference"),
    ],
)
def test_a_near_tie_is_below_a_stated_gap(gap, ulps, kind):
    assert Comparison(3, 5, 6, 9.0, 9.0 - gap, gap, ulps).kind == kind


def test_one_decoding_that_ends_early_is_a_difference():
    short = Comparison(4, plain=7)
    assert short.kind == "difference"
    assert str(short) == "difference: one decoding ended at token 4"


def test_an_interrupt_keeps_the_text_and_the_next_run_works(oracle, monkeypatch):
    from mlx_dflash2.target import Target

    whole = generate(oracle, "a", "-m", 30)
    calls, forward = [], Target.forward

    def interrupt(self, tokens, *others):
        calls.append(tokens.shape[1])
        if calls.count(8) == 3:
            raise KeyboardInterrupt
        return forward(self, tokens, *others)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "forward", interrupt)
        cut = generate(oracle, "a", "-m", 30)
    assert cut.exit_code == 130
    assert whole.stdout.startswith(cut.stdout.rstrip("\n")) and len(cut.stdout) > 5
    assert "Generation: 17 tokens" in cut.stderr
    assert "acceptance length 8.000 over 2 cycles" in cut.stderr
    assert generate(oracle, "a", "-m", 30).stdout == whole.stdout


def test_an_interrupt_gives_out_a_held_back_partial_match(oracle, monkeypatch):
    from mlx_dflash2.target import Target

    text = answer(oracle, "a", "-m", 17)["text"]
    calls, forward = [], Target.forward

    def interrupt(self, tokens, *others):
        calls.append(tokens.shape[1])
        if calls.count(8) == 3:
            raise KeyboardInterrupt
        return forward(self, tokens, *others)

    monkeypatch.setattr(Target, "forward", interrupt)
    cut = generate(oracle, "a", "-m", 30, "--stop", text[-2:] + "never")
    assert (cut.exit_code, cut.stdout) == (130, text + "\n")


def test_help_names_the_defaults():
    text = run("generate", "--help").stdout
    words = " ".join(text.split())
    assert f"default: {TARGET}" in words and "[default: auto]" in words
    for flag in ("256", "2048", "5000", "1.0", "0.1", "20", "64"):
        assert f"[default: {flag}" in words
    assert run("generate", "-h").stdout == text
    assert run("-h").exit_code == run("convert", "-h").exit_code == 0


def test_a_long_prompt_is_fine(oracle):
    flags = "-m", 3, "--prefill-step-size", 200
    found = answer(oracle, "-", *flags, stdin="word " * 200)
    assert found["prompt_tokens"] > 600
    assert len(found["tokens"]) == 3


def test_the_progress_bar_gives_the_cursor_back(monkeypatch):
    from mlx_dflash2.commands.generate import _Progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    progress = _Progress(step=2)
    progress(0, 2)
    assert terminal.getvalue() == ""  # short prompts have none
    progress(0, 9)
    progress(2, 9)
    assert "22%" in terminal.getvalue() and "\x1b[?25l" in terminal.getvalue()
    progress.close()
    assert terminal.getvalue().endswith("\x1b[?25h\n")
    progress.close()
    assert terminal.getvalue().count("\x1b[?25h") == 1


def test_an_interrupt_of_the_prefill_ends_the_progress_bar(oracle, monkeypatch):
    from mlx_dflash2.commands.generate import _Progress
    from mlx_dflash2.target import Target

    ended, close = [], _Progress.close
    monkeypatch.setattr(
        _Progress, "close", lambda self: (ended.append(self), close(self))
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Target, "forward", interrupt)
    cut = generate(oracle, "abc", "--prefill-step-size", 5)
    assert (cut.exit_code, cut.stdout, len(ended)) == (130, "\n", 1)
    assert "Generation: 0 tokens" in cut.stderr
