"""Stand between a client and a server: pass everything on, but for the faults asked for.

In:    the port of a server; faults, planned one by one or drawn by a seed
Out:   a port that answers like the server; a log of what went wrong, which repeats with the seed
Keeps: every byte and header where no fault strikes; a reply without a length is given one
Never: listens beyond 127.0.0.1, holds a body in memory, outlives `close`

    client ──▶ refuse ─ lose request ─ cut request ─ answer ──▶ server
    client ◀── slow ─ freeze ─ wrong ─ short ─ cut reply ─ lose reply ─ answer after ◀── server

HTTP by default, a fault for each request. With `http=False` any protocol: a fault for each
connection, and of the faults those that need no knowledge of requests.
"""

import contextlib
import dataclasses
import random
import re
import socket
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

BLOCK_BYTES: Final = 1 << 20
"""1 MiB blocks pass 1,050 to 1,650 MB/s on two cores, 64 KiB 700; without a proxy 1,100 to 1,800.
"""

Kind = Literal[
    "refuse",
    "lose request",
    "cut request",
    "lose reply",
    "cut reply",
    "answer",
    "answer after",
    "slow",
    "freeze",
    "wrong",
    "short",
]
KINDS: Final[tuple[Kind, ...]] = (
    *("refuse", "lose request", "cut request", "lose reply", "cut reply", "answer"),
    *("answer after", "slow", "freeze", "wrong", "short"),
)

proxies: Final[list["Proxy"]] = []
"""Every proxy of this process that is open, for its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong with one request, or with one connection."""

    kind: Kind
    match: str = ""
    """What "METHOD /path" must match; all do by default."""
    times: int = 1
    at: int = 0
    """Bytes of the body (of a connection that is not HTTP: of what comes back) that pass first."""
    way: Literal["request", "reply"] = "reply"
    """Of slow, freeze and wrong: which body is meant."""
    status: int = 503
    retry_after: str | None = None
    seconds: float = 30.0
    bytes_per_s: float = 1.0
    flips: int = 1
    """Bytes that are wrong, at places drawn by `seed`."""
    seed: int = 0
    reset: bool = False
    """Cut with a reset instead of an orderly end."""

    def __str__(self) -> str:
        names = _TOLD.get(self.kind, ())
        return " ".join([self.kind, *(f"{name}={getattr(self, name)}" for name in names)])


_TOLD: Final = {
    "cut request": ("at", "reset"),
    "cut reply": ("at", "reset"),
    "lose request": ("reset",),
    "lose reply": ("reset",),
    "short": ("at",),
    "answer": ("status", "retry_after"),
    "answer after": ("status", "retry_after"),
    "slow": ("way", "at", "bytes_per_s"),
    "freeze": ("way", "at", "seconds"),
    "wrong": ("way", "flips", "seed"),
}
"""What matters of a fault, for the log."""


_CHANCE_NAMES: Final = re.compile(r"bucket-[0-9a-f]+|(?<=_probe/)[0-9a-f]+")


@dataclass(slots=True, kw_only=True)
class Chaos:
    """Faults drawn for each request by a seed, until there were enough."""

    seed: int
    share: float = 0.15
    """Of the requests."""
    most: int = 12
    """Afterwards all goes well, so that a run can end."""
    kinds: tuple[Kind, ...] = KINDS
    cut_bytes: int = 1 << 20
    """Cuts are at multiples of 64 KiB, or anywhere, below this."""
    freeze_s: float = 30.0
    bytes_per_s: float = 1.0
    wrong_requests: bool = False
    """Also flip bytes on their way to the server; a server that checks no hash will keep them."""
    _times: dict[str, int] = field(default_factory=dict)

    def draw(self, line: str, spent: int) -> Fault | None:
        """The fault of a request: the same for the n-th such request, whatever comes between."""
        line = _CHANCE_NAMES.sub("", line)  # else no seed would repeat: these differ in every run
        nth = self._times[line] = self._times.get(line, 0) + 1
        chance = random.Random(f"{self.seed} {line} {nth}")
        if spent >= self.most or chance.random() >= self.share:
            return None
        anywhere = chance.randrange(self.cut_bytes)
        if chance.random() < 0.3:  # what most requests here carry is small
            anywhere %= 2000
        kind = chance.choice(self.kinds)
        ways = ("request", "reply") if kind != "wrong" or self.wrong_requests else ("reply",)
        return Fault(
            kind=kind,
            at=anywhere if chance.random() < 0.5 else anywhere >> 16 << 16,
            way="request" if chance.choice(ways) == "request" else "reply",
            status=chance.choice((429, 500, 502, 503)),
            retry_after=chance.choice((None, "0", "1")),
            seconds=self.freeze_s,
            bytes_per_s=self.bytes_per_s,
            flips=chance.choice((1, 1, 3)),
            seed=chance.getrandbits(32),
            reset=chance.random() < 0.5,
        )


class Head:
    """The first lines of a request or of a reply."""

    def __init__(self, raw: bytes) -> None:
        first, *rest = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        self.first = first
        self.fields = [(name.strip(), value.strip()) for name, _, value in
                       (line.partition(":") for line in rest)]  # fmt: skip

    def get(self, name: str) -> str | None:
        found = [value for key, value in self.fields if key.lower() == name.lower()]
        return found[0] if found else None

    def remove(self, name: str) -> None:
        self.fields = [pair for pair in self.fields if pair[0].lower() != name.lower()]

    def set(self, name: str, value: str) -> None:
        self.remove(name)
        self.fields.append((name, value))

    def encode(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.fields)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


Dialect = Callable[[Head], None]
"""Changes a head on its way: a request's before the server, a reply's before the client."""


def is_request(head: Head) -> bool:
    return not head.first.startswith("HTTP/")


def forget_conditions(head: Head) -> None:
    """Make of any server one that overwrites."""
    for name in ("If-None-Match", "If-Match", "x-goog-if-generation-match"):
        head.remove(name)


def speak_google(head: Head) -> None:
    """Make of an S3 server as much of Google's XML API as conditional puts need."""
    if not is_request(head):
        head.set("x-goog-generation", "1")
        return
    head.first = urllib.parse.unquote(head.first)  # Google's keys are escaped to the last dash
    head.set("Authorization", "AWS4-HMAC-SHA256 Credential=test/20240101/us-east-1/s3/x")
    if head.get("x-goog-if-generation-match") == "0":
        head.set("If-None-Match", "*")


class _Gone(Exception):
    """One end has hung up, or is to be hung up on."""


class _Wire:
    """One end of a connection, with what came beyond what was asked for."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self._held = b""
        self._buffer: memoryview | None = None
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def head(self) -> Head | None:
        """The next head; None if the other side has ended in good order."""
        while b"\r\n\r\n" not in self._held:
            more = self.end.recv(1 << 16)
            if not more:
                if self._held:
                    raise _Gone("in the middle of a head")
                return None
            self._held += more
        raw, _, self._held = self._held.partition(b"\r\n\r\n")
        return Head(raw)

    def parts(self, count: int | None) -> Iterator[memoryview]:
        """The next `count` bytes, or all there are, in blocks that the caller may change."""
        left = float("inf") if count is None else count
        if self._held and left:
            first = self._held[: int(min(left, len(self._held)))]
            self._held = self._held[len(first) :]
            left -= len(first)
            yield memoryview(bytearray(first))
        if self._buffer is None and left:
            self._buffer = memoryview(bytearray(BLOCK_BYTES))
        while left:
            assert self._buffer is not None
            got = self.end.recv_into(self._buffer[: int(min(left, BLOCK_BYTES))])
            if not got:
                if count is None:
                    return
                raise _Gone("in the middle of a body")
            left -= got
            yield self._buffer[:got]

    def line(self) -> bytes:
        while b"\r\n" not in self._held:
            more = self.end.recv(1 << 16)
            if not more:
                raise _Gone("in the middle of a line")
            self._held += more
        line, _, self._held = self._held.partition(b"\r\n")
        return line

    def chunks(self) -> bytes:
        """A body in chunks, as one: only small ones come so."""
        body = b""
        while size := int(self.line().split(b";")[0], 16):
            body += b"".join(bytes(part) for part in self.parts(size))
            self.line()
        while self.line():
            pass
        return body

    def send(self, data: bytes | memoryview) -> None:
        self.end.sendall(data)

    def cut(self, *, reset: bool) -> None:
        if reset:
            self.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.end.close()
        else:
            with contextlib.suppress(OSError):
                self.end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A port before a server's. Use it in a `with` block, or `close` it."""

    def __init__(
        self, behind: int, *, dialects: tuple[Dialect, ...] = (), http: bool = True
    ) -> None:
        self.behind = behind
        self.dialects = dialects
        self.http = http
        self.faults: list[Fault] = []
        """Planned: the first that matches a request strikes, and is used up."""
        self.chaos: Chaos | None = None
        self.seen: list[str] = []
        """Every request line, or connection."""
        self.bodies: list[tuple[str, int, int]] = []
        """Every request that came to its end: its line, the bytes of its body and of the reply's.
        """
        self.before: Callable[[str], None] | None = None
        """Called with each request line just before the server gets the request."""
        self.after: Callable[[str], None] | None = None
        """Called when the server has answered, just before the client hears of it."""
        self.struck: list[str] = []
        """Every fault that struck, with what it struck."""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = self._listen(0)
        self.port = int(self._listener.getsockname()[1])
        self._accept()
        proxies.append(self)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, kind: Kind, match: str = "", **options: object) -> None:
        """Let a fault strike the next request that matches."""
        self.faults.append(Fault(kind=kind, match=match, **options))  # type: ignore[arg-type]

    def story(self) -> str:
        """What went wrong, and the seed that repeats it."""
        seed = f"seed {self.chaos.seed}" if self.chaos else "no seed"
        head = f"{len(self.seen)} requests, {len(self.struck)} faults, {seed}"
        return "\n".join([head, *self.struck])

    def close(self) -> None:
        """Hang up on everyone."""
        if self in proxies:
            proxies.remove(self)
        self._closing.set()
        _shut(self._listener)
        with self._lock:
            for end in self._open:
                _shut(end, close=False)
        for thread in self._threads:
            thread.join(10)

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Nobody listens at the port meanwhile; connections that stand are cut."""
        _shut(self._listener)
        with self._lock:
            for end in self._open:
                _shut(end, close=False)
        try:
            yield
        finally:
            self._listener = self._listen(self.port)
            self._accept()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        return listener

    def _accept(self) -> None:
        self._start(self._accept_on, self._listener)

    def _start(self, run: Callable[[socket.socket], None], end: socket.socket) -> None:
        thread = threading.Thread(target=run, args=(end,), daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()]
        self._threads.append(thread)
        thread.start()

    def _accept_on(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self._start(self._serve, client)

    @contextlib.contextmanager
    def _kept(self, end: socket.socket) -> Iterator[_Wire]:
        """Known to `close` while it is open."""
        with self._lock:
            self._open.add(end)
        try:
            yield _Wire(end)
        finally:
            with self._lock:
                self._open.discard(end)
            end.close()

    def _serve(self, end: socket.socket) -> None:
        with contextlib.suppress(OSError, _Gone), self._kept(end) as client:
            if self.http:
                while not self._closing.is_set() and self._exchange(client):
                    pass
            else:
                self._relay(client)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.behind), timeout=120)

    def _fault(self, line: str) -> Fault | None:
        with self._lock:
            self.seen.append(line)
            chosen = None
            for place, fault in enumerate(self.faults):
                if re.search(fault.match, line):
                    chosen = self.faults.pop(place)
                    if chosen.times > 1:
                        again = dataclasses.replace(chosen, times=chosen.times - 1)
                        self.faults.insert(place, again)
                    break
            if chosen is None and self.chaos is not None:
                chosen = self.chaos.draw(line, len(self.struck))
            if chosen is not None:
                self.struck.append(f"request {len(self.seen)}: {line}: {chosen}")
            return chosen

    # One request and its reply.

    def _exchange(self, client: _Wire) -> bool:
        """Pass one request on, and its reply back; whether the client may send another."""
        request = client.head()
        if request is None:
            return False
        method, _, rest = request.first.partition(" ")
        line = f"{method} {rest.rpartition(' ')[0]}"
        fault = self._fault(line)
        kind = fault.kind if fault else None
        if fault and kind == "refuse":
            client.cut(reset=True)
            return False
        if request.get("Expect"):
            request.remove("Expect")
            client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = client.parts(int(request.get("Content-Length") or 0))
        if (request.get("Transfer-Encoding") or "").lower() == "chunked":
            whole = client.chunks()
            request.remove("Transfer-Encoding")
            request.set("Content-Length", str(len(whole)))
            body = iter([memoryview(bytearray(whole))])
        if fault and kind in ("lose request", "answer"):
            for _ in body:
                pass
            if kind == "lose request":
                client.cut(reset=fault.reset)
                return False
            client.send(_answer(fault, method))
            return True
        if fault and fault.way == "request":
            size = int(request.get("Content-Length") or 0)
            body = self._disturbed(body, fault, size)
        for dialect in self.dialects:
            dialect(request)
        request.set("Connection", "close")
        if self.before is not None:
            self.before(line)
        with self._connect() as end, self._kept(end) as server:
            server.send(request.encode())
            sent = 0
            for part in body:
                if fault and kind == "cut request" and sent + len(part) >= fault.at:
                    server.send(part[: fault.at - sent])
                    server.cut(reset=fault.reset)
                    client.cut(reset=fault.reset)
                    return False
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    server.send(part)  # a server may answer, and hang up, before it has read all
                sent += len(part)
            if fault and kind == "cut request":
                client.cut(reset=fault.reset)
                return False
            return self._reply(client, server, line, fault, sent)

    def _reply(
        self, client: _Wire, server: _Wire, line: str, fault: Fault | None, sent: int
    ) -> bool:
        method = line.partition(" ")[0]
        reply = server.head()
        while reply is not None and reply.first.split(" ")[1].startswith("1"):
            reply = server.head()
        if reply is None:
            raise _Gone("without a reply")
        if self.after is not None:
            self.after(line)
        for dialect in self.dialects:
            dialect(reply)
        reply.remove("Connection")
        body, size = self._body_of(reply, server, method)
        kind = fault.kind if fault else None
        if fault and kind in ("lose reply", "answer after"):
            for _ in body:
                pass  # all of it: the server has done the work
            if kind == "answer after":
                client.send(_answer(fault, method))
                return True
            client.cut(reset=fault.reset)
            return False
        if fault and kind == "short":
            size = min(size, fault.at)
            if method != "HEAD":
                reply.set("Content-Length", str(size))
            client.send(reply.encode())
            for part in body:
                client.send(part[:size])
                size -= min(size, len(part))
            return True
        client.send(reply.encode())
        if fault and fault.way == "reply":
            body = self._disturbed(body, fault, size)
        if fault and kind == "cut reply":
            left = fault.at
            for part in body:
                client.send(part[:left])
                left -= len(part)
                if left <= 0:
                    break
            client.cut(reset=fault.reset)
            return False
        received = 0
        for part in body:
            client.send(part)
            received += len(part)
        self.bodies.append((line, sent, received))
        return True

    def _body_of(self, reply: Head, server: _Wire, method: str) -> tuple[Iterator[memoryview], int]:
        status = int(reply.first.split(" ")[1])
        if method == "HEAD" or status in (204, 304):
            return iter(()), 0
        if (length := reply.get("Content-Length")) is not None:
            return server.parts(int(length)), int(length)
        if (reply.get("Transfer-Encoding") or "").lower() == "chunked":
            whole = server.chunks()
            reply.remove("Transfer-Encoding")
        else:
            whole = b"".join(bytes(part) for part in server.parts(None))
        reply.set("Content-Length", str(len(whole)))
        return iter([memoryview(bytearray(whole))]), len(whole)

    def _disturbed(
        self, body: Iterator[memoryview], fault: Fault, size: int
    ) -> Iterator[memoryview]:
        """A body that comes slowly, stops for a while, or is not what it was."""
        if fault.kind == "wrong":
            chance = random.Random(fault.seed)
            places = sorted({chance.randrange(size) for _ in range(fault.flips)}) if size else []
            at = 0
            for part in body:
                for place in places:
                    if at <= place < at + len(part):
                        part[place - at] ^= 1 << chance.randrange(8)
                at += len(part)
                yield part
            return
        if fault.kind not in ("slow", "freeze"):
            yield from body
            return
        passed = 0
        if fault.kind == "freeze" and not fault.at:
            self._pause(fault.seconds)
        for part in body:
            first = part[: max(0, fault.at - passed)]
            rest = part[len(first) :]
            if first:
                yield first
            if fault.kind == "freeze":
                if passed < fault.at <= passed + len(part):
                    self._pause(fault.seconds)
                if rest:
                    yield rest
            else:
                step = max(1, int(fault.bytes_per_s / 10))
                for start in range(0, len(rest), step):
                    self._pause(step / fault.bytes_per_s)
                    yield rest[start : start + step]
            passed += len(part)

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise _Gone("the proxy was closed")

    # Any protocol.

    def _relay(self, client: _Wire) -> None:
        """Pass bytes on both ways until either side has had enough."""
        fault = self._fault("connection")
        if fault and fault.kind in ("refuse", "lose request"):
            client.cut(reset=True)
            return
        with self._connect() as end, self._kept(end) as server:
            end.settimeout(None)
            back = threading.Thread(
                target=self._pour, args=(server, client, fault, "reply"), daemon=True
            )
            back.start()
            self._pour(client, server, fault, "request")
            back.join()

    def _pour(self, source: _Wire, sink: _Wire, fault: Fault | None, way: str) -> None:
        with contextlib.suppress(OSError, _Gone):
            body = source.parts(None)
            if fault and fault.kind == f"lose {way}":
                for _ in body:
                    break
                raise _Gone
            if fault and fault.way == way:
                body = self._disturbed(body, fault, fault.at + 1)
            left = fault.at if fault and fault.kind == f"cut {way}" else None
            for part in body:
                sink.send(part[:left])
                if left is not None:
                    left -= len(part)
                    if left <= 0:
                        break
        for wire in (source, sink):
            with contextlib.suppress(OSError):
                wire.cut(reset=False)


def _answer(fault: Fault, method: str) -> bytes:
    body = b"" if method == "HEAD" else b"<Error><Code>Fault</Code></Error>"
    lines = [f"HTTP/1.1 {fault.status} Fault", f"Content-Length: {len(body)}"]
    if fault.retry_after is not None:
        lines.append(f"Retry-After: {fault.retry_after}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def _shut(end: socket.socket, *, close: bool = True) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    if close:
        end.close()
