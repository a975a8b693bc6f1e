"""Prompts in a target's chat template: for an answer, and for a question of its own."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .target_text import TargetText

MARK = "QUESTION-STANDS-HERE"
Messages = list[dict[str, Any]]


class Refused(Exception):
    """The chat template takes no such messages."""


@dataclass(frozen=True)
class Chat:
    """A target's conversations as token ids.

    Attributes:
        target: Whose template.
        enable_thinking: The template's variable; None leaves it undefined.
    """

    target: TargetText
    enable_thinking: bool | None = None

    def before_answer(self, messages: Messages, tools: list | None = None) -> list[int]:
        """What the target reads before it answers `messages`.

        Raises:
            Refused: The template does not take them.
        """
        return self.encode(self.render(messages, tools, ask=True))

    def before_question(self, messages: Messages, opener: str) -> list[int]:
        """What it reads before it writes the next message of the user.

        Args:
            opener: How that message begins.

        Raises:
            Refused: The template does not take them.
        """
        asked = [*messages, {"role": "user", "content": MARK}]
        before, _, _ = self.render(asked, None, ask=False).rpartition(MARK)
        return self.encode(before + opener)

    def text(self, tokens: list[int]) -> str:
        """What tokens say, special ones included."""
        return self.target.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def is_marked(self, tokens: list[int]) -> bool:
        """Whether the target wrote a token that frames messages."""
        return not self._frame.isdisjoint(tokens)

    @cached_property
    def _frame(self) -> frozenset[int]:
        """Special tokens around a message, and all that have a name of their own."""
        tokenizer = self.target.tokenizer
        special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        framed = self.before_answer([{"role": "user", "content": MARK}])
        return frozenset({*tokenizer.all_special_ids, *special.intersection(framed)})

    def encode(self, text: str) -> list[int]:
        """The ids of a rendered text, which holds the bos text where it belongs."""
        return self.target.tokenizer.encode(text, add_special_tokens=False)

    def render(self, messages: Messages, tools: list | None, *, ask: bool) -> str:
        """The text of messages.

        Args:
            ask: With the beginning of an answer behind them.

        Raises:
            Refused: The template does not take them.
        """
        thinking = self.enable_thinking
        mode = {} if thinking is None else {"enable_thinking": thinking}
        try:
            return self.target.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=ask, **mode
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:100]
            raise Refused(f"the chat template refuses: {reason}") from error
