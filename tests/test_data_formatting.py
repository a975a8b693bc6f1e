"""Conversations as tokens: what is learnt is what the target would have written."""

import json

import numpy as np
import pytest
from text_targets import DROPS_THOUGHTS, KEEPS_THOUGHTS, write_text_target

from mlx_dflash2.conversations import conversation_from
from mlx_dflash2.data.chat import Chat
from mlx_dflash2.data.formatting import ChatFormat
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.errors import DFlash2Error

END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
REFUSES = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system messages') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Targets by the name of their template, loaded once."""
    folder = tmp_path_factory.mktemp("targets")
    templates = {
        "chatml": None,
        "keeps": KEEPS_THOUGHTS,
        "drops": DROPS_THOUGHTS,
        "refuses": REFUSES,
    }
    return {
        name: load_target_text(str(write_text_target(folder / name, template)))
        for name, template in templates.items()
    }


def conversation(*contents, **fields):
    """User and assistant in turn; a mapping is a message as it is."""
    roles = ("user", "assistant")
    messages = [
        content if isinstance(content, dict) else {"role": role, "content": content}
        for content, role in zip(contents, roles * len(contents), strict=False)
    ]
    return conversation_from({"messages": messages, **fields}, source="f", line=1)


def learnt(target, document):
    """The texts to learn, each run of tokens by itself."""
    edges = np.flatnonzero(np.diff(document.supervised, prepend=False, append=False))
    spans = edges.reshape(-1, 2).tolist()
    decode = target.tokenizer.decode
    return [decode(document.tokens[start:end]) for start, end in spans]


def rendered(target, messages, **options):
    return target.tokenizer.apply_chat_template(messages, tokenize=False, **options)


CHATS = [
    ("Hi.", "Hello there."),
    ("2+2?", "4", "And 3+3?", "6, I think.\n\nYes: 6."),
    ("你好🙂", "你好！有什么可以帮你？", "é", " leading, trailing \n"),
    ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})
    + ({"role": "assistant", "content": "Because."},),
    ("a", "one", "b", "<html>no thought</html>", "c", "three"),
]


@pytest.mark.parametrize(
    "name, mode",
    [("chatml", None), ("chatml", False), ("keeps", False)] + [("drops", False)],
)
@pytest.mark.parametrize("contents", CHATS)
def test_the_answers_and_their_ends_are_learnt_and_nothing_else(
    targets, name, mode, contents
):
    target, chat = targets[name], conversation(*contents)
    formatted = ChatFormat(Chat(target, mode)).format(chat)
    found = [text for d in formatted.documents for text in learnt(target, d)]
    answers = [m["content"] for m in chat.messages if m["role"] == "assistant"]
    assert found == [answer + END for answer in answers]
    assert not formatted.dropped


@pytest.mark.parametrize(
    "name, mode", [("chatml", None), ("keeps", False), ("keeps", None)]
)
@pytest.mark.parametrize("contents", CHATS)
def test_rows_are_what_the_chat_template_gives(targets, name, mode, contents):
    target, chat = targets[name], conversation(*contents)
    (document,) = ChatFormat(Chat(target, mode)).format(chat).documents
    options = {} if mode is None else {"enable_thinking": mode}
    text = rendered(target, chat.messages, **options)
    whole = target.tokenizer.encode(text, add_special_tokens=False)
    assert document.tokens.tolist() == whole[: len(document.tokens)]
    assert target.tokenizer.decode(whole[len(document.tokens) :]) == "\n"


@pytest.mark.parametrize("mode", [None, False, True])
@pytest.mark.parametrize("name", ["chatml", "keeps", "drops"])
def test_every_answer_follows_the_prompt_it_is_served_with(targets, name, mode):
    target = targets[name]
    thought = "<think>\nLet me see.\n</think>\n\n" if mode else ""
    chat = conversation("2+2?", f"{thought}4", "And 3+3?", f"{thought}6", "Sure?")
    options = {} if mode is None else {"enable_thinking": mode}
    prompts = [
        target.tokenizer.encode(
            rendered(
                target, chat.messages[:turn], add_generation_prompt=True, **options
            ),
            add_special_tokens=False,
        )
        for turn in (1, 3)
    ]
    documents = ChatFormat(Chat(target, mode)).format(chat).documents
    starts = [
        (document.tokens[:start].tolist(), document)
        for document in documents
        for start in np.flatnonzero(np.diff(document.supervised, prepend=False))[::2]
    ]
    assert [prompt for prompt, _ in starts] == prompts


def test_answers_share_a_document_only_where_the_template_keeps_them_alike(targets):
    chat = conversation("a", "one", "b", "two", "c", "three")
    counts = {
        (name, mode): len(ChatFormat(Chat(targets[name], mode)).format(chat).documents)
        for name in ("chatml", "keeps", "drops")
        for mode in (None, False)
    }
    assert counts == {
        ("chatml", None): 1,
        ("chatml", False): 3,  # only a prompt has the empty thought
        ("keeps", None): 1,
        ("keeps", False): 1,
        ("drops", None): 3,
        ("drops", False): 3,
    }


@pytest.mark.parametrize("name", ["chatml", "keeps", "drops"])
def test_thinking_off_takes_reasoning_away(targets, name):
    thoughtful = conversation(
        "2+2?", "<think>\nTwo and two.\n</think>\n\n4", "Sure?", "Yes."
    )
    apart = conversation(
        "2+2?",
        {"role": "assistant", "content": "4", "reasoning_content": "Two and two."},
        "Sure?",
        "Yes.",
    )
    plain = conversation("2+2?", "4", "Sure?", "Yes.")
    chat = ChatFormat(Chat(targets[name], False))
    expected = [d.tokens.tolist() for d in chat.format(plain).documents]
    for other in (thoughtful, apart):
        found = [d.tokens.tolist() for d in chat.format(other).documents]
        assert found == expected


@pytest.mark.parametrize("name", ["chatml", "keeps", "drops"])
def test_thinking_on_learns_thoughts_and_leaves_out_answers_without(targets, name):
    chat = conversation("2+2?", "<think>\nTwo.\n</think>\n\n4", "Sure?", "Yes.")
    formatted = ChatFormat(Chat(targets[name], True)).format(chat)
    (document,) = formatted.documents
    (found,) = learnt(targets[name], document)
    before = targets[name].tokenizer.decode(document.tokens[~document.supervised])
    assert before.endswith("assistant\n<think>\n")
    assert found.removeprefix("<think>\n") == f"Two.\n</think>\n\n4{END}"
    assert formatted.dropped == {"no finished reasoning, but thinking is on": 1}


def test_unfinished_and_empty_answers_are_left_out(targets):
    chat = conversation("a", "<think>\nNow, let", "b", "  ", "c", "three")
    formatted = ChatFormat(Chat(targets["keeps"], False)).format(chat)
    assert formatted.dropped == {"unfinished reasoning": 1, "empty answer": 1}
    assert len(formatted.documents) == 1
    assert learnt(targets["keeps"], formatted.documents[0]) == [f"three{END}"]


def test_tool_calls_are_learnt_and_results_are_not(targets):
    call = {"function": {"name": "add", "arguments": json.dumps({"a": 1, "b": "x"})}}
    chat = conversation(
        "1+x?",
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x1"},
        {"role": "assistant", "content": "It is x1."},
        tools=TOOLS,
    )
    (document,) = ChatFormat(Chat(targets["keeps"], False)).format(chat).documents
    called = '<function name="add"><param name="a">1</param><param name="b">x</param>'
    assert learnt(targets["keeps"], document) == [
        f"{called}</function>{END}",
        f"It is x1.{END}",
    ]
    assert "# Tools\n" in targets["keeps"].tokenizer.decode(document.tokens)


def test_only_the_last_answer_is_learnt_when_asked(targets):
    chat = conversation("a", "one", "b", "two")
    last = ChatFormat(Chat(targets["keeps"], False), last_turn_only=True).format(chat)
    (document,) = last.documents
    assert learnt(targets["keeps"], document) == [f"two{END}"]


def test_what_follows_the_last_answer_or_precedes_a_question_is_not_learnt(targets):
    messages = [
        {"role": "assistant", "content": "Welcome."},
        *conversation("a", "one", "b").messages,
    ]
    chat = conversation_from({"messages": messages}, source="f", line=1)
    (document,) = ChatFormat(Chat(targets["keeps"], False)).format(chat).documents
    assert learnt(targets["keeps"], document) == [f"one{END}"]
    assert targets["keeps"].tokenizer.decode(document.tokens).endswith(f"one{END}")


def test_a_cut_document_loses_the_end_of_its_turn(targets):
    target = targets["chatml"]
    (document,) = (
        ChatFormat(Chat(target)).format(conversation("a", "one two")).documents
    )
    cut = document.cut(len(document.tokens) - 2)
    assert learnt(target, cut) == ["one tw"] or learnt(target, cut) == ["one t"]
    assert END not in learnt(target, cut)[0]


def test_an_answer_the_target_was_stopped_in_has_no_end_to_learn(targets):
    stopped = {"finish_reason": "length"}
    chat = conversation("a", "one", "b", "two and", provenance=stopped)
    (document,) = ChatFormat(Chat(targets["chatml"])).format(chat).documents
    assert learnt(targets["chatml"], document) == [f"one{END}", "two and"]
    whole = conversation("a", "one", provenance={"finish_reason": "stop"})
    (document,) = ChatFormat(Chat(targets["chatml"])).format(whole).documents
    assert learnt(targets["chatml"], document) == [f"one{END}"]


def test_a_conversation_the_template_refuses_is_left_out_with_its_reason(targets):
    chat = conversation({"role": "system", "content": "s"}, *CHATS[3][1:])
    formatted = ChatFormat(Chat(targets["refuses"])).format(chat)
    assert formatted.documents == []
    reason = "the chat template refuses: no system messages"
    assert formatted.dropped == {reason: 1}


def test_plain_text_is_learnt_but_for_its_first_token(targets):
    document = ChatFormat(Chat(targets["chatml"])).text("Some text.")
    assert targets["chatml"].tokenizer.decode(document.tokens) == "Some text."
    assert document.supervised.tolist() == [False] + [True] * (len(document.tokens) - 1)


def test_a_template_that_ends_answers_with_no_end_token_is_refused(tmp_path):
    folder = write_text_target(tmp_path / "target", ends=(1,))
    chat = ChatFormat(Chat(load_target_text(str(folder))))
    with pytest.raises(DFlash2Error, match="f: line 1: .* none of its end tokens"):
        chat.format(conversation("a", "one"))


def test_a_target_without_a_chat_template_is_refused(tmp_path):
    folder = write_text_target(tmp_path / "target", template="")
    with pytest.raises(DFlash2Error, match="no chat template"):
        load_target_text(str(folder))


def test_facts_tell_targets_apart(targets):
    facts = [targets[name].facts for name in ("keeps", "drops")]
    assert facts[0]["tokenizer_sha256"] == facts[1]["tokenizer_sha256"]
    assert facts[0]["template_sha256"] != facts[1]["template_sha256"]
