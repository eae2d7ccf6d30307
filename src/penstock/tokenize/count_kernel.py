"""The kernels that count pretokens in a hash table.

In:    text, a table of counts; special tokens
Out:   counts added to the table; the table moved, written out, read back
Keeps: one 32-byte slot for each pretoken; what is longer than 15 bytes lies in the arena
Never: allocates: a full table is a status for the caller

A slot is four words. Up to 15 bytes: the bytes in two words, the length in the top byte of the
second, the count in the third. Longer: hash, 0xFF in the top byte and the arena position below it,
count, length. The second word of an empty slot is 0.
"""

from typing import Any

import numpy as np

from penstock.simd import (
    copy_bytes,
    load64,
    next_index,
    njit,
    peek,
    prefetch,
    splitmix64,
    xxh64,
)
from penstock.tokenize.count_layout import (
    ARENA_FULL,
    ARENA_USED,
    DONE,
    NEED_MORE,
    NEEDS,
    PRETOKENS,
    RING,
    STATUS,
    TABLE_FULL,
    USED,
    WAITING,
    WRITTEN,
)
from penstock.tokenize.scan_kernel import cut
from penstock.tokenize.scan_layout import LOOKAHEAD

_LONG = np.uint64(0xFF) << np.uint64(56)


# The table of counts


@njit
def _hash_short(low: Any, high: Any) -> Any:
    h = low * np.uint64(0x9E3779B185EBCA87) ^ high * np.uint64(0xC2B2AE3D27D4EB4F)
    h ^= h >> np.uint64(29)
    return h * np.uint64(0x165667B19E3779F9)


@njit
def _bytes_differ(a: Any, i: Any, b: Any, j: Any, count: Any) -> Any:
    for k in range(count):
        if peek(a, i + k) != peek(b, j + k):
            return True
    return False


@njit
def _key(data: Any, i: Any, n: Any) -> Any:
    """The first two words of the slot of data[i:i+n], without a place in the arena; its hash."""
    if n > 15:
        h = xxh64(data, i, i + n, 0)
        return h, _LONG, h
    low = load64(data, i)
    high = load64(data, i + 8)
    if n < 8:
        low &= (np.uint64(1) << np.uint64(8 * n)) - np.uint64(1)
        high = np.uint64(0)
    else:
        high &= (np.uint64(1) << np.uint64(8 * n - 64)) - np.uint64(1)
    high |= np.uint64(n) << np.uint64(56)
    return low, high, _hash_short(low, high)


@njit
def _insert(data: Any, i: Any, n: Any, low: Any, high: Any, h: Any, times: Any, table: Any) -> Any:
    """Count data[i:i+n] `times` more; a new one that finds no room is left to the caller."""
    slots, arena, state = table.slots, table.arena, table.state
    last = (np.uint64(len(slots)) >> np.uint64(2)) - np.uint64(1)
    slot = (h >> np.uint64(table.shift)) & last
    at = np.int64(slot) << 2
    if n <= 15:
        while True:
            if peek(slots, at + 1) == high and peek(slots, at) == low:
                slots[at + 2] += np.uint64(times)
                return True
            if peek(slots, at + 1) == 0:
                break
            slot = (slot + np.uint64(1)) & last
            at = np.int64(slot) << 2
    else:
        while True:
            kept = peek(slots, at + 1)
            if kept == 0:
                break
            if kept >= _LONG and slots[at] == h and slots[at + 3] == np.uint64(n):
                where = np.int64(kept & ~_LONG)
                if not _bytes_differ(data, i, arena, where, n):
                    slots[at + 2] += np.uint64(times)
                    return True
            slot = (slot + np.uint64(1)) & last
            at = np.int64(slot) << 2
    state[NEEDS] = n
    if state[USED] * 16 >= (len(slots) >> 2) * 11:
        state[STATUS] = TABLE_FULL
        return False
    if n > 15:
        if state[ARENA_USED] + n + LOOKAHEAD > len(arena):
            state[STATUS] = ARENA_FULL
            return False
        copy_bytes(data, i, arena, state[ARENA_USED], n)
        high |= np.uint64(state[ARENA_USED])
        slots[at + 3] = np.uint64(n)
        state[ARENA_USED] += n
    slots[at] = low
    slots[at + 1] = high
    slots[at + 2] = np.uint64(times)
    state[USED] += 1
    return True


@njit
def _add(data: Any, i: Any, n: Any, times: Any, table: Any) -> Any:
    low, high, h = _key(data, i, n)
    return _insert(data, i, n, low, high, h, times, table)


# A pretoken waits in the ring while its slot is on its way from memory: on text of many languages
# the table is larger than the cache


@njit
def _enter_ring(data: Any, i: Any, n: Any, place: Any, table: Any) -> None:
    low, high, h = _key(data, i, n)
    last = (np.uint64(len(table.slots)) >> np.uint64(2)) - np.uint64(1)
    prefetch(table.slots, np.int64((h >> np.uint64(table.shift)) & last) << 2)
    ring, r = table.ring, (place & (RING - 1)) * WAITING
    ring[r] = np.uint64(i)
    ring[r + 1] = np.uint64(n)
    ring[r + 2], ring[r + 3], ring[r + 4] = low, high, h


@njit
def _leave_ring(data: Any, place: Any, table: Any) -> Any:
    """Count the pretoken that waits at `place`; -1, or where it begins if it found no room."""
    ring, r = table.ring, (place & (RING - 1)) * WAITING
    i = np.int64(ring[r])
    if _insert(
        data, i, np.int64(ring[r + 1]), ring[r + 2], ring[r + 3], ring[r + 4], 1, table
    ):  # fmt: skip
        table.state[PRETOKENS] += 1
        return np.int64(-1)
    return i


@njit
def rehash(old: Any, table: Any, shift: Any) -> None:
    """Move every slot of `old` into the larger `table`, which is empty."""
    last = (np.uint64(len(table)) >> np.uint64(2)) - np.uint64(1)
    for source in range(0, len(old), 4):
        high = old[source + 1]
        if high == 0:
            continue
        h = old[source] if high >= _LONG else _hash_short(old[source], high)
        slot = (h >> np.uint64(shift)) & last
        while table[(np.int64(slot) << 2) + 1] != 0:
            slot = (slot + np.uint64(1)) & last
        at = np.int64(slot) << 2
        for k in range(4):
            table[at + k] = old[source + k]


@njit
def measure(table: Any, parts: Any, entries: Any, sizes: Any) -> None:
    """For each part of the table by hash: its entries and the bytes of their keys."""
    for at in range(0, len(table), 4):
        high = table[at + 1]
        if high == 0:
            continue
        long = high >= _LONG
        h = table[at] if long else _hash_short(table[at], high)
        part = np.int64(splitmix64(h) % np.uint64(parts))
        entries[part] += 1
        sizes[part] += np.int64(table[at + 3] if long else high >> np.uint64(56))


@njit
def unload(table: Any, parts: Any, next_entry: Any, next_byte: Any, into: Any) -> None:
    """Write the table out by parts; `next_entry` and `next_byte` say where each part goes on."""
    slots, keys = table.slots, into.keys
    for at in range(0, len(slots), 4):
        high = slots[at + 1]
        if high == 0:
            continue
        long = high >= _LONG
        h = slots[at] if long else _hash_short(slots[at], high)
        part = np.int64(splitmix64(h) % np.uint64(parts))
        entry, o = next_entry[part], next_byte[part]
        n = np.int64(slots[at + 3] if long else high >> np.uint64(56))
        if long:
            copy_bytes(table.arena, np.int64(high & ~_LONG), keys, o, n)
        else:
            word = slots[at]
            for k in range(n):
                if k == 8:
                    word = high
                keys[o + k] = np.uint8(word & np.uint64(0xFF))
                word >>= np.uint64(8)
        into.lengths[entry] = n
        into.counts[entry] = np.int64(slots[at + 2])
        next_entry[part] += 1
        next_byte[part] += n


@njit
def load(entries: Any, first_byte: Any, first: Any, stop: Any, table: Any) -> Any:
    """Add entries first:stop of what `unload` wrote; the first that found no room, or `stop`.

    state[WRITTEN] is where the key of that entry begins.
    """
    o = first_byte
    for entry in range(first, stop):
        n = np.int64(entries.lengths[entry])
        if not _add(entries.keys, o, n, entries.counts[entry], table):
            table.state[WRITTEN] = o
            return entry
        o += n
    table.state[WRITTEN] = o
    table.state[STATUS] = DONE
    return stop


# Text into the table


@njit
def find_special(data: Any, i: Any, limit: Any, stop: Any, specials: Any) -> Any:
    """Where the first special token begins in data[i:limit], or `limit`; specials.found[0] says
    which.

    It must end by `stop`. Of those that begin at one place the longest counts: they are sorted so.
    """
    first, at = specials.first, specials.at
    only = np.int64(first[256]) | np.int64(first[257]) << 8  # the byte that all begin with, or 256
    while i < limit:
        if only < 256:
            i = next_index(data, i, limit, only)
        else:
            while i < limit and first[data[i]] == 0:
                i += 1
        if i >= limit:
            break
        for k in range(len(at) - 1):
            n = at[k + 1] - at[k]
            if i + n <= stop and not _bytes_differ(data, i, specials.text, at[k], n):
                specials.found[0] = k
                return i
        i += 1
    specials.found[0] = -1
    return limit


@njit
def count_text(
    data: Any, start: Any, stop: Any, is_last: Any, cutter: Any, specials: Any, table: Any
) -> Any:
    """Count the pretokens of data[start:stop]; how far it came.

    Unless `is_last`, more text follows: what could go on in it is left. state[STATUS] says why it
    stopped: DONE, NEED_MORE text, or TABLE_FULL or ARENA_FULL, then it is called again from there.
    """
    i = start
    at, found = specials.at, specials.found
    longest = 0
    for k in range(len(at) - 1):
        longest = max(longest, at[k + 1] - at[k])
    limit = stop if is_last else stop - max(longest - 1, 0)
    entered = left = np.int64(0)
    decided = True
    while i < limit and decided:
        edge = limit
        found[0] = -1
        if longest:
            edge = find_special(data, i, limit, stop, specials)
        whole = is_last or found[0] >= 0
        while i < edge:
            end, seen = cut(data, i, edge, cutter)
            if not whole and seen + LOOKAHEAD > edge:
                decided = False
                break
            if entered - left == RING:
                full = _leave_ring(data, left, table)
                if full >= 0:
                    return full
                left += 1
            _enter_ring(data, i, end - i, entered, table)
            entered += 1
            i = end
        if found[0] >= 0:
            # what waits is counted first: nobody comes back to before a special token
            while left < entered:
                full = _leave_ring(data, left, table)
                if full >= 0:
                    return full
                left += 1
            specials.counts[found[0]] += 1
            i = edge + at[found[0] + 1] - at[found[0]]
    while left < entered:
        full = _leave_ring(data, left, table)
        if full >= 0:
            return full
        left += 1
    table.state[STATUS] = DONE if is_last else NEED_MORE
    return i


@njit
def count_rows(
    data: Any, at: Any, row: Any, start: Any, cutter: Any, specials: Any, table: Any
) -> Any:
    """Count all rows from `row` on, each a text of its own, the first from `start` on.

    Returns the row that found no room, state[WRITTEN] is where in it; or how many there are when
    all are done.
    """
    rows = len(at) - 1
    while row < rows:
        start = count_text(data, start, at[row + 1], True, cutter, specials, table)
        if table.state[STATUS] != DONE:
            table.state[WRITTEN] = start
            return row
        row += 1
        start = at[row]
    table.state[STATUS] = DONE
    return rows
