"""Threads that move files, and that nobody has to wait for.

In:    functions to call
Out:   a future for each
Keeps: at most so many threads; what was begun when an error comes is waited for, so that a next run
       meets no thread of the last
Never: holds up an interrupt: a store that does not answer keeps a thread for a minute, and the
       threads of the standard library's executors are joined when the process ends
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """Daemon threads with one queue."""

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def submit(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> "Future[T]":
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            self._jobs.put((future, lambda: call(*args, **options)))
            if len(self._threads) < self._size:
                name = f"{self._name}-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
            del job, future, call  # a thread that waits holds no range in memory

    def close(self, *, wait: bool) -> None:
        """Drop what has not begun; `wait` for what has."""
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    if (job := self._jobs.get_nowait()) is not None:
                        job[0].cancel()
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads if wait else []:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.close(wait=kind is None or issubclass(kind, Exception))
