"""Bytes to text by the stated rule, and back to the file's own bytes; what a bucket says."""

import codecs
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig, InputMissing
from penstock.ingest import find
from penstock.ingest.decode import NotText, decode_document, raw_offsets
from penstock.ingest.find import glob
from penstock.ingest.open import open_ranges
from penstock.records import DECODINGS

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def spelled(raw: bytes, decoding: int) -> str:
    """The codec that reads a slice of `raw`, which has no mark of its own."""
    name = DECODINGS[decoding]
    if name == "utf-16":
        return "utf-16-le" if raw.startswith(codecs.BOM_UTF16_LE) else "utf-16-be"
    if name == "utf-32":
        return "utf-32-le" if raw.startswith(codecs.BOM_UTF32_LE) else "utf-32-be"
    return "utf-8" if name == "utf-8-sig" else name


@settings(max_examples=300, deadline=None)
@given(
    TEXT,
    st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be", "utf-32-be", "latin-1"]
    ),
    st.data(),
)
def test_chunks_tile_the_raw_bytes(text: str, codec: str, data: st.DataObject) -> None:
    """Any cut of the text at characters is a cut of the file's bytes that decodes to the same."""
    if codec == "latin-1":
        raw = text.encode("latin-1", "replace")
    else:
        mark = {"utf-16-be": codecs.BOM_UTF16_BE, "utf-32-be": codecs.BOM_UTF32_BE}
        raw = mark.get(codec, b"") + text.encode(codec)
    utf8, decoding = decode_document(raw)
    whole = utf8.decode()
    assert raw.decode(spelled(raw, decoding)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    characters = [0, *cuts, len(whole)]
    positions = np.array([len(whole[:k].encode()) for k in characters], np.int64)
    back = raw_offsets(utf8, decoding, positions).tolist()
    assert back[0] == 0
    assert back[-1] == len(raw)
    for k in range(len(cuts) + 1):
        part = raw[back[k] : back[k + 1]].decode(spelled(raw, decoding))
        assert part == whole[characters[k] : characters[k + 1]]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_text_or_refused(raw: bytes) -> None:
    try:
        utf8, decoding = decode_document(memoryview(raw))
    except NotText:
        assert not raw or b"\0" in raw
        return
    assert b"\0" not in utf8
    assert utf8.decode().encode(spelled(raw, decoding)) == raw


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (b"plain", "utf-8"),
        ("größer".encode(), "utf-8"),
        (b"\xef\xbb\xbfx", "utf-8-sig"),
        ("x".encode("utf-16"), "utf-16"),
        (b"\xfe\xff\x00x", "utf-16"),
        ("x".encode("utf-32"), "utf-32"),
        (b"caf\xe9", "latin-1"),
        (b"\xff\xfex", "latin-1"),  # a mark, but not an even number of bytes
        (b"\xef\xbb\xbf\xff", "latin-1"),
    ],
)
def test_the_rule(raw: bytes, name: str) -> None:
    text, decoding = decode_document(raw)
    assert DECODINGS[decoding] == name
    if name == "latin-1":
        with pytest.raises(NotText, match="invalid_utf8"):
            decode_document(raw, "reject")
    else:
        assert decode_document(raw, "reject") == (text, decoding)


def test_the_mark_stays_in_the_text() -> None:
    assert decode_document(b"\xef\xbb\xbfx")[0] == "\ufeffx".encode()
    assert decode_document("x".encode("utf-16"))[0] == "\ufeffx".encode()


@pytest.mark.parametrize("raw", [b"a\0b", b"\xff\0\xff", "a\0".encode("utf-16"), b"\x7fELF\0\xff"])
def test_what_holds_a_nul_is_binary(raw: bytes) -> None:
    with pytest.raises(NotText) as caught:
        decode_document(raw)
    assert caught.value.reason == "binary"


def test_offsets_need_no_order() -> None:
    text = "aé€😀".encode()
    assert raw_offsets(text, DECODINGS.index("utf-16"), np.array([10, 0, 3, 3, 1])).tolist() == [
        10, 0, 4, 4, 2,
    ]  # fmt: skip


def test_an_address_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AZURE"):
            monkeypatch.delenv(name)
    with pytest.raises(BadConfig) as caught:
        open_ranges("az://container/key")
    assert caught.value.what == "az://container cannot be opened"
    assert "Account must be specified" in caught.value.why
    assert "credentials in the environment" in caught.value.do


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(InputMissing, match="nowhere is not there"):
        open_ranges("/tmp/nowhere")


def test_glob_does_not_run_in_circles(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "round").symlink_to(tmp_path)
    (tmp_path / "a" / "b" / "x.c").write_text("x")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "y.c").write_text("y")
    assert list(glob(f"{tmp_path}/", ["**", "*.c"])) == [f"{tmp_path}/a/b/x.c"]
    assert sorted(glob(f"{tmp_path}/", ["a", "*", "x.?"])) == [f"{tmp_path}/a/b/x.c"]
    assert list(glob(f"{tmp_path}/nowhere/", ["*"])) == []


def test_keys_match_as_paths_do() -> None:
    assert find.matches(["a", "b", "c.py"], ["a", "**", "*.py"])
    assert find.matches(["a", "c.py"], ["a", "**", "*.py"])
    assert find.matches(["a", "b", "c.py"], ["**"])
    assert not find.matches(["a", "b", "c.py"], ["a", "*.py"])
    assert not find.matches(["a"], ["a", "*.py"])
