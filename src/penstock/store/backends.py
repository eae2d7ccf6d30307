"""Keep named objects that are created once: in a directory, or in a bucket.

In:    names relative to the dataset, bytes
Out:   the same bytes; `AlreadyThere` for a name that is taken
Keeps: an object is whole and durable when `create` or `put` returns, or it is not there;
       no object is ever overwritten
Never: follows a symlink or a name that leaves the dataset, decides anything from a listing

Both stores answer the same calls, so that the log and the writer do not know which they have.
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from penstock.disk import create
from penstock.errors import BadConfig, LogDamaged, ShardMismatch, StoreFailed
from penstock.work.values import checked_path

_SAFE_NAME = re.compile(r"(?:_[a-z]+/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_TEMPORARY = re.compile(r"\.tmp-(\d+)-[0-9a-f]+")
_HALF_URL = re.compile("(s3|gs|az|file|redis|rediss):/")
_READ_BYTES = 1 << 20
WRITE_BYTES = 32 << 10
"""For one call. Writes of 8 MB took 3.3 s of CPU per GB on a virtual machine, of 32 to 256 KB
0.3 to 0.4; probably large pages that the guest had given back to its host. A pull of 2 GB took
9.8 s of CPU with writes of 8 MB, 5.2 with these (medians of three, on a busy machine)."""


class AlreadyThere(Exception):
    """The name is taken. Not an error yet: it may be taken by us."""


class Unsure(Exception):
    """The store did not say whether the object was created."""


class Stored:
    """What `put` left in the store."""

    def __init__(self, name: str, sha256: str, size: int, shadowed: str | None = None) -> None:
        self.name = name
        self.sha256 = sha256
        self.size = size
        self.shadowed = shadowed
        """A name that an earlier writer left other bytes under; garbage once we have committed."""


class Store(Protocol):
    """Where a dataset lives."""

    url: str
    epoch: int
    """The writer's epoch; temporary files carry it."""

    def create(self, name: str, data: bytes) -> None:
        """Make a small object durable; `AlreadyThere` if the name is taken."""

    def put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        """Stream an object in and make it durable; the same bytes under the name are adopted."""

    def read(self, name: str) -> bytes:
        """The whole object; FileNotFoundError if there is none."""

    def open(self, name: str) -> IO[bytes]:
        """The object as a seekable file of Arrow's; FileNotFoundError if there is none.

        Not a Python file: Arrow's own threads would read from it, and one that lets go of a Python
        object while the interpreter ends aborts the process (seen in 1 of 40 short commands).
        """

    def size(self, name: str) -> int | None:
        """Its bytes, or None if there is none."""

    def remove(self, name: str) -> None:
        """Delete what no log refers to; fine if it is gone."""

    def settle(self) -> None:
        """Called once this writer owns the dataset: make inherited names durable, clear litter."""


class Depot(Store, Protocol):
    """A store between which and another objects are moved."""

    def names(self, folder: str = "") -> list[tuple[str, int]]:
        """Objects that stand directly in the dataset, or in a folder of it, and their bytes."""

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """Bytes start..stop of an object, all of them; FileNotFoundError if there is none."""

    def add(self, name: str, data: memoryview, sha256: str) -> None:
        """Make an object with these bytes durable; one that has them already is taken as it is.

        Raises ShardMismatch for a name under which others are.
        """


def open_store(
    url: str | os.PathLike[str],
    *,
    make: bool = False,
    tries_again: bool = True,
    patience_s: float | None = None,
) -> Depot:
    """The store behind a path or an s3://, gs://, az:// address; `make` creates a directory.

    A bucket that does not answer is asked again for `patience_s`, by default 60 s. Without
    `tries_again` its failure is the caller's soon: one who has patience of his own.
    """
    text = checked_path("the address", url)
    scheme, separator, _ = text.partition("://")
    if not separator and _HALF_URL.match(text):
        raise BadConfig(
            f"{text} has one slash after its colon", do="write two for an address, ./ for a path"
        )
    if not separator:
        return LocalStore(Path(text), make=make)
    if scheme == "file":
        return LocalStore(Path(local_path(text)), make=make)
    if scheme in ("s3", "gs", "az"):
        from penstock.store.bucket import BucketStore

        return BucketStore(text, probe=make, tries_again=tries_again, patience_s=patience_s)
    raise BadConfig(
        f"{scheme}:// is not a store penstock knows",
        where=text,
        do="use a directory, s3://, gs:// or az://",
    )


def local_path(url: str) -> str:
    """A path as it is, or that of a file:// address.

    >>> local_path("file:///data/my%20set"), local_path("file://localhost/data"), local_path("a%20")
    ('/data/my set', '/data', 'a%20')
    """
    if not checked_path("the address", url).startswith("file://"):
        return url
    host, slash, rest = url.removeprefix("file://").partition("/")
    if not slash or host not in ("", "localhost"):
        raise BadConfig(
            f"{url} is not a path of this machine",
            why=f"what stands before the third slash is a host: {host!r}" if slash else "",
            do="write file:///and/the/path, or the path alone",
        )
    return checked_path("the address", urllib.parse.unquote(slash + rest))


def check_name(name: str, where: str) -> str:
    """Refuse a name that could leave the dataset."""
    if not _SAFE_NAME.fullmatch(name) or ".." in name:
        raise LogDamaged(
            f"the log names {name!r}, which is not a name inside a dataset",
            where=where,
            why="names are relative, in at most one folder that starts with _",
            do="do not use this dataset; ask whoever made it",
        )
    return name


def short_of(name: str, wanted: int, found: int, where: str) -> ShardMismatch:
    """The error for an object that ends too early."""
    return ShardMismatch(
        f"{name} has {found:,} bytes, {wanted:,} were to be read",
        where=where,
        do="penstock verify --full " + where,
    )


def taken(name: str, where: str) -> ShardMismatch:
    """The error for a name that holds other bytes than those it was to get."""
    return ShardMismatch(
        f"{name} is there already, with other bytes",
        where=where,
        why="another dataset was written to the same place, or the object was changed",
        do="choose an empty directory or prefix",
    )


def read_back(store: Store, name: str) -> bytes:
    """What stands under a name that is taken, or of which the store did not say whether it is."""
    try:
        return store.read(name)
    except FileNotFoundError:
        raise StoreFailed(
            f"could not write {name}",
            where=store.url,
            why="the bucket did not say whether it was stored, and it is not there",
            do="run the same command again: nothing committed is lost",
        ) from None


def other_name(name: str, sha256: str) -> str:
    """Where an object goes whose name is taken by other bytes.

    >>> other_name("shard_00000.parquet", "0a1b2c3d4e5f"), other_name("_dedup/000000", "0a1b2c3d4e")
    ('shard_00000-0a1b2c3d.parquet', '_dedup/000000-0a1b2c3d')
    """
    stem, suffix = os.path.splitext(name)
    return f"{stem}-{sha256[:8]}{suffix}"


class _HashingFile(io.RawIOBase):
    """A file that hashes what is written before the disk has it: the disk is not trusted."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.sha256 = hashlib.sha256()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.sha256.update(view)
        _write_all(self._descriptor, view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        written = os.write(descriptor, view[:WRITE_BYTES])
        if written == 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        view = view[written:]


class LocalStore:
    """A dataset in a directory.

    A new object is written beside its target, fsynced, linked to its name (which fails if the name
    is taken), and the directory is fsynced. Nothing else makes a name appear. Where there are no
    hard links (FAT, some network file systems) it is renamed, on condition that the name is free.
    """

    def __init__(self, root: Path, *, make: bool = False) -> None:
        self.root = root
        self.url = str(root)
        self.epoch = 0
        self._folders: set[Path] = set()
        if make:
            with self.explained("make the directory", ""):
                _make_folder(root)

    def create(self, name: str, data: bytes) -> None:
        with self.explained("write", name), self._temporary(name) as (descriptor, temporary):
            _write_all(descriptor, memoryview(data))
            self._publish(descriptor, temporary, self._path(name))

    def put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        with self.explained("write", name), self._temporary(name) as (descriptor, temporary):
            file = _HashingFile(descriptor)
            write(file)  # type: ignore[arg-type]  # RawIOBase is what pyarrow and json need of IO
            sha256 = file.sha256.hexdigest()
            shadowed = None
            for candidate in (name, other_name(name, sha256)):
                try:
                    self._publish(descriptor, temporary, self._path(candidate))
                except AlreadyThere:
                    if self._adopt(candidate, sha256):
                        return Stored(candidate, sha256, file.size, shadowed)
                    shadowed = name
                else:
                    return Stored(candidate, sha256, file.size, shadowed)
        raise ShardMismatch(
            f"{name} is taken, and so is the name that carries its hash",
            where=self.url,
            do="penstock verify --full " + self.url,
        )

    def read(self, name: str) -> bytes:
        with self.explained("open", name):
            file = os.fdopen(self._open(name), "rb")
        with self.explained("read", name), file:
            return file.read()

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        with self.explained("open", name):
            descriptor = self._open(name)
        try:
            with self.explained("read", name):
                data = os.pread(descriptor, stop - start, start)
                while len(data) < stop - start:
                    more = os.pread(descriptor, stop - start - len(data), start + len(data))
                    if not more:
                        raise short_of(name, stop, start + len(data), self.url)
                    data += more
        finally:
            os.close(descriptor)
        return memoryview(data)

    def add(self, name: str, data: memoryview, sha256: str) -> None:
        with self.explained("write", name), self._temporary(name) as (descriptor, temporary):
            _write_all(descriptor, data)
            try:
                self._publish(descriptor, temporary, self._path(name))
            except AlreadyThere:
                if not self._adopt(name, sha256):
                    raise taken(name, self.url) from None

    def open(self, name: str) -> IO[bytes]:
        import pyarrow as pa

        with self.explained("open", name):
            descriptor = self._open(name)
            try:
                return pa.OSFile(f"/dev/fd/{descriptor}")  # type: ignore[no-any-return]
            finally:
                os.close(descriptor)

    def size(self, name: str) -> int | None:
        with self.explained("look at", name):
            try:
                found = os.lstat(self._path(name))
            except FileNotFoundError:
                return None
            if stat.S_ISLNK(found.st_mode):
                raise self._linked(name)
            _check_is_file(found.st_mode)  # not None: whoever hears that writes there
        return found.st_size

    def remove(self, name: str) -> None:
        with self.explained("remove", name), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def settle(self) -> None:
        # A writer killed between link and fsync leaves names that are visible and not yet durable.
        # What the next record builds on must not vanish under it.
        with self.explained("settle", ""):
            folders = [self.root] + [
                self.root / entry.name
                for entry in os.scandir(self.root)
                if entry.name.startswith("_") and entry.is_dir(follow_symlinks=False)
            ]
            for folder in folders:
                for entry in list(os.scandir(folder)):
                    litter = _TEMPORARY.fullmatch(entry.name)
                    if litter and int(litter[1]) < self.epoch:
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(entry.path)
                _sync_folder(folder)

    def names(self, folder: str = "") -> list[tuple[str, int]]:
        with self.explained("look at", folder):
            if folder:
                self.refuse_link(folder)
            if not (self.root / folder).is_dir():
                return []
            before = f"{folder}/" if folder else ""
            found = [(before + entry.name, entry) for entry in os.scandir(self.root / folder)]
            return sorted(
                (name, entry.stat().st_size)
                for name, entry in found
                if entry.is_file(follow_symlinks=False) and _SAFE_NAME.fullmatch(name)
            )

    def adopt(self, path: Path, name: str) -> None:
        """Give a file that is whole and synced its name; it loses its old one.

        `AlreadyThere` if the name is taken, by whatever it is.
        """
        with self.explained("write", name):
            target = self._path(name)
            _make_folder(target.parent)
            try:
                _name_once(path, target)
            except FileExistsError:
                raise AlreadyThere(name) from None
            _sync_folder(target.parent)
            path.unlink(missing_ok=True)

    def refuse_link(self, name: str) -> None:
        """Refuse a folder of the dataset that is a symbolic link."""
        if (self.root / name).is_symlink():
            raise self._linked(name)

    def _path(self, name: str) -> Path:
        path = self.root / check_name(name, self.url)
        if path.parent != self.root and path.parent.is_symlink():
            raise self._linked(name)
        return path

    def open_file(self, name: str) -> int:
        """A descriptor to read an object from; FileNotFoundError if there is none."""
        with self.explained("open", name):
            return self._open(name)

    def _open(self, name: str) -> int:
        # O_NONBLOCK: a pipe under the name must be refused, not waited for
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(self._path(name), flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise self._linked(name) from None
            raise
        try:
            _check_is_file(os.fstat(descriptor).st_mode)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _linked(self, name: str) -> LogDamaged:
        return LogDamaged(
            f"{name} is a symbolic link",
            where=self.url,
            why="a dataset holds its own files; a link could lead anywhere",
            do="replace the link by the file",
        )

    @contextlib.contextmanager
    def _temporary(self, name: str) -> Iterator[tuple[int, Path]]:
        folder = self._path(name).parent
        if folder not in self._folders:
            _make_folder(folder)
            self._folders.add(folder)
        temporary = folder / f".tmp-{self.epoch}-{secrets.token_hex(8)}"
        descriptor = create(temporary, 0o644)
        try:
            yield descriptor, temporary
        finally:
            # Best effort on both: the object is durable by now, or an error is on its way up.
            with contextlib.suppress(OSError):
                os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def _publish(self, descriptor: int, temporary: Path, target: Path) -> None:
        os.fsync(descriptor)
        try:
            _name_once(temporary, target)
        except FileExistsError:
            raise AlreadyThere(target.name) from None
        _sync_folder(target.parent)

    def _adopt(self, name: str, sha256: str) -> bool:
        """Take over an object that an earlier writer stored and did not live to commit."""
        descriptor = self._open(name)
        try:
            found = hashlib.sha256()
            while block := os.read(descriptor, _READ_BYTES):
                found.update(block)
            if found.hexdigest() != sha256:
                return False
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _sync_folder(self._path(name).parent)
        return True

    @contextlib.contextmanager
    def explained(self, doing: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and doing in ("read", "open"):
                raise
            raise StoreFailed(
                f"could not {doing} {name or self.url}",
                where=str(self.root / name),
                why=f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror or error}",
                do=_CURES.get(error.errno or 0, "look at the disk")
                + "; then run the same command again: nothing committed is lost",
            ) from error


_CURES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space or raise the quota",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "check who may read and write there",
    errno.EROFS: "the file system is read-only: use another directory",
    errno.ENOENT: "the directory was removed, or a newer writer has taken the dataset over",
    errno.ENOTDIR: "a file stands where a directory is needed: use another path",
    errno.EISDIR: "remove what stands there, if it is not needed",
    errno.EPERM: "the file system must have hard links, or a rename that replaces nothing: use "
    "another directory",
}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}
_AT_CWD = -100
_RENAME_NOREPLACE = 1


def _name_once(source: Path, target: Path) -> None:
    """Let a whole file appear under a name that is free; FileExistsError if it is taken.

    The old name may stay or not.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if (code := _rename_once(source, target)) in (errno.EINVAL, errno.ENOSYS):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None  # it has neither
        if code:
            raise OSError(code, os.strerror(code)) from None


def _rename_once(source: Path, target: Path) -> int:
    """Rename a file unless the new name is taken; 0, or the number of the error."""
    import ctypes  # 80 ms, for the few who need it

    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # glibc has it since 2.28
        return errno.ENOSYS
    paths = os.fsencode(source), os.fsencode(target)
    done = rename(_AT_CWD, paths[0], _AT_CWD, paths[1], ctypes.c_uint(_RENAME_NOREPLACE))
    return ctypes.get_errno() if done else 0


def _check_is_file(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, "it is not a file")


def _make_folder(folder: Path) -> None:
    """Make a directory and its parents, durably.

    One that is there may be the work of a writer that was killed before it could sync it.
    """
    if not folder.is_dir():
        _make_folder(folder.parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file") from None
    with contextlib.suppress(PermissionError):  # then it was not made by one of us
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
