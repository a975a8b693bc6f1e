"""Conversations are read from both forms, and what is wrong is named by its line."""

import json
from itertools import islice

import pytest

from mlx_dflash2.conversations import conversation_from, read_conversations
from mlx_dflash2.errors import DFlash2Error

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"city": "京都", "days": 2}}
ASK = {"role": "user", "content": "Rain in Kyoto?"}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "type": "function",
                    "function": {**CALL, "arguments": json.dumps(CALL["arguments"])},
                }
            ],
        },
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "Yes."},
    ],
    "tools": [{"type": "function", "function": WEATHER}],
    "domain": "travel",
}
SHAREGPT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Rain in Kyoto?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "rain"},
        {"from": "gpt", "value": "Yes."},
    ],
    "tools": json.dumps([WEATHER]),
    "domain": "travel",
}


def written(folder, *entries):
    path = folder / "data.jsonl"
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(entry):
    return conversation_from(entry, source="data.jsonl", line=3)


def chat(*messages, **fields):
    return {"messages": list(messages), **fields}


def turn(role, content="x", **more):
    return {"role": role, "content": content, **more}


def test_both_forms_give_the_same_conversation(tmp_path):
    openai, sharegpt = read_conversations(written(tmp_path, OPENAI, SHAREGPT))
    assert openai.messages == sharegpt.messages
    assert openai.tools == sharegpt.tools == OPENAI["tools"]
    assert openai.fields == sharegpt.fields == {"domain": "travel"}
    assert (openai.line, sharegpt.line) == (1, 2)
    roles = [message["role"] for message in openai.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


def test_arguments_become_mappings_and_calls_have_text():
    for entry in (OPENAI, SHAREGPT):
        message = read(entry).messages[2]
        assert message["content"] == ""
        assert message["tool_calls"] == [{"type": "function", "function": CALL}]


def test_parallel_calls_of_sharegpt_are_one_message():
    calls = json.dumps([CALL, {"name": "clock", "arguments": {}}])
    entry = {"conversations": [{"from": "function_call", "value": calls}]}
    names = [call["function"]["name"] for call in read(entry).messages[0]["tool_calls"]]
    assert names == ["weather", "clock"]


def test_roles_may_stand_under_the_other_name():
    assert read({"conversations": OPENAI["messages"]}).messages == (
        read(OPENAI).messages
    )


@pytest.mark.parametrize(
    ("sender", "role"),
    [
        *(("system", "system"), ("human", "user"), ("user", "user")),
        *(("gpt", "assistant"), ("assistant", "assistant")),
        *(("observation", "tool"), ("tool", "tool")),
    ],
)
def test_a_sender_of_sharegpt_has_its_role(sender, role):
    entry = {"conversations": [{"from": sender, "value": "hello"}]}
    assert read(entry).messages == [{"role": role, "content": "hello"}]


def test_content_parts_are_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert read(chat(turn("user", parts))).messages[0]["content"] == "one two"


def test_what_templates_read_of_a_message_is_kept_and_no_more():
    kept = {"name": "weather", "tool_call_id": "c1", "reasoning_content": "hm"}
    message = turn("tool", **kept, weight=0, refusal=None)
    assert read(chat(message)).messages == [turn("tool", **kept)]
    call = {"id": "c1", "type": "function", "function": CALL}
    message = turn("assistant", tool_calls=[call])
    assert read(chat(message)).messages[0]["tool_calls"] == [call]


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools_are_none(tools):
    assert read(chat(ASK, tools=tools)).tools is None


def test_blank_lines_marks_and_line_ends_of_other_systems_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    line = json.dumps(chat(ASK)).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    assert [read.line for read in read_conversations(path)] == [1, 4]


def test_a_file_is_read_no_further_than_asked(tmp_path):
    path = written(tmp_path, chat(ASK), chat(ASK))
    path.write_text(path.read_text() + "not JSON\n")
    reading = read_conversations(path)
    assert len(list(islice(reading, 2))) == 2
    with pytest.raises(DFlash2Error, match="line 3: not one JSON object"):
        next(reading)


def test_the_final_answer_is_cut():
    assert read(OPENAI).prompt() == read(OPENAI).messages[:4]
    two = [turn("assistant", "well"), turn("assistant", "yes")]
    assert read(chat(ASK, *two)).prompt() == [ASK]
    again = turn("user", "And snow?")
    assert read(chat(ASK, *two, again, *two)).prompt() == [ASK, *two, again]


def test_without_a_final_answer_nothing_is_cut():
    for last in (turn("user", "again"), turn("tool", "rain")):
        entry = chat(ASK, turn("assistant"), last)
        assert read(entry).prompt() == read(entry).messages


@pytest.mark.parametrize("before", [[], [turn("system")]])
def test_an_answer_to_nothing_is_refused(before):
    entry = read(chat(*before, turn("assistant")))
    with pytest.raises(DFlash2Error, match="data.jsonl: line 3: nothing is left"):
        entry.prompt()


def test_a_group_is_named_by_text_or_a_number():
    entry = read(chat(ASK, domain="代码", part=7, empty=None))
    assert entry.group("domain") == "代码"
    assert entry.group("part") == "7"
    assert entry.group("empty") is None and entry.group("absent") is None


@pytest.mark.parametrize("value", ["", True, 1.5, ["a"], {"a": 1}])
def test_another_value_is_no_group(value):
    with pytest.raises(DFlash2Error, match="line 3: domain is .*a group's name"):
        read(chat(ASK, domain=value)).group("domain")


def call_with(arguments):
    return chat(
        turn("assistant", tool_calls=[{"function": {**CALL, "arguments": arguments}}])
    )


def sharegpt(sender, value):
    return {"conversations": [{"from": sender, "value": value}]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "found no fields, expected one of messages or conversations"),
        ({"text": "hi", "id": 1}, "found id, text, expected one of messages"),
        (OPENAI | SHAREGPT, "found messages and conversations, expected one"),
        ({"messages": "hi"}, r"messages is 'hi', expected a list of messages"),
        ({"messages": []}, r"messages is \[\], expected a list of messages"),
        (chat("hi"), r"messages\[0\] is 'hi', expected role and content, or from"),
        (chat({"text": "hi"}), r"messages\[0\] is .*expected role and content"),
        (chat(ASK, turn("bot")), r"messages\[1\]: role is 'bot', expected system or"),
        (chat(turn(["user"])), r"role is \['user'\], expected system or user"),
        (sharegpt("bing", "hi"), r"conversations\[0\]: from is 'bing', expected"),
        (sharegpt(["gpt"], "hi"), r"from is \['gpt'\], expected system or human"),
        (chat({"role": "user"}), r"messages\[0\]: content is None, expected text"),
        (chat(turn("user", 5)), "content is 5, expected text"),
        (chat(turn("user", [{"type": "image"}])), "content is .*, expected text"),
        (chat(turn("user", "\ud800")), r"messages\[0\]: content is not Unicode text"),
        (chat(turn("tool", name=7)), "name is 7, expected text"),
        (sharegpt("gpt", None), "value is None, expected text"),
        (sharegpt("function_call", "f(x)"), r"value: 'f\(x\)' is not valid JSON"),
        (sharegpt("function_call", "7"), "value: found 7, expected a function's name"),
        (chat(turn("user", tool_calls=[CALL])), "tool_calls of user, only the"),
        (chat(turn("assistant", tool_calls=CALL)), "tool_calls: found .* of calls"),
        (chat(turn("assistant", tool_calls=[{}])), "expected a function's name and"),
        (call_with(None), "arguments of weather: None, expected a JSON object"),
        (call_with("[1]"), r"arguments of weather: \[1\], expected a JSON object"),
        (call_with("{"), "arguments of weather: '{' is not valid JSON"),
        (chat(ASK, tools="{"), "tools: '{' is not valid JSON"),
        (chat(ASK, tools=WEATHER), "tools: found .*, expected a list of tools"),
        (chat(ASK, tools=[{"type": "x"}]), "tools: found .*, expected a named"),
        (chat(ASK, system=5), "system is 5, expected text"),
        (chat(turn("system"), ASK, system="b"), "there is also the field system"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(entry, message):
    with pytest.raises(DFlash2Error, match=f"^data.jsonl: line 3: .*{message}"):
        read(entry)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{", "line 2: not one JSON object"),
        (b"[" * 100_000, "line 2: not one JSON object"),
        (b'["a"]', r"line 2: found \['a'\], expected a JSON object with messages"),
        (b'{"messages": "\xff"}', "line 2: not UTF-8"),
    ],
)
def test_a_line_that_is_no_object_is_refused(tmp_path, raw, message):
    path = written(tmp_path, chat(ASK))
    path.write_bytes(path.read_bytes() + raw + b"\n")
    with pytest.raises(DFlash2Error, match=message):
        list(read_conversations(path))


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path, content):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(DFlash2Error, match="data.jsonl: holds no conversation"):
        list(read_conversations(path))


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(DFlash2Error, match=f"{path}: cannot be read"):
            list(read_conversations(path))


def test_a_long_value_is_shortened_in_an_error():
    with pytest.raises(DFlash2Error) as refused:
        read(chat(turn("x" * 5000)))
    assert len(str(refused.value)) < 200
