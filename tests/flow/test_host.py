"""Four ranks of one host: each shard is downloaded once and tokenised once, whoever is killed."""

import contextlib
import fcntl
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from conftest import MakeSources
from penstock import (
    DocumentConfig,
    FollowConfig,
    LoaderRun,
    PlanConfig,
    PretrainDataLoader,
    ShardConfig,
    shard_jsonl,
)
from penstock.store.log import Log
from penstock.supply.host import HostCache
from penstock.supply.ranks import VARIABLES
from penstock.supply.sources.dataset import DatasetSource, SourceConfig
from services.proxy import Proxy
from services.servers import Server, clouds, use
from supply.datasets import GrowingDataset

RANKS: Final = 4
SHARDS: Final = 8
CHUNK: Final = 64

RANK: Final = """
import hashlib, json, os, sys, time
from penstock import DocumentConfig, LoaderRun, PlanConfig, PretrainDataLoader
from penstock.supply import engine
from penstock.tokenize.tokenizer import Tokenizer

asked = json.loads(sys.argv[1])
if asked["block"]:
    engine.BLOCK_ROWS = asked["block"]
encode = Tokenizer.encode_column

def counted(self, column):
    first = column[0].as_py()
    if asked["freeze"]:
        try:
            mark = os.open(asked["freeze"], os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            pass
        else:
            encode(self, column.slice(0, len(column) // 2))
            os.write(mark, f"{os.getpid()}\\n".encode())
            time.sleep(1000)
    with open(asked["log"], "a") as file:
        file.write(f"{hashlib.sha256(first.encode()).hexdigest()} {len(column)}\\n")
    return encode(self, column)

Tokenizer.encode_column = counted
run = LoaderRun(rank=asked["rank"], world_size=asked["ranks"], **asked["run"])
loader = PretrainDataLoader(
    asked["url"], asked["tokenizer"], asked["chunk"], batch_size=2, epochs=asked["epochs"],
    plan=PlanConfig(**asked["plan"]), run=run, documents=DocumentConfig(ban=asked["ban"]),
)
print("ready", flush=True)
sys.stdin.readline()
for batch in loader:
    data = batch.input_ids.tobytes() + batch.labels.tobytes()
    print(hashlib.sha256(data).hexdigest(), flush=True)
    if asked["in_step"]:
        sys.stdin.readline()
print(f"peak {loader._engine.window.peak_bytes}", flush=True)
print("done", flush=True)
sys.stdin.readline()
"""


def clean(line: str) -> str:
    """A line of a log without its colours and quotes."""
    return re.sub(r"\x1b\[\d+m|\"", "", line)


@dataclass
class Host:
    """A host with ranks on it, a bucket far away, and a count of what goes over the wire."""

    scratch: Path
    server: Server
    proxy: Proxy
    new_url: Callable[[], str]

    @property
    def home(self) -> Path:
        """Where runs of this user have their folders."""
        return self.scratch / "tmp" / f"penstock-{os.geteuid()}"

    @property
    def tokenised(self) -> Counter[str]:
        """How often each shard was tokenised."""
        log = self.scratch / "log"
        return Counter(log.read_text().splitlines() if log.exists() else [])

    def forget(self) -> None:
        """What was downloaded so far does not count."""
        self.server.mark()

    def downloads(self, suffix: str, *, part: bool = False) -> Counter[str]:
        """How often the server has sent each file, all of it, or a `part`."""
        lines = self.server.news(1_000_000).splitlines()
        told = "206" if part else "200"
        asked = [re.search(r"GET (\S+) HTTP/1.1 (\d+)", clean(line)) for line in lines]
        names = [one[1].rpartition("/")[2] for one in asked if one and one[2] == told]
        return Counter(name for name in names if name.startswith("shard_") and suffix in name)

    def start(
        self, url: str, tokenizer: Path | None, **options: Any
    ) -> list[subprocess.Popen[str]]:
        asked = {
            "url": url, "tokenizer": tokenizer and str(tokenizer), "chunk": CHUNK, "epochs": 1,
            "ranks": RANKS, "log": str(self.scratch / "log"), "freeze": "", "in_step": False,
            "block": 0, "ban": [], "plan": {}, "run": {}, **options,
        }  # fmt: skip
        return [
            subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps({**asked, "rank": rank})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip


@pytest.fixture
def host(tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    cloud = clouds()["moto"](moto)
    place = tmp_path / "tmp"
    place.mkdir(0o700)
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, _ in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with Proxy(moto.port) as proxy:
        use(monkeypatch, cloud.environment(proxy.port))
        yield Host(tmp_path, moto, proxy, cloud.new_url)


@contextlib.contextmanager
def ended(ranks: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Whatever happens, none of ours is left."""
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=30)


def tell(rank: subprocess.Popen[str]) -> None:
    assert rank.stdin is not None
    rank.stdin.write("\n")
    rank.stdin.flush()


def line_of(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    assert rank.stderr is not None
    line = rank.stdout.readline().strip()
    assert line, rank.stderr.read()
    return line


def read_ranks(ranks: list[subprocess.Popen[str]]) -> list[list[str]]:
    """The batches of ranks that live until all have theirs; what they held at most comes last."""
    told: list[list[str]] = []
    for rank in ranks:
        lines: list[str] = []
        while not lines or lines[-1] != "done":
            lines.append(line_of(rank))
        told.append(lines[:-1])
    for rank in ranks:
        tell(rank)
        _, wrong = rank.communicate(timeout=60)
        assert rank.returncode == 0, wrong
        assert not wrong, "nothing is warned of"
    return told


def expected(
    monkeypatch: pytest.MonkeyPatch, url: str, tokenizer: Path | None, **options: Any
) -> list[list[str]]:
    """The batches of all ranks, each in memory of its own: without a directory of the host."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(HostCache, "_disk", lambda self: None)
        for rank in range(RANKS):
            loader = PretrainDataLoader(
                url, tokenizer and str(tokenizer), CHUNK, batch_size=2,
                epochs=options.get("epochs", 1), plan=PlanConfig(**options.get("plan", {})),
                run=LoaderRun(rank=rank, world_size=RANKS),
                documents=DocumentConfig(ban=options.get("ban", [])),
            )  # fmt: skip
            with loader:
                found.append([
                    hashlib.sha256(batch.input_ids.tobytes() + batch.labels.tobytes()).hexdigest()
                    for batch in loader
                ])  # fmt: skip
    return found


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory, sources: MakeSources) -> Path:
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    texts = [data.decode() for data in sources(7, 320).values()]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


COUNTS: Final = pytest.param("counts", marks=pytest.mark.faults)
KINDS: Final = ("text", COUNTS, "tokens")
"""Text whose tokens are counted is read as text is: test_each_shard_… has it in make check."""


def made(url: str, kind: str, documents: Path, tokenizer: Path) -> None:
    """A dataset in a bucket: text alone, text whose tokens are counted, or token files too."""
    shard_jsonl(
        [documents], url, config=ShardConfig(rows_per_file=40, val_fraction=0.0),
        follow=FollowConfig(complete=True),
        tokenizer=None if kind == "text" else tokenizer, tokens=kind == "tokens",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "bans"),
    [
        *(("text", False), ("tokens", False), ("text", True), ("counts", True)),
        pytest.param("counts", False, marks=pytest.mark.faults),
    ],
)
def test_each_shard_is_downloaded_once_and_tokenised_once(
    host: Host,
    kind: str,
    bans: bool,
    documents: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bans ask a shard of text for its document ids, too."""
    made(url := host.new_url(), kind, documents, tokenizer_folder)
    source = DatasetSource(url, SourceConfig())
    ban = source.provenance(3, ["doc_id"]).column(0).to_pylist()[::3] if bans else []
    right = expected(monkeypatch, url, tokenizer_folder, epochs=2, ban=ban)
    host.forget()
    ranks = host.start(url, tokenizer_folder, epochs=2, ban=ban)
    with ended(ranks):
        assert [line_of(rank) for rank in ranks] == ["ready"] * RANKS
        for rank in ranks:
            tell(rank)
        told = read_ranks(ranks)
    assert [lines[:-1] for lines in told] == right
    assert min(map(len, right)) > 10
    read, unread = (".tokens.arrow", ".parquet") if kind == "tokens" else (".parquet", ".tokens")
    assert host.downloads(read) == {f"shard_{k:05d}{read}": 1 for k in range(SHARDS)}
    assert not host.downloads(unread)
    if kind == "tokens":
        assert not host.tokenised
    else:
        assert set(host.tokenised.values()) == {1}
        assert len(host.tokenised) == SHARDS
    assert os.listdir(host.home) == [], "nothing is left behind"


def holder_of(path: Path) -> int:
    """The process that has a lock on a file."""
    inode = path.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        _, kind, _, access, pid, file, *_ = line.split()
        if kind == "FLOCK" and access == "WRITE" and int(file.rpartition(":")[2]) == inode:
            return int(pid)
    raise AssertionError(f"nobody has a lock on {path}")


def await_it(what: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)
    return found


def read_others(ranks: list[subprocess.Popen[str]], victim: int) -> tuple[int, list[list[str]]]:
    """Kill a rank, and let the others go on: which it was, and their batches."""
    number = [rank.pid for rank in ranks].index(victim)
    os.kill(victim, signal.SIGKILL)
    ranks[number].communicate(timeout=30)
    return number, read_ranks([rank for rank in ranks if rank.pid != victim])


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_killed_in_the_middle_of_a_download_holds_nobody_up(
    host: Host, kind: str, documents: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(url := host.new_url(), kind, documents, tokenizer_folder)
    right = expected(monkeypatch, url, tokenizer_folder)
    host.forget()
    suffix = ".tokens.arrow" if kind == "tokens" else ".parquet"
    host.proxy.plan("freeze", rf"GET .*shard_00003{suffix}", at=1000, seconds=1000.0)
    ranks = host.start(url, tokenizer_folder)
    with ended(ranks):
        assert [line_of(rank) for rank in ranks] == ["ready"] * RANKS
        for rank in ranks:
            tell(rank)
        await_it(lambda: host.proxy.struck)
        (folder,) = (path for path in host.home.iterdir() if (path / "shards").exists())
        file = Log.open(url).state.split("tokens" if kind == "tokens" else "train")[3]
        lock = folder / "shards" / f".make-{key_hash(kind, file.sha256, tokenizer_folder)}"
        began = time.monotonic()
        victim, told = read_others(ranks, holder_of(lock))
        assert time.monotonic() - began < 30, "they did not wait for the dead"
    assert [lines[:-1] for lines in told] == [
        batches for rank, batches in enumerate(right) if rank != victim
    ]
    counts = host.downloads(suffix)
    # what it had begun is begun again: two threads at most
    assert counts[f"shard_00003{suffix}"] == 2
    assert len(counts) == SHARDS
    assert SHARDS < counts.total() <= SHARDS + 2
    # its other thread may have been at another shard
    assert host.tokenised.total() <= len(host.tokenised) + 1
    assert os.listdir(host.home) == [], "the last one alive has removed all"


def key_hash(kind: str, sha256: str, tokenizer: Path) -> str:
    """The name of the value that a rank is about to make of a shard."""
    from penstock.tokenize.tokenizer import Tokenizer

    key = {
        "text": f"tokens 1 {sha256} {Tokenizer.load(tokenizer).fingerprint} text",
        "counts": f"shard 1 {sha256}",
        "tokens": f"tokens 1 {sha256}",
    }[kind]
    return xxhash.xxh3_128_hexdigest(key.encode())


@pytest.mark.parametrize("kind", ["text", COUNTS])
def test_a_rank_killed_in_the_middle_of_tokenising_holds_nobody_up(
    host: Host, kind: str, documents: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(url := host.new_url(), kind, documents, tokenizer_folder)
    right = expected(monkeypatch, url, tokenizer_folder)
    host.forget()
    frozen = host.scratch / "frozen"
    ranks = host.start(url, tokenizer_folder, freeze=str(frozen))
    with ended(ranks):
        assert [line_of(rank) for rank in ranks] == ["ready"] * RANKS
        for rank in ranks:
            tell(rank)
        pid = await_it(lambda: frozen.exists() and frozen.read_text().endswith("\n"))
        pid = int(frozen.read_text())
        victim, told = read_others(ranks, pid)
    assert [lines[:-1] for lines in told] == [
        batches for rank, batches in enumerate(right) if rank != victim
    ]
    counts = host.downloads(".parquet")
    assert len(counts) == SHARDS
    # of text whose tokens are counted the bytes are there still, unless the victim's other thread
    # was bringing some; other text is read again
    assert counts.total() <= SHARDS + (1 if kind == "counts" else 2)
    # what was frozen is not counted; the other thread of the victim may have been at another shard
    assert SHARDS == len(host.tokenised) <= host.tokenised.total() <= SHARDS + 1
    assert os.listdir(host.home) == []


def used_bytes(folder: Path) -> int:
    """Bytes of all files at one moment: the lock stops new ones, a renamed one counts once."""
    with open(folder / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sizes = {}
        for path, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(f"{path}/{name}")
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_a_dataset_far_larger_than_the_directory(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks go in step, as they do when they train: each shard comes once, and none is held in
    memory. 20 shards of 1.2 MB, a window of five, a directory of eight."""
    url, limit, chance = host.new_url(), 10_000_000, random.Random(0)
    dataset = GrowingDataset(url)
    for _ in range(20):
        rows = [[chance.randrange(60_000)] * 20_000 for _ in range(30)]
        dataset.add(rows)
    dataset.seal()
    plan = {"pool_size": 30, "refill_threshold": 10, "pack": "concat"}
    # all rows of a block are planned at once: by default 8.4 million tokens, 14 of these shards
    options: dict[str, Any] = {"plan": plan, "chunk": 2048, "in_step": True, "block": 64}
    monkeypatch.setattr(sys.modules[__name__], "CHUNK", 2048)
    right = expected(monkeypatch, url, None, plan=plan)
    host.forget()
    ranks, told, most = host.start(url, None, run={"cache_gb": limit / 1e9}, **options), [], 0
    with ended(ranks):
        lines = [line_of(rank) for rank in ranks]
        while lines != ["done"] * RANKS:
            for rank in ranks:
                tell(rank)
            if lines[0].startswith("peak"):
                break
            lines = [line_of(rank) for rank in ranks]
            told.append(lines)
            for folder in host.home.glob("*/shards"):
                most = max(most, used_bytes(folder))
        for rank in ranks:
            assert line_of(rank) == "done"
            _, wrong = rank.communicate("\n", timeout=60)
            assert (rank.returncode, wrong) == (0, "")
    *batches, peaks = told
    assert [list(one) for one in zip(*batches, strict=True)] == right
    assert limit / 2 < most <= limit
    assert peaks == ["peak 0"] * RANKS, "what is mapped is nobody's memory"
    names = [f"shard_{k:05d}.tokens.arrow" for k in range(20)]
    assert host.downloads("") == dict.fromkeys(names, 1)
    # to plan with them both ends of files that had not come yet
    assert set(host.downloads("", part=True).values()) == {2}
    assert os.listdir(host.home) == []


@pytest.mark.parametrize("kind", ["dataset", "files"])
def test_text_on_this_host_is_tokenised_once(
    host: Host, kind: str, documents: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a dataset, and of parquet files that somebody else has written."""
    folder = host.scratch / "data"
    if kind == "dataset":
        made(str(folder), "text", documents, tokenizer_folder)
    else:
        folder.mkdir()
        texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
        for k in range(SHARDS):
            part = pa.table({"text": texts[k * 40 : k * 40 + 40]})
            pq.write_table(part, folder / f"{k:05d}-of-{SHARDS:05d}.parquet")
    right = expected(monkeypatch, str(folder), tokenizer_folder)
    ranks = host.start(str(folder), tokenizer_folder)
    with ended(ranks):
        assert [line_of(rank) for rank in ranks] == ["ready"] * RANKS
        for rank in ranks:
            tell(rank)
        told = read_ranks(ranks)
    assert [lines[:-1] for lines in told] == right
    assert set(host.tokenised.values()) == {1}
    assert len(host.tokenised) == SHARDS
    assert os.listdir(host.home) == []


def test_what_killed_ranks_have_left_is_removed_by_the_next_run(
    host: Host, documents: Path, tokenizer_folder: Path
) -> None:
    made(url := host.new_url(), "tokens", documents, tokenizer_folder)
    for kill in (True, False):
        ranks = host.start(url, tokenizer_folder)
        with ended(ranks):
            assert [line_of(rank) for rank in ranks] == ["ready"] * RANKS
            for rank in ranks:
                tell(rank)
            if kill:
                await_it(lambda: list(host.home.glob("*/shards/??/*")))
            else:
                read_ranks(ranks)
        assert bool(os.listdir(host.home)) is kill


MIXED: Final = """
import hashlib, json, sys
from penstock import DocumentConfig, LoaderRun, StreamingMixedShardDataset

asked = json.loads(sys.argv[1])
found = StreamingMixedShardDataset(
    [asked["url"]], ["all"], pool_size=100, random_seed=3,
    documents=DocumentConfig(columns=["text", "doc_id"]),
    run=LoaderRun(rank=asked["rank"], world_size=asked["ranks"]),
)
print("ready", flush=True)
sys.stdin.readline()
for example in found:
    print(hashlib.sha256(example["text"].encode()).hexdigest(), flush=True)
print("peak", flush=True)
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.torch
def test_shards_of_examples_are_downloaded_once(
    host: Host, documents: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(url := host.new_url(), "text", documents, tokenizer_folder)
    host.forget()
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[__name__], "RANK", MIXED)
        ranks = host.start(url, None)
    with ended(ranks):
        assert [line_of(rank) for rank in ranks] == ["ready"] * RANKS
        for rank in ranks:
            tell(rank)
        told = read_ranks(ranks)
    texts = [json.loads(line)["text"] for line in documents.read_text().splitlines()]
    wanted = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts)
    assert sorted(line for lines in told for line in lines[:-1]) == wanted
    assert host.downloads("") == {f"shard_{k:05d}.parquet": 1 for k in range(SHARDS)}
    assert os.listdir(host.home) == []
