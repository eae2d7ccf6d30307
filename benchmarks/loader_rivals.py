"""The loaders that penstock is measured against, each behind the same small interface.

scripts/rivals                                   # once: their environments
.venv-rivals/loaders/bin/python benchmarks/loader_rivals.py RIVAL JOB ARGS.json

RIVAL is a key of LOADERS below, JOB one of loader_jobs.py; ARGS may also be the JSON itself. The
result is the last line that begins with {"job". Nothing but the chosen rival is imported.

Each is set up as its documentation recommends for speed: shuffled, default prefetch, no labels or
masks beyond what it always makes. `convert` also builds what a first start would build and keep.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from loader_jobs import Loader, Shape, main

END, PAD, VOCAB = 60_000, 60_001, 60_002

Tokens = npt.NDArray[np.uint16]


# The source, as arrays


def shards(source: Path) -> list[Path]:
    return sorted(source.glob("shard_*.parquet"))


def shard_tokens(path: Path) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """All tokens of a shard, and where its documents begin and end."""
    column = import_module("pyarrow.parquet").read_table(path, columns=["tokens"])["tokens"]
    lists = column.combine_chunks()
    return lists.flatten().to_numpy(), np.asarray(lists.offsets, np.int64)


def documents(path: Path) -> Iterator[Tokens]:
    flat, at = shard_tokens(path)
    for begin, end in pairwise(at):
        yield flat[begin:end]


def blocks(source: Path, seq_len: int) -> Iterator[Tokens]:
    """All tokens one after the other, cut at every `seq_len`; the rest at the end is left out."""
    rest = np.empty(0, np.uint16)
    for path in shards(source):
        flat = np.concatenate([rest, shard_tokens(path)[0]])
        whole = len(flat) // seq_len * seq_len
        yield from flat[:whole].reshape(-1, seq_len)
        rest = flat[whole:]


def buffer_rows(shape: Shape) -> int:
    """Of a shuffle buffer: in the jobs with few numbered samples, still much less than there are.
    (With one as large as the epoch, Energon 7.4.1 resumes by reading all again.)"""
    return 1000 if shape.seq_len > 1000 else 100


def next_part(data: Path, pattern: str) -> int:
    data.mkdir(parents=True, exist_ok=True)
    return len(list(data.glob(pattern)))


# MosaicML Streaming


class Mosaic(Loader):
    environment = "mosaicml"
    packs = "concatenated and cut when converted"
    shuffles = "py1e: shards, and samples over a span of them"

    def load(self) -> None:
        import_module("transformers.feature_extraction_utils")  # asks itself whether there is …
        for name in ("torchvision", "torchvision.datasets", "torchvision.transforms.functional"):
            stub = sys.modules[name] = ModuleType(name)  # … torchvision, which is not installed
            setattr(stub, "VisionDataset", object)  # noqa: B010
            setattr(stub, "to_tensor", None)  # noqa: B010
        self.streaming = import_module("streaming")
        self.util = import_module("streaming.base.util")

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        part = data / f"part_{next_part(data, 'part_*'):05}"
        columns = {"tokens": f"ndarray:uint16:{shape.seq_len}"}
        with self.streaming.MDSWriter(out=str(part), columns=columns) as out:
            for block in blocks(source, shape.seq_len):
                out.write({"tokens": block})
        (data / "index.json").unlink(missing_ok=True)  # merging again fails where there is one
        self.util.merge_index(str(data))

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        self.util.clean_stale_shared_memory()
        self.dataset = self.streaming.StreamingDataset(
            local=str(data), shuffle=True, shuffle_seed=shape.seed, batch_size=shape.batch_size
        )
        self.loader = self.streaming.StreamingDataLoader(
            self.dataset, batch_size=shape.batch_size, num_workers=shape.workers, drop_last=True
        )
        if state:
            self.loader.load_state_dict(state)
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def tokens(self, batch: Any) -> Any:
        return batch["tokens"]


# LitData


def shard_for_litdata(path: str) -> Iterator[Tokens]:
    for document in documents(Path(path)):
        yield document.astype(np.uint16)


class Lit(Loader):
    packs = "concatenated within chunks of 64 MB when converted, cut when read"
    shuffles = "chunks, and blocks within a chunk"

    def load(self) -> None:
        self.litdata = import_module("litdata")
        self.items = import_module("litdata.streaming.item_loader")

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        paths = [str(path) for path in shards(source)]
        large = shape.seq_len > 1000  # few samples in one chunk would come in one piece
        self.litdata.optimize(
            fn=shard_for_litdata,
            inputs=paths,
            output_dir=str(data),
            chunk_bytes="64MB" if large else None,
            chunk_size=None if large else 100 * shape.seq_len,
            item_loader=self.items.TokensLoader(),
            num_workers=1 if len(paths) < 2 else 2,
            mode="append" if data.exists() else None,
            verbose=False,
        )

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        dataset = self.litdata.StreamingDataset(
            str(data),
            item_loader=self.items.TokensLoader(block_size=shape.seq_len),
            shuffle=True,
            drop_last=False,
            seed=shape.seed,
        )
        self.loader = self.litdata.StreamingDataLoader(
            dataset, batch_size=shape.batch_size, num_workers=shape.workers
        )
        if state:
            self.loader.load_state_dict(state)
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()


# Grain


def decode_for_grain(record: bytes) -> dict[str, Tokens]:
    return {"tokens": np.frombuffer(record, np.uint16)}


class Grain(Loader):
    packs = "concatenated and cut when read (ConcatThenSplit)"
    shuffles = "all documents (index shuffle)"
    threads: ClassVar[int | None] = None

    def load(self) -> None:
        self.grain = import_module("grain")
        self.experimental = import_module("grain.experimental")
        self.writer = import_module("array_record.python.array_record_module").ArrayRecordWriter

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        first = next_part(data, "*.array_record")
        for number, path in enumerate(shards(source), first):
            out = self.writer(str(data / f"part_{number:05}.array_record"), "group_size:1")
            for document in documents(path):
                out.write(document.tobytes())
            out.close()

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        grain = self.grain
        records = grain.sources.ArrayRecordDataSource(
            [str(path) for path in sorted(data.glob("*.array_record"))]
        )
        order = grain.MapDataset.source(records).shuffle(seed=shape.seed).map(decode_for_grain)
        options = (
            grain.ReadOptions()
            if self.threads is None
            else grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=0)
        )
        rows = self.pack(order.to_iter_dataset(options), shape)
        rows = rows.batch(shape.batch_size, drop_remainder=True)
        if shape.workers:
            rows = rows.mp_prefetch(grain.MultiprocessingOptions(num_workers=shape.workers))
        self.rows = iter(rows)
        if state:
            self.rows.set_state(state)
        found: Iterator[Any] = self.rows
        return found

    def pack(self, rows: Any, shape: Shape) -> Any:
        return self.experimental.ConcatThenSplitIterDataset(
            rows, length_struct={"tokens": shape.seq_len}
        )

    def state(self) -> Any:
        return self.rows.get_state()

    def tokens(self, batch: Any) -> Any:
        return batch["tokens"]


class GrainNoThreads(Grain):
    """As ReadOptions advises for data that is in memory: no threads, for want of a free GIL."""

    shuffles = "all documents (index shuffle)"
    threads = 0


class GrainBestFit(Grain):
    """Long documents are cut to rows before; best-fit itself never cuts, but pads."""

    packs = "best-fit into 128 bins when read, padded"
    threads = 0

    def pack(self, rows: Any, shape: Shape) -> Any:
        size = shape.seq_len

        class Cut(self.experimental.FlatMapTransform):  # type: ignore[name-defined,misc]
            max_fan_out = 64

            def flat_map(self, element: dict[str, Tokens]) -> list[dict[str, Tokens]]:
                tokens = element["tokens"]
                return [{"tokens": tokens[at : at + size]} for at in range(0, len(tokens), size)]

        return self.experimental.BestFitPackIterDataset(
            self.experimental.FlatMapIterDataset(rows, Cut()),
            length_struct={"tokens": size},
            num_packing_bins=128,
            padding_struct={"tokens": PAD},
        )


# Hugging Face datasets with torchdata's StatefulDataLoader


class DatasetsMap(Loader):
    packs = "concatenated and cut when converted (group_texts)"
    shuffles = "all rows (RandomSampler)"

    def load(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.datasets = import_module("datasets")
        self.torch = import_module("torch")
        self.loaders = import_module("torchdata.stateful_dataloader")
        self.datasets.disable_progress_bars()

    def features(self, shape: Shape) -> Any:
        kind = self.datasets.List(self.datasets.Value("uint16"), length=shape.seq_len)
        return self.datasets.Features({"input_ids": kind})

    def parquet(self, source: Path, data: Path, shape: Shape) -> None:
        """Rows as parquet, numbered after what is there."""
        pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
        number = next_part(data, "rows_*.parquet")
        schema = self.features(shape).arrow_schema
        held: list[Tokens] = []

        def write() -> None:
            flat = pa.array(np.concatenate(held))
            kind = schema.field("input_ids").type
            rows = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            pq.write_table(pa.table([rows], schema=schema), data / f"rows_{number:05}.parquet",
                           row_group_size=1024)  # fmt: skip

        for block in blocks(source, shape.seq_len):
            held.append(block)
            if len(held) == (4500 if shape.seq_len > 1000 else 100):
                write()
                number, held = number + 1, []
        if held:
            write()

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        part = data / f"part_{next_part(data, 'part_*'):05}"
        self.parquet(source, data / "parquet", shape)
        rows = self.datasets.Dataset.from_parquet(
            [str(path) for path in sorted((data / "parquet").glob("*"))],
            cache_dir=str(data / "cache"),
        )
        rows.save_to_disk(str(part))
        shutil.rmtree(data / "parquet")
        shutil.rmtree(data / "cache")

    def dataset(self, data: Path, shape: Shape) -> Any:
        parts = [self.datasets.load_from_disk(str(path)) for path in sorted(data.glob("part_*"))]
        return self.datasets.concatenate_datasets(parts).with_format("torch")

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        self.loader = self.loaders.StatefulDataLoader(
            self.dataset(data, shape),
            batch_size=shape.batch_size,
            num_workers=shape.workers,
            drop_last=True,
            **self.order(shape),
        )
        if state:
            self.loader.load_state_dict(state)
        return iter(self.loader)

    def order(self, shape: Shape) -> dict[str, Any]:
        draw = self.torch.Generator().manual_seed(shape.seed)
        return {"shuffle": True, "generator": draw}

    def state(self) -> Any:
        return self.loader.state_dict()

    def tokens(self, batch: Any) -> Any:
        return batch["input_ids"]


class DatasetsStream(DatasetsMap):
    shuffles = "files, then rows within a buffer of 1000"

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        self.parquet(source, data, shape)

    def dataset(self, data: Path, shape: Shape) -> Any:
        rows = self.datasets.load_dataset(
            "parquet",
            data_files=[str(path) for path in sorted(data.glob("rows_*.parquet"))],
            split="train",
            streaming=True,
        )
        return rows.shuffle(seed=shape.seed, buffer_size=buffer_rows(shape)).with_format("torch")

    def order(self, shape: Shape) -> dict[str, Any]:
        return {}


# Megatron core


class ForMegatron:
    """What Megatron asks of a tokenizer where tokens are ready."""

    vocab_size, eod, pad = VOCAB, END, PAD
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "ForMegatron"}


class Megatron(Loader):
    packs = "concatenated in the order of shuffled documents and cut when the index is built"
    shuffles = "documents, then rows, over the whole epoch"

    def load(self) -> None:
        self.gpt = import_module("megatron.core.datasets.gpt_dataset")
        self.builder = import_module("megatron.core.datasets.blended_megatron_dataset_builder")
        self.indexed = import_module("megatron.core.datasets.indexed_dataset")
        self.torch_data = import_module("torch.utils.data")

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        """Growth is a merge under a new name, as its tools/merge_datasets.py makes it; under the
        old name the cached index, keyed by path and options, would still be taken."""
        number = next_part(data, "all_*.idx")
        old, new = data / f"all_{number - 1:05}", data / f"all_{number:05}"
        out = self.indexed.IndexedDatasetBuilder(f"{new}.bin", dtype=np.uint16)
        if number:
            out.add_index(str(old))
        for path in shards(source):
            for document in documents(path):
                out.add_document(document, [len(document)])
        out.finalize(f"{new}.idx")
        self.dataset(data, shape)

    def dataset(self, data: Path, shape: Shape) -> Any:
        prefix = sorted(data.glob("all_*.idx"))[-1].with_suffix("")
        config = self.gpt.GPTDatasetConfig(
            random_seed=shape.seed,
            sequence_length=shape.seq_len,
            blend=([str(prefix)], None),
            split="1,0,0",
            path_to_cache=str(data / "cache"),
            tokenizer=ForMegatron(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            # rows tile the tokens: with an extra token the last row of an epoch is always short
            add_extra_token_to_sequence=False,
        )
        found, _, _ = self.builder.BlendedMegatronDatasetBuilder(
            self.gpt.GPTDataset, [None, None, None], lambda: True, config
        ).build()
        return found

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        """The order is in the dataset: its trainer keeps the count of samples that were consumed,
        and its sampler (not in core) goes on from there."""
        dataset = self.dataset(data, shape)
        self.size = shape.batch_size
        self.consumed = int(state or 0)
        order = [
            range(at, at + self.size)
            for at in range(self.consumed, len(dataset) - self.size + 1, self.size)
        ]
        loader = self.torch_data.DataLoader(dataset, batch_sampler=order, num_workers=shape.workers)
        for batch in loader:
            self.consumed += self.size
            yield batch

    def state(self) -> Any:
        return self.consumed

    def tokens(self, batch: Any) -> Any:
        return batch["tokens"]


# OLMo-core


class Olmo(Loader):
    packs = "concatenated within files, cut when read"
    shuffles = "all rows (one permutation on disk)"

    def load(self) -> None:
        self.olmo = import_module("olmo_core.data")

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        first = next_part(data, "part_*.npy")
        for number, path in enumerate(shards(source), first):
            shard_tokens(path)[0].tofile(data / f"part_{number:05}.npy")
        self.loader_of(data, shape).reshuffle(epoch=1)

    def config(self, **options: Any) -> Any:
        return self.olmo.NumpyFSLDatasetConfig(**options)

    def loader_of(self, data: Path, shape: Shape) -> Any:
        dataset = self.config(
            paths=[str(path) for path in sorted(data.glob("part_*.npy"))],
            sequence_length=shape.seq_len,
            tokenizer=self.olmo.TokenizerConfig(
                vocab_size=VOCAB, eos_token_id=END, pad_token_id=PAD
            ),
            work_dir=str(data / "work"),
        ).build()
        return self.olmo.NumpyDataLoaderConfig(
            global_batch_size=shape.batch_size * shape.seq_len,
            seed=shape.seed,
            num_workers=shape.workers,
            target_device_type="cpu",
            work_dir=str(data / "work"),
        ).build(dataset)

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        self.loader = self.loader_of(data, shape)
        if state:
            self.loader.load_state_dict(state)
        self.loader.reshuffle(epoch=state["epoch"] if state else 1)
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.state_dict()

    def tokens(self, batch: Any) -> Any:
        return batch["input_ids"]


class OlmoPacked(Olmo):
    packs = "best-fit decreasing per file when the index is built, padded, long documents truncated"

    def config(self, **options: Any) -> Any:
        return self.olmo.NumpyPackedFSLDatasetConfig(**options)


# Energon


class Energon(Loader):
    packs = "concatenated and cut when converted (packing is the user's own code there)"
    shuffles = "sequences of 100 rows, then a buffer of 1000"

    def load(self) -> None:
        self.energon = import_module("megatron.energon")
        self.torch = import_module("torch")

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        sink = import_module("webdataset").ShardWriter
        first = next_part(data, "rows_*.tar")
        meta = data / ".nv-meta"
        out = sink(str(data / "rows_%05d.tar"), maxcount=2000, start_shard=first, verbose=0)
        with out:
            for number, block in enumerate(blocks(source, shape.seq_len)):
                out.write({"__key__": f"{first:05}_{number:08}", "bin": block.tobytes()})
        factory = import_module("megatron.energon.flavors").BaseWebdatasetFactory
        epath = import_module("megatron.energon.epathlib").EPath
        factory.prepare_dataset(
            epath(str(data)),
            [path.name for path in sorted(data.glob("rows_*.tar"))],
            split_parts_ratio=[("train", 1.0)],
            shuffle_seed=None,
            workers=2,
        )
        (meta / "dataset.yaml").write_text(
            "__module__: megatron.energon\n__class__: CrudeWebdataset\n"
        )

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        workers = self.energon.WorkerConfig(rank=0, world_size=1, num_workers=shape.workers)
        dataset = self.energon.get_train_dataset(
            str(data),
            worker_config=workers,
            batch_size=shape.batch_size,
            batch_drop_last=True,
            shuffle_buffer_size=buffer_rows(shape),
            max_samples_per_sequence=100,
            task_encoder=energon_encoder(),
            repeat=False,
        )
        self.loader = self.energon.get_savable_loader(dataset)
        if state:
            self.loader.restore_state_rank(state)
        return iter(self.loader)

    def state(self) -> Any:
        return self.loader.save_state_rank()


def energon_encoder() -> Any:
    energon, torch = import_module("megatron.energon"), import_module("torch")

    @energon.stateless
    def cook(sample: dict[str, Any]) -> dict[str, Any]:
        row = torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint16)
        return {**energon.basic_sample_keys(sample), "row": row}

    class Rows(energon.TaskEncoder):  # type: ignore[name-defined,misc]
        cookers: ClassVar[list[Any]] = [energon.Cooker(cook)]

        def batch(self, samples: list[dict[str, Any]]) -> Any:
            return torch.stack([sample["row"] for sample in samples])

    return Rows()


# A loader in the manner of nanochat's, written anew


class Nanochat(Loader):
    """Text is tokenised as it is read, in file order; rows are filled by best fit from a buffer of
    1000 documents, and the shortest is cropped where none fits. The last file is for validation.
    The state says which row group was read last, and resuming goes on after it."""

    packs = "best-fit from a buffer of 1000 documents when read, the rest of a cropped one dropped"
    shuffles = "not at all"
    has_workers = False
    threads = 4
    buffer = 1000
    at_a_time = 128

    def load(self) -> None:
        self.torch = import_module("torch")
        self.pq = import_module("pyarrow.parquet")
        self.tiktoken = import_module("tiktoken")

    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        first = next_part(data, "shard_*.parquet")
        paths = [*shards(source), None]
        for number, path in enumerate(paths, first):
            table = self.pq.read_table(path or paths[0], columns=["text"])
            if path is None:  # the file that is held out
                table = import_module("pyarrow").table({"text": ["held out"]})
            self.pq.write_table(
                table, data / f"shard_{number:05}.parquet", row_group_size=1024, compression="zstd"
            )
        if not (data / "tokenizer.json").exists():
            shutil.copy(source / "tokenizer.json", data)

    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        self.encoding = tiktoken_of(self.tiktoken, data / "tokenizer.json")
        self.place = state or (0, -1)
        texts = self.texts(sorted(data.glob("shard_*.parquet"))[:-1])
        held: list[list[int]] = []
        torch, width = self.torch, shape.seq_len + 1
        rows = torch.empty((shape.batch_size, width), dtype=torch.long)
        while True:
            for row in rows:
                at = 0
                while at < width:
                    while len(held) < self.buffer and (some := next(texts, None)):
                        found = self.encoding.encode_ordinary_batch(some, num_threads=self.threads)
                        held += [[END, *tokens] for tokens in found]
                    if not held:
                        return
                    room = width - at
                    lengths = [len(one) for one in held]
                    fitting = max((size for size in lengths if size <= room), default=0)
                    document = held.pop(lengths.index(fitting or min(lengths)))[:room]
                    row[at : at + len(document)] = torch.tensor(document)
                    at += len(document)
            yield rows[:, :-1].clone(), rows[:, 1:].clone()

    def texts(self, paths: list[Path]) -> Iterator[list[str]]:
        first, last = self.place
        for number, path in enumerate(paths[first:], first):
            file = self.pq.ParquetFile(path)
            for group in range(last + 1, file.num_row_groups):
                self.place = (number, group)
                some = file.read_row_group(group, columns=["text"])["text"].to_pylist()
                for at in range(0, len(some), self.at_a_time):
                    yield some[at : at + self.at_a_time]
            last = -1

    def state(self) -> Any:
        return self.place

    def tokens(self, batch: Any) -> Any:
        return batch[0]

    def numbers(self, batch: Any) -> list[int]:
        found = []
        for row in batch[0].tolist():
            text = self.encoding.decode([token for token in row if token != END])
            found += [int(one) for one in set(re.findall(r"n(\d+)x", text))]
        return found


def tiktoken_of(tiktoken: Any, path: Path) -> Any:
    """A tokenizer.json of byte-level BPE as tiktoken takes it."""
    import json

    from loader_source import PATTERN

    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain}
    letters |= {chr(256 + number): byte for number, byte in enumerate(other)}
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    ranks = {bytes(letters[one] for one in word): rank for word, rank in vocabulary.items()}
    return tiktoken.Encoding(
        "source", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|end|>": END}
    )


LOADERS: dict[str, type[Loader]] = {
    "mosaicml": Mosaic,
    "litdata": Lit,
    "grain": Grain,
    "grain_no_threads": GrainNoThreads,
    "grain_bestfit": GrainBestFit,
    "datasets_map": DatasetsMap,
    "datasets_stream": DatasetsStream,
    "megatron": Megatron,
    "olmo": Olmo,
    "olmo_packed": OlmoPacked,
    "energon": Energon,
    "nanochat": Nanochat,
}


if __name__ == "__main__":
    main(dict(LOADERS), Path(__file__))
