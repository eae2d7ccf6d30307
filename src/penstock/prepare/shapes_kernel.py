"""Shapes of secrets, made into tables, and the kernels that read them.

In:    the shapes and words of `secrets_layout`; an offset in a document
Out:   where what stands there ends, or 0
Keeps: time: a shape is read once, forward, and never tried again with less
Never: reads from `stop` on

A shape is literal text and runs of a class, such as "glsa_ a:32 _ H:8".
"""

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.prepare.filters_kernel import count_bits, is_alphanumeric, lower
from penstock.prepare.pii_kernel import is_digit, is_word, word
from penstock.prepare.secrets_layout import (
    ADDRESSES,
    ASSIGNED,
    CLASSES,
    KINDS,
    LAST_NAMES,
    LONG,
    MADE_UP,
    NOT_LAST,
    NOT_NAMES,
    PASSWORD_NAMES,
    SETTINGS,
    TOKENS,
)
from penstock.simd import load64, njit, njit_call, peek

# Tables

_ITEM = re.compile(r"(?:([a-zA-Z])|\[(.+)\]):(\d+)(?:(-)(\d*))?")
_LONG = 1 << 30
_KEYS = 4096
_FACTOR = 0x9E3779B1
_DATA = word(b";base64,")  # before the bytes of data:image/png;base64,…
_BOT = word(b"bot")  # before the number of a Telegram bot, in its address


@dataclass(frozen=True, slots=True)
class _Item:
    """A run of `least` to `most` of these characters."""

    chars: str
    least: int
    most: int


def _items(shape: str) -> list[_Item]:
    """The runs of a shape; a literal character is a run of one."""
    items = []
    for part in shape.split():
        found = _ITEM.fullmatch(part)
        if found is None:
            items += [_Item(char, 1, 1) for char in part]
            continue
        ranges = CLASSES[found[1]] if found[1] else found[2]
        chars = "".join(chr(c) for c in range(33, 127) if re.fullmatch(f"[{ranges}]", chr(c)))
        most = int(found[5] or _LONG) if found[4] else int(found[3])
        items.append(_Item(chars, int(found[3]), most))
    return items


def _literal(items: list[_Item]) -> str:
    """The literal text that these begin with."""
    ones = itertools.takewhile(lambda item: len(item.chars) == 1, items)
    return "".join(item.chars for item in ones)


def _keys(items: list[_Item]) -> set[int]:
    """What the first three bytes may be, hashed; nothing if they may be almost anything."""
    three = [item.chars for item in items for _ in range(min(item.least, 3))][:3]
    if math.prod(map(len, three)) > 128:
        return set()
    texts = map("".join, itertools.product(*three))
    numbers = (int.from_bytes(text.encode(), "little") for text in texts)
    return {(number * _FACTOR & 0xFFFFFFFF) >> 20 for number in numbers}


_tokens = [(kind, _items(shape)) for kind, *shapes in TOKENS for shape in shapes]
_addresses = [(kind, _items(shape)) for kind, *shapes in ADDRESSES for shape in shapes]
_assigned = [(kind, _items(shape)) for kind, _, *shapes in ASSIGNED for shape in shapes]
_all = [*_tokens, *_addresses, *_assigned]
FIRST_ADDRESS, FIRST_ASSIGNED, END = np.cumsum([*map(len, (_tokens, _addresses, _assigned))])

_class_of: dict[str, int] = {}
_rows = [
    (_class_of.setdefault(item.chars, len(_class_of)), item.least, item.most)
    for _, items in _all
    for item in items
]
_ITEMS = np.array(_rows, np.int64).ravel()
_ITEM_AT = np.cumsum([0, *(len(items) for _, items in _all)])
_IN_CLASS = np.zeros(256 * len(_class_of), np.uint8)
for _chars, _number in _class_of.items():
    _IN_CLASS[[256 * _number + byte for byte in _chars.encode()]] = 1
KIND = np.array([KINDS.index(kind) for kind, _ in _all])
_FIXED = np.array([len(_literal(items)) for _, items in _all])
# words with marks between them may have these shapes: they need digits and capitals as well
_LOOSE = np.array(
    [
        int(any({*"aZ"} < {*item.chars} and {*"_+"} & {*item.chars} for item in items))
        for _, items in _all
    ]
)

# such a shape can stand in base64: it has no mark that base64 has not; EAA is three bytes of which
# two are 0 or nearly so, as many files have them
_IN_BASE64 = np.array(
    [int(not any({*item.chars} <= {*"_-.:~@"} for item in items)) for _, items in _all]
)
_WEAK = np.array([int(_literal(items).startswith("EAA")) for _, items in _all])

# tokens are found by their first three bytes; where those may be anything, by text inside of them
_chains: dict[int, list[int]] = {}
for _number, (_, items) in enumerate(_tokens):
    for _key in _keys(items):
        _chains.setdefault(_key, []).append(_number)
_entries: list[tuple[int, int]] = []
_FIRST = np.zeros(_KEYS, np.int16)
for _key, _chain in _chains.items():
    _FIRST[_key] = len(_entries) + 1
    _entries += [(number, len(_entries) + k + 2) for k, number in enumerate(_chain)]
    _entries[-1] = (_chain[-1], 0)
_ENTRIES = np.array(_entries, np.int16).ravel()


def _inner(items: list[_Item]) -> tuple[str, int]:
    """The first literal text of a shape, and how many bytes stand before it, at least."""
    first = next(k for k, item in enumerate(items) if len(item.chars) == 1)
    return _literal(items[first:])[:3], sum(item.least for item in items[:first])


_hidden = [
    (number, *_inner(items)) for number, (_, items) in enumerate(_tokens) if not _keys(items)
]
ANCHORS = tuple(sorted({text.encode() for _, text, _ in _hidden}))
"""Text that stands inside of those tokens which begin with anything."""
_HIDDEN = np.array([number for number, *_ in _hidden])
_BACK = np.array([back for *_, back in _hidden])

_holds = [words.split() for _, words, *shapes in ASSIGNED for _ in shapes]
_groups = [MADE_UP, PASSWORD_NAMES, NOT_NAMES, NOT_LAST, SETTINGS, LONG, LAST_NAMES, *_holds]
_words = [word for group in _groups for word in group]
_WORDS = np.frombuffer("".join(_words).encode(), np.uint8)
_WORD_AT = np.cumsum([0, *map(len, _words)])
_GROUP_AT = np.cumsum([0, *map(len, _groups)])
_MADE_UP, _NAMES, _NOT_NAMES, _NOT_LAST, _SETTINGS, _LONG_NAMES, _LAST_NAMES, _FIRST_HELD = range(8)


# Kernels


@njit
def _class_has(number: Any, byte: Any) -> Any:
    return peek(_IN_CLASS, (number << 8) + np.int64(byte)) != 0


@njit
def read_shape(data: Any, i: Any, stop: Any, number: Any) -> Any:
    """Where the shape of this number, which begins at data[i], ends, or 0."""
    chosen = np.int64(0)
    for item in range(peek(_ITEM_AT, number), peek(_ITEM_AT, number + 1)):
        chosen = peek(_ITEMS, 3 * item)
        least, most = peek(_ITEMS, 3 * item + 1), peek(_ITEMS, 3 * item + 2)
        begin = i
        while i < stop and i - begin < most and _class_has(chosen, peek(data, i)):
            i += 1
        if i - begin < least:
            return 0
    if i < stop and (is_word(peek(data, i)) or _class_has(chosen, peek(data, i))):
        return 0
    return i


@njit
def group_in(text: Any, start: Any, stop: Any, group: Any, last: Any) -> Any:
    """Where a word of the group, in any case, ends in text[start:stop], or 0.

    With `last`, only a word at its end counts. A short word is all small or all large, but for its
    first letter.
    """
    for number in range(peek(_GROUP_AT, group), peek(_GROUP_AT, group + 1)):
        first = peek(_WORD_AT, number)
        size = peek(_WORD_AT, number + 1) - first
        k = max(stop - size, start) if last else start
        while k + size <= stop:
            n = 0
            while n < size and lower(peek(text, k + n)) == peek(_WORDS, first + n):
                n += 1
            # mOck stands in one of a thousand random keys
            alike = True
            for m in range(2, size if size <= 4 else 0):
                alike &= (peek(text, k + m) ^ peek(text, k + 1)) & 0x20 == 0
            if n == size and alike:
                return k + size
            k += 1
    return 0


@njit
def holds_name(data: Any, start: Any, stop: Any) -> Any:
    """Whether data[start:stop] holds one of PASSWORD_NAMES."""
    return group_in(data, start, stop, _NAMES, False) != 0


@njit
def ends_as_setting(name: Any, size: Any) -> Any:
    """Whether name[:size] ends in one of SETTINGS."""
    return group_in(name, 0, size, _SETTINGS, True) != 0


@njit
def may_be_long(name: Any, size: Any) -> Any:
    """Whether name[:size] holds one of LONG."""
    return group_in(name, 0, size, _LONG_NAMES, False) != 0


@njit
def is_made_up(data: Any, start: Any, stop: Any) -> Any:
    """Whether data[start:stop] only stands for a secret.

    Of random hexadecimal digits one in eight is the last one or the next one, here half of them
    are: 0123…, or, from two before it, 000102….
    """
    seen_low = seen_high = np.uint64(0)
    next_1 = next_2 = np.int64(0)
    for k in range(start, stop):
        byte = np.int64(peek(data, k))
        bit = np.uint64(1) << np.uint64(byte & 63)
        if byte < 64:
            seen_low |= bit
        else:
            seen_high |= bit
        if k > start:
            next_1 += np.int64(0 <= byte - np.int64(peek(data, k - 1)) <= 1)
        if k > start + 1:
            next_2 += np.int64(0 <= byte - np.int64(peek(data, k - 2)) <= 1)
    size = stop - start
    if count_bits(seen_low) + count_bits(seen_high) < min(8, (size + 1) // 2):
        return True
    if 2 * next_1 > size or 2 * next_2 > size:
        return True
    return group_in(data, start, stop, _MADE_UP, False) != 0


@njit
def _char_class(byte: Any) -> Any:
    if is_digit(byte):
        return 1
    if not is_alphanumeric(byte):
        return 0
    return 2 if byte < 0x60 else 3


@njit
def changes(data: Any, start: Any, stop: Any) -> Any:
    """How often a small letter, a capital, a digit and others follow one another."""
    count = 0
    for k in range(start + 1, stop):
        count += _char_class(peek(data, k)) != _char_class(peek(data, k - 1))
    return count


@njit
def _is_mixed(data: Any, start: Any, stop: Any) -> Any:
    """Whether data[start:stop] has capitals and digits, or many changes between letters."""
    digit = upper = False
    for k in range(start, stop):
        chosen = _char_class(peek(data, k))
        digit |= chosen == 1
        upper |= chosen == 2
    return upper and (digit or 5 * changes(data, start, stop) >= 2 * (stop - start))


@njit
def _is_base64(byte: Any) -> Any:
    return is_alphanumeric(byte) or byte == 0x2B or byte == 0x2F


@njit
def _run_before(data: Any, i: Any, start: Any) -> Any:
    """Where the run of base64 that ends at data[i] begins, at most 64 bytes before it."""
    k = i
    while k > start and i - k < 64 and _is_base64(peek(data, k - 1)):
        k -= 1
    return k


@njit
def _run_after(data: Any, i: Any, stop: Any) -> Any:
    """Where the run of base64 that begins at data[i] ends, at most 64 bytes behind it."""
    k = i
    while k < stop and k - i < 64 and _is_base64(peek(data, k)):
        k += 1
    return k


@njit
def _is_gap(byte: Any) -> Any:
    """Whether a byte stands between two lines of base64, in quotes and with + \\ , or not."""
    quote = byte == 0x22 or byte == 0x27 or byte == 0x5C
    return byte <= 0x20 or quote or byte == 0x2C or byte == 0x2B or byte == 0x3D


@njit
def _in_base64(data: Any, i: Any, end: Any, start: Any, stop: Any, weak: Any) -> Any:
    """Whether data[i:end] is a part of longer base64, in its line or in lines around it.

    A path may stand before and behind a key, with a / between them, but for `weak` ones.
    """
    before = peek(data, i - 1) if i > start else np.uint8(0x20)
    if before == 0x2B or before == 0x2F:
        begin = _run_before(data, i, start)
        # +key is a line of a patch
        if before == 0x2B and i - begin > 1:
            return True
        if weak or (i - begin > 8 and _is_mixed(data, begin, i)):
            return True
    if i - 8 >= start and load64(data, i - 8) == _DATA:
        return True
    after = peek(data, end) if end < stop else np.uint8(0x20)
    if after == 0x2B or (after == 0x2F and weak):
        return True
    if after == 0x2F:
        run = _run_after(data, end, stop)
        if run - end > 8 and _is_mixed(data, end, run):
            return True
    if after == 0x3D and (end + 1 >= stop or not is_word(peek(data, end + 1))):
        return True
    # lines of base64 above and below, of 40 bytes and more
    k, line = i, False
    while k > start and i - k < 64 and _is_gap(peek(data, k - 1)):
        k -= 1
        line |= peek(data, k) == 0x0A
    if line and k - _run_before(data, k, start) >= 40:
        return True
    k, line = end, False
    while k < stop and k - end < 64 and _is_gap(peek(data, k)):
        line |= peek(data, k) == 0x0A
        k += 1
    return line and _run_after(data, k, stop) - k >= 40


@njit
def has_all_cases(data: Any, start: Any, stop: Any) -> Any:
    """Whether data[start:stop] has digits, capitals and small letters, in many changes."""
    seen = 0
    for k in range(start, stop):
        seen |= 1 << _char_class(peek(data, k))
    return seen & 14 == 14 and 3 * changes(data, start, stop) >= stop - start


@njit
def _read_token(data: Any, i: Any, start: Any, stop: Any, number: Any) -> Any:
    end = read_shape(data, i, stop, number)
    if end == 0:
        return 0
    body = i + peek(_FIXED, number)
    if is_made_up(data, body, end) or (
        peek(_LOOSE, number) != 0 and not _is_mixed(data, body, end)
    ):
        return 0
    if peek(_IN_BASE64, number) != 0:
        return 0 if _in_base64(data, i, end, start, stop, peek(_WEAK, number) != 0) else end
    return end


@njit
def may_begin(data: Any, i: Any) -> Any:
    """1 + the first entry of the tokens that begin as data[i:i + 3] does, or 0."""
    three = load64(data, i) & np.uint64(0xFFFFFF)
    return np.int64(
        peek(_FIRST, (three * np.uint64(_FACTOR) & np.uint64(0xFFFFFFFF)) >> np.uint64(20))
    )


@njit_call
def read_tokens(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """The token at data[i]: where it ends, or 0; its kind."""
    entry = may_begin(data, i)
    while entry != 0:
        number = np.int64(peek(_ENTRIES, 2 * entry - 2))
        end = _read_token(data, i, start, stop, number)
        if end != 0:
            return end, peek(KIND, number)
        entry = np.int64(peek(_ENTRIES, 2 * entry - 1))
    return 0, 0


@njit
def _stands_behind(data: Any, i: Any, start: Any, three: Any) -> Any:
    return i - 3 >= start and load64(data, i - 3) & np.uint64(0xFFFFFF) == three


@njit
def _begins_word(data: Any, i: Any, start: Any) -> Any:
    """Whether no word, with dashes in it, goes on at data[i]; the n of \\n is none."""
    if i == start or not (is_word(peek(data, i - 1)) or peek(data, i - 1) == 0x2D):
        return True
    return i - 2 >= start and peek(data, i - 2) == 0x5C


@njit
def read_around(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """The token with one of ANCHORS at data[i]: where it begins and ends, or 0; its kind."""
    for k in range(len(_HIDDEN)):
        number = peek(_HIDDEN, k)
        item = peek(_ITEM_AT, number)
        chosen = peek(_ITEMS, 3 * item)
        most = peek(_BACK, k) + peek(_ITEMS, 3 * item + 2) - peek(_ITEMS, 3 * item + 1)
        begin = i - peek(_BACK, k)
        if begin < start:
            continue
        while begin > start and i - begin < most and _class_has(chosen, peek(data, begin - 1)):
            begin -= 1
        if not (_begins_word(data, begin, start) or _stands_behind(data, begin, start, _BOT)):
            continue
        end = _read_token(data, begin, start, stop, number)
        if end > i:
            return begin, end, peek(KIND, number)
    return 0, 0, 0


@njit
def read_any(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """The token at data[i], whatever it begins with: where it ends, or 0; its kind."""
    end, kind = read_tokens(data, i, start, stop)
    for k in range(len(_HIDDEN)):
        if end == 0:
            kind = peek(KIND, peek(_HIDDEN, k))
            end = _read_token(data, i, start, stop, peek(_HIDDEN, k))
    return end, kind


@njit
def read_assigned(data: Any, i: Any, end: Any, name: Any, size: Any) -> Any:
    """The kind of the value data[i:end] behind name[:size], or -1."""
    for number in range(FIRST_ASSIGNED, END):
        group = _FIRST_HELD + number - FIRST_ASSIGNED
        if group_in(name, 0, size, group, False) == 0 or read_shape(data, i, end, number) != end:
            continue
        if peek(_LOOSE, number) == 0 or _is_mixed(data, i, end):
            return peek(KIND, number)
    return -1


@njit
def read_address(data: Any, i: Any, stop: Any) -> Any:
    """The secret address whose host begins at data[i]: where it ends, or 0; its kind."""
    for number in range(FIRST_ADDRESS, FIRST_ASSIGNED):
        end = read_shape(data, i, stop, number)
        if end != 0:
            body = i + max(peek(_FIXED, number), 24)
            return (0 if is_made_up(data, body, end) else end), peek(KIND, number)
    return 0, 0


@njit
def names_secret(name: Any, last: Any, size: Any, any_key: Any) -> Any:
    """Whether name[:size] is that of a secret; its last word begins at `last`.

    With `any_key`, of a key of any kind.
    """
    if group_in(name, 0, size, _NOT_NAMES, False) or group_in(name, 0, size, _NOT_LAST, True):
        return False
    if any_key and size - last >= 3:
        for k in range(last, size - 2):
            if peek(name, k) == 0x6B and peek(name, k + 1) == 0x65 and peek(name, k + 2) == 0x79:
                return True
    if group_in(name, 0, size, _LAST_NAMES, True):
        return True
    return group_in(name, last, size, _NAMES, False) or group_in(name, 0, size, _NAMES, True)
