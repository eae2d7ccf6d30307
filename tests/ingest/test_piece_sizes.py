"""What a piece becomes is bounded, whatever its bytes were: compressed, repeated, huge."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from penstock.errors import BadInput
from penstock.ingest.formats import read_parts
from penstock.ingest.inputs import Piece, ReadConfig, open_input

COMPRESS: Final[dict[str, Callable[[bytes], bytes]]] = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
PIECE: Final = 4096
MOST: Final = 50_000
CONFIG: Final = ReadConfig(piece_bytes=PIECE, max_document_bytes=MOST)


def documents(suffix: str) -> dict[str, bytes]:
    """Small ones, large ones, one that is too long; all of them small when they are compressed."""
    sizes = [300, 40_000, 500, 45_000, 49_000, 200, MOST + 1, 700, 9_000, 9_000, 9_000]
    texts = {f"d/{k:02d}.c": b"// %d\n" % k + b"a" * size for k, size in enumerate(sizes)}
    return {name + suffix: COMPRESS[suffix](text) for name, text in texts.items()} | {"e.c": b"int"}


def make_tree(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "tree"


def make_tar(folder: Path, files: dict[str, bytes], suffix: str = "") -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path = folder / f"some.tar{suffix}"
    path.write_bytes(COMPRESS[suffix](buffer.getvalue()) if suffix else buffer.getvalue())
    return path


def make_zip(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "some.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


KINDS: Final[dict[str, Callable[[Path, dict[str, bytes]], Path]]] = {
    "tree": make_tree,
    "tar": make_tar,
    "tar.gz": lambda folder, files: make_tar(folder, files, ".gz"),
    "zip": make_zip,
}


def read_all(path: Path, config: ReadConfig) -> tuple[list[tuple[int, bytes]], list[str], int]:
    """Documents by unit, why others were refused, and how many parts it took."""
    found: list[tuple[int, bytes]] = []
    refused: list[str] = []
    count, at = 0, 0
    for made in open_input(str(path), 0, config).pieces(0):
        for part, read in read_parts(Piece.attach(made.header(), made.data), config, str(path)):
            assert part.start == at
            at = part.end
            count += 1
            texts = read.documents
            assert texts.at[-1] <= max(part.bytes, config.piece_bytes)
            units = [*texts.start.tolist(), *(r.start for r in read.refusals), *read.blank_at]
            assert sorted(units) == list(range(part.start, part.end))
            found += [(int(texts.start[k]), texts.text(k)) for k in range(len(texts))]
            refused += [refusal.reason for refusal in read.refusals]
    return found, refused, count


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compressed_is_read_alike_everywhere_and_bounded(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    path = KINDS[kind](tmp_path, documents(suffix))
    found, refused, parts = read_all(path, replace(CONFIG, order="path"))
    plain = ReadConfig(piece_bytes=1 << 20, max_document_bytes=MOST, order="path")
    assert read_all(path, plain)[:2] == (found, refused)
    assert refused == ["document_too_long"]
    assert [unit for unit, _ in found] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    assert [len(text) for _, text in found][:3] == [305, 40_005, 505]
    assert found[-1][1] == b"int"
    assert parts >= 6


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compressed_and_damaged_is_refused(tmp_path: Path, kind: str) -> None:
    cut = {
        f"{k}.c{suffix}": COMPRESS[suffix](b"int a;" * 999)[:-9]
        for k, suffix in enumerate(COMPRESS)
    }
    found, refused, _ = read_all(KINDS[kind](tmp_path, cut | {"e.c": b"int"}), ReadConfig())
    assert refused == ["unreadable"] * 4
    assert [text for _, text in found] == [b"int"]


def test_the_pieces_of_an_input_depend_on_it_alone(tmp_path: Path) -> None:
    """Read on from any unit, the documents are the same."""
    path = make_tree(tmp_path, documents(".gz"))
    whole = read_all(path, CONFIG)[0]
    for start in range(12):
        found = []
        for piece in open_input(str(path), 0, CONFIG).pieces(start):
            for _, read in read_parts(piece, CONFIG, str(path)):
                texts = read.documents
                found += [(int(texts.start[k]), texts.text(k)) for k in range(len(texts))]
        assert found == [(unit, text) for unit, text in whole if unit >= start]


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "string_view", "dictionary"])
def test_values_that_a_parquet_file_holds_once(tmp_path: Path, kind: str) -> None:
    """400 rows become 10 MB, and take 130 KB in the file."""
    path = tmp_path / "repeated.parquet"
    texts = ["a" * 40_000, "b" * 30_000, "c" * 60_000, None, ""]
    values = pa.array([texts[k % 5] for k in range(400)])
    types = {"string": pa.string(), "dictionary": pa.dictionary(pa.int32(), pa.string())}
    wanted = types.get(kind) or getattr(pa, kind)()
    pq.write_table(pa.table({"text": values.cast(wanted)}), path, row_group_size=150)
    found, refused, parts = read_all(path, CONFIG)
    assert [(unit % 5, text[:1]) for unit, text in found] == [(0, b"a"), (1, b"b")] * 80
    assert refused == ["document_too_long", "no_text", "empty_text"] * 80
    assert parts >= 160


def test_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    columns = [pa.array(["a"]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "text"]), path)
    with pytest.raises(BadInput, match=r"twice\.parquet has 2 columns 'text'") as caught:
        open_input(str(path), 0, CONFIG)
    assert caught.value.do == "rename all but one of them"


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_parquet_of_every_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    """Arrow reads by dictionary only some of them."""
    texts = [f"text number {k}" for k in range(500)]
    path = tmp_path / "d.parquet"
    pq.write_table(
        pa.table({"text": texts}), path, use_dictionary=False, column_encoding={"text": encoding}
    )
    opened = open_input(str(path), 0, ReadConfig())
    found = [
        read.documents.text(k).decode()
        for piece in opened.pieces(0)
        for _, read in read_parts(piece, ReadConfig(), str(path))
        for k in range(len(read.documents))
    ]
    assert found == texts
