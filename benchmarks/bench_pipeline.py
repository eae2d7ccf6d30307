"""Time to the first training batch: `penstock run` beside the same five jobs one after another.

python benchmarks/bench_pipeline.py [--mb 1000] [--keep]

The corpus is C++ and CUDA headers of the installed torch and pyarrow as JSON lines, over and over
until there is enough of it, each copy with its number in its first line; so nothing is filtered or
deduplicated. A tokenizer is there, as in the five scripts of document 000: its training is not
counted. The trainer is a loader alone, which notes when each batch came. Both go through a bucket,
which is a directory.

"One after another" is chunk to JSON lines, shard, push, pull and the trainer, each a command of
penstock that begins when the one before has ended: what a chain of scripts would do at best.
Wall time, with the start of every process.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import torch
from measure import DATA, keep, table

from penstock import Log, TrainConfig, train_tokenizer

TRAIN = """
import json, time
from penstock import PretrainDataLoader, read_run
with PretrainDataLoader(**read_run("pipeline.toml")) as loader:
    for batch in loader:
        with open("train.jsonl", "a") as file:
            file.write(json.dumps({"step": loader.step, "time": time.time()}) + "\\n")
        if loader.step == 100:
            break
"""
PIPELINE = """
[source.cpp]
inputs = ["raw.jsonl"]
[tokenizer]
path = "tokenizer"
[chunk]
max_tokens = 2048
[shards]
rows_per_file = {rows}
[push]
url = "bucket"
[pull]
dir = "local"
[loader]
path = "local/cpp"
tokenizer = "tokenizer"
chunk_size = 2048
batch_size = 8
[loader.run]
wait_s = 3600
[train]
command = {command}
log = "train.jsonl"
"""


def write_corpus(path: Path, size: int) -> int:
    """JSON lines of headers, `size` bytes of them and not much more; how many documents."""
    roots = [Path(torch.__file__).parent / "include", Path(pyarrow.get_include())]
    files = sorted(file for root in roots for file in root.rglob("*.h"))
    texts = [file.read_text("utf-8", "replace") for file in files]
    written = count = 0
    with path.open("wb") as out:
        while written < size:
            for text in texts:
                line = json.dumps({"text": f"// copy {count}\n{text}"}).encode() + b"\n"
                out.write(line)
                written, count = written + len(line), count + 1
                if written >= size:
                    break
    return count


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "penstock", *words]


def first_batch(folder: Path) -> float:
    with (folder / "train.jsonl").open() as file:
        return float(json.loads(file.readline())["time"])


def run_together(folder: Path) -> tuple[float, float, float]:
    """Seconds to the first batch, to the seal, to the end of `penstock run`."""
    began = time.time()
    with (folder / "run.log").open("wb") as log:
        subprocess.run(command("run", "pipeline.toml"), cwd=folder, check=True, stderr=log)
    ended = time.time()
    lines = (folder / "data" / "cpp" / "_events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    sealed = next(one["time"] for one in events if one["kind"] == "end")
    shard = next(one["time"] for one in events if one["kind"] == "commit" and one["files"])
    begun = next(one["time"] for one in events if one["kind"] == "commit")
    print(f"the first record after {begun - began:.1f} s, shard after {shard - began:.1f} s")
    return first_batch(folder) - began, sealed - began, ended - began


def run_one_after_another(folder: Path) -> tuple[float, dict[str, float]]:
    """Seconds to the first batch, and what each job took."""
    jobs = {
        "chunk": command("chunk", "--inputs", "raw.jsonl", "--output", "all.jsonl", "--tokenizer",
                         "tokenizer", "--max_tokens", "2048"),
        "shard": command("shard", "--input", "all.jsonl", "--parquet_dir", "data/cpp", "--tokens",
                         "--tokenizer", "tokenizer", "--rows_per_file", str(ROWS)),
        "push": command("push", "data/cpp", "bucket/cpp"),
        "pull": command("pull", "bucket/cpp", "local/cpp"),
        "train": [sys.executable, "train.py"],
    }  # fmt: skip
    began, took = time.time(), {}
    for name, words in jobs.items():
        start = time.time()
        subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)  # fmt: skip
        took[name] = time.time() - start
    return first_batch(folder) - began, took


ROWS = 2_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=1000, help="of the corpus, as JSON lines")
    parser.add_argument("--keep", action="store_true", help="keep the results in results/")
    args = parser.parse_args()
    root = DATA / "pipeline"
    shutil.rmtree(root, ignore_errors=True)
    together, chain = root / "together", root / "chain"
    for folder in (together, chain):
        folder.mkdir(parents=True)
    documents = write_corpus(root / "raw.jsonl", args.mb * 10**6)
    sample = root / "sample.jsonl"
    with (root / "raw.jsonl").open("rb") as file:
        sample.write_bytes(b"".join(file.readlines(20 << 20)))
    train_tokenizer([sample], root / "tokenizer", TrainConfig(vocab_size=16384))
    trainer = json.dumps(shlex.join([sys.executable, "train.py"]))
    for folder in (together, chain):
        os.link(root / "raw.jsonl", folder / "raw.jsonl")
        shutil.copytree(root / "tokenizer", folder / "tokenizer")
        (folder / "train.py").write_text(TRAIN)
        (folder / "pipeline.toml").write_text(PIPELINE.format(rows=ROWS, command=trainer))
    load = os.getloadavg()[0]
    first_s, sealed_s, whole_s = run_together(together)
    chain_s, took = run_one_after_another(chain)
    states = [Log.open(folder / "data" / "cpp").state for folder in (together, chain)]
    rows = [sum(file.rows for file in state.files.values()) for state in states]
    table(
        f"{args.mb:,} MB of JSON lines, {documents:,} documents, load {load:.1f} at the start",
        [
            ["", "first batch", "all data sealed", "all ended"],
            ["penstock run", f"{first_s:.1f} s", f"{sealed_s:.1f} s", f"{whole_s:.1f} s"],
            ["one after another", f"{chain_s:.1f} s", f"{took['chunk'] + took['shard']:.1f} s",
             f"{sum(took.values()):.1f} s"],
        ],
    )  # fmt: skip
    print("  ".join(f"{name} {seconds:.1f} s" for name, seconds in took.items()), rows)
    if args.keep:
        about = {"mb": args.mb, "documents": documents, "load": load, "first_batch_s": first_s,
                 "sealed_s": sealed_s, "whole_s": whole_s, "chain_first_batch_s": chain_s,
                 "chain_s": took}  # fmt: skip
        keep("pipeline", about)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
