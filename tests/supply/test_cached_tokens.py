"""Decoded tokens are checked wherever they come from: rows, offsets, ids."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ShardMismatch
from penstock.supply import shards
from penstock.supply.decoded import Decoded, packed, unpacked
from penstock.supply.loader import PretrainDataLoader
from penstock.supply.shards import DatasetSource, SourceConfig
from penstock.tokenize.tokenizer import Tokenizer

from .datasets import GrowingDataset, made_dataset


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


def forged(rows: int, at: list[int], values: list[int], kind: Any = np.uint16) -> bytes:
    head = np.array([rows, np.dtype(kind).itemsize], np.int64)
    return head.tobytes() + np.array(at, np.int64).tobytes() + np.array(values, kind).tobytes()


GOOD = forged(3, [0, 2, 2, 4], [1, 2, 3, 4])


def test_what_was_packed_is_unpacked() -> None:
    found = unpacked(memoryview(GOOD), 3, 5)
    assert found is not None
    assert found.at.tolist() == [0, 2, 2, 4]
    assert packed(found) == GOOD
    nothing = Decoded(np.zeros(0, np.uint32), np.zeros(1, np.int64))
    assert unpacked(memoryview(packed(nothing)), 0, 1) is not None


@pytest.mark.parametrize(
    ("data", "rows", "vocab_size"),
    [
        (GOOD, 2, 5),
        (GOOD, 4, 5),
        (GOOD, 3, 4),
        (forged(3, [0, 1 << 40, 2, 4], [1, 2, 3, 4]), 3, 5),
        (forged(3, [0, -(1 << 40), 2, 4], [1, 2, 3, 4]), 3, 5),
        (forged(3, [1, 2, 3, 4], [1, 2, 3, 4]), 3, 5),
        (forged(3, [-4, 2, 3, 4], [1, 2, 3, 4]), 3, 5),
        (forged(3, [0, 3, 2, 4], [1, 2, 3, 4]), 3, 5),
        (forged(3, [0, 1, 2, 3], [1, 2, 3, 4]), 3, 5),
        (forged(3, [0, 1, 2, 5], [1, 2, 3, 4]), 3, 5),
        (forged(1 << 62, [0, 1, 2, 4], [1, 2, 3, 4]), 1 << 62, 5),
        (forged(-1, [], []), -1, 5),
        (forged(1, [0, 1], [1 << 31], np.uint32), 1, 1 << 31),
        (GOOD[:-1], 3, 5),
        (GOOD[:20], 3, 5),
        (b"", 3, 5),
    ],
    ids=[str(k) for k in range(16)],
)
def test_forged_offsets_and_ids_are_a_miss(data: bytes, rows: int, vocab_size: int) -> None:
    assert unpacked(memoryview(data), rows, vocab_size) is None


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_unpacked_stays_inside(data: st.DataObject) -> None:
    spoiled = bytearray(GOOD)
    for _ in range(data.draw(st.integers(0, 4))):
        spoiled[data.draw(st.integers(0, len(GOOD) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(spoiled[: data.draw(st.integers(0, len(GOOD)))])
    for value in (bytes(spoiled), cut):
        found = unpacked(memoryview(value), 3, 5)
        if found is not None:
            sizes = np.diff(found.at)
            assert len(sizes) == 3
            assert sizes.min() >= 0
            assert found.at[0] == 0
            assert sizes.sum() == len(found.values)
            assert found.values.max(initial=0) < 5


def test_a_lying_cache_changes_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_dataset(tmp_path / "d", shards=1, rows=3)
    rows = 3
    batches = [
        batch.input_ids.tolist() for batch in PretrainDataLoader(str(tmp_path / "d"), None, 8)
    ]
    assert batches
    for at in ([0, 1 << 40, 1 << 41, 4], [0, -4000, 2, 4], [0, 9, 3, 4]):
        liar = Liar(forged(rows, at, [1, 2, 3, 4]))
        with monkeypatch.context() as patch:
            patch.setattr("penstock.supply.loader.open_cache", lambda *_, liar=liar: liar)
            loader = PretrainDataLoader(str(tmp_path / "d"), None, 8, cache_dir="anything")
            assert [batch.input_ids.tolist() for batch in loader] == batches


# Row counts, on every way to the tokens of a shard.

WAYS: dict[str, Callable[[DatasetSource], object]] = {
    "pages": lambda source: source.decode(0),
    "lists": lambda source: source.decode(0),
    "text": lambda source: source.decode(0),
    "lengths": lambda source: source.lengths(0),
    "table": lambda source: source.read_table(0, ["text"]),
    "cached": lambda source: source.decode(0),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [-1, 1, 1 << 33])
def test_a_shard_has_as_many_rows_as_the_log_says(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, way: str, wrong: int
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    dataset = GrowingDataset(tmp_path / "d", tokenizer=tokenizer.fingerprint)
    dataset.add([[1, 2], [3], [4, 5, 6]])
    plain = DatasetSource(dataset.url, SourceConfig(tokenizer=tokenizer))
    assert plain.decode(0).at.tolist() == [0, 2, 3, 6]
    cache = Liar(packed(plain.decode(0))) if way == "cached" else None
    source = DatasetSource(dataset.url, SourceConfig(tokenizer=tokenizer, cache=cache))
    source.has_tokens = way != "text"
    source.has_counts = way != "text"
    if way == "lists":
        monkeypatch.setattr(shards, "from_pages", lambda *_: None)
    assert WAYS[way](source) is not None
    source = DatasetSource(dataset.url, SourceConfig(tokenizer=tokenizer, cache=cache))
    source.has_tokens = source.has_counts = way != "text"
    source._files[0] = dataclasses.replace(source._files[0], rows=3 + wrong)
    with pytest.raises(ShardMismatch, match=f"has 3 rows, the log says {3 + wrong:,}") as caught:
        WAYS[way](source)
    assert caught.value.do == f"penstock verify --full {dataset.url}"


@pytest.mark.parametrize("way", ["pages", "lists"])
def test_a_token_beyond_the_vocabulary_is_refused(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    dataset = GrowingDataset(tmp_path / "d", tokenizer=tokenizer.fingerprint)
    dataset.add([[1, 2], [tokenizer.vocab_size]])
    if way == "lists":
        monkeypatch.setattr(shards, "from_pages", lambda *_: None)
    with pytest.raises(ShardMismatch, match="has a token of number 4") as caught:
        DatasetSource(dataset.url, SourceConfig(tokenizer=tokenizer)).decode(0)
    assert caught.value.why == f"the vocabulary ends at {tokenizer.vocab_size - 1:,}"
