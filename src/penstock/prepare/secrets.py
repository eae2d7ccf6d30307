"""Find secrets and personal data in documents, and overwrite them.

In:    `Documents`
Out:   `Found`: the exact bytes of each, and what it is
Keeps: a document's length, its lines, its UTF-8 and every other byte, when it is redacted
Never: asks a service whether a key is live; looks into names or postal addresses

Each kind is a pattern that a key of its maker has, or a number with a check digit; where there is
no such thing (passwords, telephone numbers) the pattern is narrow, and misses rather than mangles:

password     a name with one of PASSWORD_NAMES, = or :, and a quoted value of 8 bytes and more with
             letters, digits, MIN_BITS of entropy a byte, and nothing that a template has
private_key  from -----BEGIN … PRIVATE KEY----- to -----END …-----, with a line of base64 between
ipv4, ipv6   public addresses only; 3.6.23.1, with fewer than 7 digits, is a version
phone        +49 30 1234567, 212-555-0123, (212) 555-0123
card         13 to 19 digits of a known issuer with the right check digit
iban         right length, right check digits
"""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from penstock.kernels import Kernel
from penstock.records import Bytes, Documents, Int64s

SECRETS: Final = (
    "aws_key", "github_token", "gitlab_token", "slack_token", "google_key", "stripe_key",
    "openai_key", "huggingface_token", "npm_token", "jwt", "private_key", "password",
)  # fmt: skip
PII: Final = ("email", "ipv4", "ipv6", "phone", "card", "iban")
KINDS: Final = (*SECRETS, *PII)
"""What can be found; `Found.kind` has their numbers."""

PASSWORD_NAMES: Final = (
    "password", "passwd", "passphrase", "pwd", "secret", "token", "apikey", "api_key", "api-key",
    "access_key", "accesskey", "private_key", "auth_key", "authkey", "credential",
)  # fmt: skip
MIN_BITS: Final = 3.0

_find = Kernel(
    "penstock.prepare.secrets_kernel",
    "find_secrets",
    "int64(uint8[::1], int64[::1], int64, uint8[::1], int64[::1], float64[::1], int64[::1],"
    " int64[::1], int64[::1], uint8[::1])",
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

    def per_document(
        self, documents: Documents, kinds: tuple[str, ...] = KINDS
    ) -> npt.NDArray[np.float64]:
        """How many of these kinds each document has."""
        wanted = np.isin(self.kind, [KINDS.index(name) for name in kinds])
        rows = np.searchsorted(documents.at, self.start[wanted], side="right") - 1
        return np.bincount(rows, minlength=len(documents)).astype(np.float64)


def find(documents: Documents, *, secrets: bool = True, pii: bool = True) -> Found:
    """All secrets and personal data in the documents."""
    names = [name.encode() for name in PASSWORD_NAMES]
    name_at = np.cumsum([0, *map(len, names)], dtype=np.int64)
    sizes = np.arange(257.0)
    logs = sizes * np.log2(np.maximum(sizes, 1))
    room = 1024 + int(documents.at[-1] - documents.at[0]) // 512  # text has one in 30 KB
    while True:
        start, end, kind = np.empty(room, np.int64), np.empty(room, np.int64), np.empty(room, "u1")
        count = _find(
            documents.data,
            documents.at,
            secrets + 2 * pii,
            np.frombuffer(b"".join(names), np.uint8),
            name_at,
            logs,
            np.zeros(256, np.int64),
            start,
            end,
            kind,
        )
        if count <= room:
            return Found(start[:count], end[:count], kind[:count])
        room = count


def redact(documents: Documents, found: Found) -> None:
    """Overwrite what was found with asterisks, byte for byte; line ends stay."""
    _blank(documents.data, found.start, found.end)
