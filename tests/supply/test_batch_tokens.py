"""Batches by tokens: the cap holds on every rank, work is even, and nothing is lost or repeated."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import (
    BalanceConfig,
    ConversationDataLoader,
    DiffusionConfig,
    DocumentConfig,
    LoaderRun,
    MixedDataLoader,
    PlanConfig,
    PretrainDataLoader,
    register,
)
from penstock.errors import BadConfig
from penstock.plugins import find
from penstock.tokenize.tokenizer import Tokenizer

from .memory_source import ChatSource, MemorySource

SLOW = list(HealthCheck)
LENGTH = 40


def content(seed: int, shards: int = 4) -> list[list[list[int]]]:
    """Samples with a long tail, each of one number of its own."""
    rng = np.random.default_rng(seed)
    found, number = [], 0
    for _ in range(shards):
        sizes = np.clip(rng.lognormal(2, 1, rng.integers(3, 40)), 3, LENGTH).astype(int)
        found.append([[number + k] * int(size) for k, size in enumerate(sizes)])
        number += len(sizes)
    return found


def loader(
    samples: Any, tokens: int, rank: int = 0, world: int = 1, *, pack: str = "pad",
    tokenizer: Any = None, live: bool = False, balance: BalanceConfig | None = None, **plan: Any,
) -> Any:  # fmt: skip
    made = MemorySource if tokenizer is None else ChatSource
    source = made("s", samples, rank % 3 if live else None, [1 + rank % 2, 3])
    run = LoaderRun(rank=rank, world_size=world, balance=balance or BalanceConfig())
    settings: dict[str, Any] = {
        "pool_size": 30, "buffer_pieces": 6, "batch_tokens": tokens, "ramp": True, **plan
    }  # fmt: skip
    config = PlanConfig(**settings)
    options: dict[str, Any] = {"pack": pack, "plan": config, "run": run}
    if tokenizer is None:
        return PretrainDataLoader({"s": source}, None, LENGTH, **options)
    return ConversationDataLoader({"s": source}, tokenizer, LENGTH, **options)


def samples_in(parts: list[Any]) -> list[int]:
    """The samples of a batch of all ranks, by their number."""
    found: list[int] = []
    for part in parts:
        for ids, fill in zip(part.input_ids, part.fills, strict=True):
            kept = ids[:fill]
            found += kept[np.flatnonzero(np.diff(kept, prepend=-1))].tolist()
    return sorted(found)


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(
    seed=st.integers(0, 10**6), tokens=st.sampled_from([40, 64, 150, 1000]),
    worlds=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=4, max_size=4),
    stops=st.lists(st.integers(0, 5), max_size=3), pack=st.sampled_from(["pad", "bestfit"]),
    chat=st.booleans(),
)  # fmt: skip
def test_every_sample_once_under_the_cap_wherever_it_stops(
    chat_tokenizer: Tokenizer, seed: int, tokens: int, worlds: list[int], stops: list[int],
    pack: str, chat: bool,
) -> None:  # fmt: skip
    made = content(seed)
    tokenizer = chat_tokenizer if chat else None
    seen: list[int] = []
    state = None
    for stop, world in zip([*stops, None], worlds, strict=False):
        ranks: list[Any] = [
            loader(made, tokens, rank, world, pack=pack, tokenizer=tokenizer, live=True)
            for rank in range(world)
        ]
        if state is not None:
            for rank in ranks:
                rank.load_state_dict(state)
        iterators = [iter(rank) for rank in ranks]
        over = False
        while stop is None or stop > 0:
            parts: list[Any] = [next(one, None) for one in iterators]
            if parts[0] is None:
                assert parts == [None] * world
                over = True
                break
            for part in parts:
                assert len(part.input_ids) > 0
                assert part.fills.sum() <= tokens
                assert part.input_ids.shape[1] == (part.fills.max() or LENGTH)
                assert part.num_tokens == sum(int(one.fills.sum()) for one in parts)
                assert part.num_loss_tokens == sum(int(one.loss_mask.sum()) for one in parts)
            seen += samples_in(parts)
            stop = None if stop is None else stop - 1
        state = json.loads(json.dumps(ranks[seed % world].state_dict()))
        for line in ranks[0].ledger():
            used = line.trained + line.context
            assert line.read == used + line.cropped + line.skipped + line.waiting
        for rank in ranks:
            rank.close()
        if over:
            break
    if over:
        assert sorted(seen) == list(range(sum(map(len, made))))
    else:
        assert len(seen) == len(set(seen))


def test_ranks_have_equal_work_and_nearly_full_batches() -> None:
    made = content(1, 40)
    world, tokens = 4, 600
    ranks = [loader(made, tokens, rank, world, pool_size=900) for rank in range(world)]
    filled, spread = [], []
    for parts in zip(*ranks, strict=True):
        sizes = [int(part.fills.sum()) for part in parts]
        filled.append(sum(sizes) / (tokens * world))
        spread.append((max(sizes) - min(sizes)) / max(sizes))
    for rank in ranks:
        rank.close()
    assert len(filled) > 3
    assert min(filled[:-1]) > 0.95
    assert max(spread[:-1]) < 0.02


def test_a_partition_of_ones_own_is_called() -> None:
    asked: list[tuple[int, int]] = []

    @register("partition", "in_turn_for_tests")
    def in_turn(costs: Any, parts: int) -> Any:
        asked.append((len(costs), parts))
        return np.arange(len(costs)) % parts

    assert find("partition", "in_turn_for_tests").make is in_turn
    made = content(2)
    balance = BalanceConfig(partition="in_turn_for_tests")
    ranks = [loader(made, 200, rank, 2, balance=balance) for rank in range(2)]
    for parts in zip(*ranks, strict=True):
        assert abs(len(parts[0].input_ids) - len(parts[1].input_ids)) <= 1
    assert asked
    assert {parts for _, parts in asked} == {2}


def test_skipping_and_epochs() -> None:
    made = content(3)
    with loader(made, 120) as one:
        whole = [samples_in([batch]) for batch in one]
        second = [samples_in([batch]) for batch in one]
        assert sorted(itertools.chain(*second)) == sorted(itertools.chain(*whole))
        assert second != whole
    with loader(made, 120) as one:
        one.skip(3)
        assert [samples_in([batch]) for batch in one] == whole[3:]
        assert not one.get_num_batches().final


def test_what_it_does_not_do_is_named() -> None:
    made = content(4)
    with pytest.raises(BadConfig, match="batch_tokens"):
        loader(made, LENGTH - 1)
    with loader(made, 200) as one:
        with pytest.raises(BadConfig, match="get_batch of a loader with batch_tokens"):
            one.get_batch(2)
        with pytest.raises(BadConfig, match="explain the batch itself"):
            one.explain_next()
    hidden = DocumentConfig(objective=DiffusionConfig(mask_token_id=60_000))
    source = MemorySource("s", made, None, [1])
    with pytest.raises(BadConfig, match="hides tokens"):
        PretrainDataLoader(
            {"s": source}, None, LENGTH, documents=hidden, plan=PlanConfig(batch_tokens=100)
        )
    given: Any
    for name in ("batch_size", "global_batch_size"):
        given = {name: 4}
        with pytest.raises(BadConfig, match=f"{name} beside batch_tokens"):
            PretrainDataLoader(
                {"s": source}, None, LENGTH, plan=PlanConfig(batch_tokens=100), **given
            )


def test_a_mixture_takes_turns_with_such_batches() -> None:
    loaders = {"a": loader(content(5), 200), "b": loader(content(6), 120)}
    with MixedDataLoader(loaders, unit="tokens") as mixed:
        names = [batch.metadata["loader"] for _, batch in zip(range(9), mixed, strict=False)]
        given = mixed.given
    assert set(names) == {"a", "b"}
    assert abs(given["a"]["tokens"] - given["b"]["tokens"]) <= 200
