"""Take inputs through the steps of preparation, into the shards of a live dataset.

In:    inputs of any kind, steps, a place to run them
Out:   a live dataset of chunks; sealed when every input was read
Keeps: results in the order of the inputs, whatever order they were computed in; a shard, its
       rejects, its signatures and how far they took each input in one record
Never: lets a worker write; decides anything by who was faster

    pieces ─▶ workers (read, filter, chunk, tokenise) ─▶ in order: dedup, fill a shard ─▶ commit
"""

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock import plugins
from penstock.errors import BadConfig, BadInput, TooManyRejects
from penstock.ingest.files import missing
from penstock.ingest.find import expand_inputs
from penstock.ingest.formats import Piece, ReadConfig
from penstock.ingest.inputs import Input, open_input
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.dedup import REASONS, DedupConfig, Index, Signatures
from penstock.prepare.steps import BatchDedup, Decontaminate, Step, steps_as_json
from penstock.prepare.task import TASK, Prepared, reject_line, request
from penstock.shard.batch import BatchVerdicts, find_duplicates
from penstock.shard.columns import schema_of
from penstock.shard.damage import (
    as_content,
    check_input,
    damage_so_far,
    is_expected,
    refuse_changed,
    refuse_nothing_meant,
    refuse_overlap,
)
from penstock.shard.follow import Outcome, Stop, signals_noted
from penstock.shard.generations import Verdicts, choose_generation
from penstock.shard.lines import LinesWriter, shard_lines
from penstock.shard.rows import (
    PreparedRows,
    as_parquet,
    copied,
    cumulated,
    reach,
    text_sizes,
    write_prepared,
)
from penstock.shard.split import Split
from penstock.shard.write import About, Batch, ShardConfig, ShardWriter, finish
from penstock.store.log import Log
from penstock.store.record import Add, Progress, Record
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events
from penstock.work.on_ray import RayPool
from penstock.work.pool import Pool
from penstock.work.run import RunConfig, open_pool
from penstock.work.values import checked_path

_EVENT_S: Final = 0.2
_JUDGE_FROM: Final = 10_000
_MAX_REJECTS: Final = 100_000
"""Rejects in one batch."""
DEDUP: Final = "_dedup"
FEATURES: Final = "_features"
BATCH: Final = "_batch"


Writer = ShardWriter[Any] | LinesWriter


def prepare_dataset(
    inputs: Sequence[str | os.PathLike[str]],
    parquet_dir: str | os.PathLike[str] | None,
    steps: Sequence[Step] = (),
    config: ShardConfig | None = None,
    run: RunConfig | None = None,
    *,
    read: ReadConfig | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    tokens: bool = False,
    output: str | os.PathLike[str] | None = None,
    events: Events | None = None,
) -> Outcome:
    """Take `inputs` through `steps` into the dataset at `parquet_dir`, from where it was left.

    Chunking needs a `tokenizer`; with `tokens` the shards hold the tokens too. With `output` the
    chunks become JSON lines there first, which `penstock shard` may follow; if nobody did, they
    are made into the dataset at the end.
    """
    run, read, config = run or RunConfig(), read or ReadConfig(), config or ShardConfig()
    plugins.load(run.plugins)
    if not (parquet_dir or output):
        raise BadConfig("--parquet_dir is empty", do="name a directory or a bucket address")
    names = expand_inputs([checked_path("--inputs", name) for name in inputs])
    refuse_overlap(
        names, [checked_path("what is made", made) for made in (parquet_dir, output) if made]
    )
    refuse_nothing_meant(names, read)
    if any(isinstance(step, ChunkConfig) for step in steps) and tokenizer is None:
        raise BadConfig(
            "chunking counts tokens, and no tokenizer is given",
            do="name one with --tokenizer; penstock tokenizer train makes one",
        )
    here = run.workers == 1 and run.engine == "local"
    loaded = None if tokenizer is None else Tokenizer.load(tokenizer, ready=here)
    if loaded is not None and not any(isinstance(step, ChunkConfig) for step in steps):
        raise BadConfig(
            "a tokenizer is given, and no step counts tokens",
            do="add a ChunkConfig, or leave the tokenizer out",
        )
    if tokens and loaded is None:
        raise BadConfig("--tokens needs --tokenizer", do="name the tokenizer")
    plan: dict[str, Any] = {"read": read.as_json(), "steps": steps_as_json(steps)}
    items = [name for step in steps if isinstance(step, Decontaminate) for name in step.files]
    if items:
        plan["benchmarks"] = {name: _sha256(Path(name)) for name in items}
    config = replace(
        config,
        text_field=read.text_field,
        tokenizer=loaded.fingerprint if loaded else "",
        token_type=np.dtype(loaded.dtype).name if loaded and tokens else "",
        prepare=plan,
    )
    setup = {
        "read": plan["read"],
        "steps": plan["steps"],
        "inputs": names,
        "tokenizer": loaded if here or tokenizer is None else os.path.abspath(tokenizer),
        "parallel": here,
        "tokens": tokens,
        "plugins": list(run.plugins),
    }
    events = events or Events("chunk")
    if output is not None:
        if any(isinstance(step, BatchDedup) for step in steps):
            raise BadConfig(
                "batch dedup does not write lines",
                do="leave --output out, or choose --dedup near",
            )
        lines = LinesWriter(Path(output), config, names)
        if lines.sealed:
            lines.close()
            refuse_changed(lines.url, lines.state, names, read, "name another --output")
            outcome = Outcome(sealed=True, state=lines.state, url=lines.url)
        else:
            outcome = _run(_Producer(lines, config, run, read, steps, setup, events))
        if outcome.sealed and parquet_dir is not None:
            return shard_lines(Path(output), parquet_dir, config, loaded, tokens, events)
        return outcome
    assert parquet_dir is not None
    generation = choose_generation(parquet_dir, config, names, read)
    log = generation.log
    if log.state.sealed:
        return _already_sealed(log, names, read)
    schema = schema_of(config.token_type, chunks=True)
    writer: ShardWriter[PreparedRows] = ShardWriter(
        log.store,
        config,
        names,
        write_rows=lambda file, rows, order: write_prepared(file, rows, order, schema),
        threads=2,
    )
    if generation.verdicts is not None:
        message = f"what is kept is known from {generation.verdicts.url}"
        events.emit("warn", message=f"{log.store.url}: {message}")
    producer = _Producer(writer, config, run, read, steps, setup, events)
    producer.known = generation.verdicts
    if producer.known is None:
        producer.known = _batch_verdicts(steps, setup, run, read, names, log.store.url)
    outcome = _run(producer)
    if outcome.sealed and isinstance(producer.known, BatchVerdicts):
        producer.known.remove()
    return outcome


def _batch_verdicts(
    steps: Sequence[Step], setup: dict[str, Any], run: RunConfig, read: ReadConfig,
    names: Sequence[str], url: str,
) -> BatchVerdicts | None:  # fmt: skip
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
    first = [
        batch.config() if step is batch else step
        for step in steps
        if not isinstance(step, ChunkConfig)
    ]
    signing = {**setup, "steps": steps_as_json(first), "tokenizer": None, "rows": False}
    pool = open_pool(TASK, signing, run)
    try:
        run_all = pool.map if isinstance(pool, RayPool) else map
        return find_duplicates(
            names,
            read,
            batch.config(),
            pool,
            Path(url) / BATCH,
            run_all,
            ahead=2 * max(run.workers, pool.width) + 2,
        )
    finally:
        pool.close()


def _run(producer: "_Producer") -> Outcome:
    with signals_noted(producer):
        return producer.run()


def _already_sealed(log: Log, names: Sequence[str], read: ReadConfig) -> Outcome:
    refuse_changed(log.store.url, log.state, names, read, "write to a new directory")
    log.store.epoch = log.state.epoch
    log.store.settle()
    finish(log)
    return Outcome(sealed=True, state=log.state, url=log.store.url)


@dataclass(slots=True)
class _Taken:
    """A piece on its way, or the end of an input."""

    input: Input
    piece: Piece | None
    future: "Future[Prepared] | None" = None

    def rest(self) -> "_Taken | None":
        """What is left of a piece that is done, if it became more than it was planned for."""
        if self.piece is None or self.future is None or self.future.exception() is not None:
            return None
        rest = self.future.result().rest
        if rest is None:
            return None
        self.piece, last = self.piece.cut(rest)
        return _Taken(self.input, last)


class _Account:
    """What became of one input's documents within one batch."""

    def __init__(self, input: Input, start: int, content: int | None) -> None:
        self.input = input
        self.start = self.to = start
        self.content = content
        """The sum of what was read from the beginning on; None if an older penstock began."""
        self.kept = self.rows = self.blank = 0
        self.dropped: dict[str, int] = {}

    def move(self, to: int, prepared: Prepared) -> None:
        """Go on to `to`, and count what is blank on the way."""
        passed = np.searchsorted(prepared.blank_at, [self.to, to])
        self.blank += int(passed[1] - passed[0])
        self.to = to

    def close(self, end: str | None) -> Progress:
        proof = self.input.prove(self.to)
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
            rows=self.rows,
        )


class _Producer:
    """One process's work on one dataset."""

    def __init__(
        self, writer: Writer, config: ShardConfig, run: RunConfig, read: ReadConfig,
        steps: Sequence[Step], setup: dict[str, Any], events: Events,
    ) -> None:  # fmt: skip
        self.stopped_by: int | None = None
        self.known: Verdicts | BatchVerdicts | None = None
        """What an earlier generation found of the same documents."""
        self._run_config, self._read_config, self._config = run, read, config
        self._setup = setup
        self._events = events
        self._split = Split.of(config.seed, config.val_fraction)
        self._writer = writer
        state = writer.state
        self._dedup = next((step for step in steps if isinstance(step, DedupConfig)), None)
        self._index = self._rebuild(self._dedup) if self._dedup is not None else None
        self._batch = Batch(PreparedRows())
        self._signatures: list[Signatures] = []
        self._features: list[pa.RecordBatch] = []
        self._account: _Account | None = None
        self._read = sum(known.read for known in state.inputs.values())
        self._bad = damage_so_far(state, steps)
        self._bytes_done = self._redacted = 0
        self._last_event = 0.0

    def run(self) -> Outcome:
        writer, sealed = self._writer, False
        self._events.emit("start", inputs=writer.inputs, dataset=writer.url)
        try:
            pool = open_pool(TASK, self._setup, self._run_config)
        except BaseException:
            writer.close()
            raise
        try:
            for taken in self._in_order(pool):
                self._take(taken)
                if self.stopped_by is not None:
                    raise Stop
            self._judge(at_end=True)
            if self._batch.progress:
                self._submit()
            self._note(writer.seal())
            sealed = True
        except (Stop, BadInput) as error:
            # What is full and stored is right: the next run need not do it again.
            self._note(writer.commit_all())
            if isinstance(error, BadInput):
                raise
        finally:
            pool.close()
            writer.close()
            self._events.emit(
                "end", sealed=sealed, stopped_by=self.stopped_by, redacted=self._redacted
            )
        return Outcome(
            sealed=sealed,
            stopped_by=self.stopped_by,
            state=writer.state,
            url=writer.url,
            redacted=self._redacted,
        )

    def _rebuild(self, dedup: DedupConfig) -> Index:
        """The index as it was at the last commit: the signatures of all that was kept."""
        index = Index(dedup, max_memory_bytes=self._run_config.max_memory_bytes // 4)
        for name, data in self._writer.read_about(DEDUP):
            index.insert(Signatures.from_bytes(data, dedup, name))
        return index

    # The pieces, and their results in order

    def _pieces(self) -> Iterator[_Taken]:
        for number, name in enumerate(self._writer.inputs):
            known = self._writer.state.inputs.get(name)
            if known is not None and known.end is not None:
                continue
            opened = open_input(name, number, self._read_config)
            start = 0
            if known is not None:
                if opened.kind == "jsonl" and "content" not in known.proof:
                    raise BadConfig(
                        "the dataset was begun by an earlier penstock",
                        where=f"{self._writer.url}, {name}",
                        why="it told the places of lines otherwise: source and start would mean "
                        "two things in one dataset",
                        do="write to a new directory, or finish it with the penstock that began it",
                    )
                check_input(opened, known, self._read_config)
                start = known.to
            for piece in opened.pieces(start):
                yield _Taken(opened, piece)
            yield _Taken(opened, None)

    def _in_order(self, pool: Pool) -> Iterator[_Taken]:
        """Pieces with their futures, done, in order; a bounded number and size ahead."""
        run = self._run_config
        most_pieces = 2 * max(run.workers, pool.width) + 2
        most_bytes = run.max_memory_bytes // 16
        waiting: deque[_Taken] = deque()

        def is_too_much(more: _Taken) -> bool:
            return sum(map(_cost, waiting)) + _cost(more) > most_bytes

        def hand_over() -> Iterator[_Taken]:
            taken = self._finished(waiting.popleft())
            rest = taken.rest()
            yield taken
            if rest is None:
                return
            if is_too_much(rest):  # what comes after it may be held, but not computed beside it
                for other in waiting:
                    self._finished(other)
            self._begin(rest, pool)
            waiting.appendleft(rest)

        for taken in self._pieces():
            while waiting and (len(waiting) >= most_pieces or is_too_much(taken)):
                yield from hand_over()
            self._begin(taken, pool)
            waiting.append(taken)
            while waiting and (waiting[0].future is None or waiting[0].future.done()):
                yield from hand_over()
        while waiting:
            yield from hand_over()

    def _begin(self, taken: _Taken, pool: Pool) -> None:
        if taken.piece is not None:
            known = self.known
            gone = known.of(taken.input.name, taken.piece) if known is not None else None
            taken.future = pool.submit(request(taken.piece, gone), taken.piece.data)

    def _finished(self, taken: _Taken) -> _Taken:
        """Wait for a result, but not for ever without a sign of life."""
        while taken.future is not None and not taken.future.done():
            if self.stopped_by is not None:
                raise Stop
            try:
                taken.future.exception(timeout=0.2)
            except TimeoutError:
                self._note(self._writer.beat_if_silent())
        return taken

    # Filling shards

    def _take(self, taken: _Taken) -> None:
        if self._account is None or self._account.input is not taken.input:
            known = self._writer.state.inputs.get(taken.input.name)
            self._account = _Account(taken.input, 0, 0)
            if known is not None:
                content = known.proof.get("content")
                known_content = None if content is None else int(str(content), 16)
                self._account = _Account(taken.input, known.to, known_content)
        if taken.piece is None:
            if isinstance(self.known, Verdicts) and self._account.content is not None:
                self.known.check(taken.input, as_content(self._account.content))
            taken.input.check_end()
            self._close_account("complete")
            taken.input.close()
            self._account = None
            return
        assert taken.future is not None
        found, taken.future = taken.future.result(), None  # else it is held beside the next one
        if isinstance(self.known, BatchVerdicts):
            content = int(found.content.sum(dtype=np.uint64))
            self.known.check(taken.input, taken.piece, content)
        prepared, kept = self._decide(found)
        self._fill(prepared, kept)
        self._account.move(taken.piece.end, prepared)
        for reason, count in prepared.refused.items():
            if is_expected(taken.input.kind, reason):
                continue
            self._bad[reason] = self._bad.get(reason, 0) + count
        self._bytes_done += taken.piece.bytes if prepared.rest is None else 0
        self._redacted += prepared.redacted
        self._judge()
        self._tick(taken)

    def _decide(self, prepared: Prepared) -> tuple[Prepared, Signatures | None]:
        """Let go of what repeats an earlier document: the committer alone knows all of them."""
        if self._dedup is None or self.known is not None:
            return prepared, None
        assert self._index is not None
        found = Signatures.from_bytes(prepared.signatures, self._dedup)
        verdicts = self._index.decide(found)
        if verdicts.kept.all():
            return prepared, found
        events = np.flatnonzero(prepared.reason == 0)
        gone = events[~verdicts.kept]
        reasons = [*prepared.reasons, *(r for r in REASONS[1:] if r not in prepared.reasons)]
        codes = prepared.reason.copy()
        lines = dict(zip(np.flatnonzero(codes).tolist(), prepared.rejects, strict=True))
        assert self._account is not None
        name = self._account.input.name
        rows_at = cumulated(prepared.event_rows)
        sources = prepared.rows.column("source")
        for event, number, of in zip(
            gone.tolist(),
            verdicts.reasons[~verdicts.kept].tolist(),
            verdicts.of[~verdicts.kept].tolist(),
            strict=True,
        ):
            reason = REASONS[number]
            codes[event] = reasons.index(reason) + 1
            lines[event] = reject_line(
                name, int(prepared.start[event]), int(prepared.end[event]), reason,
                sources[int(rows_at[event])].as_py(),
                f"repeats kept document {of}",
            )  # fmt: skip
        keeps = np.repeat(codes[events] == 0, prepared.event_rows[events])
        rows = prepared.rows.filter(
            pa.Array.from_buffers(
                pa.bool_(), len(keeps), [None, pa.py_buffer(np.packbits(keeps, bitorder="little"))]
            )
        )
        event_rows = prepared.event_rows.copy()
        event_rows[gone] = 0
        left = replace(
            prepared,
            rows=rows,
            event_rows=event_rows,
            reason=codes,
            reasons=reasons,
            rejects=[lines[k] for k in sorted(lines)],
        )
        return left, found.take(verdicts.kept)

    def _fill(self, prepared: Prepared, kept: Signatures | None) -> None:
        """Add what came of a piece to the shard; begin another at the document that fills it."""
        events = len(prepared.start)
        is_val = self._split.is_val(prepared.doc_id).astype(np.uint8)
        rows_at = cumulated(prepared.event_rows)
        train_at = cumulated(np.where(is_val, 0, prepared.event_rows))
        bytes_at = text_sizes(prepared.rows)[rows_at]
        stays_at = cumulated(prepared.reason == 0)
        goes_at = cumulated(prepared.reason != 0)
        first = 0
        while first < events:
            held = self._batch.columns
            most = min(
                reach(train_at, first, self._config.rows_per_file - held.train_rows),
                reach(bytes_at, first, self._config.bytes_per_file - held.text_bytes),
                reach(goes_at, first, _MAX_REJECTS - len(self._batch.rejects)),
            )
            last = min(most, events)
            a, b = int(rows_at[first]), int(rows_at[last])
            held.add(
                prepared.rows.slice(a, b - a),
                np.repeat(is_val[first:last], prepared.event_rows[first:last]),
                int(bytes_at[last] - bytes_at[first]),
            )
            self._note_events(prepared, first, last, int(stays_at[first]), b - a)
            if kept is not None:
                self._signatures.append(kept.take(np.arange(stays_at[first], stays_at[last])))
            if prepared.features is not None:
                measured = prepared.features
                starts = np.frombuffer(measured["start"].buffers()[1], np.int64)
                low, high = np.searchsorted(
                    starts[: len(measured)], [prepared.start[first], prepared.end[last - 1]]
                )
                self._features.append(copied(measured, int(low), int(high)))
            if last == most:
                self._submit()
            first = last

    def _note_events(
        self, prepared: Prepared, first: int, last: int, stays: int, rows: int
    ) -> None:
        account = self._account
        assert account is not None
        codes = prepared.reason[first:last]
        totals = np.bincount(codes, minlength=len(prepared.reasons) + 1)
        for reason, count in zip(prepared.reasons, totals[1:].tolist(), strict=True):
            if count:
                account.dropped[reason] = account.dropped.get(reason, 0) + count
        account.kept += int(totals[0])
        account.rows += rows
        if account.content is not None:
            account.content += int(prepared.content[first:last].sum(dtype=np.uint64))
        account.move(int(prepared.end[last - 1]), prepared)
        went = first - stays
        self._batch.rejects += prepared.rejects[went : went + int((codes != 0).sum())]
        self._read += last - first

    def _submit(self) -> None:
        self._close_account()
        if self._signatures and self._dedup is not None:
            joined = Signatures.concat(self._dedup, self._signatures)
            data = joined.to_bytes()
            self._batch.about.append(About(DEDUP, len(joined), lambda: data))
        if self._features:
            table = pa.Table.from_batches(self._features)
            self._batch.about.append(About(FEATURES, len(table), lambda: as_parquet(table)))
        self._signatures, self._features = [], []
        self._writer.submit(self._batch)
        self._note(self._writer.make_room(2))
        self._batch = Batch(PreparedRows())

    def _close_account(self, end: str | None = None) -> None:
        account = self._account
        if account is None:
            return
        if end is not None or account.to > account.start:
            self._batch.progress.append(account.close(end))
        self._account = _Account(account.input, account.to, account.content)

    # Saying what goes on

    def _judge(self, *, at_end: bool = False) -> None:
        """Stop when more is damaged than was allowed."""
        bad = sum(self._bad.values())
        allowed = self._run_config.max_rejects
        if bad <= allowed * self._read or not (at_end or self._read >= _JUDGE_FROM):
            return
        self._note(self._writer.commit_all())
        reasons = sorted(self._bad.items(), key=lambda item: -item[1])
        samples = [json.loads(line) for line in self._batch.rejects]
        first = next((about for about in samples if about["reason"] in self._bad), None)
        raise TooManyRejects(
            f"{bad:,} of {self._read:,} documents were refused, {bad / self._read:.1%}; "
            f"--max_rejects allows {allowed:.1%}",
            where=f"{self._writer.url}/_rejects"
            + (f"; {first.get('source') or first['input']}, {first['start']:,}" if first else ""),
            why=", ".join(f"{reason}: {count:,}" for reason, count in reasons),
            do="mend the inputs, or allow more with --max_rejects "
            f"{min(1.0, 1.5 * bad / self._read):.2g} and run again: it goes on from there",
        )

    def _note(self, records: Iterable[Record]) -> None:
        for record in records:
            added = [op for op in record.ops if isinstance(op, Add)]
            self._events.emit(
                "commit",
                record=record.n,
                files=[{"name": f.name, "rows": f.rows, "bytes": f.bytes} for f in added],
            )

    def _tick(self, taken: _Taken) -> None:
        now = time.monotonic()
        if now - self._last_event < _EVENT_S:
            return
        self._last_event = now
        self._events.emit(
            "progress",
            input=taken.input.name,
            at=self._bytes_done,
            size=taken.input.size,
            read=self._read,
            refused=sum(self._bad.values()),
            redacted=self._redacted,
            files=len(self._writer.state.files),
        )


def _cost(taken: _Taken) -> int:
    return taken.piece.bytes if taken.piece is not None else 0


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        raise missing(path) from None
