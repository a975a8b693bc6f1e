"""Bench records with known numbers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_dflash2.bench.analysis import analyse
from mlx_dflash2.bench.record import (
    Arm,
    Costs,
    Coverage,
    Drift,
    ModelFacts,
    PromptRecord,
    Record,
    RunRecord,
    SampledTest,
    Speculation,
)
from mlx_dflash2.comparison import Comparison
from mlx_dflash2.stats import AcceptanceStats

IDENTICAL = Comparison()
NEAR_TIE = Comparison(5, 11, 12, 20.5, 20.4995, 0.0005, 1.5)
DIFFERENCE = Comparison(9, 3, 4, 17.0, 15.0, 2.0, 4096.0)
COSTS = Costs(context=100, decode=10.0, verify=12.0, draft=3.0)


@dataclass(frozen=True)
class Outcome:
    """What one speculative arm does with a prompt.

    Attributes:
        cycles: Drafted, accepted and emitted tokens of each.
        cycle_ms: What a cycle takes in the loop.
    """

    cycles: Sequence[tuple[int, int, int]]
    cycle_ms: float = 16.0
    comparison: Comparison = IDENTICAL
    repeated: bool = True
    costs: Costs = COSTS
    coverage: Coverage | None = None


def one_prompt(
    name: str,
    domain: str,
    outcomes: Sequence[Outcome],
    *,
    plain_ms: float = 10.0,
    prefill_ms: float = 40.0,
    finish_reason: str = "stop",
    **fields: Any,
) -> PromptRecord:
    """A prompt run by a plain arm, then by arms 1, 2, ..., and back.

    The two runs of an arm take 2% less and 2% more than its mean.
    """
    tokens = [1 + sum(cycle[2] for cycle in outcomes[0].cycles)]
    seconds = [plain_ms * (tokens[0] - 1) / 1e3]
    for outcome in outcomes:
        tokens.append(1 + sum(cycle[2] for cycle in outcome.cycles))
        seconds.append(outcome.cycle_ms * len(outcome.cycles) / 1e3)
    arms = list(range(len(tokens)))
    runs = [
        RunRecord(
            arm, tokens[arm], finish_reason, prefill_ms / 1e3, scale * seconds[arm]
        )
        for order, scale in ((arms, 0.98), (arms[::-1], 1.02))
        for arm in order
    ]
    given = {
        "thinking": None,
        "sha256": "0" * 64,
        "messages": [{"role": "user", "content": f"secret question of {name}"}],
        "tools": None,
        "prompt_tokens": 30,
        "text": f"secret answer to {name}",
    }
    return PromptRecord(
        name=name,
        domain=domain,
        runs=runs,
        speculation=[
            Speculation(
                arm=arm,
                counts=AcceptanceStats(*map(list, zip(*outcome.cycles, strict=True))),
                comparison=outcome.comparison.as_dict(),
                repeated=outcome.repeated,
                costs=outcome.costs,
                coverage=outcome.coverage,
            )
            for arm, outcome in enumerate(outcomes, 1)
        ],
        **given | fields,
    )


def make_record(
    prompts: Sequence[PromptRecord], widths: Sequence[int] = (3,), **fields: Any
) -> Record:
    """A finished bench of one target and one drafter trained for three tokens."""
    target = ModelFacts(
        name="example/target",
        revision="1234567890abcdef",
        kind="llama",
        dtype="bfloat16",
        quantization={"bits": 8, "group_size": 64},
        files={"config.json": "a" * 64, "model.safetensors": "b" * 64},
        tokenizer="c" * 64,
    )
    drafter = ModelFacts(
        name="drafter",
        revision=None,
        kind="dflash2",
        dtype="bfloat16",
        quantization=None,
        files={"config.json": "d" * 64, "model.safetensors": "e" * 64},
        num_draft_tokens=3,
    )
    domains = dict.fromkeys(prompt.domain for prompt in prompts)
    given = {
        "environment": {
            "machine": "Mac16,8",
            "processor": "Apple M4 Pro",
            "cores": 12,
            "memory_gb": 48.0,
            "system": "macOS 15.5",
            "device": "gpu",
            "backend": "mlx",
            "versions": {"python": "3.12.3", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
            "date": "2026-02-03T10:00:00+00:00",
        },
        "settings": {"max_tokens": 256, "repeats": 1, "thinking": None, "seed": 0},
        "workload": {
            "sha256": "f" * 64,
            "source": "built-in",
            "domains": {
                name: sum(prompt.domain == name for prompt in prompts)
                for name in domains
            },
        },
        "targets": [target],
        "drafters": [drafter],
        "arms": [
            Arm("plain", 0),
            *(Arm(f"drafter, {width} drafted", 0, 0, width) for width in widths),
        ],
        "partial": False,
    }
    return Record(prompts=list(prompts), **given | fields)


def report_of(record: Record) -> dict[str, Any]:
    """As the JSON file of a bench holds it."""
    return {**record.as_dict(), "results": asdict(analyse(record))}


def sample_record() -> Record:
    """Two domains, two widths, with everything a report can show."""
    prompts = []
    for domain, lucky in (("coding", 3), ("general", 1)):
        for number in range(4):
            cycles = [(3, 3, 4)] * lucky + [(3, 1, 2)] * 3 + [(3, 0, 1)] * (8 - lucky)
            narrow = [(1, 1, 2)] * (lucky + 3) + [(1, 0, 1)] * (9 - lucky)
            prompts.append(
                one_prompt(
                    f"{domain}-{number}",
                    domain,
                    [
                        Outcome(
                            cycles,
                            cycle_ms=15.2 + 0.1 * number,
                            comparison=NEAR_TIE if number == 2 else IDENTICAL,
                            coverage=Coverage(
                                [14, 14, 13], [12, 9, 4], [3] * 4 + [2] * 5 + [1] * 5
                            ),
                        ),
                        Outcome(
                            narrow,
                            cycle_ms=13.1 + 0.1 * number,
                            costs=Costs(100, 10.0, 10.4, 2.4),
                        ),
                    ],
                    plain_ms=10 + 0.05 * number,
                    finish_reason="length" if number == 3 else "stop",
                )
            )
    return make_record(
        prompts,
        widths=(3, 1),
        drift=[Drift(0, "coding-0", 10.0, 10.7)],
        sampled=[SampledTest(1, "general-0", 1.0, 400, [0.31, 0.77, 0.052])],
    )
