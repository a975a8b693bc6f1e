"""The command line: parse, call one function, print."""

import sys
from importlib import metadata

import click

from .cli_bench import bench
from .cli_options import ABOVE_ZERO, JSONObject, TokenBias, pair_options
from .cli_train import train
from .errors import DFlash2Error


class Group(click.Group):
    """Every way a command can end, as one line and an exit code.

    Bad input ends with 2, Ctrl-C with 130, a closed pipe without a word (by click).
    """

    def main(self, *args, **extra):
        extra["standalone_mode"] = False
        try:
            sys.exit(super().main(*args, **extra) or 0)
        except DFlash2Error as error:
            self._fail(str(error), 2)
        except click.ClickException as error:
            self._fail(error.format_message(), error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        except OSError as error:  # of the terminal or the disk, not of an argument
            self._fail(str(error), 2)

    @staticmethod
    def _fail(message: str, code: int) -> None:
        click.echo(f"Error: {' '.join(message.split())}", err=True)
        sys.exit(code)


def package_versions() -> dict[str, str]:
    """Installed versions of this package and of those that decide its numbers."""
    from . import __version__

    versions = {"mlx-dflash2": __version__}
    for name in ("mlx", "mlx-lm", "transformers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def _print_version(context: click.Context, option: click.Option, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        found = package_versions()
        click.echo("\n".join(f"{name} {version}" for name, version in found.items()))
        context.exit()


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show versions and exit.",
)
def main() -> None:
    """Lossless speculative decoding for MiniCPM5 on MLX."""


@main.command()
@click.argument("text", metavar="[PROMPT]", required=False)
@click.option("--prompt", "-p", help="The message; - reads stdin. \\n and \\t count.")
@pair_options()
@click.option("--system-prompt", help="For the chat template.")
@click.option(
    "--max-tokens",
    "-m",
    type=int,
    default=256,
    show_default=True,
    help="-1 for no limit.",
)
@click.option(
    "--temp",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="0: greedy.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Nucleus, at temperature 1.",
)
@click.option("--top-k", type=click.IntRange(0), default=0, help="0: off.")
@click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, help="0: off.")
@click.option("--xtc-probability", type=click.FloatRange(0, 1), default=0.0)
@click.option(
    "--xtc-threshold", type=click.FloatRange(0, 0.5), default=0.1, show_default=True
)
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Repeats a run.")
@click.option("--repetition-penalty", type=ABOVE_ZERO, help="1: none.")
@click.option(
    "--repetition-context-size",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Tokens the repetition penalty looks back.",
)
@click.option("--presence-penalty", type=float)
@click.option("--frequency-penalty", type=float)
@click.option("--logit-bias", type=TokenBias(), help='JSON, as {"42": -5}.')
@click.option("--stop", multiple=True, help="Ends the text; repeatable.")
@click.option("--extra-eos-token", multiple=True, help="Token or id; repeatable.")
@click.option("--chat-template-config", type=JSONObject(), help="JSON variables.")
@click.option(
    "--enable-thinking/--no-thinking",
    default=None,
    help="Set enable_thinking for the chat template; unset, the template decides.",
)
@click.option("--ignore-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option("--prefill-response", help="How the answer begins.")
@click.option(
    "--block-size",
    type=int,
    help="--num-draft-tokens plus one, whatever a config counts.",
)
@click.option(
    "--num-draft-tokens",
    type=click.IntRange(0),
    help="Drafted tokens verified per cycle; 0 is plain decoding.  [default: trained]",
)
@click.option(
    "--draft-sampling",
    type=click.Choice(["sample", "argmax"]),
    help="How to draft at --temp above 0; both are exact.  [default: the family's]",
)
@click.option(
    "--confidence-threshold",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="DSpark: draft no slot less sure than this; 0 drafts all.",
)
@click.option(
    "--draft-bits", type=click.Choice(["4", "8"]), help="Quantize the drafter at load."
)
@click.option(
    "--prefill-step-size", type=click.IntRange(1), default=2048, show_default=True
)
@click.option("--kv-bits", type=int, help="Quantize the target's cache.")
@click.option("--kv-group-size", type=int, help="For --kv-bits.  [default: 64]")
@click.option(
    "--quantized-kv-start",
    type=click.IntRange(0),
    help="Positions from which --kv-bits applies.  [default: 5000]",
)
@click.option("--max-kv-size", type=int, help="Refused: a rotating cache cannot undo.")
@click.option("--plain", is_flag=True, help="Decode without a drafter.")
@click.option(
    "--allow-fallback",
    is_flag=True,
    help="Decode plainly if the drafter cannot be had, instead of failing.",
)
@click.option("--verify", is_flag=True, help="Also decode plainly and compare.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--verbose", is_flag=True, help="Say what was loaded and each cycle.")
def generate(**options) -> None:
    """Answer PROMPT; the text is that of plain decoding, sooner."""
    from .commands.generate import run_generate

    sys.exit(run_generate(options))


@main.command()
@click.argument("source")
@click.argument("destination")
@click.option("--to-mlx", is_flag=True, help="For this package.")
@click.option("--to-torch", is_flag=True, help="For SGLang, vLLM, z-lab.")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--offline", is_flag=True, help="Open no connection.")
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]))
@click.option("--quantize", "-q", is_flag=True, help="Quantize the backbone.")
@click.option("--q-bits", type=int, help="Bits.  [default: 4]")
@click.option("--q-group-size", type=int, help="Weights per scale.  [default: 64]")
@click.option("--dequantize", "-d", is_flag=True, help="Undo a quantization.")
@click.option("--check", is_flag=True, help="Reload what was written and compare.")
def convert(**options) -> None:
    """Convert a drafter SOURCE (folder or Hub id) into the new folder DESTINATION."""
    from .commands.convert import run_convert

    sys.exit(run_convert(options))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def models(as_json: bool) -> None:
    """List the published drafters and the targets they were trained for."""
    from .commands.models import run_models

    sys.exit(run_models(as_json))


@main.command()
@pair_options()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(**options) -> None:
    """Check this machine, then a pair: what was read, whether it is read right.

    Exit code 0 is healthy, 1 doubtful, 2 cannot run.
    """
    from .commands.doctor import run_doctor

    sys.exit(run_doctor(options))


main.add_command(bench)
main.add_command(train)
