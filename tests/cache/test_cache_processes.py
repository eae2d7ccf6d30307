"""One cache directory, many real processes, some of them killed: no error, no wrong byte."""

import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from penstock.cache.disk import DiskCache

LIMIT: Final = 1_000_000
KEYS: Final = 300
RUN_S: Final = 5.0

COMMON: Final = """
import functools, json, os, random, sys, time
from penstock.cache.disk import DiskCache

@functools.cache
def value_of(key):
    chance = random.Random(key)
    size = chance.choice((0, 10, 3_000, 50_000, 300_000))
    return chance.randbytes(size * chance.randrange(1, 9) // 8)
"""
"""Values are known from their keys: 20 MB in all, up to a third of the limit each."""

WORKER: Final = (
    COMMON
    + """
folder, limit, seed, until = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
cache, chance = DiskCache(folder, limit), random.Random(seed)
pinned, seen = [], dict.fromkeys(("get", "map", "put", "fetch", "hit"), 0)
while time.time() < until:
    key = int(300 * chance.random() ** 2)
    value, does = value_of(key), chance.choice(("get", "map", "put", "fetch"))
    seen[does] += 1
    if does == "put":
        cache.put(str(key), value)
        continue
    if does == "fetch":
        found = cache.fetch(str(key), lambda: value)
    else:
        found = getattr(cache, does)(str(key))
    if found is None:
        continue
    seen["hit"] += 1
    assert found == value, f"{does} of {key} gave a wrong value"
    if does == "map":
        pinned.append((key, found, value, os.stat(cache._path(str(key))).st_ino))
        if len(pinned) > 1:
            key, found, value, inode = pinned.pop(0)
            assert found == value, f"the mapped {key} has changed"
            assert os.stat(cache._path(str(key))).st_ino == inode, f"{key} was evicted in use"
print(json.dumps(seen))
"""
)


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def ended(started: list[subprocess.Popen[str]]) -> Iterator[None]:
    """Whatever happens, none of ours is left."""
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=10)


def used_bytes(folder: Path) -> int:
    """Bytes of all files at one moment: the lock stops new ones, a renamed one counts once."""
    with open(folder / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        sizes = {}
        for path, _, names in os.walk(folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(f"{path}/{name}")
                    sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_eight_processes_far_below_the_working_set(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    DiskCache(folder, LIMIT).put("first", b"")
    until, chance = time.time() + RUN_S, random.Random(0)
    alive: list[subprocess.Popen[str]] = []
    killed, samples, seed, next_kill = 0, [], 0, time.time() + 1
    with ended(alive):
        while time.time() < until - 0.5:
            while len(alive) < 8:
                seed += 1
                alive.append(start(WORKER, folder, LIMIT, seed, until))
            samples.append(used_bytes(folder))
            time.sleep(0.02)
            if time.time() > next_kill:
                next_kill = time.time() + 1.5 * chance.random()
                victim = alive.pop(chance.randrange(8))
                assert victim.poll() is None, victim.communicate()
                victim.kill()
                victim.communicate(timeout=10)
                killed += 1
        for process in alive:
            told, wrong = process.communicate(timeout=60)
            assert process.returncode == 0, wrong
            assert told.startswith("{")
    assert killed >= 3
    assert max(samples) <= LIMIT
    assert max(samples) > LIMIT * 0.8, "the limit was never near"
    DiskCache(folder, LIMIT).put("last", b"")
    left = sorted(name for name in os.listdir(folder) if name.startswith("."))
    assert left == [".lock"], "litter of the killed"
    assert used_bytes(folder) <= LIMIT


FETCH: Final = """
import os, sys, time
from penstock.cache.disk import DiskCache
folder, go, log = sys.argv[1:4]
cache = DiskCache(folder)
print("ready", flush=True)
while not os.path.exists(go):
    time.sleep(0.001)
for key in range(20):
    def make():
        with open(log, "a") as file:
            file.write(f"{key}\\n")
        time.sleep(0.02)
        return str(key).encode() * 50_000
    assert cache.fetch(str(key), make) == str(key).encode() * 50_000
"""


def test_of_eight_processes_one_makes_each_value(tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    started = [start(FETCH, tmp_path / "cache", go, log) for _ in range(8)]
    with ended(started):
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        go.touch()
        for process in started:
            _, wrong = process.communicate(timeout=60)
            assert process.returncode == 0, wrong
    assert sorted(log.read_text().split(), key=int) == [str(key) for key in range(20)]


MAKE_FOR_EVER: Final = """
import sys, time
from penstock.cache.disk import DiskCache
def make():
    print("making", flush=True)
    time.sleep(1000)
DiskCache(sys.argv[1]).fetch("key", make)
"""


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_maker_that_is_killed_or_frozen_does_not_stop_the_others(
    tmp_path: Path, how: str
) -> None:
    maker = start(MAKE_FOR_EVER, tmp_path)
    with ended([maker]):
        assert maker.stdout is not None
        assert maker.stdout.readline() == "making\n"
        cache = DiskCache(tmp_path, wait_s=1.0 if how == "frozen" else 1000.0)
        maker.send_signal(signal.SIGSTOP if how == "frozen" else signal.SIGKILL)
        if how == "killed":
            maker.communicate(timeout=10)
        began = time.monotonic()
        assert cache.fetch("key", lambda: b"value") == b"value"
        waited_s = time.monotonic() - began
        assert waited_s < 1 if how == "killed" else 1 <= waited_s < 3
        assert cache.fetch("key", bytes) == b"value"


MAP: Final = """
import sys
from penstock.cache.disk import DiskCache
held = DiskCache(sys.argv[1], 1000).map("key")
print("mapped", flush=True)
sys.stdin.readline()
assert held == b"v" * 600
"""


def test_what_another_process_has_mapped_stays_until_it_dies(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    cache.put("key", b"v" * 600)
    other = subprocess.Popen(
        [sys.executable, "-c", MAP, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"mapped\n"
        cache.put("new", bytes(500))
        assert cache.get("new") is None
        assert cache.get("key") == b"v" * 600
        other.kill()
        other.communicate(timeout=10)
        cache.put("new", bytes(500))
        assert cache.get("new") == bytes(500)
        assert cache.get("key") is None
    finally:
        other.kill()
        other.wait(10)


FORK: Final = """
import os, sys, threading, time
from penstock.cache.disk import DiskCache
cache = DiskCache(sys.argv[1], 10**6)
def put():
    for k in range(10**9):
        cache.put(str(k % 1000), bytes(1000))
        cache.get(str(k % 7))
threading.Thread(target=put, daemon=True).start()
time.sleep(0.1)
children = []
for _ in range(30):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    children.append(child)
    time.sleep(0.01)
cache.put("last", b"value")
print(cache.get("last"), flush=True)
for child in children:
    os.kill(child, 9)
os._exit(0)
"""


def test_a_fork_in_the_middle_leaves_no_lock_held(tmp_path: Path) -> None:
    """Descriptors go to the child with the locks on them; it lives on and knows nothing of it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("b'value'\n", 0), done.stderr


SLOW: Final = """
import sys, time
from penstock.cache import disk
disk._BEAT_S = 0.1
def make():
    print("making", flush=True)
    time.sleep(3)
    return b"value"
disk.DiskCache(sys.argv[1]).fetch("key", make)
"""


def test_a_maker_that_is_slow_and_alive_is_waited_for(tmp_path: Path) -> None:
    maker = start(SLOW, tmp_path)
    with ended([maker]):
        assert maker.stdout is not None
        assert maker.stdout.readline() == "making\n"
        assert DiskCache(tmp_path, wait_s=1.0).fetch("key", bytes) == b"value"


PLAN: Final = """
import sys
from penstock.cache.disk import DiskCache
cache = DiskCache(sys.argv[1], 1000)
for line in sys.stdin:
    cache.plan("me", line.split())
    print("planned", flush=True)
"""


def test_what_another_process_plans_to_ask_for_stays_until_it_dies(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    other = subprocess.Popen(
        [sys.executable, "-c", PLAN, tmp_path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def plan(keys: str) -> None:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(f"{keys}\n")
        other.stdin.flush()
        assert other.stdout.readline() == "planned\n"

    try:
        for key in ("a", "b", "c"):
            cache.put(key, bytes(280))
        plan("a b unheard-of")
        cache.put("d", bytes(280))
        assert [cache.get(key) is not None for key in "abcd"] == [True, True, False, True]
        plan("b")
        cache.put("e", bytes(280))
        assert [cache.get(key) is not None for key in "abde"] == [False, True, True, True]
        plan("b d e")
        cache.put("f", bytes(280))
        assert cache.get("f") is None, "there is no room"
        other.kill()
        other.communicate(timeout=10)
        cache.put("f", bytes(280))
        assert cache.get("f") is not None
    finally:
        other.kill()
        other.wait(10)
    assert not list(tmp_path.glob(".plan-*"))


def test_a_plan_ends_with_whoever_planned(tmp_path: Path) -> None:
    cache, before = DiskCache(tmp_path, 1000), len(os.listdir("/proc/self/fd"))
    for key in ("a", "b"):
        cache.plan("me", [key])
        cache.plan("another", [key])
    assert len(list(tmp_path.glob(".plan-*"))) == 1
    assert len(os.listdir("/proc/self/fd")) == before + 1
    cache.plan("another", [])
    cache.plan("me", [])
    assert not list(tmp_path.glob(".plan-*"))
    cache.plan("me", ["a"])
    del cache
    assert not list(tmp_path.glob(".plan-*"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_no_longer_needed_is_dropped_unless_it_is_in_use(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path)
    for key in ("a", "b"):
        cache.put(key, bytes(100))
    held = cache.map("a")
    cache.drop("a")
    cache.drop("b")
    cache.drop("never there")
    assert cache.get("a") is not None
    assert cache.get("b") is None
    del held
    cache.drop("a")
    assert cache.get("a") is None


def test_mapped_values_leave_descriptors_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond half of those that a process may have, a value is mapped without one."""
    monkeypatch.setattr("penstock.cache.disk._most_descriptors", lambda: 60)
    cache = DiskCache(tmp_path)
    for k in range(200):
        cache.put(str(k), b"%d" % k * 1000)
    held = [cache.map(str(k)) for k in range(200)]
    assert len(os.listdir("/proc/self/fd")) < 100
    assert [bytes(one or b"") for one in held] == [b"%d" % k * 1000 for k in range(200)]
