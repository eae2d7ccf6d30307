"""The numbers that the plan and its kernel share: places in their vectors, codes, columns."""

# What `advance` answers: all is there; a source's rest is over; `out` is too small; and from
# REFILL on, which source wants its next cycle.
DONE, REST_OVER, GROW, REFILL = 0, 1, 2, 3

# Places in the vector of scalars. OPEN is a document of which a part is placed.
OPEN_SOURCE, OPEN_PASS, OPEN_SHARD, OPEN_ROW, OPEN_AT, OPEN_LEFT = 0, 1, 2, 3, 4, 5
FILL, SEGMENTS, ROWS, HELD, OLDEST, NEWEST, FREE, DRAWN, ROW_SOURCE = 6, 7, 8, 9, 10, 11, 12, 13, 14
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
