"""Sequences over ranks and micro-batches: each once, never over the cap, equal work."""

import heapq
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import plugins
from penstock.errors import BadConfig, BadInput
from penstock.plugins import register
from penstock.supply.balance import BalanceConfig, Balanced, balance, partition

Ints = npt.NDArray[np.int64]


def heavy_tailed(count: int, seed: int = 0) -> Ints:
    """Lengths of which few are much longer than most: from 16 to 32,768 tokens."""
    rng = np.random.default_rng(seed)
    return np.clip(rng.lognormal(6.5, 1.2, count), 16, 32_768).astype(np.int64)


def by_rank(made: Balanced, what: npt.ArrayLike) -> Ints:
    """Sums of each micro-batch of each rank."""
    found = np.zeros((made.ranks, made.num_micro), np.int64)
    np.add.at(found, (made.rank, made.micro), np.asarray(what))
    return found


Set = tuple[int, int, int, tuple[int, ...]]
"""What it costs, how many items it has, the first of them, all of them."""


def differenced(costs: list[int], parts: int, *, equal: bool) -> list[int]:
    """Karmarkar and Karp with lists: the part of each item."""
    ordered = sorted((cost, k) for k, cost in enumerate(costs))
    step = parts if equal else 1
    first = len(ordered) % step or step
    cuts = [0, *range(min(first, len(ordered)), len(ordered) + 1, step)]
    heap: list[Any] = []

    def push(sets: list[Set]) -> None:
        sets = sorted(sets, reverse=True)
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], [-n for n in sets[0][:3]], sets))

    for a, b in itertools.pairwise(cuts):
        sets: list[Set] = [(cost, 1, k, (k,)) for cost, k in ordered[a:b]]
        push(sets + [(0, 0, -1, ())] * (parts - len(sets)))
    while len(heap) > 1:
        one, two = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push(
            [
                (a[0] + b[0], a[1] + b[1], a[2] if a[1] else b[2], a[3] + b[3])
                for a, b in zip(one, reversed(two), strict=True)
            ]
        )
    found = [0] * len(costs)
    for part, (*_, items) in enumerate(heap[0][2] if heap else []):
        for item in items:
            found[item] = part
    return found


def test_case_g() -> None:
    assert partition([8, 7, 6, 5, 4], 2).tolist() == [1, 0, 1, 0, 0]
    costs = np.array([100, 90, 80, 70, 60, 50, 40, 30])
    found = partition(costs, 4, equal_size=True)
    assert np.bincount(found, costs).tolist() == [130] * 4
    assert np.bincount(found).tolist() == [2] * 4
    assert balance([7] * 8, 1, BalanceConfig(max_tokens=8)).num_micro == 8


@given(
    costs=st.one_of(
        st.lists(st.integers(1, 4), max_size=60),
        st.lists(st.integers(0, 100_000), max_size=60),
    ),
    parts=st.integers(1, 12),
    equal=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_differencing_is_what_it_is_by_the_book(costs: list[int], parts: int, equal: bool) -> None:
    found = partition(costs, parts, equal_size=equal)
    assert len(found) == len(costs)
    if not costs:
        return
    assert 0 <= found.min() <= found.max() < parts
    assert found.tolist() == differenced(costs, parts, equal=equal)
    sums = np.bincount(found, costs, parts).astype(np.int64)
    assert (np.diff(sums) <= 0).all()  # the dearest first
    if equal:
        counts = np.bincount(found, minlength=parts)
        assert counts.max() - counts.min() <= 1


def test_sets_are_moved_when_their_memory_is_full() -> None:
    """Many parts and many items: states of all sizes, compacted more than once."""
    costs = heavy_tailed(1_200)
    found = partition(costs, 200)
    assert found.tolist() == differenced(costs.tolist(), 200, equal=False)


@given(
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 100)), max_size=80),
    ranks=st.integers(1, 6),
    cap=st.integers(100, 300),
    multiple_of=st.integers(1, 3),
    quadratic=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_every_sequence_once_and_never_over_the_cap(
    lengths: list[int], ranks: int, cap: int, multiple_of: int, quadratic: int
) -> None:
    config = BalanceConfig(max_tokens=cap, multiple_of=multiple_of, linear=50, quadratic=quadratic)
    made = balance(lengths, ranks, config)
    members = [one for rank in range(ranks) for one in made.members(rank)]
    assert sorted(np.concatenate([*members, np.zeros(0, int)]).tolist()) == [*range(len(lengths))]
    assert len(members) == ranks * made.num_micro
    assert made.num_micro % multiple_of == 0
    assert by_rank(made, lengths).max() <= cap
    assert min(map(len, members)) > 0 or len(lengths) < ranks * made.num_micro
    dear = by_rank(made, config.costs(lengths))
    assert (np.diff(dear, axis=1) <= 0).all()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "ranks"), [(512, 4), (512, 8), (1024, 8), (4096, 8)])
def test_tokens_of_ranks_within_2_percent(count: int, ranks: int, seed: int) -> None:
    lengths = heavy_tailed(count, seed)
    made = balance(lengths, ranks, BalanceConfig(max_tokens=40_000, quadratic=0))
    tokens = by_rank(made, lengths)
    assert tokens.sum(1).max() <= 1.02 * tokens.sum(1).min()
    assert tokens.max() <= 40_000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "ranks"), [(512, 4), (512, 8), (1024, 8), (4096, 8)])
def test_cost_of_ranks_within_a_hundredth_of_a_percent(count: int, ranks: int, seed: int) -> None:
    """By default work is even, attention and all; then tokens are not, if few are long."""
    lengths, config = heavy_tailed(count, seed), BalanceConfig(max_tokens=40_000)
    made = balance(lengths, ranks, config)
    costs, tokens = by_rank(made, config.costs(lengths)).sum(1), by_rank(made, lengths)
    assert costs.max() <= 1.0001 * costs.min()
    assert tokens.max() <= 40_000
    by_tokens = balance(lengths, ranks, BalanceConfig(max_tokens=40_000, quadratic=0))
    others = by_rank(by_tokens, config.costs(lengths)).sum(1)
    assert costs.max() < others.max()  # equal tokens would keep all waiting for longer


def test_100_000_sequences_are_even_in_work_and_in_tokens() -> None:
    lengths, config = heavy_tailed(100_000), BalanceConfig(max_tokens=65_536)
    made = balance(lengths, 8, config)
    tokens, costs = by_rank(made, lengths), by_rank(made, config.costs(lengths))
    assert tokens.max() <= 65_536
    assert tokens.sum(1).max() <= 1.02 * tokens.sum(1).min()
    assert costs.sum(1).max() <= 1.0001 * costs.sum(1).mean()
    assert made.num_micro <= -(-int(lengths.sum()) // 65_536) / 8 + 1


def test_the_bins_are_few() -> None:
    """As few micro-batches as tokens would need that could be poured."""
    lengths = heavy_tailed(1_024)
    made = balance(lengths, 8, BalanceConfig(max_tokens=40_000))
    most = np.bincount(made.rank, lengths).max()
    assert made.num_micro <= -(-most // 40_000) + 1


def test_a_rank_with_few_sequences_gets_some() -> None:
    lengths = [1000] + [100] * 40
    made = balance(lengths, 2, BalanceConfig(max_tokens=1000, linear=1, quadratic=100))
    assert made.num_micro > 1
    assert all(len(one) for rank in range(2) for one in made.members(rank))


def test_without_a_cap_there_is_one_micro_batch() -> None:
    made = balance([5, 6, 7], 2)
    assert made.num_micro == 1
    assert len(made.members(0)) == 1
    assert balance([], 2, BalanceConfig(max_tokens=8)).num_micro == 1


def test_best_fit_where_nothing_even_keeps_the_cap() -> None:
    """6+4, 5+5, 4+3+3: any even way to begin leaves no room for the last one."""
    lengths = [6, 5, 5, 4, 4, 3, 3]
    made = balance(lengths, 1, BalanceConfig(max_tokens=10, linear=1, quadratic=0))
    assert made.num_micro == 3
    assert by_rank(made, lengths).tolist() == [[10, 10, 10]]


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: dict(found) for kind, found in plugins._known.items()}
    monkeypatch.setattr(plugins, "_known", known)


@pytest.mark.usefixtures("_own_registry")
def test_a_custom_partition() -> None:
    @register("partition", "in_turn")
    def in_turn(costs: Ints, parts: int) -> Ints:
        return np.arange(len(costs)) % parts

    assert balance([9, 1, 9, 1], 2, BalanceConfig(partition="in_turn")).rank.tolist() == [0, 1] * 2

    @register("partition", "beyond")
    def beyond(costs: Ints, parts: int) -> Ints:
        return np.arange(len(costs))

    with pytest.raises(BadConfig, match="does not give a part for each item") as e:
        balance([9, 1, 9, 1], 2, BalanceConfig(partition="beyond"))
    assert "for 4 items and 2 parts" in e.value.why
    with pytest.raises(BadConfig, match="there is no partition called 'kk'"):
        balance([1], 1, BalanceConfig(partition="kk"))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"linear": -1}, "linear is -1"),
        ({"linear": 0, "quadratic": 0}, "linear and quadratic are both 0"),
        ({"multiple_of": 0}, "multiple_of is 0"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        BalanceConfig(**wrong)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(BadInput, match="a sequence has 9 tokens, and a micro-batch at most 8") as e:
        balance([1, 9], 1, BalanceConfig(max_tokens=8))
    assert e.value.where == "sequence 1"
    with pytest.raises(BadInput, match="a length is -1"):
        balance([-1], 1)
    with pytest.raises(BadInput, match="a cost is -1"):
        partition([-1], 1)
    with pytest.raises(BadConfig, match="ranks is 0"):
        balance([1], 0)
    with pytest.raises(BadConfig, match="parts is 0"):
        partition([1], 0)
    with pytest.raises(BadConfig, match="cost more than a number holds"):
        balance([1 << 30] * 9, 1)
