"""What the engines of both backends do alike."""

import abc
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_dflash2.config import DrafterConfig, check_fit
from mlx_dflash2.families.dflash2 import DFlash2Config
from mlx_dflash2.text import encode_prompt

from .coverage import Cycle, count_coverage, covered, cycles_on_path
from .engine import Run
from .facts import file_hashes, tokenizer_hash
from .parts import Parts, measure_costs, middle
from .record import Arm, Costs, Coverage, ModelFacts


class LoadedEngine(abc.ABC):
    """An `Engine` over loaded models; every drafter fits every target.

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
                _refuse_misfit(drafter, target)
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
        """Replay a run's cycles and look for the right tokens among the candidates."""
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


def _refuse_misfit(drafter, target) -> None:
    config: DrafterConfig = drafter.config
    check_fit(
        config,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        where=drafter.source.name,
        target=target.source.name,
    )


def _dtype_name(dtype) -> str:
    return str(dtype).rpartition(".")[2]
