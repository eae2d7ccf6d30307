"""The same dataset from a Ray cluster, bit for bit, also when one of its nodes is killed.

Each test is a process of its own: Ray starts a dozen, keeps its state in the one that imported it,
and warns of much. make check: one cluster of two processors. make faults: two nodes, one of which
is killed while it works; and a cluster that the command starts for itself.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.ingest.formats import ReadConfig
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import make_steps
from penstock.produce.dataset import prepare_dataset
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.store import open_store
from penstock.work.run import RunConfig

MakeSources = Callable[[int, int], dict[str, bytes]]
pytestmark = pytest.mark.xdist_group("ray")  # two clusters at once starve two cores

COMMON: Final = """\
import json, os, sys, time
from pathlib import Path
import ray
from penstock.errors import PenstockError
from penstock.ingest.formats import ReadConfig
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import make_steps
from penstock.produce import gather
from penstock.produce.dataset import prepare_dataset
from penstock.produce.writer import ShardConfig
from penstock.work.events import Events
from penstock.ingest.formats import Piece
from penstock.prepare.task import open_task
from penstock.prepare.wire import Request
from penstock.work.run import RayPool
from penstock.work.run import RunConfig

about = json.loads(sys.argv[1])
gather.SMALL_BYTES = 1  # rows of small pieces stay in the object store as those of large ones do

def run(dataset, processors=(), events=None):
    return prepare_dataset(
        about["inputs"], dataset,
        make_steps(
            processors=processors, filter=FilterConfig(preset="code"), dedup="near",
            chunk=ChunkConfig(max_tokens=96),
        ),
        ShardConfig(rows_per_file=25, val_fraction=0.2),
        RunConfig(workers=4, engine="ray", max_rejects=0.2),
        read=ReadConfig(piece_bytes=2000), tokenizer=about["tokenizer"], events=events,
    )

def refused(processor):
    try:
        run(about["dataset"] + processor.rpartition(":")[2], [processor])
    except PenstockError as error:
        return [type(error).__name__, str(error)]
"""
ONE_CLUSTER: Final = """
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
outcome = run(about["dataset"])
answers = {
    "sealed": outcome.sealed,
    "faulty": refused("ray_plugin:Faulty"),
    "absent": refused("ray_plugin:Absent"),
    "still": ray.is_initialized(),
    "width": RayPool(open_task, {}).width,
}
scratch = Path(about["dataset"] + "-begun")
scratch.mkdir()

def slow(begin, header, data):
    (scratch / header.decode().partition('"start":')[2].partition(",")[0]).touch()
    time.sleep(0.2)
    return (0, b""), None

pool = RayPool(open_task, {})
pool._task = ray.remote(num_cpus=1, max_retries=8, num_returns=2)(slow)
for k in range(80):
    pool.submit(Request(Piece(0, "jsonl", "in.jsonl", k, k + 1, 1)))
while len(list(scratch.iterdir())) < 2:
    time.sleep(0.01)
pool.close()
time.sleep(1)
free = 0
deadline = time.monotonic() + 60
while free < 2 and time.monotonic() < deadline:  # until nothing is left to run
    time.sleep(0.1)
    free = ray.available_resources().get("CPU", 0)
answers["begun"] = len(list(scratch.iterdir()))
ray.shutdown()
print(json.dumps(answers))
"""
TWO_NODES: Final = """
from ray.cluster_utils import Cluster

memory = {"object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory}
)
node = cluster.add_node(num_cpus=2, **memory)
ray.init(address=cluster.address, log_to_driver=False)
scratch = Path(os.environ["RAY_SCRATCH"])
name = node.node_id
answers = {}

def note(event):
    if event["kind"] == "commit" and len(list(scratch.glob("*-end-*"))) > 8 and not answers:
        while True:  # until it is within a piece
            begun = {p.name.partition("-begin-")[2] for p in scratch.glob(f"{name}-begin-*")}
            ended = {p.name.partition("-end-")[2] for p in scratch.glob(f"{name}-end-*")}
            if begun - ended:
                break
            time.sleep(0.001)
        cluster.remove_node(node, allow_graceful=False)
        answers["within"] = sorted(begun - ended)
        answers["done before"] = len(ended)

events = Events("chunk")
events.listen(note)
answers["sealed"] = run(about["dataset"], ["ray_plugin:Slow"], events).sealed
deadline = time.monotonic() + 60
while len(alive := [n["NodeID"] for n in ray.nodes() if n["Alive"]]) > 1:
    assert time.monotonic() < deadline, "nobody notices that the node is gone"
    time.sleep(0.2)
answers["nodes"] = alive
answers["killed"] = name
ray.shutdown()
cluster.shutdown()
print(json.dumps(answers))
"""
PLUGIN: Final = """\
import hashlib, os, time
from pathlib import Path
from penstock.prepare.steps import DataProcessor

class Slow(DataProcessor):
    def process(self, documents):
        scratch = os.environ.get("RAY_SCRATCH")
        if scratch:
            import ray
            node = ray.get_runtime_context().get_node_id()
            first = documents.column("source")[0].as_py() if len(documents) else "none"
            piece = hashlib.sha256(first.encode()).hexdigest()[:16]
            (Path(scratch) / f"{node}-begin-{piece}").touch()
            time.sleep(0.15)
            (Path(scratch) / f"{node}-end-{piece}").touch()
        return documents.column("text")

class Faulty(DataProcessor):
    def process(self, documents):
        raise LookupError("this plugin has lost its table")
"""


class Setting:
    """Inputs, a place for datasets, and what one process makes of the inputs."""

    def __init__(self, folder: Path, files: dict[str, bytes], tokenizer: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.inputs = [str(folder / "tree"), str(folder / "in.jsonl")]
        names = list(files)
        for name in names[:60]:
            path = folder / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[name])
        texts = [files[name].decode() for name in [*names[60:], *names[:5]]]
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / "in.jsonl").write_text("\n".join([*lines, "{}", ""]))
        (folder / "ray_plugin.py").write_text(PLUGIN)
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def alone(self, processors: list[str]) -> dict[str, bytes]:
        dataset = self.folder / "alone"
        steps = make_steps(
            processors=processors,
            filter=FilterConfig(preset="code"),
            dedup="near",
            chunk=ChunkConfig(max_tokens=96),
        )
        prepare_dataset(
            self.inputs, dataset, steps, ShardConfig(rows_per_file=25, val_fraction=0.2),
            RunConfig(workers=1, max_rejects=0.2), read=ReadConfig(piece_bytes=2000),
            tokenizer=self.tokenizer,
        )  # fmt: skip
        return snapshot(dataset)

    def python(self, script: str, **env: str) -> dict[str, Any]:
        """The last line that a script says, with Ray all its own."""
        about = {
            "inputs": self.inputs,
            "dataset": str(self.folder / "ray"),
            "tokenizer": str(self.tokenizer),
        }
        out = self.run([sys.executable, "-c", COMMON + script, json.dumps(about)], **env)
        answers: dict[str, Any] = json.loads(out.splitlines()[-1])
        return answers

    def run(self, command: list[str], **env: str) -> str:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**self.env, **env}, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=240)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                _, err = process.communicate()
                raise AssertionError("it hangs: " + err[-2000:]) from None
        assert process.returncode == 0, err[-3000:]
        return out


@pytest.fixture
def setting(tmp_path: Path, sources: MakeSources, tokenizer_folder: Path) -> Setting:
    return Setting(tmp_path, sources(41, 90), tokenizer_folder)


def snapshot(dataset: Path) -> dict[str, bytes]:
    """Every file but those that tell the time."""
    telling = ("_log/", "_fold/", "_COMPLETE", "_events.jsonl")
    found = {str(path.relative_to(dataset)): path for path in dataset.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(telling)}


def same(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Fails with names, not with bytes."""
    assert sorted(found) == sorted(wanted)
    assert not [name for name in wanted if found[name] != wanted[name]]


def test_a_cluster_makes_the_same_dataset(setting: Setting) -> None:
    answers = setting.python(ONE_CLUSTER)
    assert answers["sealed"] is True
    same(snapshot(setting.folder / "ray"), setting.alone([]))
    assert verify(open_store(setting.folder / "ray"), full=True).faults == []
    kind, text = answers["faulty"]
    assert kind == "WorkerFailed"
    assert "LookupError: this plugin has lost its table" in text
    assert "ray_plugin.py" in text
    kind, text = answers["absent"]
    assert kind == "BadConfig"
    assert "there is no processor ray_plugin:Absent" in text
    assert answers["width"] == 2
    assert answers["still"] is True  # a cluster that was there before stays
    assert 2 <= answers["begun"] < 40, "what a closed pool was given goes on"


@pytest.mark.faults
def test_a_node_killed_in_the_middle(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = setting.python(TWO_NODES, RAY_SCRATCH=str(setting.scratch))
    assert answers["sealed"] is True
    assert answers["within"], "the node was not working when it was killed"
    assert answers["done before"] > 0
    assert answers["killed"] not in answers["nodes"]
    (left,) = answers["nodes"]
    for piece in answers["within"]:  # what was lost was done again by the other node
        assert (setting.scratch / f"{left}-end-{piece}").exists()
    monkeypatch.syspath_prepend(setting.folder)
    same(snapshot(setting.folder / "ray"), setting.alone(["ray_plugin:Slow"]))
    assert verify(open_store(setting.folder / "ray"), full=True).faults == []


@pytest.mark.faults
def test_the_command_starts_a_cluster_of_its_own(setting: Setting) -> None:
    command = [
        *(sys.executable, "-m", "penstock.cli", "chunk", "--inputs", *setting.inputs),
        *("--tokenizer", str(setting.tokenizer), "--max_tokens", "96", "--rows_per_file", "25"),
        *("--val_fraction", "0.2", "--filter", "code", "--dedup", "near", "--max_rejects", "0.2"),
    ]
    command += ["--parquet_dir", str(setting.folder / "ray"), "--engine", "ray"]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # a socket's path is short
        left = Path(short, "ray", "ray_current_cluster")  # by a cluster that was killed
        left.parent.mkdir()
        left.write_text("127.0.0.1:1")
        out = setting.run(command, RAY_TMPDIR=short)
    assert f"{setting.folder / 'ray'}: sealed" in out
    same(snapshot(setting.folder / "ray"), setting.alone([]))
