"""A cache is never the truth: what is missing, cut or changed is a miss, and no error."""

import fcntl
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.cache.disk import DiskCache
from penstock.errors import BadConfig
from penstock.tokenize import tokenizer as tokenizer_module
from penstock.tokenize.bpe import learn_merges
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.engines import Gigatoken
from penstock.tokenize.patterns import PATTERNS
from penstock.tokenize.save import as_json
from penstock.tokenize.tokenizer import Tokenizer


def files_of(folder: Path) -> list[Path]:
    """All files but the one that counts them."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def set_ages(folder: Path, cache: DiskCache, oldest_first: list[str]) -> None:
    """Make the files as old as their keys' places say; clocks of file systems are coarse."""
    for place, key in enumerate(oldest_first):
        os.utime(cache._path(key), (1e9 + place, 1e9 + place))


# Values by key.


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.binary(max_size=200), max_size=8))
def test_what_was_put_is_got(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = DiskCache(folder)
    for key, value in values.items():
        assert cache.get(key) is None
        cache.put(key, b"before" + value)
        cache.put(key, value)
    for key, value in values.items():
        assert cache.get(key) == value
        assert DiskCache(folder).get(key) == value
    assert cache.get("another key entirely") is None
    assert len(files_of(folder)) == len(values)


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "a" / "b")
    assert cache.get("key") is None
    assert not (tmp_path / "a").exists()
    cache.put("key", b"value")
    assert cache.get("key") == b"value"


def test_a_value_that_was_cut_or_changed_is_a_miss(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    chance = random.Random(1)
    value = chance.randbytes(300)
    cache.put("key", value)
    (path,) = files_of(tmp_path)
    data = path.read_bytes()
    damaged = [data[:size] for size in (0, 1, 15, 16, 17, len(data) - 1)] + [data + b"\0"]
    for at in (0, 15, 16, len(data) - 1, chance.randrange(len(data))):
        damaged.append(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    for bad in damaged:
        path.write_bytes(bad)
        assert cache.get("key") is None
        assert not path.exists()
        cache.put("key", value)
        assert cache.get("key") == value


def test_the_value_of_another_key_is_a_miss(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put("one", b"1")
    cache.put("two", b"2")
    os.replace(cache._path("one"), cache._path("two"))
    assert cache.get("two") is None


# The limit.


def test_the_limit_is_kept_and_the_recently_used_stay(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=1000)  # eight values of 100 and their hashes
    keys = [f"{k}" for k in range(8)]
    for key in keys:
        cache.put(key, bytes(100))
    assert all(cache.get(key) for key in keys)
    set_ages(tmp_path, cache, keys)
    assert cache.get("0") == bytes(100)  # so it is the youngest
    cache.put("new", bytes(100))
    assert held(tmp_path) <= 1000
    assert cache.get("0") is not None
    assert cache.get("new") is not None
    assert cache.get("1") is None
    assert cache.get("7") is not None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 700)), max_size=40))
def test_the_limit_is_kept_whatever_is_put(
    tmp_path_factory: pytest.TempPathFactory, puts: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = DiskCache(folder, max_bytes=1000)
    for number, (key, size) in enumerate(puts):
        if number == 20:
            cache = DiskCache(folder, max_bytes=1000)  # another process goes on
        cache.put(str(key), bytes(size))
        assert held(folder) <= 1000


def test_what_was_just_put_is_not_the_first_to_go(tmp_path: Path) -> None:
    """Nearly as large as the limit: it fits, so the others go."""
    cache = DiskCache(tmp_path, max_bytes=1000)
    cache.put("old", bytes(100))
    set_ages(tmp_path, cache, ["old"])
    cache.put("new", bytes(950))
    assert cache.get("new") == bytes(950)
    assert held(tmp_path) <= 1000


def test_two_processes_keep_one_limit(tmp_path: Path) -> None:
    caches = [DiskCache(tmp_path, max_bytes=1000) for _ in range(4)]
    for k in range(40):
        caches[k % 4].put(f"{k}", bytes(100))
        assert held(tmp_path) <= 1000


def test_what_a_killed_process_left_counts(tmp_path: Path) -> None:
    """A value that was being written when its process was killed stays in a temporary file."""
    cache = DiskCache(tmp_path, max_bytes=1000)
    cache.put("a", bytes(100))
    (before,) = files_of(tmp_path)
    left = tmp_path / f".{'0' * 16}"
    left.write_bytes(bytes(5000))
    os.utime(left, (1e9, 1e9))
    for k in range(20):
        DiskCache(tmp_path, max_bytes=1000).put(f"{k}", bytes(100))
    assert held(tmp_path) <= 1000
    assert before != left


@pytest.mark.parametrize("wrong", [b"", b"\0", bytes(8), b"\xff" * 8, b"\xff" * 20])
def test_a_new_process_does_not_believe_the_count(tmp_path: Path, wrong: bytes) -> None:
    """After a power failure it may be older than the values."""
    cache = DiskCache(tmp_path, max_bytes=1000)
    for k in range(8):
        cache.put(f"{k}", bytes(100))
    (tmp_path / ".lock").write_bytes(wrong)
    cache = DiskCache(tmp_path, max_bytes=1000)
    for k in range(8, 16):
        cache.put(f"{k}", bytes(100))
        assert cache.get(f"{k}") == bytes(100)
        assert sum(path.stat().st_size for path in files_of(tmp_path)) <= 1000 - 8


def test_what_is_being_written_counts_and_is_no_litter(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=1000)
    reserved = cache._reserve(600)
    assert reserved is not None
    descriptor, temporary = reserved
    for k in range(5):
        other = DiskCache(tmp_path, max_bytes=1000)  # which counts, and clears litter
        other.put(f"{k}", bytes(200))
        other.put("large", bytes(400))
        assert other.get("large") is None
        assert other.get(f"{k}") == bytes(200)
        assert os.path.getsize(temporary) == 600
    os.close(descriptor)
    DiskCache(tmp_path, max_bytes=1000).put("large", bytes(400))
    assert not os.path.exists(temporary)


def test_a_value_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    for limit in (0, 115):
        cache = DiskCache(tmp_path, max_bytes=limit)
        cache.put("key", bytes(100))
        assert cache.get("key") is None
    with pytest.raises(BadConfig, match="max_bytes is -1") as caught:
        DiskCache(tmp_path, max_bytes=-1)
    assert caught.value.do == "give 0 or more"


def test_a_folder_that_refuses_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        cache = DiskCache(folder)
        cache.put("key", b"value")
        assert cache.get("key") is None
    assert (tmp_path / "file").read_text() == "not a directory"
    cache = DiskCache(tmp_path / "full")
    cache.put("old", b"value")

    write = os.writev

    def no_room(descriptor: int, parts: Sequence[memoryview]) -> int:
        if write(descriptor, [part[:3] for part in parts]) < 3:
            raise AssertionError
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "writev", no_room)
    cache.put("new", b"value")
    assert cache.fetch("new", lambda: b"value") == b"value"
    assert cache.get("new") is None
    assert cache.get("old") == b"value"
    assert len(files_of(tmp_path / "full")) == 1


# What is in use.


def test_what_is_mapped_is_not_evicted(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, max_bytes=1000)
    cache.put("old", b"o" * 400)
    cache.put("free", b"f" * 300)
    set_ages(tmp_path, cache, ["old", "free"])
    mapped = cache.map("old")
    os.utime(cache._path("old"), (1e9, 1e9))  # the first to go, were it not in use
    assert mapped is not None
    part = mapped[100:]
    del mapped  # a part is enough to pin it
    for k in range(5):
        cache.put(f"{k}", bytes(300))
        assert held(tmp_path) <= 1000
        assert Path(cache._path("old")).exists()
    assert cache.get("free") is None
    assert cache.get("4") == bytes(300)
    cache.put("large", bytes(700))  # no room, even with all others gone
    assert cache.get("large") is None
    cache.put("old", b"n" * 400)  # in use: it stays as it is
    assert cache.get("old") == b"o" * 400
    assert part == b"o" * 300
    del part
    cache.put("large", bytes(700))
    assert cache.get("large") == bytes(700)
    assert cache.get("old") is None


def test_what_is_evicted_before_it_is_pinned_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped nevertheless, it would take room on the disk that nobody counts."""
    cache = DiskCache(tmp_path)
    cache.put("key", b"value")
    lock = fcntl.flock

    def lock_too_late(descriptor: int, kind: int) -> None:
        Path(cache._path("key")).unlink(missing_ok=True)
        lock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", lock_too_late)
    assert cache.map("key") is None


def test_large_values_are_fetched_mapped(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for size in (0, 10, 1 << 18, 1 << 20, 3 << 20):
        value = os.urandom(size)
        for _ in range(2):
            found = cache.fetch(f"{size}", lambda value=value: value)  # type: ignore[misc]
            assert found == value
            is_mapped = isinstance(memoryview(found).obj, mmap.mmap)
            assert is_mapped == (size >= 1 << 20)
    small = DiskCache(tmp_path / "small", max_bytes=100)
    assert small.fetch("key", lambda: bytes(1 << 20)) == bytes(1 << 20)


def test_a_use_makes_it_young_once_a_minute(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put("key", b"value")
    now = time.time()
    for age, is_noted in ((30, False), (90, True)):
        os.utime(cache._path("key"), (now - age, now - age))
        assert cache.get("key") == b"value"
        assert (Path(cache._path("key")).stat().st_mtime > now - 1) == is_noted


# One makes it.


def test_of_threads_one_makes_it(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    made: list[int] = []
    found: list[bytes] = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.2)
        return b"value"

    threads = [
        threading.Thread(target=lambda: found.append(bytes(cache.fetch("key", make))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"value"] * 8
    assert len(made) == 1
    assert [path.name for path in files_of(tmp_path)] == [Path(cache._path("key")).name]


def test_a_maker_that_fails_leaves_it_to_the_next(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)

    def fail() -> bytes:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.fetch("key", fail)
    began = time.monotonic()
    assert cache.fetch("key", lambda: b"value") == b"value"
    assert time.monotonic() - began < 1
    assert cache.fetch("key", fail) == b"value"


# Disks that do not play along.


def test_a_folder_that_is_removed_in_the_middle(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", max_bytes=1000)
    for k in range(10):
        cache.put("key", bytes(400))
        assert cache.get("key") == bytes(400)
        mapped = cache.map("key")
        shutil.rmtree(tmp_path / "cache")
        assert mapped is not None
        assert mapped == bytes(400)
        assert cache.get("key") is None
        assert cache.fetch(f"{k}", lambda: b"made") == b"made"
        assert cache.get(f"{k}") == b"made"
        assert held(tmp_path) <= 1000


def test_a_holder_of_the_lock_that_is_frozen_costs_a_second_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    cache.put("old", b"value")
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        began = time.monotonic()
        for k in range(100):
            cache.put(f"{k}", b"value")
            assert cache.get("old") == b"value"
        assert cache.fetch("new", lambda: b"made") == b"made"
        assert time.monotonic() - began < 3
        assert cache.get("99") is None
    cache = DiskCache(tmp_path)
    cache.put("new", b"value")
    assert cache.get("new") == b"value"


def test_without_locks_nothing_is_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    caches = [DiskCache(tmp_path, max_bytes=1000) for _ in range(2)]
    left = tmp_path / f".{'0' * 16}"
    left.write_bytes(bytes(100))
    for k in range(20):
        caches[k % 2].put(f"{k}", bytes(100))
        assert held(tmp_path) <= 1000
    assert [k for k in range(20) if caches[0].get(f"{k}")] == list(range(7))
    assert left.exists()
    assert caches[0].fetch("new", lambda: b"made") == b"made"
    mapped = caches[0].map("0")
    assert mapped is not None
    assert mapped == bytes(100)


READ_ONLY: Final = """
import os, sys
from penstock.cache.disk import DiskCache
if os.geteuid() == 0:
    os.seteuid(65534)
cache = DiskCache(sys.argv[1], max_bytes=150)
assert cache.get("key") == b"value"
mapped = cache.map("key")
cache.put("new", b"value")
assert cache.get("new") is None
assert cache.fetch("new", lambda: b"made") == b"made"
"""


ANOTHER_USER: Final = """
import logging, os, sys
from penstock.errors import BadConfig
from penstock.cache.disk import DiskCache
os.umask(0o022)
os.seteuid(int(sys.argv[2]))
logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(message)s")
try:
    cache = DiskCache(sys.argv[1], max_bytes=2000)
except BadConfig as error:
    raise SystemExit(print(error.why))
for name in sys.argv[3:]:
    cache.put(name, bytes(100))
print([name for name in sys.argv[3:] if cache.get(name)])
"""


def put_as(user: int, folder: Path, *names: str, secret: str = "0" * 16) -> str:
    command = [sys.executable, "-c", ANOTHER_USER, str(folder), str(user), *names]
    environment = {**os.environ, "PENSTOCK_CACHE_KEY": secret}
    return subprocess.check_output(command, timeout=60, text=True, env=environment).strip()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be several users")
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_users_share_a_folder_that_they_may_write(mode: int) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "cache").mkdir()
        (folder / "cache").chmod(mode)
        names = [str(k) for k in range(60)]
        assert put_as(65534, folder / "cache", "a", "b") == "['a', 'b']"
        assert put_as(1000, folder / "cache", "c", "a") == "['c', 'a']"
        assert put_as(1000, folder / "cache", secret="") == (
            f"others may write there (its permissions are {mode:o}): without a key, whoever writes "
            "there decides what is trained on"
        )
        if mode == 0o777:  # where one may not remove the files of others, theirs stay
            assert len(put_as(1000, folder / "cache", *names)) > 40
            assert put_as(65534, folder / "cache", "d") == "['d']"
        assert held(folder / "cache") <= 2000
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be several users")
def test_a_folder_of_another_user_is_told_once() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        (folder / "cache").mkdir()
        os.chown(folder / "cache", 65534, 65534)
        assert put_as(65534, folder / "cache", "a") == "['a']"
        told, found = put_as(1000, folder / "cache", "b", "c", "a").splitlines()
        assert told.startswith(f"penstock keeps nothing in its cache {folder / 'cache'}: ")
        assert "chmod g+rwxs" in told
        assert found == "[]", "what is not signed is not believed"
        assert put_as(1000, folder / "cache", secret="").startswith("it belongs to another user")
    finally:
        shutil.rmtree(folder)


def test_a_folder_that_may_only_be_read() -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        DiskCache(folder / "cache").put("key", b"value")
        for path in (folder, folder / "cache", *(folder / "cache").iterdir()):
            path.chmod(0o555)
        subprocess.run([sys.executable, "-c", READ_ONLY, folder / "cache"], check=True, timeout=60)
        assert DiskCache(folder / "cache").get("key") == b"value"
    finally:
        for path in (folder, folder / "cache", *(folder / "cache").iterdir()):
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_other_files_beside_it_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "datasets" / "a").mkdir(parents=True)
    (tmp_path / "datasets" / "a" / "shard").write_bytes(bytes(5000))
    cache = DiskCache(tmp_path, max_bytes=1000)
    for k in range(20):
        cache.put(f"{k}", bytes(100))
    assert cache.get("19") == bytes(100)
    assert (tmp_path / "datasets" / "a" / "shard").read_bytes() == bytes(5000)


class CacheMachine(RuleBasedStateMachine):
    """Any calls by two users of one folder, against a dictionary: a value is right or not there."""

    LIMIT: ClassVar = 1000

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.caches = [DiskCache(self.folder / "c", self.LIMIT) for _ in range(2)]
        self.put_last: dict[str, set[bytes]] = {}
        self.mapped: list[tuple[str, memoryview, bytes]] = []

    keys = st.sampled_from("abcdefgh")
    values = st.builds(
        lambda size, fill: bytes([fill]) * size, st.integers(0, 600), st.integers(0, 3)
    )
    users = st.integers(0, 1)

    def in_use(self, key: str) -> bool:
        return any(key == other for other, _, _ in self.mapped)

    @rule(user=users, key=keys, value=values)
    def put(self, user: int, key: str, value: bytes) -> None:
        before = self.put_last.get(key, set())
        self.caches[user].put(key, value)
        fits = len(value) + 16 + 8 <= self.LIMIT
        certain = fits and not self.mapped  # then there is room, and nobody uses the old one
        self.put_last[key] = {value} if certain else before | {value}
        if certain:
            assert self.caches[1 - user].get(key) == value

    @rule(user=users, key=keys)
    def get(self, user: int, key: str) -> None:
        assert self.caches[user].get(key) in {None, *self.put_last.get(key, set())}

    @rule(user=users, key=keys, value=values)
    def fetch(self, user: int, key: str, value: bytes) -> None:
        found = bytes(self.caches[user].fetch(key, lambda: value))
        assert found in {value, *self.put_last.get(key, set())}
        self.put_last.setdefault(key, set()).add(value)

    @rule(user=users, key=keys)
    def map(self, user: int, key: str) -> None:
        found = self.caches[user].map(key)
        assert found is None or bytes(found) in self.put_last[key]
        if found is not None:
            self.mapped.append((key, found, bytes(found)))

    @rule()
    def let_go(self) -> None:
        self.mapped = self.mapped[1:]

    @rule(key=keys, at=st.integers(0, 100))
    def damage(self, key: str, at: int) -> None:
        path = Path(self.caches[0]._path(key))
        if path.exists() and not self.in_use(key):
            data = path.read_bytes()
            at %= len(data)
            path.write_bytes(data[:at] + b"?" + data[at + 1 :] if at % 2 else data[:at])

    @rule(user=users)
    def begin_anew(self, user: int) -> None:
        self.caches[user] = DiskCache(self.folder / "c", self.LIMIT)

    @rule()
    def remove_folder(self) -> None:
        if not self.mapped:
            shutil.rmtree(self.folder / "c", ignore_errors=True)

    @invariant()
    def limit_is_held(self) -> None:
        assert held(self.folder) <= self.LIMIT

    @invariant()
    def what_is_mapped_stays(self) -> None:
        for key, found, value in self.mapped:
            assert found == value
            assert Path(self.caches[0]._path(key)).exists()

    def teardown(self) -> None:
        self.mapped.clear()
        shutil.rmtree(self.folder)


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase


# Tokens of a column.


def made(words: dict[bytes, int]) -> dict[str, Any]:
    learned = learn_merges(PretokenCounts.of(words), 300, ["<|endoftext|>"])
    return json.loads(json.dumps(as_json(learned, PATTERNS["cl100k"])))  # type: ignore[no-any-return]


WORDS: Final = {b"the": 5, b" cat": 3, b" sat": 2}
ROWS: Final = ["the cat", None, "", "sat<|endoftext|>", "the the", None, "漢字"] * 5


class Counted(DiskCache):
    """Counts hits and misses."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.seen: Counter[str] = Counter()

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        self.seen["miss" if value is None else "hit"] += 1
        return value


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "BATCH_BYTES", 30)


@pytest.mark.usefixtures("small_batches")
def test_tokens_are_the_same_cold_warm_and_corrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(made(WORDS))
    column = pa.array(ROWS)
    expected = tokenizer.encode_column(column)
    cache = Counted(tmp_path)
    assert tokenizer.encode_column(column, cache=cache).equals(expected)
    misses = cache.seen["miss"]
    assert misses >= len(files_of(tmp_path)) > 3
    for path in files_of(tmp_path)[::2]:
        path.write_bytes(path.read_bytes()[:-3])
    assert tokenizer.encode_column(column, cache=cache).equals(expected)
    with monkeypatch.context() as patch:
        patch.setattr(Gigatoken, "encode_rows", None)  # warm, nothing is encoded
        assert tokenizer.encode_column(column, cache=Counted(tmp_path)).equals(expected)
        large = tokenizer.encode_column(column.cast(pa.large_string()), cache=Counted(tmp_path))
        assert large.equals(expected)


def test_every_difference_has_its_own_key(tmp_path: Path) -> None:
    one, other = Tokenizer(made(WORDS)), Tokenizer(made({b"sat": 5, b" th": 2}))
    cache = Counted(tmp_path)
    columns = [
        pa.array(rows, pa.string())
        for rows in (
            ["ab", "c"], ["a", "bc"], ["abc"], ["abc", ""], ["", "abc"], ["abc", None],
            [None, "abc"], ["the cat<|endoftext|>"], [""], [None], ["", None], [None, ""],
        )
    ]  # fmt: skip
    allowed: tuple[set[str], ...] = (set(), {"<|endoftext|>"})
    for _ in range(2):
        for tokenizer in (one, other):
            for column in columns:
                for special in allowed:
                    found = tokenizer.encode_column(column, allowed_special=special, cache=cache)
                    assert found.equals(tokenizer.encode_column(column, allowed_special=special))
    asked = 2 * len(columns) * len(allowed)
    assert cache.seen == {"miss": asked, "hit": asked}


class Liar:
    """A cache of another make that gives anything."""

    def __init__(self, value: bytes | None) -> None:
        self.value = value

    def get(self, key: str) -> bytes | None:
        return self.value

    def put(self, key: str, value: bytes) -> None:
        pass

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        return self.value or b""


def streamed(*columns: Any) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch(list(columns), [f"{k}" for k in range(len(columns))])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    "value",
    [
        b"", b"junk", bytes(1000), b"\xff" * 1000, streamed(), streamed(pa.array([1])),
        streamed(pa.array([[1]], pa.list_(pa.uint32()))),
        streamed(pa.array([[1], [2]], pa.list_(pa.uint16()))),
        streamed(pa.array([[1]], pa.list_(pa.uint16())))[:-20],
        streamed(pa.array([[1]], pa.list_(pa.uint16())))[:100],
    ],
)  # fmt: skip
def test_a_cache_is_not_believed(value: bytes) -> None:
    tokenizer = Tokenizer(made(WORDS))
    column = pa.array(["the cat"])
    expected = tokenizer.encode_column(column)
    assert tokenizer.encode_column(column, cache=Liar(value)).equals(expected)


def lists(start: int, end: int, highest: int = 1) -> bytes:
    """A stream of one list of 4,660 ids, with these offsets in place of its own."""
    good = streamed(pa.array([[highest] * 0x1234], pa.list_(pa.uint16())))
    at = bytes(4) + (0x1234).to_bytes(4, "little")
    before, _, after = good.rpartition(at)  # the metadata says the size too
    return before + b"".join(k.to_bytes(4, "little", signed=True) for k in (start, end)) + after


@pytest.mark.parametrize(
    "value",
    [
        lists(0, 1 << 30), lists(0, -5), lists(-4, 2), lists(2, 0), lists(0, 0x1234, 60_000),
        lists(1 << 30, (1 << 30) + 5),
        streamed(pa.array([[1, None]], pa.list_(pa.uint16()))),
        streamed(pa.array([None], pa.list_(pa.uint16()))),
    ],
)  # fmt: skip
def test_forged_tokens_are_a_miss(value: bytes) -> None:
    """Offsets that leave the values crash whoever follows them; ids have a highest one."""
    tokenizer = Tokenizer(made(WORDS))
    column = pa.array(["the cat"])
    expected = tokenizer.encode_column(column)
    found = tokenizer.encode_column(column, cache=Liar(value))
    assert found.equals(expected)
    assert found.to_pylist() == expected.to_pylist()


def test_files_of_others_are_not_evicted(tmp_path: Path) -> None:
    theirs = tmp_path / "de" / "corpus.jsonl"
    theirs.parent.mkdir()
    theirs.write_bytes(b"x" * 5000)
    cache = DiskCache(tmp_path, 4000)
    for k in range(20):
        cache.put(f"key {k}", bytes(1000))
    assert theirs.read_bytes() == b"x" * 5000
