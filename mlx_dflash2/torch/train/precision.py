"""The number format of a run: what the device is good at, and fp16's loss scale."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mlx_dflash2.errors import DFlash2Error

DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
BF16_CAPABILITY = (8, 0)  # below, CUDA only imitates bf16, slowly, and still offers it
LARGEST_TAP = 2048.0  # in fp16; a sum over many taps must stay below 65504


@dataclass(frozen=True)
class Precision:
    """Autocast for the drafter, whose parameters stay fp32, and the target's dtype.

    Attributes:
        name: A key of DTYPES.
        device: Where it runs.
    """

    name: str
    device: torch.device

    @classmethod
    def choose(cls, asked: str, device: torch.device) -> "Precision":
        """The format asked for; "auto" takes the fastest the device has."""
        if asked != "auto":
            return cls(asked, device)
        if device.type != "cuda":
            return cls("fp32", device)
        native = torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
        return cls("bf16" if native else "fp16", device)

    @property
    def target_dtype(self) -> torch.dtype:
        """A CPU computes in fp32 what is not autocast: it is slow in the others."""
        return torch.float32 if self.device.type == "cpu" else DTYPES[self.name]

    def autocast(self) -> contextlib.AbstractContextManager:
        if self.name == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.name])

    def scaler(self) -> torch.amp.GradScaler:
        """fp16's loss scale; for other formats it does nothing.

        It starts low and grows soon, as a run may have only a few thousand steps.
        """
        return torch.amp.GradScaler(
            self.device.type,
            enabled=self.name == "fp16",
            init_scale=2.0**13,
            growth_interval=500,
        )

    def tap_scale(self, largest: float) -> float:
        """What to multiply taps by so that their weighted sums fit into fp16.

        A norm follows the sum, so a power of two changes nothing else.
        """
        scale = 1.0
        while self.name == "fp16" and largest * scale > LARGEST_TAP:
            scale /= 2
        return scale


def check_finite(states: torch.Tensor, names: Sequence[str], *, cure: str) -> float:
    """The largest value of the target's states.

    Args:
        states: Of real tokens only; of P places, joined. Shape: (S, P*D).
        names: Of the places.
        cure: What to do where they overflow.

    Raises:
        DFlash2Error: A value is not finite.
    """
    parts = states.unflatten(-1, (len(names), -1)).abs().amax(dim=(0, 2)).float()
    for name, largest in zip(names, parts.tolist(), strict=True):
        if not largest < float("inf"):
            finite = states[states.isfinite()]
            raise DFlash2Error(
                f"{name}: the target's states overflow {states.dtype} (largest finite "
                f"value {float(finite.abs().max()):.4g}); {cure}"
            )
    return float(parts.max())
