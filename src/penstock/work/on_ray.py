"""Run one task on many pieces on a Ray cluster, an existing one or one of this machine.

In:    the same task and pieces as `pool`
Out:   the same results; a piece whose node died is done again elsewhere
Keeps: plain Ray tasks, deterministic, with one committer outside of Ray
Never: keeps state in the cluster, uses Ray Data (it lost its own actors when a node was killed)
"""

import importlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Final

from penstock.errors import BadConfig
from penstock.work.pool import load_task, pack_error, run_packed, unpacked

RETRIES: Final = 8
"""How often a piece is tried again when its node or its worker is gone."""

_loaded: dict[str, Any] = {}


def _run(begin: str, header: bytes, data: bytes) -> tuple[int, bytes]:
    """On a node: the task is made once in each of its processes."""
    if begin not in _loaded:
        about = json.loads(begin)
        try:
            _loaded[begin] = load_task(about["task"], about["setup"])
        except Exception as error:
            status, parts = pack_error(error)
            return status, b"".join(parts)
    task, module = _loaded[begin]
    status, parts = run_packed(task, module, header, data)
    return status, b"".join(bytes(part) for part in parts)


class RayPool:
    """Pieces as Ray tasks."""

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
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
            # RAY_ADDRESS names an existing cluster; without it one is started here
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        # the whole cluster's, as it is now: with fewer pieces in flight its nodes would wait
        self.width = max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        self._module = importlib.import_module(name.partition(":")[0])
        self._begin = ray.put(json.dumps({"task": name, "setup": setup}))
        self._task = ray.remote(num_cpus=1, max_retries=RETRIES)(_run)

    def submit(self, header: bytes, data: bytes) -> "Future[Any]":
        reference = self._task.remote(self._begin, header, data)
        done: Future[Any] = Future()
        reference.future().add_done_callback(lambda found: self._pass_on(found, done))
        return done

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """The function of each item, side by side, in order."""
        task = self._ray.remote(num_cpus=1, max_retries=RETRIES)(function)
        found: list[Any] = self._ray.get([task.remote(item) for item in items])
        return found

    def close(self) -> None:
        if self._ours:
            self._ray.shutdown()

    def _pass_on(self, found: "Future[Any]", done: "Future[Any]") -> None:
        try:
            done.set_result(unpacked(self._module, *found.result()))
        except BaseException as error:
            done.set_exception(error)
