"""What stands in the way of a pull: links, folders and pipes where its files go."""

import os
from pathlib import Path

import pytest

from penstock.errors import BadConfig, PenstockError, StoreFailed
from penstock.mirror.config import SyncConfig
from penstock.mirror.push_pull import pull, push
from penstock.mirror.transfer import PARTS, part_name
from penstock.store.local import LocalStore
from penstock.store.log import Log
from penstock.store.record import record_name
from penstock.store.store import AlreadyThere

from .test_sync import Producer, contents, table

KINDS = ["link", "dangling", "folder", "pipe"]


def stand(path: Path, kind: str) -> None:
    """Put something that is no file under a name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.with_name("victim").write_bytes(b"of the user")
        path.symlink_to(path.with_name("victim"))
    elif kind == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.fixture
def live(tmp_path: Path) -> Path:
    producer = Producer(tmp_path / "live")
    for _ in range(3):
        producer.add()
    producer.seal()
    return tmp_path / "live"


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_under_a_shards_name(tmp_path: Path, live: Path, kind: str) -> None:
    back = tmp_path / "back"
    stand(back / "shard_00001.parquet", kind)
    with pytest.raises(PenstockError, match=r"shard_00001\.parquet"):
        pull(live, back)
    assert "shard_00001.parquet" not in Log(LocalStore(back)).state.files
    assert not (back / record_name(2)).exists()
    (os.rmdir if kind == "folder" else os.unlink)(back / "shard_00001.parquet")
    assert pull(live, back).sealed
    made, found = (folder / "shard_00001.parquet" for folder in (live, back))
    assert found.read_bytes() == made.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_in_place_of_a_shard_that_was_there(
    tmp_path: Path, live: Path, kind: str
) -> None:
    back = tmp_path / "back"
    pull(live, back)
    (back / "shard_00001.parquet").unlink()
    stand(back / "shard_00001.parquet", kind)
    with pytest.raises(PenstockError, match=r"shard_00001\.parquet"):
        pull(live, back)


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_under_a_plain_files_name(tmp_path: Path, kind: str) -> None:
    plain, back = tmp_path / "plain", tmp_path / "back"
    plain.mkdir()
    table(plain / "a.parquet", 3)
    (plain / "_COMPLETE").touch()
    stand(back / "a.parquet", kind)
    with pytest.raises(PenstockError, match=r"a\.parquet"):
        pull(plain, back)
    assert not (back / "_COMPLETE").exists()


@pytest.mark.parametrize("name", ["my file.parquet", "link.parquet"])
def test_a_plain_file_that_cannot_be_moved_is_not_left_out_by_a_pull(
    tmp_path: Path, name: str
) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    table(plain / "a.parquet", 3)
    if name.startswith("link"):
        (plain / name).symlink_to(plain / "a.parquet")
    else:
        table(plain / name, 3)
    (plain / "_COMPLETE").touch()
    with pytest.raises(BadConfig, match="cannot be moved"):
        pull(plain, tmp_path / "back")
    assert not (tmp_path / "back" / "_COMPLETE").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_under_the_name_of_the_end(tmp_path: Path, kind: str) -> None:
    """A marker that is no file is not waited for."""
    plain = tmp_path / "plain"
    plain.mkdir()
    table(plain / "a.parquet", 3)
    stand(plain / "_COMPLETE", kind)
    with pytest.raises(PenstockError, match=r"^(could not open _COMPL|_COMPLETE is a symb)"):
        push(plain, tmp_path / "there", SyncConfig(stall_s=1))


def test_parts_that_are_a_link_are_refused(tmp_path: Path, live: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    (home / ("0" * 64)).write_text("named like a part")
    before = contents(home)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / PARTS).symlink_to(home)
    with pytest.raises(PenstockError, match=r"\.parts is a symbolic link"):
        pull(live, tmp_path / "back")
    assert contents(home) == before


def test_parts_hold_what_is_not_of_a_pull(tmp_path: Path, live: Path) -> None:
    """Only what is named like a part is removed at the end."""
    parts = tmp_path / "back" / PARTS
    (parts / ("1" * 64)).mkdir(parents=True)
    (parts / "folder").mkdir()
    (parts / "notes.txt").write_text("of the user")
    (parts / ("0" * 64)).write_text("of a file that was merged away")
    assert pull(live, tmp_path / "back").sealed
    assert sorted(path.name for path in parts.iterdir()) == ["1" * 64, "folder", "notes.txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_something_else_under_the_name_of_a_part(tmp_path: Path, live: Path, kind: str) -> None:
    file = Log.open(live).state.files["shard_00001.parquet"]
    stand(tmp_path / "back" / PARTS / part_name(file), kind)
    with pytest.raises(PenstockError, match=r"shard_00001\.parquet"):
        pull(live, tmp_path / "back")
    assert not (tmp_path / "back" / "shard_00001.parquet").exists()


def test_a_name_that_is_taken_is_not_adopted_in_silence(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "set", make=True)
    store.create("x.parquet", b"one")
    (tmp_path / "part").write_bytes(b"two")
    with pytest.raises(AlreadyThere):
        store.adopt(tmp_path / "part", "x.parquet")
    assert store.read("x.parquet") == b"one"
    assert (tmp_path / "part").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_has_no_size(tmp_path: Path, kind: str) -> None:
    store = LocalStore(tmp_path / "set", make=True)
    stand(store.root / "x.parquet", kind)
    with pytest.raises(PenstockError, match=r"x\.parquet"):
        store.size("x.parquet")
    assert store.size("y.parquet") is None


def test_a_linked_folder_is_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "set", make=True)
    (tmp_path / "other").mkdir()
    (store.root / "_val").symlink_to(tmp_path / "other")
    with pytest.raises(PenstockError, match="_val is a symbolic link"):
        store.names("_val")
    (tmp_path / "set" / "_log").write_bytes(b"a file")
    with pytest.raises(StoreFailed):
        store.create(record_name(0), b"{}")
