"""Keep named objects that are created once, in a directory.

In:    names relative to the dataset, bytes
Out:   the same bytes; `AlreadyThere` for a name that is taken
Keeps: an object is whole and durable when `create` or `put` returns, or it is not there;
       no object is ever overwritten
Never: follows a symlink or a name that leaves the dataset, decides anything from a listing
"""

import contextlib
import errno
import hashlib
import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from penstock.disk import create
from penstock.errors import LogDamaged, StoreFailed
from penstock.store.store import (
    SAFE_NAME,
    AlreadyThere,
    Stored,
    check_name,
    other_name,
    short_of,
    taken,
    taken_twice,
)

_TEMPORARY = re.compile(r"\.tmp-(\d+)-([0-9a-f]+)")
_READ_BYTES = 1 << 20
WRITE_BYTES = 32 << 10
"""For one call. Writes of 8 MB took 3.3 s of CPU per GB on a virtual machine, of 32 to 256 KB
0.3 to 0.4; probably large pages that the guest had given back to its host. A pull of 2 GB took
9.8 s of CPU with writes of 8 MB, 5.2 with these (medians of three, on a busy machine)."""


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


@dataclass(frozen=True, slots=True)
class Draft:
    """An object that is written and not published yet."""

    name: str
    descriptor: int
    temporary: Path
    _stack: contextlib.ExitStack

    def close(self) -> None:
        """Remove what has no name."""
        self._stack.close()


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
        self.tag = ""
        self._folders: set[Path] = set()
        if make:
            with self.explained("make the directory", ""):
                _make_folder(root)

    def create(self, name: str, data: bytes) -> None:
        with self.explained("write", name), self._temporary(name) as (descriptor, temporary):
            _write_all(descriptor, memoryview(data))
            self._publish(descriptor, temporary, self._path(name))

    def draft(self, name: str, parts: Iterable[memoryview]) -> "Draft":
        """Write an object, one part after the other; it has no name until it is published."""
        with self.explained("write", name), contextlib.ExitStack() as stack:
            descriptor, temporary = stack.enter_context(self._temporary(name))
            for part in parts:
                _write_all(descriptor, part)
            return Draft(name, descriptor, temporary, stack.pop_all())

    def publish(self, drafts: Sequence["Draft"], *, synced: bool = True) -> list[str]:
        """Make drafts durable; their names appear in order. Says which names were taken.

        The folder is synced once for all of them: that is most of what a small object costs. What
        is not `synced` is whole when its name appears, and a power cut may take or damage it.
        """
        taken = []
        names = ", ".join(draft.name for draft in drafts)
        with self.explained("write", names), contextlib.ExitStack() as stack:
            for draft in drafts:
                stack.callback(draft.close)
            if synced:
                for draft in drafts:
                    os.fsync(draft.descriptor)
            for draft in drafts:
                try:
                    _name_once(draft.temporary, self._path(draft.name))
                except FileExistsError:
                    taken.append(draft.name)
            if synced:
                for folder in {self._path(draft.name).parent for draft in drafts}:
                    _sync_folder(folder)
        return taken

    def sync(self, names: Iterable[str]) -> None:
        """Make objects of the root durable that were published without it; those that are removed
        meanwhile are left out."""
        for name in names:
            try:
                descriptor = self.open_file(name)
            except FileNotFoundError:
                continue
            try:
                with self.explained("write", name):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        with self.explained("settle", ""):
            _sync_folder(self.root)

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
        raise taken_twice(name, self.url)

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
            for folder in self._folders_within():
                self._clear(folder, lambda name: int(name[1]) < self.epoch)
                _sync_folder(folder)

    def clear_tagged(self) -> None:
        if not self.tag:
            return
        with self.explained("settle", ""):
            for folder in self._folders_within():
                self._clear(
                    folder,
                    lambda name: int(name[1]) == self.epoch and name[2].startswith(self.tag),
                )

    def _folders_within(self) -> list[Path]:
        return [self.root] + [
            self.root / entry.name
            for entry in os.scandir(self.root)
            if entry.name.startswith("_") and entry.is_dir(follow_symlinks=False)
        ]

    def _clear(self, folder: Path, goes: Callable[[re.Match[str]], bool]) -> None:
        """Remove the temporary files of a folder of which that holds."""
        for entry in list(os.scandir(folder)):
            litter = _TEMPORARY.fullmatch(entry.name)
            if litter and goes(litter):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)

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
                if entry.is_file(follow_symlinks=False) and SAFE_NAME.fullmatch(name)
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

    def link(self, path: Path, name: str, sha256: str) -> Stored | None:
        """Give a durable file of another dataset a name here too; its bytes have that hash.

        None where the file system cannot: then they have to be copied.
        """
        with self.explained("write", name):
            size, shadowed = path.lstat().st_size, None
            for candidate in (name, other_name(name, sha256)):
                target = self._path(candidate)
                try:
                    os.link(path, target, follow_symlinks=False)
                except FileExistsError:
                    if not self._adopt(candidate, sha256):
                        shadowed = name
                        continue
                except OSError as error:
                    if error.errno not in (*_NO_LINKS, errno.EXDEV, errno.EMLINK):
                        raise
                    return None
                _sync_folder(target.parent)
                return Stored(candidate, sha256, size, shadowed)
        raise taken(name, self.url)

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
        temporary = folder / f".tmp-{self.epoch}-{self.tag}{secrets.token_hex(8)}"
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
