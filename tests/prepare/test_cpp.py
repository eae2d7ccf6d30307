"""Where C++ may be cut, by example: one for each thing that the lexer must not misread."""

import itertools

import numpy as np
import pytest

from penstock.kernels import PAD
from penstock.prepare.outline.cpp import outline_cpp
from penstock.prepare.outline.outline import (
    DECLARATION,
    KIND_NAMES,
    MEMBER,
    STATEMENT,
    Outline,
    level_name,
)

from . import nasty


def outline(*texts: bytes, **most: int) -> Outline:
    at = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    data = np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8)
    return outline_cpp(data, at[:-1].copy(), at[1:].copy(), **most)


def nodes(text: str) -> list[tuple[str, str, str]]:
    """Kind, name and text of each node."""
    data = text.encode()
    found = outline(data)
    return [
        (
            KIND_NAMES[found.node_kind[k]],
            data[found.name_start[k] : found.name_end[k]].decode(),
            data[found.node_start[k] : found.node_end[k]].decode(),
        )
        for k in range(len(found.node_kind))
    ]


def functions(text: str) -> list[str]:
    """Names of all functions."""
    return [name for kind, name, _ in nodes(text) if kind == "function"]


def pieces(text: str, level: int) -> list[str]:
    """The text, cut wherever that breaks no more than this."""
    data = text.encode()
    found = outline(data)
    places = found.cut_at[found.cut_level <= level].tolist()
    return [data[a:b].decode() for a, b in itertools.pairwise([0, *places, len(data)])]


def levels(text: str) -> list[str]:
    """What each cut is called."""
    return [level_name(int(level)) for level in outline(text.encode()).cut_level]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("// a \\\nint no() { \\\n}\nint f() {}", ["f"]),
        ("// a \\\r\nint no() {\r\nint f() {}", ["f"]),
        ("/* { \\\n*/ int f() { /* } */ } /*/ { */ int g() {}", ["f", "g"]),
        ('auto r = R"x( }{ )" )y" )x"; int f() { return u8R"(})"; }', ["f"]),
        ('auto a = LR"(})", b = uR"({)", c = FOOR"({)"; int f() {}', ["f"]),
        ("int f() { return '{' + '\"' + '\\'' + '\\\\' + L'{'; } int g() {}", ["f", "g"]),
        ('int f() { return "\\"{\\\\"; } int g() {}', ["f", "g"]),
        ("int f() { return 1'000'000 + 0x1'F + 1'0e+5; } int g() {}", ["f", "g"]),
        ("int f() <% return a<:0:>; %> int g() {}", ["f", "g"]),
        ("%:define X {\nint f(std::vector<::A> a) {}", ["f"]),
        ("#define X { \\\n {{ // } \\\n {\nint f() {}", ["f"]),
        ("#define X /* {\n*/ {\nint f() {}", ["f"]),
        ("\ufeffnamespace n { int f() {} }", ["f"]),
        ("// no {\rint f() { return 1; }\r// {\rint g() {}\r", ["f", "g"]),
    ],
)
def test_letters(text: str, names: list[str]) -> None:
    """Comments, literals, directives and digraphs are read as a compiler reads them."""
    assert functions(text) == names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("#if A\nint f() {\n#else\nint f(int) {\n#endif\n}\nint g() {}", ["f", "f", "g"]),
        ("int f() {\n#if A\nif (x) {\n#elif B\n{\n#else\nwhile (y) {\n#endif\n}\n}\nint g() {}",
         ["f", "g"]),
        ("#if 0\ndon't { (\n#endif\nint f() {}", ["f"]),
        ("#if 0\n}}\n#else\nint f() {\n#endif\n} int g() {}", ["f", "g"]),
        ("int f() {\n#if A\nreturn 1; }\n#else\nreturn 2; }\n#endif\nint g() {}", ["f", "g"]),
        ("struct S {\n#ifdef A\nint f() {\n#endif\n#ifdef A\n}\n#endif\nint g() {}\n};",
         ["f", "g"]),
        ("#ifdef A\nnamespace n {\n#endif\nint f() {}\n#ifdef A\n}\n#endif\nint g() {}",
         ["f", "g"]),
    ],
)  # fmt: skip
def test_conditions(text: str, names: list[str]) -> None:
    """At #else the braces are those that #if saw; the branches join where they are closed."""
    assert functions(text) == names


def test_two_heads_for_one_body() -> None:
    """Both heads are kept with the body; where that is too large, the one that counts is."""
    text = "#if A\nvoid f(int)\n#else\nvoid f()\n#endif\n{ }\n"
    assert nodes(text) == [
        ("function", "", "void f(int)\n#else\nvoid f()\n#endif\n{ }"),
        ("function", "f", "void f()\n#endif\n{ }"),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("namespace a::b { }", [("namespace", "a::b")]),
        ("inline namespace v { } namespace { }", [("namespace", "v"), ("namespace", "")]),
        ("namespace a = b; using namespace std;", []),
        ('extern "C" { int f() {} } extern "C" int g() {}', [("function", "f"), ("function", "g")]),
        ("export { int f() {} } export namespace n { }", [("function", "f"), ("namespace", "n")]),
        ("class C final : public B<(1 > 0)> { int f() {} };", [("class", "C"), ("function", "f")]),
        ("struct alignas(8) [[x]] __attribute__((y)) S { };", [("class", "S")]),
        ("class C : public BASE(x, y) { int f() {} };", [("class", "C"), ("function", "f")]),
        ("class EXPORT(x) C { }; union { int a; } u;", [("class", "C"), ("class", "")]),
        ("template <> struct S<int> { };", [("class", "S")]),
        ("enum class E : char { a, b = f({1}) };", [("enum", "E")]),
        ("struct S f() { } enum E g() { }", [("function", "f"), ("function", "g")]),
        ("struct S s = { 1, { 2 } }; int a[] = { 1 };", []),
        ("int x { 1 }; auto l = [] { return 1; };", []),
        ("int f(int a = [] { return 1; }(), B b = {2}) { }", [("function", "f")]),
        ("A::A(int a) : b_{a}, C<int>{1}, d_([&] { return 1; }()) { }", [("function", "A::A")]),
        ("A() try : b_(1) { } catch (int) { } catch (...) { }", [("function", "A")]),
        ("A::~A() noexcept(true) { }", [("function", "A::~A")]),
        ("auto f() const && -> decltype(a) { } int g() override final { }",
         [("function", "f"), ("function", "g")]),
        ("T operator()(int) { } T operator[](int) { } T operator<<(int) { }",
         [("function", "operator()"), ("function", "operator[]"), ("function", "operator<<")]),
        ("explicit operator bool() const {} operator A<B>&() {} void operator delete[](void*) {}",
         [("function", "operator bool"), ("function", "operator A<B>&"),
          ("function", "operator delete[]")]),
        ("template <class T> requires C<T> && (N > 1) int f() requires requires { a; } { }",
         [("function", "f")]),
        ("template <class T> int f() requires (sizeof(T) > 1) { } int g() { }",
         [("function", "f"), ("function", "g")]),
        ("template <class T> concept C = requires(T t) { { t } -> D; };", []),
        ("template <E<A<T>{}, int> = 1, int (*F)(B<T>), auto L = [] { return 1; }> int f() { }",
         [("function", "f")]),
        ("[[nodiscard]] int f [[a]] () { } __attribute__((cold)) int g() { }",
         [("function", "f"), ("function", "g")]),
        ("int f(a, b)\nint a; char b;\n{ }\nmain(c)\nint c;\n{ }",
         [("function", "f"), ("function", "main")]),
        ("f(a) const struct S *a; { } int g(b) enum E b; int (*c)(); { }",
         [("function", "f"), ("function", "g")]),
        ("template <class T> requires C<T> int f() requires (sizeof(T) > 1) { }",
         [("function", "f")]),
        ("auto f() -> CPP_ret(T &)(requires A) { } auto g() -> T& requires (A) { }",
         [("function", "f"), ("function", "g")]),
        ("ALIGNED16(class) C : B { int f() { } };", [("class", "C"), ("function", "f")]),
        ("__attribute ((cold)) int f() __attribute ((a)) { } int g() asm(\"h\") { }",
         [("function", "f"), ("function", "g")]),
        ("struct S f() LATER { } struct S<void(int)> { }; class API ALIGN(8) C { };",
         [("function", "f"), ("class", "S"), ("class", "C")]),
        ('extern "C" int f() try { } catch (int) { } int g() { }',
         [("function", "f"), ("function", "g")]),
        ("TEST(A, B) { }", [("function", "TEST")]),
        ("API(1) void f() LATER(2) { }", [("function", "f")]),
        ("__global__ void __launch_bounds__(1) k() { }", [("function", "k")]),
        ("void f() { struct L { int g() { } }; }",
         [("function", "f"), ("class", "L"), ("function", "g")]),
        ("- (void)f:(int)x { }", [("function", "")]),
    ],
)  # fmt: skip
def test_what_a_brace_opens(text: str, found: list[tuple[str, str]]) -> None:
    """Each brace is classified from its head."""
    assert [(kind, name) for kind, name, _ in nodes(text)] == found


def test_statements_are_no_functions() -> None:
    text = (
        "void f() { if (a) { b(); } else { c(); } for (;;) { } g([] { h(); }); "
        "A a{1}; case 1: { } }"
    )
    assert functions(text) == ["f"]


def test_a_function_ends_with_its_handlers() -> None:
    text = "int f() try { } catch (int) { } catch (...) { } int g() { }"
    assert [body for _, _, body in nodes(text)] == [
        "int f() try { } catch (int) { } catch (...) { }",
        "int g() { }",
    ]


def test_macros_without_semicolons() -> None:
    """What begins on a line of its own after a macro is new, but not after a specifier."""
    text = (
        "class W {\n  Q_OBJECT\npublic:\n  W(int)\n  SUFFIX { }\n  DECLARE(a)\n  DECLARE(b)\n"
        "  int f() { }\n};\nBEGIN_NAMESPACE\n\nAPI_INLINE\nint g() { }\n"
        "PUSH\nIGNORE(x)\ntemplate <class T>\nstruct S : B<T> { int h() { } };\n"
    )
    assert nodes(text)[1:] == [
        ("function", "W", "W(int)\n  SUFFIX { }"),
        ("function", "", "DECLARE(a)\n  DECLARE(b)\n  int f() { }"),  # they may be attributes
        ("function", "f", "int f() { }"),
        ("function", "g", "API_INLINE\nint g() { }"),
        ("class", "S", "template <class T>\nstruct S : B<T> { int h() { } }"),
        ("function", "h", "int h() { }"),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("int f()\n{\n  if (a) {\n    b();\n}\nint g()\n{\n}\n",
         ["int f()\n{\n  if (a) {\n    b();\n}", "int g()\n{\n}"]),
        ("OPENS(f)\n  if (a) {\n  }\n}\nint g()\n{\n}\n", ["int g()\n{\n}"]),
        ("int f()\n{\n  if (a) {\n    b();\nint g()\n{\n  c();\n}\n",
         ["int f()\n{\n  if (a) {\n    b();\n", "int g()\n{\n  c();\n}"]),
        ("struct S {\n  int f() {\n    {\n  }\n  int g() {\n  }\n};\n",
         ["int f() {\n    {\n  }", "int g() {\n  }"]),
    ],
)  # fmt: skip
def test_braces_that_do_not_match(text: str, found: list[str]) -> None:
    """Then a brace that begins its line closes what began at the same column."""
    assert [body for kind, _, body in nodes(text) if kind == "function"] == found


def test_comments_and_templates_stay_with_what_follows() -> None:
    text = """\
#include <a>
// of f
int f();  // f, too

/* of g */
template <class T>
int g() { }
/** of C */
class C {
  int a;  // of a
  // of b
  int b;
};
"""
    assert pieces(text, DECLARATION) == [
        "#include <a>\n",
        "// of f\nint f();  // f, too\n\n",
        "/* of g */\ntemplate <class T>\nint g() { }\n",
        "/** of C */\nclass C {\n  int a;  // of a\n  // of b\n  int b;\n};\n",
    ]
    assert pieces(text, MEMBER)[-3:] == [
        "/** of C */\nclass C {\n",
        "  int a;  // of a\n",
        "  // of b\n  int b;\n};\n",
    ]


def test_levels() -> None:
    """The deeper, the worse; `else` holds on to the block before it."""
    text = (
        "void f() {\n  a();\n  if (x) {\n    b();\n    c();\n  } else {\n    d();\n  }\n}\n"
        "int g();\n"
    )
    assert pieces(text, DECLARATION) == [text[:-9], "int g();\n"]
    assert pieces(text, STATEMENT) == [
        "void f() {\n",
        "  a();\n",
        "  if (x) {\n    b();\n    c();\n  } else {\n    d();\n  }\n}\n",
        "int g();\n",
    ]
    assert pieces(text, STATEMENT + 1)[2:6] == [
        "  if (x) {\n",
        "    b();\n",
        "    c();\n  }",
        " else {\n",
    ]


def test_tables_are_cut_between_elements() -> None:
    rows = "".join(f"  {{{k}, 'a', \"b\"}},\n" for k in range(100))
    text = f"int t[] = {{\n{rows}}};\n"
    assert set(levels(text)) == {"element"}
    assert 30 < len(levels(text)) < 110


@pytest.mark.parametrize("kind", nasty.KINDS)
def test_outlines_are_in_order(kind: str) -> None:
    """Cuts ascend within their document, nodes too, and lie within the node around them."""
    texts = [nasty.make(kind, size) for size in (0, 300, 3000)]
    found = outline(*texts)
    stops = np.cumsum([0, *map(len, texts)])
    for k in range(len(texts)):
        cuts = found.cut_at[found.cut_first[k] : found.cut_first[k + 1]]
        assert (np.diff(cuts) > 0).all()
        assert ((cuts > stops[k]) & (cuts < stops[k + 1])).all()
        rows = slice(found.node_first[k], found.node_first[k + 1])
        start, body, end = found.node_start[rows], found.node_body[rows], found.node_end[rows]
        assert (np.diff(start) >= 0).all()
        assert (start >= stops[k]).all()
        assert (start < body).all()
        assert (body <= end).all()
        assert (end <= stops[k + 1]).all()
        assert (found.node_parent[rows] < np.arange(len(start))).all()
        assert (found.name_start[rows] <= found.name_end[rows]).all()


@pytest.mark.parametrize("kind", nasty.KINDS)
def test_a_document_is_outlined_alike_in_any_company(kind: str) -> None:
    text, others = nasty.make(kind, 2000), [nasty.make("unterminated_raw"), b"int f() { {{ ("]
    alone, among = outline(text), outline(others[0], text, others[1])
    base = len(others[0])
    cuts = slice(among.cut_first[1], among.cut_first[2])
    rows = slice(among.node_first[1], among.node_first[2])
    assert (among.cut_at[cuts] - base).tolist() == alone.cut_at.tolist()
    assert among.cut_level[cuts].tolist() == alone.cut_level.tolist()
    assert (among.node_start[rows] - base).tolist() == alone.node_start.tolist()
    assert (among.node_end[rows] - base).tolist() == alone.node_end.tolist()
    assert among.node_parent[rows].tolist() == alone.node_parent.tolist()


@pytest.mark.parametrize("limit", ["max_cuts", "max_nodes", "max_frames"])
def test_what_is_too_much_is_cut_by_lines(limit: str) -> None:
    """A document over a limit has no outline; those beside it keep theirs."""
    large = b"".join(b"namespace n { int f() { a(); } \n" for _ in range(2000)) + b"}" * 2000
    small = b"int f() { a(); }\nint g();\n"
    alone, most = outline(small), {limit: 100}
    found = outline(small, large, small, **most)
    cuts, rows = np.diff(found.cut_first).tolist(), np.diff(found.node_first).tolist()
    assert cuts == [len(alone.cut_at), 0, len(alone.cut_at)]
    assert rows == [len(alone.node_kind), 0, len(alone.node_kind)]
    assert len(outline(large).node_kind) == 4000
    assert len(outline(b"{" * 1_000_000).cut_at) == 0
