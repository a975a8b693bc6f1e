"""Rows of the Hub's data sets, streamed once into local JSONL files.

Each file of a data set becomes one part here, whole or not there, so an interrupted
download goes on with the next part. The first download fixes the commit.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_dflash2.checkpoint import explained
from mlx_dflash2.config_reader import read_json
from mlx_dflash2.conversations import conversation_from
from mlx_dflash2.errors import DFlash2Error

from .recipes import Dataset, Take
from .rows import write_json

SOURCE = "source.json"
BATCH = 256  # rows of Parquet held in memory
SUFFIXES = (".parquet", ".jsonl")


@dataclass(frozen=True)
class Download:
    """A data set as it was found on the Hub.

    Attributes:
        take: What is taken of it, see `recipes.Take`.
        revision: The commit.
        card_licence: As the card's header states it; None if it does not.
        card_sha256: Of the card's text; None without a card.
        files: Those that match the recipe's pattern, in order.
    """

    take: dict[str, Any]
    revision: str
    card_licence: str | None
    card_sha256: str | None
    files: list[str]


@dataclass(frozen=True)
class Part:
    """The rows of one file. `kept` of them are usable and lie in `path`."""

    path: Path
    read: int
    kept: int


def fetch(
    take: Take, folder: Path, *, offline: bool, say: Callable[[str], None]
) -> tuple[Download, list[Part]]:
    """Bring what is taken of a data set into a folder; what is there is kept.

    Args:
        offline: Open no connection: all must be there.
        say: Told of progress.

    Raises:
        DFlash2Error: The data set cannot be had, or the folder holds another take.
    """
    download = _found(take, folder, offline=offline)
    parts = []
    for number, file in enumerate(download.files):
        start, stop = share(take, number, len(download.files))
        if start < stop:
            path = folder / f"part-{number:05d}.jsonl"
            if not _facts(path).is_file():
                _refuse_offline(take.dataset, offline)
                say(f"{take.dataset.repo}: {file}, rows {start} to {stop - 1}")
                rows = _rows(take.dataset, download.revision, file, start, stop)
                _write_part(path, rows, take.dataset)
            parts.append(Part(path, **read_json(_facts(path))))
    return download, parts


def share(take: Take, number: int, files: int) -> tuple[int, int]:
    """The first and the end row of one file's share: all files give alike."""

    def of(rows: int) -> int:
        return rows // files + (number < rows % files)

    return of(take.first), of(take.first + take.count)


def as_entry(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """A row of a data set as a line of a local file: `messages` or `text`.

    Raises:
        DFlash2Error: It is neither a conversation nor a text.
    """
    found = {name: row.get(column) for name, column in columns.items()}
    if "prompt" in columns:
        asked, answered = found["prompt"], found["answer"]
        found = {
            "messages": [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": answered},
            ]
        }
    if "text" not in found:
        conversation_from(found, source="row", line=0)
    elif not isinstance(found["text"], str) or not found["text"].strip():
        raise DFlash2Error(f"text is {found['text']!r}, expected a text")
    return found


def _found(take: Take, folder: Path, *, offline: bool) -> Download:
    """The download that the folder is for, begun if there is none."""
    path = folder / SOURCE
    if path.is_file():
        download = Download(**read_json(path))
        if download.take != asdict(take):
            raise DFlash2Error(
                f"{path}: is of another take of {take.dataset.repo}; choose another "
                "--out, or remove this one"
            )
        return download
    _refuse_offline(take.dataset, offline)
    download = _look_up(take)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(download))
    return download


def _refuse_offline(dataset: Dataset, offline: bool) -> None:
    from huggingface_hub import constants

    if offline or constants.HF_HUB_OFFLINE:
        raise DFlash2Error(
            f"{dataset.repo}: not here in full, and no connection may be opened; run "
            "once without --offline and HF_HUB_OFFLINE"
        )


def _look_up(take: Take) -> Download:
    from huggingface_hub import HfApi, constants, errors

    dataset, api = take.dataset, HfApi(endpoint=constants.ENDPOINT)
    place = {"repo_id": dataset.repo, "repo_type": "dataset"}
    try:
        info = api.repo_info(**place, revision=dataset.revision)
        files = api.list_repo_files(**place, revision=info.sha)
        card = None
        if "README.md" in files:
            card = api.hf_hub_download(**place, filename="README.md", revision=info.sha)
    except (errors.HTTPError, OSError, ValueError) as error:
        raise explained(error, dataset.repo, dataset.revision, False) from None
    matching = sorted(file for file in files if fnmatch(file, dataset.files))
    readable = [file for file in matching if file.endswith(SUFFIXES)]
    if not readable:
        raise DFlash2Error(
            f"{dataset.repo}: no Parquet or JSONL file matches {dataset.files!r}; it "
            f"holds {', '.join(files[:8])}{' ...' if len(files) > 8 else ''}"
        )
    text = Path(card).read_bytes() if card else None
    return Download(
        asdict(take),
        info.sha,
        card_licence=(info.card_data or {}).get("license"),
        card_sha256=hashlib.sha256(text).hexdigest() if text is not None else None,
        files=readable,
    )


def _rows(
    dataset: Dataset, revision: str, file: str, start: int, stop: int
) -> Iterator[dict[str, Any]]:
    """Rows `start` to `stop` of a remote file; only the ranges that hold them move."""
    from huggingface_hub import HfFileSystem, constants, errors

    system = HfFileSystem(endpoint=constants.ENDPOINT, skip_instance_cache=True)
    try:
        with system.open(f"datasets/{dataset.repo}@{revision}/{file}") as opened:
            read = _parquet_rows if file.endswith(".parquet") else _jsonl_rows
            yield from read(opened, dataset, start, stop)
    except (errors.HTTPError, OSError, ValueError) as error:
        raise explained(error, f"{dataset.repo}/{file}", revision, False) from None


def _parquet_rows(
    opened, dataset: Dataset, start: int, stop: int
) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise DFlash2Error(
            "reading Parquet files needs pyarrow; pip install 'mlx-dflash2[train]'"
        ) from None

    table = parquet.ParquetFile(opened)
    columns = list(dataset.columns.values())
    missing = set(columns) - set(table.schema_arrow.names)
    if missing:
        raise DFlash2Error(
            f"{dataset.repo}: has no column {min(missing)}, but "
            f"{', '.join(table.schema_arrow.names)}; correct the recipe"
        )
    first = 0
    for group in range(table.num_row_groups):
        end = first + table.metadata.row_group(group).num_rows
        if end > start and first < stop:
            batches = table.iter_batches(BATCH, row_groups=[group], columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            yield from islice(rows, max(start - first, 0), stop - first)
        first = end


def _jsonl_rows(
    opened, dataset: Dataset, start: int, stop: int
) -> Iterator[dict[str, Any]]:
    for line in islice(opened, start, stop):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        yield row if isinstance(row, dict) else {}


def _write_part(path: Path, rows: Iterator[dict[str, Any]], dataset: Dataset) -> None:
    """Write the usable rows, then the facts that say the part is whole."""
    partial = path.with_name(f".{path.name}.partial")
    read = kept = 0
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            read += 1
            try:
                entry = as_entry(row, dataset.columns)
            except DFlash2Error:
                continue
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            kept += 1
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    write_json(_facts(path), {"read": read, "kept": kept})


def _facts(path: Path) -> Path:
    return path.with_suffix(".json")
