"""Plant a fault, and `verify` finds it and names it."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.errors import BadConfig, NoDataset
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import Fault, verify
from penstock.produce.writer import ShardConfig
from penstock.store import log as log_module
from penstock.store.log import Log
from penstock.store.record import Add, Fold, Record, decode, encode, fold_name, record_name
from penstock.store.store import open_store
from penstock.work.events import Event, Events

SHARD: Final = "shard_00001.parquet"
VAL: Final = "val_shard.parquet"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sealed dataset with several shards, a validation shard and rejects."""
    folder = tmp_path_factory.mktemp("sound")
    path = folder / "in.jsonl"
    path.write_text("".join(f'{{"text": "document {k % 1000:03d}"}}\n[{k}]\n' for k in range(200)))
    config = ShardConfig(rows_per_file=30, val_fraction=0.2, seed=1)
    follow = FollowConfig(complete=True, max_rejects=1.0, threads=1)
    assert shard_jsonl([path], folder / "out", config, follow).sealed
    return folder / "out"


@pytest.fixture
def dataset(sound: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(sound, tmp_path / "out"))


def faults(dataset: Path, *, full: bool) -> list[Fault]:
    return verify(open_store(dataset), full=full).faults


def only_fault(dataset: Path, *, full: bool) -> Fault:
    (fault,) = faults(dataset, full=full)
    return fault


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def rewrite(dataset: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change records and put every hash right again, as only a forger would."""
    store = open_store(dataset)
    count = Log.open(dataset).state.n + 1
    records = [json.loads(store.read(record_name(n))) for n in range(count)]
    change(records)
    previous = "0" * 64
    for n, record in enumerate(records):
        record["prev"] = previous
        for op in record["ops"]:
            if op["type"] == "seal":
                op["head"] = previous
        del record["sha256"]
        body = json.dumps(record, separators=(",", ":")).encode().removesuffix(b"}")
        previous = hashlib.sha256(body).hexdigest()
        data = body + b',"sha256":"' + previous.encode() + b'"}\n'
        (dataset / record_name(n)).write_bytes(data)
    (dataset / "_COMPLETE").write_bytes(data)


def test_a_sound_dataset_has_no_faults(sound: Path) -> None:
    for full in (False, True):
        seen: list[Event] = []
        events = Events("verify")
        events.listen(seen.append)
        verdict = verify(open_store(sound), full=full, events=events)
        assert verdict.faults == []
        assert verdict.state.sealed is not None
        files = verdict.state.files.values()
        assert verdict.files_checked == len(files) > 8
        assert [event["files"] for event in seen] == list(range(1, len(files) + 1))
        assert seen[-1]["at"] == seen[-1]["size"] == sum(file.bytes for file in files)
        assert {event["faults"] for event in seen} == {0}


def test_a_live_dataset_has_no_faults(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 10)
    path.with_name("in.jsonl.done").write_text("{")
    with pytest.raises(Exception, match="is not a marker"):
        shard_jsonl([path], tmp_path / "out", ShardConfig(rows_per_file=3))
    assert faults(tmp_path / "out", full=True) == []


def test_the_forger_of_this_test_leaves_no_trace(dataset: Path) -> None:
    """Else the faults below could be found by its clumsiness."""
    rewrite(dataset, lambda records: None)
    assert faults(dataset, full=True) == []


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(NoDataset, match="there is no dataset at") as caught:
        verify(open_store(tmp_path))
    assert caught.value.why == "it has no log"


# Files.


def test_a_flipped_byte_in_a_shard(dataset: Path) -> None:
    size = (dataset / SHARD).stat().st_size
    for at in {0, 4, size // 2, size - 1, *random.Random(1).sample(range(size), 30)}:
        flip(dataset / SHARD, at)
        assert faults(dataset, full=False) == []  # quick does not read
        fault = only_fault(dataset, full=True)
        assert fault.what == f"{SHARD} is not what was written"
        assert fault.where == f"{dataset}/{SHARD}"
        assert "the log says" in fault.why
        flip(dataset / SHARD, at)
    assert faults(dataset, full=True) == []


@pytest.mark.parametrize("name", [SHARD, VAL, "_rejects/rejects_00000.jsonl"])
@pytest.mark.parametrize("full", [False, True])
def test_a_truncated_or_longer_or_missing_file(dataset: Path, name: str, full: bool) -> None:
    path = dataset / name
    whole = path.read_bytes()
    for data in (b"", whole[:-1], whole + b"\n"):
        path.write_bytes(data)
        fault = only_fault(dataset, full=full)
        assert fault.what == f"{name} has the wrong size"
        assert fault.why == f"{len(data):,}, the log says {len(whole):,}"
    path.unlink()
    assert only_fault(dataset, full=full).what == f"{name} is missing"


def test_swapped_shards(dataset: Path) -> None:
    first, second = dataset / "shard_00000.parquet", dataset / SHARD
    first.rename(dataset / "x")
    second.rename(first)
    (dataset / "x").rename(second)
    found = [fault.what for fault in faults(dataset, full=True)]
    assert len(found) == 2
    for name, what in zip(("shard_00000.parquet", SHARD), found, strict=True):
        assert what in (f"{name} is not what was written", f"{name} has the wrong size")


def test_a_changed_rejects_file(dataset: Path) -> None:
    flip(dataset / "_rejects/rejects_00001.jsonl", 20)
    assert only_fault(dataset, full=True).what == (
        "_rejects/rejects_00001.jsonl is not what was written"
    )


@pytest.mark.parametrize("full", [False, True])
def test_a_symlink_in_place_of_a_shard(dataset: Path, full: bool) -> None:
    (dataset / SHARD).rename(dataset.parent / "elsewhere")
    (dataset / SHARD).symlink_to(dataset.parent / "elsewhere")
    fault = only_fault(dataset, full=full)
    assert fault.what.startswith(SHARD)
    assert fault.where == f"{dataset}/{SHARD}"


@pytest.mark.parametrize("full", [False, True])
def test_a_folder_in_place_of_a_shard(dataset: Path, full: bool) -> None:
    (dataset / SHARD).unlink()
    (dataset / SHARD).mkdir()
    assert only_fault(dataset, full=full).what.startswith(SHARD)


def test_every_fault_is_told_not_only_the_first(dataset: Path) -> None:
    (dataset / SHARD).unlink()
    flip(dataset / VAL, 50)
    flip(dataset / "shard_00002.parquet", 50)
    (dataset / "_COMPLETE").unlink()
    assert [fault.what for fault in faults(dataset, full=True)] == [
        f"{SHARD} is missing",
        "shard_00002.parquet is not what was written",
        f"{VAL} is not what was written",
        "sealed, but _COMPLETE is missing",
    ]


# The end.


@pytest.mark.parametrize("full", [False, True])
def test_the_marker_of_the_end(dataset: Path, full: bool) -> None:
    (dataset / "_COMPLETE").write_bytes(b"done")
    assert only_fault(dataset, full=full).what == "_COMPLETE does not hold the seal"
    (dataset / "_COMPLETE").unlink()
    fault = only_fault(dataset, full=full)
    assert fault.what == "sealed, but _COMPLETE is missing"
    assert "run its producer again" in fault.why
    (dataset / "_COMPLETE").symlink_to(record_name(0))
    assert only_fault(dataset, full=full).what == "_COMPLETE cannot be read"


# The log.


def test_a_flipped_byte_in_any_record(dataset: Path) -> None:
    count = Log.open(dataset).state.n + 1
    dice = random.Random(2)
    for n in range(count):
        path = dataset / record_name(n)
        size = path.stat().st_size
        for at in {0, size - 1, size - 2, size - 10, *dice.sample(range(size), 6)}:
            flip(path, at)
            fault = faults(dataset, full=False)[0]
            assert fault.what in ("the record is not what was written", "this is not a record")
            assert fault.where == f"{dataset}/{record_name(n)}"
            flip(path, at)
    assert faults(dataset, full=True) == []


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_truncated_record(dataset: Path, full: bool, size: int) -> None:
    os.truncate(dataset / record_name(3), size)
    assert faults(dataset, full=full)[0].what == "this is not a record"


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("n", [1, 3, -1])
def test_a_removed_record(dataset: Path, full: bool, n: int) -> None:
    """In the middle, or the seal itself: _COMPLETE and the records after it tell of it."""
    n = n if n >= 0 else Log.open(dataset).state.n
    (dataset / record_name(n)).unlink()
    assert any(f"record {n}" in f"{fault.what} {fault.why}" for fault in faults(dataset, full=full))


def test_the_first_record_removed(dataset: Path) -> None:
    (dataset / record_name(0)).unlink()
    with pytest.raises(NoDataset):
        faults(dataset, full=True)


@pytest.mark.parametrize("full", [False, True])
def test_records_in_another_order(dataset: Path, full: bool) -> None:
    third, fourth = dataset / record_name(3), dataset / record_name(4)
    third.rename(dataset / "x")
    fourth.rename(third)
    (dataset / "x").rename(fourth)
    assert faults(dataset, full=full)[0].what == "record 3 holds number 4"


@pytest.mark.parametrize("full", [False, True])
def test_a_record_with_a_field_more(dataset: Path, full: bool) -> None:
    rewrite(dataset, lambda records: records[2].update(extra=1))
    fault = faults(dataset, full=full)[0]
    assert fault.what == "the record has fields that it should not have, or lacks some"
    assert "extra" in fault.why
    assert fault.where == f"{dataset}/{record_name(2)}"


@pytest.mark.parametrize("full", [False, True])
def test_an_unknown_format(dataset: Path, full: bool) -> None:
    rewrite(dataset, lambda records: records[2].update(format=3))
    fault = faults(dataset, full=full)[0]
    assert fault.what == "the record is of format 3"
    assert fault.why == "this penstock reads formats 1 and 2"


def add_of(records: list[dict[str, Any]], split: str) -> dict[str, Any]:
    """The last file of a split."""
    adds = [op for r in records for op in r["ops"] if op["type"] == "add" and op["split"] == split]
    last: dict[str, Any] = adds[-1]
    return last


def progress_of(records: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = next(
        op for record in records[2:] for op in record["ops"] if op["type"] == "progress"
    )
    return found


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: r[2].update(n=7), "record 2 holds number 7"),
        (lambda r: r[2].update(dataset="other"), "the record is of another dataset"),
        (lambda r: r[2].update(epoch=0), "an older writer wrote after a newer one"),
        (lambda r: add_of(r, "train").update(rows=1), "rows added and documents kept or dropped"),
        (lambda r: add_of(r, "train").update(name="../x"), "which is not a name of a file of its"),
        (lambda r: progress_of(r).update({"from": 3}), "was read from 3 to"),
        (lambda r: progress_of(r).update(read=99), "read 99 is not kept"),
        (
            lambda r: r[-1]["ops"][-1].update(rows=1),
            "the seal's totals are not those of the shards",
        ),
        (lambda r: r[2]["ops"].append({**r[-1]["ops"][-1]}), "the seal's totals are not those"),
    ],
)
def test_a_forged_record(
    dataset: Path, change: Callable[[list[dict[str, Any]]], None], what: str
) -> None:
    rewrite(dataset, change)
    for full in (False, True):
        assert what in faults(dataset, full=full)[0].what


def test_a_chain_that_is_broken(dataset: Path) -> None:
    """A record with the right hash of itself and another record before it."""
    store = open_store(dataset)
    log = Log.open(dataset)
    record: Record = msgspec.structs.replace(log.record(3), prev="1" * 64)
    (dataset / record_name(3)).write_bytes(encode(record))
    assert store.read(record_name(3)) == encode(record)
    fault = faults(dataset, full=False)[0]
    assert fault.what == "the chain is broken"
    assert "it follows 111111111111" in fault.why


# Shards that the log agrees with, and that are wrong all the same.


def replace_shard(dataset: Path, name: str, table: pa.Table | bytes) -> None:
    """Put other bytes under a name, and a log that says so."""
    path = dataset / name
    if isinstance(table, bytes):
        path.write_bytes(table)
    else:
        pq.write_table(table, path)
    data = path.read_bytes()

    def change(records: list[dict[str, Any]]) -> None:
        for op in (op for record in records for op in record["ops"]):
            if op["type"] == "add" and op["name"] == name:
                records[-1]["ops"][-1]["bytes"] += len(data) - op["bytes"]
                op["bytes"] = len(data)
                op["sha256"] = hashlib.sha256(data).hexdigest()

    rewrite(dataset, change)
    assert faults(dataset, full=False) == []


def test_val_and_train_swapped(dataset: Path) -> None:
    """By a writer that counts right and splits wrong: every row is on the other side."""
    train = pq.read_table(dataset / "shard_00000.parquet")
    val = pq.read_table(dataset / VAL)
    assert train.num_rows == 30 < val.num_rows
    replace_shard(dataset, "shard_00000.parquet", val.slice(0, 30))
    fault = only_fault(dataset, full=True)
    assert fault.what == "30 rows of shard_00000.parquet belong to the other split"
    leaked = pa.concat_tables([val.slice(0, val.num_rows - 1), train.slice(0, 1)])
    replace_shard(dataset, VAL, leaked)
    assert f"1 rows of {VAL} belong to the other split" in [
        fault.what for fault in faults(dataset, full=True)
    ]


def test_rows_lost_or_doubled(dataset: Path) -> None:
    table = pq.read_table(dataset / SHARD)
    for rows in (29, 31):
        changed = pa.concat_tables([table, table]).slice(0, rows)
        replace_shard(dataset, SHARD, changed)
        fault = only_fault(dataset, full=True)
        assert (fault.what, fault.why) == (f"{SHARD} has {rows} rows", "the log says 30")


def test_other_columns(dataset: Path) -> None:
    table = pq.read_table(dataset / SHARD)
    replace_shard(dataset, SHARD, table.drop_columns(["part"]))
    assert only_fault(dataset, full=True).what == f"{SHARD} has other columns"


def test_not_parquet(dataset: Path) -> None:
    replace_shard(dataset, SHARD, b"PAR1 not really")
    assert only_fault(dataset, full=True).what == f"{SHARD} is not readable parquet"


def test_text_that_is_not_utf8(dataset: Path) -> None:
    table = pq.read_table(dataset / SHARD)
    raw = table["text"].combine_chunks().cast(pa.binary())
    spoiled = pa.array([b"\xff", *raw.to_pylist()[1:]], pa.binary())
    text = pa.StringArray.from_buffers(len(spoiled), *spoiled.buffers()[1:])
    replace_shard(dataset, SHARD, table.set_column(0, table.schema.field(0), text))
    fault = only_fault(dataset, full=True)
    assert fault.what == f"{SHARD} is not readable parquet"
    assert "UTF8" in fault.why


def test_a_rejects_file_with_a_line_too_few(dataset: Path) -> None:
    name = "_rejects/rejects_00000.jsonl"
    lines = (dataset / name).read_bytes().splitlines(keepends=True)
    replace_shard(dataset, name, b"".join(lines[1:]).ljust(sum(map(len, lines))))
    found = only_fault(dataset, full=True)
    assert found.what == f"{name} has {len(lines) - 1:,} rows"


# The folds.


@pytest.fixture
def folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset with a fold every four records."""
    monkeypatch.setattr(log_module, "FOLD_EVERY", 4)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"text": "{k}"}}\n' for k in range(60)))
    follow = FollowConfig(complete=True, threads=1)
    shard_jsonl([path], tmp_path / "out", ShardConfig(rows_per_file=5), follow)
    assert len([*(tmp_path / "out" / "_fold").iterdir()]) > 2
    assert faults(tmp_path / "out", full=True) == []
    return tmp_path / "out"


def test_a_damaged_fold(folded: Path) -> None:
    name = fold_name(1)
    flip(folded / name, 30)
    assert faults(folded, full=False) == []
    fault = only_fault(folded, full=True)
    assert fault.what == f"{name} is damaged"
    assert fault.where == f"{folded}/{name}"


def test_a_fold_that_adds_up_to_something_else(folded: Path) -> None:
    path = folded / fold_name(1)
    fold = decode(path.read_bytes(), Fold, "")
    ops = [
        msgspec.structs.replace(op, sha256="0" * 64) if isinstance(op, Add) else op
        for op in fold.ops
    ]
    path.write_bytes(encode(msgspec.structs.replace(fold, ops=ops)))
    assert only_fault(folded, full=True).what == "the folds do not add up to the records"


# What was seen before.


def head_of(dataset: Path) -> tuple[int, str]:
    state = Log.open(dataset).state
    return state.n, state.head


def expecting(dataset: Path, expect: str) -> list[Fault]:
    return verify(open_store(dataset), expect=expect).faults


def test_a_log_that_goes_on_from_what_was_seen(dataset: Path) -> None:
    n, head = head_of(dataset)
    log = Log.open(dataset)
    for seen in range(n + 1):
        sha256 = log.record(seen).sha256
        assert expecting(dataset, sha256) == []
        assert expecting(dataset, f"{seen}:{sha256}") == []
    assert head == log.record(n).sha256


@pytest.mark.parametrize("numbered", [True, False])
def test_newest_records_that_were_removed(dataset: Path, numbered: bool) -> None:
    """Without what was seen before, this is a live dataset whose producer is silent."""
    n, head = head_of(dataset)
    for gone in (n, n - 1):
        (dataset / record_name(gone)).unlink()
    (dataset / "_COMPLETE").unlink()
    assert not any("record" in fault.what for fault in faults(dataset, full=False))
    found = expecting(dataset, f"{n}:{head}" if numbered else head)
    told = [fault for fault in found if "expected" in fault.what]
    assert len(told) == 1
    assert told[0].what == f"the log does not have the expected record{f' {n}' * numbered}"
    assert told[0].why.startswith(f"it ends at record {n - 2}: ")


def test_another_record_under_an_expected_number(dataset: Path) -> None:
    n, head = head_of(dataset)
    rewrite(dataset, lambda records: records[2].update(time="2024-01-01T00:00:00.000+00:00"))
    assert faults(dataset, full=False) == []
    (fault,) = expecting(dataset, f"{n}:{head}")
    assert fault.what == f"record {n} is not the expected one"
    assert fault.where == f"{dataset}/{record_name(n)}"
    assert head[:12] in fault.why
    (fault,) = expecting(dataset, head)
    assert fault.what == "the log does not have the expected record"


@pytest.mark.parametrize("expect", ["", "12", "x:" + "0" * 64, "-1:" + "0" * 64, "A" * 64])
def test_what_cannot_be_expected(dataset: Path, expect: str) -> None:
    with pytest.raises(BadConfig, match="--expect is") as caught:
        expecting(dataset, expect)
    assert "penstock verify" in caught.value.do
