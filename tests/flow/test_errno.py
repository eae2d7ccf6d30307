"""Fail every call to the file system: a clear error, nothing lost, an exact restart.

In:    the small run; ENOSPC, EIO, EMFILE
Out:   exit code 1 and what, where, why, do on standard error; after the same command again,
       every document once
Keeps: the few calls that may fail without ending the run in one list, each with its reason

make check: the first and the last call of every kind, the three in turn; a disk that is full from
each sampled call on.
make faults: every call with each of the three, in forks and by strace.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable

import pytest

from .calls import Call, Fault
from .strace import Traced, record, traced_run
from .sweep import (
    Ended,
    Small,
    each_kind,
    in_strides,
    spread,
    tell,
    undisturbed,
    verify_command,
)

PARTS = 4
NUMBERS = (errno.ENOSPC, errno.EIO, errno.EMFILE)
CLEAR = re.compile(r"^[A-Z]\w+: .+\n  where: .+\n  why:   .+\n  do:    .+$", re.MULTILINE)


def may_fail(call: Call) -> bool:
    """Calls whose failure the run outlives: its events, and putting away what is done with."""
    if call.path.endswith("_events.jsonl"):
        return True  # for whoever looks on; said once on standard error
    if call.name in ("close", "lstat") and call.path.endswith("input.jsonl"):
        return True  # it was only read; its name was only compared with those of other inputs
    return call.name in ("close", "unlink") and "/.tmp-" in call.path  # the object is durable


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kind_of_call_fails(small: Small, part: int) -> None:
    points = each_kind(small.calls)[part::PARTS]
    assert len(points) > 40
    bad = [what for k, at in enumerate(points) for what in fail(small, at, NUMBERS[k % 3])]
    assert not bad, tell(bad, len(points), "errno")


def test_the_disk_is_full_from_here_on(small: Small) -> None:
    points = spread(len(small.calls), 40)
    bad = [what for at in points for what in fail(small, at, errno.ENOSPC, kind="full")]
    assert not bad, tell(bad, len(points), "full disk")


def test_calls_of_a_restart_fail(small: Small) -> None:
    cases = [(killed, at) for killed in (60, 250, len(small.calls) - 20) for at in range(3, 90, 7)]
    bad = [what for case in cases for what in fail_restart(small, *case)]
    assert not bad, tell(bad, len(cases), "errno in a restart")


def test_calls_of_verify_fail(small: Small) -> None:
    fail_verify(small, each_kind)


def test_short_writes_are_finished(small: Small) -> None:
    folder = small.folder("short")
    ended = small.shard(folder, fault=Fault("short"), with_verify=True)
    assert ended.code == 0, str(ended)
    assert not small.faults(folder)
    shutil.rmtree(folder)


def test_real_system_calls_fail(small: Small) -> None:
    traced = record(small)
    points = [(traced[k - 1], NUMBERS[k % 3]) for k in spread(len(traced), 10)]
    bad = [what for point, number in points for what in fail_traced(small, point, number)]
    assert not bad, tell(bad, len(points), "errno by strace")


@pytest.mark.parametrize("bug", ["ignore_failed_fsync", "seal_after_an_error", "raise_plainly"])
def test_a_planted_bug_is_caught(small: Small, bug: str) -> None:
    assert not undisturbed(small, bug), f"{bug} shows without any fault: it proves nothing"
    points = in_strides(small.calls)
    assert any(fail(small, at, errno.EIO, bug=bug) for at in points), (
        f"{bug} was not caught by any of {len(points)} errors"
    )


def test_a_planted_bug_in_short_writes_is_caught(small: Small) -> None:
    bug = "believe_the_first_write"
    assert not undisturbed(small, bug)
    folder = small.folder("short-planted")
    ended = small.shard(folder, fault=Fault("short"), with_verify=True, mutant=bug)
    assert ended.code != 0 or small.faults(folder)
    shutil.rmtree(folder)


@pytest.mark.faults
def test_every_call_of_verify_fails(small: Small) -> None:
    fail_verify(small, lambda calls: list(range(1, len(calls) + 1)))


@pytest.mark.faults
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", ["errno", "full"])
def test_every_call_fails_with_each(small: Small, number: int, kind: str) -> None:
    points = range(1, len(small.calls) + 1)
    bad = [what for at in points for what in fail(small, at, number, kind=kind)]
    assert not bad, tell(bad, len(points), f"{kind} {errno.errorcode[number]}")


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_every_call_of_a_restart_fails(small: Small, part: int) -> None:
    cases = [
        (killed, at)
        for killed in spread(len(small.calls), 8)[part::PARTS]
        for at in range(1, len(small.calls), 4)
    ]
    bad = [what for case in cases for what in fail_restart(small, *case)]
    assert not bad, tell(bad, len(cases), "errno in a restart")


@pytest.mark.faults
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_real_system_call_fails_with_each(small: Small, number: int, part: int) -> None:
    points = record(small)[part::PARTS]
    bad = [what for point in points for what in fail_traced(small, point, number)]
    assert not bad, tell(bad, len(points), f"{errno.errorcode[number]} by strace")


def fail(
    small: Small, at: int, number: int, *, kind: str = "errno", bug: str = "", every: bool = False
) -> list[str]:
    """What is wrong with how an error was met, each with the point that repeats it."""
    call = small.calls[at - 1]
    folder = small.folder(f"errno-{at}-{number}")
    ended = small.shard(folder, fault=Fault(kind, at, number), mutant=bug)
    found = unclear(ended, number)
    if ended.code == 0 and not may_fail(call) and kind == "errno":
        found.append("the error was swallowed")
    found += small.restart_faults(folder, mutant=bug, every=every)
    name = errno.errorcode[number]
    return [f"{kind} {name} at point {at} ({call}) {bug}: {what}" for what in found]


def fail_restart(small: Small, killed: int, at: int) -> list[str]:
    """A kill, an error in the restart if it gets as far as that, and another restart."""
    number = NUMBERS[at % 3]
    folder = small.folder(f"errno-{killed}-{at}")
    small.shard(folder, fault=Fault("kill", killed))
    ended = small.shard(folder, fault=Fault("errno", at, number), seed=3)
    found = unclear(ended, number) + small.restart_faults(folder)
    name = errno.errorcode[number]
    return [f"kill at point {killed}, then {name} at point {at}: {what}" for what in found]


def fail_verify(small: Small, choose: Callable[[list[Call]], list[int]]) -> None:
    """A file that cannot be read is a fault of that file, or a clear error; never a traceback."""
    folder = small.folder("verified")
    assert small.shard(folder, seed=9).code == 0
    listed = small.scratch / "verify-calls.json"
    command = [verify_command(folder / "data")]
    small.warm.run(command, folder=folder, input=small.input, calls=listed)
    calls = [Call(*row) for row in json.loads(listed.read_text())]
    points, bad = choose(calls), []
    for k, at in enumerate(points):
        number = NUMBERS[k % 3]
        fault = Fault("errno", at, number)
        ended = small.warm.run(command, folder=folder, input=small.input, fault=fault)
        told = errno.errorcode[number] in ended.output or os.strerror(number) in ended.output
        if ended.code not in (0, 1) or "Traceback" in ended.output or (ended.code and not told):
            bad.append(
                f"verify, {errno.errorcode[number]} at point {at} ({calls[at - 1]}): {ended}"
            )
    shutil.rmtree(folder)
    assert len(points) > 30
    assert not bad, tell(bad, len(points), "errno in verify")


def fail_traced(small: Small, point: Traced, number: int) -> list[str]:
    name = errno.errorcode[number]
    folder = small.folder(f"strace-{point.name}-{point.number}-{name}")
    ended = traced_run(small, folder, point, f"error={name}")
    found = unclear(ended, number)
    if ended.code == 0 and point.kind in ("fsync", "link", "mkdir"):
        found.append("the error was swallowed")
    found += small.restart_faults(folder)
    return [f"strace, {name} at {point}: {what}" for what in found]


def unclear(ended: Ended, number: int) -> list[str]:
    """How the end of a run falls short of a clear error."""
    if ended.code == 0:
        return []
    found = []
    if ended.code != 1 or "Traceback" in ended.output or not CLEAR.search(ended.output):
        found.append(f"not a clear error: {ended}")
    elif errno.errorcode[number] not in ended.output:
        found.append(f"does not say {errno.errorcode[number]}: {ended}")
    return found
