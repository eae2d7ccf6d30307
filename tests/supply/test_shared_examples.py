"""Workers share decoded shards: each is made once and mapped by all, and nothing is left of it."""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from torch.utils.data import DataLoader

from penstock.errors import ShardMismatch
from penstock.supply import run_folder
from penstock.supply.run_folder import SharedFiles

from .datasets import made_dataset
from .test_mixed import dataset, ids, made_folder, write_shard

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that nothing else uses.

    Its name is short: torch's workers have sockets there, whose names have 108 letters at most.
    Where one does not fit, a worker tells nobody, and its batches never come.
    """
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        for run in [run for run in run_folder._joined if run.startswith(folder)]:
            run_folder._users.pop(run, None)
            run_folder.leave_folder(run)


def runs(place: Path) -> list[Path]:
    """The folders of runs in a place that share files; others have marks of what was hashed."""
    return sorted(path.parent for path in place.glob(f"penstock-{os.geteuid()}/*/uses"))


def files(place: Path) -> list[Path]:
    """The decoded shards that lie in a place."""
    own = ("alive", "uses")
    return [path for run in runs(place) for path in run.iterdir() if path.name not in own]


def boards(folder: Path, shards: int, rows: int, width: int) -> str:
    random = np.random.default_rng(0)
    for k in range(shards):
        cells = pa.array(random.integers(0, 256, rows * width, np.uint8))
        board = pa.FixedSizeListArray.from_arrays(cells, width)
        write_shard(folder, k, pa.table({"id": np.arange(k * rows, (k + 1) * rows), "b": board}))
    (folder / "_COMPLETE").touch()
    return str(folder)


def read(found: Any) -> list[int]:
    return [n for batch in found for n in batch["id"].tolist()]


def test_eight_workers_share_the_limit(tmp_path: Path) -> None:
    """The window takes 120 MB, the limit is 600 MB: held by each of eight it would be 960 MB."""
    folder = boards(tmp_path / "a", 12, 1000, 10_000)
    options = {"pool_size": 12_000, "refill_threshold": 9_000, "batch_size": 100}
    whole = ids(dataset(folder, columns=["id"], **options))
    found = dataset(folder, max_memory_gb=0.6, **options)
    assert read(DataLoader(found, batch_size=100, num_workers=8)) == whole


def test_each_shard_is_made_once_and_mapped_by_all(tmp_path: Path, place: Path) -> None:
    folder = boards(tmp_path / "a", 6, 40, 20_000)
    found = dataset(folder, batch_size=4, pool_size=1000, refill_threshold=500)
    batches: Any = iter(DataLoader(found, batch_size=4, num_workers=3))
    next(batches)
    time.sleep(0.5)  # all workers have brought their pools
    made = {str(path): path.stat().st_ino for path in files(place)}
    assert len(made) == 6
    for worker in batches._workers:
        mapped = {one.path for one in psutil.Process(worker.pid).memory_maps()}
        assert made.keys() <= mapped
    assert sum(1 for _ in batches) == 59
    del batches
    wait_until(lambda: not runs(place))


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_leaves_the_window_is_removed(tmp_path: Path, place: Path) -> None:
    """In a pass over 40 shards, through a pool of about 7 and what is planned ahead."""
    made_folder(tmp_path / "a", shards=40, rows=20)
    found = dataset(str(tmp_path / "a"), cache_dir=str(place))
    most, seen = 0, []
    for example in found:
        seen.append(int(example["id"]))
        most = max(most, len(files(place)))
    assert seen == ids(dataset(str(tmp_path / "a")))
    assert 2 < most < 35
    assert files(place) == []


KILLED = """
import sys
from torch.utils.data import DataLoader
from penstock import StreamingMixedShardDataset

found = StreamingMixedShardDataset([sys.argv[1]], ["all"], 90, 60, random_seed=3, batch_size=4)
for number, batch in enumerate(DataLoader(found, batch_size=4, num_workers=2)):
    if number == 2:
        print("reads", flush=True)
        sys.stdin.read()
"""


def test_what_a_killed_run_has_left_is_removed_by_the_next(tmp_path: Path, place: Path) -> None:
    folder = made_folder(tmp_path / "a")
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"reads\n"
        os.killpg(process.pid, signal.SIGKILL)
    (left,) = runs(place)
    assert files(place)
    found = dataset(folder, batch_size=4)
    whole = ids(dataset(folder))
    batches = iter(DataLoader(found, batch_size=4, num_workers=2))
    begun = next(batches)["id"].tolist()
    assert left not in runs(place)
    assert begun + read(batches) == whole


def test_a_full_disk_is_no_error(
    tmp_path: Path, place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = boards(tmp_path / "a", 6, 40, 20_000)
    whole = ids(dataset(folder))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, limits[1]))
    try:
        assert ids(dataset(folder, cache_dir=str(place))) == whole
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "each process holds its own in memory" in caplog.text
    assert caplog.text.count("cannot be shared") == 1
    assert files(place) == []


def test_errors_of_shards_are_those_of_shards(tmp_path: Path, place: Path) -> None:
    folder = made_folder(tmp_path / "a")
    path = tmp_path / "a" / "shard_00001.parquet"
    data = bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    loader: Any = DataLoader(dataset(folder, batch_size=4), batch_size=4, num_workers=2)
    with pytest.raises(ShardMismatch, match="shard_00001"):
        read(loader)
    with pytest.raises(ShardMismatch, match="shard_00001"):
        ids(dataset(folder, cache_dir=str(place)))


def values(n: int) -> list[Any]:
    return [None if k % 5 == 3 else k for k in range(n)]


@pytest.mark.parametrize("rows", [0, 1, 30])
def test_every_kind_of_column_comes_through_a_file(tmp_path: Path, place: Path, rows: int) -> None:
    every = [n for n in values(rows) if n is not None or rows > 1]
    table = pa.table(
        {
            "id": pa.array(range(rows), pa.int32()),
            "bool": pa.array([None if n is None else n % 2 == 0 for n in every]),
            "half": pa.array([float(n or 0) for n in every], pa.float32()).cast(pa.float16()),
            "day": pa.array([None if n is None else date(2000, 1, n + 1) for n in every]),
            "time": pa.array(every, pa.timestamp("us")),
            "text": pa.array([None if n is None else "é" * n for n in every], pa.large_string()),
            "raw": pa.array([None if n is None else bytes(n) for n in every], pa.binary(-1)),
            "fixed": pa.array([b"ab"] * rows, pa.binary(2)),
            "opening": pa.array([None if n is None else f"o{n % 3}" for n in every]).cast(
                pa.dictionary(pa.int32(), pa.string())
            ),
            "board": pa.array([[[1, 2], [3, 4]]] * rows, pa.list_(pa.list_(pa.int8(), 2), 2)),
            "moves": pa.array(
                [None if n is None else [n] * n for n in every], pa.list_(pa.int16())
            ),
            "tags": pa.array([[None, "a" * (n or 0)] for n in every], pa.list_(pa.string())),
            "deep": pa.array(
                [[[1]] * ((n or 0) % 3) for n in every], pa.list_(pa.list_(pa.int64()))
            ),
            "about": pa.array(
                [None if n is None else {"elo": n, "name": "x" * n} for n in every],
                pa.struct({"elo": pa.int64(), "name": pa.string()}),
            ),
        }
    )  # fmt: skip
    write_shard(tmp_path / "a", 0, table)
    write_shard(tmp_path / "a", 1, table.slice(0, rows // 2))
    folder = str(tmp_path / "a")
    here = list(dataset(folder, streaming=False))
    shared = list(dataset(folder, streaming=False, cache_dir=str(place)))
    assert len(runs(place)) == (rows > 0)
    assert len(here) == rows + rows // 2
    for one, other in zip(here, shared, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert type(one[name]) is type(other[name]), name
            assert getattr(one[name], "dtype", None) == getattr(other[name], "dtype", None), name
            assert repr(one[name]) == repr(other[name])
            if isinstance(other[name], np.ndarray):
                assert other[name].flags.writeable


def test_a_shared_file_that_is_cut_is_made_again(tmp_path: Path, place: Path) -> None:
    folder = boards(tmp_path / "a", 6, 40, 20_000)
    whole = ids(dataset(folder))
    examples = iter(dataset(folder, cache_dir=str(place)))
    begun = [int(next(examples)["id"]) for _ in range(5)]
    assert files(place)
    for path in files(place):
        os.truncate(path, 100)
    assert begun + ids(examples) == whole


def test_tokens_are_mapped_where_they_lie(tmp_path: Path, place: Path) -> None:
    made_dataset(tmp_path / "d", shards=3)
    kept = [(e["tokens"].tolist(), e["text"]) for e in dataset(str(tmp_path / "d"))]
    assert any(tokens for tokens, _ in kept)
    found = dataset(str(tmp_path / "d"), columns=["tokens"], max_memory_gb=1e-9)
    found._rss_at_start = 1 << 60
    assert [e["tokens"].tolist() for e in found] == [tokens for tokens, _ in kept]
    loader = DataLoader(
        dataset(str(tmp_path / "d"), columns=["tokens", "text"]), batch_size=None, num_workers=2
    )
    assert sorted((e["tokens"].tolist(), e["text"]) for e in loader) == sorted(kept)
    examples = iter(dataset(str(tmp_path / "d"), columns=["tokens"]))
    next(examples)
    for path in (tmp_path / "d").glob("*.tokens.arrow"):
        os.truncate(path, 0)
    with pytest.raises(ShardMismatch, match=r"tokens\.arrow"):
        list(examples)


HOLDER = """
import sys
import pyarrow as pa
from penstock.supply.run_folder import SharedFiles

made = []
def write(file):
    made.append(1)
    schema = pa.schema([("a", pa.int64())])
    with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1, 2, 3])], schema=schema))

held = SharedFiles("run", sys.argv[1]).fetch("key", write)
print(len(made), held.data.size, flush=True)
sys.stdin.readline()
"""


def arrow(file: Any) -> None:
    schema = pa.schema([("a", pa.int64())])
    with pa.ipc.new_file(pa.PythonFile(file, "w"), schema) as writer:
        writer.write_batch(pa.record_batch([pa.array([1, 2, 3])], schema=schema))


def test_the_last_who_uses_a_file_removes_it(tmp_path: Path, place: Path) -> None:
    def wrong(file: Any) -> None:
        raise AssertionError("it is there")

    mine = SharedFiles("run", str(place)).fetch("key", arrow)
    assert mine is not None
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline().split()[0] == b"0"
        del mine
        assert len(files(place)) == 1  # the other one uses it
        again = SharedFiles("run", str(place)).fetch("key", wrong)
        process.kill()
    assert again is not None
    twice = SharedFiles("run", str(place)).fetch("key", wrong)
    del again
    assert len(files(place)) == 1
    del twice
    assert files(place) == []


def test_whoever_makes_a_file_and_is_frozen_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "WAIT_S", 0.05)
    code = HOLDER.replace("made.append(1)", "print('makes', flush=True); sys.stdin.readline()")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"makes\n"
        assert SharedFiles("run", str(place)).fetch("key", arrow) is None
        process.kill()
    assert SharedFiles("run", str(place)).fetch("key", arrow) is not None


def test_threads_of_a_process_share_a_file(place: Path) -> None:
    shared, found = SharedFiles("run", str(place)), []
    threads = [
        threading.Thread(target=lambda: found.append(shared.fetch("key", arrow))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is not None for one in found)
    found.pop()
    assert len(files(place)) == 1
    found.clear()
    assert files(place) == []


def test_ranks_of_a_launch_share_decoded_shards(tmp_path: Path, place: Path) -> None:
    folder = made_folder(tmp_path / "a")
    both = [dataset(folder, rank=rank, world_size=2, batch_size=4) for rank in range(2)]
    streams = [iter(one) for one in both]
    taken = [[int(next(stream)["id"]) for _ in range(4)] for stream in streams]
    assert len(runs(place)) == 1
    taken = [one + ids(stream) for one, stream in zip(taken, streams, strict=True)]
    assert sorted(taken[0] + taken[1]) == list(range(240))
    state = json.loads(json.dumps(both[0].state_dict()))
    assert state["share"]["world_size"] == 2
