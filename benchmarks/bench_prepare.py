"""Read, chunk, filter and deduplicate C++, beside the tools that people use for it.

    python benchmarks/bench_prepare.py [chunk] [profile] [filters] [dedup] [memory] [generations]
                                       [--small]

The corpus: real C++ headers, 10 KB on average (the largest are left out until they are), as JSON
lines. Contenders that are too slow for all of it get the first files of the same corpus, and a rate
only. `--small` takes little of everything: it shows that the benchmark runs, not how fast.

chunk        JSON lines to parquet: whole commands, so the start of the interpreter counts; "then"
             are the files per second without what the same command takes for one file of a line
profile      where penstock's own time goes, one worker
filters      penstock's presets, and datatrove's filters
dedup        signatures and index, and datatrove's MinHash; recall and precision
memory       the most that all processes of `penstock chunk` hold together
generations  a second dataset from the same inputs with another budget
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from bench_tokenizer import END, ONE_THREAD, Answer
from measure import DATA, HERE, Run, best, keep, run, table, warm

TOKENIZER = DATA / "tokenizer_65k"
OUT = DATA / "out_prepare"
CODE = (".h", ".hpp", ".ipp", ".hh", ".cpp", ".inc", ".def")
MEAN_BYTES = 10_000
WORKERS = 2
PENSTOCK = [sys.executable, "-c", "from penstock.cli import main; main()", "chunk"]
HAS_SPACY = importlib.util.find_spec("spacy") is not None
MEMORY_HZ = 20
LIMIT_MB = 2048


# Corpora: JSON lines, made once


def real_files() -> list[Path]:
    """C++ files of 10 KB on average, in a shuffled order that does not change."""
    subprocess.run([HERE.parent / "scripts" / "corpus", "cpp"], check=True, stdout=sys.stderr)
    found = []
    for folder, _, names in os.walk(DATA / "cpp", followlinks=False):
        for name in names:
            path = Path(folder) / name
            if path.suffix in CODE and not path.is_symlink() and (size := path.stat().st_size):
                found.append((size, str(path)))
    found.sort()
    while sum(size for size, _ in found) > MEAN_BYTES * len(found):
        found.pop()
    random.Random(1).shuffle(found)
    return [Path(path) for _, path in found]


def cpp_texts() -> Iterator[str]:
    for path in real_files():
        try:
            yield path.read_bytes().decode()
        except UnicodeDecodeError:
            continue


def english_texts() -> Iterator[str]:
    """Documents of 5 KB, to the next line."""
    path = DATA / "english.txt"
    subprocess.run([HERE.parent / "scripts" / "corpus", path.name], check=True, stdout=sys.stderr)
    held: list[str] = []
    size = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            held.append(line.replace(END, ""))
            size += len(line)
            if size >= 5000 or END in line:
                if text := "".join(held).strip():
                    yield text + "\n"
                held, size = [], 0


def corpus(kind: str, megabytes: float) -> tuple[Path, int, int]:
    """The first documents of a kind, so many megabytes of text; how many, and how many bytes."""
    path = DATA / f"prepare_{kind}_{megabytes:g}mb.jsonl"
    about = path.with_suffix(".json")
    if not about.exists():
        print(f"  making {path.name} …", flush=True)
        texts = cpp_texts() if kind == "cpp" else english_texts()
        documents = size = 0
        with path.open("w", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                documents += 1
                size += len(text.encode())
                if size >= megabytes * 1e6:
                    break
        about.write_text(json.dumps([documents, size, warm(path)]))
    documents, size, _ = json.loads(about.read_text())
    return path, documents, size


def hashes() -> dict[str, str]:
    """Of every corpus that there is by now."""
    return {
        path.stem: json.loads(path.read_text())[2] for path in sorted(DATA.glob("prepare_*mb.json"))
    }


def make_tokenizer() -> None:
    """65,536 tokens of the C++ corpus."""
    if not (TOKENIZER / "tokenizer.json").exists():
        subprocess.run([HERE.parent / "scripts" / "corpus", "cpp.txt"], check=True)
        code = "from penstock.cli import main; main()"
        arguments = ["tokenizer", "train", "--inputs", str(DATA / "cpp.txt")]
        arguments += ["--output", str(TOKENIZER), "--vocab_size", "65536"]
        subprocess.run([sys.executable, "-c", code, *arguments], check=True)


# Running


def job(name: str, /, **given: Any) -> Answer:
    """A job of prepare_jobs.py in a process of its own, with one thread."""
    done = subprocess.run(
        [sys.executable, str(HERE / "prepare_jobs.py"), name, json.dumps(given, default=str)],
        env={**os.environ, **ONE_THREAD, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    print(f"  {name} {' '.join(str(value).rpartition('/')[2] for value in given.values())}: done",
          flush=True)  # fmt: skip
    return answer


def chunk_command(
    paths: list[Path], out: Path, max_tokens: int, workers: int, *more: str
) -> list[str]:
    return [
        *PENSTOCK, "--inputs", *map(str, paths), "--parquet_dir", str(out),
        "--tokenizer", str(TOKENIZER), "--max_tokens", str(max_tokens),
        "--workers", str(workers), *more,
    ]  # fmt: skip


def contend(name: str, path: Path, max_tokens: int, rounds: int) -> Run:
    """The best of some runs of a contender, from JSON lines to parquet files."""
    warm(path)
    runs = []
    for _ in range(rounds):
        shutil.rmtree(OUT, ignore_errors=True)
        OUT.mkdir(parents=True)
        kind, _, workers = name.partition(" x")
        if kind == "penstock":
            command = chunk_command([path], OUT / "set", max_tokens, int(workers))
        else:
            rival = [sys.executable, str(HERE / "chunk_rivals.py"), kind, str(path)]
            command = [*rival, str(OUT / "set"), str(TOKENIZER), str(max_tokens), workers]
        runs.append(run(command, TOKENIZERS_PARALLELISM="false"))
        shutil.rmtree(OUT)
    return best(runs)


# The sections


def bench_chunk(small: bool) -> Answer:
    """Files per second, and whether the chunks are right."""
    whole, some, few, sample = (4, 2, 0.3, 1) if small else (300, 30, 2, 5)
    slices: dict[str, float] = {"penstock x2": whole, "penstock x1": whole, "braces x2": some}
    slices |= {"tree_sitter x2": some, "semantic x2": few}
    one = DATA / "prepare_one.jsonl"
    one.write_text('{"text": "int f() { return 1; }\\n"}\n')
    sample_path, _, _ = corpus("cpp", sample)
    results: Answer = {}
    for max_tokens in (1024, 16_384):
        rows = [["", "MB", "files", "wall s", "start s", "files/s", "then", "MB/s",
                 "MB/CPU s", "penstock is", "over", "largest", "lossless", "fill"]]  # fmt: skip
        found: Answer = {}
        for name, megabytes in slices.items():
            path, files, size = corpus("cpp", megabytes)
            rounds = 3 if name.startswith("penstock") and not small else 1
            contend(name, one, max_tokens, 1)  # so that bytecode and kernels are there
            start = contend(name, one, max_tokens, rounds)
            taken = contend(name, path, max_tokens, rounds)
            kind = name.partition(" ")[0]
            quality = found.get(f"{kind} x2", {}).get("quality") or job(
                "chunk_quality", name=kind, path=sample_path, tokenizer=TOKENIZER,
                max_tokens=max_tokens,
            )  # fmt: skip
            rate = size / 1e6 / taken.wall_s
            ours = found.get("penstock x2", {}).get("mb_per_s", rate)
            found[name] = {
                "bytes": size, "files": files, "run": taken, "start": start,
                "files_per_s": files / taken.wall_s, "mb_per_s": rate,
                "mb_per_cpu_s": size / 1e6 / taken.cpu_s, "penstock_is": ours / rate,
                "quality": quality,
            }  # fmt: skip
            fill, rest_s = quality["fill"], taken.wall_s - start.wall_s
            after = f"{files / rest_s:,.0f}" if rest_s > start.wall_s / 4 else ""
            rows.append([
                name, f"{size / 1e6:.1f}", f"{files:,}", f"{taken.wall_s:.2f}",
                f"{start.wall_s:.2f}", f"{files / taken.wall_s:,.0f}", after,
                f"{rate:.2f}", f"{size / 1e6 / taken.cpu_s:.2f}", f"{ours / rate:.1f} x",
                f"{quality['over']} of {quality['chunks']:,}", f"{quality['largest']:,}",
                "yes" if not quality["not_lossless"] else f"not {quality['not_lossless']}",
                "" if fill is None else f"{fill:.1%}",
            ])  # fmt: skip
            print(f"  {name} at {max_tokens:,}: {rate:.2f} MB/s", flush=True)
        table(f"JSON lines to parquet, chunks of {max_tokens:,} tokens, x2: two processes", rows)
        results[str(max_tokens)] = found
    ours = results["16384"]["penstock x2"]["files_per_s"]
    print(f"  document 000 gives 1,000 files/s at 16,384; penstock is {ours / 1000:.1f} times that")
    return results


def bench_profile(small: bool) -> Answer:
    path, files, size = corpus("cpp", 4 if small else 100)
    results: Answer = {}
    plans = {"chunk": ("none", "none"), "filter, dedup, chunk": ("code", "near")}
    for label, (preset, dedup) in plans.items():
        found = job("profile", path=path, tokenizer=TOKENIZER, max_tokens=1024, preset=preset,
                    dedup=dedup)  # fmt: skip
        results[label] = {"bytes": size, "files": files, **found}
        rows = [[label, "CPU s", "share", "MB/CPU s", "µs a file", "calls"]]
        stages = sorted(found["stages"].items(), key=lambda item: -item[1])
        for name, seconds in [*stages, ("all", found["cpu_s"])]:
            rows.append([
                name, f"{seconds:.3f}", f"{seconds / found['cpu_s']:.1%}",
                f"{size / 1e6 / max(seconds, 1e-6):,.0f}", f"{seconds / files * 1e6:.1f}",
                f"{found['calls'].get(name, 1):,}",
            ])  # fmt: skip
        table(f"{size / 1e6:.0f} MB, {files:,} files, one worker, after the start", rows)
        extra = found["pack_unpack_s"]
        print(f"  more workers also pack and unpack: {size / 1e6 / extra:,.0f} MB/CPU s")
    return results


def bench_filters(small: bool) -> Answer:
    whole, some = (4, 0.3) if small else (50, 4)
    results: Answer = {}
    for kind in ("cpp", "english"):
        path, documents, size = corpus(kind, whole)
        found: Answer = {}
        for preset in ("code", "web"):
            found[f"penstock {preset}"] = {
                **job("filters_penstock", path=path, preset=preset), "bytes": size,
            }  # fmt: skip
        path, documents, size = corpus(kind, some)
        for words in ("split", *(["spacy"] if HAS_SPACY else [])):
            for every in (False, True):
                name = f"datatrove, {words}, {'every filter' if every else 'to the first refusal'}"
                answer = job("filters_datatrove", path=path, words=words, every=every)
                found[name] = {**answer, "bytes": size}
        ours = found["penstock web"]["bytes"] / found["penstock web"]["cpu_s"]
        rows = [["", "MB", "MB/CPU s", "documents/s", "kept", "penstock web is"]]
        for name, answer in found.items():
            rate = answer["bytes"] / answer["cpu_s"]
            documents = answer["documents"]
            rows.append([
                name, f"{answer['bytes'] / 1e6:.1f}", f"{rate / 1e6:.2f}",
                f"{documents / answer['cpu_s']:,.0f}", f"{answer['kept'] / documents:.1%}",
                "" if name.startswith("penstock") else f"{ours / rate:.0f} x as fast",
            ])  # fmt: skip
        table(f"filters, {kind}; datatrove: Gopher repetition and quality, C4, FineWeb", rows)
        if not HAS_SPACY:
            print("  without spaCy, which is not installed: words between white space only")
        results[kind] = found
    return results


def bench_dedup(small: bool) -> Answer:
    whole, some = (4, 0.3) if small else (100, 4)
    results: Answer = {}
    for kind in ("cpp", "english"):
        path, _, size = corpus(kind, whole)
        found: Answer = {"penstock": {**job("dedup_penstock", path=path), "bytes": size}}
        path, _, size = corpus(kind, some)
        for words in ("split", *(["spacy"] if HAS_SPACY else [])):
            answer = job("dedup_datatrove", path=path, words=words)
            found[f"datatrove, {words}"] = {**answer, "bytes": size}
        ours = found["penstock"]["bytes"] / found["penstock"]["cpu_s"]
        rows = [["", "MB", "MB/CPU s", "documents/s", "penstock is"]]
        for name, answer in found.items():
            rate = answer["bytes"] / answer["cpu_s"]
            rows.append([
                name, f"{answer['bytes'] / 1e6:.1f}", f"{rate / 1e6:.2f}",
                f"{answer['documents'] / answer['cpu_s']:,.0f}",
                "" if name == "penstock" else f"{ours / rate:.0f} x as fast",
            ])  # fmt: skip
        table(f"near duplicates, {kind}; datatrove: its hashing alone", rows)
        one = found["penstock"]
        print(f"  penstock: signatures {one['bytes'] / 1e6 / one['signatures_cpu_s']:.0f} MB/CPU s,"
              f" index {one['documents'] / one['decide_cpu_s']:,.0f} documents/CPU s")  # fmt: skip
        results[kind] = found
    results["memory"] = held = job("dedup_memory", count=100_000 if small else 2_000_000)
    print(f"  an index of {held['kept']:,}: {held['resident_per_document']:.0f} bytes a document"
          f" resident, {held['index_per_document']:.0f} by its own account, at most"
          f" {held['most_per_document']};"
          f" {held['documents'] / held['cpu_s']:,.0f} documents/CPU s")  # fmt: skip
    path, _, _ = corpus("cpp", whole)
    results["quality"] = right = job("dedup_quality", path=path, count=400 if small else 5000)
    print(f"  of {right['documents']:,} headers and near copies {right['repeat']:,} repeat one that"
          f" was kept (Jaccard 0.8, exactly): recall {right['recall']:.4f}, precision"
          f" {right['precision']:.4f}, the least alike dropped at"
          f" {right['least_likeness_dropped']:.3f}")  # fmt: skip
    return results


def bench_memory(small: bool) -> Answer:
    make = {"one long line": make_line, "a table of 2 MB": make_table}
    inputs = {name: [made(small)] for name, made in make.items()}
    if small:
        inputs = {"all": [corpus("cpp", 4)[0], corpus("cpp", 2)[0]], **inputs}
    else:
        large = [DATA / "cpp_4gb.jsonl", DATA / "cpp_1gb.jsonl"]
        if missing := [path.name for path in large if not path.exists()]:
            sys.exit(f"no {missing[0]}: run benchmarks/bench_shard.py first, which makes it")
        inputs = {"5 GB": large, **inputs}
    results: Answer = {}
    rows = [["", "MB", "wall s", "MB/s", "peak PSS MB", "peak RSS MB", "sum of VmHWM", "limit"]]
    for name, paths in inputs.items():
        for steps in ([], ["--filter", "code", "--dedup", "near"]):
            shutil.rmtree(OUT, ignore_errors=True)
            label = name + (", filter and dedup" if steps else "")
            size = sum(path.stat().st_size for path in paths)
            command = chunk_command(paths, OUT, 1024, WORKERS, *steps)
            results[label] = found = {"bytes": size, **watch(command)}
            shutil.rmtree(OUT)
            rows.append([
                label, f"{size / 1e6:,.0f}", f"{found['wall_s']:.1f}",
                f"{size / 1e6 / found['wall_s']:.0f}", f"{found['pss_mb']:,.0f}",
                f"{found['rss_mb']:,.0f}", f"{found['hwm_mb']:,.0f}", f"{LIMIT_MB:,}",
            ])  # fmt: skip
            print("  " + "  ".join(rows[-1]), flush=True)
    table(f"memory of all processes together, sampled {MEMORY_HZ} times a second", rows)
    return results


def make_line(small: bool) -> Path:
    size = 10 if small else 200
    path = DATA / f"prepare_line_{size}.jsonl"
    if not path.exists():
        text = (DATA / "cpp.txt").read_text("utf-8", "replace").replace(END, "")
        text = (text * 2)[: size * 1_000_000]
        path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return path


def make_table(_: bool) -> Path:
    path = DATA / "prepare_table.jsonl"
    if not path.exists():
        draw = random.Random(5)
        lines = (
            "  " + ", ".join(f"0x{draw.randrange(256):02x}" for _ in range(16)) + ",\n"
            for _ in range(2_000_000 // 98)
        )
        text = "static const unsigned char table[] = {\n" + "".join(lines) + "};\n"
        path.write_text(json.dumps({"text": text}) + "\n")
    return path


def watch(command: list[str]) -> Answer:
    """Run a command; the most memory that it and its children held at one moment."""
    began = time.perf_counter()
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = {"Rss": 0, "Pss": 0}
    most: dict[int, int] = {}
    while process.poll() is None:
        now = {"Rss": 0, "Pss": 0}
        for pid in [process.pid, *children(process)]:
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            for key in now:
                now[key] += kilobytes(rollup, key)
            most[pid] = max(most.get(pid, 0), kilobytes(status, "VmHWM"))
        peak = {key: max(peak[key], now[key]) for key in peak}
        time.sleep(1 / MEMORY_HZ)
    wall_s = time.perf_counter() - began
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{process.stderr.read().decode()[-2000:]}")
    return {
        "wall_s": wall_s, "pss_mb": peak["Pss"] / 1024, "rss_mb": peak["Rss"] / 1024,
        "hwm_mb": sum(most.values()) / 1024, "processes": len(most),
    }  # fmt: skip


def children(process: psutil.Process) -> list[int]:
    try:
        return [child.pid for child in process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kilobytes(text: str, key: str) -> int:
    _, found, rest = text.partition(f"{key}:")
    return int(rest.split()[0]) if found else 0


def bench_generations(small: bool) -> Answer:
    """Where texts are redacted nothing is reused; where they are not, the verdicts are."""
    path, files, size = corpus("cpp", 4 if small else 100)
    results: Answer = {}
    rows = [["", "wall s", "CPU s", "MB/s"]]
    plans = {"secrets kept": ["--secrets", "keep", "--pii", "keep"], "secrets redacted": []}
    for label, more in plans.items():
        steps = ["--filter", "code", "--dedup", "near", *more]
        shutil.rmtree(OUT, ignore_errors=True)
        runs = {
            f"{label}: first, 1,024": run(chunk_command([path], OUT / "a", 1024, WORKERS, *steps)),
            f"{label}: again, 4,096": run(chunk_command([path], OUT / "a", 4096, WORKERS, *steps)),
            f"{label}: anew, 4,096": run(chunk_command([path], OUT / "b", 4096, WORKERS, *steps)),
        }
        folders = [OUT / "a" / "_gen" / "00002", OUT / "b"]
        same = len({shards_hash(folder) for folder in folders}) == 1
        for name, taken in runs.items():
            rate = size / 1e6 / taken.wall_s
            rows.append([name, f"{taken.wall_s:.2f}", f"{taken.cpu_s:.2f}", f"{rate:.1f}"])
        results[label] = {**runs, "same_shards_as_anew": same}
        shutil.rmtree(OUT)
    table(f"another --max_tokens for {size / 1e6:.0f} MB, {files:,} files", rows)
    for label, found in results.items():
        print(f"  {label}: the same shards as made anew: {found['same_shards_as_anew']}")
    return results


def shards_hash(folder: Path) -> str:
    return " ".join(f"{path.name} {warm(path)}" for path in sorted(folder.glob("*.parquet")))


SECTIONS = {
    "chunk": bench_chunk,
    "profile": bench_profile,
    "filters": bench_filters,
    "dedup": bench_dedup,
    "memory": bench_memory,
    "generations": bench_generations,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    options.add_argument("--small", action="store_true", help="little of everything")
    given = options.parse_args()
    wanted = given.sections or list(SECTIONS)
    # modules are compiled once, as those of any installed package are
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(DATA / "pycache")
    make_tokenizer()
    results: dict[str, Any] = {"tokenizer": warm(TOKENIZER / "tokenizer.json")}
    for name in wanted:
        print(f"\n{name}", flush=True)
        results[name] = SECTIONS[name](given.small)
    results["data"] = hashes()
    name = "prepare" if len(wanted) == len(SECTIONS) else "prepare_" + "_".join(wanted)
    keep(f"{name}_small" if given.small else name, results)


if __name__ == "__main__":
    main()
