r"""The kernels that clean UTF-8 and cut it into pretokens.

In:    uint8 text with PAD bytes behind it, a table of code point classes
Out:   where each pretoken ends, as the `regex` module has it
Keeps: Python's rule for what is not UTF-8
Never: allocates, decides by what stands beyond `stop`

Each cutter returns (end, seen): the pretoken ends at `end`, and nothing from `seen` + LOOKAHEAD on
had a part in that.
"""

from typing import Any

import numpy as np

from penstock.simd import (
    copy_until_high,
    first_bit,
    high_mask,
    njit,
    not_letters_mask,
    peek,
)
from penstock.tokenize.count_layout import INVALID, WRITTEN
from penstock.tokenize.scan_layout import (
    BLANK,
    CASELESS,
    GPT2,
    LOWER,
    MARK,
    NEWLINE,
    NUMBER,
    O200K,
    SPACE,
    UPPER,
)

_APOSTROPHE = 0x27
_SLASH = 0x2F


# Characters


@njit
def _class_and_width(data: Any, i: Any, classes: Any) -> Any:
    """The class of the character at data[i] and its bytes; the text is valid UTF-8."""
    lead = np.int64(peek(data, i))
    if lead < 0x80:
        return np.int64(peek(classes, lead)), 1
    second = np.int64(peek(data, i + 1)) & 0x3F
    if lead < 0xE0:
        return np.int64(peek(classes, (lead & 0x1F) << 6 | second)), 2
    third = np.int64(peek(data, i + 2)) & 0x3F
    if lead < 0xF0:
        return np.int64(peek(classes, (lead & 0x0F) << 12 | second << 6 | third)), 3
    point = (lead & 0x07) << 18 | second << 12 | third << 6 | np.int64(peek(data, i + 3)) & 0x3F
    return np.int64(peek(classes, min(point, 0x10FFFF))), 4


@njit
def _is_letter(kind: Any) -> Any:
    return UPPER <= kind <= CASELESS


@njit
def _is_space(kind: Any) -> Any:
    return kind >= SPACE


@njit
def _letters(data: Any, i: Any, stop: Any, classes: Any) -> Any:
    """Where the run of letters that goes on at data[i] ends."""
    while i < stop:
        mask = not_letters_mask(data, i)
        if mask == 0:
            i += 32
            continue
        i += first_bit(mask)
        while i < stop and peek(data, i) >= 0x80:
            kind, width = _class_and_width(data, i, classes)
            if not _is_letter(kind):
                return i
            i += width
        if i >= stop:
            break
        kind = np.int64(peek(classes, peek(data, i)))
        if not _is_letter(kind):
            return i
    return min(i, stop)


@njit
def _others(data: Any, i: Any, stop: Any, classes: Any) -> Any:
    """Where the run of what is neither space nor letter nor number ends."""
    while i < stop:
        kind, width = _class_and_width(data, i, classes)
        if kind > MARK:
            break
        i += width
    return min(i, stop)


@njit
def _numbers(data: Any, i: Any, stop: Any, classes: Any, most: Any) -> Any:
    """Where a run of numbers ends, `most` of them at the most where that is not 0."""
    count = 0
    while i < stop and (most == 0 or count < most):
        kind, width = _class_and_width(data, i, classes)
        if kind != NUMBER:
            break
        i += width
        count += 1
    return min(i, stop)


@njit
def _spaces(data: Any, i: Any, stop: Any, classes: Any) -> Any:
    """A run of spaces from data[i]: its end, where its last character begins, and where the text
    after its last newline begins (or -1)."""
    last = i
    after_newline = -1
    while i < stop:
        kind, width = _class_and_width(data, i, classes)
        if not _is_space(kind):
            break
        last = i
        i += width
        if kind == NEWLINE:
            after_newline = i
    return min(i, stop), last, after_newline


@njit
def _contraction(data: Any, i: Any, stop: Any, folded: Any) -> Any:
    r"""The bytes of 's 't 're 've 'm 'll 'd at data[i], or 0; `folded` takes capitals, and U+017F
    for the s, as (?i) does."""
    if i + 1 >= stop or peek(data, i) != _APOSTROPHE:
        return 0
    fold = np.uint8(0x20) if folded else np.uint8(0)
    first = peek(data, i + 1) | fold
    if first == 0x73 or first == 0x74 or first == 0x6D or first == 0x64:  # s t m d
        return 2
    if i + 2 >= stop:
        return 0
    if folded and peek(data, i + 1) == 0xC5 and peek(data, i + 2) == 0xBF:
        return 3
    second = peek(data, i + 2) | fold
    if (first == 0x72 or first == 0x76) and second == 0x65:  # re ve
        return 3
    if first == 0x6C and second == 0x6C:  # ll
        return 3
    return 0


# Cutters: one pretoken from data[i] on


@njit
def _cut_spaces(data: Any, i: Any, stop: Any, classes: Any, newlines: Any) -> Any:
    r"""\s*[\r\n]+ (if `newlines`), else \s+(?!\S), else \s+."""
    end, last, after_newline = _spaces(data, i, stop, classes)
    if newlines and after_newline >= 0:
        return after_newline, end
    if end < stop and last > i:
        return last, end
    return end, end


@njit
def _cut_gpt2(data: Any, i: Any, stop: Any, classes: Any) -> Any:
    held = _contraction(data, i, stop, False)
    if held:
        return i + held, i + held
    kind, width = _class_and_width(data, i, classes)
    p = i
    if kind == BLANK and i + 1 < stop:
        follows, more = _class_and_width(data, i + 1, classes)
        if not _is_space(follows):
            p, kind, width = i + 1, follows, more
    if _is_letter(kind):
        p = _letters(data, p + width, stop, classes)
    elif kind == NUMBER:
        p = _numbers(data, p + width, stop, classes, 0)
    elif kind <= MARK:
        p = _others(data, p + width, stop, classes)
    else:
        return _cut_spaces(data, i, stop, classes, False)
    return p, p


@njit
def _cut_cl100k(data: Any, i: Any, stop: Any, classes: Any, digits: Any) -> Any:
    kind, width = _class_and_width(data, i, classes)
    p = i + width
    if _is_letter(kind):
        p = _letters(data, p, stop, classes)
        return p, p
    if kind == NUMBER:
        p = _numbers(data, i, stop, classes, digits)
        return p, p
    held = _contraction(data, i, stop, True)
    if held:
        return i + held, i + held
    if kind != NEWLINE and p < stop:
        follows, more = _class_and_width(data, p, classes)
        if _is_letter(follows):
            p = _letters(data, p + more, stop, classes)
            return p, p
        if kind == BLANK and follows <= MARK:
            kind, p = follows, p + more
    if _is_space(kind):
        return _cut_spaces(data, i, stop, classes, True)
    p = _others(data, p, stop, classes)
    while p < stop and peek(classes, peek(data, p)) == NEWLINE:
        p += 1
    return p, p


@njit
def _cased_word(data: Any, p: Any, stop: Any, classes: Any) -> Any:
    """[upper]*[lower]+ from data[p] on: its end (or -1), and how far [upper]* reached.

    Upper and lower share the caseless letters and the marks, so that the longest [upper]* may have
    to give back: then the word ends with the last one that can be lower.
    """
    q = p
    last_both = np.int64(-1)
    while q < stop:
        kind, width = _class_and_width(data, q, classes)
        if kind == LOWER:
            q += width
            while q < stop:
                kind, width = _class_and_width(data, q, classes)
                if not (kind == LOWER or kind == CASELESS or kind == MARK):
                    break
                q += width
            return min(q, stop), min(q, stop)
        if not (kind == UPPER or kind == CASELESS or kind == MARK):
            break
        q += width
        if kind != UPPER:
            last_both = q
    return last_both, min(q, stop)


@njit
def _cut_o200k(data: Any, i: Any, stop: Any, classes: Any, digits: Any) -> Any:
    kind, width = _class_and_width(data, i, classes)
    if kind == NUMBER:
        p = _numbers(data, i, stop, classes, digits)
        return p, p
    p = i if _is_letter(kind) or kind == NEWLINE else i + width
    if kind != NEWLINE:
        end, seen = _cased_word(data, p, stop, classes)
        if end < 0 and kind == MARK:
            # without the mark as a prefix it can be the word itself
            end, most = _cased_word(data, i, stop, classes)
            seen = max(seen, most)
        if end < 0 and seen > p:
            end = seen  # [upper]+[lower]*, with nothing lower
        if end >= 0:
            return end + _contraction(data, end, stop, True), seen
    if kind == BLANK and p < stop:
        follows, more = _class_and_width(data, p, classes)
        if follows <= MARK:
            kind, p = follows, p + more
    if _is_space(kind):
        return _cut_spaces(data, i, stop, classes, True)
    p = _others(data, p, stop, classes)
    while p < stop and (peek(classes, peek(data, p)) == NEWLINE or peek(data, p) == _SLASH):
        p += 1
    return p, p


@njit
def cut(data: Any, i: Any, stop: Any, cutter: Any) -> Any:
    if cutter.family == GPT2:
        return _cut_gpt2(data, i, stop, cutter.classes)
    if cutter.family == O200K:
        return _cut_o200k(data, i, stop, cutter.classes, cutter.digits)
    return _cut_cl100k(data, i, stop, cutter.classes, cutter.digits)


@njit
def cut_all(data: Any, start: Any, stop: Any, cutter: Any, ends: Any) -> Any:
    """The end of every pretoken of data[start:stop], one text, into `ends`; how many there are."""
    i = start
    count = 0
    while i < stop:
        i, _ = cut(data, i, stop, cutter)
        ends[count] = i
        count += 1
    return count


# UTF-8


@njit
def _continuations(lead: Any) -> Any:
    """How many bytes follow this one in a character beyond ASCII; 0 if it cannot begin one."""
    if lead < 0xC2 or lead > 0xF4:
        return 0
    return 1 + (lead >= 0xE0) + (lead >= 0xF0)


@njit
def _may_follow(src: Any, i: Any, have: Any) -> Any:
    """Whether the byte behind the first `have` + 1 bytes of the character at src[i] may be there.

    The second one is narrower than 80 to BF after some leads: no long forms, no surrogates,
    nothing beyond U+10FFFF.
    """
    lead, byte = peek(src, i), peek(src, i + have + 1)
    if have == 0:
        if lead == 0xE0:
            return 0xA0 <= byte <= 0xBF
        if lead == 0xED:
            return 0x80 <= byte <= 0x9F
        if lead == 0xF0:
            return 0x90 <= byte <= 0xBF
        if lead == 0xF4:
            return 0x80 <= byte <= 0x8F
    return 0x80 <= byte <= 0xBF


@njit
def _valid_width(src: Any, i: Any, stop: Any) -> Any:
    """The bytes of the character beyond ASCII at src[i], or 0 if it is none or is cut."""
    lead = peek(src, i)
    if lead < 0xE0:
        good = lead >= 0xC2 and peek(src, i + 1) & 0xC0 == 0x80
        return 2 if good and i + 2 <= stop else 0
    good = _may_follow(src, i, 0) and peek(src, i + 2) & 0xC0 == 0x80
    if lead < 0xF0:
        return 3 if good and i + 3 <= stop else 0
    good = good and lead <= 0xF4 and peek(src, i + 3) & 0xC0 == 0x80
    return 4 if good and i + 4 <= stop else 0


@njit
def clean_utf8(src: Any, start: Any, stop: Any, is_last: Any, dst: Any, at: Any, state: Any) -> Any:
    """Copy src[start:stop] to dst[at:], each maximal part that is not UTF-8 as one U+FFFD.

    The rule of Python's errors="replace" and of browsers. Returns how far it came: unless
    `is_last`, a character that may be cut by `stop` is left. state[WRITTEN] is the end in `dst`,
    state[INVALID] counts replacements.
    """
    i = start
    o = at
    while i < stop:
        mask = copy_until_high(src, i, dst, o)
        if mask == 0:
            i += 32
            o += 32
            continue
        # the block is copied already: characters that lie in it are only looked at
        k = i + first_bit(mask)
        until = min(i + 29, stop)
        width = 1
        while k < until:
            width = 1 if peek(src, k) < 0x80 else _valid_width(src, k, stop)
            if width == 0:
                break
            k += width
        o += k - i
        i = k
        if width:
            continue
        # not UTF-8 here, or cut by `stop`
        need = _continuations(peek(src, i))
        have = 0
        while have < need and i + have + 1 < stop and _may_follow(src, i, have):
            have += 1
        if not is_last and need and i + have + 1 == stop:
            state[WRITTEN] = o
            return i
        dst[o] = np.uint8(0xEF)
        dst[o + 1] = np.uint8(0xBF)
        dst[o + 2] = np.uint8(0xBD)
        o += 3
        i += have + 1
        state[INVALID] += 1
    if i > stop:  # the last block of 32 was copied with what stands behind it
        o -= i - stop
        i = stop
    state[WRITTEN] = o
    return i


@njit
def find_young(data: Any, at: Any, young: Any, rows: Any) -> Any:
    """Mark the rows that hold a character of `young`; how many."""
    found = 0
    for row in range(len(at) - 1):
        i, stop = at[row], at[row + 1]
        while i < stop:
            if i + 32 <= stop:
                mask = high_mask(data, i)
                if mask == 0:
                    i += 32
                    continue
                i += first_bit(mask)
            if peek(data, i) < 0x80:
                i += 1
                continue
            kind, width = _class_and_width(data, i, young)
            if kind:
                rows[row] = 1
                found += 1
                break
            i += width
    return found
