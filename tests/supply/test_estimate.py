"""What a run would ask of its hosts: sums over the log, compared with what loaders really read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import PretrainDataLoader, estimate
from penstock.cli import app, main
from penstock.errors import BadConfig
from penstock.supply.run_file import read_run

from .datasets import GrowingDataset, made_documents


@pytest.fixture
def run(tmp_path: Path) -> Path:
    dataset = GrowingDataset(tmp_path / "data")
    random = np.random.default_rng(5)
    for k in range(40):
        dataset.add(made_documents(random, int(random.integers(5, 60)), 60, first=100 * k))
    dataset.seal()
    return tmp_path / "run.toml"


def described(run: Path, plan: str = "", loader: str = "") -> Path:
    run.write_text(f'[loader]\npath = "data"\nchunk_size = 64\nbatch_size = 8\n{loader}\n'
                   f"[loader.plan]\nramp = false\n{plan}\n")  # fmt: skip
    return run


def files(run: Path) -> dict[int, int]:
    """Bytes of each token file."""
    found = sorted((run.parent / "data").glob("shard_*.tokens.arrow"))
    return {k: path.stat().st_size for k, path in enumerate(found)}


@pytest.mark.parametrize(("hosts", "each", "lanes"), [(1, 2, 1), (4, 2, 1), (4, 2, 8), (3, 1, 8)])
def test_hosts_read_what_was_estimated(run: Path, hosts: int, each: int, lanes: int) -> None:
    described(run, f"lanes = {lanes}")
    found = estimate(run, hosts=hosts, ranks_per_host=each)
    sizes, reads = files(run), []
    options = read_run(run)
    for host in range(hosts):
        used: set[int] = set()
        for rank in range(host * each, (host + 1) * each):
            used |= shards_of(options, rank, hosts * each)
        reads.append(sum(sizes[shard] for shard in used))
    assert found.host_bytes == max(reads)
    assert found.all_bytes == sum(reads)
    assert found.bytes == sum(sizes.values())
    assert found.is_final
    assert found.shards == 40


def shards_of(options: dict[str, Any], rank: int, ranks: int) -> set[int]:
    """All shards that a rank looks at in an epoch."""
    from dataclasses import replace

    given = {**options, "run": replace(options["run"], rank=rank, world_size=ranks)}
    with PretrainDataLoader(**given) as loader:
        (source,) = loader.sources
        seen: set[int] = set()
        decode = source.decode

        def watched(shard: int) -> Any:
            seen.add(shard)
            return decode(shard)

        source.decode = watched  # type: ignore[method-assign]
        for _ in loader:
            pass
    return seen


def test_the_first_window_is_that_of_the_pool(run: Path) -> None:
    sizes = files(run)
    described(run, "pool_size = 1")
    assert estimate(run).first_bytes == sizes[0]
    described(run)
    assert estimate(run).first_bytes == sum(sizes.values())
    described(run, "pool_size = 8\nlanes = 8")
    found = estimate(run, hosts=8, ranks_per_host=1)
    assert found.first_bytes == max(sizes[k] for k in range(8)), "one shard of the only lane"
    assert found.first_s == pytest.approx(found.first_bytes * 8 / 25e9, rel=0.2)


def test_the_slowest_is_the_limit(run: Path) -> None:
    described(run)
    found = estimate(run, hosts=2, gbit=0.001, tokens_per_s=1e9)
    assert found.limit == "network"
    assert found.tokens is not None
    assert found.network_tokens_per_s is not None
    assert found.network_tokens_per_s == pytest.approx(found.tokens * 125e3 / found.bytes)
    assert estimate(run, tokens_per_s=10.0).limit == "trainer"
    assert estimate(run, gbit=1e6).limit == "loaders"
    described(run, "lanes = 8")
    lanes = estimate(run, hosts=8, ranks_per_host=1, gbit=0.001)
    assert lanes.network_tokens_per_s is not None
    assert lanes.network_tokens_per_s > 5 * found.network_tokens_per_s


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"gbit": 0.0}, "gbit is 0"),
        ({"gbit": float("inf")}, "gbit is inf"),
        ({"tokens_per_s": float("inf")}, "tokens_per_s is inf"),
        ({"tokens_per_s": -1.0}, "tokens_per_s is -1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(run: Path, options: dict[str, Any], told: str) -> None:
    described(run)
    with pytest.raises(BadConfig, match=told):
        estimate(run, **options)


def test_what_a_run_would_refuse_is_refused(run: Path) -> None:
    described(run).write_text(run.read_text().replace("batch_size", "global_batch_size"))
    with pytest.raises(BadConfig, match="global_batch_size is 8 for 16 ranks"):
        estimate(run, hosts=2)
    described(run, loader="global_batch_size = 32")
    with pytest.raises(BadConfig, match="batch_size is 8 and global_batch_size is 32"):
        estimate(run, hosts=2)
    (run.parent / "text.jsonl").write_text('{"text": "raw"}\n')
    described(run).write_text(run.read_text().replace('"data"', '"text.jsonl"'))
    with pytest.raises(BadConfig, match="the run reads raw files"):
        estimate(run, hosts=2)


@pytest.mark.parametrize("behind", ["wait", "repeat"])
def test_an_estimate_decides_nothing_for_the_run(tmp_path: Path, behind: str) -> None:
    dataset = GrowingDataset(tmp_path / "data")
    dataset.add(made_documents(np.random.default_rng(5), 40))
    run = tmp_path / "run.toml"
    run.write_text(f'[loader]\npath = "data"\nchunk_size = 64\nbatch_size = 1\n'
                   f'[loader.plan]\nbehind = "{behind}"\n'
                   '[loader.run]\nrun_dir = "r"\nreader = "me"\n')  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    assert not estimate(run, hosts=2, ranks_per_host=1).is_final
    assert sorted(tmp_path.rglob("*")) == before


def test_more_lanes_than_shards_are_refused(run: Path) -> None:
    described(run, "lanes = 64")
    with pytest.raises(BadConfig, match="has 40 shards for 64 lanes"):
        estimate(run, hosts=8)


def test_the_command_prints_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    described(run, "lanes = 8")
    arguments = ["estimate", str(run), "--hosts", "4", "--gbit", "25", "--tokens_per_s", "2e7"]
    main(lambda: app(arguments, standalone_mode=False))
    told = capsys.readouterr().out
    assert "4 hosts, 32 ranks, lanes 8, 25 Gbit/s" in told
    assert "of all rows, where lanes end apart" in told
    assert "limit        the trainer; it uses" in told
    main(lambda: app([*arguments, "--json"], standalone_mode=False))
    assert json.loads(capsys.readouterr().out)["limit"] == "trainer"
