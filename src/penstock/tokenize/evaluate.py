"""Compare tokenizers on files: how well they compress each language, how fast they are.

In:    tokenizers; files, trees, archives, addresses (`corpus`)
Out:   for each tokenizer and language: bytes per token, tokens per word, MB per second
Keeps: one piece of an input in memory
Never: counts what was not encoded
"""

import codecs
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import BadInput
from penstock.ingest.formats import Piece, ReadConfig
from penstock.ingest.open import COMPRESSED
from penstock.options import config_of
from penstock.records import Documents
from penstock.tokenize.corpus import END, Corpus, Tally, TextRange
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events, shown

_BLOCK_BYTES = 4 << 20
_TELL_S = 0.2

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

    >>> [language_of(Path(name)) for name in ("a/b.hpp", "german.txt.gz", "c++/vector")]
    ['C and C++', 'german', 'other']
    """
    name = path.with_suffix("") if path.suffix in COMPRESSED else path
    for language, suffixes in LANGUAGES.items():
        if name.suffix.lower() in suffixes:
            return language
    return name.stem if name.suffix else "other"


def compare(
    tokenizers: Mapping[str, Any],
    inputs: Sequence[str | os.PathLike[str]],
    *,
    read: ReadConfig | None = None,
    max_bytes_per_file: int | None = None,
    events: Events | None = None,
) -> list[Score]:
    """Encode the documents of inputs with each tokenizer; what is refused becomes a warning."""
    with shown(events, "tokenizer") as told:
        return _compare(
            tokenizers, inputs, config_of("read", read, ReadConfig), max_bytes_per_file, told
        )


def _compare(
    tokenizers: Mapping[str, Any], inputs: Sequence[str | os.PathLike[str]], read: ReadConfig,
    max_bytes_per_file: int | None, events: Events,
) -> list[Score]:  # fmt: skip
    loaded = {name: Tokenizer.load(given) for name, given in tokenizers.items()}
    for tokenizer in loaded.values():
        tokenizer.encode_column(pa.array([""]))  # an engine is made by its first call: no speed
    scores: dict[tuple[str, str], Score] = {}
    corpus, tally = Corpus(inputs, read), Tally()
    most = END if max_bytes_per_file is None else max_bytes_per_file
    whole = sum(min(size, most) for _, _, size, _ in corpus.files())
    done, tell_at = 0, time.monotonic() + _TELL_S
    for language, column in _columns(corpus, tally, most):
        size = pc.sum(pc.binary_length(column)).as_py() or 0
        words = pc.sum(pc.count_substring_regex(column, r"[^\s]+")).as_py() or 0
        for name, tokenizer in loaded.items():
            key = (name, language)
            score = scores.setdefault(key, Score(*key))
            began = time.perf_counter()
            encoded = tokenizer.encode_column(column)
            score.seconds += time.perf_counter() - began
            score.tokens += sum(len(chunk.values) for chunk in encoded.chunks)
            score.text_bytes += size
            score.words += words
        done += size
        if time.monotonic() >= tell_at:
            tell_at = time.monotonic() + _TELL_S
            read_so_far, refused = tally.documents.total(), tally.refused.total()
            events.emit(
                "progress", at=min(done, whole), size=whole, read=read_so_far, refused=refused
            )
    corpus.check(tally)
    if told := tally.told():
        events.emit("warn", message=f"refused: {told}")
    if not scores:
        raise BadInput(
            "there is no text to compare on",
            where=", ".join(map(str, inputs)),
            why=f"no row has at most {most:,} bytes",
            do="give more with --max_bytes_per_file",
        )
    return sorted(scores.values(), key=lambda score: (score.language, -score.bytes_per_token))


def _columns(corpus: Corpus, tally: Tally, most: int) -> Iterator[tuple[str, pa.Array]]:
    """Texts of one language, some at a time; of each file no more than `most` bytes."""
    for origin in corpus.inputs:
        left = most
        with contextlib.closing(corpus.work(origin)) as works:
            for work in works:
                for found in corpus.read(work, tally) if isinstance(work, Piece) else [work]:
                    if isinstance(found, TextRange):
                        tally.take_text(found.input)
                        for block in _blocks(found, most):
                            yield language_of(Path(found.path)), block
                    elif origin.unit == "members":
                        yield from _by_language(found, most)
                    else:
                        column = _column(found)
                        ends = found.at[1:] - found.at[0]
                        kept = int(np.searchsorted(ends, left, side="right"))
                        if kept:
                            yield language_of(Path(origin.name)), column.slice(0, kept)
                            left -= int(ends[kept - 1])
                        left = left if kept == len(found) else 0
                if left <= 0:
                    break


def _column(documents: Documents) -> pa.Array:
    at, data = np.ascontiguousarray(documents.at), documents.data
    return pa.LargeStringArray.from_buffers(len(documents), pa.py_buffer(at), pa.py_buffer(data))


def _by_language(documents: Documents, most: int) -> Iterator[tuple[str, pa.Array]]:
    """Files and members, each cut to `most` bytes."""
    languages = np.array([language_of(Path(source)) for source in documents.sources or ()])
    column = _column(documents)
    if (np.diff(documents.at) > most).any():
        cut = [documents.text(k)[:most].decode("utf-8", "ignore") for k in range(len(documents))]
        column = pa.array(cut, pa.large_string())
    for language in dict.fromkeys(languages.tolist()):
        yield language, column.take(pa.array(np.flatnonzero(languages == language)))


def _blocks(text: TextRange, most: int) -> Iterator[pa.Array]:
    """A long text, in blocks that end with a line where there are lines, never in a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    held, left = "", most
    with text.open() as reader:
        while left > 0 and (got := reader.read_into(buffer[: min(left, len(buffer))])):
            left -= got
            block = held + decoder.decode(bytes(buffer[:got]))
            cut = block.rfind("\n") + 1 or len(block)
            held = block[cut:]
            if cut:
                yield pa.array([block[:cut]], pa.large_string())
    if left > 0:
        held += decoder.decode(b"", True)
    if held:
        yield pa.array([held], pa.large_string())
