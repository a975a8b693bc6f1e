"""Everything a training run is told, from a TOML or JSON file and from flags.

`example.toml` beside this file lists every key with its default and its meaning.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.families import FAMILIES

from .objective import SELECTOR_TERMS, Objective
from .settings import at_least, build, flat, merged, one_of, read_table, wrong

EXAMPLE = Path(__file__).with_name("example.toml")
KINDS = tuple(family.kind for family in FAMILIES)
PRECISIONS = ("auto", "fp32", "fp16", "bf16")
SCHEDULES = ("wsd", "cosine")

OBJECTIVES: dict[str, dict[str, float]] = {  # of a family, where a file says nothing
    "dflash2": {"ce": 1.0, "selector_ce": 0.1},
    "dflash": {"ce": 1.0},
    "dspark": {"ce": 0.1, "tv": 1.8, "confidence": 1.0},
}
PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "published": {  # of the MiniCPM5-2B-DFlash2 card; what it does not say is ours
        "steps": 1985,
        "batch": {"rows": 8, "anchors": 4},
        "objective": {"kl": 1.0, "ce": 0.1, "selector_ce": 1.0},
        "stages": {"backbone": 0, "selector": 0},
    },
}
FREE = (  # what a resumed run may change; the contract knows models and data by content
    *("out", "offline", "minutes", "threads", "device", "evaluation", "checkpoints"),
    "features",
    *("target", "revision", "data", "anneal_data", "warm_start", "warm_start_revision"),
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the drafter is made of; sizes left out are the target's.

    Attributes:
        taps: Target layers whose outputs are read; () spreads `num_taps` of them.
        block_size: As the family's config counts; left out, seven drafted tokens.
        mask_token_id: A token that fills the block after the anchor.
        final_norm: "target" starts the final norm as a copy of the target's, "ones"
            does not.
    """

    family: str = "dflash2"
    layers: int = 5
    num_taps: int = 5
    taps: tuple[int, ...] = ()
    block_size: int | None = None
    mask_token_id: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    markov_rank: int = 256
    confidence: bool = True
    final_norm: str = "target"

    def check(self) -> None:
        one_of("drafter.family", self.family, KINDS)
        one_of("drafter.final_norm", self.final_norm, ("target", "ones"))
        for name in ("layers", "num_taps", "selector_rank", "markov_rank"):
            at_least(f"drafter.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How the selector of DFlash 2 is brought in, in steps.

    Attributes:
        backbone: Without the selector's terms.
        selector: After that, its terms train the selector alone; then everything.
    """

    backbone: int = 500
    selector: int = 500

    def check(self) -> None:
        at_least("stages.backbone", self.backbone, 0)
        at_least("stages.selector", self.selector, 0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What one optimizer step sees.

    Attributes:
        rows: Rows of the step, over all processes.
        rows_at_once: Of one forward; the rest is accumulated.
        anchors: Blocks of each row, drawn anew at every visit.
        head_tokens: Compute losses over this many tokens and those at hand: the data's
            most frequent ones, and all others in turn; 0 for the whole vocabulary.
        blocks_at_once: Blocks whose logits exist at the same time. If a forward has
            more, the gradient computes the logits of all a second time.
        recompute: Keep no activations inside the drafter's layers.
    """

    rows: int = 16
    rows_at_once: int = 1
    anchors: int = 128
    head_tokens: int = 0
    blocks_at_once: int = 8
    recompute: bool = False

    def check(self) -> None:
        for name in ("rows", "rows_at_once", "anchors", "blocks_at_once"):
            at_least(f"batch.{name}", getattr(self, name), 1)
        at_least("batch.head_tokens", self.head_tokens, 0)
        if self.rows % self.rows_at_once:
            raise DFlash2Error(
                f"batch.rows is {self.rows}, expected a multiple of rows_at_once "
                f"{self.rows_at_once}"
            )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its learning rate.

    Attributes:
        lr: Of what a warm start brought, and of everything without one.
        high_lr: Of codebooks and Markov tables, which hardly move at a low rate, and
            of the parts a warm start did not bring.
        schedule: "wsd" holds the rate and lowers it over the last `decay` of the
            steps, "cosine" lowers it from the warm-up on.
        lr_end: What is left of the rate at the end, as a share.
        eight_bit: Keep the moments of large matrices in 8 bits (bitsandbytes).
    """

    lr: float = 6e-4
    high_lr: float = 6e-4
    betas: tuple[float, ...] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: int = 200
    schedule: str = "wsd"
    decay: float = 0.2
    lr_end: float = 0.1
    clip: float = 1.0
    eight_bit: bool = False

    def check(self) -> None:
        one_of("optimizer.schedule", self.schedule, SCHEDULES)
        for name in ("lr", "high_lr", "clip"):
            if not getattr(self, name) > 0:
                raise wrong(f"optimizer.{name}", getattr(self, name), "more than 0")
        for name in ("weight_decay", "warmup"):
            at_least(f"optimizer.{name}", getattr(self, name), 0)
        for name in ("decay", "lr_end"):
            if not 0 <= getattr(self, name) <= 1:
                raise wrong(f"optimizer.{name}", getattr(self, name), "0 to 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise wrong("optimizer.betas", list(self.betas), "two numbers below 1")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Held-out measurements during a run.

    Attributes:
        every: Steps between two; 0 for none but the last.
        rows: Held-out rows to use; 0 for all.
        blocks_at_once: Blocks whose logits exist at the same time.
    """

    every: int = 250
    rows: int = 64
    blocks_at_once: int = 32

    def check(self) -> None:
        at_least("evaluation.every", self.every, 0)
        at_least("evaluation.rows", self.rows, 0)
        at_least("evaluation.blocks_at_once", self.blocks_at_once, 1)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the state of a run is written.

    Attributes:
        every: Steps between two; the last step is always written.
        keep: How many of the newest stay, beside the best.
    """

    every: int = 250
    keep: int = 2

    def check(self) -> None:
        at_least("checkpoints.every", self.every, 1)
        at_least("checkpoints.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
        target: Folder or Hub id of the frozen model.
        data: Folder that `train prepare` wrote; its held-out rows are for evaluation.
        anneal_data: Another one, whose rows the falling end of "wsd" sees.
        out: Folder of the run: checkpoints, metrics.
        cache_features: Run the target on each row once, and from then on read what it
            computed, rounded to float16. For small data that is visited often: the
            plan says how much disk it takes. Evaluation is always exact.
        features: Where those numbers lie, so that runs may share them; in `out` if
            empty.
        warm_start: A drafter to start from; new if empty.
        minutes: Stop after so much time, to be resumed; 0 for no limit.
        threads: Of the CPU; 0 leaves it to PyTorch.
        device: "auto" takes a GPU if there is one.
        precision: "auto" is fp32 on a CPU, fp16 on a GPU that has no bf16 of its
            own (compute capability below 8.0), else bf16.
    """

    target: str = ""
    revision: str | None = None
    offline: bool = False
    data: str = ""
    anneal_data: str = ""
    out: str = ""
    cache_features: bool = False
    features: str = ""
    warm_start: str = ""
    warm_start_revision: str | None = None
    steps: int = 5000
    minutes: float = 0.0
    seed: int = 0
    threads: int = 0
    device: str = "auto"
    precision: str = "auto"
    drafter: Shape = field(default_factory=Shape)
    objective: Objective = field(
        default_factory=lambda: Objective(**OBJECTIVES["dflash2"])
    )
    stages: Stages = field(default_factory=Stages)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    evaluation: Evaluation = field(default_factory=Evaluation)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)

    def check(self) -> None:
        """Raise DFlash2Error where a value is out of its range."""
        one_of("precision", self.precision, PRECISIONS)
        at_least("steps", self.steps, 1)
        for name in ("minutes", "seed", "threads"):
            at_least(name, getattr(self, name), 0)
        for part in ("drafter", "stages", "batch", "optimizer", "evaluation"):
            getattr(self, part).check()
        self.checkpoints.check()
        if self.anneal_data and self.optimizer.schedule != "wsd":
            raise DFlash2Error(
                "anneal_data is given, but only optimizer.schedule 'wsd' has an end "
                "that it is for"
            )

    def warnings(self) -> list[str]:
        """What is possible but hardly meant: settings that only suit a longer run."""
        found, staged = [], self.stages.backbone + self.stages.selector
        if not SELECTOR_TERMS.isdisjoint(self.objective.mix) and staged >= self.steps:
            found.append(
                f"stages.backbone and stages.selector take {staged} steps, and the run "
                f"has {self.steps}: none is left that trains everything together"
            )
        if self.optimizer.warmup >= self.steps:
            found.append(
                f"optimizer.warmup is {self.optimizer.warmup} steps, and the run has "
                f"{self.steps}: the full learning rate is never reached"
            )
        return [f"warning: {text}" for text in found]

    def need(self, *names: str) -> None:
        """Raise DFlash2Error unless these fields are given."""
        for name in names:
            if not getattr(self, name):
                raise DFlash2Error(
                    f"{name} is missing; give it in the configuration or as "
                    f"--{name.replace('_', '-')}"
                )

    def objective_at(self, step: int) -> Objective:
        """The objective of a step, counted from 0: its stage decides."""
        if step < self.stages.backbone:
            return replace(self.objective, selector_ce=0.0, selector_tv=0.0)
        if step < self.stages.backbone + self.stages.selector:
            return replace(self.objective, detach_selector=True)
        return self.objective

    def settled(self) -> dict[str, Any]:
        """What a resumed run may not change, by dotted name."""
        return {
            name: value
            for name, value in flat(asdict(self)).items()
            if name.split(".")[0] not in FREE
        }


def read_config(
    path: Path | None = None, flags: Mapping[str, Any] | None = None
) -> TrainConfig:
    """The configuration of a file, in which flags override single values.

    Args:
        path: TOML, or JSON by its ending; None starts from the defaults.
        flags: Values by dotted name, such as "optimizer.lr".

    Raises:
        DFlash2Error: The file cannot be read, a key is unknown, a value is not of its
            type or out of its range.
    """
    where = str(path) if path else "flags"
    raw = read_table(path) if path else {}
    for name, value in (flags or {}).items():
        *parents, last = name.split(".")
        place = raw
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise DFlash2Error(f"{where}: {parent} is {place!r}, not a table")
        place[last] = value
    preset = raw.pop("preset", "default")
    one_of(f"{where}: preset", preset, tuple(PRESETS))
    raw = merged(PRESETS[preset], raw)
    family = raw.get("drafter", {}).get("family", Shape.family)
    if "objective" not in PRESETS[preset] and family in OBJECTIVES:
        raw = merged({"objective": OBJECTIVES[family]}, raw)
    config = build(TrainConfig, raw, where, "")
    config.check()
    return config
