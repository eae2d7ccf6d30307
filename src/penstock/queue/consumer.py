"""Take batches out of a queue, in their order, on one rank or on several.

In:    data/<dataset>/queue, filled by a provider that may still be at it
Out:   (x, y), or a dict where the schema says more; NumPy, or torch on a device
Keeps: rank r of R takes batches n + r, n + R + r, …, each once over all ranks; with `checkpointed`
       the position lives in the trainer's checkpoint, and files go once that is durable, so that a
       crash of the trainer loses and repeats nothing. A file that is damaged or missing, as after
       a power cut, is waited for: a provider that starts makes it again
Never: deletes a file that a resume could ask for, waits for ever, skips a damaged batch
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from penstock.arrays import Rooms
from penstock.errors import (
    BadBatch,
    BadConfig,
    LogDamaged,
    NoDataset,
    ProducerStalled,
    StateMismatch,
)
from penstock.options import check_numbers, config_of, number, whole
from penstock.queue.batch_file import Arrays, BatchFile
from penstock.queue.config import DELETES, SharedConfig
from penstock.queue.folder import (
    POLLS_S,
    SPLITS,
    About,
    Mark,
    Queue,
    Split,
    changes,
    command_for,
    pauses,
    stale,
)
from penstock.supply.ranks import find_rank
from penstock.supply.settings import check_checksum, with_checksum

if TYPE_CHECKING:
    from penstock.queue.claims import Claims

STATE_FORMAT: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerConfig:
    """How batches are taken."""

    delete: str = "consumed"
    """When files are deleted: `consumed`, as soon as their last batch was taken; `checkpointed`,
    once `release` was told a state whose checkpoint is safe."""
    device: Any = None
    """Where batches go as tensors of torch; without one they are arrays of NumPy."""
    stall_s: float = 120.0
    """For how long a batch is waited for."""
    rank: int | None = None
    """This process among those that train together; by default what torch.distributed or the
    environment says."""
    world_size: int | None = None
    """How many there are."""
    lease_s: float = 30.0
    """After so long without a sign of life a claimed batch is given to another consumer."""

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.delete not in DELETES:
            raise BadConfig(f"delete is {self.delete!r}", do=f"choose from {', '.join(DELETES)}")
        for name in ("stall_s", "lease_s"):
            if number(name, getattr(self, name)) <= 0:
                raise BadConfig(f"{name} is {getattr(self, name)}", do="choose more than 0 seconds")


class DatasetConsumer:
    """The trainer's end of a queue."""

    def __init__(
        self,
        data_dir: str | Path,
        config: ConsumerConfig | None = None,
        *,
        expect: SharedConfig | None = None,
    ) -> None:
        """`data_dir` is data/<dataset>. With `expect` a queue that was made under other settings is
        refused."""
        self.config = config_of("config", config, ConsumerConfig)
        expect = None if expect is None else config_of("expect", expect, SharedConfig)
        self.rank, self.world_size = find_rank(self.config.rank, self.config.world_size)
        if self.config.delete == "consumed" and self.world_size > 1:
            raise BadConfig(
                f'delete is "consumed" on {self.world_size} ranks',
                why="one rank would delete what another has not read",
                do='use delete="checkpointed", or claim() and ack()',
            )
        self.queue = Queue(data_dir)
        self.about = self._wait_for_meta()
        if expect is not None:
            self._compare(expect)
        self._lines = {name: _Line(self, name) for name in SPLITS}

    def _wait_for_meta(self) -> About:
        deadline = time.monotonic() + self.config.stall_s
        for pause in pauses():
            if (about := self.queue.find()) is not None:
                return about
            if time.monotonic() > deadline:
                break
            time.sleep(pause)
        raise ProducerStalled(
            f"the queue has had no meta.json for {self.config.stall_s:g} s",
            where=self.queue.where,
            why="its provider was ended before it made the first batch",
            do="run `python prepare.py CONFIG`, or penstock prepare CONFIG",
        )

    def _compare(self, expect: SharedConfig) -> None:
        about, queue = self.about, expect.queue
        settings = expect.data_settings(list(about.settings) if about.chosen else None)
        found = changes(
            {**about.settings, "batch_size": about.batch_size, "seed": about.seed},
            {**settings, "batch_size": queue.batch_size, "seed": queue.seed},
            told="{!r} in the queue, {!r} in the config",
        )
        if found:
            raise stale(found, command_for(expect.name), self.queue.where)

    @property
    def meta(self) -> dict[str, Any]:
        """What the provider's `build_meta` gave."""
        return self.about.meta

    def schema(self, split: str) -> list[dict[str, Any]] | None:
        """The fields of a batch."""
        self._line(split)
        return self.meta.get("batch_schema")

    def get_batch(self, split: str, device: Any = None) -> Any:
        """The next batch of this rank: (x, y), or a dict if the schema has other fields.

        Waits for the provider. Raises StopIteration after the last batch, on every rank at the
        same step: batches at the end that do not go round are left.
        """
        arrays = self._line(split).take()
        return self.placed(arrays, device)

    def placed(self, arrays: Arrays, device: Any = None) -> Any:
        """A batch as `get_batch` gives it."""
        where = self.config.device if device is None else device
        found: dict[str, Any] = dict(arrays)
        if where is not None:
            found = _tensors(arrays, where)
        return (found["x"], found["y"]) if sorted(found) == ["x", "y"] else found

    def batches(self, split: str, device: Any = None) -> Iterator[Any]:
        """Batches to the end."""
        while True:
            try:
                yield self.get_batch(split, device)
            except StopIteration:
                return

    def claims(self, split: str) -> "Claims":
        """The batches of a split, shared with any number of other consumers: each takes what is
        free, and the work of one that dies is given to another."""
        from penstock.queue.claims import Claims

        return Claims(self, split)

    def position(self, split: str) -> int:
        """The batch from which the ranks take their next ones."""
        return self._line(split).at

    def state_dict(self) -> dict[str, Any]:
        """Where all ranks stand, as JSON, for the trainer's checkpoint: it is the same on each."""
        if self.config.delete == "consumed":
            raise BadConfig(
                "a consumer that deletes what it has taken has no state",
                why="after a crash the batches since the checkpoint would be lost",
                do='make it with ConsumerConfig(delete="checkpointed")',
            )
        lines = self._lines.items()
        return with_checksum(
            {
                "format": STATE_FORMAT,
                "queue": self.about.fingerprint,
                "filling": self.about.filling,
                "next": {name: line.at if line.used else None for name, line in lines},
            }
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken, on any number of ranks."""
        found = self._checked(state)
        for line, at in found:
            if at < (floor := line.split.floor()):
                raise StateMismatch(
                    f"batches {at} to {floor - 1} of split {line.name!r} are deleted",
                    where=self.queue.where,
                    why="a later checkpoint was said to be safe, and this state is of an earlier",
                    do=f"load that one; or begin anew: {self.about.command} --purge",
                )
        for line, at in found:
            line.go_to(at)
            if self.rank == 0 and state.get("filling", "") != self.about.filling:
                line.skip_unmade()

    def release(self, state: Mapping[str, Any]) -> None:
        """Say that a checkpoint with this state is durable, and that no earlier one will be loaded:
        files that it does not need are deleted. On ranks other than 0 nothing happens."""
        for line, at in self._checked(state):
            if self.rank == 0:
                self.refuse_purged()
                line.split.raise_floor(at)

    def _checked(self, state: Mapping[str, Any]) -> list[tuple["_Line", int]]:
        """Where a state stands in each split that its consumer took batches of: the others are
        another's, or nobody's."""
        check_checksum(state)
        if state.get("format") != STATE_FORMAT or set(state.get("next", ())) != set(SPLITS):
            raise StateMismatch(
                "this is not a state of a queue", do="give what state_dict() of a consumer gave"
            )
        if state["queue"] != self.about.fingerprint:
            raise StateMismatch(
                "the state is of a queue that was made under other settings",
                where=self.queue.where,
                why=f"its fingerprint is {state['queue']}, that of the queue "
                f"{self.about.fingerprint}",
                do="go back to those settings, or train anew in another out_dir",
            )
        return [
            (self._lines[name], whole("next", at, 0))
            for name, at in sorted(state["next"].items())
            if at is not None
        ]

    def whole(self, split: Split, number: int, read: Callable[[], Arrays]) -> Arrays:
        """What `read` gives of a batch, once its file is whole. BadBatch if it stays damaged or
        missing, or is deleted."""
        waiting = Waiting(split, self.config.stall_s)
        while True:
            try:
                return read()
            except BadBatch as error:
                problem = error
            except FileNotFoundError:
                problem = BadBatch(
                    f"the file of batch {number} of split {split.layout.split!r} is missing",
                    where=str(split.root / split.layout.name(number)),
                    why="a power cut took it, or it was removed by hand, or by another consumer",
                    do="start the provider anew: it makes what is missing again",
                )
            if number < (floor := split.floor()):
                raise self.deleted(split, number, floor)
            if not waiting.goes_on():
                self.refuse_purged()
                raise problem

    def deleted(self, split: Split, batch: int, floor: int) -> BadBatch:
        """The error for a batch that is done with."""
        return BadBatch(
            f"batches {batch} to {floor - 1} of split {split.layout.split!r} are deleted",
            where=str(split.root),
            why="they were released before this rank had taken its own",
            do="release a state once all ranks have taken their batches of its step; then "
            "resume from the last checkpoint",
        )

    def stalled(self, split: Split, batch: int) -> ProducerStalled:
        """The error for a batch that was waited for too long."""
        self.refuse_purged()
        runs, command = self.queue.has_provider(), self.about.command
        return ProducerStalled(
            f"batch {batch} of split {split.layout.split!r} did not come for "
            f"{self.config.stall_s:g} s",
            where=self.queue.where,
            why="a provider runs here, and gives nothing" if runs else "no provider runs here",
            do="look at what it says, or give it longer: stall_s"
            if runs
            else f"start it: {command}; it resumes where it was",
        )

    def was_purged(self) -> bool:
        """Whether the queue was purged since it was opened: what was done with there is not done
        with here."""
        try:
            found = self.queue.find()
        except NoDataset:
            return True
        return found is None or found.filling != self.about.filling

    def refuse_purged(self) -> None:
        """Refuse a queue that was purged since it was opened."""
        if self.was_purged():
            raise LogDamaged(
                "the queue was purged while it was in use",
                where=self.queue.where,
                why="its batches are not those that this process knows of",
                do="start it again, and the provider; it resumes from its checkpoint if the "
                "settings are the same",
            )

    def sweep(self) -> None:
        """Remove what a killed trainer left, of both splits: this one may never ask for batches of
        the one that it was killed at."""
        for line in self._lines.values():
            line.split.sweep()

    def close(self) -> None:
        """Let go of files."""
        for line in self._lines.values():
            line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self, split: str) -> "_Line":
        if split not in self._lines:
            raise BadConfig(f"split is {split!r}", do=f"choose from {', '.join(SPLITS)}")
        return self._lines[split]


class Waiting:
    """Waits for a provider, as long as it makes something."""

    def __init__(self, split: Split, stall_s: float) -> None:
        self._split, self._stall_s = split, stall_s
        self._reached = 0
        """All files from the floor to here are there: after a power cut the first ones may be made
        again before the one that is waited for."""
        self._deadline = time.monotonic() + stall_s
        self._pauses = pauses()

    def goes_on(self) -> bool:
        """Pause for a moment; False if nothing new has come for `stall_s`."""
        pause = next(self._pauses)
        if pause == POLLS_S[1]:  # most waits are shorter, and look at one file alone
            floor, is_late = self._split.floor(), time.monotonic() > self._deadline
            missing = self._split.first_missing(max(self._reached, floor))
            if is_late and missing == self._reached:
                # what was there may have been damaged: a provider that starts removes it first
                missing = self._split.first_missing(floor)
            if missing != self._reached:
                self._reached = missing
                self._deadline = time.monotonic() + self._stall_s
            elif is_late:
                return False
        time.sleep(pause)
        return True


class _Line:
    """One split, as this rank sees it."""

    def __init__(self, consumer: DatasetConsumer, name: str) -> None:
        self._consumer, self.name = consumer, name
        self.split: Split = consumer.queue.split(name, consumer.about, consumer=True)
        self.at = self.split.floor()
        """The number from which all ranks take their next batches."""
        self.used = False
        """Whether that is this consumer's doing."""
        self._file: BatchFile | None = None
        self._mark: Mark | None = None
        self._rooms = {field.name: Rooms() for field in self.split.layout.schema.fields}

    def go_to(self, number: int) -> None:
        self.close()
        self.at, self.used = number, True

    def skip_unmade(self) -> None:
        """Let the provider of a queue that was purged begin here, if it has not come so far: all
        before would be made and kept for nobody."""
        if self.at > self.split.floor() and not self.split.has(self.at - 1):
            self.split.raise_floor(self.at)

    def take(self) -> Arrays:
        """This rank's next batch."""
        consumer, split = self._consumer, self.split
        if self._mark is None:
            split.agree("number")
            if consumer.rank == 0:
                consumer.sweep()
            self._mark = self._only()
        size = consumer.world_size
        self._mark.write(self.at + size)
        self._wait_for(self.at + size)
        number = self.at + consumer.rank
        found = consumer.whole(split, number, lambda: self._read(number))
        self.at, self.used = self.at + size, True
        if consumer.config.delete == "consumed" and self._is_at_end_of_file():
            self._close_file()
            if self._mark.is_removed:  # by a purge
                consumer.refuse_purged()
            split.raise_floor(self.at)
        return found

    def _only(self) -> Mark:
        """The mark of this rank, which no other process may have: both would take every batch."""
        rank, split = self._consumer.rank, self.split
        mark = Mark(split.root / "_read" / f"rank-{rank}")
        if not mark.lock():
            mark.close()
            raise BadConfig(
                f"another process takes batches of split {self.name!r} as rank {rank}",
                where=str(split.root),
                why="each batch would be in a model twice",
                do="end it, if it is an earlier trainer; give ranks numbers with torchrun or "
                "rank and world_size; or share the work with claims()",
            )
        return mark

    def _wait_for(self, stop: int) -> None:
        """Until all batches before `stop` are there: then every rank has one. StopIteration if
        they will never all be."""
        consumer, split, each = self._consumer, self.split, self.split.layout.each
        waiting = Waiting(split, consumer.config.stall_s)
        while True:
            is_there = split.has(stop - 1)
            if is_there and each == 1:
                return
            end = split.end()  # looked at after the file: it is there before a shorter file is
            if end is not None and stop > end:
                raise StopIteration(
                    f"split {self.name!r} has {end:,} batches and no more will come; the ranks "
                    f"have taken {self.at:,}"
                )
            if is_there:
                return
            if (floor := split.floor()) > self.at + consumer.rank:
                raise consumer.deleted(split, self.at, floor)
            if not waiting.goes_on():
                raise consumer.stalled(split, split.first_missing(self.at))

    def _read(self, number: int) -> Arrays:
        if self._file is None or self._file.first != self.split.layout.first(number):
            self._close_file()
            self._file = self.split.open(number)
        try:
            return self._file.read(number, self._rooms)
        except BadBatch:
            self._close_file()  # another file may stand there when it is asked for again
            raise

    def _is_at_end_of_file(self) -> bool:
        file = self._file
        return file is not None and self.at >= file.first + file.batches

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        self._close_file()
        if self._mark is not None:
            self._mark.close()
            self._mark = None


def _tensors(arrays: Arrays, device: Any) -> dict[str, Any]:
    """The batch as torch tensors: on the CPU the same memory, on a GPU pinned, without blocking."""
    try:
        import torch
    except ImportError:
        raise BadConfig(
            "torch is not installed", do='pip install "penstock[torch]", or give no device'
        ) from None
    target = torch.device(device)
    found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    # without blocking from pinned memory alone: other memory is used again by a later batch
    if is_pinned := target.type == "cuda":
        found = {name: tensor.pin_memory() for name, tensor in found.items()}
    return {name: tensor.to(target, non_blocking=is_pinned) for name, tensor in found.items()}
