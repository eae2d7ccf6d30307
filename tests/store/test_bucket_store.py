"""A bucket as a store, against a real S3 server process on loopback.

Between us and the server stands a proxy of ours that can lose a request, lose a reply, or answer
with an error after the server has done the work.
"""

import hashlib
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import pytest

from penstock.errors import (
    BadConfig,
    Fenced,
    LogDamaged,
    NoDataset,
    PenstockError,
    ShardMismatch,
    StoreBusy,
    StoreFailed,
)
from penstock.ingest.open import list_objects, open_ranges
from penstock.produce.dataset import FollowConfig, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store import bucket as bucket_module
from penstock.store import log as log_module
from penstock.store.bucket import BucketStore
from penstock.store.log import Log, LogWriter
from penstock.store.record import Add, Beat, record_name
from penstock.store.store import AlreadyThere, Unsure, open_store
from services.proxy import Kind, Proxy
from services.servers import Cloud, Server, clouds, free_ports, use

LOST: Final[tuple[Kind, ...]] = ("lose reply", "answer after", "lose request")


@pytest.fixture
def cloud(moto: Server) -> Cloud:
    """S3 alone here; test_bucket_services.py has every kind of bucket."""
    return clouds()["moto"](moto)


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
        older.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    assert str(caught.value) == (
        "another writer has taken this dataset over\n"
        f"  where: {url}, record 2\n"
        "  why:   it was written by epoch 2, this writer is 1\n"
        "  do:    nothing is lost: the newer writer went on from the last record before it"
    )
    newer.commit([Beat()])
    state = Log.open(url).state
    assert (state.n, state.epoch, state.files) == (3, 2, {})


@pytest.mark.parametrize("fault", LOST)
def test_lost_reply_commits_exactly_once(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: Kind
) -> None:
    monkeypatch.setattr(log_module, "_RESEND_S", (0.01, 0.01, 0.01, 0.01))
    writer = LogWriter.take(open_store(url, make=True), {}, [], writer="w")
    proxy.plan(fault, r"^PUT .*/_log/0+1\.json")
    record = writer.commit([Add("shard_00000.parquet", "", 0, 0, None, "train")])
    assert not proxy.faults, "the fault was not met"
    writer.commit([Beat()])
    log = Log.open(url)
    assert log.record(1).commit_id == record.commit_id
    assert (log.state.n, list(log.state.files), log.state.epoch) == (2, ["shard_00000.parquet"], 1)


def test_lost_reply_to_the_newer_writer_still_fences_the_older(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_RESEND_S", (0.01, 0.01, 0.01, 0.01))
    older = LogWriter.take(open_store(url, make=True), {}, [], writer="older")
    proxy.plan("lose reply", r"^PUT .*/_log/0+1\.json")
    newer = LogWriter.take(open_store(url, make=True), {}, [], writer="newer")
    assert (newer.state.n, newer.state.epoch) == (1, 2)
    with pytest.raises(Fenced):
        older.commit([Beat()])


def test_lost_reply_to_a_shard_is_adopted(store: BucketStore, proxy: Proxy) -> None:
    for number, fault in enumerate(LOST[:2]):
        name = f"shard_{number}.parquet"
        proxy.plan(fault, rf"^PUT .*/{name}")
        stored = store.put(name, writes(b"rows"))
        assert not proxy.faults
        assert (stored.name, stored.shadowed, store.read(name)) == (name, None, b"rows")


def test_put_without_an_answer_says_that_it_is_not_there(store: BucketStore, proxy: Proxy) -> None:
    """Not sent again by us; the run stops, and the next one does it."""
    proxy.plan("answer", r"^PUT .*/x\.parquet", status=400)
    with pytest.raises(StoreFailed) as caught:
        store.put("x.parquet", writes(b"rows"))
    assert str(caught.value) == (
        "could not write x.parquet\n"
        f"  where: {store.url}\n"
        "  why:   the bucket did not say whether it was stored, and it is not there\n"
        "  do:    run the same command again: nothing committed is lost"
    )
    assert store.put("x.parquet", writes(b"rows")).name == "x.parquet"


@pytest.mark.parametrize("answer", [400, 403])
def test_only_an_answer_we_know_is_final(store: BucketStore, proxy: Proxy, answer: int) -> None:
    proxy.plan("answer", r"^PUT ", status=answer)
    with pytest.raises(Unsure if answer == 400 else StoreFailed) as caught:
        store.create("x", b"")
    assert str(answer) in str(caught.value)
    assert store.size("x") is None


@pytest.mark.parametrize("fault", LOST)
def test_probe_survives_a_lost_reply_or_says_so(url: str, proxy: Proxy, fault: Kind) -> None:
    """Our own retry may meet our own first probe: that is an answer, or an error of ours."""
    proxy.plan(fault, r"^PUT .*/_probe/")
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


def test_server_that_is_not_there_is_explained(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, cloud.environment(*free_ports(1)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "canary-token")
    monkeypatch.setattr(bucket_module, "RETRY_S", 0.2)
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


@pytest.mark.parametrize("how", ["endpoint", "address", "proxy"])
def test_passwords_are_never_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Nor are they in the errors behind an error, nor in what is logged."""
    host = f"me:hunter2@127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setattr(bucket_module, "RETRY_S", 0.05)
    monkeypatch.setattr(bucket_module, "SOON_S", 0.05)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}" if how == "endpoint" else "http://127.0.0.1:9",
        "AWS_ENDPOINT": f"http://{host}" if how == "endpoint" else "http://127.0.0.1:9",
        "AWS_PROXY_URL": f"http://{host}" if how == "proxy" else "",
        "AWS_ACCESS_KEY_ID": "canary-key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "",
    }.items():
        monkeypatch.setenv(name, value)
    address = "s3://me:hunter2@bucket" if how == "address" else "s3://bucket"
    calls: list[Callable[[], object]] = [
        lambda: open_store(f"{address}/x").read("x"),
        lambda: open_store(f"{address}/x").size("x"),
        lambda: open_store(f"{address}/x").names(),
        lambda: open_store(f"{address}/x", make=True),
        lambda: open_store(f"{address}/x").create("x", b""),
        lambda: open_store(f"{address}/x").put("x", writes(b"")),
        lambda: open_store(f"{address}/x").remove("x"),
        lambda: open_ranges(f"{address}/x"),
        lambda: list_objects(f"{address}/x", "x"),
        lambda: open_store(f"http://{host}/x"),
        lambda: Log.open(f"{address}/x"),
    ]
    for call in calls:
        with pytest.raises((PenstockError, Unsure)) as caught:
            call()
        told = "".join(traceback.format_exception(caught.value))
        # lines of code are those of this test
        assert "hunter2" not in re.sub(r"(?m)^    .*", "", told)
    assert "hunter2" not in caplog.text


# Outages.


def test_refused_connections_are_waited_out_by_every_call_and_told(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as time allows, however many tries that takes."""
    monkeypatch.setattr(bucket_module, "SOON_S", 0.1)
    monkeypatch.setattr(bucket_module, "_PAUSE_S", (0.05, 0.1))
    monkeypatch.setattr(bucket_module, "TELL_S", 0.3)
    store = BucketStore(url)
    store.create("there", b"there")
    stored = hashlib.sha256(b"put").hexdigest()
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: store.read("there"),
        "size": lambda: store.size("there"),
        "missing": lambda: store.size("missing"),
        "range": lambda: bytes(store.read_range("there", 1, 3)),
        "names": store.names,
        "create": lambda: store.create("created", b"created"),
        "put": lambda: store.put("x.parquet", writes(b"put")).sha256,
        "hash": lambda: store._hash("there"),
        "remove": lambda: store.remove("missing"),
    }
    found: dict[str, object] = {}
    threads = [
        threading.Thread(target=lambda name=name, call=call: found.update({name: call()}))
        for name, call in calls.items()
    ]
    with proxy.refusing():
        for thread in threads:
            thread.start()
        time.sleep(1.2)
        assert found == {}
    for thread in threads:
        thread.join(20)
    found.pop("names")
    assert found == {
        "read": b"there", "size": 5, "missing": None, "range": b"he", "create": None,
        "put": stored, "hash": hashlib.sha256(b"there").hexdigest(), "remove": None,
    }  # fmt: skip
    assert store.read("created") == b"created"
    told = [one.getMessage() for one in caplog.records]
    waits = [text for text in told if re.match(rf"{url} has not answered for \d+ s; trying", text)]
    assert 2 <= len(waits) <= 8  # every 0.3 s, not once for each of nine threads
    assert any(re.match(rf"{url} answers again, after \d+ s", text) for text in told)


def test_patience_ends_with_time_and_can_be_chosen(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patience_s, most_s in ((0.3, 3.0), (1.5, 5.0)):
        store = open_store(url, patience_s=patience_s)
        with proxy.refusing():
            began = time.monotonic()
            with pytest.raises(StoreBusy):
                store.read("x")
            assert patience_s <= time.monotonic() - began < most_s


@pytest.mark.parametrize("status", [400, 403, 404])
def test_what_no_patience_makes_right_is_said_at_once(url: str, proxy: Proxy, status: int) -> None:
    store = BucketStore(url)
    proxy.plan("answer", "", status=status, times=1000)
    began = time.monotonic()
    with pytest.raises((StoreFailed, FileNotFoundError)):
        store.read("x")
    assert time.monotonic() - began < 5


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
    proxy.plan("answer", r"^PUT .*/_log/0+2\.json", status=400)
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


@pytest.mark.parametrize(
    "endpoint",
    ["127.0.0.1:9000", "http//host:9000", "localhost", "http://h:port", "http://me:pa/ss@host:1",
     "http://me:pa ss@host:1", "ftp://host"],
)  # fmt: skip
def test_an_endpoint_that_is_no_address_is_told(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    """The client's own parser panics."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(BadConfig, match="AWS_ENDPOINT_URL is no address") as caught:
        open_store("s3://bucket/data")
    assert "pa" not in str(caught.value).replace("password", "")
