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
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.errors import BadDocument
from penstock.ingest.jsonl import Columns
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.tokenize.tokenizer import Tokenizer

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
"""The columns of a text shard."""


CHUNK_FIELDS: Final = (
    pa.field("language", pa.string(), nullable=False),
    pa.field("decoding", pa.string(), nullable=False),
    pa.field("line", pa.int32(), nullable=False),
    pa.field("level", pa.string(), nullable=False),
    pa.field("scope", pa.string(), nullable=False),
    pa.field("symbols", pa.list_(pa.string()), nullable=False),
)
"""What chunks have beside the columns of a document."""


def schema_of(token_type: str, *, chunks: bool = False) -> pa.Schema:
    """The columns of a shard whose tokens are of that type; "" for a shard of text alone."""
    schema = pa.schema([*SCHEMA, *CHUNK_FIELDS]) if chunks else SCHEMA
    if not token_type:
        return schema
    tokens = pa.list_({"uint16": pa.uint16(), "uint32": pa.uint32()}[token_type])
    return schema.append(pa.field("tokens", tokens, nullable=False))


_copy_rows = Kernel(
    "penstock.shard.columns_kernel",
    "copy_rows",
    "void(uint8[::1], int64[::1], int64[::1], uint8[::1], int32[::1])",
)
_shuffle = Kernel("penstock.shard.columns_kernel", "shuffle", "void(int64[::1], uint64, uint64)")

ROW_GROUP_BYTES: Final = 16 << 20
"""Text in a row group: small enough to be fetched alone, large enough for zstd to work in."""


def open_parquet(file: IO[bytes], schema: pa.Schema = SCHEMA) -> pq.ParquetWriter:
    """A parquet writer with the settings of every penstock shard."""
    small = [name for name in schema.names if name not in ("text", "tokens", "symbols", "scope")]
    repeated = {"source", "language", "decoding", "level", "scope"}
    return pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        compression_level=1,  # 388 MB per CPU-second; level 3 takes twice the time for 5% less
        use_dictionary=[name for name in schema.names if name in repeated],
        write_statistics=small,
        write_page_checksum=True,
        write_batch_size=256,
    )


def write_rows(
    file: IO[bytes],
    columns: Columns,
    order: npt.NDArray[np.int64],
    inputs: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    token_type: str = "",
) -> int | None:
    """Write the rows named by `order`, in that order, as one parquet file.

    Returns how many tokens they have, if there is a tokenizer to say it.
    """
    sizes = np.diff(columns.text_at[: columns.rows + 1])[order]
    told = np.diff(columns.source_at[: columns.rows + 1])[order]
    # Names count too: Arrow's string offsets are 32 bits, and each row of a group has one.
    longest = max((len(name.encode()) for name in inputs), default=0)
    groups = row_groups(sizes + told + longest)
    scratch = byte_buffer(max((int(sizes[a:b].sum()) for a, b in groups), default=0))
    schema, total = schema_of(token_type), 0
    with open_parquet(file, schema) as writer:
        for first, last in groups:
            batch = _batch(columns, order[first:last], inputs, scratch)
            if tokenizer is not None:
                batch, count = _with_tokens(batch, tokenizer, schema)
                total += count
            writer.write_batch(batch)
    return total if tokenizer is not None else None


def _with_tokens(
    batch: pa.RecordBatch, tokenizer: Tokenizer, schema: pa.Schema
) -> tuple[pa.RecordBatch, int]:
    """The batch with its token counts, and its tokens if the schema has a place for them."""
    try:
        tokens = tokenizer.encode_column(batch.column(0)).combine_chunks()
    except BadDocument as error:
        source, start, end = (batch.column(name)[error.row] for name in ("source", "start", "end"))
        error.where = f"{source}, bytes {start} to {end}"
        raise
    counts = pc.list_value_length(tokens)
    arrays = [batch.column(0), counts, *batch.columns[2:]]
    if "tokens" in schema.names:
        arrays.append(tokens)
    return pa.RecordBatch.from_arrays(arrays, schema=schema), len(tokens.flatten())


def row_groups(sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
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


def _batch(
    columns: Columns,
    rows: npt.NDArray[np.int64],
    inputs: Sequence[str],
    scratch: npt.NDArray[np.uint8],
) -> pa.RecordBatch:
    """The rows as Arrow columns; the text lies in `scratch` until the next call."""
    names = _strings(inputs, columns.input_number[rows].astype(np.int64))
    if columns.has_sources:
        told = _gather(columns.source, columns.source_at, rows, None)
        names = pc.if_else(pc.equal(pc.binary_length(told), 0), names, told)
    return pa.RecordBatch.from_arrays(
        [
            _gather(columns.text, columns.text_at, rows, scratch),
            pa.nulls(len(rows), pa.int32()),
            names,
            _numbers(columns.start[rows], pa.int64()),
            _numbers(columns.end[rows], pa.int64()),
            _numbers(columns.part[rows], pa.int32()),
            _numbers(columns.parts[rows], pa.int32()),
            _numbers(columns.doc_id[rows], pa.uint64()),
        ],
        schema=SCHEMA,
    )


def _numbers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """The values as Arrow, in place; `pa.array` would import pandas first, 1.2 s where it is."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _strings(table: Sequence[str], picks: npt.NDArray[np.int64]) -> pa.StringArray:
    """table[pick] for each pick."""
    encoded = [text.encode() for text in table]
    data = np.frombuffer(b"".join(encoded) + bytes(PAD), np.uint8)
    at = np.cumsum([0, *map(len, encoded)])
    return _gather(data, at, picks, None)


def _gather(
    data: npt.NDArray[np.uint8],
    at: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    out: npt.NDArray[np.uint8] | None,
) -> pa.StringArray:
    """The strings of `rows` as one Arrow array, in `out` if that is given."""
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(at[rows + 1] - at[rows], out=offsets[1:])
    if out is None:
        out = np.empty(int(offsets[-1]), np.uint8)
    _copy_rows(data, at, rows, out, offsets)
    return pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets), pa.py_buffer(out))


def shuffled(count: int, seed: int, stream: int) -> npt.NDArray[np.int64]:
    """A permutation of range(count), the same for the same seed and stream on every machine."""
    order = np.arange(count)
    _shuffle(order, seed, stream)
    return order
