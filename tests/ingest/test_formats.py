"""Every format: the same documents whatever the piece size, from any unit on; hostile inputs."""

import bz2
import gzip
import io
import itertools
import json
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import plugins
from penstock.errors import BadConfig, BadInput, InputDamaged, InputReplaced
from penstock.ingest import inputs
from penstock.ingest.formats import read_parts
from penstock.ingest.inputs import Piece, ReadConfig, open_input, read_piece
from penstock.kernels import PAD
from penstock.records import DECODINGS, Refusal

Document = tuple[str, int, int, str]

COMPRESS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


BY_PATH: Final = ReadConfig(order="path")


def read_all(
    name: Path | str, config: ReadConfig | None = None, start: int = 0
) -> tuple[list[Document], list[Refusal]]:
    """All documents of an input, through pieces as they are sent to a worker."""
    config = config or ReadConfig()
    input = open_input(str(name), 3, config)
    documents: list[Document] = []
    refusals: list[Refusal] = []
    at = start
    for made in input.pieces(start):
        piece = Piece.attach(made.header(), made.data)
        assert piece == made
        assert piece.input == 3
        assert piece.start == at < piece.end
        at = piece.end
        for part, read in read_parts(piece, config, input.name):
            found = read.documents
            assert len(found.data) >= found.at[-1] + PAD
            assert len(found.decoding) == len(found.start) == len(found)
            places = sorted(
                [*zip(found.start.tolist(), found.end.tolist(), strict=True)]
                + [(refusal.start, refusal.end) for refusal in read.refusals]
            )
            for low, high in places:
                assert part.start <= low < high <= part.end
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(places))
            for k in range(len(found)):
                start_k, end_k = int(found.start[k]), int(found.end[k])
                source = found.sources[k] if found.sources else ""
                if found.places and found.places.source is not None:
                    source = found.places.source[k].as_py()
                if not source:
                    source = str(name) if found.places else f"{name}#{start_k}-{end_k}"
                documents.append((found.text(k).decode(), start_k, end_k, source))
            refusals += read.refusals
    input.close()
    return documents, refusals


def texts(name: Path | str, config: ReadConfig | None = None) -> list[str]:
    return [document[0] for document in read_all(name, config)[0]]


def reasons(name: Path | str, config: ReadConfig | None = None) -> list[str]:
    return [refusal.reason for refusal in read_all(name, config)[1]]


# Every kind of input, one small example of each.


LINES: Final = (
    b'\xef\xbb\xbf{"text": "first \xc3\xa9"}\n\n{"text": ""}\n{"text": "second"}  \nnot json\n'
    b'{"other": 1}\n{"text": "' + b"long " * 30 + b'"}\n   \n{"text": "last"}'
)
FILES: Final = {
    "a.c": b"int a;\n",
    "a/b.py": "größer = 1\n".encode("latin-1"),
    "a/bin.c": b"\x7fELF\0\0",
    "a/c.rs": b"fn main() {}\n",
    "empty.py": b"",
    "z.md": "# Überschrift\n".encode("utf-16"),
}


def make_jsonl(folder: Path, suffix: str = "") -> Path:
    path = folder / f"some.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES))
    return path


def make_parquet(folder: Path) -> Path:
    path = folder / "some.parquet"
    rows = ["one", None, "", "two\0", "drei ä", "x" * 300, "last"]
    pq.write_table(pa.table({"id": range(7), "text": rows}), path, row_group_size=3)
    return path


def make_tree(folder: Path) -> Path:
    root = folder / "tree"
    for name, data in FILES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return root


def tar_bytes(members: dict[str, bytes], **options: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def make_tar(folder: Path, suffix: str = "") -> Path:
    path = folder / f"some.tar{suffix}"
    path.write_bytes(COMPRESS[suffix](tar_bytes(FILES)))
    return path


def make_zip(folder: Path) -> Path:
    path = folder / "some.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("folder/", b"")
        for name, data in FILES.items():
            archive.writestr(name, data)
    return path


def make_items(folder: Path) -> Path:
    path = folder / "some.twolines.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n\nfo\xfcr\nfive\n"))
    return path


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: dict(found) for kind, found in plugins._known.items()}
    monkeypatch.setattr(plugins, "_known", known)

    @plugins.register("format", "twolines", suffixes=(".twolines",))
    def read_lines(file: BinaryIO) -> Iterator[tuple[bytes | str, str]]:
        for number, line in enumerate(file):
            text = line.rstrip(b"\n")
            yield (text.decode() if text.isascii() else text), f"line {number}"


MAKERS: Final[dict[str, Callable[[Path], Path]]] = {
    **{f"jsonl{suffix}": partial(make_jsonl, suffix=suffix) for suffix in COMPRESS},
    "parquet": make_parquet,
    "tree": make_tree,
    **{f"tar{suffix}": partial(make_tar, suffix=suffix) for suffix in COMPRESS},
    "zip": make_zip,
    "items": make_items,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_any_piece_size_gives_the_same(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    whole = read_all(path)
    assert len(whole[0]) >= 4
    for piece_bytes in [*range(1, 40), 64, 100, 150, 200, 1000]:
        assert read_all(path, ReadConfig(piece_bytes=piece_bytes)) == whole


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("piece_bytes", [1, 20, 1 << 20])
def test_reading_goes_on_from_any_unit(kind: str, piece_bytes: int, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    config = ReadConfig(piece_bytes=piece_bytes)
    documents, refusals = read_all(path, config)
    ends = {d[2] for d in documents} | {refusal.end for refusal in refusals} | {0}
    for to in sorted(ends):
        rest = read_all(path, config, to)
        assert rest[0] == [document for document in documents if document[1] >= to]
        assert rest[1] == [refusal for refusal in refusals if refusal.start >= to]


@pytest.mark.parametrize("kind", MAKERS)
def test_an_input_is_known_again(kind: str, tmp_path: Path) -> None:
    """A proof holds for the same input, and not for one that was changed before `to`."""
    path = MAKERS[kind](tmp_path)
    config = ReadConfig(piece_bytes=20)
    first = open_input(str(path), 0, config)
    proofs = {0: first.prove(0)}
    for piece in first.pieces(0):
        proofs[piece.end] = first.prove(piece.end)
    first.close()
    again = open_input(str(path), 0, config)
    for to, proof in proofs.items():
        assert json.loads(json.dumps(proof)) == proof
        again.check(to, proof)
    again.close()
    last = max(proofs)
    changed = path / "a.c" if path.is_dir() else path
    data = bytearray(changed.read_bytes())
    data[len(data) // 2] ^= 1
    changed.write_bytes(data[:-3] if path.is_dir() else data)
    other = open_input(str(path), 0, config) if kind != "parquet" else first
    with pytest.raises(InputReplaced) as caught:
        other.check(last, proofs[last])
    assert caught.value.what == f"{path.name} is not what was read before"
    assert caught.value.why.startswith("up to ")
    assert " before" in caught.value.why
    assert "bring the old one back" in caught.value.do
    other.close()


# JSON lines.


def test_lines_become_documents(tmp_path: Path) -> None:
    path = make_jsonl(tmp_path)
    documents, refusals = read_all(path)
    assert [d[0] for d in documents] == ["first é", "second", "long " * 30, "last"]
    assert documents[0][1:] == (0, 24, str(path))
    assert documents[-1][2] == len(LINES)
    assert [r.reason for r in refusals] == ["empty_text", "invalid_json", "no_text"]
    assert refusals[1].sample == "not json"
    piece = next(open_input(str(path), 0, ReadConfig()).pieces(0))
    assert read_piece(piece, ReadConfig(), str(path)).blank_at == [24, 244]


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(
            [b"", b" ", b"\t\r", b"\r", b'{"text": "a"}', b' {"text": "b"}\r', b"{}", b"\x0b", b"x"]
        )
    ),
    marked=st.booleans(),
    ended=st.booleans(),
    piece_bytes=st.sampled_from([1, 7, 1 << 20]),
)
def test_where_blank_lines_are(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], marked: bool, ended: bool,
    piece_bytes: int,
) -> None:  # fmt: skip
    path = tmp_path_factory.mktemp("blank") / "in.jsonl"
    lines = [b"\xef\xbb\xbf" * marked + b"".join(lines[:1]), *lines[1:]]
    path.write_bytes(b"\n".join(lines) + b"\n" * ended)
    starts = list(itertools.accumulate((len(line) + 1 for line in lines), initial=0))
    wanted = [
        start
        for start, line in zip(starts, lines, strict=False)
        if not line.removeprefix(b"\xef\xbb\xbf" if start == 0 else b"").strip(b" \t\r")
        and (start < path.stat().st_size)
    ]
    config = ReadConfig(piece_bytes=piece_bytes)
    found = []
    for piece in open_input(str(path), 0, config).pieces(0):
        found += read_piece(piece, config, str(path)).blank_at
    assert found == wanted


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=20).map(
                lambda text: json.dumps({"text": text}).encode()
            ),
            st.binary(max_size=12).map(lambda raw: raw.replace(b"\n", b"")),
            st.integers(0, 60).map(
                lambda k: json.dumps(
                    {
                        "text": f"t{k}",
                        "source": f"f{k}",
                        "start": 1,
                        "end": 2,
                        "part": 0,
                        "parts": 1,
                    }
                ).encode()
            ),
        ),
        max_size=12,
    ),
    st.booleans(),
    st.integers(1, 100),
    st.integers(20, 200),
    st.sampled_from(["", ".gz"]),
)
def test_lines_whatever_they_are(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    ends: bool,
    piece_bytes: int,
    most: int,
    suffix: str,
) -> None:
    data = b"\n".join(lines) + (b"\n" if ends and lines else b"")
    path = tmp_path_factory.getbasetemp() / f"any.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](data))
    config = ReadConfig(max_document_bytes=most)
    whole = read_all(path, config)
    assert read_all(path, ReadConfig(max_document_bytes=most, piece_bytes=piece_bytes)) == whole
    expected = []
    at = 0
    for line in data.split(b"\n"):
        try:
            text = json.loads(line.removeprefix(b"\xef\xbb\xbf") if at == 0 else line)["text"]
            if text and "\0" not in text and len(line) <= most:
                expected.append((text, at))
        except (ValueError, KeyError, TypeError):
            pass
        at += len(line) + 1
    assert [(text, start) for text, start, _, _ in whole[0]] == expected


def test_lines_that_name_their_source(tmp_path: Path) -> None:
    path = tmp_path / "told.jsonl"
    told = {"text": "b", "source": "x.c", "start": 5, "end": 9, "part": 1, "parts": 2}
    path.write_text(
        f'{{"text": "a"}}\n\n{json.dumps(told)}\n{{"text": "c", "source": "y"}}\n{{}}\n'
    )
    documents, refusals = read_all(path)
    end = 15 + len(json.dumps(told)) + 1
    assert documents[:2] == [("a", 0, 14, str(path)), ("b", 15, end, "x.c")]
    assert documents[2][3] == str(path)
    assert [refusal.reason for refusal in refusals] == ["no_text"]


def test_another_field_holds_the_text(tmp_path: Path) -> None:
    path = tmp_path / "field.jsonl"
    path.write_text('{"content": "x", "text": "y"}\n')
    assert texts(path, ReadConfig(text_field="content")) == ["x"]


def test_the_last_line_may_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text('{"text": "whole"}\n{"text": "ha')
    assert texts(path) == ["whole"]
    assert reasons(path) == ["half_line"]


def test_a_file_that_lost_its_end(tmp_path: Path) -> None:
    path = make_jsonl(tmp_path)
    config = ReadConfig()
    piece = next(open_input(str(path), 0, config).pieces(0))
    path.write_bytes(LINES[:-40])
    with pytest.raises(InputReplaced) as caught:
        read_piece(piece, config, "some.jsonl")
    assert caught.value.what == "some.jsonl is shorter than it was"
    assert f"lines to {len(LINES)} were planned" in caught.value.why
    assert caught.value.do == "run again when nobody writes to it"
    with pytest.raises(InputReplaced, match="is not what was read before") as caught:
        open_input(str(path), 0, config).check(len(LINES), {})
    assert f"{len(LINES)} were read from it" in caught.value.why


def test_a_file_that_went_on(tmp_path: Path) -> None:
    path = tmp_path / "more.jsonl"
    path.write_text('{"text": "a"}\n')
    proof = open_input(str(path), 0, ReadConfig()).prove(14)
    path.write_text('{"text": "a"}\n{"text": "b"}')
    open_input(str(path), 0, ReadConfig()).check(14, proof)
    proof = open_input(str(path), 0, ReadConfig()).prove(27)
    path.write_text('{"text": "a"}\n{"text": "b"} ')
    with pytest.raises(InputReplaced) as caught:
        open_input(str(path), 0, ReadConfig()).check(27, proof)
    assert caught.value.why == "it went on at byte 27, within its last line"


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_that_is_too_long_is_never_held(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"long.jsonl{suffix}"
    warm = make_jsonl(tmp_path)
    most, long = 1 << 20, 96 << 20
    body = b'{"text": "a"}\n{"text": "' + b"x" * long + b'"}\n{"text": "b"}\n'
    path.write_bytes(COMPRESS[suffix](body))
    script = f"""
import sys
from penstock.ingest.inputs import ReadConfig, open_input, read_piece
config = ReadConfig(max_document_bytes={most}, piece_bytes=1 << 20)
def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
import pyarrow, isal.igzip
warm = {str(warm)!r}  # loads the kernels
read_piece(next(open_input(warm, 0, config).pieces(0)), config, "warm")
before = peak()
texts, refused = [], []
for piece in open_input({str(path)!r}, 0, config).pieces(0):
    read = read_piece(piece, config, "long")
    texts += [read.documents.text(k) for k in range(len(read.documents))]
    refused += [(r.reason, r.start, r.end, r.sample[:12]) for r in read.refusals]
assert texts == [b"a", b"b"], texts
assert refused == [("line_too_long", 14, {14 + 13 + long}, '{{"text": "xx')], refused
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24 << 10  # KB


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".bz2", ".xz"])
def test_a_compressed_file_that_was_cut(tmp_path: Path, suffix: str) -> None:
    path = make_jsonl(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputDamaged, match=f"some.jsonl{suffix} ends early or is corrupt"):
        read_all(path)


# Parquet.


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "large_binary", "dictionary"])
def test_columns_of_any_text_type(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "some.parquet"
    values = pa.array(["a", "ä", None, "", "a", "n\0l", "x" * 99])
    values = values.dictionary_encode() if kind == "dictionary" else values.cast(kind)
    pq.write_table(pa.table({"text": values}), path)
    config = ReadConfig(max_document_bytes=50)
    documents, refusals = read_all(path, config)
    assert documents == [
        ("a", 0, 1, f"{path}#0-1"),
        ("ä", 1, 2, f"{path}#1-2"),
        ("a", 4, 5, f"{path}#4-5"),
    ]
    assert [(r.reason, r.start) for r in refusals] == [
        ("no_text", 2),
        ("empty_text", 3),
        ("nul_in_text", 5),
        ("document_too_long", 6),
    ]


def test_values_that_are_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    values = [b"plain", b"gr\xfcn", None, b"\xff\0", "x".encode("utf-16"), b"\xef\xbb\xbfm", b""]
    pq.write_table(pa.table({"text": pa.array(values, pa.binary())}), path)
    assert texts(path) == ["plain", "grün", "\ufeffx", "\ufeffm"]
    assert reasons(path) == ["no_text", "binary", "empty_text"]
    piece = next(open_input(str(path), 0, ReadConfig()).pieces(0))
    found = read_piece(piece, ReadConfig(), "").documents.decoding.tolist()
    assert [DECODINGS[k] for k in found] == ["utf-8", "latin-1", "utf-16", "utf-8"]
    rejects = reasons(path, ReadConfig(decode="reject"))
    assert rejects == ["invalid_utf8", "no_text", "binary", "empty_text"]


def test_a_large_row_group_is_cut_by_rows(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    pq.write_table(
        pa.table({"text": [f"{k} " * 100 for k in range(500)]}), path, compression="none"
    )
    config = ReadConfig(piece_bytes=1000)
    pieces = list(open_input(str(path), 0, config).pieces(0))
    assert len(pieces) > 10
    assert texts(path, config) == texts(path)
    assert len(texts(path)) == 500


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"PAR1 no PAR1")
    with pytest.raises(InputDamaged, match=r"bad\.parquet is not a parquet file") as caught:
        read_all(path)
    assert caught.value.do == "fetch it again"


def test_a_parquet_file_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "bad.parquet"
    pq.write_table(pa.table({"text": [f"{k}" * 50 for k in range(900)]}), path)
    data = bytearray(path.read_bytes())
    data[10:400] = os.urandom(390)
    path.write_bytes(data)
    with pytest.raises(InputDamaged, match=r"bad\.parquet is damaged") as caught:
        read_all(path)
    assert "rows 0 to 900" in caught.value.where


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    path = make_parquet(tmp_path)
    with pytest.raises(BadInput, match=r"some\.parquet has no column 'txt'") as caught:
        read_all(path, ReadConfig(text_field="txt"))
    assert caught.value.do == "did you mean text? choose from id, text"
    with pytest.raises(BadInput, match=r"column 'id' of some\.parquet is int64") as caught:
        read_all(path, ReadConfig(text_field="id"))
    assert caught.value.do == "name a text column"


@pytest.mark.parametrize("name", ["some.parquet.gz", "some.zip.xz"])
def test_a_compressed_parquet_or_zip(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(BadInput, match=rf"{name} is a compressed \w+ file") as caught:
        read_all(tmp_path / name)
    assert caught.value.do == "decompress it first"


# Files and archives.


@pytest.mark.parametrize("kind", ["tree", "tar", "tar.gz", "zip"])
def test_files_wherever_they_are(kind: str, tmp_path: Path) -> None:
    path = MAKERS[kind](tmp_path)
    joint = "/" if kind == "tree" else "#"
    documents, refusals = read_all(path)
    found = {source.removeprefix(f"{path}{joint}"): text for text, _, _, source in documents}
    assert found == {
        "a.c": "int a;\n",
        "a/b.py": "größer = 1\n",
        "a/c.rs": "fn main() {}\n",
        "z.md": "\ufeff# Überschrift\n",
    }
    assert {r.source.removeprefix(f"{path}{joint}"): r.reason for r in refusals} == {
        "a/bin.c": "binary",
        "empty.py": "empty_text",
    }
    (piece,) = open_input(str(path), 0, BY_PATH).pieces(0)
    read = read_piece(piece, BY_PATH, "")
    decodings = [DECODINGS[k] for k in read.documents.decoding]
    assert decodings == ["utf-8", "latin-1", "utf-8", "utf-16"]
    assert len(read.blank_at) == (kind != "tree")
    only = ReadConfig(suffixes=frozenset({".c", ".rs"}), order="path")
    assert texts(path, only) == ["int a;\n", "fn main() {}\n"]
    assert reasons(path, ReadConfig(decode="reject", order="path"))[0] == "invalid_utf8"


def test_one_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("one\ntwo\n")
    assert read_all(path)[0] == [("one\ntwo\n", 0, 1, str(path))]
    packed = tmp_path / "main.cpp.bz2"
    packed.write_bytes(bz2.compress(b"int x;\n"))
    assert read_all(packed)[0] == [("int x;\n", 0, 1, str(packed))]
    assert reasons(packed, ReadConfig(max_document_bytes=7)) == []
    packed.write_bytes(bz2.compress(b"x" * 1000))
    assert reasons(packed, ReadConfig(max_document_bytes=100)) == ["document_too_long"]
    packed.write_bytes(packed.read_bytes()[:-4])
    assert reasons(packed) == ["unreadable"]


def test_files_that_are_too_long(tmp_path: Path) -> None:
    config = ReadConfig(max_document_bytes=12)
    for kind in ("tree", "tar", "tar.gz", "zip"):
        path = MAKERS[kind](tmp_path)
        assert reasons(path, config).count("document_too_long") == 2, kind


def test_a_file_that_changed_since_it_was_listed(tmp_path: Path) -> None:
    root = make_tree(tmp_path)
    (piece,) = open_input(str(root), 0, ReadConfig()).pieces(0)
    (root / "a.c").write_text("int aa;\n")
    with pytest.raises(InputReplaced) as caught:
        read_piece(piece, ReadConfig(), "")
    assert caught.value.what == "a.c is not as long as it was"
    assert caught.value.why == "it had 7 bytes when the directory was listed"
    (root / "a.c").unlink()
    (refusal,) = (
        r for r in read_piece(piece, ReadConfig(), "").refusals if r.reason == "unreadable"
    )
    assert refusal.sample == "ENOENT: No such file or directory"


BAD_NAMES: Final = ["/etc/passwd", "../up.c", "a/../../b.c", "C:\\x.c", "\\\\host\\x.c", "a\x01.c"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_names_that_lead_out_of_a_tar(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"bad.tar{suffix}"
    members = dict.fromkeys([*BAD_NAMES, "\udcff.c", "./fine.c", ".git/x.c"], b"x")
    path.write_bytes(COMPRESS[suffix](tar_bytes(members)))
    documents, refusals = read_all(path, BY_PATH)
    assert [d[3] for d in documents] == [f"{path}#./fine.c"]
    assert [r.reason for r in refusals] == ["bad_name"] * 7
    assert refusals[-1].source == f"{path}#\\udcff.c"


def test_names_that_lead_out_of_a_zip(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in [*BAD_NAMES, "fine.c"]:
            archive.writestr(name, "x")
    data = path.read_bytes().replace(b"a\x01.c", b"a\x00.c")
    path.write_bytes(data)
    assert texts(path) == ["x"]
    assert reasons(path) == ["bad_name"] * 6


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_members_that_are_no_files(tmp_path: Path, suffix: str) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind in (("s", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE), ("d", tarfile.CHRTYPE)):
            info = tarfile.TarInfo(name)
            info.type = kind
            info.linkname = "/etc/passwd"
            info.size = 1 << 40  # of a link or a device, it says nothing
            tar.addfile(info)
        long = tarfile.TarInfo("dir/" * 60 + "x.c")
        long.size = 1
        tar.addfile(long, io.BytesIO(b"x"))
    path = tmp_path / f"links.tar{suffix}"
    path.write_bytes(COMPRESS[suffix](buffer.getvalue()))
    documents, refusals = read_all(path)
    assert [d[3] for d in documents] == [f"{path}#{'dir/' * 60}x.c"]
    assert [r.reason for r in refusals] == ["not_a_file"] * 3
    assert refusals[0].sample == "it is a link or a device"


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("cut", [700, 1100, 1600, 2600])
def test_a_tar_that_was_cut(tmp_path: Path, suffix: str, cut: int) -> None:
    path = tmp_path / f"cut.tar{suffix}"
    path.write_bytes(COMPRESS[suffix](tar_bytes({f"{k}.c": b"x" * 600 for k in range(3)})[:cut]))
    with pytest.raises(InputDamaged, match=r"cut\.tar.* is damaged") as caught:
        read_all(path)
    assert caught.value.do == "fetch it again"


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_tar_with_a_broken_header_does_not_just_end(tmp_path: Path, suffix: str) -> None:
    data = bytearray(tar_bytes({f"{k}.c": b"x" * 600 for k in range(3)}))
    path = tmp_path / f"broken.tar{suffix}"
    for block in (bytes(512), b"\xff" * 512):
        data[2048:2560] = block
        path.write_bytes(COMPRESS[suffix](bytes(data)))
        with pytest.raises(InputDamaged, match=r"broken\.tar.* is damaged") as caught:
            read_all(path)
        assert caught.value.why in ("more follows an empty block", "bad checksum", "invalid header")


def test_a_tar_whose_header_is_a_bomb(tmp_path: Path) -> None:
    info = tarfile.TarInfo("././@LongLink")
    info.type = tarfile.GNUTYPE_LONGNAME
    info.size = 5 << 30
    path = tmp_path / "bomb.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(2048))
    with pytest.raises(InputDamaged, match=r"bomb\.tar is damaged") as caught:
        read_all(path)
    assert "a header of 5,368,709,120 bytes" in caught.value.why


def test_zip_members_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "some.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("locked.c", "secret " * 9)
        archive.writestr("method.c", "method " * 9)
        archive.writestr("broken.c", "broken " * 9)
        archive.writestr("packed.c", "x" * 99, zipfile.ZIP_BZIP2)
        archive.writestr("bomb.c", bytes(64 << 20))
        archive.writestr("fine.c", "fine")
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offsets = [info.header_offset for info in archive.infolist()]
    central = [k for k in range(len(data)) if data[k : k + 4] == b"PK\x01\x02"]
    for flags in (offsets[0] + 6, central[0] + 8):
        data[flags] |= 1
    for method in (offsets[1] + 8, central[1] + 10):
        data[method] = 77
    data[offsets[2] + 30 + 8 + 3] ^= 0xFF
    for size in (offsets[4] + 22, central[4] + 24):
        data[size : size + 4] = (100).to_bytes(4, "little")
    path.write_bytes(data)
    documents, refusals = read_all(path, BY_PATH)
    assert [d[0] for d in documents] == ["fine"]
    assert [r.reason for r in refusals] == ["unreadable"] * 5
    assert "encrypted" in refusals[0].sample
    assert refusals[3].sample == "compression method 12"
    assert "Bad CRC-32" in refusals[4].sample


def test_a_zip_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.zip"
    path.write_bytes(b"PK no")
    with pytest.raises(InputDamaged, match=r"bad\.zip is not a zip archive") as caught:
        read_all(path)
    assert caught.value.why == "File is not a zip file"


def test_a_zip_that_inflates_beyond_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "RATIO_GRACE_BYTES", 1 << 16)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.c", bytes(8 << 20))
    monkeypatch.setattr(inputs, "MAX_RATIO", 100)
    with pytest.raises(InputDamaged, match=r"bomb\.zip inflates beyond reason") as caught:
        read_all(path)
    assert "a ratio over 100" in caught.value.why


# Plugins.


def test_a_plugin_reads_items(tmp_path: Path) -> None:
    path = make_items(tmp_path)
    documents, refusals = read_all(path)
    assert documents == [
        ("one", 0, 1, f"{path}#line 0"),
        ("two", 1, 2, f"{path}#line 1"),
        ("foür", 3, 4, f"{path}#line 3"),
        ("five", 4, 5, f"{path}#line 4"),
    ]
    assert [(r.reason, r.start) for r in refusals] == [("empty_text", 2)]
    assert open_input(str(path), 0, ReadConfig()).kind == "twolines"


def test_a_plugin_that_fails(tmp_path: Path) -> None:
    @plugins.register("format", "bad", suffixes=(".bad",))
    def read_bad(file: BinaryIO) -> Iterator[tuple[str, str]]:
        yield "a\ud800", "first"
        yield "b", "se\ncond"
        raise KeyError("third")

    (tmp_path / "some.bad").write_text("x")
    with pytest.raises(BadInput, match=r"the format 'bad' could not read some\.bad") as caught:
        read_all(tmp_path / "some.bad")
    assert caught.value.where.endswith("some.bad, after 2 items")
    assert caught.value.why == "KeyError: 'third'"
    pieces = open_input(str(tmp_path / "some.bad"), 0, ReadConfig(piece_bytes=1)).pieces(0)
    with pytest.raises(BadInput):
        list(pieces)


# How to read.


def test_a_config_survives_json() -> None:
    config = ReadConfig(suffixes=frozenset({".py", ".c"}), decode="reject", piece_bytes=7)
    assert ReadConfig.from_json(json.loads(json.dumps(config.as_json()))) == config
    assert ReadConfig.from_json(ReadConfig().as_json()) == ReadConfig()


@pytest.mark.parametrize(
    ("options", "what", "do"),
    [
        ({"piece_bytes": 0}, "--piece_bytes is 0", "choose from 1 to 1,073,741,824"),
        ({"max_document_bytes": 0}, "--max_document_bytes is 0", "choose from 1 to 536,870,912"),
        ({"text_field": ""}, "--text_field is empty or not UTF-8", "name the field"),
        ({"text_field": "\ud800"}, "--text_field is empty or not UTF-8", "name the field"),
        ({"decode": "guess"}, "--decode is 'guess'", "choose from latin-1, reject"),
        ({"suffixes": ["py"]}, "'py' is not a suffix", 'write it like ".py"'),
        ({"txet": 1}, "'txet' is not an option of reading", "choose from decode, max_document"),
    ],
)
def test_a_wrong_option_is_told(options: dict[str, Any], what: str, do: str) -> None:
    with pytest.raises(BadConfig) as caught:
        ReadConfig.from_json(options)
    assert caught.value.what == what
    assert do in caught.value.do


# Streams of bzip2 and xz: the standard readers take damage between two for the end.


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_several_streams_are_one_text(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS[suffix]
    path = tmp_path / f"some.jsonl{suffix}"
    first, second = compress(b'{"text": "a"}\n'), compress(b'{"text": "b"}\n')
    path.write_bytes(first + second)
    assert texts(path) == ["a", "b"]
    if suffix == ".xz":
        path.write_bytes(first + bytes(8) + second + bytes(4))
        assert texts(path) == ["a", "b"]
    for broken in (first + b"junk", first + second[:4], first + b"X" + second[1:], b"", b"junk"):
        path.write_bytes(broken)
        with pytest.raises(InputDamaged, match=r"ends early or is corrupt|has no bytes at all"):
            read_all(path)


@pytest.mark.parametrize("suffix", [".bz2", ".xz"])
def test_a_stream_cut_anywhere_is_damaged(tmp_path: Path, suffix: str) -> None:
    whole = COMPRESS[suffix](LINES)
    path = tmp_path / f"some.jsonl{suffix}"
    for cut in range(1, len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputDamaged, match="ends early or is corrupt"):
            read_all(path)
