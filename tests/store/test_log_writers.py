"""Several writers, readers and a store that fails: one writer lives, nothing is lost or doubled.

The store is in memory, so that every kind of failure can be planned: a request that never arrives,
one that arrives and whose answer does not, one that arrives late, a refusal of our own object, a
conflict that stored nothing, a crash on either side of the commit.
"""

import io
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import AlreadySealed, BadConfig, Fenced, LogDamaged, StoreFailed
from penstock.store import log as log_module
from penstock.store.log import Log, LogState, LogWriter
from penstock.store.record import Add, Beat, Op, Progress, Record, Retire, Seal, record_name
from penstock.store.store import AlreadyThere, Stored, Unsure


class Crash(BaseException):
    """The process is gone."""


class Bucket:
    """What the outside world holds."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.late: list[tuple[str, bytes]] = []
        """Requests that someone has given up on and that will arrive all the same."""

    def arrive(self, name: str, data: bytes) -> bool:
        if name in self.objects:
            return False
        self.objects[name] = data
        return True


class FaultyStore:
    """One process's way to the bucket. Each call to it takes the next planned fault."""

    def __init__(self, bucket: Bucket, faults: list[str] | None = None) -> None:
        self.url = "memory"
        self.epoch = 0
        self.tag = ""
        self.bucket = bucket
        self.faults = deque(faults or [])
        self.creates = 0
        self.settled = 0

    def create(self, name: str, data: bytes) -> None:
        self.creates += 1
        fault = self.faults.popleft() if self.faults else ""
        if fault == "request lost":
            raise Unsure("connection reset\nby the planner")
        if fault == "request late":
            self.bucket.late.append((name, data))
            raise Unsure("timed out")
        if fault == "refused":
            raise StoreFailed("could not write", why="403")
        if fault == "conflict":
            raise AlreadyThere(name)
        if fault == "crash before":
            raise Crash
        new = self.bucket.arrive(name, data)
        if fault == "crash after":
            raise Crash
        if fault == "reply lost":
            raise Unsure("connection reset")
        if fault == "own retry" or not new:
            raise AlreadyThere(name)

    def read(self, name: str) -> bytes:
        if self.faults and self.faults[0] == "read fails":
            self.faults.popleft()
            raise StoreFailed("could not read", why="503")
        if name not in self.bucket.objects:
            raise FileNotFoundError(name)
        return self.bucket.objects[name]

    def open(self, name: str) -> IO[bytes]:
        return io.BytesIO(self.read(name))

    def put(self, name: str, write: Callable[[IO[bytes]], None]) -> Stored:
        raise NotImplementedError

    def size(self, name: str) -> int | None:
        found = self.bucket.objects.get(name)
        return None if found is None else len(found)

    def remove(self, name: str) -> None:
        raise NotImplementedError

    def clear_tagged(self) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        self.settled += 1


FAULTS = [
    "request lost",
    "request late",
    "reply lost",
    "own retry",
    "conflict",
    "refused",
    "read fails",
    "crash before",
    "crash after",
]


@pytest.fixture(autouse=True)
def _no_pauses() -> Iterator[None]:
    with mock.patch.object(log_module, "_RESEND_S", (0.0, 0.0, 0.0, 0.0)):
        yield


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def take(bucket: Bucket, faults: list[str] | None = None) -> LogWriter:
    return LogWriter.take(FaultyStore(bucket, faults), {}, ["a"], writer="w")


def replay(bucket: Bucket) -> LogState:
    """The log as a stranger reads it, record by record."""
    log = Log(FaultyStore(bucket))
    log.refresh(folds=False)
    return log.state


def plan(writer: LogWriter, *faults: str) -> FaultyStore:
    store = writer.store
    assert isinstance(store, FaultyStore)
    store.faults = deque(faults)
    store.creates = 0
    return store


# Fencing.


def test_older_writer_is_fenced_at_its_next_commit(bucket: Bucket) -> None:
    older = take(bucket)
    older.commit([Beat()])
    newer = take(bucket)
    for _ in range(2):
        with pytest.raises(Fenced) as caught:
            older.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
        assert str(caught.value) == (
            "another writer has taken this dataset over\n"
            "  where: memory, record 2\n"
            "  why:   it was written by epoch 2, this writer is 1\n"
            "  do:    nothing is lost: the newer writer went on from the last record before it"
        )
    newer.commit([Beat()])
    state = replay(bucket)
    assert (state.n, state.epoch, state.files) == (3, 2, {})


@pytest.mark.parametrize(
    "ops",
    [
        [Add("shard_00009.parquet", "", 1, 5, None, "train")],
        [Retire("shard_00009.parquet")],
        [Seal(3, 3, 3, "0" * 64)],
    ],
)
def test_what_cannot_follow_is_not_committed(bucket: Bucket, ops: list[Op]) -> None:
    """A record is never removed again: a wrong one would end the log for good."""
    writer = take(bucket)
    known = replay(bucket).n
    with pytest.raises(LogDamaged):
        writer.commit(ops)
    assert replay(bucket).n == writer.state.n == known
    writer.commit([Beat()])
    assert replay(bucket).head == writer.state.head


def test_nothing_is_added_to_a_log_that_was_begun_anew(bucket: Bucket) -> None:
    """The record that a writer builds on is there, and is another one."""
    writer = take(bucket)
    writer.commit([Beat()])
    bucket.objects.clear()
    other = take(bucket)
    other.commit([Beat()])
    with pytest.raises(LogDamaged, match="no longer the log that this writer was writing"):
        writer.commit([Beat()])
    assert replay(bucket).n == 1
    other.commit([Beat()])
    assert replay(bucket).head == other.state.head


def test_fenced_writer_that_reads_on_is_still_fenced(bucket: Bucket) -> None:
    """Following the newer writer's records does not make the older one the writer again."""
    older = take(bucket)
    newer = take(bucket)
    newer.commit([Beat()])
    older.refresh()
    with pytest.raises(Fenced):
        older.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    newer.commit([Beat()])
    assert replay(bucket).files == {}


def test_fenced_writer_on_the_same_store_object(bucket: Bucket) -> None:
    """The epoch is the writer's, not whatever the store was last told."""
    store = FaultyStore(bucket)
    older = LogWriter.take(store, {}, [], writer="older")
    newer = LogWriter.take(store, {}, [], writer="newer")
    with pytest.raises(Fenced):
        older.commit([Beat()])
    older.refresh()
    with pytest.raises(Fenced):
        older.commit([Beat()])
    newer.commit([Beat()])
    assert replay(bucket).n == 2


@pytest.mark.parametrize("takeovers", [0, 1, 2])
def test_a_writer_whose_store_fails_says_who_took_over(bucket: Bucket, takeovers: int) -> None:
    """A newer writer clears our temporary files: what fails then is not the store's fault."""
    older = take(bucket)
    older.commit([Beat()])
    for _ in range(takeovers):
        take(bucket).commit([Beat()])
    known = replay(bucket).n
    plan(older, "refused")
    with pytest.raises(Fenced if takeovers else StoreFailed) as caught:
        older.commit([Beat()])
    if takeovers:
        assert caught.value.where == "memory, record 2"
        assert caught.value.why == "it was written by epoch 2, this writer is 1"
    assert replay(bucket).n == known


def test_each_takeover_raises_the_epoch_and_settles_once(bucket: Bucket) -> None:
    for epoch in range(1, 6):
        writer = take(bucket)
        assert (writer.store.epoch, writer.state.epoch) == (epoch, epoch)
        assert isinstance(writer.store, FaultyStore)
        assert writer.store.settled == 1
    assert len({replay(bucket).dataset}) == 1


def test_race_for_the_same_slot_is_run_again_with_a_higher_epoch(bucket: Bucket) -> None:
    class Racing(FaultyStore):
        def create(self, name: str, data: bytes) -> None:
            if self.creates == 0:
                take(self.bucket)  # another is faster between our reading and our writing
            super().create(name, data)

    writer = LogWriter.take(Racing(bucket), {}, [], writer="slower")
    assert (writer.state.n, writer.state.epoch) == (1, 2)
    writer.commit([Beat()])
    assert replay(bucket).n == 2


def test_takeover_that_never_wins_gives_up(bucket: Bucket) -> None:
    class Slow(FaultyStore):
        def create(self, name: str, data: bytes) -> None:
            take(self.bucket)
            super().create(name, data)

    with pytest.raises(Fenced) as caught:
        LogWriter.take(Slow(bucket), {}, [], writer="slow")
    assert str(caught.value) == (
        "other writers keep taking this dataset\n"
        "  where: memory\n"
        "  do:    run one producer for each dataset"
    )


def test_check_sees_the_state_and_may_refuse(bucket: Bucket) -> None:
    take(bucket).commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    seen: list[list[str]] = []

    def refuse(state: LogState) -> None:
        seen.append(list(state.files))
        raise BadConfig("not like this")

    before = dict(bucket.objects)
    with pytest.raises(BadConfig, match="not like this"):
        LogWriter.take(FaultyStore(bucket), {}, [], writer="w", check=refuse)
    assert seen == [["shard_00000.parquet"]]
    assert bucket.objects == before


# Reading a commit back.


@pytest.mark.parametrize(
    ("faults", "sent"),
    [
        (["reply lost"], 1),
        (["own retry"], 1),
        (["request lost"], 2),
        (["conflict"], 2),
        (["request lost", "reply lost"], 2),
        (["request lost", "conflict", "request lost", "own retry"], 4),
        (["request late", "request lost"], 3),
        (["reply lost", "read fails"], 2),
        (["request lost"] * 4, 5),
    ],
)
def test_commit_is_known_by_its_id(bucket: Bucket, faults: list[str], sent: int) -> None:
    writer = take(bucket)
    store = plan(writer, *faults)
    record = writer.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    assert store.creates == sent
    for name, data in bucket.late:
        assert not bucket.arrive(name, data)
    state = replay(bucket)
    assert (state.n, list(state.files)) == (1, ["shard_00000.parquet"])
    assert Log(FaultyStore(bucket)).record(1).commit_id == record.commit_id
    writer.commit([Beat()])


def test_commit_that_never_arrives_is_given_up(bucket: Bucket) -> None:
    writer = take(bucket)
    plan(writer, *["request lost"] * 5)
    with pytest.raises(StoreFailed) as caught:
        writer.commit([Beat()])
    assert str(caught.value) == (
        "could not commit record 1\n"
        "  where: memory\n"
        "  why:   connection reset\n"
        "  do:    check the connection and run the same command again: nothing committed is lost"
    )
    assert replay(bucket).n == 0
    assert writer.commit([Beat()]).n == 1


def test_slot_that_is_taken_and_empty_is_given_up(bucket: Bucket) -> None:
    """S3 answers 409 to a create that races another, and the other may fail."""
    writer = take(bucket)
    plan(writer, *["conflict"] * 5)
    with pytest.raises(StoreFailed, match="could not commit record 1"):
        writer.commit([Beat()])
    assert replay(bucket).n == 0


def test_late_request_of_a_dead_writer_is_taken_in_or_refused(bucket: Bucket) -> None:
    for taken_over_first in (True, False):
        bucket = Bucket()
        dead = take(bucket)
        plan(dead, "request late", "crash before")
        with pytest.raises(Crash):
            dead.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
        if taken_over_first:
            writer = take(bucket)
            assert not bucket.arrive(*bucket.late[0])
        else:
            assert bucket.arrive(*bucket.late[0])
            writer = take(bucket)
        assert list(writer.state.files) == ([] if taken_over_first else ["shard_00000.parquet"])
        writer.commit([Beat()])
        assert list(replay(bucket).files) == list(writer.state.files)


def test_unsure_error_is_not_the_end_of_the_writer(bucket: Bucket) -> None:
    """After a failed commit that did arrive, the next one is fenced by it and nothing doubles."""
    writer = take(bucket)
    plan(writer, "reply lost", *["read fails", "request lost"] * 4, "read fails")
    with pytest.raises(StoreFailed):
        writer.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    with pytest.raises(Fenced):
        writer.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    assert list(replay(bucket).files) == ["shard_00000.parquet"]


# Everything together.


class ManyWriters(RuleBasedStateMachine):
    """Any number of writers and readers, in any order, with any faults."""

    def __init__(self) -> None:
        super().__init__()
        patches: list[Any] = [
            mock.patch.object(log_module, "_RESEND_S", (0.0, 0.0, 0.0, 0.0)),
            mock.patch.object(log_module, "FOLD_EVERY", 3),
        ]
        for patch in patches:
            patch.start()
        self.patches = patches
        self.bucket = Bucket()
        self.writers: list[LogWriter] = []
        self.readers: list[Log] = []
        self.acknowledged: list[tuple[int, str]] = []
        self.fenced: set[str] = set()
        self.numbers = 0

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    faults: st.SearchStrategy[list[str]] = st.just([]) | st.lists(
        st.sampled_from(FAULTS), max_size=2
    )
    which = st.integers(0, 10**6)

    @initialize()
    def begin(self) -> None:
        self.start_writer([])
        self.start_reader()

    @precondition(lambda self: len(self.writers) < 4)
    @rule(faults=faults)
    def start_writer(self, faults: list[str]) -> None:
        try:
            self.writers.append(take(self.bucket, faults))
        except (Crash, StoreFailed, Fenced):
            return
        except AlreadySealed:
            assert replay(self.bucket).sealed is not None
            return
        self.check_owner(self.writers[-1])

    @precondition(lambda self: self.writers)
    @rule(which=which, faults=faults)
    def commit(self, which: int, faults: list[str]) -> None:
        writer = self.writers[which % len(self.writers)]
        self.numbers += 1
        name = f"shard_{self.numbers}.parquet"
        known = writer.state.inputs.get("a")
        start = known.to if known else 0
        ops = [Add(name, "", 1, 1, None, "train"), Progress("a", start, start + 1, 1, 1, {})]
        self.attempt(writer, ops, faults, name)

    @precondition(lambda self: self.writers)
    @rule(count=st.integers(1, 5))
    def newest_writer_works(self, count: int) -> None:
        for _ in range(count):
            self.commit(len(self.writers) - 1, [])

    @precondition(lambda self: self.writers and self.numbers > 5)
    @rule(which=which, faults=faults)
    def seal(self, which: int, faults: list[str]) -> None:
        writer = self.writers[which % len(self.writers)]
        if writer.state.sealed is None:
            total = len(writer.state.files)
            self.attempt(writer, [Seal(total, total, total, writer.state.head)], faults, "")

    def attempt(self, writer: LogWriter, ops: list[Any], faults: list[str], name: str) -> None:
        if writer.state.sealed is not None:
            return
        plan(writer, *faults)
        try:
            record = writer.commit(ops)
        except Crash:
            self.writers.remove(writer)
        except Fenced:
            self.fenced.add(name)
        except StoreFailed:
            pass  # it may have arrived, or may yet
        else:
            self.check_owner(writer)
            self.acknowledged.append((record.n, name))

    def check_owner(self, writer: LogWriter) -> None:
        """Who is told that it committed is the newest writer, and its record is the last."""
        state = replay(self.bucket)
        assert state.epoch == writer.store.epoch == writer.state.epoch
        assert (state.n, state.head) == (writer.state.n, writer.state.head)

    @precondition(lambda self: self.writers)
    @rule(which=which)
    def writer_looks(self, which: int) -> None:
        writer = self.writers[which % len(self.writers)]
        plan(writer)
        writer.refresh()

    @precondition(lambda self: self.writers)
    @rule(which=which)
    def kill_writer(self, which: int) -> None:
        del self.writers[which % len(self.writers)]

    @precondition(lambda self: self.bucket.late)
    @rule(which=which)
    def late_request_arrives(self, which: int) -> None:
        self.bucket.arrive(*self.bucket.late.pop(which % len(self.bucket.late)))

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def start_reader(self) -> None:
        self.readers.append(Log(FaultyStore(self.bucket)))

    @precondition(lambda self: self.readers)
    @rule(which=which)
    def read_on(self, which: int) -> None:
        reader = self.readers[which % len(self.readers)]
        reader.refresh()
        assert reader.state.n == replay(self.bucket).n
        assert reader.damaged_folds == []

    @invariant()
    def log_is_a_valid_chain_of_what_was_committed(self) -> None:
        state = replay(self.bucket)  # raises if not a chain, or if anything is in it twice
        names = list(state.files)
        known = state.inputs.get("a")
        assert (known.to if known else 0) == len(names)
        wanted = [name for _, name in self.acknowledged if name]
        assert [name for name in names if name in set(wanted)] == wanted, "lost, or out of order"
        assert not self.fenced & set(names), "a fenced writer got something in"
        if any(name == "" for _, name in self.acknowledged):
            assert state.sealed is not None
        slots = [name for name in self.bucket.objects if name.startswith("_log/")]
        assert sorted(slots) == [record_name(n) for n in range(state.n + 1)], "a gap"

    @invariant()
    def readers_and_writers_see_a_prefix(self) -> None:
        state = replay(self.bucket)
        names = list(state.files)
        for log in [*self.readers, *self.writers]:
            seen = list(log.state.files)
            assert seen == names[: len(seen)]
            assert log.state.n <= state.n
            if log.state.n >= 0:
                assert log.state.head == log_hash(self.bucket, log.state.n)


def log_hash(bucket: Bucket, n: int) -> str:
    found = re.search(rb'"sha256":"([0-9a-f]{64})"}\n$', bucket.objects[record_name(n)])
    assert found
    return found[1].decode()


TestManyWriters = ManyWriters.TestCase
TestManyWriters.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)


def test_record_is_acknowledged_as_it_stands(bucket: Bucket) -> None:
    record = take(bucket).commit([Beat()])
    assert isinstance(record, Record)
    assert record == Log(FaultyStore(bucket)).record(1)
    assert record.sha256 == log_hash(bucket, 1)
