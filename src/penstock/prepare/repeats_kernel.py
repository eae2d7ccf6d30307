"""The kernel that finds what repeats in a document: words, lines, paragraphs, n-grams.

In:    all documents in one buffer, PAD bytes behind them; scratch for the longest one
Out:   one float64 for each feature and document: column k is out[k * documents:][:documents]
Keeps: nothing beyond a document's end has a part in its features
Never: allocates: one table of hashes serves all documents of a call

The table has two words a slot. The second one holds the stamp of the list that the slot was last
used for, so that nothing has to be cleared; where the n-gram stood first; and how often it was
found. Whether an n-gram was passed already stands beside its level at its first place, a byte a
word: a second look into the table missed the cache, and slots are asked for _AHEAD n-grams before
(C++: 8.0 to 6.4 ns a byte for all of this).
"""

from typing import Any

import numpy as np

from penstock.prepare.filters_kernel import (
    code_point,
    continuations,
    count_bits,
    count_chars,
    is_letter_beyond_ascii,
    is_space,
    share,
    spaces,
    valid_lanes,
)
from penstock.prepare.measure_layout import MAX_WORDS
from penstock.simd import (
    first_bit,
    high_mask,
    load64,
    next_index,
    njit,
    not_letters_mask,
    peek,
    prefetch,
    xxh64,
)

_ALL = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_NONE = np.uint64(0)
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_STAMP = np.uint64(36)
_LEVEL, _PASSED = 15, 16  # of a byte of `level`
_AHEAD = 12
_FIRST = np.uint64(18)
_COUNT = (_ONE << _FIRST) - _ONE
_PLACE = np.uint64(MAX_WORDS - 1)


@njit
def _join(h: Any, word: Any) -> Any:
    """The hash of an n-gram and one word more."""
    h = (h ^ h >> np.uint64(31)) * _P1 + word
    return (h ^ h >> np.uint64(29)) * _P2


@njit
def _enter(table: Any, shift: Any, stamp: Any, h: Any, place: Any) -> Any:
    """Count h, found at `place`; the slot's second word is at the index that is returned."""
    last = np.int64((_ONE << (np.uint64(64) - shift)) - _ONE)
    slot = np.int64(h >> shift)
    while True:
        kept = peek(table, 2 * slot + 1)
        if kept >> _STAMP != stamp:
            table[2 * slot] = h
            table[2 * slot + 1] = stamp << _STAMP | np.uint64(place) << _FIRST | _ONE
            return 2 * slot + 1
        if peek(table, 2 * slot) == h:
            table[2 * slot + 1] = kept + _ONE
            return 2 * slot + 1
        slot = (slot + 1) & last


@njit
def _is_new(kept: Any) -> Any:
    return kept & _COUNT == _ONE


@njit
def _first_place(kept: Any) -> Any:
    return np.int64(kept >> _FIRST & _PLACE)


@njit
def _stop_word(word: Any) -> Any:
    """A bit for each of: be to of the and that have with; 0 for all other words."""
    found = (word == 0x6562) | (word == 0x6F74) << 1 | (word == 0x666F) << 2
    found |= (word == 0x656874) << 3 | (word == 0x646E61) << 4
    return found | (word == 0x74616874) << 5 | (word == 0x65766168) << 6 | (word == 0x68746977) << 7


@njit
def _word_has_letter(data: Any, i: Any, end: Any) -> Any:
    while i < end:
        valid = valid_lanes(i, end)
        if ~not_letters_mask(data, i) & valid != _NONE:
            return True
        leads = high_mask(data, i) & ~continuations(data, i) & valid
        while leads != _NONE:
            if is_letter_beyond_ascii(code_point(data, i + first_bit(leads))):
                return True
            leads &= leads - _ONE
        i += 32
    return False


@njit
def _word_start(data: Any, i: Any, stop: Any) -> Any:
    while i < stop:
        mask = ~spaces(data, i) & _ALL
        if mask != _NONE:
            return min(i + first_bit(mask), stop)
        i += 32
    return stop


@njit
def _repeated_lines(
    data: Any, start: Any, stop: Any, shift: Any, stamp: Any, scratch: Any, chars: Any, out: Any
) -> Any:
    """What of data[start:stop] are lines and paragraphs that were there before.

    Lines without the whitespace around them, blank ones not at all; a paragraph is the lines
    between two blank ones. `out` has the features of one document.
    """
    table, hashes, places = scratch.table, scratch.grams, scratch.picks
    lines = again = again_chars = paragraphs = n_newlines = 0
    in_paragraph = False
    i = start
    while i < stop:
        end = next_index(data, i, stop, 0x0A)
        n_newlines += end < stop
        a = _word_start(data, i, end)
        b = end
        while b > a and is_space(peek(data, b - 1)):
            b -= 1
        i = end + 1
        if a >= b:
            in_paragraph = False
            continue
        h = _join(xxh64(data, a, b, 0), np.uint64(1))
        if not _is_new(table[_enter(table, shift, stamp, h, 0)]):
            again += 1
            again_chars += count_chars(data, a, b)
        lines += 1
        if in_paragraph:
            hashes[paragraphs - 1] = _join(hashes[paragraphs - 1], h)
        else:
            hashes[paragraphs] = h
            places[2 * paragraphs] = a
            paragraphs += 1
            in_paragraph = True
        places[2 * paragraphs - 1] = b
    out[3] = share(again, lines)
    out[4] = share(again_chars, chars)
    out[5] = share(again_chars, chars - n_newlines)
    again = again_chars = 0
    for k in range(paragraphs):
        if not _is_new(table[_enter(table, shift, stamp + _ONE, hashes[k], 0)]):
            again += 1
            again_chars += count_chars(data, places[2 * k], places[2 * k + 1])
    out[6] = share(again, paragraphs)
    out[7] = share(again_chars, chars)


@njit
def _slots(entries: Any) -> Any:
    """By how much a hash is shifted to become a slot, in a table at most half full."""
    shift = np.uint64(60)
    while np.int64(_ONE << (np.uint64(64) - shift)) < 2 * entries:
        shift -= _ONE
    return shift


@njit
def _pick_pairs(words: Any, count: Any, grams: Any, marks: Any, picks: Any) -> Any:
    """The words at which a 2-gram begins that may be repeated, into `picks`; how many.

    Two bits for each hash, met and met again, 32 or more to a word: those that are not repeated
    go, but for 3 of 100, without a branch and without a look into the table.
    """
    shift = _slots(max(16 * count, 32))
    for k in range(2 << (np.int64(58) - np.int64(shift))):
        marks[k] = _NONE
    for i in range(count - 1):
        h = _join(peek(words, i), peek(words, i + 1))
        grams[i] = h
        place = h >> shift
        mark = np.int64(place >> np.uint64(6)) * 2
        bit = _ONE << (place & np.uint64(63))
        met = peek(marks, mark)
        marks[mark] = met | bit
        marks[mark + 1] = peek(marks, mark + 1) | (met & bit)
    picked = np.int64(0)
    for i in range(count - 1):
        place = peek(grams, i) >> shift
        again = peek(marks, np.int64(place >> np.uint64(6)) * 2 + 1)
        picks[picked] = i
        picked += np.int64(again >> (place & np.uint64(63)) & _ONE)
    return picked


@njit
def _repeated_ngrams(scratch: Any, count: Any, stamp: Any, chars: Any, out: Any) -> None:
    """The most frequent 2- to 4-grams and the repeated 5- to 10-grams, by characters.

    An n-gram can only be repeated where both (n-1)-grams in it are: `level` has the longest
    repeated n-gram at each word, and longer ones need to be entered at few words only.
    """
    words, ends, grams, level = scratch.hashes, scratch.ends, scratch.grams, scratch.level
    picks, table = scratch.picks, scratch.table
    for i in range(count + 1):
        level[i] = 0
    picked = _pick_pairs(words, count, grams, scratch.marks, picks)
    for n in range(2, 11):
        shift = _slots(picked)
        best, best_first = _ONE, 0
        if n > 2:
            for k in range(picked):
                i = peek(picks, k)
                grams[i] = _join(peek(grams, i), peek(words, i + n - 1))
        for k in range(picked):
            i = peek(picks, k)
            h = peek(grams, i)
            ahead = peek(grams, peek(picks, min(k + _AHEAD, picked - 1)))
            prefetch(table, np.int64(ahead >> shift) * 2)
            kept = peek(table, _enter(table, shift, stamp, h, i))
            first = _first_place(kept)
            picks[count + k] = first
            if not _is_new(kept):
                level[i] = n
                level[first] = n
                found = kept & _COUNT
                if found > best or (found == best and first < best_first):
                    best, best_first = found, first
        if n <= 4 and count >= n:
            length = ends[best_first + n] - ends[best_first] + n - 1
            out[6 + n] = share(length * np.int64(best), chars)
        if n >= 5:
            length, free = np.int64(0), 0
            for k in range(picked):
                i = peek(picks, k)
                if i >= free and peek(level, i) & _LEVEL == n:
                    first = peek(picks, count + k)
                    if peek(level, first) & _PASSED != 0:
                        length += ends[i + n] - ends[i]
                        free = i + n
                    level[first] = n | _PASSED
            out[6 + n] = share(length, chars)
        left = 0
        for k in range(picked):
            i = peek(picks, k)
            picks[left] = i
            left += (
                i + n < count and peek(level, i) & _LEVEL == n and peek(level, i + 1) & _LEVEL == n
            )
        picked = left
        stamp += _ONE
        if picked == 0 and n >= 4:
            break


@njit
def _find_words(data: Any, i: Any, stop: Any, edges: Any, inside: Any) -> Any:
    """Where words begin and end, by turns, into `edges`; how many, and where it goes on.

    Blocks of 32 bytes while there is room for one more; `inside` is whether the last word of those
    before is not over yet, and then `edges` has its beginning.
    """
    found = np.int64(inside)
    in_word = np.uint64(inside)
    while i < stop and found + 48 <= len(edges):
        solid = ~spaces(data, i) & valid_lanes(i, stop)
        turns = (solid ^ (solid << _ONE | in_word)) & _ALL
        in_word = solid >> np.uint64(31)
        count = count_bits(turns)
        # eight at a time, wanted or not: a loop over the bits would be mispredicted at each block
        k = 0
        while k < count:
            for m in range(8):
                edges[found + k + m] = i + first_bit(turns | _ONE << np.uint64(63))
                turns &= turns - _ONE
            k += 8
        found += count
        i += 32
    if i >= stop and found & 1:
        edges[found] = stop
        found += 1
    return found, i


@njit
def _word(data: Any, i: Any, end: Any) -> Any:
    """A word's hash, its characters, whether it has a letter, and which stop word it is."""
    n = end - i
    if n > 16:
        chars = count_chars(data, i, end)
        return xxh64(data, i, end, 0), chars, _word_has_letter(data, i, end), 0
    # up to 16 bytes without a branch; a shift by 64 has to be two
    unused = np.uint64(64 - 8 * min(n, 8))
    low = load64(data, i) << unused >> unused
    half = np.uint64(4 * (16 - max(n, 8)))
    high = load64(data, i + 8) << half << half
    lanes = (_ONE << np.uint64(n)) - _ONE
    chars = n
    has_letter = ~not_letters_mask(data, i) & lanes != _NONE
    if high_mask(data, i) & lanes != _NONE:
        chars = count_chars(data, i, end)
        has_letter = _word_has_letter(data, i, end)
    return _join(low * _P2, high), chars, has_letter, _stop_word(low)


@njit
def measure_words(data: Any, at: Any, scratch: Any, out: Any) -> None:
    """WORD_FEATURES of every document, in that order."""
    words, ends, picks = scratch.hashes, scratch.ends, scratch.picks
    rows = len(at) - 1
    stamp = _ONE
    for row in range(rows):
        start, stop = at[row], at[row + 1]
        n_words = count = with_letter = n_stop = stops_found = chars = 0
        limit = stop
        ends[0] = 0
        i = start
        found = np.int64(0)
        while i < stop:
            open_word = found & 1
            found, i = _find_words(data, i, stop, picks, open_word)
            for k in range(found >> 1):
                a, b = peek(picks, 2 * k), peek(picks, 2 * k + 1)
                h, length, has_letter, which = _word(data, a, b)
                with_letter += has_letter
                stops_found |= which
                n_stop += which != 0
                if count < len(words):
                    words[count] = h
                    chars += length
                    count += 1
                    ends[count] = chars
                    limit = b
            n_words += found >> 1
            picks[0] = picks[max(found - 1, 0)]
        features = out[row::rows]
        features[0] = share(with_letter, n_words)
        features[1] = count_bits(np.uint64(stops_found))
        features[2] = share(n_stop, n_words)
        if count == 0:
            continue
        if count == n_words:
            limit = stop
        chars = count_chars(data, start, limit)
        _repeated_lines(data, start, limit, _slots(count), stamp, scratch, chars, features)
        stamp += np.uint64(2)
        _repeated_ngrams(scratch, count, stamp, chars, features)
        stamp += np.uint64(9)
