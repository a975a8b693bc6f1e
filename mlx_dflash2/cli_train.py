"""The command line of `train`: parse, call one function, print."""

import sys

import click

from .cli_options import ABOVE_ZERO, TARGET


@click.group()
def train() -> None:
    """Train a drafter for a target."""


@train.command()
@click.option(
    "--model",
    "--target",
    default=TARGET,
    show_default=True,
    help="Folder or Hub id of the target, or demo.",
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
@click.option(
    "--regenerate", is_flag=True, help="Let the target answer all questions anew."
)
@click.option(
    "--self-prompt",
    type=click.IntRange(0),
    default=0,
    help="Let the target write so many conversations, questions too.",
)
@click.option(
    "--greedy-share",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Of the conversations the target writes; the others are sampled.",
)
@click.option(
    "--temp", type=ABOVE_ZERO, default=0.8, show_default=True, help="Of sampling."
)
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Of an answer the target writes.",
)
@click.option(
    "--backend",
    type=click.Choice(["torch", "mlx"]),
    default="torch",
    show_default=True,
    help="What the target writes with.",
)
@click.option("--offline", is_flag=True, help="Open no connection.")
@click.option("--plan", is_flag=True, help="Say what would be done, and end.")
def prepare(**options) -> None:
    """Turn conversations into rows of tokens to train on.

    An interrupted run goes on when the same command is given again.
    """
    from .commands.prepare import run_prepare

    sys.exit(run_prepare(options))


def run_settings(command):
    """The settings of a run that have flags of their own."""
    options = [
        click.option(
            "--config",
            "config_file",
            type=click.Path(dir_okay=False),
            help="TOML or JSON; flags override it.",
        ),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="NAME=VALUE",
            help="Any setting, as optimizer.clip=0.5; repeat.",
        ),
        click.option("--preset", help="Where to start from: default or published."),
        click.option(
            "--model", "--target", help="Folder or Hub id of the target, or demo."
        ),
        click.option("--revision", help="The target's branch, tag or commit."),
        click.option("--data", help="Folder that `train prepare` wrote."),
        click.option("--out", help="Folder of the run."),
        click.option(
            "--cache-features",
            is_flag=True,
            default=None,
            help="Run the target on each row once; for small data.",
        ),
        click.option("--warm-start", help="A drafter to start from, of any family."),
        click.option("--family", help="dflash2, dflash or dspark."),
        click.option("--layers", type=int, help="Of the drafter."),
        click.option("--mask-token-id", type=int, help="Fills a block."),
        click.option("--steps", type=int, help="Optimizer steps."),
        click.option("--minutes", type=float, help="Stop then, to be resumed."),
        click.option("--rows", type=int, help="Of a step, over all processes."),
        click.option("--anchors", type=int, help="Blocks of each row."),
        click.option("--lr", type=float, help="Learning rate."),
        click.option("--seed", type=int),
        click.option("--precision", help="auto, fp32, fp16 or bf16."),
        click.option("--device", help="auto, cpu or cuda."),
        click.option("--threads", type=int, help="Of the CPU."),
        click.option("--offline", is_flag=True, default=None, help="No connection."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@train.command()
@run_settings
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint.")
@click.option("--plan", is_flag=True, help="Say what would run, and end.")
@click.option("--plot", is_flag=True, help="Draw curves.png into --out at the end.")
@click.option("--example", is_flag=True, help="Print a configuration, and end.")
def run(**options) -> None:
    """Train a drafter on prepared rows.

    Ctrl-C or SIGTERM finishes the step and saves; --resume --out FOLDER goes on. Under
    torchrun the processes share each step's rows.
    """
    from .commands.train import run_train

    sys.exit(run_train(options))


@train.command()
@click.argument("subject", metavar="RUN|DRAFTER")
@click.option("--checkpoint", default="best", show_default=True, help="Or latest, N.")
@click.option("--model", "--target", help="Folder or Hub id of the target, or demo.")
@click.option("--revision", help="The target's branch, tag or commit.")
@click.option("--data", help="Folder that `train prepare` wrote.")
@click.option("--rows", type=int, help="Held-out rows; 0 for all.")
@click.option("--precision", help="auto, fp32, fp16 or bf16.")
@click.option("--device", help="auto, cpu or cuda.")
@click.option("--threads", type=int, help="Of the CPU.")
@click.option("--offline", is_flag=True, default=None, help="Open no connection.")
@click.option("--plot", type=click.Path(), help="Draw the curves of a run there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def evaluate(**options) -> None:
    """Measure a run's checkpoint, or any drafter, on held-out rows."""
    from .commands.train import run_evaluate

    sys.exit(run_evaluate(options))


@train.command()
@click.argument("run_folder", metavar="RUN")
@click.argument("destination")
@click.option("--checkpoint", default="best", show_default=True, help="Or latest, N.")
@click.option("--results", type=click.Path(), help="measured_results.json of a bench.")
@click.option(
    "--average",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Checkpoints to take the mean of: it and the last before it.",
)
def export(**options) -> None:
    """Write a run's drafter into the new folder DESTINATION, to serve and publish."""
    from .commands.train import run_export

    sys.exit(run_export(options))
