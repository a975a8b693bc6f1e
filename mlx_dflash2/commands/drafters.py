"""The drafter a command line names, or the published one of its target."""

from pathlib import Path
from typing import Any

import click

from ..demo import is_demo
from ..errors import DFlash2Error
from ..pairs import drafter_for, published_drafter
from ..sources import find_drafter

AUTO = "auto"


def name_drafter(options: dict[str, Any]) -> None:
    """Replace `auto` by the strongest published drafter; say so, and its terms.

    Args:
        options: The options that `cli_options.pair_options` declares; changed in place.

    Raises:
        DFlash2Error: None is known for this target.
    """
    if options["draft_model"] == AUTO:
        pair = drafter_for(options["model"], options["draft_kind"])
        if Path(pair.drafter).exists():
            raise DFlash2Error(
                f"{pair.drafter}: a local folder hides the published drafter of this "
                "name; name a drafter with --draft-model, or run elsewhere"
            )
        options["draft_model"], options["draft_kind"] = pair.drafter, pair.kind
        click.echo(f"Drafter: {pair.drafter} ({pair.kind}) for {pair.target}", err=True)
    print_terms(options["draft_model"])
    if is_demo(options["draft_model"]):  # refused before its target is unpacked
        find_drafter(options["draft_model"], revision=options["draft_revision"])


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


def print_terms(drafter: str) -> None:
    """Say under which terms a drafter of the Hub comes before any of it is fetched."""
    pair = published_drafter(drafter)
    if pair is not None and pair.terms and not Path(drafter).exists():
        click.echo(f"{pair.drafter}: {pair.terms}", err=True)
