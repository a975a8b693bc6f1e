"""Which rows and anchors each step sees; it depends on the step's number alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from mlx_dflash2.errors import DFlash2Error

from .batch import Batch
from .blocks import Blocks, draw_anchors
from .config import TrainConfig
from .optim import anneal_start
from .world import World

if TYPE_CHECKING:
    from mlx_dflash2.data.rows import Row, RowSet


@dataclass(frozen=True)
class Drawn:
    """A row, its number in its data set, and where its blocks start."""

    number: int
    row: "Row"
    anchors: np.ndarray


@dataclass(frozen=True)
class Part:
    """What one forward of a step sees.

    Attributes:
        rows: The data set they are of.
        numbers: Of the batch's rows, in it.
    """

    batch: Batch
    blocks: Blocks
    rows: "RowSet"
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Feed:
    """The rows of a run.

    Attributes:
        rows: Seen first.
        anneal: Seen while the learning rate falls; None if `rows` are.
        slots: Of each block.
    """

    config: TrainConfig
    world: World
    rows: "RowSet"
    anneal: "RowSet | None"
    slots: int

    def __post_init__(self) -> None:
        batch = self.config.batch
        if batch.rows % (batch.rows_at_once * self.world.size):
            raise DFlash2Error(
                f"batch.rows is {batch.rows}, expected a multiple of rows_at_once "
                f"{batch.rows_at_once} times {self.world.size} processes"
            )

    def steps(self, start: int) -> Iterator[list[Part]]:
        """What this process computes in each step from `start` on.

        The rows of a step are sorted by length and dealt out to the processes in
        batches, so that a batch has little padding and each process as much to do.
        """
        size = self.config.batch.rows_at_once
        for rows, drawn in self._draws(start):
            drawn.sort(key=lambda each: len(each.row.tokens))
            dealt = [drawn[at : at + size] for at in range(0, len(drawn), size)]
            own = dealt[self.world.rank :: self.world.size]
            yield [self._part(rows, part) for part in own]

    def _part(self, rows: "RowSet", drawn: Sequence[Drawn]) -> Part:
        batch = Batch.of([each.row for each in drawn], self.world.device)
        blocks = Blocks.at(batch, [each.anchors for each in drawn], self.slots)
        return Part(batch, blocks, rows, tuple(each.number for each in drawn))

    def _draws(self, start: int) -> Iterator[tuple["RowSet", list[Drawn]]]:
        config = self.config
        turn = config.steps
        if self.anneal is not None:
            turn = anneal_start(config.optimizer, config.steps)
        if start < turn:
            yield from self._of(self.rows, start, turn)
        if self.anneal is not None:
            yield from self._of(self.anneal, max(0, start - turn), config.steps - turn)

    def _of(
        self, rows: "RowSet", start: int, stop: int
    ) -> Iterator[tuple["RowSet", list[Drawn]]]:
        seed, batch = self.config.seed, self.config.batch
        visits = rows.visits(seed, start * batch.rows)
        for _ in range(start, stop):
            drawn = []
            for visit in islice(visits, batch.rows):
                row = rows[visit.row]
                anchors = draw_anchors(
                    row.supervised,
                    row.document,
                    batch.anchors,
                    seed=seed,
                    epoch=visit.epoch,
                    row=visit.row,
                )
                drawn.append(Drawn(visit.row, row, anchors))
            yield rows, drawn
