"""What a plan knows of a source: its shards, how many samples and tokens each has, its end.

In:    the log of a dataset, or anything that can say the same
Out:   counts; a `Source` blocks where the answer is not known yet
Never: reads a document
"""

import re
from typing import Protocol

import numpy as np

from penstock.arrays import Int32s
from penstock.errors import BadConfig


class Source(Protocol):
    """One weighted origin of samples, as the plan sees it."""

    name: str

    def has_shard(self, shard: int) -> bool | None:
        """Whether there is a shard of that number: None if it may still come."""

    def wait_shard(self, shard: int) -> bool:
        """Block until it is there, or until it is sure that it never comes."""

    def rows(self, shard: int) -> int:
        """Samples of a shard that is there."""

    def lengths(self, shard: int) -> Int32s:
        """Tokens of each of its samples; below zero, -1 - tokens, for those that are banned."""

    def identity(self) -> dict[str, str | int]:
        """What a state is bound to: the same source, or one that has grown."""

    def check_identity(self, seen: dict[str, str | int]) -> str:
        """What is wrong if `seen` is not this source at an earlier time; empty if it is."""


_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def parse_ranges(text: str) -> list[tuple[int, int]] | None:
    """Which shards of a source are used: None for all, else first and last of each run.

    >>> parse_ranges("0-9,20-29")
    [(0, 9), (20, 29)]
    >>> parse_ranges("all") is None
    True
    """
    if not isinstance(text, str):
        raise _bad_range(text, "a range is text, one for each source")
    if text.strip() == "all":
        return None
    runs: list[tuple[int, int]] = []
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise _bad_range(text, f"{part.strip()!r} is not a number or two with a dash")
        first, last = int(found[1]), int(found[2] or found[1])
        if last >= 1 << 31:
            raise _bad_range(text, f"there is no shard {last}")
        if last < first:
            raise _bad_range(text, f"{part.strip()} goes backwards")
        if runs and first <= runs[-1][1]:
            raise _bad_range(text, f"{part.strip()} does not come after {runs[-1][1]}")
        runs.append((first, last))
    return runs


def _bad_range(text: str, why: str) -> BadConfig:
    return BadConfig(
        f"the shard range {text!r} cannot be read",
        why=why,
        do='write "all", "0-99" or "0-9,20-29", in rising order',
    )


class Ranged:
    """Numbers of the chosen shards: 0, 1, 2 … of a range are these of the dataset."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._runs = parse_ranges(text)
        sizes = [last - first + 1 for first, last in self._runs or []]
        self.size = sum(sizes) if self._runs is not None else None
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def shares(self, other: "Ranged") -> bool:
        """Whether both choose some shard.

        >>> Ranged("0-3").shares(Ranged("2-5")), Ranged("0-3").shares(Ranged("4-5"))
        (True, False)
        """
        if self._runs is None or other._runs is None:
            return True
        return any(a <= last and first <= b for a, b in self._runs for first, last in other._runs)

    def known(self, count: int) -> int:
        """How many of the chosen shards are among the first `count`, without a gap.

        >>> Ranged("2-3,8-9").known(9), Ranged("all").known(9)
        (3, 9)
        """
        if self._runs is None:
            return count
        return sum(max(0, min(last + 1, count) - first) for first, last in self._runs)

    def number(self, k: int) -> int | None:
        """The number in the dataset of the k-th chosen shard, None past the last."""
        if self._runs is None:
            return k
        run = int(np.searchsorted(self._ends, k, side="right"))
        if run == len(self._runs):
            return None
        return self._runs[run][1] - (int(self._ends[run]) - 1 - k)
