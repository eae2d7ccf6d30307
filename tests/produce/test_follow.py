"""Growing files into shards: the same bytes as from the finished file, whatever happens between.

Most of it runs on a clock of its own: each pause of the follower is one step of a writer, so that
long silences and hundreds of interruptions take no time. A few tests use real threads.
"""

import gzip
import hashlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import AlreadySealed, BadConfig, BadInput, InputMissing, InputReplaced
from penstock.ingest import inputs as inputs_module
from penstock.ingest.lines import done_marker, mark_done, read_done
from penstock.produce import lines as lines_module
from penstock.produce import producer as producer_module
from penstock.produce.columns import ValRule, shuffled
from penstock.produce.dataset import FollowConfig, Outcome, shard_jsonl
from penstock.produce.verify import verify
from penstock.produce.writer import ShardConfig
from penstock.store.log import Log
from penstock.store.record import Beat, Progress
from penstock.store.store import open_store
from penstock.work.events import Event, Events

SMALL: Final = ShardConfig(rows_per_file=7, bytes_per_file=600, val_fraction=0.2, seed=3)
COMPLETE: Final = FollowConfig(complete=True, max_rejects=1.0, threads=2)
FOLLOW: Final = FollowConfig(max_rejects=1.0, threads=2)
PROPERTY: Final = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


# Inputs.


def make_lines(seed: int, count: int) -> bytes:
    """Documents of all sizes, with rejects and blank lines between them."""
    dice = random.Random(seed)
    lines = []
    for k in range(count):
        kind = dice.randrange(12)
        if kind == 0:
            lines.append(dice.choice([b"{}", b"[1]", b'{"text": "\xff"}', b'{"text": 1}', b"x"]))
        elif kind == 1:
            lines.append(dice.choice([b"", b"  ", b"\r"]))
        elif kind == 2:
            told = {"source": f"f{k % 5}.h", "start": k, "end": k + 9, "part": k % 3, "parts": 3}
            lines.append(json.dumps({"text": f"part {k}", **told}).encode())
        else:
            text = f"{k} " + "é" * dice.choice([0, 1, 10, 40])
            lines.append(json.dumps({"text": text}, ensure_ascii=dice.random() < 0.5).encode())
    return b"".join(line + b"\n" for line in lines)


def documents(content: bytes) -> Iterator[dict[str, Any]]:
    """What of `content` is a document, by json.loads."""
    at = 0
    for line in content.splitlines(keepends=True) if content else []:
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict) and isinstance(value.get("text"), str) and value["text"]:
            yield {"start": at, "end": at + len(line), **value}
        at += len(line)


# Datasets.


def digests(dataset: Path, *patterns: str) -> dict[str, str]:
    """The sha256 of every shard, and of the rejects."""
    found = {}
    for pattern in patterns or ("*.parquet", "_rejects/*.jsonl", "_val/*"):
        for path in dataset.glob(pattern):
            if path.is_file():
                found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def rows(dataset: Path, split: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for file in Log.open(dataset).state.split(split):
        found += pq.read_table(dataset / file.name).to_pylist()
    return found


def records(dataset: Path) -> Iterator[Any]:
    log = Log.open(dataset)
    for n in range(log.state.n + 1):
        yield from log.record(n).ops


def read_complete(path: Path | list[Path], dataset: Path, config: ShardConfig = SMALL) -> Outcome:
    outcome = shard_jsonl(path if isinstance(path, list) else [path], dataset, config, COMPLETE)
    assert outcome.sealed
    return outcome


def assert_proven(dataset: Path) -> None:
    assert verify(open_store(dataset), full=True).faults == []


# A clock on which a pause of the follower is a step of the writer.


class Clock:
    def __init__(self, steps: Iterable[Callable[[], object]] = ()) -> None:
        self.now = 0.0
        self.steps = iter(steps)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        step = next(self.steps, None)
        assert step is not None, "the follower waits for a writer that has ended"
        step()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], Clock]:
    def set_to(clock: Clock) -> Clock:
        monkeypatch.setattr(inputs_module, "time", clock)
        monkeypatch.setattr(producer_module, "time", clock)
        monkeypatch.setattr(lines_module, "time", clock)
        return clock

    return set_to


def growing(
    path: Path, content: bytes, dice: random.Random, *, done: bool = True
) -> Iterator[Callable[[], object]]:
    """Append `content` in pieces that end anywhere, with pauses; then say that it is done."""
    at = 0
    while at < len(content):
        step = dice.choice((1, 2, 5, 30, 400))
        yield partial(append, path, content[at : at + step])
        at += step
        if dice.random() < 0.2:
            yield lambda: None
    if done:
        yield lambda: mark_done(path)


def append(path: Path, piece: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(piece)


def fresh(tmp_path: Path, counter: Iterator[int] = itertools.count()) -> Path:  # noqa: B008
    """A new folder, for each example of a property."""
    folder = tmp_path / f"example{next(counter)}"
    folder.mkdir()
    return folder


# A finished file.


@PROPERTY
@given(st.integers(0, 2**20), st.integers(0, 60), st.sampled_from([b"", b'{"text": "last"}', b"{"]))
def test_every_document_is_in_one_shard_and_where_it_belongs(
    tmp_path: Path, seed: int, count: int, last: bytes
) -> None:
    folder = fresh(tmp_path)
    path = folder / "in.jsonl"
    content = make_lines(seed, count) + last
    path.write_bytes(content)
    dataset = folder / "out"
    outcome = read_complete(path, dataset)
    expected = list(documents(content))
    split = ValRule.of(SMALL.seed, SMALL.val_fraction)
    sides = {"train": rows(dataset, "train"), "val": rows(dataset, "val")}
    told = ("start", "end", "part", "parts", "source")
    own = {"part": 0, "parts": 1, "source": str(path)}
    found = [tuple(row[k] for k in ("text", *told)) for side in sides.values() for row in side]
    wanted = [tuple({**own, **d}[k] for k in ("text", *told)) for d in expected]
    assert sorted(found) == sorted(wanted)
    for side, side_rows in sides.items():
        ids = np.array([row["doc_id"] for row in side_rows], np.uint64)
        assert (split.is_val(ids) == (side == "val")).all()
    assert not {r["doc_id"] for r in sides["train"]} & {r["doc_id"] for r in sides["val"]}
    state = outcome.state.inputs[str(path)]
    assert state.to == len(content)
    assert state.kept == len(expected)
    assert state.read == state.kept + sum(state.dropped.values())
    assert state.end == "complete: told so"
    assert_proven(dataset)


def test_shards_are_shuffled_within_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(1, 400))
    config = replace(SMALL, bytes_per_file=64 * SMALL.rows_per_file + 150)  # rows cost 64 each
    read_complete(path, tmp_path / "out", config)
    order = [d["text"] for d in documents(path.read_bytes())]
    place = {text: k for k, text in enumerate(order)}
    assert len(place) == len(order)
    last_place = -1
    shards = Log.open(tmp_path / "out").state.split("train")
    assert len(shards) > 20
    reached_rows = reached_bytes = 0
    for number, shard in enumerate(shards):
        assert shard.name == f"shard_{number:05d}.parquet"
        texts = pq.read_table(tmp_path / "out" / shard.name)["text"].to_pylist()
        in_order = sorted(texts, key=place.__getitem__)
        assert texts == [in_order[k] for k in shuffled(len(texts), config.seed, number)]
        assert len(texts) <= config.rows_per_file
        assert place[in_order[0]] > last_place  # shards follow each other in input order
        last_place = place[in_order[-1]]
        reached_rows += len(texts) == config.rows_per_file
        size = sum(len(text.encode()) for text in in_order)
        assert size - len(in_order[-1].encode()) < config.bytes_per_file
        reached_bytes += len(texts) < config.rows_per_file
    assert reached_rows > 3
    assert reached_bytes > 3


def test_val_shard_is_its_parts_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(2, 300))
    parts: dict[str, list[Any]] = {}

    def keep_parts(event: Event) -> None:
        for file in event.get("files", []) if event["kind"] == "commit" else []:
            if file["name"].startswith("_val/"):
                parts[file["name"]] = pq.read_table(tmp_path / "out" / file["name"]).to_pylist()

    events = Events("shard")
    events.listen(keep_parts)
    shard_jsonl([path], tmp_path / "out", SMALL, COMPLETE, events=events)
    assert len(parts) > 5
    joined = pq.read_table(tmp_path / "out" / "val_shard.parquet").to_pylist()
    assert joined == [row for name in sorted(parts) for row in parts[name]]
    assert not any((tmp_path / "out" / name).exists() for name in parts)
    assert [f.name for f in Log.open(tmp_path / "out").state.split("val")] == ["val_shard.parquet"]


def test_parts_of_one_source_share_a_split_and_an_id(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    lines = [
        json.dumps(
            {"text": f"{k} of {name}", "source": f"{name}.h", "start": 10 * k, "end": 10 * k + 10,
             "part": k, "parts": 4}
        )
        for k in range(4)
        for name in range(60)
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    read_complete(path, tmp_path / "out")
    homes: dict[str, set[tuple[int, str]]] = {}
    for split in ("train", "val"):
        for row in rows(tmp_path / "out", split):
            homes.setdefault(row["source"], set()).add((row["doc_id"], split))
            assert row["start"] == 10 * row["part"]
            assert row["parts"] == 4
    assert len(homes) == 60
    assert all(len(home) == 1 for home in homes.values())
    assert {split for home in homes.values() for _, split in home} == {"train", "val"}


def test_rejects_files_hold_one_line_for_each_reject(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    content = make_lines(3, 500) + b'{"text": "half'
    path.write_bytes(content)
    outcome = read_complete(path, tmp_path / "out")
    told = []
    for file in outcome.state.split("rejects"):
        lines = (tmp_path / "out" / file.name).read_text().splitlines()
        assert len(lines) == file.rows
        told += [json.loads(line) for line in lines]
    kept = {(d["start"], d["end"]) for d in documents(content)}
    at = 0
    for reject in told:
        assert reject["input"] == str(path)
        assert reject["start"] >= at
        assert reject["start"] <= reject["at"] <= reject["end"]
        at = reject["end"]
        line = content[reject["start"] : reject["end"]]
        assert b"\n" not in line[:-1]
        assert content[reject["start"] - 1 : reject["start"]] in (b"", b"\n")
        assert line.strip()
        assert (reject["start"], reject["end"]) not in kept
        assert reject["sample"] == line.rstrip(b"\n").decode("utf-8", "backslashreplace")
    assert told[-1]["reason"] == "half_line"
    counts: dict[str, int] = {}
    for reject in told:
        counts[reject["reason"]] = counts.get(reject["reason"], 0) + 1
    assert counts == outcome.state.inputs[str(path)].dropped
    assert {"no_text", "not_an_object", "invalid_utf8", "text_not_a_string"} <= {*counts}


def test_several_inputs_are_one_after_the_other(tmp_path: Path) -> None:
    contents = [make_lines(seed, 60) for seed in (4, 5, 6)]
    paths = [tmp_path / f"{k}.jsonl" for k in range(3)]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    outcome = read_complete(paths, tmp_path / "out")
    assert [known.to for known in outcome.state.inputs.values()] == [len(c) for c in contents]
    found = sorted(r["text"] for s in ("train", "val") for r in rows(tmp_path / "out", s))
    assert found == sorted(d["text"] for c in contents for d in documents(c))
    sources = {r["source"] for r in rows(tmp_path / "out", "train")}
    assert {*map(str, paths)} < sources
    assert_proven(tmp_path / "out")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_gives_the_same_shards(tmp_path: Path, suffix: str) -> None:
    content = b"".join(
        json.dumps(
            {"text": f"{k} " + "y" * (k % 50), "source": f"{k % 40}.h", "start": 0, "end": 9,
             "part": 0, "parts": 1}
        ).encode()
        + b"\n"
        for k in range(300)
    )  # fmt: skip
    plain, packed = tmp_path / "in.jsonl", tmp_path / f"in.jsonl{suffix}"
    plain.write_bytes(content)
    packed.write_bytes(gzip.compress(content) if suffix == ".gz" else zstandard.compress(content))
    read_complete(plain, tmp_path / "a")
    # A compressed input is complete: nobody has to say so.
    assert shard_jsonl([packed], tmp_path / "b", SMALL, FOLLOW).sealed
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(digests(tmp_path / "a")) > 20
    assert Log.open(tmp_path / "b").state.inputs[str(packed)].end == "complete: compressed"


def test_how_it_is_read_does_not_change_the_shards(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(8, 300))
    read_complete(path, tmp_path / "a")
    for threads in (1, 5):
        how = FollowConfig(complete=True, max_rejects=0.9, threads=threads)
        assert shard_jsonl([path], tmp_path / f"{threads}", SMALL, how).sealed
        assert digests(tmp_path / f"{threads}") == digests(tmp_path / "a")


def test_an_empty_input_is_a_sealed_dataset_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"")
    outcome = read_complete(path, tmp_path / "out")
    assert outcome.state.sealed is not None
    assert (outcome.state.sealed.shards, outcome.state.sealed.rows) == (0, 0)
    assert pq.read_table(tmp_path / "out" / "val_shard.parquet").num_rows == 0
    assert_proven(tmp_path / "out")


def test_long_sources_close_a_shard_too(tmp_path: Path) -> None:
    """A shard is bounded so that memory is; the sources of its rows are in memory as well."""
    path = tmp_path / "in.jsonl"
    told = {"start": 0, "end": 1, "part": 0, "parts": 1}
    path.write_text(
        "".join(
            json.dumps({"text": "a", "source": f"{k}" + "s" * 100_000, **told}) + "\n"
            for k in range(40)
        )
    )
    config = ShardConfig(bytes_per_file=1 << 20, val_fraction=0)
    read_complete(path, tmp_path / "out", config)
    assert len(Log.open(tmp_path / "out").state.split("train")) > 1


# A growing file.


@PROPERTY
@given(st.integers(0, 2**20), st.integers(0, 80), st.sampled_from([b"", b'{"text": "last"}', b"{"]))
def test_a_growing_file_gives_the_shards_of_the_finished_one(
    tmp_path: Path,
    set_clock: Callable[[Clock], Clock],
    seed: int,
    count: int,
    last: bytes,
) -> None:
    folder = fresh(tmp_path)
    path = folder / "in.jsonl"
    content = make_lines(seed, count) + last
    path.write_bytes(b"")
    set_clock(Clock(growing(path, content, random.Random(seed))))
    outcome = shard_jsonl([path], folder / "grown", SMALL, FOLLOW)
    assert outcome.sealed
    assert path.read_bytes() == content
    assert outcome.state.inputs[str(path)].end == "done marker"
    read_complete(path, folder / "finished")
    assert digests(folder / "grown") == digests(folder / "finished")


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_file_written_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The same on the real clock, with a real writer that knows nothing of the reader."""
    monkeypatch.setattr(producer_module, "_POLL_S", 0.01)
    path = tmp_path / "in.jsonl"
    content = make_lines(seed, 250) + b'{"text": "the last, without a newline"}'
    dice = random.Random(seed)

    def write() -> None:
        time.sleep(0.05)
        for step in growing(path, content, dice):
            step()
            if dice.random() < 0.3:
                time.sleep(dice.random() * 0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        follow = FollowConfig(max_rejects=1.0, beat_s=0.05)
        assert shard_jsonl([path], tmp_path / "grown", SMALL, follow).sealed
    finally:
        writer.join()
    assert path.read_bytes() == content
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "grown") == digests(tmp_path / "finished")


def test_silence_is_not_the_end(tmp_path: Path, set_clock: Callable[[Clock], Clock]) -> None:
    path = tmp_path / "in.jsonl"
    content = make_lines(9, 40)
    path.write_bytes(content[:333])
    heard: list[Event] = []
    events = Events("shard")
    events.listen(heard.append)
    silence: list[Callable[[], object]] = [lambda: None] * 12_000
    clock = set_clock(
        Clock([*silence, lambda: append(path, content[333:]), lambda: mark_done(path)])
    )
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW, events=events)
    assert outcome.sealed
    assert outcome.state.inputs[str(path)].to == len(content)
    assert clock.now > 1200
    beats = sum(isinstance(op, Beat) for op in records(tmp_path / "out"))
    assert 110 <= beats <= 120  # one every 10 s
    waits = [event["message"] for event in heard if event["kind"] == "wait"]
    assert len(waits) == 7  # at 10 s, 20 s, 40 s ... 640 s
    assert f"{path} has not grown for 10 s; waiting for more, or for in.jsonl.done" in waits[0]
    assert "--complete" in waits[0]
    assert "--until-idle 60s" in waits[0]
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")
    assert_proven(tmp_path / "out")


def test_a_pause_in_real_time_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "first"}\n{"tex')

    def go_on() -> None:
        append(path, b't": "second"}\n')
        mark_done(path)

    timer = threading.Timer(0.6, go_on)
    timer.start()
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, FollowConfig(beat_s=0.1))
    timer.join()
    assert outcome.sealed
    assert outcome.state.inputs[str(path)].kept == 2
    assert sum(isinstance(op, Beat) for op in records(tmp_path / "out")) >= 2


def test_until_idle_ends_and_the_log_says_so(
    tmp_path: Path, set_clock: Callable[[Clock], Clock]
) -> None:
    path = tmp_path / "in.jsonl"
    content = make_lines(10, 40)
    path.write_bytes(b"")
    pause: list[Callable[[], object]] = [lambda: None] * 40
    steps: list[Callable[[], object]] = []
    for line in content.splitlines(keepends=True):
        steps += [partial(append, path, line), *pause]
    clock = set_clock(Clock([*steps, *pause, *pause]))
    follow = FollowConfig(max_rejects=1.0, until_idle_s=5.0)
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, follow)
    assert outcome.sealed
    assert clock.now > 40 * 4.1
    assert outcome.state.inputs[str(path)].to == len(content)
    ends = [op.end for op in records(tmp_path / "out") if isinstance(op, Progress) and op.end]
    assert ends == ["until-idle 5s"]
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")


def test_a_line_that_still_grows_is_not_idle(
    tmp_path: Path, set_clock: Callable[[Clock], Clock]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "')
    steps: list[Callable[[], object]] = [lambda: append(path, b"grows ")] * 100
    steps += [lambda: append(path, b'"}\n')]
    set_clock(Clock([*steps, *([lambda: None] * 100)]))
    follow = FollowConfig(max_rejects=1.0, until_idle_s=5.0)
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, follow)
    assert outcome.state.inputs[str(path)].dropped == {}
    assert outcome.state.inputs[str(path)].kept == 1


def test_an_input_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "later.jsonl"

    def make() -> None:
        path.write_bytes(b'{"text": "a"}\n')
        mark_done(path)

    timer = threading.Timer(0.3, make)
    timer.start()
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    timer.join()
    assert outcome.state.inputs[str(path)].kept == 1


def test_an_input_that_does_not_come(tmp_path: Path, set_clock: Callable[[Clock], Clock]) -> None:
    clock = set_clock(Clock([lambda: None] * 1000))
    with pytest.raises(InputMissing, match=r"later\.jsonl is not there"):
        shard_jsonl([tmp_path / "later.jsonl"], tmp_path / "out", SMALL, FOLLOW)
    assert 60 <= clock.now < 61


def test_a_signal_is_heeded_while_an_input_is_waited_for(
    tmp_path: Path, set_clock: Callable[[Clock], Clock]
) -> None:
    set_clock(Clock([lambda: None, lambda: os.kill(os.getpid(), signal.SIGTERM)]))
    outcome = shard_jsonl([tmp_path / "later.jsonl"], tmp_path / "out", SMALL, FOLLOW)
    assert (outcome.sealed, outcome.stopped_by) == (False, signal.SIGTERM)


# Replaced while it is read, and between two runs.


def cut(path: Path) -> None:
    os.truncate(path, 5)


def put_another(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(make_lines(77, 400))
    os.replace(other, path)


def put_the_same_bytes(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


def rewrite_longer(path: Path) -> None:
    path.write_bytes(make_lines(78, 400))


def put_another_and_mark_it(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b'{"text": "other"}\n')
    os.replace(other, path)
    mark_done(path)


@pytest.mark.parametrize(
    "change",
    [
        cut,
        put_another,
        put_the_same_bytes,
        pytest.param(
            rewrite_longer,
        ),
        pytest.param(
            put_another_and_mark_it,
        ),
    ],
)
def test_replaced_while_it_is_read(
    tmp_path: Path, set_clock: Callable[[Clock], Clock], change: Callable[[Path], None]
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(11, 100))
    nothing: Callable[[], object] = lambda: None  # noqa: E731
    set_clock(Clock([nothing, lambda: change(path), nothing, lambda: mark_done(path), nothing]))
    with pytest.raises(InputReplaced) as caught:
        shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    assert caught.value.what == "in.jsonl is not the file that was read before"
    assert caught.value.where == str(path)
    log = Log.open(tmp_path / "out")
    assert log.state.sealed is None
    assert log.state.split("train")  # what was full before is committed
    assert verify(open_store(tmp_path / "out"), full=True).faults == []


@pytest.mark.parametrize("change", [cut, put_another, rewrite_longer])
def test_replaced_between_two_runs(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(12, 100))
    stop_at(path, tmp_path / "out", 4)
    assert Log.open(tmp_path / "out").state.inputs[str(path)].to > 0
    change(path)
    with pytest.raises(InputReplaced, match=r"in\.jsonl is not the file that was read before"):
        shard_jsonl([path], tmp_path / "out", SMALL, COMPLETE)


def test_a_copy_of_the_same_bytes_is_fine_between_two_runs(tmp_path: Path) -> None:
    """Moved to another disk, say: the proof is of bytes, not of inodes."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(12, 100))
    stop_at(path, tmp_path / "out", 4)
    put_the_same_bytes(path)
    read_complete(path, tmp_path / "out")
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")


def test_a_compressed_input_replaced_between_two_runs(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.gz"
    content = make_lines(13, 200)
    path.write_bytes(gzip.compress(content))
    stop_at(path, tmp_path / "out", 5)
    to = Log.open(tmp_path / "out").state.inputs[str(path)].to
    assert 10 < to < len(content)
    path.write_bytes(gzip.compress(content[: to - 5] + b"?" + content[to - 4 :]))
    with pytest.raises(InputReplaced, match="are not those that were read"):
        shard_jsonl([path], tmp_path / "out", SMALL, COMPLETE)
    path.write_bytes(gzip.compress(content, 1))
    read_complete(path, tmp_path / "out")
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")


# The marker.


@pytest.mark.parametrize("more", [1, 10**15])
def test_a_marker_that_promises_more_than_there_is(tmp_path: Path, more: int) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    done_marker(path).write_text(json.dumps({"bytes": 14 + more}))
    with pytest.raises(InputReplaced) as caught:
        shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    assert caught.value.what == "in.jsonl is shorter than its marker says"
    assert f"it has 14 bytes, in.jsonl.done promises {14 + more:,}" in caught.value.why
    assert "remove the marker" in caught.value.do
    assert Log.open(tmp_path / "out").state.sealed is None


@pytest.mark.parametrize("fewer", [1, 2, 14])
def test_a_marker_that_promises_less_is_of_an_earlier_run(
    tmp_path: Path, set_clock: Callable[[Clock], Clock], fewer: int
) -> None:
    """Its producer went on since, and may do so still."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    done_marker(path).write_text(json.dumps({"bytes": 14 - fewer}))

    def write_on() -> None:
        append(path, b'{"text": "b"}\n')
        mark_done(path)

    set_clock(Clock([lambda: None, write_on]))
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    assert outcome.state.inputs[str(path)].end == "done marker"
    assert outcome.state.inputs[str(path)].kept == 2


def test_an_empty_marker_is_enough_and_rubbish_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    done_marker(path).write_text("finished!")
    with pytest.raises(BadInput, match=r"in\.jsonl\.done is not a marker penstock knows"):
        shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    done_marker(path).write_text("")
    assert shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW).sealed


def test_what_is_written_before_the_marker_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bytes and the marker come between the look for the marker and the read."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    look = read_done

    def look_then_write(looked_at: Path) -> int | None:
        found = look(looked_at)
        if not done_marker(path).exists():
            append(path, b'{"text": "b"}\n')
            mark_done(path)
        return found

    monkeypatch.setattr(inputs_module, "read_done", look_then_write)
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    assert outcome.state.inputs[str(path)].kept == 2


# Stopped and started again.


class Interrupted(Exception):
    """Raised in the middle of the work, as a stand-in for a crash."""


def stop_at(path: Path, dataset: Path, number: int, *, by: int | None = None) -> bool:
    """Run until event `number`, and fail there or send a signal; whether it got that far."""
    left = itertools.count(-number)
    hit = False

    def strike(event: Event) -> None:
        nonlocal hit
        if next(left) == 0 and event["kind"] != "end":
            hit = True
            if by is None:
                raise Interrupted
            os.kill(os.getpid(), by)

    events = Events("shard")
    events.listen(strike)
    try:
        outcome = shard_jsonl([path], dataset, SMALL, COMPLETE, events=events)
    except Interrupted:
        return True
    if hit:
        assert outcome.stopped_by == by
    return hit


def test_interrupted_anywhere_and_run_again(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(14, 130) + b'{"text": "half')
    read_complete(path, tmp_path / "finished")
    expected = digests(tmp_path / "finished")
    hits = 0
    for number in range(100):
        dataset = tmp_path / f"stopped{number}"
        if not stop_at(path, dataset, number):
            break
        hits += 1
        read_complete(path, dataset)
        assert digests(dataset) == expected, number
        if number % 5 == 0:
            assert_proven(dataset)
    assert hits > 12


def test_interrupted_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(15, 130))
    dice = random.Random(15)
    runs = 0
    while stop_at(path, tmp_path / "out", dice.randrange(1, 6)):
        runs += 1
        assert runs < 100
    assert runs > 2
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")
    assert_proven(tmp_path / "out")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_between_lines(
    tmp_path: Path, set_clock: Callable[[Clock], Clock], number: int
) -> None:
    path = tmp_path / "in.jsonl"
    content = make_lines(16, 100)
    path.write_bytes(content[:3000])
    before = signal.getsignal(number)
    set_clock(Clock([lambda: None, lambda: os.kill(os.getpid(), number)]))
    outcome = shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW)
    assert not outcome.sealed
    assert outcome.stopped_by == number
    assert outcome.state.split("train")
    assert signal.getsignal(number) is before
    path.write_bytes(content)
    read_complete(path, tmp_path / "out")
    read_complete(path, tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")


def test_a_restart_says_what_it_goes_on_from(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(17, 100))
    stop_at(path, tmp_path / "out", 5)
    to = Log.open(tmp_path / "out").state.inputs[str(path)].to
    assert to > 0
    heard: list[Event] = []
    events = Events("shard")
    events.listen(heard.append)
    shard_jsonl([path], tmp_path / "out", SMALL, COMPLETE, events=events)
    assert heard[1]["kind"] == "start"
    assert heard[1]["bytes"] == to
    assert heard[-1] == {**heard[-1], "kind": "end", "sealed": True}


def test_an_earlier_writer_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(17, 100))

    def heard_from(dataset: Path) -> list[tuple[str, str]]:
        told: list[tuple[str, str]] = []
        events = Events("shard")
        events.listen(lambda event: told.append((event["kind"], event.get("message", ""))))
        shard_jsonl([path], dataset, SMALL, COMPLETE, events=events)
        return [(kind, message) for kind, message in told if "earlier writer" in message]

    assert heard_from(tmp_path / "new") == []
    for name, beat_s, kind, advice in (
        ("lately", 1000.0, "warn", "; if it still runs, it ends at its next commit: run one "
         "producer at a time"),
        ("long_ago", 0.0, "wait", ""),
    ):  # fmt: skip
        stop_at(path, tmp_path / name, 5)
        state = Log.open(tmp_path / name).state
        monkeypatch.setattr("penstock.store.log.BEAT_S", beat_s)
        ((found, told),) = heard_from(tmp_path / name)
        assert found == kind
        assert told.startswith(
            f"{tmp_path / name}: taken over from an earlier writer of epoch 1, whose last record "
            f"is {state.n}, of {state.time} ("
        )
        assert told.endswith(f" s ago){advice}")
    # what is sealed is taken from nobody
    assert heard_from(tmp_path / "lately") == []


# Going on with something else.


def test_an_input_more_at_the_end_goes_on(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(make_lines(18, 80))
    second.write_bytes(make_lines(19, 80))
    stop_at(first, tmp_path / "out", 4)
    read_complete([first, second], tmp_path / "out")
    read_complete([first, second], tmp_path / "finished")
    assert digests(tmp_path / "out") == digests(tmp_path / "finished")


def test_an_ended_input_that_grew_is_read_on(tmp_path: Path) -> None:
    """Stopped in the second input; the first, which had ended, has more when it goes on."""
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_bytes(make_lines(30, 60))
    second.write_bytes(make_lines(31, 60))

    def strike(event: Event) -> None:
        state = Log.open(tmp_path / "out").state
        if event["kind"] == "commit" and state.inputs and state.inputs.get(str(second)):
            os.kill(os.getpid(), signal.SIGTERM)

    events = Events("shard")
    events.listen(strike)
    outcome = shard_jsonl([first, second], tmp_path / "out", SMALL, COMPLETE, events=events)
    assert outcome.stopped_by == signal.SIGTERM
    if outcome.sealed:
        pytest.fail("the signal came too late to stop the run")
    assert outcome.state.inputs[str(first)].end == "complete: told so"
    append(first, b'{"text": "late"}\n')
    read_complete([first, second], tmp_path / "out")
    found = sorted(r["text"] for s in ("train", "val") for r in rows(tmp_path / "out", s))
    contents = (first.read_bytes(), second.read_bytes())
    assert found == sorted(d["text"] for c in contents for d in documents(c))
    assert_proven(tmp_path / "out")


def test_other_options_are_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(20, 80))
    stop_at(path, tmp_path / "out", 4)
    before = Log.open(tmp_path / "out").state.n
    other = ShardConfig(rows_per_file=8, bytes_per_file=600, val_fraction=0.3, seed=3)
    with pytest.raises(BadConfig) as caught:
        shard_jsonl([path], tmp_path / "out", other, COMPLETE)
    assert caught.value.what == "the dataset was begun with other options"
    assert caught.value.why == ("rows_per_file: 7 before, 8 now; val_fraction: 0.2 before, 0.3 now")
    assert "give the same options" in caught.value.do
    assert Log.open(tmp_path / "out").state.n == before


def test_other_inputs_are_refused_with_the_difference(tmp_path: Path) -> None:
    path, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(make_lines(21, 80))
    other.write_bytes(make_lines(22, 80))
    stop_at(path, tmp_path / "out", 4)
    for inputs in ([other], [other, path]):
        with pytest.raises(BadConfig) as caught:
            shard_jsonl(inputs, tmp_path / "out", SMALL, COMPLETE)
        assert caught.value.what == "the dataset was begun with other inputs"
        assert caught.value.why == f"input 1 was '{path}', and is '{other}' now"
        assert "new ones go at the end" in caught.value.do
    read_complete(path, tmp_path / "out")


def test_no_input_and_the_same_input_twice(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"")
    for inputs in ([], [path, path]):
        with pytest.raises(BadConfig, match="the same input is given twice, or none"):
            shard_jsonl(inputs, tmp_path / "out", SMALL, COMPLETE)


def test_a_sealed_dataset_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(make_lines(23, 40))
    read_complete(path, tmp_path / "out")
    before = digests(tmp_path / "out", "*", "_log/*", "_rejects/*")
    assert read_complete(path, tmp_path / "out").state.sealed
    assert digests(tmp_path / "out", "*", "_log/*", "_rejects/*") == before
    # killed after the seal and before the marker: the next run puts it there
    (tmp_path / "out" / "_COMPLETE").unlink()
    read_complete(path, tmp_path / "out")
    assert digests(tmp_path / "out", "*", "_log/*", "_rejects/*") == before


def test_a_sealed_dataset_takes_nothing_more(tmp_path: Path) -> None:
    path, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    path.write_bytes(b'{"text": "a"}\n')
    read_complete(path, tmp_path / "out")
    other.write_bytes(b'{"text": "b"}\n')
    with pytest.raises(AlreadySealed, match=r"is sealed, and .*other\.jsonl is not in it"):
        shard_jsonl([path, other], tmp_path / "out", SMALL, COMPLETE)
    append(path, b'{"text": "b"}\n')
    with pytest.raises(AlreadySealed, match=r"is sealed, and in\.jsonl holds more") as caught:
        shard_jsonl([path], tmp_path / "out", SMALL, COMPLETE)
    assert caught.value.why == "it has 28 bytes, and 14 were read"
    assert caught.value.do == "write to a new directory"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_rejects": -0.1}, "--max_rejects is -0.1"),
        ({"max_rejects": float("nan")}, "--max_rejects is nan"),
        ({"threads": 0}, "--threads is 0"),
        ({"until_idle_s": 0.0}, "--until_idle must be longer than 0 s"),
    ],
)
def test_how_to_follow_checks_itself(options: dict[str, Any], what: str) -> None:
    with pytest.raises(BadConfig) as caught:
        FollowConfig(**options)
    assert caught.value.what == what
    assert caught.value.do


def test_beats_say_how_long_the_input_has_been_silent(
    tmp_path: Path, set_clock: Callable[[Clock], Clock]
) -> None:
    path = tmp_path / "in.jsonl"
    content = make_lines(9, 40)
    path.write_bytes(content[:333])
    silence: list[Callable[[], object]] = [lambda: None] * 1_000
    set_clock(
        Clock([*silence, lambda: append(path, content[333:]), *silence, lambda: mark_done(path)])
    )
    assert shard_jsonl([path], tmp_path / "out", SMALL, FOLLOW).sealed
    beats = [op for op in records(tmp_path / "out") if isinstance(op, Beat)]
    assert {beat.input for beat in beats} == {str(path)}
    silent = [beat.silent_s for beat in beats]
    assert max(silent) == pytest.approx(100, abs=11)
    grew = silent.index(min(silent[5:]), 5)  # it counts anew when the input grows
    for part in (silent[:grew], silent[grew:]):
        assert (np.diff(part) >= 9).all()  # more where shards were committed meanwhile
        assert part[-1] - part[0] >= 50
