"""Push and pull of a dataset beside `aws s3 sync` and s3fs, against S3 servers on loopback.

scripts/rivals aws s3fs
python benchmarks/bench_sync.py [--gb 2] [--rounds 5] [--server light] [--server seaweedfs]

Each transfer is a process of its own, with its start, and a fresh server. penstock hashes every
file at both ends and keeps the order of the log; the others copy. It syncs what it pulls to disk
before it names it, the others leave that to the kernel: "on disk" is the time of a pull until all
its files are synced, for all three. The files that came are compared with those that went.

Every tool has its defaults: penstock 8 connections, aws 10, s3fs up to 10 in one thread. The page
cache is warm for all: the source was read just before a push, and what a pull reads was written
just before it. Dirty pages are synced before the clock starts. Contenders take turns in a rotating
order; the median of the rounds counts. Seconds of CPU are the client's, and the server's own.
"""

import argparse
import hashlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import DATA, HERE, keep, run, table

sys.path.insert(0, str(HERE.parent / "tests"))

import psutil

from penstock.store.log import Log, LogWriter
from penstock.store.record import Add, Progress, Seal, record_name
from penstock.store.store import open_store
from services import servers

SHARD_BYTES = 48 << 20
LATENCY_SHARDS = 30
NAMES = ("penstock", "aws s3 sync", "s3fs")
SERVERS = ("light", "seaweedfs", "moto")
RIVALS = HERE.parent / ".venv-rivals"
S3FS = """
import sys, s3fs
way, source, target, endpoint = sys.argv[1:]
files = s3fs.S3FileSystem(endpoint_url=endpoint, key="{key}", secret="{secret}")
(files.put if way == "push" else files.get)(source, target, recursive=True)
"""


class Producer:
    """Writes shards of random bytes, as a producer writes parquet."""

    def __init__(self, folder: Path) -> None:
        self.log = LogWriter.take(open_store(folder, make=True), {}, ["made"], writer="bench")
        self._dice = random.Random(7)

    def add(self, size: int) -> None:
        number = len(self.log.state.files)
        data = self._dice.randbytes(size)

        def write(file: Any) -> None:
            file.write(data)

        stored = self.log.store.put(f"shard_{number:05d}.parquet", write)
        progress = Progress(input="made", start=number, to=number + 1, read=1, kept=1, dropped={})
        add = Add(stored.name, stored.sha256, stored.size, 1, None, "train")
        self.log.commit([add, progress])

    def seal(self) -> None:
        files = self.log.state.split("train")
        total = sum(file.bytes for file in files)
        self.log.commit([Seal(len(files), len(files), total, self.log.state.head)])


def make_dataset(folder: Path, size: int) -> Path:
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        producer = Producer(folder / "data")
        for _ in range(max(1, size // SHARD_BYTES)):
            producer.add(SHARD_BYTES)
        producer.seal()
        (folder / "done").touch()
    return folder / "data"


def commands(name: str, way: str, source: str, target: str, endpoint: str) -> list[str]:
    if name == "penstock":
        return [sys.executable, "-m", "penstock.cli", way, source, target]
    if name == "aws s3 sync":
        aws = str(RIVALS / "aws" / "bin" / "aws")
        return [aws, "--endpoint-url", endpoint, "s3", "sync", "--quiet", source, target]
    python = str(RIVALS / "s3fs" / "bin" / "python")
    code = S3FS.format(
        key=os.environ["AWS_ACCESS_KEY_ID"], secret=os.environ["AWS_SECRET_ACCESS_KEY"]
    )
    # a directory's contents, not the directory
    ends = (source + "/", target + "/")
    return [python, "-c", code, way, *ends, endpoint]


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("*.parquet")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def latency(work: Path, url: str) -> list[float]:
    """Seconds from a shard's commit here until a reader of the bucket has its record and bytes."""
    folder = work / "live"
    shutil.rmtree(folder, ignore_errors=True)
    producer = Producer(folder)
    pushing = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", "push", str(folder), url],
        stdout=subprocess.DEVNULL,
    )
    committed: dict[int, float] = {}
    readable: dict[int, float] = {}
    over = threading.Event()

    def read() -> None:
        bucket = open_store(url)
        log = Log(bucket)
        while not over.is_set():
            known = log.state.n
            if log.refresh():
                for n in range(known + 1, log.state.n + 1):
                    for op in log.record(n).ops:
                        if isinstance(op, Add):
                            assert len(bucket.read(op.name)) == op.bytes
                    readable[n] = time.monotonic()
            time.sleep(0.01)

    while open_store(url).size(record_name(0)) is None:
        time.sleep(0.05)
    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(LATENCY_SHARDS):
        time.sleep(0.3)
        producer.add(4 << 20)
        committed[producer.log.state.n] = time.monotonic()
    deadline = time.monotonic() + 30
    while not committed.keys() <= readable.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
    producer.seal()
    try:
        pushing.wait(60)
    finally:
        pushing.kill()
        over.set()
        reader.join()
    return [readable[n] - committed[n] for n in committed]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One push or pull of one contender."""

    wall_s: float
    synced_s: float
    """Until every file that was pulled is on disk too."""
    cpu_s: float
    server_cpu_s: float
    peak_mb: float


def server_cpu_s(server: servers.Server) -> float:
    leash = psutil.Process(server.process.pid)
    times = [process.cpu_times() for process in leash.children(recursive=True)]
    return sum(one.user + one.system for one in times)


def transfer(command: list[str], server: servers.Server, into: Path) -> Transfer:
    os.sync()
    before = server_cpu_s(server)
    one = run(command)
    began = time.perf_counter()
    for path in into.glob("*.parquet"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    synced_s = one.wall_s + time.perf_counter() - began
    used = server_cpu_s(server) - before
    return Transfer(one.wall_s, synced_s, one.cpu_s, used, one.peak_mb)


def measure(
    kind: str, source: Path, rounds: int, work: Path
) -> tuple[dict[str, dict[str, list[Transfer]]], list[float]]:
    """All contenders against one server: their transfers, and the latencies of a live push."""
    expected = digests(source)
    took: dict[str, dict[str, list[Transfer]]] = {name: {"push": [], "pull": []} for name in NAMES}
    late: list[float] = []
    for number in range(rounds):
        for name in NAMES[number % 3 :] + NAMES[: number % 3]:
            for variable in [one for one in os.environ if one.startswith("AWS_")]:
                del os.environ[variable]  # a server would take them for its own
            server = getattr(servers, f"start_{kind}")()
            try:
                cloud = servers.clouds()[kind](server)
                os.environ.update(cloud.environment(server.port))
                url, back = cloud.new_url("data"), work / "back"
                shutil.rmtree(back, ignore_errors=True)
                digests(source)  # warm
                for way, start, end in (("push", str(source), url), ("pull", url, str(back))):
                    one = transfer(commands(name, way, start, end, server.url), server, back)
                    took[name][way].append(one)
                    print(f"{kind} {number} {name} {way} {one}", file=sys.stderr, flush=True)
                if digests(back) != expected:
                    sys.exit(f"{name}: what came is not what went")
                if name == "penstock" and number == 0:
                    late = latency(work, cloud.new_url("live"))
            finally:
                server.stop()
    shutil.rmtree(work / "back", ignore_errors=True)
    return took, late


def median(runs: list[Transfer], what: str) -> float:
    return float(statistics.median(getattr(one, what) for one in runs))


def show(kind: str, size: int, took: dict[str, dict[str, list[Transfer]]]) -> dict[str, Any]:
    """Print what one server's rounds have given, and how many times as fast penstock was."""
    rows = [["", "MB/s", "penstock is", "on disk MB/s", "penstock is", "CPU s", "server's CPU s",
             "peak MB"]]  # fmt: skip
    ratios: dict[str, Any] = {}
    for way in ("push", "pull"):
        for name in NAMES:
            runs, ours = took[name][way], took["penstock"][way]
            plain, synced = (median(runs, what) for what in ("wall_s", "synced_s"))
            times = (plain / median(ours, "wall_s"), synced / median(ours, "synced_s"))
            ratios.setdefault(way, {})[name] = {"as it is": times[0], "on disk": times[1]}
            on_disk = (f"{size / 1e6 / synced:,.0f}", f"{times[1]:.2f}x")
            rows.append([
                f"{way} {name}",
                f"{size / 1e6 / plain:,.0f}", f"{times[0]:.2f}x",
                *(on_disk if way == "pull" else ("", "")),
                f"{median(runs, 'cpu_s'):.1f}", f"{median(runs, 'server_cpu_s'):.1f}",
                f"{max(one.peak_mb for one in runs):,.0f}",
            ])  # fmt: skip
    rounds = len(took["penstock"]["push"])
    table(f"{size / 1e9:.2f} GB, {kind} on loopback, medians of {rounds} rounds", rows)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", action="append", choices=SERVERS)
    asked = parser.parse_args()
    work = DATA / "sync"
    source = make_dataset(work / f"source_{asked.gb:g}", int(asked.gb * 1e9))
    sizes = [path.stat().st_size for path in source.glob("*.parquet")]
    kinds = asked.server or ["light", "seaweedfs"]
    for kind in kinds:
        took, late = measure(kind, source, asked.rounds, work)
        ratios = show(kind, sum(sizes), took)
        print(f"\ncommitted here to read from the bucket: median {statistics.median(late):.3f} s, "
              f"worst {max(late):.3f} s")  # fmt: skip
        rate = {
            name: {way: sum(sizes) / 1e6 / median(runs, "wall_s") for way, runs in ways.items()}
            for name, ways in took.items()
        }
        results = {
            "bytes": sum(sizes), "shards": len(sizes), "server": kind,
            "command": f"python benchmarks/bench_sync.py --gb {asked.gb:g} "
            f"--rounds {asked.rounds} --server {kind}",
            "mb_per_s": rate, "penstock_is": ratios, "transfers": took, "latency_s": late,
        }  # fmt: skip
        keep(f"sync_{kind}", results)


if __name__ == "__main__":
    main()
