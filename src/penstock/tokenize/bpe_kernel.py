"""The kernels of `bpe`: learn merges from counted words.

In:    words as symbols end to end, each behind its size and how often it occurs
Out:   merges in order, words rewritten in place
Keeps: counts of all pairs, and for each queued pair the words in which it arose
Never: allocates, visits a word that does not hold the pair, goes on when an array may overflow

The changes of one merge (a, b) → new are gathered by neighbour in two dense arrays, not pair by
pair in the hash table: left[x] says how much (x, a) lost to (x, new), right[y] how much (b, y) lost
to (new, y). The table is touched once for each neighbour, not four times for each occurrence.
"""

from typing import Any

import numpy as np

from penstock.simd import njit, peek, prefetch
from penstock.tokenize.bpe_layout import (
    ARENA,
    ENTRIES,
    HEAD,
    HEAP,
    LEAST_COUNT,
    MERGES,
    NO_PAIR,
    PAIRS,
    TOKENS,
    VOCAB,
)

_EMPTY = np.uint64(NO_PAIR)


@njit
def _pair(a: Any, b: Any) -> Any:
    return np.uint64(a) << np.uint64(32) | np.uint64(b)


# The table of pair counts: key and count in turn


@njit
def _slot_of(pair: Any, table: Any) -> Any:
    """Where `pair` stands in the table, or the empty place where it would."""
    last = (np.uint64(len(table)) >> np.uint64(1)) - np.uint64(1)
    h = pair * np.uint64(0x9E3779B97F4A7C15)
    slot = (h ^ (h >> np.uint64(32))) & last
    while True:
        key = peek(table, np.int64(slot << np.uint64(1)))
        if key == pair or key == _EMPTY:
            return np.int64(slot << np.uint64(1))
        slot = (slot + np.uint64(1)) & last


@njit
def _add_to_pair(pair: Any, change: Any, table: Any, state: Any) -> Any:
    """Change the count of a pair; its new count."""
    at = _slot_of(pair, table)
    if table[at] == _EMPTY:
        table[at] = pair
        table[at + 1] = np.uint64(0)
        state[PAIRS] += 1
    now = np.int64(table[at + 1]) + change
    table[at + 1] = np.uint64(now)
    return now


@njit
def rehash_pairs(old: Any, table: Any) -> None:
    """Move all pairs of `old` into the larger `table`, all of it empty."""
    for at in range(0, len(old), 2):
        if old[at] != _EMPTY:
            to = _slot_of(old[at], table)
            table[to] = old[at]
            table[to + 1] = old[at + 1]


# The queue: the largest count first, of equal ones the smallest pair


@njit
def _before(count: Any, pair: Any, other_count: Any, other_pair: Any) -> Any:
    return count > other_count or (count == other_count and pair < other_pair)


@njit
def _push(entry: Any, count: Any, queue: Any, state: Any) -> None:
    heap, heap_count, entry_pair = queue.heap, queue.heap_count, queue.entry_pair
    pair = entry_pair[entry]
    at = state[HEAP]
    state[HEAP] += 1
    while at > 0:
        parent = (at - 1) >> 2
        other = heap[parent]
        if not _before(count, pair, heap_count[parent], entry_pair[other]):
            break
        heap[at] = other
        heap_count[at] = heap_count[parent]
        at = parent
    heap[at] = entry
    heap_count[at] = count


@njit
def _pop(queue: Any, state: Any) -> None:
    """Take the first away."""
    heap, heap_count, entry_pair = queue.heap, queue.heap_count, queue.entry_pair
    state[HEAP] -= 1
    size = state[HEAP]
    if size == 0:
        return
    entry, count = heap[size], heap_count[size]
    pair = entry_pair[entry]
    at = 0
    while True:
        child = 4 * at + 1
        if child >= size:
            break
        best = child
        for other in range(child + 1, min(child + 4, size)):
            if _before(
                heap_count[other], entry_pair[heap[other]], heap_count[best], entry_pair[heap[best]]
            ):
                best = other
        if not _before(heap_count[best], entry_pair[heap[best]], count, pair):
            break
        heap[at] = heap[best]
        heap_count[at] = heap_count[best]
        at = best
    heap[at] = entry
    heap_count[at] = count


# The work


@njit
def begin(
    keys: Any, key_at: Any, counts: Any, byte_id: Any, symbols: Any,
    weights: Any, events: Any, last_word: Any, queue: Any, state: Any,
) -> None:  # fmt: skip
    """Turn bytes into symbols and queue every pair of bytes, with the words that hold it.

    A word is HEAD numbers, its size and its count in two halves, then its symbols: what a merge
    needs of it lies together. Its name is the place of its first symbol.
    """
    words = len(counts)
    for word in range(words):
        for i in range(key_at[word], key_at[word + 1] - 1):
            both = np.int64(keys[i]) << 8 | np.int64(keys[i + 1])
            weights[both] += counts[word]
            if last_word[both] != word:
                last_word[both] = word
                events[both] += 1
    for code in range(1 << 16):
        last_word[code] = -1
        if weights[code] == 0:
            continue
        pair = _pair(byte_id[code >> 8], byte_id[code & 0xFF])
        _add_to_pair(pair, weights[code], queue.table, state)
        entry = state[ENTRIES]
        state[ENTRIES] += 1
        queue.entry_pair[entry] = pair
        queue.entry_at[entry] = state[ARENA]
        queue.entry_words[entry] = events[code]
        events[code], state[ARENA] = state[ARENA], state[ARENA] + events[code]
        _push(entry, weights[code], queue, state)
    for word in range(words):
        for i in range(key_at[word], key_at[word + 1] - 1):
            both = np.int64(keys[i]) << 8 | np.int64(keys[i + 1])
            if last_word[both] != word:
                last_word[both] = word
                queue.arena[events[both]] = key_at[word] + HEAD * (word + 1)
                events[both] += 1
        base = key_at[word] + HEAD * (word + 1)
        symbols[base - 3] = key_at[word + 1] - key_at[word]
        symbols[base - 2] = counts[word] >> 31
        symbols[base - 1] = counts[word] & 0x7FFFFFFF
        for i in range(key_at[word], key_at[word + 1]):
            symbols[i + HEAD * (word + 1)] = byte_id[keys[i]]


@njit
def _rewrite(
    a: Any, b: Any, new: Any, first: Any, stop: Any, arena: Any, symbols: Any, beside: Any,
    met: Any,
) -> None:  # fmt: skip
    """Merge (a, b) in the words arena[first:stop]; what its neighbours are, and in which words."""
    left, right, left_last, right_last, left_events, right_events = beside
    near, near_words, far, far_words, seen = met
    nears = fars = 0
    for place in range(first, stop):
        ahead = np.int64(peek(arena, min(place + 12, stop - 1)))
        prefetch(symbols, ahead - 3)
        prefetch(symbols, ahead + 12)
        base = np.int64(peek(arena, place))
        size = np.int64(peek(symbols, base - 3))
        weight = np.int64(peek(symbols, base - 2)) << 31 | np.int64(peek(symbols, base - 1))
        i = np.int64(0)
        while i + 1 < size and not (
            peek(symbols, base + i) == a and peek(symbols, base + i + 1) == b
        ):
            i += 1
        if i + 1 >= size:
            continue
        o = i
        while i < size:
            symbol = peek(symbols, base + i)
            if symbol == a and i + 1 < size and peek(symbols, base + i + 1) == b:
                if o > 0:
                    x = np.int64(peek(symbols, base + o - 1))
                    left[x] += weight
                    if left_last[x] != base:
                        left_last[x] = base
                        left_events[x] += 1
                        near[nears] = x
                        near_words[nears] = base
                        nears += 1
                if i + 2 < size:
                    y = np.int64(peek(symbols, base + i + 2))
                    right[y] += weight
                    if right_last[y] != base:
                        right_last[y] = base
                        right_events[y] += 1
                        far[fars] = y
                        far_words[fars] = base
                        fars += 1
                symbol = new
                i += 1
            symbols[base + o] = symbol
            o += 1
            i += 1
        symbols[base - 3] = o
    seen[0], seen[1] = nears, fars


@njit
def learn(
    most: Any, symbols: Any, beside: Any, met: Any, queue: Any, merges: Any, merge_counts: Any,
    state: Any,
) -> Any:  # fmt: skip
    """Learn up to `most` merges; how many. Fewer when there are none left, or arrays must grow."""
    left, right, left_last, right_last, left_events, right_events = beside
    near, near_words, far, far_words, seen = met
    table, heap, heap_count, entry_pair, entry_at, entry_words, arena = queue
    done = 0
    while done < most and state[TOKENS] < state[VOCAB] and state[HEAP] > 0:
        room = 2 * state[TOKENS] + 16
        if (
            8 * (state[PAIRS] + room) > 5 * (len(table) >> 1)
            or state[ENTRIES] + room > len(entry_pair)
            or state[HEAP] + room > len(heap)
            or state[TOKENS] + 1 > len(left)
        ):
            break
        entry = np.int64(heap[0])
        pair = entry_pair[entry]
        count = np.int64(table[_slot_of(pair, table) + 1])
        if count != heap_count[0]:
            _pop(queue, state)
            if count > 0:
                _push(entry, count, queue, state)
            continue
        if count < state[LEAST_COUNT]:
            state[HEAP] = 0
            break
        a, b = np.int64(pair >> np.uint64(32)), np.int64(pair & np.uint64(0xFFFFFFFF))
        _pop(queue, state)
        new = state[TOKENS]
        merges[2 * state[MERGES]], merges[2 * state[MERGES] + 1] = a, b
        merge_counts[state[MERGES]] = count
        state[MERGES] += 1
        state[TOKENS] += 1
        done += 1
        first = entry_at[entry]
        _rewrite(a, b, new, first, first + entry_words[entry], arena, symbols, beside, met)
        nears, fars = seen[0], seen[1]
        # the counts first, all of them: a pair can be on both sides
        for k in range(nears):
            x = np.int64(near[k])
            if left[x]:
                _add_to_pair(_pair(x, a), -left[x], table, state)
                _add_to_pair(_pair(x, new), left[x], table, state)
                left[x] = 0
        for k in range(fars):
            y = np.int64(far[k])
            if right[y]:
                _add_to_pair(_pair(b, y), -right[y], table, state)
                _add_to_pair(_pair(new, y), right[y], table, state)
                right[y] = 0
        for k in range(nears):
            x = np.int64(near[k])
            if left_events[x] > 0:
                left_events[x] = _enqueue(_pair(x, new), left_events[x], queue, state)
        for k in range(nears):
            x = np.int64(near[k])
            left_last[x] = -1
            if left_events[x] < 0:
                place = -left_events[x] - 1
                if place > 0:
                    arena[place - 1] = near_words[k]
                    left_events[x] -= 1
        for k in range(fars):
            y = np.int64(far[k])
            if right_events[y] > 0:
                right_events[y] = _enqueue(_pair(new, y), right_events[y], queue, state)
        for k in range(fars):
            y = np.int64(far[k])
            right_last[y] = -1
            if right_events[y] < 0:
                place = -right_events[y] - 1
                if place > 0:
                    arena[place - 1] = far_words[k]
                    right_events[y] -= 1
        for k in range(nears):
            left_events[near[k]] = 0
        for k in range(fars):
            right_events[far[k]] = 0
    return done


@njit
def _enqueue(pair: Any, events: Any, queue: Any, state: Any) -> Any:
    """Queue a new pair with room for the words it arose in.

    Returns -(1 + p): its words go to the arena from p - 1 on, or nowhere where p is 0.
    """
    count = np.int64(queue.table[_slot_of(pair, queue.table) + 1])
    if count <= 0:
        return np.int64(-1)
    entry = state[ENTRIES]
    state[ENTRIES] += 1
    queue.entry_pair[entry] = pair
    queue.entry_at[entry] = state[ARENA]
    queue.entry_words[entry] = events
    place = state[ARENA]
    state[ARENA] += events
    _push(entry, count, queue, state)
    return -(place + 1) - 1
