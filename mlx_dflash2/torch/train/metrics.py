"""How well a drafter drafts on held-out rows, by the arithmetic of decoding.

Where a row's answers are the target's own greedy text, decoding would emit them token
by token, so `acceptance_length` is that of real greedy decoding, found without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from ..dflash2 import DFlash2Drafter
from ..drafter import Drafter
from ..target import Target
from .batch import Batch
from .blocks import Blocks, anchors_of
from .features import Captured, capture
from .heads import Heads
from .network import block_rows
from .objective import Objective
from .paths import draft_paths
from .precision import Precision
from .report import LossReport
from .slots import Slots
from .terms import measure_logits
from .world import World

if TYPE_CHECKING:
    from mlx_dflash2.data.rows import Row

PATH, UNARY, ORACLE = "path", "unary", "oracle"  # ways to draft


@dataclass(frozen=True)
class Tally:
    """Sums over rows; tallies of several rows add up.

    Attributes:
        walks: Of each way to draft: cycles, emitted tokens, and in how many cycles
            slot 0, 1, ... was accepted. Shape: (2+G,).
        report: With every position of the answers as an anchor.
    """

    walks: dict[str, Tensor]
    report: LossReport

    def __add__(self, other: Self) -> Self:
        walks = {name: self.walks[name] + other.walks[name] for name in self.walks}
        return type(self)(walks, self.report + other.report)

    def over(self, world: World) -> Self:
        """The sums of all processes."""
        walks = world.totals(list(self.walks.values()))
        named = dict(zip(self.walks, walks, strict=True))
        return type(self)(named, total_report(self.report, world))

    def summary(self, objective: Objective) -> dict[str, Any]:
        """The ratios, by name; lists have an entry for each slot.

        `acceptance_length`: tokens emitted per cycle; `accepted_at`: the share of
        cycles in which a slot was accepted. DFlash 2: `unary_` and
        `oracle_acceptance_length`, were the selector to take the first candidate or
        always the right one. `loss` and its terms, and what `rates` has.
        """
        cycles, emitted, *accepted = self.walks[PATH].tolist()
        found = {
            "acceptance_length": emitted / max(cycles, 1),
            "accepted_at": [count / max(cycles, 1) for count in accepted],
            "cycles": int(cycles),
            "tokens": int(emitted),
        }
        for name in (UNARY, ORACLE):
            if name in self.walks:
                cycles, emitted, *_ = self.walks[name].tolist()
                found[f"{name}_acceptance_length"] = emitted / max(cycles, 1)
        return found | losses(self.report, objective) | rates(self.report)


def losses(report: LossReport, objective: Objective) -> dict[str, float]:
    """The loss and its terms, by name."""
    means = {f"loss_{term}": float(report.mean(term)) for term in objective.mix}
    return {"loss": float(report.loss(objective))} | means


def rates(report: LossReport) -> dict[str, Any]:
    """What a report's counts say, with true tokens before each slot.

    `accuracy`: the best token of a slot is right. `recall`, DFlash 2: it is among the
    candidates; `selector_accuracy` over all slots, and `selector_lift`, by how much
    that is more than without the selector. `overlap`, where a term needs the target's
    distribution: the chance that sampling accepts; and for DSpark
    `confidence_bias`, the chance that is stated minus this one.
    """
    valid = report.counts["valid"]
    each = {n: (c / valid.clamp(min=1)).tolist() for n, c in report.counts.items()}
    slots = valid.sum().clamp(min=1)
    all_ = {n: float(c.sum() / slots) for n, c in report.counts.items()}
    found: dict[str, Any] = {"accuracy": each["hits"]}
    if "recall" in each:
        lift = all_["selector"] - all_["hits"]
        found |= {"recall": each["recall"], "selector_accuracy": all_["selector"]}
        found["selector_lift"] = lift
    if "overlap" in each:
        found["overlap"] = each["overlap"]
    if "confidence" in each:
        found["confidence_bias"] = all_["confidence"] - all_["overlap"]
    return found


def total_report(report: LossReport, world: World) -> LossReport:
    """The sums of all processes, without a gradient."""
    parts = (report.totals, report.weights, report.counts)
    sums = iter(world.totals([t.detach() for part in parts for t in part.values()]))
    return LossReport(*({name: next(sums) for name in part} for part in parts))


@dataclass(frozen=True)
class Evaluator:
    """Measures a drafter on rows; the processes of a run share them.

    Attributes:
        drafter: As it would decode: over the whole vocabulary.
        target: The model the rows' answers are of.
        objective: Its losses are reported as well.
        precision: Of the drafter's matrix products.
        world: This process and its peers.
        blocks_at_once: Blocks whose logits exist at the same time.
        tap_scale: As the drafter is trained with.
    """

    drafter: Drafter
    target: Target
    objective: Objective
    precision: Precision
    world: World
    blocks_at_once: int = 32
    tap_scale: float = 1.0

    @torch.no_grad()
    def __call__(self, rows: Sequence["Row"]) -> dict[str, Any]:
        """See `Tally.summary`; of at least one row for each process."""
        own = range(self.world.rank, len(rows), self.world.size)
        total = reduce(add, (self._tally(rows[index]) for index in own))
        return total.over(self.world).summary(self.objective)

    def _tally(self, row: "Row") -> Tally:
        batch = Batch.of([row], self.world.device)
        captured = capture(self.target, batch, self.drafter.config.target_layer_ids)
        anchors = anchors_of(row.supervised, row.document)
        parts = [
            self._part(batch, captured, anchors[start : start + self.blocks_at_once])
            for start in range(0, max(1, len(anchors)), self.blocks_at_once)
        ]
        walks = {}
        for name in parts[0][1]:
            runs = torch.cat([runs[name] for _, runs in parts]).cpu().numpy()
            sums = walk(anchors, runs, self.drafter.config.num_draft_tokens)
            walks[name] = torch.from_numpy(sums).to(self.world.device)
        return Tally(walks, reduce(add, (report for report, _ in parts)))

    def _part(
        self, batch: Batch, captured: Captured, anchors: np.ndarray
    ) -> tuple[LossReport, dict[str, Tensor]]:
        """Losses and counts of some blocks of a row, and how many tokens each gains."""
        drafter, target = self.drafter, self.target
        blocks = Blocks.at(batch, [anchors], drafter.config.num_draft_tokens)
        heads = Heads(drafter, target, None)
        with self.precision.autocast():
            features = captured.features * self.tap_scale
            hidden = block_rows(drafter, target, batch, features, blocks)
            slots = Slots.of(hidden, captured.last, blocks)
            logits = heads.draft(slots.hidden)
            report = measure_logits(heads, self.objective, slots, logits)
            return report, _runs(drafter, slots, logits)


def _runs(drafter: Drafter, slots: Slots, logits: Tensor) -> dict[str, Tensor]:
    """Tokens of each block that are accepted, by way to draft. Shape: (M,)."""
    anchors, labels = slots.previous[:, 0], slots.labels
    right = {PATH: draft_paths(drafter, slots.hidden, logits, anchors) == labels}
    if isinstance(drafter, DFlash2Drafter):
        best = logits.topk(drafter.config.selector_top_k, dim=-1).indices
        right[UNARY] = best[..., 0] == labels
        right[ORACLE] = (best == labels[..., None]).any(dim=-1)
    return {
        name: (hit & slots.valid).long().cumprod(dim=-1).sum(dim=-1)
        for name, hit in right.items()
    }


def walk(anchors: np.ndarray, runs: np.ndarray, slots: int) -> np.ndarray:
    """Decode the answers of a row on paper, cycle by cycle.

    The first token of an answer comes before any cycle. A cycle emits the accepted
    tokens and one more, unless the answer ends with an accepted one.

    Args:
        anchors: All positions a cycle may start at, rising: those of an answer follow
            each other, its last token is none. Shape: (N,).
        runs: Tokens accepted after each. Shape: (N,).
        slots: Tokens of a block.

    Returns:
        As `Tally.walks` has it, in float64.
    """
    sums = np.zeros(2 + slots)
    accepted = dict(zip(anchors.tolist(), runs.tolist(), strict=True))
    reached = -1  # by the cycle before
    for anchor in accepted:
        if anchor > reached and anchor - 1 not in accepted:
            reached = anchor  # the first token of an answer
        if anchor != reached:
            continue
        run = accepted[anchor]
        ends = anchor + run not in accepted
        emitted = run if ends else run + 1
        sums[0] += 1
        sums[1] += emitted
        sums[2 : 2 + run] += 1
        reached = anchor + emitted
    return sums
