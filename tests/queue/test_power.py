"""Power cuts: provider and trainer start again, in either order, and every batch is trained once.

In:    a provider and a trainer, one of them stopped at any call; files of batches that were not
       synced are truncated, full of zeros, or gone
Out:   the batches of an undisturbed run, bit for bit, by what the trainer's last checkpoint holds
Keeps: the oracle outside (flow/queue_pair.py); the damage by a seed that a failure prints

Three disks: one that damages any files of batches, and keeps all else; a model that keeps nothing
that was not synced; a real ext4 whose power is cut. make check: a slice of each. make faults: all.
"""

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flow.calls import Fault
from flow.disk import read_state, write_state
from flow.ext4 import Ext4
from flow.queue_pair import Pair, points, write_project
from flow.sweep import Running, Warm, spread, state_of, tell

SLICE = 6
ORDERS = ("provider first", "trainer first")


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="penstock-power-", dir=memory) as folder:
        warm = Warm(Path(os.path.realpath(folder)))
        try:
            yield warm
        finally:
            warm.close()


@pytest.fixture(scope="session", params=[1, 3], ids=["single", "several"])
def pair(warm: Warm, request: pytest.FixtureRequest) -> Pair:
    """A trainer whose queue holds everything when it begins."""
    each, scratch = request.param, warm.scratch / f"power-{request.param}"
    return Pair.make(warm, scratch, "train", batches_per_file=each)


def restarted(pair: Pair, folder: Path, order: str) -> list[str]:
    """What is wrong once provider and trainer have been started again and come to their ends."""
    queue, running = folder / "queue", {}
    if order == ORDERS[1] and queue.is_dir():  # without one it refuses to be first
        running["train"] = pair.begin("train", folder, seed=2)
        time.sleep(0.05)  # it waits, or meets what is damaged
    running["prepare"] = pair.begin("prepare", folder, seed=3)
    if "train" not in running:
        wait_for_queue(folder, running["prepare"])
        running["train"] = pair.begin("train", folder, seed=2)
    ended = {"train": running["train"].wait()}
    if ended["train"] and ended["train"].code:  # nobody takes what its provider makes
        pair.warm.ask({"do": "signal", "pid": running["prepare"].pid, "signal": signal.SIGKILL})
    ended["prepare"] = running["prepare"].wait()
    found = [f"{name} failed: {how}" for name, how in ended.items() if not how or how.code != 0]
    found += pair.judge(folder)
    shutil.rmtree(folder.parents[1])
    return [f"{order}: {what}" for what in found]


def wait_for_queue(folder: Path, provider: Running) -> None:
    """Until there is a queue to open, or its provider has died."""
    deadline = time.monotonic() + 60
    while not (folder / "queue" / "meta.json").exists() and is_alive(provider.pid):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def damage(folder: Path, chance: random.Random) -> list[str]:
    """Do to any files of batches what a power cut may do to what was not synced."""
    done = []
    for path in sorted((folder / "queue").glob("*/*.safetensors")):
        data, kind = path.read_bytes(), chance.choice(("whole", "gone", "cut", "zeros", "body"))
        if kind == "gone":
            path.unlink()
        elif kind == "cut":
            path.write_bytes(data[: chance.randrange(len(data))])
        elif kind == "zeros":
            path.write_bytes(bytes(len(data)))
        elif kind == "body":  # of several pages one was not written
            at = chance.randrange(len(data))
            path.write_bytes(data[:at] + bytes(len(data) - at))
        done.append(f"{path.parent.name}/{int(path.stem)} {kind}")
    return done


def damaged(pair: Pair, seed: int) -> list[str]:
    """Kill the trainer anywhere, damage what was not synced, and start again."""
    chance = random.Random(seed)
    folder = pair.folder(f"damaged-{seed}")
    at = chance.randint(1, len(pair.calls) + 20)  # also after its end
    pair.penstock("train", folder, Fault("kill", at))
    done = damage(folder, chance)
    found = restarted(pair, folder, chance.choice(ORDERS))
    return [f"seed {seed}, killed at {at}, {', '.join(done)}: {what}" for what in found]


def test_any_files_are_damaged(pair: Pair) -> None:
    bad = [what for seed in range(2 * SLICE) for what in damaged(pair, seed)]
    assert not bad, tell(bad, 2 * SLICE, "damage")


@pytest.mark.faults
def test_any_files_are_damaged_often(pair: Pair) -> None:
    bad = [what for seed in range(1000, 1400) for what in damaged(pair, seed)]
    assert not bad, tell(bad, 400, "damage")


# A model of a disk that keeps nothing that was not synced


def model(warm: Warm, command: str, each: int, keep: int) -> None:
    scratch = warm.scratch / f"model-{command}-{each}-{keep}"
    pair = Pair.make(warm, scratch, command, batches_per_file=each)
    folder, states = pair.folder("run"), scratch / "states"
    states.mkdir()
    how = {"states": str(states), "earlier": None, "keep_at": 0}
    ended = pair.penstock(command, folder, model=how, seed=5)
    assert ended.code == 0, str(ended)
    cases = sorted(states.glob("*.json"))
    assert len(cases) > 20
    bad = []
    for number in spread(len(cases), keep):
        case = json.loads(cases[number - 1].read_text())
        again = scratch / f"case-{number}"
        shutil.copytree(folder.parents[1], again)
        shutil.rmtree(again / "data" / "numbers")
        write_state(state_of(case["state"]), again / "data" / "numbers")
        # locks and marks are never synced: they say nothing that must hold
        broken = [what for what in case["broken"] if "_provider" not in what and "/_" not in what]
        found = broken + restarted(pair, again / "data" / "numbers", ORDERS[number % 2])
        bad += [f"{case['point']} ({case['call']}), {case['policy']}: {what}" for what in found]
    assert not bad, tell(bad, len(cases), f"power loss of {command} on the model")
    shutil.rmtree(scratch)


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_the_unkindest_disk(warm: Warm, command: str) -> None:
    model(warm, command, 1, 2 * SLICE)


@pytest.mark.faults
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_the_unkindest_disk_at_every_call(warm: Warm, command: str, each: int) -> None:
    model(warm, command, each, 10_000)


def test_a_purge_does_not_come_undone(pair: Pair) -> None:
    """What says that batches are done with must not come back beside the batches of a new queue.
    The purge was killed after its first step; the next provider does the rest."""
    folder, states = pair.folder("purged"), pair.scratch / "purge-states"
    states.mkdir()
    before = json.loads((folder / "queue" / "meta.json").read_bytes())["filling"]
    (folder / "queue" / "meta.json").unlink()
    (folder / "queue" / "train" / "_ack").mkdir()
    (folder / "queue" / "train" / "_ack" / f"{0:020d}").write_bytes(b"")
    config, root = pair.scratch / "project" / "config.py", folder.parents[1]
    ended = pair.warm.start(
        [["prepare", str(config), "--root", str(root)]],
        folder=folder,
        input=pair.input,
        model={"states": str(states), "earlier": None, "keep_at": 0},
        seed=7,
    ).wait()
    assert ended is not None
    assert ended.code == 0, str(ended)
    new = 0
    for path in states.glob("*.json"):
        case = json.loads(path.read_text())
        state = state_of(case["state"])
        meta = state.get("queue/meta.json")
        if meta and json.loads(meta)["filling"] != before:
            new += 1
            back = [name for name in state if "/_ack/" in name]
            assert not back, f"{case['point']} ({case['call']}), {case['policy']}: {back}"
    assert new > 10
    shutil.rmtree(states)
    shutil.rmtree(root)


# A real file system


@pytest.fixture
def ext4(warm: Warm) -> Iterator[Ext4]:
    with Ext4(warm.scratch) as mounted:
        yield mounted


def cut(pair: Pair, ext4: Ext4, command: str, at: int) -> list[str]:
    """Cut the power at a call of the provider or of the trainer while both run."""
    root = ext4.mount_point / f"cut-{at}"
    shutil.copytree(pair.scratch / "project", root)
    folder = root / "data" / "numbers"
    for path in (root, *root.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    fault = Fault("power", at, mount=str(ext4.mount_point))
    faults = {command: fault}
    running = {"prepare": pair.begin("prepare", folder, fault=faults.get("prepare", Fault()))}
    wait_for_queue(folder, running["prepare"])
    if is_alive(running["prepare"].pid):
        trainer = pair.begin("train", folder, fault=faults.get("train", Fault()), seed=4)
        running["train"] = trainer
    struck = running[command].wait()
    for name, other in running.items():
        if name != command:
            pair.warm.ask({"do": "signal", "pid": other.pid, "signal": int(signal.SIGKILL)})
            other.wait()
    ext4.mount_again()
    state = read_state(root)
    shutil.rmtree(root)
    again = pair.scratch / f"cut-{at}"
    write_state(state, again)
    found = restarted(pair, again / "data" / "numbers", ORDERS[at % 2])
    assert struck is not None
    return [f"power cut at call {at} of {command} ({struck}): {what}" for what in found]


def ext4_sweep(warm: Warm, ext4: Ext4, command: str, each: int, keep: int) -> None:
    # a backlog of 3: the provider waits for the trainer, and has synced nothing when it ends
    scratch = warm.scratch / f"ext4-{command}-{each}-{keep}"
    settings: dict[str, Any] = {"batches_per_file": each, "backlog_batches": 3}
    whole = Pair.make(warm, warm.scratch / f"calls-{command}-{each}-{keep}", command)
    pair = Pair(warm, scratch, scratch / "none", settings=settings)
    write_project(scratch / "project", **settings)
    at = points(whole, keep)
    bad = [what for n in at for what in cut(pair, ext4, command, n)]
    shutil.rmtree(scratch)
    assert not bad, tell(bad, len(at), f"power loss of {command} on ext4")


@pytest.mark.parametrize("command", ["prepare", "train"])
def test_power_is_cut(warm: Warm, ext4: Ext4, command: str) -> None:
    ext4_sweep(warm, ext4, command, 1, SLICE)


@pytest.mark.faults
@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_power_is_cut_at_every_call(warm: Warm, ext4: Ext4, command: str, each: int) -> None:
    ext4_sweep(warm, ext4, command, each, 10_000)
