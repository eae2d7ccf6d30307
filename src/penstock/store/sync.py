"""Push a live dataset to a store, or pull one from it: data first, then the record that names it.

In:    the log of a dataset, finished or growing; where to mirror it
Out:   the same log, byte for byte, and the files that it names
Keeps: the order of the log: whoever reads the mirror sees a beginning of the dataset, never a
       record without its files; a restart goes on from the mirror's own log
Never: lists, takes silence for the end, overwrites; believes a reply that did not come

    source log ─▶ files of records n, n+1, … move at once ─▶ record n, record n+1, … one by one

A beat is a record too: a reader of the mirror knows that the producer lives.
"""

import contextlib
import fcntl
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

from penstock.errors import (
    BadConfig,
    LogDamaged,
    NoDataset,
    ProducerStalled,
    StateMismatch,
    StoreBusy,
)
from penstock.store.backends import AlreadyThere, Depot, LocalStore, Unsure, open_store
from penstock.store.log import FOLD_EVERY, Log
from penstock.store.plain import COMPLETE, PLAIN, is_plain, pull_plain, push_plain
from penstock.store.record import Add, Record, damaged, decode, encode, fold_name, record_name
from penstock.store.room import POSITIONS, Room
from penstock.store.sync_config import POLL_S, SyncConfig, Synced
from penstock.store.transfer import PARTS, Gone, Patience, Receiver, differs, send
from penstock.work.events import Events

_REPORT_S: Final = 0.5
_DAMAGED_S: Final = (0.1, 0.5)

T = TypeVar("T")


def push(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: SyncConfig | None = None,
    events: Events | None = None,
) -> Synced:
    """Mirror a dataset in a directory to a bucket, or to another directory."""
    config = config or SyncConfig()
    here = _directory(source)
    there = open_store(target, make=True)
    patience = Patience(config.give_up_s)
    if _await_first(here, config, events) == PLAIN:
        return push_plain(here, there, config, patience, events)

    def move(file: Add) -> int:
        send(here, there, file, patience)
        return file.bytes

    return _Sync(here, there, move, config, patience, events).run()


def pull(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: SyncConfig | None = None,
    events: Events | None = None,
) -> Synced:
    """Mirror a dataset in a bucket, or in another directory, to a directory."""
    config = config or SyncConfig()
    there = open_store(source)
    here = _directory(target, make=True)
    with _alone(here):
        _clear(here)
        patience = Patience(config.give_up_s)
        receiver = Receiver(there, here, config.connections, patience)
        room = Room(here, config.max_disk)

        def move(file: Add) -> int:
            return file.bytes if receiver.receive(file) else 0

        try:
            if patience.call(lambda: _await_first(there, config, events)) == PLAIN:
                if config.max_disk is not None:
                    raise BadConfig(
                        "max_disk is for datasets with a log",
                        where=there.url,
                        why="without one nobody knows what a trainer has passed",
                        do="leave it out",
                    )
                synced = pull_plain(there, here, config, receiver, patience, events)
            else:
                synced = _Sync(there, here, move, config, patience, events, room).run()
            if synced.sealed:
                receiver.forget()
            return synced
        finally:
            receiver.close()


def _directory(path: str | os.PathLike[str], *, make: bool = False) -> LocalStore:
    store = open_store(path, make=make)
    if not isinstance(store, LocalStore):
        raise BadConfig(
            f"{store.url} is not a directory",
            do="push goes from a directory to a store, pull from a store to a directory",
        )
    return store


def _await_first(source: Depot, config: SyncConfig, events: Events | None) -> str:
    """Wait for a dataset to begin; whether it has a log or is plain files."""
    deadline, told = time.monotonic() + config.stall_s, False
    while True:
        if source.size(record_name(0)) is not None:
            return "log"
        if any(is_plain(name) for name, _ in source.names()):
            # a log that began since the first look has files by now, too
            return PLAIN if source.size(record_name(0)) is None else "log"
        if config.once:
            raise NoDataset(
                f"there is no dataset at {source.url}",
                where=f"{source.url}/{record_name(0)}",
                why="it has no log, and no parquet files",
                do="check the path, or start the producer",
            )
        if time.monotonic() > deadline:
            raise ProducerStalled(
                f"no dataset has begun at {source.url} in {config.stall_s:g} s",
                do="start the producer, then this command again; --stall waits longer",
            )
        if not told and events is not None:
            told = True
            events.emit("wait", message=f"waiting for a dataset at {source.url}")
        time.sleep(POLL_S[1])


@contextlib.contextmanager
def _alone(store: LocalStore) -> Iterator[None]:
    """Refuse a second pull into the same directory; the lock dies with its process."""
    folder = store.root / PARTS
    with store.explained("make the directory", PARTS):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(store.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadConfig(
                f"another pull is writing to {store.url}", do="let it go on, or end it first"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _clear(store: LocalStore) -> None:
    """Make durable what a killed pull has named, and remove what it had not."""
    own, store.epoch = store.epoch, store.epoch + 1  # nobody else writes here
    store.settle()
    store.epoch = own


class _Sync:
    """One mirror at work."""

    def __init__(
        self,
        source: Depot,
        target: Depot,
        move: Callable[[Add], int],
        config: SyncConfig,
        patience: Patience,
        events: Events | None,
        room: Room | None = None,
    ) -> None:
        self._source, self._target = source, target
        self._move = move
        self._config = config
        self._patience = patience
        self._events = events or Events("sync")
        self._room = room
        self._log = Log(source)
        self._mirror = Log(target)
        self._records = self._files = self._bytes = 0
        self._moving: deque[tuple[int, bytes, Record, list[Future[int]]]] = deque()
        self._reported = 0.0

    def run(self) -> Synced:
        self._again(self._mirror.refresh)
        self._again(self._log.refresh)
        self._check_same()
        with ThreadPoolExecutor(
            self._config.connections, thread_name_prefix="penstock-move"
        ) as threads:
            try:
                self._restore_missing(threads)
                self._follow(threads)
            except BaseException:
                self._patience.stop()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        self._patience.call(self._finish)
        state = self._mirror.state
        return Synced(self._records, self._files, self._bytes, state.n, state.sealed is not None)

    def _check_same(self) -> None:
        """The mirror must be a beginning of the source."""
        mirror, source = self._mirror.state, self._log.state
        if mirror.n < 0:
            return
        why = ""
        if mirror.dataset != source.dataset:
            why = f"it holds dataset {mirror.dataset[:12]}…, the source is {source.dataset[:12]}…"
        elif mirror.n > source.n:
            why = f"it has {mirror.n + 1:,} records, the source {source.n + 1:,}"
        elif self._patience.call(lambda: self._log.record(mirror.n)).sha256 != mirror.head:
            why = f"record {mirror.n} differs"
        if why:
            raise StateMismatch(
                f"{self._target.url} is not a beginning of {self._source.url}",
                why=why,
                do="choose an empty directory or prefix for this dataset",
            )

    def _restore_missing(self, threads: ThreadPoolExecutor) -> None:
        """Bring back files that the mirror has lost since; a bucket is not asked for each."""
        if self._room is None:
            return
        wanted = []
        for file in self._mirror.state.files.values():
            self._room.know(file)
            if file.name not in self._log.state.files:
                continue  # merged away since: its record will come
            size = self._target.size(file.name)
            if size == file.bytes:
                self._room.admit(file)
                continue
            if size is not None:
                self._target.remove(file.name)
            wanted.append(file)
        admitted = [file for file in wanted if self._admit(file)]
        for moved in [threads.submit(self._moved, file) for file in admitted]:
            self._bytes += moved.result()
            self._files += 1

    def _admit(self, file: Add) -> bool:
        """Wait until there is room for a file; whether it is still wanted then."""
        told = self._room is None
        while self._room is not None:
            if (answer := self._room.admit(file)) is not None:
                return answer
            if self._moving:
                self._commit()
                continue
            if not told:
                told = True
                self._events.emit(
                    "wait",
                    message=f"{file.name} waits for room: readers have not passed enough of what "
                    f"is there (see {POSITIONS} and --max_disk)",
                )
            time.sleep(POLL_S[1])
        return True

    def _follow(self, threads: ThreadPoolExecutor) -> None:
        at = self._mirror.state.n + 1
        while True:
            while at <= self._log.state.n:
                self._begin(at, threads)
                at += 1
                while self._moving and (self._is_ready() or self._is_full()):
                    self._commit()
            while self._moving:
                self._commit()
            if self._log.state.sealed or self._config.once:
                return
            self._wait()

    def _is_ready(self) -> bool:
        return all(future.done() for future in self._moving[0][3])

    def _is_full(self) -> bool:
        """Files enough are on their way; a record waits for those before it."""
        return sum(len(futures) for *_, futures in self._moving) > 2 * self._config.connections

    def _wait(self) -> None:
        """Until there is a new record; beats come at least every few seconds."""
        deadline, pause_s = time.monotonic() + self._config.stall_s, POLL_S[0]
        known = self._log.state.n
        # by the state, not by what `refresh` returns: a call that failed may have read some first
        while not self._again(self._log.refresh) and self._log.state.n == known:
            if time.monotonic() > deadline:
                self._log.wait(stall_s=0)  # says what is wrong
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_S[1])

    def _begin(self, n: int, threads: ThreadPoolExecutor) -> None:
        data, record = self._again(lambda: self._read_record(n))
        current = self._log.state.files
        # what was merged into a later file may be gone, and nobody will ask for it
        files = [op for op in record.ops if isinstance(op, Add) and op.name in current]
        if self._room is not None:
            for file in files:
                self._room.know(file)
        moves = [threads.submit(self._moved, file) for file in files if self._admit(file)]
        self._moving.append((n, data, record, moves))

    def _read_record(self, n: int) -> tuple[bytes, Record]:
        name = record_name(n)
        try:
            data = self._source.read(name)
        except FileNotFoundError:
            raise damaged(f"record {n} is gone", f"{self._source.url}/{name}") from None
        return data, decode(data, Record, f"{self._source.url}/{name}")

    def _again(self, ask: Callable[[], T]) -> T:
        """Ask a store; what looks damaged may have been changed on the way, and is asked again."""
        for pause_s in _DAMAGED_S:
            try:
                return self._patience.call(ask)
            except LogDamaged:
                time.sleep(pause_s)
        return self._patience.call(ask)

    def _moved(self, file: Add) -> int:
        """Move a file; its bytes, or 0 if it was there, or is no longer needed."""
        try:
            return self._move(file)
        except Gone:
            return self._await_retired(file)

    def _await_retired(self, file: Add) -> int:
        """0 once the source's log says that a file was merged into another.

        A mirror that is still being filled names files that its own source no longer had; the
        record that retires them follows.
        """
        now = Log(self._source)
        deadline = time.monotonic() + self._config.stall_s
        while True:
            if self._again(now.refresh):
                deadline = time.monotonic() + self._config.stall_s
            if file.name not in now.state.files:
                return 0
            given_up = self._config.once or time.monotonic() > deadline
            if now.state.sealed or given_up or self._patience.pause(POLL_S[1]):
                raise differs(file, self._source.url, "it is not there")

    def _commit(self) -> None:
        n, data, record, futures = self._moving.popleft()
        for future in futures:
            self._bytes += future.result()
        self._files += len(futures)
        self._patience.call(lambda: self._create(record_name(n), data))
        self._mirror.state.apply(record, self._target.url)
        self._records += 1
        if (n + 1) % FOLD_EVERY == 0:
            self._copy_fold(n // FOLD_EVERY)
        now = time.monotonic()
        if now - self._reported > _REPORT_S or record.n == self._log.state.n:
            self._reported = now
            self._report()

    def _create(self, name: str, data: bytes) -> None:
        """One record of the mirror; what stands there already must be the same."""
        try:
            self._target.create(name, data)
            return
        except (AlreadyThere, Unsure) as error:
            unsure = str(error)
        try:
            there = self._target.read(name)
        except FileNotFoundError:
            raise StoreBusy(
                f"could not write {name}",
                where=self._target.url,
                why=unsure.splitlines()[0] if unsure else "",
                do="check the connection, and run the same command again: nothing is lost",
            ) from None
        if there != data:
            raise StateMismatch(
                f"{name} at {self._target.url} is the record of another dataset",
                why="somebody else writes to the same place",
                do="choose an empty directory or prefix for this dataset",
            )

    def _copy_fold(self, number: int) -> None:
        """A fold is derived: where it cannot be copied, readers read the records instead."""
        with contextlib.suppress(AlreadyThere, Unsure, StoreBusy, FileNotFoundError, LogDamaged):
            name = fold_name(number)
            self._target.create(name, self._source.read(name))

    def _finish(self) -> None:
        """What follows a seal: the marker for simple readers, and no litter. Repeatable."""
        state = self._mirror.state
        if state.sealed is None:
            return
        # not the bytes as they come from a store: a marker cannot be put right later
        self._create(COMPLETE, encode(self._mirror.record(state.n)))
        for name in state.retired:
            self._target.remove(name)

    def _report(self) -> None:
        state = self._log.state
        done = sum(file.bytes for file in self._mirror.state.files.values())
        total = sum(file.bytes for file in state.files.values())
        about: dict[str, Any] = {"at": done, "size": total, "files": len(self._mirror.state.files)}
        self._events.emit("progress", input=self._target.url, record=self._mirror.state.n, **about)
