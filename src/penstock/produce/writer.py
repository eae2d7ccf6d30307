"""Write documents into the shards of a live dataset, exactly once.

In:    which rows come in the order of the inputs, and how far they took each input
Out:   shards, their token files, validation parts and rejects in the store; one log record for
       each shard
Keeps: where it encodes itself, `threads` shards in memory, each of at most `bytes_per_file` text
       and, with --tokens, its ids (2 or 4 bytes each); one validation part at the seal; commits in
       input order
Never: seals after an exception, makes a shard visible before all of it is durable; touches a row
       where workers have them

    fill ─▶ encode (threads, or workers) ─▶ store, fsync ─▶ commit add + progress ─▶ fill …
"""

import contextlib
import functools
import hashlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import penstock
from penstock.arrays import offsets_of
from penstock.errors import BadConfig, ShardMismatch, StoreFailed
from penstock.options import MOST, check_numbers, differences, show_bytes
from penstock.prepare.rows import ROW_BYTES
from penstock.produce.columns import (
    ShardRows,
    ValRule,
    as_parquet,
    has_chat_columns,
    has_chunk_columns,
    open_parquet,
    schema_for,
)
from penstock.produce.gather import Dataset, Filed, Gather, Gathered, Layout, store_shard
from penstock.store.log import COMPLETE, Log, LogState, LogWriter
from penstock.store.record import (
    Add,
    Beat,
    Op,
    Progress,
    Record,
    Retire,
    Seal,
    Split,
    differs,
    encode,
    record_name,
    token_name,
)
from penstock.store.store import AlreadyThere, Store, Stored, Unsure, read_back
from penstock.tokenize.token_file import (
    LossSpans,
    TokenPieces,
    Tokens,
    read_token_file,
    write_token_pieces,
)
from penstock.work.events import Events

STOPPED: Final = "_rejects/stopped.jsonl"
"""Rejects of a run that was stopped for their number; not part of the dataset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """What decides the bytes of a dataset. It is in the log; a restart must bring the same."""

    rows_per_file: int = 50_000
    """Rows of a training shard: documents, or chunks up to the next whole document."""

    bytes_per_file: int = 128 << 20
    """Text of a shard, which is held in memory: it closes there if its rows do not come first."""

    val_fraction: float = 0.01
    """Share of source documents that are set aside for validation."""

    seed: int = 0
    """Seed of the shuffle within a shard and of the choice for validation."""

    text_field: str = "text"
    """The field of a JSON line that holds the document."""

    max_line_bytes: int = 64 << 20
    """A longer line is a reject; it is never held in memory."""

    tokenizer: str = ""
    """Fingerprint of the tokenizer that counts the tokens of each document, if one does."""

    token_type: str = ""
    """uint16 or uint32 where shards have token files."""

    prepare: dict[str, Any] = field(default_factory=dict)
    """How documents were read, filtered and cut, where they were."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        for name, least, most in (
            ("rows_per_file", 1, 10_000_000),
            ("bytes_per_file", 1, 1 << 30),
            ("val_fraction", 0, 1),
            ("seed", 0, 2**63 - 1),
            ("max_line_bytes", 1, 1 << 29),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise BadConfig(f"--{name} is {value}", do=f"choose from {least} to {most:,}")
        if any("\ud800" <= letter <= "\udfff" for letter in self.text_field):
            raise BadConfig("--text_field is not UTF-8", do="name the field that holds the text")
        if not self.text_field:
            raise BadConfig("--text_field is empty", do="name the field that holds the text")
        if self.token_type not in ("", "uint16", "uint32"):
            raise BadConfig(f"token_type is {self.token_type!r}", do="choose uint16 or uint32")
        if self.token_type and not self.tokenizer:
            raise BadConfig("--tokens needs --tokenizer", do="name the tokenizer")

    @property
    def val_rule(self) -> ValRule:
        """Which documents are for validation."""
        return ValRule.of(self.seed, self.val_fraction)

    def why_short(self, rows: int) -> str:
        """Why a shard has not as many rows as were asked for, in words."""
        return (
            f"a shard has {rows:,} rows, not the {self.rows_per_file:,} of --rows_per_file: its "
            f"text has reached --bytes_per_file {show_bytes(self.bytes_per_file)}, since it is "
            "held in memory"
        )


@dataclass(slots=True)
class About:
    """A file beside the shard that says something of its inputs."""

    folder: str
    rows: int
    as_bytes: Callable[[], bytes]

    @classmethod
    def of_rows(cls, folder: str, batches: Sequence[pa.RecordBatch]) -> "About":
        """These rows as a parquet file."""
        table = pa.Table.from_batches(batches)
        return cls(folder, len(table), lambda: as_parquet(table))


@dataclass(slots=True)
class Batch:
    """One shard on its way: its rows, its rejects, and how far they took each input."""

    rows: ShardRows = field(default_factory=ShardRows)
    progress: list[Progress] = field(default_factory=list)
    rejects: list[bytes] = field(default_factory=list)
    """Lines of JSON."""
    about: list[About] = field(default_factory=list)


StoredFiles = list[tuple[Add, Stored]]
"""What was stored for one record, and what the record says of it."""


Gatherer = Callable[[Gather], "Future[Gathered]"]
"""Has the shard made elsewhere, of rows that are there."""


class Writer(Protocol):
    """Takes batches in order: `ShardWriter` into a dataset, `LinesWriter` into JSON lines."""

    @property
    def url(self) -> str: ...
    @property
    def dataset(self) -> Dataset | None: ...
    @property
    def rejects_url(self) -> str: ...
    @property
    def state(self) -> LogState: ...
    def begin(self, gather: "Gatherer | None" = None) -> None: ...
    def read_about(self, folder: str) -> Iterator[tuple[str, bytes]]: ...
    def submit(self, batch: Batch) -> None: ...
    def commit(self, ahead: int = MOST, held_bytes: int = MOST) -> Iterator[Record]: ...
    def beat(self, name: str = "", silent_s: float = 0.0) -> Iterator[Record]: ...
    def keep_stopped(self, rejects: Sequence[bytes]) -> None: ...
    def seal(self) -> Iterator[Record]: ...
    def close(self) -> None: ...


class ShardWriter:
    """Takes batches in order, encodes them side by side, commits them in order."""

    def __init__(
        self,
        store: Store,
        config: ShardConfig,
        inputs: Sequence[str],
        *,
        threads: int = 2,
    ) -> None:
        self.config = config
        self.inputs = list(inputs)
        has_chunks = has_chunk_columns(config.prepare)
        self._schema = schema_for(config.prepare)
        # Arrow's string offsets are 32 bits, and each row of a group holds the name of its input
        longest = max((len(name.encode()) for name in inputs), default=0)
        self.layout = Layout(
            prepare=config.prepare,
            tokenizer=config.tokenizer,
            token_type=config.token_type,
            seed=config.seed,
            val_fraction=config.val_fraction,
            beside_row=0 if has_chunks else longest - ROW_BYTES,
        )
        self.url = store.url
        self.rejects_url = f"{store.url}/_rejects"
        self._store = store
        self.log = LogWriter.take(
            store,
            asdict(config),
            inputs,
            writer=f"penstock {penstock.__version__}",
            tokenizer=config.tokenizer or None,
            check=lambda state: check_begun(store, state, config, inputs),
        )
        store.remove(STOPPED)
        store.tag = secrets.token_hex(8)
        self._gather: Gatherer | None = None
        state = self.log.state
        self._next = {split: len(state.split(split)) for split in ("train", "val", "rejects")}
        self._next_about = len(state.split("about"))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-encode")
        self._pending: deque[tuple[Batch, Future[StoredFiles]]] = deque()

    @property
    def state(self) -> LogState:
        """What is committed."""
        return self.log.state

    @property
    def dataset(self) -> Dataset:
        """What workers are told of it."""
        record = record_name(self.log.state.n)
        return Dataset(self.layout, self._store, self.config.bytes_per_file, record)

    def begin(self, gather: Gatherer | None = None) -> None:
        """Have shards made by `gather`, if that is not done here."""
        self._gather = gather

    def read_about(self, folder: str) -> Iterator[tuple[str, bytes]]:
        """The files beside earlier shards, by folder, proven by their hashes; with their names."""
        for file in self.log.state.split("about"):
            if file.name.startswith(folder + "/"):
                yield file.name, self._read_whole(file)

    def commit(self, ahead: int = MOST, held_bytes: int = MOST) -> Iterator[Record]:
        """Commit in order what is stored by now, and wait for the rest until at most `ahead`
        batches are left, of at most so many bytes."""
        while self._pending:
            batch, future = self._pending[0]
            if (
                not future.done()
                and len(self._pending) <= ahead
                and sum(batch.rows.held_bytes for batch, _ in self._pending) <= held_bytes
            ):
                return
            files = future.result()
            record = self.log.commit([*(add for add, _ in files), *batch.progress])
            self._pending.popleft()
            for _, stored in files:
                remove_shadowed(self.log, stored)
            del batch, future  # else its rows are held beside those of the next one
            yield record

    def submit(self, batch: Batch) -> None:
        """Hand over a batch that is full, or the last one."""
        rows, number, names = batch.rows, self._next["train"], dict[str, str]()
        if rows.train_rows:
            names["train"] = f"shard_{number:05d}.parquet"
        if rows.rows > rows.train_rows:
            names["val"] = f"_val/val_{self._next['val']:05d}.parquet"
        if batch.rejects:
            names["rejects"] = f"_rejects/rejects_{self._next['rejects']:05d}.jsonl"
        for split in names:
            self._next[split] += 1
        about = []
        for file in batch.about:
            about.append(f"{file.folder}/{self._next_about:06d}")
            self._next_about += 1
        shard = Gather(number, names.get("train", ""), names.get("val", ""), rows.by_input)
        beside = names.get("rejects", ""), about
        future: Future[StoredFiles]
        if self._gather is None or not rows.rows:
            future = self._threads.submit(self._store_batch, batch, shard, *beside)
        else:
            future = Future()
            made = self._gather(shard)
            # what it calls must not hold `made`: a cycle would keep the rows until it is collected
            store = functools.partial(self._store_batch, batch, shard, *beside)
            made.add_done_callback(
                lambda found: self._go_on(future, functools.partial(store, found))
            )
        self._pending.append((batch, future))

    def _go_on(self, done: "Future[StoredFiles]", store: Callable[[], StoredFiles]) -> None:
        """A shard was made elsewhere: store what is left of its batch."""

        def run() -> None:
            try:
                done.set_result(store())
            except BaseException as error:
                done.set_exception(error)

        try:
            self._threads.submit(run)
        except RuntimeError:  # the writer was closed, and nobody waits
            done.cancel()

    def beat(self, name: str = "", silent_s: float = 0.0) -> Iterator[Record]:
        """Say that the writer is alive, and how long an input that it waits for has been silent."""
        yield self.log.commit([Beat(name, int(silent_s))])

    def keep_stopped(self, rejects: Sequence[bytes]) -> None:
        """Leave the rejects of a run that is stopped for their number beside the dataset."""
        if rejects:
            with contextlib.suppress(AlreadyThere, Unsure):  # of a writer beside us: as good
                self._store.create(STOPPED, b"".join(rejects))

    def seal(self) -> Iterator[Record]:
        """Commit what is left, publish the validation shard, end the dataset."""
        yield from self.commit(0)
        self._store.clear_tagged()  # before the seal: a run that finds that looks for nothing
        parts = self.log.state.split("val")
        rows = sum(part.rows for part in parts)
        stored = self._put("val_shard.parquet", lambda file: self._join(parts, file))
        counted = sum(part.tokens or 0 for part in parts) if self.config.tokenizer else None
        val = added("val", stored, rows, counted)
        files = [(val, stored)]
        retired = [part.name for part in parts]
        if self.config.token_type:
            beside = [file for part in parts if (file := self.log.state.tokens_of(part))]
            pieces = self._join_tokens(beside)
            stored = self._put_tokens("val_shard.parquet", pieces)
            files.append((added("tokens", stored, rows, counted, pieces.xxh3), stored))
            retired += [file.name for file in beside]
        train = self.log.state.split("train")
        ops: list[Op] = [*map(Retire, retired), *(add for add, _ in files)]
        ops.append(
            Seal(
                shards=len(train),
                rows=val.rows + sum(shard.rows for shard in train),
                bytes=val.bytes + sum(shard.bytes for shard in train),
                head=self.log.state.head,
            )
        )
        yield self.log.commit(ops)
        for _, stored in files:
            remove_shadowed(self.log, stored)
        finish(self.log)

    def close(self) -> None:
        """Let go; whatever is not committed is done again by the next writer."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _store_batch(
        self, batch: Batch, shard: Gather, rejects: str, about: list[str],
        made: "Future[Gathered] | None" = None,
    ) -> StoredFiles:  # fmt: skip
        filed: list[Filed] = []
        if made is not None:
            filed = self._received(made, shard)
        elif batch.rows.rows:
            filed = store_shard(shard, self.layout, self._put)
        self._check_rows(batch, filed)
        files = [
            (added(file.split, file.stored, file.rows, file.tokens, file.xxh3), file.stored)
            for file in filed
        ]
        if batch.rejects:
            stored = self._put(rejects, lambda file: file.writelines(batch.rejects))
            files.append((added("rejects", stored, len(batch.rejects)), stored))
        for name, beside in zip(about, batch.about, strict=True):
            data = beside.as_bytes()
            stored = self._put(name, lambda file, data=data: file.writelines([data]))  # type: ignore[misc]
            files.append((added("about", stored, beside.rows), stored))
        return files

    def _check_rows(self, batch: Batch, filed: Sequence[Filed]) -> None:
        """Refuse a shard that has not the rows that were decided on."""
        train, val = (sum(f.rows for f in filed if f.split == split) for split in ("train", "val"))
        wanted = batch.rows.train_rows, batch.rows.rows - batch.rows.train_rows
        if (train, val) != wanted:
            raise StoreFailed(
                f"a shard was made of {train:,} and {val:,} rows",
                where=self.url,
                why=f"{wanted[0]:,} for training and {wanted[1]:,} for validation were decided on: "
                "an input has changed while it was read, or a worker read it anew",
                do="run the same command again: nothing committed is lost",
            )

    def _received(self, made: "Future[Gathered]", shard: Gather) -> list[Filed]:
        """The files of a shard that was made elsewhere, stored."""
        try:
            found = made.result()
            if found.data is None and all(map(self._has, found.files)):
                return found.files
            if found.data is None:  # it lies in a copy of this directory, on another machine
                assert self._gather is not None
                found = self._gather(replace(shard, is_handed_over=True)).result()
            if found.data is None:
                raise StoreFailed(
                    "a shard that a worker has stored is not there",
                    where=self.url,
                    why="somebody has removed it, or another writer has taken over",
                    do="run the same command again: nothing committed is lost",
                )
        except StoreFailed:
            self.log.heed_fence()
            raise
        return [
            replace(file, stored=self._put(file.stored.name, lambda f, data=data: f.write(data)))  # type: ignore[misc]
            for file, data in zip(found.files, found.contents(), strict=True)
        ]

    def _has(self, file: Filed) -> bool:
        return self._store.size(file.stored.name) == file.stored.size

    def _put_tokens(self, name: str, pieces: TokenPieces) -> Stored:
        """Store the token file of a shard of that name."""
        made_with, kind = self.config.tokenizer, self.config.token_type
        return self._put(
            token_name(name), lambda file: write_token_pieces(file, pieces, made_with, kind)
        )

    def _read_whole(self, file: Add) -> bytes:
        with open_proven(self._store, file) as opened:
            return opened.read()

    def _put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        try:
            return self._store.put(name, write)
        except StoreFailed:
            self.log.heed_fence()
            raise

    def _join(self, parts: Sequence[Add], file: IO[bytes]) -> None:
        with open_parquet(file, self._schema) as writer:
            for part in parts:
                with self._open_part(part) as opened:
                    reader = pq.ParquetFile(opened)
                    for group in range(reader.num_row_groups):
                        writer.write_table(
                            reader.read_row_group(group, use_threads=False).cast(self._schema)
                        )

    def _join_tokens(self, parts: Sequence[Add]) -> TokenPieces:
        """The tokens of all parts, each read twice: how many there are comes before the ids."""

        def read(part: Add) -> Tokens:
            with self._open_part(part) as opened:
                data = opened.read_buffer()  # type: ignore[attr-defined]  # Arrow's own file
            return read_token_file(
                data, rows=part.rows, vocab_size=1 << 32, tokenizer=self.config.tokenizer
            )

        lengths, documents = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        spans, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
        for part in parts:
            tokens = read(part)
            lengths.append(np.diff(tokens.at))
            documents.append(np.zeros(0, np.uint64) if tokens.doc_id is None else tokens.doc_id)
            if tokens.spans is not None:
                spans.append(tokens.spans.values.copy())
                counts.append(np.diff(tokens.spans.at))
        values = (read(part).values for part in parts)
        held = None
        if has_chat_columns(self.config.prepare):
            held = LossSpans(np.concatenate(spans), offsets_of(np.concatenate(counts)))
        return TokenPieces(np.concatenate(lengths), np.concatenate(documents), values, held)

    def _open_part(self, part: Add) -> IO[bytes]:
        """A validation part, proven first: the seal gives its rows a new hash."""
        try:
            return open_proven(self._store, part)
        except ShardMismatch:
            self.log.heed_fence()  # a newer writer may have sealed, and removed the parts
            raise


def added(
    split: Split, stored: Stored, rows: int, tokens: int | None = None, xxh3: str = ""
) -> Add:
    """What the log says of a file that was stored."""
    return Add(stored.name, stored.sha256, stored.size, rows, tokens, split, xxh3)


def open_proven(store: Store, file: Add) -> IO[bytes]:
    """A file of a dataset, after all of it was hashed and is what the log says."""
    try:
        opened = store.open(file.name)
    except FileNotFoundError:
        raise differs(file, store.url, "it is missing") from None
    digest = hashlib.sha256()
    while block := opened.read(1 << 20):
        digest.update(block)
    if digest.hexdigest() == file.sha256:
        opened.seek(0)
        return opened
    opened.close()
    found = digest.hexdigest()[:12]
    raise differs(file, store.url, f"sha256 {found}…, the log says {file.sha256[:12]}…")


def remove_shadowed(log: Log, stored: Stored) -> None:
    """Remove what a dead writer left under a name that its successor then could not use.

    Safe only once that one has committed in its epoch: no older writer ever will.
    """
    earlier_writers = log.state.epoch > 1
    if earlier_writers and stored.shadowed and stored.shadowed not in log.state.files:
        log.store.remove(stored.shadowed)


def tell_earlier(log: LogWriter, events: Events) -> None:
    """Say whose dataset was taken over: a warning if that writer may still live, else a notice."""
    if log.earlier is not None:
        events.emit("warn" if log.earlier.may_live else "wait", message=str(log.earlier))


def check_begun(store: Store, state: LogState, config: ShardConfig, inputs: Sequence[str]) -> None:
    """Refuse a directory that is not ours, and to go on under other options or inputs."""
    if state.n < 0:
        for name in ("shard_00000.parquet", "val_shard.parquet", COMPLETE):
            if store.size(name) is not None and store.size(record_name(0)) is None:
                raise BadConfig(
                    f"{store.url} holds {name}, and no log that names it",
                    where=store.url,
                    why="another program wrote it; a dataset has a directory of its own",
                    do="write to a new directory",
                )
    if state.opened is None or not (state.inputs or state.files):
        return  # nothing was read yet: there is nothing that other options could spoil
    before, now = as_begun(state.opened.config), asdict(config)
    differing = differences(before, now)
    if differing:
        raise BadConfig(
            "the dataset was begun with other options",
            where=store.url,
            why="; ".join(differing),
            do="give the same options, or write to a new directory",
        )
    shards = [*state.split("train"), *state.split("val")]
    if config.token_type and state.sealed is None and not all(map(state.tokens_of, shards)):
        raise BadConfig(
            "the dataset was begun by an earlier penstock",
            where=store.url,
            why="its shards hold their tokens in a column, and have no token files",
            do="write to a new directory, or finish it with the penstock that began it",
        )
    is_fixed = is_shuffled(now) and state.sealed is None
    begun = state.opened.inputs if is_fixed else inputs_begun(state)
    if differing := input_difference(begun, inputs, is_fixed=is_fixed):
        raise BadConfig(
            "the dataset was begun with other inputs",
            where=store.url,
            why=differing[0],
            do=SAME_INPUTS
            if is_fixed
            else "give the same inputs in the same order; new ones go at the end",
        )


SAME_INPUTS: Final = (
    "give the same inputs in the same order: which document comes when depends on all of them; "
    "with --order path new ones may go at the end"
)


def as_begun(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a dataset was begun with.

    One that its penstock did not know has its default there, but inputs were not shuffled.
    """
    known = {**asdict(ShardConfig()), **config}
    prepare = dict(known["prepare"])
    if "read" in prepare:
        prepare["read"] = {"order": "path", **prepare["read"]}
    return {**known, "prepare": prepare}


def is_shuffled(config: Mapping[str, Any]) -> bool:
    """Whether a dataset of these options has its inputs mixed, and their files shuffled."""
    order: Any = config["prepare"].get("read", {}).get("order")
    return bool(order == "shuffled")


def inputs_begun(state: LogState) -> list[str]:
    """The inputs of which something was read, as they were given."""
    return [name for name in (state.opened.inputs if state.opened else ()) if name in state.inputs]


def input_difference(
    before: Sequence[str], now: Sequence[str], *, is_fixed: bool = False
) -> list[str]:
    """The first input that is another one, if there is one; new ones only count if it `is_fixed`.

    >>> input_difference(["a", "b"], ["a"]), input_difference(["a"], ["a", "b"])
    (["input 2 was 'b', and is not given now"], [])
    """
    for number, name in enumerate(before):
        if number >= len(now):
            return [f"input {number + 1} was {name!r}, and is not given now"]
        if now[number] != name:
            return [f"input {number + 1} was {name!r}, and is {now[number]!r} now"]
    if is_fixed and len(now) > len(before):
        return [f"input {len(before) + 1} is {now[len(before)]!r}, and was not given before"]
    return []


def finish(log: Log) -> None:
    """What follows a seal: the marker for people and simple readers, and no litter. Repeatable."""
    seal = encode(log.record(log.state.n))
    try:
        log.store.create(COMPLETE, seal)
    except (AlreadyThere, Unsure):
        if read_back(log.store, COMPLETE) != seal:
            log.store.remove(COMPLETE)
            log.store.create(COMPLETE, seal)
    for name in log.state.retired:
        log.store.remove(name)
