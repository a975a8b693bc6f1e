"""What the parts of a cycle cost, each alone, and the loop over them; no text."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_dflash2.config_fields import read_longest
from mlx_dflash2.config_reader import ConfigReader
from mlx_dflash2.cycle_parts import CycleParts
from mlx_dflash2.decode import Decoding
from mlx_dflash2.drafter import Drafter
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.generation import wired_limit
from mlx_dflash2.sampling import SamplingConfig, TokenRule
from mlx_dflash2.target import Target
from mlx_dflash2.timing import measure

from .estimates import Estimate, median_interval

WIDEST = 9  # rows of a target forward; kernels for few rows change by 9
ROUNDS = 8  # times a part runs in a trial


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        prompt_tokens: Lengths of the random prompts.
        generation_tokens: Emitted by the loop in a trial; the parts are measured over
            a context of the prompt and half of these.
        num_draft_tokens: Drafted tokens a cycle verifies; 0 without a drafter.

    Raises:
        DFlash2Error: No whole cycle fits into the emitted tokens.
    """

    prompt_tokens: tuple[int, ...]
    generation_tokens: int = 64
    trials: int = 5
    num_draft_tokens: int = 0
    prefill_step_size: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        drafted = self.num_draft_tokens
        if self.generation_tokens < drafted + 2:
            raise DFlash2Error(
                f"{self.generation_tokens} generation tokens: the first comes from "
                f"the prefill, and a cycle of {drafted} drafted tokens may emit "
                f"{drafted + 1}; give at least {drafted + 2}"
            )


@dataclass(frozen=True)
class Measured:
    """One prompt length.

    Attributes:
        context: Positions in the caches while the parts were measured.
        plain_memory, memory: Peak bytes of the loop without and with the drafter.
        trials: What each measured and what follows from it, by name. `forward_N` is a
            target forward of N rows, `ratio_N` the same in forwards of one row.
    """

    prompt_tokens: int
    context: int
    plain_memory: int
    memory: int | None
    trials: list[dict[str, float]]

    def estimates(self, seed: int) -> dict[str, Estimate]:
        """Medians over the trials, with intervals."""
        return {
            name: median_interval([trial[name] for trial in self.trials], seed)
            for name in self.trials[0]
        }


def refuse_long_prompts(target: Target, drafter: Drafter | None, plan: Plan) -> None:
    """Raise DFlash2Error for a prompt of more tokens than a model has positions."""
    tokens, name = max(plan.prompt_tokens), target.source.name
    limits = {name: read_longest(ConfigReader(target.config, name))}
    if drafter is not None:
        limits[drafter.source.name] = drafter.config.max_position_embeddings
    for name, limit in limits.items():
        if limit is not None and tokens > limit:
            raise DFlash2Error(
                f"{name}: max_position_embeddings is {limit}, but a prompt has "
                f"{tokens} tokens; give shorter ones (--prompt-tokens)"
            )


def measure_cycle(
    target: Target,
    drafter: Drafter | None,
    plan: Plan,
    *,
    tell: Callable[[], None] = lambda: None,
) -> list[Measured]:
    """Measure every prompt length.

    Args:
        tell: Called after the warm-up and after every trial of each length.
    """
    with mx.stream(generation_stream), wired_limit():
        return [
            _measure_length(_Loops(target, drafter, plan, length), tell)
            for length in plan.prompt_tokens
        ]


@dataclass(frozen=True)
class _Loops:
    """The loop over one random prompt."""

    target: Target
    drafter: Drafter | None
    plan: Plan
    length: int

    @property
    def context(self) -> int:
        return self.length + self.plan.generation_tokens // 2

    def tokens(self) -> list[int]:
        """The prompt and what stands for the tokens emitted after it."""
        key, shape = mx.random.key(self.plan.seed), (self.context,)
        return mx.random.randint(0, self.target.vocab_size, shape, key=key).tolist()

    def run(self, drafter: Drafter | None) -> tuple[float, float]:
        """Prompt tokens a second, and milliseconds of a plain step or whole cycle."""
        prompt = self.tokens()[: self.length]
        width = self.plan.num_draft_tokens if drafter else 0
        decoding = Decoding(
            self.target,
            drafter,
            TokenRule(SamplingConfig()),
            seed=self.plan.seed,
            prefill_step_size=self.plan.prefill_step_size,
        )
        whole, before = [], time.perf_counter()
        for emission in decoding.run(
            prompt,
            max_tokens=self.plan.generation_tokens,
            eos=frozenset(),
            num_draft_tokens=width,
        ):
            now = time.perf_counter()
            if len(decoding.tokens) == len(prompt) + 1:
                speed = len(prompt) / (now - before)
            elif (emission.drafted or 0) == width:
                whole.append((now - before) * 1e3)
            before = now
        return speed, median(whole)

    def peak_memory(self, drafter: Drafter | None) -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        self.run(drafter)
        return mx.get_peak_memory()

    def parts(self) -> dict[str, Callable[[], None]]:
        parts = CycleParts(
            self.target,
            self.drafter,
            self.tokens(),
            prefill_step_size=self.plan.prefill_step_size,
        )
        widths = range(1, max(WIDEST, self.plan.num_draft_tokens + 1) + 1)
        found = {f"forward_{rows}": partial(parts.forward, rows) for rows in widths}
        if self.drafter is not None:
            found["draft"] = partial(parts.draft, self.plan.num_draft_tokens)
            found["decision"] = parts.decision(self.plan.num_draft_tokens)
        return found


def _measure_length(loops: _Loops, tell: Callable[[], None]) -> Measured:
    """Warm up, which also shows the memory; then the trials, in turn back and forth."""
    plain_memory = loops.peak_memory(None)
    memory = loops.peak_memory(loops.drafter) if loops.drafter else None
    parts = loops.parts()
    measure(parts, 1)
    tell()
    trials = []
    for number in range(loops.plan.trials):
        trials.append(_trial(loops, parts, back=number % 2 == 1))
        tell()
    return Measured(loops.length, loops.context, plain_memory, memory, trials)


def _trial(
    loops: _Loops, parts: dict[str, Callable[[], None]], *, back: bool
) -> dict[str, float]:
    found: dict[str, float] = {}

    def plain() -> None:
        found["prefill"], found["plain"] = loops.run(None)

    def alone() -> None:
        found.update({n: median(ms) for n, ms in measure(parts, ROUNDS).items()})

    def speculative() -> None:
        found["drafter_prefill"], found["cycle"] = loops.run(loops.drafter)

    steps = [plain, alone, *([speculative] if loops.drafter else [])]
    for step in reversed(steps) if back else steps:
        step()
    return _completed(found, loops.plan.num_draft_tokens)


def _completed(found: dict[str, float], width: int) -> dict[str, float]:
    """What follows from the measured parts, and all of it in the table's order."""
    one, forwards = found["forward_1"], [n for n in found if n.startswith("forward_")]
    ratios = {n.replace("forward", "ratio"): found[n] / one for n in forwards}
    follows = {}
    if "cycle" in found:
        cycle, alone = found["cycle"], found[f"forward_{width + 1}"] + found["draft"]
        follows = {
            "overhead": cycle - alone,
            "over_parts": cycle / alone,
            "break_even": cycle / found["plain"],
        }
    known = found | ratios | follows
    parts = ["draft", "decision", "cycle", *follows]
    order = ["prefill", "drafter_prefill", "plain", *forwards, *ratios, *parts]
    return {name: known[name] for name in order if name in known}
