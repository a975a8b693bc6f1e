"""`mlx-dflash2 convert`: convert a drafter's folder and check the result."""

from typing import Any

import click

from ..errors import DFlash2Error


def run_convert(options: dict[str, Any]) -> int:
    """Convert, print the report, optionally check; the exit code."""
    from mlx_dflash2.convert import check, to_mlx, to_torch

    form, quantize = options.pop("form"), options.pop("quantize")
    bits, group = options.pop("q_bits"), options.pop("q_group_size")
    wants_check = options.pop("check")
    if form is None:
        raise DFlash2Error("say which way: --to-mlx or --to-torch")
    if not quantize and (bits is not None or group is not None):
        raise DFlash2Error("--q-bits and --q-group-size need -q")
    if quantize and form == "torch":
        raise DFlash2Error("-q is MLX's format, torch runtimes do not read it")
    if form == "mlx":
        options["quantize_bits"] = (bits or 4) if quantize else None
        options["quantize_group_size"] = (group or 64) if quantize else None
    report = (to_mlx if form == "mlx" else to_torch)(
        options.pop("source"), options.pop("destination"), **options
    )
    click.echo("\n".join(report.lines()))
    if not wants_check:
        return 0
    checked = check(report, report.destination)
    click.echo("\n".join(checked.lines()))
    return 0 if checked.passed else 1
