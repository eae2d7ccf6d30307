"""The kernel of `jsonl`: the grammar of JSON, and lines into columns.

In:    a uint8 array and a position; every line in it ends in a newline, PAD bytes follow the last
Out:   the position after a string, a key, a value; unescaped copies; a code when it is not JSON
Keeps: the answers of `json.loads`, NaN and Infinity included, on strict UTF-8
Never: allocates, recurses, reads on past a newline
"""

from typing import Any

import numpy as np

from penstock.ingest.jsonl_layout import (
    BAD_PROVENANCE,
    BLANKS,
    EMPTY_TEXT,
    END,
    INVALID_JSON,
    INVALID_UTF8,
    LINE_TOO_LONG,
    LONE_SURROGATE,
    MAX_DEPTH,
    MIXED,
    NESTED_TOO_DEEP,
    NO_TEXT,
    NOT_AN_OBJECT,
    NUL_IN_TEXT,
    OK,
    PART,
    PARTS,
    REJECTS,
    ROW_BYTES,
    ROWS,
    SOURCE,
    START,
    TEXT,
    TEXT_NOT_A_STRING,
    TRAIN,
)
from penstock.simd import copy_until_special, first_bit, next_index, njit, splitmix64, xxh64

_ESCAPE = np.zeros(256, np.uint8)
for _letter, _byte in zip(b'"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True):
    _ESCAPE[_letter] = _byte

_HEX = np.full(256, -1, np.int64)
for _digit, _character in enumerate(b"0123456789abcdef"):
    _HEX[_character] = _digit
    _HEX[ord(chr(_character).upper())] = _digit


@njit
def _copy_utf8(src: Any, i: Any, dst: Any, o: Any) -> Any:
    """Copy one character beyond ASCII; 0 bytes when src[i:] does not start with a valid one."""
    a = src[i]
    b = src[i + 1]
    dst[o] = a
    dst[o + 1] = b
    if b < 0x80 or b > 0xBF:
        return 0
    if 0xC2 <= a <= 0xDF:
        return 2
    c = src[i + 2]
    dst[o + 2] = c
    if c < 0x80 or c > 0xBF:
        return 0
    if 0xE0 <= a <= 0xEF:
        # 0xE0 0x80..0x9F would be overlong, 0xED 0xA0..0xBF a surrogate
        if (a == 0xE0 and b < 0xA0) or (a == 0xED and b > 0x9F):
            return 0
        return 3
    d = src[i + 3]
    dst[o + 3] = d
    if d < 0x80 or d > 0xBF or a < 0xF0 or a > 0xF4:
        return 0
    if (a == 0xF0 and b < 0x90) or (a == 0xF4 and b > 0x8F):
        return 0
    return 4


@njit
def _hex4(src: Any, i: Any) -> Any:
    """The value of four hex digits, or -1; stops at the first that is none."""
    value = 0
    for k in range(4):
        digit = _HEX[src[i + k]]
        if digit < 0:
            return -1
        value = value * 16 + digit
    return value


@njit
def copy_string(src: Any, i: Any, dst: Any, o: Any) -> Any:
    """Unescape the JSON string that begins at src[i], after its quote: (next i, next o, code).

    Every line ends in a newline, which is a control character: that stops a string left open.
    NUL and lone surrogates are legal JSON, so the string is read to its end before they are told.
    """
    flaw = OK
    while True:
        mask = copy_until_special(src, i, dst, o)
        if mask == 0:
            i += 32
            o += 32
            continue
        run = first_bit(mask)
        i += run
        o += run
        c = src[i]
        if c == 0x22:
            return i + 1, o, flaw
        if c == 0x5C:
            e = src[i + 1]
            plain = _ESCAPE[e]
            if plain != 0:
                dst[o] = plain
                o += 1
                i += 2
                continue
            if e != 0x75:
                return i, o, INVALID_JSON
            code = _hex4(src, i + 2)
            if code < 0:
                return i, o, INVALID_JSON
            i += 6
            if 0xD800 <= code < 0xE000:
                low = -1
                if code < 0xDC00 and src[i] == 0x5C and src[i + 1] == 0x75:
                    low = _hex4(src, i + 2)
                if low < 0xDC00 or low > 0xDFFF:
                    # copied as if it were a character: a key that holds one is not the key without
                    flaw = LONE_SURROGATE
                else:
                    i += 6
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
            if code < 0x80:
                if code == 0:
                    flaw = NUL_IN_TEXT
                dst[o] = code
                o += 1
            elif code < 0x800:
                dst[o] = 0xC0 | (code >> 6)
                dst[o + 1] = 0x80 | (code & 0x3F)
                o += 2
            elif code < 0x10000:
                dst[o] = 0xE0 | (code >> 12)
                dst[o + 1] = 0x80 | ((code >> 6) & 0x3F)
                dst[o + 2] = 0x80 | (code & 0x3F)
                o += 3
            else:
                dst[o] = 0xF0 | (code >> 18)
                dst[o + 1] = 0x80 | ((code >> 12) & 0x3F)
                dst[o + 2] = 0x80 | ((code >> 6) & 0x3F)
                dst[o + 3] = 0x80 | (code & 0x3F)
                o += 4
            continue
        if c < 0x20:
            return i, o, INVALID_JSON
        while src[i] >= 0x80:
            width = _copy_utf8(src, i, dst, o)
            if width == 0:
                return i, o, INVALID_UTF8
            i += width
            o += width


@njit
def is_json(code: Any) -> Any:
    """Whether a string that ended with `code` is legal JSON, though perhaps no use as text."""
    return code in (OK, NUL_IN_TEXT, LONE_SURROGATE)


@njit
def skip_blanks(src: Any, i: Any) -> Any:
    while src[i] == 0x20 or src[i] == 0x09 or src[i] == 0x0D:
        i += 1
    return i


@njit
def is_digit(c: Any) -> Any:
    return 0x30 <= c <= 0x39


@njit
def _skip_word(src: Any, i: Any, word: Any) -> Any:
    """The position after `word` if it stands at src[i], else -1."""
    for k in range(len(word)):
        if src[i + k] != word[k]:
            return -1
    return i + len(word)


_TRUE = np.frombuffer(b"true", np.uint8)
_FALSE = np.frombuffer(b"false", np.uint8)
_NULL = np.frombuffer(b"null", np.uint8)
_NAN = np.frombuffer(b"NaN", np.uint8)
_INFINITY = np.frombuffer(b"Infinity", np.uint8)


@njit
def _skip_scalar(src: Any, i: Any) -> Any:
    """The position after a number or literal at src[i], or -1. NaN and Infinity as in `json`."""
    c = src[i]
    if c == 0x74:
        return _skip_word(src, i, _TRUE)
    if c == 0x66:
        return _skip_word(src, i, _FALSE)
    if c == 0x6E:
        return _skip_word(src, i, _NULL)
    if c == 0x4E:
        return _skip_word(src, i, _NAN)
    if c == 0x2D:
        i += 1
        c = src[i]
    if c == 0x49:
        return _skip_word(src, i, _INFINITY)
    if not is_digit(c):
        return -1
    i += 1
    if c != 0x30:
        while is_digit(src[i]):
            i += 1
    if src[i] == 0x2E:
        i += 1
        if not is_digit(src[i]):
            return -1
        while is_digit(src[i]):
            i += 1
    if src[i] == 0x65 or src[i] == 0x45:
        i += 1
        if src[i] == 0x2B or src[i] == 0x2D:
            i += 1
        if not is_digit(src[i]):
            return -1
        while is_digit(src[i]):
            i += 1
    return i


@njit
def skip_key(src: Any, i: Any, dst: Any, o: Any) -> Any:
    """Skip `"key" :` at src[i] -> (next i, where the key's copy ends in dst, code)."""
    if src[i] != 0x22:
        return i, o, INVALID_JSON
    i, key_end, code = copy_string(src, i + 1, dst, o)
    if not is_json(code):
        return i, o, code
    i = skip_blanks(src, i)
    if src[i] != 0x3A:
        return i, o, INVALID_JSON
    return skip_blanks(src, i + 1), key_end, OK


@njit
def skip_value(src: Any, i: Any, dst: Any, o: Any, stack: Any) -> Any:
    """Check the value at src[i] against the grammar -> (next i, code). dst[o:] is scratch."""
    depth = 0
    while True:
        i = skip_blanks(src, i)
        c = src[i]
        opened = False
        if c == 0x7B or c == 0x5B:
            i = skip_blanks(src, i + 1)
            if src[i] == c + 2:  # the closing bracket stands two code points after the opening one
                i += 1
            else:
                if depth == MAX_DEPTH:
                    return i, NESTED_TOO_DEEP
                stack[depth] = c
                depth += 1
                opened = True
                if c == 0x7B:
                    i, _, code = skip_key(src, i, dst, o)
                    if code != OK:
                        return i, code
        elif c == 0x22:
            i, _, code = copy_string(src, i + 1, dst, o)
            if not is_json(code):
                return i, code
        else:
            after = _skip_scalar(src, i)
            if after < 0:
                return i, INVALID_JSON
            i = after
        if opened:
            continue
        while True:
            if depth == 0:
                return i, OK
            i = skip_blanks(src, i)
            bracket = stack[depth - 1]
            if src[i] == 0x2C:
                i += 1
                if bracket == 0x7B:
                    i, _, code = skip_key(src, skip_blanks(src, i), dst, o)
                    if code != OK:
                        return i, code
                break
            if src[i] != bracket + 2:
                return i, INVALID_JSON
            i += 1
            depth -= 1


@njit
def small_int(src: Any, i: Any) -> Any:
    """The whole number at src[i], or -1 when there is none from 0 to 10**18."""
    value = np.int64(0)
    start = i
    while is_digit(src[i]):
        if i - start == 18:
            return np.int64(-1)
        value = value * 10 + (src[i] - 0x30)
        i += 1
    c = src[i]
    if i == start or c == 0x2E or c == 0x65 or c == 0x45:
        return np.int64(-1)
    return value


@njit
def _same(data: Any, start: Any, stop: Any, word: Any) -> Any:
    if stop - start != len(word):
        return False
    same = True
    for k in range(len(word)):
        same = same and data[start + k] == word[k]
    return same


@njit
def _told_number(src: Any, i: Any) -> Any:
    number = small_int(src, i)
    return number if number >= 0 else np.int64(-2)


@njit
def _told_id(src: Any, i: Any) -> Any:
    """The whole number below 2**64 at src[i] and whether there is one: 1, or 0."""
    value = np.uint64(0)
    start = i
    while is_digit(src[i]):
        digit = np.uint64(src[i] - 0x30)
        if i - start == 20 or value > (np.uint64(0xFFFFFFFFFFFFFFFF) - digit) // np.uint64(10):
            return np.uint64(0), np.int64(0)
        value = value * np.uint64(10) + digit
        i += 1
    c = src[i]
    if i == start or c == 0x2E or c == 0x65 or c == 0x45:
        return np.uint64(0), np.int64(0)
    return value, np.int64(1)


_ID_KEY = np.frombuffer(b"doc_id", np.uint8)
_SOURCE_KEY = np.frombuffer(b"source", np.uint8)
_START_KEY = np.frombuffer(b"start", np.uint8)
_END_KEY = np.frombuffer(b"end", np.uint8)
_PART_KEY = np.frombuffer(b"part", np.uint8)
_PARTS_KEY = np.frombuffer(b"parts", np.uint8)


@njit
def take_lines(
    src: Any, i: Any, stop: Any, offset: Any, input_number: Any, text_key: Any,
    salt: Any, threshold: Any, limits: Any, out: Any, rejects: Any, counts: Any, scratch: Any,
) -> Any:  # fmt: skip
    """Parse lines from src[i] on into rows and rejects; where it stopped."""
    text, source = out.text, out.source
    stack, where = scratch
    max_train_rows, max_text_bytes, max_line_bytes, max_rejects = limits
    rows = counts[ROWS]
    max_rows = len(out.start)
    while i < stop:
        held = counts[TEXT] + counts[SOURCE] + ROW_BYTES * rows
        if counts[TRAIN] >= max_train_rows or held >= max_text_bytes:
            break
        if rows == max_rows or counts[REJECTS] == max_rejects:
            break
        line = i
        o = counts[TEXT]
        text_end = o
        source_start = counts[SOURCE]
        source_end = source_start
        code = NO_TEXT
        where[:] = -1  # absent; -2 is there and no whole number
        source_seen = False
        told_id, id_seen = np.uint64(0), np.int64(0)
        if offset + i == 0 and src[0] == 0xEF and src[1] == 0xBB and src[2] == 0xBF:
            i += 3  # a byte order mark, where Windows puts it
        i = skip_blanks(src, i)
        if src[i] == 0x0A and i - line <= max_line_bytes:
            counts[BLANKS] += 1
            i += 1
            continue
        if src[i] != 0x7B:
            i, fault = skip_value(src, i, text, o, stack)
            code = fault if fault != OK else NOT_AN_OBJECT
        else:
            i = skip_blanks(src, i + 1)
            fault = OK
            if src[i] == 0x7D:
                i += 1
            else:
                while True:
                    i, key_end, fault = skip_key(src, i, text, text_end)
                    if fault != OK:
                        break
                    if _same(text, text_end, key_end, text_key):
                        text_end = o  # of two, the last one counts, as in `json`
                        if src[i] == 0x22:
                            i, text_end, code = copy_string(src, i + 1, text, o)
                            if code == OK and text_end == o:
                                code = EMPTY_TEXT
                            if code != EMPTY_TEXT and not is_json(code):
                                fault = code
                        else:
                            code = TEXT_NOT_A_STRING
                            i, fault = skip_value(src, i, text, text_end, stack)
                    elif src[i] == 0x22 and _same(text, text_end, key_end, _SOURCE_KEY):
                        source_seen = True
                        i, source_end, fault = copy_string(src, i + 1, source, source_start)
                        if fault != OK:
                            source_end = source_start
                            fault = OK if is_json(fault) else fault
                    else:
                        # of two, the last one counts here too, whatever it is
                        if _same(text, text_end, key_end, _SOURCE_KEY):
                            source_end = source_start
                            source_seen = True
                        elif _same(text, text_end, key_end, _START_KEY):
                            where[START] = _told_number(src, i)
                        elif _same(text, text_end, key_end, _END_KEY):
                            where[END] = _told_number(src, i)
                        elif _same(text, text_end, key_end, _PART_KEY):
                            where[PART] = _told_number(src, i)
                        elif _same(text, text_end, key_end, _PARTS_KEY):
                            where[PARTS] = _told_number(src, i)
                        elif _same(text, text_end, key_end, _ID_KEY):
                            told_id, id_seen = _told_id(src, i)
                        i, fault = skip_value(src, i, text, text_end, stack)
                    if fault != OK:
                        break
                    i = skip_blanks(src, i)
                    if src[i] == 0x2C:
                        i = skip_blanks(src, i + 1)
                        continue
                    if src[i] == 0x7D:
                        i += 1
                    else:
                        fault = INVALID_JSON
                    break
            if fault != OK:
                code = fault
        at = i
        if code == OK or code >= NOT_AN_OBJECT:
            at = skip_blanks(src, i)
            if src[at] != 0x0A and code != NESTED_TOO_DEEP:
                code = INVALID_JSON
        i = next_index(src, at, stop, 0x0A) + 1
        if i - 1 - line > max_line_bytes:
            code = LINE_TOO_LONG
            at = line + max_line_bytes
        # A line that says which part of which file it is keeps that; all parts of a file share
        # a doc_id, and with it a split. One that says so wrongly could end up on the other side.
        told = (
            source_end > source_start
            and 0 <= where[START] <= where[END]
            and 0 <= where[PART] < where[PARTS] < 2147483648
        )
        all_seen = source_seen and where[START] != -1 and where[END] != -1 and where[PART] != -1
        if code == OK and all_seen and where[PARTS] != -1 and not told:
            code = BAD_PROVENANCE
        if code != OK:
            k = counts[REJECTS]
            rejects.code[k] = code
            rejects.at[3 * k] = offset + line
            rejects.at[3 * k + 1] = offset + i
            rejects.at[3 * k + 2] = offset + at
            counts[REJECTS] = k + 1
            continue
        if told:
            counts[MIXED] = 1
            out.start[rows] = where[START]
            out.end[rows] = where[END]
            out.part[rows] = where[PART]
            out.parts[rows] = where[PARTS]
            key = told_id if id_seen else xxh64(source, source_start, source_end, 0)
        else:
            source_end = source_start
            out.start[rows] = offset + line
            out.end[rows] = offset + i
            out.part[rows] = 0
            out.parts[rows] = 1
            key = xxh64(text, o, text_end, 0)
        out.doc_id[rows] = key
        out.input_number[rows] = input_number
        val = splitmix64(key ^ salt) < threshold
        out.is_val[rows] = val
        rows += 1
        out.text_at[rows] = text_end
        out.source_at[rows] = source_end
        counts[ROWS] = rows
        counts[TRAIN] += 0 if val else 1
        counts[TEXT] = text_end
        counts[SOURCE] = source_end
    return i
