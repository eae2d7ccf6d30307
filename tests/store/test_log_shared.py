"""Several writers of one log: each builds on what the others have added, none is lost."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import AlreadySealed, Fenced
from penstock.store.local import LocalStore
from penstock.store.log import FOLD_EVERY, Log, LogState, LogWriter, SharedLog
from penstock.store.record import Add, Op, Progress, Seal, format_of

CONFIG = {"shared": True}


def join(root: Path) -> SharedLog:
    return SharedLog.join(LocalStore(root, make=True), CONFIG, writer="test")


def adding(name: str, rows: int = 1) -> Callable[[LogState], list[Op]]:
    """A file of that name, unless it is there."""

    def make(state: LogState) -> list[Op]:
        if name in state.files:
            return []
        before = state.inputs.get("x")
        start = before.to if before else 0
        add = Add(name, "0" * 64, 1, rows, None, "train", keys="AAAA")
        return [add, Progress("x", start, start + rows, rows, rows, {})]

    return make


def test_all_who_join_an_empty_place_write_one_log(tmp_path: Path) -> None:
    logs = [join(tmp_path / "d") for _ in range(3)]
    assert {log.state.dataset for log in logs} == {logs[0].state.dataset}
    assert {log.state.n for log in logs} == {0}


def test_a_taken_slot_is_read_and_built_on(tmp_path: Path) -> None:
    one, two = join(tmp_path / "d"), join(tmp_path / "d")
    for k in range(6):
        (one, two)[k % 2].share(adding(f"shard_{k}.parquet"))
    log = Log.open(tmp_path / "d")
    assert [*log.state.files] == [f"shard_{k}.parquet" for k in range(6)]
    assert log.state.inputs["x"].to == 6
    assert log.record(1).format == 2  # what earlier versions do not know


def test_what_is_there_by_then_is_not_added_again(tmp_path: Path) -> None:
    one, two = join(tmp_path / "d"), join(tmp_path / "d")
    assert one.share(adding("shard_0.parquet")) is not None
    assert two.share(adding("shard_0.parquet")) is None
    assert Log.open(tmp_path / "d").state.n == 1


def test_who_is_second_at_a_slot_asks_again(tmp_path: Path) -> None:
    """The other commits between the look and the commit."""
    one, two = join(tmp_path / "d"), join(tmp_path / "d")
    asked = []

    def make(state: LogState) -> list[Op]:
        asked.append(state.n)
        if len(asked) < 4:
            two.share(adding(f"shard_{len(asked)}.parquet"))
        return adding("shard_0.parquet")(state)

    record = one.share(make)
    assert record is not None
    assert record.n == 4
    assert asked == [0, 1, 2, 3]
    assert one.lost == 3


def test_many_at_once(tmp_path: Path) -> None:
    """Threads with a log each, over the boundary of a fold."""
    count = FOLD_EVERY // 8 + 10

    def run(number: int) -> None:
        log = join(tmp_path / "d")
        for k in range(count):
            log.share(adding(f"shard_{number * 1000 + k}.parquet"))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = Log.open(tmp_path / "d")
    assert log.damaged_folds == []
    expected = {f"shard_{n * 1000 + k}.parquet" for n in range(8) for k in range(count)}
    assert {*log.state.files} == expected
    again = Log(log.store)
    again.refresh(folds=False)
    assert again.state.files == log.state.files
    assert again.state.head == log.state.head


def test_the_seal_ends_it_for_all(tmp_path: Path) -> None:
    one, two = join(tmp_path / "d"), join(tmp_path / "d")
    one.share(adding("shard_0.parquet"))
    one.share(lambda state: [Seal(1, 1, 1, state.head)])
    with pytest.raises(AlreadySealed, match="is sealed; nothing can be added"):
        two.share(adding("shard_1.parquet"))


def test_a_writer_that_takes_the_log_fences_those_who_share_it(tmp_path: Path) -> None:
    one = join(tmp_path / "d")
    LogWriter.take(LocalStore(tmp_path / "d"), CONFIG, [], writer="other")
    with pytest.raises(Fenced, match="another writer has taken this dataset over"):
        one.share(adding("shard_0.parquet"))


def test_keys_are_of_the_second_format() -> None:
    assert format_of([Add("shard_0.parquet", "0" * 64, 1, 1, None, "train")]) == 1
    assert format_of([Add("shard_0.parquet", "0" * 64, 1, 1, None, "train", keys="AAAA")]) == 2
