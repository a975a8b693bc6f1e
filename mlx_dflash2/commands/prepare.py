"""`mlx-dflash2 train prepare`: conversations into rows, or the plan of it."""

from pathlib import Path
from typing import Any

import click

from ..data.prepare import PrepareOptions, plan, prepare
from ..data.rewriting import Rewriting


def run_prepare(options: dict[str, Any]) -> int:
    """Prepare or plan, and print; the exit code."""
    only_plan = options.pop("plan")
    options["out"] = Path(options["out"]).expanduser()
    options["data"] = tuple(Path(file).expanduser() for file in options["data"])
    rewriting = Rewriting(
        options.pop("regenerate"),
        options.pop("self_prompt"),
        greedy=options.pop("greedy_share"),
        temperature=options.pop("temp"),
        max_tokens=options.pop("max_tokens"),
        backend=options.pop("backend"),
    )
    asked = PrepareOptions(**options, rewriting=rewriting)
    if only_plan:
        click.echo("\n".join(plan(asked)))
        return 0
    report = prepare(asked, lambda progress: click.echo(progress, err=True))
    click.echo("\n".join(report.lines()))
    return 0
