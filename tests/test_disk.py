"""Files in directories where others write too: links, pipes and guessed names come to nothing."""

import contextlib
import grp
import hashlib
import os
import pwd
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import kernels
from penstock.disk import (
    create,
    is_private,
    make_own_folder,
    open_own,
    read_own,
    replacing,
)
from penstock.errors import BadConfig, StoreFailed
from penstock.ingest.lines import mark_done
from penstock.kernels import Kernel
from penstock.mirror.disk_limit import write_position
from penstock.produce.lines import LinesWriter
from penstock.produce.writer import ShardConfig
from penstock.supply.run_file import add_ban
from penstock.tokenize.save import _write_whole
from penstock.work.events import Events


def obstacles(folder: Path) -> dict[str, Path]:
    """What somebody may have left at a name, and what it must not touch."""
    folder.mkdir()
    (folder / "theirs").write_bytes(b"precious")
    (folder / "link").symlink_to("theirs")
    (folder / "dangling").symlink_to("new")
    os.link(folder / "theirs", folder / "second")
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(folder):
        server.bind("socket")
    return {path.name: path for path in sorted(folder.iterdir()) if path.name != "theirs"}


def test_what_is_no_file_of_ours_is_refused_at_once(tmp_path: Path) -> None:
    found = obstacles(tmp_path / "a")
    assert set(found) == {"link", "dangling", "second", "pipe", "folder", "socket"}
    for path in found.values():
        for options in ({}, {"append": True}, {"make": False}):
            with pytest.raises(OSError, match=r"it is a|it has a second|s a directory|No such dev"):
                open_own(path, **options)
        with pytest.raises(FileExistsError):
            create(path)
        if path.name != "second":  # to read, a second name does no harm
            with pytest.raises(OSError, match=r"it is a|No such dev"):
                read_own(path)
    assert (tmp_path / "a" / "theirs").read_bytes() == b"precious"
    assert not (tmp_path / "a" / "new").exists()


def test_a_pipe_with_a_reader_gets_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="it is a pipe"):
        open_own(tmp_path / "pipe", append=True)
    assert os.read(reader, 10) == b""
    os.close(reader)


def test_a_file_of_ours_is_made_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        open_own(path, make=False)
    for _ in range(2):
        with os.fdopen(open_own(path, 0o640, append=True), "ab") as file:
            file.write(b"x")
    assert read_own(path) == b"xx"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with os.fdopen(open_own(path), "r+b") as file:
        file.write(b"y")
    assert read_own(path) == b"yx"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.symlink_to("theirs")
    names: set[str] = set()
    for data in (b"one", b"two"):
        with replacing(path, sync=True) as file:
            file.write(data)
            names |= {entry.name for entry in tmp_path.iterdir()} - {"file"}
        assert path.read_bytes() == data
        assert not path.is_symlink()
    assert len(names) == 2, "no name is used twice"
    assert all(re.fullmatch(r"\.tmp-for[0-9a-f]{8}-[0-9a-f]{16}", name) for name in names)

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"three")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with replacing(path, sync=True) as first, replacing(path, sync=True) as second:
        first.write(b"first")
        second.write(b"second")
        left = [entry.name for entry in tmp_path.iterdir()]
    assert len(left) == 2, "what is being written stays"
    assert path.read_bytes() == b"first"
    for name in left:
        (tmp_path / name).write_bytes(b"left")
    (tmp_path / left[0]).with_name(left[0][:-1] + "_").symlink_to("file")
    with replacing(tmp_path / "another", sync=True) as file:
        file.write(b"x")
    assert len(list(tmp_path.iterdir())) == 5
    with replacing(path, sync=True) as file:
        file.write(b"third")
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "another", left[0][:-1] + "_"}


def test_private_is_what_this_user_alone_may_write(tmp_path: Path) -> None:
    for mode, private in ((0o700, True), (0o755, True), (0o1777, False)):
        tmp_path.chmod(mode)
        assert is_private(tmp_path.stat()) is private


# The writers: none of them follows a link that can be foretold.


def write_marker(folder: Path) -> None:
    (folder / "in.jsonl").write_bytes(b"{}\n")
    mark_done(folder / "in.jsonl")


def write_lines(folder: Path) -> None:
    with contextlib.closing(LinesWriter(folder / "out.jsonl", ShardConfig(), [])) as writer:
        list(writer.seal())


def write_events(folder: Path) -> None:
    events = Events("shard", path=folder / "_events.jsonl")
    events.emit("start")
    events.close()


def ban(folder: Path) -> None:
    (folder / "run.toml").write_text("[loader]\n")
    add_ban(folder / "run.toml", 7)


WRITERS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "marker": (write_marker, ("in.jsonl.done", "in.jsonl.done.tmp")),
    "lines": (
        write_lines,
        ("out.jsonl", "out.jsonl.progress.tmp", "out.jsonl.progress.lock"),
    ),
    "events": (write_events, ("_events.jsonl",)),
    "position": (
        lambda folder: write_position(folder, "me", 3),
        ("_position/me.json", "_position/.me-PID"),
    ),
    "tokenizer": (
        lambda folder: _write_whole(folder / "tokenizer.json", b"{}"),
        ("tokenizer.json", "tokenizer.json.tmp"),
    ),
    "ban": (ban, ("run.ban",)),
}


@pytest.mark.parametrize(
    ("writer", "name"), [(key, name) for key in WRITERS for name in WRITERS[key][1]]
)
def test_no_writer_follows_a_link(
    writer: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to a file that this user may write is how another user would have it overwritten."""
    name = name.replace("PID", str(os.getpid()))
    precious, folder = tmp_path / "precious", tmp_path / "shared"
    precious.write_bytes(b"")
    (folder / name).parent.mkdir(parents=True)
    (folder / name).symlink_to(precious)
    # refused with the reason, or the link is replaced by the file
    with contextlib.suppress(OSError, BadConfig):
        WRITERS[writer][0](folder)
    assert precious.read_bytes() == b""
    if writer == "events":
        assert "it is a symbolic link" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.progress.lock"])
def test_lines_say_why_they_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("elsewhere")
    with pytest.raises(BadConfig, match=f"{name} cannot be written") as caught:
        write_lines(tmp_path)
    assert caught.value.why == "it is a symbolic link, which could lead anywhere"
    assert "--output" in caught.value.do


def test_a_pipe_in_place_of_the_events_is_told_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "out").mkdir()
    os.mkfifo(tmp_path / "out" / "_events.jsonl")
    command = [sys.executable, "-m", "penstock.cli", "shard", "--complete", "--input", "in.jsonl"]
    done = subprocess.run(
        [*command, "--parquet_dir", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "no more events in out/_events.jsonl: it is a pipe" in done.stderr


def test_machine_code_that_others_may_write_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, cache = tmp_path / "package", tmp_path / "cache"
    package.write_text("not a folder")
    monkeypatch.setattr(kernels, "folders", lambda: (package, cache))
    kernel = Kernel("penstock.simd", "xxh64", "uint64(uint8[::1], int64, int64, uint64)")
    cache.mkdir()
    monkeypatch.setattr(Kernel, "_file_name", lambda self: "made.kernel")
    body = b"symbol\ncode"
    kernels._keep(kernel._file_name(), hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert kernel._read() == ("symbol", b"code")
    (cache / "made.kernel").chmod(0o666)
    assert kernel._read() is None
    (cache / "made.kernel").unlink()
    os.mkfifo(cache / "made.kernel")
    assert kernel._read() is None


def test_a_folder_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").symlink_to("theirs")
    with pytest.raises(StoreFailed, match="ours is no folder"):
        make_own_folder(tmp_path / "ours")
    make_own_folder(tmp_path / "new")
    make_own_folder(tmp_path / "new")
    assert (tmp_path / "new").is_dir()


def test_the_group_of_one_user_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group of its own, and umask 002 with it."""
    me = pwd.getpwuid(os.geteuid())
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(0o775)
    status = (tmp_path / "d").stat()

    def group(members: list[str], name: str = me.pw_name) -> grp.struct_group:
        return grp.struct_group((name, "x", me.pw_gid, members))

    for found, private in (
        (group([]), True),
        (group([me.pw_name]), True),
        (group(["other"]), False),
        (group([], "users"), False),
    ):
        monkeypatch.setattr(grp, "getgrgid", lambda number, found=found: found)
        assert is_private(status) is private
    (tmp_path / "d").chmod(0o777)
    assert not is_private((tmp_path / "d").stat())
