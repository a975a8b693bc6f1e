"""The cycle loop, on token ids only.

Invariant: between cycles the target's cache and the drafter's context hold the prompt
and every emitted token except the anchor.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache

from .accept import Verdict, accept_greedy, accept_sampled, drafted_probability
from .drafter import Drafter, Proposal
from .sampling import TokenRule, log_softmax
from .target import Target

CLEAR_EVERY = 256  # emitted tokens between two releases of MLX's buffer cache
Row = Callable[[], mx.array]  # processed logits of one token, made when asked for


@dataclass(frozen=True)
class KVQuantization:
    """When and how the target's cache is quantized, by mlx-lm's rule.

    After any target forward that leaves `start` or more positions in the cache.
    """

    bits: int
    group_size: int = 64
    start: int = 5000


@dataclass(frozen=True)
class Emission:
    """Tokens decided together.

    Attributes:
        tokens: At least one.
        rows: For each token the processed logits it was chosen from, shape (1, V).
        drafted: Drafted tokens verified for it; None outside a cycle.
        accepted: How many of `tokens`, from the first on, were drafted.
        plain: Decoded alone while speculation is off.
    """

    tokens: list[int]
    rows: list[Row]
    drafted: int | None = None
    accepted: int = 0
    plain: bool = False


class Decoding:
    """One generation: caches, emitted tokens and random key.

    Args:
        drafter: None decodes plainly.
        rule: The target's distribution.
        seed: Of the draws; equal seeds repeat a run.
        prefill_step_size: Prompt tokens per target forward.
        kv: Quantization of the target's cache; None keeps it as it is.
        draft_sampling: At T > 0, "sample" draws drafted tokens, "argmax" takes the
            best; both are exact.
        confidence_threshold: Cut a proposal before the first less certain slot.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rule: TokenRule,
        *,
        seed: int,
        prefill_step_size: int = 2048,
        kv: KVQuantization | None = None,
        draft_sampling: str = "sample",
        confidence_threshold: float = 0.0,
    ):
        self.draft_sampling = draft_sampling
        self.confidence_threshold = confidence_threshold
        self.target, self.drafter, self.rule = target, drafter, rule
        self.prefill_step_size, self.kv = prefill_step_size, kv
        self.taps = drafter.config.target_layer_ids if drafter else ()
        self.cache = target.make_cache()
        self.context = drafter.make_context() if drafter else []
        self.tokens: list[int] = []  # prompt and emitted
        self._key = mx.random.key(seed)

    def run(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        eos: frozenset[int],
        num_draft_tokens: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Iterator[Emission]:
        """Decode until an end of sequence, inclusive, or the budget.

        Args:
            prompt: At least one token.
            max_tokens: Tokens to emit at most; below 0 there is no limit.
            eos: Tokens that end the sequence.
            num_draft_tokens: Drafted tokens a cycle verifies at most.
            progress: Called during the prefill with positions done and total.
        """
        self.eos = eos
        self.remaining = max_tokens if max_tokens >= 0 else sys.maxsize
        uncleared = 0
        try:
            steps = self._steps(prompt, num_draft_tokens, progress)
            for emission in steps:
                if self.remaining:
                    # Lazy arrays can be computed in their own thread only; the next
                    # cycle may be another one's.
                    mx.async_eval(self._key, self._context_arrays())
                yield emission
                uncleared += len(emission.tokens)
                if uncleared >= CLEAR_EVERY:
                    mx.clear_cache()
                    uncleared = 0
        finally:
            self.keep(len(self.tokens))

    def keep(self, count: int) -> None:
        """Forget tokens after the first `count`; the target's cache follows.

        For a caller that stops inside an emission. Decoding cannot go on after it.
        """
        del self.tokens[count:]
        self.target.roll_back(self.cache, max(len(self.tokens) - 1, 0))

    def _steps(
        self,
        prompt: Sequence[int],
        num_draft_tokens: int,
        progress: Callable[[int, int], None],
    ) -> Iterator[Emission]:
        yield self._prefill(prompt, progress)
        if self.drafter is None:
            yield from self._plain_steps()
        while self.remaining:
            yield self._cycle(num_draft_tokens)

    def _prefill(
        self, prompt: Sequence[int], progress: Callable[[int, int], None]
    ) -> Emission:
        """Run the prompt in chunks, its last token alone, and choose the first token.

        Each chunk's tapped states become context at once and are dropped.
        """
        total, done = len(prompt), 0
        progress(done, total)
        while done < total - 1:
            chunk = prompt[done : min(done + self.prefill_step_size, total - 1)]
            _, features = self._forward(mx.array(chunk))
            self._commit(features, len(chunk))
            self.tokens += chunk
            mx.eval([held.state for held in self.cache], self._context_arrays())
            mx.clear_cache()
            done += len(chunk)
            progress(done, total)
        self.tokens += prompt[done:]
        logits, features = self._forward(mx.array(self.tokens[-1:]))
        row = partial(self.rule.processed, logits[:, -1], self._history())
        token = self.rule.choose(log_softmax(row()), self._next_key())
        self._commit(features, 1)
        mx.eval(token, self._context_arrays())
        progress(total, total)
        return Emission(self._take([token.item()]), [row])

    def _plain_steps(self) -> Iterator[Emission]:
        """One token a forward, the next forward submitted before a token is out."""
        submitted = self._submit(mx.array(self.tokens[-1:])) if self.remaining else None
        while self.remaining:
            token, row = submitted
            if self.remaining > 1:
                submitted = self._submit(token[None], token)
            yield Emission(self._take([token.item()]), [row], plain=True)

    def _submit(
        self, tokens: mx.array, unread: mx.array | None = None
    ) -> tuple[mx.array, Row]:
        """Start a plain step; `unread` is the token not yet in `self.tokens`."""
        logits, _ = self._forward(tokens)
        extra = None if unread is None else unread[None]
        row = partial(self.rule.processed, logits[:, -1], self._history(extra))
        token = self.rule.choose(log_softmax(row()), self._next_key())
        self._quantize()
        mx.async_eval(token)
        return token, row

    def _cycle(self, num_draft_tokens: int) -> Emission:
        """Draft, verify, accept, roll back."""
        start = len(self.tokens) - 1
        assert all(held.offset == start for held in self.cache)
        assert all(held.end == start for held in self.context)
        width = min(num_draft_tokens, self.remaining - 1, self._rows_before_kv() - 1)
        proposal = self._propose(width) if width else None
        width = len(proposal.tokens) if proposal else 0
        drafted = proposal.tokens if proposal else mx.array([], mx.int32)
        anchor = mx.array(self.tokens[-1:], mx.int32)
        logits, features = self._forward(mx.concatenate([anchor, drafted]))
        rows = [
            partial(self.rule.processed, logits[:, i], self._history(drafted[:i]))
            for i in range(width + 1)
        ]
        verdict, sound = self._judge(rows, proposal), _is_sound(proposal)
        mx.eval(drafted, verdict.accepted, verdict.bonus, sound)
        drafted, accepted = drafted.tolist(), verdict.accepted.item()
        assert sound.item()
        assert 0 <= accepted <= width
        assert all(0 <= token < self.target.vocab_size for token in drafted)
        kept = self._take(drafted[:accepted] + [verdict.bonus.item()])
        self._commit(features, len(kept), start)
        return Emission(kept, rows[: len(kept)], width, min(accepted, len(kept)))

    def _propose(self, width: int) -> Proposal | None:
        """At most `width` drafted tokens; None if the drafter is sure of none."""
        drawn = not self.rule.greedy and self.draft_sampling == "sample"
        proposal = self.drafter.propose(
            self.tokens[-1],
            self.target,
            self.context,
            count=width,
            temperature=self.rule.config.temperature if drawn else 0.0,
            key=self._next_key() if drawn else None,
            confidence_threshold=self.confidence_threshold,
        )
        if not len(proposal.tokens):
            return None
        return proposal if drawn or self.rule.greedy else proposal.as_certain()

    def _judge(self, rows: list[Row], proposal: Proposal | None) -> Verdict:
        """Apply the greedy or the rejection rule to the verified rows."""
        logprobs = [log_softmax(row()) for row in rows]
        if proposal is None:
            bonus = self.rule.choose(logprobs[0], self._next_key())
            return Verdict(mx.array(0), bonus)
        if self.rule.greedy:
            chosen = mx.concatenate([mx.argmax(row, axis=-1) for row in logprobs])
            return accept_greedy(proposal.tokens, chosen)
        coin_key, accept_key, bonus_key = mx.random.split(self._next_key(), 3)
        coins = mx.random.uniform(shape=(len(rows),), key=coin_key)
        p = mx.stack(
            [self.rule.probabilities(row, coins[i]) for i, row in enumerate(logprobs)]
        )
        uniforms = mx.random.uniform(shape=proposal.tokens.shape, key=accept_key)
        return accept_sampled(proposal, p, uniforms, bonus_key)

    def _forward(self, tokens: mx.array) -> tuple[mx.array, mx.array | None]:
        """Logits (1, L, V) and tapped features (1, L, T*D) of tokens (L,)."""
        hidden, features = self.target.forward(tokens[None], self.cache, self.taps)
        return self.target.head(hidden), features

    def _take(self, tokens: list[int]) -> list[int]:
        """Emit tokens up to the first end of sequence; what was emitted."""
        ends = [i for i, token in enumerate(tokens) if token in self.eos]
        kept = tokens[: ends[0] + 1] if ends else tokens
        self.tokens += kept
        self.remaining = 0 if ends else self.remaining - len(kept)
        assert self.remaining >= 0
        return kept

    def _commit(
        self, features: mx.array | None, count: int, start: int | None = None
    ) -> None:
        """Keep the first `count` rows of the last forward, which began at `start`."""
        if start is not None:
            self.target.roll_back(self.cache, start + count)
        if self.drafter is not None:
            self.drafter.extend(features[:, :count], self.context)
        self._quantize()

    def _quantize(self) -> None:
        if self.kv is not None:
            maybe_quantize_kv_cache(
                self.cache, self.kv.start, self.kv.group_size, self.kv.bits
            )

    def _rows_before_kv(self) -> int:
        """Rows a verify may have: it ends where quantization of the cache begins."""
        before = self.kv.start - len(self.tokens) + 1 if self.kv else 0
        return before if before > 0 else sys.maxsize

    def _history(self, extra: mx.array | None = None) -> mx.array | None:
        """All tokens so far and `extra`, for processors; None when there are none."""
        if not self.rule.processors:
            return None
        tokens = mx.array(self.tokens, mx.int32)
        if extra is None:
            return tokens
        return mx.concatenate([tokens, extra.astype(mx.int32)])

    def _next_key(self) -> mx.array | None:
        if self.rule.greedy:
            return None
        self._key, key = mx.random.split(self._key)
        return key

    def _context_arrays(self) -> list[mx.array]:
        return [array for held in self.context for array in held.arrays]


def _is_sound(proposal: Proposal | None) -> mx.array:
    """Whether q is a distribution and every drafted token can come from it."""
    if proposal is None or proposal.probabilities is None:
        return mx.array(True)
    sums_to_one = mx.abs(proposal.probabilities.sum(axis=-1) - 1) < 1e-3
    return (sums_to_one & (drafted_probability(proposal) > 0)).all()
