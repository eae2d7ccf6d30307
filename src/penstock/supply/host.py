"""What the processes of a run share on one host: a directory of shards, and a limit of memory.

In:    limits in bytes; which rank this is
Out:   a cache for shards that were downloaded and tokens that were made; a rank's part of memory
Keeps: each value is made by one process of the host; the directory within its limit, as long as a
       process of the run lives; all ranks of the host together within the limit of memory
Never: uses a directory that others may write; fills more than half of what is free on a disk; is
       needed: without a safe place each process makes and holds its own, and that is told once

The directory is `penstock-<user>/<run>/shards` in the temporary directory. The last process of the
run removes it; what a killed run has left is removed by the next one of this user.
"""

import contextlib
import fcntl
import logging
import os
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from penstock.cache.disk import MAP_BYTES, DiskCache
from penstock.disk import create, open_own
from penstock.errors import StoreFailed
from penstock.supply.ranks import LOCAL_SIZES
from penstock.supply.run_folder import join_folder, launch_name, leave_folder, wait_lock
from penstock.supply.verified import join_run

_FREE: Final = 2
"""One part in so many of what is free on a disk may be filled: checkpoints need room too."""
_LIMIT: Final = "limit"

_log = logging.getLogger(__name__)

_guard = threading.RLock()


def _begin_anew() -> None:
    """After a fork: whoever had the lock is in the other process."""
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)
_holders: dict[str, int] = {}
"""Folders, each with the caches of this process that use it."""
_ranks: dict[tuple[str, int], int] = {}
"""Which ranks this process is, in which folders, with the descriptors of locks that say so."""
_told: set[str] = set()


class HostCache:
    """Values of a run, one file each, for all of its processes on this host: a `DiskCache` that is
    there from the first value to the end of the last process."""

    is_of_run = True
    """Whether values are forgotten with the run."""

    def __init__(
        self, max_bytes: int, memory_bytes: int, name: str | None = None, base: str = ""
    ) -> None:
        """At most `max_bytes` on a disk; where the directory is memory, `memory_bytes` too."""
        self._max_bytes, self._memory_bytes = max_bytes, memory_bytes
        self._base = base or tempfile.gettempdir()
        self._name = name
        self._opened: DiskCache | None = None
        self._tried = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._name = self._name or _run_name()
        return HostCache, (self._max_bytes, self._memory_bytes, self._name, self._base)

    def get(self, key: str) -> bytes | None:
        disk = self._disk()
        return None if disk is None else disk.get(key)

    def map(self, key: str) -> memoryview | None:
        """The value as mapped memory."""
        disk = self._disk()
        return None if disk is None else disk.map(key)

    def put(self, key: str, value: bytes) -> None:
        if (disk := self._disk()) is not None:
            disk.put(key, value)

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes | memoryview:
        """The value, made by one process of this host if it is not there."""
        if (disk := self._disk()) is None:
            return make()
        held = disk.fetch(key, make)
        if isinstance(held, bytes) and len(held) >= MAP_BYTES:
            self._tell("there is no room for it, or its disk is full")
        return held

    def drop(self, key: str) -> None:
        """The value is needed no more."""
        if self._opened is not None:
            self._opened.drop(key)

    def plan(self, owner: str, keys: Iterable[str]) -> None:
        """Values that this process is about to ask for."""
        if self._opened is not None:
            self._opened.plan(owner, keys)

    def _disk(self) -> DiskCache | None:
        if not self._tried:
            with _guard:
                if not self._tried:
                    self._open()
                    self._tried = True
        return self._opened

    def _open(self) -> None:
        try:
            self._name = self._name or _run_name()
            folder = join_folder(self._name, self._base)
            limit = min(self._max_bytes, _room(folder, self._memory_bytes))
            self._opened = DiskCache(f"{folder}/shards", limit)
        except (OSError, StoreFailed) as error:
            self._tell(str(error))
            return
        _holders[folder] = _holders.get(folder, 0) + 1
        weakref.finalize(self, _let_go, folder, os.getpid()).atexit = False

    def _tell(self, why: str) -> None:
        """Once: it is no error, but nobody wants it to be so for ever."""
        if self._base not in _told:
            _told.add(self._base)
            _log.warning(
                "a shard cannot be shared in %s (%s): each process reads, tokenises and holds its "
                "own; TMPDIR or LoaderRun(cache_dir=…) names another directory, cache_gb its limit",
                self._base, why,
            )  # fmt: skip


def _run_name() -> str:
    """The same for all processes of a launch; without /proc one that no other has."""
    try:
        return launch_name("host")
    except OSError:
        return secrets.token_hex(16)


def _let_go(folder: str, process: int) -> None:
    """A cache is gone; with the last one of this process the folder is left."""
    with _guard:
        if process == os.getpid() and folder in _holders:
            _holders[folder] -= 1
            if not _holders[folder]:
                leave_folder(folder)


def _room(folder: str, memory_bytes: int) -> int:
    """What may be put there beside all else, as the first process of the run found it."""
    descriptor = open_own(f"{folder}/{_LIMIT}", 0o600)
    try:
        wait_lock(descriptor, fcntl.LOCK_EX)
        written = os.pread(descriptor, 32, 0)
        if not written.isdigit():
            about = os.statvfs(folder)
            free = about.f_bavail * about.f_frsize // _FREE
            written = b"%d" % (min(free, memory_bytes) if _is_memory(folder) else free)
            os.pwrite(descriptor, written, 0)
        return int(written)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork meanwhile would keep it
        os.close(descriptor)


def _is_memory(path: str) -> bool:
    """Whether files there are memory of this host."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo") as lines:
        for line in lines:
            where, _, what = line.partition(" - ")
            if where.split()[2] == number:
                return what.split()[0] in ("tmpfs", "ramfs")
    return False


def share_of_memory(
    max_bytes: int, rank: int, world_size: int, run_dir: str | None
) -> Callable[[], int]:
    """How much of a host's limit this rank may hold at a time: as much as each other of its ranks.

    Launchers say how many these are. Where ranks are told by arguments alone, those count that
    live: each holds a lock in the folder of the run.
    """
    told = next(
        (os.environ[name] for name in LOCAL_SIZES if os.environ.get(name, "").isdigit()), ""
    )
    if told or world_size < 2:
        share = max_bytes // max(1, min(int(told or 1), world_size))
        return lambda: share
    folder = join_run(world_size, run_dir)
    if not folder or not _join_as(folder, rank):
        return lambda: max_bytes // world_size
    return lambda: max_bytes // max(1, len(set(_living_ranks(folder))))


def _join_as(folder: str, rank: int) -> bool:
    """Say in the folder of a run which rank this process is; whether that can be done."""
    with _guard:
        if (folder, rank) not in _ranks:
            try:
                descriptor = create(f"{folder}/rank-{rank}-{secrets.token_hex(8)}", 0o600)
                wait_lock(descriptor, fcntl.LOCK_EX)
            except OSError:
                return False
            _ranks[folder, rank] = descriptor
    return True


def _living_ranks(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith("rank-") and _is_locked(f"{folder}/{name}"):
                yield name.split("-")[1]


def _is_locked(path: str) -> bool:
    try:
        descriptor = open_own(path, make=False, write=False)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
