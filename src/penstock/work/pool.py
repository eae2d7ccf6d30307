"""Run one task on many pieces, in processes of this machine; results come in any order.

In:    the function that makes the task, its setup as JSON; requests
Out:   a future for each request
Keeps: workers compute and nothing else, so a piece whose worker died is simply done again
Never: pickles, forks, leaves a worker behind: one ends when its driver does

The function makes the task from its setup, once in each process. A task takes a request and gives
a result. Its module knows how both become buffers and back: `pack_request` and `unpack_request`,
`pack` and `unpack`. Where a pool can keep things where they were made, its module may also have
`pack_kept` (what to keep of a result), `attach` (tells the result where that is) and `references`
(what a later request needs of it; `unpack_request` gets that beside its buffers).
"""

import contextlib
import ctypes
import importlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol

from penstock import errors
from penstock.errors import PenstockError, WorkerFailed
from penstock.kernels import byte_buffer, spare_memory

_HEAD = struct.Struct("<BQQ")
_DONE, _REFUSED, _BROKEN = range(3)
_PIPE_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1
ATTEMPTS: Final = 3
"""How often a piece is tried when its worker dies."""
_SPARE_BYTES: Final = 256 << 20
"""Memory of what was made of pieces here, kept for that of the next ones."""


Task = Callable[[Any], Any]
"""What a worker does with a request."""
OpenTask = Callable[[dict[str, Any]], Task]
"""Makes a task from its setup: a function of a module, so that its name can be sent."""


@dataclass(frozen=True, slots=True)
class Remote:
    """Something that a pool keeps where it was made."""

    reference: Any
    get: Callable[[Any], Any]

    def fetch(self) -> Any:
        """Its bytes, here."""
        return self.get(self.reference)


class Pool(Protocol):
    """Somewhere to run pieces."""

    width: int
    """Pieces that run side by side."""

    def submit(self, request: Any) -> "Future[Any]": ...
    def close(self) -> None: ...


def pack_begin(open_task: OpenTask, setup: dict[str, Any]) -> bytes:
    """What a worker elsewhere is told first."""
    about = {"module": open_task.__module__, "function": open_task.__name__, "setup": setup}
    return json.dumps(about).encode()


def load_task(begin: bytes) -> tuple[Task, Any]:
    """The task that `pack_begin` tells, ready to run, and the module that knows its results."""
    about = json.loads(begin)
    module = importlib.import_module(about["module"])
    return getattr(module, about["function"])(about["setup"]), module


def run_packed(
    task: Task, module: Any, header: bytes, data: bytes, *kept: Any
) -> tuple[int, Sequence[Any], Any]:
    """Do a piece and pack its result or its error; and what is to be kept here, if anything is."""
    try:
        result = task(module.unpack_request(header, data, *kept))
        keep = module.pack_kept(result) if hasattr(module, "pack_kept") else None
        return _DONE, module.pack(result), keep
    except Exception as error:
        return *pack_error(error), None


def pack_error(error: Exception) -> tuple[int, Sequence[Any]]:
    """An error as an answer."""
    if isinstance(error, PenstockError):
        about = {"kind": type(error).__name__, "what": error.what, "where": error.where,
                 "why": error.why, "do": error.do}  # fmt: skip
        return _REFUSED, [json.dumps(about).encode()]
    return _BROKEN, ["".join(traceback.format_exception(error)).encode("utf-8", "replace")]


def unpacked(module: Any, status: int, payload: Any) -> Any:
    """The result, or the error that the worker met."""
    if status == _DONE:
        return module.unpack(payload)
    said = bytes(payload).decode()
    if status == _REFUSED:
        about = json.loads(said)
        kind = getattr(errors, about.pop("kind"), PenstockError)
        raise kind(about.pop("what"), **about)
    raise _broken(said)


def _broken(said: str) -> WorkerFailed:
    return WorkerFailed(
        "a worker failed",
        why=said.strip().rpartition("\n")[2],
        where=said.strip(),
        do="this is a fault of penstock or of a plugin: report it with the lines above",
    )


class HerePool:
    """One thread of this process: nothing is copied, and memory of results is used again."""

    width = 1

    def __init__(self, open_task: OpenTask, setup: dict[str, Any]) -> None:
        self._task = open_task(setup)
        self._spare = contextlib.ExitStack()
        self._spare.enter_context(spare_memory(_SPARE_BYTES))
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="penstock-work")

    def submit(self, request: Any) -> "Future[Any]":
        return self._threads.submit(self._run, request)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._spare.close()

    def _run(self, request: Any) -> Any:
        try:
            return self._task(request)
        except (PenstockError, OSError):  # a disk that fails is no fault of penstock
            raise
        except Exception as error:  # the same as from a process
            raise _broken("".join(traceback.format_exception(error))) from error


class LocalPool:
    """Processes of this machine, each driven by a thread of this one."""

    def __init__(self, open_task: OpenTask, setup: dict[str, Any], workers: int) -> None:
        self.width = workers
        self._module: Any = importlib.import_module(open_task.__module__)
        begin = pack_begin(open_task, setup)
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(begin) for _ in range(workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="penstock-work")

    def submit(self, request: Any) -> "Future[Any]":
        return self._threads.submit(self._run, *self._module.pack_request(request))

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _run(self, header: bytes, data: bytes) -> Any:
        worker = self._idle.get()
        try:
            for _ in range(ATTEMPTS):
                answer = worker.ask(header, data)
                if answer is not None:
                    return unpacked(self._module, *answer)
                worker.start()
            raise WorkerFailed(
                f"a worker died {ATTEMPTS} times over the same piece",
                where=header.partition(b"\n")[0][:200].decode("utf-8", "backslashreplace"),
                why=f"its exit code was {worker.code}; -9 is often the system short of memory",
                do="give it more memory or fewer --workers, and run the same command again",
            )
        finally:
            self._idle.put(worker)


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self, begin: bytes) -> None:
        self._begin = begin
        self._ended = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        self.start()

    def start(self) -> None:
        """Begin, or begin again after a death."""
        self.close()
        with self._lock:  # else one could begin while the pool ends, and be left behind
            if self._ended:
                raise _Ended
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.work.pool", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is for the driver; workers end with their pipes
            )
        for pipe in (process.stdin, process.stdout):
            _widen(pipe)
        with contextlib.suppress(BrokenPipeError):
            _send(process.stdin, 0, self._begin, [])

    def ask(self, header: bytes, data: bytes) -> tuple[int, Any] | None:
        """Send a piece and wait for its result; None if the worker died."""
        process = self._process
        assert process is not None
        try:
            _send(process.stdin, 0, header, [data])
            status, _, payload = _receive(process.stdout)
        except (OSError, EOFError):
            self.code = process.wait()
            if self._ended:
                raise _Ended from None
            return None
        return status, payload

    def end(self) -> None:
        """Kill it. Its pipes stay until nobody reads from them."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        """Let go of the pipes."""
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()


class _Ended(Exception):
    """The pool was closed."""


def _widen(pipe: Any) -> None:
    with contextlib.suppress(OSError, AttributeError):
        import fcntl

        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # 64 KB by default: half the speed


def _send(pipe: Any, status: int, header: bytes, parts: Sequence[Any]) -> None:
    views = [memoryview(part).cast("B") for part in parts]
    _write(pipe, _HEAD.pack(status, len(header), sum(len(view) for view in views)) + header)
    for view in views:
        _write(pipe, view)


def _write(pipe: Any, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


def _receive(pipe: Any) -> tuple[int, bytes, memoryview]:
    status, header_size, size = _HEAD.unpack(_read(pipe, _HEAD.size))
    return status, bytes(_read(pipe, header_size)), _read(pipe, size)


def _read(pipe: Any, size: int) -> memoryview:
    # a mapping: once freed it returns to the system, where the heap would keep it
    data = byte_buffer(size).data[:size] if size > 1 << 20 else memoryview(bytearray(size))
    view = data
    while view:
        got = pipe.readinto(view)
        if not got:
            raise EOFError
        view = view[got:]
    return data


def main(read: IO[bytes], write: IO[bytes], driver: int) -> None:
    """A worker's life: the task, then pieces until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_driver(driver)
    with contextlib.suppress(EOFError, BrokenPipeError):
        _, begin, _ = _receive(read)
        failed: tuple[int, Sequence[Any]] | None = None
        try:
            task, module = load_task(begin)
        except Exception as error:  # told when it is asked for something
            failed = pack_error(error)
        while True:
            _, header, data = _receive(read)
            if failed is None:
                status, parts, _ = run_packed(task, module, header, bytes(data))
            else:
                status, parts = failed
            _send(write, status, b"", parts)
            del parts  # not until the next one is done


def _end_with_driver(driver: int) -> None:
    """The pipe's end is seen between two pieces only, and a piece may take minutes.

    Linux kills the worker itself, also while a call holds the interpreter's lock; elsewhere a
    thread looks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == driver:
            time.sleep(0.2)
        os._exit(1)

    if os.getppid() != driver:  # it was killed before the system was asked
        os._exit(1)
    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    # what a plugin prints must not get between the answers
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    main(os.fdopen(0, "rb", buffering=0), answers, int(sys.argv[1]))
