"""The stream of rows under every loader: planned in blocks, its shards held, resumed anywhere.

In:    sources, the settings of a plan, a window that decodes shards
Out:   the rows of the plan, in order; a state of a few kilobytes
Keeps: the position moves when rows are handed out (`advance`), not when they are planned or read
       ahead; an error or an interrupt takes nothing
Never: looks into a document, knows what becomes of a row: that is a loader's

    ahead(unit) ─▶ rows ─▶ a loader makes a batch of them ─▶ advance(rows)
"""

import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from penstock.arrays import Int64s
from penstock.errors import BadConfig, PenstockError
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, PlanConfig, Rows, Snapshot
from penstock.stream.source import Source
from penstock.supply.agree import Agreement
from penstock.supply.ledger import Ledger, count_ledger, count_segments
from penstock.supply.window import Key, Window

BLOCK_ROWS: Final = 4096
"""Rows planned at once, if no new shards are needed for them."""
TELL_S: Final = 60.0
"""How often a wait for shards is told at most."""
COUNT_ROWS: Final = 1 << 16
"""Rows counted at once."""

_log = logging.getLogger(__name__)

Position = tuple[Snapshot, int]
"""A plan before a block, and rows of that block that were handed out."""
KEPT_MARKS: Final = 64
"""Batches that a trainer may have fetched ahead and not trained when it saves its state."""
W = TypeVar("W", bound=Window[Any])


class Feeds(Source, Protocol):
    """What the engine asks of a source beside what the plan does."""

    @property
    def url(self) -> str:
        """Where it is: another generation of it is elsewhere."""

    @property
    def is_closed(self) -> bool:
        """Whether it is known that nothing more will come of what was chosen."""

    @property
    def num_known(self) -> int:
        """Chosen shards that are there, counted from the first without a gap."""

    def forget_but(self, shards: set[int]) -> None:
        """Only these are still needed."""

    def reopen(self) -> None:
        """Make anew what does not outlive a fork."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What decides every row beside the data: settings, and shares in the order of the sources."""

    config: PlanConfig
    names: list[str]
    weights: list[float]
    stages: list[tuple[int, list[float]]]
    """Rows from which other weights hold."""
    epochs: list[int | None]

    def settings(self) -> dict[str, Any]:
        """The same as JSON."""
        return {
            **dataclasses.asdict(self.config),
            "refill_threshold": self.config.threshold,
            "sources": self.names,
            "weights": self.weights,
            "weight_schedule": [[row, list(shares)] for row, shares in self.stages],
            "source_epochs": self.epochs,
        }


@dataclass(frozen=True, slots=True)
class Share:
    """Whose rows are whose: every unit of the stream is a batch, each rank has its part of it, and
    the workers of a rank take batches in turn."""

    unit: int
    """Rows of a batch over all ranks."""
    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1
    rows: tuple[int, int] | None = None
    """The part of this rank, where somebody else has dealt rows out."""

    @property
    def part(self) -> tuple[int, int]:
        """The rows of a batch that are this rank's: from, to."""
        if self.rows is not None:
            return self.rows
        return self.unit * self.rank // self.ranks, self.unit * (self.rank + 1) // self.ranks

    @property
    def size(self) -> int:
        """How many these are."""
        first, last = self.part
        return last - first

    @property
    def round(self) -> int:
        """Rows that are dealt out before it is this worker's turn again."""
        return self.unit * self.workers

    def own(self, count: int) -> Int64s:
        """Our rows of the first `count` from the beginning of a round on."""
        first, last = self.part
        starts = np.arange(self.unit * self.worker, count, self.round)
        rows = (starts[:, None] + np.arange(first, last)).reshape(-1)
        found: Int64s = rows[rows < count]
        return found

    def of(self, rows: Rows) -> Rows:
        """This rank's part of every batch in some rows, as if there were no others."""
        first, last = self.part
        if last - first == self.unit:
            return rows
        batch, within = np.divmod(rows.segments[:, 0], self.unit)
        held = (within >= first) & (within < last)
        segments = rows.segments[held]
        segments[:, 0] = (batch * (last - first) + within - first)[held]
        fills = rows.fills.reshape(-1, self.unit)[:, first:last]
        return Rows(rows.first, segments, np.ascontiguousarray(fills).reshape(-1))


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a stream stood."""

    position: Position
    round: int
    end_padding: int
    dropped: Int64s
    masked: Int64s
    is_over: bool
    """Whether the loader was read to its end."""


class Engine(Generic[W]):
    """The rows of a mixture, and where in them a loader stands."""

    def __init__(
        self,
        sources: Sequence[Feeds],
        mix: Mix,
        new_window: Callable[[], W],
        *,
        agreement: Agreement | None = None,
        max_rows: int | None = None,
    ) -> None:
        """`new_window` is called here and after a fork. After `max_rows` the stream ends."""
        self.sources, self.mix = list(sources), mix
        self._new_window = new_window
        self._agreement = agreement or Agreement("wait", None, 1)
        self._max_rows = max_rows
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tell_at = 0.0
        self._marks: deque[tuple[int, Mark]] = deque(maxlen=KEPT_MARKS)
        self.window = new_window()
        self.begin()

    def begin(self) -> None:
        """Go to the first row."""
        self.plan = self._new_plan(self.sources, self.mix.epochs)
        self.round = 0
        """How often all passes were begun before."""
        self.dropped = np.zeros((2, len(self.sources)), np.int64)
        """Tokens and segments of rows at the end that became no batch."""
        self.end_padding = 0
        """Places of the rows that completed the last batch."""
        self.masked = np.zeros(len(self.sources), np.int64)
        """Tokens of rows that were handed out which their shards take out of the loss."""
        self._stand()

    def _new_plan(self, sources: Sequence[Source], epochs: Sequence[int | None]) -> Plan:
        mix = self.mix
        return Plan(
            sources, mix.config, mix.weights, stages=mix.stages, epochs=epochs,
            decide=self._agreement.decide, on_wait=self._tell_wait,
        )  # fmt: skip

    def _tell_wait(self, number: int) -> None:
        """Say what is waited for, and what is held back meanwhile; once a minute at most."""
        pool, source = self.plan.pools[number], self.sources[number]
        if time.monotonic() < self._tell_at:
            return
        self._tell_at = time.monotonic() + TELL_S
        _log.info(
            "%s: waiting for shard %d; %s samples of earlier ones stay in the pool to be mixed "
            "with it (a smaller pool_size holds back fewer)",
            source.name, pool.shard, f"{pool.held:,}",
        )  # fmt: skip

    def begin_round(self) -> None:
        """After the last row: all passes once more, in another order."""
        self._allow(self.round + 1)
        self._stand()

    def _allow(self, round: int) -> None:
        self.round = round
        self.plan.allow(
            [None if limit is None else limit * (round + 1) for limit in self.mix.epochs]
        )

    def count_rows(self, rounds: int) -> list[int]:
        """Rows that the shards known now give in each of the first rounds, if no more come.

        Rounds differ: in another order other documents share rows.
        """
        known = [_Known(source) for source in self.sources]
        epochs = [limit or 1 for limit in self.mix.epochs]
        plan = self._new_plan(known, epochs)
        held = self._needed()
        counts = []
        for round in range(1, rounds + 1):
            plan.allow([limit * round for limit in epochs])
            counts.append(0)
            while found := len(plan.take(COUNT_ROWS).fills):
                counts[-1] += found
                used = held | plan.open_shards() | _in_pools(plan)
                for number, source in enumerate(self.sources):
                    source.forget_but({shard for one, shard in used if one == number})
        return counts

    def _stand(self) -> None:
        """Nothing is planned beyond where the plan is."""
        self._blocks: deque[tuple[Snapshot, Rows]] = deque([(self.plan.snapshot(), no_rows())])
        self._taken = 0
        """Rows of the first block that were handed out."""
        self._ended = False
        self._fetching = True
        self.cycles = -1
        """How often pools were refilled when the window was set up."""
        self.pooled: set[Key] = set()
        """The shards of the pools."""
        self._coming: set[Key] = set()
        """Those of the next refill, as far as they are known."""
        self._ahead: set[Key] = set()
        """The same, once they are being fetched."""
        self._broken: Position | None = None

    def own(self) -> "threading.RLock":
        """The lock of whoever uses the stream; a process that was forked has one of its own."""
        if self._pid != os.getpid():
            # a fork takes neither threads along nor clients of buckets
            self._pid, self._lock = os.getpid(), threading.RLock()
            self.window = self._new_window()
            for source in self.sources:
                source.reopen()
            self._broken = self.position
        return self._lock

    @property
    def position(self) -> Position:
        """Where the rows that were handed out end."""
        return self._broken or (self._blocks[0][0], self._taken)

    @property
    def row(self) -> int:
        """The next row to be handed out."""
        at, skip = self.position
        return at.row + skip

    def ahead(self, unit: int, most: int = 0) -> Rows:
        """The next rows, whole units of them, up to `most` if no new block is needed; fewer than
        one unit only at the end. Nothing moves."""
        self.settle()
        try:
            left = sum(len(rows.fills) for _, rows in self._blocks) - self._taken
            while left < unit and not self._ended:
                left += self._plan_on(unit - left)
        except BaseException:
            self._broken = self.position  # the plan may stand anywhere
            raise
        rows = self._blocks[0][1]
        whole = (len(rows.fills) - self._taken) // unit
        if whole:
            size = min(whole, max(1, most // unit)) * unit
            return slice_rows(rows, self._taken, self._taken + size)
        return slice_rows(self._planned(), 0, min(left, unit))

    def advance(self, count: int, masked: Int64s | None = None) -> None:
        """So many of the rows ahead are handed out; of each source, so many of their tokens are
        `masked`: taken out of the loss by their shards."""
        self._taken += count
        if masked is not None:
            self.masked = self.masked + masked
        while len(self._blocks) > 1 and self._taken >= len(self._blocks[0][1].fills):
            self._taken -= len(self._blocks.popleft()[1].fills)

    def undo(self, to: Mark, step: int) -> None:
        """Go back to where the stream stood after `step` batches: a later one was not handed
        out."""
        self._broken, self.end_padding = to.position, to.end_padding
        self.dropped, self.masked = to.dropped, to.masked
        while self._marks and self._marks[-1][0] > step:
            self._marks.pop()

    def settle(self) -> bool:
        """Go to the end of what was handed out, if something went wrong since; whether it did."""
        if self._broken is None:
            return False
        self._go_to(*self._broken)
        return True

    def peek(self, unit: int) -> Rows:
        """The rows of the next unit, without bringing their shards."""
        self._fetching = False
        try:
            return self.ahead(unit)
        finally:
            self._fetching, self.cycles = True, -1

    def skip(
        self, rows: int, unit: int, *, bring: bool = False,
        masked: Callable[[Rows], Int64s | None] = lambda _: None,
    ) -> int:  # fmt: skip
        """Hand out up to `rows` rows, whole units of them, without reading them; says how many.
        With `bring` their shards are brought all the same, for rows that follow; `masked` says
        which of their tokens are."""
        self._fetching, left = bring, rows
        try:
            while left > 0 and len((found := self.ahead(unit, left)).fills) >= unit:
                self.advance(len(found.fills), masked(found))
                left -= len(found.fills)
        finally:
            self._fetching, self.cycles = True, self.cycles if bring else -1
        return rows - left

    def _plan_on(self, least: int) -> int:
        """Plan a block, no further than the shards that `least` rows need, so that no batch waits
        for a later one. Says how many rows came of it."""
        count = max(least, BLOCK_ROWS // least * least)
        if self.mix.config.pack == "concat" and not all(one.is_closed for one in self.sources):
            count = least  # a row that is begun would wait for a shard
        wanted = least
        if self._max_rows is not None:
            wanted = max(0, min(least, self._max_rows - self.plan.row))
            count = max(0, min(count, self._max_rows - self.plan.row))
        before = self.plan.snapshot()
        rows = self.plan.take(count, wanted)
        self._blocks.append((before, rows))
        self._ended = len(rows.fills) < least
        if self._taken == len(self._blocks[0][1].fills):
            self._blocks.popleft()
            self._taken = 0
        self._hold()
        return len(rows.fills)

    def _hold(self) -> None:
        """Bring the shards of the pools, let go of those that nothing planned needs."""
        pools, window = self.plan.pools, self.window
        cycles = sum(pool.cycle for pool in pools)
        refilled = cycles != self.cycles
        if refilled:
            self.cycles = cycles
            self.pooled = _in_pools(self.plan)
        if refilled or not self._coming:
            self._coming = {
                (number, shard)
                for number, (pool, source) in enumerate(zip(pools, self.sources, strict=True))
                for shard in pool.coming(source.num_known, closed=source.is_closed)
            } - self.pooled
            self._ahead &= self._coming
        if self._fetching and window.has_room(len(self._coming - self._ahead)):
            self._ahead = self._coming  # fetched while the shards of the pools are used
        if refilled or window.held > len(self.pooled):
            needed = self._needed()
            window.keep(needed)
            for number, source in enumerate(self.sources):
                source.forget_but({shard for one, shard in needed if one == number})
        if self._fetching:
            window.prefetch(sorted(self.pooled))
            window.prefetch(sorted(self._ahead))

    def _needed(self) -> set[Key]:
        """The shards of all that is planned, in a pool, or comes next."""
        return self.pooled | self._ahead | self._used() | self.plan.open_shards()

    def _used(self) -> set[Key]:
        """The shards of rows that are planned and not handed out."""
        segments = self._planned().segments
        pairs = np.sort(segments[:, 1].astype(np.int64) << 32 | segments[:, 3])
        # not np.unique, whose first call imports 30 modules
        new = np.diff(pairs, prepend=-1) != 0
        return {(pair >> 32, pair & 0xFFFFFFFF) for pair in pairs[new].tolist()}

    def _planned(self) -> Rows:
        """Rows that are planned and not handed out."""
        first, *others = (rows for _, rows in self._blocks)
        return _joined([slice_rows(first, self._taken, len(first.fills)), *others])

    def count_end(self, rows: Rows, padded_to: int) -> None:
        """Count what became of the last rows, too few for a batch: a batch of `padded_to` rows, or
        none if that is 0."""
        seq_len = self.mix.config.seq_len
        if padded_to:
            self.end_padding += (padded_to - len(rows.fills)) * seq_len
        else:
            self.dropped = self.dropped + count_segments(rows.segments, len(self.sources))
            self.end_padding -= int((seq_len - rows.fills).sum())

    def change_weights(self, shares: Sequence[float]) -> None:
        """From the next row on other weights hold; the state remembers it."""
        self.settle()
        self._go_to(*self.position)
        self.plan.change_weights(shares)
        self._stand()  # a state that is taken now must know of the change

    def _go_to(self, at: Snapshot | Mapping[str, Any], skip: int) -> None:
        """To a saved state of the plan, and rows after it."""
        self.plan.restore(at.as_json() if isinstance(at, Snapshot) else at)
        self._stand()
        if skip:
            start = self._blocks[0][0]
            self._broken = start, skip  # as long as these rows are not planned again
            self._blocks[0] = start, self.plan.take(skip)
            self._taken = skip
            self._broken = None

    def mark(self, *, is_over: bool) -> Mark:
        """Where the rows that were handed out end."""
        return Mark(self.position, self.round, self.end_padding, self.dropped, self.masked, is_over)

    def note(self, step: int, *, is_over: bool, anew: bool = False) -> None:
        """Remember where the stream stands after `step` batches: trainers fetch ahead, and a state
        is to be that of batches which were trained. `anew`: earlier places are of another way."""
        if anew:
            self._marks.clear()
        self._marks.append((step, self.mark(is_over=is_over)))

    def stood(self, step: int) -> Mark:
        """Where it stood after `step` batches, when it first stood there."""
        for one, mark in self._marks:
            if one == step:
                return mark
        raise BadConfig(
            f"the loader does not know where it stood after {step} batches",
            why=f"it keeps {KEPT_MARKS} places, now those after {self._marks[0][0]} to "
            f"{self._marks[-1][0]} batches",
            do="ask for the state of a batch that was handed out lately",
        )

    def state(self, mark: Mark | None = None) -> dict[str, Any]:
        """Where it stands, or stood, as JSON."""
        mark = mark or self.mark(is_over=False)
        at, skip = mark.position
        return {
            "plan": at.as_json(),
            "round": mark.round,
            "decided": self._agreement.state(at.asked),
            "skip": skip,
            "end_padding": mark.end_padding,
            "dropped": mark.dropped.tolist(),
            "masked": mark.masked.tolist(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken. One that is refused changes nothing."""
        self.plan.check(state["plan"])
        self._agreement.restore(state["decided"])
        self._allow(state["round"])
        self._go_to(state["plan"], state["skip"])
        self.end_padding = state["end_padding"]
        self.dropped = np.array(state["dropped"], np.int64)
        # states of before it was counted have none
        self.masked = np.array(state.get("masked", [0] * len(self.sources)), np.int64)

    def ledger(self) -> list[Ledger]:
        """What became of every token read so far, by source."""
        self.settle()
        return count_ledger(
            self.plan, self._planned(), self.mix.names, self.dropped, self.masked, self.end_padding
        )

    def told_ledger(self) -> list[dict[str, Any]]:
        """The same as JSON; nothing if what broke the last batch breaks this too."""
        try:
            return [dataclasses.asdict(line) for line in self.ledger()]
        except (PenstockError, OSError):
            return []

    def close(self) -> None:
        """Let go of memory and threads."""
        if self._pid == os.getpid():
            self.window.close()


class _Known:
    """A source as it would be if nothing more came."""

    def __init__(self, source: Feeds) -> None:
        self.name = source.name
        self._count = source.num_known
        self.rows, self.lengths = source.rows, source.lengths

    def has_shard(self, shard: int) -> bool:
        return shard < self._count

    wait_shard = has_shard

    def identity(self) -> dict[str, str | int]:
        raise NotImplementedError

    def check_identity(self, seen: dict[str, str | int]) -> str:
        raise NotImplementedError


def _in_pools(plan: Plan) -> set[Key]:
    """The shards of a plan's pools."""
    return {
        (number, shard)
        for number, pool in enumerate(plan.pools)
        for cohort in pool.cohorts
        for shard in range(cohort.first, cohort.last)
    }


def no_rows(first: int = 0) -> Rows:
    return Rows(first, np.zeros((0, layout.SEGMENT), np.int32), np.zeros(0, np.int32))


def slice_rows(rows: Rows, first: int, last: int) -> Rows:
    """Rows first..last of some."""
    a, b = np.searchsorted(rows.segments[:, 0], (first, last)).tolist()
    segments = rows.segments[a:b]
    if first:
        segments = segments.copy()
        segments[:, 0] -= first
    return Rows(rows.first + first, segments, rows.fills[first:last])


def _joined(parts: list[Rows]) -> Rows:
    """Rows that follow each other, as one."""
    parts = [part for part in parts if len(part.fills)] or parts[:1]
    if len(parts) == 1:
        return parts[0]
    moved = []
    for part in parts:
        segments = part.segments.copy()
        segments[:, 0] += part.first - parts[0].first
        moved.append(segments)
    return Rows(
        parts[0].first, np.concatenate(moved), np.concatenate([part.fills for part in parts])
    )
