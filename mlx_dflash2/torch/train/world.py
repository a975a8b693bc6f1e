"""The processes of a run: one alone, or as many as torchrun started."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from mlx_dflash2.errors import DFlash2Error


@dataclass(frozen=True)
class World:
    """This process among its peers.

    Attributes:
        device: Where this process computes.
        rank: Its number; 0 leads: it alone writes and prints.
        size: How many there are.
    """

    device: torch.device
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, asked: str) -> "World":
        """Find the device, and the peers if torchrun started this process.

        Args:
            asked: As `find_device` takes it; of GPUs each process has its own.
        """
        device = find_device(asked)
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(device, distributed.get_rank(), size)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def totals(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all processes, in float64 on the way; the same in each."""
        if self.size == 1:
            return list(tensors)
        joined = torch.cat([tensor.double().flatten() for tensor in tensors])
        distributed.all_reduce(joined)
        parts = joined.split([tensor.numel() for tensor in tensors])
        return [
            part.view_as(tensor).to(tensor.dtype)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            distributed.barrier()

    def leave(self) -> None:
        if self.size > 1:
            distributed.destroy_process_group()


def find_device(asked: str) -> torch.device:
    """The device of this name; "auto" takes a GPU if there is one.

    Raises:
        DFlash2Error: It cannot be used.
    """
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DFlash2Error(
            f"device is {asked!r}, which cannot be used "
            f"({str(error).splitlines()[0]}); expected auto, cpu or cuda"
        ) from None
    return device
