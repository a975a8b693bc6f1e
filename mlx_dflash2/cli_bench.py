"""The command line of `bench`: parse, call one function, print."""

import sys

import click

from .cli_options import ABOVE_ZERO, TARGET, Numbers, pair_options
from .families import FAMILIES


def output_options(command):
    """The files a report is written to, and the gates it is held against."""
    options = [
        click.option("--markdown", help="Write the tables to a new file."),
        click.option("--plot", help="Draw into a new folder; needs matplotlib."),
        click.option(
            "--measured-results",
            help="Write measured_results.json as drafter cards carry it.",
        ),
        click.option("--summary", help="Write the report without prompts and texts."),
        click.option(
            "--gate",
            multiple=True,
            help="As 'coding >= 2.0x'; repeatable. Exit code 3 if one fails.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(invoke_without_command=True)
@click.option(
    "--model",
    "--target",
    multiple=True,
    default=(TARGET,),
    show_default=True,
    help="Folder or Hub id of the target, or demo; several are compared.",
)
@click.option(
    "--draft-model",
    "--drafter",
    multiple=True,
    default=("auto",),
    show_default=True,
    help="Folder or Hub id; auto takes the strongest published; several are compared.",
)
@click.option(
    "--draft-kind",
    type=click.Choice([family.kind for family in FAMILIES]),
    help="The family you expect; another is an error.",
)
@click.option("--revision", help="The target's branch, tag or commit.")
@click.option("--draft-revision", help="The drafter's.")
@click.option("--offline", is_flag=True, help="Open no connection.")
@click.option(
    "--draft-bits", type=click.Choice(["4", "8"]), help="Quantize drafters at load."
)
@click.option("--domain", multiple=True, help="Measure this one; repeatable.")
@click.option(
    "--prompts-per-domain",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="The first so many of each.",
)
@click.option("--data", help="Conversations (JSONL) instead of the built-in prompts.")
@click.option("--group-by", help="Field of --data that names a domain.")
@click.option(
    "--max-tokens", "-m", type=click.IntRange(1), default=256, show_default=True
)
@click.option(
    "--block-size",
    type=Numbers(2),
    help="Widths to compare, as 2,4,8.  [default: trained]",
)
@click.option(
    "--enable-thinking/--no-thinking",
    default=None,
    help="Set enable_thinking for the chat template; unset, the template decides.",
)
@click.option("--thinking", type=click.Choice(["both"]), help="Measure both modes.")
@click.option("--ignore-chat-template", is_flag=True, help="Use bare text.")
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Times each prompt is run there and back.",
)
@click.option(
    "--cost-repeats",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Measurements of each part of a cycle.",
)
@click.option("--sampled", is_flag=True, help="Also test sampled output.")
@click.option("--temp", type=ABOVE_ZERO, help="Of --sampled.  [default: 1]")
@click.option(
    "--samples", type=click.IntRange(20), help="Runs of --sampled.  [default: 200]"
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, show_default=True)
@click.option(
    "--backend",
    type=click.Choice(["mlx", "torch"]),
    default="mlx",
    show_default=True,
    help="torch is the reference, on CPU or CUDA.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Of --backend torch.  [default: cuda if there]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    help="Of --backend torch.  [default: as stored]",
)
@click.option("--json", "json_file", help="Write all to a new file; - is stdout.")
@click.option("--resume", is_flag=True, help="Go on with the --json file.")
@output_options
@click.pass_context
def bench(context: click.Context, **options) -> None:
    """Measure whether speculation pays here, by how much, and why.

    Runs every prompt plainly and with each drafter, back and forth, and compares the
    output token by token.
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return
    from .commands.bench import run_bench

    sys.exit(run_bench(options))


def _refuse_options_before(context: click.Context) -> None:
    """Options of the measurement have no effect on a subcommand."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name)
        if source is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(
                f"{option.opts[0]} before {context.invoked_subcommand} has no effect; "
                f"put the options of {context.invoked_subcommand} behind it"
            )


@bench.command()
@click.argument("file")
@output_options
def report(**options) -> None:
    """Render a saved report or summary again."""
    from .commands.bench import run_report

    sys.exit(run_report(options))


@bench.command()
@click.argument("first")
@click.argument("second")
def compare(first: str, second: str) -> None:
    """Show two reports of the same workload and target side by side."""
    from .commands.bench import run_compare

    sys.exit(run_compare(first, second))


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
    help="Tokens the loop emits in a trial; two more than a cycle drafts, or more.",
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
