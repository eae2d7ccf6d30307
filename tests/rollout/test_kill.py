"""Writers and learners that are killed at random: no rollout is lost, none is trained twice.

make check: 3 writers and 2 learners for some seconds, on a directory and on an S3 server.
make faults: 8 writers and 2 learners for 10 minutes on each.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import NoDataset, StoreFailed
from penstock.produce.verify import verify
from penstock.rollout.writer import RolloutWriter
from penstock.store.log import Log
from services.servers import Server, clouds, use

from .job import SIZE
from .made import ids_in

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")


class Crowd:
    """Processes that are started again when they die before they are done."""

    def __init__(self, jobs: dict[str, list[str]], logs: Path) -> None:
        self._jobs, self._logs = jobs, logs
        paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
        self._environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.running = {name: self._start(name) for name in jobs}
        self.kills = 0

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        with open(self._logs / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, str(JOB), *self._jobs[name]], stderr=log, stdout=log,
                env=self._environment,
            )  # fmt: skip

    def look(self) -> None:
        """Start those again that were killed; what ends by itself has ended well."""
        for name, process in [*self.running.items()]:
            code = process.poll()
            if code == -signal.SIGKILL:
                self.running[name] = self._start(name)
            elif code == 0:
                del self.running[name]
            elif code is not None:
                told = (self._logs / f"{name}.log").read_text()[-3000:]
                raise AssertionError(f"{name} ended with {code}:\n{told}")

    def kill(self, name: str) -> None:
        self.running[name].kill()
        self.running[name].wait()
        self.kills += 1

    def await_all(self, first: str, seconds: float = 240) -> None:
        """Until those whose names begin so have ended."""
        deadline = time.monotonic() + seconds
        while left := [name for name in self.running if name.startswith(first)]:
            assert time.monotonic() < deadline, f"{left} did not finish"
            time.sleep(0.05)
            self.look()

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def count_in(url: str) -> int:
    """Rollouts in the log."""
    try:
        return sum(file.rows for file in Log.open(url).state.split("train"))
    except (NoDataset, StoreFailed):
        return 0


def storm(
    url: str, folder: Path, *, writers: int, pause_s: float, seconds: float, every_s: float,
    seed: int,
) -> tuple[int, int]:  # fmt: skip
    """Kill at random for a while, let all finish, and count what is lost and doubled; answers how
    often was killed, and how many rollouts there were."""
    rng, learners, stop = random.Random(seed), 2, folder / "stop"
    jobs = {f"w{k}": ["write", url, str(folder), f"w{k}", str(pause_s)] for k in range(writers)}
    for rank in range(learners):
        jobs[f"l{rank}"] = ["learn", url, str(folder), str(rank), str(learners)]
    crowd = Crowd(jobs, folder)
    try:
        began = time.monotonic()
        while not count_in(url):
            crowd.look()
            time.sleep(0.05)
        # a process lives for as long as all of them took to begin, however slow the machine is
        every_s = max(every_s, (time.monotonic() - began) / len(jobs))
        end = time.monotonic() + seconds
        while time.monotonic() < end or crowd.kills < 4:
            time.sleep(rng.uniform(0.2, 1.8) * every_s)
            crowd.look()
            crowd.kill(rng.choice(sorted(crowd.running)))
            crowd.look()
        stop.touch()
        crowd.await_all("w")
        written = ids_in(url)
        RolloutWriter(url).seal()
        crowd.await_all("")
    finally:
        crowd.close()
    assert len({*written}) == len(written) > 0
    for k in range(writers):
        mine = [name for name in written if name.startswith(f"w{k}-")]
        done = len(mine) // SIZE
        assert sorted(mine) == sorted(f"w{k}-{g}-{n}" for g in range(done) for n in range(SIZE))
    trained: list[str] = []
    for rank in range(learners):
        trained += json.loads((folder / f"checkpoint{rank}.json").read_text())["trained"]
    lost, doubled = {*written} - {*trained}, len(trained) - len({*trained})
    assert (len(lost), doubled) == (0, 0)
    assert verify(url, full=True).faults == []
    print(f"{crowd.kills} kills, {len(written):,} rollouts, lost 0, doubled 0")
    return crowd.kills, len(written)


def test_a_directory(tmp_path: Path) -> None:
    storm(str(tmp_path / "d"), tmp_path, writers=3, pause_s=0.05, seconds=3, every_s=0.6, seed=1)


def test_an_s3_server(tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud = clouds()["moto"](moto)
    use(monkeypatch, cloud.environment(moto.port))
    storm(cloud.new_url(), tmp_path, writers=2, pause_s=0.2, seconds=3, every_s=0.7, seed=2)


@pytest.mark.faults
def test_a_directory_for_ten_minutes(tmp_path: Path) -> None:
    made = storm(
        str(tmp_path / "d"), tmp_path, writers=8, pause_s=0.5, seconds=600, every_s=1.0, seed=3
    )
    assert min(made) > 100


@pytest.mark.faults
def test_an_s3_server_for_ten_minutes(
    tmp_path: Path, seaweedfs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud = clouds()["seaweedfs"](seaweedfs)
    use(monkeypatch, cloud.environment(seaweedfs.port))
    made = storm(
        cloud.new_url(), tmp_path, writers=8, pause_s=0.5, seconds=600, every_s=1.0, seed=4
    )
    assert min(made) > 100
