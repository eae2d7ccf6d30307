"""Compare tokenizers on files: how well they compress each language, how fast they are.

In:    tokenizers, files of text
Out:   for each tokenizer and language: bytes per token, tokens per word, MB per second
Keeps: one block of each file in memory
Never: counts what was not encoded
"""

import codecs
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import BadInput
from penstock.ingest.files import COMPRESSED, LineFile, open_bytes
from penstock.ingest.jsonl import Columns, LineParser
from penstock.tokenize.chunks import Piece, list_files, open_parquet, read_batches
from penstock.tokenize.pretokenize import MAX_LINE_BYTES
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
    text_field: str = "text",
    max_bytes_per_file: int | None = None,
) -> list[Score]:
    """Encode the files with each tokenizer."""
    scores: dict[tuple[str, str], Score] = {}
    for path in list_files(inputs):
        for column in _columns(path, text_field, max_bytes_per_file):
            size = pc.sum(pc.binary_length(column)).as_py() or 0
            words = pc.sum(pc.count_substring_regex(column, r"[^\s]+")).as_py() or 0
            for name, tokenizer in tokenizers.items():
                key = (name, language_of(path))
                score = scores.setdefault(key, Score(*key))
                began = time.perf_counter()
                encoded = tokenizer.encode_column(column)
                score.seconds += time.perf_counter() - began
                score.tokens += sum(len(chunk.values) for chunk in encoded.chunks)
                score.text_bytes += size
                score.words += words
    if not scores:
        raise BadInput("there is no text to compare on", do="name files with text")
    return sorted(scores.values(), key=lambda score: (score.language, -score.bytes_per_token))


def _columns(path: Path, text_field: str, most: int | None) -> Iterator[pa.Array]:
    """The texts of a file, some at a time, up to `most` bytes."""
    left = (1 << 62) if most is None else most
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    if name.suffix.lower() == ".parquet":
        source = _parquet(path, text_field)
    elif name.suffix.lower() in (".jsonl", ".ndjson"):
        source = _jsonl(path, text_field)
    else:
        source = _text(path, left)
    for column in source:
        ends = np.cumsum(pc.binary_length(column).to_numpy(zero_copy_only=False))
        kept = column.slice(0, int(np.searchsorted(ends, left, side="right")))
        if len(kept):
            yield kept
            left -= int(ends[len(kept) - 1])
        if len(kept) < len(column):
            return


def _parquet(path: Path, column: str) -> Iterator[pa.Array]:
    for group in range(open_parquet(path).num_row_groups):
        piece = Piece(path, "parquet", group, group + 1, 0)
        for batch in read_batches(piece, column):
            texts = batch.column(0).cast(pa.large_binary()).to_pylist()
            clean = [text.decode("utf-8", "replace") for text in texts if text is not None]
            yield pa.array(clean, pa.large_string())


def _jsonl(path: Path, field: str) -> Iterator[pa.Array]:
    parser = LineParser(field, 0, 0, MAX_LINE_BYTES)
    columns = Columns.allocate(2 * _BLOCK_BYTES, 1024)
    file = LineFile(path, max_line_bytes=MAX_LINE_BYTES, block_bytes=_BLOCK_BYTES)
    try:
        while (block := file.next_block() or file.fragment()) is not None:
            at = block.start
            while at < block.stop:
                columns.clear()
                at = parser.take(
                    block, at, 0, columns,
                    max_train_rows=1 << 62, max_text_bytes=1 << 62, max_rejects=4096,
                ).stop  # fmt: skip
                text = columns.text[: columns.text_bytes].copy()
                offsets = columns.text_at[: columns.rows + 1].copy()
                yield pa.LargeStringArray.from_buffers(
                    columns.rows, pa.py_buffer(offsets), pa.py_buffer(text)
                )
    finally:
        file.close()


def _text(path: Path, most: int) -> Iterator[pa.Array]:
    """Blocks of a file, each ending with a line where it has lines, never inside a character."""
    reader = open_bytes(path)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    held, left = "", most
    try:
        while left > 0 and (got := reader.read_into(buffer[: min(left, len(buffer))])):
            left -= got
            text = held + decoder.decode(bytes(buffer[:got]))
            cut = text.rfind("\n") + 1 or len(text)
            held = text[cut:]
            if cut:
                yield pa.array([text[:cut]], pa.large_string())
        if left > 0:
            held += decoder.decode(b"", True)
    finally:
        reader.close()
    if held:
        yield pa.array([held], pa.large_string())
