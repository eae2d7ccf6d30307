"""Run a Jinja template that nobody vouches for: in a sandbox, in a process with limits.

In:    a template; conversations as JSON
Out:   what it prints for each, or what was wrong
Keeps: the caller alive and in time: a template has `time_s` for each conversation and
       `memory_bytes` in all; the process may write no file and start no other one
Never: runs a template in the process of the caller

The sandbox of Jinja alone stops neither 'a' * 10**9 nor four loops in each other.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Final

from penstock.chat.formats import Unfit
from penstock.errors import BadConfig, WorkerFailed

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Around what a {% generation %} block prints: characters that no text may have."""
_SIZE = struct.Struct("<I")
_BEGIN_S: Final = 60.0
MOST_KILLED: Final = 8
"""A template for which so many conversations in a row take too long or too much is not asked for
another: a million rows would take two months to be refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a template may use."""

    time_s: float = 5.0
    """For one conversation."""
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 20


class Sandbox:
    """A process that renders one template."""

    _process: "subprocess.Popen[bytes] | None" = None
    _killed = 0
    """Conversations in a row that the process did not live through."""

    def __init__(
        self, template: str, names: dict[str, str], *, date: str | None = None,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        """`names` are texts that a template may print by name, such as bos_token; it is told the
        `date` if it asks, and never that of the clock."""
        self._begin = {"template": template, "names": names, "date": date}
        self.limits = limits or Limits()
        self._lock = threading.Lock()

    def render(self, requests: Sequence[bytes]) -> Iterator[list[str] | Unfit]:
        """What each request prints; a request is {"messages", "tools", "cuts"}.

        A cut [n, prompt] asks for the first n messages alone, with a generation prompt or without.
        """
        with self._lock:
            done = 0
            while done < len(requests):
                process = self._started()
                rest = requests[done:]
                writer = threading.Thread(target=_send_all, args=(process, rest), daemon=True)
                writer.start()
                try:
                    for _ in rest:
                        answer = self._answer(process)
                        done += 1
                        self._killed = 0
                        yield answer
                except GeneratorExit:
                    if done < len(requests):  # answers are on their way that nobody will read
                        self._kill()
                    raise
                except Unfit as error:
                    self._kill()
                    self._killed += 1
                    if self._killed == MOST_KILLED:
                        raise _unusable(
                            f"{self._killed} conversations in a row: {error.why}"
                        ) from None
                    done += 1
                    yield error
                writer.join()

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is not None and self._process.poll() is None:
            return self._process
        limits = self.limits
        begin = {**self._begin, **asdict(limits)}
        environment = {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONHASHSEED": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.chat.sandbox"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=environment, cwd="/",
        )  # fmt: skip
        self._process = process
        _send_all(process, [json.dumps(begin).encode()])
        try:
            _decoded(self._read(process, _BEGIN_S))
            _decoded(self._read(process, limits.time_s))  # it may be slow to compile, too
        except Unfit as error:
            self._kill()
            if error.reason == "template_died":
                raise WorkerFailed(
                    "the process of the template did not begin", why=error.why,
                    do="is jinja2 installed, and is there memory for one more process?",
                ) from None  # fmt: skip
            raise _unusable(error.why or error.reason) from None
        return process

    def _answer(self, process: "subprocess.Popen[bytes]") -> list[str] | Unfit:
        """One answer; raises `Unfit` if there will be no other from this process."""
        data = self._read(process, self.limits.time_s)
        try:
            return _decoded(data)
        except Unfit as error:
            return error

    def _read(self, process: "subprocess.Popen[bytes]", time_s: float) -> bytes:
        deadline = time.monotonic() + time_s
        size = _SIZE.unpack(self._exactly(process, _SIZE.size, deadline))[0]
        return self._exactly(process, size, deadline)

    def _exactly(self, process: "subprocess.Popen[bytes]", size: int, deadline: float) -> bytes:
        assert process.stdout is not None
        descriptor, found = process.stdout.fileno(), bytearray()
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        while len(found) < size:
            left = deadline - time.monotonic()
            if left <= 0 or not waiting.poll(left * 1000):
                told = f"it took more than {self.limits.time_s:g} s"
                raise Unfit("template_too_slow", "chat_template", told)
            block = os.read(descriptor, min(size - len(found), 1 << 20))
            if not block:
                raise Unfit(
                    "template_died", "chat_template",
                    f"its process ended with status {process.wait()}",
                )  # fmt: skip
            found += block
        return bytes(found)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):
                    pipe.close()
            self._process = None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def __del__(self) -> None:
        self._kill()


def _unusable(why: str) -> BadConfig:
    return BadConfig(
        "the chat template cannot be used", why=why,
        do="fix the template: penstock audit-template shows what it does",
    )  # fmt: skip


def _send_all(process: "subprocess.Popen[bytes]", requests: Sequence[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):  # it was ended: whoever reads is told
        for request in requests:
            process.stdin.write(_SIZE.pack(len(request)) + request)
        process.stdin.flush()


def _decoded(data: bytes) -> list[str]:
    answer = json.loads(data)
    if isinstance(answer, list):
        return answer
    raise Unfit(answer["reason"], "chat_template", answer["why"])


# What runs in the process.


def _compile(template: str, names: dict[str, str], date: str | None) -> Any:
    import datetime

    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """{% generation %} … {% endgeneration %}: what stands between them is the model's."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
        sort_keys: bool = False,
    ) -> str:  # fmt: skip
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
            sort_keys=sort_keys,
        )  # fmt: skip

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    # the same rows give the same samples, whoever renders them and however often
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    if date is not None:
        environment.globals["strftime_now"] = datetime.date.fromisoformat(date).strftime
    environment.globals.update(names)
    return environment.from_string(template)


def _print(compiled: Any, request: dict[str, Any], most: int) -> list[str]:
    """What the template prints for each cut, or for all messages."""
    found = []
    messages, tools = request["messages"], request.get("tools")
    for count, prompt in request.get("cuts") or [[len(messages), False]]:
        parts, size = [], 0
        for part in compiled.generate(
            messages=messages[:count], tools=tools, documents=None, add_generation_prompt=prompt
        ):
            parts.append(part)
            size += len(part)
            if size > most:
                raise MemoryError(f"it prints more than {most:,} characters")
        found.append("".join(parts))
    return found


def _limit(memory_bytes: int) -> None:
    import resource

    used = 0
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    for name in ("RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE"):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            resource.setrlimit(getattr(resource, name), (0, 0))


def _main(source: IO[bytes], target: IO[bytes]) -> None:
    """Take requests until there are none."""
    from jinja2 import TemplateError

    for name in ("jinja2.ext", "jinja2.sandbox"):
        importlib.import_module(name)  # before there are limits

    def take() -> Any:
        head = source.read(_SIZE.size)
        if len(head) < _SIZE.size:
            sys.exit(0)
        return json.loads(source.read(_SIZE.unpack(head)[0]))

    def answer(what: Any) -> None:
        # halves of surrogate pairs can come of a template that cuts escapes: as they are
        data = json.dumps(what).encode()
        target.write(_SIZE.pack(len(data)) + data)
        target.flush()

    def attempt(work: Any) -> Any:
        # whoever waits ends this process in time; if nobody lives to do so, it ends by itself
        signal.setitimer(signal.ITIMER_REAL, 2 * begin["time_s"] + 1)
        try:
            return work()
        except TemplateError as error:
            return {"reason": "template_refused", "why": f"{type(error).__name__}: {error}"[:300]}
        except MemoryError as error:
            return {"reason": "template_too_large", "why": str(error) or "no memory is left to it"}
        except RecursionError:
            return {"reason": "template_too_deep", "why": "it calls itself too often"}
        except Exception as error:  # code of others: whatever it raises
            if isinstance(error.__context__, MemoryError):  # Jinja had none to tell of it
                return {"reason": "template_too_large", "why": "no memory is left to it"}
            return {"reason": "template_refused", "why": f"{type(error).__name__}: {error}"[:300]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    begin = take()
    answer(["begun"])
    _limit(begin["memory_bytes"])
    compiled = attempt(lambda: _compile(begin["template"], begin["names"], begin["date"]))
    if isinstance(compiled, dict):
        answer(compiled)
        return
    answer(["ready"])
    while True:
        request = take()
        answer(attempt(lambda: _print(compiled, request, begin["output_bytes"])))  # noqa: B023


if __name__ == "__main__":
    _main(sys.stdin.buffer, sys.stdout.buffer)
