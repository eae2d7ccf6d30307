"""JSONL to zstd parquet: penstock beside DuckDB, Polars, pyarrow and datatrove, on the same bytes.

The rivals do the plain conversion. penstock also shuffles, splits, hashes, fsyncs and commits.
All write zstd at level 1, from a warm page cache; every contender is a fresh process and its wall
time holds the start of the interpreter; the best of `--rounds` interleaved rounds counts.

usage: make bench   (or python benchmarks/bench_shard.py [--rounds 3] [--quick])
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from measure import DATA, Run, best, keep, run, table, warm

OUT = DATA / "out"
CODE = (".h", ".hpp", ".ipp", ".hh", ".def", ".inc")

CONTENDERS = {
    "penstock": """
import sys
from penstock.cli import main
sys.argv = ["penstock", "shard", "--input", {path!r}, "--parquet_dir", {out!r}, "--complete"]
main()
""",
    "pyarrow": """
import pyarrow as pa, pyarrow.json as pj, pyarrow.parquet as pq
schema = pa.schema([("text", pa.string())])
reader = pj.open_json(
    {path!r},
    read_options=pj.ReadOptions(block_size=32 << 20),
    parse_options=pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
)
with pq.ParquetWriter(
    {out!r}, reader.schema, compression="zstd", compression_level=1, use_dictionary=False
) as writer:
    for batch in reader:
        writer.write_batch(batch)
""",
    "polars": """
import polars as pl
pl.scan_ndjson({path!r}, schema={{"text": pl.String}}).sink_parquet(
    {out!r}, compression="zstd", compression_level=1
)
""",
    "duckdb": """
import duckdb
duckdb.sql(
    "copy (select text from read_json({path!r}, format='newline_delimited', "
    "columns={{text: 'VARCHAR'}}, maximum_object_size=100000000)) "
    "to {out!r} (format parquet, compression zstd, compression_level 1)"
)
""",
    "datatrove": """
import os
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import ParquetWriter
if __name__ == "__main__":
    folder, name = os.path.split({path!r})
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(folder, glob_pattern=name),
            ParquetWriter({out!r}, compression="zstd"),
        ],
        tasks=1,
        logging_dir={out!r} + "/logs",
    ).run()
""",
}


def headers() -> list[str]:
    """The texts of real C++ headers, in a shuffled order that does not change."""
    subprocess.run([DATA.parent.parent / "scripts" / "corpus", "cpp"], check=True)
    paths = sorted(
        path
        for path in (DATA / "cpp").rglob("*")
        if path.is_file()
        and not path.is_symlink()
        and (path.suffix in CODE or "eigen3" in path.parts or "qt5" in path.parts)
    )
    random.Random(1).shuffle(paths)
    texts = []
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text:
            texts.append(text)
    return texts


def documents(texts: list[str]) -> Iterator[str]:
    """The texts again and again, renamed a little each time, so that no two rounds are equal."""
    number = 0
    while True:
        for text in texts:
            yield text.replace("e ", f"e{number} ").replace("(", f"(r{number}") if number else text
        number += 1


def make_corpus(name: str, size: int) -> Path:
    path = DATA / name
    if not path.exists():
        print(f"making {name} …", flush=True)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as out:
            for text in documents(headers()):
                out.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
                if out.tell() >= size:
                    break
        temporary.rename(path)
    return path


def make_small(name: str, count: int) -> Path:
    """Documents of about 100 bytes."""
    path = DATA / name
    if not path.exists():
        print(f"making {name} …", flush=True)
        draw = random.Random(2)
        words = ["int", "return", "value", "for", "while", "auto", "const", "class", "void"]
        sentences = [" ".join(draw.choices(words, k=12)) for _ in range(5000)]
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as out:
            for number in range(count):
                out.write(f'{{"text": "{number} {sentences[number % 5000]}"}}\n')
        temporary.rename(path)
    return path


def measure(name: str, path: Path) -> Run:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    folder = name in ("penstock", "datatrove")
    out = str(OUT / ("dataset" if folder else "plain.parquet"))
    script = OUT / f"run_{name}.py"
    script.write_text(CONTENDERS[name].format(path=str(path), out=out))
    taken = run([sys.executable, str(script)])
    shutil.rmtree(OUT)
    return taken


def side_by_side(path: Path, rounds: int) -> dict[str, Run]:
    runs: dict[str, list[Run]] = {name: [] for name in CONTENDERS}
    for number in range(rounds):
        for name in CONTENDERS:
            if name == "datatrove" and number:
                continue  # minutes, not seconds: once is enough
            runs[name].append(measure(name, path))
    return {name: best(taken) for name, taken in runs.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="only the side-by-side at 1 GB")
    given = options.parse_args()
    DATA.mkdir(exist_ok=True)

    one = make_corpus("cpp_1gb.jsonl", 1 << 30)
    digest = warm(one)
    size_mb = one.stat().st_size / 1e6
    found = side_by_side(one, given.rounds)
    ours = found["penstock"]
    rows = [["", "wall s", "CPU s", "MB/s", "peak MB", "penstock is"]]
    for name, taken in found.items():
        ratio = "" if name == "penstock" else f"{taken.wall_s / ours.wall_s:.2f} x as fast"
        rows.append(
            [
                name,
                f"{taken.wall_s:.2f}",
                f"{taken.cpu_s:.2f}",
                f"{size_mb / taken.wall_s:.0f}",
                f"{taken.peak_mb:.0f}",
                ratio,
            ]
        )
    table(f"{size_mb:,.0f} MB of C++ headers as JSONL to zstd parquet", rows)
    results: dict[str, object] = {"data_sha256": digest, "bytes": one.stat().st_size, "runs": found}
    if not given.quick:
        results["size"] = by_size(one, given.rounds)
        results["documents"] = by_documents(given.rounds)
    keep("shard", results)


def by_size(one: Path, rounds: int) -> dict[str, Run]:
    """Memory is flat from 1 GB to 4 GB."""
    four = make_corpus("cpp_4gb.jsonl", 4 << 30)
    found = {}
    rows = [["", "wall s", "MB/s", "peak MB"]]
    for label, path in (("1 GB", one), ("4 GB", four)):
        warm(path)
        found[label] = taken = best([measure("penstock", path) for _ in range(rounds)])
        rate = path.stat().st_size / 1e6 / taken.wall_s
        rows.append([label, f"{taken.wall_s:.2f}", f"{rate:.0f}", f"{taken.peak_mb:.0f}"])
    table("penstock by size of the input", rows)
    return found


def by_documents(rounds: int) -> dict[str, Run]:
    """Time and memory per document do not grow with the corpus."""
    found = {}
    rows = [["", "wall s", "µs a document", "peak MB"]]
    for label, count in (("100 thousand", 100_000), ("1 million", 10**6), ("10 million", 10**7)):
        path = make_small(f"small_{count}.jsonl", count)
        warm(path)
        found[label] = taken = best([measure("penstock", path) for _ in range(rounds)])
        each = f"{taken.wall_s / count * 1e6:.2f}"
        rows.append([label, f"{taken.wall_s:.2f}", each, f"{taken.peak_mb:.0f}"])
    table("penstock by number of small documents", rows)
    return found


if __name__ == "__main__":
    main()
