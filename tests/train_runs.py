"""Training runs on a tiny target: its own greedy text as rows, a config, a run."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pair_files import EOS, EOS2, MASK
from pairs import Pair

from mlx_dflash2.data.rows import Row, write_rows
from mlx_dflash2.data.target_text import load_target_text
from mlx_dflash2.torch.decode import Decoded, decode
from mlx_dflash2.torch.loading import load_target
from mlx_dflash2.torch.train.config import read_config
from mlx_dflash2.torch.train.start import train

PROMPT = 20  # tokens; more than twice the lag of an oracle pair's rule
TINY = {  # settings of a run that takes a second or two
    "drafter.layers": 1,
    "drafter.taps": [0, 2],
    "drafter.mask_token_id": MASK,
    "drafter.selector_rank": 8,
    "drafter.selector_top_k": 4,
    "drafter.markov_rank": 8,
    "stages.backbone": 4,
    "stages.selector": 4,
    "batch.rows": 4,
    "batch.rows_at_once": 2,
    "batch.anchors": 6,
    "batch.blocks_at_once": 5,
    "optimizer.warmup": 4,
    "steps": 20,
    "evaluation.every": 0,
    "checkpoints.every": 10,
    "threads": 1,
}


def prompt_of(pair: Pair, seed: int) -> list[int]:
    """Ordinary tokens at random."""
    generator = np.random.default_rng(seed)
    return generator.integers(8, pair.options.vocab, PROMPT).tolist()


def answers(
    pair: Pair, count: int, *, tokens: int, drafter=None
) -> list[tuple[list[int], Decoded]]:
    """Prompts and what greedy decoding makes of them."""
    target = load_target(pair.target)
    prompts = [prompt_of(pair, seed) for seed in range(count)]
    return [
        (p, decode(target, drafter, p, max_tokens=tokens, eos={EOS, EOS2}))
        for p in prompts
    ]


def row_of(prompt: list[int], answer: tuple[int, ...]) -> Row:
    """One document, its answer supervised."""
    tokens = np.array([*prompt, *answer], np.int32)
    supervised = np.arange(len(tokens)) >= len(prompt)
    return Row(tokens, supervised, np.zeros(len(tokens), np.int32))


def write_data(
    folder: Path, target: Path, rows: list[Row], held_out: list[Row]
) -> Path:
    """A folder as `train prepare` leaves it."""
    facts = {"target": load_target_text(str(target)).facts}
    facts |= {"enable_thinking": None, "sources": []}
    folder.mkdir()
    write_rows(folder / "train", rows, facts)
    write_rows(folder / "held_out", held_out, facts)
    (folder / "SOURCE_TERMS.md").write_text("# Source terms\n\nWritten for a test.\n")
    return folder


@dataclass(frozen=True)
class Trainable:
    """A pair's target, rows of its own greedy text, and runs on them."""

    pair: Pair
    data: Path

    def flags(self, out: Path, **settings) -> dict:
        """Settings of a tiny run by dotted name; `__` stands for a dot."""
        named = {name.replace("__", "."): value for name, value in settings.items()}
        models = {"target": str(self.pair.target), "data": str(self.data)}
        return TINY | models | {"out": str(out)} | named

    def run(self, out: Path, *, resume: bool = False, **settings) -> int:
        """Train in this process; the exit code."""
        return train(read_config(flags=self.flags(out, **settings)), resume=resume)

    def arguments(self, out: Path, **settings) -> list[str]:
        """Of `train run`, for the same."""
        flags = self.flags(out, **settings)
        return [f"--set={name}={json.dumps(value)}" for name, value in flags.items()]


def trainable(
    folder: Path, pair: Pair, *, rows: int = 9, tokens: int = 24
) -> Trainable:
    """Greedy answers of the target; the last two are held out."""
    made = [row_of(p, each.tokens) for p, each in answers(pair, rows, tokens=tokens)]
    return Trainable(pair, write_data(folder, pair.target, made[:-2], made[-2:]))


def metrics_of(run: Path) -> list[dict]:
    """The lines of a run's metrics."""
    text = (run / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def assert_same_weights(one: dict, other: dict, *, within: float = 0.0) -> None:
    """Compare tensors by name; a failure names the one with the largest gap."""
    assert one.keys() == other.keys()
    gaps = {
        name: float((one[name].double() - other[name].double()).abs().max())
        for name in one
    }
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= within, f"{worst} differs by {gaps[worst]:.3g}"
    assert all(torch.isfinite(tensor).all() for tensor in one.values())
