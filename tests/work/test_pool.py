"""A pool of processes: a dead one is replaced, an error arrives in words, none is left behind."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from penstock import errors
from penstock.errors import BadConfig, PenstockError, ShardMismatch, WorkerFailed
from penstock.work.pool import ATTEMPTS, HerePool, LocalPool, Pool, pack_error, unpacked

MODULE: Final = """\
import os, signal, sys, time
from pathlib import Path
from penstock.errors import BadConfig, ShardMismatch

class Own(BadConfig):
    pass

def make(setup):
    if setup.get("fails") == "refused":
        raise BadConfig("the setup is wrong", where="here", why="so", do="mend it")
    if setup.get("fails") == "broken":
        raise RuntimeError("the setup broke")
    if setup.get("fails") == "dies":
        os._exit(7)
    scratch = Path(setup["scratch"])

    def task(request):
        header, data = request
        match header:
            case b"echo":
                return data
            case b"pid":
                time.sleep(0.05)
                return str(os.getpid()).encode()
            case b"print":
                print("said", data.decode(), flush=True)
                os.write(1, b"and again")
                return data
            case b"refuse":
                raise ShardMismatch("not so", where="w\\u00e4re", why="why", do="do")
            case b"own":
                raise Own("of a kind that the driver does not know")
            case b"break":
                raise ValueError("a fault of a plugin: \\udc80")
            case b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"die once":
                try:
                    (scratch / "died").touch(exist_ok=False)
                except FileExistsError:
                    return data
                os.kill(os.getpid(), signal.SIGKILL)
            case b"exit":
                sys.exit(3)
            case b"sleep":
                (scratch / str(os.getpid())).touch()
                time.sleep(60)
            case b"hold":
                (scratch / str(os.getpid())).touch()
                pow(3, 200_000_000)  # for minutes, with the interpreter's lock
    return task

def pack_request(request):
    return request

def unpack_request(header, data):
    return header, data

def pack(result):
    return [result[:1], result[1:]]

def unpack(payload):
    return bytes(payload)
"""


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    (tmp_path / "task_of_tests.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield {"scratch": str(tmp_path)}
    sys.modules.pop("task_of_tests", None)


def make(setup: dict[str, Any]) -> Any:
    """As the module of tests makes it, here and in workers."""
    return importlib.import_module("task_of_tests").make(setup)


make.__module__ = "task_of_tests"


@pytest.fixture
def pool(setup: dict[str, Any]) -> Iterator[LocalPool]:
    made = LocalPool(make, setup, 2)
    yield made
    made.close()
    assert not workers_of(os.getpid())


def workers_of(pid: int) -> list[int]:
    """The workers that are children of this process, by pid."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children if is_worker(child.pid)]


def is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return (
            "penstock.work.pool" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def ask(pool: Pool, header: bytes, data: bytes = b"data") -> Any:
    return pool.submit((header, data)).result(timeout=60)


def test_pieces_of_every_size_come_back(pool: LocalPool) -> None:
    sizes = [0, 1, 65536, (1 << 20) + 1, 5 << 20]
    futures = [pool.submit((b"echo", bytes([k]) * size)) for k, size in enumerate(sizes)]
    for k, (size, future) in enumerate(zip(sizes, futures, strict=True)):
        assert future.result(timeout=60) == bytes([k]) * size


def test_every_worker_works(pool: LocalPool) -> None:
    futures = [pool.submit((b"pid", b"")) for _ in range(8)]
    pids = {int(future.result(timeout=60)) for future in futures}
    assert pids == set(workers_of(os.getpid()))
    assert len(pids) == 2


def test_what_a_task_prints_is_no_answer(pool: LocalPool) -> None:
    for k in range(4):
        assert ask(pool, b"print", b"hello %d" % k) == b"hello %d" % k
        assert ask(pool, b"echo", b"x") == b"x"


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_arrive_as_they_were(setup: dict[str, Any], workers: int) -> None:
    pool = HerePool(make, setup) if workers == 1 else LocalPool(make, setup, 1)
    try:
        with pytest.raises(ShardMismatch) as refused:
            ask(pool, b"refuse")
        error = refused.value
        assert (error.what, error.where, error.why, error.do) == ("not so", "wäre", "why", "do")
        with pytest.raises(PenstockError, match="of a kind that the driver does not know"):
            ask(pool, b"own")
        with pytest.raises(WorkerFailed) as broken:
            ask(pool, b"break")
        assert broken.value.what == "a worker failed"
        assert broken.value.why.startswith("ValueError: a fault of a plugin: ")
        assert "task_of_tests.py" in broken.value.where
        assert "report it with the lines above" in broken.value.do
        assert ask(pool, b"echo", b"goes on") == b"goes on"
    finally:
        pool.close()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fails", ["refused", "broken"])
def test_a_setup_that_fails_says_why(setup: dict[str, Any], workers: int, fails: str) -> None:
    setup["fails"] = fails

    def run() -> None:
        pool = HerePool(make, setup) if workers == 1 else LocalPool(make, setup, 1)
        try:
            ask(pool, b"echo")
        finally:
            pool.close()

    with pytest.raises((BadConfig, WorkerFailed, RuntimeError)) as caught:
        run()
    if fails == "refused":
        assert isinstance(caught.value, BadConfig)
        assert (caught.value.what, caught.value.where) == ("the setup is wrong", "here")
    else:
        assert "the setup broke" in str(caught.value)


def test_a_worker_that_dies_is_replaced_and_its_piece_done_again(pool: LocalPool) -> None:
    deadline = time.monotonic() + 30
    while len(before := set(workers_of(os.getpid()))) < 2:  # the second one may still start
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ask(pool, b"die once", b"twice") == b"twice"
    after = set(workers_of(os.getpid()))
    assert len(after) == 2
    assert len(before & after) == 1


def test_workers_killed_from_outside(pool: LocalPool) -> None:
    futures = [pool.submit((b"pid", b"")) for _ in range(30)]
    for pid in workers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    wait(futures, timeout=60)
    assert {int(future.result(0)) for future in futures} == set(workers_of(os.getpid()))


@pytest.mark.parametrize(("how", "code"), [(b"die", -9), (b"exit", 3)])
def test_a_piece_that_always_kills(setup: dict[str, Any], how: bytes, code: int) -> None:
    pool = LocalPool(make, setup, 1)
    try:
        with pytest.raises(WorkerFailed) as caught:
            ask(pool, how)
        assert caught.value.what == f"a worker died {ATTEMPTS} times over the same piece"
        assert caught.value.where == how.decode()
        assert caught.value.why.startswith(f"its exit code was {code}; ")
        assert "fewer --workers" in caught.value.do
        assert ask(pool, b"echo", b"goes on") == b"goes on"
    finally:
        pool.close()


def test_a_worker_that_dies_before_it_is_asked(setup: dict[str, Any]) -> None:
    pool = LocalPool(make, {**setup, "fails": "dies"}, 1)
    try:
        with pytest.raises(WorkerFailed, match="died 3 times") as caught:
            ask(pool, b"echo")
        assert "its exit code was 7" in caught.value.why
    finally:
        pool.close()


def test_closing_ends_workers_that_are_busy(setup: dict[str, Any], tmp_path: Path) -> None:
    pool = LocalPool(make, setup, 2)
    futures = [pool.submit((b"sleep", b"")) for _ in range(5)]
    pids = workers_of(os.getpid())
    wait_until(lambda: all((tmp_path / str(pid)).exists() for pid in pids))
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 5
    assert all(future.done() for future in futures)
    assert not [pid for pid in pids if is_worker(pid)]


def test_closing_while_workers_are_being_replaced(setup: dict[str, Any]) -> None:
    for delay_s in (0.0, 0.02, 0.1, 0.3):
        pool = LocalPool(make, setup, 2)
        futures = [pool.submit((b"die", b"")) for _ in range(6)]
        time.sleep(delay_s)
        pool.close()
        assert all(future.done() for future in futures)
        assert not workers_of(os.getpid())


DRIVER: Final = """\
import sys, json, time
import task_of_tests
from penstock.work.pool import LocalPool
setup, header = json.loads(sys.argv[1]), sys.argv[2].encode()
pool = LocalPool(task_of_tests.make, setup, 2)
futures = [pool.submit((header, b"")) for _ in range(2)]
while header == b"echo" and not all(future.done() for future in futures):
    time.sleep(0.01)
print("ready", flush=True)
try:
    time.sleep(60)
finally:
    pool.close()
"""


@pytest.mark.parametrize("header", ["echo", "sleep", "hold"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_driver(
    setup: dict[str, Any], tmp_path: Path, header: str, number: signal.Signals
) -> None:
    """At once: a worker that outlives its driver by seconds takes memory from the next run."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(setup), header],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"ready\n"
        pids = workers_of(driver.pid)
        assert len(pids) == 2
        if header != "echo":
            wait_until(lambda: all((tmp_path / str(pid)).exists() for pid in pids))
        driver.send_signal(number)
        driver.wait(timeout=30)
    try:
        wait_until(lambda: not any(map(is_worker, pids)), timeout_s=0.5)
    finally:
        for pid in filter(is_worker, pids):
            os.kill(pid, signal.SIGKILL)


def wait_until(is_so: Any, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_every_error_of_ours_survives_the_way() -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, PenstockError)
    ]
    assert len(kinds) > 15
    for kind in kinds:
        status, parts = pack_error(kind("what", where="where", why="why", do="do"))
        with pytest.raises(kind) as caught:
            unpacked(None, status, b"".join(parts))
        assert type(caught.value) is kind
        assert str(caught.value) == str(kind("what", where="where", why="why", do="do"))
