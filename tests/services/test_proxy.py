"""The proxy: nothing changes where no fault strikes, and each fault is the one that was asked for.

Behind it stands a server that keeps what it is sent, and knows what it has done.
"""

import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .proxy import KINDS, Chaos, Fault, Proxy
from .servers import Server

BODY = os.urandom(300_000)


class Behind(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kept: list[bytes] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news here."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Behind

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Kept", "as it is")
        if self.path == "/chunks":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(BODY), 70_000):
                part = BODY[start : start + 70_000]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(BODY)

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        size = int(self.headers["Content-Length"])
        body = self.rfile.read(size)
        if len(body) == size:
            self.server.kept.append(body)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def behind() -> Iterator[Behind]:
    server = Behind()
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def between(behind: Behind) -> Iterator[Proxy]:
    with Proxy(behind.server_address[1]) as proxy:
        yield proxy


class Client:
    """What came of one request."""

    def __init__(
        self, proxy: Proxy, method: str = "GET", path: str = "/x", body: bytes = b""
    ) -> None:
        self.status: int | None = None
        self.body = b""
        self.error: Exception | None = None
        self.headers: dict[str, str] = {}
        link = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=2)
        try:
            link.request(method, path, body=body or None)
            answer = link.getresponse()
            self.status, self.headers = answer.status, dict(answer.getheaders())
            while part := answer.read1(1 << 16):
                self.body += part
            if method != "HEAD" and len(self.body) < int(self.headers.get("Content-Length", 0)):
                raise http.client.IncompleteRead(b"")
        except (OSError, http.client.HTTPException) as error:
            self.error = error
        finally:
            link.close()


def test_everything_passes_on_one_connection(between: Proxy, behind: Behind) -> None:
    link = http.client.HTTPConnection("127.0.0.1", between.port, timeout=5)
    for _ in range(3):
        for path in ("/x", "/chunks"):
            link.request("GET", path)
            answer = link.getresponse()
            assert (answer.status, answer.getheader("X-Kept")) == (200, "as it is")
            assert answer.read() == BODY
        link.request("HEAD", "/x")
        answer = link.getresponse()
        assert (answer.getheader("Content-Length"), answer.read()) == (str(len(BODY)), b"")
        link.request("PUT", "/x", body=BODY)
        assert link.getresponse().read() == b""
        link.request("PUT", "/x", body=iter([BODY[:7], BODY[7:]]), encode_chunked=True,
                     headers={"Transfer-Encoding": "chunked"})  # fmt: skip
        assert link.getresponse().read() == b""
    link.close()
    assert behind.kept == [BODY] * 6
    assert between.seen == ["GET /x", "GET /chunks", "HEAD /x", "PUT /x", "PUT /x"] * 3
    assert between.struck == []


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("at", [0, 1, 65_536, 131_072, 299_999])
def test_cut_reply(between: Proxy, at: int, reset: bool) -> None:
    between.plan("cut reply", at=at, reset=reset)
    found = Client(between)
    assert found.error
    assert BODY.startswith(found.body)
    assert len(found.body) == at or (reset and len(found.body) < at)
    assert Client(between).body == BODY
    assert between.struck == [f"request 1: GET /x: cut reply at={at} reset={reset}"]


@pytest.mark.parametrize("at", [0, 1, 65_536, 299_999, 300_000])
def test_cut_request(between: Proxy, behind: Behind, at: int) -> None:
    between.plan("cut request", at=at)
    assert Client(between, "PUT", body=BODY).error
    assert Client(between, "PUT", body=b"later").status == 200
    assert [body for body in behind.kept if len(body) < 300_000] == [b"later"]


def test_lost_request_and_lost_reply(between: Proxy, behind: Behind) -> None:
    between.plan("lose request")
    assert Client(between, "PUT", body=b"1").error
    between.plan("refuse")
    assert isinstance(Client(between, "PUT", body=b"2").error, ConnectionResetError)
    assert behind.kept == []
    between.plan("lose reply")
    assert Client(between, "PUT", body=b"3").error
    assert behind.kept == [b"3"]


@pytest.mark.parametrize("status", [429, 500, 502, 503])
def test_answers_instead_and_afterwards(between: Proxy, behind: Behind, status: int) -> None:
    between.plan("answer", status=status, retry_after="7")
    found = Client(between, "PUT", body=b"1")
    assert (found.status, found.headers["Retry-After"], behind.kept) == (status, "7", [])
    between.plan("answer after", status=status)
    found = Client(between, "PUT", body=b"2")
    assert (found.status, "Retry-After" in found.headers, behind.kept) == (status, False, [b"2"])
    between.plan("answer", status=status)
    assert Client(between, "HEAD").status == status


def test_wrong_bytes_and_right_headers(between: Proxy, behind: Behind) -> None:
    for flips, path in ((1, "/x"), (3, "/chunks")):
        between.plan("wrong", flips=flips, seed=flips)
        found = Client(between, path=path)
        assert (found.error, len(found.body)) == (None, len(BODY))
        differing = [bin(a ^ b).count("1") for a, b in zip(found.body, BODY, strict=True) if a != b]
        assert differing == [1] * flips
    between.plan("wrong", way="request")
    Client(between, "PUT", body=BODY)
    assert [len(body) for body in behind.kept] == [len(BODY)]
    assert behind.kept != [BODY]


@pytest.mark.parametrize("at", [0, 1000, 299_999, 400_000])
def test_short_body_with_a_length_that_matches(between: Proxy, at: int) -> None:
    between.plan("short", at=at)
    found = Client(between)
    assert (found.error, found.body) == (None, BODY[:at])
    assert found.headers["Content-Length"] == str(min(at, len(BODY)))


def test_slow(between: Proxy) -> None:
    between.plan("slow", at=299_990, bytes_per_s=50)
    began = time.monotonic()
    assert Client(between).body == BODY
    assert 0.15 < time.monotonic() - began < 2
    between.plan("slow", at=299_998)
    began = time.monotonic()
    assert Client(between).body == BODY
    assert 2 <= time.monotonic() - began < 4


def test_freeze_and_close_while_frozen(between: Proxy) -> None:
    for at in (0, 1000, 299_999):
        between.plan("freeze", at=at, seconds=0.3)
        began = time.monotonic()
        assert Client(between).body == BODY
        assert 0.3 <= time.monotonic() - began < 2
    between.plan("freeze", seconds=600)
    assert isinstance(Client(between).error, TimeoutError)
    began = time.monotonic()
    between.close()
    assert time.monotonic() - began < 2


def test_refusing(between: Proxy) -> None:
    with between.refusing():
        assert isinstance(Client(between).error, ConnectionRefusedError)
    assert Client(between).body == BODY


def test_faults_strike_what_they_match(between: Proxy) -> None:
    between.plan("answer", "^PUT ", status=500, times=2)
    between.plan("lose reply", "/other$")
    assert Client(between).status == 200
    assert [Client(between, "PUT").status for _ in range(3)] == [500, 500, 200]
    assert between.faults == [Fault(kind="lose reply", match="/other$")]


def test_chaos_is_repeated_by_its_seed_whatever_the_order() -> None:
    lines = [f"GET /{k % 10}" for k in range(400)]

    def draw(seed: int, order: list[str]) -> dict[str, list[Fault | None]]:
        chaos = Chaos(seed=seed, most=1000)
        found: dict[str, list[Fault | None]] = {}
        for line in order:
            found.setdefault(line, []).append(chaos.draw(line, 0))
        return found

    assert draw(1, lines) == draw(1, sorted(lines)) != draw(2, lines)
    one, two = ([f"PUT /bucket-{name}/x/_probe/{name}"] * 99 for name in ("0a1b", "2c3d"))
    assert list(draw(1, one).values()) == list(draw(1, two).values())
    drawn = [fault for faults in draw(1, lines).values() for fault in faults if fault]
    assert 30 < len(drawn) < 90
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert Chaos(seed=1, share=1, most=3).draw("x", 3) is None
    assert "wrong" not in {fault.kind for fault in drawn if fault.way == "request"}


# Another protocol.


def ask_redis(port: int, command: bytes = b"PING\r\n") -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
        client.sendall(command)
        answer = b""
        while not answer.endswith(b"\r\n"):
            more = client.recv(100)
            if not more:
                raise ConnectionAbortedError(answer)
            answer += more
    return answer


def test_faults_of_any_protocol(redis_server: Server) -> None:
    with Proxy(redis_server.port, http=False) as proxy:
        assert ask_redis(proxy.port) == b"+PONG\r\n"
        proxy.plan("refuse")
        with pytest.raises(OSError):  # noqa: PT011  # reset or broken pipe, as it comes
            ask_redis(proxy.port)
        proxy.plan("cut reply", at=3)
        with pytest.raises(ConnectionAbortedError, match="PO"):
            ask_redis(proxy.port)
        proxy.plan("lose reply")
        with pytest.raises(ConnectionAbortedError):
            ask_redis(proxy.port, b"SET lost reply\r\n")
        assert ask_redis(redis_server.port, b"EXISTS lost\r\n") == b":1\r\n"
        proxy.plan("wrong", at=3)
        assert ask_redis(proxy.port) != b"+PONG\r\n"
        proxy.plan("freeze", at=2, seconds=0.3)
        began = time.monotonic()
        assert ask_redis(proxy.port) == b"+PONG\r\n"
        assert time.monotonic() - began > 0.3
        with proxy.refusing(), pytest.raises(ConnectionRefusedError):
            ask_redis(proxy.port)
        assert ask_redis(proxy.port) == b"+PONG\r\n"


def test_passes_many_bytes_per_second() -> None:
    """A floor far below the 1,050 MB/s it has alone: the machine may be busy."""
    size = 256 << 20
    listener = socket.create_server(("127.0.0.1", 0))

    def send() -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1 << 16)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            block = bytes(1 << 20)
            for _ in range(size >> 20):
                client.sendall(block)

    sender = threading.Thread(target=send)
    sender.start()
    with Proxy(listener.getsockname()[1]) as proxy:
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
            buffer = bytearray(1 << 20)
            got = 0
            while got < size:
                got += client.recv_into(buffer)
        speed = size / 1e6 / (time.monotonic() - began)
    sender.join(10)
    listener.close()
    print(f"{speed:,.0f} MB/s")
    assert speed > 100
