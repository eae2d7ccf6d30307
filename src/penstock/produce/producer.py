"""The engine: take inputs through the steps of preparation, into shards or lines.

In:    inputs of any kind, complete or still growing; steps; a writer
Out:   batches for the writer, in order; sealed when every input was read
Keeps: results in one order of all inputs, whatever order they were computed in; a shard, its
       rejects, its signatures and how far they took each input in one record
Never: lets a worker commit; sees a row that a worker keeps; decides anything by who was faster;
       takes silence for the end

    pieces ─▶ workers (read, filter, chunk, tokenise, keep rows) ─▶ in order: dedup, fill a shard
    a full one ─▶ workers (gather, shuffle, encode, store) ─▶ in order: commit
    of several inputs at a time ─▶ turn by turn (ingest.order) ─▶ in order
    nothing new ─▶ commit what is stored, beat, look again
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa

from penstock.arrays import Bools, Int64s, offsets_of, values_of
from penstock.errors import BadInput, InputReplaced, TooManyRejects
from penstock.ingest.inputs import AMONG, Input, Piece, Waiting, kind_of
from penstock.ingest.order import Interleaving, Merge
from penstock.prepare.steps import Step
from penstock.prepare.wire import Kept, Prepared, Request, numbers
from penstock.produce.dedup import Repeats, find_duplicates
from penstock.produce.gather import Workers
from penstock.produce.guards import (
    MIXED_KINDS,
    OWN_INPUTS,
    as_content,
    damage_so_far,
    is_expected,
    resumes_at,
)
from penstock.produce.writer import About, Batch, ShardConfig, Writer
from penstock.store.record import Add, Progress, Record
from penstock.work.run import RunConfig, Stop

_POLL_S: Final = 0.1
_EVENT_S: Final = 0.2
_JUDGE_FROM: Final = 10_000
"""Documents read before the share of rejects can stop a run; at the end it always can."""
_MAX_REJECTS: Final = 100_000
"""Rejects in one batch."""
_LINES_ROWS: Final = 5_000
_LINES_BYTES: Final = 32 << 20
"""What is appended to lines at a time, at the most."""
FEATURES: Final = "_features"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is read, and what is to become of it."""

    inputs: list[str]
    open: Callable[[str, int], Input]
    """Opens an input by its name and number."""
    config: ShardConfig
    run: RunConfig
    setup: dict[str, Any]
    """What the task of a worker is made from; JSON, unless it runs in this process."""
    steps: Sequence[Step] = ()
    is_plain: bool = False
    """Documents are JSON lines that may still grow: no columns of chunks."""
    is_mixed: bool = False
    """Whether inputs are read side by side, not one after the other: all of them are complete."""
    beat_s: float
    shards_ahead: int = 2
    """Shards that are encoded side by side."""
    held_bytes: int
    """Text that shards may hold in memory, if there is more than one."""


class Known(Protocol):
    """Which documents go, where that was found before: by a generation, or by a pass."""

    def of(self, name: str, piece: Piece) -> list[bytes]: ...
    def check_piece(self, opened: Input, piece: Piece, content: int) -> None: ...
    def check_end(self, opened: Input, content: int) -> None: ...
    def remove(self) -> None: ...


@dataclass(slots=True)
class _Taken:
    """A piece on its way, or nothing new, or the end of an input."""

    input: Input
    piece: Piece | Waiting | None
    time: float = 0.0
    """When its first unit comes, or before, where inputs are mixed."""
    future: "Future[Prepared] | None" = None
    kept: Kept | None = None
    """Where its rows stay, if that is a file."""

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return self.piece.bytes if isinstance(self.piece, Piece) else 0

    @property
    def sent_bytes(self) -> int:
        """What travels with it."""
        return len(self.piece.data) if isinstance(self.piece, Piece) else 0

    def rest(self) -> "_Taken | None":
        """What is left of a piece that is done, if it became more than it was planned for."""
        if not isinstance(self.piece, Piece) or self.future is None:
            return None
        rest = None if self.future.exception() is not None else self.future.result().rest
        if rest is None:
            return None
        self.piece, last = self.piece.cut(rest)
        return _Taken(self.input, last, self.time)


class _Account:
    """What became of one input's documents within one batch."""

    def __init__(
        self, input: Input, start: int, content: int | None, bytes_done: int = 0, line: int = 0
    ) -> None:
        self.input = input
        self.line = line
        """Lines, rows or members before it."""
        self.start = self.to = start
        self.bytes_done = bytes_done
        """What this run has read of it, or where in it it is."""
        self.content = content
        """The sum of what was read from the beginning on; None where the log holds none."""
        self.kept = self.rows = self.blank = 0
        self.dropped: dict[str, int] = {}

    def move(self, to: int, prepared: Prepared) -> None:
        """Go on to `to`, and count what is blank on the way."""
        if len(prepared.blank_at):
            passed = np.searchsorted(prepared.blank_at, [self.to, to])
            self.blank += int(passed[1] - passed[0])
        self.to = to

    def next(self) -> "_Account":
        """Its account within the next batch."""
        return _Account(self.input, self.to, self.content, self.bytes_done, self.counted)

    @property
    def counted(self) -> int:
        """Lines, rows or members up to where it stands."""
        return self.line + self.kept + sum(self.dropped.values()) + self.blank

    def close(self, end: str | None, among: str, *, has_rows: bool) -> Progress:
        proof = self.input.prove(self.to)
        if among:
            proof = {**proof, AMONG: among}
        if self.content is not None:
            proof = {**proof, "content": as_content(self.content)}
        return Progress(
            input=self.input.name,
            start=self.start,
            to=self.to,
            read=self.kept + sum(self.dropped.values()),
            kept=self.kept,
            dropped=self.dropped,
            blank=self.blank,
            proof=proof,
            end=end,
            rows=self.rows if has_rows else None,
        )


def _lines(account: _Account, prepared: Prepared, first: int, last: int) -> Int64s:
    """Which lines of their input some events are, counted from 1 as editors do."""
    passed = np.searchsorted(prepared.blank_at, account.to)
    blanks = np.searchsorted(prepared.blank_at, prepared.start[first:last]) - passed
    found: Int64s = np.arange(1, last - first + 1) + blanks + account.counted
    return found


@dataclass(slots=True)
class _Load:
    """What a piece became, and what its events add up to; `_at` are sums before each of them."""

    prepared: Prepared
    rows_at: Int64s
    train_at: Int64s
    bytes_at: Int64s
    goes_at: Int64s
    stays_at: Int64s
    picks: Int64s | None = None
    """Which rows of the piece are left, where some were taken out."""
    has_gaps: bool = False
    """Whether some of the piece's rows were taken out at an earlier turn."""

    @classmethod
    def of(cls, prepared: Prepared, is_val: Bools) -> "_Load":
        goes_at = offsets_of(prepared.reason != 0)
        return cls(
            prepared,
            offsets_of(prepared.event_rows),
            offsets_of(np.where(is_val, 0, prepared.event_rows)),
            offsets_of(prepared.event_bytes),
            goes_at,
            np.arange(len(goes_at)) - goes_at,
        )

    def without(self, first: int, last: int, left: Prepared) -> "_Load":
        """Some of its events of which more go, as `left` says. No row is copied: a piece comes in
        many turns, and what is left of it is copied once."""
        stays = left.reason == 0
        rows = self.rows_at[first : last + 1]
        picks = rows[0] + np.flatnonzero(np.repeat(stays, np.diff(rows)))
        goes_at = offsets_of(~stays)
        return _Load(
            left,
            offsets_of(left.event_rows),
            offsets_of(np.diff(self.train_at[first : last + 1]) * stays),
            offsets_of(np.diff(self.bytes_at[first : last + 1]) * stays),
            goes_at,
            np.arange(len(goes_at)) - goes_at,
            picks,
        )


class Producer:
    """One process's work on one dataset, or on one file of lines."""

    def __init__(
        self, job: Job, writer: Writer, emit: Callable[..., None], known: Known | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        """`sizes` are those of the inputs, where somebody is told how far it is."""
        self.stopped_by: int | None = None
        self.redacted = 0
        """Documents in which secrets or personal data were overwritten."""
        self._job = job
        self._writer = writer
        self._emit = emit
        self._known = known or find_duplicates(
            job.inputs, job.open, job.steps, job.setup, job.run, writer.url
        )
        self._val_rule = job.config.val_rule
        self._repeats = None
        if self._known is None:
            self._repeats = Repeats.among(job.steps, writer, job.run.max_memory_bytes // 4)
        self._features: list[pa.RecordBatch] = []
        self._batch = Batch()
        self._most_rows, self._most_bytes = job.config.rows_per_file, job.config.bytes_per_file
        if writer.dataset is None:  # somebody follows the lines: they come in steps, not in bursts
            self._most_rows = min(self._most_rows, _LINES_ROWS)
            self._most_bytes = min(self._most_bytes, _LINES_BYTES)
        self._accounts: dict[int, _Account] = {}
        """Of the inputs that are being read, by number."""
        self._order: Interleaving | None = None
        self._merge: Merge[tuple[_Taken, _Load | None]] = Merge()
        inputs = writer.state.inputs
        self._read = sum(known.read for known in inputs.values())
        self._bad: dict[str, int] = {}
        if inputs:
            self._bad = damage_so_far(writer.state, job.steps, self._kind_of)
        self._dropped: Counter[str] = Counter()
        for past in inputs.values():
            self._dropped.update(past.dropped)
        self._sizes = dict(sizes or {})
        self._passed = sum(
            size for name, size in self._sizes.items() if name in inputs and inputs[name].end
        )
        """Bytes of the inputs that were read to their end."""
        self._ahead, self._held_bytes = job.shards_ahead - 1, job.held_bytes
        """Shards that may be on their way, and their text, while another is filled."""
        self._tells_lines = job.is_plain and bool(job.steps)
        """Whether rows and rejects say on which line of their input they stand."""
        self._told_short = self._told_by_lines = self._told_whole = False
        self._told_own: set[str] = set()
        self._last_commit = time.monotonic()
        self._last_event = 0.0
        self._last_told: tuple[Any, ...] = ()

    def run(self) -> bool:
        """Read all inputs, from where they were left; whether the end was reached, and sealed."""
        writer, job, sealed = self._writer, self._job, False
        begun = sum(known.to for known in writer.state.inputs.values())
        self._emit("start", inputs=job.inputs, dataset=writer.url, bytes=begun)
        try:
            workers = self._workers = Workers(job.setup, job.run, writer.dataset)
        except BaseException:
            writer.close()
            raise
        if workers.makes_shards:
            self._ahead = workers.ahead
            self._held_bytes = max(self._held_bytes, workers.held_bytes)
        try:
            writer.begin(workers.gather if workers.makes_shards else None)
            for taken in self._in_order():
                self._take(taken)
                if self.stopped_by is not None:
                    raise Stop
            for (taken, load), first, last, is_all in self._merge.finish():
                self._use(taken, load, first, last, is_all=is_all)
            self._judge(at_end=True)
            if self._batch.progress:
                self._submit()
            self._commit_and_tell(writer.seal())
            sealed = True
            if self._known is not None:
                self._known.remove()
        except (Stop, BadInput) as error:
            # What is full and stored is right: the next run need not do it again.
            self._commit_and_tell(writer.commit(0))
            if isinstance(error, BadInput):
                raise
        finally:
            workers.close()
            writer.close()
            self._emit("end", sealed=sealed, stopped_by=self.stopped_by, redacted=self.redacted)
        return sealed

    def _kind_of(self, name: str) -> str:
        return "jsonl" if self._job.is_plain else kind_of(name)[0]

    # The pieces, and their results in order

    def _mixed_pieces(self) -> Iterator[_Taken]:
        """Of all inputs side by side."""
        job, state = self._job, self._writer.state
        order = self._order = Interleaving.of(job.inputs, job.open, job.config.seed)
        starts: dict[int, int] = {}
        for number, opened in enumerate(order.inputs):
            known = state.inputs.get(opened.name)
            if known is None or known.end is None:
                starts[number] = resumes_at(opened, known, self._writer.url)
            if known is not None and known.proof.get(AMONG) != order.digest:
                raise InputReplaced(
                    "the inputs are not those that the dataset was begun with",
                    where=f"{self._writer.url}, {', '.join(job.inputs[:3])}",
                    why="one of them has grown, or has changed before it was read: which document "
                    "comes when depends on the sizes of all",
                    do="bring the old ones back, or write to a new directory",
                )
        for time_of, opened, piece in order.pieces(starts):
            yield _Taken(opened, piece, time_of)

    def _pieces_by_input(self) -> Iterator[_Taken]:
        """Of one input after the other."""
        for number, name in enumerate(self._job.inputs):
            known = self._writer.state.inputs.get(name)
            if known is not None and known.end is not None and not self._job.is_plain:
                continue
            opened = self._job.open(name, number)
            if known is not None and known.end is not None and not opened.more(known.to):
                continue
            for piece in opened.follow(resumes_at(opened, known, self._writer.url)):
                yield _Taken(opened, piece)
            yield _Taken(opened, None)

    def _in_order(self) -> Iterator[_Taken]:
        """Pieces with their futures, done, in order; a bounded number and size ahead."""
        run = self._job.run
        most_pieces = 2 * max(run.workers, self._workers.width) + 2
        most_bytes = run.max_memory_bytes // 16
        waiting: deque[_Taken] = deque()

        is_far = run.engine == "ray"  # then only what is sent along is held here

        def is_too_much(more: _Taken) -> bool:
            sizes = (one.sent_bytes if is_far else one.bytes for one in (*waiting, more))
            return sum(sizes) > most_bytes

        def hand_over() -> Iterator[_Taken]:
            taken = self._finished(waiting.popleft())
            rest = taken.rest()
            yield taken
            if rest is None:
                return
            if is_too_much(rest):  # what comes after it may be held, but not computed beside it
                for other in waiting:
                    self._finished(other)
            self._begin(rest)
            waiting.appendleft(rest)

        pieces = self._mixed_pieces() if self._job.is_mixed else self._pieces_by_input()
        for taken in pieces:
            if isinstance(taken.piece, Waiting):
                while waiting:
                    yield from hand_over()
                self._wait(taken.input, taken.piece)
                continue
            while waiting and (len(waiting) >= most_pieces or is_too_much(taken)):
                yield from hand_over()
            self._begin(taken)
            waiting.append(taken)
            while waiting and (waiting[0].future is None or waiting[0].future.done()):
                yield from hand_over()
        while waiting:
            yield from hand_over()

    def _begin(self, taken: _Taken) -> None:
        if isinstance(taken.piece, Piece):
            known = self._known
            gone = known.of(taken.input.name, taken.piece) if known is not None else None
            request = Request(taken.piece, gone)
            taken.future, taken.kept = self._workers.prepare(request, taken.piece.bytes)

    def _finished(self, taken: _Taken) -> _Taken:
        """Wait for a result, but not for ever without a sign of life."""
        while taken.future is not None and not taken.future.done():
            if self.stopped_by is not None:
                raise Stop
            try:
                taken.future.exception(timeout=0.2)
            except TimeoutError:
                self._show_life()
        return taken

    def _wait(self, silent: Input, waiting: Waiting) -> None:
        """Pass the time until an input that may grow has more."""
        if waiting.message:
            self._emit("wait", input=silent.name, message=waiting.message)
        self._show_life(silent.name, waiting.silent_s)
        self._tick(silent)
        if self.stopped_by is not None:
            raise Stop
        time.sleep(_POLL_S)

    def _show_life(self, name: str = "", silent_s: float = 0.0) -> None:
        """Commit what is stored; say that we are alive if nothing was for a while."""
        self._commit_and_tell(self._writer.commit())
        if time.monotonic() - self._last_commit >= self._job.beat_s:
            self._commit_and_tell(self._writer.beat(name, silent_s))
            self._last_commit = time.monotonic()

    # Filling shards

    def _take(self, taken: _Taken) -> None:
        """Use what a piece became; of several inputs, hold it until its documents come."""
        load: _Load | None = None
        starts = np.zeros(0, np.int64)
        if isinstance(taken.piece, Piece):
            assert taken.future is not None
            found, taken.future = taken.future.result(), None  # else it is held beside the next one
            self._workers.attach(found, taken.kept)
            taken.kept = None
            taken.input.still_there()
            if self._known is not None:
                content = int(found.content.sum(dtype=np.uint64))
                self._known.check_piece(taken.input, taken.piece, content)
            self._tell_by_lines(found)
            self._tell_whole(taken.input, found)
            load, starts = _Load.of(found, self._val_rule.is_val(found.doc_id)), found.start
        if self._order is None:
            self._use(taken, load, 0, len(starts), is_all=True)
            return
        number = taken.input.number
        times = self._order.times(number, starts)
        for (held, part), first, last, is_all in self._merge.add(
            taken.time, number, (taken, load), times
        ):
            self._use(held, part, first, last, is_all=is_all)

    def _use(
        self, taken: _Taken, load: "_Load | None", first: int, last: int, *, is_all: bool
    ) -> None:
        """Fill shards with some documents of a piece; or end an input."""
        opened = taken.input
        if opened.number not in self._accounts:
            self._accounts[opened.number] = self._open_account(opened)
        if load is None:
            self._end(opened)
            return
        found, left = load.prepared, None
        if self._repeats is not None:
            stays = int(load.stays_at[first]), int(load.stays_at[last])
            left = self._repeats.decide(found, (first, last), stays, opened.name)
        if left is None:
            self._fill(load, first, last, opened.number)
        else:
            load.has_gaps = True
            self._fill(load.without(first, last, left), 0, last - first, opened.number)
        if is_all:
            if load.has_gaps and found.rows is not None:
                self._batch.rows.close_gaps(found.rows)
            assert isinstance(taken.piece, Piece)
            account = self._accounts[opened.number]
            account.move(taken.piece.end, found)
            account.bytes_done += taken.piece.bytes if found.rest is None else 0
            self.redacted += found.redacted
            self._tick(opened)

    def _end(self, opened: Input) -> None:
        """An input was read to its end."""
        account = self._accounts.pop(opened.number)
        if self._known is not None and account.content is not None:
            self._known.check_end(opened, account.content)
        opened.still_there()
        opened.check_end()
        self._close_account(account, opened.end)
        self._passed += self._sizes.get(opened.name, 0)
        self._tick(opened)
        opened.close()

    def _open_account(self, opened: Input) -> "_Account":
        known = self._writer.state.inputs.get(opened.name)
        if known is None:
            return _Account(opened, 0, 0 if opened.proves_content else None)
        is_tree = "names" in known.proof  # then it holds the bytes of the files before
        bytes_done = int(known.proof["bytes"]) if is_tree else 0
        if "files" in known.proof:  # or those of all files, where they are shuffled
            bytes_done = bytes_done * known.to // max(1, int(known.proof["files"]))
        if opened.unit == "bytes":
            bytes_done = known.to
        content = known.proof.get("content")
        number = None if content is None else int(str(content), 16)
        seen = known.read + known.blank
        return _Account(opened, known.to, number, bytes_done, seen)

    def _fill(self, load: "_Load", first: int, events: int, number: int) -> None:
        """Add events of a piece, from `first` on, to the shard of the moment.

        Begin another at the document that fills it.
        """
        prepared, stayed = load.prepared, int(load.stays_at[first])
        while first < events:
            held = self._batch.rows
            by_rows = _reach(load.train_at, first, events, self._most_rows - held.train_rows)
            by_bytes = _reach(load.bytes_at, first, events, self._most_bytes - held.held_bytes)
            room = _MAX_REJECTS - len(self._batch.rejects)
            by_rejects = _reach(load.goes_at, first, events, room)
            most = min(by_rows, by_bytes, by_rejects)
            last = min(most, first + _JUDGE_FROM, events)
            a, b = int(load.rows_at[first]), int(load.rows_at[last])
            lines = None
            if self._tells_lines:
                told = _lines(self._accounts[number], prepared, first, last)
                lines = np.repeat(told, prepared.event_rows[first:last])
            if b > a:
                assert prepared.rows is not None, "they are here, or kept"
                held.add(
                    prepared.rows,
                    b - a,
                    int(load.train_at[last] - load.train_at[first]),
                    int(load.bytes_at[last] - load.bytes_at[first]),
                    number,
                    a,
                    None if load.picks is None else load.picks[a:b],
                    lines,
                )
            # another account each time, if a shard was filled
            self._note_events(self._accounts[number], load, first, last)
            if self._repeats is not None:
                stays = load.stays_at[[first, last]] - stayed
                self._repeats.keep(*stays.tolist())
            if prepared.features is not None:
                measured, ends = prepared.features, [prepared.start[first], prepared.end[last - 1]]
                low, high = np.searchsorted(values_of(measured["start"], np.int64), ends)
                # a slice would hold on to all that came with the piece, which was 1 GB where a
                # shard took a hundred pieces to fill
                self._features.append(measured.take(numbers(np.arange(low, high))))
            if last == most:
                if by_bytes == most < by_rows:
                    self._tell_short(held.train_rows)
                self._submit()
            else:
                spare = max(0, self._held_bytes - held.held_bytes)
                self._commit_and_tell(self._writer.commit(self._ahead, spare))
            self._judge()
            first = last

    def _note_events(self, account: _Account, load: "_Load", first: int, last: int) -> None:
        prepared = load.prepared
        went, go = int(load.goes_at[first]), int(load.goes_at[last])
        if go > went:
            codes = prepared.reason[first:last]
            rejects = prepared.rejects[went:go]
            if self._tells_lines:  # before the account moves on
                lines = _lines(account, prepared, first, last)[codes != 0].tolist()
                rejects = [
                    about[:-2] + b', "row": %d}\n' % line
                    for about, line in zip(rejects, lines, strict=True)
                ]
            totals = np.bincount(codes, minlength=len(prepared.reasons) + 1)[1:].tolist()
            for reason, count in zip(prepared.reasons, totals, strict=True):
                if count:
                    self._dropped[reason] += count
                    account.dropped[reason] = account.dropped.get(reason, 0) + count
                    if reason in OWN_INPUTS and prepared.refused:
                        self._tell_own(reason, rejects)
                    if reason in prepared.refused and not is_expected(account.input.kind, reason):
                        self._bad[reason] = self._bad.get(reason, 0) + count
            self._batch.rejects += rejects
        account.kept += last - first - (go - went)
        account.rows += int(load.rows_at[last] - load.rows_at[first])
        if account.content is not None:
            account.content += int(prepared.content[first:last].sum(dtype=np.uint64))
        account.move(int(prepared.end[last - 1]), prepared)
        self._read += last - first

    def _submit(self) -> None:
        for number in sorted(self._accounts):
            self._close_account(self._accounts[number])
            self._accounts[number] = self._accounts[number].next()
        if self._repeats is not None:
            self._batch.about += self._repeats.about()
        if self._features:
            self._batch.about.append(About.of_rows(FEATURES, self._features))
        self._features = []
        self._writer.submit(self._batch)
        self._commit_and_tell(self._writer.commit(self._ahead, self._held_bytes))
        self._batch = Batch()

    def _close_account(self, account: _Account, end: str | None = None) -> None:
        if end is not None or account.to > account.start:
            among = "" if self._order is None else self._order.digest
            has_rows = not self._job.is_plain or self._tells_lines
            self._batch.progress.append(account.close(end, among, has_rows=has_rows))

    # Saying what goes on

    def _judge(self, *, at_end: bool = False) -> None:
        """Stop when more is damaged than was allowed."""
        bad = sum(self._bad.values())
        allowed = self._job.run.max_rejects
        if bad <= allowed * self._read or not (at_end or self._read >= _JUDGE_FROM):
            return
        self._commit_and_tell(self._writer.commit(0))
        self._writer.keep_stopped(self._batch.rejects)
        reasons = sorted(self._bad.items(), key=lambda item: -item[1])
        where = self._writer.rejects_url
        for about in map(json.loads, self._batch.rejects):
            if about["reason"] in self._bad:
                unit = "byte " if self._kind_of(about["input"]) == "jsonl" else ""
                where += f"; {about.get('source') or about['input']}, {unit}{about['start']:,}"
                where += f": {about['sample'][:80]!r}"
                break
        raise TooManyRejects(
            f"{bad:,} of {self._read:,} documents were refused, {bad / self._read:.1%}; "
            f"--max_rejects allows {allowed:.1%}",
            where=where,
            why=", ".join(f"{reason}: {count:,}" for reason, count in reasons),
            do=("name the field that holds the text with --text_field, " if self._bad.get("no_text")
                else "fix the inputs, ")
            + "or allow more with --max_rejects "
            f"{min(1.0, 1.5 * bad / self._read):.2g} and run again: it resumes from there",
        )  # fmt: skip

    def _commit_and_tell(self, records: Iterable[Record]) -> None:
        """Let the writer commit: it does so record by record, as this asks for the next."""
        for record in records:
            self._last_commit = time.monotonic()
            added = [op for op in record.ops if isinstance(op, Add)]
            self._emit(
                "commit",
                record=record.n,
                files=[{"name": f.name, "rows": f.rows, "bytes": f.bytes} for f in added],
            )

    def _tell_by_lines(self, found: Prepared) -> None:
        """Say once that a language is cut without its grammar."""
        if found.by_lines and not self._told_by_lines:
            self._told_by_lines = True
            self._emit(
                "warn",
                message=f"cut by lines and indentation: {', '.join(found.by_lines)}; grammars are "
                "not installed, which pip install 'penstock[code]' brings",
            )

    def _tell_own(self, reason: str, rejects: Sequence[bytes]) -> None:
        """Say once that a file within another input is refused that could be one by itself."""
        if reason in self._told_own:
            return
        self._told_own.add(reason)
        found = (about for about in map(json.loads, rejects) if about["reason"] == reason)
        source = next(found)["source"]
        do = "give it as an input of its own, beside this one"
        if "#" in source:
            do = "unpack what it is in, and give it as an input of its own"
        self._emit(
            "warn",
            message=f"refused as {reason}: {source}, perhaps others; within another input it is "
            f"not opened: {do}",
        )

    def _tell_whole(self, opened: Input, found: Prepared) -> None:
        """Say once that JSON lines are one document, since they lie among other files."""
        if found.whole_lines and not self._told_whole and opened.kind in MIXED_KINDS:
            self._told_whole = True
            self._emit(
                "warn",
                message=f"one document as it stands: {found.whole_lines}, perhaps others; JSON "
                "lines are read by line where the file is named as an input, or its directory "
                "holds nothing but JSONL and parquet files; in an archive they never are: unpack "
                "it",
            )

    def _tell_short(self, rows: int) -> None:
        """Say once that shards have not as many rows as were asked for, and why."""
        if not self._told_short and self._writer.dataset is not None:
            self._told_short = True
            self._emit("warn", message=self._job.config.why_short(rows))

    def _how_far(self, reading: Input) -> tuple[int, int | None]:
        """Bytes that were read of all inputs, and those that they have, as they lie on the disk."""
        account = self._accounts.get(reading.number)
        if reading.name not in self._sizes:
            return 0 if account is None else account.bytes_done, reading.size
        if self._job.is_plain and reading.size is not None:  # it may have grown
            self._sizes[reading.name] = reading.size
        at = self._passed
        for one in self._accounts.values():
            size = self._sizes.get(one.input.name, 0)
            within = one.input.passed
            if within is None:
                within = size * one.bytes_done // max(1, one.input.size or size)
            at += min(within, size)
        return at, sum(self._sizes.values())

    def _tick(self, reading: Input) -> None:
        now = time.monotonic()
        if now - self._last_event < _EVENT_S:
            return
        at, size = self._how_far(reading)
        told = (reading.name, at, size)
        if told == self._last_told:
            return
        self._last_event, self._last_told = now, told
        self._emit(
            "progress",
            input=reading.name,
            at=at,
            size=size,
            read=self._read,
            refused=self._dropped.total(),
            reasons={reason: count for reason, count in self._dropped.items() if count},
            redacted=self.redacted,
            files=len(self._writer.state.files),
        )


def _reach(sums: Int64s, first: int, events: int, room: int) -> int:
    """How many events to take from `first` on so that `room` is used up; more than there are if
    it is not."""
    full = sums[first] + max(room, 1)
    # of the many turns of mixed inputs hardly one fills a shard, and a search costs 3 µs
    return events + 1 if sums[events] < full else int(sums.searchsorted(full))
