"""What the plan and its kernel share: positions in their vectors, codes, named vectors."""

from typing import Final, NamedTuple

from penstock.arrays import Floats, Int32s, Int64s, UInt64s

# How documents become rows, and what becomes of one longer than a row.
PACKS: Final = ("pad", "concat", "bestfit")
PAD, CONCAT, BESTFIT = range(3)
LONGS: Final = ("split", "crop", "drop")
SPLIT, CROP, DROP = range(3)

# What `advance` answers: all is there; a source's rest is over; `out` is too small; and from
# REFILL on, which source wants its next cycle.
DONE, REST_OVER, GROW, REFILL = 0, 1, 2, 3

# Positions in the vector of scalars. OPEN is a document of which a part is placed.
OPEN_SOURCE, OPEN_PASS, OPEN_SHARD, OPEN_ROW, OPEN_AT, OPEN_LEFT = 0, 1, 2, 3, 4, 5
FILL, SEGMENTS, ROWS, HELD, OLDEST, NEWEST, FREE, DRAWN, ROW_SOURCE = 6, 7, 8, 9, 10, 11, 12, 13, 14
HELD_TOKENS = 15
SCALARS = 16

SEGMENT = 7
"""Numbers of a segment: row, source, pass, shard, row in the shard, first token, tokens."""
PIECE = 6
"""Numbers of a piece in the buffer: a segment without its row."""

# Columns of the ledger, one line for each source.
DOCUMENTS, READ, PLACED, CROPPED, SKIPPED, SKIPPED_DOCUMENTS, PADDED, CONTEXT = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
)
LEDGER = 8


class How(NamedTuple):
    """What rows are made to be."""

    pack: int
    long: int
    by_tokens: int
    seq_len: int
    rest_until: int
    """The draw at which a source that rests is asked again; -1 for none."""


class Arena(NamedTuple):
    """The samples of the sources' present cycles; a length below 0 is that of a banned one."""

    passes: Int32s
    shards: Int32s
    rows: Int32s
    lengths: Int32s


class Sources(NamedTuple):
    """Of each source: its next sample in the arena and its last, weight, credit, ledger."""

    at: Int64s
    end: Int64s
    weight: Floats
    credit: Floats
    ledger: Int64s


class Buffer(NamedTuple):
    """Pieces that wait for a row of BESTFIT, in the order they came and by their lengths."""

    pieces: Int64s
    older: Int64s
    newer: Int64s
    after: Int64s
    """The next of the same length."""
    first: Int64s
    last: Int64s
    words: UInt64s
    """A bit for each length that there is."""
