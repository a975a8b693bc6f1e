"""What the target computes for training rows, on disk instead of computed again.

    features/3f0c9a5e1b7d2468/facts.json      what the numbers are of
    features/3f0c9a5e1b7d2468/row-000017.npy  the states of a row, in float16

The folder's name is a hash of the facts: numbers of another target, of other rows,
taps or precision lie elsewhere and are never read. A file has its name only when it is
whole, so a run that is killed loses the row it was at.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.data.rows import Row, RowSet
from mlx_dflash2.errors import DFlash2Error

from ..target import Target
from .batch import Batch
from .features import Captured, capture, tap_names
from .feed import Part
from .objective import Objective
from .precision import check_finite

KEPT = np.dtype(np.float16)
CURE = "leave out cache_features, or choose other drafter.taps"


def bytes_a_token(drafter: DrafterConfig, objective: Objective) -> int:
    """What a cache takes: the taps, and the final rows where a term needs a teacher."""
    states = len(drafter.target_layer_ids) + objective.needs_teacher
    return states * drafter.hidden_size * KEPT.itemsize


@dataclass(frozen=True)
class FeatureCache:
    """Captures a row when it is first asked for, and from then on reads it.

    The first time, too, it gives what it has written and read. Each document of a row
    runs alone, so the numbers do not depend on what else is in a batch. The processes
    of a run share the folder; each captures what it visits and does not find.

    Attributes:
        target: The model.
        taps: Its layers whose outputs are kept.
        teaches: Whether its rows after the final norm are kept as well.
        fingerprint: Of its files.
        folder: Of this cache and others.
    """

    target: Target
    taps: tuple[int, ...]
    teaches: bool
    fingerprint: str
    folder: Path

    def __call__(self, part: Part) -> Captured:
        """The states of a batch; `last` has the width 0 if it is not kept.

        Raises:
            DFlash2Error: A value does not fit into float16, or a file cannot be
                written.
        """
        rows = [self._row(part.rows, number) for number in part.numbers]
        shape = (*part.batch.tokens.shape, rows[0].shape[1])
        padded = np.zeros(shape, KEPT)
        for index, states in enumerate(rows):
            padded[index, : len(states)] = states
        model = self.target.model
        states = torch.from_numpy(padded).to(model.device).to(model.dtype)
        tapped = len(self.taps) * self.target.hidden_size
        return Captured(states[..., :tapped], states[..., tapped:])

    def demand_room(self, sets: Sequence[RowSet], token: int) -> None:
        """Refuse to begin what the disk has no room for.

        Args:
            sets: All rows of a run.
            token: Bytes of each.

        Raises:
            DFlash2Error: What is missing needs more than there is.
        """
        tokens = sum(
            len(row.tokens)
            for rows in sets
            for number, row in enumerate(rows)
            if not self._file(rows, number).exists()
        )
        there = next(p for p in (self.folder, *self.folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        if tokens * token > free:
            raise DFlash2Error(
                f"{self.folder}: the features of {tokens} tokens need "
                f"{tokens * token / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; "
                "make room, name another folder with --set features=FOLDER, or leave "
                "out cache_features"
            )

    def _row(self, rows: RowSet, number: int) -> np.ndarray:
        """The states of a row, mapped into memory. Shape: (S, width)."""
        file = self._file(rows, number)
        if not file.exists():
            facts = file.with_name("facts.json")
            if not facts.exists():
                _put(facts, _json(self._facts(rows)))
            states = io.BytesIO()
            np.save(states, self._captured(rows[number], f"row {number}"))
            _put(file, states.getbuffer())
        return np.load(file, mmap_mode="r")

    def _captured(self, row: Row, where: str) -> np.ndarray:
        parts = []
        for document in documents(row):
            batch = Batch.of([document], self.target.device)
            captured = capture(self.target, batch, self.taps)
            kept = [captured.features, captured.last][: 1 + self.teaches]
            parts.append(torch.cat(kept, dim=-1)[0].to(torch.float16))
        states, names = torch.cat(parts), tap_names(self.taps)
        if self.teaches:
            names.append("final norm")
        check_finite(states, names, cure=CURE)
        return states.cpu().numpy()

    def _facts(self, rows: RowSet) -> dict[str, Any]:
        return {
            "target": self.fingerprint,
            "computed_in": str(self.target.model.dtype),
            "rows": rows.sha256,
            "taps": list(self.taps),
            "final_rows": self.teaches,
        }

    def _file(self, rows: RowSet, number: int) -> Path:
        name = hashlib.sha256(_json(self._facts(rows))).hexdigest()[:16]
        return self.folder / name / f"row-{number:06d}.npy"


def documents(row: Row) -> Iterator[Row]:
    """Each document of a row as a row of its own."""
    begins = np.flatnonzero(np.diff(row.document, prepend=-1))
    for start, end in pairwise([*begins.tolist(), len(row.tokens)]):
        own = slice(start, end)
        yield Row(row.tokens[own], row.supervised[own], row.document[own] * 0)


def _json(facts: dict[str, Any]) -> bytes:
    return json.dumps(facts, indent=1).encode()


def _put(path: Path, content: bytes | memoryview) -> None:
    """Write a file; under its name it is whole or not there."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DFlash2Error(
            f"{path}: cannot be written ({error.strerror}); what is there stays good "
            "for --resume"
        ) from None
