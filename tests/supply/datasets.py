"""Datasets for tests of the loaders: written by the real writer, whole or bit by bit."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.produce.columns import SCHEMA, open_parquet
from penstock.store.log import LogWriter
from penstock.store.record import Add, Progress, Seal
from penstock.store.store import open_store
from penstock.tokenize.token_file import write_token_file


def token_file(documents: list[list[int]], first: int = 0, tokenizer: str = "t" * 64) -> bytes:
    """The tokens of documents as a token file."""
    file = io.BytesIO()
    doc_id = pa.array(range(first, first + len(documents)), pa.uint64())
    tokens = pa.array(documents, pa.large_list(pa.uint16()))
    write_token_file(file, tokens, doc_id, tokenizer, "uint16")
    return file.getvalue()


class GrowingDataset:
    """A dataset of token lists that is written shard by shard, through the log's own writer.

    Each shard has a token file, or a column of tokens as earlier versions wrote it.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        tokenizer: str = "t" * 64,
        max_tokens: int = 0,
        column: bool = False,
    ) -> None:
        self._tokenizer, self._column = tokenizer, column
        steps = [{"step": "chunk", "max_tokens": max_tokens}] if max_tokens else []
        self.url = str(folder)
        self._log = LogWriter.take(
            open_store(folder, make=True),
            {"prepare": {"steps": steps}},
            ["made"],
            writer="test",
            tokenizer=tokenizer,
        )
        self._done = 0
        self.shards: list[list[list[int]]] = []

    def add(
        self,
        documents: list[list[int]],
        *,
        counts: list[int] | None = None,
        claims: int = 0,
        tokens: pa.Array | None = None,
        stored: bytes | None = None,
    ) -> str:
        """One shard more, which may lie: with `counts` for its n_tokens, in a log that `claims` so
        many rows, with a column of other `tokens`, with another token file `stored`."""
        rows = len(documents)
        first = self._done
        table = pa.table(
            {
                "text": [" ".join(map(str, document)) for document in documents],
                "n_tokens": pa.array(counts or [len(d) for d in documents], pa.int32()),
                "source": ["made"] * rows,
                "start": pa.array(range(first, first + rows), pa.int64()),
                "end": pa.array(range(first + 1, first + rows + 1), pa.int64()),
                "part": pa.array([0] * rows, pa.int32()),
                "parts": pa.array([1] * rows, pa.int32()),
                "doc_id": pa.array(range(first, first + rows), pa.uint64()),
            },
            schema=SCHEMA,
        )
        if self._column or tokens is not None:
            if tokens is None:
                tokens = pa.array(documents, pa.list_(pa.uint16()))
            table = table.append_column(pa.field("tokens", tokens.type), tokens)

        def write(file: Any) -> None:
            with open_parquet(file, table.schema) as writer:
                writer.write_table(table)

        name = f"shard_{len(self.shards):05d}"
        made = self._log.store.put(f"{name}.parquet", write)
        total, told = sum(map(len, documents)), claims or rows
        files = [Add(made.name, made.sha256, made.size, told, total, "train")]
        if not (self._column or tokens is not None):
            data = token_file(documents, first, self._tokenizer) if stored is None else stored
            kept = self._log.store.put(f"{name}.tokens.arrow", lambda file: _write(file, data))
            files.append(Add(kept.name, kept.sha256, kept.size, told, total, "tokens"))
        progress = Progress(
            input="made", start=first, to=first + told, read=told, kept=told, dropped={}
        )
        self._log.commit([*files, progress])
        self._done += told
        self.shards.append(documents)
        return made.name

    def seal(self) -> None:
        state = self._log.state
        data = state.split("train")
        self._log.commit(
            [Seal(len(data), sum(f.rows for f in data), sum(f.bytes for f in data), state.head)]
        )


def _write(file: Any, data: bytes) -> None:
    file.write(data)


def made_documents(
    random: np.random.Generator, count: int, mean: int = 30, first: int = 0
) -> list[list[int]]:
    """Documents whose every token says which document it is of."""
    sizes = np.minimum(1 + random.exponential(mean, count), 400).astype(int).tolist()
    return [[first + k] * size for k, size in enumerate(sizes)]


def made_dataset(
    folder: Path, shards: int = 6, rows: int = 40, *, seed: int = 0, **options: Any
) -> GrowingDataset:
    """A sealed dataset."""
    random = np.random.default_rng(seed)
    dataset = GrowingDataset(folder, **options)
    for k in range(shards):
        dataset.add(made_documents(random, rows, first=k * rows))
    dataset.seal()
    return dataset
