"""Every beginning of a mirror is whole: what its source merged away before is told, and awaited."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ProducerStalled, ShardMismatch
from penstock.mirror import push_pull as sync
from penstock.mirror.config import SyncConfig
from penstock.mirror.push_pull import pull, push
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.local import LocalStore
from penstock.store.log import Log
from penstock.store.record import MERGED, record_name
from penstock.supply.sources.dataset import DatasetSource, SourceConfig

from .test_sync import Producer, contents

Move = Callable[..., Any]
both = pytest.mark.parametrize("move", [push, pull])


class Killed(BaseException):
    """As a kill would: nothing is cleared away."""


def interrupted(move: Move, source: Path, target: Path, n: int) -> None:
    """Move a dataset until record n stands."""
    create = sync._Sync._create

    def killed(self: Any, name: str, data: bytes) -> None:
        create(self, name, data)
        if name == record_name(n):
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sync._Sync, "_create", killed)
        with pytest.raises(Killed):
            move(source, target)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    lines = "".join(f'{{"text": "document {k} of some"}}\n' for k in range(200))
    (folder / "in.jsonl").write_text(lines)
    config = ShardConfig(rows_per_file=40, val_fraction=0.2)
    shard_jsonl([folder / "in.jsonl"], folder / "live", config, FollowConfig(complete=True))
    assert len(Log.open(folder / "live").state.retired) > 2
    return folder / "live"


@both
def test_a_mirror_cut_anywhere_has_no_faults(tmp_path: Path, sealed: Path, move: Move) -> None:
    """The parts of the validation rows were merged by the seal, and are not in the source."""
    last = Log.open(sealed).state.n
    for n in range(last + 1):
        there = tmp_path / str(n)
        interrupted(move, sealed, there, n)
        verdict = verify(LocalStore(there), full=True)
        named = [file.name for file in verdict.state.split("val")]
        if n < last:
            assert verdict.faults == []
            assert verdict.coming == named
        assert move(sealed, there).sealed
        assert contents(there) == contents(sealed)
        assert verify(LocalStore(there), full=True).coming == []


def test_what_a_mirror_has_lost_is_still_a_fault(tmp_path: Path, sealed: Path) -> None:
    interrupted(push, sealed, tmp_path, 3)
    (tmp_path / "shard_00001.parquet").unlink()
    assert [f.what for f in verify(LocalStore(tmp_path)).faults] == [
        "shard_00001.parquet is missing"
    ]
    part = tmp_path / "_val" / "val_00000.parquet"
    part.parent.mkdir()
    part.write_bytes(b"half")
    assert "_val/val_00000.parquet has the wrong size" in [
        fault.what for fault in verify(LocalStore(tmp_path)).faults
    ]


def test_a_live_dataset_that_has_lost_a_part_is_faulty(tmp_path: Path) -> None:
    """Nobody has said of it that it was merged."""
    producer = Producer(tmp_path / "live")
    part = producer.add(100, "val")
    (tmp_path / "live" / part).unlink()
    assert [f.what for f in verify(LocalStore(tmp_path / "live")).faults] == [f"{part} is missing"]


def test_a_marker_of_another_dataset_says_nothing(tmp_path: Path, sealed: Path) -> None:
    interrupted(push, sealed, tmp_path / "there", 2)
    marker = (tmp_path / "there" / MERGED).read_bytes()
    producer = Producer(tmp_path / "live")
    part = producer.add(100, "val")
    (tmp_path / "live" / part).unlink()
    for data in (marker, marker[:-9], b""):
        (tmp_path / "live" / MERGED).write_bytes(data)
        assert verify(LocalStore(tmp_path / "live")).faults != []


def test_validation_rows_are_awaited(tmp_path: Path, sealed: Path) -> None:
    there = tmp_path / "there"
    interrupted(push, sealed, there, 3)
    with pytest.raises(ProducerStalled):
        DatasetSource(str(there), SourceConfig(split="val", stall_s=0.3))
    begun = time.monotonic()
    thread = threading.Timer(0.5, push, (sealed, there))
    thread.start()
    source = DatasetSource(str(there), SourceConfig(split="val", stall_s=20))
    thread.join()
    assert time.monotonic() - begun > 0.4
    read = sum(source.read_table(part).num_rows for part in range(source.num_known))
    assert read == Log.open(sealed).state.files["val_shard.parquet"].rows


def test_a_mirror_of_a_mirror_that_was_cut(tmp_path: Path, sealed: Path) -> None:
    """It brings what there is, and says the same of the rest."""
    interrupted(push, sealed, tmp_path / "one", 3)
    pull(tmp_path / "one", tmp_path / "two", SyncConfig(once=True))
    assert Log.open(tmp_path / "two").state.n == 3
    verdict = verify(LocalStore(tmp_path / "two"))
    assert (verdict.faults, bool(verdict.coming)) == ([], True)
    push(sealed, tmp_path / "one")
    assert pull(tmp_path / "one", tmp_path / "two").sealed
    assert contents(tmp_path / "two") == contents(sealed)


def test_a_part_that_no_log_retires_is_an_error(tmp_path: Path) -> None:
    producer = Producer(tmp_path / "live")
    part = producer.add(100, "val")
    (tmp_path / "live" / part).unlink()
    with pytest.raises(ShardMismatch, match="is not what was written"):
        push(tmp_path / "live", tmp_path / "there", SyncConfig(once=True))
    assert not (tmp_path / "there" / record_name(1)).exists()


def test_more_is_merged_after_a_cut(tmp_path: Path) -> None:
    live, there = tmp_path / "live", tmp_path / "there"
    producer = Producer(live)
    first = producer.add(100, "val")
    producer.merge(first, 50)
    (live / first).unlink()
    interrupted(push, live, there, 1)
    assert verify(LocalStore(there)).coming == [first]
    second = producer.add(200, "val")
    producer.merge(second, 70)
    (live / second).unlink()
    interrupted(push, live, there, 3)
    assert verify(LocalStore(there)).coming == [second]
    assert verify(LocalStore(there)).faults == []
    producer.seal()
    push(live, there)
    assert not (there / MERGED).exists()
