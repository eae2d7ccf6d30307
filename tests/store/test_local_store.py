"""A directory as a store: created once, whole or absent, inside its own folder, errors explained.

The real file system, as the tests' own user; what a test cannot bring about there (a full disk, a
read-only mount) is raised from the system call that would raise it.
"""

import errno
import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig, LogDamaged, PenstockError, ShardMismatch, StoreFailed
from penstock.store import local
from penstock.store.local import LocalStore
from penstock.store.log import LogWriter
from penstock.store.store import AlreadyThere, check_name, open_store

AGAIN = "; then run the same command again: nothing committed is lost"


def writes(*blocks: bytes) -> Callable[[IO[bytes]], None]:
    """What `put` is given: a function that writes these blocks."""

    def write(file: IO[bytes]) -> None:
        for block in blocks:
            file.write(block)

    return write


def names_under(folder: Path) -> list[str]:
    """Every file of a dataset, as a reader would name it, temporary ones included."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "set", make=True)


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of many small objects that do not ask about durability."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# Create once.


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    folder=st.sampled_from(["", "_log/", "_val/"]),
    first=st.binary(max_size=50),
    later=st.lists(st.binary(max_size=50), min_size=1, max_size=3),
    number=st.integers(0, 10**6),
)
def test_first_bytes_stay(
    tmp_path: Path, no_sync: None, folder: str, first: bytes, later: list[bytes], number: int
) -> None:
    root = tmp_path / f"{number}-{len(os.listdir(tmp_path))}"
    store = LocalStore(root, make=True)
    name = f"{folder}object_{number}.json"
    store.create(name, first)
    for other in later:
        with pytest.raises(AlreadyThere):
            LocalStore(root).create(name, other)
    assert store.read(name) == first
    assert store.size(name) == len(first)
    assert names_under(root) == [name]


def test_one_of_many_creators_wins(store: LocalStore) -> None:
    won: list[int] = []
    start = threading.Barrier(8)

    def create(number: int) -> None:
        start.wait(10)
        for slot in range(10):
            try:
                store.create(f"_log/{slot}.json", b"%d" % number)
            except AlreadyThere:
                continue
            won.append(slot)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(won) == list(range(10))
    assert names_under(store.root) == [f"_log/{slot}.json" for slot in range(10)]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(blocks=st.lists(st.binary(max_size=2_000), max_size=6), other=st.binary(max_size=20))
def test_put_adopts_the_same_and_steps_aside_for_other_bytes(
    tmp_path: Path, no_sync: None, blocks: list[bytes], other: bytes
) -> None:
    root = tmp_path / str(len(os.listdir(tmp_path)))
    store = LocalStore(root, make=True)
    whole = b"".join(blocks)
    sha256 = hashlib.sha256(whole).hexdigest()
    first = store.put("shard_00000.parquet", writes(*blocks))
    again = store.put("shard_00000.parquet", writes(whole))
    for stored in (first, again):
        assert (stored.name, stored.sha256, stored.size, stored.shadowed) == (
            "shard_00000.parquet",
            sha256,
            len(whole),
            None,
        )
    if other == whole:
        other += b"."
    other_sha256 = hashlib.sha256(other).hexdigest()
    aside = f"shard_00000-{other_sha256[:8]}.parquet"
    for _ in range(2):  # the second adopts what the first left under the other name
        stored = store.put("shard_00000.parquet", writes(other))
        assert (stored.name, stored.sha256, stored.size, stored.shadowed) == (
            aside,
            other_sha256,
            len(other),
            "shard_00000.parquet",
        )
    assert store.read("shard_00000.parquet") == whole
    assert store.read(aside) == other
    assert names_under(root) == sorted([aside, "shard_00000.parquet"])


def test_put_with_both_names_taken_is_a_mismatch(store: LocalStore) -> None:
    aside = f"x-{hashlib.sha256(b'new').hexdigest()[:8]}.parquet"
    store.create("x.parquet", b"old")
    store.create(aside, b"older")
    with pytest.raises(ShardMismatch) as caught:
        store.put("x.parquet", writes(b"new"))
    assert str(caught.value) == (
        "x.parquet is taken, and so is the name that carries its hash\n"
        f"  where: {store.url}\n"
        f"  do:    penstock verify --full {store.url}"
    )
    assert (store.read("x.parquet"), store.read(aside)) == (b"old", b"older")
    assert names_under(store.root) == sorted([aside, "x.parquet"])


# Whole or absent.


def test_put_is_invisible_until_it_is_whole(store: LocalStore) -> None:
    seen: list[int | None] = []

    def write(file: IO[bytes]) -> None:
        for _ in range(5):
            file.write(b"x" * 1_000)
            seen.append(store.size("shard.parquet"))
            with pytest.raises(FileNotFoundError):
                store.read("shard.parquet")

    store.put("shard.parquet", write)
    assert seen == [None] * 5
    assert store.size("shard.parquet") == 5_000


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_put_that_fails_leaves_nothing(store: LocalStore, blocks: int) -> None:
    def write(file: IO[bytes]) -> None:
        for _ in range(blocks):
            file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("_val/val_00000.parquet", write)
    assert names_under(store.root) == []


def test_every_byte_is_synced_before_the_name_and_the_name_before_return(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_write, real_fsync, real_link = os.write, os.fsync, os.link

    def write(descriptor: int, data: Any) -> int:
        calls.append("write")
        return real_write(descriptor, data)

    def fsync(descriptor: int) -> None:
        calls.append(
            "fsync " + ("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        )
        real_fsync(descriptor)

    def link(source: Any, target: Any, **options: Any) -> None:
        calls.append("link")
        real_link(source, target, **options)

    store.create("_log/warm.json", b"")  # makes the folders
    store.create("warm.parquet", b"")
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    store.create("_log/0.json", b"record")
    assert calls == ["write", "fsync file", "link", "fsync folder"]
    calls.clear()
    store.put("x.parquet", writes(b"a", b"b"))
    assert calls == ["write", "write", "fsync file", "link", "fsync folder"]
    calls.clear()
    store.put("x.parquet", writes(b"ab"))  # adopted: it may never have been synced
    assert calls[-2:] == ["fsync file", "fsync folder"]


# A file system without hard links.


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def no_links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What FAT and some network file systems answer."""

    def link(*args: object, **options: object) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "link", link)


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_objects_are_created_once_all_the_same(store: LocalStore) -> None:
    store.create("_log/0.json", b"first")
    for _ in range(2):
        with pytest.raises(AlreadyThere):
            store.create("_log/0.json", b"second")
    assert store.read("_log/0.json") == b"first"
    assert store.put("x.parquet", writes(b"one")).name == "x.parquet"
    assert store.put("x.parquet", writes(b"one")).shadowed is None
    aside = store.put("x.parquet", writes(b"two"))
    assert (aside.shadowed, store.read(aside.name)) == ("x.parquet", b"two")
    (store.root / "part").write_bytes(b"pulled")
    store.adopt(store.root / "part", "_val/y.parquet")
    (store.root / "part").write_bytes(b"other")
    with pytest.raises(AlreadyThere):  # a name that is taken stays what it is
        store.adopt(store.root / "part", "_val/y.parquet")
    (store.root / "part").unlink()
    assert store.read("_val/y.parquet") == b"pulled"
    assert names_under(store.root) == ["_log/0.json", "_val/y.parquet", aside.name, "x.parquet"]


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_one_of_many_writers_wins(store: LocalStore) -> None:
    won: list[bytes] = []
    ready = threading.Barrier(8)

    def write(data: bytes) -> None:
        ready.wait()
        for n in range(20):
            try:
                LocalStore(store.root).create(f"_log/{n}.json", data)
            except AlreadyThere:
                continue
            won.append(b"%d" % n + data)

    threads = [threading.Thread(target=write, args=(b" of %d" % k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 20
    assert sorted(won) == sorted(b"%d" % n + store.read(f"_log/{n}.json") for n in range(20))


@pytest.mark.usefixtures("no_links")
def test_without_hard_links_bytes_are_synced_before_the_name_and_the_name_before_return(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, local._rename_once

    def fsync(descriptor: int) -> None:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        calls.append("fsync " + ("folder" if is_folder else "file"))
        real_fsync(descriptor)

    def rename(source: Path, target: Path) -> int:
        calls.append("rename")
        return real_rename(source, target)

    store.create("_log/warm.json", b"")  # makes the folders
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(local, "_rename_once", rename)
    store.create("_log/0.json", b"record")
    assert calls == ["fsync file", "rename", "fsync folder"]


@pytest.mark.usefixtures("no_links")
def test_a_file_system_that_creates_nothing_once_is_refused_at_the_first_record(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_rename_once", lambda source, target: errno.EINVAL)
    with pytest.raises(
        StoreFailed, match="must have hard links, or a rename that replaces nothing"
    ):
        LogWriter.take(store, {}, [], writer="w")
    assert names_under(store.root) == []


def test_short_writes_are_finished(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:7]))
    data = bytes(range(256)) * 3
    store.create("a", data)
    stored = store.put("b", writes(data, data))
    assert store.read("a") == data
    assert store.read("b") == data + data
    assert stored.sha256 == hashlib.sha256(data + data).hexdigest()


# Names.

UNSAFE = [
    "",
    ".",
    "..",
    "../x",
    "/x",
    "//x",
    "a/../b",
    "a/b",
    "_log/../x",
    "_log/..",
    "_log/",
    "_log/a/b",
    "_log/_fold/x",
    "_LOG/x",
    "_/x",
    "log/x",
    "_log//x",
    "./x",
    "x\0",
    "x\0.parquet",
    "a\\b",
    "..\\x",
    "C:x",
    "C:\\x",
    "C:/x",
    "\\\\host\\x",
    ".hidden",
    "-rf",
    "~",
    "a b",
    "x\n",
    "a..b",
    "naïve",
    "x\u202e",
    "%2e%2e",
    "s3://b/x",
]


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_names_are_refused_by_every_call(store: LocalStore, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.create(name, b""),
        lambda: store.put(name, writes(b"")),
        lambda: store.read(name),
        lambda: store.open(name),
        lambda: store.size(name),
        lambda: store.remove(name),
    ]
    for call in calls:
        with pytest.raises(LogDamaged) as caught:
            call()
        assert str(caught.value) == (
            f"the log names {name!r}, which is not a name inside a dataset\n"
            f"  where: {store.url}\n"
            "  why:   names are relative, in at most one folder that starts with _\n"
            "  do:    do not use this dataset; ask whoever made it"
        )
    assert names_under(store.root.parent) == []


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from("ab_./\\:\0-~ C\n%"), max_size=12))
def test_a_name_that_passes_stays_inside(name: str) -> None:
    try:
        check_name(name, "here")
    except LogDamaged:
        return
    path = os.path.normpath(os.path.join("/srv/set", name))
    assert path == f"/srv/set/{name}"  # nothing to normalise away
    assert name.count("/") <= 1
    assert "\0" not in name
    assert "\\" not in name


@pytest.mark.parametrize(
    "name",
    [
        "shard_00000.parquet",
        "shard_00000-0a1b2c3d.parquet",
        "val_shard.parquet",
        "_COMPLETE",
        "_log/00000000000000000000.json",
        "_fold/00000000000000000000.json",
        "_val/val_00000.parquet",
        "_rejects/rejects_00000.jsonl",
    ],
)
def test_our_own_names_pass(name: str) -> None:
    assert check_name(name, "here") == name


# Symbolic links.


def test_linked_file_is_refused(store: LocalStore, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (store.root / "shard.parquet").symlink_to(secret)
    calls: list[Callable[[], object]] = [
        lambda: store.read("shard.parquet"),
        lambda: store.open("shard.parquet"),
        lambda: store.size("shard.parquet"),
        lambda: store.put("shard.parquet", writes(b"secret")),
        lambda: store.put("shard.parquet", writes(b"other")),
    ]
    for call in calls:
        with pytest.raises(LogDamaged) as caught:
            call()
        assert str(caught.value) == (
            "shard.parquet is a symbolic link\n"
            f"  where: {store.url}\n"
            "  why:   a dataset holds its own files; a link could lead anywhere\n"
            "  do:    replace the link by the file"
        )
    with pytest.raises(AlreadyThere):
        store.create("shard.parquet", b"through the link")
    assert secret.read_bytes() == b"secret"


def test_dangling_link_is_refused_and_not_filled(store: LocalStore, tmp_path: Path) -> None:
    (store.root / "x").symlink_to(tmp_path / "made")
    with pytest.raises(AlreadyThere):
        store.create("x", b"data")
    with pytest.raises(LogDamaged, match="x is a symbolic link"):
        store.read("x")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("call", ["read", "open", "create", "put", "size", "remove"])
def test_linked_folder_is_refused_by_every_call(
    store: LocalStore, tmp_path: Path, call: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.parquet").write_bytes(b"theirs")
    (store.root / "_val").symlink_to(outside, target_is_directory=True)
    name = "_val/new.parquet" if call in ("create", "put") else "_val/x.parquet"
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read(name),
        "open": lambda: store.open(name),
        "create": lambda: store.create(name, b"ours"),
        "put": lambda: store.put(name, writes(b"ours")),
        "size": lambda: store.size(name),
        "remove": lambda: store.remove(name),
    }
    with pytest.raises(LogDamaged, match=f"^{name} is a symbolic link"):
        calls[call]()
    assert names_under(outside) == ["x.parquet"]
    assert (outside / "x.parquet").read_bytes() == b"theirs"


def test_settle_does_not_enter_a_linked_folder(store: LocalStore, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".tmp-0-ab").write_bytes(b"theirs")
    (store.root / "_val").symlink_to(outside, target_is_directory=True)
    store.epoch = 5
    store.settle()
    assert names_under(outside) == [".tmp-0-ab"]


def test_the_dataset_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = LocalStore(tmp_path / "link", make=True)
    store.create("_log/0.json", b"x")
    assert (tmp_path / "real/_log/0.json").read_bytes() == b"x"


# Settling.


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    epoch=st.integers(0, 12),
    litter=st.lists(
        st.tuples(st.sampled_from(["", "_log/", "_val/", "_fold/"]), st.integers(0, 12)),
        max_size=8,
    ),
)
def test_settle_sweeps_older_epochs_only(
    tmp_path: Path, no_sync: None, epoch: int, litter: list[tuple[str, int]]
) -> None:
    store = LocalStore(tmp_path / str(len(os.listdir(tmp_path))), make=True)
    kept = ["_val/x.parquet", ".tmp-x", ".tmp-1-zz", "tmp-0-ab", ".tmp-0", "_other/deep/.tmp-0-ab"]
    for name in kept:
        (store.root / name).parent.mkdir(parents=True, exist_ok=True)
        (store.root / name).write_bytes(b"")
    for number, (folder, wrote) in enumerate(litter):
        name = f"{folder}.tmp-{wrote}-{number:x}"
        (store.root / name).parent.mkdir(exist_ok=True)
        (store.root / name).write_bytes(b"half")
        if wrote >= epoch:
            kept.append(name)
    store.epoch = epoch
    store.settle()
    assert names_under(store.root) == sorted(kept)
    store.settle()
    assert names_under(store.root) == sorted(kept)


def test_settle_makes_inherited_names_durable(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create("_log/0.json", b"")
    store.create("_val/0.parquet", b"")
    synced: list[str] = []
    monkeypatch.setattr(
        local,
        "_sync_folder",
        lambda folder: synced.append(str(folder.relative_to(store.root.parent))),
    )
    store.settle()
    assert sorted(synced) == ["set", "set/_log", "set/_val"]


def test_temporary_files_carry_the_epoch(store: LocalStore) -> None:
    seen: list[str] = []
    store.epoch = 7
    store.put("x", lambda file: seen.extend(names_under(store.root)))
    assert len(seen) == 1
    assert seen[0].startswith(".tmp-7-")


def test_writer_whose_file_was_swept_by_a_newer_one_gets_our_error(store: LocalStore) -> None:
    """The older of two writers may lose its temporary file before it can link it."""
    store.epoch = 1
    newer = LocalStore(store.root)
    newer.epoch = 2

    def write(file: IO[bytes]) -> None:
        file.write(b"half a shard")
        newer.settle()
        file.write(b"the rest")

    with pytest.raises(PenstockError):
        store.put("shard_00000.parquet", write)
    assert names_under(store.root) == []


# Errors.


def test_missing_is_not_an_error(store: LocalStore) -> None:
    assert store.size("x") is None
    assert store.size("_val/x") is None
    store.remove("x")
    store.remove("_val/x")
    for name in ("x", "_val/x"):
        with pytest.raises(FileNotFoundError):
            store.read(name)
        with pytest.raises(FileNotFoundError):
            store.open(name)


def test_opened_object_is_seekable(store: LocalStore) -> None:
    store.create("x", b"0123456789")
    with store.open("x") as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"789"


def test_name_too_long_is_explained(store: LocalStore) -> None:
    name = "x" * 300
    with pytest.raises(StoreFailed) as caught:
        store.create(name, b"")
    assert caught.value.what == f"could not write {name}"
    assert caught.value.where == f"{store.url}/{name}"
    assert caught.value.why == "ENAMETOOLONG: File name too long"
    assert caught.value.do == "look at the disk" + AGAIN


def test_parent_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreFailed) as caught:
        LocalStore(tmp_path / "file/set", make=True)
    assert str(caught.value) == (
        f"could not make the directory {tmp_path}/file/set\n"
        f"  where: {tmp_path}/file/set\n"
        "  why:   ENOTDIR: it is a file\n"
        "  do:    a file stands where a directory is needed: use another path" + AGAIN
    )


def test_dataset_that_is_a_file_is_explained(tmp_path: Path) -> None:
    (tmp_path / "set").write_bytes(b"mine")
    with pytest.raises(StoreFailed, match="ENOTDIR"):
        LocalStore(tmp_path / "set", make=True).create("_log/0.json", b"")
    with pytest.raises(StoreFailed, match="ENOTDIR"):
        LocalStore(tmp_path / "set").read("_log/0.json")
    assert (tmp_path / "set").read_bytes() == b"mine"


def test_folder_under_an_objects_name_is_explained(store: LocalStore) -> None:
    (store.root / "x").mkdir()
    with pytest.raises(StoreFailed, match=r"could not open x\n.*\n.*EISDIR"):
        store.read("x")
    with pytest.raises(StoreFailed, match=r"could not look at x\n.*\n.*EISDIR"):
        store.size("x")
    with pytest.raises(StoreFailed, match="could not remove x\n"):
        store.remove("x")
    with pytest.raises(AlreadyThere):
        store.create("x", b"")


def test_refused_opens_leak_no_descriptor(store: LocalStore) -> None:
    (store.root / "x").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(PenstockError):
            store.read("x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pipe_under_an_objects_name_does_not_hang(store: LocalStore) -> None:
    os.mkfifo(store.root / "x")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from penstock.errors import PenstockError\n"
        "from penstock.store.local import LocalStore\n"
        "try:\n    LocalStore(Path(sys.argv[1])).read('x')\n"
        "except PenstockError:\n    sys.exit(7)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(store.root)], timeout=15, check=False)
    assert ended.returncode == 7


CURES = [
    (errno.ENOSPC, "ENOSPC: No space left on device", "free some space"),
    (errno.EDQUOT, "EDQUOT: Disk quota exceeded", "free some space or raise the quota"),
    (errno.EMFILE, "EMFILE: Too many open files", "raise the limit of open files (ulimit -n)"),
    (
        errno.ENFILE,
        "ENFILE: Too many open files in system",
        "raise the limit of open files (ulimit -n)",
    ),
    (errno.EACCES, "EACCES: Permission denied", "check who may read and write there"),
    (
        errno.EROFS,
        "EROFS: Read-only file system",
        "the file system is read-only: use another directory",
    ),
    (
        errno.EPERM,
        "EPERM: Operation not permitted",
        "the file system must have hard links, or a rename that replaces nothing: use another "
        "directory",
    ),
    (errno.EIO, "EIO: Input/output error", "look at the disk"),
]


@pytest.mark.parametrize(("number", "why", "do"), CURES, ids=[why for _, why, _ in CURES])
@pytest.mark.parametrize("call", ["open", "write", "fsync", "link"])
def test_refusals_of_the_disk_are_explained(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, call: str, number: int, why: str, do: str
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, refuse)
        patched.setattr(local, "_rename_once", lambda source, target: errno.EINVAL)
        with pytest.raises(StoreFailed) as caught:
            store.create("x", b"data")
        with pytest.raises(StoreFailed):
            store.put("y", writes(b"data"))
    assert str(caught.value) == (
        f"could not write x\n  where: {store.url}/x\n  why:   {why}\n  do:    {do}{AGAIN}"
    )
    assert names_under(store.root) == []


def test_disk_that_takes_no_bytes_does_not_loop(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, data: 0)
    with pytest.raises(StoreFailed, match="EIO: the disk took no bytes"):
        store.create("x", b"data")


def test_directory_that_vanished_is_explained(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "set", make=True)
    store.create("x", b"")
    os.unlink(tmp_path / "set/x")
    os.rmdir(tmp_path / "set")
    with pytest.raises(StoreFailed):
        store.create("y", b"")
    with pytest.raises(StoreFailed):
        store.settle()


# Addresses.


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_open_store_takes_paths_and_file_addresses(tmp_path: Path, form: str) -> None:
    open_store(form.format(tmp_path / "a/b/c"), make=True).create("x", b"1")
    assert open_store(tmp_path / "a/b/c").read("x") == b"1"


def test_open_store_makes_nothing_unless_told(tmp_path: Path) -> None:
    open_store(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(BadConfig) as caught:
        open_store("ftp://host/x")
    assert str(caught.value) == (
        "ftp:// is not a store penstock knows\n"
        "  where: ftp://host/x\n"
        "  do:    use a directory, s3://, gs:// or az://"
    )


@pytest.mark.parametrize("url", ["s3://", "s3://b a d/x", "az://container/x"])
def test_address_that_cannot_be_opened_is_our_error(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises(PenstockError):
        open_store(url)
