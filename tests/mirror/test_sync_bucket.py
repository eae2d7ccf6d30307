"""Push and pull with a bucket that refuses, has lost something, or does not answer."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import BadConfig, ShardMismatch, StoreFailed
from penstock.mirror.config import SyncConfig
from penstock.mirror.push_pull import pull, push
from penstock.store.bucket import BucketStore, open_client
from penstock.store.store import open_store
from services.proxy import Proxy
from services.servers import Cloud, Server, clouds

from .test_sync import Producer, contents, make_dataset
from .test_sync_refusals import heard


@pytest.fixture
def cloud(moto: Server) -> Cloud:
    return clouds()["moto"](moto)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        server.settimeout(60)
        yield server


# What no patience mends.


def test_a_bucket_that_is_not_there(tmp_path: Path, url: str) -> None:
    began = time.monotonic()
    with pytest.raises(StoreFailed, match="could not list the bucket") as caught:
        pull("s3://no-such-bucket/prefix", tmp_path / "back")
    assert caught.value.why == "the bucket is not there"
    assert "check its name" in caught.value.do
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("status", [401, 403])
def test_a_bucket_that_may_not_be_listed(
    tmp_path: Path, url: str, proxy: Proxy, status: int
) -> None:
    proxy.plan("answer", "list-type", status=status)
    with pytest.raises(StoreFailed, match="could not list the bucket") as caught:
        pull(url, tmp_path / "back")
    assert str(status) in caught.value.why
    assert "credentials" in caught.value.do


def test_an_object_shorter_than_the_log_says(tmp_path: Path, url: str) -> None:
    producer = Producer(tmp_path / "live")
    name = producer.add(50_000)
    producer.seal()
    push(tmp_path / "live", url)
    store = BucketStore(url)
    for size in (20_000, 0):
        store.remove(name)
        store.create(name, bytes(size))
        began = time.monotonic()
        with pytest.raises(ShardMismatch, match="is not what was written") as caught:
            pull(url, tmp_path / f"back-{size}")
        assert caught.value.why == f"it has {size:,} bytes there, 50,000 were written"
        assert caught.value.where == f"{url}/{name}"
        assert time.monotonic() - began < 20


# What it does.


def test_a_failure_is_told_at_once(tmp_path: Path, url: str, proxy: Proxy) -> None:
    live = make_dataset(tmp_path)
    push(live, url)
    events, said = heard("warn")
    proxy.plan("answer", r"GET .*shard_00001", status=400)
    assert pull(url, tmp_path / "back", None, events).sealed
    assert len(said) == 1
    assert said[0].startswith(f"could not read shard_00001.parquet at {url}: ")
    assert said[0].endswith("; trying again for 300 s at most")


def test_objects_that_a_bucket_has_lost_are_sent_again(
    tmp_path: Path, url: str, proxy: Proxy
) -> None:
    live = make_dataset(tmp_path)
    push(live, url)
    BucketStore(url).remove("shard_00001.parquet")
    BucketStore(url).remove("shard_00002.parquet")
    proxy.seen.clear()
    events, said = heard("warn")
    assert push(live, url, SyncConfig(once=True), events).files == 2
    assert "has lost 2 files" in said[0]
    asked = [line for line in proxy.seen if line.startswith("HEAD") and ".parquet" in line]
    assert asked == []
    assert pull(url, tmp_path / "back").sealed
    assert contents(tmp_path / "back") == contents(live)


# Ctrl-C.


@pytest.mark.parametrize("command", ["push", "pull"])
def test_an_interrupt_while_a_store_does_not_answer(
    tmp_path: Path, cloud: Cloud, silent: socket.socket, command: str
) -> None:
    live = make_dataset(tmp_path)
    store = "s3://bucket/prefix"
    ends = (str(live), store) if command == "push" else (store, str(tmp_path / "back"))
    running = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", command, *ends],
        env={**os.environ, **cloud.environment(silent.getsockname()[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    connection, _ = silent.accept()
    time.sleep(0.5)
    assert running.poll() is None
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert time.monotonic() - began < 4
    assert running.returncode == 130
    assert said.strip() == "stopped by a signal; the same command resumes from here"
    connection.close()


def test_an_interrupt_while_shards_do_not_come(
    tmp_path: Path, cloud: Cloud, url: str, proxy: Proxy
) -> None:
    live = make_dataset(tmp_path)
    push(live, url)
    proxy.plan("freeze", r"GET .*shard_", seconds=60, times=50)
    running = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "pull", url, str(tmp_path / "back")],
        env={**os.environ, **cloud.environment(proxy.port)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 40
    while not proxy.struck:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert time.monotonic() - began < 4
    assert running.returncode == 130
    proxy.faults.clear()
    assert pull(url, tmp_path / "back").sealed
    assert contents(tmp_path / "back") == contents(live)


# Addresses and options.


@pytest.mark.parametrize("mark", ["#", "?", "%", "%20"])
def test_prefixes_that_clients_read_as_something_else(mark: str) -> None:
    with pytest.raises(BadConfig, match="in it") as caught:
        open_store(f"s3://bucket/a{mark}b")
    assert caught.value.do == "choose a prefix without #, ? and %"


def test_connections_are_made_as_the_environment_says(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every client is made with the proxy that the environment names."""
    from penstock.cache.open import BucketCache
    from penstock.ingest import open as opening

    monkeypatch.setenv("PENSTOCK_CACHE_KEY", "a key of some length")

    monkeypatch.setenv("PENSTOCK_CACHE_KEY", "a key of the tests")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_PROXY_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        stores = [BucketStore(url, tries_again=False)._bucket, BucketCache(url)._client]
        opening._bucket.cache_clear()
        stores.append(opening.open_bucket(url)[0])
        opening._bucket.cache_clear()
    for store in stores:
        assert store.client_options["proxy_url"].startswith("http://127.0.0.1:")


def test_the_environment_beats_our_timeouts_and_a_promise_beats_both(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "7s")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "false")
    options = open_client(url).client_options
    assert (options["timeout"], options["allow_http"]) == ("7s", "false")
    assert open_client(url, timeout_s=2).client_options["timeout"] == "2s"
