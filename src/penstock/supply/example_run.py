"""One iteration over examples: which are ours, which shards are held, where it stands.

In:    a plan of samples of length one; how many ranks and workers share its stream
Out:   places of our examples, and a position that a state can name
Keeps: every example for exactly one worker of one rank; a loaded state for exactly one pass
Never: shares more with other processes than which passes have begun, the loaded state, and how
       much memory each of them takes

    a batch of the stream is `batch_size` examples for each rank; the workers of a rank take batches
    in turn, so that batches are the same for any number of workers
"""

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from penstock.arrays import Int64s
from penstock.errors import BadConfig, StateMismatch
from penstock.stream import plan_layout as layout
from penstock.supply.engine import Engine, Share
from penstock.supply.sources.examples import Columns, ExampleSource
from penstock.supply.window import Key, Window

STATE_BYTES: Final = 1 << 18
"""Room for a loaded state, for workers that persist; one of 40 sources has 30 kB."""
WORKERS: Final = 4096
"""Workers of a DataLoader, at most."""


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
        return _FIRST + 1 + 3 * WORKERS

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

    def count_memory(self, worker: int, workers: int, who: int, used: int) -> int:
        """A worker takes so much memory; returns what all workers of its pass take."""
        slots = self._numbers.numpy()[_FIRST + 1 + WORKERS :].reshape(WORKERS, 2)
        slots[worker] = who, used
        mine = slots[:workers]
        return int(mine[mine[:, 0] == who, 1].sum())

    def note(self, began: Began) -> None:
        """How the pass began, for whoever asks for its state."""
        self._numbers[_BEGAN] = began


class ExampleWindow(Window[Columns]):
    """The decoded shards, with an eye on the memory of the process."""

    content = "examples"

    def __init__(
        self, sources: Sequence[ExampleSource], max_bytes: int, monitor: Callable[[int], str]
    ) -> None:
        """`max_bytes` is this window's part, by which it fetches ahead; `monitor` says what is
        wrong with so many bytes of decoded examples."""
        super().__init__(sources, max_bytes=max_bytes)
        self._monitor = monitor

    def _exceeded(self, held_bytes: int) -> str:
        return self._monitor(held_bytes)

    def bring(self, key: Key) -> Columns:
        found = super().bring(key)
        if not found.is_unchanged():  # somebody has changed a mapped file: it is verified again
            self._drop(key)
            found = super().bring(key)
        return found


class Run:
    """One iteration: its engine, our share of the stream, and where in that share it stands."""

    def __init__(self, engine: Engine[ExampleWindow], share: Share) -> None:
        self.engine, self.share = engine, share
        self.taken = 0
        """Examples of our part of the present batch that were handed out."""
        self.given = 0
        """Of what became of the next example."""
        self.num_taken = self.num_given = 0
        """Examples before and after augmentation."""
        self.origin: dict[str, Any] = {}
        """The engine's state at the first example of this run."""
        self.cycles = -1
        self.told = self.drawn()

    def drawn(self) -> Int64s:
        """Examples that each source has given to the plan."""
        return self.engine.plan.ledger.reshape(-1, layout.LEDGER)[:, layout.DOCUMENTS].copy()

    def step(self) -> None:
        """An example was handed out with all that became of it."""
        self.num_taken += 1
        self.taken, self.given = self.taken + 1, 0
        if self.taken == self.share.size:
            self.engine.advance(self.share.round)
            self.taken = 0

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON."""
        return {
            **self.engine.state(), "taken": self.taken, "given": self.given,
            "share": as_json(self.share), "counts": [self.num_taken, self.num_given],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken, by whoever has the same share, or between batches."""
        saved, mine = state["share"], as_json(self.share)
        whole = saved["workers"] == 1 and not state["taken"] and not state["given"]
        if saved != mine and not whole:
            raise StateMismatch(
                "the state is of one share of the stream, and this is another",
                why="\n".join(
                    f"{key}: the state has {saved[key]}, this {value}"
                    for key, value in mine.items()
                    if saved[key] != value
                ),
                do="resume with as many ranks and workers and the same batch_size, or save a "
                "state between batches without workers, or state_dict(batches=…)",
            )
        self.engine.restore(state)
        self.taken, self.given = state["taken"], state["given"]


def as_json(share: Share) -> dict[str, int]:
    return {
        "batch_size": share.size, "world_size": share.ranks, "worker": share.worker,
        "workers": share.workers,
    }  # fmt: skip


def read_by_workers(why: str) -> BadConfig:
    """The error for a state that only workers know."""
    return BadConfig(
        "workers read the dataset, and where they stand is not known here",
        why=why,
        do="ask for state_dict(batches=n), n being the batches taken since the pass began, or let "
        "torchdata's StatefulDataLoader take the states of its workers",
    )
