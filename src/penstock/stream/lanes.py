"""Cut a plan into lanes that share no shard, so that a rank needs only the shards of its own.

In:    sources; how many lanes; the rows of a batch and those of a rank
Out:   a plan for each lane; which rows of a batch are a lane's
Keeps: a shard in one lane, the one with the fewest tokens for each of its rows when the shard
       came: a function of the log's prefix, the same while the dataset grows; row i of every batch
       of n in lane i * lanes // n, whatever the number of ranks
Never: reads a document, looks at shards of other lanes to plan one

    shard 0, 1, 2 …  ─▶ deal ─▶ lane 0: shards 0, 64, 130 …  ─▶ a plan of its own ─▶ rows 0, 1
                                lane 1: shards 1, 65, 128 …  ─▶ a plan of its own ─▶ rows 2, 3

A lane is a plan like any other, over a view of the sources in which its shards are 0, 1, 2 …, with
a part of the pool and a seed of its own. One lane is the plan itself.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from penstock.arrays import Int32s, Int64s
from penstock.errors import BadConfig
from penstock.stream.plan import Plan, PlanConfig, Rows
from penstock.stream.pool import mix_key
from penstock.stream.source import Source

LEAST_PIECES: Final = 64
"""Documents among which a lane's `bestfit` chooses, where the whole plan has as many."""
_LANE: Final = 0x1A9E
"""Tells the seeds of lanes from other seeds."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Which rows of every batch belong to which lane, and which lanes a rank needs."""

    count: int
    unit: int
    """Rows of a batch over all ranks."""
    part: tuple[int, int]
    """The rows of a batch that are this rank's: from, to."""

    def rows(self, lane: int) -> tuple[int, int]:
        """The rows of a batch that are a lane's: from, to.

        >>> [Lanes(4, 10, (0, 10)).rows(lane) for lane in range(4)]
        [(0, 3), (3, 5), (5, 8), (8, 10)]
        """
        return -(-lane * self.unit // self.count), -(-(lane + 1) * self.unit // self.count)

    def size(self, lane: int) -> int:
        """How many these are."""
        first, last = self.rows(lane)
        return last - first

    @property
    def own(self) -> range:
        """The lanes of this rank's rows.

        >>> Lanes(64, 128, (32, 48)).own
        range(16, 24)
        """
        first, last = self.part
        return range(first * self.count // self.unit, (last - 1) * self.count // self.unit + 1)

    @property
    def others(self) -> list[int]:
        """The lanes that only other ranks need."""
        return [lane for lane in range(self.count) if lane not in self.own]


class Deals(Source, Protocol):
    """What dealing shards asks of a source beside what a plan does."""

    @property
    def is_closed(self) -> bool: ...

    @property
    def num_known(self) -> int: ...

    def volume(self, shard: int) -> int:
        """How much a shard holds, as its log says: tokens, or bytes where nobody counted them."""


class Deal:
    """Which lane each shard of a source belongs to. Shards are dealt in the order of the log."""

    def __init__(self, source: Deals, lanes: Lanes, *, may_grow: bool = False) -> None:
        """One that `may_grow` may have too few shards for all lanes so far."""
        self.source, self.lanes, self._may_grow = source, lanes.count, may_grow
        sizes = [lanes.size(lane) for lane in range(lanes.count)]
        all_rows = math.lcm(*set(sizes))
        self._per_row = [all_rows // size for size in sizes]
        """What a token weighs: more in a lane that has fewer rows of a batch, or that would run on
        alone after all others."""
        self.reset()

    def reset(self) -> None:
        """Forget what was dealt: the source has become another."""
        self._loads = [(0, lane) for lane in range(self.lanes)]
        self._dealt = 0
        self._shards: list[list[int]] = [[] for _ in range(self.lanes)]
        self._arrays: dict[int, Int64s] = {}

    def _deal(self) -> None:
        """The next shard goes to the lane with the fewest tokens for each of its rows."""
        load, lane = self._loads[0]
        added = self.source.volume(self._dealt) * self._per_row[lane]
        heapq.heapreplace(self._loads, (load + added, lane))
        self._shards[lane].append(self._dealt)
        self._dealt += 1

    def known(self, lane: int) -> int:
        """Shards of a lane that are there."""
        known = self.source.num_known
        while self._dealt < known:
            self._deal()
        return len(self._shards[lane])

    def load(self, lane: int) -> int:
        """How much a lane holds so far, as the log says."""
        self.known(lane)
        return sum(map(self.source.volume, self._shards[lane]))

    def has(self, lane: int, shard: int) -> bool | None:
        """Whether a lane has a shard of that number: None if it may still come."""
        mine = self._shards[lane]
        while len(mine) <= shard:
            there = self.source.has_shard(self._dealt)
            if not there:
                if there is False and shard == 0 and self._dealt and not self._may_grow:
                    filled = sum(self.source.volume(one) > 0 for one in range(self._dealt))
                    raise too_few(self.source.name, filled, self.lanes)
                return there
            self._deal()
        return True

    def wait(self, lane: int, shard: int) -> bool:
        """Block until it is there, or until it is sure that it never comes."""
        while (there := self.has(lane, shard)) is None:
            self.source.wait_shard(self._dealt)
        return there

    def number(self, lane: int, shard: int) -> int:
        """The number in the source of a lane's shard; of one that has not come, the first that may
        be it."""
        mine = self._shards[lane]
        return mine[shard] if shard < len(mine) else self._dealt

    def numbers(self, lane: int) -> Int64s:
        """The same of all that were dealt."""
        found = self._arrays.get(lane)
        if found is None or len(found) < len(self._shards[lane]):
            found = self._arrays[lane] = np.array(self._shards[lane], np.int64)
        return found


class LaneSource:
    """A source as one lane sees it: its shards are 0, 1, 2 …"""

    def __init__(self, deal: Deal, lane: int) -> None:
        self._deal, self._lane = deal, lane
        self._source = deal.source
        self.name = deal.source.name

    def has_shard(self, shard: int) -> bool | None:
        return self._deal.has(self._lane, shard)

    def wait_shard(self, shard: int) -> bool:
        return self._deal.wait(self._lane, shard)

    def rows(self, shard: int) -> int:
        return self._source.rows(self._deal.number(self._lane, shard))

    def lengths(self, shard: int) -> Int32s:
        return self._source.lengths(self._deal.number(self._lane, shard))

    def identity(self) -> dict[str, str | int]:
        return self._source.identity()

    def check_identity(self, seen: dict[str, str | int]) -> str:
        return self._source.check_identity(seen)

    def numbers(self) -> Int64s:
        """What its shards are called in the source."""
        return self._deal.numbers(self._lane)

    @property
    def num_known(self) -> int:
        return self._deal.known(self._lane)

    @property
    def is_closed(self) -> bool:
        return self._deal.source.is_closed


class LanePlan(Plan):
    """The plan of one lane. Its rows name shards as the sources do."""

    sources: list[LaneSource]  # type: ignore[assignment]

    def take(self, count: int, least: int | None = None) -> Rows:
        rows = super().take(count, least)
        segments = rows.segments
        for number, source in enumerate(self.sources):
            mine = segments[:, 1] == number
            segments[mine, 3] = source.numbers()[segments[mine, 3]]
        return rows

    def open_shards(self) -> set[tuple[int, int]]:
        return {(source, self.number(source, shard)) for source, shard in super().open_shards()}

    def number(self, source: int, shard: int) -> int:
        """What a source calls one of the lane's shards."""
        return int(self.sources[source].numbers()[shard])


def lane_config(config: PlanConfig, lane: int) -> PlanConfig:
    """The settings of one lane: its part of the pool and of the buffer, a seed of its own."""
    lanes = config.lanes
    pool = max(1, config.pool_size // lanes)
    threshold = config.refill_threshold
    return replace(
        config,
        lanes=1,
        pool_size=pool,
        refill_threshold=None if threshold is None else min(pool - 1, threshold // lanes),
        pool_tokens=max(1, config.pool_tokens // lanes),
        buffer_pieces=max(min(config.buffer_pieces, LEAST_PIECES), config.buffer_pieces // lanes),
        rest_samples=max(1, config.rest_samples // lanes),
        seed=mix_key(config.seed, _LANE, lane),
    )


def lane_stages(
    stages: Sequence[tuple[int, Sequence[float]]], lanes: Lanes, lane: int
) -> list[tuple[int, Sequence[float]]]:
    """Rows of a lane from which other weights hold; those of the stream begin batches."""
    return [(row // lanes.unit * lanes.size(lane), shares) for row, shares in stages]


def check_enough(source: Deals, lanes: int) -> None:
    """Refuse a finished source with fewer shards than lanes, before a plan is made for each."""
    if not source.is_closed or not source.num_known:
        return
    filled = sum(source.volume(shard) > 0 for shard in range(source.num_known))
    if filled < lanes:
        raise too_few(source.name, filled, lanes)


def padded_share(deals: Sequence[Deal], lanes: Lanes, passes: Sequence[int | None]) -> float:
    """The share of all places that will be padding because lanes do not end together, by the counts
    of the log; 0 if they never end."""
    limits = [limit for limit in passes if limit is not None]
    if len(limits) < len(deals):
        return 0.0
    each = [
        sum(limit * deal.load(lane) for deal, limit in zip(deals, limits, strict=True))
        for lane in range(lanes.count)
    ]
    longest = max(load / lanes.size(lane) for lane, load in enumerate(each))
    return 1 - sum(each) / (longest * lanes.unit) if longest else 0.0


def too_few(name: str, shards: int, lanes: int) -> BadConfig:
    """The error for a source that has no shard for some lane; `shards` hold something."""
    return BadConfig(
        f'source "{name}" has {shards} shards for {lanes} lanes',
        why="a lane without a shard of it would not have its share of the mixture; empty shards do "
        "not count",
        do=f"choose lanes of {max(1, shards)} at most, or make smaller shards (--rows_per_file)",
    )
