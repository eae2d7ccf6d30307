"""The plan on a corpus of 5 billion documents in 100,000 shards: state, restore, memory, rate.

python benchmarks/bench_plan.py [--small] [--jobs plan lanes mixing]

plan     one lane
lanes    64 lanes: the state of all of them, restored; what a rank of 1, 2, 8 and 64 holds
mixing   how far apart two neighbours of a shard land, with 1 and 64 lanes and in a permutation

Nothing but counts exists: the plan reads no data. A state at 99% is put together from the cohorts
that the pool would hold there, which are known without reading up to them; tests/stream shows that
a run that goes there has the same.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
from measure import HERE, keep, table

from penstock.arrays import Int32s
from penstock.stream import plan_layout as layout
from penstock.stream.lanes import Deal, LanePlan, Lanes, LaneSource, lane_config
from penstock.stream.plan import Plan, PlanConfig

SHARDS = 100_000
ROWS = 50_000
PERIOD = 40
"""Shards so far apart are alike, so that documents of a state that is moved on are there too."""


class Simulated:
    """Shards of 50,000 documents of about 700 tokens."""

    is_closed = True

    def __init__(self, name: str, shards: int, rows: int = ROWS) -> None:
        self.name = name
        self.num_known = self._shards = shards
        self._rows = rows
        random = np.random.default_rng(1)
        self._sizes = np.clip(random.lognormal(6.05, 1.0, rows + 4096), 1, 30_000).astype(np.int32)
        self.asked = 0

    def has_shard(self, shard: int) -> bool:
        return shard < self._shards

    wait_shard = has_shard

    def rows(self, shard: int) -> int:
        return self._rows

    def volume(self, shard: int) -> int:
        return self._rows

    def lengths(self, shard: int) -> Int32s:
        self.asked += 1
        first = shard % PERIOD * 100
        return self._sizes[first : first + self._rows]

    def identity(self) -> dict[str, str | int]:
        return {}

    def check_identity(self, seen: dict[str, str | int]) -> str:
        return ""


def new_plan(shards: int) -> Plan:
    return Plan([Simulated("corpus", shards)], PlanConfig(), [1.0])


def lane_plans(source: Simulated, config: PlanConfig, lanes: range) -> list[Plan]:
    """The plans of some lanes."""
    deal = Deal(source, Lanes(config.lanes, config.lanes, (0, config.lanes)))
    return [LanePlan([LaneSource(deal, lane)], lane_config(config, lane), [1.0]) for lane in lanes]


def state_at(plan: Plan, share: float, shards: int) -> dict[str, Any]:
    """The state of a plan that has gone that far: the first one's, its pool moved on."""
    state = plan.state()
    pool = state["pools"][0]
    each = pool["cohorts"][-1][3] - pool["cohorts"][-1][2]
    step = math.lcm(each, PERIOD)
    moved = int(share * shards) // step * step
    cycles = moved // each
    pool["cycle"] += cycles
    pool["shard"] += moved
    pool["cohorts"] = [
        [n + cycles, p, a + moved, b + moved, *k] for n, p, a, b, *k in pool["cohorts"]
    ]
    state["row"] += moved * ROWS // 3
    for piece in [*state["pieces"], state["open"]]:
        piece[2] += moved
    return state


def memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure_plan(small: bool) -> dict[str, Any]:
    shards = SHARDS
    before = memory_mb()
    began = time.perf_counter()
    plan = new_plan(shards)
    plan.take(16)
    first_s = time.perf_counter() - began
    while plan.pools[0].cycle < 30:  # nothing is left of what the pool was filled with first
        plan.take(4096)
    rows = 20_000 if small else 600_000
    began, first = time.perf_counter(), plan.row
    cycles, longest = plan.pools[0].cycle, 0.0
    while plan.row < first + rows:
        one = time.perf_counter()
        plan.take(1024)
        longest = max(longest, time.perf_counter() - one)
    took = time.perf_counter() - began
    refills = plan.pools[0].cycle - cycles
    tokens = (plan.row - first) * plan.config.seq_len
    documents, placed = int(plan.ledger[layout.DOCUMENTS]), int(plan.ledger[layout.PLACED])
    size = len(json.dumps(plan.state()))
    results: dict[str, Any] = {
        "documents": shards * ROWS, "shards": shards, "first_rows_s": first_s,
        "rows_per_s": (plan.row - first) / took, "tokens_per_s": tokens / took,
        "refills": refills, "longest_1024_rows_s": longest, "state_bytes": size,
        "memory_mb": memory_mb() - before, "documents_planned": documents,
        "fill": placed / (plan.row * plan.config.seq_len),
    }  # fmt: skip
    rows_table = [["how far", "state bytes", "restore s", "shards asked", "same rows again"]]
    for share in (0.01, 0.5, 0.99):
        state = json.loads(json.dumps(state_at(plan, share, shards)))
        taken = []
        for _ in range(3):
            again = new_plan(shards)
            began = time.perf_counter()
            again.restore(state)
            taken.append(time.perf_counter() - began)
        asked = again.sources[0].asked  # type: ignore[attr-defined]
        twice = new_plan(shards)
        twice.restore(state)
        same = again.take(512).segments.tobytes() == twice.take(512).segments.tobytes()
        results[f"restore_{share}"] = {
            "restore_s": min(taken),
            "state_bytes": len(json.dumps(state)),
        }
        rows_table.append(
            [
                f"{share:.0%}",
                f"{len(json.dumps(state)):,}",
                f"{min(taken):.3f}",
                str(asked),
                str(same),
            ]
        )
    print(
        f"  {shards * ROWS:,} documents in {shards:,} shards: first rows after {first_s:.2f} s; "
        f"then {results['rows_per_s']:,.0f} rows/s = {tokens / took / 1e6:,.0f} M tokens/s "
        f"over {refills} refills, the slowest 1,024 rows took {longest:.2f} s; "
        f"{results['memory_mb']:.0f} MB; fill {results['fill']:.2%}"
    )
    table("restoring", rows_table)
    return results


LANES = 64


def measure_rank(ranks: int) -> dict[str, Any]:
    """What the first of so many ranks holds when its pools are full."""
    process = psutil.Process()  # a peak is that of the parent too
    before, most = process.memory_info().rss, 0
    began = time.perf_counter()
    plans = lane_plans(Simulated("corpus", SHARDS), PlanConfig(lanes=LANES), range(LANES // ranks))
    for plan in plans:
        plan.take(1)
    first_s = time.perf_counter() - began
    for plan in plans:
        while plan.pools[0].cycle < 8:
            plan.take(1024)
        most = max(most, process.memory_info().rss)
    return {"first_rows_s": first_s, "memory_mb": (most - before) / (1 << 20)}


def measure_lanes() -> dict[str, Any]:
    """The state of 64 lanes far into the corpus, and how long all of them take to go there."""
    config, per = PlanConfig(lanes=LANES), SHARDS // LANES
    plans = lane_plans(Simulated("corpus", SHARDS), config, range(LANES))
    for plan in plans:
        while plan.pools[0].cycle < 30:
            plan.take(1024)
    results: dict[str, Any] = {"lanes": LANES}
    rows = [["how far", "state bytes", "restore s", "CPU s", "one of 8 ranks s"]]
    for share in (0.01, 0.5, 0.99):
        states = [state_at(plan, share, per) for plan in plans]
        size = len(json.dumps(states))
        again = lane_plans(Simulated("corpus", SHARDS), config, range(LANES))
        again[0].sources[0].wait_shard(per - 1)  # dealing is a part of opening a dataset
        began, eighth, cpu = time.perf_counter(), 0.0, time.process_time()
        for k, (plan, state) in enumerate(zip(again, states, strict=True)):
            plan.restore(state)
            if k == LANES // 8 - 1:
                eighth = time.perf_counter() - began
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        results[f"restore_{share}"] = {
            "state_bytes": size, "restore_s": took, "restore_cpu_s": cpu,
            "restore_rank_of_8_s": eighth,
        }  # fmt: skip
        rows.append([f"{share:.0%}", f"{size:,}", f"{took:.3f}", f"{cpu:.3f}", f"{eighth:.3f}"])
    table(f"{LANES} lanes: restoring", rows)
    rows = [["ranks", "first rows s", "memory MB"]]
    for ranks in (1, 2, 8, 64):
        command = [sys.executable, __file__, "--rank-of", str(ranks)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        results[f"rank_of_{ranks}"] = found
        rows.append([str(ranks), f"{found['first_rows_s']:.2f}", f"{found['memory_mb']:.0f}"])
    table(f"{LANES} lanes: a rank", rows)
    return results


def measure_mixing() -> dict[str, Any]:
    """Samples between two neighbours of a shard, as a part of the epoch and of the pool."""
    shards, each, pool = 640, 500, 20_000
    total = shards * each
    results: dict[str, Any] = {"shards": shards, "rows": each, "pool_size": pool}
    rows = [["", "mean distance", "in pools", "closer than 100", "shards in 1,000 samples"]]
    for name in ("lanes_1", "lanes_64", "permutation"):
        if name == "permutation":
            order = np.random.default_rng(0).permutation(total)
        else:
            lanes = int(name.removeprefix("lanes_"))
            order = drawn_order(shards, each, PlanConfig(lanes=lanes, pool_size=pool, pack="pad"))
        place = np.empty(total, np.int64)
        place[order] = np.arange(total)
        gaps = np.abs(np.diff(place.reshape(shards, each), axis=1)).reshape(-1)
        met = [len({*(order[k : k + 1000] // each).tolist()}) for k in range(0, total - 999, 1000)]
        results[name] = {
            "mean_distance": float(gaps.mean()), "closer_than_100": float((gaps < 100).mean()),
            "shards_in_1000": float(np.mean(met)),
        }  # fmt: skip
        rows.append(
            [name, f"{gaps.mean() / total:.4f}", f"{gaps.mean() / pool:.2f}",
             f"{(gaps < 100).mean():.3%}", f"{np.mean(met):.0f}"]
        )  # fmt: skip
    table(f"{total:,} samples in {shards} shards, a pool of {pool:,}", rows)
    return results


def drawn_order(shards: int, each: int, config: PlanConfig) -> Any:
    """Samples in the order of the rows, one a row, of lanes that take turns."""
    source = Simulated("corpus", shards, each)
    source._sizes[:] = 1
    if config.lanes == 1:
        plans: list[Plan] = [Plan([source], config, [1.0])]
    else:
        plans = lane_plans(source, config, range(config.lanes))
    parts = []
    for plan in plans:
        segments = plan.take(shards * each).segments
        parts.append(segments[:, 3].astype(np.int64) * each + segments[:, 4])
    turns = np.concatenate([np.arange(len(part)) for part in parts])
    return np.concatenate(parts)[np.argsort(turns, kind="stable")]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--small", action="store_true", help="fewer rows")
    options.add_argument("--jobs", nargs="+", default=["plan", "lanes", "mixing"])
    options.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.rank_of:
        print(json.dumps(measure_rank(given.rank_of)))
        return
    kept = HERE / "results" / "plan.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    if "plan" in given.jobs:
        results |= measure_plan(given.small)
    if "lanes" in given.jobs:
        results["lanes"] = measure_lanes()
    if "mixing" in given.jobs:
        results["mixing"] = measure_mixing()
    keep("plan", results)


if __name__ == "__main__":
    main()
