"""Pretokenise, train and encode, beside the libraries that people use for it.

    python benchmarks/bench_tokenizer.py [count] [train] [encode] [sizes] [start]

Every contender is a process of its own with one thread, on the same bytes: 110 MB each of C++,
English and many languages (scripts/corpus). Times are CPU seconds of the job itself, without
imports. `count` and `train` also compare the answers: counts with the `regex` module, merges with
Hugging Face's.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import DATA, keep, table, warm

CORPORA = {"C++": "cpp.txt", "English": "english.txt", "many languages": "many.txt"}
END = "<|endoftext|>"
PATTERN = "cl100k"
TRAIN_VOCAB = 32_768
ENCODE_VOCAB = 65_536
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

Answer = dict[str, Any]


# The contenders: each takes a file and times its own work


def timed(work: Callable[[], Any]) -> tuple[Any, Answer]:
    """What the work gives, and the CPU and wall seconds that it took."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    result = work()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return result, {"cpu_s": cpu, "wall_s": wall}


def peak_mb() -> float:
    """The most that this process held; getrusage would add what its parent held at the fork."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def texts_of(path: Path) -> list[str]:
    return path.read_bytes().decode("utf-8", "replace").split(END)


def counts_hash(counts: list[tuple[bytes, int]]) -> str:
    digest = hashlib.sha256()
    for key, count in sorted(counts):
        digest.update(b"%d %d " % (len(key), count) + key)
    return digest.hexdigest()


def count_penstock(path: Path, _: Path) -> Answer:
    from penstock import pretokenize

    pretokenize(__file__, [END], 1, pattern=PATTERN)  # load the kernels, as others import
    counts, took = timed(lambda: pretokenize(path, [END], 1, pattern=PATTERN))
    return {**took, "answer": counts_hash(counts.items())}


def count_regex(path: Path, _: Path) -> Answer:
    import regex

    from penstock.tokenize.patterns import PATTERNS

    pattern, texts = regex.compile(PATTERNS[PATTERN].regex), texts_of(path)

    def work() -> Counter[str]:
        found: Counter[str] = Counter()
        for text in texts:
            found.update(pattern.findall(text))
        return found

    counts, took = timed(work)
    return {**took, "answer": counts_hash([(key.encode(), n) for key, n in counts.items()])}


def train_hf(path: Path, _: Path, vocab_size: int = TRAIN_VOCAB) -> Answer:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    from penstock.tokenize.patterns import PATTERNS

    level = pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[PATTERN].regex), "isolated"),
            level(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    texts = texts_of(path)
    _, took = timed(lambda: tokenizer.train_from_iterator(texts, trainer))
    model = json.loads(tokenizer.to_str())["model"]
    return {**took, "answer": merges_hash(model["vocab"], model["merges"])}


def merges_hash(vocab: dict[str, int], merges: list[Any]) -> str:
    pairs = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in merges]
    return hashlib.sha256(json.dumps([sorted(vocab.items()), pairs]).encode()).hexdigest()


def count_hf(path: Path, work: Path) -> Answer:
    """It has no other way to count than to train; without merges that is all it does."""
    return {**train_hf(path, work, 257), "answer": None}


def train_rustbpe(path: Path, _: Path, vocab_size: int = TRAIN_VOCAB) -> Answer:
    import rustbpe

    from penstock.tokenize.patterns import PATTERNS

    texts = texts_of(path)
    tokenizer = rustbpe.Tokenizer()
    _, took = timed(
        lambda: tokenizer.train_from_iterator(
            iter(texts), vocab_size, pattern=PATTERNS[PATTERN].regex
        )
    )
    return took


def count_rustbpe(path: Path, work: Path) -> Answer:
    return train_rustbpe(path, work, 256)


def train_gigatoken(path: Path, _: Path) -> Answer:
    import gigatoken

    data = path.read_bytes()
    _, took = timed(lambda: gigatoken.train_bpe(data, TRAIN_VOCAB, [END], separator=END.encode()))
    return took


def train_penstock(path: Path, work: Path) -> Answer:
    from penstock import TrainConfig, pretokenize, train_tokenizer

    pretokenize(__file__, [END], 1, pattern=PATTERN)
    config = TrainConfig(vocab_size=TRAIN_VOCAB, pattern=PATTERN)
    _, took = timed(lambda: train_tokenizer([path], work / "trained", config, num_processes=1))
    model = json.loads((work / "trained" / "tokenizer.json").read_bytes())["model"]
    return {**took, "answer": merges_hash(model["vocab"], model["merges"])}


def ids_hash(ids: Any) -> str:
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(ids, np.uint32).data).hexdigest()


def encode_penstock(path: Path, work: Path) -> Answer:
    import numpy as np
    import pyarrow as pa

    from penstock import Tokenizer

    tokenizer = Tokenizer.load(work / "tokenizer", parallel=False)
    column = pa.array(texts_of(path), pa.large_string())
    tokens, took = timed(lambda: tokenizer.encode_column(column))
    _, again = timed(lambda: tokenizer.encode_column(column))
    ids = np.concatenate([chunk.values.to_numpy() for chunk in tokens.chunks])
    return {**took, "warm_cpu_s": again["cpu_s"], "answer": ids_hash(ids)}


def encode_gigatoken(path: Path, work: Path) -> Answer:
    import awkward
    import gigatoken

    assert awkward
    tokenizer = gigatoken.Tokenizer(work / "tokenizer" / "tokenizer.json")
    texts = [text.encode() for text in texts_of(path)]
    tokenizer.encode_batch([text.encode() for text in PROBE], parallel=False)
    found, took = timed(lambda: tokenizer.encode_batch(texts, parallel=False))
    _, again = timed(lambda: tokenizer.encode_batch(texts, parallel=False))
    return {**took, "warm_cpu_s": again["cpu_s"], "answer": ids_hash(found.layout.content.data)}


def encode_tiktoken(path: Path, work: Path) -> Answer:
    import numpy as np
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    from penstock.tokenize.patterns import PATTERNS

    ranks = load_tiktoken_bpe(str(work / "tokenizer" / "tokenizer.tiktoken"))
    encoding = tiktoken.Encoding(
        "ours", pat_str=PATTERNS[PATTERN].regex, mergeable_ranks=ranks, special_tokens={END: 0}
    )
    texts = texts_of(path)
    found, took = timed(lambda: [encoding.encode_ordinary(text) for text in texts])
    return {**took, "answer": ids_hash(np.concatenate([np.array(ids, np.uint32) for ids in found]))}


def encode_hf(path: Path, work: Path) -> Answer:
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(work / "tokenizer" / "tokenizer.json"))
    texts = texts_of(path)
    found, took = timed(lambda: tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    ids = np.concatenate([np.array(row.ids, np.uint32) for row in found])
    return {**took, "answer": ids_hash(ids)}


PROBE = ["The first call prepares what later calls use: déjà vu, 123."]
JOBS: dict[str, Callable[[Path, Path], Answer]] = {
    name: work
    for name, work in list(globals().items())
    if name.startswith(("count_", "train_", "encode_")) and callable(work)
}


def child(job: str, path: Path, work: Path) -> None:
    answer = JOBS[job](path, work)
    answer["peak_mb"] = peak_mb()
    print(json.dumps(answer))


def contend(job: str, path: Path, work: Path) -> Answer:
    """The best of up to three runs of a contender; one that takes 20 s or more runs once.

    So a slow contender has fewer chances for a quiet moment of the machine.
    """
    runs: list[Answer] = []
    while not runs or (len(runs) < 3 and sum(run["cpu_s"] for run in runs) < 20):
        runs.append(run_once(job, path, work))
    answer = min(runs, key=lambda run: float(run["cpu_s"]))
    print(f"  {job} {path.name}: {answer['cpu_s']:.2f} s, {answer['peak_mb']:.0f} MB", flush=True)
    return answer


def run_once(job: str, path: Path, work: Path) -> Answer:
    """One contender in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--job", job, str(path), str(work)],
        env={**os.environ, **ONE_THREAD},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{job} failed:\n{done.stderr[-2000:]}")
    answer: Answer = json.loads(done.stdout.splitlines()[-1])
    return answer


# The sections


def rates(title: str, contenders: list[str], work: Path) -> dict[str, Any]:
    """MB per CPU-second of each contender on each corpus."""
    results: dict[str, Any] = {}
    for contender in contenders:
        results[contender] = {
            name: contend(contender, DATA / file, work) for name, file in CORPORA.items()
        }
    rows = [[title, *CORPORA, "same answer"]]
    for contender in contenders:
        found = results[contender]
        row = [contender]
        for name, file in CORPORA.items():
            size = (DATA / file).stat().st_size / 1e6
            row.append(f"{size / found[name]['cpu_s']:.1f}")
            if "warm_cpu_s" in found[name]:
                row[-1] += f" ({size / found[name]['warm_cpu_s']:.0f} warm)"
        answers = [
            {results[other][name].get("answer") for other in (contenders[0], contender)}
            for name in CORPORA
        ]
        known = all(found[name].get("answer") for name in CORPORA)
        row.append(
            "yes" if known and all(len(both) == 1 for both in answers) else "no" if known else ""
        )
        rows.append(row)
    table("MB per CPU-second, one thread", rows)
    return results


def bench_count(work: Path) -> dict[str, Any]:
    return rates("count", ["count_penstock", "count_regex", "count_hf", "count_rustbpe"], work)


def bench_train(work: Path) -> dict[str, Any]:
    path = work / "all.txt"
    with path.open("wb") as file:
        for name in CORPORA.values():
            file.write((DATA / name).read_bytes() + END.encode())
    contenders = ["train_penstock", "train_gigatoken", "train_rustbpe", "train_hf"]
    results = {job: contend(job, path, work) for job in contenders}
    ours = results["train_penstock"]
    rows = [["train 32K", "CPU s", "wall s", "peak MB", "times ours"]]
    for job, answer in results.items():
        rows.append(
            [
                job,
                f"{answer['cpu_s']:.1f}",
                f"{answer['wall_s']:.1f}",
                f"{answer['peak_mb']:.0f}",
                f"{answer['cpu_s'] / ours['cpu_s']:.2f}",
            ]
        )
    table(f"{path.stat().st_size / 1e6:.0f} MB, one thread (gigatoken: gpt2 pattern)", rows)
    same = ours["answer"] == results["train_hf"]["answer"]
    print(f"  same vocabulary and merges as Hugging Face's: {'yes' if same else 'NO'}")
    path.unlink()
    return {**results, "same_merges_as_hf": same}


def bench_encode(work: Path) -> dict[str, Any]:
    from penstock import TrainConfig, train_tokenizer

    train_tokenizer(
        [DATA / name for name in CORPORA.values()],
        work / "tokenizer",
        TrainConfig(vocab_size=ENCODE_VOCAB, pattern=PATTERN),
    )
    return rates(
        "encode", ["encode_hf", "encode_tiktoken", "encode_gigatoken", "encode_penstock"], work
    )


def grow(path: Path, size: int) -> None:
    """A file of that size: real text again and again, thousands of its words new each time."""
    parts = [(DATA / name).read_bytes()[:8_000_000] for name in CORPORA.values()]
    written = turn = 0
    with path.open("wb") as file:
        while written < size:
            mark = b"%x" % (turn * 2654435761 % (1 << 32))
            text = parts[turn % len(parts)].replace(b"e ", b"e" + mark.translate(LETTERS) + b" ")
            text = text[: size - written]
            file.write(text)
            written += len(text)
            turn += 1
        os.fsync(file.fileno())
    warm(path)


LETTERS = bytes.maketrans(b"0123456789", b"ghijklmnop")
SIZES = """
import json, sys
from penstock import pretokenize
counts = pretokenize(sys.argv[1], ["<|endoftext|>"], max_memory_gb=float(sys.argv[2]))
status = open("/proc/self/status").read()
peak = int(status.partition("VmHWM:")[2].split()[0])
print(json.dumps({**counts.stats, "peak_mb": peak / 1024}))
"""


def bench_sizes(work: Path) -> dict[str, Any]:
    """Document 004's table, with limits of 2 GB and 0.5 GB."""
    documented = {10: ("3 s", "200"), 100: ("25 s", "400"), 1000: ("240 s", "600")}
    documented[10_000] = ("2100 s", "800")
    results: dict[str, Any] = {}
    rows = [["size", "limit", "seconds", "peak MB", "distinct", "spills", "was", "was MB"]]
    for megabytes, was in documented.items():
        path = work / "grown.txt"
        grow(path, megabytes * 1_000_000)
        for limit in (2.0, 0.5):
            done = subprocess.run(
                [sys.executable, "-c", SIZES, str(path), str(limit)],
                capture_output=True,
                text=True,
                check=True,
            )
            stats = json.loads(done.stdout)
            results[f"{megabytes} MB, {limit} GB"] = stats
            rows.append(
                [
                    f"{megabytes:,} MB",
                    f"{limit} GB",
                    f"{stats['seconds']:.2f}",
                    f"{stats['peak_mb']:.0f}",
                    f"{stats['distinct']:,}",
                    str(stats["spills"]),
                    *was,
                ]
            )
            print("  " + "  ".join(rows[-1]), flush=True)
        path.unlink()
    table("pretokenize on two cores; before: the figures that document 004 gives", rows)
    return results


def bench_start(_: Path) -> dict[str, Any]:
    """How long a command waits for its kernels, once they are compiled."""
    code = (
        "import time, penstock.tokenize.train, penstock.tokenize.pretokenize as p\n"
        "from penstock import kernels\n"
        "began = time.perf_counter()\n"
        "for kernel in kernels.known: kernel.prepare()\n"
        "print(time.perf_counter() - began)\n"
    )
    waits = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
        for _ in range(5)
    ]
    print(f"\n  every kernel of a tokenizer command is ready after {min(waits):.3f} s")
    return {"seconds": waits}


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        child(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return
    sections = {
        "count": bench_count,
        "train": bench_train,
        "encode": bench_encode,
        "sizes": bench_sizes,
        "start": bench_start,
    }
    wanted = sys.argv[1:] or list(sections)
    subprocess.run([DATA.parent.parent / "scripts" / "corpus", *CORPORA.values()], check=True)
    hashes = {name: warm(DATA / name) for name in CORPORA.values()}
    results: dict[str, Any] = {"data": hashes}
    with tempfile.TemporaryDirectory(dir=DATA) as folder:
        for name in wanted:
            print(f"\n{name}", flush=True)
            results[name] = sections[name](Path(folder))
    keep("tokenizer" if len(wanted) == len(sections) else "tokenizer_" + "_".join(wanted), results)


if __name__ == "__main__":
    main()
