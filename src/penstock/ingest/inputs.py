"""What was given to read: share it out in pieces, and know it again later.

In:    names of inputs
Out:   the pieces of each, lazily, from any unit on
Keeps: pieces tile an input in order, never cut a document, and depend on the input alone;
       what was read can be told from what stands there now
Never: follows a link to a directory, holds more than one piece, leaves a file out in silence

    name ─▶ find.expand_inputs ─▶ open_input ─▶ pieces ─▶ (a worker) formats.read_piece
"""

import contextlib
import difflib
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from penstock import plugins
from penstock.errors import (
    BadInput,
    InputDamaged,
    InputMissing,
    InputReplaced,
    PenstockError,
)
from penstock.ingest.archives import open_zip, tar_damaged, walk_tar
from penstock.ingest.files import (
    COMPRESSED,
    MAX_RATIO,
    RATIO_GRACE_BYTES,
    LineFile,
    inflate,
)
from penstock.ingest.find import (
    is_packed,
    is_printable,
    shown,
    suffix_of,
    walk_bucket,
    walk_folder,
)
from penstock.ingest.formats import Piece, Read, ReadConfig, open_parquet, read_piece, refuse_line
from penstock.ingest.ranges import (
    Ranges,
    Stretch,
    is_url,
    open_bucket,
    open_forward,
    open_ranges,
)
from penstock.records import Refusal

__all__ = ["Input", "Piece", "Read", "ReadConfig", "open_input", "read_piece"]

_PROOF_BYTES: Final = 1 << 16
_LOOK_BYTES: Final = 1 << 12
_MAX_NAMES: Final = 4096
"""Files in a piece, however small they are."""
_KEPT_PROOFS: Final = 1 << 18
"""Files of a tree whose proofs are at hand: more than all pieces in flight have."""
_GROUP_PIECES: Final = 8
"""A row group of more pieces than this is cut."""
_SHORT: Final = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}


class Input:
    """One input: what it is, its pieces, and what shows that it is still the same."""

    unit = "members"

    def __init__(self, name: str, number: int, kind: str, config: ReadConfig) -> None:
        self.name = name
        self.number = number
        self.kind = kind
        self.config = config
        self.size: int | None = None
        """Bytes in it, for the progress, where that is known without reading it."""
        self._ranges: Ranges | None = None

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """What is to be read, from unit `start` on."""
        raise NotImplementedError

    def prove(self, to: int) -> dict[str, str | int]:
        """What shows later that the part before `to` is the same: here, the file's two ends."""
        size = self.ranges.size
        return {
            "bytes": size,
            "head": self._hash(0, min(size, _PROOF_BYTES)),
            "tail": self._hash(max(0, size - _PROOF_BYTES), size),
            "version": self.ranges.version,
        }

    def check(self, to: int, proof: dict[str, str | int]) -> bool:
        """Raise InputReplaced if the part before `to` is not the one that `proof` is of.

        False if it was written to since: then it may still be the same, and reading it tells.
        """
        found = self.prove(to)
        # what an older penstock did not note is not asked for
        asked = proof.keys() - {"version", "content"}
        differ = [key for key in proof if key in asked and found.get(key) != proof[key]]
        if differ:
            told = [f"{key} {found.get(key)!r} now, {proof[key]!r} before" for key in differ]
            raise _replaced(self.name, f"up to {self.unit} {to:,}: {'; '.join(told)}")
        return proof.get("version") in (None, found["version"])

    def check_end(self) -> None:
        """Raise if what was read to its end has not ended there."""

    def refuse_content(self, to: int) -> InputReplaced:
        """The error for an input of the same names and sizes that holds something else."""
        return _replaced(
            self.name, f"up to {self.unit} {to:,}: {self._same()}, and the text is not"
        )

    def _same(self) -> str:
        return "its size is the same"

    def more(self, to: int) -> str:
        """What has come after the part before `to`, in words; "" if nothing has."""
        return ""

    def left_out(self) -> Counter[str]:
        """The suffixes of its files, if `suffixes` leave nothing of it; else empty."""
        return Counter()

    def close(self) -> None:
        if self._ranges is not None:
            self._ranges.close()
            self._ranges = None

    @property
    def ranges(self) -> Ranges:
        if self._ranges is None:
            self._ranges = open_ranges(self.name)
        return self._ranges

    def _read(self, start: int, end: int) -> bytes:
        buffer = bytearray(end - start)
        got = self.ranges.read_into(start, memoryview(buffer))
        return bytes(buffer[:got])

    def _hash(self, start: int, end: int) -> str:
        return xxhash.xxh3_64_hexdigest(self._read(start, end))


def _replaced(name: str, why: str) -> InputReplaced:
    return InputReplaced(
        f"{name.rpartition('/')[2]} is not what was read before",
        where=name,
        why=why,
        do="bring the old one back, or write the new one into another dataset",
    )


class LineInput(Input):
    """JSON lines, cut at newlines: piece k ends at the first newline from k * piece_bytes on."""

    unit = "bytes"

    def __init__(self, name: str, number: int, kind: str, config: ReadConfig) -> None:
        super().__init__(name, number, kind, config)
        self.size = self.ranges.size

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        size, step = self.ranges.size, self.config.piece_bytes
        while start < size:
            end = self._next_line((start // step + 1) * step)
            held = min(end - start, step + self.config.max_document_bytes)
            yield Piece(
                self.number, "jsonl", self.name, start, end, held, at=start,
                version=self.ranges.version,
            )  # fmt: skip
            start = end

    def check_end(self) -> None:
        with contextlib.closing(open_ranges(self.name)) as now:
            if now.size > self.ranges.size:
                raise InputReplaced(
                    f"{self.name.rpartition('/')[2]} has grown while it was read",
                    where=self.name,
                    why=f"it had {self.ranges.size:,} bytes, and has {now.size:,} now",
                    do="run again when it is complete, which resumes here; penstock shard follows "
                    "a file that grows",
                )

    def prove(self, to: int) -> dict[str, str | int]:
        head = self._hash(0, min(to, _PROOF_BYTES))
        version = f"{self.ranges.size}-{self.ranges.version}"
        return {"head": head, "tail": self._hash(max(0, to - _PROOF_BYTES), to), "version": version}

    def check(self, to: int, proof: dict[str, str | int]) -> bool:
        size = self.ranges.size
        if size < to:
            raise _replaced(self.name, f"it has {size:,} bytes, and {to:,} were read from it")
        is_same = super().check(to, proof)
        if 0 < to < size and self._read(to - 1, to) != b"\n":
            raise _replaced(self.name, f"it went on at byte {to:,}, within its last line")
        # who only adds lines changes nothing that was read
        return is_same or size > int(str(proof["version"]).partition("-")[0])

    def more(self, to: int) -> str:
        size = self.ranges.size
        return f"it has {size:,} bytes, and {to:,} were read" if size > to else ""

    def _next_line(self, at: int) -> int:
        """The beginning of the first line after `at`, or the end."""
        size, look = self.ranges.size, _LOOK_BYTES
        while at < size:
            found = self._read(at, min(size, at + look)).find(b"\n")
            if found >= 0:
                return at + found + 1
            at += look
            look = min(2 * look, 1 << 20)
        return size


class PackedLineInput(Input):
    """Compressed JSON lines: decompressed here, so that the text travels with its piece."""

    unit = "bytes"

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        config, suffix = self.config, os.path.splitext(self.name)[1]
        packed = io.BufferedReader(Stretch(self.ranges), 1 << 20)
        reader = inflate(packed, self.name, suffix, start)
        file = LineFile(
            Path(self.name),
            offset=start,
            max_line_bytes=config.max_document_bytes,
            block_bytes=config.piece_bytes,
            reader=reader,
        )
        with contextlib.closing(file):
            while (block := file.next_block() or file.fragment()) is not None:
                at, end = block.offset + block.start, block.end
                if block.stop == block.start:
                    if not block.too_long:
                        continue  # within a line that is too long
                    at = end = block.too_long[-1].end
                data = block.data[block.start : block.start + end - at].tobytes()
                yield Piece(
                    self.number, "jsonl", self.name, start, end, len(data), at=at, data=data,
                    refusals=tuple(refuse_line(file, reject) for reject in block.too_long),
                )  # fmt: skip
                start = end


def _runs(
    config: ReadConfig, start: int, units: Iterable[tuple[str, int]]
) -> Iterator[tuple[int, int, int]]:
    """Files or members, as (name, bytes), that are read together: (first, end, bytes) of each run.

    What a compressed one becomes is known when it is read. It counts as four times its bytes, and
    a run with one in it may become twice `piece_bytes`: what is more is left as a rest.
    """
    first, end, held, least = start, 0, 0, 0
    for end, (name, size) in enumerate(units, 1):
        if end > start:
            if is_packed(name):
                size = min(4 * size, config.max_document_bytes)
                least = 2 * config.piece_bytes
            held += size if size <= config.max_document_bytes else 0
            if held >= config.piece_bytes or end - first >= _MAX_NAMES:
                yield first, end, max(held, least)
                first, held, least = end, 0, 0
    if end > first:
        yield first, end, max(held, least)


Entry = tuple[str, int, str, bytes, str]
"""A file or member: what follows the input's name, bytes, "reason why" of a refusal, data, and
what tells the version of a file."""


def _piles(
    origin: Input, start: int, entries: Iterable[Entry], *, is_text: bool = False
) -> Iterator[Piece]:
    """Pieces of whole files, or of members that travel with them."""
    most = origin.config.max_document_bytes
    held: list[tuple[int, Entry]] = []

    def units() -> Iterator[tuple[str, int]]:
        for unit, (name, size, flaw, data, version) in enumerate(entries):
            whole = "" if is_text else origin.name + name
            if unit >= start:
                # the bytes of a compressed member travel with the piece, those of a file do not
                if not flaw and size > most and (name.startswith("#") or not is_packed(whole)):
                    flaw, data = "document_too_long", b""
                held.append((unit, (name, size, flaw, data, version)))
            yield ("", 0) if flaw else (whole, size)

    for first, end, total in _runs(origin.config, start, units()):
        yield Piece(
            origin.number, "files", origin.name, first, end, total,
            names=tuple((name, size, unit) for unit, (name, size, flaw, *_) in held if not flaw),
            refusals=tuple(
                _refusal(flaw, unit, origin.name + name)
                for unit, (name, _, flaw, *_) in held
                if flaw and flaw != "blank"
            ),
            blank=tuple(unit for unit, entry in held if entry[2] == "blank"),
            is_text=is_text,
            version=xxhash.xxh3_64_hexdigest("\n".join(entry[4] for _, entry in held).encode()),
            data=b"".join(entry[3] for _, entry in held),
        )  # fmt: skip
        held.clear()


def _refusal(flaw: str, unit: int, source: str) -> Refusal:
    reason, _, why = flaw.partition(" ")
    return Refusal(reason, unit, unit + 1, 0, why, shown(source))


_NO_FILES: Final = (xxhash.xxh3_64_intdigest(b""), 0, "", xxhash.xxh3_64_intdigest(b""))


class TreeInput(Input):
    """The files of a directory, or of a prefix in a bucket, or one file."""

    def __init__(self, name: str, number: int, kind: str, config: ReadConfig) -> None:
        super().__init__(name, number, kind, config)
        self._proofs: dict[int, tuple[int, int, str, int]] = {}
        """By how many files: hashes of names and sizes, bytes, the last name, of versions."""
        self._latest = (0, "")
        """When a file was changed last, and which."""
        if not is_url(name) and not os.path.isdir(name):
            self.size = self.ranges.size
        elif is_url(name) and open_bucket(name)[1]:
            with contextlib.suppress(InputMissing):
                self.size = self.ranges.size

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        yield from _piles(self, start, self._walk())

    def prove(self, to: int) -> dict[str, str | int]:
        """The names and sizes before `to`, their sum, the last name; of a single file its ends."""
        if self.size is not None:
            return super().prove(to)
        count = to
        if to and to not in self._proofs:
            count = sum(1 for _ in itertools.islice(self._walk(), to))
        names, size, last, versions = self._proofs[count] if count else _NO_FILES
        return {
            "names": f"{names:016x}" if count == to else f"only {count} files",
            "bytes": size,
            "last": shown(last),
            "version": f"{versions:016x}",
        }

    def _same(self) -> str:
        when, last = self._latest
        told = f" ({shown(last)} was changed last)" if when else ""
        return f"names and sizes are the same{told}"

    def more(self, to: int) -> str:
        if self.size is not None:
            return ""
        count = sum(1 for _ in self._walk())
        return f"it has {count:,} files, and {to:,} were read" if count > to else ""

    def left_out(self) -> Counter[str]:
        if self.size is not None:
            return Counter()
        walk = walk_bucket if is_url(self.name) else walk_folder
        return _left_out((found[0] for found in walk(self.name)), self.config)

    def _walk(self) -> Iterator[Entry]:
        """The files that are meant; the proof up to each of the latest is kept."""
        if self.size is not None:
            yield "", self.size, "", b"", self.ranges.version
            return
        suffixes = self.config.suffixes
        walk = walk_bucket if is_url(self.name) else walk_folder
        names, versions, total, count = xxhash.xxh3_64(), xxhash.xxh3_64(), 0, 0
        for relative, size, flaw, version in walk(self.name):
            if suffixes is None or suffix_of(relative) in suffixes:
                names.update(os.fsencode(relative) + b"\0%d\n" % size)
                versions.update(os.fsencode(f"{relative}\0{version}\n"))
                if version.isdigit():
                    self._latest = max(self._latest, (int(version), relative))
                count, total = count + 1, total + size
                self._proofs[count] = names.intdigest(), total, relative, versions.intdigest()
                self._proofs.pop(count - _KEPT_PROOFS, None)
                yield "/" + relative, size, flaw, b"", version


class ParquetInput(Input):
    """Rows of a parquet file: whole row groups together, and large ones by ranges of rows."""

    unit = "rows"

    def __init__(self, name: str, number: int, kind: str, config: ReadConfig) -> None:
        super().__init__(name, number, kind, config)
        self._groups: list[tuple[int, int]] = []
        """Rows and bytes of text of each row group."""
        with open_parquet(name) as file:
            _check_column(name, file.schema_arrow, config.text_field)
            for k in range(file.num_row_groups):
                group = file.metadata.row_group(k)
                columns = [group.column(c) for c in range(group.num_columns)]
                text = [c for c in columns if c.path_in_schema == config.text_field]
                self._groups.append((group.num_rows, sum(c.total_uncompressed_size for c in text)))
        self.size = sum(size for _, size in self._groups)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        for first, end, size in self._ranges_of_rows():
            if end > start:
                start = max(first, start)
                yield Piece(
                    self.number, "parquet", self.name, start, end, size,
                    version=self.ranges.version,
                )  # fmt: skip

    def _ranges_of_rows(self) -> Iterator[tuple[int, int, int]]:
        step = self.config.piece_bytes
        first = end = held = 0
        for rows, size in self._groups:
            if end > first and held + size > step:
                yield first, end, held
                first, held = end, 0
            if size > _GROUP_PIECES * step:
                # each part decodes the group from its beginning: few parts, not small ones
                parts = min(rows, -(-size // (_GROUP_PIECES * step)))
                for k in range(parts):
                    cut = (end + rows * k // parts, end + rows * (k + 1) // parts)
                    yield *cut, size // parts
                first = end = end + rows
                continue
            end += rows
            held += size
        if end > first:
            yield first, end, held


def _check_column(name: str, schema: Any, column: str) -> None:
    import pyarrow as pa

    if column not in schema.names:
        near = difflib.get_close_matches(column, schema.names, 1)
        raise BadInput(
            f"{os.path.basename(name)} has no column {column!r}",
            where=name,
            do=(f"did you mean {near[0]}? " if near else "")
            + f"choose from {', '.join(schema.names)}",
        )
    if schema.names.count(column) > 1:
        raise BadInput(
            f"{os.path.basename(name)} has {schema.names.count(column)} columns {column!r}",
            where=name,
            why="which of them holds the documents is not known",
            do="rename all but one of them",
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    texts = (pa.string(), pa.large_string(), pa.string_view())
    if kind not in (*texts, pa.binary(), pa.large_binary(), pa.binary_view()):
        raise BadInput(
            f"column {column!r} of {os.path.basename(name)} is {kind}",
            where=name,
            do="name a text column",
        )


class ZipInput(Input):
    """Members of a zip archive, in the order of its directory."""

    def __init__(self, name: str, number: int, kind: str, config: ReadConfig) -> None:
        super().__init__(name, number, kind, config)
        self._members = [(i.orig_filename, i.file_size) for i in open_zip(name).infolist()]
        self.size = sum(size for _, size in self._members)
        if self.size > max(RATIO_GRACE_BYTES, MAX_RATIO * self.ranges.size):
            raise InputDamaged(
                f"{os.path.basename(name)} inflates beyond reason",
                where=f"{name}, {self.ranges.size:,} compressed bytes",
                why=f"its members claim {self.size:,} bytes, a ratio over {MAX_RATIO}",
                do="if this is really text, unpack it yourself and give the directory",
            )

    def left_out(self) -> Counter[str]:
        members = open_zip(self.name).infolist()
        return _left_out((m.orig_filename for m in members if not m.is_dir()), self.config)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        for first, end, held in _runs(self.config, start, self._members):
            version = self.ranges.version
            yield Piece(self.number, "zip", self.name, first, end, held, version=version)


class TarInput(Input):
    """Members of a tar: workers read a plain one; of others the members travel with the piece."""

    def __init__(self, name: str, number: int, kind: str, config: ReadConfig) -> None:
        super().__init__(name, number, kind, config)
        self._packed = kind_of(name)[1]
        self.size = None if self._packed else self.ranges.size

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        if self._packed or is_url(self.name):
            yield from _piles(self, start, self._members(start))
            return
        headers: list[int] = []
        for first, end, held in _runs(self.config, start, self._headers(start, headers)):
            yield Piece(
                self.number, "tar", self.name, first, end, held, at=headers[0],
                version=self.ranges.version,
            )  # fmt: skip
            headers.clear()

    def left_out(self) -> Counter[str]:
        members = walk_tar(open_forward(self.ranges, self._packed), self.name, None)
        return _left_out((m.name for m in members if m.flaw != "blank"), self.config)

    def _headers(self, start: int, headers: list[int]) -> Iterator[tuple[str, int]]:
        for unit, member in enumerate(walk_tar(Stretch(self.ranges), self.name, None)):
            if member.at + member.size > self.ranges.size:
                raise tar_damaged(self.name, "it ends within a member", member.header)
            if unit >= start:
                headers.append(member.header)
            yield member.name, member.size

    def _members(self, start: int) -> Iterator[Entry]:
        file = open_forward(self.ranges, self._packed)
        for unit, member in enumerate(walk_tar(file, self.name, self.config.suffixes)):
            data = b""
            if unit >= start and not member.flaw and member.size <= self.config.max_document_bytes:
                data = file.read(member.size) or b""
                if len(data) != member.size:
                    raise tar_damaged(self.name, "it ends within a member", member.at)
            flaw = f"{member.flaw} {member.why}".strip()
            yield "#" + member.name, member.size, flaw, data, ""


def _left_out(names: Iterable[str], config: ReadConfig) -> Counter[str]:
    found: Counter[str] = Counter()
    for name in names:
        if config.suffixes is None or suffix_of(name) in config.suffixes:
            return Counter()
        found[suffix_of(name)] += 1
    return found


class ItemInput(Input):
    """What a plugin reads from a file, item by item."""

    unit = "items"

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        file = io.BufferedReader(open_forward(self.ranges, kind_of(self.name)[1]), 1 << 20)
        return _piles(self, start, (_entry(*item) for item in self._items(file)), is_text=True)

    def _items(self, file: BinaryIO) -> Iterator[tuple[str | bytes, str]]:
        count = 0
        try:
            for text, source in plugins.find("format", self.kind).make(file):
                yield text, source
                count += 1
        except (PenstockError, GeneratorExit):
            raise
        except Exception as error:  # code of others: whatever it raises
            raise BadInput(
                f"the format {self.kind!r} could not read {os.path.basename(self.name)}",
                where=f"{self.name}, after {count:,} items",
                why=f"{type(error).__name__}: {error}",
                do="mend the plugin or the file",
            ) from error


def _entry(text: str | bytes, source: str) -> Entry:
    if not is_printable(source):
        return "#" + source, 0, "bad_name", b"", ""
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        return "#" + source, 0, "lone_surrogate", b"", ""
    return "#" + source, len(data), "", data, ""


def open_input(name: str, number: int, config: ReadConfig) -> Input:
    """An input by its name: what it is, its suffix says."""
    kind, packed = kind_of(name)
    if kind == "jsonl" and packed:
        return PackedLineInput(name, number, kind, config)
    if kind in ("parquet", "zip") and packed:
        raise BadInput(
            f"{os.path.basename(name)} is a compressed {kind} file",
            where=name,
            why="it is compressed inside already, and must be read anywhere",
            do="decompress it first",
        )
    return _INPUTS.get(kind, ItemInput)(name, number, kind, config)


_INPUTS: Final[dict[str, type[Input]]] = {
    "jsonl": LineInput,
    "parquet": ParquetInput,
    "files": TreeInput,
    "zip": ZipInput,
    "tar": TarInput,
}


def kind_of(name: str) -> tuple[str, str]:
    """The format of an input, and the suffix of what compresses it.

    >>> kind_of("a/b.jsonl.gz"), kind_of("notes.txt")
    (('jsonl', '.gz'), ('files', ''))
    """
    if not is_url(name) and os.path.isdir(name):
        return "files", ""
    for short, long in _SHORT.items():
        if name.lower().endswith(short):
            name = name[: -len(short)] + long
    suffix = os.path.splitext(name)[1]
    packed = suffix if suffix in COMPRESSED else ""
    stem = name.removesuffix(packed).lower()
    for kind in plugins.names("format"):
        if stem.endswith(tuple(plugins.find("format", kind).about.get("suffixes", ()))):
            return kind, packed
    return "files", ""
