"""Shards and logs that lie about rows and tokens are refused before a kernel reads by them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock import PlanConfig, PretrainDataLoader
from penstock.errors import BadConfig, BadDataset, ShardMismatch
from penstock.supply.mixed_shards import StreamingMixedShardDataset

from .datasets import GrowingDataset, made_dataset, made_documents
from .nested import nested


def lying(folder: Path, counts: Any = None, claims: int = 0) -> list[list[int]]:
    """A sealed dataset of three shards, of which the second lies."""
    documents = made_documents(np.random.default_rng(0), 60)
    dataset = GrowingDataset(folder, column=counts is not None)
    dataset.add(documents[:20])
    told = None if counts is None else counts([len(d) for d in documents[20:40]])
    dataset.add(documents[20:40], counts=told, claims=claims)
    dataset.add(documents[40:])
    dataset.seal()
    return documents


def moved(by: int) -> Any:
    def change(sizes: list[int]) -> list[int]:
        return [sizes[0] + by, sizes[1] - by, *sizes[2:]]

    return change


@pytest.mark.parametrize("by", [1, 500, -1, -500, 1 << 30])
@pytest.mark.parametrize("pack", ["pad", "bestfit"])
def test_token_counts_that_lie_are_refused(tmp_path: Path, by: int, pack: str) -> None:
    """With the right sum too, and where some are negative, which would mean a ban."""
    lying(tmp_path / "d", moved(by))
    with (
        PretrainDataLoader(str(tmp_path / "d"), chunk_size=64, pack=pack) as loader,
        pytest.raises(ShardMismatch, match="not as many tokens as its n_tokens says") as caught,
    ):
        list(loader)
    assert "shard_00001.parquet" in caught.value.what


def test_a_shard_of_negative_token_counts_is_not_taken_for_banned(tmp_path: Path) -> None:
    """Nothing of it would ever be asked for, so nobody would compare its counts with its tokens."""
    lying(tmp_path / "d", lambda sizes: [-1 - size for size in sizes])
    with (
        PretrainDataLoader(str(tmp_path / "d"), chunk_size=64) as loader,
        pytest.raises(ShardMismatch, match="not as many tokens as its n_tokens says") as caught,
    ):
        list(loader)
    assert "n_tokens is -" in caught.value.why


def test_token_counts_that_lie_are_refused_where_they_were_cached(tmp_path: Path) -> None:
    lying(tmp_path / "d", moved(500))
    for _ in range(2):
        with (
            PretrainDataLoader(
                str(tmp_path / "d"), **nested(chunk_size=64, cache_dir=str(tmp_path / "cache"))
            ) as loader,
            pytest.raises(ShardMismatch, match="n_tokens"),
        ):
            list(loader)


@pytest.mark.parametrize("column", [False, True])
def test_counts_that_change_after_they_were_planned_with_are_refused(
    tmp_path: Path, column: bool
) -> None:
    """Lengths come from a file that nobody has hashed yet."""
    made_dataset(tmp_path / "d", shards=2, column=column)
    with PretrainDataLoader(str(tmp_path / "d"), chunk_size=64) as loader:
        source = loader.sources[0]
        loader.sources[0]._lengths[1] = source.lengths(1) - np.int32(1)
        with pytest.raises(ShardMismatch, match="not as many tokens as") as caught:
            list(loader)
    assert "were planned" in caught.value.why


def test_a_log_that_claims_other_rows_is_refused(tmp_path: Path) -> None:
    """At once, and without the memory that they ask for: 2^31 rows took minutes, 2^40 failed."""
    many = [21, (1 << 31) + 5, 1 << 40, 1 << 62]
    for claims in many:
        lying(tmp_path / str(claims), claims=claims)
    code = """
import resource, sys
from penstock import PlanConfig, PretrainDataLoader
from penstock.errors import BadDataset
from penstock.supply.mixed_shards import StreamingMixedShardDataset

resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
def loader(path):
    list(PretrainDataLoader(path, chunk_size=64))
def examples(path):
    list(StreamingMixedShardDataset([path], ["all"], random_seed=1))
for path in sys.argv[1:]:
    for read in (loader, examples):
        try:
            read(path)
        except BadDataset as error:
            print(read.__name__, "refused:", error.what, error.why)
"""
    paths = [str(tmp_path / str(claims)) for claims in many]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    expected = ["loader refused", "examples refused"] * len(many)
    assert [line.partition(":")[0] for line in lines] == expected, done.stderr
    assert all(
        f"{claims:,}" in line for claims, line in zip(np.repeat(many, 2), lines, strict=True)
    )


def test_tokens_of_two_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    """Without a tokenizer to compare with, datasets are compared with each other."""
    made_dataset(tmp_path / "a")
    made_dataset(tmp_path / "b", tokenizer="u" * 64)
    made_dataset(tmp_path / "c")
    paths = [str(tmp_path / name) for name in "abc"]
    plan = PlanConfig(pool_size=40, refill_threshold=30)
    with pytest.raises(BadConfig, match="different tokenizers") as caught:
        PretrainDataLoader(paths, chunk_size=64, plan=plan)
    assert "a: tttttttttttt…, b: uuuuuuuuuuuu…" in caught.value.why
    with pytest.raises(BadConfig, match="different tokenizers"):
        StreamingMixedShardDataset(paths, ["all"] * 3, random_seed=1)
    texts = StreamingMixedShardDataset(
        paths, ["all"] * 3, **nested(mixed=True, columns=["text"], random_seed=1)
    )
    assert len(list(texts)) == 3 * 240
    with PretrainDataLoader([paths[0], paths[2]], chunk_size=64, plan=plan) as loader:
        assert len(list(loader)) > 0


def test_a_wrong_dataset_is_an_error_of_the_dataset() -> None:
    assert issubclass(ShardMismatch, BadDataset)


@pytest.mark.parametrize(
    ("kind", "spoiled", "said"),
    [
        (pa.int32(), -5, "can be read"),
        (pa.int64(), -5, "can be read"),
        (pa.int64(), 1 << 40, "can be read"),
        (pa.uint16(), None, "can be read"),
        (pa.float64(), 0.5, "can be read"),
        (pa.string(), "7", "can be read"),
    ],
)
def test_tokens_of_another_type_are_refused_or_read_right(
    tmp_path: Path, kind: pa.DataType, spoiled: Any, said: str
) -> None:
    documents = made_documents(np.random.default_rng(0), 30)
    texts = pa.types.is_string(kind)
    good = [[str(t) if texts else t for t in document] for document in documents]
    bad = [[spoiled, *good[0][1:]], *good[1:]]
    for name, rows in (("good", good), ("bad", bad)):
        dataset = GrowingDataset(tmp_path / name)
        dataset.add(documents, tokens=pa.array(rows, pa.list_(kind)))
        dataset.seal()
    with (
        PretrainDataLoader(str(tmp_path / "bad"), chunk_size=64) as loader,
        pytest.raises(ShardMismatch, match=said),
    ):
        list(loader)
    if pa.types.is_integer(kind):
        made = GrowingDataset(tmp_path / "plain")
        made.add(documents)
        made.seal()
        found, expected = (
            [
                batch.input_ids.tolist()
                for batch in PretrainDataLoader(str(tmp_path / name), chunk_size=64)
            ]
            for name in ("good", "plain")
        )
        assert found == expected


def test_a_range_beyond_all_shards_is_told(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    with pytest.raises(BadConfig, match="cannot be read"):
        PretrainDataLoader(
            str(tmp_path / "d"), **nested(chunk_size=64, shard_ranges="0-" + "9" * 20)
        )
