"""The command line of `train`: parse, call one function, print."""

import sys

import click

from .cli_options import TARGET


@click.group()
def train() -> None:
    """Train a drafter for a target."""


@train.command()
@click.option(
    "--model",
    "--target",
    default=TARGET,
    show_default=True,
    help="Folder or Hub id of the target.",
)
@click.option("--revision", help="The target's branch, tag or commit.")
@click.option(
    "--data", multiple=True, help="Conversations (JSONL): messages or ShareGPT; repeat."
)
@click.option("--recipe", help="Data sets of the Hub: published, or a TOML file.")
@click.option(
    "--phase",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Of the recipe.",
)
@click.option("--out", required=True, help="Folder to write, or to go on with.")
@click.option("--row-length", type=click.IntRange(2), default=1536, show_default=True)
@click.option(
    "--pack/--no-pack",
    default=True,
    show_default=True,
    help="Put several documents into a row; they never see each other.",
)
@click.option(
    "--held-out",
    type=click.FloatRange(0),
    default=0.02,
    show_default=True,
    help="Prompts to evaluate on: a share below 1, or how many.",
)
@click.option(
    "--enable-thinking/--no-thinking",
    default=None,
    help="Set enable_thinking for the chat template; unset, the template decides.",
)
@click.option(
    "--last-turn-only", is_flag=True, help="Learn the last answer of each conversation."
)
@click.option(
    "--min-supervised",
    type=click.IntRange(2),
    default=8,
    show_default=True,
    help="Leave out documents with fewer tokens to learn.",
)
@click.option("--limit", type=click.IntRange(1), help="Rows to read of each source.")
@click.option("--offline", is_flag=True, help="Open no connection.")
@click.option("--plan", is_flag=True, help="Say what would be done, and end.")
def prepare(**options) -> None:
    """Turn conversations into rows of tokens to train on.

    An interrupted run goes on when the same command is given again.
    """
    from .commands.prepare import run_prepare

    sys.exit(run_prepare(options))
