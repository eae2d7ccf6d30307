"""Let any number of consumers share the work on a queue, and take over from those that die.

In:    a split of a queue; who is alive, by a pulse that each owner writes
Out:   claims: a batch, and `ack`, which says whether its work counts
Keeps: of all that ever claimed a batch exactly one gets True from `ack`, whoever was paused, killed
       or robbed meanwhile
Never: trusts a clock of another machine: a lease has ended when its pulse stood still for
       `lease_s` on the observer's own monotonic clock

    _claim/<n>-<attempt>           created once, holds the owner: the next attempt takes over
    _claim/<n>-<attempt>-<owner>   made by whoever got that; nobody else has this name
    _lease/<owner>                 the owner's pulse; removed, its claims are free at once
    _ack/<n>                       created once, by linking an owner's own claim to that name: the
                                   first one counts

What is done with is removed in this order: the floor rises over it, then its file goes, then its
claims, then its ack. So an own claim that is still there can be linked only if nobody was before
it; and a claim that was made after the floor had risen is found out by looking at the floor after
it. Own names are there because such a late claim has the name of an earlier one for a moment.
"""

import contextlib
import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, Self

from penstock.disk import create, make_own_folder, open_own
from penstock.errors import BadBatch, BadConfig, StoreFailed
from penstock.queue.batch_file import Arrays
from penstock.queue.consumer import DatasetConsumer
from penstock.queue.folder import Mark, Split, pauses, read_mark
from penstock.store.store import AlreadyThere

PULSES: Final = 4
"""Pulses for each lease."""
TIDY: Final = 8
"""Acknowledged batches after which the floor is raised; each time is two syncs of the disk."""
NOBODY: Final = "0" * 16
"""The owner of what was given up."""


class Claim:
    """A batch that this consumer works on."""

    def __init__(
        self, claims: "Claims", number: int, attempt: int, own: str, arrays: Arrays
    ) -> None:
        self._claims, self._own, self._arrays = claims, own, arrays
        self.number = number
        self.attempt = attempt
        """0, or how often the batch was taken over."""

    def batch(self, device: Any = None) -> Any:
        """The batch, as `get_batch` gives it."""
        return self._claims.consumer.placed(self._arrays, device)

    def ack(self) -> bool:
        """Say that the work is done. True if it counts; False if another's was first: then this
        one's must be thrown away."""
        return self._claims.ack(self.number, self._own)

    def give_up(self) -> None:
        """Let another have the batch, at once."""
        self._claims.give_up(self.number, self.attempt)


class Claims:
    """The batches of a split, shared with other consumers by claims."""

    def __init__(self, consumer: DatasetConsumer, split: str) -> None:
        self.consumer = consumer
        self._split: Split = consumer.queue.split(split, consumer.about, consumer=True)
        self._split.agree("claims")
        for folder in ("_claim", "_ack", "_lease", "_read"):
            make_own_folder(self._split.root / folder)
        self._acked: set[int] = set()
        """Those above the floor that are known to be done."""
        self._seen: dict[str, tuple[int | None, float]] = {}
        """Owners' pulses, and since when they are so."""
        self._lease = _Lease(self._split, consumer.config.lease_s)
        self._split.sweep()  # what one left that was killed between the floor and its files
        self._untidy = 0
        """Batches acknowledged since the floor was raised."""

    def __iter__(self) -> Iterator[Claim]:
        while True:
            try:
                yield self.take()
            except StopIteration:
                return

    def take(self) -> Claim:
        """Claim a batch that nobody has, or whose owner is dead. Waits for one; StopIteration once
        every batch is acknowledged and no more will come."""
        stall_s = self.consumer.config.stall_s
        deadline, reached = time.monotonic() + stall_s, -1
        for pause in pauses():
            if self._lease.renew():
                self.consumer.refuse_purged()
            stop = self._stop()
            claim, held = self._first_free(stop)
            if claim is not None:
                return claim
            if self._untidy:
                self._tidy()
            if stop == self._split.end() and not held - {self._lease.owner}:
                self._check_own(held)
                raise StopIteration(
                    f"all {stop:,} batches of {self._split.root} are acknowledged, and no more "
                    "will come"
                )
            self._lease.ask_for(stop + 1)
            if stop != reached or held:
                deadline, reached = time.monotonic() + stall_s, stop
            if time.monotonic() > deadline:
                raise self.consumer.stalled(self._split, stop)
            time.sleep(pause)
        raise AssertionError("pauses do not end")

    def _check_own(self, held: set[str]) -> None:
        if held:
            raise BadConfig(
                "all that is left are claims of this consumer that it has not acknowledged",
                where=str(self._split.root),
                do="ack() or give_up() each claim before the next is taken",
            )

    def _stop(self) -> int:
        """The first batch that is not made yet, or never will be."""
        split = self._split
        stop = split.first_missing(split.floor())
        end = split.end()  # looked at after the files: it is there before a shorter file is
        return stop if end is None else min(stop, end)

    def _first_free(self, stop: int) -> tuple[Claim | None, set[str]]:
        """A claim, if one can be had; else those who hold the rest."""
        held: set[str] = set()
        floor = self._split.floor()
        self._acked = {number for number in self._acked if number >= floor}
        for number in range(floor, stop):
            if number in self._acked:
                continue
            if self._is_acked(number):
                self._acked.add(number)
                continue
            attempt, owner = self._last_attempt(number)
            if owner is None or self._is_dead(owner):
                claim = self._claim(number, attempt + 1)
                if claim is not None:
                    return claim, held
                owner = NOBODY  # another was quicker
            held.add(owner)
        return None, held

    def _is_acked(self, number: int) -> bool:
        return self._split.store.size(f"_ack/{number:020d}") is not None

    def _last_attempt(self, number: int) -> tuple[int, str | None]:
        """The last attempt at a batch, and whose it is."""
        attempt, owner = -1, None
        while True:
            try:
                text = self._split.store.read(f"_claim/{number:020d}-{attempt + 1}")
            except FileNotFoundError:
                return attempt, owner
            found = re.fullmatch(rb"[0-9a-f]{16}", text)
            attempt, owner = attempt + 1, found[0].decode() if found else NOBODY

    def _is_dead(self, owner: str) -> bool:
        """Whether a lease has ended. One that is seen to end is removed: then all know it."""
        if owner == self._lease.owner:
            return False
        path, now = self._split.root / "_lease" / owner, time.monotonic()
        pulse = read_mark(path)
        if pulse is None and not os.path.lexists(path):
            self._seen.pop(owner, None)
            return True
        before, since = self._seen.get(owner, (None, now))
        if owner not in self._seen or pulse != before:
            self._seen[owner] = pulse, now
            return False
        if now - since <= self.consumer.config.lease_s:
            return False
        self._split.store.remove(f"_lease/{owner}")
        self._split.store.remove(f"_read/{owner}")
        for folder in ("_claim", "_ack", "_floor"):  # what it was writing when it died
            for name in os.listdir(self._split.root / folder):
                if name.startswith(f".tmp-{int(owner, 16)}-"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(self._split.root / folder / name)
        return True

    def _claim(self, number: int, attempt: int) -> Claim | None:
        """Try to be the one who has this attempt."""
        self._lease.renew()
        split, owner = self._split, self._lease.owner
        name = f"_claim/{number:020d}-{attempt}"
        if not split.create(name, owner.encode()):
            return None
        own = f"{name}-{owner}"
        with split.store.explained("write", own):
            os.close(create(split.root / own, 0o644))
        arrays: Arrays = {}
        is_done = self._is_acked(number)
        if not is_done:
            self._lease.ask_for(number + 1)  # a provider that lost it may be far behind
            try:
                arrays = self.consumer.whole(split, number, lambda: self._read(number))
            except BadBatch:
                if number >= split.floor():
                    self.give_up(number, attempt)
                    raise
            is_done = number < split.floor()
        if is_done:
            split.store.remove(own)
            split.store.remove(name)
            return None
        return Claim(self, number, attempt, own, arrays)

    def _read(self, number: int) -> Arrays:
        with contextlib.closing(self._split.open(number)) as file:
            return file.read(number)

    def ack(self, number: int, own: str) -> bool:
        """See `Claim.ack`."""
        try:
            self._split.store.adopt(self._split.root / own, f"_ack/{number:020d}")
        except AlreadyThere:
            return False
        except StoreFailed as error:
            if isinstance(error.__cause__, FileNotFoundError):  # the claim went with its batch
                return False
            raise
        self._acked.add(number)
        self._untidy += 1
        if self._untidy >= TIDY:
            self._tidy()
        return True

    def give_up(self, number: int, attempt: int) -> None:
        """See `Claim.give_up`."""
        self._split.create(f"_claim/{number:020d}-{attempt + 1}", NOBODY.encode())

    def _tidy(self) -> None:
        """Raise the floor over all that is acknowledged, and remove what that leaves. One consumer
        at a time does it; others need not wait."""
        split, self._untidy = self._split, 0
        if self.consumer.was_purged():  # these are claims and acks of other batches
            return
        lock = open_own(split.root / "_ack" / "lock", 0o644)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                before = number = split.floor()
                while self._is_acked(number):
                    number += 1
                if number > before:
                    split.raise_floor(number)
                # Files are removed by now, and the acks go last: a batch whose file is there and
                # whose ack is not would look as if nobody had done it.
                self._remove("_claim", number)
                self._remove("_ack", number)
        finally:
            os.close(lock)

    def _remove(self, folder: str, floor: int) -> None:
        for name in os.listdir(self._split.root / folder):
            number = re.match(r"\d{20}(?=-|$)", name)
            if number and int(number[0]) < floor:
                self._split.store.remove(f"{folder}/{name}")

    def close(self) -> None:
        """Give up what is claimed and not acknowledged: others may have it at once."""
        self._tidy()
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lease:
    """This consumer's sign of life, given by a thread; and how far it has come."""

    def __init__(self, split: Split, lease_s: float) -> None:
        self._split, self._pause_s = split, lease_s / PULSES
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._open()
        self._thread = threading.Thread(target=self._beat, name="penstock-lease", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self.owner = secrets.token_hex(8)
        self._split.store.epoch = int(self.owner, 16)  # temporary files say whose they are
        self._pulse = 0
        self._alive = Mark(self._split.root / "_lease" / self.owner)
        self._alive.write(0)
        self._read = Mark(self._split.root / "_read" / self.owner)

    def renew(self) -> bool:
        """Take another name, if the lease under this one was taken away; whether it was."""
        with self._lock:
            if not self._alive.is_removed:
                return False
            self._alive.close()
            self._read.close(remove=True)
            self._open()
            return True

    def ask_for(self, number: int) -> None:
        """Let the provider know which batches will be read."""
        with self._lock:
            self._read.write(number)

    def _beat(self) -> None:
        while not self._end.wait(self._pause_s):
            with self._lock, contextlib.suppress(StoreFailed):
                self._pulse += 1
                self._alive.write(self._pulse)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        with self._lock:
            self._alive.close(remove=True)
            self._read.close(remove=True)
