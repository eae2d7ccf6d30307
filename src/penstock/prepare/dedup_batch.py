"""Deduplicate a corpus whose index exceeds memory: band keys, groups, connected components.

In:    files of `Signatures`, in the order of the corpus; a folder that all tasks can reach
Out:   for each document whether it is kept: the first of each component is
Keeps: memory to about `partition_bytes` for each task; 25 bytes a document and 16 an edge where it
       is called
Never: imports ray: tasks are plain functions of plain arguments, for any `map`

It differs from the online `Index` in two ways. Likeness is transitive here: if A is like B and B
like C, only A is kept, where the index keeps A and C if those two are not alike themselves, for it
compares with kept documents only. And a document is compared with the first COMPARED of those that
share a band's key, where the index lists CHAIN kept ones. Exact duplicates are the same in both.

Two rounds of two steps. Scatter: each file's keys go to disk, by partition of the key. Group: each
partition is sorted, documents of one key are compared, and those alike are an edge. First exact
hashes, then band keys of what is left: a million copies of one page are one record in the second.
"""

import itertools
import math
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.arrays import Bools, Int64s, UInt64s
from penstock.errors import InputMissing
from penstock.kernels import Kernel
from penstock.prepare.dedup import DedupConfig, Signatures, column_places, read_count
from penstock.prepare.dedup_layout import Pairs, Records

COMPARED: Final = 64
"""Documents of one key that each of the others is compared with."""

_RECORD_BYTES: Final = 96  # of memory for each record of a partition, sorted, with all that is made
_CHUNK_RECORDS: Final = 1 << 16  # whose sketches are held at once
_HEADER_BYTES: Final = 4096

_MODULE = "penstock.prepare.dedup_kernel"
_join = Kernel(_MODULE, "join", "void(int64[::1], int64[::1], int64[::1])")
_flatten = Kernel(_MODULE, "flatten", "void(int64[::1])")
_link = Kernel(
    _MODULE,
    "link",
    "int64(int64, Records, uint64[::1], int64, int64, int64, int64[::1], Pairs)",
    *(Records, Pairs),
)

Edges = Int64s
"""Pairs of document numbers, one after the other: shape (n, 2), the smaller one first."""


def band_keys(signatures: Signatures, first_document: int) -> tuple[UInt64s, Int64s]:
    """The keys of all bands, the band's number in the upper half, and the document of each.

    Documents are numbered from `first_document` on; those too small to be compared have no keys.
    """
    config = signatures.config
    large = np.flatnonzero(signatures.filled >= config.min_shingles)
    table = signatures.keys.reshape(-1, config.bands)[large].astype(np.uint64)
    table |= np.arange(config.bands, dtype=np.uint64) << np.uint64(32)
    keys = np.ascontiguousarray(table.T).reshape(-1)
    return keys, np.tile(large + first_document, config.bands)


def exact_keys(signatures: Signatures, first_document: int) -> tuple[UInt64s, Int64s]:
    """128 bits of each document as two words of a row: normalised, if the config says so."""
    words = signatures.normal if signatures.config.normalised else signatures.raw
    return words.reshape(-1, 2), np.arange(first_document, first_document + len(signatures))


def group_exact(keys: UInt64s, documents: Int64s) -> Edges:
    """An edge from the first document of each key to each of the others."""
    order = np.lexsort((documents, keys[:, 1], keys[:, 0]))
    keys, documents = keys[order], documents[order]
    again = np.zeros(len(keys), np.bool_)
    again[1:] = (keys[1:] == keys[:-1]).all(axis=1)
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(keys))))
    return np.stack([documents[first[again]], documents[again]], 1)


def group(
    keys: UInt64s, documents: Int64s, sketches_of: Callable[[Int64s], UInt64s], config: DedupConfig
) -> Edges:
    """Edges between documents that share a key and whose sketches are alike, as a forest.

    A pair that these edges connect anyway is not compared: there are fewer edges than documents.
    `sketches_of` gives the sketches of documents, whose numbers ascend.
    """
    order = np.lexsort((documents, keys))
    keys, documents = keys[order], documents[order]
    new = np.ones(len(keys) + 1, np.bool_)
    new[1:-1] = keys[1:] != keys[:-1]
    shared = ~(new[:-1] & new[1:])
    documents = documents[shared]
    begins = np.flatnonzero(new[:-1][shared])
    buckets = np.cumsum(new[:-1][shared], dtype=np.int64) - 1
    members, member_of = np.unique(documents, return_inverse=True)
    member_of = member_of.astype(np.int64, copy=False)
    parents = np.arange(len(members))
    edges = [np.zeros((0, 2), np.int64)]
    for start in range(0, len(documents), _CHUNK_RECORDS):
        stop = min(start + _CHUNK_RECORDS, len(documents))
        begin = int(begins[buckets[start]])
        # a bucket that goes on from the last chunk: those it is compared with come along
        heads = np.arange(begin, min(start, begin + COMPARED))
        records = np.concatenate([heads, np.arange(start, stop)])
        wanted, rows = np.unique(member_of[records], return_inverse=True)
        pairs = Pairs(np.empty(len(records), np.int64), np.empty(len(records), np.int64))
        found = _link(
            len(heads),
            Records(buckets[records], rows.astype(np.int64, copy=False), member_of[records]),
            sketches_of(members[wanted]), config.words, config.threshold_millionths, COMPARED,
            parents, pairs,
        )  # fmt: skip
        edges.append(np.stack([members[pairs.a[:found]], members[pairs.b[:found]]], 1))
    return np.concatenate(edges)


def components(edges: Iterable[Edges], count: int) -> Int64s:
    """For each of `count` documents the smallest number that edges connect it with.

    >>> components([np.array([[1, 3], [3, 4]])], 5).tolist()
    [0, 1, 2, 1, 1]
    """
    parents = np.arange(count)
    for some in edges:
        _join(parents, np.ascontiguousarray(some[:, 0]), np.ascontiguousarray(some[:, 1]))
    _flatten(parents)
    return parents


def first_of(smallest: Int64s) -> Bools:
    """Which documents are the first of their component: those to keep."""
    return np.equal(smallest, np.arange(len(smallest)))


# On disk


@dataclass(frozen=True, slots=True)
class _File:
    """A file of signatures, and the numbers of its documents."""

    path: Path
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A task: write one file's keys by partition."""

    file: _File
    folder: Path
    partitions: int
    config: DedupConfig
    wanted: bytes | None
    """One bit a document: whose band keys; None for the exact keys of all."""


@dataclass(frozen=True, slots=True)
class _Scattered:
    """What a scatter wrote: keys, then documents; partition p is records at[p]:at[p + 1]."""

    path: Path
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """A task: find the edges of one partition."""

    partition: int
    key_words: int
    scattered: tuple[_Scattered, ...]
    files: tuple[_File, ...]
    config: DedupConfig


def dedup_batch(
    signature_files: Sequence[Path],
    work_dir: Path,
    config: DedupConfig,
    map: Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]] = map,
    *,
    partition_bytes: int = 1 << 28,
) -> Bools:
    """Which documents of these files to keep, in order; the first of each component is.

    `map` runs tasks, in parallel if it likes, and gives results in order. A scatter holds one file
    of signatures three times over; a group holds `partition_bytes`, or more if a single key has
    more records than that, at 96 bytes each. `work_dir` needs 16 bytes for each document and band.
    """
    files: list[_File] = []
    for path in signature_files:
        count = read_count(_head(path), str(path))
        files.append(_File(Path(path), files[-1].first + files[-1].count if files else 0, count))
    total = files[-1].first + files[-1].count if files else 0
    work_dir.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="dedup-", dir=work_dir))
    edges: list[Edges] = []
    smallest = np.arange(total)
    try:
        rounds = [(False, 2)] * (config.exact or config.normalised) + [(True, 1)] * config.near
        for near, key_words in rounds:
            records = total * (config.bands if near else 1)
            partitions = max(1, math.ceil(records * _RECORD_BYTES / partition_bytes))
            kept = first_of(smallest)
            scatters = [
                _Scatter(file, folder, partitions, config, _bits(kept, file) if near else None)
                for file in files
            ]
            scattered = tuple(map(_scatter, scatters))
            groups = [
                _Group(number, key_words, scattered, tuple(files), config)
                for number in range(partitions)
            ]
            edges += map(_group, groups)
            smallest = components(edges, total)
            for written in scattered:
                written.path.unlink()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return first_of(smallest)


def _head(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_HEADER_BYTES)
    except FileNotFoundError:
        raise InputMissing(
            "a file of signatures is not there",
            where=str(path),
            do="give the paths that the shards were written with",
        ) from None


def _bits(kept: Bools, file: _File) -> bytes:
    return np.packbits(kept[file.first : file.first + file.count]).tobytes()


def _scatter(task: _Scatter) -> _Scattered:
    path = task.file.path
    signatures = Signatures.from_bytes(path.read_bytes(), task.config, str(path))
    if task.wanted is None:
        keys, documents = exact_keys(signatures, task.file.first)
        upper = keys[:, 0] >> np.uint64(32)
    else:
        bits = np.frombuffer(task.wanted, np.uint8)
        wanted = np.unpackbits(bits, count=len(signatures)).astype(np.bool_)
        numbers = np.flatnonzero(wanted) + task.file.first
        keys, documents = band_keys(signatures.take(wanted), 0)
        documents = numbers[documents]
        upper = keys & np.uint64(0xFFFFFFFF)
    partition = (upper * np.uint64(task.partitions) >> np.uint64(32)).astype(np.int64)
    order = np.argsort(partition, kind="stable")
    counts = np.bincount(partition, minlength=task.partitions).tolist()
    target = task.folder / f"{task.file.first:015d}-{secrets.token_hex(4)}"
    with open(target, "xb") as out:
        out.write(np.ascontiguousarray(keys[order]).data)
        out.write(documents[order].data)
    return _Scattered(target, tuple(itertools.accumulate(counts, initial=0)))


def _group(task: _Group) -> Edges:
    keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for written in task.scattered:
        first, stop = written.at[task.partition], written.at[task.partition + 1]
        width = 8 * task.key_words
        with open(written.path, "rb") as file:
            file.seek(width * first)
            keys.append(np.frombuffer(file.read(width * (stop - first)), np.uint64))
            file.seek(width * written.at[-1] + 8 * first)
            documents.append(np.frombuffer(file.read(8 * (stop - first)), np.int64))
    all_keys, all_documents = np.concatenate(keys), np.concatenate(documents)
    if task.key_words == 2:
        return group_exact(all_keys.reshape(-1, 2), all_documents)
    return group(
        all_keys,
        all_documents,
        lambda numbers: _read_sketches(task.files, numbers, task.config),
        task.config,
    )


def _read_sketches(files: Sequence[_File], numbers: Int64s, config: DedupConfig) -> UInt64s:
    """The sketches of documents whose numbers ascend, from the files they are in."""
    sketches = np.empty((len(numbers), config.words), np.uint64)
    ends = np.array([file.first + file.count for file in files], np.int64)
    at = np.searchsorted(numbers, ends)
    for file, first, stop in zip(files, [0, *at[:-1].tolist()], at.tolist(), strict=True):
        if first < stop:
            place = column_places(config, file.count)[3]
            mapped = np.memmap(file.path, np.uint8, "r")[place:].view(np.ndarray)
            size = 8 * config.words * file.count
            rows = mapped[:size].reshape(file.count, -1)[numbers[first:stop] - file.first]
            sketches[first:stop] = rows.view("<u8")
    return sketches.reshape(-1)
