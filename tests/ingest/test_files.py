"""Files as blocks of whole lines: compressed, cut, replaced, growing, marked as done."""

import contextlib
import gc
import gzip
import lzma
import os
import random
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadInput, InputDamaged, InputMissing, InputReplaced
from penstock.ingest import lines
from penstock.ingest import open as opening
from penstock.ingest.jsonl import LINE_TOO_LONG, Reject
from penstock.ingest.lines import LineFile, done_marker, mark_done, read_done
from penstock.ingest.open import _PROOF_BYTES, MAX_RATIO

PLENTY: Final = 1 << 20
LINES: Final = b"".join(b'{"text": "%d %s"}\n' % (k, b"x" * (k * 7 % 50)) for k in range(400))


def read(file: LineFile) -> bytes:
    """All of the text that it hands out, whole lines and then the fragment."""
    parts = []
    try:
        while (block := file.next_block()) is not None:
            part = bytes(block.data[block.start : block.stop])
            assert part.endswith(b"\n")
            parts.append(part)
        if (block := file.fragment()) is not None:
            parts.append(bytes(block.data[block.start : block.end - block.offset]))
    finally:
        file.close()
    return b"".join(parts)


def zstd(data: bytes, write_checksum: bool = False) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=write_checksum).compress(data)


# Compressed inputs.


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.binary(max_size=300), max_size=4),
    st.sampled_from([1, 13, 1000, lines.BLOCK_BYTES]),
    st.sampled_from([".gz", ".zst"]),
)
def test_compressed_is_the_same_as_plain(
    tmp_path_factory: pytest.TempPathFactory, members: list[bytes], block_bytes: int, suffix: str
) -> None:
    """Also in several members or frames, as `cat a.gz b.gz` leaves them."""
    path = tmp_path_factory.getbasetemp() / ("some.jsonl" + suffix)
    compress = gzip.compress if suffix == ".gz" else zstd
    path.write_bytes(b"".join(map(compress, members or [b""])))
    file = LineFile(path, max_line_bytes=PLENTY, block_bytes=block_bytes)
    assert file.is_compressed
    assert file.size() is None
    assert read(file) == b"".join(members)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_cut_anywhere_is_damaged(tmp_path: Path, suffix: str) -> None:
    whole = gzip.compress(LINES) if suffix == ".gz" else zstd(LINES)
    path = tmp_path / f"cut.jsonl{suffix}"
    cuts = {*range(1, 40), *range(40, len(whole), 17), *range(len(whole) - 20, len(whole))}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputDamaged) as caught:
            read(LineFile(path, max_line_bytes=PLENTY))
        assert caught.value.what == f"cut.jsonl{suffix} ends early or is corrupt"
        assert f"{cut:,} of {cut:,} compressed bytes read" in caught.value.where
        assert caught.value.why
        assert "fetch it again" in caught.value.do


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_of_no_bytes_is_damaged(tmp_path: Path, suffix: str) -> None:
    """An empty text takes 20 bytes of gzip and 9 of zstd; none is a file that was not written."""
    path = tmp_path / f"none.jsonl{suffix}"
    path.write_bytes(b"")
    with pytest.raises(InputDamaged, match=r"none\.jsonl"):
        read(LineFile(path, max_line_bytes=PLENTY))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_empty_text_may_be_compressed(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"empty.jsonl{suffix}"
    path.write_bytes(gzip.compress(b"") if suffix == ".gz" else zstd(b""))
    assert read(LineFile(path, max_line_bytes=PLENTY)) == b""


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_flipped_bit_is_never_taken_for_text(tmp_path: Path, suffix: str) -> None:
    whole = gzip.compress(LINES) if suffix == ".gz" else zstd(LINES, write_checksum=True)
    path = tmp_path / f"flipped.jsonl{suffix}"
    dice = random.Random(5)
    damaged = 0
    for _ in range(150):
        data = bytearray(whole)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        try:
            # Flips in a header's time or name do no harm; everything else must be told.
            assert read(LineFile(path, max_line_bytes=PLENTY)) == LINES
        except InputDamaged:
            damaged += 1
    assert damaged > 100


@pytest.mark.parametrize("junk", [b"junk", b"\x1f", b"\x1f\x8b\x08", b"\xff" * 100])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_junk_after_the_end_is_told(tmp_path: Path, suffix: str, junk: bytes) -> None:
    path = tmp_path / f"junk.jsonl{suffix}"
    path.write_bytes((gzip.compress(LINES) if suffix == ".gz" else zstd(LINES)) + junk)
    with pytest.raises(InputDamaged, match="ends early or is corrupt"):
        read(LineFile(path, max_line_bytes=PLENTY))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_plain_text_under_a_compressed_name(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plain.jsonl{suffix}"
    path.write_bytes(LINES)
    with pytest.raises(InputDamaged, match="ends early or is corrupt"):
        read(LineFile(path, max_line_bytes=PLENTY))


def test_more_than_reason_is_not_inflated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "RATIO_GRACE_BYTES", 1 << 16)
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(zstd(b"\0" * (64 << 20)))
    assert path.stat().st_size * MAX_RATIO < 64 << 20
    with pytest.raises(InputDamaged) as caught:
        read(LineFile(path, max_line_bytes=PLENTY))
    assert caught.value.what == "bomb.jsonl.zst inflates beyond reason"
    assert "a ratio over 1000" in caught.value.why
    assert "decompress it yourself" in caught.value.do


@pytest.mark.parametrize(
    "suffix",
    [
        pytest.param(".gz"),
        ".zst",
    ],
)
def test_a_restart_that_fails_leaves_no_file_open(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"shorter.jsonl{suffix}"
    path.write_bytes(gzip.compress(LINES) if suffix == ".gz" else zstd(LINES))
    gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(InputReplaced, match="is not the file that was read before"):
            LineFile(path, offset=len(LINES) + 1, max_line_bytes=PLENTY)
        gc.collect()
    assert [str(warning.message) for warning in told] == []


# What is not there, or not a file.


def test_a_missing_input_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "chunked.jsonl").write_bytes(b"")
    with pytest.raises(InputMissing) as caught:
        LineFile(tmp_path / "chunkd.jsonl", max_line_bytes=PLENTY)
    assert caught.value.what == "chunkd.jsonl is not there"
    assert caught.value.do == "did you mean chunked.jsonl?"
    for path in (tmp_path / "zzz", tmp_path / "no" / "chunked.jsonl", tmp_path / "chunkd.jsonl.gz"):
        with pytest.raises(InputMissing, match="is not there"):
            LineFile(path, max_line_bytes=PLENTY)


@pytest.mark.parametrize("name", ["folder", "folder.gz", "folder.zst"])
def test_a_directory_is_not_an_input(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(BadInput) as caught:
        read(LineFile(tmp_path / name, max_line_bytes=PLENTY))
    assert caught.value.what == f"{name} is not a regular file"


@pytest.mark.parametrize("name", ["pipe", "pipe.gz", "lines.jsonl.done"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    opening: Callable[[], object] = lambda: LineFile(tmp_path / name, max_line_bytes=PLENTY)  # noqa: E731
    if name.endswith(".done"):
        opening = lambda: read_done(tmp_path / "lines.jsonl")  # noqa: E731
    with pytest.raises(BadInput, match="is not a regular file"):
        opening()


def test_an_empty_file_has_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"")
    file = LineFile(path, max_line_bytes=PLENTY)
    assert file.next_block() is None
    assert file.fragment() is None
    assert file.size() == 0
    file.close()


# The same file as before?


def test_the_proof_holds_for_the_same_file_and_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    data = LINES * 20
    assert len(data) > 3 * _PROOF_BYTES
    path.write_bytes(data)
    for to in (1, 100, _PROOF_BYTES, len(data) // 2, len(data)):
        file = LineFile(path, max_line_bytes=PLENTY)
        proof = file.prove(to)
        file.close()
        path.write_bytes(data + b"more")
        again = LineFile(path, offset=to, proof=proof, max_line_bytes=PLENTY)
        assert read(again) == data[to:] + b"more"
        for changed in (0, min(to, _PROOF_BYTES) - 1, to - 1):
            other = bytearray(data)
            other[changed] ^= 1
            path.write_bytes(other)
            with pytest.raises(InputReplaced) as caught:
                LineFile(path, offset=to, proof=proof, max_line_bytes=PLENTY)
            assert caught.value.what == "a.jsonl is not the file that was read before"
            assert f"the bytes before {to:,} are not those" in caught.value.why
            assert "bring the old file back" in caught.value.do
        path.write_bytes(data[: to - 1])
        with pytest.raises(InputReplaced, match=f"and {to:,} were read from it before"):
            LineFile(path, offset=to, proof=proof, max_line_bytes=PLENTY)
        path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("block_bytes", [100, lines.BLOCK_BYTES])
def test_the_proof_of_a_compressed_file_is_of_every_byte(
    tmp_path: Path, suffix: str, block_bytes: int
) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    compress = gzip.compress if suffix == ".gz" else zstd
    path.write_bytes(compress(LINES))
    file = LineFile(path, max_line_bytes=PLENTY, block_bytes=block_bytes)
    proofs = {}
    while (block := file.next_block()) is not None:
        proofs[block.end] = file.prove(block.end)
    file.close()
    for to in sorted(proofs)[:: max(1, len(proofs) // 10)]:
        again = LineFile(path, offset=to, proof=proofs[to], max_line_bytes=PLENTY)
        assert read(again) == LINES[to:]
        other = bytearray(LINES)
        other[to // 2] ^= 1
        path.write_bytes(compress(bytes(other)))
        with pytest.raises(InputReplaced, match="is not the file that was read before"):
            LineFile(path, offset=to, proof=proofs[to], max_line_bytes=PLENTY)
        path.write_bytes(compress(LINES))


def test_a_file_that_is_replaced_truncated_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    file = LineFile(path, max_line_bytes=PLENTY)
    assert file.next_block() is not None
    file.still_there()
    with path.open("ab") as more:
        more.write(b"grown is fine")
    file.still_there()
    os.truncate(path, 10)
    with pytest.raises(InputReplaced, match="it has 10 bytes"):
        file.still_there()
    other = tmp_path / "other"
    other.write_bytes(LINES)
    os.replace(other, path)
    with pytest.raises(InputReplaced, match="another file stands under its name now"):
        file.still_there()
    path.unlink()
    with pytest.raises(InputMissing, match=r"a\.jsonl is not there"):
        file.still_there()
    file.close()


def _look(file: LineFile) -> None:
    """What a follower does after each pause."""
    while file.next_block() is not None:
        pass
    file.still_there()


def test_a_file_rewritten_in_place_and_longer_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    file = LineFile(path, max_line_bytes=PLENTY)
    try:
        assert file.next_block() is not None
        assert file.next_block() is None
        path.write_bytes(b'{"text": "other"}\n' * 2000)  # the same inode
        assert path.stat().st_size > len(LINES)
        with pytest.raises(InputReplaced):
            _look(file)
    finally:
        file.close()


# The marker.


def test_the_marker(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    assert read_done(path) is None
    mark_done(path)
    assert done_marker(path) == tmp_path / "a.jsonl.done"
    assert read_done(path) == len(LINES)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "a.jsonl.done"]
    done_marker(path).write_text(" \n")
    assert read_done(path) == -1


@pytest.mark.parametrize(
    "rubbish",
    [
        b"done",
        b"12",
        b"null",
        b"[]",
        b'{"size": 12}',
        b'{"bytes": null}',
        b'{"bytes": "many"}',
        b'{"bytes": NaN}',
        b'{"bytes": 12',
        pytest.param(
            b'{"bytes": Infinity}',
        ),
        pytest.param(b"\xff\xfe"),
        pytest.param(
            b"[" * 100_000,
        ),
        pytest.param(b'{"bytes": -12}'),
    ],
)
def test_rubbish_in_a_marker_is_told(tmp_path: Path, rubbish: bytes) -> None:
    path = tmp_path / "a.jsonl"
    done_marker(path).write_bytes(rubbish)
    with pytest.raises(BadInput) as caught:
        read_done(path)
    assert caught.value.what == "a.jsonl.done is not a marker penstock knows"
    assert caught.value.why.startswith("it holds ")
    assert "leave it empty" in caught.value.do


def test_a_marker_that_is_a_directory_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    done_marker(path).mkdir()
    with pytest.raises(BadInput):
        read_done(path)


# Lines that are too long.


def test_a_line_that_is_too_long_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + b"x" * 3_000_000 + b'\n{"text": "b"}\n')
    file = LineFile(path, max_line_bytes=100_000, block_bytes=10_000)
    found, rejects = b"", []
    while (block := file.next_block()) is not None:
        rejects += block.too_long
        found += bytes(block.data[block.start : block.stop])
        assert len(block.data) < 500_000
    file.close()
    assert found == b'{"text": "a"}\n{"text": "b"}\n'
    assert rejects == [Reject(LINE_TOO_LONG, 14, 3_000_015, 14 + 100_000)]


def test_a_last_line_that_is_too_long_and_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"x" * 3000)
    file = LineFile(path, max_line_bytes=100, block_bytes=64)
    while (block := file.next_block()) is not None:  # empty ones, so that signals are heeded
        assert (block.start, block.stop, block.too_long) == (0, 0, [])
    block = file.fragment()
    file.close()
    assert block is not None
    assert (block.start, block.stop) == (0, 0)
    assert block.too_long == [Reject(LINE_TOO_LONG, 0, 3000, 100)]


def test_the_sample_of_a_line_is_short_and_printable(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"ok\n" + b"\xff\xc3\xa9" + b"y" * 500 + b"\n")
    file = LineFile(path, max_line_bytes=PLENTY)
    assert file.next_block() is not None
    assert file.sample(Reject(2, 0, 3, 0)) == "ok"
    assert file.sample(Reject(2, 3, 507, 3)) == "\\xffé" + "y" * 197
    assert file.sample(Reject(2, 3, 507, 3), limit=4) == "\\xfféy"
    file.close()


def test_the_sample_of_a_line_that_is_too_long_is_the_same_in_every_block_size(
    tmp_path: Path,
) -> None:
    """Else a rejects file depends on how fast its input grew."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + b"z" * 300)
    samples = set()
    for block_bytes in (16, 1000):
        file = LineFile(path, max_line_bytes=50, block_bytes=block_bytes)
        while file.next_block() is not None:
            pass
        block = file.fragment()
        assert block is not None
        rejects = block.too_long or [Reject(LINE_TOO_LONG, 1, 301, 51)]
        samples.add(file.sample(rejects[0]))
        file.close()
    assert samples == {"z" * 200}


def test_an_xz_that_asks_for_much_memory(tmp_path: Path) -> None:
    """1 GB for a dictionary, of which nothing is used."""
    path = tmp_path / "wide.jsonl.xz"
    head = bytearray(lzma.compress(b'{"text": "a"}\n'))
    # the block header: size, flags, filter id, size of properties, dictionary, padding, checksum
    size = 4 * (head[12] + 1)
    head[12 + 4] = 2 * (30 - 12)
    head[12 + size - 4 : 12 + size] = zlib.crc32(head[12 : 12 + size - 4]).to_bytes(4, "little")
    path.write_bytes(head)
    with (
        contextlib.closing(LineFile(path, max_line_bytes=100)) as file,
        pytest.raises(InputDamaged, match="ends early or is corrupt") as caught,
    ):
        file.next_block()
    assert "emory" in caught.value.why
