r"""The patterns that cut text into pretokens, and the Unicode classes they speak of.

In:    a pattern's name (gpt2, cl100k, o200k, …) or a regular expression
Out:   which scanner reads it, and a table with the class of every code point
Keeps: the answers of the `regex` module: the table is asked from it, so it has its Unicode version
Never: guesses: a pattern that is not known to the byte goes through `regex` itself

    class      members                            used by
    OTHER      all that has no class below        ` ?[^\s\p{L}\p{N}]+`
    MARK       \p{M}                              a letter for o200k, OTHER for the rest
    UPPER      \p{Lu} \p{Lt}
    LOWER      \p{Ll}
    CASELESS   \p{Lm} \p{Lo}                      upper and lower at once for o200k
    NUMBER     \p{N}
    SPACE      \s but for the two below
    BLANK      U+0020
    NEWLINE    \r \n
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from penstock.arrays import Bytes
from penstock.errors import BadConfig
from penstock.kernels import PAD, Kernel
from penstock.options import suggest
from penstock.tokenize.scan_layout import (
    BLANK,
    CASELESS,
    CL100K,
    GPT2,
    LOWER,
    MARK,
    NEWLINE,
    NUMBER,
    O200K,
    OTHER,
    REGEX,
    SPACE,
    UPPER,
    Cutter,
)

if TYPE_CHECKING:
    import regex

_cut_all = Kernel(
    "penstock.tokenize.scan_kernel",
    "cut_all",
    "int64(uint8[::1], int64, int64, Cutter, int64[::1])",
    Cutter,
)

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way to cut text, as a regular expression and, where there is one, as a scanner."""

    name: str
    regex: str
    family: int = REGEX
    digits: int = 0
    """The longest run of digits that stays together; 0 where there is no limit."""

    @property
    def is_scanned(self) -> bool:
        """Whether a kernel reads it, 12 to 26 times as fast as the `regex` module."""
        return self.family != REGEX

    def cutter(self) -> Cutter:
        """The scanner, for kernels."""
        return Cutter(code_point_classes(), self.family, self.digits)


PATTERNS: Final = {
    pattern.name: pattern
    for pattern in (
        Pattern(
            "gpt2",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            GPT2,
        ),
        Pattern("cl100k", _CL100K.format(digits="{1,3}"), CL100K, 3),
        Pattern(
            "o200k",
            "|".join(
                (
                    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
                    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
                    r"\p{N}{1,3}",
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
                    r"\s*[\r\n]+",
                    r"\s+(?!\S)",
                    r"\s+",
                )
            ),
            O200K,
            3,
        ),
        Pattern("qwen2", _CL100K.format(digits=""), CL100K, 1),
        Pattern("nanochat", _CL100K.format(digits="{1,2}"), CL100K, 2),
    )
}

# The same languages as other libraries write them: possessive, or with the `'` pulled out.
_SPELLINGS: Final = {
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt2",
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s": "gpt2",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+": "cl100k",
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+": "nanochat",
}


def find_pattern(text: str) -> Pattern:
    """The pattern of that name, or that regular expression.

    >>> find_pattern("cl100k").digits, find_pattern(r"\\w+").is_scanned
    (3, False)
    """
    if text in PATTERNS:
        return PATTERNS[text]
    if text in _SPELLINGS:
        return PATTERNS[_SPELLINGS[text]]
    for pattern in PATTERNS.values():
        if pattern.regex == text:
            return pattern
    if text.isidentifier():
        do = f"{suggest(text, PATTERNS)}, or give a regex"
        raise BadConfig(f"there is no pattern {text!r}", do=do)
    pattern = Pattern("regex", text)
    compile_regex(pattern)
    return pattern


def compile_regex(pattern: Pattern) -> "regex.Pattern[str]":
    """The pattern for the `regex` module."""
    import regex

    try:
        return regex.compile(pattern.regex)
    except (regex.error, RecursionError) as error:
        raise BadConfig(
            "the pattern does not compile",
            where=pattern.regex,
            why=str(error),
            do=f"fix it, or choose from {', '.join(PATTERNS)}",
        ) from error


@functools.cache
def code_point_classes() -> Bytes:
    """The class of every code point, as the installed `regex` module sees it; 75 ms, once."""
    import regex

    numbers = np.arange(0x110000, dtype=np.uint32)
    numbers[0xD800:0xE000] = 0x21  # surrogates are no text; "!" stands in for them
    every = numbers.tobytes().decode("utf-32-le")
    classes = np.full(0x110000, OTHER, np.uint8)
    for value, members in (
        (MARK, r"\p{M}+"),
        (UPPER, r"[\p{Lu}\p{Lt}]+"),
        (LOWER, r"\p{Ll}+"),
        (CASELESS, r"[\p{Lm}\p{Lo}]+"),
        (NUMBER, r"\p{N}+"),
        (SPACE, r"\s+"),
    ):
        for found in regex.finditer(members, every):
            classes[found.start() : found.end()] = value
    classes[0x20] = BLANK
    classes[[0x0A, 0x0D]] = NEWLINE
    classes.flags.writeable = False
    return classes


def cut_pretokens(pattern: Pattern, text: bytes) -> list[int]:
    """The end of every pretoken of one valid UTF-8 text, by the pattern's scanner.

    >>> cut_pretokens(find_pattern("cl100k"), b"Hello  world 1234")
    [5, 6, 12, 13, 16, 17]
    """
    data = np.frombuffer(text + bytes(PAD), np.uint8)
    ends = np.empty(len(text), np.int64)
    count = _cut_all(data, 0, len(text), pattern.cutter(), ends)
    found: list[int] = ends[:count].tolist()
    return found


def unicode_differences(pattern: Pattern) -> list[int]:
    """Code points that the tokenizers library cuts differently, its Unicode being another version.

    Each is tried between letters, digits, and a space and a sign. Half a minute: for people.
    """
    import regex
    from tokenizers import Regex, pre_tokenizers

    theirs = pre_tokenizers.Split(Regex(pattern.regex), "isolated")
    ours = regex.compile(pattern.regex)

    def differs(text: str) -> bool:
        spans = [found.span() for found in ours.finditer(text)]
        return spans != [span for _, span in theirs.pre_tokenize_str(text)]

    found = []
    for first in range(0, 0x110000, 0x1000):
        block = [chr(n) for n in range(first, first + 0x1000) if not 0xD800 <= n < 0xE000]
        for frame in ("x{}X", "1{}1", " {}!"):
            if differs("\n".join(frame.format(letter) for letter in block)):
                found += [ord(letter) for letter in block if differs(frame.format(letter))]
    return sorted(set(found))
