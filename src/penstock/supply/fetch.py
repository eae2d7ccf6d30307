"""Obey the plan: copy the tokens of rows out of the shards of the window.

In:    the plan's rows; sources that give the tokens of shards
Out:   arrays of token ids
Keeps: what a `Window` keeps: at most `max_bytes`, each shard read once, and once more if its file
       was changed since
Never: decides what comes next, copies a token through Python, reads memory of a mapped file
       without having asked within `CHECK_S` whether the file is unchanged
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from penstock.arrays import Bools, Int32s, Int64s, Rooms
from penstock.errors import ShardMismatch
from penstock.kernels import Kernel
from penstock.stream.plan import Rows
from penstock.stream.plan_layout import SEGMENT
from penstock.supply.fetch_layout import Around, Held
from penstock.supply.window import Decodes, Key, Window
from penstock.tokenize.token_file import Tokens

CHECK_S = 0.05
"""A mapped file is looked at before it is read, if that was not done for so long. A look takes
about 2 microseconds."""

_fill_rows = Kernel(
    "penstock.supply.fetch_kernel",
    "fill_rows",
    "int64(int32[::1], int64[::1], Held, Around, int64, int64, int32[::1])",
    *(Held, Around),
)


_mark_trained = Kernel(
    "penstock.supply.loss_kernel",
    "mark_trained",
    "void(int32[::1], int64[::1], uint64[::1], uint64[::1], int64, int64, uint8[::1])",
)
_count_trained = Kernel(
    "penstock.supply.loss_kernel",
    "count_trained",
    "void(int32[::1], int64[::1], uint64[::1], uint64[::1], int64, int64, int64[::1])",
)


class Fetch(Window[Tokens]):
    """The tokens of the window's shards, with the addresses that the kernel copies from."""

    def __init__(
        self, sources: Sequence[Decodes[Tokens]], *, max_bytes: int | Callable[[], int],
        bos: int = -1, eos: int = -1, pad: int = 0, threads: int = 2, turn: float = 0,
    ) -> None:  # fmt: skip
        super().__init__(sources, max_bytes=max_bytes, threads=threads, turn=turn)
        self._around = Around(bos, eos, pad)
        self._tables = [np.full(64, -1, np.int64) for _ in sources]
        self._values = np.zeros(64, np.uint64)
        self._offsets = np.zeros(64, np.uint64)
        self._wide = np.zeros(64, np.uint8)
        self._spans = np.zeros(64, np.uint64)
        self._spans_at = np.zeros(64, np.uint64)
        """Where the trained ranges of shards are; 0 where a shard has none."""
        self._look_at = np.full(64, np.inf)
        """When the file of a slot is to be looked at; never if it is not mapped."""
        self._keys: dict[int, Key] = {}
        self._free = list(range(63, -1, -1))
        self._rooms = Rooms()

    def fill(self, rows: Rows, first: int, last: int, seq_len: int) -> Int32s:
        """The token ids of rows first..last of a block."""
        segments = rows.segments
        numbers = segments[:, 0]
        a, b = np.searchsorted(numbers, (first, last)).tolist()
        slots = self._slots(segments[a:b])
        size = (last - first) * seq_len
        out = self._rooms.lend(4 * size).view(np.int32).reshape(last - first, seq_len)
        flat = segments.reshape(-1)
        held = Held(self._values, self._offsets, self._wide)
        mine = flat[a * SEGMENT : b * SEGMENT]
        wrong = _fill_rows(mine, slots, held, self._around, first, seq_len, out.reshape(-1))
        if wrong >= 0:
            _, source, _, shard, row, _, _ = segments[a + wrong].tolist()
            raise ShardMismatch(
                f"row {row} of shard {shard} has fewer tokens than its n_tokens says",
                where=f'source "{self._sources[source].name}"',
                do="make the dataset again with this version of penstock",
            )
        return out

    def mark_trained(self, rows: Rows, seq_len: int) -> Bools:
        """Which tokens of rows are trained, where their shards say so."""
        slots = self._masked_slots(rows.segments)
        out = np.zeros((len(rows.fills), seq_len), np.uint8)
        flat = np.ascontiguousarray(rows.segments).reshape(-1)
        _mark_trained(flat, slots, self._spans, self._spans_at, 0, seq_len, out.reshape(-1))
        return out.view(np.bool_)

    def count_trained(self, rows: Rows, unit: int) -> Int64s:
        """How many tokens are trained of every `unit` rows, and how many are not, without the first
        of each document: [batch, source, trained or not]."""
        slots = self._masked_slots(rows.segments)
        batches, sources = -(-len(rows.fills) // unit), len(self._sources)
        out = np.zeros(batches * sources * 2, np.int64)
        flat = np.ascontiguousarray(rows.segments).reshape(-1)
        _count_trained(flat, slots, self._spans, self._spans_at, unit, sources, out)
        return out.reshape(batches, sources, 2)

    def _masked_slots(self, segments: Int32s) -> Int64s:
        slots = self._slots(segments)
        without = np.flatnonzero(self._spans_at[slots] == 0)
        if len(without):
            _, source, _, shard, _, _, _ = segments[without[0]].tolist()
            raise ShardMismatch(
                f"shard {shard} does not say what is trained",
                where=f'source "{self._sources[source].name}"',
                why="its token file has no loss_spans",
                do="make the dataset with penstock conversations",
            )
        return slots

    def _slots(self, segments: Int32s) -> Int64s:
        """Where the shards of segments are held; those that are not there are brought."""
        if len(self._sources) == 1:
            found = self._look_up(0, segments[:, 3])
        else:
            found = np.empty(len(segments), np.int64)
            for source in range(len(self._sources)):
                mine = segments[:, 1] == source
                found[mine] = self._look_up(source, segments[mine, 3])
        if len(found) and found.min() < 0:
            # not np.unique, whose first call imports 30 modules
            keys = sorted({(a, b) for a, b in segments[found < 0][:, (1, 3)].tolist()})
            self.prefetch(keys, now=True)
            for key in keys:
                self.bring(key)
            return self._slots(segments)
        return self._slots(segments) if self._drop_changed(found) else found

    def _drop_changed(self, slots: Int64s) -> bool:
        """Let go of shards whose files were changed: to bring them again is to verify them."""
        now = time.monotonic()
        due = slots[self._look_at[slots] <= now]
        changed = []
        for slot in set(due.tolist()):
            file = self._held[self._keys[slot]].file
            if file is None or file.is_unchanged():
                self._look_at[slot] = now + CHECK_S
            else:
                changed.append(self._keys[slot])
        for key in changed:
            self._drop(key)
        return bool(changed)

    def _look_up(self, source: int, shards: Int32s) -> Int64s:
        table = self._tables[source]
        highest = int(shards.max()) if len(shards) else 0
        if highest >= len(table):
            grown = np.full(2 * highest + 64, -1, np.int64)
            grown[: len(table)] = table
            self._tables[source] = table = grown
        found: Int64s = table[shards]
        return found

    def _placed(self, key: Key, tokens: Tokens) -> None:
        if not self._free:
            size = len(self._values)
            self._values = np.concatenate([self._values, np.zeros(size, np.uint64)])
            self._offsets = np.concatenate([self._offsets, np.zeros(size, np.uint64)])
            self._wide = np.concatenate([self._wide, np.zeros(size, np.uint8)])
            self._spans = np.concatenate([self._spans, np.zeros(size, np.uint64)])
            self._spans_at = np.concatenate([self._spans_at, np.zeros(size, np.uint64)])
            self._look_at = np.concatenate([self._look_at, np.full(size, np.inf)])
            self._free = list(range(2 * size - 1, size - 1, -1))
        slot = self._free.pop()
        self._keys[slot] = key
        self._look_at[slot] = np.inf if tokens.file is None else 0.0
        self._values[slot] = tokens.values.__array_interface__["data"][0]
        self._offsets[slot] = tokens.at.__array_interface__["data"][0]
        self._wide[slot] = tokens.values.dtype == np.uint32
        self._spans[slot] = self._spans_at[slot] = 0
        if (spans := tokens.spans) is not None:
            self._spans[slot] = spans.values.__array_interface__["data"][0]
            self._spans_at[slot] = spans.at.__array_interface__["data"][0]
        self._tables[key[0]][key[1]] = slot

    def _released(self, key: Key) -> None:
        table = self._tables[key[0]]
        self._free.append(int(table[key[1]]))
        table[key[1]] = -1
