"""Hash a mapped file once for each run on this host, and see later whether it is still the same.

In:    the mapped bytes of a file, its descriptor, the hash that the log names
Out:   the hash of the bytes; whether somebody has changed the file since
Keeps: a mark for each file that was hashed: device, inode, size, mtime, ctime and hash. A mark
       holds for a file with the same of all of them, in the run that made it, and as long as a
       process of that run lives. Of the ranks that need a file at once one hashes it
Never: believes a mark where others may write; waits for a process that is frozen: where nothing
       safe is shared, each process hashes for itself, and remembers what it hashed; touches the
       memory of a file to see whether the file was cut

Marks are files in a folder of the run, `alive` beside them. Each process of the run has a shared
lock on that one as long as it lives. Whoever gets it alone knows that the run is over, and removes
its marks: a later run hashes again, also under the same launcher.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import xxhash

from penstock.disk import is_private, make_own_folder, open_own
from penstock.errors import StoreFailed
from penstock.supply.ranks import VARIABLES

_SHA256_LETTERS: Final = 64
_ALIVE: Final = "alive"
_WAIT_S: Final = 60.0
"""So long a rank waits for one that hashes the same file. One of 1 GB takes 0.6 s by sha256."""
_JOBS: Final = (
    "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)  # fmt: skip
"""What launchers tell all ranks of a launch alike."""

_known: set[str] = set()
"""What this process has found to be right, or was told by a mark."""
_joined: dict[str, int] = {}
"""Folders of runs, each with the descriptor that says that this process lives."""


def join_run(world_size: int, run_dir: str | None = None) -> str:
    """The folder of the marks that the ranks of this launch share on this host.

    Empty for a process that has no other ranks, and where there is no place for such a folder.
    """
    if world_size < 2:
        return ""
    try:
        told = [_launcher(), [os.environ.get(name) for name in _JOBS], run_dir]
        home = _home()
        folder = f"{home}/{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]}"
        if folder not in _joined:
            _joined[folder] = _join(folder)
            _remove_dead(home)
    except (OSError, StoreFailed):
        return ""
    return folder


def hash_once(data: pa.Buffer, descriptor: int, expected: str, marks: str = "") -> str:
    """The hash of a file's mapped bytes, which are hashed if no mark says that it is `expected`:
    a sha256, or an xxh3 of 128 bits, by its length.

    `marks` is the folder of `join_run`.
    """
    about = _about(descriptor, expected)
    if about in _known:
        return expected
    with _own_mark(marks, about) as mark:
        if mark is None or os.pread(mark, 4096, 0) != about.encode():
            if len(expected) == _SHA256_LETTERS:
                found = hashlib.sha256(data).hexdigest()
            else:
                found = xxhash.xxh3_128_hexdigest(data)
            if found != expected or _about(descriptor, expected) != about:
                return found  # it is wrong, or was touched meanwhile and is hashed again next time
            if mark is not None:
                with contextlib.suppress(OSError):  # a full disk: the others hash too
                    os.ftruncate(mark, 0)
                    os.pwrite(mark, about.encode(), 0)
        _known.add(about)
    return expected


class MappedFile:
    """A file that is mapped and was verified; it says whether somebody has changed it since.

    It holds no descriptor, since a window may have thousands of shards. Under its name is the file,
    or another one, or none: then nobody finds the mapped one any more, and it is harmless unless
    it was cut before.
    """

    def __init__(self, memory: Any, path: str = "", descriptor: int = -1) -> None:
        """Without a `path` it is only seen whether it was cut."""
        self._last = memoryview(memory)[-1:]
        self._path = path
        self._seen = _stamp(os.fstat(descriptor)) if path else ()

    def is_unchanged(self) -> bool:
        """Whether its memory can be read, and holds what was verified: 2 microseconds."""
        if self._path:
            with contextlib.suppress(OSError):
                found = _stamp(os.lstat(self._path))
                if found[:2] == self._seen[:2]:
                    return found == self._seen
        return _is_there(self._last)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """The file, and what changes with its bytes. Links and modes change its ctime: not that."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_pipe: list[int] = []
"""The two ends of one, for single bytes."""


def _is_there(byte: memoryview) -> bool:
    """Whether a byte of a mapped file can be read.

    A process that reads it where the file was cut is ended by SIGBUS. The system, told to write it
    somewhere, says EFAULT.
    """
    if not _pipe:
        _pipe.extend(os.pipe())
    try:
        os.write(_pipe[1], byte)
    except OSError as error:
        if error.errno == errno.EFAULT:
            return False
        raise
    os.read(_pipe[0], 1)
    return True


def _about(descriptor: int, expected: str) -> str:
    """All that must be the same for a file to be the one that was hashed."""
    status = os.fstat(descriptor)
    return (
        f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} "
        f"{status.st_ctime_ns} {expected}\n"
    )


@contextlib.contextmanager
def _own_mark(marks: str, about: str) -> Iterator[int | None]:
    """The mark of a file while no other process has it; None if it is not to be had."""
    descriptor = None
    try:
        if marks:
            device, inode, *_, expected = about.split()
            descriptor = open_own(f"{marks}/{expected[:32]}-{device}-{inode}", 0o600)
            _lock(descriptor, fcntl.LOCK_EX)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a fork meanwhile would keep it
            os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    """Wait for a lock; TimeoutError, an OSError, if its holder seems frozen."""
    deadline, pause_s = time.monotonic() + _WAIT_S, 0.0005
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("another process has the lock and does not end") from None
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, 0.01)
        else:
            return


def _launcher() -> list[int]:
    """The process that started the ranks, and when it was started itself.

    It is the nearest ancestor that was not told a rank: workers that a rank starts were told its
    own. Ranks that are told by arguments alone have one parent.
    """
    told = next((f"{name}=".encode() for name, _ in VARIABLES if name in os.environ), b"")
    pid = os.getppid()
    while True:
        with open(f"/proc/{pid}/stat", "rb") as file:  # its name, in brackets, may hold anything
            fields = file.read().rpartition(b")")[2].split()
        parent, started = int(fields[1]), int(fields[19])
        if parent == 0 or not told or not _has_variable(pid, told):
            return [pid, started]
        pid = parent


def _has_variable(pid: int, start: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(line.startswith(start) for line in file.read().split(b"\0"))
    except OSError:  # of another user: a launcher that runs as root
        return False


def _home() -> str:
    """This user's own folder on this host."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    status = os.stat(base)
    # where others may write, they must not be able to put a folder of theirs in place of ours
    sticky = status.st_uid in (0, os.geteuid()) and status.st_mode & stat.S_ISVTX
    if not sticky and not is_private(status):
        raise PermissionError(f"{base} is others' too")
    home = os.path.join(os.path.abspath(base), f"penstock-{os.geteuid()}")
    _make_private(home)
    return home


def _make_private(folder: str) -> None:
    make_own_folder(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is others' too")


def _join(folder: str) -> int:
    """Be a process of a run: a descriptor that says so until it is closed."""
    for _ in range(100):
        _make_private(folder)
        try:
            descriptor = open_own(f"{folder}/{_ALIVE}", 0o600)
        except FileNotFoundError:
            continue  # removed as that of a run that is over
        try:
            if _is_over(descriptor):
                _clear(folder)
            _lock(descriptor, fcntl.LOCK_SH)
            if os.fstat(descriptor).st_nlink:
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise TimeoutError(f"{folder} does not stay")


def _is_over(descriptor: int) -> bool:
    """Whether no process of a run lives; then none can join it until the lock is given back."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _clear(folder: str) -> None:
    """Remove the marks of a run that is over."""
    for name in os.listdir(folder):
        if name != _ALIVE:
            os.unlink(f"{folder}/{name}")


def _remove_dead(home: str) -> None:
    """Remove the folders of runs that are over."""
    for name in os.listdir(home):
        folder = f"{home}/{name}"
        with contextlib.suppress(OSError):
            if folder in _joined:
                continue
            try:
                descriptor = open_own(f"{folder}/{_ALIVE}", make=False)
            except FileNotFoundError:
                os.rmdir(folder)  # whoever made it was killed, or makes it again
                continue
            try:
                if _is_over(descriptor):
                    _clear(folder)
                    os.unlink(f"{folder}/{_ALIVE}")
                    os.rmdir(folder)
            finally:
                os.close(descriptor)
