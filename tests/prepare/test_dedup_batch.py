"""Batch deduplication against its definition: connected components of all pairs."""

import multiprocessing
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig, InputMissing, ShardMismatch
from penstock.kernels import PAD
from penstock.prepare import dedup_batch as module
from penstock.prepare.dedup import DedupConfig, Index, Signatures, signatures
from penstock.prepare.dedup_batch import (
    COMPARED,
    band_keys,
    components,
    dedup_batch,
    exact_keys,
    first_of,
    group,
    group_exact,
)
from penstock.records import Documents

CONFIG = DedupConfig(bins=128, shingle=3, min_shingles=4)


def documents_of(texts: Sequence[bytes]) -> Documents:
    at = np.cumsum([0, *(len(text) for text in texts)]).astype(np.int64)
    data = np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8)
    return Documents(data, at, at[:-1], at[1:])


def prose(rng: random.Random, words: int) -> bytes:
    return b" ".join(b"w%d" % rng.randrange(3000) for _ in range(words))


def edited(rng: random.Random, text: bytes, share: float) -> bytes:
    words = (
        b"x%d" % rng.randrange(10**9) if rng.random() < share else word for word in text.split()
    )
    return b" ".join(words)


def corpus(rng: random.Random, count: int) -> list[bytes]:
    """Texts in families: chains of edits, copies, other white space, tiny ones."""
    texts: list[bytes] = []
    while len(texts) < count:
        text = prose(rng, rng.choice([3, 30, 200]))
        for _ in range(rng.randrange(1, 6)):
            texts.append(text)
            kind = rng.randrange(4)
            if kind == 1:
                text = text.replace(b" ", b"\n ", 2)
            elif kind > 1:
                text = edited(rng, text, rng.choice([0.01, 0.03, 0.05]))
    rng.shuffle(texts)
    return texts[:count]


def write(
    folder: Path, texts: Sequence[bytes], cuts: Sequence[int], config: DedupConfig
) -> list[Path]:
    paths = []
    for number, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(texts)], strict=True)):
        paths.append(folder / f"{number}.signatures")
        paths[-1].write_bytes(signatures(documents_of(texts[a:b]), config).to_bytes())
    return paths


def unpack(words: Sequence[int]) -> list[int]:
    return [int(word) >> 2 * k & 3 for word in words for k in range(32)]


def alike(a: list[int], b: list[int], threshold: float) -> bool:
    pairs = list(zip(a, b, strict=True))
    equal = sum(x == y != 0 for x, y in pairs)
    differ = sum(x != y and x > 0 and y > 0 for x, y in pairs)
    return equal - differ / 2 >= threshold * sum(x > 0 or y > 0 for x, y in pairs)


def brute_force(found: Signatures) -> list[bool]:
    """The definition: edges between all pairs, the smallest of each component is kept."""
    config, count = found.config, len(found)
    parent = list(range(count))

    def root(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    rows = [
        unpack(found.sketch[k * config.words : (k + 1) * config.words].tolist())
        for k in range(count)
    ]
    keys = found.keys.reshape(count, -1)
    normal = found.normal.reshape(count, -1) if config.normalised else found.raw.reshape(count, -1)
    for k in range(count):
        for j in range(k):
            is_edge = normal.shape[1] > 0 and bool((normal[k] == normal[j]).all())
            if config.near and not is_edge and (keys[k] == keys[j]).any():
                large = min(found.filled[k], found.filled[j]) >= config.min_shingles
                is_edge = large and alike(rows[k], rows[j], config.threshold)
            if is_edge:
                a, b = sorted((root(k), root(j)))
                parent[b] = a
    return [root(k) == k for k in range(count)]


@given(st.integers(0, 10**9), st.data())
@settings(max_examples=15, deadline=None)
def test_the_result_is_that_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    texts = corpus(random.Random(seed), 60)
    cuts = sorted(data.draw(st.lists(st.integers(0, 60), max_size=3)))
    partition_bytes = data.draw(st.sampled_from([1000, 20_000, 1 << 28]))
    config = data.draw(
        st.sampled_from(
            [
                CONFIG,
                DedupConfig(near=False),
                DedupConfig(near=False, normalised=False),
                DedupConfig(exact=False, normalised=False, bins=128, shingle=3, min_shingles=4),
            ]
        )
    )
    paths = write(folder, texts, cuts, config)
    kept = dedup_batch(paths, folder / "work", config, partition_bytes=partition_bytes)
    assert kept.tolist() == brute_force(signatures(documents_of(texts), config))
    assert list((folder / "work").iterdir()) == []


def test_likeness_is_transitive_here_and_not_in_the_index(tmp_path: Path) -> None:
    words = [b"w%d" % k for k in range(400)]
    # each has 30 of 400 words other than the one before: alike at 0.85, two steps apart at 0.73
    chain = [b" ".join([b"x%d" % k for k in range(n)] + words[n:]) for n in (0, 30, 60)]
    config = DedupConfig(shingle=1, bins=2048)
    found = Index(config).decide(signatures(documents_of(chain), config))
    assert found.kept.tolist() == [True, False, True]
    kept = dedup_batch(write(tmp_path, chain, [], config), tmp_path / "work", config)
    assert kept.tolist() == [True, False, False]


def test_nothing_to_do(tmp_path: Path) -> None:
    assert dedup_batch([], tmp_path / "work", CONFIG).tolist() == []
    paths = write(tmp_path, [], [0], CONFIG)
    assert dedup_batch(paths, tmp_path / "work", CONFIG).tolist() == []


def test_tasks_run_in_other_processes(tmp_path: Path) -> None:
    texts = corpus(random.Random(3), 60)
    paths = write(tmp_path, texts, [20, 40], CONFIG)
    context = multiprocessing.get_context("spawn" if sys.platform != "linux" else "fork")
    with context.Pool(2) as pool:
        kept = dedup_batch(paths, tmp_path / "work", CONFIG, pool.map, partition_bytes=10_000)
    assert kept.tolist() == dedup_batch(paths, tmp_path / "work", CONFIG).tolist()


def test_a_bucket_across_chunks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = random.Random(4)
    texts = corpus(rng, 150)
    paths = write(tmp_path, texts, [50], CONFIG)
    expected = dedup_batch(paths, tmp_path / "work", CONFIG)
    monkeypatch.setattr(module, "_CHUNK_RECORDS", 7)
    assert dedup_batch(paths, tmp_path / "work", CONFIG).tolist() == expected.tolist()


def test_a_large_bucket_is_compared_with_its_first() -> None:
    """More documents of one key than are compared: those like the first are found."""
    rng = np.random.default_rng(5)
    count = 3000
    rows = np.tile(rng.integers(0, 2**64, CONFIG.words, dtype=np.uint64), (count, 1))
    rows[1 : COMPARED + 50] = rng.integers(0, 2**64, (COMPARED + 49, CONFIG.words), dtype=np.uint64)
    edges = group(
        np.full(count, 7, np.uint64),
        np.arange(count)[::-1].copy(),
        lambda numbers: rows[::-1][count - 1 - numbers].reshape(-1),
        CONFIG,
    )
    smallest = components([edges], count)
    assert (smallest[COMPARED + 50 :] == 0).all()
    assert len(edges) == count - COMPARED - 50


def test_a_million_copies_are_one_record_in_the_second_round(tmp_path: Path) -> None:
    rng = random.Random(6)
    text = prose(rng, 50)
    texts = [text] * 5000 + [edited(rng, text, 0.01)]
    kept = dedup_batch(write(tmp_path, texts, [100], CONFIG), tmp_path / "work", CONFIG)
    assert np.flatnonzero(kept).tolist() == [0]


@given(st.integers(1, 40), st.data())
def test_components_are_those_of_a_walk(count: int, data: st.DataObject) -> None:
    node = st.integers(0, count - 1)
    pairs = data.draw(st.lists(st.tuples(node, node), max_size=40))
    smallest = list(range(count))
    changed = True
    while changed:
        changed = False
        for a, b in pairs:
            low = min(smallest[a], smallest[b])
            changed |= smallest[a] != low or smallest[b] != low
            smallest[a] = smallest[b] = low
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    assert components([edges[:5], edges[5:]], count).tolist() == smallest
    assert first_of(components([edges], count)).tolist() == [smallest[k] == k for k in range(count)]


def test_a_long_chain_is_joined_quickly() -> None:
    count = 300_000
    chain = np.stack([np.arange(count - 1), np.arange(1, count)], 1)
    for edges in (chain, chain[::-1], chain[np.random.default_rng(0).permutation(count - 1)]):
        assert (components([edges], count) == 0).all()


def test_keys_name_their_documents() -> None:
    texts = [prose(random.Random(7), 50), b"too small", prose(random.Random(8), 50)]
    found = signatures(documents_of(texts), CONFIG)
    keys, documents = band_keys(found, 100)
    assert len(keys) == len(documents) == 2 * CONFIG.bands
    assert set(documents.tolist()) == {100, 102}
    for key, document in zip(keys.tolist(), documents.tolist(), strict=True):
        assert key & 0xFFFFFFFF == found.keys[(document - 100) * CONFIG.bands + (key >> 32)]
    keys, documents = exact_keys(found, 100)
    assert documents.tolist() == [100, 101, 102]
    assert keys.reshape(-1).tolist() == found.normal.tolist()
    twice = np.concatenate([keys, keys[1:2]])
    assert group_exact(twice, np.array([5, 9, 6, 2])).tolist() == [[2, 9]]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    paths = write(tmp_path, [b"a text"], [], CONFIG)
    with pytest.raises(InputMissing, match="is not there"):
        dedup_batch([*paths, tmp_path / "none"], tmp_path / "work", CONFIG)
    with pytest.raises(BadConfig, match="other options"):
        dedup_batch(paths, tmp_path / "work", DedupConfig(shingle=9))
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(ShardMismatch, match="checksum"):
        dedup_batch(paths, tmp_path / "work", CONFIG)
    assert list((tmp_path / "work").iterdir()) == []
