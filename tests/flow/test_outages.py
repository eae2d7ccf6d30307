"""An S3 server that is away for a while: nothing is lost, nobody fails, everything is exact.

In:    push, pull, training, sharding and reading of raw objects on one server, at the same time;
       an outage at a request drawn by a seed: connections that stand are cut, new ones are refused
Out:   the same mirrors, batches and shards as without it, and no error
Keeps: real timeouts and pauses

make check: outages of 1 s and 8 s. make faults: 1, 10 and 50 s, at five moments each.
"""

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.ingest.open import list_objects, open_ranges
from penstock.mirror.push_pull import pull, push
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.writer import ShardConfig
from penstock.store.bucket import BucketStore
from penstock.store.log import Log
from penstock.stream.plan import PlanConfig
from penstock.supply.pretrain import PretrainDataLoader
from services import servers
from services.proxy import Proxy
from services.servers import Cloud, clouds, use
from supply.datasets import made_dataset

from .mirror import BucketView, FolderView, Template, wrong_end

CONFIG = ShardConfig(rows_per_file=12, val_fraction=0.2, bytes_per_file=1 << 24)
FOLLOW = FollowConfig(complete=True, threads=1, max_rejects=0.5)


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    server = servers.start_light()
    try:
        yield clouds()["light"](server)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    folder = tmp_path_factory.mktemp("outage") / "made"
    return Template.make(folder, documents=90, text_bytes=1000, rows_per_file=12)


class Outage:
    """Nobody listens for `seconds`, from the n-th request on."""

    def __init__(self, proxy: Proxy, nth: int, seconds: float) -> None:
        self._proxy, self._nth, self._seconds = proxy, nth, seconds
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._refuse)
        proxy.before = self._count

    def _count(self, line: str) -> None:
        with self._lock:
            self._nth -= 1
            begins = self._nth == 0
        if begins:
            self._thread.start()
            time.sleep(0.05)  # this request is cut, too

    def _refuse(self) -> None:
        with self._proxy.refusing():
            time.sleep(self._seconds)

    def join(self) -> None:
        assert self._nth <= 0, "the outage never came"
        self._thread.join(120)


def at_once(*jobs: Callable[[], object]) -> list[str]:
    """Run jobs side by side; what went wrong."""
    errors: list[str] = []

    def run(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive(), "a job hangs"
    return errors


def batches(url: str) -> list[np.ndarray[tuple[int, int], np.dtype[np.int32]]]:
    with PretrainDataLoader(
        url, chunk_size=64, batch_size=8, seed=3, plan=PlanConfig(ramp=True)
    ) as loader:
        return [batch.input_ids.copy() for batch in loader]


def raw_bytes(url: str) -> bytes:
    """An object as ingest reads it, in 30 ranges."""
    ranges = open_ranges(url)
    step = -(-ranges.size // 30)
    data = bytearray(ranges.size)
    for at in range(0, ranges.size, step):
        assert ranges.read_into(at, memoryview(data)[at : at + step]) > 0
    assert [found[:2] for found in list_objects(url, "raw")] == [("raw/in.jsonl", ranges.size)]
    return bytes(data)


def survive(cloud: Cloud, template: Template, folder: Path, seconds: float, seed: int) -> None:
    dataset = made_dataset(folder / "tokens", shards=5, rows=60)
    with pytest.MonkeyPatch.context() as patch, Proxy(cloud.server.port) as proxy:
        use(patch, cloud.environment(proxy.port))
        there, mirror, direct, tokens = (cloud.new_url(name) for name in "abcd")
        raw = cloud.new_url("raw")
        push(template.folder, there)
        push(dataset.url, tokens)
        source = template.folder.with_suffix(".jsonl")
        BucketStore(raw).create("in.jsonl", source.read_bytes())
        read: list[bytes] = []
        expected = batches(dataset.url)
        found: list[np.ndarray[tuple[int, int], np.dtype[np.int32]]] = []
        outage = Outage(proxy, random.Random(seed).randrange(1, 60), seconds)
        errors = at_once(
            lambda: push(template.folder, mirror),
            lambda: pull(there, folder / "back"),
            lambda: found.extend(batches(tokens)),
            lambda: shard_jsonl([source], direct, CONFIG, FOLLOW),
            lambda: read.append(raw_bytes(f"{raw}/in.jsonl")),
        )
        outage.join()
        assert not errors, "\n".join(errors)
        assert read == [source.read_bytes()]
        assert len(found) == len(expected)
        assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))
        assert wrong_end(template, BucketView(cloud, mirror)) == []
        assert wrong_end(template, FolderView(folder / "back")) == []
        local, made = Log.open(template.folder).state, Log.open(direct).state
        assert made.sealed is not None
        assert [file.sha256 for file in made.split("train")] == [
            file.sha256 for file in local.split("train")
        ]


@pytest.mark.parametrize("seconds", [1.0, 8.0])
def test_an_outage_is_waited_out(
    cloud: Cloud, template: Template, tmp_path: Path, seconds: float,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with caplog.at_level(logging.WARNING, "penstock"):
        survive(cloud, template, tmp_path, seconds, seed=int(seconds))
    said = [
        one.getMessage() for one in caplog.records if "has not answered for" in one.getMessage()
    ]
    assert bool(said) == (seconds > 5)


@pytest.mark.faults
@pytest.mark.parametrize("seconds", [1.0, 10.0, 50.0])
@pytest.mark.parametrize("seed", range(5))
def test_outages_at_random_moments(
    cloud: Cloud, template: Template, tmp_path: Path, seconds: float, seed: int
) -> None:
    survive(cloud, template, tmp_path, seconds, seed)
