"""The target's distribution: one definition for plain and speculative decoding."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    apply_xtc,
    make_logits_processors,
)

from .errors import DFlash2Error

LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
LOWEST_TEMPERATURE = 1e-3  # below, a float16 log-probability over T overflows
HIGHEST_TEMPERATURE = 1e4  # above, 1 / T vanishes in float16 and -inf * 0 is no number
LOWEST_TOP_P = 1e-6  # below, the share to keep may round to nothing
LARGEST = 3.4e38  # of float32


@dataclass(frozen=True)
class SamplingConfig:
    """What turns logits into a token, in mlx-lm's names and meanings.

    None and 0 switch a penalty off; `top_p` 0 or 1, `top_k` 0 and `min_p` 0 switch a
    filter off. `temperature` 0 is greedy. Penalties look at the last
    `repetition_context_size` (20 for presence and frequency) tokens, prompt included.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def check(self, vocab_size: int) -> None:
        """Raise DFlash2Error for a value out of range.

        Called before any mlx-lm function sees the values: one of those that raises
        while it is being compiled leaves MLX's random state unusable.
        """
        _in_range("temperature", self.temperature, 0, HIGHEST_TEMPERATURE)
        _in_range("top_p", self.top_p, 0, 1)
        for name, low in (("temperature", LOWEST_TEMPERATURE), ("top_p", LOWEST_TOP_P)):
            if 0 < getattr(self, name) < low:
                raise DFlash2Error(
                    f"{name} is {getattr(self, name)}, expected 0 (off) or at least "
                    f"{low}"
                )
        _in_range("min_p", self.min_p, 0, 1)
        _in_range("xtc_probability", self.xtc_probability, 0, 1)
        _in_range("xtc_threshold", self.xtc_threshold, 0, 0.5)
        whole("top_k", self.top_k, 0, vocab_size - 1)
        whole("repetition_context_size", self.repetition_context_size, 1, None)
        lowest = {"repetition_penalty": 0}
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            if getattr(self, name) is not None:
                _in_range(
                    name, getattr(self, name), lowest.get(name, -LARGEST), LARGEST
                )
        _check_bias(self.logit_bias, vocab_size)


def _check_bias(biases: Mapping[int, float] | None, vocab_size: int) -> None:
    """A bias may be -inf, which bans its token."""
    if not isinstance(biases, Mapping | None):
        raise DFlash2Error(
            f"logit_bias is {biases!r}, expected token ids with the amounts to add"
        )
    for token, bias in (biases or {}).items():
        whole("logit_bias token", token, 0, vocab_size - 1)
        if bias != -math.inf:
            _in_range(f"logit_bias of token {token}", bias, -LARGEST, LARGEST)


def _in_range(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        bounds = f"a number between {low} and {high}"
        if high == LARGEST:
            bounds = "a finite number" + (f" of at least {low}" if low == 0 else "")
        raise DFlash2Error(f"{name} is {value!r}, expected {bounds}")


def whole(name: str, value: int, low: int, high: int | None, *, also: str = "") -> None:
    """Raise DFlash2Error unless `value` is a whole number from `low` to `high`."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if not number or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise DFlash2Error(
            f"{name} is {value!r}, expected a whole number, {bounds}{also}"
        )


class TokenRule:
    """How the target chooses a token, given its logits and the tokens before.

    Args:
        config: Checked against the vocabulary by the caller.
        processors: Pure functions `(tokens, logits)` applied after the penalties.
        xtc_special_tokens: Tokens XTC never removes; mlx-lm takes newline and EOS.
        sampler: Chooses tokens from log-probabilities instead, in plain decoding only.
    """

    def __init__(
        self,
        config: SamplingConfig,
        *,
        processors: Sequence[LogitsProcessor] = (),
        xtc_special_tokens: Sequence[int] = (),
        sampler: Callable[[mx.array], mx.array] | None = None,
    ):
        self.config, self.sampler = config, sampler
        self.special = list(xtc_special_tokens)
        self.processors = [
            *make_logits_processors(
                dict(config.logit_bias or {}),
                config.repetition_penalty,
                config.repetition_context_size,
                config.presence_penalty,
                frequency_penalty=config.frequency_penalty,
            ),
            *processors,
        ]

    @property
    def greedy(self) -> bool:
        return self.config.temperature == 0

    def processed(self, logits: mx.array, history: mx.array | None) -> mx.array:
        """Logits after bias, penalties and processors.

        Args:
            logits: One row. Shape: (1, V). Never written to.
            history: Every token the row has seen; only read by processors.
        """
        row = logits[:]
        for processor in self.processors:
            row = processor(history, row)
        if getattr(row, "shape", None) != logits.shape:
            raise DFlash2Error(
                f"a logits processor returned {getattr(row, 'shape', row)}, expected "
                f"logits of shape {logits.shape}"
            )
        return row

    def probabilities(self, logprobs: mx.array, coin: mx.array | None) -> mx.array:
        """The distribution a token is drawn from, float32.

        The filters see temperature 1, then the temperature is applied, as in mlx-lm's
        sampler. XTC is on for this row if `coin`, uniform in [0, 1), says so; the
        result is the distribution given that coin. mlx-lm's XTC function draws a
        number of its own: it is not used, but MLX's global random state advances.

        Args:
            logprobs: From `log_softmax`. Shape: (1, V).

        Returns:
            Shape: (V,).
        """
        config, row = self.config, logprobs
        if 0 < config.top_p < 1:
            row = apply_top_p(row, config.top_p)
        if config.min_p > 0:
            row = apply_min_p(row, config.min_p)
        if config.xtc_probability > 0:
            cut = apply_xtc(row, 1.0, config.xtc_threshold, self.special)
            row = mx.where(coin > config.xtc_probability, row, cut)
        if config.top_k > 0:
            row = apply_top_k(row, config.top_k)
        row = (row * (1.0 / config.temperature)).astype(mx.float32)
        return mx.softmax(row, axis=-1)[0]

    def choose(self, logprobs: mx.array, key: mx.array | None) -> mx.array:
        """Decode one token plainly: the best one, or a draw. A scalar."""
        if self.sampler is not None:
            return self.sampler(logprobs).reshape(())
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)[0]
        coin_key, draw_key = mx.random.split(key)
        p = self.probabilities(logprobs, mx.random.uniform(key=coin_key))
        return draw(p, draw_key)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities of one row, by mlx-lm's own operations. Shape: (1, V)."""
    return logits - mx.logsumexp(logits, keepdims=True)


def draw(p: mx.array, key: mx.array) -> mx.array:
    """Draw from p, never a token of probability 0. Shape: (..., V) to (...)."""
    return mx.random.categorical(mx.log(p), key=key)
