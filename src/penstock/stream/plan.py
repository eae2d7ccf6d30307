"""The plan: which tokens of which documents make up each row of each batch.

In:    sources with the token counts of their samples; weights, packing, a seed
Out:   rows as segments (source, pass, shard, row, first token, tokens): no data is touched
Keeps: the same rows whether the sources are finished or still growing, however many are asked for
       at once, and wherever it was stopped and restored
Never: reads a document, asks the clock, looks at ranks

    each source is shuffled by its own pool; the source furthest behind its weight gives the next
    document; documents are packed into rows of `seq_len` tokens

Batch n of B rows over all ranks is rows n * B to (n + 1) * B of this stream; engine.Share says
which of them are a rank's.

Weights are applied draw by draw, not shard by shard: any 10,000 samples have the mixture that was
asked for, and a change of weights changes nothing about the order within a source.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32s, Int64s, offsets_of
from penstock.errors import BadConfig, StateMismatch
from penstock.kernels import Kernel
from penstock.options import MOST_SEED, check_numbers, whole
from penstock.stream import plan_layout as layout
from penstock.stream.plan_layout import Arena, Buffer, How, Sources
from penstock.stream.pool import Cycle, Pool
from penstock.stream.source import Source

_advance = Kernel(
    "penstock.stream.plan_kernel",
    "advance",
    "int64(Arena, Sources, int64[::1], Buffer, int32[::1], int32[::1], How, int64, int64)",
    *(Arena, Sources, Buffer, How),
)

BEHINDS: Final = ("wait", "repeat", "reweight")
MOST_SEQ_LEN: Final = 1 << 24


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanConfig:
    """How samples become rows. With the sources' logs it decides every batch."""

    seq_len: int = 2048
    """Tokens of a row."""
    pack: str = "bestfit"
    """`pad`: a document a row; `concat`: the stream of tokens, cut; `bestfit`: whole documents,
    each row filled with the oldest that wait, and at last with the two that fit best."""
    buffer_pieces: int = 1024
    """Documents among which `bestfit` chooses. More fill rows better and delay documents."""
    long: str = "split"
    """A document longer than a row: `split` it, `crop` it, or `drop` it. All are counted."""
    pool_size: int = 2_000_000
    """Samples held to shuffle. More mixes better and costs memory."""
    refill_threshold: int | None = None
    """Samples left in the pool when new shards are taken in; by default three quarters of it."""
    pool_tokens: int = 1 << 30
    """Tokens in the pool at most, whatever the number of samples. Shards are held until nearly
    all of their samples are drawn, and the next ones come early: about three times as many."""
    ramp: bool | None = None
    """Begin the first pass with one shard, and let the pool grow to its full size: for data that
    is still being made. By default so if a source was not sealed when the run began."""
    weigh: str = "samples"
    """What weights are shares of: `samples` or `tokens`."""
    epochs: int | None = 1
    """Passes over each source; None for no end."""
    source_epochs: Mapping[str, int] | None = None
    """Passes over single sources, by name."""
    weights: Mapping[str, float] | Sequence[float] | None = None
    """Shares of the sources, by name or in their order; by default the number of their shards."""
    weight_schedule: Mapping[int, Mapping[str, float] | Sequence[float]] | None = None
    """Batches from which other weights hold."""
    batch_tokens: int | None = None
    """Tokens of a batch on each rank, at most, instead of a number of rows: as many rows as fit,
    shared out so that every rank has as much work. `LoaderRun.balance` says what work is."""
    last: str = "pad"
    """Rows at the end that fill no batch: `pad` them to one, or `drop` them. Both are counted."""
    seed: int = 0
    lanes: int = 1
    """Independent parts of the plan. A shard is in one of them, and so is a row of every batch: a
    rank needs the shards of its own lanes alone. More mix less, and pad a little at the end."""
    behind: str = "wait"
    """If a shard is not there yet: `wait` for it, `repeat` earlier ones, or `reweight`: go on with
    the other sources."""
    repeat_cap: int = 4
    """How often a shard is read again at most under `repeat`."""
    rest_samples: int = 10_000
    """After how many samples a source that is behind is asked again under `reweight`."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if not isinstance(self.ramp, bool | None):
            raise BadConfig(f"ramp is {self.ramp!r}", do="choose True or False")
        for name, known in (
            ("pack", layout.PACKS), ("long", layout.LONGS), ("behind", BEHINDS),
            ("weigh", ("samples", "tokens")), ("last", ("pad", "drop")),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in known:
                raise BadConfig(f"{name} is {value!r}", do=f"choose from {', '.join(known)}")
        for name, least, most in (
            ("seq_len", 1, MOST_SEQ_LEN), ("buffer_pieces", 1, 1 << 24), ("pool_size", 1, 1 << 48),
            ("threshold", 0, 1 << 48), ("pool_tokens", 1, 1 << 48),
            ("repeat_cap", 0, 1 << 30), ("rest_samples", 1, 1 << 48), ("seed", 0, MOST_SEED),
            ("lanes", 1, 1 << 16),
        ):  # fmt: skip
            told = "refill_threshold" if name == "threshold" else name
            whole(told, getattr(self, name), least, most)
        if self.threshold >= self.pool_size:
            raise BadConfig(
                f"refill_threshold is {self.threshold:,}, pool_size {self.pool_size:,}",
                do="choose a threshold below the pool's size, three quarters of it for example",
            )
        if self.batch_tokens is not None:
            whole("batch_tokens", self.batch_tokens, 1, 1 << 36)
        if self.lanes > 1 and (self.batch_tokens is not None or self.last != "pad"):
            told = "batch_tokens" if self.batch_tokens is not None else f"last={self.last!r}"
            raise BadConfig(
                f"lanes is {self.lanes}, with {told}",
                why="a rank knows the rows of its own lanes alone: not how many tokens the others "
                "have, nor which lane is over first",
                do='give lanes=1, or a number of rows (batch_size) and last="pad"',
            )
        if self.epochs is not None and not 1 <= self.epochs <= 1 << 30:
            raise BadConfig(
                f"epochs is {self.epochs}", do=f"choose from 1 to {1 << 30:,}, or None for no end"
            )

    @property
    def threshold(self) -> int:
        """Samples left in the pool when new shards are taken in."""
        return self.pool_size * 3 // 4 if self.refill_threshold is None else self.refill_threshold


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `first` to `first + len(fills)` of the stream."""

    first: int
    segments: Int32s
    """A line for each segment: row (from `first`), source, pass, shard, row in the shard, first
    token, tokens; in the order in which they stand in the rows."""
    fills: Int32s
    """Tokens of each row; the rest of it is padding."""

    @classmethod
    def none(cls) -> "Rows":
        """No rows."""
        return cls(0, np.zeros((0, layout.SEGMENT), np.int32), np.zeros(0, np.int32))

    def part(self, first: int, last: int) -> "Rows":
        """Rows first..last of these."""
        a, b = np.searchsorted(self.segments[:, 0], (first, last)).tolist()
        segments = self.segments[a:b]
        if first:
            segments = segments.copy()
            segments[:, 0] -= first
        return Rows(self.first + first, segments, self.fills[first:last])


class Plan:
    """The stream of rows. `take` gives the next ones."""

    def __init__(
        self,
        sources: Sequence[Source],
        config: PlanConfig,
        weights: Sequence[float],
        *,
        stages: Sequence[tuple[int, Sequence[float]]] = (),
        epochs: Sequence[int | None] = (),
        decide: Callable[[int, int, bool], bool] = lambda source, number, ready: ready,
        on_wait: Callable[[int], None] = lambda source: None,
    ) -> None:
        """`stages` are rows from which other weights hold; `epochs` limits single sources;
        `decide` lets all ranks agree on whether a source had its shards at a refill; `on_wait` is
        told before the plan waits for a source."""
        if not sources:
            raise BadConfig("a plan needs a source", do="give at least one")
        self.config = config
        self.sources = list(sources)
        self._decide, self._on_wait = decide, on_wait
        self.changes: list[tuple[int, list[float]]] = []
        self._stages = [(0, list(weights)), *((row, list(w)) for row, w in stages)]
        for _, shares in self._stages:
            _check_weights(shares, len(sources))
        total = sum(weights)
        limits = list(epochs) or [config.epochs] * len(sources)
        self.pools = [
            Pool(
                source,
                pool_size=max(1, round(config.pool_size * max(share / total, 1e-6))),
                refill_threshold=round(config.threshold * max(share / total, 1e-6)),
                pool_tokens=max(1, round(config.pool_tokens * max(share / total, 1e-6))),
                epochs=limit,
                ramp=bool(config.ramp),
                seed=config.seed,
                number=number,
            )
            for number, (source, share, limit) in enumerate(
                zip(sources, weights, limits, strict=True)
            )
        ]
        self._reset()

    def _reset(self, pieces: Sequence[Sequence[int]] = ()) -> None:
        """Begin anew, with `pieces` in the packer's buffer, oldest first."""
        count = len(self.sources)
        self.row = 0
        """Rows given so far."""
        self._at = np.zeros(count, np.int64)
        self._end = np.zeros(count, np.int64)
        self._base = np.zeros(count + 1, np.int64)
        self._arena = Arena(*(np.zeros(0, np.int32) for _ in Arena._fields))
        self._credit = np.zeros(count, np.float64)
        self._over = np.zeros(count, np.bool_)
        self._rests = np.full(count, -1, np.int64)
        self._asked = np.zeros(count, np.int64)
        self._gained = [(-1, 0)] * count
        self.ledger = np.zeros(count * layout.LEDGER, np.int64)
        self._scalars = np.zeros(layout.SCALARS, np.int64)
        self._hold(pieces)
        self._segments = np.zeros(4096 * layout.SEGMENT, np.int32)
        self._fills = np.zeros(64, np.int32)

    def _hold(self, pieces: Sequence[Sequence[int]]) -> None:
        """Put pieces, oldest first, into an empty buffer."""
        capacity = self.config.buffer_pieces if self.config.pack == "bestfit" else 1
        lengths, held = self.config.seq_len + 1, len(pieces)
        sizes = [piece[5] for piece in pieces]
        # a piece follows the one before it, and the last one before it that is as long
        first, last, after = dict[int, int](), dict[int, int](), [-1] * held
        for slot, size in enumerate(sizes):
            if size in last:
                after[last[size]] = slot
            first.setdefault(size, slot)
            last[size] = slot
        self._buffer = buffer = Buffer(
            pieces=np.zeros(capacity * layout.PIECE, np.int64),
            older=np.full(capacity, -1, np.int64),
            newer=np.arange(1, capacity + 1),
            after=np.full(capacity, -1, np.int64),
            first=np.full(lengths, -1, np.int64),
            last=np.full(lengths, -1, np.int64),
            words=np.zeros((lengths + 63) // 64, np.uint64),
        )
        buffer.newer[-1] = -1
        scalars = self._scalars
        scalars[layout.HELD] = held
        scalars[layout.HELD_TOKENS] = sum(sizes)
        scalars[layout.OLDEST] = 0 if pieces else -1
        scalars[layout.NEWEST] = held - 1
        scalars[layout.FREE] = held if held < capacity else -1
        if pieces:
            buffer.pieces[: held * layout.PIECE] = np.array(pieces, np.int64).reshape(-1)
            buffer.older[:held] = np.arange(-1, held - 1)
            buffer.newer[held - 1] = -1
            buffer.after[:held] = after
            buffer.first[list(first)] = list(first.values())
            buffer.last[list(last)] = list(last.values())
            for size in first:
                buffer.words[size >> 6] |= np.uint64(1 << (size & 63))

    def allow(self, epochs: Sequence[int | None]) -> None:
        """Let each source have so many passes. A plan that was over goes on with the next one."""
        for pool, limit in zip(self.pools, epochs, strict=True):
            pool.epochs = limit
        self._over[:] = False

    def weights_at(self, row: int) -> tuple[list[float], int | None]:
        """The weights that hold for a row, and the row from which others do."""
        steps = sorted([*self._stages, *self.changes], key=lambda stage: stage[0])
        now = [stage for stage in steps if stage[0] <= row]
        later = [stage[0] for stage in steps if stage[0] > row]
        return now[-1][1], later[0] if later else None

    def change_weights(self, weights: Sequence[float]) -> None:
        """From the next row on other weights hold. The change becomes part of the state."""
        _check_weights(weights, len(self.sources))
        self.changes.append((self.row, list(weights)))

    def drawable(self) -> int:
        """About how many samples can be drawn before a source must be refilled."""
        shares, _ = self.weights_at(self.row)
        weight = np.where(self._over, 0.0, shares)
        used = weight > 0.0
        left = np.maximum(self._end - self._at - 1, 0)[used] * weight.sum() / weight[used]
        return int(left.min()) if used.any() else 0

    def take(self, count: int, least: int | None = None) -> Rows:
        """The next `count` rows, or from `least` of them on those that need no new shards, beside
        a row that is begun; fewer only at the end. Blocks until the shards are there."""
        least = count if least is None else least
        scalars = self._scalars
        scalars[layout.ROWS] = scalars[layout.SEGMENTS] = 0
        if len(self._fills) < count:
            self._fills = np.zeros(count, np.int32)
        first, want = self.row, 0
        while want < count:
            shares, change = self.weights_at(self.row)
            want = count if change is None else min(count, change - first)
            code = self._advance(shares, want, first)
            self.row = first + int(scalars[layout.ROWS])
            if code == layout.DONE:
                if scalars[layout.ROWS] < want:
                    break
                continue
            want = 0
            if code == layout.GROW:
                more = np.zeros(len(self._segments), np.int32)
                self._segments = np.concatenate([self._segments, more])
            elif code == layout.REST_OVER:
                self._rests[self._rests == scalars[layout.DRAWN]] = -1
            elif scalars[layout.ROWS] >= least and not self._is_within_row():
                break
            else:
                if scalars[layout.ROWS] >= least:
                    count = int(scalars[layout.ROWS]) + 1
                self._refill(int(code) - layout.REFILL)
        used = int(scalars[layout.SEGMENTS]) * layout.SEGMENT
        segments = self._segments[:used].reshape(-1, layout.SEGMENT).copy()
        return Rows(first, segments, self._fills[: int(scalars[layout.ROWS])].copy())

    def _is_within_row(self) -> bool:
        """Whether segments of a row were given that is not full yet."""
        used = int(self._scalars[layout.SEGMENTS])
        last = self._segments[(used - 1) * layout.SEGMENT] if used else -1
        return bool(last == self._scalars[layout.ROWS])

    def _advance(self, shares: list[float], want: int, given: int) -> int:
        weight = np.array(shares, np.float64)
        weight[self._over | (self._rests >= 0)] = 0.0
        if not weight.any() and (self._rests >= 0).any():
            # all others are over: nothing to go on with, so wait for those that rest
            self._rests[:] = -1
            weight = np.array(shares, np.float64)
            weight[self._over] = 0.0
        if weight.any():
            weight /= weight.sum()
        resting = self._rests[self._rests >= 0]
        config = self.config
        how = How(
            pack=layout.PACKS.index(config.pack),
            long=layout.LONGS.index(config.long),
            by_tokens=config.weigh == "tokens",
            seq_len=config.seq_len,
            rest_until=int(resting.min()) if len(resting) else -1,
        )
        sources = Sources(self._at, self._end, weight, self._credit, self.ledger)
        return int(
            _advance(
                self._arena, sources, self._scalars, self._buffer, self._segments, self._fills, how,
                want, given,
            )
        )  # fmt: skip

    def _check_gain(self, number: int) -> None:
        """A source of which two whole passes left nothing to train on would be read for ever."""
        line = self.ledger[number * layout.LEDGER :]
        kept = int(line[layout.READ] - line[layout.SKIPPED])
        pool, (before, passed) = self.pools[number], self._gained[number]
        if kept != before:
            self._gained[number] = kept, pool.passed
        elif pool.epochs is None and pool.passed > passed + 1:
            raise nothing_in(self.sources[number])

    def _refill(self, number: int) -> None:
        pool, config = self.pools[number], self.config
        self._check_gain(number)
        repeat = False
        if config.behind != "wait":
            asked = int(self._asked[number])
            self._asked[number] += 1
            if not self._decide(number, asked, pool.ready()):
                weighted = np.array(self.weights_at(self.row)[0]) > 0.0
                goes_on = weighted & ~self._over & (self._rests < 0)
                alone = not np.delete(goes_on, number).any()
                if config.behind == "reweight" and not alone:
                    drawn = int(self._scalars[layout.DRAWN])
                    self._rests[number] = drawn + config.rest_samples
                    return
                repeat = config.behind == "repeat" and pool.can_repeat(config.repeat_cap)
        if not repeat and not pool.ready():
            self._on_wait(number)
        cycle = pool.refill(repeat=repeat)
        if cycle is None:
            self._over[number] = True
            self._at[number] = self._end[number] = self._base[number]
        else:
            self._put(number, cycle)

    def _put(self, number: int, cycle: Cycle, at: int = 0) -> None:
        """A cycle into the source's place in the arena, which grows where it must."""
        size, base = len(cycle.rows), self._base
        if size > base[number + 1] - base[number]:
            room = np.diff(base)
            room[number] = size + size // 4
            moved = offsets_of(room)
            old = self._arena
            self._arena = Arena(*(np.zeros(int(moved[-1]), np.int32) for _ in old))
            for s in range(len(room)):
                if s != number:
                    span = slice(int(base[s]), int(self._end[s]))
                    shift = int(moved[s] - base[s])
                    for new, before in zip(self._arena, old, strict=True):
                        new[span.start + shift : span.stop + shift] = before[span]
            shifts = moved[:-1] - base[:-1]
            self._at += shifts
            self._end += shifts
            self._base = base = moved
        start = int(base[number])
        for column, values in zip(self._arena, cycle, strict=True):
            column[start : start + size] = values
        self._at[number], self._end[number] = start + at, start + size

    def snapshot(self) -> "Snapshot":
        """Where the plan stands, cheap enough to be taken before every block."""
        arrays = (
            self._scalars, self._buffer.pieces, self._buffer.newer, self._at - self._base[:-1],
            self._credit, self._over, self._rests, self._asked, self.ledger,
        )  # fmt: skip
        return Snapshot(
            self.row,
            [array.copy() for array in arrays],
            list(self.changes),
            [pool.state() for pool in self.pools],
        )

    def state(self) -> dict[str, Any]:
        """All that the next rows depend on, as JSON."""
        return self.snapshot().as_json()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved state. Shards that it names must be there."""
        self.check(state)
        self._reset(state["pieces"])
        self.row = state["row"]
        for k, value in zip(_KEPT, state["open"], strict=True):
            self._scalars[k] = value
        self._credit[:] = state["credit"]
        self._over[:] = state["over"]
        self._rests[:] = state["rests"]
        self._asked[:] = state["asked"]
        self.ledger[:] = state["ledger"]
        self.changes = [(row, list(weights)) for row, weights in state["changes"]]
        for number, (pool, saved) in enumerate(zip(self.pools, state["pools"], strict=True)):
            cycle = pool.restore(saved)
            if cycle is None:
                continue
            at = state["at"][number]
            if not 0 <= at <= len(cycle.rows):
                raise StateMismatch(
                    "the state names a sample that is not there",
                    why=f"source {number}: sample {at} of {len(cycle.rows)} between two refills",
                    do="use the state of another checkpoint",
                )
            self._put(number, cycle, at)

    def check(self, state: Mapping[str, Any]) -> None:
        """Documents that a state names must be there: a kernel will read them."""
        opened = state["open"][: layout.OPEN_LEFT + 1]
        pieces = [*state["pieces"], *([opened] if opened[layout.OPEN_LEFT] else [])]
        for piece in pieces:
            number, _, shard, row, at, size = piece
            known = 0 <= number < len(self.sources) and shard >= 0
            if piece is not opened and size > self.config.seq_len:
                known = False
            if known and self.sources[number].wait_shard(shard):
                lengths = self.sources[number].lengths(shard)
                if 0 <= row < len(lengths) and at >= 0 and 0 < size <= lengths[row] - at:
                    continue
            raise StateMismatch(
                "the state names a document that is not there",
                why=f"source {number}, shard {shard}, row {row}, {size} tokens from {at} on",
                do="use the state of another checkpoint",
            )

    def open_shards(self) -> set[tuple[int, int]]:
        """Sources and shards of the documents that are in the packer."""
        found = {
            (piece[0], piece[2])
            for piece in _held(self._scalars, self._buffer.pieces, self._buffer.newer)
        }
        if self._scalars[layout.OPEN_LEFT]:
            source = int(self._scalars[layout.OPEN_SOURCE])
            found.add((source, int(self._scalars[layout.OPEN_SHARD])))
        return found

    def waiting(self) -> Int64s:
        """Tokens of each source that are in the packer and in no row yet."""
        found = np.zeros(len(self.sources), np.int64)
        for piece in _held(self._scalars, self._buffer.pieces, self._buffer.newer):
            found[piece[0]] += piece[5]
        found[self._scalars[layout.OPEN_SOURCE]] += self._scalars[layout.OPEN_LEFT]
        return found


_KEPT = (*range(layout.OPEN_SOURCE, layout.OPEN_LEFT + 1), layout.DRAWN)
"""The scalars that outlive a row."""


def _held(scalars: Int64s, pieces: Int64s, newer: Int64s) -> list[list[int]]:
    """The pieces of the packer's buffer, oldest first."""
    order, slot = [], int(scalars[layout.OLDEST])
    links = newer.tolist()
    while slot >= 0:
        order.append(slot)
        slot = links[slot]
    found: list[list[int]] = pieces.reshape(-1, layout.PIECE)[order].tolist()
    return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of what a plan is made of."""

    row: int
    arrays: list[npt.NDArray[Any]]
    changes: list[tuple[int, list[float]]]
    pools: list[dict[str, object]]

    @property
    def asked(self) -> list[int]:
        """Questions asked about each source being behind."""
        found: list[int] = self.arrays[7].tolist()
        return found

    def as_json(self) -> dict[str, Any]:
        """The same as numbers and lists."""
        scalars, pieces, newer, at, credit, over, rests, asked, ledger = self.arrays
        return {
            "row": self.row,
            "open": scalars[list(_KEPT)].tolist(),
            "pieces": _held(scalars, pieces, newer),
            "at": at.tolist(),
            "credit": credit.tolist(),
            "over": over.tolist(),
            "rests": rests.tolist(),
            "asked": asked.tolist(),
            "ledger": ledger.tolist(),
            "changes": [[row, list(weights)] for row, weights in self.changes],
            "pools": self.pools,
        }


def nothing_in(source: Source) -> BadConfig:
    """The error for a source that can never give a token."""
    return BadConfig(
        f'nothing in source "{source.name}" can be trained on',
        why="all of its documents are empty, banned, or longer than a row while long is drop",
        do="take it out, or look at its documents",
    )


def _check_weights(weights: Sequence[float], count: int) -> None:
    if len(weights) != count:
        raise BadConfig(f"{len(weights)} weights for {count} sources", do="give one for each")
    for weight in weights:
        if not 0.0 <= weight < float("inf"):
            raise BadConfig(f"a weight is {weight}", do="choose 0 or more")
    if not sum(weights) < float("inf"):
        raise BadConfig("the weights add up to more than a number can hold", do="scale them down")
    if not sum(weights) > 0.0:
        raise BadConfig("all weights are 0", do="give at least one source a weight above 0")
