"""Many short sampled generations with fixed seeds, cheap enough to count tokens.

Run as a program it decodes a range of seeds and prints what came out as JSON, so that
several processes can share the work.

The loop, the rule, the selector and the accept rule are the production code. To save
time the target computes each row once, and the drafter looks its rows up.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from tiny import (
    TARGET,
    drafter_config,
    drafter_numbers,
    mlx_drafter,
    mlx_target,
    target_numbers,
)

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.decode import Decoding
from mlx_dflash2.drafter import Proposal
from mlx_dflash2.sampling import SamplingConfig, TokenRule
from mlx_dflash2.selector import CandidateSelector, top_candidates
from mlx_dflash2.target import Target

VOCAB, PROMPT, LENGTH, SPECIAL = 16, [3, 4, 5], 4, (1, 2)
OPTIONS = {
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 5,
    "repetition_penalty": 1.3,
    "xtc_probability": 0.4,
    "xtc_threshold": 0.15,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
}


def small_target() -> Target:
    config = {**TARGET, **SIZES, "num_hidden_layers": 2}
    return mlx_target(config, target_numbers(config, seed=6))


def small_drafter():
    config = drafter_config(
        **SIZES,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        num_target_layers=2,
        block_size=4,
        mask_token_id=VOCAB - 1,
        target_layer_ids=[0],
        selector_rank=4,
        selector_top_k=8,
        output_multiplier=0.3,
    )
    return mlx_drafter(config, drafter_numbers(config))


class Tape:
    """A cache that only knows its tokens."""

    state: tuple = ()

    def __init__(self):
        self.tokens: list[int] = []

    @property
    def offset(self) -> int:
        return len(self.tokens)

    def trim(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]


class RememberingTarget:
    """Computes the rows of a target once for every history."""

    def __init__(self, target: Target):
        self.target, self.vocab_size = target, target.vocab_size
        self.head, self.roll_back = target.head, target.roll_back
        self._known: dict[tuple, tuple[mx.array, mx.array]] = {}

    def make_cache(self) -> list[Tape]:
        return [Tape()]

    def forward(
        self, tokens: mx.array, cache: list[Tape], taps: tuple[int, ...]
    ) -> tuple[mx.array, mx.array]:
        cache[0].tokens += tokens[0].tolist()
        history, rows = tuple(cache[0].tokens), tokens.shape[1]
        if (history, rows) not in self._known:
            made = self.target.forward(
                mx.array([history]), self.target.make_cache(), taps
            )
            made = tuple(array[:, -rows:] for array in made)
            mx.eval(made)
            self._known[history, rows] = made
        return self._known[history, rows]


class Count:
    """A context that only counts its positions."""

    arrays: tuple = ()

    def __init__(self):
        self.end = 0


class LookupDrafter:
    """Drafts what the target gives after the anchor alone, somewhat disturbed."""

    def __init__(self, config: DrafterConfig, target: Target):
        rng = np.random.default_rng(1)
        self.config = config
        self.selector = CandidateSelector(config)
        for name, array in self.selector.parameters().items():
            if isinstance(array, mx.array):
                noise = mx.array(rng.standard_normal(array.shape), mx.float32)
                setattr(self.selector, name, 0.5 * noise)
        slots, size = config.num_draft_tokens, config.hidden_size
        weight = rng.standard_normal((config.selector_rank, size)) / np.sqrt(size)
        self.selector.hidden_projection.weight = mx.array(weight, mx.float32)
        self._rows = {}
        for anchor in range(config.vocab_size):
            hidden, _ = target.forward(mx.array([[anchor]]), target.make_cache())
            noise = mx.array(rng.standard_normal((slots, config.vocab_size)))
            logits = 0.4 * target.head(hidden)[0] + 0.3 * noise.astype(mx.float32)
            found = top_candidates(logits, config.selector_top_k)
            rows = mx.array(rng.standard_normal((slots, size)), mx.float32)
            self._rows[anchor] = (rows, *found)

    def make_context(self) -> list[Count]:
        return [Count()]

    def extend(self, features: mx.array, context: list[Count]) -> None:
        context[0].end += features.shape[1]

    def propose(
        self, anchor, target, context, *, count, temperature, key, **_
    ) -> Proposal:
        hidden, candidates, logits = (rows[:count] for rows in self._rows[anchor])
        return self.selector.propose(
            hidden,
            mx.array([anchor]),
            candidates,
            logits,
            temperature=temperature,
            key=key,
        )


def runs(first: int, last: int, *, lookup: bool) -> list[list[int]]:
    """For each seed the emitted tokens, then the accepted tokens of each cycle.

    Args:
        lookup: Draft by table and remember rows; else both networks run every time.
    """
    target, drafter = small_target(), small_drafter()
    if lookup:
        drafter = LookupDrafter(drafter.config, target)
        target = RememberingTarget(target)
    rule = TokenRule(SamplingConfig(**OPTIONS), xtc_special_tokens=SPECIAL)
    made = []
    for seed in range(first, last):
        decoding = Decoding(target, drafter, rule, seed=seed)
        emissions = list(
            decoding.run(
                PROMPT,
                max_tokens=LENGTH,
                eos=frozenset(),
                num_draft_tokens=drafter.config.num_draft_tokens,
            )
        )
        tokens = [token for emission in emissions for token in emission.tokens]
        made.append(tokens + [e.accepted for e in emissions if e.drafted])
    return made


def shared_runs(count: int, *, lookup: bool) -> list[list[int]]:
    """`runs` of seeds 0 to count - 1, in one process a core."""
    cores = min(os.cpu_count() or 1, 4)
    ends = [count * core // cores for core in range(cores + 1)]
    root = Path(__file__).resolve().parent
    paths = [str(root.parent), str(root), os.environ.get("PYTHONPATH", "")]
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, str(core)),
                *(str(ends[core]), str(ends[core + 1]), str(int(lookup))),
            ],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        for core in range(cores)
    ]
    printed = [worker.communicate()[0] for worker in workers]
    assert not any(worker.returncode for worker in workers)
    return [run for text in printed for run in json.loads(text)]


def _main(core: int, first: int, last: int, lookup: int) -> None:
    if hasattr(os, "sched_setaffinity"):  # both of MLX's threads on one core
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[core % len(allowed)]})
    mx.set_default_device(mx.cpu)
    json.dump(runs(first, last, lookup=bool(lookup)), sys.stdout)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
