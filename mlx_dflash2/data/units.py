"""Units: runs of texts, each written as one shard a side and never again."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_dflash2.config_reader import read_json
from mlx_dflash2.conversations import Conversation

from .formatting import ChatFormat, Document
from .packing import pack, unpacked
from .rows import Shard, shard_name, write_json, write_shard
from .split import prompt_key

TRAIN, HELD_OUT = SIDES = ("train", "held_out")


@dataclass(frozen=True)
class RowFormat:
    """How texts become rows.

    Attributes:
        documents: How texts are written.
        row_length: Tokens a row may have.
        pack: Put several documents into a row.
        min_supervised: Documents with fewer tokens to learn are left out.
        held_out_below: Prompts with a key below this are held out.
    """

    documents: ChatFormat
    row_length: int
    pack: bool
    min_supervised: int
    held_out_below: int


@dataclass(frozen=True)
class Unit:
    """What came of one run of texts.

    Attributes:
        read: Texts.
        dropped: Answers and documents left out, by reason.
        shards: By side; None for a side without rows.
    """

    read: int
    dropped: dict[str, int]
    shards: dict[str, Shard | None]


def write_unit(
    folder: Path, number: int, items: Sequence[Conversation | str], form: RowFormat
) -> Unit:
    """Write the rows of one unit; one that is finished is read back.

    Args:
        folder: With the folders `units`, `train` and `held_out`.
    """
    path = folder / "units" / f"{number:05d}.json"
    if path.is_file():
        return _read_unit(path)
    documents: dict[str, list[Document]] = {side: [] for side in SIDES}
    dropped: Counter[str] = Counter()
    for item in items:
        side = HELD_OUT if prompt_key(item) < form.held_out_below else TRAIN
        documents[side] += _documents(item, form, dropped)
    shards: dict[str, Shard | None] = dict.fromkeys(SIDES)
    for side, found in documents.items():
        rows = pack(found, form.row_length) if form.pack else unpacked(found)
        if rows:
            shards[side] = write_shard(folder / side / shard_name(number), rows)
    unit = Unit(len(items), dict(dropped), shards)
    write_json(path, asdict(unit))
    return unit


def _read_unit(path: Path) -> Unit:
    facts = read_json(path)
    shards = {
        side: None if shard is None else Shard(**shard)
        for side, shard in facts["shards"].items()
    }
    return Unit(facts["read"], facts["dropped"], shards)


def _documents(
    item: Conversation | str, form: RowFormat, dropped: Counter[str]
) -> list[Document]:
    """The documents of one text that are worth training on."""
    if isinstance(item, str):
        found = [form.documents.text(item)]
    else:
        formatted = form.documents.format(item)
        found = formatted.documents
        dropped.update(formatted.dropped)
    found = [document.cut(form.row_length) for document in found]
    kept = [d for d in found if d.supervised.sum() >= form.min_supervised]
    if len(kept) < len(found):
        least = f"fewer than {form.min_supervised} tokens to learn"
        dropped[least] += len(found) - len(kept)
    return kept
