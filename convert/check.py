"""Hold a converted folder against its source."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_dflash2.checkpoint import Source
from mlx_dflash2.sources import find_drafter

from .folders import Report
from .stored import StoredDrafter, parts, read_drafter

if TYPE_CHECKING:
    from .arrays import Recipe


@dataclass(frozen=True)
class CheckReport:
    """How a converted folder compares with its source.

    It has passed when no module is wrong; the gaps are for the reader to judge, since
    a cast or quantized drafter is meant to differ.

    Attributes:
        modules: Modules compared, a quantized weight with its scales as one.
        wrong: Those whose values are not what the conversion asked for, bit for bit.
        largest_gap: Largest absolute difference from the source's values; above 0
            only where they were cast, quantized or dequantized.
        largest_gap_tensor: Where it is; None while the gap is 0.
        logits_gap: Largest absolute difference between the block logits of the MLX
            and the torch drafter; None where torch is not installed.
    """

    modules: int
    wrong: tuple[str, ...]
    largest_gap: float
    largest_gap_tensor: str | None
    logits_gap: float | None

    @property
    def passed(self) -> bool:
        return not self.wrong

    def lines(self) -> list[str]:
        """The report as text, one fact a line."""
        exact = self.modules - len(self.wrong)
        lines = [f"{exact} of {self.modules} modules as asked for, bit for bit"]
        lines += [f"wrong: {name}" for name in self.wrong]
        where = f" in {self.largest_gap_tensor}" if self.largest_gap_tensor else ""
        lines.append(f"largest gap to the source: {self.largest_gap:.6g}{where}")
        lines.append(
            "block logits: not compared, torch is not installed"
            if self.logits_gap is None
            else f"largest gap between torch and MLX block logits: "
            f"{self.logits_gap:.6g}"
        )
        return lines


def check(
    report_or_source: Report | str | os.PathLike, destination: str | os.PathLike
) -> CheckReport:
    """Reload what a conversion wrote and compare it tensor by tensor.

    Every module is converted anew from the source and must have the same bits as the
    one written. Where torch is installed, both backends then run one block on the
    same random input.

    Args:
        report_or_source: What `to_mlx` or `to_torch` returned, or their source; what
            was asked for is then read off the two folders.
        destination: The folder they wrote.

    Raises:
        DFlash2Error: One of the two is not a complete drafter.
    """
    if isinstance(report_or_source, Report):
        source = read_drafter(report_or_source.source)
    else:
        source = read_drafter(find_drafter(report_or_source))
    written = read_drafter(Source(Path(destination), os.fspath(destination)))
    if isinstance(report_or_source, Report):
        recipe = report_or_source.recipe
    else:
        recipe = _recipe_between(source, written)
    return _compare(source, written, recipe)


def _recipe_between(source: StoredDrafter, written: StoredDrafter) -> "Recipe":
    """The recipe that would have led from one folder to the other."""
    from .arrays import Recipe

    dtypes = {name: written.dtype_of(name) for name in written.modules}
    kept = all(dtypes.get(name) == source.dtype_of(name) for name in source.modules)
    old = source.config.quantization if source.is_quantized else None
    new = written.config.quantization if written.is_quantized else None
    requantized = new is not None and new != old
    return Recipe(
        dequantize=old is not None and new != old,
        dtype=None if kept or len(set(dtypes.values())) > 1 else dtypes["norm.weight"],
        bits=new["bits"] if requantized else None,
        group_size=new["group_size"] if requantized else None,
    )


def _compare(
    source: StoredDrafter, written: StoredDrafter, recipe: "Recipe"
) -> CheckReport:
    from . import arrays
    from .parity import logits_gap

    wrong, gaps = [], {}
    modules = sorted({*source.modules, *written.modules})
    for name in modules:
        if name not in source.tensors or name not in written.tensors:
            wrong.append(name)
            continue
        asked = arrays.converted(source, name, recipe)
        found = [part for part in parts(name) if part in written.tensors]
        if set(found) != set(asked) or not all(
            arrays.same_bits(asked[part], arrays.read(written, part)) for part in found
        ):
            wrong.append(name)
        gaps[name] = arrays.largest_gap(
            arrays.dequantized(source, name), arrays.dequantized(written, name)
        )
    widest = max(gaps, key=gaps.__getitem__)
    return CheckReport(
        modules=len(modules),
        wrong=tuple(wrong),
        largest_gap=gaps[widest],
        largest_gap_tensor=widest if gaps[widest] > 0 else None,
        logits_gap=logits_gap(source, written),
    )
