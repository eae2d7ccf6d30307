"""Kernels: native code from a cache, the same answers as the functions they were made from."""

import ast
import contextlib
import fcntl
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash
from typer.testing import CliRunner

from penstock import kernels
from penstock.cli import app
from penstock.errors import BadConfig
from penstock.kernels import PAD, Kernel, byte_buffer, spare_memory, used_buffer

SIGNATURE = "uint64(uint8[::1], int64, int64, uint64)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, so that each test compiles for itself."""
    monkeypatch.setattr(kernels, "folders", lambda: (tmp_path / "first", tmp_path / "second"))
    monkeypatch.setattr(kernels, "known", [])
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
    monkeypatch.setattr(kernels, "known", [])
    name = hash_kernel()._file_name()
    assert hash_kernel()._file_name() == name
    assert Kernel("penstock.simd", "xxh64", SIGNATURE + " ")._file_name() != name
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "_environment", lambda: "another processor")
        assert hash_kernel()._file_name() != name
    with monkeypatch.context() as patched:  # an image names a processor that many contain
        patched.setenv("NUMBA_CPU_NAME", "x86-64-v3")
        patched.setenv("NUMBA_CPU_FEATURES", "")
        one = kernels._environment.__wrapped__()
        patched.setattr("llvmlite.binding.get_host_cpu_name", lambda: "znver9")
        assert kernels._environment.__wrapped__() == one
        assert "x86-64-v3" in one
    hashes = kernels.source_hashes("penstock.ingest.jsonl_kernel")
    assert {"penstock.ingest.jsonl_kernel", "penstock.simd"} <= set(hashes)
    assert "penstock" not in hashes, "what a package exports decides no kernel"


# What a regular expression for lines that begin with "from penstock" gets wrong.
TREE = {
    "__init__": "from pack import unused\n",
    "unused": "",
    "kernel": """
        '''
        from pack.in_a_text import nothing
        '''
        import numpy as np, pack.plain as plain
        from pack import module as renamed
        from pack.values import (  # pack.in_a_comment
            ONE,
            TWO as THREE,
        )
        from . import beside
        from .deep import inner, CONSTANT
        try:
            from pack.tried import x
        except ImportError:
            from pack.instead import x
        if np.True_:
            import pack.branch; from pack.second import y
        def late():
            match 1:
                case 1:
                    from pack.late import z
        # from pack.in_a_comment import nothing
        """,
    "deep.__init__": "CONSTANT = 1\nfrom ..up import y\n",
    "deep.inner": "from ..deep.sibling import s\nfrom .. import module\n",
    "deep.sibling": "from pack.kernel import ONE\n",
    **dict.fromkeys(("in_a_text", "in_a_comment", "plain", "module", "values", "beside"), ""),
    **dict.fromkeys(("tried", "instead", "branch", "second", "late", "up", "values"), ""),
}


def test_what_a_kernel_imports_is_found_as_python_finds_it(folder: Path) -> None:
    root = folder / "pack"
    for name, text in TREE.items():
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    found = kernels.source_hashes("pack.kernel", root)
    without = {"__init__", "unused", "in_a_text", "in_a_comment"}
    expected = {f"pack.{name}".removesuffix(".__init__") for name in TREE if name not in without}
    assert set(found) == expected
    (root / "up.py").write_text("y = 2\n")
    changed = kernels.source_hashes("pack.kernel", root)
    assert {name for name in found if found[name] != changed[name]} == {"pack.up"}


def test_a_source_is_parsed_once_and_again_when_it_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder / "pack"
    root.mkdir()
    (root / "kernel.py").write_text("from pack.one import x\n")
    (root / "one.py").write_text("x = 1\n")
    (root / "two.py").write_text("x = 2\n")
    parsed: list[bytes] = []
    parse = ast.parse

    def noted(source: bytes) -> ast.Module:
        parsed.append(source)
        return parse(source)

    monkeypatch.setattr(ast, "parse", noted)
    assert set(kernels.source_hashes("pack.kernel", root)) == {"pack.kernel", "pack.one"}
    assert set(kernels.source_hashes("pack.kernel", root)) == {"pack.kernel", "pack.one"}
    assert len(parsed) == 2
    (root / "kernel.py").write_text("from pack.two import x\n")
    assert set(kernels.source_hashes("pack.kernel", root)) == {"pack.kernel", "pack.two"}
    for file in (folder / "first").glob("*.imports"):
        file.write_bytes(file.read_bytes()[:-2])  # cut
    assert set(kernels.source_hashes("pack.kernel", root)) == {"pack.kernel", "pack.two"}


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
print(refused(TypeError, data, 0, 1))
print(refused(TypeError, [0], 0, 1, 0))
print(refused(TypeError, data, 0, None, 0))
kernel(data, np.int64(0), True, (1 << 64) - 1)
kernel._function = lambda *_: 1
print(refused(RuntimeError, data, 0, 1, 0))
_, code = kernel._read()
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
    assert told[:3] == [
        "kernel xxh64, argument 1 (data): found a contiguous array of int8, expected a contiguous "
        "array of uint8",
        "kernel xxh64, argument 1 (data): found an array with gaps of uint8, expected a contiguous "
        "array of uint8",
        f"kernel xxh64, argument 2 (start): {1 << 63} is beyond int64",
    ]
    assert told[-5:] == [
        "kernel xxh64 takes 4 arguments, not 3",
        "kernel xxh64, argument 1 (data): found list [0], expected a contiguous array of uint8",
        "kernel xxh64, argument 3 (stop): found NoneType None, expected a number (int64)",
        "kernel xxh64 failed with status 1",
        "no no_such_symbol in its object file",
    ]


class Piece(NamedTuple):
    """Arguments that belong together, as a layout module declares them."""

    data: npt.NDArray[np.uint8]
    start: int
    stop: int


def test_a_named_tuple_is_taken_apart_and_checked_by_its_fields(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "pieces.py"
    source.write_text(
        "from penstock.simd import njit, xxh64\n"
        "@njit\n"
        "def hash_piece(seed, piece):\n"
        "    return xxh64(piece.data, piece.start, piece.stop, seed)\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(kernels, "_path", lambda module, root: source)
    kernel = Kernel("pieces", "hash_piece", "uint64(uint64, Piece)", Piece)
    data = byte_buffer(40)
    assert kernel(7, Piece(data, 3, 9)) == xxhash.xxh64_intdigest(bytes(6), 7)
    assert kernel(7, Piece(data=data, stop=9, start=0)) == xxhash.xxh64_intdigest(bytes(9), 7)
    for wrong, told in (
        ((data, 3, 9), "2: found tuple, expected Piece"),
        (Piece(data.view(np.int8), 3, 9), r"2 \(piece.data\): found a contiguous array of int8"),
        (Piece(data, 3, 0.5), r"2 \(piece.stop\): found float 0.5, expected a number"),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=f"kernel hash_piece, argument {told}"):
            kernel(7, wrong)
    with pytest.raises(OverflowError, match=r"argument 1 \(seed\): -1 is beyond uint64"):
        kernel(-1, Piece(data, 3, 9))


# The first compilation: told, once for all processes.

ALONE = """
import sys, time
from pathlib import Path
from penstock import kernels

folder = Path(sys.argv[1])
kernels.folders = lambda: (folder, folder)
made = kernels.Kernel._compile
kernels.Kernel._compile = lambda self: print("compiled", flush=True) or made(self)
if sys.argv[2] == "hold":
    with kernels._locked():
        print("held", flush=True)
        time.sleep(60)
kernel = kernels.Kernel("penstock.simd", "xxh64", "uint64(uint8[::1], int64, int64, uint64)")
print("ready", flush=True)
sys.stdin.readline()
print(kernel(kernels.byte_buffer(9), 0, 9, 7))
"""
EXPECTED = str(xxhash.xxh64_intdigest(bytes(9), 7))


class Process(subprocess.Popen[str]):
    """One that compiles into a folder, or holds its lock; ended when the test is."""

    def __init__(self, folder: Path, job: str = "run") -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", ALONE, str(folder), job]
        super().__init__(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        assert self.stdout
        assert self.stdout.readline() in ("ready\n", "held\n"), self.communicate()[1]

    def __exit__(self, *about: object) -> None:
        self.kill()
        super().__exit__(*about)  # type: ignore[arg-type]


def test_processes_that_start_at_once_compile_a_kernel_once(tmp_path: Path) -> None:
    with Process(tmp_path) as one, Process(tmp_path) as two:
        for process in (one, two):
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=100)[0].split() for process in (one, two)]
    assert sorted(answers) == [[EXPECTED], ["compiled", EXPECTED]]
    assert len(list(tmp_path.glob("*.kernel"))) == 1


def test_one_that_is_killed_while_it_compiles_blocks_nobody(tmp_path: Path) -> None:
    with Process(tmp_path, "hold") as holder, Process(tmp_path) as other:
        assert other.stdin
        assert other.stderr
        other.stdin.write("go\n")
        other.stdin.flush()
        told = other.stderr.readline()
        assert told == "penstock: another process compiles kernels; waiting for it\n"
        assert not list(tmp_path.glob("*.kernel"))
        holder.kill()
        assert other.communicate(timeout=100)[0].split() == ["compiled", EXPECTED]


def test_one_that_is_stopped_while_it_compiles_is_waited_for_not_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "WAIT_S", 0.1)
    with Process(folder / "first", "hold"):
        assert hash_of(hash_kernel(), b"x") == xxhash.xxh64_intdigest(b"x", 7)
    assert list((folder / "first").glob("*.kernel"))


TOLD = "penstock: compiling 2 kernels, once, a few seconds"
COUNTS = """
import sys
from pathlib import Path
from penstock import kernels
kernels._QUIET_S, kernels._COUNT_S = 0.01, 0.0
kernels.folders = lambda: (Path(sys.argv[1]), Path(sys.argv[1]))
kernels.known.clear()
for name, signature in (("xxh64", sys.argv[3]), ("splitmix64", "uint64(uint64)")):
    kernels.Kernel("penstock.simd", name, signature)
if sys.argv[2] == "drawn":
    class Drawn:
        write, flush, isatty = sys.stderr.write, sys.stderr.flush, sys.stderr.isatty
    sys.stderr = Drawn()
kernels.known[0].prepare()
"""


@pytest.mark.parametrize(
    ("drawn", "wide", "said"),
    [
        ("plain", 120, f"\r{TOLD}\r{TOLD}: 1 of 2\r{TOLD}: 2 of 2\r\n"),
        ("plain", 60, f"{TOLD}\r\n{TOLD}: 1 of 2\r\n{TOLD}: 2 of 2\r\n"),
        ("drawn", 120, f"{TOLD}\r\n{TOLD}: 1 of 2\r\n{TOLD}: 2 of 2\r\n"),
    ],
)
def test_a_terminal_sees_how_many_kernels_are_compiled(
    tmp_path: Path, drawn: str, wide: int, said: str
) -> None:
    """In one line; in lines of their own where a bar is drawn, or the line is too long for it."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, wide, 0, 0))
    command = [sys.executable, "-c", COUNTS, str(tmp_path), drawn, SIGNATURE]
    with subprocess.Popen(command, stderr=theirs) as running:
        os.close(theirs)
        found = b""
        with contextlib.suppress(OSError):  # how the end of a terminal is told
            while got := os.read(ours, 4096):
                found += got
        os.close(ours)
    assert running.returncode == 0
    assert found.decode() == said


@pytest.mark.parametrize(("quiet_s", "told"), [(0.05, 1), (60.0, 0)])
def test_a_long_compilation_is_told_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    quiet_s: float,
    told: int,
) -> None:
    """With all that the imported modules need: the next kernel is there when it is called."""
    monkeypatch.setattr(kernels, "_QUIET_S", quiet_s)
    first, second = hash_kernel(), Kernel("penstock.simd", "splitmix64", "uint64(uint64)")
    hash_of(first, b"x")
    (folder / "second").write_text("not a folder")
    assert second(0) == 0xE220A8397B1DCDAF
    hash_of(hash_kernel(), b"x")
    said = capfd.readouterr().err
    assert said == f"{TOLD}\n" * told
    assert len(list((folder / "first").glob("*.kernel"))) == 2


def test_where_nothing_can_be_written_each_process_compiles_what_it_calls(folder: Path) -> None:
    for name in ("first", "second"):
        (folder / name).write_text("not a folder")
    kernel, other = hash_kernel(), Kernel("penstock.simd", "no_such", "uint64(uint64)")
    assert hash_of(kernel, b"x") == xxhash.xxh64_intdigest(b"x", 7)
    assert kernels.compile_missing([kernel, other]) == (2, None)


def test_a_source_edited_while_it_is_compiled_is_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = hash_kernel()
    kernel._file_name()
    monkeypatch.setattr(kernels, "source_hashes", lambda module: {module: "edited"})
    assert hash_of(kernel, b"x") == xxhash.xxh64_intdigest(b"x", 7)
    assert not list(folder.glob("*/*.kernel"))


def test_warm_compiles_what_is_missing_and_says_where(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pkgutil.walk_packages", lambda *_: ())  # what is imported is enough here
    hash_kernel()
    for compiled in (1, 0):
        answer = CliRunner().invoke(app, ["warm"])
        assert answer.output.endswith(
            f"1 kernels ready, {compiled} compiled now, in {folder / 'first'}\n"
        )
    answer = CliRunner().invoke(app, ["warm", "--json"])
    where = str(folder / "first")
    assert json.loads(answer.output) == {"kernels": 1, "compiled": 0, "folder": where}
    for name in ("first", "second"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).write_text("not a folder")
    answer = CliRunner().invoke(app, ["warm"])
    assert isinstance(answer.exception, BadConfig)
    assert answer.exception.what == "1 kernels cannot be kept"


def test_every_kernel_is_declared_where_warm_finds_it() -> None:
    """In a module, not in a function, and not in a module that only the compiler imports."""
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_bytes())
        top = {id(part) for node in tree.body for part in ast.walk(node)
               if not isinstance(node, ast.FunctionDef | ast.ClassDef)}  # fmt: skip
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Kernel":
                assert id(node) in top, path
                assert not path.name.endswith("_kernel.py")


# The versions of the compiler.


def test_the_installed_compiler_is_one_that_pyproject_allows() -> None:
    root = Path(__file__).parents[1]
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    for name, (major, minor) in kernels.NEWEST.items():
        (line,) = (line for line in wanted if re.match(rf"{name}\b", line))
        assert line.endswith(f",<{major}.{minor + 1}"), "pyproject.toml and kernels.py agree"
        kernels._check_version(name, version(name))


@pytest.mark.parametrize("newer", ["0.69.0", "0.69.0rc1", "0.100", "1.0.2"])
def test_a_newer_compiler_than_tested_is_refused(
    newer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: {"numba": newer}.get(name, "0.44.0")
    )
    kernels._environment.cache_clear()
    try:
        with pytest.raises(BadConfig, match=f"numba {newer} is newer") as caught:
            hash_of(hash_kernel(), b"x")
    finally:
        kernels._environment.cache_clear()
    assert "pip install 'numba==0.68.*'" in caught.value.do
    for known in ("0.68.1", "0.61.0rc2"):
        kernels._check_version("numba", known)


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


def test_a_command_does_not_import_numba_or_pandas(tmp_path: Path, tokenizer_folder: Path) -> None:
    """They take 1.6 s and 1.2 s; a command that is run again must not wait for them."""
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from penstock import FollowConfig, shard_jsonl, verify
        from penstock.store.store import open_store
        Path("lines.jsonl").write_text('{"text": "one"}\\n')
        shard_jsonl(
            ["lines.jsonl"], "out", follow=FollowConfig(complete=True), tokenizer=sys.argv[1],
            tokens=True,
        )
        assert not verify(open_store("out"), full=True).faults
        print([name for name in ("numba", "pandas", "torch") if name in sys.modules])
        """
    )
    for _ in range(2):  # the first one may have to compile
        subprocess.run(["rm", "-rf", "out"], cwd=tmp_path, check=True)
        done = subprocess.run(
            [sys.executable, "-c", script, str(tokenizer_folder)],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
    assert done.stdout.strip() == "[]"


# Buffers that are used again.


def where(buffer: Any) -> int:
    return int(buffer.__array_interface__["data"][0])


@pytest.fixture
def no_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_spare", {})


@pytest.mark.usefixtures("no_spare")
@pytest.mark.parametrize(
    "view",
    [
        lambda buffer: buffer[5:9],
        lambda buffer: buffer.view(np.uint64)[3:],
        lambda buffer: buffer.data[5:9],
        lambda buffer: pa.py_buffer(buffer).slice(5, 4),
        lambda buffer: np.frombuffer(pa.py_buffer(buffer), np.uint8),
        lambda buffer: threading.Thread(target=print, args=(buffer,)),
    ],
)
def test_a_buffer_is_used_again_when_its_last_view_is_gone(view: Any) -> None:
    buffer = used_buffer(128)
    assert len(buffer) == 128 + PAD
    buffer[:] = 7
    at, held = where(buffer), view(buffer)
    del buffer
    other = used_buffer(128)
    assert where(other) != at
    del held
    again = used_buffer(3000)
    assert where(again) == at
    assert again[50] == 7


@pytest.mark.usefixtures("no_spare")
def test_memory_that_is_kept_for_others_is_bounded() -> None:
    def kept() -> int:
        return sum(size * len(spare) for size, spare in kernels._spare.items())

    def use(count: int) -> None:
        buffers = [used_buffer(size << 20) for size in range(1, count)]
        del buffers

    use(40)
    assert 16 << 20 < kept() <= 32 << 20
    with spare_memory(100 << 20):
        use(40)
        assert 64 << 20 < kept() <= 100 << 20
        with spare_memory(1):
            pass
        use(40)
        assert kept() > 64 << 20
    assert kept() == 0
    use(40)
    assert 16 << 20 < kept() <= 32 << 20


@pytest.mark.usefixtures("no_spare")
def test_threads_never_share_a_buffer() -> None:
    def work(number: int) -> int:
        wrong = 0
        for _ in range(300):
            buffer = used_buffer(1000)
            buffer[:1000] = number
            time.sleep(0)
            wrong += int((buffer[:1000] != number).any())
        return wrong

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0
