"""Turn JSON lines, finished or still growing, into the shards of a live dataset.

In:    one or more JSONL files (plain and growing, or complete .gz and .zst)
Out:   a live dataset; sealed when every input is known to have ended
Keeps: each input's offset in the log, in the record of the shard that it covers; a restart goes
       on from there and gives the same shards, byte for byte
Never: takes silence for the end (unless --until-idle says so, and then the log says it too)

    for each input:  block ─▶ parse into the batch ─▶ full? submit, go on in a new one
                     nothing new ─▶ ended? next input : wait, beat, look again
"""

import contextlib
import json
import os
import signal
import threading
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final, Protocol

import numpy as np

from penstock.errors import AlreadySealed, BadConfig, BadInput, InputReplaced, TooManyRejects
from penstock.ingest.files import COMPRESSED, LineFile, done_marker, look_at, missing, read_done
from penstock.ingest.jsonl import Block, Columns, LineParser, Reject
from penstock.shard.columns import write_rows
from penstock.shard.split import Split
from penstock.shard.write import Batch, Order, ShardConfig, ShardWriter, check_begun, finish
from penstock.store.backends import AlreadyThere, Unsure, open_store
from penstock.store.log import BEAT_S, InputState, Log, LogState
from penstock.store.record import Add, Progress, Record
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events
from penstock.work.values import check_numbers, checked_path, whole

_POLL_S: Final = 0.1
_NOTICE_S: Final = 10.0
_EVENT_S: Final = 0.2
_MAX_BATCH_REJECTS: Final = 100_000
_JUDGE_FROM: Final = 10_000
"""Documents read before the share of rejects can stop a run; at the end it always can."""

STOPPED: Final = "_rejects/stopped.jsonl"
"""Rejects of a run that was stopped for their number; not part of the dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowConfig:
    """How to read and when to stop. None of it changes the bytes of a shard."""

    complete: bool = False
    """The inputs are complete: read them to their end and seal."""

    until_idle_s: float | None = None
    """Take an input that has not grown for this long as ended (for foreign writers)."""

    max_rejects: float = 0.01
    """Share of documents that may be refused before the run stops."""

    threads: int = field(default_factory=lambda: max(2, min(8, os.cpu_count() or 2)))
    """Shards encoded side by side; each holds up to `bytes_per_file` of text."""

    wait_for_input_s: float = 60.0
    """How long an input may not be there yet, when following."""

    beat_s: float = BEAT_S
    """How often to commit a sign of life while waiting."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        whole("--threads", self.threads, most=10_000)
        if not 0 <= self.max_rejects <= 1:
            raise BadConfig(f"--max_rejects is {self.max_rejects}", do="choose a share from 0 to 1")
        if self.threads < 1:
            raise BadConfig(f"--threads is {self.threads}", do="choose at least 1")
        if self.until_idle_s is not None and self.until_idle_s <= 0:
            raise BadConfig("--until_idle must be longer than 0 s", do="for example 60s")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    sealed: bool
    state: LogState
    stopped_by: int | None = None
    """The signal that ended it early."""
    url: str = ""
    """Where what was made is."""
    redacted: int = 0
    """Documents in which this run overwrote secrets or personal data."""


class Stoppable(Protocol):
    """Work that looks now and then whether it should end."""

    stopped_by: int | None


class Stop(Exception):
    """A signal asked for the end."""


class _Account:
    """What became of one input's documents within one batch."""

    def __init__(self, name: str, start: int) -> None:
        self.name = name
        self.start = start
        self.to = start
        self.kept = 0
        self.blank = 0
        self.dropped: dict[str, int] = {}

    def close(self, proof: dict[str, str | int], end: str | None) -> Progress:
        return Progress(
            input=self.name,
            start=self.start,
            to=self.to,
            read=self.kept + sum(self.dropped.values()),
            kept=self.kept,
            dropped=self.dropped,
            blank=self.blank,
            proof=proof,
            end=end,
        )


def shard_jsonl(
    inputs: Sequence[str | os.PathLike[str]],
    parquet_dir: str | os.PathLike[str],
    config: ShardConfig | None = None,
    follow: FollowConfig | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    tokens: bool = False,
    events: Events | None = None,
) -> Outcome:
    """Read `inputs` into the dataset at `parquet_dir`, from wherever an earlier run left off.

    A `tokenizer` counts the tokens of every document; with `tokens` the shards hold them too.
    """
    names = [checked_path("--input", path) for path in inputs]
    if not os.fspath(parquet_dir):
        raise BadConfig("--parquet_dir is empty", do="name a directory or a bucket address")
    if len({os.path.realpath(name) for name in names}) != len(names) or not names:
        raise BadConfig("the same input is given twice, or none", do="name each input once")
    for name in names:
        if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name):
            raise BadConfig(
                f"the name {name!r} cannot be written into the log",
                why="it holds bytes that are not UTF-8, or control characters",
                do="rename the file, or give it through a link with a plain name",
            )
    store = open_store(parquet_dir, make=True)
    if events is None:
        events = Events("shard")
    existing = Log(store)
    existing.refresh()
    config, follow = config or ShardConfig(), follow or FollowConfig()
    if tokens and tokenizer is None:
        raise BadConfig("--tokens needs --tokenizer", do="name the tokenizer")
    if tokenizer is not None:
        config = replace(
            config,
            tokenizer=tokenizer.fingerprint,
            token_type=np.dtype(tokenizer.dtype).name if tokens else "",
        )
    if existing.state.sealed:
        check_begun(store, existing.state, config, names)
        return _already_sealed(existing, names)
    if follow.complete:
        for name in names:
            if look_at(Path(name)) is None:
                raise missing(Path(name))

    def write(file: IO[bytes], columns: Columns, order: Order) -> int | None:
        kind = config.token_type
        return write_rows(file, columns, order, names, tokenizer=tokenizer, token_type=kind)

    writer: ShardWriter[Columns] = ShardWriter(
        store, config, names, write_rows=write, threads=follow.threads
    )
    run = _Run(writer, follow, events)
    with signals_noted(run):
        return run.run()


def _already_sealed(log: Log, names: Sequence[str]) -> Outcome:
    """Nothing to do, unless the inputs hold more than was sealed."""
    for name in names:
        known = log.state.inputs.get(name)
        path = Path(name)
        if known and path.suffix not in COMPRESSED and look_at(path) is not None:
            LineFile(path, offset=known.to, proof=known.proof, max_line_bytes=1).close()
        if known is None or _holds_more(path, known):
            raise AlreadySealed(
                f"{log.store.url} is sealed, and {path.name} holds more than is in it",
                where=name,
                why=f"sealed at record {log.state.n} with "
                f"{known.to if known else 0:,} bytes of this input",
                do="write to a new directory",
            )
    log.store.epoch = log.state.epoch
    log.store.settle()  # the seal may be visible and not yet durable: then nothing may rest on it
    finish(log)
    return Outcome(sealed=True, state=log.state, url=log.store.url)


def _holds_more(path: Path, known: InputState) -> bool:
    """Whether an input that was read to its end has grown since."""
    found = look_at(path)
    return found is not None and path.suffix not in COMPRESSED and found.st_size > known.to


@contextlib.contextmanager
def signals_noted(run: Stoppable) -> Iterator[None]:
    """SIGTERM and SIGINT end the run between two lines, not in the middle of something."""

    def note(number: int, frame: FrameType | None) -> None:
        run.stopped_by = number

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class _Run:
    """One process's work on one dataset."""

    def __init__(self, writer: ShardWriter[Columns], follow: FollowConfig, events: Events) -> None:
        config = writer.config
        self.stopped_by: int | None = None
        self._writer = writer
        self._config = config
        self._follow = follow
        self._events = events
        split = Split.of(config.seed, config.val_fraction)
        self._parser = LineParser(
            text_field=config.text_field,
            salt=split.salt,
            threshold=split.threshold,
            max_line_bytes=config.max_line_bytes,
        )
        state = writer.log.state
        self._read = sum(i.read for i in state.inputs.values())
        self._dropped: dict[str, int] = {}
        for known in state.inputs.values():
            for reason, count in known.dropped.items():
                self._dropped[reason] = self._dropped.get(reason, 0) + count
        self._bytes = sum(i.to for i in state.inputs.values())
        self._batch = self._new_batch()
        self._account = _Account("", 0)
        self._last_commit = time.monotonic()
        self._last_event = 0.0
        self._last_seen: tuple[int | None, int] = (None, -1)

    def run(self) -> Outcome:
        writer = self._writer
        self._events.emit(
            "start", inputs=writer.inputs, dataset=writer.log.store.url, bytes=self._bytes
        )
        sealed = False
        try:
            writer.log.store.remove(STOPPED)
            for number, name in enumerate(writer.inputs):
                known = writer.log.state.inputs.get(name)
                if known is None or known.end is None or _holds_more(Path(name), known):
                    self._read_input(number, name)
            self._judge(at_end=True)
            if self._batch.progress:
                writer.submit(self._batch)
            self._note_commits(writer.seal())
            sealed = True
        except (Stop, BadInput) as error:
            # What is full and stored is right: the next run need not do it again.
            self._note_commits(writer.commit_all())
            if isinstance(error, BadInput):
                raise
        finally:
            writer.close()
            self._events.emit("end", sealed=sealed, stopped_by=self.stopped_by)
        state, url = writer.log.state, writer.url
        return Outcome(sealed=sealed, stopped_by=self.stopped_by, state=state, url=url)

    def _read_input(self, number: int, name: str) -> None:
        path = Path(name)
        self._wait_for(path)
        known = self._writer.log.state.inputs.get(name)
        offset = known.to if known else 0
        file = LineFile(
            path,
            offset=offset,
            proof=known.proof if known else None,
            max_line_bytes=self._config.max_line_bytes,
        )
        with contextlib.closing(file):
            self._account = _Account(name, offset)
            end = self._read_to_end(file, number)
            if (block := file.fragment()) is not None:
                self._take(file, block, number)
            self._close_account(file, end)

    def _wait_for(self, path: Path) -> None:
        """A producer that was started at the same time may not have made its file yet."""
        began = time.monotonic()
        told = False
        while look_at(path) is None:
            if self._follow.complete or time.monotonic() >= began + self._follow.wait_for_input_s:
                raise missing(path)
            if not told and time.monotonic() >= began + 1:
                told = True
                self._events.emit("wait", input=str(path), message=f"waiting for {missing(path)}")
            self._heed_signals()
            time.sleep(_POLL_S)

    def _read_to_end(self, file: LineFile, number: int) -> str:
        """Take every whole line; return how the end was known."""
        last_growth = time.monotonic()
        notice_s = _NOTICE_S
        while True:
            # Asked before reading: what was written before the marker is then read after it.
            end = self._known_end(file)
            before = file.position
            while (block := file.next_block()) is not None:
                self._take(file, block, number)
                self._tick(file)
            file.still_there()
            if end is not None:
                return end
            now = time.monotonic()
            if file.position > before:  # also within a line that has not ended yet
                last_growth, notice_s = now, _NOTICE_S
            idle_s = self._follow.until_idle_s
            if idle_s is not None and now - last_growth >= idle_s:
                return f"until-idle {idle_s:g}s"
            if now - last_growth >= notice_s:
                notice_s *= 2
                self._say_waiting(file, now - last_growth)
            self._note_commits(self._writer.commit_ready())
            if now - self._last_commit >= self._follow.beat_s:
                name = self._account.name
                self._note_commits([self._writer.beat(name, now - last_growth)])
            self._tick(file)
            time.sleep(_POLL_S)

    def _known_end(self, file: LineFile) -> str | None:
        if file.is_compressed:
            return "complete: compressed"
        if self._follow.complete:
            return "complete: told so"
        promised = read_done(file.path)
        if promised is None:
            return None
        size = file.size() or 0
        if promised > size:
            raise InputReplaced(
                f"{file.path.name} is shorter than its marker says",
                where=str(file.path),
                why=f"it has {size:,} bytes, {done_marker(file.path).name} promises {promised:,}",
                do="run its producer again, or remove the marker if it is still being written",
            )
        if 0 <= promised < size:
            return None  # left by an earlier run of a producer that has gone on since
        return "done marker"

    def _take(self, file: LineFile, block: Block, number: int) -> None:
        for reject in block.too_long:
            self._reject(file, reject)
            self._submit_if_full(file)
        at = block.start
        while at < block.stop:
            taken = self._parser.take(
                block,
                at,
                number,
                self._batch.columns,
                max_train_rows=self._config.rows_per_file,
                max_text_bytes=self._config.bytes_per_file,
                max_rejects=_MAX_BATCH_REJECTS - len(self._batch.rejects),
            )
            self._account.kept += taken.kept
            self._account.blank += taken.blank
            self._read += taken.kept
            for reject in taken.rejects:
                self._reject(file, reject)
            at = taken.stop
            self._account.to = min(block.offset + at, block.end)
            self._submit_if_full(file)
            self._judge()

    def _reject(self, file: LineFile, reject: Reject) -> None:
        account, reason = self._account, reject.reason
        account.dropped[reason] = account.dropped.get(reason, 0) + 1
        account.to = reject.end
        self._read += 1
        self._dropped[reason] = self._dropped.get(reason, 0) + 1
        self._batch.rejects.append(
            json_line(
                {
                    "input": account.name,
                    "start": reject.start,
                    "end": reject.end,
                    "reason": reason,
                    "at": reject.at,
                    "sample": file.sample(reject),
                }
            )
        )

    def _submit_if_full(self, file: LineFile) -> None:
        columns = self._batch.columns
        if (
            columns.train_rows < self._config.rows_per_file
            and columns.held_bytes < self._config.bytes_per_file
            and len(self._batch.rejects) < _MAX_BATCH_REJECTS
        ):
            return
        self._close_account(file)
        self._writer.submit(self._batch)
        self._note_commits(self._writer.make_room(self._follow.threads))
        self._batch = self._new_batch()

    def _new_batch(self) -> Batch[Columns]:
        """An empty batch to fill; buffers are used again, so that memory is touched once."""
        if self._writer.spare:
            return Batch(self._writer.spare.pop())
        config = self._config
        rows = min(2 * config.rows_per_file, 100_000)
        return Batch(Columns.allocate(config.bytes_per_file + config.max_line_bytes, rows))

    def _close_account(self, file: LineFile, end: str | None = None) -> None:
        account = self._account
        if end is not None or account.to > account.start:
            self._batch.progress.append(account.close(file.prove(account.to), end))
        self._account = _Account(account.name, account.to)

    def _judge(self, *, at_end: bool = False) -> None:
        """Stop when more is refused than was allowed."""
        dropped = sum(self._dropped.values())
        allowed = self._follow.max_rejects * self._read
        if dropped <= allowed or not (at_end or self._read >= _JUDGE_FROM):
            return
        store = self._writer.log.store
        self._note_commits(self._writer.commit_all())
        if self._batch.rejects:
            with contextlib.suppress(AlreadyThere, Unsure):  # of a writer beside us: as good
                store.create(STOPPED, b"".join(self._batch.rejects))
        reasons = sorted(self._dropped.items(), key=lambda item: -item[1])
        first = json.loads(self._batch.rejects[0]) if self._batch.rejects else None
        raise TooManyRejects(
            f"{dropped:,} of {self._read:,} documents were refused, "
            f"{dropped / self._read:.1%}; --max_rejects allows {self._follow.max_rejects:.1%}",
            where=f"{store.url}/_rejects"
            + (
                f"; {first['input']}, byte {first['start']:,}: {first['sample'][:80]!r}"
                if first
                else ""
            ),
            why=", ".join(f"{reason}: {count:,}" for reason, count in reasons),
            do="mend the input into a new file, or allow more with --max_rejects "
            f"{min(1.0, 1.5 * dropped / self._read):.2g} and run again: it goes on from there",
        )

    def _note_commits(self, records: Iterable[Record]) -> None:
        for record in records:
            self._last_commit = time.monotonic()
            added = [op for op in record.ops if isinstance(op, Add)]
            self._events.emit(
                "commit",
                record=record.n,
                files=[{"name": f.name, "rows": f.rows, "bytes": f.bytes} for f in added],
            )

    def _heed_signals(self) -> None:
        if self.stopped_by is not None:
            raise Stop

    def _tick(self, file: LineFile) -> None:
        self._heed_signals()
        now = time.monotonic()
        if now - self._last_event < _EVENT_S:
            return
        self._last_event = now
        size = file.size()
        if (size, self._account.to) == self._last_seen:
            return
        self._last_seen = (size, self._account.to)
        self._events.emit(
            "progress",
            input=self._account.name,
            at=self._account.to,
            size=size,
            read=self._read,
            refused=sum(self._dropped.values()),
            files=len(self._writer.log.state.files),
        )

    def _say_waiting(self, file: LineFile, silent_s: float) -> None:
        name = self._account.name
        self._events.emit(
            "wait",
            input=name,
            message=f"{name} has not grown for {silent_s:.0f} s; waiting for more, or for "
            f"{done_marker(file.path).name} with its size (it is complete: --complete; "
            "silence is its end: --until-idle 60s)",
        )


def json_line(row: dict[str, Any]) -> bytes:
    """One line of JSON."""
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"
