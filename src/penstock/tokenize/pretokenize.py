r"""Cut text of any size into pretokens and count them, in bounded memory.

In:    files or directories of text, JSONL, parquet (.gz and .zst too); special tokens; a pattern
Out:   `PretokenCounts`, with statistics
Keeps: the counts that `regex.findall` gives on each stretch of text between special tokens,
       whatever the chunk and buffer sizes; memory under `max_memory_gb`
Never: lets a special token, a character or a document be cut by a chunk or a buffer

What is not UTF-8 is read as Python's errors="replace" reads it: each maximal invalid part becomes
one U+FFFD. That is so in every format, and `stats["invalid_utf8"]` counts them.

    plan: chunks of plain files at split tokens or line starts, row groups, whole .gz files
    work: one thread for each of `num_processes`, each with a buffer and a table of counts
"""

import concurrent.futures
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.errors import BadConfig
from penstock.ingest.files import LineFile, open_bytes, shrunk
from penstock.ingest.jsonl import Block, Columns, LineParser
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.tokenize.chunks import (
    Piece,
    SpecialTokens,
    at_least,
    list_files,
    plan_pieces,
    read_batches,
)
from penstock.tokenize.counts import (
    DONE,
    INVALID,
    NEED_MORE,
    PRETOKENS,
    RING,
    STATUS,
    WRITTEN,
    CountTable,
    Int64s,
    PretokenCounts,
    Spill,
    combine,
    too_long,
)
from penstock.tokenize.patterns import (
    Pattern,
    code_point_classes,
    compile_regex,
    find_pattern,
)
from penstock.work.events import Events
from penstock.work.values import number, whole

BUFFER_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 64 << 20

_SCAN = "penstock.tokenize.scan_kernel"
_COUNT = "penstock.tokenize.count_kernel"
_CUTTER = "uint8[::1], int64, int64"
_SPECIALS = "uint8[::1], uint8[::1], int64[::1], int64[::1], int64[::1], uint64[::1]"
_TABLE = "uint64[::1], int64, uint8[::1], int64[::1]"
_count_text = Kernel(
    _COUNT,
    "count_text",
    f"int64(uint8[::1], int64, int64, int64, {_CUTTER}, {_SPECIALS}, {_TABLE})",
)
_count_rows = Kernel(
    _COUNT,
    "count_rows",
    f"int64(uint8[::1], int64[::1], int64, int64, int64, {_CUTTER}, {_SPECIALS}, {_TABLE})",
)
_clean_utf8 = Kernel(
    _SCAN,
    "clean_utf8",
    "int64(uint8[::1], int64, int64, int64, uint8[::1], int64, int64[::1])",
)
_cut_all = Kernel(
    _SCAN,
    "cut_all",
    f"int64(uint8[::1], int64, int64, {_CUTTER}, int64[::1])",
)


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
) -> PretokenCounts:
    """Count the pretokens of files, with `num_processes` threads, in at most `max_memory_gb`.

    Special tokens end a text and are counted apart, in `stats["special_tokens"]`. JSONL and
    parquet files (by their names) give the field or column `text_field`, each row a text.
    """
    workers = num_processes if num_processes is not None else os.cpu_count() or 1
    config = _Config(
        pattern=find_pattern(pattern),
        specials=SpecialTokens(special_tokens),
        text_field=text_field,
        workers=whole("num_processes", at_least("num_processes", workers, 1), most=10_000),
        buffer_bytes=at_least("buffer_bytes", buffer_bytes, 1),
        max_bytes=_memory_limit(max_memory_gb),
        chunk_bytes=None if chunk_bytes is None else at_least("chunk_bytes", chunk_bytes, 1),
    )
    if spill_dir is not None and not Path(spill_dir).is_dir():
        raise BadConfig("spill_dir is not a directory", where=str(spill_dir), do="make it first")
    given = [file_path] if isinstance(file_path, str | os.PathLike) else list(file_path)
    if not given:
        raise BadConfig("no file was given", do="name at least one file or directory")
    paths = list_files([Path(path) for path in given])
    return _Run(config, paths, Path(spill_dir) if spill_dir else None, events).run()


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


def cut_pretokens(pattern: Pattern, text: bytes) -> list[int]:
    """The end of every pretoken of one valid UTF-8 text, by the pattern's scanner.

    >>> cut_pretokens(find_pattern("cl100k"), b"Hello  world 1234")
    [5, 6, 12, 13, 16, 17]
    """
    data = np.frombuffer(text + bytes(PAD), np.uint8)
    ends = np.empty(len(text), np.int64)
    count = _cut_all(data, 0, len(text), code_point_classes(), pattern.family, pattern.digits, ends)
    found: list[int] = ends[:count].tolist()
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    pattern: Pattern
    specials: SpecialTokens
    text_field: str
    workers: int
    buffer_bytes: int
    max_bytes: int
    chunk_bytes: int | None


@dataclass(slots=True)
class _Tally:
    """What the workers have done so far; each adds to its own."""

    text_bytes: int = 0
    disk_bytes: int = 0
    rows: int = 0
    rejected: Counter[str] = field(default_factory=Counter)


class _Run:
    """One call of `pretokenize`."""

    def __init__(
        self, config: _Config, paths: list[Path], spill_dir: Path | None, events: Events | None
    ) -> None:
        import psutil

        self._config = config
        self._events = events or Events("pretokenize")
        self._process = psutil.Process()
        self._pieces = [
            piece
            for path in paths
            for piece in plan_pieces(
                path,
                config.pattern,
                config.specials,
                text_field=config.text_field,
                chunk_bytes=config.chunk_bytes,
                workers=config.workers,
                max_bytes=config.max_bytes,
            )
        ]
        self._spill = Spill(spill_dir)
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._peak = 0
        self._warned = False

    def run(self) -> PretokenCounts:
        began = time.monotonic()
        threads = max(1, min(self._config.workers, len(self._pieces)))
        free = (
            self._config.max_bytes - self._watch_memory() - threads * 8 * self._config.buffer_bytes
        )
        share = max(1 << 20, int(0.6 * free) // threads)
        self._workers = [
            _Worker(self._config, share, self._spill, self._lock) for _ in range(threads)
        ]
        waiting = iter(self._pieces)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            futures = {pool.submit(worker.run, waiting) for worker in self._workers}
            try:
                while futures:
                    done, futures = concurrent.futures.wait(
                        futures, timeout=0.25, return_when=concurrent.futures.FIRST_EXCEPTION
                    )
                    self._report()
                    for future in done:
                        future.result()
            except BaseException:  # also Ctrl-C: the pool would wait for all the work
                for worker in self._workers:
                    worker.stopped = True
                raise
        counts = combine([worker.table for worker in self._workers], self._spill)
        counts.stats = self._stats(counts, time.monotonic() - began)
        self._events.emit("end", **counts.stats)
        return counts

    def _report(self) -> None:
        tallies = [worker.tally for worker in self._workers]
        self._events.emit(
            "progress",
            at=sum(tally.disk_bytes for tally in tallies),
            size=sum(piece.size for piece in self._pieces),
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

    def _stats(self, counts: PretokenCounts, seconds: float) -> dict[str, Any]:
        self._watch_memory()
        workers = self._workers
        names = self._config.specials.texts
        special_counts = np.sum([worker.special_counts for worker in workers], axis=0)
        rejected = sum((worker.tally.rejected for worker in workers), Counter[str]())
        text_bytes = sum(worker.tally.text_bytes for worker in workers)
        return {
            "files": len({piece.path for piece in self._pieces}),
            "chunks": len(self._pieces),
            "threads": len(workers),
            "text_bytes": text_bytes,
            "rows": sum(worker.tally.rows for worker in workers),
            "pretokens": sum(int(worker.table.state[PRETOKENS]) for worker in workers),
            "distinct": len(counts),
            "special_tokens": {
                names[k]: int(special_counts[place])
                for place, k in enumerate(self._config.specials.order)
            },
            "invalid_utf8": sum(int(worker.table.state[INVALID]) for worker in workers),
            "rejected": dict(rejected),
            "spills": self._spill.files,
            "seconds": seconds,
            "mb_per_s": text_bytes / 1e6 / max(seconds, 1e-9),
            "peak_memory_bytes": self._peak,
        }


class _Worker:
    """A thread's buffers, table and tally."""

    def __init__(self, config: _Config, share: int, spill: Spill, lock: threading.Lock) -> None:
        self._config = config
        self._lock = lock
        self.table = CountTable(share, spill)
        self.tally = _Tally()
        self.stopped = False
        specials = config.specials
        self.special_counts: Int64s = np.zeros(len(specials.texts), np.int64)
        self._found = np.zeros(1, np.int64)
        self._raw = byte_buffer(config.buffer_bytes)
        self._text = byte_buffer(4 * config.buffer_bytes + PAD)
        self._kernel_config: tuple[Any, ...] = ()
        if config.pattern.is_scanned:
            self._kernel_config = (
                code_point_classes(), config.pattern.family, config.pattern.digits,
                specials.first, specials.bytes, specials.at, self.special_counts, self._found,
                np.zeros(5 * RING, np.uint64),
            )  # fmt: skip
        else:
            self._regex = compile_regex(config.pattern)
            whole = "|".join(re.escape(special.decode()) for special in specials.sorted)
            self._splitter = re.compile(f"({whole})")

    def run(self, waiting: Iterator[Piece]) -> None:
        """Take pieces until there are none."""
        while not self.stopped:
            with self._lock:
                piece = next(waiting, None)
            if piece is None:
                break
            before = self.tally.disk_bytes
            {"text": self._text_piece, "jsonl": self._jsonl_piece, "parquet": self._parquet_piece}[
                piece.kind
            ](piece)
            self.tally.disk_bytes = before + piece.size
        self._raw = self._text = np.zeros(0, np.uint8)

    def _text_piece(self, piece: Piece) -> None:
        if not self._config.pattern.is_scanned:
            self._text_by_regex(piece)
            return
        reader = open_bytes(piece.path, piece.start)
        left = (1 << 62) if piece.end is None else piece.end - piece.start
        raw = have = 0  # bytes of `_raw` not yet cleaned, bytes of `_text` not yet counted
        undecided = 0  # a pretoken was longer than this: look again when there is twice as much
        try:
            while not self.stopped:
                if raw + PAD >= len(self._raw):
                    self._raw = _grown(self._raw, 2 * len(self._raw), raw)
                room = self._raw.data[raw : min(len(self._raw) - PAD, raw + left)]
                got = reader.read_into(room[: self._config.buffer_bytes])
                left -= got
                self._advance(got, piece)
                is_last = got == 0 or left == 0
                if got == 0 and left > 0 and piece.end is not None:
                    raise shrunk(piece.path, piece.end - left, piece.end)
                if have + 3 * (raw + got) + PAD > len(self._text):
                    self._text = _grown(self._text, 2 * have + 3 * (raw + got) + 2 * PAD, have)
                taken = _clean_utf8(
                    self._raw, 0, raw + got, is_last, self._text, have, self.table.state
                )
                have = int(self.table.state[WRITTEN])
                self._raw[: raw + got - taken] = self._raw[taken : raw + got].copy()
                raw = raw + got - taken
                if have < 2 * undecided and not is_last:
                    if have > self._config.max_bytes // 4:
                        raise too_long(have, str(piece.path))
                    continue
                done = self._count(have, is_last)
                undecided = 0 if done else have
                self._text[: have - done] = self._text[done:have].copy()
                have -= done
                if is_last:
                    break
        finally:
            reader.close()

    def _count(self, stop: int, is_last: bool) -> int:
        """Count _text[:stop] as far as it is decided; how far that is."""
        at = 0
        while True:
            at = int(
                _count_text(
                    self._text, at, stop, is_last, *self._kernel_config, *self.table.arguments
                )
            )
            if self.table.state[STATUS] in (DONE, NEED_MORE):
                return at
            self.table.make_room()

    def _count_rows(self, data: Any, at: Int64s) -> None:
        self.tally.rows += len(at) - 1
        if not self._config.pattern.is_scanned:
            for start, stop in zip(at[:-1].tolist(), at[1:].tolist(), strict=True):
                self._count_by_regex(data[start:stop].tobytes())
            return
        row, start = 0, int(at[0])
        while row < len(at) - 1:
            row = _count_rows(
                data, at, row, len(at) - 1, start, *self._kernel_config, *self.table.arguments
            )
            start = int(self.table.state[WRITTEN])
            if self.table.state[STATUS] != DONE:
                self.table.make_room()

    def _jsonl_piece(self, piece: Piece) -> None:
        parser = LineParser(self._config.text_field, 0, 0, MAX_LINE_BYTES)
        file = LineFile(
            piece.path,
            offset=piece.start,
            max_line_bytes=MAX_LINE_BYTES,
            block_bytes=max(self._config.buffer_bytes, 1 << 12),
        )
        columns = Columns.allocate(8 * max(self._config.buffer_bytes, 1 << 12), 1024)
        try:
            while not self.stopped:
                block = file.next_block()
                if block is None:
                    if piece.end is not None and file.position < piece.end:
                        raise shrunk(piece.path, file.position, piece.end)
                    if (rest := file.fragment()) is not None:
                        self._jsonl_block(parser, rest, columns, piece)
                    break
                end = block.end
                if piece.end is not None and end > piece.end:
                    stop = max(block.start, piece.end - block.offset)
                    block = Block(block.data, block.start, stop, block.offset, block.too_long)
                self._jsonl_block(parser, block, columns, piece)
                if piece.end is not None and end + (not piece.is_last) > piece.end:
                    break  # the next piece begins here, or the file has grown since
        finally:
            file.close()

    def _jsonl_block(
        self, parser: LineParser, block: Block, columns: Columns, piece: Piece
    ) -> None:
        if piece.end is not None:
            self.tally.disk_bytes += block.stop - block.start
        for reject in block.too_long:
            self.tally.rejected[reject.reason] += 1
        size = block.stop - block.start
        if 3 * size + PAD > len(self._text):
            self._text = _grown(self._text, 3 * size + 2 * PAD, 0)
        _clean_utf8(block.data, block.start, block.stop, True, self._text, 0, self.table.state)
        stop, is_fragment = int(self.table.state[WRITTEN]), block.is_fragment
        if stop and self._text[stop - 1] != 0x0A:
            self._text[stop] = 0x0A
            stop, is_fragment = stop + 1, True
        clean = Block(self._text, 0, stop, block.offset + block.start, is_fragment=is_fragment)
        at = 0
        while at < clean.stop:
            columns.clear()
            taken = parser.take(
                clean, at, 0, columns,
                max_train_rows=1 << 62, max_text_bytes=1 << 62, max_rejects=4096,
            )  # fmt: skip
            at = taken.stop
            for reject in taken.rejects:
                self.tally.rejected[reject.reason] += 1
            self.tally.text_bytes += columns.text_bytes
            self._count_rows(columns.text, columns.text_at[: columns.rows + 1])

    def _parquet_piece(self, piece: Piece) -> None:
        import pyarrow as pa

        assert piece.end is not None
        for batch in read_batches(piece, self._config.text_field):
            if self.stopped:
                return
            column = batch.column(0)
            if column.null_count:
                self.tally.rejected["no_text"] += column.null_count
                column = column.drop_null()
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            try:
                rows = column.cast(pa.large_binary()).cast(pa.large_string())  # it looks at UTF-8
            except pa.ArrowInvalid:
                rows = self._cleaned(column)
            _, offsets, values = rows.buffers()
            at = np.frombuffer(offsets, np.int64)[rows.offset : rows.offset + len(rows) + 1]
            first, size = int(at[0]), int(at[-1] - at[0])
            self._advance(size, piece)
            if size + PAD > len(self._text):
                self._text = _grown(self._text, size + 2 * PAD, 0)
            if size:
                self._text[:size] = np.frombuffer(values, np.uint8)[first : first + size]
            self._count_rows(self._text, at - first)

    def _cleaned(self, column: Any) -> Any:
        """A column with texts that are not UTF-8, each read by the rule; seldom, so in Python."""
        import pyarrow as pa

        texts = []
        for raw in column.cast(pa.large_binary()).to_pylist():
            text = raw.decode("utf-8", "replace")
            self.table.state[INVALID] += text.count("\ufffd") - raw.count("\ufffd".encode())
            texts.append(text)
        return pa.array(texts, pa.large_string())

    def _text_by_regex(self, piece: Piece) -> None:
        """A pattern without a scanner needs its text whole: from one split token to the next."""
        token = self._config.specials.split_token()
        reader = open_bytes(piece.path, piece.start)
        left = (1 << 62) if piece.end is None else piece.end - piece.start
        text = bytearray()
        try:
            while left > 0 and not self.stopped:
                got = reader.read_into(self._raw.data[: min(self._config.buffer_bytes, left)])
                if got == 0:
                    if piece.end is not None:
                        raise shrunk(piece.path, piece.end - left, piece.end)
                    break
                left -= got
                self._advance(got, piece)
                text += self._raw[:got].data
                if token is not None and (cut := text.rfind(token, -2 * got - len(token))) > 0:
                    self._count_by_regex(bytes(text[:cut]))
                    del text[:cut]
        finally:
            reader.close()
        self._count_by_regex(bytes(text))

    def _count_by_regex(self, raw: bytes) -> None:
        """Count one text with the `regex` module."""
        text = raw.decode("utf-8", "replace")
        self.table.state[INVALID] += text.count("\ufffd") - raw.count("\ufffd".encode())
        specials = [special.decode() for special in self._config.specials.sorted]
        parts = self._splitter.split(text) if specials else [text]
        for special in parts[1::2]:
            self.special_counts[specials.index(special)] += 1
        counts: Counter[str] = Counter()
        for part in parts[::2]:
            counts.update(found.group() for found in self._regex.finditer(part) if found.group())
        self.table.state[PRETOKENS] += counts.total()
        self.table.add({pretoken.encode(): times for pretoken, times in counts.items()})

    def _advance(self, got: int, piece: Piece) -> None:
        self.tally.text_bytes += got
        if piece.end is not None and piece.kind != "parquet":
            self.tally.disk_bytes += got


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
