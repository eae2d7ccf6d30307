"""What `balance` and its kernels share: the working memory of the differencing."""

from typing import NamedTuple

from penstock.arrays import Int32s, Int64s


class Work(NamedTuple):
    """Sets of items, and the states that they belong to. Sets lie twice: when one half is full,
    those that are in use are moved to the other."""

    sums: Int64s
    heads: Int32s
    """The first item of each set."""
    tails: Int32s
    counts: Int32s
    follows: Int32s
    """The item after each item in its set; -1 after the last."""
    first: Int64s
    """Where the sets of each state begin; they lie from the largest to the smallest."""
    size: Int64s
    """How many of its sets are not empty."""
    heap: Int64s
    """States, the one with the largest spread first."""
