"""What a bench found, computed from its record; the words of a report's JSON."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .estimates import Estimate
from .record import Count, Taken


@dataclass(frozen=True)
class Pace:
    """Medians over prompts: tokens a second of both arms, and their ratio."""

    plain: Estimate
    speculative: Estimate
    speedup: Estimate


@dataclass(frozen=True)
class Speeds:
    """How fast a group of prompts was decoded.

    Attributes:
        decode: From the first token on, which is not counted.
        end_to_end: The prompt included, all tokens counted.
        projected: The speedup that acceptance length and costs alone promise; None
            where the costs are of blocks that hardly a cycle drafted.
        step, cycle: Milliseconds of a plain token and of a cycle in the loop.
        break_even: The acceptance length at which a cycle costs what it saves.
    """

    decode: Pace
    end_to_end: Pace
    projected: float | None
    step: Taken
    cycle: Taken | None
    break_even: float | None


@dataclass(frozen=True)
class Slot:
    """Acceptance at one place of the block.

    Attributes:
        conditional: Share accepted of the cycles that accepted the slot before.
        cumulative: Share accepted of all cycles that drafted this slot.
    """

    conditional: float | None
    conditional_trials: Count
    cumulative: float | None
    cumulative_trials: Count


@dataclass(frozen=True)
class Acceptance:
    """Sums over the cycles of a group, and their ratios.

    Attributes:
        length: Tokens emitted per cycle, bonus token included.
        per_cycle: Accepted drafted tokens per cycle.
        rate: Accepted over drafted tokens.
        usual: Tokens that the median cycle drafted.
        slots: From the first drafted token on.
        histogram: Cycles that accepted 0, 1, ... tokens.
    """

    cycles: Count
    drafted: Count
    accepted: Count
    emitted: Count
    length: float | None
    per_cycle: float | None
    rate: float | None
    usual: float | None
    slots: Annotated[list[Slot], Field(min_length=1)]
    histogram: list[Count]

    def __post_init__(self) -> None:
        if len(self.histogram) != len(self.slots) + 1:
            raise ValueError("slots and histogram are of different widths")

    @property
    def curtailed(self) -> bool:
        """The median cycle drafted less than half a block, so runs were too short."""
        return self.usual is not None and self.usual < len(self.slots) / 2


@dataclass(frozen=True)
class CycleCosts:
    """Medians over prompts, in milliseconds.

    Attributes:
        context: Positions in the caches.
        overhead: What a cycle of the loop took beyond its verify and draft; None where
            these are of blocks that hardly a cycle drafted.
    """

    context: float
    decode: Taken
    verify: Taken
    draft: Taken
    overhead: float | None


@dataclass(frozen=True)
class Lossless:
    """Greedy outputs held against plain decoding.

    Attributes:
        repeated: Prompts whose runs all gave the same tokens.
    """

    compared: Count
    identical: Count
    near_ties: Count
    differences: Count
    repeated: Count


@dataclass(frozen=True)
class SlotCoverage:
    """The right tokens among the candidates.

    Attributes:
        trials, hits: Cycles, per slot.
        oracle_length: The acceptance length of a selector that never errs.
    """

    trials: list[Count]
    hits: list[Count]
    oracle_length: float


@dataclass(frozen=True)
class Group:
    """The prompts of one domain, or all of them.

    Attributes:
        timed: Prompts with a second token, without which there is no speed.
        speeds: None where no number may be given.
        at_limit: Share of all runs that ended at the token limit.
        coverage: None for drafters without candidates.
    """

    name: str
    prompts: Count
    timed: Count
    speeds: Speeds | None
    at_limit: float
    acceptance: Acceptance
    costs: CycleCosts
    lossless: Lossless
    coverage: SlotCoverage | None


@dataclass(frozen=True)
class Split:
    """A greedy output that leaves plain decoding's.

    Attributes:
        prompt: None in a report without prompts, as are the two tokens.
        position: Index of the first token that differs.
    """

    prompt: str | None
    domain: str
    position: Count
    kind: str
    plain: int | None
    speculative: int | None
    plain_logit: float | None
    speculative_logit: float | None
    gap: float | None
    ulps: float | None


@dataclass(frozen=True)
class Table:
    """What one speculative arm did in one thinking mode.

    Attributes:
        no_headline: Why the overall speeds are missing, if they are.
        verdict: In sentences.
    """

    arm: Count
    thinking: bool | None
    domains: list[Group]
    overall: Group
    no_headline: str | None
    splits: list[Split]
    verdict: list[str]

    @property
    def groups(self) -> list[Group]:
        return [*self.domains, self.overall]


@dataclass(frozen=True)
class BestWidth:
    """The fastest of several widths of one drafter.

    Attributes:
        arm: It is this one.
        gain: Its speed over that of the trained width; None where that was not run.
    """

    arm: Count
    thinking: bool | None
    speedup: Estimate
    trained: int
    gain: Estimate | None


@dataclass(frozen=True)
class TargetDrift:
    """How plain decoding changed during the bench: `last / first - 1`."""

    arm: Count
    prompt: str | None
    first: Taken
    last: Taken
    drift: float


@dataclass(frozen=True)
class SampledResult:
    """Sampled output held against plain sampling.

    Attributes:
        p_values: Of the second token and those behind it.
        same: No p-value is below the level, corrected for their number.
    """

    arm: Count
    prompt: str | None
    temperature: float
    samples: int
    p_values: Annotated[list[float], Field(min_length=1)]
    same: bool


@dataclass(frozen=True)
class Results:
    """Everything that is computed from a record.

    Attributes:
        verdict: Sentences on the widths.
        warnings: What a reader of the numbers has to know.
    """

    tables: list[Table]
    widths: list[BestWidth]
    drift: list[TargetDrift]
    sampled: list[SampledResult]
    verdict: list[str]
    warnings: list[str]
