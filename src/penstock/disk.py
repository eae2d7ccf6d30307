"""Open and replace files in directories where others may write too.

In:    a path; the directory may hold links, pipes and devices that others left there
Out:   a descriptor of a regular file, or a file object; OSError that says what stands there instead
Keeps: the file at a path is replaced whole, or stays as it was
Never: follows a link in the last part of a path, waits for a pipe, uses a name that can be foretold

All files that penstock writes are opened here; a test of the house holds that.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from typing import IO

from penstock.errors import StoreFailed

AnyPath = str | os.PathLike[str]


def create(path: AnyPath, mode: int = 0o666) -> int:
    """A new file, to read and write; FileExistsError if anything has the name, a link too."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_own(
    path: AnyPath,
    mode: int = 0o666,
    *,
    append: bool = False,
    make: bool = True,
    write: bool = True,
    single: bool = True,
) -> int:
    """A file of ours that may be there already; made if it is not, and `make` says so.

    A file with a second name is refused like a link, if it is to be `single`: what is written
    would appear there too.
    """
    flags = os.O_RDWR if write else os.O_RDONLY
    if append:
        flags = os.O_WRONLY | os.O_APPEND
    # without O_CREAT first: in a directory like /tmp Linux refuses it for others' files
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _open(path, flags, single=write and single)
        if not make:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
        with contextlib.suppress(FileExistsError):
            extra = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            return os.open(path, flags | extra, mode)


def unnamed(folder: AnyPath | None = None) -> int:
    """A file without a name, in memory or in a folder: nothing is left of it once nobody has it
    open, however they ended. OSError where the system has no such files."""
    if folder is None:
        return os.memfd_create("penstock", os.MFD_CLOEXEC)
    with contextlib.suppress(OSError):  # some file systems cannot
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    # as `store.local` names what it writes: killed between two lines, it is cleared by the next run
    path = os.path.join(os.fspath(folder), f".tmp-0-{secrets.token_hex(8)}")
    descriptor = create(path, 0o600)
    with contextlib.suppress(FileNotFoundError):  # whoever took over has cleared it
        os.unlink(path)
    return descriptor


def name_of_unnamed(descriptor: int) -> str:
    """What other processes of this user open such a file by, while this one has it open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_unnamed(name: str, *, write: bool = True) -> int:
    """An unnamed file of another process. An error if it has a name after all: the number is that
    of another file by then."""
    descriptor = os.open(name, (os.O_WRONLY if write else os.O_RDONLY) | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_nlink or not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), name)
    return descriptor


def make_own_folder(path: AnyPath, mode: int = 0o777) -> None:
    """A folder of ours inside one that others may write, made if it is not there: no link."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode)
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise StoreFailed(
            f"{os.path.basename(os.fspath(path))} is no folder",
            where=os.fspath(path),
            why="it is a link or a file: what is written there could land anywhere",
            do="remove what stands there, if it is not needed",
        )


def read_own(path: AnyPath) -> bytes:
    """All bytes of a file of ours."""
    with os.fdopen(open_own(path, make=False, write=False), "rb") as file:
        return file.read()


@contextlib.contextmanager
def replacing(path: AnyPath, *, sync: bool = False, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Write a file under another name; it gets its own when the block ends without an error.

    `sync` makes its bytes durable first, and removes what killed writers of the same file left.
    The folder is the caller's to sync.
    """
    folder, name = os.path.split(os.fspath(path))
    start = f".tmp-for{zlib.crc32(os.fsencode(name)):08x}-"
    if sync:
        _sweep(folder, start)
    temporary = os.path.join(folder, start + secrets.token_hex(8))
    descriptor = create(temporary, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so that it is not swept
            yield file
            file.flush()
            if sync:
                os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def is_private(status: os.stat_result) -> bool:
    """Whether nobody but this user, and root, may write a file or a directory."""
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o002:
        return False
    return not status.st_mode & 0o020 or _is_own_group(status.st_gid)


def _is_own_group(number: int) -> bool:
    """Whether a group is that of this user alone, as many systems give one to each, with umask
    002."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    alone = group.gr_name == user.pw_name and number == user.pw_gid
    return alone and set(group.gr_mem) <= {user.pw_name}


def _sweep(folder: str, start: str) -> None:
    """Remove temporary files that nobody writes; where there are no locks they stay."""
    for name in os.listdir(folder or "."):
        if not name.startswith(start):
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            descriptor = _open(path, os.O_RDWR, single=True)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(descriptor)


def _open(path: AnyPath, flags: int, *, single: bool) -> int:
    # O_NONBLOCK: a pipe without a reader must be refused, not waited for
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            why = "it is a symbolic link, which could lead anywhere"
            raise OSError(errno.ELOOP, why, os.fspath(path)) from None
        if error.errno == errno.ENXIO:
            why = "it is a pipe or a device, not a file"
            raise OSError(errno.EINVAL, why, os.fspath(path)) from None
        raise
    status = os.fstat(descriptor)
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = "it is a pipe, a device or a directory, not a file"
    elif single and status.st_nlink > 1:
        why = "it has a second name (a hard link), where the bytes would appear too"
    if why:
        os.close(descriptor)
        raise OSError(errno.EINVAL, why, os.fspath(path))
    return descriptor
