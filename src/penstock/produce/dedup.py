"""Find documents that repeat others: in their order with an index, or in a pass before all else.

In:    signatures of documents, in the order of the inputs; or the pieces of all inputs, and a pool
Out:   which documents go, as rejects
Keeps: the index in memory, and the signatures of a shard beside it, to rebuild the index from; of
       a pass before all else, on disk, what is found of each piece, so that a killed run resumes
Never: holds, in such a pass, more than one bit a document and what `dedup_batch` says of itself

`Repeats` keeps an index of all that was kept: a document that repeats one goes. Where no index of
a corpus fits in memory, `find_duplicates` takes a pass over it first:

    pieces ─▶ workers (read, filter, sign) ─▶ WORK/*.found ─▶ dedup_batch ─▶ WORK/*.gone

Nothing can be trained on before that is done: the price of an index that is not held. What goes is
all but the first of a connected component.
"""

import bisect
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import xxhash

from penstock.disk import make_own_folder, read_own, replacing
from penstock.errors import BadConfig
from penstock.ingest.inputs import Input, Piece, Rest
from penstock.prepare.dedup import REASONS, DedupConfig, Index, Signatures
from penstock.prepare.dedup_batch import dedup_batch
from penstock.prepare.steps import DUPLICATE, BatchDedup, Step, counts_tokens, steps_as_json
from penstock.prepare.task import open_task
from penstock.prepare.wire import Prepared, Request, numbers, reject_line, signature_bytes
from penstock.produce.writer import About, Writer
from penstock.work.pool import Pool
from penstock.work.run import RunConfig, open_pool

FOLDER: Final = "_dedup"
BATCH: Final = "_batch"


class Repeats:
    """Decides in the order of the inputs which documents repeat one that was kept."""

    def __init__(self, dedup: DedupConfig, writer: Writer, max_memory_bytes: int) -> None:
        """The index as it was at the last commit: the signatures of all that was kept."""
        self._dedup = dedup
        self._index = Index(dedup, max_memory_bytes=max_memory_bytes)
        for name, data in writer.read_about(FOLDER):
            self._index.insert(Signatures.from_bytes(data, dedup, name))
        self._piece: Signatures | None = None
        self._batch: list[Signatures] = []

    @classmethod
    def among(
        cls, steps: Sequence[Step], writer: Writer, max_memory_bytes: int
    ) -> "Repeats | None":
        """What these steps ask for, if they do."""
        for step in steps:
            if isinstance(step, DedupConfig):
                return cls(step, writer, max_memory_bytes)
        return None

    def decide(
        self, prepared: Prepared, events: tuple[int, int], stays: tuple[int, int], name: str
    ) -> Prepared | None:
        """Those of the events, the ones that repeat an earlier document among the rejects; None if
        none does. The rows stay those of the whole piece.

        `stays` are the first and the last of them that other steps let stay.
        """
        found = prepared.signatures
        if not isinstance(found, Signatures):  # from another process: for all parts of a piece
            found = prepared.signatures = Signatures.from_bytes(found, self._dedup)
        if stays != (0, len(found)):
            found = found.take(np.arange(*stays))
        verdicts = self._index.decide(found)
        self._piece = found
        if verdicts.kept.all():
            return None
        self._piece = found.take(verdicts.kept)
        these = slice(*events)
        codes, start, end = (
            prepared.reason[these].copy(),
            prepared.start[these],
            prepared.end[these],
        )
        stay = np.flatnonzero(codes == 0)
        gone = stay[~verdicts.kept]
        reasons = [*prepared.reasons, *(r for r in REASONS[1:] if r not in prepared.reasons)]
        went, goes = events[0] - stays[0], events[1] - stays[1]  # to other steps
        lines = dict(zip(np.flatnonzero(codes).tolist(), prepared.rejects[went:goes], strict=True))
        event_rows = prepared.event_rows[these].copy()
        assert prepared.sources is not None, "what has signatures has sources"
        for event, source, number, of in zip(
            gone.tolist(),
            prepared.sources.take(numbers(stays[0] + np.flatnonzero(~verdicts.kept))).to_pylist(),
            verdicts.reasons[~verdicts.kept].tolist(),
            verdicts.of[~verdicts.kept].tolist(),
            strict=True,
        ):
            reason = REASONS[number]
            codes[event] = reasons.index(reason) + 1
            lines[event] = reject_line(
                name, int(start[event]), int(end[event]), reason, source,
                f"repeats kept document {of}",
            )  # fmt: skip
        event_rows[gone] = 0
        return replace(
            prepared,
            start=start,
            end=end,
            event_rows=event_rows,
            doc_id=prepared.doc_id[these],
            reason=codes,
            content=prepared.content[these],
            reasons=reasons,
            rejects=[lines[k] for k in sorted(lines)],
        )

    def keep(self, first: int, last: int) -> None:
        """Those of the piece's documents that stay, from `first` on, go into the next shard."""
        assert self._piece is not None
        self._batch.append(self._piece.take(np.arange(first, last)))

    def about(self) -> list[About]:
        """The signatures of a shard, to be kept beside it, where any document was looked at."""
        if not self._batch:
            return []
        joined, self._batch = Signatures.concat(self._dedup, self._batch), []
        data = joined.to_bytes()
        return [About(FOLDER, len(joined), lambda: data)]


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

    def check_piece(self, opened: Input, piece: Piece, content: int) -> None:
        """Refuse a piece that is not what the first pass read."""
        if self._contents.get((piece.input, piece.start, piece.end), content) != content:
            raise opened.refuse_content(piece.end)

    def check_end(self, opened: Input, content: int) -> None:
        """Each piece was looked at."""

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
                lines.append((start, reject_line(name, start, end, DUPLICATE, "", "")))
        return [line for start, line in sorted(lines) if piece.start <= start < piece.end]


def find_duplicates(
    names: Sequence[str],
    open_one: Callable[[str, int], Input],
    steps: Sequence[Step],
    setup: dict[str, Any],
    run: RunConfig,
    url: str,
) -> BatchVerdicts | None:
    """What batch dedup lets go of, if it is among the steps."""
    batch = next((step for step in steps if isinstance(step, BatchDedup)), None)
    if batch is None:
        return None
    if "://" in url:
        raise BadConfig(
            "batch dedup needs a local dataset",
            where=url,
            why="what it finds of the pieces lies beside the shards while it works",
            do="write to a directory that all nodes can reach, and push it afterwards",
        )
    first = [batch.config() if step is batch else step for step in steps]
    first = [step for step in first if not counts_tokens([step])]
    as_json = isinstance(setup["read"], dict)
    signing = {**setup, "tokenizer": None, "keep_tokens": False, "keep_rows": False}
    signing["steps"] = steps_as_json(first) if as_json else first
    pool = open_pool(open_task, signing, run)
    try:
        ahead = 2 * max(run.workers, pool.width) + 2
        return _first_pass(names, open_one, batch.config(), pool, Path(url) / BATCH, ahead)
    finally:
        pool.close()


def _first_pass(
    names: Sequence[str], open_one: Callable[[str, int], Input], dedup: DedupConfig, pool: Pool,
    work: Path, ahead: int,
) -> BatchVerdicts:  # fmt: skip
    """Read and sign all pieces, then find what repeats."""
    work.parent.mkdir(parents=True, exist_ok=True)
    make_own_folder(work)
    pieces: list[tuple[int, int, int, int]] = []
    waiting: deque[tuple[Piece, Future[Prepared] | None]] = deque()

    def begin(piece: Piece) -> tuple[Piece, Future[Prepared] | None]:
        stem = _stem(piece.input, piece.start)
        if (work / f"{stem}.found").exists() and _load(work, stem).piece == _identity(piece):
            return piece, None
        return piece, pool.submit(Request(piece))

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

    for piece in _all_pieces(names, open_one):
        waiting.append(begin(piece))
        while len(waiting) > ahead or (waiting and waiting[0][1] is None):
            finish()
    while waiting:
        finish()
    stems = [_stem(number, start) for number, start, _, _ in pieces]
    run_all = getattr(pool, "map", map)  # Ray's pool has one
    kept = dedup_batch([work / f"{stem}.sig" for stem in stems], work, dedup, run_all)
    first = 0
    for stem in stems:
        found = _load(work, stem)
        last = first + len(found.starts)
        _keep(work / f"{stem}.gone", np.packbits(~kept[first:last]).tobytes())
        first = last
    return BatchVerdicts(work, names, pieces)


def _all_pieces(names: Sequence[str], open_one: Callable[[str, int], Input]) -> Iterator[Piece]:
    for number, name in enumerate(names):
        opened = open_one(name, number)
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
    _keep(work / f"{stem}.sig", signature_bytes(prepared))
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
