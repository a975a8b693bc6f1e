"""Text in, text out."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

from . import checks
from .decode import Decoding, Emission, Row
from .drafter import Drafter
from .errors import DFlash2Error
from .sampling import (
    LogitsProcessor,
    SamplingConfig,
    TokenRule,
    log_softmax,
    whole,
)
from .stats import AcceptanceStats
from .target import Target
from .text import TextStream, encode_prompt


@dataclass(frozen=True)
class Cycle:
    """One draft and verify. `accepted` drafted tokens are among `tokens`."""

    tokens: list[int]
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Response:
    """One token, with the fields of mlx-lm's GenerationResponse.

    Attributes:
        text: What became certain with this token; may be empty.
        from_draft: The token was drafted and accepted.
        peak_memory: In GB.
        finish_reason: "stop" or "length" on the last token, else None.
        cycle: Set on the last token of a cycle.
    """

    text: str
    token: int
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    cycle: Cycle | None
    row: Row = field(repr=False, compare=False)

    @property
    def logits(self) -> mx.array:
        """The token's row after bias, penalties and processors. Shape: (V,)."""
        return self.row()[0]

    @property
    def logprobs(self) -> mx.array:
        """Log-softmax of `logits`, computed when read. Shape: (V,)."""
        return log_softmax(self.row())[0]


@dataclass(frozen=True)
class Generation:
    """A finished or interrupted generation.

    Attributes:
        tokens: End-of-sequence token included, if one ended it.
        finish_reason: "stop", "length", or None when it was interrupted.
        prefill_seconds: Until the first token.
        decode_seconds: From then on.
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    stats: AcceptanceStats
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decoding speed: tokens after the first over `decode_seconds`."""
        after = len(self.tokens) - 1
        return after / self.decode_seconds if after > 0 else None


class Stream(Iterator[Response]):
    """Yields one Response a token; `generation` tells what came out so far."""

    def __init__(
        self,
        decoding: Decoding,
        text: TextStream,
        prompt: list[int],
        **limits,
    ):
        self._decoding, self._text, self._prompt = decoding, text, prompt
        self._limits = limits
        self._stats = AcceptanceStats()
        self._tokens: list[int] = []
        self._finish: str | None = None
        self._prefill = self._decode = 0.0
        self._responses = self._respond()

    def __next__(self) -> Response:
        with mx.stream(generation_stream):
            return next(self._responses)

    def close(self) -> None:
        """Stop early. What was emitted stays in `generation`, text held back too."""
        self._responses.close()
        self._text.finish()

    @property
    def generation(self) -> Generation:
        return Generation(
            text=self._text.text,
            tokens=list(self._tokens),
            finish_reason=self._finish,
            stats=self._stats,
            prompt_tokens=len(self._prompt),
            prefill_seconds=self._prefill,
            decode_seconds=self._decode,
        )

    def _respond(self) -> Iterator[Response]:
        begin = time.perf_counter()
        with wired_limit(), self._emissions() as emissions:
            for emission in emissions:
                now = time.perf_counter()
                if not self._tokens:
                    self._prefill, first = now - begin, now
                self._decode = now - first
                yield from self._emit(emission)
                if self._finish:
                    return

    @contextlib.contextmanager
    def _emissions(self) -> Iterator[Iterator[Emission]]:
        """Run the loop; however it ends, its state fits the tokens handed out."""
        try:
            with contextlib.closing(
                self._decoding.run(self._prompt, **self._limits)
            ) as emissions:
                yield emissions
        finally:
            self._decoding.keep(len(self._prompt) + len(self._tokens))

    def _emit(self, emission: Emission) -> Iterator[Response]:
        """Hand out an emission; its tokens after a stop string count nowhere."""
        given = 0
        try:
            for token, row in zip(emission.tokens, emission.rows, strict=True):
                given += 1
                self._tokens.append(token)
                piece = self._advance(token)
                done = self._finish or given == len(emission.tokens)
                yield self._response(emission, given, bool(done), piece, row)
                if self._finish:
                    return
        finally:
            if emission.plain:
                self._stats.plain_steps += given
            elif emission.drafted is not None:
                self._stats.record_cycle(emission.drafted, emission.accepted, given)

    def _advance(self, token: int) -> str:
        """Account for a token in text and finish reason; the text to give out."""
        ends = token in self._limits["eos"]
        piece = "" if ends else self._text.push(token)
        if ends or self._text.stopped:
            self._finish = "stop"
        elif len(self._tokens) == self._limits["max_tokens"]:
            self._finish = "length"
        return piece + self._text.finish() if self._finish else piece

    def _response(
        self, emission: Emission, given: int, done: bool, piece: str, row: Row
    ) -> Response:
        count, accepted = len(self._tokens), min(emission.accepted, given)
        cycle = None
        if done and emission.drafted is not None:
            cycle = Cycle(emission.tokens[:given], emission.drafted, accepted)
        return Response(
            text=piece,
            token=self._tokens[-1],
            from_draft=given <= emission.accepted,
            prompt_tokens=len(self._prompt),
            prompt_tps=len(self._prompt) / self._prefill,
            generation_tokens=count,
            generation_tps=(count - 1) / self._decode if self._decode else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=self._finish,
            cycle=cycle,
            row=row,
        )


def stream_generate(
    target: Target,
    drafter: Drafter | None,
    tokenizer,
    prompt,
    *,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    sampler: Callable[[mx.array], mx.array] | None = None,
    stop: Sequence[str] | str = (),
    extra_eos_token_ids: Sequence[int] = (),
    template_options: dict | None = None,
    num_draft_tokens: int | None = None,
    draft_sampling: str | None = None,
    confidence_threshold: float = 0.0,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 5000,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Stream:
    """Generate token by token; greedy output equals plain decoding.

    Sampling draws from exactly the distribution plain decoding draws from.

    Args:
        target, tokenizer: From `load_target`.
        drafter: From `load_drafter`; None decodes plainly.
        prompt: A string, token ids (list or array), or a list of messages.
        max_tokens: At least 1, or -1 for no limit.
        temp: Temperature; 0 is greedy. The filters see temperature 1, as in mlx-lm.
        logit_bias: Token id to the amount added to its logit.
        seed: Repeats a run; None draws a fresh one.
        logits_processors: Pure functions `(tokens, logits)` to logits, where logits
            has shape (1, V). They also see drafted tokens that are then rejected.
        sampler: mlx-lm's opaque sampler, only for plain decoding: it returns tokens,
            and verifying a draft needs their distribution.
        stop: Strings (or one) that end the text and are cut from it.
        extra_eos_token_ids: Beside the tokenizer's own.
        template_options: Chat template variables, for a prompt of messages.
        num_draft_tokens: Drafted tokens verified per cycle, at most the drafter's
            trained number, which is the default; 0 decodes plainly.
        draft_sampling: At a temperature, "sample" draws the drafted tokens, "argmax"
            takes the best; both are exact. None takes the family's faster way.
        confidence_threshold: DSpark cuts a proposal before the first slot less sure
            than this; 0 never.
        kv_bits: Quantize the target's cache once it holds `quantized_kv_start`.
        prompt_progress_callback: Gets prompt positions done and total.

    Raises:
        DFlash2Error: An argument is out of range, or the prompt is empty.
    """
    checks.refuse_unfit(target, drafter)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    config = SamplingConfig(
        temperature=temp,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        repetition_penalty=repetition_penalty,
        repetition_context_size=repetition_context_size,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias or {},
    )
    config.check(target.vocab_size)
    width = checks.draft_width(drafter, num_draft_tokens)
    drafter = drafter if width else None
    if drafter is not None and sampler is not None:
        raise DFlash2Error(
            "sampler: an opaque sampler returns tokens, and verifying a draft needs "
            "their distribution; use temp, top_p and the other options, or drafter=None"
        )
    ids = encode_prompt(tokenizer, prompt, template_options)
    checks.token_ids("the prompt", ids, target.vocab_size)
    if max_tokens != -1:
        whole("max_tokens", max_tokens, 1, None, also=", or -1 for no limit")
    whole("prefill_step_size", prefill_step_size, 1, None)
    checks.token_ids("extra_eos_token_ids", extra_eos_token_ids, target.vocab_size)
    eos = frozenset(tokenizer.eos_token_ids) | frozenset(extra_eos_token_ids)
    rule = TokenRule(
        config,
        processors=checks.processors(logits_processors),
        xtc_special_tokens=[
            token
            for token in (*tokenizer.encode("\n"), *eos)
            if token < target.vocab_size
        ],
        sampler=sampler,
    )
    decoding = Decoding(
        target,
        drafter,
        rule,
        seed=checks.seed_or_fresh(seed),
        prefill_step_size=prefill_step_size,
        kv=checks.kv_quantization(target, kv_bits, kv_group_size, quantized_kv_start),
        draft_sampling=checks.drafting(drafter, draft_sampling, confidence_threshold),
        confidence_threshold=confidence_threshold,
    )
    limits = dict(max_tokens=max_tokens, eos=eos, num_draft_tokens=width)
    if prompt_progress_callback is not None:
        limits["progress"] = prompt_progress_callback
    return Stream(decoding, TextStream(tokenizer, stop), ids, **limits)


def generate(
    target: Target,
    drafter: Drafter | None,
    tokenizer,
    prompt,
    **options,
) -> Generation:
    """Generate to the end; takes the options of `stream_generate`."""
    stream = stream_generate(target, drafter, tokenizer, prompt, **options)
    for _ in stream:
        pass
    return stream.generation


@contextlib.contextmanager
def wired_limit() -> Iterator[None]:
    """Let MLX wire the recommended working set for the run, as mlx-lm does."""
    before = maybe_set_recommended_wired_limit()
    try:
        yield
    finally:
        if before is not None:
            mx.synchronize(generation_stream)
            mx.set_wired_limit(before)
