"""Hash a mapped file once for each run on this host, and see later whether it is still the same.

In:    the mapped bytes of a file, its descriptor, the hash that the log names
Out:   the hash of the bytes; whether somebody has changed the file since
Keeps: a mark for each file that was hashed: device, inode, size, mtime, ctime and hash. A mark
       holds for a file with the same of all of them, in the run that made it, and as long as a
       process of that run lives. Of the ranks that need a file at once one hashes it
Never: believes a mark where others may write; waits for a process that is frozen: where nothing
       safe is shared, each process hashes for itself, and remembers what it hashed; touches the
       memory of a file to see whether the file was cut

Marks are files in the folder of the run, which is removed when its last process has ended: a later
run hashes again, also under the same launcher.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import xxhash

from penstock.disk import open_own
from penstock.errors import StoreFailed
from penstock.supply.run_folder import join_folder, launch_name, wait_lock

_SHA256_LETTERS: Final = 64
_known: set[str] = set()
"""What this process has found to be right, or was told by a mark."""


def join_run(world_size: int, run_dir: str | None = None) -> str:
    """The folder of the marks that the ranks of this launch share on this host.

    Empty for a process that has no other ranks, and where there is no place for such a folder.
    """
    if world_size < 2:
        return ""
    try:
        return join_folder(launch_name(run_dir))
    except (OSError, StoreFailed):
        return ""


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
            wait_lock(descriptor, fcntl.LOCK_EX)
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
