"""Run a server that ends with whoever started it, even one that is killed.

In:    a command; a pipe on standard input that the starter holds open and never writes to
Out:   the exit code of the command
Keeps: no server outlives its starter: the end of the pipe is seen however the starter ends
Never: imports more than it must: 15 ms before the command runs
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

PATIENCE_S = 1.0
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Between fork and exec: should this process itself be killed, so is the server (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(command: list[str]) -> int:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def end_with_the_pipe() -> None:
        while os.read(0, 1024):
            pass
        server.terminate()
        try:
            server.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            server.kill()

    threading.Thread(target=end_with_the_pipe, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they end the servers
    sys.exit(main(sys.argv[1:]))
