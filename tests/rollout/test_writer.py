"""The writer: each rollout once, whoever writes it again; durable when `write` returns."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from penstock.errors import AlreadySealed, BadConfig, BadRollout, StoreFailed
from penstock.produce.verify import verify
from penstock.rollout import writer as module
from penstock.rollout.check import check_table
from penstock.rollout.records import CONFIG
from penstock.rollout.writer import KnownKeys, RolloutWriter
from penstock.store.log import Log, LogWriter
from penstock.store.record import Beat
from penstock.store.store import open_store
from penstock.tokenize.tokenizer import Tokenizer
from services.proxy import Kind, Proxy
from services.servers import Cloud, Server, clouds

from .made import groups, ids_in, rollout


def test_what_is_written_is_there(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        assert writer.write(rollout("a"))
        assert ids_in(tmp_path / "d") == ["a"]  # while it is open
        assert writer.write_many(groups(3)) == 12
        assert writer.num_written == 13
        assert writer.num_records == 2
    assert ids_in(tmp_path / "d")[1:] == [one["rollout_id"] for one in groups(3)]
    assert verify(tmp_path / "d", full=True).faults == []


def test_the_same_again_adds_nothing(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write(rollout("a"))
        assert not writer.write(rollout("a"))
        assert writer.write_many([rollout("a"), rollout("b"), rollout("b")]) == 1
        assert (writer.num_written, writer.num_repeated) == (2, 2)
    with RolloutWriter(tmp_path / "d") as writer:  # after a crash, in another process
        assert not writer.write(rollout("a", meta={"try": 2}))
        assert writer.write_many([rollout("b"), rollout("c")]) == 1
    assert ids_in(tmp_path / "d") == ["a", "b", "c"]
    assert Log.open(tmp_path / "d").state.n == 3


def test_another_under_its_id_is_an_error(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write(rollout("a"))
        for other in (
            rollout("a", reward=-1.0),
            rollout("a", "other"),
            rollout("a", logprobs=None, weight_version=3),
        ):
            with pytest.raises(BadRollout, match="another rollout is there under the id 'a'") as e:
                writer.write(other)
            assert e.value.reason == "other_content"
        writer.write(rollout("b"))
    assert ids_in(tmp_path / "d") == ["a", "b"]


def test_bad_rollouts_are_not_written(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        with pytest.raises(BadRollout, match="reward: reward not finite"):
            writer.write(rollout("a", reward=float("nan")))
        with pytest.raises(BadRollout) as e:
            writer.write_many([rollout("a"), rollout("b", completion_mask=[0])])
        assert e.value.row == 1
    assert ids_in(tmp_path / "d") == []


def test_two_writers_in_turn(tmp_path: Path) -> None:
    one, two = RolloutWriter(tmp_path / "d"), RolloutWriter(tmp_path / "d")
    for k in range(6):
        assert (one, two)[k % 2].write(rollout(k))
        assert not (two, one)[k % 2].write(rollout(k))
        assert one.has(k)
        assert two.has(str(k))
    assert not one.has("none")
    one.close()
    two.close()
    assert ids_in(tmp_path / "d") == [*"012345"]


def test_writers_that_write_the_same_at_once(tmp_path: Path) -> None:
    made = groups(12)
    writers = [RolloutWriter(tmp_path / "d") for _ in range(4)]

    def run(number: int) -> int:
        order = np.random.default_rng(number).permutation(len(made))
        return sum(writers[number].write(made[k]) for k in order)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(run, range(4))) == len(made)
    for writer in writers:
        writer.close()
    assert sorted(ids_in(tmp_path / "d")) == sorted(one["rollout_id"] for one in made)
    assert verify(tmp_path / "d", full=True).faults == []
    # a file that was stored for a slot that another got is removed if some of it was there
    files = {path.name for path in (tmp_path / "d").glob("shard_*")}
    assert files == {*Log.open(tmp_path / "d").state.files}


def test_threads_that_share_a_writer_share_records(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        with writer._using, ThreadPoolExecutor(16) as pool:  # the commit is held up
            found = [pool.submit(writer.write, rollout(k)) for k in range(16)]
            while writer._held < 16:
                threading.Event().wait(0.001)
            writer._using.release()
            assert all(future.result() for future in found)
            writer._using.acquire()
        assert writer.num_records <= 2
    assert len(ids_in(tmp_path / "d")) == 16


def test_what_nobody_waits_for_is_gathered(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d", gather_s=30) as writer:
        for one in groups(4):
            writer.write(one, wait=False)
        writer.flush()
        assert len(ids_in(tmp_path / "d")) == 16
        assert writer.num_records == 1
        writer.write(rollout("last"), wait=False)
    assert ids_in(tmp_path / "d")[-1] == "last"


def test_what_went_wrong_with_what_nobody_waited_for_is_told_by_flush(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d", gather_s=30) as writer:
        writer.write(rollout("a"), wait=False)
        writer.write(rollout("a", reward=-1.0), wait=False)
        with pytest.raises(BadRollout, match="another rollout is there"):
            writer.flush()
        writer.flush()
    assert ids_in(tmp_path / "d") == ["a"]


def test_much_at_once_is_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 10)
    monkeypatch.setattr(module, "MOST_TOKENS", 60)
    with RolloutWriter(tmp_path / "d") as writer:
        assert writer.write_many(groups(8)) == 32
    files = Log.open(tmp_path / "d").state.split("train")
    assert max(file.rows for file in files) <= 10
    assert all((file.tokens or 0) <= 60 for file in files)
    assert len(ids_in(tmp_path / "d")) == 32


def test_files_hold_what_was_written(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write(rollout("a", meta={"prompt": "x"}, rewards={"right": 1.0}, temperature=0.7))
    (path,) = (tmp_path / "d").glob("shard_*.parquet")
    found = check_table(pq.read_table(path)).rollouts
    assert found.meta[0].as_py() == '{"prompt":"x"}'
    assert found.rewards["right"].tolist() == [1.0]
    assert found.completion_ids.tolist() == rollout("a")["completion_ids"]


def test_the_seal(tmp_path: Path) -> None:
    one, two = RolloutWriter(tmp_path / "d"), RolloutWriter(tmp_path / "d")
    one.write(rollout("a"))
    one.seal()
    with pytest.raises(AlreadySealed):
        two.write(rollout("b"))
    two.close()
    assert verify(tmp_path / "d", full=True).faults == []
    assert (tmp_path / "d" / "_COMPLETE").exists()
    with RolloutWriter(tmp_path / "d") as late:
        with pytest.raises(AlreadySealed):
            late.write(rollout("b"))
        assert late.has("a")
        assert not late.write(rollout("a"))  # what was there before the end is there
        late.seal()  # by one that was killed after it had sealed
    assert verify(tmp_path / "d", full=True).faults == []


def test_an_idle_writer_is_told_of_the_seal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread would beat, and ended at the refusal: the next write waited for ever."""
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    with RolloutWriter(tmp_path / "d") as idle:
        RolloutWriter(tmp_path / "d").seal()
        time.sleep(0.2)
        assert idle._thread.is_alive()
        with pytest.raises(AlreadySealed):
            idle.write(rollout("a"))


def test_retries_beside_others_are_the_same(tmp_path: Path) -> None:
    """Rewards by name are columns of a file: what others have there is no part of a rollout."""
    one = rollout("a", rewards={"right": 1.0})
    two = rollout("b", rewards={"fast": 1.0})
    with RolloutWriter(tmp_path / "d") as writer:
        assert writer.write_many([one, two]) == 2
        assert not writer.write(one)
        assert not writer.write(two)
        with pytest.raises(BadRollout, match="another rollout is there"):
            writer.write(rollout("a", rewards={"fast": 1.0}))


WITHOUT = {"logprobs": None}
VALUED = {"values": [0.5]}


@pytest.mark.parametrize(
    ("before", "after", "field", "reason"),
    [
        ({}, WITHOUT, "logprobs", "logprobs_missing"),
        (WITHOUT, {}, "logprobs", "unlike_logprobs"),
        (VALUED, {}, "values", "values_missing"),
        ({}, VALUED, "values", "unlike_values"),
    ],
)
def test_rollouts_unlike_those_of_the_dataset_are_refused(
    tmp_path: Path, before: Any, after: Any, field: str, reason: str
) -> None:
    """A dataset that never had log-probabilities, or values, goes on without."""
    one = {"completion_ids": [1], "completion_mask": [1], "logprobs": [-0.5]}
    with RolloutWriter(tmp_path / "d") as early, RolloutWriter(tmp_path / "d") as writer:
        early.write_many(rollout(name, **(one | before)) for name in "ab")
        for other in (writer, early, RolloutWriter(tmp_path / "d")):
            with pytest.raises(BadRollout, match=field) as error:
                other.write_many(rollout(name, **(one | after)) for name in "cd")
            assert (error.value.row, error.value.field, error.value.reason) == (0, field, reason)
            assert error.value.where == "rollouts, row 0, rollout 'c'"
            assert str(tmp_path / "d") in error.value.why
            assert not other.write(rollout("a", **(one | before))), "it is there"
            assert other.write(rollout(f"{other.num_repeated}{id(other)}", **(one | before)))
        other.close()
    assert len(ids_in(tmp_path / "d")) == 5


def test_of_writers_that_begin_at_once_the_first_record_decides(tmp_path: Path) -> None:
    """Whoever is second reads what the first has stored before it commits."""
    with RolloutWriter(tmp_path / "d") as one, RolloutWriter(tmp_path / "d") as other:
        begun = threading.Barrier(2)

        def write(writer: RolloutWriter, **changed: Any) -> bool:
            begun.wait()
            return writer.write(rollout(str(changed), **changed))

        with ThreadPoolExecutor() as threads:
            told = [threads.submit(write, one), threads.submit(write, other, logprobs=None)]
            errors = [future.exception(30) for future in told]
    assert [type(error) for error in errors if error] == [BadRollout]
    assert len(ids_in(tmp_path / "d")) == 1


def test_what_is_gathered_is_like_the_first(tmp_path: Path) -> None:
    """Threads of which some have no log-probabilities share a writer: none vanish."""
    with RolloutWriter(tmp_path / "d", gather_s=30) as writer:
        for k in range(6):
            writer.write(rollout(k, logprobs=None) if k % 3 == 2 else rollout(k), wait=False)
        with pytest.raises(BadRollout, match="logprobs: missing"):
            writer.flush()
        with pytest.raises(BadRollout, match="rollout '5'"):
            writer.flush()
        writer.flush()
    for path in (tmp_path / "d").glob("shard_*.parquet"):
        assert pq.read_table(path).column("logprobs").null_count == 0
    assert sorted(ids_in(tmp_path / "d")) == [*"0134"]


def test_a_first_file_that_is_gone_says_nothing(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write(rollout("a"))
        writer.write(rollout("b"))
    first, _ = (file.name for file in Log.open(tmp_path / "d").state.split("train"))
    (tmp_path / "d" / first).unlink()
    with RolloutWriter(tmp_path / "d") as writer, pytest.raises(BadRollout, match="missing"):
        writer.write(rollout("c", logprobs=None))


def test_writers_that_wait_show_that_they_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    with RolloutWriter(tmp_path / "d"), RolloutWriter(tmp_path / "d"):
        log = Log.open(tmp_path / "d")
        log.wait(stall_s=10)
        log.wait(stall_s=10)
    assert isinstance(log.record(log.state.n).ops[0], Beat)


def test_a_store_that_fails_fails_who_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write(rollout("a"))

        def refuse(*_: object) -> None:
            raise StoreFailed("no room")

        monkeypatch.setattr(writer._store, "add", refuse)
        with pytest.raises(StoreFailed, match="no room"):
            writer.write(rollout("b"))
        monkeypatch.undo()
        assert writer.write(rollout("b"))  # nothing was lost: it is tried again
    assert ids_in(tmp_path / "d") == ["a", "b"]


class Failing:
    """A writer's store refuses files until it is told not to."""

    def __init__(self, writer: RolloutWriter, patched: pytest.MonkeyPatch) -> None:
        self.writer, self.times = writer, 0
        add = writer._store.add
        self.is_full = True

        def refuse(*args: Any) -> None:
            self.times += self.is_full
            if self.is_full:
                raise StoreFailed("no room")
            add(*args)

        patched.setattr(writer._store, "add", refuse)

    def wait(self) -> None:
        """Until a commit has failed."""
        with self.writer._changed:
            assert self.writer._changed.wait_for(lambda: self.writer._stuck is not None, 30)


def test_the_next_write_says_what_went_wrong_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on until `flush`, which then had lost all that was written meanwhile."""
    with RolloutWriter(tmp_path / "d", gather_s=0) as writer:
        failing = Failing(writer, monkeypatch)
        writer.write(rollout("a"), wait=False)
        for wait in (False, True, False):  # each of them is told, once for each try
            failing.wait()
            with pytest.raises(StoreFailed, match="no room"):
                writer.write(rollout("b"), wait=wait)
        failing.wait()
        assert failing.times == 4
        with pytest.raises(StoreFailed, match="no room"):
            writer.flush()
        failing.wait()
        failing.is_full = False
        with pytest.raises(StoreFailed, match="no room"):
            writer.write(rollout("b"))
        assert writer.write(rollout("b"))
        writer.flush()
        assert (writer.num_written, writer.num_repeated) == (2, 0)
    assert ids_in(tmp_path / "d") == ["a", "b"]


def test_close_tries_once_more_and_says_what_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RolloutWriter(tmp_path / "d", gather_s=0)
    failing = Failing(writer, monkeypatch)
    writer.write(rollout("a"), wait=False)
    failing.wait()
    failing.is_full = False
    writer.close()  # nothing is lost: nothing is told
    assert ids_in(tmp_path / "d") == ["a"]
    writer = RolloutWriter(tmp_path / "d", gather_s=0)
    failing = Failing(writer, monkeypatch)
    writer.write(rollout("b"), wait=False)
    failing.wait()
    with pytest.raises(StoreFailed, match="no room"):
        writer.close()
    assert failing.times == 2
    assert ids_in(tmp_path / "d") == ["a"]


@pytest.mark.parametrize("most", [1, 99])
def test_who_waits_is_not_held_up_by_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Rollouts of a thread that says nothing more stand in front of those of one that waits, in
    its file or in one before."""
    monkeypatch.setattr(module, "MOST_ROWS", most)
    with RolloutWriter(tmp_path / "d", gather_s=0) as writer, ThreadPoolExecutor() as threads:
        failing = Failing(writer, monkeypatch)
        with writer._using:  # until both are there
            writer.write(rollout("a"), wait=False)
            told = threads.submit(writer.write, rollout("b"))
            with writer._changed:
                assert writer._changed.wait_for(lambda: len(writer._pending) == 2, 30)
        with pytest.raises(StoreFailed, match="no room"):
            told.result(30)
        failing.is_full = False
        with pytest.raises(StoreFailed, match="no room"):
            writer.write(rollout("b"))
        assert writer.write(rollout("b"))
    assert sorted(ids_in(tmp_path / "d")) == ["a", "b"]


def test_rollouts_beyond_the_end_are_told_at_once(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "d", gather_s=0)
    RolloutWriter(tmp_path / "d").seal()
    writer.write(rollout("a"), wait=False)
    with writer._changed:
        assert writer._changed.wait_for(lambda: writer._stuck is not None, 30)
    for _ in range(2):
        with pytest.raises(AlreadySealed):
            writer.flush()
    with pytest.raises(AlreadySealed):
        writer.close()


def test_tokenizers_are_compared(tmp_path: Path, tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    with RolloutWriter(tmp_path / "d", tokenizer=tokenizer) as writer:
        writer.write(rollout("a"))
        with pytest.raises(BadRollout, match="id out of range"):
            writer.write(rollout("b", prompt_ids=[tokenizer.vocab_size]))
    RolloutWriter(tmp_path / "d").close()
    log = Log.open(tmp_path / "d")
    assert log.state.opened is not None
    assert log.state.opened.tokenizer == tokenizer.fingerprint
    with pytest.raises(BadConfig, match="of another tokenizer"):
        module._check_begun("x", log.state, "another")


def test_places_that_are_something_else_are_refused(tmp_path: Path) -> None:
    LogWriter.take(open_store(tmp_path / "d", make=True), {}, [], writer="test")
    with pytest.raises(BadConfig, match="is a dataset, and not of rollouts"):
        RolloutWriter(tmp_path / "d")
    newer = {**CONFIG, "version": 2}
    LogWriter.take(open_store(tmp_path / "e", make=True), newer, [], writer="test")
    with pytest.raises(BadConfig, match="was begun by another penstock"):
        RolloutWriter(tmp_path / "e")
    with pytest.raises(BadConfig, match="gather_s is 99"):
        RolloutWriter(tmp_path / "f", gather_s=99)


def test_a_closed_writer_and_one_of_another_process_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RolloutWriter(tmp_path / "d")
    with monkeypatch.context() as patched:
        patched.setattr(writer, "_pid", -1)
        for use in (lambda: writer.write(rollout("a")), writer.flush, writer.seal):
            with pytest.raises(BadConfig, match="the writer was made in another process"):
                use()  # in a fork there is no thread that would end the waiting
    writer.close()
    with pytest.raises(BadConfig, match="the writer is closed"):
        writer.write(rollout("a"))


def test_a_beat_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread was gone, and the next `write` waited for ever."""
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    writer = RolloutWriter(tmp_path / "d")
    failed = threading.Event()

    def fail() -> bool:
        failed.set()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(writer._log, "refresh", fail)
        assert failed.wait(30)
        time.sleep(0.1)
    assert writer._thread.is_alive()
    assert writer.write(rollout("a"))
    writer.close()


def test_rollouts_may_come_one_by_one(tmp_path: Path) -> None:
    with RolloutWriter(tmp_path / "d") as writer:
        assert writer.write_many(rollout(name) for name in "abc") == 3


def test_known_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MERGE_ROWS", 8)
    known = KnownKeys()
    expected: dict[int, int] = {}
    rng = np.random.default_rng(0)
    for size in (1, 3, 5, 20, 1, 7, 2):
        keys = rng.integers(0, 1 << 63, 2 * size).astype(np.uint64)
        expected |= dict(zip(keys[::2].tolist(), keys[1::2].tolist(), strict=True))
        known.add(keys)
        assert len(known) == len(expected)
        assert {key: known.content(key) for key in expected} == expected
    assert known.content(7) is None


@pytest.fixture
def cloud(moto: Server) -> Cloud:
    return clouds()["moto"](moto)


LOST: list[Kind] = ["lose reply", "answer after", "lose request"]


@pytest.mark.parametrize("kind", LOST)
def test_replies_that_are_lost_lose_and_double_nothing(url: str, proxy: Proxy, kind: Kind) -> None:
    """Every third write to a bucket is disturbed: the slot is read back, or tried again."""
    made = groups(3)
    one, two = RolloutWriter(url), RolloutWriter(url)
    for k, each in enumerate(made):
        if k % 3 == 0:
            proxy.plan(kind, "PUT")
        (one, two)[k % 2].write(each)
        assert not (two, one)[k % 2].write(each)
    one.close()
    two.close()
    assert ids_in(url) == [one["rollout_id"] for one in made]
    assert verify(url, full=True).faults == []
