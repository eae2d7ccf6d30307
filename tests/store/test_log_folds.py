"""Folds: the sum of many records in one object, so that a long log opens fast.

A fold is derived. With it, without it, or with a damaged one, the state is that of the records;
what changes is how many reads it takes.
"""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import LogDamaged, StoreFailed
from penstock.store import log as log_module
from penstock.store.local import LocalStore
from penstock.store.log import FOLD_EVERY, Log, LogState, LogWriter
from penstock.store.record import (
    FORMAT,
    Add,
    Beat,
    Fold,
    Op,
    Open,
    Progress,
    Record,
    Retire,
    Seal,
    Split,
    decode,
    encode,
    fold_name,
    record_name,
    sum_ops,
    token_name,
)
from penstock.store.store import AlreadyThere, Unsure

EVERY = 4


@pytest.fixture(autouse=True)
def _small_folds_and_no_sync() -> Iterator[None]:
    """Folds of four records, and no disk that has to keep up."""
    with mock.patch.object(log_module, "FOLD_EVERY", EVERY), mock.patch.object(os, "fsync"):
        yield


class CountingStore(LocalStore):
    """Counts what is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, make=True)
        self.reads: list[str] = []

    def read(self, name: str) -> bytes:
        self.reads.append(name)
        if len(self.reads) > 10_000:
            raise AssertionError("reading does not end")
        return super().read(name)


def plain(state: LogState) -> dict[str, Any]:
    """All of a state, in a form that compares; the order of files and inputs counts too."""
    fields = dict(vars(state))
    fields["files"] = list(state.files.items())
    fields["inputs"] = [(name, vars(known)) for name, known in state.inputs.items()]
    return fields


def begin(root: Path) -> LogWriter:
    return LogWriter.take(LocalStore(root, make=True), {"seed": 1}, ["a", "b"], writer="w")


def commit_many(writer: LogWriter, count: int) -> None:
    """Records of one shard each."""
    for _ in range(count):
        number = writer.state.n
        known = writer.state.inputs.get("a")
        start = known.to if known else 0
        writer.commit(
            [
                Add(f"shard_{number:05d}.parquet", "ab", 7, 2, None, "train"),
                Progress("a", start, start + 10, 2, 2, {}),
            ]
        )


def random_ops(writer: LogWriter, rng: random.Random) -> list[Op]:
    """Any operations that may follow in this state, in any order that is allowed."""
    state = writer.state
    ops: list[Op] = []
    balance = 0
    for number, name in enumerate(rng.sample(["a", "b", "c"], rng.randint(0, 3))):
        known = state.inputs.get(name)
        start = known.to if known else 0
        kept, dropped = rng.randint(0, 3), {}
        for reason in rng.sample(["empty", "no_text"], rng.randint(0, 2)):
            dropped[reason] = rng.randint(0, 2)
        ops.append(
            Progress(
                input=name,
                start=start,
                to=start + rng.randint(0, 50),
                read=kept + sum(dropped.values()),
                kept=kept,
                dropped=dropped,
                blank=rng.randint(0, 2),
                proof=rng.choice([{}, {"size": rng.randint(0, 9)}]),
                end=rng.choice([None, None, "done marker"]),
            )
        )
        balance += kept + sum(dropped.values())
        if rng.random() < 0.3:
            ops.append(Add(f"_val/val_{state.n}{number}.parquet", "", 0, 0, None, "val"))
    if state.files and rng.random() < 0.3:
        retired = rng.choice([file for file in state.files.values() if file.split != "tokens"])
        balance += retired.rows
        ops.append(Retire(retired.name))
        if paired := state.tokens_of(retired):
            ops.append(Retire(paired.name))
    if balance or rng.random() < 0.2:
        names: dict[Split, str] = {
            "train": f"shard_{state.n}.parquet",
            "val": f"_val/val_{state.n}9.parquet",
            "rejects": f"_rejects/rejects_{state.n}.jsonl",
        }
        split = rng.choice(list(names))
        ops.append(Add(names[split], "ab", rng.randint(0, 99), balance, None, split))
        if split != "rejects" and rng.random() < 0.5:
            ops.append(Add(token_name(names[split]), "cd", 9, balance, 7, "tokens"))
    if rng.random() < 0.3:
        ops.append(Beat())
    return ops


def seal(writer: LogWriter) -> None:
    train = writer.state.split("train")
    data = [*train, *writer.state.split("val")]
    writer.commit(
        [Seal(len(train), sum(f.rows for f in data), sum(f.bytes for f in data), writer.state.head)]
    )


# The same state either way.


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    commits=st.integers(0, 14),
    takeovers=st.sets(st.integers(0, 14)),
    sealed=st.booleans(),
)
def test_state_is_the_same_with_and_without_folds(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    commits: int,
    takeovers: set[int],
    sealed: bool,
) -> None:
    root = tmp_path_factory.mktemp("folds")
    rng = random.Random(seed)
    writer = begin(root)
    follower = Log.open(root)
    for number in range(commits):
        if number in takeovers:
            writer = begin(root)
        writer.commit(random_ops(writer, rng))
        if rng.random() < 0.3:
            follower.refresh()
    if sealed:
        seal(writer)
    each = Log(LocalStore(root))
    each.refresh(folds=False)
    folded = Log.open(root)
    follower.refresh()
    expected = plain(each.state)
    assert plain(folded.state) == expected
    assert plain(follower.state) == expected
    assert plain(writer.state) == expected
    assert folded.damaged_folds == []
    assert (
        len(list((root / "_fold").glob("*")) if (root / "_fold").exists() else [])
        == (each.state.n + 1) // EVERY
    )
    shutil.rmtree(root)


@pytest.mark.parametrize("before", range(2 * EVERY))
def test_seal_may_fall_on_any_slot(tmp_path: Path, before: int) -> None:
    """The last record of a fold may be the seal, which names the head before it."""
    writer = begin(tmp_path)
    commit_many(writer, before)
    seal(writer)
    log = Log.open(tmp_path)
    assert plain(log.state) == plain(writer.state)
    assert log.damaged_folds == []


@settings(deadline=None)
@given(seed=st.integers(0, 2**32))
def test_sum_keeps_one_progress_for_each_input_and_no_beat(seed: int) -> None:
    rng = random.Random(seed)
    ops: list[Op] = []
    to = {"a": 0, "b": 0}
    for _ in range(rng.randint(0, 20)):
        name = rng.choice(["a", "b"])
        step = rng.randint(0, 9)
        ops.append(Progress(name, to[name], to[name] + step, step, step, {}))
        to[name] += step
        if rng.random() < 0.5:
            ops.append(Beat())
    found = sum_ops(ops)
    assert not any(isinstance(op, Beat) for op in found)
    sums = {op.input: op for op in found if isinstance(op, Progress)}
    assert len(sums) == len(found)
    assert {name: op.to for name, op in sums.items()} == {n: t for n, t in to.items() if n in sums}
    assert all(op.start == 0 and op.read == op.kept == op.to for op in sums.values())


# Reads that folds save.


def test_folded_records_are_not_read(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    commit_many(writer, 5 * EVERY + 1)
    store = CountingStore(tmp_path)
    log = Log(store)
    log.refresh()
    assert log.state.n == 5 * EVERY + 1
    assert store.reads == [
        *(fold_name(number) for number in range(6)),  # the sixth is not there yet
        *(record_name(5 * EVERY + at) for at in range(3)),
    ]


@pytest.mark.parametrize("missing", range(3))
@pytest.mark.parametrize("how", ["missing", "flipped", "truncated", "empty"])
def test_lost_fold_costs_its_own_records_only(tmp_path: Path, missing: int, how: str) -> None:
    writer = begin(tmp_path)
    commit_many(writer, 6 * EVERY)
    path = tmp_path / fold_name(missing)
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.unlink()
    if how != "missing":
        path.write_bytes({"flipped": flipped, "truncated": data[:-9], "empty": b""}[how])
    store = CountingStore(tmp_path)
    log = Log(store)
    log.refresh()
    assert plain(log.state) == plain(writer.state)
    assert log.damaged_folds == ([] if how == "missing" else [fold_name(missing)])
    assert len(store.reads) <= 6 + 2 + 2 * EVERY


def test_all_folds_lost(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    commit_many(writer, 3 * EVERY)
    shutil.rmtree(tmp_path / "_fold")
    assert plain(Log.open(tmp_path).state) == plain(writer.state)


# Folds whose hash is right and whose content is not: a bug, another version, or malice.


def forged(path: Path, **changes: Any) -> None:
    fold = decode(path.read_bytes(), Fold, "")
    path.write_bytes(encode(msgspec.structs.replace(fold, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"ops": [Add("shard_99999.parquet", "", 1, 0, None, "train"), Retire("never")]},
        {"ops": [Add("shard_99999.parquet", "", 1, 5, None, "train")]},
        {"ops": [Progress("a", 0, 99, 0, 0, {}), Progress("a", 5, 99, 0, 0, {})]},
        {"prev": "ef" * 32},
        {"dataset": "e" * 32},
        {"epoch": -1},
        {"head": "ef" * 32},
        {"first": 3},
        {"last": EVERY},
        {"last": 5 * EVERY},
        {"format": 2},
    ],
    ids=str,
)
def test_wrong_fold_costs_time_only(tmp_path: Path, changes: dict[str, Any]) -> None:
    writer = begin(tmp_path)
    commit_many(writer, 3 * EVERY)
    forged(tmp_path / fold_name(1), **changes)
    log = Log(CountingStore(tmp_path))
    log.refresh()
    assert plain(log.state) == plain(writer.state)


def test_fold_that_goes_nowhere_does_not_hang(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    commit_many(writer, 3 * EVERY)
    fold = decode((tmp_path / fold_name(1)).read_bytes(), Fold, "")
    forged(tmp_path / fold_name(1), last=fold.first - 1, head=fold.prev, ops=[])
    log = Log(CountingStore(tmp_path))
    log.refresh()
    assert plain(log.state) == plain(writer.state)


def test_damage_before_a_fold_is_still_found_by_reading_each(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    commit_many(writer, 2 * EVERY)
    path = tmp_path / record_name(1)
    path.write_bytes(path.read_bytes().replace(b'"rows":2', b'"rows":3'))
    with pytest.raises(LogDamaged, match="the record is not what was written"):
        Log(LocalStore(tmp_path)).refresh(folds=False)


# Writers and folds.


def test_next_writer_leaves_the_fold_that_a_killed_one_did_not(tmp_path: Path) -> None:
    writer = begin(tmp_path)
    with mock.patch.object(LogWriter, "_at_boundary"):  # killed between record and fold
        commit_many(writer, EVERY)
    assert not (tmp_path / "_fold").exists()
    before = plain(Log.open(tmp_path).state)
    begin(tmp_path)
    assert (tmp_path / fold_name(0)).exists()
    log = Log(CountingStore(tmp_path))
    log.refresh()
    assert log.record(EVERY).n == EVERY
    assert log.damaged_folds == []
    assert [known["to"] for _, known in before["inputs"]] == [
        known.to for known in log.state.inputs.values()
    ]


@pytest.mark.parametrize("killed_after", range(1, 3 * EVERY))
def test_writer_killed_anywhere_before_a_fold(tmp_path: Path, killed_after: int) -> None:
    writer = begin(tmp_path)
    commit_many(writer, killed_after - 1)
    with mock.patch.object(LogWriter, "_at_boundary"):
        commit_many(writer, 1)
    writer = begin(tmp_path)
    commit_many(writer, 2 * EVERY)
    each = Log(LocalStore(tmp_path))
    each.refresh(folds=False)
    assert plain(Log.open(tmp_path).state) == plain(each.state) == plain(writer.state)
    folds = sorted(path.name for path in (tmp_path / "_fold").iterdir())
    assert folds == [Path(fold_name(k)).name for k in range((each.state.n + 1) // EVERY)]


@pytest.mark.parametrize("kind", ["AlreadyThere", "Unsure", "StoreFailed"])
def test_commit_stands_when_its_fold_cannot_be_written(tmp_path: Path, kind: str) -> None:
    errors = {
        "AlreadyThere": AlreadyThere("x"),
        "Unsure": Unsure("x"),
        "StoreFailed": StoreFailed("could not write", why="ENOSPC"),
    }

    class NoFolds(LocalStore):
        def create(self, name: str, data: bytes) -> None:
            if name.startswith("_fold/"):
                raise errors[kind]
            super().create(name, data)

    writer = LogWriter.take(NoFolds(tmp_path, make=True), {}, ["a"], writer="w")
    commit_many(writer, 3 * EVERY)
    assert writer.state.n == 3 * EVERY
    assert plain(Log.open(tmp_path).state) == plain(writer.state)


# A long log.


def build_long_log(root: Path, records: int) -> None:
    """As LogWriter leaves it, written directly: one shard for each record, with its folds."""
    (root / "_log").mkdir(parents=True)
    (root / "_fold").mkdir()
    head, first_prev, pending = "0" * 64, "0" * 64, []
    for n in range(records):
        ops: list[Op] = [
            Add(f"shard_{n:05d}.parquet", "ab" * 32, 123_456_789, 50_000, None, "train"),
            Progress("a.jsonl", n * 10, n * 10 + 10, 50_000, 50_000, {}, 0, {"size": n}),
        ]
        if n == 0:
            ops = [Open({"seed": 0}, ["a.jsonl"], "w"), *ops]
        data = encode(
            Record(FORMAT, "d" * 32, n, head, 1, f"{n:032x}", "2024-01-01T00:00:00", ops, "")
        )
        head = data[-67:-3].decode()
        (root / record_name(n)).write_bytes(data)
        pending += ops
        if (n + 1) % FOLD_EVERY == 0:
            first = n + 1 - FOLD_EVERY
            fold = Fold(
                FORMAT, "d" * 32, first, n, first_prev, head, 1, "2024", sum_ops(pending), ""
            )
            (root / fold_name(first // FOLD_EVERY)).write_bytes(encode(fold))
            first_prev, pending = head, []


def open_long_log(tmp_path: Path, records: int) -> float:
    """Seconds to open a log of so many records, from a warm cache."""
    root = tmp_path / "long"
    with mock.patch.object(log_module, "FOLD_EVERY", FOLD_EVERY):
        try:
            build_long_log(root, records)
            began = time.process_time()
            log = Log.open(root)
            took_s = time.process_time() - began
        finally:
            shutil.rmtree(root)  # hundreds of megabytes of small files: not left for pytest to keep
    assert log.state.n == records - 1
    assert len(log.state.files) == records
    assert log.state.inputs["a.jsonl"].kept == 50_000 * records
    assert log.damaged_folds == []
    print(f"\nopened {records:,} records in {took_s:.3f} s")
    return took_s


def test_log_of_20_thousand_records_opens_at_once(tmp_path: Path) -> None:
    assert open_long_log(tmp_path, 20_000) < 1.0


@pytest.mark.faults
def test_log_of_100_thousand_records_opens_at_once(tmp_path: Path) -> None:
    assert open_long_log(tmp_path, 100_000) < 2.0
