"""What decides the bytes of a dataset checks itself; a writer that fails leaves it right."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadConfig, StoreFailed
from penstock.ingest.formats import Piece, ReadConfig
from penstock.prepare.task import PrepareTask
from penstock.prepare.wire import Request
from penstock.produce.columns import ShardRows
from penstock.produce.writer import Batch, ShardConfig, ShardWriter, finish
from penstock.store.local import LocalStore
from penstock.store.log import Log
from penstock.store.record import Progress
from penstock.store.store import Store, Stored, open_store


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"rows_per_file": 0}, "--rows_per_file is 0", "choose from 1 to 10,000,000"),
        ({"rows_per_file": 10**8}, "--rows_per_file is 100000000", "choose from 1 to 10,000,000"),
        ({"bytes_per_file": 0}, "--bytes_per_file is 0", "choose from 1 to 1,073,741,824"),
        ({"val_fraction": 1.5}, "--val_fraction is 1.5", "choose from 0 to 1"),
        ({"val_fraction": float("nan")}, "--val_fraction is nan", "choose a number"),
        ({"seed": -1}, "--seed is -1", "choose from 0 to 9,223,372,036,854,775,807"),
        ({"max_line_bytes": 1 << 30}, "--max_line_bytes is 1073741824", "choose from 1 to"),
        ({"text_field": ""}, "--text_field is empty", "name the field that holds the text"),
    ],
)
def test_options_check_themselves(options: dict[str, Any], what: str, do: str) -> None:
    with pytest.raises(BadConfig) as caught:
        ShardConfig(**options)
    assert caught.value.what == what
    assert do in caught.value.do


def test_a_text_field_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(BadConfig):
        ShardConfig(text_field="\udcff")


def open_writer(store: Store, threads: int) -> ShardWriter:
    return ShardWriter(store, ShardConfig(val_fraction=0), ["in"], threads=threads)


def batch_of(texts: list[str], start: int) -> Batch:
    """The texts as the lines of the input from `start` on."""
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    end = start + len(data)
    task = PrepareTask((), ReadConfig(), ["in"], None, is_plain=True)
    found = task(Request(Piece(0, "jsonl", "in", start, end, len(data), at=start, data=data)))
    batch = Batch()
    assert found.rows is not None
    batch.rows.add(found.rows, len(texts), len(texts), len(data))
    batch.progress.append(
        Progress(
            input="in", start=start, to=end, read=len(texts), kept=len(texts), dropped={}
        )
    )  # fmt: skip
    return batch


class FullStore(LocalStore):
    """A store whose disk is full when a certain name comes."""

    full_at = "shard_00001.parquet"

    def put(self, name: str, write: Any) -> Stored:
        if name == self.full_at:
            raise StoreFailed(f"could not write {name}", why="ENOSPC: No space left on device")
        return super().put(name, write)


def test_commits_are_in_order_and_stop_at_a_failure(tmp_path: Path) -> None:
    writer = open_writer(FullStore(tmp_path, make=True), 3)
    at = 0
    for k in range(3):
        batch = batch_of([f"{k} {n}" for n in range(5)], at)
        at = batch.progress[0].to
        writer.submit(batch)
    with pytest.raises(StoreFailed, match=r"could not write shard_00001\.parquet"):
        list(writer.commit(0))
    writer.close()
    state = Log.open(tmp_path).state
    # The third was stored, perhaps before the second failed; but it is not part of the dataset.
    assert [file.name for file in state.split("train")] == ["shard_00000.parquet"]
    assert state.inputs["in"].kept == 5
    assert state.sealed is None


def test_memory_is_bounded_by_the_number_of_batches(tmp_path: Path) -> None:
    writer = open_writer(open_store(tmp_path), 2)
    at = 0
    alive: weakref.WeakSet[ShardRows] = weakref.WeakSet()
    for k in range(6):
        list(writer.commit(1, 1 << 30))
        assert len(alive) <= 1
        batch = batch_of([f"{k}"], at)
        alive.add(batch.rows)
        at = batch.progress[0].to
        writer.submit(batch)
        del batch
    list(writer.seal())
    writer.close()
    state = Log.open(tmp_path).state
    assert state.sealed is not None
    assert state.sealed.rows == 6
    assert (tmp_path / "_COMPLETE").read_bytes() == sorted((tmp_path / "_log").iterdir())[
        -1
    ].read_bytes()
    before = sorted(tmp_path.rglob("*"))
    finish(Log.open(tmp_path))  # repeatable
    assert sorted(tmp_path.rglob("*")) == before


def test_only_what_an_earlier_writer_left_is_removed(tmp_path: Path) -> None:
    """A first writer has none before it: other bytes under a shard's name are somebody's."""
    at = 0
    for epoch, number in ((1, 1), (2, 3)):
        foreign = tmp_path / f"shard_{number:05d}.parquet"
        foreign.write_bytes(b"not ours")
        writer = open_writer(open_store(tmp_path), 1)
        for k in range(2):
            batch = batch_of([f"{epoch} {k}"], at)
            at = batch.progress[0].to
            writer.submit(batch)
        list(writer.commit(0))
        writer.close()
        state = writer.log.state
        assert state.epoch == epoch
        names = [file.name for file in state.split("train")]
        assert len(names) == 2 * epoch
        assert foreign.name not in names
        assert all((tmp_path / name).exists() for name in names)
        # the second writer may take it for what the first one left, for which there is no other use
        assert foreign.exists() == (epoch == 1)
