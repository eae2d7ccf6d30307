"""What deduplication, decontamination and their kernels share: limits, codes, named vectors."""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64s, UInt32s, UInt64s

KEPT, EXACT, WHITESPACE, NEAR, CONTAMINATED = range(5)
"""Why a document is not kept."""

CHAIN: Final = 16
"""Kept documents that one band lists under one key; later ones are found by other bands only."""

PROBES: Final = 1024
"""Slots of a table that are looked at. At three quarters full nothing honest comes near it."""

LOOKAHEAD: Final = 16
"""Documents whose slots are on their way from memory."""

CHUNK: Final = 4096
"""Bytes of text whose tokens are hashed at once, in arrays that stay in the first cache."""


class Scratch(NamedTuple):
    """Room for the tokens of CHUNK bytes."""

    starts: Int64s
    ends: Int64s
    hashes: UInt64s


class Sketching(NamedTuple):
    """How texts become sketches, and what makes two alike; the names are those of `DedupConfig`."""

    shingle: int
    bins: int
    min_shingles: int
    bands: int
    rows: int
    words: int
    threshold: int
    """In millionths."""
    normalised: int


class Records(NamedTuple):
    """Records of a partition, ordered by bucket: which row's sketch each has, and whose it is."""

    buckets: Int64s
    rows: Int64s
    members: Int64s


class Pairs(NamedTuple):
    """Two members each."""

    a: Int64s
    b: Int64s


class Bins(NamedTuple):
    """Room for one sketch before it is packed: the least shingle of each bin."""

    minima: UInt64s
    coarse: UInt64s


class Sketches(NamedTuple):
    """Of some documents: `bands` keys, `words` words and the number of filled bins each."""

    keys: UInt32s
    words: UInt64s
    filled: npt.NDArray[np.uint16]


class Kept(NamedTuple):
    """The index: columns of the kept documents, and the tables that find them."""

    hashes: UInt64s
    raw: UInt64s
    sketches: UInt64s
    exact: UInt64s
    near: UInt64s
    slots: int
    capacity: int


class Items(NamedTuple):
    """Shingles of benchmark items in a hash table, and the items of each."""

    keys: UInt64s
    slots: Int64s
    bitmap: UInt64s
    items_at: Int64s
    items: Int64s
    sizes: Int64s


class Seen(NamedTuple):
    """What the text of the current stamp has of the benchmark."""

    keys: Int64s
    items: Int64s
    counts: Int64s
