"""Self-prompting: the target writes the questions too, so no data set is needed.

A question begins with an *opener*, the first words of a message of some domain, and
the target goes on from there at temperature 1.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_dflash2.errors import DFlash2Error

from .dialogue import Dialogue, Draft, number_of, share_of
from .split import prompt_key

OPENERS = Path(__file__).with_name("openers.jsonl")


@dataclass(frozen=True)
class SelfPrompting:
    """Rounds of conversations whose questions the target writes.

    Attributes:
        openers: By domain; the domains take turns.
        follow_ups: The share of conversations that get a second question.
        size: Conversations begun in a round.
    """

    dialogue: Dialogue
    openers: dict[str, list[str]]
    follow_ups: float
    size: int

    def round(
        self, number: int, before: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], Counter[str]]:
        """The conversations of a round, and what was left out of it.

        Args:
            before: The conversations of earlier rounds; their questions are not asked
                again.
        """
        drafts = [
            self.dialogue.draft(n)
            for n in range(number * self.size, (number + 1) * self.size)
        ]
        openers = [self._opener(draft.number) for draft in drafts]
        dropped = self.dialogue.ask(drafts, openers, f"{number} first")
        dropped += _end_repeated(drafts, before)
        dropped += self.dialogue.answer(drafts, f"{number} first")
        more = [draft for draft in drafts if self._goes_on(draft)]
        dropped += self.dialogue.ask(more, [""] * len(more), f"{number} second")
        dropped += self.dialogue.answer(more, f"{number} second")
        lines = [
            {
                "messages": draft.messages,
                "domain": self._domain(draft.number),
                "provenance": {"opener": opener, **self.dialogue.provenance(draft)},
            }
            for draft, opener in zip(drafts, openers, strict=True)
            if draft.answered
        ]
        return lines, dropped

    def exhausted(self, number: int) -> bool:
        """Whether there is no such round; the target can always go on."""
        return False

    def _domain(self, number: int) -> str:
        return list(self.openers)[number % len(self.openers)]

    def _opener(self, number: int) -> str:
        known = self.openers[self._domain(number)]
        return known[number_of(self.dialogue.seed, "opener", number) % len(known)]

    def _goes_on(self, draft: Draft) -> bool:
        return draft.open and (
            share_of(self.dialogue.seed, "follow-up", draft.number) < self.follow_ups
        )


def _end_repeated(drafts: list[Draft], before: list[dict[str, Any]]) -> Counter[str]:
    """End the drafts that ask what was asked already."""
    dropped: Counter[str] = Counter()
    known = {_question_key(line["messages"]) for line in before}
    for draft in drafts:
        if draft.open:
            key = _question_key(draft.messages)
            if key in known:
                dropped["question repeated"] += 1
                draft.end()
            known.add(key)
    return dropped


def _question_key(messages: list[dict[str, Any]]) -> int:
    return prompt_key(next(m["content"] for m in messages if m["role"] == "user"))


def read_openers(path: Path, domains: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Openers by domain, from JSON lines of `domain` and `opener`.

    Args:
        domains: Keep these only; () keeps all.

    Raises:
        DFlash2Error: The file cannot be read, or lacks a domain.
    """
    openers: dict[str, list[str]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                domain, opener = _opener_of(line, f"{path}: line {number}")
                openers.setdefault(domain, []).append(opener)
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
    for domain in domains:
        if domain not in openers:
            raise DFlash2Error(
                f"{path}: has no openers of {domain!r}; its domains are "
                f"{', '.join(openers)}"
            )
    return {name: openers[name] for name in domains or openers}


def _opener_of(line: str, where: str) -> tuple[str, str]:
    try:
        entry = json.loads(line)
        domain, opener = entry["domain"], entry["opener"]
    except (ValueError, KeyError, TypeError):
        domain = opener = None
    if not (isinstance(domain, str) and isinstance(opener, str)):
        raise DFlash2Error(
            f'{where}: expected {{"domain": "...", "opener": "..."}}, found '
            f"{line.strip()[:60]!r}"
        )
    return domain, opener
