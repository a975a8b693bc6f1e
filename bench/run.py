"""Decode every prompt with every arm, back and forth, and keep what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlx_dflash2.comparison import Comparison
from mlx_dflash2.errors import DFlash2Error

from .engine import Engine, Run
from .estimates import same_distribution
from .record import (
    Arm,
    Drift,
    PromptRecord,
    Record,
    RunRecord,
    SampledTest,
    Speculation,
)
from .workload import Prompt

WARM_UP_TOKENS = 16
SAMPLED_TOKENS = 4  # the first comes from the prefill, the others from cycles
Job = tuple[Prompt, bool | None]  # a prompt and its thinking mode


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        modes: Thinking modes of the chat template; (None,) leaves it alone.
        template: False takes the messages' bare text.
        max_tokens: Emitted at most.
        repeats: Times every prompt is run there and back.
        cost_repeats: Measurements of each part of a cycle.
        samples: Sampled runs with and without a drafter; 0 makes no such test.
        temperature: Of the sampled runs.
        seed: Of the sampled runs and of the test on them.
    """

    prompts: Sequence[Prompt]
    modes: Sequence[bool | None] = (None,)
    template: bool = True
    max_tokens: int = 256
    repeats: int = 1
    cost_repeats: int = 5
    samples: int = 0
    temperature: float = 1.0
    seed: int = 0

    @property
    def jobs(self) -> list[Job]:
        return [(prompt, mode) for prompt in self.prompts for mode in self.modes]


class Bench:
    """One bench on one engine.

    Args:
        record: Without prompts, or what an interrupted bench of this plan measured.
        save: Called with the record whenever it has grown.
        tell: Called with what is measured next.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        record: Record,
        *,
        save: Callable[[Record], None],
        tell: Callable[[str], None],
    ):
        self.engine, self.plan, self.record = engine, plan, record
        self._save, self._tell = save, tell

    def run(self) -> Record:
        """Measure what the record lacks.

        Raises:
            DFlash2Error: A prompt cannot be rendered, or has one thinking mode only.
        """
        self._refuse_useless_modes()
        done = {(prompt.name, prompt.thinking) for prompt in self.record.prompts}
        missing = [
            (prompt, mode)
            for prompt, mode in self.plan.jobs
            if (prompt.name, mode) not in done
        ]
        if missing or not self.record.drift:
            self._tell("warm-up")
            self._warm_up(self.plan.jobs[0])
        for prompt, mode in missing:
            self._tell(prompt.name)
            measured = self._measure(prompt, mode)
            self._grow(prompts=[*self.record.prompts, measured])
        if not self.record.drift:
            self._tell("drift")
            self._measure_drift(*self.plan.jobs[0])
        self._test_sampled()
        self._grow(partial=False)
        return self.record

    def _grow(self, **fields) -> None:
        self.record = replace(self.record, **fields)
        self._save(self.record)

    def _refuse_useless_modes(self) -> None:
        """Two modes must give two prompts."""
        if len(self.plan.modes) == 1:
            return
        for target, facts in enumerate(self.engine.targets):
            prompt = self.plan.prompts[0]
            forms = {tuple(self._encode(target, prompt, m)) for m in self.plan.modes}
            if len(forms) == 1:
                raise DFlash2Error(
                    f"{facts.name}: its chat template writes the same with thinking on "
                    "and off; leave --thinking out"
                )

    def _encode(self, target: int, prompt: Prompt, mode: bool | None) -> list[int]:
        return self.engine.encode(
            target,
            prompt.messages,
            tools=prompt.tools,
            thinking=mode,
            template=self.plan.template,
        )

    def _warm_up(self, job: Job) -> None:
        for arm in self.record.arms:
            tokens = self._encode(arm.target, *job)
            self.engine.run(
                arm, tokens, max_tokens=min(WARM_UP_TOKENS, self.plan.max_tokens)
            )

    def _measure(self, prompt: Prompt, mode: bool | None) -> PromptRecord:
        """All arms on one prompt: first to last, last to first, as often as asked."""
        arms = self.record.arms
        prompts = [
            self._encode(target, prompt, mode)
            for target in range(len(self.engine.targets))
        ]
        there = list(range(len(arms)))
        order = (there + there[::-1]) * self.plan.repeats
        runs: dict[int, list[Run]] = {arm: [] for arm in there}
        records = []
        for arm in order:
            run = self._run(arms[arm], prompts)
            runs[arm].append(run)
            records.append(_run_record(arm, run))
        plain = {
            arms[arm].target: runs[arm][0] for arm in there if _is_plain(arms[arm])
        }
        return PromptRecord(
            name=prompt.name,
            domain=prompt.domain,
            thinking=mode,
            sha256=prompt.sha256,
            messages=prompt.messages,
            tools=self._writes_tools(prompt, mode),
            prompt_tokens=len(prompts[0]),
            runs=records,
            speculation=[
                self._speculation(arm, prompts[arms[arm].target], runs[arm], plain)
                for arm in there
                if not _is_plain(arms[arm])
            ],
            text=self.engine.decode(0, plain[0].tokens),
        )

    def _run(self, arm: Arm, prompts: list[list[int]]) -> Run:
        return self.engine.run(
            arm, prompts[arm.target], max_tokens=self.plan.max_tokens
        )

    def _writes_tools(self, prompt: Prompt, mode: bool | None) -> bool | None:
        """Whether every target's template wrote the tools; None without any."""
        if prompt.tools is None:
            return None
        bare = replace(prompt, tools=None)
        return all(
            self._encode(target, prompt, mode) != self._encode(target, bare, mode)
            for target in range(len(self.engine.targets))
        )

    def _speculation(
        self, index: int, prompt: list[int], runs: list[Run], plain: dict[int, Run]
    ) -> Speculation:
        arm, first = self.record.arms[index], runs[0]
        right = plain[arm.target].tokens
        return Speculation(
            arm=index,
            counts=first.stats,
            comparison=self._comparison(arm, prompt, first.tokens, right),
            repeated=all(run.tokens == first.tokens for run in runs),
            costs=self.engine.costs(
                arm, prompt, first.tokens, repeats=self.plan.cost_repeats
            ),
            coverage=self.engine.coverage(arm, prompt, right, first),
        )

    def _comparison(
        self, arm: Arm, prompt: list[int], tokens: list[int], plain: list[int]
    ) -> dict:
        """Where the arm left plain decoding, which is repeated for its logits."""
        if tokens == plain:
            return Comparison().as_dict()
        return self.engine.compare(arm, prompt, tokens, max_tokens=self.plan.max_tokens)

    def _measure_drift(self, prompt: Prompt, mode: bool | None) -> None:
        """Decode the first prompt plainly once more."""
        first, found = self.record.prompts[0], []
        for index, arm in enumerate(self.record.arms):
            if not _is_plain(arm):
                continue
            before = next(run for run in first.runs if run.arm == index)
            prompts = {arm.target: self._encode(arm.target, prompt, mode)}
            after = _run_record(index, self._run(arm, prompts))
            if before.tokens > 1:
                found.append(
                    Drift(index, prompt.name, _ms_a_token(before), _ms_a_token(after))
                )
        self._grow(drift=found)

    def _test_sampled(self) -> None:
        """Hold each arm's sampled tokens against those of plain decoding."""
        if not self.plan.samples:
            return
        done = {test.arm for test in self.record.sampled}
        prompt, mode = min(self.plan.jobs, key=lambda job: len(self._encode(0, *job)))
        plain: dict[int, list[list[int]]] = {}
        for index, arm in enumerate(self.record.arms):
            if _is_plain(arm) or index in done:
                continue
            self._tell(f"sampled, {arm.label}")
            tokens = self._encode(arm.target, prompt, mode)
            if arm.target not in plain:
                alone = replace(arm, drafter=None, num_draft_tokens=0)
                plain[arm.target] = self._sample(alone, tokens, half=1)
            pairs = zip(
                self._sample(arm, tokens, half=0), plain[arm.target], strict=True
            )
            test = SampledTest(
                index,
                prompt.name,
                self.plan.temperature,
                self.plan.samples,
                [same_distribution(*pair, self.plan.seed) for pair in pairs],
            )
            self._grow(sampled=[*self.record.sampled, test])

    def _sample(self, arm: Arm, prompt: list[int], *, half: int) -> list[list[int]]:
        """The second, third and fourth tokens of many runs; -1 where one had ended.

        Args:
            half: Of the seeds, so that two samples share none.
        """
        start = (2 * self.plan.seed + half) * self.plan.samples
        runs = [
            self.engine.run(
                arm,
                prompt,
                max_tokens=SAMPLED_TOKENS + 1,  # a cycle drafts none on the last token
                temperature=self.plan.temperature,
                seed=start + number,
            ).tokens
            for number in range(self.plan.samples)
        ]
        return [
            [run[place] if place < len(run) else -1 for run in runs]
            for place in range(1, SAMPLED_TOKENS)
        ]


def _is_plain(arm: Arm) -> bool:
    return arm.drafter is None


def _ms_a_token(run: RunRecord) -> float:
    return 1e3 * run.decode_seconds / (run.tokens - 1)


def _run_record(arm: int, run: Run) -> RunRecord:
    return RunRecord(
        arm=arm,
        tokens=len(run.tokens),
        finish_reason=run.finish_reason,
        prefill_seconds=run.prefill_seconds,
        decode_seconds=run.decode_seconds,
    )
