"""The target's own text: what is kept of it, and that a stopped run ends the same."""

import json
from collections import Counter

import pytest
from click.testing import CliRunner
from text_targets import write_text_target

from mlx_dflash2.conversations import conversation_from
from mlx_dflash2.data import writing
from mlx_dflash2.data.chat import Chat
from mlx_dflash2.data.dialogue import Dialogue
from mlx_dflash2.data.regeneration import Regeneration
from mlx_dflash2.data.self_prompting import OPENERS, SelfPrompting, read_openers
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.data.writer import Sampling, Written
from mlx_dflash2.data.writing import WritingOptions, write
from mlx_dflash2.errors import DFlash2Error

LOOP = "round and round " * 40
WARM = Sampling(0.8, 0.95)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_text_target(tmp_path_factory.mktemp("text") / "tiny-target")


@pytest.fixture(scope="module")
def text(folder):
    return load_target_text(str(folder))


class Scripted:
    """Writes what `reply(prompt, sampling, seed)` says; "..." at its end cuts it off.

    Attributes:
        asked: Every prompt as text.
    """

    def __init__(self, target, reply):
        self.target, self.reply, self.asked = target, reply, []

    def write(self, prompts, *, max_tokens, sampling, seed):
        written = []
        for number, prompt in enumerate(prompts):
            self.asked.append(self.target.tokenizer.decode(prompt))
            said = self.reply(self.asked[-1], sampling, seed + number)
            encode = self.target.tokenizer.encode
            tokens = encode(said.removesuffix("..."), add_special_tokens=False)
            cut = said.endswith("...")
            written.append(Written(tokens, "length" if cut else "stop"))
        return written


def dialogue(text, reply, *, greedy=0.0, **limits):
    writer = Scripted(text, reply)
    return Dialogue(writer, Chat(text), seed=1, greedy=greedy, sampling=WARM, **limits)


def regenerated(text, reply, *conversations, **limits):
    """The lines, what was dropped, and every prompt of one round."""
    talk = dialogue(text, reply, **limits)
    given = [
        conversation_from({"messages": messages}, source="given.jsonl", line=n + 1)
        for n, messages in enumerate(conversations)
    ]
    lines, dropped = Regeneration(talk, given, len(given)).round(0, [])
    return lines, dropped, talk.writer.asked


def chat(*contents):
    """Messages of a user and an assistant in turn."""
    roles = ["user", "assistant"] * len(contents)
    return [
        {"role": role, "content": content}
        for role, content in zip(roles, contents, strict=False)
    ]


def by_question(replies):
    """A reply by the last question of the prompt."""

    def reply(prompt, *_):
        asked = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        return replies[asked]

    return reply


def test_every_answer_is_rewritten_given_the_rewritten_past(text):
    given = chat("One?", "old 1", "Two?", "old 2")
    reply = by_question({"One?": "new 1", "Two?": "new 2"})
    [line], dropped, asked = regenerated(text, reply, given)
    assert line["messages"] == chat("One?", "new 1", "Two?", "new 2")
    assert not dropped
    render = text.tokenizer.apply_chat_template
    assert asked == [
        render(past, tokenize=False, add_generation_prompt=True)
        for past in (chat("One?"), chat("One?", "new 1", "Two?"))
    ]


def test_a_question_without_an_answer_gets_one(text):
    reply = by_question({"One?": "1", "Two?": "2"})
    [line], _, _ = regenerated(text, reply, chat("One?", "old", "Two?"))
    assert line["messages"] == chat("One?", "1", "Two?", "2")


def test_a_line_says_who_wrote_it_and_how(text):
    lines, _, _ = regenerated(text, lambda *_: "yes", chat("One?"), chat("Two?"))
    assert lines[1]["provenance"] == {
        "from": "given.jsonl: line 2",
        "regenerated_by": "tiny-target",
        "revision": None,
        "temperature": 0.8,
        "top_p": 0.95,
        "finish_reason": "stop",
    }


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "answer empty"),
        (" \n", "answer empty"),
        (LOOP, "answer looping"),
        ("a <|im_start|> b", "answer marked-up"),
        ("a <pad> b", "answer marked-up"),
    ],
)
def test_a_bad_answer_ends_its_conversation_before_the_question(text, answer, reason):
    reply = by_question({"One?": "fine", "Two?": answer})
    lines, dropped, _ = regenerated(
        text, reply, chat("One?", "", "Two?", "", "Three?"), chat("Two?", "", "One?")
    )
    assert [line["messages"] for line in lines] == [chat("One?", "fine")]
    assert dropped == Counter({reason: 2})


def test_half_a_character_is_not_kept(text):
    talk = dialogue(text, None)
    half = text.tokenizer.encode("\u00e9", add_special_tokens=False)[:1]
    talk.writer.write = lambda prompts, **_: [Written(half, "length")] * len(prompts)
    draft = talk.draft(0)
    draft.messages.extend(chat("One?"))
    assert talk.answer([draft], "") == {"answer broken": 1}
    assert not draft.answered


def test_nothing_follows_an_answer_that_was_cut_off(text):
    reply = by_question({"One?": "and then..."})
    [line], dropped, _ = regenerated(text, reply, chat("One?", "", "Two?", ""))
    assert line["messages"] == chat("One?", "and then")
    assert line["provenance"]["finish_reason"] == "length"
    assert not dropped


def test_a_conversation_ends_before_its_first_call_of_a_tool(text):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        *chat("One?", "old", "Add!"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        *chat("So?", "old"),
    ]
    reply = by_question({"One?": "1"})
    lines, dropped, asked = regenerated(text, reply, turns, turns[2:])
    assert [line["messages"] for line in lines] == [chat("One?", "1")]
    assert dropped == {"no question": 1}
    assert len(asked) == 1


def test_prompts_too_long_or_refused_by_the_template_are_counted(tmp_path):
    strict = load_target_text(str(write_text_target(tmp_path / "strict", NO_SYSTEM)))
    system = [{"role": "system", "content": "Be brief."}]
    lines, dropped, asked = regenerated(
        strict,
        lambda *_: "yes",
        system + chat("One?"),
        chat("Long? " * 40),
        chat("Two?"),
        max_prompt_tokens=100,
    )
    assert [line["messages"] for line in lines] == [chat("Two?", "yes")]
    assert dropped == {"answer to an unreadable prompt": 2}
    assert len(asked) == 1


OWN = {"math": ["Solve:", "Add"], "general": ["Why is"]}


def invented(prompt, sampling, seed):
    """A question or an answer that differs by seed."""
    if prompt.endswith("assistant\n"):
        return f" because {seed % 97}" + ("..." if seed % 3 == 0 else "")
    return f" {seed % 89}?"


def self_prompting(text, reply, *, follow_ups=0.0, greedy=0.5, size=24):
    talk = dialogue(text, reply, greedy=greedy)
    return SelfPrompting(talk, OWN, follow_ups, size)


def test_the_target_goes_on_from_the_opener_of_a_users_message(text):
    plan = self_prompting(text, invented)
    lines, _ = plan.round(0, [])
    questions = plan.dialogue.writer.asked[:24]
    for line, asked in zip(lines, questions, strict=True):
        opener = line["provenance"]["opener"]
        assert asked == f"<|im_start|>user\n{opener}"
        assert opener in OWN[line["domain"]]
        assert line["messages"][0]["content"].startswith(f"{opener} ")
    assert Counter(line["domain"] for line in lines) == {"math": 12, "general": 12}
    assert len({line["provenance"]["opener"] for line in lines}) == 3


def test_a_share_of_the_answers_is_greedy_and_every_question_is_sampled(text):
    seen = Counter()

    def reply(prompt, sampling, seed):
        seen[prompt.endswith("assistant\n"), sampling] += 1
        return invented(prompt, sampling, seed)

    lines, _ = self_prompting(text, reply, greedy=0.5, size=200).round(0, [])
    assert seen[False, Sampling(1.0, 0.95)] == 200
    greedy = sum(line["provenance"]["temperature"] == 0 for line in lines)
    assert 0.35 < greedy / len(lines) < 0.65
    assert seen[True, Sampling()] >= greedy > 0 and seen[True, WARM] > 0


def test_a_question_is_asked_once_whatever_its_case_and_round(text):
    plan = self_prompting(text, lambda prompt, *_: " yes" * (prompt[-1] == "\n") or "X")
    first, dropped = plan.round(0, [])
    assert sorted(line["messages"][0]["content"] for line in first) == [
        *("AddX", "Solve:X", "Why isX")
    ]
    assert dropped["question repeated"] == 21
    again, dropped = plan.round(1, first)
    assert again == [] and dropped["question repeated"] == 24


def test_unfinished_questions_are_left_out(text):
    plan = self_prompting(text, lambda *_: " and so on...")
    lines, dropped = plan.round(0, [])
    assert lines == [] and dropped == {"question unfinished": 24}


def test_follow_ups_come_after_finished_answers_only(text):
    lines, _ = self_prompting(text, invented, follow_ups=1.0).round(0, [])
    lengths = Counter(len(line["messages"]) for line in lines)
    assert set(lengths) == {2, 4}
    for line in lines:
        assert [m["role"] for m in line["messages"]] == [
            *["user", "assistant"] * (len(line["messages"]) // 2)
        ]
        if len(line["messages"]) == 2:
            assert line["provenance"]["finish_reason"] == "length"


def test_the_shipped_openers_are_many_and_even():
    openers = read_openers(OPENERS)
    assert set(openers) == {"coding", "agentic", "math", "general"}
    assert {len(known) for known in openers.values()} == {40}
    everything = [opener for known in openers.values() for opener in known]
    assert len(set(everything)) == len(everything)
    assert all(opener == opener.strip() for opener in everything)
    assert list(read_openers(OPENERS, ("math",))) == ["math"]


def test_wrong_openers_are_refused(tmp_path):
    path = tmp_path / "openers.jsonl"
    with pytest.raises(DFlash2Error, match="cannot be read"):
        read_openers(path)
    path.write_text('{"domain": "math", "opener": "Solve:"}\n{"domain": "math"}\n')
    with pytest.raises(DFlash2Error, match="line 2: expected .*opener"):
        read_openers(path)
    with pytest.raises(DFlash2Error, match="no openers of 'law'; its domains are cod"):
        read_openers(OPENERS, ("law",))


@pytest.fixture
def options(folder, text, tmp_path, monkeypatch):
    """Options of a small run, changed by keywords; its text is invented."""
    monkeypatch.setattr(writing, "load_target_text", lambda *_, **__: text)
    monkeypatch.setattr(writing, "_writer", lambda *_: Scripted(text, invented))
    base = {"out": tmp_path / "text.jsonl", "conversations": 30, "size": 8}
    return lambda **changes: WritingOptions(str(folder), **(base | changes))


def written(options):
    """The bytes of a run's file."""
    write(options, lambda progress: None)
    return options.out.read_bytes()


def test_the_same_settings_write_the_same_file(options, tmp_path):
    first = written(options(out=tmp_path / "first.jsonl"))
    assert first == written(options(out=tmp_path / "second.jsonl"))
    assert first != written(options(out=tmp_path / "third.jsonl", seed=1))


def test_a_file_holds_at_least_as_many_conversations_as_asked(options):
    lines = written(options()).decode().splitlines()
    assert 30 <= len(lines) < 30 + 8
    assert all(json.loads(line)["messages"] for line in lines)


@pytest.mark.parametrize("share", [0, 0.01, 0.3, 0.5, 0.7, 0.99])
def test_a_run_that_was_cut_anywhere_ends_with_the_same_bytes(options, share):
    whole = written(options())
    cut = int(share * len(whole))
    assert not cut or whole[cut - 1 : cut] != b"\n"
    options().out.write_bytes(whole[:cut])
    assert written(options()) == whole


def test_a_run_that_was_cut_behind_a_line_ends_with_the_same_bytes(options):
    whole = written(options())
    options().out.write_bytes(whole[: whole.index(b"\n", len(whole) // 2) + 1])
    assert written(options()) == whole


def test_lines_of_a_round_that_was_not_noted_are_written_again(options):
    whole = written(options())
    notes = options().out.with_name("text.jsonl.progress.json")
    known = json.loads(notes.read_text())
    known["rounds"].pop()
    notes.write_text(json.dumps(known))
    assert written(options()) == whole


def test_a_run_can_be_made_longer(options):
    short = written(options(conversations=12))
    longer = written(options())
    assert longer.startswith(short) and len(longer) > len(short)


@pytest.mark.parametrize(
    "change", [{"seed": 7}, {"greedy": 0.1}, {"domains": ("math",)}]
)
def test_a_file_of_other_settings_is_refused_and_kept(options, change):
    whole = written(options())
    [(name, _)] = change.items()
    with pytest.raises(DFlash2Error, match=f"was begun with {name} .*choose another"):
        written(options(**change))
    assert options().out.read_bytes() == whole


def test_a_file_of_someone_else_is_refused_and_kept(options):
    options().out.write_text("mine\n")
    with pytest.raises(DFlash2Error, match="already exists, without text.jsonl.prog"):
        written(options())
    assert options().out.read_text() == "mine\n"


def test_a_run_that_gives_nothing_ends(options, text, monkeypatch):
    empty = Scripted(text, lambda *_: "")
    monkeypatch.setattr(writing, "_writer", lambda *_: empty)
    with pytest.raises(
        DFlash2Error, match="gave no conversation; .*160 question empty"
    ):
        written(options())


def test_regeneration_ends_with_its_input(options, tmp_path):
    given = tmp_path / "given.jsonl"
    asked = [{"messages": chat(f"{n}?", "old"), "domain": "x"} for n in range(11)]
    given.write_text("".join(json.dumps(entry) + "\n" for entry in asked))
    whole = written(options(regenerate=given, conversations=10**6))
    lines = [json.loads(line) for line in whole.decode().splitlines()]
    assert [line["messages"][0]["content"] for line in lines] == [
        entry["messages"][0]["content"] for entry in asked
    ]
    assert all(line["domain"] == "x" for line in lines)
    assert all(line["messages"][1]["content"] != "old" for line in lines)
    options().out.write_bytes(whole[: len(whole) // 2])
    assert written(options(regenerate=given, conversations=10**6)) == whole


@pytest.mark.parametrize("backend", ["mlx", "torch"])
def test_the_command_answers_as_the_target_does(pair, tmp_path, backend):
    if backend == "torch":
        pytest.importorskip("torch").set_num_threads(1)
    made = pair("oracle", vocab=128)
    asked = [" ".join(f"t{20 + (7 * n + k) % 90}" for k in range(24)) for n in range(5)]
    given, out = tmp_path / "given.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"messages": chat(q)}) + "\n" for q in asked))
    command = ["--model", made.target, "--out", out, "--regenerate", given]
    more = ["--conversations", 5, "--greedy", 1, "--max-tokens", 20, "--batch", 2]
    arguments = map(str, [*command, *more, "--backend", backend, "--offline"])
    result = CliRunner().invoke(writing.main, list(arguments))
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.stderr
    text = load_target_text(str(made.target))
    prompts = [Chat(text).before_answer(chat(question)) for question in asked]
    walks = [made.oracle.walk(prompt, 20) for prompt in prompts]
    answers = [
        Chat(text).text([token for token in walk if token not in text.ends])
        for walk in walks
    ]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["messages"][1]["content"] for line in lines] == answers


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    command = ["--model", str(tmp_path / "no/where/at/all"), "--out"]
    more = [str(tmp_path / "out.jsonl"), "--conversations", "1"]
    result = CliRunner().invoke(writing.main, [*command, *more])
    assert result.exit_code == 2
    assert "no such folder" in result.stderr and result.stderr.count("\n") == 1
