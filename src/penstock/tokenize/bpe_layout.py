"""What `bpe` and its kernels share: positions in `state`, the form of a word, named vectors."""

from typing import Final, NamedTuple

from penstock.arrays import Int32s, Int64s, UInt64s

# What the kernels keep in `state`.
PAIRS, HEAP, ENTRIES, ARENA, TOKENS, MERGES = range(6)
# What they are told in it.
VOCAB, LEAST_COUNT = range(6, 8)
STATE: Final = 16
"""Its size; part of the fingerprint of checkpoints."""

HEAD: Final = 3
"""Numbers before the symbols of a word: its size, and its count in halves of 31 bits."""

NO_PAIR: Final = 0xFFFFFFFFFFFFFFFF
"""The key of an empty slot."""


class Queue(NamedTuple):
    """Pairs by count: the table of counts, the heap, and the words of each pair in the arena."""

    table: UInt64s
    """Key and count in turn."""
    heap: Int32s
    heap_count: Int64s
    entry_pair: UInt64s
    entry_at: Int64s
    entry_words: Int32s
    arena: Int32s


class Neighbours(NamedTuple):
    """By token: what a merge takes from the pairs on its left and on its right."""

    left: Int64s
    right: Int64s
    left_last: Int32s
    right_last: Int32s
    left_events: Int64s
    right_events: Int64s


class Met(NamedTuple):
    """The neighbours that one merge met, each with the word; `seen` says how many."""

    near: Int32s
    near_words: Int32s
    far: Int32s
    far_words: Int32s
    seen: Int64s
