"""Run compiled kernels without waiting for the compiler.

In:    a numba function by name, its signature
Out:   the same function as native code, called through ctypes: the GIL is released while it runs
Keeps: one object file for each kernel, keyed by its sources, versions and processor
Never: imports numba when the object file is there

Importing numba and preparing its first call took 1.6 s of every command here; loading an object
file takes 0.1 s, most of it for llvmlite. Kernels are compiled at set-up (`scripts/warm.py`), or at
the first use, once, into the package's __pycache__ or, where that is read-only, ~/.cache/penstock.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import mmap
import operator
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.disk import is_private, open_own, replacing

PAD = 64
"""Bytes of slack that every buffer handed to a kernel has after its last valid byte."""

_SCALARS = {
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float64": ctypes.c_double,
}
_BOUNDS = {"int64": (-(1 << 63), (1 << 63) - 1), "uint64": (0, (1 << 64) - 1)}
_ARRAY = re.compile(r"(\w+)\[::1\]")
_loading = threading.Lock()
known: "list[Kernel]" = []
"""Every kernel of the modules imported so far."""


def byte_buffer(size: int) -> npt.NDArray[np.uint8]:
    """A uint8 array of `size` and PAD bytes, on huge pages where the system has them.

    Memory is taken as it is touched. Touching 256 MB costs 0.21 s in pages of 4 KB on a virtual
    machine, more than parsing the text that goes there, and 0.02 s in huge ones, once the machine
    has them. It must be private: shared memory has huge pages on few systems.
    """
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size + PAD, flags=private) if private else mmap.mmap(-1, size + PAD)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class Kernel:
    """A function of `module`, compiled for one signature such as "int64(uint8[::1], int64)".

    Arrays are one-dimensional and contiguous. The result is one of int64, uint64, float64, void.
    """

    def __init__(self, module: str, name: str, signature: str) -> None:
        self.name = name
        self.signature = signature
        self._module = module
        result, _, arguments = signature.rstrip(")").partition("(")
        self._result: Any = None if result == "void" else _SCALARS[result]
        self._arguments = [text.strip() for text in arguments.split(",")]
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
        # numba's own calling convention: where to put the result, where to put an exception, then
        # the arguments; an array is owner, parent, items, item size, data, shape, stride
        out, fault = ctypes.c_uint64(), ctypes.c_void_p()
        flat: list[Any] = [ctypes.byref(out), ctypes.byref(fault)]
        for value, dtype, bounds in zip(arguments, self._dtypes, self._bounds, strict=True):
            if dtype is None:
                if bounds is None:
                    flat.append(float(value))
                    continue
                number = operator.index(value)
                if not bounds[0] <= number <= bounds[1]:  # ctypes would cut it to 64 bits
                    raise OverflowError(f"kernel {self.name}: {number} is not in 64 bits")
                flat.append(number)
                continue
            # no asserts: under python -O the kernel would read what lies beyond the array
            if value.dtype != dtype or not value.flags.c_contiguous:
                raise self._refused(value, dtype)
            address = value.__array_interface__["data"][0]
            flat += (None, None, value.size, dtype.itemsize, address, value.size, dtype.itemsize)
        status = function(*flat)
        if status:
            raise RuntimeError(f"kernel {self.name} failed with status {status}")
        return self._result and self._result.from_buffer(out).value

    def _refused(self, value: npt.NDArray[Any], dtype: np.dtype[Any]) -> TypeError:
        laid = "contiguous" if value.flags.c_contiguous else "with gaps"
        return TypeError(
            f"kernel {self.name} takes a contiguous array of {dtype}, and got one of "
            f"{value.dtype}, {laid}"
        )

    def _load(self) -> Any:
        with _loading:
            if self._function is None:
                # before it is compiled: a source that is edited meanwhile has another name
                name = self._file_name()
                symbol, code = self._read(name) or self._compile(name)
                self._function = self._prototype()(_link(symbol, code))
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

    def _read(self, name: str) -> tuple[str, bytes] | None:
        ours, cache = _folders()
        for folder in (ours, cache):
            try:
                with open(open_own(folder / name, make=False, write=False), "rb") as file:
                    # it is machine code: in the cache we run what this user alone may write, in
                    # the package what stands beside its sources
                    if folder == cache and not is_private(os.fstat(file.fileno())):
                        continue
                    data = file.read()
            except OSError:
                continue
            digest, _, body = data.partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() == digest:
                symbol, _, code = body.partition(b"\n")
                return symbol.decode(), code
        return None

    def _compile(self, name: str) -> tuple[str, bytes]:
        from numba import njit

        function = getattr(importlib.import_module(self._module), self.name)
        compiled = njit(
            self.signature,
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
        self._write(name, symbol.encode() + b"\n" + code)
        return symbol, code

    def _write(self, name: str, body: bytes) -> None:
        for folder in _folders():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with replacing(folder / name, mode=0o644) as file:
                    file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            except OSError:
                continue  # read-only: the next folder, or compile again next time
            return

    def _file_name(self) -> str:
        sources = " ".join(_source_hashes(self._module, {}).values())
        about = f"{_environment()} {sources} {self.name} {self.signature}"
        return f"{self.name}-{hashlib.sha256(about.encode()).hexdigest()[:16]}.kernel"


def _folders() -> tuple[Path, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return Path(__file__).parent / "__pycache__", cache / "penstock"


def _source_hashes(module: str, found: dict[str, str]) -> dict[str, str]:
    """Hashes of a module and of all modules of ours that it imports from."""
    if module not in found:
        path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
        text = path.read_bytes()
        found[module] = hashlib.sha256(text).hexdigest()
        for imported in re.findall(rb"^from (penstock\.[\w.]+) import", text, re.MULTILINE):
            _source_hashes(imported.decode(), found)
    return found


@functools.cache
def _environment() -> str:
    """All that the machine code depends on, but for its sources: compiler and processor."""
    import llvmlite.binding as llvm

    options = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_"))
    return " ".join(
        (
            "{}.{}".format(*sys.version_info),  # whose bytecode numba compiles
            importlib.metadata.version("numba"),
            importlib.metadata.version("llvmlite"),
            sys.platform,
            llvm.get_host_cpu_name(),
            llvm.get_host_cpu_features().flatten(),
            repr(options),
        )
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
