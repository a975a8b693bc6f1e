"""The bench's engine on PyTorch."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mlx_dflash2.comparison import compare
from mlx_dflash2.errors import DFlash2Error
from mlx_dflash2.torch.decode import Decoding, Drafting, decode, plain_tokens
from mlx_dflash2.torch.drafter import Drafter
from mlx_dflash2.torch.loading import load_drafter, load_target
from mlx_dflash2.torch.sampling import SamplingConfig
from mlx_dflash2.torch.target import Target
from mlx_dflash2.torch.timing import wait_for
from mlx_dflash2.torch.tokenizer import load_tokenizer

from .coverage import Cycle
from .engine import Engine, Run
from .record import Arm


class TorchEngine(Engine):
    """Targets and drafters on one PyTorch device."""

    def environment(self) -> dict[str, Any]:
        """The backend and its device."""
        device = self._targets[0].device
        found = {"backend": "torch", "device": device.type}
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            return found | {"device_name": name, "cuda": torch.version.cuda}
        return found | {"threads": torch.get_num_threads()}

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
        done = decode(
            target,
            drafter,
            prompt,
            max_tokens=max_tokens,
            eos=self._ends(arm),
            sampling=SamplingConfig(temperature=temperature, seed=seed),
            num_draft_tokens=arm.num_draft_tokens,
        )
        return Run(
            tokens=list(done.tokens),
            finish_reason=done.finish_reason,
            prefill_seconds=done.prefill_seconds,
            decode_seconds=done.decode_seconds,
            stats=done.stats,
        )

    def compare(
        self, arm: Arm, prompt: Sequence[int], tokens: list[int], *, max_tokens: int
    ) -> dict[str, Any]:
        """`Comparison.as_dict` of an arm's greedy tokens with plain decoding."""
        target, _ = self._pair(arm)
        plain = plain_tokens(target, prompt, max_tokens=max_tokens, eos=self._ends(arm))
        return compare(tokens, plain, torch.finfo).as_dict()

    def _ends(self, arm: Arm) -> frozenset[int]:
        """What ends a sequence: by the model's files or by the tokenizer's."""
        own = self._tokenizers[arm.target].eos_token_id
        ends = self._targets[arm.target].eos_token_ids
        return ends if own is None else ends | {own}

    @staticmethod
    def _quantization(target: Target) -> None:
        return None

    def _parts(self, target: Target, drafter: Drafter, tokens: list[int]) -> "Parts":
        return Parts(target, drafter, tokens)

    @torch.no_grad()
    def _replay(
        self,
        target: Target,
        drafter: Drafter,
        prompt: Sequence[int],
        tokens: Sequence[int],
        cycles: Sequence[Cycle],
    ) -> Iterator[list[list[int]]]:
        held = Parts(target, drafter, prompt)
        emitted = torch.tensor([tokens], device=target.device)
        _, features = target.forward(
            emitted, held.cache, taps=held.taps, logits_to_keep=1
        )
        for cycle in cycles:
            start, stop = cycle.anchor, cycle.anchor + cycle.emitted
            proposal = drafter.propose(tokens[start], target, held.context)
            yield proposal.candidates.tolist()
            drafter.extend(features[:, start:stop], held.context)


class Parts:
    """What a greedy cycle is made of, over caches that hold `tokens`.

    Every part waits for the device and leaves the caches as it found them.
    """

    @torch.no_grad()
    def __init__(self, target: Target, drafter: Drafter, tokens: Sequence[int]):
        self.target, self.drafter, self.length = target, drafter, len(tokens)
        held = Decoding(target, drafter, SamplingConfig(), Drafting(limit=0))
        self.anchor = held.prefill(tokens)
        self.cache, self.context, self.taps = held.cache, held.context, held.taps

    @torch.no_grad()
    def forward(self, rows: int, *, tapped: bool = True) -> None:
        """A target forward and the choice of every row's token."""
        tokens = torch.full((1, rows), self.anchor, device=self.target.device)
        taps = self.taps if tapped else ()
        logits, _ = self.target.forward(tokens, self.cache, taps=taps)
        logits.argmax(dim=-1)
        wait_for(self.target.device)
        self.target.roll_back(self.cache, self.length)

    @torch.no_grad()
    def draft(self, count: int) -> None:
        """One proposal of `count` tokens."""
        self.drafter.propose(self.anchor, self.target, self.context).first(count)
        wait_for(self.target.device)


def load_torch(
    models: Sequence[str],
    draft_models: Sequence[str],
    *,
    revisions: Sequence[str | None],
    draft_revisions: Sequence[str | None],
    offline: bool = False,
    draft_kind: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
) -> TorchEngine:
    """Load every model once.

    Args:
        models, draft_models: Folders or Hub repositories.
        revisions, draft_revisions: One for each of them.
        draft_kind: The family that every drafter must be of.
        device: "cpu" or "cuda".
        dtype: What all compute in, as torch names it; None for the stored one.

    Raises:
        DFlash2Error: One cannot be loaded, a drafter fits not every target, or there
            is no such device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DFlash2Error("device cuda: PyTorch finds none here; use cpu")
    common = {
        "offline": offline,
        "device": device,
        "dtype": None if dtype is None else getattr(torch, dtype),
    }
    targets = [
        load_target(name, revision=revision, **common)
        for name, revision in zip(models, revisions, strict=True)
    ]
    drafters = [
        load_drafter(name, revision=revision, kind=draft_kind, **common)
        for name, revision in zip(draft_models, draft_revisions, strict=True)
    ]
    tokenizers = [load_tokenizer(target.source) for target in targets]
    return TorchEngine(list(zip(targets, tokenizers, strict=True)), drafters)
