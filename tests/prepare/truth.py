"""Where libclang sees functions, and how the chunker does by that.

In:    C and C++ files, a tokenizer, a budget
Out:   byte ranges of function definitions, and how many were left out, by reason; how many of them
       were cut without need, how many chunks are too large, how full they are
Keeps: includes are not resolved, so that a file is judged by its own text

Macros of files that are not read are unknown words to clang, and two in a row before a function
make it lose the function or its beginning. So words in capitals that are used like specifiers
(`BOOST_CONSTEXPR EIGEN_INLINE int f()`), and in no other way, are defined as nothing.

Left out, and counted:

- `macro`: the first or the last brace of the body is not spelled in the file but comes out of a
  macro, so that no reader without a preprocessor can see it
- `broken`: clang gave up in the middle of it, or took two things for one, as it does after errors
  about types that it cannot know: the definition has no place, or does not end with a brace, or has
  a whole class before its name, or holds more closing braces than opening ones without an #else
"""

import ctypes
import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from clang.cindex import (  # type: ignore[import-untyped]
    Cursor,
    CursorKind,
    Index,
    SourceLocation,
    TranslationUnit,
    callbacks,
    conf,
)

from penstock.arrays import Int64s
from penstock.kernels import PAD
from penstock.prepare.chunk import ChunkConfig, Chunker
from penstock.records import LANGUAGES, Documents
from penstock.tokenize.engines import Ids
from penstock.tokenize.tokenizer import Tokenizer

BATCH_BYTES = 8 << 20
NAME = "file.cpp"
# comments and literals; numbers too, for the separators in them
NOT_CODE = re.compile(
    rb"//(?:\\\r?\n|[^\n])*|/\*.*?\*/"
    rb'|R"([^\s()\\]{0,16})\(.*?\)\1"'
    rb'|"(?:\\.|[^"\\\n])*"'
    rb"|\b[0-9][0-9A-Za-z_']*|'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)
ELSE = re.compile(rb"^[ \t]*#[ \t]*el", re.MULTILINE)
WORD_BEFORE = re.compile(rb"[A-Za-z_]\w*\Z")
ANY_DIRECTIVE = re.compile(rb"^[ \t]*#(?:\\\r?\n|[^\n])*", re.MULTILINE)
EMPTY = (b"BOOST_PREVENT_MACRO_SUBSTITUTION",)
"""Macros that are nothing by definition, and stand where a specifier cannot."""
CAPITALS = re.compile(rb"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")
SPECIFIER = re.compile(rb"\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\s+(?=[A-Za-z_~#\[])")
NOT_SPECIFIER = re.compile(rb"\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\s*[^\sA-Za-z0-9_~\[;{}#]")
CLASS = re.compile(rb"(?:typedef\s+)?(?:class|struct|union|enum)\b")
DIRECTIVE = re.compile(
    rb"^[ \t]*#[ \t]*(?:define|undef|if|elif|ifdef|ifndef)\b(?:\\\r?\n|[^\n])*", re.MULTILINE
)
OPTIONS = TranslationUnit.PARSE_INCOMPLETE | 0x200  # the latter: go on after fatal errors
ARGUMENTS = ["-x", "c++", "-std=c++20", "-fsyntax-only", "-nostdinc", "-nostdinc++", "-w",
             "-ferror-limit=0"]  # fmt: skip
FUNCTIONS = {
    kind.value: kind.name
    for kind in (
        CursorKind.FUNCTION_DECL,
        CursorKind.CXX_METHOD,
        CursorKind.CONSTRUCTOR,
        CursorKind.DESTRUCTOR,
        CursorKind.CONVERSION_FUNCTION,
        CursorKind.FUNCTION_TEMPLATE,
    )
}
BODIES = (CursorKind.COMPOUND_STMT.value, CursorKind.CXX_TRY_STMT.value)
RECURSE = 2


@dataclass(slots=True)
class Truth:
    """What clang found in one file."""

    functions: list[tuple[int, int]] = field(default_factory=list)
    """Where each begins and ends, in bytes."""
    macro: int = 0
    broken: int = 0


def unseen_specifiers(text: bytes) -> list[bytes]:
    """Words in capitals that can only be macros for specifiers, and come from elsewhere.

    >>> unseen_specifiers(b"A_B C_D int f();\\nE_F(1) int x = G_H;")
    [b'A_B', b'C_D']
    """
    found = {match[1] for match in SPECIFIER.finditer(text)}
    for match in DIRECTIVE.finditer(text):
        found.difference_update(CAPITALS.findall(match[0]))
    for match in NOT_SPECIFIER.finditer(text):
        found.discard(match[1])
    return sorted(found | {word for word in EMPTY if word in text})


def find_functions(data: bytes) -> Truth:
    """Function definitions of one file, those of local classes included."""
    code = NOT_CODE.sub(lambda match: b" " * len(match[0]), data)
    plain = ANY_DIRECTIVE.sub(_blank_directive, code)
    words = unseen_specifiers(code)
    arguments = ARGUMENTS + [f"-D{word.decode()}=" for word in words]
    unit = TranslationUnit.from_source(NAME, arguments, [(NAME, data)], OPTIONS, index=_index())
    truth = Truth()
    taken: set[tuple[int, int]] = set()

    def visit(cursor: Cursor, parent: Cursor, _: object) -> int:
        # before anything else is asked of it: a callback is made for every expression
        if cursor._kind_id in BODIES and parent._kind_id in FUNCTIONS:
            _take(data, code, plain, parent, cursor, truth, taken)
        return RECURSE

    conf.lib.clang_visitChildren(unit.cursor, callbacks["cursor_visit"](visit), None)
    truth.functions.sort()
    return truth


def _blank_directive(match: re.Match[bytes]) -> bytes:
    """What stands before an #else does not go on after it: there a semicolon takes its place."""
    return (b";" if ELSE.match(match[0]) else b"#") + b" " * (len(match[0]) - 1)


def _take(
    data: bytes,
    code: bytes,
    plain: bytes,
    function: Cursor,
    body: Cursor,
    truth: Truth,
    taken: set[tuple[int, int]],
) -> None:
    start, end = function.extent.start.offset, body.extent.end.offset
    if (start, end) in taken:
        return
    taken.add((start, end))
    opens = body.extent.start.offset
    if data[opens : opens + 1] not in (b"{", b"<", b"t", b":"):
        truth.macro += 1
        return
    if data[end - 1 : end] != b"}" and data[end - 2 : end] != b"%>":
        if _is_in_macro(body.extent.end):
            truth.macro += 1
        else:
            truth.broken += 1
        return
    if function.extent.start.file is None or _is_lost(code, start, end, function):
        truth.broken += 1
        return
    truth.functions.append((_whole_start(plain, start), end))


def _whole_start(code: bytes, start: int) -> int:
    """Where a function begins with all that belongs to it; directives in `code` are blank.

    Of two `template <…>` clang takes in the inner only. And where words that it does not know stand
    before a function it may begin in the middle: a declaration can follow a semicolon, a brace or a
    colon, but no word, unless there is an empty line between.
    """
    while True:
        last = _end_of_last(code, start)
        word = WORD_BEFORE.search(code, max(0, last - 200), last)
        if code.startswith(b"template", start):
            word = None  # nothing goes before it but another one
        if word:
            start = word.start()
        elif code[last - 1 : last] in (b"*", b"&"):
            start = last - 1
        elif code[last - 1 : last] == b")":
            opens = _partner(code, last - 1, ord("("), ord(")"))
            name = WORD_BEFORE.search(code, max(0, opens - 200), opens)
            if not name or not name[0].isupper():
                return start
            before = _end_of_last(code, name.start())
            if not WORD_BEFORE.search(code, max(0, before - 200), before):
                return start
            start = name.start()
        else:
            last = _end_of_last(code, start, any_lines=True)
            if code[last - 1 : last] != b">":
                return start
            opens = _partner(code, last - 1, ord("<"), ord(">"))
            opens = _end_of_last(code, opens)
            name = WORD_BEFORE.search(code, max(0, opens - 200), opens)
            if not name or (name[0] != b"template" and code.startswith(b"template", start)):
                return start
            start = name.start()


def _end_of_last(code: bytes, start: int, *, any_lines: bool = False) -> int:
    """Where what stands before this place ends, directives aside; 0 if an empty line is between."""
    while True:
        line = code.rfind(b"\n", 0, start) + 1
        before = code[line:start].rstrip()
        if before.strip():
            return line + len(before)
        if line == 0:
            return 0
        above = code.rfind(b"\n", 0, line - 1) + 1
        text = code[above : line - 1].strip()
        if not text.startswith(b"#") and (text or not any_lines):
            return above + len(code[above : line - 1].rstrip()) if text else 0
        start = above


def _partner(code: bytes, at: int, opens: int, closes: int) -> int:
    """Where the bracket is opened that is closed here, or 0."""
    depth = 0
    for k in range(at, max(0, at - 4000), -1):
        if code[k] == closes and code[k - 1] != ord("-"):
            depth += 1
        elif code[k] == opens:
            depth -= 1
            if depth == 0:
                return k
    return 0


def _is_lost(code: bytes, start: int, end: int, function: Cursor) -> bool:
    """Whether clang took two things for one, or did not see that one had ended."""
    if CLASS.match(code, start) and b"{" in code[start : function.location.offset]:
        return True
    text = code[start:end]
    return text.count(b"{") != text.count(b"}") and not ELSE.search(text) and b"<%" not in text


def _is_in_macro(location: SourceLocation) -> bool:
    offset = ctypes.c_uint()
    conf.lib.clang_getSpellingLocation(location, None, None, None, ctypes.byref(offset))
    return bool(offset.value != location.offset)


@functools.cache
def _index() -> Index:
    return Index.create()


def read_text(path: Path) -> bytes:
    """A file as the text that it would be as a document; nothing if it is none."""
    data = path.read_bytes()
    try:
        data.decode()
    except UnicodeDecodeError:
        data = data.decode("latin-1").encode()
    return b"" if b"\0" in data else data


def documents_of(texts: Sequence[bytes]) -> Documents:
    """Texts of C++ as documents."""
    at = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    language = np.full(len(texts), LANGUAGES.index("cpp"), np.uint8)
    data = np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8)
    return Documents(data=data, at=at, start=at[:-1], end=at[1:], language=language)


@dataclass(slots=True)
class Measured:
    """What came of cutting some files to one budget."""

    files: int = 0
    functions: int = 0
    chunks: int = 0
    cut: list[str] = field(default_factory=list)
    """Functions that fit and were cut all the same: file, line, tokens."""
    over: int = 0
    """Chunks with more tokens than the budget."""
    untrue: int = 0
    """Chunks whose tokens are not those of their text alone."""
    lossy: int = 0
    """Documents that are not their chunks end to end."""
    fills: list[float] = field(default_factory=list)
    """Of the chunks that are not their file's last."""

    @property
    def fill(self) -> float:
        return float(np.mean(self.fills)) if self.fills else 1.0

    def check(self, least_fill: float = 0.0) -> None:
        """Fail unless all is as promised."""
        assert not self.cut, f"{len(self.cut)} cut without need: {self.cut[:5]}"
        assert (self.over, self.untrue, self.lossy) == (0, 0, 0)
        assert self.fill >= least_fill


def measure(
    found: Sequence[tuple[str, bytes, Truth]], tokenizer: Tokenizer, max_tokens: int
) -> Measured:
    """Cut files to chunks of at most this many tokens, and hold that against libclang."""
    chunker = Chunker(tokenizer, ChunkConfig(max_tokens=max_tokens, reserve_tokens=0))
    measured, batch, size = Measured(), [], 0
    for one in found:
        batch.append(one)
        size += len(one[1])
        if size > BATCH_BYTES:
            _measure_batch(batch, chunker, measured)
            batch, size = [], 0
    if batch:
        _measure_batch(batch, chunker, measured)
    return measured


def _measure_batch(
    batch: Sequence[tuple[str, bytes, Truth]], chunker: Chunker, measured: Measured
) -> None:
    documents = documents_of([text for _, text, _ in batch])
    chunks, at, budget = chunker.chunk(documents), documents.at, chunker.config.max_tokens
    pieces = [
        documents.data[a:b].tobytes()
        for a, b in zip(chunks.start.tolist(), chunks.end.tolist(), strict=True)
    ]
    counts, ids = _encode(chunker.tokenizer, pieces)
    offsets = np.asarray(chunks.tokens.offsets)
    measured.files += len(batch)
    measured.chunks += len(chunks)
    measured.over += int((counts > budget).sum())
    same = np.array_equal(np.diff(offsets), counts) and np.array_equal(chunks.tokens.values, ids)
    measured.untrue += 0 if same else 1
    measured.fills += (counts[chunks.part < chunks.parts - 1] / budget).tolist()
    for k in range(len(batch)):
        mine = chunks.document == k
        tiles = b"".join(itertools.compress(pieces, mine.tolist())) == batch[k][1]
        measured.lossy += 0 if tiles else 1
    inside = []
    for k, (name, text, truth) in enumerate(batch):
        measured.functions += len(truth.functions)
        for start, end in truth.functions:
            next_cut = np.searchsorted(chunks.start, at[k] + start, "right")
            if next_cut < len(chunks) and chunks.start[next_cut] < at[k] + end:
                inside.append((f"{name}:{text[:start].count(10) + 1}", text[start:end]))
    if inside:
        counts, _ = _encode(chunker.tokenizer, [text for _, text in inside])
        measured.cut += [
            f"{place} of {count} tokens"
            for (place, _), count in zip(inside, counts.tolist(), strict=True)
            if count <= budget
        ]


def _encode(tokenizer: Tokenizer, texts: Sequence[bytes]) -> tuple[Int64s, Ids]:
    """How many tokens each text has by itself, and all tokens."""
    at = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    ids, ends = tokenizer.encode_rows(np.frombuffer(b"".join(texts), np.uint8), at)
    return np.diff(ends), ids
