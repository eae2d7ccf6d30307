"""Find secrets and personal data in documents, and overwrite them.

In:    `Documents`
Out:   `Found`: the exact bytes of each, and what it is
Keeps: a document's length, its lines, its UTF-8 and every other byte, when it is redacted
Never: asks a service whether a key is live; looks into names or postal addresses

Each kind is a shape that a key of its maker has (TOKENS, ADDRESSES), a shape behind a name
(ASSIGNED), or a number with a check digit; where there is no such thing (passwords, telephone
numbers) the pattern is narrow, and misses rather than mangles:

password      a value behind a name with one of PASSWORD_NAMES and none of NOT_NAMES, with letters,
              digits and MIN_BITS of entropy a byte; in quotes, behind NAME= or, of capitals, small
              letters and digits, behind password=, of 8 bytes and more, else of 16 and more, with
              two digits and many changes between kinds of characters
url_password  scheme://user:password@host, 6 bytes and more with letters and others
private_key   from -----BEGIN … PRIVATE KEY----- to -----END …-----, with a line of base64 between
ipv4, ipv6    public addresses only; 3.6.23.1, with fewer than 7 digits, is a version
phone         +49 30 1234567, 212-555-0123, (212) 555-0123
card          13 to 19 digits of a known issuer with the right check digit
iban          right length, right check digits

What stands for a secret is none: MADE_UP words, counting (0123…), few different characters.
"""

from dataclasses import dataclass, field

import numpy as np

from penstock.arrays import Bytes, Floats, Int64s
from penstock.kernels import Kernel
from penstock.prepare.secrets_layout import KINDS as KINDS
from penstock.prepare.secrets_layout import MAX_VALUE, NAME_BYTES, Scratch, Spans
from penstock.prepare.secrets_layout import PII as PII
from penstock.prepare.secrets_layout import SECRETS as SECRETS
from penstock.records import Documents

_find = Kernel(
    "penstock.prepare.secrets_kernel",
    "find_secrets",
    "int64(uint8[::1], int64[::1], int64, Scratch, Spans)",
    *(Scratch, Spans),
)
_blank = Kernel(
    "penstock.prepare.secrets_kernel",
    "blank_spans",
    "void(uint8[::1], int64[::1], int64[::1])",
)


def _none() -> Int64s:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Found:
    """Spans data[start:end] of the buffer of `Documents`, ascending and apart."""

    start: Int64s = field(default_factory=_none)
    end: Int64s = field(default_factory=_none)
    kind: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))
    """Numbers in KINDS."""

    def __len__(self) -> int:
        return len(self.start)

    def counts(self) -> dict[str, int]:
        """How many there are of each kind that there is."""
        totals = np.bincount(self.kind, minlength=len(KINDS))
        return {name: int(n) for name, n in zip(KINDS, totals, strict=True) if n}

    def per_document(self, documents: Documents, kinds: tuple[str, ...] = KINDS) -> Floats:
        """How many of these kinds each document has."""
        wanted = np.isin(self.kind, [KINDS.index(name) for name in kinds])
        rows = np.searchsorted(documents.at, self.start[wanted], side="right") - 1
        return np.bincount(rows, minlength=len(documents)).astype(np.float64)


def find(documents: Documents, *, secrets: bool = True, pii: bool = True) -> Found:
    """All secrets and personal data in the documents."""
    sizes = np.arange(MAX_VALUE + 1.0)
    scratch = Scratch(
        logs=sizes * np.log2(np.maximum(sizes, 1)),
        counts=np.zeros(256, np.int64),
        name=np.zeros(NAME_BYTES + 16, np.uint8),
    )
    room = 1024 + int(documents.at[-1] - documents.at[0]) // 512  # text has one in 30 KB
    while True:
        spans = Spans(np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, np.uint8))
        count = _find(documents.data, documents.at, secrets + 2 * pii, scratch, spans)
        if count <= room:
            return Found(spans.start[:count], spans.end[:count], spans.kind[:count])
        room = count


def redact(documents: Documents, found: Found) -> None:
    """Overwrite what was found with asterisks, byte for byte; line ends stay."""
    _blank(documents.data, found.start, found.end)
