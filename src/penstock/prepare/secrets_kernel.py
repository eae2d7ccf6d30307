"""The kernels that find secrets and personal data, and overwrite them.

In:    all documents in one buffer, PAD bytes behind them
Out:   spans and kinds, as `secrets.KINDS` numbers them
Keeps: spans ascending, apart, within one document
Never: allocates: what does not fit is counted, and the caller comes again

Masks point at the few bytes at which one can begin (or, for mail, at its @); what stands there is
then read byte by byte. Each reader returns where the span ends, or 0.
"""

from typing import Any

import numpy as np

from penstock.prepare.filters_kernel import (
    begins,
    byte_class,
    digits,
    is_alphanumeric,
    matches,
    valid_lanes,
)
from penstock.prepare.pii_kernel import (
    begins_word,
    is_digit,
    is_name,
    is_word,
    read_card,
    read_email,
    read_iban,
    read_ipv4,
    read_ipv6,
    read_phone,
    word,
)
from penstock.prepare.secrets import KINDS, MIN_BITS
from penstock.simd import first_bit, load64, next_index, njit, peek

(
    _AWS, _GITHUB, _GITLAB, _SLACK, _GOOGLE, _STRIPE, _OPENAI, _HUGGINGFACE, _NPM, _JWT,
    _PRIVATE_KEY, _PASSWORD, _EMAIL, _IPV4, _IPV6, _PHONE, _CARD, _IBAN,
) = range(len(KINDS))  # fmt: skip

_IN, _PRIVATE, _KEY, _BLOCK = word(b"IN "), word(b"PRIVATE "), word(b"KEY"), word(b" BLOCK")
_DASHES, _BEGIN, _END = word(b"-----"), word(b"-----BEG"), word(b"-----END")
_GITHUB_P, _AT_, _GLPAT = word(b"github_p"), word(b"at_"), word(b"glpat-")
_LIVE, _TEST = word(b"live_"), word(b"test_")
_ONE = np.uint64(1)
_NONE = np.uint64(0)
_HALF = np.uint64(32)

_token_begins = begins(
    b"AKI", b"ASI", b"ABI", b"ACC", b"AIz", b"ghp", b"gho", b"ghu", b"ghs", b"ghr", b"git", b"glp",
    b"xox", b"sk_", b"rk_", b"sk-", b"hf_", b"npm", b"eyJ", b"-BE",
)  # fmt: skip
_quotes = byte_class(b'"', b"'")
_before_value = byte_class(b"=", b":", b" ")
_at_signs = byte_class(b"@")
_dots = byte_class(b".")
_dashes = byte_class(b"-")
_colons = byte_class(b":")
_plus = byte_class(b"+")
_open = byte_class(b"(")
_upper = byte_class(b"AZ")
_two_three = byte_class(b"23")


@njit
def _run(data: Any, i: Any, stop: Any, underscore: Any, dash: Any) -> Any:
    """Where the letters and digits from data[i] on end; perhaps with _ and - among them."""
    while i < stop:
        byte = peek(data, i)
        if not (is_alphanumeric(byte) or (underscore and byte == 0x5F) or (dash and byte == 0x2D)):
            break
        i += 1
    return i


@njit
def _starts(data: Any, i: Any, stop: Any, word: Any, size: Any) -> Any:
    """Whether the `size` bytes of the little-endian word stand at data[i:stop]."""
    unused = np.uint64(64 - 8 * size)
    return i + size <= stop and load64(data, i) << unused >> unused == word


# Secrets


@njit
def _aws_key(data: Any, i: Any, stop: Any) -> Any:
    end = i + 20
    if end > stop or (end < stop and is_word(peek(data, end))):
        return 0
    for k in range(i + 4, end):
        byte = peek(data, k)
        if not (is_digit(byte) or 0x41 <= byte <= 0x5A):
            return 0
    return end


@njit
def _plain_token(data: Any, i: Any, stop: Any, least: Any) -> Any:
    """`least` letters and digits or more at data[i:], and no underscore behind them."""
    end = _run(data, i, stop, False, False)
    if end - i < least or (end < stop and peek(data, end) == 0x5F):
        return 0
    return end


@njit
def _loose_token(data: Any, i: Any, stop: Any, least: Any) -> Any:
    """`least` letters, digits, _ and - or more at data[i:]."""
    end = _run(data, i, stop, True, True)
    return end if end - i >= least else 0


@njit
def _openai_key(data: Any, i: Any, stop: Any) -> Any:
    end = _loose_token(data, i, stop, 20)
    upper = digit = False
    for k in range(i, end):
        byte = peek(data, k)
        upper |= 0x41 <= byte <= 0x5A
        digit |= is_digit(byte)
    return end if upper and digit else 0


@njit
def _jwt(data: Any, i: Any, stop: Any) -> Any:
    end = i
    for part in range(3):
        end = _loose_token(data, i, stop, 10)
        if end == 0:
            return 0
        if part < 2 and (end >= stop or peek(data, end) != 0x2E):
            return 0
        i = end + 1
    return end


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
def _token(data: Any, i: Any, start: Any, stop: Any) -> Any:
    """The token that begins at data[i], which has the first bytes of one: its end and kind."""
    first = peek(data, i)
    if first == 0x2D:  # -BEG, with four more before it
        begins_block = i - 4 >= start and _starts(data, i - 4, stop, _BEGIN, 8)
        return (_private_key(data, i - 4, stop) if begins_block else 0), _PRIVATE_KEY
    # nor a dash before it: what is one run would be read again from each sk- in it
    if not begins_word(data, i, start) or (i > start and peek(data, i - 1) == 0x2D):
        return 0, 0
    if first == 0x41:
        if peek(data, i + 2) != 0x7A:
            return (_aws_key(data, i, stop) if peek(data, i + 3) == 0x41 else 0), _AWS
        if peek(data, i + 3) != 0x61:
            return 0, 0
        end = _loose_token(data, i + 4, stop, 35)
        return (end if end == i + 39 else 0), _GOOGLE
    if first == 0x67:  # g
        if _starts(data, i, stop, _GITHUB_P, 8):
            is_token = _starts(data, i + 8, stop, _AT_, 3)
            end = _run(data, i + 11, stop, True, False)
            return (end if is_token and end - i >= 61 else 0), _GITHUB
        if _starts(data, i, stop, _GLPAT, 6):
            return _loose_token(data, i + 6, stop, 20), _GITLAB
        if peek(data, i + 1) == 0x68 and peek(data, i + 3) == 0x5F:
            return _plain_token(data, i + 4, stop, 36), _GITHUB
        return 0, 0
    if first == 0x78:  # xox and a letter
        kind = peek(data, i + 3)
        is_letter = kind == 0x61 or kind == 0x62 or kind == 0x65 or kind == 0x6F
        is_letter = is_letter or kind == 0x70 or kind == 0x72 or kind == 0x73
        if is_letter and peek(data, i + 4) == 0x2D:
            end = _run(data, i + 5, stop, False, True)
            return (end if end - i >= 15 else 0), _SLACK
        return 0, 0
    if peek(data, i + 2) == 0x2D:  # sk-
        return _openai_key(data, i + 3, stop), _OPENAI
    if first == 0x73 or first == 0x72:  # sk_live_ rk_test_
        if _starts(data, i + 3, stop, _LIVE, 5) or _starts(data, i + 3, stop, _TEST, 5):
            return _plain_token(data, i + 8, stop, 16), _STRIPE
        return 0, 0
    if first == 0x68:
        return _plain_token(data, i + 3, stop, 34), _HUGGINGFACE
    if first == 0x6E:
        if peek(data, i + 3) != 0x5F:
            return 0, 0
        return _plain_token(data, i + 4, stop, 36), _NPM
    return _jwt(data, i, stop), _JWT


@njit
def _names_password(data: Any, start: Any, i: Any, names: Any, name_at: Any) -> Any:
    """Whether data[i] is = or : behind the name of a password."""
    if peek(data, i) == 0x3D and i > start and peek(data, i - 1) == 0x3A:
        i -= 1  # :=
    i -= 1
    while i > start and peek(data, i) == 0x20:
        i -= 1
    if i > start and (peek(data, i) == 0x22 or peek(data, i) == 0x27):
        i -= 1
    end = i + 1
    while i >= start and end - i <= 48 and is_name(peek(data, i)):
        i -= 1
    for k in range(i + 1, end):
        for name in range(len(name_at) - 1):
            if matches(data, k, end, names, peek(name_at, name), peek(name_at, name + 1)):
                return True
    return False


@njit
def _password(
    data: Any, i: Any, start: Any, stop: Any, names: Any, name_at: Any, logs: Any, counts: Any
) -> Any:
    """The value whose quote stands at data[i]: where it ends, or 0."""
    k = i - 1
    while k > start and peek(data, k) == 0x20:
        k -= 1
    if k <= start or not (peek(data, k) == 0x3D or peek(data, k) == 0x3A):
        return 0
    quote = peek(data, i)
    end = i + 1
    letter = digit = False
    while end < stop and peek(data, end) != quote:
        byte = peek(data, end)
        template = byte == 0x3C or byte == 0x3E or byte == 0x24 or byte == 0x25 or byte == 0x5C
        template = template or byte == 0x7B or byte == 0x7D or byte == 0x28 or byte == 0x29
        if byte <= 0x20 or byte >= 0x7F or template or end - i > 256:
            return 0
        digit |= is_digit(byte)
        letter |= is_alphanumeric(byte) and not is_digit(byte)
        end += 1
    size = end - i - 1
    if size < 8 or end == stop or not (letter and digit):
        return 0
    if not _names_password(data, start, k, names, name_at):
        return 0
    counts[:] = 0
    for at in range(i + 1, end):
        counts[peek(data, at)] += 1
    repeated = 0.0
    for byte in range(0x21, 0x7F):
        repeated += logs[counts[byte]]
    # bits a byte are log2(size) - repeated / size
    return end if logs[size] - repeated >= MIN_BITS * size else 0


# All of them


@njit
def find_secrets(
    data: Any, at: Any, wanted: Any, names: Any, name_at: Any, logs: Any, counts: Any,
    starts: Any, ends: Any, kinds: Any,
) -> Any:  # fmt: skip
    """All spans, as far as there is room; how many there are. `wanted` is 1 for secrets, 2 for PII.

    `logs[n]` is n * log2(n); `counts` is scratch.
    """
    found = 0
    none = _NONE
    for row in range(len(at) - 1):
        start, stop = at[row], at[row + 1]
        done = start
        before = none  # whether the last byte of the block before can stand before a value
        i = start
        digit, dot, dash, colon = (
            digits(data, i),
            _dots(data, i),
            _dashes(data, i),
            _colons(data, i),
        )
        while i < stop:
            valid = valid_lanes(i, stop)
            token = quote = mail = ip4 = ip6 = phone = card = iban = none
            if wanted & 1:
                token = _token_begins(data, i)
                gap = _before_value(data, i)
                quote = _quotes(data, i) & (gap << _ONE | before)
                before = gap >> np.uint64(31)
            if wanted & 2:
                mail = _at_signs(data, i)
                # 64 lanes where a number is long; the upper half is the next block's lower one
                more_digits, more_dots = digits(data, i + 32), _dots(data, i + 32)
                more_dashes, more_colons = _dashes(data, i + 32), _colons(data, i + 32)
                digit = digit | more_digits << _HALF
                dot = dot | more_dots << _HALF
                dash = dash | more_dashes << _HALF
                colon = colon | more_colons << _HALF
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
            here = (token | quote | mail | ip4 | ip6 | phone | card | iban) & valid
            while here != none:
                bit = here & (~here + _ONE)
                here ^= bit
                p = i + first_bit(bit)
                a = p
                end = kind = 0
                if token & bit:
                    end, kind = _token(data, p, start, stop)
                    a = p - 4 if kind == _PRIVATE_KEY else p
                if end == 0 and quote & bit:
                    end = _password(data, p, start, stop, names, name_at, logs, counts)
                    a, kind = p + 1, _PASSWORD
                if end == 0 and mail & bit:
                    a, end = read_email(data, p, start, stop)
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
                    if found < len(starts):
                        starts[found] = a
                        ends[found] = end
                        kinds[found] = np.uint8(kind)
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
