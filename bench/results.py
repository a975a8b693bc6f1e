"""What a bench found, computed from its record; the words of a report's JSON."""

from dataclasses import dataclass

from .estimates import Estimate


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
        projected: The speedup that acceptance length and costs alone promise.
        break_even: The acceptance length at which a cycle costs what it saves.
    """

    decode: Pace
    end_to_end: Pace
    projected: float | None
    break_even: float | None


@dataclass(frozen=True)
class Slot:
    """Acceptance at one place of the block.

    Attributes:
        conditional: Share accepted of the cycles that accepted the slot before.
        cumulative: Share accepted of all cycles that drafted this slot.
    """

    conditional: float | None
    conditional_trials: int
    cumulative: float | None
    cumulative_trials: int


@dataclass(frozen=True)
class Acceptance:
    """Sums over the cycles of a group, and their ratios.

    Attributes:
        length: Tokens emitted per cycle, bonus token included.
        per_cycle: Accepted drafted tokens per cycle.
        rate: Accepted over drafted tokens.
        slots: From the first drafted token on.
        histogram: Cycles that accepted 0, 1, ... tokens.
    """

    cycles: int
    drafted: int
    accepted: int
    emitted: int
    length: float | None
    per_cycle: float | None
    rate: float | None
    slots: list[Slot]
    histogram: list[int]


@dataclass(frozen=True)
class CycleCosts:
    """Medians over prompts, in milliseconds.

    Attributes:
        context: Positions in the caches.
        overhead: What a cycle of the loop took beyond its verify and draft.
    """

    context: float
    decode: float
    verify: float
    draft: float
    overhead: float | None


@dataclass(frozen=True)
class Lossless:
    """Greedy outputs held against plain decoding.

    Attributes:
        repeated: Prompts whose runs all gave the same tokens.
    """

    compared: int
    identical: int
    near_ties: int
    differences: int
    repeated: int


@dataclass(frozen=True)
class SlotCoverage:
    """The right tokens among the candidates.

    Attributes:
        trials, hits: Cycles, per slot.
        oracle_length: The acceptance length of a selector that never errs.
    """

    trials: list[int]
    hits: list[int]
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
    prompts: int
    timed: int
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
    position: int
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

    arm: int
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

    arm: int
    thinking: bool | None
    speedup: Estimate
    trained: int
    gain: Estimate | None


@dataclass(frozen=True)
class TargetDrift:
    """How plain decoding changed during the bench: `last / first - 1`."""

    arm: int
    prompt: str | None
    first: float
    last: float
    drift: float


@dataclass(frozen=True)
class SampledResult:
    """Sampled output held against plain sampling.

    Attributes:
        p_values: Of the second token and those behind it.
        same: No p-value is below the level, corrected for their number.
    """

    arm: int
    prompt: str | None
    temperature: float
    samples: int
    p_values: list[float]
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
