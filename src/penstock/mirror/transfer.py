"""Move one file between a directory and a store, and prove that it arrived.

In:    a name, its size and sha256; where it is, where it goes
Out:   the same bytes at the other end
Keeps: what was received of a file: a restart resumes at the byte; at most `connections` requests
       and twice as many ranges in memory
Never: names a file before all of it was hashed; sends one that is not what the log says

A range that comes is written in its turn, so that the partial file is always a beginning. After a
power loss it may hold anything: the hash at the end decides, and the file is then fetched anew.
"""

import contextlib
import hashlib
import mmap
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

from penstock.disk import open_own
from penstock.errors import StoreBusy
from penstock.mirror.threads import DaemonThreads
from penstock.store.local import WRITE_BYTES, LocalStore
from penstock.store.record import HASH, Add, damaged, differs
from penstock.store.store import AlreadyThere, Depot
from penstock.work.events import Events

RANGE_BYTES: Final = 8 << 20
PARTS: Final = ".parts"
"""Where partial files lie, in the directory that they go to."""
_BLOCK: Final = 1 << 20
_HASHED: Final = 256 << 10
"""Hashed, then written while the processor's cache still holds it."""
_PAUSE_S: Final = (0.2, 20.0)
_TELL_S: Final = 30.0
"""What fails is told at once, then this often: eight connections fail at the same time."""
_LOOK_S: Final = 0.5
"""Between two looks at an object that is not as long as the log says."""

T = TypeVar("T")


class Removed(Exception):
    """The source no longer has a file. Not an error yet: it may have been merged into another."""


class Patience:
    """Try again while a store is busy, more and more slowly, for `give_up_s` without success."""

    def __init__(self, give_up_s: float, events: Events | None = None) -> None:
        self._give_up_s = give_up_s
        self._events = events
        self._tell_at = 0.0
        self._stopped = threading.Event()

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        """What fails from now on is not tried again."""
        self._stopped.set()

    def pause(self, seconds: float) -> bool:
        """Wait. True, and at once, if `stop` is called."""
        return self._stopped.wait(seconds)

    def call(self, ask: Callable[[], T]) -> T:
        began, pause_s = time.monotonic(), _PAUSE_S[0]
        while True:
            try:
                return ask()
            except StoreBusy as error:
                left_s = began + self._give_up_s - time.monotonic()
                if left_s > 0 and not self.is_stopped:
                    self._tell(error, left_s)
                if left_s <= 0 or self.pause(min(left_s, pause_s * random.random())):
                    raise
                pause_s = min(2 * pause_s, _PAUSE_S[1])

    def _tell(self, error: StoreBusy, left_s: float) -> None:
        now = time.monotonic()
        if self._events is None or now < self._tell_at:
            return
        self._tell_at = now + _TELL_S
        why = f": {error.why[:200]}" if error.why else ""
        self._events.emit(
            "warn",
            message=f"{error.what} at {error.where}{why}; trying again for {left_s:.0f} s at most",
        )


def send(source: LocalStore, target: Depot, file: Add, patience: Patience) -> None:
    """A file of a directory into a store."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = source.open_file(file.name)
        except FileNotFoundError:
            raise Removed(file.name) from None
        stack.callback(os.close, descriptor)
        size = os.fstat(descriptor).st_size
        if size != file.bytes:
            raise differs(file, source.url, f"it has {size:,} bytes, the log says {file.bytes:,}")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if size else b""
        data = memoryview(mapped)
        digest = hashlib.sha256(data).hexdigest()
        if digest != file.sha256:
            raise differs(
                file, source.url, f"sha256 {digest[:12]}…, the log says {file.sha256[:12]}…"
            )
        patience.call(lambda: target.add(file.name, data, file.sha256))


class Receiver:
    """Files of a store into a directory, several at once, each in ranges."""

    def __init__(
        self, source: Depot, target: LocalStore, connections: int, patience: Patience
    ) -> None:
        self._source = source
        self._target = target
        self._patience = patience
        self._folder = target.root / PARTS
        self._folder.mkdir(parents=True, exist_ok=True)
        self._threads = DaemonThreads(connections, "penstock-range")
        self._free_ranges = threading.Semaphore(2 * connections)
        self.received = 0
        """Bytes that came, those of failed attempts too."""

    def receive(self, file: Add) -> bool:
        """Fetch a file, a second time if it is wrong. False if it was here."""
        if file.sha256 and not HASH.fullmatch(file.sha256):
            raise damaged(f"{file.name} has {file.sha256[:80]!r} for its sha256", self._source.url)
        if self._is_here(file):
            return False
        part = self._folder / part_name(file)
        if not file.sha256:
            part.unlink(missing_ok=True)  # nothing would show that it is a part of something else
        wrong = ""
        for _ in range(2):
            with self._target.explained("write", file.name):
                try:
                    wrong = self._fetch(file, part)
                except Removed:
                    part.unlink(missing_ok=True)
                    raise
            if not wrong:
                self._name(part, file)
                return True
            part.unlink(missing_ok=True)
        raise differs(file, self._source.url, f"{wrong}; it was fetched twice")

    def _is_here(self, file: Add) -> bool:
        """Whether the target has a file; one with other bytes under its name is an error."""
        if (size := self._target.size(file.name)) is None:
            return False
        with os.fdopen(self._target.open_file(file.name), "rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found == file.sha256 or (not file.sha256 and size == file.bytes):
            return True
        raise differs(file, self._target.url, "the file in this directory has other bytes")

    def _name(self, part: Path, file: Add) -> None:
        try:
            self._target.adopt(part, file.name)
        except AlreadyThere:  # since it was looked at
            if not self._is_here(file):
                raise differs(file, self._target.url, "something took its name") from None
            part.unlink(missing_ok=True)

    def _fetch(self, file: Add, part: Path) -> str:
        """Fetch all of a file into its partial one. Returns what is wrong with it, or nothing."""
        hasher = hashlib.sha256()
        descriptor = open_own(part, 0o644)
        try:
            begun = os.fstat(descriptor).st_size
            if begun > file.bytes:
                os.ftruncate(descriptor, 0)
                begun = 0
            for at in range(0, begun, _BLOCK):
                hasher.update(os.pread(descriptor, min(_BLOCK, begun - at), at))
            self._fetch_ranges(file, descriptor, begun, hasher)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        found = hasher.hexdigest()
        if not file.sha256:
            return footer_error(part)
        if found == file.sha256:
            return ""
        return f"sha256 {found[:12]}…, the log says {file.sha256[:12]}…"

    def _fetch_ranges(self, file: Add, descriptor: int, at: int, hasher: "hashlib._Hash") -> None:
        start = at
        coming: deque[Future[memoryview]] = deque()
        try:
            while start < file.bytes or coming:
                # as many as there is room for, one in any case
                while start < file.bytes and self._free_ranges.acquire(blocking=not coming):
                    coming.append(self._threads.submit(self._range, file, start))
                    start += RANGE_BYTES
                data = coming[0].result()
                if self._patience.is_stopped:  # another run may be at this file by now
                    raise StoreBusy(f"{file.name} was left", where=self._source.url)
                for begin in range(0, len(data), _HASHED):
                    block = data[begin : begin + _HASHED]
                    hasher.update(block)
                    _write_at(descriptor, block, at)
                    at += len(block)
                self.received += len(data)
                coming.popleft()
                self._free_ranges.release()
        finally:
            for future in coming:
                future.cancel()
                self._free_ranges.release()

    def _range(self, file: Add, start: int) -> memoryview:
        stop = min(start + RANGE_BYTES, file.bytes)

        def ask() -> memoryview:
            try:
                return self._source.read_range(file.name, start, stop)
            except StoreBusy:
                self._check_size(file)
                raise

        try:
            return self._patience.call(ask)
        except FileNotFoundError:
            raise Removed(file.name) from None

    def _check_size(self, file: Add) -> None:
        """Refuse an object that is not as long as it should be: no patience makes it longer."""
        seen = []
        for pause_s in (0.0, _LOOK_S):
            self._patience.pause(pause_s)
            seen.append(self._source.size(file.name))
            if seen[-1] in (None, file.bytes):
                return
        if seen[0] == seen[1]:
            raise differs(
                file,
                self._source.url,
                f"it has {seen[0]:,} bytes there, {file.bytes:,} were written",
            )

    def forget(self) -> None:
        """Remove partial files: all is here, and theirs were merged into others meanwhile."""
        for part in self._folder.iterdir():
            if HASH.fullmatch(part.name):
                with contextlib.suppress(OSError):  # a folder, say: no pull has made it
                    part.unlink()

    def close(self, *, wait: bool = True) -> None:
        """End the threads; partial files stay for the next time."""
        self._threads.close(wait=wait)
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def part_name(file: Add) -> str:
    """Where what has come of a file lies: a name that no log and no bucket can choose."""
    return hashlib.sha256(f"{file.name} {file.sha256} {file.bytes}".encode()).hexdigest()


def footer_error(path: Path) -> str:
    """What is wrong with the end of a parquet file; empty if nothing is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open(path, "rb") as file:
            file.seek(-4, os.SEEK_END)
            if file.read() != b"PAR1":
                return "it does not end like parquet"
        pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        return str(error).splitlines()[0]
    return ""


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data[:WRITE_BYTES], at)
        data, at = data[written:], at + written
