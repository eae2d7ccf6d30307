"""Stand between penstock and the file system: count every call, and fail at the one asked for.

In:    a folder and an input to watch, a fault and the number of the call where it strikes
Out:   the calls in order; at the call asked for: death, a pause, an errno, a power loss
Keeps: what each call does, until the fault
Never: is imported by penstock; it replaces functions of `os` in a process made for one run

A fault strikes before its call, so that "after call N" is "before call N + 1".
"""

import ctypes
import fcntl
import io
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

EXT4_IOC_SHUTDOWN: Final = 0x8004587D
DROP_THE_JOURNAL: Final = 2
"""EXT4_GOING_FLAGS_NOLOGFLUSH: what was not synced is gone."""

GROWS: Final = frozenset({"create", "write", "mkdir", "link", "fsync"})
"""Calls that a full disk refuses."""

_REPLACED: Final = (
    *("open", "close", "write", "pwrite", "read", "pread", "preadv", "fsync", "link", "unlink"),
    *("mkdir", "replace", "stat", "lstat", "fstat", "scandir", "fdopen"),
)

_real = {name: getattr(os, name) for name in (*_REPLACED, "kill")}


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the file system."""

    name: str
    path: str
    caller: str
    """The functions of penstock that lead to it, innermost first, as a<b<c."""

    def __str__(self) -> str:
        return f"{self.name} {self.path} in {self.caller}"


@dataclass(slots=True)
class Fault:
    """What goes wrong, and where."""

    kind: str = "none"
    """none, kill, torn, stop, errno, full, short, power"""
    at: int = 0
    number: int = 0
    """errno of the kinds errno and full"""
    mount: str = ""
    """what loses power"""


@dataclass(slots=True)
class Watch:
    """The patched calls of one process."""

    folder: str
    input: str
    fault: Fault
    calls: list[Call] = field(default_factory=list)
    before_call: Callable[[int, Call], None] | None = None
    disk: Any = None
    """A `disk.Disk` that is told what was done."""
    skip_fsync: Callable[[str], bool] | None = None
    before_link: Callable[[str, str], None] | None = None
    paused: bool = False
    """While set, nothing is counted: the test itself is looking."""
    _paths: dict[int, str] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _full: bool = False

    def install(self) -> None:
        """Replace the functions of `os` by counting ones."""
        for name in _REPLACED:
            setattr(os, name, getattr(self, f"_{name}"))

    def watched(self, path: Any) -> str | None:
        """`path` as text if it is ours to count."""
        if self.paused or not isinstance(path, (str, os.PathLike)):
            return None
        text = str(path)
        inside = text == self.folder or text.startswith(self.folder + "/") or text == self.input
        return text if inside else None

    def point(self, name: str, path: str) -> bool:
        """Count one call and let the fault strike if it is the one; True asks for a torn write."""
        with self._lock:
            call = Call(name, os.path.relpath(path, self.folder), _caller())
            self.calls.append(call)
            number = len(self.calls)
            if self.before_call is not None:
                self.before_call(number, call)
            fault = self.fault
            if fault.kind == "full" and number >= fault.at and name in GROWS:
                raise OSError(fault.number, os.strerror(fault.number), path)
            if number != fault.at:
                return False
        match fault.kind:
            case "kill":
                die()
            case "torn":
                if name != "write":
                    die()
                return True
            case "stop":
                _real["kill"](os.getpid(), signal.SIGSTOP)
            case "power":
                cut_power(fault.mount)
                die()
            case "errno" if name != "close":
                raise OSError(fault.number, os.strerror(fault.number), path)
        return False

    def _fails_here(self) -> bool:
        return self.fault.kind == "errno" and len(self.calls) == self.fault.at

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: Any = None) -> int:
        text = self.watched(path)
        if text is None:
            descriptor: int = _real["open"](path, flags, mode, dir_fd=dir_fd)
            return descriptor
        self.point("create" if flags & os.O_CREAT else "open", text)
        made = bool(flags & os.O_CREAT) and not _is_there(text)
        descriptor = _real["open"](path, flags, mode)
        self._paths[descriptor] = text
        if self.disk and made:
            self.disk.create(text)
        if self.disk:
            self.disk.open(descriptor, text)
        return descriptor

    def _close(self, descriptor: int) -> None:
        text = self._paths.get(descriptor)
        fails = False
        if text is not None:
            self.point("close", text)
            fails = self._fails_here()
            self._paths.pop(descriptor, None)
        _real["close"](descriptor)
        if fails:
            raise OSError(self.fault.number, os.strerror(self.fault.number), text)

    def _write(self, descriptor: int, data: Any) -> int:
        text = self._paths.get(descriptor)
        view = memoryview(data)
        if text is not None:
            if self.point("write", text):
                _real["write"](descriptor, view[: len(view) // 2])
                die()
            if self.fault.kind == "short" and len(view) > 1:
                view = view[: max(1, len(view) // 3)]
        done: int = _real["write"](descriptor, view)
        if text is not None and self.disk:
            self.disk.write(descriptor, bytes(view[:done]))
        return done

    def _pwrite(self, descriptor: int, data: Any, offset: int) -> int:
        if (text := self._paths.get(descriptor)) is not None:
            self.point("pwrite", text)
        done: int = _real["pwrite"](descriptor, data, offset)
        return done

    def _read(self, descriptor: int, size: int) -> bytes:
        if (text := self._paths.get(descriptor)) is not None:
            self.point("read", text)
        data: bytes = _real["read"](descriptor, size)
        return data

    def _pread(self, descriptor: int, size: int, offset: int) -> bytes:
        if (text := self._paths.get(descriptor)) is not None:
            self.point("pread", text)
        data: bytes = _real["pread"](descriptor, size, offset)
        return data

    def _preadv(self, descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if (text := self._paths.get(descriptor)) is not None:
            self.point("preadv", text)
        done: int = _real["preadv"](descriptor, buffers, offset, flags)
        return done

    def _fsync(self, descriptor: int) -> None:
        text = self._paths.get(descriptor)
        if text is not None:
            self.point("fsync", text)
            if self.skip_fsync is not None and self.skip_fsync(self.calls[-1].caller):
                return
        _real["fsync"](descriptor)
        if text is not None and self.disk:
            self.disk.fsync(descriptor)

    def _link(self, source: Any, target: Any, **options: Any) -> None:
        text = self.watched(target)
        if text is not None:
            self.point("link", text)
            if self.before_link is not None:
                self.before_link(str(source), text)
        _real["link"](source, target, **options)
        if text is not None and self.disk:
            self.disk.link(str(source), text)

    def _replace(self, source: Any, target: Any) -> None:
        text = self.watched(target)
        if text is not None:
            self.point("rename", text)
        _real["replace"](source, target)
        if text is not None and self.disk:
            self.disk.rename(str(source), text)

    def _unlink(self, path: Any, *, dir_fd: Any = None) -> None:
        text = self.watched(path)
        if text is not None:
            self.point("unlink", text)
        _real["unlink"](path, dir_fd=dir_fd)
        if text is not None and self.disk:
            self.disk.unlink(text)

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: Any = None) -> None:
        text = self.watched(path)
        if text is not None:
            self.point("mkdir", text)
        _real["mkdir"](path, mode, dir_fd=dir_fd)
        if text is not None and self.disk:
            self.disk.mkdir(text)

    def _stat(self, path: Any, **options: Any) -> os.stat_result:
        if (text := self.watched(path)) is not None:
            self.point("stat", text)
        found: os.stat_result = _real["stat"](path, **options)
        return found

    def _lstat(self, path: Any, **options: Any) -> os.stat_result:
        if (text := self.watched(path)) is not None:
            self.point("lstat", text)
        found: os.stat_result = _real["lstat"](path, **options)
        return found

    def _fstat(self, descriptor: int) -> os.stat_result:
        if (text := self._paths.get(descriptor)) is not None:
            self.point("fstat", text)
        found: os.stat_result = _real["fstat"](descriptor)
        return found

    def _scandir(self, path: Any = ".") -> Iterator[os.DirEntry[str]]:
        text = self.watched(path)
        if text is None:
            entries: Iterator[os.DirEntry[str]] = _real["scandir"](path)
            return entries
        self.point("opendir", text)
        return self._entries(text)

    def _entries(self, path: str) -> Iterator[os.DirEntry[str]]:
        with _real["scandir"](path) as entries:
            for entry in sorted(entries, key=lambda entry: str(entry.name)):
                self.point("getdents", path)
                yield entry

    def _fdopen(self, descriptor: int, mode: str = "r", *rest: Any, **options: Any) -> Any:
        text = self._paths.get(descriptor)
        if text is None or mode != "rb":
            return _real["fdopen"](descriptor, mode, *rest, **options)
        return io.BufferedReader(_CountedFile(self, descriptor, text))


class _CountedFile(io.FileIO):
    """What `os.fdopen` gives for a file that is watched: its reads and its close are calls too."""

    def __init__(self, watch: Watch, descriptor: int, path: str) -> None:
        self._watch = watch
        self._text = path
        super().__init__(descriptor, "rb")

    def readinto(self, buffer: Any) -> int:
        self._watch.point("read", self._text)
        return super().readinto(buffer)

    def readall(self) -> bytes:
        self._watch.point("read", self._text)
        return super().readall()

    def close(self) -> None:
        if self.closed:
            return
        descriptor = self.fileno()
        try:
            self._watch.point("close", self._text)
        finally:
            self._watch._paths.pop(descriptor, None)
            super().close()
        if self._watch._fails_here():
            number = self._watch.fault.number
            raise OSError(number, os.strerror(number), self._text)


def _is_there(path: str) -> bool:
    try:
        _real["lstat"](path)
    except FileNotFoundError:
        return False
    return True


def die() -> NoReturn:
    """Be killed, as by the kernel: nothing is flushed, no handler runs."""
    _real["kill"](os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def cut_power(mount: str) -> None:
    """Drop all that is not on the platter of the ext4 file system mounted at `mount`."""
    descriptor = _real["open"](mount, os.O_RDONLY)
    fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", DROP_THE_JOURNAL))
    _real["close"](descriptor)


_PACKAGE = f"{os.sep}penstock{os.sep}"


def _caller() -> str:
    frame = sys._getframe(2)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        code = frame.f_code
        if _PACKAGE in code.co_filename and Path(code.co_filename).parent.name != "flow":
            name = code.co_name
            if name not in ("explained", "__exit__"):
                found.append(name)
        frame = frame.f_back  # type: ignore[assignment]
    return "<".join(found)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that made it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def let_anyone_trace() -> None:
    """Let strace attach although it did not start this process, where Yama forbids that."""
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, any
