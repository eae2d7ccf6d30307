"""Kill the committing process, its workers, and nodes of a Ray cluster at random moments.

In:    a tree, JSON lines and an archive, with filters, near dedup, chunking and token files; rows
       are kept by workers, who make the shards
Out:   after kills, and the same run again until it ends: every file as one process alone makes it,
       nothing half-written beside them
Keeps: each kill at a moment of its own, by the clock

make check: 3 kills of committers and workers. make faults: 140 of them, and 60 of committers,
workers and nodes of Ray.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from penstock.produce.verify import verify
from penstock.store.store import open_store

from .sweep import litter
from .test_produce_kill import is_sealed, same, snapshot, wait_until_gone, workers_of

MakeSources = Callable[[int, int], dict[str, bytes]]

DRIVER: Final = """\
import json, os, sys
about = json.loads(sys.argv[1])
from penstock.ingest.formats import ReadConfig
from penstock.prepare.chunk import ChunkConfig
from penstock.prepare.filters import FilterConfig
from penstock.prepare.steps import make_steps
from penstock.produce import gather
from penstock.produce.dataset import prepare_dataset
from penstock.produce.writer import ShardConfig
from penstock.work.run import RunConfig

gather.SMALL_BYTES = 1  # small pieces are kept as large ones are
if about["address"]:
    import ray

    ray.init(address=about["address"], log_to_driver=False, configure_logging=False)
outcome = prepare_dataset(
    about["inputs"], about["dataset"],
    make_steps(
        filter=FilterConfig(preset="code"), dedup="near", chunk=ChunkConfig(max_tokens=96)
    ),
    ShardConfig(rows_per_file=40, val_fraction=0.2),
    RunConfig(
        workers=about["workers"], engine="ray" if about["address"] else "local", max_rejects=0.2,
        plugins=tuple(about.get("plugins", ())),
    ),
    read=ReadConfig(piece_bytes=3000), tokenizer=about["tokenizer"], tokens=True,
)
print("sealed" if outcome.sealed else "not sealed", flush=True)
os._exit(0)
"""


@dataclass(slots=True)
class Sweep:
    """The run that is disturbed, and what an undisturbed one gave."""

    scratch: Path
    inputs: list[str]
    tokenizer: str
    address: str = ""
    """Of a Ray cluster; "" for processes of this machine."""
    seconds: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)
    kills: dict[str, int] = field(default_factory=dict)

    def start(self, dataset: Path, workers: int) -> subprocess.Popen[str]:
        about = {
            "inputs": self.inputs, "dataset": str(dataset), "tokenizer": self.tokenizer,
            "workers": workers, "address": self.address,
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(about)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        )  # fmt: skip

    def prepare(self) -> None:
        """What one process makes, and how long two workers take."""
        dataset = self.scratch / "alone"
        address, self.address = self.address, ""
        assert self.end(self.start(dataset, 1)) == "sealed"
        self.files = snapshot(dataset)
        self.address = address
        assert sum(name.startswith("shard_") for name in self.files) > 15
        began = time.monotonic()
        assert self.end(self.start(self.scratch / "two", 2)) == "sealed"
        self.seconds = time.monotonic() - began
        same(snapshot(self.scratch / "two"), self.files)

    def end(self, process: subprocess.Popen[str]) -> str:
        """Wait for its end; what it said."""
        try:
            out, err = process.communicate(timeout=180)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"it hangs: {out} {err[-2000:]}") from None
        assert process.returncode == 0, err[-3000:]
        return out.splitlines()[-1]

    def until_sealed(
        self, chance: random.Random, most: int, victims: dict[str, Callable[[Any], bool]]
    ) -> int:
        """Kill, and start again if it was the committer, until the run ends by itself."""
        dataset = self.scratch / f"killed-{chance.random()}"
        done = 0
        while True:
            had_seal = is_sealed(dataset)
            process = self.start(dataset, 2)
            pids: list[int] = []
            while process.poll() is None and done < most:
                # most of a run's beginning is imports: each kill is at any moment of what is left
                moment = time.monotonic() + chance.uniform(0.1, max(0.5, self.seconds))
                while process.poll() is None and time.monotonic() < moment:
                    time.sleep(0.01)
                if process.poll() is not None:
                    break
                pids += workers_of(process.pid)
                who = chance.choice(sorted(victims))
                if victims[who](process):
                    self.kills[who] = self.kills.get(who, 0) + 1
                    done += 1
                if who == "committer":
                    break
            if done >= most and process.poll() is None:
                pids += workers_of(process.pid)
            try:
                out, err = process.communicate(timeout=180)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(f"it hangs: {out} {err[-3000:]}") from None
            wait_until_gone(pids)
            if process.returncode == 0:
                assert out.splitlines()[-1] == "sealed", out + err  # Ray says there who has died
                break
            assert process.returncode == -signal.SIGKILL, err[-3000:]
        same(snapshot(dataset), self.files)
        # a committer that is killed after its seal leaves its own half-written marker: the next
        # run finds nothing to do
        assert had_seal or not litter(dataset)
        assert verify(open_store(dataset), full=True).faults == []
        shutil.rmtree(dataset)
        return done

    def kill(self, seed: int, kills: int, victims: dict[str, Callable[[Any], bool]]) -> None:
        chance = random.Random(seed)
        done = runs = 0
        while done < kills:
            done += self.until_sealed(chance, min(8, kills - done), victims)
            runs += 1
            assert runs < 5 * kills, "it ends before it is killed"
        print(f"{self.kills} in {runs} runs to the end")


def kill_committer(process: subprocess.Popen[str]) -> bool:
    process.kill()
    return True


def kill_worker(process: subprocess.Popen[str]) -> bool:
    pids = workers_of(process.pid)
    if pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice(pids), signal.SIGKILL)
            return True
    return False


Kill = Callable[[Any], bool]
LOCAL: Final[dict[str, Kill]] = {"committer": kill_committer, "worker": kill_worker}


def make_inputs(folder: Path, sources: MakeSources) -> list[str]:
    """A tree, lines and an archive; some documents repeat."""
    files = sources(91, 130)
    names = list(files)
    for name in names[:50]:
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
    texts = [files[name].decode() for name in [*names[50:90], *names[:15]]]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "in.jsonl").write_text("\n".join([*lines, "{}", ""]))
    with tarfile.open(folder / "in.tar.gz", "w:gz") as archive:
        for name in names[90:]:
            info = tarfile.TarInfo(name)
            info.size = len(files[name])
            archive.addfile(info, io.BytesIO(files[name]))
    return [str(folder / name) for name in ("tree", "in.jsonl", "in.tar.gz")]


@pytest.fixture(scope="module")
def sweep(
    tmp_path_factory: pytest.TempPathFactory, sources: MakeSources, tokenizer_folder: Path
) -> Sweep:
    scratch = tmp_path_factory.mktemp("scale")
    made = Sweep(scratch, make_inputs(scratch, sources), str(tokenizer_folder))
    made.prepare()
    return made


def test_committers_and_workers_killed(sweep: Sweep) -> None:
    sweep.kill(1, 3, LOCAL)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_140_committers_and_workers_killed(sweep: Sweep, part: int) -> None:
    sweep.kill(100 + part, 35, LOCAL)


# Ray: a cluster in a process of its own, which kills its nodes and workers when it is told to.

CLUSTER: Final = """\
import os, random, signal, sys
import psutil, ray
from ray.cluster_utils import Cluster

memory = {"object_store_memory": 80 << 20}
cluster = Cluster(
    initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **memory}
)
node = cluster.add_node(num_cpus=1, **memory)
print(cluster.address, flush=True)
for line in sys.stdin:
    match line.strip():
        case "node":
            cluster.remove_node(node, allow_graceful=False)
            node = cluster.add_node(num_cpus=1, **memory)
            print("done", flush=True)
        case "worker":
            found = [
                p for p in psutil.Process().children(recursive=True)
                if p.name().startswith("ray::") and "_run" in p.name()
            ]
            for victim in random.sample(found, min(1, len(found))):
                victim.send_signal(signal.SIGKILL)
            print("done" if found else "none", flush=True)
        case "nodes":
            print(sum(n["Alive"] for n in ray.nodes()) if ray.is_initialized() else 0, flush=True)
cluster.shutdown()
"""


@pytest.mark.faults
@pytest.mark.xdist_group("ray")
def test_60_committers_workers_and_nodes_of_ray_killed(
    tmp_path: Path, sources: MakeSources, tokenizer_folder: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
        start_new_session=True,
    ) as cluster:  # fmt: skip
        stdin, stdout = cluster.stdin, cluster.stdout
        assert stdin is not None
        assert stdout is not None

        def tell(what: str) -> bool:
            print(what, file=stdin, flush=True)
            return stdout.readline().strip() == "done"

        try:
            address = stdout.readline().strip()
            assert address
            sweep = Sweep(tmp_path, make_inputs(tmp_path, sources), str(tokenizer_folder), address)
            sweep.prepare()
            sweep.kill(
                7, 60,
                {
                    "committer": kill_committer,
                    "node": lambda _: tell("node"),
                    "worker": lambda _: tell("worker"),
                },
            )  # fmt: skip
        finally:
            stdin.close()
            try:
                cluster.wait(timeout=60)
            finally:
                for process in psutil.process_iter(["pid"]):
                    with contextlib.suppress(psutil.Error, ProcessLookupError):
                        if os.getsid(process.pid) == cluster.pid:
                            process.kill()
