"""Epochs as loops write them, how many batches they have, and how they begin."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import PretrainDataLoader
from penstock.errors import BadConfig, ProducerStalled, StateMismatch
from penstock.supply.run_file import explain_choices, read_run

from .datasets import GrowingDataset, made_dataset, made_documents
from .memory_source import MemorySource
from .nested import nested


def loader(path: Any, **options: Any) -> PretrainDataLoader:
    return PretrainDataLoader(path, **nested(**{"chunk_size": 64, "batch_size": 4, **options}))


def stream(found: PretrainDataLoader) -> list[bytes]:
    return [batch.input_ids.tobytes() for batch in found]


# A second pass


def test_a_loop_over_epochs_gives_each_its_batches(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    found = loader(str(tmp_path / "d"), pack="pad")
    epochs = [[np.sort(batch.input_ids[:, 0]) for batch in found] for _ in range(3)]
    assert len({len(epoch) for epoch in epochs}) == 1
    rows = [np.sort(np.concatenate(epoch)).tolist() for epoch in epochs]
    assert rows[0] == rows[1] == rows[2]
    found.reset()
    again = [stream(found) for _ in range(3)]
    assert again[0] != again[1] != again[2]
    assert found.step == 3 * len(epochs[0])
    whole = stream(loader(str(tmp_path / "d"), pack="pad", batch_size=1, epochs=3))
    by_rounds = loader(str(tmp_path / "d"), pack="pad", batch_size=1)
    assert stream(by_rounds) + stream(by_rounds) + stream(by_rounds) == whole


def test_a_state_knows_which_epoch_it_is_of(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d")
    found = loader(str(tmp_path / "d"))
    each = len(stream(found))
    whole = [*stream(found), *stream(found)]
    for batches in (0, 1, each - 1, each, each + 2, 2 * each):
        found.reset()
        stream(found)
        begun: list[bytes] = []
        while len(begun) < batches:
            for batch in found:
                begun.append(batch.input_ids.tobytes())
                if len(begun) == batches:
                    break
        again = loader(str(tmp_path / "d"))
        again.load_state_dict(json.loads(json.dumps(found.state_dict())))
        rest = stream(again)
        if len(begun + rest) <= each:
            rest += stream(again)
        assert begun + rest == whole[: len(begun + rest)]


def test_an_iterator_that_was_there_before_the_end_begins_no_epoch(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=1, rows=20)
    found = loader(str(tmp_path / "d"))
    late = iter(found)
    assert stream(found)
    assert list(late) == []
    assert stream(found)


# How many there are


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_the_number_of_batches_is_that_of_the_batches_that_come(data: st.DataObject) -> None:
    draw = data.draw
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    pool = draw(st.sampled_from([1, 30, 500]))
    sources = {
        f"s{k}": MemorySource(
            f"s{k}",
            [
                made_documents(random, draw(st.integers(1, 20)), first=40 * n)
                for n in range(draw(st.integers(1, 4)))
            ],
            None,
            [1],
        )
        for k in range(draw(st.integers(1, 3)))
    }
    found = loader(
        sources,
        pack=draw(st.sampled_from(["pad", "concat", "bestfit"])),
        long=draw(st.sampled_from(["split", "crop", "drop"])),
        last=draw(st.sampled_from(["pad", "drop"])),
        epochs=draw(st.integers(1, 2)),
        pool_size=pool,
        ramp=draw(st.booleans()),
        weights=[draw(st.sampled_from([0.2, 1.0])) for _ in sources],
        chunk_size=draw(st.sampled_from([5, 48])),
        batch_size=draw(st.sampled_from([1, 2, 7])),
    )
    with found:
        batches = iter(found)
        begun = list(itertools.islice(batches, draw(st.integers(0, 5))))
        known = found.get_num_batches()
        assert isinstance(known, int)
        assert known.final
        assert known == len(begun) + len(list(batches))
        for _ in range(2):  # in another order other documents share rows
            known = found.get_num_batches()
            assert known.final
            assert known == len(list(found))


def test_of_growing_data_what_is_known_is_counted(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "d")
    random = np.random.default_rng(0)
    growing.add(made_documents(random, 30))
    with loader(growing.url, batch_size=1) as found:
        first = found.get_num_batches()
        assert not first.final
        assert repr(first) == f"{int(first)} so far"
        growing.add(made_documents(random, 30, first=30))
        growing.seal()
        batches = len(list(found))
        assert found.get_num_batches() == batches > first > 0
        assert found.get_num_batches().final
    with loader(growing.url, batch_size=1, epochs=None, ramp=True) as endless:
        assert endless.get_num_batches() == batches
        assert not endless.get_num_batches().final


def test_a_wait_says_what_is_held_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    growing = GrowingDataset(tmp_path / "d")
    for shard in range(3):
        growing.add(made_documents(np.random.default_rng(shard), 30, first=30 * shard))
    found = loader(growing.url, pack="pad", batch_size=1, stall_s=0.2)
    with found, caplog.at_level("INFO"), pytest.raises(ProducerStalled):
        stream(found)
    (line,) = [record.message for record in caplog.records if "waiting for shard" in record.message]
    assert line == (
        "d: waiting for shard 3; 12 samples of earlier ones stay in the pool to be mixed with it "
        "(a smaller pool_size holds back fewer)"
    )


# How the first one begins


def test_finished_data_is_mixed_from_the_first_batch_on(tmp_path: Path) -> None:
    made_dataset(tmp_path / "d", shards=8, rows=50)
    found = loader(str(tmp_path / "d"), pack="pad", batch_size=50)
    for _ in range(2):
        for batch in found:
            assert len(np.unique(batch.segments[:, 3])) >= 6
    assert found.state_dict()["config"]["ramp"] is False


def test_growing_data_begins_with_its_first_shard(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "d")
    random = np.random.default_rng(0)
    growing.add(made_documents(random, 30))
    found = loader(growing.url, pack="pad", batch_size=5)
    first = next(iter(found)).input_ids.tobytes()
    state = json.loads(json.dumps(found.state_dict()))
    assert state["config"]["ramp"] is True
    for shard in range(1, 6):
        growing.add(made_documents(random, 30, first=30 * shard))
    growing.seal()
    live = [first, *stream(found)]
    assert live == stream(loader(growing.url, pack="pad", batch_size=5, ramp=True))
    assert live != stream(loader(growing.url, pack="pad", batch_size=5))
    later = loader(growing.url, pack="pad", batch_size=5)  # it would choose otherwise by now
    later.load_state_dict(state)
    assert [first, *stream(later)] == live
    told = loader(growing.url, pack="pad", batch_size=5, ramp=False)
    with pytest.raises(StateMismatch, match="ramp: the state has True, this loader False"):
        told.load_state_dict(state)


def test_ranks_that_look_at_different_moments_begin_alike(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "d")
    growing.add(made_documents(np.random.default_rng(0), 30))
    options: dict[str, Any] = {"world_size": 2, "run_dir": str(tmp_path / "run")}
    early = loader(growing.url, rank=0, **options)
    with pytest.raises(BadConfig, match="ramp is not given for 2 ranks") as caught:
        loader(growing.url, rank=0, world_size=2)
    assert "ramp=True" in caught.value.do
    assert "base_train.py: --plan ramp=true" in caught.value.do
    growing.seal()
    late = loader(growing.url, rank=1, **options)
    assert (early.config.ramp, late.config.ramp) == (True, True)
    assert loader(growing.url, rank=1, world_size=2).config.ramp is False


def test_a_run_file_remembers_how_the_run_began(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "d")
    growing.add(made_documents(np.random.default_rng(0), 30))
    run = tmp_path / "run.toml"
    run.write_text('[loader]\npath = "d"\nchunk_size = 64\nbatch_size = 4\n')
    assert "not chosen yet" in explain_choices(run)
    with PretrainDataLoader(**read_run(run)) as found:
        state = found.state_dict()
    growing.seal()
    assert explain_choices(run) == "ramp: yes, from the first shard on"
    with PretrainDataLoader(**read_run(run)) as found:
        assert found.config.ramp is True
    record = run.with_suffix(".choices")
    record.write_text("{}")
    with pytest.raises(StateMismatch, match="is not the record of a run"):
        PretrainDataLoader(**read_run(run))
    record.unlink()
    with PretrainDataLoader(**read_run(run, state=state)) as found:
        assert found.config.ramp is True
    with PretrainDataLoader(**read_run(run)) as found:
        assert found.config.ramp is False


RANK = """
import sys, torch.distributed as dist
from penstock import PretrainDataLoader
store, rank, url = sys.argv[1], int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if rank == 1:
    open(store + ".wait", "w").close()
    sys.stdin.readline()  # until the dataset is sealed
print(PretrainDataLoader(url, chunk_size=64, batch_size=4).config.ramp, flush=True)
sys.stdin.readline()
dist.destroy_process_group()
"""


@pytest.mark.torch
def test_ranks_of_torch_ask_each_other(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "d")
    growing.add(made_documents(np.random.default_rng(0), 30))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), growing.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None
        assert ranks[1].stdout is not None
        assert ranks[0].stdout.readline() == "True\n"
        growing.seal()
        assert ranks[1].stdin is not None
        ranks[1].stdin.write("\n")
        ranks[1].stdin.flush()
        assert ranks[1].stdout.readline() == "True\n"
        for rank in ranks:
            rank.communicate("\n", timeout=30)
    finally:
        for rank in ranks:
            rank.kill()
