r"""Cut text of any size into pretokens and count them, in bounded memory.

In:    files, trees, archives, globs, addresses (`corpus`); special tokens; a pattern
Out:   `PretokenCounts`, with statistics
Keeps: the counts that `regex.findall` gives on each stretch of text between special tokens,
       whatever the chunk and buffer sizes; memory under `max_memory_gb`
Never: lets a special token, a character or a document be cut by a chunk or a buffer

    corpus ─▶ pieces of documents, ranges of long texts ─▶ _Worker: one for each of
    `num_processes`, a thread with a buffer and a table of counts
"""

import concurrent.futures
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.errors import BadConfig
from penstock.ingest.formats import Piece, ReadConfig
from penstock.ingest.open import ByteReader, open_bytes, shrunk
from penstock.kernels import PAD, byte_buffer
from penstock.options import config_of, number, whole
from penstock.records import Documents
from penstock.tokenize.chunks import (
    SpecialTokens,
    at_least,
    optimal_chunk_bytes,
    text_boundaries,
)
from penstock.tokenize.corpus import END, Corpus, Tally, TextRange, Work, clean_utf8
from penstock.tokenize.count_layout import INVALID, PRETOKENS, WRITTEN
from penstock.tokenize.counts import CountTable, PretokenCounts, Spill, combine, too_long
from penstock.tokenize.patterns import Pattern, compile_regex, find_pattern
from penstock.work.events import Events, shown

BUFFER_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 8 << 20
"""Documents that a thread takes at a time, where memory allows it."""


def pretokenize(
    file_path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    special_tokens: Sequence[str],
    num_processes: int | None = None,
    max_memory_gb: float | None = None,
    *,
    pattern: str = "cl100k",
    text_field: str = "text",
    chunk_bytes: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    spill_dir: str | os.PathLike[str] | None = None,
    events: Events | None = None,
    read: ReadConfig | None = None,
    without: str | os.PathLike[str] = "",
) -> PretokenCounts:
    """Count the pretokens of inputs, with `num_processes` threads, in at most `max_memory_gb`.

    Inputs are read as `penstock chunk` reads them: `read` says how, and then what `text_field`
    is. Special tokens end a text and are counted apart, in `stats["special_tokens"]`. What is
    refused is counted by its reason in `stats["rejected"]`. Files in the directory `without`
    are no inputs. On a terminal and in a notebook a bar shows how far it is and what memory it
    takes; `events` are for those who show it themselves.
    """
    read = (
        ReadConfig(text_field=text_field) if read is None else config_of("read", read, ReadConfig)
    )
    workers = num_processes if num_processes is not None else os.cpu_count() or 1
    config = _Config(
        pattern=find_pattern(pattern),
        specials=SpecialTokens(special_tokens),
        workers=whole("num_processes", at_least("num_processes", workers, 1), most=10_000),
        buffer_bytes=at_least("buffer_bytes", buffer_bytes, 1),
        max_bytes=_memory_limit(max_memory_gb),
        chunk_bytes=None if chunk_bytes is None else at_least("chunk_bytes", chunk_bytes, 1),
    )
    if spill_dir is not None and not Path(spill_dir).is_dir():
        raise BadConfig("spill_dir is not a directory", where=str(spill_dir), do="make it first")
    given = [file_path] if isinstance(file_path, str | os.PathLike) else list(file_path)
    read = replace(read, piece_bytes=config.piece_bytes)
    corpus = Corpus(given, read, cut=config.cut, without=os.fspath(without))
    with shown(events, "pretokenize") as told:
        return _Run(config, corpus, Path(spill_dir) if spill_dir else None, told).run()


def stream_stories_from_chunk(
    file_path: str | os.PathLike[str],
    start: int,
    end: int,
    split_token: str,
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[str]:
    """The texts between split tokens in bytes start:end of a file, one at a time.

    Texts without a character are left out. An empty `split_token` gives the chunk as one text.
    """
    reader = open_bytes(Path(file_path), start)
    token = split_token.encode()
    buffer = bytearray(at_least("buffer_bytes", buffer_bytes, 1))
    held = bytearray()
    searched = 0
    left = end - start
    try:
        while left > 0 and (got := reader.read_into(memoryview(buffer)[: min(len(buffer), left)])):
            left -= got
            held += memoryview(buffer)[:got]
            story = 0
            while token and (found := held.find(token, searched)) >= 0:
                if found > story:
                    yield held[story:found].decode("utf-8", "replace")
                story = searched = found + len(token)
            del held[:story]
            searched = max(0, len(held) - max(len(token) - 1, 0))
    finally:
        reader.close()
    if held:
        yield held.decode("utf-8", "replace")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    pattern: Pattern
    specials: SpecialTokens
    workers: int
    buffer_bytes: int
    max_bytes: int
    chunk_bytes: int | None

    @property
    def piece_bytes(self) -> int:
        """A piece takes about four times its bytes of memory, in each thread."""
        if self.chunk_bytes is not None:
            return min(self.chunk_bytes, 1 << 30)
        return min(PIECE_BYTES, max(1 << 20, self.max_bytes // (16 * self.workers)))

    def cut(self, path: str, size: int) -> list[int]:
        """Where a long text is cut, so that all threads have a share of it."""
        chunk = self.chunk_bytes or optimal_chunk_bytes(
            size, self.workers, self.max_bytes / (1 << 30)
        )
        return text_boundaries(path, size, chunk, self.pattern, self.specials)


class _Source:
    """The work of one input, for several threads."""

    def __init__(self, work: Iterator[Work]) -> None:
        self._work = work
        self._lock = threading.Lock()

    def take(self) -> Work | None:
        with self._lock:
            return next(self._work, None)


class _Run:
    """One call of `pretokenize`."""

    def __init__(
        self, config: _Config, corpus: Corpus, spill_dir: Path | None, events: Events
    ) -> None:
        import psutil

        self._config = config
        self._corpus = corpus
        self._events = events
        self._process = psutil.Process()
        self._disk = [0] * len(corpus.inputs)
        self._files = 0
        for origin, _, size, _ in corpus.files():
            self._files += 1
            self._disk[origin.number] += size
        self._sources = [_Source(corpus.work(origin)) for origin in corpus.inputs]
        self._spill = Spill(spill_dir)
        self._workers: list[_Worker] = []
        self._peak = 0
        self._warned = False

    def run(self) -> PretokenCounts:
        began = time.monotonic()
        threads = self._config.workers
        reading = threads * 4 * (2 * self._config.buffer_bytes + self._config.piece_bytes)
        free = self._config.max_bytes - self._watch_memory() - reading
        share = max(1 << 20, int(0.6 * free) // threads)
        self._workers = [
            _Worker(self._config, self._corpus, share, self._spill, self._disk)
            for _ in range(threads)
        ]
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            futures = {
                pool.submit(worker.run, self._sources, k * len(self._sources) // threads)
                for k, worker in enumerate(self._workers)
            }
            try:
                while futures:
                    done, futures = concurrent.futures.wait(
                        futures, timeout=0.25, return_when=concurrent.futures.FIRST_EXCEPTION
                    )
                    self._report(is_end=not futures)
                    for future in done:
                        future.result()
            except BaseException:  # also Ctrl-C: the pool would wait for all the work
                for worker in self._workers:
                    worker.stopped = True
                raise
        tally = Tally.total(worker.tally for worker in self._workers)
        self._corpus.check(tally)
        if told := tally.told():
            self._events.emit("warn", message=f"refused: {told}")
        counts = combine([worker.table for worker in self._workers], self._spill)
        counts.stats = self._stats(counts, tally, time.monotonic() - began)
        self._events.emit("end", **counts.stats)
        return counts

    def _report(self, *, is_end: bool) -> None:
        size = sum(self._disk)
        done = int(sum(worker.disk_bytes for worker in self._workers))
        self._events.emit(
            "progress",
            at=size if is_end else min(done, size),
            size=size,
            # threads write these meanwhile: a list of them is taken at once
            read=sum(sum(list(w.tally.documents.values())) for w in self._workers),
            refused=sum(sum(list(w.tally.refused.values())) for w in self._workers),
            memory_bytes=self._watch_memory(),
        )

    def _watch_memory(self) -> int:
        held = int(self._process.memory_info().rss)
        self._peak = max(self._peak, held)
        if held > self._config.max_bytes and not self._warned:
            self._warned = True
            self._events.emit(
                "warn",
                message=f"pretokenize holds {held >> 20:,} MB, "
                f"more than the limit of {self._config.max_bytes >> 20:,} MB",
            )
        return held

    def _stats(self, counts: PretokenCounts, tally: Tally, seconds: float) -> dict[str, Any]:
        self._watch_memory()
        workers = self._workers
        names = self._config.specials.texts
        special_counts = np.sum([worker.specials.counts for worker in workers], axis=0)
        return {
            "files": self._files,
            "chunks": sum(worker.chunks for worker in workers),
            "threads": len(workers),
            "text_bytes": tally.text_bytes,
            "documents": tally.documents.total(),
            "rows": tally.rows,
            "decoded": dict(tally.decoded),
            "pretokens": sum(int(worker.table.state[PRETOKENS]) for worker in workers),
            "distinct": len(counts),
            "special_tokens": {
                names[k]: int(special_counts[place])
                for place, k in enumerate(self._config.specials.order)
            },
            "invalid_utf8": sum(int(worker.table.state[INVALID]) for worker in workers),
            "rejected": tally.reasons(),
            "spills": self._spill.files,
            "seconds": seconds,
            "mb_per_s": tally.text_bytes / 1e6 / max(seconds, 1e-9),
            "peak_memory_bytes": self._peak,
        }


class _Worker:
    """A thread's buffers, table and tally."""

    def __init__(
        self, config: _Config, corpus: Corpus, share: int, spill: Spill, disk: Sequence[int]
    ) -> None:
        self._config = config
        self._corpus = corpus
        self._disk = disk
        self.table = CountTable(share, spill)
        self.tally = Tally()
        self.stopped = False
        self.chunks = 0
        self.disk_bytes = 0.0
        """About how far it is, for the progress."""
        self.specials = config.specials.for_kernels()
        self._raw = byte_buffer(config.buffer_bytes)
        self._text = byte_buffer(4 * config.buffer_bytes + PAD)
        if config.pattern.is_scanned:
            self._cutter = config.pattern.cutter()
        else:
            self._regex = compile_regex(config.pattern)
            whole = "|".join(re.escape(special.decode()) for special in config.specials.sorted)
            self._splitter = re.compile(f"({whole})")

    def run(self, sources: Sequence[_Source], first: int) -> None:
        """Do the work of all inputs; each thread begins with another, then helps the others."""
        for source in (*sources[first:], *sources[:first]):
            while not self.stopped and (work := source.take()) is not None:
                self.chunks += 1
                if isinstance(work, Piece):
                    self._count_piece(work)
                else:
                    self._count_long(work)
        self._raw = self._text = np.zeros(0, np.uint8)

    def _count_piece(self, piece: Piece) -> None:
        for found in self._corpus.read(piece, self.tally):
            if self.stopped:
                return
            if isinstance(found, Documents):
                self._count_rows(found)
            else:
                self._count_long(found)
        held = self._corpus.inputs[piece.input].size
        self.disk_bytes += piece.bytes * (self._disk[piece.input] / held if held else 1)

    def _count_long(self, text: TextRange) -> None:
        if text.start == 0:
            self.tally.take_text(text.input)
        with text.open() as reader:
            if self._config.pattern.is_scanned:
                self._count_range(reader, text)
            else:
                self._count_range_by_regex(reader, text)
        text.check()

    def _count_range(self, reader: ByteReader, text: TextRange) -> None:
        left = text.end - text.start
        raw = have = 0  # bytes of `_raw` not yet cleaned, bytes of `_text` not yet counted
        undecided = 0  # a pretoken was longer than this: look again when there is twice as much
        is_last = False
        while not is_last and not self.stopped:
            size = min(self._config.buffer_bytes, left)
            if text.is_plain:
                self._make_room(have, size)
                got = self._read(reader, self._text.data[have : have + size], text, left)
            else:
                if raw + size + PAD > len(self._raw):
                    self._raw = _grown(self._raw, raw + 2 * size + PAD, raw)
                got = self._read(reader, self._raw.data[raw : raw + size], text, left)
            left -= got
            is_last = got == 0 or left == 0
            if text.is_plain:
                have += got  # may cut a character: nothing so near the end is decided yet
            else:
                raw += got
                self._make_room(have, 3 * raw)
                taken = clean_utf8(self._raw, 0, raw, is_last, self._text, have, self.table.state)
                have = int(self.table.state[WRITTEN])
                self._raw[: raw - taken] = self._raw[taken:raw].copy()
                raw -= taken
            if have < 2 * undecided and not is_last:
                if have > self._config.max_bytes // 4:
                    raise too_long(have, text.path)
                continue
            done = self.table.count_text(self._text, have, is_last, self._cutter, self.specials)
            done = min(done, have)  # beyond it if the file was rewritten
            undecided = 0 if done else have
            self._text[: have - done] = self._text[done:have].copy()
            have -= done

    def _make_room(self, have: int, more: int) -> None:
        if have + more + PAD > len(self._text):
            self._text = _grown(self._text, 2 * have + more + 2 * PAD, have)

    def _read(self, reader: ByteReader, buffer: memoryview, text: TextRange, left: int) -> int:
        got = reader.read_into(buffer)
        self.tally.text_bytes += got
        self.disk_bytes += got
        if got == 0 and left > 0 and text.end != END:
            raise shrunk(Path(text.path), text.end - left, text.size)
        return got

    def _count_rows(self, found: Documents) -> None:
        if self._config.pattern.is_scanned:
            self.table.count_rows(found.data, found.at, self._cutter, self.specials)
            return
        for start, stop in zip(found.at[:-1].tolist(), found.at[1:].tolist(), strict=True):
            self._count_by_regex(found.data[start:stop].tobytes())

    def _count_range_by_regex(self, reader: ByteReader, text: TextRange) -> None:
        """A pattern without a scanner needs its text whole: from one split token to the next."""
        token = self._config.specials.split_token()
        left = text.end - text.start
        held = bytearray()
        while left > 0 and not self.stopped:
            room = self._raw.data[: min(self._config.buffer_bytes, left)]
            got = self._read(reader, room, text, left)
            if got == 0:
                break
            left -= got
            held += self._raw[:got].data
            if token is not None and (cut := held.rfind(token, -2 * got - len(token))) > 0:
                self._count_by_regex(bytes(held[:cut]))
                del held[:cut]
        self._count_by_regex(bytes(held))

    def _count_by_regex(self, raw: bytes) -> None:
        """Count one text with the `regex` module."""
        text = raw.decode("utf-8", "replace")
        self.table.state[INVALID] += text.count("\ufffd") - raw.count("\ufffd".encode())
        specials = [special.decode() for special in self._config.specials.sorted]
        parts = self._splitter.split(text) if specials else [text]
        for special in parts[1::2]:
            self.specials.counts[specials.index(special)] += 1
        counts: Counter[str] = Counter()
        for part in parts[::2]:
            counts.update(found.group() for found in self._regex.finditer(part) if found.group())
        self.table.state[PRETOKENS] += counts.total()
        self.table.add({pretoken.encode(): times for pretoken, times in counts.items()})


def _memory_limit(max_memory_gb: float | None) -> int:
    import psutil

    if max_memory_gb is None:
        return int(psutil.virtual_memory().available) // 2
    if not number("max_memory_gb", max_memory_gb) > 0:
        raise BadConfig(f"max_memory_gb is {max_memory_gb}", do="give a number above 0")
    return int(min(max_memory_gb, 1 << 20) * (1 << 30))


def _grown(array: Any, size: int, used: int) -> Any:
    larger = byte_buffer(size)
    larger[:used] = array[:used]
    return larger
