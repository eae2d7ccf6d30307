"""Make batches and put them into a queue, ahead of whoever trains on them.

In:    a subclass that says what a batch is (`build_meta`) and makes one (`sample_batch`)
Out:   files of batches in data/<dataset>/queue/{train,val}
Keeps: batch n of a split is made with an RNG of (seed, split, n) and appears under its number once:
       a provider that was killed and started again neither repeats nor skips one, and makes anew
       what a power cut has taken or damaged
Never: makes more than `backlog_batches` that nobody has read, writes a batch that is not as its
       schema says
"""

import abc
import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from penstock.arrays import Rooms
from penstock.errors import BadBatch
from penstock.queue.batch_file import Arrays, Schema
from penstock.queue.config import SharedConfig
from penstock.queue.folder import SPLITS, About, Queue, Split, checked_meta, pauses
from penstock.store.local import Draft
from penstock.work.events import Events
from penstock.work.run import signals_noted

TELL_S: Final = 1.0
MOST_TOLD: Final = 8
"""Damaged files that are named."""
MOST_WAITING: Final = 32
"""Files that wait to be synced, where they are."""


class DataProviderBase(abc.ABC):
    """Fills the queue of a dataset. A subclass gives `build_meta` and `sample_batch`.

    Batch n must depend on nothing but `split`, `rng` and `self.batch_number`: then it is the same
    after a restart.
    """

    torch_rng: ClassVar[bool] = False
    """Whether `rng` is a torch.Generator; otherwise it is a Generator of NumPy."""
    repeatable: ClassVar[bool] = True
    """Whether a batch made again is the same. That is checked when a provider starts anew, and
    files of batches are not synced: what a power cut takes is made again."""
    data_settings: ClassVar[Sequence[str] | None] = None
    """The settings that decide batches. By default all but those of the trainer and the queue."""

    def __init__(self, config: SharedConfig) -> None:
        self.config = config
        """The shared config: `self.config["mask_probability"]`."""
        self.dataset = config.queue.dataset
        self.data_dir: Path = config.folder
        """data/<dataset>"""
        self.batch_size = config.queue.batch_size
        self.block_size = config.queue.block_size
        self.seed = config.queue.seed
        self.batch_number = 0
        """The number of the batch that is being made."""
        self.stopped_by: int | None = None
        """The signal that ended `run`."""

    @abc.abstractmethod
    def build_meta(self) -> dict[str, Any]:
        """What the trainer must know: `batch_schema`, `vocab_size`, … in values of JSON."""

    @abc.abstractmethod
    def sample_batch(self, split: str, rng: Any) -> Mapping[str, Any]:
        """A batch: for each field of `batch_schema` an array or a tensor of `batch_size` rows.

        StopIteration says that the split ends before this batch.
        """

    def about(self) -> About:
        """What the queue is to be."""
        names = self.data_settings
        return About.make(
            dataset=self.dataset,
            meta=checked_meta(self.build_meta(), type(self).__name__),
            settings=self.config.data_settings(names),
            chosen=names is not None,
            seed=self.seed,
            batch_size=self.batch_size,
            batches_per_file=self.config.queue.batches_per_file,
            config=self.config.name,
        )

    def make_batch(self, split: str, number: int, schema: Schema) -> Arrays:
        """Batch `number` of a split, if it is as the schema says."""
        self.batch_number = number
        batch = self.sample_batch(split, self._rng(split, number))
        where = f"batch {number} of split {split!r}, from {type(self).__name__}.sample_batch"
        return schema.check(batch, self.batch_size, where)

    def _rng(self, split: str, number: int) -> Any:
        rng = batch_rng(self.seed, split, number)
        if not self.torch_rng:
            return rng
        import torch

        return torch.Generator().manual_seed(int(rng.integers(1 << 63)))

    def run(
        self, splits: Sequence[str] = SPLITS, *, events: Events | None = None
    ) -> dict[str, int]:
        """Fill the queue until a signal says stop, or every split has ended. Says how many batches
        of each were made."""
        queue, backlog = Queue(self.data_dir), self.config.queue.backlog_batches
        made = dict.fromkeys(splits, 0)
        with signals_noted(self), queue.locked(), _Writer(synced=not self.repeatable) as writer:
            about = self.about()
            queue.open(about)
            lines = [_Line(self, name, queue.split(name, about), writer) for name in splits]
            for line in lines:
                if line.damaged and events is not None:
                    events.emit("warn", message=line.told_damaged())
                if line.has_ended and events is not None:
                    told_end = f"split {line.name!r} has ended: all {line.next:,} batches are made"
                    events.emit("warn", message=told_end)
            told, rest = time.monotonic(), pauses()
            while self.stopped_by is None and not all(line.has_ended for line in lines):
                behind = [line for line in lines if line.unread() < backlog and not line.has_ended]
                for line in behind:
                    made[line.name] += line.make_file()
                    rest = pauses()
                if not behind:
                    time.sleep(next(rest))
                if events is not None and time.monotonic() - told > TELL_S:
                    told = time.monotonic()
                    at = ", ".join(f"{line.name} {line.next:,}" for line in lines)
                    events.emit("progress", input=f"to batch {at}", at=writer.bytes, size=None)
            if self.stopped_by is None:  # nobody would start it again after a power cut
                writer.wait()
                for line in lines:
                    line.sync()
        return made

    def purge(self) -> None:
        """Remove the queue's batches; the next `run` begins with number 0."""
        queue = Queue(self.data_dir)
        with queue.locked():
            queue.purge()


def batch_rng(seed: int, split: str, number: int) -> np.random.Generator:
    """The RNG of one batch: Philox with its own 2^192 numbers for each (seed, split, number).

    >>> batch_rng(1337, "train", 0).integers(100, size=3).tolist()
    [71, 91, 96]
    """
    key = np.array([seed, SPLITS.index(split)], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number]))


class _Line:
    """One split, as the provider sees it."""

    def __init__(
        self, provider: DataProviderBase, name: str, split: Split, writer: "_Writer"
    ) -> None:
        self.name = name
        self._provider, self._split, self._writer = provider, split, writer
        self._room: list[Arrays] = []
        split.sweep()
        self.next = split.layout.first(split.floor())
        self._end = split.end()
        self.damaged: list[int] = []
        """The first batches of files that were not whole."""
        self._unproven = provider.repeatable
        """Whether no batch was made twice yet: one that is there, or the first that is not."""
        self._check_files()
        self.next = split.first_missing(self.next)

    @property
    def has_ended(self) -> bool:
        return self._end is not None and self.next >= self._end

    def unread(self) -> int:
        """Batches that are made and that no consumer has asked for."""
        floor = self._split.floor()
        self.next = max(self.next, self._split.layout.first(floor))  # nobody will ask for the rest
        return self.next - self._split.wanted_from(floor)

    def make_file(self) -> int:
        """Make the next file; how many batches it has."""
        split, each = self._split, self._split.layout.each
        if split.has(self.next):  # a gap was filled before it, and it was checked
            self.next += each
            return 0
        stop = self.next + each if self._end is None else min(self.next + each, self._end)
        batches: list[Arrays] = []
        for number in range(self.next, stop):
            try:
                batch = self._made(number)
                batches.append(self._kept(batch, len(batches)) if each > 1 else batch)
            except StopIteration:
                if made := [one for one in split.made() if one > number]:  # behind a gap
                    raise self._differs(number, f"there is a batch {made[-1]}") from None
                # before a file of fewer batches: it could pass for a whole
                self._end = split.set_end(number)
                if self._end != number:
                    raise self._differs(number, f"there were {self._end} in all") from None
                break
        if batches:
            self._writer.put(split, self.next, batches)
        self.next = stop if self._end is None else min(stop, self._end)
        return len(batches)

    def _made(self, number: int) -> Arrays:
        """A batch. The first is made twice where there was none to compare with: that shows a
        provider which counts for itself, and would begin anew after a restart."""
        layout = self._split.layout
        batch = self._provider.make_batch(self.name, number, layout.schema)
        if not self._unproven:
            return batch
        self._unproven, before = False, layout.checksum(batch)
        try:
            batch = self._provider.make_batch(self.name, number, layout.schema)
        except StopIteration:
            raise self._counts(number) from None
        if layout.checksum(batch) != before:
            raise self._counts(number)
        return batch

    def _kept(self, batch: Arrays, index: int) -> Arrays:
        """A copy, as the provider may use its arrays again. It lies in memory that every file uses:
        a file is written before the next is begun. New memory for each took 0.55 of 1.36 ms of CPU
        for 1 MB."""
        while len(self._room) <= index:
            self._room.append({name: np.empty_like(array) for name, array in batch.items()})
        for name, array in batch.items():
            self._room[index][name][...] = array
        return self._room[index]

    def _check_files(self) -> None:
        """Read every file that is there. What is damaged is removed, and made again in its turn, as
        what is missing."""
        split, whole = self._split, -1
        rooms = {field.name: Rooms() for field in split.layout.schema.fields}
        for number in split.made():
            if self._provider.stopped_by is not None:
                return  # nothing is made before the next one looks
            with contextlib.suppress(FileNotFoundError):  # read and removed meanwhile
                if split.is_whole(number, self._end, rooms):
                    whole = number
                else:
                    self.damaged.append(number)
        if whole >= 0 and self._unproven:
            self._check_repeats(whole)
        for number in self.damaged:
            split.store.remove(split.layout.name(number))

    def told_damaged(self) -> str:
        """What to say of files that were not whole."""
        numbers = ", ".join(f"{number:,}" for number in self.damaged[:MOST_TOLD])
        more = ", …" * (len(self.damaged) > MOST_TOLD)
        return (
            f"split {self.name!r}: {len(self.damaged):,} of the files that were there are not "
            f"whole, as after a power cut; they are made again: batch {numbers}{more}"
        )

    def sync(self) -> None:
        """Make all files durable."""
        self._split.sync(self.next)

    def _check_repeats(self, number: int) -> None:
        """Make a batch that is there once more: if it differs, so would all that follow."""
        split = self._split
        try:
            with contextlib.closing(split.open(number)) as file:
                before = file.checksum(number)
        except FileNotFoundError:
            return  # read and removed meanwhile
        try:
            batch = self._provider.make_batch(self.name, number, split.layout.schema)
            now = split.layout.checksum(batch)
        except StopIteration:
            now = "no batch"
        if now != before:
            raise self._differs(number)
        self._unproven = False

    def _counts(self, number: int) -> BadBatch:
        return BadBatch(
            f"batch {number} of split {self.name!r} is another one when it is made again",
            where=f"{type(self._provider).__name__}.sample_batch",
            why="it depends on more than split, rng and batch_number: a counter or a file that is "
            "read on would begin anew after a restart, and give the same batches again",
            do="take what to read from self.batch_number; or say repeatable = False in the "
            "provider",
        )

    def _differs(self, number: int, before: str = "") -> BadBatch:
        return BadBatch(
            f"batch {number} of split {self.name!r} comes out different than before",
            where=str(self._split.root),
            why=f"{before}{': ' * bool(before)}sample_batch or its input has changed since the "
            "queue was made, or it depends on more than split, rng and batch_number",
            do=f"purge the queue: {self._provider.about().command} --purge"
            + ("" if before else "; or say repeatable = False in the provider"),
        )


class _Writer:
    """Lets files appear, in order. Where they are `synced`, that is done while the next are made,
    and those that are written while a disk syncs are synced together: 10.9 ms for a file of 1 MB
    alone, 3.7 ms without syncs (beside other work)."""

    def __init__(self, *, synced: bool) -> None:
        self._synced = synced
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="penstock-queue")
        self._lock = threading.Lock()
        self._waiting: list[tuple[Split, Draft]] = []
        self._last: Future[None] | None = None
        self._failed: BaseException | None = None
        """What went wrong first. It is raised by the next call, whatever came after it."""
        self.bytes = 0
        """How many were given."""

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *failed: object) -> None:
        try:
            if failed[0] is None:
                self.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)
            for _, draft in self._waiting:
                draft.close()

    def put(self, split: Split, first: int, batches: Sequence[Arrays]) -> None:
        """Let a file appear, after all that were given before."""
        if self._failed is not None or len(self._waiting) >= MOST_WAITING:
            self.wait()
        draft = split.draft(first, batches)
        self.bytes += os.fstat(draft.descriptor).st_size
        if not self._synced:
            split.publish([draft], synced=False)
            return
        with self._lock:
            self._waiting.append((split, draft))
            is_due = len(self._waiting) == 1
        if is_due:
            self._last = self._pool.submit(self._publish)

    def wait(self) -> None:
        """Until all that was given has appeared."""
        if self._last is not None:
            self._last.result()
        if self._failed is not None:
            raise self._failed

    def _publish(self) -> None:
        if self._failed is not None:  # no file may appear behind one that did not
            return
        with self._lock:
            given, self._waiting = self._waiting, []
        try:
            for split in {id(split): split for split, _ in given}.values():
                split.publish([draft for one, draft in given if one is split], synced=True)
        except BaseException as error:
            self._failed = error
