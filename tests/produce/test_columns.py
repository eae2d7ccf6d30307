"""Columns as parquet: the shuffle, the row groups, the bytes."""

import hashlib
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ingest.formats import Piece, ReadConfig
from penstock.prepare.rows import ROW_BYTES
from penstock.prepare.task import PrepareTask
from penstock.prepare.wire import Request
from penstock.produce import columns as columns_module
from penstock.produce.columns import (
    SCHEMA,
    ShardRows,
    batches_of,
    row_groups,
    shuffled,
    write_rows,
)
from penstock.tokenize.token_file import numbers_of


def filled(rows: list[dict[str, object]], *, pieces: int = 1) -> ShardRows:
    """Lines as the engine puts them into a shard, in so many pieces."""
    task = PrepareTask((), ReadConfig(), ["in.jsonl"], None, is_plain=True)
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    made, at = ShardRows(), 0
    for k in range(pieces):
        data = b"".join(lines[len(rows) * k // pieces : len(rows) * (k + 1) // pieces])
        end = at + len(data)
        piece = Piece(0, "jsonl", "in.jsonl", at, end, len(data), at=at, data=data)
        at = end
        found = task(Request(piece)).rows
        assert isinstance(found, pa.RecordBatch)
        size = int(numbers_of(found.column("size")).sum())
        made.add(found, len(found), len(found), size)
    assert made.rows == len(rows)
    return made


def parquet(rows: ShardRows, order: list[int]) -> bytes:
    file = io.BytesIO()
    beside = len("in.jsonl") - ROW_BYTES
    write_rows(file, batches_of(rows.by_input), np.array(order, np.int64), SCHEMA, beside)
    return file.getvalue()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_shuffled_is_a_permutation(count: int, seed: int, stream: int) -> None:
    order = shuffled(count, seed, stream)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == shuffled(count, seed, stream).tolist()


def test_shuffled_depends_on_seed_and_stream() -> None:
    orders = {tuple(shuffled(50, seed, stream)) for seed in range(20) for stream in range(20)}
    assert len(orders) == 400


def test_shuffled_golden() -> None:
    """The order is part of the format: the same dataset on every machine, in every release."""
    assert shuffled(10, 0, 0).tolist() == [4, 8, 6, 7, 2, 0, 5, 3, 9, 1]
    digest = hashlib.sha256(shuffled(50_000, 42, 7).astype("<i8").tobytes()).hexdigest()
    assert digest == "0e80a644be6b8bca19ccefd8d08e29902c03105445902bf26944032a60c04d20"


def test_shuffled_puts_every_row_everywhere() -> None:
    counts = np.zeros((8, 8), int)
    for stream in range(8000):
        counts[np.arange(8), shuffled(8, 1, stream)] += 1
    # each is 1,000 expected; 6 sigma is about 180
    assert abs(counts - 1000).max() < 180


TEXT = st.text(min_size=1).filter(lambda text: "\0" not in text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXT, st.booleans()), min_size=1, max_size=12))
def test_rows_are_written_as_they_are(rows: list[tuple[str, bool]]) -> None:
    told = {"source": "f.h", "start": 3, "end": 5, "part": 1, "parts": 4}
    documents = [{"text": text, **(told if is_told else {})} for text, is_told in rows]
    columns = filled(documents)
    order = list(range(len(rows)))[::-1]
    data = parquet(columns, order)
    assert data == parquet(columns, order)  # the bytes are a function of the rows
    for pieces in (2, len(rows)):
        assert data == parquet(filled(documents, pieces=pieces), order)
    table = pq.read_table(io.BytesIO(data))
    assert table.schema.equals(SCHEMA)
    found = table.to_pylist()
    assert [row["text"] for row in found] == [rows[k][0] for k in order]
    for row, k in zip(found, order, strict=True):
        assert row["n_tokens"] is None
        if rows[k][1]:
            assert {key: row[key] for key in told} == told
        else:
            assert row["source"] == "in.jsonl"
            assert (row["part"], row["parts"]) == (0, 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 120), max_size=40))
def testrow_groups_tile_the_rows_within_their_bound(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns_module, "ROW_GROUP_BYTES", 100)
        groups = row_groups(np.array(sizes, np.int64))
    assert [row for first, last in groups for row in range(first, last)] == list(range(len(sizes)))
    for number, (first, last) in enumerate(groups):
        assert last == first + 1 or sum(sizes[first:last]) <= 100
        if number + 1 < len(groups):  # as full as can be
            assert sum(sizes[first : last + 1]) > 100


def test_a_shard_hasrow_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "ROW_GROUP_BYTES", 100)
    texts = [f"{k}" * 30 for k in range(10)]
    columns = filled([{"text": text} for text in texts])
    file = pq.ParquetFile(io.BytesIO(parquet(columns, list(range(10)))))
    assert [file.metadata.row_group(k).num_rows for k in range(4)] == [
        2,
        2,
        2,
        2,
    ]  # 30 of text and the name of the input
    assert file.read()["text"].to_pylist() == texts


def test_rows_that_come_one_at_a_time_are_held_together() -> None:
    """Each batch has memory of its own: a line would take a page, and a map of the process."""
    documents: list[dict[str, object]] = [{"text": f"document {k}"} for k in range(1000)]
    rows = filled(documents, pieces=1000)
    assert len(rows.by_input) < 100
    assert parquet(rows, list(range(1000))) == parquet(filled(documents), list(range(1000)))
