"""The main job end to end, on text that every Python brings along: its own library.

One process writes raw JSONL, in uneven pieces that stop in the middle of lines. Beside it,
`penstock shard` turns what is there into shards, while the file still grows. The shards are
listed as they are published; at the end `verify` proves the dataset and `show` describes it. Then a
tokenizer is trained on the same text, and compared on it; and the C++ headers that come with
pyarrow are filtered, deduplicated and cut into chunks of at most 1,024 of its tokens.
"""

import json
import multiprocessing
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pyarrow

from penstock.errors import NoDataset
from penstock.ingest.files import mark_done
from penstock.store.log import Log

OUT = Path("demo_out")
PIECE_BYTES = 700_001  # not a whole number of lines, on purpose


def produce(path: Path) -> None:
    """Write the standard library as JSONL over a few seconds, then say that it is complete."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in library.rglob("*.py") if "site-packages" not in p.parts)
    lines = (
        json.dumps({"text": file.read_text("utf-8", "replace"), "path": file.name}) + "\n"
        for file in files
        if file.stat().st_size
    )
    data = "".join(lines).encode()
    with path.open("wb", buffering=0) as out:
        for start in range(0, len(data), PIECE_BYTES):
            out.write(data[start : start + PIECE_BYTES])
            time.sleep(0.05)
    mark_done(path)


def watch(dataset: Path, began: float) -> None:
    """Print each shard the moment that the log has it, as a trainer would see it."""
    log, seen = None, 0
    while log is None or log.state.sealed is None:
        try:
            log = log or Log.open(dataset)
            log.refresh()
        except NoDataset:
            log = None
        shards = log.state.split("train") if log else []
        for shard in shards[seen:]:
            print(f"  {time.monotonic() - began:5.1f} s  {shard.name}: {shard.rows:,} documents")
        seen = len(shards)
        time.sleep(0.05)


def run(*command: str) -> None:
    print(f"$ penstock {' '.join(command)}", flush=True)
    subprocess.run([sys.executable, "-m", "penstock.cli", *command], check=True)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    raw, dataset = OUT / "raw.jsonl", OUT / "dataset"
    began = time.monotonic()
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(raw,))
    producer.start()
    watcher = threading.Thread(target=watch, args=(dataset, began), daemon=True)
    watcher.start()
    run("shard", "--input", str(raw), "--parquet_dir", str(dataset), "--rows_per_file", "300")
    watcher.join(timeout=10)
    producer.join()
    run("verify", str(dataset), "--full")
    run("show", str(dataset), "--rows", "1")
    tokenizer = str(OUT / "tokenizer_8k")
    run("tokenizer", "train", "--inputs", str(raw), "--vocab_size", "8192", "--output", tokenizer)
    run("tokenizer", "eval", tokenizer, "--inputs", str(raw))
    chunks, headers = str(OUT / "chunks"), pyarrow.get_include()
    run("chunk", "--inputs", headers, "--parquet_dir", chunks, "--max_tokens", "1024",
        "--tokenizer", tokenizer, "--tokens", "--filter", "code", "--dedup", "near")  # fmt: skip
    run("verify", chunks, "--full")
    run("show", chunks, "--rows", "1")
    took = time.monotonic() - began
    print(f"raw JSONL to sealed, proven datasets and a tokenizer in {took:.1f} s: {OUT}")


if __name__ == "__main__":
    main()
