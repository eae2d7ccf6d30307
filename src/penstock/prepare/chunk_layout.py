"""What `chunk` and its kernels share: vectors by name, positions in them, codes."""

from typing import NamedTuple

from penstock.arrays import Bytes, Int32s, Int64s, UInt32s

# families of patterns, by how text may be cut without changing a token beside the cut
ANY, NEWLINES, SINGLE_NEWLINE, NOT_SLASH = range(4)

# what plan_chunks keeps in `state`
CHUNKS, CANDIDATES, FULL = range(3)
STATE = 3

MAX_SCOPE = 12
"""Nodes that a scope names, from the innermost out."""

# words of a scope: the kinds of nodes by their numbers, then these
SEPARATOR, JOINT, ANONYMOUS = 6, 7, 8

# what describe_chunks finds before it writes, in `path`
SCOPE_BYTES, SYMBOL_BYTES, SYMBOLS = range(3)


class Tokens(NamedTuple):
    """The tokens of all documents: document k has ids[first[k]:first[k + 1]]."""

    ids: UInt32s
    lengths: Int32s
    """Bytes of each id."""
    first: Int64s
    at: Int32s
    """Room for where the tokens of one document begin."""


class Limits(NamedTuple):
    """What a chunk may hold."""

    budget: int
    least_fill: int
    """In 1024ths of the budget."""
    family: int


class Candidates(NamedTuple):
    """Room for the places where one document may be cut."""

    at: Int64s
    level: Bytes
    tokens: Int32s
    """How many begin before it."""


class Rows(NamedTuple):
    """Chunks: k is data[start[k]:end[k]] of a document, and its tokens are numbered first to last.

    `exact` says whether these are the tokens of the chunk by itself.
    """

    document: Int64s
    start: Int64s
    end: Int64s
    level: Bytes
    first: Int64s
    last: Int64s
    exact: Bytes


class Described(NamedTuple):
    """Scopes and symbols of chunks, as Arrow lays out strings and lists of strings."""

    scope: Bytes
    scope_at: Int32s
    symbols: Bytes
    symbol_at: Int32s
    symbol_first: Int32s
