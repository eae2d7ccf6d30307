"""Push and pull between directories: the same calls as with a bucket, without a server."""

import hashlib
import os
import random
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import (
    BadConfig,
    LogDamaged,
    NoDataset,
    ProducerStalled,
    ShardMismatch,
    StateMismatch,
)
from penstock.mirror.config import SyncConfig
from penstock.mirror.disk_limit import DiskLimit, write_position
from penstock.mirror.push_pull import pull, push
from penstock.mirror.transfer import PARTS, part_name
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.local import LocalStore
from penstock.store.log import Log, LogWriter
from penstock.store.record import Add, Progress, Retire, Seal, Split, record_name
from penstock.store.store import open_store
from penstock.work.events import Event, Events


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the events, which are of one machine."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "_events.jsonl"
    }


def make_dataset(folder: Path, documents: int = 300) -> Path:
    """A sealed dataset of several shards."""
    source = folder / "in.jsonl"
    source.write_text("".join(f'{{"text": "document {k} of some"}}\n' for k in range(documents)))
    config = ShardConfig(rows_per_file=40)
    shard_jsonl([source], folder / "live", config, FollowConfig(complete=True))
    return folder / "live"


class Producer:
    """Commits shards one by one, as a slow producer does."""

    def __init__(self, folder: Path, config: dict[str, str] | None = None) -> None:
        store = open_store(folder, make=True)
        self.log = LogWriter.take(store, config or {}, ["made"], writer="test")
        self._rows = 0

    def add(self, size: int = 1000, split: Split = "train") -> str:
        number = len(self.log.state.files)
        data = random.Random(number).randbytes(size)  # no block is like another
        name = (
            f"shard_{number:05d}.parquet" if split == "train" else f"_val/val_{number:05d}.parquet"
        )
        stored = self.log.store.put(name, lambda file: _write(file, data))
        progress = Progress(
            input="made", start=self._rows, to=self._rows + 1, read=1, kept=1, dropped={}
        )
        self._rows += 1
        added = Add(stored.name, stored.sha256, stored.size, 1, None, split)
        self.log.commit([added, progress])
        return stored.name

    def merge(self, part: str, size: int) -> None:
        """Put another file in the place of one."""
        split = self.log.state.files[part].split
        name = "shard_99999.parquet" if split == "train" else "val_shard.parquet"
        stored = self.log.store.put(name, lambda file: _write(file, bytes(size)))
        added = Add(stored.name, stored.sha256, stored.size, 1, None, split)
        self.log.commit([Retire(part), added])

    def seal(self) -> None:
        train, val = (self.log.state.split(name) for name in ("train", "val"))
        files = [*train, *val]
        totals = len(train), sum(f.rows for f in files), sum(f.bytes for f in files)
        self.log.commit([Seal(*totals, self.log.state.head)])


def _write(file: object, data: bytes) -> None:
    file.write(data)  # type: ignore[attr-defined]


def test_there_and_back(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    pushed = push(live, tmp_path / "bucket")
    pulled = pull(tmp_path / "bucket", tmp_path / "back")
    assert pushed.sealed
    assert pulled.sealed
    assert pushed.bytes == pulled.bytes > 0
    assert contents(tmp_path / "bucket") == contents(tmp_path / "back") == contents(live)
    assert not verify(LocalStore(tmp_path / "back"), full=True).faults
    again = pull(tmp_path / "bucket", tmp_path / "back")
    assert (again.records, again.files, again.bytes) == (0, 0, 0)


def test_beside_the_producer_and_each_other(tmp_path: Path) -> None:
    """Whenever a record can be read in a mirror, its files are there and right."""
    live, bucket, back = tmp_path / "live", tmp_path / "bucket", tmp_path / "back"
    config = SyncConfig(stall_s=20)
    threads = [
        threading.Thread(target=lambda: push(live, bucket, config)),
        threading.Thread(target=lambda: pull(bucket, back, config)),
    ]
    for thread in threads:
        thread.start()
    producer = Producer(live)
    for _ in range(12):
        producer.add(200_000)
        for mirror in (bucket, back):
            log = Log(LocalStore(mirror))
            log.refresh()
            for file in log.state.files.values():
                assert LocalStore(mirror).size(file.name) == file.bytes
    producer.seal()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert contents(live) == {k: v for k, v in contents(back).items() if k != "_COMPLETE"}
    assert contents(bucket) == contents(back)


def test_a_shard_is_readable_at_the_other_end_at_once(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "live")
    thread = threading.Thread(target=lambda: push(tmp_path / "live", tmp_path / "bucket"))
    thread.start()
    took = []
    for _ in range(8):
        time.sleep(0.1)
        producer.add()
        began, n = time.monotonic(), producer.log.state.n
        mirror = Log(LocalStore(tmp_path / "bucket"))
        while mirror.state.n < n:
            assert time.monotonic() - began < 10
            mirror.refresh()
            time.sleep(0.005)
        took.append(time.monotonic() - began)
    producer.seal()
    thread.join(20)
    assert sorted(took)[len(took) // 2] < 1.0


def test_a_partial_file_is_gone_on_with_at_the_byte(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "live")
    name = producer.add(3_000_000)
    producer.seal()
    added = producer.log.state.files[name]
    (tmp_path / "back" / PARTS).mkdir(parents=True)
    part = tmp_path / "back" / PARTS / part_name(added)
    part.write_bytes((tmp_path / "live" / name).read_bytes()[:2_999_000])
    asked = []
    read = LocalStore.read_range

    def counted(self: LocalStore, name: str, start: int, stop: int) -> memoryview:
        asked.append((start, stop))
        return read(self, name, start, stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read_range", counted)
        pull(tmp_path / "live", tmp_path / "back")
    assert asked == [(2_999_000, 3_000_000)]
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "live" / name).read_bytes()
    assert not (tmp_path / "back" / PARTS).exists()


def test_a_partial_file_with_wrong_bytes_is_fetched_anew(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "live")
    name = producer.add(50_000)
    producer.seal()
    (tmp_path / "back" / PARTS).mkdir(parents=True)
    part = part_name(producer.log.state.files[name])
    (tmp_path / "back" / PARTS / part).write_bytes(b"?" * 40_000)
    pull(tmp_path / "live", tmp_path / "back")
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "live" / name).read_bytes()


def test_parts_of_files_that_were_merged_away_are_cleared(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    (tmp_path / "back" / PARTS).mkdir(parents=True)
    (tmp_path / "back" / PARTS / ("0" * 64)).write_bytes(b"of a file that nobody will ask for")
    pull(live, tmp_path / "back")
    assert contents(tmp_path / "back") == contents(live)
    assert not (tmp_path / "back" / PARTS).exists()


def test_a_corrupt_shard_is_neither_sent_nor_accepted(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    shard = live / "shard_00001.parquet"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-9] + b"?" + whole[-8:])
    with pytest.raises(ShardMismatch, match=r"shard_00001\.parquet is not what was written"):
        push(live, tmp_path / "bucket")
    with pytest.raises(ShardMismatch, match="it was fetched twice"):
        pull(live, tmp_path / "back")
    for mirror in (tmp_path / "bucket", tmp_path / "back"):
        assert not (mirror / "shard_00001.parquet").exists()
        assert "shard_00001.parquet" not in Log.open(mirror).state.files
    shard.write_bytes(whole)
    assert push(live, tmp_path / "bucket").sealed
    assert pull(live, tmp_path / "back").sealed
    assert contents(tmp_path / "back") == contents(tmp_path / "bucket") == contents(live)


def test_a_lost_file_of_the_mirror_is_brought_back(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    pull(live, tmp_path / "back")
    os.unlink(tmp_path / "back" / "shard_00002.parquet")
    assert pull(live, tmp_path / "back").files == 1
    assert contents(tmp_path / "back") == contents(live)


def test_another_dataset_is_refused(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    push(live, tmp_path / "bucket")
    (tmp_path / "two").mkdir()
    other = make_dataset(tmp_path / "two", documents=50)
    before = contents(tmp_path / "bucket")
    with pytest.raises(StateMismatch, match="is not a beginning of"):
        push(other, tmp_path / "bucket")
    with pytest.raises(StateMismatch, match="is not a beginning of"):
        pull(other, tmp_path / "bucket")
    assert contents(tmp_path / "bucket") == before


def test_once_moves_what_is_there(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "live")
    producer.add()
    found = push(tmp_path / "live", tmp_path / "bucket", SyncConfig(once=True))
    assert (found.files, found.sealed) == (1, False)
    with pytest.raises(NoDataset, match="there is no dataset"):
        push(tmp_path / "nowhere", tmp_path / "other", SyncConfig(once=True))


def test_the_end_is_told(tmp_path: Path) -> None:
    told: list[Event] = []
    events = Events("test")
    events.listen(told.append)
    producer = Producer(tmp_path / "live")
    producer.add()
    push(tmp_path / "live", tmp_path / "there", SyncConfig(once=True), events)
    producer.seal()
    push(tmp_path / "live", tmp_path / "there", None, events)
    pull(tmp_path / "there", tmp_path / "back", None, events)
    (tmp_path / "plain").mkdir()
    table(tmp_path / "plain" / "s_0.parquet", 10)
    (tmp_path / "plain" / "_COMPLETE").touch()
    push(tmp_path / "plain", tmp_path / "copy", None, events)
    ends = [event["sealed"] for event in told if event["kind"] == "end"]
    assert ends == [False, True, True, True]
    assert told[-1]["kind"] == "end"


def test_a_silent_producer_is_an_error(tmp_path: Path) -> None:
    Producer(tmp_path / "live").add()
    config = SyncConfig(stall_s=0.3)
    with pytest.raises(ProducerStalled, match="silent for"):
        push(tmp_path / "live", tmp_path / "bucket", config)
    with pytest.raises(ProducerStalled, match="no dataset has begun"):
        push(tmp_path / "later", tmp_path / "bucket2", config)


def test_two_pulls_into_one_directory(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "live")
    producer.add()
    thread = threading.Thread(target=lambda: pull(tmp_path / "live", tmp_path / "back"))
    thread.start()
    while not (tmp_path / "back" / "_log").exists():
        time.sleep(0.01)
    with pytest.raises(BadConfig, match="another pull is writing"):
        pull(tmp_path / "live", tmp_path / "back")
    producer.seal()
    thread.join(20)


def test_max_disk_is_held_and_what_was_passed_goes(tmp_path: Path) -> None:
    live, back = tmp_path / "live", tmp_path / "back"
    producer = Producer(live)
    names = [producer.add(10_000) for _ in range(20)]
    producer.seal()
    most = 0
    failed: list[BaseException] = []

    def run() -> None:
        try:
            pull(live, back, SyncConfig(max_disk_bytes=45_000))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    passed, deadline = 0, time.monotonic() + 60
    while thread.is_alive():
        assert time.monotonic() < deadline
        held = [name for name in names if (back / name).exists()]
        most = max(most, len(held))
        for name in held[:1]:
            number = names.index(name)
            if len(held) == 4 and number >= passed:
                passed = number + 2
                write_position(back, "trainer", passed)
        assert all((back / name).exists() or names.index(name) < passed for name in held[2:])
        time.sleep(0.01)
    assert not failed
    assert most == 4
    log = Log.open(back)
    assert log.state.sealed
    # what is gone stays gone after a restart
    assert pull(live, back, SyncConfig(max_disk_bytes=45_000)).files == 0
    with pytest.raises(BadConfig, match="max_disk is 5,000"):
        pull(live, tmp_path / "other", SyncConfig(max_disk_bytes=5_000))


def test_max_disk_keeps_what_the_slowest_reader_needs(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, make=True)
    room = DiskLimit(store, 50)
    files = [Add(f"shard_{k:05d}.parquet", "", 10, 1, None, "train") for k in range(12)]
    for file in files:
        room.know(file)
    for file in files[:5]:
        assert room.admit(file) is True
        store.create(file.name, bytes(10))
    write_position(tmp_path, "fast", 11)
    write_position(tmp_path, "slow", 2)
    assert [room.admit(file) for file in files[5:8]] == [True, True, None]
    assert [store.size(file.name) for file in files[:5]] == [None, None, 10, 10, 10]
    write_position(tmp_path, "slow", 3)
    assert [room.admit(file) for file in files[7:9]] == [True, None]
    assert store.size(files[3].name) == 10


def calls_of(patch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What is synced and linked, in order; a descriptor by the name behind it."""
    seen: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "link")}

    def fsync(descriptor: int) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real["fsync"](descriptor)

    def link(path: Path, target: Path, **options: bool) -> None:
        seen.append(("link", str(target)))
        real["link"](path, target, **options)

    patch.setattr(os, "fsync", fsync)
    patch.setattr(os, "link", link)
    return seen


def test_a_fetched_file_is_synced_before_it_has_its_name_and_its_folder_after(
    tmp_path: Path,
) -> None:
    producer = Producer(tmp_path / "live")
    names = [producer.add(), producer.add(500, "val")]
    parts = [part_name(producer.log.state.files[name]) for name in names]
    with pytest.MonkeyPatch.context() as patch:
        seen = calls_of(patch)
        pull(tmp_path / "live", tmp_path / "back", SyncConfig(once=True))
    back = tmp_path / "back"
    for n, (name, part) in enumerate(zip(names, parts, strict=True), 1):
        named = seen.index(("link", str(back / name)))
        told = seen.index(("link", str(back / record_name(n))))
        assert seen.index(("fsync", str(back / PARTS / part))) < named
        assert ("fsync", str((back / name).parent)) in seen[named:told]


@pytest.mark.parametrize("how", ["put", "add"])
def test_an_object_that_is_adopted_is_made_durable(tmp_path: Path, how: str) -> None:
    """Whoever left it may have been killed before it was."""
    (tmp_path / "_val").mkdir()
    (tmp_path / "_val" / "x.parquet").write_bytes(b"data")
    store = LocalStore(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        seen = calls_of(patch)
        if how == "put":
            store.put("_val/x.parquet", lambda file: _write(file, b"data"))
        else:
            sha256 = hashlib.sha256(b"data").hexdigest()
            store.add("_val/x.parquet", memoryview(b"data"), sha256)
    tried = seen.index(("link", str(tmp_path / "_val" / "x.parquet")))
    assert seen[tried + 1 :] == [
        ("fsync", str(tmp_path / "_val" / "x.parquet")),
        ("fsync", str(tmp_path / "_val")),
    ]


def table(path: Path, rows: int) -> None:
    pq.write_table(pa.table({"text": [f"row {k}" for k in range(rows)]}), path)


def test_plain_parquet_directories(tmp_path: Path) -> None:
    folder, bucket, back = tmp_path / "plain", tmp_path / "bucket", tmp_path / "back"
    folder.mkdir()
    table(folder / "shard_00000.parquet", 10)
    (folder / "shard_00001.parquet").write_bytes(b"PAR1 half of")
    threads = [
        threading.Thread(target=lambda: push(folder, bucket)),
        threading.Thread(target=lambda: pull(bucket, back)),
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while not (back / "shard_00000.parquet").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (bucket / "shard_00001.parquet").exists()
    table(tmp_path / "whole.parquet", 20)
    os.replace(tmp_path / "whole.parquet", folder / "shard_00001.parquet")
    (folder / "_COMPLETE").write_bytes(b"")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for name in ("shard_00000.parquet", "shard_00001.parquet", "_COMPLETE"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()


def test_a_plain_directory_that_is_complete_and_not_whole(tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(b"PAR1 half of")
    (folder / "_COMPLETE").write_bytes(b"")
    with pytest.raises(ShardMismatch, match=r"a\.parquet is not a whole parquet file"):
        push(folder, tmp_path / "bucket")
    assert not (tmp_path / "bucket" / "_COMPLETE").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"connections": 0}, "connections is 0"),
        ({"stall_s": 0.0}, "stall_s is 0.0"),
        ({"give_up_s": float("nan")}, "give_up_s is nan"),
        ({"max_disk_bytes": 0}, "max_disk is 0"),
    ],
)
def test_bad_settings(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        SyncConfig(**wrong)  # type: ignore[arg-type]


# What a reviewer found


def test_a_log_cannot_choose_where_a_file_is_written(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"of the user")
    store = open_store(tmp_path / "live", make=True)
    log = LogWriter.take(store, {}, ["made"], writer="test")
    log.store.put("shard_00000.parquet", lambda file: _write(file, b"data"))
    progress = Progress(input="made", start=0, to=1, read=1, kept=1, dropped={})
    log.commit([Add("shard_00000.parquet", str(victim), 4, 1, None, "train"), progress])
    with pytest.raises(LogDamaged, match="for its sha256"):
        pull(tmp_path / "live", tmp_path / "back")
    plain = tmp_path / "plain"
    (plain / "_sums").mkdir(parents=True)
    table(plain / "x.parquet", 3)
    (plain / "_COMPLETE").touch()
    (plain / "_sums" / "x.parquet").write_text("../../victim")
    with pytest.raises(ShardMismatch, match="does not hold a sha256"):
        pull(plain, tmp_path / "back2")
    assert victim.read_bytes() == b"of the user"


def test_equal_files_are_both_pulled(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in "abcdefgh":
        table(plain / f"{name}.parquet", 2000)
    (plain / "_COMPLETE").touch()
    push(plain, tmp_path / "bucket")
    assert pull(tmp_path / "bucket", tmp_path / "back").files == 8
    for name in "abcdefgh":
        path = f"{name}.parquet"
        assert (tmp_path / "back" / path).read_bytes() == (plain / path).read_bytes()
    assert not (tmp_path / "back" / PARTS).exists()
    with pytest.raises(BadConfig, match="max_disk is for datasets with a log"):
        pull(tmp_path / "bucket", tmp_path / "back3", SyncConfig(max_disk_bytes=1000))


@pytest.mark.parametrize("name", ["my file.parquet", "größe.parquet", "sub/x.parquet", "link"])
def test_a_file_that_cannot_be_moved_is_named(tmp_path: Path, name: str) -> None:
    plain = tmp_path / "plain"
    (plain / "sub").mkdir(parents=True)
    table(plain / "a.parquet", 3)
    if name == "link":
        (plain / "l.parquet").symlink_to(plain / "a.parquet")
    else:
        table(plain / name, 3)
    (plain / "_COMPLETE").touch()
    with pytest.raises(BadConfig, match="cannot be moved"):
        push(plain, tmp_path / "bucket")
    assert not (tmp_path / "bucket" / "_COMPLETE").exists()


def test_a_damaged_file_of_the_mirror_is_brought_again(tmp_path: Path) -> None:
    live = make_dataset(tmp_path)
    pull(live, tmp_path / "back")
    (tmp_path / "back" / "shard_00002.parquet").write_bytes(b"cut")
    assert pull(live, tmp_path / "back").files == 1
    assert contents(tmp_path / "back") == contents(live)


def test_an_address_with_one_slash_is_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="one slash"):
        push(tmp_path, "s3:/bucket/prefix")
