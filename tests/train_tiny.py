"""Tiny rows, a drafter, a target and blocks between them, for tests of training."""

from dataclasses import dataclass

import numpy as np
import torch
from tiny import drafter_config, drafter_numbers, torch_drafter, torch_target

from mlx_dflash2.torch.train.batch import Batch
from mlx_dflash2.torch.train.blocks import Blocks
from mlx_dflash2.torch.train.features import Captured, capture
from mlx_dflash2.torch.train.network import block_rows

VOCAB = 256


@dataclass(frozen=True)
class TinyRow:
    """A row as data sets hold them; all of shape (S,)."""

    tokens: np.ndarray
    supervised: np.ndarray
    document: np.ndarray


def row_of(*lengths: int, prompt: int = 3, seed: int = 0) -> TinyRow:
    """Random documents of these lengths; all but a prompt of each is supervised."""
    generator = np.random.default_rng(seed)
    supervised = np.concatenate([np.arange(length) >= prompt for length in lengths])
    return TinyRow(
        tokens=generator.integers(0, VOCAB, sum(lengths)).astype(np.int32),
        supervised=supervised,
        document=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
    )


def documents_of(row: TinyRow) -> list[TinyRow]:
    """Each document of a row as a row of its own."""
    return [
        TinyRow(row.tokens[own], row.supervised[own], row.document[own] * 0)
        for own in (row.document == index for index in range(row.document.max() + 1))
    ]


@dataclass(frozen=True)
class Setting:
    """A drafter and a target with random weights, and blocks of some rows."""

    drafter: torch.nn.Module
    target: object
    batch: Batch
    captured: Captured
    blocks: Blocks

    def rows(self, features: torch.Tensor | None = None, **options) -> torch.Tensor:
        """Post-norm rows of the slots, (B, N, G, D); of other features, if given."""
        given = self.captured.features if features is None else features
        return block_rows(
            self.drafter, self.target, self.batch, given, self.blocks, **options
        )


def setting(
    *, family: str = "dflash2", layers: str = "full", rows=None, anchors=None, **changes
) -> Setting:
    """Two rows by default, one of them packed, with an anchor count each of its own."""
    config = drafter_config(layers, family, **changes)
    drafter = torch_drafter(config, drafter_numbers(config)).requires_grad_(True)
    target = torch_target()
    batch = Batch.of(rows or [row_of(30, seed=1), row_of(14, 9, seed=2)])
    anchors = anchors or [[3, 4, 13, 20, 27], [5, 11, 18]]
    blocks = Blocks.at(
        batch, [np.array(row) for row in anchors], config.num_draft_tokens
    )
    captured = capture(target, batch, config.target_layer_ids)
    return Setting(drafter, target, batch, captured, blocks)
