"""Functions are seen whole, whatever their heads are made of.

Heads are put together from parts, so that it is known where each function begins and ends: macros
and attributes before it, templates and constraints, return types, names, parameters (those of old
declared after the list), what stands between the list and the body, initialisers and handlers.
"""

import random
from collections.abc import Callable

import numpy as np
import pytest

from penstock.arrays import Int64s
from penstock.kernels import PAD
from penstock.prepare.outline.cpp import outline_cpp
from penstock.prepare.outline.outline import CLASS, FUNCTION

SEEDS = 20
FUNCTIONS = 50

LEADS = (
    "[[nodiscard]] ", "[[gnu::cold]]\n", "__attribute__((cold)) ", "__attribute__ ((cold))\n",
    "__attribute ((noinline))\n", "__attribute__((a)) __attribute((b(1, 2)))\n",
    "__declspec(dllexport) ", "__declspec(dllexport)\n", "API_EXPORT ", "API_EXPORT\n",
    "API_EXPORT(1) ", "API_EXPORT(a, \"b\")\n", "PUSH(1)\n  POP((2), {3})\n",
    'extern "C" ', "alignas(16)\n", "_Pragma(\"once\")\n", "// why\nAPI(1)\n// not\n",
)  # fmt: skip
TEMPLATES = (
    "template <class T>\n", "template <class T, int N = (1 > 0)> ",
    "template <class T> template <class U>\n", "template <E<A<T>{}, int> = 1>\n",
    "template <class T> requires C<T>\n", "template <class T>\n  requires (sizeof(T) > 1)\n",
    "template <class T> requires (A<T>) && C<T> || (!D<T>) ",
    "template <class T> requires requires (T t) { t + 1; }\n",
    "template <class T> requires C<T> && requires { typename T::x; { 1 } -> D; }\n",
    "template <class T> requires C<T> and requires (T t) { t; }\n",
    "template(typename T)(\n  requires C<T> && (!D<T>))\n",
)  # fmt: skip
RETURNS = (
    "int ", "void\n", "static inline const struct S *", "enum E ", "union U *\n", "std::map<a, b> ",
    "auto ", "decltype(a + b) ", "typename A<T>::type &", "unsigned long\n", "struct S\n",
    "constexpr bool ", "virtual A::B<(1 < 2)> ", "typeof(a) ",
)  # fmt: skip
NAMES = ("f", "A::f", "A<T>::f", "operator+", "A::operator()", "operator[]", 'operator""_x')
PARAMETERS = (
    "()", "(void)", "(int a, T &&... b)", "(void (*f)(int), B b = {1, {2}})",
    "(A a = [](int) { return 1; }(),\n      int c)", "(struct S *s, enum E e)",
)  # fmt: skip
QUALIFIERS = ("", "", " const", " const &", " &&", " noexcept", " noexcept(N > 1)", " throw()")
LATER = (
    "", "", " override", " final", " -> int", " -> T&", " -> A<T> *", " -> decltype(a->b)",
    "\n    -> CPP_ret(T<R>)( //\n        requires C<T> && (!D<T>))", " -> CPP_ret(T &)(requires A)",
)  # fmt: skip
CLAUSES = (
    "", "", "", " requires C<T>", " requires (sizeof(T) > 1)", "\n  requires C<T> && (N > 1)",
    " requires requires (T t) { t; }", " requires (A<T>) || requires { { 1 } -> D; }",
)  # fmt: skip
LAST = (
    "", "", " __attribute__((cold))", "\n  __attribute ((cold))\n", " LOCKS(mutex)",
    "\n  LOCKS(mutex)\n", " LATER", " [[a]]\n", " asm(\"f\")",
)  # fmt: skip
BODIES = ("{ }", "\n{\n  if (a) { b(); }\n  return C{1};\n}", " try { } catch (int) { }")
OLD = (
    "int a;", "const char *a;", "struct S *a;", "enum E a;", "union U a, *b;", "char **a, *b[];",
    "int (*a)();", "volatile struct S a;", "register unsigned a;", "const struct S *const a;",
    "size_t a; /* { */", "int (*a)(const char *, struct S), b[3];",
)  # fmt: skip
ATTRIBUTES = ("", "API_EXPORT(1)\n", "__attribute__((cold))\n", "API_EXPORT\n")
CLASSES = (
    "struct S", "class API_EXPORT S : public B<(1 > 0)>", "ALIGNED16(class) S : public B",
    "ALIGNED16 (struct)\nS", "template <class T> requires (A<T>) && C<T>\nstruct S final",
    "API(1)\nclass alignas(8) S", "template <class T> requires (A) || requires { a; }\nclass S",
)  # fmt: skip
BETWEEN = (
    "", "int x;\n", "\n", "/* int no() { */\n", "#define X {\n", "int g(int a);\n", "struct S s;\n",
    "#if A\n#endif\n", "DECLARE(a);\n", "enum E { a, b };\n", "static int t[] = { 1, 2 };\n",
    "using A = B;\n", "DECLARE(a)\n\n", "extern const struct S *s;\n",
)  # fmt: skip


def constructor(rng: random.Random) -> str:
    head = rng.choice(["S::S", "N::S<T>::S"])
    head += rng.choice(["()", "(int a)", "(S &&s) noexcept"])
    body = rng.choice(["{ }", "\n{\n  b();\n}\n"]).rstrip("\n")
    inits = rng.choice(["a(1)", "a{1}, B<int>{2}", "a([&] { return 1; }()),\n  b_{(2)}"])
    handler = rng.choice(["", " try"])
    return f"{head}{handler} : {inits} {body}" + (" catch (...) { }" if handler else "")


def function(rng: random.Random) -> str:
    lead = "".join(rng.sample(LEADS, rng.choice([0, 0, 1, 1, 2])))
    if lead.startswith("//"):
        lead = lead.partition("\n")[2]  # a comment goes with a function, but is not of it
    template = rng.choice(TEMPLATES) if rng.random() < 0.5 else ""
    if rng.random() < 0.15:
        return lead + template + constructor(rng)
    if rng.random() < 0.1:
        name = rng.choice(["S::~S", "S::operator bool", "A::operator B<C>&"])
        return f"{lead}{name}(){rng.choice(QUALIFIERS)}{rng.choice(LAST)}{rng.choice(BODIES)}"
    returns, name = rng.choice(RETURNS), rng.choice(NAMES)
    if any(word in returns for word in ("struct", "union", "enum")):
        name = name.replace("<T>", "")  # `struct S A<T>` could be a class
    head = returns + name + rng.choice(PARAMETERS)
    tail = rng.choice(QUALIFIERS) + rng.choice(LATER)
    tail += rng.choice(CLAUSES) if template else rng.choice(LAST)
    return lead + template + head + tail + rng.choice(BODIES)


def old_function(rng: random.Random) -> str:
    lead = rng.choice(ATTRIBUTES)
    returns = rng.choice(["", "int ", "static const struct S *", "void\n", "enum E\n"])
    declared = rng.sample(OLD, rng.randint(1, 4))
    between = rng.choice(["\n", "\n    ", " "]) if returns else "\n"
    return f"{lead}{returns}f(a, b, c)\n{between.join(declared)}\n{{\n  return g(a);\n}}"


def write(
    rng: random.Random, make: Callable[[random.Random], str]
) -> tuple[bytes, list[tuple[int, int]]]:
    """A file of functions, and where each of them begins and ends."""
    text, places = "", []
    for _ in range(FUNCTIONS):
        text += rng.choice(BETWEEN)
        body = make(rng)
        places.append((len(text), len(text) + len(body)))
        text += body + rng.choice(["\n", "\n\n", "\n"])
    return text.encode(), places


def found(text: bytes, kind: int = FUNCTION) -> list[tuple[int, int]]:
    data = np.frombuffer(text + bytes(PAD), np.uint8)
    starts: Int64s = np.zeros(1, np.int64)
    outline = outline_cpp(data, starts, starts + len(text))
    rows = outline.node_kind == kind
    return list(
        zip(outline.node_start[rows].tolist(), outline.node_end[rows].tolist(), strict=True)
    )


def check(text: bytes, places: list[tuple[int, int]]) -> None:
    """Each function is a node, and nodes that are wider hold no more than one function."""
    nodes = found(text)
    for start, end in places:
        assert (start, end) in nodes, text[max(0, start - 80) : end].decode()
    owned = sorted(places)
    for start, end in nodes:
        inside = [place for place in owned if start < place[1] and place[0] < end]
        assert len(inside) <= 1, text[start:end].decode()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_heads_of_cpp(seed: int) -> None:
    check(*write(random.Random(seed), function))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_heads_of_old_c(seed: int) -> None:
    check(*write(random.Random(seed), old_function))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_heads_in_classes(seed: int) -> None:
    """Members are found in a class, whatever stands before the word `class`, or around it."""
    text, places = write(random.Random(seed), function)
    head = CLASSES[seed % len(CLASSES)]
    before = f"{head} {{\n".encode()
    text = before + text + b"};\nint last() { }\n"
    places = [(start + len(before), end + len(before)) for start, end in places]
    check(text, [*places, (len(text) - 15, len(text) - 1)])
    assert found(text, CLASS)[0][1] == len(text) - 17


@pytest.mark.parametrize(
    "text",
    [
        "int requires(int a) { return a; }",
        "static char *requires(int a)\n{\n  return 0;\n}",
        "struct s *\nrequires (a)\n  int a;\n{\n  return 0;\n}",
        "int namespace(int a) { return a; }",
        "struct namespace *f(struct namespace *namespace) { return namespace; }",
        "int\nnamespace (int a)\n{\n  return a;\n}",
        '[[deprecated("a]]b")]] int f() { return 1; }',
        '[[deprecated("a;\\"]]{b")]]\nint f() { return 1; }',
    ],
)
def test_words_that_are_names_in_c_and_strings_in_attributes(text: str) -> None:
    document = f"int before;\n{text}\nint after() {{ return 1; }}\n".encode()
    data = np.frombuffer(document + bytes(PAD), np.uint8)
    ends: list[Int64s] = [np.array([at], np.int64) for at in (0, len(document))]
    outline = outline_cpp(data, *ends)
    assert outline.node_kind.tolist() == [FUNCTION, FUNCTION]
    assert outline.node_start[0] == 12
    assert outline.node_end[0] in (12 + len(text), 13 + len(text))
