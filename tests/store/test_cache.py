"""A cache is never the truth: what is missing, cut or changed is a miss, and no error."""

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig
from penstock.store.cache import DiskCache
from penstock.tokenize import tokenizer as tokenizer_module
from penstock.tokenize.bpe import learn_merges
from penstock.tokenize.counts import PretokenCounts
from penstock.tokenize.engines import Gigatoken
from penstock.tokenize.files import as_json
from penstock.tokenize.patterns import PATTERNS
from penstock.tokenize.tokenizer import Tokenizer


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def held(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_of(folder))


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

    def no_room(path: Path, data: bytes) -> int:
        with open(path, "wb") as file:
            file.write(data[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", no_room)
    cache.put("new", b"value")
    assert cache.get("new") is None
    assert cache.get("old") == b"value"
    assert len(files_of(tmp_path / "full")) == 1


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
