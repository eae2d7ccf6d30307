"""Outlines by tree-sitter: exact for each language, within the contract for any bytes."""

import hashlib
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig
from penstock.prepare.outline import syntax
from penstock.prepare.outline.outline import (
    CLASS,
    DECLARATION,
    EDGE,
    ELEMENT,
    ENUM,
    FUNCTION,
    KIND_NAMES,
    MAX_DEPTH,
    MEMBER,
    NAMESPACE,
    STATEMENT,
)
from penstock.prepare.outline.syntax import LONG, MAX_BYTES, SYNTAX_LANGUAGES, outline_syntax


def cuts_of(language: str, text: bytes) -> list[tuple[bytes, int]]:
    """The line that begins at each cut (what is left of it), with the level; no edges."""
    return [
        (text[cut.at :].partition(b"\n")[0], cut.level)
        for cut in outline_syntax(language, text)[0]
        if cut.level != EDGE
    ]


def nodes_of(language: str, text: bytes) -> list[tuple[str, bytes, int, bytes, bytes]]:
    """Kind, name, parent, first line and last line of each node."""
    return [
        (
            KIND_NAMES[node.kind],
            text[node.name_start : node.name_end],
            node.parent,
            text[node.start : node.end].partition(b"\n")[0],
            text[node.start : node.end].rpartition(b"\n")[2],
        )
        for node in outline_syntax(language, text)[1]
    ]


PYTHON = b'''"""Doc."""
import os  # trailing

# about f
@cache
def f(x):
    # first
    y = [1, 2]
    if y:
        return 1
    else:
        return 2


# alone

class A(B):
    """Doc."""

    # about m
    @property
    async def m(self):
        def inner(): pass
        return inner
'''


def test_python() -> None:
    assert cuts_of("python", PYTHON) == [
        (b"import os  # trailing", DECLARATION),
        (b"# about f", DECLARATION),
        (b"    # first", STATEMENT),
        (b"    if y:", STATEMENT),
        (b"        return 1", STATEMENT + 1),
        (b"    else:", STATEMENT + 1),
        (b"        return 2", STATEMENT + 1),
        (b"# alone", DECLARATION),
        (b"class A(B):", DECLARATION),
        (b'    """Doc."""', MEMBER),
        (b"    # about m", MEMBER),
        (b"        def inner(): pass", STATEMENT),
        (b"pass", STATEMENT + 1),
        (b"        return inner", STATEMENT),
    ]
    assert nodes_of("python", PYTHON) == [
        ("function", b"f", -1, b"@cache", b"        return 2"),
        ("class", b"A", -1, b"class A(B):", b"        return inner"),
        ("function", b"m", 1, b"@property", b"        return inner"),
        ("function", b"inner", 2, b"def inner(): pass", b"def inner(): pass"),
    ]
    cuts, nodes = outline_syntax("python", PYTHON)
    levels = {cut.at: cut.level for cut in cuts}
    assert levels[nodes[0].start] == EDGE  # the comment above goes with it, but is not of it
    assert PYTHON[nodes[0].body :].startswith(b"    # first")
    assert levels[nodes[0].end] == EDGE


JAVA = b"""package a;

import b.C;

/** Doc. */
@A
public class X<T> extends Y {
    private int x = 1; // trailing

    // about f
    @Override
    public int f() {
        switch (x) {
            case 1:
                a();
            default:
                b();
        }
        return 1;
    }

    X() { super(); }

    enum E { P, Q; void g() {} }
    interface I { void h(); }
}
"""


def test_java() -> None:
    assert cuts_of("java", JAVA) == [
        (b"import b.C;", DECLARATION),
        (b"/** Doc. */", DECLARATION),
        (b"    private int x = 1; // trailing", MEMBER),
        (b"    // about f", MEMBER),
        (b"        switch (x) {", STATEMENT),
        (b"            case 1:", STATEMENT + 1),
        (b"                a();", STATEMENT + 2),
        (b"            default:", STATEMENT + 1),
        (b"                b();", STATEMENT + 2),
        (b"        return 1;", STATEMENT),
        (b"    X() { super(); }", MEMBER),
        (b"super(); }", STATEMENT),
        (b"    enum E { P, Q; void g() {} }", MEMBER),
        (b"P, Q; void g() {} }", MEMBER),
        (b"Q; void g() {} }", MEMBER),
        (b"void g() {} }", MEMBER),
        (b"    interface I { void h(); }", MEMBER),
        (b"void h(); }", MEMBER),
    ]
    assert nodes_of("java", JAVA) == [
        ("class", b"X", -1, b"@A", b"}"),
        ("function", b"f", 0, b"@Override", b"    }"),
        ("function", b"X", 0, b"X() { super(); }", b"X() { super(); }"),
        ("enum", b"E", 0, b"enum E { P, Q; void g() {} }", b"enum E { P, Q; void g() {} }"),
        ("function", b"g", 3, b"void g() {}", b"void g() {}"),
        ("class", b"I", 0, b"interface I { void h(); }", b"interface I { void h(); }"),
    ]


GO = b"""package main

import "fmt"

// T is.
type T struct {
\ta int
\tb string
}

type (
\tI interface{ M() }
)

// M does.
func (t *T) M(x int) {
\tfor {
\t\tgo func() {
\t\t\tfmt.Println(x)
\t\t}()
\t}
\tswitch x {
\tcase 1:
\t\tf()
\t}
}
"""


def test_go() -> None:
    assert cuts_of("go", GO) == [
        (b'import "fmt"', DECLARATION),
        (b"// T is.", DECLARATION),
        (b"\ta int", MEMBER),
        (b"\tb string", MEMBER),
        (b"type (", DECLARATION),
        (b"M() }", MEMBER),
        (b"// M does.", DECLARATION),
        (b"\tfor {", STATEMENT),
        (b"\t\tgo func() {", STATEMENT + 1),
        (b"\t\t\tfmt.Println(x)", STATEMENT + 2),
        (b"\tswitch x {", STATEMENT),
        (b"\tcase 1:", STATEMENT + 1),
        (b"\t\tf()", STATEMENT + 1),
    ]
    assert nodes_of("go", GO) == [
        ("class", b"T", -1, b"type T struct {", b"}"),
        ("class", b"I", -1, b"type (", b")"),
        ("function", b"M", -1, b"func (t *T) M(x int) {", b"}"),
    ]


RUST = b"""//! About.

use a::b;

/// Doc.
#[derive(Debug)]
// between
#[test]
pub fn f(x: i32) -> i32 {
    match x {
        1 => { a() }
        _ => b(),
    }
}

mod m {
    pub struct S { a: i32 }

    impl<T> Tr for S {
        #[inline]
        fn g(&self) {}

        fn h(&self);
    }
}

enum E { A, B }
"""


def test_rust() -> None:
    assert cuts_of("rust", RUST) == [
        (b"use a::b;", DECLARATION),
        (b"/// Doc.", DECLARATION),
        (b"    match x {", STATEMENT),
        (b"        1 => { a() }", STATEMENT + 1),
        (b"a() }", STATEMENT + 2),
        (b"        _ => b(),", STATEMENT + 1),
        (b"mod m {", DECLARATION),
        (b"    pub struct S { a: i32 }", DECLARATION),
        (b"a: i32 }", MEMBER),
        (b"    impl<T> Tr for S {", DECLARATION),
        (b"        #[inline]", MEMBER),
        (b"        fn h(&self);", MEMBER),
        (b"enum E { A, B }", DECLARATION),
        (b"A, B }", MEMBER),
        (b"B }", MEMBER),
    ]
    assert nodes_of("rust", RUST) == [
        ("function", b"f", -1, b"#[derive(Debug)]", b"}"),
        ("namespace", b"m", -1, b"mod m {", b"}"),
        ("class", b"S", 1, b"pub struct S { a: i32 }", b"pub struct S { a: i32 }"),
        ("class", b"S", 1, b"impl<T> Tr for S {", b"    }"),
        ("function", b"g", 3, b"#[inline]", b"        fn g(&self) {}"),
        ("enum", b"E", -1, b"enum E { A, B }", b"enum E { A, B }"),
    ]


JAVASCRIPT = b"""import a from "b";

/** Doc. */
export const f = async (x) => {
  switch (x) {
    case g(1):
      h();
  }
};

exports.k = exports.l = function () { m(); };

export default () => 1;

class C {
  static #p = 1;
  // about n
  n() { return { o() {}, q: () => 2 }; }
  r = () => 3;
}

describe("x", () => {
  it("y", () => z());
});
"""


@pytest.mark.parametrize("language", ["javascript", "typescript", "tsx"])
def test_javascript(language: str) -> None:
    assert cuts_of(language, JAVASCRIPT) == [
        (b"/** Doc. */", DECLARATION),
        (b"  switch (x) {", STATEMENT),
        (b"    case g(1):", STATEMENT + 1),
        (b"      h();", STATEMENT + 2),
        (b"exports.k = exports.l = function () { m(); };", DECLARATION),
        (b"m(); };", STATEMENT),
        (b"export default () => 1;", DECLARATION),
        (b"class C {", DECLARATION),
        (b"  static #p = 1;", MEMBER),
        (b"  // about n", MEMBER),
        (b"return { o() {}, q: () => 2 }; }", STATEMENT),
        (b"  r = () => 3;", MEMBER),
        (b'describe("x", () => {', DECLARATION),
        (b'  it("y", () => z());', STATEMENT),
    ]
    assert nodes_of(language, JAVASCRIPT) == [
        ("function", b"f", -1, b"export const f = async (x) => {", b"};"),
        ("function", b"l", -1, *[b"exports.k = exports.l = function () { m(); };"] * 2),
        ("function", b"", -1, b"export default () => 1;", b"export default () => 1;"),
        ("class", b"C", -1, b"class C {", b"}"),
        ("function", b"n", 3, *[b"n() { return { o() {}, q: () => 2 }; }"] * 2),
        ("function", b"o", 4, b"o() {}", b"o() {}"),
        ("function", b"q", 4, b"q: () => 2", b"q: () => 2"),
        ("function", b"r", 3, b"r = () => 3", b"r = () => 3"),
    ]


TYPESCRIPT = b"""@Dec()
export abstract class A<T> {
  @In() x: string;
  @Out()
  m(): void {}
  abstract n(): void;
}

export namespace N {
  export interface I { a: string }
  export enum E { P, Q }
}

declare module "m" {
  function f(): void;
}

const g = <T,>(x: T): T => x;
"""


@pytest.mark.parametrize("language", ["typescript", "tsx"])
def test_typescript(language: str) -> None:
    assert nodes_of(language, TYPESCRIPT) == [
        ("class", b"A", -1, b"@Dec()", b"}"),
        ("function", b"m", 0, b"@Out()", b"  m(): void {}"),
        ("namespace", b"N", -1, b"export namespace N {", b"}"),
        ("class", b"I", 2, *[b"export interface I { a: string }"] * 2),
        ("enum", b"E", 2, *[b"export enum E { P, Q }"] * 2),
        ("namespace", b'"m"', -1, b'declare module "m" {', b"}"),
        ("function", b"g", -1, *[b"const g = <T,>(x: T): T => x;"] * 2),
    ]
    assert cuts_of(language, TYPESCRIPT)[:4] == [
        (b"  @In() x: string;", MEMBER),
        (b"  @Out()", MEMBER),
        (b"  abstract n(): void;", MEMBER),
        (b"export namespace N {", DECLARATION),
    ]


def test_tsx_has_a_grammar_of_its_own() -> None:
    text = b"const a = <A>b;\nfunction f() { return <div>{x}</div>; }\n"
    assert [name for _, name, *_ in nodes_of("tsx", b"function f() { return <p>x</p>; }\n")] == [
        b"f"
    ]
    assert (b"function f() { return <div>{x}</div>; }", DECLARATION) in cuts_of(
        "tsx", text[16:] * 2
    )
    assert cuts_of("typescript", b"const a = <A>b;\nlet c;\n") == [(b"let c;", DECLARATION)]


def test_long_literals_are_cut_between_elements() -> None:
    short = b"x = [1, 2, 3]\n"
    assert cuts_of("python", short) == []
    inner = b"[" + b"10, " * (LONG // 4) + b"]"
    text = b"x = {\n    'a': " + inner + b",\n    'b': 2,\n}\n"
    levels = [level for _, level in cuts_of("python", text)]
    assert levels.count(ELEMENT) == 2
    assert levels.count(ELEMENT + 1) == LONG // 4


def test_depth_is_capped() -> None:
    depth = MAX_DEPTH + 6
    text = b"function f() " + b"{ a(); " * depth + b"}" * depth
    levels = [level for _, level in cuts_of("javascript", text)]
    assert max(levels) == STATEMENT + MAX_DEPTH - 1
    array = b"[" * 400 + b"1," + b"]" * 400
    assert max(level for _, level in cuts_of("javascript", array)) == ELEMENT + MAX_DEPTH - 1


@pytest.mark.parametrize("language", SYNTAX_LANGUAGES)
def test_odd_documents(language: str) -> None:
    assert outline_syntax(language, b"") == ([], [])
    for text in (
        b" ",
        b"\n\n",
        b"\xef\xbb\xbf",
        b"\x00",
        b"\xff\xfe",
        b'"' + b"x" * 100,
        b"'",
        b"`",
    ):
        check(language, text)
    comment = b"# " if language == "python" else b"// "
    # one block of comments is whole; a second one after an empty line is on its own
    assert cuts_of(language, comment + b"a\n" + comment + b"b\n") == []
    assert cuts_of(language, comment + b"a\n\n" + comment + b"b\n") == [
        (comment + b"b", DECLARATION)
    ]


def test_carriage_returns_and_a_byte_order_mark() -> None:
    text = b"\xef\xbb\xbfx = 1\r\n\r\n# c\r\ndef f():\r\n\treturn 1\r\n"
    assert cuts_of("python", text) == [(b"# c\r", DECLARATION), (b"\treturn 1\r", STATEMENT)]


def test_errors_are_looked_through() -> None:
    text = b"class A {\n  int f() { return 1; }\n  int g( { return 2; }\n  int h() { return 3; }\n"
    names = {name for kind, name, *_ in nodes_of("java", text) if kind == "function"}
    assert {b"f", b"h"} <= names
    text = b"def f(:\n    x\n\ndef g():\n    return 1\n"
    assert b"g" in {name for _, name, *_ in nodes_of("python", text)}


def test_a_megabyte_in_one_line() -> None:
    text = b"f(123456789012);" * 65_536
    cuts, nodes = outline_syntax("javascript", text)
    assert [cut.at for cut in cuts] == list(range(16, len(text), 16))
    assert nodes == []


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("javascript", b"[" * 100_000 + b"]" * 100_000),
        ("javascript", b"{" * 100_000 + b"}" * 100_000),
        ("python", b"(" * 100_000 + b")" * 100_000),
        ("python", b"(" * 200_000),
        ("rust", b"fn f() " + b"{" * 100_000 + b"}" * 100_000),
        ("java", b"class A {" * 20_000),
        ("go", b"a(" * 50_000),
    ],
)
def test_deep_nesting(language: str, text: bytes) -> None:
    check(language, text)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", b"a?" * 100_000),  # one error, which tree-sitter reads in quadratic time
        ("go", b"a?" * 100_000),
        ("typescript", b"'''" * 66_666 + b"'"),
        ("java", b"a<" * 100_000),  # two readings of all of it: memory in quadratic size
        ("java", b"/* " * 66_666),  # a comment that is tried at every byte
        ("rust", b'r"#' * 66_666),
    ],
)
def test_work_is_bounded(language: str, text: bytes) -> None:
    began = time.process_time()
    check(language, text)
    assert time.process_time() - began < 20  # of 1 here; without a bound minutes, or all memory


@pytest.mark.parametrize(
    ("language", "before", "unit", "after"),
    [
        # valid, and the trees of two readings are compared again and again
        ("java", b"class A { void f() { int x = ", b"(a) - (b) * (c) - ", b"d; } }\n"),
        ("java", b"class A { void f() { int x = ", b"(a)+(b)*", b"c; } }\n"),
        ("java", b"class A { void f() { int x = ", b"(a)-/*;*/(b)*", b"c; } }\n"),
        ("java", b"", b"(a)-(b)*", b""),  # of a length that divides a power of two
        ("typescript", b"", b"+;", b""),  # an error with eight ways out
        ("go", b"", b"&;", b""),  # each error closes all that is open
        ("go", b"", b"f(a[b](", b""),
        ("python", b"", b"*a,", b""),
    ],
)
def test_time_grows_with_the_text(language: str, before: bytes, unit: bytes, after: bytes) -> None:
    def seconds(size: int) -> float:
        text = before + unit * (size // len(unit)) + after
        began = time.process_time()
        outline_syntax(language, text)
        return time.process_time() - began

    outline_syntax(language, b"")
    small, large = seconds(16_000), seconds(64_000)
    assert large < 5  # of 0.2 to 1.3 here; without a bound 6 to 20
    assert large < 8 * small + 0.5  # of 4 times the size; 16 where it is quadratic


_GO_SWITCH = b"package a\nfunc f(op int) int {\n\tswitch op {\n" + b"".join(
    b"\tcase ssa.Op%d, ssa.Op%dx:\n\t\tp := s.Prog(v.Op.Asm())\n\t\tp.From = obj.Addr{Reg: r[%d]}\n"
    b"\t\tif x := v.Args[0]; x < (y) {\n\t\t\tp.To.Set(a[i](x), T{y})\n\t\t}\n" % (k, k, k)
    for k in range(400)
) + b"\t}\n\treturn 1\n}\n"  # fmt: skip
_JAVA_CASTS = b"class A {\n" + b"".join(
    b"  int f%d(int a) {\n    int[] b = new int[(a) + 1];\n"
    b"    b[0] = ((a < b[1]) ? (int) (a - (b[2])) : (a) & (0x%x)) ^ (c[(d >>> 12) & 0x3f]);\n"
    b"    for (int i = 0; i < (a); i++) x.<T>g((y) -> z);\n    return (a) + (b[3]);\n  }\n" % (k, k)
    for k in range(300)
) + b"}\n"  # fmt: skip


@pytest.mark.parametrize(
    ("language", "text", "count"), [("go", _GO_SWITCH, 1), ("java", _JAVA_CASTS, 300)]
)
def test_valid_code_keeps_its_outline(language: str, text: bytes, count: int) -> None:
    """Two readings of long stretches are no trouble as long as both come to an end."""
    _, nodes = outline_syntax(language, text)
    assert len([node for node in nodes if node.kind == FUNCTION]) == count


def test_a_document_too_large_has_no_outline() -> None:
    assert outline_syntax("python", b"x = 1\n" * (MAX_BYTES // 6 + 1)) == ([], [])


def test_a_parser_that_gave_up_is_as_good_as_new() -> None:
    before = outline_syntax("python", PYTHON)
    assert outline_syntax("python", b"a?" * 50_000) == ([], [])
    assert outline_syntax("python", PYTHON) == before


def check(language: str, text: bytes) -> None:
    """All that the contract says."""
    cuts, nodes = outline_syntax(language, text)
    places = [cut.at for cut in cuts]
    assert places == sorted(set(places))
    assert all(0 < at < len(text) for at in places)
    assert all(text[at] & 0xC0 != 0x80 for at in places)
    assert all(DECLARATION <= cut.level <= EDGE for cut in cuts)
    borders = {0, len(text), *places}
    open_nodes: list[int] = []
    for number, node in enumerate(nodes):
        assert node.kind in (NAMESPACE, CLASS, ENUM, FUNCTION)
        assert 0 <= node.start <= node.body <= node.end <= len(text)
        assert node.start < node.end
        assert node.start <= node.name_start <= node.name_end <= node.end
        while open_nodes and nodes[open_nodes[-1]].end <= node.start:
            open_nodes.pop()
        assert node.parent == (open_nodes[-1] if open_nodes else -1)
        if open_nodes:
            assert node.end <= nodes[open_nodes[-1]].end
        open_nodes.append(number)
        if node.kind == FUNCTION:
            assert node.start in borders
            assert node.end in borders


_WORDS = st.sampled_from(
    ["def f(x):", "class A:", "class A {", "fn f() {", "func f() {", "function f() {", "void f() {",
     "#[a]", "@a", "// c", "# c", "/* c */", "///", "impl A {", "mod m {", "enum E {", "x = 1", ";",
     "{", "}", "(", ")", "[", "]", "=>", "= () => {", "if x:", "if (x) {", "else", "return 1", ",",
     "\n", "\n", "\n    ", "\n\t", "\r\n", " ", "é", "\u00a0", "'", '"', "`", "export ", "const a",
     "case 1:", "switch (x) {", "<a>", "</a>", "...", ":", "namespace N {", '"""', "\ufeff"],
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(SYNTAX_LANGUAGES),
    st.one_of(
        st.lists(_WORDS, max_size=60).map(lambda words: "".join(words).encode()),
        st.text(max_size=60).map(lambda text: text.encode("utf-8", "ignore")),
        st.binary(max_size=60),
    ),
)
@example("typescript", b"class A {@a")
@example("rust", "#[a]é#[a]fn f() {}".encode())
def test_any_bytes_keep_the_contract(language: str, text: bytes) -> None:
    check(language, text)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_code_keeps_the_contract(data: st.DataObject) -> None:
    sources = {"python": PYTHON, "java": JAVA, "go": GO, "rust": RUST, "javascript": JAVASCRIPT,
               "typescript": TYPESCRIPT, "tsx": JAVASCRIPT}  # fmt: skip
    language = data.draw(st.sampled_from(SYNTAX_LANGUAGES))
    text = sources[language]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 40, len(text))))
    check(
        language, text[:start] + data.draw(st.sampled_from([b"", b"{", b'"', b"\n"])) + text[end:]
    )


def _digest() -> str:
    found = [outline_syntax("python", PYTHON), outline_syntax("java", JAVA),
             outline_syntax("rust", RUST + b"fn (\n" * 50),
             outline_syntax("tsx", JAVASCRIPT * 30)]  # fmt: skip
    return hashlib.sha256(repr(found).encode()).hexdigest()


def test_the_same_in_another_process_and_in_threads() -> None:
    expected = _digest()
    with ThreadPoolExecutor(4) as pool:
        assert {future.result() for future in [pool.submit(_digest) for _ in range(8)]} == {
            expected
        }
    code = f"import runpy; print(runpy.run_path({__file__!r})['_digest']())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == expected


def test_a_missing_grammar_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_go", None)
    syntax._reader.cache_clear()
    with pytest.raises(BadConfig) as caught:
        syntax._reader("go")
    assert "cannot read go without its grammar" in str(caught.value)
    assert 'pip install "penstock[code]"' in str(caught.value)
