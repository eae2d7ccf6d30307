"""Lanes: a rank needs the shards of its own lanes and no others, and the batches are as defined."""

import hashlib
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from penstock import ConversationDataLoader, MixedDataLoader, PlanConfig, PretrainDataLoader
from penstock.errors import BadConfig, StateMismatch
from penstock.stream.lanes import Lanes
from penstock.supply import pretrain
from penstock.supply.batch import RowBatch
from penstock.supply.engine import Engine
from penstock.supply.settings import with_checksum
from penstock.tokenize.tokenizer import Tokenizer

from .datasets import GrowingDataset, made_documents
from .memory_source import ChatSource, MemorySource
from .nested import nested

SEQ = 48


def made(shards: int, sources: int = 1, rows: int = 12) -> list[list[list[list[int]]]]:
    """Documents by source and shard."""
    random = np.random.default_rng(7)
    return [
        [made_documents(random, rows, 40, first=1000 * s + 40 * k) for k in range(shards)]
        for s in range(sources)
    ]


class Watched(MemorySource):
    """Knows which shards somebody looked at."""

    def __init__(self, *given: Any) -> None:
        self.counted: set[int] = set()
        self.decoded: set[int] = set()
        super().__init__(*given)

    def _read_lengths(self, shard: int) -> Any:
        self.counted.add(shard)
        return super()._read_lengths(shard)

    def decode(self, shard: int) -> Any:
        self.decoded.add(shard)
        return super().decode(shard)


def opened(
    contents: list[list[list[list[int]]]], kind: type[MemorySource] = MemorySource, **options: Any
) -> PretrainDataLoader:
    sources = {f"s{k}": kind(f"s{k}", one, None, [1]) for k, one in enumerate(contents)}
    given = {
        "chunk_size": SEQ, "global_batch_size": 16, "ramp": False, "seed": 5,
        "weights": [1.0] * len(contents), **options,
    }  # fmt: skip
    return PretrainDataLoader(sources, **nested(**given))


def same(found: list[RowBatch], expected: list[RowBatch]) -> bool:
    return len(found) == len(expected) and all(
        (a.input_ids == b.input_ids).all() and (a.labels == b.labels).all()
        for a, b in zip(found, expected, strict=True)
    )


# The definition


def dealt(shards: list[list[list[int]]], lanes: int, rows: int = 0) -> list[list[int]]:
    """Each shard to the lane with the fewest tokens for each of its rows, the first of several."""
    rows = rows or lanes
    sizes = [sum(row * lanes // rows == lane for row in range(rows)) for lane in range(lanes)]
    loads, found = [Fraction(0)] * lanes, [[] for _ in range(lanes)]  # type: ignore[var-annotated]
    for number, documents in enumerate(shards):
        lane = loads.index(min(loads))
        loads[lane] += Fraction(sum(map(len, documents)), sizes[lane])
        found[lane].append(number)
    return found


def mixed(key: int, number: int) -> int:
    """splitmix64, as in the definition of the pool."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    return mix(key ^ mix(number & mask))


@pytest.mark.parametrize(("lanes", "rows"), [(4, 16), (5, 16), (16, 16), (3, 10)])
@pytest.mark.parametrize("pack", ["pad", "concat", "bestfit"])
def test_a_lane_is_the_plan_of_its_own_shards(lanes: int, rows: int, pack: str) -> None:
    contents = made(40, sources=2)
    plain: dict[str, Any] = {
        "pool_size": 200,
        "pool_tokens": 6000,
        "buffer_pieces": 100,
        "pack": pack,
        "epochs": 2,
    }
    parts = [dealt(shards, lanes, rows) for shards in contents]
    alone: list[list[Any]] = []
    for lane in range(lanes):
        key = mixed(mixed(mixed(0, 5), 0x1A9E), lane)
        options: dict[str, Any] = {
            **plain, "seed": key, "pool_size": 200 // lanes, "pool_tokens": 6000 // lanes,
            "buffer_pieces": 64, "global_batch_size": 1,
        }  # fmt: skip
        mine = [
            [shards[k] for k in part[lane]] for shards, part in zip(contents, parts, strict=True)
        ]
        alone.append([batch.input_ids[0].tolist() for batch in opened(mine, **options)])
    with opened(contents, lanes=lanes, global_batch_size=rows, **plain) as loader:
        found = [batch.input_ids.tolist() for batch in loader]
    taken = [0] * lanes
    for batch in found:
        for row, ids in enumerate(batch):
            lane = row * lanes // rows
            expected = [0] * SEQ
            if taken[lane] < len(alone[lane]):
                expected = alone[lane][taken[lane]]
            taken[lane] += 1
            assert ids == expected
    assert all(taken[lane] >= len(alone[lane]) for lane in range(lanes)), "no row is lost"
    sizes = [sum(row * lanes // rows == lane for row in range(rows)) for lane in range(lanes)]
    assert len(found) == max(-(-len(a) // b) for a, b in zip(alone, sizes, strict=True))


@pytest.mark.parametrize(("lanes", "rows"), [(5, 8), (6, 16), (7, 10)])
def test_lanes_with_other_numbers_of_rows_end_together(lanes: int, rows: int) -> None:
    contents = [[[[7] * 8 for _ in range(16)] for _ in range(160)]]
    options: dict[str, Any] = {"pack": "concat", "epochs": 1, "global_batch_size": rows}
    with opened(contents, lanes=lanes, **options) as loader:
        batches = sum(1 for _ in loader)
        (ledger,) = loader.ledger()
    assert ledger.padded < 0.1 * batches * rows * SEQ, "lanes of one row ran on alone"


BEFORE = {
    ("pad", 30): "b95eb8884922a9de",
    ("pad", 500): "255aa254b6e83be2",
    ("concat", 30): "5557818f28998f0a",
    ("concat", 500): "2d069b73b11ea243",
    ("bestfit", 30): "c46ca02f47f0eab7",
    ("bestfit", 500): "7957fa9e21a81f2f",
}
"""Recorded with the plan as it was before there were lanes."""


@pytest.mark.parametrize(("pack", "pool"), list(BEFORE))
def test_one_lane_gives_the_batches_of_before(pack: str, pool: int) -> None:
    random = np.random.default_rng(7)
    contents = [
        [made_documents(random, 25, 40, first=1000 * s + 40 * k) for k in range(9)]
        for s in range(2)
    ]
    options: dict[str, Any] = {
        "pack": pack,
        "pool_size": pool,
        "epochs": 2,
        "weights": [1.0, 2.5],
        "lanes": 1,
    }
    found = hashlib.sha256()
    for batch in opened(contents, global_batch_size=8, **options):
        found.update(batch.input_ids.tobytes())
        found.update(batch.labels.tobytes())
    assert found.hexdigest()[:16] == BEFORE[pack, pool]


# What a rank reads


@pytest.mark.parametrize("world", [1, 2, 4, 8, 16])
def test_a_rank_looks_at_the_shards_of_its_own_lanes_alone(world: int) -> None:
    contents = made(64)
    seen: list[int] = []
    for rank in range(world):
        loader = opened(
            contents, Watched, lanes=16, rank=rank, world_size=world, epochs=None, pool_size=200
        )
        batches = iter(loader)
        for _ in range(30):
            next(batches)
        (source,) = loader.sources
        assert isinstance(source, Watched)
        mine = {k for lane in loader._engine._lanes.own for k in dealt(contents[0], 16)[lane]}  # type: ignore[union-attr]
        assert source.decoded == source.counted == mine
        seen += source.decoded
        loader.close()
    assert sorted(seen) == list(range(64))


@pytest.mark.parametrize(("world", "most"), [(3, 2), (5, 2), (7, 2), (6, 2)])
def test_other_numbers_of_ranks_need_two_lanes_more_at_the_most(world: int, most: int) -> None:
    for rank in range(world):
        part = 64 * rank // world, 64 * (rank + 1) // world
        assert len(Lanes(64, 64, part).own) <= -(-64 // world) + most


def test_every_row_of_a_batch_is_of_one_lane() -> None:
    for count in range(1, 20):
        for unit in range(count, 40):
            lanes = Lanes(count, unit, (0, unit))
            spans = [range(*lanes.rows(lane)) for lane in range(count)]
            assert [row for span in spans for row in span] == list(range(unit))
            assert all(row * count // unit == k for k, span in enumerate(spans) for row in span)
            for first in range(unit):
                for last in range(first + 1, unit + 1):
                    own = Lanes(count, unit, (first, last)).own
                    assert [*own] == sorted({row * count // unit for row in range(first, last)})


# States and counts


READ = "trained", "context", "cropped", "skipped", "waiting"


def test_a_state_of_an_earlier_batch_is_that_of_any_rank() -> None:
    contents = made(32)
    states = []
    for rank in range(4):
        with opened(contents, lanes=16, rank=rank, world_size=4, epochs=2) as loader:
            batches = iter(loader)
            taken = [next(batches) for _ in range(9)]
            later = loader.state_dict()
            earlier = loader.state_dict(step=4)
            loader.load_state_dict(json.loads(json.dumps(earlier)))
            assert same([next(iter(loader)) for _ in range(1)], taken[4:5])
            loader.load_state_dict(later)
            for state in (earlier, later):
                state.pop("sum")
                state["lanes"] = [_position(one) for one in state["lanes"]]
            (line,) = later["ledger"]  # what was read depends on how far a rank has planned
            told = [line[name] for name in ("trained", "context", "padded", "cropped")]
            assert line["read"] == sum(line[name] for name in READ)
            states.append((earlier["lanes"], later["lanes"], told))
    assert states == [states[0]] * 4


def _position(lane: dict[str, Any]) -> int:
    row: int = lane["plan"]["row"] + lane["skip"]
    return row


def test_rounds_with_lanes_that_end_at_different_batches() -> None:
    random = np.random.default_rng(3)
    contents = [[made_documents(random, size, 40) for size in (40, 3, 5, 30, 2, 9, 1, 6)]]
    with opened(contents, lanes=8, epochs=1) as loader:
        whole = [[*loader] for _ in range(3)]
        assert len(whole[0]) == opened(contents, lanes=8).get_num_batches()
        lines = loader.ledger()
    places = sum(len(epoch) for epoch in whole) * 16 * SEQ
    assert sum(line.trained + line.context + line.padded for line in lines) == places
    for world in (2, 8):
        ranks = [opened(contents, lanes=8, rank=r, world_size=world) for r in range(world)]
        for expected in whole:
            parts = [[*rank] for rank in ranks]
            assert {len(part) for part in parts} == {len(expected)}
            for batches in zip(expected, *parts, strict=True):
                ids = np.concatenate([one.input_ids for one in batches[1:]])
                assert (ids == batches[0].input_ids).all()
            states = [json.loads(json.dumps(rank.state_dict())) for rank in ranks]
            ranks = [opened(contents, lanes=8, rank=r, world_size=world) for r in range(world)]
            for rank, state in zip(ranks, states[::-1], strict=True):
                rank.load_state_dict(state)
        assert all(rank.ledger() == lines for rank in ranks)


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_state_of_the_end_of_an_epoch_leads_to_the_next_one(lanes: int) -> None:
    """Documents after the last row are read with their own epoch, also where it was resumed."""
    random = np.random.default_rng(11)
    contents = [
        [made_documents(random, 9, 60, first=1000 * s + 40 * k) for k in range(8)] for s in range(2)
    ]
    options: dict[str, Any] = {
        "lanes": lanes, "long": "drop", "pack": "pad", "weights": [1.0, 3.0], "pool_size": 8,
    }  # fmt: skip
    with opened(contents, **options) as loader:
        whole = [[batch.input_ids for batch in loader] for _ in range(4)]
    for world in (1, 2):
        ranks = [opened(contents, rank=r, world_size=world, **options) for r in range(world)]
        for expected in whole:
            found = [[batch.input_ids for batch in rank] for rank in ranks]
            for ids, *parts in zip(expected, *found, strict=True):
                assert (np.concatenate(parts) == ids).all()
            state = json.loads(json.dumps(ranks[-1].state_dict()))
            ranks = [opened(contents, rank=r, world_size=world, **options) for r in range(world)]
            for rank in ranks:
                rank.load_state_dict(state)


def test_ranks_end_together_though_weights_change_while_some_lanes_are_over() -> None:
    random = np.random.default_rng(3)
    sizes = (3, 40, 2, 38, 1, 41)
    contents = [[made_documents(random, n, 40, first=1000 * s) for n in sizes] for s in range(2)]
    options: dict[str, Any] = {"lanes": 2, "pack": "pad", "long": "drop", "global_batch_size": 2}
    for change in (3, 20, 40, 60):
        ends = []
        for rank in range(2):
            with opened(contents, rank=rank, world_size=2, **options) as loader:
                for step, _ in enumerate(loader):
                    if step == change:
                        loader.change_weights([1.0, 0.0])
                ends.append(loader.step)
        assert ends[0] == ends[1]


def test_batches_of_data_that_has_too_few_shards_so_far_are_counted() -> None:
    live = {"s0": MemorySource("s0", made(16)[0], 2, [1])}
    options = nested(chunk_size=SEQ, global_batch_size=16, lanes=8, weights=[1.0], ramp=True)
    with PretrainDataLoader(live, **options) as loader:
        assert not loader.get_num_batches().final


def test_a_batch_of_several_ranks_does_not_say_what_the_others_have() -> None:
    with opened(made(32), lanes=16, rank=1, world_size=2) as loader:
        batch = next(iter(loader))
    with pytest.raises(BadConfig, match="does not say how many tokens all ranks train"):
        _ = batch.num_loss_tokens
    with opened(made(32), lanes=16) as loader:
        batch = next(iter(loader))
        assert batch.num_loss_tokens == int((batch.labels != -100).sum())


def test_positions_for_the_disk_limit_name_the_first_shard_of_any_lane(tmp_path: Any) -> None:
    dataset = GrowingDataset(tmp_path / "data")
    for documents in made(24)[0]:
        dataset.add(documents)
    dataset.seal()
    options = nested(
        chunk_size=SEQ, batch_size=8, lanes=4, pool_size=16, ramp=False, reader="me", epochs=1
    )
    with PretrainDataLoader(tmp_path / "data", **options) as loader:
        used: list[set[int]] = []
        states = []
        for batch in loader:
            used.append({*batch.segments[:, 3].tolist()})
            states.append(loader.state_dict())
        for k, state in enumerate(states):
            loader.release(state)
            told = json.loads((tmp_path / "data" / "_position" / "me.json").read_text())
            later = set[int]().union(*used[k + 1 :])
            assert not later or told["shard"] <= min(later)
        assert told["shard"] > 0


def test_several_batches_are_looked_at_as_they_will_come() -> None:
    options: dict[str, Any] = {"lanes": 8, "weight_schedule": {3: [1.0, 5.0]}}
    with opened(made(24, sources=2), **options) as loader:
        total = int(loader.get_num_batches())
        for step, batch in enumerate(loader):
            if step == 2:
                rows = loader.peek(total)  # more than there are: all that are left
                assert len(rows.fills) == (total - 3) * 16
                ahead, taken = loader.peek(4), 0
            elif 2 < step < 7:
                mine = ahead.part(taken, taken + 16)
                assert (mine.segments == batch.segments).all()
                assert (mine.fills == batch.fills).all()
                taken += 16
        assert [loader.weights_at(16 * step) for step in (2, 3)] == [[0.5, 0.5], [1 / 6, 5 / 6]]


# Refusals


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lanes": 17}, "lanes is 17, and a batch has 16 rows over all ranks"),
        ({"lanes": 4, "last": "drop"}, "lanes is 4, with last='drop'"),
        ({"lanes": 4, "batch_tokens": 4096}, "lanes is 4, with batch_tokens"),
        ({"lanes": 0}, "lanes is 0"),
    ],
)
def test_settings_that_lanes_cannot_keep_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        opened(made(32), **options)


def test_a_source_with_fewer_shards_than_lanes_is_refused_live_or_finished() -> None:
    told = 'source "s0" has 6 shards for 8 lanes'
    with pytest.raises(BadConfig, match=told), opened(made(6), lanes=8) as loader:
        next(iter(loader))
    live = {"s0": MemorySource("s0", made(6)[0], 2, [1])}
    options = nested(chunk_size=SEQ, global_batch_size=16, lanes=8, weights=[1.0])
    with pytest.raises(BadConfig, match=told), PretrainDataLoader(live, **options) as loader:
        next(iter(loader))


def test_empty_shards_do_not_count_as_shards_for_lanes() -> None:
    contents = made(9)
    contents[0][2] = contents[0][5] = []
    told = 'source "s0" has 7 shards for 8 lanes'
    with pytest.raises(BadConfig, match=told) as caught, opened(contents, lanes=8) as loader:
        next(iter(loader))
    assert "choose lanes of 7 at most" in str(caught.value)
    with opened(contents, lanes=7) as loader:
        assert next(iter(loader)).input_ids.shape == (16, SEQ)


def test_other_batches_than_those_of_the_lanes_are_refused() -> None:
    with opened(made(32), lanes=4) as loader:
        with pytest.raises(BadConfig, match="get_batch of 5 rows over all ranks with 4 lanes"):
            loader.get_batch(5)
        assert loader.get_batch(16).input_ids.shape == (16, SEQ)


@pytest.mark.parametrize("changed", [{"lanes": 8}, {"lanes": 1}, {"global_batch_size": 32}])
def test_a_state_of_other_lanes_is_refused(changed: dict[str, Any]) -> None:
    with opened(made(32), lanes=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with (
        opened(made(32), **{"lanes": 4, **changed}) as other,
        pytest.raises(StateMismatch, match=next(iter(changed))),
    ):
        other.load_state_dict(state)


def test_a_mixture_of_loaders_takes_turns_with_one_that_has_lanes() -> None:
    a, b = opened(made(32), lanes=4), opened(made(32))
    with MixedDataLoader({"a": a, "b": b}, weights={"a": 1.0, "b": 1.0}) as loader:
        assert not loader.can_skip
        next(iter(loader))
    parts = {
        "a": opened(made(32), lanes=4, world_size=2, rank=0),
        "b": opened(made(32), world_size=2, rank=0),
    }
    with pytest.raises(BadConfig, match="'a' has 4 lanes, in a mixture on 2 ranks"):
        MixedDataLoader(parts, weights={"a": 1.0, "b": 1.0})


def test_conversations_have_one_lane(chat_tokenizer: Tokenizer) -> None:
    source = {"s0": ChatSource("s0", made(8)[0], None, [1])}
    plan = PlanConfig(lanes=4)
    with pytest.raises(BadConfig, match="lanes is 4 for conversations"):
        ConversationDataLoader(source, chat_tokenizer, SEQ, batch_size=8, plan=plan)


# What is told


def test_a_run_on_several_hosts_is_told_once_what_lanes_would_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(pretrain, "_advised", set())
    opened(made(32), rank=0, world_size=4).close()
    assert not caplog.records, "only who reads is told"
    for rank in (0, 1, 2, 3, 0):  # the last one is another loader of the same data
        with opened(made(32), rank=rank, world_size=4) as loader:
            next(iter(loader))
    (told,) = [one.getMessage() for one in caplog.records if "lanes" in one.getMessage()]
    assert "each of 2 hosts reads all 0.0 GB" in told
    assert "PlanConfig(lanes=16)" in told
    caplog.clear()
    monkeypatch.setattr(pretrain, "_advised", set())
    with opened(made(32), rank=0, world_size=4, lanes=4) as loader:
        next(iter(loader))
    with opened(made(32), rank=0, world_size=4) as loader:  # which would refuse lanes
        next(iter(MixedDataLoader({"a": loader}, stop="first")))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with opened(made(32), rank=0, world_size=4) as loader:
        next(iter(loader))
    assert not [one for one in caplog.records if "PlanConfig(lanes" in one.getMessage()]


def test_the_lanes_that_are_advised_have_as_many_rows_each(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(pretrain, "_advised", set())
    with opened(made(30), rank=0, world_size=4, global_batch_size=64) as loader:
        next(iter(loader))
    assert "PlanConfig(lanes=16)" in caplog.text, "28 lanes would have 2 or 3 rows each"


def test_padding_of_lanes_that_end_apart_is_told(caplog: pytest.LogCaptureFixture) -> None:
    contents = [[[[7] * 8 for _ in range(20)] for _ in range(16)]]
    options: dict[str, Any] = {"lanes": 8, "pack": "concat", "epochs": 2}

    def told(contents: list[list[list[list[int]]]]) -> float:
        """The share of padding that came, of which a word was said if it was large."""
        caplog.clear()
        for rank in range(2):
            with opened(contents, rank=rank, world_size=2, **options) as loader:
                batches = sum(1 for _ in loader)
                (ledger,) = loader.ledger()
        return float(ledger.padded / (batches * 16 * SEQ))

    assert told(contents) < 0.05
    assert "padding" not in caplog.text
    contents[0].append([[7] * 8 for _ in range(200)])  # one giant shard
    share = told(contents)
    (line,) = [one.getMessage() for one in caplog.records if "padding" in one.getMessage()]
    assert "the fullest of 8 lanes" in line
    assert abs(float(line.split("%")[0].split()[-1]) / 100 - share) < 0.05


def test_far_too_many_lanes_are_refused_before_there_is_a_plan_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Engine, "_lane_plan", None)
    with pytest.raises(BadConfig, match='source "s0" has 6 shards for 65536 lanes'):
        opened(made(6), lanes=1 << 16, global_batch_size=1 << 16)


def test_a_state_of_lanes_that_were_dealt_otherwise_is_refused() -> None:
    with opened(made(32), lanes=5) as loader:
        next(iter(loader))
        state = loader.state_dict()
        assert state["config"].pop("dealt") == "by rows"
        with pytest.raises(StateMismatch, match="dealt: the state has None"):
            loader.load_state_dict(with_checksum(state))
    with opened(made(32), lanes=4) as loader:
        assert "dealt" not in loader.state_dict()["config"]
