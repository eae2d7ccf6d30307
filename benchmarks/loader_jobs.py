"""What is measured of every loader, ours and the rivals', each job in a process of its own.

In:    a Loader (an adapter), a job's name, its arguments as JSON
Out:   one line of JSON
Keeps: imports of a loader apart from its work; every batch ends as int64, as a training step has it

Jobs:
  convert  source into the loader's own format
  speed    shuffled batches for at least 5 s, over as many epochs as that takes; the first epoch of
           the new process by itself; start, memory; leaves a state and the batch after it
  resume   from that state in a new process: how long, and is the next batch the same
  take     read, from a state or from the start, and note which numbered samples came
  fixed    1000 numbered samples, stop after 500, resume, read the epoch to its end
  grow     the same, but the dataset grows to 2000 samples between
"""

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

PAD = 60_001
WARM_BATCHES = 20
MEMORY_HZ = 10
LEAST_S = 5.0
SAMPLES, STOP = 1000, 500
GROW_BATCH, GROW_LEN = 10, 64
JOB_LIMIT_S = 240
MOST_S = 60
"""To reach the middle of an epoch; what is slower is stopped before it."""

Answer = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is asked of a loader."""

    batch_size: int = 16
    seq_len: int = 2048
    workers: int = 0
    seed: int = 7
    rank: int = 0
    ranks: int = 1


class Loader(ABC):
    """One contender: how to convert, iterate, save and resume, as its documentation has it."""

    environment: ClassVar[str] = "loaders"
    """Of .venv-rivals."""
    packs: ClassVar[str]
    """How documents become rows, and when."""
    shuffles: ClassVar[str]
    has_workers: ClassVar[bool] = True

    @abstractmethod
    def load(self) -> None:
        """Import all that is needed."""

    @abstractmethod
    def convert(self, source: Path, data: Path, shape: Shape) -> None:
        """Turn shards into the loader's format; where `data` exists, append to it."""

    @abstractmethod
    def batches(self, data: Path, shape: Shape, state: Any) -> Iterator[Any]:
        """One epoch, or what is left of it after `state`."""

    @abstractmethod
    def state(self) -> Any:
        """Where the reading is, after the last batch that was taken."""

    def tokens(self, batch: Any) -> Any:
        """The rows of a batch, as an array or a tensor of (batch_size, seq_len)."""
        return batch

    def numbers(self, batch: Any) -> list[int]:
        """Which numbered samples (loader_source.make_numbered) are in a batch; once per row."""
        rows = as_int64(self.tokens(batch))
        return [int(one) for row in rows for one in np.unique(row) if 0 < one < PAD - 1]


def as_int64(rows: Any) -> npt.NDArray[np.int64]:
    """As a training step needs it; a tensor is made int64 by torch, an array by NumPy."""
    if hasattr(rows, "long"):
        found: npt.NDArray[np.int64] = rows.long().numpy()
        return found
    return np.asarray(rows).astype(np.int64)


# Speed


class Peak:
    """The most memory that this process and its children held at a moment; watched by a fork that
    is made before anything is imported, so that the watching costs the watched one nothing."""

    def __init__(self) -> None:
        self._ask, asked = os.pipe()
        answered, self._answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(asked)
            os.close(answered)
            try:
                self._watch(os.getppid())
            finally:
                os._exit(0)
        self._ask, self._answer = asked, answered

    def _watch(self, root: int) -> None:
        import select

        most: dict[str, int] = {"Rss": 0, "Pss": 0, "own": 0}
        while not select.select([self._ask], [], [], 1 / MEMORY_HZ)[0]:
            now = dict.fromkeys(most, 0)
            for pid in _family(root, os.getpid()):
                try:
                    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                except OSError:
                    continue
                fields = {line.split(":")[0]: line.split() for line in rollup.splitlines()[1:]}
                kilobytes = {name: int(words[1]) for name, words in fields.items()}
                now["Rss"] += kilobytes["Rss"]
                now["Pss"] += kilobytes["Pss"]
                now["own"] += kilobytes["Pss_Anon"] + kilobytes["Pss_Shmem"]
            most = {name: max(most[name], now[name]) for name in most}
        os.write(self._answer, json.dumps(most).encode())

    def cpu_seconds(self) -> float:
        """Of this process and its children, so far; a machine that is shared tells in the wall
        clock, less so here."""
        ticks = 0
        for pid in _family(os.getpid(), self._pid):
            try:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> dict[str, float]:
        os.write(self._ask, b".")
        most = json.loads(os.read(self._answer, 4096))
        os.waitpid(self._pid, 0)
        return {
            "peak_pss_mb": most["Pss"] / 1024,
            "peak_rss_mb": most["Rss"] / 1024,
            "peak_own_mb": most["own"] / 1024,  # without files that are mapped
        }


def _family(root: int, without: int) -> list[int]:
    found, ask = [], [root]
    while ask:
        pid = ask.pop()
        if pid == without:
            continue
        found.append(pid)
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                ask += map(int, task.read_text().split())
            except OSError:
                continue
    return found


def process_start() -> float:
    """When this process began, as time.time() has it."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")


def digest(rows: npt.NDArray[np.int64]) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()[:16]


def speed(loader: Loader, args: Answer) -> Answer:
    """args: data, shape, half (batches of half an epoch), max_s, state (a path to write)."""
    shape = Shape(**args["shape"])
    if shape.workers and not loader.has_workers:
        return {"skipped": "has no workers"}
    peak = Peak()
    started, began = process_start(), time.time()
    loader.load()
    imported, imported_cpu = time.time(), peak.cpu_seconds()
    feed = loader.batches(Path(args["data"]), shape, None)
    rows = as_int64(loader.tokens(next(feed)))
    first = time.time()
    assert rows.shape == (shape.batch_size, shape.seq_len), rows.shape
    filled = [float((rows != PAD).mean())]
    for _ in range(WARM_BATCHES):
        filled.append(float((as_int64(loader.tokens(next(feed))) != PAD).mean()))
    taken = timed = WARM_BATCHES + 1
    cpu, begun = peak.cpu_seconds(), time.perf_counter()
    while timed < args["half"] and time.perf_counter() - begun < args["max_s"]:
        as_int64(loader.tokens(next(feed)))
        timed += 1
    took, used = time.perf_counter() - begun, peak.cpu_seconds() - cpu
    counted, taken = timed - taken, timed
    while taken < args["half"] and time.perf_counter() - begun < MOST_S:
        next(feed)
        taken += 1
    saving = time.perf_counter()
    state = loader.state()
    saving = time.perf_counter() - saving
    after = digest(as_int64(loader.tokens(next(feed))))
    Path(args["state"]).write_bytes(pickle.dumps({"state": state, "after": after}))
    pass_cpu = pass_s = 0.0
    passed = taken + 1
    if timed == args["half"]:  # fast enough: the other half counts too, and more epochs
        cpu, begun = peak.cpu_seconds(), time.perf_counter()
        while time.perf_counter() - begun < max(LEAST_S, args["max_s"] - took):
            batch = next(feed, None)
            if batch is None:
                if not pass_cpu:
                    pass_cpu, pass_s = peak.cpu_seconds() - imported_cpu, time.time() - imported
                elif time.perf_counter() - begun + took > LEAST_S:
                    break
                feed = loader.batches(Path(args["data"]), shape, None)
                continue
            as_int64(loader.tokens(batch))
            counted += 1
            passed += not pass_cpu
        took += time.perf_counter() - begun
        used += peak.cpu_seconds() - cpu
    memory = peak.stop()
    each = shape.batch_size * shape.seq_len
    tokens = counted * shape.batch_size * shape.seq_len
    return {
        "tokens_per_s": tokens / took,
        "tokens_per_cpu_s": tokens / used,
        "timed_s": took,
        **(
            {
                "first_pass_per_s": passed * each / pass_s,
                "first_pass_per_cpu_s": passed * each / pass_cpu,
            }
            if pass_cpu
            else {}
        ),
        "fill": float(np.mean(filled)),
        "import_s": imported - began,
        "first_batch_s": first - imported,
        "first_batch_with_imports_s": first - started,
        "save_s": saving,
        "saved_at": taken / (2 * args["half"]),
        "state_bytes": len(pickle.dumps(state)),
        **memory,
    }


def resume(loader: Loader, args: Answer) -> Answer:
    """args: data, shape, state (that `speed` wrote)."""
    shape = Shape(**args["shape"])
    started = process_start()
    loader.load()
    kept = pickle.loads(Path(args["state"]).read_bytes())
    imported = time.time()
    feed = loader.batches(Path(args["data"]), shape, kept["state"])
    rows = as_int64(loader.tokens(next(feed)))
    first = time.time()
    return {
        "resume_s": first - imported,
        "resume_with_imports_s": first - started,
        "exact": digest(rows) == kept["after"],
    }


def convert(loader: Loader, args: Answer) -> Answer:
    """args: source, data, shape."""
    loader.load()
    data, began = Path(args["data"]), time.perf_counter()
    loader.convert(Path(args["source"]), data, Shape(**args["shape"]))
    took = time.perf_counter() - began
    size = sum(path.stat().st_size for path in data.rglob("*") if path.is_file())
    return {"wall_s": took, "bytes": size}


# Which samples came


def take(loader: Loader, args: Answer) -> Answer:
    """args: data, shape, from_state and to_state (paths or None), stop (samples), limit."""
    loader.load()
    shape = Shape(**args["shape"])
    kept = Path(args["from_state"]).read_bytes() if args["from_state"] else None
    feed = loader.batches(Path(args["data"]), shape, pickle.loads(kept) if kept else None)
    seen: list[int] = []
    rows = 0
    for batch in feed:
        seen += loader.numbers(batch)
        rows += shape.batch_size
        if rows >= args["stop"]:
            break
    if args["to_state"]:
        Path(args["to_state"]).write_bytes(pickle.dumps(loader.state()))
    return {"seen": seen, "rows": rows}


def interrupted(name: str, script: Path, args: Answer, *, grows: bool) -> Answer:
    """Stop in the middle, perhaps grow, resume, read on; what was lost and what came twice."""
    from loader_source import make_numbered

    folder = Path(args["folder"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shape = {"batch_size": GROW_BATCH, "seq_len": GROW_LEN, "workers": args.get("workers", 0)}
    common = {"data": str(folder / "data"), "shape": shape}
    make_numbered(folder / "old", 1, SAMPLES + 1, GROW_LEN)
    run_job(script, name, "convert", {**common, "source": str(folder / "old")})
    state = str(folder / "state")
    began = {**common, "from_state": None, "to_state": state, "stop": STOP}
    before = run_job(script, name, "take", began)
    total = SAMPLES
    if grows:
        total = 2 * SAMPLES
        make_numbered(folder / "new", SAMPLES + 1, total + 1, GROW_LEN)
        run_job(script, name, "convert", {**common, "source": str(folder / "new")})
    try:
        rest = {**common, "from_state": state, "to_state": None, "stop": 3 * total}
        after = run_job(script, name, "take", rest)
    except JobFailed as failed:
        return {"failed": str(failed), "seen_before": len(before["seen"])}
    counts = Counter(before["seen"] + after["seen"])
    assert all(1 <= number <= total for number in counts), counts
    twice = {number: count - 1 for number, count in counts.items() if count > 1}
    missing = [number for number in range(1, total + 1) if number not in counts]
    return {
        "lost": len(missing),
        "lost_old": sum(number <= SAMPLES for number in missing),
        "lost_new": sum(number > SAMPLES for number in missing),
        "repeated": sum(twice.values()),
        "seen_before": len(before["seen"]),
        "seen_after": len(after["seen"]),
        "said": after.get("said", ""),
    }


# Running


class JobFailed(Exception):
    """A job ended with an error; its last line is the message."""


def run_job(
    script: Path, name: str, job: str, args: Answer, python: str = sys.executable
) -> Answer:
    """Run one job in a process of its own; what it printed, and what it warned of."""
    environment = {**os.environ, "PYTHONPATH": str(script.parent)}
    try:
        done = subprocess.run(
            [python, str(script), name, job, json.dumps(args)],
            capture_output=True, text=True, timeout=JOB_LIMIT_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise JobFailed(f"{name} {job}: not done after {JOB_LIMIT_S} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"job"')]
    if done.returncode != 0 or not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise JobFailed("\n".join(said[-1:]) or f"exit code {done.returncode}")
    answer: Answer = json.loads(lines[-1])
    answer["said"] = done.stderr[-2000:]
    return answer


def main(loaders: dict[str, Callable[[], Loader]], script: Path) -> None:
    """The command line of a script that has adapters."""
    name, job, given = sys.argv[1:4]
    args = json.loads(Path(given).read_text() if given.endswith(".json") else given)
    simple = {"convert": convert, "speed": speed, "resume": resume, "take": take}
    if job in ("fixed", "grow"):
        answer = interrupted(name, script, args, grows=job == "grow")
    else:
        answer = simple[job](loaders[name](), args)
    print("\n" + json.dumps({"job": job, "rival": name, **answer}), flush=True)
    # Half-read loaders end badly: OLMo-core's threads abort the interpreter, Energon's raise in it.
    for child in multiprocessing.active_children():
        child.terminate()
    sys.stderr.flush()
    os._exit(0)
