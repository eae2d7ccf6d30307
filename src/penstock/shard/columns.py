"""Turn columns of documents into a parquet shard.

In:    `Columns` full of documents, a shuffle seed
Out:   parquet bytes, a function of the documents and the seed alone
Keeps: one row group of text in memory beside the columns themselves
Never: copies a document through Python
"""

from collections.abc import Sequence
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numba import njit

from penstock.ingest.jsonl import Columns
from penstock.simd import copy_bytes, splitmix64

SCHEMA: Final = pa.schema(
    [
        pa.field("text", pa.string(), nullable=False),
        pa.field("n_tokens", pa.int32()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("end", pa.int64(), nullable=False),
        pa.field("part", pa.int32(), nullable=False),
        pa.field("parts", pa.int32(), nullable=False),
        pa.field("doc_id", pa.uint64(), nullable=False),
    ]
)
"""The columns of a text shard; DESIGN.md section 3."""

ROW_GROUP_BYTES: Final = 16 << 20
"""Text in a row group: small enough to be fetched alone, large enough for zstd to work in."""


def open_parquet(file: IO[bytes], schema: pa.Schema = SCHEMA) -> pq.ParquetWriter:
    """A parquet writer with the settings of every penstock shard."""
    small = [name for name in schema.names if name not in ("text", "tokens")]
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,  # 388 MB per CPU-second; level 3 takes twice the time for 5% less
        use_dictionary=["source"],
        write_statistics=small,
        write_page_checksum=True,
        write_batch_size=256,
    )


def write_rows(
    file: IO[bytes], columns: Columns, order: npt.NDArray[np.int64], inputs: Sequence[str]
) -> None:
    """Write the rows named by `order`, in that order, as one parquet file."""
    with open_parquet(file) as writer:
        sizes = np.diff(columns.text_at[: columns.rows + 1])[order]
        for first, last in _row_groups(sizes):
            writer.write_batch(_batch(columns, order[first:last], inputs))


def _row_groups(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges of rows of about ROW_GROUP_BYTES each; a larger document has a group of its own."""
    ends = np.cumsum(sizes)
    groups = []
    first = 0
    while first < len(sizes):
        before = ends[first - 1] if first else 0
        last = int(np.searchsorted(ends, before + ROW_GROUP_BYTES, side="right"))
        last = max(last, first + 1)
        groups.append((first, last))
        first = last
    return groups


def _batch(columns: Columns, rows: npt.NDArray[np.int64], inputs: Sequence[str]) -> pa.RecordBatch:
    names = pa.array(inputs, pa.string()).take(pa.array(columns.input_number[rows]))
    if columns.has_sources:
        told = _gather(columns.source, columns.source_at, rows)
        names = pa.compute.if_else(pa.compute.equal(told, ""), names, told)
    return pa.RecordBatch.from_arrays(
        [
            _gather(columns.text, columns.text_at, rows),
            pa.nulls(len(rows), pa.int32()),
            names,
            pa.array(columns.start[rows]),
            pa.array(columns.end[rows]),
            pa.array(columns.part[rows]),
            pa.array(columns.parts[rows]),
            pa.array(columns.doc_id[rows]),
        ],
        schema=SCHEMA,
    )


def _gather(
    data: npt.NDArray[np.uint8], at: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]
) -> pa.StringArray:
    """The strings of `rows` as one Arrow array."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(at[rows + 1] - at[rows], out=offsets[1:])
    out = np.empty(int(offsets[-1]), np.uint8)
    _copy_rows(data, at, rows, out, offsets)
    return pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets), pa.py_buffer(out))


@njit(nogil=True, cache=True)
def _copy_rows(data: Any, at: Any, rows: Any, out: Any, offsets: Any) -> None:
    for k in range(len(rows)):
        row = rows[k]
        copy_bytes(data, at[row], out, offsets[k], at[row + 1] - at[row])


@njit(nogil=True, cache=True)
def shuffled(count: Any, seed: Any, stream: Any) -> Any:
    """A permutation of range(count), the same for the same seed and stream on every machine."""
    order = np.arange(count)
    state = splitmix64(np.uint64(seed) ^ splitmix64(np.uint64(stream)))
    for k in range(count - 1, 0, -1):
        state = splitmix64(state)
        # the high half of a 32-bit draw times k + 1: off from uniform by less than 1e-5 at 50,000
        pick = np.int64(((state >> np.uint64(32)) * np.uint64(k + 1)) >> np.uint64(32))
        order[k], order[pick] = order[pick], order[k]
    return order
