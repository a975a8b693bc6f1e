"""The safetensors files of a new folder, written one at a time."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_dflash2.checkpoint import INDEX

from .stored import FLOATS, StoredDrafter

if TYPE_CHECKING:
    from .arrays import Recipe


@dataclass
class Weights:
    """Writes the tensors of a folder; no more than one file is in memory.

    Attributes:
        folder: Where the files go.
        form: What they are for, `mlx` or `pt`, told in their metadata.
        files: Files written so far, under working names.
        file_of: The file of each tensor, counted from 0.
        bytes: Size of the tensors.
        dtypes: Tensors of each type.
        elements: Numbers of each type.
    """

    folder: Path
    form: str
    files: list[Path] = field(default_factory=list)
    file_of: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)

    def write(
        self, drafter: StoredDrafter, modules: list[str], recipe: "Recipe"
    ) -> None:
        """Convert `modules` of the source into the next file."""
        from . import arrays

        values = {}
        for name in modules:
            values |= arrays.converted(drafter, name, recipe)
        metadata = arrays.metadata_of(drafter.tensors[modules[0]].file)
        file = self.folder / f"model-{len(self.files) + 1:05d}.safetensors"
        arrays.save(file, values, metadata | {"format": self.form})
        for name, value in values.items():
            dtype = arrays.dtype_name(value)
            self.file_of[name] = len(self.files)
            self.bytes += value.nbytes
            self.dtypes[dtype] += 1
            self.elements[dtype] += value.size
        self.files.append(file)

    def finish(self) -> None:
        """Give the files their final names, and several of them an index."""
        count = len(self.files)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for file, name in zip(self.files, names, strict=True):
            file.rename(self.folder / name)
        if count > 1:
            index = {
                "metadata": {"total_size": self.bytes},
                "weight_map": {n: names[self.file_of[n]] for n in sorted(self.file_of)},
            }
            write_json(self.folder / INDEX, index)

    def leading_dtype(self) -> str:
        """The floating type of most numbers, which config.json names."""
        return max(sorted(FLOATS.values()), key=lambda name: self.elements[name])


def write_json(path: Path, content: dict) -> None:
    """Write a JSON file as people read it."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
