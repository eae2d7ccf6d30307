"""Give a sealed dataset token files, of any tokenizer, without touching its text.

In:    a sealed dataset, a tokenizer
Out:   a generation beside it, DATASET/_gen/00002, …: the same parquet files, and a token file
       for each
Keeps: parquet files as hard links, or copies where there can be none; for each thread one row group
       of text and the ids of one shard; one record for each shard: a killed run resumes after it
Never: changes the dataset, encodes text that is not what its log says
"""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, Any

import numpy as np
import pyarrow.parquet as pq

import penstock
from penstock.errors import BadConfig, BadDocument, ShardMismatch, StoreFailed
from penstock.options import whole
from penstock.produce.dataset import FollowConfig, Outcome
from penstock.produce.guards import TEXT_OF, find_generation, holds_conversations
from penstock.produce.writer import (
    StoredFiles,
    added,
    finish,
    open_proven,
    remove_shadowed,
    tell_earlier,
)
from penstock.store.local import LocalStore
from penstock.store.log import BEAT_S, Log, LogState, LogWriter, only_split
from penstock.store.record import Add, Beat, Op, Progress, Seal, token_name
from penstock.tokenize.token_file import TokenPieces, numbers_of, write_token_pieces
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events
from penstock.work.run import Stop, signals_noted

_BLOCK_BYTES = 1 << 20
_LOOK_S = 0.2
"""How often a run that waits looks whether a signal asked for its end."""


def tokenize_dataset(
    path: str | os.PathLike[str],
    tokenizer: Any,
    *,
    threads: int | None = None,
    events: Events | None = None,
) -> Outcome:
    """Add token files to the sealed dataset at `path`, as a generation of it.

    The outcome says where that is. `tokenizer` is whatever `Tokenizer.load` takes. A run that was
    cut short resumes; where the tokens are there already nothing is done.
    """
    threads = FollowConfig().threads if threads is None else whole("--threads", threads, 1, 10_000)
    events = events or Events("tokenize")
    loaded = Tokenizer.load(tokenizer)
    source = Log.open(path)
    config = _config_of(source, loaded)

    def is_ours(state: LogState) -> bool:
        names = (TEXT_OF, "tokenizer", "token_type")
        return state.opened is not None and all(
            state.opened.config.get(name) == config[name] for name in names
        )

    log = source if _has_tokens_of(source.state, loaded) else find_generation(path, is_ours)
    if log.state.sealed:
        if log is not source:
            log.store.epoch = log.state.epoch
            log.store.settle()
            finish(log)
        message = f"{log.store.url} has the tokens of this tokenizer already: nothing is done"
        events.emit("warn", message=message)
        return Outcome(sealed=True, state=log.state, url=log.store.url, documents=log.state.inputs)
    writer = LogWriter.take(
        log.store,
        config,
        [f"dataset {source.state.dataset}"],
        writer=f"penstock {penstock.__version__}",
        tokenizer=loaded.fingerprint,
        check=lambda state: _refuse_other(log, state, is_ours(state)),
    )
    tell_earlier(writer, events)
    run = _Run(source, writer, loaded, events)
    with signals_noted(run):
        sealed = run.run(threads)
    return Outcome(
        sealed=sealed,
        state=writer.state,
        stopped_by=run.stopped_by,
        url=writer.store.url,
        documents=writer.state.inputs,
    )


def _config_of(source: Log, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the log of the generation says of itself; refuse a dataset that cannot have one."""
    state, url = source.state, source.store.url
    if state.sealed is None or state.opened is None:
        raise BadConfig(
            f"{url} is not sealed",
            where=f"{url}, record {state.n}",
            why="a generation has all rows of a dataset, and this one may still grow",
            do="wait until its producer has sealed it, or start that again",
        )
    if only_split(source.store, state.dataset):
        raise BadConfig(
            f"{url} has no text",
            where=url,
            why="it was filled with penstock pull --only tokens",
            do="complete it first with penstock pull, without --only",
        )
    if holds_conversations(state):
        raise BadConfig(
            f"{url} holds conversations",
            where=url,
            why="their tokens are made by a chat template, not of the text of their rows",
            do="make them again with this tokenizer: penstock conversations --tokenizer",
        )
    return {
        **state.opened.config,
        "tokenizer": tokenizer.fingerprint,
        "token_type": np.dtype(tokenizer.dtype).name,
        TEXT_OF: state.dataset,
    }


def _has_tokens_of(state: LogState, tokenizer: Tokenizer) -> bool:
    opened = state.opened
    made_with = opened.config.get("tokenizer") if opened is not None else None
    return made_with == tokenizer.fingerprint and bool(state.split("tokens"))


def _refuse_other(log: Log, state: LogState, is_ours: bool) -> None:
    if state.n >= 0 and not is_ours:
        raise BadConfig(
            f"another command has begun {log.store.url}",
            do="run the same command again: it takes the next generation",
        )


class _Run:
    """One process's work on one generation."""

    def __init__(self, source: Log, log: LogWriter, tokenizer: Tokenizer, events: Events) -> None:
        self.stopped_by: int | None = None
        self._source, self._log, self._tokenizer, self._events = source, log, tokenizer, events
        (self._input,) = log.state.opened.inputs if log.state.opened else ("",)
        self._last_commit = time.monotonic()

    def run(self, threads: int) -> bool:
        """Make what is left, in order; whether all of it was."""
        source, state = self._source.state, self._log.state
        train, val = source.split("train"), source.split("val")
        total = sum(file.bytes for file in [*train, *val])
        left = [*train[len(state.split("train")) :], *val]
        pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-encode")
        try:
            coming = [(file, pool.submit(self._make, file)) for file in left]
            last: StoredFiles = []
            for file, future in coming:
                made = self._wait(future)
                if file.split == "val":
                    last += made
                else:
                    self._commit(made, [])
                done = sum(file.bytes for file in state.split("train"))
                self._events.emit(
                    "progress", input=self._log.store.url, at=done, size=total,
                    files=len(state.files),
                )  # fmt: skip
            sealed = source.sealed
            assert sealed is not None, "checked before"
            seal = Seal(sealed.shards, sealed.rows, sealed.bytes, state.head)
            self._commit(last, [seal])
            finish(self._log)
        except Stop:
            return False
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return True

    def _wait(self, future: "Future[StoredFiles]") -> StoredFiles:
        """The files of a shard; signs of life until they are there."""
        while True:
            if self.stopped_by is not None:
                raise Stop
            if wait([future], _LOOK_S).done:
                return future.result()
            if time.monotonic() - self._last_commit >= BEAT_S:
                self._last_commit = time.monotonic()
                self._log.commit([Beat()])

    def _commit(self, files: StoredFiles, end: list[Op]) -> None:
        adds = [add for add, _ in files]
        shards = [add for add in adds if add.split != "tokens"]
        rows = sum(shard.rows for shard in shards)
        known = self._log.state.inputs.get(self._input)
        start = known.to if known else 0
        progress = Progress(
            input=self._input, start=start, to=start + len(shards), read=rows, kept=rows,
            dropped={}, end="complete" if end else None,
        )  # fmt: skip
        self._log.commit([*adds, progress, *end])
        self._last_commit = time.monotonic()
        for _, stored in files:
            remove_shadowed(self._log, stored)

    def _make(self, file: Add) -> StoredFiles:
        """Store a parquet file and its token file."""
        with open_proven(self._source.store, file) as opened:
            try:
                text = self._take_over(file, opened)
                opened.seek(0)
                pieces = self._encode(file, opened)
                kind = np.dtype(self._tokenizer.dtype).name
                tokens = self._log.store.put(
                    token_name(file.name),
                    lambda target: write_token_pieces(
                        target, pieces, self._tokenizer.fingerprint, kind
                    ),
                )
            except StoreFailed:
                self._log.heed_fence()
                raise
        return [*text, (added("tokens", tokens, file.rows, pieces.count, pieces.xxh3), tokens)]

    def _take_over(self, file: Add, opened: IO[bytes]) -> StoredFiles:
        """The same parquet file in the generation: another name for it, or a copy."""
        source, target = self._source.store, self._log.store
        stored = None
        if isinstance(source, LocalStore) and isinstance(target, LocalStore):
            stored = target.link(source.root / file.name, file.name, file.sha256)

        def copy(to: IO[bytes]) -> None:
            while block := opened.read(_BLOCK_BYTES):
                to.write(block)

        stored = stored or target.put(file.name, copy)
        if stored.sha256 != file.sha256:
            raise ShardMismatch(
                f"{file.name} was changed while it was read",
                where=f"{source.url}/{file.name}",
                do="penstock verify --full " + source.url,
            )
        return [(added(file.split, stored, file.rows, file.tokens), stored)]

    def _encode(self, file: Add, opened: IO[bytes]) -> TokenPieces:
        lengths, documents = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        ids: list[Any] = []
        parquet = pq.ParquetFile(opened)
        row = 0
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, columns=["text", "doc_id"], use_threads=False)
            try:
                encoded = self._tokenizer.encode_column(table["text"])
            except BadDocument as error:
                error.where = f"{self._source.store.url}/{file.name}, row {row + error.row:,}"
                raise
            for tokens in encoded.chunks:
                lengths.append(numbers_of(tokens.value_lengths()).astype(np.int64))
                ids.append(numbers_of(tokens.flatten()))
            documents += [numbers_of(chunk) for chunk in table["doc_id"].chunks]
            row += table.num_rows
        return TokenPieces(np.concatenate(lengths), np.concatenate(documents), ids)
