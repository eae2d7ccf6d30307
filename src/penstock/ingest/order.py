"""Several inputs in one order: every stretch of it has each of them by its share.

In:    inputs that are complete, how far each was read, a seed
Out:   their pieces in the order in which they are to be begun; runs of documents in the order in
       which they are to be taken
Keeps: the order of documents a function of the inputs and the seed: of no piece, worker, restart
Never: reads data; holds more than one piece of each input that is open

An input is cut into turns of about as many bytes. Turn k of n is taken at the time (k + phase) / n,
the phase by the seed: all inputs begin and end together, and a small one stands anywhere. Pieces
are larger than turns, so what was made of one is held until the last of its turns was taken:

    Interleaving.pieces ─▶ workers ─▶ Merge.add ─▶ runs of documents, turn by turn

What can only be streamed is open as long as it is read. So where there are many of those, or more
inputs than MOST_OPEN, some follow each other in a lane, in a seeded order, and share its time.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

import numpy as np
import xxhash

from penstock.arrays import Floats, Int64s
from penstock.ingest.inputs import Input, Piece

MOST_OPEN: Final = 256
"""Inputs that are read side by side."""
_LEAST_TURNS: Final = 1024
"""Turns of all inputs together, where that is not more than one for each document."""
_TURN_BYTES: Final = 64 << 10
"""Of a turn, where there are more than that: a turn costs 0.1 ms, and 64 KB of text take 1 ms."""
_SURVEY_BYTES: Final = 1 << 30
"""Of JSON lines whose documents are counted: 1 GB in 0.3 s, and it is in memory when it is read."""
_OPENERS: Final = 16
"""Inputs that are opened at a time: those in buckets are far away."""

Held = TypeVar("Held")
Run = tuple[Held, int, int, bool]
"""What was added, first and last of its documents that come now, and whether that was all of it."""


class Interleaving:
    """When each document of several inputs comes."""

    def __init__(self, inputs: Sequence[Input], seed: int) -> None:
        self.inputs = inputs
        weights = [max(1, opened.weight) for opened in inputs]
        total = sum(weights)
        lines = [opened for opened in inputs if opened.kind == "jsonl" and not opened.streams]
        if sum(opened.weight for opened in lines) <= _SURVEY_BYTES:
            for opened in lines:
                opened.survey()
                opened.close()
        # Counts that come in turns are off by about half a turn. A fair sample of documents of 1 KB
        # is off by the root of its bytes and more, so turns may grow with the root of all.
        step = min(total // _LEAST_TURNS, max(_TURN_BYTES, 4 * math.isqrt(total)))
        self._turns = [-(-weight // max(1, step)) for weight in weights]
        draws = [xxhash.xxh3_64_intdigest(b"turn %d %d" % (seed, k)) for k in range(len(inputs))]
        self._phases = [draw / 2**64 for draw in draws]
        self._times = _share_time(inputs, weights, sorted(range(len(draws)), key=draws.__getitem__))
        told = " ".join(f"{opened.weight} {opened.units}" for opened in inputs)
        self.digest = xxhash.xxh3_64_hexdigest(told.encode())
        """Tells the sizes of all inputs: with others the order is another."""

    @classmethod
    def of(
        cls, names: Sequence[str], open_one: Callable[[str, int], Input], seed: int
    ) -> "Interleaving":
        """All of these inputs; none stays open."""

        def look(name: str, number: int) -> Input:
            opened = open_one(name, number)
            opened.is_alone = False
            assert opened.weight >= 0  # lists a tree, looks into what is compressed
            opened.close()
            return opened

        with ThreadPoolExecutor(min(_OPENERS, len(names))) as pool:
            return cls(list(pool.map(look, names, range(len(names)))), seed)

    def times(self, number: int, units: Int64s) -> Floats:
        """When each of these units of an input comes."""
        first, last = self._times[number]
        turns = self._turns[number]
        turn = np.floor(self.inputs[number].fractions(units) * turns)
        found: Floats = first + (last - first) * ((turn + self._phases[number]) / turns)
        return found

    def pieces(self, starts: Mapping[int, int]) -> Iterator[tuple[float, Input, Piece | None]]:
        """Pieces with the time of their first unit, or before; None after the last of an input.

        `starts` says where each input is read on, by its number; others were read.
        """
        coming: list[tuple[float, int]] = []
        running: dict[int, Iterator[Piece]] = {}
        waiting: dict[int, Piece | None] = {}
        for number, start in starts.items():
            opened = self.inputs[number]
            if start and opened.streams:  # where it is, is known once it was read up to there
                running[number] = opened.pieces(start)
                waiting[number] = next(running[number], None)
            coming.append((self._time(number, start), number))
        heapq.heapify(coming)
        while coming:
            time, number = heapq.heappop(coming)
            if number not in running:
                running[number] = self.inputs[number].pieces(starts[number])
            piece = waiting.pop(number) if number in waiting else next(running[number], None)
            yield time, self.inputs[number], piece
            if piece is None:
                del running[number]
            else:
                heapq.heappush(coming, (self._time(number, piece.end), number))
                del piece  # its text is not held until the next one comes

    def _time(self, number: int, unit: int) -> float:
        return float(self.times(number, np.array([unit], np.int64))[0])


def _share_time(
    inputs: Sequence[Input], weights: Sequence[int], order: Sequence[int]
) -> list[tuple[float, float]]:
    """From when to when each input is read, of all the time there is: from 0 to 1."""
    times = [(0.0, 1.0)] * len(inputs)
    kinds: dict[int, list[int]] = {}
    for number in order:
        kinds.setdefault(inputs[number].streams or MOST_OPEN, []).append(number)
    for most, numbers in kinds.items():
        if len(numbers) <= most:
            continue
        lanes: list[tuple[int, int, list[int]]] = [(0, lane, []) for lane in range(most)]
        for number in numbers:
            held, lane, chain = lanes[0]
            chain.append(number)
            heapq.heapreplace(lanes, (held + weights[number], lane, chain))
        for total, _, chain in lanes:
            done = 0
            for number in chain:
                times[number] = (done / total, (done + weights[number]) / total)
                done += weights[number]
    return times


class Merge(Generic[Held]):
    """What was made of pieces, cut into runs of documents in the order of their times."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[tuple[Held, list[tuple[float, int, int]]]]] = {}
        self._next: list[tuple[float, int]] = []
        """When the first run of each input comes."""

    def add(self, time: float, number: int, held: Held, times: Floats) -> Iterator[Run[Held]]:
        """What comes before `time`; then hold what was made of a piece of that time.

        `times` are those of its documents. Pieces are added in the order of their times.
        """
        yield from self._until((time, number))
        cuts = [0, *(np.flatnonzero(np.diff(times)) + 1).tolist(), len(times)]
        runs = [(float(times[a]), a, b) for a, b in itertools.pairwise(cuts) if b > a]
        runs = runs or [(time, 0, 0)]
        runs.reverse()
        queue = self._queues.setdefault(number, deque())
        if not queue:
            heapq.heappush(self._next, (runs[-1][0], number))
        queue.append((held, runs))

    def finish(self) -> Iterator[Run[Held]]:
        """All that is left."""
        return self._until((math.inf, 0))

    def _until(self, end: tuple[float, int]) -> Iterator[Run[Held]]:
        while self._next and self._next[0] < end:
            _, number = self._next[0]
            queue = self._queues[number]
            held, runs = queue[0]
            _, first, last = runs.pop()
            if not runs:
                queue.popleft()
            yield held, first, last, not runs
            del held
            if queue:
                heapq.heapreplace(self._next, (queue[0][1][-1][0], number))
            else:
                heapq.heappop(self._next)
                del self._queues[number]
