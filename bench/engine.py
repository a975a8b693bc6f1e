"""What a bench needs of a backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_dflash2.stats import AcceptanceStats

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


class Engine(Protocol):
    """A backend with its models loaded. Arms index its targets and drafters."""

    targets: list[ModelFacts]
    drafters: list[ModelFacts]

    def environment(self) -> dict[str, Any]:
        """The backend's versions and device."""

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

    def decode(self, target: int, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones shown."""

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

    def compare(
        self, arm: Arm, prompt: Sequence[int], tokens: list[int], *, max_tokens: int
    ) -> dict[str, Any]:
        """`verify.Comparison.as_dict` of an arm's greedy tokens with plain decoding."""

    def costs(
        self, arm: Arm, prompt: Sequence[int], tokens: Sequence[int], *, repeats: int
    ) -> Costs:
        """The parts of a cycle, each alone, at the middle of a finished run."""

    def coverage(
        self, arm: Arm, prompt: Sequence[int], tokens: Sequence[int], run: Run
    ) -> Coverage | None:
        """Replay a run's cycles and look for the right tokens among the candidates.

        Args:
            tokens: What plain decoding emitted; a cycle past the point where `run`
                left it counts nowhere.
        """
