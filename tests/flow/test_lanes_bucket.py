"""Ranks on hosts of their own, over a bucket: with lanes they download a dataset once, together."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penstock import LoaderRun, PlanConfig, PretrainDataLoader, push
from services.servers import Server, clouds, use
from supply.datasets import GrowingDataset

SHARDS, LANES, ROWS = 64, 64, 64


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards whose counts are a small part of them."""
    made = GrowingDataset(tmp_path_factory.mktemp("lanes") / "data")
    random = np.random.default_rng(0)
    for shard in range(SHARDS):
        sizes = random.integers(5_000, 15_000, 12).tolist()
        made.add([[shard * 12 + k] * size for k, size in enumerate(sizes)])
    made.seal()
    return Path(made.url)


@pytest.fixture
def bucket(dataset: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    cloud = clouds()["moto"](moto)
    use(monkeypatch, cloud.environment(moto.port))
    url = cloud.new_url()
    push(str(dataset), url)
    moto.mark()
    return url


def sent(server: Server, status: int) -> Counter[str]:
    """Token files that the server has sent since it was asked last: whole (200), or parts (206)."""
    told = re.sub(r"\x1b\[\d+m|\"", "", server.news(5_000_000))
    found = re.findall(rf"GET \S*/(shard_\d+\.tokens\.arrow)\S* HTTP/1.1 {status}", told)
    return Counter(found)


def opened(url: str, folder: Path, rank: int, ranks: int, lanes: int) -> PretrainDataLoader:
    run = LoaderRun(rank=rank, world_size=ranks, cache_dir=str(folder / f"{lanes}-{ranks}-{rank}"))
    return PretrainDataLoader(
        url, chunk_size=2048, global_batch_size=ROWS, plan=PlanConfig(lanes=lanes), run=run
    )


@pytest.mark.parametrize(("ranks", "most"), [(8, 1.0), (3, 1.2)])
def test_ranks_download_the_dataset_once(
    dataset: Path, bucket: str, moto: Server, tmp_path: Path, ranks: int, most: float
) -> None:
    with opened(str(dataset), tmp_path, 0, 1, LANES) as loader:
        expected = [batch.input_ids for batch in loader]
    whole: Counter[str] = Counter()
    found: list[list[np.ndarray]] = []
    for rank in range(ranks):
        moto.mark()
        with opened(bucket, tmp_path, rank, ranks, LANES) as loader:
            batches = iter(loader)
            found.append([next(batches).input_ids for _ in expected])
            assert next(batches, None) is None
        whole += sent(moto, 200)
    for k, ids in enumerate(expected):
        assert (np.concatenate([part[k] for part in found]) == ids).all()
    assert len(whole) == SHARDS
    assert whole.total() <= most * SHARDS


def test_without_lanes_every_host_downloads_all_of_it(
    bucket: str, moto: Server, tmp_path: Path
) -> None:
    moto.mark()
    for rank in range(2):
        with opened(bucket, tmp_path, rank, 2, 1) as loader:
            for _ in loader:
                pass
    assert sent(moto, 200).total() == 2 * SHARDS
