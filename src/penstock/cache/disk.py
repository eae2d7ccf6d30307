"""Keep what can be made again, on a disk that several processes share: tokens, decoded shards.

In:    a key (a hash of all that decides the value), bytes, or how to make them
Out:   the same bytes later, or nothing
Keeps: at most `max_bytes` of files, those being written included; the least recently used is
       removed; what is mapped is pinned and stays, and so does what a living process plans to ask
       for; of those who want a value at once, one makes it
Never: is the truth: a value that is missing, cut or changed is a miss, and a full disk is no error;
       leaves a lock behind: all are flocks, which die with their process;
       believes what others may have written, unless it is signed with a key that they do not have

A folder holds values in `ab/<hash of the key>`, what is being written in `.<16 digits>`, the lock
of whoever makes a value in `.make-<hash of the key>`, what a process plans to ask for in
`.plan-<16 digits>`, and `.lock`: eight bytes that say how many bytes the folder may hold by now.
They are changed under the lock of that file, before a value is written, so that they are never too
few; where they come to the limit the folder is counted anew.

Before each value stands its hash, which accidents cannot pass: XXH3 over key and value. Where
others may write it is an HMAC, which they cannot pass either.
"""

import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import mmap
import os
import re
import resource
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, Protocol

import xxhash

from penstock.disk import create, is_private, open_own, read_own
from penstock.errors import BadConfig
from penstock.options import checked_path, number, whole

_log = logging.getLogger(__name__)

_HASH_BYTES: Final = 16
MAC_BYTES: Final = 32
_MIN_SECRET_BYTES: Final = 16
_ACCOUNT_BYTES: Final = 8
MAP_BYTES: Final = 1 << 20
"""`fetch` maps from this size on: 1 MiB is read in 94 microseconds and mapped in 77, 256 KiB in 52
and 63."""
_SLACK: Final = 16
"""An evictor frees a sixteenth of the limit at least: counting 100,000 files takes 0.8 s, and so it
is done once for each sixteenth of the limit that is written. Counted at every put, 48 a second
were put among 2,000 values; now it is 3,300 among 100,000."""
_TOUCH_S: Final = 60.0
"""A use within a minute of the last is not noted: a note takes 5 microseconds, a get without it 14,
and it is a write to the disk."""
_LOCK_S: Final = 1.0
"""A put waits this long for whoever counts or evicts; then the value is not kept."""
_PAUSE_S: Final = 10.0
"""Nothing is put for this long after a lock could not be had: its holder may be frozen."""
_MOST_WAITS: Final = 10
"""So many times `wait_s` a value is waited for at most: its maker may live and hang."""
_BEAT_S: Final = 5.0
"""So often whoever makes a value shows that it is alive."""
_VALUE: Final = re.compile("[0-9a-f]{32}")
_TEMPORARY: Final = re.compile(r"\.[0-9a-f]{16}|\.make-[0-9a-f]{32}|\.plan-[0-9a-f]{16}")
_PLAN: Final = re.compile(r"\.plan-[0-9a-f]{16}")
_LOCKED: Final = frozenset((errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EINTR))
_REFUSED: Final = frozenset((errno.EACCES, errno.EPERM, errno.ELOOP, errno.EINVAL, errno.ENOTDIR))
"""Errors that stay: files of others, links and pipes under our names."""


def find_secret(where: str, why: str) -> bytes:
    """The key of caches that others may write, from the environment; an error if there is none."""
    text, file = os.environ.get("PENSTOCK_CACHE_KEY"), os.environ.get("PENSTOCK_CACHE_KEY_FILE")
    if not text and not file:
        raise BadConfig(
            "a cache that others may write needs a key",
            where=where,
            why=f"{why}: without a key, whoever writes there decides what is trained on",
            do="set PENSTOCK_CACHE_KEY, or PENSTOCK_CACHE_KEY_FILE to the path of a file, to a "
            "secret that all users of the cache share (openssl rand -hex 32), or use a directory "
            "of your own (chmod 700)",
        )
    if text:
        name, secret = "PENSTOCK_CACHE_KEY", text.encode(errors="surrogateescape").strip()
    else:
        name, secret = f"PENSTOCK_CACHE_KEY_FILE, {file}", _read_secret(file or "")
    if len(secret) < _MIN_SECRET_BYTES:
        raise BadConfig(
            f"the key of the cache has {len(secret)} bytes",
            where=name,
            do=f"give at least {_MIN_SECRET_BYTES}: openssl rand -hex 32",
        )
    return secret


def _read_secret(path: str) -> bytes:
    why = ""
    try:
        with open(path, "rb", opener=_open_plain) as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o004:  # so are the secrets that containers are given
                _log.warning("%s, the key of the cache, may be read by every user", path)
            if not mode & 0o002:
                return file.read(1 << 16).strip()
            why = "every user of the machine may write it"
    except (OSError, ValueError) as error:
        why = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    raise BadConfig(
        "the key of the cache cannot be used",
        where=f"PENSTOCK_CACHE_KEY_FILE, {path!r}",
        why=why,
        do="give the path of a file that those may read who share the cache, and nobody else",
    )


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def sign(secret: bytes, key: str, *parts: bytes | memoryview) -> bytes:
    """An HMAC over the key of a value and the value: neither can be changed or moved alone."""
    name = key.encode()
    signed = hmac.new(secret, len(name).to_bytes(8, "little") + name, hashlib.sha256)
    for part in parts:
        signed.update(part)
    return signed.digest()


def is_shared(folder: str) -> str:
    """Why a directory is not this user's alone; nothing if it is, or is not there yet."""
    try:
        status = os.stat(folder)
    except OSError:
        return ""
    if is_private(status):
        return ""
    if status.st_mode & 0o022:
        return f"others may write there (its permissions are {stat.S_IMODE(status.st_mode):o})"
    return f"it belongs to another user (number {status.st_uid})"


class Cache(Protocol):
    """Where values are kept by key. Whoever gives a value to it never hears whether it was kept."""

    def get(self, key: str) -> bytes | None:
        """The value, or None."""
        ...

    def put(self, key: str, value: bytes) -> None:
        """Keep a value, if that can be done."""
        ...

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes | memoryview:
        """The value, made and kept if it is not there."""
        ...


class _File(NamedTuple):
    used_ns: int
    size: int
    path: str


_planning = threading.RLock()
"""One thread at a time writes what this process plans to ask for."""


def _begin_anew() -> None:
    """After a fork: whoever had the lock is in the other process."""
    global _planning
    _planning = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


class DiskCache:
    """A directory of values, one file each, for any number of threads and processes.

    Without flock (some network file systems) nothing tells what is in use. Then nothing is evicted,
    what has no room is not kept, every put counts the folder, processes that put at the same moment
    may exceed the limit by those values, and each makes a missing value for itself.

    A directory that others may write needs a key: see `find_secret`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int = 10 << 30,
        *,
        wait_s: float = 60.0,
    ) -> None:
        if whole("max_bytes", max_bytes) < 0:
            raise BadConfig(f"max_bytes is {max_bytes!r}", do="give 0 or more")
        self._folder = checked_path("the cache directory", folder)
        why = is_shared(self._folder)
        self._secret = find_secret(self._folder, why) if why else b""
        self._head_bytes = MAC_BYTES if why else _HASH_BYTES
        self._max_bytes = max_bytes
        self._wait_s = number("wait_s", wait_s)
        self._has_counted = False
        self._paused_until = 0.0
        self._has_told = False
        self._plans: dict[str, frozenset[str]] = {}
        self._plan_file: tuple[int, int, str] | None = None
        """The process that has written it, its descriptor and path."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._folder, self._max_bytes, self._wait_s)  # the key stays here

    def get(self, key: str) -> bytes | None:
        held = self._read(key, map_from=None)
        return None if held is None else bytes(held)

    def map(self, key: str) -> memoryview | None:
        """The value as mapped memory: processes share it, and it is not evicted while it lives."""
        held = self._read(key, map_from=0)
        return None if held is None else memoryview(held)

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes | memoryview:
        """The value, mapped if it is large; made by one of those who want it at the same time.

        The others wait for that one while it lives, then the next makes it; one of which nothing is
        seen for `wait_s` is frozen, and they make it too.
        """
        if (held := self._read(key, MAP_BYTES)) is not None:
            return held
        with self._alone(key):
            if (held := self._read(key, MAP_BYTES)) is not None:
                return held
            value = make()
            self.put(key, value)
        if len(value) < MAP_BYTES:
            return value
        # what is mapped is shared, what was made is this process's own
        return self._read(key, MAP_BYTES) or value

    def drop(self, key: str) -> None:
        """The value is needed no more; one that is in use stays."""
        _remove_unused(_File(0, 0, self._path(key)))

    def plan(self, owner: str, keys: Iterable[str]) -> None:
        """What an owner in this process is about to ask for: it is not evicted until he plans
        something else, or the process ends. Values may be there or not."""
        names = frozenset(os.path.basename(self._path(key)) for key in keys)
        with _planning:
            self._plan(owner, names)

    def _plan(self, owner: str, names: frozenset[str]) -> None:
        mine = self._plan_file is None or self._plan_file[0] == os.getpid()
        if mine and names == self._plans.get(owner, frozenset()):
            return
        if not mine:  # a fork: what stands there is its parent's
            self._plans, self._plan_file = {}, None
        self._plans[owner] = names
        with contextlib.suppress(OSError):  # no plan is no error
            self._write_plan()

    def __del__(self) -> None:
        """Whoever planned is no more."""
        written: tuple[int, int, str] | None = getattr(self, "_plan_file", None)
        if written is not None and written[0] == os.getpid():
            self._plans.clear()
            with contextlib.suppress(OSError):
                self._write_plan()

    def _write_plan(self) -> None:
        """A new file, then the old one goes: whoever evicts meanwhile sees both."""
        before, self._plan_file = self._plan_file, None
        try:
            if names := frozenset().union(*self._plans.values()):
                os.makedirs(self._folder, 0o700, exist_ok=True)
                path = f"{self._folder}/.plan-{secrets.token_hex(8)}"
                descriptor = create(path, 0o644)
                self._plan_file = os.getpid(), descriptor, path
                self._share(descriptor, 0o044)
                _lock(descriptor, fcntl.LOCK_SH)
                _write_all(descriptor, bytes.fromhex("".join(sorted(names))))
        finally:
            if before is not None:
                os.close(before[1])
                with contextlib.suppress(OSError):
                    os.unlink(before[2])

    def put(self, key: str, value: bytes) -> None:
        size = len(value) + self._head_bytes
        if size > self._max_bytes or time.monotonic() < self._paused_until:
            return
        try:
            self._put(key, value, size)
        except OSError as error:
            if error.errno in _REFUSED:
                self._tell(error)

    def _put(self, key: str, value: bytes, size: int) -> None:
        reserved = self._reserve(size)
        if reserved is None:
            return
        descriptor, temporary = reserved
        try:
            _write_all(descriptor, self._digest(key, value), value)
            self._publish(descriptor, temporary, self._path(key))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            _unlock(descriptor)

    def _digest(self, key: str, value: bytes | memoryview) -> bytes:
        if self._secret:
            return sign(self._secret, key, value)
        hasher = xxhash.xxh3_128(key.encode())
        hasher.update(value)
        return hasher.digest()

    def _tell(self, error: OSError) -> None:
        """Once: a cache that keeps nothing is no error, but nobody wants it to be so for ever."""
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "penstock keeps nothing in its cache %s: %s cannot be written by this user (%s); "
                "to share it, chmod g+rwxs (or a+rwx) the directory and what is in it",
                self._folder,
                error.filename or "it",
                error.strerror,
            )

    def _path(self, key: str) -> str:
        name = xxhash.xxh3_128_hexdigest(key.encode())
        return f"{self._folder}/{name[:2]}/{name}"  # a Path would be a third of the time of a put

    def _read(self, key: str, map_from: int | None) -> bytes | memoryview | None:
        """The value, verified; as mapped memory if it has `map_from` bytes."""
        path = self._path(key)
        try:
            descriptor = open_own(path, make=False, write=False)
        except OSError:
            return None
        let_go: Callable[[int], None] = _unlock
        try:
            if not _lock(descriptor, fcntl.LOCK_SH):
                return None  # it is being evicted or replaced
            status = os.fstat(descriptor)
            if status.st_nlink == 0:
                return None  # evicted in between: its bytes do not count any more
            # whoever may write the file may do so after it was verified: then a copy is
            ours = is_private(status)
            if not ours and not self._secret:
                return None
            if ours and map_from is not None and status.st_size >= max(map_from, 1):
                if _has_descriptors(descriptor):
                    # the mapping has a copy of the descriptor, which keeps the lock until it ends
                    let_go = os.close
                    held = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
                else:
                    held = _mapped_alone(descriptor)
            else:
                held = memoryview(_read_all(descriptor, status.st_size))
            value = held[self._head_bytes :]
            if not hmac.compare_digest(self._digest(key, value), held[: self._head_bytes]):
                os.unlink(path)
                return None
            if time.time() - status.st_mtime > _TOUCH_S:
                with contextlib.suppress(OSError):  # others' files, a read-only disk
                    os.utime(descriptor)
            return value
        except (OSError, ValueError):  # ValueError: it became empty before it was mapped
            return None
        finally:
            let_go(descriptor)

    @contextlib.contextmanager
    def _alone(self, key: str) -> Iterator[None]:
        """Hold the lock of whoever makes a value; at last, or where there are none, without it."""
        path = self._path(key)
        lock = f"{self._folder}/.make-{os.path.basename(path)}"
        deadline, pause_s, seen = time.monotonic() + self._wait_s, 0.001, 0
        last = time.monotonic() + _MOST_WAITS * self._wait_s
        descriptor = None
        try:
            while descriptor is None and time.monotonic() < deadline:
                descriptor = self._open_lock(lock)
                if descriptor is None and not os.path.exists(path):
                    beat = 0 if self._secret else _changed_at(lock)  # others could go on for ever
                    if beat != seen:  # whoever makes it is alive, or is another one
                        seen, deadline = beat, min(last, time.monotonic() + self._wait_s)
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 1.5, 0.05)
                elif descriptor is None:
                    break  # it was made; if it is evicted by now, this one makes it again
        except OSError:
            pass
        ended = threading.Event()
        try:
            if descriptor is not None:
                threading.Thread(target=_beat, args=(lock, ended), daemon=True).start()
            yield
        finally:
            ended.set()
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.unlink(lock)
                _unlock(descriptor)

    def _open_lock(self, path: str) -> int | None:
        """The descriptor of a file that we have locked; None while another has."""
        try:
            descriptor = open_own(path, make=False)
        except FileNotFoundError:
            os.makedirs(self._folder, 0o700, exist_ok=True)
            try:
                descriptor = create(path, 0o644)
            except FileExistsError:
                return None  # another was faster
            self._share(descriptor, 0o066)
        try:
            # one that its last holder has unlinked is no lock any more
            if _lock(descriptor, fcntl.LOCK_EX) and os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        _unlock(descriptor)
        return None

    def _share(self, made: int, most: int) -> None:
        """Let others do with what we made what they may do with the folder, whatever our umask is;
        `most` they may do."""
        with contextlib.suppress(OSError):
            allowed = stat.S_IMODE(os.stat(self._folder).st_mode)
            if allowed & 0o022:
                os.fchmod(made, stat.S_IMODE(os.fstat(made).st_mode) & 0o700 | allowed & most)

    # Room: what is reserved, counted, evicted, under the lock of the folder.

    def _reserve(self, size: int) -> tuple[int, str] | None:
        """A new file of the size, pinned, for which room was made; None if there is none."""
        deadline, pause_s = time.monotonic() + _LOCK_S, 0.0001
        while (account := self._open_lock(f"{self._folder}/.lock")) is None:
            if time.monotonic() > deadline:
                self._paused_until = time.monotonic() + _PAUSE_S
                return None
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.01)
        try:
            written = os.pread(account, _ACCOUNT_BYTES, 0)
            if len(written) < _ACCOUNT_BYTES:
                os.ftruncate(account, _ACCOUNT_BYTES)  # it counts itself too
            used = int.from_bytes(written, "little")
            can_lock = _can_lock(account)
            sure = self._has_counted and len(written) == _ACCOUNT_BYTES and can_lock
            if not sure or used + size > self._max_bytes:
                values, used = self._count(can_lock)
                planned = self._planned()
                values = [file for file in values if os.path.basename(file.path) not in planned]
                stays = used - sum(file.size for file in values)
                if used + size > self._max_bytes >= stays + size and can_lock:
                    most = self._max_bytes - max(size, self._max_bytes // _SLACK)
                    used = _evict(values, used, most)
                self._has_counted = True
            fits = used + size <= self._max_bytes
            # first the number, then the file: killed in between, it is too many and not too few
            os.pwrite(account, (used + size * fits).to_bytes(_ACCOUNT_BYTES, "little"), 0)
            if not fits:
                return None
            temporary = f"{self._folder}/.{secrets.token_hex(8)}"
            descriptor = create(temporary, 0o644)
            self._share(descriptor, 0o044)  # to be read: who may write it could do so while we map
            try:
                _lock(descriptor, fcntl.LOCK_SH)
                os.ftruncate(descriptor, size)  # so that whoever counts sees it
            except OSError:
                os.close(descriptor)
                os.unlink(temporary)
                raise
            return descriptor, temporary
        finally:
            _unlock(account)

    def _publish(self, descriptor: int, temporary: str, path: str) -> None:
        """Give a written file its name, unless a value stands there that is in use."""
        os.utime(descriptor, ns=(time.time_ns(), time.time_ns()))  # finer than the disk's clock
        folder, name = os.path.split(path)
        inside = self._open_folder(folder)
        try:
            try:
                there = _open_to_lock(path)
            except FileNotFoundError:
                os.rename(temporary, name, dst_dir_fd=inside)
                return
            try:
                # replaced while it is mapped, its bytes would be on the disk and in nobody's count
                if not _lock(there, fcntl.LOCK_EX):
                    raise OSError(errno.EBUSY, "the value is in use")
                os.rename(temporary, name, dst_dir_fd=inside)
            finally:
                _unlock(there)
        finally:
            os.close(inside)

    def _open_folder(self, path: str) -> int:
        """The folder of a value, made if it is not there: a link could lead anywhere."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(path, flags)
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o755)
            descriptor = os.open(path, flags)
            self._share(descriptor, 0o2077)
            return descriptor

    def _count(self, can_lock: bool) -> tuple[list[_File], int]:
        """The values that are there, and the bytes of all files; litter of the killed is removed.

        New files appear in the folder itself, under the lock that we hold, and are then renamed to
        their places. Looked at first here and then there, none is missed; one may count twice.
        """
        used = 0
        for file in _files_in(self._folder):
            litter = _TEMPORARY.fullmatch(os.path.basename(file.path))
            if not (litter and can_lock and _remove_unused(file)):
                used += file.size
        values: list[_File] = []
        for name in _folders_in(self._folder):
            # somebody may keep other files in a folder that has a name like ours
            values += [
                file
                for file in _files_in(f"{self._folder}/{name}")
                if _VALUE.fullmatch(found := os.path.basename(file.path)) and found[:2] == name
            ]
        return values, used + sum(file.size for file in values)

    def _planned(self) -> set[str]:
        """What living processes are about to ask for; plans of the dead were removed as litter."""
        found: set[str] = set()
        for file in _files_in(self._folder):
            if _PLAN.fullmatch(os.path.basename(file.path)):
                with contextlib.suppress(OSError):
                    names = read_own(file.path).hex()
                    found.update(names[k : k + 32] for k in range(0, len(names), 32))
        return found


def _most_descriptors() -> int:
    """From here on descriptors are kept for others."""
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20) // 2


def _has_descriptors(descriptor: int) -> bool:
    """Whether a mapping may have a copy of a descriptor: thousands of values may be mapped."""
    copy = os.dup(descriptor)  # the lowest number that is free
    os.close(copy)
    return copy < _most_descriptors()


def _mapped_alone(descriptor: int) -> memoryview:
    """The memory of a file, without a descriptor and so without a lock: only a plan pins it."""
    import pyarrow as pa

    with pa.memory_map(f"/dev/fd/{descriptor}") as file:
        return memoryview(file.read_buffer())


def _beat(lock: str, ended: threading.Event) -> None:
    """Show that the holder of a lock is alive until it has ended."""
    while not ended.wait(_BEAT_S):
        with contextlib.suppress(OSError):
            os.utime(lock, follow_symlinks=False)


def _changed_at(path: str) -> int:
    """When a file was changed; 0 if it is not there."""
    try:
        return os.lstat(path).st_mtime_ns
    except FileNotFoundError:
        return 0


def _reopen(folder: str, max_bytes: int, wait_s: float) -> DiskCache:
    return DiskCache(folder, max_bytes, wait_s=wait_s)


def _evict(values: list[_File], used: int, most: int) -> int:
    """Remove values that nobody uses, the oldest use first, down to `most` bytes.

    Returns the bytes that are then used.
    """
    for file in sorted(values):
        if used <= most:
            break
        if _remove_unused(file):
            used -= file.size
    return used


def _remove_unused(file: _File) -> bool:
    """Unlink a file under a lock that nobody can have who uses it; False if somebody does."""
    try:
        descriptor = _open_to_lock(file.path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            return False
        os.unlink(file.path)
        return True
    except OSError:
        return False
    finally:
        _unlock(descriptor)


def _open_to_lock(path: str) -> int:
    """Some network file systems lock only what may be written; others' files may only be read."""
    try:
        return open_own(path, make=False)
    except PermissionError:
        return open_own(path, make=False, write=False)


def _files_in(folder: str) -> list[_File]:
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    found.append(_File(status.st_mtime_ns, status.st_size, entry.path))
    return found


def _folders_in(folder: str) -> list[str]:
    """Those that hold values; datasets made of raw files stand beside them."""
    with os.scandir(folder) as entries:
        return [
            entry.name
            for entry in entries
            if re.fullmatch("[0-9a-f]{2}", entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _lock(descriptor: int, kind: int) -> bool:
    """Try a lock; True also where there are no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED
    return True


def _can_lock(descriptor: int) -> bool:
    """Whether there are locks: one that is held is given again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    """Also for a process that was forked meanwhile and has the descriptor too."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    parts = []
    while block := os.read(descriptor, size + 1):
        parts.append(block)
        size -= len(block)
        if size < 0:
            break
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_all(descriptor: int, *parts: bytes) -> None:
    left = [memoryview(part) for part in parts]
    while left:
        written = os.writev(descriptor, left)
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
