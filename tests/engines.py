"""What the tests of both bench engines share: arms, prompts, counts on paper."""

from pathlib import Path

from pairs import Pair

from mlx_dflash2.bench.engine import Run
from mlx_dflash2.bench.record import Arm

PLAIN = Arm("plain", 0)
WRONG = {"partial": 1.0}  # the drafter goes wrong after every token
ORACLES = [{}, {"partial": 0.3}, WRONG]
RANDOM = {"vocab": 64, "eos": "off"}  # few tokens: candidates are right now and then
BUDGET = 40


def spec(width: int) -> Arm:
    """The pair's drafter at a width."""
    return Arm(f"spec-{width}", 0, 0, width)


def options_of(made: Pair) -> dict:
    """What loads a pair."""
    return {
        "models": [str(made.target)],
        "draft_models": [str(made.drafter)],
        "revisions": [None],
        "draft_revisions": [None],
    }


def prompt_of(made: Pair) -> list[int]:
    """A prompt the oracle's rule and drafter are exact after."""
    return made.oracle.prompt(2 * made.oracle.lag + 1, start=3)


def assert_counts_on_paper(run: Run, made: Pair, width: int) -> None:
    """Tokens and the counts of every cycle are what the oracle says."""
    prompt = prompt_of(made)
    assert run.tokens == made.oracle.walk(prompt, BUDGET)
    accepted = made.oracle.cycles(prompt, BUDGET, width)
    stats = run.stats
    assert stats.accepted_per_cycle == accepted
    assert 1 + sum(stats.emitted_per_cycle) + stats.plain_steps == len(run.tokens)
    left = BUDGET - 1
    for drafted, emitted in zip(
        stats.drafted_per_cycle, stats.emitted_per_cycle, strict=True
    ):
        assert drafted == min(width, left - 1)
        left -= emitted
    ended = run.tokens[-1] in made.oracle.ends
    assert run.finish_reason == ("stop" if ended else "length")


def planted(tokens: list[int], position: int) -> list[int]:
    """Tokens with another one at a position."""
    return [*tokens[:position], tokens[position] ^ 1, *tokens[position + 1 :]]


def write_template(folder: Path, template: str) -> None:
    """Give a target a chat template in a file of its own, which takes precedence."""
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
