"""The kernels of `cpp` that know letters only: comments, literals, directives, keywords.

All of them go forward from where they are called and never look at a byte twice, but for one that
ends a literal or a comment. `eol` is the byte that ends a line.
"""

from typing import Any

import numpy as np

from penstock.prepare.outline.cpp_layout import WORD
from penstock.simd import equal_mask, first_bit, load64, next_index, njit, peek

KEYWORD_SLOTS = 256
LONGEST_KEYWORD = 13
LONGEST_DELIMITER = 16
LONGEST_MACRO = 256

IF, IFDEF, IFNDEF, ELSE, ELIF, ELIFDEF, ELIFNDEF, ENDIF = (
    np.uint64(int.from_bytes(word, "little"))
    for word in (b"if", b"ifdef", b"ifndef", b"else", b"elif", b"elifdef", b"elifndef", b"endif")
)
D_NONE, D_IF, D_ELSE, D_ENDIF = range(4)


@njit
def keyword_of(data: Any, i: Any, j: Any, words: Any, numbers: Any) -> Any:
    """The number of the keyword data[i:j], or K_NONE."""
    size = j - i
    if size > LONGEST_KEYWORD or size < 2:
        return 0
    word = load64(data, i)
    if size < 8:
        word &= (np.uint64(1) << np.uint64(8 * size)) - np.uint64(1)
    word ^= np.uint64(size) << np.uint64(56)
    slot = np.int64((word * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(56))
    while peek(numbers, slot) != 0:
        if peek(words, slot) == word:
            return np.int64(peek(numbers, slot))
        slot = (slot + 1) & (KEYWORD_SLOTS - 1)
    return 0


@njit
def find_eol(data: Any, start: Any, stop: Any) -> Any:
    """The byte that ends lines here: a newline, but in a text without any a carriage return."""
    if next_index(data, start, stop, 0x0A) < stop:
        return np.uint8(0x0A)
    return np.uint8(0x0D) if next_index(data, start, stop, 0x0D) < stop else np.uint8(0x0A)


@njit
def skip_line_comment(data: Any, i: Any, stop: Any, eol: Any) -> Any:
    """The newline that ends the comment at i, or stop; a backslash before it continues the line."""
    while i < stop:
        i = next_index(data, i, stop, eol)
        if i >= stop:
            break
        back = i - 1
        if peek(data, back) == 0x0D and eol == 0x0A:
            back -= 1
        if peek(data, back) != 0x5C:
            return i
        i += 1
    return stop


@njit
def skip_block_comment(data: Any, i: Any, stop: Any) -> Any:
    """After the end of the comment whose inside begins at i."""
    k = i
    while k < stop:
        mask = equal_mask(data, k, np.uint8(0x2F))
        while mask != 0:
            found = k + first_bit(mask)
            if found >= stop:
                return stop
            if found > i and peek(data, found - 1) == 0x2A:
                return found + 1
            mask &= mask - np.uint64(1)
        k += 32
    return stop


@njit
def skip_quoted(data: Any, i: Any, stop: Any, quote: Any, eol: Any) -> Any:
    """After the literal whose inside begins at i; at the end of the line if it has no end."""
    while i < stop:
        c = peek(data, i)
        if c == quote:
            return i + 1
        if c == eol:
            return i
        if c == 0x5C and i + 1 < stop:
            i += 1
            if peek(data, i) == 0x0D and i + 1 < stop and peek(data, i + 1) == 0x0A:
                i += 1
        i += 1
    return stop


@njit
def is_raw_prefix(data: Any, i: Any, j: Any) -> Any:
    """Whether the word data[i:j] before a quote makes it a raw string: R, LR, uR, UR, u8R."""
    if peek(data, j - 1) != 0x52 or j - i > 3:
        return False
    if j - i == 1:
        return True
    c = peek(data, i)
    if j - i == 2:
        return c == 0x4C or c == 0x75 or c == 0x55
    return c == 0x75 and peek(data, i + 1) == 0x38


@njit
def skip_raw(data: Any, i: Any, stop: Any) -> Any:
    """After the raw string whose quote stands at i; -1 if it is none; -2 if it has no end."""
    j = i + 1
    while j < stop and j - i <= LONGEST_DELIMITER + 1 and peek(data, j) != 0x28:
        c = peek(data, j)
        if c <= 0x20 or c == 0x29 or c == 0x5C or c == 0x22:
            return -1
        j += 1
    if j >= stop or peek(data, j) != 0x28:
        return -1
    size = j - i - 1
    k = j + 1
    while k + size + 1 < stop:
        k = next_index(data, k, stop, 0x29)
        if k + size + 1 >= stop:
            break
        if peek(data, k + size + 1) == 0x22:
            same = True
            for n in range(size):
                if peek(data, k + 1 + n) != peek(data, i + 1 + n):
                    same = False
                    break
            if same:
                return k + size + 2
        k += 1
    return -2


@njit
def skip_number(data: Any, i: Any, stop: Any, classes: Any) -> Any:
    """After the number that begins at i: digits, letters, points, separators, signed exponents."""
    j = i + 1
    while j < stop:
        d = peek(data, j)
        if peek(classes, np.int64(d)) >= WORD or d == 0x2E:
            j += 1
        elif d == 0x27 and j + 1 < stop and peek(classes, np.int64(peek(data, j + 1))) >= WORD:
            j += 2
        elif d == 0x2B or d == 0x2D:
            before = peek(data, j - 1) | 0x20
            if before != 0x65 and before != 0x70:
                break
            j += 1
        else:
            break
    return j


@njit
def end_of_directive(data: Any, i: Any, stop: Any, eol: Any) -> Any:
    """Where the logical line from i on ends: at its newline, or at stop."""
    while i < stop:
        c = peek(data, i)
        if c == eol:
            return i
        if c == 0x5C:
            i += 1
            if i < stop and peek(data, i) == 0x0D and eol == 0x0A:
                i += 1
            i += 1
        elif c == 0x2F and i + 1 < stop and peek(data, i + 1) == 0x2A:
            i = skip_block_comment(data, i + 2, stop)
        elif c == 0x2F and i + 1 < stop and peek(data, i + 1) == 0x2F:
            return skip_line_comment(data, i + 2, stop, eol)
        elif c == 0x22 or c == 0x27:
            i = skip_quoted(data, i + 1, stop, c, eol)
        else:
            i += 1
    return stop


@njit
def directive_of(data: Any, i: Any, stop: Any) -> Any:
    """Which of the conditions the directive whose name stands at i is."""
    j = i
    while j < stop and 0x61 <= peek(data, j) <= 0x7A:
        j += 1
    size = j - i
    if size < 2 or size > 8:
        return D_NONE
    word = load64(data, i)
    if size < 8:
        word &= (np.uint64(1) << np.uint64(8 * size)) - np.uint64(1)
    if word == IF or word == IFDEF or word == IFNDEF:
        return D_IF
    if word == ELSE or word == ELIF or word == ELIFDEF or word == ELIFNDEF:
        return D_ELSE
    return D_ENDIF if word == ENDIF else D_NONE


@njit
def skip_blanks(data: Any, i: Any, stop: Any) -> Any:
    while i < stop and (peek(data, i) == 0x20 or peek(data, i) == 0x09):
        i += 1
    return i


@njit
def is_zero(data: Any, i: Any, stop: Any) -> Any:
    """Whether the condition whose `if` stands at i is a bare 0."""
    k = skip_blanks(data, i + 2, stop)
    if k == i + 2 or k >= stop or peek(data, k) != 0x30:
        return False
    return k + 1 >= stop or peek(data, k + 1) <= 0x20 or peek(data, k + 1) == 0x2F


@njit
def all_capitals(data: Any, i: Any, j: Any) -> Any:
    """Whether a name looks like a macro: no small letter in it."""
    if j - i > LONGEST_MACRO:  # one name may be asked for again and again
        return False
    for k in range(i, j):
        if 0x61 <= peek(data, k) <= 0x7A:
            return False
    return j > i
