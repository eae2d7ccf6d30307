"""Shuffle one source through a bounded pool, in a way that needs no memory of the past.

In:    shards in log order with their row counts; pool size, refill threshold, a seed
Out:   cycles: the samples that are drawn between two refills, in their order
Keeps: each sample once in a pass; at most `pool_size` samples (and one shard) in the pool;
       a sample leaves at most `spread` cycles after it came
Never: reads data, asks the clock, depends on when a shard arrived

    refill c admits a cohort of whole shards: pool_size - refill_threshold samples, fewer at first
    a cohort is shuffled and dealt into `spread` hands; cycle c draws hand 0 of cohort c, hand 1 of
    cohort c - 1, … and shuffles what it has drawn

So a cycle is a function of the last `spread` cohorts, and the state of a pool is their names: 400
bytes where the set of two million samples would be 600 KB, and no shard is kept for long after.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.errors import BadConfig
from penstock.kernels import Kernel
from penstock.stream.source import Int32s, Source

_shuffle = Kernel("penstock.stream.plan_kernel", "shuffle", "void(int32[::1], uint64)")

_MASK = (1 << 64) - 1
MAX_SPREAD: Final = 63
"""Hands of a cohort at most: more would mix no better, and each cycle looks at every cohort."""


def mix_key(*numbers: int) -> int:
    """One 64-bit key from several numbers, each of which changes it through and through."""
    key = 0
    for number in numbers:
        key = _splitmix64(key ^ _splitmix64(number & _MASK))
    return key


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class Cohort:
    """Shards that entered the pool together: `first` to `last` (not included), in a pass."""

    number: int
    passed: int
    first: int
    last: int
    spread: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """Samples in the order in which they are drawn."""

    passes: Int32s
    shards: Int32s
    rows: Int32s
    lengths: Int32s


class Pool:
    """The pool of one source. `refill` gives cycle after cycle."""

    def __init__(
        self, source: Source, *, pool_size: int, refill_threshold: int, pool_tokens: int,
        epochs: int | None, ramp: bool, seed: int, number: int,
    ) -> None:  # fmt: skip
        self.source = source
        self._admit = max(1, pool_size - refill_threshold)
        self._admit_tokens = max(1, int(pool_tokens * self._admit / max(1, pool_size)))
        self._pool_size = pool_size
        self._epochs = epochs
        self._ramp = ramp
        self._key = mix_key(seed, number)
        self.cycle = 0
        """Cycles made so far."""
        self.passed = 0
        self.shard = 0
        """The next shard to enter, and in which pass."""
        self.repeats = 0
        """Shards that were read again because no new one was there."""
        self._repeat_pass = self._repeat_shard = 0
        self.cohorts: list[Cohort] = []
        self._hands: dict[int, Cycle] = {}

    @property
    def ended(self) -> bool:
        """Whether no shard will be admitted any more; samples may still be drawn."""
        return self._epochs is not None and self.passed >= self._epochs

    @property
    def endless(self) -> bool:
        """Whether there is no limit to the passes."""
        return self._epochs is None

    def ready(self) -> bool:
        """Whether the next cycle can be made without waiting for a shard."""
        return self._span(self.source.has_shard) is not None

    def coming(self) -> range:
        """Shards that the next refill takes in, if they are there: to be fetched ahead."""
        span = self._span(self.source.has_shard)
        return range(0) if span is None else range(span[1], span[2])

    def refill(self, *, repeat: bool = False) -> Cycle | None:
        """The next cycle, or None after the last. Blocks until the shards it needs are there.

        With `repeat` the cohort is made of shards that were read before.
        """
        began = self.passed
        while not self.endless or self.passed < began + 3:
            cohort = self._repeated() if repeat else self._admitted()
            if cohort is not None:
                self.cohorts.append(cohort)
            self.cycle += 1
            held = [c for c in self.cohorts if self.cycle - 1 - c.number < c.spread]
            for gone in set(self._hands) - {c.number for c in held}:
                del self._hands[gone]
            self.cohorts = held
            if not held:
                return None
            cycle = self._draw()
            if len(cycle.rows):
                return cycle
        raise BadConfig(
            f'source "{self.source.name}" has no documents',
            why="its shards hold no rows, and there is no limit to the passes over them",
            do="take it out, or give it documents",
        )

    def _admitted(self) -> Cohort | None:
        """The next shards in order, up to the size of a cohort or the end of the pass."""
        span = self._span(self.source.wait_shard)
        assert span is not None, "a source that waits knows"
        self.passed, first, self.shard = span
        return self._cohort(self.passed, first, self.shard) if self.shard > first else None

    def _span(self, has: Callable[[int], bool | None]) -> tuple[int, int, int] | None:
        """The pass, the first shard and the end of the next cohort; None if it is not known yet.

        An empty span means that all passes are over.
        """
        passed, first = self.passed, self.shard
        if self.ended:
            return passed, 0, 0
        there = has(first)
        if there is False:  # the pass is over
            passed, first = passed + 1, 0
            if (self._epochs is not None and passed >= self._epochs) or not has(0):
                return self._epochs or passed, 0, 0
        elif there is None:
            return None
        target = self._admit
        if self._ramp and self.cycle < 40:
            target = min(target, self.source.rows(0) << self.cycle)
        rows = tokens = 0
        last = first
        while True:
            rows += self.source.rows(last)
            lengths = self.source.lengths(last)
            tokens += int(np.where(lengths < 0, 0, lengths).sum(dtype=np.int64))
            last += 1
            if rows >= target or tokens >= self._admit_tokens:
                return passed, first, last
            there = has(last)
            if there is False:
                return passed, first, last
            if there is None:
                return None

    def can_repeat(self, cap: int) -> bool:
        """Whether there is a shard that was read again fewer than `cap` times."""
        passed = self._repeat_pass + (self._repeat_shard >= self.shard)
        return self.shard > 0 and passed < cap

    def _repeated(self) -> Cohort:
        """Shards read before, one after the other from the first on, as a pass of its own."""
        if self._repeat_shard >= self.shard:
            self._repeat_pass, self._repeat_shard = self._repeat_pass + 1, 0
        first = self._repeat_shard
        self._repeat_shard += 1
        self.repeats += 1
        return self._cohort(-1 - self._repeat_pass, first, first + 1)

    def _cohort(self, passed: int, first: int, last: int) -> Cohort:
        rows = sum(self.source.rows(shard) for shard in range(first, last))
        # cohorts of this size, dealt into n hands, fill the pool with (n + 1) / 2 of them
        spread = max(1, min(MAX_SPREAD, 2 * self._pool_size // max(rows, 1) - 1))
        return Cohort(
            self.cycle, passed, first, last, min(spread, self.cycle + 1) if self._ramp else spread
        )

    def _draw(self) -> Cycle:
        number = self.cycle - 1
        hands = []
        for cohort in self.cohorts:
            dealt = self._dealt(cohort)
            hand = number - cohort.number
            size = len(dealt.rows)
            part = slice(size * hand // cohort.spread, size * (hand + 1) // cohort.spread)
            hands.append((dealt, part))
        columns = [
            np.concatenate([getattr(dealt, name)[part] for dealt, part in hands])
            for name in ("passes", "shards", "rows", "lengths")
        ]
        order = np.arange(len(columns[0]), dtype=np.int32)
        _shuffle(order, mix_key(self._key, 1, number))
        return Cycle(*(column[order] for column in columns))

    def _dealt(self, cohort: Cohort) -> Cycle:
        """The samples of a cohort in the order in which they are dealt into hands."""
        if cohort.number not in self._hands:
            shards = range(cohort.first, cohort.last)
            counts = [self.source.rows(shard) for shard in shards]
            order = np.arange(sum(counts), dtype=np.int32)
            _shuffle(order, mix_key(self._key, 2, cohort.number))
            numbers = np.repeat(np.array(shards, np.int32), counts)
            rows = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
            lengths = np.concatenate([self.source.lengths(shard) for shard in shards])
            passes = np.full(len(order), cohort.passed, np.int32)
            self._hands[cohort.number] = Cycle(passes, numbers[order], rows[order], lengths[order])
        return self._hands[cohort.number]

    def state(self) -> dict[str, object]:
        """All that the next cycles depend on."""
        cohorts = [[c.number, c.passed, c.first, c.last, c.spread] for c in self.cohorts]
        return {
            "cycle": self.cycle, "pass": self.passed, "shard": self.shard,
            "repeats": [self.repeats, self._repeat_pass, self._repeat_shard], "cohorts": cohorts,
        }  # fmt: skip

    def restore(self, state: dict[str, object]) -> Cycle | None:
        """Go to a saved state; the cycle that was being drawn then."""
        self.cycle = _whole(state["cycle"])
        self.passed = _whole(state["pass"])
        self.shard = _whole(state["shard"])
        repeats, cohorts = state["repeats"], state["cohorts"]
        assert isinstance(repeats, list)
        assert isinstance(cohorts, list)
        self.repeats, self._repeat_pass, self._repeat_shard = map(_whole, repeats)
        self.cohorts = [Cohort(*(_whole(number) for number in line)) for line in cohorts]
        self._hands = {}
        for cohort in self.cohorts:
            for shard in range(cohort.first, cohort.last):
                self.source.wait_shard(shard)
        return self._draw() if self.cohorts else None


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value
