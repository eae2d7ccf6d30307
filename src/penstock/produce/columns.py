"""The rows of a shard: which of them are for validation, their order, and how they are written.

In:    rows of pieces in the order of the inputs, as `prepare.task` makes them, wherever they are;
       a seed
Out:   a parquet file, a function of the rows and the seed alone, and the tokens of its rows
Keeps: text where the batches have it, until one row group at a time is copied; whoever lists the
       rows of a shard need not hold them
Never: copies a document through Python
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.arrays import Bools, Bytes, Int64s, UInt64s, offsets_of, values_of
from penstock.kernels import Kernel, used_buffer
from penstock.prepare.wire import Rows, numbers
from penstock.tokenize.token_file import LossSpans, TokenPieces, numbers_of

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


CHAT_FIELDS: Final = (
    pa.field("line", pa.int64(), nullable=False),
    pa.field("n_loss", pa.int32(), nullable=False),
    pa.field("left_out", pa.int32(), nullable=False),
    pa.field("turns", pa.list_(pa.int32()), nullable=False),
)
"""What conversations have beside the columns of a document: their line in the file, tokens that
are trained, messages that are in no sample, and the role and first token of each turn."""


def schema_for(prepare: Mapping[str, Any], token_type: str = "") -> pa.Schema:
    """The columns of the shards of a dataset that was prepared so; with a `token_type` those that
    an earlier penstock gave them.

    Their tokens were a column beside the text; they are a file of their own now.
    """
    if has_chat_columns(prepare):
        return pa.schema([*SCHEMA, *CHAT_FIELDS])
    schema = pa.schema([*SCHEMA, *CHUNK_FIELDS]) if has_chunk_columns(prepare) else SCHEMA
    if not token_type:
        return schema
    tokens = pa.list_({"uint16": pa.uint16(), "uint32": pa.uint32()}[token_type])
    return schema.append(pa.field("tokens", tokens, nullable=False))


def has_chunk_columns(prepare: Mapping[str, Any]) -> bool:
    """Whether the shards of a dataset that was prepared so have CHUNK_FIELDS.

    >>> has_chunk_columns({}), has_chunk_columns({"steps": [], "lines": "chunks.jsonl"})
    (False, False)
    """
    return bool(prepare) and "lines" not in prepare and not has_chat_columns(prepare)


def has_chat_columns(prepare: Mapping[str, Any]) -> bool:
    """Whether the shards of a dataset that was prepared so hold conversations.

    >>> has_chat_columns({}), has_chat_columns({"steps": [{"step": "conversations"}]})
    (False, True)
    """
    return any(step.get("step") == "conversations" for step in prepare.get("steps") or ())


_copy_rows = Kernel(
    "penstock.produce.columns_kernel",
    "copy_rows",
    "void(uint8[::1], int64[::1], int64[::1], uint8[::1], int32[::1])",
)
_shuffle = Kernel("penstock.produce.columns_kernel", "shuffle", "void(int64[::1], uint64, uint64)")
_mark_val = Kernel(
    "penstock.produce.columns_kernel",
    "mark_val",
    "void(uint64[::1], uint64, uint64, uint8[::1])",
)

ROW_GROUP_BYTES: Final = 16 << 20
"""Text in a row group: small enough to be fetched alone, large enough for zstd to work in."""
_SMALL_BYTES: Final = 1 << 16
_SMALL_BATCHES: Final = 64


def shuffled(count: int, seed: int, stream: int) -> Int64s:
    """A permutation of range(count), the same for the same seed and stream on every machine."""
    order = np.arange(count)
    _shuffle(order, seed, stream)
    return order


@dataclass(frozen=True, slots=True)
class ValRule:
    """Which source documents are set aside for validation: splitmix64(doc_id ^ salt) < threshold.

    It depends on nothing else, so every part of a file is on the same side.
    """

    salt: int
    threshold: int

    @classmethod
    def of(cls, seed: int, val_fraction: float) -> "ValRule":
        return cls(
            salt=int.from_bytes(hashlib.sha256(b"val %d" % seed).digest()[:8], "little"),
            threshold=min(int(val_fraction * 2.0**64), 2**64 - 1),
        )

    def is_val(self, doc_ids: UInt64s) -> Bools:
        """Which of these documents are for validation."""
        mask = np.empty(len(doc_ids), np.uint8)
        _mark_val(doc_ids, self.salt, self.threshold, mask)
        return mask.view(np.bool_)


@dataclass(slots=True)
class Part:
    """Some rows of a piece, and the input that they are of."""

    number: int
    rows: Rows
    """All rows of the piece."""
    first: int
    last: int
    picks: Int64s | None = None
    """Which rows they are, where that is not from first to last."""
    lines: Int64s | None = None
    """On which line of its input each of them stands, where rows tell that."""

    @property
    def numbers(self) -> Int64s:
        return np.arange(self.first, self.last) if self.picks is None else self.picks

    def read(self) -> pa.RecordBatch:
        """The rows."""
        found = read_kept(self.rows)
        if self.picks is None:
            found = found.slice(self.first, self.last - self.first)
        else:
            found = found.take(numbers(self.picks))
        return found if self.lines is None else found.append_column("line", numbers(self.lines))


def read_kept(rows: Rows) -> pa.RecordBatch:
    """The rows of a piece, here."""
    return rows if isinstance(rows, pa.RecordBatch) else rows.read()


class ShardRows:
    """Which rows make up one shard on its way: as they came, and by input.

    A shard has the rows of each input together, and is shuffled then: so those of a piece stay one
    batch, though they come in turns with others.
    """

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._small = 0
        """How many of the last parts are small batches of one input."""
        self.rows = self.train_rows = self.held_bytes = 0

    @property
    def by_input(self) -> list[Part]:
        """The parts, those of an input together."""
        return sorted(self._parts, key=lambda part: part.number)

    def in_turn(self) -> Iterator[pa.RecordBatch]:
        """The rows as they came."""
        return (part.read() for part in self._parts)

    def add(
        self, rows: Rows, count: int, train_rows: int, held_bytes: int, number: int = 0,
        first: int = 0, picks: Int64s | None = None, lines: Int64s | None = None,
    ) -> None:  # fmt: skip
        """Append so many rows of a piece from `first` on, or these `picks`, of which so many are
        for training, and which count as so many bytes.

        After the last picks of a batch it wants `close_gaps`.
        """
        if not count:
            return
        is_small = held_bytes < _SMALL_BYTES
        is_small = is_small and isinstance(rows, pa.RecordBatch) and count == rows.num_rows
        is_same = bool(self._parts) and self._parts[-1].number == number
        self._parts.append(Part(number, rows, first, first + count, picks, lines))
        self.rows += count
        self.train_rows += train_rows
        self.held_bytes += held_bytes
        self._small = (self._small if is_same else 0) + 1 if is_small else 0
        if self._small == _SMALL_BATCHES:
            # lines that come one at a time: each would hold a page and a map of its own
            last = self._parts[-self._small :]
            joined = _joined([part.read() for part in last])
            self._parts[-self._small :] = [Part(number, joined, 0, len(joined))]
            self._small = 0

    def close_gaps(self, batch: Rows) -> None:
        """Copy what is picked of a batch, so that the rest of it is not held any longer."""
        mine = [k for k, part in enumerate(self._parts) if part.rows is batch]
        if not mine or not isinstance(batch, pa.RecordBatch):
            return
        picks = np.concatenate([self._parts[k].numbers for k in mine])
        copied, at = batch.take(numbers(picks)), 0
        for k in mine:
            part = self._parts[k]
            end = at + len(part.numbers)
            self._parts[k] = Part(part.number, copied, at, end, None, part.lines)
            at = end


def batches_of(parts: Iterable[Part]) -> list[pa.RecordBatch]:
    """The rows of some parts, those of a piece in one batch."""
    found: list[pa.RecordBatch] = []
    for _, same in itertools.groupby(parts, lambda part: id(part.rows)):
        first, *others = same
        together = [first, *others]
        ends = [part.last for part in together]
        batch = read_kept(first.rows)
        if all(part.picks is None for part in together) and all(
            part.first == end for part, end in zip(others, ends, strict=False)
        ):
            batch = batch.slice(first.first, ends[-1] - first.first)
        else:
            batch = batch.take(numbers(np.concatenate([part.numbers for part in together])))
        if lines := [part.lines for part in together if part.lines is not None]:
            batch = batch.append_column("line", numbers(np.concatenate(lines)))
        found.append(batch)
    if len(found) > 4 * _SMALL_BATCHES:
        return [
            _joined(found[k : k + _SMALL_BATCHES]) for k in range(0, len(found), _SMALL_BATCHES)
        ]
    return found


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


class _Texts:
    """Texts that lie in several batches, to be gathered in any order."""

    def __init__(self, columns: list[pa.StringArray]) -> None:
        self._parts: list[tuple[Bytes, Int64s]] = []
        for column in columns:
            _, at, data = column.buffers()
            offsets = np.frombuffer(at, np.int32)[column.offset : column.offset + len(column) + 1]
            self._parts.append((np.frombuffer(data, np.uint8), offsets.astype(np.int64)))
        self._first = np.cumsum([0, *map(len, columns)])
        """The first row of each part."""
        self.sizes = np.concatenate([np.diff(at) for _, at in self._parts])

    def gather(self, rows: Int64s, out: Bytes) -> pa.StringArray:
        """The texts of `rows` as a column; it lies in `out` until the next call."""
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(self.sizes[rows], out=offsets[1:])
        part_of = np.searchsorted(self._first, rows, "right") - 1
        for number, (data, at) in enumerate(self._parts):
            mine = np.flatnonzero(part_of == number)
            _copy_rows(data, at, rows[mine] - self._first[number], out, offsets[mine])
        return pa.StringArray.from_buffers(len(rows), pa.py_buffer(offsets), pa.py_buffer(out))


@dataclass(slots=True)
class Written:
    """What became known of the rows of a shard while they were written."""

    tokens: int | None = None
    """How many they have, if anybody counted."""
    pieces: TokenPieces | None = None
    """The tokens themselves, where the dataset has token files."""


def write_rows(
    file: IO[bytes],
    batches: Sequence[pa.RecordBatch],
    order: Int64s,
    schema: pa.Schema,
    beside: int = 0,
) -> Written:
    """Write the rows of that order as one parquet file; their tokens come back if they are kept.

    A row counts `beside` more bytes of a row group than its column `size` says.
    """
    # all but the text is joined: it is small, or (tokens) read as one
    names = [name for name in batches[0].schema.names if name != "text"]
    whole = _joined([batch.select(names) for batch in batches])
    texts = _Texts([batch.column("text") for batch in batches])
    groups = row_groups(values_of(whole.column("size"), np.int32)[order].astype(np.int64) + beside)
    scratch = used_buffer(max((int(texts.sizes[order[a:b]].sum()) for a, b in groups), default=0))
    counts = whole.column("n_tokens")
    total = None if counts.null_count else 0
    with open_parquet(file, schema) as writer:
        for first, last in groups:
            picks = numbers(order[first:last])
            group = {name: whole.column(name).take(picks) for name in schema.names[1:]}
            if total is not None:
                total += group["n_tokens"].sum().as_py() or 0
            text = texts.gather(order[first:last], scratch)
            writer.write_batch(pa.RecordBatch.from_arrays([text, *group.values()], schema=schema))
    if "tokens" not in names:
        return Written(total)
    tokens = whole.column("tokens")
    lengths = values_of(counts, np.int32)[order].astype(np.int64)
    ids = (numbers_of(tokens.take(numbers(order[a:b])).flatten()) for a, b in groups)
    spans = None
    if "loss_spans" in names:
        taken = whole.column("loss_spans").take(numbers(order))
        spans = LossSpans(
            numbers_of(taken.flatten()), offsets_of(numbers_of(taken.value_lengths()))
        )
    doc_id = values_of(whole.column("doc_id"), np.uint64)[order]
    return Written(total, TokenPieces(lengths, doc_id, ids, spans))


def row_groups(sizes: Int64s) -> list[tuple[int, int]]:
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


def as_parquet(table: pa.Table) -> bytes:
    """A small table as a file."""
    sink = pa.BufferOutputStream()
    # in one piece: Arrow's pages depend on the pieces
    pq.write_table(table.combine_chunks(), sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def open_parquet(file: IO[bytes], schema: pa.Schema = SCHEMA) -> pq.ParquetWriter:
    """A parquet writer with the settings of every penstock shard."""
    large = ("text", "tokens", "symbols", "scope", "turns")
    small = [name for name in schema.names if name not in large]
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
