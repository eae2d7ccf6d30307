"""Kill the writer at every call it makes to the file system: the restart is exact every time.

In:    the small run
Out:   after each kill and the same command again: every document once, `verify --full` passes
Keeps: every state that a kill can leave, and a restart from each; planted bugs that this sweep
       must catch

make check: after every call that changes something, in forks of a warm process; ten real system
calls, by strace. make faults: before every call; every system call by strace; kills during the
recovery from a kill.
"""

import random
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest

from .calls import Fault
from .strace import Traced, record, traced_run
from .sweep import Small, each_state, likely_points, litter, spread, tell, undisturbed

PARTS = 4
BUGS = (
    "commit_before_store",
    "progress_before_shard",
    "shard_before_progress",
    "write_in_place",
    "retire_before_seal",
    "start_over",
    "leave_litter",
)


@pytest.mark.parametrize("part", range(PARTS))
def test_killed_in_every_state(small: Small, part: int) -> None:
    """580 calls, of which 125 leave something that the one before did not."""
    points = each_state(small.calls)[part::PARTS]
    assert len(points) > 25
    bad = [fault for at in points for fault in kill(small, Fault("kill", at))]
    assert not bad, tell(bad, len(points), "kill")


def test_killed_within_a_write(small: Small) -> None:
    writes = [n for n, call in enumerate(small.calls, 1) if call.name == "write"]
    points = [writes[k - 1] for k in spread(len(writes), 30)]
    bad = [fault for at in points for fault in kill(small, Fault("torn", at))]
    assert not bad, tell(bad, len(points), "torn write")


def test_killed_again_while_it_recovers(small: Small) -> None:
    seed = 1
    chance = random.Random(seed)
    pairs = [(chance.randint(1, len(small.calls)), chance.randint(1, 200)) for _ in range(30)]
    bad = [fault for first, second in pairs for fault in kill_twice(small, first, second)]
    assert not bad, tell(bad, len(pairs), f"kill, and kill again, seed {seed}")


def test_nothing_reads_a_temporary_file(small: Small) -> None:
    """So that states which differ only in the bytes of such files need one restart, not many."""
    temporary = [call for call in small.calls if "/.tmp-" in call.path]
    assert temporary
    assert {call.name for call in temporary} <= {"create", "write", "fsync", "close", "unlink"}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(small: Small, bug: str) -> None:
    assert not undisturbed(small, bug), f"{bug} shows without any fault: it proves nothing"
    points = likely_points(small, bug)
    assert any(kill(small, Fault("kill", at), bug) for at in points), (
        f"{bug} was not caught by any of {len(points)} kills"
    )


def test_killed_at_real_system_calls(small: Small) -> None:
    traced = record(small)
    points = [traced[k - 1] for k in spread(len(traced), 10)]
    bad = [fault for point in points for fault in kill_traced(small, point)]
    assert not bad, tell(bad, len(points), "kill by strace")


def test_the_count_hides_no_system_call(small: Small) -> None:
    """Each thing done to the dataset is counted, by name and number, as strace sees it."""
    changing = {"create", "write", "fsync", "link", "mkdir", "unlink", "rename"}
    seen = Counter(call.kind for call in record(small) if call.kind in changing)
    counted = Counter(call.name for call in small.calls if call.name in changing)
    assert seen == counted
    assert sum(seen.values()) > 300
    unknown = {call.kind for call in record(small)} - changing
    assert unknown <= {"open", "close", "stat", "read", "pread64", "preadv2", "lseek", "getdents64"}


@pytest.mark.faults
def test_killed_at_every_call(small: Small) -> None:
    """No call leaves a state that `make check` does not restart from."""
    points = each_state(small.calls)
    bad = [fault for at in points for fault in kill(small, Fault("kill", at))]
    restarts = small.restarts
    others = {*range(1, len(small.calls) + 1)} - {*points}
    bad += [fault for at in sorted(others) for fault in kill(small, Fault("kill", at))]
    assert not bad, tell(bad, len(small.calls), "kill")
    assert small.restarts == restarts, "each_state leaves out a state"


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_real_system_call(small: Small, part: int) -> None:
    points = record(small)[part::PARTS]
    bad = [fault for point in points for fault in kill_traced(small, point)]
    assert not bad, tell(bad, len(points), "kill by strace")


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_call_and_restarted_from_each(small: Small, part: int) -> None:
    points = range(1 + part, len(small.calls) + 1, PARTS)
    bad = [fault for at in points for fault in kill(small, Fault("torn", at), every=True)]
    assert not bad, tell(bad, len(points), "kill")


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_call_and_again(small: Small, part: int) -> None:
    firsts = range(1 + part, len(small.calls) + 1, PARTS)
    pairs = [(first, 1 + (seed * 37 + first * 11) % 220) for first in firsts for seed in range(4)]
    bad = [fault for first, second in pairs for fault in kill_twice(small, first, second)]
    assert not bad, tell(bad, len(pairs), "kill, and kill again")


def kill(small: Small, fault: Fault, bug: str = "", *, every: bool = False) -> list[str]:
    """What is wrong after a kill and a restart, each with the point that repeats it."""
    folder = small.folder(f"kill-{fault.at}")
    ended = small.shard(folder, fault=fault, mutant=bug)
    found = [] if ended.signal == signal.SIGKILL or bug else [f"it was not killed: {ended}"]
    found += restart(small, folder, bug, every=every)
    where = small.calls[min(fault.at, len(small.calls)) - 1]
    return [f"{fault.kind} at point {fault.at} ({where}) {bug}: {what}" for what in found]


def kill_twice(small: Small, first: int, second: int) -> list[str]:
    """A kill, a kill of the restart if it gets as far as that, and a restart."""
    folder = small.folder(f"kill-{first}-{second}")
    small.shard(folder, fault=Fault("kill", first))
    small.shard(folder, fault=Fault("kill", second), seed=3)
    found = restart(small, folder, "")
    return [f"kill at point {first}, then at point {second}: {what}" for what in found]


def kill_traced(small: Small, point: Traced) -> list[str]:
    folder = small.folder(f"strace-{point.name}-{point.number}")
    ended = traced_run(small, folder, point, "signal=SIGKILL")
    found = [] if ended.signal == signal.SIGKILL else [f"it was not killed: {ended}"]
    found += restart(small, folder, "")
    return [f"strace, kill at {point}: {what}" for what in found]


def restart(small: Small, folder: Path, bug: str, *, every: bool = False) -> list[str]:
    """The same command again, until it is done; then what is wrong."""
    before = folder / "data"
    had_seal = (before / "_COMPLETE").exists()
    if bug == "leave_litter":
        small.shard(folder, mutant=bug, seed=2)
        left = litter(before) if not had_seal else []
        shutil.rmtree(folder)
        return left
    return small.restart_faults(folder, mutant=bug, every=every)
