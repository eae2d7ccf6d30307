"""The kernels of `languages`: guess what a text is.

In:    documents end to end, PAD bytes after the last; rules for the first words of lines
Out:   points by language, and what is counted beside them
Never: allocates, looks behind the end of a document

The first word of a line gives points by rules, what stands in it by the code here; comments,
docstrings and fenced blocks give none.
"""

from typing import Any

import numpy as np

from penstock.prepare.languages_layout import (
    COLUMNS,
    COMMENTS,
    CPP,
    ENDS,
    GAPS,
    GO,
    HASH,
    JAVASCRIPT,
    LINES,
    LINKS,
    MARKDOWN,
    MARKS,
    PYTHON,
    RUST,
    SAMPLE_BYTES,
    SIZE,
    TSX,
    TYPESCRIPT,
)
from penstock.prepare.outline.prose_kernel import (
    begins_with,
    fence_at,
    heading_at,
    is_letter,
    skip_space,
    trim,
    word_at,
)
from penstock.records import LANGUAGES
from penstock.simd import next_index, njit, peek


def _packed(word: str) -> Any:
    return np.uint64(int.from_bytes(word.encode(), "little"))


_DOUBLE, _SINGLE = _packed('"' * 3), _packed("'" * 3)
_STRING, _NUMBER, _BOOLEAN, _SELF = (_packed(w) for w in ("string", "number", "boolean", "self"))


@njit
def _find(data: Any, i: Any, stop: Any, word: Any, size: Any) -> Any:
    """Where the `size` bytes of a little-endian word stand first in data[i:stop], or `stop`."""
    while i + size <= stop and not begins_with(data, i, stop, word, size):
        i = next_index(data, i + 1, stop, np.int64(word & np.uint64(0xFF)))
    return min(i, stop) if i + size <= stop else stop


@njit
def _rule_word(data: Any, text: Any, last: Any) -> Any:
    """The first word as rules have it: letters; or # < @, a space for any, letters or one byte."""
    c = peek(data, text)
    if c != 35 and c != 60 and c != 64:
        return word_at(data, text, last)
    word = np.uint64(c)
    shift = 8
    name = skip_space(data, text + 1, last)
    if name > text + 1:
        word |= np.uint64(32 << 8)
        shift = 16
    rest = word_at(data, name, last)
    if rest == 0 and name < last:
        rest = np.uint64(peek(data, name))
    return word | rest << np.uint64(shift)


@njit
def _give_points(data: Any, text: Any, last: Any, rules: Any, base: Any, out: Any) -> Any:
    """Apply the first rule that fits the line; whether one did."""
    word = _rule_word(data, text, last)
    bucket = np.int64((word * np.uint64(HASH)) >> np.uint64(56))
    end = np.uint64(peek(data, last - 1))
    for k in range(rules.buckets[bucket], rules.buckets[bucket + 1]):
        if rules.words[k] != word:
            continue
        allowed = rules.ends[k]
        while allowed != 0 and (allowed & np.uint64(0xFF)) != end:
            allowed >>= np.uint64(8)
        size = rules.needs[2 * k + 1]
        fits = allowed != 0 or rules.ends[k] == 0
        need = rules.needs[2 * k]
        if fits and (size == 0 or _find(data, text, last, need, np.int64(size)) < last):
            for j in range(len(LANGUAGES)):
                out[base + j] += rules.points[k * len(LANGUAGES) + j]
            return True
    return False


@njit
def _look_inside(data: Any, text: Any, last: Any, base: Any, out: Any) -> Any:
    """Count marks of code and gaps of prose, and give points for what few languages write.

    A gap of prose is one space between two words: one in seven bytes of English, one in thirty of
    code without its comments.
    """
    marks = gaps = np.int64(0)
    before = np.uint8(0)
    i = text
    while i < last:
        c = peek(data, i)
        i += 1
        if c > 126 or is_letter(c):
            before = c
            continue
        d = peek(data, i) if i < last else np.uint8(0)
        e = peek(data, i + 1) if i + 1 < last else np.uint8(0)
        if c == 32:
            gaps += (before >= 97 or before == 44) and (is_letter(d) or d > 126)
        elif c == 58 and d == 58:
            out[base + CPP] += 1
            out[base + RUST] += 1
            marks += 2
            i += 1
        elif c == 58 and d == 61:
            out[base + GO] += 2
        elif c == 58 and d == 32:
            i += 1
            is_type = (
                begins_with(data, i, last, _STRING, 6)
                or begins_with(data, i, last, _NUMBER, 6)
                or begins_with(data, i, last, _BOOLEAN, 7)
            )
            out[base + TYPESCRIPT] += 3 if is_type else 0
        elif c == 61:
            marks += 1
            out[base + JAVASCRIPT] += d == 62 or (d == 61 and e == 61)
            out[base + RUST] += d == 62
        elif c == 46:
            out[base + PYTHON] += i >= text + 5 and begins_with(data, i - 5, i, _SELF, 4)
        elif c == 93 and d == 40:
            out[base + LINKS] += 2
        elif c == 42 and d == 42:
            out[base + LINKS] += is_letter(e)
            marks += 1
            i += 1
        elif c == 123 or c == 125 or c == 59 or c == 60 or c == 62 or c == 95:
            out[base + TSX] += c == 60 and d == 47
            marks += 1
        elif c == 38 or c == 124 or c == 92 or c == 36 or c == 91 or c == 93:
            marks += 1
        elif c == 40 or c == 41:
            marks += d == 41 or d == 59
        before = c
    out[base + MARKS] += marks
    out[base + GAPS] += gaps
    return gaps < 5 or gaps < 2 * marks


@njit
def _score(data: Any, i: Any, stop: Any, rules: Any, base: Any, out: Any) -> None:
    i += 3 if begins_with(data, i, stop, np.uint64(0xBFBBEF), 3) else 0
    in_fence = False
    while i < stop and (out[base + CPP] <= 20 or out[base + CPP] < out[base + LINES]):
        text = skip_space(data, i, stop)
        end = next_index(data, i, stop, 10)
        i = end + 1
        last = trim(data, text, end)
        if text >= last:
            continue
        c = peek(data, text)
        d = peek(data, text + 1) if text + 1 < last else np.uint8(0)
        if c == 47 and (d == 42 or d == 47):
            out[base + COMMENTS] += 1
            i = _find(data, text + 2, stop, np.uint64(0x2F2A), 2) + 2 if d == 42 else i
            continue
        if (c == 96 or c == 126) and fence_at(data, text, last) > 0:
            out[base + MARKDOWN] += 0 if in_fence else 3
            in_fence = not in_fence
            continue
        quote = text + 1 if c == 114 or c == 82 else text  # a docstring may begin with r
        q = peek(data, quote) if quote < last else np.uint8(0)
        if q == 34 or q == 39:
            triple = _DOUBLE if q == 34 else _SINGLE
            if begins_with(data, quote, last, triple, 3):
                out[base + PYTHON] += 1
                i = _find(data, quote + 3, stop, triple, 3) + 3
                continue
        if in_fence:
            continue
        out[base + LINES] += 1
        out[base + SIZE] += last - text
        z = peek(data, last - 1)
        out[base + ENDS] += z == 59 or z == 123 or z == 125 or z == 40
        is_code = _look_inside(data, text, last, base, out)
        has_rule = (is_code or c == 35) and _give_points(data, text, last, rules, base, out)
        if c == 35 and not has_rule and heading_at(data, text, last) > 0:
            is_alone = i < stop and (peek(data, i) == 10 or peek(data, i) == 13)
            out[base + MARKDOWN] += 4 if is_alone else (2 if d == 35 else 1)


@njit
def score_languages(data: Any, at: Any, rows: Any, rules: Any, out: Any) -> None:
    for k in range(len(rows)):
        start, stop = at[rows[k]], at[rows[k] + 1]
        stop = min(stop, start + SAMPLE_BYTES)
        _score(data, start, stop, rules, k * COLUMNS, out)
