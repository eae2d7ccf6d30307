"""Rows on their way from the steps of preparation into one shard.

In:    record batches as workers made them
Out:   one parquet file, rows in a given order
Keeps: text and tokens where they are until they are written; one row group copied at a time
"""

from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.shard.columns import open_parquet, row_groups
from penstock.shard.write import Order


class PreparedRows:
    """The rows of one shard on their way, as Arrow."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self._is_val: list[npt.NDArray[np.uint8]] = []
        self.rows = self.train_rows = self.text_bytes = 0

    @property
    def is_val(self) -> npt.NDArray[np.uint8]:
        return np.concatenate(self._is_val) if self._is_val else np.zeros(0, np.uint8)

    def add(self, rows: pa.RecordBatch, is_val: npt.NDArray[np.uint8], text_bytes: int) -> None:
        self.batches.append(rows)
        self._is_val.append(is_val)
        self.rows += len(rows)
        self.train_rows += len(rows) - int(is_val.sum())
        self.text_bytes += text_bytes

    def joined(self) -> pa.RecordBatch:
        """All rows as one batch; what they were before is let go of, so they are held once."""
        if len(self.batches) > 1:
            (whole,) = pa.Table.from_batches(self.batches).combine_chunks().to_batches()
            self.batches = [whole]
        return self.batches[0]

    def clear(self) -> None:
        self.batches, self._is_val = [], []
        self.rows = self.train_rows = self.text_bytes = 0


def write_prepared(file: IO[bytes], rows: PreparedRows, order: Order, schema: pa.Schema) -> Any:
    """Write the rows of that order; their tokens, if they were counted."""
    batch = rows.joined().select(schema.names)
    offsets = np.frombuffer(batch.column("text").buffers()[1], np.int32)[
        batch.column("text").offset :
    ]
    sizes = np.diff(offsets[: len(batch) + 1]).astype(np.int64)
    total = 0
    with open_parquet(file, schema) as writer:
        for first, last in row_groups(sizes[order]):
            picks = pa.Array.from_buffers(
                pa.int64(), last - first, [None, pa.py_buffer(order[first:last])]
            )
            group = batch.take(picks).cast(schema)
            counts = group.column("n_tokens")
            total += counts.sum().as_py() or 0
            writer.write_batch(group)
    return total


def cumulated(values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def reach(sums: npt.NDArray[np.int64], first: int, room: int) -> int:
    """How many events to take from `first` on so that `room` is used up; more than there are if
    it is not."""
    return int(np.searchsorted(sums, sums[first] + max(room, 1), side="left"))


def text_sizes(rows: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Bytes of text before each row, and of all."""
    text = rows.column("text")
    if not len(rows):
        return np.zeros(1, np.int64)
    offsets = np.frombuffer(text.buffers()[1], np.int32)[text.offset :][: len(rows) + 1]
    return offsets.astype(np.int64) - int(offsets[0])


def copied(batch: pa.RecordBatch, first: int, last: int) -> pa.RecordBatch:
    """Some rows in memory of their own: a slice would hold on to all that came with the batch,
    which was 1 GB where a shard took a hundred pieces to fill."""
    numbers = np.arange(first, last)
    return batch.take(
        pa.Array.from_buffers(pa.int64(), last - first, [None, pa.py_buffer(numbers)])
    )


def as_parquet(table: pa.Table) -> bytes:
    """A small table as a file."""
    sink = pa.BufferOutputStream()
    # in one piece: Arrow's pages depend on the pieces
    pq.write_table(table.combine_chunks(), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())
