"""The types that cross the border of a stage: columns of documents, never one at a time.

In:    what a format reads
Out:   `Documents`, for the steps of preparation
Keeps: all texts end to end in one buffer, so that a kernel takes them all in one call
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.arrays import Bools, Bytes, Int32s, Int64s, UInt64s

LANGUAGES: Final = (
    "text",
    "markdown",
    "c",
    "cpp",
    "python",
    "java",
    "go",
    "rust",
    "javascript",
    "typescript",
    "tsx",
    "other",
)
"""Languages by their number. "other" is code that is cut by lines, "text" is prose."""

DECODINGS: Final = ("utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "processed")
"""How a document's bytes became text, by number: see docs/prepare.md for the rule."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where lines stand in their files: as they say themselves, or the bytes of the lines."""

    start: Int64s
    end: Int64s
    part: Int32s
    parts: Int32s
    doc_id: UInt64s
    """Of the whole document that a told line is a part of."""
    told: Bools
    """Whether the line says which part of which file it is."""
    source: pa.StringArray | None = None
    """The file that it says, "" where it says none; None where no line says one."""

    def take(self, rows: Int64s) -> "Places":
        """Those of some documents."""
        picks = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])
        return Places(
            self.start[rows], self.end[rows], self.part[rows], self.parts[rows],
            self.doc_id[rows], self.told[rows],
            None if self.source is None else self.source.take(picks),
        )  # fmt: skip


@dataclass(slots=True)
class Documents:
    """Some documents of one input, in the order of the input. Text is UTF-8, not empty, no NUL.

    Document k is data[at[k]:at[k + 1]]; `kernels.PAD` bytes of slack follow the last one.
    """

    data: Bytes
    at: Int64s
    start: Int64s
    """Where each begins in its input, in the input's unit: bytes of JSON lines, rows, members."""
    end: Int64s
    """Where the input goes on after it."""
    sources: list[str] | None = None
    """The file (or member) that each one is; None where `places` or `input#start-end` (rows of a
    table) say it."""
    language: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Numbers in LANGUAGES; none until `prepare.languages` has looked."""
    decoding: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Numbers in DECODINGS."""
    places: "Places | None" = None
    """Where documents that are lines stand in the file that a person would open."""

    def __len__(self) -> int:
        return len(self.at) - 1

    def text(self, k: int) -> bytes:
        """One document; for tests and rare paths."""
        return self.data[self.at[k] : self.at[k + 1]].tobytes()


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was read and is not a document: where it stands, and why."""

    reason: str
    start: int
    end: int
    at: int
    """The byte at which the fault was found."""
    sample: str = ""
    """How it begins, for people."""
    source: str = ""
    """The file or member, where the input has many."""
