"""Ray between two buckets: workers read the inputs and store the shards, the committer neither.

In:    a tree, JSON lines and a zip in a bucket, with filters, near dedup, chunking and token files;
       a cluster of two nodes, which reaches the bucket through a proxy of its own
Out:   a dataset in a bucket, byte for byte what one worker of this machine makes in a directory
Keeps: whoever is killed, a node, a worker after it has stored a shard, or the committer before the
       record of one: the same objects, and none beside them
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import obstore
import psutil
import pytest

from penstock.ingest.open import open_bucket
from penstock.produce.verify import verify
from penstock.store.store import open_store
from services.proxy import Proxy
from services.servers import Cloud, Server, clouds, use

from .test_produce_kill import TELLING, same, snapshot
from .test_scale_kill import CLUSTER, DRIVER

MakeSources = Callable[[int, int], dict[str, bytes]]
pytestmark = pytest.mark.xdist_group("ray")

KILLER: Final = """\
import os, signal
from pathlib import Path
from penstock.store.bucket import BucketStore
from penstock.store.log import LogWriter

put, commit = BucketStore.put, LogWriter.commit
plan = Path(__file__).with_name("victim")

def dies(victim):
    try:
        if plan.read_text() != victim:
            return
        plan.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def put_and_die(self, name, write):
    stored = put(self, name, write)
    dies(f"worker {name}")
    return stored

def die_before_record(self, ops):
    for op in ops:
        dies(f"committer {getattr(op, 'name', '')}")
    return commit(self, ops)

BucketStore.put, LogWriter.commit = put_and_die, die_before_record
"""


@dataclass(slots=True)
class Setting:
    """Inputs in a bucket, a cluster, and two ways to the bucket."""

    folder: Path
    cloud: Cloud
    inputs: list[str]
    tokenizer: str
    committer: Proxy
    nodes: Proxy
    cluster: subprocess.Popen[str] | None = None
    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """What one worker of this machine makes."""

    @contextlib.contextmanager
    def cluster_of_two(self) -> Iterator[None]:
        """Two nodes, of one processor each."""
        with (self.folder / "cluster").open("wb") as said, subprocess.Popen(
            [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, stderr=said, env=self.environment(self.nodes.port),
            start_new_session=True,
        ) as cluster:  # fmt: skip
            stdin, stdout = cluster.stdin, cluster.stdout
            assert stdin is not None
            assert stdout is not None
            self.cluster = cluster
            try:
                self.address = stdout.readline().strip()
                assert self.address
                yield
            finally:
                stdin.close()
                try:
                    cluster.wait(timeout=60)
                finally:
                    for process in psutil.process_iter(["pid"]):
                        with contextlib.suppress(psutil.Error, ProcessLookupError):
                            if os.getsid(process.pid) == cluster.pid:
                                process.kill()

    def environment(self, port: int) -> dict[str, str]:
        """Of a process that reaches the bucket through this port."""
        path = f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"
        own = {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
        return {**os.environ, **own, **self.cloud.environment(port)}

    def make_alone(self) -> None:
        """What one worker of this machine makes in a directory."""
        folder, address = self.folder / "alone", self.address
        self.address = ""
        assert self.run(str(folder)) == 0
        self.address, self.files = address, snapshot(folder)
        assert sum(name.startswith("shard_") for name in self.files) > 6

    def run(self, dataset: str) -> int:
        """Make the dataset; the exit code."""
        return self.end(self.start(dataset))

    def start(self, dataset: str) -> subprocess.Popen[str]:
        about = {
            "inputs": self.inputs, "dataset": dataset, "tokenizer": self.tokenizer,
            "workers": 2 if self.address else 1, "address": self.address,
            "plugins": ["ray_killer"],
        }  # fmt: skip
        port = self.committer.port if self.address else self.cloud.server.port
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(about)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=self.environment(port),
        )  # fmt: skip

    def end(self, process: subprocess.Popen[str]) -> int:
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"it hangs: {out} {err[-3000:]}") from None
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err[-3000:]
            assert out.splitlines()[-1] == "sealed", err[-3000:]  # Ray says there who has died
        return process.returncode

    def wait_for_record(self, dataset: str, number: int, process: subprocess.Popen[str]) -> None:
        line = f"PUT /{dataset.partition('://')[2]}/_log/{number:020d}.json"
        deadline = time.monotonic() + 120
        while line not in self.committer.seen and process.poll() is None:
            assert time.monotonic() < deadline, "no such record comes"
            time.sleep(0.005)

    def let_die(self, victim: str) -> None:
        (self.folder / "victim").write_text(victim)

    @property
    def has_died(self) -> bool:
        return not (self.folder / "victim").exists()

    def tell(self, what: str) -> str:
        assert self.cluster is not None
        assert self.cluster.stdin is not None
        assert self.cluster.stdout is not None
        print(what, file=self.cluster.stdin, flush=True)
        answer = self.cluster.stdout.readline().strip()
        assert answer, (self.folder / "cluster").read_text()[-3000:]
        return answer

    def check(self, dataset: str) -> None:
        """The same objects as files, and none beside them; the log holds."""
        same(objects(dataset), self.files)
        assert verify(open_store(dataset), full=True).faults == []


def objects(url: str) -> dict[str, bytes]:
    """What lies in a bucket, but for what tells the time."""
    bucket, key = open_bucket(url)
    found = {
        str(about["path"]).removeprefix(key + "/"): bytes(
            obstore.get(bucket, str(about["path"])).bytes()
        )
        for chunk in obstore.list(bucket, key)
        for about in chunk
    }
    return {name: data for name, data in found.items() if not name.startswith(TELLING)}


def fill_bucket(url: str, files: dict[str, bytes], scratch: Path) -> list[str]:
    """A tree, lines and an archive, some documents twice; their addresses."""
    names = list(files)
    bucket, key = open_bucket(url)
    for name in names[:50]:
        obstore.put(bucket, f"{key}/tree/{name}", files[name])
    texts = [files[name].decode() for name in [*names[50:90], *names[:15]]]
    lines = [*(json.dumps({"text": text}) for text in texts), "{}", ""]
    obstore.put(bucket, f"{key}/in.jsonl", "\n".join(lines).encode())
    with zipfile.ZipFile(scratch / "in.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names[90:]:
            archive.writestr(name, files[name])
    obstore.put(bucket, f"{key}/in.zip", (scratch / "in.zip").read_bytes())
    return [f"{url}/{name}" for name in ("tree", "in.jsonl", "in.zip")]


@pytest.fixture(scope="module")
def setting(
    tmp_path_factory: pytest.TempPathFactory, moto: Server, sources: MakeSources,
    tokenizer_folder: Path,
) -> Iterator[Setting]:  # fmt: skip
    folder, cloud = tmp_path_factory.mktemp("ray-bucket"), clouds()["moto"](moto)
    (folder / "ray_killer.py").write_text(KILLER)
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        Proxy(moto.port) as committer,
        Proxy(moto.port) as nodes,
    ):
        use(monkeypatch, cloud.environment(moto.port))
        inputs = fill_bucket(cloud.new_url("in"), sources(91, 130), folder)
        made = Setting(folder, cloud, inputs, str(tokenizer_folder), committer, nodes)
        with made.cluster_of_two():
            made.make_alone()
            yield made


def counted(proxy: Proxy, method: str, url: str) -> dict[str, int]:
    """The bytes that a method moved, by the names of objects below a prefix."""
    found: dict[str, int] = {}
    begin = f"{method} /{url.partition('://')[2]}/"
    for line, sent, received in proxy.bodies:
        if line.startswith(begin):
            name = line.removeprefix(begin)
            found[name] = found.get(name, 0) + sent + received
    return found


@pytest.mark.faults
def test_shards_go_from_workers_to_the_bucket(setting: Setting) -> None:
    made = setting.cloud.new_url("made")
    assert setting.run(made) == 0
    setting.check(made)
    source = setting.inputs[0].rpartition("/")[0]
    # the shards: by workers alone
    shards = {name for name in setting.files if name.startswith("shard_")}
    stored = counted(setting.nodes, "PUT", made)
    assert shards < stored.keys()
    assert all(name.startswith(("shard_", "_val/val_")) for name in stored)
    own = counted(setting.committer, "PUT", made)
    assert not [name for name in own if name.startswith(("shard_", "_val/"))]
    assert sum(stored[name] for name in shards) == sum(len(setting.files[name]) for name in shards)
    # the inputs: every file by a worker, and the committer reads what it cuts and proves them by
    tree = {name for name in counted(setting.nodes, "GET", source) if name.startswith("tree/")}
    assert len(tree) == 50
    assert not [n for n in counted(setting.committer, "GET", source) if n.startswith("tree/")]


@pytest.mark.faults
def test_a_node_killed_while_its_shards_go_to_the_bucket(setting: Setting) -> None:
    made = setting.cloud.new_url("made")
    running = setting.start(made)
    setting.wait_for_record(made, 3, running)
    assert running.poll() is None, "it ended before the node was killed"
    assert setting.tell("node") == "done"
    assert setting.end(running) == 0
    setting.check(made)


@pytest.mark.faults
def test_a_worker_killed_after_it_has_stored_a_shard(setting: Setting) -> None:
    made = setting.cloud.new_url("made")
    setting.let_die("worker shard_00002.parquet")
    assert setting.run(made) == 0
    assert setting.has_died
    setting.check(made)
    # its successor has met what it stored
    puts = [line for line in setting.nodes.seen if line.startswith("PUT") and made[5:] in line]
    assert sum(line.endswith("shard_00002.parquet") for line in puts) == 2


@pytest.mark.faults
def test_a_committer_killed_before_the_record_of_what_a_worker_stored(setting: Setting) -> None:
    made = setting.cloud.new_url("made")
    setting.let_die("committer shard_00003.parquet")
    assert setting.run(made) == -signal.SIGKILL
    assert setting.has_died
    left = objects(made)
    assert "shard_00003.parquet" in left, "stored, and in no record"
    assert setting.run(made) == 0
    setting.check(made)
