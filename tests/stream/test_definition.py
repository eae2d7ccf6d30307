"""The rows are those of the definition: a second plan, written plainly, gives the same ones."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import StateMismatch
from penstock.kernels import Kernel
from penstock.stream.plan import Plan, PlanConfig

from .sources import MadeSource

MASK = (1 << 64) - 1
Document = tuple[int, int, int]
"""Pass, shard, row."""
Segment = tuple[int, int, int, int, int, int]
"""Source, pass, shard, row, first token, tokens."""


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def key_of(*numbers: int) -> int:
    key = 0
    for number in numbers:
        key = splitmix64(key ^ splitmix64(number))
    return key


def shuffled(items: list[Any], key: int) -> list[Any]:
    """Each item from the last one down changes places with one of those before it, or none."""
    found, state = list(items), splitmix64(key)
    for last in reversed(range(1, len(found))):
        state = splitmix64(state)
        pick = state * (last + 1) >> 64
        found[last], found[pick] = found[pick], found[last]
    return found


def cycles(
    shards: list[list[int]], config: PlanConfig, share: float, number: int
) -> Iterator[list[Document]]:
    """What a source's pool gives between two refills, each with its document's pass and place."""
    size = max(1, round(config.pool_size * share))
    threshold = round(config.threshold * share)
    threshold = min(threshold, size - math.ceil(size / 63))
    tokens = max(1, round(config.pool_tokens * share))
    key = key_of(config.seed, number)
    waiting = [
        (passed, shard)
        for passed in range((config.epochs or 1) if shards else 0)
        for shard in range(len(shards))
    ]
    cohorts: list[dict[str, Any]] = []
    for cycle in itertools.count():
        pool = sum(len(cohort["left"]) for cohort in cohorts)
        passed = waiting[0][0] if waiting else -1
        admitted = bool(waiting) and (not pool or passed == cohorts[-1]["pass"])
        ramps = config.ramp and (passed if admitted or not cohorts else cohorts[-1]["pass"]) == 0
        if admitted:
            full = min(size, max(1, len(shards[0])) << cycle) if ramps else size
            held = sum(
                cohort["tokens"] * len(cohort["left"]) // max(1, cohort["size"])
                for cohort in cohorts
            )
            documents: list[Document] = []
            came = 0
            while waiting and waiting[0][0] == passed:
                _, shard = waiting.pop(0)
                documents += [(passed, shard, row) for row in range(len(shards[shard]))]
                came += sum(length for length in shards[shard] if length > 0)
                if pool + len(documents) >= full or held + came >= tokens:
                    break
            cohorts.append(
                {
                    "pass": passed,
                    "size": len(documents),
                    "tokens": came,
                    "left": shuffled(documents, key_of(key, 2, cycle)),
                }
            )
        cohorts = [cohort for cohort in cohorts if cohort["left"] or cohort is cohorts[-1]]
        pool = sum(len(cohort["left"]) for cohort in cohorts)
        if not pool and not waiting:
            return
        stays = min(pool, size) * threshold // size
        if ramps:
            stays = min(stays, pool * cycle // (cycle + 4))
        ends = [not admitted or len(c["left"]) * 64 < c["size"] for c in cohorts]
        over = sum(len(c["left"]) for c, last in zip(cohorts, ends, strict=True) if last)
        others, seen = pool - over, 0
        drawn: list[Document] = []
        for cohort, last in zip(cohorts, ends, strict=True):
            left = cohort["left"]
            count = len(left)
            if not last:
                draw = max(0, pool - stays - over)
                count = draw * (seen + len(left)) // others - draw * seen // others
                seen += len(left)
            drawn += left[:count]
            cohort["left"] = left[count:]
        if drawn:
            yield shuffled(drawn, key_of(key, 1, cycle))


def next_piece(held: list[int], room: int) -> int | None:
    """Which of the pieces that wait, oldest first, comes next into a row."""
    fitting = [length for length in held if length <= room]
    if not fitting:
        return None
    longest = held.index(max(fitting))
    mean = Fraction(sum(held), len(held))
    if max(fitting) == room or room < mean * 3 / 2:
        return longest
    if room >= mean * 5 / 2 and held[0] <= room:
        return 0
    best, most = longest, max(fitting)
    for k, length in enumerate(held[:1024]):
        others = [other for at, other in enumerate(held) if at != k and other <= room - length]
        if others and length + max(others) > most:
            best, most = k, length + max(others)
    return best


def rows_by_definition(case: dict[str, Any]) -> list[list[Segment]]:
    """All rows of a plan over finished sources."""
    config: PlanConfig = case["config"]
    sources: list[list[list[int]]] = case["shards"]
    total = sum(case["weights"])
    pools = [
        itertools.chain.from_iterable(cycles(shards, config, weight / total, number))
        for number, (shards, weight) in enumerate(zip(sources, case["weights"], strict=True))
    ]
    credit = [0.0] * len(sources)
    over: set[int] = set()
    rows: list[list[Segment]] = []

    def documents() -> Iterator[Segment]:
        """The next document of the source that is furthest behind, the first of several such."""
        while len(over) < len(sources):
            weights = next(
                shares
                for row, shares in reversed([(0, case["weights"]), *case["stages"]])
                if row <= len(rows)
            )
            used = [0.0 if k in over else weight for k, weight in enumerate(weights)]
            shares = [weight / sum(used) for weight in used]
            there = [k for k in range(len(sources)) if k not in over]
            best = max(there, key=lambda k: (credit[k], -k))
            document = next(pools[best], None)
            if document is None:
                over.add(best)
                continue
            passed, shard, row = document
            length = kept = sources[best][shard][row]
            if length > config.seq_len and config.long != "split":
                kept = config.seq_len if config.long == "crop" else 0
            if length < 0:
                continue  # banned: as if it were not there
            amount = 1.0 if config.weigh == "samples" else float(kept)
            for k, share in enumerate(shares):
                credit[k] += share * amount
            credit[best] -= amount
            if kept:
                yield best, passed, shard, row, 0, kept

    def pieces(most: Any) -> Iterator[Segment]:
        for source, passed, shard, row, _, left in documents():
            at = 0
            while left:
                taken = min(left, most())
                yield source, passed, shard, row, at, taken
                at, left = at + taken, left - taken

    filling: list[Segment] = []
    if config.pack == "bestfit":
        coming = pieces(lambda: config.seq_len)
        held: list[Segment] = []
        while True:
            want = min(config.buffer_pieces, 32 + len(rows)) - len(held)
            held += itertools.islice(coming, max(0, want))
            if not held:
                return rows
            filling = [held.pop(0)]
            while True:
                room = config.seq_len - sum(piece[5] for piece in filling)
                best = next_piece([piece[5] for piece in held], room)
                if best is None:
                    break
                filling.append(held.pop(best))
            rows.append(filling)
    for piece in pieces(lambda: config.seq_len - sum(piece[5] for piece in filling)):
        filling.append(piece)
        if config.pack == "pad" or sum(piece[5] for piece in filling) == config.seq_len:
            rows.append(filling.copy())
            filling.clear()
    return [*rows, filling] if filling else rows


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Sources, weights and a config; some documents are banned, below zero as sources say it."""
    count = draw(st.integers(1, 3))
    pool = draw(st.integers(1, 40))
    lengths = st.one_of(st.integers(0, 12), st.integers(-20, -1), st.integers(0, 90))
    shards = st.lists(st.lists(lengths, min_size=1, max_size=12), min_size=1, max_size=7)
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


def make(case: dict[str, Any], **options: Any) -> Plan:
    sources = [MadeSource(f"s{k}", found) for k, found in enumerate(case["shards"])]
    return Plan(sources, case["config"], case["weights"], stages=case["stages"], **options)


def rows_of(plan: Plan, count: int = 1 << 30, at_once: int = 64) -> list[list[Segment]]:
    """The next `count` rows of a plan, fewer at its end."""
    found: list[list[Segment]] = []
    while len(found) < count:
        size = min(at_once, count - len(found))
        rows = plan.take(size)
        parts: list[list[Segment]] = [[] for _ in rows.fills]
        for row, *segment in rows.segments.tolist():
            parts[row].append(tuple(segment))
        found += parts
        if len(rows.fills) < size:
            break
    return found


SMALL_FIRST_SHARD: dict[str, Any] = {
    "shards": [[[1], [1] * 12, [1] * 12]],
    "weights": [1.0],
    "config": PlanConfig(seq_len=1, pool_size=40, refill_threshold=0, ramp=True, epochs=2),
    "stages": [],
}
"""A ramp that would still hold back shards of the second pass: it is for the first one only."""


@settings(max_examples=300, deadline=None)
@given(cases())
@example(SMALL_FIRST_SHARD)
def test_the_rows_are_those_of_the_definition(case: dict[str, Any]) -> None:
    assert rows_of(make(case)) == rows_by_definition(case)


def test_all_orders_are_equally_likely() -> None:
    """Of four, over 24,000 keys: each of the 24 orders a thousand times, within four sigma."""
    shuffle = Kernel("penstock.stream.plan_kernel", "shuffle", "void(int32[::1], uint64, int64)")
    found: Counter[bytes] = Counter()
    for key in range(24_000):
        order = np.arange(4, dtype=np.int32)
        shuffle(order, key, 0)
        found[order.tobytes()] += 1
        for first in range(5):  # an order that is needed from there on alone
            part = np.arange(4, dtype=np.int32)
            shuffle(part, key, first)
            assert part[first:].tolist() == order[first:].tolist()
    assert len(found) == 24
    assert all(abs(count - 1000) < 125 for count in found.values())


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from(["reweight", "repeat"]), st.randoms(), st.data())
def test_a_plan_that_went_on_without_a_source_resumes_anywhere(
    case: dict[str, Any], behind: str, dice: Any, data: st.DataObject
) -> None:
    """Whether a source was behind is decided once, by its question's number: as ranks do it."""
    answers = [bool(dice.random() < 0.5) for _ in range(64)]
    options = {
        name: getattr(case["config"], name)
        for name in PlanConfig.__slots__
        if name not in ("behind", "rest_samples", "repeat_cap")
    }
    case["config"] = PlanConfig(
        **options, behind=behind, rest_samples=data.draw(st.integers(1, 9)), repeat_cap=2
    )

    def decide(source: int, number: int, ready: bool) -> bool:
        return answers[(source * 17 + number) % 64]

    whole = rows_of(make(case, decide=decide), 300)
    plan, found = make(case, decide=decide), []
    for _ in range(data.draw(st.integers(1, 4))):
        found += rows_of(plan, data.draw(st.integers(0, 9)), 1)
        state = json.loads(json.dumps(plan.state()))
        plan = make(case, decide=decide)
        plan.restore(state)
        assert plan.state() == state
    assert (found + rows_of(plan, 300))[:300] == whole


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(0, 20), st.integers(1, 3))
def test_a_state_names_no_tokens_beyond_the_end_of_a_document(
    case: dict[str, Any], rows: int, beyond: int
) -> None:
    plan = make(case)
    rows_of(plan, rows)
    state = json.loads(json.dumps(plan.state()))
    held = [*state["pieces"], *([state["open"]] if state["open"][5] else [])]
    for piece in held:
        source, _, shard, row, at, size = piece[:6]
        length = case["shards"][source][shard][row]
        assert at + size <= length
        piece[4] = length - size + beyond
        with pytest.raises(StateMismatch, match="names a document that is not there") as caught:
            make(case).restore(state)
        assert f"row {row}, {size} tokens from {piece[4]} on" in caught.value.why
        piece[4] = at
    make(case).restore(state)
