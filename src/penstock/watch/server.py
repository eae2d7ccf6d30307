"""Serve the page of `penstock watch`: on this machine, for reading only.

In:    a directory with datasets, runs, events and losses
Out:   one page without a build step, JSON for it, and a stream that says when to look again
Keeps: documents are text: the page puts them in as text, and its policy lets no script run that
       is not a file of ours
Never: writes; answers anything but GET and HEAD; answers to another name than its own, unless a
       host was asked for; asks another machine for anything
"""

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import BadConfig, PenstockError
from penstock.options import config_of
from penstock.store.log import Log
from penstock.watch import rejects
from penstock.watch.pipeline import told_error
from penstock.watch.workplace import Looks, Watch, WatchConfig

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

STATIC: Final = Path(__file__).parent / "static"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
MOST_STREAMS: Final = 32
WARM_S: Final = 2.0
"""So long the command waits for the logs before it says where the page is."""
POLL_S: Final = 0.4
"""How often a stream looks for something new."""


def make_app(
    watch: Watch, hosts: frozenset[str] | None, *, on_ready: Callable[[], None] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
) -> "Starlette":  # fmt: skip
    """The page's routes; `hosts` are the names that it answers to, None for any. Streams end when
    all `is_over`."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import FileResponse, StreamingResponse
    from starlette.routing import Mount, Route
    from starlette.staticfiles import StaticFiles

    streams = 0

    def index(_: "Request") -> "Response":
        return FileResponse(STATIC / "index.html")

    async def stream(request: "Request") -> "Response":
        nonlocal streams
        if streams >= MOST_STREAMS:
            return _json({"error": {"what": "too many pages are open"}}, 503)

        async def events() -> AsyncIterator[bytes]:
            nonlocal streams
            streams += 1
            try:
                seen, quiet = "", 0.0
                yield b"retry: 1000\n\n"
                while not (is_over() or await request.is_disconnected()):
                    stamp = await asyncio.to_thread(watch.pipeline.stamp)
                    if stamp != seen or quiet > 10.0:
                        seen, quiet = stamp, 0.0
                        yield f"event: changed\ndata: {json.dumps(stamp)}\n\n".encode()
                    await asyncio.sleep(POLL_S)
                    quiet += POLL_S
            finally:
                streams -= 1

        return StreamingResponse(events(), media_type="text/event-stream")

    def answers(find: "Callable[[Request], Any]") -> "Callable[[Request], Response]":
        """A route that answers with JSON; an error of ours is one too."""

        def route(request: "Request") -> "Response":
            try:
                return _json(find(request))
            except (PenstockError, OSError) as error:
                return _json({"error": told_error(error)}, 422)
            except Exception as error:  # the page says so, and asks on
                logging.getLogger("penstock.watch").warning("a request failed", exc_info=True)
                return _json({"error": told_error(error)}, 500)

        return route

    def run_of(request: "Request") -> Looks:
        return watch.explorer(request.query_params.get("run", ""))

    def log_of(request: "Request") -> Log:
        return watch.log(request.query_params.get("dataset", ""))

    found: dict[str, Callable[[Request], Any]] = {
        "overview": lambda request: watch.overview(),
        "run": lambda request: run_of(request).head(),
        "batch": lambda request: run_of(request).batch(_whole(request, "n")),
        "row": lambda request: run_of(request).row(_whole(request, "n"), _whole(request, "row")),
        "stretch": lambda request: run_of(request).stretch(
            _whole(request, "first"), _whole(request, "count", 1),
            by=request.query_params.get("by", "shards"),
        ),
        "search": lambda request: run_of(request).search(
            request.query_params.get("q", "")[:1000], _whole(request, "at", 0)
        ),
        "where": lambda request: run_of(request).where(
            _whole(request, "source"), _whole(request, "shard"), _whole(request, "row"),
            _whole(request, "at", 0),
        ),
        "reasons": lambda request: rejects.reasons(log_of(request)),
        "rejects": lambda request: rejects.page(
            log_of(request), request.query_params.get("reason", ""), _whole(request, "file", 0),
            _whole(request, "byte", 0),
        ),
        "pair": lambda request: rejects.pair(
            log_of(request), _whole(request, "file"), _whole(request, "byte"), watch.reads_in
        ),
    }  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(_: "Starlette") -> AsyncIterator[None]:
        on_ready()
        yield
        watch.close()

    return Starlette(
        routes=[
            Route("/", index, methods=["GET"]),
            Route("/stream", stream, methods=["GET"]),
            *(Route(f"/api/{name}", answers(find), methods=["GET"])
              for name, find in found.items()),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(Guard, hosts=hosts)],
        lifespan=lifespan,
    )  # fmt: skip


class Guard:
    """Lets through what asks for the page by its own name, to read; puts the policy on answers."""

    def __init__(self, app: Any, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # no websockets
        status = 0
        if scope["method"] not in ("GET", "HEAD"):
            status = 405
        elif self._hosts is not None and _host_of(scope["headers"]) not in self._hosts:
            status = 421
        elif _is_cross_site(scope):
            status = 403

        async def send_on(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [pair for pair in message["headers"] if pair[0].decode() not in HEADERS]
                ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*kept, *ours]}
            await send(message)

        if not status:
            await self._app(scope, receive, send_on)
            return
        what = {405: "this page is read-only", 421: "this page has another name"}.get(
            status, "this page is not for other pages"
        )
        allowed = [(b"allow", b"GET, HEAD")] if status == 405 else []
        headers = [(b"content-type", b"text/plain; charset=utf-8"), *allowed]
        await send_on({"type": "http.response.start", "status": status, "headers": headers})
        await send_on({"type": "http.response.body", "body": what.encode()})


def _is_cross_site(scope: "Scope") -> bool:
    """Whether the page of another site asks; a link may lead from there to the page itself, which
    has no data and is in no frame."""
    asked = {name: value for name, value in scope["headers"] if name.startswith(b"sec-fetch-")}
    if asked.get(b"sec-fetch-site") != b"cross-site":
        return False
    is_link = asked.get(b"sec-fetch-mode") == b"navigate"
    return not (is_link and asked.get(b"sec-fetch-dest") == b"document" and scope["path"] == "/")


def _host_of(headers: list[tuple[bytes, bytes]]) -> str:
    """The Host header; empty unless there is exactly one."""
    found = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    return found[0] if len(found) == 1 else ""


def allowed_hosts(host: str | None, port: int) -> frozenset[str] | None:
    """The Host headers that are answered: the loopback's names, with the port; any if a host was
    asked for that is no single address, and that address too if it is one.

    >>> sorted(allowed_hosts(None, 8000))
    ['127.0.0.1:8000', '[::1]:8000', 'localhost:8000']
    >>> sorted(allowed_hosts("10.0.0.7", 8000) - allowed_hosts(None, 8000))
    ['10.0.0.7:8000']
    >>> allowed_hosts("0.0.0.0", 8000) is None
    True
    """
    names = {f"[{name}]" if ":" in name else name for name in LOOPBACK}
    if host is not None:
        try:
            if ipaddress.ip_address(host).is_unspecified:
                return None
        except ValueError:
            pass  # a name
        names.add(f"[{host}]" if ":" in host else host.lower())
    return frozenset(f"{name}:{port}" for name in names) | (
        frozenset(names) if port == 80 else frozenset()
    )


def _whole(request: "Request", name: str, default: int | None = None) -> int:
    """A number of the query."""
    text = request.query_params.get(name, "" if default is None else str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise BadConfig(f"{name} is {text!r}", do="give a whole number from 0 on")
    return int(text)


def _json(found: Any, status: int = 200) -> "Response":
    from starlette.responses import Response

    data = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
    return Response(data, status, media_type="application/json")


def serve(
    root: str | os.PathLike[str], config: WatchConfig | None = None, *,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:  # fmt: skip
    """Serve the page until a signal ends it; `on_ready` is told its address."""
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise BadConfig(
            "penstock watch needs starlette and uvicorn, which are not installed",
            why=str(error),
            do='pip install "penstock[watch]"',
        ) from None
    config = config_of("config", config, WatchConfig)
    watch = Watch(os.fspath(root), config)
    listening = _listen(config)
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    app = make_app(
        watch, allowed_hosts(config.host, port), on_ready=lambda: on_ready(url),
        is_over=lambda: server.should_exit,
    )  # fmt: skip
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", access_log=False, timeout_graceful_shutdown=1,
            server_header=False, ws="none", lifespan="on",
        )
    )  # fmt: skip
    # logs are read before the first page asks; what takes longer goes on beside
    reading = threading.Thread(target=_warm, args=(watch,), daemon=True)
    reading.start()
    reading.join(WARM_S)
    with contextlib.closing(listening), contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])


def _warm(watch: Watch) -> None:
    """Read the logs before the first page asks."""
    with contextlib.suppress(PenstockError, OSError):
        watch.overview()


def _listen(config: WatchConfig) -> socket.socket:
    """A socket of the page's own; of the loopback, unless a host was asked for."""
    host = config.host or LOOPBACK[0]
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, config.port, type=socket.SOCK_STREAM
        )[0]
        found = socket.socket(family, kind, proto)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(64)
        except OSError:
            found.close()
            raise
    except OSError as error:
        raise BadConfig(
            f"the page cannot be served at {host}:{config.port}",
            why=str(error),
            do="choose another --port, or none: then a free one is taken",
        ) from None
    return found
