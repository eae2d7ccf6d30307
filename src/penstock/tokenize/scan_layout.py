"""What patterns, scanners and their kernels share: classes of code points, families, a cutter."""

from typing import Final, NamedTuple

from penstock.arrays import Bytes

OTHER, MARK, UPPER, LOWER, CASELESS, NUMBER, SPACE, BLANK, NEWLINE = range(9)
"""Classes of code points; `patterns` says who has which."""

REGEX, GPT2, CL100K, O200K = range(4)
"""The families of scanners; REGEX has none of its own."""

LOOKAHEAD: Final = 16
"""No pretoken depends on more bytes than this behind the run of characters that decided it."""


class Cutter(NamedTuple):
    """How text is cut into pretokens."""

    classes: Bytes
    """Of every code point."""
    family: int
    digits: int
    """The longest run of digits that stays together; 0 where there is no limit."""
