"""Rows stay with workers, who make shards of them: the same dataset, and nothing left of the files.

Pieces of a few kilobytes are kept in files here as large ones are elsewhere.
"""

import gc
import hashlib
import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa
import pytest

from penstock.chat.render import ChatConfig
from penstock.errors import StoreFailed
from penstock.ingest.formats import Piece, ReadConfig
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import make_steps
from penstock.prepare.task import PrepareTask
from penstock.prepare.wire import Request
from penstock.produce import gather
from penstock.produce.columns import Part, batches_of
from penstock.produce.dataset import prepare_dataset
from penstock.produce.gather import (
    Gather,
    Gathered,
    KeptFile,
    Layout,
    Shelf,
    attach,
    dataset_setup,
    is_reached,
    open_task,
    pack_request,
    unpack_request,
)
from penstock.produce.verify import verify
from penstock.produce.writer import Batch, ShardConfig, ShardWriter
from penstock.store.bucket import BucketStore
from penstock.store.record import Progress
from penstock.store.store import Stored, open_store
from penstock.work.pool import LocalPool, Remote
from penstock.work.run import RunConfig

MakeSources = Callable[[int, int], dict[str, bytes]]
CONFIG: Final = ShardConfig(rows_per_file=30, val_fraction=0.2)
RUN: Final = RunConfig(workers=1, max_rejects=0.2)
READ: Final = ReadConfig(piece_bytes=4000)


@pytest.fixture(autouse=True)
def _small_pieces_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SMALL_BYTES", 1)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, sources: MakeSources) -> list[Path]:
    """A tree and lines; some documents repeat."""
    folder = tmp_path_factory.mktemp("inputs")
    files = sources(77, 60)
    names = list(files)
    for name in names[:35]:
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
    texts = [files[name].decode() for name in [*names[35:], *names[:12]]]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [folder / "tree", folder / "in.jsonl"]


def data(dataset: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(dataset)): path for path in dataset.rglob("*") if path.is_file()}
    aside = ("_log/", "_fold/", "_COMPLETE", "_events")
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(aside)}


def make(
    inputs: list[Path], dataset: Path | str, tokenizer: Path, workers: int, **more: Any
) -> None:
    steps = make_steps(
        filter=FilterConfig(preset="code"), dedup="near", chunk=ChunkConfig(max_tokens=96)
    )
    run = replace(RUN, workers=workers)
    assert prepare_dataset(
        inputs, dataset, steps, CONFIG, run, read=READ, tokenizer=tokenizer, tokens=True, **more
    ).sealed


@pytest.fixture(scope="module")
def alone(
    inputs: list[Path], tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path
) -> dict[str, bytes]:
    """What one process makes of them."""
    dataset = tmp_path_factory.mktemp("alone") / "data"
    make(inputs, dataset, tokenizer_folder, 1)
    found = data(dataset)
    assert sum(name.startswith("shard_") for name in found) >= 8
    assert b"exact_duplicate" in b"".join(found.values())
    return found


def same(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    assert sorted(found) == sorted(wanted)
    assert not [name for name in wanted if found[name] != wanted[name]]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_workers_make_the_same_dataset(
    inputs: list[Path], alone: dict[str, bytes], tmp_path: Path, tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch, where: str,
) -> None:  # fmt: skip
    """And the committing process sees none of their rows, and none of their shards."""
    kept: list[str] = []

    class Watched(Shelf):
        def __init__(self, folder: Any, max_bytes: int) -> None:
            super().__init__(folder, 0 if where == "disk" else max_bytes)

        def filled(self, file: KeptFile) -> None:
            super().filled(file)
            kept.append(os.readlink(file.name))

    def unread(self: KeptFile) -> pa.RecordBatch:
        raise RuntimeError("a row came to the committing process")

    monkeypatch.setattr(gather, "Shelf", Watched)
    monkeypatch.setattr(KeptFile, "read", unread)
    monkeypatch.setattr("penstock.produce.writer.store_shard", unread)
    gc.collect()
    gc.disable()  # rows go as soon as their shard is stored, not when somebody looks for cycles
    try:
        make(inputs, tmp_path / "data", tokenizer_folder, 2)
        left = open_files()
    finally:
        gc.enable()
    assert left == []
    same(data(tmp_path / "data"), alone)
    assert len(kept) >= 8
    in_memory = ["memfd:" in name for name in kept]
    assert all(in_memory) if where == "memory" else not any(in_memory)
    assert verify(open_store(tmp_path / "data"), full=True).faults == []


@pytest.mark.parametrize("cloud", ["moto"], indirect=True)
def test_workers_put_shards_into_a_bucket(
    inputs: list[Path], alone: dict[str, bytes], url: str, tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """They, and not the committing process; rejects and signatures are its own."""
    put: list[str] = []
    real = BucketStore.put

    def noted(self: BucketStore, name: str, write: Any) -> Stored:
        put.append(name)
        return real(self, name, write)

    monkeypatch.setattr(BucketStore, "put", noted)
    make(inputs, url, tokenizer_folder, 2)
    store = open_store(url)
    found = {name: store.read(name) for name in alone if not name.startswith(".")}
    same(found, alone)
    assert {name.partition("/")[0] for name in put} <= {
        "_rejects", "_dedup", "_features", "val_shard.parquet", "val_shard.tokens.arrow"
    }  # fmt: skip


def open_files() -> list[str]:
    """Files without names that this process has open: in memory, or made so on a disk."""
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
        if "memfd:penstock" in name or re.search(r"/pytest-.*/#\d+ \(deleted\)$", name):
            found.append(name)
    return found


def test_conversations_tell_their_lines(
    tmp_path: Path, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On which line a row stands is known to the committer alone."""
    from penstock.produce import conversations
    from penstock.produce.dataset import FollowConfig

    monkeypatch.setattr(conversations, "_CHAT_BYTES", 2000)
    lines = [
        {"messages": [{"role": "user", "content": f"{k} " * (k % 9 + 1)},
                      {"role": "assistant", "content": f"it is {k}"}]}
        for k in range(120)
    ]  # fmt: skip
    told = [json.dumps(line) for line in lines]
    told[7] = ""
    told[30] = "{"
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([*told, ""]))
    made = []
    for workers in (1, 2):
        dataset = tmp_path / str(workers)
        assert conversations.shard_conversations(
            [path], dataset, ChatConfig(), CONFIG, FollowConfig(complete=True, max_rejects=0.5),
            tokenizer=chat_folder, workers=workers,
        ).sealed  # fmt: skip
        made.append(data(dataset))
    same(made[1], made[0])


# Files for rows


def test_a_shelf_has_memory_first_and_disk_then(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 1 << 20)
    held = [shelf.new(400_000) for _ in range(3)]
    names = [os.readlink(kept.name) for kept in held if kept is not None]
    assert ["memfd:" in name for name in names] == [True, False, False]
    assert os.listdir(tmp_path) == []
    first = held[0]
    assert first is not None
    with open(first.name, "wb") as file:
        file.write(bytes(100_000))
    shelf.filled(first)  # it took less than was expected: there is room for one more
    fourth = shelf.new(300_000)
    assert fourth is not None
    assert "memfd:" in os.readlink(fourth.name)
    name = first.name
    del first, held
    assert name in {f"/proc/{os.getpid()}/fd/{number}" for number in os.listdir("/proc/self/fd")}
    again = shelf.new(400_000)
    assert again is not None
    assert again.name == name  # used again
    del again, fourth
    shelf.close()
    assert open_files() == []


def test_a_shelf_gives_back_what_took_more_than_was_thought(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, 1 << 20)
    kept = shelf.new(1000)
    assert kept is not None
    with open(kept.name, "wb") as file:
        file.write(bytes(2 << 20))
    shelf.filled(kept)
    other = shelf.new(1000)
    assert other is not None
    assert "memfd:" not in os.readlink(other.name)
    del kept, other
    assert open_files() == []


def test_small_pieces_come_back_with_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "SMALL_BYTES", 1000)
    shelf = Shelf(None, 1 << 20)
    assert shelf.new(999) is None
    assert shelf.new(1000) is not None


# Requests, and what workers do


def rows_of(texts: list[str], at: int = 0) -> pa.RecordBatch:
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    task = PrepareTask((), ReadConfig(), ["in"], None, is_plain=True)
    piece = Piece(0, "jsonl", "in", at, at + len(lines), len(lines), at=at, data=lines)
    found = task(Request(piece)).rows
    assert isinstance(found, pa.RecordBatch)
    return found


def test_a_shard_travels_as_it_is() -> None:
    one, two = rows_of(["a", "b", "c", "d"]), rows_of(["e", "f", "g"], 100)
    picks, lines = np.array([0, 3]), np.array([4, 9])
    parts = [
        Part(0, one, 1, 3),
        Part(0, one, 0, 2, picks, lines),
        Part(3, two, 0, 1),
        Part(3, KeptFile("/proc/1/fd/9"), 5, 6),
    ]
    sent = unpack_request(*pack_request(Gather(7, "shard_00007.parquet", "", parts)))
    assert isinstance(sent, Gather)
    assert (sent.number, sent.train, sent.val) == (7, "shard_00007.parquet", "")
    assert [(part.number, part.first, part.last) for part in sent.parts] == [
        (0, 1, 3), (0, 0, 2), (3, 0, 1), (3, 5, 6)
    ]  # fmt: skip
    assert sent.parts[0].rows is sent.parts[1].rows  # as one piece
    assert isinstance(sent.parts[3].rows, KeptFile)
    assert sent.parts[3].rows.name == "/proc/1/fd/9"
    for mine, theirs in zip(parts[:3], sent.parts[:3], strict=True):
        assert mine.read().equals(theirs.read())
    (batch,) = batches_of(sent.parts[:1])
    assert batch.column("text").to_pylist() == ["b", "c"]


LAYOUT: Final = Layout(
    prepare={}, tokenizer="", token_type="", seed=0, val_fraction=0.0, beside_row=0
)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LocalPool]:
    store = open_store(tmp_path / "data", make=True)
    store.epoch, store.tag = 1, "0123abcd"
    setup = {
        "steps": [], "read": ReadConfig().as_json(), "inputs": ["in"], "tokenizer": None,
        "plugins": [], "is_plain": True, **dataset_setup(LAYOUT, store),
    }  # fmt: skip
    made = LocalPool(open_task, setup, 1)
    yield made
    made.close()


def test_a_worker_killed_over_a_shard_leaves_what_its_writer_clears(
    pool: LocalPool, tmp_path: Path
) -> None:
    """The shard is made again; what the first try left is told by its name."""
    texts = [f"{k} " + os.urandom(40_000).hex() for k in range(300)]
    shard = Gather(0, "shard_00000.parquet", "", [Part(0, rows_of(texts), 0, 300)])
    folder = tmp_path / "data"
    killed = 0
    while killed < 3:
        for path in folder.glob("shard_*"):
            path.unlink()
        future = pool.submit(shard)
        while not future.done():
            if list(folder.glob(".tmp-1-0123abcd*")):
                for child in psutil.Process().children():  # servers of tests are others
                    if "penstock.work.pool" in child.cmdline():
                        child.send_signal(signal.SIGKILL)
                        child.wait()
                break
        found = future.result(timeout=60)
        assert isinstance(found, Gathered)
        (filed,) = found.files
        assert (filed.split, filed.stored.name, filed.rows) == ("train", "shard_00000.parquet", 300)
        killed += bool(list(folder.glob(".tmp-*")))
    store = open_store(folder)
    (folder / ".tmp-1-99").touch()  # of somebody else
    store.epoch, store.tag = 1, "0123abcd"
    store.clear_tagged()
    names = {path.name for path in folder.iterdir()}
    assert names == {"shard_00000.parquet", ".tmp-1-99"}


def test_rows_that_are_gone_say_so_and_those_that_cannot_be_kept_come_back(
    pool: LocalPool, tmp_path: Path
) -> None:
    gone = "/proc/self/fd/12345"
    with pytest.raises(StoreFailed, match="could not read the rows of a piece again") as caught:
        ask(pool, Gather(0, "shard_00000.parquet", "", [Part(0, KeptFile(gone), 0, 1)]))
    assert gone in caught.value.why
    assert "run the same command again" in caught.value.do
    line = b'{"text": "a"}\n'
    piece = Piece(0, "jsonl", "in", 0, len(line), len(line), data=line)
    assert len(ask(pool, Request(piece, None, gone)).rows) == 1, "they come back"
    with open(tmp_path / "named", "wb") as other:
        named = f"/proc/{os.getpid()}/fd/{other.fileno()}"
        assert len(ask(pool, Request(piece, None, named)).rows) == 1
        with pytest.raises(StoreFailed, match="could not read the rows of a piece again"):
            ask(pool, Gather(0, "shard_00000.parquet", "", [Part(0, KeptFile(named), 0, 1)]))
    assert (tmp_path / "named").read_bytes() == b"", "a file that has a name is another one"


def ask(pool: LocalPool, request: Request | Gather) -> Any:
    return pool.submit(request).result(timeout=60)


def test_a_directory_is_the_datasets_or_another(tmp_path: Path) -> None:
    """Of a machine that has another one, or none, under its path, the files come back."""
    name = "_log/00000000000000000000.json"
    store = open_store(tmp_path / "data", make=True)
    store.create(name, b"first")
    about = dataset_setup(LAYOUT, store, record=name)["dataset"]
    assert is_reached(about["url"], about["proof"])
    assert is_reached("s3://anywhere", None)
    assert not is_reached(str(tmp_path / "other"), about["proof"])
    other = open_store(tmp_path / "other", make=True)
    other.create(name, b"of another writer")
    assert not is_reached(str(tmp_path / "other"), about["proof"])
    setup = {"steps": [], "read": ReadConfig().as_json(), "inputs": ["in"], "tokenizer": None,
             "plugins": [], "is_plain": True}  # fmt: skip
    shard = Gather(0, "shard_00000.parquet", "", [Part(0, rows_of(["a", "b"]), 0, 2)])
    stored, kept = open_task({**setup, "dataset": about})(shard)
    assert isinstance(stored, Gathered)
    assert kept is None
    assert stored.files[0].stored.sha256
    made = (tmp_path / "data" / "shard_00000.parquet").read_bytes()
    for far in ({**about, "url": str(tmp_path / "other")}, {**about, "url": "/nowhere"}):
        handed, kept = open_task({**setup, "dataset": far})(shard)
        assert isinstance(handed, Gathered)
        attach(handed, Remote(kept, lambda held: held))
        assert [bytes(view) for view in handed.contents()] == [made]
    handed, kept = open_task({**setup, "dataset": about})(replace(shard, is_handed_over=True))
    assert bytes(kept) == made
    assert not list((tmp_path / "other").glob("shard_*"))


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_shard_that_is_not_where_it_was_stored_comes_back(tmp_path: Path, is_lost: bool) -> None:
    """A mirror on another machine has the same records: what is stored there is not here."""
    config = replace(CONFIG, val_fraction=0)
    writer = ShardWriter(open_store(tmp_path / "data", make=True), config, ["in"])
    asked: list[bool] = []

    def gather_shard(shard: Gather) -> "Future[Gathered]":
        asked.append(shard.is_handed_over)
        done: Future[Gathered] = Future()
        held = io.BytesIO()
        files = gather.store_shard(shard, writer.layout, lambda name, write: put(held, name, write))
        found = Gathered(files)
        if shard.is_handed_over:
            found.data = Remote(held.getvalue(), lambda data: data)
        elif not is_lost:
            (tmp_path / "data" / files[0].stored.name).write_bytes(held.getvalue())
        done.set_result(found)
        return done

    def put(held: io.BytesIO, name: str, write: Any) -> Stored:
        write(held)
        return Stored(name, hashlib.sha256(held.getvalue()).hexdigest(), len(held.getvalue()))

    writer.begin(gather_shard)
    batch = Batch()
    batch.rows.add(rows_of(["a", "b", "c"]), 3, 3, 30)
    batch.progress.append(Progress(input="in", start=0, to=9, read=3, kept=3, dropped={}))
    writer.submit(batch)
    list(writer.commit(0))
    writer.close()
    assert asked == ([False, True] if is_lost else [False])
    (file,) = writer.state.split("train")
    data = (tmp_path / "data" / file.name).read_bytes()
    assert (file.rows, hashlib.sha256(data).hexdigest()) == (3, file.sha256)
