"""A source that is removed and made again, or rolled back, while or before it is mirrored."""

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError, ShardMismatch, StateMismatch
from penstock.mirror import push_pull as sync
from penstock.mirror.config import SyncConfig
from penstock.mirror.push_pull import pull, push
from penstock.produce.verify import verify
from penstock.store import log as log_module
from penstock.store.local import LocalStore
from penstock.store.log import Log
from penstock.store.record import fold_name, record_name

from .test_sync import Producer, contents

Move = Callable[..., Any]
both = pytest.mark.parametrize("move", [push, pull])


def make(folder: Path, shards: int, size: int = 1000, *, seal: bool = False) -> Producer:
    producer = Producer(folder)
    for _ in range(shards):
        producer.add(size)
    if seal:
        producer.seal()
    return producer


class Swap:
    """Removes a source and puts another in its place, right before its record n is read again."""

    def __init__(self, source: Path, other: Path, n: int, *, reading: int = 2) -> None:
        self._source, self._other = source, other
        self._name, self._left = record_name(n), reading
        self._read = LocalStore.read

    def read(self, store: LocalStore, name: str) -> bytes:
        if store.root == self._source and name == self._name:
            self._left -= 1
            if self._left == 0:
                shutil.rmtree(self._source)
                self._other.rename(self._source)
        return self._read(store, name)


@both
@pytest.mark.parametrize("n", [0, 1, 3])
def test_a_source_made_again_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: Move, n: int
) -> None:
    """Nothing of the new one gets into the mirror, and the old one can go on there."""
    live, there = tmp_path / "live", tmp_path / "there"
    make(live, 4, seal=True)
    shutil.copytree(live, tmp_path / "copy")
    make(tmp_path / "other", 6, 700, seal=True)
    swap = Swap(live, tmp_path / "other", n)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "read", lambda store, name: swap.read(store, name))
        with pytest.raises(StateMismatch, match="was removed or replaced") as caught:
            move(live, there, SyncConfig(stall_s=5))
    assert "empty directory or prefix" in caught.value.do
    old = contents(tmp_path / "copy")
    found = {name: data for name, data in contents(there).items() if ".parts" not in name}
    assert found.items() <= old.items()
    assert record_name(n) not in found
    assert move(tmp_path / "copy", there).sealed
    assert verify(LocalStore(there), full=False).faults == []


@both
def test_a_source_made_again_while_it_is_awaited(tmp_path: Path, move: Move) -> None:
    live, there = tmp_path / "live", tmp_path / "there"
    make(live, 2)
    errors: list[PenstockError] = []

    def run() -> None:
        try:
            move(live, there, SyncConfig(stall_s=1.5))
        except PenstockError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 20
    while not (there / record_name(2)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shutil.rmtree(live)
    make(live, 1, 700)  # fewer records than were read: nothing new is seen
    before = contents(there)
    thread.join(20)
    assert isinstance(errors[0], StateMismatch)
    assert "was removed or replaced" in errors[0].what
    assert contents(there) == before


@both
def test_a_source_removed_before_a_file_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: Move
) -> None:
    """A file that a removed log does not name was not merged into another."""
    live, there = tmp_path / "live", tmp_path / "there"
    make(live, 3, seal=True)
    begin = sync._Sync._begin

    def removed(self: Any, n: int, threads: Any) -> None:
        if n == 2:
            real = self._move

            def gone(file: Any) -> int:
                shutil.rmtree(live, ignore_errors=True)
                return int(real(file))

            self._move = gone
        begin(self, n, threads)

    monkeypatch.setattr(sync._Sync, "_begin", removed)
    with pytest.raises((ShardMismatch, StateMismatch)):
        move(live, there, SyncConfig(stall_s=0.5))
    log = Log.open(there)
    for file in log.state.files.values():
        assert LocalStore(there).size(file.name) == file.bytes


def test_a_fold_of_another_log_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "FOLD_EVERY", 4)
    monkeypatch.setattr(sync, "FOLD_EVERY", 4)
    live, other, there = tmp_path / "live", tmp_path / "other", tmp_path / "there"
    make(live, 5, seal=True)
    make(other, 5, 700, seal=True)
    whole = (live / fold_name(0)).read_bytes()
    shutil.copy(other / fold_name(0), live / fold_name(0))
    push(live, there)
    assert not (there / fold_name(0)).exists()
    (live / fold_name(0)).write_bytes(whole)
    push(live, tmp_path / "again")
    assert (tmp_path / "again" / fold_name(0)).read_bytes() == whole


# Rolled back: the newest records were removed.


def rolled_back(live: Path, *, records: int) -> None:
    """Remove the newest records of a log, and its marker."""
    last = Log.open(live).state.n
    for n in range(last - records + 1, last + 1):
        (live / record_name(n)).unlink()
    (live / "_COMPLETE").unlink(missing_ok=True)


@both
def test_a_mirror_that_has_seen_more_than_its_source(tmp_path: Path, move: Move) -> None:
    live, there = tmp_path / "live", tmp_path / "there"
    make(live, 4, seal=True)
    move(live, there)
    before = contents(there)
    rolled_back(live, records=2)
    with pytest.raises(StateMismatch, match="has lost its newest records") as caught:
        move(live, there)
    assert caught.value.why == f"it ends at record 3; {there} has the same log up to record 5"
    assert "restore" in caught.value.do
    assert contents(there) == before


@both
def test_a_source_rolled_back_and_written_on(tmp_path: Path, move: Move) -> None:
    """The same dataset, the same number of records, another last one."""
    live, there = tmp_path / "live", tmp_path / "there"
    make(live, 3)
    move(live, there, SyncConfig(once=True))
    before = contents(there)
    rolled_back(live, records=1)
    (live / "shard_00002.parquet").unlink()
    Producer(live)
    assert Log.open(live).state.n == Log.open(there).state.n
    assert Log.open(live).state.dataset == Log.open(there).state.dataset
    with pytest.raises(StateMismatch, match="is not a beginning of") as caught:
        move(live, there, SyncConfig(once=True))
    assert "record 3 differs" in caught.value.why
    assert contents(there) == before
