"""Waiting for a live dataset: a record wakes, the seal ends, silence is an error, no wall clock."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import LogDamaged, ProducerStalled
from penstock.produce.writer import finish
from penstock.store import log as log_module
from penstock.store.local import LocalStore
from penstock.store.log import BEAT_S, STALL_S, Log, LogWriter
from penstock.store.record import FORMAT, Add, Beat, Record, Seal, decode, encode, record_name


class FakeTime:
    """A clock that moves only when someone sleeps; asking for the wall clock is a fault."""

    def __init__(self, on_sleep: Callable[[float], None] = lambda now: None) -> None:
        self.now = 1_000.0
        self.sleeps = 0
        self._on_sleep = on_sleep

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.sleeps += 1
        assert self.sleeps < 100_000, "waiting does not end"
        self._on_sleep(self.now)

    def time(self) -> float:
        raise AssertionError("the wall clock was asked")


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    return LogWriter.take(LocalStore(tmp_path / "set", make=True), {}, [], writer="w")


def test_new_record_wakes_the_follower(tmp_path: Path, writer: LogWriter) -> None:
    log = Log.open(tmp_path / "set")
    producer = threading.Timer(0.2, lambda: writer.commit([Beat()]))
    producer.start()
    try:
        assert log.wait(stall_s=30) == 1
    finally:
        producer.join(30)
    assert log.state.n == 1


def test_all_that_came_meanwhile_is_read(tmp_path: Path, writer: LogWriter) -> None:
    log = Log.open(tmp_path / "set")
    for _ in range(3):
        writer.commit([Beat()])
    assert log.wait(stall_s=0) == 3


def test_silence_is_an_error_that_says_what_to_do(tmp_path: Path, writer: LogWriter) -> None:
    log = Log.open(tmp_path / "set")
    began = time.monotonic()
    with pytest.raises(ProducerStalled) as caught:
        log.wait(stall_s=0.3)
    assert 0.3 <= time.monotonic() - began < 10
    assert str(caught.value) == (
        "the dataset is not sealed, and its writer has been silent for 0.3 s\n"
        f"  where: {tmp_path}/set, after record 0 of {writer.state.time}\n"
        "  why:   a live writer commits a beat at least every 10 s; silence is not the end\n"
        "  do:    start the producer again with the same command: it goes on where it was"
    )
    writer.commit([Beat()])
    assert log.wait(stall_s=0.3) == 1  # the same follower can go on


def test_sealed_returns_at_once(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.commit([Seal(0, 0, 0, writer.state.head)])
    clock = FakeTime()
    monkeypatch.setattr(log_module, "time", clock)
    log = Log.open(tmp_path / "set")
    assert log.wait() == 0
    assert clock.sleeps == 0


def test_the_seal_itself_wakes_the_follower(tmp_path: Path, writer: LogWriter) -> None:
    log = Log.open(tmp_path / "set")
    writer.commit([Seal(0, 0, 0, writer.state.head)])
    assert log.wait() == 1
    assert log.wait() == 0


def test_stall_is_counted_on_the_followers_own_steady_clock(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeTime()
    log = Log.open(tmp_path / "set")
    monkeypatch.setattr(log_module, "time", clock)
    with pytest.raises(ProducerStalled):
        log.wait()
    assert STALL_S <= clock.now - 1_000 < STALL_S + 1
    assert STALL_S >= 5 * BEAT_S  # a live writer is never taken for a dead one


def test_each_sign_of_life_starts_the_count_again(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[float] = []

    def beat_every_100_s(now: float) -> None:
        if now - 1_000 >= 100 * (len(beats) + 1) and len(beats) < 5:
            beats.append(now)
            with monkeypatch.context() as real:
                real.setattr(log_module, "time", time)
                writer.commit([Beat()])

    log = Log.open(tmp_path / "set")
    clock = FakeTime(beat_every_100_s)
    monkeypatch.setattr(log_module, "time", clock)
    for _ in range(5):
        assert log.wait() == 1
    with pytest.raises(ProducerStalled):
        log.wait()
    assert len(beats) == 5


@pytest.mark.parametrize(
    "stamp",
    ["1970-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00", "", "yesterday"],
)
def test_the_writers_clock_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stamp: str
) -> None:
    """A producer whose clock is years off is as alive as any other."""
    folder = tmp_path / "_log"
    folder.mkdir()
    head = "0" * 64

    def append(n: int) -> None:
        nonlocal head
        data = encode(Record(FORMAT, "d", n, head, 1, str(n), stamp, [Beat()], ""))
        (tmp_path / record_name(n)).write_bytes(data)
        head = data[-67:-3].decode()

    append(0)
    log = Log.open(tmp_path)
    append(1)
    monkeypatch.setattr(log_module, "time", FakeTime())
    assert log.wait() == 1
    with pytest.raises(ProducerStalled, match=re.escape(f"after record 1 of {stamp}\n")):
        log.wait()


def test_wall_clock_that_jumps_does_not_disturb(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter([0.0, 1e12, -1e12] * 1_000)
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    log = Log.open(tmp_path / "set")
    producer = threading.Timer(0.1, lambda: writer.commit([Beat()]))
    producer.start()
    try:
        assert log.wait(stall_s=30) == 1
    finally:
        producer.join(30)
    with pytest.raises(ProducerStalled):
        log.wait(stall_s=0.05)


# A writer that lives, and waits for its input.


def test_input_that_is_silent_too_long_is_an_error_of_its_own(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.open(tmp_path / "set")
    writer.commit([Beat("in.jsonl", 40)])
    assert log.wait(input_stall_s=50) == 1  # what came is for the caller to look at
    clock = FakeTime()
    log._read_at = clock.now
    monkeypatch.setattr(log_module, "time", clock)
    with pytest.raises(ProducerStalled) as caught:
        log.wait(input_stall_s=50)
    assert clock.now - 1_000 == pytest.approx(20, abs=1)  # two beats: the writer may be back
    assert str(caught.value) == (
        "the input of the dataset has not grown for 60 s: in.jsonl\n"
        f"  where: {tmp_path}/set, after record 1 of {writer.state.time}\n"
        "  why:   the sharder is alive and waits for whoever writes that file; neither a done "
        "marker nor --until_idle says that it has ended\n"
        "  do:    start the writer of the input again, or mark the input as done (in.jsonl.done); "
        "a longer stall_s waits longer"
    )


def test_silence_of_the_input_is_counted_on_from_the_last_beat_and_told_every_minute(
    tmp_path: Path,
    writer: LogWriter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    beats = 0

    def beat_every_10_s(now: float) -> None:
        nonlocal beats
        if now - 1_000 >= 10 * (beats + 1):
            beats += 1
            with monkeypatch.context() as real:
                real.setattr(log_module, "time", time)
                writer.commit([Beat("in.jsonl", 10 * beats)])

    log = Log.open(tmp_path / "set")
    clock = FakeTime(beat_every_10_s)
    monkeypatch.setattr(log_module, "time", clock)
    for _ in range(30):
        assert log.wait(input_stall_s=305) == 1
    with pytest.raises(ProducerStalled, match=r"^the input of the dataset has not grown for 305 s"):
        log.wait(input_stall_s=305)
    assert clock.now - 1_000 == pytest.approx(305, abs=1)
    told = [one.getMessage() for one in caplog.records]
    assert len(told) == 5  # after 60, 120, 180, 240 and 300 s
    assert told[0] == (
        f"{tmp_path}/set: waiting for more; its sharder is alive, and its input in.jsonl has not "
        "grown for 60 s"
    )


def test_what_is_added_ends_the_silence_of_the_input(tmp_path: Path, writer: LogWriter) -> None:
    writer.commit([Beat("in.jsonl", 1_000)])
    writer.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    log = Log.open(tmp_path / "set")
    assert log.state.beat is None
    with pytest.raises(ProducerStalled, match=r"its writer has been silent for 0\.1 s"):
        log.wait(stall_s=0.1, input_stall_s=30)


def test_input_that_is_slow_is_waited_for_by_who_sets_no_limit(
    tmp_path: Path, writer: LogWriter
) -> None:
    writer.commit([Beat("in.jsonl", 1_000_000)])
    log = Log.open(tmp_path / "set")
    with pytest.raises(ProducerStalled, match=r"its writer has been silent for 0\.1 s"):
        log.wait(stall_s=0.1)


def test_beat_without_a_silent_input_is_written_as_it_always_was() -> None:
    record = Record(FORMAT, "d", 0, "0" * 64, 1, "c", "", [Beat()], "")
    assert b'"ops":[{"type":"beat"}]' in encode(record)
    assert decode(encode(record), Record, "here").ops == [Beat()]


def test_time_in_which_the_store_does_not_answer_is_no_silence_of_the_writer(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Log.open(tmp_path / "set")
    clock = FakeTime()
    monkeypatch.setattr(log_module, "time", clock)
    slow = [300.0]
    find = log.find

    def away_for_300_s(n: int) -> Record | None:
        clock.now += slow.pop() if slow else 0
        return find(n)

    monkeypatch.setattr(log, "find", away_for_300_s)
    with pytest.raises(ProducerStalled):
        log.wait()
    assert clock.now - 1_000 == pytest.approx(300 + STALL_S, abs=1)


# A hole.


def pierced(folder: Path, writer: LogWriter, *, count: int, hole: int, seal: bool = False) -> Path:
    """A log of `count` records more, of which one is gone."""
    for _ in range(count):
        writer.commit([Beat()])
    if seal:
        writer.commit([Seal(0, 0, 0, writer.state.head)])
        finish(writer)
    (folder / "set" / record_name(hole)).unlink()
    return folder / "set"


@pytest.mark.parametrize("hole", [1, 3, 6])
@pytest.mark.parametrize("seal", [False, True])
def test_hole_is_damage_and_neither_silence_nor_a_place_to_write(
    tmp_path: Path, writer: LogWriter, hole: int, seal: bool
) -> None:
    """The sealed one loses its seal, too: the marker shows that there was one."""
    folder = pierced(
        tmp_path, writer, count=6 - seal, hole=hole - (hole == 6 and not seal), seal=seal
    )
    before = sorted(folder.rglob("*"))
    log = Log.open(folder)
    with pytest.raises(LogDamaged) as caught:
        log.wait(stall_s=0.2)
    missing = log.state.n + 1
    assert caught.value.what == f"record {missing} is missing"
    assert caught.value.where == f"{folder}/{record_name(missing)}"
    assert caught.value.why.endswith(" is there, which was written after it")
    with pytest.raises(LogDamaged, match=f"^record {missing} is missing"):
        LogWriter.take(LocalStore(folder), {}, [], writer="next")
    with pytest.raises(LogDamaged, match=f"^record {missing} is missing"):
        raise log.stalled(1)
    assert sorted(folder.rglob("*")) == before


def test_hole_is_noticed_long_before_the_writer_counts_as_stalled(
    tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pierced(tmp_path, writer, count=4, hole=2)
    clock = FakeTime()
    monkeypatch.setattr(log_module, "time", clock)
    with pytest.raises(LogDamaged, match=r"^record 2 is missing"):
        Log.open(folder).wait()
    assert clock.now - 1_000 < 5


def test_hole_before_records_far_away_is_found_by_a_writer(
    tmp_path: Path, writer: LogWriter
) -> None:
    folder = pierced(tmp_path, writer, count=40, hole=40)
    for n in range(2, 40):
        (folder / record_name(n)).unlink()
    (folder / record_name(40)).write_bytes(b"whatever")
    with pytest.raises(LogDamaged, match=r"^record 2 is missing"):
        LogWriter.take(LocalStore(folder), {}, [], writer="next")


def test_first_record_that_is_gone_is_a_hole(tmp_path: Path, writer: LogWriter) -> None:
    folder = pierced(tmp_path, writer, count=2, hole=0)
    with pytest.raises(LogDamaged, match=r"^record 0 is missing"):
        LogWriter.take(LocalStore(folder), {}, [], writer="next")


def test_damage_is_not_silence(tmp_path: Path, writer: LogWriter) -> None:
    log = Log.open(tmp_path / "set")
    (tmp_path / "set" / record_name(1)).write_bytes(b"half a rec")
    with pytest.raises(LogDamaged, match="this is not a record"):
        log.wait(stall_s=30)
