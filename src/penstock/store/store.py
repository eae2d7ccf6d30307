"""What a store is: named objects that are created once, in a directory or in a bucket.

In:    names relative to the dataset, bytes
Out:   the same bytes; `AlreadyThere` for a name that is taken
Keeps: an object is whole and durable when `create` or `put` returns, or it is not there;
       no object is ever overwritten
Never: follows a symlink or a name that leaves the dataset, decides anything from a listing

Both stores answer the same calls, so that the log and the writer do not know which they have.
"""

import errno
import os
import re
import stat
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from penstock.errors import BadConfig, LogDamaged, ShardMismatch, StoreFailed
from penstock.options import checked_path

SAFE_NAME = re.compile(r"(?:_[a-z]+/)?[A-Za-z0-9_][A-Za-z0-9._-]*")
_HALF_URL = re.compile("(s3|gs|az|file|redis|rediss):/")


class AlreadyThere(Exception):
    """The name is taken. Not an error yet: it may be taken by us."""


class Unsure(Exception):
    """The store did not say whether the object was created."""


@dataclass(frozen=True, slots=True)
class Stored:
    """What `put` left in the store."""

    name: str
    sha256: str
    size: int
    shadowed: str | None = None
    """A name that an earlier writer left other bytes under; garbage once we have committed."""


class Store(Protocol):
    """Where a dataset lives."""

    url: str
    epoch: int
    """The writer's epoch; temporary files carry it."""
    tag: str
    """Hex digits that temporary files of a writer and of its workers carry."""

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
        """Delete what no log refers to; fine if it is not there."""

    def settle(self) -> None:
        """Called once this writer owns the dataset: make inherited names durable, clear litter."""

    def clear_tagged(self) -> None:
        """Remove what workers of this writer left half-written; none of them writes any more."""


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
    text = dataset_path(url)
    scheme, separator, _ = text.partition("://")
    if not separator and _HALF_URL.match(text):
        raise BadConfig(
            f"{text} has one slash after its colon", do="write two for an address, ./ for a path"
        )
    if not separator or scheme == "file":
        from penstock.store.local import LocalStore

        return LocalStore(Path(local_path(text) if separator else text), make=make)
    if scheme in ("s3", "gs", "az"):
        from penstock.store.bucket import BucketStore

        return BucketStore(text, probe=make, tries_again=tries_again, patience_s=patience_s)
    raise BadConfig(
        f"{scheme}:// is not a store penstock knows",
        where=text,
        do="use a directory, s3://, gs:// or az://",
    )


def dataset_path(url: str | os.PathLike[str]) -> str:
    """A path or an address at which a dataset may be, as text."""
    text = checked_path("the path", url)
    path = local_path(text)
    if "://" not in path and _is_file(path):
        folder = os.path.dirname(os.path.abspath(path))
        raise BadConfig(
            f"{os.path.basename(path)} is a file, not a directory",
            where=os.path.abspath(path),
            why="a dataset is a directory, or a prefix in a bucket, with a log in it",
            do=f"give {folder}, the dataset that the file is in"
            if os.path.isdir(os.path.join(folder, "_log"))
            else "give a directory: that of a dataset, or a new one to write to",
        )
    return text


def _is_file(path: str) -> bool:
    """Whether a file is there; a disk that fails is no answer."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
            raise StoreFailed(
                "could not look at the dataset's directory",
                where=path,
                why=f"{errno.errorcode[error.errno]}: {error.strerror}",
                do="fix that and run the same command again: nothing committed is lost",
            ) from None
        return False  # whoever opens it says what is wrong


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
    if not SAFE_NAME.fullmatch(name) or ".." in name:
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


def taken_twice(name: str, url: str) -> ShardMismatch:
    """The error for an object that has neither its name nor its other name."""
    return ShardMismatch(
        f"{name} is taken, and so is the name that carries its hash",
        where=url,
        do="penstock verify --full " + url,
    )


def other_name(name: str, sha256: str) -> str:
    """Where an object goes whose name is taken by other bytes.

    >>> other_name("shard_00000.parquet", "0a1b2c3d4e5f"), other_name("_dedup/000000", "0a1b2c3d4e")
    ('shard_00000-0a1b2c3d.parquet', '_dedup/000000-0a1b2c3d')
    """
    stem, suffix = os.path.splitext(name)
    return f"{stem}-{sha256[:8]}{suffix}"
