"""Run a stage that ends with whoever started it, even one that is killed.

In:    a command; a pipe on standard input that the conductor holds open and never writes to
Out:   the exit code of the command, 128 and the signal's number where one ended it
Keeps: nothing outlives the conductor: the end of the pipe is seen however it ends, and then all
       that the command started is killed, in other sessions too (Linux); so it is when the command
       ends; if this one is killed, the system kills the command
Never: imports more than it must: 15 ms before the command runs

It is run as a file: `python -I leash.py COMMAND…`, in a session of its own. The conductor's lock is
open in it and in the command: it is free when all of them have ended.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_ROUNDS: Final = 200
"""Looks for processes that are left, each of which may have started another."""


def _die_with(parent: int) -> None:
    """Between fork and exec: should the leash itself be killed, so is the command (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before that
            os.kill(os.getpid(), signal.SIGKILL)


def _descendants() -> list[int]:
    """All processes below this one that still run, as far as the system tells."""
    parents: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state not in (b"Z", b"X"):
                    parents[int(name)] = int(parent)
    found: list[int] = []
    level = {os.getpid()}
    while level:
        level = {one for one, parent in parents.items() if parent in level}
        found += level
    return found


def _kill_descendants() -> None:
    for _ in range(_ROUNDS):
        left = _descendants()
        if not left:
            return
        for one in left:
            with contextlib.suppress(OSError):
                os.kill(one, signal.SIGKILL)
        time.sleep(0.005)


def main(command: list[str]) -> int:
    """Run the command to its end, and pass on what asks it to stop."""
    if sys.platform == "linux":  # what loses its parent becomes a child of this one
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    own = os.getpid()
    try:
        # ruff's doubt is about threads, and there are none yet; the lock goes on to the command
        stage = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, preexec_fn=lambda: _die_with(own), close_fds=False
        )
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127

    def pass_on(number: int, frame: FrameType | None) -> None:
        stage.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)

    def end_with_the_pipe() -> None:
        while os.read(0, 1024):
            pass
        _kill_descendants()
        os.killpg(0, signal.SIGKILL)  # this one too

    threading.Thread(target=end_with_the_pipe, daemon=True).start()
    code = stage.wait()
    _kill_descendants()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the conductor
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
