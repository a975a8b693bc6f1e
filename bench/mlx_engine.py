"""The bench's engine on MLX."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from mlx_dflash2.cycle_parts import CycleParts
from mlx_dflash2.drafter import Drafter
from mlx_dflash2.generation import generate, stream_generate, wired_limit
from mlx_dflash2.loading import load_drafter, load_target
from mlx_dflash2.target import Target
from mlx_dflash2.verify import compare

from .coverage import Cycle
from .engine import Engine, Run
from .record import Arm, Costs


class MLXEngine(Engine):
    """Targets and drafters on MLX."""

    def environment(self) -> dict[str, Any]:
        """The backend and its device."""
        device = mx.default_device()
        return {
            "backend": "mlx",
            "device": device.type.name,
            "device_name": mx.device_info(device)["device_name"],
        }

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
        target, drafter = self._pair(arm)
        done = generate(
            target,
            drafter,
            self._tokenizers[arm.target],
            prompt,
            max_tokens=max_tokens,
            temp=temperature,
            seed=seed,
            num_draft_tokens=arm.num_draft_tokens,
        )
        mx.synchronize(generation_stream)  # a plain step may still be under way
        return Run(
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            prefill_seconds=done.prefill_seconds,
            decode_seconds=done.decode_seconds,
            stats=done.stats,
        )

    def compare(
        self, arm: Arm, prompt: Sequence[int], tokens: list[int], *, max_tokens: int
    ) -> dict[str, Any]:
        """`verify.Comparison.as_dict` of an arm's greedy tokens with plain decoding."""
        target, _ = self._pair(arm)
        tokenizer = self._tokenizers[arm.target]
        plain = stream_generate(target, None, tokenizer, prompt, max_tokens=max_tokens)
        with contextlib.closing(plain):
            return compare(tokens, plain).as_dict()

    def costs(
        self, arm: Arm, prompt: Sequence[int], tokens: Sequence[int], *, repeats: int
    ) -> Costs:
        """The parts of a cycle, each alone, on the stream that a run uses."""
        with mx.stream(generation_stream), wired_limit():
            return super().costs(arm, prompt, tokens, repeats=repeats)

    @staticmethod
    def _quantization(target: Target) -> dict | None:
        config = target.config
        return config.get("quantization") or config.get("quantization_config")

    def _parts(self, target: Target, drafter: Drafter, tokens: list[int]) -> CycleParts:
        return CycleParts(target, drafter, tokens)

    def _replay(
        self,
        target: Target,
        drafter: Drafter,
        prompt: Sequence[int],
        tokens: Sequence[int],
        cycles: Sequence[Cycle],
    ) -> Iterator[list[list[int]]]:
        held = CycleParts(target, drafter, prompt)
        _, features = target.forward(mx.array([tokens]), held.cache, held.taps)
        for cycle in cycles:
            start, stop = cycle.anchor, cycle.anchor + cycle.emitted
            proposal = drafter.propose(tokens[start], target, held.context)
            yield proposal.candidates.tolist()
            drafter.extend(features[:, start:stop], held.context)


def load_mlx(
    models: Sequence[str],
    draft_models: Sequence[str],
    *,
    revisions: Sequence[str | None],
    draft_revisions: Sequence[str | None],
    offline: bool = False,
    draft_bits: int | None = None,
    draft_kind: str | None = None,
) -> MLXEngine:
    """Load every model once.

    Args:
        models, draft_models: Folders or Hub repositories.
        revisions, draft_revisions: One for each of them.
        draft_bits: Quantize the drafters on loading.
        draft_kind: The family that every drafter must be of.

    Raises:
        DFlash2Error: One cannot be loaded, or a drafter fits not every target.
    """
    targets = [
        load_target(name, revision=revision, offline=offline)
        for name, revision in zip(models, revisions, strict=True)
    ]
    drafters = [
        load_drafter(
            name,
            targets[0][0],
            revision=revision,
            offline=offline,
            bits=draft_bits,
            kind=draft_kind,
        )
        for name, revision in zip(draft_models, draft_revisions, strict=True)
    ]
    return MLXEngine(targets, drafters)
