"""Datasets for tests of the loaders: written by the real writer, whole or bit by bit."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.shard.columns import open_parquet, schema_of
from penstock.store.backends import open_store
from penstock.store.log import LogWriter
from penstock.store.record import Add, Progress, Seal


class GrowingDataset:
    """A dataset of token lists that is written shard by shard, through the log's own writer."""

    def __init__(self, folder: Path, *, tokenizer: str = "t" * 64, max_tokens: int = 0) -> None:
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
    ) -> str:
        """One shard more, which may lie: with `counts` for its n_tokens, in a log that `claims` so
        many rows, with a column of other `tokens`."""
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
                "tokens": pa.array(documents, pa.list_(pa.uint16())),
            },
            schema=schema_of("uint16"),
        )

        if tokens is not None:
            last = table.num_columns - 1
            table = table.set_column(last, pa.field("tokens", tokens.type), tokens)

        def write(file: object) -> None:
            with open_parquet(file, table.schema) as writer:  # type: ignore[arg-type]
                writer.write_table(table)

        stored = self._log.store.put(f"shard_{len(self.shards):05d}.parquet", write)
        total, rows = sum(map(len, documents)), claims or rows
        self._log.commit(
            [
                Add(stored.name, stored.sha256, stored.size, rows, total, "train"),
                Progress(
                    input="made", start=first, to=first + rows, read=rows, kept=rows, dropped={}
                ),
            ]
        )
        self._done += rows
        self.shards.append(documents)
        return stored.name

    def seal(self) -> None:
        state = self._log.state
        data = state.split("train")
        self._log.commit(
            [Seal(len(data), sum(f.rows for f in data), sum(f.bytes for f in data), state.head)]
        )


def made_documents(
    random: np.random.Generator, count: int, mean: int = 30, first: int = 0
) -> list[list[int]]:
    """Documents whose every token says which document it is of."""
    sizes = np.minimum(1 + random.exponential(mean, count), 400).astype(int).tolist()
    return [[first + k] * size for k, size in enumerate(sizes)]


def made_dataset(
    folder: Path, shards: int = 6, rows: int = 40, *, seed: int = 0, **options: int
) -> GrowingDataset:
    """A sealed dataset."""
    random = np.random.default_rng(seed)
    dataset = GrowingDataset(folder, **options)  # type: ignore[arg-type]
    for k in range(shards):
        dataset.add(made_documents(random, rows, first=k * rows))
    dataset.seal()
    return dataset
