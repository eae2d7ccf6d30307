"""What a tokenizer is trained and compared on: the documents that `penstock chunk` reads.

In:    names of files, trees, archives, globs, addresses; how to read them
Out:   work for one thread at a time: pieces of documents, and texts that are longer than a piece
Keeps: every file, line, row and member is a document, a refusal with its reason, or blank
Never: finds, opens or decodes in its own way: `ingest` does

A text file that is longer than a piece is looked at as a whole before any of it is counted: if it
is UTF-8 without a NUL it is read in ranges, side by side; if not, it is read as the one document
that the rule of decoding makes of it, or refused. One that is too long for a document
(`max_document_bytes`) is a stream: what is not UTF-8 in it becomes U+FFFD.
"""

import contextlib
import hashlib
import io
import itertools
import os
import shlex
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from penstock.errors import BadInput, InputDamaged, InputMissing, InputReplaced
from penstock.ingest.find import expand_each, is_packed
from penstock.ingest.formats import Piece, ReadConfig, read_parts
from penstock.ingest.inputs import Input, open_input
from penstock.ingest.open import (
    ByteReader,
    Stretch,
    inflate,
    is_url,
    open_forward,
    open_ranges,
    shrunk,
)
from penstock.kernels import Kernel, byte_buffer
from penstock.records import DECODINGS, Documents, Refusal
from penstock.tokenize.count_layout import INVALID

HEAD_BYTES: Final = 8 << 20
"""A text that is too long for a document is binary if these first bytes hold a NUL."""

END: Final = 1 << 62
"""The end of a compressed text, which is known when it is reached."""

_BLOCK_BYTES: Final = 1 << 20
_UNPACK: Final = {
    ".gz": "gzip -dc", ".zst": "zstd -dc", ".bz2": "bzip2 -dc", ".xz": "xz -dc", ".lz4": "lz4 -dc",
}  # fmt: skip
"""Commands that print what is compressed."""
_EXPANSION: Final = 4
"""A compressed text counts as so many times its bytes, as in `ingest`."""

clean_utf8 = Kernel(
    "penstock.tokenize.scan_kernel",
    "clean_utf8",
    "int64(uint8[::1], int64, int64, int64, uint8[::1], int64, int64[::1])",
)


@dataclass(frozen=True, slots=True)
class TextRange:
    """Bytes of a text file that is longer than a piece; no pretoken crosses their ends."""

    input: int
    path: str
    start: int
    end: int
    size: int
    """Bytes of the file."""
    version: str = ""
    """Of a text that was looked at as a whole, and is UTF-8 without a NUL."""

    @property
    def is_plain(self) -> bool:
        return bool(self.version)

    def check(self) -> None:
        """Raise InputReplaced if it is not the text that was looked at."""
        with contextlib.closing(open_ranges(self.path)) as ranges:
            if self.is_plain and ranges.version != self.version:
                raise InputReplaced(
                    f"{os.path.basename(self.path)} has changed while it was read",
                    where=self.path,
                    why=f"its version was {self.version}, and is {ranges.version} now",
                    do="run again when nobody writes to it",
                )

    @contextlib.contextmanager
    def open(self) -> Iterator[ByteReader]:
        with contextlib.closing(open_ranges(self.path)) as ranges:
            if not is_packed(self.path):
                if ranges.size < self.end:
                    raise shrunk(Path(self.path), ranges.size, self.size)
                yield Stretch(ranges, self.start, self.end)
                return
            file = io.BufferedReader(Stretch(ranges), _BLOCK_BYTES)
            suffix = os.path.splitext(self.path)[1]
            with contextlib.closing(inflate(file, self.path, suffix)) as reader:
                yield reader


Work = Piece | TextRange


@dataclass(frozen=True, slots=True)
class _Look:
    """What was seen of a text."""

    size: int
    is_plain: bool
    """Whether it is UTF-8 without a NUL."""
    is_binary: bool
    """Whether there is a NUL in its first HEAD_BYTES."""


@dataclass(slots=True)
class Tally:
    """What was read; each thread has its own."""

    documents: Counter[int] = field(default_factory=Counter)
    """By input."""
    rows: int = 0
    """Documents that are lines of JSON or rows of a table."""
    text_bytes: int = 0
    decoded: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[int, str]] = field(default_factory=Counter)
    """By input and reason."""
    samples: dict[tuple[int, str], str] = field(default_factory=dict)
    """The first of each."""

    def refuse(self, input: int, refusal: Refusal, name: str) -> None:
        key = (input, refusal.reason)
        self.refused[key] += 1
        if key not in self.samples:
            self.samples[key] = refusal.source or f"{name}, {refusal.start:,}"
            if refusal.reason == "unreadable":
                self.samples[key] += f": {refusal.sample}"

    def take(self, input: int, documents: Documents, *, rows: bool) -> None:
        self.documents[input] += len(documents)
        self.rows += len(documents) if rows else 0
        self.text_bytes += int(documents.at[-1] - documents.at[0])
        for number, count in enumerate(np.bincount(documents.decoding).tolist()):
            if count:
                self.decoded[DECODINGS[number].removesuffix("-sig")] += count

    def take_text(self, input: int) -> None:
        """A text that is read in ranges: it is one document."""
        self.documents[input] += 1
        self.decoded[DECODINGS[0]] += 1

    def reasons(self, inputs: Iterable[int] | None = None) -> dict[str, int]:
        """How many were refused for each reason, the most frequent first."""
        asked = None if inputs is None else set(inputs)
        found: Counter[str] = Counter()
        for (input, reason), count in self.refused.items():
            if asked is None or input in asked:
                found[reason] += count
        return dict(found.most_common())

    def told(self, inputs: Iterable[int] | None = None) -> str:
        """The same in words, each reason with an example; "" if nothing was refused."""
        asked = None if inputs is None else set(inputs)
        samples: dict[str, str] = {}
        for (input, reason), where in sorted(self.samples.items()):
            if asked is None or input in asked:
                samples.setdefault(reason, where)
        return ", ".join(
            f"{reason} {count:,} ({samples[reason]})"
            for reason, count in self.reasons(inputs).items()
        )

    @classmethod
    def total(cls, tallies: Iterable["Tally"]) -> "Tally":
        whole = cls()
        for tally in tallies:
            whole.documents += tally.documents
            whole.rows += tally.rows
            whole.text_bytes += tally.text_bytes
            whole.decoded += tally.decoded
            whole.refused += tally.refused
            whole.samples = {**tally.samples, **whole.samples}
        return whole


class Corpus:
    """Inputs as they were named, and the documents in them."""

    def __init__(
        self,
        names: Sequence[Any],
        read: ReadConfig,
        *,
        cut: Callable[[str, int], list[int]] = lambda path, size: [0, size],
        without: str = "",
    ) -> None:
        """`cut` says where a long text may be cut; the directory `without` is left out."""
        # what is learned and counted does not go by the order, and lists of trees take memory
        self.config = read = replace(read, order="path")
        self._cut = cut
        self.inputs: list[Input] = []
        self._without = without and os.path.realpath(without)
        self._named: list[tuple[str, range]] = []
        for name, found in zip(names, expand_each(names, without), strict=True):
            first = len(self.inputs)
            for one in found:
                opened = open_input(one, len(self.inputs), read)
                opened.close()  # it opens again: there may be more inputs than descriptors
                self.inputs.append(opened)
            self._named.append((os.fspath(name), range(first, len(self.inputs))))

    def files(self) -> Iterator[tuple[Input, str, int, str]]:
        """The files of every input, with their bytes and what tells their versions."""
        for origin in self.inputs:
            left_out = self._left_out(origin)
            with contextlib.closing(origin):
                for path, size, version in origin.files():
                    if not path.startswith(left_out):
                        yield origin, path, size, version

    def fingerprint(self) -> str:
        """A hash of the inputs: names, sizes, versions."""
        digest = hashlib.sha256()
        for _, path, size, version in self.files():
            path = path if is_url(path) else os.path.realpath(path)
            digest.update(f"{path}\0{size}\0{version}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def work(self, origin: Input) -> Generator[Work]:
        """What is to be read of an input."""
        with contextlib.closing(origin):
            for piece in origin.pieces():
                if origin.kind == "files":
                    yield from self._split(origin, piece)
                else:
                    yield piece

    def _split(self, origin: Input, piece: Piece) -> Iterator[Work]:
        """A piece of a tree, and the files in it that are longer than a piece."""
        left_out = self._left_out(origin)
        names, refusals, long = [], [], []
        for name, size, unit in piece.names:
            path = origin.name + name
            if not path.startswith(left_out):
                grown = _EXPANSION * size if is_packed(path) else size
                if grown > self.config.piece_bytes:
                    long.append(path)
                else:
                    names.append((name, size, unit))
        for refusal in piece.refusals:
            if not refusal.source.startswith(left_out):
                if refusal.reason == "document_too_long":
                    long.append(refusal.source)
                else:
                    refusals.append(refusal)
        if names or refusals:
            yield msgspec.structs.replace(piece, names=tuple(names), refusals=tuple(refusals))
        for path in long:
            yield from self._long_text(origin, path)

    def _left_out(self, origin: Input) -> tuple[str, ...]:
        if self._without:
            below = os.path.relpath(self._without, os.path.realpath(origin.name))
            if not below.startswith(os.pardir):
                return (f"{origin.name}/{below}/",)
        return ()

    def read(self, piece: Piece, tally: Tally) -> Iterator[Documents | TextRange]:
        """The documents of a piece; and a file in it that is too long once it is inflated."""
        origin = self.inputs[piece.input]
        for _, read in read_parts(piece, self.config, origin.name):
            tally.take(piece.input, read.documents, rows=piece.kind in ("jsonl", "parquet"))
            yield read.documents
            for refusal in read.refusals:
                if refusal.reason == "document_too_long" and origin.kind == "files":
                    for work in self._long_text(origin, refusal.source):
                        yield from self.read(work, tally) if isinstance(work, Piece) else [work]
                else:
                    tally.refuse(piece.input, refusal, origin.name)

    def _long_text(self, origin: Input, path: str) -> Iterator[Work]:
        """The ranges of a text, the piece that reads it as one document, or its refusal."""
        most = self.config.max_document_bytes
        with contextlib.closing(open_ranges(path)) as ranges:
            size, version = ranges.size, ranges.version
        packed = is_packed(path)
        look = END if packed else size if size <= most else min(size, HEAD_BYTES)
        reason = why = ""
        try:
            found = self._look(TextRange(origin.number, path, 0, look, size))
        except (InputDamaged, InputMissing) as error:
            reason, why = "unreadable", f"{error.what}: {error.why or error.do}"
        else:
            if max(found.size, 0 if packed else size) > most:
                version = ""
                reason = "binary" if found.is_binary else ""
            elif not found.is_plain:
                whole = ("", size, 0)
                yield Piece(origin.number, "files", path, 0, 1, found.size or size, names=(whole,))
                return
        if reason:
            refusal = Refusal(reason, 0, 1, 0, why, path)
            yield Piece(origin.number, "files", path, 0, 1, 0, refusals=(refusal,))
            return
        for start, end in itertools.pairwise([0, END] if packed else self._cut(path, size)):
            yield TextRange(origin.number, path, start, end, size, version)

    def _look(self, text: TextRange) -> "_Look":
        """Look at a text as far as a document may go."""
        raw, clean = byte_buffer(_BLOCK_BYTES), byte_buffer(3 * _BLOCK_BYTES)
        state = np.zeros(8, np.int64)
        held = size = 0
        has_nul = is_binary = False
        with text.open() as reader:
            got = 1
            while got and size <= max(HEAD_BYTES, self.config.max_document_bytes):
                got = reader.read_into(raw.data[held:_BLOCK_BYTES])
                new = raw[held : held + got]
                if got and not new.min():  # 60 GB/s: nothing beside reading it
                    has_nul = True
                    is_binary |= size + int(new.argmin()) < HEAD_BYTES
                size += got
                have = held + got
                taken = clean_utf8(raw, 0, have, got == 0, clean, 0, state)
                held = have - taken
                raw[:held] = raw[taken:have].copy()
        return _Look(size, not has_nul and not state[INVALID], is_binary)

    def check(self, tally: Tally) -> None:
        """Raise if nothing was found in something that was named."""
        for name, inputs in self._named:
            if any(tally.documents[number] for number in inputs):
                continue
            why = f"refused: {told}" if (told := tally.told(inputs)) else "it is empty"
            left_out = sum((self.inputs[number].left_out() for number in inputs), Counter[str]())
            if left_out:
                held = [f"{suffix or 'no suffix'} ({n:,})" for suffix, n in left_out.most_common(5)]
                asked = " or ".join(sorted(self.config.suffixes or ()))
                why = f"no file ends in {asked}: there are {', '.join(held)}"
            do = "leave it out, or say what to read in it: --text_field, --suffixes"
            row, found_in = self._first_row(inputs)
            if row:
                why += f"; the first row has {', '.join(map(repr, row))}"
                do = _how_to_read(row, found_in) or do
            raise BadInput(
                f"{os.path.basename(name.rstrip('/'))} holds no document",
                where=name,
                why=why,
                do=do,
            )

    def _first_row(self, inputs: Iterable[int]) -> tuple[dict[str, Any], str]:
        """The first row of JSON lines that has fields, and the file that it is in."""
        for origin in (self.inputs[number] for number in inputs):
            if origin.kind != "jsonl":
                continue
            with (
                contextlib.suppress(ValueError, RecursionError, InputDamaged),
                contextlib.closing(open_ranges(origin.name)) as ranges,
            ):
                packed = os.path.splitext(origin.name)[1] if is_packed(origin.name) else ""
                file = io.BufferedReader(open_forward(ranges, packed), _BLOCK_BYTES)
                row = msgspec.json.decode(file.readline(_BLOCK_BYTES).removeprefix(b"\xef\xbb\xbf"))
                if isinstance(row, dict) and row:
                    return row, origin.name
        return {}, ""


def _how_to_read(row: dict[str, Any], name: str) -> str:
    """What to do about JSON lines in which the text is elsewhere, by a row of them.

    >>> _how_to_read({"id": 3, "body": "a text"}, "a.jsonl")
    'name the field that holds the text: --text_field body'
    """
    for field_name, said in (("messages", "content"), ("conversations", "value")):
        turns = row.get(field_name)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            said = said if said in turns[0] else "content"
            text = f'{{text: [.{field_name}[].{said} | strings] | join("\\n")}}'
            reads = _UNPACK.get(os.path.splitext(name)[1], "cat")
            return (
                "these are conversations, and a tokenizer learns from texts: take them out with "
                f"{reads} {shlex.quote(name)} | jq -c {shlex.quote(text)} > texts.jsonl, and give "
                "--inputs texts.jsonl"
            )
    texts = [field_name for field_name, value in row.items() if isinstance(value, str) and value]
    if not texts:
        return ""
    others = f" (or {', '.join(texts[1:])})" if texts[1:] else ""
    return f"name the field that holds the text: --text_field {texts[0]}{others}"
