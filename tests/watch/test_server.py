"""The page is served to this machine, under its own name, for reading."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from penstock import WatchConfig
from penstock.errors import BadConfig
from penstock.watch import server as module
from penstock.watch.server import HEADERS, STATIC, allowed_hosts, make_app, serve
from penstock.watch.workplace import Watch
from supply.datasets import made_dataset
from watch.made import served

ROUTES = (
    "/", "/stream", "/static/app.js", "/api/overview", "/api/run", "/api/batch", "/api/row",
    "/api/stretch", "/api/search", "/api/where", "/api/reasons", "/api/rejects", "/api/pair",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    made_dataset(folder / "data")
    with served(folder, "--chunk_size", "64", "--batch_size", "2") as found:
        yield found


def ask(
    url: str, path: str, method: str = "GET", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """A request as it is, with nothing added."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": place.netloc, **(headers or {})}.items():
            if value:
                connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = b"" if path == "/stream" and method == "GET" else answer.read()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, body
    finally:
        connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "MAKE"])
@pytest.mark.parametrize("path", ROUTES)
def test_no_route_writes(url: str, path: str, method: str) -> None:
    status, headers, _ = ask(url, path, method)
    assert status == 405
    assert headers["allow"] == "GET, HEAD"


def test_a_mistake_of_ours_is_an_answer_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(str(tmp_path), WatchConfig())
    monkeypatch.setattr(watch, "overview", lambda: 1 // 0)
    routes = {getattr(route, "path", ""): route for route in make_app(watch, None).routes}
    answer = routes["/api/overview"].endpoint(None)  # type: ignore[attr-defined]
    assert answer.status_code == 500
    assert json.loads(answer.body)["error"]["what"].startswith("ZeroDivisionError: ")


def test_routes_answer_get_and_head_alone(tmp_path: Path) -> None:
    app = make_app(Watch(str(tmp_path), WatchConfig()), None)
    methods = {method for route in app.routes for method in getattr(route, "methods", None) or ()}
    assert methods == {"GET", "HEAD"}
    assert {route.path for route in app.routes if hasattr(route, "path")} >= {
        path for path in ROUTES if not path.startswith("/static")
    }


def test_the_pages_of_other_sites_are_refused(url: str) -> None:
    other = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    for path in ("/", "/api/overview", "/static/app.js", "/stream"):
        assert ask(url, path, headers=other)[0] == 403
    link = {**other, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert ask(url, "/", headers=link)[0] == 200
    assert ask(url, "/api/overview", headers=link)[0] == 403
    assert ask(url, "/", headers={**link, "Sec-Fetch-Dest": "iframe"})[0] == 403
    for own in ("same-origin", "none"):
        assert ask(url, "/api/overview", headers={"Sec-Fetch-Site": own})[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil:PORT",
     "127.0.0.1:PORT.evil", "user@127.0.0.1:PORT", "0.0.0.0:PORT"],
)  # fmt: skip
def test_another_host_is_refused(url: str, host: str) -> None:
    port = str(urlsplit(url).port)
    for path in ("/", "/api/overview", "/static/app.js", "/stream"):
        status, _, body = ask(url, path, headers={"Host": host.replace("PORT", port)})
        assert status in (400, 421)
        assert b"data" not in body


@pytest.mark.parametrize(
    "host", ["127.0.0.1:PORT", "localhost:PORT", "[::1]:PORT", "LOCALHOST:PORT"]
)
def test_its_own_names_are_answered(url: str, host: str) -> None:
    port = str(urlsplit(url).port)
    status, _, _ = ask(url, "/api/overview", headers={"Host": host.replace("PORT", port)})
    assert status == 200


def test_it_listens_on_the_loopback_only(url: str) -> None:
    port = urlsplit(url).port
    places: list[Any] = [
        one.laddr for one in psutil.net_connections("tcp") if one.status == "LISTEN"
    ]
    assert [place.ip for place in places if place.port == port] == ["127.0.0.1"]


def test_a_host_that_is_asked_for(tmp_path: Path) -> None:
    with served(tmp_path, "--host", "0.0.0.0") as url:
        port = urlsplit(url).port
        status, _, _ = ask(f"http://127.0.0.1:{port}", "/", headers={"Host": "some.name"})
        assert status == 200
    assert allowed_hosts("some.name", 80) == frozenset(
        [*("127.0.0.1:80", "localhost:80", "[::1]:80", "some.name:80"),
        *("127.0.0.1", "localhost", "[::1]", "some.name")]
    )  # fmt: skip


@pytest.mark.parametrize("path", [*ROUTES, "/nothing", "/static/nothing", "/api/nothing"])
def test_every_answer_has_the_policy(url: str, path: str) -> None:
    _, headers, _ = ask(url, path)
    for name, value in HEADERS.items():
        assert headers[name] == value
    policy = headers["content-security-policy"]
    assert "unsafe" not in policy
    assert "http" not in policy
    assert "access-control-allow-origin" not in headers


def test_nothing_but_the_static_files_is_served(url: str) -> None:
    for path in (
        "/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py",
        "/static//etc/passwd", "/etc/passwd", "/static/", "/api/batch?run=../../etc&n=0",
        "/api/rejects?dataset=../server",
    ):  # fmt: skip
        status, _, body = ask(url, path)
        assert status in (404, 422)
        assert b"root:" not in body
        assert b"import" not in body


def test_numbers_that_are_none(url: str) -> None:
    for text in ("-1", "x", "1e9", "", "99999999999999999999", "٣"):
        query = text.encode().hex("%", 1)
        status, _, body = ask(url, f"/api/batch?run=data&n={'%' + query if query else ''}")
        error = json.loads(body)["error"]
        assert status == 422
        assert error["what"] == f"n is {text!r}"
        assert error["do"] == "give a whole number from 0 on"


def test_a_run_or_dataset_that_is_not_there(url: str) -> None:
    _, _, body = ask(url, "/api/batch?run=cpp&n=0")
    assert json.loads(body)["error"] == {
        "what": "there is no run 'cpp'", "where": "", "why": "", "do": "choose from data",
    }  # fmt: skip
    _, _, body = ask(url, "/api/rejects?dataset=cpp")
    assert json.loads(body)["error"]["what"] == "there is no dataset 'cpp'"


def test_a_dataset_without_a_run_is_explored_by_the_options(url: str) -> None:
    _, _, body = ask(url, "/api/run?run=data")
    head = json.loads(body)
    assert (head["rows"], head["seq_len"]) == (2, 64)
    _, _, body = ask(url, "/api/row?run=data&n=1&row=1")
    row = json.loads(body)
    assert row["pieces"] == [str(one) for one in row["ids"]]  # no tokenizer was given


def test_the_stream_says_that_something_changed(url: str) -> None:
    place = urlsplit(url)
    with socket.create_connection((str(place.hostname), place.port or 0), timeout=10) as link:
        link.sendall(f"GET /stream HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        seen = b""
        while b"event: changed" not in seen:
            part = link.recv(4096)
            assert part
            seen += part
    assert b"text/event-stream" in seen


def open_stream(url: str) -> socket.socket:
    place = urlsplit(url)
    link = socket.create_connection((str(place.hostname), place.port or 0), timeout=10)
    link.sendall(f"GET /stream HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
    return link


def test_pages_beyond_a_number_are_refused(tmp_path: Path) -> None:
    with served(tmp_path) as url, contextlib.ExitStack() as stack:
        for _ in range(module.MOST_STREAMS):
            link = stack.enter_context(open_stream(url))
            told = link.recv(4096)
            while b"retry" not in told:
                told += link.recv(4096)
            assert told.startswith(b"HTTP/1.1 200")
        with open_stream(url) as link:
            assert link.recv(64).startswith(b"HTTP/1.1 503")
        status, _, _ = ask(url, "/")
        assert status == 200


def test_ctrl_c_ends_it_also_while_a_page_is_open(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "watch", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    url = process.stdout.readline().split("/ ")[0]
    with open_stream(url) as link:
        assert link.recv(64)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_markup_of_data() -> None:
    for path in STATIC.iterdir():
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.[a-z]", text), path
        for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(",
                     "Function(", "javascript:", "srcdoc", "DOMParser"):  # fmt: skip
            assert word not in text, path
        assert not re.search(r"<[a-z][^>]*\son[a-z]+=", text), path
        assert not re.search(r"<script(?![^>]*src=)", text), path


def test_the_static_files_are_in_the_wheel() -> None:
    project = Path(module.__file__).parents[3] / "pyproject.toml"
    assert 'packages = ["src/penstock"]' in project.read_text()
    assert {"index.html", "app.js", "style.css"} <= {path.name for path in STATIC.iterdir()}


@pytest.mark.parametrize("missing", ["uvicorn", "starlette"])
def test_without_the_extra(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(BadConfig, match="needs starlette and uvicorn") as error:
        serve(tmp_path)
    assert error.value.do == 'pip install "penstock[watch]"'


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadConfig, match=f"cannot be served at 127.0.0.1:{port}") as error:
            serve(tmp_path, WatchConfig(port=port))
    assert "choose another --port" in error.value.do


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "watch", str(tmp_path / "nothing")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "there is no directory" in done.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [({"port": 70_000}, "port"), ({"batch_size": 0}, "batch_size"), ({"chunk_size": 0}, "chunk"),
     ({"bans": -1}, "bans"), ({"tokenizer": "a\0b"}, "tokenizer")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, object], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        WatchConfig(**options)  # type: ignore[arg-type]
