"""What `languages` and its kernel share: numbers of languages, what is counted, the rules."""

from typing import Final, NamedTuple

from penstock.arrays import Int64s, UInt64s
from penstock.records import LANGUAGES

(
    TEXT, MARKDOWN, C, CPP, PYTHON, JAVA, GO, RUST, JAVASCRIPT, TYPESCRIPT, TSX, OTHER,
) = range(len(LANGUAGES))  # fmt: skip

COLUMNS: Final = 19
"""What the kernel counts of a document: points by language, then these."""
(LINES, SIZE, ENDS, COMMENTS, MARKS, GAPS, LINKS) = range(len(LANGUAGES), COLUMNS)

SAMPLE_BYTES: Final = 16384
"""How much of a document is looked at."""

HASH: Final = 0x9E3779B97F4A7C15
"""A word times this has the number of its bucket in its upper eight bits."""


class Rules(NamedTuple):
    """What the first word of a line says: rules by bucket, each with its points by language."""

    buckets: Int64s
    """Where each begins, and where the last one ends."""
    words: UInt64s
    ends: UInt64s
    """Bytes one of which must end the line; 0 where any may."""
    needs: UInt64s
    """What must stand in the line, and its bytes, by turns."""
    points: Int64s
