"""Append rollouts to a live dataset, from any number of processes at once, each exactly once.

In:    rollouts as inference workers have them
Out:   a dataset, in a directory or a bucket, that loaders follow while it grows
Keeps: what `write` returned from is in the dataset, durably; a rollout_id is there once, whoever
       writes it again, after whatever crash; every writer builds on the records of all others
Never: needs another process to be alive; writes over what is there

    check ─▶ one parquet file ─▶ one record of the shared log: the file, and keys of its rollouts
    the slot is taken: read that record, leave out what it has, try the next

The keys of all rollouts are in the log, 16 bytes each: a writer that starts knows what is there
without reading a file of the dataset.
"""

import contextlib
import hashlib
import io
import os
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

import penstock
from penstock.arrays import UInt64s
from penstock.errors import AlreadySealed, BadConfig, BadRollout
from penstock.options import number
from penstock.produce.writer import finish
from penstock.rollout.check import Encodes, check_records
from penstock.rollout.records import CONFIG, KIND, Rollouts, content_of
from penstock.store.log import BEAT_S, LogState, SharedLog
from penstock.store.record import (
    Add,
    Beat,
    Op,
    Progress,
    Seal,
    decode_keys,
    encode_keys,
)
from penstock.store.store import Depot, open_store, other_name
from penstock.tokenize.tokenizer import Tokenizer

INPUT: Final = "rollouts"
MOST_ROWS: Final = 4096
"""Rollouts of a file."""
MOST_TOKENS: Final = 1 << 24
HELD_ROWS: Final = 65_536
"""Rollouts that may wait to be committed before `write` waits itself."""
_MERGE_ROWS: Final = 8192


class KnownKeys:
    """Hashes of ids with those of contents: which are there, and whether they are the same."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.uint64)
        self._contents = np.zeros(0, np.uint64)
        self._recent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._ids) + len(self._recent)

    def add(self, keys: UInt64s) -> None:
        """Pairs, end to end."""
        ids, contents = keys[::2], keys[1::2]
        if len(ids) < _MERGE_ROWS:
            self._recent.update(zip(ids.tolist(), contents.tolist(), strict=True))
            if len(self._recent) < _MERGE_ROWS:
                return
            ids, contents = np.zeros(0, np.uint64), np.zeros(0, np.uint64)
        recent = np.array([*self._recent.items()], np.uint64).reshape(-1, 2)
        self._recent = {}
        joined = np.concatenate([self._ids, recent[:, 0], ids])
        order = np.argsort(joined, kind="stable")
        self._ids = joined[order]
        self._contents = np.concatenate([self._contents, recent[:, 1], contents])[order]

    def content(self, key: int) -> int | None:
        """The hash of the content under an id; None if there is none."""
        if (found := self._recent.get(key)) is not None:
            return found
        at = int(np.searchsorted(self._ids, np.uint64(key)))
        if at < len(self._ids) and int(self._ids[at]) == key:
            return int(self._contents[at])
        return None


def keys_of(rollouts: Rollouts) -> UInt64s:
    """A hash of each rollout's id and one of its content, end to end."""
    found = np.zeros(2 * len(rollouts), np.uint64)
    for row, name in enumerate(rollouts.rollout_id.to_pylist()):
        found[2 * row] = id_key(name)
        found[2 * row + 1] = int.from_bytes(content_of(rollouts, row)[:8], "little")
    return found


def id_key(rollout_id: str) -> int:
    """The hash of an id."""
    return xxhash.xxh3_64_intdigest(rollout_id.encode())


@dataclass(slots=True)
class _Pending:
    """Rollouts that wait to be committed, and who waits for them."""

    rollouts: Rollouts
    keys: UInt64s
    done: "Future[int]"
    waits: bool
    """Whether somebody waits for what came of them."""
    urgent: bool
    """Whether they are to be committed at once."""


class RolloutWriter:
    """Appends rollouts to the dataset at a path or an address; others may do so too.

    Threads may share one: what they write at the same time goes into one record.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: Any = None,
        gather_s: float = 0.1,
        patience_s: float | None = None,
    ) -> None:
        """With a `tokenizer`, by path or as an object, ids are checked against its vocabulary, and
        loaders check that theirs is the same. Rollouts that nobody waits for are gathered for
        `gather_s` before they are committed; `patience_s` is as in `LoaderRun`."""
        self._tokenizer: Encodes | None = None
        fingerprint = ""
        if tokenizer is not None:
            loaded = Tokenizer.load(tokenizer)
            self._tokenizer, fingerprint = loaded, loaded.fingerprint
        self._gather_s = number("gather_s", gather_s)
        if not 0 <= self._gather_s <= 60:
            raise BadConfig(f"gather_s is {gather_s}", do="choose from 0 to 60 seconds")
        self._store: Depot = open_store(path, make=True, patience_s=patience_s)
        self.url = self._store.url
        self._log = SharedLog.join(
            self._store,
            CONFIG,
            writer=f"penstock {penstock.__version__}",
            tokenizer=fingerprint or None,
            check=lambda state: _check_begun(self.url, state, fingerprint),
        )
        self._known = KnownKeys()
        self._files_known = 0
        self._kind: tuple[bool, bool] | None = None
        """Whether the first rollouts of the dataset have log-probabilities, and values: all others
        are like them."""
        self._read_keys(self._log.state)
        self.num_written = self.num_repeated = self.num_records = 0
        """Rollouts that this writer added; that were there already; records that it made."""
        self._pending: list[_Pending] = []
        self._held = 0
        self._failed: list[BaseException] = []
        """What was wrong with rollouts that nobody waited for, until somebody is told."""
        self._stuck: BaseException | None = None
        """Why those that nobody waits for are not in the dataset yet; they are tried again when
        somebody has been told."""
        self._closing = False
        self._changed = threading.Condition()
        self._using = threading.RLock()
        """Held by whoever uses the log: the thread that commits, and `has`."""
        self._seen_at = time.monotonic()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="penstock-rollouts", daemon=True)
        self._thread.start()

    def write(self, rollout: Mapping[str, Any], *, wait: bool = True) -> bool:
        """Append a rollout; whether it is new. One of that id that is the same is there already:
        nothing is added. With another content it is BadRollout.

        It is in the dataset when this returns; with `wait=False`, when `flush` or `close` does. If
        such ones could not be committed, the next write raises why, and takes nothing itself; they
        are kept and tried again.
        """
        return self.write_many([rollout], wait=wait) > 0

    def write_many(self, rollouts: Iterable[Mapping[str, Any]], *, wait: bool = True) -> int:
        """Append several, all in one record where they fit into one file; how many are new (with
        `wait=False` it is not known yet, and 0)."""
        self._check_process()
        checked = check_records([*rollouts], where="rollouts", tokenizer=self._tokenizer)
        made = checked.rollouts
        futures = []
        for first, last in _cuts(made):
            part = made if last - first == len(made) else made.take(np.arange(first, last))
            futures.append(self._put(part, waits=wait))
        if not wait:
            return 0
        return sum(future.result() for future in futures)

    def has(self, rollout_id: str | int) -> bool:
        """Whether a rollout of that id is in the dataset: then nobody need sample it again."""
        with self._using:
            self._log.refresh()
            self._read_keys(self._log.state)
            return self._known.content(id_key(str(rollout_id))) is not None

    def flush(self) -> None:
        """Wait until all that was written is in the dataset; raises what went wrong with it."""
        self._check_process()
        with self._changed:
            for pending in self._pending:
                pending.urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._pending or self._has_failed)
            self._tell()

    @property
    def _has_failed(self) -> bool:
        return bool(self._failed) or self._stuck is not None

    def _tell(self) -> None:
        """Raise what went wrong with rollouts that nobody waited for; they may be tried again."""
        self._changed.notify_all()
        if self._failed:
            raise self._failed.pop(0)
        stuck, self._stuck = self._stuck, None
        if stuck is not None:
            raise stuck

    def seal(self) -> None:
        """End the dataset: no writer can add to it any more, and loaders end where it does. One
        that has ended stays as it is."""
        self.flush()
        with self._using:
            with contextlib.suppress(
                AlreadySealed
            ):  # by an earlier life of this process, or another
                self._log.share(_sealing)
            finish(self._log)
        self.close()

    def close(self) -> None:
        """Commit what is left, and stop. The dataset stays open for others. What an error of this
        says could not be committed is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._pid == os.getpid():
            self._thread.join()
        self._stuck = None
        with self._changed:
            self._tell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise BadConfig(
                "the writer was made in another process",
                why="a fork takes no threads along, and two processes would commit the same",
                do="make a RolloutWriter in each process",
            )

    def _put(self, rollouts: Rollouts, *, waits: bool) -> "Future[int]":
        pending = _Pending(rollouts, keys_of(rollouts), Future(), waits, urgent=waits)
        with self._changed:
            self._changed.wait_for(
                lambda: self._held < HELD_ROWS or self._closing or self._has_failed
            )
            if self._closing:
                raise BadConfig("the writer is closed", do="make a new one")
            self._tell()
            self._pending.append(pending)
            self._held += len(rollouts)
            self._changed.notify_all()
        return pending.done

    # The thread that commits

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._may_commit() or self._closing, timeout=BEAT_S / 2
                )
                if not self._pending and self._closing:
                    return
                if self._may_commit() and not self._is_urgent():
                    self._changed.wait_for(self._is_urgent, timeout=self._gather_s)
                taken = self._taken() if self._may_commit() else []
            if taken:
                self._commit(taken)
            else:
                self._beat()

    def _may_commit(self) -> bool:
        """Whether there is something to commit, and nobody has to be told first that it failed."""
        if self._stuck is None or self._closing:
            return bool(self._pending)
        return any(pending.waits for pending in self._pending)

    def _is_urgent(self) -> bool:
        """Whether somebody waits, or enough has come."""
        return (
            self._closing
            or self._held >= MOST_ROWS
            or any(pending.urgent for pending in self._pending)
        )

    def _taken(self) -> list[_Pending]:
        """The rollouts of the next file: the first ones that fit into one, all with or all without
        log-probabilities and values."""
        rows = tokens = 0
        for k, pending in enumerate(self._pending):
            rows += len(pending.rollouts)
            tokens += int(pending.rollouts.lengths.sum())
            unlike = pending.rollouts.kind != self._pending[0].rollouts.kind
            if k and (rows > MOST_ROWS or tokens > MOST_TOKENS or unlike):
                return self._pending[:k]
        return list(self._pending)

    def _commit(self, taken: list[_Pending]) -> None:
        results: dict[int, int | BaseException] = {}
        failed: BaseException | None = None
        try:
            with self._using:
                self._append(taken, results)
        except BaseException as error:  # it belongs to those who wait, not to this thread
            failed = error
            for k in range(len(taken)):
                if not isinstance(results.get(k), BaseException):
                    results[k] = error
            if not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                kept = []
                for k, pending in enumerate(taken):
                    found = results[k]
                    if found is failed is not None and not (pending.waits or self._closing):
                        kept.append(pending)
                        continue
                    self._held -= len(pending.rollouts)
                    if not isinstance(found, BaseException):
                        pending.done.set_result(found)
                        continue
                    if not pending.waits:
                        self._failed.append(found)
                    pending.done.set_exception(found)
                # behind those that somebody waits for, which may be of another file
                self._pending = self._pending[len(taken) :] + kept
                if kept or failed is None:  # where the store works again, they are tried at once
                    self._stuck = failed
                self._changed.notify_all()

    def _append(self, taken: list[_Pending], results: dict[int, int | BaseException]) -> None:
        """Add what is new of some rollouts, in one record; note what came of each."""
        stored: tuple[tuple[tuple[int, int], ...], Add] | None = None

        def make(state: LogState) -> list[Op]:
            nonlocal stored
            self._read_keys(state)
            self._read_kind(state)
            chosen = self._new_ones(taken, results)
            if stored is not None and stored[0] != chosen:
                self._store.remove(stored[1].name)  # another has added some of it meanwhile
                stored = None
            if not chosen:
                return []
            if stored is None:
                stored = chosen, self._store_file(taken, chosen, state.n + 1)
            before = state.inputs.get(INPUT)
            start, rows = (before.to if before else 0), len(chosen)
            progress = Progress(
                input=INPUT, start=start, to=start + rows, read=rows, kept=rows, dropped={}
            )
            return [stored[1], progress]

        try:
            record = self._log.share(make)
        except AlreadySealed:
            self._read_keys(self._log.state)
            if self._new_ones(taken, results):
                raise
            record = None  # all of it was there before the end
        for k, pending in enumerate(taken):
            if isinstance(found := results[k], int):
                self.num_written += found
                self.num_repeated += len(pending.rollouts) - found
        if record is not None:
            self._read_keys(self._log.state)
            self.num_records += 1
        self._seen_at = time.monotonic()

    def _new_ones(
        self, taken: list[_Pending], results: dict[int, int | BaseException]
    ) -> tuple[tuple[int, int], ...]:
        """Which rollouts of which pending ones are not in the dataset."""
        chosen: list[tuple[int, int]] = []
        mine: dict[int, int] = {}
        for k, pending in enumerate(taken):
            new: list[tuple[int, int]] = []
            ids, contents = pending.keys[::2].tolist(), pending.keys[1::2].tolist()
            results[k] = 0
            for row, (key, content) in enumerate(zip(ids, contents, strict=True)):
                there = mine.get(key)
                there = self._known.content(key) if there is None else there
                if there is None and self._kind not in (None, pending.rollouts.kind):
                    results[k] = self._unlike(pending.rollouts, row)
                    break
                if there is None:
                    new.append((k, row))
                elif there != content:
                    results[k] = self._conflict(pending.rollouts, row)
                    break
            else:
                chosen += new
                mine.update((ids[row], contents[row]) for _, row in new)
                results[k] = len(new)
        return tuple(chosen)

    def _conflict(self, rollouts: Rollouts, row: int) -> BadRollout:
        name = rollouts.rollout_id[row].as_py()
        error = BadRollout(
            f"rollout_id: another rollout is there under the id {name!r}",
            where=self.url,
            why="what is written again is the same to the last number, or it is another rollout",
            do="give every rollout an id of its own; write again what was sampled, not a new one",
        )
        error.row, error.field, error.reason = row, "rollout_id", "other_content"
        return error

    def _unlike(self, rollouts: Rollouts, row: int) -> BadRollout:
        """Why a rollout cannot stand beside those of the dataset."""
        assert self._kind is not None
        field, has = next(
            (name, has)
            for name, has, mine in zip(
                ("logprobs", "values"), self._kind, rollouts.kind, strict=True
            )
            if has != mine
        )
        told = (f"have {field}", "has none") if has else (f"have no {field}", "has some")
        error = BadRollout(
            f"{field}: {'missing' if has else 'unlike others'}",
            where=f"rollouts, row {row}, rollout {rollouts.rollout_id[row].as_py()!r}",
            why=f"the rollouts of {self.url} {told[0]}, this one {told[1]}",
            do="write rollouts that all have them, or none; others to a dataset of their own",
        )
        error.row, error.field = row, field
        error.reason = f"{field}_missing" if has else f"unlike_{field}"
        return error

    def _store_file(
        self, taken: list[_Pending], chosen: tuple[tuple[int, int], ...], record: int
    ) -> Add:
        """Store the chosen rollouts as one file; what the log will say of it."""
        parts, keys = [], []
        for k, pending in enumerate(taken):
            rows = np.array([row for number, row in chosen if number == k], np.int64)
            if len(rows):
                whole_part = len(rows) == len(pending.rollouts)
                parts.append(pending.rollouts if whole_part else pending.rollouts.take(rows))
                keys.append(pending.keys.reshape(-1, 2)[rows].reshape(-1))
        rollouts = Rollouts.concat(parts)
        file = io.BytesIO()
        pq.write_table(
            rollouts.to_table(), file, compression="zstd", compression_level=1,
            use_dictionary=["group_id", "finish_reason"], write_statistics=False,
        )  # fmt: skip
        data = file.getbuffer()
        sha256 = hashlib.sha256(data).hexdigest()
        # a name that no other writer gives: who stores the same rollouts may remove its own file
        name = other_name(f"shard_{record:05d}.parquet", secrets.token_hex(4))
        self._store.add(name, data, sha256)
        return Add(
            name=name, sha256=sha256, bytes=len(data), rows=len(rollouts),
            tokens=int(rollouts.lengths.sum()), split="train",
            keys=encode_keys(np.concatenate(keys)),
        )  # fmt: skip

    def _read_keys(self, state: LogState) -> None:
        """Learn of the rollouts that records since the last look have added."""
        files = islice(state.files.values(), self._files_known, None)
        found = [decode_keys(file.keys) for file in files]
        self._files_known = len(state.files)
        if found:
            self._known.add(np.concatenate(found))

    def _read_kind(self, state: LogState) -> None:
        """Learn from the first file what the rollouts of the dataset are like."""
        if self._kind is not None:
            return
        for file in state.split("train"):
            with contextlib.suppress(FileNotFoundError, pa.ArrowException):
                with self._store.open(file.name) as opened:
                    columns = pq.ParquetFile(opened).iter_batches(1, columns=["logprobs", "values"])
                    first = next(columns)
                has = [column.null_count == 0 for column in first.columns]
                self._kind = has[0], has[1]
                return

    def _beat(self) -> None:
        """Say that the dataset's writers live, if none of them has said anything for a while."""
        try:
            with self._using:
                if self._log.refresh():
                    self._seen_at = time.monotonic()
                if time.monotonic() - self._seen_at >= BEAT_S:
                    self._log.share(lambda state: [Beat()])
                    self._seen_at = time.monotonic()
        except Exception:
            # a beat is worth no error: what is written meets the same one, and without this thread
            # whoever writes would wait for ever
            pass


def _sealing(state: LogState) -> list[Op]:
    """The seal that follows a state."""
    train = state.split("train")
    return [
        Seal(
            shards=len(train),
            rows=sum(file.rows for file in train),
            bytes=sum(file.bytes for file in train),
            head=state.head,
        )
    ]


def _cuts(rollouts: Rollouts) -> list[tuple[int, int]]:
    """Ranges of rollouts that fit into a file each."""
    count = len(rollouts)
    if not count:
        return []
    ends = np.cumsum(rollouts.lengths)
    if count <= MOST_ROWS and ends[-1] <= MOST_TOKENS:
        return [(0, count)]
    cuts, first = [], 0
    while first < count:
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + MOST_TOKENS, side="right"))
        last = min(max(last, first + 1), first + MOST_ROWS, count)
        cuts.append((first, last))
        first = last
    return cuts


def _check_begun(url: str, state: LogState, tokenizer: str) -> None:
    """Refuse a dataset that is not of rollouts, or of another tokenizer."""
    if state.opened is None:
        return
    config = state.opened.config
    if config.get("kind") != KIND:
        raise BadConfig(
            f"{url} is a dataset, and not of rollouts",
            where=url,
            do="write rollouts to a directory of their own",
        )
    if config != CONFIG:
        raise BadConfig(
            "the dataset of rollouts was begun by another penstock",
            where=url,
            why=f"its settings are {config}, those of this penstock {CONFIG}",
            do="use the penstock that began it, or a new directory",
        )
    made_with = state.opened.tokenizer or ""
    if tokenizer and made_with and tokenizer != made_with:
        raise BadConfig(
            "the rollouts there are of another tokenizer",
            where=url,
            why=f"its fingerprint is {made_with[:12]}…, that of the given one {tokenizer[:12]}…",
            do="give the tokenizer of the dataset, or write to a new directory",
        )
