"""A toy language, a target that has learned it, and drafters for that target.

python tests/toy_language.py FOLDER     # trains them all; prints how well each drafts
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from pair_files import BOS, EOS, MASK, PAD, SPECIALS, write_tokenizer
from torch.nn import functional as F
from train_runs import metrics_of, row_of, write_data
from transformers import LlamaConfig, LlamaForCausalLM

from mlx_dflash2.data.rows import Row
from mlx_dflash2.torch.loading import load_target
from mlx_dflash2.torch.target import Target
from mlx_dflash2.torch.train.config import TrainConfig, read_config
from mlx_dflash2.torch.train.init import make_drafter
from mlx_dflash2.torch.train.metrics import Evaluator
from mlx_dflash2.torch.train.setup import make_setup
from mlx_dflash2.torch.train.start import train
from mlx_dflash2.torch.train.world import World

VOCAB = 256
TOPICS, FIRST = 8, len(SPECIALS)  # their tokens, from this one on
SYLLABLES = 3  # of a word
REACH = 6  # how many words back a word looks
PROMPT, ANSWER = 24, 64  # tokens; a prompt holds more than REACH words
SAMPLED = 4  # one row in so many is sampled, not greedy
HELD_OUT = 32  # rows
OBJECTIVES = {
    "DFlash, CE": {"drafter.family": "dflash"},
    "DFlash, D-PACE": {"drafter.family": "dflash", "objective.weighting": "dpace"},
    "DFlash 2": {"drafter.family": "dflash2"},
    "DSpark": {"drafter.family": "dspark"},
}


@dataclass(frozen=True)
class Size:
    """How much there is to learn, and how long it is learned.

    Attributes:
        words: Of the language.
        hidden, layers: Of the target.
        lessons: Steps of the target, a batch of new texts each.
        rows: To train drafters on.
        settings: Of a drafter's run, by dotted name.
    """

    words: int
    hidden: int
    layers: int
    lessons: int
    rows: int
    settings: dict[str, Any] = field(default_factory=dict)


COMMON = {
    "drafter.taps": [0, 1],
    "drafter.mask_token_id": MASK,
    "drafter.selector_rank": 32,
    "drafter.selector_top_k": 8,
    "drafter.markov_rank": 32,
    "batch.rows": 8,
    "batch.rows_at_once": 8,
    "batch.blocks_at_once": 512,
    "optimizer.lr": 2e-3,
    "optimizer.high_lr": 4e-3,
    "optimizer.warmup": 20,
    "evaluation.every": 0,
    "evaluation.rows": 0,
    "checkpoints.every": 10_000,
    "threads": 1,
}
WHOLE = Size(
    words=64,
    hidden=128,
    layers=3,
    lessons=400,
    rows=1000,
    settings={
        "drafter.layers": 2,
        "batch.anchors": 24,
        "steps": 300,
        "stages.backbone": 75,
        "stages.selector": 75,
    },
)
HALF = Size(
    words=32,
    hidden=64,
    layers=2,
    lessons=180,
    rows=400,
    settings={
        "drafter.layers": 1,
        "drafter.taps": [0],
        "batch.anchors": 12,
        "steps": 80,
        "stages.backbone": 30,
        "stages.selector": 20,
    },
)


class Language:
    """Texts of words of three syllables, all about one topic, which comes first.

    What word comes next is drawn by scores that add up. Every word calls for another
    one some words later, which mostly comes; but the word before and the topic like
    some words and dislike others, and may well prefer one of these.
    """

    def __init__(self, words: int, seed: int = 0):
        generator = np.random.default_rng(seed)
        tokens = np.arange(FIRST + TOPICS, VOCAB)
        self.words = np.array(
            [generator.choice(tokens, SYLLABLES, replace=False) for _ in range(words)]
        )
        self.called = np.zeros((words, words))
        self.called[np.arange(words), generator.permutation(words)] = 6.0
        self.liked = 1.8 * generator.standard_normal((words, words))
        self.topical = 0.7 * generator.standard_normal((TOPICS, words))

    def texts(
        self, count: int, length: int, generator: np.random.Generator
    ) -> np.ndarray:
        """Texts at random, cut to a length in tokens. Shape: (count, length)."""
        topic = generator.integers(TOPICS, size=count)
        said = list(generator.integers(len(self.words), size=(REACH, count)))
        while 1 + SYLLABLES * len(said) < length:
            scores = (
                self.called[said[-REACH]] + self.liked[said[-1]] + self.topical[topic]
            )
            said.append((scores + generator.gumbel(size=scores.shape)).argmax(axis=1))
        tokens = self.words[np.stack(said, axis=1)].reshape(count, -1)
        return np.concatenate([FIRST + topic[:, None], tokens], axis=1)[:, :length]


def write_target(folder: Path, language: Language, size: Size) -> Path:
    """Teach a llama the language, and write it as an ordinary model folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size.hidden,
        intermediate_size=2 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=512,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, size.lessons, pct_start=0.1
    )
    generator = np.random.default_rng(1)
    for _ in range(size.lessons):
        tokens = torch.from_numpy(language.texts(16, PROMPT + ANSWER, generator))
        logits = model(tokens).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB, "wordlevel", max_length=512)
    return folder


@torch.no_grad()
def answers(target: Target, prompts: np.ndarray, temperature: float) -> np.ndarray:
    """What the target writes after prompts of one length. Shape: (rows, ANSWER)."""
    generator = torch.Generator().manual_seed(0)
    tokens, cache, written = torch.from_numpy(prompts), target.make_cache(), []
    for _ in range(ANSWER):
        logits = target.forward(tokens, cache, logits_to_keep=1)[0][:, -1]
        if temperature:
            chances = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.multinomial(chances, 1, generator=generator)
        else:
            tokens = logits.argmax(dim=-1, keepdim=True)
        written.append(tokens)
    return torch.cat(written, dim=1).numpy()


def rows_of(target: Target, prompts: np.ndarray, temperature: float) -> Iterator[Row]:
    """Prompts and answers, of which the answers are supervised."""
    written = answers(target, prompts, temperature)
    for prompt, answer in zip(prompts.tolist(), written.tolist(), strict=True):
        yield row_of(prompt, answer)


@dataclass(frozen=True)
class Toy:
    """A target of the language and rows it wrote, the held-out ones all greedy."""

    target: Path
    data: Path
    size: Size

    @classmethod
    def write(cls, folder: Path, size: Size) -> "Toy":
        """Teach a target, and let it write the rows."""
        language = Language(size.words)
        path = write_target(folder / "target", language, size)
        target = load_target(path)
        prompts = language.texts(size.rows + HELD_OUT, PROMPT, np.random.default_rng(2))
        held_out, sampled, greedy = np.split(
            prompts, [HELD_OUT, HELD_OUT + size.rows // SAMPLED]
        )
        rows = [*rows_of(target, sampled, 1.0), *rows_of(target, greedy, 0.0)]
        kept = list(rows_of(target, held_out, 0.0))
        return cls(path, write_data(folder / "data", path, rows, kept), size)

    def config(self, out: Path, objective: str) -> TrainConfig:
        """The run of one of the OBJECTIVES."""
        models = {"target": str(self.target), "data": str(self.data), "out": str(out)}
        flags = COMMON | self.size.settings | OBJECTIVES[objective] | models
        return read_config(flags=flags)

    def trained(self, out: Path, objective: str) -> dict[str, Any]:
        """Train a drafter; what it does on the held-out rows."""
        assert train(self.config(out, objective)) == 0
        return metrics_of(out)[-1]["evaluation"]

    def untrained(self, objective: str) -> float:
        """The acceptance length that the drafter of a run begins with."""
        config = self.config(Path("unused"), objective)
        setup = make_setup(config, World.join(config.device))
        drafter = make_drafter(
            setup.geometry,
            setup.target,
            seed=config.seed,
            final_norm=config.drafter.final_norm,
        )
        evaluator = Evaluator(
            drafter, setup.target, config.objective, setup.precision, setup.world
        )
        return evaluator(setup.held_out)["acceptance_length"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--half", is_flag=True, help="At the size of the default tests.")
def main(folder: Path, half: bool) -> None:
    """Train a target and a drafter for every objective in FOLDER; print a table."""
    torch.set_num_threads(1)
    toy = Toy.write(folder, HALF if half else WHOLE)
    click.echo("| objective | untrained | trained | unary | oracle at 8 | confidence |")
    click.echo("|---|---|---|---|---|---|")
    for name in OBJECTIVES:
        found = toy.trained(folder / name.replace(", ", "-").replace(" ", "-"), name)
        values = [
            toy.untrained(name),
            found["acceptance_length"],
            found.get("unary_acceptance_length"),
            found.get("oracle_acceptance_length"),
            found.get("confidence_bias"),
        ]
        shown = ["-" if value is None else f"{value:.3f}" for value in values]
        click.echo(f"| {' | '.join([name, *shown])} |")


if __name__ == "__main__":
    sys.exit(main())
