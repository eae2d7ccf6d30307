"""Directories of parquet files as they are found: names, types, splits; what is waited for."""

import gzip
import json
import logging
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock
from penstock import (
    FollowConfig,
    ShardConfig,
    Tokenizer,
    prepare_dataset,
)
from penstock import shard_jsonl as shard
from penstock.errors import (
    BadConfig,
    InputMissing,
    NoDataset,
    ProducerStalled,
    ShardMismatch,
    StateMismatch,
)
from penstock.supply.sources import folder as folders
from penstock.supply.sources import open as choose

from .datasets import GrowingDataset, made_dataset
from .nested import nested
from .test_sources import TEXTS, load, texts_of, tokenizer, write_parquet

__all__ = ["tokenizer"]


def write_files(folder: Path, names: list[str], rows: int = 10) -> str:
    for k, name in enumerate(names):
        write_parquet(folder / name, TEXTS[rows * k : rows * (k + 1)])
    return str(folder)


# What changes under a loader


@pytest.mark.torch
def test_files_that_change_while_they_are_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_files(tmp_path / "d", [f"s_{k:02d}.parquet" for k in range(12)])
    (tmp_path / "d/_COMPLETE").touch()
    batches = iter(load(folder, tokenizer))
    next(batches)
    write_parquet(tmp_path / "d/s_11.parquet", ["something else"] * 10)
    with pytest.raises(ShardMismatch, match=r"s_11.parquet is not the file that it was") as caught:
        list(batches)
    assert "end otherwise than when it was first looked at" in caught.value.why
    found = penstock.StreamingMixedShardDataset([folder], ["all"], 40, 30, random_seed=1)
    write_parquet(tmp_path / "d/s_10.parquet", ["something else"] * 10)
    with pytest.raises(ShardMismatch, match=r"s_10.parquet is not the file that it was"):
        list(found)
    found = penstock.StreamingMixedShardDataset([folder], ["all"], 40, 30, random_seed=1)
    (tmp_path / "d/s_10.parquet").unlink()
    with pytest.raises(ShardMismatch, match=r"s_10.parquet is missing") as caught:
        list(found)
    assert caught.value.where == f'source "d", {folder}/s_10.parquet'


def test_other_files_of_the_same_sizes_are_not_resumed_on(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def write(word: str) -> None:
        for k in range(6):
            texts = pa.table({"text": [f"{word} {k} {j:02d}" for j in range(20)]})
            pq.write_table(texts, tmp_path / f"d/s_{k}.parquet", compression="none")

    (tmp_path / "d").mkdir()
    (tmp_path / "d/_COMPLETE").touch()
    write("aaa")
    size = (tmp_path / "d/s_0.parquet").stat().st_size
    loader = load(str(tmp_path / "d"), tokenizer)
    next(iter(loader))
    state = loader.state_dict()
    load(str(tmp_path / "d"), tokenizer).load_state_dict(state)
    write("bbb")
    assert (tmp_path / "d/s_0.parquet").stat().st_size == size
    with pytest.raises(StateMismatch, match="the first 6 files are not those that the state saw"):
        load(str(tmp_path / "d"), tokenizer).load_state_dict(state)


# Splits


def test_a_glob_over_a_dataset_is_refused(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    with pytest.raises(BadConfig, match="names files of a dataset") as caught:
        load(str(tmp_path / "d/*.parquet"), None)
    assert f"give the directory, {tmp_path / 'd'}" in caught.value.do
    load(str(tmp_path / "d/shard_00000.parquet"), None, text_field="text")


def test_globs_leave_validation_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    names = ["a.parquet", "val.parquet", "validation-0.parquet", "val_1.parquet", "values.parquet"]
    folder = write_files(tmp_path / "d", names)
    for path, options in ((f"{folder}/*.parquet", {}), (folder, {"streaming": False})):
        found = texts_of(load(path, tokenizer, **options))
        assert found == sorted(TEXTS[:10] + TEXTS[40:50])
        found = texts_of(load(path, tokenizer, split="val", **options))
        assert found == sorted(TEXTS[10:40])
    with pytest.raises(NoDataset, match="by their names not of split 'train'"):
        load(f"{folder}/val*-*.parquet", tokenizer)


@pytest.mark.torch
def test_a_split_that_does_not_exist(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "d", ["train-0.parquet"])
    for path in (made_dataset(tmp_path / "e").url, folder):
        with pytest.raises(BadConfig, match="split is 'validation'") as caught:
            load(path, None, split="validation")
        assert "train, val" in caught.value.do
    with pytest.raises(BadConfig, match="split is 'vla'"):
        penstock.StreamingMixedShardDataset([folder], ["all"], **nested(mixed=True, split="vla"))


def test_a_sealed_dataset_without_shards(tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text("")
    shard([tmp_path / "e.jsonl"], tmp_path / "e", follow=FollowConfig(complete=True))
    with pytest.raises(NoDataset, match="no shards of split 'train'") as caught:
        load(str(tmp_path / "e"), None)
    assert "penstock show" in caught.value.do
    whole = made_dataset(tmp_path / "d").url
    with pytest.raises(NoDataset, match="no shards of split 'val'") as caught:
        load(whole, None, split="val")
    assert "--val_fraction" in caught.value.do
    load(GrowingDataset(tmp_path / "live").url, None, split="val")  # they may still come


# Names and waiting


def test_files_are_sorted_by_number(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_files(tmp_path / "d", [f"s_{k}.parquet" for k in range(12)])
    live = load(folder, tokenizer, stall_s=0.2)
    assert [Path(file.name).name for file in live.sources[0]._files] == [
        f"s_{k}.parquet" for k in range(12)
    ]
    with pytest.raises(ProducerStalled, match="12 files were read"):
        list(live)
    assert len(texts_of(load(f"{folder}/*.parquet", tokenizer))) == 120


def test_names_that_say_how_many_there_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    names = [f"train-{k:05d}-of-00003.parquet" for k in range(3)]
    done = write_files(tmp_path / "done", [*names, "validation-00000-of-00001.parquet"])
    assert texts_of(load(done, tokenizer, stall_s=5)) == sorted(TEXTS[:30])
    assert texts_of(load(done, tokenizer, stall_s=5, split="val")) == sorted(TEXTS[30:40])
    live = tmp_path / "live"
    live.mkdir()

    def write() -> None:
        for name in (names[1], names[0], names[2]):
            data = (tmp_path / "done" / name).read_bytes()
            (live / name).write_bytes(data[: len(data) // 2])  # seen half-way
            time.sleep(0.1)
            (live / name).write_bytes(data)

    writer = threading.Thread(target=write)
    writer.start()
    assert texts_of(load(str(live), tokenizer, stall_s=20)) == sorted(TEXTS[:30])
    writer.join()
    shutil.copy(live / names[0], live / "test-00000-of-00001.parquet")
    with pytest.raises(BadConfig, match="two files have number 0: test-00000") as caught:
        load(str(live), tokenizer)
    assert f'"{live}/train-*.parquet"' in caught.value.do
    assert texts_of(load(f"{live}/train-*.parquet", tokenizer)) == sorted(TEXTS[:30])


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what it waits for sooner."""
    monkeypatch.setattr(folders, "TELL_S", 0.2)
    monkeypatch.setattr(choose, "TELL_S", 0.2)


@pytest.mark.usefixtures("hasty")
def test_what_is_waited_for_is_told(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "empty").mkdir()
    gap = write_files(tmp_path / "gap", ["s_0.parquet", *(f"s_{k}.parquet" for k in range(2, 9))])
    half = write_files(tmp_path / "half", ["s_0.parquet"])
    data = (tmp_path / "half/s_0.parquet").read_bytes()
    (tmp_path / "half/s_0.parquet").write_bytes(data[:-1])
    for path, expected in (
        (str(tmp_path / "emty"), "there is no such path; there is empty"),
        (str(tmp_path / "empty"), "the directory is empty"),
        (gap, "s_2.parquet, s_3.parquet, s_4.parquet and 4 more: file number 1 must come first"),
        (write_files(tmp_path / "one", ["s_1.parquet", "s_2.parquet"]), "file number 0 must come"),
        (half, "s_0.parquet is not written to its end"),
        (write_files(tmp_path / "v", ["val_0.parquet"]), "by their names not of split 'train'"),
    ):
        caplog.clear()
        with pytest.raises(ProducerStalled) as caught:
            list(load(path, tokenizer, stall_s=0.5, wait_s=0.5))
        assert expected in caught.value.why
        (told,) = caplog.messages
        assert told.startswith(f"{path}: waiting for ")
        assert expected in told


@pytest.mark.usefixtures("hasty")
def test_a_directory_without_a_marker_says_what_to_do(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    open_end = write_files(tmp_path / "open end", ["s_0.parquet", "s_1.parquet"])
    cure = f"if all files are there, give streaming=False or: touch '{open_end}/_COMPLETE'"
    with pytest.raises(ProducerStalled) as stalled:
        list(load(open_end, tokenizer, stall_s=0.5))
    assert stalled.value.do == f"{cure}; else start what writes them"
    (told,) = caplog.messages
    assert "waiting for file number 2, or for a file _COMPLETE, which says that all have" in told
    assert told.endswith(cure)
    write_files(tmp_path / "b", ["s_0.parquet"])
    with pytest.raises(BadConfig, match="'open end' needs a weight") as unweighed:
        penstock.StreamingMixedShardDataset([open_end, str(tmp_path / "b")], ["all", "all"])
    assert unweighed.value.why.startswith("it has no _COMPLETE: more may come, and all of its")
    assert unweighed.value.do == f"give weights, or a bounded range of shards; {cure}"
    for names in (["a.parquet"], ["s_0.parquet", "t_0.parquet"]):
        with pytest.raises(
            BadConfig, match=r"a\.parquet has no number|two files have number 0"
        ) as e:
            load(write_files(tmp_path / str(len(names)), names), tokenizer)
        assert "if all files are there, give streaming=False or: touch " in e.value.do


def test_a_path_may_be_yet_to_come(tmp_path: Path, tokenizer: Tokenizer) -> None:
    later = threading.Timer(
        0.5, lambda: os.replace(write_files(tmp_path / "made", ["s-0-of-1.parquet"]), path)
    )
    path = str(tmp_path / "late")
    later.start()
    assert list(load(path, tokenizer, wait_s=60))
    later.join()


@pytest.mark.parametrize("name", ["more.jsonl", "more.jsonl.gz", "more.ndjson"])
def test_parquet_and_json_lines_are_two_sources(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    folder = write_files(tmp_path / "d", ["s-0-of-1.parquet"])
    (tmp_path / "d" / "dataset_infos.json").write_text("{}")
    (tmp_path / "d" / "_rejects.jsonl").write_text("{}")
    whole = texts_of(load(folder, tokenizer))
    (tmp_path / "d" / name).write_text("")
    for path in (folder, f"{folder}/*"):
        with pytest.raises(BadConfig, match="has parquet files and JSON lines") as caught:
            load(path, tokenizer)
        assert name in caught.value.why
        assert f"{folder}/*.parquet" in caught.value.do
    assert texts_of(load(f"{folder}/*.parquet", tokenizer)) == whole


def test_nothing_can_come_where_there_is_no_directory(tmp_path: Path) -> None:
    begin = time.monotonic()
    (tmp_path / "data").mkdir()
    for path in ("no/such", "no/such.parquet", "no/*.parquet", "daat"):
        with pytest.raises(InputMissing, match="there is nothing at"):
            load(str(tmp_path / path), None, stall_s=100)
    with pytest.raises(InputMissing, match="there is data") as caught:
        load(str(tmp_path / "dat"), None, stall_s=100)
    assert "LoaderRun(wait_s=…), or base_train.py --streaming_data, waits" in caught.value.do
    assert time.monotonic() - begin < 50


# Columns


@pytest.mark.parametrize(
    "column",
    [
        pa.array(TEXTS[:20]).dictionary_encode(),
        pa.array(TEXTS[:20], pa.string_view()),
        pa.array(TEXTS[:20], pa.large_string()),
        pa.array([text.encode() for text in TEXTS[:20]]),
        pa.array([text.encode() for text in TEXTS[:20]], pa.large_binary()),
    ],
    ids=lambda column: str(column.type),
)
def test_text_of_any_type(tmp_path: Path, tokenizer: Tokenizer, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    assert texts_of(load(str(tmp_path / "a.parquet"), tokenizer)) == sorted(TEXTS[:20])
    loader = load(str(tmp_path / "a.parquet"), tokenizer)
    span = loader.explain(next(iter(loader)))[0]  # there is no column but the text
    assert span.document == {}
    assert span.text_bytes is not None
    assert "a.parquet bytes not known" in str(span)


def test_nulls_are_empty_documents(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pq.write_table(pa.table({"text": pa.nulls(5)}), tmp_path / "a.parquet")
    assert texts_of(load(str(tmp_path / "a.parquet"), tokenizer)) == [""] * 5


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(range(20)), "column 'text' is of int64, which is no text"),
        (pa.array([[1, 2]] * 20), "column 'text' is of list<element: int64>, which is no text"),
        (pa.array([b"\xff"] * 20), "column 'text' of binary cannot be read as text"),
    ],
)
def test_what_is_no_text_is_named(
    tmp_path: Path, tokenizer: Tokenizer, column: pa.Array, expected: str
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    pq.write_table(pa.table({"text": column}), folder / "s_0.parquet")
    with pytest.raises(ShardMismatch, match=expected) as caught:
        list(load(str(folder), tokenizer, streaming=False))
    assert caught.value.where == f"{folder}/s_0.parquet"


@pytest.mark.torch
def test_errors_of_a_directory_name_its_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    folder = write_files(tmp_path / "hf", ["s_0.parquet"])
    with pytest.raises(ShardMismatch, match=r"^s_0.parquet has no column 'doc_id'") as caught:
        list(load(folder, tokenizer, streaming=False, ban=[3]))
    assert caught.value.where == f'source "hf", {folder}/s_0.parquet'
    assert "leave ban out" in caught.value.do
    with pytest.raises(BadConfig, match="holds text and no tokens") as no_tokens:
        list(load(folder, None, streaming=False))
    assert no_tokens.value.where == f"{folder}/s_0.parquet"
    chosen = penstock.StreamingMixedShardDataset(
        [folder], ["all"], **nested(mixed=True, columns=["id"], streaming=False)
    )
    with pytest.raises(ShardMismatch, match=r"s_0.parquet has no column 'id'") as caught:
        list(chosen)
    assert "choose others" in caught.value.do
    data = bytearray((tmp_path / "hf/s_0.parquet").read_bytes())
    data[4:60] = bytes(56)
    (tmp_path / "hf/s_0.parquet").write_bytes(data)
    with pytest.raises(ShardMismatch, match=r"^s_0.parquet is not a parquet file") as caught:
        list(load(folder, tokenizer, streaming=False))
    assert caught.value.where == f'source "hf", {folder}/s_0.parquet'


# Where tokens are from


def test_bytes_of_a_file_are_told_only_where_they_are_its_own(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "".join(TEXTS[:20])
    (tmp_path / "gz").mkdir()
    (tmp_path / "gz/z.cpp.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "zip").mkdir()
    with zipfile.ZipFile(tmp_path / "zip/a.zip", "w") as archive:
        archive.writestr("m.cpp", text)
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    line = (tmp_path / "lines/a.jsonl").stat().st_size
    for name, words in (
        ("gz", f"{len(text)} decompressed"),
        ("zip", f"{len(text)} of the document"),
        ("lines", f"{line}  doc_id"),  # of the line, which a person would find there
    ):
        inputs: list[str | os.PathLike[str]] = list((tmp_path / name).iterdir())
        prepare_dataset(inputs, tmp_path / f"{name}_made", config=ShardConfig(val_fraction=0.0))
        loader: Any = load(str(tmp_path / f"{name}_made"), tokenizer)
        for span in loader.explain(next(iter(loader))):
            assert span.file_bytes is None
            assert f" bytes 0-{words}" in str(span)
