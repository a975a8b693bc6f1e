"""Regeneration: the target answers the questions of given conversations itself.

Every answer is rewritten in turn, given the answers rewritten before it. What follows
a call of a tool cannot be had, so a conversation ends before its first call.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dflash2.conversations import Conversation

from .chat import Messages
from .dialogue import Dialogue, Draft


@dataclass(frozen=True)
class Regeneration:
    """Rounds of conversations whose answers the target writes anew.

    Attributes:
        conversations: What is answered, in order.
        size: Conversations of a round.
    """

    dialogue: Dialogue
    conversations: list[Conversation]
    size: int

    def round(
        self, number: int, before: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Counter[str]]:
        """The conversations of a round, and what was left out of it."""
        first = number * self.size
        given = self.conversations[first : first + self.size]
        drafts = [
            self.dialogue.draft(first + n, conversation.tools)
            for n, conversation in enumerate(given)
        ]
        questions = [questions_of(conversation.messages) for conversation in given]
        dropped: Counter[str] = Counter()
        for turn in range(max(map(len, questions), default=0)):
            for draft, asked in zip(drafts, questions, strict=True):
                if turn >= len(asked):
                    draft.open = False
                elif draft.open:
                    draft.messages.extend(asked[turn])
            dropped += self.dialogue.answer(drafts, f"{number} turn {turn}")
        lines = [
            self._line(draft, conversation)
            for draft, conversation in zip(drafts, given, strict=True)
            if draft.answered
        ]
        dropped["no question"] += sum(not asked for asked in questions)
        return lines, +dropped

    def exhausted(self, number: int) -> bool:
        """Whether there is no such round."""
        return number * self.size >= len(self.conversations)

    def _line(self, draft: Draft, conversation: Conversation) -> dict[str, Any]:
        tools = {"tools": conversation.tools} if conversation.tools else {}
        where = f"{Path(conversation.source).name}: line {conversation.line}"
        provenance = {"from": where, **self.dialogue.provenance(draft)}
        return {
            "messages": draft.messages,
            **tools,
            **conversation.fields,
            "provenance": provenance,
        }


def questions_of(messages: Messages) -> list[Messages]:
    """What stands before each answer, up to the first call of a tool."""
    questions: list[Messages] = []
    asked: Messages = []
    for message in messages:
        if message["role"] != "assistant":
            asked.append(message)
        elif message.get("tool_calls"):
            return questions
        elif asked:
            questions.append(asked)
            asked = []
    if any(message["role"] == "user" for message in asked):
        questions.append(asked)
    return questions
