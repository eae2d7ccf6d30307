"""Make the documents that every loader is measured on: parquet shards of tokens and their text.

In:    Python's own library, which is on every machine, for the text; a number of documents, a seed
Out:   <folder>/shard_00000.parquet …: `tokens` (list<uint16>, END last) and `text`;
       <folder>/tokenizer.json (Hugging Face), the tokenizer that made them;
       <folder>/source.json, how many documents and tokens
Keeps: the same bytes for the same Python, arguments and library versions

python benchmarks/loader_source.py FOLDER --documents 100000
"""

import argparse
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

END = 60_000
"""The token that ends each document; far above the vocabulary, so that tests can use small ids."""
PAD = 60_001
VOCAB = 60_002
LEARNED = 32_000

# GPT-4's pattern with one or two digits together, as nanochat has it
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

Tokens = npt.NDArray[np.uint16]


def library_text(limit: int = 16_000_000) -> str:
    """The sources of Python's standard library, one after the other."""
    texts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or size > limit:
            continue
        texts.append(path.read_text("utf-8", "replace"))
        size += len(texts[-1])
    return "\n".join(texts)


def make_tokenizer(text: str, path: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.save(str(path))


def encode_whole(text: str, tokenizer: Path) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """All tokens of the text, and where in the text each begins."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(tokenizer))
    lines = text.splitlines(keepends=True)
    ids, starts, at = [], [], 0
    for some in range(0, len(lines), 20_000):
        block = "".join(lines[some : some + 20_000])
        found = loaded.encode(block, add_special_tokens=False)
        ids.append(np.array(found.ids, np.uint16))
        starts.append(np.array(found.offsets, np.int64)[:, 0] + at)
        at += len(block)
    return np.concatenate(ids), np.concatenate(starts)


def lengths_of(documents: int, seed: int, mean: float = 700, sigma: float = 1.0) -> Tokens:
    """Log-normal, of the given mean: half of the documents are shorter than 0.6 of it."""
    draw = np.random.default_rng(seed)
    drawn = draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, documents)
    return np.clip(drawn, 16, 60_000).astype(np.uint16)


def write_shards(
    folder: Path, documents: Iterator[tuple[Tokens, str]], per_shard: int, first: int = 0
) -> int:
    """Write documents as shards, numbered from `first`; how many there were."""
    folder.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([("tokens", pa.list_(pa.uint16())), ("text", pa.string())])
    number, total, held = first, 0, list[tuple[Tokens, str]]()

    def write() -> None:
        at = np.cumsum([0, *(len(tokens) for tokens, _ in held)], dtype=np.int32)
        flat = np.concatenate([tokens for tokens, _ in held])
        tokens = pa.ListArray.from_arrays(at, pa.array(flat))
        table = pa.table([tokens, pa.array([text for _, text in held])], schema=schema)
        pq.write_table(
            table, folder / f"shard_{number:05}.parquet", compression="zstd", row_group_size=1024
        )

    for document in documents:
        held.append(document)
        total += 1
        if len(held) == per_shard:
            write()
            number, held = number + 1, []
    if held:
        write()
    return total


def make_source(folder: Path, documents: int, seed: int = 7, per_shard: int = 8192) -> None:
    """Documents that are spans of library text, drawn at random, of log-normal length."""
    folder.mkdir(parents=True, exist_ok=True)
    text = library_text()
    make_tokenizer(text, folder / "tokenizer.json")
    ids, starts = encode_whole(text, folder / "tokenizer.json")
    starts = np.append(starts, len(text))
    draw = np.random.default_rng(seed + 1)

    def spans() -> Iterator[tuple[Tokens, str]]:
        for length in lengths_of(documents, seed):
            size = int(length)
            begin = int(draw.integers(0, len(ids) - size))
            tokens = np.append(ids[begin : begin + size], np.uint16(END))
            yield tokens, text[starts[begin] : starts[begin + size]]

    write_shards(folder, spans(), per_shard)
    tokens = int(lengths_of(documents, seed).sum(dtype=np.int64)) + documents
    about = {"documents": documents, "tokens": tokens, "seed": seed}
    (folder / "source.json").write_text(json.dumps(about) + "\n")


def make_numbered(folder: Path, first: int, stop: int, seq_len: int, per_shard: int = 100) -> None:
    """Documents that fill a row each and say in every token which they are: 1, 2, 3, …

    In `text`, which has no ids, the number is a word that is repeated: "n17x n17x …",
    as many bytes as a row has tokens.
    """

    def numbered() -> Iterator[tuple[Tokens, str]]:
        for number in range(first, stop):
            tokens = np.full(seq_len, number, np.uint16)
            tokens[-1] = END
            yield tokens, (f"n{number}x " * seq_len)[:seq_len]

    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer("", folder / "tokenizer.json")  # of bytes, so that lengths are known
    write_shards(folder, numbered(), per_shard, first // per_shard)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("--documents", type=int, default=100_000)
    options.add_argument("--seed", type=int, default=7)
    given = options.parse_args()
    make_source(given.folder, given.documents, given.seed)


if __name__ == "__main__":
    main()
