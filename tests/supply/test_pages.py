"""Tokens read from pages are those that Arrow reads; what is laid out differently is left to it."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shard.columns import open_parquet
from penstock.supply.decoded import joined
from penstock.supply.pages import read_pages

FIELDS = [pa.field("n_tokens", pa.int32()), pa.field("tokens", pa.list_(pa.uint16()))]


def shard(groups: list[list[list[int]]], kind: Any = None) -> bytes:
    """A shard as penstock writes it, one row group for each list of rows."""
    kind = kind or pa.uint16()
    schema = pa.schema([FIELDS[0], pa.field("tokens", pa.list_(kind), nullable=False)])
    file = io.BytesIO()
    with open_parquet(file, schema) as writer:
        for rows in groups:
            counts = pa.array([len(row) for row in rows], pa.int32())
            writer.write_table(pa.table([counts, pa.array(rows, pa.list_(kind))], schema=schema))
    return file.getvalue()


def by_pages(data: bytes, dtype: Any = np.uint16) -> Any:
    opened = pq.ParquetFile(pa.BufferReader(data))
    counts = opened.read(["n_tokens"]).column(0).to_numpy()
    at = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    return read_pages(data, opened.metadata, "tokens", at, dtype)


rows = st.lists(st.lists(st.integers(0, 65535), max_size=30), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.booleans())
def test_pages_hold_what_arrow_reads(groups: list[list[list[int]]], wide: bool) -> None:
    kind, dtype = (pa.uint32(), np.uint32) if wide else (pa.uint16(), np.uint16)
    data = shard(groups, kind)
    expected = joined(pq.ParquetFile(pa.BufferReader(data)).read(["tokens"]).column(0)).values
    found = by_pages(data, dtype)
    assert found.dtype == dtype
    assert found.tolist() == expected.tolist()


def test_many_pages() -> None:
    random = np.random.default_rng(0)
    values = [random.integers(0, 65536, 3000).tolist() for _ in range(900)]
    assert by_pages(shard([values])).tolist() == [token for row in values for token in row]


def test_what_is_laid_out_differently_is_left_to_arrow() -> None:
    table = pa.table(
        [pa.array([2, 1], pa.int32()), pa.array([[1, None], [3]], pa.list_(pa.uint16()))],
        schema=pa.schema(FIELDS),
    )
    for options in (
        {"compression": "zstd", "use_dictionary": False},  # a null among the tokens
        {"compression": "snappy", "use_dictionary": False},
        {"compression": "zstd", "use_dictionary": True},
        {"compression": "zstd", "use_dictionary": False, "data_page_version": "2.0"},
    ):
        file = io.BytesIO()
        pq.write_table(table, file, **options)
        assert by_pages(file.getvalue()) is None


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_damaged_header_is_left_to_arrow(at: int) -> None:
    data = bytearray(shard([[[1, 2, 3], [4]]]))
    opened = pq.ParquetFile(pa.BufferReader(bytes(data)))
    start = opened.metadata.row_group(0).column(1).data_page_offset
    data[start + at % 20] ^= 0xFF
    try:
        offsets = np.array([0, 3, 4])
        found = read_pages(bytes(data), opened.metadata, "tokens", offsets, np.uint16)
    except (pa.ArrowException, OSError):
        return  # what zstd says of it is passed on like any damage
    assert found is None or len(found) == 4


@settings(max_examples=60, deadline=None)
@given(st.lists(rows, min_size=1, max_size=4), st.data())
def test_rows_that_begin_elsewhere_are_left_to_arrow(
    groups: list[list[list[int]]], data: st.DataObject
) -> None:
    """Offsets with the right sum and the wrong rows, or such that fall, are never used."""
    stored = shard(groups)
    lengths = np.array([len(row) for group in groups for row in group], np.int64)
    if len(lengths) < 2:
        return
    a, b = data.draw(st.permutations(range(len(lengths))))[:2]
    by = data.draw(st.integers(1, 600))
    lengths[a] += by
    lengths[b] -= by
    at = np.concatenate([[0], np.cumsum(lengths)])
    opened = pq.ParquetFile(pa.BufferReader(stored))
    assert read_pages(stored, opened.metadata, "tokens", at, np.uint16) is None


def test_long_rows_and_empty_ones_begin_where_they_should() -> None:
    random = np.random.default_rng(1)
    sizes = [*random.integers(0, 3, 200), 70_000, 0, 0, 9, *random.integers(0, 5000, 60), 0]
    values = [random.integers(0, 65536, size).tolist() for size in sizes]
    groups = [values[:100], values[100:210], values[210:]]
    assert by_pages(shard(groups)).tolist() == [token for row in values for token in row]
