"""Batches from one process to another: the queue, files of torch.save, a multiprocessing queue.

    python benchmarks/bench_queue.py [--mb 0.25 1 4 16] [--seconds 4] [--rounds 3] [--keep]

Each contender is a producer and a consumer, two processes; the producer has its arrays ready and
hands out the same ones again and again, the consumer adds up a number of each batch. What is
measured is batches a second at the consumer, from its tenth batch on.

penstock       files of batches, checksums made and compared, the state released (and the floor
               synced) every 32 batches; `batches_per_file` makes files of about 4 MB. They are
               not synced: batches can be made again, and are after a power cut
penstock sync  the same with `repeatable = False`: files are synced before they appear
torch files    document 002's way: torch.save beside the target, rename, torch.load, remove; the
               producer waits while 16 files are there. Nothing is synced
torch synced   the same, with each file and its folder synced before its name appears
mp.Queue       arrays through a multiprocessing.Queue of 16
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import keep, table

BACKLOG = 16
SKIPPED = 10
WIDTH = 1024
FILE_MB = 4


def arrays(mb: float) -> dict[str, Any]:
    """x and y of so many MB together, 8 bytes a token."""
    rows = max(1, int(mb * 2**20 / 2 / 8 / WIDTH))
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 50_000, (rows, WIDTH)) for name in "xy"}


def counted(take: Callable[[], Any], seconds: float, pipe: Any) -> None:
    """Take batches for a while; tell how many a second it were."""
    total = 0
    for _ in range(SKIPPED):
        total += int(take()["x"][0, 0])
    began = time.perf_counter()
    batches = 0
    while (spent := time.perf_counter() - began) < seconds:
        total += int(take()["x"][0, 0])
        batches += 1
    pipe.send((batches / spent, total))


# penstock


def settings(folder: str, mb: float) -> Any:
    from penstock import SharedConfig

    rows = len(arrays(mb)["x"])
    return SharedConfig(
        {
            "dataset": "bench", "batch_size": rows, "block_size": WIDTH,
            "backlog_batches": BACKLOG, "batches_per_file": max(1, int(FILE_MB / mb)),
        },
        root=Path(folder),
    )  # fmt: skip


def penstock_producer(folder: str, mb: float, pipe: Any, *, repeatable: bool = True) -> None:
    from penstock import DataProviderBase

    ready = arrays(mb)

    class Ready(DataProviderBase):
        def build_meta(self) -> dict[str, Any]:
            fields = [{"name": name, "dtype": "int64", "shape": [WIDTH]} for name in "xy"]
            return {"batch_schema": fields}

        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            if split == "val":
                raise StopIteration
            return ready

    Ready.repeatable = repeatable
    Ready(settings(folder, mb)).run()


def synced_producer(folder: str, mb: float, pipe: Any) -> None:
    penstock_producer(folder, mb, pipe, repeatable=False)


def penstock_consumer(folder: str, mb: float, seconds: float, pipe: Any) -> None:
    from penstock import ConsumerConfig, DatasetConsumer

    config = settings(folder, mb)
    while not (config.folder / "queue" / "meta.json").exists():
        time.sleep(0.01)
    consumer = DatasetConsumer(config.folder, ConsumerConfig(delete="checkpointed"))
    taken = 0

    def take() -> Any:
        nonlocal taken
        x, y = consumer.get_batch("train")
        taken += 1
        if taken % 32 == 0:
            consumer.release(consumer.state_dict())
        return {"x": x, "y": y}

    counted(take, seconds, pipe)


# Files of torch


def torch_producer(folder: str, mb: float, pipe: Any, *, synced: bool) -> None:
    import torch

    torch.set_num_threads(1)
    tensors = {name: torch.from_numpy(array) for name, array in arrays(mb).items()}
    number = 0
    while True:
        while len(os.listdir(folder)) >= BACKLOG:
            time.sleep(0.0005)
        path = os.path.join(folder, f"{number:08d}.pt")
        with open(path + "-new", "wb") as file:
            torch.save(tensors, file)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(path + "-new", path)
        if synced:
            descriptor = os.open(folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        number += 1


def torch_consumer(folder: str, mb: float, seconds: float, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    number = 0

    def take() -> Any:
        nonlocal number
        path = os.path.join(folder, f"{number:08d}.pt")
        while not os.path.exists(path):
            time.sleep(0.0005)
        found = torch.load(path, weights_only=True)
        os.remove(path)
        number += 1
        return found

    counted(take, seconds, pipe)


def plain_torch_producer(folder: str, mb: float, pipe: Any) -> None:
    torch_producer(folder, mb, pipe, synced=False)


def synced_torch_producer(folder: str, mb: float, pipe: Any) -> None:
    torch_producer(folder, mb, pipe, synced=True)


# A queue of processes


def mp_producer(queue: Any, mb: float, pipe: Any) -> None:
    ready = arrays(mb)
    while True:
        queue.put(ready)


def mp_consumer(queue: Any, mb: float, seconds: float, pipe: Any) -> None:
    counted(queue.get, seconds, pipe)


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "penstock": (penstock_producer, penstock_consumer),
    "penstock sync": (synced_producer, penstock_consumer),
    "torch files": (plain_torch_producer, torch_consumer),
    "torch synced": (synced_torch_producer, torch_consumer),
    "mp.Queue": (mp_producer, mp_consumer),
}


def measure(name: str, place: str, mb: float, seconds: float) -> float:
    """Batches a second of one contender."""
    spawn = multiprocessing.get_context("spawn")
    folder = tempfile.mkdtemp(prefix="bench-queue-", dir=place or None)
    between: Any = spawn.Queue(BACKLOG) if name == "mp.Queue" else folder
    mine, theirs = spawn.Pipe(duplex=False)
    produce, consume = WAYS[name]
    producer = spawn.Process(target=produce, args=(between, mb, theirs), daemon=True)
    consumer = spawn.Process(target=consume, args=(between, mb, seconds, theirs), daemon=True)
    watcher = threading.Thread(target=consumer.start)
    producer.start()
    watcher.start()
    watcher.join()
    try:
        while not mine.poll(0.2):
            if not (producer.is_alive() and consumer.is_alive()):
                raise SystemExit(f"{name} failed at {mb} MB")
        rate: float = mine.recv()[0]
    finally:
        for process in (consumer, producer):
            process.kill()
            process.join()
        shutil.rmtree(folder)
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, nargs="+", default=[0.25, 1.0, 4.0, 16.0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=".", help="a folder on a disk")
    parser.add_argument("--keep", action="store_true", help="write results/queue.json")
    args = parser.parse_args()
    load_before = os.getloadavg()
    results: dict[str, Any] = {}
    for where, place in (("tmpfs", "/dev/shm"), ("disk", args.disk)):
        rows = [["MB a batch", *WAYS, *(f"ahead of {name}" for name in [*WAYS][1:])]]
        for mb in args.mb:
            # contenders in turn, so that other work on the machine meets all of them alike
            rates: dict[str, list[float]] = {name: [] for name in WAYS}
            for _ in range(args.rounds):
                for name in WAYS:
                    rates[name].append(measure(name, place, mb, args.seconds))
            found = {name: statistics.median(rate) for name, rate in rates.items()}
            results.setdefault(where, {})[str(mb)] = {
                name: {"batches_per_s": rate, "mb_per_s": rate * mb, "all": rates[name]}
                for name, rate in found.items()
            }
            ours = found["penstock"]
            rows.append(
                [f"{mb:g}", *(f"{rate:,.0f}/s {rate * mb:,.0f} MB/s" for rate in found.values()),
                 *(f"{ours / found[name]:.2f}x" for name in [*WAYS][1:])]
            )  # fmt: skip
        table(where, rows)
    loads = {"before": load_before, "after": os.getloadavg()}
    print(f"\nload average before {load_before}, after {loads['after']}")
    if args.keep:
        keep("queue", {"seconds": args.seconds, "rounds": args.rounds, "load": loads, **results})


if __name__ == "__main__":
    main()
