"""Push and pull of a dataset beside `aws s3 sync` and s3fs, against one S3 server on loopback.

scripts/rivals aws s3fs
python benchmarks/bench_sync.py [--gb 2] [--rounds 2] [--server seaweedfs]

Each transfer is a process of its own, with its start. penstock hashes every file at both ends and
keeps the order of the log; the others copy. The files that came are compared with those that went.
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
from pathlib import Path
from typing import Any

from measure import DATA, HERE, keep, run, table

sys.path.insert(0, str(HERE.parent / "tests"))

from penstock.store.backends import open_store
from penstock.store.log import Log, LogWriter
from penstock.store.record import Add, Progress, Seal, record_name
from services import servers

SHARD_BYTES = 48 << 20
LATENCY_SHARDS = 30
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
    pushing.wait(60)
    over.set()
    reader.join()
    return [readable[n] - committed[n] for n in committed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--server", default="seaweedfs", choices=["seaweedfs", "moto"])
    asked = parser.parse_args()
    work = DATA / "sync"
    source = make_dataset(work / f"source_{asked.gb:g}", int(asked.gb * 1e9))
    expected = digests(source)
    size = sum(path.stat().st_size for path in source.glob("*.parquet"))
    names = ["penstock", "aws s3 sync", "s3fs"]
    took: dict[str, dict[str, list[float]]] = {name: {"push": [], "pull": []} for name in names}
    memory: dict[str, float] = dict.fromkeys(names, 0.0)
    cpu: dict[str, dict[str, float]] = {name: {} for name in names}
    late: list[float] = []
    for number in range(asked.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            for variable in [one for one in os.environ if one.startswith("AWS_")]:
                del os.environ[variable]  # a server would take them for its own
            server = getattr(servers, f"start_{asked.server}")()
            try:
                cloud = servers.clouds()[asked.server](server)
                os.environ.update(cloud.environment(server.port))
                url, back = cloud.new_url("data"), work / "back"
                shutil.rmtree(back, ignore_errors=True)
                for way, ends in (("push", (str(source), url)), ("pull", (url, str(back)))):
                    one = run(commands(name, way, *ends, server.url))
                    took[name][way].append(one.wall_s)
                    cpu[name][way] = one.cpu_s
                    memory[name] = max(memory[name], one.peak_mb)
                if digests(back) != expected:
                    sys.exit(f"{name}: what came is not what went")
                if name == "penstock" and number == 0:
                    late = latency(work, cloud.new_url("live"))
            finally:
                server.stop()
    shutil.rmtree(work / "back", ignore_errors=True)
    rate = {
        name: {way: size / 1e6 / min(seconds) for way, seconds in ways.items()}
        for name, ways in took.items()
    }
    rows = [["", "push MB/s", "pull MB/s", "CPU s push", "CPU s pull", "peak MB"]]
    for name in names:
        rows.append([
            name, f"{rate[name]['push']:,.0f}", f"{rate[name]['pull']:,.0f}",
            f"{cpu[name]['push']:.1f}", f"{cpu[name]['pull']:.1f}", f"{memory[name]:,.0f}",
        ])  # fmt: skip
    table(f"{size / 1e9:.2f} GB in {len(expected)} shards, {asked.server} on loopback", rows)
    median, worst = statistics.median(late), max(late)
    print(f"\ncommitted here to read from the bucket: median {median:.3f} s, worst {worst:.3f} s")
    keep(
        "sync",
        {
            "bytes": size, "shards": len(expected), "server": asked.server, "mb_per_s": rate,
            "seconds": took, "cpu_s": cpu, "peak_mb": memory, "latency_s": late,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
