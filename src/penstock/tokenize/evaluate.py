"""Compare tokenizers on files: how well they compress each language, how fast they are.

In:    tokenizers, files of text
Out:   for each tokenizer and language: bytes per token, tokens per word, MB per second
Keeps: one block of each file in memory
Never: counts what was not encoded
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.ingest.files import COMPRESSED, open_bytes
from penstock.tokenize.chunks import list_files
from penstock.tokenize.tokenizer import Tokenizer

_BLOCK_BYTES = 4 << 20

LANGUAGES = {
    "C and C++": (".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp", ".hxx", ".inl", ".ipp"),
    "Python": (".py", ".pyi"),
    "Java": (".java",),
    "Go": (".go",),
    "Rust": (".rs",),
    "JavaScript and TypeScript": (".js", ".jsx", ".mjs", ".ts", ".tsx"),
    "Markdown": (".md", ".markdown"),
    "JSON": (".json", ".jsonl", ".ndjson"),
}


@dataclass(slots=True)
class Score:
    """What one tokenizer did with one language."""

    tokenizer: str
    language: str
    text_bytes: int = 0
    tokens: int = 0
    words: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_token(self) -> float:
        """The higher, the shorter the sequences."""
        return self.text_bytes / self.tokens if self.tokens else 0.0

    @property
    def fertility(self) -> float:
        """Tokens for each word: what stands between spaces."""
        return self.tokens / self.words if self.words else 0.0

    @property
    def mb_per_s(self) -> float:
        return self.text_bytes / 1e6 / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "tokenizer": self.tokenizer,
            "language": self.language,
            "text_bytes": self.text_bytes,
            "tokens": self.tokens,
            "bytes_per_token": round(self.bytes_per_token, 4),
            "fertility": round(self.fertility, 4),
            "mb_per_s": round(self.mb_per_s, 1),
        }


def language_of(path: Path) -> str:
    """The language that a file's name tells, or the name itself: "english.txt" is "english".

    >>> language_of(Path("a/b.hpp")), language_of(Path("german.txt.gz"))
    ('C and C++', 'german')
    """
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    for language, suffixes in LANGUAGES.items():
        if name.suffix.lower() in suffixes:
            return language
    return name.stem


def compare(
    tokenizers: dict[str, Tokenizer],
    inputs: Sequence[Path],
    *,
    max_bytes_per_file: int | None = None,
) -> list[Score]:
    """Encode the files with each tokenizer."""
    scores: dict[tuple[str, str], Score] = {}
    for path in list_files(inputs):
        for text in _blocks(path, max_bytes_per_file):
            column = pa.array([text], pa.large_string())
            size, words = len(text.encode()), len(re.findall(r"\S+", text))
            for name, tokenizer in tokenizers.items():
                key = (name, language_of(path))
                score = scores.setdefault(key, Score(*key))
                began = time.perf_counter()
                encoded = tokenizer.encode_column(column)
                score.seconds += time.perf_counter() - began
                score.tokens += sum(len(chunk.values) for chunk in encoded.chunks)
                score.text_bytes += size
                score.words += words
    return sorted(scores.values(), key=lambda score: (score.language, -score.bytes_per_token))


def _blocks(path: Path, most: int | None) -> Iterator[str]:
    """A file's text in blocks that end with a line, where it has lines."""
    reader = open_bytes(path)
    left = (1 << 62) if most is None else most
    buffer = np.empty(_BLOCK_BYTES, np.uint8).data
    held = b""
    try:
        while left > 0 and (got := reader.read_into(buffer[: min(left, len(buffer))])):
            left -= got
            data = held + bytes(buffer[:got])
            cut = data.rfind(b"\n") + 1
            held = data[cut:] if cut else b""
            yield (data[:cut] if cut else data).decode("utf-8", "replace")
    finally:
        reader.close()
    if held:
        yield held.decode("utf-8", "replace")
