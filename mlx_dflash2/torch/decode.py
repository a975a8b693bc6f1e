"""The reference cycle loop, token ids only.

Between cycles the target's cache and the drafter's context hold the prompt and every
emitted token except the anchor.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.stats import AcceptanceStats

from .drafter import Drafter
from .proposal import Proposal
from .sampling import (
    SamplingConfig,
    Verdict,
    accept_greedy,
    accept_sampled,
    probabilities,
)
from .target import Target
from .timing import time_when_done


@dataclass(frozen=True)
class Decoded:
    """What one call decoded.

    Attributes:
        tokens: Emitted tokens, the one that ended the sequence included.
        finish_reason: "stop" after an end-of-sequence token, else "length".
        stats: Counts per cycle.
        prefill_seconds: Until the first token.
        decode_seconds: From then on.
    """

    tokens: tuple[int, ...]
    finish_reason: str
    stats: AcceptanceStats
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class PlainToken:
    """A token of plain decoding and the row it was chosen from, shape (V,)."""

    token: int
    logits: Tensor


@dataclass(frozen=True)
class Drafting:
    """How a run drafts.

    Attributes:
        limit: Tokens verified in a cycle at most; 0 decodes plainly.
        temperature: Of the draws; 0 takes the best token of each slot.
        confidence_threshold: Cut a proposal before the first less certain slot.
    """

    limit: int
    temperature: float = 0.0
    confidence_threshold: float = 0.0


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    eos: Collection[int] | None = None,
    sampling: SamplingConfig | None = None,
    num_draft_tokens: int | None = None,
    draft_sampling: str | None = None,
    confidence_threshold: float = 0.0,
    prefill_step: int = 2048,
) -> Decoded:
    """Decode after `prompt`, by cycles with a drafter, token by token without.

    Args:
        target: The model whose output is reproduced.
        drafter: On the target's device; None decodes plainly.
        prompt: Token ids, at least one.
        max_tokens: Never more tokens than this are emitted.
        eos: Tokens that end the sequence; None for the target's own.
        sampling: None takes the most likely token.
        num_draft_tokens: Verify at most this many per cycle; 0 decodes plainly, None
            verifies all that a block drafts.
        draft_sampling: At a temperature above 0, "sample" draws drafted tokens and
            "argmax" takes the best; both are exact. None is the family's choice.
        confidence_threshold: Cut a proposal before the first slot less certain than
            this; for drafters with a confidence head.
        prefill_step: Prompt tokens per forward.

    Raises:
        DFlash2Error: A value is out of its range.
    """
    sampling = sampling or SamplingConfig()
    drafting = Drafting(
        _draft_limit(drafter, num_draft_tokens),
        _draft_temperature(drafter, draft_sampling, sampling),
        _confidence_threshold(drafter, confidence_threshold),
    )
    _check_request(target, prompt, max_tokens, prefill_step)
    ends = target.eos_token_ids if eos is None else frozenset(eos)
    with torch.no_grad():
        begin = time.perf_counter()
        run = Decoding(target, drafter if drafting.limit else None, sampling, drafting)
        tokens = [run.prefill(prompt, prefill_step)]
        stats, first = AcceptanceStats(), time_when_done(target.device)
        while tokens[-1] not in ends and len(tokens) < max_tokens:
            drafts = min(drafting.limit, max_tokens - len(tokens) - 1)
            drafted, verdict = run.cycle(tokens[-1], drafts)
            emitted = _through_end([*drafted[: verdict.accepted], verdict.bonus], ends)
            if drafting.limit:
                stats.record_cycle(len(drafted), verdict.accepted, len(emitted))
            else:
                stats.plain_steps += 1
            tokens += emitted
        last = time_when_done(target.device)
    finish = "stop" if tokens[-1] in ends else "length"
    return Decoded(tuple(tokens), finish, stats, first - begin, last - first)


@torch.no_grad()
def plain_tokens(
    target: Target,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    eos: Collection[int],
) -> Iterator[PlainToken]:
    """The greedy tokens of `decode` without a drafter, one by one."""
    run = Decoding(target, None, SamplingConfig(), Drafting(limit=0))
    token = run.prefill(prompt)
    yield PlainToken(token, run.row)
    for _ in range(max_tokens - 1):
        if token in eos:
            return
        _, verdict = run.cycle(token, 0)
        token = verdict.bonus
        yield PlainToken(token, run.row)


class Decoding:
    """One sequence: the target's cache, the drafter's context, the random draws.

    Attributes:
        row: Logits that the last token was chosen from. Shape: (V,).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        sampling: SamplingConfig,
        drafting: Drafting,
    ):
        self.target, self.drafter = target, drafter
        self.sampling, self.drafting = sampling, drafting
        self.taps = drafter.config.target_layer_ids if drafter else ()
        self.cache = target.make_cache()
        self.context = drafter.make_context() if drafter else None
        self.generator = torch.Generator(target.device).manual_seed(sampling.seed)
        self.length = 0  # committed positions, that is the position of the anchor

    def prefill(self, prompt: Sequence[int], step: int = 2048) -> int:
        """Commit the prompt and return the first token."""
        for start in range(0, len(prompt), step):
            chunk = prompt[start : start + step]
            logits, features = self._forward(chunk, logits_to_keep=1)
            self._commit(features, len(chunk))
        return self._judge(None, logits).bonus

    def cycle(self, anchor: int, drafts: int) -> tuple[list[int], Verdict]:
        """Draft, verify, accept, roll back.

        With no `drafts` asked for the drafter does not run, and this is a plain step.
        The drafter always runs its whole block, of which the first `drafts` tokens
        are verified.
        """
        proposal = self._propose(anchor).first(drafts) if drafts else None
        drafted = proposal.tokens.tolist() if proposal else []
        logits, features = self._forward([anchor, *drafted])
        verdict = self._judge(proposal, logits)
        kept = verdict.accepted + 1
        self.target.roll_back(self.cache, self.length + kept)
        self._commit(features, kept)
        return drafted, verdict

    def _propose(self, anchor: int) -> Proposal:
        return self.drafter.propose(
            anchor,
            self.target,
            self.context,
            temperature=self.drafting.temperature,
            generator=self.generator,
            confidence_threshold=self.drafting.confidence_threshold,
        )

    def _forward(
        self, tokens: Sequence[int], logits_to_keep: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (S, V) and features (1, S, T*D) of tokens at the next positions."""
        logits, features = self.target.forward(
            torch.tensor([list(tokens)], device=self.target.device),
            self.cache,
            taps=self.taps,
            logits_to_keep=logits_to_keep,
        )
        return logits[0], features

    def _judge(self, proposal: Proposal | None, logits: Tensor) -> Verdict:
        if self.sampling.greedy:
            tokens = proposal.tokens if proposal else logits.new_empty(0)
            verdict = accept_greedy(tokens, logits)
        else:
            chances = probabilities(logits, self.sampling)
            verdict = accept_sampled(proposal, chances, self.generator)
        self.row = logits[verdict.accepted]
        return verdict

    def _commit(self, features: Tensor | None, kept: int) -> None:
        """Count the first `kept` rows of a forward as committed."""
        self.length += kept
        if self.drafter:
            self.drafter.extend(features[:, :kept], self.context)
            assert self.context.length == self.length
        assert self.cache.get_seq_length() == self.length


def _through_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """The tokens up to and with the first that ends the sequence."""
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


def _draft_limit(drafter: Drafter | None, asked: int | None) -> int:
    """The number of drafted tokens to verify per cycle; 0 without a drafter."""
    if drafter is None:
        return 0
    trained = drafter.config.num_draft_tokens
    if asked is None:
        return trained
    if not 0 <= asked <= trained:
        raise DFlash2Error(
            f"num_draft_tokens is {asked}, but the drafter's block drafts {trained}; "
            f"expected 0 to {trained}"
        )
    return asked


def _draft_temperature(
    drafter: Drafter | None, asked: str | None, sampling: SamplingConfig
) -> float:
    if asked not in (None, "sample", "argmax"):
        raise DFlash2Error(
            f"draft_sampling is {asked!r}, expected 'sample' or 'argmax'"
        )
    if drafter is None:
        return 0.0
    drawn = (asked or drafter.config.draft_sampling) == "sample"
    return sampling.temperature if drawn else 0.0


def _confidence_threshold(drafter: Drafter | None, asked: float) -> float:
    if not 0 <= asked <= 1:
        raise DFlash2Error(
            f"confidence_threshold is {asked!r}, expected a number from 0 to 1"
        )
    sure = drafter is None or getattr(drafter.config, "has_confidence", False)
    if asked > 0 and not sure:
        raise DFlash2Error(
            f"confidence_threshold is {asked}, but this {drafter.config.title} drafter "
            "has no confidence head"
        )
    return asked


def _check_request(
    target: Target, prompt: Sequence[int], max_tokens: int, prefill_step: int
) -> None:
    if len(prompt) == 0:
        raise DFlash2Error("the prompt is empty; it needs at least one token")
    for token in prompt:
        if not 0 <= token < target.vocab_size:
            raise DFlash2Error(
                f"the prompt has token {token}, outside the target's vocabulary of "
                f"{target.vocab_size}"
            )
    for name, value in (("max_tokens", max_tokens), ("prefill_step", prefill_step)):
        if value < 1:
            raise DFlash2Error(f"{name} is {value}, expected at least 1")
