"""Files and writers that are not ours: none is deleted, taken over, or made whole by a seal."""

import hashlib
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from penstock.errors import BadConfig, InputReplaced, LogDamaged, PenstockError, ShardMismatch
from penstock.ingest import lines
from penstock.produce.dataset import FollowConfig, Outcome, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig, ShardWriter
from penstock.store.log import Log
from penstock.store.store import open_store
from penstock.work.events import Events

CONFIG = ShardConfig(rows_per_file=50, val_fraction=0.2)
COMPLETE = FollowConfig(complete=True, threads=1)


def write_lines(path: Path, count: int, word: str = "document") -> Path:
    path.write_text("".join(f'{{"text": "{word} {k:06d}"}}\n' for k in range(count)))
    return path


def run(path: Path, dataset: Path, config: ShardConfig = CONFIG) -> Outcome:
    return shard_jsonl([path], dataset, config, COMPLETE)


@pytest.mark.parametrize("name", ["shard_00000.parquet", "val_shard.parquet", "_COMPLETE"])
def test_files_of_others_are_refused_and_kept(tmp_path: Path, name: str) -> None:
    dataset = tmp_path / "set"
    dataset.mkdir()
    (dataset / name).write_text("precious")
    with pytest.raises(BadConfig, match="and no log that names it"):
        run(write_lines(tmp_path / "in.jsonl", 10), dataset)
    assert (dataset / name).read_text() == "precious"


def test_a_later_shard_of_others_is_never_deleted(tmp_path: Path) -> None:
    dataset = tmp_path / "set"
    dataset.mkdir()
    (dataset / "shard_00001.parquet").write_text("precious")
    run(write_lines(tmp_path / "in.jsonl", 200), dataset)
    assert (dataset / "shard_00001.parquet").read_text() == "precious"
    assert not verify(open_store(dataset), full=True).faults


def stopped_before_the_seal(tmp_path: Path) -> Path:
    """A dataset whose last input is read, and which is not sealed."""
    path = write_lines(tmp_path / "in.jsonl", 400)

    def stop(self: ShardWriter) -> None:
        for _ in self.commit(0):
            pass
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardWriter, "seal", stop)
        with pytest.raises(KeyboardInterrupt):
            run(path, tmp_path / "set")
    return tmp_path / "set"


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_the_seal_does_not_launder_a_damaged_part(tmp_path: Path, damage: str) -> None:
    dataset = stopped_before_the_seal(tmp_path)
    part = dataset / "_val" / "val_00001.parquet"
    data = bytearray(part.read_bytes())
    if damage == "remove":
        part.unlink()
    elif damage == "cut":
        part.write_bytes(data[:-9])
    else:
        data[20] ^= 4
        part.write_bytes(data)
    with pytest.raises(ShardMismatch, match=r"_val/val_00001\.parquet is not what was written"):
        run(tmp_path / "in.jsonl", dataset)
    assert Log.open(dataset).state.sealed is None


def test_an_input_rewritten_while_it_is_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "BLOCK_BYTES", 4096)
    path = write_lines(tmp_path / "in.jsonl", 20_000, "old")
    other = write_lines(tmp_path / "other.jsonl", 20_000, "new").read_bytes()
    events = Events("shard")

    def rewrite(event: dict[str, object]) -> None:
        if event["kind"] == "commit" and path.read_bytes() != other:
            with path.open("r+b") as file:
                file.write(other)

    events.listen(rewrite)
    with pytest.raises(InputReplaced):
        shard_jsonl([path], tmp_path / "set", CONFIG, COMPLETE, events=events)
    assert Log.open(tmp_path / "set").state.sealed is None


def test_parts_counted_from_one_are_refused_not_leaked(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        {"text": f"{k} {part}", "source": f"f{k}", "start": 0, "end": 9, "part": part, "parts": 3}
        for k in range(100)
        for part in (1, 2, 3)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(PenstockError, match="bad_provenance: 100"):
        run(path, tmp_path / "set")


def test_long_names_and_many_rows_stay_within_32_bits(tmp_path: Path) -> None:
    folder = tmp_path / ("n" * 200) / ("m" * 200)
    folder.mkdir(parents=True)
    path = folder / "in.jsonl"
    path.write_text('{"text": "1"}\n' * 200_000)
    config = ShardConfig(rows_per_file=10_000_000, val_fraction=0)
    run(path, tmp_path / "set", config)
    parquet = pq.ParquetFile(tmp_path / "set" / "shard_00000.parquet")
    assert parquet.num_row_groups > 4
    assert parquet.metadata.num_rows == 200_000


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", 10)
    (tmp_path / "link.jsonl").symlink_to(path)
    with pytest.raises(BadConfig, match="given twice"):
        shard_jsonl([path, tmp_path / "link.jsonl"], tmp_path / "set", CONFIG, COMPLETE)


def test_a_sealed_dataset_answers_only_for_what_it_is(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", 100)
    run(path, tmp_path / "set")
    assert run(path, tmp_path / "set").sealed
    with pytest.raises(BadConfig, match="seed: 0 before, 9 now"):
        run(path, tmp_path / "set", ShardConfig(rows_per_file=50, val_fraction=0.2, seed=9))
    write_lines(path, 50, "another ")
    with pytest.raises(InputReplaced):
        run(path, tmp_path / "set")
    path.unlink()
    with pytest.raises(BadConfig, match="other inputs"):
        run(tmp_path / "else.jsonl", tmp_path / "set")


def test_a_seal_during_verify_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = stopped_before_the_seal(tmp_path)
    store = open_store(dataset)
    size = store.size
    sealed: list[Outcome] = []

    def seal_first(name: str) -> int | None:
        if not sealed:
            sealed.append(run(tmp_path / "in.jsonl", dataset))
        return size(name)

    monkeypatch.setattr(store, "size", seal_first)
    assert verify(store).faults == []


def test_a_wrong_marker_is_put_right_by_the_producer(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "in.jsonl", 100)
    run(path, tmp_path / "set")
    (tmp_path / "set" / "_COMPLETE").write_text("x")
    assert verify(open_store(tmp_path / "set")).faults
    run(path, tmp_path / "set")
    assert not verify(open_store(tmp_path / "set")).faults


def test_a_writer_whose_dataset_was_begun_anew_harms_nothing(tmp_path: Path) -> None:
    dataset = tmp_path / "set"
    writer = ShardWriter(open_store(dataset, make=True), CONFIG, ["in.jsonl"])
    for _ in range(5):
        list(writer.beat())
    os.rename(dataset, tmp_path / "gone")
    run(write_lines(tmp_path / "in.jsonl", 100), dataset)
    before = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in dataset.glob("_log/*")}
    with pytest.raises(LogDamaged, match="no longer the log"):
        list(writer.beat())
    writer.close()
    after = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in dataset.glob("_log/*")}
    assert after == before


def test_a_mistyped_second_input_can_be_mended(tmp_path: Path) -> None:
    one, two = (write_lines(tmp_path / name, 30, name) for name in ("one.jsonl", "two.jsonl"))
    with pytest.raises(PenstockError, match="is not there"):
        shard_jsonl([one, tmp_path / "tow.jsonl"], tmp_path / "set", CONFIG, COMPLETE)
    assert shard_jsonl([one, two], tmp_path / "set", CONFIG, COMPLETE).sealed
