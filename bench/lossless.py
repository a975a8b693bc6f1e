"""Greedy tokens against mlx-lm's own, on twenty prompts.

python -m mlx_dflash2.bench.lossless --model TARGET --draft-model DRAFTER
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlx_dflash2.errors import DFlash2Error

if TYPE_CHECKING:
    from mlx_dflash2.comparison import Comparison

PROMPTS = Path(__file__).with_name("lossless.jsonl")


@dataclass(frozen=True)
class PlainToken:
    """One token of mlx-lm with the row it was chosen from, shape (V,)."""

    token: int
    logits: object


@dataclass(frozen=True)
class Result:
    """One prompt's comparison."""

    name: str
    prompt_tokens: int
    tokens: int
    acceptance_length: float | None
    comparison: "Comparison"


def read_prompts() -> dict[str, str]:
    """The built-in prompts by name; a long one spells its repeated line out."""
    prompts = {}
    for line in PROMPTS.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        repeated = [
            entry["repeat"].format(number, number * 7 % 31, number * 11 % 53)
            for number in range(1, entry.get("times", 0) + 1)
        ]
        prompts[entry["name"]] = entry["text"] + "".join(repeated)
    return prompts


def mlx_lm_tokens(target, tokenizer, prompt, max_tokens: int) -> Iterator[PlainToken]:
    """Greedy decoding by mlx-lm itself, to the end of sequence or the budget."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    for token, logprobs in generate_step(
        mx.array(prompt), target.model, max_tokens=max_tokens
    ):
        yield PlainToken(token, logprobs)
        if token in tokenizer.eos_token_ids:
            return


def compare_prompt(
    target, drafter, tokenizer, name: str, text: str, *, max_tokens: int = 48
) -> Result:
    """Decode one prompt speculatively and hold it against mlx-lm."""
    from mlx_dflash2.generation import generate
    from mlx_dflash2.text import encode_prompt
    from mlx_dflash2.verify import compare

    prompt = encode_prompt(tokenizer, [{"role": "user", "content": text}])
    done = generate(target, drafter, tokenizer, prompt, max_tokens=max_tokens)
    plain = mlx_lm_tokens(target, tokenizer, prompt, max_tokens)
    return Result(
        name,
        len(prompt),
        len(done.tokens),
        done.stats.acceptance_length,
        compare(done.tokens, plain),
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--model", required=True, help="Folder or Hub id of the target.")
@click.option("--draft-model", required=True, help="Folder or Hub id of the drafter.")
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True)
def main(model: str, draft_model: str, max_tokens: int) -> None:
    """Compare greedy tokens with mlx-lm's; exit code 1 on a real difference."""
    from mlx_dflash2.loading import load_drafter, load_target

    try:
        target, tokenizer = load_target(model)
        drafter = load_drafter(draft_model, target)
    except DFlash2Error as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo("| prompt | prompt tokens | tokens | acceptance length | result |")
    click.echo("|---|---|---|---|---|")
    kinds = []
    for name, text in read_prompts().items():
        found = compare_prompt(
            target, drafter, tokenizer, name, text, max_tokens=max_tokens
        )
        kinds.append(found.comparison.kind)
        length = found.acceptance_length
        click.echo(
            f"| {name} | {found.prompt_tokens} | {found.tokens} | "
            f"{'-' if length is None else f'{length:.3f}'} | {found.comparison} |"
        )
    click.echo(f"\n{kinds.count('identical')} of {len(kinds)} identical")
    sys.exit(1 if "difference" in kinds else 0)


if __name__ == "__main__":
    main()
