"""The plan: every token once, the same rows live or finished, restored anywhere."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BadConfig
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, PlanConfig, Rows
from penstock.stream.source import Ranged, parse_ranges

from .sources import MadeSource

Shards = list[list[int]]
lengths = st.one_of(st.integers(0, 12), st.integers(0, 90))
shards = st.lists(st.lists(lengths, min_size=0, max_size=12), min_size=0, max_size=7)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Sources, weights and a config, small enough that everything happens in them."""
    count = draw(st.integers(1, 3))
    pool = draw(st.integers(1, 40))
    config = PlanConfig(
        seq_len=draw(st.sampled_from([1, 7, 16, 64, 65])),
        pack=draw(st.sampled_from(["pad", "concat", "bestfit"])),
        buffer_pieces=draw(st.sampled_from([1, 2, 5, 64])),
        long=draw(st.sampled_from(["split", "split", "crop", "drop"])),
        pool_size=pool,
        refill_threshold=draw(st.integers(0, pool - 1)),
        pool_tokens=draw(st.sampled_from([10, 200, 1 << 30])),
        ramp=draw(st.booleans()),
        weigh=draw(st.sampled_from(["samples", "tokens"])),
        epochs=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 5)),
    )
    return {
        "shards": [draw(shards) for _ in range(count)],
        "weights": [draw(st.sampled_from([0.1, 1.0, 3.0])) for _ in range(count)],
        "config": config,
        "stages": [(draw(st.integers(1, 30)), [1.0] * count)] if draw(st.booleans()) else [],
    }


def make(case: dict[str, Any], *, live: bool = False) -> Plan:
    sources = [
        MadeSource(f"s{k}", found, 0 if live else None) for k, found in enumerate(case["shards"])
    ]
    return Plan(sources, case["config"], case["weights"], stages=case["stages"])


def all_rows(plan: Plan, sizes: list[int] | None = None) -> list[bytes]:
    """Every row to the end, as bytes; `sizes` are how many are asked for at once."""
    found: list[bytes] = []
    k = 0
    while True:
        size = sizes[k % len(sizes)] if sizes else 64
        k += 1
        rows = plan.take(size)
        assert rows.first == plan.row - len(rows.fills)
        found += split(rows)
        if len(rows.fills) < size:
            return found


def split(rows: Rows) -> list[bytes]:
    """One row after the other: its segments without the row's number."""
    parts = []
    for row in range(len(rows.fills)):
        segments = rows.segments[rows.segments[:, 0] == row]
        assert segments[:, 6].sum() == rows.fills[row]
        parts.append(segments[:, 1:].tobytes())
    return parts


def segments_of(found: list[bytes]) -> npt.NDArray[np.int32]:
    return np.frombuffer(b"".join(found), np.int32).reshape(-1, layout.SEGMENT - 1)


def waits(plan: Plan) -> list[int]:
    return [source.waits for source in plan.sources if isinstance(source, MadeSource)]


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 9))
def test_rows_beyond_the_least_wait_for_nothing(case: dict[str, Any], least: int) -> None:
    expected = all_rows(make(case))
    exact, eager = make(case, live=True), make(case, live=True)
    found: list[bytes] = []
    given = least
    while given >= least:
        rows = eager.take(1000, least)
        given = len(rows.fills)
        found += split(rows)
        exact.take(least)
        if case["config"].pack != "concat":  # there a row that is begun is ended
            assert waits(eager) == waits(exact)
        exact.take(max(0, given - least))
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_token_of_every_pass_is_placed_once(case: dict[str, Any]) -> None:
    plan = make(case)
    config: PlanConfig = case["config"]
    segments = segments_of(all_rows(plan))
    places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for source, passed, shard, row, at, size in segments.tolist():
        assert 0 < size <= config.seq_len
        places.setdefault((source, passed, shard, row), []).append((at, size))
    expected = 0
    for source, found in enumerate(case["shards"]):
        for shard, documents in enumerate(found):
            for row, tokens in enumerate(documents):
                for passed in range(config.epochs or 1):
                    kept = tokens
                    if tokens > config.seq_len and config.long != "split":
                        kept = config.seq_len if config.long == "crop" else 0
                    at = 0
                    for start, size in sorted(places.pop((source, passed, shard, row), [])):
                        assert start == at
                        at += size
                    assert at == kept
                    expected += kept
    assert not places
    assert segments[:, 5].sum() == expected
    ledger = plan.ledger.reshape(-1, layout.LEDGER)
    placed = ledger[:, layout.PLACED] + ledger[:, layout.CROPPED] + ledger[:, layout.SKIPPED]
    assert (ledger[:, layout.READ] == placed).all()
    assert ledger[:, [layout.PLACED, layout.PADDED]].sum() == plan.row * config.seq_len


@settings(max_examples=100, deadline=None)
@given(cases(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_growing_source_gives_the_rows_of_a_finished_one(
    case: dict[str, Any], sizes: list[int]
) -> None:
    live = make(case, live=True)
    assert all_rows(live, sizes) == all_rows(make(case))


@settings(max_examples=150, deadline=None)
@given(cases(), st.data())
def test_a_plan_goes_on_from_any_state(case: dict[str, Any], data: st.DataObject) -> None:
    whole = all_rows(make(case))
    plan, found = make(case), []
    for _ in range(data.draw(st.integers(1, 5))):
        found += split(plan.take(data.draw(st.integers(0, 12))))
        state = json.loads(json.dumps(plan.state()))
        waiting = plan.waiting().tolist()
        plan = make(case, live=True)
        plan.restore(state)
        assert plan.state() == state
        assert plan.waiting().tolist() == waiting
    assert found + all_rows(plan) == whole


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 10), st.integers(0, 10))
def test_a_change_of_weights_is_replayed(case: dict[str, Any], before: int, after: int) -> None:
    count = len(case["shards"])
    plan = make(case)
    head = split(plan.take(before))
    plan.change_weights([float(k + 1) for k in range(count)])
    head += split(plan.take(after))
    state = json.loads(json.dumps(plan.state()))
    rest = all_rows(plan)
    again = make(case)
    again.restore(state)
    assert all_rows(again) == rest
    once_more = make(case)
    assert split(once_more.take(before)) == head[:before]
    once_more.change_weights([float(k + 1) for k in range(count)])
    assert all_rows(once_more, [1]) == head[before:] + rest


@pytest.mark.parametrize("weigh", ["samples", "tokens"])
def test_the_mixture_is_the_weights_over_any_stretch(weigh: str) -> None:
    random = np.random.default_rng(7)
    made = [
        MadeSource(name, [random.integers(1, 900, 500).tolist() for _ in range(40)])
        for name in ("a", "b", "c")
    ]
    config = PlanConfig(
        pack="pad", seq_len=900, weigh=weigh, pool_size=4000, refill_threshold=3000, epochs=None
    )
    plan = Plan(made, config, [0.7, 0.295, 0.005])
    segments = plan.take(40_000).segments
    amounts = segments[:, 6] if weigh == "tokens" else np.ones(len(segments))
    for start in range(0, 30_000, 1_000):
        part = segments[start : start + 10_000, 1]
        shares = np.bincount(part, amounts[start : start + 10_000], minlength=3)
        assert np.abs(shares / shares.sum() - [0.7, 0.295, 0.005]).max() < 0.0005


def test_a_sample_leaves_the_pool_soon_and_the_pool_is_bounded() -> None:
    random = np.random.default_rng(1)
    made = MadeSource("a", [random.integers(1, 50, 100).tolist() for _ in range(100)])
    config = PlanConfig(pack="pad", seq_len=50, pool_size=2000, refill_threshold=1500, ramp=False)
    plan = Plan([made], config, [1.0])
    seen = np.zeros(100, np.int64)
    most = 0
    for k in range(10_000):
        shard = int(plan.take(1).segments[0, 3])
        seen[shard] += 1
        # in the pool is what was admitted and not drawn
        most = max(most, plan.pools[0].shard * 100 - k)
    assert (seen == 100).all()
    assert most <= 2000 + 100


def test_ranges() -> None:
    assert parse_ranges("0-9,20-29") == [(0, 9), (20, 29)]
    assert parse_ranges("all") is None
    chosen = Ranged("2,5-7")
    assert [chosen.number(k) for k in range(5)] == [2, 5, 6, 7, None]
    assert chosen.size == 4
    assert Ranged("all").number(9) == 9
    for text, why in (("7-3", "backwards"), ("a", "not a number"), ("3,1", "after 3")):
        with pytest.raises(BadConfig, match="cannot be read") as caught:
            parse_ranges(text)
        assert why in caught.value.why


def test_config_is_checked() -> None:
    for wrong, words in (
        ({"pack": "best"}, "pack is 'best'"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"pool_size": 10, "refill_threshold": 10}, "refill_threshold is 10"),
    ):
        with pytest.raises(BadConfig, match=words):
            PlanConfig(**wrong)
    one = MadeSource("a", [[1]])
    for weights, words in (([1.0, 1.0], "2 weights"), ([0.0], "all weights"), ([-1.0], "is -1.0")):
        with pytest.raises(BadConfig, match=words):
            Plan([one], PlanConfig(), weights)
    with pytest.raises(BadConfig, match="needs a source"):
        Plan([], PlanConfig(), [])


def test_a_full_pool_moves_on_evenly() -> None:
    """What benchmarks/bench_plan.py builds on: later states are earlier ones, moved."""
    made = MadeSource("a", [[5] * 50 for _ in range(400)])
    config = PlanConfig(pack="pad", seq_len=8, pool_size=1000, refill_threshold=800)
    pool = Plan([made], config, [1.0]).pools[0]
    while pool.cycle < 40:  # of the first cohort, which filled the pool, nothing is left
        pool.refill()
    earlier = pool.state()
    while pool.cycle < 70:
        pool.refill()
    later = pool.state()
    each = 4  # shards of a cohort: 200 samples
    assert later["shard"] == earlier["shard"] + 30 * each  # type: ignore[operator]
    moved = {
        number + 30: (first + 30 * each, drawn)
        for number, _, first, _, _, drawn in earlier["cohorts"]  # type: ignore[attr-defined]
    }
    for number, _, first, last, _, drawn in later["cohorts"][1:]:  # type: ignore[index]
        assert (moved[number][0], last - first) == (first, each)
        assert abs(moved[number][1] - drawn) < 8  # shares are rounded
