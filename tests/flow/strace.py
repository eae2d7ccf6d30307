"""The same faults at real system calls: strace attached to a run that waits for it.

In:    the small run, a system call by name and number, what to inject there
Out:   the calls that touch the dataset or its input; how a run with one of them disturbed ended
Keeps: one thread for the writer, so that the n-th call of a name is the same one every time

A run that is forked from the warm process and waits makes none of the 18,000 calls of Python's
start, and 0.3 s do for a point.
"""

import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .sweep import Ended, Small, tool

TRACED: Final = (
    "openat,close,write,pwrite64,writev,fsync,fdatasync,link,linkat,unlink,unlinkat,mkdir,mkdirat,"
    "rename,renameat,renameat2,newfstatat,statx,getdents64,read,pread64,preadv,preadv2,lseek,"
    "ftruncate,fallocate,sync,syncfs"
)
_LINE = re.compile(r"(?P<pid>\d+)\s+(?P<name>\w+)\((?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class Traced:
    """The `number`-th call of `name`, and what it was in an undisturbed run."""

    name: str
    number: int
    text: str

    @property
    def kind(self) -> str:
        """The word that calls.py has for it."""
        if self.name == "openat":
            return "create" if "O_CREAT" in self.text else "open"
        return {"linkat": "link", "newfstatat": "stat"}.get(self.name, self.name)

    def __str__(self) -> str:
        return f"{self.name}:when={self.number} ({self.text[:100]})"


_recorded: dict[Path, list[Traced]] = {}


def record(small: Small) -> list[Traced]:
    """Every system call of an undisturbed run that touches the dataset or its input."""
    if small.scratch not in _recorded:
        folder = small.folder("strace-undisturbed")  # kept: its paths are in the log
        log = small.scratch / "strace.log"
        ended = _run(small, folder, ["-y", "-e", f"trace={TRACED}", "-o", str(log)])
        assert ended.code == 0, str(ended)
        assert not small.faults(folder)
        numbers: Counter[str] = Counter()
        found = []
        threads = set()
        for line in log.read_text(errors="replace").splitlines():
            match = _LINE.match(line)
            if match is None:
                continue
            name = match["name"]
            numbers[name] += 1
            if str(folder) in line or str(small.input) in line:
                found.append(Traced(name, numbers[name], line.replace(str(folder), "")))
                threads.add(match["pid"])
        assert len(threads) == 1, "strace counts for each thread: one must make all the calls"
        _recorded[small.scratch] = found
    return _recorded[small.scratch]


def traced_run(small: Small, folder: Path, point: Traced, inject: str) -> Ended:
    """A run with `inject` at one system call."""
    what = ["-e", f"trace={point.name}", "-e", f"inject={point.name}:{inject}:when={point.number}"]
    return _run(small, folder, [*what, "-o", "/dev/null"])


def _run(small: Small, folder: Path, options: list[str]) -> Ended:
    running = small.start(folder, wait_for_tracer=True)
    stopped = running.wait()
    assert stopped is None, str(stopped)
    tracer = subprocess.Popen(
        [tool("strace"), "-f", *options, "-p", str(running.pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        _wait_for_tracer(running.pid, tracer)
        running.resume()
        ended = running.wait()
        while ended is None:  # the stop is told once more, now that it is traced
            ended = running.wait()
        return ended
    finally:
        tracer.wait(timeout=30)
        assert tracer.stderr
        tracer.stderr.close()


def _wait_for_tracer(pid: int, tracer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    status = Path(f"/proc/{pid}/status")
    while "TracerPid:\t0" in status.read_text():
        if tracer.poll() is not None:
            assert tracer.stderr
            raise AssertionError(f"strace could not attach: {tracer.stderr.read().decode()}")
        assert time.monotonic() < deadline, "strace did not attach within 30 s"
        time.sleep(0.002)
