"""What was given to read: share it out in pieces, and know it again later.

In:    names of inputs
Out:   the pieces of each, lazily, from any unit on; of a file that grows, as they come
Keeps: pieces tile an input in order, never cut a document, and depend on the input alone;
       the order of units depends on the input, its number and a seed; what was read can be told
       from what stands there now
Never: follows a link to a directory, leaves a file out in silence; holds more than one piece,
       beside a list of what is shuffled, or one window of what can only be streamed

    name ─▶ find.expand_inputs ─▶ open_input ─▶ pieces ─▶ (a worker) formats.read_piece

Files of trees, members of zips and of plain tars on disk are shuffled whole. Members of tars that
are compressed or in a bucket are shuffled within windows of the stream. Lines, rows and the items
of plugins keep their order. With order="path" nothing is shuffled, and a tree is not listed first.
"""

import contextlib
import functools
import io
import itertools
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import xxhash

from penstock import plugins
from penstock.arrays import Bytes, Floats, Int64s, offsets_of
from penstock.errors import (
    BadInput,
    InputDamaged,
    InputMissing,
    InputReplaced,
    PenstockError,
)
from penstock.ingest.archives import Member, open_zip, tar_damaged, walk_tar
from penstock.ingest.find import (
    NAME_BYTES,
    Found,
    is_packed,
    is_printable,
    refused_as,
    shown,
    suffix_of,
    walk_bucket,
    walk_folder,
)
from penstock.ingest.formats import (
    Piece,
    Read,
    ReadConfig,
    Rest,
    open_parquet,
    read_piece,
    refuse_line,
)
from penstock.ingest.lines import LineFile, done_marker, read_done
from penstock.ingest.open import (
    COMPRESSED,
    MAX_RATIO,
    RATIO_GRACE_BYTES,
    PlainBytes,
    Ranges,
    Stretch,
    guess_text_bytes,
    inflate,
    is_url,
    look_at,
    missing,
    open_bucket,
    open_forward,
    open_ranges,
    replaced,
)
from penstock.options import suggest
from penstock.records import Refusal

__all__ = [
    "Input", "Piece", "Read", "ReadConfig", "Rest", "Waiting", "kind_of", "open_input",
    "open_lines", "read_piece",
]  # fmt: skip

_PROOF_BYTES: Final = 1 << 16
_LOOK_BYTES: Final = 1 << 12
_SURVEY_BYTES: Final = 1 << 14
_SURVEYED_BYTES: Final = 1 << 18
"""What is counted in steps of that, and read together."""
_MAX_NAMES: Final = 4096
"""Files in a piece, however small they are."""
_KEPT_PROOFS: Final = 1 << 18
"""Files of a tree whose proofs are at hand: more than all pieces in flight have."""
_WINDOW_BYTES: Final = 32 << 20
"""Of a tar that can only be streamed: what is shuffled together, and held."""
_MARK_BYTES: Final = 4 << 20
"""How far apart the units are of which it is noted where in the stream they are."""
_GROUP_PIECES: Final = 8
"""A row group of more pieces than this is cut."""
_NOTICE_S: Final = 10.0
"""After how much silence of an input that may grow people are told, the first time."""
_SHORT: Final = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}


AMONG: Final = "among"
"""In a proof: tells the sizes of all inputs that are read together."""


class Input:
    """One input: what it is, its pieces, and what shows that it is still the same."""

    unit = "members"
    end = "complete"
    """How its end is known, once it is."""
    proves_content = True
    """Whether the log holds a sum of what was read, beside `prove`."""
    streams = 0
    """How many like it may be read side by side, where each is open, with what it has inflated; 0
    for those that are read anywhere."""
    is_alone = True
    """Whether no other input is read with it."""

    def __init__(
        self, name: str, number: int, kind: str, config: ReadConfig, salt: int = 0
    ) -> None:
        """`salt` decides the order of what is shuffled."""
        self.name = name
        self.number = number
        self.kind = kind
        self.config = config
        self.salt = salt
        self.size: int | None = None
        """Bytes in it, for the progress, where that is known without reading it."""
        self.passed: int | None = None
        """Bytes of its file that were read so far, where they are decompressed on the way."""
        self._ranges: Ranges | None = None
        self._hashes: dict[tuple[int, int], str] = {}
        self._look()

    def _look(self) -> None:
        """See what it is: its size, and what else is known without reading it."""

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """What is to be read, from unit `start` on."""
        raise NotImplementedError

    def follow(self, start: int = 0) -> "Iterator[Piece | Waiting]":
        """The same; between them, where it may still grow, that nothing is new."""
        return self.pieces(start)

    @property
    def is_shuffled(self) -> bool:
        return self.config.order == "shuffled"

    @property
    def weight(self) -> int:
        """About how many bytes it has: its share beside other inputs."""
        raise NotImplementedError

    def fractions(self, units: Int64s) -> Floats:
        """How much of it stands before each of these units; of an estimate it may be more than all.

        Of units that were handed out, or come next; it does not depend on how they were read.
        """
        return units / max(1, self.units)

    def survey(self) -> None:
        """Look at all of it, so that fractions go by documents where they go by bytes else."""

    @property
    def units(self) -> int:
        """How many it has, or about how many; 0 where that is not known before it was read."""
        return 0

    def files(self) -> Iterator[tuple[str, int, str]]:
        """The files that it is: paths, bytes, and what tells their versions."""
        yield self.name, self.ranges.size, self.ranges.version

    def prove(self, to: int) -> dict[str, str | int]:
        """What shows later that the part before `to` is the same: here, the file's two ends."""
        size = self.ranges.size
        return {
            "bytes": size,
            "head": self._hash_once(0, min(size, _PROOF_BYTES)),
            "tail": self._hash_once(max(0, size - _PROOF_BYTES), size),
            "version": self.ranges.version,
        }

    def check(self, to: int, proof: dict[str, str | int]) -> bool:
        """Raise InputReplaced if the part before `to` is not the one that `proof` is of.

        False if it was written to since: then it may still be the same, and reading it tells.
        """
        found = self.prove(to)
        # what an older penstock did not note is not asked for
        asked = proof.keys() - {"version", "content", AMONG}
        differ = [key for key in proof if key in asked and found.get(key) != proof[key]]
        if differ:
            told = [f"{key} {found.get(key)!r} now, {proof[key]!r} before" for key in differ]
            raise _replaced(self.name, f"up to {self.unit} {to:,}: {'; '.join(told)}")
        return proof.get("version") in (None, found["version"])

    def still_there(self) -> None:
        """Raise InputReplaced if another file stands where what is read stood."""

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
        self._hashes.clear()

    @property
    def ranges(self) -> Ranges:
        if self._ranges is None:
            self._ranges = open_ranges(self.name)
        return self._ranges

    def _read(self, start: int, end: int) -> bytes:
        buffer = bytearray(end - start)
        got = self.ranges.read_into(start, memoryview(buffer))
        return bytes(memoryview(buffer)[:got])

    def _hash(self, start: int, end: int) -> str:
        return xxhash.xxh3_64_hexdigest(self._read(start, end))

    def _hash_once(self, start: int, end: int) -> str:
        """The same of what every record asks for: a bucket is asked once for an open input."""
        if (start, end) not in self._hashes:
            self._hashes[start, end] = self._hash(start, end)
        return self._hashes[start, end]


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

    def _look(self) -> None:
        self.size = self._whole = self.ranges.size
        self._lines = np.zeros(0, np.int64)
        """How many lines stand before byte 0, _SURVEY_BYTES and so on, if they were counted."""

    @property
    def weight(self) -> int:
        return self._whole

    @property
    def units(self) -> int:
        return self._whole

    def fractions(self, units: Int64s) -> Floats:
        if not len(self._lines):
            return super().fractions(units)
        marks = np.minimum(np.arange(len(self._lines)) * _SURVEY_BYTES, self._whole)
        return np.interp(units, marks, self._lines) / max(1, int(self._lines[-1]))

    def survey(self) -> None:
        if not is_url(self.name):  # it would be fetched twice
            counts: list[int] = []
            for at in range(0, self._whole, _SURVEYED_BYTES):
                block = self._read(at, min(self._whole, at + _SURVEYED_BYTES))
                marks = range(0, len(block), _SURVEY_BYTES)
                counts += [block.count(b"\n", mark, mark + _SURVEY_BYTES) for mark in marks]
            self._lines = offsets_of(counts)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        size, step = self._whole, self.config.piece_bytes
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
            if now.size > self._whole:
                do = "run again when it is complete, which resumes here"
                if not self.is_alone:
                    do = "write to a new directory when it is complete"
                raise InputReplaced(
                    f"{self.name.rpartition('/')[2]} has grown while it was read",
                    where=self.name,
                    why=f"it had {self._whole:,} bytes, and has {now.size:,} now",
                    do=do + "; penstock shard follows a file that grows",
                )

    def prove(self, to: int) -> dict[str, str | int]:
        head = (self._hash if to < _PROOF_BYTES else self._hash_once)(0, min(to, _PROOF_BYTES))
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
        size, look = self._whole, _LOOK_BYTES
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
    streams = 8

    @functools.cached_property
    def weight(self) -> int:
        return guess_text_bytes(self.ranges, os.path.splitext(self.name)[1])

    @property
    def units(self) -> int:
        return self.weight

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
                self.passed = packed.tell()
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


@dataclass(frozen=True, slots=True)
class Waiting:
    """Instead of a piece: an input that may still grow has nothing new."""

    silent_s: float
    """For how long."""
    message: str = ""
    """What to tell people, now and then."""


class GrowingLines(Input):
    """JSON lines that may still be written: pieces of whole lines come while the file grows.

    Silence is not the end: a marker beside the file says it, or who gave the input.
    """

    unit = "bytes"
    proves_content = False

    def __init__(
        self, name: str, number: int, config: ReadConfig, *, complete: bool,
        until_idle_s: float | None, wait_s: float,
    ) -> None:  # fmt: skip
        super().__init__(name, number, "jsonl", config)
        self._path = Path(name)
        self._complete = complete
        self._until_idle_s = until_idle_s
        self._wait_s = wait_s
        self._proof: dict[str, str | int] = {}
        self._file: PlainBytes | None = None
        self._searched = 0
        """No newline stands between the last piece and this byte."""

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        return (piece for piece in self.follow(start) if isinstance(piece, Piece))

    def follow(self, start: int = 0) -> Iterator[Piece | Waiting]:
        yield from self._wait_for_file()
        file = self._file = self._file or self._open(start)
        self._searched = grown_to = start
        since, notice_s = time.monotonic(), _NOTICE_S
        while True:
            # Asked before looking: what was written before the marker is then read after it.
            end = self._known_end(file)
            self.size = size = file.size()
            while (to := self._whole_lines(file, start, size)) > start:
                yield self._piece(file, start, to)
                start = to
            file.still_there()
            silent_s = time.monotonic() - since
            if size > grown_to:  # also within a line that has not ended yet
                grown_to, since, notice_s, silent_s = size, time.monotonic(), _NOTICE_S, 0.0
            if end is None and self._until_idle_s is not None and silent_s >= self._until_idle_s:
                end = f"until-idle {self._until_idle_s:g}s"
            if end is not None:
                self.end = end
                if size > start:  # the last line has no newline
                    yield self._piece(file, start, size)
                return
            message = ""
            if silent_s >= notice_s:
                notice_s *= 2
                message = (
                    f"{self.name} has not grown for {silent_s:.0f} s; waiting for more, or for "
                    f"{done_marker(self._path).name} with its size (it is complete: --complete; "
                    "silence is its end: --until-idle 60s)"
                )
            yield Waiting(silent_s, message)

    def prove(self, to: int) -> dict[str, str | int]:
        assert self._file is not None
        return self._file.prove(to)

    def check(self, to: int, proof: dict[str, str | int]) -> bool:
        self._proof = proof
        if look_at(self._path) is not None:  # else it is waited for, and checked when it is there
            self._file = self._open(to)
        return True

    def still_there(self) -> None:
        if self._file is not None:
            self._file.still_there()

    def more(self, to: int) -> str:
        found = look_at(self._path)
        if found is None or found.st_size <= to:
            return ""
        return f"it has {found.st_size:,} bytes, and {to:,} were read"

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _wait_for_file(self) -> Iterator[Waiting]:
        """A producer that was started at the same time may not have made its file yet."""
        began, told = time.monotonic(), False
        while look_at(self._path) is None:
            waited_s = time.monotonic() - began
            if self._complete or waited_s >= self._wait_s:
                raise missing(self._path)
            message = ""
            if not told and waited_s >= 1:
                told, message = True, f"waiting for {missing(self._path)}"
            yield Waiting(waited_s, message)

    def _open(self, at: int) -> PlainBytes:
        file = PlainBytes(self._path, at)
        if self._proof and file.prove(at) != self._proof:
            file.close()
            raise replaced(self._path, f"the bytes before {at:,} are not those that were read")
        return file

    def _known_end(self, file: PlainBytes) -> str | None:
        if self._complete:
            return "complete: told so"
        promised = read_done(self._path)
        if promised is None:
            return None
        size = file.size()
        if promised > size:
            raise InputReplaced(
                f"{self._path.name} is shorter than its marker says",
                where=self.name,
                why=f"it has {size:,} bytes, {done_marker(self._path).name} promises {promised:,}",
                do="run its producer again, or remove the marker if it is still being written",
            )
        if 0 <= promised < size:
            return None  # left by an earlier run of a producer that has gone on since
        return "done marker"

    def _whole_lines(self, file: PlainBytes, start: int, size: int) -> int:
        """Where the last line ends that begins a piece's length from `start` on or before."""
        first = max(start, self._searched)
        middle = max(first, min(size, start + self.config.piece_bytes))
        stop, look = middle, _LOOK_BYTES
        while stop > first:
            begin = max(first, stop - look)
            found = file.read_range(begin, stop).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            stop, look = begin, min(2 * look, 1 << 20)
        for begin in range(middle, size, 1 << 20):
            found = file.read_range(begin, min(size, begin + (1 << 20))).find(b"\n")
            if found >= 0:
                return begin + found + 1
        self._searched = size
        return start

    def _piece(self, file: PlainBytes, start: int, end: int) -> Piece:
        file.pass_over(end)
        held = min(end - start, self.config.piece_bytes + self.config.max_document_bytes)
        return Piece(self.number, "jsonl", self.name, start, end, held, at=start)


class GivenPackedLines(PackedLineInput):
    """Compressed JSON lines where the text alone counts, however it is compressed."""

    end = "complete: compressed"

    def prove(self, to: int) -> dict[str, str | int]:
        return {"version": f"{self.ranges.size}-{self.ranges.version}"}

    def check(self, to: int, proof: dict[str, str | int]) -> bool:
        if look_at(Path(self.name)) is None or "version" not in proof:
            return True  # who reads on says so, and an earlier penstock noted none
        return self.prove(to) == {"version": proof["version"]}

    def refuse_content(self, to: int) -> InputReplaced:
        why = f"the bytes before {to:,} are not those that were read"
        return replaced(Path(self.name), why)


def open_lines(
    name: str, number: int, config: ReadConfig, *, complete: bool, until_idle_s: float | None,
    wait_s: float,
) -> Input:  # fmt: skip
    """JSON lines, whatever their name ends in: what is not compressed may still grow."""
    if os.path.splitext(name)[1] in COMPRESSED:
        return GivenPackedLines(name, number, "jsonl", config)
    return GrowingLines(
        name, number, config, complete=complete, until_idle_s=until_idle_s, wait_s=wait_s
    )


def _runs(
    config: ReadConfig, start: int, units: Iterable[tuple[bool, int]], first: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Files or members that are read together: (first, end, bytes) of each run.

    They are given as (is it compressed, bytes), from unit `first` on, and taken from `start` on.
    What a compressed one becomes is known when it is read. It counts as four times its bytes, and
    a run with one in it may become twice `piece_bytes`: what is more is left as a rest.
    """
    number, first, end, held, least = first, max(first, start), first, 0, 0
    for end, (packed, size) in enumerate(units, number + 1):
        if end > start:
            if packed:
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
    origin: Input, start: int, entries: Iterable[Entry], first: int = 0, *, is_text: bool = False
) -> Iterator[Piece]:
    """Pieces of whole files, or of members that travel with them; the first entry is unit `first`.

    Between two pieces it holds nothing: it may be one of many that wait for their turn.
    """
    most = origin.config.max_document_bytes
    held: list[tuple[int, Entry]] = []

    def units() -> Iterator[tuple[bool, int]]:
        for unit, (name, size, flaw, data, version) in enumerate(entries, first):
            whole = "" if is_text else origin.name + name
            if unit >= start:
                # the bytes of a compressed member travel with the piece, those of a file do not
                if not flaw and size > most and (name.startswith("#") or not is_packed(whole)):
                    flaw, data = "document_too_long", b""
                held.append((unit, (name, size, flaw, data, version)))
            yield (False, 0) if flaw else (is_packed(whole), size)

    def pile(begin: int, end: int, total: int) -> Piece:
        piece = Piece(
            origin.number, "files", origin.name, begin, end, total,
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
        return piece

    for begin, end, total in _runs(origin.config, start, units(), first):
        yield pile(begin, end, total)


def _shuffled(names: Iterable[bytes], salt: int) -> Int64s:
    """An order of these names that depends on each of them and the salt.

    Two that are the same keep their order. A name that comes to them moves no other.
    """
    return _order_of(array("Q", (xxhash.xxh3_64_intdigest(name, salt) for name in names)))


def _order_of(keys: "array[int]") -> Int64s:
    return np.argsort(np.frombuffer(keys, np.uint64), kind="stable")


def _refusal(flaw: str, unit: int, source: str) -> Refusal:
    reason, _, why = flaw.partition(" ")
    return Refusal(refused_as(reason, source), unit, unit + 1, 0, why, shown(source))


_NO_FILES: Final = (xxhash.xxh3_64_intdigest(b""), 0, "", xxhash.xxh3_64_intdigest(b""))


class TreeInput(Input):
    """The files of a directory, or of a prefix in a bucket, or one file."""

    def _look(self) -> None:
        self._proofs: dict[int, tuple[int, int, str, int]] = {}
        """By how many files: hashes of names and sizes, bytes, the last name, of versions."""
        self._latest = (0, "")
        """When a file was changed last, and which."""
        if not is_url(self.name) and not os.path.isdir(self.name):
            self.size = self.ranges.size
        elif is_url(self.name) and open_bucket(self.name)[1]:
            with contextlib.suppress(InputMissing):
                self.size = self.ranges.size

    @property
    def is_shuffled(self) -> bool:
        return super().is_shuffled and self.size is None

    @property
    def weight(self) -> int:
        return self._listing.bytes if self.size is None else self.size

    @property
    def units(self) -> int:
        return len(self._listing) if self.size is None else 1

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        if self.is_shuffled:
            yield from _piles(self, start, self._listing.entries(start), start)
        else:
            yield from _piles(self, start, self._walk())

    @functools.cached_property
    def _listing(self) -> "_Listing":
        names, versions = xxhash.xxh3_64(), xxhash.xxh3_64()
        listing, last = _Listing(self.salt), ""
        for found in self._found():
            _prove(found, names, versions)
            listing.add(found)
            last = found[-1][0]
        total = listing.bytes
        self._proofs = {len(listing): (names.intdigest(), total, last, versions.intdigest())}
        return listing

    def files(self) -> Iterator[tuple[str, int, str]]:
        if self.size is not None:
            yield from super().files()
            return
        for found in self._found():
            for name, size, _, version in found:
                yield f"{self.name}/{name}", size, version

    def prove(self, to: int) -> dict[str, str | int]:
        """The names and sizes before `to`, their sum, the last name; of a single file its ends.

        Of a tree that is shuffled, those of all files: with one more, others stand before `to`.
        """
        if self.size is not None:
            return super().prove(to)
        if self.is_shuffled:
            count = len(self._listing)
            names, size, _, versions = self._proofs[count]
            told: dict[str, str | int] = {"files": count, "bytes": size}
            return {**told, "names": f"{names:016x}", "version": f"{versions:016x}"}
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
        count = len(self._listing) if self.is_shuffled else sum(1 for _ in self._walk())
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
        names, versions, total, count = xxhash.xxh3_64(), xxhash.xxh3_64(), 0, 0
        for found in self._found():
            for file in found:
                relative, size, flaw, version = file
                _prove([file], names, versions)
                count, total = count + 1, total + size
                self._proofs[count] = names.intdigest(), total, relative, versions.intdigest()
                self._proofs.pop(count - _KEPT_PROOFS, None)
                yield "/" + relative, size, flaw, b"", version

    def _found(self) -> Iterator[list[Found]]:
        """The files of a tree that are meant, some thousands at a time."""
        suffixes = self.config.suffixes
        files = walk_bucket(self.name) if is_url(self.name) else walk_folder(self.name)
        while found := list(itertools.islice(files, _MAX_NAMES)):
            if suffixes is not None:
                found = [file for file in found if suffix_of(file[0]) in suffixes]
            changed = [(int(when), name) for name, _, _, when in found if when.isdigit()]
            self._latest = max([self._latest, *changed])
            if found:
                yield found


def _prove(found: list[Found], names: xxhash.xxh3_64, versions: xxhash.xxh3_64) -> None:
    """Put files into the hashes of names and sizes, and of versions."""
    told = "".join([f"{name}\0{size}\n" for name, size, _, _ in found])
    names.update(told.encode(*NAME_BYTES))
    told = "".join([f"{name}\0{version}\n" for name, _, _, version in found])
    versions.update(told.encode(*NAME_BYTES))


class _Listing:
    """The files of a tree, to be taken in a shuffled order.

    A file takes its path and about 50 bytes, where objects would take 300 more: a tree of ten
    million files takes 1 GB.
    """

    def __init__(self, salt: int) -> None:
        self.bytes = 0
        self._salt = salt
        self._told = bytearray()
        self._ends = array("q", [0])
        self._keys = array("Q")

    def add(self, found: list[Found]) -> None:
        """More files, in the order of the tree."""
        raw = [f"/{name}".encode(*NAME_BYTES) for name, _, _, _ in found]
        self._keys.extend([xxhash.xxh3_64_intdigest(name, self._salt) for name in raw])
        lines = [
            name + f"\0{size}\0{flaw}\0{version}".encode(*NAME_BYTES)
            for name, (_, size, flaw, version) in zip(raw, found, strict=True)
        ]
        ends = itertools.accumulate(map(len, lines), initial=self._ends.pop())
        self._ends.extend(ends)
        self._told += b"".join(lines)
        self.bytes += sum([size for _, size, _, _ in found])

    @functools.cached_property
    def _order(self) -> Int64s:
        return _order_of(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def entries(self, start: int) -> Iterator[Entry]:
        """Those from a place in the order on."""
        for first in range(start, len(self), _MAX_NAMES):
            for k in self._order[first : first + _MAX_NAMES].tolist():
                told = self._told[self._ends[k] : self._ends[k + 1]].decode(*NAME_BYTES)
                name, size, flaw, version = told.rsplit("\0", 3)
                yield name, int(size), flaw, b"", version


class ParquetInput(Input):
    """Rows of a parquet file: whole row groups together, and large ones by ranges of rows."""

    unit = "rows"

    def _look(self) -> None:
        self._groups: list[tuple[int, int]] = []
        """Rows and bytes of text of each row group."""
        with open_parquet(self.name) as file:
            _check_column(self.name, file.schema_arrow, self.config.text_field)
            for k in range(file.num_row_groups):
                group = file.metadata.row_group(k)
                columns = [group.column(c) for c in range(group.num_columns)]
                text = [c for c in columns if c.path_in_schema == self.config.text_field]
                self._groups.append((group.num_rows, sum(c.total_uncompressed_size for c in text)))
        self.size = self._whole = sum(size for _, size in self._groups)
        self._rows = sum(rows for rows, _ in self._groups)

    @property
    def weight(self) -> int:
        return self._whole

    @property
    def units(self) -> int:
        return self._rows

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
        raise BadInput(
            f"{os.path.basename(name)} has no column {column!r}",
            where=name,
            do=suggest(column, schema.names),
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
    """Members of a zip archive, shuffled or in the order of its directory."""

    def _look(self) -> None:
        infos = open_zip(self.name).infolist()
        self._members = [(is_packed(info.orig_filename), info.file_size) for info in infos]
        self._order: Int64s | None = None
        if self.is_shuffled:
            self._order = _shuffled((os.fsencode(info.orig_filename) for info in infos), self.salt)
        self.size = self._whole = sum(size for _, size in self._members)
        if self.size > max(RATIO_GRACE_BYTES, MAX_RATIO * self.ranges.size):
            raise InputDamaged(
                f"{os.path.basename(self.name)} inflates beyond reason",
                where=f"{self.name}, {self.ranges.size:,} compressed bytes",
                why=f"its members claim {self.size:,} bytes, a ratio over {MAX_RATIO}",
                do="if this is really text, unpack it yourself and give the directory",
            )

    def left_out(self) -> Counter[str]:
        members = open_zip(self.name).infolist()
        return _left_out((m.orig_filename for m in members if not m.is_dir()), self.config)

    @property
    def weight(self) -> int:
        return self._whole

    @property
    def units(self) -> int:
        return len(self._members)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        order, units = self._order, iter(self._members)
        if order is not None:
            units = (self._members[k] for k in order.tolist())
        for first, end, held in _runs(self.config, start, units):
            version = self.ranges.version
            members = () if order is None else tuple(order[first:end].tolist())
            yield Piece(
                self.number, "zip", self.name, first, end, held, members=members, version=version
            )


class StreamInput(Input):
    """What is read from its beginning on alone: where each unit is, is known when it was read."""

    def _look(self) -> None:
        self._packed = kind_of(self.name)[1]
        self._marks, self._places = [0], [0]
        """Units, and how many bytes of the stream stand before each."""

    @functools.cached_property
    def weight(self) -> int:
        if self._packed:
            return guess_text_bytes(self.ranges, self._packed)
        return self.ranges.size

    def fractions(self, units: Int64s) -> Floats:
        return np.interp(units, self._marks, self._places) / max(1, self.weight)

    def _windows(
        self, entries: Iterable[tuple[int, Entry]], step: int
    ) -> Iterator[tuple[int, list[Entry]]]:
        """Stretches of about `step` bytes of the stream, as (first unit, entries).

        Entries come with the bytes before each. Where a stretch ends is marked before it is handed
        out, and never again: the fractions of its units stay what they are.
        """
        self._marks, self._places = [0], [0]
        for _, found in itertools.groupby(entries, lambda entry: entry[0] // step):
            held: list[Entry] = []
            first, end = self._marks[-1], 0
            for at, entry in found:
                held.append(entry)
                end = at + entry[1]
            del entry  # else it is held until the next one is read
            self._marks.append(first + len(held))
            self._places.append(end)
            yield first, held


class TarInput(StreamInput):
    """Members of a tar: workers read a plain one; of others the members travel with the piece."""

    def _look(self) -> None:
        super()._look()
        self.size = None if self._packed else self.ranges.size
        self._is_streamed = bool(self._packed) or is_url(self.name)
        self.streams = 4 if self._is_streamed else 0

    @property
    def units(self) -> int:
        return 0 if self._is_streamed else len(self._index.order)

    def fractions(self, units: Int64s) -> Floats:
        return super().fractions(units) if self._is_streamed else units / max(1, self.units)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        if self._is_streamed and self.is_shuffled:
            for unit, window in self._windows(self._members(), _WINDOW_BYTES):
                yield from self._shuffle(start, unit, window)
            return
        if self._is_streamed:
            yield from _piles(self, start, (entry for _, entry in self._members(start)))
            return
        if self.is_shuffled:
            index, order = self._index, self._index.order
            units = ((bool(index.packed[k]), int(index.sizes[k])) for k in order.tolist())
            for first, end, held in _runs(self.config, start, units):
                yield Piece(
                    self.number, "tar", self.name, first, end, held,
                    members=tuple(index.headers[order[first:end]].tolist()),
                    version=self.ranges.version,
                )  # fmt: skip
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

    def _shuffle(self, start: int, first: int, window: list[Entry]) -> Iterator[Piece]:
        """The members of a window that begins with unit `first`."""
        order = _shuffled((os.fsencode(entry[0]) for entry in window), self.salt).tolist()
        begin = max(first, start)
        # none is held twice, nor until the last one was handed out
        chosen = (_take_out(window, k) for k in order[begin - first :])
        return _piles(self, start, chosen, begin)

    @functools.cached_property
    def _index(self) -> "_Members":
        headers, sizes, packed = array("q"), array("q"), bytearray()

        def names() -> Iterator[bytes]:
            for member in self._walk():
                headers.append(member.header)
                sizes.append(member.size)
                packed.append(is_packed(member.name))
                yield os.fsencode(member.name)

        order = _shuffled(names(), self.salt)
        return _Members(
            np.frombuffer(headers, np.int64), np.frombuffer(sizes, np.int64),
            np.frombuffer(packed, np.uint8), order,
        )  # fmt: skip

    def _headers(self, start: int, headers: list[int]) -> Iterator[tuple[bool, int]]:
        for unit, member in enumerate(self._walk()):
            if unit >= start:
                headers.append(member.header)
            yield is_packed(member.name), member.size

    def _walk(self) -> Iterator[Member]:
        for member in walk_tar(Stretch(self.ranges), self.name, None):
            if member.at + member.size > self.ranges.size:
                raise tar_damaged(self.name, "it ends within a member", member.header)
            yield member

    def _members(self, start: int = 0) -> Iterator[tuple[int, Entry]]:
        """Members of a stream, each with the bytes before it."""
        file = open_forward(self.ranges, self._packed)
        for unit, member in enumerate(walk_tar(file, self.name, self.config.suffixes)):
            data = b""
            if unit >= start and not member.flaw and member.size <= self.config.max_document_bytes:
                data = file.read(member.size) or b""
                if len(data) != member.size:
                    raise tar_damaged(self.name, "it ends within a member", member.at)
            flaw = f"{member.flaw} {member.why}".strip()
            yield member.header, ("#" + member.name, member.size, flaw, data, "")


@dataclass(frozen=True, slots=True)
class _Members:
    """The members of a tar that is read anywhere, in its order, and another order of them."""

    headers: Int64s
    sizes: Int64s
    packed: Bytes
    order: Int64s


def _take_out(held: list[Entry], k: int) -> Entry:
    entry, held[k] = held[k], ("", 0, "", b"", "")
    return entry


def _left_out(names: Iterable[str], config: ReadConfig) -> Counter[str]:
    found: Counter[str] = Counter()
    for name in names:
        if config.suffixes is None or suffix_of(name) in config.suffixes:
            return Counter()
        found[suffix_of(name)] += 1
    return found


class ItemInput(StreamInput):
    """What a plugin reads from a file, item by item."""

    unit = "items"
    streams = 8

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        file = io.BufferedReader(open_forward(self.ranges, self._packed), 1 << 20)
        entries = (_entry(*item) for item in self._items(file))
        for unit, held in self._windows(_placed(entries), _MARK_BYTES):
            if unit + len(held) > start:
                yield from _piles(self, start, held, unit, is_text=True)

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
                do="fix the plugin or the file",
            ) from error


def _placed(entries: Iterable[Entry]) -> Iterator[tuple[int, Entry]]:
    """Entries with the bytes before each."""
    at = 0
    for entry in entries:
        yield at, entry
        at += entry[1]


def _entry(text: str | bytes, source: str) -> Entry:
    if not is_printable(source):
        return "#" + source, 0, "bad_name", b"", ""
    try:
        data = text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError:
        return "#" + source, 0, "lone_surrogate", b"", ""
    return "#" + source, len(data), "", data, ""


def input_sizes(
    names: Iterable[str], open_one: Callable[[str, int], Input], *, grow: bool
) -> dict[str, int]:
    """Bytes of inputs as they lie on the disk or in a bucket, for the progress; of those that may
    `grow`, as they are now."""
    sizes: dict[str, int] = {}
    for number, name in enumerate(names):
        if grow:
            if (about := look_at(Path(name))) is not None:
                sizes[name] = about.st_size
            continue
        with (
            contextlib.suppress(PenstockError),  # who reads it says what is wrong
            contextlib.closing(open_one(name, number)) as opened,
        ):
            sizes[name] = sum(size for _, size, _ in opened.files())
    return sizes


def open_input(name: str, number: int, config: ReadConfig, seed: int = 0) -> Input:
    """An input by its name: what it is, its suffix says. The seed is for what is shuffled."""
    kind, packed = kind_of(name)
    # files of the same name in two inputs do not come at the same time
    salt = xxhash.xxh3_64_intdigest(b"order %d %d" % (seed, number))
    if kind == "jsonl" and packed:
        return PackedLineInput(name, number, kind, config, salt)
    if kind in ("parquet", "zip") and packed:
        raise BadInput(
            f"{os.path.basename(name)} is a compressed {kind} file",
            where=name,
            why="it is compressed inside already, and must be read anywhere",
            do="decompress it first",
        )
    return _INPUTS.get(kind, ItemInput)(name, number, kind, config, salt)


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
