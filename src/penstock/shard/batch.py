"""Find all duplicates of a corpus before anything is cut, where no index of it fits in memory.

In:    the pieces of all inputs, a pool to run them in
Out:   for each piece the documents to let go of, as rejects
Keeps: on disk what is found of each piece, so that a run that was killed goes on
Never: holds more than one bit a document and what `dedup_batch` says of itself

    pieces ─▶ workers (read, filter, sign) ─▶ WORK/*.found ─▶ dedup_batch ─▶ WORK/*.gone

It takes a pass over the corpus of its own, and nothing can be trained on before that is done: the
price of an index that is not held. What goes is all but the first of a connected component.
"""

import bisect
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from penstock.disk import make_own_folder, read_own, replacing
from penstock.ingest.formats import Piece, ReadConfig, Rest
from penstock.ingest.inputs import Input, open_input
from penstock.prepare.dedup import DedupConfig
from penstock.prepare.dedup_batch import dedup_batch
from penstock.prepare.task import Prepared, reject_line, request
from penstock.work.pool import Pool

REASON: Final = "duplicate"


class _Found(msgspec.Struct):
    """What the first pass found in a piece."""

    starts: list[int]
    """Of the documents that are left."""
    ends: list[int]
    rejects: list[bytes]
    rest: Rest | None = None
    content: int = 0
    """The sum of what was read: see `task.contents`."""
    piece: bytes = b""
    """Which piece it was: see `_identity`."""


class BatchVerdicts:
    """What the first pass let go of, by piece."""

    def __init__(
        self, work: Path, names: Sequence[str], pieces: Sequence[tuple[int, int, int, int]]
    ) -> None:
        """The pieces as (input, start, end, content)."""
        self.url = str(work)
        self._work = work
        self._numbers = {name: number for number, name in enumerate(names)}
        self._starts: dict[int, list[int]] = {}
        self._contents: dict[tuple[int, int, int], int] = {}
        for number, start, end, content in pieces:
            self._starts.setdefault(number, []).append(start)
            self._contents[number, start, end] = content

    def check(self, opened: Input, piece: Piece, content: int) -> None:
        """Refuse a piece that is not what the first pass read."""
        if self._contents.get((piece.input, piece.start, piece.end), content) != content:
            raise opened.refuse_content(piece.end)

    def remove(self) -> None:
        """Let go of the files: the dataset is made."""
        shutil.rmtree(self._work, ignore_errors=True)

    def of(self, name: str, piece: Piece) -> list[bytes]:
        """The rejects of a piece."""
        number = self._numbers[name]
        starts = self._starts[number]
        lines: list[tuple[int, bytes]] = []
        first = bisect.bisect_right(starts, piece.start) - 1
        for begin in starts[first : bisect.bisect_left(starts, piece.end)]:
            stem = _stem(number, begin)
            found = _load(self._work, stem)
            gone = np.unpackbits(np.fromfile(self._work / f"{stem}.gone", np.uint8))
            lines += [(_start_of(line), line) for line in found.rejects]
            for k in np.flatnonzero(gone[: len(found.starts)]).tolist():
                start, end = found.starts[k], found.ends[k]
                lines.append((start, reject_line(name, start, end, REASON, "", "")))
        return [line for start, line in sorted(lines) if piece.start <= start < piece.end]


def find_duplicates(
    names: Sequence[str],
    read: ReadConfig,
    dedup: DedupConfig,
    pool: Pool,
    work: Path,
    run_all: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]],
    *,
    ahead: int,
) -> BatchVerdicts:
    """The first pass, and the grouping; `run_all` is a `map` for the latter."""
    work.parent.mkdir(parents=True, exist_ok=True)
    make_own_folder(work)
    pieces: list[tuple[int, int, int, int]] = []
    waiting: deque[tuple[Piece, Future[Prepared] | None]] = deque()

    def begin(piece: Piece) -> tuple[Piece, Future[Prepared] | None]:
        stem = _stem(piece.input, piece.start)
        if (work / f"{stem}.found").exists() and _load(work, stem).piece == _identity(piece):
            return piece, None
        return piece, pool.submit(request(piece), piece.data)

    def finish() -> None:
        piece, future = waiting.popleft()
        if future is None:
            found = _load(work, _stem(piece.input, piece.start))
        else:
            found = _save(work, piece, future.result())
        if found.rest is not None:
            waiting.appendleft(begin(piece.cut(found.rest)[1]))
        end = piece.end if found.rest is None else found.rest.start
        if end > piece.start:
            pieces.append((piece.input, piece.start, end, found.content))

    for piece in _all_pieces(names, read):
        waiting.append(begin(piece))
        while len(waiting) > ahead or (waiting and waiting[0][1] is None):
            finish()
    while waiting:
        finish()
    stems = [_stem(number, start) for number, start, _, _ in pieces]
    kept = dedup_batch([work / f"{stem}.sig" for stem in stems], work, dedup, run_all)
    first = 0
    for stem in stems:
        found = _load(work, stem)
        last = first + len(found.starts)
        _keep(work / f"{stem}.gone", np.packbits(~kept[first:last]).tobytes())
        first = last
    return BatchVerdicts(work, names, pieces)


def _all_pieces(names: Sequence[str], read: ReadConfig) -> Iterator[Piece]:
    for number, name in enumerate(names):
        opened = open_input(name, number, read)
        yield from opened.pieces(0)
        opened.close()


def _save(work: Path, piece: Piece, prepared: Prepared) -> _Found:
    stem, stays = _stem(piece.input, piece.start), prepared.reason == 0
    found = _Found(
        prepared.start[stays].tolist(),
        prepared.end[stays].tolist(),
        prepared.rejects,
        prepared.rest,
        int(prepared.content.sum(dtype=np.uint64)),
        _identity(piece),
    )
    _keep(work / f"{stem}.sig", prepared.signatures)
    _keep(work / f"{stem}.found", msgspec.msgpack.encode(found))
    return found


def _load(work: Path, stem: str) -> _Found:
    return msgspec.msgpack.decode(read_own(work / f"{stem}.found"), type=_Found)


def _keep(path: Path, data: bytes) -> None:
    """Replace a file whole; it is made again if it is lost."""
    with replacing(path) as file:
        file.write(data)


def _stem(number: int, start: int) -> str:
    return f"{number:06d}-{start:020d}"


def _identity(piece: Piece) -> bytes:
    return xxhash.xxh3_128_digest(piece.header() + piece.data)


def _start_of(line: bytes) -> int:
    start: int = msgspec.json.decode(line)["start"]
    return start
