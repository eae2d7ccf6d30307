"""One iteration over examples: which are ours, which shards are held, where it stands.

In:    a plan of samples of length one; how many ranks and workers share its stream
Out:   places of our examples, and a position that a state can name
Keeps: every example for exactly one worker of one rank
Never: shares anything with other processes

    example n of the stream goes to rank n % R, and there to worker (n // R) % W; with a batch_size
    B it is blocks of B examples that are dealt out: batches are the same for any number of workers
"""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, Rows
from penstock.supply.examples import Columns, ExampleSource
from penstock.supply.window import Key, Window

AHEAD: Final = 0.9
"""Shards of the next refill are fetched ahead up to this part of the memory."""

Int64s = npt.NDArray[np.int64]


class Share:
    """Which examples of the stream are ours: blocks of `size`, dealt to ranks and workers."""

    def __init__(self, size: int, rank: int, ranks: int, worker: int, workers: int) -> None:
        self.size, self.worker, self.workers = size, worker, workers
        self.ranks = ranks
        self.round = size * ranks * workers
        """Examples that are dealt out before it is our turn again."""
        self.first = size * (worker * ranks + rank)
        """Where ours begin in a round."""

    def own(self, count: int) -> Int64s:
        """Places of ours in the first `count` examples from the beginning of a round on."""
        starts = np.arange(self.first, count, self.round)
        places = (starts[:, None] + np.arange(self.size)).reshape(-1)
        found: Int64s = places[places < count]
        return found

    def as_json(self) -> dict[str, int]:
        return {
            "batch_size": self.size, "world_size": self.ranks, "worker": self.worker,
            "workers": self.workers,
        }  # fmt: skip


class ExampleWindow(Window[Columns]):
    """The decoded shards, with an eye on the memory of the process."""

    content = "examples"

    def __init__(
        self, sources: Sequence[ExampleSource], max_bytes: int, monitor: Callable[[int, int], str]
    ) -> None:
        super().__init__(sources, max_bytes=max_bytes)
        self._monitor = monitor

    def _exceeded(self, held_bytes: int) -> str:
        return self._monitor(held_bytes, self._max_bytes)

    def has_room(self, shards: int) -> bool:
        """Whether so many more will fit, if they are like those that are there."""
        if not self._held or self._coming:
            return False
        expected = self.held_bytes * (1 + shards / len(self._held))
        return expected <= AHEAD * self._max_bytes


class Run:
    """One iteration: its plan, its shards, and where it stands."""

    def __init__(self, plan: Plan, window: ExampleWindow, share: Share) -> None:
        self.plan, self.window, self.share = plan, window, share
        self.start = plan.snapshot()
        """The plan before the block."""
        self.block = Rows(plan.row, np.zeros((0, layout.SEGMENT), np.int32), np.zeros(0, np.int32))
        self.row = plan.row
        """The example of the stream at which our round begins."""
        self.taken = 0
        """Of our block in that round."""
        self.given = 0
        """Of what became of the next example."""
        self.num_taken = self.num_given = 0
        """Examples before and after augmentation."""
        self.origin = self.start
        """The plan at the first example of this run."""
        self.ended = False
        self.cycles = -1
        self.keys: set[Key] = set()
        """The shards of the pools."""
        self.coming: set[Key] | None = None
        """Those of the next refill; None if it is not known yet."""
        self.ahead: set[Key] = set()
        """The same, once they are being fetched."""
        self.told = self.drawn()

    def drawn(self) -> Int64s:
        """Examples that each source has given to the plan."""
        return self.plan.ledger.reshape(-1, layout.LEDGER)[:, layout.DOCUMENTS].copy()

    def step(self) -> None:
        """An example was handed out with all that became of it."""
        self.num_taken += 1
        self.taken, self.given = self.taken + 1, 0
        if self.taken == self.share.size:
            self.row, self.taken = self.row + self.share.round, 0

    def finish(self) -> None:
        """The stream is over, for us and for all others."""
        self.start = self.plan.snapshot()
        self.row, self.taken = self.plan.row, 0


def skip_rows(plan: Plan, rows: int) -> None:
    """Go on by so many examples."""
    while rows > 0:
        size = min(rows, 1 << 16)
        if len(plan.take(size).fills) < size:
            return
        rows -= size
