"""Conversations as data sets hold them, one JSON object a line.

Two forms are read: OpenAI's (`messages` of `role` and `content`, with `tool_calls`) and
ShareGPT's (`conversations` of `from` and `value`). Both come out as what Hugging Face
chat templates take: tool calls whose arguments are mappings, tools as OpenAI functions.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DFlash2Error
from .text import check_text

ROLES = ("system", "user", "assistant", "tool")
SENDERS = {  # ShareGPT's names of the roles
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
}
FORMS = ("messages", "conversations")
KEPT = ("name", "tool_call_id", "reasoning_content")  # besides role, content, calls


@dataclass(frozen=True)
class Conversation:
    """One conversation and where it stands.

    Attributes:
        messages: Mappings of role and content, as a chat template takes them.
        tools: OpenAI functions; None without any.
        fields: The other fields of its line.
        source: The file it was read from.
        line: Counted from 1.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    fields: dict[str, Any]
    source: str
    line: int

    @property
    def where(self) -> str:
        """File and line, for messages to the user."""
        return f"{self.source}: line {self.line}"

    def group(self, field: str) -> str | None:
        """The value of a field by which conversations are grouped; None without it.

        Raises:
            DFlash2Error: The value is neither text nor a whole number.
        """
        value = self.fields.get(field)
        if value is None:
            return None
        if value == "" or isinstance(value, bool) or not isinstance(value, str | int):
            raise DFlash2Error(
                f"{self.where}: {field} is {_short(value)}, expected a group's name"
            )
        return str(value)

    def prompt(self) -> list[dict[str, Any]]:
        """The messages up to the one that the final answer of the assistant is for.

        That may be the result of a tool. A conversation that ends with a question or
        a result has no final answer and is returned whole.

        Raises:
            DFlash2Error: There is nothing to answer.
        """
        end = len(self.messages)
        while end and self.messages[end - 1]["role"] == "assistant":
            end -= 1
        prompt = self.messages[:end]
        if all(message["role"] == "system" for message in prompt):
            raise DFlash2Error(
                f"{self.where}: nothing is left without the final answer; expected a "
                "user's message or a tool's result before it"
            )
        return prompt


def read_conversations(path: Path) -> Iterator[Conversation]:
    """The conversations of a JSONL file in order, one at a time; blank lines are none.

    Raises:
        DFlash2Error: The file cannot be read, holds no conversation, or a line is not
            one.
    """
    found = False
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, 1):
                if raw.strip():
                    entry = _json_object(raw, f"{path}: line {line}")
                    yield conversation_from(entry, source=str(path), line=line)
                    found = True
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    if not found:
        raise DFlash2Error(
            f"{path}: holds no conversation; expected one JSON object a line"
        )


def conversation_from(entry: dict[str, Any], *, source: str, line: int) -> Conversation:
    """The conversation of one row of a data set, in either form.

    Raises:
        DFlash2Error: The row is in neither form.
    """
    where = f"{source}: line {line}"
    forms = [form for form in FORMS if entry.get(form) is not None]
    if len(forms) != 1:
        found = " and ".join(forms) or ", ".join(sorted(entry)) or "no fields"
        raise DFlash2Error(f"{where}: found {found}, expected one of {_or(FORMS)}")
    turns = entry[forms[0]]
    if not isinstance(turns, list) or not turns:
        raise DFlash2Error(
            f"{where}: {forms[0]} is {_short(turns)}, expected a list of messages"
        )
    messages = [
        _message(turn, f"{where}: {forms[0]}[{index}]")
        for index, turn in enumerate(turns)
    ]
    if entry.get("system"):
        if messages[0]["role"] == "system":
            raise DFlash2Error(
                f"{where}: {forms[0]} begins with a system message, but there is also "
                "the field system; keep one of them"
            )
        content = _text(entry["system"], f"{where}: system")
        messages.insert(0, {"role": "system", "content": content})
    tools = _tools(entry.get("tools"), f"{where}: tools")
    known = {*FORMS, "system", "tools"}
    fields = {name: value for name, value in entry.items() if name not in known}
    return Conversation(messages, tools, fields, source, line)


def _json_object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DFlash2Error(
            f"{where}: not UTF-8 ({error.reason}); save the file in UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DFlash2Error(
            f"{where}: not valid JSON ({getattr(error, 'msg', error)}); expected one "
            "JSON object a line"
        ) from None
    if not isinstance(entry, dict):
        raise DFlash2Error(
            f"{where}: found {_short(entry)}, expected a JSON object with {_or(FORMS)}"
        )
    return entry


def _message(turn: Any, where: str) -> dict[str, Any]:
    """One message of either form."""
    if isinstance(turn, dict) and "role" in turn:
        return _openai_message(turn, where)
    if isinstance(turn, dict) and "from" in turn:
        return _sharegpt_message(turn, where)
    raise DFlash2Error(
        f"{where} is {_short(turn)}, expected role and content, or from and value"
    )


def _openai_message(turn: dict[str, Any], where: str) -> dict[str, Any]:
    role = turn["role"]
    if role not in ROLES:
        raise DFlash2Error(f"{where}: role is {_short(role)}, expected {_or(ROLES)}")
    calls = turn.get("tool_calls") or []
    if calls and role != "assistant":
        raise DFlash2Error(f"{where}: tool_calls of {role}, only the assistant calls")
    content = turn.get("content")
    if content is None and calls:
        content = ""
    message = {"role": role, "content": _text(content, f"{where}: content")}
    message |= {
        name: _text(turn[name], f"{where}: {name}")
        for name in KEPT
        if turn.get(name) is not None
    }
    if calls:
        message["tool_calls"] = _calls(calls, f"{where}: tool_calls")
    return message


def _sharegpt_message(turn: dict[str, Any], where: str) -> dict[str, Any]:
    sender, value = turn["from"], turn.get("value")
    if not isinstance(sender, str) or sender not in SENDERS:
        raise DFlash2Error(
            f"{where}: from is {_short(sender)}, expected {_or(SENDERS)}"
        )
    where = f"{where}: value"
    if sender != "function_call":
        return {"role": SENDERS[sender], "content": _text(value, where)}
    calls = _parsed(value, where)
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": _calls(calls, where)}


def _text(value: Any, where: str) -> str:
    """A string, or the text of OpenAI's content parts."""
    if isinstance(value, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in value
    ):
        return "".join(_text(part.get("text"), where) for part in value)
    if not isinstance(value, str):
        raise DFlash2Error(f"{where} is {_short(value)}, expected text")
    check_text(value, where)
    return value


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form, their arguments as mappings."""
    if not isinstance(calls, list):
        raise DFlash2Error(f"{where}: found {_short(calls)}, expected a list of calls")
    return [_call(call, where) for call in calls]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DFlash2Error(
            f"{where}: found {_short(call)}, expected a function's name and arguments"
        )
    place = f"{where}: arguments of {function['name']}"
    arguments = _parsed(function.get("arguments"), place)
    if not isinstance(arguments, dict):
        raise DFlash2Error(f"{place}: {_short(arguments)}, expected a JSON object")
    named = {"id": call["id"]} if call.get("id") is not None else {}
    function = {"name": function["name"], "arguments": arguments}
    return {**named, "type": "function", "function": function}


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form; bare functions are wrapped."""
    if not tools:
        return None
    tools = _parsed(tools, where)
    if not isinstance(tools, list):
        raise DFlash2Error(f"{where}: found {_short(tools)}, expected a list of tools")
    return [_tool(tool, where) for tool in tools] or None


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DFlash2Error(f"{where}: found {_short(tool)}, expected a named function")
    return {"type": "function", "function": function}


def _parsed(value: Any, where: str) -> Any:
    """A value that data sets also write as a string of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DFlash2Error(
            f"{where}: {_short(value)} is not valid JSON "
            f"({getattr(error, 'msg', error)})"
        ) from None


def _short(value: Any) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _or(names: Iterable[str]) -> str:
    return " or ".join(names)
