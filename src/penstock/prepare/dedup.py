"""Find documents that have been seen before.

In:    `Documents`; any number of processes compute `signatures`, one `Index` decides in order
Out:   for each document: keep it, or why not and which kept document it repeats
Keeps: the first seen; verdicts depend on the stream of signatures only, so an index that is
       rebuilt from the stored signatures of the kept documents decides as if it had never stopped
Never: reads a file; forgets; compares a document with more than CHAIN others in each band

Three tests: xxh3-128 of the text; the same with white space collapsed; and one-permutation MinHash
over shingles of `shingle` tokens. Documents that share a band's key are compared, and are near
duplicates if their sketches say that their Jaccard similarity is `threshold` or more. 512 bins of
two bits take what 128 of a byte take and are off by 0.022 instead of 0.035; that empty bins are
told apart makes the estimate of a short text all but exact.

With the defaults a kept document takes 363 bytes of a full index and at most 1.5 times that of
one that has just grown: 32 for two hashes, 128 for the sketch, 203 for 19 tables of 8-byte slots.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arrays import Bools, Bytes, Int64s, UInt32s, UInt64s
from penstock.errors import BadConfig, ShardMismatch
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.options import refuse_unknown
from penstock.prepare.dedup_layout import (
    CHUNK,
    KEPT,
    PROBES,
    Bins,
    Kept,
    Scratch,
    Sketches,
    Sketching,
)
from penstock.records import Documents

REASONS: Final = ("", "exact_duplicate", "whitespace_duplicate", "near_duplicate", "contaminated")
"""Why a document is not kept, by the numbers of `dedup_layout`."""

_MAGIC: Final = b"PSTKSIGN"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQ16s16s")
_KINDS: Final = ("<u8", "<u8", "<u4", "<u8", "<u2")
_SIGNED_BYTES: Final = 1 << 20  # of text, normalised and hashed while it is in the second cache
_BAND_VALUES: Final = 128  # that keys are made of; the sketch is finer
_FIRST_CAPACITY: Final = 1 << 14
_MOST_DOCUMENTS: Final = (1 << 32) - 2

_kernel = functools.partial(Kernel, "penstock.prepare.dedup_kernel")
_I, _U, _B = "int64[::1]", "uint64[::1]", "uint8[::1]"
_normalise = _kernel("normalise", f"void({_B}, {_I}, int64, int64, {_B}, {_I})")
_sketch = _kernel(
    "sketch",
    f"void({_B}, {_I}, int64, int64, uint64, Sketching, Scratch, Bins, Sketches)",
    *(Sketching, Scratch, Bins, Sketches),
)
_regrow = _kernel("regrow", f"void({_U}, {_U}, int64, int64, int64)")
_decide = _kernel(
    "decide",
    f"int64(int64, int64, int64, {_U}, {_U}, Sketches, Sketching, Kept, {_I}, {_I}, {_B}, {_I})",
    *(Sketches, Sketching, Kept),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupConfig:
    """What counts as a duplicate."""

    exact: bool = True
    """Drop a text that was there before, byte for byte."""
    normalised: bool = True
    """Drop a text that differs in its white space only."""
    near: bool = True
    """Drop a text most of whose shingles are those of one that was kept."""
    threshold: float = 0.8
    """Share of common shingles (Jaccard) from which two texts are near duplicates; 0.3 to 1."""
    bins: int = 512
    """Bins of a sketch, two bits each. More estimate better: 0.022 off at 512, 0.032 at 256."""
    shingle: int = 5
    """Tokens in a shingle. Fewer find more distant likeness."""
    min_shingles: int = 24
    """Fewest bins that shingles fill; a smaller text is not compared, but for exact equality."""
    seed: int = 0
    """Another seed makes other mistakes."""
    contamination_shingle: int = 13
    """Tokens in a shingle that is looked for in benchmarks."""
    contamination_share: float = 0.5
    """Share of a benchmark item's shingles from which a document that has them is dropped."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise _bad(field.name, value, f"of type {kind.__name__}")
        for name, is_right, expected in (
            ("near", self.exact or self.normalised or self.near, "true, if the others are false"),
            ("threshold", 0.3 <= self.threshold <= 1, "a number from 0.3 to 1"),
            ("bins", self.bins in (128, 256, 512, 1024, 2048), "128, 256, 512, 1024 or 2048"),
            ("shingle", 1 <= self.shingle <= 64, "1 to 64 tokens"),
            ("min_shingles", 1 <= self.min_shingles <= self.bins, f"1 to bins, {self.bins}"),
            ("seed", 0 <= self.seed < 1 << 64, "0 to 2**64 - 1"),
            ("contamination_shingle", 1 <= self.contamination_shingle <= 64, "1 to 64 tokens"),
            ("contamination_share", 0 < self.contamination_share <= 1, "above 0, up to 1"),
        ):
            if not is_right:
                raise _bad(name, getattr(self, name), expected)

    @property
    def rows(self) -> int:
        """Values in a band: the most with which 98 of 100 pairs at the threshold share a key.

        >>> DedupConfig(threshold=0.8).rows, DedupConfig(threshold=0.8).bands
        (7, 18)
        """
        for rows in range(16, 1, -1):
            if 1 - (1 - self.threshold**rows) ** (_BAND_VALUES // rows) >= 0.98:
                return rows
        return 1

    @property
    def bands(self) -> int:
        """Bands of a sketch: a table of the index for each."""
        return _BAND_VALUES // self.rows if self.near else 0

    @property
    def words(self) -> int:
        """Words of a sketch."""
        return self.bins // 32 if self.near else 0

    @property
    def threshold_millionths(self) -> int:
        """The threshold as kernels take it: they compare whole numbers."""
        return round(self.threshold * 1_000_000)

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that are equal where signatures mean the same."""
        near = (self.bins, self.rows, self.shingle, self.min_shingles, self.seed)
        about = (_VERSION, self.exact, self.normalised, *(near if self.near else ()))
        return hashlib.sha256(repr(tuple(map(int, about))).encode()).digest()[:16]

    def as_json(self) -> dict[str, bool | int | float]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, options: Mapping[str, Any]) -> "DedupConfig":
        """The inverse of `as_json`; what is left out has its default."""
        refuse_unknown(options, [field.name for field in dataclasses.fields(cls)], "dedup")
        return cls(**options)


DEFAULTS: Final = DedupConfig()


def _bad(name: str, value: object, expected: str) -> BadConfig:
    why = f"it must be {expected}"
    return BadConfig(f"{name} is {value!r}", where="dedup", why=why, do=f"correct dedup.{name}")


# Signatures: what workers compute


@dataclass(slots=True)
class Signatures:
    """All that `Index` needs to know of some documents; a column for each test that is on."""

    config: DedupConfig
    count: int
    raw: UInt64s
    """xxh3-128 of each text: two words each, the high one first; empty if not `exact`."""
    normal: UInt64s
    """The same of each normalised text; empty if not `normalised`."""
    keys: UInt32s
    """`bands` each; empty if not `near`."""
    sketch: UInt64s
    """`bins` pairs of bits each; empty if not `near`."""
    filled: npt.NDArray[np.uint16]
    """Bins that each text's shingles filled; empty if not `near`."""

    def __len__(self) -> int:
        return self.count

    def take(self, rows: Bools | npt.NDArray[np.integer[Any]]) -> "Signatures":
        """Some of them, by a mask or by numbers."""
        numbers = np.arange(self.count)[rows]
        picked = (
            column.reshape(self.count, -1)[numbers].reshape(-1) if len(column) else column
            for column in self.columns
        )
        return Signatures(self.config, len(numbers), *picked)

    @property
    def columns(self) -> tuple[npt.NDArray[Any], ...]:
        return self.raw, self.normal, self.keys, self.sketch, self.filled

    @classmethod
    def concat(cls, config: DedupConfig, parts: "Sequence[Signatures]") -> "Signatures":
        """Those of several, in order."""
        for part in parts:
            _check_config(part.config.fingerprint, config)
        columns = (
            np.concatenate([np.zeros(0, kind), *(part.columns[number] for part in parts)])
            for number, kind in enumerate(_KINDS)
        )
        return cls(config, sum(part.count for part in parts), *columns)

    def to_bytes(self) -> bytes:
        """A file of them: a header with the config's fingerprint, the columns, one hash over all.

        magic 8, version 4, bins 4, count 8, fingerprint 16, xxh3-128 of all the rest 16; then
        the columns as they stand in the class: little-endian, one after the other.
        """
        body = b"".join(
            column.astype(kind, copy=False).tobytes()
            for column, kind in zip(self.columns, _KINDS, strict=True)
        )
        about = (_MAGIC, _VERSION, self.config.bins, self.count, self.config.fingerprint)
        return _HEADER.pack(*about, _checksum(about, body)) + body

    @classmethod
    def from_bytes(cls, data: bytes, config: DedupConfig, where: str = "") -> "Signatures":
        """What `to_bytes` wrote with such a config; anything else is an error."""
        count = read_count(data, where)
        *about, checksum = _HEADER.unpack(data[: _HEADER.size])
        if _checksum(tuple(about), memoryview(data)[_HEADER.size :]) != checksum:
            raise _damaged("its checksum is not that of its content", where)
        if about[1] != _VERSION:
            raise _damaged(f"it has version {about[1]}, this penstock reads {_VERSION}", where)
        _check_config(about[4], config, where)
        places = column_places(config, count)
        if places[-1] != len(data):
            raise _damaged(f"it has {len(data):,} bytes, not {places[-1]:,}", where)
        columns = (
            np.frombuffer(data[a:b], kind).astype(kind[1:])
            for (a, b), kind in zip(itertools.pairwise(places), _KINDS, strict=True)
        )
        return cls(config, count, *columns)


def column_places(config: DedupConfig, count: int) -> list[int]:
    """Where the columns of `count` signatures begin in a file, and where the last one ends."""
    near = (4 * config.bands, 8 * config.words, 2 * config.near)
    sizes = (size * count for size in (16 * config.exact, 16 * config.normalised, *near))
    return list(itertools.accumulate(sizes, initial=_HEADER.size))


def read_count(header: bytes, where: str = "") -> int:
    """How many signatures a file has whose first bytes these are; its checksum is not looked at."""
    if not header.startswith(_MAGIC):
        raise _damaged("it does not begin as a file of signatures does", where)
    if len(header) < _HEADER.size:
        raise _damaged(f"it ends after {len(header)} bytes", where)
    return int(_HEADER.unpack(header[: _HEADER.size])[3])


def _checksum(about: tuple[Any, ...], body: bytes | memoryview) -> bytes:
    hashed = xxhash.xxh3_128(_HEADER.pack(*about, bytes(16)))
    hashed.update(body)
    return hashed.digest()


def _damaged(why: str, where: str) -> ShardMismatch:
    do = "fetch it anew, or make the dataset again: without it duplicates cannot be told"
    return ShardMismatch(
        "a file of signatures is not what was written", where=where, why=why, do=do
    )


def _check_config(found: bytes, config: DedupConfig, where: str = "") -> None:
    if found != config.fingerprint:
        raise BadConfig(
            "signatures were made with other options than these",
            where=where,
            why=f"their fingerprint is {found.hex()}, that of the config {config.fingerprint.hex()}"
            " (exact, normalised, near, bins, shingle, min_shingles, seed)",
            do="use the options that the dataset was begun with, or begin another",
        )


def signatures(documents: Documents, config: DedupConfig) -> Signatures:
    """The signatures of these documents, in order. Needs as much scratch as the longest text."""
    count = len(documents)
    out = Sketches(
        keys=np.empty(config.bands * count, np.uint32),
        words=np.empty(config.words * count, np.uint64),
        filled=np.empty(count if config.near else 0, np.uint16),
    )
    bins = Bins(np.empty(config.bins, np.uint64), np.empty(_BAND_VALUES, np.uint64))
    raw: list[bytes] = []
    normal: list[bytes] = []
    at, first = documents.at, 0
    scratch = np.zeros(0, np.uint8)
    while first < count:
        # as many as stay in the cache from one test to the next, one at least
        stop = int(np.searchsorted(at, at[first] + _SIGNED_BYTES, "right")) - 1
        stop = min(max(stop, first + 1), count)
        if config.exact:
            raw += _digests(documents.data.data, at[first : stop + 1])
        if config.normalised:
            size = int(at[stop] - at[first])
            if len(scratch) < size + PAD:
                scratch = byte_buffer(size)
            ends = np.empty(stop - first + 1, np.int64)
            _normalise(documents.data, at, first, stop, scratch, ends)
            normal += _digests(scratch.data, ends)
        if config.near:
            _sketch(
                documents.data, at, first, stop, config.seed, _sketching(config), token_scratch(),
                bins, out,
            )  # fmt: skip
        first = stop
    return Signatures(config, count, _words(raw), _words(normal), *out)


def _sketching(config: DedupConfig) -> Sketching:
    return Sketching(
        shingle=config.shingle,
        bins=config.bins,
        min_shingles=config.min_shingles,
        bands=config.bands,
        rows=config.rows,
        words=config.words,
        threshold=config.threshold_millionths,
        normalised=config.normalised,
    )


def _digests(data: memoryview, at: Int64s) -> Iterator[bytes]:
    """A call for each text is cheap enough: 0.5 us, and 7 GB/s."""
    return (xxhash.xxh3_128_digest(data[a:b]) for a, b in itertools.pairwise(at.tolist()))


def _words(digests: list[bytes]) -> UInt64s:
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def token_scratch() -> Scratch:
    """Where kernels put tokens."""
    starts, ends = np.empty(CHUNK + PAD, np.int64), np.empty(CHUNK + PAD, np.int64)
    return Scratch(starts, ends, np.empty(CHUNK + 2 * PAD, np.uint64))


# The index: what the committer keeps


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What becomes of some documents, in order."""

    reasons: Bytes
    """Numbers in REASONS, KEPT for those to keep."""
    of: Int64s
    """Which kept document each one repeats, counted from 0 in the order of keeping; else -1."""

    @property
    def kept(self) -> Bools:
        return np.equal(self.reasons, KEPT)


class Index:
    """The documents kept so far, by their signatures."""

    def __init__(self, config: DedupConfig, *, max_memory_bytes: int = 1 << 62) -> None:
        self.config = config
        self._max_memory_bytes = max_memory_bytes
        self._state = np.zeros(1, np.int64)
        nothing = _empty_words(0)
        self._kept = Kept(nothing, nothing, nothing, nothing, nothing, slots=0, capacity=0)
        self._places = np.empty(config.bands, np.int64)
        self._grow()

    def __len__(self) -> int:
        return int(self._state[0])

    @property
    def memory_bytes(self) -> int:
        """What the index holds now."""
        return 8 * sum(self._sizes(self._kept.capacity))

    @property
    def bytes_per_document(self) -> int:
        """The most that a kept document takes once the index has grown; a third less when full."""
        return math.ceil(1.5 * 8 * sum(self._sizes(1 << 20)) / (1 << 20))

    def insert(self, signatures: Signatures) -> None:
        """Keep all of these: they were kept before, in this order."""
        self.decide(signatures, forced=True)

    def decide(self, signatures: Signatures, *, forced: bool = False) -> Verdicts:
        """Which of these to keep, all of them if `forced`; those are in the index from then on."""
        config = self.config
        _check_config(signatures.config.fingerprint, config)
        count = len(signatures)
        verdicts = Verdicts(np.zeros(count, np.uint8), np.empty(count, np.int64))
        hashes, raw = signatures.raw, signatures.normal
        if config.normalised:
            hashes, raw = raw, hashes
        sketches = Sketches(signatures.keys, signatures.sketch, signatures.filled)
        done = 0
        while True:
            done = _decide(
                done, count, forced, hashes, raw, sketches, _sketching(config), self._kept,
                self._state, self._places, verdicts.reasons, verdicts.of,
            )  # fmt: skip
            if done == count:
                return verdicts
            self._grow()

    def _sizes(self, capacity: int) -> list[int]:
        """Words of the columns and of the tables."""
        config, table = self.config, _slots(capacity) + PROBES
        exact, both = config.exact or config.normalised, config.exact and config.normalised
        columns = [2 * capacity * exact, 2 * capacity * both, config.words * capacity]
        return [*columns, table * exact, table * config.bands]

    def _grow(self) -> None:
        """Make room for half as many more.

        The steps depend on the number of documents only, and so does the place of every entry.
        """
        old = self._kept.capacity
        capacity = old + old // 2 or _FIRST_CAPACITY
        # each part is copied on its own, and stands there twice while it is
        sizes = self._sizes(capacity)
        peak = 8 * (sum(sizes) + (max(self._sizes(old)) if old else 0))
        if peak > self._max_memory_bytes or capacity > _MOST_DOCUMENTS:
            raise BadConfig(
                f"the index of duplicates is full with {old:,} documents",
                where="dedup",
                why=f"for {capacity:,} it takes {peak:,} bytes while it grows, allowed are"
                f" {self._max_memory_bytes:,} and {_MOST_DOCUMENTS:,} documents",
                do=f"set max_memory_bytes to {2 * peak:,} or more; or near=false, which takes"
                " an eighth; or deduplicate in batch mode, which works on disk (dedup_batch)",
            )
        slots = _slots(capacity)
        # no name for the tuple here: it would hold each part a second time
        self._kept = self._kept._replace(hashes=_enlarged(self._kept.hashes, sizes[0]))
        self._kept = self._kept._replace(raw=_enlarged(self._kept.raw, sizes[1]))
        self._kept = self._kept._replace(sketches=_enlarged(self._kept.sketches, sizes[2]))
        self._kept = self._kept._replace(exact=self._regrown(self._kept.exact, sizes[3], slots))
        self._kept = self._kept._replace(near=self._regrown(self._kept.near, sizes[4], slots))
        self._kept = self._kept._replace(slots=slots, capacity=capacity)

    def _regrown(self, old: UInt64s, size: int, slots: int) -> UInt64s:
        table = _empty_words(size)
        if self._kept.slots:
            _regrow(old, table, size // (slots + PROBES), self._kept.slots, slots)
        return table


def _slots(capacity: int) -> int:
    """Of a table that is three quarters full with that many."""
    return -(-4 * capacity // 3)


def _empty_words(count: int) -> UInt64s:
    return byte_buffer(8 * count)[: 8 * count].view(np.uint64)


def _enlarged(column: UInt64s, size: int) -> UInt64s:
    larger = _empty_words(size)
    larger[: len(column)] = column
    return larger
