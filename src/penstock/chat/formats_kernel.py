"""The kernel of `formats`: which rows of JSON may have an object that has a key twice.

In:    rows of JSON end to end, PAD bytes after the last
Out:   1 for a row that is to be looked at, 0 for one in which no key is there twice
Keeps: every repeated key is found; a row that is not JSON may have either answer
Never: allocates, reads more than PAD bytes beyond a row
"""

from typing import Any

from penstock.simd import equal_mask, first_bit, njit, peek, xxh64

_QUOTE, _ESCAPE, _COLON = 0x22, 0x5C, 0x3A
_MOST_KEYS = 64
"""Keys of an object that are compared with each other; a larger one is looked at."""


@njit
def _end_of_string(data: Any, i: Any, end: Any) -> Any:
    """Where the quote stands that ends a string, and whether there is an escape before it."""
    escaped = False
    while i < end:
        mask = equal_mask(data, i, _QUOTE) | equal_mask(data, i, _ESCAPE)
        if mask == 0:
            i += 32
            continue
        i += first_bit(mask)
        if peek(data, i) == _QUOTE:
            return i, escaped
        escaped = True
        i += 2
    return end, escaped


@njit
def _may_repeat(data: Any, i: Any, end: Any, hashes: Any, bases: Any) -> Any:
    depth = 0
    count = 0
    while i < end:
        c = peek(data, i)
        if c == _QUOTE:
            begin = i + 1
            stop, escaped = _end_of_string(data, begin, end)
            i = stop + 1
            while i < end and peek(data, i) <= 0x20:
                i += 1
            if i < end and peek(data, i) == _COLON and depth > 0:
                first = bases[depth - 1]
                if escaped or count - first == _MOST_KEYS or count == len(hashes):
                    return 1
                found = xxh64(data, begin, stop, 0)
                for k in range(first, count):
                    if hashes[k] == found:
                        return 1
                hashes[count] = found
                count += 1
                i += 1
        elif c == 0x7B or c == 0x5B:
            if depth == len(bases):
                return 1
            bases[depth] = count
            depth += 1
            i += 1
        elif c == 0x7D or c == 0x5D:
            if depth > 0:
                depth -= 1
                count = bases[depth]
            i += 1
        else:
            i += 1
    return 0


@njit
def may_repeat(data: Any, at: Any, hashes: Any, bases: Any, found: Any) -> None:
    """`found[k]` of the row data[at[k]:at[k + 1]]; `hashes` and `bases` are scratch."""
    for k in range(len(at) - 1):
        found[k] = _may_repeat(data, at[k], at[k + 1], hashes, bases)
