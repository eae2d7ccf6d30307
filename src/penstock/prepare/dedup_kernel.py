"""The kernels of deduplication: normalise, shingle, sketch, look up, link.

In:    texts, sketches, hash tables of `Index`, a set of benchmark shingles
Out:   normalised texts, sketches, verdicts, shares of benchmark items, components
Keeps: one pass over each text; a bounded number of comparisons for each document
Never: allocates: a full index is for the caller to enlarge

A token is a run of ASCII letters, digits, "_" and characters up to U+07FF, or any other character
that is not white space, with the run that follows it where it is beyond U+07FF. So words are
tokens in the alphabets of two-byte characters, and characters are tokens in the scripts of Asia.
A shingle is the hash of some tokens in a row, white space ignored.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.prepare.dedup_layout import (
    CHAIN,
    CHUNK,
    EXACT,
    KEPT,
    LOOKAHEAD,
    NEAR,
    PROBES,
    WHITESPACE,
)
from penstock.simd import first_bit, load64, njit, peek, prefetch, splitmix64

_LANES = ir.VectorType(ir.IntType(8), 64)
_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)
_ONE = np.uint64(1)
_K0 = np.uint64(0x9E3779B97F4A7C15)
_K1 = np.uint64(0xD6E8FEB86659FD93)
_K2 = np.uint64(0xC2B2AE3D27D4EB4F)
_ROLL = np.uint64(0x9FB21C651E98DF25)


# Bytes


def _splat(kind: Any, byte: int) -> ir.Constant:
    return ir.Constant(kind, [byte] * kind.count)


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any, kind: Any) -> Any:
    pointer = context.make_array(array_type)(context, builder, value=array).data
    place = builder.gep(pointer, [index])
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = 1
    return loaded


def _within(builder: Any, lanes: Any, low: int, high: int) -> Any:
    moved = builder.sub(lanes, _splat(lanes.type, low))
    return builder.icmp_unsigned("<=", moved, _splat(lanes.type, high - low))


def _is_space(builder: Any, lanes: Any) -> Any:
    blank = builder.icmp_unsigned("==", lanes, _splat(lanes.type, 0x20))
    return builder.or_(blank, _within(builder, lanes, 0x09, 0x0D))


@intrinsic
def byte_classes(typingctx: Any, src: Any, i: Any) -> Any:
    """Of the 64 bytes src[i:]: which are white space, of words, of the inside of a character."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load(context, builder, signature.args[0], args[0], args[1], _LANES)
        small = builder.or_(lanes, _splat(_LANES, 0x20))
        word = _within(builder, small, 0x61, 0x7A)
        word = builder.or_(word, _within(builder, lanes, 0x30, 0x39))
        word = builder.or_(word, builder.icmp_unsigned("==", lanes, _splat(_LANES, 0x5F)))
        word = builder.or_(word, _within(builder, lanes, 0x80, 0xDF))
        masks = [_is_space(builder, lanes), word, _within(builder, lanes, 0x80, 0xBF)]
        words = [builder.bitcast(mask, ir.IntType(64)) for mask in masks]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 3)(src, types.intp), generate


@intrinsic
def copy_blank(typingctx: Any, src: Any, i: Any, dst: Any, o: Any) -> Any:
    """Copy 64 bytes src[i:] to dst[o:], white space as blanks."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = _load(context, builder, signature.args[0], args[0], args[1], _LANES)
        lanes = builder.select(_is_space(builder, lanes), _splat(_LANES, 0x20), lanes)
        pointer = context.make_array(signature.args[2])(context, builder, value=args[2]).data
        place = builder.bitcast(builder.gep(pointer, [args[3]]), _LANES.as_pointer())
        builder.store(lanes, place).align = 1
        return context.get_dummy_value()

    return types.void(src, types.intp, dst, types.intp), generate


@njit
def normalise(data: Any, at: Any, first: Any, stop: Any, out: Any, out_at: Any) -> None:
    """Texts first:stop, every run of white space as one blank, none at the ends, into `out`."""
    o = np.int64(0)
    for k in range(first, stop):
        out_at[k - first] = o
        begin = o
        i, end = at[k], at[k + 1]
        before = _ONE  # as if white space came before: what leads is dropped
        while i < end:
            space, _, _ = byte_classes(data, i)
            kept = ~(space & (space << _ONE | before))
            if end - i < 64:
                kept &= (_ONE << np.uint64(end - i)) - _ONE
            before = space >> np.uint64(63)
            while kept != 0:
                p = first_bit(kept)
                rest = ~(kept >> np.uint64(p))
                length = first_bit(rest) if rest != 0 else 64
                copy_blank(data, i + p, out, o)
                o += length
                if p + length >= 64:
                    break
                kept = kept >> np.uint64(p + length) << np.uint64(p + length)
            i += 64
        if o > begin and out[o - 1] == 0x20:
            o -= 1
    out_at[stop - first] = o


# Tokens and shingles


@njit
def _hash_token(data: Any, i: Any, n: Any) -> Any:
    size = np.uint64(n)
    if n <= 8:
        h = (load64(data, i) << np.uint64(64 - 8 * n)) * _K0 + size
    elif n <= 16:
        h = load64(data, i) * _K0 + size
        h = (h ^ h >> np.uint64(32)) * _K1 + load64(data, i + n - 8)
    else:
        h = size
        for k in range(0, n - 8, 8):
            h = (h ^ load64(data, i + k)) * _K0
            h ^= h >> np.uint64(32)
        h = h * _K1 + load64(data, i + n - 8)
    h = (h ^ h >> np.uint64(32)) * _K1
    return h ^ h >> np.uint64(29)


@njit
def _tokens(
    data: Any, i: Any, stop: Any, opened: Any, words: Any, texts: Any,
    starts: Any, ends: Any, hashes: Any, have: Any,
) -> Any:  # fmt: skip
    """Hash the tokens that end in the next CHUNK bytes into hashes[have:].

    Returns where to go on, how many hashes there are, where a token that is not at its end
    began or -1, and whether the last byte was of a word, and of a text.
    """
    limit = min(stop, i + CHUNK)
    s = e = np.int64(0)
    if opened >= 0:
        starts[0] = opened
        s += 1
    while i < limit:
        space, word, inside = byte_classes(data, i)
        if stop - i < 64:
            beyond = _NONE << np.uint64(stop - i)
            space |= beyond
            word &= ~beyond
        text = ~space
        before_text = text << _ONE | texts
        start = text & ~(inside & before_text) & ~(word & (word << _ONE | words))
        end = (space | start) & before_text
        words = word >> np.uint64(63)
        texts = text >> np.uint64(63)
        while start != 0:
            starts[s] = i + first_bit(start)
            s += 1
            start &= start - _ONE
        while end != 0:
            ends[e] = i + first_bit(end)
            e += 1
            end &= end - _ONE
        i += 64
    if i >= stop and s > e:
        ends[e] = stop
        e += 1
    for k in range(e):
        first = peek(starts, k)
        hashes[have + k] = _hash_token(data, first, peek(ends, k) - first)
    opened = starts[e] if s > e else np.int64(-1)
    return i, have + e, opened, words, texts


@njit
def _finish(h: Any, seed: Any) -> Any:
    h ^= seed
    h = (h ^ h >> np.uint64(32)) * _K1
    h = (h ^ h >> np.uint64(29)) * _K2
    return h ^ h >> np.uint64(32)


@njit
def _shingles(hashes: Any, have: Any, n: Any, drop: Any, seed: Any) -> Any:
    """Turn the hashes of `have` tokens into those of their shingles, in place; how many.

    `drop` is the multiplier to the power of n. The last n - 1 tokens are left at the end.
    """
    h = np.uint64(0)
    for k in range(n - 1):
        h = h * _ROLL + peek(hashes, k)
    oldest = np.uint64(0)
    count = have - n + 1
    for k in range(count):
        newest = peek(hashes, k + n - 1)
        h = h * _ROLL + (newest - oldest * drop)
        oldest = peek(hashes, k)
        hashes[k] = _finish(h, seed)
    return count


@njit
def _power(n: Any) -> Any:
    h = _ONE
    for _ in range(n):
        h *= _ROLL
    return h


@njit
def _keep_last(hashes: Any, have: Any, n: Any) -> Any:
    """Move the tokens that the next shingles begin with to the front; how many."""
    kept = min(have, n - 1)
    for k in range(kept):
        hashes[k] = hashes[have - kept + k]
    return kept


@njit
def shingle_hashes(
    data: Any, at: Any, n: Any, seed: Any, scratch: Any, out: Any, out_at: Any
) -> None:
    """All shingles of all texts; those of text k are out[out_at[k]:out_at[k + 1]]."""
    starts, ends, hashes = scratch
    drop = _power(n)
    o = np.int64(0)
    for k in range(len(at) - 1):
        out_at[k] = o
        i, have, opened = at[k], np.int64(0), np.int64(-1)
        words = texts = np.uint64(0)
        while i < at[k + 1]:
            i, have, opened, words, texts = _tokens(
                data, i, at[k + 1], opened, words, texts, starts, ends, hashes, have
            )
            for j in range(_shingles(hashes, have, n, drop, np.uint64(seed))):
                out[o] = hashes[j]
                o += 1
            have = _keep_last(hashes, have, n)
    out_at[len(at) - 1] = o


# Sketches. A bin is two bits of a word: 0 where no shingle fell, or one of three values.

_PAIRS = np.uint64(0x5555555555555555)


@njit
def sketch(
    data: Any, at: Any, first: Any, stop: Any, seed: Any, how: Any, scratch: Any, room: Any,
    out: Any,
) -> None:  # fmt: skip
    """One-permutation MinHash: of each bin the least shingle, two bits of it; and a key a band.

    A band is `rows` values of a coarser sketch, whose empty bins take the value of a filled one
    that their number and a count of tries choose: Shrivastava's optimal densification. A text with
    fewer than `min_shingles` filled bins has no keys.
    """
    n, bins, bands, rows = how.shingle, how.bins, how.bands, how.rows
    starts, ends, hashes = scratch
    minima, coarse = room
    drop = _power(n)
    mask = np.uint64(bins - 1)
    coarse_mask = np.uint64(len(coarse) - 1)
    for k in range(first, stop):
        for b in range(bins):
            minima[b] = _NONE
        i, have, opened = at[k], np.int64(0), np.int64(-1)
        words = texts = np.uint64(0)
        while i < at[k + 1]:
            i, have, opened, words, texts = _tokens(
                data, i, at[k + 1], opened, words, texts, starts, ends, hashes, have
            )
            for j in range(_shingles(hashes, have, n, drop, np.uint64(seed))):
                h = peek(hashes, j)
                place = np.int64(h & mask)
                minima[place] = min(peek(minima, place), h)
            have = _keep_last(hashes, have, n)
        count = np.int64(0)
        for b in range(len(coarse)):
            coarse[b] = _NONE
        for b in range(0, bins, 32):
            word = np.uint64(0)
            for pair in range(32):
                h = peek(minima, b + pair)
                if h != _NONE:
                    value = (h >> np.uint64(16) & np.uint64(0xFFFF)) * np.uint64(3)
                    word |= ((value >> np.uint64(16)) + _ONE) << np.uint64(2 * pair)
                    count += 1
                    place = np.int64(h & coarse_mask)
                    coarse[place] = min(peek(coarse, place), h)
            out.words[(k * bins + b) >> 5] = word
        out.filled[k] = count
        if count < how.min_shingles:
            for band in range(bands):
                out.keys[k * bands + band] = 0
            continue
        for band in range(bands):
            key = np.uint64(band + 1) * _K0
            for b in range(band * rows, (band + 1) * rows):
                source = np.int64(b)
                tries = np.uint64(b) << np.uint64(32)
                while coarse[source] == _NONE:
                    tries += _ONE
                    source = np.int64(splitmix64(tries) & coarse_mask)
                key = (key ^ coarse[source]) * _K1
                key ^= key >> np.uint64(32)
            out.keys[k * bands + band] = np.uint32(key * _K2 >> np.uint64(32))


@intrinsic
def count_bits(typingctx: Any, word: Any) -> Any:
    """How many bits are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


@njit
def _alike(a: Any, i: Any, b: Any, j: Any, words: Any, threshold: Any) -> Any:
    """Whether two sketches, of `words` words, say that `threshold` millionths are common.

    Of the bins that both fill with different shingles a third agrees by chance: for each two that
    differ there is one that seems equal.
    """
    equal = differ = union = np.int64(0)
    for k in range(words):
        one, other = peek(a, i + k), peek(b, j + k)
        has_one, has_other = (one | one >> _ONE) & _PAIRS, (other | other >> _ONE) & _PAIRS
        apart = one ^ other
        apart = (apart | apart >> _ONE) & _PAIRS
        union += count_bits(has_one | has_other)
        differ += count_bits(has_one & has_other & apart)
        equal += count_bits(has_one & ~apart)
    return (2 * equal - differ) * 1_000_000 >= 2 * threshold * union


# The index. A table is `slots` places and PROBES more, so that nothing wraps round; an entry is
# the upper half of a key and the document's number plus one, 0 is free. The place is in the order
# of the key: a table grows in one sweep, and entries of one key stay in the order they came in.


@njit
def _place(key: Any, slots: Any) -> Any:
    return np.int64((key >> np.uint64(32)) * np.uint64(slots) >> np.uint64(32))


@njit
def _equal(a: Any, i: Any, b: Any, j: Any) -> Any:
    return a[2 * i] == b[2 * j] and a[2 * i + 1] == b[2 * j + 1]


@njit
def regrow(old: Any, table: Any, tables: Any, old_slots: Any, slots: Any) -> None:
    """Move every entry of all tables into larger ones, which are empty."""
    for t in range(tables):
        source = t * (old_slots + PROBES)
        base = t * (slots + PROBES)
        last = base + slots + PROBES
        for k in range(source, source + old_slots + PROBES):
            entry = peek(old, k)
            if entry != 0:
                at = base + _place(entry, slots)
                while at < last and peek(table, at) != 0:
                    at += 1
                if at < last:
                    table[at] = entry


@njit
def decide(
    first: Any, stop: Any, forced: Any, hashes: Any, raw: Any, of_each: Any, how: Any, kept: Any,
    state: Any, places: Any, reasons: Any, of: Any,
) -> Any:  # fmt: skip
    """Say of documents first:stop which to keep, and keep them; how far the capacity sufficed.

    `hashes` are what is looked up: of the normalised text, where there are both, and `raw` then
    tells why. A document that is `forced` is kept without being looked up. state[0] counts those
    kept.
    """
    keys, sketches, filled = of_each
    words, bands, least, threshold = how.words, how.bands, how.min_shingles, how.threshold
    kept_hashes, kept_raw, kept_sketches, exact, near, slots, capacity = kept
    has_hash, has_raw, has_near = len(hashes) > 0, len(raw) > 0, bands > 0
    half, low_half = np.uint64(32), np.uint64(0xFFFFFFFF)
    stride = slots + PROBES
    asked = first
    for d in range(first, stop):
        while asked < min(d + LOOKAHEAD, stop):  # its places are on their way before it is decided
            if has_hash:
                prefetch(exact, _place(hashes[2 * asked], slots))
            if has_near and filled[asked] >= least:
                for band in range(bands):
                    key = np.uint64(peek(keys, asked * bands + band)) << half
                    prefetch(near, band * stride + _place(key, slots))
            asked += 1
        number = state[0]
        if number >= capacity:
            return d
        reason, duplicate = KEPT, np.int64(-1)
        exact_at = np.int64(-1)
        if has_hash:
            home = _place(hashes[2 * d], slots)
            for at in range(home, home + PROBES):
                entry = peek(exact, at)
                if entry == 0:
                    exact_at = np.int64(at)
                    break
                if forced or entry >> half != hashes[2 * d] >> half:
                    continue
                c = np.int64(entry & low_half) - 1
                if _equal(hashes, d, kept_hashes, c):
                    whole = not how.normalised or (has_raw and _equal(raw, d, kept_raw, c))
                    reason, duplicate = EXACT if whole else WHITESPACE, c
                    break
        is_near = has_near and filled[d] >= least
        if is_near and reason == KEPT:
            for band in range(bands):
                key = np.uint64(peek(keys, d * bands + band))
                home = band * stride + _place(key << half, slots)
                chain = 0
                places[band] = -1
                for at in range(home, home + PROBES):
                    entry = peek(near, at)
                    if entry == 0:
                        places[band] = at
                        break
                    if entry >> half == key:
                        c = np.int64(entry & low_half) - 1
                        is_first = not forced and (duplicate < 0 or c < duplicate)
                        if is_first and _alike(
                            sketches, d * words, kept_sketches, c * words, words, threshold
                        ):
                            reason, duplicate = NEAR, c
                        chain += 1
                        if chain == CHAIN:
                            break
        reasons[d] = reason
        of[d] = duplicate
        if reason != KEPT:
            continue
        entry = np.uint64(number + 1)
        if has_hash:
            for k in range(2):
                kept_hashes[2 * number + k] = hashes[2 * d + k]
                if has_raw:
                    kept_raw[2 * number + k] = raw[2 * d + k]
            if exact_at >= 0:
                exact[exact_at] = hashes[2 * d] >> half << half | entry
        if is_near:
            for k in range(words):
                kept_sketches[number * words + k] = peek(sketches, d * words + k)
            for band in range(bands):
                if places[band] >= 0:
                    key = np.uint64(peek(keys, d * bands + band))
                    near[places[band]] = key << half | entry
        state[0] += 1
    return stop


# Benchmark items in texts


@njit
def fill_set(keys: Any, slots: Any, bitmap: Any) -> None:
    """Put the numbers of `keys`, plus one, into an empty table of a power of two of slots."""
    last = np.uint64(len(slots) - 1)
    bits = np.uint64(len(bitmap) * 64 - 1)
    for k in range(len(keys)):
        bit = keys[k] & bits
        bitmap[np.int64(bit >> np.uint64(6))] |= _ONE << (bit & np.uint64(63))
        at = keys[k] >> np.uint64(20) & last
        while slots[np.int64(at)] != 0:
            at = (at + _ONE) & last
        slots[np.int64(at)] = k + 1


@njit
def find_items(
    data: Any, at: Any, n: Any, seed: Any, scratch: Any, benchmark: Any, stamp: Any, seen: Any,
    shares: Any, found: Any,
) -> None:  # fmt: skip
    """For each text the benchmark item of whose shingles it has the largest share.

    What was seen in this text has its stamp; the first text has `stamp`, which nobody had before.
    """
    starts, ends, hashes = scratch
    keys, slots, bitmap, items_at, items, sizes = benchmark
    key_seen, item_seen, item_counts = seen
    drop = _power(n)
    last = np.uint64(len(slots) - 1)
    bits = np.uint64(len(bitmap) * 64 - 1)
    for k in range(len(at) - 1):
        best, share = np.int64(-1), 0.0
        i, have, opened = at[k], np.int64(0), np.int64(-1)
        words = texts = np.uint64(0)
        while i < at[k + 1]:
            i, have, opened, words, texts = _tokens(
                data, i, at[k + 1], opened, words, texts, starts, ends, hashes, have
            )
            count = _shingles(hashes, have, n, drop, np.uint64(seed))
            for j in range(count):
                prefetch(bitmap, np.int64((peek(hashes, j) & bits) >> np.uint64(6)))
            hits = np.int64(0)
            for j in range(count):
                h = peek(hashes, j)
                bit = h & bits
                word = peek(bitmap, np.int64(bit >> np.uint64(6)))
                starts[hits] = j
                hits += np.int64(word >> (bit & np.uint64(63)) & _ONE)
            for hit in range(hits):
                h = hashes[starts[hit]]
                slot = h >> np.uint64(20) & last
                while slots[np.int64(slot)] != 0:
                    key = slots[np.int64(slot)] - 1
                    slot = (slot + _ONE) & last
                    if keys[key] != h:
                        continue
                    if key_seen[key] != stamp:
                        key_seen[key] = stamp
                        for place in range(items_at[key], items_at[key + 1]):
                            item = items[place]
                            if item_seen[item] != stamp:
                                item_seen[item] = stamp
                                item_counts[item] = 0
                            item_counts[item] += 1
                            now = item_counts[item] / sizes[item]
                            if now > share or (now == share and item < best):
                                share, best = now, item
                    break
            have = _keep_last(hashes, have, n)
        shares[k] = share
        found[k] = best
        stamp += 1


# Components, for the batch mode


@njit
def _root(parents: Any, k: Any) -> Any:
    while parents[k] != k:
        parents[k] = parents[parents[k]]
        k = parents[k]
    return k


@njit
def join(parents: Any, a: Any, b: Any) -> None:
    """Join edges a[k], b[k]; the smallest number of a component is its root."""
    for k in range(len(a)):
        one, other = _root(parents, a[k]), _root(parents, b[k])
        if one != other:
            parents[max(one, other)] = min(one, other)


@njit
def flatten(parents: Any) -> None:
    """Make every entry its root."""
    for k in range(len(parents)):
        parents[k] = parents[parents[k]]


@njit
def link(
    first: Any, records: Any, sketches: Any, words: Any, threshold: Any, most: Any, parents: Any,
    found: Any,
) -> Any:  # fmt: skip
    """Compare each record with the first `most` of its bucket; edges between components.

    Records before `first` are only compared with. Returns how many edges are in `found`.
    """
    buckets, rows, members = records
    edges = np.int64(0)
    begin = np.int64(0)
    for k in range(len(buckets)):
        if buckets[k] != buckets[begin]:
            begin = np.int64(k)
        if k < first:
            continue
        for other in range(begin, min(k, begin + most)):
            one, two = _root(parents, members[other]), _root(parents, members[k])
            if one == two:
                continue
            if _alike(sketches, rows[other] * words, sketches, rows[k] * words, words, threshold):
                parents[max(one, two)] = min(one, two)
                found.a[edges] = members[other]
                found.b[edges] = members[k]
                edges += 1
    return edges
