"""Rows on disk: what is written is read, in an order of their own, or refused."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from mlx_dflash2.data.formatting import Document
from mlx_dflash2.data.packing import pack, unpacked
from mlx_dflash2.data.rows import Row, RowSet, Visit, chunks, order, write_rows
from mlx_dflash2.errors import DFlash2Error

ROOT = Path(__file__).resolve().parent.parent


def row(*lengths, start=0):
    """A row of documents of these lengths; its tokens count on from `start`."""
    total = sum(lengths)
    return Row(
        np.arange(start, start + total, dtype=np.int32),
        np.arange(total) % 3 > 0,
        np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
    )


ROWS = [row(3, 2), row(5, start=70), row(1, 1, 1), row(4), row(2, 6)]


def same(left, right):
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        and getattr(left, name).dtype == getattr(right, name).dtype
        for name in ("tokens", "supervised", "document")
    )


@pytest.mark.parametrize("rows_per_shard", [1, 2, 5, 100])
def test_rows_come_back_as_they_were_written(tmp_path, rows_per_shard):
    write_rows(tmp_path / "rows", ROWS, {}, rows_per_shard=rows_per_shard)
    rows = RowSet(tmp_path / "rows")
    assert len(rows) == len(ROWS)
    assert all(same(*pair) for pair in zip(rows, ROWS, strict=True))
    assert same(rows[-1], ROWS[-1])
    with pytest.raises(IndexError):
        rows[len(ROWS)]


def test_the_manifest_counts_and_keeps_what_it_is_given(tmp_path):
    facts = {"row_length": 8, "target": {"name": "t"}}
    write_rows(tmp_path / "rows", ROWS, facts, rows_per_shard=2)
    manifest = RowSet(tmp_path / "rows").manifest
    assert manifest["row_length"] == 8 and manifest["target"] == {"name": "t"}
    assert manifest["rows"] == 5
    assert manifest["documents"] == 2 + 1 + 3 + 1 + 2
    assert manifest["tokens"] == 5 + 5 + 3 + 4 + 8
    assert manifest["supervised"] == sum(int(r.supervised.sum()) for r in ROWS)
    assert [shard["rows"] for shard in manifest["shards"]] == [2, 2, 1]


def test_equal_rows_have_equal_sums_and_others_have_not(tmp_path):
    for name, rows in {"a": ROWS, "b": ROWS, "c": ROWS[::-1]}.items():
        write_rows(tmp_path / name, rows, {"name": name})
    a, b, c = (RowSet(tmp_path / name).sha256 for name in "abc")
    assert a == b != c


def test_a_folder_without_rows_is_read_but_not_visited(tmp_path):
    write_rows(tmp_path / "rows", [], {})
    rows = RowSet(tmp_path / "rows")
    assert list(rows) == []
    with pytest.raises(DFlash2Error, match="holds no rows"):
        next(rows.visits(seed=1))


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no finished rows"),
        (lambda folder: flip(folder / "rows-00001.safetensors"), "its sha256 is"),
        (lambda folder: (folder / "rows-00001.safetensors").unlink(), "cannot be read"),
        (lambda folder: edit(folder, schema=2), "schema is 2, this version reads 1"),
        (lambda folder: edit(folder, sha256="0"), "sha256 is not that of its shards"),
    ],
)
def test_unfinished_and_damaged_rows_are_refused(tmp_path, damage, said):
    write_rows(tmp_path / "rows", ROWS, {}, rows_per_shard=2)
    damage(tmp_path / "rows")
    with pytest.raises(DFlash2Error, match=said):
        RowSet(tmp_path / "rows")


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def edit(folder, **fields):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_rows_are_never_overwritten(tmp_path):
    write_rows(tmp_path / "rows", ROWS, {})
    with pytest.raises(DFlash2Error, match="already exists"):
        write_rows(tmp_path / "rows", ROWS, {})


def test_an_order_is_a_permutation_that_never_changes():
    assert order(8, seed=1, epoch=0).tolist() == [4, 1, 3, 6, 7, 0, 5, 2]
    for count in (0, 1, 2, 1000):
        assert sorted(order(count, seed=3, epoch=5)) == list(range(count))


def test_orders_differ_by_seed_and_epoch():
    orders = {
        tuple(order(50, seed=seed, epoch=epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_every_row_is_as_likely_anywhere_in_an_order():
    places = np.array([order(10, seed=7, epoch=e).argsort() for e in range(2000)])
    for row_index in range(10):
        counts = np.bincount(places[:, row_index], minlength=10)
        assert counts.min() > 140 and counts.max() < 260  # 200 expected, 4.5 sigma


def test_another_process_finds_the_same_order():
    code = (
        "from mlx_dflash2.data.rows import order\n"
        "print(order(100, seed=11, epoch=4).tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(order(100, seed=11, epoch=4).tolist())


def test_visits_go_on_from_any_cursor(tmp_path):
    write_rows(tmp_path / "rows", ROWS, {})
    rows = RowSet(tmp_path / "rows")
    whole = list(islice(rows.visits(seed=3), 17))
    assert {visit.row for visit in whole[:5]} == set(range(5))
    assert whole[5] == Visit(1, int(rows.order(3, 1)[0]))
    for cursor in range(12):
        assert list(islice(rows.visits(3, cursor), 5)) == whole[cursor : cursor + 5]


def test_chunks_hold_all_items_in_order():
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunks([], 2)) == []


def document(length, start=0):
    tokens = np.arange(start, start + length, dtype=np.int32)
    return Document(tokens, tokens % 2 == 0)


def test_packing_puts_each_document_into_the_first_row_with_room():
    documents = [document(n, 100 * i) for i, n in enumerate([6, 7, 4, 3, 10, 1])]
    rows = pack(documents, 10)
    starts = [r.tokens[np.flatnonzero(np.diff(r.document, prepend=-1))] for r in rows]
    assert [start.tolist() for start in starts] == [[0, 200], [100, 300], [400], [500]]


def test_packing_keeps_every_document_whole():
    documents = [document(1 + 7 * i % 30, 100 * i) for i in range(60)]
    rows = pack(documents, 32)
    found = {}
    for packed in rows:
        assert len(packed.tokens) <= 32
        assert sorted(set(packed.document)) == list(range(packed.document[-1] + 1))
        for number in range(packed.document[-1] + 1):
            inside = packed.document == number
            found[int(packed.tokens[inside][0])] = Document(
                packed.tokens[inside], packed.supervised[inside]
            )
    assert len(found) == len(documents) and len(rows) < len(documents) / 1.5
    for one in documents:
        other = found[int(one.tokens[0])]
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.supervised, other.supervised)


def test_unpacked_rows_hold_one_document_each():
    documents = [document(3), document(5)]
    assert [r.document.tolist() for r in unpacked(documents)] == [[0] * 3, [0] * 5]
