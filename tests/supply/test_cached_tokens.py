"""Tokens are checked wherever they come from: rows, offsets, ids, whose they are."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.cache.disk import DiskCache
from penstock.errors import BadDataset, ShardMismatch
from penstock.supply.pretrain import PretrainDataLoader
from penstock.supply.sources.dataset import DatasetSource, SourceConfig
from penstock.tokenize.tokenizer import Tokenizer

from .datasets import GrowingDataset, made_dataset, token_file
from .nested import nested


class Liar:
    """A cache of another make that gives whatever was planted."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def get(self, key: str) -> bytes | None:
        return self.value

    def put(self, key: str, value: bytes) -> None:
        pass

    def fetch(self, key: str, make: Callable[[], bytes]) -> bytes:
        return self.value


ROWS = [[1, 2], [3], [4, 5, 6]]


def forged(offsets: list[int], rows: list[list[int]] = ROWS) -> bytes:
    """A token file with other offsets."""
    true = np.cumsum([0, *map(len, rows)], dtype=np.int64).tobytes()
    data = token_file(rows)
    assert data.count(true) == 1
    return data.replace(true, np.array(offsets, np.int64).tobytes())


FORGED = [
    forged([0, 1 << 40, 3, 6]),
    forged([0, -(1 << 40), 3, 6]),
    forged([0, 3, 2, 6]),
    forged([1, 2, 3, 6]),
    forged([0, 2, 3, 1 << 40]),
    forged([0, 2, 3, 5]),
    token_file(ROWS[:2]),
    token_file([*ROWS, [7]]),
    token_file([[1, 2], [3], [60_000]]),
    token_file(ROWS, tokenizer="another"),
    token_file(ROWS)[:-1],
    token_file(ROWS)[:300],
    b"ARROW1",
    b"",
]


@pytest.mark.parametrize("data", FORGED, ids=[str(k) for k in range(len(FORGED))])
def test_a_token_file_that_lies_is_refused(
    tmp_path: Path, tokenizer_folder: Path, data: bytes
) -> None:
    """The log names its true hash, so that nothing but its content can say so."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    dataset = GrowingDataset(tmp_path / "d", tokenizer=tokenizer.fingerprint)
    dataset.add(ROWS)
    mine = data.replace(b"t" * 64, tokenizer.fingerprint.encode())
    dataset.add(ROWS, stored=mine)
    dataset.seal()
    with (
        PretrainDataLoader(dataset.url, tokenizer, 8) as loader,
        pytest.raises(ShardMismatch, match=r"shard_00001.tokens.arrow") as caught,
    ):
        list(loader)
    assert caught.value.why
    assert dataset.url in caught.value.do


def test_what_a_token_file_holds_is_trained_on(tmp_path: Path) -> None:
    dataset = GrowingDataset(tmp_path / "d")
    dataset.add(ROWS)
    dataset.add(ROWS, stored=token_file([[9, 9], [9], [9, 9, 9]]))
    dataset.seal()
    found = [batch.input_ids for batch in PretrainDataLoader(dataset.url, None, 8, pack="concat")]
    told, counts = np.unique(np.concatenate(found)[np.concatenate(found) > 0], return_counts=True)
    assert dict(zip(told.tolist(), counts.tolist(), strict=True)) == {
        **dict.fromkeys(range(1, 7), 1), 9: 6,
    }  # fmt: skip


@pytest.mark.parametrize("data", FORGED, ids=[str(k) for k in range(len(FORGED))])
def test_a_lying_cache_changes_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    dataset = GrowingDataset(tmp_path / "d", column=True)
    dataset.add([[1, 2], [3], [4, 5, 60_000 - 1]])
    dataset.seal()
    if data == FORGED[8]:  # without a tokenizer there is no end to the vocabulary
        return
    batches = [batch.input_ids.tolist() for batch in PretrainDataLoader(dataset.url, None, 8)]
    assert batches
    monkeypatch.setattr("penstock.supply.settings.open_cache", lambda *_: Liar(data))
    loader = PretrainDataLoader(dataset.url, None, 8, **nested(cache_dir="anything"))
    assert [batch.input_ids.tolist() for batch in loader] == batches


def test_a_damaged_cache_costs_time_and_no_token(tmp_path: Path) -> None:
    """Every file of the cache is changed in the middle, cut, or emptied between two passes."""
    dataset = made_dataset(tmp_path / "d", shards=3, column=True)
    options: dict[str, Any] = {"chunk_size": 64, "cache_dir": str(tmp_path / "cache")}
    batches = [b.input_ids.tolist() for b in PretrainDataLoader(dataset.url, chunk_size=64)]
    for damage in (
        lambda data: data,
        lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :],
        lambda data: data[:-9],
        lambda data: b"",
    ):
        with PretrainDataLoader(dataset.url, **nested(**options)) as loader:
            assert [batch.input_ids.tolist() for batch in loader] == batches
        held = [path for path in (tmp_path / "cache").glob("??/*") if path.is_file()]
        assert len(held) == 3
        for path in held:
            path.write_bytes(damage(path.read_bytes()))


def test_what_is_mapped_takes_no_memory_of_the_process(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Token files of the dataset, and those that were made in the cache directory."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    stored = GrowingDataset(tmp_path / "stored", tokenizer=tokenizer.fingerprint)
    column = GrowingDataset(tmp_path / "column", tokenizer=tokenizer.fingerprint, column=True)
    rows = [[k % 250] * 9000 for k in range(60)]
    for dataset in (stored, column):
        dataset.add(rows)
        dataset.seal()
    cache = DiskCache(tmp_path / "cache")
    config = SourceConfig(tokenizer=tokenizer, cache=cache)
    for dataset, asked, size in (
        (stored, SourceConfig(tokenizer=tokenizer), 0),
        (column, config, 0),
        (column, SourceConfig(tokenizer=tokenizer), 60 * 9000 * 2 + 61 * 8),
    ):
        found = DatasetSource(dataset.url, asked).decode(0)
        assert found.nbytes == size
        pairs = zip(found.at[:-1].tolist(), found.at[1:].tolist(), strict=True)
        assert [found.values[a:b].tolist() for a, b in pairs] == rows


def test_no_descriptor_stays_open_for_a_mapped_file(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=30, rows=2)
    source = DatasetSource(str(tmp_path / "d"), SourceConfig())
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [source.decode(shard) for shard in range(30)]
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
    assert all(found.mapped for found in held)


def test_planning_reads_no_parquet(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=4)
    batches = [b.input_ids.tolist() for b in PretrainDataLoader(str(tmp_path / "d"), None, 64)]
    for path in (tmp_path / "d").glob("*.parquet"):
        path.unlink()
    with PretrainDataLoader(str(tmp_path / "d"), None, 64, **nested(ban=[3])) as loader:
        assert list(loader)
    with PretrainDataLoader(str(tmp_path / "d"), None, 64) as loader:
        assert [batch.input_ids.tolist() for batch in loader] == batches


def test_a_link_in_place_of_a_token_file_is_refused(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=2)
    file = tmp_path / "d" / "shard_00001.tokens.arrow"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with (
        PretrainDataLoader(str(tmp_path / "d"), None, 64) as loader,
        pytest.raises(BadDataset, match="is a symbolic link"),
    ):
        list(loader)


# Row counts, on every way to the tokens of a shard.

WAYS: dict[str, Callable[[DatasetSource], object]] = {
    "stored": lambda source: source.decode(0),
    "column": lambda source: source.decode(0),
    "text": lambda source: source.decode(0),
    "lengths": lambda source: source.lengths(0),
    "counts": lambda source: source.lengths(0),
    "table": lambda source: source.read_table(0, ["text"]),
    "tokens": lambda source: source.read_table(0, ["tokens"]),
    "cached": lambda source: source.decode(0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [-1, 1, 1 << 33])
def test_a_shard_has_as_many_rows_as_the_log_says(
    tmp_path: Path, tokenizer_folder: Path, way: str, wrong: int
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    dataset = GrowingDataset(
        tmp_path / "d",
        tokenizer=tokenizer.fingerprint,
        column=way in ("column", "cached", "counts"),
    )
    dataset.add(ROWS)
    good = token_file(ROWS, tokenizer=tokenizer.fingerprint)
    config = SourceConfig(tokenizer=tokenizer, cache=Liar(good) if way == "cached" else None)

    def opened() -> DatasetSource:
        source = DatasetSource(dataset.url, config)
        if way == "text":
            source.has_tokens = source.has_counts = False
        return source

    assert WAYS[way](opened()) is not None
    source = opened()
    source._files[0] = dataclasses.replace(source._files[0], rows=3 + wrong)
    with pytest.raises(ShardMismatch) as caught:
        WAYS[way](source)
    assert f"{3 + wrong:,}" in caught.value.what + caught.value.why
    assert f"penstock verify --full {dataset.url}" in caught.value.do


@pytest.mark.parametrize("column", [False, True])
def test_a_token_beyond_the_vocabulary_is_refused(
    tmp_path: Path, tokenizer_folder: Path, column: bool
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    dataset = GrowingDataset(tmp_path / "d", tokenizer=tokenizer.fingerprint, column=column)
    dataset.add([[1, 2], [tokenizer.vocab_size]])
    with pytest.raises(ShardMismatch, match="does not hold the tokens") as caught:
        DatasetSource(dataset.url, SourceConfig(tokenizer=tokenizer)).decode(0)
    assert f"the vocabulary ends at {tokenizer.vocab_size - 1:,}" in caught.value.why


def test_the_tokens_of_a_table_are_those_of_the_token_file(tmp_path: Path) -> None:
    for name in ("stored", "column"):
        GrowingDataset(tmp_path / name, column=name == "column").add(ROWS)
    stored, column = (
        DatasetSource(str(tmp_path / name), SourceConfig()) for name in ("stored", "column")
    )
    assert stored.read_table(0).to_pylist() == column.read_table(0).to_pylist()
    for names in (["tokens"], ["tokens", "text"], ["text", "tokens", "doc_id"], ["text"]):
        found = stored.read_table(0, names)
        assert found.column_names == names
        assert found.to_pylist() == column.read_table(0, names).to_pylist()
    assert pa.types.is_large_list(stored.read_table(0).column("tokens").type)
