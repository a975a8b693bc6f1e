"""The prompts that a bench decodes."""

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_dflash2.conversations import Conversation, read_conversations
from mlx_dflash2.errors import DFlash2Error

PROMPTS = Path(__file__).with_name("prompts.jsonl")
FIELD = "domain"  # groups conversations where no other field is asked for
TOTAL = "overall"  # what reports call all domains together
UNGROUPED = "data"  # the one group of a file without that field


@dataclass(frozen=True)
class Prompt:
    """What the target is asked to go on with.

    Attributes:
        name: Unique in a workload.
        tools: OpenAI functions for the chat template; None without any.
    """

    name: str
    domain: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None

    @property
    def sha256(self) -> str:
        """Of messages and tools, whatever their name and domain."""
        return _sha256([self.messages, self.tools])


@dataclass(frozen=True)
class Workload:
    """The prompts of a bench, domain by domain.

    Attributes:
        source: "built-in", or the file's name.
    """

    prompts: list[Prompt]
    source: str

    @property
    def sha256(self) -> str:
        """Of everything in the prompts; where they were read from does not matter."""
        return _sha256([asdict(prompt) for prompt in self.prompts])

    def as_dict(self) -> dict[str, Any]:
        """What a record keeps of it."""
        domains = dict(Counter(prompt.domain for prompt in self.prompts))
        return {"sha256": self.sha256, "source": self.source, "domains": domains}


def built_in(
    *, domains: Collection[str] | None = None, per_domain: int | None = None
) -> Workload:
    """The prompts that come with the package, the first of each domain.

    Args:
        domains: Only these; all without.
        per_domain: At most this many of each; all without.

    Raises:
        DFlash2Error: There is no such domain.
    """
    prompts = (
        Prompt(read.fields["name"], read.fields[FIELD], read.prompt(), read.tools)
        for read in read_conversations(PROMPTS)
    )
    chosen = _choose(prompts, domains, per_domain, where="the built-in prompts")
    return Workload(chosen, "built-in")


def from_file(
    path: Path,
    *,
    group_by: str | None = None,
    domains: Collection[str] | None = None,
    per_domain: int | None = None,
) -> Workload:
    """Conversations of a JSONL file without their final answer, some of each group.

    Args:
        group_by: The field that names a conversation's group. Without it `domain`, and
            where no line has that, the whole file is one group, "data".
        domains: Only these groups; all without.
        per_domain: At most this many of each; all without.

    Raises:
        DFlash2Error: The file is not one of conversations, some lack the group's field,
            one has nothing to answer, or there is no such group.
    """
    prompts = (
        Prompt(f"{group}-{read.line}", group, read.prompt(), read.tools)
        for group, read in _grouped(read_conversations(path), group_by)
    )
    chosen = _choose(prompts, domains, per_domain, where=str(path))
    return Workload(chosen, path.name)


def _grouped(
    conversations: Iterable[Conversation], field: str | None
) -> Iterator[tuple[str, Conversation]]:
    """Every conversation with the name of its group."""
    first = None
    for read in conversations:
        group = read.group(field or FIELD)
        if group is None and field is not None:
            raise DFlash2Error(f"{read.where}: has no field {field!r} to group by")
        if group == TOTAL:
            raise DFlash2Error(
                f"{read.where}: a group is named {TOTAL}, as reports call all of them "
                "together; choose another name"
            )
        first = first or read
        if (group is None) != (first.group(field or FIELD) is None):
            has, lacks = (first, read) if group is None else (read, first)
            raise DFlash2Error(
                f"{read.source}: line {has.line} has the field {FIELD!r}, line "
                f"{lacks.line} has not; give it to all lines or to none, or group by "
                "another field"
            )
        yield group or UNGROUPED, read


def _choose(
    prompts: Iterable[Prompt],
    domains: Collection[str] | None,
    per_domain: int | None,
    *,
    where: str,
) -> list[Prompt]:
    """The first prompts of each domain, domains in the order they are met."""
    found: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        chosen = found.setdefault(prompt.domain, [])
        if per_domain is None or len(chosen) < per_domain:
            chosen.append(prompt)
    for domain in domains or ():
        if domain not in found:
            raise DFlash2Error(
                f"{where}: no domain {domain!r}, expected one of {', '.join(found)}"
            )
    return [
        prompt
        for domain, chosen in found.items()
        if not domains or domain in domains
        for prompt in chosen
    ]


def _sha256(content: Any) -> str:
    """Over JSON without spaces. Keys keep their order: chat templates write them so."""
    text = json.dumps(content, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
