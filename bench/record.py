"""What a bench measured, as its JSON file holds it; nothing is computed here."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from mlx_dflash2.stats import AcceptanceStats

FORMAT, VERSION = "mlx-dflash2 bench", 1
TICK = 1e-9  # seconds, and of milliseconds too: nothing that was timed took less

Count = Annotated[int, Field(ge=0)]
Taken = Annotated[float, Field(ge=TICK)]


class Environment(TypedDict):
    """Machine, system and versions; a backend may add to it."""

    __pydantic_config__ = ConfigDict(extra="allow")

    machine: str
    processor: str
    cores: int | None
    memory_gb: float
    system: str
    backend: str
    device: str
    versions: dict[str, str]
    date: str


class Settings(TypedDict):
    """What was asked for; all but the seed is only shown and compared."""

    __pydantic_config__ = ConfigDict(extra="allow")

    seed: Count


class WorkloadFacts(TypedDict):
    """The prompts as a whole; `domains` counts those of each."""

    sha256: str
    source: str
    domains: dict[str, Count]


class ComparisonFacts(TypedDict):
    """See `comparison.Comparison.as_dict`."""

    identical: bool
    kind: Literal["identical", "near tie", "difference"]
    position: Count | None
    plain: int | None
    speculative: int | None
    plain_logit: float | None
    speculative_logit: float | None
    gap: float | None
    ulps: float | None


@dataclass(frozen=True)
class ModelFacts:
    """A model as it was measured.

    Attributes:
        name: As the command line gave it: a folder or a Hub id.
        revision: The commit on the Hub; None for a folder.
        kind: "llama", or the drafter's family.
        dtype: Of the floats it computes in.
        quantization: Its settings (bits, group_size), or None.
        files: SHA-256 of config.json and of every weight file, by name.
        tokenizer: SHA-256 over the tokenizer's files and chat template; targets only.
        num_draft_tokens: What a drafter was trained for; None for a target.
    """

    name: str
    revision: str | None
    kind: str
    dtype: str
    quantization: dict[str, Any] | None
    files: dict[str, str]
    tokenizer: str | None = None
    num_draft_tokens: int | None = None


@dataclass(frozen=True)
class Arm:
    """One way of decoding that is measured.

    Attributes:
        label: Unique in a record, shown in tables.
        target: Index into the record's targets.
        drafter: Index into the record's drafters; None decodes plainly.
        num_draft_tokens: Drafted tokens a cycle verifies at most; 0 for plain.
    """

    label: str
    target: Count
    drafter: Count | None = None
    num_draft_tokens: Count = 0

    def __post_init__(self) -> None:
        if (self.drafter is None) != (self.num_draft_tokens == 0):
            raise ValueError("an arm drafts tokens if, and only if, it has a drafter")


@dataclass(frozen=True)
class RunRecord:
    """One decoding. Text beyond an end of sequence is in no number.

    Attributes:
        tokens: Emitted, the one that ended the sequence included.
        prefill_seconds: Until the first token.
        decode_seconds: From then on; 0 if that was all.
    """

    arm: Count
    tokens: Annotated[int, Field(ge=1)]
    finish_reason: str
    prefill_seconds: Taken
    decode_seconds: float

    def __post_init__(self) -> None:
        if self.tokens > 1 and self.decode_seconds < TICK:
            raise ValueError(f"{self.tokens} tokens were decoded in no time")


@dataclass(frozen=True)
class Costs:
    """Medians of the parts of a cycle, each alone, in milliseconds.

    Attributes:
        context: Positions in both caches while it was measured.
        decode: Target forward of one row, choice of its token included.
        verify: Target forward of anchor and drafted tokens, choices included.
        draft: One proposal.
    """

    context: Count
    decode: Taken
    verify: Taken
    draft: Taken


@dataclass(frozen=True)
class Coverage:
    """How often the target's token was among a slot's candidates.

    Attributes:
        trials: Cycles whose slot has a known right token, per slot.
        hits: Of those, the right token was a candidate.
        reachable_per_cycle: Slots from the first on that were all covered: what a
            selector that never errs would have accepted.
    """

    trials: list[Count]
    hits: list[Count]
    reachable_per_cycle: list[Count]


@dataclass(frozen=True)
class Speculation:
    """What a speculative arm did on one prompt.

    Attributes:
        comparison: With the plain arm of the same target.
        repeated: All runs of this arm gave the same tokens.
        coverage: None for drafters without candidates.
    """

    arm: Count
    counts: AcceptanceStats
    comparison: ComparisonFacts
    repeated: bool
    costs: Costs
    coverage: Coverage | None = None


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, decoded by every arm.

    Attributes:
        thinking: The mode the chat template was given; None left it to the template.
        tools: Whether the chat template wrote the given tools; None without tools.
        runs: In the order they ran.
        text: What plain decoding of the first target wrote.
    """

    name: str
    domain: str
    thinking: bool | None
    sha256: str
    messages: list[dict[str, Any]]
    tools: bool | None
    prompt_tokens: int
    runs: list[RunRecord]
    speculation: list[Speculation]
    text: str


@dataclass(frozen=True)
class Drift:
    """One prompt decoded plainly at the start and at the end of a bench.

    Attributes:
        first, last: Milliseconds a token.
    """

    arm: Count
    prompt: str
    first: Taken
    last: Taken


@dataclass(frozen=True)
class SampledTest:
    """Tokens of many sampled runs with and without the drafter.

    Attributes:
        p_values: Of the second, third and fourth token, by a permutation test of the
            chi-square statistic between the two samples.
    """

    arm: Count
    prompt: str
    temperature: float
    samples: int
    p_values: Annotated[list[float], Field(min_length=1)]


@dataclass(frozen=True)
class Record:
    """Everything a bench measured.

    Attributes:
        partial: The bench has not come to its end.
    """

    environment: Environment
    settings: Settings
    workload: WorkloadFacts
    targets: list[ModelFacts]
    drafters: list[ModelFacts]
    arms: list[Arm]
    prompts: list[PromptRecord] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    sampled: list[SampledTest] = field(default_factory=list)
    partial: bool = True

    def as_dict(self) -> dict[str, Any]:
        """The record as JSON holds it."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}
