"""Kill `penstock chunk` anywhere, its driver or a worker: the same dataset, and nobody left behind.

In:    trees, JSON lines and an archive, with filters, near dedup and chunking
Out:   after kills and the same command again until it ends: every file as in an undisturbed run
Keeps: each kill at a moment of its own: by the clock, or at a call to the file system

make check: 12 kills of a run into shards, 6 of one into lines. make faults: 200 and 60.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from penstock.errors import WorkerFailed
from penstock.prepare.steps import make_steps
from penstock.produce.dataset import prepare_dataset
from penstock.work.run import RunConfig

from .calls import Call, Fault
from .sweep import Ended, Small, Warm, litter, read_records, spread, verify_command

MakeSources = Callable[[int, int], dict[str, bytes]]
TELLING: Final = ("_log/", "_fold/", "_COMPLETE", "_events.jsonl")
OUTPUT: Final = "out.jsonl"


@dataclass(slots=True)
class Job:
    """The run that is disturbed, and what an undisturbed one gave."""

    warm: Warm
    scratch: Path
    inputs: list[Path]
    tokenizer: Path
    seconds: float = 0.0
    calls: list[Call] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    lines_seconds: float = 0.0
    lines: dict[str, bytes] = field(default_factory=dict)
    kills: int = 0

    def command(self, folder: Path, *, workers: int = 1, lines: bool = False) -> list[str]:
        target = ["--output", folder / OUTPUT]
        if not lines:
            target = ["--parquet_dir", folder / "data", "--tokens"]
        return [
            *("chunk", "--inputs", *map(str, self.inputs), *map(str, target)),
            *("--tokenizer", str(self.tokenizer), "--max_tokens", "96", "--rows_per_file", "20"),
            *("--val_fraction", "0.2", "--filter", "code", "--dedup", "near"),
            *("--max_rejects", "0.2", "--workers", str(workers)),
        ]

    def prepare(self) -> None:
        """Make the undisturbed datasets, and see how long that takes."""
        for lines in (False, True):
            folder = self.folder("undisturbed")
            listed = self.scratch / "calls.json"
            for _ in range(2):  # the first one loads what is not in memory yet
                shutil.rmtree(folder)
                folder.mkdir()
                began = time.monotonic()
                ended = self.run(folder, lines=lines, calls=listed)
                seconds = time.monotonic() - began
                assert ended.code == 0, str(ended)
            if lines:
                self.lines_seconds, self.lines = seconds, snapshot(folder)
            else:
                self.seconds, self.files = seconds, snapshot(folder / "data")
                self.calls = [Call(*row) for row in json.loads(listed.read_text())]
            shutil.rmtree(folder)
        assert sum(name.startswith("shard_") for name in self.files) > 6
        assert any(name.startswith("_dedup/") for name in self.files)
        assert "val_shard.tokens.arrow" in self.files
        assert len(self.lines[OUTPUT]) > 10_000

    def folder(self, name: str) -> Path:
        folder = self.scratch / name
        folder.mkdir()
        return folder

    def run(self, folder: Path, *, lines: bool = False, **options: Any) -> Ended:
        commands = [self.command(folder, lines=lines)]
        return self.warm.run(commands, folder=folder, input=self.inputs[-1], seed=None, **options)

    def kill_at_a_time(
        self, folder: Path, after_s: float, *, workers: int = 1, lines: bool = False
    ) -> Ended:
        """Begin, and kill it then, if it is still there."""
        running = self.warm.start(
            [self.command(folder, workers=workers, lines=lines)],
            folder=folder, input=self.inputs[-1], seed=None,
        )  # fmt: skip
        time.sleep(after_s)
        pids = workers_of(running.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)
        ended = running.wait()
        assert ended is not None
        wait_until_gone(pids)
        return ended

    def until_sealed(self, chance: random.Random, most: int, *, lines: bool = False) -> int:
        """Kill and start again until it ends by itself; how often it was killed."""
        folder = self.folder(f"killed-{chance.random()}")
        kills = 0
        longest = 0
        while True:
            how = chance.random()
            workers = 2 if how < 0.08 else 1
            seconds = self.lines_seconds if lines else self.seconds
            after_s = chance.uniform(0, seconds * (3 if workers == 2 else 1))
            had_seal = is_sealed(folder / "data")
            if kills >= most:
                ended = self.run(folder, lines=lines)
            elif how > 0.5 and not lines:
                at = chance.randint(1, len(self.calls))
                ended = self.run(folder, fault=Fault("kill", at))
            else:
                ended = self.kill_at_a_time(folder, after_s, workers=workers, lines=lines)
            if lines and (folder / OUTPUT).exists():
                size = (folder / OUTPUT).stat().st_size
                assert size >= longest, "the lines became fewer"
                longest = size
            if ended.code is not None:
                break
            assert ended.signal == signal.SIGKILL, str(ended)
            kills += 1
        assert ended.code == 0, str(ended)
        if lines:
            same(snapshot(folder), self.lines)
        else:
            same(snapshot(folder / "data"), self.files)
            assert had_seal or not litter(folder / "data")
            verified = self.warm.run(
                [verify_command(folder / "data")], folder=folder, input=self.inputs[0]
            )
            assert verified.code == 0, str(verified)
        shutil.rmtree(folder)
        return kills


@pytest.fixture(scope="session")
def job(small: Small, sources: MakeSources, tokenizer_folder: Path) -> Iterator[Job]:
    scratch = small.scratch / "produce"
    scratch.mkdir()
    job = Job(small.warm, scratch, write_inputs(scratch, sources), tokenizer_folder)
    job.prepare()
    yield job
    shutil.rmtree(scratch)


def write_inputs(scratch: Path, sources: MakeSources) -> list[Path]:
    """Twelve inputs; the last ones repeat documents of the first."""
    inputs = []
    every: dict[str, bytes] = {}
    for number in range(12):
        files = sources(30 + number, 12)
        files |= {f"zz/again{number}{k}.cpp": raw for k, raw in enumerate(list(every.values())[:2])}
        every |= files
        path = scratch / f"in{number:02d}"
        match number % 4:
            case 0:
                for name, raw in files.items():
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    (path / name).write_bytes(raw)
            case 1:
                path = path.with_suffix(".tar.gz")
                with tarfile.open(path, "w:gz") as archive:
                    for name, raw in files.items():
                        info = tarfile.TarInfo(name)
                        info.size = len(raw)
                        archive.addfile(info, io.BytesIO(raw))
            case _:
                path = path.with_suffix(".jsonl")
                lines = [json.dumps({"text": raw.decode()}) for raw in files.values()]
                path.write_text("\n".join([*lines, "{}", ""]))
        inputs.append(path)
    return inputs


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but those that tell the time."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if not name.startswith(TELLING) and not name.endswith(".lock") and ".tmp-" not in name
    }


def is_sealed(dataset: Path) -> bool:
    """Whether there was nothing left to do: then temporary files of that writer stay, too."""
    records = read_records(dataset)
    return bool(records) and records[-1]["ops"][-1]["type"] == "seal"


def same(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Fails with names, not with bytes."""
    assert sorted(found) == sorted(wanted)
    assert not [name for name in wanted if found[name] != wanted[name]]


def workers_of(pid: int) -> list[int]:
    """The workers of a driver, by pid."""
    try:
        children = psutil.Process(pid).children(recursive=True)
        return [child.pid for child in children if is_worker(child.pid)]
    except psutil.NoSuchProcess:
        return []


def is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return (
            "penstock.work.pool" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def wait_until_gone(pids: list[int], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if is_worker(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"left behind: {left}")
        time.sleep(0.02)


# The driver is killed.


def kill_often(job: Job, seed: int, kills: int, most: int, *, lines: bool = False) -> None:
    chance = random.Random(seed)
    done = runs = 0
    while done < kills:
        done += job.until_sealed(chance, min(most, kills - done), lines=lines)
        runs += 1
        assert runs < 10 * kills, "it ends before it is killed"
    print(f"{done} kills in {runs} runs to the end")


def test_the_driver_killed_at_random_moments(job: Job) -> None:
    kill_often(job, 1, 12, 6)


def test_a_run_into_lines_killed_at_random_moments(job: Job) -> None:
    kill_often(job, 2, 6, 3, lines=True)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_the_driver_killed_at_200_random_moments(job: Job, part: int) -> None:
    kill_often(job, 100 + part, 50, 8)


@pytest.mark.faults
def test_a_run_into_lines_killed_at_60_random_moments(job: Job) -> None:
    kill_often(job, 200, 60, 8, lines=True)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
def test_the_driver_killed_as_it_makes_or_names_a_file(job: Job, part: int) -> None:
    """Between such calls nothing changes on the disk."""
    changing = {"create", "fsync", "link", "unlink", "rename", "mkdir"}
    points = [n for n, call in enumerate(job.calls, 1) if call.name in changing]
    chosen = [points[k - 1] for k in spread(len(points), 120)]
    for at in chosen[part::4]:
        folder = job.folder(f"call-{at}")
        ended = job.run(folder, fault=Fault("kill", at))
        assert ended.signal == signal.SIGKILL or ended.code == 0, str(ended)
        had_seal = is_sealed(folder / "data")
        assert job.run(folder).code == 0
        same(snapshot(folder / "data"), job.files)
        assert had_seal or not litter(folder / "data")
        shutil.rmtree(folder)


# A worker is killed, and what becomes of workers.


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, which ends with the block whatever happens."""
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        pids: list[int] = []
        try:
            yield process
        finally:
            pids = workers_of(process.pid)
            process.kill()
            wait_until_gone(pids)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_workers(process: subprocess.Popen[str], count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while len(pids := workers_of(process.pid)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return pids


def test_a_worker_killed(job: Job) -> None:
    """Its piece is done again, and at the end nobody is left."""
    folder = job.folder("worker")
    with started(*job.command(folder, workers=2)) as process:
        pids = wait_for_workers(process, 2)
        wait_for(folder / "data" / "shard_00000.parquet", process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[0], signal.SIGKILL)
        pids += workers_of(process.pid)
        out, err = process.communicate(timeout=120)
        assert not [pid for pid in pids if is_worker(pid)]
    assert process.returncode == 0, err
    assert "sealed" in out
    assert "Traceback" not in err
    same(snapshot(folder / "data"), job.files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_is_left_after_a_signal(job: Job, number: signal.Signals) -> None:
    folder = job.folder(f"signal-{number}")
    with started(*job.command(folder, workers=2)) as process:
        pids = wait_for_workers(process, 2)
        wait_for(folder / "data" / "_log" / f"{0:020d}.json", process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        wait_until_gone(pids)
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + number
        assert err == "stopped by a signal; the same command resumes from here\n"
    ended = job.run(folder)
    assert ended.code == 0, str(ended)
    same(snapshot(folder / "data"), job.files)


PLUGIN: Final = """\
import os, signal
from penstock.prepare.steps import DataProcessor

class Deadly(DataProcessor):
    def process(self, documents):
        os.kill(os.getpid(), signal.SIGKILL)

class Faulty(DataProcessor):
    def process(self, documents):
        raise LookupError("this plugin has lost its table")
"""


@pytest.mark.parametrize("name", ["Deadly", "Faulty"])
def test_what_always_fails_says_so_and_leaves_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "deadly_plugin.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n' * 9)
    steps = make_steps(processors=[f"deadly_plugin:{name}"])
    with pytest.raises(WorkerFailed) as caught:
        prepare_dataset([path], tmp_path / "out", steps, run=RunConfig(workers=2))
    if name == "Deadly":
        assert caught.value.what == "a worker died 3 times over the same piece"
        assert "its exit code was -9" in caught.value.why
        assert str(path) in caught.value.where
    else:
        assert caught.value.why == "LookupError: this plugin has lost its table"
        assert "deadly_plugin.py" in caught.value.where
    assert not workers_of(os.getpid())
    # with the fault mended, the same dataset is made
    outcome = prepare_dataset([path], tmp_path / "out", (), run=RunConfig(workers=1))
    assert outcome.sealed
