"""The log: append-only, create-once, hash-chained records. It alone says what a dataset is.

In:    operations to commit
Out:   the state they add up to, for writers, followers and verifiers alike
Keeps: record n is written once, by one writer; a shard and the input that it covers are in one
       record; read = kept + dropped for every input at every record
Never: lists a directory, asks a clock to decide, overwrites, deletes, takes silence for the end

    writer:  replay ─▶ commit `open` with epoch + 1 ─▶ commit `add` + `progress` … ─▶ commit `seal`
    on any error of a commit: read the slot back. Our commit id: it stands. Another's: fenced.
    of several writers that share a log (`SharedLog`): read it, and build on it

Every FOLD_EVERY records the writer leaves their sum as one object in _fold/, so that 100,000
records open in 200 reads. A fold is derived: one that is missing or damaged costs time only.
"""

import contextlib
import copy
import logging
import math
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from penstock.errors import (
    AlreadySealed,
    Fenced,
    LogDamaged,
    NoDataset,
    PenstockError,
    ProducerStalled,
    StoreFailed,
)
from penstock.store.local import LocalStore
from penstock.store.record import (
    MERGED,
    ONLY,
    WITH_ROWS,
    Add,
    Beat,
    Fold,
    Merged,
    Only,
    Op,
    Open,
    Progress,
    Record,
    Retire,
    Seal,
    Split,
    check_file,
    damaged,
    decode,
    encode,
    fold_name,
    format_of,
    is_name_of,
    record_name,
    stem_of,
    sum_ops,
)
from penstock.store.store import AlreadyThere, Store, Unsure, dataset_path, open_store

FOLD_EVERY: Final = 512
BEAT_S: Final = 10.0
"""A writer that has nothing to commit commits a beat this often."""

STALL_S: Final = 120.0
"""A follower that sees no record for this long, on its own clock, calls the producer stalled."""

INPUT_STALL_S: Final = 1800.0
"""The same for the input of a producer that lives: nothing says how often an input must grow."""

TELL_S: Final = 60.0
"""How often a follower repeats what it waits for."""

COMPLETE: Final = "_COMPLETE"
"""Holds the seal, for people and simple readers; written after it."""

_LOOK_AHEAD: Final = 16
LOOK_S: Final = 2.0
"""A follower that has waited so long looks whether anything stands after the record to come."""
_SLOW_S: Final = 5.0
"""A look that takes longer met a store that did not answer."""

_log = logging.getLogger(__name__)

_NO_PREVIOUS = "0" * 64
_RESEND_S = (0.1, 0.5, 2.0, 5.0)
_LOST_S = (0.002, 0.1)
"""How long one of several writers waits at most before it tries the next slot: at first, and at
the end of a row of slots that others got. Who waits is chosen by chance, so that none starves."""
_RESEND_FOR_S = 30.0


_T = TypeVar("_T")


@dataclass
class InputState:
    """What has been read of one input."""

    to: int = 0
    read: int = 0
    kept: int = 0
    blank: int = 0
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    proof: dict[str, str | int] = field(default_factory=dict)
    end: str | None = None


@dataclass(eq=False)
class LogState:
    """What the records read so far add up to."""

    dataset: str = ""
    n: int = -1
    head: str = _NO_PREVIOUS
    epoch: int = 0
    time: str = ""
    opened: Open | None = None
    files: dict[str, Add] = field(default_factory=dict)
    """By name, in log order, without what was retired."""
    _pairs: dict[str, str] = field(default_factory=dict)
    """The token file by the shard's name, and the other way round."""
    retired: dict[str, Add] = field(default_factory=dict)
    """By name, in log order, what was merged into later files."""
    inputs: dict[str, InputState] = field(default_factory=dict)
    sealed: Seal | None = None
    beat: Beat | None = None
    """The last record, if it says how long the input has been silent that the writer waits for."""

    def split(self, name: str) -> list[Add]:
        """The files of one split, in log order."""
        return [file for file in self.files.values() if file.split == name]

    @property
    def is_empty(self) -> bool:
        """Whether it ended without a row: no data, however new, that hides older data."""
        return self.sealed is not None and self.sealed.rows == 0

    def tokens_of(self, file: Add) -> Add | None:
        """The file that holds the tokens of a shard's rows, or held them, if it has one."""
        name = self._pairs.get(file.name, "")
        return self.files.get(name) or self.retired.get(name)

    def parts_of(self, file: Add) -> list[Add]:
        """The files whose rows a file holds, end to end: itself, if none were merged into it."""
        parts = [one for one in self.retired.values() if one.split == file.split == "val"]
        return parts if parts and sum(one.rows for one in parts) == file.rows else [file]

    def shard_of(self, file: Add) -> Add | None:
        """The shard whose tokens a file holds."""
        return self.files.get(self._pairs.get(file.name, ""))

    def apply(self, record: Record | Fold, where: str) -> None:
        """Move on by one record, or by all that a fold sums up; refuse what cannot follow."""
        first = record.n if isinstance(record, Record) else record.first
        last = record.n if isinstance(record, Record) else record.last
        at = f"{where}, record {first}"
        if first != self.n + 1:
            raise damaged(f"record {self.n + 1} holds number {first}", at)
        if record.prev != self.head:
            raise damaged(
                "the chain is broken",
                at,
                f"it follows {record.prev[:12]}…, the record before is {self.head[:12]}…",
            )
        if self.n >= 0 and record.dataset != self.dataset:
            raise damaged("the record is of another dataset", at)
        if record.epoch < self.epoch:
            raise damaged("an older writer wrote after a newer one", at)
        if self.sealed:
            raise damaged("something was added after the seal", at)
        before = self._remember(record.ops)
        try:
            balance = sum(self._apply_op(op, at) for op in record.ops)
            self._pair(record.ops, at)
            if balance != 0:
                raise damaged(
                    "rows added and documents kept or dropped differ", at, f"by {balance:+,} rows"
                )
            if self.sealed and isinstance(record, Record) and self.sealed.head != self.head:
                raise damaged("the seal is of another log", at)
        except LogDamaged:
            self._restore(before)
            raise
        self.dataset = record.dataset
        self.n = last
        self.head = record.sha256 if isinstance(record, Record) else record.head
        self.epoch = record.epoch
        self.time = record.time
        last_op = record.ops[-1] if record.ops else None
        self.beat = last_op if isinstance(last_op, Beat) and last_op.silent_s else None

    def check(self, record: Record | Fold, where: str) -> None:
        """Refuse what cannot follow, and change nothing."""
        before = self._remember(record.ops)
        at = self.dataset, self.n, self.head, self.epoch, self.time, self.beat
        self.apply(record, where)
        self._restore(before)
        self.dataset, self.n, self.head, self.epoch, self.time, self.beat = at

    def _remember(self, ops: Sequence[Op]) -> dict[str, Any]:
        """What `ops` could change, as it is now; files are only copied where some are retired."""
        touched = {op.input for op in ops if isinstance(op, Progress)}
        retires = any(isinstance(op, Retire) for op in ops)
        return {
            "opened": self.opened,
            "sealed": self.sealed,
            "retired": len(self.retired),
            "files": dict(self.files) if retires else len(self.files),
            "pairs": len(self._pairs),
            "inputs": {name: copy.deepcopy(self.inputs.get(name)) for name in touched},
        }

    def _restore(self, before: dict[str, Any]) -> None:
        self.opened, self.sealed = before["opened"], before["sealed"]
        _back(self.retired, before["retired"])
        self.files = _back(self.files, before["files"])
        _back(self._pairs, before["pairs"])
        for name, state in before["inputs"].items():
            if state is None:
                self.inputs.pop(name, None)
            else:
                self.inputs[name] = state

    def _apply_op(self, op: Op, at: str) -> int:
        """Rows that `op` adds to files, less those that it accounts for."""
        if self.sealed:
            raise damaged("something was added after the seal", at)
        match op:
            case Open():
                self.opened = op
            case Add():
                check_file(op, at)
                if op.name in self.files:
                    raise damaged(f"{op.name} is added twice", at)
                self.files[op.name] = op
                return op.rows if op.split in WITH_ROWS else 0
            case Retire():
                if op.name not in self.files:
                    raise damaged(f"{op.name} is retired and was never added", at)
                self.retired[op.name] = gone = self.files.pop(op.name)
                return -gone.rows if gone.split in WITH_ROWS else 0
            case Progress():
                self._advance(op, at)
                return -op.accounted
            case Seal():
                train = self.split("train")
                data = [*train, *self.split("val")]
                found = (len(train), sum(f.rows for f in data), sum(f.bytes for f in data))
                if found != (op.shards, op.rows, op.bytes):
                    raise damaged(
                        "the seal's totals are not those of the shards",
                        at,
                        f"sealed {op.shards, op.rows, op.bytes} shards, rows, bytes; added {found}",
                    )
                self.sealed = op
            case Beat():
                pass
        return 0

    def _pair(self, ops: Sequence[Op], at: str) -> None:
        """A shard and its token file come in one record, and leave in one."""
        shards: dict[str, list[Add]] = {}
        for op in ops:
            if isinstance(op, Add) and op.split in ("train", "val"):
                shards.setdefault(stem_of(op.name), []).append(op)
        for op in ops:
            if isinstance(op, Add) and op.split == "tokens":
                beside = shards.get(stem_of(op.name), [])
                if len(beside) != 1:
                    raise damaged(f"{op.name} does not come with its shard", at)
                shard = beside[0]
                if shard.name in self._pairs:
                    raise damaged(
                        f"{op.name} holds tokens of {shard.name}, and so does another file", at
                    )
                if op.rows != shard.rows or op.tokens is None:
                    raise damaged(
                        f"{op.name} has {op.rows:,} rows and {op.tokens} tokens",
                        at,
                        f"{shard.name} has {shard.rows:,} rows",
                    )
                self._pairs |= {shard.name: op.name, op.name: shard.name}
        for op in ops:
            if isinstance(op, Retire) and (other := self._pairs.get(op.name)) in self.files:
                raise damaged(f"{op.name} is retired without {other}", at)

    def _advance(self, op: Progress, at: str) -> None:
        state = self.inputs.setdefault(op.input, InputState())
        if op.start != state.to or op.to < op.start:
            raise damaged(
                f"{op.input} was read from {op.start:,} to {op.to:,}",
                at,
                f"the record before left it at {state.to:,}",
            )
        if op.read != op.kept + sum(op.dropped.values()):
            raise damaged(
                f"{op.input}: read {op.read:,} is not kept {op.kept:,} + dropped {op.dropped}", at
            )
        state.to = op.to
        state.read += op.read
        state.kept += op.kept
        state.blank += op.blank
        state.rows += op.kept if op.rows is None else op.rows
        for reason, count in op.dropped.items():
            state.dropped[reason] = state.dropped.get(reason, 0) + count
        state.proof = op.proof or state.proof
        state.end = op.end or state.end


def _back(now: dict[str, _T], before: dict[str, _T] | int) -> dict[str, _T]:
    """What a dict was, by a copy of it or by how much was in it."""
    if not isinstance(before, int):
        return before
    while len(now) > before:
        now.popitem()
    return now


class Log:
    """Read a log, and follow it while it grows."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.state = LogState()
        self.damaged_folds: list[str] = []
        self._folds_used: list[str] = []
        self._unfolded: list[Record] = []
        self._read_at = 0.0
        self._tell_at = 0.0
        self._heeds_since: float | None = None
        self._looked_beyond = -2

    @classmethod
    def open(cls, url: str | os.PathLike[str], *, patience_s: float | None = None) -> "Log":
        """The log of the dataset at `url`, read to its end; `patience_s` as in `open_store`."""
        log = cls(open_store(url, patience_s=patience_s))
        log.refresh()
        if log.state.n < 0:
            log.check_end(lists=True)  # says so, if only the first record is missing
            raise NoDataset(
                f"there is no dataset at {log.store.url}",
                where=f"{log.store.url}/{record_name(0)}",
                why="it has no log",
                do="make one with penstock shard, or check the path",
            )
        return log

    def refresh(self, *, folds: bool = True) -> int:
        """Read what was committed since; the number of new records. `folds=False` reads each."""
        before = self.state.n
        try:
            self._read_on(folds=folds)
        except LogDamaged:
            if not self._folds_used:
                raise
            # Perhaps a fold is wrong: what the records say counts.
            self.damaged_folds += self._folds_used
            self.state, self._unfolded, self._folds_used = LogState(), [], []
            self._read_on(folds=False)
        if self.state.n != before:
            self._read_at = time.monotonic()
            if self.state.beat is None:
                self._heeds_since = None  # the input has grown: the next silence is a new one
        return self.state.n - before

    def _read_on(self, *, folds: bool) -> None:
        while True:
            if folds and (self.state.n + 1) % FOLD_EVERY == 0 and self._read_fold():
                continue
            record = self.find(self.state.n + 1)
            if record is None:
                return
            self._take(record)

    def wait(
        self, *, stall_s: float = STALL_S, input_stall_s: float = math.inf, poll_s: float = 0.5
    ) -> int:
        """Block until there is a new record, and read it; the number of new ones. After a while the
        store is asked every `poll_s`.

        Raises ProducerStalled when the writer gives no sign for `stall_s` on this clock, or when
        its beats say that its input has not grown for `input_stall_s`.
        """
        began = time.monotonic()
        deadline, pause_s = began + stall_s, min(0.02, poll_s)
        while self.state.sealed is None:
            asked = time.monotonic()
            if new := self.refresh():
                return new
            now = time.monotonic()
            if now - asked > _SLOW_S:
                deadline += now - asked  # the store was silent, not the writer
            if now >= deadline:
                raise self.stalled(stall_s)
            if now - began >= LOOK_S and self._looked_beyond != self.state.n:
                self._looked_beyond = self.state.n
                self.check_end()
            self._heed_input(now, input_stall_s)
            time.sleep(pause_s)
            pause_s = min(poll_s, 1.3 * pause_s)
        return 0

    def _heed_input(self, now: float, input_stall_s: float) -> None:
        """Say that the writer waits for its input; raise when it has waited too long."""
        beat = self.state.beat
        if beat is None:
            self._heeds_since = None
            return
        silent_s = beat.silent_s + now - self._read_at
        self._heeds_since = self._heeds_since or now
        # a writer that is back shows in the next beat: whoever begins to wait sees that first
        if silent_s >= input_stall_s and now - self._heeds_since >= min(2 * BEAT_S, input_stall_s):
            self._heeds_since = None
            raise ProducerStalled(
                f"the input of the dataset has not grown for {silent_s:.0f} s: {beat.input}",
                where=f"{self.store.url}, after record {self.state.n} of {self.state.time}",
                why="the sharder is alive and waits for whoever writes that file; neither a done "
                "marker nor --until_idle says that it has ended",
                do="start the writer of the input again, or mark the input as done "
                f"({os.path.basename(beat.input)}.done); a longer stall_s waits longer",
            )
        if silent_s >= TELL_S and now >= self._tell_at:
            self._tell_at = now + TELL_S
            _log.warning(
                "%s: waiting for more; its sharder is alive, and its input %s has not grown for "
                "%.0f s",
                self.store.url, beat.input, silent_s,
            )  # fmt: skip

    def check_end(self, *, lists: bool = False) -> None:
        """Raise LogDamaged if anything shows that there was a record after the last one read.

        A few names are asked for; where the store `lists`, all of them.
        """
        n = self.state.n
        if self.state.sealed is not None:
            return
        after = [record_name(n + 2 + k) for k in range(_LOOK_AHEAD)]
        first_fold = (n + 1) // FOLD_EVERY  # covers the record to come
        after += [fold_name(first_fold + k) for k in range(2)]
        found = next((name for name in after if self.store.size(name) is not None), "")
        if not found and self._has_marker():
            found = COMPLETE
        if not found and lists:
            found = self._listed_after(n + 1)
        # the second look is for a writer that has gone on since
        if found and self.store.size(record_name(n + 1)) is None:
            raise damaged(
                f"record {n + 1} is missing", f"{self.store.url}/{record_name(n + 1)}",
                f"{found} is there, which was written after it",
            )  # fmt: skip

    def _has_marker(self) -> bool:
        """Whether a marker says that the log was sealed; without a log it may be another's."""
        if self.state.n >= 0:
            return self.store.size(COMPLETE) is not None
        try:
            decode(self.store.read(COMPLETE), Record, self.store.url)
        except (FileNotFoundError, LogDamaged):
            return False
        return True

    def _listed_after(self, n: int) -> str:
        """A record after the n-th, if the store can list and has one."""
        names = getattr(self.store, "names", None)
        if names is None:
            return ""
        try:
            return next((name for name, _ in names("_log") if name > record_name(n)), "")
        except StoreFailed:
            if isinstance(self.store, LocalStore):
                raise
            return ""  # one may be allowed to read and not to list

    def stalled(self, stall_s: float) -> ProducerStalled:
        """The error for a writer of which nothing has come for so long."""
        self.check_end(lists=True)
        return ProducerStalled(
            f"the dataset is not sealed, and its writer has been silent for {stall_s:g} s",
            where=f"{self.store.url}, after record {self.state.n} of {self.state.time}",
            why=f"a live writer commits a beat at least every {BEAT_S:g} s; silence is not the end",
            do="start the producer again with the same command: it goes on where it was",
        )

    def record(self, n: int) -> Record:
        """One record that is known to be there."""
        record = self.find(n)
        if record is None:
            raise damaged(f"record {n} is missing", f"{self.store.url}/{record_name(n)}")
        return record

    def _take(self, record: Record) -> None:
        self.state.apply(record, self.store.url)
        self._unfolded.append(record)
        if (record.n + 1) % FOLD_EVERY == 0:
            self._at_boundary()
            self._unfolded = []

    def _at_boundary(self) -> None:
        """A follower has nothing to do here; a writer leaves a fold."""

    def find(self, n: int) -> Record | None:
        """One record, if it is there."""
        try:
            data = self.store.read(record_name(n))
        except FileNotFoundError:
            return None
        return decode(data, Record, f"{self.store.url}/{record_name(n)}")

    def _read_fold(self) -> bool:
        first = self.state.n + 1
        name = fold_name(first // FOLD_EVERY)
        try:
            fold = decode(self.store.read(name), Fold, f"{self.store.url}/{name}")
            if (fold.first, fold.last) != (first, first + FOLD_EVERY - 1):
                raise damaged("the fold is of other records", name)
            self.state.apply(fold, self.store.url)
        except FileNotFoundError:
            return False
        except LogDamaged:
            if name not in self.damaged_folds:
                self.damaged_folds.append(name)
            return False
        self._folds_used.append(name)
        return True


# Generations: whole datasets beside a dataset, at DATASET/_gen/00002, 00003, …

_GENERATIONS: Final = "_gen"


def generation_url(url: str | os.PathLike[str], number: int) -> str:
    """Where a generation is.

    >>> generation_url("data/cpp", 1), generation_url("data/cpp/", 2)
    ('data/cpp', 'data/cpp/_gen/00002')
    """
    root = dataset_path(url).rstrip("/") or "/"
    return root if number == 1 else f"{root}/{_GENERATIONS}/{number:05d}"


def split_generation(url: str | os.PathLike[str]) -> tuple[str, int | None]:
    """The dataset that an address names, and which of its generations, if it names one.

    >>> split_generation("data/cpp/_gen/00002"), split_generation("data/cpp/")
    (('data/cpp', 2), ('data/cpp/', None))
    """
    found = re.fullmatch(rf"(.+)/{_GENERATIONS}/([0-9]{{5,}})/*", os.fspath(url))
    return (found[1], int(found[2])) if found else (os.fspath(url), None)


def generations(
    url: str | os.PathLike[str], *, patience_s: float | None = None
) -> tuple[str, list[str]]:
    """The generation that is meant, and all that have begun, the oldest first.

    An address of a dataset means the newest one; DATASET/_gen/00001 is the dataset itself.
    """
    root, number = split_generation(url)
    found = [root]
    while True:
        later = generation_url(root, len(found) + 1)
        if open_store(later, patience_s=patience_s).size(record_name(0)) is None:
            break
        found.append(later)
    if number is None:
        return found[-1], found
    return generation_url(root, number), found


def newest_filled(found: Sequence[str]) -> str:
    """Of generations, the oldest first, the newest that holds anything or may yet; else the newest.

    One that cannot be read is not passed over: its damage is to be seen.
    """
    for url in reversed(found):
        try:
            if not Log.open(url).state.is_empty:
                return url
        except PenstockError:
            return url
    return found[-1]


def describe_generation(state: LogState) -> str:
    """What tells a generation from others, in words."""
    told = ["empty" if state.is_empty else "sealed" if state.sealed else "live"]
    if (length := chunk_length(state)) is not None:
        told.append(f"chunks of {length:,} tokens")
    if state.split("tokens"):
        told.append("with tokens")
    return ", ".join(told)


def chunk_length(state: LogState) -> int | None:
    """How many tokens a chunk may have, where documents were cut into chunks."""
    prepare = (state.opened.config.get("prepare") if state.opened else None) or {}
    lengths = [step.get("max_tokens") for step in prepare.get("steps") or []]
    return next((length for length in lengths if length is not None), None)


def merged_files(store: Store, dataset: str) -> set[str]:
    """Files that a mirror of `dataset` does not have: see `Merged`. Most places hold no such list;
    one that is damaged, or of another dataset, says nothing."""
    try:
        found = decode(store.read(MERGED), Merged, f"{store.url}/{MERGED}")
    except (FileNotFoundError, LogDamaged):
        return set()
    if found.dataset != dataset:
        return set()
    # whoever writes to a mirror must not be able to hide that a training shard is missing
    return {name for name in found.files if _is_of_val(name)}


def only_split(store: Store, dataset: str) -> Split | None:
    """The split whose files alone a mirror of `dataset` was filled with: see `Only`. A note that is
    damaged, or of another dataset, says nothing."""
    try:
        found = decode(store.read(ONLY), Only, f"{store.url}/{ONLY}")
    except (FileNotFoundError, LogDamaged):
        return None
    return found.split if found.dataset == dataset else None


def _is_of_val(name: str) -> bool:
    """Whether a file holds rows for validation, or their tokens."""
    return is_name_of("val", name) or (is_name_of("tokens", name) and not name.startswith("shard_"))


@dataclass(frozen=True, slots=True)
class Earlier:
    """The writer whose log another one has taken over, as its last record shows it."""

    url: str
    epoch: int
    n: int
    time: str

    @property
    def silent_s(self) -> float:
        """How long ago that record was, by the clocks of both writers."""
        try:
            return (datetime.now(UTC) - datetime.fromisoformat(self.time)).total_seconds()
        except (ValueError, TypeError):  # the time of a record is for people, and may be any text
            return 0.0

    @property
    def may_live(self) -> bool:
        """Whether it was heard of lately: one that lives commits every ten seconds."""
        return self.silent_s < 3 * BEAT_S

    def __str__(self) -> str:
        told = (
            f"{self.url}: taken over from an earlier writer of epoch {self.epoch}, whose last "
            f"record is {self.n}, of {self.time} ({max(0.0, self.silent_s):.0f} s ago)"
        )
        if not self.may_live:
            return told
        return f"{told}; if it still runs, it ends at its next commit: run one producer at a time"


class LogWriter(Log):
    """Commit to a log. At most one writer lives; an older one is fenced at its next commit."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.earlier: Earlier | None = None
        """Who wrote before."""
        self._epoch = 0

    @classmethod
    def take(
        cls,
        store: Store,
        config: dict[str, Any],
        inputs: Sequence[str],
        *,
        writer: str,
        tokenizer: str | None = None,
        check: Callable[[LogState], None] = lambda state: None,
    ) -> "LogWriter":
        """Replay the log and take the dataset over, from whoever may be writing it.

        `check` sees the state first and may refuse.
        """
        log = cls(store)
        for _ in range(10):
            log.refresh()
            log.refuse_sealed()
            check(log.state)
            log.check_end(lists=True)
            log._epoch = store.epoch = log.state.epoch + 1
            if (before := log.state).epoch:
                log.earlier = Earlier(store.url, before.epoch, before.n, before.time)
            try:
                log._commit([Open(config, list(inputs), writer, tokenizer)])
            except Fenced:
                continue
            store.settle()
            return log
        raise Fenced(
            "other writers keep taking this dataset",
            where=store.url,
            do="run one producer for each dataset",
        )

    def refuse_sealed(self) -> None:
        if self.state.sealed:
            raise AlreadySealed(
                f"{self.store.url} is sealed; nothing can be added to it",
                where=f"record {self.state.n} of {self.state.time}",
                do="write to a new directory",
            )

    def commit(self, ops: Sequence[Op]) -> Record:
        """Append one record, durably, or raise; after Fenced this writer is done."""
        if self.state.epoch != self._epoch:
            raise self._fenced(self.state.n, self.state.epoch)
        return self._commit(ops)

    def _commit(self, ops: Sequence[Op]) -> Record:
        state = self.state
        record = Record(
            format=format_of(ops),
            dataset=state.dataset or uuid.uuid4().hex,
            n=state.n + 1,
            prev=state.head,
            epoch=self._epoch,
            commit_id=uuid.uuid4().hex,
            time=datetime.now(UTC).isoformat(timespec="milliseconds"),
            ops=list(ops),
            sha256="",
        )
        data = encode(record)
        record = decode(data, Record, "the record to be written")
        # first: a record is never removed again, and a wrong one would end the log for good
        state.check(record, self.store.url)
        self._check_ground(record.n - 1)
        self._create(record, data)
        self._take(record)
        return record

    def heed_fence(self) -> None:
        """Raise Fenced if a newer writer is known to the log; asked when the store fails us.

        A newer writer clears our temporary files, and what we see then is only that they are gone.
        """
        n = self.state.n + 1
        while (record := self.find(n)) is not None:
            if record.epoch > self._epoch:
                raise self._fenced(n, record.epoch)
            n += 1

    def _fenced(self, n: int, epoch: int) -> Fenced:
        return Fenced(
            "another writer has taken this dataset over",
            where=f"{self.store.url}, record {n}",
            why=f"it was written by epoch {epoch}, this writer is {self._epoch}",
            do="nothing is lost: the newer writer went on from the last record before it",
        )

    def _check_ground(self, n: int) -> None:
        """What we build on must still be there: a dataset can be removed, and begun anew."""
        if n < 0:
            return
        before = self.find(n)
        if before is None or before.sha256 != self.state.head:
            raise damaged(
                "this is no longer the log that this writer was writing",
                f"{self.store.url}, record {n}",
                "it was removed or replaced",
            )

    def _create(self, record: Record, data: bytes) -> None:
        name = record_name(record.n)
        unsure: Exception = AlreadyThere("the slot is taken, and nothing is in it")
        began = time.monotonic()
        for pause_s in (*_RESEND_S, None):
            try:
                self.store.create(name, data)
                return
            except StoreFailed:
                self.heed_fence()
                raise
            except AlreadyThere:
                there = self.find(record.n)
            except Unsure as error:
                unsure = error
                try:
                    there = self.find(record.n)
                except StoreFailed:
                    there = None
            if there is not None:
                if there.commit_id == record.commit_id:
                    return
                raise self._fenced(record.n, there.epoch)
            if pause_s is None or time.monotonic() > began + _RESEND_FOR_S:
                break  # a store that has not answered has been asked again for its own patience
            time.sleep(pause_s)
        raise StoreFailed(
            f"could not commit record {record.n}",
            where=self.store.url,
            why=str(unsure).splitlines()[0],
            do="check the connection and run the same command again: nothing committed is lost",
        ) from unsure

    def _at_boundary(self) -> None:
        records = self._unfolded
        ops = sum_ops([op for record in records for op in record.ops])
        fold = Fold(
            format=format_of(ops),
            dataset=records[0].dataset,
            first=records[0].n,
            last=records[-1].n,
            prev=records[0].prev,
            head=records[-1].sha256,
            epoch=records[-1].epoch,
            time=records[-1].time,
            ops=ops,
            sha256="",
        )
        # Derived: where it cannot be stored, readers read the records instead.
        with contextlib.suppress(AlreadyThere, Unsure, StoreFailed):
            self.store.create(fold_name(fold.first // FOLD_EVERY), encode(fold))


class SharedLog(LogWriter):
    """Commit to a log beside others: who finds a slot taken reads it and builds on it.

    Somebody always gets a slot, so the log moves on whoever dies. A record is made for the state
    that it follows: what another has added meanwhile is known when it is made.
    """

    @classmethod
    def join(
        cls,
        store: Store,
        config: dict[str, Any],
        *,
        writer: str,
        tokenizer: str | None = None,
        check: Callable[[LogState], None] = lambda state: None,
    ) -> "SharedLog":
        """Begin the log, or write to one that others have begun; `check` sees it first."""
        log = cls(store)
        while True:
            log.refresh()
            check(log.state)
            if log.state.n >= 0:
                log._epoch = store.epoch = log.state.epoch
                return log
            log.check_end(lists=True)
            log._epoch = store.epoch = 1
            with contextlib.suppress(Fenced):  # another was first: read what it has begun
                log._commit([Open(config, [], writer, tokenizer)])

    def share(self, make: Callable[[LogState], Sequence[Op]]) -> Record | None:
        """Append one record, made by `make` for the state that it follows, which is asked again
        when another was first; None if it has nothing to add by then."""
        wait_s = _LOST_S[0]
        while True:
            self.refresh()
            self.refuse_sealed()
            if self.state.epoch != self._epoch:
                raise self._fenced(self.state.n, self.state.epoch)
            ops = make(self.state)
            if not ops:
                return None
            try:
                return self._commit(ops)
            except Fenced:
                self.lost += 1
                time.sleep(random.uniform(0, wait_s))
                wait_s = min(2 * wait_s, _LOST_S[1])

    lost = 0
    """How often another was first."""
