"""The servers: ready when started, on loopback only, and gone with whoever started them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from . import servers
from .servers import Server

TESTS = Path(__file__).resolve().parents[1]

STARTERS = [
    pytest.param(servers.start_moto, id="moto"),
    pytest.param(servers.start_redis, id="redis"),
    pytest.param(servers.start_seaweedfs, id="seaweedfs", marks=pytest.mark.services),
    pytest.param(servers.start_azurite, id="azurite", marks=pytest.mark.services),
]


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []


@pytest.mark.parametrize("start", STARTERS)
def test_loopback_only_and_gone_after_stop(start: Callable[[], Server]) -> None:
    server = start()
    processes = family(server.process.pid)
    print(f"{server.name}: {server.start_s:.2f} s to ready")
    try:
        heard = {
            (found.laddr.ip, found.laddr.port)
            for process in processes
            for found in process.net_connections("inet")
            if found.status == psutil.CONN_LISTEN
        }
        assert ("127.0.0.1", server.port) in heard
        assert {address for address, _ in heard} == {"127.0.0.1"}
        assert server in servers.running
    finally:
        server.stop()
    wait_until_gone(processes)
    assert not server.folder.exists()
    assert server not in servers.running
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)


@pytest.mark.parametrize("start", STARTERS)
def test_gone_with_a_starter_that_is_killed(start: Callable[[], Server], tmp_path: Path) -> None:
    code = (
        "import time; from services import servers; "
        f"print(servers.{start.__name__}().process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": str(tmp_path),  # what it cannot remove itself
        },
    ) as starter:
        assert starter.stdout is not None
        processes = family(int(starter.stdout.readline()))
        assert len(processes) >= 2
        starter.send_signal(signal.SIGKILL)
        wait_until_gone(processes)


def test_a_server_that_ends_at_once_is_explained() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)broken was not ready .*no such luck"):
        servers.start(
            "broken",
            lambda folder, ports: [sys.executable, "-c", "raise SystemExit('no such luck')"],
            lambda port: False,
        )


def test_a_missing_program_says_how_to_install_it() -> None:
    with pytest.raises(RuntimeError, match=r"^no-such-server is not installed: install it$"):
        servers.program("no-such-server", "install it")


def test_redis_answers(redis_server: Server) -> None:
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", redis_server.port), timeout=5) as client:
        client.sendall(b"SET key value\r\nGET key\r\n")
        answer = b""
        while not answer.endswith(b"value\r\n"):
            answer += client.recv(100)
    assert answer == b"+OK\r\n$5\r\nvalue\r\n"
    assert time.monotonic() - began < 5
