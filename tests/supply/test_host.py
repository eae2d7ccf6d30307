"""What the processes of a host share: a directory that comes and goes, and a limit of memory."""

import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from penstock import LoaderRun, PretrainDataLoader
from penstock.disk import make_own_folder
from penstock.supply import host, ranks, run_folder
from penstock.supply.host import HostCache, share_of_memory
from penstock.supply.ranks import VARIABLES

from .datasets import made_dataset

BIG: Final = bytes(range(256)) * 8192


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A host on which nothing else runs."""
    folder = tmp_path / "tmp"
    folder.mkdir(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for name in (*ranks.LOCAL_SIZES, *(name for name, _ in VARIABLES)):
        monkeypatch.delenv(name, raising=False)
    joined: dict[str, int] = {}
    monkeypatch.setattr(run_folder, "_joined", joined)
    for name in ("_holders", "_ranks"):
        monkeypatch.setattr(host, name, {})
    monkeypatch.setattr(host, "_told", set())
    yield folder
    for path in list(joined):
        run_folder.leave_folder(path)


def runs(place: Path) -> list[Path]:
    """The folders of runs."""
    home = place / f"penstock-{os.geteuid()}"
    return sorted(home.iterdir()) if home.exists() else []


def cache(max_bytes: int = 1 << 30, memory_bytes: int = 1 << 30) -> HostCache:
    return HostCache(max_bytes, memory_bytes)


def test_the_directory_comes_with_the_first_value_and_goes_with_the_last_cache(place: Path) -> None:
    first, second = cache(), cache()
    assert runs(place) == []
    held = first.fetch("key", lambda: BIG)
    assert second.fetch("key", bytes) == BIG
    (folder,) = runs(place)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "shards").stat().st_mode & 0o777 == 0o700
    del first
    assert runs(place) == [folder]
    del second
    assert runs(place) == []
    assert held == BIG, "what is mapped can be read as long as somebody has it"


def test_a_folder_that_another_run_removes_while_it_is_made_is_made_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(path: str, mode: int) -> None:
        made.append(path)
        if len(made) in (2, 3):  # the folder of the run, just made and still without `alive`
            os.mkdir(path, mode)
            os.rmdir(path)
            os.lstat(path)
        make_own_folder(path, mode)

    monkeypatch.setattr("penstock.supply.run_folder.make_own_folder", make)
    folder = Path(run_folder.join_folder("run", str(place)))
    assert (folder / "alive").exists()
    assert len(made) == 4


def test_a_copy_in_another_process_uses_the_same_directory(place: Path) -> None:
    mine = cache()
    mine.put("key", b"value")
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).get('key'))"
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(mine).hex()], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("b'value'\n", "")
    assert len(runs(place)) == 1, "the other process was not the last"


def test_half_of_what_is_free_is_the_most(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = os.statvfs(place)
    monkeypatch.setattr(host, "_is_memory", lambda _: False)
    small = os.statvfs_result((*about[:1], 1000, 0, 0, 30, *about[5:]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda _: small)
        mine = cache()
        mine.put("large", bytes(16_000))
        assert mine.get("large") is None
        mine.put("small", bytes(14_000))
        assert mine.get("small") is not None
    other = cache()
    other.put("large", bytes(16_000))
    assert other.get("large") is None, "the first process of a run has decided"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no memory as a folder")
def test_a_directory_in_memory_takes_no_more_than_memory_may(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host._is_memory("/dev/shm")
    assert not host._is_memory("/proc")
    monkeypatch.setattr(host, "_is_memory", lambda _: True)
    mine = cache(memory_bytes=10_000)
    mine.put("large", bytes(11_000))
    mine.put("small", bytes(9_000))
    assert mine.get("large") is None
    assert mine.get("small") is not None


def test_without_a_safe_place_each_process_makes_its_own(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place.chmod(0o777)
    for _ in range(2):
        mine = cache()
        assert mine.fetch("key", lambda: b"value") == b"value"
        assert mine.fetch("key", lambda: b"other") == b"other"
        mine.put("key", b"value")
        mine.plan("me", ["key"])
        mine.drop("key")
        assert mine.get("key") is mine.map("key") is None
    (told,) = [record for record in caplog.records if record.name == "penstock.supply.host"]
    assert told.levelno == logging.WARNING
    assert "a shard cannot be shared" in told.message
    assert "is others' too): each process reads, tokenises and holds its own" in told.message
    assert "TMPDIR or LoaderRun(cache_dir=…) names another directory" in told.message


def test_what_has_no_room_is_told_once(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = cache(max_bytes=len(BIG) // 2)
    for _ in range(2):
        assert mine.fetch("key", lambda: BIG) == BIG
    (told,) = [record for record in caplog.records if record.name == "penstock.supply.host"]
    assert "there is no room for it, or its disk is full" in told.message
    assert "cache_gb its limit" in told.message


def test_a_loader_of_token_files_on_this_host_needs_no_directory(
    tmp_path: Path, place: Path
) -> None:
    made_dataset(tmp_path / "d", shards=3)
    with PretrainDataLoader(str(tmp_path / "d"), None, 64) as loader:
        assert list(loader)
        assert runs(place) == []


def test_a_process_alone_maps_what_it_makes(tmp_path: Path, place: Path) -> None:
    """One that holds nothing of its own is bound by a disk, not by memory."""
    made_dataset(tmp_path / "d", shards=3, rows=20_000, column=True, seed=1)
    loader = PretrainDataLoader(str(tmp_path / "d"), None, 64)
    for _ in loader:
        pass
    assert loader._engine.window.peak_bytes == 0
    assert len(list(place.glob("*/*/shards/??/*"))) == 3
    loader.close()


# Memory.


def test_one_rank_has_all_of_the_memory() -> None:
    assert share_of_memory(1000, 0, 1, None)() == 1000


@pytest.mark.parametrize("name", ranks.LOCAL_SIZES)
def test_launchers_say_how_many_ranks_share_a_host(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "4")
    assert share_of_memory(1000, 0, 16, None)() == 250
    assert share_of_memory(1000, 0, 2, None)() == 500, "no more than there are"
    assert share_of_memory(1000, 0, 1, None)() == 1000
    assert LoaderRun(rank=0, world_size=8, max_memory_gb=2).memory()() == 500_000_000


RANK: Final = """
import sys
from penstock.supply.host import share_of_memory
share = share_of_memory(1200, int(sys.argv[1]), 4, None)
print("joined", flush=True)
for line in sys.stdin:
    print(share(), flush=True)
"""


def ask(rank: "subprocess.Popen[str]") -> int:
    assert rank.stdin is not None
    assert rank.stdout is not None
    rank.stdin.write("\n")
    rank.stdin.flush()
    return int(rank.stdout.readline())


def test_ranks_that_are_told_by_arguments_alone_count_those_that_live() -> None:
    """Two processes of one rank, such as workers of a DataLoader, are one."""
    ranks: list[subprocess.Popen[str]] = []
    start: Callable[[int], None] = lambda rank: ranks.append(  # noqa: E731
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    try:
        for number, expected in ((0, 1200), (1, 600), (1, 600), (2, 400)):
            start(number)
            assert ranks[-1].stdout is not None
            assert ranks[-1].stdout.readline() == "joined\n"
            assert {ask(rank) for rank in ranks} == {expected}
        ranks[-1].kill()
        ranks.pop().communicate(timeout=30)
        assert {ask(rank) for rank in ranks} == {600}
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=30)


def test_where_ranks_cannot_be_counted_all_are_on_this_host(place: Path) -> None:
    place.chmod(0o777)
    assert share_of_memory(1200, 0, 4, None)() == 300
