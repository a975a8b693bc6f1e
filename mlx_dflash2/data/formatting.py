"""Conversations as the target reads and answers them: tokens, and which it would write.

An answer is learnt in the context it is given in when served: the chat template's
rendering of the messages before it, with the generation prompt. A template may render
an answer differently later on, as a past one, for instance without its reasoning. So
each answer has its own sequence, and shares a document with later answers only where
its sequence begins theirs, token for token.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mlx_dflash2.conversations import Conversation
from mlx_dflash2.errors import DFlash2Error

from .chat import Chat, Refused

THOUGHT = re.compile(r"\A\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")  # the end of a generation prompt


@dataclass(frozen=True)
class Document:
    """One text to train on.

    Attributes:
        tokens: Shape: (S,), int32.
        supervised: Tokens the target wrote or would have written. Shape: (S,), bool.
    """

    tokens: np.ndarray
    supervised: np.ndarray

    def cut(self, length: int) -> "Document":
        """Its first `length` tokens."""
        return Document(self.tokens[:length], self.supervised[:length])


@dataclass
class Formatted:
    """The documents of a conversation, and why answers were left out."""

    documents: list[Document] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Served:
    """An answer in its context. Shape of tokens: (prompt + answer,)."""

    tokens: np.ndarray
    prompt: int


class _Unusable(Exception):
    """Why an answer cannot be learnt."""


@dataclass(frozen=True)
class ChatFormat:
    """Writes conversations as documents.

    Attributes:
        chat: The target's chat template in one thinking mode.
        last_turn_only: Learn the last answer of a conversation only.
    """

    chat: Chat
    last_turn_only: bool = False

    def format(self, conversation: Conversation) -> Formatted:
        """The documents of a conversation.

        With thinking on, an answer without reasoning is left out, as the target would
        not give it; with thinking off, reasoning is taken away.

        Raises:
            DFlash2Error: The template does not end answers as the target does.
        """
        formatted = Formatted()
        messages = [self._in_mode(message) for message in conversation.messages]
        served = []
        for turn in self._turns(messages):
            try:
                served.append(self._served(messages[: turn + 1], conversation))
            except (_Unusable, Refused) as reason:
                formatted.dropped[str(reason)] += 1
        formatted.documents = _shared_documents(served)
        return formatted

    def text(self, text: str) -> Document:
        """A plain text, encoded as a prompt without a chat template is."""
        tokens = np.array(self.chat.target.tokenizer.encode(text), np.int32)
        return Document(tokens, np.arange(len(tokens)) > 0)

    def _turns(self, messages: list[dict[str, Any]]) -> list[int]:
        """Which messages are answers: of the assistant, to a user."""
        roles = [message["role"] for message in messages]
        asked = roles.index("user") if "user" in roles else len(roles)
        turns = [n for n, role in enumerate(roles) if role == "assistant" and n > asked]
        return turns[-1:] if self.last_turn_only else turns

    def _in_mode(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message without the reasoning that the mode does not have."""
        if message["role"] != "assistant" or self.chat.enable_thinking is not False:
            return message
        kept = {k: v for k, v in message.items() if k != "reasoning_content"}
        return kept | {"content": THOUGHT.sub("", message["content"])}

    def _served(
        self, messages: list[dict[str, Any]], conversation: Conversation
    ) -> _Served:
        """The last of the messages as the answer to those before it."""
        self._check_answer(messages[-1])
        chat, target, tools = self.chat, self.chat.target, conversation.tools
        prompt = chat.render(messages[:-1], tools, ask=True)
        answer = _answer_behind(prompt, chat.render(messages, tools, ask=False))
        before, tokens = chat.encode(prompt), chat.encode(prompt + answer)
        if tokens[: len(before)] != before:  # a token spans both, unlike in decoding
            tokens = before + chat.encode(answer)
        ends = np.flatnonzero(np.isin(tokens[len(before) :], list(target.ends)))
        if not len(ends):
            raise DFlash2Error(
                f"{conversation.where}: the chat template of "
                f"{target.facts['name']} ends the answer with {answer[-20:]!r}, "
                "which holds none of its end tokens; correct eos_token_id in its "
                "generation_config.json"
            )
        ended = len(messages) < len(conversation.messages) or not _is_cut(conversation)
        end = len(before) + int(ends[0]) + ended
        return _Served(np.array(tokens[:end], np.int32), len(before))

    def _check_answer(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if not (content.strip() or message.get("tool_calls")):
            raise _Unusable("empty answer")
        if self.chat.enable_thinking is False and "<think>" in content:
            raise _Unusable("unfinished reasoning")
        if self.chat.enable_thinking and not _reasoning(message).strip():
            raise _Unusable("no finished reasoning, but thinking is on")


def _is_cut(conversation: Conversation) -> bool:
    """Whether the target was stopped in the last answer, as regeneration records."""
    provenance = conversation.fields.get("provenance")
    return isinstance(provenance, dict) and provenance.get("finish_reason") == "length"


def _reasoning(message: dict[str, Any]) -> str:
    """The thought before an answer, kept apart or in front of it."""
    thought = THOUGHT.match(message["content"])
    return message.get("reasoning_content") or (thought[1] if thought else "")


def _answer_behind(prompt: str, rendered: str) -> str:
    """What follows the prompt where the answer is rendered.

    A template may open, or open and close, the reasoning in its generation prompt and
    yet not write that before a given answer; the answer then follows what it opened.
    """
    for head in (prompt, OPENED.sub("", prompt)):
        if rendered.startswith(head):
            return rendered[len(head) :]
    raise _Unusable("the chat template renders its own prompt differently")


def _shared_documents(served: Sequence[_Served]) -> list[Document]:
    """As few documents as hold every answer in its own context."""
    documents: list[Document] = []
    for answer in reversed(served):
        length = len(answer.tokens)
        if not documents or not np.array_equal(
            documents[-1].tokens[:length], answer.tokens
        ):
            documents.append(Document(answer.tokens, np.zeros(length, bool)))
        documents[-1].supervised[answer.prompt : length] = True
    return documents[::-1]
