"""What `jsonl` and its kernel share: codes, positions in vectors, named tuples of vectors."""

from typing import Final, NamedTuple

from penstock.arrays import Bytes, Int32s, Int64s, UInt64s

REASONS: Final = (
    "",
    "blank",
    "invalid_json",
    "invalid_utf8",
    "not_an_object",
    "no_text",
    "text_not_a_string",
    "empty_text",
    "nul_in_text",
    "lone_surrogate",
    "nested_too_deep",
    "line_too_long",
    "half_line",
    "bad_provenance",
)
"""What a reject code means. The order is not part of any file."""

(
    OK,
    BLANK,
    INVALID_JSON,
    INVALID_UTF8,
    NOT_AN_OBJECT,
    NO_TEXT,
    TEXT_NOT_A_STRING,
    EMPTY_TEXT,
    NUL_IN_TEXT,
    LONE_SURROGATE,
    NESTED_TOO_DEEP,
    LINE_TOO_LONG,
    HALF_LINE,
    BAD_PROVENANCE,
) = range(len(REASONS))

# What the kernel keeps in `counts`.
ROWS, TRAIN, TEXT, SOURCE, REJECTS, BLANKS, MIXED = range(7)
COUNTS: Final = 7

# What a line says of its place, in `numbers`.
START, END, PART, PARTS = range(4)
NUMBERS: Final = 4

MAX_DEPTH: Final = 512

ROW_BYTES: Final = 64
"""What a row costs beside its text: offsets, ranges, doc_id."""


class Limits(NamedTuple):
    """Where the kernel stops."""

    train_rows: int
    text_bytes: int
    line_bytes: int
    rejects: int


class Rows(NamedTuple):
    """Documents end to end: row r is text[text_at[r] : text_at[r + 1]]."""

    text: Bytes
    source: Bytes
    text_at: Int64s
    source_at: Int64s
    start: Int64s
    end: Int64s
    part: Int32s
    parts: Int32s
    input_number: Int32s
    doc_id: UInt64s
    is_val: Bytes


class Rejects(NamedTuple):
    """Lines that are not documents: code, and where the line begins, ends and fails."""

    code: Int32s
    at: Int64s


class Scratch(NamedTuple):
    """What the kernel needs for one line."""

    stack: Bytes
    numbers: Int64s
