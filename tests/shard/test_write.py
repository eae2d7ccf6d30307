"""What decides the bytes of a dataset checks itself; a writer that fails leaves it right."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import BadConfig, StoreFailed
from penstock.ingest.jsonl import Block, Columns, LineParser
from penstock.kernels import PAD
from penstock.shard.columns import write_rows
from penstock.shard.write import Batch, ShardConfig, ShardWriter, finish
from penstock.store.backends import LocalStore, Store, Stored, open_store
from penstock.store.log import Log
from penstock.store.record import Progress


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


def open_writer(store: Store, threads: int) -> ShardWriter[Columns]:
    return ShardWriter(
        store,
        ShardConfig(val_fraction=0),
        ["in"],
        write_rows=lambda file, columns, order: write_rows(file, columns, order, ["in"]),
        threads=threads,
    )


def new_batch(writer: ShardWriter[Columns]) -> Batch[Columns]:
    return Batch(writer.spare.pop() if writer.spare else Columns.allocate(1 << 20, 100))


def fill(writer: ShardWriter[Columns], batch: Batch[Columns], texts: list[str], start: int) -> None:
    """Parse `texts` as the lines of input 0 from `start` on."""
    data = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    array = np.frombuffer(data + bytes(PAD), np.uint8).copy()
    parser = LineParser(text_field="text", salt=0, threshold=0, max_line_bytes=1 << 20)
    taken = parser.take(
        Block(array, 0, len(data), start), 0, 0, batch.columns,
        max_train_rows=1 << 20, max_text_bytes=1 << 30, max_rejects=10,
    )  # fmt: skip
    assert taken.stop == len(data)
    batch.progress.append(
        Progress(
            input=writer.inputs[0], start=start, to=start + len(data),
            read=len(texts), kept=len(texts), dropped={},
        )
    )  # fmt: skip


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
        batch = new_batch(writer)
        fill(writer, batch, [f"{k} {n}" for n in range(5)], at)
        at = batch.progress[0].to
        writer.submit(batch)
    with pytest.raises(StoreFailed, match=r"could not write shard_00001\.parquet"):
        list(writer.commit_all())
    writer.close()
    state = Log.open(tmp_path).state
    # The third was stored, perhaps before the second failed; but it is not part of the dataset.
    assert [file.name for file in state.split("train")] == ["shard_00000.parquet"]
    assert state.inputs["in"].kept == 5
    assert state.sealed is None


def test_memory_is_bounded_by_the_number_of_batches(tmp_path: Path) -> None:
    writer = open_writer(open_store(tmp_path), 2)
    at = 0
    seen = set()
    for k in range(6):
        list(writer.make_room(2))
        batch = new_batch(writer)
        assert batch.columns.rows == 0
        assert not batch.rejects
        seen.add(id(batch.columns))
        fill(writer, batch, [f"{k}"], at)
        at = batch.progress[0].to
        writer.submit(batch)
    assert len(seen) <= 2
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
            batch = new_batch(writer)
            fill(writer, batch, [f"{epoch} {k}"], at)
            at = batch.progress[0].to
            writer.submit(batch)
        list(writer.commit_all())
        writer.close()
        state = writer.log.state
        assert state.epoch == epoch
        names = [file.name for file in state.split("train")]
        assert len(names) == 2 * epoch
        assert foreign.name not in names
        assert all((tmp_path / name).exists() for name in names)
        # the second writer may take it for what the first one left, for which there is no other use
        assert foreign.exists() == (epoch == 1)
