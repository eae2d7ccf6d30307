"""Cut the power at every call: what penstock called durable is there, and the restart is exact.

In:    the small run, on a real ext4 whose power is cut, and on a model of the unkindest disk
Out:   no promise broken, no document lost or doubled; every missing fsync is caught
Keeps: the promises outside of what loses power: each object when `put` or `create` has returned,
       each folder when it is made, everything when a command has ended well

ext4 keeps every name made before any fsync, so that some missing fsyncs cannot show on it; the
model (disk.py) keeps nothing that it was not told to keep, and shows them all.

make check: ext4 at 45 calls, the model at every call; each missing fsync until it is caught.
make faults: ext4 at every call; the model at every call after a kill at every call.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .calls import Fault
from .disk import broken_promises, read_state, write_state
from .ext4 import Ext4
from .mutants import FSYNCS
from .sweep import Small, spread, state_of, tell

PARTS = 4
SHOW_ON_EXT4 = (
    "fsync:file of a new object",
    "fsync:folder of a new object",
    "fsync:folder of a new folder",
    "fsync:file of an adopted object",
)


@pytest.fixture
def ext4(small: Small) -> Iterator[Ext4]:
    with Ext4(small.scratch) as mounted:
        yield mounted


def test_power_is_cut(small: Small, ext4: Ext4) -> None:
    points = spread(len(small.calls) + 1, 45)
    bad = [what for at in points for what in cut(small, ext4, at)]
    assert not bad, tell(bad, len(points), "power loss on ext4")


def test_power_is_cut_on_the_unkindest_disk(small: Small) -> None:
    tried, bad = 0, []
    for case in model(small):
        tried += 1
        bad += judge(small, case)
    assert tried > 100
    assert not bad, tell(bad, tried, "power loss on the model")


def test_power_is_cut_after_a_kill_on_the_unkindest_disk(small: Small) -> None:
    """The cache outlives a killed process: the next one must not build on what is only there."""
    tried, bad = 0, []
    for killed in unsynced_points(small)[::3]:  # all of them, with a restart, in `make faults`
        for case in model(small, killed=killed):
            tried += 1
            bad += [f"{name(case)}: {what}" for what in case["broken"]]
    assert tried > 300
    assert not bad, tell(bad, tried, "kill, then power loss on the model")


@pytest.mark.parametrize("bug", SHOW_ON_EXT4)
def test_a_missing_fsync_is_caught_on_ext4(small: Small, ext4: Ext4, bug: str) -> None:
    # what a promise rests on is cut from under it right after it was given
    points = [n + 1 for n, call in enumerate(small.calls, 1) if call.name in ("unlink", "mkdir")]
    points += [n + 3 for n in points if n + 3 <= len(small.calls)]
    assert any(cut(small, ext4, at, bug) for at in points), (
        f"{bug} was not caught by any of {len(points)} power losses"
    )


@pytest.mark.parametrize("bug", FSYNCS)
def test_a_missing_fsync_is_caught_on_the_unkindest_disk(small: Small, bug: str) -> None:
    runs = [0, *reversed(unsynced_points(small))]
    caught = (
        name(case)
        for killed in runs
        for case in model(small, killed=killed, bug=bug)
        if case["broken"]
    )
    assert next(caught, None), f"{bug} was not caught after any of {len(runs)} kills"


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_power_is_cut_at_every_call(small: Small, ext4: Ext4, part: int) -> None:
    points = range(1 + part, len(small.calls) + 2, PARTS)
    bad = [what for at in points for what in cut(small, ext4, at)]
    assert not bad, tell(bad, len(points), "power loss on ext4")


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_power_is_cut_after_every_kill_on_the_unkindest_disk(small: Small, part: int) -> None:
    tried, bad = 0, []
    for killed in unsynced_points(small)[part::PARTS]:
        for case in model(small, killed=killed):
            tried += 1
            bad += judge(small, case)
    assert not bad, tell(bad, tried, "kill, then power loss on the model")


def cut(small: Small, ext4: Ext4, at: int, bug: str = "") -> list[str]:
    """What is wrong when the power is cut at a call and the same command is given again."""
    folder = ext4.mount_point / f"power-{at}"
    folder.mkdir()
    sync(ext4.mount_point)
    notes = small.scratch / "promises"
    notes.unlink(missing_ok=True)
    intruder = {"name": "shard_00001.parquet", "same": True} if "adopted" in bug else None
    small.shard(
        folder,
        fault=Fault("power", at, mount=str(ext4.mount_point)),
        promises=notes,
        mutant=bug,
        intruder=intruder,
    )
    ext4.mount_again()
    state = read_state(folder)
    found = broken_promises(read_promises(notes), state, str(folder))
    shutil.rmtree(folder)
    again = small.scratch / f"power-{at}"
    write_state(state, again)
    found += small.restart_faults(again)
    where = small.calls[at - 1] if at <= len(small.calls) else "the end"
    return [f"power loss on ext4 at point {at} ({where}) {bug}: {what}" for what in found]


def model(small: Small, *, killed: int = 0, bug: str = "") -> Iterator[dict[str, Any]]:
    """What may be left by a power loss at each call of a run, after one was killed at `killed`."""
    folder = small.folder(f"model-{killed}")
    states = small.folder("states")
    intruder = {"name": "shard_00001.parquet", "same": True} if "adopted" in bug else None
    keep: dict[str, Any] = {"states": str(states), "earlier": None, "keep_at": killed}
    try:
        if killed:
            small.shard(folder, fault=Fault("kill", killed), model=keep, mutant=bug)
            keep = {**keep, "earlier": str(states / "disk"), "keep_at": 0}
        ended = small.shard(folder, model=keep, mutant=bug, seed=2, intruder=intruder)
        assert ended.code == 0, str(ended)
        for path in sorted(states.glob("*.json")):
            yield {**json.loads(path.read_text()), "killed": killed}
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(states)


def judge(small: Small, case: dict[str, Any]) -> list[str]:
    """Promises that were broken, and what is wrong after a restart."""
    folder = small.scratch / "after-power-loss"
    write_state(state_of(case["state"]), folder)
    found = [*case["broken"], *small.restart_faults(folder, seed=4)]
    return [f"{name(case)}: {what}" for what in found]


def name(case: dict[str, Any]) -> str:
    before = f"kill at point {case['killed']}, then " if case["killed"] else ""
    return f"{before}power loss at point {case['point']} ({case['call']}), kept: {case['policy']}"


def unsynced_points(small: Small) -> list[int]:
    """Calls before which a name was made or removed that is not yet safe."""
    points, unsafe = [], False
    for number, call in enumerate(small.calls, 1):
        if unsafe and call.name in ("fsync", "unlink", "create"):
            points.append(number)
        if call.name == "fsync":
            unsafe = False
        if call.name in ("link", "mkdir"):
            unsafe = True
    return points


def read_promises(notes: Path) -> dict[str, str]:
    promised: dict[str, str] = {}
    for line in notes.read_text().splitlines() if notes.exists() else []:
        path, sha256 = json.loads(line)
        if sha256:
            promised[path] = sha256
        else:
            promised.pop(path, None)
    return promised


def sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
