"""What push and pull refuse, and what they say while they wait: between directories."""

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    BadConfig,
    LogDamaged,
    PenstockError,
    ProducerStalled,
    StateMismatch,
)
from penstock.mirror import push_pull as sync
from penstock.mirror import transfer
from penstock.mirror.config import SyncConfig
from penstock.mirror.disk_limit import DiskLimit, announce, write_position
from penstock.mirror.push_pull import pull, push
from penstock.mirror.threads import DaemonThreads
from penstock.store.local import LocalStore
from penstock.store.log import Log, merged_files
from penstock.store.record import Add, Merged, encode, record_name
from penstock.store.store import open_store
from penstock.work.events import Event, Events

from .test_sync import Producer, contents, make_dataset, table

Move = Callable[[Path, Path], Any]


def heard(kind: str) -> tuple[Events, list[str]]:
    """Events, and the messages of one kind that come by them."""
    said: list[str] = []

    def listen(event: Event) -> None:
        if event["kind"] == kind:
            said.append(event["message"])

    events = Events("test")
    events.listen(listen)
    return events, said


def plain(folder: Path, *names: str, rows: int = 5, complete: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        table(folder / name, rows)
    if complete:
        (folder / "_COMPLETE").touch()
    return folder


# A log that has lost its beginning is no directory of plain files.


@pytest.mark.parametrize("left", ["_log", "_fold", "_COMPLETE"])
@pytest.mark.parametrize("move", [push, pull])
def test_a_log_without_its_first_record(tmp_path: Path, move: Move, left: str) -> None:
    live = make_dataset(tmp_path)
    if left == "_log":
        (live / record_name(0)).unlink()
        (live / "_COMPLETE").unlink()
    else:
        shutil.rmtree(live / "_log")
    if left == "_fold":
        (live / "_COMPLETE").unlink()
        (live / "_fold").mkdir()
        (live / "_fold" / "0.json").write_bytes(b"{}")
    with pytest.raises(LogDamaged, match="the first record of the log is missing") as caught:
        move(live, tmp_path / "there")
    assert left in caught.value.why
    assert "restore _log from a copy" in caught.value.do
    assert not list((tmp_path / "there").glob("*.parquet"))


# Datasets do not mix.


@pytest.mark.parametrize("move", [push, pull])
def test_two_plain_datasets_in_one_place(tmp_path: Path, move: Move) -> None:
    one = plain(tmp_path / "one", "a.parquet", "b.parquet")
    two = plain(tmp_path / "two", "b.parquet", "c.parquet")
    target = tmp_path / "there"
    move(one, target)
    before = contents(target)
    with pytest.raises(StateMismatch, match="another dataset is at") as caught:
        move(two, target)
    assert caught.value.where.endswith("a.parquet")
    larger = plain(tmp_path / "larger", "a.parquet", "b.parquet", rows=50)
    with pytest.raises(StateMismatch, match="another dataset is at") as caught:
        move(larger, target)
    assert "bytes there" in caught.value.why
    growing = plain(tmp_path / "growing", "a.parquet", "b.parquet", complete=False)
    with pytest.raises(StateMismatch, match="another dataset is at") as caught:
        move(growing, target)
    assert caught.value.where.endswith("_COMPLETE")
    assert contents(target) == before
    assert move(one, target).sealed


def test_a_plain_push_goes_on_after_it_was_cut(tmp_path: Path) -> None:
    folder = plain(tmp_path / "plain", "a.parquet", complete=False)
    push(folder, tmp_path / "there", SyncConfig(once=True))
    (tmp_path / "there" / "a.parquet").unlink()  # killed after the sum, before the file
    plain(folder, "b.parquet")
    assert push(folder, tmp_path / "there").sealed
    assert (tmp_path / "there" / "a.parquet").read_bytes() == (folder / "a.parquet").read_bytes()


def test_a_file_of_the_same_size_and_other_bytes_is_named(tmp_path: Path) -> None:
    folder = plain(tmp_path / "plain", "a.parquet")
    push(folder, tmp_path / "there")
    data = bytearray((folder / "a.parquet").read_bytes())
    data[10] ^= 1
    (folder / "a.parquet").write_bytes(data)
    with pytest.raises(PenstockError, match=r"^a\.parquet is there already, with other bytes"):
        push(folder, tmp_path / "there")


def test_a_second_plain_push_that_began_beside_the_first(tmp_path: Path) -> None:
    """Neither says that the mixture is complete."""
    one = plain(tmp_path / "one", "a.parquet", complete=False)
    two = plain(tmp_path / "two", "c.parquet", complete=False)
    target, errors = tmp_path / "there", []

    def run(folder: Path) -> None:
        try:
            push(folder, target, SyncConfig(stall_s=20))
        except StateMismatch as error:
            errors.append(error)

    threads = []
    # the first look of both finds nothing
    real, gate = LocalStore.names, threading.Barrier(2)
    met = threading.local()

    def names(self: LocalStore, folder: str = "") -> list[tuple[str, int]]:
        found = real(self, folder)
        if self.root == target and not folder and not hasattr(met, "once"):
            met.once = True
            gate.wait(10)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "names", names)
        for folder in (one, two):
            threads.append(threading.Thread(target=run, args=(folder,)))
            threads[-1].start()
        deadline = time.monotonic() + 20
        while len(list(target.glob("*.parquet"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        for folder in (one, two):
            (folder / "_COMPLETE").touch()
        for thread in threads:
            thread.join(20)
    assert len(errors) == 2
    assert not (target / "_COMPLETE").exists()


def test_plain_files_are_not_put_among_those_of_a_log(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    push(live, tmp_path / "there")
    before = contents(tmp_path / "there")
    folder = plain(tmp_path / "plain", "extra.parquet")
    with pytest.raises(StateMismatch, match="holds a dataset with a log") as caught:
        push(folder, tmp_path / "there")
    assert "_log/" in caught.value.where
    assert contents(tmp_path / "there") == before
    push(folder, tmp_path / "other")
    with pytest.raises(StateMismatch, match="another dataset is at") as caught:
        push(live, tmp_path / "other")
    assert caught.value.where.endswith(("extra.parquet", "_COMPLETE"))
    assert not (tmp_path / "other" / "_log").exists()


# The mirror is looked at again.


def test_files_that_a_mirror_has_lost_are_sent_again(tmp_path: Path) -> None:
    live, there = make_dataset(tmp_path), tmp_path / "there"
    push(live, there)
    lost = ["shard_00001.parquet", "shard_00003.parquet"]
    for name in lost:
        (there / name).unlink()
    (there / "shard_00002.parquet").write_bytes(b"cut")
    events, said = heard("warn")
    found = push(live, there, SyncConfig(once=True), events)
    assert found.files == 3
    assert found.records == 0
    assert contents(there) == contents(live)
    assert len(said) == 1
    assert "has lost 3 files that its log names; they are moved again: shard_00001" in said[0]
    assert push(live, there, None, events).files == 0
    assert len(said) == 1


@pytest.mark.parametrize("replaced", [False, True])
def test_a_mirror_that_was_emptied_meanwhile(tmp_path: Path, replaced: bool) -> None:
    live, there = tmp_path / "live", tmp_path / "there"
    producer = Producer(live)
    producer.add()
    errors: list[PenstockError] = []

    def run() -> None:
        try:
            push(live, there, SyncConfig(stall_s=20))
        except PenstockError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = time.monotonic() + 20
    while not (there / record_name(1)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for path in (there / "_log").iterdir():
        path.unlink(missing_ok=True)  # a temporary file that push removes itself
    if replaced:
        other = Producer(there)
        other.add(77)
    producer.add()
    thread.join(20)
    assert isinstance(errors[0], StateMismatch)
    assert "was emptied or replaced while this command wrote to it" in errors[0].what
    assert errors[0].why == ("another record is there" if replaced else "the record was removed")
    assert not (there / record_name(2)).exists()


# Waiting.


@pytest.mark.parametrize("move", [push, pull])
def test_a_silent_producer_of_plain_files(tmp_path: Path, move: Callable[..., Any]) -> None:
    folder = plain(tmp_path / "plain", "a.parquet", complete=False)
    events, said = heard("wait")
    with pytest.raises(ProducerStalled, match=r"no parquet file has come in 0\.6 s") as caught:
        move(folder, tmp_path / "there", SyncConfig(stall_s=0.6), events)
    assert "_COMPLETE" in caught.value.do
    assert said == [f"waiting for more parquet files, or _COMPLETE, at {folder}"]


def test_a_plain_file_that_grows_is_a_sign_of_life(tmp_path: Path) -> None:
    folder = plain(tmp_path / "plain", "a.parquet", complete=False)
    stop = threading.Event()

    def grow() -> None:
        with open(folder / "b.parquet", "ab", buffering=0) as file:
            while not stop.wait(0.1):
                file.write(b"x")

    thread = threading.Thread(target=grow)
    thread.start()
    began = time.monotonic()
    threading.Timer(2.0, stop.set).start()
    with pytest.raises(ProducerStalled):
        push(folder, tmp_path / "there", SyncConfig(stall_s=0.8))
    thread.join()
    assert time.monotonic() - began > 2.5


def test_silence_is_told_as_it_was(tmp_path: Path) -> None:
    Producer(tmp_path / "live").add()
    with pytest.raises(ProducerStalled, match=r"has been silent for 0\.3 s"):
        push(tmp_path / "live", tmp_path / "there", SyncConfig(stall_s=0.3))


def test_patience_counts_from_the_failure_and_says_so(tmp_path: Path) -> None:
    from penstock.errors import StoreBusy

    events, said = heard("warn")
    patience = transfer.Patience(30, events)
    left = [2]

    def ask() -> str:
        if left[0]:
            left[0] -= 1
            raise StoreBusy("could not read x", where="s3://bucket", why="503")
        return "answer"

    assert patience.call(ask) == "answer"
    assert said == ["could not read x at s3://bucket: 503; trying again for 30 s at most"]


# DiskLimit.


def test_a_full_room_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "_LIMIT_TOLD_S", 0.3)
    live, back = tmp_path / "live", tmp_path / "back"
    producer = Producer(live)
    for _ in range(6):
        producer.add(10_000)
    producer.seal()
    events, said = heard("wait")
    thread = threading.Thread(
        target=lambda: pull(live, back, SyncConfig(max_disk_bytes=35_000), events), daemon=True
    )
    thread.start()
    deadline = time.monotonic() + 20
    while not said:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "shard_00003.parquet (10,000 bytes) waits for room" in said[0]
    assert "30,000 of 35,000 bytes (--max_disk) are held" in said[0]
    assert f"no reader has written its position into {back / '_position'}" in said[0]
    assert "raise --max_disk" in said[0]
    write_position(back, "trainer", 0)
    write_position(back, "eval", 2)
    told = len(said)
    while len(said) < told + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "before 0 (eval.json at shard 2, trainer.json at shard 0)" in said[-1]
    write_position(back, "trainer", 6)
    write_position(back, "eval", 6)
    thread.join(20)
    assert not thread.is_alive()


def test_room_is_given_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, make=True)
    assert isinstance(store, LocalStore)
    room = DiskLimit(store, 100)
    files = [Add(f"{k}.parquet", "", 60, 1, None, "val") for k in range(2)]
    for file in files:
        room.know(file)
    assert room.admit(files[0]) is True
    assert room.admit(files[1]) is None
    room.forget(files[0].name)
    assert room.admit(files[1]) is True


def test_a_merged_file_leaves_room(tmp_path: Path) -> None:
    live, back = tmp_path / "live", tmp_path / "back"
    producer = Producer(live)
    part = producer.add(60_000, "val")
    thread = threading.Thread(
        target=lambda: pull(live, back, SyncConfig(max_disk_bytes=100_000)), daemon=True
    )
    thread.start()
    deadline = time.monotonic() + 20
    while not (back / record_name(1)).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    producer.merge(part, 30_000)
    producer.add(50_000)
    producer.seal()
    thread.join(20)
    assert not thread.is_alive()
    assert not (back / part).exists()
    assert Log.open(back).state.sealed


def test_a_reader_that_was_announced_holds_what_it_needs(tmp_path: Path) -> None:
    announce(tmp_path, "eval")
    position = tmp_path / "_position" / "eval.json"
    assert position.read_text() == '{"shard": 0}'
    write_position(tmp_path, "eval", 7)
    announce(tmp_path, "eval")
    assert position.read_text() == '{"shard": 7}'
    with pytest.raises(BadConfig, match=r"reader is '\.\./x'"):
        write_position(tmp_path, "../x", 1)


# Addresses.


def test_addresses_of_files(tmp_path: Path) -> None:
    folder = plain(tmp_path / "my data", "a.parquet")
    escaped = str(folder).replace(" ", "%20")
    for k, url in enumerate(
        (f"file://{escaped}", f"file://localhost{escaped}", f"file://{folder}")
    ):
        assert pull(url, tmp_path / str(k)).files == 1
    with pytest.raises(BadConfig, match="is not a path of this machine") as caught:
        open_store("file://host/x")
    assert "'host'" in caught.value.why
    with pytest.raises(BadConfig, match="is not a path of this machine"):
        open_store("file://relative")


# Threads.


def begun(crew: DaemonThreads, call: Callable[[], object]) -> "Future[object]":
    future = crew.submit(call)
    while not future.running():
        time.sleep(0.001)
    return future


def test_a_crew_is_not_waited_for_at_an_interrupt() -> None:
    held = threading.Event()
    began = time.monotonic()
    crew = DaemonThreads(1, "test")
    running = begun(crew, lambda: held.wait(30))
    waiting = crew.submit(held.wait, 30)
    with pytest.raises(KeyboardInterrupt), crew:
        raise KeyboardInterrupt
    assert time.monotonic() - began < 5
    assert waiting.cancelled()
    held.set()
    assert running.result(5)
    assert crew.submit(os.getpid).cancelled()


def test_a_crew_ends_what_it_began_before_an_error_is_told() -> None:
    done: list[int] = []

    def work() -> None:
        time.sleep(0.2)
        done.append(1)

    crew = DaemonThreads(2, "test")
    begun(crew, work)
    with pytest.raises(ValueError, match="wrong"), crew:
        raise ValueError("wrong")
    assert done == [1]
    failing = DaemonThreads(1, "test")
    with pytest.raises(ZeroDivisionError):
        failing.submit(lambda: 1 // 0).result(5)
    failing.close(wait=True)


@pytest.mark.parametrize("once", [True, False])
def test_a_log_with_a_hole_is_not_taken_for_one_that_ends_there(tmp_path: Path, once: bool) -> None:
    source = tmp_path / "live"
    producer = Producer(source)
    for _ in range(6):
        producer.add()
    producer.seal()
    (source / "_log" / f"{3:020d}.json").unlink()
    began = time.monotonic()
    with pytest.raises(LogDamaged, match="record 3 is missing"):
        push(source, tmp_path / "b", SyncConfig(once=once, stall_s=100))
    assert time.monotonic() - began < 60
    (source / "_log" / f"{0:020d}.json").unlink()
    with pytest.raises(LogDamaged, match="record 0 is missing"):
        Log.open(source)


def test_a_list_of_merged_files_hides_no_training_shard(tmp_path: Path) -> None:
    source = make_dataset(tmp_path)
    state = Log.open(source).state
    shard = state.split("train")[0].name
    told = Merged(1, state.dataset, [shard, "_val/val_00000.parquet"], "")
    (source / "_merged.json").write_bytes(encode(told))
    assert merged_files(open_store(source), state.dataset) == {"_val/val_00000.parquet"}
