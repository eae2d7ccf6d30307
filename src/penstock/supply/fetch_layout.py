"""What `fetch` and its kernel share: where tokens of shards lie, and what stands around them."""

from typing import NamedTuple

from penstock.arrays import Bytes, UInt64s


class Held(NamedTuple):
    """By slot, the shards of the window."""

    values: UInt64s
    """Addresses of their ids."""
    offsets: UInt64s
    """Addresses of where each document begins in them."""
    wide: Bytes
    """Whether ids have four bytes, not two."""


class Around(NamedTuple):
    """Ids that are put before and after a document, unless below 0, and where none stands."""

    bos: int
    eos: int
    pad: int
