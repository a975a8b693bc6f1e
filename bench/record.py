"""What a bench measured, as its JSON file holds it; nothing is computed here."""

from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from mlx_dflash2.stats import AcceptanceStats

FORMAT, VERSION = "mlx-dflash2 bench", 1


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
    quantization: dict | None
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
    target: int
    drafter: int | None = None
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class RunRecord:
    """One decoding. Text beyond an end of sequence is in no number.

    Attributes:
        tokens: Emitted, the one that ended the sequence included.
        prefill_seconds: Until the first token.
        decode_seconds: From then on.
    """

    arm: int
    tokens: int
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Costs:
    """Medians of the parts of a cycle, each alone, in milliseconds.

    Attributes:
        context: Positions in both caches while it was measured.
        decode: Target forward of one row, choice of its token included.
        verify: Target forward of anchor and drafted tokens, choices included.
        draft: One proposal.
    """

    context: int
    decode: float
    verify: float
    draft: float


@dataclass(frozen=True)
class Coverage:
    """How often the target's token was among a slot's candidates.

    Attributes:
        trials: Cycles whose slot has a known right token, per slot.
        hits: Of those, the right token was a candidate.
        reachable_per_cycle: Slots from the first on that were all covered: what a
            selector that never errs would have accepted.
    """

    trials: list[int]
    hits: list[int]
    reachable_per_cycle: list[int]


@dataclass(frozen=True)
class Speculation:
    """What a speculative arm did on one prompt.

    Attributes:
        comparison: With the plain arm of the same target (`verify.Comparison.as_dict`).
        repeated: All runs of this arm gave the same tokens.
        coverage: None for drafters without candidates.
    """

    arm: int
    counts: AcceptanceStats
    comparison: dict[str, Any]
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

    arm: int
    prompt: str
    first: float
    last: float


@dataclass(frozen=True)
class SampledTest:
    """Tokens of many sampled runs with and without the drafter.

    Attributes:
        p_values: Of the second, third and fourth token, by a permutation test of the
            chi-square statistic between the two samples.
    """

    arm: int
    prompt: str
    temperature: float
    samples: int
    p_values: list[float]


@dataclass(frozen=True)
class Record:
    """Everything a bench measured.

    Attributes:
        partial: The bench has not come to its end.
        environment: Machine, system and versions.
        settings: What was asked for.
        workload: "sha256", "source" and how many prompts a domain has.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    workload: dict[str, Any]
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


def record_from(content: dict[str, Any]) -> Record:
    """The record that `Record.as_dict` wrote.

    Raises:
        KeyError, TypeError: A field is missing or misshapen.
    """
    return rebuild(Record, content)


def rebuild(kind: Any, content: Any) -> Any:
    """A dataclass, or a list of some, from what `asdict` made of it."""
    if content is None:
        return None
    if is_dataclass(kind):
        known = {each.name: each.type for each in fields(kind)}
        return kind(**{name: rebuild(known[name], content[name]) for name in known})
    if get_origin(kind) is list:
        return [rebuild(get_args(kind)[0], each) for each in content]
    if isinstance(kind, UnionType):
        return rebuild(get_args(kind)[0], content)
    return content
