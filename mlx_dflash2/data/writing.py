"""Text to train on, written by the target itself: `python -m mlx_dflash2.data.writing`.

Without --regenerate the target writes the questions too. The command may be stopped at
any time; the same command goes on after the last finished round and ends with the same
file as if it had never been stopped.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from mlx_dflash2.cli import Group
from mlx_dflash2.conversations import read_conversations
from mlx_dflash2.errors import DFlash2Error

from .chat import Chat
from .dialogue import Dialogue, target_name
from .journal import Journal
from .regeneration import Regeneration
from .self_prompting import OPENERS, SelfPrompting, read_openers
from .sources import file_sha256
from .target_text import TargetText, load_target_text
from .writer import Sampling, Writer, Written

IDLE = 20  # rounds without a conversation after which there is no hope


@dataclass(frozen=True)
class WritingOptions:
    """What is to be written.

    Attributes:
        model: Folder or Hub id of the target.
        out: A JSONL file of conversations.
        conversations: Stop once there are so many.
        regenerate: Conversations whose answers to write anew; None self-prompts.
        openers: How questions begin, by domain.
        domains: Of the openers; () takes all.
        greedy: The share of conversations answered greedily.
        temperature, top_p: Of the other answers.
        follow_ups: The share of self-prompted ones with a second question.
        backend: "torch" or "mlx".
        batch: Prompts that are continued together.
        size: Conversations of a round, after which the file grows.
        enable_thinking: The chat template's variable; None leaves it undefined.
    """

    model: str
    out: Path
    conversations: int
    regenerate: Path | None = None
    openers: Path = OPENERS
    domains: tuple[str, ...] = ()
    max_tokens: int = 192
    greedy: float = 0.5
    temperature: float = 0.8
    top_p: float = 0.95
    follow_ups: float = 0.25
    seed: int = 0
    backend: str = "torch"
    batch: int = 64
    size: int = 256
    enable_thinking: bool | None = None
    revision: str | None = None
    offline: bool = False

    def settings(self, target: TargetText) -> dict[str, Any]:
        """Everything that decides the text, as the journal keeps it."""
        files = {"openers": self.openers}
        if self.regenerate:
            files = {"regenerate": self.regenerate}
        names = "max_tokens greedy temperature top_p follow_ups seed backend batch size"
        return {
            **{name: getattr(self, name) for name in names.split()},
            "domains": list(self.domains),
            "enable_thinking": self.enable_thinking,
            "target": target.facts | {"name": target_name(target)},
            **{name: file_sha256(path) for name, path in files.items()},
        }


def write(options: WritingOptions, say: Callable[[str], None]) -> None:
    """Write the conversations, or go on where an earlier call stopped.

    Args:
        say: Told of progress.

    Raises:
        DFlash2Error: Something cannot be had or read, or the file is of other settings.
    """
    target = load_target_text(
        options.model, revision=options.revision, offline=options.offline
    )
    journal = Journal(options.out, options.settings(target))
    plan = _plan(options, target)
    writer = plan.dialogue.writer
    idle = 0
    while len(journal.lines) < options.conversations:
        if plan.exhausted(journal.rounds):
            break
        started, tokens = time.monotonic(), writer.tokens
        lines, dropped = plan.round(journal.rounds, journal.lines)
        journal.append(lines, dropped)
        idle = 0 if lines else idle + 1
        if idle == IDLE:
            raise DFlash2Error(
                f"{options.out}: the last {IDLE} rounds gave no conversation; left "
                f"out: {_counted(journal.dropped)}; use other openers or another target"
            )
        speed = (writer.tokens - tokens) / (time.monotonic() - started)
        say(
            f"round {journal.rounds}: {len(journal.lines)} conversations, "
            f"{speed:.0f} tokens/s; left out: {_counted(journal.dropped)}"
        )
    say(f"{options.out}: {len(journal.lines)} conversations")


def _counted(dropped: dict[str, int]) -> str:
    return ", ".join(f"{n} {why}" for why, n in sorted(dropped.items())) or "none"


def _plan(options: WritingOptions, target: TargetText) -> SelfPrompting | Regeneration:
    dialogue = Dialogue(
        _Metered(_writer(options, target)),
        Chat(target, options.enable_thinking),
        seed=options.seed,
        greedy=options.greedy,
        sampling=Sampling(options.temperature, options.top_p),
        max_tokens=options.max_tokens,
    )
    if options.regenerate:
        given = list(read_conversations(options.regenerate))
        return Regeneration(dialogue, given, options.size)
    openers = read_openers(options.openers, options.domains)
    return SelfPrompting(dialogue, openers, options.follow_ups, options.size)


def _writer(options: WritingOptions, target: TargetText) -> Writer:
    named = {"revision": options.revision, "offline": options.offline}
    if options.backend == "mlx":
        from mlx_dflash2.loading import load_target

        from .mlx_writer import MLXWriter

        model, _ = load_target(options.model, **named)
        return MLXWriter(model, target.ends, batch=options.batch)
    from mlx_dflash2.torch.loading import load_target as load_torch_target

    from .torch_writer import TorchWriter

    model = load_torch_target(options.model, **named, device=_device())
    return TorchWriter(model, target.ends, batch=options.batch)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class _Metered:
    """A writer that counts its tokens."""

    writer: Writer
    tokens: int = 0

    def write(self, prompts: Sequence[list[int]], **options) -> list[Written]:
        written = self.writer.write(prompts, **options)
        self.tokens += sum(len(text.tokens) for text in written)
        return written


SHARE = click.FloatRange(0, 1)
FILE = click.Path(path_type=Path)


@click.group(
    cls=Group,
    invoke_without_command=True,
    subcommand_metavar="",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.option("--model", required=True, help="Folder or Hub id of the target.")
@click.option("--out", required=True, type=FILE, help="JSONL file to write.")
@click.option("--conversations", required=True, type=click.IntRange(1))
@click.option("--regenerate", type=FILE, help="Answer these instead of self-prompting.")
@click.option(
    "--openers",
    type=FILE,
    default=OPENERS,
    show_default="its own",
    help="How questions begin.",
)
@click.option("--domain", "domains", multiple=True, help="Of the openers; repeatable.")
@click.option("--max-tokens", type=click.IntRange(1), default=192, help="An answer's.")
@click.option("--greedy", type=SHARE, default=0.5, help="Share of greedy answers.")
@click.option("--temperature", type=click.FloatRange(0), default=0.8)
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=0.95)
@click.option(
    "--follow-ups", type=SHARE, default=0.25, help="Share with a second turn."
)
@click.option("--seed", type=int, default=0)
@click.option("--backend", type=click.Choice(["torch", "mlx"]), default="torch")
@click.option("--batch", type=click.IntRange(1), default=64, help="Prompts at once.")
@click.option("--size", type=click.IntRange(1), default=256, help="Of a round.")
@click.option("--enable-thinking/--no-thinking", default=None)
@click.option("--revision", help="The target's branch, tag or commit.")
@click.option("--offline", is_flag=True, help="Open no connection.")
def main(**options) -> None:
    """Let a target write conversations to train on."""
    write(WritingOptions(**options), lambda progress: click.echo(progress, err=True))


if __name__ == "__main__":
    main()
