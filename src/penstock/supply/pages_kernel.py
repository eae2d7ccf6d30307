"""The kernel of `pages`: compare where lists begin in a page with where they should."""

from typing import Any

import numpy as np

from penstock.simd import njit

ROW, VALUE = 0, 1


@njit
def _run(levels: Any, at: Any, end: Any, width: Any) -> Any:
    """The run of levels at levels[at] -> (levels in it, the byte after its head, -1 if they are
    packed or else their value). No levels if it is cut."""
    head = np.int64(0)
    shift = 0
    while True:
        if at >= end or shift > 28:
            return np.int64(0), at, np.int64(0)
        byte = np.int64(levels[at])
        at += 1
        head |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if head & 1:
        return (head >> 1) * 8, at, np.int64(-1)
    if at + (width + 7) // 8 > end:
        return np.int64(0), at, np.int64(0)
    return head >> 1, at, np.int64(levels[at])  # levels of more than 8 bits are not asked for


@njit
def _packed(levels: Any, at: Any, bit: Any, width: Any) -> Any:
    """The level of `width` bits that begins `bit` bits after levels[at]."""
    place = at + (bit >> 3)
    value = np.int64(levels[place])
    if (bit & 7) + width > 8:
        value |= np.int64(levels[place + 1]) << 8
    return (value >> (bit & 7)) & ((1 << width) - 1)


@njit
def check_levels(
    levels: Any, rep_at: Any, rep_end: Any, def_at: Any, def_end: Any, count: Any, most: Any,
    width: Any, offsets: Any, state: Any,
) -> Any:  # fmt: skip
    """Whether the lists of a page begin where `offsets` say: 1, or 0.

    A page has `count` levels of each kind: levels[rep_at:rep_end] (1 bit, 0 begins a list) and
    levels[def_at:def_end] (`width` bits; `most` is a value, 0 an empty list, others are nulls).
    `state` holds the rows begun and the values seen in the pages before.
    """
    row, value = state[ROW], state[VALUE]
    rep_left = def_left = np.int64(0)
    rep = define = np.int64(0)
    rep_bit = def_bit = np.int64(0)
    done = np.int64(0)
    while done < count:
        if rep_left == 0:
            rep_left, rep_at, rep = _run(levels, rep_at, rep_end, 1)
            rep_bit = np.int64(0)
            size = rep_left // 8 if rep < 0 else 1
            if rep_left == 0 or rep_at + size > rep_end or rep > 1:
                return 0
            rep_next = rep_at + size
        if def_left == 0:
            def_left, def_at, define = _run(levels, def_at, def_end, width)
            def_bit = np.int64(0)
            size = def_left // 8 * width if define < 0 else (width + 7) // 8
            if def_left == 0 or def_at + size > def_end:
                return 0
            def_next = def_at + size
        n = min(rep_left, def_left, count - done)
        if rep == 1 and define == most:
            if row == 0:
                return 0
            value += n
        else:
            for k in range(n):
                r = rep
                if rep < 0:
                    r = _packed(levels, rep_at, rep_bit + k, 1)
                d = define
                if define < 0:
                    d = _packed(levels, def_at, def_bit + k * width, width)
                if r == 0:
                    if row >= len(offsets) - 1 or offsets[row] != value:
                        return 0
                    row += 1
                elif row == 0 or d != most:
                    return 0
                if d == most:
                    value += 1
                elif d != 0:
                    return 0
        done += n
        rep_bit += n
        def_bit += n * width
        rep_left -= n
        def_left -= n
        if rep_left == 0:
            rep_at = rep_next
        if def_left == 0:
            def_at = def_next
    state[ROW], state[VALUE] = row, value
    return 1
