"""The tokens of a shard as arrays: from its pages, from Arrow's lists, from a cache's bytes.

In:    the bytes of a shard or of a cached value
Out:   all tokens end to end, and where each row's begin
Never: makes a Python object for a document
"""

import mmap
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.supply.pages import read_pages

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The tokens of a shard's rows, end to end, and where each row's begin."""

    values: npt.NDArray[Any]
    at: Int64s
    mapped: bool = False
    """Whether it is a file's memory, which the system takes back when it needs it."""

    @property
    def nbytes(self) -> int:
        """Memory of this process."""
        return 0 if self.mapped else self.values.nbytes + self.at.nbytes


def from_pages(data: bytes, opened: pq.ParquetFile) -> Decoded | None:
    """The tokens by way of their pages; None where only Arrow can read them."""
    names, kind = opened.schema_arrow.names, opened.schema_arrow.field("tokens").type
    if "n_tokens" not in names or kind not in (pa.list_(pa.uint16()), pa.list_(pa.uint32())):
        return None
    counts = opened.read(["n_tokens"], use_threads=False).column(0)
    if counts.null_count:
        return None
    if not pa.types.is_integer(counts.type):
        return None
    at = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(numbers(counts), out=at[1:])
    if int(at[-1]) * kind.value_type.byte_width > _most_bytes(opened.metadata):
        return None
    dtype = kind.value_type.to_pandas_dtype()
    values = read_pages(data, opened.metadata, "tokens", at, dtype)
    return None if values is None else Decoded(values, at)


def _most_bytes(metadata: pq.FileMetaData) -> int:
    """What a file's values take at most, by its own word: more would be asked for in vain."""
    groups = range(metadata.num_row_groups)
    return sum(metadata.row_group(group).total_byte_size for group in groups)


READ_BYTES: Final = 1 << 20
"""Parquet is read in steps of so much. A whole row group of lists at once takes 365 MB for 20 MB of
numbers (levels, and 32 bits for each), in such steps 83 MB, and 0.11 s in place of 0.18."""


def read_slowly(opened: pq.ParquetFile, names: list[str]) -> pa.Table:
    about = opened.metadata
    size = sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups))
    step = max(1, about.num_rows * READ_BYTES // max(size, 1))
    batches = list(opened.iter_batches(step, columns=names, use_threads=False))
    schema = batches[0].schema if batches else opened.schema_arrow
    return pa.Table.from_batches(batches, schema=schema).select(names)


def packed(decoded: Decoded) -> bytes:
    """Decoded tokens as bytes: rows, item size, places, values."""
    head = np.array([len(decoded.at) - 1, decoded.values.itemsize], np.int64)
    return b"".join((head.tobytes(), decoded.at.tobytes(), decoded.values.tobytes()))


def unpacked(data: memoryview, rows: int, vocab_size: int) -> Decoded | None:
    """The tokens of so many rows that were packed, in place; None if it is something else.

    Kernels copy by these offsets without a further look, so each of them is checked.
    """
    if rows < 0 or len(data) < 16:
        return None
    words = np.frombuffer(data[:16], np.int64)
    size, end = int(words[1]), 16 + 8 * (rows + 1)
    if words[0] != rows or size not in (2, 4) or len(data) < end or (len(data) - end) % size:
        return None
    at = np.frombuffer(data[16:end], np.int64)
    values = np.frombuffer(data[end:], np.uint16 if size == 2 else np.uint32)
    if at[0] != 0 or at[-1] != len(values) or (at[1:] < at[:-1]).any():
        return None
    if highest_id(values) >= vocab_size:
        return None
    return Decoded(values, at, isinstance(data.obj, mmap.mmap))


def highest_id(values: npt.NDArray[Any]) -> int:
    """The highest of some ids, -1 if there are none: 5.6 M take 0.13 ms."""
    return int(values.max()) if len(values) else -1


def joined(tokens: pa.ChunkedArray) -> Decoded:
    """A column of lists as one array of values, 16 or 32 bits each, and one of places.

    Raises ArrowInvalid for what is no list of ids.
    """
    types, kind = pa.types, tokens.type
    if not (types.is_list(kind) or types.is_large_list(kind)) or not types.is_integer(
        kind.value_type
    ):
        raise pa.ArrowInvalid(f"tokens are of {kind}, and not lists of whole numbers")
    if kind.value_type not in (pa.uint16(), pa.uint32()):
        tokens = tokens.cast(pa.large_list(pa.uint32()))  # refuses what does not fit
    if tokens.null_count or any(part.flatten().null_count for part in tokens.chunks):
        raise pa.ArrowInvalid("there is a null among the tokens")
    parts = [chunk for chunk in tokens.chunks if len(chunk)]
    if not parts:
        return Decoded(np.zeros(0, np.uint16), np.zeros(1, np.int64))
    values, places, done = [], [np.zeros(1, np.int64)], 0
    for part in parts:
        at = part.offsets.to_numpy()
        values.append(part.values.to_numpy()[at[0] : at[-1]])
        places.append(at[1:].astype(np.int64) - int(at[0]) + done)
        done += int(at[-1] - at[0])
    return Decoded(
        values[0] if len(values) == 1 else np.concatenate(values), np.concatenate(places)
    )


def numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = column.to_numpy()
    return found
