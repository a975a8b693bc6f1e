"""`mlx-dflash2 convert`: convert a drafter's folder and check the result."""

from typing import Any

import click

from ..errors import DFlash2Error
from .drafters import print_terms


def run_convert(options: dict[str, Any]) -> int:
    """Convert, print the report, optionally check; the exit code."""
    from mlx_dflash2.convert import check, to_mlx, to_torch

    mlx, torch = options.pop("to_mlx"), options.pop("to_torch")
    quantize, wants_check = options.pop("quantize"), options.pop("check")
    bits, group = options.pop("q_bits"), options.pop("q_group_size")
    if mlx == torch:
        raise DFlash2Error("say which way: --to-mlx or --to-torch, one of them")
    if not quantize and (bits is not None or group is not None):
        raise DFlash2Error("--q-bits and --q-group-size need -q")
    if quantize and torch:
        raise DFlash2Error("-q is MLX's format, torch runtimes do not read it")
    if quantize:
        options["quantize_bits"] = 4 if bits is None else bits
        options["quantize_group_size"] = 64 if group is None else group
    print_terms(options["source"])
    report = (to_mlx if mlx else to_torch)(
        options.pop("source"), options.pop("destination"), **options
    )
    click.echo("\n".join(report.lines()))
    if not wants_check:
        return 0
    checked = check(report, report.destination)
    click.echo("\n".join(checked.lines()))
    return 0 if checked.passed else 1
