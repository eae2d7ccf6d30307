"""What the one committing process costs, as workers are added: CPU-seconds and bytes for each GB.

    python benchmarks/bench_scale.py [cost] [inputs] [decide] [--small] [--before TREE] [--rounds 3]

Real C++ headers as JSON lines (scripts/corpus), chunks of 1,024 tokens with token files, as
`penstock chunk` makes them.

cost    CPU-seconds of the committing process and of all others, and bytes through it, for one
        worker, two workers, and a Ray cluster of two processors; without dedup and with near dedup.
        What the same run takes for one small file (imports, kernels, the start of workers) is
        measured apart and left out of the figures for each GB. `--before` measures another tree of
        penstock beside this one with the same script, for example one that `git worktree` made.
inputs  the same, two workers, no dedup, of other inputs: a tree of files, four files mixed,
        and compressed lines, which the committing process inflates itself
decide  documents a second that the index of duplicates decides, and documents in a GB

That the datasets are the same, byte for byte, also with a node of two killed, is held by
tests/flow/test_ray.py and test_scale_kill.py; here their hashes are compared once more.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_prepare import TOKENIZER, corpus, hashes, make_tokenizer
from measure import DATA, HERE, keep, table, warm

OUT = DATA / "out_scale"
Answer = dict[str, Any]
CASES = (("local", 2), ("local", 1), ("ray", 2))


def measure(tree: Path, inputs: list[Path], engine: str, workers: int, dedup: str) -> Answer:
    """One run; with the hash of what it made."""
    shutil.rmtree(OUT, ignore_errors=True)
    about = {"inputs": [*map(str, inputs)], "out": str(OUT), "engine": engine, "workers": workers,
             "dedup": dedup, "tokenizer": str(TOKENIZER)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "scale_job.py"), json.dumps(about)],
        env={**os.environ, "PYTHONPATH": str(tree / "src"), "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{engine} x{workers}, dedup {dedup} failed:\n{done.stderr[-3000:]}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    digest = hashlib.sha256()
    for path in sorted(OUT.rglob("*")):
        name = str(path.relative_to(OUT))
        if path.is_file() and not name.startswith(("_log/", "_fold/", "_COMPLETE")):
            digest.update(name.encode() + b"\0" + path.read_bytes())
    answer["sha256"] = digest.hexdigest()
    shutil.rmtree(OUT)
    return answer


def best_of(runs: list[Answer]) -> Answer:
    """The run that took the least CPU of all processes together."""
    return min(runs, key=lambda one: one["committer_cpu_s"] + one["workers_cpu_s"])


def bench_cost(small: bool, before: Path | None, rounds: int, more: list[str]) -> Answer:
    path, documents, size = corpus("cpp", 8 if small else 400)
    warm(path)
    one = DATA / "prepare_one.jsonl"
    one.write_text('{"text": "int f() { return 1; }\\n"}\n')
    trees = {"before": before} if before is not None else {}
    trees["now"] = HERE.parent
    results: Answer = {"bytes": size, "documents": documents, "runs": {}}
    if more:
        results = json.loads((HERE / "results" / "scale.json").read_text())["cost"]
    gigabytes = size / 1e9
    for dedup in ("none", "near"):
        rows = [["", "wall s", "committer", "for a GB", "others", "all for a GB", "received",
                 "sent", "stored", "start"]]  # fmt: skip
        made = set()
        for engine, workers in CASES:
            if more and f"{engine} x{workers}, dedup {dedup}" not in more:
                continue
            found: dict[str, list[Answer]] = {name: [] for name in trees}
            starts: dict[str, list[Answer]] = {name: [] for name in trees}
            for _ in range(rounds):  # in turns
                for name, tree in trees.items():
                    starts[name].append(measure(tree, [one], engine, workers, dedup))
                    found[name].append(measure(tree, [path], engine, workers, dedup))
            for name in trees:
                run, start = best_of(found[name]), best_of(starts[name])
                committer = run["committer_cpu_s"] - start["committer_cpu_s"]
                others = run["workers_cpu_s"] - start["workers_cpu_s"]
                made.add(run["sha256"])
                label = f"{engine} x{workers}"
                results["runs"][f"{label}, dedup {dedup}, {name}"] = {
                    "run": run, "start": start,
                    "committer_cpu_s_per_gb": committer / gigabytes,
                    "all_cpu_s_per_gb": (committer + others) / gigabytes,
                    "received_per_gb": run["received"] / gigabytes,
                    "sent_per_gb": run["sent"] / gigabytes,
                    "stored_per_gb": run["stored"] / gigabytes,
                }  # fmt: skip
                megabytes = [f"{run[key] / 1e6 / gigabytes:,.1f} MB"
                             for key in ("received", "sent", "stored")]  # fmt: skip
                rows.append([
                    f"{label} {name}", f"{run['wall_s']:.2f}", f"{committer:.2f} s",
                    f"{committer / gigabytes:.2f} s", f"{others:.2f} s",
                    f"{(committer + others) / gigabytes:.1f} s", *megabytes,
                    f"{start['committer_cpu_s']:.2f} s",
                ])  # fmt: skip
                print("  " + "  ".join(rows[-1]), flush=True)
            hashes_made = {
                one["run"]["sha256"]
                for name, one in results["runs"].items()
                if f"dedup {dedup}," in name
            }
            results[f"same, dedup {dedup}"] = len(hashes_made) == 1
            if not small:  # what was measured stays, whatever comes then
                keep("scale", {"data": hashes(), "rounds": rounds, "cost": results})
        table(f"{size / 1e6:.0f} MB of C++, {documents:,} documents, dedup {dedup}; CPU-seconds, "
              "bytes for each GB", rows)  # fmt: skip
        print(f"  datasets: {'all the same' if len(made) == 1 else f'{len(made)} DIFFERENT ONES'}")
    return results


def bench_inputs(small: bool, rounds: int) -> Answer:
    path, documents, size = corpus("cpp", 8 if small else 400)
    one = DATA / "prepare_one.jsonl"
    one.write_text('{"text": "int f() { return 1; }\\n"}\n')
    made = DATA / "scale_inputs"
    shutil.rmtree(made, ignore_errors=True)
    (made / "tree").mkdir(parents=True)
    lines = path.read_bytes().splitlines(keepends=True)
    for k, line in enumerate(lines):
        folder = made / "tree" / f"{k // 500:03d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{k:06d}.cpp").write_text(json.loads(line)["text"])
    quarters = [made / f"{k}.jsonl" for k in range(4)]
    for k, quarter in enumerate(quarters):
        quarter.write_bytes(b"".join(lines[len(lines) * k // 4 : len(lines) * (k + 1) // 4]))
    with gzip.open(made / "in.jsonl.gz", "wb", compresslevel=6) as file:
        file.writelines(lines)
    given = {"one file": [path], "a tree": [made / "tree"], "four files, mixed": quarters,
             ".jsonl.gz": [made / "in.jsonl.gz"]}  # fmt: skip
    rows = [["", "wall s", "committer", "for a GB", "all for a GB", "received", "sent"]]
    results: Answer = {}
    gigabytes = size / 1e9
    start = best_of([measure(HERE.parent, [one], "local", 2, "none") for _ in range(rounds)])
    for name, inputs in given.items():
        run = best_of([measure(HERE.parent, inputs, "local", 2, "none") for _ in range(rounds)])
        committer = run["committer_cpu_s"] - start["committer_cpu_s"]
        everyone = committer + run["workers_cpu_s"] - start["workers_cpu_s"]
        results[name] = {"run": run, "committer_cpu_s_per_gb": committer / gigabytes,
                         "all_cpu_s_per_gb": everyone / gigabytes}  # fmt: skip
        rows.append([
            name, f"{run['wall_s']:.2f}", f"{committer:.2f} s", f"{committer / gigabytes:.2f} s",
            f"{everyone / gigabytes:.1f} s", f"{run['received'] / 1e6 / gigabytes:,.1f} MB",
            f"{run['sent'] / 1e6 / gigabytes:,.1f} MB",
        ])  # fmt: skip
    shutil.rmtree(made)
    table(f"{size / 1e6:.0f} MB of C++, {documents:,} documents, two workers, by input", rows)
    return results


def bench_decide(small: bool) -> Answer:
    path, documents, size = corpus("cpp", 8 if small else 400)
    done = subprocess.run(
        [sys.executable, "-c", DECIDE, str(path)], capture_output=True, text=True, check=True
    )
    found: Answer = json.loads(done.stdout.splitlines()[-1])
    found["documents_per_gb"] = documents / (size / 1e9)
    found["gb_per_s"] = found["documents_per_s"] / found["documents_per_gb"]
    print(f"\nnear dedup: the committing process decides {found['documents_per_s']:,.0f} documents "
          f"a CPU-second, from bytes to bytes; a GB of this has {found['documents_per_gb']:,.0f}: "
          f"{found['gb_per_s']:.1f} GB a second; {found['signature_bytes']:.0f} bytes of signatures"
          " a document come to it")  # fmt: skip
    return found


DECIDE = """
import json, sys, time
from penstock.ingest.formats import Piece, ReadConfig
from penstock.ingest.inputs import open_input
from penstock.prepare.dedup import DedupConfig, Index, Signatures
from penstock.prepare.task import PrepareTask
from penstock.prepare.wire import Request
name, config = sys.argv[1], DedupConfig()
task = PrepareTask([config], ReadConfig(), [name], None, keep_rows=False)
opened = open_input(name, 0, ReadConfig())
sent = [task(Request(piece)).signatures.to_bytes() for piece in opened.pieces(0)]
index = Index(config)
documents = kept = 0
began = time.process_time()
held = []
for data in sent:
    found = Signatures.from_bytes(data, config)
    verdicts = index.decide(found)
    held.append(found.take(verdicts.kept))
    documents += len(found)
stored = Signatures.concat(config, held).to_bytes()
seconds = time.process_time() - began
print(json.dumps({"documents": documents, "kept": len(index), "cpu_s": seconds,
    "documents_per_s": documents / seconds, "signature_bytes": sum(map(len, sent)) / documents}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", default=["cost", "inputs", "decide"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--more", nargs="*", default=[], help='these only, as "ray x2, dedup near"')
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    make_tokenizer()
    results: Answer = {}
    if "cost" in options.sections:
        results["cost"] = bench_cost(options.small, options.before, options.rounds, options.more)
    if "inputs" in options.sections:
        results["inputs"] = bench_inputs(options.small, options.rounds)
    if "decide" in options.sections:
        results["decide"] = bench_decide(options.small)
    if not options.small:
        keep("scale", {"data": hashes(), "rounds": options.rounds, **results})


if __name__ == "__main__":
    main()
