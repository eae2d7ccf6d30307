"""Caches in a real Redis and in a bucket of a real S3 server: time may be lost, bytes never."""

import functools
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import plugins
from penstock.cache import open as caches
from penstock.cache.disk import Cache, DiskCache, sign
from penstock.cache.open import (
    BucketCache,
    RedisCache,
    is_address,
    open_cache,
    sealed,
    unsealed,
)
from penstock.errors import BadConfig
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.writer import ShardConfig
from penstock.supply.mixed_shards import StreamingMixedShardDataset
from penstock.supply.pretrain import PretrainDataLoader
from penstock.supply.sources.dataset import DatasetSource, SourceConfig
from penstock.tokenize.tokenizer import Tokenizer
from services.servers import start_moto
from store.servers import free_port, request, start_redis
from supply.datasets import GrowingDataset
from supply.nested import nested

SECRET: Final = b"a secret of the tests"
SIZES: Final = (0, 1, 255, 256, 5_000, 300_000)


@functools.cache
def value_of(key: int) -> bytes:
    """Known from the key; every second one can be compressed."""
    chance = random.Random(key)
    size = chance.choice(SIZES)
    return chance.randbytes(size) if key % 2 else (chance.randbytes(50) * (size // 50 + 1))[:size]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "REDIS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PENSTOCK_CACHE_KEY", SECRET.decode())


# What is stored.


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec="utf-8")), st.binary() | st.builds(bytes, st.integers(0, 10**6)))
def test_what_was_sealed_is_unsealed(key: str, value: bytes) -> None:
    data = sealed(key, value, SECRET)
    assert unsealed(key, data, SECRET) == value
    assert unsealed(key + "x", data, SECRET) is None
    assert len(data) <= len(value) + 41


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([b"", b"abc", bytes(5000), random.Random(1).randbytes(5000)]))
def test_a_sealed_value_that_was_changed_is_none(data: st.DataObject, value: bytes) -> None:
    good = sealed("key", value, SECRET)
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (flipped, good[:at], good + b"\0", bytes(32) + good[32:]):
        assert unsealed("key", bad, SECRET) in (None, value)
    assert unsealed("key", flipped, SECRET) is None


def test_compression_where_it_pays() -> None:
    noise, zeros = random.Random(1).randbytes(1 << 20), bytes(1 << 20)
    for size in (0, 255, 256, 5_000, 1 << 18, 1 << 20):
        assert len(sealed("key", noise[:size], SECRET)) == size + 41
    assert len(sealed("key", zeros, SECRET)) < 1000
    tokens = b"".join(
        k.to_bytes(2, "little") for k in random.Random(1).choices(range(3000), k=10**5)
    )
    assert len(sealed("key", tokens, SECRET)) < 0.9 * len(tokens)
    half = noise[: 1 << 19] + bytes(1 << 19)
    assert len(sealed("key", half, SECRET)) < 0.6 * len(half)
    for value in (noise, zeros, tokens, half):
        assert unsealed("key", sealed("key", value, SECRET), SECRET) == value


def test_a_size_that_is_a_lie_takes_no_memory() -> None:
    for size in (caches._MAX_VALUE_BYTES + 1, 1 << 40, (1 << 64) - 1):
        about, body = b"\1" + size.to_bytes(8, "little"), sealed("key", bytes(5000), SECRET)[41:]
        bomb = sign(SECRET, "key", about, body) + about + body
        before = pa.total_allocated_bytes()
        assert unsealed("key", bomb, SECRET) is None
        assert pa.total_allocated_bytes() == before


# Redis.


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A small Redis that evicts; ended by its own process id."""
    server, port = start_redis(
        tmp_path, "--maxmemory", "2500kb", "--maxmemory-policy", "allkeys-lru"
    )
    try:
        yield server, port
    finally:
        server.kill()
        server.wait(10)


def client_of(port: int) -> Any:
    import redis

    return redis.Redis(port=port, socket_timeout=10)


def work(cache: Cache, keys: list[int]) -> int:
    """Fetch values that are known; how many had to be made."""
    made: list[int] = []
    for key in keys:
        value = value_of(key)

        def make(key: int = key, value: bytes = value) -> bytes:
            made.append(key)
            return value

        assert cache.fetch(f"{key}", make) == value
        assert cache.get(f"{key}") in (value, None)
    return len(made)


def test_redis_keeps_values(redis_server: tuple[subprocess.Popen[bytes], int]) -> None:
    _, port = redis_server
    cache = RedisCache(f"redis://127.0.0.1:{port}/0")
    assert work(cache, list(range(20))) == 20
    assert work(cache, list(range(20))) == 0
    again = cache.__reduce__()
    other = again[0](*again[1])
    assert isinstance(other, RedisCache)
    assert other.get("3") == value_of(3)
    client_of(port).flushall()
    assert work(cache, list(range(20))) == 20


def test_of_threads_one_makes_it(redis_server: tuple[subprocess.Popen[bytes], int]) -> None:
    cache = RedisCache(f"redis://127.0.0.1:{redis_server[1]}/0")
    made: list[int] = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.2)
        if len(made) == 1:
            raise ZeroDivisionError  # then the next makes it
        return b"value"

    def fetch(_: int) -> bytes:
        try:
            return cache.fetch("key", make)
        except ZeroDivisionError:
            return b"failed"

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(fetch, range(8)))
    assert sorted(found) == [b"failed"] + [b"value"] * 7
    assert len(made) == 2


def test_redis_changed_behind_our_back(redis_server: tuple[subprocess.Popen[bytes], int]) -> None:
    """Evicted, deleted, cut, flipped, swapped, of another type, flushed: it is a miss."""
    _, port = redis_server
    cache, chance = RedisCache(f"redis://127.0.0.1:{port}/0"), random.Random(2)
    client = client_of(port)
    made = 0
    for _ in range(200):
        made += work(cache, [chance.randrange(200) for _ in range(3)])
        names = [name for name in client.keys("penstock:*") if client.type(name) == b"string"]
        name, other = chance.choice(names), chance.choice(names)
        data = client.get(name) or b"?"
        does = chance.choice(("delete", "cut", "flip", "swap", "type", "junk", "flush"))
        if does == "flush" and chance.random() < 0.1:
            client.flushall()
        elif does == "delete":
            client.delete(name)
        elif does == "cut":
            client.set(name, data[: chance.randrange(len(data))])
        elif does == "flip":
            at = chance.randrange(len(data))
            client.set(name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif does == "swap" and other != name:
            client.copy(other, name, replace=True)
        elif does == "type":
            client.delete(name)
            client.rpush(name, b"junk")
        elif does == "junk":
            client.set(name, chance.randbytes(chance.randrange(100)))
    assert made > 100
    assert client.info("stats")["evicted_keys"] > 0, "the server was never full"
    assert client.info("memory")["used_memory"] < 8 << 20


def test_redis_that_takes_no_more_still_gives(tmp_path: Path, caplog: Any) -> None:
    options = ("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    server, port = start_redis(tmp_path, *options)
    try:
        cache = RedisCache(f"redis://127.0.0.1:{port}/0")
        cache.put("first", b"value")
        for k in range(20):
            cache.put(f"{k}", random.Random(k).randbytes(300_000))
        assert cache.get("19") is None
        assert cache.get("first") == b"value"
        assert len(warnings_of(caplog)) == 1
        assert "OutOfMemoryError" in warnings_of(caplog)[0]
    finally:
        server.kill()
        server.wait(10)


def test_large_values_are_split(
    redis_server: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_PART_BYTES", 1000)
    _, port = redis_server
    cache = RedisCache(f"redis://127.0.0.1:{port}/0")
    for size in (958, 959, 960, 1959, 50_000):
        value = random.Random(size).randbytes(size)
        cache.put("key", value)
        assert cache.get("key") == value
        cache.put("key", value[:-1])  # the end of a longer one is left behind
        assert cache.get("key") == value[:-1]
    client = client_of(port)
    assert max(client.strlen(name) for name in client.keys("*")) == 1000
    cache.put("key", value)
    client.delete(sorted(client.keys("*"))[3])
    assert cache.get("key") is None
    monkeypatch.setattr(caches, "_MAX_VALUE_BYTES", 10_000)
    cache.put("other", bytes(10_001))
    assert cache.get("other") is None


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_redis_killed_and_back(
    redis_server: tuple[subprocess.Popen[bytes], int], tmp_path: Path,
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server, port = redis_server
    cache = RedisCache(f"redis://me:canary@127.0.0.1:{port}/0")
    assert cache.get("0") is None  # no such user: told, not raised
    cache = RedisCache(f"redis://127.0.0.1:{port}/0")
    work(cache, list(range(10)))
    server.kill()
    server.wait(10)
    began = time.monotonic()
    assert work(cache, list(range(1000))) == 1000
    assert time.monotonic() - began < 5
    monkeypatch.setattr(caches, "_PAUSE_S", (0.1, 0.2))
    cache = RedisCache(f"redis://127.0.0.1:{port}/0")
    assert work(cache, [1, 2]) == 2
    server, _ = start_redis(tmp_path, port=port)
    try:
        time.sleep(0.3)
        work(cache, [1, 2])
        assert work(cache, [1, 2]) == 0
    finally:
        server.kill()
        server.wait(10)
    told = warnings_of(caplog)
    assert len(told) == 3, "one for each cache"
    assert all(line.startswith("penstock does without its cache redis://") for line in told)
    assert not any("canary" in line for line in told)


def test_redis_frozen_costs_a_stated_time(
    redis_server: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, port = redis_server
    cache = RedisCache(f"redis://127.0.0.1:{port}/0", timeout_s=0.5)
    work(cache, list(range(10)))
    server.send_signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        assert work(cache, list(range(200))) == 200
        assert 0.4 < time.monotonic() - began < 1.7  # one question, asked once
        assert RedisCache(f"redis://127.0.0.1:{port}/0", timeout_s=0.3).get("1") is None
    finally:
        server.send_signal(signal.SIGCONT)
    monkeypatch.setattr(cache, "_paused_until", 0.0)
    for key in (9, 1, 2):  # answers to what was asked before are not taken for those of now
        assert cache.get(f"{key}") in (value_of(key), None)


def test_credentials_of_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    server, port = start_redis(tmp_path, "--requirepass", "canary")
    try:
        url = f"redis://127.0.0.1:{port}/0"
        assert work(RedisCache(url), [1]) == 1
        assert RedisCache(url).get("1") is None
        for address, variables in (
            (f"redis://:canary@127.0.0.1:{port}/0", {}),
            (url, {"REDIS_PASSWORD": "canary"}),
            (url, {"REDIS_USERNAME": "default", "REDIS_PASSWORD": "canary"}),
            ("redis://", {"REDIS_URL": f"redis://:canary@127.0.0.1:{port}/0"}),
        ):
            with monkeypatch.context() as patch:
                for name, value in variables.items():
                    patch.setenv(name, value)
                cache = RedisCache(address)
                cache.put("key", address.encode())
                assert cache.get("key") == address.encode()
    finally:
        server.kill()
        server.wait(10)
    assert "canary" not in caplog.text
    for wrong in (
        "redis://:canary@127.0.0.1:port/0",
        "redis://:canary@127.0.0.1/0?socket_timeout=x",
    ):
        with pytest.raises(BadConfig, match="is not an address of Redis") as caught:
            RedisCache(wrong)
        assert "canary" not in str(caught.value)
        assert caught.value.do == "write redis://host:6379/0, or rediss:// for TLS"


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(BadConfig, match="needs the client of Redis") as caught:
        open_cache("redis://:canary@127.0.0.1/0")
    assert caught.value.do == "pip install 'penstock[redis]'"
    assert "canary" not in str(caught.value)


# A bucket.


def use_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "canary",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_bucket_changed_behind_our_back(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import from_url

    use_s3(monkeypatch, moto_port)
    request("PUT", f"http://127.0.0.1:{moto_port}/caches")
    cache, chance = BucketCache("s3://caches/some/where/"), random.Random(3)
    bucket = from_url("s3://caches/some/where")
    assert work(cache, list(range(20))) == 20
    assert work(cache, list(range(20))) == 0
    again = cache.__reduce__()
    assert again[0](*again[1]).get("3") == value_of(3)
    for _ in range(20):
        names = [entry["path"] for page in obstore.list(bucket) for entry in page]
        name = chance.choice(names)
        data = bytes(obstore.get(bucket, name).bytes())
        does = chance.choice(("delete", "cut", "flip", "swap", "junk"))
        if does == "delete":
            obstore.delete(bucket, name)
        elif does == "cut":
            obstore.put(bucket, name, data[: chance.randrange(len(data))])
        elif does == "flip":
            at = chance.randrange(len(data))
            obstore.put(bucket, name, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        elif does == "swap":
            obstore.copy(bucket, names[names.index(name) - 1], name)
        else:
            obstore.put(bucket, name, chance.randbytes(50))
        work(cache, [chance.randrange(20) for _ in range(3)])
    assert work(cache, list(range(20))) <= 20
    assert work(cache, list(range(20))) == 0


def test_a_bucket_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = start_moto()
    (child,) = psutil.Process(server.process.pid).children()
    try:
        use_s3(monkeypatch, server.port)
        request("PUT", f"http://127.0.0.1:{server.port}/caches")
        cache = BucketCache("s3://caches/a", timeout_s=1.0)
        work(cache, list(range(5)))
        assert work(cache, list(range(5))) == 0
        child.suspend()
        began = time.monotonic()
        assert work(cache, list(range(200))) == 200
        assert 0.9 < time.monotonic() - began < 4
    finally:
        child.resume()
        server.stop()
    cache = BucketCache("s3://caches/a", timeout_s=1.0)
    began = time.monotonic()
    assert work(cache, list(range(200))) == 200
    assert time.monotonic() - began < 4
    told = warnings_of(caplog)
    assert len(told) == 2
    assert all(line.startswith("penstock does without its cache s3://caches/a") for line in told)
    assert "canary" not in caplog.text


def test_a_bucket_that_does_not_exist(moto_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, moto_port)
    assert work(BucketCache("s3://no-such-bucket/a"), [1, 2]) == 2
    with pytest.raises(BadConfig, match="cannot be opened") as caught:
        BucketCache("s3://")
    assert "credentials in the environment" in caught.value.do


FORKED: Final = """
import os, sys
from penstock.cache.open import open_cache
cache = open_cache("s3://caches/forked")
cache.put("key", b"value")
assert cache.get("key") == b"value"
if os.fork() == 0:
    for found in (cache, open_cache("s3://caches/forked")):
        assert found.get("key") is None
        assert found.fetch("key", lambda: b"made") == b"made"
    os._exit(7)
_, status = os.wait()
assert cache.get("key") == b"value"
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_process_does_without_a_bucket(
    moto_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads of its client stayed behind: the first question would never be answered."""
    use_s3(monkeypatch, moto_port)
    request("PUT", f"http://127.0.0.1:{moto_port}/caches")
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 7, done.stderr
    assert "clients of buckets do not work in a forked process" in done.stderr


# Addresses.


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, free_port())
    for url in (tmp_path / "a", str(tmp_path / "a"), f"file://{tmp_path}/a"):
        cache = open_cache(url, max_bytes=1000)
        assert isinstance(cache, DiskCache)
        cache.put("key", b"value")
        assert (tmp_path / "a").is_dir()
        assert cache.get("key") == b"value"
        assert not is_address(url)
        cache.put("large", bytes(1000))
        assert cache.get("large") is None
    for url, kind in (
        ("redis://127.0.0.1:1/0", RedisCache),
        ("rediss://127.0.0.1:1/0", RedisCache),
        ("s3://bucket/prefix", BucketCache),
    ):
        assert is_address(url)
        assert type(open_cache(url)) is kind
    with pytest.raises(BadConfig, match="there is no cache called 'rediz'") as caught:
        open_cache("rediz://127.0.0.1")
    assert "did you mean redis?" in caught.value.do


class Dictionary:
    """A cache of others' making."""

    def __init__(self, url: str, max_bytes: int) -> None:
        self.url, self.max_bytes = url, max_bytes
        self.values: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        return self.values.setdefault(key, make())


def test_others_bring_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._known, "cache", dict(plugins._known["cache"]))
    plugins.register("cache", "dictionary")(Dictionary)
    cache = open_cache("dictionary://here", 7)
    assert isinstance(cache, Dictionary)
    assert (cache.url, cache.max_bytes) == ("dictionary://here", 7)
    assert {"az", "file", "gs", "redis", "rediss", "s3"} <= set(plugins.names("cache"))


# Those who use them.


def batches_of(folder: Path, tokenizer: Path, **options: Any) -> list[bytes]:
    with PretrainDataLoader(
        str(folder), tokenizer, **nested(chunk_size=64, batch_size=4, **options)
    ) as found:
        return [batch.input_ids.tobytes() for batch in found]


@pytest.mark.parametrize("kind", ["disk", "file", "redis", "s3"])
@pytest.mark.parametrize("tokens", [False, True])
def test_loaders_give_the_same_batches_with_any_cache(
    redis_server: tuple[subprocess.Popen[bytes], int], moto_port: int, tokenizer_folder: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, tokens: bool,
) -> None:  # fmt: skip
    use_s3(monkeypatch, moto_port)
    request("PUT", f"http://127.0.0.1:{moto_port}/loader-{str(tokens).lower()}")
    url = {
        "disk": str(tmp_path / "cache"),
        "file": f"file://{tmp_path}/cache",
        "redis": f"redis://127.0.0.1:{redis_server[1]}/0",
        "s3": f"s3://loader-{str(tokens).lower()}/cache",
    }[kind]
    lines = [json.dumps({"text": f"the count of record {k} is {k * k}"}) for k in range(400)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    config, follow = ShardConfig(rows_per_file=100, val_fraction=0.0), FollowConfig(complete=True)
    tokenizer = Tokenizer.load(tokenizer_folder)
    shard_jsonl(
        [tmp_path / "a.jsonl"], tmp_path / "d", config, follow, tokenizer=tokenizer, tokens=tokens
    )
    expected = batches_of(tmp_path / "d", tokenizer_folder)
    make, made = DatasetSource._made, []

    def counted(self: DatasetSource, file: Any) -> bytes:
        made.append(file.name)
        return make(self, file)

    monkeypatch.setattr(DatasetSource, "_made", counted)
    each = 0 if tokens else 4  # what lies ready on this host is mapped where it is
    assert batches_of(tmp_path / "d", tokenizer_folder, cache_dir=url) == expected
    assert len(made) == each
    assert batches_of(tmp_path / "d", tokenizer_folder, cache_dir=url) == expected
    assert len(made) == each
    if kind == "redis":
        redis_server[0].kill()
        assert batches_of(tmp_path / "d", tokenizer_folder, cache_dir=url) == expected
        assert len(made) >= 2 * each


def test_examples_of_a_bucket_are_read_once(
    moto_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second pass, and other ranks on the same disk, take the shards from the cache."""
    use_s3(monkeypatch, moto_port)
    request("PUT", f"http://127.0.0.1:{moto_port}/examples")
    lines = [json.dumps({"text": f"record {k} " + "x" * 2000}) for k in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    config = ShardConfig(rows_per_file=50, val_fraction=0.0)
    shard_jsonl([tmp_path / "a.jsonl"], "s3://examples/d", config, FollowConfig(complete=True))
    read, names = DatasetSource._read, []

    def counted(self: DatasetSource, name: str) -> bytes:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(DatasetSource, "_read", counted)
    found = []
    for _ in range(2):
        dataset = StreamingMixedShardDataset(
            ["s3://examples/d"],
            ["all"],
            **nested(mixed=True, random_seed=1, cache_dir=str(tmp_path / "cache")),
        )
        found.append([example["text"] for example in dataset])
        assert sorted(found[-1]) == sorted(json.loads(line)["text"] for line in lines)
    assert found[0] == found[1]
    assert len(names) == 4
    plain = StreamingMixedShardDataset(["s3://examples/d"], ["all"], random_seed=1)
    assert [example["text"] for example in plain] == found[0]
    assert len(names) > 4


def test_token_files_of_a_bucket_are_read_once_and_planned_with_by_their_ends(
    moto_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_s3(monkeypatch, moto_port)
    request("PUT", f"http://127.0.0.1:{moto_port}/tokens")
    documents = [[k % 60_000] * 4000 for k in range(150)]
    made = [GrowingDataset(where) for where in ("s3://tokens/d", tmp_path / "d")]
    for dataset in made:
        for first in (0, 50, 100):
            dataset.add(documents[first : first + 50])
        dataset.seal()
    remote, local = (dataset.url for dataset in made)
    read, names = DatasetSource._read, []

    def counted(self: DatasetSource, name: str) -> bytes:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(DatasetSource, "_read", counted)
    sources = [DatasetSource(url, SourceConfig(banned=[7])) for url in (remote, local)]
    for shard in range(3):
        lengths = [source.lengths(shard).tolist() for source in sources]
        assert lengths[0] == lengths[1]
    assert names == []
    expected = [batch.input_ids.tolist() for batch in PretrainDataLoader(local, None, 512)]
    for cache, times in ((None, 1), (str(tmp_path / "cache"), 2), (str(tmp_path / "cache"), 2)):
        with PretrainDataLoader(remote, None, 512, **nested(cache_dir=cache)) as loader:
            assert [batch.input_ids.tolist() for batch in loader] == expected
        assert sorted(names) == sorted(
            times * [f"shard_0000{shard}.tokens.arrow" for shard in range(3)]
        )


def test_a_raw_file_beside_a_remote_cache_goes_to_the_disk(
    redis_server: tuple[subprocess.Popen[bytes], int], tokenizer_folder: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("the count of a record is a value of an index. " * 100)
    url = f"redis://127.0.0.1:{redis_server[1]}/0"
    assert batches_of(tmp_path / "a.txt", tokenizer_folder, cache_dir=url)
    assert (tmp_path / "home" / ".cache" / "penstock" / "datasets").is_dir()
    assert {path.name for path in tmp_path.iterdir()} <= {"a.txt", "home", "dump.rdb"}


def test_the_tokenizer_takes_an_address(
    redis_server: tuple[subprocess.Popen[bytes], int], tokenizer_folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    column = pa.array(["the count", None, "a record"])
    expected = tokenizer.encode_column(column)
    for address in (tmp_path / "a", str(tmp_path / "b"), f"redis://127.0.0.1:{redis_server[1]}/0"):
        for _ in range(2):
            assert tokenizer.encode_column(column, cache=address).equals(expected)
    assert len(client_of(redis_server[1]).keys("penstock:*")) == 1
    assert all(any((tmp_path / name).glob("??/*")) for name in "ab")


def test_an_address_of_redis_that_asks_for_text(
    redis_server: tuple[subprocess.Popen[bytes], int],
) -> None:
    _, port = redis_server
    cache = open_cache(f"redis://127.0.0.1:{port}/0?decode_responses=True")
    cache.put("text", b"\xff\x00 no text")
    assert cache.get("text") == b"\xff\x00 no text"


def test_limits_as_people_type_them(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, max_bytes="1KB")
    cache.put("small", bytes(900))
    cache.put("large", bytes(1020))
    assert cache.get("small") == bytes(900)
    assert cache.get("large") is None
    with pytest.raises(BadConfig, match="max_bytes is '5 apples'") as caught:
        open_cache(tmp_path, max_bytes="5 apples")
    assert caught.value.do == "write it as 64MB or 1GB"
    with pytest.raises(BadConfig, match=r"max_bytes is 1\.5"):
        open_cache(tmp_path, max_bytes=1.5)  # type: ignore[arg-type]


def test_a_cache_at_an_address_of_files(tmp_path: Path) -> None:
    open_cache(f"file://localhost{tmp_path}/a%20b").put("key", b"value")
    assert open_cache(tmp_path / "a b").get("key") == b"value"
