"""What bench_prepare.py measures within a process of its own: each job prints one line of JSON.

python benchmarks/prepare_jobs.py JOB '{"path": …}'
"""

import functools
import json
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from bench_tokenizer import Answer, timed
from measure import DATA

from penstock.kernels import PAD
from penstock.records import Documents

PIECE_BYTES = 8 << 20


# Documents


def texts_in(path: str) -> list[str]:
    with open(path, "rb") as file:
        return [json.loads(line)["text"] for line in file]


def as_documents(texts: Sequence[bytes]) -> Documents:
    at = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return Documents(np.frombuffer(b"".join(texts) + bytes(PAD), np.uint8), at, at[:-1], at[1:])


def pieces(texts: Sequence[str]) -> Iterator[Documents]:
    """As many at a time as a worker takes."""
    held: list[bytes] = []
    size = 0
    for text in texts:
        held.append(text.encode())
        size += len(held[-1])
        if size >= PIECE_BYTES:
            yield as_documents(held)
            held, size = [], 0
    if held:
        yield as_documents(held)


def fastest(work: Callable[[], Any], rounds: int = 3) -> tuple[Any, Answer]:
    """The result, and the least CPU time of several rounds, the first of which loads kernels."""
    runs = [timed(work) for _ in range(rounds + 1)][1:]
    return min(runs, key=lambda run: float(run[1]["cpu_s"]))


# Chunks: are they what was asked for?


def chunk_quality(name: str, path: str, tokenizer: str, max_tokens: int) -> Answer:
    """Chunks over the budget as Hugging Face counts, files that are not put together again by
    their chunks, and how full the chunks are that are not their file's last."""
    from chunk_rivals import RESERVE, open_rival
    from tokenizers import Tokenizer

    texts = texts_in(path)
    languages: dict[str, int] = {}
    if name == "penstock":
        chunks, languages = _chunks_of_penstock(path, tokenizer, max_tokens)
    else:
        chunks = open_rival(name, tokenizer, max_tokens)(texts)
    counter = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    counts = [
        [len(found) for found in counter.encode_batch_fast(parts, add_special_tokens=False)]
        for parts in chunks
    ]
    budget = max_tokens - RESERVE
    flat = [count for one in counts for count in one]
    inner = [count for one in counts for count in one[:-1]]
    whole = Counter("".join(parts) for parts in chunks)
    return {
        "files": len(texts),
        "chunks": len(flat),
        "over": sum(count > budget for count in flat),
        "largest": max(flat),
        "not_lossless": len(texts) - (whole & Counter(texts)).total(),
        "fill": sum(inner) / len(inner) / budget if inner else None,
        "languages": languages,
    }


def _chunks_of_penstock(
    path: str, tokenizer: str, max_tokens: int
) -> tuple[list[list[str]], dict[str, int]]:
    import pyarrow.parquet as pq

    from penstock import ChunkConfig, RunConfig
    from penstock.produce.dataset import prepare_dataset

    with tempfile.TemporaryDirectory(dir=DATA) as folder:
        prepare_dataset(
            [path], folder, [ChunkConfig(max_tokens=max_tokens)], run=RunConfig(workers=1),
            tokenizer=tokenizer,
        )  # fmt: skip
        rows = [
            row
            for file in Path(folder).glob("*.parquet")
            for row in pq.read_table(file).to_pylist()
        ]
    rows.sort(key=lambda row: (row["source"], row["part"]))
    files: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        files[row["source"]].append(row["text"])
    languages = {row["source"]: row["language"] for row in rows}
    return list(files.values()), dict(Counter(languages.values()))


# The profile


class Stages:
    """CPU seconds of threads by stage, what a stage calls not included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._local = threading.local()
        self._lock = threading.Lock()

    def timed(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def measured(*args: Any, **options: Any) -> Any:
            with self._enter(stage):
                return work(*args, **options)

        return measured

    def timed_each(self, stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Of an iterator, every step."""

        @functools.wraps(work)
        def measured(*args: Any, **options: Any) -> Any:
            items = work(*args, **options)
            while True:
                with self._enter(stage):
                    try:
                        item = next(items)
                    except StopIteration:
                        return
                yield item

        return measured

    def within(self, stage: str) -> bool:
        return stage in [name for name, _ in getattr(self._local, "stack", [])]

    def _enter(self, stage: str) -> "_Entered":
        return _Entered(self, stage)

    def wrap(self, stage: str, owner: Any, name: str, *, each: bool = False) -> None:
        work = getattr(owner, name)
        setattr(owner, name, (self.timed_each if each else self.timed)(stage, work))


class _Entered:
    def __init__(self, stages: Stages, stage: str) -> None:
        self._stages, self._stage = stages, stage

    def __enter__(self) -> None:
        local = self._stages._local
        if not hasattr(local, "stack"):
            local.stack = []
        local.stack.append([self._stage, 0.0])
        self._began = time.thread_time()

    def __exit__(self, *_: object) -> None:
        took = time.thread_time() - self._began
        stages = self._stages
        stack = stages._local.stack
        _, inner = stack.pop()
        if stack:
            stack[-1][1] += took
        with stages._lock:
            stages.seconds[self._stage] += took - inner
            stages.calls[self._stage] += 1


def profile(path: str, tokenizer: str, max_tokens: int, preset: str, dedup: str) -> Answer:
    """One run with one worker; CPU seconds of each stage."""
    from penstock import FilterConfig, RunConfig
    from penstock.prepare import chunk, rows, task
    from penstock.prepare.dedup import Index
    from penstock.prepare.steps import make_steps
    from penstock.produce import dataset as faces
    from penstock.produce import gather
    from penstock.produce import producer as produce
    from penstock.produce.dedup import Repeats
    from penstock.store.store import open_store
    from penstock.tokenize.tokenizer import Tokenizer
    from penstock.work import pool

    stages = Stages()
    wrap = stages.wrap
    wrap("find pieces", produce.Producer, "_pieces_by_input", each=True)
    wrap("find pieces", produce.Producer, "_mixed_pieces", each=True)
    wrap("read", task, "read_piece")
    wrap("language", task, "detect")
    wrap("filter: measure", task, "features")
    wrap("filter: judge", task, "judge")
    wrap("filter: note, drop", rows.Work, "note_features")
    wrap("filter: note, drop", rows.Work, "drop")
    wrap("filter: redact", rows.Work, "redact")
    wrap("dedup: signatures", task, "signatures")
    wrap("outline", chunk, "outline_documents")
    wrap("plan", chunk._Plan, "__init__")
    wrap("plan", chunk._Plan, "run")
    wrap("describe", chunk.Chunker, "_describe")
    wrap("rows", rows.Work, "rows")
    wrap("rows", rows.Work, "finish")
    wrap("dedup: decide", Index, "decide")
    wrap("dedup: decide", Repeats, "decide")
    wrap("fill", produce.Producer, "_fill")
    wrap("submit, commit", produce.Producer, "_submit")
    wrap("parquet encode", gather, "write_rows")
    wrap("load tokenizer", Tokenizer, "load")
    encode = Tokenizer.encode_rows

    def encode_rows(self: Tokenizer, *args: Any) -> Any:
        stage = "encode again" if stages.within("plan") else "encode"
        return stages.timed(stage, encode)(self, *args)

    setattr(Tokenizer, "encode_rows", encode_rows)  # noqa: B010

    class OneThread(pool.HerePool):
        """Encodes in the thread that asks; and packs, as a process would have to."""

        def __init__(self, open_task: pool.OpenTask, setup: dict[str, Any]) -> None:
            super().__init__(open_task, {**setup, "parallel": False})
            inner = self._task

            def task_and_pack(request: Any) -> Any:
                result = inner(request)
                with stages._enter("pack, unpack"):
                    task.unpack(bytearray(b"".join(task.pack(result))))
                return result

            self._task = stages.timed("task, other", task_and_pack)

    here = lambda open_task, setup, _: OneThread(open_task, setup)  # noqa: E731
    setattr(gather, "open_pool", here)  # noqa: B010
    steps = make_steps(
        filter=FilterConfig(preset=preset) if preset != "none" else None,
        dedup=dedup,
        chunk=chunk.ChunkConfig(max_tokens=max_tokens),
    )
    run = RunConfig(workers=1)
    with tempfile.TemporaryDirectory(dir=DATA) as folder:
        store = type(open_store(folder, make=True))
        wrap("store: hash, write, fsync", store, "put")
        warm = Path(folder) / "warm.jsonl"
        warm.write_text(json.dumps({"text": "int f() { return 1; }\n" * 200}) + "\n")
        faces.prepare_dataset([warm], f"{folder}/warm", steps, run=run, tokenizer=tokenizer)
        stages.seconds.clear()
        stages.calls.clear()
        outcome, took = timed(
            lambda: faces.prepare_dataset(
                [path], f"{folder}/out", steps, run=run, tokenizer=tokenizer
            )
        )
    known = next(iter(outcome.state.inputs.values()))
    named = sum(stages.seconds.values())
    extra = stages.seconds.pop("pack, unpack")
    stages.seconds["not in a stage"] = took["cpu_s"] - named
    return {
        **took,
        "cpu_s": took["cpu_s"] - extra,
        "pack_unpack_s": extra,
        "stages": dict(stages.seconds),
        "calls": dict(stages.calls),
        "kept": known.kept,
        "rows": known.rows,
    }


# Filters


def filters_penstock(path: str, preset: str) -> Answer:
    from penstock.prepare.filters import FilterConfig, features, judge

    config = FilterConfig(preset=preset)
    given = list(pieces(texts_in(path)))

    def work() -> list[Any]:
        return [judge(features(some, config), config, some) for some in given]

    verdicts, took = fastest(work)
    dropped: Counter[str] = Counter()
    for one in verdicts:
        dropped.update(one.counts())
    documents = sum(map(len, given))
    return {**took, "documents": documents, "kept": documents - dropped.total(), "dropped": dropped}


def _split_words() -> None:
    """Let datatrove take words between white space, which costs next to nothing, not spaCy's."""
    minhash = import_module("datatrove.pipeline.dedup.minhash")
    word_tokenizers = import_module("datatrove.utils.word_tokenizers")
    words = word_tokenizers.WhitespaceTokenizer()
    words.word_tokenize = str.split
    for module in (minhash, word_tokenizers):
        setattr(module, "load_word_tokenizer", lambda _: words)  # noqa: B010


def filters_datatrove(path: str, words: str, every: bool) -> Answer:
    """In FineWeb's order; a document that one filter refuses is not shown to the next, or is."""
    document_of = import_module("datatrove.data").Document
    known = import_module("datatrove.pipeline.filters")
    if words == "split":
        _split_words()
    filters = [
        known.GopherRepetitionFilter(),
        known.GopherQualityFilter(),
        known.C4QualityFilter(filter_no_terminal_punct=False),
        known.FineWebQualityFilter(),
    ]
    texts = texts_in(path)
    seconds: dict[str, float] = defaultdict(float)

    def ask(texts: list[str]) -> int:
        kept = 0
        for number, text in enumerate(texts):
            document = document_of(text=text, id=str(number))
            good = True
            for one in filters:
                if every:
                    document.text = text
                began = time.process_time()
                verdict = one.filter(document)
                seconds[type(one).__name__] += time.process_time() - began
                good &= verdict if isinstance(verdict, bool) else verdict[0]
                if not (good or every):
                    break
            kept += good
        return kept

    ask(texts[:2])
    seconds.clear()
    kept, took = timed(lambda: ask(texts))
    return {**took, "documents": len(texts), "kept": kept, "filters": seconds}


# Dedup


def dedup_penstock(path: str) -> Answer:
    from penstock.prepare.dedup import DedupConfig, Index, signatures

    config = DedupConfig()
    given = list(pieces(texts_in(path)))
    found, signed = fastest(lambda: [signatures(some, config) for some in given])

    def decide() -> Index:
        index = Index(config)
        for one in found:
            index.decide(one)
        return index

    index, decided = fastest(decide)
    return {
        "cpu_s": signed["cpu_s"] + decided["cpu_s"],
        "signatures_cpu_s": signed["cpu_s"],
        "decide_cpu_s": decided["cpu_s"],
        "documents": sum(map(len, given)),
        "kept": len(index),
    }


def dedup_datatrove(path: str, words: str) -> Answer:
    """The hashing alone: neither the files that it writes nor the three steps that follow.

    datatrove 0.10.1 hands text to xxhash, which takes bytes only from version 4 on: encoded here.
    """
    import xxhash

    if words == "split":
        _split_words()
    texts = texts_in(path)
    with tempfile.TemporaryDirectory(dir=DATA) as folder:
        step = import_module("datatrove.pipeline.dedup").MinhashDedupSignature(folder)
        step._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())

        def sign(texts: list[str]) -> int:
            shingles = [step.get_shingles(text) for text in texts]
            return len([step.get_signature(some) for some in shingles if some.size])

        sign(texts[:2])
        signed, took = timed(lambda: sign(texts))
    return {**took, "documents": len(texts), "signed": signed}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def dedup_memory(count: int) -> Answer:
    """An index of so many documents, all different."""
    from penstock.prepare.dedup import DedupConfig, Index, Signatures

    config = DedupConfig()
    draw = np.random.default_rng(0)

    def made(n: int) -> Signatures:
        def words(each: int) -> npt.NDArray[np.uint64]:
            return draw.integers(0, 1 << 63, each * n, np.uint64)

        keys = draw.integers(0, 1 << 32, config.bands * n, np.uint32)
        filled = np.full(n, config.bins, np.uint16)
        return Signatures(config, n, words(2), words(2), keys, words(config.words), filled)

    index = Index(config)
    index.decide(made(1000))
    batch = min(count, 50_000)
    before, grown, cpu_s = resident_bytes(), 0, 0.0
    for _ in range(count // batch):
        some = made(batch)
        _, took = timed(functools.partial(index.decide, some))
        cpu_s += took["cpu_s"]
        del some
        grown = max(grown, resident_bytes() - before)
    return {
        "cpu_s": cpu_s,
        "documents": count,
        "kept": len(index),
        "resident_per_document": grown / len(index),
        "index_per_document": index.memory_bytes / len(index),
        "most_per_document": index.bytes_per_document,
    }


_TOKEN = re.compile(
    "[0-9A-Za-z_\x80-\u07ff]+|[\u0800-\U0010ffff][0-9A-Za-z_\x80-\u07ff]*|[^ \t-\r]"
)
_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05)


def _near_copy(text: str, draw: random.Random) -> str:
    """Some tokens renamed, and a part taken out or put in."""
    rate = draw.choice(_RATES)
    lines = text.split("\n")
    for k in range(len(lines)):
        if draw.random() < rate * 8:
            lines[k] = _TOKEN.sub("renamed", lines[k], count=1)
    at = draw.randrange(len(lines))
    size = max(1, int(len(lines) * draw.random() * rate * 4))
    if draw.random() < 0.5:
        del lines[at : at + size]
    else:
        lines[at:at] = [f"int inserted_{at}_{k};" for k in range(size)]
    return "\n".join(lines)


def dedup_quality(path: str, count: int) -> Answer:
    """Near copies among headers, told by exact Jaccard similarity of the same shingles.

    Precision: of the documents that were let go of, those that do repeat what was kept for them.
    Recall: of the documents that repeat one that was kept before them, those that were let go of.
    """
    from penstock.prepare.dedup import DedupConfig, Index, signatures

    draw = random.Random(3)
    texts = [text for text in texts_in(path) if len(text) > 400][:count]
    originals = draw.sample(range(len(texts)), len(texts) // 3)
    texts += [_near_copy(texts[k], draw) for k in originals]
    draw.shuffle(texts)
    config = DedupConfig()
    index = Index(config)
    reasons: list[int] = []
    repeats: list[int] = []
    for some in pieces(texts):
        verdicts = index.decide(signatures(some, config))
        reasons += verdicts.reasons.tolist()
        repeats += verdicts.of.tolist()
    kept = [k for k, reason in enumerate(reasons) if reason == 0]
    shingles = [_shingles(text, config.shingle) for text in texts]
    gone = [k for k, reason in enumerate(reasons) if reason]
    likeness = [_jaccard(shingles[k], shingles[kept[repeats[k]]]) for k in gone]
    right = sum(one >= config.threshold for one in likeness)
    have = _repeating(shingles, set(kept), config.threshold)
    found = sum(reasons[k] != 0 for k in have)
    return {
        "documents": len(texts),
        "dropped": len(gone),
        "repeat": len(have),
        "precision": right / len(gone),
        "recall": found / len(have),
        "least_likeness_dropped": min(likeness),
    }


def _shingles(text: str, size: int) -> frozenset[int]:
    tokens = _TOKEN.findall(text)
    return frozenset(hash(tuple(tokens[k : k + size])) for k in range(len(tokens) - size + 1))


def _jaccard(a: frozenset[int], b: frozenset[int]) -> float:
    common = len(a & b)
    return common / (len(a) + len(b) - common) if a or b else 1.0


def _repeating(shingles: list[frozenset[int]], kept: set[int], least: float) -> list[int]:
    """The documents that are so much like one of `kept` before them: all of them.

    Two sets that are must share one of the rarest shingles of each, (1 - least) of them and one.
    """
    frequency = Counter(one for some in shingles for one in some)
    postings: dict[int, list[int]] = defaultdict(list)
    found = []
    for k, some in enumerate(shingles):
        rare = sorted(some, key=lambda one: (frequency[one], one))
        prefix = rare[: len(rare) - int(np.ceil(least * len(rare))) + 1]
        others = {other for one in prefix for other in postings[one]}
        if any(_jaccard(some, shingles[other]) >= least for other in others):
            found.append(k)
        if k in kept:
            for one in prefix:
                postings[one].append(k)
    return found


JOBS: dict[str, Callable[..., Answer]] = {
    job.__name__: job
    for job in (
        chunk_quality, profile, filters_penstock, filters_datatrove, dedup_penstock,
        dedup_datatrove, dedup_memory, dedup_quality,
    )
}  # fmt: skip

if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](**json.loads(sys.argv[2]))))
