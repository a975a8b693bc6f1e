"""What the numbers mean, in sentences."""

from collections.abc import Sequence

from .estimates import Estimate
from .record import Arm, Record
from .results import BestWidth, Group, SampledResult, Table, TargetDrift

LOW_ACCEPTANCE = 1 / 3  # of first drafted tokens: 1.5 tokens a cycle, seldom enough
LARGEST_DRIFT = 0.05
ADVICE = {
    "verify": "fewer drafted tokens (--block-size) make it cheaper",
    "draft": "a quantized drafter (--draft-bits) makes it cheaper",
    "loop": "compare the versions above with the newest",
}


def judge(overall: Group, no_headline: str | None, verify_width: int) -> list[str]:
    """Whether speculation pays, and if it does not, why.

    Args:
        overall: With speeds only as a headline, whose speedup has an interval.
    """
    sentences = [f"no headline: {no_headline}"] if no_headline else []
    counts, speeds = overall.acceptance, overall.speeds
    if counts.cycles == 0:
        return [*sentences, "no cycle was run: every generation had one token"]
    if counts.drafted == 0:
        return [*sentences, "nothing was drafted: the runs were too short for it (-m)"]
    if speeds is not None and speeds.break_even is not None:
        sentences.append(_pays(overall))
    first = counts.slots[0].cumulative
    if counts.accepted == 0:
        sentences.append("nothing was accepted: " + _causes())
    elif first is not None and first < LOW_ACCEPTANCE:
        sentences.append(f"low acceptance, {first:.1%} of first tokens: " + _causes())
    elif _costs_too_much(overall):
        sentences.append(_too_expensive(overall, verify_width))
    return sentences


def _pays(overall: Group) -> str:
    """Pays, does not pay or undecided: on which side of 1 the interval lies."""
    speeds, speedup = overall.speeds, overall.speeds.decode.speedup
    lengths = (
        f"break-even acceptance length {speeds.break_even:.2f}, "
        f"reached {overall.acceptance.length:.2f}"
    )
    if speedup.low > 1:
        return f"speculation pays here: {_interval(speedup)}, {lengths}"
    if speeds.projected is not None:
        lengths += f"; predicted from the costs {speeds.projected:.2f}x"
    if speedup.high < 1:
        return (
            f"speculation does not pay here: measured {_interval(speedup)}, {lengths}"
        )
    return (
        f"undecided whether speculation pays here: measured {_interval(speedup)}, "
        f"which includes 1; {lengths}"
    )


def _causes() -> str:
    return (
        "the drafter may belong to another target, to another chat template or "
        "thinking mode, or be misread (its taps, for one); see `mlx-dflash2 doctor`"
    )


def _costs_too_much(overall: Group) -> bool:
    """Speculation does not surely pay, and the parts of its cycles say why."""
    speeds, counts = overall.speeds, overall.acceptance
    if speeds is None or speeds.break_even is None or counts.curtailed:
        return False
    return speeds.decode.speedup.low <= 1 and counts.length < speeds.break_even


def _too_expensive(overall: Group, verify_width: int) -> str:
    """Which part of a cycle costs most beyond the one plain step it replaces.

    The parts add up to the break-even; the loop is what verify and draft leave of it.
    """
    speeds, costs = overall.speeds, overall.costs
    steps = {
        "verify": round(costs.verify / speeds.step, 2),
        "draft": round(costs.draft / speeds.step, 2),
    }
    steps["loop"] = round(round(speeds.break_even, 2) - sum(steps.values()), 2)
    worst = max(steps, key=lambda part: steps[part] - (part == "verify"))
    loop = f"{'less' if steps['loop'] < 0 else 'the loop'} {abs(steps['loop']):.2f}"
    if steps["loop"] < 0:
        loop += " that is within noise"
    return (
        f"{worst} too expensive: {overall.acceptance.length:.2f} tokens a cycle do not "
        f"make up for it; of the {speeds.break_even:.2f} plain steps that a cycle "
        f"takes, a verify of {verify_width} rows costs {steps['verify']:.2f}, the "
        f"draft {steps['draft']:.2f}, {loop}; {ADVICE[worst]}"
    )


def best_width(arms: Sequence[Arm], best: BestWidth) -> str:
    """The fastest width of a sweep, and what it gains over the trained one."""
    drafted = arms[best.arm].num_draft_tokens
    start = "best width" if best.speedup.median > 1 else "no width pays, the best is"
    width = f"{drafted} drafted tokens a cycle (verify width {drafted + 1})"
    if drafted == best.trained:
        end = "which the drafter was trained for"
    elif best.gain is None:
        end = f"the trained {best.trained} were not measured"
    else:
        end = f"{_interval(best.gain)} the speed of the trained {best.trained}"
    return f"{start}: {width}, {_interval(best.speedup)}, {end}"


def warnings(
    record: Record,
    tables: list[Table],
    drift: list[TargetDrift],
    sampled: list[SampledResult],
) -> list[str]:
    """What a reader of the numbers has to know."""
    found = []
    if record.partial:
        done = len(record.prompts)
        found.append(f"partial: the bench was interrupted; prompts measured: {done}")
    ignored = sum(prompt.tools is False for prompt in record.prompts)
    if ignored:
        found.append(f"prompts whose tools the chat template ignored: {ignored}")
    for table in tables:
        found += [f"{_name(record, table)}: {text}" for text in _doubts(table)]
    for target in drift:
        if abs(target.drift) > LARGEST_DRIFT:
            found.append(
                f"{record.arms[target.arm].label} drifted by {target.drift:+.1%} from "
                "first to last: the machine was not steady, speeds are doubtful"
            )
    for test in sampled:
        if not test.same:
            found.append(
                f"{record.arms[test.arm].label}: sampled tokens do not follow the "
                f"target's distribution (p = {min(test.p_values):.2g})"
            )
    return found


def _doubts(table: Table) -> list[str]:
    found, lossless = [], table.overall.lossless
    short = [group.name for group in table.groups if group.acceptance.curtailed]
    if short:
        found.append(
            f"no proj and no loop overhead for {', '.join(short)}: most cycles drafted "
            "less than half of what verify and draft were measured with, the runs were "
            "too short (-m)"
        )
    if lossless.differences:
        found.append(
            "outputs that differ from plain decoding by more than a near tie: "
            f"{lossless.differences} of {lossless.compared}"
        )
    if lossless.repeated < lossless.compared:
        varying = lossless.compared - lossless.repeated
        found.append(
            f"outputs that changed from run to run: {varying} of {lossless.compared}"
        )
    return found


def _name(record: Record, table: Table) -> str:
    return record.arms[table.arm].label + mode_name(table.thinking)


def mode_name(thinking: bool | None) -> str:
    """What to write behind an arm's label."""
    return {None: "", True: ", thinking", False: ", no thinking"}[thinking]


def _interval(estimate: Estimate) -> str:
    text = f"{estimate.median:.2f}x"
    if estimate.low is None:
        return text
    return f"{text} [{estimate.low:.2f}, {estimate.high:.2f}]"
