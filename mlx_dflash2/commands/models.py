"""`mlx-dflash2 models`: the published drafters."""

import json

import click

from ..pairs import PAIRS, as_dict


def run_models(as_json: bool) -> int:
    """Print the table; the exit code."""
    if as_json:
        click.echo(json.dumps([as_dict(pair) for pair in PAIRS], indent=2))
        return 0
    for pair in PAIRS:
        click.echo(f"{pair.target}\n  {pair.drafter}  ({pair.kind})")
        facts = {
            "about": pair.about,
            "revisions": ", ".join(pair.revisions),
            "licence": pair.licence,
            "terms": pair.terms,
            "acceptance length": pair.acceptance_length
            and f"{pair.acceptance_length} ({pair.measured_on}, its card)",
        }
        for name, value in facts.items():
            if value:
                click.echo(f"    {name}: {value}")
    return 0
