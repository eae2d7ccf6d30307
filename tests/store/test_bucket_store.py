"""A bucket as a store, against a real S3 server process on loopback.

Between us and the server stands a small proxy of ours that can lose a request, lose a reply, or
answer with an error after the server has done the work. The same proxy lets the server speak as
much of Google's dialect as conditional puts need.
"""

import contextlib
import hashlib
import http.client
import json
import os
import re
import secrets
import socket
import threading
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, ClassVar

import pytest

from penstock.errors import (
    Fenced,
    LogDamaged,
    NoConditionalPut,
    NoDataset,
    PenstockError,
    ShardMismatch,
    StoreFailed,
)
from penstock.shard.follow import FollowConfig, shard_jsonl
from penstock.shard.verify import verify
from penstock.shard.write import ShardConfig
from penstock.store import log as log_module
from penstock.store.backends import AlreadyThere, BucketStore, Unsure, open_store
from penstock.store.log import Log, LogWriter
from penstock.store.record import Add, Beat, record_name

from .servers import free_port, request


class Proxy(ThreadingHTTPServer):
    """Passes requests on to the server behind it, but for the faults that are planned."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), ProxyHandler)
        self.behind = behind
        self.google = False
        self.seen: list[str] = []
        self.faults: deque[tuple[str, str]] = deque()
        """Pairs of what a request line must match and what then goes wrong, used once each."""

    def next_fault(self, line: str) -> str:
        self.seen.append(line)
        if self.faults and re.search(self.faults[0][0], line):
            return self.faults.popleft()[1]
        return ""

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is no news here."""


class ProxyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.next_fault(f"{self.command} {self.path}")
        if fault == "request lost":
            self.hang_up()
            return
        if fault in ("400", "403"):
            self.send_response(int(fault))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        headers = {
            name: value for name, value in self.headers.items() if name.lower() != "connection"
        }
        path = self.path
        if self.server.google:
            path = urllib.parse.unquote(path)  # Google's keys are escaped to the last dash
            headers = {n: v for n, v in headers.items() if n.lower() != "authorization"}
            headers["Authorization"] = "AWS4-HMAC-SHA256 Credential=test/20240101/us-east-1/s3/x"
            if self.headers.get("x-goog-if-generation-match") == "0":
                headers["If-None-Match"] = "*"
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=30)
        with contextlib.closing(behind):
            behind.request(self.command, path, body=body, headers=headers)
            answer = behind.getresponse()
            content = answer.read()
        if fault == "reply lost":
            self.hang_up()
            return
        status = 503 if fault == "error after" else answer.status
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        if self.server.google:
            self.send_header("x-goog-generation", "1")
        if answer.getheader("Content-Length") is None and self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = pass_on  # noqa: N815

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[int]:
    """Serve in a thread; the port."""
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def proxy(moto_port: int) -> Iterator[Proxy]:
    server = Proxy(moto_port)
    with serving(server):
        yield server


def use_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Point the usual environment variables at a loopback port, and nothing else."""
    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)


def new_bucket(port: int) -> str:
    name = f"bucket-{secrets.token_hex(6)}"
    request("PUT", f"http://127.0.0.1:{port}/{name}")
    return name


@pytest.fixture
def url(moto_port: int, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place in a bucket, reached through the proxy."""
    use_s3(monkeypatch, proxy.server_address[1])
    return f"s3://{new_bucket(moto_port)}/some/prefix"


@pytest.fixture
def store(url: str) -> BucketStore:
    return BucketStore(url)


def writes(data: bytes) -> Callable[[IO[bytes]], None]:
    return lambda file: file.writelines([data])


# The same promises as a directory.


def test_create_once(store: BucketStore) -> None:
    store.create("_log/0.json", b"first")
    for _ in range(2):
        with pytest.raises(AlreadyThere):
            store.create("_log/0.json", b"second")
    assert store.read("_log/0.json") == b"first"
    assert store.size("_log/0.json") == 5


def test_probe_passes_and_leaves_nothing(url: str, proxy: Proxy) -> None:
    open_store(url, make=True)
    first, second, remove = proxy.seen
    assert first == second
    assert re.match(r"PUT .*/_probe/[0-9a-f]{16}$", first)
    assert re.match(r"POST /[^/]*\?delete", remove)
    assert BucketStore(url).size("_probe/" + first.rpartition("/")[2]) is None


def test_following_probes_nothing(url: str, proxy: Proxy) -> None:
    open_store(url)
    assert proxy.seen == []


def test_put_adopts_the_same_and_steps_aside_for_other_bytes(store: BucketStore) -> None:
    one, two = b"one" * 1_000, b"two" * 1_000
    for _ in range(2):
        stored = store.put("shard_00000.parquet", writes(one))
        assert (stored.name, stored.shadowed) == ("shard_00000.parquet", None)
        assert (stored.sha256, stored.size) == (hashlib.sha256(one).hexdigest(), 3_000)
    aside = f"shard_00000-{hashlib.sha256(two).hexdigest()[:8]}.parquet"
    for _ in range(2):
        stored = store.put("shard_00000.parquet", writes(two))
        assert (stored.name, stored.shadowed) == (aside, "shard_00000.parquet")
        assert (stored.sha256, stored.size) == (hashlib.sha256(two).hexdigest(), 3_000)
    assert store.read("shard_00000.parquet") == one
    assert store.read(aside) == two


def test_put_with_both_names_taken_is_a_mismatch(store: BucketStore) -> None:
    store.create("x.parquet", b"old")
    store.create(f"x-{hashlib.sha256(b'new').hexdigest()[:8]}.parquet", b"older")
    with pytest.raises(ShardMismatch) as caught:
        store.put("x.parquet", writes(b"new"))
    assert str(caught.value) == (
        "x.parquet is taken, and so is the name that carries its hash\n"
        f"  where: {store.url}\n"
        f"  do:    penstock verify --full {store.url}"
    )


def test_read_size_open_remove_and_missing(store: BucketStore) -> None:
    data = bytes(range(256)) * 40
    store.create("_val/x.parquet", data)
    assert store.read("_val/x.parquet") == data
    assert store.size("_val/x.parquet") == len(data)
    with store.open("_val/x.parquet") as file:
        file.seek(-6, os.SEEK_END)
        assert file.read() == data[-6:]
    store.remove("_val/x.parquet")
    store.remove("_val/x.parquet")
    assert store.size("_val/x.parquet") is None
    for call in (store.read, store.open):
        with pytest.raises(FileNotFoundError):
            call("_val/x.parquet")
    store.settle()


def test_empty_object(store: BucketStore) -> None:
    store.create("x", b"")
    assert (store.read("x"), store.size("x")) == (b"", 0)


@pytest.mark.parametrize("name", ["..", "/x", "a/../b", "x\0", "a\\b", "", "_log/a/b", "C:x"])
def test_unsafe_names_are_refused_before_a_request(
    store: BucketStore, proxy: Proxy, name: str
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.create(name, b""),
        lambda: store.put(name, writes(b"")),
        lambda: store.read(name),
        lambda: store.open(name),
        lambda: store.size(name),
        lambda: store.remove(name),
    ]
    for call in calls:
        with pytest.raises(LogDamaged, match="which is not a name inside a dataset"):
            call()
    assert proxy.seen == []


def test_two_datasets_in_a_bucket_do_not_meet(url: str) -> None:
    one, two = BucketStore(url + "/one/"), BucketStore(url + "/two")
    one.create("x", b"1")
    two.create("x", b"2")
    assert (one.url, one.read("x"), two.read("x")) == (url + "/one", b"1", b"2")


# The log in a bucket.


def test_no_dataset(url: str) -> None:
    with pytest.raises(NoDataset, match=f"^there is no dataset at {url}\n"):
        Log.open(url)


def test_older_writer_is_fenced(url: str) -> None:
    older = LogWriter.take(open_store(url, make=True), {}, [], writer="older")
    older.commit([Beat()])
    newer = LogWriter.take(open_store(url, make=True), {}, [], writer="newer")
    with pytest.raises(Fenced) as caught:
        older.commit([Add("lost", "", 0, 0, None, "train")])
    assert str(caught.value) == (
        "another writer has taken this dataset over\n"
        f"  where: {url}, record 2\n"
        "  why:   it was written by epoch 2, this writer is 1\n"
        "  do:    nothing is lost: the newer writer went on from the last record before it"
    )
    newer.commit([Beat()])
    state = Log.open(url).state
    assert (state.n, state.epoch, state.files) == (3, 2, {})


@pytest.mark.parametrize("fault", ["reply lost", "error after", "request lost"])
def test_lost_reply_commits_exactly_once(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(log_module, "_RESEND_S", (0.01, 0.01, 0.01, 0.01))
    writer = LogWriter.take(open_store(url, make=True), {}, [], writer="w")
    proxy.faults.append((r"^PUT .*/_log/0+1\.json", fault))
    record = writer.commit([Add("x", "", 0, 0, None, "train")])
    assert not proxy.faults, "the fault was not met"
    writer.commit([Beat()])
    log = Log.open(url)
    assert log.record(1).commit_id == record.commit_id
    assert (log.state.n, list(log.state.files), log.state.epoch) == (2, ["x"], 1)


def test_lost_reply_to_the_newer_writer_still_fences_the_older(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_RESEND_S", (0.01, 0.01, 0.01, 0.01))
    older = LogWriter.take(open_store(url, make=True), {}, [], writer="older")
    proxy.faults.append((r"^PUT .*/_log/0+1\.json", "reply lost"))
    newer = LogWriter.take(open_store(url, make=True), {}, [], writer="newer")
    assert (newer.state.n, newer.state.epoch) == (1, 2)
    with pytest.raises(Fenced):
        older.commit([Beat()])


def test_lost_reply_to_a_shard_is_adopted(store: BucketStore, proxy: Proxy) -> None:
    for number, fault in enumerate(["reply lost", "error after"]):
        name = f"shard_{number}.parquet"
        proxy.faults.append((rf"^PUT .*/{name}", fault))
        stored = store.put(name, writes(b"rows"))
        assert not proxy.faults
        assert (stored.name, stored.shadowed, store.read(name)) == (name, None, b"rows")


def test_put_without_an_answer_says_that_it_is_not_there(store: BucketStore, proxy: Proxy) -> None:
    """Not sent again by us; the run stops, and the next one does it."""
    proxy.faults.append((r"^PUT .*/x\.parquet", "400"))
    with pytest.raises(StoreFailed) as caught:
        store.put("x.parquet", writes(b"rows"))
    assert str(caught.value) == (
        "could not write x.parquet\n"
        f"  where: {store.url}\n"
        "  why:   the bucket did not say whether it was stored, and it is not there\n"
        "  do:    run the same command again: nothing committed is lost"
    )
    assert store.put("x.parquet", writes(b"rows")).name == "x.parquet"


@pytest.mark.parametrize("answer", ["400", "403"])
def test_only_an_answer_we_know_is_final(store: BucketStore, proxy: Proxy, answer: str) -> None:
    proxy.faults.append((r"^PUT ", answer))
    with pytest.raises(Unsure if answer == "400" else StoreFailed) as caught:
        store.create("x", b"")
    assert answer in str(caught.value)
    assert store.size("x") is None


@pytest.mark.parametrize("fault", ["reply lost", "error after", "request lost"])
def test_probe_survives_a_lost_reply_or_says_so(url: str, proxy: Proxy, fault: str) -> None:
    """Our own retry may meet our own first probe: that is an answer, or an error of ours."""
    proxy.faults.append((r"^PUT .*/_probe/", fault))
    refused: list[str] = []
    try:
        open_store(url, make=True)
    except PenstockError as error:
        refused.append(error.what)
    assert not proxy.faults
    assert refused in ([], ["could not write to the bucket"])


def test_missing_bucket_is_our_error(url: str) -> None:
    with pytest.raises(PenstockError) as caught:
        open_store("s3://no-such-bucket/x", make=True)
    assert "no-such-bucket" in str(caught.value)
    with pytest.raises(NoDataset):
        Log.open("s3://no-such-bucket/x")


def test_server_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    use_s3(monkeypatch, free_port())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-token")
    with pytest.raises(StoreFailed) as caught:
        open_store("s3://bucket/x").read("x")
    assert caught.value.what == "could not read x"
    assert caught.value.where == "s3://bucket/x"
    assert caught.value.why
    assert "\n" not in caught.value.why
    assert caught.value.do == (
        "check the address, the endpoint and the credentials in the environment"
    )
    assert "canary" not in str(caught.value)


# A server that overwrites.


class Overwriting(BaseHTTPRequestHandler):
    """Takes every PUT, whatever its conditions."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]] = {}

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", '"x"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200)

    def do_GET(self) -> None:
        if self.path in self.objects:
            self.answer(200, self.objects[self.path])
        else:
            self.answer(404)

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        """S3's way to delete one or many."""
        asked = self.rfile.read(int(self.headers["Content-Length"])).decode()
        bucket = self.path.partition("?")[0].rstrip("/")
        for key in re.findall("<Key>(.*?)</Key>", asked):
            self.objects.pop(f"{bucket}/{key}", None)
        self.answer(200, b"<DeleteResult></DeleteResult>")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_store_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Overwriting)
    server.daemon_threads = True
    server.block_on_close = False
    with serving(server) as port:
        use_s3(monkeypatch, port)
        with pytest.raises(NoConditionalPut) as caught:
            open_store("s3://bucket/x", make=True)
    assert str(caught.value) == (
        "this store does not create once: a second create of the same name succeeded\n"
        "  where: s3://bucket/x\n"
        "  why:   it ignores If-None-Match, so two writers would overwrite each other\n"
        "  do:    use a store with conditional puts (S3, GCS, Azure, MinIO, SeaweedFS, Ceph)"
    )
    assert Overwriting.objects == {}


# The whole flow.


def write_input(path: Path, documents: int) -> None:
    lines = [json.dumps({"text": f"document {n} " + "word " * (n % 40)}) for n in range(documents)]
    lines[7] = "not json"
    path.write_text("\n".join(lines) + "\n")


CONFIG = ShardConfig(rows_per_file=50, bytes_per_file=1 << 20, max_line_bytes=1 << 16)
FOLLOW = FollowConfig(complete=True, threads=2, max_rejects=0.1)


def hashes(log: Log) -> dict[str, str]:
    return {name: file.sha256 for name, file in log.state.files.items()}


def test_shards_in_a_bucket_are_those_on_disk(tmp_path: Path, url: str) -> None:
    source = tmp_path / "in.jsonl"
    write_input(source, 220)
    shard_jsonl([source], tmp_path / "set", CONFIG, FOLLOW)
    outcome = shard_jsonl([source], url, CONFIG, FOLLOW)
    assert outcome.sealed
    log = Log.open(url)
    assert log.state.sealed is not None
    assert hashes(log) == hashes(Log.open(tmp_path / "set"))
    assert len(log.state.split("train")) == 5
    verdict = verify(open_store(url), full=True)
    assert verdict.faults == []
    assert verdict.files_checked == len(log.state.files) == 7
    again = shard_jsonl([source], url, CONFIG, FOLLOW)
    assert (again.sealed, again.state.n) == (True, log.state.n)


def test_run_that_was_cut_off_goes_on_to_the_same_shards(
    tmp_path: Path, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_RESEND_S", ())
    source = tmp_path / "in.jsonl"
    write_input(source, 220)
    shard_jsonl([source], tmp_path / "set", CONFIG, FOLLOW)
    proxy.faults.extend([(r"^PUT .*/_log/0+2\.json", "400")])
    with pytest.raises(StoreFailed):
        shard_jsonl([source], url, CONFIG, FOLLOW)
    proxy.faults.clear()
    assert Log.open(url).state.n == 1
    assert shard_jsonl([source], url, CONFIG, FOLLOW).sealed
    assert hashes(Log.open(url)) == hashes(Log.open(tmp_path / "set"))
    assert verify(open_store(url), full=True).faults == []


def test_record_in_a_bucket_is_the_file_on_disk_byte_for_byte(url: str, tmp_path: Path) -> None:
    """A dataset can be copied between the two as it is."""
    writer = LogWriter.take(open_store(url, make=True), {}, [], writer="w")
    writer.commit([Beat()])
    bucket = BucketStore(url)
    local = open_store(tmp_path / "copy", make=True)
    for n in range(2):
        local.create(record_name(n), bucket.read(record_name(n)))
    assert Log.open(tmp_path / "copy").state.head == writer.state.head


# Google's dialect: the same server behind a shim of two headers.


@pytest.fixture
def google_url(
    moto_port: int, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    for name in list(os.environ):
        if name.startswith("GOOGLE_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    account = tmp_path / "account.json"
    account.write_text(
        json.dumps(
            {
                "gcs_base_url": f"http://127.0.0.1:{proxy.server_address[1]}",
                "disable_oauth": True,
                "client_email": "",
                "private_key": "",
                "private_key_id": "",
            }
        )
    )
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    proxy.google = True
    return f"gs://{new_bucket(moto_port)}/prefix"


def test_google_creates_once_and_fences(google_url: str) -> None:
    older = LogWriter.take(open_store(google_url, make=True), {}, [], writer="older")
    newer = LogWriter.take(open_store(google_url, make=True), {}, [], writer="newer")
    with pytest.raises(Fenced):
        older.commit([Beat()])
    newer.commit([Beat()])
    store = open_store(google_url)
    assert store.put("x.parquet", writes(b"1")).shadowed is None
    assert store.put("x.parquet", writes(b"2")).shadowed == "x.parquet"
    assert (store.read("x.parquet"), store.size("x.parquet")) == (b"1", 1)
    store.remove("x.parquet")
    assert store.size("x.parquet") is None
    assert Log.open(google_url).state.n == 2
