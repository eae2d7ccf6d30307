"""The torch dataset of mixed shards: each example once, whoever reads; exact from any state on."""

import itertools
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from penstock import StreamingMixedShardDataset
from penstock.errors import (
    BadConfig,
    MemoryLimit,
    NoDataset,
    ProducerStalled,
    ShardMismatch,
    StateMismatch,
)

from .datasets import GrowingDataset, made_dataset, made_documents
from .nested import nested

# two cores are enough for what is shown here
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SMALL = {"pool_size": 90, "refill_threshold": 60}


def write_shard(folder: Path, shard: int, table: pa.Table) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"shard_{shard:05d}.parquet")


def made_folder(folder: Path, shards: int = 6, rows: int = 40, first: int = 0) -> str:
    """A plain directory whose examples have numbers."""
    for k in range(shards):
        numbers = np.arange(first + k * rows, first + (k + 1) * rows)
        write_shard(folder, k, pa.table({"id": numbers, "text": [f"é{n}" for n in numbers]}))
    (folder / "_COMPLETE").touch()
    return str(folder)


def dataset(folders: Any, ranges: Any = None, **options: Any) -> StreamingMixedShardDataset:
    folders = [folders] if isinstance(folders, str) else folders
    options = {**SMALL, "random_seed": 3, **options}
    factor = options.pop("augmentation_factor", None)
    found = StreamingMixedShardDataset(
        folders, ranges or ["all"] * len(folders), **nested(mixed=True, **options)
    )
    found.augmentation_factor = factor
    return found


def ids(found: Any) -> list[int]:
    return [int(example["id"]) for example in found]


def test_every_example_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    found = ids(dataset(str(tmp_path / "a")))
    assert sorted(found) == list(range(240))
    assert found != sorted(found)
    example = next(iter(dataset(str(tmp_path / "a"))))
    assert example["text"] == f"é{example['id']}"
    assert isinstance(example["id"], np.int64)


@pytest.mark.parametrize(
    ("workers", "method"),
    [
        *((0, None), (1, "fork"), (2, "fork"), (4, "fork"), (2, "spawn")),
        pytest.param(4, "spawn", marks=pytest.mark.faults),  # each imports torch: 4 s of CPU
    ],
)
def test_workers_share_the_stream(tmp_path: Path, workers: int, method: str | None) -> None:
    made_folder(tmp_path / "a")
    made_dataset(tmp_path / "b", shards=3)
    found = dataset([str(tmp_path / "a"), str(tmp_path / "b")], columns=["text"])
    alone = [example["text"] for example in found]
    loader: Any = DataLoader(
        found, batch_size=7, num_workers=workers, collate_fn=list, multiprocessing_context=method
    )  # fmt: skip
    texts = [example["text"] for batch in loader for example in batch]
    assert len(texts) == 240 + 120
    assert Counter(texts) == Counter(alone)


@pytest.mark.parametrize("workers", [1, 3])
def test_with_batch_size_batches_do_not_depend_on_workers(tmp_path: Path, workers: int) -> None:
    made_folder(tmp_path / "a", shards=5, rows=42)

    def batches(workers: int, **options: Any) -> list[list[int]]:
        found = dataset(str(tmp_path / "a"), batch_size=7, **options)
        return [ids(b) for b in loaded(found, workers)]

    def loaded(found: StreamingMixedShardDataset, workers: int) -> Any:
        return DataLoader(found, batch_size=7, num_workers=workers, collate_fn=list)

    alone = batches(0)
    assert batches(workers) == alone
    found = dataset(str(tmp_path / "a"), batch_size=7)
    before = [ids(b) for b, _ in zip(loaded(found, workers), range(11), strict=False)]
    state = json.loads(json.dumps(found.state_dict(batches=11)))
    again = dataset(str(tmp_path / "a"), batch_size=7)
    again.load_state_dict(state)
    loader = loaded(again, workers)
    assert before + [ids(b) for b in loader] == alone
    # the state was for one iteration: the next is a whole pass again
    assert [ids(b) for b in loader] == alone
    # a state of that one counts on from where it began
    third = dataset(str(tmp_path / "a"), batch_size=7)
    third.load_state_dict(state)
    third.load_state_dict(third.state_dict(batches=4))
    assert ids(third) == [n for batch in alone[15:] for n in batch]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_ranks_share_the_stream(tmp_path: Path, world: int, batch_size: int | None) -> None:
    made_folder(tmp_path / "a", shards=7, rows=33)
    whole = ids(dataset(str(tmp_path / "a")))
    size = batch_size or 1
    parts = [
        ids(dataset(str(tmp_path / "a"), rank=r, world_size=world, batch_size=batch_size))
        for r in range(world)
    ]
    rebuilt = []
    for k in range(0, len(whole), size):
        rank, turn = (k // size) % world, k // size // world
        rebuilt += parts[rank][turn * size : (turn + 1) * size]
    assert rebuilt == whole
    even = [
        ids(dataset(str(tmp_path / "a"), rank=r, world_size=world, last="drop"))
        for r in range(world)
    ]
    assert {len(part) for part in even} == {len(whole) // world}


def test_workers_of_ranks_share_the_stream(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    found: list[int] = []
    for rank in range(2):
        part = dataset(str(tmp_path / "a"), rank=rank, world_size=2)
        loader: Any = DataLoader(part, batch_size=5, num_workers=2)
        found += [n for batch in loader for n in batch["id"].tolist()]
    assert sorted(found) == list(range(240))


def test_the_mixture_holds_for_any_stretch(tmp_path: Path) -> None:
    folders = [made_folder(tmp_path / "a", 6, 100), made_folder(tmp_path / "b", 6, 100, 1000)]
    found = np.array(ids(dataset(folders, ["0-3", "0-1"]))) >= 1000
    assert len(found) == 600
    for k in range(len(found) - 60):  # weights are the shards of the ranges: 2 to 1
        assert abs(found[k : k + 60].sum() - 20) <= 2
    given = dataset(folders, weights={"a": 1.0, "b": 3.0})
    found = np.array(ids(given))[:600] >= 1000
    assert abs(found.mean() - 0.75) < 0.01


def test_rows_of_numbers_are_arrays(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    boards = random.integers(0, 13, (90, 64)).astype(np.int8)
    planes = random.standard_normal((90, 3, 8, 8)).astype(np.float32)
    moves = [random.integers(0, 4000, int(n)).astype(np.uint16) for n in random.integers(0, 30, 90)]

    def nested(values: Any, kind: pa.DataType, sizes: Sequence[int]) -> pa.Array:
        array = pa.array(values.reshape(-1), kind)
        for size in reversed(sizes):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array

    for k in range(3):
        part = slice(30 * k, 30 * k + 30)
        table = pa.table(
            {
                "id": pa.array(range(30 * k, 30 * k + 30), pa.int32()),
                "board": nested(boards[part], pa.int8(), [64]),
                "planes": nested(planes[part], pa.float32(), [3, 8, 8]),
                "square": pa.array([b.reshape(8, 8).tolist() for b in boards[part]]),
                "moves": pa.array(moves[part], pa.list_(pa.uint16())),
                "won": pa.array([n % 2 == 0 for n in range(30)]),
                "score": pa.array([None if n == 7 else n / 2 for n in range(30)]),
                "tags": pa.array([["a", "é" * n] for n in range(30)]),
                "about": pa.array([{"elo": n, "name": str(n)} for n in range(30)]),
                "raw": pa.array([bytes([n]) for n in range(30)], pa.binary()),
                "opening": pa.array([f"o{n % 3}" for n in range(30)]).dictionary_encode(),
                "ragged": pa.array([[[1]] * (n % 3) + [[2, 3]] for n in range(30)]),
            }
        )
        write_shard(tmp_path / "a", k, table)
    found = list(dataset(str(tmp_path / "a"), streaming=False))
    assert len(found) == 90
    for example in found:
        n = int(example["id"])
        m = n % 30
        assert (example["board"] == boards[n]).all()
        assert example["board"].dtype == np.int8
        assert example["planes"].shape == (3, 8, 8)
        assert (example["planes"] == planes[n]).all()
        assert (example["square"] == boards[n].reshape(8, 8)).all()
        assert (example["moves"] == moves[n]).all()
        assert example["moves"].dtype == np.uint16
        assert bool(example["won"]) is (n % 2 == 0)
        assert example["score"] == (None if m == 7 else m / 2)
        assert example["tags"] == ["a", "é" * m]
        assert example["about"] == {"elo": m, "name": str(m)}
        assert example["raw"] == bytes([m])
        assert example["opening"] == f"o{m % 3}"
        assert [list(part) for part in example["ragged"]] == [[1]] * (m % 3) + [[2, 3]]
        example["board"][:] = 99  # an example is its taker's own
    loader: Any = DataLoader(
        dataset(str(tmp_path / "a"), streaming=False, columns=["board", "planes"]), batch_size=30
    )
    assert [batch["planes"].shape for batch in loader] == [(30, 3, 8, 8)] * 3
    assert (np.stack([e["board"] for e in found]) == 99).all()


def test_workers_of_a_process_that_reads_itself(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    found = dataset(str(tmp_path / "a"))
    examples = iter(found)
    begun = [int(next(examples)["id"]) for _ in range(50)]
    loader: Any = DataLoader(found, batch_size=4, num_workers=2)
    assert sorted(n for batch in loader for n in batch["id"].tolist()) == list(range(240))
    assert sorted(begun + ids(examples)) == list(range(240))


def test_a_growing_dataset_gives_the_stream_of_the_finished_one(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    contents = [made_documents(random, 30, first=100 * k) for k in range(9)]
    live, done = GrowingDataset(tmp_path / "live"), GrowingDataset(tmp_path / "done")
    for documents in contents:
        done.add(documents)
    done.seal()
    made_folder(tmp_path / "a", shards=4)

    def stream(url: str) -> Any:
        found = dataset([url, str(tmp_path / "a")], weights=[2.0, 1.0], columns=["text"], ramp=True)
        return (example["text"] for example in found)

    live.add(contents[0])
    first = stream(live.url)
    begun = [next(first) for _ in range(10)]

    def write() -> None:
        for documents in contents[1:]:
            live.add(documents)
        live.seal()

    writer = threading.Thread(target=write)
    writer.start()
    assert begun + list(first) == list(stream(done.url))
    writer.join()


@pytest.mark.parametrize("factor", [1, 3])
def test_a_chain_of_resumes_is_one_stream(tmp_path: Path, factor: int) -> None:
    folders = [made_folder(tmp_path / "a"), made_folder(tmp_path / "b", 3, 40, 1000)]

    def augment(example: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"id": example["id"] * 10 + k} for k in range(factor)]

    options: dict[str, Any] = {"augment": augment, "augmentation_factor": factor}
    whole = ids(dataset(folders, **options))
    assert len(set(whole)) == 360 * factor
    found: list[int] = []
    state = None
    for stop in (0, 1, 50, 7, 200, 5, 10_000):
        part = dataset(folders, **options)
        if state is not None:
            part.load_state_dict(state)
        found += ids(itertools.islice(part, stop))
        state = json.loads(json.dumps(part.state_dict()))
    assert found == whole


@pytest.mark.parametrize("factor", [1, 3])
def test_resumed_at_every_example(tmp_path: Path, factor: int) -> None:
    folders = [made_folder(tmp_path / "a", 4, 6), made_folder(tmp_path / "b", 2, 6, 1000)]

    def augment(example: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"id": example["id"] * 10 + k} for k in range(factor)]

    options: dict[str, Any] = {"augment": augment, "pool_size": 15, "refill_threshold": 10}
    whole = ids(dataset(folders, **options))
    state = dataset(folders, **options).state_dict()
    assert len(json.dumps(state)) < 10_000
    for n in range(len(whole)):
        part = dataset(folders, **options)
        part.load_state_dict(json.loads(json.dumps(state)))
        assert int(next(iter(part))["id"]) == whole[n]
        state = part.state_dict()
        if n % 17 == 0:
            rest = dataset(folders, **options)
            rest.load_state_dict(state)
            assert ids(rest) == whole[n + 1 :]
    last = dataset(folders, **options)
    last.load_state_dict(state)
    assert ids(last) == []
    assert ids(last) == whole


def test_other_ranks_go_on(tmp_path: Path) -> None:
    made_folder(tmp_path / "a", shards=7, rows=33)
    whole = ids(dataset(str(tmp_path / "a")))
    found: list[int] = []
    state = None
    for world, steps in ((1, 10), (2, 13), (8, 5), (3, 11), (1, 1000)):
        ranks = [dataset(str(tmp_path / "a"), rank=r, world_size=world) for r in range(world)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        streams = [iter(rank) for rank in ranks]
        for _ in range(steps):
            found += ids(example for s in streams if (example := next(s, None)) is not None)
        states = [rank.state_dict() for rank in ranks]
        assert len({json.dumps(one) for one in states}) == 1
        state = json.loads(json.dumps(states[0]))
    assert found == whole


@st.composite
def journeys(draw: st.DrawFn) -> dict[str, Any]:
    """A mixture, and where it is stopped, on which ranks."""
    count = draw(st.integers(1, 3))
    return {
        "shards": [draw(st.integers(1, 5)) for _ in range(count)],
        "rows": [draw(st.integers(1, 30)) for _ in range(count)],
        "pool": draw(st.sampled_from([2, 9, 40, 500])),
        "batch_size": draw(st.sampled_from([1, 3, 8])),
        "epochs": draw(st.integers(1, 2)),
        "seed": draw(st.integers(0, 99)),
        "stops": draw(st.lists(st.integers(0, 9), min_size=1, max_size=4)),
        "worlds": draw(st.lists(st.sampled_from([1, 2, 3]), min_size=5, max_size=5)),
        "limit": draw(st.sampled_from([None, 7, 50])),
    }


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(journeys())
def test_a_journey_is_one_stream(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]
) -> None:
    home = tmp_path_factory.mktemp("journey")
    folders = [
        made_folder(home / str(k), shards, rows, 1000 * k)
        for k, (shards, rows) in enumerate(zip(case["shards"], case["rows"], strict=True))
    ]
    options: dict[str, Any] = {
        "pool_size": case["pool"], "refill_threshold": case["pool"] * 3 // 4,
        "random_seed": case["seed"], "epochs": case["epochs"],
        "max_examples_unaugmented": case["limit"],
    }  # fmt: skip
    whole = ids(dataset(folders, **options))
    sizes = zip(case["shards"], case["rows"], strict=True)
    total = case["epochs"] * sum(shards * rows for shards, rows in sizes)
    assert len(whole) == min(total, case["limit"] or total)
    if case["limit"] is None:
        assert set(Counter(whole).values()) == {case["epochs"]}
    size = case["batch_size"]
    found: list[int] = []
    state = None
    for steps, world in zip([*case["stops"], 10_000], case["worlds"], strict=False):
        ranks = [
            dataset(folders, rank=r, world_size=world, batch_size=size, **options)
            for r in range(world)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        streams = [iter(rank) for rank in ranks]
        for _ in range(steps):
            parts = [ids(itertools.islice(stream, size)) for stream in streams]
            found += [n for part in parts for n in part]
            if not all(len(part) == size for part in parts):
                break
        else:
            state = json.loads(json.dumps(ranks[-1].state_dict()))
            continue
        break
    assert found == whole


def test_workers_have_states_of_their_own(tmp_path: Path) -> None:
    """What torchdata's StatefulDataLoader does: states are taken and loaded inside of workers."""
    made_folder(tmp_path / "a")
    loader: Any = DataLoader(Saving(str(tmp_path / "a")), batch_size=None, num_workers=2)
    taken, states = [], {}
    for k, (worker, n, state) in enumerate(loader):
        taken.append(n)
        states[worker] = state
        if k == 20:
            break
    rest: Any = DataLoader(Saving(str(tmp_path / "a"), states), batch_size=None, num_workers=2)
    assert sorted(taken + [n for _, n, _ in rest]) == list(range(240))
    alone = dataset(str(tmp_path / "a"))
    alone.load_state_dict(json.loads(states[0]))
    with pytest.raises(StateMismatch, match=r"workers: the state has 2, this 1") as caught:
        iter(alone)
    assert caught.value.do


class Saving(StreamingMixedShardDataset):
    """Gives its state with every example."""

    def __init__(self, folder: str, states: dict[int, str] | None = None) -> None:
        super().__init__([folder], ["all"], **SMALL, random_seed=3)  # type: ignore[arg-type]
        self.states = states or {}

    def __iter__(self) -> Any:
        from torch.utils.data import get_worker_info

        worker = get_worker_info().id  # type: ignore[union-attr]
        if self.states:
            self.load_state_dict(json.loads(self.states[worker]))
        for example in super().__iter__():
            yield worker, int(example["id"]), json.dumps(self.state_dict())


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    folders = [made_folder(tmp_path / "a"), made_folder(tmp_path / "b", 3)]
    first = dataset(folders)
    next(iter(first))
    state = first.state_dict()
    for options, words in (
        ({"random_seed": 4}, "random_seed: the state has 3, this dataset 4"),
        ({"pool_size": 91}, "pool_size: the state has 90, this dataset 91"),
        ({"weights": [1.0, 1.0]}, r"weights: the state has \[6.0, 3.0\], this dataset"),
        ({"ranges": ["0-5", "all"]}, "shard_ranges: the state has all, this 0-5"),
    ):
        with pytest.raises(StateMismatch, match=words):
            dataset(folders, **options).load_state_dict(state)
    with pytest.raises(StateMismatch, match="data_dirs: the state has 2, this dataset 1"):
        dataset(folders[0]).load_state_dict(state)
    with pytest.raises(StateMismatch, match="of format None"):
        dataset(folders).load_state_dict({})
    with pytest.raises(BadConfig, match="batches of this dataset cannot be counted"):
        dataset(folders).state_dict(batches=3)


class Mirrored(StreamingMixedShardDataset):
    """Every example twice, the second time with a dice."""

    def augment(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        return [example, {**example, "dice": int(self.rng().integers(1_000_000))}]


def test_augmentation_is_counted_and_repeatable(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    options: dict[str, Any] = {**SMALL, "random_seed": 3}
    found = Mirrored([str(tmp_path / "a")], ["all"], **options)
    whole = list(found)
    assert (found.num_taken, found.num_given) == (240, 480)
    assert Counter(ids(whole)) == dict.fromkeys(range(240), 2)
    dice = [example["dice"] for example in whole if "dice" in example]
    assert len(set(dice)) > 230
    assert list(found) == whole
    found.set_epoch(1)
    assert {e["dice"] for e in found if "dice" in e} != set(dice)
    plain = Mirrored([str(tmp_path / "a")], ["all"], enable_augmentation=False, **options)
    assert len(list(plain)) == 240
    none = dataset(str(tmp_path / "a"), augment=lambda example: [])
    assert list(none) == []
    assert (none.num_taken, none.num_given) == (240, 0)
    with pytest.raises(BadConfig, match="augment gave 1 examples") as caught:
        list(dataset(str(tmp_path / "a"), augment=lambda e: [e], augmentation_factor=2))
    assert "row" in caught.value.where
    with pytest.raises(ZeroDivisionError) as failed:
        list(dataset(str(tmp_path / "a"), augment=lambda e: [1 // 0]))
    assert "in augment, source" in failed.value.__notes__[0]


def test_at_most_so_many_are_taken(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    whole = ids(dataset(str(tmp_path / "a")))
    assert ids(dataset(str(tmp_path / "a"), max_examples_unaugmented=100)) == whole[:100]
    assert ids(dataset(str(tmp_path / "a"), max_examples_unaugmented=0)) == []
    twice = dataset(str(tmp_path / "a"), max_examples_unaugmented=9, augment=lambda e: [e, e])
    assert ids(twice) == [n for n in whole[:9] for _ in range(2)]
    loader: Any = DataLoader(
        dataset(str(tmp_path / "a"), max_examples_unaugmented=101), num_workers=2, batch_size=4
    )
    assert sorted(n for b in loader for n in b["id"].tolist()) == sorted(whole[:101])


def test_memory_is_limited_and_the_state_survives(tmp_path: Path) -> None:
    made_folder(tmp_path / "a", shards=12, rows=400)
    options: dict[str, Any] = {"pool_size": 2000, "refill_threshold": 1500, "ramp": True}
    whole = ids(dataset(str(tmp_path / "a"), **options))
    tight = dataset(str(tmp_path / "a"), max_memory_gb=28e-6, **options)
    tight._rss_at_start = 1 << 60  # of the process itself another test speaks
    found: list[int] = []
    with pytest.raises(MemoryLimit, match="the examples of the window take") as caught:  # noqa: PT012
        for example in tight:
            found.append(int(example["id"]))
    assert "shard" in caught.value.where
    assert "max_memory_gb" in caught.value.do
    assert 400 <= len(found) < len(whole)
    wide = dataset(str(tmp_path / "a"), **options)
    wide.load_state_dict(json.loads(json.dumps(tight.state_dict())))
    assert found + ids(wide) == whole


def test_a_worker_that_is_stopped_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)  # others may write there: nothing is shared
    util.get_temp_dir()  # sockets of workers are there, under a name of 108 letters at most
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "open"))
    made_folder(tmp_path / "a", shards=12, rows=400)
    options: dict[str, Any] = {"pool_size": 2000, "refill_threshold": 1500, "batch_size": 10}
    whole = ids(dataset(str(tmp_path / "a"), **options))
    tight = dataset(str(tmp_path / "a"), max_memory_gb=50e-6, **options)
    found: list[int] = []
    loader: Any = DataLoader(Wide(tight), batch_size=10, num_workers=2)
    with pytest.raises(MemoryLimit, match=r"all 2 workers together 0\.000 GB"):  # noqa: PT012
        for batch in loader:
            found += batch["id"].tolist()
    assert found == whole[: len(found)]
    wide = dataset(str(tmp_path / "a"), **options)
    wide.load_state_dict(tight.state_dict(batches=len(found) // 10))
    assert found + ids(wide) == whole


class Wide(IterableDataset[dict[str, Any]]):
    """A dataset in a process whose own memory does not count."""

    def __init__(self, inner: StreamingMixedShardDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        self.inner._process, self.inner._rss_at_start = os.getpid(), 1 << 60
        return iter(self.inner)


def test_the_process_is_looked_at(tmp_path: Path) -> None:
    made_folder(tmp_path / "a", shards=12)
    whole = ids(dataset(str(tmp_path / "a")))
    tight = dataset(str(tmp_path / "a"), max_memory_gb=1.0)
    examples = iter(tight)
    found = [int(next(examples)["id"]) for _ in range(20)]
    tight._rss_at_start = -(1 << 40)  # as if the process had grown
    with pytest.raises(MemoryLimit, match=r"the process has grown by 1\d\d\d\.\d+ GB"):  # noqa: PT012
        for example in examples:
            found.append(int(example["id"]))
    state = tight.state_dict()
    tight._rss_at_start = 0
    tight.load_state_dict(state)
    assert found + ids(tight) == whole


RLIMIT = """
import json, resource, sys
import numpy as np, psutil
from penstock import DocumentConfig, StreamingMixedShardDataset
from penstock.errors import MemoryLimit

found = StreamingMixedShardDataset([sys.argv[1]], ["all"], 4_000, 3_000, random_seed=3,
                                   documents=DocumentConfig(columns=["id", "board"]))
taken = 0
examples = iter(found)
next(examples)
limit = psutil.Process().memory_info().vms + 150_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    for example in examples:
        taken += 1
except MemoryLimit as error:
    assert "the state can be saved and resumed" in error.do, error
    print(json.dumps([taken + 1, found.state_dict()]))
"""


def test_under_a_limit_of_the_system_it_stops_and_can_go_on(tmp_path: Path) -> None:
    board = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(500 * 10_000, np.int32)), 10_000)
    for k in range(20):
        write_shard(tmp_path / "a", k, pa.table({"id": np.arange(500) + 500 * k, "board": board}))
    (tmp_path / "a" / "_COMPLETE").touch()
    done = subprocess.run(
        [sys.executable, "-c", RLIMIT, str(tmp_path / "a")],
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},  # others reserve by the GB
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    taken, state = json.loads(done.stdout)
    options: dict[str, Any] = {"pool_size": 4_000, "refill_threshold": 3_000, "columns": ["id"]}
    rest = dataset(str(tmp_path / "a"), **options)
    rest.load_state_dict(state)
    whole = ids(dataset(str(tmp_path / "a"), **options))
    assert 0 < taken < len(whole)
    assert ids(rest) == whole[taken:]


def test_verbose_says_where_examples_come_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folders = [made_folder(tmp_path / "a"), made_folder(tmp_path / "b", 3, 40, 1000)]
    with caplog.at_level(logging.INFO):
        list(dataset(folders, verbose=True))
    lines = [record.getMessage() for record in caplog.records]
    assert "random_seed is 3" in lines[0]
    told = [line for line in lines if line.startswith("refill")]
    assert len(told) > 3
    assert re.search(r"\n  a +[\d,]+ examples, .*its weight 66.7%", told[2])
    assert re.search(r"shards in the pool.*s to read, .*s to decode, .*s waited", told[2])
    with caplog.at_level(logging.INFO):
        caplog.clear()
        list(dataset(folders))
    assert not caplog.records


def test_the_seed_is_drawn_once_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made_folder(tmp_path / "a")
    with caplog.at_level(logging.INFO):
        drawn = dataset(str(tmp_path / "a"), random_seed=None)
    assert f"random_seed is {drawn.random_seed} (drawn" in caplog.text
    assert f"random_seed {drawn.random_seed}" in repr(drawn)
    whole = ids(drawn)
    assert ids(drawn) == whole
    assert ids(dataset(str(tmp_path / "a"), random_seed=drawn.random_seed)) == whole
    other = dataset(str(tmp_path / "a"), random_seed=None)
    assert ids(other) != whole
    examples = iter(drawn)
    begun = [int(next(examples)["id"]) for _ in range(30)]
    other.load_state_dict(drawn.state_dict())
    assert begun + ids(other) == whole
    loader: Any = DataLoader(drawn, batch_size=4, num_workers=2)
    assert sorted(n for b in loader for n in b["id"].tolist()) == list(range(240))
    with pytest.raises(BadConfig, match="no random_seed for 2 ranks"):
        dataset(str(tmp_path / "a"), random_seed=None, rank=0, world_size=2)


def test_epochs_have_orders_of_their_own(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    found = dataset(str(tmp_path / "a"))
    orders = []
    for epoch in range(3):
        found.set_epoch(epoch)
        orders.append(ids(found))
        assert sorted(orders[-1]) == list(range(240))
    assert len({tuple(order) for order in orders}) == 3
    found.set_epoch(1)
    assert ids(found) == orders[1]
    examples = iter(found)
    begun = [int(next(examples)["id"]) for _ in range(100)]
    again = dataset(str(tmp_path / "a"))
    again.load_state_dict(found.state_dict())
    assert again.epoch == 1
    again.set_epoch(1)  # what a training loop does after it has resumed
    assert begun + ids(again) == orders[1]
    again.load_state_dict(found.state_dict())
    again.set_epoch(2)
    assert ids(again) == orders[2]
    with pytest.raises(BadConfig, match="epoch is -1"):
        found.set_epoch(-1)
    assert sorted(ids(dataset(str(tmp_path / "a"), epochs=2))) == sorted(list(range(240)) * 2)


def test_workers_that_stay_see_the_epoch(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    found = dataset(str(tmp_path / "a"))
    loader: Any = DataLoader(found, batch_size=4, num_workers=2, persistent_workers=True)
    passes = []
    for epoch in (0, 1, 0):
        found.set_epoch(epoch)
        passes.append([n for batch in loader for n in batch["id"].tolist()])
        assert sorted(passes[-1]) == list(range(240))
    assert passes[0] == passes[2] != passes[1]


def test_shards_that_differ_are_named(tmp_path: Path) -> None:
    made_folder(tmp_path / "a", shards=2)
    write_shard(tmp_path / "a", 2, pa.table({"id": ["x"] * 5, "text": ["y"] * 5}))
    with pytest.raises(ShardMismatch, match="shards differ in their columns") as caught:
        list(dataset(str(tmp_path / "a")))
    assert "id: str; source" in caught.value.why or "id: int64; source" in caught.value.why
    assert "shard_0000" in caught.value.where
    assert len(list(dataset(str(tmp_path / "a"), columns=["text"]))) == 85
    with pytest.raises(ShardMismatch, match="has no column 'nope'"):
        list(dataset(str(tmp_path / "a"), columns=["nope"]))
    made_folder(tmp_path / "b", shards=1)
    write_shard(tmp_path / "c", 0, pa.table({"id": [1], "board": [[1, 2]]}))
    with pytest.raises(ShardMismatch, match=r"no such column|not there"):
        list(dataset([str(tmp_path / "b"), str(tmp_path / "c")], streaming=False))
    for column, words in (
        (pa.array([1, 2], pa.time32("s")), r"column 'x' is of type time32\[ms\]"),
        (pa.array([[1], [2, None]]), "a null inside a list of column 'x'"),
    ):
        folder = tmp_path / f"wrong {words[:5]}"
        write_shard(folder, 0, pa.table({"x": column}))
        with pytest.raises(ShardMismatch, match=words) as wrong:
            list(dataset(str(folder), streaming=False))
        assert "shard_00000.parquet" in wrong.value.where
    assert "row 1" in wrong.value.where
    text = pa.StringArray.from_buffers(
        1, pa.py_buffer(np.array([0, 1], np.int32)), pa.py_buffer(b"\xff")
    )
    write_shard(tmp_path / "text", 0, pa.table({"x": text}))
    with pytest.raises(ShardMismatch, match="a text is not UTF-8") as caught:
        list(dataset(str(tmp_path / "text"), streaming=False))
    assert "row 0" in caught.value.where


def test_damaged_shards_are_named(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    path = tmp_path / "d" / "shard_00001.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ShardMismatch, match=r"shard_00001.parquet is not what was written"):
        list(dataset(str(tmp_path / "d"), columns=["text"]))


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    made_folder(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "x.jsonl").write_text("{}\n")
    growing = GrowingDataset(tmp_path / "live")
    a, live = str(tmp_path / "a"), growing.url
    for folders, options, words in (
        (a, {"ranges": ["0-99"]}, "goes beyond the directory"),
        (a, {"ranges": ["5-2"]}, "goes backwards"),
        (a, {"ranges": ["all", "all"]}, "2 shard_ranges for 1 sources"),
        (a, {"weights": {"x": 1.0}}, "there is no source 'x'"),
        (a, {"weights": [0.0]}, "all weights are 0"),
        ([a, a], {}, "a source is given twice"),
        ([a, live], {}, "needs a weight"),
        (live, {"streaming": False}, "is not sealed"),
        (a, {"pool_size": 10}, "refill_threshold is 60, pool_size 10"),
        (a, {"batch_size": 0}, "batch_size is 0"),
        (a, {"augmentation_factor": 0}, "augmentation_factor is 0"),
        (a, {"max_examples_unaugmented": -1}, "max_examples_unaugmented is -1"),
        (a, {"max_memory_gb": 0}, "max_memory_gb is 0"),
        (a, {"rank": 1}, "give both"),
        (str(tmp_path / "x.jsonl"), {}, "is a file, not a directory"),
    ):
        with pytest.raises(BadConfig) as caught:
            list(dataset(folders, **options))
        assert words in str(caught.value)
    with pytest.raises(NoDataset, match="nothing to train on"):
        dataset(str(tmp_path / "empty"), streaming=False)
    with pytest.raises(ProducerStalled, match="has been silent for"):
        list(dataset(live, stall_s=0.1))


def test_without_torch_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["torch"] = None
try:
    from penstock import StreamingMixedShardDataset
except Exception as error:
    assert type(error).__name__ == "BadConfig", type(error)
    assert "penstock[torch]" in str(error)
else:
    raise SystemExit("imported")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_public_names_come_without_torch_but_for_its_datasets() -> None:
    code = """
import sys
sys.modules["torch"] = None
from penstock import *
import penstock
left = {*penstock._HOMES} - {*globals()}
assert left == {"StreamingMixedShardDataset", "TorchDataset"}, left
for name in left:
    try:
        getattr(penstock, name)
    except Exception as error:
        assert "penstock[torch]" in str(error), error
    else:
        raise SystemExit(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ranges_of_one_directory_share_no_shard(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "a")
    assert sorted(ids(dataset([folder, folder], ["0-3", "4-5"]))) == list(range(240))
    with pytest.raises(BadConfig, match="'0-3' and '2-5' overlap"):
        dataset([folder, folder], ["0-3", "2-5"])
    with pytest.raises(BadConfig, match="a range is text"):
        dataset(folder, [(0, 3)])
