"""What a resume depends on beside the rows: the ledger, decisions, shards that are still needed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock import PlanConfig, PretrainDataLoader
from penstock.errors import BadConfig, ShardMismatch
from penstock.store.record import Op, Retire
from penstock.supply.agree import Agreement
from penstock.supply.ranks import find_rank
from penstock.supply.release import needed_from
from penstock.tokenize.token_file import Tokens

from .datasets import GrowingDataset, made_documents
from .memory_source import MemorySource
from .nested import nested

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    pool = draw(st.sampled_from([1, 4, 30, 200]))
    return {
        "seed": draw(st.integers(0, 1000)),
        "shards": draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)),
        "rows": draw(st.integers(1, 20)),
        "steps": draw(st.integers(0, 40)),
        "options": {
            "pack": draw(st.sampled_from(["pad", "concat", "bestfit"])),
            "plan": PlanConfig(
                pool_size=pool,
                refill_threshold=draw(st.integers(0, pool - 1)),
                buffer_pieces=draw(st.sampled_from([1, 6, 100])),
            ),
            "epochs": draw(st.integers(1, 3)),
            "chunk_size": draw(st.sampled_from([5, 48])),
            "batch_size": draw(st.sampled_from([1, 2, 7])),
            "last": draw(st.sampled_from(["pad", "drop"])),
        },
    }


class Watched(MemorySource):
    """Notes the shards of which somebody wants lengths or tokens."""

    def __init__(self, name: str, shards: list[list[list[int]]]) -> None:
        super().__init__(name, shards, None, [1])
        self.wanted: set[int] = set()

    def _read_lengths(self, shard: int) -> Any:
        self.wanted.add(shard)
        return super()._read_lengths(shard)

    def decode(self, shard: int) -> Tokens:
        self.wanted.add(shard)
        return super().decode(shard)


def opened(case: dict[str, Any]) -> tuple[list[Watched], PretrainDataLoader]:
    random = np.random.default_rng(case["seed"])
    sources = [
        Watched(f"s{k}", [made_documents(random, case["rows"], first=50 * n) for n in range(count)])
        for k, count in enumerate(case["shards"])
    ]
    found = PretrainDataLoader(
        {source.name: source for source in sources}, **nested(**case["options"])
    )
    return sources, found


def handed_out(found: PretrainDataLoader) -> list[dict[str, Any]]:
    """The ledger but for what was read ahead: a loader that has just resumed has read less."""
    lines = [dataclasses.asdict(line) for line in found.ledger()]
    ahead = ("documents", "read", "waiting")
    return [{name: line[name] for name in line if name not in ahead} for line in lines]


@PROPERTY
@given(cases())
def test_a_resumed_loader_has_the_ledger_that_was_saved(case: dict[str, Any]) -> None:
    _, found = opened(case)
    with found:
        for _, _batch in zip(range(case["steps"]), found, strict=False):
            pass
        state = json.loads(json.dumps(found.state_dict()))
        before = handed_out(found)
    _, again = opened(case)
    with again:
        again.load_state_dict(state)
        assert handed_out(again) == before
        assert again.step == found.step


@PROPERTY
@given(cases())
def test_a_resume_wants_no_shard_before_those_that_are_needed(case: dict[str, Any]) -> None:
    _, found = opened(case)
    with found:
        batches = iter(found)
        for _, _batch in zip(range(case["steps"]), batches, strict=False):
            pass
        state = json.loads(json.dumps(found.state_dict()))
        assume(not state["over"])  # else all shards are needed for the next round
        rest = [batch.input_ids.tobytes() for batch in batches]
    epochs = [case["options"]["epochs"]] * len(case["shards"])
    needed = needed_from(state["plan"], epochs, "wait")
    sources, again = opened(case)
    with again:
        again.load_state_dict(state)
        assert [batch.input_ids.tobytes() for batch in again] == rest
    for source, first in zip(sources, needed, strict=True):
        assert not source.wanted or (first is not None and min(source.wanted) >= first)


class Behind(MemorySource):
    """A source of which one shard is there, until the others are let in."""

    def __init__(self, name: str, shards: list[list[list[int]]]) -> None:
        super().__init__(name, shards, 1, [1])

    def _refresh(self) -> None:
        """Nothing comes by itself."""

    def let_in(self) -> None:
        self._arrived, self._sealed = len(self._shards), True
        self._list()


@pytest.mark.parametrize("behind", ["reweight", "repeat"])
@pytest.mark.parametrize("steps", range(0, 160, 20))
def test_a_resume_decides_as_it_was_decided(behind: str, steps: int) -> None:
    """Shards that were not there when the rows were planned may be there when they are again."""

    def opened() -> tuple[list[Behind], PretrainDataLoader]:
        sources = [
            Behind(
                f"s{k}",
                [made_documents(np.random.default_rng(k), 30, first=50 * n) for n in range(4)],
            )
            for k in range(2)
        ]
        plan = PlanConfig(
            behind=behind, rest_samples=20, pool_size=30, refill_threshold=10, ramp=False
        )
        found = PretrainDataLoader(
            {source.name: source for source in sources},
            chunk_size=20,
            batch_size=1,
            pack="pad",
            plan=plan,
            weights=[1.0, 3.0],
        )
        return sources, found

    sources, found = opened()
    sources[0].let_in()
    with found:
        for _ in range(steps):
            found.get_batch(1)
        state = json.loads(json.dumps(found.state_dict()))
        planned = len(found._engine._streams[0].rest().fills)
        rest = [found.get_batch(1).input_ids.tobytes() for _ in range(planned)]
    sources, again = opened()
    for source in sources:
        source.let_in()
    with again:
        again.load_state_dict(state)
        # what the saved loader had planned is planned again, whatever has come since
        found_again = [again.get_batch(1).input_ids.tobytes() for _ in range(planned)]
    assert found_again == rest[:planned]


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rank_that_asks_decides_for_all(tmp_path: Path, first: bool) -> None:
    ranks = [Agreement("reweight", str(tmp_path), 3) for _ in range(3)]
    for number in range(3):
        answers = [ranks[0].decide(1, number, first)]
        answers += [rank.decide(1, number, not first) for rank in (*ranks[1:], ranks[0])]
        assert answers == [first] * 4
    # a state has the answers from the next question on, and they are believed
    alone = Agreement("reweight", None, 1)
    for number in range(4):
        alone.decide(0, number, first)
    again = Agreement("reweight", None, 1)
    again.restore(alone.state([2]))
    assert [again.decide(0, number, not first) for number in (2, 3)] == [first] * 2
    assert alone.state([2]) == [[0, 2, int(first)], [0, 3, int(first)]]


class Lying(MemorySource):
    """Says that each document has a token more than it has."""

    def _read_lengths(self, shard: int) -> Any:
        return super()._read_lengths(shard) + np.int32(1)


def test_a_document_that_lacks_one_token_is_an_error() -> None:
    source = Lying("a", [[[1, 2, 3], [4, 5]]], None, [1])
    with (
        PretrainDataLoader({"a": source}, chunk_size=8, batch_size=1) as found,
        pytest.raises(ShardMismatch),
    ):
        list(found)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0), (3, 1)])
def test_a_rank_that_cannot_be(rank: int, world_size: int) -> None:
    with pytest.raises(BadConfig, match=f"rank {rank} of {world_size} cannot be"):
        find_rank(rank, world_size)


def test_a_shard_that_is_taken_out_of_a_growing_dataset_is_noticed(tmp_path: Path) -> None:
    """A later one must not be trained on under its number."""
    dataset = GrowingDataset(tmp_path / "d")
    for k in range(3):
        dataset.add([[k] * 9] * 8)
    found = PretrainDataLoader(
        dataset.url, **nested(chunk_size=8, batch_size=1, pack="pad", stall_s=5)
    )
    found.get_batch(1)
    first, second, third = dataset._log.state.split("train")
    tokens = dataset._log.state.split("tokens")[0]
    ops: list[Op] = []
    for file, name in ((first, "shard_00009.parquet"), (tokens, "shard_00009.tokens.arrow")):
        data = (tmp_path / "d" / file.name).read_bytes()
        (tmp_path / "d" / name).write_bytes(data)
        ops += [Retire(file.name), msgspec.structs.replace(file, name=name)]
    dataset._log.commit(ops)
    assert dataset._log.state.split("train")[:2] == [second, third]
    with pytest.raises(ShardMismatch, match=f"{first.name} was taken out of the dataset"):
        list(found)
