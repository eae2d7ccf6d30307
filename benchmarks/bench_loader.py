"""penstock and every rival loader on the same tokens: speed, start, resume, memory, what is lost.

scripts/rivals
python benchmarks/bench_loader.py [--loaders penstock grain …] [--jobs speed grow …] [--rounds 3]

Each job is a process of its own, in the loader's own environment. Results go to
benchmarks/results/loader.json as they come, so that a part can be run again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loader_jobs import JobFailed, run_job
from measure import DATA, HERE, keep, table

ROOT = HERE.parent
OURS = ("penstock", "penstock_concat", "penstock_lanes", "memcpy")
LOADERS = {
    **dict.fromkeys(OURS, "."),
    "mosaicml": "mosaicml",
    **dict.fromkeys(
        ["litdata", "grain", "grain_no_threads", "grain_bestfit", "datasets_map",
         "datasets_stream", "megatron", "olmo", "olmo_packed", "energon", "nanochat"],
        "loaders",
    ),
}  # fmt: skip
"""Each one's environment in .venv-rivals; ours is the project's own."""
SAME_DATA = {
    "grain_no_threads": "grain", "grain_bestfit": "grain", "penstock_concat": "penstock",
    "penstock_lanes": "penstock",
}  # fmt: skip
JOBS = ["convert", "speed", "resume", "fixed", "grow"]
SHAPE = {"batch_size": 16, "seq_len": 2048}

Answer = dict[str, Any]


def python_of(rival: str) -> str:
    if rival in OURS:
        return sys.executable
    found = ROOT / ".venv-rivals" / LOADERS[rival] / "bin" / "python"
    if not found.exists():
        sys.exit(f"no {found.relative_to(ROOT)}: run scripts/rivals {LOADERS[rival]}")
    return str(found)


def make_source(work: Path, documents: int) -> Path:
    source = work / f"source_{documents}"
    if not (source / "source.json").exists():
        script = str(HERE / "loader_source.py")
        command = [sys.executable, script, str(source), "--documents", str(documents)]
        subprocess.run(command, check=True)
    return source


def attempt(rival: str, job: str, args: Answer) -> Answer:
    try:
        script = HERE / ("loader_penstock.py" if rival in OURS else "loader_rivals.py")
        answer = run_job(script, rival, job, args, python_of(rival))
    except JobFailed as failed:
        answer = {"failed": str(failed)[:500]}
    for name in ("said", "job", "rival"):
        answer.pop(name, None)
    short = {k: round(v, 3) if isinstance(v, float) else v for k, v in answer.items()}
    print(f"{rival} {job} {args.get('shape', {}).get('workers', '')}: {short}", flush=True)
    return answer


def two_ranks(rival: str, job: str, args: Answer) -> Answer:
    """Two processes at once, as two ranks that share the stream: what both give together."""
    shapes = [{**args["shape"], "workers": 0, "rank": rank, "ranks": 2} for rank in (0, 1)]
    each = [{**args, "shape": shape, "half": args["half"] // 2, "state": f"{args['state']}_{n}"}
            for n, shape in enumerate(shapes)]  # fmt: skip
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda one: attempt(rival, job, one), each))
    if any("tokens_per_s" not in one for one in found):
        return found[0]
    total = {name: sum(one[name] for one in found) for name in ("tokens_per_s", "peak_pss_mb")}
    total["tokens_per_cpu_s"] = sum(one["tokens_per_cpu_s"] for one in found) / 2
    return {**found[0], **total}


def best(runs: list[Answer]) -> Answer:
    """The fastest of several, with the least start and the most memory of any."""
    good = [run for run in runs if "tokens_per_s" in run]
    if not good:
        return runs[-1]
    found = dict(max(good, key=lambda run: float(run["tokens_per_s"])))
    for name in ("import_s", "first_batch_s", "first_batch_with_imports_s"):
        found[name] = min(run[name] for run in good)
    for name in ("peak_pss_mb", "peak_rss_mb", "peak_own_mb"):
        found[name] = max(run[name] for run in good)
    return found


def measure(rival: str, jobs: list[str], work: Path, source: Path, given: Any) -> Answer:
    tokens = json.loads((source / "source.json").read_text())["tokens"]
    half = tokens // (SHAPE["batch_size"] * SHAPE["seq_len"]) // 2
    data = work / f"data_{SAME_DATA.get(rival, rival)}"
    found: Answer = {}
    if "convert" in jobs and rival not in SAME_DATA:
        shutil.rmtree(data, ignore_errors=True)
        common = {"source": str(source), "data": str(data), "shape": SHAPE}
        found["convert"] = attempt(rival, "convert", common)
    for workers in (0, 2):
        state = str(work / f"state_{rival}_{workers}")
        common = {"data": str(data), "state": state, "shape": {**SHAPE, "workers": workers}}
        if "speed" in jobs:
            args = {**common, "half": half, "max_s": given.max_s}
            speed = two_ranks if workers and rival in OURS else attempt
            runs = [speed(rival, "speed", args) for _ in range(given.rounds)]
            found[f"speed_{workers}"] = best(runs)
        if "resume" in jobs and Path(state).exists():
            found[f"resume_{workers}"] = attempt(rival, "resume", common)
    for job in ("fixed", "grow"):
        if job in jobs and rival != "memcpy":
            found[job] = attempt(rival, job, {"folder": str(work / f"{job}_{rival}")})
    return found


def show(results: Answer) -> None:
    rows = [[
        "", "M tokens/s", "per CPU s", "2 workers", "first pass per CPU s", "fill", "first batch s",
        "with imports", "resume s", "exact", "peak PSS MB", "2 workers",
    ]]  # fmt: skip
    lost = [["lost (repeated)", "fixed", "grown: old lost", "new lost", "repeated"]]
    for rival, found in results.items():
        alone, both = found.get("speed_0", {}), found.get("speed_2", {})
        resumed = found.get("resume_0", {})

        def cell(one: Answer, name: str, scale: float = 1, digits: int = 2) -> str:
            return f"{one[name] / scale:,.{digits}f}" if name in one else "-"

        rows.append([
            rival, cell(alone, "tokens_per_s", 1e6), cell(alone, "tokens_per_cpu_s", 1e6),
            cell(both, "tokens_per_s", 1e6), cell(alone, "first_pass_per_cpu_s", 1e6),
            cell(alone, "fill", 1, 3), cell(alone, "first_batch_s"),
            cell(alone, "first_batch_with_imports_s"), cell(resumed, "resume_s"),
            str(resumed.get("exact", "-")), cell(alone, "peak_pss_mb", 1, 0),
            cell(both, "peak_pss_mb", 1, 0),
        ])  # fmt: skip
        fixed, grown = found.get("fixed", {}), found.get("grow", {})
        if "failed" in grown:
            grown = dict.fromkeys(("lost_old", "lost_new", "repeated"), "refused")
        lost.append([
            rival, f"{fixed.get('lost', '-')} ({fixed.get('repeated', '-')})",
            *(str(grown.get(name, "-")) for name in ("lost_old", "lost_new", "repeated")),
        ])  # fmt: skip
    table("batches of 16 rows of 2,048 tokens", rows)
    table("stopped after 500 of 1,000 samples, grown to 2,000, resumed to the end", lost)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    options.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    options.add_argument("--rounds", type=int, default=1)
    options.add_argument("--documents", type=int, default=100_000)
    options.add_argument("--max-s", type=float, default=8, help="seconds of reading, at most")
    options.add_argument("--work", type=Path, default=DATA / "loader")
    options.add_argument("--result", default="loader", help="file of benchmarks/results")
    given = options.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    given.work.mkdir(parents=True, exist_ok=True)
    source = make_source(given.work, given.documents)
    kept = HERE / "results" / f"{given.result}.json"
    results: Answer = json.loads(kept.read_text())["loaders"] if kept.exists() else {}
    for rival in given.loaders:
        found = measure(rival, given.jobs, given.work, source, given)
        results[rival] = {**results.get(rival, {}), **found}
        about = json.loads((source / "source.json").read_text())
        keep(given.result, {"source": about, "shape": SHAPE, "loaders": results})
    show(results)


if __name__ == "__main__":
    main()
