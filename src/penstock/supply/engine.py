"""The stream of rows under every loader: planned in blocks, its shards held, resumed anywhere.

In:    sources, the settings of a plan, a window that decodes shards
Out:   the rows of the plan, in order; a state of a few kilobytes
Keeps: the position moves when rows are handed out (`advance`), not when they are planned or read
       ahead; an error or an interrupt takes nothing
Never: looks into a document, knows what becomes of a row: that is a loader's

    ahead(unit) ─▶ rows ─▶ a loader makes a batch of them ─▶ advance(rows)
"""

import dataclasses
import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.arrays import Int64s
from penstock.errors import BadConfig, PenstockError
from penstock.stream.lanes import (
    Deal,
    Deals,
    LanePlan,
    Lanes,
    LaneSource,
    check_enough,
    lane_config,
    lane_stages,
    padded_share,
)
from penstock.stream.plan import Plan, PlanConfig, Rows, Snapshot
from penstock.stream.source import Source
from penstock.supply.agree import Agreement
from penstock.supply.ledger import Ledger, add_ledgers, count_ledger, count_segments
from penstock.supply.window import Key, Window

BLOCK_ROWS: Final = 4096
"""Rows planned at once, if no new shards are needed for them."""
TELL_S: Final = 60.0
"""How often a wait for shards is told at most."""
PADDED: Final = 0.05
"""The share of padding at the end of lanes that is told."""
COUNT_ROWS: Final = 1 << 16
"""Rows counted at once."""

_log = logging.getLogger(__name__)

KEPT_MARKS: Final = 64
"""Batches that a trainer may have fetched ahead and not trained when it saves its state."""
W = TypeVar("W", bound=Window[Any])


class Feeds(Deals, Protocol):
    """What the engine asks of a source beside what the plan does."""

    @property
    def url(self) -> str:
        """Where it is: another generation of it is elsewhere."""

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
        settings = {
            **dataclasses.asdict(self.config),
            "refill_threshold": self.config.threshold,
            "sources": self.names,
            "weights": self.weights,
            "weight_schedule": [[row, list(shares)] for row, shares in self.stages],
            "source_epochs": self.epochs,
        }
        if self.config.lanes == 1:  # as before there were any
            del settings["lanes"]
        return settings


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


Stand = tuple[Snapshot | Mapping[str, Any], int]
"""A plan before a block, itself or as JSON, and rows of that block that were handed out."""


class Blocks:
    """The rows of a plan that are planned and not handed out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stand()

    def stand(self) -> None:
        """Nothing is planned beyond where the plan is."""
        self._held: deque[tuple[Snapshot, Rows]] = deque([(self.plan.snapshot(), Rows.none())])
        self._taken = 0
        """Rows of the first block that were handed out."""
        self.is_over = False
        """Whether the plan had fewer rows than it was asked for."""

    @property
    def position(self) -> tuple[Snapshot, int]:
        """Where the rows that were handed out end."""
        return self._held[0][0], self._taken

    @property
    def row(self) -> int:
        """The next row to be handed out."""
        return self._held[0][0].row + self._taken

    @property
    def left(self) -> int:
        """Rows that are planned and not handed out."""
        return sum(len(rows.fills) for _, rows in self._held) - self._taken

    def plan_on(self, count: int, wanted: int, least: int) -> None:
        """Plan a block of up to `count` rows, `wanted` at the least; `least` would be enough."""
        before = self.plan.snapshot()
        rows = self.plan.take(count, wanted)
        self._held.append((before, rows))
        self.is_over = len(rows.fills) < least
        if self._taken == len(self._held[0][1].fills):
            self._held.popleft()
            self._taken = 0

    def ahead(self, unit: int, most: int) -> Rows:
        """The next rows, whole units of them, up to `most` if they are of one block; fewer than one
        unit if there are no more. Nothing moves."""
        rows = self._held[0][1]
        whole = (len(rows.fills) - self._taken) // unit
        if whole:
            size = min(whole, max(1, most // unit)) * unit
            return rows.part(self._taken, self._taken + size)
        return self.rest().part(0, min(self.left, unit))

    def rest(self) -> Rows:
        """Rows that are planned and not handed out."""
        first, *others = (rows for _, rows in self._held)
        return _joined([first.part(self._taken, len(first.fills)), *others])

    def advance(self, count: int) -> None:
        """So many of the rows ahead are handed out."""
        self._taken += count
        while len(self._held) > 1 and self._taken >= len(self._held[0][1].fills):
            self._taken -= len(self._held.popleft()[1].fills)

    def drain(self) -> None:
        """Read what comes after the last row: documents of which no row is made. One that was
        restored has not, and would read them in the next round."""
        if not self.is_over and not self.left:
            before = self.plan.snapshot()
            if len(self.plan.take(1).fills):
                self.plan.restore(before.as_json())

    def go_to(self, stand: Stand) -> None:
        """To a saved state of the plan, and rows after it."""
        at, skip = stand
        self.plan.restore(at.as_json() if isinstance(at, Snapshot) else at)
        self.stand()
        if skip:
            start = self._held[0][0]
            self._held[0] = start, self.plan.take(skip)
            self._taken = skip


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


class Position(NamedTuple):
    """Where the rows that were handed out end."""

    stands: tuple[Stand, ...]
    """In each lane that this rank needs."""
    given: int = 0
    """Batches of the lanes that were handed out; 0 where there is one lane."""


class Mark(NamedTuple):
    """Where a stream stood."""

    position: Position
    round: int
    began: int
    """Batches that were handed out before this round."""
    end_padding: int
    dropped: Int64s
    masked: Int64s
    is_over: bool
    """Whether the loader was read to its end."""


class _Parked(NamedTuple):
    """Where a lane stands that only other ranks need."""

    round: int
    given: int
    """Batches that were handed out then."""
    stand: Stand | None
    """None for the first row."""


class Engine(Generic[W]):
    """The rows of a mixture, and where in them a loader stands.

    With lanes, this rank plans its own ones alone. Where the others stand follows from how many
    batches were handed out: it is planned when a state or the ledger is asked for, and at the end,
    when somebody must know whether another lane has rows left.
    """

    def __init__(
        self,
        sources: Sequence[Feeds],
        mix: Mix,
        new_window: Callable[[], W],
        *,
        agreement: Agreement | None = None,
        max_rows: int | None = None,
        share: Share | None = None,
    ) -> None:
        """`new_window` is called here and after a fork. After `max_rows` the stream ends. Where the
        plan has lanes, `share` says which rows of a batch are this rank's; all that is asked for
        are such batches."""
        self.sources, self.mix = list(sources), mix
        self._new_window = new_window
        self._agreement = agreement or Agreement("wait", None, 1)
        self._max_rows = max_rows
        self._lanes = None
        if share is not None:
            self._lanes = Lanes(mix.config.lanes, share.unit, share.part)
            for source in self.sources:
                # a state may turn to another generation, which may have more shards
                if not getattr(source, "others", None):
                    check_enough(source, mix.config.lanes)
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._tell_at = 0.0
        self._tells_padding = self._lanes is not None and self._lanes.part[0] == 0
        """Whether it is still to be told how far apart lanes end: by the first rank, once."""
        self._marks: deque[tuple[int, Mark]] = deque(maxlen=KEPT_MARKS)
        self.window = new_window()
        self.begin()

    def begin(self) -> None:
        """Go to the first row."""
        lanes, epochs = self._lanes, self.mix.epochs
        self._deals: list[Deal] = []
        self._parked: dict[int, list[_Parked]] = {}
        """Of lanes that only others need: where they stood, the earlier first."""
        if lanes is None:
            self._streams = [Blocks(self._new_plan(self.sources, epochs))]
        else:
            self._deals = [Deal(source, lanes) for source in self.sources]
            self._streams = [
                Blocks(self._lane_plan(lanes, self._deals, lane, epochs)) for lane in lanes.own
            ]
            self._parked = {lane: [_Parked(0, 0, None)] for lane in lanes.others}
        self._ends: dict[int, tuple[int, int]] = {}
        """Of lanes that only others need, once it is known: a round, and its batches with rows."""
        self.round = 0
        """How often all passes were begun before."""
        self._given = self._began = 0
        """Batches of lanes that were handed out, and of these before this round."""
        self.dropped = np.zeros((2, len(self.sources)), np.int64)
        """Tokens and segments of rows at the end that became no batch."""
        self.end_padding = 0
        """Places of the rows that completed the last batch."""
        self.masked = np.zeros(len(self.sources), np.int64)
        """Tokens of rows that were handed out which their shards take out of the loss."""
        self._stand()

    @property
    def plan(self) -> Plan:
        """The plan, or that of the first lane that this rank needs."""
        return self._streams[0].plan

    def weights_at(self, row: int) -> list[float]:
        """The weights that hold for a row of the stream."""
        if self._lanes is not None:
            row = row // self._lanes.unit * self._lanes.size(self._lanes.own[0])
        return self.plan.weights_at(row)[0]

    def _new_plan(self, sources: Sequence[Source], epochs: Sequence[int | None]) -> Plan:
        mix = self.mix
        return Plan(
            sources, mix.config, mix.weights, stages=mix.stages, epochs=epochs,
            decide=self._agreement.decide, on_wait=functools.partial(self._tell_wait, 0),
        )  # fmt: skip

    def _lane_plan(
        self, lanes: Lanes, deals: Sequence[Deal], lane: int, epochs: Sequence[int | None]
    ) -> Plan:
        mix, first = self.mix, lane * len(deals)
        return LanePlan(
            [LaneSource(deal, lane) for deal in deals],
            lane_config(mix.config, lane),
            mix.weights,
            stages=lane_stages(mix.stages, lanes, lane),
            epochs=epochs,
            decide=lambda source, number, ready: self._agreement.decide(
                first + source, number, ready
            ),
            on_wait=functools.partial(self._tell_wait, lane),
        )

    def _tell_wait(self, lane: int, number: int) -> None:
        """Say what is waited for, and what is held back meanwhile; once a minute at most."""
        own = range(1) if self._lanes is None else self._lanes.own
        if lane not in own or time.monotonic() < self._tell_at:
            return
        pool = self._streams[lane - own.start].plan.pools[number]
        self._tell_at = time.monotonic() + TELL_S
        shard = self._deals[number].number(lane, pool.shard) if self._deals else pool.shard
        _log.info(
            "%s: waiting for shard %d; %s samples of earlier ones stay in the pool to be mixed "
            "with it (a smaller pool_size holds back fewer)",
            self.sources[number].name, shard, f"{pool.held:,}",
        )  # fmt: skip

    def begin_round(self) -> None:
        """After the last row: all passes once more, in another order."""
        self.settle()
        for stream in self._streams if self._max_rows is None else ():
            stream.drain()
        self._allow(self.round + 1)
        self._began = self._given
        self._stand()

    def _allow(self, round: int) -> None:
        self.round = round
        for stream in self._streams:
            stream.plan.allow(self._limits(round))

    def _limits(self, round: int) -> list[int | None]:
        """Passes over each source until the end of a round."""
        return [None if limit is None else limit * (round + 1) for limit in self.mix.epochs]

    def count_rows(self, rounds: int) -> list[int]:
        """Rows that the shards known now give in each of the first rounds, if no more come; with
        lanes, whole batches of them, padded.

        Rounds differ: in another order other documents share rows.
        """
        known = [_Known(source) for source in self.sources]
        held, lanes, epochs = self._needed(), self._lanes, self._limits(0)
        if lanes is None:
            return self._count_plan(self._new_plan(known, epochs), rounds, held)
        deals = [Deal(source, lanes, may_grow=True) for source in known]
        batches = [0] * rounds
        for lane in range(lanes.count):
            plan = self._lane_plan(lanes, deals, lane, epochs)
            found = [-(-n // lanes.size(lane)) for n in self._count_plan(plan, rounds, held)]
            batches = [max(pair) for pair in zip(batches, found, strict=True)]
        return [count * lanes.unit for count in batches]

    def _count_plan(self, plan: Plan, rounds: int, held: set[Key]) -> list[int]:
        counts = []
        for round in range(1, rounds + 1):
            plan.allow([(limit or 1) * round for limit in self.mix.epochs])
            counts.append(0)
            while found := len(plan.take(COUNT_ROWS).fills):
                counts[-1] += found
                self._forget_but(held | plan.open_shards() | _in_pools(plan))
        return counts

    def _forget_but(self, needed: set[Key]) -> None:
        for number, source in enumerate(self.sources):
            source.forget_but({shard for one, shard in needed if one == number})

    def _stand(self) -> None:
        """Nothing is planned beyond where the plans are."""
        for stream in self._streams:
            stream.stand()
        self._settled()

    def _settled(self) -> None:
        """The plans stand where somebody said."""
        self._is_over = False
        """Whether no lane has a row left in this round."""
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
        return self._broken or Position(
            tuple([stream.position for stream in self._streams]), self._given
        )

    @property
    def row(self) -> int:
        """The next row to be handed out."""
        if self._lanes is not None:
            return self.position.given * self._lanes.unit
        ((at, skip),) = self.position.stands
        return skip + (at["row"] if isinstance(at, Mapping) else at.row)

    def ahead(self, unit: int, most: int = 0) -> Rows:
        """The next rows, whole units of them, up to `most` if no new block is needed; fewer than
        one unit only at the end. Nothing moves.

        Of lanes that only other ranks need, rows are empty.
        """
        self.settle()
        try:
            self._plan_on(unit)
            if self._lanes is not None:
                return self._braided(self._lanes, unit // self._lanes.unit, most)
            return self._streams[0].ahead(unit, most)
        except BaseException:
            self._broken = self.position  # a plan may stand anywhere
            raise

    def _braided(self, lanes: Lanes, least: int, most: int) -> Rows:
        """The next rows of all lanes, `least` batches of them or more. A lane that is over has rows
        of padding, until all of them are."""
        parts: list[tuple[int, int, Rows]] = []
        go_on: list[int] = []
        ended = [0]
        for lane, stream in zip(lanes.own, self._streams, strict=True):
            first, last = lanes.rows(lane)
            size = last - first
            rows = stream.ahead(size * least, most * size // lanes.unit)
            parts.append((first, last, rows))
            if len(rows.fills) < size * least:
                ended.append(-(-len(rows.fills) // size))
            else:
                go_on.append(len(rows.fills) // size)
        count = min(go_on) if go_on else max(ended) or int(self._others_go_on(lanes))
        self._is_over = not count
        fills = np.zeros((count, lanes.unit), np.int32)
        segments = [Rows.none().segments]
        for first, last, rows in parts:
            size = last - first
            known = rows.fills[: count * size]
            mine = np.zeros(count * size, np.int32)
            mine[: len(known)] = known
            fills[:, first:last] = mine.reshape(count, size)
            part = rows.segments[: np.searchsorted(rows.segments[:, 0], count * size)].copy()
            batch, within = np.divmod(part[:, 0], size)
            part[:, 0] = batch * lanes.unit + first + within
            segments.append(part)
        joined = np.concatenate(segments)
        order = np.argsort(joined[:, 0], kind="stable")
        return Rows(self._given * lanes.unit, joined[order], fills.reshape(-1))

    def _others_go_on(self, lanes: Lanes) -> bool:
        """Whether a lane that only other ranks need has rows for the next batch."""
        for lane in lanes.others:
            if self._ends.get(lane, (-1, 0))[0] != self.round:
                plan, left = self._parked_plan(lane, self.mark(is_over=False)), 0
                while found := len(plan.take(COUNT_ROWS).fills):
                    left += found
                self._forget_but(self._needed())
                self._ends[lane] = self.round, self._given - (-left // lanes.size(lane))
            if self._ends[lane][1] > self._given:
                return True
        return False

    def _parked_plan(self, lane: int, mark: Mark) -> Plan:
        """The plan of a lane that only other ranks need, where it stood at a mark."""
        assert self._lanes is not None
        history, there = self._parked[lane], (mark.round, mark.position.given)
        base = [one for one in history if one[:2] <= there][-1]
        plan = self._lane_plan(self._lanes, self._deals, lane, self._limits(base.round))
        if base.stand is not None:
            Blocks(plan).go_to(base.stand)
        if base[:2] != there:
            self._move_parked(lane, plan, base, mark)
        if mark.is_over:  # documents after the last row are read too: those that are left out
            plan.take(1)
        return plan

    def _move_parked(self, lane: int, plan: Plan, base: _Parked, mark: Mark) -> None:
        """Let a plan go on from where it is known to a mark, and remember that."""
        assert self._lanes is not None
        history, there = self._parked[lane], (mark.round, mark.position.given)
        since = base.given
        for round in range(base.round + 1, mark.round + 1):
            while len(plan.take(COUNT_ROWS).fills):
                pass
            plan.allow(self._limits(round))
            since = mark.began
        left = (mark.position.given - since) * self._lanes.size(lane)
        while left and (found := len(plan.take(min(left, COUNT_ROWS)).fills)):
            left -= found
        kept = [one for one in history if one[:2] <= there]
        if self._marks:  # states may be asked for from there on
            first = self._marks[0][1]
            before = [one for one in kept if one[:2] <= (first.round, first.position.given)]
            kept = kept[max(0, len(before) - 1) :]
        self._parked[lane] = [*kept, _Parked(*there, (plan.snapshot(), 0))]

    def advance(self, count: int, masked: Int64s | None = None) -> None:
        """So many of the rows ahead are handed out; of each source, so many of their tokens are
        `masked`: taken out of the loss by their shards."""
        lanes = self._lanes
        if lanes is None:
            self._streams[0].advance(count)
        else:
            batches = count // lanes.unit
            self._given += batches
            for lane, stream in zip(lanes.own, self._streams, strict=True):
                stream.advance(min(batches * lanes.size(lane), stream.left))
        if masked is not None:
            self.masked = self.masked + masked

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
        self._go_to(self._broken)
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

    def _plan_on(self, unit: int) -> None:
        """Plan blocks until a unit is there, no further than the shards that it needs, so that no
        batch waits for a later one."""
        planned = False
        for k, stream in enumerate(self._streams):
            size = unit
            if (lanes := self._lanes) is not None:
                size = unit // lanes.unit * lanes.size(lanes.own[k])
            while (least := size - stream.left) > 0 and not stream.is_over:
                count = max(least, BLOCK_ROWS // unit * size)
                if self.mix.config.pack == "concat" and not all(
                    one.is_closed for one in self.sources
                ):
                    count = least  # a row that is begun would wait for a shard
                wanted = least
                if self._max_rows is not None:
                    wanted = max(0, min(least, self._max_rows - stream.plan.row))
                    count = max(0, min(count, self._max_rows - stream.plan.row))
                stream.plan_on(count, wanted, least)
                planned = True
        if planned:
            self._hold()
            if self._tells_padding and self._fetching:
                self._tell_padding()

    def _tell_padding(self) -> None:
        """Once all shards are known, say how many rows will be padding because lanes end apart."""
        assert self._lanes is not None
        if not all(source.is_closed for source in self.sources):
            return
        self._tells_padding = False
        share = padded_share(self._deals, self._lanes, self._limits(0))
        if share >= PADDED:
            _log.warning(
                "about %.0f%% of all rows will be padding at the end: the fullest of %d lanes "
                "holds so much more than others; fewer lanes, or smaller shards (--rows_per_file), "
                "end closer together (docs/train.md)",
                100 * share, self._lanes.count,
            )  # fmt: skip

    def _hold(self) -> None:
        """Bring the shards of the pools, let go of those that nothing planned needs."""
        window = self.window
        plans = [stream.plan for stream in self._streams]
        cycles = sum(pool.cycle for plan in plans for pool in plan.pools)
        refilled = cycles != self.cycles
        if refilled:
            self.cycles = cycles
            self.pooled = set[Key]().union(*map(_in_pools, plans))
        if refilled or not self._coming:
            self._coming = set[Key]().union(*(_coming(plan, self.sources) for plan in plans))
            self._coming -= self.pooled
            self._ahead &= self._coming
        if self._fetching and window.has_room(len(self._coming - self._ahead)):
            self._ahead = self._coming  # fetched while the shards of the pools are used
        if refilled or window.held > len(self.pooled):
            needed = self._needed()
            window.keep(needed)
            self._forget_but(needed)
        if self._fetching:
            window.prefetch(sorted(self.pooled))
            window.prefetch(sorted(self._ahead))

    def _needed(self) -> set[Key]:
        """The shards of all that is planned, in a pool, or comes next."""
        opened = (stream.plan.open_shards() for stream in self._streams)
        return self.pooled | self._ahead | self._used().union(*opened)

    def _used(self) -> set[Key]:
        """The shards of rows that are planned and not handed out."""
        segments = np.concatenate([stream.rest().segments for stream in self._streams])
        pairs = np.sort(segments[:, 1].astype(np.int64) << 32 | segments[:, 3])
        # not np.unique, whose first call imports 30 modules
        new = np.diff(pairs, prepend=-1) != 0
        return {(pair >> 32, pair & 0xFFFFFFFF) for pair in pairs[new].tolist()}

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
        self._go_to(self.position)
        mark, changed = self.mark(is_over=False), {}
        for lane in self._parked:  # what may fail comes first
            plan = self._parked_plan(lane, mark)
            plan.change_weights(shares)
            changed[lane] = [_Parked(mark.round, mark.position.given, (plan.snapshot(), 0))]
        for stream in self._streams:
            stream.plan.change_weights(shares)
        self._parked, self._ends = changed, {}
        self._stand()  # a state that is taken now must know of the change

    def _go_to(self, position: Position) -> None:
        """To saved states of the plans, and rows after them."""
        self._broken = position  # as long as its rows are not planned again
        self._given = position.given
        for stream, stand in zip(self._streams, position.stands, strict=True):
            stream.go_to(stand)
        self._settled()

    def mark(self, *, is_over: bool) -> Mark:
        """Where the rows that were handed out end."""
        return Mark(
            self.position, self.round, self._began, self.end_padding, self.dropped, self.masked,
            is_over,
        )  # fmt: skip

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
        saved: list[dict[str, Any]] = [
            {"plan": at if isinstance(at, Mapping) else at.as_json(), "skip": skip}
            for at, skip in self._stands(mark)
        ]
        asked = [count for one in saved for count in one["plan"].get("asked", ())]
        where: dict[str, Any] = saved[0]
        if self._lanes is not None:
            where = {"lanes": saved, "given": mark.position.given, "began": mark.began}
        return {
            **where,
            "round": mark.round,
            "decided": self._agreement.state(asked),
            "end_padding": mark.end_padding,
            "dropped": mark.dropped.tolist(),
            "masked": mark.masked.tolist(),
        }

    def _stands(self, mark: Mark) -> list[Stand]:
        """Where every lane stood at a mark."""
        if self._lanes is None:
            return list(mark.position.stands)
        own = dict(zip(self._lanes.own, mark.position.stands, strict=True))
        others = {lane: self._parked_stand(lane, mark) for lane in self._lanes.others}
        if others:
            self._forget_but(self._needed())
        found: dict[int, Stand] = {**own, **others}
        return [found[lane] for lane in range(self._lanes.count)]

    def _parked_stand(self, lane: int, mark: Mark) -> Stand:
        """Where a lane stood at a mark that only other ranks need."""
        there = mark.round, mark.position.given
        known = [one.stand for one in self._parked[lane] if one[:2] == there]
        if known and known[-1] is not None and not mark.is_over:
            return known[-1]
        return self._parked_plan(lane, mark).snapshot(), 0

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken. One that is refused changes nothing."""
        if self._deals:  # a source may have turned to another generation
            self._broken = self.position
        for deal in self._deals:
            deal.reset()
        saved = [state] if self._lanes is None else state["lanes"]
        own = range(1) if self._lanes is None else self._lanes.own
        for lane, stream in zip(own, self._streams, strict=True):
            stream.plan.check(saved[lane]["plan"])
        self._agreement.restore(state["decided"])
        self._allow(state["round"])
        stands: list[Stand] = [(one["plan"], one["skip"]) for one in saved]
        given, self._began = state.get("given", 0), state.get("began", 0)
        self._parked = {lane: [_Parked(self.round, given, stands[lane])] for lane in self._parked}
        self._ends = {}
        self._go_to(Position(tuple(stands[lane] for lane in own), given))
        self.end_padding = state["end_padding"]
        self.dropped = np.array(state["dropped"], np.int64)
        # states of before it was counted have none
        self.masked = np.array(state.get("masked", [0] * len(self.sources)), np.int64)

    def first_shards(self, needed: Sequence[Sequence[int | None]]) -> list[int]:
        """The first shard of each source, of those that the lanes call so: a line for each lane.
        After the last, the next round begins with the first."""
        found = []
        for k, shards in enumerate(zip(*needed, strict=True)):
            named = [(lane, shard) for lane, shard in enumerate(shards) if shard is not None]
            if self._deals:
                named = [(0, self._deals[k].number(lane, shard)) for lane, shard in named]
            found.append(min((shard for _, shard in named), default=0))
        return found

    def ledger(self) -> list[Ledger]:
        """What became of every token read so far, by source."""
        self.settle()
        names, lanes = self.mix.names, self._lanes
        if lanes is None:
            stream = self._streams[0]
            return count_ledger(
                stream.plan, stream.rest(), names, self.dropped, self.masked, self.end_padding
            )
        mark = self.mark(is_over=self._is_over)
        parts = [(stream.plan, stream.rest()) for stream in self._streams]
        parts += [(self._parked_plan(lane, mark), Rows.none()) for lane in lanes.others]
        self._forget_but(self._needed())
        # lanes that were over before others have rows of padding
        rows = sum(plan.row - len(ahead.fills) for plan, ahead in parts)
        padding = (self._given * lanes.unit - rows) * self.mix.config.seq_len
        return add_ledgers(
            count_ledger(
                plan,
                ahead,
                names,
                np.zeros_like(self.dropped),
                np.zeros_like(self.masked),
                padding if k == 0 else 0,
            )
            for k, (plan, ahead) in enumerate(parts)
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

    is_closed = True

    def __init__(self, source: Feeds) -> None:
        self.name = source.name
        self.num_known = source.num_known
        self.rows, self.lengths, self.volume = source.rows, source.lengths, source.volume

    def has_shard(self, shard: int) -> bool:
        return shard < self.num_known

    wait_shard = has_shard

    def identity(self) -> dict[str, str | int]:
        raise NotImplementedError

    def check_identity(self, seen: dict[str, str | int]) -> str:
        raise NotImplementedError


def _in_pools(plan: Plan) -> set[Key]:
    """The shards of a plan's pools, as the sources name them."""
    return _named(
        plan,
        (
            (number, shard)
            for number, pool in enumerate(plan.pools)
            for cohort in pool.cohorts
            for shard in range(cohort.first, cohort.last)
        ),
    )


def _coming(plan: Plan, sources: Sequence[Feeds]) -> set[Key]:
    """The shards of its next refill, as far as they are known."""
    views: Sequence[Feeds | LaneSource] = plan.sources if isinstance(plan, LanePlan) else sources
    return _named(
        plan,
        (
            (number, shard)
            for number, (pool, view) in enumerate(zip(plan.pools, views, strict=True))
            for shard in pool.coming(view.num_known, closed=view.is_closed)
        ),
    )


def _named(plan: Plan, keys: Iterable[Key]) -> set[Key]:
    if isinstance(plan, LanePlan):
        return {(number, plan.number(number, shard)) for number, shard in keys}
    return set(keys)
