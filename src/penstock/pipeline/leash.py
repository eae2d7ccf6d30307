"""Run a stage that ends with whoever started it, even one that is killed.

In:    a command; a pipe on standard input that the conductor holds open and never writes to
Out:   the exit code of the command, 128 and the signal's number where one ended it
Keeps: nothing outlives the conductor: the end of the pipe is seen however it ends, and then all
       processes of this group are killed; if this one is killed, the system kills the command
Never: imports more than it must: 15 ms before the command runs

It is run as a file: `python -I leash.py COMMAND…`, in a session of its own.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def _die_with_parent() -> None:
    """Between fork and exec: should the leash itself be killed, so is the command (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run the command to its end, and pass on what asks it to stop."""
    try:
        # ruff's doubt is about threads, and there are none yet
        stage = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
        return 127

    def pass_on(number: int, frame: FrameType | None) -> None:
        stage.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)

    def end_with_the_pipe() -> None:
        while os.read(0, 1024):
            pass
        os.killpg(0, signal.SIGKILL)  # what the command started, and this one

    threading.Thread(target=end_with_the_pipe, daemon=True).start()
    code = stage.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the conductor
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)
