"""Find where text may be cut among workers without changing a pretoken.

In:    a file, special tokens, a pattern, how large a chunk may be
Out:   offsets; every byte lies in exactly one chunk, which is counted without its neighbours
Never: reads more of a file than it takes to find the next place to cut
"""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from penstock.arrays import end_to_end
from penstock.errors import BadConfig
from penstock.ingest.open import Ranges, open_ranges
from penstock.kernels import PAD
from penstock.options import whole
from penstock.tokenize.count_layout import Specials
from penstock.tokenize.patterns import Pattern
from penstock.tokenize.scan_layout import GPT2

LEAST_CHUNK_BYTES: Final = 1 << 20


def chunk_boundaries(
    file_path: str | os.PathLike[str], chunk_bytes: int, split_token: str
) -> list[int]:
    """Where a plain file can be cut into chunks of about `chunk_bytes`, each at a split token."""
    cuts = []
    if split_token and SpecialTokens([split_token]).split_token() is not None:
        token = split_token.encode()  # one that can overlap itself is only told from the beginning
        cuts = [_Cut(re.compile(re.escape(token)), len(token))]
    with contextlib.closing(open_ranges(os.fspath(file_path))) as ranges:
        return _boundaries(ranges, at_least("chunk_bytes", chunk_bytes, 1), cuts)


def text_boundaries(
    path: str, size: int, chunk_bytes: int, pattern: Pattern, specials: "SpecialTokens"
) -> list[int]:
    """Where the first `size` bytes of a text can be cut without changing a pretoken."""
    with contextlib.closing(open_ranges(path)) as ranges:
        found = _boundaries(ranges, chunk_bytes, _cuts(pattern, specials))
    return [*(place for place in found if place < size), size]


def optimal_chunk_bytes(file_bytes: int, num_processes: int, max_memory_gb: float) -> int:
    """A file's share for each process, at most half of the memory, at least 1 MB.

    >>> optimal_chunk_bytes(10 << 30, 8, 2.0) == 1 << 30
    True
    """
    most = int(max_memory_gb * (1 << 30) / 2)
    return max(LEAST_CHUNK_BYTES, min(most, file_bytes // num_processes))


class SpecialTokens:
    """Texts that are one token each: never cut, never counted into a pretoken."""

    def __init__(self, texts: Sequence[str]) -> None:
        if isinstance(texts, str):
            raise BadConfig("special_tokens is one text", do='give a list, e.g. ["<|endoftext|>"]')
        self.texts = list(dict.fromkeys(texts))
        if "" in self.texts:
            raise BadConfig("a special token is empty", do="leave it out")
        try:
            encoded = [text.encode() for text in self.texts]
        except UnicodeEncodeError as error:
            raise BadConfig("a special token is not UTF-8", why=str(error)) from None
        # of those that begin at one place the longest is meant, so it is asked for first
        self.order = sorted(range(len(encoded)), key=lambda k: -len(encoded[k]))
        self.sorted = [encoded[k] for k in self.order]

    def for_kernels(self) -> Specials:
        """The same with a count for each, in the order of `sorted`."""
        firsts = {text[0] for text in self.sorted}
        first = np.zeros(258, np.uint8)
        first[list(firsts)] = 1
        only = firsts.pop() if len(firsts) == 1 else 256
        first[256:] = [only & 0xFF, only >> 8]
        text, at = end_to_end(self.sorted, PAD)
        counts = np.zeros(len(self.sorted), np.int64)
        return Specials(first, text, at, counts, found=np.zeros(1, np.int64))

    def split_token(self) -> bytes | None:
        """The first one that always is itself wherever its bytes stand.

        Not one that another could have begun before: of "<<" a cut in "<<<" might hit the middle.
        """
        for text in self.texts:
            token = text.encode()
            if not any(
                token.startswith(other[k:]) or other[k:].startswith(token)
                for other in self.sorted
                for k in range(1, len(other))
            ):
                return token
        return None

    @property
    def has_newline(self) -> bool:
        return any(b"\n" in text or b"\r" in text for text in self.sorted)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A place at which a file may be cut; `overlap` bytes before it have a part in it."""

    pattern: "re.Pattern[bytes]"
    overlap: int


def _cuts(pattern: Pattern, specials: SpecialTokens) -> list[_Cut]:
    r"""Where text may be cut without changing a pretoken, the best kind first.

    At a split token. Or, for the patterns that have a scanner, between a newline and a letter or
    digit of ASCII: no alternative matches across that. Only gpt2 looks from the spaces before it
    at what follows them, so there the newline must be the only one.
    """
    cuts = []
    token = specials.split_token()
    if token is not None:
        cuts.append(_Cut(re.compile(re.escape(token)), len(token)))
    if pattern.is_scanned and not specials.has_newline:
        before = rb"[!-~]\n" if pattern.family == GPT2 else rb"[\r\n]"
        cuts.append(_Cut(re.compile(rb"(?<=" + before + rb")(?=[0-9A-Za-z])"), 3))
    return cuts


def _boundaries(ranges: Ranges, chunk_bytes: int, cuts: Sequence[_Cut]) -> list[int]:
    """0, the places to cut at, and the end; about `chunk_bytes` apart, never nearer."""
    found = [0]
    for number, cut in enumerate(cuts):
        if number and len(found) > 1:
            break  # the better kind of place is there, if not everywhere
        guess = found[-1] + chunk_bytes
        while guess < ranges.size:
            place = _find_cut(ranges, guess, cut)
            if place >= ranges.size:
                break
            found.append(place)
            guess = place + chunk_bytes
    return [*found, ranges.size]


def _find_cut(ranges: Ranges, guess: int, cut: _Cut) -> int:
    """The first place from `guess` on, or the end."""
    at = max(0, guess - cut.overlap)
    buffer = bytearray((1 << 20) + 2 * cut.overlap)
    while at < ranges.size:
        got = ranges.read_into(at, memoryview(buffer))
        for found in cut.pattern.finditer(buffer, max(0, guess - at), got):
            return at + found.start()
        at += 1 << 20
        guess = max(guess, at)
    return ranges.size


def at_least(name: str, value: int, least: int) -> int:
    if whole(name, value) < least:
        raise BadConfig(f"{name} is {value}", do=f"give at least {least}")
    return value
