"""What tests of the loop share: mlx-lm's own decoding, and drafters by script."""

import os
import sys
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from mlx_dflash2.config import DrafterConfig
from mlx_dflash2.drafter import Proposal
from mlx_dflash2.generation import Generation, generate, stream_generate
from mlx_dflash2.target import Target
from mlx_dflash2.verify import compare

# Under the wheel's own BLAS on Linux a row does not depend on how many run with it.
EXACT_WIDTHS = (
    sys.platform == "linux"
    and "openblas" not in os.environ.get("LD_PRELOAD", "")
    and mx.default_device() == mx.Device(mx.cpu)
)
PENALTIES = (
    "logit_bias",
    "repetition_penalty",
    "repetition_context_size",
    "presence_penalty",
    "frequency_penalty",
)


def mlx_lm_tokens(
    target: Target,
    prompt: Sequence[int],
    count: int,
    *,
    eos: Sequence[int] = (),
    processors: Sequence = (),
    **options,
) -> list[int]:
    """Greedy tokens of mlx-lm's loop, which ends before `count` on an `eos`."""
    penalties = {name: options.pop(name) for name in PENALTIES if name in options}
    processors = [*make_logits_processors(**penalties), *processors]
    tokens = []
    for token, _ in generate_step(
        mx.array(prompt),
        target.model,
        max_tokens=count,
        logits_processors=processors,
        **options,
    ):
        tokens.append(token)
        if token in eos:
            break
    return tokens


def assert_lossless(
    result: Generation,
    expected: list[int],
    target: Target,
    tokenizer,
    prompt,
    **options,
) -> None:
    """The tokens are mlx-lm's; where widths may round apart, up to a near tie."""
    if result.tokens == expected:
        return
    shown = f"{result.tokens} is not {expected}"
    assert not EXACT_WIDTHS, shown
    plain = stream_generate(
        target, None, tokenizer, prompt, max_tokens=len(expected), **options
    )
    assert compare(result.tokens, plain).kind == "near tie", shown


def assert_cycles_add_up(result: Generation, *, budget: int | None = None) -> None:
    """Counts agree with the tokens, and no cycle drafts beyond its budget."""
    stats, count = result.stats, len(result.tokens)
    assert 1 + sum(stats.emitted_per_cycle) + stats.plain_steps == count
    left = (budget or 1 << 30) - 1
    for drafted, accepted, emitted in zip(
        stats.drafted_per_cycle,
        stats.accepted_per_cycle,
        stats.emitted_per_cycle,
        strict=True,
    ):
        assert drafted <= max(left - 1, 0)
        assert 0 <= accepted <= drafted
        assert accepted <= emitted <= accepted + 1
        left -= emitted


class CountedContext:
    """Stands for a drafter's context: how many positions it was given."""

    arrays: tuple = ()

    def __init__(self):
        self.end = 0


class Scripted:
    """Drafts a known continuation, right for the first `right` tokens of each block.

    Args:
        start: Length of the prompt.
        tokens: What plain decoding gives after it.
        right: Right tokens per block, then a wrong one.

    Attributes:
        calls: How many tokens each call proposed.
    """

    def __init__(
        self, config: DrafterConfig, start: int, tokens: Sequence[int], right: int
    ):
        self.config, self.start = config, start
        self.tokens, self.right = list(tokens), right
        self.calls: list[int] = []

    def make_context(self) -> list[CountedContext]:
        return [CountedContext()]

    def extend(self, features: mx.array, context: list[CountedContext]) -> None:
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        assert features.shape == (1, features.shape[1], width)
        context[0].end += features.shape[1]

    def propose(
        self, anchor, target, context, *, count, temperature, key, **_
    ) -> Proposal:
        self.calls.append(count)
        at = context[0].end - self.start  # of the anchor among the emitted tokens
        assert self.tokens[at] == anchor or not EXACT_WIDTHS
        drafted = (self.tokens[at + 1 :] + [0] * count)[:count]
        if self.right < count:
            wrong = drafted[self.right] + 1
            drafted[self.right] = wrong % self.config.vocab_size
        tokens = mx.array(drafted, mx.int32)
        q = None if temperature == 0 else mx.ones((count, 1))
        return Proposal(tokens, tokens[:, None], q)


def run_scripted(
    loaded, prompt: list[int], expected: list[int], right: int, **options
) -> tuple[Generation, Scripted]:
    """Generate with a drafter that knows `expected`."""
    target, tokenizer, drafter = loaded
    script = Scripted(drafter.config, len(prompt), expected, right)
    return generate(target, script, tokenizer, prompt, **options), script
