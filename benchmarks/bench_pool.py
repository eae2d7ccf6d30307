"""The pool of two million samples: how long a refill takes, what it holds, where it stops, how well
it mixes; beside what document 003 describes, a list that is shuffled at each refill.

    python benchmarks/bench_pool.py [refill] [stream] [memory] [workers] [mixture] [--small]

refill   the plan alone: seconds for each refill of the pool, bytes for each of its positions
stream   boards of 64 bytes through StreamingMixedShardDataset: examples a second, the longest wait
memory   stops at max_memory_gb and under RLIMIT_AS, what was held then, and that it goes on exactly
workers  eight workers of a DataLoader at the sizes of document 003: memory of all processes
mixture  how far any 10,000 samples are from the weights; drawn in results/mixture.svg
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from measure import DATA, HERE, keep, table, warm

from penstock.arrays import Int32s
from penstock.errors import MemoryLimit
from penstock.stream.plan import Plan, PlanConfig

Answer = dict[str, Any]
POOL, THRESHOLD = 2_000_000, 1_500_000
SHARD_ROWS = 50_000
WINDOW = 10_000
WEIGHTS = {"5 shards": 5.0, "3 shards": 3.0, "2 shards": 2.0}


class Numbers:
    """A source of samples of length one, without data."""

    def __init__(self, name: str, shards: int, rows: int) -> None:
        self.name = name
        self._shards = shards
        self._ones = np.ones(rows, np.int32)

    def has_shard(self, shard: int) -> bool | None:
        return shard < self._shards

    def wait_shard(self, shard: int) -> bool:
        return shard < self._shards

    def rows(self, shard: int) -> int:
        return len(self._ones)

    def lengths(self, shard: int) -> Int32s:
        return self._ones

    def identity(self) -> dict[str, str | int]:
        return {}

    def check_identity(self, seen: dict[str, str | int]) -> str:
        return ""


def config(pool: int = POOL) -> PlanConfig:
    return PlanConfig(
        seq_len=1, pack="pad", buffer_pieces=1, pool_size=pool, pool_tokens=pool,
        refill_threshold=pool * 3 // 4,
    )  # fmt: skip


# The plan alone


def refill_plan(shards: int, sources: int) -> Answer:
    """Refills of a plan that is drawn to its end, and what its arrays hold at most."""
    made = [Numbers(str(k), shards // sources, SHARD_ROWS) for k in range(sources)]
    before = psutil.Process().memory_info().rss
    plan = Plan(made, config(), [1.0] * sources)
    taken: list[float] = []
    for pool in plan.pools:
        pool.refill = timed(pool.refill, taken)  # type: ignore[method-assign]
    most = rss = drawn = 0
    state: Answer = {}
    began = time.perf_counter()
    while (count := len(plan.take(1 << 16).fills)) > 0:
        drawn += count
        held = sum(array.nbytes for array in plan._arena)
        for pool in plan.pools:
            for dealt in pool._dealt.values():
                held += sum(column.nbytes for column in dealt.samples)
        if held > most:
            most, rss = held, psutil.Process().memory_info().rss - before
        if drawn < shards * SHARD_ROWS // 2:
            state = plan.state()
    wall = time.perf_counter() - began
    began = time.perf_counter()
    Plan(made, config(), [1.0] * sources).restore(state)
    restore = time.perf_counter() - began
    return {
        "samples": drawn, "refills": len(taken), "longest_refill_s": max(taken),
        "sum_of_refills_s": sum(taken), "samples_per_s": drawn / wall,
        "bytes_per_position": most / POOL, "resident_bytes_per_position": rss / POOL,
        "state_bytes": len(json.dumps(state)), "restore_s": restore,
    }  # fmt: skip


def timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    def timed_call(**options: Any) -> Any:
        began = time.perf_counter()
        found = call(**options)
        taken.append(time.perf_counter() - began)
        return found

    return timed_call


def refill_list(shards: int) -> Answer:
    """A list of (shard, row), filled to its size and shuffled at each refill."""
    before = psutil.Process().memory_info().rss
    pool: list[tuple[int, int]] = []
    taken: list[float] = []
    rss = drawn = shard = 0
    dice = random.Random(0)
    while shard < shards and len(taken) < 4:
        began = time.perf_counter()
        while len(pool) < POOL and shard < shards:
            pool += [(shard, row) for row in range(SHARD_ROWS)]
            shard += 1
        dice.shuffle(pool)
        taken.append(time.perf_counter() - began)
        rss = max(rss, psutil.Process().memory_info().rss - before)
        while len(pool) > THRESHOLD:
            pool.pop()
            drawn += 1
    return {
        "samples": drawn, "refills": len(taken), "longest_refill_s": max(taken),
        "sum_of_refills_s": sum(taken), "resident_bytes_per_position": rss / POOL,
    }  # fmt: skip


def bench_refill(small: bool) -> Answer:
    shards = 60 if small else 160
    results = {
        "penstock, 1 source": job("refill_plan", shards=shards, sources=1),
        "penstock, 4 sources": job("refill_plan", shards=shards, sources=4),
        "a list, filled and shuffled": job("refill_list", shards=shards),
    }
    rows = [
        [
            "",
            "refills",
            "longest s",
            "bytes a position",
            "resident",
            "samples/s planned",
            "restore s",
        ]
    ]
    for name, found in results.items():
        rows.append([
            name, str(found["refills"]), f"{found['longest_refill_s']:.3f}",
            f"{found['bytes_per_position']:.0f}" if "bytes_per_position" in found else "",
            f"{found['resident_bytes_per_position']:.0f}",
            f"{found['samples_per_s']:,.0f}" if "samples_per_s" in found else "",
            f"{found['restore_s']:.3f}" if "restore_s" in found else "",
        ])  # fmt: skip
    table(f"a pool of {POOL:,} samples, shards of {SHARD_ROWS:,}", rows)
    return results


# Data through it


def boards(name: str, shards: int, rows: int, width: int) -> Path:
    """A directory of shards of random boards; wide ones are repetitive, small on disk."""
    folder = DATA / f"pool_{name}_{shards}x{rows}x{width}"
    if not (folder / "_COMPLETE").exists():
        print(f"  making {folder.name} …", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        dice = np.random.default_rng(0)
        for k in range(shards):
            cells = np.tile(dice.integers(0, 13, (rows, 64), np.int8), width // 64)
            board = pa.FixedSizeListArray.from_arrays(pa.array(cells.reshape(-1)), width)
            first = k * rows
            columns = {"id": np.arange(first, first + rows), "board": board}
            file = folder / f"shard_{k:05d}.parquet"
            pq.write_table(pa.table(columns), file, use_dictionary=False, compression="zstd")
        (folder / "_COMPLETE").touch()
    return folder


def stream(folders: list[str], **options: Any) -> Answer:
    """A whole pass in this process."""
    from penstock import StreamingMixedShardDataset

    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    found = StreamingMixedShardDataset(folders, ["all"] * len(folders), random_seed=0, **options)
    count, longest, first = 0, 0.0, 0.0
    last = time.perf_counter()
    for _ in found:
        now = time.perf_counter()
        if count == 0:
            first = now - began
        else:
            longest = max(longest, now - last)
        last = now
        count += 1
    wall = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {
        "examples": count, "wall_s": wall, "first_s": first, "longest_wait_s": longest,
        "grown_mb": peak / 1e6,
    }  # fmt: skip


def bench_stream(small: bool) -> Answer:
    shards = 8 if small else 60
    folders = [boards("a", shards, SHARD_ROWS, 64), boards("b", shards // 2, SHARD_ROWS, 64)]
    results: Answer = {"data": {path.name: shards_hash(path) for path in folders}}
    found = job("stream", folders=[str(path) for path in folders], max_memory_gb=5.0)
    results["pool of 2 million"] = found
    table(
        "boards of 64 bytes, one process",
        [
            ["examples", "examples/s", "first after s", "longest wait s", "process grew by MB"],
            [
                f"{found['examples']:,}", f"{found['examples'] / found['wall_s']:,.0f}",
                f"{found['first_s']:.3f}", f"{found['longest_wait_s']:.3f}",
                f"{found['grown_mb']:,.0f}",
            ],
        ],
    )  # fmt: skip
    return results


def shards_hash(folder: Path) -> str:
    return warm(sorted(folder.glob("*.parquet"))[0])[:16]


# The stop


def stop(folder: str, max_memory_gb: float, limit_mb: int, pool: int) -> Answer:
    """Read until memory ends, by our limit or the system's; then go on, with room, to the end."""
    from penstock import DocumentConfig, StreamingMixedShardDataset

    def dataset(**options: Any) -> StreamingMixedShardDataset:
        return StreamingMixedShardDataset(
            [folder], ["all"], pool, pool * 3 // 4, random_seed=0, **options
        )

    tight = dataset(max_memory_gb=max_memory_gb)
    examples = iter(tight)
    first = int(next(examples)["id"])
    process = psutil.Process()
    before = process.memory_info().rss
    old = resource.getrlimit(resource.RLIMIT_AS)
    if limit_mb:
        limit = process.memory_info().vms + limit_mb * 1_000_000
        resource.setrlimit(resource.RLIMIT_AS, (limit, old[1]))
    seen = [first]
    said = ""
    try:
        for example in examples:
            seen.append(int(example["id"]))
    except MemoryLimit as error:
        said = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    state = json.loads(json.dumps(tight.state_dict()))
    if limit_mb:
        resource.setrlimit(resource.RLIMIT_AS, old)
    taken = len(seen)
    wide = dataset(max_memory_gb=100.0, documents=DocumentConfig(columns=["id"]))
    wide.load_state_dict(state)
    seen += [int(example["id"]) for example in wide]
    whole = [
        int(example["id"])
        for example in dataset(max_memory_gb=100.0, documents=DocumentConfig(columns=["id"]))
    ]
    return {
        "stopped": bool(said), "said": said, "taken": taken, "grown_mb": grown / 1e6,
        "state_bytes": len(json.dumps(state)), "goes_on_exactly": seen == whole,
    }  # fmt: skip


def bench_memory(small: bool) -> Answer:
    megabytes = 300 if small else 5000  # the limit that is asked for by default
    width = 4096
    folder = boards("wide", 5 * megabytes // 2 // 20, 5000, width)  # of 20 MB each
    pool = 2 * megabytes * 1_000_000 // width
    results: Answer = {"data": {folder.name: shards_hash(folder)}}
    given = {"folder": str(folder), "pool": pool}
    results["max_memory_gb"] = job("stop", max_memory_gb=megabytes / 1000, limit_mb=0, **given)
    results["RLIMIT_AS"] = job(
        "stop", {"ARROW_DEFAULT_MEMORY_POOL": "system"}, max_memory_gb=100.0, limit_mb=megabytes,
        **given,
    )  # fmt: skip
    rows = [["limit", "MB", "examples before", "process grew by MB", "state bytes", "exact after"]]
    for name in ("max_memory_gb", "RLIMIT_AS"):
        one = results[name]
        if not one["stopped"]:
            sys.exit(f"{name} did not stop it")
        rows.append([
            name, str(megabytes), f"{one['taken']:,}", f"{one['grown_mb']:,.0f}",
            f"{one['state_bytes']:,}", str(one["goes_on_exactly"]),
        ])  # fmt: skip
    table("the graceful stop, where the pool would need twice the limit", rows)
    return results


# Eight workers at the sizes of document 003: 2 million positions of 300 bytes, shards of 50,000 to
# 500,000, 5 GB


def positions(name: str, shard_rows: list[int], width: int) -> Path:
    """A directory of shards of different sizes; random boards, which do not compress much."""
    folder = DATA / f"pool_{name}_{len(shard_rows)}x{sum(shard_rows)}x{width}"
    if not (folder / "_COMPLETE").exists():
        print(f"  making {folder.name} …", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        dice, first = np.random.default_rng(0), 0
        for k, rows in enumerate(shard_rows):
            cells = pa.array(dice.integers(0, 256, rows * width, np.uint8))
            board = pa.FixedSizeListArray.from_arrays(cells, width)
            columns = {"id": np.arange(first, first + rows), "board": board}
            pq.write_table(pa.table(columns), folder / f"shard_{k:05d}.parquet")
            first += rows
        (folder / "_COMPLETE").touch()
    return folder


def workers_share(folders: list[str], workers: int, pool: int, max_memory_gb: float) -> Answer:
    """A pass with workers: PSS of all processes, most at once; what of it is not mapped."""
    import threading

    from torch.utils.data import DataLoader

    from penstock import StreamingMixedShardDataset

    found = StreamingMixedShardDataset(
        folders, ["all"] * len(folders), pool, random_seed=0, batch_size=4096,
        max_memory_gb=max_memory_gb,
    )  # fmt: skip
    me, peak, ended = psutil.Process(), [0, 0, 0], threading.Event()
    main_before = me.memory_full_info().uss

    def watch() -> None:
        while not ended.wait(0.2):
            total = own = 0
            for child in me.children(recursive=True):
                try:
                    memory = child.memory_full_info()
                except psutil.Error:
                    continue
                total, own = total + memory.pss, own + memory.uss
            main = me.memory_full_info()
            peak[0] = max(peak[0], total + main.pss)
            peak[1] = max(peak[1], own)
            peak[2] = max(peak[2], main.uss - main_before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, said, count, seen = time.perf_counter(), "", 0, 0
    try:
        for batch in DataLoader(
            found, batch_size=4096, num_workers=workers, multiprocessing_context="fork"
        ):
            count += len(batch["id"])
            seen += int(batch["id"].sum())
    except MemoryLimit as error:
        said = str(error)
    finally:
        ended.set()
        watcher.join()
    return {
        "examples": count, "said": said, "wall_s": time.perf_counter() - began,
        "peak_pss_mb": peak[0] / 1e6, "peak_uss_of_workers_mb": peak[1] / 1e6,
        "main_grew_mb": peak[2] / 1e6, "sum_of_ids": seen,
    }  # fmt: skip


def bench_workers(small: bool) -> Answer:
    part = 50 if small else 1
    dice = np.random.default_rng(1)
    sizes = [int(n) // part for n in dice.integers(50_000, 500_001, 24)]
    folders = [positions("a", sizes[:16], 292), positions("b", sizes[16:], 292)]
    expected = sum(sum(range(sum(part))) for part in (sizes[:16], sizes[16:]))
    pool = POOL // part
    results: Answer = {"data": {path.name: shards_hash(path) for path in folders}}
    rows = [["workers", "examples", "examples/s", "peak PSS of all MB", "workers' own MB", "said"]]
    for workers in (1, 8):
        one = job(
            "workers_share", folders=[str(path) for path in folders], workers=workers, pool=pool,
            max_memory_gb=5.0,
        )  # fmt: skip
        results[f"{workers} workers"] = one
        if one["said"] or (one["examples"], one["sum_of_ids"]) != (sum(sizes), expected):
            print(f"{workers} workers: {one['examples']:,} of {sum(sizes):,}: {one['said']}")
        rows.append([
            str(workers), f"{one['examples']:,}", f"{one['examples'] / one['wall_s']:,.0f}",
            f"{one['peak_pss_mb']:,.0f}", f"{one['peak_uss_of_workers_mb']:,.0f}",
            one["said"].splitlines()[0] if one["said"] else "",
        ])  # fmt: skip
    table(f"a pool of {pool:,} positions of 300 bytes, shards of 50,000 to 500,000, 5 GB", rows)
    return results


# The mixture


def bench_mixture(small: bool) -> Answer:
    shards = 4 if small else 20
    shares = np.array(list(WEIGHTS.values()))
    made = [Numbers(name, int(w) * shards, SHARD_ROWS) for name, w in WEIGHTS.items()]
    plan = Plan(made, config(), list(WEIGHTS.values()))
    parts = []
    while len(segments := plan.take(1 << 16).segments):
        parts.append(segments[:, 1].astype(np.int8))
    ours = np.concatenate(parts)
    theirs = mixed_by_shards(shares, shards)
    lines = {"penstock": distances(ours, shares), "shards in proportion": distances(theirs, shares)}
    results = {
        name: {
            "samples": len(line) + WINDOW - 1, "furthest": float(line.max()),
            "mean": float(line.mean()),
        }
        for name, line in lines.items()
    }  # fmt: skip
    rows = [["", "furthest", "mean"]]
    rows += [[name, f"{r['furthest']:.3%}", f"{r['mean']:.3%}"] for name, r in results.items()]
    table(f"distance of any {WINDOW:,} samples from the weights 5 : 3 : 2", rows)
    target = HERE / "results" / ("mixture_small.svg" if small else "mixture.svg")
    target.write_text(drawn(lines))
    print(f"  drawn in {target.relative_to(HERE.parent)}")
    return results


def mixed_by_shards(shares: npt.NDArray[np.float64], shards: int) -> npt.NDArray[np.int8]:
    """What document 003 describes: whole shards by weight into one pool, shuffled, drawn."""
    left = (shares * shards).astype(int)
    loaded = np.zeros(len(shares))
    dice = np.random.default_rng(0)
    pool = np.zeros(0, np.int8)
    out = []
    while left.any() or len(pool):
        while len(pool) < POOL and left.any():
            behind = np.where(left > 0, loaded / shares, np.inf)
            source = int(behind.argmin())
            pool = np.concatenate([pool, np.full(SHARD_ROWS, source, np.int8)])
            left[source] -= 1
            loaded[source] += 1
        dice.shuffle(pool)
        end = THRESHOLD if left.any() else 0
        out.append(pool[end:])
        pool = pool[:end]
    return np.concatenate(out)


def distances(
    found: npt.NDArray[np.int8], shares: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """For each run of WINDOW samples the furthest that a source is from its weight."""
    worst = np.zeros(len(found) - WINDOW + 1)
    for source, share in enumerate(shares / shares.sum()):
        total = np.concatenate([[0], np.cumsum(found == source)])
        part = (total[WINDOW:] - total[:-WINDOW]) / WINDOW
        worst = np.maximum(worst, abs(part - share))
    return worst


def drawn(lines: dict[str, npt.NDArray[np.float64]]) -> str:
    """The distances over the stream as an SVG, the most of each pixel."""
    width, height, left, top, bottom = 720, 300, 64, 40, 44
    most = max(float(line.max()) for line in lines.values()) * 1.1
    count = max(len(line) for line in lines.values())
    across, down = width - left - 20, height - top - bottom
    colors = ["#0b6e4f", "#c8553d"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20">Furthest that a source is from its weight, '
        f"in any {WINDOW:,} samples</text>",
    ]
    for k in range(5):
        y = top + down * (1 - k / 4)
        parts.append(
            f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{most * k / 4:.2%}</text>'
        )
        x = left + across * k / 4
        parts.append(
            f'<text x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">'
            f"{count * k / 4e6:.1f}M</text>"
        )
    parts.append(
        f'<text x="{left + across / 2}" y="{height - 8}" text-anchor="middle">samples</text>'
    )
    for k, (name, line) in enumerate(lines.items()):
        edges = np.linspace(0, len(line), across // 2 + 1).astype(int)
        peaks = np.maximum.reduceat(line, edges[:-1])
        points = " ".join(
            f"{left + 2 * x:.0f},{top + down * (1 - peak / most):.1f}"
            for x, peak in enumerate(peaks.tolist())
        )
        parts.append(
            f'<polyline fill="none" stroke="{colors[k]}" stroke-width="1.5" points="{points}"/>'
            f'<text x="{width - 20}" y="{20 + 14 * k}" text-anchor="end" fill="{colors[k]}">'
            f"{name}: at most {float(line.max()):.3%}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


# Running

JOBS: dict[str, Callable[..., Answer]] = {
    "refill_plan": refill_plan,
    "refill_list": refill_list,
    "stream": stream,
    "stop": stop,
    "workers_share": workers_share,
}


def job(name: str, environment: dict[str, str] | None = None, /, **given: Any) -> Answer:
    """A job in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--job", name, json.dumps(given)],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


SECTIONS = {
    "refill": bench_refill,
    "stream": bench_stream,
    "memory": bench_memory,
    "workers": bench_workers,
    "mixture": bench_mixture,
}


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        print(json.dumps(JOBS[sys.argv[2]](**json.loads(sys.argv[3]))))
        return
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    options.add_argument("--small", action="store_true", help="little of everything")
    given = options.parse_args()
    wanted = given.sections or list(SECTIONS)
    results: Answer = {"pool_size": POOL, "refill_threshold": THRESHOLD}
    for name in wanted:
        print(f"\n{name}", flush=True)
        results[name] = SECTIONS[name](given.small)
    name = "pool" if len(wanted) == len(SECTIONS) else "pool_" + "_".join(wanted)
    keep(f"{name}_small" if given.small else name, results)


if __name__ == "__main__":
    main()
