"""The loader: the same stream live or finished, on any ranks, from any state on."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import PlanConfig, PretrainDataLoader, TrainingBatch
from penstock.errors import (
    BadConfig,
    BadTokenizer,
    MemoryLimit,
    NoDataset,
    ProducerStalled,
    ShardMismatch,
    StateMismatch,
)
from penstock.supply.host import HostCache
from penstock.supply.settings import with_checksum

from .datasets import GrowingDataset, made_dataset, made_documents
from .nested import nested

SMALL = PlanConfig(pool_size=90, refill_threshold=60, buffer_pieces=8)


def loader(path: Any, **options: Any) -> PretrainDataLoader:
    options.setdefault("plan", SMALL)
    options.setdefault("chunk_size", 64)
    if "global_batch_size" not in options:
        options.setdefault("batch_size", 4)
    return PretrainDataLoader(path, **nested(**options))


def stream(found: PretrainDataLoader) -> list[bytes]:
    """Every batch to the end, as bytes."""
    with found:
        return [batch.input_ids.tobytes() + batch.labels.tobytes() for batch in found]


def test_a_batch(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=2, rows=20)
    with loader(str(tmp_path / "d")) as found:
        batch = next(iter(found))
    assert batch.input_ids.shape == (4, 64)
    assert batch.input_ids.dtype == np.int32
    assert batch.attention_mask is None
    ids, starts = batch.input_ids.reshape(-1), batch.cu_seqlens
    assert starts[0] == 0
    assert starts[-1] == 4 * 64
    for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert len(set(ids[a:b].tolist())) == 1  # a document's tokens are all the same here
        assert batch.position_ids.reshape(-1)[a:b].tolist() == list(range(b - a))
        assert batch.labels.reshape(-1)[a] == -100
    trained = batch.loss_mask
    assert (batch.labels[trained] == batch.input_ids[trained]).all()
    assert batch.max_seqlen == np.diff(starts).max()
    assert "4 x 64" in repr(batch)
    assert len(batch.input_ids) == 4


def test_padded_rows_have_a_mask(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=1, rows=20)
    with loader(str(tmp_path / "d"), pack="pad") as found:
        batch = next(iter(found))
    assert batch.attention_mask is not None
    assert (batch.attention_mask.sum(axis=1) == batch.fills).all()
    assert (batch.labels[batch.attention_mask == 0] == -100).all()


@pytest.mark.torch
def test_tensors_share_the_memory(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=1, rows=20)
    with loader(str(tmp_path / "d")) as found:
        batch = next(iter(found))
    tensors = batch.to("cpu")
    assert tensors.input_ids.data_ptr() == batch.input_ids.__array_interface__["data"][0]
    assert tensors.labels.shape == (4, 64)
    assert tensors.attention_mask is None


@pytest.mark.parametrize("pack", ["pad", "concat", "bestfit"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_together_give_the_stream_of_one(tmp_path: Path, pack: str, world: int) -> None:
    made_dataset(tmp_path / "d")
    options = {"pack": pack, "global_batch_size": 8}
    whole = [batch.input_ids for batch in loader(str(tmp_path / "d"), **options)]
    ranks = [
        [b.input_ids for b in loader(str(tmp_path / "d"), rank=r, world_size=world, **options)]
        for r in range(world)
    ]
    assert {len(batches) for batches in ranks} == {len(whole)}
    for k, batch in enumerate(whole):
        assert (np.concatenate([rank[k] for rank in ranks]) == batch).all()


@st.composite
def journeys(draw: st.DrawFn) -> dict[str, Any]:
    """A mixture, how its shards arrive, and where the run is stopped, on which ranks."""
    count = draw(st.integers(1, 3))
    return {
        "seed": draw(st.integers(0, 1000)),
        "shards": [draw(st.integers(1, 5)) for _ in range(count)],
        "rows": draw(st.integers(1, 25)),
        "weights": [draw(st.sampled_from([0.2, 1.0, 2.5])) for _ in range(count)],
        "pack": draw(st.sampled_from(["pad", "concat", "bestfit"])),
        "weigh": draw(st.sampled_from(["samples", "tokens"])),
        "epochs": draw(st.integers(1, 2)),
        "pool": draw(st.sampled_from([4, 30, 500])),
        "ramp": draw(st.booleans()),
        "stops": draw(st.lists(st.integers(0, 6), max_size=5)),
        "worlds": draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=6, max_size=6)),
        "arrivals": draw(st.lists(st.integers(0, 2), min_size=1, max_size=20)),
    }


def check_journey(folder: Path, case: dict[str, Any]) -> None:
    """Train on growing datasets, stopped and resumed on other ranks: the finished one's stream."""
    random = np.random.default_rng(case["seed"])
    contents = [
        [made_documents(random, case["rows"], first=100 * k) for k in range(shards)]
        for shards in case["shards"]
    ]
    growing = [GrowingDataset(folder / f"live{k}") for k in range(len(contents))]
    finished = [GrowingDataset(folder / f"done{k}") for k in range(len(contents))]
    for dataset, shards in zip(finished, contents, strict=True):
        for documents in shards:
            dataset.add(documents)
        dataset.seal()
    plan = PlanConfig(
        pool_size=case["pool"],
        refill_threshold=case["pool"] * 3 // 4,
        buffer_pieces=6,
        weigh=case["weigh"],
        ramp=case["ramp"],
    )
    options: dict[str, Any] = {
        "plan": plan, "pack": case["pack"], "epochs": case["epochs"], "weights": case["weights"],
        "global_batch_size": 8, "seed": case["seed"], "chunk_size": 48,
    }  # fmt: skip
    whole = [
        batch.input_ids
        for batch in loader({f"s{k}": d.url for k, d in enumerate(finished)}, **options)
    ]
    written = threading.Thread(target=write_all, args=(growing, contents, case["arrivals"]))
    written.start()
    names = {f"s{k}": dataset.url for k, dataset in enumerate(growing)}
    found: list[Any] = []
    state: dict[str, Any] | None = None
    for stop, world in zip([*case["stops"], None], case["worlds"], strict=False):
        ranks = [loader(names, rank=r, world_size=world, **options) for r in range(world)]
        iterators = [iter(rank) for rank in ranks]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        while stop is None or stop > 0:
            parts = [next(iterator, None) for iterator in iterators]
            if parts[0] is None:
                assert all(part is None for part in parts)
                break
            found.append(np.concatenate([part.input_ids for part in parts]))  # type: ignore[union-attr]
            stop = None if stop is None else stop - 1
        is_over = parts[0] is None if stop is None or stop > 0 else False
        # ranks may have planned ahead differently; the state of any of them will do
        assert len({tuple(line.trained for line in rank.ledger()) for rank in ranks}) == 1
        state = json.loads(json.dumps(ranks[case["seed"] % world].state_dict()))
        for line in ranks[0].ledger():
            used = line.trained + line.context
            assert line.read == used + line.cropped + line.skipped + line.waiting
        for rank in ranks:
            rank.close()
        if is_over:
            break
    written.join()
    assert len(found) == len(whole)
    assert all((a == b).all() for a, b in zip(found, whole, strict=True))


def write_all(growing: list[GrowingDataset], contents: list[Any], arrivals: list[int]) -> None:
    """Shards in an order and at times that the plan does not know."""
    left = [list(shards) for shards in contents]
    turn = 0
    while any(left):
        k = arrivals[turn % len(arrivals)] % len(left)
        turn += 1
        k = k if left[k] else next(n for n, shards in enumerate(left) if shards)
        growing[k].add(left[k].pop(0))
        time.sleep(0.001)
    for dataset in growing:
        dataset.seal()


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(journeys())
def test_a_journey_gives_the_stream_of_the_finished_dataset(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any]
) -> None:
    check_journey(tmp_path_factory.mktemp("journey"), case)


def test_every_document_once_and_the_ledger_balances(tmp_path: Path) -> None:
    made = made_dataset(tmp_path / "d", shards=5, rows=50)
    found = loader(str(tmp_path / "d"))
    seen = np.zeros(250, np.int64)
    places = labels = 0
    with found:
        for batch in found:
            labels += int((batch.labels != -100).sum())
            for fill, row in zip(batch.fills.tolist(), batch.input_ids, strict=True):
                seen += np.bincount(row[:fill], minlength=250)
            places += batch.input_ids.size
    sizes = [len(document) for shard in made.shards for document in shard]
    assert seen.tolist() == sizes
    (line,) = found.ledger()
    assert (line.documents, line.read, line.trained) == (250, sum(sizes), labels)
    assert line.read == line.trained + line.context
    assert line.trained + line.context + line.padded == places


@pytest.mark.parametrize("pack", ["pad", "concat", "bestfit"])
@pytest.mark.parametrize("last", ["pad", "drop"])
def test_trained_is_the_labels_that_count(tmp_path: Path, pack: str, last: str) -> None:
    """At every batch, whatever the packing; a row's first token of each document is context."""
    made_dataset(tmp_path / "d", shards=3, rows=40)
    options: dict[str, Any] = {"pack": pack, "last": last, "chunk_size": 16, "batch_size": 7}
    found = loader(str(tmp_path / "d"), **options)
    labels = segments = spans = 0
    with found:
        for batch in found:
            labels += int(batch.loss_mask.sum())
            segments += len(batch.segments)
            spans += sum(span.trained for span in found.explain(batch))
            (line,) = found.ledger()
            assert (line.trained, line.context) == (labels, segments)
            assert line.trained + line.context + line.padded == (batch.metadata["step"] + 1) * 112
    (line,) = found.ledger()
    assert (line.trained, line.context) == (labels, segments)
    assert spans == labels
    assert line.read == line.trained + line.context + line.cropped + line.skipped


@pytest.mark.parametrize("last", ["pad", "drop"])
def test_skipping_beyond_the_end_counts_the_batches_that_were_there(
    tmp_path: Path, last: str
) -> None:
    made_dataset(tmp_path / "d", shards=3, rows=40)
    read = loader(str(tmp_path / "d"), last=last, batch_size=7)
    count = len(stream(read))
    skipped = loader(str(tmp_path / "d"), last=last, batch_size=7)
    skipped.skip(count + 1000)
    assert skipped.step == count
    assert skipped.ledger() == read.ledger()
    assert next(iter(skipped), None) is None


def test_the_last_rows_can_be_dropped_and_are_counted(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=1, rows=50)
    rows = len(stream(loader(str(tmp_path / "d"), batch_size=1)))
    size = 7 if rows % 7 else 8
    full = stream(loader(str(tmp_path / "d"), batch_size=size))
    dropped = loader(str(tmp_path / "d"), batch_size=size, last="drop")
    assert stream(dropped) == full[:-1]
    (line,) = dropped.ledger()
    assert line.skipped > 0
    assert line.read == line.trained + line.context + line.skipped
    assert line.trained + line.context + line.padded == (len(full) - 1) * size * 64


def test_get_batch_takes_any_size(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    rows = np.concatenate([batch.input_ids for batch in loader(str(tmp_path / "d"), batch_size=1)])
    found = loader(str(tmp_path / "d"))
    at = 0
    for size in (3, 1, 7, 4, 4):
        assert (found.get_batch(size).input_ids == rows[at : at + size]).all()
        at += size
    known = found.get_num_batches()
    assert known.final
    assert known == -(-len(rows) // 4)
    found.reset()
    assert (found.get_batch(5).input_ids == rows[:5]).all()
    found.get_batch(len(rows))
    for _ in range(2):
        with pytest.raises(StopIteration) as ended:
            found.get_batch(1)
        assert str(ended.value) == (
            "no batch is left: epoch 0 has ended, 2 batches were handed out. Iterate over the "
            "loader for the next epoch, or call reset() for the first batch"
        )

    def careless() -> Iterator[TrainingBatch]:
        while True:
            yield found.get_batch(1)

    with pytest.raises(RuntimeError) as caught:  # it does not end in silence
        list(careless())
    assert str(caught.value.__cause__) == str(ended.value)
    assert (next(iter(found)).input_ids != rows[:4]).any()
    assert found.epoch == 1


def test_batches_are_skipped_without_their_tokens(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=60)
    whole = stream(loader(str(tmp_path / "d")))
    found = loader(str(tmp_path / "d"))
    found.skip(200)
    assert found.step == 200
    assert found._engine.window.peak_bytes == 0
    # lengths of shards that have left the pool are let go of
    assert len(found.sources[0]._lengths) < 45
    assert stream(found) == whole[200:]


def test_banned_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    made = made_dataset(tmp_path / "d", shards=2, rows=30)
    found = loader(str(tmp_path / "d"), ban=[3, 41])
    with found:
        seen = {int(k) for batch in found for k in np.unique(batch.input_ids)}
    assert 3 not in seen
    assert 41 not in seen
    (line,) = found.ledger()
    assert line.skipped_documents == 2
    assert line.skipped == len(made.shards[0][3]) + len(made.shards[1][11])


def test_a_change_of_weights_is_part_of_the_state(tmp_path: Path) -> None:
    names = {name: made_dataset(tmp_path / name, seed=k).url for k, name in enumerate("ab")}
    options: dict[str, Any] = {"weights": {"a": 1.0, "b": 1.0}}
    first = loader(names, **options)
    for _ in range(3):
        next(iter(first))
    first.change_weights({"a": 0.1, "b": 0.9})
    at_once = json.loads(json.dumps(first.state_dict()))
    fourth = next(iter(first)).input_ids
    state = json.loads(json.dumps(first.state_dict()))
    rest = stream(first)
    again = loader(names, **options)
    again.load_state_dict(state)
    assert stream(again) == rest
    again = loader(names, **options)
    again.load_state_dict(at_once)
    assert (next(iter(again)).input_ids == fourth).all()
    assert stream(again) == rest
    plain = loader(names, **options)
    assert stream(plain)[4:] != rest


def test_a_state_of_something_else_is_refused(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    made_dataset(tmp_path / "other", seed=1)
    first = loader(str(tmp_path / "d"))
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    for options, words in (
        ({"seed": 1}, "seed: the state has 0, this loader 1"),
        ({"pack": "pad"}, "pack: the state has 'bestfit', this loader 'pad'"),
        ({"weights": [2.0]}, r"weights: the state has \[1.0\], this loader \[2.0\]"),
        ({"ban": [7]}, r"ban: the state has \[\], this loader \[7\]"),
        (
            {"chunk_size": 32},
            r"tokens of a row \(chunk_size, .*\): the state has 64, this loader 32",
        ),
    ):
        with pytest.raises(StateMismatch, match=words):
            loader(str(tmp_path / "d"), **options).load_state_dict(state)
    with pytest.raises(StateMismatch, match="its checksum does not fit"):
        loader(str(tmp_path / "d")).load_state_dict({**state, "skip": state["skip"] + 1})
    wrong = with_checksum({**state, "sources": [{**state["sources"][0], "head": "0" * 64}]})
    with pytest.raises(StateMismatch, match="is not the one that the state saw"):
        loader(str(tmp_path / "d")).load_state_dict(wrong)
    wrong = with_checksum({**state, "sources": [{**state["sources"][0], "record": 999}]})
    with pytest.raises(StateMismatch, match="this log ends at"):
        loader(str(tmp_path / "d")).load_state_dict(wrong)
    with pytest.raises(StateMismatch, match="dataset id"):
        loader({"d": str(tmp_path / "other")}).load_state_dict(state)
    with pytest.raises(StateMismatch, match="of format 7"):
        loader(str(tmp_path / "d")).load_state_dict({**state, "format": 7})


@pytest.mark.parametrize("suffix", ["parquet", "tokens.arrow"])
def test_damaged_shards_are_named(tmp_path: Path, suffix: str) -> None:
    for name, harm, words in (
        ("corrupt", lambda path: flip(path), "is not what was written"),
        ("short", lambda path: path.write_bytes(path.read_bytes()[:-40]), "shard_00001"),
        ("gone", lambda path: path.unlink(), f"shard_00001.{suffix} is missing"),
    ):
        made_dataset(tmp_path / name, column=suffix == "parquet")
        harm(tmp_path / name / f"shard_00001.{suffix}")
        with pytest.raises(ShardMismatch, match=words) as caught:
            stream(loader(str(tmp_path / name)))
        assert caught.value.do


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", max_tokens=128)
    with pytest.raises(BadConfig, match="rows of 64 tokens from a dataset of chunks of 128") as e:
        loader(str(tmp_path / "d"))
    assert "base_train.py --max_seq_len 128" in e.value.do
    assert "penstock chunk --max_tokens 64" in e.value.do
    assert e.value.do.endswith("give documents=DocumentConfig(other_length=True) if this is meant")
    loader(str(tmp_path / "d"), other_length=True).close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(NoDataset, match="nothing to train on"):
        loader(str(tmp_path / "empty"), streaming=False)
    growing = GrowingDataset(tmp_path / "live")
    with pytest.raises(BadConfig, match="is not sealed") as e:
        loader(growing.url, streaming=False)
    assert f"penstock show {growing.url} says how far it is" in e.value.do
    assert "--streaming_data" in e.value.do
    with pytest.raises(BadConfig, match="needs a weight"):
        loader([growing.url, str(tmp_path / "d")], other_length=True)
    with pytest.raises(ProducerStalled, match="has been silent for"):
        next(iter(loader(growing.url, stall_s=0.1)))
    made_dataset(tmp_path / "e")
    for options, words in (
        ({"shard_ranges": "0-99"}, "goes beyond the dataset"),
        ({"rank": 3, "world_size": 2}, "rank 3 of 2"),
        ({"rank": 1}, "give both"),
        ({"last": "keep"}, "last is 'keep'"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"weights": {"x": 1.0}}, "there is no source 'x'"),
        ({"source_epochs": {"x": 1}}, "there is no source 'x'"),
        ({"shard_ranges": ["all", "all"]}, "2 shard_ranges for 1 sources"),
        ({"global_batch_size": 1, "rank": 0, "world_size": 2}, "at least one row"),
        (
            {"batch_size": 8, "global_batch_size": 8, "rank": 0, "world_size": 2},
            "batch_size is 8 and global_batch_size is 8\n"
            "  why:   2 ranks with 8 rows each have 16\n"
            "  do:    give one of the two; global_batch_size holds for any number of ranks",
        ),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 1 << 25}, "chunk_size is 33554432"),
    ):
        with pytest.raises(BadConfig) as caught:
            stream(loader(str(tmp_path / "e"), **options))
        assert words in str(caught.value)
    with pytest.raises(BadTokenizer):
        loader(str(tmp_path / "e"), tokenizer=7)


def test_memory_is_limited_and_the_state_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostCache, "_disk", lambda self: None)  # files of a host would be mapped
    made_dataset(tmp_path / "d", shards=8, column=True)  # token files would be mapped
    whole = stream(loader(str(tmp_path / "d")))
    tight = loader(str(tmp_path / "d"), max_memory_gb=8e-6)
    found = []
    taken = iter(tight)
    with pytest.raises(MemoryLimit, match="the tokens of the window take") as caught:  # noqa: PT012
        for batch in taken:
            found.append(batch.input_ids.tobytes() + batch.labels.tobytes())
    assert "max_memory_gb" in caught.value.do
    state = json.loads(json.dumps(tight.state_dict()))
    wide = loader(str(tmp_path / "d"))
    wide.load_state_dict(state)
    assert found + stream(wide) == whole
