"""Obey the plan: hold the shards of the window, and copy the tokens of rows out of them.

In:    the plan's rows; sources that decode shards
Out:   arrays of token ids
Keeps: at most `max_bytes` of decoded tokens; a shard is decoded once while it is in the window
Never: decides what comes next, copies a token through Python

Shards are decoded by threads, ahead of their first row where the plan already knows of them.
"""

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import MemoryLimit, ShardMismatch
from penstock.kernels import Kernel
from penstock.stream.plan import Rows
from penstock.stream.plan_layout import SEGMENT
from penstock.supply.shards import Decoded

Int32s = npt.NDArray[np.int32]
Key = tuple[int, int]
"""A source's number and a shard's."""

_fill_rows = Kernel(
    "penstock.supply.fetch_kernel",
    "fill_rows",
    "int64(int32[::1], int64, int64, int64[::1], uint64[::1], uint64[::1], uint8[::1], int64,"
    " int64, int64, int64, int64, int64, int32[::1])",
)


class TokenSource(Protocol):
    """What the fetch needs of a source."""

    name: str

    def decode(self, shard: int) -> Decoded:
        """All tokens of a shard."""

    def forget(self, shard: int) -> None:
        """The shard is no longer needed."""


class Fetch:
    """The decoded shards of the window."""

    def __init__(
        self, sources: list[TokenSource], *, max_bytes: int, bos: int = -1, eos: int = -1,
        pad: int = 0, threads: int = 2,
    ) -> None:  # fmt: skip
        self._sources = sources
        self._max_bytes = max_bytes
        self._bos, self._eos, self._pad = bos, eos, pad
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="penstock-fetch")
        self._coming: dict[Key, Future[Decoded]] = {}
        self._held: dict[Key, tuple[int, Decoded]] = {}
        self._tables = [np.full(64, -1, np.int64) for _ in sources]
        self._values = np.zeros(64, np.uint64)
        self._offsets = np.zeros(64, np.uint64)
        self._wide = np.zeros(64, np.uint8)
        self._free = list(range(63, -1, -1))
        self._lock = threading.Lock()
        self._decoded_bytes = 0
        self.peak_bytes = 0
        """The most that was held at once."""

    @property
    def held_bytes(self) -> int:
        """Decoded tokens held now."""
        return self._decoded_bytes

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Begin to decode shards that will be needed, as far as memory allows."""
        for key in keys:
            if key not in self._held and key not in self._coming:
                self._coming[key] = self._threads.submit(self._decode, key)

    def keep(self, keys: set[Key]) -> None:
        """Let go of all shards but these."""
        for key in [key for key in self._held if key not in keys]:
            slot, decoded = self._held.pop(key)
            self._tables[key[0]][key[1]] = -1
            self._free.append(slot)
            with self._lock:
                self._decoded_bytes -= decoded.nbytes
            self._sources[key[0]].forget(key[1])
        for key in [key for key in self._coming if key not in keys]:
            future = self._coming.pop(key)
            if not future.cancel():
                future.add_done_callback(self._uncount)

    def fill(self, rows: Rows, first: int, last: int, seq_len: int) -> Int32s:
        """The token ids of rows first..last of a block."""
        segments = rows.segments
        numbers = segments[:, 0]
        a, b = np.searchsorted(numbers, (first, last)).tolist()
        slots = self._slots(segments[a:b])
        out = np.empty((last - first, seq_len), np.int32)
        flat = segments.reshape(-1)
        wrong = _fill_rows(
            flat[a * SEGMENT : b * SEGMENT], 0, b - a, slots, self._values, self._offsets,
            self._wide, first, last - first, seq_len, self._bos, self._eos, self._pad,
            out.reshape(-1),
        )  # fmt: skip
        if wrong >= 0:
            _, source, _, shard, row, _, _ = segments[a + wrong].tolist()
            raise ShardMismatch(
                f"row {row} of shard {shard} has fewer tokens than its n_tokens says",
                where=f'source "{self._sources[source].name}"',
                do="make the dataset again with this version of penstock",
            )
        return out

    def _slots(self, segments: Int32s) -> npt.NDArray[np.int64]:
        """Where the shards of segments are held; those that are not there are brought."""
        if len(self._sources) == 1:
            found = self._look_up(0, segments[:, 3])
        else:
            found = np.empty(len(segments), np.int64)
            for source in np.unique(segments[:, 1]).tolist():
                mine = segments[:, 1] == source
                found[mine] = self._look_up(source, segments[mine, 3])
        if len(found) and found.min() < 0:
            missing = np.unique(segments[found < 0][:, (1, 3)], axis=0)
            keys = [(source, shard) for source, shard in missing.tolist()]
            self.prefetch(keys)
            for key in keys:
                self._hold(key)
            return self._slots(segments)
        return found

    def _look_up(self, source: int, shards: Int32s) -> npt.NDArray[np.int64]:
        table = self._tables[source]
        highest = int(shards.max()) if len(shards) else 0
        if highest >= len(table):
            grown = np.full(2 * highest + 64, -1, np.int64)
            grown[: len(table)] = table
            self._tables[source] = table = grown
        found: npt.NDArray[np.int64] = table[shards]
        return found

    def _hold(self, key: Key) -> None:
        decoded = self._coming.pop(key).result()
        if not self._free:
            size = len(self._values)
            self._values = np.concatenate([self._values, np.zeros(size, np.uint64)])
            self._offsets = np.concatenate([self._offsets, np.zeros(size, np.uint64)])
            self._wide = np.concatenate([self._wide, np.zeros(size, np.uint8)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self._values[slot] = decoded.values.__array_interface__["data"][0]
        self._offsets[slot] = decoded.at.__array_interface__["data"][0]
        self._wide[slot] = decoded.values.dtype == np.uint32
        self._held[key] = slot, decoded
        self._tables[key[0]][key[1]] = slot

    def _decode(self, key: Key) -> Decoded:
        source, shard = key
        decoded = self._sources[source].decode(shard)
        with self._lock:
            self._decoded_bytes += decoded.nbytes
            held = self._decoded_bytes
            self.peak_bytes = max(self.peak_bytes, held)
        if held > self._max_bytes:
            with self._lock:
                self._decoded_bytes -= decoded.nbytes
            raise MemoryLimit(
                f"the tokens of the window take {held / 1e9:.2f} GB, "
                f"{self._max_bytes / 1e9:.2f} GB are allowed",
                where=f'source "{self._sources[source].name}", shard {shard}, '
                f"{len(self._held)} shards held",
                do="the state can be saved and resumed; give the loader more max_memory_gb, "
                "or a smaller pool_size or pool_tokens",
            )
        return decoded

    def _uncount(self, future: "Future[Decoded]") -> None:
        if not future.cancelled() and future.exception() is None:
            with self._lock:
                self._decoded_bytes -= future.result().nbytes

    def close(self) -> None:
        """Let go of everything."""
        self.keep(set())
        self._threads.shutdown(wait=True, cancel_futures=True)
