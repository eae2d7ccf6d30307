"""One run that bench_scale.py measures, in a process of its own: it is the committing process.

    python benchmarks/scale_job.py '{"inputs": […], "out": …, "workers": 2, "engine": "local", …}'

It prints one line of JSON: CPU-seconds of this process and of all others that worked for it, wall
time, and bytes: `received` from workers, `sent` to them, `stored` by this process, and what the
system counts of its reading and writing. It runs on trees of penstock before and after workers made
shards: both have these functions.
"""

import importlib
import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.steps import make_steps
from penstock.produce.dataset import prepare_dataset
from penstock.produce.writer import ShardConfig
from penstock.store.local import LocalStore
from penstock.work import pool, run
from penstock.work.events import Events
from penstock.work.run import RunConfig

Answer = dict[str, Any]
counted: Counter[str] = Counter()


def count_bytes() -> None:
    """Count what goes to workers, comes from them, and is stored by this process."""
    holders: list[Any] = [pool, run]  # both have it by name
    for holder in holders:
        real = holder.unpacked

        def unpacked(module: Any, status: int, payload: Any, real: Any = real) -> Any:
            counted["received"] += memoryview(payload).nbytes
            return real(module, status, payload)

        holder.unpacked = unpacked
    for name in ("penstock.prepare.task", "penstock.produce.gather"):
        try:
            module: Any = importlib.import_module(name)
        except ImportError:
            continue
        packed = module.pack_request

        def pack_request(request: Any, packed: Any = packed) -> Any:
            header, data = packed(request)
            counted["sent"] += len(header) + len(data)
            return header, data

        module.pack_request = pack_request
    put = LocalStore.put

    def counting(self: LocalStore, name: str, write: Any) -> Any:
        stored = put(self, name, write)
        counted["stored"] += stored.size
        return stored

    LocalStore.put = counting  # type: ignore[method-assign]


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def system_bytes() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


class Others:
    """CPU time of the processes below this one, also of those that end."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], float] = {}

    def look(self) -> float:
        for process in psutil.Process().children(recursive=True):
            try:
                key, times = (process.pid, process.create_time()), process.cpu_times()
            except psutil.Error:
                continue
            self._known[key] = times.user + times.system
        return sum(self._known.values())


def main(about: Answer) -> None:
    count_bytes()
    others = Others()
    ray: Any = None
    if about["engine"] == "ray":
        import ray

        ray.init(
            address="local", num_cpus=about["workers"], include_dashboard=False,
            log_to_driver=False, object_store_memory=1 << 30,
        )  # fmt: skip
    before, idle_s = own_cpu_s(), others.look()
    io_before, began = system_bytes(), time.perf_counter()
    events = Events("chunk")
    outcome = prepare_dataset(
        about["inputs"], about["out"],
        make_steps(dedup=about["dedup"], chunk=ChunkConfig(max_tokens=1024)),
        ShardConfig(),
        RunConfig(workers=about["workers"], engine=about["engine"]),
        tokenizer=about["tokenizer"], tokens=True, events=events,
    )  # fmt: skip
    wall_s, own = time.perf_counter() - began, own_cpu_s()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    others_s = used.ru_utime + used.ru_stime
    if ray is not None:
        others_s = others.look() - idle_s
    io = system_bytes()
    answer = {
        "sealed": outcome.sealed,
        "committer_cpu_s": own - before,
        "import_cpu_s": before,
        "workers_cpu_s": others_s,
        "wall_s": wall_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "documents": sum(known.read for known in outcome.state.inputs.values()),
        "kept": sum(known.kept for known in outcome.state.inputs.values()),
        "rows": sum(file.rows for file in outcome.state.split("train")),
        "received": counted["received"],
        "sent": counted["sent"],
        "stored": counted["stored"],
        "read_calls_bytes": io["rchar"] - io_before["rchar"],
        "write_calls_bytes": io["wchar"] - io_before["wchar"],
    }
    if ray is not None:
        ray.shutdown()
    print(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # Ray takes a second to leave


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
