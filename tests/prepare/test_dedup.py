"""Deduplication: signatures against slow references, the index against its promises."""

import json
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig, BadInput, InputMissing, PenstockError, ShardMismatch
from penstock.kernels import PAD
from penstock.prepare.decontaminate import Contaminants, contaminated, load_contaminants
from penstock.prepare.dedup import (
    REASONS,
    DedupConfig,
    Index,
    Signatures,
    Verdicts,
    read_count,
    signatures,
)
from penstock.prepare.dedup_layout import CHAIN, CHUNK
from penstock.records import Documents

CONFIG = DedupConfig()
SMALL = DedupConfig(bins=128, shingle=3, min_shingles=4)
WORD = 2**64 - 1

TEXTS = st.text(
    st.sampled_from("abcXYZ019_ \t\n\v\f\r+-*/(){};é\u00a0Жשد中文字“”—😀"), min_size=0, max_size=300
).map(str.encode)


def documents_of(texts: Sequence[bytes], before: int = 0) -> Documents:
    """Texts as the stages hand them on, not at the beginning of the buffer."""
    sizes = [before, *(len(text) for text in texts)]
    at = np.cumsum(sizes).astype(np.int64)
    slack = b"x1 " * (PAD // 3) + b"y"  # what follows must not matter
    data = np.frombuffer(b"z" * before + b"".join(texts) + slack, np.uint8)
    return Documents(data, at, at[:-1], at[1:])


# Slow references


def tokens(text: bytes) -> list[bytes]:
    word = rb"A-Za-z0-9_\x80-\xdf"
    return re.findall(rb"[%b]+|[^%b \t-\r](?:[\x80-\xbf][%b]*)?" % (word, word, word), text)


def hash_token(token: bytes) -> int:
    k0, k1 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
    n = len(token)

    def load(i: int) -> int:
        return int.from_bytes(token[i : i + 8], "little")

    if n <= 8:
        h = ((load(0) << (64 - 8 * n)) & WORD) * k0 + n & WORD
    elif n <= 16:
        h = load(0) * k0 + n & WORD
        h = (h ^ h >> 32) * k1 + load(n - 8) & WORD
    else:
        h = n
        for k in range(0, n - 8, 8):
            h = (h ^ load(k)) * k0 & WORD
            h ^= h >> 32
        h = h * k1 + load(n - 8) & WORD
    h = (h ^ h >> 32) * k1 & WORD
    return h ^ h >> 29


def shingles(text: bytes, n: int, seed: int = 0) -> list[int]:
    hashes = [hash_token(token) for token in tokens(text)]
    found = []
    for k in range(len(hashes) - n + 1):
        h = 0
        for token in hashes[k : k + n]:
            h = h * 0x9FB21C651E98DF25 + token & WORD
        h ^= seed
        h = (h ^ h >> 32) * 0xD6E8FEB86659FD93 & WORD
        h = (h ^ h >> 29) * 0xC2B2AE3D27D4EB4F & WORD
        found.append(h ^ h >> 32)
    return found


def splitmix64(x: int) -> int:
    x = x + 0x9E3779B97F4A7C15 & WORD
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def sketch(text: bytes, config: DedupConfig) -> tuple[list[int], list[int]]:
    """The values of the bins, 0 for none, and the keys of the bands."""
    found = shingles(text, config.shingle, config.seed)
    fine: dict[int, int] = {}
    coarse: dict[int, int] = {}
    for h in found:
        fine[h % config.bins] = min(fine.get(h % config.bins, WORD), h)
        coarse[h % 128] = min(coarse.get(h % 128, WORD), h)
    values = [0] * config.bins
    for b, h in fine.items():
        values[b] = ((h >> 16 & 0xFFFF) * 3 >> 16) + 1
    if len(fine) < config.min_shingles:
        return values, [0] * config.bands
    keys = []
    for band in range(config.bands):
        key = (band + 1) * 0x9E3779B97F4A7C15 & WORD
        for b in range(band * config.rows, (band + 1) * config.rows):
            source, tries = b, b << 32
            while source not in coarse:
                tries += 1
                source = splitmix64(tries) % 128
            key = (key ^ coarse[source]) * 0xD6E8FEB86659FD93 & WORD
            key ^= key >> 32
        keys.append((key * 0xC2B2AE3D27D4EB4F & WORD) >> 32)
    return values, keys


def estimate(a: list[int], b: list[int]) -> float:
    equal = sum(x == y != 0 for x, y in zip(a, b, strict=True))
    differ = sum(x != y and x > 0 and y > 0 for x, y in zip(a, b, strict=True))
    union = sum(x > 0 or y > 0 for x, y in zip(a, b, strict=True))
    return (equal - differ / 2) / union if union else 0.0


def reference_decisions(texts: Sequence[bytes], config: DedupConfig) -> list[tuple[int, int]]:
    """What an index says that compares with all kept documents that share a band's key."""
    kept: list[tuple[bytes, bytes, list[int], list[int], bool]] = []
    verdicts = []
    for text in texts:
        normal = b" ".join(re.split(rb"[ \t-\r]+", text)).strip(b" ")
        values, keys = sketch(text, config)
        is_large = sum(value > 0 for value in values) >= config.min_shingles
        verdict = (0, -1)
        for number, (other, other_normal, _, _, _) in enumerate(kept):
            if other_normal == normal:
                verdict = (1 if other == text else 2, number)
        if verdict[0] == 0 and is_large:
            for number, (_, _, other_values, other_keys, other_large) in enumerate(kept):
                shared = any(x == y for x, y in zip(keys, other_keys, strict=True))
                if other_large and shared and estimate(values, other_values) >= config.threshold:
                    verdict = (3, number)
                    break
        verdicts.append(verdict)
        if verdict[0] == 0:
            kept.append((text, normal, values, keys, is_large))
    return verdicts


def as_pairs(verdicts: Verdicts) -> list[tuple[int, int]]:
    return list(zip(verdicts.reasons.tolist(), verdicts.of.tolist(), strict=True))


def unpack(words: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> list[int]:
    return [int(word) >> 2 * k & 3 for word in words for k in range(32)]


# Signatures


@given(st.lists(TEXTS, max_size=6), st.integers(0, 70))
@settings(deadline=None)
def test_hashes_are_those_of_the_library(texts: list[bytes], before: int) -> None:
    found = signatures(documents_of(texts, before), CONFIG)
    assert len(found) == len(texts)
    for k, text in enumerate(texts):
        normal = b" ".join(re.split(rb"[ \t-\r]+", text)).strip(b" ")
        for column, content in ((found.raw, text), (found.normal, normal)):
            high, low = column[2 * k : 2 * k + 2].tolist()
            assert high << 64 | low == xxhash.xxh3_128_intdigest(content)


@given(st.lists(TEXTS, max_size=6), st.integers(0, 70), st.integers(1, 7), st.integers(0, WORD))
@settings(deadline=None)
def test_sketches_are_those_of_the_reference(
    texts: list[bytes], before: int, n: int, seed: int
) -> None:
    config = DedupConfig(bins=128, shingle=n, min_shingles=4, seed=seed)
    found = signatures(documents_of(texts, before), config)
    for k, text in enumerate(texts):
        values, keys = sketch(text, config)
        assert unpack(found.sketch[4 * k : 4 * k + 4]) == values
        assert found.keys[k * config.bands : (k + 1) * config.bands].tolist() == keys
        assert found.filled[k] == sum(value > 0 for value in values)


@pytest.mark.parametrize("size", [1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17])
@pytest.mark.parametrize(
    "unit", [b"ab cd+", b"a", b" ", b"+", "é中".encode(), b"0123456789ABCDEFGH "]
)
def test_texts_around_the_size_of_a_chunk(size: int, unit: bytes) -> None:
    text = (unit * (size // len(unit) + 1))[:size]
    texts = [text, b"tail " + text[:-1] + b"_", text + b" "]
    found = signatures(documents_of(texts, 5), SMALL)
    for k, one in enumerate(texts):
        values, keys = sketch(one, SMALL)
        assert unpack(found.sketch[4 * k : 4 * k + 4]) == values
        assert found.keys[k * SMALL.bands : (k + 1) * SMALL.bands].tolist() == keys
        normal = b" ".join(re.split(rb"[ \t-\r]+", one)).strip(b" ")
        high, low = found.normal[2 * k : 2 * k + 2].tolist()
        assert high << 64 | low == xxhash.xxh3_128_intdigest(normal)


@given(st.lists(TEXTS, min_size=1, max_size=5), st.integers(0, 1000))
@settings(deadline=None)
def test_white_space_does_not_matter_to_tokens(texts: list[bytes], seed: int) -> None:
    rng = random.Random(seed)
    spaced = [
        re.sub(rb"[ \t-\r]+", lambda _: rng.choice([b" ", b"\n\n", b"\t \r\n"]), text)
        for text in texts
    ]
    one = signatures(documents_of(texts), SMALL)
    other = signatures(documents_of(spaced), SMALL)
    assert (one.sketch == other.sketch).all()
    assert (one.normal == other.normal).all()


def test_a_batch_is_the_same_in_pieces() -> None:
    rng = random.Random(5)
    texts = [prose(rng, rng.randrange(2000)) for _ in range(40)]
    whole = signatures(documents_of(texts), CONFIG)
    pieces = [signatures(documents_of(texts[k : k + 7]), CONFIG) for k in range(0, 40, 7)]
    assert Signatures.concat(CONFIG, pieces).to_bytes() == whole.to_bytes()
    assert whole.take(np.arange(40) % 2 == 0).to_bytes() == (
        signatures(documents_of(texts[::2]), CONFIG).to_bytes()
    )
    assert whole.take(np.array([3, 1])).raw.tolist() == [*whole.raw[6:8], *whole.raw[2:4]]


def test_columns_that_are_off_are_empty() -> None:
    found = signatures(documents_of([b"a b c d e f g"]), DedupConfig(exact=False, near=False))
    assert [len(column) for column in found.columns] == [0, 2, 0, 0, 0]
    assert len(found.take(np.array([0, 0])).normal) == 4


# Files


@pytest.mark.parametrize(
    "config", [CONFIG, SMALL, DedupConfig(near=False), DedupConfig(exact=False, normalised=False)]
)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_signatures_survive_a_file(config: DedupConfig, count: int) -> None:
    rng = random.Random(1)
    made = signatures(documents_of([prose(rng, 500) for _ in range(count)]), config)
    data = made.to_bytes()
    again = Signatures.from_bytes(data, config)
    assert again.to_bytes() == data
    assert read_count(data) == len(again) == count
    for one, other in zip(made.columns, again.columns, strict=True):
        assert one.dtype == other.dtype
        assert (one == other).all()


def test_every_damage_is_noticed() -> None:
    data = signatures(documents_of([b"some words here", b"and others there"]), SMALL).to_bytes()
    for k in range(len(data)):
        for flip in (1, 0x80):
            broken = bytearray(data)
            broken[k] ^= flip
            with pytest.raises(ShardMismatch, match="not what was written"):
                Signatures.from_bytes(bytes(broken), SMALL, "f")
        with pytest.raises(ShardMismatch, match="not what was written"):
            Signatures.from_bytes(data[:k], SMALL, "f")
    with pytest.raises(ShardMismatch, match="checksum"):
        Signatures.from_bytes(data + b"\0", SMALL, "f")


def test_a_file_of_other_options_is_refused() -> None:
    made = signatures(documents_of([b"words"]), CONFIG)
    other = DedupConfig(shingle=6)
    with pytest.raises(BadConfig, match="other options than these") as caught:
        Signatures.from_bytes(made.to_bytes(), other, "shard_00001.signatures")
    assert caught.value.where == "shard_00001.signatures"
    with pytest.raises(BadConfig, match="other options"):
        Index(other).decide(made)
    with pytest.raises(BadConfig, match="other options"):
        Signatures.concat(other, [made])
    # a threshold that makes the same bands is a matter of the index only
    Index(DedupConfig(threshold=0.81)).decide(made)


@pytest.mark.parametrize(
    ("option", "is_another"),
    [
        ({"exact": False}, True),
        ({"normalised": False}, True),
        ({"near": False}, True),
        ({"threshold": 0.5}, True),  # other bands
        ({"bins": 256}, True),
        ({"shingle": 6}, True),
        ({"min_shingles": 25}, True),
        ({"seed": 1}, True),
        ({"threshold": 0.81}, False),
        ({"contamination_shingle": 12}, False),
        ({"contamination_share": 0.6}, False),
    ],
)
def test_signatures_are_bound_to_all_that_changes_them(
    option: dict[str, Any], is_another: bool
) -> None:
    text = documents_of([prose(random.Random(3), 40)])
    made, other = signatures(text, CONFIG), DedupConfig(**option)
    again = signatures(text, other)
    same = all(map(np.array_equal, made.columns, again.columns))
    assert same or is_another
    assert (other.fingerprint != CONFIG.fingerprint) == is_another
    if is_another:
        with pytest.raises(BadConfig, match="other options than these"):
            Signatures.from_bytes(made.to_bytes(), other)
    else:
        Signatures.from_bytes(made.to_bytes(), other)


def test_a_later_version_is_refused() -> None:
    import struct

    data = signatures(documents_of([b"words"]), CONFIG).to_bytes()
    about = bytearray(data[:40])
    about[8:12] = struct.pack("<I", 9)
    checksum = xxhash.xxh3_128(bytes(about) + bytes(16) + data[56:]).digest()
    with pytest.raises(ShardMismatch, match="version 9, this penstock reads 1"):
        Signatures.from_bytes(bytes(about) + checksum + data[56:], CONFIG)


# The index


def prose(rng: random.Random, size: int, vocabulary: int = 3000) -> bytes:
    words = []
    while size > 0:
        words.append(b"w%d" % rng.randrange(vocabulary))
        size -= len(words[-1]) + 1
    return b" ".join(words)


def edited(rng: random.Random, text: bytes, share: float) -> bytes:
    words = text.split(b" ")
    for k in range(len(words)):
        if rng.random() < share:
            words[k] = b"x%d" % rng.randrange(10**9)
    return b" ".join(words)


def stream(rng: random.Random, count: int) -> list[bytes]:
    """Texts of many sizes, with repetitions of all kinds, some of what came just before."""
    texts: list[bytes] = []
    for _ in range(count):
        kind = rng.randrange(6) if texts else 0
        base = rng.choice(texts[-20:]) if texts else b""
        if kind < 2:
            texts.append(prose(rng, rng.choice([0, 10, 100, 1000])))
        elif kind == 2:
            texts.append(base)
        elif kind == 3:
            texts.append(b"\n" + base.replace(b" ", rng.choice([b"  ", b"\t", b" \n"]), 3))
        else:
            texts.append(edited(rng, base, rng.choice([0.005, 0.02, 0.05])))
    return texts


@given(st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_verdicts_are_those_of_the_reference(seed: int) -> None:
    texts = stream(random.Random(seed), 60)
    found = Index(SMALL).decide(signatures(documents_of(texts), SMALL))
    assert as_pairs(found) == reference_decisions(texts, SMALL)


@given(st.integers(0, 10**9), st.data())
@settings(max_examples=25, deadline=None)
def test_a_restart_changes_nothing(seed: int, data: st.DataObject) -> None:
    texts = stream(random.Random(seed), 80)
    everything = signatures(documents_of(texts), SMALL)
    whole = as_pairs(Index(SMALL).decide(everything))
    stop = data.draw(st.integers(0, len(texts)))
    cuts = sorted(data.draw(st.lists(st.integers(0, stop), max_size=4)))
    index, files, verdicts = Index(SMALL), [], []
    for a, b in zip([0, *cuts], [*cuts, stop], strict=True):
        some = everything.take(np.arange(a, b))
        decided = index.decide(some)
        verdicts += as_pairs(decided)
        files.append(some.take(decided.kept).to_bytes())
    rebuilt = Index(SMALL)
    for file in files:
        rebuilt.insert(Signatures.from_bytes(file, SMALL))
    assert len(rebuilt) == len(index)
    for name in index._kept._fields:
        assert np.array_equal(getattr(rebuilt._kept, name), getattr(index._kept, name))
    verdicts += as_pairs(rebuilt.decide(everything.take(np.arange(stop, len(texts)))))
    assert verdicts == whole


def test_the_first_wins_and_is_named() -> None:
    rng = random.Random(2)
    a, b = prose(rng, 3000), prose(rng, 3000)
    texts = [a, b, a, b.replace(b" ", b"\n"), edited(rng, b, 0.005), prose(rng, 3000), a]
    found = Index(CONFIG).decide(signatures(documents_of(texts), CONFIG))
    assert [REASONS[reason] for reason in found.reasons] == [
        "",
        "",
        "exact_duplicate",
        "whitespace_duplicate",
        "near_duplicate",
        "",
        "exact_duplicate",
    ]
    assert found.of.tolist() == [-1, -1, 0, 1, 1, -1, 0]
    assert found.kept.tolist() == [True, True, False, False, False, True, False]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"normalised": False, "near": False}, [0, 1, 0, 0]),
        ({"exact": False, "near": False}, [0, 2, 2, 0]),
        ({"near": False}, [0, 1, 2, 0]),
        ({"exact": False, "normalised": False}, [0, 3, 3, 3]),
        ({"normalised": False}, [0, 1, 3, 3]),
    ],
)
def test_each_test_can_be_off(options: dict[str, bool], expected: list[int]) -> None:
    rng = random.Random(3)
    text = prose(rng, 5000)
    texts = [text, text, text.replace(b" ", b"  "), edited(rng, text, 0.004)]
    config = DedupConfig.from_json(options)
    index = Index(config)
    assert index.decide(signatures(documents_of(texts), config)).reasons.tolist() == expected
    assert len(index) == expected.count(0)


def test_texts_too_small_to_compare_are_told_by_their_hash_only() -> None:
    texts = [b"one two three", b"one two three four", b"one  two three", b"a", b"a", b"", b" \n"]
    found = Index(CONFIG).decide(signatures(documents_of(texts), CONFIG))
    assert found.reasons.tolist() == [0, 0, 2, 0, 1, 0, 2]


def test_an_empty_batch() -> None:
    index = Index(CONFIG)
    found = index.decide(signatures(documents_of([]), CONFIG))
    assert len(found.reasons) == len(found.of) == len(index) == 0
    index.insert(Signatures.concat(CONFIG, []))
    assert len(index) == 0


def random_signatures(rng: np.random.Generator, count: int, config: DedupConfig) -> Signatures:
    def words(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return rng.integers(0, 2**64, size, dtype=np.uint64)

    return Signatures(
        config,
        count,
        words(2 * count * config.exact),
        words(2 * count * config.normalised),
        rng.integers(0, 2**32, config.bands * count, dtype=np.uint32),
        words(config.words * count),
        np.full(count * config.near, 100, np.uint16),
    )


@pytest.mark.parametrize("config", [CONFIG, DedupConfig(near=False)], ids=["near", "exact"])
def test_nothing_is_lost_while_the_index_grows(config: DedupConfig) -> None:
    rng = np.random.default_rng(0)
    index = Index(config)
    batches = [random_signatures(rng, size, config) for size in (1, 16_383, 1, 8_191, 1, 40_000)]
    kept = 0
    for batch in batches:
        assert index.decide(batch).kept.all()
        kept += len(batch)
        assert len(index) == kept
    ordinal = 0
    for batch in batches:
        again = index.decide(batch)
        assert (again.reasons == 1).all()
        assert again.of.tolist() == list(range(ordinal, ordinal + len(batch)))
        ordinal += len(batch)


def test_near_duplicates_are_found_after_growth() -> None:
    rng = np.random.default_rng(1)
    config = DedupConfig(exact=False, normalised=False)
    index = Index(config)
    first = random_signatures(rng, 100, config)
    index.insert(first)
    index.insert(random_signatures(rng, 50_000, config))
    again = index.decide(first)
    assert (again.reasons == 3).all()
    assert again.of.tolist() == list(range(100))


@pytest.mark.parametrize("config", [CONFIG, SMALL, DedupConfig(near=False)])
def test_a_document_takes_what_is_stated(config: DedupConfig) -> None:
    rng = np.random.default_rng(2)
    index = Index(config)
    for _ in range(30):
        index.insert(random_signatures(rng, 1_000, config))
        if len(index) > 1 << 14:
            assert index.memory_bytes <= (index.bytes_per_document + 8) * len(index)
    assert Index(CONFIG).bytes_per_document == 545


def test_the_process_grows_by_what_is_stated() -> None:
    rng = np.random.default_rng(3)
    batch = random_signatures(rng, 1_000, CONFIG)
    index = Index(CONFIG)
    index.insert(batch)
    before = psutil.Process().memory_info().rss
    for _ in range(150):
        # other hashes, other keys, the same memory
        batch.normal[:] = rng.integers(0, 2**64, len(batch.normal), dtype=np.uint64)
        batch.keys[:] = rng.integers(0, 2**32, len(batch.keys), dtype=np.uint32)
        index.insert(batch)
    grown = psutil.Process().memory_info().rss - before
    assert grown < index.bytes_per_document * len(index) * 1.1 + (16 << 20)


def test_an_index_over_its_limit_says_what_to_do() -> None:
    rng = np.random.default_rng(4)
    index = Index(CONFIG, max_memory_bytes=20 << 20)
    some = random_signatures(rng, 50_000, CONFIG)
    with pytest.raises(BadConfig, match="full with 36,864 documents") as caught:
        index.insert(some)
    assert len(index) == 36_864
    assert "near=false" in caught.value.do
    assert "dedup_batch" in caught.value.do
    assert "allowed are 20,971,520" in caught.value.why
    with pytest.raises(BadConfig, match="full with 0 documents"):
        Index(CONFIG, max_memory_bytes=1000)


def test_a_chain_is_bounded_whatever_comes() -> None:
    """Documents that share all keys but are not alike: only CHAIN of them are listed."""
    rng = np.random.default_rng(5)
    config = DedupConfig(exact=False, normalised=False)
    some = random_signatures(rng, 20_000, config)
    some.keys[:] = np.tile(some.keys[: config.bands], 20_000)
    index = Index(config)
    began = time.process_time()
    found = index.decide(some)
    assert time.process_time() - began < 20
    assert found.kept.all()
    assert np.count_nonzero(index._kept.near) == CHAIN * config.bands
    again = index.decide(some.take(np.arange(100)))
    assert again.of[:CHAIN].tolist() == list(range(CHAIN))


def test_a_crowd_of_keys_is_bounded_too() -> None:
    """All hashes in one corner of the tables: what does not fit there is not found, no more."""
    rng = np.random.default_rng(6)
    some = random_signatures(rng, 30_000, CONFIG)
    some.normal[:] >>= np.uint64(24)
    some.keys[:] >>= np.uint32(24)
    index = Index(CONFIG)
    began = time.process_time()
    assert index.decide(some).kept.all()
    assert time.process_time() - began < 20
    assert index.decide(some.take(np.arange(500))).of.tolist() == list(range(500))


def test_the_same_text_a_hundred_thousand_times() -> None:
    texts = documents_of([b"tiny"] * 100_000)
    began = time.process_time()
    found = Index(CONFIG).decide(signatures(texts, CONFIG))
    assert time.process_time() - began < 10
    assert found.reasons.tolist() == [0] + [1] * 99_999
    assert set(found.of[1:].tolist()) == {0}


def test_a_hundred_thousand_tiny_texts() -> None:
    texts = documents_of([b"tiny %d" % k for k in range(100_000)])
    began = time.process_time()
    assert Index(CONFIG).decide(signatures(texts, CONFIG)).kept.all()
    assert time.process_time() - began < 10


def test_all_texts_nearly_the_same() -> None:
    rng = random.Random(7)
    text = prose(rng, 3000)
    texts = [text, *(edited(rng, text, 0.003) for _ in range(2000))]
    found = Index(CONFIG).decide(signatures(documents_of(texts), CONFIG))
    assert found.kept[0]
    assert not found.kept[1:].any()
    assert (found.of[1:] == 0).all()


def test_one_long_text() -> None:
    rng = random.Random(8)
    text = prose(rng, 5 << 20, 10**6)
    texts = [text, text[:-5], b"a" * (5 << 20), b" " * (5 << 20) + b"a"]
    found = Index(CONFIG).decide(signatures(documents_of(texts), CONFIG))
    assert as_pairs(found) == [(0, -1), (3, 0), (0, -1), (0, -1)]


def test_estimates_are_as_good_as_promised() -> None:
    """Recall and precision against exact Jaccard: sure beyond 0.08 of the threshold."""
    rng = random.Random(9)
    texts = [prose(rng, rng.choice([300, 1000, 5000, 20000])) for _ in range(300)]
    pairs = [edited(rng, text, rng.choice([0.005, 0.01, 0.02, 0.03, 0.04, 0.06])) for text in texts]
    index = Index(CONFIG)
    index.insert(signatures(documents_of(texts), CONFIG))
    found = index.decide(signatures(documents_of(pairs), CONFIG)).reasons != 0
    right = sure = 0
    for k, (one, other) in enumerate(zip(texts, pairs, strict=True)):
        a, b = set(shingles(one, 5)), set(shingles(other, 5))
        exact = len(a & b) / len(a | b)
        right += found[k] == (exact >= 0.8)
        if abs(exact - 0.8) > 0.08:
            sure += 1
            assert found[k] == (exact >= 0.8), exact
    assert sure > 100
    assert right > 270


# Benchmarks


def reference_contamination(text: bytes, items: Sequence[bytes], n: int) -> tuple[float, int]:
    found, best = set(shingles(text, n)), (0.0, -1)
    for number, item in enumerate(items):
        wanted = set(shingles(item, n))
        share = len(wanted & found) / len(wanted) if wanted else 0.0
        if share > best[0]:
            best = (share, number)
    return best


@given(st.integers(0, 10**9), st.integers(1, 14))
@settings(max_examples=40, deadline=None)
def test_contamination_is_that_of_the_reference(seed: int, n: int) -> None:
    rng = random.Random(seed)
    config = DedupConfig(contamination_shingle=n)
    items = [prose(rng, rng.randrange(300), 50) for _ in range(12)]
    texts = [prose(rng, rng.randrange(600), 50) for _ in range(6)]
    for item in items[:6]:
        part = item[rng.randrange(len(item) + 1) :]
        texts.append(b" ".join([rng.choice(texts), part, part, rng.choice(texts)]))
    made = Contaminants.from_texts([f"item{k}" for k in range(12)], documents_of(items, 3), config)
    for _ in range(2):  # the second time nothing of the first is left
        found = contaminated(documents_of(texts, 1), made, config)
        for k, text in enumerate(texts):
            share, best = reference_contamination(text, items, n)
            assert (found.shares[k], found.items[k]) == (pytest.approx(share), best)
            assert found.flags[k] == (best >= 0 and share >= 0.5)
    assert made.too_short == sum(not shingles(item, n) for item in items)
    assert len(made) == 12


def test_a_phrase_of_all_items_contaminates_with_few() -> None:
    rng = random.Random(10)
    phrase = b"Answer the following question with one of the letters A B C D and nothing else ."
    items = [phrase + b" " + prose(rng, 300, 10**6) for _ in range(100)]
    made = Contaminants.from_texts(["x"] * 100, documents_of(items))
    found = contaminated(documents_of([phrase, items[50]]), made, CONFIG)
    assert found.flags.tolist() == [False, True]
    assert found.items[1] == 50
    assert found.shares[1] == 1


def test_no_benchmark_contaminates_nothing() -> None:
    made = Contaminants.from_texts([], documents_of([]))
    found = contaminated(documents_of([b"a text"]), made, CONFIG)
    assert found.items.tolist() == [-1]
    assert not found.flags.any()


def test_benchmarks_are_read_from_files(tmp_path: Path) -> None:
    rng = random.Random(11)
    items = [prose(rng, 300) for _ in range(4)]
    lines = [json.dumps({"question": item.decode()}).encode() for item in items[:2]]
    (tmp_path / "gsm.jsonl").write_bytes(b"\n".join(lines) + b"\n\n")
    (tmp_path / "plain.txt").write_bytes(b"\n".join(items[2:]))
    paths = [tmp_path / "gsm.jsonl", tmp_path / "plain.txt"]
    made = load_contaminants(paths, field="question")
    assert made.names == ("gsm#1", "gsm#2", "plain#1", "plain#2")
    found = contaminated(documents_of([items[3], b"none", items[1]]), made, CONFIG)
    assert [made.names[item] for item in found.items[[0, 2]]] == ["plain#2", "gsm#2"]
    with pytest.raises(BadInput, match="no text in 'text'") as caught:
        load_contaminants(paths)
    assert caught.value.where.endswith("gsm.jsonl:1")
    assert caught.value.why == "it has question"
    (tmp_path / "bad.jsonl").write_bytes(b"{")
    with pytest.raises(BadInput, match="not JSON"):
        load_contaminants([tmp_path / "bad.jsonl"])
    with pytest.raises(InputMissing, match="not there"):
        load_contaminants([tmp_path / "none.txt"])


# The config


def test_config_survives_json() -> None:
    config = DedupConfig(threshold=0.7, bins=256, seed=2**64 - 1)
    assert DedupConfig.from_json(json.loads(json.dumps(config.as_json()))) == config
    assert DedupConfig.from_json({}) == CONFIG


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.8}, "'treshold' is not an option of dedup(?s:.*)did you mean threshold"),
        ({"threshold": 0.1}, "threshold is 0.1\n(?s:.*)from 0.3 to 1"),
        ({"threshold": "0.8"}, "threshold is '0.8'"),
        ({"bins": 100}, "bins is 100"),
        ({"bins": 512.0}, "bins is 512.0"),
        ({"shingle": 0}, "shingle is 0"),
        ({"shingle": 65}, "shingle is 65"),
        ({"min_shingles": 600}, "min_shingles is 600(?s:.*)1 to bins, 512"),
        ({"seed": -1}, "seed is -1"),
        ({"near": 1}, "near is 1(?s:.*)of type bool"),
        ({"exact": False, "normalised": False, "near": False}, "near is False"),
        ({"contamination_share": 0}, "contamination_share is 0"),
        ({"contamination_shingle": 99}, "contamination_shingle is 99"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        DedupConfig.from_json(options)
    assert issubclass(BadConfig, PenstockError)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_bands_fit_the_threshold(threshold: float) -> None:
    config = DedupConfig(threshold=threshold)
    assert 1 <= config.rows * config.bands <= 128
    assert 1 - (1 - threshold**config.rows) ** config.bands >= 0.98
