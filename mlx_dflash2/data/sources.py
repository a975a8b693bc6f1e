"""Where texts come from: local files and data sets of the Hub, with their terms."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mlx_dflash2.conversations import Conversation, read_conversations
from mlx_dflash2.errors import DFlash2Error

from .hub import fetch
from .recipes import Take
from .terms import SourceTerms


@dataclass(frozen=True)
class TextFile:
    """A JSONL file of conversations, or of plain texts under `text`.

    Attributes:
        limit: Read no more than so many lines; None reads all.
    """

    path: Path
    is_text: bool = False
    limit: int | None = None

    def items(self) -> Iterator[Conversation | str]:
        """What it holds, in order.

        Raises:
            DFlash2Error: A line is no conversation.
        """
        read = _read_texts if self.is_text else read_conversations
        return islice(read(self.path), self.limit)


@dataclass(frozen=True)
class Source:
    """Files of one origin."""

    files: list[TextFile]
    terms: SourceTerms


def _read_texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def local_source(path: Path, limit: int | None) -> Source:
    """A file of the user's; only they know its terms.

    Raises:
        DFlash2Error: It cannot be read.
    """
    terms = SourceTerms(
        path.name,
        f"sha256 {file_sha256(path)}",
        obligations="a local file: see where it comes from",
        effect="not known here",
    )
    return Source([TextFile(path, limit=limit)], terms)


def hub_sources(
    takes: Sequence[Take],
    folder: Path,
    *,
    offline: bool,
    say: Callable[[str], None],
) -> tuple[list[Source], dict[str, str]]:
    """What is taken of the Hub's data sets, and their commits by the recipe's names.

    Raises:
        DFlash2Error: One of them cannot be had.
    """
    sources, revisions = [], {}
    for take in takes:
        dataset = take.dataset
        download, parts = fetch(take, folder / dataset.name, offline=offline, say=say)
        terms = SourceTerms(
            dataset.repo,
            download.revision,
            dataset.obligations,
            dataset.effect,
            dataset.licence,
            download.card_licence,
            download.card_sha256,
        )
        read = sum(part.read for part in parts)
        kept = sum(part.kept for part in parts)
        say(f"{dataset.repo}: {kept} usable of {read} rows, of {take.count} wanted")
        files = [TextFile(part.path, dataset.is_text) for part in parts if part.kept]
        sources.append(Source(files, terms))
        revisions[dataset.name] = download.revision
    return sources, revisions


def file_sha256(path: Path) -> str:
    """Raises: DFlash2Error: The file cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DFlash2Error(f"{path}: cannot be read ({error.strerror})") from None
