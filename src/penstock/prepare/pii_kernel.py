"""Readers for personal data: addresses of mail and machines, telephone, card and account numbers.

In:    a place in a document at which one may begin
Out:   where it ends (and begins, where that is not known yet), or 0
Never: looks beyond the document, before `start` or from `stop` on
"""

from typing import Any

import numpy as np

from penstock.prepare.filters_kernel import is_alphanumeric, is_hex
from penstock.simd import load64, njit, peek


def word(text: bytes) -> np.uint64:
    """Up to eight bytes as `load64` has them."""
    return np.uint64(int.from_bytes(text, "little"))


_2001, _DB8 = word(b"\0\0\x002001:"), word(b"db8")
_GIT, _SSH, _SCP, _RSYNC = word(b"git"), word(b"ssh"), word(b"scp"), word(b"rsync")
_DOT_GIT = word(b".git")
_PNG, _JPG, _GIF, _SVG = word(b"png"), word(b"jpg"), word(b"gif"), word(b"svg")


@njit
def is_word(byte: Any) -> Any:
    return is_alphanumeric(byte) or byte == 0x5F


@njit
def is_digit(byte: Any) -> Any:
    return 0x30 <= byte <= 0x39


@njit
def begins_word(data: Any, i: Any, start: Any) -> Any:
    return i == start or not is_word(peek(data, i - 1))


@njit
def is_name(byte: Any) -> Any:
    return is_word(byte) or byte == 0x2E or byte == 0x2D


@njit
def _is_local(byte: Any) -> Any:
    return is_name(byte) or byte == 0x2B or byte == 0x25


@njit
def _is_login(data: Any, begin: Any, i: Any, start: Any) -> Any:
    """Whether data[begin:i], before an @, logs into a machine: git@, ssh://me@, https://me:x@.

    Back to the :// stands nothing but what names and passwords in addresses have: in
    https://a.org,me@b.org the address ends before the comma.
    """
    if i - begin == 3 and load64(data, begin) & np.uint64(0xFFFFFF) == _GIT:
        return begin == start or peek(data, begin - 1) != 0x3C  # A Name <git@host.org>
    k = begin
    while k > start and i - k < 128:
        byte = peek(data, k - 1)
        if byte == 0x2F:
            return k - 3 >= start and peek(data, k - 2) == 0x2F and peek(data, k - 3) == 0x3A
        other = byte == 0x3A or byte == 0x7E or byte == 0x21 or byte == 0x24 or byte == 0x2A
        if not (_is_local(byte) or other):
            return False
        k -= 1
    return False


@njit
def _has_remote_tool(data: Any, begin: Any, start: Any) -> Any:
    """Whether ssh, scp, rsync or git, and a blank, stand in the line before data[begin]."""
    k = begin
    while k > start and begin - k < 96 and peek(data, k - 1) != 0x0A:
        k -= 1
        if peek(data, k) != 0x20 or k - 3 < start:
            continue
        three = load64(data, k - 3) & np.uint64(0xFFFFFF)
        if (three == _SSH or three == _SCP or three == _GIT) and begins_word(data, k - 3, start):
            return True
        if k - 5 >= start and load64(data, k - 5) & np.uint64(0xFFFFFFFFFF) == _RSYNC:
            return True
    return False


@njit
def _is_remote(data: Any, i: Any, stop: Any) -> Any:
    """Whether the path of a machine stands at data[i], behind me@host.org: a/b, a.git."""
    k = i
    slash = named = False
    while k < stop and k - i < 256:
        byte = peek(data, k)
        if not (_is_local(byte) or byte == 0x2F or byte == 0x7E):
            break
        slash |= byte == 0x2F
        named |= is_word(byte)
        k += 1
    if k < stop and peek(data, k) == 0x3A:  # me@host.org:https://a.org
        return False
    while k > i and peek(data, k - 1) == 0x2E:
        k -= 1
    is_git = k - 4 > i and load64(data, k - 4) & np.uint64(0xFFFFFFFF) == _DOT_GIT
    return (slash and named) or is_git


@njit
def read_email(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """The address around the @ at data[i]: where it begins and ends, or two times 0."""
    begin = i
    while begin > start and i - begin < 64 and _is_local(peek(data, begin - 1)):
        begin -= 1
    while begin < i and not is_alphanumeric(peek(data, begin)):
        begin += 1
    if begin == i or _is_login(data, begin, i, start):
        return 0, 0
    end = i + 1
    while end < stop and (is_alphanumeric(peek(data, end)) or 0x2D <= peek(data, end) <= 0x2E):
        end += 1
    while end > i + 1 and not is_alphanumeric(peek(data, end - 1)):
        end -= 1
    top = end
    while top > i + 1 and is_alphanumeric(peek(data, top - 1)):
        if is_digit(peek(data, top - 1)):
            return 0, 0
        top -= 1
    if end - top < 2 or top - i < 3 or peek(data, top - 1) != 0x2E:
        return 0, 0
    if not is_alphanumeric(peek(data, i + 1)) or (end < stop and is_word(peek(data, end))):
        return 0, 0
    # me@host.org:path is for ssh and scp; me@host.org:Berlin is a table
    if end + 1 < stop and peek(data, end) == 0x3A:
        after = peek(data, end + 1)
        path = is_word(after) or after == 0x2F or after == 0x7E or after == 0x2E
        if path and (_is_remote(data, end + 1, stop) or _has_remote_tool(data, begin, start)):
            return 0, 0
    if end - top == 3:  # logo@2x.png
        name = (load64(data, top) | np.uint64(0x202020)) & np.uint64(0xFFFFFF)
        if name == _PNG or name == _JPG or name == _GIF or name == _SVG:
            return 0, 0
    return begin, end


@njit
def _is_public(a: Any, b: Any, c: Any) -> Any:
    if a == 0 or a == 10 or a == 127 or a >= 224:
        return False
    if (a == 172 and 16 <= b < 32) or (a == 192 and b == 168) or (a == 169 and b == 254):
        return False
    if (a == 100 and 64 <= b < 128) or (a == 198 and 18 <= b < 20):
        return False
    document = (a == 192 and b == 0 and c <= 2) or (a == 198 and b == 51 and c == 100)
    return not (document or (a == 203 and b == 0 and c == 113))


@njit
def read_ipv4(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """The address whose first dot stands at data[i]: where it begins and ends, or two times 0."""
    begin = i
    while begin > start and i - begin < 4 and is_digit(peek(data, begin - 1)):
        begin -= 1
    if begin == i or i - begin > 3:
        return 0, 0
    if begin > start and (is_name(peek(data, begin - 1))):
        return 0, 0
    k = begin
    a = b = c = np.int64(0)
    n_digits = 0
    for part in range(4):
        value, size = np.int64(0), 0
        while k < stop and size < 4 and is_digit(peek(data, k)):
            value = value * 10 + np.int64(peek(data, k)) - 0x30
            size += 1
            k += 1
        if size == 0 or value > 255 or (size > 1 and peek(data, k - size) == 0x30):
            return 0, 0
        n_digits += size
        if part < 3:
            if k >= stop or peek(data, k) != 0x2E:
                return 0, 0
            k += 1
            a, b, c = b, c, value
    if k < stop and is_word(peek(data, k)):
        return 0, 0
    more = k + 1 < stop and (peek(data, k) == 0x2E or peek(data, k) == 0x2D)
    if n_digits < 7 or (more and is_alphanumeric(peek(data, k + 1))) or not _is_public(a, b, c):
        return 0, 0
    return begin, k


@njit
def read_ipv6(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """Where the address at data[i], with a 2 or 3 there and a colon at i + 4, ends, or 0."""
    if i > start and (is_name(peek(data, i - 1)) or peek(data, i - 1) == 0x3A):
        return 0
    for k in range(i + 1, i + 4):
        if not is_hex(peek(data, k)):
            return 0
    groups = 0
    short = False
    k = i
    while True:
        size = 0
        while k < stop and size < 5 and is_hex(peek(data, k)):
            size += 1
            k += 1
        if size > 4:
            return 0
        groups += size > 0
        if size == 0 and not (short and peek(data, k - 1) == 0x3A and peek(data, k - 2) == 0x3A):
            return 0
        if k >= stop or peek(data, k) != 0x3A or groups == 8 or size == 0:
            break
        k += 1
        if k < stop and peek(data, k) == 0x3A:
            if short:
                return 0
            short = True
            k += 1
    if k < stop and (is_word(peek(data, k)) or peek(data, k) == 0x3A):
        return 0
    if groups < 3 or (groups < 8) != short or (groups == 8 and short):
        return 0
    if k + 1 < stop and peek(data, k) == 0x2E and is_digit(peek(data, k + 1)):
        return 0
    # 2001:db8 and 2001:0db8 are for examples
    example = load64(data, i + (peek(data, i + 5) == 0x30)) >> np.uint64(40) | np.uint64(0x2020)
    is_example = load64(data, i) << np.uint64(24) == _2001 and example == _DB8
    return 0 if is_example else k


@njit
def _phone_digits(data: Any, i: Any, size: Any) -> Any:
    """Whether `size` digits stand at data[i:]."""
    for k in range(size):
        if not is_digit(peek(data, i + k)):
            return False
    return True


@njit
def read_phone(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """Where the telephone number that begins at data[i] ends, or 0."""
    first = peek(data, i)
    if i > start and (is_name(peek(data, i - 1)) or peek(data, i - 1) == 0x2B):
        return 0
    if first == 0x2B:
        if i > start and (peek(data, i - 1) == 0x29 or peek(data, i - 1) == 0x5D):
            return 0
        if peek(data, i + 1) == 0x30:
            return 0
        count = 0
        k = end = i + 1
        gap = 0
        while k < stop and gap <= 2:
            byte = peek(data, k)
            if is_digit(byte):
                count += 1
                gap = 0
                end = k + 1
            elif byte == 0x20 or byte == 0x2D or byte == 0x2E or byte == 0x28 or byte == 0x29:
                gap += 1
            else:
                break
            k += 1
        if not 10 <= count <= 15:
            return 0
    else:
        end = i + 12
        if first == 0x28:  # (212) 555-0123
            k = i + 5 + (peek(data, i + 5) == 0x20)
            end = k + 8
            if end > stop or peek(data, i + 4) != 0x29 or peek(data, i + 1) < 0x32:
                return 0
            if not (_phone_digits(data, k, 3) and _phone_digits(data, k + 4, 4)):
                return 0
            if peek(data, k + 3) != 0x2D:
                return 0
            second = peek(data, k)
        else:
            if end > stop or peek(data, i + 3) != peek(data, i + 7) or first < 0x32:
                return 0
            second = peek(data, i + 4)
        if second < 0x32:
            return 0
    if end < stop and (is_word(peek(data, end)) or peek(data, end) == 0x2D):
        return 0
    return end


@njit
def _is_issued(four: Any, count: Any) -> Any:
    """Whether card numbers of so many digits begin with these four."""
    two = four // 100
    if count == 15:
        return two == 34 or two == 37
    if count == 14:
        return two == 36 or two == 38 or 3000 <= four <= 3059
    master = 51 <= two <= 55 or 2221 <= four <= 2720
    other = four == 6011 or two == 65 or 3528 <= four <= 3589
    return count == 16 and (two // 10 == 4 or master or other)


@njit
def read_card(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """Where the card number that begins at data[i] ends, or 0."""
    if i > start and (is_name(peek(data, i - 1)) or peek(data, i - 1) == 0x2B):
        return 0
    gap = peek(data, i + 4)
    grouped = gap == 0x20 or gap == 0x2D
    count = 0
    total = even = four = np.int64(0)
    k = i
    while k < stop and count < 20:
        byte = peek(data, k)
        if is_digit(byte):
            digit = np.int64(byte) - 0x30
            double = digit * 2 - (9 if digit > 4 else 0)
            # the last digit is not doubled: keep both sums, and change them at each
            total, even = even + digit, total + double
            four = four * 10 + digit if count < 4 else four
            count += 1
        elif not (grouped and byte == gap and k + 1 < stop and is_digit(peek(data, k + 1))):
            break
        k += 1
    if grouped:
        fours = peek(data, i + 9) == gap and peek(data, i + 14) == gap and k - i == 19
        amex = peek(data, i + 11) == gap and k - i == 17
        if not ((fours and count == 16) or (amex and count == 15)):
            return 0
    if k < stop and (is_word(peek(data, k)) or peek(data, k) == 0x2D):
        return 0
    if k + 1 < stop and peek(data, k) == 0x2E and is_digit(peek(data, k + 1)):
        return 0
    return k if total % 10 == 0 and _is_issued(four, count) else 0


@njit
def read_iban(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """Where the account number that begins at data[i] ends, or 0."""
    if not begins_word(data, i, start) or not 0x41 <= peek(data, i + 1) <= 0x5A:
        return 0
    count = 0
    rest = np.int64(0)
    k = end = i
    spaced = peek(data, i + 4) == 0x20
    while k < stop and count < 35:
        byte = peek(data, k)
        if is_digit(byte) or 0x41 <= byte <= 0x5A:
            if count >= 4:
                value = np.int64(byte) - (0x30 if is_digit(byte) else 0x37)
                rest = (rest * (10 if value < 10 else 100) + value) % 97
            count += 1
            end = k + 1
        elif not (spaced and byte == 0x20 and count % 4 == 0 and k == end):
            break
        k += 1
    if not 15 <= count <= 34 or (end < stop and is_word(peek(data, end))):
        return 0
    for k in range(i, i + 4):
        byte = np.int64(peek(data, k))
        value = byte - (0x30 if byte < 0x3A else 0x37)
        rest = (rest * (10 if value < 10 else 100) + value) % 97
    return end if rest == 1 else 0
