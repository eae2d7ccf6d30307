"""Open files and objects of buckets: forward with decompression, or any range of bytes.

In:    a path or an address in a bucket, the offset to begin at
Out:   bytes from there on, those of the text where it is compressed; ranges of bytes; a file that
       seeks forward; the objects under a prefix
Keeps: no more than it was asked for in memory
Never: inflates a file beyond MAX_RATIO, reads on in a file that was replaced
"""

import contextlib
import errno
import functools
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Protocol, TypeVar

import xxhash

from penstock.errors import (
    BadInput,
    InputDamaged,
    InputMissing,
    InputReplaced,
    PenstockError,
    StoreBusy,
    StoreFailed,
)
from penstock.options import nearest
from penstock.store.bucket import Retries, first_line, open_client

_PROOF_BYTES = 1 << 16
_TAIL_BYTES = 256

MAX_RATIO: Final = 1000
"""A compressed input may not inflate beyond this, once it has given RATIO_GRACE_BYTES."""

RATIO_GRACE_BYTES: Final = 256 << 20

_XZ_BYTES: Final = 256 << 20
"""What reading an .xz may take: `xz -9` takes 65 MB, a header can ask for 4 GB."""

_GUESS_BYTES: Final = 1 << 20
"""Text that is looked at to guess how long all of it is."""

T = TypeVar("T")


class ByteReader(Protocol):
    """Where the bytes of one input come from."""

    def read_into(self, buffer: memoryview) -> int: ...
    def still_there(self) -> None: ...
    def size(self) -> int | None: ...
    def close(self) -> None: ...


class PlainBytes:
    """A file read at its offset, bound to its inode and to hashes of what was read."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._descriptor = open_regular(path)
        self._at = offset
        self._tail = b""  # the last bytes read, to tell a file that was rewritten in place
        self._head = ""  # hash of the first bytes, once there are enough of them
        try:
            self._check_size()
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview) -> int:
        with explained(self._path):
            got = os.preadv(self._descriptor, [buffer], self._at)
        self._check_tail()
        self._at += got
        self._tail = (self._tail + bytes(buffer[max(0, got - _TAIL_BYTES) : got]))[-_TAIL_BYTES:]
        return got

    def read_range(self, start: int, stop: int) -> bytes:
        """What stands there now, as far as the file goes."""
        with explained(self._path):
            return os.pread(self._descriptor, stop - start, start)

    def pass_over(self, to: int) -> None:
        """Take what lies before `to` as read, by whoever reads it."""
        self._check_tail()
        self._at, self._tail = to, self.read_range(max(0, to - _TAIL_BYTES), to)

    def prove(self, to: int) -> dict[str, str | int]:
        head = self._hash(0, min(to, _PROOF_BYTES))
        if self._head and head != self._head:
            raise replaced(self._path, "its first bytes were rewritten")
        if to >= _PROOF_BYTES:
            self._head = head
        return {"head": head, "tail": self._hash(max(0, to - _PROOF_BYTES), to)}

    def still_there(self) -> None:
        with explained(self._path):
            named, held = os.stat(self._path), os.fstat(self._descriptor)
        if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise replaced(self._path, "another file stands under its name now")
        self._check_size()
        self._check_tail()

    def size(self) -> int:
        with explained(self._path):
            return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was only read
            os.close(self._descriptor)

    def _check_size(self) -> None:
        with explained(self._path):
            size = os.fstat(self._descriptor).st_size
        if size < self._at:
            raise replaced(
                self._path, f"it has {size:,} bytes, and {self._at:,} were read from it before"
            )

    def _check_tail(self) -> None:
        if self.read_range(self._at - len(self._tail), self._at) != self._tail:
            raise replaced(self._path, f"the bytes before {self._at:,} were rewritten")

    def _hash(self, start: int, stop: int) -> str:
        return xxhash.xxh3_64_hexdigest(self.read_range(start, stop))


class CompressedBytes:
    """A complete compressed file, decompressed on the fly with a bound on what it may become."""

    def __init__(
        self, path: Path, offset: int, hasher: Any, opened: "tuple[IO[bytes], str] | None" = None
    ) -> None:
        """`opened` is a file that is not behind `path`, and where it is."""
        self._path = path
        self._file, self._where = opened or (os.fdopen(open_regular(path), "rb"), str(path))
        self._compressed_bytes = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        self._reader = _READERS[path.suffix](self._file)
        self._at = 0
        try:
            if self._compressed_bytes == 0:
                raise InputDamaged(
                    f"{path.name} has no bytes at all",
                    where=self._where,
                    why="even an empty text takes some bytes when it is compressed",
                    do="fetch it again and run the same command",
                )
            self._skip(offset, hasher)
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview) -> int:
        got = 0
        try:
            with explained(self._path):
                # a decompressor hands out little at a time; the parser wants whole blocks
                while got < len(buffer) and (more := self._reader.readinto(buffer[got:])):
                    got += more
        except PenstockError:
            raise
        except Exception as error:  # each library has its own way to say that bytes are wrong
            raise InputDamaged(
                f"{self._path.name} ends early or is corrupt",
                where=f"{self._where}, after byte {self._at:,} of the text, "
                f"{self._file.tell():,} of {self._compressed_bytes:,} compressed bytes read",
                why=str(error) or type(error).__name__,
                do="fetch it again and run the same command: it goes on from the last commit",
            ) from error
        self._at += got
        if self._at > max(RATIO_GRACE_BYTES, MAX_RATIO * self._compressed_bytes):
            raise InputDamaged(
                f"{self._path.name} inflates beyond reason",
                where=f"{self._where}, {self._compressed_bytes:,} compressed bytes",
                why=f"more than {self._at:,} bytes so far, a ratio over {MAX_RATIO}",
                do="if this is really text, decompress it yourself and give the plain file",
            )
        return got

    def still_there(self) -> None:
        """A compressed input is complete: what is open is what is read."""

    def size(self) -> int | None:
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was only read
            self._reader.close()
            self._file.close()

    def _skip(self, offset: int, hasher: Any) -> None:
        scratch = memoryview(bytearray(1 << 20))
        while self._at < offset:
            got = self.read_into(scratch[: min(len(scratch), offset - self._at)])
            if got == 0:
                raise replaced(
                    self._path, f"it ends at {self._at:,}, and {offset:,} bytes were read before"
                )
            hasher.update(scratch[:got])


def _open_gzip(file: IO[bytes]) -> Any:
    from isal import igzip  # 956 MB per CPU-second, the standard gzip 333

    return igzip.IGzipFile(fileobj=file, mode="rb")


def _open_zstd(file: IO[bytes]) -> Any:
    import pyarrow as pa  # unlike zstandard's reader, it tells a frame that was cut

    return pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd")


def _open_bzip2(file: IO[bytes]) -> Any:
    import bz2

    return _Streams(file, bz2.BZ2Decompressor)


def _open_xz(file: IO[bytes]) -> Any:
    import lzma

    return _Streams(
        file, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_BYTES), padding=b"\0"
    )


class _Streams(io.RawIOBase):
    """Streams of bzip2 or xz, one after the other.

    The standard readers take a stream whose first bytes are damaged for the end of the file.
    """

    def __init__(
        self, file: IO[bytes], begin: Callable[[], Any], padding: bytes | None = None
    ) -> None:
        self._file = file
        self._begin = begin
        self._padding = padding
        self._stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            given = b""
            if self._stream.eof:
                given = self._stream.unused_data
                while not given.lstrip(self._padding) if self._padding else not given:
                    given = self._file.read(1 << 16)
                    if not given:
                        return 0
                given = given.lstrip(self._padding) if self._padding else given
                self._stream = self._begin()
            elif self._stream.needs_input:
                given = self._file.read(1 << 16)
                if not given:
                    raise EOFError("it ends within a stream")
            data: bytes = self._stream.decompress(given, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)


_READERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": _open_gzip,
    ".zst": _open_zstd,
    ".bz2": _open_bzip2,
    ".xz": _open_xz,
}
COMPRESSED: Final = frozenset(_READERS)


def open_bytes(path: Path, offset: int = 0) -> ByteReader:
    """The bytes of a file from an offset on; those of its text, if it is compressed."""
    if path.suffix in _READERS:
        return CompressedBytes(path, offset, xxhash.xxh3_64())
    return PlainBytes(path, offset)


def inflate(file: IO[bytes], where: str, suffix: str, offset: int = 0) -> ByteReader:
    """The text of a compressed file from an offset on, wherever it is."""
    path = Path(where.rpartition("/")[2]).with_suffix(suffix)  # a .tgz is a .gz
    return CompressedBytes(path, offset, xxhash.xxh3_64(), (file, where))


def open_regular(path: Path) -> int:
    """Open a file to read; a pipe or a device would keep us waiting for ever."""
    with explained(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    raise BadInput(
        f"{path.name} is not a regular file",
        where=str(path),
        why="a directory, a pipe or a device cannot be read again from an offset",
        do="write it to a file first; penstock follows a file that grows",
    )


def look_at(path: Path) -> os.stat_result | None:
    """What the file system says of an input, or None if it is not there."""
    with contextlib.suppress(InputMissing), explained(path):
        return os.stat(path)
    return None


def missing(path: Path) -> InputMissing:
    """The error for an input that is not there, with the nearest name that is."""
    do = "check the path"
    with contextlib.suppress(OSError):
        if near := nearest(path.name, os.listdir(path.parent)):
            do = f"did you mean {near}?"
    return InputMissing(f"{path.name} is not there", where=str(path), do=do)


def shrunk(path: Path, size: int, planned: int) -> InputReplaced:
    """The error for a file that lost its end while it was read."""
    return replaced(path, f"it ends at {size:,}, and had {planned:,} bytes at the start")


def replaced(path: Path, why: str) -> InputReplaced:
    return InputReplaced(
        f"{path.name} is not the file that was read before",
        where=str(path),
        why=why,
        do="bring the old file back, or write the new one into another dataset",
    )


@contextlib.contextmanager
def explained(path: Path) -> Any:
    try:
        yield
    except FileNotFoundError:
        raise missing(path) from None
    except OSError as error:
        if not error.errno:
            raise
        raise BadInput(
            f"could not read {path.name}",
            where=str(path),
            why=f"{errno.errorcode.get(error.errno, 'error')}: {error.strerror}",
            do="look at the disk, then run the same command again: nothing committed is lost",
        ) from error


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


class _Sips(Stretch):
    """A file that gives little at a time, however much is asked for."""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer).cast("B")[: 1 << 14])


class FileRanges:
    """A complete file, read anywhere."""

    _descriptor = -1

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._descriptor = open_regular(path)
        with explained(path):
            status = os.fstat(self._descriptor)
        self.size, self.version = status.st_size, str(status.st_mtime_ns)

    def read_into(self, at: int, buffer: memoryview) -> int:
        done = 0
        with explained(self._path):
            while done < len(buffer):
                got = os.preadv(self._descriptor, [buffer[done:]], at + done)
                if not got:
                    break
                done += got
        return done

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):  # it was only read
                os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()  # a thread that ends leaves the archive that it held open


class HeldBytes:
    """Bytes that are in memory; the first of them stands at `at`."""

    def __init__(self, name: str, data: bytes, at: int = 0) -> None:
        self.name = name
        self.size = at + len(data)
        self.version = ""
        self._data = memoryview(data)
        self._first = at

    def read_into(self, at: int, buffer: memoryview) -> int:
        found = self._data[at - self._first : at - self._first + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def close(self) -> None:
        pass


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
        with _explained_url(url):
            return call()

    return Retries(url).call(ask)


@contextlib.contextmanager
def _explained_url(url: str) -> Any:
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


def guess_text_bytes(ranges: Ranges, packed: str) -> int:
    """About how long the text of a compressed file is, by its beginning.

    It is exact where all of it is short, where a .gz has one stream, or where a .zst says it.
    """
    file, block = _Sips(ranges), memoryview(bytearray(1 << 16))
    found = before = at = 0
    with contextlib.closing(inflate(file, ranges.name, packed)) as reader:  # type: ignore[arg-type]
        # until it asks for more: then all that it was given is in what it gave
        while before < _GUESS_BYTES or file.tell() == at:
            before, at = found, file.tell()
            got = reader.read_into(block)
            found += got
            if not got:
                return found
    guess = before * ranges.size // at
    ends = memoryview(bytearray(22))
    ranges.read_into(0, ends[:18])
    ranges.read_into(ranges.size - 4, ends[18:22])
    told = 0
    if packed == ".gz":  # its length modulo 2^32
        told = int.from_bytes(ends[18:22], "little")
        told += round((guess - told) / 2**32) * 2**32
    elif packed == ".zst":
        told = _zstd_bytes(bytes(ends[:18]))
    # of several streams only the last one, or the first, says its length
    return told if guess // 2 < told < guess * 2 else guess


def _zstd_bytes(head: bytes) -> int:
    """How long the text of a frame is, by its header; 0 if it does not say it."""
    about = head[4]
    is_single, size = about & 0x20, (0, 2, 4, 8)[about >> 6]
    at = 5 + (0 if is_single else 1) + (0, 1, 2, 4)[about & 3]
    if size == 0:
        return head[at] if is_single else 0
    return int.from_bytes(head[at : at + size], "little") + (256 if size == 2 else 0)


def open_forward(ranges: Ranges, packed: str) -> io.RawIOBase:
    """A file to be read from its beginning on, decompressed if `packed` is such a suffix."""
    file = Stretch(ranges)
    if not packed:
        return file
    return Forward(inflate(io.BufferedReader(file, 1 << 20), ranges.name, packed))
