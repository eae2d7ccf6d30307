"""Inputs of every kind through the steps into a dataset: nothing lost, whoever computes it."""

import gzip
import io
import json
import os
import random
import shutil
import sys
import tarfile
import threading
import uuid
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import tokenizers

from penstock import plugins
from penstock.errors import (
    AlreadySealed,
    BadConfig,
    InputMissing,
    InputReplaced,
    PenstockError,
    TooManyRejects,
)
from penstock.ingest import formats as formats_module
from penstock.ingest import inputs as inputs_module
from penstock.ingest import jsonl as jsonl_module
from penstock.ingest import lines as lines_module
from penstock.ingest.formats import ReadConfig
from penstock.ingest.inputs import LineInput
from penstock.kernels import PAD
from penstock.prepare import rows as rows_module
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.dedup import DedupConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.outline.outline import LEVEL_NAMES
from penstock.prepare.steps import DataProcessor, Decontaminate, Process, Step, make_steps
from penstock.produce import columns as columns_module
from penstock.produce import dataset as dataset_module
from penstock.produce import gather
from penstock.produce import producer as produce
from penstock.produce import writer as writer_module
from penstock.produce.columns import as_parquet
from penstock.produce.dataset import FollowConfig, Outcome, prepare_dataset, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.log import Log
from penstock.store.store import open_store
from penstock.tokenize.tokenizer import Tokenizer
from penstock.watch.show import describe, render
from penstock.work.events import Event, Events
from penstock.work.pool import Pool
from penstock.work.run import RunConfig, open_pool
from store.dataset_rows import read_rows

CHUNK: Final = ChunkConfig(max_tokens=96)
KINDS: Final = (".parquet", ".arrow")
SMALL: Final = ShardConfig(rows_per_file=25, bytes_per_file=60_000, val_fraction=0.2, seed=3)
HERE: Final = RunConfig(workers=1, max_rejects=0.2)
PIECES: Final = ReadConfig(piece_bytes=2000)
BY_PATH: Final = replace(PIECES, order="path")
"""So that the first of two that are alike is known."""
STEPS: Final[list[Step]] = [FilterConfig(preset="code"), DedupConfig(), CHUNK]
MakeSources = Callable[[int, int], dict[str, bytes]]


# Inputs.


class Kinds:
    """One input of every kind, and the text that each source should give."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        self.texts: dict[str, str] = {}
        """By source, what is to come out."""
        self.raw: dict[str, bytes] = {}
        """By source, the bytes that start and end count in."""
        self.refused: Counter[str] = Counter()
        names = list(files)
        self.inputs = [
            str(make(folder, {name: files[name] for name in names[k::8]}))
            for k, make in enumerate((
                self._jsonl, self._packed, self._parquet, self._tree, self._tar, self._packed_tar,
                self._zip, self._text,
            ))
        ]  # fmt: skip

    def _expect(self, source: str, text: str, raw: bytes | None = None) -> None:
        self.texts[source] = text
        self.raw[source] = text.encode() if raw is None else raw

    def _jsonl(self, folder: Path, files: dict[str, bytes]) -> Path:
        path = folder / "lines.jsonl"
        path.write_bytes(self._lines(path, [raw.decode() for raw in files.values()]))
        return path

    def _packed(self, folder: Path, files: dict[str, bytes]) -> Path:
        path = folder / "packed.jsonl.gz"
        path.write_bytes(gzip.compress(self._lines(path, [r.decode() for r in files.values()])))
        return path

    def _lines(self, path: Path, texts: list[str]) -> bytes:
        content = b"\n"
        for number, text in enumerate(texts):
            line = json.dumps({"text": text, "n": number}).encode() + b"\n"
            source = f"{path}#{len(content)}-{len(content) + len(line)}"
            self._expect(source, text)
            content += line
        self.refused["invalid_json"] += 1
        return content + b'{"text": broken}\n'

    def _parquet(self, folder: Path, files: dict[str, bytes]) -> Path:
        path = folder / "rows.parquet"
        texts = [None, *(raw.decode() for raw in files.values())]
        pq.write_table(pa.table({"text": texts}), path, row_group_size=3)
        for row, text in enumerate(texts):
            if text is not None:
                self._expect(f"{path}#{row}-{row + 1}", text)
        self.refused["no_text"] += 1
        return path

    def _tree(self, folder: Path, files: dict[str, bytes]) -> Path:
        root = folder / "tree"
        umlauts = "// Größe: Maß für süße Bären\n" + 'std::string s = "ä";\n' * 60
        odd = {
            "odd/latin.cpp": (umlauts.encode("latin-1"), umlauts),
            "odd/mark.py": (b"\xef\xbb\xbfx = 1\n" * 1 + b"y = 2\n" * 50, None),
            "odd/wide.txt": (("\ufeff" + "Ein Wort, ein Satz. " * 40).encode("utf-16-le"), None),
        }
        for name, raw in files.items():
            odd[name] = (raw, raw.decode())
        odd["odd/binary.dat"] = (bytes(range(256)), "")
        odd["odd/empty.h"] = (b"", "")
        self.refused.update({"binary": 1, "empty_text": 1})
        for name, (raw, text) in odd.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(raw)
            if text is None:
                wide = name.endswith("wide.txt")
                text = raw.decode("utf-16-le" if wide else "utf-8")
            if text:
                self._expect(str(path), text, raw)
        return root

    def _tar(self, folder: Path, files: dict[str, bytes], name: str = "plain.tar") -> Path:
        path = folder / name
        with tarfile.open(path, "w:gz" if name.endswith("gz") else "w") as archive:
            for member, raw in files.items():
                info = tarfile.TarInfo(member)
                info.size = len(raw)
                archive.addfile(info, io.BytesIO(raw))
                self._expect(f"{path}#{member}", raw.decode())
        return path

    def _packed_tar(self, folder: Path, files: dict[str, bytes]) -> Path:
        return self._tar(folder, files, "packed.tar.gz")

    def _zip(self, folder: Path, files: dict[str, bytes]) -> Path:
        path = folder / "archive.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, raw in files.items():
                archive.writestr(member, raw)
                self._expect(f"{path}#{member}", raw.decode())
        return path

    def _text(self, folder: Path, files: dict[str, bytes]) -> Path:
        path = folder / "notes.txt"
        path.write_bytes(b"".join(files.values()))
        self._expect(str(path), path.read_text())
        return path


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory, sources: MakeSources) -> Kinds:
    return Kinds(tmp_path_factory.mktemp("kinds"), sources(5, 96))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, sources: MakeSources) -> Path:
    """90 files; then copies of some, and some that no filter lets pass."""
    root = tmp_path_factory.mktemp("tree")
    files = sources(7, 90)
    long = [name for name, raw in files.items() if len(raw) > 600]
    planted = {
        "zz/copy.cpp": files[long[0]],
        "zz/spaced.cpp": files[long[1]].replace(b"    ", b"\t"),
        "zz/near.cpp": files[long[2]] + b"// one more line\n",
        "zz/made.py": b"# This file is generated by a machine: do not edit\nx = 1\n" * 3,
        "zz/small.c": b"int a;\n",
        "zz/wide.js": b"var a = [" + b"1," * 900 + b"0];\n",
        "zz/nul.bin": b"a\0b" * 99,
    }
    for name, raw in (files | planted).items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    return root


# Datasets.


def snapshot(dataset: Path) -> dict[str, bytes]:
    """Every file but those that tell the time."""
    telling = ("_log/", "_fold/", "_COMPLETE", "_events.jsonl", "_gen/")
    found = {str(path.relative_to(dataset)): path for path in dataset.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(telling)}


def same(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    """Fails with names, not with bytes."""
    assert sorted(one) == sorted(other)
    assert not [name for name in one if one[name] != other[name]]


def rows(dataset: Path, split: str) -> list[dict[str, Any]]:
    return read_rows(dataset, split)


def rejects(dataset: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in Log.open(dataset).state.split("rejects")
        for line in (dataset / file.name).read_text().splitlines()
    ]


def by_source(dataset: Path) -> dict[str, list[dict[str, Any]]]:
    """The chunks of each document, in order: of each file, member, row of a table, or line."""
    found = defaultdict(list)
    for row in rows(dataset, "train") + rows(dataset, "val"):
        place = f"#{row['start']}-{row['end']}" if ".jsonl" in row["source"] else ""
        found[row["source"] + place].append(row)
    return {
        source: sorted(chunks, key=lambda row: int(row["part"])) for source, chunks in found.items()
    }


def assert_proven(dataset: Path) -> None:
    assert verify(open_store(dataset), full=True).faults == []


def assert_balanced(dataset: Path) -> None:
    """What was read is kept or dropped, and every drop is a line of the rejects."""
    state = Log.open(dataset).state
    told = Counter((about["input"], about["reason"]) for about in rejects(dataset))
    for name, known in state.inputs.items():
        assert known.read == known.kept + sum(known.dropped.values())
        assert known.dropped == {reason: n for (i, reason), n in told.items() if i == name}
    assert sum(known.rows for known in state.inputs.values()) == sum(
        file.rows for file in state.files.values() if file.split in ("train", "val")
    )


class Stopper:
    """Asks a run to end after some commits, as a signal would."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, commits: int) -> None:
        made: list[produce.Producer] = []
        real = produce.Producer.run

        def run(producer: produce.Producer) -> bool:
            made.append(producer)
            return real(producer)

        def note(event: Event) -> None:
            if event["kind"] == "commit":
                self.seen += 1
                if self.seen == commits:
                    made[-1].stopped_by = 15

        monkeypatch.setattr(produce.Producer, "run", run)
        self.seen = 0
        self.events = Events("chunk")
        self.events.listen(note)


# Every kind of input.


@pytest.fixture(scope="module")
def of_all_kinds(
    kinds: Kinds, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    dataset = tmp_path_factory.mktemp("all") / "out"
    outcome = prepare_dataset(
        kinds.inputs, dataset, [CHUNK], SMALL, HERE, read=PIECES, tokenizer=tokenizer_folder,
        tokens=True,
    )  # fmt: skip
    assert outcome.sealed
    return dataset


def test_chunks_tile_every_source(of_all_kinds: Path, kinds: Kinds) -> None:
    found = by_source(of_all_kinds)
    assert found.keys() == kinds.texts.keys()
    assert sum(len(chunks) > 1 for chunks in found.values()) > 30
    for source, chunks in found.items():
        assert "".join(row["text"] for row in chunks) == kinds.texts[source]
        assert [row["part"] for row in chunks] == list(range(len(chunks)))
        assert {row["parts"] for row in chunks} == {len(chunks)}
        assert len({row["doc_id"] for row in chunks}) == 1
        if ".jsonl" in source:  # its place is that of the line, which the key tells
            continue
        raw, at = kinds.raw[source], 0
        for row in chunks:
            assert row["start"] == at
            at = row["end"]
            piece = raw[row["start"] : row["end"]]
            coding = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le"}.get(
                row["decoding"], row["decoding"]
            )
            assert piece.decode(coding) == row["text"]
        assert at == len(raw)


PLACE: Final = ["text", "source", "start", "end", "part", "parts", "doc_id"]


def places(dataset: Path) -> list[tuple[Any, ...]]:
    found = rows(dataset, "train") + rows(dataset, "val")
    return sorted(tuple(row[name] for name in PLACE) for row in found)


def told_line(text: str, source: str, start: int, part: int, parts: int, **more: Any) -> str:
    about = {"source": source, "start": start, "end": start + len(text.encode())}
    return json.dumps({"text": text, **about, "part": part, "parts": parts, **more})


@pytest.mark.parametrize("packed", [False, True])
def test_a_line_stands_where_a_person_would_find_it(tmp_path: Path, packed: bool) -> None:
    """`shard` and `chunk` mean the same by source, start, end, part and parts of a line: the bytes
    of the line in its file, or what the line says of itself."""
    texts = [f'text {k} "quoted" é\n' * (k % 5 + 1) for k in range(40)]
    lines = [json.dumps({"text": text, "source": "a collection"}) for text in texts]
    lines[5:5] = ["", told_line("int x;", "x.cpp", 100, 0, 2), "not json"]
    lines[20:20] = [told_line("int y;", "x.cpp", 106, 1, 2), "  "]
    lines[30:30] = [told_line("z", "lines.jsonl", 7, 0, 1, doc_id=2**64 - 1)]
    raw = "\ufeff" + "\n".join(lines)  # a mark at the beginning, no newline at the end
    path = tmp_path / ("lines.jsonl.gz" if packed else "lines.jsonl")
    path.write_bytes(gzip.compress(raw.encode()) if packed else raw.encode())
    shard_jsonl([path], tmp_path / "a", SMALL, FollowConfig(complete=True, max_rejects=0.5))
    run = RunConfig(workers=1, max_rejects=0.5)
    prepare_dataset([path], tmp_path / "b", [], SMALL, run, read=ReadConfig(piece_bytes=300))
    found = places(tmp_path / "a")
    assert places(tmp_path / "b") == found
    assert len(found) == 43
    for text, source, start, end, part, parts, _ in found:
        if source == str(path):
            assert json.loads(raw.encode()[start:end].decode("utf-8-sig"))["text"] == text
            assert (part, parts) == (0, 1)
    told = {row[:2]: row[2:] for row in found if row[1] != str(path)}
    assert told["int x;", "x.cpp"][:4] == (100, 106, 0, 2)
    assert told["int y;", "x.cpp"][:4] == (106, 112, 1, 2)
    assert told["int x;", "x.cpp"][4] == told["int y;", "x.cpp"][4]  # so they share a split
    assert told["z", "lines.jsonl"] == (7, 8, 0, 1, 2**64 - 1)


def test_the_proof_of_lines_does_not_depend_on_where_a_run_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that tell their place and lines that do not, mixed in one file."""
    lines = [json.dumps({"text": f"text number {k} " * 5}) for k in range(200)]
    lines[150:150] = [told_line("int x;", "x.cpp", 100, 0, 2), told_line("y", "x.cpp", 106, 1, 2)]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines) + "\n")
    read = ReadConfig(piece_bytes=100_000)
    prepare_dataset([path], tmp_path / "a", [], SMALL, HERE, read=read)
    with monkeypatch.context() as patch:
        stopper = Stopper(patch, 2)
        prepare_dataset([path], tmp_path / "b", [], SMALL, HERE, read=read, events=stopper.events)
    assert Log.open(tmp_path / "b").state.sealed is None
    os.utime(path, (1, 1))  # so that what was read is compared by content
    prepare_dataset([path], tmp_path / "b", [], SMALL, HERE, read=read)
    proofs = [Log.open(tmp_path / name).state.inputs[str(path)].proof for name in "ab"]
    assert proofs[0]["content"] == proofs[1]["content"]
    changed = path.read_text().replace('"start": 106', '"start": 104')
    path.write_text(changed)
    with pytest.raises(PenstockError):
        prepare_dataset([path], tmp_path / "b", [], SMALL, HERE, read=read)


def test_lines_that_grow_while_they_are_read_are_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grows.jsonl"
    lines = [json.dumps({"text": f"text number {k}"}) + "\n" for k in range(100)]
    path.write_text("".join(lines[:60]))
    read, real = ReadConfig(piece_bytes=300), LineInput.check_end

    def grow(self: LineInput) -> None:
        with path.open("a") as file:
            file.write("".join(lines[60:]))
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(LineInput, "check_end", grow)
        with pytest.raises(InputReplaced, match="has grown while it was read"):
            prepare_dataset([path], tmp_path / "d", [], SMALL, HERE, read=read)
    assert Log.open(tmp_path / "d").state.sealed is None
    prepare_dataset([path], tmp_path / "d", [], SMALL, HERE, read=read)
    found = rows(tmp_path / "d", "train") + rows(tmp_path / "d", "val")
    assert sorted(row["text"] for row in found) == sorted(f"text number {k}" for k in range(100))
    assert_proven(tmp_path / "d")


def test_a_told_line_that_is_cut_keeps_its_bytes(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = "".join(f"int function_{k}() {{ return {k}; }}\n" for k in range(60))
    path = tmp_path / "told.jsonl"
    path.write_text(told_line(text, "deep/x.cpp", 1000, 0, 1) + "\n")
    prepare_dataset([path], tmp_path / "d", [CHUNK], SMALL, HERE, tokenizer=tokenizer_folder)
    found = sorted(rows(tmp_path / "d", "train") + rows(tmp_path / "d", "val"),
                   key=lambda row: int(row["part"]))  # fmt: skip
    assert len(found) > 5
    at = 1000
    for k, row in enumerate(found):
        assert (row["source"], row["start"], row["part"]) == ("deep/x.cpp", at, k)
        assert text[at - 1000 : row["end"] - 1000] == row["text"]
        at = row["end"]
    assert at == 1000 + len(text)
    assert {row["language"] for row in found} == {"cpp"}


def test_decodings_are_told(of_all_kinds: Path) -> None:
    told = {
        source.rpartition("/")[2]: {row["decoding"] for row in chunks}
        for source, chunks in by_source(of_all_kinds).items()
    }
    odd = {"latin.cpp": {"latin-1"}, "mark.py": {"utf-8-sig"}, "wide.txt": {"utf-16"}}
    for name, decodings in told.items():
        assert decodings == odd.get(name, {"utf-8"}), name


def test_tokens_are_those_of_the_text(of_all_kinds: Path, tokenizer_folder: Path) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    counts = []
    for row in rows(of_all_kinds, "train") + rows(of_all_kinds, "val"):
        ids = tokenizer.encode(row["text"]).tolist()
        assert row["tokens"] == ids
        assert row["n_tokens"] == len(ids) <= CHUNK.max_tokens - CHUNK.reserve_tokens
        counts.append(len(ids))
    state = Log.open(of_all_kinds).state
    for files in ([*state.split("train"), *state.split("val")], state.split("tokens")):
        assert sum(file.tokens or 0 for file in files) == sum(counts)
    assert sorted(counts)[len(counts) // 2] > CHUNK.max_tokens / 2


class Bytewise:
    """A tokenizer of a user: an object with `encode`, and no file."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


def test_a_tokenizer_is_a_path_or_an_object(tmp_path: Path, tokenizer_folder: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(f'{{"text": "int a{k} = {k};"}}\n' for k in range(60)))
    complete, steps = FollowConfig(complete=True), [ChunkConfig(max_tokens=96)]
    library = tokenizers.Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    given = [tokenizer_folder, str(tokenizer_folder), Tokenizer.load(tokenizer_folder), library]
    chunks = [tmp_path / f"chunks_{k}" for k in range(5)]
    plain = [tmp_path / f"plain_{k}" for k in range(4)]
    for k, tokenizer in enumerate(given):
        prepare_dataset([lines], chunks[k], steps, run=HERE, tokenizer=tokenizer, tokens=True)
        shard_jsonl([lines], plain[k], follow=complete, tokenizer=tokenizer, tokens=True)
    run = RunConfig(workers=2)
    prepare_dataset([lines], chunks[4], steps, run=run, tokenizer=library, tokens=True)
    for folders in (chunks, plain):
        made = [
            {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in KINDS}
            for folder in folders
        ]
        assert len(made[0]) >= 2
        assert all(files == made[0] for files in made)


def test_an_object_without_a_file_counts_in_this_process_alone(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "int a;"}\n')
    steps, tokenizer = [ChunkConfig(max_tokens=96)], Bytewise()
    made = prepare_dataset([lines], tmp_path / "here", steps, run=HERE, tokenizer=tokenizer)
    assert made.sealed
    run = RunConfig(workers=2)
    with pytest.raises(BadConfig, match="Bytewise cannot be sent to other processes") as caught:
        prepare_dataset([lines], tmp_path / "there", steps, run=run, tokenizer=tokenizer)
    assert caught.value.do.startswith("run with workers=1, or give a path")


def test_lines_levels_languages_and_scopes(of_all_kinds: Path, kinds: Kinds) -> None:
    names = {".cpp": "cpp", ".h": "cpp", ".py": "python", ".java": "java", ".go": "go",
             ".rs": "rust", ".js": "javascript", ".ts": "typescript", ".md": "markdown",
             ".txt": "text"}  # fmt: skip
    seen: Counter[str] = Counter()
    scopes, symbols = set(), set()
    for source, chunks in by_source(of_all_kinds).items():
        before = ""
        for row in chunks:
            assert row["line"] == 1 + before.count("\n")
            before += row["text"]
            assert row["level"] in LEVEL_NAMES
            assert (row["level"] == "file") == (row["part"] == 0)
            scopes.add(row["scope"])
            symbols.update(row["symbols"])
        if "jsonl" not in source and "rows.parquet" not in source:
            assert {row["language"] for row in chunks} == {names[source[source.rindex(".") :]]}
        seen.update(row["language"] for row in chunks)
    assert {*names.values()} <= {*seen}
    assert any("namespace deep::" in scope for scope in scopes)
    assert len(symbols) > 100


def test_a_source_is_on_one_side_of_the_split(of_all_kinds: Path) -> None:
    train, val = (
        {
            (row["source"], row["start"] if ".jsonl" in row["source"] else 0)
            for row in rows(of_all_kinds, split)
        }
        for split in ("train", "val")
    )
    assert train
    assert val
    assert not train & val


def test_what_was_refused_is_told_and_counted(of_all_kinds: Path, kinds: Kinds) -> None:
    assert_balanced(of_all_kinds)
    found = Counter(about["reason"] for about in rejects(of_all_kinds))
    assert found == kinds.refused
    state = Log.open(of_all_kinds).state
    assert {known.end for known in state.inputs.values()} == {"complete"}
    assert [state.inputs[name].blank for name in kinds.inputs] == [1, 1, 0, 0, 0, 0, 0, 0]
    for about in rejects(of_all_kinds):
        if about["reason"] in ("binary", "empty_text"):
            assert Path(about["source"]).exists()


def test_the_dataset_is_proven_and_can_be_shown(of_all_kinds: Path) -> None:
    assert_proven(of_all_kinds)
    state = Log.open(of_all_kinds).state
    assert len(state.split("train")) > 5
    for file in state.split("train")[:-1]:
        assert file.rows >= SMALL.rows_per_file or file.bytes > 10_000
    about = describe(Log.open(of_all_kinds))
    assert about["sealed"]
    assert len(about["sample"]) == 3
    assert f"{of_all_kinds}: sealed, chunks of 96 tokens\n" in render(about)


def test_without_steps_documents_stay_whole(kinds: Kinds, tmp_path: Path) -> None:
    outcome = prepare_dataset(kinds.inputs, tmp_path / "out", (), SMALL, HERE, read=PIECES)
    assert outcome.sealed
    found = by_source(tmp_path / "out")
    assert {source: row["text"] for source, (row,) in found.items()} == kinds.texts
    assert {row["n_tokens"] for (row,) in found.values()} == {None}
    assert_proven(tmp_path / "out")


# What lies within a directory or an archive, and would be read as an input of its own.


def tar_of(path: Path, members: dict[str, bytes]) -> bytes:
    with tarfile.open(path, "w:gz" if path.suffix in (".tgz", ".gz") else "w") as archive:
        for name, raw in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["tree", "tar", "tgz", "zip"])
def test_archives_within_an_input_are_refused_by_that_name(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long they are, and they are no sign of damage. One that is text is a document."""
    held = {"a.c": b"int a;\n" * 9}
    raw = tar_of(tmp_path / "inner.tar", held)
    packed = tar_of(tmp_path / "inner.tgz", held)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "rows.parquet")
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("a.c", held["a.c"])
    files = {
        "old.tar": raw, "old.TGZ": packed, "old.tar.gz": gzip.compress(raw), "src/old.zip":
        zipped.getvalue(), "long.tar": raw * 3, "long.tar.gz": gzip.compress(raw * 3),
        "rows.parquet": (tmp_path / "rows.parquet").read_bytes(), "notes.tar": b"It is a text.\n",
        "icon.png": b"\x89PNG\0\0", "long.txt": b"long\n" * 5000, "a.c": b"int b;\n",
    }  # fmt: skip
    path, joint = tmp_path / f"all.{kind}", "#"
    if kind == "tree":
        joint = "/"
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        tar_of(path, files)
    events, heard = listened(monkeypatch)
    read = ReadConfig(max_document_bytes=20_000)
    run = replace(HERE, max_rejects=0.1)  # one of eleven is damaged: the text that is too long
    out = tmp_path / "out"
    prepare_dataset([path], out, (), SMALL, run, read=read, events=events)
    assert_proven(out)
    assert {row["text"] for row in read_rows(out, "train", "val")} == {
        "It is a text.\n",
        "int b;\n",
    }
    found = {about["source"]: about["reason"] for about in rejects(out)}
    archives = ["old.tar", "old.TGZ", "old.tar.gz", "src/old.zip", "long.tar", "long.tar.gz"]
    assert found == {
        f"{path}{joint}{name}": reason
        for reason, names in (
            ("archive", archives), ("parquet", ["rows.parquet"]), ("binary", ["icon.png"]),
            ("document_too_long", ["long.txt"]),
        )
        for name in names
    }  # fmt: skip
    told = sorted(event["message"] for event in heard if event["kind"] == "warn")
    do = "give it as an input of its own, beside this one"
    if kind != "tree":
        do = "unpack what it is in, and give it as an input of its own"
    assert len(told) == 2
    for message, reason in zip(told, ("archive", "parquet"), strict=True):
        named = message.removeprefix(f"refused as {reason}: ").partition(", perhaps others; ")[0]
        assert found[named] == reason
        assert message == (
            f"refused as {reason}: {named}, perhaps others; within another input it is not opened: "
            f"{do}"
        )


def test_a_sum_is_the_same_as_before_archives_had_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a dataset that was begun then goes on, and its generations are of the same text."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for k in range(60):
        (tree / f"{k}.c").write_text(f"int x{k};\n" * 9)
    raw = tar_of(tree / "old.tar", {"a.c": b"int a;\n"})
    (tree / "long.tar").write_bytes(raw * 3)
    read, run = replace(PIECES, max_document_bytes=20_000), replace(HERE, max_rejects=1.0)
    with monkeypatch.context() as patch:
        for module in (formats_module, inputs_module):
            patch.setattr(module, "refused_as", lambda reason, name: reason)

        def stop(event: Event) -> None:
            if event["kind"] == "commit" and event["record"] == 1:
                raise KeyboardInterrupt

        events = Events("chunk")
        events.listen(stop)
        with pytest.raises(KeyboardInterrupt):
            prepare_dataset([tree], tmp_path / "cut", (), SMALL, run, read=read, events=events)
        prepare_dataset([tree], tmp_path / "then", (), SMALL, run, read=read)
    for path in tree.iterdir():  # so that the text is read again, and compared
        os.utime(path, (1, 1))
    prepare_dataset([tree], tmp_path / "cut", (), SMALL, run, read=read)
    prepare_dataset([tree], tmp_path / "now", (), SMALL, run, read=read)
    then, cut, now = (
        Log.open(tmp_path / name).state.inputs[str(tree)] for name in ("then", "cut", "now")
    )
    assert then.proof["content"] == cut.proof["content"] == now.proof["content"]
    assert (then.dropped, now.dropped) == (
        {"binary": 1, "document_too_long": 1}, {"archive": 2},
    )  # fmt: skip
    assert sum(cut.dropped.values()) == 2
    assert_proven(tmp_path / "cut")


@pytest.mark.parametrize("kind", ["tree", "tar", "tgz", "zip"])
def test_json_lines_among_others_are_one_document_and_it_is_told(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    files = {"sub/all.jsonl.gz": gzip.compress(lines), "a.c": b"int a;\n"}
    path = tmp_path / f"all.{kind}"
    if kind == "tree":
        for name, data in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(data)
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
    else:
        tar_of(path, files)
    events, heard = listened(monkeypatch)
    prepare_dataset([path], tmp_path / "out", (), SMALL, HERE, events=events)
    texts = {row["text"] for row in read_rows(tmp_path / "out", "train", "val")}
    assert texts == {lines.decode(), "int a;\n"}
    (told,) = (event["message"] for event in heard if event["kind"] == "warn")
    assert told == (
        f"one document as it stands: {path}{'/' if kind == 'tree' else '#'}sub/all.jsonl.gz, "
        "perhaps others; JSON lines are read by line where the file is named as an input, or its "
        "directory holds nothing but JSONL and parquet files; in an archive they never are: "
        "unpack it"
    )
    if kind == "tree":  # alone they are read by line, and nothing is told
        (path / "a.c").unlink()
        events, heard = listened(monkeypatch)
        prepare_dataset([path], tmp_path / "lines", (), SMALL, HERE, events=events)
        assert {row["text"] for row in read_rows(tmp_path / "lines", "train", "val")} == {
            "one",
            "two",
        }
        assert [event for event in heard if event["kind"] == "warn"] == []


# Filters and dedup.


def test_every_rejection_has_its_reason(tree: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    dataset = tmp_path / "out"
    prepare_dataset([tree], dataset, STEPS, SMALL, HERE, read=BY_PATH, tokenizer=tokenizer_folder)
    assert_balanced(dataset)
    assert_proven(dataset)
    found = {Path(about["source"]).name: about for about in rejects(dataset) if "source" in about}
    reasons = {name: about["reason"] for name, about in found.items()}
    assert reasons.items() >= {
        ("made.py", "autogenerated"), ("small.c", "too_small"), ("wide.js", "blob"),
        ("nul.bin", "binary"),
    }  # fmt: skip
    dropped = Log.open(dataset).state.inputs[str(tree)].dropped
    for reason in ("exact_duplicate", "whitespace_duplicate", "near_duplicate"):
        assert dropped[reason] == 1
    kept = {Path(source).name for source in by_source(dataset)}
    assert not kept & {"copy.cpp", "spaced.cpp", "near.cpp", *reasons}
    features = [
        pq.read_table(io.BytesIO(path.read_bytes()))
        for path in sorted((dataset / "_features").iterdir())
    ]
    measured = pa.concat_tables(features)
    state = Log.open(dataset).state.inputs[str(tree)]
    assert measured.num_rows == state.read - dropped["binary"]
    filtered = {k: n for k, n in dropped.items() if k != "binary" and "duplicate" not in k}
    assert Counter(filter(None, measured["reason"].to_pylist())) == filtered


def test_a_duplicate_says_which_source_it_is(
    tree: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    dataset = tmp_path / "out"
    prepare_dataset([tree], dataset, STEPS, SMALL, HERE, read=BY_PATH, tokenizer=tokenizer_folder)
    told = {
        Path(about.get("source", "?")).name
        for about in rejects(dataset)
        if "duplicate" in about["reason"]
    }
    assert told == {"copy.cpp", "spaced.cpp", "near.cpp"}


def test_contaminated_documents_go(tree: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    items = tmp_path / "items.jsonl"
    victim = sorted(path for path in tree.rglob("*.cpp") if path.stat().st_size > 900)[0]
    items.write_text(json.dumps({"text": victim.read_text()}) + "\n")
    steps: list[Step] = [Decontaminate(files=(str(items),)), CHUNK]
    prepare_dataset([tree], tmp_path / "out", steps, SMALL, HERE, tokenizer=tokenizer_folder)
    gone = [about for about in rejects(tmp_path / "out") if about["reason"] == "contaminated"]
    assert str(victim) in [about["source"] for about in gone]
    assert len(gone) <= 2


# The same bytes, whoever computes them.


@pytest.fixture(scope="module")
def alone(tree: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One worker's dataset, undisturbed, with many pieces."""
    dataset = tmp_path_factory.mktemp("alone") / "out"
    prepare_dataset([tree], dataset, STEPS, SMALL, HERE, read=PIECES, tokenizer=tokenizer_folder)
    assert len(snapshot(dataset)) > 12
    return dataset


@pytest.mark.parametrize("workers", [2, 4])
def test_the_number_of_workers_changes_nothing(
    tree: Path, tokenizer_folder: Path, tmp_path: Path, alone: Path, workers: int
) -> None:
    run = replace(HERE, workers=workers)
    dataset = tmp_path / "out"
    prepare_dataset([tree], dataset, STEPS, SMALL, run, read=PIECES, tokenizer=tokenizer_folder)
    same(snapshot(dataset), snapshot(alone))


@pytest.mark.parametrize("piece_bytes", [1, 700, 30_000, 8 << 20])
def test_the_size_of_pieces_changes_nothing(
    tree: Path, tokenizer_folder: Path, tmp_path: Path, alone: Path, piece_bytes: int
) -> None:
    read = ReadConfig(piece_bytes=piece_bytes)
    dataset = tmp_path / "out"
    prepare_dataset([tree], dataset, STEPS, SMALL, HERE, read=read, tokenizer=tokenizer_folder)
    same(snapshot(dataset), snapshot(alone))


def test_the_size_of_pieces_changes_nothing_for_other_inputs(
    kinds: Kinds, of_all_kinds: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    read = ReadConfig(piece_bytes=9_000)
    prepare_dataset(
        kinds.inputs, tmp_path / "out", [CHUNK], SMALL, HERE, read=read, tokenizer=tokenizer_folder,
        tokens=True,
    )  # fmt: skip
    same(snapshot(tmp_path / "out"), snapshot(of_all_kinds))


def test_a_limit_of_rejects_does_not_go_by_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard also ends where it would have too many rejects, and that is where they are."""
    for name in ("_MAX_EVENTS", "_MAX_REJECTS"):
        monkeypatch.setattr(produce, name, 20, raising=False)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"text": "{k}"}}\n' if k % 7 else "{}\n" for k in range(300)))
    found = []
    for piece_bytes in (100, 1_000, 100_000):
        dataset = tmp_path / str(piece_bytes)
        read = ReadConfig(piece_bytes=piece_bytes)
        config = ShardConfig(val_fraction=0.1)
        prepare_dataset([path], dataset, (), config, replace(HERE, max_rejects=1), read=read)
        found.append(snapshot(dataset))
    same(found[0], found[1])
    same(found[0], found[2])


def test_features_are_written_alike_however_they_came() -> None:
    """Arrow writes other pages for a table that is in other pieces."""
    values = np.random.default_rng(1).random(150_000)
    whole = pa.table({"a": values, "b": np.arange(len(values))})
    found = set()
    for step in (len(values), 5000, 777):
        batches = [whole.slice(k, step).to_batches()[0] for k in range(0, len(values), step)]
        found.add(as_parquet(pa.Table.from_batches(batches)))
    assert len(found) == 1


# Stopped, and gone on with.


@pytest.mark.parametrize("commits", [1, 2, 4, 5])
def test_stopped_and_gone_on_with_other_workers(
    tree: Path, tokenizer_folder: Path, tmp_path: Path, alone: Path, commits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dataset = tmp_path / "out"

    def run(workers: int, events: Events | None = None) -> Outcome:
        return prepare_dataset(
            [tree], dataset, STEPS, SMALL, replace(HERE, workers=workers), read=PIECES,
            tokenizer=tokenizer_folder, events=events,
        )  # fmt: skip

    outcome = run(1, Stopper(monkeypatch, commits).events)
    assert (outcome.sealed, outcome.stopped_by) == (False, 15)
    assert commits <= len(Log.open(dataset).state.split("train")) <= commits + 2
    assert run(2 if commits == 2 else 1).sealed
    same(snapshot(dataset), snapshot(alone))
    assert_balanced(dataset)
    assert_proven(dataset)


def test_stopped_after_every_commit(kinds: Kinds, tmp_path: Path, of_all_kinds: Path,
                                    tokenizer_folder: Path,
                                    monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Over inputs of all kinds; each run makes one shard, and the next finds its way."""
    dataset = tmp_path / "out"
    runs = 0
    while True:
        outcome = prepare_dataset(
            kinds.inputs, dataset, [CHUNK], SMALL, HERE, read=PIECES, tokenizer=tokenizer_folder,
            tokens=True, events=Stopper(monkeypatch, 1).events,
        )  # fmt: skip
        runs += 1
        if outcome.sealed:
            break
    assert runs > 4
    same(snapshot(dataset), snapshot(of_all_kinds))
    assert_balanced(dataset)
    undisturbed = Log.open(of_all_kinds).state
    for name, known in Log.open(dataset).state.inputs.items():
        there = undisturbed.inputs[name]
        assert (known.read, known.kept, known.rows) == (there.read, there.kept, there.rows)
        assert known.dropped == there.dropped


def test_blank_lines_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'\n{{"text": "{k}"}}\n' for k in range(100)))
    outcome = None
    for _ in range(30):
        outcome = prepare_dataset(
            [path], tmp_path / "out", (), replace(SMALL, rows_per_file=10), HERE,
            events=Stopper(monkeypatch, 1).events,
        )  # fmt: skip
        if outcome.sealed:
            break
    assert outcome is not None
    assert outcome.state.inputs[str(path)].blank == 100


@pytest.mark.parametrize("commits", [21, 22, 23, 24])
def test_a_tree_is_known_again_at_every_shard(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    """At shards that end within a piece, which is proven by another walk, and with one."""
    dataset, config = tmp_path / "out", replace(SMALL, rows_per_file=1, val_fraction=0)
    events = Stopper(monkeypatch, commits).events
    read = ReadConfig(piece_bytes=1500)
    assert not prepare_dataset([tree], dataset, (), config, HERE, read=read, events=events).sealed
    assert prepare_dataset([tree], dataset, (), config, HERE, read=read).sealed
    prepare_dataset([tree], tmp_path / "fresh", (), config, HERE, read=read)
    same(snapshot(dataset), snapshot(tmp_path / "fresh"))


def test_an_input_that_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"text": "{k}"}}\n' for k in range(100)))
    config = replace(SMALL, rows_per_file=10)
    events = Stopper(monkeypatch, 2).events
    assert not prepare_dataset([path], tmp_path / "out", (), config, HERE, events=events).sealed
    path.write_text(path.read_text().replace("1", "2"))
    with pytest.raises(InputReplaced, match="is not what was read before"):
        prepare_dataset([path], tmp_path / "out", (), config, HERE)


def test_other_options_for_what_was_begun(tree: Path, tmp_path: Path, tokenizer_folder: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    events = Stopper(monkeypatch, 1).events
    prepare_dataset(
        [tree], tmp_path / "out", STEPS, SMALL, HERE, tokenizer=tokenizer_folder, events=events
    )
    other = [*STEPS[:2], ChunkConfig(max_tokens=128)]
    with pytest.raises(BadConfig, match="begun with other options") as caught:
        prepare_dataset([tree], tmp_path / "out", other, SMALL, HERE, tokenizer=tokenizer_folder)
    assert caught.value.why == "chunk.max_tokens: 96 before, 128 now"
    with pytest.raises(BadConfig, match="begun with other options") as caught:
        prepare_dataset(
            [tree], tmp_path / "out", STEPS[1:], SMALL, HERE, tokenizer=tokenizer_folder
        )
    assert caught.value.why == "steps: filter, dedup, chunk before, dedup, chunk now"
    assert not (tmp_path / "out" / "_gen").exists()


def test_a_second_run_finds_nothing_to_do(tree: Path, tmp_path: Path) -> None:
    config = replace(SMALL, val_fraction=0.1)
    first = prepare_dataset([tree], tmp_path / "out", (), config, HERE)
    before = snapshot(tmp_path / "out")
    records = first.state.n
    again = prepare_dataset([tree], tmp_path / "out", (), config, HERE)
    assert again.sealed
    assert again.state.n == records
    same(snapshot(tmp_path / "out"), before)
    (tmp_path / "more.txt").write_text("more")
    with pytest.raises(AlreadySealed, match=r"more.txt is not in it"):
        prepare_dataset([tree, tmp_path / "more.txt"], tmp_path / "out", (), config, HERE)


def test_a_sealed_dataset_notices_that_its_inputs_grew(
    tree: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    ours, lines = tmp_path / "tree", tmp_path / "in.jsonl"
    shutil.copytree(tree, ours)
    lines.write_text('{"text": "a"}\n')
    dataset, output = tmp_path / "out", tmp_path / "out.jsonl"

    def run(max_tokens: int = 96, **options: Any) -> Outcome:
        steps = [*STEPS[:2], ChunkConfig(max_tokens=max_tokens)]
        made = {"parquet_dir": dataset, **options}
        return prepare_dataset(
            [ours, lines], steps=steps, config=SMALL, run=HERE, tokenizer=tokenizer_folder, **made
        )

    def refused(**options: Any) -> AlreadySealed:
        with pytest.raises(AlreadySealed, match="tree holds more than is in it") as caught:
            run(**options)
        return caught.value

    to_lines: dict[str, Any] = {"parquet_dir": None, "output": output}
    count = run().state.inputs[str(ours)].to
    assert run(**to_lines).sealed
    before = snapshot(dataset)
    (ours / "zzz.c").write_text("int last;\n")
    assert refused().why == f"it has {count + 1} files, and {count} were read"
    assert refused().do == "write to a new directory"
    assert refused(**to_lines).do == "name another --output"
    # what is kept would be taken from a generation that did not know the file
    refused(max_tokens=64)
    (ours / "zzz.c").unlink()
    (ours / "000.c").write_text("int first;\n")
    refused(max_tokens=64)
    (ours / "000.c").unlink()
    lines.write_text('{"text": "b"}\n')
    with pytest.raises(InputReplaced, match=r"in\.jsonl is not what was read before"):
        run()
    lines.write_text('{"text": "a"}\n')
    same(snapshot(dataset), before)
    assert run().sealed
    assert run(max_tokens=64).sealed
    more = tmp_path / "more.txt"
    more.write_text("more")
    with pytest.raises(AlreadySealed, match=r"more.txt is not in it"):
        prepare_dataset(
            [ours, lines, more], None, STEPS, SMALL, HERE, tokenizer=tokenizer_folder,
            output=output,
        )  # fmt: skip


def test_suffixes_that_match_nothing(tree: Path, tmp_path: Path) -> None:
    read = ReadConfig(suffixes=frozenset({".xyz", ".abc"}))
    with pytest.raises(BadConfig, match=r"no file ends in \.abc or \.xyz") as caught:
        prepare_dataset([tree], tmp_path / "out", (), SMALL, HERE, read=read)
    assert caught.value.where == str(tree)
    assert caught.value.why.startswith("there are ")
    assert ".cpp (" in caught.value.why
    assert "--suffixes" in caught.value.do
    assert not (tmp_path / "out").exists()
    # a file that is named is read whatever its suffix, and another input may have some
    (tmp_path / "a.c").write_text("int a;\n")
    assert prepare_dataset(
        [tree, tmp_path / "a.c"], tmp_path / "out", (), SMALL, HERE, read=read
    ).sealed


# Damage.


def damaged(path: Path, good: int, bad: int) -> Path:
    lines = [f'{{"text": "{k}"}}\n' for k in range(good)] + ["{}\n"] * bad
    random.Random(1).shuffle(lines)
    path.write_text("".join(lines))
    return path


def test_too_many_rejects(tmp_path: Path) -> None:
    path = damaged(tmp_path / "in.jsonl", 100, 9)
    with pytest.raises(TooManyRejects) as caught:
        prepare_dataset([path], tmp_path / "out", (), SMALL, RunConfig(workers=1))
    assert caught.value.what.startswith("9 of 109 documents were refused, 8.3%; --max_rejects")
    assert caught.value.why == "no_text: 9"
    assert "--max_rejects 0.12" in caught.value.do
    assert prepare_dataset(
        [path], tmp_path / "out", (), SMALL, RunConfig(workers=1, max_rejects=0.12)
    )


def test_too_many_rejects_are_too_many_the_second_time(tmp_path: Path) -> None:
    path = damaged(tmp_path / "in.jsonl", 300, 30)
    for _ in range(2):
        with pytest.raises(TooManyRejects, match="30 of 330 documents"):
            prepare_dataset([path], tmp_path / "out", (), SMALL, RunConfig(workers=1))


def test_filtered_documents_are_no_damage(tree: Path, tmp_path: Path) -> None:
    steps: list[Step] = [FilterConfig(preset="none", min_bytes=100_000)]
    outcome = prepare_dataset(
        [tree], tmp_path / "out", steps, SMALL, RunConfig(workers=1, max_rejects=0)
    )
    assert outcome.sealed
    assert outcome.state.inputs[str(tree)].kept == 0
    assert_proven(tmp_path / "out")


def listened(monkeypatch: pytest.MonkeyPatch) -> tuple[Events, list[Event]]:
    """Events that are all noted, however fast they come."""
    monkeypatch.setattr(produce, "_EVENT_S", 0.0)
    events, heard = Events("chunk"), list[Event]()
    events.listen(heard.append)
    return events, heard


def test_progress_is_that_of_all_inputs(
    kinds: Kinds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sizes are known before they are read: so is how much is left."""
    events, heard = listened(monkeypatch)
    paths = [Path(name) for name in kinds.inputs]
    whole = sum(
        file.stat().st_size
        for path in paths
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file() and not file.name.startswith(".")
    )
    prepare_dataset(kinds.inputs, tmp_path / "data", (), SMALL, HERE, read=PIECES, events=events)
    told = [event for event in heard if event["kind"] == "progress"]
    assert {event["size"] for event in told} == {whole}
    at = [event["at"] for event in told]
    assert at == sorted(at)
    assert at[0] < whole * 0.2
    assert at[-1] > whole * 0.9
    assert len({event["input"] for event in told}) == len(kinds.inputs)
    assert told[-1]["refused"] == sum(told[-1]["reasons"].values()) > 0
    state = Log.open(tmp_path / "data").state
    refused: Counter[str] = Counter()
    for known in state.inputs.values():
        refused.update(known.dropped)
    assert {reason: refused[reason] for reason in told[-1]["reasons"]} == told[-1]["reasons"]


def test_a_run_that_goes_on_says_how_far_it_is(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, heard = listened(monkeypatch)
    run = replace(HERE, max_rejects=1.0)

    def stop(event: Event) -> None:
        if event["kind"] == "commit" and event["record"] == 2:
            raise KeyboardInterrupt

    events.listen(stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_dataset([tree], tmp_path / "data", (), SMALL, run, read=PIECES, events=events)
    before = [event["at"] for event in heard if event["kind"] == "progress"]
    events, heard = listened(monkeypatch)
    prepare_dataset([tree], tmp_path / "data", (), SMALL, run, read=PIECES, events=events)
    told = [event for event in heard if event["kind"] == "progress"]
    after = [event["at"] for event in told]
    (size,) = {event["size"] for event in told}
    # not from the beginning, nor at its end before it is: the tree is shuffled
    assert before[0] < after[0] < size
    assert after == sorted({*after})
    assert after[-1] == size


def test_what_filters_refuse_is_counted_while_it_runs(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, heard = listened(monkeypatch)
    steps = [FilterConfig(preset="none", min_bytes=400)]
    prepare_dataset([tree], tmp_path / "data", steps, SMALL, HERE, read=PIECES, events=events)
    told = [event["reasons"].get("too_small", 0) for event in heard if event["kind"] == "progress"]
    assert told == sorted(told)
    assert len({*told}) > 3


def test_shards_that_are_shorter_than_asked_for_are_told(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, expected in ((3_000, 1), (1 << 29, 0)):
        events, heard = listened(monkeypatch)
        config = replace(SMALL, rows_per_file=40, bytes_per_file=size)
        prepare_dataset([tree], tmp_path / str(size), (), config, HERE, events=events)
        told = [event["message"] for event in heard if event["kind"] == "warn"]
        assert len(told) == expected
        if expected:
            shard = Log.open(tmp_path / str(size)).state.split("train")[0]
            assert shard.rows < 40
            assert told[0] == (
                f"a shard has {shard.rows} rows, not the 40 of --rows_per_file: its text has "
                "reached --bytes_per_file 3000B, since it is held in memory"
            )


def test_shards_that_memory_cannot_hold_are_refused(tree: Path, tmp_path: Path) -> None:
    run = replace(HERE, max_memory_bytes=1 << 29)
    with pytest.raises(BadConfig) as caught:
        prepare_dataset([tree], tmp_path / "data", (), ShardConfig(bytes_per_file=384 << 20), run)
    assert caught.value.what == "shards of 384MB do not fit in --max_memory 512MB"
    assert caught.value.do == "give --bytes_per_file 128MB, or more memory"
    assert not (tmp_path / "data").exists()


def test_text_of_shards_in_memory_is_bounded(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small ones may be encoded side by side, of large ones two: one is filled meanwhile."""
    held: list[tuple[int, int]] = []
    config = replace(SMALL, bytes_per_file=4_000)
    committed = writer_module.ShardWriter.commit

    def commit(self: Any, ahead: int = 1 << 62, held_bytes: int = 1 << 62) -> Iterator[Any]:
        yield from committed(self, ahead, held_bytes)
        if held_bytes < 1 << 62:  # it was told how much may be held
            held.append((sum(batch.rows.held_bytes for batch, _ in self._pending), held_bytes))

    monkeypatch.setattr(writer_module.ShardWriter, "commit", commit)
    monkeypatch.setattr(dataset_module, "HELD_BYTES", 3_000)
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps({"text": "x" * 500}) + "\n" for _ in range(300)))
    shard_jsonl([lines], tmp_path / "data", config, FollowConfig(complete=True, threads=2))
    assert len(held) > 20
    assert all(pending <= most for pending, most in held)
    assert max(most for _, most in held) == 8_000
    # the shard that is filled beside one of 4,096 bytes need not wait before it is full
    assert min(most for _, most in held) >= 3_900


def test_what_a_buffer_held_before_changes_nothing(
    tmp_path: Path, tokenizer_folder: Path, sources: MakeSources, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is used again as it is: no byte beyond the text may be looked at."""
    lines = tmp_path / "in.jsonl"
    texts = [raw.decode() for raw in sources(4, 60).values()]
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made: dict[str, list[tuple[str, str]]] = {}
    lefts = {"zeros": 0, "quotes": 0x22, "newlines": 0x0A, "letters": 0x61, "wrong": 0xFF}
    for name, left in lefts.items():

        def used_buffer(size: int, left: int = left) -> Any:
            return np.full(size + PAD, left, np.uint8)

        for module in (jsonl_module, lines_module, columns_module):
            monkeypatch.setattr(module, "used_buffer", used_buffer)
        out = tmp_path / name
        shard_jsonl([lines], out / "shard", SMALL, FollowConfig(complete=True))
        prepare_dataset(
            [lines], out / "chunk", STEPS, SMALL, HERE, read=PIECES, tokenizer=tokenizer_folder,
            tokens=True,
        )  # fmt: skip
        made[name] = [
            (file.name, file.sha256)
            for kind in ("shard", "chunk")
            for file in Log.open(out / kind).state.files.values()
        ]
    assert len(made["zeros"]) > 9
    assert [name for name, files in made.items() if files != made["zeros"]] == []


@pytest.mark.parametrize("workers", [1, 2])
def test_without_grammars_code_is_cut_by_lines_which_is_said_once(
    tmp_path: Path, tokenizer_folder: Path, sources: MakeSources, workers: int
) -> None:
    """A plain install has no tree-sitter; a run that goes on with it would cut otherwise."""
    files = {name: raw for name, raw in sources(9, 80).items() if name.endswith((".py", ".go"))}
    for name, raw in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes(raw)

    def make(name: str, inputs: Path = tmp_path / "tree") -> list[str]:
        events, heard = Events("chunk"), list[Event]()
        events.listen(heard.append)
        run = replace(HERE, workers=workers)
        prepare_dataset(
            [inputs], tmp_path / name, [CHUNK], SMALL, run, read=PIECES,
            tokenizer=tokenizer_folder, events=events,
        )  # fmt: skip
        return [event["message"] for event in heard if event["kind"] == "warn"]

    assert make("with") == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tree_sitter_go", None)
        assert make("some") == [
            "cut by lines and indentation: go; grammars are not installed, which "
            "pip install 'penstock[code]' brings"
        ]
        patch.setitem(sys.modules, "tree_sitter", None)
        told = make("without")
        assert len(told) == 1
        assert "python" in told[0]
        (tmp_path / "a.cpp").write_text("int f() { return 1; }\n" * 40)
        assert make("cpp", tmp_path / "a.cpp") == []
    state = Log.open(tmp_path / "without").state
    assert state.opened is not None
    assert "python" in state.opened.config["prepare"]["by_lines"]
    texts: dict[str, str] = {}
    for row in sorted(read_rows(tmp_path / "without", "train", "val"), key=lambda row: row["part"]):
        texts[row["source"]] = texts.get(row["source"], "") + row["text"]
        assert row["n_tokens"] <= 95
        assert row["level"] in ("file", "declaration", "member", "statement", "line")
    assert texts == {f"{tmp_path}/tree/{name}": raw.decode() for name, raw in files.items()}
    # another generation: it is cut between functions now
    assert not any("cut by lines" in message for message in make("without"))
    assert (tmp_path / "without" / "_gen" / "00002").exists()


def test_an_empty_input(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("")
    assert prepare_dataset([path], tmp_path / "out", (), SMALL, HERE).sealed
    assert_proven(tmp_path / "out")


# What cannot be done.


def test_errors_before_anything_is_written(
    tree: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with pytest.raises(BadConfig, match="no tokenizer is given"):
        prepare_dataset([tree], out, [CHUNK])
    with pytest.raises(BadConfig, match="--tokens needs --tokenizer"):
        prepare_dataset([tree], out, tokens=True)
    with pytest.raises(BadConfig, match="--parquet_dir is empty"):
        prepare_dataset([tree], None)
    with pytest.raises(InputMissing, match="is not there"):
        prepare_dataset([tmp_path / "absent"], out)
    with pytest.raises(BadConfig, match="chunking is not the last step"):
        prepare_dataset([tree], out, [CHUNK, DedupConfig()], tokenizer=tokenizer_folder)
    with pytest.raises(BadConfig, match="DedupConfig is given twice"):
        prepare_dataset([tree], out, [DedupConfig(), DedupConfig()])
    with pytest.raises(BadConfig, match="str is not a step"):
        prepare_dataset([tree], out, ["chunk"])  # type: ignore[list-item]
    with pytest.raises(InputMissing, match="is not there"):
        prepare_dataset([tree], out, [Decontaminate(files=(str(tmp_path / "absent"),))])
    assert not out.exists()


def test_tokens_without_chunking_are_counted_or_refused(
    tree: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(tokenizer_folder)
    try:
        prepare_dataset(
            [tree], tmp_path / "out", (), SMALL, HERE, tokenizer=tokenizer_folder, tokens=True
        )
    except BadConfig:
        return
    for (row,) in by_source(tmp_path / "out").values():
        assert row["tokens"] == tokenizer.encode(row["text"]).tolist()


def test_run_config_says_what_is_wrong() -> None:
    for options, text in (
        ({"workers": 0}, "--workers is 0"),
        ({"engine": "spark"}, "--engine is 'spark'"),
        ({"max_rejects": 2}, "--max_rejects is 2"),
        ({"max_memory_bytes": 1 << 20}, "--max_memory is 1,048,576 bytes"),
    ):
        with pytest.raises(BadConfig, match=text):
            RunConfig(**options)


# Processors.


class Shout(DataProcessor):
    """Upper case, and nothing that is marked."""

    def process(self, documents: pa.RecordBatch) -> pa.Array:
        assert documents.schema.names == ["text", "source", "language"]
        marked = pc.match_substring(documents.column("text"), "drop me")
        return pc.if_else(marked, None, pc.utf8_upper(documents.column("text")))


class Short(DataProcessor):
    def process(self, documents: pa.RecordBatch) -> pa.Array:
        return documents.column("text").slice(1)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [f"document {k} {'drop me' if k % 5 == 0 else 'grün'}" for k in range(50)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


PLUGIN: Final = """\
import pyarrow.compute as pc
from penstock.plugins import register
from penstock.prepare.steps import DataProcessor

@register("processor", "{name}")
class Shout(DataProcessor):
    def process(self, documents):
        print("a plugin may print")
        marked = pc.match_substring(documents.column("text"), "drop me")
        return pc.if_else(marked, None, pc.utf8_upper(documents.column("text")))

class Broken(DataProcessor):
    def process(self, documents):
        raise ValueError("the dictionary of this plugin is not there")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of the user's with a processor of the same name."""
    name = f"plugin_{uuid.uuid4().hex}"  # of paths the next test may have the same
    (tmp_path / f"{name}.py").write_text(PLUGIN.format(name=name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield name
    plugins._known["processor"].pop(name, None)


def check_shouted(outcome: Outcome, path: Path, dataset: Path, name: str) -> None:
    state = outcome.state.inputs[str(path)]
    assert (state.kept, state.dropped) == (40, {name: 10})
    found = rows(dataset, "train") + rows(dataset, "val")
    assert len(found) == 40
    for row in found:
        assert row["text"] == row["text"].upper()
        assert row["text"].endswith("GRÜN")
        assert row["decoding"] == "processed"
    assert {about["reason"] for about in rejects(dataset)} == {name}
    assert_balanced(dataset)
    assert_proven(dataset)


@pytest.mark.parametrize("how", ["module:Class", "registered"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_processor_changes_and_drops(
    texts: Path, tmp_path: Path, plugin: str, how: str, workers: int
) -> None:
    name = f"{plugin}:Shout" if how == "module:Class" else plugin
    run = RunConfig(workers=workers, plugins=() if how == "module:Class" else (plugin,))
    dataset = tmp_path / "out"
    outcome = prepare_dataset(
        [texts], dataset, make_steps(processors=[name]), SMALL, run, read=PIECES
    )
    check_shouted(outcome, texts, dataset, name)


def test_a_processor_may_drop_all(texts: Path, tmp_path: Path, monkeypatch: Any,
                                  tokenizer_folder: Path) -> None:  # fmt: skip
    texts.write_text('{"text": "drop me"}\n' * 9)
    monkeypatch.setattr(Process, "load", lambda step: Shout())
    steps: list[Step] = [Process(name="x"), *STEPS]
    outcome = prepare_dataset(
        [texts], tmp_path / "out", steps, SMALL, HERE, tokenizer=tokenizer_folder
    )
    assert outcome.state.inputs[str(texts)].dropped == {"x": 9}


def test_a_processor_that_gives_too_few_texts(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "load", lambda step: Short())
    with pytest.raises(BadConfig, match="did not answer for each document") as caught:
        prepare_dataset([texts], tmp_path / "out", [Process(name="short")], SMALL, HERE)
    assert caught.value.why == "it gave 49 texts for 50 documents"


def test_a_processor_that_makes_too_much(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Process, "load", lambda step: Shout())
    monkeypatch.setattr(rows_module, "_MAX_TEXT_BYTES", 100)
    with pytest.raises(BadConfig, match=r"processor loud made [\d,]+ bytes of [\d,]+") as caught:
        prepare_dataset([texts], tmp_path / "out", [Process(name="loud")], SMALL, HERE)
    assert caught.value.why == "a piece may become 100 bytes"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_processor_that_raises(texts: Path, tmp_path: Path, plugin: str, workers: int) -> None:
    steps = make_steps(processors=[f"{plugin}:Broken"])
    with pytest.raises(PenstockError) as caught:
        prepare_dataset([texts], tmp_path / "out", steps, SMALL, RunConfig(workers=workers))
    assert "ValueError: the dictionary of this plugin is not there" in str(caught.value)
    assert f"{plugin}.py" in str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["no.such.module:Shout", "json:Shout", "shuot"])
def test_a_processor_that_is_not_there(
    texts: Path, tmp_path: Path, name: str, workers: int
) -> None:
    steps = make_steps(processors=[name])
    with pytest.raises(BadConfig, match="there is no processor") as caught:
        prepare_dataset([texts], tmp_path / "out", steps, SMALL, RunConfig(workers=workers))
    assert name in caught.value.what


def test_a_plugin_that_is_not_there(texts: Path, tmp_path: Path) -> None:
    run = RunConfig(workers=1, plugins=("no.such.plugin",))
    with pytest.raises(BadConfig, match=r"no\.such\.plugin"):
        prepare_dataset([texts], tmp_path / "out", (), SMALL, run)


def test_what_is_written_may_not_lie_in_an_input(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.cpp").write_text("int a;\n")
    for made in (tmp_path / "in", tmp_path / "in" / "out"):
        with pytest.raises(BadConfig, match="is written, and lies in an input"):
            prepare_dataset([tmp_path / "in"], made)
    with pytest.raises(BadConfig, match="lies in another input"):
        prepare_dataset([tmp_path / "in", tmp_path / "in" / "a.cpp"], tmp_path / "out")


def test_redacted_documents_are_counted(tmp_path: Path) -> None:
    """By workers, so before dedup; not what is refused."""
    key = "AKIA" + "Q7RT5WXZ2PLMN4KD"
    texts = ["plain text, nothing else\n" * 9, f"one {key} here\n" * 9, f"aws_key = {key}\n" * 7]
    for k, text in enumerate([*texts, texts[1]]):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{k}.txt").write_text(text)
    for workers in (1, 2):
        events = Events("chunk")
        ends: list[Event] = []
        events.listen(ends.append)
        outcome = prepare_dataset(
            [tmp_path / "in"], tmp_path / f"out{workers}",
            [FilterConfig(preset="none", secrets="redact"), DedupConfig()], SMALL,
            replace(HERE, workers=workers), events=events,
        )  # fmt: skip
        assert outcome.redacted == 3
        assert ends[-1]["redacted"] == 3
    steps = [FilterConfig(preset="none", secrets="reject")]
    assert prepare_dataset([tmp_path / "in"], tmp_path / "no", steps, SMALL, HERE).redacted == 0


class Wide:
    """A pool of some width that answers only after a while."""

    width = 6

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._waiting: list[tuple[Any, Future[Any]]] = []
        self._lock = threading.Lock()
        self.most = 0
        self._timer = threading.Timer(1, self._answer)
        self._timer.start()

    def submit(self, request: Any) -> "Future[Any]":
        with self._lock:
            if self.most:
                return self._pool.submit(request)
            done: Future[Any] = Future()
            self._waiting.append((request, done))
            return done

    def _answer(self) -> None:
        with self._lock:
            self.most = len(self._waiting)
        for request, done in self._waiting:
            done.set_result(self._pool.submit(request).result())

    def close(self) -> None:
        self._timer.join()
        self._pool.close()


def test_pieces_in_flight_go_by_the_width_of_the_pool(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a cluster's CPUs, say; and by memory."""
    pools: list[Wide] = []

    def open_wide(*arguments: Any) -> Wide:
        pools.append(Wide(open_pool(*arguments)))
        return pools[-1]

    monkeypatch.setattr(gather, "open_pool", open_wide)
    read = ReadConfig(piece_bytes=500)
    assert prepare_dataset([tree], tmp_path / "a", (), SMALL, HERE, read=read).sealed
    (tmp_path / "long.jsonl").write_text(('{"text": "' + "x" * 200_000 + '"}\n') * 400)
    read, run = ReadConfig(piece_bytes=5 << 20), replace(HERE, max_memory_bytes=512 << 20)
    assert prepare_dataset([tmp_path / "long.jsonl"], tmp_path / "b", (), SMALL, run, read=read)
    assert [pool.most for pool in pools] == [14, 6]


def test_a_secret_is_not_shown_in_the_rejects(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    key = "AKIA" + "Q7RT5WXZ2PLMN4KD"
    text = f'const char* key = "{key}";\n' + "int f(int x) { return x + 1; }\n" * 9
    (tmp_path / "in" / "a.cpp").write_text(text)
    steps = [FilterConfig(preset="code", secrets="reject")]
    outcome = prepare_dataset([tmp_path / "in"], tmp_path / "out", steps, run=RunConfig(workers=1))
    (known,) = outcome.state.inputs.values()
    assert sum(known.dropped.values()) == 1
    (rejects,) = (tmp_path / "out" / "_rejects").iterdir()
    assert key not in rejects.read_text()
    assert "*" * len(key) in rejects.read_text()
