"""Kernels: native code from a cache, the same answers as the functions they were made from."""

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import xxhash

from penstock import kernels
from penstock.kernels import PAD, Kernel, byte_buffer

SIGNATURE = "uint64(uint8[::1], int64, int64, uint64)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, so that each test compiles for itself."""
    monkeypatch.setattr(kernels, "_folders", lambda: (tmp_path / "first", tmp_path / "second"))
    return tmp_path


def hash_kernel() -> Kernel:
    return Kernel("penstock.simd", "xxh64", SIGNATURE)


def hash_of(kernel: Kernel, data: bytes) -> int:
    buffer = byte_buffer(len(data))
    buffer[: len(data)] = np.frombuffer(data, np.uint8)
    return int(kernel(buffer, 0, len(data), 7))


def test_compiled_then_loaded_gives_the_same(folder: Path) -> None:
    data = b"some bytes, more than thirty-two of them, so that every path is taken"
    expected = xxhash.xxh64_intdigest(data, 7)
    assert hash_of(hash_kernel(), data) == expected
    (file,) = (folder / "first").glob("xxh64-*.kernel")
    before = file.stat().st_mtime_ns
    assert hash_of(hash_kernel(), data) == expected
    assert file.stat().st_mtime_ns == before


def test_a_damaged_object_file_is_compiled_again(folder: Path) -> None:
    hash_of(hash_kernel(), b"x")
    (file,) = (folder / "first").glob("*.kernel")
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], whole[:-1] + b"\0" + whole[-1:]):
        file.write_bytes(damaged)
        assert hash_of(hash_kernel(), b"x") == xxhash.xxh64_intdigest(b"x", 7)
        assert file.read_bytes() != damaged


def test_a_read_only_package_uses_the_second_folder(folder: Path) -> None:
    (folder / "first").write_text("not a folder")
    assert hash_of(hash_kernel(), b"x") == xxhash.xxh64_intdigest(b"x", 7)
    assert list((folder / "second").glob("*.kernel"))


def test_the_key_holds_sources_signature_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    name = hash_kernel()._file_name()
    assert hash_kernel()._file_name() == name
    assert Kernel("penstock.simd", "xxh64", SIGNATURE + " ")._file_name() != name
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_environment", lambda: "another processor")
        assert hash_kernel()._file_name() != name
    hashes = kernels._source_hashes("penstock.ingest.jsonl_kernel", {})
    assert {"penstock.ingest.jsonl_kernel", "penstock.ingest.jsonl", "penstock.simd"} <= set(hashes)


WRONG = """
import numpy as np
from penstock import kernels
from penstock.kernels import Kernel

kernel = Kernel("penstock.simd", "xxh64", "uint64(uint8[::1], int64, int64, uint64)")
data = np.zeros(200, np.uint8)


def refused(error, *arguments):
    try:
        kernel(*arguments)
    except error as found:
        return str(found)
    raise SystemExit(f"{arguments[1:]} were taken")


refused(TypeError, np.zeros(100, np.int64), 0, 1, 0)
print(refused(TypeError, data.view(np.int8), 0, 1, 0))
print(refused(TypeError, data[::2], 0, 1, 0))
for number in (1 << 63, -(1 << 63) - 1, 1 << 64, 1 << 200):
    print(refused(OverflowError, data, number, 1, 0))
for number in (-1, 1 << 64):
    print(refused(OverflowError, data, 0, 1, number))
refused(TypeError, data, 0.5, 1, 0)
refused(TypeError, data, "0", 1, 0)
refused(ValueError, data, 0, 1)
kernel(data, np.int64(0), True, (1 << 64) - 1)
kernel._function = lambda *_: 1
print(refused(RuntimeError, data, 0, 1, 0))
_, code = kernel._read(kernel._file_name())
try:
    kernels._link("no_such_symbol", code)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("options", [[], ["-O"]])
def test_wrong_arguments_are_refused_with_asserts_or_without(options: list[str]) -> None:
    """What a kernel gets it believes: it would read beyond the array."""
    hash_of(hash_kernel(), b"x")  # compiled, if it was not
    done = subprocess.run([sys.executable, *options, "-c", WRONG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0] == (
        "kernel xxh64 takes a contiguous array of uint8, and got one of int8, contiguous"
    )
    assert told[1].endswith("got one of uint8, with gaps")
    assert told[2] == f"kernel xxh64: {1 << 63} is not in 64 bits"
    assert told[-2:] == [
        "kernel xxh64 failed with status 1",
        "no no_such_symbol in its object file",
    ]


def test_kernels_run_side_by_side() -> None:
    data = np.random.default_rng(1).integers(0, 256, (4 << 20) + PAD, np.uint8)
    expected = xxhash.xxh64_intdigest(data[: 4 << 20].tobytes(), 7)
    kernel, found = hash_kernel(), []
    threads = [
        threading.Thread(target=lambda: found.append(int(kernel(data, 0, 4 << 20, 7))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_a_command_does_not_import_numba_or_pandas(tmp_path: Path) -> None:
    """They take 1.6 s and 1.2 s; a command that is run again must not wait for them."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from penstock import FollowConfig, shard_jsonl, verify
        from penstock.store.backends import open_store
        Path("lines.jsonl").write_text('{"text": "one"}\\n')
        shard_jsonl(["lines.jsonl"], "out", follow=FollowConfig(complete=True))
        assert not verify(open_store("out"), full=True).faults
        print([name for name in ("numba", "pandas", "torch") if name in sys.modules])
        """
    )
    for _ in range(2):  # the first one may have to compile
        subprocess.run(["rm", "-rf", "out"], cwd=tmp_path, check=True)
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
        )
    assert done.stdout.strip() == "[]"
