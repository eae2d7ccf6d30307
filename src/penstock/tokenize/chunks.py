"""Share the files of a corpus out among workers, without cutting a pretoken.

In:    files or directories, special tokens, a pattern, how large a chunk may be
Out:   pieces: byte ranges of plain files, row groups of parquet, whole compressed files
Keeps: every byte in exactly one piece; a piece can be counted without knowing its neighbours
Never: reads more of a file than it takes to find the next place to cut
"""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.errors import BadConfig, BadInput, InputDamaged
from penstock.ingest.files import COMPRESSED, DONE_SUFFIX, look_at, missing, open_bytes
from penstock.kernels import PAD
from penstock.tokenize.patterns import GPT2, Pattern
from penstock.work.values import whole

LEAST_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """What one worker takes: bytes start:end of a file's text, or its row groups start:end."""

    path: Path
    kind: str
    start: int
    end: int | None
    size: int
    """Bytes on disk, for the progress."""
    is_last: bool = True
    """Whether the file ends with it."""


def chunk_boundaries(
    file_path: str | os.PathLike[str], chunk_bytes: int, split_token: str
) -> list[int]:
    """Where a plain file can be cut into chunks of about `chunk_bytes`, each at a split token."""
    path = Path(file_path)
    size = _size_of(path)
    at_least("chunk_bytes", chunk_bytes, 1)
    if not split_token or SpecialTokens([split_token]).split_token() is None:
        return [0, size]  # one that can overlap itself is only told from its text's beginning
    token = re.compile(re.escape(split_token.encode()))
    return _boundaries(path, size, chunk_bytes, [_Cut(token, len(split_token.encode()))])


def optimal_chunk_bytes(file_bytes: int, num_processes: int, max_memory_gb: float) -> int:
    """A file's share for each process, at most half of the memory, at least 1 MB.

    >>> optimal_chunk_bytes(10 << 30, 8, 2.0) == 1 << 30
    True
    """
    most = int(max_memory_gb * (1 << 30) / 2)
    return max(LEAST_CHUNK_BYTES, min(most, file_bytes // num_processes))


def list_files(paths: Sequence[Path]) -> list[Path]:
    """The files that are meant: a directory stands for the regular files in it, by name.

    Left out are names that begin with a dot or an underscore, and the markers that end in .done.
    """
    found: list[Path] = []
    for path in paths:
        status = look_at(path)
        if status is None:
            raise missing(path)
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(
            Path(folder, name)
            for folder in _folders(path)
            for name in os.listdir(folder)
            if _is_meant(name) and Path(folder, name).is_file()
        )
        if not inside:
            raise BadInput(
                f"{path.name} has no files", where=str(path), do="name another directory"
            )
        found += inside
    return found


def _folders(path: Path) -> Iterator[str]:
    for folder, inside, _ in os.walk(path):
        inside[:] = [name for name in inside if _is_meant(name)]
        yield folder


def _is_meant(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.endswith(DONE_SUFFIX)


class SpecialTokens:
    """Texts that are one token each: never cut, never counted into a pretoken."""

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise BadConfig("special_tokens is one text", do='give a list, e.g. ["<|endoftext|>"]')
        self.texts = list(dict.fromkeys(texts))
        if "" in self.texts:
            raise BadConfig("a special token is empty", do="leave it out")
        try:
            encoded = [text.encode() for text in self.texts]
        except UnicodeEncodeError as error:
            raise BadConfig("a special token is not UTF-8", why=str(error)) from None
        # of those that begin at one place the longest is meant, so it is asked for first
        self.order = sorted(range(len(encoded)), key=lambda k: -len(encoded[k]))
        self.sorted = [encoded[k] for k in self.order]
        self.at = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(text) for text in self.sorted], out=self.at[1:])
        self.bytes = np.frombuffer(b"".join(self.sorted) + bytes(PAD), np.uint8)
        firsts = {text[0] for text in self.sorted}
        self.first = np.zeros(258, np.uint8)
        self.first[list(firsts)] = 1
        only = firsts.pop() if len(firsts) == 1 else 256
        self.first[256:] = [only & 0xFF, only >> 8]

    def split_token(self) -> bytes | None:
        """The first one that always is itself wherever its bytes stand.

        Not one that another could have begun before: of "<<" a cut in "<<<" might hit the middle.
        """
        for text in self.texts:
            token = text.encode()
            if not any(
                token.startswith(other[k:]) or other[k:].startswith(token)
                for other in self.sorted
                for k in range(1, len(other))
            ):
                return token
        return None

    @property
    def has_newline(self) -> bool:
        return any(b"\n" in text or b"\r" in text for text in self.sorted)


def plan_pieces(
    path: Path,
    pattern: Pattern,
    specials: SpecialTokens,
    *,
    text_field: str,
    chunk_bytes: int | None,
    workers: int,
    max_bytes: int,
) -> list[Piece]:
    """How a file is shared out among the workers."""
    size = _size_of(path)
    compressed = path.suffix in COMPRESSED
    name = Path(path.name).with_suffix("") if compressed else Path(path.name)
    suffix = name.suffix.lower()
    if suffix == ".parquet":
        if compressed:
            raise BadInput(f"{path.name} is a compressed parquet file", do="decompress it first")
        _check_column(path, text_field)
        groups = open_parquet(path).num_row_groups
        return [Piece(path, "parquet", group, group + 1, size // groups) for group in range(groups)]
    kind = "jsonl" if suffix in (".jsonl", ".ndjson") else "text"
    if compressed:
        return [Piece(path, kind, 0, None, size)]
    cuts = [_Cut(re.compile(rb"(?<=\n)"), 1)] if kind == "jsonl" else _cuts(pattern, specials)
    chunk = chunk_bytes or optimal_chunk_bytes(size, workers, max_bytes / (1 << 30))
    at = _boundaries(path, size, chunk, cuts) if cuts else [0, size]
    return [
        Piece(path, kind, start, end, end - start, end == size)
        for start, end in itertools.pairwise(at)
    ]


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place at which a file may be cut; `overlap` bytes before it have a part in it."""

    pattern: "re.Pattern[bytes]"
    overlap: int


def _cuts(pattern: Pattern, specials: SpecialTokens) -> list[_Cut]:
    r"""Where text may be cut without changing a pretoken, the best kind first.

    At a split token. Or, for the patterns that have a scanner, between a newline and a letter or
    digit of ASCII: no alternative matches across that. Only gpt2 looks from the spaces before it
    at what follows them, so there the newline must be the only one.
    """
    cuts = []
    token = specials.split_token()
    if token is not None:
        cuts.append(_Cut(re.compile(re.escape(token)), len(token)))
    if pattern.is_scanned and not specials.has_newline:
        before = rb"[!-~]\n" if pattern.family == GPT2 else rb"[\r\n]"
        cuts.append(_Cut(re.compile(rb"(?<=" + before + rb")(?=[0-9A-Za-z])"), 3))
    return cuts


def _boundaries(path: Path, size: int, chunk_bytes: int, cuts: Sequence[_Cut]) -> list[int]:
    """0, the places to cut at, and the end; about `chunk_bytes` apart, never nearer."""
    found = [0]
    with open(path, "rb") as file:
        for number, cut in enumerate(cuts):
            if number and len(found) > 1:
                break  # the better kind of place is there, if not everywhere
            guess = found[-1] + chunk_bytes
            while guess < size:
                place = _find_cut(file.fileno(), guess, size, cut)
                if place >= size:
                    break
                found.append(place)
                guess = place + chunk_bytes
    return [*found, size] if size else [0, 0]


def _find_cut(descriptor: int, guess: int, size: int, cut: _Cut) -> int:
    """The first place from `guess` on, or `size`."""
    at = max(0, guess - cut.overlap)
    while at < size:
        data = os.pread(descriptor, (1 << 20) + 2 * cut.overlap, at)
        if not data:
            break
        for found in cut.pattern.finditer(data, max(0, guess - at)):
            return at + found.start()
        at += 1 << 20
        guess = max(guess, at)
    return size


def open_parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(pa.OSFile(str(path)))
    except (pa.ArrowException, OSError) as error:
        raise InputDamaged(
            f"{path.name} is not a parquet file",
            where=str(path),
            why=str(error),
            do="fetch it again",
        ) from error


def read_batches(piece: Piece, column: str) -> Iterator[Any]:
    """The rows of a piece of a parquet file, some at a time."""
    import pyarrow as pa

    assert piece.end is not None
    groups = list(range(piece.start, piece.end))
    file = open_parquet(piece.path)
    try:
        yield from file.iter_batches(batch_size=1024, row_groups=groups, columns=[column])
    except (pa.ArrowException, OSError) as error:
        raise InputDamaged(
            f"{piece.path.name} is damaged",
            where=f"{piece.path}, row group {piece.start}",
            why=str(error),
            do="fetch it again",
        ) from error


def _check_column(path: Path, column: str) -> None:
    import pyarrow as pa

    schema = open_parquet(path).schema_arrow
    if column not in schema.names:
        raise BadInput(
            f"{path.name} has no column {column!r}",
            where=str(path),
            do=f"choose from {', '.join(schema.names)}",
        )
    kind = schema.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    ):
        raise BadInput(
            f"column {column!r} of {path.name} is {kind}", where=str(path), do="name a text column"
        )


def _size_of(path: Path) -> int:
    reader = open_bytes(path) if path.suffix not in COMPRESSED else None
    if reader is None:
        status = look_at(path)
        if status is None:
            raise missing(path)
        return status.st_size
    try:
        return reader.size() or 0
    finally:
        reader.close()


def at_least(name: str, value: int, least: int) -> int:
    if whole(name, value) < least:
        raise BadConfig(f"{name} is {value}", do=f"give at least {least}")
    return value
