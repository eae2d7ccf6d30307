"""Same stream: any arrival of shards, any ranks, any stops give the batches of the finished data.

Documents and conversations make the same journeys, and documents make them in lanes. make check:
500 random ones of documents, 500 in 1 to 64 lanes, 100 of conversations, none of them much longer
than the largest pool. make faults: 20,000, 20,000 and 10,000, of any length.
"""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import ConversationDataLoader, PlanConfig, PretrainDataLoader
from penstock.supply.batch import RowBatch
from penstock.supply.pretrain import RowLoader
from penstock.tokenize.tokenizer import Tokenizer

from .datasets import made_documents
from .memory_source import ChatSource, MemorySource
from .nested import nested

SOURCE = 8000
"""Tokens of source k are numbers from k times this on."""
MOST_PIECES = 700
"""The largest pool is 500 and must be refilled; one journey in five would have 1,000 to 14,000."""
MOST_IN_LANES = 300
"""Each lane has a pool of its own: those of 1, 4 and 30 are refilled."""


class Documents:
    """Journeys of pretraining."""

    kind: type[MemorySource] = MemorySource
    packs: tuple[str, ...] = "pad", "concat", "bestfit"
    longs: tuple[str, ...] = "split", "crop", "drop"

    def fit(self, document: list[int], length: int) -> list[int]:
        """A document as a row of `length` tokens may get it."""
        return document

    def open(self, sources: dict[str, MemorySource], **options: Any) -> RowLoader:
        return PretrainDataLoader(sources, **nested(**options))

    def check(self, parts: list[RowBatch]) -> None:
        """What a batch says beside its tokens, as all ranks have it."""


class Conversations(Documents):
    """The same of conversations: none is longer than a row, and none is cut."""

    kind = ChatSource
    packs = "pad", "bestfit"
    longs = "split", "drop"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def fit(self, document: list[int], length: int) -> list[int]:
        return (document * 2)[: max(2, min(len(document), length))]

    def open(self, sources: dict[str, MemorySource], **options: Any) -> RowLoader:
        length = options.pop("chunk_size")
        return ConversationDataLoader(sources, self._tokenizer, length, **nested(**options))

    def check(self, parts: list[RowBatch]) -> None:
        trained = sum(int((part.labels != -100).sum()) for part in parts)
        assert {part.num_loss_tokens for part in parts} == {trained}
        for part in parts:
            targets = (part.labels != -100).sum(1)
            assert ((targets > 0) == (part.fills > 0)).all(), "a row that is no padding has some"


@st.composite
def journeys(draw: st.DrawFn, face: type[Documents]) -> dict[str, Any]:
    """A mixture, how its shards arrive at each rank, and where the run stops, on which ranks."""
    count = draw(st.integers(1, 4))
    pool = draw(st.sampled_from([1, 4, 30, 500]))
    return {
        "seed": draw(st.integers(0, 1_000_000)),
        "shards": [draw(st.integers(0 if k else 1, 6)) for k in range(count)],
        "rows": draw(st.integers(1, 30)),
        "mean": draw(st.sampled_from([1, 10, 60])),
        "weights": [draw(st.sampled_from([0.05, 1.0, 2.5])) for _ in range(count)],
        "schedule": draw(st.booleans()),
        "change": draw(st.one_of(st.none(), st.integers(0, 8))),
        "plan": PlanConfig(
            pool_size=pool,
            refill_threshold=draw(st.integers(0, pool - 1)),
            pool_tokens=draw(st.sampled_from([50, 1 << 29])),
            buffer_pieces=draw(st.sampled_from([1, 6, 100])),
            weigh=draw(st.sampled_from(["samples", "tokens"])),
            long=draw(st.sampled_from(face.longs)),
            ramp=draw(st.booleans()),
        ),
        "pack": draw(st.sampled_from(face.packs)),
        "epochs": draw(st.integers(1, 3)),
        "rounds": draw(st.sampled_from([1, 1, 2])),
        "chunk_size": draw(st.sampled_from([5, 48, 130])),
        "global_batch_size": draw(st.sampled_from([8, 12])),
        "stops": draw(st.lists(st.integers(0, 7), max_size=5)),
        "worlds": draw(st.lists(st.sampled_from([1, 2, 3, 8]), min_size=6, max_size=6)),
        "patience": draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)),
    }


@st.composite
def in_lanes(draw: st.DrawFn) -> dict[str, Any]:
    """The same where the plan is cut into lanes: every source has a shard for each."""
    case = draw(journeys(Documents))
    lanes = draw(st.sampled_from([1, 2, 2, 3, 3, 4, 4, 64, 5, 6, 7, 16, 12, 8, 8]))
    sources = min(len(case["shards"]), 2 if lanes > 8 else 4)
    rows = [size for size in (8, 12, 16, 64) if size >= lanes]
    return {
        **case,
        "plan": replace(case["plan"], lanes=lanes),
        "shards": [lanes + draw(st.integers(0, 6)) for _ in range(sources)],
        "weights": case["weights"][:sources],
        "rows": min(case["rows"], 30 if lanes < 8 else 3),
        "global_batch_size": draw(st.sampled_from(rows)),
    }


def shorter(case: dict[str, Any]) -> dict[str, Any]:
    """The same journey with fewer rows in a shard; in 64 lanes, which are slow, of one source."""
    many = case["plan"].lanes > 16
    sources, rounds = (1, 1) if many else (len(case["shards"]), case["rounds"])
    shards = case["shards"][:sources]
    pieces = max(1, case["mean"] // case["chunk_size"]) * case["epochs"] * rounds
    most = MOST_PIECES if case["plan"].lanes == 1 else MOST_IN_LANES
    rows = min(case["rows"], max(1, most // (pieces * sum(shards))))
    changed = {"weights": case["weights"][:sources], "rounds": rounds, "rows": rows}
    return {**case, "shards": shards, **changed}


def check_journey(case: dict[str, Any], face: Documents) -> None:
    random = np.random.default_rng(case["seed"])
    contents = [
        [
            [
                face.fit(document, case["chunk_size"])
                for document in made_documents(
                    random, case["rows"], case["mean"], first=SOURCE * s + 40 * k
                )
            ]
            for k in range(shards)
        ]
        for s, shards in enumerate(case["shards"])
    ]
    count = len(contents)
    options: dict[str, Any] = {
        name: case[name] for name in ("plan", "pack", "epochs", "chunk_size", "global_batch_size")
    }
    options |= {"weights": case["weights"], "seed": case["seed"] % 7}
    if case["schedule"]:
        options["weight_schedule"] = {3: [1.0] * count, 9: case["weights"][::-1]}

    def open_loader(rank: int, world: int, *, live: bool) -> RowLoader:
        sources = {
            f"s{k}": face.kind(
                f"s{k}",
                shards,
                (rank + k) % 3 if live else None,
                case["patience"][rank % 2 :] or [1],
            )
            for k, shards in enumerate(contents)
        }
        return face.open(sources, rank=rank, world_size=world, **options)

    def step(ranks: list[Any], done: int) -> None:
        if done == case["change"]:
            for rank in ranks:
                rank.change_weights([float(k + 1) for k in range(count)])

    whole: list[Any] = []
    with open_loader(0, 1, live=False) as finished:
        for _ in range(case["rounds"]):
            iterator = iter(finished)
            while True:
                step([finished], len(whole))
                batch = next(iterator, None)
                if batch is None:
                    break
                face.check([batch])
                whole.append((batch.input_ids, batch.labels))
        totals = [(line.read, line.trained, line.cropped) for line in finished.ledger()]

    found: list[Any] = []
    targets = np.zeros(count, np.int64)
    state: dict[str, Any] | None = None
    changed, rounds = False, case["rounds"]
    for stop, world in zip([*case["stops"], None], case["worlds"], strict=False):
        ranks = [open_loader(r, world, live=True) for r in range(world)]
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        iterators = [iter(rank) for rank in ranks]
        while stop is None or stop > 0:
            if not changed:
                step(ranks, len(found))
                changed = len(found) == case["change"]
            parts = [next(one, None) for one in iterators]
            if parts[0] is None:
                assert parts == [None] * world
                rounds -= 1
                if not rounds:
                    break
                iterators = [iter(rank) for rank in ranks]
                continue
            given_out = [part for part in parts if part is not None]
            assert len(given_out) == world
            face.check(given_out)
            ids = np.concatenate([part.input_ids for part in given_out])
            labels = np.concatenate([part.labels for part in given_out])
            found.append((ids, labels))
            targets += np.bincount(labels[labels != -100] // SOURCE, minlength=count)
            stop = None if stop is None else stop - 1
        ledgers = [rank.ledger() for rank in ranks]
        for lines in ledgers:
            for line in lines:
                used = line.trained + line.context
                assert line.read == used + line.cropped + line.skipped + line.waiting
            assert [line.trained for line in lines] == targets.tolist()
        state = json.loads(json.dumps(ranks[case["seed"] % world].state_dict()))
        for rank in ranks:
            rank.close()
        if not rounds:
            break
    assert len(found) == len(whole)
    for (ids, labels), (true_ids, true_labels) in zip(found, whole, strict=True):
        assert (ids == true_ids).all()
        assert (labels == true_labels).all()
    assert [(line.read, line.trained, line.cropped) for line in ledgers[0]] == totals


SLOW = list(HealthCheck)
# Hypothesis's own choices repeat one case five times with a choice or two changed: of 200 cases 35
# had a seed of their own, with random choices 193. What fails is made smaller all the same.
DISTINCT = settings(
    max_examples=100, deadline=None, suppress_health_check=SLOW, backend="hypothesis-urandom"
)


@pytest.mark.parametrize("part", range(5))
@DISTINCT
@given(case=journeys(Documents).map(shorter))
def test_500_journeys(part: int, case: dict[str, Any]) -> None:
    check_journey(case, Documents())


@pytest.mark.parametrize("part", range(5))
@DISTINCT
@given(case=in_lanes().map(shorter))
def test_500_journeys_in_lanes(part: int, case: dict[str, Any]) -> None:
    check_journey(case, Documents())


@DISTINCT
@given(case=journeys(Conversations).map(shorter))
def test_100_journeys_of_conversations(chat_tokenizer: Tokenizer, case: dict[str, Any]) -> None:
    check_journey(case, Conversations(chat_tokenizer))


def check_many(face: Documents, cases: st.SearchStrategy[dict[str, Any]] | None = None) -> None:
    """A thousand of them, of any length."""

    @settings(DISTINCT, max_examples=1000, database=None)
    @given(journeys(type(face)) if cases is None else cases)
    def journey(case: dict[str, Any]) -> None:
        check_journey(case, face)

    journey()


@pytest.mark.faults
@pytest.mark.parametrize("part", range(20))
def test_20_000_journeys(part: int) -> None:
    check_many(Documents())


@pytest.mark.faults
@pytest.mark.parametrize("part", range(20))
def test_20_000_journeys_in_lanes(part: int) -> None:
    check_many(Documents(), in_lanes())


@pytest.mark.faults
@pytest.mark.parametrize("part", range(10))
def test_10_000_journeys_of_conversations(part: int, chat_tokenizer: Tokenizer) -> None:
    check_many(Conversations(chat_tokenizer))
