"""An S3 server that takes little of the machine: bodies go between socket and disk in the kernel.

In:    a port and an empty folder; requests of obstore, of botocore and of s3fs
Out:   put (once, on If-None-Match), get with ranges, head, list, parts, delete, batch delete
Keeps: an object is seen whole or not at all; what is open for a reader stays readable
Never: checks a signature or a sum, calculates an MD5, syncs; remembers anything when it ends

    python s3_light.py 9000 /tmp/folder

It measures clients: on two cores SeaweedFS alone takes more than they do. An object is a list of
files, so that completing an upload copies nothing. One thread per connection.
"""

import contextlib
import fcntl
import itertools
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

PIPE_BYTES: Final = 1 << 20
HEAD_BYTES: Final = 1 << 16
LIST_AT_ONCE: Final = 1000
SPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"
REASONS: Final = {200: "OK", 204: "No Content", 206: "Partial Content", 404: "Not Found"}


class Refused(Exception):
    """A request that gets an error for its answer."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


class Hungup(Exception):
    """The client has gone in the middle of a request."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A file of the folder, whole."""

    path: Path
    size: int


@dataclass(frozen=True, slots=True)
class Thing:
    """An object: its bytes are those of its pieces."""

    pieces: tuple[Piece, ...]
    etag: str
    made: str = field(default_factory=lambda: formatdate(usegmt=True))

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


class Shelf:
    """What is stored."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self.lock = threading.Lock()
        self.buckets: dict[str, dict[str, Thing]] = {}
        self.uploads: dict[str, dict[int, Thing]] = {}

    def number(self) -> int:
        return next(self._numbers)

    def new_path(self) -> Path:
        return self._folder / f"piece-{self.number()}"

    def bucket(self, name: str) -> dict[str, Thing]:
        if name not in self.buckets:
            raise Refused(404, "NoSuchBucket")
        return self.buckets[name]

    def find(self, bucket: str, key: str) -> Thing:
        with self.lock:
            found = self.bucket(bucket).get(key)
        if found is None:
            raise Refused(404, "NoSuchKey")
        return found

    def keep(self, bucket: str, key: str, thing: Thing, *, once: bool) -> None:
        with self.lock:
            old = self.bucket(bucket).get(key)
            if old and once:
                raise Refused(412, "PreconditionFailed")
            self.buckets[bucket][key] = thing
        drop(old)

    def remove(self, bucket: str, key: str) -> None:
        with self.lock:
            old = self.bucket(bucket).pop(key, None)
        drop(old)


def drop(thing: Thing | None) -> None:
    for piece in thing.pieces if thing else ():
        piece.path.unlink(missing_ok=True)


class Wire:
    """A connection. It is peeked into, so that what follows a line is left for the kernel."""

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._pipe = os.pipe()
        fcntl.fcntl(self._pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def close(self) -> None:
        self.link.close()
        for end in self._pipe:
            os.close(end)

    def line(self) -> bytes:
        return self.until(b"\r\n", 256)

    def until(self, end: bytes, most: int) -> bytes:
        """The bytes before `end`, which is taken too."""
        found = b""
        while True:
            seen = self.link.recv(most, socket.MSG_PEEK)
            if not seen:
                raise Hungup
            at = (found + seen).find(end)
            if at >= 0:
                self.link.recv(at + len(end) - len(found))
                return (found + seen)[:at]
            found += self.link.recv(len(seen))

    def move(self, file: int, count: int) -> None:
        source, (out, into) = self.link.fileno(), self._pipe
        while count:
            there = os.splice(source, into, min(count, PIPE_BYTES))
            if not there:
                raise Hungup
            count -= there
            while there:
                there -= os.splice(out, file, there)

    def unframe(self, file: int) -> None:
        """Write a body that comes in chunks, of HTTP or of S3: the framing is the same."""
        while size := int(self.line().partition(b";")[0], 16):
            self.move(file, size)
            self.line()
        while self.line():
            pass  # a trailer: sums


def unframed(data: bytes) -> Iterator[bytes]:
    """What S3's chunks hold that came within HTTP's, as over TLS."""
    at = 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].partition(b";")[0], 16)
        if not size:
            return
        yield data[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


class Request:
    """A request whose body is still on the wire."""

    def __init__(self, wire: Wire, head: str) -> None:
        first, *lines = head.split("\r\n")
        self.wire = wire
        self.method, target, _ = first.split(" ")
        parts = urlsplit(target)
        self.bucket, _, self.key = unquote(parts.path).lstrip("/").partition("/")
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        pairs = (line.partition(":") for line in lines)
        self.headers = {name.lower(): value.strip() for name, _, value in pairs}
        self.is_once = self.headers.get("if-none-match") == "*"
        self.taken = False

    def body(self, file: int) -> None:
        """All of it into a file."""
        self.taken = True
        if self.headers.get("expect", "").lower() == "100-continue":
            self.wire.link.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        chunked = "chunked" in self.headers.get("transfer-encoding", "")
        framed = self.headers.get("x-amz-content-sha256", "").startswith("STREAMING-")
        if chunked and framed:
            with memory_file() as outer:
                self.wire.unframe(outer)
                for part in unframed(os.pread(outer, os.fstat(outer).st_size, 0)):
                    os.write(file, part)
        elif chunked or framed:
            self.wire.unframe(file)
        else:
            self.wire.move(file, int(self.headers.get("content-length", 0)))

    def text(self) -> str:
        with memory_file() as file:
            self.body(file)
            return os.pread(file, os.fstat(file).st_size, 0).decode()

    def answer(self, status: int, body: str = "", **headers: str) -> None:
        data = body.encode()
        shown = data if self.method != "HEAD" else b""
        self.wire.link.sendall(head(status, len(data), headers) + shown)


def head(status: int, size: int, headers: dict[str, str]) -> bytes:
    length = {} if status == 204 else {"Content-Length": str(size)}
    lines = [f"{name}: {value}" for name, value in {**headers, **length}.items()]
    return "\r\n".join([f"HTTP/1.1 {status} {REASONS.get(status, 'No')}", *lines, "", ""]).encode()


@contextlib.contextmanager
def memory_file() -> Iterator[int]:
    file = os.memfd_create("body")
    try:
        yield file
    finally:
        os.close(file)


def get(shelf: Shelf, request: Request) -> None:
    if not request.key:
        return find_many(shelf, request)
    thing = shelf.find(request.bucket, request.key)
    start, stop, status = 0, thing.size, 200
    headers = {"ETag": thing.etag, "Last-Modified": thing.made, "Accept-Ranges": "bytes"}
    if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", "")):
        first, last = wanted.groups()
        start = int(first) if first else max(0, stop - int(last))
        stop = min(stop, int(last) + 1) if first and last else stop
        if start >= stop:
            raise Refused(416, "InvalidRange")
        status, headers["Content-Range"] = 206, f"bytes {start}-{stop - 1}/{thing.size}"
    link, at = request.wire.link, 0
    bare = request.method == "HEAD" or start == stop
    link.sendall(head(status, stop - start, headers), 0 if bare else socket.MSG_MORE)
    for piece in thing.pieces:
        low, high = max(start - at, 0), min(stop - at, piece.size)
        at += piece.size
        if low < high and not bare:
            with piece.path.open("rb") as file:
                while low < high:
                    low += os.sendfile(link.fileno(), file.fileno(), low, high - low)
    return None


def find_many(shelf: Shelf, request: Request) -> None:
    """The names in a bucket, in pages; those below a folder as one."""
    query = request.query
    if not request.bucket:
        return request.answer(200, f'<ListAllMyBucketsResult xmlns="{SPACE}"/>')
    with shelf.lock:
        things = sorted(shelf.bucket(request.bucket).items())
    if request.method == "HEAD":
        return request.answer(200)
    if "location" in query:
        return request.answer(200, f'<LocationConstraint xmlns="{SPACE}"/>')
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token", query.get("start-after", ""))
    most = int(query.get("max-keys", LIST_AT_ONCE))
    rows: dict[str, str] = {}
    last = token = ""
    for key, thing in things:
        if not key.startswith(prefix) or key <= after:
            continue
        inside = key.removeprefix(prefix)
        cut = inside.find(delimiter) + len(delimiter) if delimiter and delimiter in inside else 0
        shown = prefix + inside[:cut] if cut else key
        if not (shown in rows or (cut and after.startswith(shown))):
            if len(rows) == most:
                token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
                break
            rows[shown] = (
                f"<CommonPrefixes><Prefix>{escape(shown)}</Prefix></CommonPrefixes>"
                if cut
                else f"<Contents><Key>{escape(key)}</Key><Size>{thing.size}</Size>"
                f"<ETag>{escape(thing.etag)}</ETag><LastModified>{stamp(thing)}</LastModified>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        last = key
    return request.answer(
        200,
        f'<ListBucketResult xmlns="{SPACE}"><Name>{request.bucket}</Name>'
        f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
        f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(bool(token)).lower()}</IsTruncated>"
        f"{token}{''.join(rows.values())}</ListBucketResult>",
    )


def stamp(thing: Thing) -> str:
    return parsedate_to_datetime(thing.made).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def put(shelf: Shelf, request: Request) -> None:
    if not request.key:
        request.text()
        with shelf.lock:
            shelf.buckets.setdefault(request.bucket, {})
        return request.answer(200)
    path = shelf.new_path()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        request.body(file)
        size = os.fstat(file).st_size
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(file)
    thing = Thing((Piece(path, size),), f'"light-{shelf.number()}"')
    try:
        if upload := request.query.get("uploadId"):
            with shelf.lock:
                if upload not in shelf.uploads:
                    raise Refused(404, "NoSuchUpload")
                shelf.uploads[upload][int(request.query["partNumber"])] = thing
        else:
            shelf.keep(request.bucket, request.key, thing, once=request.is_once)
    except Refused:
        drop(thing)
        raise
    return request.answer(200, ETag=thing.etag)


def post(shelf: Shelf, request: Request) -> None:
    said = request.text()
    if "delete" in request.query:
        keys = re.findall(r"<Key>(.*?)</Key>", said)
        for key in keys:
            shelf.remove(request.bucket, unescape(key))
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        return request.answer(200, f'<DeleteResult xmlns="{SPACE}">{gone}</DeleteResult>')
    names = f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key>"
    if "uploads" in request.query:
        upload = f"upload-{shelf.number()}"
        with shelf.lock:
            shelf.bucket(request.bucket)
            shelf.uploads[upload] = {}
        result = "InitiateMultipartUploadResult"
        body = f"{names}<UploadId>{upload}</UploadId>"
    else:
        wanted = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", said)]
        with shelf.lock:
            parts = shelf.uploads.pop(request.query["uploadId"], {})
        if not wanted or not parts.keys() >= set(wanted):
            raise Refused(400, "InvalidPart")
        pieces = tuple(piece for number in wanted for piece in parts[number].pieces)
        thing = Thing(pieces, f'"light-{shelf.number()}-{len(wanted)}"')
        shelf.keep(request.bucket, request.key, thing, once=request.is_once)
        result = "CompleteMultipartUploadResult"
        body = f"{names}<ETag>{escape(thing.etag)}</ETag>"
    return request.answer(200, f'<{result} xmlns="{SPACE}">{body}</{result}>')


def delete(shelf: Shelf, request: Request) -> None:
    if upload := request.query.get("uploadId"):
        with shelf.lock:
            parts = shelf.uploads.pop(upload, {})
        for part in parts.values():
            drop(part)
    elif request.key:
        shelf.remove(request.bucket, request.key)
    request.answer(204)


METHODS: Final[dict[str, Callable[[Shelf, Request], None]]] = {
    "GET": get, "HEAD": get, "PUT": put, "POST": post, "DELETE": delete,
}  # fmt: skip


def serve(shelf: Shelf, link: socket.socket) -> None:
    """Answer what comes on one connection until it ends."""
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire = Wire(link)
    with contextlib.closing(wire), contextlib.suppress(Hungup, OSError):
        while True:
            request = Request(wire, wire.until(b"\r\n\r\n", HEAD_BYTES).decode("latin-1"))
            try:
                METHODS[request.method](shelf, request)
            except Refused as error:
                sent = int(request.headers.get("content-length", 0))
                if sent and not request.taken:
                    request.text()
                code = f"<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>"
                request.answer(error.status, code)


def main(port: int, folder: Path) -> None:
    shelf = Shelf(folder)
    with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
        while True:
            link, _ = listener.accept()
            threading.Thread(target=serve, args=(shelf, link), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
