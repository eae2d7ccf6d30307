"""Mixtures of loaders: each one's rows in its own order, in the shares that were asked for, on any
ranks, from wherever a run stopped."""

import json
import pickle
from collections import Counter
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import (
    ConversationDataLoader,
    DataLoader,
    DiffusionConfig,
    DocumentConfig,
    LoaderRun,
    MixedBatch,
    MixedDataLoader,
    PlanConfig,
    PretrainDataLoader,
    RolloutDataLoader,
    TrainingBatch,
)
from penstock.errors import BadConfig, StateMismatch
from penstock.tokenize.tokenizer import Tokenizer
from rollout.made import groups

from .datasets import made_dataset, made_documents
from .memory_source import ChatSource, MemorySource

LENGTH = 40
SLOW = list(HealthCheck)


def documents(
    seed: int, shards: int, first: int, rank: int = 0, world: int = 1, *, live: bool = False,
    pack: str = "bestfit", epochs: int | None = 1, kind: str = "text", tokenizer: Any = None,
) -> Any:  # fmt: skip
    """A loader over a source in memory; conversations where `kind` says so."""
    rng = np.random.default_rng([seed, first])
    content = [made_documents(rng, int(rng.integers(3, 20)), 12, first + 100 * k)
               for k in range(shards)]  # fmt: skip
    if kind == "chat":
        content = [[(row * 3)[: max(3, len(row) % LENGTH)] for row in rows] for rows in content]
    plan = PlanConfig(
        pool_size=30, refill_threshold=10, buffer_pieces=6, ramp=live or None, seed=seed % 5
    )  # fmt: skip
    made = ChatSource if kind == "chat" else MemorySource
    source = made("s", content, rank % 2 if live else None, [1 + rank % 2, 3])
    options: dict[str, Any] = {
        "global_batch_size": 6, "pack": pack, "epochs": epochs,
        "plan": plan, "run": LoaderRun(rank=rank, world_size=world),
    }  # fmt: skip
    if kind == "chat":
        return ConversationDataLoader({"s": source}, tokenizer, LENGTH, **options)
    return PretrainDataLoader({"s": source}, None, LENGTH, **options)


def rows_of(loader: Any) -> list[tuple[Any, Any]]:
    """All rows of a loader by itself, with their labels; without padded rows at the end."""
    with loader:
        return [
            (ids.tolist(), labels.tolist())
            for batch in loader
            for ids, labels, fill in zip(batch.input_ids, batch.labels, batch.fills, strict=True)
            if fill
        ]


def joined(parts: list[MixedBatch]) -> tuple[Any, ...]:
    """A batch of all ranks."""
    labels = np.concatenate([part.labels for part in parts])
    assert {part.num_loss_tokens for part in parts} == {int((labels != -100).sum())}
    assert {part.num_tokens for part in parts} == {sum(int(part.fills.sum()) for part in parts)}
    for part in parts:
        assert np.array_equal(part.loss_mask, part.labels != -100)
        assert part.position_ids.shape == part.input_ids.shape
    ids = np.concatenate([part.input_ids for part in parts])
    return ids.tolist(), labels.tolist(), parts[0].metadata["parts"]


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    return {
        "seed": draw(st.integers(0, 10**6)),
        "shards": [draw(st.integers(1, 4)) for _ in range(count)],
        "packs": [draw(st.sampled_from(["bestfit", "pad"])) for _ in range(count)],
        "kinds": [draw(st.sampled_from(["text", "chat"])) for _ in range(count)],
        "epochs": [draw(st.integers(1, 2)) for _ in range(count)],
        "weights": [draw(st.sampled_from([0.05, 1.0, 2.5])) for _ in range(count)],
        "unit": draw(st.sampled_from(["rows", "tokens"])),
        "stop": draw(st.sampled_from(["all", "first"])),
        "last": draw(st.sampled_from(["pad", "drop"])),
        "schedule": draw(st.sampled_from(["", "reversed", "one by one"])),
        "change": draw(st.one_of(st.none(), st.integers(0, 6))),
        "batch": draw(st.sampled_from([6, 7, 12])),
        "rounds": draw(st.sampled_from([1, 1, 2])),
        "stops": draw(st.lists(st.integers(0, 6), max_size=4)),
        "worlds": draw(st.lists(st.sampled_from([1, 2, 3, 6]), min_size=5, max_size=5)),
    }


def check_mixture(case: dict[str, Any], tokenizer: Tokenizer) -> None:
    count = len(case["shards"])

    def loader(k: int, rank: int = 0, world: int = 1, *, live: bool = False) -> Any:
        return documents(
            case["seed"], case["shards"][k], 1000 * k, rank, world, live=live,
            pack=case["packs"][k], epochs=case["epochs"][k], kind=case["kinds"][k],
            tokenizer=tokenizer,
        )  # fmt: skip

    weights, schedule = case["weights"], None
    if case["schedule"] == "reversed":
        schedule = {4: weights[::-1]}
    elif case["schedule"]:
        weights, *later = np.eye(count).tolist()
        schedule = {1000 * (k + 1): shares for k, shares in enumerate(later)}

    def mixture(rank: int = 0, world: int = 1, *, live: bool = False) -> MixedDataLoader:
        return MixedDataLoader(
            {f"l{k}": loader(k, rank, world, live=live) for k in range(count)},
            weights, case["unit"], schedule,
            case["stop"], global_batch_size=case["batch"], last=case["last"],
        )  # fmt: skip

    def step(ranks: list[Any], done: int) -> None:
        if done == case["change"]:
            for rank in ranks:
                rank.change_weights([float(k + 1) for k in range(count)])

    whole: list[Any] = []
    with mixture() as finished:
        sealed = finished.get_num_batches()
        for _ in range(case["rounds"]):
            iterator = iter(finished)
            while True:
                step([finished], len(whole))
                batch = next(iterator, None)
                if batch is None:
                    break
                whole.append(joined([batch]))  # type: ignore[list-item]
            if not _ and sealed.final and case["change"] is None:
                assert sealed == len(whole)
        ledger = finished.ledger()
        given = finished.given
    for line in ledger:
        used = line.trained + line.context
        assert line.read == used + line.cropped + line.skipped + line.waiting
    assert sum(one["rows"] for one in given.values()) == sum(
        part["rows"] for _, _, parts in whole for part in parts.values()
    )

    # every loader's rows, in its own order
    if case["rounds"] == 1:
        for k in range(count):
            mine = []
            for ids, labels, parts in whole:
                at = 0
                for name, part in parts.items():
                    rows = range(at, at + part["rows"])
                    mine += [(ids[r], labels[r]) for r in rows if name == f"l{k}"]
                    at += part["rows"]
            alone = rows_of(loader(k))
            assert mine == alone[: len(mine)]
            if case["stop"] == "all" and case["last"] == "pad":
                assert len(mine) == len(alone)

    found: list[Any] = []
    state: dict[str, Any] | None = None
    changed, rounds = False, case["rounds"]
    for stop, world in zip([*case["stops"], None], case["worlds"], strict=False):
        # a run that finds its sources unsealed ramps: states are of that choice
        ranks = [mixture(rank, world) for rank in range(world)]
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
            found.append(joined(parts))
            stop = None if stop is None else stop - 1
        state = json.loads(json.dumps(ranks[case["seed"] % world].state_dict()))
        for rank in ranks:
            rank.close()
        if not rounds:
            break
    assert found == whole


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(case=mixtures())
def test_journeys_of_mixtures(case: dict[str, Any], chat_tokenizer: Tokenizer) -> None:
    check_mixture(case, chat_tokenizer)


@pytest.mark.faults
@pytest.mark.parametrize("part", range(4))
@settings(max_examples=1000, deadline=None, suppress_health_check=SLOW, database=None)
@given(case=mixtures())
def test_4_000_journeys_of_mixtures(
    part: int, case: dict[str, Any], chat_tokenizer: Tokenizer
) -> None:
    check_mixture(case, chat_tokenizer)


@settings(max_examples=20, deadline=None, suppress_health_check=SLOW)
@given(seed=st.integers(0, 10**6), stop=st.integers(0, 9))
def test_data_that_grows_gives_the_batches_of_finished_data(seed: int, stop: int) -> None:
    def made(live: bool) -> MixedDataLoader:
        loaders = {}
        for name, first in (("a", 0), ("b", 5000)):
            one = documents(seed, 4, first, live=live)
            one._use_ramp(True)  # the choice of whoever began while it grew
            loaders[name] = one
        return MixedDataLoader(loaders, {"a": 2, "b": 1})

    def begun(loader: MixedDataLoader) -> MixedDataLoader:
        for one in loader._row_loaders:
            one._engine.mix = one._mix
            one._engine.begin()
        return loader

    with begun(made(False)) as finished, begun(made(True)) as live:
        whole = [joined([batch]) for batch in finished]  # type: ignore[list-item]
        found = [joined([next(live.get_iterator())]) for _ in range(min(stop, len(whole)))]  # type: ignore[list-item]
        if len(found) < len(whole):  # otherwise this would be the next epoch
            found += [joined([batch]) for batch in live]  # type: ignore[list-item]
    assert found == whole


# Shares


def endless(first: int, mean: int = 12, **options: Any) -> Any:
    rng = np.random.default_rng(first)
    content = [made_documents(rng, 40, mean, first + 50 * k) for k in range(4)]
    plan = PlanConfig(pool_size=60, buffer_pieces=16)
    source = MemorySource("s", content, None, [1])
    return PretrainDataLoader(
        {"s": source}, None, LENGTH, batch_size=8, epochs=None, plan=plan, **options
    )


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (0.7, 0.2, 0.1), (1, 0, 2), (1e-3, 1)])
def test_rows_are_within_one_of_their_share_at_every_batch(weights: tuple[float, ...]) -> None:
    names = [f"l{k}" for k in range(len(weights))]
    exact = [Fraction(w).limit_denominator(10**9) / sum(map(Fraction, weights)) for w in weights]
    loaders = {name: endless(9000 * k) for k, name in enumerate(names)}
    with MixedDataLoader(loaders, weights) as mixed:
        for n, _ in zip(range(1, 300), mixed, strict=False):
            for name, share in zip(names, exact, strict=True):
                assert abs(mixed.given[name]["rows"] - share * 8 * n) < 1 + 1e-6


def test_shares_of_tokens_hold_where_rows_are_filled_unevenly() -> None:
    loaders = {"full": endless(0, 30, pack="bestfit"), "short": endless(9000, 4, pack="pad")}
    with MixedDataLoader(loaders, {"full": 1, "short": 1}, "tokens") as mixed:
        for _ in zip(range(400), mixed, strict=False):
            pass
        tokens = {name: one["tokens"] for name, one in mixed.given.items()}
        rows = {name: one["rows"] for name, one in mixed.given.items()}
    assert abs(tokens["full"] - tokens["short"]) < 3 * LENGTH
    assert rows["short"] > 3 * rows["full"]


def test_a_schedule_and_a_change_hold_from_their_batch_on() -> None:
    loaders = {"a": endless(0), "b": endless(9000)}
    shares = []
    with MixedDataLoader(loaders, [1, 0], schedule={3: [0, 1], 9: [1, 1]}) as mixed:
        for n, batch in zip(range(12), mixed, strict=False):
            told = batch.metadata["parts"]
            shares.append([told.get(name, {"rows": 0})["rows"] for name in "ab"])
            if n == 5:
                mixed.change_weights({"a": 3, "b": 1})
    assert shares == [[8, 0]] * 3 + [[0, 8]] * 3 + [[6, 2]] * 3 + [[4, 4]] * 3


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_where_all_that_have_weight_have_ended_the_next_stage_begins(unit: str) -> None:
    """Rows of the first stage's loader to the last, then at once those of the others."""
    alone = [len(rows_of(documents(k, 2, 1000 * k))) for k in range(3)]

    def made(stop: str = "all", last: int = 900) -> MixedDataLoader:
        loaders = {name: documents(k, 2, 1000 * k) for k, name in enumerate("abc")}
        schedule = {500: [0, 1, 0], last: [0, 0, 1]}
        return MixedDataLoader(loaders, [1, 0, 0], unit, schedule, stop, global_batch_size=4)

    with made() as mixed:
        batches = list(mixed)
        assert [one["rows"] for one in mixed.given.values()] == alone
        order = [name for batch in batches for name in batch.metadata["parts"]]
        assert [name for name, _ in groupby(order)] == ["a", "b", "c"]
        assert mixed.get_num_batches() == len(batches) == -(-sum(alone) // 4)
        again = list(mixed)  # the next epoch of all of them: the first stage, by its batches
        assert [*again[0].metadata["parts"]] == ["a"]
    for steps in range(len(batches)):
        with made() as mixed, made() as other:
            for _ in zip(range(steps), mixed, strict=False):
                pass
            other.load_state_dict(json.loads(json.dumps(mixed.state_dict())))
            rest = [joined([batch]) for batch in other]  # type: ignore[list-item]
        assert rest == [joined([batch]) for batch in batches[steps:]]  # type: ignore[list-item]
    with made("first") as mixed:
        assert len(list(mixed)) == alone[0] // 4, "the first of those that have weight ends it"
    with made(last=2) as mixed:  # who has no weight in this stage or a later one gives no more
        assert {*list(mixed)[-1].metadata["parts"]} == {"b"}
        assert [one["rows"] for one in mixed.given.values()] == [8, *alone[1:]]


def test_loaders_without_weight_are_not_counted() -> None:
    loaders = {"a": documents(0, 2, 0), "b": documents(1, 2, 1000)}
    with MixedDataLoader(loaders, [1, 0], global_batch_size=4) as mixed:
        assert mixed.get_num_batches() == len(list(mixed))
        assert mixed.get_num_batches().final


def test_stages_of_loaders_that_take_turns() -> None:
    loaders: dict[str, DataLoader] = {"own": Numbers(), "text": documents(1, 3, 0)}
    with MixedDataLoader(loaders, [1, 0], schedule={100: [0, 1]}) as mixed:
        names = [batch.metadata["loader"] for batch in mixed]
    assert [name for name, _ in groupby(names)] == ["own", "text"]
    assert names.count("own") == 10


def test_what_has_ended_leaves_its_share_to_the_others() -> None:
    loaders = {"long": endless(0), "short": documents(3, 1, 9000)}
    alone = len(rows_of(documents(3, 1, 9000)))
    with MixedDataLoader(loaders, [1, 1], global_batch_size=8) as mixed:
        for _ in zip(range(60), mixed, strict=False):
            pass
        assert mixed.given["short"]["rows"] == alone
        assert mixed.given["long"]["rows"] == 8 * 60 - alone


def test_with_first_the_rest_of_the_one_that_ends_is_counted() -> None:
    loaders = {"long": endless(0), "short": documents(3, 3, 9000)}
    with MixedDataLoader(loaders, [1, 1], stop="first", global_batch_size=8) as mixed:
        first = len(list(mixed))
        before = mixed.state_dict()
        mixed.skip(1)
        with pytest.raises(StopIteration, match=f"epoch 0 has ended, {first} batches were handed"):
            mixed.get_batch(8)
        assert mixed.state_dict() == before
        (_, short) = mixed.ledger()
        assert short.source == "short/s"
        assert short.waiting == 0
        assert short.read == short.trained + short.context + short.skipped
        given = mixed.given["long"]["rows"]
        again = len(list(mixed))  # the next epoch of the one that has ended; the other goes on
        assert again > 0
        assert mixed.given["long"]["rows"] == 4 * (first + again) > given


# What goes wrong


class Broken(MemorySource):
    """A shard of it cannot be read for a while."""

    fails = True

    def decode(self, shard: int) -> Any:
        if shard == 2 and self.fails:
            raise OSError("the disk is gone")
        return super().decode(shard)


def test_a_batch_that_fails_takes_nothing_of_any_loader() -> None:
    rng = np.random.default_rng(1)
    content = [made_documents(rng, 20, 12, 100 * k) for k in range(5)]

    def made() -> tuple[MixedDataLoader, Broken]:
        source = Broken("s", content, None, [1])
        plan = PlanConfig(pool_size=25, refill_threshold=5, buffer_pieces=4)
        broken = PretrainDataLoader({"s": source}, None, LENGTH, batch_size=6, plan=plan)
        loaders = {"good": documents(1, 4, 5000), "bad": broken}
        return MixedDataLoader(loaders), source

    mixed, source = made()
    source.fails = False
    with mixed:
        whole = [joined([batch]) for batch in mixed]  # type: ignore[list-item]
    mixed, source = made()
    found: list[Any] = []
    with mixed:
        failed = 0
        while len(found) < len(whole):
            try:
                batch = mixed.get_batch(6)
            except OSError:
                failed += 1
                before = mixed.state_dict()
                with pytest.raises(OSError, match="the disk is gone"):
                    mixed.get_batch(6)
                after = mixed.state_dict()
                for state in (before, after):
                    state.pop("sum")
                    for one in state["loaders"].values():
                        one.pop("sum"), one.pop("ledger")
                assert before == after
                source.fails = False
            else:
                found.append(joined([batch]))  # type: ignore[list-item]
    assert failed == 1
    assert found == whole


def pair(**options: Any) -> MixedDataLoader:
    return MixedDataLoader({"a": documents(1, 4, 0), "b": documents(1, 4, 5000)}, **options)


def test_states_of_other_mixtures_are_refused_and_change_nothing() -> None:
    with pair() as mixed:
        next(iter(mixed))
        state = mixed.state_dict()
    for options, told in (
        ({"weights": [2, 1]}, "weights"), ({"unit": "tokens"}, "unit"), ({"stop": "first"}, "stop"),
        ({"schedule": {2: [1, 1]}}, "schedule"), ({"global_batch_size": 8}, "global_batch_size"),
    ):  # fmt: skip
        with pair(**options) as other, pytest.raises(StateMismatch, match=told):
            other.load_state_dict(state)
    with MixedDataLoader({"a": documents(1, 4, 0), "b": documents(2, 4, 5000)}) as other:
        next(iter(other))
        before = {name: one.step for name, one in other.loaders.items()}
        with pytest.raises(StateMismatch, match="seed"):
            other.load_state_dict(state)
        assert {name: one.step for name, one in other.loaders.items()} == before
    with pair() as other, pytest.raises(StateMismatch, match="not a state as the loader gave it"):
        other.load_state_dict({**state, "step": 3})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"weights": [1]}, "give a number for each of 'a', 'b'"),
        ({"weights": {"a": 1, "c": 1}}, "give one for each of 'a', 'b'"),
        ({"weights": [0, 0]}, "not all of them 0"),
        ({"weights": [1, -1]}, "0 or more"),
        ({"weights": [1, float("nan")]}, "a number of weights"),
        ({"weights": "ab"}, "give a number for each"),
        ({"weights": 3}, "give a number for each"),
        ({"schedule": [(3, [1, 1])]}, "schedule is"),
        ({"unit": "row"}, "choose from rows, tokens"),
        ({"stop": "last"}, "choose from all, first"),
        ({"last": "keep"}, "choose from pad, drop"),
        ({"batch_size": 2, "global_batch_size": 4}, "give one of the two"),
        ({"schedule": {-1: [1, 1]}}, "a batch of schedule"),
    ],
)
def test_what_is_asked_wrongly_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        pair(**options)


def test_loaders_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(BadConfig, match="give a dict"):
        MixedDataLoader({})
    with pytest.raises(BadConfig, match="of different ranks"):
        MixedDataLoader({"a": documents(1, 1, 0, 0, 2), "b": documents(1, 1, 0, 1, 2)})
    with pytest.raises(BadConfig, match="is a mixture itself"):
        MixedDataLoader({"a": pair()})
    one = documents(1, 1, 0)
    with pytest.raises(BadConfig, match="one loader has two names"):
        MixedDataLoader({"a": one, "b": one})
    with pytest.raises(BadConfig, match="give loaders of penstock or your own"):
        MixedDataLoader({"a": "data"})  # type: ignore[dict-item]
    with pytest.raises(BadConfig, match="batches of"):
        MixedDataLoader({"a": endless(0), "b": documents(1, 1, 0)})


# Loaders that take turns


class Numbers(DataLoader):
    """One of somebody's own: ten batches of two rows."""

    def __init__(self) -> None:
        self.step = 0

    def get_batch(self, batch_size: int) -> TrainingBatch:
        if self.step % 10 == 0 and self.step:
            raise StopIteration
        self.step += 1
        return TrainingBatch(np.full((2, 3), self.step))

    def get_iterator(self) -> Any:
        while True:
            if self.step == 10:
                return
            yield self.get_batch(2)

    def get_num_batches(self) -> int:
        return 10

    def reset(self) -> None:
        self.step = 0

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        return {"step": self.step if step is None else step}

    def load_state_dict(self, state: Any) -> None:
        self.step = state["step"]


def turns(unit: str = "rows", stop: str = "all") -> MixedDataLoader:
    loaders: dict[str, DataLoader] = {
        "rl": RolloutDataLoader(groups(12), batch_size=8),
        "own": Numbers(),
        "text": documents(1, 3, 0),
    }
    return MixedDataLoader(loaders, {"rl": 1, "own": 1, "text": 2}, unit, stop=stop)


def told_of(batch: Any) -> tuple[Any, ...]:
    return batch.metadata["loader"], batch.metadata["step"], batch.input_ids.tolist()


@pytest.mark.parametrize("unit", ["rows", "tokens"])
def test_loaders_of_other_kinds_take_turns(unit: str) -> None:
    with turns(unit) as mixed:
        whole = [told_of(batch) for batch in mixed]
    assert [step for _, step, _ in whole] == list(range(len(whole)))
    counts = Counter(name for name, _, _ in whole)
    assert counts["own"] == 10
    assert counts["rl"] == 6
    with turns(unit) as mixed:
        early = [next(iter(mixed)) for _ in range(8)]
        given = mixed.given
    assert {batch.metadata["loader"] for batch in early} == {"rl", "own", "text"}
    shares = np.array([given[name][unit] for name in ("rl", "own", "text")], float)
    assert shares[2] == max(shares)
    for stop in range(0, len(whole) + 1, 3):
        with turns(unit) as mixed:
            found = [told_of(next(iter(mixed))) for _ in range(stop)]
            state = json.loads(json.dumps(mixed.state_dict()))
        with turns(unit) as mixed:
            mixed.load_state_dict(state)
            found += [told_of(batch) for batch in mixed]
        assert found == whole


def test_a_loader_that_says_nothing_of_other_ranks_is_refused_on_several() -> None:
    class OfTwo(Numbers):
        rank, world_size = 0, 2

    mixed = MixedDataLoader({"own": OfTwo()})
    with pytest.raises(BadConfig, match="does not say what all ranks have of it"):
        next(iter(mixed))


def test_batches_that_are_noised_take_turns() -> None:
    hidden = DocumentConfig(objective=DiffusionConfig(mask_token_id=60_000))
    with MixedDataLoader({"a": endless(0, documents=hidden), "b": endless(9000)}) as mixed:
        names = [batch.metadata["loader"] for _, batch in zip(range(6), mixed, strict=False)]
        assert sorted(names) == ["a"] * 3 + ["b"] * 3
        with pytest.raises(BadConfig, match="take turns"):
            mixed.get_batch(2)
        with pytest.raises(BadConfig, match="skip nothing"):
            mixed.skip(1)


# With everything around


def test_explain_names_loader_and_row(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        made_dataset(tmp_path / name, 3, 20, seed=seed)
    loaders = {
        name: PretrainDataLoader(str(tmp_path / name), None, LENGTH, batch_size=6) for name in "ab"
    }
    with MixedDataLoader(loaders, [2, 1]) as mixed:
        batch = next(iter(mixed))
        spans = mixed.explain(batch)
        assert isinstance(batch, MixedBatch)
    assert sorted({span.row for span in spans}) == list(range(6))
    for span in spans:
        assert span.source.startswith("a/" if span.row < 4 else "b/")
    covered = Counter(span.row for span in spans for _ in range(span.first, span.last))
    assert [covered[row] for row in range(6)] == batch.fills.tolist()
    assert set(batch.segments[:, 1].tolist()) == {0, 1}


def test_states_of_batches_before_what_was_fetched_ahead() -> None:
    with pair() as mixed:
        whole = [joined([batch]) for batch in mixed]  # type: ignore[list-item]
    for step in range(len(whole)):
        with pair() as mixed:
            iterator = iter(mixed)
            for _ in range(min(len(whole), step + 3)):
                next(iterator)
            state = mixed.state_dict(step)
        with pair() as mixed:
            mixed.load_state_dict(json.loads(json.dumps(state)))
            assert [joined([batch]) for batch in mixed] == whole[step:]  # type: ignore[list-item]
    with pair() as mixed, pytest.raises(BadConfig, match="does not know where it stood after 70"):
        mixed.state_dict(70)


def test_skipping_is_reading_without_batches() -> None:
    with pair() as mixed:
        whole = [joined([batch]) for batch in mixed]  # type: ignore[list-item]
    assert len(whole) > 4
    with pair() as mixed:
        mixed.skip(3)
        assert [joined([batch]) for batch in mixed] == whole[3:]  # type: ignore[list-item]
        second = [joined([batch]) for batch in mixed]  # type: ignore[list-item]
        mixed.go_to_epoch(1)
        assert [joined([batch]) for batch in mixed] == second  # type: ignore[list-item]
        mixed.reset()
        assert [joined([batch]) for batch in mixed] == whole  # type: ignore[list-item]


def test_a_copy_in_another_process_stands_where_this_one_does(tmp_path: Path) -> None:
    for name in "ab":
        made_dataset(tmp_path / name, 3, 20, seed=ord(name))
    loaders = {
        name: PretrainDataLoader(str(tmp_path / name), None, LENGTH, batch_size=6) for name in "ab"
    }
    with MixedDataLoader(loaders) as mixed:
        next(iter(mixed))
        with pickle.loads(pickle.dumps(mixed)) as copy:
            rest = [joined([batch]) for batch in copy]
        assert rest == [joined([batch]) for batch in mixed]  # type: ignore[list-item]
    assert rest


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_takes_it_with_workers(tmp_path: Path, workers: int) -> None:
    import torch

    from penstock import TorchDataset

    for name in "ab":
        made_dataset(tmp_path / name, 3, 20, seed=ord(name))

    def made() -> MixedDataLoader:
        return MixedDataLoader({
            name: PretrainDataLoader(str(tmp_path / name), None, LENGTH, batch_size=6)
            for name in "ab"
        })  # fmt: skip

    with made() as mixed:
        whole = [[batch.input_ids.tolist() for batch in mixed] for _ in range(2)]
    feed = torch.utils.data.DataLoader(TorchDataset(made()), batch_size=None, num_workers=workers)
    found = [[batch["input_ids"].tolist() for batch in feed] for _ in range(2)]
    assert found == whole
