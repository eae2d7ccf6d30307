"""Waiting for a live dataset: a record wakes, the seal ends, silence is an error, no wall clock."""

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import LogDamaged, ProducerStalled
from penstock.store import log as log_module
from penstock.store.backends import LocalStore
from penstock.store.log import BEAT_S, STALL_S, Log, LogWriter
from penstock.store.record import FORMAT, Beat, Record, Seal, encode, record_name


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


def test_damage_is_not_silence(tmp_path: Path, writer: LogWriter) -> None:
    log = Log.open(tmp_path / "set")
    (tmp_path / "set" / record_name(1)).write_bytes(b"half a rec")
    with pytest.raises(LogDamaged, match="this is not a record"):
        log.wait(stall_s=30)
