"""One iteration over examples: which are ours, which shards are held, where it stands.

In:    a plan of samples of length one; how many ranks and workers share its stream
Out:   places of our examples, and a position that a state can name
Keeps: every example for exactly one worker of one rank; a loaded state for exactly one pass
Never: shares more with other processes than which passes have begun, and the loaded state

    example n of the stream goes to rank n % R, and there to worker (n // R) % W; with a batch_size
    B it is blocks of B examples that are dealt out: batches are the same for any number of workers
"""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.errors import BadConfig
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, Rows
from penstock.supply.examples import Columns, ExampleSource
from penstock.supply.window import Key, Window

AHEAD: Final = 0.9
"""Shards of the next refill are fetched ahead up to this part of the memory."""

STATE_BYTES: Final = 1 << 18
"""Room for a loaded state, for workers that persist; one of 40 sources has 30 kB."""
WORKERS: Final = 4096
"""Workers of a DataLoader, at most."""

Int64s = npt.NDArray[np.int64]


class Began(enum.IntEnum):
    """How the last pass began, since a state was loaded or an epoch set."""

    NOT_YET = 0
    HERE = 1
    """In the process of the dataset itself."""
    FROM_START = 2
    """In workers, at the first example."""
    FROM_LOADED = 3
    """In workers, where the loaded state says."""
    FROM_OWN = 4
    """In workers, each with a state that it was given by itself."""


_EPOCH, _LOADS, _CLAIM, _BEGAN, _SIZE, _FIRST = range(6)


class Passes:
    """What all processes of a dataset know of its passes, in memory that they share.

    Workers are copies of the dataset, and those that persist outlive a pass: what is said to the
    dataset later must reach them. A loaded state is for the first pass after it: for workers that
    have not begun one since, if none of another pass was before them.
    """

    def __init__(self, numbers: Any, room: Any) -> None:
        """`numbers` and `room` are zeroed shared tensors: int64 and bytes."""
        self._numbers, self._room = numbers, room

    @staticmethod
    def size() -> int:
        """How many numbers there must be."""
        return _FIRST + 1 + WORKERS

    @property
    def epoch(self) -> int:
        return int(self._numbers[_EPOCH])

    @property
    def loads(self) -> int:
        """How often a state was loaded."""
        return int(self._numbers[_LOADS])

    @property
    def began(self) -> Began:
        return Began(int(self._numbers[_BEGAN]))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._numbers[_BEGAN] = Began.NOT_YET
        self._numbers[_EPOCH] = epoch

    def load(self, state: Mapping[str, Any]) -> None:
        """A state for the next pass, whoever begins it."""
        data = json.dumps(state).encode()
        fits = len(data) <= STATE_BYTES
        if fits:
            self._room.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
        self._numbers[_SIZE] = len(data) if fits else 0
        self._numbers[_EPOCH] = state["epoch"]
        self._numbers[_CLAIM], self._numbers[_BEGAN] = 0, Began.NOT_YET
        self._numbers[_LOADS] += 1

    def loaded(self) -> dict[str, Any]:
        """The state that was loaded last, for a worker that is older than it."""
        if not (size := int(self._numbers[_SIZE])):
            raise BadConfig(
                "the state is too large for workers that persist",
                why=f"there is room for {STATE_BYTES:,} bytes",
                do="make a new DataLoader after load_state_dict",
            )
        found: dict[str, Any] = json.loads(self._room.numpy()[:size].tobytes())
        return found

    def begin(self, worker: int, who: int) -> bool:
        """A worker (-1: none, the process itself) begins a pass; `who` is alike for all workers of
        a pass, though not always another one for the next. Whether the loaded state is for it."""
        slot, loads = _FIRST + 1 + worker, self.loads
        first = int(self._numbers[slot]) < loads and int(self._numbers[_CLAIM]) in (0, who)
        self._numbers[slot] = loads
        if first:
            self._numbers[_CLAIM] = who
        return first

    def note(self, began: Began) -> None:
        """How the pass began, for whoever asks for its state."""
        self._numbers[_BEGAN] = began


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


def read_by_workers(why: str) -> BadConfig:
    """The error for a state that only workers know."""
    return BadConfig(
        "workers read the dataset, and where they stand is not known here",
        why=why,
        do="ask for state_dict(batches=n), n being the batches taken since the pass began, or let "
        "torchdata's StatefulDataLoader take the states of its workers",
    )
