"""One prompt under one speculative arm, beside the plain arm of its target."""

from dataclasses import dataclass
from statistics import fmean

from .record import PromptRecord, Record, RunRecord, Speculation


@dataclass(frozen=True)
class Case:
    """What both arms did with one prompt."""

    prompt: PromptRecord
    plain: list[RunRecord]
    speculative: list[RunRecord]
    done: Speculation

    @property
    def runs(self) -> list[RunRecord]:
        return self.plain + self.speculative

    @property
    def timed(self) -> bool:
        """A generation of one token has a prefill only."""
        return all(run.tokens > 1 for run in self.runs)

    @property
    def cycle(self) -> float | None:
        """Milliseconds of a cycle; None if none was run."""
        seconds = fmean(run.decode_seconds for run in self.speculative)
        cycles = self.done.counts.cycles
        return 1e3 * seconds / cycles if cycles else None


def find_cases(record: Record, arm: int, thinking: bool | None) -> list[Case]:
    """The cases of a speculative arm in one thinking mode."""
    target = record.arms[arm].target
    plain = next(
        index
        for index, other in enumerate(record.arms)
        if other.target == target and other.drafter is None
    )
    return [
        Case(
            prompt,
            plain=[run for run in prompt.runs if run.arm == plain],
            speculative=[run for run in prompt.runs if run.arm == arm],
            done=next(done for done in prompt.speculation if done.arm == arm),
        )
        for prompt in record.prompts
        if prompt.thinking == thinking
    ]


def decode_seconds(runs: list[RunRecord]) -> float:
    """Seconds a token behind the first, which the prefill gave: the runs' mean."""
    return fmean(run.decode_seconds / (run.tokens - 1) for run in runs)


def total_seconds(runs: list[RunRecord]) -> float:
    """Seconds a token, the prompt's time included: the runs' mean."""
    return fmean(
        (run.prefill_seconds + run.decode_seconds) / run.tokens for run in runs
    )
