"""Bad input: a counted reject with its reason, or a clear error; never a crash, never silence."""

import gzip
import json
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any, Final

import pytest
import zstandard

from penstock.errors import (
    BadConfig,
    BadInput,
    InputDamaged,
    InputMissing,
    PenstockError,
    TooManyRejects,
)
from penstock.ingest.lines import BLOCK_BYTES
from penstock.produce.dataset import FollowConfig, Outcome, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import STOPPED, ShardConfig
from penstock.store.log import Log
from penstock.store.store import open_store

GOOD: Final = b'{"text": "good"}\n'
SMALL: Final = ShardConfig(rows_per_file=50, val_fraction=0.1)


def run(path: Path, dataset: Path, max_rejects: float = 0.01) -> Outcome:
    follow = FollowConfig(complete=True, max_rejects=max_rejects, threads=1)
    return shard_jsonl([path], dataset, SMALL, follow)


def rejects(dataset: Path) -> list[dict[str, Any]]:
    """Every line of every rejects file that the log names."""
    lines: list[dict[str, Any]] = []
    for file in Log.open(dataset).state.split("rejects"):
        lines += map(json.loads, (dataset / file.name).read_text().splitlines())
    return lines


# Lines.


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a\x00b"}', "invalid_json"),
        (b'{"text": "a\\u0000b"}', "nul_in_text"),
        (b"\x00" * 100, "invalid_json"),
        (b'{"text": "\xff"}', "invalid_utf8"),
        (b'["text"]', "not_an_object"),
        (b'"text"', "not_an_object"),
        (b'{"txt": "a"}', "no_text"),
        (b'{"text": null}', "text_not_a_string"),
        (b'{"text": ""}', "empty_text"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
        (b"[" * 100_000, "nested_too_deep"),
        (b"{" * 1000, "invalid_json"),
        (b'{"text": "a"', "invalid_json"),
    ],
)
def test_a_bad_line_is_counted_with_its_reason(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD * 100 + line + b"\n" + GOOD * 100)
    outcome = run(path, tmp_path / "out")
    assert outcome.sealed
    known = outcome.state.inputs[str(path)]
    assert (known.read, known.kept, known.dropped) == (201, 200, {reason: 1})
    start = 100 * len(GOOD)
    (told,) = rejects(tmp_path / "out")
    sample = told.pop("sample")
    at = told.pop("at")
    assert told == {
        "input": str(path), "start": start, "end": start + len(line) + 1, "reason": reason,
    }  # fmt: skip
    assert start <= at <= start + len(line) + 1
    assert sample == line[:200].decode("utf-8", "backslashreplace")
    assert verify(open_store(tmp_path / "out"), full=True).faults == []


def test_half_a_line_at_the_end_split_at_every_byte(tmp_path: Path) -> None:
    line = '{"id": 7, "text": "Zoë \\u00eb 😀"}'.encode()
    path = tmp_path / "in.jsonl"
    start = 150 * len(GOOD)
    for cut in range(len(line) + 1):
        path.write_bytes(GOOD * 150 + line[:cut])
        known = run(path, tmp_path / f"{cut}").state.inputs[str(path)]
        assert known.to == start + cut
        if cut in (0, len(line)):
            assert (known.kept, known.dropped) == (150 + (cut > 0), {})
            continue
        assert (known.kept, known.dropped) == (150, {"half_line": 1})
        (told,) = rejects(tmp_path / f"{cut}")
        assert (told["start"], told["end"], told["reason"]) == (start, start + cut, "half_line")


def test_too_many_rejects_stop_the_run_and_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD * 180 + b'{}\n[]\n{"text": 5}\n{}\n')
    with pytest.raises(TooManyRejects) as caught:
        run(path, tmp_path / "out")
    error = caught.value
    assert error.what == "4 of 184 documents were refused, 2.2%; --max_rejects allows 1.0%"
    assert f"{tmp_path / 'out'}/_rejects; {path}, byte {180 * len(GOOD):,}: '{{}}'" in error.where
    assert error.why == "no_text: 2, not_an_object: 1, text_not_a_string: 1"
    assert "--max_rejects 0.033" in error.do
    stopped = (tmp_path / "out" / STOPPED).read_text().splitlines()
    assert [json.loads(line)["reason"] for line in stopped] == [
        "no_text", "not_an_object", "text_not_a_string", "no_text",
    ]  # fmt: skip
    log = Log.open(tmp_path / "out")
    assert log.state.sealed is None
    # what it says to do is what to do
    assert run(path, tmp_path / "out", max_rejects=0.033).sealed
    assert not (tmp_path / "out" / STOPPED).exists()
    assert len(rejects(tmp_path / "out")) == 4


def test_exactly_the_allowed_share_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD * 198 + b"{}\n" * 2)
    assert run(path, tmp_path / "out").sealed
    path.write_bytes(GOOD * 198 + b"{}\n" * 3)
    with pytest.raises(TooManyRejects, match=r"3 of 201 documents were refused, 1\.5%"):
        run(path, tmp_path / "more")
    path.write_bytes(b"{}\n" * 3)
    with pytest.raises(TooManyRejects, match=r"3 of 3 documents were refused, 100\.0%"):
        run(path, tmp_path / "all")


def test_a_flood_of_rejects_stops_soon(tmp_path: Path) -> None:
    """Not after a whole block of them: 8 MB of 2-byte lines took 69 s and 42 rejects files."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(GOOD * 1000 + b"x\n" * 60_000)
    with pytest.raises(TooManyRejects) as caught:
        run(path, tmp_path / "out")
    assert "invalid_json" in caught.value.why
    refused = int(caught.value.what.split()[0].replace(",", ""))
    assert refused < 20_000


def test_a_run_is_judged_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    line = b'{"text": "' + b"y" * 300 + b'"}\n'
    path.write_bytes((line * 99 + b"{}\n" * 2) * 600)
    assert path.stat().st_size > 2 * BLOCK_BYTES
    follow = FollowConfig(complete=True, threads=1)
    with pytest.raises(TooManyRejects) as caught:
        shard_jsonl([path], tmp_path / "out", ShardConfig(rows_per_file=20_000), follow)
    read = int(caught.value.what.split()[2].replace(",", ""))
    assert 10_000 <= read < 30_000  # of 60,600: it stopped at the first block
    assert Log.open(tmp_path / "out").state.sealed is None


def test_rejects_of_an_earlier_run_count_too(tmp_path: Path) -> None:
    """Stopping and starting again is no way around --max_rejects."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n" * 5 + GOOD * 60 + b'{"text": "torn')
    with pytest.raises(TooManyRejects, match="6 of 66"):
        run(path, tmp_path / "out")
    assert Log.open(tmp_path / "out").state.inputs[str(path)].dropped == {"no_text": 5}
    with pytest.raises(TooManyRejects, match="6 of 66"):
        run(path, tmp_path / "out")


# Files.


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_file_cut_in_the_middle(tmp_path: Path, suffix: str) -> None:
    content = b"".join(b'{"text": "%d"}\n' % (k * k) for k in range(3000))
    whole = gzip.compress(content) if suffix == ".gz" else zstandard.compress(content)
    path = tmp_path / f"in.jsonl{suffix}"
    for number, cut in enumerate(range(1, len(whole), len(whole) // 12)):
        path.write_bytes(whole[:cut])
        with pytest.raises(InputDamaged, match="ends early or is corrupt") as caught:
            run(path, tmp_path / f"{number}")
        assert str(path) in caught.value.where
        assert Log.open(tmp_path / f"{number}").state.sealed is None
    # fetched again, the same command goes on
    path.write_bytes(whole)
    for number in (0, 11):
        assert run(path, tmp_path / f"{number}").state.inputs[str(path)].kept == 3000


def test_what_is_not_there_or_not_a_file(tmp_path: Path) -> None:
    (tmp_path / "chunked.jsonl").write_bytes(GOOD)
    with pytest.raises(InputMissing, match=r"did you mean chunked\.jsonl\?"):
        run(tmp_path / "chunked.json", tmp_path / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match="folder is not a regular file"):
        run(tmp_path / "folder", tmp_path / "b")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(PenstockError, match="file is a file, not a directory"):
        run(tmp_path / "chunked.jsonl", tmp_path / "file")


@pytest.mark.parametrize("name", ["\udcff.jsonl", "a\nb.jsonl", "\x1b[31m.jsonl"])
def test_a_file_name_that_no_log_can_hold(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(GOOD)
    with pytest.raises(BadConfig, match="cannot be written into the log") as caught:
        run(path, tmp_path / "out")
    assert "not UTF-8, or control characters" in caught.value.why
    assert "rename the file" in caught.value.do


@pytest.mark.parametrize(
    "name",
    [
        "Zoë 😀.jsonl",
        "quote\"'\\.jsonl",
        pytest.param(
            "no\u00a0break\u3000.jsonl",
        ),
    ],
)
def test_other_file_names_are_fine(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(GOOD)
    assert run(path, tmp_path / "out").sealed
    assert [*Log.open(tmp_path / "out").state.inputs] == [str(path)]


def test_a_file_name_that_the_disk_refuses(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ENAMETOOLONG"):
        run(tmp_path / ("a" * 300), tmp_path / "out")


# Bombs, each in a process of its own: what counts is its memory.

MEASURED: Final = """
import sys
from penstock.cli import main
try:
    main()
finally:
    peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    print("peak_kib", peak[0].split()[1])
"""


class Ran:
    """How a command ended, and the most memory that it held."""

    def __init__(self, *arguments: object) -> None:
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        self.seconds = time.monotonic() - began
        self.code = done.returncode
        self.errors = done.stderr
        self.peak_bytes = int(done.stdout.split()[-1]) << 10


def assert_clear_error(ran: Ran, name: str) -> None:
    assert ran.code == 1
    assert ran.errors.startswith(f"{name}: ")
    assert "Traceback" not in ran.errors
    assert ran.peak_bytes < 1 << 30
    assert ran.seconds < 30


def rle_bomb(size: int) -> bytes:
    """A zstd frame of blocks that repeat one byte: 4 bytes become 128 KiB."""
    block_bytes = 128 << 10
    blocks = size // block_bytes
    header = b"\x28\xb5\x2f\xfd" + bytes([0x00, 0x38])  # no checksum or size; a window of 128 KiB
    block = (block_bytes << 3 | 1 << 1).to_bytes(3, "little") + b"\x20"
    last = (block_bytes << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\x20"
    return header + block * (blocks - 1) + last


def test_the_bomb_is_a_bomb() -> None:
    small = rle_bomb(4 << 20)
    assert len(small) < 200
    reader = zstandard.ZstdDecompressor().decompressobj()
    assert reader.decompress(small) == b" " * (4 << 20)


def test_a_small_zst_that_inflates_to_10_gb(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(rle_bomb(10 << 30))
    assert path.stat().st_size < 400_000
    ran = Ran("shard", "--input", path, "--parquet-dir", tmp_path / "out")
    assert_clear_error(ran, "InputDamaged")
    assert "bomb.jsonl.zst inflates beyond reason" in ran.errors
    assert "a ratio over 1000" in ran.errors
    assert Log.open(tmp_path / "out").state.sealed is None


def test_a_gzip_of_zeros(tmp_path: Path) -> None:
    """No more than 1,032 to 1 by the format, so the bound catches it late, but it does."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(64 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    path = tmp_path / "zeros.jsonl.gz"
    path.write_bytes(start + block * 5)  # 321 MB
    ran = Ran("shard", "--input", path, "--parquet-dir", tmp_path / "out")
    assert_clear_error(ran, "InputDamaged")
    assert "zeros.jsonl.gz inflates beyond reason" in ran.errors
    assert Log.open(tmp_path / "out").state.sealed is None


def test_a_line_of_200_mb(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with path.open("wb") as file:
        file.write(GOOD * 100 + b'{"text": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n' + GOOD * 100)
    ran = Ran("shard", "--complete", "--input", path, "--parquet-dir", tmp_path / "out")
    assert (ran.code, ran.errors) == (0, "")
    assert ran.peak_bytes < 1 << 30
    known = Log.open(tmp_path / "out").state.inputs[str(path)]
    assert (known.read, known.kept, known.dropped) == (201, 200, {"line_too_long": 1})
    (told,) = rejects(tmp_path / "out")
    start = 100 * len(GOOD)
    assert told["start"] == start
    assert told["end"] == start + 10 + (200 << 20) + 3
    assert told["reason"] == "line_too_long"
