"""Languages by path and by content."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadConfig
from penstock.kernels import PAD
from penstock.prepare.languages import (
    UNKNOWN,
    detect,
    guess_languages,
    language_of_path,
    number_of,
)
from penstock.records import LANGUAGES, Documents


def documents(texts: list[bytes], sources: list[str] | None = None) -> Documents:
    at = np.cumsum([0, *map(len, texts)])
    data = np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8)
    return Documents(data, at, at[:-1], at[1:], sources)


def guess(text: bytes) -> str:
    return LANGUAGES[guess_languages(documents([text]))[0]]


@pytest.mark.parametrize(
    ("path", "language"),
    [
        ("a/b.h", "cpp"), ("a/b.hpp", "cpp"), ("b.CC", "cpp"), ("k.cu", "cpp"), ("x.inl", "cpp"),
        ("x.c", "c"), ("x.py", "python"), ("x.pyi", "python"), ("X.java", "java"), ("x.go", "go"),
        ("x.rs", "rust"), ("x.mjs", "javascript"), ("x.jsx", "javascript"), ("x.ts", "typescript"),
        ("x.d.ts", "typescript"), ("x.tsx", "tsx"), ("README.md", "markdown"), ("x.rst", "text"),
        ("x.txt", "text"), ("CMakeLists.txt", "other"), ("dir\\Makefile", "other"),
        ("LICENSE", "text"), ("x.sql", "other"), ("x.json", "other"),
        ("s3://bucket/a.tar/b.py", "python"),
    ],
)  # fmt: skip
def test_a_path_tells_the_language(path: str, language: str) -> None:
    assert LANGUAGES[language_of_path(path)] == language


@pytest.mark.parametrize("path", ["", "x", "a.b/c", "x.unheardof", ".py/", "dir.py/file", "x."])
def test_some_paths_tell_nothing(path: str) -> None:
    assert language_of_path(path) == UNKNOWN


SNIPPETS = {
    "cpp": [
        b"#pragma once\n#include <vector>\nnamespace a {\ntemplate <class T>\nclass B {\n public:\n"
        b"  explicit B(T t);\n};\n}  // namespace a\n",
        b"/* A long licence.\n * Words and words and words, all of them English prose.\n */\n\n"
        b"class QString;\n\nnamespace ns { void f(const std::string& s); }\n",
        b"// only comments\n// of this kind\n",
    ],
    "c": [
        b'#include "qmap.h"\n',
        b"#ifndef A_H\n#define A_H\n#include <stddef.h>\ntypedef struct { int x; } a_t;\n"
        b"int f(const char *s);\n#endif\n",
    ],
    "python": [
        b"#!/usr/bin/env python3\nprint(1)\n",
        b'"""A docstring of words that are prose. And more."""\n\nimport os\nfrom a import b\n\n\n'
        b"def f(x):\n    if x:\n        return self.y\n",
    ],
    "java": [
        b"package a.b;\n\nimport java.util.List;\n\n/** Words. */\npublic class A extends B {\n"
        b"    @Override\n    public int f() { return 1; }\n}\n",
    ],
    "go": [
        b'package main\n\nimport (\n\t"fmt"\n)\n\nfunc main() {\n\tx := 1\n\tfmt.Println(x)\n}\n',
    ],
    "rust": [
        b"use std::fmt;\n\n/// Words.\n#[derive(Debug)]\npub struct A { x: i32 }\n\n"
        b"impl A {\n    pub fn f(&self) -> i32 { let mut y = 1; y += self.x; y }\n}\n",
    ],
    "javascript": [
        b"import a from './a';\n\nexport function f(x) {\n  const y = a(x);\n"
        b"  return y === 1;\n}\n",
        b"#!/usr/bin/env node\nconsole.log(1)\n",
    ],
    "typescript": [
        b"import { A } from './a';\n\nexport interface B {\n  name: string;\n  n: number;\n}\n\n"
        b"export const f = (x: number): string => String(x);\n",
    ],
    "markdown": [
        b"# Title\n\nSome words about it.\n\n```python\nimport os\ndef f(): pass\n```\n",
        b"# Title\n\nOnly words here, in one paragraph that says little.\n",
        b"Words [with a link](http://x) and **bold** ones, and more [links](y).\n",
    ],
    "text": [
        b"It was a dark and stormy night; the rain fell in torrents.\n",
        b"   adj 1: being five more [syn: {one hundred}, {105}, cv]\n   and words that follow it\n",
        b"\n\n",
        "Просто текст. Без кода.\n".encode(),
        b"import duties rose in the year after, and class struggle with them.\n",
    ],
    "other": [
        b"<?php\necho 1;\n",
        b'{"a": [1, 2, {"b": null}], "c": {"d": [3, 4]}}\n' * 8,
        b"#!/bin/sh\nls\n",
        b"<!DOCTYPE html>\n<html><body>Words of prose here.</body></html>\n",
        b"using System;\nusing System.Linq;\n\nnamespace A.B;\n\nlocal x = { y = 1 };\n",
    ],
}


@pytest.mark.parametrize(
    ("language", "text"), [(name, text) for name, texts in SNIPPETS.items() for text in texts]
)
def test_content_tells_the_language(language: str, text: bytes) -> None:
    assert guess(text) == language
    assert guess(b"\xef\xbb\xbf" + text) == language
    assert guess(text.replace(b"\n", b"\r\n")) == language


def test_detect_asks_the_path_then_the_content() -> None:
    texts = [b"#include <a>\n", b"#include <a>\n", b"# A\n\nwords\n"]
    found = detect(documents(texts, ["x.py", "x", "noname"]), "auto")
    assert [LANGUAGES[number] for number in found] == ["python", "c", "markdown"]
    assert found.dtype == np.uint8
    found = detect(documents(texts), "auto")
    assert [LANGUAGES[number] for number in found] == ["c", "c", "markdown"]
    found = detect(documents(texts, ["x.py", "x", "noname"]), "rust")
    assert [LANGUAGES[number] for number in found] == ["rust"] * 3
    assert len(detect(documents([]), "auto")) == 0


def test_an_unknown_language_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(BadConfig) as caught:
        number_of("pyhton")
    assert caught.value.what == "--language is 'pyhton'"
    known = "did you mean python? choose from auto, text, markdown, c, cpp, python,"
    assert caught.value.do.startswith(known)
    with pytest.raises(BadConfig, match="--language is ''"):
        detect(documents([b"x"]), "")


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=200), st.sampled_from(
    [text for texts in SNIPPETS.values() for text in texts])), max_size=6))  # fmt: skip
def test_a_guess_depends_on_the_document_alone(texts: list[bytes]) -> None:
    together = guess_languages(documents(texts))
    assert [LANGUAGES[number] for number in together] == [guess(text) for text in texts]


def test_only_the_beginning_is_looked_at() -> None:
    words = b"It was a dark and stormy night and the rain fell. " * 400
    assert guess(words + b"\n#include <a>\n" * 1000) == "text"
    assert guess(b"x" * 1_000_000) == "text"
    assert guess(b"/* " * 500_000) == "cpp"
