"""The command line of `bench`: parse, call one function, print."""

import sys

import click

from .cli_options import Numbers, pair_options


@click.group(invoke_without_command=True)
@click.pass_context
def bench(context: click.Context) -> None:
    """Measure on this machine."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@bench.command()
@pair_options(drafter=None)
@click.option(
    "--prompt-tokens",
    "-p",
    type=Numbers(1),
    default="128,2048",
    show_default=True,
    help="Lengths of the prompts, of random tokens.",
)
@click.option(
    "--generation-tokens",
    "-g",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    help="Tokens the loop emits in a trial.",
)
@click.option(
    "--num-trials", "-n", type=click.IntRange(1), default=5, show_default=True
)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(1),
    help="Drafted tokens verified per cycle.  [default: trained]",
)
@click.option(
    "--prefill-step-size", type=click.IntRange(1), default=2048, show_default=True
)
@click.option(
    "--random-weights",
    is_flag=True,
    help="Build both models from their config.json alone.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Of the random weights.  [default: the config's]",
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True)
@click.option("--json", "json_file", help="Write a report to a new file; - is stdout.")
def cycle(**options) -> None:
    """Measure the parts of a cycle, each alone, and the loop over them.

    Without --draft-model only the target's parts are measured.
    """
    from .commands.bench_cycle import run_cycle

    sys.exit(run_cycle(options))
