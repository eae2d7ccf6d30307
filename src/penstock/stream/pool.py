"""Shuffle one source through a bounded pool, in a way that needs no memory of the past.

In:    shards in log order with their row counts; pool size, refill threshold, a seed
Out:   cycles: the samples that are drawn between two refills, in their order
Keeps: each sample once in a pass, and a pass ends before the next begins; at most `pool_size`
       samples (and one shard) in the pool
Never: reads data, asks the clock, depends on when a shard arrived

    refill c admits a cohort of whole shards, until the pool is full, and shuffles it; cycle c draws
    down to the threshold, from every cohort in proportion to what is left of it, and shuffles what
    it has drawn; the last cycle of a pass draws all

That is the pool that holds samples and draws them at random, in distribution: of every sample in
the pool the same share is drawn. But a cohort is drawn in its own shuffled order, so all that a
state says of it is how far that went: 400 bytes where the set of two million samples would be
600 KB. A pass that fits the pool is a permutation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.arrays import Int32s, offsets_of
from penstock.errors import BadConfig
from penstock.kernels import Kernel
from penstock.stream.source import Source

_shuffle = Kernel("penstock.stream.plan_kernel", "shuffle", "void(int32[::1], uint64, int64)")

_MASK = (1 << 64) - 1
MAX_REFILLS: Final = 63
"""Refills in which a pool is renewed at most: more would mix no better, and each cycle looks at
every cohort."""
LAST_PART: Final = 64
"""A cohort of which less than this part is left is drawn to its end: its shards would be held for
the last few samples."""
RAMP_STAYS: Final = 4
"""On the ramp, cycle c leaves c of c + 4 samples in the pool: more would starve the trainer."""


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


class Cohort(NamedTuple):
    """Shards that entered the pool together: `first` to `last` (not included), in a pass."""

    number: int
    passed: int
    first: int
    last: int
    begun: int = 0
    """Samples that were drawn before the present cycle."""
    drawn: int = 0
    """Samples that are drawn with it."""


class Cycle(NamedTuple):
    """Samples in the order in which they are drawn."""

    passes: Int32s
    shards: Int32s
    rows: Int32s
    lengths: Int32s


@dataclass(slots=True)
class _Dealt:
    """A cohort's samples in the order in which they are drawn, from `begun` on."""

    size: int
    tokens: int
    begun: int
    samples: Cycle

    def left(self, begun: int) -> tuple[int, int]:
        """Samples and about how many tokens are left after `begun` samples."""
        return self.size - begun, self.tokens * (self.size - begun) // max(1, self.size)

    def part(self, begun: int, drawn: int) -> Cycle:
        """Samples `begun` to `drawn`; those before them are forgotten."""
        samples, skip = self.samples, begun - self.begun
        if skip:
            self.begun = begun
            samples = self.samples = Cycle(*(column[skip:].copy() for column in samples))
        return Cycle(*(column[: drawn - begun] for column in samples))


class Pool:
    """The pool of one source. `refill` gives cycle after cycle."""

    def __init__(
        self, source: Source, *, pool_size: int, refill_threshold: int, pool_tokens: int,
        epochs: int | None, ramp: bool, seed: int, number: int,
    ) -> None:  # fmt: skip
        self.source = source
        self._pool_size, self._pool_tokens = pool_size, pool_tokens
        self._stays = min(refill_threshold, pool_size - -(-pool_size // MAX_REFILLS))
        self.epochs = epochs
        """How many passes there may be; None for no limit."""
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
        """Those of the present cycle."""
        self._dealt: dict[int, _Dealt] = {}

    @property
    def ended(self) -> bool:
        """Whether no shard will be admitted any more; samples may still be drawn."""
        return self.epochs is not None and self.passed >= self.epochs

    @property
    def held(self) -> int:
        """Samples in the pool that are not drawn yet."""
        return sum(self._deal(cohort).size - cohort.drawn for cohort in self.cohorts)

    def ready(self) -> bool:
        """Whether the next cycle can be made without waiting for a shard."""
        return self._span(self.source.has_shard) is not None

    def coming(self, known: int, *, closed: bool) -> range:
        """Shards that the next refill takes in, probably, of `known` ones: to be fetched ahead. No
        lengths are asked for: they may have to be made first."""
        if self.ended or not self.cohorts:
            return range(0)
        first, wanted = self.shard, self._capacity(self.passed) - self.held
        if first >= known and closed and (self.epochs is None or self.passed + 1 < self.epochs):
            first, wanted = 0, self._pool_size
        last = first
        while last < known and wanted > 0:
            wanted -= self.source.rows(last)
            last += 1
        return range(first, last)

    def refill(self, *, repeat: bool = False) -> Cycle | None:
        """The next cycle, or None after the last. Blocks until the shards it needs are there.

        With `repeat` the cohort is made of shards that were read before.
        """
        began = self.passed
        while self.epochs is not None or self.passed < began + 3:
            cohort = self._repeated() if repeat else self._admitted()
            held = [
                one._replace(begun=one.drawn)
                for one in self.cohorts
                if one.drawn < self._deal(one).size
            ]
            self.cohorts = held if cohort is None else [*held, cohort]
            for left in set(self._dealt) - {one.number for one in self.cohorts}:
                del self._dealt[left]
            if not self.cohorts:
                return None
            self.cycle += 1
            self._share_out(is_last=cohort is None)
            cycle = self._draw()
            if len(cycle.rows):
                return cycle
        raise BadConfig(
            f'source "{self.source.name}" has no documents',
            why="its shards hold no rows, and there is no limit to the passes over them",
            do="take it out, or give it documents",
        )

    def _admitted(self) -> Cohort | None:
        """The next shards in order, until the pool is full or the pass is over; none where the
        pool must be emptied first."""
        span = self._span(self.source.wait_shard)
        assert span is not None, "a source that waits knows"
        self.passed, first, self.shard = span
        return Cohort(self.cycle, self.passed, first, self.shard) if self.shard > first else None

    def _capacity(self, passed: int) -> int:
        """Samples that the pool may hold in a pass. On a ramp the first pass begins with one shard,
        and that doubles with each cycle."""
        if self._ramp and passed == 0 and self.cycle < 40:
            return min(self._pool_size, max(1, self.source.rows(0)) << self.cycle)
        return self._pool_size

    def _span(self, has: Callable[[int], bool | None]) -> tuple[int, int, int] | None:
        """The pass, the first shard and the end of the next cohort; None if it is not known yet.

        An empty span means that the pool is emptied, or that all passes are over.
        """
        passed, first = self.passed, self.shard
        if self.ended:
            return passed, 0, 0
        left = [self._deal(one).left(one.drawn) for one in self.cohorts]
        rows, tokens = (sum(counts) for counts in zip(*left, strict=True)) if left else (0, 0)
        there = has(first)
        if there is False:  # the pass is over
            if rows:
                return passed, first, first
            passed, first = passed + 1, 0
            if (self.epochs is not None and passed >= self.epochs) or not has(0):
                return self.epochs or passed, 0, 0
        elif there is None:
            return None
        full = self._capacity(passed)
        last = first
        while True:
            rows += self.source.rows(last)
            lengths = self.source.lengths(last)
            tokens += int(np.maximum(lengths, 0).sum(dtype=np.int64))
            last += 1
            if rows >= full or tokens >= self._pool_tokens:
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
        return Cohort(self.cycle, -1 - self._repeat_pass, first, first + 1)

    def _share_out(self, *, is_last: bool) -> None:
        """Say how far each cohort is drawn in this cycle."""
        number = self.cycle - 1
        sizes = [self._deal(one).size for one in self.cohorts]
        left = [size - one.begun for size, one in zip(sizes, self.cohorts, strict=True)]
        held = sum(left)
        stays = min(held, self._pool_size) * self._stays // self._pool_size
        if self._ramp and self.cohorts[-1].passed == 0:
            stays = min(stays, held * number // (number + RAMP_STAYS))
        ends = [is_last or rest * LAST_PART < size for rest, size in zip(left, sizes, strict=True)]
        over = sum(rest for rest, ends_now in zip(left, ends, strict=True) if ends_now)
        drawn, others = max(0, held - stays - over), max(1, held - over)
        seen, shared = 0, []
        for one, rest, ends_now in zip(self.cohorts, left, ends, strict=True):
            count = rest
            if not ends_now:
                count = drawn * (seen + rest) // others - drawn * seen // others
                seen += rest
            shared.append(one._replace(drawn=one.begun + count))
        self.cohorts = shared

    def _draw(self) -> Cycle:
        """The samples of the present cycle."""
        hands = [self._deal(one).part(one.begun, one.drawn) for one in self.cohorts]
        order = np.arange(sum(len(hand.rows) for hand in hands), dtype=np.int32)
        _shuffle(order, mix_key(self._key, 1, self.cycle - 1), 0)
        return Cycle(*(np.concatenate(columns)[order] for columns in zip(*hands, strict=True)))

    def _deal(self, cohort: Cohort) -> _Dealt:
        """The samples of a cohort in the order in which they are drawn."""
        if cohort.number not in self._dealt:
            shards = range(cohort.first, cohort.last)
            counts = [self.source.rows(shard) for shard in shards]
            order = np.arange(sum(counts), dtype=np.int32)
            _shuffle(order, mix_key(self._key, 2, cohort.number), cohort.begun)
            # what was drawn before is not needed: of a cohort that is far on, nearly all
            left = order[cohort.begun :]
            columns = [self.source.lengths(shard) for shard in shards]
            if len(columns) == 1:  # as lanes often have it
                lengths, rows, numbers = columns[0], left.copy(), np.full_like(left, cohort.first)
            else:
                lengths = np.concatenate(columns)
                place = np.repeat(np.arange(len(counts), dtype=np.int32), counts)[left]
                rows = left - offsets_of(counts)[:-1].astype(np.int32)[place]
                numbers = place + np.int32(cohort.first)
            passes = np.full(len(left), cohort.passed, np.int32)
            self._dealt[cohort.number] = _Dealt(
                size=len(order),
                tokens=int(np.maximum(lengths, 0).sum(dtype=np.int64)),
                begun=cohort.begun,
                samples=Cycle(passes, numbers, rows, lengths[left]),
            )
        return self._dealt[cohort.number]

    def state(self) -> dict[str, object]:
        """All that the next cycles depend on."""
        cohorts = [list(cohort) for cohort in self.cohorts]
        return {
            "cycle": self.cycle, "pass": self.passed, "shard": self.shard,
            "repeats": [self.repeats, self._repeat_pass, self._repeat_shard], "cohorts": cohorts,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> Cycle | None:
        """Go to a saved state; the cycle that was being drawn then."""
        self.cycle, self.passed, self.shard = state["cycle"], state["pass"], state["shard"]
        self.repeats, self._repeat_pass, self._repeat_shard = state["repeats"]
        self.cohorts = [Cohort(*line) for line in state["cohorts"]]
        self._dealt = {}
        for cohort in self.cohorts:
            for shard in range(cohort.first, cohort.last):
                self.source.wait_shard(shard)
        return self._draw() if self.cohorts else None
