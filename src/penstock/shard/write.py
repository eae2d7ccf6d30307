"""Write documents into the shards of a live dataset, exactly once.

In:    `Columns` filled in input order, and how far that took each input
Out:   shards, validation parts and rejects in the store; one log record for each shard
Keeps: `threads` shards in memory, each of at most `bytes_per_file` text; commits in input order
Never: seals after an exception, makes a shard visible before all of it is durable

    fill ─▶ encode (threads) ─▶ store, fsync ─▶ commit add + progress ─▶ fill …
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow.parquet as pq

import penstock
from penstock.errors import BadConfig, ShardMismatch, StoreFailed
from penstock.shard.columns import open_parquet, schema_of, shuffled
from penstock.store.backends import AlreadyThere, Store, Stored, Unsure, read_back
from penstock.store.log import BEAT_S, COMPLETE, Log, LogState, LogWriter
from penstock.store.record import (
    Add,
    Beat,
    Op,
    Progress,
    Record,
    Retire,
    Seal,
    Split,
    encode,
    record_name,
)
from penstock.work.values import check_numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardConfig:
    """What decides the bytes of a dataset. It is in the log; a restart must bring the same."""

    rows_per_file: int = 50_000
    """Training documents in a shard."""

    bytes_per_file: int = 128 << 20
    """Text in a shard: it closes at whichever of the two comes first, so that memory is bounded."""

    val_fraction: float = 0.01
    """Share of source documents that are set aside for validation."""

    seed: int = 0
    """Of the shuffle within a shard and of the choice for validation."""

    text_field: str = "text"
    """The field of a JSON line that holds the document."""

    max_line_bytes: int = 64 << 20
    """A longer line is a reject; it is never held in memory."""

    tokenizer: str = ""
    """Fingerprint of the tokenizer that counts the tokens of each document, if one does."""

    token_type: str = ""
    """uint16 or uint32 where shards hold the tokens too."""

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


class Rows(Protocol):
    """The rows of one shard on its way, in memory."""

    @property
    def rows(self) -> int: ...
    @property
    def train_rows(self) -> int: ...
    @property
    def is_val(self) -> np.ndarray[Any, np.dtype[np.uint8]]: ...
    def clear(self) -> None: ...


R = TypeVar("R", bound=Rows)
Order = np.ndarray[Any, np.dtype[np.int64]]
WriteRows = Callable[[IO[bytes], Any, Order], int | None]
"""Writes the rows of that order as one parquet file; returns their tokens, if those are known."""


@dataclass(slots=True)
class About:
    """A file beside the shard that says something of its inputs."""

    folder: str
    rows: int
    as_bytes: Callable[[], bytes]


@dataclass(slots=True)
class Batch(Generic[R]):
    """One shard on its way: its rows, its rejects, and how far they took each input."""

    columns: R
    progress: list[Progress] = field(default_factory=list)
    rejects: list[bytes] = field(default_factory=list)
    """Lines of JSON."""
    about: list[About] = field(default_factory=list)


@dataclass(slots=True)
class _Files:
    """What was stored for one batch."""

    stored: list[tuple[Split, Stored, int]]
    """With the rows of each."""
    tokens: dict[str, int | None]
    """By file name; None where nobody counted."""


class ShardWriter(Generic[R]):
    """Takes batches in order, encodes them side by side, commits them in order."""

    def __init__(
        self,
        store: Store,
        config: ShardConfig,
        inputs: Sequence[str],
        *,
        write_rows: WriteRows,
        threads: int = 2,
    ) -> None:
        self.config = config
        self.inputs = list(inputs)
        self._write_rows = write_rows
        self._store = store
        self.log = LogWriter.take(
            store,
            asdict(config),
            inputs,
            writer=f"penstock {penstock.__version__}",
            tokenizer=config.tokenizer or None,
            check=lambda state: check_begun(store, state, config, inputs),
        )
        state = self.log.state
        self._next = {split: len(state.split(split)) for split in ("train", "val", "rejects")}
        self._next_about = len(state.split("about"))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-encode")
        self._pending: deque[tuple[Batch[R], Future[_Files]]] = deque()
        self._last_commit = time.monotonic()
        self.spare: list[R] = []
        """Rows of batches that were committed, to be filled again."""

    @property
    def state(self) -> LogState:
        """What is committed."""
        return self.log.state

    @property
    def url(self) -> str:
        """Where the dataset is."""
        return self._store.url

    def read_about(self, folder: str) -> Iterator[tuple[str, bytes]]:
        """The files beside earlier shards, by folder, proven by their hashes; with their names."""
        for file in self.log.state.split("about"):
            if file.name.startswith(folder + "/"):
                yield file.name, self._read_whole(file)

    def make_room(self, most: int) -> Iterator[Record]:
        """Commit what is stored by now, and go on until fewer than `most` batches are left."""
        yield from self.commit_ready()
        while len(self._pending) >= most:
            yield self.commit_oldest()

    def submit(self, batch: Batch[R]) -> None:
        """Hand over a batch that is full, or the last one."""
        columns = batch.columns
        is_val = columns.is_val[: columns.rows].astype(bool)
        train_rows = np.flatnonzero(~is_val)
        val_rows = np.flatnonzero(is_val)
        names: dict[str, str] = {}
        if len(train_rows):
            number = self._next["train"]
            train_rows = train_rows[shuffled(len(train_rows), self.config.seed, number)]
            names["train"] = f"shard_{number:05d}.parquet"
        if len(val_rows):
            names["val"] = f"_val/val_{self._next['val']:05d}.parquet"
        if batch.rejects:
            names["rejects"] = f"_rejects/rejects_{self._next['rejects']:05d}.jsonl"
        for split in names:
            self._next[split] += 1
        about = []
        for file in batch.about:
            about.append(f"{file.folder}/{self._next_about:06d}")
            self._next_about += 1
        self._pending.append(
            (batch, self._pool.submit(self._store_batch, batch, train_rows, val_rows, names, about))
        )

    def commit_ready(self) -> Iterator[Record]:
        """Commit what is stored by now, in order."""
        while self._pending and self._pending[0][1].done():
            yield self.commit_oldest()

    def commit_all(self) -> Iterator[Record]:
        """Wait for what was submitted and commit it."""
        while self._pending:
            yield self.commit_oldest()

    def beat(self, name: str = "", silent_s: float = 0.0) -> Record:
        """Say that the writer is alive, and how long an input that it waits for has been silent."""
        self._last_commit = time.monotonic()
        return self.log.commit([Beat(name, int(silent_s))])

    def beat_if_silent(self) -> Iterator[Record]:
        """Commit what is stored; say that the writer is alive if nothing was for a while."""
        yield from self.commit_ready()
        if time.monotonic() - self._last_commit >= BEAT_S:
            yield self.beat()

    def seal(self) -> Iterator[Record]:
        """Commit what is left, publish the validation shard, end the dataset."""
        yield from self.commit_all()
        parts = self.log.state.split("val")
        stored = self._put("val_shard.parquet", lambda file: self._join(parts, file))
        val = Add(
            name=stored.name,
            sha256=stored.sha256,
            bytes=stored.size,
            rows=sum(part.rows for part in parts),
            tokens=sum(part.tokens or 0 for part in parts) if self.config.tokenizer else None,
            split="val",
        )
        train = self.log.state.split("train")
        ops: list[Op] = [Retire(part.name) for part in parts]
        ops.append(val)
        ops.append(
            Seal(
                shards=len(train),
                rows=val.rows + sum(shard.rows for shard in train),
                bytes=val.bytes + sum(shard.bytes for shard in train),
                head=self.log.state.head,
            )
        )
        yield self.log.commit(ops)
        self._forget(stored)
        finish(self.log)

    def close(self) -> None:
        """Let go; whatever is not committed is done again by the next writer."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _store_batch(
        self, batch: Batch[R], train_rows: Order, val_rows: Order, names: dict[str, str],
        about: list[str],
    ) -> _Files:  # fmt: skip
        tokens: dict[str, int | None] = {}
        files = _Files([], tokens)

        def put_rows(split: Split, rows: Order) -> None:
            def write(file: IO[bytes]) -> None:
                tokens[name] = self._write_rows(file, batch.columns, rows)

            if split in names:
                name = names[split]
                stored = self._put(name, write)
                tokens[stored.name] = tokens[name]
                files.stored.append((split, stored, len(rows)))

        put_rows("train", train_rows)
        put_rows("val", val_rows)
        if batch.rejects:
            stored = self._put(names["rejects"], lambda file: file.writelines(batch.rejects))
            files.stored.append(("rejects", stored, len(batch.rejects)))
        for name, beside in zip(about, batch.about, strict=True):
            files.stored.append(("about", self._put_bytes(name, beside.as_bytes()), beside.rows))
        return files

    def _put_bytes(self, name: str, data: bytes) -> Stored:
        return self._put(name, lambda file: file.writelines([data]))

    def _read_whole(self, file: Add) -> bytes:
        with self._store.open(file.name) as opened:
            data = opened.read()
        found = hashlib.sha256(data).hexdigest()
        if found != file.sha256:
            raise self._mismatch(file, f"sha256 {found[:12]}…, the log says {file.sha256[:12]}…")
        return data

    def _mismatch(self, file: Add, why: str) -> ShardMismatch:
        return ShardMismatch(
            f"{file.name} is not what was written",
            where=f"{self._store.url}/{file.name}",
            why=why,
            do="restore the file from a copy, or make the dataset again in a new directory",
        )

    def _put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        try:
            return self._store.put(name, write)
        except StoreFailed:
            self.log.heed_fence()
            raise

    def commit_oldest(self) -> Record:
        """Wait for the batch that was submitted first, and commit it."""
        batch, future = self._pending[0]
        files = future.result()
        ops: list[Op] = [
            Add(file.name, file.sha256, file.size, rows, files.tokens.get(file.name), split)
            for split, file, rows in files.stored
        ]
        record = self.log.commit([*ops, *batch.progress])
        self._pending.popleft()
        self._last_commit = time.monotonic()
        for _, file, _ in files.stored:
            self._forget(file)
        batch.columns.clear()
        self.spare.append(batch.columns)
        return record

    def _forget(self, stored: Stored) -> None:
        """Remove what a dead writer left under a name that we then could not use.

        Safe only now: we have committed in our epoch, so no older writer ever will.
        """
        earlier_writers = self.log.state.epoch > 1
        if earlier_writers and stored.shadowed and stored.shadowed not in self.log.state.files:
            self._store.remove(stored.shadowed)

    def _join(self, parts: Sequence[Add], file: IO[bytes]) -> None:
        schema = schema_of(self.config.token_type, chunks=bool(self.config.prepare))
        with open_parquet(file, schema) as writer:
            for part in parts:
                with self._open_part(part) as opened:
                    reader = pq.ParquetFile(opened)
                    for group in range(reader.num_row_groups):
                        writer.write_table(
                            reader.read_row_group(group, use_threads=False).cast(schema)
                        )

    def _open_part(self, part: Add) -> IO[bytes]:
        """A validation part, proven first: the seal gives its rows a new hash."""
        try:
            opened = self._store.open(part.name)
        except FileNotFoundError:
            found = "it is missing"
        else:
            digest = hashlib.sha256()
            while block := opened.read(1 << 20):
                digest.update(block)
            if digest.hexdigest() == part.sha256:
                opened.seek(0)
                return opened
            opened.close()
            found = f"sha256 {digest.hexdigest()[:12]}…, the log says {part.sha256[:12]}…"
        self.log.heed_fence()  # a newer writer may have sealed, and removed the parts
        raise self._mismatch(part, found)


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
    # an option that this dataset's penstock did not know has its default there
    before, now = {**asdict(ShardConfig()), **state.opened.config}, asdict(config)
    differing = differences(before, now)
    if differing:
        raise BadConfig(
            "the dataset was begun with other options",
            where=store.url,
            why="; ".join(differing),
            do="give the same options, or write to a new directory",
        )
    begun = [name for name in state.opened.inputs if name in state.inputs]
    if list(inputs[: len(begun)]) != begun:
        raise BadConfig(
            "the dataset was begun with other inputs",
            where=store.url,
            why=input_difference(begun, inputs),
            do="give the same inputs in the same order; new ones go at the end",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> list[str]:
    """What differs between two sets of options, each by itself.

    >>> plans = [{"prepare": {"steps": [{"step": "chunk", "max_tokens": n}]}} for n in (96, 64)]
    >>> differences(*plans)
    ['chunk.max_tokens: 96 before, 64 now']
    """
    found: list[str] = []
    for name in sorted({*before, *now}):
        one, two = before.get(name), now.get(name)
        label = within + name
        if name in ("prepare", "steps"):  # the words of the layout say nothing to a user
            label = within.rstrip(".")
        if name == "steps" and isinstance(one, list) and isinstance(two, list):
            names = [[step["step"] for step in steps] for steps in (one, two)]
            if names[0] == names[1]:
                for step, other in zip(one, two, strict=True):
                    found += differences(step, other, f"{step['step']}.")
            else:
                found.append(f"steps: {', '.join(names[0])} before, {', '.join(names[1])} now")
        elif isinstance(one, dict) and isinstance(two, dict):
            found += differences(one, two, f"{label}." if label else "")
        elif one != two:
            found.append(f"{within + name}: {one!r} before, {two!r} now")
    return found


def input_difference(before: Sequence[str], now: Sequence[str]) -> str:
    """The first input that is another one.

    >>> input_difference(["a", "b"], ["a"])
    "input 2 was 'b', and is not given now"
    """
    for number, name in enumerate(before):
        if number >= len(now):
            return f"input {number + 1} was {name!r}, and is not given now"
        if now[number] != name:
            return f"input {number + 1} was {name!r}, and is {now[number]!r} now"
    raise AssertionError("the inputs are the same")


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
