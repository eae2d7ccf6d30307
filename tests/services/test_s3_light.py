"""The light server keeps bytes exactly, whoever sends them and in whatever framing."""

import hashlib
import http.client
import random
from collections.abc import Iterator
from typing import Any

import boto3
import obstore
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from obstore.exceptions import AlreadyExistsError

from . import servers
from .servers import Cloud, Server, use

SIZES = [0, 1, 65_535, 65_536, 3_000_001]


@pytest.fixture(scope="module")
def light() -> Iterator[Server]:
    server = servers.start_light()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def url(light: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    cloud = Cloud("light", light, "s3")
    use(monkeypatch, cloud.environment(light.port))
    return cloud.new_url("some/prefix")


def some_bytes(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def client(light: Server, **more: Any) -> Any:
    config = Config(retries={"total_max_attempts": 1}, **more)
    return boto3.client("s3", endpoint_url=light.url, config=config)


@pytest.mark.parametrize("size", SIZES)
def test_obstore(url: str, size: int) -> None:
    data = some_bytes(size)
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    obstore.put(store, "a", data, mode="create", use_multipart=False)
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "a", b"other", mode="create", use_multipart=False)
    assert bytes(obstore.get(store, "a").bytes()) == data
    assert obstore.head(store, "a")["size"] == size
    for start, stop in ((0, 1), (1, size), (size // 3, size // 2 + 1)):
        if start < stop <= size:
            assert bytes(obstore.get_range(store, "a", start=start, end=stop)) == data[start:stop]
    obstore.delete(store, "a")
    with pytest.raises(FileNotFoundError, match="NoSuchKey"):
        obstore.get(store, "a")


def test_parts_are_one_object(url: str) -> None:
    data = some_bytes(23_000_007)
    store = obstore.store.from_url(url, client_options={"allow_http": True})
    obstore.put(store, "a", data, chunk_size=5 << 20, max_concurrency=4)
    assert bytes(obstore.get(store, "a").bytes()) == data
    at = 5 << 20
    for start, stop in ((at - 1, at + 1), (at, 2 * at), (7, 4 * at + 9)):
        assert bytes(obstore.get_range(store, "a", start=start, end=stop)) == data[start:stop]


@pytest.mark.parametrize("size", SIZES)
def test_botocore(url: str, light: Server, size: int) -> None:
    data = some_bytes(size)
    bucket = url.split("/")[2]
    s3 = client(light)
    s3.put_object(Bucket=bucket, Key="a b/c+d&", Body=data)
    assert s3.get_object(Bucket=bucket, Key="a b/c+d&")["Body"].read() == data
    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket=bucket, Key="a b/c+d&", Body=b"other", IfNoneMatch="*")
    with pytest.raises(ClientError, match="404"):
        s3.head_object(Bucket=bucket, Key="a")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        s3.put_object(Bucket="nowhere", Key="a", Body=data)
    s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "a b/c+d&"}]})
    assert s3.list_objects_v2(Bucket=bucket).get("Contents") is None


def test_lists_in_pages(url: str, light: Server) -> None:
    bucket = url.split("/")[2]
    s3 = client(light)
    for k in range(7):
        s3.put_object(Bucket=bucket, Key=f"{k % 3}/{k}", Body=b"x" * k)
    s3.put_object(Bucket=bucket, Key="top", Body=b"")

    def pages(**asked: Any) -> list[Any]:
        pager = s3.get_paginator("list_objects_v2")
        return list(pager.paginate(Bucket=bucket, PaginationConfig={"PageSize": 2}, **asked))

    found = [(one["Key"], one["Size"]) for page in pages() for one in page.get("Contents", [])]
    assert found == [*sorted((f"{k % 3}/{k}", k) for k in range(7)), ("top", 0)]
    cut = pages(Delimiter="/")
    assert [one["Prefix"] for page in cut for one in page.get("CommonPrefixes", [])] == [
        "0/", "1/", "2/",
    ]  # fmt: skip
    assert [one["Key"] for page in cut for one in page.get("Contents", [])] == ["top"]
    assert [one["Key"] for page in pages(Prefix="1/") for one in page["Contents"]] == ["1/1", "1/4"]


def test_an_upload_given_up_leaves_nothing(url: str, light: Server) -> None:
    bucket = url.split("/")[2]
    before = set((light.folder / "data").iterdir())
    s3 = client(light)
    upload = s3.create_multipart_upload(Bucket=bucket, Key="a")["UploadId"]
    s3.upload_part(Bucket=bucket, Key="a", UploadId=upload, PartNumber=1, Body=b"x")
    s3.abort_multipart_upload(Bucket=bucket, Key="a", UploadId=upload)
    with pytest.raises(ClientError, match="NoSuchUpload"):
        s3.upload_part(Bucket=bucket, Key="a", UploadId=upload, PartNumber=1, Body=b"x")
    assert set((light.folder / "data").iterdir()) == before


def chunks(data: bytes, size: int, trailer: bytes = b"") -> bytes:
    cut = [data[at : at + size] for at in range(0, len(data), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in cut)
    return framed + b"0\r\n" + trailer + b"\r\n"


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_every_framing(url: str, light: Server, size: int, framed: bool, chunked: bool) -> None:
    """botocore sends S3's chunks with a trailer, over TLS within HTTP's chunks."""
    data = some_bytes(size)
    body, headers = data, {"Expect": "100-continue"}
    if framed:
        body = chunks(data, 1 << 20, b"x-amz-checksum-crc32:AAAAAA==\r\n")
        headers["x-amz-content-sha256"] = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
        headers["x-amz-decoded-content-length"] = str(size)
    if chunked:
        body = chunks(body, 70_000)
        headers["Transfer-Encoding"] = "chunked"
    else:
        headers["Content-Length"] = str(len(body))
    path = "/" + url.split("/")[2] + "/a"
    link = http.client.HTTPConnection("127.0.0.1", light.port, timeout=10)
    for _ in range(2):  # on one connection: nothing of the first is left on it
        link.request("PUT", path, body=body, headers=headers)
        assert link.getresponse().read() == b""
    link.request("GET", path)
    found = link.getresponse().read()
    link.close()
    assert hashlib.sha256(found).hexdigest() == hashlib.sha256(data).hexdigest()
