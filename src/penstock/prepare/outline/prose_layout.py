"""What `readers` and its kernel for prose share: words, limits, positions in `state`, vectors."""

from typing import Final, NamedTuple

from penstock.arrays import Bytes, Int64s

LONG: Final = 200
"""A line of more bytes than this is a paragraph."""

CUTS, NODES, LAST = range(3)
STATE: Final = 3
"""What the kernel's state holds: how many cuts and nodes so far, where the last cut is."""

START, BODY, END, NAME, NAME_END, PARENT = range(6)
NODE: Final = 6
"""What is said of a section: where it, its body and its name begin and end, and its parent."""

RANKS: Final = 7
"""Headings have the ranks 1 to 6."""


def _packed(words: str) -> tuple[int, ...]:
    """Words as kernels compare them: little-endian numbers."""
    return tuple(int.from_bytes(word.encode(), "little") for word in words.split())


SHORT_FORMS: Final = _packed("mr mrs ms dr st jr sr vs cf fig eq vol prof gen rep sen pp")
"""Words of two to four letters whose full stop ends no sentence."""

STOPS: Final = _packed("。 ！ ？ ｡ ।")
"""Full stops that need no space after them, three bytes each."""

CLOSERS: Final = _packed("’ ” 」 』 ） 】 》 〉")
"""What may stand between the end of a sentence and the space, three bytes each."""

ENDINGS: Final = _packed("end else elif elsif elseif fi done esac then")
"""What begins a line of code that belongs to the lines above."""


class Cuts(NamedTuple):
    """Where documents may be cut; those of document k begin at first[k]."""

    first: Int64s
    at: Int64s
    level: Bytes


class Sections(NamedTuple):
    """Sections of documents, NODE numbers each; those of document k begin at first[k]."""

    first: Int64s
    nodes: Int64s
    open: Int64s
    """By rank, the one that is not closed yet, or -1."""
