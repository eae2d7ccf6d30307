"""Caches that others may write: without the key nobody decides what is trained on."""

import os
import pickle
import stat
from pathlib import Path
from typing import Final

import pytest
import xxhash

from penstock import disk
from penstock.cache.disk import DiskCache, find_secret
from penstock.cache.open import BucketCache, RedisCache, is_own, open_cache
from penstock.errors import BadConfig

SECRET: Final = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CACHE_KEY", raising=False)
    monkeypatch.delenv("PENSTOCK_CACHE_KEY_FILE", raising=False)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that all may write, and the key."""
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", SECRET)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    return tmp_path / "shared"


def plant(path: str, data: bytes, mode: int = 0o644) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(data)
    os.chmod(path, mode)


def unsigned(key: str, value: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key.encode() + value) + value


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_directory_that_others_may_write_needs_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setattr(disk, "_is_own_group", lambda number: False)  # it has other members
    with pytest.raises(BadConfig, match="a cache that others may write needs a key") as caught:
        open_cache(folder)
    assert caught.value.where == str(folder)
    assert f"its permissions are {mode:o}" in caught.value.why
    for word in ("PENSTOCK_CACHE_KEY", "PENSTOCK_CACHE_KEY_FILE", "chmod 700"):
        assert word in caught.value.do
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", SECRET)
    for _ in range(2):
        open_cache(folder).put("key", b"value")
        assert open_cache(folder).get("key") == b"value"
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", "another secret of others")
    assert open_cache(folder).get("key") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_a_directory_of_another_user_needs_a_key(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(BadConfig, match="needs a key") as caught:
        open_cache(tmp_path)
    assert "it belongs to another user (number 65534)" in caught.value.why


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "rediss://127.0.0.1:1/0", "s3://b/a"])
def test_servers_need_a_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadConfig, match="needs a key") as caught:
        open_cache(url)
    assert caught.value.why.startswith("a server has other users: ")
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", SECRET)
    assert isinstance(open_cache(url), RedisCache | BucketCache)


def test_a_directory_of_ours_is_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        open_cache(tmp_path / "a" / "cache").put("key", b"value")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "cache").stat().st_mode) == 0o700
    for path in (tmp_path / "a" / "cache").rglob("*"):
        assert not path.stat().st_mode & 0o022
    assert open_cache(tmp_path / "a" / "cache").get("key") == b"value"
    assert is_own(tmp_path / "a" / "cache")
    assert is_own(f"file://{tmp_path}/new")
    assert not is_own("redis://127.0.0.1/0")
    (tmp_path / "a").chmod(0o777)
    assert not is_own(tmp_path / "a")


def test_what_others_made_in_our_place_is_not_read(tmp_path: Path) -> None:
    """A directory may be swapped for another after it was looked at; files tell whose they are."""
    cache = DiskCache(tmp_path / "cache")
    plant(cache._path("key"), unsigned("key", b"value"))
    assert cache.get("key") == b"value"
    os.chmod(cache._path("key"), 0o646)
    assert cache.get("key") is None
    if os.geteuid() == 0:
        os.chmod(cache._path("key"), 0o644)
        os.chown(cache._path("key"), 65534, 65534)
        assert cache.get("key") is None


def test_a_value_without_the_key_is_a_miss(shared: Path) -> None:
    cache = DiskCache(shared)
    value = bytes(2 << 20)
    plant(cache._path("key"), unsigned("key", value), 0o666)
    assert cache.get("key") is None
    assert not os.path.exists(cache._path("key"))
    assert cache.fetch("key", lambda: value) == value
    good = Path(cache._path("key")).read_bytes()
    for forged in (good[:32] + bytes(2 << 20)[:-1] + b"\1", bytes(32) + value, good[32:], b""):
        plant(cache._path("key"), forged, 0o666)
        assert cache.get("key") is None
    plant(cache._path("key"), good)
    assert cache.get("key") == value


def test_a_signed_value_cannot_be_moved_to_another_key(shared: Path) -> None:
    cache = DiskCache(shared)
    cache.put("key", b"value")
    data = Path(cache._path("key")).read_bytes()
    for other, moved in (("kez", data), ("ke", data), ("keyv", data[:32] + data[33:])):
        plant(cache._path(other), moved)
        assert cache.get(other) is None


def test_what_others_could_change_later_is_not_mapped(shared: Path) -> None:
    """It is verified once: a change after that would reach the trainer."""
    cache = DiskCache(shared)
    value = bytes(2 << 20)
    cache.put("key", value)
    assert not os.stat(cache._path("key")).st_mode & 0o022
    mapped = cache.map("key")
    assert mapped is not None
    assert type(mapped.obj).__name__ == "mmap"
    os.chmod(cache._path("key"), 0o666)
    copied = cache.map("key")
    assert copied is not None
    assert type(copied.obj) is bytes
    with open(cache._path("key"), "r+b") as file:
        file.seek(1000)
        file.write(b"poison")
    assert copied == value


@pytest.mark.parametrize("name", [".lock", ".make"])
def test_a_lock_that_is_a_link_is_not_followed(
    shared: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(shared)
    if name == ".make":
        name = f".make-{os.path.basename(cache._path('key'))}"
    precious = shared.parent / "precious"
    precious.write_bytes(b"x")
    (shared / name).symlink_to(precious)
    assert cache.fetch("key", lambda: b"value") == b"value"
    assert precious.read_bytes() == b"x"
    if name == ".lock":
        assert "keeps nothing in its cache" in caplog.text
        assert "it is a symbolic link" in caplog.text
    (shared / name).unlink()
    (shared / name).symlink_to(shared.parent / "new")
    assert cache.fetch("key", lambda: b"value") == b"value"
    assert not (shared.parent / "new").exists()


def test_pipes_are_not_waited_for(shared: Path) -> None:
    cache = DiskCache(shared)
    path = cache._path("key")
    os.mkdir(os.path.dirname(path))
    os.mkfifo(path)
    os.mkfifo(shared / ".lock")
    assert cache.get("key") is None
    assert cache.fetch("key", lambda: b"value") == b"value"
    (shared / ".lock").unlink()
    assert cache.fetch("key", lambda: b"value") == b"value"


def test_a_folder_of_values_that_is_a_link_is_left_alone(shared: Path) -> None:
    cache = DiskCache(shared, max_bytes=1000)
    theirs = shared.parent / "theirs"
    theirs.mkdir()
    names = [os.path.basename(cache._path(f"{k}")) for k in range(20)]
    for name in names:
        (theirs / name).write_bytes(bytes(500))
    for start in {name[:2] for name in names}:
        (shared / start).symlink_to(theirs)
    for k in range(20):
        cache.put(f"{k}", bytes(100))
        cache.put(f"other {k}", bytes(100))
    assert sorted(path.name for path in theirs.iterdir()) == sorted(names)
    assert all((theirs / name).read_bytes() == bytes(500) for name in names)


# The key.


def test_a_key_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    monkeypatch.setenv("PENSTOCK_CACHE_KEY_FILE", str(path))

    def told() -> str:
        with pytest.raises(BadConfig, match="the key of the cache") as caught:
            find_secret("here", "why")
        assert caught.value.do
        assert SECRET not in str(caught.value)
        return str(caught.value)

    assert "No such file" in told()
    path.write_text(f" {SECRET}\n")
    path.chmod(0o642)
    assert "every user of the machine may write it" in told()
    for mode in (0o640, 0o444):  # the second is that of secrets in containers
        path.chmod(mode)
        assert find_secret("here", "why") == SECRET.encode()
    path.chmod(0o640)
    path.write_text("short")
    assert "has 5 bytes" in told()
    path.unlink()
    os.mkfifo(path, 0o600)
    assert "has 0 bytes" in told()
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", SECRET + "!")  # it comes first
    assert find_secret("here", "why") == SECRET.encode() + b"!"


def test_the_key_stays_in_its_process(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1/0")
    for cache in (DiskCache(shared, wait_s=3.0), RedisCache("redis://"), BucketCache("s3://b/a")):
        again = pickle.dumps(cache)
        assert SECRET.encode() not in again
        assert SECRET not in repr(cache)
        assert type(pickle.loads(again)) is type(cache)
