"""Say what language each document is in: by its path, else by its content.

In:    documents, with or without paths, and what the user asked for
Out:   a number in LANGUAGES for each
Keeps: the answer a function of path and content alone; at most SAMPLE_BYTES read of each document

Content is judged line by line: each line gives points to the languages whose words it begins with
or whose marks it holds. Comments and fenced blocks are passed over. A text with few marks of code
and few points is "text" or "markdown"; code that no language claims is "other".
"""

import functools
from typing import Final

import numpy as np

from penstock.arrays import Bytes, Int64s
from penstock.errors import BadConfig
from penstock.kernels import Kernel
from penstock.options import suggest
from penstock.prepare.languages_layout import (
    COLUMNS,
    COMMENTS,
    CPP,
    ENDS,
    GAPS,
    GO,
    HASH,
    JAVA,
    JAVASCRIPT,
    LINES,
    LINKS,
    MARKDOWN,
    MARKS,
    OTHER,
    PYTHON,
    RUST,
    SIZE,
    TEXT,
    TSX,
    TYPESCRIPT,
    C,
    Rules,
)
from penstock.prepare.languages_layout import SAMPLE_BYTES as SAMPLE_BYTES
from penstock.records import LANGUAGES, Documents

_score = Kernel(
    "penstock.prepare.languages_kernel",
    "score_languages",
    "void(uint8[::1], int64[::1], int64[::1], Rules, int64[::1])",
    Rules,
)

# What the first word of a line says: the word (its first eight letters), after `end` the bytes one
# of which must end the line, after `has` what must stand in it (_ for a space), and the points.
# The first rule that fits counts.
_RULES: Final = r"""
#include = c 6 | #define = c 4 | #ifdef = c 4 | #ifndef = c 4 | #pragma = c 4 | #endif = c 4
#undef = c 4 | #if = c 3 | #else = c 3 | #elif = c 3 | #error = c 3
# includ has < = c 6 | # includ has " = c 6 | # define = c 2 | # ifdef = c 2 | # ifndef = c 2
# pragma = c 2 | # endif = c 2 | # undef = c 2 | # / has /* = c 4
#[ = rust 4 | #! has ![ = rust 4 | #! has python = python 99999 | #! has node = javascript 99999
#! has deno = typescript 99999 | #! = other 99999 | <? = other 99 | <html = other 99
<! has DOCTYPE = other 99 | <! has doctype = other 99 | <! has ENTITY = other 9
@Overrid = java 4 | @interfa = other 5 | @propert = other 5 | @end = other 5 | @impleme = other 5
import end "'; has _from_ = javascript 5 | import end ( = go 4 | import end " = go 4
import end ; has " = javascript 4 | import end ; has ' = javascript 4 | import end ; = java 4
import end ' = javascript 4 | import end { = javascript 3 | import = python 3
from has import = python 6 | package end ; = java 6 | package = go 5
def end :(, = python 4 | def = other 4 | elif end : = python 3 | except end : = python 3
if end : = python 2 | for end : = python 2 | while end : = python 2 | with end : = python 2
else end : = python 2 | return end ;{( = c 0 | return = python 1 | raise = python 2
class end : = python 4 | class end ; = cpp 3 | class has _extends = java 3 javascript 4 cpp 2
class end { = cpp 2 java 1 javascript 1 | class = cpp 2
public end : = cpp 6 | private end : = cpp 6 | protecte end : = cpp 6
public = java 3 | private = java 3 | protecte = java 3
namespac end ; = other 4 | namespac has . = other 4 | namespac = cpp 4
using has namespac = cpp 6 | using has :: = cpp 6 | using has = = cpp 4 | using end ; = other 5
template has < = cpp 6 | template = cpp 1 | typename = cpp 4 | operator = cpp 4
virtual = cpp 5 | constexp = cpp 5 | explicit = cpp 5 | friend = cpp 5 | auto = cpp 2
typedef = c 4 | extern = c 4 | inline = c 4 | static = c 2 | void = c 2 | int = c 2 | char = c 2
unsigned = c 2 | size_t = c 2 | double = c 2 | bool = c 2
struct = c 2 rust 1 | union = c 2 rust 1 | enum = c 2 rust 1
interfac = java 2 typescript 3 | type has struct = go 5 | type has interfac = go 5
type has = = typescript 3 | declare = typescript 3 java 1 | readonly = typescript 3
abstract = typescript 3 java 1
func has -> = other 5 | func = go 5 | fn = rust 5 | impl = rust 4 | pub = rust 4 | trait = rust 4
mod = rust 4 | use end ; has :: = rust 4 | use end ; = other 4
let has mut_ = rust 4 javascript 2 | let end ;{ = rust 1 javascript 2
let has = = rust 1 javascript 2 | const has fn_ = rust 3 | const has _=_ = javascript 3
const = c 1
var end ; = javascript 2 | var = go 2 | function = javascript 4 | export = javascript 4
async end : = python 4 | async = javascript 4
std = cpp 4 | end = other 2 | local = other 2 | begin = other 2 | sub = other 2
"""

_SUFFIXES: Final = {
    "c": "c",
    "cpp": "h hh hpp hxx h++ cc cpp cxx c++ cu cuh inl ipp ixx tcc tpp cppm",
    "python": "py pyi pyw pyx",
    "java": "java",
    "go": "go",
    "rust": "rs",
    "javascript": "js mjs cjs jsx",
    "typescript": "ts mts cts",
    "tsx": "tsx",
    "markdown": "md markdown mdown mkd mdx rmd qmd",
    "text": "txt text rst adoc asciidoc log nfo tex",
    "other": "asm s bash bat bzl cfg clj cljs cmake coffee conf cs css csv cl dart diff ebuild el "
    "elm erl ex exs f f77 f90 f95 for fs fsx gd glsl gradle graphql groovy hcl hlsl hrl hs htm "
    "html ini ipynb jl json json5 jsonl kt kts less lhs lisp lua m mk ml mli mm nim nix pas patch "
    "php pl pm proto ps1 purs r rb rkt sass sbt scala scm scss sh sol sql svelte svg swift tcl tf "
    "toml tsv v vb vert vhd vhdl vim vue wat wgsl xml xsd xsl yaml yml zig zsh",
}
_NAMES: Final = {
    "other": "makefile gnumakefile dockerfile containerfile rakefile gemfile jenkinsfile "
    "vagrantfile cmakelists.txt build workspace .bashrc .gitignore",
    "python": "sconstruct sconscript wscript",
    "text": "readme license licence copying authors changelog changes news notice install todo",
}
_BY_SUFFIX: Final = {
    suffix: LANGUAGES.index(language)
    for language, suffixes in _SUFFIXES.items()
    for suffix in suffixes.split()
}
_BY_NAME: Final = {
    name: LANGUAGES.index(language) for language, names in _NAMES.items() for name in names.split()
}

UNKNOWN: Final = 255
"""What `language_of_path` says of a path that tells nothing."""


def language_of_path(path: str) -> int:
    """The number in LANGUAGES that a path tells, or UNKNOWN.

    >>> [LANGUAGES[language_of_path(path)] for path in ("a/b.h", "x.TSX", "docs/CMakeLists.txt")]
    ['cpp', 'tsx', 'other']
    >>> language_of_path("notes.d/thing") == UNKNOWN
    True
    """
    name = path.replace("\\", "/").rpartition("/")[2].lower()
    if name in _BY_NAME:
        return _BY_NAME[name]
    _, dot, suffix = name.rpartition(".")
    return _BY_SUFFIX.get(suffix, UNKNOWN) if dot else UNKNOWN


def guess_languages(documents: Documents, rows: Int64s | None = None) -> Bytes:
    """What the documents numbered `rows` (all without it) look like, by content alone."""
    if rows is None:
        rows = np.arange(len(documents))
    counts = np.zeros(len(rows) * COLUMNS, np.int64)
    _score(documents.data, documents.at, rows, _rules(), counts)
    return _decide(counts.reshape(-1, COLUMNS))


def _decide(counts: Int64s) -> Bytes:
    """The language that the counts of each document speak for."""
    points = counts[:, : len(LANGUAGES)].copy()
    lines, size, marks, gaps = (counts[:, column] for column in (LINES, SIZE, MARKS, GAPS))
    ends_like_code = counts[:, ENDS] * 4 > lines
    is_prose = (gaps * 14 > size) | ((gaps * 20 > size) & (gaps > marks))
    is_code = ~is_prose & ((marks * 33 > size) | ends_like_code)

    c, cpp, script, typescript = points[:, [C, CPP, JAVASCRIPT, TYPESCRIPT]].T
    is_cpp, is_typescript, is_tsx = cpp > 0, typescript > 3, points[:, TSX] > 2
    script = script + np.where((script > 0) | is_typescript, typescript, 0)
    family = c + cpp + np.minimum(counts[:, COMMENTS], 4)
    # of equal ones the first: C and C++, then as here
    rivals = [OTHER, PYTHON, GO, JAVA, RUST]
    table = np.column_stack([family, points[:, rivals], script])
    names = np.array([CPP, *rivals, JAVASCRIPT])
    best, most = names[table.argmax(axis=1)], table.max(axis=1)
    markdown = points[:, MARKDOWN] + np.where(is_prose | (most < 3), counts[:, LINKS], 0)
    best[(best == CPP) & ~is_cpp] = C
    best[(best == JAVASCRIPT) & is_typescript] = TYPESCRIPT
    best[(best == TYPESCRIPT) & is_tsx] = TSX

    is_sure = (most >= 6) & (is_code | (most * np.where(is_prose, 2, 6) > lines))
    is_other = is_code & (size > 160) & (ends_like_code | (marks * 12 > size))
    found = np.where(is_other, OTHER, TEXT)
    found = np.where(is_code & (most > 0), best, found)
    found = np.where(is_sure, best, found)
    claims_more = is_sure & (most * 2 > markdown) & (is_code | (most > markdown))
    found = np.where((markdown >= 4) & ~claims_more, MARKDOWN, found)
    # nothing but comments, docstrings or fenced blocks
    found = np.where((lines == 0) & (markdown > 0), MARKDOWN, found)
    found = np.where((lines == 0) & (counts[:, COMMENTS] > 0), CPP, found)
    found = np.where((lines == 0) & (points[:, PYTHON] > 0), PYTHON, found)
    return found.astype(np.uint8)


@functools.cache
def _rules() -> Rules:
    """The rules as the kernel takes them."""
    rules = []
    for rule in _RULES.replace("\n", "|").split("|"):
        condition, _, given = rule.strip().rpartition(" = ")
        if not given:
            continue
        condition, _, need = condition.partition(" has ")
        word, _, ends = condition.partition(" end ")
        points = np.zeros(len(LANGUAGES), np.int64)
        languages = given.split()
        for language, number in zip(languages[::2], languages[1::2], strict=True):
            points[LANGUAGES.index(language)] = int(number)
        key = _packed(word)
        bucket = (key * HASH & (1 << 64) - 1) >> 56
        rules.append(
            (bucket, key, _packed(ends), _packed(need.replace("_", " ")), len(need), points)
        )
    rules.sort(key=lambda rule: rule[0])
    return Rules(
        np.searchsorted([rule[0] for rule in rules], np.arange(257)).astype(np.int64),
        np.array([rule[1] for rule in rules], np.uint64),
        np.array([rule[2] for rule in rules], np.uint64),
        np.array([number for rule in rules for number in rule[3:5]], np.uint64),
        np.concatenate([rule[5] for rule in rules]),
    )


def _packed(word: str) -> int:
    return int.from_bytes(word.encode(), "little")


def detect(documents: Documents, language: str) -> Bytes:
    """The language of each document: the one that was asked for, or for "auto" what it is."""
    if language != "auto":
        return np.full(len(documents), number_of(language), np.uint8)
    found = np.full(len(documents), UNKNOWN, np.uint8)
    sources = documents.sources
    if sources is None and documents.places is not None and documents.places.source is not None:
        sources = documents.places.source.to_pylist()
    if sources is not None:
        found[:] = [language_of_path(path) for path in sources]
    rows = np.flatnonzero(found == UNKNOWN)
    if len(rows):
        found[rows] = guess_languages(documents, rows)
    return found


def number_of(language: str) -> int:
    """The number of a language that the user named.

    >>> LANGUAGES[number_of("go")]
    'go'
    """
    if language in LANGUAGES:
        return LANGUAGES.index(language)
    do = suggest(language, ("auto", *LANGUAGES))
    raise BadConfig(f"--language is {language!r}", do=do)
