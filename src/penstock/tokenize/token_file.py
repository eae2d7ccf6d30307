"""The tokens of a shard as a file that readers map: one Arrow IPC record batch, uncompressed.

In:    the ids of each row and the id of its document; or the bytes of such a file
Out:   the file; or views of its bytes: all ids end to end, and where each row's ids begin
Keeps: ids in the narrowest type that holds the vocabulary; nothing is decoded, nothing copied;
       writing holds 16 bytes a row and one piece of the ids
Never: trusts a file: types, offsets and ids are checked before a kernel reads by them

    column   type                        in each row
    tokens   large_list<uint16|uint32>   the ids
    doc_id   uint64                      the document, for bans
and, where rows are conversations,
    loss_spans  large_list<int32>        from, to, from, to …: the tokens that are trained
Readers take columns by name: more may follow.
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import IO, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.arrays import Int32s, Int64s, UInt64s, offsets_of, values_of

_FORMAT: Final = b"penstock.tokens"
_VERSION: Final = b"1"
_TOKENIZER: Final = b"penstock.tokenizer"
_HELD_BYTES: Final = 4096
_IDS: Final = (pa.uint16(), pa.uint32())
_SPANS: Final = pa.large_list(pa.field("item", pa.int32(), nullable=False))


class Watched(Protocol):
    """A mapped file that somebody may change."""

    def is_unchanged(self) -> bool:
        """Whether its memory can be read, and holds what it did."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of a shard's rows, end to end, and where each row's ids begin."""

    values: npt.NDArray[Any]
    """uint16 or uint32."""
    at: Int64s
    """One more than there are rows."""
    doc_id: UInt64s | None = None
    mapped: bool = False
    """Whether this is a file's memory, which the system takes back when it needs it."""
    spans: "LossSpans | None" = None
    """What is trained of each row, where that is not all of it."""
    file: Watched | None = None
    """Whom to ask before mapped memory is read at a later time."""

    @property
    def rows(self) -> int:
        return len(self.at) - 1

    @property
    def nbytes(self) -> int:
        """Memory of this process."""
        return 0 if self.mapped else self.values.nbytes + self.at.nbytes

    def part(self, first: int, last: int) -> "Tokens":
        """The tokens of some rows, in the same memory.

        >>> Tokens(np.arange(9), np.array([0, 2, 5, 9])).part(1, 3).at.tolist()
        [0, 3, 7]
        """
        at = self.at[first : last + 1]
        return replace(
            self,
            values=self.values[at[0] : at[-1]],
            at=at - at[0],
            doc_id=None if self.doc_id is None else self.doc_id[first:last],
            spans=None if self.spans is None else self.spans.part(first, last),
        )


@dataclass(frozen=True, slots=True)
class LossSpans:
    """The trained ranges of rows: row k has values[at[k]:at[k + 1]], from, to, from, to …"""

    values: Int32s
    at: Int64s

    def counts(self) -> Int64s:
        """How many tokens of each row are trained.

        >>> LossSpans(np.array([1, 3, 5, 9, 2, 4], np.int32), np.array([0, 4, 6])).counts().tolist()
        [6, 2]
        """
        ends = offsets_of(self.values[1::2] - self.values[::2])
        found: Int64s = np.diff(ends[self.at // 2])
        return found

    def part(self, first: int, last: int) -> "LossSpans":
        """Those of some rows, in the same memory."""
        at = self.at[first : last + 1]
        return LossSpans(self.values[at[0] : at[-1]], at - at[0])


@dataclass(slots=True)
class TokenPieces:
    """Ids of rows on their way into a file: how many each row has is known, the ids come after."""

    lengths: Int64s
    doc_id: UInt64s
    values: Iterable[npt.NDArray[Any]]
    """The ids of all rows, end to end, in pieces of any size; taken once."""
    spans: LossSpans | None = None
    """A few for each row: all of them."""
    xxh3: str = ""
    """The checksum of the file, once it is written."""

    @property
    def count(self) -> int:
        return int(self.lengths.sum())


def numbers_of(array: pa.Array) -> npt.NDArray[Any]:
    """The numbers of an array without nulls, where they lie."""
    return values_of(array, array.type.to_pandas_dtype())


def write_token_file(
    file: IO[bytes], tokens: pa.Array, doc_id: pa.Array, tokenizer: str, dtype: str
) -> None:
    """Write the ids of all rows: `tokens` is an array of lists; `dtype` is uint16 or uint32."""
    lengths = numbers_of(tokens.value_lengths()).astype(np.int64)
    pieces = TokenPieces(lengths, numbers_of(doc_id), [numbers_of(tokens.flatten())])
    write_token_pieces(file, pieces, tokenizer, dtype)


def write_token_pieces(file: IO[bytes], pieces: TokenPieces, tokenizer: str, dtype: str) -> None:
    """Write the ids of all rows, piece by piece; `dtype` is uint16 or uint32."""
    kind = pa.large_list(pa.field("item", pa.type_for_alias(dtype), nullable=False))
    fields = [
        pa.field("tokens", kind, nullable=False), pa.field("doc_id", pa.uint64(), nullable=False)
    ]  # fmt: skip
    at = offsets_of(pieces.lengths)
    sink = _PiecesFile(file, pieces.values, int(at[-1]), np.dtype(dtype))
    ids = pa.Array.from_buffers(kind.value_type, int(at[-1]), [None, sink.unread])
    tokens = pa.Array.from_buffers(kind, len(at) - 1, [None, pa.py_buffer(at)], children=[ids])
    doc_id = np.ascontiguousarray(pieces.doc_id, np.uint64)
    columns = [
        tokens, pa.Array.from_buffers(pa.uint64(), len(doc_id), [None, pa.py_buffer(doc_id)])
    ]  # fmt: skip
    if (spans := pieces.spans) is not None:
        fields.append(pa.field("loss_spans", _SPANS, nullable=False))
        values = np.ascontiguousarray(spans.values, np.int32)
        inner = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
        offsets = pa.py_buffer(np.ascontiguousarray(spans.at, np.int64))
        columns.append(
            pa.Array.from_buffers(_SPANS, len(at) - 1, [None, offsets], children=[inner])
        )
    schema = pa.schema(fields, metadata={_FORMAT: _VERSION, _TOKENIZER: tokenizer.encode()})
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    with pa.ipc.new_file(pa.PythonFile(sink, "w"), schema) as writer:
        writer.write_batch(batch)
    sink.flush()
    pieces.xxh3 = sink.checksum.hexdigest()


class _PiecesFile:
    """Takes what Arrow writes, and writes the pieces where Arrow writes all ids.

    A file has one record batch, and Arrow wants that in one buffer: joined there, the ids of a
    validation shard would be 5 GB of memory for a corpus of 1 TB. The buffer that it gets has their
    size and is never touched, so that it takes no memory.
    """

    closed = False

    def __init__(
        self, file: IO[bytes], pieces: Iterable[npt.NDArray[Any]], count: int, dtype: np.dtype[Any]
    ) -> None:
        self._file, self._pieces, self._dtype = file, pieces, dtype
        self._count = count
        size = count * dtype.itemsize
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(1, size), flags=private, prot=mmap.PROT_READ)
        self.unread = pa.py_buffer(memory).slice(0, size)
        self._at = 0
        self.checksum = xxhash.xxh3_128()
        self._held = bytearray()
        """Arrow writes the head and the end of a file in pieces of 4 bytes."""

    def write(self, data: Any) -> int:
        size = len(memoryview(data))
        if self._count and isinstance(data, pa.Buffer) and data.address == self.unread.address:
            self.flush()
            written = 0
            for piece in self._pieces:
                self._put(np.ascontiguousarray(piece, self._dtype).view(np.uint8).data)
                written += len(piece)
            assert written == self._count, "as many ids as the rows say"
        elif size < _HELD_BYTES:
            self._held += data
        else:
            self.flush()
            self._put(data)
        self._at += size
        return size

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        if self._held:
            self._put(bytes(self._held))
        self._held.clear()

    def _put(self, data: Any) -> None:
        self.checksum.update(data)
        self._file.write(data)

    def close(self) -> None: ...


def read_token_file(
    data: pa.Buffer, *, rows: int, vocab_size: int, tokenizer: str = "", mapped: bool = False,
    looks_at_ids: bool = True,
) -> Tokens:  # fmt: skip
    """Views of the bytes of a token file of so many rows, ids below `vocab_size`.

    Raises ArrowInvalid for anything else. A `tokenizer` is compared with the file's own. Who knows
    these bytes already need not have it look at their ids again.
    """
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        _require(reader.num_record_batches == 1, "it has more than one record batch, or none")
        about = reader.schema.metadata or {}
        _require(about.get(_FORMAT) == _VERSION, "it does not say that it holds tokens")
        made_with = about.get(_TOKENIZER, b"").decode("ascii", "replace")
        _require(tokenizer in ("", made_with), f"its tokens are those of {made_with[:12]}…")
        batch = reader.get_batch(0)
    _require(batch.num_rows == rows, f"it has {batch.num_rows:,} rows, not {rows:,}")
    batch.validate()
    columns = [batch.schema.get_all_field_indices(name) for name in ("tokens", "doc_id")]
    _require([len(found) for found in columns] == [1, 1], "it lacks a column, or has one twice")
    tokens, doc_id = (batch.column(found[0]) for found in columns)
    kind = tokens.type
    _require(
        pa.types.is_large_list(kind) and kind.value_type in _IDS and doc_id.type == pa.uint64(),
        "its columns are of other types",
    )
    _require(not (tokens.null_count or tokens.values.null_count or doc_id.null_count), "nulls")
    found = Tokens(
        _view(tokens.values, kind.value_type.to_pandas_dtype(), data),
        _view(tokens, np.int64, data, rows + 1 if rows else 0),
        _view(doc_id, np.uint64, data),
        mapped,
        _spans_in(batch, data),
    )
    if not rows:
        empty = None if found.spans is None else LossSpans(found.spans.values[:0], _NONE_AT)
        return Tokens(found.values[:0], _NONE_AT, found.doc_id, mapped, empty)
    at = found.at
    _require(at[0] == 0 and at[-1] == len(found.values), "its offsets end where no ids are")
    _require(not (at[1:] < at[:-1]).any(), "its offsets go back")
    if found.spans is not None:
        _check_spans(found.spans, at)
    if not looks_at_ids or np.iinfo(found.values.dtype).max < vocab_size:
        return found
    highest = highest_id(found.values)
    _require(highest < vocab_size, f"token {highest:,}, the vocabulary ends at {vocab_size - 1:,}")
    return found


def _spans_in(batch: pa.RecordBatch, data: pa.Buffer) -> LossSpans | None:
    """The trained ranges, where the rows have some."""
    found = batch.schema.get_all_field_indices("loss_spans")
    if not found:
        return None
    column = batch.column(found[0])
    _require(len(found) == 1 and column.type == _SPANS, "its loss_spans are of another type")
    _require(not (column.null_count or column.values.null_count), "nulls")
    rows = batch.num_rows
    return LossSpans(
        _view(column.values, np.int32, data), _view(column, np.int64, data, rows + 1 if rows else 0)
    )


def _check_spans(spans: LossSpans, at: Int64s) -> None:
    """Ranges stand in order within their row, and none holds its first token."""
    values, ends = spans.values, spans.at
    _require(ends[0] == 0 and ends[-1] == len(values), "its loss_spans end where none are")
    _require(not ((ends[1:] < ends[:-1]) | (ends[1:] & 1)).any(), "its loss_spans are cut")
    if not len(values):
        return
    inside = np.ones(len(values), np.bool_)
    firsts = ends[:-1][ends[1:] > ends[:-1]]
    inside[firsts] = values[firsts] > 0
    rising = np.diff(values, prepend=np.int32(0)) > 0
    rising[firsts] = True
    lasts = ends[1:][ends[1:] > ends[:-1]] - 1
    within = values[lasts] <= np.diff(at)[ends[1:] > ends[:-1]]
    _require(bool((inside & rising).all() and within.all()), "its loss_spans leave their rows")


_NONE_AT: Final = np.zeros(1, np.int64)


def highest_id(values: npt.NDArray[Any]) -> int:
    """The highest of some ids, -1 if there are none: 28 GB/s."""
    return int(values.max()) if len(values) else -1


def _view(array: pa.Array, dtype: Any, data: pa.Buffer, count: int | None = None) -> Any:
    """The numbers of an array where they lie. A compressed file would have them elsewhere."""
    buffer = array.buffers()[1]
    count = len(array) if count is None else count
    if not count:
        return np.zeros(0, dtype)
    first, last = buffer.address - data.address, buffer.address - data.address + buffer.size
    _require(first >= 0 and last <= data.size, "it is compressed")
    size = (array.offset + count) * np.dtype(dtype).itemsize
    _require(buffer.size >= size, "it is shorter than its offsets say")
    view = np.frombuffer(buffer, dtype, array.offset + count)[array.offset :]
    _require(view.flags.aligned, "its numbers are not aligned")
    return view


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pa.ArrowInvalid(f"this is no token file: {what}")
