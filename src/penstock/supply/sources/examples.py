"""Rows of any columns as examples: a shard at a time becomes NumPy arrays, rows are picked from it.

In:    the shards of a dataset or of a directory of parquet files
Out:   examples: dicts of NumPy arrays and scalars, str, bytes, lists and dicts of these
Keeps: the same columns and types in every shard, or an error names both
Never: makes an Arrow scalar for a row; hands out memory of a shard, which would keep it alive

Where processes share the stream, a decoded shard is a file that one of them writes and all map: an
uncompressed Arrow IPC file, whose record batches are the arrays of its columns, the last one says
in JSON what each of them is. Tokens lie in such a file already.

    a column of             becomes for each row
    numbers                 a NumPy scalar
    text, binary            str, bytes
    lists of numbers        an array; nested lists of one shape an array of more dimensions
    other lists             a list
    structs                 a dict
A null is None; a null inside a list of numbers is an error.
"""

import abc
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays import Int32s
from penstock.errors import ShardMismatch
from penstock.supply.run_folder import SharedFile, SharedFiles, Sink
from penstock.supply.sources.dataset import OverShards, ShardSource
from penstock.supply.verified import MappedFile
from penstock.tokenize.token_file import Tokens, Watched

Int64s = npt.NDArray[np.int64]
Example = dict[str, Any]


class Column(abc.ABC):
    """The values of one column of a shard."""

    valid: npt.NDArray[np.bool_] | None = None
    """Which rows are not null; None if all are."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int: ...

    @abc.abstractmethod
    def _take(self, rows: Int64s) -> list[Any]: ...

    def take(self, rows: Int64s) -> list[Any]:
        """The values of rows."""
        found = self._take(rows)
        if self.valid is not None:
            for k, valid in enumerate(self.valid[rows].tolist()):
                if not valid:
                    found[k] = None
        return found


@dataclass(slots=True)
class Fixed(Column):
    """Numbers: every row has one, or an array of one shape."""

    values: npt.NDArray[Any]
    valid: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def _take(self, rows: Int64s) -> list[Any]:
        return list(self.values[rows])


@dataclass(slots=True)
class Texts(Column):
    """Text or binary, end to end."""

    data: memoryview
    at: Int64s
    is_text: bool
    valid: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.at.nbytes

    def _take(self, rows: Int64s) -> list[Any]:
        data = self.data
        spans = zip(self.at[rows].tolist(), self.at[rows + 1].tolist(), strict=True)
        if self.is_text:
            return [str(data[a:b], "utf-8") for a, b in spans]
        return [bytes(data[a:b]) for a, b in spans]


@dataclass(slots=True)
class Ragged(Column):
    """Lists of different lengths."""

    inner: Column
    at: Int64s
    valid: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.at.nbytes

    def _take(self, rows: Int64s) -> list[Any]:
        inner = self.inner
        spans = zip(self.at[rows].tolist(), self.at[rows + 1].tolist(), strict=True)
        if isinstance(inner, Fixed):
            return [inner.values[a:b].copy() for a, b in spans]
        return [_stacked(inner.take(np.arange(a, b))) for a, b in spans]


def _stacked(parts: list[Any]) -> Any:
    """Arrays of one shape as one array; a list of anything else as it is."""
    if parts and all(isinstance(part, np.ndarray) for part in parts):
        shape = parts[0].shape
        if all(part.shape == shape for part in parts):
            return np.stack(parts)
    return parts


@dataclass(slots=True)
class Struct(Column):
    """Columns by name."""

    fields: dict[str, Column]
    valid: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.fields.values())

    def _take(self, rows: Int64s) -> list[Any]:
        return _zipped(self.fields, rows)


def _zipped(columns: dict[str, Column], rows: Int64s) -> list[Example]:
    names = list(columns)
    taken = [column.take(rows) for column in columns.values()]
    return [dict(zip(names, values, strict=True)) for values in zip(*taken, strict=True)]


@dataclass(frozen=True, slots=True)
class Columns:
    """A shard, decoded."""

    columns: dict[str, Column]
    nbytes: int
    """Memory of this process: what is mapped is not."""
    files: tuple[Watched, ...] = ()
    """Whom to ask before mapped memory is read at a later time."""
    shared: SharedFile | None = None
    """The file that is in use as long as this is."""

    def is_unchanged(self) -> bool:
        """Whether its memory can be read, and holds what it did."""
        return all(file.is_unchanged() for file in self.files)

    def examples(self, rows: Int64s) -> list[Example]:
        """The examples of some rows."""
        return _zipped(self.columns, rows)


_BYTES: Final = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


class _Writer:
    """Writes columns, array by array, so that no more than one of them is in memory."""

    def __init__(self, file: Sink) -> None:
        self._writer = pa.ipc.new_file(pa.PythonFile(file, "w"), _BYTES)
        self._count = 0

    def put(self, array: Any) -> int:
        """Write an array; returns its number."""
        data = np.frombuffer(array, np.uint8) if len(array) else np.zeros(0, np.uint8)
        values = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
        self._writer.write_batch(pa.RecordBatch.from_arrays([values], schema=_BYTES))
        self._count += 1
        return self._count - 1

    def put_column(self, column: Column) -> dict[str, Any]:
        """Write a column; returns what it is, as JSON."""
        told: dict[str, Any] = {}
        if column.valid is not None:
            told["valid"] = self.put(column.valid)
        match column:
            case Fixed(values):
                flat = np.ascontiguousarray(values)
                told |= {"shape": values.shape, "dtype": values.dtype.str}
                told["values"] = self.put(flat.reshape(-1).view(np.uint8))
            case Texts(data, at, is_text):
                told |= {"data": self.put(data), "at": self.put(at.view(np.uint8))}
                told["is_text"] = is_text
            case Ragged(inner, at):
                told |= {"inner": self.put_column(inner), "at": self.put(at.view(np.uint8))}
            case Struct(fields):
                told["fields"] = {name: self.put_column(one) for name, one in fields.items()}
        return told

    def end(self, told: dict[str, Any]) -> None:
        self.put(json.dumps(told).encode())
        self._writer.close()


class _Reader:
    """The columns of such a file, where they lie."""

    def __init__(self, data: pa.Buffer) -> None:
        self._batches = pa.ipc.open_file(pa.BufferReader(data))
        last = self._batches.num_record_batches - 1
        self.told: dict[str, Any] = json.loads(bytes(self._bytes(last)))

    def _bytes(self, number: int) -> Any:
        array = self._batches.get_batch(number).column(0)
        buffer = array.buffers()[1]
        return memoryview(b"" if buffer is None else buffer.slice(0, len(array))).toreadonly()

    def _numbers(self, number: int, dtype: Any) -> npt.NDArray[Any]:
        return np.frombuffer(self._bytes(number), dtype)

    def column(self, told: dict[str, Any]) -> Column:
        valid = self._numbers(told["valid"], np.bool_) if "valid" in told else None
        if "values" in told:
            values = self._numbers(told["values"], np.dtype(told["dtype"]))
            return Fixed(values.reshape(told["shape"]), valid)
        if "data" in told:
            at = self._numbers(told["at"], np.int64)
            return Texts(self._bytes(told["data"]), at, told["is_text"], valid)
        if "inner" in told:
            return Ragged(self.column(told["inner"]), self._numbers(told["at"], np.int64), valid)
        fields = {name: self.column(one) for name, one in told["fields"].items()}
        return Struct(fields, valid)


def type_name(kind: pa.DataType) -> str:
    """What a row of an Arrow type becomes; empty if there is nothing for it.

    >>> type_name(pa.list_(pa.list_(pa.int8(), 8), 8)), type_name(pa.list_(pa.large_string()))
    ('int8[8][8]', 'str[]')
    """
    types = pa.types
    if types.is_dictionary(kind):
        return type_name(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind):
        return "str"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "bytes"
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        inner = type_name(kind.value_type)
        size = str(kind.list_size) if types.is_fixed_size_list(kind) else ""
        return f"{inner}[{size}]" if inner else ""
    if types.is_struct(kind):
        fields = {field.name: type_name(field.type) for field in kind}
        told = ", ".join(f"{name}: {inner}" for name, inner in fields.items())
        return f"{{{told}}}" if all(fields.values()) else ""
    return str(kind) if _is_number(kind) else ""


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    plain = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    return bool(plain or types.is_timestamp(kind) or types.is_date(kind) or types.is_duration(kind))


class _NullInside(Exception):
    """A list of numbers has a null in it."""


def decode_column(column: pa.ChunkedArray) -> Column:
    """A column as arrays."""
    if column.nbytes >= 2**31:  # offsets of 32 bits do not reach that far
        if pa.types.is_string(column.type):
            column = column.cast(pa.large_string())
        elif pa.types.is_binary(column.type):
            column = column.cast(pa.large_binary())
        elif pa.types.is_list(column.type):
            column = column.cast(pa.large_list(column.type.value_type))
    return _decoded(column.combine_chunks())


def _decoded(array: pa.Array) -> Column:
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return _decoded(array.dictionary_decode())
    if types.is_fixed_size_binary(kind):
        return _decoded(array.cast(pa.large_binary()))
    valid = None
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False)
    if types.is_struct(kind):
        fields = [field.name for field in kind]
        inner = {name: _decoded(part) for name, part in zip(fields, array.flatten(), strict=True)}
        return Struct(inner, valid)
    if types.is_fixed_size_list(kind):
        size = kind.list_size
        values = array.values.slice(array.offset * size, len(array) * size)
        return _lists(_decoded(values), np.arange(len(array) + 1, dtype=np.int64) * size, valid)
    if types.is_list(kind) or types.is_large_list(kind):
        at = array.offsets.to_numpy().astype(np.int64)
        values = array.values.slice(int(at[0]), int(at[-1] - at[0]))
        return _lists(_decoded(values), at - at[0], valid)
    if _is_number(kind):
        if valid is not None and not types.is_temporal(kind):
            array = array.fill_null(pa.scalar(0).cast(kind))
        return Fixed(array.to_numpy(zero_copy_only=False), valid)
    wide = types.is_large_string(kind) or types.is_large_binary(kind)
    _, places, data = array.buffers()
    first, last = array.offset, array.offset + len(array)
    offsets = np.zeros(1, np.int64)
    if places is not None and len(array):
        dtype = np.int64 if wide else np.int32
        offsets = np.frombuffer(places, dtype)[first : last + 1].astype(np.int64)
    view = memoryview(data if data is not None else b"")[int(offsets[0]) : int(offsets[-1])]
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return Texts(view.toreadonly(), offsets - offsets[0], is_text, valid)


def _lists(inner: Column, at: Int64s, valid: npt.NDArray[np.bool_] | None) -> Column:
    """Lists from what is in them and where each begins."""
    nulls = inner.valid is not None and not isinstance(inner, Texts | Struct)
    if nulls and inner.valid is not None:
        # what a null list of a fixed size has in it is nobody's
        owner = np.searchsorted(at, np.flatnonzero(~inner.valid), side="right") - 1
        if valid is None or valid[owner].any():
            raise _NullInside(int(owner[0] if valid is None else owner[valid[owner]][0]))
        inner.valid = None
    sizes = np.diff(at)
    if isinstance(inner, Fixed) and len(sizes) and sizes.min() == sizes.max():
        shape = (len(sizes), int(sizes[0]), *inner.values.shape[1:])
        return Fixed(inner.values.reshape(shape), valid)
    return Ragged(inner, at, valid)


Seen = dict[str, tuple[str, dict[str, str]]]
"""The types that all shards must have, and the shard that had them first."""


class ExampleSource(OverShards):
    """Shards whose every row is a sample of length one."""

    def __init__(self, shards: ShardSource, columns: Sequence[str] | None, seen: Seen) -> None:
        super().__init__(shards)
        self._columns = columns
        self._seen = seen
        self._ones = np.ones(0, np.int32)
        self.shared: SharedFiles | None = None
        """Where decoded shards lie, if processes share them."""
        self.read_s = self.decode_s = 0.0
        """Seconds of all threads together."""

    def rows(self, shard: int) -> int:
        return self.shards.rows(shard)

    def lengths(self, shard: int) -> Int32s:
        rows = self.shards.rows(shard)
        if len(self._ones) < rows:
            self.shards.check_footer(shard)  # a log may claim any number
            self._ones = np.ones(rows, np.int32)
        return self._ones[:rows]

    def where(self, shard: int, row: int | None = None) -> str:
        """A place in the data, in words."""
        name, at_row = self.shards.place_of(shard, row or 0)
        place = f'source "{self.name}", {name.removeprefix(self.shards.url).lstrip("/")}'
        return place if row is None else f"{place}, row {at_row}"

    def decode(self, shard: int) -> Columns:
        """All rows of a shard, after its bytes were found to be those of the log."""
        names, tokens = self._columns, None
        if names is None or "tokens" in names:
            tokens = self.shards.stored_tokens(shard)
        if tokens is not None and names is not None:
            names = [name for name in names if name != "tokens"]
        found = Columns({}, 0)
        if names != []:
            found = self._shared(shard, names, tokens) or self._read(shard, names, tokens)
        if tokens is None:
            return found
        column = _lists(Fixed(tokens.values), tokens.at, None)
        columns = {**found.columns, "tokens": column}
        return Columns(
            {name: columns[name] for name in self._columns or columns},
            found.nbytes + tokens.nbytes,
            (*found.files, *([tokens.file] if tokens.file else [])),
            found.shared,
        )

    def _shared(
        self, shard: int, names: Sequence[str] | None, tokens: Tokens | None
    ) -> Columns | None:
        """The columns from a file that processes share; None where there is none."""
        if self.shared is None:
            return None

        def write(file: Sink) -> None:
            writer, kinds, told = _Writer(file), {}, {}
            for name, kind, column in self._decoded(shard, names, tokens):
                kinds[name], told[name] = kind, writer.put_column(column)
            writer.end({"types": kinds, "columns": told})

        key = f"examples 1 {self.shards.content_key(shard)} {json.dumps(names)}"
        shared = self.shared.fetch(key, write)
        pa.default_memory_pool().release_unused()
        if shared is None or shared.data is None:
            return None
        reader = _Reader(shared.data)
        self._check_types(reader.told["types"], tokens, shard)
        found = {name: reader.column(told) for name, told in reader.told["columns"].items()}
        return Columns(found, 0, (MappedFile(shared.data),), shared)

    def _read(self, shard: int, names: Sequence[str] | None, tokens: Tokens | None) -> Columns:
        """The columns in memory of this process."""
        found = {name: column for name, _, column in self._decoded(shard, names, tokens)}
        return Columns(found, sum(column.nbytes for column in found.values()))

    def _decoded(
        self, shard: int, names: Sequence[str] | None, tokens: Tokens | None
    ) -> Iterator[tuple[str, str, Column]]:
        """The columns one after the other, each with its type."""
        began = time.perf_counter()
        table = self.shards.read_parquet(shard, names)
        self.read_s += time.perf_counter() - began
        kinds = {field.name: self._kind(field, shard) for field in table.schema}
        self._check_types(kinds, tokens, shard)
        for name, kind in kinds.items():
            began = time.perf_counter()
            try:
                column = decode_column(table.column(name))
            except _NullInside as error:
                raise ShardMismatch(
                    f"there is a null inside a list of column {name!r}",
                    where=self.where(shard, error.args[0]),
                    why="arrays of numbers have no place for it",
                    do="fill it before the shard is written, or leave the column out of columns",
                ) from None
            table = table.drop_columns([name])  # so that a copy and what it copies do not pile up
            self.decode_s += time.perf_counter() - began
            yield name, kind, column

    def _kind(self, field: pa.Field, shard: int) -> str:
        if kind := type_name(field.type):
            return kind
        raise ShardMismatch(
            f"column {field.name!r} is of type {field.type}",
            where=self.where(shard),
            why="examples are numbers, text, binary, and lists and structs of these",
            do="leave it out: name the others in columns",
        )

    def forget(self, shard: int) -> None:
        """Nothing is remembered of a shard."""

    def forget_but(self, shards: set[int]) -> None:
        """Nor of several."""

    def _check_types(self, kinds: dict[str, str], tokens: Tokens | None, shard: int) -> None:
        types = kinds if tokens is None else {**kinds, "tokens": f"{tokens.values.dtype}[]"}
        first, expected = self._seen.setdefault("types", (self.where(shard), types))
        if types == expected:
            return
        names = [n for n in {**expected, **types} if types.get(n) != expected.get(n)]
        raise ShardMismatch(
            "shards differ in their columns",
            where=self.where(shard),
            why="\n".join(
                f"{name}: {types.get(name, 'not there')}; {first} has "
                f"{expected.get(name, 'no such column')}"
                for name in names
            ),
            do="write them with one schema, or name in columns those that all have alike",
        )

    def wrong_text(self, shard: int, decoded: Columns, rows: Int64s) -> ShardMismatch:
        """The error for rows of which one has text that is not UTF-8."""
        for row in rows.tolist():
            try:
                decoded.examples(np.array([row]))
            except UnicodeDecodeError as error:
                return ShardMismatch(
                    "a text is not UTF-8",
                    where=self.where(shard, row),
                    why=str(error),
                    do="write the column as binary, or fix the text",
                )
        raise AssertionError("all rows can be read")


def show_log(log: logging.Logger) -> None:
    """What is logged can be seen, also where nobody has set up logging."""
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        log.addHandler(logging.StreamHandler())
