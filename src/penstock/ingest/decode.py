"""Bytes to text: list and read files and objects, and decode a document by a stated rule.

In:    a directory, a path or an address in a bucket; the raw bytes of one document
Out:   names, ranges of bytes; UTF-8, and the number in DECODINGS of how it came about
Keeps: every raw byte has its place in the text: `raw_offsets` maps chunks back, and they tile
Never: drops, replaces or guesses a byte

The rule: a byte order mark decides (UTF-8, UTF-16, UTF-32), and stays in the text as U+FEFF; what
is valid UTF-8 is UTF-8; what else holds a NUL is binary and refused; what remains is Latin-1, each
byte one character, or refused if the config says "reject".
"""

import contextlib
import errno
import fnmatch
import functools
import io
import os
import re
import stat
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from penstock.errors import (
    BadConfig,
    BadInput,
    InputDamaged,
    InputMissing,
    PenstockError,
    StoreFailed,
)
from penstock.ingest.files import COMPRESSED, DONE_SUFFIX, ByteReader, FileRanges, inflate
from penstock.records import DECODINGS, LANGUAGES, Int64s

UTF_8, UTF_8_SIG, UTF_16, UTF_32, LATIN_1 = map(
    DECODINGS.index, ("utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1")
)

RULES: Final = ("latin-1", "reject")
_HEADER_BYTES: Final = 1 << 20
SHARDS: Final = frozenset({".jsonl", ".ndjson", ".parquet"})

_MARKS: Final = (
    (b"\xef\xbb\xbf", UTF_8_SIG, "utf-8"),
    (b"\xff\xfe\0\0", UTF_32, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (b"\0\0\xfe\xff", UTF_32, "utf-32-be"),
    (b"\xff\xfe", UTF_16, "utf-16-le"),
    (b"\xfe\xff", UTF_16, "utf-16-be"),
)


class NotText(Exception):
    """These bytes are no document. Not an error: it is counted as a refusal."""

    def __init__(self, reason: str, at: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at
        """The byte at which the fault was found."""


def decode_document(raw: bytes | memoryview, rule: str = "latin-1") -> tuple[bytes, int]:
    r"""One document as UTF-8, and how its bytes became that.

    >>> decode_document("größer".encode("latin-1"))
    (b'gr\xc3\xb6\xc3\x9fer', 4)
    >>> decode_document("größer".encode("utf-16"))[0].decode()
    '\ufeffgrößer'
    """
    raw = bytes(raw)  # no copy of what is bytes already
    if not raw:
        raise NotText("empty_text")
    decoding = UTF_8
    text = raw
    if not raw.isascii():
        for mark, number, codec in _MARKS:
            if raw.startswith(mark):
                try:
                    text, decoding = raw.decode(codec).encode(), number
                    break
                except UnicodeDecodeError:
                    continue
        else:
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                if (nul := raw.find(0)) >= 0:
                    raise NotText("binary", nul) from None
                if rule == "reject":
                    raise NotText("invalid_utf8", error.start) from None
                text, decoding = raw.decode("latin-1").encode(), LATIN_1
    if (nul := text.find(0)) >= 0:
        raise NotText("binary", nul)
    return text, decoding


def raw_offsets(text: bytes | memoryview, decoding: int, positions: Int64s) -> Int64s:
    r"""Where positions in the text stand in the bytes that it was decoded from.

    Positions are byte offsets in the UTF-8 text, each at the beginning of a character or the end.

    >>> raw_offsets("größer".encode(), LATIN_1, np.array([0, 2, 4, 6, 8])).tolist()
    [0, 2, 3, 4, 6]
    """
    if decoding in (UTF_8, UTF_8_SIG):
        return positions.astype(np.int64)
    data = np.frombuffer(text, np.uint8)
    width = {UTF_16: 2, UTF_32: 4, LATIN_1: 1}[decoding]
    places, where = np.unique(np.append(positions, 0), return_inverse=True)
    before = np.zeros(len(places), np.int64)
    begin = 0
    for k in range(1, len(places)):
        piece = data[begin : places[k]]
        units = np.count_nonzero((piece & 0xC0) != 0x80)
        if decoding == UTF_16:
            units += np.count_nonzero(piece >= 0xF0)  # a surrogate pair
        before[k] = before[k - 1] + width * int(units)
        begin = int(places[k])
    return before[where[:-1]]


class Ranges(Protocol):
    """A complete file, object or buffer, read anywhere."""

    name: str
    size: int

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
        with bucket_explained(url):
            self.size = int(obstore.head(self._bucket, self._key)["size"])

    def read_into(self, at: int, buffer: memoryview) -> int:
        import obstore

        end = min(self.size, at + len(buffer))
        if at >= end:
            return 0
        with bucket_explained(self.name):
            found = memoryview(obstore.get_range(self._bucket, self._key, start=at, end=end))
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
    from obstore.store import from_url  # 20 ms: only those who name a bucket pay for it

    try:
        return from_url(root)
    except Exception as error:  # obstore, its URL parser and each cloud raise their own
        raise BadConfig(
            f"{root} cannot be opened",
            why=str(error).splitlines()[0],
            do="check the address, the endpoint and the credentials in the environment",
        ) from error


@contextlib.contextmanager
def bucket_explained(url: str) -> Any:
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError:
        raise InputMissing(
            f"{url.rpartition('/')[2]} is not there", where=url, do="check the address"
        ) from None
    except BaseError as error:
        raise StoreFailed(
            f"could not read {url.rpartition('/')[2] or url}",
            where=url,
            why=str(error).splitlines()[0],
            do="check the address, the endpoint and the credentials in the environment",
        ) from error


def list_objects(url: str, prefix: str) -> Iterator[tuple[str, int]]:
    """Objects under a prefix: key and bytes."""
    import obstore

    bucket, _ = open_bucket(url)
    with bucket_explained(url):
        for chunk in obstore.list(bucket, prefix or None):
            for meta in chunk:
                yield meta["path"], int(meta["size"])


def walk_folder(root: str) -> Iterator[tuple[str, int, str]]:
    """The files of a tree as (relative path, bytes, what is wrong), by their paths' bytes.

    Hidden names are left out. Links to directories are not followed: they could lead round in
    circles. A directory whose name or list cannot be read is told like a file.
    """
    open_folders: list[Iterator[tuple[os.DirEntry[str] | None, str, bool]]]
    open_folders = [iter([(None, "", True)])]
    while open_folders:
        for entry, relative, is_folder in open_folders[-1]:
            if entry is not None and not is_printable(entry.name):
                yield relative, 0, "bad_name"
            elif is_folder:
                try:
                    open_folders.append(_list_folder(root, relative))
                except OSError as error:
                    yield relative, 0, f"unreadable {_errno(error)}"
                    continue
                break
            elif entry is not None:
                yield relative, *_look(root, entry)
        else:
            open_folders.pop()


def _list_folder(root: str, below: str) -> "Iterator[tuple[os.DirEntry[str] | None, str, bool]]":
    with os.scandir(f"{root}/{below}" if below else root) as listing:
        found = [
            (
                entry,
                f"{below}/{entry.name}" if below else entry.name,
                entry.is_dir(follow_symlinks=False),
            )
            for entry in listing
            if not entry.name.startswith(".")
        ]
    # "a.c" stands before "a/b": a directory sorts with its slash
    found.sort(key=lambda item: os.fsencode(item[0].name) + (b"/" if item[2] else b""))
    return iter(found)


def _errno(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, 'error')}: {error.strerror}"


def _look(root: str, entry: "os.DirEntry[str]") -> tuple[int, str]:
    """A file's bytes, and what is wrong with it."""
    try:
        status = entry.stat()
    except OSError as error:
        return 0, f"not_a_file {_errno(error)}"
    if not stat.S_ISREG(status.st_mode):
        return 0, "not_a_file it is a link to a directory, a pipe or a device"
    if entry.is_symlink():
        real, top = os.path.realpath(entry.path), os.path.realpath(root)
        if os.path.commonpath([real, top]) != top:
            return 0, "not_a_file it is a link that leads out of the directory"
    return status.st_size, ""


def expand_folder(name: str) -> list[str]:
    """A directory of shards is its files; any other is one input."""
    root = name.rstrip("/") or "/"
    shards: list[str] = []
    any_file = False
    for relative, _, flaw in walk_folder(root):
        any_file = True
        if is_aside(relative):
            continue
        if flaw or suffix_of(relative) not in SHARDS:
            return [root]
        shards.append(f"{root}/{relative}")
    if not any_file:
        raise BadInput(
            f"{os.path.basename(root)} has no files", where=name, do="name another directory"
        )
    return shards or [root]


def is_aside(relative: str) -> bool:
    """Whether a file beside shards is not one of them: a log, a marker."""
    return relative.endswith(DONE_SUFFIX) or any(
        part.startswith("_") for part in relative.split("/")
    )


def is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def glob(root: str, parts: list[str]) -> Iterator[str]:
    """What matches below `root`. `**` does not follow links: they could lead round in circles."""
    head, rest = parts[0], parts[1:]
    try:
        entries = list(os.scandir(root or "."))
    except OSError:
        return
    if head == "**":
        yield from glob(root, rest or ["*"])
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from glob(f"{root}{entry.name}/", parts)
        return
    for entry in entries:
        hidden = entry.name.startswith(".") and not head.startswith(".")
        if hidden or not fnmatch.fnmatchcase(entry.name, head):
            continue
        if not rest:
            yield root + entry.name
        elif entry.is_dir():
            yield from glob(f"{root}{entry.name}/", rest)


def suffix_of(name: str) -> str:
    """What a file's name ends in, in small letters, whatever compressed it.

    >>> suffix_of("src/main.CPP.gz"), suffix_of("Makefile")
    ('.cpp', '')
    """
    stem, suffix = os.path.splitext(name)
    return (os.path.splitext(stem)[1] if suffix in COMPRESSED else suffix).lower()


def is_printable(name: str) -> bool:
    """Whether a name can be written into the log: it is UTF-8, without control characters."""
    return name.isprintable() or all(unicodedata.category(c) not in ("Cc", "Cs") for c in name)


def shown(name: str) -> str:
    """A name that cannot be printed, for people."""
    return name if is_printable(name) else name.encode("unicode_escape").decode()


_LANGUAGE_SUFFIXES: Final = {
    "text": ".txt .text .rst .tex .log",
    "markdown": ".md .markdown .mdx",
    "c": ".c",
    "cpp": ".h .hh .hpp .hxx .h++ .cc .cpp .cxx .c++ .inl .ipp .tpp .txx .ixx .cppm .cu .cuh",
    "python": ".py .pyi .pyw",
    "java": ".java",
    "go": ".go",
    "rust": ".rs",
    "javascript": ".js .jsx .mjs .cjs",
    "typescript": ".ts .mts .cts",
    "tsx": ".tsx",
}
_LANGUAGE: Final = {
    suffix: LANGUAGES.index(language)
    for language, suffixes in _LANGUAGE_SUFFIXES.items()
    for suffix in suffixes.split()
}
_OTHER: Final = LANGUAGES.index("other")


def language_of(name: str) -> int:
    """A file's language by its name, as a number in LANGUAGES; code of any other kind is "other".

    >>> LANGUAGES[language_of("a/b.cc")], LANGUAGES[language_of("Makefile")]
    ('cpp', 'other')
    """
    return _LANGUAGE.get(suffix_of(name), _OTHER)


@dataclass(frozen=True, slots=True)
class Member:
    """A member of an archive; `flaw` is the reason to refuse it, "blank" if it is not meant."""

    name: str
    size: int
    flaw: str
    header: int = 0
    at: int = 0
    """Where its header and its bytes begin, in a tar."""
    why: str = ""


def judge_member(name: str, suffixes: frozenset[str] | None) -> str:
    """Why a member cannot be a document, by its name.

    >>> judge_member("../../etc/passwd", None)
    'bad_name'
    """
    parts = re.split(r"[/\\]", name)
    if ".." in parts or not parts[0] or re.match(r"[A-Za-z]:", name) or not is_printable(name):
        return "bad_name"
    if any(part.startswith(".") and part != "." for part in parts):
        return "blank"
    return "blank" if suffixes is not None and suffix_of(name) not in suffixes else ""


_zips: dict[tuple[str, int, int], tuple[Ranges, zipfile.ZipFile]] = {}


def open_zip(name: str) -> zipfile.ZipFile:
    """A zip file or object. The last one stays open: its directory is read once for all pieces.

    With 15,000 members reading the directory takes 0.1 s, as long as reading 8 MB of them.
    """
    ranges = open_ranges(name)
    key = (name, ranges.size, 0 if is_url(name) else os.stat(name).st_mtime_ns)
    if key in _zips:
        ranges.close()
        return _zips[key][1]
    close_zips()
    try:
        archive = zipfile.ZipFile(io.BufferedReader(Stretch(ranges), 1 << 16))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        ranges.close()
        what = f"{os.path.basename(name)} is not a zip archive"
        raise InputDamaged(what, where=name, why=str(error), do="fetch it again") from error
    _zips[key] = (ranges, archive)
    return archive


def close_zips() -> None:
    while _zips:
        ranges, archive = _zips.popitem()[1]
        archive.close()
        ranges.close()


class _Headers:
    """The file of a tar, for tarfile: reads no header that claims to be as large as a bomb."""

    def __init__(self, file: io.RawIOBase) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        if count > _HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {count:,} bytes")
        return self._file.read(count) or b""


def walk_tar(
    file: io.RawIOBase, name: str, suffixes: frozenset[str] | None, at: int = 0
) -> Iterator[Member]:
    """The members of a tar from the header at byte `at` on; `file` need only seek forward."""
    tar = tarfile.TarFile(fileobj=io.BytesIO(bytes(2 * tarfile.BLOCKSIZE)))
    tar.fileobj = _Headers(file)  # type: ignore[assignment]
    tar.offset = at
    while True:
        at = tar.offset
        if file.seek(at) != at:
            raise tar_damaged(name, "it ends within a member", file.tell())
        try:
            info = tarfile.TarInfo.fromtarfile(tar)
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            return
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            if (file.read(tarfile.BLOCKSIZE) or b"").strip(b"\0"):
                raise tar_damaged(name, "more follows an empty block", at) from None
            return
        except PenstockError:
            raise
        except Exception as error:  # tarfile takes what it cannot read for the end: we do not
            raise tar_damaged(name, str(error) or type(error).__name__, at) from error
        flaw, why = judge_member(info.name, suffixes), ""
        if info.isdir():
            flaw = "blank"
        elif not info.isreg() and flaw != "blank":
            flaw, why = "not_a_file", "it is a link or a device"
        elif info.issparse() and not flaw:
            flaw, why = "unreadable", "it is sparse"
        size = info.size if info.isreg() and not info.issparse() else 0
        yield Member(info.name, size, flaw, info.offset, info.offset_data, why)


def tar_damaged(name: str, why: str, at: int) -> InputDamaged:
    return InputDamaged(
        f"{os.path.basename(name)} is damaged",
        where=f"{name}, byte {at:,} of the archive",
        why=why,
        do="fetch it again",
    )


def matches(path: list[str], parts: list[str]) -> bool:
    if not parts:
        return not path
    if parts[0] == "**":
        rest = parts[1:] or ["*"]
        return any(matches(path[k:], rest) for k in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], parts[0]) and matches(path[1:], parts[1:])


def walk_bucket(url: str) -> Iterator[tuple[str, int, str]]:
    key = open_bucket(url)[1]
    skip = len(key) + 1 if key else 0
    for path, size in sorted(list_objects(url, key), key=lambda found: found[0].encode()):
        relative = path[skip:]
        if not any(part.startswith(".") for part in relative.split("/")):
            yield relative, size, "" if is_printable(relative) else "bad_name"


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
