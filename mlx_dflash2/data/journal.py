"""A file of JSON lines that grows by rounds and survives being killed.

    FILE.jsonl                the lines
    FILE.jsonl.progress.json  the settings, and where every finished round ended

A round's lines are on disk before its end is noted, and whatever stands behind the
last noted end that the file reaches is cut off when it is opened again.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from mlx_dflash2.config_reader import read_json
from mlx_dflash2.errors import DFlash2Error

from .rows import write_json


class Journal:
    """Opens or begins such a file.

    Args:
        settings: What decides its content.

    Attributes:
        lines: Everything written so far, parsed.
        dropped: What was left out so far, by reason.

    Raises:
        DFlash2Error: The file was begun with other settings, or not by this class.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, settings
        self._notes = path.with_name(f"{path.name}.progress.json")
        self._rounds: list[dict[str, Any]] = []
        if self._notes.exists():
            self._resume()
        elif path.exists():
            raise DFlash2Error(
                f"{path}: already exists, without {self._notes.name}; choose another "
                "name or remove it first"
            )
        self.lines = self._cut()
        self.dropped: Counter[str] = Counter()
        for done in self._rounds:
            self.dropped.update(done["dropped"])

    @property
    def rounds(self) -> int:
        """How many rounds are on disk."""
        return len(self._rounds)

    def append(self, lines: list[dict[str, Any]], dropped: Counter[str]) -> None:
        """Add a round."""
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
            end = file.tell()
        self._rounds.append({"end": end, "dropped": dict(dropped)})
        self._note()
        self.lines += lines
        self.dropped.update(dropped)

    def _resume(self) -> None:
        notes = read_json(self._notes)
        for name in sorted({*notes["settings"], *self.settings}):
            found, asked = notes["settings"].get(name), self.settings.get(name)
            if found != asked:
                raise DFlash2Error(
                    f"{self.path}: was begun with {name} {found!r}, now it is "
                    f"{asked!r}; keep the settings or choose another file"
                )
        self._rounds = notes["rounds"]

    def _cut(self) -> list[dict[str, Any]]:
        """Leave only whole rounds, and read them."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        size = self.path.stat().st_size
        self._rounds = [done for done in self._rounds if done["end"] <= size]
        os.truncate(self.path, self._rounds[-1]["end"] if self._rounds else 0)
        self._note()
        with self.path.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def _note(self) -> None:
        write_json(self._notes, {"settings": self.settings, "rounds": self._rounds})
