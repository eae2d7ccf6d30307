"""Bugs to plant: a sweep that does not find them proves nothing.

In:    the name of a bug
Out:   penstock with that bug, in this process only
Never: changes a file of penstock

A missing fsync is named by the function that should have made sure: fsync:CALLER.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final

from penstock.errors import Fenced
from penstock.produce.writer import ShardWriter
from penstock.store import local, log
from penstock.store.local import LocalStore
from penstock.store.log import LogState, LogWriter
from penstock.store.record import Fold, Op, Progress, Record
from penstock.store.store import AlreadyThere, Stored

FSYNCS: Final = {
    "fsync:file of a new object": "_publish<",
    "fsync:folder of a new object": "_sync_folder<_publish",
    "fsync:folder of a new folder": "_sync_folder<_make_folder",
    "fsync:folders at take-over": "_sync_folder<settle",
    "fsync:file of an adopted object": "_adopt<",
    "fsync:folder of an adopted object": "_sync_folder<_adopt",
}
"""Every call of fsync in penstock, by the functions that lead to it, innermost first."""


def fsync_to_skip(mutant: str) -> Callable[[str], bool] | None:
    """Which fsync the mutant leaves out, by its callers."""
    if mutant not in FSYNCS:
        return None
    prefix = FSYNCS[mutant]
    return lambda caller: (caller + "<").startswith(prefix)


def commit_before_store() -> None:
    """The record names a shard that is stored only afterwards."""
    real_put, real_commit = LocalStore.put, LogWriter.commit
    waiting: list[tuple[LocalStore, str, bytes]] = []

    def put(self: LocalStore, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        buffer = io.BytesIO()
        write(buffer)
        data = buffer.getvalue()
        waiting.append((self, name, data))
        return Stored(name, hashlib.sha256(data).hexdigest(), len(data))

    def commit(self: LogWriter, ops: Sequence[Op]) -> Record:
        record = real_commit(self, ops)
        while waiting:
            store, name, data = waiting.pop(0)
            real_put(store, name, lambda file, data=data: file.write(data))  # type: ignore[misc]
        return record

    LocalStore.put = put  # type: ignore[method-assign]
    LogWriter.commit = commit  # type: ignore[method-assign]


def progress_before_shard() -> None:
    """How far the input was read is in one record, the shard in the next."""
    real_commit, real_apply = LogWriter.commit, LogState._apply_op

    def commit(self: LogWriter, ops: Sequence[Op]) -> Record:
        progress = [op for op in ops if isinstance(op, Progress)]
        rest = [op for op in ops if not isinstance(op, Progress)]
        if progress and rest:
            real_commit(self, progress)
            return real_commit(self, rest)
        return real_commit(self, ops)

    def apply(self: LogState, op: Op, at: str) -> int:
        real_apply(self, op, at)
        return 0

    LogWriter.commit = commit  # type: ignore[method-assign]
    LogState._apply_op = apply  # type: ignore[method-assign]


def shard_before_progress() -> None:
    """The shard is in one record, how far the input was read in the next."""
    real_commit, real_apply = LogWriter.commit, LogState._apply_op

    def commit(self: LogWriter, ops: Sequence[Op]) -> Record:
        progress = [op for op in ops if isinstance(op, Progress)]
        rest = [op for op in ops if not isinstance(op, Progress)]
        if progress and rest:
            real_commit(self, rest)
            return real_commit(self, progress)
        return real_commit(self, ops)

    def apply(self: LogState, op: Op, at: str) -> int:
        real_apply(self, op, at)
        return 0

    LogWriter.commit = commit  # type: ignore[method-assign]
    LogState._apply_op = apply  # type: ignore[method-assign]


def rename_instead_of_link() -> None:
    """A name that is taken is overwritten."""

    def publish(self: LocalStore, descriptor: int, temporary: Path, target: Path) -> None:
        os.fsync(descriptor)
        os.replace(temporary, target)
        local._sync_folder(target.parent)

    LocalStore._publish = publish  # type: ignore[method-assign]


def look_then_rename() -> None:
    """A name is looked at, and then overwritten by whoever comes second."""

    def publish(self: LocalStore, descriptor: int, temporary: Path, target: Path) -> None:
        os.fsync(descriptor)
        if target.exists():
            raise AlreadyThere(target.name)
        os.replace(temporary, target)
        local._sync_folder(target.parent)

    LocalStore._publish = publish  # type: ignore[method-assign]


def write_in_place() -> None:
    """A record is seen under its name while it is being written."""

    def create(self: LocalStore, name: str, data: bytes) -> None:
        path = self._path(name)
        local._make_folder(path.parent)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            raise AlreadyThere(name) from None
        os.write(descriptor, data)
        os.fsync(descriptor)
        os.close(descriptor)
        local._sync_folder(path.parent)

    LocalStore.create = create  # type: ignore[method-assign]


def retire_before_seal() -> None:
    """The parts of the validation shard are removed when it is made, not when it is committed."""
    real_join = ShardWriter._join

    def join(self: ShardWriter, parts: Any, file: IO[bytes]) -> None:
        real_join(self, parts, file)
        for part in parts:
            self._store.remove(part.name)

    ShardWriter._join = join  # type: ignore[method-assign]


def seal_after_an_error() -> None:
    """A dataset whose run failed is called complete."""
    real_close = ShardWriter.close

    def close(self: ShardWriter) -> None:
        real_close(self)
        if self.log.state.sealed is None:
            self._pending.clear()
            with contextlib.suppress(Exception):
                list(self.seal())

    ShardWriter.close = close  # type: ignore[method-assign]


def go_on_when_fenced() -> None:
    """A writer that lost its slot takes the next one."""
    real_commit = LogWriter.commit

    def commit(self: LogWriter, ops: Sequence[Op]) -> Record:
        try:
            return real_commit(self, ops)
        except Fenced:
            self.refresh()
            self._epoch = self.store.epoch = self.state.epoch
            return real_commit(self, ops)

    def check(self: LogState, record: Record | Fold, where: str) -> None:
        """Else what it commits is refused before it is written."""

    LogWriter.commit = commit  # type: ignore[method-assign]
    LogState.check = check  # type: ignore[method-assign]


def believe_the_first_write() -> None:
    """A write that took fewer bytes than it was given is taken for a whole one."""

    def write_all(descriptor: int, view: memoryview) -> None:
        os.write(descriptor, view)

    local._write_all = write_all


def ignore_failed_fsync() -> None:
    """A failed fsync is not looked at."""
    counted = os.fsync

    def fsync(descriptor: int) -> None:
        with contextlib.suppress(OSError):
            counted(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def adopt_anything() -> None:
    """Whatever stands under a shard's name is taken for the shard."""
    LocalStore._adopt = lambda self, name, sha256: True  # type: ignore[method-assign]


def leave_litter() -> None:
    """What a dead writer left half done stays for ever."""
    LocalStore.settle = lambda self: None  # type: ignore[method-assign]


def start_over() -> None:
    """A restart reads its inputs from the start again."""

    def advance(self: LogState, op: Progress, at: str) -> None:
        state = self.inputs.setdefault(op.input, log.InputState())
        state.read, state.kept = state.read + op.read, state.kept + op.kept
        state.end = op.end or state.end

    LogState._advance = advance  # type: ignore[method-assign]


def raise_plainly() -> None:
    """An error of the disk reaches people as a traceback."""

    @contextlib.contextmanager
    def explained(self: LocalStore, doing: str, name: str) -> Any:
        yield

    LocalStore.explained = explained  # type: ignore[method-assign]


BUGS: Final[dict[str, Callable[[], None]]] = {
    bug.__name__: bug
    for bug in (
        commit_before_store,
        progress_before_shard,
        shard_before_progress,
        rename_instead_of_link,
        look_then_rename,
        write_in_place,
        retire_before_seal,
        seal_after_an_error,
        go_on_when_fenced,
        believe_the_first_write,
        ignore_failed_fsync,
        adopt_anything,
        leave_litter,
        start_over,
        raise_plainly,
    )
}
