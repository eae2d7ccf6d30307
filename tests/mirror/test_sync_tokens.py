"""Token files move with their shards, or alone: `pull --only tokens` and what becomes of it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import BadConfig, StateMismatch
from penstock.mirror.config import SyncConfig
from penstock.mirror.disk_limit import DiskLimit, write_position
from penstock.mirror.push_pull import pull, push
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.local import LocalStore
from penstock.store.log import Log
from penstock.store.record import ONLY, Add, Split, record_name
from penstock.tokenize.tokenizer import Tokenizer

from .test_sync import Producer, contents, make_dataset
from .test_sync_prefix import interrupted

ONLY_TOKENS = SyncConfig(only="tokens")
Move = Callable[..., Any]
both = pytest.mark.parametrize("move", [push, pull])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A sealed dataset of several shards, with token files, rejects and validation rows."""
    folder = tmp_path_factory.mktemp("tokens")
    lines = [f'{{"text": "document {k} of some"}}\n' for k in range(200)]
    lines[7] = "no JSON\n"
    (folder / "in.jsonl").write_text("".join(lines))
    shard_jsonl(
        [folder / "in.jsonl"], folder / "live", ShardConfig(rows_per_file=40, val_fraction=0.2),
        FollowConfig(complete=True), tokenizer=Tokenizer.load(tokenizer_folder), tokens=True,
    )  # fmt: skip
    return folder / "live"


def data_names(folder: Path) -> set[str]:
    """All files but those that push and pull bring in any case."""
    apart = ("_log/", "_fold/", "_COMPLETE", ONLY)
    return {name for name in contents(folder) if not name.startswith(apart)}


def token_names(dataset: Path) -> set[str]:
    return {file.name for file in Log.open(dataset).state.split("tokens")}


@both
def test_there_and_cut_anywhere(tmp_path: Path, live: Path, move: Move) -> None:
    """The seal merged the parts of the validation rows and their tokens: both are told."""
    last = Log.open(live).state.n
    assert any(
        name.startswith("_val/") and "tokens" in name for name in Log.open(live).state.retired
    )
    for n in range(last + 1):
        there = tmp_path / str(n)
        interrupted(move, live, there, n)
        verdict = verify(LocalStore(there), full=True)
        if n < last:
            assert verdict.faults == []
            assert {name for name in verdict.state.files if name.startswith("_val/")} == set(
                verdict.coming
            )
        assert move(live, there).sealed
        assert contents(there) == contents(live)
    (there / "shard_00001.tokens.arrow").unlink()
    assert [f.what for f in verify(LocalStore(there)).faults] == [
        "shard_00001.tokens.arrow is missing"
    ]
    move(live, there)
    assert contents(there) == contents(live)


def test_only_tokens(tmp_path: Path, live: Path) -> None:
    bucket, there = tmp_path / "bucket", tmp_path / "there"
    push(live, bucket)
    moved = pull(bucket, there, ONLY_TOKENS)
    assert moved.sealed
    tokens = Log.open(live).state.split("tokens")
    assert (moved.files, moved.bytes) == (len(tokens), sum(file.bytes for file in tokens))
    assert data_names(there) == token_names(live)
    assert Log.open(there).state.head == Log.open(live).state.head
    verdict = verify(LocalStore(there), full=True)
    assert verdict.faults == []
    assert set(verdict.left_out) == set(Log.open(live).state.files) - token_names(live)
    again = pull(bucket, there, ONLY_TOKENS)
    assert (again.records, again.files) == (0, 0)
    # a mirror of the mirror
    pull(there, tmp_path / "third", ONLY_TOKENS)
    assert contents(tmp_path / "third") == contents(there)


def test_a_mirror_of_tokens_is_completed(tmp_path: Path, live: Path) -> None:
    pull(live, tmp_path, ONLY_TOKENS)
    pull(live, tmp_path)
    assert contents(tmp_path) == contents(live)
    verdict = verify(LocalStore(tmp_path), full=True)
    assert (verdict.faults, verdict.left_out) == ([], [])


def test_a_mirror_of_tokens_cut_anywhere(tmp_path: Path, live: Path) -> None:
    def only(source: Path, target: Path) -> Any:
        return pull(source, target, ONLY_TOKENS)

    last = Log.open(live).state.n
    for n in range(last + 1):
        there, whole = tmp_path / str(n), tmp_path / f"whole{n}"
        interrupted(only, live, there, n)
        verdict = verify(LocalStore(there), full=True)
        if n < last:
            assert verdict.faults == []
            assert data_names(there) >= token_names(there) - set(verdict.coming)
            assert not any(name.endswith((".parquet", ".jsonl")) for name in data_names(there))
        shutil.copytree(there, whole)
        only(live, there)
        assert data_names(there) == token_names(live)
        pull(live, whole)
        assert contents(whole) == contents(live)


def test_a_mirror_of_tokens_has_faults_too(tmp_path: Path, live: Path) -> None:
    pull(live, tmp_path, ONLY_TOKENS)
    name = "shard_00001.tokens.arrow"
    (tmp_path / name).unlink()
    assert [fault.what for fault in verify(LocalStore(tmp_path)).faults] == [f"{name} is missing"]
    pull(live, tmp_path, ONLY_TOKENS)
    (tmp_path / "shard_00001.parquet").write_bytes(b"not a shard")
    found = verify(LocalStore(tmp_path)).faults
    assert [fault.what for fault in found] == ["shard_00001.parquet has the wrong size"]
    (tmp_path / "shard_00001.parquet").unlink()
    (tmp_path / ONLY).write_bytes((tmp_path / ONLY).read_bytes().replace(b"tokens", b"rejects"))
    assert len(verify(LocalStore(tmp_path)).faults) == len(
        set(Log.open(live).state.files) - token_names(live)
    )


@both
def test_all_of_a_dataset_does_not_come_from_a_part(tmp_path: Path, live: Path, move: Move) -> None:
    pull(live, tmp_path / "part", ONLY_TOKENS)
    with pytest.raises(StateMismatch, match="holds the tokens of a dataset alone") as caught:
        move(tmp_path / "part", tmp_path / "there")
    assert "penstock pull --only tokens" in caught.value.why
    assert "complete it first" in caught.value.do
    assert not (tmp_path / "there" / record_name(0)).exists()


def test_a_mirror_of_everything_does_not_become_a_part(tmp_path: Path, live: Path) -> None:
    pull(live, tmp_path)
    with pytest.raises(StateMismatch, match="is filled with everything"):
        pull(live, tmp_path, ONLY_TOKENS)
    assert contents(tmp_path) == contents(live)


def test_only_tokens_of_a_dataset_without_any(tmp_path: Path) -> None:
    plain = make_dataset(tmp_path)
    with pytest.raises(BadConfig, match="has no token files") as caught:
        pull(plain, tmp_path / "there", ONLY_TOKENS)
    assert caught.value.why == "it was made without --tokens"
    assert "penstock tokenize" in caught.value.do
    assert contents(tmp_path / "there") == {}
    producer = Producer(tmp_path / "old", {"token_type": "uint16"})  # tokens in a column, once
    producer.add()
    with pytest.raises(BadConfig, match="has no token files") as caught:
        pull(tmp_path / "old", tmp_path / "there", ONLY_TOKENS)
    assert caught.value.why == "shard_00000.parquet has none"
    (tmp_path / "files").mkdir()
    shutil.copy(plain / "shard_00000.parquet", tmp_path / "files" / "a.parquet")
    with pytest.raises(BadConfig, match="only is for datasets with a log"):
        pull(tmp_path / "files", tmp_path / "there", ONLY_TOKENS)


def test_only_what_is_known(tmp_path: Path, live: Path) -> None:
    with pytest.raises(BadConfig, match="only is 'text'") as caught:
        SyncConfig(only="text")
    assert "tokens" in caught.value.why
    with pytest.raises(BadConfig, match="only is for pull"):
        push(live, tmp_path, ONLY_TOKENS)


def test_a_shard_and_its_tokens_make_room_together(tmp_path: Path) -> None:
    """Where one of them would be enough, too: one alone is of no use to anybody."""
    store = LocalStore(tmp_path, make=True)
    room = DiskLimit(store, 400)

    def file(number: int, split: Split) -> Add:
        name = {"train": "parquet", "tokens": "tokens.arrow"}[split]
        return Add(f"shard_{number:05d}.{name}", "ab", 100, 1, 7, split)

    def come(number: int, split: Split) -> bool | None:
        one = file(number, split)
        room.know(one)
        if answer := room.admit(one):
            store.create(one.name, bytes(100))
        return answer

    for number in range(2):
        assert come(number, "train")
        assert come(number, "tokens")
    assert come(2, "train") is None
    write_position(tmp_path, "trainer", 1)
    assert come(2, "train")
    assert sorted(path.name for path in tmp_path.glob("shard_*")) == [
        "shard_00001.parquet",
        "shard_00001.tokens.arrow",
        "shard_00002.parquet",
    ]
    assert come(2, "tokens")
    write_position(tmp_path, "trainer", 9)
    assert come(3, "tokens") is True  # it is not known to be of a shard that was passed
    assert come(0, "tokens") is False


def test_within_a_limit_of_bytes(tmp_path: Path, live: Path) -> None:
    """Only token files count, and they go as their readers pass the shards."""
    sizes = [file.bytes for file in Log.open(live).state.split("tokens")]
    write_position(tmp_path, "trainer", 2)
    config = SyncConfig(only="tokens", max_disk_bytes=sum(sizes))
    pull(live, tmp_path, config)
    held = data_names(tmp_path) - {"_position/trainer.json"}
    assert held == token_names(live) - {"shard_00000.tokens.arrow", "shard_00001.tokens.arrow"}
