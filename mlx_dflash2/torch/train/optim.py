"""AdamW over the drafter's parameters, and its learning rate at each step."""

import math
from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn

from mlx_dflash2.errors import DFlash2Error

from .config import Optimizer

TABLES = (  # two-dimensional, but looked up row by row
    *("predecessor_codebook", "successor_codebook"),
    *("markov_w1.weight", "markov_w2.weight"),
)
UNDECAYED = ("norm.weight", "base_kernel", "bias", *TABLES)


def make_optimizer(
    drafter: nn.Module, options: Optimizer, fresh: Collection[str] = ()
) -> torch.optim.Optimizer:
    """AdamW with a group for each learning rate and weight decay.

    Every group has its full rate as `peak`; `set_rate` sets the one of a step.

    Args:
        drafter: Parameters that need no gradient are left out.
        options: Rates, decay, and whether moments are kept in 8 bits.
        fresh: Names of parameters that a warm start did not bring.

    Raises:
        DFlash2Error: 8 bits are asked for without bitsandbytes.
    """
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            high = name.endswith(TABLES) or name in fresh
            rate = options.high_lr if high else options.lr
            decay = 0.0 if name.endswith(UNDECAYED) else options.weight_decay
            groups.setdefault((rate, decay), []).append(parameter)
    described = [
        {"params": parameters, "lr": rate, "peak": rate, "weight_decay": decay}
        for (rate, decay), parameters in groups.items()
    ]
    return _class(drafter, options)(described, betas=tuple(options.betas))


def _class(drafter: nn.Module, options: Optimizer) -> type[torch.optim.Optimizer]:
    if not options.eight_bit:
        return torch.optim.AdamW
    try:
        import bitsandbytes
    except ImportError:
        raise DFlash2Error(
            "optimizer.eight_bit needs bitsandbytes; install it (`pip install "
            "bitsandbytes`) or leave the setting out"
        ) from None
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for name, parameter in drafter.named_parameters():
        if name.endswith(UNDECAYED):  # small, or of rows that are seldom touched
            manager.override_config(parameter, "optim_bits", 32)
    return bitsandbytes.optim.AdamW8bit


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Give every group this share of its full rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * share


def rate_at(options: Optimizer, step: int, steps: int) -> float:
    """The share of the full rate for a step, counted from 0, of a run of `steps`.

    It rises in a line over the warm-up. "cosine" then falls along half a wave to
    `lr_end`; "wsd" stays, and falls so over its last part only (warm-up, stable,
    decay: Hu et al. 2024, "MiniCPM", section 4).
    """
    if step < options.warmup:
        return (step + 1) / options.warmup
    first = options.warmup
    if options.schedule == "wsd":
        first = max(first, anneal_start(options, steps))
    if step < first:
        return 1.0
    fallen = min(1.0, (step - first + 1) / max(1, steps - first))
    wave = 0.5 * (1 + math.cos(math.pi * fallen))
    return options.lr_end + (1 - options.lr_end) * wave


def anneal_start(options: Optimizer, steps: int) -> int:
    """The step with which "wsd" begins to lower the rate."""
    return steps - math.ceil(options.decay * steps)


def clip(parameters: Iterable[Tensor], largest: float) -> float:
    """Scale gradients down to a norm of `largest`; their norm before."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, largest))
