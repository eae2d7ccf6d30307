"""Killed at every call to the file system, provider and trainer lose and repeat nothing.

make check: ten calls of each, both at once, three real system calls. make faults: all calls.
"""

import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from flow.calls import Fault
from flow.queue_pair import Pair, points, write_project
from flow.strace import Traced, record, traced_run
from flow.sweep import Ended, Running, Warm, spread, tell

SLICE = 10
"""Points of each sweep in make check."""
SETTINGS: dict[str, dict[str, Any]] = {"single": {}, "several": {"batches_per_file": 3}}


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """A process to fork runs from, in memory where that can be."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-queue-", dir=memory) as folder:
        warm = Warm(Path(os.path.realpath(folder)))
        try:
            yield warm
        finally:
            warm.close()


@pytest.fixture(scope="session", params=[*SETTINGS])
def prepare(warm: Warm, request: pytest.FixtureRequest) -> Pair:
    name = request.param
    return Pair.make(warm, warm.scratch / f"prepare-{name}", "prepare", **SETTINGS[name])


@pytest.fixture(scope="session", params=[*SETTINGS])
def train(warm: Warm, request: pytest.FixtureRequest) -> Pair:
    name = request.param
    return Pair.make(warm, warm.scratch / f"train-{name}", "train", **SETTINGS[name])


def kill(pair: Pair, fault: Fault, *, every: bool = False) -> list[str]:
    """What is wrong after a kill, each with the point that repeats it."""
    folder = pair.folder(f"{fault.kind}-{fault.at}")
    ended = pair.penstock(pair.command, folder, fault)
    found = [] if ended.signal == signal.SIGKILL else [f"it was not killed: {ended}"]
    found += pair.after_kill(folder, every=every)
    where = pair.calls[fault.at - 1]
    return [f"{fault.kind} at point {fault.at} ({where}): {what}" for what in found]


def sweep(pair: Pair, keep: int, kind: str = "kill", *, every: bool = False) -> None:
    at = points(pair, keep)
    bad = [what for n in at for what in kill(pair, Fault(kind, n), every=every)]
    assert not bad, tell(bad, len(at), f"{kind} of {pair.command}")


def test_the_provider_is_killed(prepare: Pair) -> None:
    assert len(prepare.calls) > 100
    sweep(prepare, SLICE)


def test_the_trainer_is_killed(train: Pair) -> None:
    assert len(train.calls) > 150
    sweep(train, SLICE)


def test_both_are_killed_while_both_run(warm: Warm) -> None:
    run_both(warm, rounds=2, seed=1)


def test_a_trainer_that_deletes_what_it_consumed_repeats_nothing(warm: Warm) -> None:
    lost = run_consumed(warm, SLICE)
    assert lost, "a crash between a batch and its checkpoint was to lose it: that is why it is so"


def test_real_system_calls(warm: Warm) -> None:
    for command in ("prepare", "train"):
        pair = Pair.make(warm, warm.scratch / f"traced-{command}", command)
        traced = record(pair)
        real_sweep(pair, [traced[k - 1] for k in spread(len(traced), 3)])
        # the count in the other sweeps hides none
        changing = {"create", "write", "fsync", "link", "mkdir", "unlink", "rename"}
        seen = Counter(call.kind for call in traced if call.kind in changing)
        assert seen == Counter(call.name for call in pair.calls if call.name in changing)


@pytest.mark.faults
def test_the_provider_is_killed_at_every_call(prepare: Pair) -> None:
    sweep(prepare, 10_000)
    sweep(prepare, 10_000, "torn", every=True)


@pytest.mark.faults
def test_the_trainer_is_killed_at_every_call(train: Pair) -> None:
    sweep(train, 10_000)
    sweep(train, 10_000, "torn", every=True)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(4))
def test_both_are_killed_often_while_both_run(warm: Warm, seed: int) -> None:
    run_both(warm, rounds=25, seed=100 + seed)


@pytest.mark.faults
def test_a_trainer_that_deletes_is_killed_at_every_call(warm: Warm) -> None:
    lost = run_consumed(warm, 10_000)
    print(f"consumed: batches lost at {len(lost)} points")


@pytest.mark.faults
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_every_real_system_call(warm: Warm, command: str) -> None:
    pair = Pair.make(warm, warm.scratch / f"all-traced-{command}", command)
    real_sweep(pair, record(pair))


def real_sweep(pair: Pair, calls: Sequence[Traced]) -> None:
    bad = []
    for point in calls:
        folder = pair.folder(f"strace-{point.name}-{point.number}")
        ended = traced_run(pair, folder, point, "signal=SIGKILL")
        if ended.signal != signal.SIGKILL:
            bad.append(f"{point}: it was not killed: {ended}")
        bad += [f"{point}: {what}" for what in pair.after_kill(folder)]
    assert not bad, tell(bad, len(calls), f"kill of {pair.command} by strace")


def run_both(warm: Warm, *, rounds: int, seed: int) -> None:
    """Both at once, the backlog small, each killed again and again at calls of its own."""
    chance = random.Random(seed)
    for number in range(rounds):
        each = chance.choice((1, 3))
        settings = {"backlog_batches": chance.choice((1, 2, 5)), "batches_per_file": each}
        where = f"both-{seed}-{number}"
        pair = Pair(warm, warm.scratch / where, warm.scratch / "none", settings=settings)
        write_project(pair.scratch / "project", **settings)
        folder = pair.folder("run")
        kills = 0
        running: dict[str, Running] = {}
        ended: dict[str, Ended] = {}
        while len(ended) < 2:
            for command in {"prepare", "train"} - {*running, *ended}:
                if command == "train" and not (folder / "queue" / "meta.json").exists():
                    continue
                at = chance.randint(1, 160) if kills < 8 else 0
                running[command] = pair.begin(
                    command, folder, fault=Fault("kill", at) if at else Fault(), seed=None
                )
            command = next((name for name, one in running.items() if has_ended(one)), "")
            if not command:
                time.sleep(0.002)
                continue
            found = running.pop(command).wait()
            assert found is not None
            if found.signal == signal.SIGKILL:
                kills += 1
            else:
                assert found.code == 0, f"seed {seed}, round {number}, {command}: {found}"
                ended[command] = found
        wrong = [what for what in pair.judge(folder) if "left over" not in what]
        assert not wrong, f"seed {seed}, round {number}, {settings}: {wrong}"
        shutil.rmtree(pair.scratch)


def has_ended(one: Running) -> bool:
    """Whether a run waits to be asked how it ended."""
    return Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def run_consumed(warm: Warm, keep: int) -> list[int]:
    """Kill a trainer that deletes what it has taken; the points where a batch was lost."""
    scratch = warm.scratch / f"consumed-{keep}"
    pair = Pair.make(warm, scratch, "train", delete="consumed")
    lost = []
    for at in points(pair, keep):
        folder = pair.folder(f"kill-{at}")
        pair.penstock("train", folder, Fault("kill", at))
        found = pair.after_kill(folder)
        assert not [what for what in found if "lost" not in what], f"kill at point {at}: {found}"
        if found:
            lost.append(at)
    shutil.rmtree(scratch)
    return lost
