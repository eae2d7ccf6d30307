"""What tests of several stages share: a tiny tokenizer, and sources worth chunking."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

pytest_plugins = ["services.fixtures"]

WORDS: Final = (
    *("count", "index", "table", "value", "total", "order"),
    *("first", "chunk", "token", "block", "record", "source"),
)
CPP: Final = """\
/// Adds {a} to {b}.
template <class T>
int {a}_{k}(T {b}, int n = {n}) {{
    for (int i = 0; i < n; ++i) {{
        if ({b} > i) {{ {b} += i * {n}; }}  // {c}
    }}
    return static_cast<int>({b});
}}

"""
BODIES: Final = {
    ".cpp": CPP,
    ".h": "struct {a}_{k} {{\n    int {b} = {n};\n    int {c}() {{ return {b} + {n}; }}\n}};\n\n",
    ".py": "def {a}_{k}({b}, n={n}):\n    for i in range(n):\n        {b} += i  # {c}\n"
    "    return {b}\n\n\n",
    ".java": "class {a}_{k} {{\n    int {b}(int n) {{\n        return n * {n};\n    }}\n}}\n\n",
    ".go": "func {a}_{k}({b} int) int {{\n\tfor i := 0; i < {n}; i++ {{\n\t\t{b} += i\n\t}}\n"
    "\treturn {b} // {c}\n}}\n\n",
    ".rs": "fn {a}_{k}({b}: i32) -> i32 {{\n    let {c} = {b} + {n};\n    {c} * 2\n}}\n\n",
    ".js": "function {a}_{k}({b}) {{\n  const {c} = {b} + {n};\n  return {c};\n}}\n\n",
    ".ts": "export function {a}_{k}({b}: number): number {{\n  return {b} + {n};\n}}\n\n",
    ".md": "## {a} {k}\n\nThe {b} of the {c} is {n}. It is known by its {a}; é is a letter.\n\n",
    ".txt": "The {a} of the {b} was {n}. Then it was {k}, and nobody knew of the {c}.\n\n",
}  # fmt: skip
LANGUAGE: Final = {
    ".cpp": "cpp", ".h": "cpp", ".py": "python", ".java": "java", ".go": "go", ".rs": "rust",
    ".js": "javascript", ".ts": "typescript", ".md": "markdown", ".txt": "text",
}  # fmt: skip

MakeSources = Callable[[int, int], dict[str, bytes]]


def make_sources(seed: int, count: int) -> dict[str, bytes]:
    """Files of ten languages, one function after the other, by their names; no two are alike."""
    dice = random.Random(seed)
    files = {}
    for number in range(count):
        suffix = list(BODIES)[number % len(BODIES)]
        parts = []
        for _ in range(dice.choice((1, 2, 3, 5, 12))):
            a, b, c = dice.sample(WORDS, 3)
            k, n = dice.randrange(10**9), dice.randrange(10**6)
            parts.append(BODIES[suffix].format(a=a, b=b, c=c, k=k, n=n))
        text = "".join(parts)
        if suffix == ".cpp" and number % 3 == 0:
            text = f"#include <{dice.choice(WORDS)}>\n\nnamespace deep::{WORDS[3]} {{\n\n{text}}}\n"
        files[f"{WORDS[number % 5]}/file{number:03d}{suffix}"] = text.encode()
    return files


@pytest.fixture(scope="session")
def sources() -> MakeSources:
    """Makes files: `sources(seed, count)`."""
    return make_sources


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 tokens, trained on such files."""
    from penstock.tokenize.train import TrainConfig, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    sample = folder / "sample.txt"
    sample.write_bytes(b"".join(make_sources(1, 40).values()))
    train_tokenizer([sample], folder / "tokenizer", TrainConfig(vocab_size=400))
    return folder / "tokenizer"
