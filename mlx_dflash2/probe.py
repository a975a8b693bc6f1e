"""Whether a drafter is read the right way: its acceptance, and that of near misses."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .config import DrafterConfig
from .decode import Decoding
from .drafter import Drafter
from .names import quantizable
from .sampling import SamplingConfig, TokenRule
from .target import Target

BETTER = 0.1  # accepted tokens a block a near miss must gain to count
DEVIATIONS = 2.0  # ... and standard errors of the paired differences


@dataclass(frozen=True)
class Reading:
    """One way to read a drafter.

    Attributes:
        field: The setting that differs from the configured reading; "" for none.
        value: What it is set to here, in words.
    """

    field: str
    value: str
    config: DrafterConfig
    dtype: mx.Dtype | None = None


@dataclass(frozen=True)
class Score:
    """What a reading accepted.

    Attributes:
        accepted: Drafted tokens the target agrees with, for each probed block.
    """

    reading: Reading
    accepted: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.accepted)) if self.accepted else 0.0

    def beats(self, other: "Score") -> bool:
        """Accepts clearly more than `other` on the same blocks."""
        gain = np.subtract(self.accepted, other.accepted)
        if not len(gain):
            return False
        error = gain.std() / np.sqrt(len(gain))
        return bool(gain.mean() > max(BETTER, DEVIATIONS * error))


@dataclass(frozen=True)
class Diagnosis:
    """The configured reading and its near misses.

    Attributes:
        better: The near miss that beats the configured reading by most; None if none.
    """

    configured: Score
    others: tuple[Score, ...]

    @property
    def better(self) -> Score | None:
        beating = [score for score in self.others if score.beats(self.configured)]
        return max(beating, key=lambda score: score.mean, default=None)


def near_misses(config: DrafterConfig, target_theta: float) -> Iterator[Reading]:
    """The configured reading with one setting changed, for each usual mistake.

    Args:
        target_theta: The target's rope base, which drafters are trained with.
    """
    taps, last = config.target_layer_ids, config.num_target_layers - 2
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if 0 <= min(moved) and max(moved) <= last:
            changed = replace(config, target_layer_ids=moved)
            yield Reading("target_layer_ids", f"{list(moved)}", changed)
    other_row = 1 - config.first_row
    if config.first_row_varies and config.block_size > other_row:
        yield Reading(
            "logits_start", str(other_row), replace(config, first_row=other_row)
        )
    for theta in sorted({10000.0, target_theta} - {config.rope_theta}):
        yield Reading("rope_theta", f"{theta:.0f}", replace(config, rope_theta=theta))
    flipped = not config.rope_interleaved
    yield Reading(
        "is_neox_style",
        str(not flipped).lower(),
        replace(config, rope_interleaved=flipped),
    )
    for causal in (True, False):
        layers = range(config.num_hidden_layers)
        if any(config.layer_is_causal(layer) != causal for layer in layers):
            changed = replace(config, is_causal=causal)
            yield Reading("is_causal", str(causal).lower(), changed)
    yield Reading("dtype", "float16", config, mx.float16)


def diagnose(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 32,
    stride: int = 3,
) -> Diagnosis:
    """Measure the configured reading and its near misses on the same blocks.

    The target writes greedy tokens after each prompt. Of the first `tokens`, every
    `stride`-th serves as an anchor; a drafted token is accepted as far as the block
    agrees with what the target wrote, as in decoding.

    Args:
        prompts: Token ids.
    """
    configured = Reading("", "as configured", drafter.config)
    readings = [configured, *near_misses(drafter.config, target.rope_theta)]
    accepted: list[list[int]] = [[] for _ in readings]
    drafters = [_read_as(drafter, reading) for reading in readings]
    taps = sorted({tap for r in readings for tap in r.config.target_layer_ids})
    anchors = range(0, tokens, stride)
    widest = max(reading.config.num_draft_tokens for reading in readings)
    for prompt in prompts:
        written = _continuation(target, list(prompt), tokens + widest)
        sequence = mx.array([[*prompt, *written]])
        _, features = target.forward(sequence, target.make_cache(), taps)
        for number, reading in enumerate(readings):
            seen = _select(features, taps, reading.config.target_layer_ids)
            accepted[number] += _accepted(
                target, drafters[number], seen, len(prompt), written, anchors
            )
    scores = [
        Score(reading, tuple(counts))
        for reading, counts in zip(readings, accepted, strict=True)
    ]
    return Diagnosis(scores[0], tuple(scores[1:]))


def _continuation(target: Target, prompt: list[int], count: int) -> list[int]:
    """What the target writes greedily, ends of sequence ignored."""
    decoding = Decoding(target, None, TokenRule(SamplingConfig()), seed=0)
    emissions = decoding.run(prompt, max_tokens=count, eos=frozenset())
    return [token for emission in emissions for token in emission.tokens]


def _accepted(
    target: Target,
    drafter: Drafter,
    features: mx.array,
    start: int,
    written: list[int],
    anchors: range,
) -> list[int]:
    """Accepted drafted tokens after each anchor.

    Args:
        features: Of prompt and written tokens. Shape: (1, S, T*D).
        start: Length of the prompt.
        anchors: Indices into `written`.
    """
    context, committed, counts = drafter.make_context(), 0, []
    for index in anchors:
        anchor = start + index
        drafter.extend(features[:, committed:anchor], context)
        committed = anchor
        proposal = drafter.propose(written[index], target, context)
        drafted = proposal.tokens.tolist()
        agrees = [a == b for a, b in zip(drafted, written[index + 1 :], strict=False)]
        counts.append((agrees + [False]).index(False))
    return counts


def _select(features: mx.array, taps: list[int], wanted: tuple[int, ...]) -> mx.array:
    """The tapped states of `wanted`, in its order. Shape: (1, S, T*D)."""
    parts = dict(zip(taps, mx.split(features, len(taps), axis=-1), strict=True))
    return mx.concatenate([parts[tap] for tap in wanted], axis=-1)


def _read_as(drafter: Drafter, reading: Reading) -> Drafter:
    """The same weights under another reading; only a change of type copies them."""
    variant = type(drafter)(
        reading.config,
        own_embedding="embed_tokens" in drafter,
        own_head="lm_head" in drafter,
    )
    weights = drafter.parameters()
    packed = isinstance(drafter.fc, nn.QuantizedLinear)
    if packed:
        nn.quantize(
            variant,
            group_size=drafter.fc.group_size,
            bits=drafter.fc.bits,
            class_predicate=lambda name, _: quantizable(name),
        )
    variant.update(weights)
    if reading.dtype is not None:
        variant.set_dtype(reading.dtype)
    return variant
