"""Other ways to cut C++ under a budget of tokens, each from JSON lines to parquet files.

    python benchmarks/chunk_rivals.py NAME INPUT FOLDER TOKENIZER MAX_TOKENS WORKERS

braces       document 000: keep what fits, else split at braces of depth 0; JSON lines, then parquet
tree_sitter  a walk of the syntax tree: siblings are merged up to the budget, what is too large is
             entered; tokens of a node are counted through the offsets of one encoding
semantic     semantic-text-splitter's CodeSplitter with tree-sitter-cpp, trim=False

All count with Hugging Face's tokenizers, in a pool of WORKERS processes, and write zstd parquet
files of 50,000 rows. One token of a chunk is left for the trainer, as penstock does.
"""

import json
import multiprocessing
import os
import random
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

ROWS_PER_FILE = 50_000
LINES_AT_ONCE = 64
RESERVE = 1

Split = Callable[[list[str]], list[list[str]]]
"""Some documents, and the chunks of each."""


# The top-level braces of document 000


def open_braces(tokenizer: Tokenizer, budget: int) -> Split:
    brace = re.compile("[{}]")

    def parts(text: str) -> list[str]:
        depth = at = 0
        found = []
        for match in brace.finditer(text):
            if match[0] == "{":
                depth += 1
            elif depth > 0:
                depth -= 1
                if depth == 0:
                    found.append(text[at : match.end()])
                    at = match.end()
        if at < len(text):
            found.append(text[at:])
        return found

    def cut(text: str) -> list[str]:
        pieces = parts(text)
        counts = map(len, tokenizer.encode_batch_fast(pieces, add_special_tokens=False))
        chunks: list[str] = []
        held: list[str] = []
        tokens = 0
        for piece, count in zip(pieces, counts, strict=True):
            if held and tokens + count > budget:
                chunks.append("".join(held))
                held, tokens = [], 0
            held.append(piece)
            tokens += count
        return [*chunks, "".join(held)]

    def split(texts: list[str]) -> list[list[str]]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [
            [text] if len(encoding) <= budget else cut(text)
            for text, encoding in zip(texts, found, strict=True)
        ]

    return split


# A walk of the syntax tree


def open_tree_sitter(tokenizer: Tokenizer, budget: int) -> Split:
    tree_sitter = import_module("tree_sitter")
    language = tree_sitter.Language(import_module("tree_sitter_cpp").language())
    parser = tree_sitter.Parser(language)

    def cut(data: bytes, token_at: npt.NDArray[np.int64]) -> list[int]:
        """Where chunks begin, in bytes."""
        count_to = np.searchsorted
        cuts = [0]
        base = 0  # tokens before the chunk that is being filled

        def begin(at: int) -> None:
            nonlocal base
            cuts.append(at)
            base = int(count_to(token_at, at))

        def by_tokens(start: int, end: int) -> None:
            """No node is left to enter: lines if they fit, else anywhere between tokens."""
            while int(count_to(token_at, end)) - base > budget:
                most = int(token_at[base + budget])
                line = data.rfind(b"\n", max(start, cuts[-1]) + 1, most) + 1
                at = line or most
                while at < len(data) and data[at] & 0xC0 == 0x80:
                    at -= 1
                begin(at if at > cuts[-1] else most)

        stack = [parser.parse(data).root_node]
        while stack:
            node = stack.pop()
            end = node.end_byte
            if int(count_to(token_at, end)) - base <= budget:
                continue  # it is merged with what came before
            start = node.start_byte
            tokens = int(count_to(token_at, end)) - int(count_to(token_at, start))
            if tokens <= budget:
                # indentation goes with what it indents
                line = data.rfind(b"\n", cuts[-1], start) + 1
                at = line if line and not data[line:start].strip() else start
                if at > cuts[-1]:
                    begin(at)
                    if int(count_to(token_at, end)) - base <= budget:
                        continue
            if node.child_count:
                stack.extend(reversed(node.children))
            else:
                by_tokens(start, end)
        by_tokens(cuts[-1], len(data))
        return cuts

    def split(texts: list[str]) -> list[list[str]]:
        chunks = []
        found = tokenizer.encode_batch(texts, add_special_tokens=False)
        for text, encoding in zip(texts, found, strict=True):
            if len(encoding) <= budget:
                chunks.append([text])
                continue
            data = text.encode()
            at = np.array(encoding.offsets, np.int64)[:, 0]
            if len(data) != len(text):
                raw = np.frombuffer(data, np.uint8)
                at = np.append(np.flatnonzero(raw & 0xC0 != 0x80), len(raw))[at]
            cuts = cut(data, at)
            ends = [*cuts[1:], len(data)]
            chunks.append([data[a:b].decode() for a, b in zip(cuts, ends, strict=True)])
        return chunks

    return split


def open_semantic(tokenizer: Tokenizer, budget: int) -> Split:
    language = import_module("tree_sitter_cpp").language()
    open_splitter = import_module("semantic_text_splitter").CodeSplitter.from_huggingface_tokenizer
    splitter = open_splitter(language, tokenizer, budget, trim=False)
    return lambda texts: [splitter.chunks(text) for text in texts]


RIVALS = {"braces": open_braces, "tree_sitter": open_tree_sitter, "semantic": open_semantic}


def open_rival(name: str, tokenizer: str, max_tokens: int) -> Split:
    path = str(Path(tokenizer) / "tokenizer.json")
    return RIVALS[name](Tokenizer.from_file(path), max_tokens - RESERVE)


# From file to files

_split: Split | None = None


def _open(name: str, tokenizer: str, max_tokens: int) -> None:
    global _split
    _split = open_rival(name, tokenizer, max_tokens)


def _work(lines: list[bytes]) -> list[str]:
    assert _split is not None
    texts = [json.loads(line)["text"] for line in lines]
    return [chunk for chunks in _split(texts) for chunk in chunks]


def _batches(path: Path) -> Iterator[list[bytes]]:
    with path.open("rb") as file:
        while lines := list(islice(file, LINES_AT_ONCE)):
            yield lines


def _write(texts: Iterator[str], folder: Path) -> None:
    """Files of so many rows each, shuffled within."""
    draw = random.Random(0)
    number = 0
    while rows := list(islice(texts, ROWS_PER_FILE)):
        draw.shuffle(rows)
        table = pa.table({"text": pa.array(rows, pa.string())})
        pq.write_table(
            table,
            folder / f"shard_{number:05d}.parquet",
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
        )
        number += 1


def run(name: str, path: Path, folder: Path, tokenizer: str, max_tokens: int, workers: int) -> None:
    folder.mkdir(parents=True)
    with multiprocessing.Pool(workers, _open, (name, tokenizer, max_tokens)) as pool:
        found = pool.imap(_work, _batches(path))
        texts = (text for some in found for text in some)
        if name == "braces":
            lines = folder / "chunks.jsonl"
            with lines.open("w") as file:
                for text in texts:
                    file.write(json.dumps({"text": text}) + "\n")
            with lines.open() as again:
                _write((json.loads(line)["text"] for line in again), folder)
        else:
            _write(texts, folder)
        pool.close()
        pool.join()


def main(arguments: list[Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    name, path, folder, tokenizer, max_tokens, workers = arguments
    run(name, Path(path), Path(folder), tokenizer, int(max_tokens), int(workers))


if __name__ == "__main__":
    main(sys.argv[1:])
