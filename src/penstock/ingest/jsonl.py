"""Parse JSON lines into columns, strictly, without a Python object per document.

In:    a block of whole lines (uint8), the byte offset at which it stands in its input
Out:   rows appended to `Columns`; lines that are not documents, with the reason, as rejects
Keeps: every line is exactly one of kept, rejected, blank; the answer for a line is that of
       `json.loads` on it, except that text must be a UTF-8 string that is not empty, without NUL
Never: allocates per line, holds the GIL, reads past the block and its PAD

Measured on C++ headers (one Zen core, 10 KB a line): see benchmarks/bench_shard.py.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bytes, Int64s
from penstock.ingest.jsonl_layout import (
    BLANKS,
    COUNTS,
    NUMBERS,
    REJECTS,
    ROW_BYTES,
    ROWS,
    SOURCE,
    TEXT,
    TRAIN,
    Limits,
    Rejects,
    Rows,
    Scratch,
)
from penstock.ingest.jsonl_layout import HALF_LINE as HALF_LINE
from penstock.ingest.jsonl_layout import INVALID_JSON as INVALID_JSON
from penstock.ingest.jsonl_layout import INVALID_UTF8 as INVALID_UTF8
from penstock.ingest.jsonl_layout import LINE_TOO_LONG as LINE_TOO_LONG
from penstock.ingest.jsonl_layout import MAX_DEPTH as MAX_DEPTH
from penstock.ingest.jsonl_layout import MIXED as MIXED
from penstock.ingest.jsonl_layout import REASONS as REASONS
from penstock.kernels import PAD, Kernel, used_buffer

_take_lines = Kernel(
    "penstock.ingest.jsonl_kernel",
    "take_lines",
    "int64(uint8[::1], int64, int64, int64, int64, uint8[::1], uint64, uint64, Limits, Rows,"
    " Rejects, int64[::1], Scratch)",
    *(Limits, Rows, Rejects, Scratch),
)


@dataclass(slots=True)
class Columns:
    """Documents on their way into one shard, as arrays that the kernels fill.

    The virtual size of the text is its bound; pages are only taken as they are written.
    """

    filled: Rows
    rejects: Rejects
    scratch: Scratch
    counts: Int64s = field(default_factory=lambda: np.zeros(COUNTS, np.int64))

    @classmethod
    def allocate(cls, text_bytes: int, rows: int) -> "Columns":
        filled = Rows(
            text=used_buffer(text_bytes),
            source=used_buffer(4 << 20),  # more than a block: to grow would touch all of it
            text_at=np.zeros(rows + 1, np.int64),
            source_at=np.zeros(rows + 1, np.int64),
            start=np.empty(rows, np.int64),
            end=np.empty(rows, np.int64),
            part=np.empty(rows, np.int32),
            parts=np.empty(rows, np.int32),
            input_number=np.empty(rows, np.int32),
            doc_id=np.empty(rows, np.uint64),
            is_val=np.empty(rows, np.uint8),
        )
        rejects = Rejects(code=np.empty(4096, np.int32), at=np.empty(3 * 4096, np.int64))
        scratch = Scratch(stack=np.empty(MAX_DEPTH, np.uint8), numbers=np.empty(NUMBERS, np.int64))
        return cls(filled, rejects, scratch)

    @property
    def rows(self) -> int:
        return int(self.counts[ROWS])

    @property
    def train_rows(self) -> int:
        return int(self.counts[TRAIN])

    @property
    def text_bytes(self) -> int:
        return int(self.counts[TEXT])

    @property
    def held_bytes(self) -> int:
        """Text, told sources, and what each row costs: what a batch holds in memory."""
        return int(self.counts[TEXT] + self.counts[SOURCE]) + ROW_BYTES * self.rows

    @property
    def has_sources(self) -> bool:
        """Whether any row brought its own provenance along."""
        return bool(self.counts[MIXED])

    def clear(self) -> None:
        self.counts[:] = 0

    def make_room(self, line_bytes: int) -> None:
        """Grow what the next lines could overflow; amortised by doubling."""
        filled, rows = self.filled, len(self.filled.start)
        if self.rows + 1 >= rows:
            by_row = {name: column for name, column in filled._asdict().items()
                      if name not in ("text", "source")}  # fmt: skip
            filled = filled._replace(
                **{name: _grown(column, len(column) + rows) for name, column in by_row.items()}
            )
        needed = int(self.counts[SOURCE]) + line_bytes + PAD
        if needed > len(filled.source):
            filled = filled._replace(
                source=_grown(filled.source, max(needed, 2 * len(filled.source)))
            )
        needed = self.text_bytes + line_bytes + PAD
        if needed > len(filled.text):
            filled = filled._replace(text=_grown(filled.text, needed))
        self.filled = filled


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
        rows, blank = into.rows, int(into.counts[BLANKS])
        into.counts[REJECTS] = 0
        key = np.frombuffer(self.text_field.encode(), np.uint8)
        limits = Limits(
            train_rows=max_train_rows,
            text_bytes=max_text_bytes,
            line_bytes=self.max_line_bytes,
            rejects=min(max_rejects, len(into.rejects.code)),
        )
        stop = _take_lines(
            block.data, at, block.stop, block.offset, input_number, key,
            np.uint64(self.salt), np.uint64(self.threshold), limits, into.filled, into.rejects,
            into.counts, into.scratch,
        )  # fmt: skip
        rejects = [
            Reject(int(into.rejects.code[k]), *map(int, into.rejects.at[3 * k : 3 * k + 3]))
            for k in range(int(into.counts[REJECTS]))
        ]
        if block.is_fragment:
            rejects = [_without_newline(reject, block.end) for reject in rejects]
            filled = into.filled
            if into.rows > rows and filled.source_at[rows] == filled.source_at[rows + 1]:
                filled.end[rows] = block.end
        return Taken(
            stop=stop,
            kept=into.rows - rows,
            blank=int(into.counts[BLANKS]) - blank,
            rejects=rejects,
        )


def _without_newline(reject: Reject, end: int) -> Reject:
    """A line that the input ends in: what is not JSON was cut, as far as anyone can tell."""
    code = HALF_LINE if reject.code in (INVALID_JSON, INVALID_UTF8) else reject.code
    return Reject(code, reject.start, end, min(reject.at, end))


def line_places(block: Block, at: int, stop: int, rejects: list[Reject]) -> tuple[Int64s, Int64s]:
    """Where the lines of data[at:stop] begin and end that are neither blank nor rejected."""
    data = block.data[at:stop]
    end = np.flatnonzero(data == 0x0A) + 1
    start = np.append(0, end[:-1])
    full = (data != 0x0A) & (data != 0x20) & (data != 0x09) & (data != 0x0D)
    if block.offset + at == 0 and data[:3].tobytes() == b"\xef\xbb\xbf":
        full[:3] = False
    kept = np.bitwise_or.reduceat(full.view(np.uint8), start) != 0
    kept &= ~np.isin(start + (block.offset + at), [reject.start for reject in rejects])
    end = np.minimum(end + (block.offset + at), block.end)
    return start[kept] + (block.offset + at), end[kept]


def blank_places(block: Block, at: int, stop: int) -> list[int]:
    """Where the blank lines of data[at:stop] begin."""
    data, base = block.data[at:stop], block.offset + at
    start = np.append(0, np.flatnonzero(data == 0x0A) + 1)
    first = data[start[start < len(data)]]
    found = []
    # few lines begin so: those alone are looked at
    for k in np.flatnonzero((first <= 0x20) | (first == 0xEF)).tolist():
        line = data[start[k] : start[k + 1] if k + 1 < len(start) else None].tobytes()
        if not line.removeprefix(b"" if base + start[k] else b"\xef\xbb\xbf").strip(b" \t\r\n"):
            found.append(base + int(start[k]))
    return found
