"""Read one piece of an input into documents: one function for each format.

In:    a `Piece` (a range of lines, rows or members), how to read
Out:   `Documents`, and what was refused, with the reason
Keeps: every line, row and member of the piece is a document, a refusal or blank; the answer
       depends on the piece alone; no more text than the piece was planned for: what would be more
       is left as a rest, to be read as a piece of its own
Never: runs Python per JSON line or row, writes to disk, follows a name out of an archive
"""

import contextlib
import errno
import io
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays import Bytes, Int64s, offsets_of
from penstock.errors import BadConfig, InputDamaged, InputMissing, InputReplaced, PenstockError
from penstock.ingest.archives import judge_member, open_zip, pick_tar, tar_damaged, walk_tar
from penstock.ingest.decode import RULES, UTF_8, UTF_8_SIG, NotText, decode_document
from penstock.ingest.find import OWN_INPUTS as OWN_INPUTS
from penstock.ingest.find import refused_as, shown
from penstock.ingest.jsonl import (
    HALF_LINE,
    INVALID_JSON,
    INVALID_UTF8,
    LINE_TOO_LONG,
    MIXED,
    Block,
    Columns,
    LineParser,
    Reject,
    blank_places,
    line_places,
)
from penstock.ingest.lines import LineFile
from penstock.ingest.open import (
    COMPRESSED,
    ByteReader,
    HeldBytes,
    Stretch,
    inflate,
    is_url,
    open_ranges,
)
from penstock.kernels import PAD, byte_buffer
from penstock.options import check_numbers, refuse_unknown, suggest
from penstock.plugins import find, register
from penstock.records import Documents, Places, Refusal

SAMPLE_BYTES: Final = 200
_MAX_BYTES: Final = (1 << 30) - (1 << 20)
"""Of one piece: as UTF-8 it may become twice that, and Arrow's offsets are 32 bits."""
_BLOCK_BYTES: Final = 1 << 20
_BATCH_BYTES: Final = 64 << 20
"""Values of a parquet file that are decoded together, unless one alone is larger."""
_NO_LIMIT: Final = 1 << 62
_MAX_REFUSALS: Final = 10_000
"""Lines that are refused in one piece: 8 MB of lines of two bytes would be 4 million objects."""
_Raw = bytes

ORDERS: Final = ("shuffled", "path")
_LEAST_PIECE: Final = 64 << 10
"""Of a piece among those of many inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadConfig:
    """How inputs become documents."""

    text_field: str = "text"
    """The field of a JSON line, or the column of a parquet file, that holds the document."""

    max_document_bytes: int = 256 << 20
    """A longer line, file or member is refused; it is never held in memory."""

    piece_bytes: int = 8 << 20
    """About how much one worker takes at a time."""

    decode: str = "latin-1"
    """What to do with bytes that are not UTF-8: take them as Latin-1, or "reject" them."""

    suffixes: frozenset[str] | None = None
    """Suffixes of the files that are read in trees and archives, such as .c,.h; without it, all."""

    order: str = "shuffled"
    """Shuffle files of trees and members of archives by the seed, and mix inputs; or take them by
    path, one input after the other."""

    whole_lines: bool = False
    """Whether a JSON line is a document as it stands, for steps that parse it themselves."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        for name, least, most in (
            ("max_document_bytes", 1, 1 << 29),
            ("piece_bytes", 1, 1 << 30),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadConfig(f"--{name} is {value}", do=f"choose from {least} to {most:,}")
        if not self.text_field or any("\ud800" <= c <= "\udfff" for c in self.text_field):
            raise BadConfig(
                "--text_field is empty or not UTF-8", do="name the field that holds the text"
            )
        if self.decode not in RULES:
            raise BadConfig(f"--decode is {self.decode!r}", do=f"choose from {', '.join(RULES)}")
        if self.order not in ORDERS:
            raise BadConfig(f"--order is {self.order!r}", do=suggest(self.order, ORDERS))
        for suffix in self.suffixes or ():
            if not suffix.startswith(".") or len(suffix) < 2:
                raise BadConfig(f"{suffix!r} is not a suffix", do='write it like ".py"')

    def as_json(self) -> dict[str, Any]:
        """For the log."""
        known = asdict(self)
        known["suffixes"] = None if self.suffixes is None else sorted(self.suffixes)
        if not self.whole_lines:  # logs of an earlier penstock do not know it
            del known["whole_lines"]
        return known

    @classmethod
    def from_json(cls, known: dict[str, Any]) -> "ReadConfig":
        """What `as_json` gave."""
        names = {field.name for field in fields(cls)}
        refuse_unknown(known, sorted(names), "reading")
        known = dict(known)
        if known.get("suffixes") is not None:
            known["suffixes"] = frozenset(known["suffixes"])
        return cls(**known)

    def among(self, inputs: int, max_bytes: int) -> "ReadConfig":
        """The same with pieces so small that one of each input fits into `max_bytes`.

        >>> ReadConfig().among(4, 1 << 20).piece_bytes >> 10
        256
        """
        if inputs < 2 or self.order == "path":
            return self
        most = max(_LEAST_PIECE, max_bytes // inputs)
        return replace(self, piece_bytes=min(self.piece_bytes, most))


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one worker takes: the units start:end of an input. It never cuts a document."""

    input: int
    kind: str
    path: str
    """The file, directory, archive or object."""
    start: int
    end: int
    bytes: int
    """How much text it holds: exactly, or at most where some of it is compressed."""
    at: int = 0
    """The byte to begin at: of lines, or of a tar's first header."""
    members: tuple[int, ...] = ()
    """Of an archive that is not read in its order: numbers in its directory, or bytes at which
    headers begin; of the units start, start + 1 and so on."""
    names: tuple[tuple[str, int, int], ...] = ()
    """Files as (what follows `path`, bytes, unit): "/src/a.c", "#member" for what is in `data`."""
    refusals: tuple[Refusal, ...] = ()
    """What was refused when the piece was made; `read_piece` hands it on."""
    blank: tuple[int, ...] = ()
    """Units of members that are not meant, of those that travel with the piece."""
    version: str = ""
    """Tells whether a file was changed since the piece was made; empty where `data` does."""
    is_text: bool = False
    """Whether members are texts as they stand, however they are called: those of a plugin."""
    data: _Raw = b""
    """Text that travels with the piece: lines, or members end to end."""

    def header(self) -> _Raw:
        """All but `data`, as JSON: the two are sent side by side."""
        return msgspec.json.encode(msgspec.structs.replace(self, data=b""))

    @classmethod
    def attach(cls, header: _Raw, data: _Raw = b"") -> "Piece":
        """A piece from its header and its data."""
        piece = msgspec.json.decode(header, type=cls)
        return msgspec.structs.replace(piece, data=data) if data else piece

    def cut(self, rest: "Rest") -> "tuple[Piece, Piece]":
        """The part that was read, and the rest as a piece of its own."""
        first, last = [name for name in self.names if name[2] < rest.start], self.names
        passed = sum(size for name, size, _ in first if name.startswith("#"))
        data = self.data[rest.at - self.at if self.kind == "jsonl" else passed :]
        return msgspec.structs.replace(self, end=rest.start, data=b""), msgspec.structs.replace(
            self,
            start=rest.start,
            bytes=rest.bytes,
            at=rest.at,
            members=self.members[rest.start - self.start :],
            names=last[len(first) :],
            refusals=tuple(refusal for refusal in self.refusals if refusal.start >= rest.start),
            blank=tuple(unit for unit in self.blank if unit >= rest.start),
            data=data,
        )


class Rest(msgspec.Struct, frozen=True):
    """What is left of a piece that became more text than it was planned for."""

    start: int
    at: int
    bytes: int
    """What it takes to read on."""


class _Full(Exception):
    """A document does not fit into what its piece was planned for."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


@dataclass(slots=True)
class Read:
    """What became of a piece."""

    documents: Documents
    refusals: list[Refusal] = field(default_factory=list)
    blank_at: list[int] = field(default_factory=list)
    """Where blank lines begin; which members of an archive are directories, or not meant."""
    rest: Rest | None = None


def read_piece(piece: Piece, config: ReadConfig, input_name: str) -> Read:
    """The documents of a piece, and what was refused in it, both in the order of the input.

    If the piece became more text than it was planned for, a rest is left.
    """
    read: Callable[[Piece, ReadConfig, str], Read] = find("format", piece.kind).make
    result = read(piece, config, input_name)
    stop = result.rest.start if result.rest is not None else piece.end
    result.blank_at += [unit for unit in piece.blank if unit < stop]
    told = [refusal for refusal in piece.refusals if refusal.start < stop]
    if told:
        result.refusals = sorted([*told, *result.refusals], key=lambda r: r.start)
    return result


def _room(piece: Piece, config: ReadConfig) -> int:
    return min(max(piece.bytes, config.piece_bytes), _MAX_BYTES)


def read_parts(piece: Piece, config: ReadConfig, input_name: str) -> Iterator[tuple[Piece, Read]]:
    """A piece in as many parts as it takes."""
    while True:
        read = read_piece(piece, config, input_name)
        if read.rest is None:
            yield piece, read
            return
        first, piece = piece.cut(read.rest)
        yield first, read


# JSON lines.


@register("format", "jsonl", suffixes=(".jsonl", ".ndjson"), unit="bytes")
def read_lines(piece: Piece, config: ReadConfig, input_name: str) -> Read:
    """A range of JSON lines."""
    held = piece.data or piece.at == piece.end
    ranges = HeldBytes(piece.path, piece.data, piece.at) if held else open_ranges(piece.path)
    length = piece.end - piece.at
    file = LineFile(
        Path(piece.path),
        offset=piece.at,
        max_line_bytes=config.max_document_bytes,
        block_bytes=min(_BLOCK_BYTES, length + PAD),
        reader=Stretch(ranges, piece.at, piece.end),
    )
    lines = _WholeLines(file, config) if config.whole_lines else _Lines(file, config, length)
    with contextlib.closing(ranges):
        while (block := file.next_block() or file.fragment()) is not None:
            stop = lines.take(block)
            if len(lines.refusals) >= _MAX_REFUSALS and stop < piece.end:
                return lines.finish(Rest(stop, stop, piece.end - stop))
    if file.position != piece.end:
        raise InputReplaced(
            f"{input_name} is shorter than it was",
            where=piece.path,
            why=f"it ends at byte {file.position:,}, and lines to {piece.end:,} were planned",
            do="run again when nobody writes to it",
        )
    return lines.finish()


class _WholeLines:
    """Lines that are documents as they stand."""

    def __init__(self, file: LineFile, config: ReadConfig) -> None:
        self._file = file
        self._most = config.max_document_bytes
        self._texts: list[Bytes] = []
        self._starts: list[Int64s] = []
        self._ends: list[Int64s] = []
        self._sizes: list[Int64s] = []
        self._hashes: list[int] = []
        self._blank_at: list[int] = []
        self.refusals: list[Refusal] = []

    def take(self, block: Block) -> int:
        """Take all lines of a block."""
        self.refusals += [refuse_line(self._file, reject) for reject in block.too_long]
        data = block.data[block.start : block.stop]
        if not len(data):
            return block.end
        base = block.offset + block.start
        ends = np.flatnonzero(data == 0x0A) + 1
        starts = np.append(0, ends[:-1])
        kept = np.ones(len(data), np.bool_)
        if base == 0 and data[:3].tobytes() == b"\xef\xbb\xbf":
            kept[:3] = False
        blank = {at - base for at in blank_places(block, block.start, block.stop)}
        raw, holds = data.tobytes(), []
        is_text = _is_utf8(raw)
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            line, reject = raw[start : end - 1], None
            if start in blank:
                self._blank_at.append(base + start)
            elif len(line) > self._most:
                reject = Reject(LINE_TOO_LONG, base + start, base + end, base + start + self._most)
            elif not is_text and (wrong := _first_wrong(line)) >= 0:
                reject = Reject(INVALID_UTF8, base + start, base + end, base + start + wrong)
            elif b"\0" in line:
                reject = Reject(INVALID_JSON, base + start, base + end, base + start)
            elif block.is_fragment and not _is_json(line):
                reject = Reject(HALF_LINE, base + start, block.end, block.end)
            else:
                holds.append(True)
                text = line if base + start or line[:3] != b"\xef\xbb\xbf" else line[3:]
                self._hashes.append(xxhash.xxh64_intdigest(text))
                continue
            if reject is not None:
                self.refusals.append(refuse_line(self._file, reject))
            holds.append(False)
            kept[start:end] = False
        kept &= data != 0x0A
        chosen = np.array(holds, np.bool_)
        self._texts.append(data[kept])
        self._sizes.append(np.add.reduceat(kept, starts, dtype=np.int64)[chosen])
        self._starts.append(starts[chosen] + base)
        self._ends.append(np.minimum(ends[chosen] + base, block.end))
        return block.end

    def finish(self, rest: Rest | None = None) -> Read:
        none = np.zeros(0, np.int64)
        data = byte_buffer(sum(map(len, self._texts)))
        end = 0
        for text in self._texts:
            data[end : end + len(text)] = text
            end += len(text)
        start, last = np.concatenate([none, *self._starts]), np.concatenate([none, *self._ends])
        rows = len(start)
        places = Places(
            start, last, np.zeros(rows, np.int32), np.ones(rows, np.int32),
            np.array(self._hashes, np.uint64), np.zeros(rows, np.bool_),
        )  # fmt: skip
        at = offsets_of(np.concatenate([none, *self._sizes]))
        documents = Documents(
            data, at, start, last, decoding=np.zeros(rows, np.uint8), places=places
        )
        return Read(documents, self.refusals, self._blank_at, rest)


def _is_utf8(data: bytes) -> bool:
    return _first_wrong(data) < 0


def _first_wrong(data: bytes) -> int:
    """The first byte that is not UTF-8; -1 if all are."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return -1


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (ValueError, RecursionError):
        return False
    return True


class _Lines:
    """Lines on their way into documents."""

    def __init__(self, file: LineFile, config: ReadConfig, length: int) -> None:
        self._file = file
        self._parser = LineParser(
            text_field=config.text_field,
            salt=0,
            threshold=0,
            max_line_bytes=config.max_document_bytes,
        )
        self._columns = Columns.allocate(
            min(length, config.piece_bytes + config.max_document_bytes) + PAD,
            max(64, length // 512),
        )
        self._told: list[tuple[Int64s, Int64s]] = []
        self._blank_at: list[int] = []
        self.refusals: list[Refusal] = []

    def take(self, block: Block) -> int:
        """Take lines until so many are refused that the piece ends; where the next one begins."""
        self._refuse(block.too_long)
        at = block.start
        columns = self._columns
        while at < block.stop and len(self.refusals) < _MAX_REFUSALS:
            first = columns.rows
            taken = self._parser.take(
                block, at, 0, columns, max_train_rows=_NO_LIMIT, max_text_bytes=_NO_LIMIT,
                max_rejects=_NO_LIMIT,
            )  # fmt: skip
            mine, filled = slice(first, columns.rows), columns.filled
            self._told.append((filled.start[mine].copy(), filled.end[mine].copy()))
            if columns.counts[MIXED]:  # some rows tell another's positions instead of their own
                start, end = line_places(block, at, taken.stop, taken.rejects)
                filled.start[mine], filled.end[mine] = start, end
            if taken.blank:
                self._blank_at += blank_places(block, at, taken.stop)
            at = taken.stop
            self._refuse(taken.rejects)
        return min(block.offset + at, block.end)

    def finish(self, rest: Rest | None = None) -> Read:
        columns, rows = self._columns.filled, self._columns.rows
        start, end = columns.start[:rows], columns.end[:rows]
        source = None
        if self._columns.has_sources:
            source = pa.StringArray.from_buffers(
                rows,
                pa.py_buffer(columns.source_at[: rows + 1].astype(np.int32)),
                pa.py_buffer(columns.source),
            )
        none = np.zeros(0, np.int64)
        places = Places(
            np.concatenate([none, *(first for first, _ in self._told)]),
            np.concatenate([none, *(last for _, last in self._told)]),
            columns.part[:rows],
            columns.parts[:rows],
            columns.doc_id[:rows],
            np.diff(columns.source_at[: rows + 1]) > 0,
            source,
        )
        at = columns.text_at[: rows + 1]
        decoding = np.zeros(rows, np.uint8)
        documents = Documents(columns.text, at, start, end, decoding=decoding, places=places)
        return Read(documents, self.refusals, self._blank_at, rest)

    def _refuse(self, rejects: list[Reject]) -> None:
        self.refusals += [refuse_line(self._file, reject) for reject in rejects]


def refuse_line(file: LineFile, reject: Reject) -> Refusal:
    sample = file.sample(reject)
    return Refusal(reject.reason, reject.start, reject.end, reject.at, sample)


# Files, and members that travel with their piece.


@register("format", "files", suffixes=(), unit="members")
def read_files(piece: Piece, config: ReadConfig, input_name: str) -> Read:
    """Whole files of a tree or a bucket, or members of an archive that the piece holds."""
    gather = _Gather(piece, config)
    at = 0
    for name, size, unit in piece.names:
        source = piece.path + name
        try:
            if name.startswith("#"):
                raw = piece.data[at : at + size]
                gather.take(source, unit, raw, is_text=piece.is_text)
                at += size
                continue
            gather.add(source, unit, _read_file(source, size, config, gather.room))
        except _Full as full:
            return gather.finish(gather.rest(unit, full.size))
        except NotText as error:
            gather.refuse(error.reason, unit, source, at=error.at)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "error")
            gather.refuse("unreadable", unit, source, f"{code}: {error.strerror}")
        except InputMissing as error:
            if size == 0 and is_url(source):
                gather.blank_at.append(unit)  # the marker of a folder: its key ends in a slash
                continue
            why = "it was removed, or its key ends in a slash"
            gather.refuse("unreadable", unit, source, f"{error.what}: {why}")
        except InputDamaged as error:
            gather.refuse("unreadable", unit, source, f"{error.what}: {error.why}")
    return gather.finish()


class _Gather:
    """Documents one at a time into one buffer."""

    def __init__(self, piece: Piece, config: ReadConfig) -> None:
        self.blank_at: list[int] = []
        self.room = _room(piece, config)
        """Bytes that may still be read."""
        self._config = config
        self._texts: list[bytes] = []
        self._sources: list[str] = []
        self._units: list[int] = []
        self._decodings = bytearray()
        self._refusals: list[Refusal] = []

    def rest(self, unit: int, size: int, at: int = 0) -> Rest:
        """What is left from `unit` on, which has that many bytes."""
        return Rest(unit, at, max(size, self._config.piece_bytes))

    def take(self, source: str, unit: int, raw: bytes, *, is_text: bool = False) -> None:
        """A member of an archive; its text, if it is compressed, as of a file."""
        suffix = os.path.splitext(source)[1]
        if is_text or suffix not in COMPRESSED:
            self.add(source, unit, raw)
            return
        try:
            with contextlib.closing(inflate(io.BytesIO(raw), source, suffix)) as file:
                text = _read_to_end(file, self._config.max_document_bytes, self.room)
        except NotText as error:
            self.refuse(error.reason, unit, source, at=error.at)
        except InputDamaged as error:
            self.refuse("unreadable", unit, source, f"{error.what}: {error.why}")
        else:
            self.add(source, unit, text)

    def add(self, source: str, unit: int, raw: bytes) -> None:
        if len(raw) > self.room:
            raise _Full(len(raw))
        try:
            text, decoding = decode_document(raw, self._config.decode)
        except NotText as error:
            self.refuse(error.reason, unit, source, _sample(raw), error.at)
            return
        self.room -= len(raw)
        self._texts.append(text)
        self._sources.append(source)
        self._units.append(unit)
        self._decodings.append(decoding)

    def refuse(self, reason: str, unit: int, source: str, sample: str = "", at: int = 0) -> None:
        reason = refused_as(reason, source)
        self._refusals.append(Refusal(reason, unit, unit + 1, at, sample, source))

    def finish(self, rest: Rest | None = None) -> Read:
        start = np.array(self._units, np.int64)
        documents = Documents(
            np.frombuffer(bytearray().join([*self._texts, bytes(PAD)]), np.uint8),
            offsets_of([len(text) for text in self._texts]),
            start,
            start + 1,
            self._sources,
            decoding=np.frombuffer(self._decodings, np.uint8),
        )
        return Read(documents, self._refusals, self.blank_at, rest)


def _sample(raw: bytes) -> str:
    return raw[:SAMPLE_BYTES].decode("utf-8", "backslashreplace")


def _read_file(name: str, size: int, config: ReadConfig, room: int) -> bytes:
    """All bytes of a file, or of its text where it is compressed: at most `room` are held."""
    max_bytes, suffix = config.max_document_bytes, os.path.splitext(name)[1]
    if is_url(name) or suffix in COMPRESSED:
        ranges = open_ranges(name)
        with contextlib.closing(ranges):
            file: ByteReader = Stretch(ranges)
            if suffix in COMPRESSED:
                file = inflate(io.BufferedReader(Stretch(ranges)), name, suffix)
            with contextlib.closing(file):
                return _read_to_end(file, max_bytes, room)
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = os.read(descriptor, size + 1)
        while 0 < len(data) <= size and (more := os.read(descriptor, size + 1 - len(data))):
            data += more
    finally:
        os.close(descriptor)
    if len(data) != size:
        raise InputReplaced(
            f"{os.path.basename(name)} is not as long as it was",
            where=name,
            why=f"it had {size:,} bytes when the directory was listed",
            do="run again when nobody writes to it",
        )
    return data


def _read_to_end(file: ByteReader, max_bytes: int, room: int) -> bytes:
    buffer = memoryview(bytearray(min(max_bytes + 1, 1 << 20)))
    parts: list[bytes] = []
    size = 0
    while got := file.read_into(buffer):
        size += got
        if size > max_bytes:
            raise NotText("document_too_long", max_bytes)
        if size <= room:
            parts.append(bytes(buffer[:got]))
        else:
            parts.clear()  # from here on it is only counted
    if size > room:
        raise _Full(size)
    return b"".join(parts)


# Parquet.


@register("format", "parquet", suffixes=(".parquet",), unit="rows")
def read_rows(piece: Piece, config: ReadConfig, input_name: str) -> Read:
    """A range of rows of a parquet file."""
    try:
        # by its dictionary: a value of 1 MB that 10,000 rows repeat takes 1 MB, and 10 GB without
        return _read_rows(piece, config, input_name, read_dictionary=[config.text_field])
    except InputDamaged:  # Arrow cannot do that for DELTA_BYTE_ARRAY and the like
        return _read_rows(piece, config, input_name)


def _read_rows(piece: Piece, config: ReadConfig, input_name: str, **options: Any) -> Read:
    rows = _Rows(piece, config)
    rest: Rest | None = None
    with open_parquet(piece.path, **options) as file:
        groups: list[int] = []
        first = row = 0
        size = 1
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            if row + about.num_rows > piece.start and row < piece.end:
                first = first if groups else row
                groups.append(group)
                size = max(size, about.total_byte_size // max(1, about.num_rows))
            row += about.num_rows
        batches = file.iter_batches(
            batch_size=max(1, min(1 << 16, piece.end - piece.start, _BATCH_BYTES // size)),
            row_groups=groups,
            columns=[config.text_field],
            use_threads=False,
        )
        try:
            for batch in batches:
                skip = max(0, piece.start - first)
                array = batch.column(0).slice(skip, piece.end - first - skip)
                rest = rows.take(array, first + skip)
                first += len(batch)
                if first >= piece.end or rest is not None:
                    break
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputDamaged(
                f"{input_name} is damaged",
                where=f"{piece.path}, rows {piece.start:,} to {piece.end:,}",
                why=str(error),
                do="fetch it again",
            ) from error
    return rows.finish(rest)


@contextlib.contextmanager
def open_parquet(name: str, **options: Any) -> Iterator[Any]:
    """A parquet file or object."""
    import pyarrow.parquet as pq

    with contextlib.ExitStack() as stack:
        try:
            if is_url(name):
                ranges = open_ranges(name)
                stack.callback(ranges.close)
                # read on this thread alone: Arrow's own must not let go of a Python object
                opened = pa.PythonFile(io.BufferedReader(Stretch(ranges), 1 << 20), mode="r")
            else:
                open_ranges(name).close()  # says what is wrong with a path better than Arrow
                opened = pa.OSFile(name)
            file = stack.enter_context(pq.ParquetFile(opened, pre_buffer=False, **options))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputDamaged(
                f"{os.path.basename(name)} is not a parquet file",
                where=name,
                why=str(error),
                do="fetch it again",
            ) from error
        yield file


class _Rows:
    """Values of a text column on their way into documents."""

    def __init__(self, piece: Piece, config: ReadConfig) -> None:
        self._config = config
        self._room = _room(piece, config)
        self._texts: list[Bytes] = []
        self._lengths: list[Int64s] = []
        self._rows: list[Int64s] = []
        self._decodings: list[Bytes] = []
        self._refusals: list[Refusal] = []

    def take(self, array: Any, row: int) -> Rest | None:
        """Values from row number `row` on, as long as there is room for them."""
        lengths = _lengths(array)
        most = self._config.max_document_bytes
        ends = np.cumsum(np.where(lengths <= most, lengths, 0))
        fits = int(np.searchsorted(ends, self._room, "right"))
        # a value that is too long is decoded to be refused: a few at a time
        turns = np.cumsum(lengths[:fits]) // _BATCH_BYTES
        cuts = [0, *(np.flatnonzero(np.diff(turns)) + 1).tolist(), fits]
        for first, last in itertools.pairwise(cuts):
            self._take(array.slice(first, last - first), row + first)
        if fits == len(array):
            self._room -= int(ends[-1]) if fits else 0
            return None
        return Rest(row + fits, 0, max(int(lengths[fits]), self._config.piece_bytes))

    def _take(self, array: Any, row: int) -> None:
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        array = array.cast(pa.large_binary())
        null = array.is_null().to_numpy(zero_copy_only=False)
        at, data = _buffers(array)
        lengths = np.diff(at)
        keep = ~null & (lengths > 0) & (lengths <= self._config.max_document_bytes)
        try:
            array.cast(pa.large_string())
        except pa.ArrowInvalid:  # some value is not UTF-8: one at a time, by the rule
            self._take_each(array, row)
            return
        holds_nul = np.zeros(len(keep), bool)
        nuls = np.flatnonzero(data[at[0] : at[-1]] == 0) + at[0] if len(at) else at
        holds_nul[np.searchsorted(at, nuls, "right") - 1] = True
        for k in np.flatnonzero(~keep | holds_nul).tolist():
            reason = "no_text" if null[k] else "empty_text" if not lengths[k] else ""
            reason = reason or ("nul_in_text" if keep[k] else "document_too_long")
            self._refuse(reason, row + k, data[at[k] : at[k + 1]])
        keep &= ~holds_nul
        if lengths[~keep].any():
            at, data = _buffers(array.filter(pa.array(keep)))
        self._texts.append(data[at[0] : at[-1]])
        self._lengths.append(lengths[keep])
        self._rows.append(np.flatnonzero(keep) + row)
        self._decodings.append(np.zeros(int(keep.sum()), np.uint8))

    def finish(self, rest: Rest | None) -> Read:
        data = byte_buffer(sum(map(len, self._texts)))
        end = 0
        for text in self._texts:
            data[end : end + len(text)] = text
            end += len(text)
        lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths])
        start = np.concatenate([np.zeros(0, np.int64), *self._rows])
        decoding = np.concatenate([np.zeros(0, np.uint8), *self._decodings])
        documents = Documents(
            data,
            np.cumsum(lengths),
            start,
            start + 1,
            decoding=decoding,
        )
        return Read(documents, self._refusals, rest=rest)

    def _take_each(self, array: Any, row: int) -> None:
        for k, value in enumerate(array.to_pylist()):
            raw = value or b""
            try:
                if value is None:
                    raise NotText("no_text")
                if len(raw) > self._config.max_document_bytes:
                    raise NotText("document_too_long")
                text, decoding = decode_document(raw, self._config.decode)
            except NotText as error:
                self._refuse(error.reason, row + k, np.frombuffer(raw, np.uint8))
                continue
            self._texts.append(np.frombuffer(text, np.uint8))
            self._lengths.append(np.array([len(text)], np.int64))
            self._rows.append(np.array([row + k], np.int64))
            # a mark at the beginning of a value is a character like others
            self._decodings.append(
                np.array([decoding if decoding != UTF_8_SIG else UTF_8], np.uint8)
            )

    def _refuse(self, reason: str, row: int, value: Bytes) -> None:
        sample = _sample(value[:SAMPLE_BYTES].tobytes())
        self._refusals.append(Refusal(reason, row, row + 1, 0, sample))


def _lengths(array: Any) -> Int64s:
    """The bytes of each value; 0 for a null."""
    if not pa.types.is_dictionary(array.type):
        return np.diff(_buffers(array.cast(pa.large_binary()))[0])
    known = np.append(_lengths(array.dictionary), 0)  # the last one for nulls
    picks = array.indices.cast(pa.int64()).fill_null(len(known) - 1)
    found: Int64s = known[picks.to_numpy(zero_copy_only=False)]
    return found


def _buffers(array: Any) -> tuple[Int64s, Bytes]:
    """Where the values of a large_binary array begin, and the bytes they lie in."""
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return np.zeros(len(array) + 1, np.int64), np.zeros(0, np.uint8)
    at = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return at, np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)


# Archives.


@register("format", "zip", suffixes=(".zip",), unit="members")
def read_zip(piece: Piece, config: ReadConfig, input_name: str) -> Read:
    """Some members of a zip archive."""
    gather = _Gather(piece, config)
    archive = open_zip(piece.path)
    infos = archive.infolist()
    if len(infos) <= max(piece.members, default=0):
        raise InputReplaced(
            f"{input_name} has fewer members than it had",
            where=piece.path,
            why=f"there are {len(infos):,}, and one after these was planned",
            do="run again when nobody writes to it",
        )
    for unit, number in enumerate(piece.members or range(piece.start, piece.end), piece.start):
        info = infos[number]
        name = info.orig_filename
        flaw = judge_member(name, config.suffixes)
        source = f"{piece.path}#{shown(name)}"
        if info.is_dir() or flaw == "blank":
            gather.blank_at.append(unit)
        elif flaw:
            gather.refuse(flaw, unit, source)
        elif info.file_size > config.max_document_bytes:
            gather.refuse("document_too_long", unit, source)
        else:
            try:
                if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise NotImplementedError(f"compression method {info.compress_type}")
                with archive.open(info) as file:  # a count: else a bomb inflates before it is cut
                    raw = file.read(info.file_size + 1)
            except PenstockError:
                raise
            except Exception as error:  # encrypted, an unknown method, each codec's own
                gather.refuse("unreadable", unit, source, str(error) or type(error).__name__)
                continue
            try:
                gather.take(source, unit, raw)
            except _Full as full:
                return gather.finish(gather.rest(unit, full.size))
    return gather.finish()


@register("format", "tar", suffixes=(".tar",), unit="members")
def read_tar(piece: Piece, config: ReadConfig, input_name: str) -> Read:
    """Some members of a tar archive that is not compressed."""
    gather = _Gather(piece, config)
    ranges = open_ranges(piece.path)
    with contextlib.closing(ranges):
        file = Stretch(ranges)
        if piece.members:
            members = pick_tar(file, piece.path, config.suffixes, piece.members)
        else:
            members = walk_tar(file, piece.path, config.suffixes, piece.at)
        for unit, member in zip(range(piece.start, piece.end), members, strict=False):
            source = f"{piece.path}#{shown(member.name)}"
            if member.flaw == "blank":
                gather.blank_at.append(unit)
            elif member.flaw:
                gather.refuse(member.flaw, unit, source, member.why)
            elif member.size > config.max_document_bytes:
                gather.refuse("document_too_long", unit, source)
            else:
                raw = bytearray(member.size)
                if ranges.read_into(member.at, memoryview(raw)) != member.size:
                    raise tar_damaged(piece.path, "it ends within a member", member.at)
                try:
                    gather.take(source, unit, bytes(raw))
                except _Full as full:
                    return gather.finish(gather.rest(unit, full.size, member.header))
    return gather.finish()
