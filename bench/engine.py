"""What a bench needs of a backend, and what both backends do alike."""

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_dflash2.config import check_fit
from mlx_dflash2.families.dflash2 import DFlash2Config
from mlx_dflash2.stats import AcceptanceStats
from mlx_dflash2.text import encode_prompt

from .coverage import Cycle, count_coverage, covered, cycles_on_path
from .facts import file_hashes, tokenizer_hash
from .parts import Parts, measure_costs, middle
from .record import Arm, Costs, Coverage, ModelFacts


@dataclass(frozen=True)
class Run:
    """One decoding, with what it emitted.

    Attributes:
        finish_reason: "stop" or "length".
    """

    tokens: list[int]
    finish_reason: str
    prefill_seconds: float
    decode_seconds: float
    stats: AcceptanceStats


class Engine(abc.ABC):
    """A backend with its models loaded; arms index its targets and drafters.

    Args:
        targets: With their tokenizers.
        drafters: May be none.

    Raises:
        DFlash2Error: A drafter was made for a target of another shape.
    """

    def __init__(self, targets: Sequence[tuple[Any, Any]], drafters: Sequence[Any]):
        self._targets = [target for target, _ in targets]
        self._tokenizers = [tokenizer for _, tokenizer in targets]
        self._drafters = list(drafters)
        for drafter in self._drafters:
            for target in self._targets:
                check_fit(
                    drafter.config,
                    target,
                    where=drafter.source.name,
                    name=target.source.name,
                )
        self.targets = [
            ModelFacts(
                name=target.source.name,
                revision=target.source.revision,
                kind="llama",
                dtype=_dtype_name(target.dtype),
                quantization=self._quantization(target),
                files=file_hashes(target.source),
                tokenizer=tokenizer_hash(target.source),
            )
            for target in self._targets
        ]
        self.drafters = [
            ModelFacts(
                name=drafter.source.name,
                revision=drafter.source.revision,
                kind=drafter.config.kind,
                dtype=_dtype_name(drafter.dtype),
                quantization=drafter.config.quantization,
                files=file_hashes(drafter.source),
                num_draft_tokens=drafter.config.num_draft_tokens,
            )
            for drafter in self._drafters
        ]

    @abc.abstractmethod
    def environment(self) -> dict[str, Any]:
        """The backend and its device."""

    @abc.abstractmethod
    def run(
        self,
        arm: Arm,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Run:
        """Decode once and wait for the device."""

    @abc.abstractmethod
    def compare(
        self, arm: Arm, prompt: Sequence[int], tokens: list[int], *, max_tokens: int
    ) -> dict[str, Any]:
        """`Comparison.as_dict` of an arm's greedy tokens with plain decoding."""

    def encode(
        self,
        target: int,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict] | None,
        thinking: bool | None,
        template: bool = True,
    ) -> list[int]:
        """Token ids of messages; without `template` their bare text."""
        tokenizer = self._tokenizers[target]
        if not template:
            texts = [message.get("content") or "" for message in messages]
            return encode_prompt(tokenizer, "\n\n".join(filter(None, texts)))
        options = {"tools": tools, "enable_thinking": thinking}
        given = {name: value for name, value in options.items() if value is not None}
        return encode_prompt(tokenizer, messages, given)

    def decode(self, target: int, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones shown."""
        return self._tokenizers[target].decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def costs(
        self, arm: Arm, prompt: Sequence[int], tokens: Sequence[int], *, repeats: int
    ) -> Costs:
        """The parts of a cycle, each alone, at the middle of a finished run."""
        parts = self._parts(*self._pair(arm), middle(prompt, tokens))
        return measure_costs(parts, arm.num_draft_tokens, repeats)

    def coverage(
        self, arm: Arm, prompt: Sequence[int], tokens: Sequence[int], run: Run
    ) -> Coverage | None:
        """Replay a run's cycles and look for the right tokens among the candidates.

        Args:
            tokens: What plain decoding emitted; a cycle past the point where `run`
                left it counts nowhere.
        """
        target, drafter = self._pair(arm)
        if not isinstance(drafter.config, DFlash2Config):
            return None
        cycles = cycles_on_path(run, tokens)
        replayed = self._replay(target, drafter, prompt, tokens, cycles)
        slots = [covered(*pair) for pair in zip(cycles, replayed, strict=True)]
        return count_coverage(slots, arm.num_draft_tokens)

    def _pair(self, arm: Arm) -> tuple[Any, Any]:
        """The target and, unless it decodes plainly, the drafter of an arm."""
        drafter = None if arm.drafter is None else self._drafters[arm.drafter]
        return self._targets[arm.target], drafter

    @staticmethod
    @abc.abstractmethod
    def _quantization(target) -> dict | None:
        """Its settings, or None."""

    @abc.abstractmethod
    def _parts(self, target, drafter, tokens: list[int]) -> Parts:
        """A cycle's parts over caches that hold `tokens`."""

    @abc.abstractmethod
    def _replay(
        self,
        target,
        drafter,
        prompt: Sequence[int],
        tokens: Sequence[int],
        cycles: Sequence[Cycle],
    ) -> Iterator[list[list[int]]]:
        """Each cycle's candidates by slot, over the target's taps of `tokens`."""


def _dtype_name(dtype) -> str:
    return str(dtype).rpartition(".")[2]
