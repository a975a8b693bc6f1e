"""Convert a drafter's folder, file by file, into a new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_dflash2.checkpoint import (
    EVERY_FILE,
    Source,
    new_folder,
    refuse_existing,
)
from mlx_dflash2.config_reader import CODE_KEYS
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.names import quantizable
from mlx_dflash2.sources import find_drafter

from .settings import published_config
from .sidecars import copy_sidecars, left_behind
from .stored import FLOATS, StoredDrafter, read_drafter
from .weights import Weights, write_json

if TYPE_CHECKING:
    from .arrays import Recipe

GROUP_SIZE = 64  # mlx-lm's default


@dataclass(frozen=True)
class Report:
    """What a conversion wrote.

    Attributes:
        destination: The new folder.
        source: Where the drafter was read from.
        recipe: What was done to the values.
        tensors: How many tensors were written.
        bytes: Their size.
        dtypes: How many tensors of each type.
        written: Files made: config.json, weights, index.
        copied: Files taken over byte for byte.
        notes: What the user should know; one sentence each.
    """

    destination: Path
    source: Source
    recipe: "Recipe"
    tensors: int
    bytes: int
    dtypes: dict[str, int]
    written: tuple[str, ...]
    copied: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def revision(self) -> str | None:
        """The commit that was read; None for a local folder."""
        return self.source.revision

    def lines(self) -> list[str]:
        """The report as text, one fact a line."""
        types = ", ".join(f"{count} {name}" for name, count in self.dtypes.items())
        origin = self.source.name
        if self.revision is not None:
            origin += f" at {self.revision}"
        return [
            f"{origin} -> {self.destination}",
            f"{self.tensors} tensors ({types}), {self.bytes:,} bytes",
            f"written: {', '.join(self.written)}",
            f"copied: {', '.join(self.copied) or 'nothing'}",
            *self.notes,
        ]


def to_mlx(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    dtype: str | None = None,
    quantize_bits: int | None = None,
    quantize_group_size: int | None = None,
    dequantize: bool = False,
) -> Report:
    """Write a drafter as a folder that this package loads.

    Without `dtype`, quantization or `dequantize` every value keeps its bits. With
    several of them the weights are dequantized first, cast next, quantized last.

    Args:
        source: A folder or a Hub repository.
        destination: The folder to make; it must not exist.
        revision: Branch, tag or commit of a repository.
        offline: Use the local Hub cache only.
        dtype: `float32`, `float16` or `bfloat16`.
        quantize_bits: Bits of the backbone's quantized linear layers.
        quantize_group_size: Weights that share a scale; 64 unless given.
        dequantize: Turn a quantized drafter into a plain one.

    Raises:
        DFlash2Error: The source is no drafter, the request does not fit it, or the
            destination cannot be written. Nothing is left at `destination` then.
    """
    if quantize_group_size is not None and quantize_bits is None:
        raise DFlash2Error("quantize_group_size is given without quantize_bits")
    if quantize_bits is not None and quantize_group_size is None:
        quantize_group_size = GROUP_SIZE
    recipe = _recipe(dtype, dequantize, quantize_bits, quantize_group_size)
    return _convert(source, destination, "mlx", recipe, revision, offline)


def to_torch(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    *,
    revision: str | None = None,
    offline: bool = False,
    dtype: str | None = None,
    dequantize: bool = False,
) -> Report:
    """Write a drafter in the published spelling that torch runtimes read.

    A quantized drafter needs `dequantize`; arguments and errors are those of
    `to_mlx`.
    """
    recipe = _recipe(dtype, dequantize)
    return _convert(source, destination, "pt", recipe, revision, offline)


def _recipe(
    dtype: str | None,
    dequantize: bool,
    bits: int | None = None,
    group_size: int | None = None,
) -> "Recipe":
    from .arrays import Recipe, check_quantization

    if dtype is not None and dtype not in FLOATS.values():
        raise DFlash2Error(
            f"dtype {dtype!r} is not supported; choose {', '.join(FLOATS.values())}"
        )
    if bits is not None:
        check_quantization(bits, group_size)
    return Recipe(dequantize, dtype, bits, group_size)


def _convert(
    source: str | os.PathLike,
    destination: str | os.PathLike,
    form: str,
    recipe: "Recipe",
    revision: str | None,
    offline: bool,
) -> Report:
    try:
        folder = Path(os.path.abspath(Path(destination).expanduser()))
    except RuntimeError as error:  # no such ~user
        raise DFlash2Error(f"{destination}: {error}") from None
    refuse_existing(folder)
    found = find_drafter(source, revision=revision, offline=offline, files=EVERY_FILE)
    if folder.resolve().is_relative_to(found.folder.resolve()):
        raise DFlash2Error(
            f"{destination}: lies inside the source {found.name}; choose a folder "
            "outside it"
        )
    drafter = read_drafter(found)
    _refuse_unfit(drafter, recipe, form)
    with _writing(folder) as partial:
        weights = Weights(partial, form)
        for modules in _modules_by_file(drafter):
            weights.write(drafter, modules, recipe)
        weights.finish()
        _write_config(partial, drafter, recipe, weights)
        copied = copy_sidecars(found.folder, partial)
        read_drafter(Source(partial, str(destination)))
        written = {"config.json", *(file.name for file in partial.iterdir())}
    return Report(
        destination=folder,
        source=found,
        recipe=recipe,
        tensors=len(weights.file_of),
        bytes=weights.bytes,
        dtypes=dict(sorted(weights.dtypes.items())),
        written=tuple(sorted(written - set(copied))),
        copied=copied,
        notes=_notes(drafter),
    )


def _refuse_unfit(drafter: StoredDrafter, recipe: "Recipe", form: str) -> None:
    """Refuse a recipe that does not fit the source, before anything is written."""
    name = drafter.source.name
    if recipe.dequantize and not drafter.is_quantized:
        raise DFlash2Error(f"{name}: is not quantized, so there is nothing to undo")
    if drafter.is_quantized and not recipe.dequantize:
        if form == "pt":
            raise DFlash2Error(
                f"{name}: is quantized, which torch runtimes do not read; add -d to "
                "dequantize it"
            )
        if recipe.bits is not None:
            raise DFlash2Error(
                f"{name}: is quantized already; add -d to dequantize it first"
            )
    if recipe.bits is None:
        return
    for module in filter(quantizable, drafter.modules):
        width = drafter.tensors[module].shape[1]
        if drafter.holds_quantized(module):
            width = width * 32 // drafter.config.quantization["bits"]
        if width % recipe.group_size:
            raise DFlash2Error(
                f"{name}: {module} has {width} columns, which groups of "
                f"{recipe.group_size} do not divide; choose another group size"
            )


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """`new_folder`, with a failed write told in one line."""
    try:
        with new_folder(folder) as partial:
            yield partial
    except OSError as error:
        raise DFlash2Error(
            f"{folder}: could not be written ({error}); nothing was left there"
        ) from None


def _modules_by_file(drafter: StoredDrafter) -> list[list[str]]:
    """The modules of each source file; the new folder keeps this division."""
    files: dict[Path, list[str]] = {}
    for name in drafter.modules:
        files.setdefault(drafter.tensors[name].file, []).append(name)
    return [files[file] for file in sorted(files)]


def _write_config(
    partial: Path, drafter: StoredDrafter, recipe: "Recipe", weights: Weights
) -> None:
    quantization = None
    if recipe.bits is not None:
        quantization = {"group_size": recipe.group_size, "bits": recipe.bits}
    elif drafter.is_quantized and not recipe.dequantize:
        quantization = drafter.config.quantization
    origin = None
    if drafter.source.revision is not None:
        origin = {
            "repository": drafter.source.name,
            "revision": drafter.source.revision,
        }
    config = published_config(
        drafter.raw,
        drafter.config,
        dtype=weights.leading_dtype(),
        quantization=quantization,
        origin=origin,
    )
    write_json(partial / "config.json", config)


def _notes(drafter: StoredDrafter) -> tuple[str, ...]:
    folder = drafter.source.folder
    notes = []
    code = [key for key in CODE_KEYS if drafter.raw.get(key) is not None]
    if code:
        notes.append(
            f"{' and '.join(code)} left out of config.json: code that comes with a "
            "model is never run"
        )
    if drafter.left_out:
        notes.append(
            f"left out {', '.join(drafter.left_out)}: computed from rope_theta instead"
        )
    used = {tensor.file.name for tensor in drafter.tensors.values()}
    behind = left_behind(folder, used)
    if behind:
        notes.append(f"not taken over: {', '.join(behind)}")
    return tuple(notes)
