"""Files of batches: tensors behind a JSON header, in the layout of safetensors.

In:    a schema (names, types, shapes of a row's fields), batches, the numbers they have
Out:   the bytes of a file; the batches of a file as arrays of their own
Keeps: what a header says is compared with what this queue's files must say before a byte of data
       is read; every batch has a checksum
Never: unpickles, trusts a length or a name that a file gives

safetensors itself reads these files. Its library makes 1 MB into bytes in 3 ms, with three copies
of the data; here arrays are written where they lie. It would also take headers of 100 MB.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arrays import Rooms
from penstock.errors import BadBatch, BadConfig
from penstock.options import nearest, suggest, whole

FORMAT: Final = "penstock-batches-1"
SUFFIX: Final = ".safetensors"
MOST_HEADER: Final = 1 << 20
"""Bytes of a header. One of 64 batches with 8 fields has 4 KB."""
FIRST_READ: Final = 8 << 10
MOST_BATCHES: Final = 4096
"""Batches of a file."""
MOST_TOLD: Final = 500
"""Letters of a hostile header that an error repeats."""
MOST_FIELDS: Final = 1024
"""Fields of a batch. With names of 64 letters and 4,096 batches, a header of half of its limit."""
_KINDS: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32",
    "float64": "F64",
}  # fmt: skip
"""Types of NumPy, and what safetensors calls them."""
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a batch: what a row of it is."""

    name: str
    dtype: npt.DTypeLike
    shape: tuple[int, ...]
    role: str = ""

    @property
    def row_bytes(self) -> int:
        size = np.dtype(self.dtype).itemsize
        for one in self.shape:
            size *= one
        return size


class Schema:
    """The fields of a batch, as `batch_schema` lists them."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(fields)
        # the widest first, so that each tensor begins where its type may
        self.stored = sorted(fields, key=lambda one: (-np.dtype(one.dtype).itemsize, one.name))
        told = json.dumps([[f.name, str(f.dtype), list(f.shape)] for f in self.stored])
        self.hash = hashlib.sha256(told.encode()).hexdigest()[:32]

    @classmethod
    def parse(cls, given: Any, where: str = "") -> "Schema":
        """The schema that a provider's meta describes.

        >>> given = [{"name": "x", "dtype": "int64", "shape": [8], "role": "input"}]
        >>> Schema.parse(given).fields[0].row_bytes
        64
        """
        if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
            raise BadConfig(
                f"batch_schema is {given!r}",
                where=where,
                do='list the fields of a batch: [{"name": "x", "dtype": "int64", "shape": [64]}]',
            )
        if len(given) > MOST_FIELDS:
            raise BadConfig(
                f"batch_schema has {len(given):,} fields",
                where=where,
                why="the header of a file would be longer than consumers read",
                do=f"have {MOST_FIELDS} at most: one field may have several dimensions",
            )
        fields = [_field(one, number, where) for number, one in enumerate(given)]
        names = [one.name for one in fields]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise BadConfig(
                f"batch_schema has two fields {doubled[0]!r}", where=where, do="rename one"
            )
        return cls(fields)

    @property
    def is_pair(self) -> bool:
        """Whether a batch is x and y and nothing else."""
        return sorted(one.name for one in self.fields) == ["x", "y"]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of a batch."""
        return sum(one.row_bytes for one in self.fields)

    def check(self, batch: Any, rows: int, where: str) -> Arrays:
        """The batch as arrays, if it has the fields, types and shapes that the schema says."""
        if not isinstance(batch, Mapping):
            raise BadBatch(
                f"sample_batch gave {type(batch).__name__}",
                where=where,
                do="return a dict with a tensor for each field of batch_schema",
            )
        names = [one.name for one in self.fields]
        for name in batch:
            if name not in names:
                raise BadBatch(
                    f"the batch has a field {name!r} that batch_schema does not have",
                    where=where,
                    do=suggest(name, names),
                )
        found: Arrays = {}
        for field in self.fields:
            if field.name not in batch:
                raise BadBatch(
                    f"the batch has no field {field.name!r}",
                    where=where,
                    why="batch_schema has it",
                    do="return it, or take it out of batch_schema",
                )
            found[field.name] = _checked(field, batch[field.name], rows, where)
        return found


def _field(given: Any, number: int, where: str) -> Field:
    """A field of `batch_schema`, checked."""
    about = f"field {number} of batch_schema"
    if not isinstance(given, Mapping):
        raise BadConfig(f"{about} is {given!r}", where=where, do="write name, dtype and shape")
    for key in given:
        if key not in (known := ("name", "dtype", "shape", "role")):
            raise BadConfig(f"{about} has {key!r}", where=where, do=suggest(key, known))
    name, kind, shape = given.get("name"), given.get("dtype"), given.get("shape")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadConfig(
            f"the name of {about} is {name!r}",
            where=where,
            do="begin with a letter; then letters, digits and underscores, 64 in all at most",
        )
    if not isinstance(kind, str) or kind not in _KINDS:
        near = nearest(str(kind), _KINDS)
        raise BadConfig(
            f"the dtype of field {name!r} is {kind!r}",
            where=where,
            do=(f"did you mean {near}? " if near else "") + f"choose from {', '.join(_KINDS)}",
        )
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > 8:
        raise BadConfig(
            f"the shape of field {name!r} is {shape!r}",
            where=where,
            do="list the sizes of a row, without the batch: [block_size], or [] for a number",
        )
    sizes = tuple(whole(f"a size of field {name!r}", one, 1, 1 << 31) for one in shape)
    return Field(name, kind, sizes, str(given.get("role", "")))


def _checked(field: Field, value: Any, rows: int, where: str) -> npt.NDArray[Any]:
    if hasattr(value, "detach"):  # a tensor of torch, which is not imported for it
        value = value.detach().cpu()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise BadBatch(
            f"field {field.name!r} is no array",
            where=where,
            why=f"{type(error).__name__}: {error}",
            do=f"return an array or a tensor of {field.dtype}",
        ) from None
    wanted = (rows, *field.shape)
    if array.dtype != np.dtype(field.dtype):
        raise BadBatch(
            f"field {field.name!r} is {array.dtype}",
            where=where,
            why=f"batch_schema says {field.dtype}",
            do=f"return it as {field.dtype}, or change batch_schema",
        )
    if array.shape != wanted:
        raise BadBatch(
            f"field {field.name!r} has the shape {list(array.shape)}",
            where=where,
            why=f"batch_schema says {list(field.shape)} for each of {rows} rows: {list(wanted)}",
            do="return batch_size rows of that shape, or change batch_schema",
        )
    return array


@dataclass(frozen=True, slots=True)
class Layout:
    """What all files of one split of a queue say of themselves."""

    schema: Schema
    rows: int
    """Rows of a batch."""
    split: str
    queue: str
    """Fingerprint of what the batches were made under."""
    each: int = 1
    """Batches of a file; the last one may have fewer."""

    def first(self, number: int) -> int:
        """The number of the first batch in the file that has this one."""
        return number // self.each * self.each

    def name(self, number: int) -> str:
        """The file that has a batch."""
        return f"{self.first(number):020d}{SUFFIX}"

    def tensors(self, batches: int) -> dict[str, Any]:
        """The header's entries of a file's tensors."""
        found, at = {}, 0
        for field in self.schema.stored:
            size = field.row_bytes * self.rows * batches
            found[field.name] = {
                "dtype": _KINDS[str(field.dtype)],
                "shape": [self.rows * batches, *field.shape],
                "data_offsets": [at, at + size],
            }
            at += size
        return found

    def about(self, first: int, batches: int, checksums: Sequence[str]) -> dict[str, str]:
        """The header's metadata."""
        return {
            "format": FORMAT,
            "queue": self.queue,
            "schema": self.schema.hash,
            "split": self.split,
            "first": str(first),
            "batches": str(batches),
            "checksums": ",".join(checksums),
        }

    def encode(self, first: int, batches: Sequence[Arrays]) -> list[memoryview]:
        """The file with these batches, in parts; the first batch has the number `first`."""
        told = self.about(first, len(batches), [self.checksum(batch) for batch in batches])
        text = json.dumps(
            {"__metadata__": told, **self.tensors(len(batches))}, separators=(",", ":")
        ).encode()
        text += b" " * (-len(text) % 64)  # the data is aligned for whoever maps the file
        parts = [memoryview(len(text).to_bytes(8, "little") + text)]
        for field in self.schema.stored:
            parts += [_bytes_of(batch[field.name]) for batch in batches]
        return parts

    def checksum(self, batch: Arrays) -> str:
        """The checksum that a batch has in a file."""
        found = xxhash.xxh3_128()
        for field in self.schema.stored:
            found.update(_bytes_of(batch[field.name]))
        return found.hexdigest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    """The bytes of an array, which are copied only if they do not lie in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class _Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a header says of a tensor."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class BatchFile:
    """A file of batches that is open, its header compared with what it must be."""

    def __init__(self, descriptor: int, layout: Layout, first: int, where: str) -> None:
        """Takes the descriptor over."""
        self._descriptor, self._layout, self._where = descriptor, layout, where
        self.first = first
        try:
            self._begins, self._checksums = self._read_header()
        except OSError as error:
            self.close()
            raise self._unreadable(error) from error
        except BaseException:
            self.close()
            raise
        self.batches = len(self._checksums)

    def read(self, number: int, rooms: Mapping[str, Rooms] | None = None) -> Arrays:
        """The batch of that number, in memory of its own: for each field out of its `rooms`, if
        they are given."""
        layout, index = self._layout, number - self.first
        if not 0 <= index < self.batches:
            raise self._bad(f"it ends before batch {number}: it has {self.batches}")
        found: Arrays = {}
        checksum = xxhash.xxh3_128()
        for field in layout.schema.stored:
            size = field.row_bytes * layout.rows
            flat = np.empty(size, np.uint8) if rooms is None else rooms[field.name].lend(size)
            self._read_into(flat.data, self._begins[field.name] + size * index)
            checksum.update(flat.data)
            found[field.name] = flat.view(field.dtype).reshape(layout.rows, *field.shape)
        if checksum.hexdigest() != self._checksums[index]:
            raise self._bad(
                f"batch {number} has the checksum {checksum.hexdigest()}, "
                f"its header says {self._checksums[index]}"
            )
        return {field.name: found[field.name] for field in layout.schema.fields}

    def checksum(self, number: int) -> str:
        """What the header says of a batch."""
        return self._checksums[number - self.first]

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read_into(self, view: memoryview, at: int) -> None:
        while view:
            try:
                done = os.preadv(self._descriptor, [view], at)
            except OSError as error:
                raise self._unreadable(error) from error
            if not done:
                raise self._bad("it was cut while it was read")
            view, at = view[done:], at + done

    def _read_header(self) -> tuple[dict[str, int], list[str]]:
        """Where each tensor begins, and the checksums of the batches."""
        layout, size = self._layout, os.fstat(self._descriptor).st_size
        start = os.pread(self._descriptor, FIRST_READ, 0)
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > MOST_HEADER or 8 + length > size:
            raise self._bad(f"its header would have {length:,} bytes, the file has {size:,}")
        if len(start) < 8 + length:
            start += os.pread(self._descriptor, 8 + length - len(start), len(start))
        try:
            header = msgspec.json.decode(start[8 : 8 + length], type=dict[str, dict[str, Any]])
            about = msgspec.convert(header.pop("__metadata__"), dict[str, str])
            batches, checksums = int(about["batches"]), about["checksums"].split(",")
            tensors = msgspec.convert(header, dict[str, _Tensor])
        except (msgspec.MsgspecError, KeyError, ValueError, RecursionError) as error:
            raise self._bad(f"its header is none: {type(error).__name__}: {error}") from None
        if not 1 <= batches <= min(layout.each, MOST_BATCHES) or len(checksums) != batches:
            raise self._bad(f"it says that it has {batches} batches")
        wanted = layout.about(self.first, batches, checksums)
        for key in sorted({*wanted, *about}):
            if about.get(key) != wanted.get(key):
                raise self._other(key, about.get(key), wanted.get(key))
        begins = self._compare(tensors, layout.tensors(batches))
        if size != 8 + length + layout.schema.row_bytes * layout.rows * batches:
            raise self._bad(f"it has {size:,} bytes, and its header describes another number")
        return {name: 8 + length + begin for name, begin in begins.items()}, checksums

    def _compare(self, found: dict[str, _Tensor], wanted: dict[str, Any]) -> dict[str, int]:
        """Where each tensor begins, if they are those of the schema, one behind the other. Their
        order is free: of types of one size safetensors has another first than we have."""
        begins, at = {}, 0
        for name in sorted({*found, *wanted}):
            one, two = found.get(name), wanted.get(name)
            if one is None or two is None or [one.dtype, one.shape] != [two["dtype"], two["shape"]]:
                raise self._bad(f"it has {one or 'nothing'} as {name!r}, the schema {two}")
        for name, one in sorted(found.items(), key=lambda pair: pair[1].data_offsets):
            begin, stop = wanted[name]["data_offsets"]
            if one.data_offsets != (at, at + stop - begin):
                raise self._bad(
                    f"its tensor {name!r} is at {list(one.data_offsets)}, not at "
                    f"{[at, at + stop - begin]}, behind the one before"
                )
            begins[name], at = at, one.data_offsets[1]
        return begins

    def _other(self, key: str, found: Any, wanted: Any) -> BadBatch:
        if key in ("queue", "schema"):
            return BadBatch(
                f"{os.path.basename(self._where)} was made under another {key}",
                where=self._where,
                why=f"its header says {_cut(repr(found))}, the queue's meta {wanted!r}",
                do="purge the queue: penstock prepare CONFIG --purge; if that was just done, start "
                "the trainer anew",
            )
        return self._bad(f"its header says {found!r} as {key}, not {wanted!r}")

    def _unreadable(self, error: OSError) -> BadBatch:
        return self._bad(f"it cannot be read: {error.strerror or error}")

    def _bad(self, why: str) -> BadBatch:
        return BadBatch(
            f"{os.path.basename(self._where)} is not a file of batches as this queue has them",
            where=self._where,
            why=_cut(why),
            do="start the provider anew: it checks its files, and makes this one again",
        )


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]}…"
