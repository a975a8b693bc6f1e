"""The drafter a command line names, or the published one of its target."""

from typing import Any

import click

from ..pairs import PublishedPair, drafter_for, published_drafter

AUTO = "auto"


def name_drafter(options: dict[str, Any]) -> None:
    """Replace `auto` by the strongest published drafter; say so, and its terms.

    Args:
        options: The options that `cli.pair_options` declares; changed in place.

    Raises:
        DFlash2Error: None is known for this target.
    """
    if options["draft_model"] == AUTO:
        pair = drafter_for(options["model"])
        options["draft_model"] = pair.drafter
        click.echo(f"Drafter: {pair.drafter} ({pair.kind}) for {pair.target}", err=True)
    _print_terms(published_drafter(options["draft_model"]))


def load_named_drafter(options: dict[str, Any], target):
    """Load the drafter that `name_drafter` settled."""
    from ..loading import load_drafter

    return load_drafter(
        options["draft_model"],
        target,
        revision=options["draft_revision"],
        offline=options["offline"],
        bits=int(options["draft_bits"]) if options.get("draft_bits") else None,
        kind=options["draft_kind"],
    )


def _print_terms(pair: PublishedPair | None) -> None:
    """Say under which terms a drafter comes before any of it is fetched."""
    if pair is not None and pair.terms:
        click.echo(f"{pair.drafter}: {pair.terms}", err=True)
