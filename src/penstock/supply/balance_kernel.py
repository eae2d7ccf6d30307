"""The kernels of `balance`: Karmarkar-Karp differencing, and bins with a hard cap.

The order of everything is total: of two sets with one sum that with more items is larger, then
that whose first item has the higher number. So all ranks find the same partition.
"""

from typing import Any

from penstock.simd import njit


@njit
def _exceeds(work: Any, a: Any, b: Any) -> Any:
    """Whether set a is larger than set b."""
    if work.sums[a] != work.sums[b]:
        return work.sums[a] > work.sums[b]
    if work.counts[a] != work.counts[b]:
        return work.counts[a] > work.counts[b]
    return work.heads[a] > work.heads[b]


@njit
def _spread(work: Any, state: Any, parts: Any) -> Any:
    first = work.first[state]
    if work.size[state] < parts:
        return work.sums[first]
    return work.sums[first] - work.sums[first + parts - 1]


@njit
def _precedes(work: Any, a: Any, b: Any, parts: Any) -> Any:
    """Whether state a is merged before state b."""
    mine = _spread(work, a, parts)
    other = _spread(work, b, parts)
    if mine != other:
        return mine > other
    return _exceeds(work, work.first[a], work.first[b])


@njit
def _sink(work: Any, at: Any, count: Any, parts: Any) -> None:
    """Let the state at a position of the heap sink to where it belongs."""
    heap = work.heap
    state = heap[at]
    while True:
        child = 2 * at + 1
        if child >= count:
            break
        if child + 1 < count and _precedes(work, heap[child + 1], heap[child], parts):
            child += 1
        if not _precedes(work, heap[child], state, parts):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = state


@njit
def _move_set(work: Any, source: Any, target: Any) -> None:
    work.sums[target] = work.sums[source]
    work.heads[target] = work.heads[source]
    work.tails[target] = work.tails[source]
    work.counts[target] = work.counts[source]


@njit
def _sort(work: Any, first: Any, size: Any) -> None:
    """Sets of a state from the largest to the smallest: most are in order already."""
    gap = 1
    while gap < size // 9:
        gap = 3 * gap + 1
    while gap > 0:
        for k in range(first + gap, first + size):
            if not _exceeds(work, k, k - gap):
                continue
            total, head = work.sums[k], work.heads[k]
            tail, count = work.tails[k], work.counts[k]
            at = k
            while at >= first + gap:
                before = at - gap
                if work.sums[before] > total:
                    break
                if work.sums[before] == total:
                    if work.counts[before] > count:
                        break
                    if work.counts[before] == count and work.heads[before] > head:
                        break
                _move_set(work, before, at)
                at = before
            work.sums[at] = total
            work.heads[at] = head
            work.tails[at] = tail
            work.counts[at] = count
        gap //= 3


@njit
def _join(work: Any, a: Any, b: Any, target: Any) -> None:
    """The items of set a, then those of set b, as one set."""
    head, tail = work.heads[a], work.tails[b]
    work.follows[work.tails[a]] = work.heads[b]
    work.sums[target] = work.sums[a] + work.sums[b]
    work.counts[target] = work.counts[a] + work.counts[b]
    work.heads[target] = head
    work.tails[target] = tail


@njit
def _merge(work: Any, a: Any, b: Any, parts: Any, top: Any) -> Any:
    """State b into state a: the largest set of one to the smallest of the other, and so on. A new
    place begins at `top`; answers where the next one would."""
    p, q = work.size[a], work.size[b]
    here, there = work.first[a], work.first[b]
    target = here
    if p < parts:
        target = top
        top += min(p + q, parts)
        for i in range(min(p, parts - q)):
            _move_set(work, here + i, target + i)
    at = target + min(p, parts - q)
    for i in range(parts - q, p):
        _join(work, here + i, there + parts - 1 - i, at)
        at += 1
    for i in range(min(q, parts - p)):
        _move_set(work, there + i, at)
        at += 1
    work.first[a] = target
    work.size[a] = at - target
    _sort(work, target, at - target)
    return top


@njit
def _compact(work: Any, count: Any, base: Any) -> Any:
    """Move the sets of the states in the heap to `base` on; answers where they end."""
    for k in range(count):
        state = work.heap[k]
        first = work.first[state]
        for i in range(work.size[state]):
            _move_set(work, first + i, base + i)
        work.first[state] = base
        base += work.size[state]
    return base


@njit
def karmarkar_karp(costs: Any, order: Any, parts: Any, equal: Any, work: Any, out: Any) -> None:
    """Which part each item goes to; `order` has the items from the cheapest to the dearest.

    With `equal` each part gets as many items, or one less. Part 0 is the dearest.
    """
    items = len(order)
    half = len(work.sums) // 2
    states, top = 0, 0
    for k in range(items):
        work.follows[k] = -1
    # with `equal` a state is a run of as many items as there are parts, the first may be shorter
    step = parts if equal else 1
    end = items % step if items % step else min(step, items)
    begin = 0
    while begin < items:
        work.first[states] = top
        work.size[states] = end - begin
        for k in range(end - 1, begin - 1, -1):
            item = order[k]
            work.sums[top] = costs[item]
            work.heads[top] = item
            work.tails[top] = item
            work.counts[top] = 1
            top += 1
        work.heap[states] = states
        states += 1
        begin = end
        end += step
    for k in range(states // 2 - 1, -1, -1):
        _sink(work, k, states, parts)
    base = 0
    while states > 1:
        if top + parts > base + half:
            base = half - base
            top = _compact(work, states, base)
        first = work.heap[0]
        states -= 1
        work.heap[0] = work.heap[states]
        _sink(work, 0, states, parts)
        top = _merge(work, first, work.heap[0], parts, top)
        work.heap[0] = first
        _sink(work, 0, states, parts)
    if items:
        last = work.heap[0]
        for part in range(work.size[last]):
            item = work.heads[work.first[last] + part]
            while item >= 0:
                out[item] = part
                item = work.follows[item]


@njit
def best_fit(lengths: Any, order: Any, cap: Any, rooms: Any, out: Any) -> Any:
    """Items, in their order, each into the bin with the least room that it fits; how many bins."""
    bins = 0
    for k in range(len(order)):
        item = order[k]
        length = lengths[item]
        best, least = bins, cap + 1
        for b in range(bins):
            if rooms[b] >= length and rooms[b] < least:
                best, least = b, rooms[b]
        if best == bins:
            rooms[bins] = cap
            bins += 1
        rooms[best] -= length
        out[item] = best
    return bins


@njit
def fit_evenly(
    lengths: Any, costs: Any, order: Any, cap: Any, rooms: Any, loads: Any, out: Any
) -> Any:
    """Items, in their order, each into the bin of least cost that has room; whether all fit."""
    for b in range(len(rooms)):
        rooms[b] = cap
        loads[b] = 0
    for k in range(len(order)):
        item = order[k]
        best = -1
        for b in range(len(rooms)):
            if rooms[b] >= lengths[item] and (best < 0 or loads[b] < loads[best]):
                best = b
        if best < 0:
            return 0
        rooms[best] -= lengths[item]
        loads[best] += costs[item]
        out[item] = best
    return 1
