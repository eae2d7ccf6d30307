"""Read files as blocks of whole lines, also while they are still being written.

In:    a path (plain, .gz, .zst, .bz2, .xz), the offset to go on from
Out:   blocks that end in a newline; at the end, what stands after the last newline
Keeps: at most one block and one line of `max_line_bytes` in memory, whatever the file holds
Never: takes silence for the end, hands out half a line, reads on in a file that was replaced

Offsets count the bytes of the text: for a compressed file those after decompression.
"""

import contextlib
import errno
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Protocol

import xxhash

from penstock.disk import replacing
from penstock.errors import BadInput, InputDamaged, InputMissing, InputReplaced, PenstockError
from penstock.ingest.jsonl import LINE_TOO_LONG, Block, Reject
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.records import Bytes

BLOCK_BYTES: Final = 8 << 20
_PROOF_BYTES = 1 << 16
_NEWLINE = 0x0A
SAMPLE_BYTES: Final = 200
_TAIL_BYTES = 256

_next_index = Kernel("penstock.simd", "next_index", "int64(uint8[::1], int64, int64, int64)")
_last_index = Kernel("penstock.simd", "last_index", "int64(uint8[::1], int64, int64, int64)")

MAX_RATIO: Final = 1000
"""A compressed input may not inflate beyond this, once it has given RATIO_GRACE_BYTES."""

RATIO_GRACE_BYTES: Final = 256 << 20

_XZ_BYTES: Final = 256 << 20
"""What reading an .xz may take: `xz -9` takes 65 MB, a header can ask for 4 GB."""

DONE_SUFFIX: Final = ".done"


class ByteReader(Protocol):
    """Where the bytes of one input come from."""

    def read_into(self, buffer: memoryview) -> int: ...
    def still_there(self) -> None: ...
    def size(self) -> int | None: ...
    def close(self) -> None: ...


class LineFile:
    """One input, read in blocks of whole lines from an offset on."""

    def __init__(
        self,
        path: Path,
        *,
        offset: int = 0,
        proof: dict[str, str | int] | None = None,
        max_line_bytes: int,
        block_bytes: int = BLOCK_BYTES,
        reader: ByteReader | None = None,
    ) -> None:
        """`reader` gives the bytes from `offset` on, where they are not those behind `path`."""
        self.path = path
        self.is_compressed = reader is None and path.suffix in _READERS
        self._max_line_bytes = max_line_bytes
        self._block_bytes = block_bytes
        self._hash = xxhash.xxh3_64()  # of a compressed input's text, up to `_hashed`
        self._hashed = offset
        self._bytes: ByteReader
        if reader is not None:
            self._bytes = reader
        elif self.is_compressed:
            self._bytes = _CompressedBytes(path, offset, self._hash)
        else:
            self._bytes = _PlainBytes(path, offset)
        self._buffer: Bytes = byte_buffer(block_bytes)
        self._base = offset  # where buffer[0] stands in the input
        self._taken = 0  # buffer[:taken] has been handed out
        self._have = 0  # buffer[:have] is filled
        self._skip_from = -1  # where a line began that is too long to keep
        self._heads: dict[int, bytes] = {}  # the first bytes of such lines, for `sample`
        if proof and self.prove(offset) != proof:
            self.close()
            raise _replaced(path, f"the bytes before {offset:,} are not those that were read")

    def next_block(self) -> Block | None:
        """The next whole lines, or None when there is nothing new at the moment."""
        self._drop_taken()
        too_long: list[Reject] = []
        searched = 0
        while True:
            if self._have + PAD >= len(self._buffer):
                self._grow()
            room = self._buffer.data[self._have : len(self._buffer) - PAD]
            got = self._bytes.read_into(room[: self._block_bytes])
            if got == 0:
                return Block(self._buffer, 0, 0, self._base, too_long) if too_long else None
            self._have += got
            start = 0
            if self._skip_from >= 0:
                start = _next_index(self._buffer, 0, self._have, _NEWLINE)
                if start == self._have:
                    self._discard()
                    return Block(self._buffer, 0, 0, self._base, too_long)
                self._keep_head(start)
                start += 1
                too_long.append(self._too_long(self._base + start))
            last = _last_index(self._buffer, max(start, searched), self._have, _NEWLINE)
            if last >= 0:
                self._taken = last + 1
                return Block(self._buffer, start, last + 1, self._base, too_long)
            if start:
                self._taken = start
                self._drop_taken()
            if self._have > self._max_line_bytes:
                self._skip_from = self._base
                self._discard()
            searched = self._have

    def fragment(self) -> Block | None:
        """What stands after the last newline, once the input is known to have ended."""
        self._drop_taken()
        if self._skip_from >= 0:
            return Block(self._buffer, 0, 0, self._base, [self._too_long(self._base)])
        if self._have == 0:
            return None
        self._buffer[self._have] = _NEWLINE
        self._taken = self._have
        return Block(self._buffer, 0, self._have + 1, self._base, is_fragment=True)

    def sample(self, reject: Reject, limit: int = SAMPLE_BYTES) -> str:
        """The first bytes of a rejected line, for people; what is not UTF-8 is escaped."""
        start = reject.start - self._base
        if reject.start in self._heads:
            raw = self._heads.pop(reject.start)[:limit]
        else:
            raw = bytes(self._buffer[start : min(start + limit, reject.end - self._base)])
        return raw.rstrip(b"\n").decode("utf-8", "backslashreplace")

    def prove(self, to: int) -> dict[str, str | int]:
        """What shows later that the bytes before `to` are still the same.

        A plain file is asked for its first and last bytes before `to`, so that going on costs
        nothing; a compressed one is read from its start anyway, and answers for all of them.
        `to` lies in the block handed out last.
        """
        if isinstance(self._bytes, _PlainBytes):
            return self._bytes.prove(to)
        self._hash_to(to)
        return {"text": self._hash.hexdigest()}

    @property
    def position(self) -> int:
        """How far it has been read, half lines included."""
        return self._base + self._have

    def still_there(self) -> None:
        """Raise InputReplaced if the path no longer leads to the file that is being read."""
        self._bytes.still_there()

    def size(self) -> int | None:
        """Its size now, where that can be known without reading it."""
        return self._bytes.size()

    def close(self) -> None:
        self._bytes.close()

    def _hash_to(self, to: int) -> None:
        if to > self._hashed:
            self._hash.update(self._buffer.data[self._hashed - self._base : to - self._base])
            self._hashed = to

    def _drop_taken(self) -> None:
        if self.is_compressed:
            self._hash_to(self._base + self._taken)
        rest = self._have - self._taken
        if self._taken:
            self._buffer[:rest] = self._buffer[self._taken : self._have].copy()
        self._base += self._taken
        self._have = rest
        self._taken = 0

    def _discard(self) -> None:
        self._keep_head(self._have)
        self._taken = self._have
        self._drop_taken()

    def _keep_head(self, stop: int) -> None:
        """Remember how a line that is too long began: its first bytes, however they came."""
        head = self._heads.get(self._skip_from, b"")
        self._heads[self._skip_from] = head + bytes(
            self._buffer[: min(stop, SAMPLE_BYTES - len(head))]
        )

    def _too_long(self, end: int) -> Reject:
        reject = Reject(LINE_TOO_LONG, self._skip_from, end, self._skip_from + self._max_line_bytes)
        self._skip_from = -1
        return reject

    def _grow(self) -> None:
        larger = byte_buffer(2 * len(self._buffer))
        larger[: self._have] = self._buffer[: self._have]
        self._buffer = larger


class _PlainBytes:
    """A file read at its offset, bound to its inode and to hashes of what was read."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._descriptor = _open_regular(path)
        self._at = offset
        self._tail = b""  # the last bytes read, to tell a file that was rewritten in place
        self._head = ""  # hash of the first bytes, once there are enough of them
        try:
            self._check_size()
        except BaseException:
            self.close()
            raise

    def read_into(self, buffer: memoryview) -> int:
        with _explained(self._path):
            got = os.preadv(self._descriptor, [buffer], self._at)
        self._check_tail()
        self._at += got
        self._tail = (self._tail + bytes(buffer[max(0, got - _TAIL_BYTES) : got]))[-_TAIL_BYTES:]
        return got

    def prove(self, to: int) -> dict[str, str | int]:
        head = self._hash(0, min(to, _PROOF_BYTES))
        if self._head and head != self._head:
            raise _replaced(self._path, "its first bytes were rewritten")
        if to >= _PROOF_BYTES:
            self._head = head
        return {"head": head, "tail": self._hash(max(0, to - _PROOF_BYTES), to)}

    def still_there(self) -> None:
        with _explained(self._path):
            named, held = os.stat(self._path), os.fstat(self._descriptor)
        if (named.st_dev, named.st_ino) != (held.st_dev, held.st_ino):
            raise _replaced(self._path, "another file stands under its name now")
        self._check_size()
        self._check_tail()

    def size(self) -> int | None:
        with _explained(self._path):
            return os.fstat(self._descriptor).st_size

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was only read
            os.close(self._descriptor)

    def _check_size(self) -> None:
        with _explained(self._path):
            size = os.fstat(self._descriptor).st_size
        if size < self._at:
            raise _replaced(
                self._path, f"it has {size:,} bytes, and {self._at:,} were read from it before"
            )

    def _check_tail(self) -> None:
        with _explained(self._path):
            found = os.pread(self._descriptor, len(self._tail), self._at - len(self._tail))
        if found != self._tail:
            raise _replaced(self._path, f"the bytes before {self._at:,} were rewritten")

    def _hash(self, start: int, stop: int) -> str:
        with _explained(self._path):
            data = os.pread(self._descriptor, stop - start, start)
        return xxhash.xxh3_64_hexdigest(data)


class _CompressedBytes:
    """A complete compressed file, decompressed on the fly with a bound on what it may become."""

    def __init__(
        self, path: Path, offset: int, hasher: Any, opened: "tuple[IO[bytes], str] | None" = None
    ) -> None:
        """`opened` is a file that is not behind `path`, and where it is."""
        self._path = path
        self._file, self._where = opened or (os.fdopen(_open_regular(path), "rb"), str(path))
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
            with _explained(self._path):
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
                raise _replaced(
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
        return _CompressedBytes(path, offset, xxhash.xxh3_64())
    return _PlainBytes(path, offset)


def inflate(file: IO[bytes], where: str, suffix: str, offset: int = 0) -> ByteReader:
    """The text of a compressed file from an offset on, wherever it is."""
    path = Path(where.rpartition("/")[2]).with_suffix(suffix)  # a .tgz is a .gz
    return _CompressedBytes(path, offset, xxhash.xxh3_64(), (file, where))


class FileRanges:
    """A complete file, read anywhere."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._descriptor = _open_regular(path)
        status = os.fstat(self._descriptor)
        self.size, self.version = status.st_size, str(status.st_mtime_ns)

    def read_into(self, at: int, buffer: memoryview) -> int:
        done = 0
        with _explained(self._path):
            while done < len(buffer):
                got = os.preadv(self._descriptor, [buffer[done:]], at + done)
                if not got:
                    break
                done += got
        return done

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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


def done_marker(path: Path) -> Path:
    """The marker that a producer leaves when `path` is complete.

    >>> done_marker(Path("data/chunked.jsonl")).name
    'chunked.jsonl.done'
    """
    return path.with_name(path.name + DONE_SUFFIX)


def mark_done(path: Path) -> None:
    """Say that `path` is complete: for producers, after their last write."""
    with replacing(done_marker(path)) as file:
        file.write(json.dumps({"bytes": path.stat().st_size}).encode() + b"\n")


def read_done(path: Path) -> int | None:
    """The bytes that the marker promises, -1 if it is empty, or None if there is no marker."""
    marker = done_marker(path)
    try:
        with os.fdopen(_open_regular(marker), "rb") as opened, _explained(marker):
            text = opened.read(1 << 16)
    except InputMissing:
        return None
    if not text.strip():
        return -1
    try:
        promised = int(json.loads(text)["bytes"])
        if promised < 0:
            raise ValueError
        return promised
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise BadInput(
            f"{marker.name} is not a marker penstock knows",
            where=str(marker),
            why=f"it holds {text[:40].decode('utf-8', 'backslashreplace')!r}",
            do='leave it empty, or write {"bytes": size of the file} into it',
        ) from None


def _open_regular(path: Path) -> int:
    """Open a file to read; a pipe or a device would keep us waiting for ever."""
    with _explained(path):
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
    with contextlib.suppress(InputMissing), _explained(path):
        return os.stat(path)
    return None


def missing(path: Path) -> InputMissing:
    """The error for an input that is not there, with the nearest name that is."""
    import difflib

    with contextlib.suppress(OSError):
        near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=1)
        if near:
            return InputMissing(
                f"{path.name} is not there", where=str(path), do=f"did you mean {near[0]}?"
            )
    return InputMissing(f"{path.name} is not there", where=str(path), do="check the path")


def shrunk(path: Path, size: int, planned: int) -> InputReplaced:
    """The error for a file that lost its end while it was read."""
    return _replaced(path, f"it ends at {size:,}, and had {planned:,} bytes at the start")


def _replaced(path: Path, why: str) -> InputReplaced:
    return InputReplaced(
        f"{path.name} is not the file that was read before",
        where=str(path),
        why=why,
        do="bring the old file back, or write the new one into another dataset",
    )


@contextlib.contextmanager
def _explained(path: Path) -> Any:
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
