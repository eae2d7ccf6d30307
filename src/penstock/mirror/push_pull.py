"""Push a live dataset to a store, or pull one from it: data first, then the record that names it.

In:    the log of a dataset, finished or growing; where to mirror it
Out:   the same log, byte for byte, and the files that it names
Keeps: the order of the log: whoever reads the mirror sees a beginning of the dataset, never a
       record without its files, save those that the source has merged into others since, which
       `_merged.json` lists, and those that `--only` left out, which `_only.json` lists; a restart
       resumes from the mirror's own log
Never: decides from a listing what is in the dataset, takes silence for the end, overwrites a
       record, believes a reply that did not come

    source log ─▶ files of records n, n+1, … move at once ─▶ record n, record n+1, … one by one

A beat is a record too: a reader of the mirror knows that the producer lives.
"""

import contextlib
import fcntl
import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from penstock.errors import (
    BadConfig,
    LogDamaged,
    PenstockError,
    ProducerStalled,
    ShardMismatch,
    StateMismatch,
    StoreBusy,
)
from penstock.mirror.claim import COMPLETE, PLAIN, await_first, refuse_plain
from penstock.mirror.config import POLL_S, SyncConfig, Synced
from penstock.mirror.disk_limit import DiskLimit
from penstock.mirror.plain import pull_plain, push_plain
from penstock.mirror.threads import DaemonThreads
from penstock.mirror.transfer import PARTS, Patience, Receiver, Removed, send
from penstock.store.local import LocalStore
from penstock.store.log import FOLD_EVERY, LOOK_S, Log, merged_files, only_split
from penstock.store.record import (
    FORMAT,
    MERGED,
    ONLY,
    Add,
    Fold,
    Merged,
    Only,
    Record,
    Retire,
    damaged,
    decode,
    differs,
    encode,
    fold_name,
    record_name,
)
from penstock.store.store import AlreadyThere, Depot, Unsure, open_store
from penstock.work.events import Events

_REPORT_S: Final = 0.5
_DAMAGED_S: Final = (0.1, 0.5)
_LIMIT_TOLD_S: Final = 60.0

T = TypeVar("T")


def push(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    config: SyncConfig | None = None,
    events: Events | None = None,
) -> Synced:
    """Mirror a dataset in a directory to a bucket, or to another directory."""
    config = SyncConfig.of(config)
    if config.only:
        raise BadConfig("only is for pull", do="leave it out: push sends everything")
    here = _directory(source)
    patience = Patience(config.give_up_s, events)
    _refuse_part(here, patience)
    there = patience.call(lambda: open_store(target, make=True, tries_again=False))
    if await_first(here, config, patience, events) == PLAIN:
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
    config = SyncConfig.of(config)
    there = open_store(source, tries_again=False)
    here = _directory(target, make=True)
    with _locked(here):
        _clear(here)
        patience = Patience(config.give_up_s, events)
        receiver = Receiver(there, here, config.connections, patience)
        disk = DiskLimit(here, config.max_disk_bytes)

        def move(file: Add) -> int:
            return file.bytes if receiver.receive(file) else 0

        try:
            if await_first(there, config, patience, events) == PLAIN:
                if config.max_disk_bytes is not None or config.only:
                    raise BadConfig(
                        f"{'only' if config.only else 'max_disk'} is for datasets with a log",
                        where=there.url,
                        why="without one nobody knows what a trainer has passed, or needs",
                        do="leave it out",
                    )
                synced = pull_plain(there, here, config, receiver, patience, events)
            else:
                if not config.only:
                    _refuse_part(there, patience)
                synced = _Sync(there, here, move, config, patience, events, disk).run()
        except BaseException as error:
            patience.stop()
            receiver.close(wait=isinstance(error, Exception))
            raise
        if synced.sealed:
            receiver.forget()
        receiver.close()
        return synced


def _refuse_part(source: Depot, patience: Patience) -> None:
    """Not all of a dataset can come from where only a part of it is."""
    if patience.call(lambda: source.size(ONLY)) is not None:
        raise StateMismatch(
            f"{source.url} holds the tokens of a dataset alone",
            where=f"{source.url}/{ONLY}",
            why="it was filled with penstock pull --only tokens",
            do="complete it first with penstock pull, without --only; a pull from it needs "
            "--only tokens",
        )


def _directory(path: str | os.PathLike[str], *, make: bool = False) -> LocalStore:
    store = open_store(path, make=make)
    if not isinstance(store, LocalStore):
        raise BadConfig(
            f"{store.url} is not a directory",
            do="push goes from a directory to a store, pull from a store to a directory",
        )
    return store


@contextlib.contextmanager
def _locked(store: LocalStore) -> Iterator[None]:
    """Refuse a second pull into the same directory; the lock dies with its process."""
    folder = store.root / PARTS
    store.refuse_link(PARTS)  # what it points to would be written to, and emptied at the end
    with store.explained("make the directory", PARTS):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(store.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadConfig(
                f"another pull is writing to {store.url}", do="let it finish, or end it first"
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
        disk: DiskLimit | None = None,
    ) -> None:
        self._source, self._target = source, target
        self._move = move
        self._config = config
        self._patience = patience
        self._events = events or Events("sync")
        self._disk = disk
        self._log = Log(source)
        self._mirror = Log(target)
        self._records = self._files = self._bytes = 0
        self._moving: deque[tuple[int, bytes, Record, dict[str, Future[int | None]]]] = deque()
        self._begun = ""
        """Hash of the record whose files were the last to begin to move."""
        self._retired: set[str] = set()
        """Those of the source's log: a list of 100,000 names is slow to search."""
        self._merged: set[str] = set()
        """Files that the mirror is known not to have."""
        self._reported = 0.0

    def run(self) -> Synced:
        self._again(self._mirror.refresh)
        self._again(self._log.refresh)
        self._check_same()
        if self._config.only:
            self._tell_only()
        with DaemonThreads(self._config.connections, "penstock-move") as threads:
            try:
                self._restore_missing(threads)
                self._follow(threads)
            except (LogDamaged, ShardMismatch, ProducerStalled) as error:
                replaced = self._is_replaced()
                self._patience.stop()
                if replaced:
                    raise self._replaced(error.what) from error
                raise
            except BaseException:
                self._patience.stop()
                raise
        self._patience.call(self._finish)
        state = self._mirror.state
        self._events.emit("end", sealed=state.sealed is not None)
        return Synced(self._records, self._files, self._bytes, state.n, state.sealed is not None)

    def _check_same(self) -> None:
        """The mirror must be a beginning of the source."""
        mirror, source = self._mirror.state, self._log.state
        if mirror.n < 0:
            self._patience.call(lambda: refuse_plain(self._target, self._log.state))
            return
        why = ""
        if mirror.dataset != source.dataset:
            why = f"it holds dataset {mirror.dataset[:12]}…, the source is {source.dataset[:12]}…"
        elif mirror.n > source.n:
            if self._patience.call(lambda: self._mirror.record(source.n)).sha256 == source.head:
                raise StateMismatch(
                    f"{self._source.url} has lost its newest records",
                    why=f"it ends at record {source.n}; {self._target.url} has the same log up to "
                    f"record {mirror.n}",
                    do="restore the source from this mirror or from a copy; what was removed "
                    "there is still here",
                )
            why = f"record {source.n} differs, and the source ends there"
        elif self._patience.call(lambda: self._log.record(mirror.n)).sha256 != mirror.head:
            why = f"record {mirror.n} differs"
        if why:
            raise StateMismatch(
                f"{self._target.url} is not a beginning of {self._source.url}",
                why=why,
                do="choose an empty directory or prefix for this dataset",
            )

    def _wants(self, file: Add) -> bool:
        return not self._config.only or file.split == self._config.only

    def _tell_only(self) -> None:
        """Say in the mirror that files are left out, before its first record."""
        state, url = self._log.state, self._target.url
        opened = state.opened
        if opened is not None and not opened.config.get("token_type"):
            raise self._without_tokens("it was made without --tokens")
        self._check_tokens(state.files.values())
        if self._patience.call(lambda: only_split(self._target, state.dataset)):
            return
        if self._mirror.state.n >= 0:
            raise StateMismatch(
                f"{url} is filled with everything, and only tokens are asked for now",
                where=f"{url}/{record_name(0)}",
                do="leave --only out, or choose an empty directory",
            )
        self._target.remove(ONLY)
        self._target.create(ONLY, encode(Only(FORMAT, state.dataset, "tokens", "")))

    def _check_tokens(self, files: Iterable[Add]) -> None:
        for file in files:
            if file.split in ("train", "val") and self._log.state.tokens_of(file) is None:
                raise self._without_tokens(f"{file.name} has none")

    def _without_tokens(self, why: str) -> BadConfig:
        return BadConfig(
            f"{self._source.url} has no token files",
            why=why,
            do="leave --only out, or add them with penstock tokenize and pull that generation",
        )

    def _is_replaced(self) -> bool:
        """Whether the log that was read is no longer at the source."""
        state = self._log.state
        if state.n < 0:
            return False
        try:
            found = self._patience.call(lambda: self._log.find(state.n))
        except PenstockError:
            return False  # what was seen first tells more
        return found is None or found.sha256 != state.head

    def _replaced(self, why: str) -> StateMismatch:
        return StateMismatch(
            f"{self._source.url} was removed or replaced while this command read it",
            why=f"{why}; nothing of what is there now was written to {self._target.url}",
            do="choose an empty directory or prefix for the new dataset",
        )

    def _restore_missing(self, threads: DaemonThreads) -> None:
        """Bring back files that the mirror has lost since; a bucket is listed once for all."""
        sizes = self._sizes()
        was_only = self._patience.call(lambda: self._target.size(ONLY)) is not None
        wanted = []
        merged = set()
        for file in self._mirror.state.files.values():
            if self._disk is not None:
                self._disk.know(file)
            if not self._wants(file):
                continue
            size = sizes.get(file.name)
            if file.name not in self._log.state.files:
                if size is None:
                    merged.add(file.name)
                continue  # merged away since: its record will come
            if size == file.bytes:
                if self._disk is not None:
                    self._disk.admit(file)
                continue
            if size is not None:
                self._patience.call(functools.partial(self._target.remove, file.name))
            wanted.append(file)
        admitted = [file for file in wanted if self._admit(file)]
        if admitted:
            how, when = ("was filled without", "now") if was_only else ("has lost", "again")
            self._events.emit(
                "warn",
                message=f"{self._target.url} {how} {len(admitted):,} files that its log names; "
                f"they are moved {when}: {admitted[0].name}" + ", …" * (len(admitted) > 1),
            )
        moves = {file.name: threads.submit(self._moved, file) for file in admitted}
        merged |= self._settle(moves)
        self._tell_merged(merged)
        self._free(moves, [])
        if was_only and not self._config.only:
            self._patience.call(lambda: self._target.remove(ONLY))

    def _sizes(self) -> dict[str, int]:
        """What the mirror holds, in the folders in which its log names files."""
        names = self._mirror.state.files
        folders = sorted({name.rpartition("/")[0] for name in names})
        return {
            name: size
            for folder in folders
            for name, size in self._patience.call(functools.partial(self._target.names, folder))
        }

    def _admit(self, file: Add) -> bool:
        """Wait until there is room for a file. False if nobody needs it by then."""
        tell_at = 0.0
        while self._disk is not None:
            if (answer := self._disk.admit(file)) is not None:
                return answer
            if self._moving:
                self._commit()
                continue
            if time.monotonic() > tell_at:
                tell_at = time.monotonic() + _LIMIT_TOLD_S
                self._events.emit("wait", message=self._disk.explain(file))
            time.sleep(POLL_S[1])
        return True

    def _follow(self, threads: DaemonThreads) -> None:
        at, self._begun = self._mirror.state.n + 1, self._mirror.state.head
        while True:
            while at <= self._log.state.n:
                self._begin(at, threads)
                at += 1
                while self._moving and (self._is_ready() or self._is_full()):
                    self._commit()
            while self._moving:
                self._commit()
            if self._log.state.sealed:
                return
            if self._config.once:
                # a record that is missing in the middle is not the end of what there is
                self._again(lambda: self._log.check_end(lists=True))
                return
            self._wait()

    def _is_ready(self) -> bool:
        return all(future.done() for future in self._moving[0][3].values())

    def _is_full(self) -> bool:
        """Files enough are on their way; a record waits for those before it."""
        return sum(len(futures) for *_, futures in self._moving) > 2 * self._config.connections

    def _wait(self) -> None:
        """Until there is a new record; beats come at least every few seconds."""
        began, pause_s = time.monotonic(), POLL_S[0]
        deadline = began + self._config.stall_s
        known, looked = self._log.state.n, False
        # by the state, not by what `refresh` returns: a call that failed may have read some first
        while not self._again(self._log.refresh) and self._log.state.n == known:
            if time.monotonic() > deadline:
                raise self._log.stalled(self._config.stall_s)
            if not looked and time.monotonic() > began + LOOK_S:
                looked = True
                self._again(self._log.check_end)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, POLL_S[1])

    def _begin(self, n: int, threads: DaemonThreads) -> None:
        data, record = self._again(lambda: self._read_record(n))
        self._check_follows(n, record)
        current = self._log.state.files
        # what was merged into a later file may be removed by now, and nobody will ask for it
        files = [op for op in record.ops if isinstance(op, Add) and current.get(op.name) == op]
        if self._config.only:
            self._check_tokens(files)
        if self._disk is not None:
            for file in files:
                self._disk.know(file)
        moves = {
            file.name: threads.submit(self._moved, file)
            for file in files
            if self._wants(file) and self._admit(file)
        }
        self._moving.append((n, data, record, moves))

    def _check_follows(self, n: int, record: Record) -> None:
        """Refuse a record of another log before a file that it names is moved.

        The log was read once already; what is read now may be a new one in its place.
        """
        log = self._log.state
        follows = (record.n, record.prev, record.dataset) == (n, self._begun, log.dataset)
        if len(self._retired) != len(log.retired):
            self._retired = set(log.retired)
        if (
            not follows
            or (n == log.n and record.sha256 != log.head)
            or not all(
                op.name in log.files or op.name in self._retired
                for op in record.ops
                if isinstance(op, Add)
            )
        ):
            raise self._replaced(f"record {n} is of another log than the records before it")
        self._begun = record.sha256

    def _read_record(self, n: int) -> tuple[bytes, Record]:
        name = record_name(n)
        try:
            data = self._source.read(name)
        except FileNotFoundError:
            raise damaged(f"record {n} is missing", f"{self._source.url}/{name}") from None
        return data, decode(data, Record, f"{self._source.url}/{name}")

    def _again(self, ask: Callable[[], T]) -> T:
        """Ask a store; what looks damaged may have been changed on the way, and is asked again."""
        for pause_s in _DAMAGED_S:
            try:
                return self._patience.call(ask)
            except LogDamaged:
                time.sleep(pause_s)
        return self._patience.call(ask)

    def _moved(self, file: Add) -> int | None:
        """Move a file. Returns its bytes, 0 if it was there, None if it was merged into another."""
        try:
            return self._move(file)
        except Removed:
            self._await_retired(file)
            return None

    def _await_retired(self, file: Add) -> None:
        """Wait until the source says that a file was merged into another.

        A mirror that is still being filled names files that its own source no longer had; it says
        so, or the record that retires them follows.
        """
        dataset = self._log.state.dataset
        if file.name in self._patience.call(lambda: merged_files(self._source, dataset)):
            return
        now = Log(self._source)
        deadline = time.monotonic() + self._config.stall_s
        while True:
            if self._again(now.refresh):
                deadline = time.monotonic() + self._config.stall_s
            # not merely absent from the log: one that was removed or made again names nothing
            is_same = now.state.dataset == dataset
            if is_same and file.name in now.state.retired:
                return
            given_up = self._config.once or time.monotonic() > deadline or not is_same
            if now.state.sealed or given_up or self._patience.pause(POLL_S[1]):
                raise differs(file, self._source.url, "it is not there")

    def _commit(self) -> None:
        n, data, record, moves = self._moving.popleft()
        added = {op.name for op in record.ops if isinstance(op, Add) and self._wants(op)}
        merged = self._settle(moves) | ((added & self._retired) - moves.keys())
        self._check_mirror()
        # first: what cannot follow must not be created, a record is never removed again
        self._mirror.state.apply(record, self._source.url)
        self._tell_merged(merged)
        self._patience.call(lambda: self._create(record_name(n), data))
        self._records += 1
        self._free(moves, [op.name for op in record.ops if isinstance(op, Retire)])
        if (n + 1) % FOLD_EVERY == 0:
            self._copy_fold(n // FOLD_EVERY)
        now = time.monotonic()
        if now - self._reported > _REPORT_S or record.n == self._log.state.n:
            self._reported = now
            self._report()

    def _settle(self, moves: dict[str, Future[int | None]]) -> set[str]:
        """Wait for files. Returns those that will not come, since they were merged into others."""
        merged = set()
        for name, future in moves.items():
            if (moved := future.result()) is None:
                merged.add(name)
            else:
                self._bytes += moved
                self._files += 1
        return merged

    def _tell_merged(self, names: set[str]) -> None:
        """Say in the mirror which files it will not have, before a record names them."""
        if names <= self._merged:
            return
        # with all that are known by now: one object, not one for each record
        self._merged |= names | (set(self._log.state.retired) - set(self._mirror.state.retired))
        self._patience.call(self._write_merged)

    def _write_merged(self) -> None:
        dataset = self._log.state.dataset
        before = merged_files(self._target, dataset)
        if self._merged <= before:
            return
        self._merged |= before  # of a run that was interrupted
        told = Merged(FORMAT, dataset, sorted(self._merged), "")
        self._target.remove(MERGED)
        try:
            self._target.create(MERGED, encode(told))
        except (AlreadyThere, Unsure):  # look again: a reply may have been lost
            raise StoreBusy(
                f"could not write {MERGED}",
                where=self._target.url,
                do="run the same command again: nothing is lost",
            ) from None

    def _check_mirror(self) -> None:
        """What the next record follows must still be there: a bucket can be emptied meanwhile."""
        n, head = self._mirror.state.n, self._mirror.state.head
        if n < 0:
            return
        before = self._again(lambda: self._mirror.find(n))
        if before is None or before.sha256 != head:
            raise StateMismatch(
                f"{self._target.url} was emptied or replaced while this command wrote to it",
                where=f"{self._target.url}/{record_name(n)}",
                why="the record was removed" if before is None else "another record is there",
                do="choose an empty directory or prefix, and run the command again",
            )

    def _free(self, moved: Iterable[str], retired: Iterable[str]) -> None:
        """Give back the room of files that did not come, and of those merged into others."""
        if self._disk is None or not self._disk.is_limited:
            return
        for name in [*(name for name in moved if self._target.size(name) is None), *retired]:
            self._disk.forget(name)

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
            self._clear_spoiled(name, there)
            raise StateMismatch(
                f"{name} at {self._target.url} is the record of another dataset",
                why="somebody else writes to the same place",
                do="choose an empty directory or prefix for this dataset",
            )

    def _clear_spoiled(self, name: str, there: bytes) -> None:
        """Remove what is no record of anybody's: it was changed on its way to a bucket."""
        if isinstance(self._target, LocalStore):
            return
        try:
            decode(there, Record, f"{self._target.url}/{name}")
        except LogDamaged:
            if self._target.read(name) == there:
                self._target.remove(name)
            raise StoreBusy(
                f"{name} was changed on its way to the bucket, or back",
                where=self._target.url,
                do="run the same command again: nothing is lost",
            ) from None

    def _copy_fold(self, number: int) -> None:
        """A fold is derived: where it cannot be copied, readers read the records instead."""
        with contextlib.suppress(AlreadyThere, Unsure, StoreBusy, FileNotFoundError, LogDamaged):
            name = fold_name(number)
            data = self._source.read(name)
            if decode(data, Fold, self._source.url).head == self._mirror.state.head:
                self._target.create(name, data)

    def _finish(self) -> None:
        """What follows a seal: the marker for simple readers, and no litter. Repeatable."""
        state = self._mirror.state
        if state.sealed is None:
            return
        # not the bytes as they come from a store: a marker cannot be put right later
        self._create(COMPLETE, encode(self._mirror.record(state.n)))
        for name in (*state.retired, MERGED):
            self._target.remove(name)

    def _report(self) -> None:
        state = self._log.state
        done = sum(file.bytes for file in self._mirror.state.files.values() if self._wants(file))
        total = sum(file.bytes for file in state.files.values() if self._wants(file))
        about: dict[str, Any] = {"at": done, "size": total, "files": len(self._mirror.state.files)}
        self._events.emit("progress", input=self._target.url, record=self._mirror.state.n, **about)
