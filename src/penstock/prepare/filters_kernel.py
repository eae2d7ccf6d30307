"""The kernels that measure documents for the filters.

In:    all documents in one buffer, PAD bytes behind them
Out:   one float64 for each feature and document: column k is out[k * documents:][:documents]
Keeps: nothing beyond a document's end has a part in its features
Never: allocates: tables come from the caller and serve all documents of a call

Bytes are told apart 32 at a time, as bit masks; only what a mask points at is looked at alone.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from penstock.prepare.measure_layout import (
    DATA_RUN,
    HEAD_BYTES,
    HEADER,
    LICENCE_BYTES,
    LINE_BYTES,
    LONG_LINE,
    N_STRONG,
    SHORT_LINE,
    WIDE_LIST,
)
from penstock.simd import (
    first_bit,
    high_mask,
    load64,
    njit,
    njit_call,
    peek,
)

_VECTOR = ir.VectorType(ir.IntType(8), 32)
_ALL = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_NONE = np.uint64(0)


# Masks


def _load(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    pointer = context.make_array(array_type)(context, builder, value=array).data
    place = builder.gep(pointer, [index])
    loaded = builder.load(builder.bitcast(place, _VECTOR.as_pointer()))
    loaded.align = 1
    return loaded


def _lanes(byte: int) -> ir.Constant:
    return ir.Constant(_VECTOR, [byte] * 32)


def _mask(builder: Any, lanes: Any) -> Any:
    return builder.zext(builder.bitcast(lanes, ir.IntType(32)), ir.IntType(64))


def byte_class(*ranges: bytes) -> Callable[[Any, Any], Any]:
    """A function of (data, i): bit k is set where data[i+k] is in one of the ranges; 32 bytes.

    A range is its first and its last byte, or one byte.
    """

    @intrinsic
    def in_class(typingctx: Any, src: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            lanes = _load(context, builder, signature.args[0], args[0], args[1])
            found = None
            for one in ranges:
                if len(one) == 1:
                    here = builder.icmp_unsigned("==", lanes, _lanes(one[0]))
                else:
                    place = builder.sub(lanes, _lanes(one[0]))
                    here = builder.icmp_unsigned("<=", place, _lanes(one[1] - one[0]))
                found = here if found is None else builder.or_(found, here)
            return _mask(builder, found)

        return types.uint64(src, types.intp), generate

    return in_class  # type: ignore[no-any-return]


def begins(*words: bytes, fold: bool = False) -> Callable[[Any, Any], Any]:
    """A function of (data, i): bit k is set where one of the words begins at data[i+k].

    It reads up to i + 31 + the longest word; `fold` takes letters in any case.
    """

    @intrinsic
    def begins_at(typingctx: Any, src: Any, i: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            loaded = []
            for k in range(max(map(len, words))):
                index = builder.add(args[1], ir.IntType(64)(k))
                lanes = _load(context, builder, signature.args[0], args[0], index)
                loaded.append((lanes, builder.or_(lanes, _lanes(0x20))))

            def match(rest: set[bytes], k: int) -> Any:
                """Where one of these goes on at byte k; what begins alike shares its compares."""
                found = None
                for byte in sorted({word[k] for word in rest}):
                    lanes = loaded[k][fold and bytes([byte]).isalpha()]
                    here = builder.icmp_unsigned("==", lanes, _lanes(byte))
                    longer = {word for word in rest if word[k] == byte and len(word) > k + 1}
                    if len(longer) == sum(word[k] == byte for word in rest):
                        here = builder.and_(here, match(longer, k + 1))
                    found = here if found is None else builder.or_(found, here)
                return found

            return _mask(builder, match(set(words), 0))

        return types.uint64(src, types.intp), generate

    return begins_at  # type: ignore[no-any-return]


@intrinsic
def count_bits(typingctx: Any, mask: Any) -> Any:
    """How many bits of a mask are set."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.int64(types.uint64), generate


spaces = byte_class(b"\t\r", b" ")
newlines = byte_class(b"\n")
letters = byte_class(b"AZ", b"az")
digits = byte_class(b"09")
continuations = byte_class(b"\x80\xbf")
_hashes = byte_class(b"#")
_stops = byte_class(b".", b"?", b"!")
_curly = byte_class(b"{")
_base64 = byte_class(b"AZ", b"az", b"09", b"+", b"/", b"=", b"_", b"-")
_dots = begins(b"...")
_hex_begins = begins(b"0x", b"0X", b"\\x")
_lorem = begins(b"lore", fold=True)
_hint_begins = begins(*sorted({text[:4].encode() for text in HEADER["hints"]}), fold=True)
_licence_begins = begins(*sorted({text[:4].encode() for text in HEADER["licence"]}), fold=True)


@njit
def valid_lanes(i: Any, stop: Any) -> Any:
    """The lanes of the block at i that lie before `stop`."""
    if i + 32 <= stop:
        return _ALL
    return (_ONE << np.uint64(stop - i)) - _ONE


@njit
def is_space(byte: Any) -> Any:
    return byte == 0x20 or 0x09 <= byte <= 0x0D


@njit
def is_alphanumeric(byte: Any) -> Any:
    return 0x30 <= byte <= 0x39 or 0x61 <= (byte | 0x20) <= 0x7A


@njit
def is_hex(byte: Any) -> Any:
    return 0x30 <= byte <= 0x39 or 0x61 <= (byte | 0x20) <= 0x66


@njit
def _is_base64(byte: Any) -> Any:
    special = byte == 0x2B or byte == 0x2F or byte == 0x3D or byte == 0x5F or byte == 0x2D
    return special or is_alphanumeric(byte)


@njit
def lower(byte: Any) -> Any:
    return byte | 0x20 if 0x41 <= byte <= 0x5A else byte


@njit
def code_point(data: Any, i: Any) -> Any:
    """The character beyond ASCII at data[i]; the text is valid UTF-8."""
    lead = np.int64(peek(data, i))
    point = np.int64(peek(data, i + 1)) & 0x3F
    if lead < 0xE0:
        return (lead & 0x1F) << 6 | point
    point = point << 6 | np.int64(peek(data, i + 2)) & 0x3F
    if lead < 0xF0:
        return (lead & 0x0F) << 12 | point
    return (lead & 0x07) << 18 | point << 6 | np.int64(peek(data, i + 3)) & 0x3F


@njit
def is_letter_beyond_ascii(point: Any) -> Any:
    """Whether a character is counted as a letter: all, but for the blocks of signs and emoji."""
    if point < 0xC0:
        return point == 0xAA or point == 0xB5 or point == 0xBA
    if point < 0x2000:
        return point != 0xD7 and point != 0xF7 and not 0x300 <= point <= 0x36F
    if point < 0x3040:
        return 0x2C00 <= point < 0x2E00 or point == 0x3005
    if 0xE000 <= point < 0x10000:
        private = point < 0xF900
        signs = 0xFE00 <= point < 0xFE70 or 0xFF00 <= point < 0xFF21 or point >= 0xFFE0
        return not (private or signs)
    return not 0x1F000 <= point < 0x1FC00


@njit
def is_latin_beyond_ascii(point: Any) -> Any:
    return point < 0x250 or 0x1E00 <= point < 0x1F00


@njit
def share(part: Any, whole: Any) -> Any:
    return part / whole if whole != 0 else 0.0


@njit
def count_chars(data: Any, i: Any, stop: Any) -> Any:
    """The characters of data[i:stop]."""
    count = stop - i
    while i < stop:
        if high_mask(data, i) != _NONE:
            count -= count_bits(continuations(data, i) & valid_lanes(i, stop))
        i += 32
    return count


@njit
def matches(data: Any, i: Any, stop: Any, texts: Any, first: Any, end: Any) -> Any:
    """Whether texts[first:end], in small letters, stands at data[i:] in any case."""
    if i + end - first > stop:
        return False
    for k in range(end - first):
        if lower(peek(data, i + k)) != peek(texts, first + k):
            return False
    return True


# Lines

_LINES, _LINE_CHARS, _LONGEST, _SOLID, _SHORT, _PUNCTUATED, _BULLETS, _TRAILING, _LONG = range(9)


@njit
def _ends_in_mark(data: Any, start: Any, stop: Any) -> Any:
    """Whether data[start:stop] ends in . ? ! or their like in other scripts."""
    last = peek(data, stop - 1)
    if last == 0x2E or last == 0x3F or last == 0x21:
        return True
    if last < 0x80 or stop - start < 2:
        return False
    second = peek(data, stop - 2)
    if second == 0xD8:
        return last == 0x9F
    if stop - start < 3:
        return False
    third = peek(data, stop - 3)
    return (
        (third == 0xE3 and second == 0x80 and last == 0x82)
        or (third == 0xEF and second == 0xBC and (last == 0x81 or last == 0x9F))
        or (third == 0xE0 and second == 0xA5 and last == 0xA4)
    )


@njit
def _is_wide_ellipsis(data: Any, i: Any) -> Any:
    return load64(data, i) & np.uint64(0xFFFFFF) == np.uint64(0xA680E2)


@njit
def _close_line(data: Any, start: Any, stop: Any, chars: Any, facts: Any) -> None:
    """Count the line data[start:stop], which has so many characters."""
    if stop > start and peek(data, stop - 1) == 0x0D:
        stop -= 1
        chars -= 1
    facts[_LINES] += 1
    facts[_LINE_CHARS] += chars
    facts[_LONGEST] = max(facts[_LONGEST], chars)
    if chars > LONG_LINE:
        facts[_LONG] += chars
    while stop > start and is_space(peek(data, stop - 1)):
        stop -= 1
    if stop == start:
        return
    facts[_SOLID] += 1
    facts[_SHORT] += chars <= SHORT_LINE
    facts[_PUNCTUATED] += _ends_in_mark(data, start, stop)
    solid = ~spaces(data, start) & _ALL
    while solid == _NONE:
        start += 32
        solid = ~spaces(data, start) & _ALL
    start += first_bit(solid)
    first = peek(data, start)
    is_bullet = load64(data, start) & np.uint64(0xFFFFFF) == np.uint64(0xA280E2)
    facts[_BULLETS] += first == 0x2D or (is_bullet and start + 3 <= stop)
    if stop - start >= 3:
        dots = peek(data, stop - 1) == 0x2E and peek(data, stop - 2) == 0x2E
        dots = dots and peek(data, stop - 3) == 0x2E
        facts[_TRAILING] += dots or _is_wide_ellipsis(data, stop - 3)


# What a header says of its file


def _group(name: str) -> tuple[int, int]:
    """Where the words of a group of HEADER stand among all: the first, and behind the last."""
    before = list(HEADER).index(name)
    first = sum(len(words) for words in list(HEADER.values())[:before])
    return first, first + len(HEADER[name])


_HINTS = _group("hints")
_PREFIXES = _group("prefixes")
_SUBJECTS = _group("subjects")
_NOUNS = _group("nouns")
_BY = _group("by")
_PARTS = _group("parts")
_HANDS = _group("hands")
_LICENCE = _group("licence")


@njit
def _is_wordy(byte: Any) -> Any:
    """Whether a word goes on with this byte."""
    return is_alphanumeric(byte) or byte == 0x5F


@njit
def _is_upper(byte: Any) -> Any:
    return 0x41 <= byte <= 0x5A


@njit
def _skip_spaces(data: Any, i: Any, stop: Any) -> Any:
    while i < stop and is_space(peek(data, i)):
        i += 1
    return i


@njit_call
def _stands(data: Any, i: Any, stop: Any, markers: Any, at: Any, group: Any) -> Any:
    """Whether whitespace and one word of the group follow at i, and it ends there."""
    word = _skip_spaces(data, i, stop)
    if word == i:
        return False
    for k in range(group[0], group[1]):
        end = word + peek(at, k + 1) - peek(at, k)
        if not matches(data, word, stop, markers, peek(at, k), peek(at, k + 1)):
            continue
        if end == stop or not _is_wordy(peek(data, end)):
            return True
    return False


@njit_call
def _ends(data: Any, i: Any, stop: Any) -> Any:
    """Whether a sentence may end at i: nothing follows, or a mark."""
    i = _skip_spaces(data, i, stop)
    if i == stop:
        return True
    byte = peek(data, i)
    return not (_is_wordy(byte) or byte == 0x28 or byte == 0x5B)


@njit_call
def _is_one_of(data: Any, i: Any, stop: Any, markers: Any, at: Any, group: Any) -> Any:
    """Whether data[i:stop] is a word of the group."""
    for k in range(group[0], group[1]):
        size = peek(at, k + 1) - peek(at, k)
        if size == stop - i and matches(data, i, stop, markers, peek(at, k), peek(at, k + 1)):
            return True
    return False


@njit
def _is_this(data: Any, i: Any, stop: Any) -> Any:
    return stop - i == 4 and load64(data, i) & np.uint64(0xFFFFFFFF) | np.uint64(
        0x20202020
    ) == np.uint64(0x73696874)


@njit_call
def _is_file(data: Any, i: Any, stop: Any) -> Any:
    """Whether "this file" follows the whitespace at i."""
    word = _skip_spaces(data, i, stop)
    if word == i or stop - word < 9 or not _is_this(data, word, word + 4):
        return False
    file = load64(data, word + 4) & np.uint64(0xFFFFFFFFFF) | np.uint64(0x2020202020)
    if peek(data, word + 4) != 0x20 or file != np.uint64(0x656C696620):
        return False
    return stop - word == 9 or not _is_wordy(peek(data, word + 9))


@njit_call
def _words(data: Any, i: Any, stop: Any) -> Any:
    """The words of data[i:stop]: how many, which of the first four is "this" (else 9), the last."""
    count, this = 0, 9
    first = last = i
    while i < stop:
        if not is_alphanumeric(peek(data, i)):
            i += 1
            continue
        first = i
        while i < stop and is_alphanumeric(peek(data, i)):
            i += 1
        last = i
        if this == 9 and count < 4 and _is_this(data, first, last):
            this = count
        count += 1
    return count, this, first, last


@njit_call
def _run_before(data: Any, start: Any, i: Any) -> Any:
    """The run without whitespace that whitespace parts from i; empty where there is none."""
    end = i
    while end > start and is_space(peek(data, end - 1)):
        end -= 1
    if end == i:
        return i, i
    begin = end
    while begin > start and not is_space(peek(data, begin - 1)):
        begin -= 1
    return begin, end


@njit
def _low(data: Any, i: Any, size: Any) -> Any:
    """The next bytes in small letters, as a number."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - 8 * size)
    return (load64(data, i) | np.uint64(0x2020202020202020)) & mask


@njit_call
def _is_said_of(data: Any, a: Any, q: Any, stop: Any, end: Any, markers: Any, at: Any) -> Any:
    """Whether data[a:q] makes the file the subject of "is generated": this file, the code of …"""
    begin, verb = _run_before(data, a, q)
    article = False
    if verb - begin <= 2 and begin > a and _low(data, begin, 1) == np.uint64(0x61):
        article = verb - begin == 1 or _low(data, begin, 2) == np.uint64(0x6E61)
        if article:
            begin, verb = _run_before(data, a, begin)
    is_verb = verb - begin == 2 and _low(data, begin, 2) == np.uint64(0x7369)
    is_verb |= verb - begin == 3 and _low(data, begin, 3) == np.uint64(0x736177)
    if verb - begin == 4 and begin - a >= 4 and _low(data, begin, 4) == np.uint64(0x6E656562):
        begin -= 4
        is_verb = _low(data, begin, 4) == np.uint64(0x20736168)
    if not is_verb or begin == a or not is_space(peek(data, begin - 1)):
        return False
    count, this, first, last = _words(data, a, begin)
    if article:
        return this < 4 and _stands(data, end, stop, markers, at, _NOUNS)
    if count and _is_this(data, first, last):
        return count <= 2
    if count == 0 or not _is_one_of(data, first, last, markers, at, _SUBJECTS):
        return False
    return this < 4 or count == 1


@njit_call
def _is_quoted(data: Any, a: Any, q: Any) -> Any:
    """Whether q is in a string of a directive such as #error "…"."""
    if peek(data, a) != 0x23 or not 0x61 <= peek(data, a + 1) | 0x20 <= 0x7A:
        return False
    while a < q:
        if peek(data, a) == 0x22:
            return True
        a += 1
    return False


@njit_call
def _says_so(data: Any, a: Any, i: Any, stop: Any, fresh: Any, markers: Any, at: Any) -> Any:
    """Whether the "generated" at i is said of the file, in the line data[a:stop]."""
    end = i + 9
    if end < stop and _is_wordy(peek(data, end)):
        return False
    q = i
    k = _PREFIXES[0]
    while k < _PREFIXES[1]:
        size = peek(at, k + 1) - peek(at, k)
        if q - a >= size and matches(data, q - size, q, markers, peek(at, k), peek(at, k + 1)):
            q -= size
            k = _PREFIXES[0]
        else:
            k += 1
    if q > a and (_is_wordy(peek(data, q - 1)) or peek(data, q - 1) == 0x2D):
        return False
    if _is_quoted(data, a, q):
        return False
    count, _, first, last = _words(data, a, q)
    made = _stands(data, end, stop, markers, at, _BY)
    opening = peek(data, q)
    mark = q
    while mark > a and is_space(peek(data, mark - 1)):
        mark -= 1
    before = peek(data, mark - 1) if mark > a else np.uint8(0)
    ended = before == 0x2E or before == 0x3A or before == 0x21 or before == 0x3B
    if count == 0 or ended:
        begins_here = _is_upper(opening) or opening == 0x40 or (fresh and count == 0)
        if begins_here and (
            made or _stands(data, end, stop, markers, at, _NOUNS) or _ends(data, end, stop)
        ):
            return True
    if _is_said_of(data, a, q, stop, end, markers, at):
        return True
    if count == 0 or not made:
        return False
    begin = a
    while not is_alphanumeric(peek(data, begin)):
        begin += 1
    if not fresh and not _is_upper(peek(data, begin)):
        return False
    if count <= 3 and _is_one_of(data, first, last, markers, at, _SUBJECTS):
        return True
    if count == 2 and _low(data, begin, 8) == np.uint64(0x656C6966656B616D):
        return last - first == 2 and _low(data, first, 2) == np.uint64(0x6E69)
    source = _skip_spaces(data, end, stop)
    if count > 6 or stop - source < 6 or _low(data, source, 5) != np.uint64(0x206D6F7266):
        return False
    quote = peek(data, source + 5)
    return peek(data, source + 4) == 0x20 and (quote == 0x22 or quote == 0x27)


@njit_call
def _forbids(
    data: Any, a: Any, i: Any, stop: Any, size: Any, edit: Any, markers: Any, at: Any
) -> Any:
    """Whether the "do not edit" or "do not modify" at i is said to people who would by hand."""
    end = i + size
    if end < stop and _is_wordy(peek(data, end)):
        return False
    if _is_quoted(data, a, i):
        return False
    if _stands(data, end, stop, markers, at, _HANDS):
        return True
    if not edit:
        return False
    if _is_file(data, end, stop):
        return True
    for k in range(i, end):
        if 0x61 <= peek(data, k) <= 0x7A:
            return False
    return _ends(data, end, stop)


@njit_call
def _line_says(data: Any, a: Any, stop: Any, fresh: Any, markers: Any, at: Any) -> Any:
    """Whether the line data[a:stop] of a comment says that its file was generated."""
    i = a
    partly = False
    while i < stop:
        for k in range(N_STRONG, _HINTS[1]):
            if matches(data, i, stop, markers, peek(at, k), peek(at, k + 1)):
                return True
        starts = is_alphanumeric(peek(data, i)) and not (
            i > a and is_alphanumeric(peek(data, i - 1))
        )
        if starts:
            word = i
            while word < stop and is_alphanumeric(peek(data, word)):
                word += 1
            partly |= _is_one_of(data, i, word, markers, at, _PARTS)
        if stop - i >= 11 and _low(data, i, 8) == np.uint64(0x756F73206176616A):  # java sou
            partly |= _low(data, i + 8, 3) == np.uint64(0x656372) and peek(data, i + 4) == 0x20
        i += 1
    if partly:
        return False
    for i in range(a, stop):
        for k in range(N_STRONG):
            size = peek(at, k + 1) - peek(at, k)
            if not matches(data, i, stop, markers, peek(at, k), peek(at, k + 1)):
                continue
            if k == 0:
                if _says_so(data, a, i, stop, fresh, markers, at):
                    return True
            elif _forbids(data, a, i, stop, size, k == 1 or k == 3, markers, at):
                return True
    return False


@njit_call
def _find(data: Any, i: Any, stop: Any, text: Any, size: Any) -> Any:
    """Where a text of up to four bytes, as a number, stands in data[i:stop] first, or -1."""
    mask = (np.uint64(1) << np.uint64(8 * size)) - np.uint64(1)
    while i + size <= stop:
        if load64(data, i) & mask == text:
            return i
        i += 1
    return -1


@njit_call
def _opens(data: Any, a: Any, b: Any) -> Any:
    """What ends the comment that opens at a, as a number; its size; where the opening ends."""
    if b - a >= 2 and load64(data, a) & np.uint64(0xFFFF) == np.uint64(0x2A2F):
        return np.uint64(0x2F2A), 2, a + 2
    if b - a >= 4 and load64(data, a) & np.uint64(0xFFFFFFFF) == np.uint64(0x2D2D213C):
        return np.uint64(0x3E2D2D), 3, a + 4
    first = peek(data, a) | 0x20
    k = a + (first == 0x72 or first == 0x75 or first == 0x62)
    if b - k >= 3:
        three = load64(data, k) & np.uint64(0xFFFFFF)
        if three == np.uint64(0x222222) or three == np.uint64(0x272727):
            return three, 3, k + 3
    return _NONE, 0, a


@njit_call
def _is_comment(data: Any, a: Any, b: Any) -> Any:
    """Whether a line is a comment in one of many languages: // # ; -- % ! dnl rem @rem"""
    byte = peek(data, a)
    if byte == 0x23 or byte == 0x3B or byte == 0x25 or byte == 0x21:
        return True
    if b - a >= 2 and (byte == 0x2F or byte == 0x2D) and peek(data, a + 1) == byte:
        return True
    k = a + (byte == 0x40)
    if b - k < 4 or peek(data, k + 3) != 0x20:
        return False
    word = _low(data, k, 3)
    return word == np.uint64(0x6D6572) or (byte != 0x40 and word == np.uint64(0x6C6E64))


@njit
def _any_marker(data: Any, i: Any, stop: Any, markers: Any, at: Any, group: Any) -> Any:
    for k in range(group[0], group[1]):
        if matches(data, i, stop, markers, peek(at, k), peek(at, k + 1)):
            return True
    return False


@njit
def _next_hint(data: Any, i: Any, stop: Any, markers: Any, at: Any) -> Any:
    """Where the next hint of data[i:stop] stands, or `stop`."""
    while i < stop:
        mask = _hint_begins(data, i) & valid_lanes(i, stop)
        while mask != _NONE:
            k = i + first_bit(mask)
            if _any_marker(data, k, stop, markers, at, _HINTS):
                return k
            mask &= mask - _ONE
        i += 32
    return stop


@njit_call
def says_generated(data: Any, start: Any, stop: Any, markers: Any, at: Any) -> Any:
    """Whether a comment before the first line of code says that the file was generated.

    Code is a line outside of comments with one of = ( {: what follows may be a text that code
    writes, or be said of one function.
    """
    close, size = _NONE, 0
    follows = False
    hint = start
    i = start
    while i < stop:
        a = b = i
        newline = newlines(data, b) & valid_lanes(b, stop)
        while newline == _NONE and b + 32 < stop:
            b += 32
            newline = newlines(data, b) & valid_lanes(b, stop)
        b = stop if newline == _NONE else b + first_bit(newline)
        i = b + 1
        while a < b and is_space(peek(data, a)):
            a += 1
        while b > a and is_space(peek(data, b - 1)):
            b -= 1
        if hint < a:
            hint = _next_hint(data, a, stop, markers, at)
            if hint == stop:
                return False
        fresh = not follows
        follows = False
        k = a
        while k < b and not follows:
            follows = (letters(data, k) | digits(data, k)) & valid_lanes(k, b) != _NONE
            k += 32
        if a == b:
            continue
        if size == 0:
            close, size, k = _opens(data, a, b)
            if size:
                if _find(data, k, b, close, size) >= 0:
                    size = 0
                fresh = True
            elif not _is_comment(data, a, b):
                follows = False
                k = a
                while k < b:
                    byte = peek(data, k)
                    if byte == 0x3D or byte == 0x28 or byte == 0x7B:
                        return False
                    if byte == 0x2F and k + 1 < b and peek(data, k + 1) == 0x2A:
                        close, size = np.uint64(0x2F2A), 2
                    elif byte == 0x2A and k + 1 < b and peek(data, k + 1) == 0x2F:
                        size = 0
                    k += 1
                continue
        elif _find(data, a, b, close, size) >= 0:
            size = 0
        if hint < b and _line_says(data, a, min(b, a + LINE_BYTES), fresh, markers, at):
            return True
    return False


# Data and headers


@njit
def _looks_like_data(data: Any, i: Any, stop: Any) -> Any:
    """Whether a run of base64's bytes is base64 or hex, not a path or a rule of ======."""
    upper = small = digit = beyond_hex = False
    while i < stop:
        byte = peek(data, i)
        upper |= 0x41 <= byte <= 0x5A
        small |= 0x61 <= byte <= 0x7A
        digit |= 0x30 <= byte <= 0x39
        beyond_hex |= not is_hex(byte)
        i += 1
    return digit and ((upper and small) or not beyond_hex)


@njit
def _hex_list(data: Any, i: Any, stop: Any) -> Any:
    """Where a list such as 0x1f, 0x8b or \\x1f\\x8b that begins at i ends, and if it is data.

    It is from 8 bytes on; a list with longer numbers than bytes is from WIDE_LIST on.
    """
    count = 0
    begin = end = i
    wide = False
    while i + 3 <= stop:
        first = peek(data, i)
        escaped = first == 0x5C and peek(data, i + 1) == 0x78
        if not escaped and not (first == 0x30 and peek(data, i + 1) | 0x20 == 0x78):
            break
        k = i + 2
        while k < stop and k - i < 18 and is_hex(peek(data, k)):
            k += 1
        if k == i + 2:
            break
        count += 1
        wide |= not escaped and k - i > 4
        end = k
        i = k
        while i < stop and i - k < 8:
            byte = peek(data, i)
            if not (is_space(byte) or byte == 0x2C or byte == 0x22):
                break
            i += 1
    return end, count >= 8 and (not wide or end - begin >= WIDE_LIST)


@njit
def _is_data_file(data: Any, i: Any, stop: Any) -> Any:
    """Whether a document begins as XPM images do, /* XPM */, or as Intel HEX, :100100002146…"""
    if stop - i < 11:
        return False
    if peek(data, i) != 0x3A:
        return load64(data, i) == np.uint64(0x2A204D5058202A2F) and peek(data, i + 8) == 0x2F
    for k in range(i + 1, i + 11):
        if not is_hex(peek(data, k)):
            return False
    return True


@njit
def _has_licence(data: Any, start: Any, stop: Any, markers: Any, at: Any) -> Any:
    i = start
    while i < stop:
        mask = _licence_begins(data, i) & valid_lanes(i, stop)
        while mask != _NONE:
            if _any_marker(data, i + first_bit(mask), stop, markers, at, _LICENCE):
                return 1.0
            mask &= mask - _ONE
        i += 32
    return 0.0


@njit
def _is_ipsum(data: Any, i: Any, stop: Any) -> Any:
    """Whether "m ipsum" stands at data[i:], in any case."""
    if i + 7 > stop:
        return False
    word = load64(data, i) & np.uint64(0x00FFFFFFFFFFFFFF)
    return word | np.uint64(0x0020202020200020) == np.uint64(0x006D757370692000 | 0x6D)


@njit
def measure_text(data: Any, at: Any, markers: Any, marker_at: Any, facts: Any, out: Any) -> None:
    """TEXT_FEATURES of every document, in that order. `facts` is scratch: FACTS numbers."""
    rows = len(at) - 1
    for row in range(rows):
        start, stop = at[row], at[row + 1]
        facts[:] = 0
        n_chars = n_letters = n_latin = n_digits = n_spaces = n_words = n_high = 0
        n_hashes = n_ellipses = n_newlines = n_sentences = n_curly = n_lorem = 0
        data_bytes = longest_run = 0
        line, line_chars = start, 0
        dots_from = list_from = run_from = chain = start
        run_end = start - 1000
        in_word = _NONE
        i = start
        while i < stop:
            valid = valid_lanes(i, stop)
            space = spaces(data, i) & valid
            solid = valid & ~space
            n_spaces += count_bits(space)
            n_words += count_bits(solid & ~(solid << _ONE | in_word))
            in_word = solid >> np.uint64(31)
            n_ascii = count_bits(letters(data, i) & valid)
            n_letters += n_ascii
            n_latin += n_ascii
            n_digits += count_bits(digits(data, i) & valid)
            n_hashes += count_bits(_hashes(data, i) & valid)
            n_curly += count_bits(_curly(data, i) & valid)
            # a mark ends a sentence where whitespace follows, or nothing
            follows = spaces(data, i + 1) | (valid ^ valid >> _ONE if i + 32 >= stop else _NONE)
            n_sentences += count_bits(_stops(data, i) & valid & follows)
            high = high_mask(data, i) & valid
            extra = _NONE
            if high != _NONE:
                extra = continuations(data, i) & valid
                leads = high & ~extra
                n_high += count_bits(leads)
                while leads != _NONE:
                    point = code_point(data, i + first_bit(leads))
                    if is_letter_beyond_ascii(point):
                        n_letters += 1
                        n_latin += is_latin_beyond_ascii(point)
                    n_ellipses += point == 0x2026
                    leads &= leads - _ONE
            newline = newlines(data, i) & valid
            n_newlines += count_bits(newline)
            while newline != _NONE:
                k = first_bit(newline)
                below = (_ONE << np.uint64(k)) - _ONE
                here = n_chars + k - count_bits(extra & below)
                _close_line(data, line, i + k, here - line_chars, facts)
                line, line_chars = i + k + 1, here + 1
                newline &= newline - _ONE
            n_chars += count_bits(valid & ~extra)
            dots = _dots(data, i) & valid
            while dots != _NONE:
                p = i + first_bit(dots)
                if p >= dots_from and p + 3 <= stop:
                    n_ellipses += 1
                    dots_from = p + 3
                dots &= dots - _ONE
            lorem = _lorem(data, i) & valid
            while lorem != _NONE:
                n_lorem += _is_ipsum(data, i + first_bit(lorem) + 4, stop)
                lorem &= lorem - _ONE
            lists = _hex_begins(data, i) & valid
            while lists != _NONE:
                p = i + first_bit(lists)
                if p >= list_from:
                    list_from, is_data = _hex_list(data, p, stop)
                    if is_data:
                        data_bytes += list_from - p
                        longest_run = max(longest_run, list_from - p)
                lists &= lists - _ONE
            # a run of 63 fills one block at least
            if _base64(data, i) & valid == _ALL and i >= run_from:
                a, b = i, i + 32
                while a > run_from and _is_base64(peek(data, a - 1)):
                    a -= 1
                while b < stop and _is_base64(peek(data, b)):
                    b += 1
                run_from = b
                if b - a >= DATA_RUN and _looks_like_data(data, a, b):
                    data_bytes += b - a
                    chain = a if a - run_end > 8 else chain
                    run_end = b
                    longest_run = max(longest_run, b - chain)
            i += 32
        if line < stop:
            _close_line(data, line, stop, n_chars - line_chars, facts)
        mean_line = share(facts[_LINE_CHARS], facts[_LINES])
        out[row] = stop - start
        out[rows + row] = n_chars
        out[2 * rows + row] = facts[_LINES]
        out[3 * rows + row] = facts[_LONGEST]
        out[4 * rows + row] = mean_line
        out[5 * rows + row] = share(n_letters + n_digits, n_chars - n_spaces)
        out[6 * rows + row] = share(n_letters, n_chars)
        out[7 * rows + row] = n_latin / n_letters if n_letters else 1.0
        out[8 * rows + row] = share(n_digits, n_chars)
        out[9 * rows + row] = share(n_spaces, n_chars)
        out[10 * rows + row] = share(n_high, n_chars)
        out[11 * rows + row] = n_words
        out[12 * rows + row] = share(n_chars - n_spaces, n_words)
        out[13 * rows + row] = share(n_hashes, n_words)
        out[14 * rows + row] = share(n_ellipses, n_words)
        out[15 * rows + row] = share(n_newlines, n_words)
        out[16 * rows + row] = n_sentences
        out[17 * rows + row] = share(facts[_SHORT], facts[_SOLID])
        out[18 * rows + row] = share(facts[_PUNCTUATED], facts[_SOLID])
        out[19 * rows + row] = share(facts[_BULLETS], facts[_LINES])
        out[20 * rows + row] = share(facts[_TRAILING], facts[_LINES])
        whole = _is_data_file(data, start, stop)
        out[21 * rows + row] = 1.0 if whole else share(data_bytes, stop - start)
        out[22 * rows + row] = longest_run
        least = 100.0 if n_spaces * 30 <= n_chars else 200.0
        out[23 * rows + row] = mean_line >= least and n_spaces * 10 <= n_chars
        head = min(stop, start + HEAD_BYTES)
        hinted = _next_hint(data, start, head, markers, marker_at) < head
        out[24 * rows + row] = hinted and says_generated(data, start, head, markers, marker_at)
        head = min(stop, start + LICENCE_BYTES)
        out[25 * rows + row] = _has_licence(data, start, head, markers, marker_at)
        out[26 * rows + row] = n_curly
        out[27 * rows + row] = n_lorem
        out[28 * rows + row] = share(facts[_LONG], facts[_LINE_CHARS])
        out[29 * rows + row] = share(n_digits, n_letters + n_digits)
