"""Tokenizers count and encode the documents that `penstock chunk` makes; the rest is told."""

import gzip
import io
import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import regex
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import BadInput
from penstock.ingest.formats import ReadConfig
from penstock.ingest.open import open_bucket
from penstock.produce.dataset import prepare_dataset
from penstock.tokenize import corpus as module
from penstock.tokenize.evaluate import compare
from penstock.tokenize.patterns import PATTERNS
from penstock.tokenize.pretokenize import pretokenize
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer
from penstock.work.events import Events
from penstock.work.run import RunConfig
from services import servers

END: Final = "<|endoftext|>"


def counts_of(texts: Sequence[str]) -> Counter[bytes]:
    """What `regex` finds in texts, between special tokens."""
    scanner = regex.compile(PATTERNS["cl100k"].regex)
    return Counter(
        found.encode()
        for text in texts
        for part in text.split(END)
        for found in scanner.findall(part)
    )


# Plain files: any chunk size, any number of workers.


DOCUMENTS: Final = st.lists(
    st.lists(
        st.sampled_from(["a", "b ", "\n", "it's", " 12", "é", "日本", END, "<|end", "\r\n", "😀"]),
        min_size=1,
        max_size=12,
    ).map("".join),
    min_size=1,
    max_size=12,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=DOCUMENTS,
    chunk=st.one_of(st.none(), st.integers(1, 60)),
    buffer=st.integers(1, 40),
    workers=st.integers(1, 3),
    group=st.integers(1, 5),
)
def test_plain_files_at_any_chunk_size_with_any_number_of_workers(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    chunk: int | None,
    buffer: int,
    workers: int,
    group: int,
) -> None:
    folder = tmp_path_factory.mktemp("plain")
    text, lines, table = (folder / name for name in ("a.txt", "b.jsonl", "c.parquet"))
    text.write_bytes("".join(texts).encode())
    lines.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    pq.write_table(pa.table({"text": texts}), table, row_group_size=group)
    for path, expected in ((text, ["".join(texts)]), (lines, texts), (table, texts)):
        counted = pretokenize(path, [END], workers, chunk_bytes=chunk, buffer_bytes=buffer)
        assert dict(counted) == counts_of(expected), path.name
        assert counted.stats["special_tokens"] == {END: sum(one.count(END) for one in expected)}
        assert counted.stats["documents"] == len(expected)
        assert counted.stats["rejected"] == {}


# Trees and archives: the documents that `chunk` makes.


FILES: Final = {
    "a.cpp": "int é = 1;\n".encode(),
    "b/latin.h": "größer als\n".encode("latin-1") * 20,
    "b/wide.txt": "zwei Wörter".encode("utf-16"),
    "b/marked.py": "\ufeffx = 'ä'".encode(),
    "b/long.txt": ("a line, and then " * 9 + END + "\n").encode() * 5,
    "b/long.latin": "ä line \n".encode("latin-1") * 40,
    "c/logo.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 3,
    "c/lib.so": b"\x7fELF\2\1\1" + bytes(400),
    "c/empty.c": b"",
    "c/packed.c.gz": gzip.compress(b"packed = true\n" * 30),
    "c/packed.so.zst": zstandard.compress(bytes(5000)),
    "c/broken.c.gz": gzip.compress(b"broken = true\n" * 300)[:-15],
    "c/rows.jsonl": b'{"text": "not a row here"}\n',
    "__init__.py": b"import sys\n",
}
TEXTS: Final = [
    "int é = 1;\n",
    "größer als\n" * 20,
    "\ufeffzwei Wörter",
    "\ufeffx = 'ä'",
    ("a line, and then " * 9 + END + "\n") * 5,
    "ä line \n" * 40,
    "packed = true\n" * 30,
    '{"text": "not a row here"}\n',
    "import sys\n",
]
REFUSED: Final = {"binary": 3, "empty_text": 1, "unreadable": 1}


def make_tree(folder: Path) -> Path:
    for name, data in FILES.items():
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder / "tree"


def make_tar(path: Path, mode: str) -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in FILES.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path


def make_zip(path: Path) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in FILES.items():
            archive.writestr(name, data)
    return path


def make(kind: str, folder: Path) -> str:
    if kind == "tree":
        return str(make_tree(folder))
    if kind == "glob":
        make_tree(folder)
        return f"{folder}/tr*"
    if kind == "zip":
        return str(make_zip(folder / "a.zip"))
    return str(make_tar(folder / f"a.{kind}", "w:gz" if kind == "tgz" else "w"))


@pytest.mark.parametrize("kind", ["tree", "glob", "tar", "tgz", "zip"])
def test_what_chunk_makes_of_an_input_is_counted(tmp_path: Path, kind: str) -> None:
    given = make(kind, tmp_path)
    for chunk in (None, 1, 64, 300):
        for workers in (1, 3):
            counted = pretokenize(given, [END], workers, chunk_bytes=chunk, buffer_bytes=50)
            assert dict(counted) == counts_of(TEXTS), (chunk, workers)
            assert counted.stats["rejected"] == REFUSED, (chunk, workers)
            assert counted.stats["documents"] == len(TEXTS)
            assert counted.stats["decoded"] == {"utf-8": 6, "latin-1": 2, "utf-16": 1}
            assert counted.stats["invalid_utf8"] == 0
    prepare_dataset([given], tmp_path / "made", run=RunConfig(workers=1, max_rejects=1.0))
    made = [
        text
        for path in sorted((tmp_path / "made").rglob("*.parquet"))
        for text in pq.read_table(path)["text"].to_pylist()
    ]
    assert sorted(made) == sorted(TEXTS)


def test_objects_of_a_bucket_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree, an archive, and a text that is read in ranges, from a real server."""
    server = servers.start_light()
    try:
        cloud = servers.clouds()["light"](server)
        servers.use(monkeypatch, cloud.environment(server.port))
        url = cloud.new_url("raw")
        store = open_bucket(url)[0]
        for name, data in FILES.items():
            obstore.put(store, f"raw/tree/{name}", data)
        obstore.put(store, "raw/a.zip", make_zip(tmp_path / "a.zip").read_bytes())
        for given in (f"{url}/tree", f"{url}/a.zip"):
            for chunk in (None, 64):
                counted = pretokenize(given, [END], 2, chunk_bytes=chunk)
                assert dict(counted) == counts_of(TEXTS), (given, chunk)
                assert counted.stats["rejected"] == REFUSED
    finally:
        server.stop()


def test_several_archives_side_by_side(tmp_path: Path) -> None:
    """A zip archive that one thread reads stays open when another opens the next."""
    given = [make_zip(tmp_path / f"{k}.zip") for k in range(4)]
    counted = pretokenize(given, [END], 4, chunk_bytes=20)
    assert counted.stats["rejected"] == {reason: 4 * n for reason, n in REFUSED.items()}
    assert dict(counted) == counts_of(TEXTS * 4)


def test_only_the_suffixes_that_are_meant(tmp_path: Path) -> None:
    for kind in ("tree", "tar", "zip"):
        (tmp_path / kind).mkdir()
        given = make(kind, tmp_path / kind)
        counted = pretokenize(given, [END], 1, read=ReadConfig(suffixes=frozenset({".py"})))
        assert dict(counted) == counts_of(["\ufeffx = 'ä'", "import sys\n"])
        assert counted.stats["rejected"] == {}
        with pytest.raises(BadInput) as caught:
            pretokenize(given, [], 1, read=ReadConfig(suffixes=frozenset({".rs", ".go"})))
        assert caught.value.why is not None
        assert caught.value.why.startswith("no file ends in .go or .rs: there are .")


def test_what_is_not_utf8_can_be_refused(tmp_path: Path) -> None:
    counted = pretokenize(make_tree(tmp_path), [END], 1, read=ReadConfig(decode="reject"))
    assert counted.stats["rejected"] == {**REFUSED, "invalid_utf8": 2}


def test_an_input_without_a_document_is_an_error_even_beside_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    picture = tmp_path / "logo.png"
    picture.write_bytes(FILES["c/logo.png"])
    for chunk in (None, 10):
        with pytest.raises(BadInput) as caught:
            pretokenize([tmp_path / "a.txt", picture], [], 2, chunk_bytes=chunk)
        assert caught.value.what == "logo.png holds no document"
        assert caught.value.where == str(picture)
        assert caught.value.why == f"refused: binary 1 ({picture})"
        assert caught.value.do


# Texts that are too long for a document.


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_text_too_long_for_a_document_is_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(module, "HEAD_BYTES", 1000)
    raw = b"text \xff and more\n" * 100
    read = ReadConfig(max_document_bytes=1000)
    path = tmp_path / f"a.txt{suffix}"

    def write(data: bytes) -> Path:
        path.write_bytes(gzip.compress(data) if suffix else data)
        return path

    counted = pretokenize(write(raw), [END], 2, read=read, chunk_bytes=70)
    assert dict(counted) == counts_of([raw.decode("utf-8", "replace")])
    assert counted.stats["invalid_utf8"] == 100
    # a NUL after its head is a character, one in it makes it binary
    late = raw[:1400] + b"\0" + raw[1400:]
    counted = pretokenize(write(late), [END], 2, read=read)
    assert dict(counted) == counts_of([late.decode("utf-8", "replace")])
    with pytest.raises(BadInput, match="binary 1"):
        pretokenize(write(raw[:900] + b"\0" + raw[900:]), [END], 2, read=read)


# Training and comparing go the same way.


def test_a_tokenizer_learns_nothing_from_what_chunk_refuses(tmp_path: Path) -> None:
    config = TrainConfig(vocab_size=300)
    heard: list[dict[str, Any]] = []
    events = Events("tokenizer")
    events.listen(lambda event: heard.append(dict(event)))
    trained = train_tokenizer([make_tree(tmp_path)], tmp_path / "out", config, events=events)
    assert trained.stats["rejected"] == REFUSED
    told = [event["message"] for event in heard if event["kind"] == "warn"]
    assert any(one.startswith("refused: binary 3 (") and "empty_text 1" in one for one in told)
    (tmp_path / "plain").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "plain" / f"{number}.txt").write_bytes(text.encode())
    again = train_tokenizer([tmp_path / "plain"], tmp_path / "again", config)
    assert trained.bpe.merges == again.bpe.merges
    assert trained.stats["decoded"]["latin-1"] == 2


def test_a_tokenizer_is_compared_on_what_chunk_makes(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "in.txt").write_text("some text to learn from, " * 50)
    train_tokenizer([folder], tmp_path / "out", TrainConfig(vocab_size=270))
    tokenizer = Tokenizer.load(tmp_path / "out")
    for kind in ("tree", "tar", "tgz", "zip"):
        (tmp_path / kind).mkdir()
        events = Events("eval")
        heard: list[dict[str, Any]] = []
        events.listen(lambda event, heard=heard: heard.append(dict(event)))  # type: ignore[misc]
        scores = compare({"x": tokenizer}, [make(kind, tmp_path / kind)], events=events)
        assert sum(score.text_bytes for score in scores) == sum(len(t.encode()) for t in TEXTS)
        languages = {"C and C++", "Python", "JSON", "wide", "long"}
        assert {score.language for score in scores} == languages
        assert [event["message"][:9] for event in heard] == ["refused: "]
    for most in (1, 10, 100, 1000):
        scores = compare({"x": tokenizer}, [tmp_path / "zip" / "a.zip"], max_bytes_per_file=most)
        assert sum(score.text_bytes for score in scores) == sum(
            len(text.encode()[:most].decode("utf-8", "ignore").encode()) for text in TEXTS
        )
