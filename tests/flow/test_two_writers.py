"""Two writers on one dataset: the older is fenced, nothing is doubled.

In:    the small run, twice or three times at once
Out:   one exact dataset; the writer that lost says "Fenced" and has exit code 1
Keeps: the pause at every call: SIGSTOP there, another writer does all, SIGCONT

make check: 50 pauses spread over the calls, 30 pairs of pauses, 5 races of three.
make faults: a pause at every call, 400 pairs, 60 races.
"""

import random
import re
import shutil

import pytest

from .calls import Fault
from .sweep import Ended, Running, Small, likely_points, spread, tell, undisturbed

PARTS = 4
BUGS = ("rename_instead_of_link", "look_then_rename", "go_on_when_fenced")
CLEAR = re.compile(r"^(Fenced|AlreadySealed): .+\n  where: .+", re.MULTILINE)


def test_the_older_of_two_is_fenced(small: Small) -> None:
    points = spread(len(small.calls), 50)
    bad = [what for at in points for what in pause(small, at)]
    assert not bad, tell(bad, len(points), "pause")


def test_two_that_pause_in_turn(small: Small) -> None:
    pairs = some_pairs(small, 30, seed=1)
    bad = [what for pair in pairs for what in pause_both(small, *pair)]
    assert not bad, tell(bad, len(pairs), "pause both, seed 1")


def test_three_at_once(small: Small) -> None:
    bad = [what for number in range(5) for what in race(small, number)]
    assert not bad, tell(bad, 5, "race")


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(small: Small, bug: str) -> None:
    assert not undisturbed(small, bug), f"{bug} shows without any fault: it proves nothing"
    points = likely_points(small, bug)
    assert any(pause(small, at, bug) for at in points), (
        f"{bug} was not caught by any of {len(points)} pauses"
    )


def test_other_bytes_under_a_shards_name_are_not_adopted(small: Small) -> None:
    """A writer with other options died before its commit; its shard is garbage, and goes."""
    ended, found = with_intruder(small, "")
    assert ended.code == 0, str(ended)
    assert not found, found


def test_a_planted_bug_in_adoption_is_caught(small: Small) -> None:
    assert not undisturbed(small, "adopt_anything")
    ended, found = with_intruder(small, "adopt_anything")
    assert ended.code != 0
    assert found


@pytest.mark.faults
@pytest.mark.parametrize("part", range(PARTS))
def test_the_older_is_fenced_wherever_it_paused(small: Small, part: int) -> None:
    points = range(1 + part, len(small.calls) + 1, PARTS)
    bad = [what for at in points for what in pause(small, at)]
    assert not bad, tell(bad, len(points), "pause")


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_that_pause_in_turn(small: Small, seed: int) -> None:
    pairs = some_pairs(small, 100, seed)
    bad = [what for pair in pairs for what in pause_both(small, *pair)]
    assert not bad, tell(bad, len(pairs), f"pause both, seed {seed}")


@pytest.mark.faults
def test_many_races(small: Small) -> None:
    bad = [what for number in range(60) for what in race(small, number)]
    assert not bad, tell(bad, 60, "race")


def pause(small: Small, at: int, bug: str = "") -> list[str]:
    """One writer stops at a call, another does all the work, the first goes on."""
    folder = small.folder(f"pause-{at}")
    older = small.start(folder, fault=Fault("stop", at), mutant=bug)
    assert older.wait() is None
    newer = small.shard(folder, seed=2, mutant=bug)
    older.resume()
    ended = to_the_end(older)
    found = [] if newer.code == 0 or bug else [f"the newer one failed: {newer}"]
    found += judge(small, at, ended) if not bug else []
    found += small.restart_faults(folder, seed=3)
    where = small.calls[min(at, len(small.calls)) - 1]
    return [f"pause at point {at} ({where}) {bug}: {what}" for what in found]


def pause_both(small: Small, at: int, other: int) -> list[str]:
    """One stops, a second takes over and stops, the first goes on to its end, then the second."""
    folder = small.folder(f"pause-{at}-{other}")
    older = small.start(folder, fault=Fault("stop", at))
    assert older.wait() is None
    newer = small.start(folder, fault=Fault("stop", other), seed=2)
    paused = newer.wait() is None
    older.resume()
    first = to_the_end(older)
    found = unclear("the first", first)
    if paused:
        newer.resume()
        found += unclear("the second", to_the_end(newer))
    found += small.restart_faults(folder, seed=3)
    return [f"pause at point {at}, the other at point {other}: {what}" for what in found]


def race(small: Small, number: int) -> list[str]:
    """Three writers from the same moment on, with real ids: nothing of this can be repeated."""
    folder = small.folder(f"race-{number}")
    running = [small.start(folder, seed=None) for _ in range(3)]
    ends = [to_the_end(one) for one in running]
    found = [what for end in ends for what in unclear("a writer", end)]
    found += small.restart_faults(folder, seed=3)
    return [f"race {number}: {what}" for what in found]


def with_intruder(small: Small, bug: str) -> tuple[Ended, list[str]]:
    folder = small.folder("intruder")
    name = "shard_00001.parquet"
    # A writer that died: only then can what lies under the name be ours to clear.
    opened = next(n for n, c in enumerate(small.calls, 1) if c.name == "link" and "_log/" in c.path)
    small.shard(folder, fault=Fault("kill", opened + 3))
    intruder = {"name": name, "same": False}
    ended = small.shard(folder, intruder=intruder, with_verify=True, mutant=bug)
    found = small.faults(folder)
    if (folder / "data" / name).exists() and not bug:
        found.append("what the dead writer left is still there")
    shutil.rmtree(folder)
    return ended, found


def to_the_end(running: Running) -> Ended:
    while (ended := running.wait()) is None:
        running.resume()
    return ended


def judge(small: Small, at: int, ended: Ended) -> list[str]:
    """Whether a writer that was paused at a call, and overtaken, ended as it should."""
    links = [
        n for n, call in enumerate(small.calls, 1) if call.name == "link" and "_log/" in call.path
    ]
    opened, sealed = links[0], links[-1]
    if opened < at <= sealed and (ended.code != 1 or "Fenced" not in ended.output):
        return [f"the older one was not fenced: {ended}"]
    if at > sealed and ended.code != 0:
        return [f"it had sealed, and failed: {ended}"]
    return unclear("the older one", ended)


def unclear(who: str, ended: Ended) -> list[str]:
    clear = ended.code == 1 and CLEAR.search(ended.output) and "Traceback" not in ended.output
    return [] if ended.code == 0 or clear else [f"{who} did not end clearly: {ended}"]


def some_pairs(small: Small, count: int, seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    calls = len(small.calls)
    return [(chance.randint(1, calls), chance.randint(1, calls)) for _ in range(count)]
