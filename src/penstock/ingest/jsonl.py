"""Parse JSON lines into columns, strictly, without a Python object per document.

In:    a block of whole lines (uint8), the byte offset at which it stands in its input
Out:   rows appended to `Columns`; lines that are not documents, with the reason, as rejects
Keeps: every line is exactly one of kept, rejected, blank; the answer for a line is that of
       `json.loads` on it, except that text must be a UTF-8 string that is not empty, without NUL
Never: allocates per line, takes the GIL, reads past the block and its PAD

Measured on C++ headers (one Zen core, 10 KB a line): see benchmarks/bench_shard.py.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from penstock.ingest.json_scan import (
    EMPTY_TEXT,
    HALF_LINE,
    INVALID_JSON,
    INVALID_UTF8,
    LINE_TOO_LONG,
    MAX_DEPTH,
    NESTED_TOO_DEEP,
    NO_TEXT,
    NOT_AN_OBJECT,
    OK,
    REASONS,
    TEXT_NOT_A_STRING,
    copy_string,
    is_digit,
    is_json,
    skip_blanks,
    skip_key,
    skip_value,
    small_int,
)
from penstock.simd import PAD, next_index, splitmix64, xxh64

Bytes = npt.NDArray[np.uint8]

# What the kernel keeps in `Columns.counts`.
_ROWS, _TRAIN, _TEXT, _SOURCE, _REJECTS, _BLANK, _MIXED = range(7)


@dataclass(slots=True)
class Columns:
    """Documents on their way into one shard, as arrays that the kernels fill.

    Text lies end to end in `text`; row r is text[text_at[r] : text_at[r + 1]]. The virtual size of
    `text` is its bound; pages are only taken as they are written.
    """

    text: Bytes
    source: Bytes
    text_at: npt.NDArray[np.int64]
    source_at: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    part: npt.NDArray[np.int32]
    parts: npt.NDArray[np.int32]
    input_number: npt.NDArray[np.int32]
    doc_id: npt.NDArray[np.uint64]
    is_val: npt.NDArray[np.uint8]
    reject_code: npt.NDArray[np.int32]
    reject_at: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(8, np.int64))

    @classmethod
    def allocate(cls, text_bytes: int, rows: int) -> "Columns":
        return cls(
            text=np.empty(text_bytes + PAD, np.uint8),
            source=np.empty((1 << 20) + PAD, np.uint8),
            text_at=np.zeros(rows + 1, np.int64),
            source_at=np.zeros(rows + 1, np.int64),
            start=np.empty(rows, np.int64),
            end=np.empty(rows, np.int64),
            part=np.empty(rows, np.int32),
            parts=np.empty(rows, np.int32),
            input_number=np.empty(rows, np.int32),
            doc_id=np.empty(rows, np.uint64),
            is_val=np.empty(rows, np.uint8),
            reject_code=np.empty(4096, np.int32),
            reject_at=np.empty(3 * 4096, np.int64),
        )

    @property
    def rows(self) -> int:
        return int(self.counts[_ROWS])

    @property
    def train_rows(self) -> int:
        return int(self.counts[_TRAIN])

    @property
    def text_bytes(self) -> int:
        return int(self.counts[_TEXT])

    @property
    def has_sources(self) -> bool:
        """Whether any row brought its own provenance along."""
        return bool(self.counts[_MIXED])

    def clear(self) -> None:
        self.counts[:] = 0

    def make_room(self, line_bytes: int) -> None:
        """Grow what the next lines could overflow; amortised by doubling."""
        rows = self.rows
        if rows + 1 >= len(self.start):
            more = 2 * len(self.start)
            for name in ("start", "end", "part", "parts", "input_number", "doc_id", "is_val"):
                setattr(self, name, _grown(getattr(self, name), more))
            self.text_at = _grown(self.text_at, more + 1)
            self.source_at = _grown(self.source_at, more + 1)
        source_needs = int(self.counts[_SOURCE]) + line_bytes + PAD
        if source_needs > len(self.source):
            self.source = _grown(self.source, max(source_needs, 2 * len(self.source)))
        text_needs = self.text_bytes + line_bytes + PAD
        if text_needs > len(self.text):
            self.text = _grown(self.text, text_needs)


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    larger = np.empty(size, array.dtype)
    larger[: len(array)] = array
    return larger


@dataclass(frozen=True, slots=True)
class Reject:
    """A line that is not a document: where it stands and why it was refused."""

    code: int
    start: int
    end: int
    at: int
    """The byte at which the fault was found."""

    @property
    def reason(self) -> str:
        return REASONS[self.code]


@dataclass(slots=True)
class Block:
    """Whole lines: data[start:stop]; data[0] stands at `offset` of the input."""

    data: Bytes
    start: int
    stop: int
    offset: int
    too_long: list[Reject] = field(default_factory=list)
    """Lines before data[start] that were longer than any document may be."""
    is_fragment: bool = False
    """The last line had no newline; one was put behind it, at data[stop - 1]."""

    @property
    def end(self) -> int:
        """Where the input goes on after this block."""
        return self.offset + self.stop - (1 if self.is_fragment else 0)


@dataclass(frozen=True, slots=True)
class Taken:
    """What one call took from a block."""

    stop: int
    kept: int
    blank: int
    rejects: list[Reject]


@dataclass(frozen=True, slots=True)
class LineParser:
    """Which field is the text, and which documents are set aside for validation."""

    text_field: str
    salt: int
    threshold: int
    """A document is for validation where splitmix64(doc_id ^ salt) < threshold."""
    max_line_bytes: int

    def take(
        self,
        block: Block,
        at: int,
        input_number: int,
        into: Columns,
        *,
        max_train_rows: int,
        max_text_bytes: int,
        max_rejects: int,
    ) -> Taken:
        """Parse lines from block.data[at] on into `into`, until it is full or the block ends."""
        into.make_room(block.stop - at)
        rows, blank = into.rows, int(into.counts[_BLANK])
        into.counts[_REJECTS] = 0
        key = np.frombuffer(self.text_field.encode(), np.uint8)
        stop = _take_lines(
            block.data, at, block.stop, block.offset, input_number, key,
            np.uint64(self.salt), np.uint64(self.threshold), max_train_rows, max_text_bytes,
            self.max_line_bytes, min(max_rejects, len(into.reject_code)),
            into.text, into.source, into.text_at, into.source_at, into.start, into.end,
            into.part, into.parts, into.input_number, into.doc_id, into.is_val,
            into.reject_code, into.reject_at, into.counts,
        )  # fmt: skip
        rejects = [
            Reject(int(into.reject_code[k]), *map(int, into.reject_at[3 * k : 3 * k + 3]))
            for k in range(int(into.counts[_REJECTS]))
        ]
        if block.is_fragment:
            rejects = [_without_newline(reject, block.end) for reject in rejects]
            if into.rows > rows and into.source_at[rows] == into.source_at[rows + 1]:
                into.end[rows] = block.end
        return Taken(
            stop=stop,
            kept=into.rows - rows,
            blank=int(into.counts[_BLANK]) - blank,
            rejects=rejects,
        )


def _without_newline(reject: Reject, end: int) -> Reject:
    """A line that the input ends in: what is not JSON was cut, as far as anyone can tell."""
    code = HALF_LINE if reject.code in (INVALID_JSON, INVALID_UTF8) else reject.code
    return Reject(code, reject.start, end, min(reject.at, end))


@njit(nogil=True, cache=True)
def _same(data: Any, start: Any, stop: Any, word: Any) -> Any:
    if stop - start != len(word):
        return False
    same = True
    for k in range(len(word)):
        same = same and data[start + k] == word[k]
    return same


_SOURCE_KEY = np.frombuffer(b"source", np.uint8)
_START_KEY = np.frombuffer(b"start", np.uint8)
_END_KEY = np.frombuffer(b"end", np.uint8)
_PART_KEY = np.frombuffer(b"part", np.uint8)
_PARTS_KEY = np.frombuffer(b"parts", np.uint8)


@njit(nogil=True, cache=True)
def _take_lines(
    src: Any, i: Any, stop: Any, offset: Any, input_number: Any, text_key: Any,
    salt: Any, threshold: Any, max_train_rows: Any, max_text_bytes: Any, max_line_bytes: Any,
    max_rejects: Any, text: Any, source: Any, text_at: Any, source_at: Any,
    row_start: Any, row_end: Any, row_part: Any, row_parts: Any, row_input: Any,
    doc_id: Any, is_val: Any, reject_code: Any, reject_at: Any, counts: Any,
) -> Any:  # fmt: skip
    stack = np.empty(MAX_DEPTH, np.uint8)
    where = np.empty(4, np.int64)
    rows = counts[_ROWS]
    max_rows = len(row_start)
    while i < stop:
        if counts[_TRAIN] >= max_train_rows or counts[_TEXT] >= max_text_bytes:
            break
        if rows == max_rows or counts[_REJECTS] == max_rejects:
            break
        line = i
        o = counts[_TEXT]
        text_end = o
        source_start = counts[_SOURCE]
        source_end = source_start
        code = NO_TEXT
        where[:] = -1
        if offset + i == 0 and src[0] == 0xEF and src[1] == 0xBB and src[2] == 0xBF:
            i += 3  # a byte order mark, where Windows puts it
        i = skip_blanks(src, i)
        if src[i] == 0x0A:
            counts[_BLANK] += 1
            i += 1
            continue
        if src[i] != 0x7B:
            i, fault = skip_value(src, i, text, o, stack)
            code = fault if fault != OK else NOT_AN_OBJECT
        else:
            i = skip_blanks(src, i + 1)
            fault = OK
            if src[i] == 0x7D:
                i += 1
            else:
                while True:
                    i, key_end, fault = skip_key(src, i, text, text_end)
                    if fault != OK:
                        break
                    if _same(text, text_end, key_end, text_key):
                        text_end = o  # of two, the last one counts, as in `json`
                        if src[i] == 0x22:
                            i, text_end, code = copy_string(src, i + 1, text, o)
                            if code == OK and text_end == o:
                                code = EMPTY_TEXT
                            if code != EMPTY_TEXT and not is_json(code):
                                fault = code
                        else:
                            code = TEXT_NOT_A_STRING
                            i, fault = skip_value(src, i, text, text_end, stack)
                    elif src[i] == 0x22 and _same(text, text_end, key_end, _SOURCE_KEY):
                        i, source_end, fault = copy_string(src, i + 1, source, source_start)
                        if fault != OK:
                            source_end = source_start
                            fault = OK if is_json(fault) else fault
                    else:
                        number = -1
                        if is_digit(src[i]):
                            if _same(text, text_end, key_end, _START_KEY):
                                number = 0
                            elif _same(text, text_end, key_end, _END_KEY):
                                number = 1
                            elif _same(text, text_end, key_end, _PART_KEY):
                                number = 2
                            elif _same(text, text_end, key_end, _PARTS_KEY):
                                number = 3
                            if number >= 0:
                                where[number] = small_int(src, i)
                        i, fault = skip_value(src, i, text, text_end, stack)
                    if fault != OK:
                        break
                    i = skip_blanks(src, i)
                    if src[i] == 0x2C:
                        i = skip_blanks(src, i + 1)
                        continue
                    if src[i] == 0x7D:
                        i += 1
                    else:
                        fault = INVALID_JSON
                    break
            if fault != OK:
                code = fault
        at = i
        if code == OK or code >= NOT_AN_OBJECT:
            at = skip_blanks(src, i)
            if src[at] != 0x0A and code != NESTED_TOO_DEEP:
                code = INVALID_JSON
        i = next_index(src, at, stop, 0x0A) + 1
        if i - 1 - line > max_line_bytes:
            code = LINE_TOO_LONG
            at = line + max_line_bytes
        if code != OK:
            k = counts[_REJECTS]
            reject_code[k] = code
            reject_at[3 * k] = offset + line
            reject_at[3 * k + 1] = offset + i
            reject_at[3 * k + 2] = offset + at
            counts[_REJECTS] = k + 1
            continue
        # A line that says which part of which file it is keeps that; all parts of a file share
        # a doc_id, and with it a split.
        told = (
            source_end > source_start
            and 0 <= where[0] <= where[1]
            and 0 <= where[2] < where[3] < 2147483648
        )
        if told:
            counts[_MIXED] = 1
            row_start[rows] = where[0]
            row_end[rows] = where[1]
            row_part[rows] = where[2]
            row_parts[rows] = where[3]
            key = xxh64(source, source_start, source_end, 0)
        else:
            source_end = source_start
            row_start[rows] = offset + line
            row_end[rows] = offset + i
            row_part[rows] = 0
            row_parts[rows] = 1
            key = xxh64(text, o, text_end, 0)
        doc_id[rows] = key
        row_input[rows] = input_number
        val = splitmix64(key ^ salt) < threshold
        is_val[rows] = val
        rows += 1
        text_at[rows] = text_end
        source_at[rows] = source_end
        counts[_ROWS] = rows
        counts[_TRAIN] += 0 if val else 1
        counts[_TEXT] = text_end
        counts[_SOURCE] = source_end
    return i
