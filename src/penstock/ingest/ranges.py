"""Read files and objects of buckets: any range of bytes, or forward with decompression.

In:    a path, or an address in a bucket
Out:   ranges of bytes; a file that seeks forward; the objects under a prefix
Never: holds more than it was asked for
"""

import contextlib
import functools
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.errors import BadInput, InputMissing, StoreBusy, StoreFailed
from penstock.ingest.files import ByteReader, FileRanges, inflate
from penstock.store.bucket import Retries, first_line, open_client

T = TypeVar("T")


class Ranges(Protocol):
    """A complete file, object or buffer, read anywhere."""

    name: str
    size: int
    version: str
    """Tells that it was changed without reading it: when it was, or an object's ETag."""

    def read_into(self, at: int, buffer: memoryview) -> int:
        """Fill the buffer from `at` on, as far as the bytes go."""

    def close(self) -> None: ...


class Stretch(io.RawIOBase):
    """The bytes start:end of `ranges` as a file; also what `LineFile` reads from."""

    def __init__(self, ranges: Ranges, start: int = 0, end: int | None = None) -> None:
        self._ranges = ranges
        self._at = start
        self._end = ranges.size if end is None else end

    def read_into(self, buffer: memoryview) -> int:
        got = self._ranges.read_into(self._at, buffer[: max(0, self._end - self._at)])
        self._at += got
        return got

    def readinto(self, buffer: Any) -> int:
        return self.read_into(memoryview(buffer).cast("B"))

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._end)[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def still_there(self) -> None:
        """What is read is complete."""

    def size(self) -> int | None:
        return self._end


class _ObjectRanges:
    def __init__(self, url: str) -> None:
        import obstore

        self.name = url
        self._bucket, self._key = open_bucket(url)
        about = ask_bucket(url, lambda: obstore.head(self._bucket, self._key))
        self.size, self.version = int(about["size"]), _version(about)

    def read_into(self, at: int, buffer: memoryview) -> int:
        import obstore

        end = min(self.size, at + len(buffer))
        if at >= end:
            return 0
        found = ask_bucket(
            self.name,
            lambda: memoryview(obstore.get_range(self._bucket, self._key, start=at, end=end)),
        )
        buffer[: len(found)] = found.cast("B")
        return len(found)

    def close(self) -> None:
        pass


def open_ranges(name: str) -> Ranges:
    """A file, or an object of a bucket."""
    return _ObjectRanges(name) if is_url(name) else FileRanges(Path(name))


def is_url(name: str) -> bool:
    return name.startswith(("s3://", "gs://", "az://"))


def open_bucket(url: str) -> tuple[Any, str]:
    """The bucket of an address, and what stands after it."""
    scheme, _, rest = url.partition("://")
    bucket, _, key = rest.partition("/")
    return _bucket(f"{scheme}://{bucket}"), key


@functools.lru_cache(maxsize=8)
def _bucket(root: str) -> Any:
    return open_client(root)


def ask_bucket(url: str, call: Callable[[], T]) -> T:
    """What a request gives; one that fails for now is repeated."""

    def ask() -> T:
        with _explained(url):
            return call()

    return Retries(url).call(ask)


@contextlib.contextmanager
def _explained(url: str) -> Any:
    from obstore.exceptions import BaseError, GenericError, InvalidPathError

    try:
        yield
    except FileNotFoundError:
        raise InputMissing(
            f"{url.rpartition('/')[2]} is not there", where=url, do="check the address"
        ) from None
    except InvalidPathError as error:
        raise BadInput(
            f"{url} has an object that cannot be read",
            where=url,
            why=first_line(error),
            do="rename it: a key may not begin with a slash, nor have two in a row",
        ) from None
    except BaseError as error:
        raise (StoreBusy if isinstance(error, GenericError) else StoreFailed)(
            f"could not read {url.rpartition('/')[2] or url}",
            where=url,
            why=first_line(error),
            do="check the address, the endpoint and the credentials in the environment",
        ) from None  # obstore's own text may hold a password


def _version(about: Any) -> str:
    return str(about["e_tag"] or about["last_modified"])


def list_objects(url: str, prefix: str) -> list[tuple[str, int, str]]:
    """Objects under a prefix by their keys' bytes: key, bytes, and what tells a version of it.

    Consoles and tools leave markers of folders: objects of no bytes whose keys end in a slash.
    obstore tells `a/b/` as `a/b`, which is missing for whoever reads it.
    """
    import obstore

    bucket, _ = open_bucket(url)
    found = ask_bucket(
        url,
        lambda: [
            (str(meta["path"]), int(meta["size"]), _version(meta))
            for chunk in obstore.list(bucket, prefix or None)
            for meta in chunk
        ],
    )
    return sorted(found, key=lambda one: one[0].encode())


def is_object(url: str) -> bool:
    """Whether an object, and not a folder of them, is at the address."""
    try:
        return open_ranges(url).size >= 0
    except InputMissing:
        return False


class Forward(io.RawIOBase):
    """The text of a compressed file, as a file that seeks forward only."""

    def __init__(self, reader: ByteReader) -> None:
        self._reader = reader
        self._block = memoryview(bytearray(1 << 20))
        self._ready = self._block[:0]
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            if not self._ready:
                self._ready = self._block[: self._reader.read_into(self._block)]
            if not self._ready:
                break
            count = min(len(view) - done, len(self._ready))
            view[done : done + count] = self._ready[:count]
            self._ready = self._ready[count:]
            done += count
        self._at += done
        return done

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Read on to `offset`; the answer is less where the text ends before it."""
        assert whence == os.SEEK_SET
        scratch = memoryview(bytearray(min(1 << 20, max(0, offset - self._at))))
        while self._at < offset and self.readinto(scratch[: offset - self._at]):
            pass
        return self._at


def open_forward(ranges: Ranges, packed: str) -> io.RawIOBase:
    """A file to be read from its beginning on, decompressed if `packed` is such a suffix."""
    file = Stretch(ranges)
    if not packed:
        return file
    return Forward(inflate(io.BufferedReader(file, 1 << 20), ranges.name, packed))
