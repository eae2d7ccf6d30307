"""Bytes to text: decode a document by a stated rule.

In:    the raw bytes of one document
Out:   UTF-8, and the number in DECODINGS of how it came about
Keeps: every raw byte has its place in the text: `raw_offsets` maps chunks back, and they tile
Never: drops, replaces or guesses a byte

The rule: a byte order mark decides (UTF-8, UTF-16, UTF-32), and stays in the text as U+FEFF; what
is valid UTF-8 is UTF-8; what else holds a NUL is binary and refused; what remains is Latin-1, each
byte one character, or refused if the config says "reject".
"""

from typing import Final

import numpy as np

from penstock.arrays import Int64s
from penstock.records import DECODINGS

UTF_8, UTF_8_SIG, UTF_16, UTF_32, LATIN_1 = map(
    DECODINGS.index, ("utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1")
)

RULES: Final = ("latin-1", "reject")

_MARKS: Final = (
    (b"\xef\xbb\xbf", UTF_8_SIG, "utf-8"),
    (b"\xff\xfe\0\0", UTF_32, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (b"\0\0\xfe\xff", UTF_32, "utf-32-be"),
    (b"\xff\xfe", UTF_16, "utf-16-le"),
    (b"\xfe\xff", UTF_16, "utf-16-be"),
)


class NotText(Exception):
    """These bytes are no document. Not an error: it is counted as a refusal."""

    def __init__(self, reason: str, at: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.at = at
        """The byte at which the fault was found."""


def decode_document(raw: bytes | memoryview, rule: str = "latin-1") -> tuple[bytes, int]:
    r"""One document as UTF-8, and how its bytes became that.

    >>> decode_document("größer".encode("latin-1"))
    (b'gr\xc3\xb6\xc3\x9fer', 4)
    >>> decode_document("größer".encode("utf-16"))[0].decode()
    '\ufeffgrößer'
    """
    raw = bytes(raw)  # no copy of what is bytes already
    if not raw:
        raise NotText("empty_text")
    decoding = UTF_8
    text = raw
    if not raw.isascii():
        for mark, number, codec in _MARKS:
            if raw.startswith(mark):
                try:
                    text, decoding = raw.decode(codec).encode(), number
                    break
                except UnicodeDecodeError:
                    continue
        else:
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                if (nul := raw.find(0)) >= 0:
                    raise NotText("binary", nul) from None
                if rule == "reject":
                    raise NotText("invalid_utf8", error.start) from None
                text, decoding = raw.decode("latin-1").encode(), LATIN_1
    if (nul := text.find(0)) >= 0:
        raise NotText("binary", nul)
    return text, decoding


def raw_offsets(text: bytes | memoryview, decoding: int, positions: Int64s) -> Int64s:
    r"""Where positions in the text stand in the bytes that it was decoded from.

    Positions are byte offsets in the UTF-8 text, each at the beginning of a character or the end.

    >>> raw_offsets("größer".encode(), LATIN_1, np.array([0, 2, 4, 6, 8])).tolist()
    [0, 2, 3, 4, 6]
    """
    if decoding in (UTF_8, UTF_8_SIG):
        return positions.astype(np.int64)
    data = np.frombuffer(text, np.uint8)
    width = {UTF_16: 2, UTF_32: 4, LATIN_1: 1}[decoding]
    places, where = np.unique(np.append(positions, 0), return_inverse=True)
    before = np.zeros(len(places), np.int64)
    begin = 0
    for k in range(1, len(places)):
        piece = data[begin : places[k]]
        units = np.count_nonzero((piece & 0xC0) != 0x80)
        if decoding == UTF_16:
            units += np.count_nonzero(piece >= 0xF0)  # a surrogate pair
        before[k] = before[k - 1] + width * int(units)
        begin = int(places[k])
    return before[where[:-1]]
