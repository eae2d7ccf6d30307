"""The kernels that find secrets and personal data, and overwrite them.

In:    all documents in one buffer, PAD bytes behind them
Out:   spans and kinds, as `secrets_layout.KINDS` numbers them
Keeps: spans ascending, apart, within one document
Never: allocates: what does not fit is counted, and the caller comes again

Masks point at the few bytes at which one can begin (or, for mail, at its @); what stands there is
then read byte by byte. Each reader returns where the span ends, or 0. However many kinds of tokens
there are, the masks stay the same: a token begins a long word, and a table knows its first bytes.
"""

from typing import Any

import numpy as np

from penstock.prepare.filters_kernel import (
    begins,
    byte_class,
    digits,
    is_alphanumeric,
    letters,
    lower,
    valid_lanes,
)
from penstock.prepare.pii_kernel import (
    is_digit,
    is_name,
    read_card,
    read_email,
    read_iban,
    read_ipv4,
    read_ipv6,
    read_phone,
    word,
)
from penstock.prepare.secrets_layout import KINDS, MAX_VALUE, MIN_BITS, NAME_BYTES
from penstock.prepare.shapes_kernel import (
    ANCHORS,
    changes,
    ends_as_setting,
    has_all_cases,
    holds_name,
    is_made_up,
    may_be_long,
    may_begin,
    names_secret,
    read_address,
    read_any,
    read_around,
    read_assigned,
    read_tokens,
)
from penstock.simd import first_bit, load64, next_index, njit, njit_call, peek

_PRIVATE_KEY, _URL_PASSWORD, _PASSWORD, _EMAIL, _IPV4, _IPV6, _PHONE, _CARD, _IBAN = range(
    KINDS.index("private_key"), len(KINDS)
)

_IN, _PRIVATE, _KEY, _BLOCK = word(b"IN "), word(b"PRIVATE "), word(b"KEY"), word(b" BLOCK")
_DASHES, _BEGIN, _END = word(b"-----"), word(b"-----BEG"), word(b"-----END")
_NETRC, _LOGIN, _BEARER = word(b"password"), word(b"login "), word(b"earer ")
_STR, _STRING, _BYTES, _STATIC = word(b"str"), word(b"string"), word(b"bytes"), word(b"'static")
_DEFINE, _OPTION = word(b"define"), word(b"--passwo")
_ONE = np.uint64(1)
_NONE = np.uint64(0)
_HALF = np.uint64(32)
_LANES = np.uint64(0xFFFFFFFF)

_anchors = begins(b"-BE", b"://", b"rd ", b"rer ", b"RD", *ANCHORS)
_quotes = byte_class(b'"', b"'")
_equals = byte_class(b"=")
_greater = byte_class(b">")
_blanks = byte_class(b" ", b"\t")
_graphic = byte_class(b"!~")
_underscores = byte_class(b"_")
_backslashes = byte_class(b"\\")
_at_signs = byte_class(b"@")
_dots = byte_class(b".")
_dashes = byte_class(b"-")
_colons = byte_class(b":")
_plus = byte_class(b"+")
_open = byte_class(b"(")
_upper = byte_class(b"AZ")
_two_three = byte_class(b"23")


@njit
def _starts(data: Any, i: Any, stop: Any, word: Any, size: Any) -> Any:
    """Whether the `size` bytes of the little-endian word stand at data[i:stop]."""
    unused = np.uint64(64 - 8 * size)
    return i + size <= stop and load64(data, i) << unused >> unused == word


# Secrets


@njit
def _ends_label(data: Any, i: Any, end: Any) -> Any:
    """Whether data[i:end] ends in "PRIVATE KEY"."""
    is_private = end - i >= 11 and _starts(data, end - 11, end, _PRIVATE, 8)
    return is_private and _starts(data, end - 3, end, _KEY, 3)


@njit
def _private_key(data: Any, i: Any, stop: Any) -> Any:
    """The block whose -----BEGIN begins at data[i], if a private key is in it."""
    if not _starts(data, i + 8, stop, _IN, 3):
        return 0
    label = i + 11
    end = label
    while end < stop and (0x41 <= peek(data, end) <= 0x5A or peek(data, end) == 0x20):
        end += 1
    if not _starts(data, end, stop, _DASHES, 5):
        return 0
    block = end - label >= 17 and _starts(data, end - 6, end, _BLOCK, 6)
    if not _ends_label(data, label, end - 6 if block else end):
        return 0
    within = min(stop, i + (1 << 14))
    run = longest = 0
    k = end + 5
    while k < within:
        byte = peek(data, k)
        if byte == 0x2D and _starts(data, k, within, _END, 8):
            k = next_index(data, k + 8, min(within, k + 56), 0x2D)
            return k + 5 if longest >= 32 and _starts(data, k, within, _DASHES, 5) else 0
        is_base64 = is_alphanumeric(byte) or byte == 0x2B or byte == 0x2F or byte == 0x3D
        run = run + 1 if is_base64 else 0
        longest = max(longest, run)
        k += 1
    return 0


@njit
def _is_template(byte: Any) -> Any:
    """Whether a byte stands in what is filled in later: ${x}, %(x)s, <x>, [x], f(x), \\x."""
    found = byte == 0x3C or byte == 0x3E or byte == 0x24 or byte == 0x25 or byte == 0x28
    return found or byte == 0x29 or byte == 0x7B or byte == 0x7D or 0x5B <= byte <= 0x5D


@njit
def _is_quote(byte: Any) -> Any:
    return byte == 0x22 or byte == 0x27 or byte == 0x60


@njit
def _ends_bare(data: Any, i: Any, stop: Any) -> Any:
    """Whether a value without quotes may end before data[i]."""
    if i >= stop:
        return True
    byte = peek(data, i)
    more = byte == 0x2C or byte == 0x3B or byte == 0x26 or byte == 0x29 or byte == 0x7D
    return byte <= 0x20 or more or _is_quote(byte) or byte == 0x5C or byte == 0x3C


@njit
def _has_entropy(data: Any, i: Any, end: Any, scratch: Any) -> Any:
    """Whether data[i:end], of printable bytes, has MIN_BITS of entropy a byte."""
    logs, counts = scratch.logs, scratch.counts
    counts[:] = 0
    for k in range(i, end):
        counts[peek(data, k)] += 1
    repeated = 0.0
    for byte in range(0x21, 0x7F):
        repeated += logs[counts[byte]]
    # bits a byte are log2(size) - repeated / size
    return logs[end - i] - repeated >= MIN_BITS * (end - i)


@njit
def _skip_type(data: Any, start: Any, i: Any) -> Any:
    """Where the name ends in `name: str`, `name: &'static str`, `name string`; i without a type."""
    if i - 3 < start:
        return i
    first, second = peek(data, i - 2) | 0x20, peek(data, i - 1) | 0x20
    is_type = (first == 0x74 and second == 0x72) or (first == 0x6E and second == 0x67)
    if not (is_type or (first == 0x65 and second == 0x73)):
        return i
    k = i
    while k > start and i - k < 7 and is_alphanumeric(peek(data, k - 1)):
        k -= 1
    folded = load64(data, k) | np.uint64(0x2020202020202020)
    unused = np.uint64(64 - 8 * (i - k))
    text = folded << unused >> unused
    is_type = (i - k == 3 and text == _STR) or (i - k == 6 and text == _STRING)
    if not (is_type or (i - k == 5 and text == _BYTES)):
        return i
    if k - 8 >= start and peek(data, k - 1) == 0x20 and _starts(data, k - 8, i, _STATIC, 7):
        k -= 8
    begin = k
    while k > start and begin - k < 8:
        byte = peek(data, k - 1)
        if not (byte == 0x20 or byte == 0x09 or byte == 0x26 or byte == 0x3A):
            break
        k -= 1
    return k if k < begin else i


@njit
def _skip_brackets(data: Any, start: Any, i: Any) -> Any:
    """Where the name ends in x['name'], name[], name[64]; i without brackets."""
    if i - 2 < start or peek(data, i - 1) != 0x5D:
        return i
    if _is_quote(peek(data, i - 2)):
        return i - 1
    k = i - 1
    while k > start and i - k < 6 and is_digit(peek(data, k - 1)):
        k -= 1
    return k - 1 if k > start and peek(data, k - 1) == 0x5B else i


@njit
def _read_name(data: Any, start: Any, i: Any, name: Any) -> Any:
    """The name before the = or : at data[i - 1], small and without _ - . and spaces, in `name`.

    Its size, where its last word begins in it, and whether it is a NAME alone on its left.
    """
    while i > start and (0x3A <= peek(data, i - 1) <= 0x3E or peek(data, i - 1) == 0x21):
        i -= 1  # := => == !=
    i -= i > start and peek(data, i - 1) == 0x2C  # define('NAME', 'value')
    while i > start and (peek(data, i - 1) == 0x20 or peek(data, i - 1) == 0x09):
        i -= 1
    i = _skip_brackets(data, start, _skip_type(data, start, i))
    if i > start and _is_quote(peek(data, i - 1)):
        i -= 1
        i -= i > start and peek(data, i - 1) == 0x5C
    end = i
    while (
        i > start
        and end - i < NAME_BYTES
        and (is_name(peek(data, i - 1)) or peek(data, i - 1) == 0x20)
    ):
        i -= 1
    size = last = 0
    upper = True
    # a/name, a::name
    if i - 2 >= start and peek(data, i) != 0x20:
        before, first = peek(data, i - 1), peek(data, i - 2)
        if (before == 0x2F and first != 0x2F) or (before == 0x3A and first == 0x3A):
            return 0, 0, False
    for k in range(i, end):
        byte = peek(data, k)
        if byte == 0x20:
            last = size
            upper = True
        elif is_alphanumeric(byte):
            name[size] = lower(byte)
            size += 1
            upper &= byte < 0x60
        else:
            upper &= byte == 0x5F
    return size, last, upper


@njit
def _is_bare(byte: Any) -> Any:
    """Whether keys without quotes have such bytes."""
    return is_name(byte) or byte == 0x2B or byte == 0x2F or byte == 0x3D or byte == 0x7E


@njit
def _read_run(data: Any, i: Any, stop: Any, bare: Any) -> Any:
    """Where the value at data[i] ends: at a blank, a quote, a template; or what is not `bare`."""
    end = i
    while end < stop and end - i <= MAX_VALUE:
        byte = peek(data, end)
        if byte <= 0x20 or byte >= 0x7F or _is_quote(byte) or _is_template(byte):
            break
        if bare and not _is_bare(byte):
            break
        end += 1
    return end


@njit
def _read_marked(data: Any, i: Any, stop: Any, quote: Any) -> Any:
    """Where the value in quotes at data[i], with marks of templates but being none, ends, or 0.

    Templates are ${x}, $(x), %(x)s, {x}, <x>, [x], f(x) and, but for single quotes, $x; a regular
    expression has (?, [^, ]+, .*, a-z.
    """
    end = i
    curly = angle = call = called = False
    while end < stop and end - i <= 256:
        byte, after = peek(data, end), peek(data, end + 1) if end + 1 < stop else np.uint8(0)
        if byte == quote or (byte == 0x5C and after == quote):
            break
        if byte <= 0x20 or byte >= 0x7F or byte == 0x5C:
            return 0
        before = peek(data, end - 1)
        named = is_name(after) and not is_digit(after)
        dollar = after == 0x7B or after == 0x28 or (quote != 0x27 and named)
        repeats = after == 0x2B or after == 0x2A or after == 0x3F or after == 0x7B
        ranges = (before == 0x30 and after == 0x39) or (before | 32 == 0x61 and after | 32 == 0x7A)
        if (
            (byte == 0x24 and dollar)
            or (byte == 0x25 and (after == 0x28 or after == 0x73 or after == 0x64))
            or (byte == 0x28 and after == 0x3F)
            or (byte == 0x5B and (after == 0x5E or end == i))
            or (byte == 0x5D and repeats)
            or (byte == 0x2E and after == 0x2A)
            or (byte == 0x2D and ranges)
        ):
            return 0
        if byte == 0x28 and end - i >= 3:
            letters = True
            for k in range(end - 3, end):
                letters &= is_name(peek(data, k)) and not is_digit(peek(data, k))
            call |= letters
        if (byte == 0x7D and curly) or (byte == 0x3E and angle):
            return 0
        curly |= byte == 0x7B
        angle |= byte == 0x3C
        called |= call and byte == 0x29
        end += 1
    short = end - i < 32
    if end >= stop or (short and called) or end - i < 8:
        return 0
    return end if 3 * changes(data, i, end) >= end - i else 0


@njit
def _is_prefix(byte: Any) -> Any:
    """Whether strings have this before their quotes: b"", f"", r"", u"", L"", @""."""
    small = byte | 0x20
    python = small == 0x62 or small == 0x66 or small == 0x72 or small == 0x75
    return python or byte == 0x4C or byte == 0x40


@njit
def _read_setting(data: Any, i: Any, stop: Any) -> Any:
    """Where the password behind password=, in a line or address, ends, or 0."""
    end = _read_run(data, i, stop, False)
    for k in range(i, end):
        byte = peek(data, k)
        if byte == 0x3B or byte == 0x26:
            end = k
            break
        if byte == 0x2C or byte == 0x2E or byte == 0x3D:  # a program
            return 0
    if end < stop and (peek(data, end) == 0x29 or not _ends_bare(data, end, stop)):
        return 0
    return end if has_all_cases(data, i, end) and not holds_name(data, i, end) else 0


@njit_call
def _read_value(data: Any, i: Any, start: Any, stop: Any, scratch: Any) -> Any:
    """The secret behind = or : and blanks, at data[i]: where it begins and ends, or 0; its kind."""
    sep = i
    while sep > start and (peek(data, sep - 1) == 0x20 or peek(data, sep - 1) == 0x09):
        sep -= 1
    tight = sep == i and peek(data, i - 1) == 0x3D
    i += _is_prefix(peek(data, i)) and i + 1 < stop and _is_quote(peek(data, i + 1))
    # \\"name\\": \\"value\\"
    i += peek(data, i) == 0x5C and i + 1 < stop and _is_quote(peek(data, i + 1))
    quoted = _is_quote(peek(data, i))
    quote = peek(data, i)
    i += quoted
    end = _read_run(data, i, stop, not quoted)
    if quoted:
        if end < stop and peek(data, end) != 0x5C and _is_template(peek(data, end)):
            end = _read_marked(data, i, stop, quote)
        if end == 0 or end >= stop or not (peek(data, end) == quote or peek(data, end) == 0x5C):
            return 0, 0, 0
    ends_line = end >= stop or peek(data, end) == 0x0A or peek(data, end) == 0x0D
    if not (quoted or tight):
        if end - i < 16:
            # the names of SETTINGS end in d and s
            k = sep - 1 - (sep - 2 >= start and peek(data, sep - 2) == 0x20)
            name_end = peek(data, k - 1) | 0x20 if k > start else np.uint8(0)
            short = end - i < 8 or not ends_line
            if short or not (name_end == 0x64 or name_end == 0x73):
                return 0, 0, 0
        if not _ends_bare(data, end, stop):
            return 0, 0, 0
    if quoted:
        has_digit = False
        for k in range(i, end):
            has_digit |= is_digit(peek(data, k))
        if end - i < 8 or not has_digit:  # most of HTML
            return 0, 0, 0
    name = scratch.name
    name_size, last, upper = _read_name(data, start, sep, name)
    if name_size < 3:
        return 0, 0, 0
    line = tight and upper  # NAME=value
    setting = False
    if line and not quoted:
        end = _read_run(data, i, stop, False)
    elif not quoted and (tight or ends_line) and ends_as_setting(name, name_size):
        ends = _read_setting(data, i, stop)
        setting = ends != 0 and (tight or 2 * changes(data, i, end) >= end - i)
        end = ends if setting else end
    if not quoted:
        if not _ends_bare(data, end, stop):
            return 0, 0, 0
        while end > i and peek(data, end - 1) == 0x2E:
            end -= 1
    size = end - i
    n_digits = n_letters = 0
    for k in range(i, end):
        n_digits += is_digit(peek(data, k))
        n_letters += is_alphanumeric(peek(data, k))
    if size > 256 and (size > MAX_VALUE or not may_be_long(name, name_size)):
        return 0, 0, 0
    if size < 8 or n_digits == 0 or n_letters == n_digits:
        return 0, 0, 0
    is_secret = names_secret(name, last, name_size, False)
    if is_secret or names_secret(name, last, name_size, True):
        token, kind = read_any(data, i, start, stop)
        if token != 0:
            return i, token, kind
        kind = read_assigned(data, i, end, name, name_size)
        if kind >= 0:
            return i, (0 if is_made_up(data, i, end) else end), kind
    if not is_secret:
        return 0, 0, 0
    # in a program this could be an expression
    if not (quoted or line or setting):
        if size < 16 or n_digits < 2 or 4 * changes(data, i, end) < size:
            return 0, 0, 0
        if holds_name(data, i, end) or next_index(data, i, end, 0x2E) < end:
            return 0, 0, 0
    for k in range(i, end - 2):
        if peek(data, k) == 0x3A and peek(data, k + 1) == 0x2F and peek(data, k + 2) == 0x2F:
            return 0, 0, 0
    is_path = peek(data, i) == 0x2F or peek(data, i) == 0x2E
    if (is_path and 2 * changes(data, i, end) < size) or is_made_up(data, i, end):
        return 0, 0, 0
    return i, (end if _has_entropy(data, i, end, scratch) else 0), _PASSWORD


@njit
def _read_bearer(data: Any, i: Any, stop: Any) -> Any:
    """Where the token at data[i], behind "Bearer " or "password ", ends, or 0."""
    end = _read_run(data, i, stop, True)
    n_digits = 0
    for k in range(i, end):
        n_digits += is_digit(peek(data, k))
    while end > i and peek(data, end - 1) == 0x2E:
        end -= 1
    if not _ends_bare(data, end, stop) or end - i < 16 or n_digits < 2 or end - i > 512:
        return 0
    return 0 if 4 * changes(data, i, end) < end - i or is_made_up(data, i, end) else end


@njit
def _read_netrc(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """Where the password at data[i], behind "login x password ", ends, or 0."""
    k = i - 10
    while k > start and peek(data, k) <= 0x20 and i - k < 64:
        k -= 1
    while k > start and peek(data, k) > 0x20 and i - k < 128:
        k -= 1
    if k - 5 < start or not _starts(data, k - 5, stop, _LOGIN, 6):
        return 0
    end = _read_run(data, i, stop, False)
    if end < stop and peek(data, end) > 0x20:
        return 0
    letter = other = False
    for k in range(i, end):
        is_letter = is_alphanumeric(peek(data, k)) and not is_digit(peek(data, k))
        letter |= is_letter
        other |= not is_letter
    plain = end - i < 6 or end - i > 256 or not (letter and other)
    return 0 if plain or is_made_up(data, i, end) else end


@njit
def _read_url(data: Any, i: Any, stop: Any) -> Any:
    """The secret in the address whose :// stands before data[i]: begin and end, or 0; its kind."""
    end, kind = read_address(data, i, stop)
    if end != 0:
        return i, end, kind
    colon = at = 0
    k = i
    letter = other = False
    while k < stop and k - i < 256:
        byte = peek(data, k)
        if byte <= 0x20 or byte >= 0x7F or byte == 0x2F or _is_quote(byte):
            break
        if byte == 0x40:
            at = k
            break
        if colon == 0:
            colon = k if byte == 0x3A else 0
        elif byte == 0x2C or (byte != 0x25 and _is_template(byte)):
            return 0, 0, 0
        else:
            is_letter = is_alphanumeric(byte) and not is_digit(byte)
            letter |= is_letter
            other |= not is_letter and byte != 0x3A
        k += 1
    if at == 0 or colon == 0 or at - colon < 7 or not (letter and other):
        return 0, 0, 0
    if at + 1 >= stop or not (is_alphanumeric(peek(data, at + 1)) or peek(data, at + 1) == 0x5B):
        return 0, 0, 0
    return colon + 1, (0 if is_made_up(data, colon + 1, at) else at), _URL_PASSWORD


@njit
def _read_define(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """Where the value begins in #define NAME "value" and define('NAME', 'value'), or 0.

    data[i:] are the last two letters of the name.
    """
    third, fourth = peek(data, i + 2), peek(data, i + 3)
    if not ((third == 0x20 and fourth == 0x22) or (third == 0x27 and fourth == 0x2C)):
        return 0
    k = i
    while k > start and i - k < 64 and is_name(peek(data, k - 1)):
        k -= 1
    while k > start and i - k < 72 and not is_alphanumeric(peek(data, k - 1)):
        k -= 1
    if k - 6 < start or not _starts(data, k - 6, stop, _DEFINE, 6):
        return 0
    k = i + 3
    if peek(data, i + 2) == 0x27:
        k += 1
        while k < stop and k - i < 8 and peek(data, k) == 0x20:
            k += 1
    return k if k < stop and _is_quote(peek(data, k)) else 0


@njit_call
def _read_anchor(data: Any, i: Any, start: Any, stop: Any, scratch: Any) -> Any:
    """The secret that has one of _anchors at data[i]: where it begins and ends, or 0; its kind."""
    first, second = peek(data, i), peek(data, i + 1)
    if first == 0x2D and second == 0x42:  # -BEG, with four more before it
        begins_block = i - 4 >= start and _starts(data, i - 4, stop, _BEGIN, 8)
        return i - 4, (_private_key(data, i - 4, stop) if begins_block else 0), _PRIVATE_KEY
    if first == 0x3A and second == 0x2F:
        return _read_url(data, i + 3, stop) if i + 3 < stop else (0, 0, 0)
    if first == 0x52 and second == 0x44:
        i = _read_define(data, i, start, stop)
        return _read_value(data, i, start, stop, scratch) if i != 0 else (0, 0, 0)
    if first == 0x72:
        if second == 0x65:  # Bearer
            is_bearer = i - 3 >= start and _starts(data, i - 2, stop, _BEARER, 6)
            is_bearer = is_bearer and (peek(data, i - 3) | 0x20) == 0x62
            if not is_bearer:
                return 0, 0, 0
            i, end = i + 4, _read_bearer(data, i + 4, stop)
        elif i - 8 >= start and _starts(data, i - 8, stop, _OPTION, 8):
            i, end = i + 3, _read_setting(data, i + 3, stop)
            end = 0 if end - i < 8 or is_made_up(data, i, end) else end
        elif i - 6 >= start and _starts(data, i - 6, stop, _NETRC, 8):
            i, end = i + 3, _read_netrc(data, i + 3, start, stop)
        else:
            return 0, 0, 0
        if end == 0:
            return 0, 0, 0
        token, kind = read_any(data, i, start, stop)
        return i, (token if token != 0 else end), (kind if token != 0 else _PASSWORD)
    return read_around(data, i, start, stop)


# All of them


@njit
def find_secrets(data: Any, at: Any, wanted: Any, scratch: Any, spans: Any) -> Any:
    """All spans, as far as there is room; how many. `wanted` is 1 for secrets, 2 for PII."""
    found = 0
    none = _NONE
    for row in range(len(at) - 1):
        start, stop = at[row], at[row + 1]
        done = start
        # what the last byte of the block before is: of a word, =, or before a value
        in_word = was_equal = before = none
        i = start
        digit, dot, dash, colon = (
            digits(data, i),
            _dots(data, i),
            _dashes(data, i),
            _colons(data, i),
        )
        letter, under, graph = letters(data, i), _underscores(data, i), _graphic(data, i)
        back = none
        while i < stop:
            valid = valid_lanes(i, stop)
            token = anchor = value = mail = ip4 = ip6 = phone = card = iban = none
            # 64 lanes where a word or number is long; the upper half is the next block's lower one
            more_digits, more_dots = digits(data, i + 32), _dots(data, i + 32)
            more_dashes, more_colons = _dashes(data, i + 32), _colons(data, i + 32)
            digit = digit | more_digits << _HALF
            dot = dot | more_dots << _HALF
            dash = dash | more_dashes << _HALF
            colon = colon | more_colons << _HALF
            if wanted & 1:
                more_letters, more_graphs = letters(data, i + 32), _graphic(data, i + 32)
                more_unders = _underscores(data, i + 32)
                letter = letter | more_letters << _HALF
                under = under | more_unders << _HALF
                graph = graph | more_graphs << _HALF
                # the n of \\n is no part of a word
                slash = _backslashes(data, i) << _ONE | back
                back = slash >> _HALF
                words = (letter | digit | under | dash) & ~slash
                eight = graph & graph >> _ONE
                eight &= eight >> np.uint64(2)
                eight &= eight >> np.uint64(4)
                token = words & ~(words << _ONE | in_word) & eight & eight >> np.uint64(7)
                in_word = words >> np.uint64(31) & _ONE
                anchor = _anchors(data, i)
                equal = _equals(data, i)
                arrow = _greater(data, i) & (equal << _ONE | was_equal)
                was_equal = equal >> np.uint64(31)
                blank = _blanks(data, i)
                after = (equal | colon & _LANES | arrow) << _ONE | before
                # the sum carries over runs of blanks
                after = ((after & blank) + blank | after) & ~blank
                before = after >> _HALF & _ONE
                near = digit | digit >> _ONE
                near |= near >> np.uint64(2)
                near |= near >> np.uint64(4)
                near |= near >> np.uint64(8)
                near |= near >> np.uint64(16)
                value = after & near & eight
                letter, under, graph = more_letters, more_unders, more_graphs
                maybe = token & valid
                token = none
                while maybe != none:
                    bit = maybe & (~maybe + _ONE)
                    maybe ^= bit
                    if may_begin(data, i + first_bit(bit)) != 0:
                        token |= bit
            if wanted & 2:
                mail = _at_signs(data, i)
                two = digit & digit >> _ONE
                three = two & digit >> np.uint64(2)
                near = dot >> np.uint64(2) | dot >> np.uint64(3) | dot >> np.uint64(4)
                ip4 = dot & digit >> _ONE & near
                ip6 = _two_three(data, i) & colon >> np.uint64(4)
                dash |= dot
                phone = three & dash >> np.uint64(3) & three >> np.uint64(4)
                phone &= dash >> np.uint64(7) & three >> np.uint64(8) & digit >> np.uint64(11)
                phone |= _open(data, i) & three >> _ONE | _plus(data, i) & digit >> _ONE
                card = three & digit >> np.uint64(3) & ~(digit << _ONE)
                upper = _upper(data, i)
                iban = upper & two >> np.uint64(2) & ~(upper << _ONE)
            digit, dot, dash, colon = more_digits, more_dots, more_dashes, more_colons
            here = (token | anchor | value | mail | ip4 | ip6 | phone | card | iban) & valid
            while here != none:
                bit = here & (~here + _ONE)
                here ^= bit
                p = i + first_bit(bit)
                a = p
                end = kind = 0
                if token & bit and p >= done:
                    end, kind = read_tokens(data, p, start, stop)
                if end == 0 and anchor & bit:
                    a, end, kind = _read_anchor(data, p, start, stop, scratch)
                if end == 0 and value & bit and p > done:
                    a, end, kind = _read_value(data, p, start, stop, scratch)
                if end == 0 and mail & bit:
                    a, end = read_email(data, p, start, stop)
                    end = 0 if a < done else end  # what stands before the @ is a secret
                    kind = _EMAIL
                if end == 0 and ip4 & bit:
                    a, end = read_ipv4(data, p, start, stop)
                    kind = _IPV4
                if end == 0 and ip6 & bit:
                    a, end, kind = p, read_ipv6(data, p, start, stop), _IPV6
                if end == 0 and phone & bit:
                    a, end, kind = p, read_phone(data, p, start, stop), _PHONE
                if end == 0 and card & bit:
                    a, end, kind = p, read_card(data, p, start, stop), _CARD
                if end == 0 and iban & bit:
                    a, end, kind = p, read_iban(data, p, start, stop), _IBAN
                a = max(a, done)
                if end > a:
                    if found < len(spans.start):
                        spans.start[found] = a
                        spans.end[found] = end
                        spans.kind[found] = np.uint8(kind)
                    found += 1
                    done = end
            i += 32
    return found


@njit
def blank_spans(data: Any, starts: Any, ends: Any) -> None:
    """Overwrite all spans with asterisks, but for line ends."""
    for k in range(len(starts)):
        for i in range(starts[k], ends[k]):
            if peek(data, i) != 0x0A and peek(data, i) != 0x0D:
                data[i] = np.uint8(0x2A)
