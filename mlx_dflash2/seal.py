"""Note what a folder holds when it is finished, and see later that it still does."""

import hashlib
import json
from pathlib import Path

from .config_reader import read_json
from .errors import DFlash2Error

SEAL = "unpacked.json"  # of each file its size, time of change and sha256


def seal(folder: Path) -> None:
    """Note what a finished folder of files holds."""
    known = {file.name: [*_looks(file), sha256(file)] for file in folder.iterdir()}
    (folder / SEAL).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def is_intact(folder: Path) -> bool:
    """Whether every file that was noted is as it was; False without a note.

    A file is read only if its time of change is another, as after a copy.
    """
    try:
        known = read_json(folder / SEAL)
        return all(_as_noted(folder / name, note) for name, note in known.items())
    except (DFlash2Error, OSError):
        return False


def sha256(file: Path) -> str:
    """The hash of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _as_noted(file: Path, note: list) -> bool:
    looks = _looks(file)
    if looks == note[:2]:
        return True
    return looks[0] == note[0] and sha256(file) == note[2]


def _looks(file: Path) -> list[int]:
    """What can be seen of a file without reading it."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]
