"""Which inputs are meant: globs, directories, buckets; trees with loops, links and odd names."""

import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from obstore.store import from_url

from penstock.errors import BadConfig, BadInput, InputMissing, InputReplaced, StoreFailed
from penstock.ingest.archives import open_zip
from penstock.ingest.find import expand_inputs
from penstock.ingest.formats import read_parts
from penstock.ingest.inputs import Piece, ReadConfig, open_input, read_piece
from penstock.records import Refusal

BY_PATH: Final = ReadConfig(order="path")


def write(path: Path, text: str = "text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read_tree(
    name: Path | str, config: ReadConfig | None = None
) -> tuple[list[str], list[Refusal]]:
    config = config or BY_PATH
    sources: list[str] = []
    refusals: list[Refusal] = []
    for made in open_input(str(name), 0, config).pieces(0):
        piece = Piece.attach(made.header(), made.data)
        for _, read in read_parts(piece, config, str(name)):
            sources += read.documents.sources or []
            refusals += read.refusals
    return [source.removeprefix(f"{name}/") for source in sources], refusals


# Which inputs.


def test_files_directories_and_globs(tmp_path: Path) -> None:
    a, b = write(tmp_path / "data" / "a.jsonl"), write(tmp_path / "data" / "sub" / "b.jsonl")
    note = write(tmp_path / "data" / "note.txt")
    root = str(tmp_path)
    assert expand_inputs([str(note), str(a)]) == [str(note), str(a)]
    assert expand_inputs([f"{root}/data/*.jsonl"]) == [str(a)]
    assert expand_inputs([f"{root}/data/**/*.jsonl"]) == [str(a), str(b)]
    assert expand_inputs([f"{root}/*/sub/?.jsonl"]) == [str(b)]
    assert expand_inputs([f"{root}/data/"]) == [f"{root}/data"]
    assert expand_inputs([f"file://{note}"]) == [str(note)]
    assert expand_inputs([f"{root}/data/*"]) == [str(a), str(note), str(b)]


def test_globs_are_relative_to_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "b.jsonl")
    write(tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    assert expand_inputs(["*.jsonl"]) == ["a.jsonl", "b.jsonl"]


def test_a_name_that_looks_like_a_glob_is_a_name_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].txt")
    write(tmp_path / "a1.txt")
    assert expand_inputs([str(path)]) == [str(path)]


def test_a_directory_of_shards_is_its_files(tmp_path: Path) -> None:
    names = ["b/1.jsonl.zst", "a.parquet", "c.jsonl"]
    for name in [*names, "c.jsonl.done", "_log/0.json", "_COMPLETE", ".hidden.txt"]:
        write(tmp_path / name)
    assert expand_inputs([str(tmp_path)]) == [f"{tmp_path}/{name}" for name in sorted(names)]
    write(tmp_path / "b" / "x.py")
    assert expand_inputs([str(tmp_path)]) == [str(tmp_path)]


def test_what_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "corpus.jsonl")
    with pytest.raises(InputMissing, match=r"corpsu\.jsonl is not there") as caught:
        expand_inputs([f"{tmp_path}/corpsu.jsonl"])
    assert caught.value.do == "did you mean corpus.jsonl?"
    with pytest.raises(InputMissing) as caught:
        expand_inputs([f"{tmp_path}/*.jsonk"])
    assert caught.value.what == f"nothing matches {tmp_path}/*.jsonk"
    assert caught.value.do == f"did you mean {tmp_path}/corpus.jsonl?"
    with pytest.raises(InputMissing, match="nothing matches") as caught:
        expand_inputs([f"{tmp_path}/nowhere/*.jsonl"])
    assert caught.value.do == "check the path"


def test_the_same_input_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    (tmp_path / "link.txt").symlink_to(path)
    for second in (str(path), f"{tmp_path}/link.txt", f"{tmp_path}/a*"):
        with pytest.raises(BadConfig, match="the same input is given twice") as caught:
            expand_inputs([str(path), second])
        assert caught.value.do == "name each input once"
    with pytest.raises(BadConfig, match="no input is given"):
        expand_inputs([])


def test_names_that_cannot_be_logged(tmp_path: Path) -> None:
    for name in ("new\nline.txt", "\udcff.txt"):
        path = write(tmp_path / name)
        for given in (str(path), f"{tmp_path}/*.txt"):
            with pytest.raises(BadConfig, match="cannot be written into the log") as caught:
                expand_inputs([given])
            assert caught.value.why == "it holds bytes that are not UTF-8, or control characters"
        path.unlink()


def test_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    write(tmp_path / "empty" / ".hidden")
    with pytest.raises(BadInput, match="empty has no files") as caught:
        expand_inputs([f"{tmp_path}/empty"])
    assert caught.value.do == "name another directory"
    assert read_tree(tmp_path / "empty") == ([], [])


# Trees.


def test_files_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    names = [
        "a.c",
        "a/b.c",
        "a/b/c.c",
        "a/b.h",
        "a-b.c",
        "ä.c",
        "z z.c",
        "A.c",
        "aa/x.c",
        "0/1/2.c",
    ]
    for name in names:
        write(tmp_path / name)
    assert read_tree(tmp_path) == (sorted(names, key=str.encode), [])


def test_links_that_lead_round_or_out_or_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write(tmp_path / "outside.c")
    write(root / "sub" / "a.c")
    (root / "sub" / "round").symlink_to(root)
    (root / "sub" / "self").symlink_to("self")
    (root / "out.c").symlink_to(outside)
    (root / "gone.c").symlink_to("nowhere")
    (root / "in.c").symlink_to("sub/a.c")
    os.mkfifo(root / "pipe")
    sources, refusals = read_tree(root)
    assert sources == ["in.c", "sub/a.c"]
    assert {(r.reason, os.path.basename(r.source), r.sample) for r in refusals} == {
        ("not_a_file", "round", "it is a link to a directory, a pipe or a device"),
        ("not_a_file", "pipe", "it is a link to a directory, a pipe or a device"),
        ("not_a_file", "self", "ELOOP: Too many levels of symbolic links"),
        ("not_a_file", "gone.c", "ENOENT: No such file or directory"),
        ("not_a_file", "out.c", "it is a link that leads out of the directory"),
    }


def test_odd_names_are_refused_with_their_reason(tmp_path: Path) -> None:
    for name in (b"fine name.c", b"new\nline.c", b"caf\xe9.c", b"fold\xff/x.c"):
        path = os.path.join(os.fsencode(tmp_path), name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"x")
    sources, refusals = read_tree(tmp_path)
    assert sources == ["fine name.c"]
    assert [(r.reason, os.path.basename(r.source)) for r in refusals] == [
        ("bad_name", "caf\\udce9.c"),
        ("bad_name", "fold\\udcff"),
        ("bad_name", "new\\nline.c"),
    ]


def test_what_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a" / "x.c")
    write(tmp_path / "b.c")
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("/a"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    sources, (refusal,) = read_tree(tmp_path)
    assert sources == ["b.c"]
    assert refusal.reason == "unreadable"
    assert refusal.source == f"{tmp_path}/a"
    assert refusal.sample == "EACCES: Permission denied"


def test_a_very_deep_tree(tmp_path: Path) -> None:
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1500):
            os.mkdir("d")
            os.chdir("d")
        Path("x.c").write_text("x")
    finally:
        os.chdir(here)
    sources, refusals = read_tree(tmp_path)
    assert sources == ["d/" * 1500 + "x.c"]
    assert refusals == []
    subprocess.run(["rm", "-r", str(tmp_path / "d")], check=True)  # too deep for shutil here


def test_small_files_share_pieces_and_large_ones_do_not(tmp_path: Path) -> None:
    for k in range(30):
        write(tmp_path / f"{k:02}.c", "x" * (100 if k % 10 else 5000))
    pieces = list(open_input(str(tmp_path), 0, ReadConfig(piece_bytes=1000)).pieces(0))
    assert 3 <= len(pieces) <= 9
    assert all(piece.bytes <= 6000 for piece in pieces)
    assert sum(len(piece.names) for piece in pieces) == 30


def test_a_tree_that_shrank_is_not_the_same(tmp_path: Path) -> None:
    for k in range(5):
        write(tmp_path / f"{k}.c")
    proof = open_input(str(tmp_path), 0, BY_PATH).prove(5)
    open_input(str(tmp_path), 0, BY_PATH).check(5, proof)
    (tmp_path / "5.c").write_text("after")
    open_input(str(tmp_path), 0, BY_PATH).check(5, proof)
    (tmp_path / "0.c").unlink()
    (tmp_path / "5.c").unlink()
    with pytest.raises(InputReplaced, match="is not what was read before") as caught:
        open_input(str(tmp_path), 0, BY_PATH).check(5, proof)
    assert "names 'only 4 files' now" in caught.value.why


def test_a_tree_that_changed_says_where(tmp_path: Path) -> None:
    for name in ("a.c", "c.c"):
        (tmp_path / name).write_text("int x;\n")
    proof = open_input(str(tmp_path), 0, BY_PATH).prove(2)
    assert (proof["bytes"], proof["last"]) == (14, "c.c")

    def why(proof: dict[str, str | int]) -> str:
        with pytest.raises(InputReplaced, match="is not what was read before") as caught:
            open_input(str(tmp_path), 0, BY_PATH).check(2, proof)
        return caught.value.why

    (tmp_path / "b.c").write_text("int y;\n")
    assert why(proof).startswith("up to members 2: names '")
    assert why(proof).endswith("last 'b.c' now, 'c.c' before")
    (tmp_path / "b.c").unlink()
    (tmp_path / "a.c").write_text("int longer;\n")
    assert why(proof).endswith("bytes 19 now, 14 before")
    # a proof of an older penstock has the names alone
    assert why({"names": proof["names"]}).startswith("up to members 2: names '")
    (tmp_path / "a.c").write_text("int x;\n")
    open_input(str(tmp_path), 0, BY_PATH).check(2, {"names": proof["names"]})


def test_what_came_after(tmp_path: Path) -> None:
    tree, lines = tmp_path / "tree", tmp_path / "in.jsonl"
    write(tree / "a.c")
    lines.write_text('{"text": "a"}\n')
    assert open_input(str(tree), 0, ReadConfig()).more(1) == ""
    assert open_input(str(tree / "a.c"), 0, ReadConfig()).more(1) == ""
    assert open_input(str(lines), 0, ReadConfig()).more(14) == ""
    write(tree / "0.c")
    lines.write_text('{"text": "a"}\n\n')
    assert open_input(str(tree), 0, ReadConfig()).more(1) == "it has 2 files, and 1 were read"
    assert open_input(str(lines), 0, ReadConfig()).more(14) == "it has 15 bytes, and 14 were read"
    assert open_input(str(tree), 0, ReadConfig(suffixes=frozenset({".h"}))).more(0) == ""


@pytest.mark.parametrize("kind", ["tree", "tar", "tar.gz", "zip"])
def test_suffixes_that_leave_nothing(tmp_path: Path, kind: str) -> None:
    for name in ("tree/a.c", "tree/b/c.c", "tree/b/d"):
        write(tmp_path / name)
    path = tmp_path / kind
    if kind == "zip":
        path = Path(shutil.make_archive(str(tmp_path / "x"), "zip", tmp_path / "tree"))
    elif kind != "tree":
        form = {"tar": "tar", "tar.gz": "gztar"}[kind]
        path = Path(shutil.make_archive(str(tmp_path / "x"), form, tmp_path / "tree"))

    def left_out(*suffixes: str) -> dict[str, int]:
        return dict(open_input(str(path), 0, ReadConfig(suffixes=frozenset(suffixes))).left_out())

    assert left_out(".c") == {}
    assert left_out(".xyz", ".c") == {}
    assert left_out(".xyz") == {".c": 2, "": 1}
    assert open_input(str(path), 0, ReadConfig()).left_out() == {}


def test_a_zip_archive_stays_open_for_the_thread_that_reads_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as made:
            made.writestr("member", name)
    held = open_zip(str(tmp_path / "a.zip"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: open_zip(str(tmp_path / "b.zip")).read("member")).result()
    assert (held.read("member"), other) == (b"a", b"b")
    assert open_zip(str(tmp_path / "a.zip")) is held


# Buckets: a real S3 server on loopback.

SERVER = """
import os, sys, threading
from moto.server import main
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    port = random.randrange(20000, 30000)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, "-H", "127.0.0.1", "-p", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        for _ in range(300):
            try:
                ask = urllib.request.Request(f"{endpoint}/corpus", method="PUT")
                urllib.request.urlopen(ask, timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        yield "s3://corpus"
    server.kill()
    server.communicate()


def test_objects_are_read_like_files(bucket: str, tmp_path: Path) -> None:
    store = from_url(bucket)
    lines = "".join(json.dumps({"text": f"line {k}"}) + "\n" for k in range(50)).encode()
    obstore.put(store, "lines/a.jsonl", lines)
    (tmp_path / "x").mkdir()
    pq.write_table(pa.table({"text": [f"row {k}" for k in range(20)]}), tmp_path / "x.parquet")
    obstore.put(store, "lines/b.parquet", (tmp_path / "x.parquet").read_bytes())
    for name in ("tree/a.c", "tree/sub/b.py", "tree/.git/c.c"):
        obstore.put(store, name, name.encode())
    write(tmp_path / "src" / "m.c", "member")
    for kind in ("tar", "zip", "gztar"):
        made = shutil.make_archive(str(tmp_path / "packed"), kind, tmp_path / "src")
        obstore.put(store, f"packed/{os.path.basename(made)}", Path(made).read_bytes())

    names = expand_inputs([f"{bucket}/lines", f"{bucket}/tree", f"{bucket}/packed/*"])
    assert names == [
        f"{bucket}/lines/a.jsonl",
        f"{bucket}/lines/b.parquet",
        f"{bucket}/tree",
        f"{bucket}/packed/packed.tar",
        f"{bucket}/packed/packed.tar.gz",
        f"{bucket}/packed/packed.zip",
    ]
    assert expand_inputs([f"{bucket}/**/*.py"]) == [f"{bucket}/tree/sub/b.py"]
    assert expand_inputs([f"{bucket}/lines/a.jsonl"]) == names[:1]
    assert expand_inputs([bucket]) == [bucket]
    config = ReadConfig(piece_bytes=100)
    found: list[str] = []
    for number, name in enumerate(names):
        input = open_input(name, number, config)
        pieces = list(input.pieces(0))
        input.check(pieces[-1].end, input.prove(pieces[-1].end))
        for piece in pieces:
            documents = read_piece(piece, config, name).documents
            found += [documents.text(k).decode() for k in range(len(documents))]
    assert found == [
        *(f"line {k}" for k in range(50)),
        *(f"row {k}" for k in range(20)),
        "tree/a.c",
        "tree/sub/b.py",
        *["member"] * 3,
    ]
    assert read_tree(f"{bucket}/tree")[0] == ["a.c", "sub/b.py"]
    assert read_tree(bucket)[1] != []


def put_raw(key: str, data: bytes = b"") -> None:
    """An object under any key: obstore writes none that ends in a slash."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/corpus/{key}"
    headers = {"Content-Type": "application/octet-stream"}
    ask = urllib.request.Request(url, data, headers, method="PUT")
    urllib.request.urlopen(ask, timeout=30).read()


def test_markers_of_folders(bucket: str) -> None:
    for key in ("marked/", "marked/sub/", "marked/sub/deep/", "shards/", "alone/"):
        put_raw(key)
    put_raw("marked/a.c", b"int a;")
    put_raw("marked/empty.c")
    put_raw("marked/sub/deep/b.c", b"int b;")
    put_raw("shards/a.jsonl", b'{"text": "a"}')
    assert expand_inputs([f"{bucket}/marked"]) == [f"{bucket}/marked"]
    assert expand_inputs([f"{bucket}/marked/"]) == [f"{bucket}/marked"]
    assert expand_inputs([f"{bucket}/shards"]) == [f"{bucket}/shards/a.jsonl"]
    assert expand_inputs([f"{bucket}/marked/**/*.c"]) == [
        f"{bucket}/marked/{name}" for name in ("a.c", "empty.c", "sub/deep/b.c")
    ]
    found, refused = read_tree(f"{bucket}/marked")
    assert found == ["a.c", "sub/deep/b.c"]
    assert [(one.reason, one.source) for one in refused] == [
        ("empty_text", f"{bucket}/marked/empty.c")
    ]
    with pytest.raises(InputMissing, match="nothing is at"):
        expand_inputs([f"{bucket}/alone"])


def test_keys_that_end_in_a_slash_and_hold_something(bucket: str) -> None:
    """Nothing can read them, so they are refused, and the rest is read."""
    for key in ("odd/", "odd/sub/"):
        put_raw(key, b"int a;")
    put_raw("odd/a.c", b"int a;")
    found, refused = read_tree(expand_inputs([f"{bucket}/odd"])[0])
    assert found == ["a.c"]
    assert [one.reason for one in refused] == ["bad_name", "unreadable"]


def test_keys_with_two_slashes_are_told(bucket: str) -> None:
    put_raw("twice/a.c", b"int a;")
    put_raw("twice//b.c", b"int b;")
    with pytest.raises(BadInput, match="has an object that cannot be read") as caught:
        expand_inputs([f"{bucket}/twice"])
    assert "twice//b.c" in caught.value.why
    assert caught.value.do.startswith("rename it")


def test_what_is_not_in_a_bucket(bucket: str) -> None:
    for url in (f"{bucket}/nowhere", f"{bucket}/nowhere/*.jsonl"):
        with pytest.raises(InputMissing, match="nothing is at s3://corpus/nowhere") as caught:
            expand_inputs([url])
        assert caught.value.do == "check the address"
    with pytest.raises(InputMissing, match=r"gone\.jsonl is not there") as caught:
        open_input(f"{bucket}/gone.jsonl", 0, ReadConfig())
    assert caught.value.where == f"{bucket}/gone.jsonl"


def test_a_bucket_that_refuses(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> object:
        raise obstore.exceptions.PermissionDeniedError("Forbidden\nDebug source: ...")

    monkeypatch.setattr(obstore, "head", deny)
    with pytest.raises(StoreFailed) as caught:
        open_input(f"{bucket}/locked.jsonl", 0, ReadConfig())
    assert caught.value.what == "could not read locked.jsonl"
    assert caught.value.why == "Forbidden"
    assert "credentials in the environment" in caught.value.do


def test_the_marker_of_an_empty_folder_is_no_document(bucket: str) -> None:
    for key in ("marked3/", "marked3/emptydir/"):
        put_raw(key)
    put_raw("marked3/f1.py", b"x = 1")
    put_raw("marked3/f1.py/x.py", b"y = 1")
    put_raw("marked3/a", b"")
    put_raw("marked3/a/b.py", b"z = 1")
    found, refused = read_tree(f"{bucket}/marked3")
    assert found == ["a/b.py", "f1.py", "f1.py/x.py"]
    assert [(one.reason, one.source) for one in refused] == [("empty_text", f"{bucket}/marked3/a")]
