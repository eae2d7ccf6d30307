"""A token file is hashed once for each run on a host, before its first token is used."""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import PretrainDataLoader
from penstock.errors import ShardMismatch
from penstock.supply import run_folder, verified
from penstock.supply.ranks import VARIABLES

from .datasets import made_dataset

SHARDS = 5

RANK = """
import hashlib, json, sys, types
import pyarrow as pa
from penstock import LoaderRun, PretrainDataLoader
from penstock.errors import ShardMismatch
from penstock.supply import verified

hashed = []
def sha256(data):
    if isinstance(data, pa.Buffer):
        hashed.append(hashlib.sha256(data).hexdigest())
    return hashlib.sha256(data)
verified.hashlib = types.SimpleNamespace(sha256=sha256)
path, rank = sys.argv[1], int(sys.argv[2])
loader = PretrainDataLoader(path, None, 64, epochs=2,
                            run=LoaderRun(rank=rank, world_size=2))
print("joined", flush=True)
sys.stdin.readline()
try:
    batches, said = sum(1 for _ in loader), ""
except ShardMismatch as error:
    batches, said = 0, f"{error.what}; {error.why}"
print(json.dumps({"hashed": hashed, "batches": batches, "said": said}), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for marks that nothing else uses."""
    folder = tmp_path / "runtime"
    folder.mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    for name, _ in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(verified, "_known", set())
    joined: dict[str, int] = {}
    monkeypatch.setattr(run_folder, "_joined", joined)
    return folder


@pytest.fixture(autouse=True)
def leave_runs(private: Path) -> Iterator[None]:
    yield
    leave()


def leave() -> None:
    """End this process's part in its runs."""
    for descriptor in run_folder._joined.values():
        os.close(descriptor)
    run_folder._joined.clear()


def run_ranks(path: Path) -> list[dict[str, Any]]:
    """What two ranks of one launch say, which live at the same time."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), str(rank)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told: list[list[str]] = [[], []]
        for _ in range(2):
            for rank, lines in zip(ranks, told, strict=True):
                assert rank.stdout is not None
                lines.append(rank.stdout.readline())
            for rank in ranks:
                assert rank.stdin is not None
                rank.stdin.write("go on\n")
                rank.stdin.flush()
        return [json.loads(lines[1]) for lines in told]
    finally:
        for rank in ranks:
            rank.communicate(timeout=60)


def test_the_ranks_of_a_run_hash_each_file_once_and_a_later_run_again(
    tmp_path: Path, private: Path
) -> None:
    made_dataset(tmp_path / "d", shards=SHARDS)
    for _ in range(2):
        told = run_ranks(tmp_path / "d")
        hashed = [sha256 for rank in told for sha256 in rank["hashed"]]
        assert len(hashed) == len(set(hashed)) == SHARDS
        assert told[0]["batches"] == told[1]["batches"] > 0
        assert [rank["said"] for rank in told] == ["", ""]


def test_a_flipped_byte_is_found_by_each_rank(tmp_path: Path, private: Path) -> None:
    made_dataset(tmp_path / "d", shards=SHARDS)
    file = tmp_path / "d" / "shard_00003.tokens.arrow"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    for rank in run_ranks(tmp_path / "d"):
        assert "shard_00003.tokens.arrow is not what was written" in rank["said"]
        assert "the log says" in rank["said"]


def test_later_epochs_do_not_hash_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_dataset(tmp_path / "d", shards=SHARDS)
    counted = counting(monkeypatch)
    with PretrainDataLoader(str(tmp_path / "d"), None, 64, epochs=3) as loader:
        assert list(loader)
    assert len(counted) == SHARDS


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is hashed from here on."""
    counted: list[int] = []
    real = hashlib.sha256

    class Counting:
        @staticmethod
        def sha256(data: Any) -> Any:
            if isinstance(data, pa.Buffer):
                counted.append(data.size)
            return real(data)

    monkeypatch.setattr(verified, "hashlib", Counting)
    return counted


@pytest.fixture
def hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, bool]]:
    """Whether a file was hashed, and whether it was right, for a process that knows nothing."""
    counted = counting(monkeypatch)

    def ask(path: Path, sha256: str, marks: str) -> tuple[bool, bool]:
        verified._known.clear()
        before = len(counted)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = verified.hash_once(pa.py_buffer(path.read_bytes()), descriptor, sha256, marks)
        finally:
            os.close(descriptor)
        return len(counted) > before, found == sha256

    return ask


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"good bytes")
    return path


def good() -> str:
    return hashlib.sha256(b"good bytes").hexdigest()


def test_a_file_that_was_replaced_or_changed_is_hashed_again(
    tmp_path: Path, file: Path, hashes: Callable[..., tuple[bool, bool]]
) -> None:
    marks = verified.join_run(2)
    assert hashes(file, good(), marks) == (True, True)
    assert hashes(file, good(), marks) == (False, True)
    status = file.stat()
    other = tmp_path / "other"
    other.write_bytes(b"good bytes")
    other.replace(file)  # the same bytes, another file
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashes(file, good(), marks) == (True, True)
    assert hashes(file, good(), marks) == (False, True)
    with open(file, "r+b") as opened:  # the same file, another byte, the same mtime and size
        opened.write(b"f")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hashes(file, good(), marks) == (True, False)
    assert hashes(file, good(), marks) == (True, False)
    assert hashes(file, "0" * 64, marks) == (True, False)  # no mark is for another hash


def test_a_mark_that_was_cut_or_changed_is_not_believed(
    file: Path, hashes: Callable[..., tuple[bool, bool]]
) -> None:
    marks = Path(verified.join_run(2))
    for change in (lambda data: data[:-1], lambda data: b"", lambda data: data + b"\n"):
        hashes(file, good(), str(marks))
        (mark,) = (path for path in marks.iterdir() if path.name != "alive")
        mark.write_bytes(change(mark.read_bytes()))
        assert hashes(file, good(), str(marks)) == (True, True)
        assert hashes(file, good(), str(marks)) == (False, True)


def test_a_mark_behind_a_link_is_not_believed(
    tmp_path: Path, file: Path, hashes: Callable[..., tuple[bool, bool]]
) -> None:
    marks = Path(verified.join_run(2))
    hashes(file, good(), str(marks))
    (mark,) = (path for path in marks.iterdir() if path.name != "alive")
    mark.rename(tmp_path / "elsewhere")
    mark.symlink_to(tmp_path / "elsewhere")
    assert hashes(file, good(), str(marks)) == (True, True)


def others(folder: Path) -> None:
    folder.mkdir(0o700)
    folder.chmod(0o777)


def linked(folder: Path) -> None:
    folder.parent.parent.joinpath("elsewhere").mkdir(0o700)
    folder.symlink_to(folder.parent.parent / "elsewhere")


def owned(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 12345, -1)


def a_file(folder: Path) -> None:
    folder.write_text("")


def open_to_all(folder: Path) -> None:
    folder.parent.chmod(0o777)  # and no sticky bit


@pytest.mark.parametrize("hostile", [others, linked, owned, a_file, open_to_all])
def test_marks_are_shared_only_where_nobody_else_may_write(
    private: Path, hostile: Callable[[Path], None]
) -> None:
    if hostile is owned and os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    hostile(private / f"penstock-{os.geteuid()}")
    assert verified.join_run(2) == ""


def test_a_loader_without_marks_hashes_for_itself(tmp_path: Path, private: Path) -> None:
    others(private / f"penstock-{os.geteuid()}")
    made_dataset(tmp_path / "d", shards=2)
    for rank in run_ranks(tmp_path / "d"):
        assert len(rank["hashed"]) == 2
        assert rank["batches"]


def test_marks_of_runs_that_are_over_are_removed(private: Path) -> None:
    marks = Path(verified.join_run(2, "one run"))
    (marks / "mark").write_text("")
    leave()
    litter = marks.parent / "killed before it was joined"
    litter.mkdir(0o700)
    later = Path(verified.join_run(2, "another run"))
    assert sorted(marks.parent.iterdir()) == [later]
    assert [path.name for path in later.iterdir()] == ["alive"]


def test_what_a_link_beside_the_runs_leads_to_stays(private: Path, tmp_path: Path) -> None:
    marks = Path(verified.join_run(2, "one run"))
    others = tmp_path / "others"
    (others / "inside").mkdir(parents=True)
    for name in ("alive", "precious"):
        (others / name).write_text("kept")
    link = marks.parent / "link"
    link.symlink_to(others)
    verified.join_run(2, "another run")
    assert link.is_symlink()
    assert sorted(path.name for path in others.iterdir()) == ["alive", "inside", "precious"]


def test_a_run_that_lives_keeps_its_marks(private: Path) -> None:
    marks = Path(verified.join_run(2, "one run"))
    (marks / "mark").write_text("")
    living = dict(run_folder._joined)
    run_folder._joined.clear()  # as another process sees it
    other = Path(verified.join_run(2, "another run"))
    assert verified.join_run(2, "one run") == str(marks)
    assert sorted(path.name for path in marks.iterdir()) == ["alive", "mark"]
    assert other.exists()
    for descriptor in living.values():
        os.close(descriptor)


def test_the_same_launch_begun_again_has_no_marks(private: Path) -> None:
    marks = Path(verified.join_run(2))
    (marks / "mark").write_text("")
    leave()
    assert verified.join_run(2) == str(marks)
    assert [path.name for path in marks.iterdir()] == ["alive"]


def test_a_process_without_other_ranks_shares_nothing(private: Path) -> None:
    assert verified.join_run(1) == ""
    assert not list(private.iterdir())


def test_workers_of_a_rank_are_of_its_run(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and what they start were told their rank, the launcher was not."""
    monkeypatch.setenv("RANK", "1")
    code = "from penstock.supply.verified import join_run; print(join_run(2), flush=True)"
    nested = f"""
import subprocess, sys
{code}
subprocess.run([sys.executable, "-c", {code!r}], check=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", nested], capture_output=True, text=True, timeout=60, check=True
    )
    rank, worker = ended.stdout.split()
    assert rank == worker


def test_a_frozen_rank_is_not_waited_for(
    file: Path, hashes: Callable[..., tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = Path(verified.join_run(2))
    hashes(file, good(), str(marks))
    (mark,) = (path for path in marks.iterdir() if path.name != "alive")
    monkeypatch.setattr(run_folder, "WAIT_S", 0.05)
    with open(mark, "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert hashes(file, good(), str(marks)) == (True, True)


@pytest.mark.parametrize("at", [3, 700, -3])
def test_a_file_that_cannot_even_be_opened_is_told_by_its_hash(tmp_path: Path, at: int) -> None:
    made_dataset(tmp_path / "d", shards=2)
    file = tmp_path / "d" / "shard_00001.tokens.arrow"
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.chmod(0o600)
    file.write_bytes(data)
    with (
        PretrainDataLoader(str(tmp_path / "d"), None, 64) as loader,
        pytest.raises(ShardMismatch, match=r"shard_00001.tokens.arrow is not what was written"),
    ):
        list(loader)
