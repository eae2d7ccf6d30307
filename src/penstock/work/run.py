"""Where work runs, how much of the machine it may take, and how a signal stops it.

In:    a task and requests, as `pool` takes them
Out:   the same results from this process, from others, or from a Ray cluster, an existing one or
       one of this machine; a piece whose node died is done again elsewhere
Keeps: plain Ray tasks, deterministic, with one committer outside of Ray
Never: keeps state in the cluster, uses Ray Data (it lost its own actors when a node was killed)
"""

import contextlib
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Protocol

from penstock.errors import BadConfig
from penstock.options import check_numbers, whole
from penstock.work.pool import (
    HerePool,
    LocalPool,
    OpenTask,
    Pool,
    Remote,
    load_task,
    pack_begin,
    pack_error,
    run_packed,
    unpacked,
)

RETRIES: Final = 8
"""How often a piece is tried again when its node or its worker is gone."""

_CORE_BYTES: Final = 256 << 20
"""Memory for each core, where none is given: a worker takes 0.1 to 0.2 GB before it has text."""

_loaded: dict[bytes, Any] = {}


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where and how to run. None of it changes a byte of the dataset."""

    workers: int = field(default_factory=cores)
    """Processes that compute; 1 computes in this one."""

    engine: str = "local"
    """Where they run: local, or ray for a Ray cluster."""

    max_memory_bytes: int = field(default_factory=lambda: max(2 << 30, cores() * _CORE_BYTES))
    """Memory of all processes together."""

    max_rejects: float = 0.01
    """Share of documents that may be damaged before the run stops. What filters and dedup drop
    does not count."""

    plugins: tuple[str, ...] = ()
    """Modules to import first: they register formats, filters and processors."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        whole("--workers", self.workers, most=10_000)
        if self.workers < 1:
            raise BadConfig(f"--workers is {self.workers}", do="choose at least 1")
        if self.engine not in ("local", "ray"):
            raise BadConfig(f"--engine is {self.engine!r}", do="choose local or ray")
        if not 0 <= self.max_rejects <= 1:
            raise BadConfig(f"--max_rejects is {self.max_rejects}", do="choose a share from 0 to 1")
        if self.max_memory_bytes < 512 << 20:
            raise BadConfig(
                f"--max_memory is {self.max_memory_bytes:,} bytes", do="give at least 512MB"
            )

    @property
    def is_here(self) -> bool:
        """Whether all is computed in this process."""
        return self.workers == 1 and self.engine == "local"


def open_pool(open_task: OpenTask, setup: dict[str, Any], run: RunConfig) -> Pool:
    """Where the task runs."""
    if run.engine == "ray":
        return RayPool(open_task, setup)
    if run.is_here:
        return HerePool(open_task, setup)
    return LocalPool(open_task, setup, run.workers)


def _run(begin: bytes, header: bytes, data: bytes, *kept: Any) -> tuple[tuple[int, bytes], Any]:
    """On a node: the task is made once in each of its processes. What comes second stays there."""
    if begin not in _loaded:
        try:
            _loaded[begin] = load_task(begin)
        except Exception as error:
            status, parts = pack_error(error)
            return (status, b"".join(parts)), None
    task, module = _loaded[begin]
    status, parts, keep = run_packed(task, module, header, data, *kept)
    return (status, b"".join(bytes(part) for part in parts)), keep


class RayPool:
    """Pieces as Ray tasks."""

    def __init__(self, open_task: OpenTask, setup: dict[str, Any]) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError as error:
            raise BadConfig(
                "--engine ray needs Ray", why=str(error), do="pip install 'penstock[ray]'"
            ) from error
        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            # RAY_ADDRESS names an existing cluster; without it one is started here, and none is
            # joined whose address an earlier one has left in /tmp/ray: that took minutes to fail
            address = os.environ.get("RAY_ADDRESS") or "local"
            ray.init(address, include_dashboard=False, log_to_driver=False, configure_logging=False)
        # the whole cluster's, as it is now: with fewer pieces in flight its nodes would wait
        self.width = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._module: Any = importlib.import_module(open_task.__module__)
        self._begin = ray.put(pack_begin(open_task, setup))
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES, num_returns=2)(_run)
        self._running: dict[Future[Any], Any] = {}
        """What is waited for, with Ray's reference to it."""

    def submit(self, request: Any) -> "Future[Any]":
        needed = self._module.references(request) if hasattr(self._module, "references") else ()
        answer, kept = self._task.remote(self._begin, *self._module.pack_request(request), *needed)
        done: Future[Any] = Future()
        self._running[done] = answer
        answer.future().add_done_callback(lambda found: self._pass_on(found, kept, done))
        return done

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """The function of each item, side by side, in order."""
        task = self._ray.remote(num_cpus=1, max_retries=RETRIES)(function)
        found: list[Any] = self._ray.get([task.remote(item) for item in items])
        return found

    def close(self) -> None:
        for waiting, answer in list(self._running.items()):
            waiting.cancel()  # nobody answers it once the cluster is left
            if not self._ours:  # nor would its processors do for others what nobody waits for
                self._ray.cancel(answer)
        if self._ours:
            self._ray.shutdown()

    def _pass_on(self, found: "Future[Any]", kept: Any, done: "Future[Any]") -> None:
        self._running.pop(done, None)
        if not done.set_running_or_notify_cancel():
            return
        try:
            result = unpacked(self._module, *found.result())
            if hasattr(self._module, "attach"):
                self._module.attach(result, Remote(kept, self._ray.get))
            done.set_result(result)
        except BaseException as error:
            done.set_exception(error)


class Stop(Exception):
    """A signal asked for the end."""


class Stoppable(Protocol):
    """Work that looks now and then whether it should end."""

    stopped_by: int | None


@contextlib.contextmanager
def signals_noted(work: Stoppable) -> Iterator[None]:
    """SIGTERM and SIGINT end the work between two documents, not in the middle of something."""

    def note(number: int, frame: FrameType | None) -> None:
        work.stopped_by = number

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
