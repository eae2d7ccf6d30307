"""What counting and its kernels share: positions in `state`, codes, named vectors."""

from typing import Final, NamedTuple

from penstock.arrays import Bytes, Int64s, UInt64s

# What kernels keep in `state`.
STATUS, USED, ARENA_USED, PRETOKENS, WRITTEN, INVALID, NEEDS = range(7)
STATE: Final = 8
"""Its size."""

# state[STATUS]
DONE, NEED_MORE, TABLE_FULL, ARENA_FULL = range(4)

SLOT: Final = 4
"""Words of a slot: two of the key, the count, the length of a long key."""

RING: Final = 16
"""Pretokens that wait for their slot to arrive from memory."""

WAITING: Final = 5
"""Numbers of one that waits: where it begins, its bytes, two words of its key, its hash."""


class Table(NamedTuple):
    """A table of counts; `count_kernel` says what a slot is."""

    slots: UInt64s
    shift: int
    """The upper bits of a hash, behind so many others, say which slot is meant."""
    arena: Bytes
    """Keys of more than 15 bytes, end to end."""
    state: Int64s
    ring: UInt64s
    """RING pretokens that wait, WAITING numbers each."""


class Entries(NamedTuple):
    """What a table holds, as arrays: keys end to end, the length and the count of each."""

    keys: Bytes
    lengths: Int64s
    counts: Int64s


class Specials(NamedTuple):
    """Special tokens: those that begin at one place are sorted, the longest first."""

    first: Bytes
    """Of each byte, whether one begins with it; then the one byte that all do, or 256."""
    text: Bytes
    at: Int64s
    """Where each begins in `text`, and where the last one ends."""
    counts: Int64s
    found: Int64s
    """Which one was found last, or -1."""
