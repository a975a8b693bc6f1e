"""Text of the target's own for `train prepare`: answers written anew, or all of it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .sources import Source, TextFile
from .target_text import TargetText
from .terms import SourceTerms
from .writing import WritingOptions, write


@dataclass(frozen=True)
class Rewriting:
    """What the target shall write.

    Attributes:
        regenerate: Answer the questions of all conversations anew.
        self_prompt: Add so many conversations whose questions it writes too.
        greedy: The share of conversations answered greedily.
        temperature: Of the other answers.
        max_tokens: Of an answer.
        backend: "torch" or "mlx".
    """

    regenerate: bool = False
    self_prompt: int = 0
    greedy: float = 0.5
    temperature: float = 0.8
    max_tokens: int = 512
    backend: str = "torch"

    @property
    def asked(self) -> bool:
        """Whether the target shall write at all."""
        return self.regenerate or self.self_prompt > 0

    def lines(self) -> list[str]:
        """What is asked for, as a plan prints it."""
        how = (
            f"{self.greedy:.0%} greedily, the others at temperature "
            f"{self.temperature:g}, up to {self.max_tokens} tokens, by {self.backend}"
        )
        return [f"regenerate all answers: {how}"] * self.regenerate + [
            f"self-prompt {self.self_prompt} conversations: {how}"
        ] * (self.self_prompt > 0)


def rewritten(
    sources: Sequence[Source],
    rewriting: Rewriting,
    target: TargetText,
    base: WritingOptions,
    say: Callable[[str], None],
) -> list[Source]:
    """The sources with answers of the target, and what it wrote besides.

    Plain texts stay as they are. The terms of what was asked stay too.

    Args:
        base: The target and its thinking mode; `out` is the folder to write into.

    Raises:
        DFlash2Error: The target cannot be had, or an earlier run wrote otherwise.
    """
    base = replace(
        base,
        greedy=rewriting.greedy,
        temperature=rewriting.temperature,
        max_tokens=rewriting.max_tokens,
        backend=rewriting.backend,
    )
    folder, found = base.out, list(sources)
    folder.mkdir(exist_ok=True)
    written = []
    if rewriting.regenerate:
        questions = folder / "questions.jsonl"
        count = _gather(sources, questions)
        found = [
            replace(source, files=[file for file in source.files if file.is_text])
            for source in sources
        ]
        out = folder / "regenerated.jsonl"
        if count:
            asked = replace(base, out=out, conversations=count, regenerate=questions)
            write(asked, say)
            written.append(TextFile(out))
    if rewriting.self_prompt:
        out, count = folder / "self-prompted.jsonl", rewriting.self_prompt
        size = min(count, base.size)
        write(replace(base, out=out, conversations=count, size=size), say)
        written.append(TextFile(out, limit=count))
    return [*found, Source(written, _terms_of(target))]


def _gather(sources: Sequence[Source], path: Path) -> int:
    """Write the conversations of all sources into one file; how many there are."""
    count = 0
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        for source in sources:
            for text in source.files:
                for item in text.items() if not text.is_text else ():
                    entry = {"messages": item.messages, "source": source.terms.name}
                    tools = {"tools": item.tools} if item.tools else {}
                    line = json.dumps(entry | tools, ensure_ascii=False)
                    file.write(line + "\n")
                    count += 1
    partial.rename(path)
    return count


def _terms_of(target: TargetText) -> SourceTerms:
    return SourceTerms(
        f"answers by {target.facts['name']}",
        target.facts["revision"] or f"template {target.facts['template_sha256'][:16]}",
        obligations="the licence of the target governs what it writes",
        effect="that of the target's licence",
    )
