"""The plan on a corpus of 5 billion documents in 100,000 shards: state, restore, memory, rate.

python benchmarks/bench_plan.py [--small]

Nothing but counts exists: the plan reads no data. A state at 99% is put together from the cohorts
that the pool would hold there, which are known without reading up to them; tests/stream shows that
a run that goes there has the same.
"""

import argparse
import json
import math
import resource
import time
from typing import Any

import numpy as np
from measure import keep, table

from penstock.arrays import Int32s
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, PlanConfig

ROWS = 50_000
PERIOD = 40
"""Shards so far apart are alike, so that documents of a state that is moved on are there too."""


class Simulated:
    """Shards of 50,000 documents of about 700 tokens."""

    def __init__(self, name: str, shards: int) -> None:
        self.name = name
        self._shards = shards
        random = np.random.default_rng(1)
        self._sizes = np.clip(random.lognormal(6.05, 1.0, ROWS + 4096), 1, 30_000).astype(np.int32)
        self.asked = 0

    def has_shard(self, shard: int) -> bool:
        return shard < self._shards

    wait_shard = has_shard

    def rows(self, shard: int) -> int:
        return ROWS

    def lengths(self, shard: int) -> Int32s:
        self.asked += 1
        first = shard % PERIOD * 100
        return self._sizes[first : first + ROWS]

    def identity(self) -> dict[str, str | int]:
        return {}

    def check_identity(self, seen: dict[str, str | int]) -> str:
        return ""


def new_plan(shards: int) -> Plan:
    return Plan([Simulated("corpus", shards)], PlanConfig(), [1.0])


def state_at(plan: Plan, share: float) -> dict[str, Any]:
    """The state of a plan that has gone that far: the first one's, its pool moved on."""
    state = plan.state()
    pool = state["pools"][0]
    each = pool["cohorts"][-1][3] - pool["cohorts"][-1][2]
    step = math.lcm(each, PERIOD)
    moved = int(share * plan.sources[0]._shards) // step * step  # type: ignore[attr-defined]
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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--small", action="store_true", help="fewer rows")
    given = options.parse_args()
    shards = 100_000
    before = memory_mb()
    began = time.perf_counter()
    plan = new_plan(shards)
    plan.take(16)
    first_s = time.perf_counter() - began
    while plan.pools[0].cycle < 30:  # nothing is left of what the pool was filled with first
        plan.take(4096)
    rows = 20_000 if given.small else 600_000
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
        state = json.loads(json.dumps(state_at(plan, share)))
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
    keep("plan", results)


if __name__ == "__main__":
    main()
