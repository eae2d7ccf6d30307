"""Count byte strings in a hash table that kernels fill, and on disk when memory is short.

In:    text in buffers, from any number of threads with a table each
Out:   `PretokenCounts`: every distinct pretoken with its count
Keeps: each table within its share of `max_bytes`; what does not fit is spilled to disk by parts
       of the hash, and each part is summed on its own at the end
Never: touches a pretoken from Python, unless somebody iterates over the result
"""

import hashlib
import itertools
import json
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.arrays import Bytes, Int64s, UInt64s, offsets_of
from penstock.disk import open_own, replacing
from penstock.errors import BadInput
from penstock.kernels import PAD, Kernel, byte_buffer
from penstock.tokenize.count_layout import (
    ARENA_USED,
    DONE,
    NEED_MORE,
    NEEDS,
    RING,
    SLOT,
    STATE,
    STATUS,
    TABLE_FULL,
    USED,
    WAITING,
    WRITTEN,
    Entries,
    Specials,
    Table,
)
from penstock.tokenize.scan_layout import Cutter

_SLOT_BYTES = 8 * SLOT
_LEAST_SLOTS = 1 << 12
_FIRST_SLOTS = 1 << 16
_PARTS = 64

_MODULE = "penstock.tokenize.count_kernel"
_rehash = Kernel(_MODULE, "rehash", "void(uint64[::1], uint64[::1], int64)")
_measure = Kernel(_MODULE, "measure", "void(uint64[::1], int64, int64[::1], int64[::1])")
_unload = Kernel(
    _MODULE, "unload", "void(Table, int64, int64[::1], int64[::1], Entries)", *(Table, Entries)
)
_count_text = Kernel(
    _MODULE,
    "count_text",
    "int64(uint8[::1], int64, int64, int64, Cutter, Specials, Table)",
    *(Cutter, Specials, Table),
)
_count_rows = Kernel(
    _MODULE,
    "count_rows",
    "int64(uint8[::1], int64[::1], int64, int64, Cutter, Specials, Table)",
    *(Cutter, Specials, Table),
)
_load = Kernel(_MODULE, "load", "int64(Entries, int64, int64, int64, Table)", *(Entries, Table))


class CountTable:
    """Counts of one thread. Kernels add to it through `table`, and ask for room."""

    def __init__(self, max_bytes: int, spill: "Spill") -> None:
        self.state = np.zeros(STATE, np.int64)
        self._ring = np.zeros(WAITING * RING, np.uint64)
        self._max_bytes = max_bytes
        self._spill = spill
        self._slots = _FIRST_SLOTS
        while self._slots > _LEAST_SLOTS and self._slots * _SLOT_BYTES * 4 > max_bytes:
            self._slots //= 2
        self._words = _words(SLOT * self._slots)
        self._arena: Bytes = byte_buffer(min(1 << 20, max(max_bytes // 4, 1 << 14)))

    @property
    def table(self) -> Table:
        """The same for kernels."""
        shift = 64 - (self._slots.bit_length() - 1)
        return Table(self._words, shift, self._arena, self.state, self._ring)

    def count_text(
        self, data: Bytes, stop: int, is_last: bool, cutter: Cutter, specials: Specials
    ) -> int:
        """Count data[:stop] as far as it is decided; says how far that is."""
        at = 0
        while True:
            at = int(_count_text(data, at, stop, is_last, cutter, specials, self.table))
            if self.state[STATUS] in (DONE, NEED_MORE):
                return at
            self.make_room()

    def count_rows(self, data: Bytes, at: Int64s, cutter: Cutter, specials: Specials) -> None:
        """Count data[at[k]:at[k + 1]] for each k, each a text of its own."""
        row, start = 0, int(at[0])
        while row < len(at) - 1:
            row = _count_rows(data, at, row, start, cutter, specials, self.table)
            start = int(self.state[WRITTEN])
            if self.state[STATUS] != DONE:
                self.make_room()

    @property
    def held_bytes(self) -> int:
        return self._slots * _SLOT_BYTES + len(self._arena)

    def make_room(self) -> None:
        """After TABLE_FULL or ARENA_FULL for a key of state[NEEDS] bytes: grow, or spill."""
        needs = int(self.state[NEEDS])
        if self.state[STATUS] == TABLE_FULL:
            # while it grows the old table stands beside the new one
            if 3 * self._slots * _SLOT_BYTES + len(self._arena) <= self._max_bytes:
                self._grow_table()
                return
        else:
            wanted = max(2 * len(self._arena), int(self.state[ARENA_USED]) + needs + PAD)
            if self._slots * _SLOT_BYTES + len(self._arena) + wanted <= self._max_bytes:
                self._grow_arena(wanted)
                return
        if self.state[USED]:
            self.spill()
        if needs + PAD > len(self._arena):
            if needs > self._max_bytes // 2:
                raise too_long(needs)
            self._grow_arena(needs + PAD)

    def spill(self) -> None:
        """Write the counts out and begin anew."""
        self._spill.write(self.unload(_PARTS))
        self.clear()

    def clear(self) -> None:
        self._words[:] = 0
        self.state[[USED, ARENA_USED]] = 0

    def release(self) -> None:
        """Give the memory back; nothing can be counted after this."""
        self._words = _words(0)
        self._arena = np.zeros(0, np.uint8)

    def unload(self, parts: int) -> "Unloaded":
        """All entries as arrays, ordered by `parts` of the hash."""
        table = self.table
        entries, sizes = np.zeros(parts, np.int64), np.zeros(parts, np.int64)
        _measure(table.slots, parts, entries, sizes)
        entry_at, byte_at = offsets_of(entries), offsets_of(sizes)
        used = int(self.state[USED])
        keys = byte_buffer(int(byte_at[-1]))
        made = Entries(keys, np.empty(used, np.int64), np.empty(used, np.int64))
        _unload(table, parts, entry_at[:-1].copy(), byte_at[:-1].copy(), made)
        return Unloaded(*made, entry_at, byte_at)

    def reserve(self, entries: int) -> bool:
        """Make the table large enough for that many; False if its limit does not allow it."""
        while 16 * entries >= 11 * self._slots:
            if 3 * self._slots * _SLOT_BYTES + len(self._arena) > self._max_bytes:
                return False
            self._grow_table()
        return True

    def load(self, more: "Unloaded") -> None:
        """Add what another table, or this one earlier, has unloaded.

        That is in the order of the hash: a table that grew on the way would be crowded at one end
        and empty at the other: 8 million distinct pretokens took 59 s to combine instead of 5 s.
        """
        self.reserve(int(self.state[USED]) + len(more.lengths))
        entry, at = 0, 0
        entries = Entries(more.keys, more.lengths, more.counts)
        while entry < len(more.lengths):
            entry = _load(entries, at, entry, len(more.lengths), self.table)
            at = int(self.state[WRITTEN])
            if self.state[STATUS] != DONE:
                self.make_room()

    def add(self, counts: Mapping[bytes, int]) -> None:
        """Add counts that Python made; for patterns that have no scanner."""
        lengths = np.fromiter(map(len, counts), np.int64, len(counts))
        keys = np.frombuffer(b"".join(counts) + bytes(PAD), np.uint8)
        times = np.fromiter(counts.values(), np.int64, len(counts))
        self.load(Unloaded(keys, lengths, times, offsets_of(lengths[:0]), offsets_of(lengths[:0])))

    def _grow_table(self) -> None:
        larger = _words(2 * SLOT * self._slots)
        self._slots *= 2
        _rehash(self._words, larger, self.table.shift)
        self._words = larger

    def _grow_arena(self, size: int) -> None:
        larger = byte_buffer(size)
        used = int(self.state[ARENA_USED])
        larger[:used] = self._arena[:used]
        self._arena = larger


def too_long(size: int, where: str = "") -> BadInput:
    """The error for a pretoken that memory does not hold."""
    return BadInput(
        f"a pretoken of {size:,} bytes or more does not fit the memory limit",
        where=where,
        why="so long a text without a single boundary is seldom meant as text",
        do="leave that input out, or give more with max_memory_gb",
    )


@dataclass(frozen=True, slots=True)
class Unloaded:
    """Entries of a table as arrays; part p is entries entry_at[p]:entry_at[p + 1]."""

    keys: Bytes
    lengths: Int64s
    counts: Int64s
    entry_at: Int64s
    byte_at: Int64s


class Spill:
    """Counts on disk: a folder of its own, with one file for each table that was full."""

    def __init__(self, parent: Path | None) -> None:
        self._parent = parent
        self._folder: Path | None = None
        self._files: list[tuple[Path, Int64s, Int64s]] = []
        self._lock = threading.Lock()

    @property
    def files(self) -> int:
        return len(self._files)

    def close(self) -> None:
        """Remove what is on disk; this also happens with the last reference to it."""
        if self._folder is not None:
            self._removal()

    def folder(self) -> Path:
        """Made when it is first needed."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="penstock-counts-", dir=self._parent))
            self._removal = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder

    def write(self, unloaded: Unloaded) -> None:
        with self._lock:
            path = self.folder() / f"{len(self._files):06d}"
            self._files.append((path, unloaded.entry_at, unloaded.byte_at))
        with open(path, "xb") as file:
            for array in (unloaded.lengths, unloaded.counts, unloaded.keys[: unloaded.byte_at[-1]]):
                file.write(array.data)

    def entries(self, number: int) -> int:
        """How many there are of one part, those that are in several files counted anew."""
        return sum(int(at[number + 1] - at[number]) for _, at, _ in self._files)

    def part(self, number: int) -> Iterator[Unloaded]:
        """What was spilled of one part, file by file."""
        for path, entry_at, byte_at in self._files:
            first, last = int(entry_at[number]), int(entry_at[number + 1])
            start, stop = int(byte_at[number]), int(byte_at[number + 1])
            count, entries = last - first, int(entry_at[-1])
            with open(path, "rb") as file:
                file.seek(8 * first)
                lengths = np.frombuffer(file.read(8 * count), np.int64)
                file.seek(8 * (entries + first))
                counts = np.frombuffer(file.read(8 * count), np.int64)
                file.seek(16 * entries + start)
                keys = np.frombuffer(file.read(stop - start) + bytes(PAD), np.uint8)
            yield Unloaded(keys, lengths, counts, entry_at[:1], byte_at[:1])


class PretokenCounts(Mapping[bytes, int]):
    """Every distinct pretoken and how often it occurs: a mapping, and the arrays behind it.

    Pretoken k is keys[at[k]:at[k + 1]], counts[k] times. The order is that of no input.
    """

    def __init__(self, keys: Bytes, at: Int64s, counts: Int64s, *, held_by: object = None) -> None:
        self.keys_data = keys
        self.at = at
        self.counts = counts
        self.stats: dict[str, Any] = {}
        self._held_by = held_by
        self._places: dict[bytes, int] | None = None

    @classmethod
    def of(cls, counts: Mapping[bytes, int]) -> "PretokenCounts":
        """From a plain mapping.

        >>> PretokenCounts.of({b"the": 3, b" cat": 1}).most_common(1)
        [(b'the', 3)]
        """
        at = offsets_of(np.fromiter(map(len, counts), np.int64, len(counts)))
        keys = np.frombuffer(b"".join(counts) + bytes(PAD), np.uint8)
        return cls(keys, at, np.fromiter(counts.values(), np.int64, len(counts)))

    def __len__(self) -> int:
        return len(self.counts)

    def __iter__(self) -> Iterator[bytes]:
        for first in range(0, len(self), 1 << 16):
            ends = self.at[first : first + (1 << 16) + 1]
            text = self.keys_data[ends[0] : ends[-1]].tobytes()
            places = (ends - ends[0]).tolist()
            yield from (text[a:b] for a, b in itertools.pairwise(places))

    def __getitem__(self, pretoken: bytes) -> int:
        if self._places is None:
            self._places = {key: place for place, key in enumerate(self)}
        return int(self.counts[self._places[pretoken]])

    def items(self) -> Any:
        return list(zip(self, self.counts.tolist(), strict=True))

    def most_common(self, count: int | None = None) -> list[tuple[bytes, int]]:
        """The most frequent first; of equally frequent ones the smaller bytes first."""
        if count is not None and count <= 0:
            return []
        if count is not None and count < len(self):
            least = np.partition(self.counts, len(self) - count)[len(self) - count]
            picks = np.flatnonzero(self.counts >= least)
        else:
            picks = np.arange(len(self))
        found = [
            (self.keys_data[self.at[k] : self.at[k + 1]].tobytes(), int(self.counts[k]))
            for k in picks.tolist()
        ]
        return sorted(found, key=lambda item: (-item[1], item[0]))[:count]

    @property
    def total(self) -> int:
        """Pretokens in the text, each as often as it occurs."""
        return int(self.counts.sum())

    def at_least(self, count: int) -> "PretokenCounts":
        """Only what occurs that often."""
        if not len(self) or int(self.counts.min()) >= count:
            return self
        picks = np.flatnonzero(self.counts >= count)
        sizes = np.diff(self.at)[picks]
        at = offsets_of(sizes)
        keys = byte_buffer(int(at[-1]))
        source = np.repeat(self.at[:-1][picks] - at[:-1], sizes) + np.arange(int(at[-1]))
        keys[: int(at[-1])] = self.keys_data[source]
        kept = PretokenCounts(keys, at, self.counts[picks])
        kept.stats = dict(self.stats)
        return kept


def combine(tables: Sequence[CountTable], spill: Spill) -> PretokenCounts:
    """The counts of all tables as one; on disk, mapped into memory, if some were spilled."""
    fullest = max(tables, key=lambda table: int(table.state[USED]))
    if not spill.files and fullest.reserve(sum(int(table.state[USED]) for table in tables)):
        for table in tables:
            if table is not fullest:
                fullest.load(table.unload(1))
                table.clear()
        if not spill.files:
            whole = fullest.unload(1)
            return PretokenCounts(whole.keys, offsets_of(whole.lengths), whole.counts)
    for table in tables:
        if table.state[USED]:
            table.spill()
        table.release()
    return _combine_on_disk(spill)


def _combine_on_disk(spill: Spill) -> PretokenCounts:
    folder = spill.folder()
    paths = [folder / name for name in ("keys", "at", "counts")]
    size = 0
    with (
        open(paths[0], "xb") as keys,
        open(paths[1], "xb") as at,
        open(paths[2], "xb") as counts,
    ):
        for number in range(_PARTS):
            table = CountTable(1 << 62, spill)  # a part is small, and must not spill
            table.reserve(spill.entries(number))
            for unloaded in spill.part(number):
                table.load(unloaded)
            whole = table.unload(1)
            keys.write(whole.keys[: whole.byte_at[-1]].data)
            ends = size + offsets_of(whole.lengths)
            at.write(ends[:-1].data)
            size = int(ends[-1])
            counts.write(whole.counts.data)
        keys.write(bytes(PAD))
        at.write(np.array([size]).data)
    mapped = [
        np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
        for path, dtype in zip(paths, (np.uint8, np.int64, np.int64), strict=True)
    ]
    return PretokenCounts(mapped[0], mapped[1], mapped[2], held_by=spill)


def _words(count: int) -> UInt64s:
    return byte_buffer(8 * count)[: 8 * count].view(np.uint64)


def save_counts(counts: PretokenCounts, path: Path, identity: str) -> None:
    """Write counts; they are there when the file is. `identity` says what they were made of."""
    about = {"identity": identity, "stats": counts.stats, "distinct": len(counts)}
    digest = hashlib.sha256()
    size = int(counts.at[-1])
    with replacing(path, sync=True) as file:
        parts: list[Any] = [json.dumps(about).encode() + b"\n", counts.at.data]
        parts += [np.ascontiguousarray(counts.counts).data, counts.keys_data[:size].data]
        for part in parts:
            digest.update(part)
            file.write(part)
        file.write(digest.digest())


def load_counts(path: Path, identity: str) -> PretokenCounts | None:
    """Counts that were written, if they are whole and have the same identity."""
    try:
        with open(open_own(path, make=False, write=False), "rb") as file:
            head = file.readline(1 << 20)
            about = json.loads(head)
            if about["identity"] != identity:
                return None
            data = file.read()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    body, digest = memoryview(data)[:-32], data[-32:]
    check = hashlib.sha256(head)
    check.update(body)
    if check.digest() != digest:
        return None
    distinct = int(about["distinct"])
    at = np.frombuffer(body[: 8 * (distinct + 1)], np.int64)
    counts = np.frombuffer(body[8 * (distinct + 1) : 8 * (2 * distinct + 1)], np.int64)
    keys = np.frombuffer(data, np.uint8, offset=8 * (2 * distinct + 1))
    keys = np.concatenate([keys[: int(at[-1])], np.zeros(PAD, np.uint8)])
    found = PretokenCounts(keys, at, counts)
    found.stats = about["stats"]
    return found
