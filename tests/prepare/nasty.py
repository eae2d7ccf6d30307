"""Files that are hard to cut: each kind is a text that may be made as large as one likes.

In:    a kind and a size
Out:   UTF-8 text of about that many bytes, never less than one piece
Keeps: no NUL, as documents have none; the same bytes every time

A piece is repeated; @@ in it is its number. Kinds that are not repetitions are functions.
"""

from collections.abc import Callable
from typing import Final

PIECES: Final[dict[str, str]] = {
    "macros_above_functions": (
        "API(@@)\n// {\nPUSH((1), {2})\nint f@@() { return 1; }\n"
        "DECLARE(@@)\n\nPOP\n[[a]] int g@@()\n__attribute ((cold))\n{ }\n"
    ),
    "old_parameters": (
        "f@@(a, b)\nconst struct S *a; int (*b)();\n{ return 1; }\nPUSH(@@)\nenum E x@@;\n"
    ),
    "continued_line_comment": (
        "// a comment that goes on \\\n"
        "void not_code@@() { \\\n"
        '   "neither\n'
        "int f@@() { return 1; } // }}} \\\\\n"
        "int g@@() { return 2; }\n"
    ),
    "continued_block_comment": (
        "/* one \\\n"
        " * / still { inside \\\n"
        " ** */ int f@@() { /* } */ return '}'; }\n"
    ),
    "comment_ends": (
        "/**//***//*/ { */int f@@() { return 1 /*/ } */; }\n"
        "//*/ {\n"
    ),
    "raw_strings": (
        'const char* r@@ = R"x(a "quoted" { ) )y" \\ // /* )x";\n'
        'auto u@@ = u8R"(})" LR"--(")-" {{{ )--" UR"abcdefghijklmnop()" }}} '
        ')abcdefghijklmnop";\n'
        'int f@@() { return sizeof(R"({\n'
        '})"); }\n'
    ),
    "character_literals": (
        "int f@@(char c) {\n"
        "  switch (c) { case '{': case '\"': case '\\'': case '\\\\': case '}': return "
        "'\\x7d'; case L'{': return u8'}'; }\n"
        "  return '\\0' + U'\"' + 'ab{}';\n"
        "}\n"
    ),
    "digit_separators": (
        "int f@@() { return 1'000'000 + 0xFF'FFu + 0b1'0 + 1'0.0'1e+1'0 + .5e-3 + 0x1.8p-3; }\n"
    ),
    "digraphs": (
        "%:define X@@ <% %>\n"
        "int f@@(int a<::>) <% return a<:0:>; %>\n"
        "std::vector<::std::string> v@@;\n"
    ),
    "trigraph_text": (
        'int f@@() { puts("what??!??/??)"); return 0; } // ??/\n'
        "int g@@() ??< return 1; ??>\n"
    ),
    "long_directives": (
        "#define F@@(x) do { \\\n"
        "  if (x) { /* a comment \\\n"
        '  over lines */ g("{"); \\\n'
        "  } } while (0)  // and more \\\n"
        "  {{{ still the comment\n"
        "#  /* odd */  define G@@ {\n"
        "#include <a/*b>\n"
        "int f@@() { F@@(1); return 0; }\n"
    ),
    "braces_in_branches": (
        "int f@@(int a)\n"
        "#if A\n"
        "{ int b = 1;\n"
        "#elif defined(B)\n"
        "{ int b = 2;\n"
        "#else\n"
        "{ int b = 3;\n"
        "#endif\n"
        "  if (a)\n"
        "#ifdef C\n"
        "  { b++;\n"
        "#else\n"
        "  {\n"
        "    b--;\n"
        "#endif\n"
        "  }\n"
        "  return b;\n"
        "}\n"
    ),
    "dead_code": (
        "#if 0\n"
        "it's don't can't { \" ( [ /* not closed { */\n"
        "void f@@() { {{{\n"
        "#else\n"
        "int f@@() { return 1; }\n"
        "#endif\n"
        "#if 0\n"
        "}}}}}\n"
        "#endif\n"
    ),
    "nested_conditions": (
        "#if A\n"
        "# if B\n"
        "#  if C\n"
        "int f@@() {\n"
        "#  else\n"
        "int f@@(int) {\n"
        "#  endif\n"
        "# else\n"
        "int f@@(long) {\n"
        "# endif\n"
        "#else\n"
        "int f@@(char) {\n"
        "#endif\n"
        "  return 1;\n"
        "}\n"
    ),
    "half_functions": (
        "#define BEGIN(name) int name() {\n"
        "#define END }\n"
        "BEGIN(f@@)\n"
        "  int a = 1;\n"
        "  return a;\n"
        "END\n"
        "int g@@() { return 2; }\n"
    ),
    "more_closed_than_opened": (
        "MACRO_OPENS(f@@)\n"
        "  if (1) {\n"
        "    a();\n"
        "  }\n"
        "}\n"
        "int g@@()\n"
        "{\n"
        "  return 1;\n"
        "}\n"
    ),
    "more_opened_than_closed": (
        "int f@@()\n"
        "{\n"
        "  if (1) {\n"
        "    a();\n"
        "}\n"
        "int g@@()\n"
        "{\n"
        "  return 1;\n"
        "}\n"
    ),
    "old_c": (
        "int f@@(a, b)\n"
        "int a;\n"
        "char *b;\n"
        "{\n"
        "  return a + *b;\n"
        "}\n"
        "main@@(argc, argv)\n"
        "char **argv;\n"
        "{\n"
        "  return 0;\n"
        "}\n"
    ),
    "function_try": (
        "struct S@@ {\n"
        "  S@@(int a) try : x_(a), y_{a} { g(); } catch (int) { throw; } catch (...) { }\n"
        "  int f() noexcept try { return 1; } catch (...) { return 2; }\n"
        "  int x_, y_;\n"
        "};\n"
    ),
    "initialiser_lists": (
        "S@@::S@@(int a, std::function<int()> f = [] { return 1; })\n"
        "    : Base<int>{a}, a_{{1, 2}, {3}}, b_([&] { if (a) { return 1; } return 2; }()),\n"
        "      c_{[this] { return a_; }}, d_(S{}), Pack{a}...\n"
        "{ go(); }\n"
    ),
    "requires_clauses": (
        "template <class T> requires (sizeof(T) > 1) && requires(T t) { t.f(); { t.g() } "
        "-> C<int>; }\n"
        "int f@@(T t) requires requires { typename T::x; } && (T::y > 2) { return t.f(); }\n"
        "template <class T> requires C<T> struct S@@ { void f() requires (T::z) { } };\n"
    ),
    "concepts": (
        "template <class T> concept C@@ = requires(T a, T b) { { a + b } -> "
        "std::same_as<T>; a - b; } || std::integral<T>;\n"
        "void f@@(C@@ auto a) { g(a); }\n"
    ),
    "lambdas_in_defaults": (
        "int f@@(int a = [](int b) { return b ? 1 : 2; }(3), B c = {1, {2}}) { return a; }\n"
    ),
    "lambdas_in_templates": (
        "template <auto L = [] { return 1; }> struct S@@ { int f() { return "
        "std::map<int, decltype([](int) { return 2; })>{}.size(); } };\n"
    ),
    "operators": "".join(
        f"auto operator{name}(S@@ a) const {{ return a; }}\n"
        for name in ("()", "[]", "->", "->*", "+", "<<", ">>=", "<=>", "==", "&&", ",", " new",
                     " delete[]", "~", "!", '""_x', " co_await")
    ) + (
        "S@@::operator bool() const { return 1; }\n"
        "explicit operator std::vector<int>&() && { return v; }\n"
        "operator T (*)()() { return 0; }\n"
    ),
    "attributes": (
        '[[nodiscard, deprecated("no ]] { more")]] int f@@ [[gnu::pure]] (int a '
        "[[maybe_unused]]) [[x]] { [[likely]] return a; }\n"
        '__attribute__((section("{"))) void g@@() __attribute__((cold)) { }\n'
        "struct alignas(16) [[x]] __declspec(dllexport) S@@ final { int a; };\n"
    ),
    "trailing_things": (
        "auto f@@(int a) const volatile && noexcept(noexcept(g({1}))) -> decltype(a, "
        "std::vector<int>{}) { return {}; }\n"
        "decltype(auto) g@@() override final { return x; }\n"
        "auto (*h@@(int))(char) -> int;\n"
        "void (*k@@(int a))(int) { return 0; }\n"
    ),
    "nested_classes": (
        "class A@@ { public: struct B { union C { int a; float b; int f() { return a; } "
        "}; enum class D : char { x, y = 2 }; }; private: int f() { return 1; } };\n"
    ),
    "local_classes": (
        "int f@@(int a) {\n"
        "  struct L { int g() { return 1; } int h() const { struct M { void i() { } }; "
        "return 2; } };\n"
        "  class N : public L { };\n"
        "  return L().g();\n"
        "}\n"
    ),
    "anonymous": (
        "namespace { struct { int a; } s@@; union { int b; }; enum { X@@, Y@@ = 3, }; "
        "namespace { int f@@() { return 1; } } }\n"
    ),
    "extern_c": (
        'extern "C" { int f@@() { return 1; } }\n'
        'extern "C" int g@@() { return 2; }\n'
        'extern "C++" { namespace a { int h@@() { return 3; } } }\n'
    ),
    "inline_namespaces": (
        "inline namespace v@@ { namespace a::inline b::c { int f() { return 1; } } }\n"
        "namespace d@@ = v@@::a;\n"
    ),
    "modules": (
        "module;\n"
        "export module m@@:part;\n"
        "import <vector>;\n"
        "export { int f@@() { return 1; } }\n"
        "export namespace n { int g@@() { return 2; } }\n"
        "export template <class T> T h@@() { return {}; }\n"
    ),
    "coroutines": (
        "task<int> f@@() { for co_await (auto x : g()) { co_yield x; } co_return {1, 2}; }\n"
    ),
    "enums": (
        "enum class E@@ : std::uint8_t { a = 'a', b = (1 << 2), c [[deprecated]] = "
        "sizeof(int), d };\n"
        "enum struct F@@;\n"
        "enum { g@@ } h@@() { return g@@; }\n"
    ),
    "bitfields": (
        "struct S@@ { unsigned a : 3, : 0, b : sizeof(int) {1}; int c : 2 = 1; int f() { "
        "return a ? b : c; } };\n"
    ),
    "designated": "S s@@ = { .a = 1, .b = { .c = {2, 3}, [4] = 5 }, .d = f({6}), };\n",
    "labels": (
        "int f@@(int a) { switch (a) { case 1: { g(); } default: h(); break; } again: if "
        "(a--) goto again; else { } do { k(); } while (a); return a; }\n"
    ),
    "only_comments": (
        "// nothing here @@\n"
        "/* nor {\n"
        " here */\n"
    ),
    "windows_lines": (
        "int f@@(int a)\r\n"
        "{\r\n"
        "  // a \\\r\n"
        "  comment\r\n"
        '  return "\\\r\n'
        '"[a];\r\n'
        "}\r\n"
        "\r\n"
        "#define X \\\r\n"
        "  {\r\n"
    ),
    "old_mac_lines": (
        "// comment @@\rint f@@(int a)\r{\r#if A\r  return 1;\r#else\r  return 2;\r#endif\r}\r"
    ),
    "mixed_line_ends": (
        "int f@@() {\r  return 1;\n"
        "\r}\r\n"
        "\n"
        "\r\r"
    ),
    "tabs_and_feeds": (
        "\tint\tf@@()\t{\t\treturn\t1;\t}\n"
        "\f\n"
        "\v\tint g@@() {\f return 2;\v}\n"
    ),
    "not_ascii": (
        "// größer, 大きい, больше\n"
        "int größe@@(int 大) { return 大 + σ; } // …\n"
        'const char* s@@ = "naïve — ‘quotes’";\n'
    ),
    "four_bytes": (
        "// \U00010348\U0001d4d0 \U00020000\n"
        "int \U00020000@@() { return \U0001d4d0; }\n"
        'auto s@@ = u8"\U00010348{";\n'
    ),
    "latin_bytes": bytes(range(1, 256)).decode("latin-1") + "@@\n",
    "unterminated_string": (
        'int f@@() { return g("not closed); }\n'
        "int h@@() { return 'x; }\n"
    ),
    "unterminated_attributes": "[[ [[ a[[ [[gnu:: @@ ",
    "unterminated_raw": 'auto a@@ = R"x@@(never closed;\n',
    "unterminated_conditions": (
        "#if A@@\n"
        "int f@@() { return 1; }\n"
    ),
    "lonely_directives": (
        "#endif\n"
        "#else\n"
        "#elif X\n"
        "#\n"
        '# 1 "file" 2\n'
        "#if\n"
        "#endif\n"
        "int f@@() { return 1; }\n"
    ),
    "else_storm": (
        "#else\n"
        "{ {\n"
    ),
    "parens_not_closed": "int f@@(int a, (int b) { return (a; }\n",
    "parens_not_opened": "int f@@)) { return a); } )\n",
    "sql_in_strings": (
        "const char* q@@ = \"SELECT '{' FROM \\\"t\\\" WHERE a = '\\\\' -- }\" R\"sql(\n"
        "  CREATE FUNCTION f() { BEGIN '\n"
        ')sql";\n'
    ),
    "directives_only": (
        "#ifndef X@@\n"
        "#define X@@ 1\n"
        "#endif\n"
        "#pragma once\n"
        "#include <x@@.h>\n"
    ),
    "qt_class": (
        "class W@@ : public QWidget\n"
        "{\n"
        "    Q_OBJECT\n"
        "    Q_PROPERTY(int a READ a WRITE setA NOTIFY aChanged)\n"
        "public:\n"
        "    explicit W@@(QWidget *parent = nullptr) : QWidget(parent) {}\n"
        "    int a() const { return a_; }\n"
        "public slots:\n"
        "    void setA(int a) { if (a_ != a) { a_ = a; emit aChanged(a); } }\n"
        "signals:\n"
        "    void aChanged(int);\n"
        "Q_SIGNALS:\n"
        "    void other();\n"
        "private Q_SLOTS:\n"
        "    void on() { foreach (int x, list) { go(x); } }\n"
        "private:\n"
        "    int a_ = 0;\n"
        "    Q_DISABLE_COPY(W@@)\n"
        "};\n"
        "Q_DECLARE_METATYPE(W@@)\n"
    ),
    "test_macros": (
        "TEST(Suite, Name@@) {\n"
        '  EXPECT_EQ(1, 1) << "{";\n'
        "}\n"
        "TEST_F(Fixture, Name@@)\n"
        "{\n"
        "  ASSERT_TRUE(f());\n"
        "}\n"
        "BOOST_AUTO_TEST_CASE(name@@) { BOOST_CHECK(true); }\n"
        "DECLARE_THING(a@@)\n"
        "DECLARE_THING(b@@, { int x; return x; })\n"
        "int after@@() { return 1; }\n"
        "BENCHMARK(f)->Range(1, 2)\n"
    ),
    "objective_c": (
        "@interface Foo@@ : NSObject { int a; }\n"
        "- (void)bar:(int)x with:(NSString *)s;\n"
        "@end\n"
        "@implementation Foo@@\n"
        '- (void)bar:(int)x with:(NSString *)s { [[self alloc] initWith:@{@"k": @[@1]}]; '
        "^{ return 1; }(); }\n"
        "@end\n"
    ),
    "cuda": (
        "__global__ void __launch_bounds__(256, 2) k@@(float* a) { __shared__ float "
        "s[32]; a[threadIdx.x] = 1; }\n"
        "template <int N> __device__ __forceinline__ float d@@(float a) { return a; }\n"
        "void host@@() { k@@<<<dim3(1, 2), 256, 0, stream>>>(a); }\n"
    ),
    "inline_assembly": (
        'void f@@() { asm volatile ("mov { %0, %1 }" : "=r"(a) : "r"(b) : "memory"); '
        "__asm { mov eax, 1 } }\n"
    ),
    "old_templates": (
        "template <> template <class T, template <class> class U, int "
        "(*F)(std::vector<T>, int), bool B = (1 > 2)> int S@@<T>::f(int a) const { "
        "return a < 1 && a > 0; }\n"
    ),
    "statement_macros": (
        "int f@@() {\n"
        "  FOREACH (x, y) { g(); }\n"
        "  ASSERT(a)\n"
        "  if (a) b(); else if (c) { d(); } else e();\n"
        '  LOG(INFO) << [&] { return 1; }() << "}";\n'
        "  return 1;\n"
        "}\n"
    ),
    "no_spaces": (
        "int f@@(){if(a){b();}else{c();}for(;;){}return{};}class C@@{public:C@@(){}~C@@(){}};"
    ),
    "half_characters": "ééééééééééééééééééééééééééééééé\n",
}  # fmt: skip


def _line_of(piece: str) -> Callable[[int], str]:
    return lambda size: piece * max(1, size // len(piece.encode()))


def _nest(opens: str, inside: str, closes: str) -> Callable[[int], str]:
    def build(size: int) -> str:
        depth = max(1, size // len(opens + closes))
        return opens * depth + inside + closes * depth

    return build


BUILDERS: Final[dict[str, Callable[[int], str]]] = {
    "capitals_called_often": lambda size: "int " + "A" * (size // 2) + "<>()" * (size // 8),
    "empty_line": lambda size: "\n",
    "one_byte": lambda size: "x",
    "only_newlines": _line_of("\n"),
    "only_blanks": _line_of(" "),
    "only_open": _line_of("{"),
    "only_close": _line_of("}"),
    "only_semicolons": _line_of(";"),
    "only_quotes": _line_of('"'),
    "only_backslashes": _line_of("\\"),
    "only_slashes": _line_of("/ "),
    "only_raw": _line_of('R"('),
    "only_hashes": _line_of("#\n"),
    "byte_order_mark": lambda size: "\ufeff#include <a>\n"
    + _repeat("int f@@() { return 1; }\n", size),
    "braces_deep": _nest("{", "a;", "}"),
    "braces_deep_lines": _nest("{\n", "a;\n", "}\n"),
    "parens_deep": lambda size: "int x = " + _nest("(", "1", ")")(size) + ";\n",
    "functions_deep": _nest("struct S { void f() { ", "", "} };"),
    "namespaces_deep": _nest("namespace n {\n", "int f() { return 1; }\n", "}\n"),
    "conditions_deep": _nest("#if A\n{\n", "int f() { return 1; }\n", "#else\n}\n#endif\n"),
    "conditions_open": _line_of("#if A\n{ {\n"),
    "twins": lambda size: "#if A\n{\n" + "#else\n{\n" * (size // 16) + "#endif\n#if A\n}\n"
    + "#else\n}\n" * (size // 16) + "#endif\n",
    "template_storm": lambda size: "a" + "<b" * (size // 4) + ">" * (size // 4) + " c;\n"
    + "template " + "<" * (size // 4) + "\n",
    "one_long_line": lambda size: "int f() { return " + "1 + " * (size // 4) + "0; }",
    "long_identifier": lambda size: "int " + "x" * size + "() { return 1; }\n",
    "name_and_calls": lambda size: "A" * (size // 2) + "::B()\n" + "C()\n" * (size // 8),
    "keywords_on_lines": lambda size: "X" * (size // 2) + " const\n" + "const\n" * (size // 12),
    "long_function": lambda size: "int f()\n{\n" + _repeat("  g(@@);\n", size) + "}\n",
    "long_class": lambda size: "class C {\n"
    + _repeat("  int f@@() { return @@; }\n", size) + "};\n",
    "long_comment": lambda size: "/*" + "* / " * (size // 4) + "*/ int f() { return 1; }\n",
    "comment_not_closed": lambda size: "int f() { return 1; }\n/* " + "{ * / " * (size // 6),
    "table": lambda size: "static const int t[] = {\n"
    + _repeat("  {@@, 0x12, 'a'},\n", size) + "};\n",
    "table_on_a_line": lambda size: "char t[] = {" + _repeat("@@,", size) + "};",
    "string_on_a_line": lambda size: 'char s[] = "' + "\\x00ab{" * (size // 7) + '";',
    "no_newline": lambda size: "x" * size,
    "three_bytes_each": lambda size: "字" * (size // 3 + 1),
}  # fmt: skip

KINDS: Final = (*PIECES, *BUILDERS)


def _repeat(piece: str, size: int) -> str:
    count = max(1, size // len(piece.encode()))
    return "".join(piece.replace("@@", str(k)) for k in range(count))


def make(kind: str, size: int = 0) -> bytes:
    """The text of a kind, of about this many bytes.

    >>> make("only_open", 3)
    b'{{{'
    """
    text = _repeat(PIECES[kind], size) if kind in PIECES else BUILDERS[kind](size)
    return text.encode() or b"\n"
