"""Run compiled kernels without waiting for the compiler.

In:    a numba function by name, its signature
Out:   the same function as native code, called through ctypes: the GIL is released while it runs
Keeps: one object file for each kernel, keyed by its sources, versions and processor; each is
       compiled once, however many processes need it at the same time
Never: imports numba when the object file is there; reads or writes beyond the arrays it is given

Importing numba and preparing its first call took 1.6 s of every command here; loading an object
file takes 0.1 s, most of it for llvmlite. Kernels are compiled by `penstock warm`, or at the first
use, once, into the package's __pycache__ or, where that is read-only, ~/.cache/penstock.
"""

import ast
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import json
import mmap
import operator
import os
import re
import sys
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.disk import is_private, open_own, replacing
from penstock.errors import BadConfig

PAD = 64
"""Bytes of slack that every buffer handed to a kernel has after its last valid byte."""

_SCALARS = {
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float64": ctypes.c_double,
}
_NUMBERS = {int: "int64", float: "float64"}
_BOUNDS = {"int64": (-(1 << 63), (1 << 63) - 1), "uint64": (0, (1 << 64) - 1)}
_ARRAY = re.compile(r"(\w+)\[::1\]")
_ROOT = Path(__file__).parent
NEWEST = {"numba": (0, 68), "llvmlite": (0, 50)}
"""The newest versions that kernels are tested with; pyproject.toml allows the same. Kernels go by
what numba does not promise: how arguments are passed, and where the object code is."""
WAIT_S = 600.0
"""How long to wait for another process that compiles: five times what it takes on one core."""
_QUIET_S = 1.0
_COUNT_S = 10.0
"""How often a counter is a line of its own, where it cannot stand in one."""
_COUNTER_LETTERS = 20
_KERNEL_S = 1.9
"""What a kernel takes to compile, on average: 59 took 113 s of CPU, beside other work."""
_PARSED = 1
"""Another number if `_imports` finds others."""
_loading = threading.Lock()
known: "list[Kernel]" = []
"""Every kernel of the modules imported so far."""


def byte_buffer(size: int) -> npt.NDArray[np.uint8]:
    """A uint8 array of `size` and PAD bytes, on huge pages where the system has them.

    Memory is taken as it is touched. Touching 256 MB costs 0.21 s in pages of 4 KB on a virtual
    machine, more than parsing the text that goes there, and 0.02 s in huge ones, once the machine
    has them. It must be private: shared memory has huge pages on few systems.
    """
    memory = _private_memory(size + PAD)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _private_memory(size: int) -> mmap.mmap:
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    return mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)


_SPARE_STEP = 2 << 20
_spare: dict[int, list[mmap.mmap]] = {}
"""Memory of buffers that nobody holds any longer, by size."""
_spare_most = [32 << 20]
"""How much of it is kept: the largest of these."""


def used_buffer(size: int) -> npt.NDArray[np.uint8]:
    """A uint8 array of `size` and PAD bytes that may hold what its last user left there.

    When the last view of it is gone, its memory is kept for the next one. Its pages are small: it
    is touched for the first time only once, and of huge ones 256 MB cost 0.43 s on a virtual
    machine that gives its host back what is free, where small ones cost 0.12 s.
    """
    whole = -(-(size + PAD) // _SPARE_STEP) * _SPARE_STEP
    try:
        memory = _spare[whole].pop()
    except (KeyError, IndexError):
        memory = _private_memory(whole)
    owner = np.frombuffer(memory, np.uint8)
    # All views hold the owner, those of Arrow too. Its end may come in any thread, in the midst of
    # anything: so there is no lock, and each step is one that threads cannot interrupt.
    weakref.finalize(owner, _keep_spare, whole, memory).atexit = False
    return owner[: size + PAD]


def _keep_spare(size: int, memory: mmap.mmap) -> None:
    held = sum(each * len(kept) for each, kept in list(_spare.items()))
    if held + size <= max(_spare_most):
        _spare.setdefault(size, []).append(memory)


@contextlib.contextmanager
def spare_memory(most_bytes: int) -> Iterator[None]:
    """Keep so much of used buffers' memory for others, and none of it at the end."""
    _spare_most.append(most_bytes)
    try:
        yield
    finally:
        _spare_most.remove(most_bytes)
        _spare.clear()


class Kernel:
    """A function of `module`, compiled for one signature such as "int64(uint8[::1], int64)".

    Arrays are one-dimensional and contiguous. The result is one of int64, uint64, float64, void.
    A named tuple may be an argument, by the name of its class in `bundles`: the types of its fields
    are those that it is annotated with, and the kernel gets them as if each came alone.
    """

    def __init__(self, module: str, name: str, signature: str, *bundles: type) -> None:
        self.name = name
        self.signature = signature
        self._module = module
        result, _, arguments = signature.strip().rstrip(")").partition("(")
        self._result: Any = None if result == "void" else _SCALARS[result]
        self._given = [text.strip() for text in arguments.split(",")]
        self._bundles: dict[str, tuple[Any, dict[str, str]]] = {
            bundle.__name__: (bundle, _field_types(bundle)) for bundle in bundles
        }
        self._classes = [self._bundles[t][0] if t in self._bundles else None for t in self._given]
        self._arguments = [
            field
            for text in self._given
            for field in (self._bundles[text][1].values() if text in self._bundles else (text,))
        ]
        self._dtypes = [
            np.dtype(found[1]) if (found := _ARRAY.fullmatch(text)) else None
            for text in self._arguments
        ]
        self._bounds = [_BOUNDS.get(text) for text in self._arguments]
        self._function: Any = None
        known.append(self)

    def prepare(self) -> None:
        """Compile it now, if nobody has."""
        self._load()

    def __call__(self, *arguments: Any) -> Any:
        function = self._function or self._load()
        # no asserts here: under python -O the kernel would read what lies beyond an array
        if len(arguments) != len(self._given):
            raise TypeError(
                f"kernel {self.name} takes {len(self._given)} arguments, not {len(arguments)}"
            )
        if self._bundles:
            arguments = self._fields(arguments)
        # numba's own calling convention: where to put the result, where to put an exception, then
        # the arguments; an array is owner, parent, items, item size, data, shape, stride
        out, fault = ctypes.c_uint64(), ctypes.c_void_p()
        flat: list[Any] = [ctypes.byref(out), ctypes.byref(fault)]
        for k, value in enumerate(arguments):
            dtype = self._dtypes[k]
            if dtype is None:
                bounds = self._bounds[k]
                is_plain = type(value) is int and bounds and bounds[0] <= value <= bounds[1]
                flat.append(value if is_plain else self._number(k, value))
                continue
            if (
                not isinstance(value, np.ndarray)
                or value.dtype != dtype
                or not value.flags.c_contiguous
            ):
                raise self._refused(k, value)
            address = value.__array_interface__["data"][0]
            flat += (None, None, value.size, dtype.itemsize, address, value.size, dtype.itemsize)
        status = function(*flat)
        if status:
            raise RuntimeError(f"kernel {self.name} failed with status {status}")
        return self._result and self._result.from_buffer(out).value

    def _fields(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with the fields of each named tuple in its stead."""
        flat: list[Any] = []
        for k, value in enumerate(arguments):
            wanted = self._classes[k]
            if wanted is None:
                flat.append(value)
            elif type(value) is wanted:
                flat += value
            else:
                raise TypeError(
                    f"kernel {self.name}, argument {k + 1}: found {type(value).__name__}, "
                    f"expected {self._given[k]}"
                )
        return tuple(flat)

    def _number(self, k: int, value: Any) -> int | float:
        """A number of another type than int, for ctypes; one that does not fit is refused."""
        bounds = self._bounds[k]
        try:
            number = float(value) if bounds is None else operator.index(value)
        except (TypeError, ValueError):
            raise self._refused(k, value) from None
        if bounds and not bounds[0] <= number <= bounds[1]:  # ctypes would cut it to 64 bits
            raise OverflowError(
                f"kernel {self.name}, argument {self._argument(k)}: {number} is beyond "
                f"{self._arguments[k]}"
            )
        return number

    def _refused(self, k: int, value: Any) -> TypeError:
        expected = f"a number ({self._arguments[k]})"
        if (dtype := self._dtypes[k]) is not None:
            expected = f"a contiguous array of {dtype}"
        found = f"{type(value).__name__} {value!r:.40}"
        if isinstance(value, np.ndarray):
            laid = "a contiguous array" if value.flags.c_contiguous else "an array with gaps"
            found = f"{laid} of {value.dtype}"
        return TypeError(
            f"kernel {self.name}, argument {self._argument(k)}: found {found}, expected {expected}"
        )

    def _argument(self, k: int) -> str:
        """An argument's position, from 1 on, and its name in the source; a field by its own too."""
        given = [
            (number, field)
            for number, text in enumerate(self._given)
            for field in ([f".{f}" for f in self._bundles[text][1]] if text in self._bundles
                          else [""])
        ]  # fmt: skip
        number, field = given[k]
        path = _path(self._module, _ROOT)
        for node in ast.parse(path.read_bytes()).body if path else ():
            if isinstance(node, ast.FunctionDef) and node.name == self.name:
                return f"{number + 1} ({node.args.args[number].arg}{field})"
        return f"{number + 1}{field}"

    def _load(self) -> Any:
        with _loading:
            if self._function is None:
                found = self._read()
                if found is None:
                    # all that the modules imported so far declare: one wait, one message
                    compile_missing([self, *known])
                    found = self._read()
                if found is None:  # no folder can be written: this one alone, each time
                    with _told(_compiling(1)):
                        found = self._compile()
                self._function = self._prototype()(_link(*found))
        return self._function

    def _prototype(self) -> Any:
        types: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
        for text, dtype in zip(self._arguments, self._dtypes, strict=True):
            if dtype is None:
                types.append(_SCALARS[text])
            else:
                word = ctypes.c_int64
                types += (ctypes.c_void_p, ctypes.c_void_p, word, word, ctypes.c_void_p, word, word)
        return ctypes.CFUNCTYPE(ctypes.c_int32, *types)

    def _read(self) -> tuple[str, bytes] | None:
        for data in _kept(self._file_name()):
            digest, _, body = data.partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() == digest:
                symbol, _, code = body.partition(b"\n")
                return symbol.decode(), code
        return None

    def _compile(self) -> tuple[str, bytes]:
        name = self._file_name()
        from numba import njit

        function = getattr(importlib.import_module(self._module), self.name)
        compiled = njit(
            self._compiled_signature(),
            _nrt=False,
            error_model="numpy",
            no_cpython_wrapper=True,
            no_cfunc_wrapper=True,
        )(function.py_func)
        overload = next(iter(compiled.overloads.values()))
        symbol: str = overload.fndesc.llvm_func_name
        library = overload.library
        foreign = {
            declared.name
            for declared in library._final_module.functions
            if declared.is_declaration and not declared.name.startswith("llvm.")
        }
        if foreign - {"memcpy", "memset", "memmove"}:
            raise RuntimeError(f"kernel {self.name} needs {foreign}")
        code: bytes = library._get_compiled_object()
        # a source that was edited meanwhile is not the one that the name tells
        if source_hashes(self._module) == _hashes(self._module):
            body = symbol.encode() + b"\n" + code
            _keep(name, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        return symbol, code

    def _compiled_signature(self) -> Any:
        from numba import types

        def of(text: str) -> Any:
            if text in self._bundles:
                bundle, fields = self._bundles[text]
                return types.NamedTuple([of(field) for field in fields.values()], bundle)
            found = _ARRAY.fullmatch(text)
            return getattr(types, found[1])[::1] if found else getattr(types, text)

        return of(self.signature.partition("(")[0])(*map(of, self._given))

    def _file_name(self) -> str:
        sources = " ".join(_hashes(self._module).values())
        fields = [fields for _, fields in self._bundles.values()]
        about = f"{_environment()} {sources} {self.name} {self.signature} {fields or ''}"
        return f"{self.name}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.kernel"


def _field_types(bundle: type) -> dict[str, str]:
    """The fields of a named tuple, as a signature names their types."""
    found = {}
    for name, kind in typing.get_type_hints(bundle).items():
        if kind in _NUMBERS:
            found[name] = _NUMBERS[kind]
        else:
            _, dtype = typing.get_args(kind)  # of npt.NDArray[np.int64]: shape, np.dtype[np.int64]
            found[name] = f"{np.dtype(typing.get_args(dtype)[0]).name}[::1]"
    return found


def folders() -> tuple[Path, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return _ROOT / "__pycache__", cache / "penstock"


def _kept(name: str) -> Iterator[bytes]:
    """What was kept under a name, in each of the folders."""
    ours, cache = folders()
    for folder in (ours, cache):
        try:
            with open(open_own(folder / name, make=False, write=False), "rb") as file:
                # it is machine code: in the cache we run what this user alone may write, in the
                # package what stands beside its sources
                if folder == ours or is_private(os.fstat(file.fileno())):
                    yield file.read()
        except OSError:
            continue


def _keep(name: str, data: bytes) -> None:
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(folder / name, mode=0o644) as file:
                file.write(data)
        except OSError:
            continue  # read-only: the next folder, or make it again next time
        return


class Compiled(NamedTuple):
    """What `compile_missing` did."""

    kernels: int
    """How many had no object file."""
    folder: Path | None
    """Where they are; None where no folder can be written, and nothing was compiled."""


def compile_missing(kernels: Sequence[Kernel]) -> Compiled:
    """Compile the kernels that have no object file; other processes wait, and then link them."""
    with _locked() as folder:
        by_name = {kernel._file_name(): kernel for kernel in kernels if kernel._read() is None}
        if folder and by_name:
            with _told(_compiling(len(by_name))) as count:
                for done, kernel in enumerate(by_name.values(), 1):
                    kernel._compile()
                    count(f"{done} of {len(by_name)}")
    return Compiled(len(by_name), folder)


def _compiling(count: int) -> str:
    """What is told of a long compilation.

    >>> _compiling(59)
    'compiling 59 kernels, once, about 2 minutes'
    >>> _compiling(1), _compiling(30)
    ('compiling 1 kernel, once, a few seconds', 'compiling 30 kernels, once, about a minute')
    """
    minutes = round(count * _KERNEL_S / 60)
    long = "about a minute" if minutes == 1 else f"about {minutes} minutes"
    if minutes == 0:
        long = "a few seconds" if count < 8 else "less than a minute"
    return f"compiling {count} kernel{'s' * (count > 1)}, once, {long}"


@contextlib.contextmanager
def _told(text: str) -> Iterator[Callable[[str], None]]:
    """Say what takes so long, if it takes longer than a second. Gives a function that says how far
    it is: to a terminal in the same line, or, where a bar is drawn, in a line now and then."""
    notice = _Notice(f"penstock: {text}")
    timer = threading.Timer(_QUIET_S, notice.begin)
    timer.daemon = True
    timer.start()
    try:
        yield notice.count
    finally:
        timer.cancel()
        notice.end()


class _Notice:
    """One line on standard error, and on a terminal a counter."""

    def __init__(self, text: str) -> None:
        self._text, self._so_far = text, ""
        self._lock = threading.Lock()
        self._is_said = self._is_open = False
        self._said_at = 0.0
        self._counts = sys.stderr.isatty()
        # rich replaces the stream while it draws, and workers share the terminal with who draws
        is_worker = getattr(sys.modules.get("multiprocessing"), "parent_process", lambda: None)()
        is_own = sys.stderr is sys.__stderr__ and is_worker is None
        self._rewrites = (
            self._counts
            and is_own
            and os.get_terminal_size(sys.stderr.fileno()).columns > len(text) + _COUNTER_LETTERS
        )

    def begin(self) -> None:
        with self._lock:
            self._is_said = True
            self._say()

    def count(self, so_far: str) -> None:
        with self._lock:
            self._so_far = f": {so_far}"
            is_due = self._rewrites or time.monotonic() - self._said_at > _COUNT_S
            if self._is_said and self._counts and is_due:
                self._say()

    def end(self) -> None:
        with self._lock:
            self._is_said = False
            if self._is_open:
                print(file=sys.stderr, flush=True)

    def _say(self) -> None:
        self._said_at, self._is_open = time.monotonic(), self._rewrites
        begin, end = ("\r", "") if self._rewrites else ("", "\n")
        print(f"{begin}{self._text}{self._so_far}", end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked() -> Iterator[Path | None]:
    """The folder for object files, one process at a time; None if none can be written.

    The lock is the system's: it ends with the process that holds it, however that ends.
    """
    for folder in folders():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = open_own(folder / "kernels.lock")
        except OSError:
            continue
        try:
            if not _takes(descriptor):
                with _told("another process compiles kernels; waiting for it"):
                    _wait_for(descriptor)
            yield folder
        finally:
            with contextlib.suppress(OSError):  # a process forked meanwhile holds it too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
        return
    yield None


def _wait_for(descriptor: int) -> None:
    """Take a lock, or do without: one that was stopped while it compiles costs time, not all."""
    deadline = time.monotonic() + WAIT_S
    while not _takes(descriptor) and time.monotonic() < deadline:
        time.sleep(0.05)


def _takes(descriptor: int) -> bool:
    """Take a lock that nobody has; on a file system without locks nobody ever has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def source_hashes(module: str, root: Path = _ROOT) -> dict[str, str]:
    """Hashes of a module and of all modules below `root`, the package, that it imports."""
    found: dict[str, str] = {}
    left = [module]
    while left:
        name = left.pop()
        if name not in found and (path := _path(name, root)):
            source = path.read_bytes()
            found[name] = hashlib.sha256(source).hexdigest()
            parts = name.split(".")
            package = parts if path.name == "__init__.py" else parts[:-1]
            for base, names in _parsed_imports(source, package):
                # a name is a module, or stands in the one that it is imported from
                left += (f"{base}.{n}" if _path(f"{base}.{n}", root) else base for n in names)
    return dict(sorted(found.items()))


def _parsed_imports(source: bytes, package: list[str]) -> list[tuple[str, list[str]]]:
    """What a source imports, parsed once: parsing took 25 of the 200 ms to a first batch."""
    about = f"{sys.version_info[:2]} {_PARSED} {package}".encode()
    name = f"{hashlib.sha256(about + source).hexdigest()[:32]}.imports"
    for data in _kept(name):
        with contextlib.suppress(ValueError):
            return [(base, names) for base, names in json.loads(data)]
    found = list(_imports(ast.parse(source).body, package))
    _keep(name, json.dumps(found).encode())
    return found


def _imports(body: list[Any], package: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Every module that statements import from, in functions and branches too, and the names."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, [""]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, [alias.name for alias in node.names]
        for inner in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _imports(getattr(node, inner, []), package)


def _path(module: str, root: Path) -> Path | None:
    """The source of a module below `root`, if it is one."""
    first, *rest = module.split(".")
    if first == root.name and "" not in rest:
        path = root.joinpath(*rest)
        for file in (path.with_name(path.name + ".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


_hashes = functools.cache(source_hashes)


@functools.cache
def _environment() -> str:
    """All that the machine code depends on, but for its sources: compiler and processor."""
    import llvmlite.binding as llvm

    versions = {name: importlib.metadata.version(name) for name in NEWEST}
    for name, version in versions.items():
        _check_version(name, version)
    options = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    # what numba compiles for, if it is told: an image for several kinds of processors tells it
    processor = os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return " ".join(
        (
            "{}.{}".format(*sys.version_info),  # whose bytecode numba compiles
            *versions.values(),
            sys.platform,
            processor,
            features,
            repr(options),
        )
    )


def _check_version(name: str, version: str) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if found > NEWEST[name]:
        newest = "{}.{}".format(*NEWEST[name])
        raise BadConfig(
            f"{name} {version} is newer than penstock knows",
            where=sys.prefix,
            why=f"kernels are tested with {name} up to {newest}; with a later one they could read "
            "memory wrongly",
            do=f"pip install '{name}=={newest}.*', or a newer penstock",
        )


_engines: list[Any] = []  # machine code lives as long as its engine


def _link(symbol: str, code: bytes) -> int:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    address: int = engine.get_function_address(symbol)
    if not address:
        raise RuntimeError(f"no {symbol} in its object file")
    return address
