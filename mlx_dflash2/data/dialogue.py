"""Conversations the target is writing: turns are added until one cannot be kept."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .chat import Chat, Messages, Refused
from .target_text import TargetText
from .writer import Sampling, Writer, Written, loops

BROKEN = "\ufffd"  # stands for bytes that are no whole character
UNREADABLE = "prompt"  # the finish reason after a prompt too long, or refused
TO_ASK = Sampling(1.0, 0.95)  # questions should differ


@dataclass
class Draft:
    """A conversation in the making.

    Attributes:
        number: In the whole run; decides what is drawn for it.
        sampling: Of its answers.
        finish_reason: Of its last answer; "" before the first.
        open: More turns may follow.
    """

    number: int
    sampling: Sampling
    messages: Messages = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    finish_reason: str = ""
    open: bool = True

    @property
    def answered(self) -> bool:
        """Whether there is an answer in it."""
        return self.finish_reason != ""

    def add_answer(self, content: str, written: Written) -> None:
        """Append an answer; nothing can follow one that was cut off."""
        self.messages.append({"role": "assistant", "content": content})
        self.finish_reason = written.finish_reason
        self.open = written.finish_reason == "stop"

    def end(self) -> None:
        """Close it behind its last answer."""
        while self.messages and self.messages[-1]["role"] != "assistant":
            self.messages.pop()
        self.open = False


@dataclass(frozen=True)
class Dialogue:
    """The target in conversation, with itself or with given questions.

    Attributes:
        seed: Of the whole run.
        greedy: The share of conversations answered greedily.
        sampling: Of the other answers.
        max_tokens: Of an answer.
        max_question_tokens: Of a question after its opener.
        max_prompt_tokens: Longer prompts are not continued.
    """

    writer: Writer
    chat: Chat
    seed: int
    greedy: float
    sampling: Sampling
    max_tokens: int = 192
    max_question_tokens: int = 96
    max_prompt_tokens: int = 1536

    def draft(self, number: int, tools: list | None = None) -> Draft:
        """An empty conversation."""
        greedy = share_of(self.seed, "greedy", number) < self.greedy
        return Draft(number, Sampling() if greedy else self.sampling, tools=tools)

    def provenance(self, draft: Draft) -> dict[str, Any]:
        """Who wrote a conversation's answers, and how."""
        target = self.chat.target
        return {
            "regenerated_by": target_name(target),
            "revision": target.facts["revision"],
            "temperature": draft.sampling.temperature,
            "top_p": draft.sampling.top_p,
            "finish_reason": draft.finish_reason,
        }

    def answer(self, drafts: Sequence[Draft], turn: str) -> Counter[str]:
        """Let the target answer the open drafts; the others are left as they are.

        An answer that cannot be kept ends its draft at the answer before it; one that
        was cut off is kept and ends its draft.

        Args:
            turn: A name that no other turn of the run has; decides what is drawn.

        Returns:
            How many answers were left out, by reason.
        """
        dropped: Counter[str] = Counter()
        open_ones = [draft for draft in drafts if draft.open]
        for sampling in sorted({draft.sampling for draft in open_ones}, key=repr):
            group = [draft for draft in open_ones if draft.sampling == sampling]
            prompts = [self._before_answer(draft) for draft in group]
            written = self._write(prompts, self.max_tokens, sampling, f"{turn} answer")
            for draft, answer in zip(group, written, strict=True):
                flaw = self._flaw(answer)
                if flaw:
                    dropped[f"answer {flaw}"] += 1
                    draft.end()
                else:
                    draft.add_answer(self.chat.text(answer.tokens), answer)
        return dropped

    def ask(
        self, drafts: Sequence[Draft], openers: Sequence[str], turn: str
    ) -> Counter[str]:
        """Let the target write the next question of every open draft.

        A question that cannot be kept or was not finished ends its draft.

        Args:
            openers: How each draft's question begins.
            turn: A name that no other turn of the run has; decides what is drawn.

        Returns:
            How many questions were left out, by reason.
        """
        dropped: Counter[str] = Counter()
        pairs = zip(drafts, openers, strict=True)
        pairs = [(draft, opener) for draft, opener in pairs if draft.open]
        prompts = [self.chat.before_question(d.messages, opener) for d, opener in pairs]
        written = self._write(
            prompts, self.max_question_tokens, TO_ASK, f"{turn} question"
        )
        for (draft, opener), rest in zip(pairs, written, strict=True):
            flaw = self._flaw(rest)
            if rest.finish_reason == "length":
                flaw = flaw or "unfinished"
            if flaw:
                dropped[f"question {flaw}"] += 1
                draft.end()
            else:
                question = (opener + self.chat.text(rest.tokens)).strip()
                draft.messages.append({"role": "user", "content": question})
        return dropped

    def _before_answer(self, draft: Draft) -> list[int]:
        """The prompt of a draft's next answer; none where the template refuses it."""
        try:
            return self.chat.before_answer(draft.messages, draft.tools)
        except Refused:
            return []

    def _write(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        sampling: Sampling,
        draw: str,
    ) -> list[Written]:
        """What the target writes after each prompt that it can read."""
        done = [Written([], UNREADABLE)] * len(prompts)
        fitting = [
            n for n, p in enumerate(prompts) if 0 < len(p) <= self.max_prompt_tokens
        ]
        written = self.writer.write(
            [prompts[n] for n in fitting],
            max_tokens=max_tokens,
            sampling=sampling,
            seed=number_of(self.seed, draw, sampling),
        )
        for n, text in zip(fitting, written, strict=True):
            done[n] = text
        return done

    def _flaw(self, written: Written) -> str:
        """Why something cannot be kept; "" when it can."""
        if written.finish_reason == UNREADABLE:
            return "to an unreadable prompt"
        text = self.chat.text(written.tokens)
        if not text.strip():
            return "empty"
        if self.chat.is_marked(written.tokens):
            return "marked-up"
        if BROKEN in text:
            return "broken"
        return "looping" if loops(written.tokens) else ""


def target_name(target: TargetText) -> str:
    """A target as it may be told to others: a repository, or the name of a folder."""
    name = target.facts["name"]
    return name if target.facts["revision"] else Path(name).resolve().name


def number_of(*parts: object) -> int:
    """A number below 2**63 that depends on `parts` alone."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def share_of(*parts: object) -> float:
    """A number from 0 up to 1 that depends on `parts` alone."""
    return number_of(*parts) / 2**63
