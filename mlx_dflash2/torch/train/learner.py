"""One optimizer step: forward, backward, clip, update."""

import contextlib
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mlx_dflash2.errors import DFlash2Error

from ..drafter import Drafter
from ..target import Target
from .config import TrainConfig
from .features import Features
from .feed import Part
from .head_tokens import HeadTokens
from .losses import Criterion
from .metrics import total_report
from .network import block_rows
from .objective import Objective
from .optim import clip, rate_at, set_rate
from .precision import Precision
from .report import LossReport
from .slots import slot_weights
from .world import World

TINY = 1e-6  # sum of weights


class BatchLoss(nn.Module):
    """The loss of one batch of rows: the module whose gradients processes average."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        config: TrainConfig,
        *,
        features: Features,
        precision: Precision,
        tap_scale: float,
    ):
        super().__init__()
        self.drafter = drafter
        self.target, self.options = target, config.batch
        self.features = features
        self.precision, self.tap_scale = precision, tap_scale

    def forward(
        self,
        part: Part,
        objective: Objective,
        head_tokens: Tensor | None,
        share: Tensor,
    ) -> tuple[Tensor, LossReport]:
        """The part's share of the step's loss, and its report without a gradient."""
        captured = self.features(part)
        criterion = Criterion(
            self.drafter,
            self.target,
            objective,
            self.options.blocks_at_once,
            head_tokens,
        )
        with self.precision.autocast():
            hidden = block_rows(
                self.drafter,
                self.target,
                part.batch,
                captured.features * self.tap_scale,
                part.blocks,
                recompute=self.options.recompute,
            )
            report = criterion(hidden, captured.last, part.blocks)
        return report.loss(objective, share), report.detach()


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        report: Over all processes.
        norm: Of the gradient, before it was clipped.
        rate: Share of the full learning rate.
        scale: Of fp16's loss; 1 in other formats.
        skipped: The gradient overflowed fp16, and nothing was changed.
    """

    report: LossReport
    norm: float
    rate: float
    scale: float
    skipped: bool


class Learner:
    """The drafter in training, with what changes its weights."""

    def __init__(
        self,
        loss: BatchLoss,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        world: World,
        head_tokens: HeadTokens | None,
    ):
        self.loss: nn.Module = loss
        if world.size > 1:
            # A stage may leave the selector out.
            self.loss = DistributedDataParallel(
                loss, find_unused_parameters=True, gradient_as_bucket_view=True
            )
        self.drafter, self.precision = loss.drafter, loss.precision
        self.optimizer, self.config, self.world = optimizer, config, world
        self.head_tokens = head_tokens
        self.scaler = self.precision.scaler()

    def step(self, parts: list[Part], step: int, taken: int) -> StepReport:
        """Train on this process's batches of one step.

        Args:
            parts: One or more, as many in every process.
            step: Its number, from 0; it decides the objective.
            taken: Steps before it that were not skipped; they decide the rate.

        Raises:
            DFlash2Error: The gradient is not finite, and not for want of range.
        """
        objective = self.config.objective_at(step)
        rate = rate_at(self.config.optimizer, taken, self.config.steps)
        set_rate(self.optimizer, rate)
        head = self.head_tokens.at(step) if self.head_tokens is not None else None
        report = self._gradient(parts, objective, head)
        self.scaler.unscale_(self.optimizer)
        norm = clip(self.drafter.parameters(), self.config.optimizer.clip)
        if not self.scaler.is_enabled() and not norm < float("inf"):
            raise DFlash2Error(
                f"step {step}: the gradient is not finite; lower optimizer.lr, or "
                "check the data and the drafter the run started from"
            )
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        skipped = self.scaler.get_scale() < scale
        total = total_report(report, self.world)
        return StepReport(total, norm, rate, scale, skipped)

    def _gradient(
        self, parts: list[Part], objective: Objective, head: Tensor | None
    ) -> LossReport:
        """Accumulate the gradient of the mean over all batches of all processes."""
        weights = [slot_weights(objective, part.blocks.valid).sum() for part in parts]
        (whole,) = self.world.totals([torch.stack(weights).sum()])
        reports = []
        for part, weight in zip(parts, weights, strict=True):
            last = len(reports) == len(parts) - 1
            with self._together(last):
                share = weight / whole.clamp(min=TINY)
                loss, report = self.loss(part, objective, head, share)
                # Processes average their gradients, and the sum is wanted.
                self.scaler.scale(loss * self.world.size).backward()
            reports.append(report)
        return reduce(add, reports)

    def _together(self, last: bool) -> contextlib.AbstractContextManager:
        """Gradients are exchanged once, with the last batch."""
        if last or not isinstance(self.loss, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.loss.no_sync()
