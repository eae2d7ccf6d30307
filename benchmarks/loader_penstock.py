"""penstock beside its rivals: its adapters for `loader_jobs`, and memcpy for what can be reached.

python benchmarks/loader_penstock.py penstock speed '{"data": …}'
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from loader_jobs import PAD, Loader, Shape, main

Answer = dict[str, Any]


class Penstock(Loader):
    """A live dataset: shards are added to its log, and sealed when the reader comes back."""

    packs: ClassVar[str] = "best fit while reading, documents longer than a row are split"
    shuffles: ClassVar[str] = "a pool of 2,000,000 samples"
    has_workers: ClassVar[bool] = False
    pack: ClassVar[str] = "bestfit"
    lanes: ClassVar[int] = 1

    def load(self) -> None:
        import penstock.supply.pretrain  # noqa: F401

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        from penstock.produce.columns import open_parquet, schema_for
        from penstock.store.log import LogWriter
        from penstock.store.record import Add, Progress, token_name
        from penstock.store.store import open_store
        from penstock.tokenize.token_file import TokenPieces, numbers_of, write_token_pieces

        log = LogWriter.take(
            open_store(data / "set", make=True), {}, ["made"], writer="bench", tokenizer="t" * 64
        )
        known = log.state.inputs.get("made")
        done, number = (known.to if known else 0), len(log.state.split("train"))
        for path in sorted(source.glob("shard_*.parquet")):
            table = pq.read_table(path)
            rows = table.num_rows
            tokens = table.column("tokens").combine_chunks()
            counts = np.diff(tokens.offsets.to_numpy()).astype(np.int32)
            places = np.arange(done, done + rows)
            made = pa.table(
                {
                    "text": table.column("text"),
                    "n_tokens": pa.array(counts),
                    "source": pa.array(["made"] * rows),
                    "start": pa.array(places),
                    "end": pa.array(places + 1),
                    "part": pa.array(np.zeros(rows, np.int32)),
                    "parts": pa.array(np.ones(rows, np.int32)),
                    "doc_id": pa.array(places.astype(np.uint64)),
                }
            ).cast(schema_for({}))

            def write(file: Any, made: pa.Table = made) -> None:
                with open_parquet(file, made.schema) as writer:
                    writer.write_table(made)

            doc_id = numbers_of(made.column("doc_id").combine_chunks())
            ids_of = [numbers_of(tokens.flatten())]
            pieces = TokenPieces(counts.astype(np.int64), doc_id, ids_of)

            def write_tokens(file: Any, pieces: TokenPieces = pieces) -> None:
                write_token_pieces(file, pieces, "t" * 64, "uint16")

            stored = log.store.put(f"shard_{number:05d}.parquet", write)
            beside = log.store.put(token_name(stored.name), write_tokens)
            progress = Progress(
                input="made", start=done, to=done + rows, read=rows, kept=rows, dropped={}
            )
            total = int(counts.sum())
            add = Add(stored.name, stored.sha256, stored.size, rows, total, "train")
            ids = Add(
                beside.name, beside.sha256, beside.size, rows, total, "tokens", pieces.xxh3
            )  # fmt: skip
            log.commit([add, ids, progress])
            done, number = done + rows, number + 1

    def _seal(self, data: Path) -> None:
        """What the producer does at its end."""
        from penstock.store.log import Log, LogWriter
        from penstock.store.record import Seal
        from penstock.store.store import open_store

        if Log.open(data / "set").state.sealed is None:
            log = LogWriter.take(
                open_store(data / "set"), {}, ["made"], writer="bench", tokenizer="t" * 64
            )
            files = log.state.split("train")
            rows, size = sum(f.rows for f in files), sum(f.bytes for f in files)
            log.commit([Seal(len(files), rows, size, log.state.head)])

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        from penstock import LoaderRun, PlanConfig, PretrainDataLoader

        # to read 500 of 1,000 while live
        small = PlanConfig(pool_size=200, refill_threshold=150, ramp=True)
        if state is not None or shape.seq_len > 64:
            self._seal(data)
        self._loader = PretrainDataLoader(
            str(data / "set"),
            None,
            shape.seq_len,
            batch_size=shape.batch_size,
            pack="pad" if shape.seq_len == 64 else self.pack,
            plan=small if shape.seq_len == 64 else PlanConfig(lanes=self.lanes),
            seed=shape.seed,
            run=LoaderRun(stall_s=5.0, rank=shape.rank, world_size=shape.ranks),
        )
        window = self._loader._engine.window
        window._around = window._around._replace(pad=PAD)  # there is no tokenizer here to name one
        if state is not None:
            self._loader.load_state_dict(state)
        return self._loader.get_iterator()

    def state(self) -> Any:
        return self._loader.state_dict()

    def tokens(self, batch: Any) -> Any:
        return batch.input_ids


class PenstockConcat(Penstock):
    """The stream of tokens cut into rows, which is what most rivals do."""

    packs: ClassVar[str] = "concatenated while reading"
    pack: ClassVar[str] = "concat"


class PenstockLanes(Penstock):
    """The plan in eight lanes, of which two ranks plan and read four each."""

    lanes: ClassVar[int] = 8


class Memcpy(Loader):
    """No loader: rows copied one after the other from one array, by one thread."""

    packs: ClassVar[str] = "none"
    shuffles: ClassVar[str] = "not at all"
    has_workers: ClassVar[bool] = False

    def load(self) -> None:
        pass

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        data.mkdir(parents=True)
        tokens = [
            pq.read_table(path, columns=["tokens"]).column(0).combine_chunks().values.to_numpy()
            for path in sorted(source.glob("shard_*.parquet"))
        ]
        np.save(data / "tokens.npy", np.concatenate(tokens).astype(np.int32))

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        tokens = np.load(data / "tokens.npy")
        size = shape.batch_size * shape.seq_len
        self._at = state or 0
        while self._at + size <= len(tokens):
            self._at += size
            yield tokens[self._at - size : self._at].reshape(-1, shape.seq_len).copy()

    def state(self) -> Any:
        return self._at


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    adapters: dict[str, Callable[[], Loader]] = {
        "penstock": Penstock,
        "penstock_concat": PenstockConcat,
        "penstock_lanes": PenstockLanes,
        "memcpy": Memcpy,
    }
    sys.exit(main(adapters, Path(__file__)))  # type: ignore[func-returns-value]
