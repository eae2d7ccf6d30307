"""`penstock tokenize`: the same text with tokens of any tokenizer, beside the dataset."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from penstock.cli import app
from penstock.errors import BadConfig, BadDocument, NoDataset, ShardMismatch
from penstock.mirror.config import SyncConfig
from penstock.mirror.push_pull import pull
from penstock.prepare.chunk import ChunkConfig
from penstock.produce import tokenize as module
from penstock.produce.dataset import FollowConfig, prepare_dataset, shard_jsonl
from penstock.produce.tokenize import tokenize_dataset
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.local import LocalStore
from penstock.store.log import Log, LogWriter
from penstock.store.record import Beat, Progress
from penstock.store.store import open_store
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Event, Events
from penstock.work.run import RunConfig
from store.dataset_rows import read_rows


class Letters:
    """A tokenizer of bytes."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


class Wide(Letters):
    vocab_size = 1 << 17

    def encode(self, text: str) -> list[int]:
        return [byte + 70_000 for byte in text.encode()]


def make(folder: Path, **options: Any) -> Path:
    """A sealed dataset with some of everything."""
    lines = [f'{{"text": "document {k} of some, é"}}\n' for k in range(120)]
    lines[3] = "no JSON\n"
    folder.mkdir()
    (folder / "in.jsonl").write_text("".join(lines))
    config = ShardConfig(rows_per_file=25, val_fraction=0.2)
    follow = FollowConfig(complete=True, threads=1)
    shard_jsonl([folder / "in.jsonl"], folder / "data", config, follow, **options)
    return folder / "data"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("plain") / "made")


@pytest.fixture
def dataset(plain: Path, tmp_path: Path) -> Path:
    shutil.copytree(plain, tmp_path / "data")
    return tmp_path / "data"


def contents(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path.read_bytes() for path in found}
    return {name: data for name, data in names.items() if not name.startswith("_gen/")}


def data(folder: Path) -> dict[str, bytes]:
    return {name: raw for name, raw in contents(folder).items() if name[:5] in ("shard", "val_s")}


def check(dataset: Path, generation: Path, encode: Callable[[str], list[int]]) -> None:
    assert verify(open_store(generation), full=True).faults == []
    source, state = Log.open(dataset).state, Log.open(generation).state
    assert state.sealed is not None
    assert source.sealed is not None
    assert state.sealed.rows == source.sealed.rows
    for split in ("train", "val"):
        assert [f.sha256 for f in state.split(split)] == [f.sha256 for f in source.split(split)]
        for row in read_rows(generation, split):
            assert row["tokens"] == encode(row["text"])


@pytest.mark.parametrize(
    ("tokenizer", "kind"), [(Letters(), "uint16"), (Wide(), "uint32")], ids=["letters", "wide"]
)
def test_a_generation_with_the_same_text(dataset: Path, tokenizer: Letters, kind: str) -> None:
    before = contents(dataset)
    outcome = tokenize_dataset(dataset, tokenizer)
    second = dataset / "_gen" / "00002"
    assert (outcome.sealed, outcome.url) == (True, str(second))
    check(dataset, second, tokenizer.encode)
    assert contents(dataset) == before
    assert verify(open_store(dataset), full=True).faults == []
    source = Log.open(dataset).state
    opened = outcome.state.opened
    assert opened is not None
    assert source.opened is not None
    assert opened.config == {
        **source.opened.config,
        "tokenizer": Tokenizer.load(tokenizer).fingerprint,
        "token_type": kind,
        "text_of": source.dataset,
    }
    for file in source.split("train"):
        assert os.path.samefile(dataset / file.name, second / file.name)
        assert outcome.state.files[file.name].tokens is None  # nobody counted them there


def test_a_finished_one_is_left_as_it_is(dataset: Path) -> None:
    tokenize_dataset(dataset, Letters())
    second = dataset / "_gen" / "00002"
    before = contents(second)
    told: list[Event] = []
    events = Events("tokenize")
    events.listen(told.append)
    assert tokenize_dataset(dataset, Letters(), events=events).url == str(second)
    assert [event["message"] for event in told] == [
        f"{second} has the tokens of this tokenizer already: nothing is done"
    ]
    assert contents(second) == before
    third = tokenize_dataset(dataset, Wide())
    assert third.url == str(dataset / "_gen" / "00003")
    assert tokenize_dataset(dataset, Letters()).url == str(second)
    # of the generation itself: beside the others
    assert tokenize_dataset(second, Letters()).url == str(second)
    fourth = tokenize_dataset(second, Wide())
    assert fourth.url == str(dataset / "_gen" / "00004")
    check(dataset, Path(fourth.url), Wide().encode)


def test_a_dataset_that_has_tokens_gets_others(tmp_path: Path) -> None:
    dataset = make(tmp_path / "made", tokenizer=Tokenizer.load(Letters()), tokens=True)
    assert tokenize_dataset(dataset, Letters()).url == str(dataset)
    assert not (dataset / "_gen").exists()
    other = tokenize_dataset(dataset, Wide())
    check(dataset, Path(other.url), Wide().encode)
    (shard, *_) = other.state.split("train")
    # counts in the parquet file are those of the first tokenizer
    counts = pq.read_table(Path(other.url) / shard.name)["n_tokens"].to_pylist()
    assert shard.tokens == sum(counts)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("threads", [1, 2])
def test_killed_anywhere_it_resumes(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """At each commit and after each file; what is made is the same to the byte."""
    shutil.copytree(plain, tmp_path / "whole")
    whole = data(Path(tokenize_dataset(tmp_path / "whole", Letters()).url))
    assert len(whole) == 2 * len(data(plain))
    honest = {name: getattr(LocalStore, name) for name in ("create", "put", "link")}
    for point in range(1, 60):
        dataset = tmp_path / f"killed{point}"
        shutil.copytree(plain, dataset)
        calls = 0

        def counted(name: str, point: int = point) -> Any:
            def call(self: LocalStore, *arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == point and "_gen" in self.url:
                    raise Killed
                return honest[name](self, *arguments)

            return call

        with monkeypatch.context() as patch:
            for name in honest:
                patch.setattr(LocalStore, name, counted(name))
            try:
                tokenize_dataset(dataset, Letters(), threads=threads)
            except Killed:
                pass
            else:
                break
        outcome = tokenize_dataset(dataset, Letters(), threads=threads)
        assert outcome.sealed
        assert data(Path(outcome.url)) == whole
        check(dataset, Path(outcome.url), Letters().encode)
        shutil.rmtree(dataset)
    assert point > 15


def test_names_that_are_taken(dataset: Path) -> None:
    second = dataset / "_gen" / "00002"
    second.mkdir(parents=True)
    names = ["shard_00000.parquet", "shard_00000.tokens.arrow"]
    for name in names:
        (second / name).write_bytes(b"not ours")
    shutil.copy(dataset / "shard_00001.parquet", second / "shard_00001.parquet")
    tokenize_dataset(dataset, Letters())
    check(dataset, second, Letters().encode)
    assert [(second / name).read_bytes() for name in names] == [b"not ours"] * 2


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK])
def test_copies_where_there_can_be_no_links(
    dataset: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.link

    def link(source: Any, target: Any, **options: Any) -> None:
        if ".tmp-" not in str(source):
            raise OSError(number, os.strerror(number))
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    second = Path(tokenize_dataset(dataset, Letters()).url)
    check(dataset, second, Letters().encode)
    assert not os.path.samefile(dataset / "shard_00000.parquet", second / "shard_00000.parquet")


def test_text_that_is_not_what_was_written(dataset: Path) -> None:
    path = dataset / "shard_00001.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ShardMismatch, match=r"shard_00001\.parquet is not what was written"):
        tokenize_dataset(dataset, Letters())
    state = Log.open(dataset / "_gen" / "00002").state
    assert [file.name for file in state.split("train")] == ["shard_00000.parquet"]
    path.unlink()
    with pytest.raises(ShardMismatch) as caught:
        tokenize_dataset(dataset, Letters())
    assert caught.value.why == "it is missing"


def test_what_is_refused(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(NoDataset):
        tokenize_dataset(tmp_path / "nothing", Letters())
    LogWriter.take(open_store(tmp_path / "live", make=True), {}, ["in"], writer="test")
    with pytest.raises(BadConfig, match="is not sealed") as caught:
        tokenize_dataset(tmp_path / "live", Letters())
    assert "wait until its producer has sealed it" in caught.value.do
    with pytest.raises(BadConfig, match="--threads is 0"):
        tokenize_dataset(dataset, Letters(), threads=0)
    second = tokenize_dataset(dataset, Letters()).url
    pull(second, tmp_path / "part", SyncConfig(only="tokens"))
    with pytest.raises(BadConfig, match="has no text"):
        tokenize_dataset(tmp_path / "part", Wide())


def test_a_document_that_cannot_be_encoded_is_named(dataset: Path) -> None:
    class Picky(Letters):
        def encode(self, text: str) -> list[int]:
            if "document 60 " in text:
                raise ValueError("no")
            return super().encode(text)

    with pytest.raises(BadDocument) as caught:
        tokenize_dataset(dataset, Picky())
    name, _, row = caught.value.where.rpartition(", row ")
    assert "document 60 " in pq.read_table(name)["text"][int(row)].as_py()


def test_one_record_for_each_shard_and_signs_of_life(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.0)
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    log = Log.open(tokenize_dataset(dataset, Letters()).url)
    records = [log.record(n) for n in range(log.state.n + 1)]
    beats = [record for record in records if isinstance(record.ops[-1], Beat)]
    shards = len(log.state.split("train"))
    assert len(records) - len(beats) == 1 + shards + 1
    assert beats
    progress = [op for record in records for op in record.ops if isinstance(op, Progress)]
    assert [(op.start, op.to) for op in progress] == [(k, k + 1) for k in range(shards + 1)]


def test_chunks_are_made_anew_beside_it(
    tmp_path: Path, tokenizer_folder: Path, sources: Callable[[int, int], dict[str, bytes]]
) -> None:
    """A generation of tokens is none that `penstock chunk` goes on with, or takes for its last."""
    for name, raw in sources(5, 30).items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)

    def chunk(most: int) -> str:
        steps = [ChunkConfig(max_tokens=most)]
        config, run = ShardConfig(rows_per_file=40, val_fraction=0.2), RunConfig(workers=1)
        return prepare_dataset(
            [tmp_path / "tree"], tmp_path / "data", steps, config, run, tokenizer=tokenizer_folder
        ).url

    first = chunk(96)
    second = Path(tokenize_dataset(first, Letters()).url)
    check(Path(first), second, Letters().encode)
    assert chunk(96) == first
    assert chunk(64) == str(tmp_path / "data" / "_gen" / "00003")
    assert Path(tokenize_dataset(first, Letters()).url) == second


def test_the_command(
    dataset: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tokenize", str(dataset), "--tokenizer", str(tokenizer_folder)]
    app(command, standalone_mode=False)
    count = len(Log.open(dataset).state.split("train"))
    assert f"_gen/00002: sealed, {count} shards, " in capsys.readouterr().out
    app(command, standalone_mode=False)
    assert "nothing is done" in capsys.readouterr().err
