"""Training blocks: anchors, labels and masks."""

import subprocess
import sys

import numpy as np
import pytest
from tiny import WINDOW, drafter_config

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from train_tiny import TinyRow, row_of, setting  # noqa: E402

from mlx_dflash2.torch.train.batch import PADDING, Batch  # noqa: E402
from mlx_dflash2.torch.train.blocks import (  # noqa: E402
    Blocks,
    anchors_of,
    block_mask,
    draw_anchors,
)


def counting_row() -> TinyRow:
    """Two documents that count up; answers at 3-9 and 13-15, and at 22-29."""
    supervised = np.zeros(30, bool)
    supervised[[*range(3, 10), *range(13, 16), *range(22, 30)]] = True
    return TinyRow(np.arange(30), supervised, np.repeat([0, 1], [18, 12]))


def test_a_batch_pads_rows_and_restarts_positions():
    batch = Batch.of([row_of(3, 2), row_of(4, seed=1)])
    assert batch.document.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, PADDING]]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 1]
    assert batch.positions[1, :4].tolist() == [0, 1, 2, 3]
    assert batch.tokens[1, 4] == 0 and not batch.supervised[1, 4]


def test_anchor_and_the_token_after_it_are_supervised():
    row = counting_row()
    expected = [*range(3, 9), 13, 14, *range(22, 29)]
    assert anchors_of(row.supervised, row.document).tolist() == expected


def test_no_block_starts_across_a_document_border():
    everything = np.ones(8, bool)
    document = np.repeat([0, 1], [5, 3])
    assert anchors_of(everything, document).tolist() == [0, 1, 2, 3, 5, 6]


def drawn(count: int, seed: int = 0, epoch: int = 0, row: int = 0) -> list[int]:
    data = row_of(40, seed=5)
    return draw_anchors(
        data.supervised, data.document, count, seed=seed, epoch=epoch, row=row
    ).tolist()


def test_anchors_are_drawn_without_replacement_in_order():
    anchors = drawn(12)
    assert anchors == sorted(set(anchors)) and len(anchors) == 12
    assert drawn(100) == list(range(3, 39))


def test_a_draw_repeats_exactly_and_differs_by_seed_epoch_and_row():
    assert drawn(12) == drawn(12)
    draws = [drawn(12), drawn(12, seed=1), drawn(12, epoch=1), drawn(12, row=1)]
    assert len({tuple(anchors) for anchors in draws}) == 4


def test_every_anchor_is_as_likely_as_any_other():
    """Ten of 36 in 2000 draws: 556 each, give or take 20."""
    counts = np.zeros(40)
    for epoch in range(2000):
        counts[drawn(10, epoch=epoch)] += 1
    assert counts.sum() == 20000
    assert np.abs(counts[3:39] - 20000 / 36).max() < 100


def test_labels_of_a_counting_row_are_the_numbers_after():
    batch = Batch.of([counting_row()])
    blocks = Blocks.at(batch, [np.array([3, 6, 14, 22, 28])], 7)
    steps = torch.arange(7)
    inside = blocks.anchors[..., None] + 1 + steps < 30
    expected = blocks.anchors[..., None] + 1 + steps
    assert torch.equal(blocks.labels[inside], expected[inside])
    assert torch.equal(blocks.previous[inside], expected[inside] - 1)
    assert torch.equal(blocks.sources[inside], expected[inside] - 1)
    # 3: all up to 9; 6: 7 to 9, although 13 is supervised too; 14: 15; 28: 29
    assert blocks.valid[0].sum(-1).tolist() == [6, 3, 1, 7, 1]
    assert blocks.valid[0, :, 0].all()


def test_labels_end_with_the_document():
    row = TinyRow(np.arange(10), np.ones(10, bool), np.repeat([0, 1], [6, 4]))
    blocks = Blocks.at(Batch.of([row]), [np.array([0, 4, 6])], 7)
    assert blocks.valid[0].sum(-1).tolist() == [5, 1, 3]


def test_dspark_has_a_slot_for_every_row():
    """Its row 0 predicts the token after the anchor, as row 1 of the others does."""
    for family in ("dflash", "dflash2", "dspark"):
        blocks = setting(family=family).blocks
        assert blocks.labels.shape == (2, 5, 7)
        assert torch.equal(
            blocks.labels[0, 0], setting(family=family).batch.tokens[0, 4:11]
        )


def test_rows_with_fewer_anchors_get_padded_blocks_that_count_nothing():
    blocks = setting().blocks
    assert blocks.real.tolist() == [[True] * 5, [True] * 3 + [False] * 2]
    assert not blocks.valid[1, 3:].any()
    nothing = Blocks.at(Batch.of([row_of(9)]), [np.array([], np.int64)], 7)
    assert nothing.real.tolist() == [[False]] and not nothing.valid.any()


def seen_by(layers: str, causal: bool | None, layer: int) -> tuple:
    """The mask of a layer and, looped over, what it must be."""
    config = drafter_config(layers, is_causal=causal)
    case = setting(layers=layers, is_causal=causal)
    mask = block_mask(case.batch, case.blocks, config, layer)
    window, ordered = config.layer_window(layer), config.layer_is_causal(layer)
    length, rows = case.batch.tokens.shape[1], config.block_size
    count = case.blocks.anchors.shape[1]
    expected = torch.zeros(2, 1, count * rows, length + count * rows, dtype=torch.bool)

    def near(distance: int) -> bool:
        return (distance >= 0 or not ordered) and (
            window is None or abs(distance) < window
        )

    for row, block, query in np.ndindex(2, count, rows):
        anchor = int(case.blocks.anchors[row, block])
        place, at = anchor + query, block * rows + query
        for key in range(anchor):
            same = case.batch.document[row, key] == case.batch.document[row, anchor]
            expected[row, 0, at, key] = bool(same) and near(place - key)
        for other in range(rows):
            expected[row, 0, at, length + block * rows + other] = near(query - other)
    return mask, expected


@pytest.mark.parametrize("layers", ["full", "sliding"])
@pytest.mark.parametrize("causal", [None, False, True])
def test_rows_see_the_context_before_the_anchor_and_their_own_block(layers, causal):
    assert WINDOW < 20  # so that the window hides context of the longer rows
    mask, expected = seen_by(layers, causal, layer=0)
    assert torch.equal(mask, expected)
    assert mask.any(-1).all()


def test_layers_of_two_kinds_have_two_masks():
    sliding, _ = seen_by("mixed", None, layer=0)
    full, expected = seen_by("mixed", None, layer=1)
    assert torch.equal(full, expected) and not torch.equal(sliding, full)


def test_training_imports_no_mlx():
    """In a process of its own: the tests themselves have MLX loaded."""
    script = """
import importlib, pkgutil, sys
import mlx_dflash2.torch.train as room
for module in pkgutil.iter_modules(room.__path__):
    if module.name != "__main__":
        importlib.import_module(f"{room.__name__}.{module.name}")
loaded = [name for name in sys.modules if name.split(".")[0] in ("mlx", "mlx_lm")]
assert "mlx_dflash2.torch.train.blocks" in sys.modules
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
