"""Share files between the processes of a run on this host: made once, mapped by all, then removed.

In:    what all processes of a run are told alike; how a file is made
Out:   a private folder of the run; the mapped bytes of files in it
Keeps: the folder as long as a process of the run lives, a file as long as one uses it. Of the
       processes that need a file at once one makes it, and the others wait
Never: shares where others may write; waits for a process that is frozen; leaves anything for good:
       what a killed run has left is removed by the next run of this user in the same place

Each process of a run has a shared lock on the file `alive` in its folder as long as it lives.
Whoever gets that lock alone knows that the run is over.

Who uses a file is told by locks on bytes of the file `uses`, two for each name: one for those who
use it, one for whoever makes it. They are record locks: they end with their process, a fork does
not take them along, and a window of thousands of files needs one descriptor.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import util
from typing import IO, Any, Final, Protocol

import pyarrow as pa
import xxhash

from penstock.disk import is_private, make_own_folder, open_own, replacing
from penstock.errors import StoreFailed
from penstock.supply.ranks import VARIABLES

_ALIVE: Final = "alive"
_USES: Final = "uses"
WAIT_S: Final = 60.0
"""So long a process waits for one that makes or hashes the same file. One of 1 GB is hashed in
0.6 s by sha256; examples of 150 MB are decoded in a second or two."""
_JOBS: Final = (
    "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
)  # fmt: skip
"""What launchers tell all ranks of a launch alike."""

_log = logging.getLogger(__name__)

_joined: dict[str, int] = {}
"""Folders of runs, each with the descriptor that says that this process lives."""
_guard = threading.RLock()
"""Of the next one. A file may be released wherever Python frees memory, also in its own thread."""
_users: dict[str, "_Users"] = {}
"""Folders of runs, each with the locks that this process has on its files."""


def launch_name(*told: Any) -> str:
    """A name that all processes of this launch find, and no other launch. OSError where it cannot
    be told who has started them."""
    about = [_launcher(), [os.environ.get(name) for name in _JOBS], *told]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


def join_folder(name: str, base: str = "") -> str:
    """The folder of a run, joined by this process until it ends. The last one of the run removes
    it; those of runs that are over are removed now. It lies in `base`, by default in the user's
    runtime directory. OSError or StoreFailed where no place is safe."""
    home = _home(base or os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    folder = f"{home}/{name}"
    with _guard:
        if folder not in _joined:
            _joined[folder] = _join(folder)
            util.Finalize(None, leave_folder, (folder,), exitpriority=1)
            _remove_dead(home)
    return folder


class SharedFiles:
    """Files that processes of a run make once and map: the folder is joined with the first one."""

    def __init__(self, name: str, base: str) -> None:
        self._name, self._base = name, base
        self._has_told = False
        # at the end of a process after its children have ended, also those that had to be
        util.Finalize(self, _remove_left, (_home_in(base), name), exitpriority=-1)

    def fetch(self, key: str, write: Callable[["Sink"], None]) -> "SharedFile | None":
        """The file of a key, written by whoever needs it first. None where it cannot be shared:
        the disk is full, no place is safe, or whoever makes it is frozen."""
        try:
            os.makedirs(self._base, 0o700, exist_ok=True)
            folder = join_folder(self._name, self._base)
            users = _users_of(folder)
            users.take(name := xxhash.xxh3_128_hexdigest(key.encode()))
        except (OSError, StoreFailed) as error:
            self._tell(error)
            return None
        shared = SharedFile(users, name)
        failed: OSError | None = None
        try:
            if not shared.map():
                with users.alone(name):
                    if not shared.map():
                        with replacing(shared.path, mode=0o600) as file:
                            written = _Written(file)
                            try:
                                write(written)
                            except OSError as error:  # of what is read, not of this disk
                                failed = error
                                raise
                            written.flush()
                        shared.map()
        except (_Unwritten, OSError) as error:
            if error is failed:
                raise
            self._tell(error)
            return None
        return shared

    def _tell(self, error: Exception) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "decoded shards cannot be shared in %s (%s): each process holds its own in memory; "
                "LoaderRun(cache_dir=…) names a directory with more room",
                self._base, error,
            )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedFiles, (self._name, self._base)


class SharedFile:
    """A mapped file, in use until this object is gone."""

    def __init__(self, users: "_Users", name: str) -> None:
        self._users, self._name, self._process = users, name, os.getpid()
        self.path = f"{users.folder}/{name}"
        self.data: pa.Buffer | None = None

    def map(self) -> bool:
        """Map it, if it is there and whole."""
        try:
            descriptor = open_own(self.path, make=False, write=False)
        except FileNotFoundError:
            return False
        try:
            # Arrow's map outlives its file: Python's would hold a descriptor for each
            with pa.memory_map(f"/dev/fd/{descriptor}") as file:
                data = file.read_buffer()
        finally:
            os.close(descriptor)
        try:
            pa.ipc.open_file(pa.BufferReader(data))
        except pa.ArrowInvalid:  # somebody has cut it
            return False
        self.data = data
        return True

    def __del__(self) -> None:
        if self._process == os.getpid():
            self._users.give(self._name, self.path)


class Sink(Protocol):
    """Where a file is written."""

    def write(self, data: Any) -> int: ...


class _Unwritten(Exception):
    """The disk did not take a file."""


class _Written:
    """A file whose errors are those of its disk, and not of what is read to write it."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._at = 0

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            raise _Unwritten(error) from None
        size = memoryview(data).nbytes
        self._at += size
        return size

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise _Unwritten(error) from None

    def close(self) -> None: ...


class _Users:
    """This process's locks on the files of a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._descriptor = open_own(f"{folder}/{_USES}", 0o600)
        self._counts: dict[str, int] = {}
        """Record locks are those of a process: its threads count for themselves."""

    def take(self, name: str) -> None:
        """Use a file, whether it is there yet or not."""
        with _guard:
            count = self._counts.get(name, 0)
            if not count:
                self._wait(fcntl.LOCK_SH, _byte_of(name))
            self._counts[name] = count + 1

    def give(self, name: str, path: str) -> None:
        """Use it no longer; the last one who does removes it."""
        with _guard:
            self._counts[name] -= 1
            if self._counts[name]:
                return
            del self._counts[name]
            with contextlib.suppress(OSError):
                if _try_lock(self._descriptor, fcntl.LOCK_EX, _byte_of(name)):
                    os.unlink(path)
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, _byte_of(name))

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Be the process that makes a file, after any other that does."""
        at = _byte_of(name) + 1
        self._wait(fcntl.LOCK_EX, at)
        try:
            yield
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, at)

    def _wait(self, kind: int, at: int) -> None:
        _wait_for(lambda: _try_lock(self._descriptor, kind, at))


def _byte_of(name: str) -> int:
    """The first of the two bytes of a name, a hash in hexadecimal digits."""
    return int(name[:15], 16) << 1


def _try_lock(descriptor: int, kind: int, at: int) -> bool:
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB, 1, at)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _users_of(folder: str) -> _Users:
    with _guard:
        if folder not in _users:
            _users[folder] = _Users(folder)
        return _users[folder]


def _begin_anew() -> None:
    """In a fork: locks of records and threads stayed behind."""
    global _guard
    _guard = threading.RLock()
    _users.clear()


os.register_at_fork(after_in_child=_begin_anew)


def leave_folder(folder: str) -> None:
    """This process needs a folder no more; the last one removes it."""
    with contextlib.suppress(OSError, KeyError):
        os.close(_joined.pop(folder))
        _remove_if_over(folder)


def _remove_left(home: str, name: str) -> None:
    """Remove the folder of a run, if none of its processes lives."""
    with contextlib.suppress(OSError):
        if f"{home}/{name}" not in _joined:
            _remove_if_over(f"{home}/{name}")


def wait_lock(descriptor: int, kind: int) -> None:
    """Wait for a lock; TimeoutError, an OSError, if its holder seems frozen."""

    def try_it() -> bool:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    _wait_for(try_it)


def _wait_for(lock: Callable[[], bool]) -> None:
    deadline, pause_s = time.monotonic() + WAIT_S, 0.0005
    while not lock():
        if time.monotonic() > deadline:
            raise TimeoutError("another process has the lock and does not end")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.01)


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


def _home(base: str) -> str:
    """This user's own folder in a directory of this host."""
    status = os.stat(base)
    # where others may write, they must not be able to put a folder of theirs in place of ours
    sticky = status.st_uid in (0, os.geteuid()) and status.st_mode & stat.S_ISVTX
    if not sticky and not is_private(status):
        raise PermissionError(f"{base} is others' too")
    home = _home_in(base)
    _make_private(home)
    return home


def _home_in(base: str) -> str:
    return os.path.join(os.path.abspath(base), f"penstock-{os.geteuid()}")


def _make_private(folder: str) -> None:
    make_own_folder(folder, 0o700)
    status = os.lstat(folder)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is others' too")


def _join(folder: str) -> int:
    """Be a process of a run: a descriptor that says so until it is closed."""
    for _ in range(100):
        try:
            _make_private(folder)
            descriptor = open_own(f"{folder}/{_ALIVE}", 0o600)
        except FileNotFoundError:
            continue  # removed as that of a run that is over
        try:
            if _is_over(descriptor):
                _clear(folder)
            wait_lock(descriptor, fcntl.LOCK_SH)
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
    """Remove what a run has left that is over."""
    for name in os.listdir(folder):
        path = f"{folder}/{name}"
        if name != _ALIVE and stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        elif name != _ALIVE:
            os.unlink(path)


def _remove_dead(home: str) -> None:
    """Remove the folders of runs that are over."""
    for name in os.listdir(home):
        folder = f"{home}/{name}"
        if folder not in _joined:
            with contextlib.suppress(OSError):
                _remove_if_over(folder)


def _remove_if_over(folder: str) -> None:
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return  # no run's: through a link the files of others would be removed
    try:
        descriptor = open_own(f"{folder}/{_ALIVE}", make=False)
    except FileNotFoundError:
        os.rmdir(folder)  # whoever made it was killed, or makes it again
        return
    try:
        if _is_over(descriptor):
            _clear(folder)
            os.unlink(f"{folder}/{_ALIVE}")
            os.rmdir(folder)
    finally:
        os.close(descriptor)
