"""Rows of tokens on disk: shards of safetensors and a manifest that names them all.

A shard holds its rows one behind the other: `tokens`, `supervised` and `document` of
the shape (T,), and `ends` of the shape (R,), where each row stops.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mlx_dflash2.checkpoint import new_folder
from mlx_dflash2.config_reader import ConfigReader, read_json
from mlx_dflash2.errors import DFlash2Error

SCHEMA = 1  # of the shards and the manifest
MANIFEST = "manifest.json"
ROWS_PER_SHARD = 4096
Item = TypeVar("Item")
COUNTS = ("rows", "documents", "tokens", "supervised")  # of a shard and of them all


@dataclass(frozen=True)
class Row:
    """One row to train on: whole documents, one behind the other.

    Attributes:
        tokens: Shape: (S,), int32.
        supervised: Answers and the tokens that end them. Shape: (S,), bool.
        document: 0, 1, ... in order. Documents never see each other, and each has
            positions of its own, from 0. Shape: (S,), int32.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    document: np.ndarray


@dataclass(frozen=True)
class Shard:
    """What the manifest says of one file."""

    file: str
    rows: int
    documents: int
    tokens: int
    supervised: int
    sha256: str


def write_shard(path: Path, rows: Sequence[Row]) -> Shard:
    """Write rows into one file; under its name it is whole or not there."""
    from safetensors.numpy import save_file

    tensors = {
        "tokens": np.concatenate([row.tokens for row in rows]).astype(np.int32),
        "supervised": np.concatenate([row.supervised for row in rows]).astype(bool),
        "document": np.concatenate([row.document for row in rows]).astype(np.int32),
        "ends": np.cumsum([len(row.tokens) for row in rows], dtype=np.int64),
    }
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial)
    with partial.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    partial.rename(path)
    return Shard(
        path.name,
        rows=len(rows),
        documents=sum(int(row.document[-1]) + 1 for row in rows),
        tokens=len(tensors["tokens"]),
        supervised=int(tensors["supervised"].sum()),
        sha256=sha256,
    )


def write_manifest(
    folder: Path, shards: Sequence[Shard], facts: dict[str, Any]
) -> None:
    """Write the manifest of a folder whose shards are there; it completes the folder.

    Args:
        facts: What else to record, such as the row length and the target.
    """
    counts = {name: sum(getattr(shard, name) for shard in shards) for name in COUNTS}
    manifest = {
        "schema": SCHEMA,
        **facts,
        **counts,
        "sha256": _combined(shards),
        "shards": [asdict(shard) for shard in shards],
    }
    write_json(folder / MANIFEST, manifest)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file; under its name it is whole or not there."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def write_rows(
    folder: Path,
    rows: Iterable[Row],
    manifest: dict[str, Any],
    *,
    rows_per_shard: int = ROWS_PER_SHARD,
) -> None:
    """Write rows into a new folder, which appears when all is written.

    Args:
        manifest: What else to record, such as the row length and the target.

    Raises:
        DFlash2Error: The folder exists.
    """
    with new_folder(folder) as partial:
        shards = [
            write_shard(partial / shard_name(number), part)
            for number, part in enumerate(chunks(rows, rows_per_shard))
        ]
        write_manifest(partial, shards, manifest)


def chunks(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of `size`, the last one shorter."""
    rest = iter(items)
    return iter(lambda: list(islice(rest, size)), [])


def shard_name(number: int) -> str:
    """The file name of a shard, by its number."""
    return f"rows-{number:05d}.safetensors"


def _combined(shards: Sequence[Shard]) -> str:
    """One sha256 for all shards, in order."""
    return hashlib.sha256("".join(s.sha256 for s in shards).encode()).hexdigest()


@dataclass(frozen=True)
class Visit:
    """One visit of a row in training."""

    epoch: int
    row: int


class RowSet(Sequence[Row]):
    """The rows of a folder; each is read from disk when it is asked for.

    Attributes:
        manifest: What the folder says of itself.
        sha256: Of all its shards; equal rows have equal sums.

    Raises:
        DFlash2Error: The folder is unfinished, damaged or of another schema.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / MANIFEST
        if not path.is_file():
            raise DFlash2Error(
                f"{path}: no such file, so these are no finished rows; run "
                "`mlx-dflash2 train prepare` to its end"
            )
        self.manifest = read_json(path)
        schema = ConfigReader(self.manifest, str(path)).integer("schema")
        if schema != SCHEMA:
            raise DFlash2Error(
                f"{path}: schema is {schema}, this version reads {SCHEMA}; prepare "
                "the rows again"
            )
        self._shards = [Shard(**shard) for shard in self.manifest["shards"]]
        self._check_sums(path)
        self.sha256: str = self.manifest["sha256"]
        self._first = np.cumsum([0, *(shard.rows for shard in self._shards)])
        self._opened: dict[int, _OpenShard] = {}

    def _check_sums(self, path: Path) -> None:
        for shard in self._shards:
            try:
                with (self.folder / shard.file).open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise DFlash2Error(
                    f"{self.folder / shard.file}: cannot be read ({error.strerror})"
                ) from None
            if found != shard.sha256:
                raise DFlash2Error(
                    f"{self.folder / shard.file}: its sha256 is {found}, {path.name} "
                    f"says {shard.sha256}; prepare the rows again"
                )
        if _combined(self._shards) != self.manifest.get("sha256"):
            raise DFlash2Error(
                f"{path}: sha256 is not that of its shards; prepare the rows again"
            )

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        if number not in self._opened:
            path = self.folder / self._shards[number].file
            self._opened[number] = _OpenShard(path)
        return self._opened[number].row(index - int(self._first[number]))

    def order(self, seed: int, epoch: int) -> np.ndarray:
        """Every row once, in the order of one epoch. Shape: (rows,)."""
        return order(len(self), seed=seed, epoch=epoch)

    def visits(self, seed: int, cursor: int = 0) -> Iterator[Visit]:
        """Row after row, epoch after epoch, without end.

        Args:
            seed: Of the run.
            cursor: How many visits came before; all the state there is.

        Raises:
            DFlash2Error: There are no rows.
        """
        if not len(self):
            raise DFlash2Error(f"{self.folder}: holds no rows; prepare more data")
        while True:
            epoch, start = divmod(cursor, len(self))
            for row in self.order(seed, epoch)[start:].tolist():
                yield Visit(epoch, row)
            cursor += len(self) - start


class _OpenShard:
    """A shard mapped into memory."""

    def __init__(self, path: Path):
        from safetensors import safe_open

        self._file = safe_open(path, framework="np")
        self._ends = np.concatenate([[0], self._file.get_tensor("ends")])

    def row(self, index: int) -> Row:
        start, end = self._ends[index : index + 2].tolist()
        names = ("tokens", "supervised", "document")
        return Row(*(self._file.get_slice(name)[start:end] for name in names))


def order(count: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of 0 .. count - 1 that depends on seed and epoch alone.

    The numbers are sorted by the random keys that SplitMix64 gives them (Steele, Lea
    and Flood 2014), in integers of 64 bits: the same everywhere and always.
    """
    label = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    start = np.frombuffer(label[:8], "<u8")
    keys = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(keys ^ (keys >> np.uint64(31)), kind="stable")
