"""Batches of rollouts: whole groups, each once, the same on every rank and after every resume."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import (
    BadConfig,
    BadInput,
    BadRollout,
    InputMissing,
    ProducerStalled,
    StateMismatch,
)
from penstock.rollout import plan as plan_module
from penstock.rollout import sources as sources_module
from penstock.rollout.advantages import AdvantageConfig, Scored, compute_advantages
from penstock.rollout.batch import RolloutBatch
from penstock.rollout.check import check_records
from penstock.rollout.loader import RolloutDataLoader
from penstock.rollout.plan import RolloutConfig
from penstock.rollout.records import CONFIG
from penstock.rollout.writer import RolloutWriter
from penstock.store.log import LogWriter, SharedLog
from penstock.store.store import open_store
from penstock.supply.balance import BalanceConfig
from penstock.supply.settings import LoaderRun

from .made import Record, groups, rollout


def batches(loader: RolloutDataLoader) -> list[RolloutBatch]:
    with loader:
        return list(loader)


def ids(found: list[RolloutBatch]) -> list[list[str]]:
    return [sorted(batch.rollout_ids) for batch in found]


def uneven(seed: int, count: int = 40) -> list[Record]:
    """Groups of different sizes, mixed up; they do not say how large they are."""
    rng = np.random.default_rng(seed)
    made = [
        rollout(f"g{k}r{n}", f"g{k}", group_size=None)
        for k in range(count)
        for n in range(int(rng.integers(1, 6)))
    ]
    return [made[k] for k in rng.permutation(len(made))]


@given(
    seed=st.integers(0, 99),
    size=st.integers(1, 30),
    ranks=st.integers(1, 4),
    cap=st.sampled_from([None, 12, 40]),
    packed=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_whole_groups_once_whatever_the_ranks(
    seed: int, size: int, ranks: int, cap: int | None, packed: bool
) -> None:
    made = uneven(seed)
    group_of = {one["rollout_id"]: one["group_id"] for one in made}
    members = {g: sum(1 for v in group_of.values() if v == g) for g in group_of.values()}
    by_rank = [
        batches(
            RolloutDataLoader(
                made, batch_size=size, pack=packed, balance=BalanceConfig(max_tokens=cap),
                run=LoaderRun(rank=rank, world_size=ranks),
            )
        )
        for rank in range(ranks)
    ]  # fmt: skip
    seen: list[str] = []
    for parts in zip(*by_rank, strict=True):
        together = [name for part in parts for name in part.rollout_ids]
        assert len(together) >= size * ranks or parts is not parts[:0]
        seen += together
        held: dict[str, int] = {}
        for name in together:
            held[group_of[name]] = held.get(group_of[name], 0) + 1
        assert all(members[g] == n for g, n in held.items())
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert len({part.num_loss_tokens for part in parts}) == 1
        assert sum(int(part.loss_mask.sum()) for part in parts) == parts[0].num_loss_tokens
        for part in parts:
            inside = [name for micro in part.micro_batches for name in micro.rollout_ids]
            assert inside == part.rollout_ids
            for micro in part.micro_batches:
                assert cap is None or int(micro.fills.sum()) <= cap
                assert micro.advantages is not None
                assert np.isfinite(micro.advantages).all()
    assert sorted(seen) == sorted(group_of)


def test_what_stands_on_a_batch() -> None:
    made = groups(2)
    checked = check_records(made).rollouts
    (batch,) = batches(RolloutDataLoader(made, batch_size=8))
    expected = compute_advantages(
        Scored(checked.totals(), checked.groups(), checked.completion_at, checked.mask)
    )
    assert batch.advantages is not None
    assert batch.returns is not None
    assert batch.old_logprobs is not None
    for row, name in enumerate(batch.rollout_ids):
        k = next(k for k, one in enumerate(made) if one["rollout_id"] == name)
        prompt, completion = made[k]["prompt_ids"], made[k]["completion_ids"]
        size = len(prompt) + len(completion)
        assert batch.fills[row] == size
        assert batch.input_ids[row, :size].tolist() == [*prompt, *completion]
        span = slice(len(prompt), size)
        mask = np.array(made[k]["completion_mask"], np.bool_)
        assert batch.loss_mask[row, span].tolist() == mask.tolist()
        assert not batch.loss_mask[row, : len(prompt)].any()
        assert not batch.loss_mask[row, size:].any()
        labels = np.where(mask, completion, -100)
        assert batch.labels[row, span].tolist() == labels.tolist()
        assert (batch.labels[row, : len(prompt)] == -100).all()
        own = slice(checked.completion_at[k], checked.completion_at[k + 1])
        assert batch.advantages[row, span].tolist() == expected.advantages[own].tolist()
        logprobs = np.where(mask, np.float32(made[k]["logprobs"]), 0)
        assert batch.old_logprobs[row, span].tolist() == logprobs.tolist()
        assert batch.rewards[row] == np.float32(made[k]["reward"])
        assert batch.group_ids[row] == made[k]["group_id"]
        assert batch.versions[row] == 0
    assert batch.attention_mask is not None
    assert (batch.attention_mask.sum(1) == batch.fills).all()
    assert batch.num_sequences == 8
    assert batch.metadata["groups"] == 2
    assert "8 sequences" in repr(batch)


def test_packed_rows_say_where_sequences_begin() -> None:
    made = groups(2)
    (padded,) = batches(RolloutDataLoader(made, batch_size=8))
    (packed,) = batches(RolloutDataLoader(made, batch_size=8, pack=True))
    assert packed.input_ids.shape == (1, padded.fills.sum())
    assert np.diff(packed.cu_seqlens).tolist() == padded.fills.tolist()
    assert packed.attention_mask is None
    flat = padded.input_ids[padded.attention_mask == 1]
    assert packed.input_ids[0].tolist() == flat.tolist()
    assert packed.position_ids[0].tolist() == [k for n in padded.fills for k in range(n)]
    assert packed.labels[0].tolist() == padded.labels[padded.attention_mask == 1].tolist()


@pytest.mark.torch
def test_tensors() -> None:
    (batch,) = batches(RolloutDataLoader(groups(1), batch_size=4))
    moved = batch.to("cpu")
    assert batch.advantages is not None
    assert moved.advantages.tolist() == batch.advantages.tolist()
    assert moved.old_logprobs.shape == moved.input_ids.shape
    assert moved.old_values is None
    assert moved.num_loss_tokens == batch.num_loss_tokens


def test_without_advantages() -> None:
    (batch,) = batches(RolloutDataLoader(groups(1), None, False, batch_size=4))
    assert batch.advantages is None
    assert batch.returns is None
    assert len(batch.rewards) == 4


def written(path: Path, made: list[Record], each: int = 3, *, seal: bool = True) -> str:
    """A dataset of records of so many rollouts each."""
    with RolloutWriter(path) as writer:
        for first in range(0, len(made), each):
            writer.write_many(made[first : first + each])
        if seal:
            writer.seal()
    return str(path)


@pytest.mark.parametrize("source", ["list", "dataset"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_a_state_resumes_exactly(tmp_path: Path, source: str, repeats: int) -> None:
    made = groups(11)
    order = np.random.default_rng(1).permutation(len(made))
    made = [made[k] for k in order]
    data: Any = made if source == "list" else written(tmp_path / "d", made)
    config = RolloutConfig(repeats=repeats, epochs=2)

    def loader() -> RolloutDataLoader:
        return RolloutDataLoader(data, batch_size=8, rollouts=config)

    ended = loader()
    whole = batches(ended)
    first = loader()
    for stop in range(len(whole) + 1):
        state = json.loads(json.dumps(first.state_dict()))
        if stop < len(whole):
            first.get_batch(8)
        if source == "dataset" and stop % 3:
            continue
        second = loader()
        second.load_state_dict(state)
        assert second.step == stop
        rest = batches(second)
        assert [one.rollout_ids for one in rest] == [one.rollout_ids for one in whole[stop:]]
        assert second.counts == ended.counts
    first.close()


def test_no_rollout_is_lost_or_doubled_when_the_ranks_change() -> None:
    made = groups(20)
    seen: list[str] = []
    state: dict[str, Any] | None = None
    for ranks, steps in ((1, 2), (4, 1), (2, 2), (1, 99)):
        loaders = [
            RolloutDataLoader(made, batch_size=8, run=LoaderRun(rank=rank, world_size=ranks))
            for rank in range(ranks)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for k, batch in enumerate(loader):
                seen += batch.rollout_ids
                if k + 1 == steps:
                    break
        state = loaders[-1].state_dict()
        for loader in loaders:
            loader.close()
    assert sorted(seen) == sorted(one["rollout_id"] for one in made)


def test_live_is_finished(tmp_path: Path) -> None:
    """A loader that is always ahead of the writer gets what one gets from the sealed dataset."""
    made = groups(9)
    made = [made[k] for k in np.random.default_rng(2).permutation(len(made))]
    writer = RolloutWriter(tmp_path / "d")
    live = RolloutDataLoader(str(tmp_path / "d"), batch_size=4, run=LoaderRun(stall_s=0.01))
    found: list[RolloutBatch] = []
    for one in made:
        writer.write(one)
        while True:
            try:
                found.append(live.get_batch(4))
            except ProducerStalled:  # an error takes nothing
                break
    writer.seal()
    with pytest.raises(StopIteration) as ended:
        live.get_batch(4)
    assert str(ended.value).startswith("no batch is left: epoch 0 has ended, 9 batches were")
    finished = batches(RolloutDataLoader(str(tmp_path / "d"), batch_size=4))
    assert [one.rollout_ids for one in found] == [one.rollout_ids for one in finished]
    assert len(found) == 9
    live.close()


def test_all_kinds_of_data(tmp_path: Path) -> None:
    made = groups(3)
    expected = ids(batches(RolloutDataLoader(made, batch_size=4)))
    table = check_records(made).rollouts.to_table()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    pq.write_table(table, tmp_path / "b.parquet")
    folder = tmp_path / "files"
    folder.mkdir()
    for k in range(3):
        pq.write_table(table.slice(4 * k, 4), folder / f"{k}.parquet")
    for data in (
        table, check_records(made).rollouts, tmp_path / "a.jsonl", str(tmp_path / "b.parquet"),
        folder, f"{folder}/*.parquet", written(tmp_path / "d", made),
    ):  # fmt: skip
        assert ids(batches(RolloutDataLoader(data, batch_size=4))) == expected


def test_stale_groups_are_dropped_and_the_bias_is_told(tmp_path: Path) -> None:
    """Long rollouts are of older versions: they go, and that shows."""
    made = []
    for k in range(12):
        long = k % 3 == 0
        tokens = 20 if long else 5
        made += [
            rollout(
                f"g{k}r{n}", f"g{k}", weight_version=max(0, k - 6 if long else k),
                completion_ids=[1] * tokens, completion_mask=None, logprobs=[-1.0] * tokens,
            )
            for n in range(4)
        ]  # fmt: skip
    config = RolloutConfig(max_staleness=2, stale="drop")
    loader = RolloutDataLoader(made, batch_size=4, rollouts=config)
    found = []
    for version in range(20):
        loader.version = version + 3
        try:
            found.append(loader.get_batch(4))
        except StopIteration:
            break
        except BadRollout:  # of a version that the trainer has not reached: it goes on
            continue
    counts = loader.counts
    assert counts.stale.groups > 0
    assert counts.used.groups == len(found)
    assert counts.used.groups + counts.stale.groups == 12
    assert counts.bias is not None
    assert counts.bias > 1
    assert found[-1].metadata["sampling"]["bias"] == pytest.approx(counts.bias, abs=1e-4)
    assert max(batch.metadata["staleness_max"] for batch in found) <= 2


def test_groups_are_waited_for_before_they_are_stale(tmp_path: Path) -> None:
    """The last rollout of the oldest group comes after those of four newer ones."""
    slow = [rollout(f"slow{n}", "slow", weight_version=0) for n in range(4)]
    fast = [rollout(f"g{k}r{n}", f"g{k}", weight_version=k) for k in range(1, 5) for n in range(4)]
    made = [*slow[:3], *fast, slow[3]]
    ends = {"drop": [], "wait": []}  # type: ignore[var-annotated]
    for stale, found in ends.items():
        config = RolloutConfig(max_staleness=2, stale=stale)
        loader = RolloutDataLoader(
            written(tmp_path / stale, made, 1), batch_size=4, rollouts=config
        )
        for version in range(4, 20):
            loader.version = version
            try:
                found.append(loader.get_batch(4).group_ids[0])
            except StopIteration:
                break
        assert (loader.counts.stale.groups + loader.counts.incomplete.groups > 0) == (
            stale == "drop"
        )
    assert "slow" not in ends["drop"]
    assert ends["wait"] == ["slow", "g1", "g2", "g3", "g4"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_window_of_staleness_holds_from_a_resume_on(ranks: int) -> None:
    """It was refused, and whoever had chosen it too narrow had to begin anew."""
    made = [one for k in range(12) for one in groups_of(k, version=max(0, k - 3 * (k % 2)))]

    def resumed(state: Any, steps: int, **window: Any) -> tuple[list[list[str]], Any, Any]:
        found: list[list[str]] = []
        loaders = [
            RolloutDataLoader(
                made, batch_size=4 // ranks, rollouts=RolloutConfig(**window),
                run=LoaderRun(rank=rank, world_size=ranks),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            for loader in loaders:
                loader.version = 2 * loader.step
            try:
                parts = [loader.get_batch(4 // ranks) for loader in loaders]
            except StopIteration:
                break
            found.append(sorted(name for part in parts for name in part.rollout_ids))
        return found, loaders[0].state_dict(), loaders[0]

    narrow = {"max_staleness": 1}
    first, state, _ = resumed(None, 3, **narrow)
    same, _, before = resumed(state, 9, **narrow)
    wide = {"max_staleness": 9, "stale": "wait", "give_up_after": 5}
    more, later, after = resumed(state, 2, **wide)
    assert resumed(state, 2, **wide)[0] == more
    assert [*first, *more] != [*first, *same][: len(first) + len(more)]
    told = {"step": 3, "max_staleness": [1, 9], "stale": ["drop", "wait"], "give_up_after": [8, 5]}
    assert after.changes == later["changes"] == [told]
    assert before.changes == []
    assert after.state_dict(3)["changes"] == [told]
    rest, _, again = resumed(later, 99, **narrow)
    assert again.changes[0] == told
    assert again.changes[1]["max_staleness"] == [9, 1]
    trained = [name for batch in [*first, *more, *rest] for name in batch]
    assert len(trained) == len({*trained})
    counts = again.counts
    assert counts.read == 48 == counts.used.rollouts + counts.stale.rollouts
    assert counts.used.rollouts == len(trained)
    with pytest.raises(StateMismatch) as e:
        resumed(state, 1, max_staleness=9, zero_variance="skip")
    assert "zero_variance" in e.value.why
    assert "max_staleness" not in e.value.why
    again.reset()
    assert again.changes == []


def groups_of(k: int, version: int) -> list[Record]:
    return [rollout(f"g{k}r{n}", f"g{k}", weight_version=version) for n in range(4)]


def test_a_group_that_never_fills_is_given_up(tmp_path: Path) -> None:
    lost = [rollout(f"lost{n}", "lost", weight_version=0) for n in range(3)]
    made = [*lost, *groups(20, weight_version=5)]
    for stale in ("wait", "drop"):
        config = RolloutConfig(max_staleness=4, stale=stale, give_up_after=2)
        loader = RolloutDataLoader(written(tmp_path / stale, made), batch_size=4, rollouts=config)
        loader.version = 5
        assert len(batches(loader)) == 20
        assert loader.counts.incomplete.groups == 1
        assert loader.counts.incomplete.rollouts == 3
    config = RolloutConfig()
    loader = RolloutDataLoader(str(tmp_path / "wait"), batch_size=4, rollouts=config)
    assert len(batches(loader)) == 20
    assert loader.counts.incomplete.groups == 1
    used = RolloutDataLoader(made, batch_size=4, rollouts=RolloutConfig(partial="use"))
    assert "lost0" in [name for batch in batches(used) for name in batch.rollout_ids]


def test_too_many_open_groups(tmp_path: Path) -> None:
    made = [rollout(f"g{k}r0", f"g{k}") for k in range(6)]
    path = written(tmp_path / "d", made, 1)
    config = RolloutConfig(max_open_groups=4)
    with (
        RolloutDataLoader(path, batch_size=4, rollouts=config) as loader,
        pytest.raises(BadRollout, match="group_id: group never fills") as e,
    ):
        loader.get_batch(4)
    assert "5 groups are open; it has 1 of 4 rollouts" in e.value.why
    config = RolloutConfig(max_open_groups=4, bad="reject")
    loader = RolloutDataLoader(path, batch_size=4, rollouts=config)
    assert batches(loader) == []
    assert loader.counts.incomplete.groups == 6


def test_versions_from_the_future() -> None:
    made = [*groups(1), *(one | {"weight_version": 9} for one in groups(2)[4:])]
    with RolloutDataLoader(made, batch_size=4) as loader:
        loader.version = 3
        loader.get_batch(4)
        with pytest.raises(BadRollout, match="version from the future") as e:
            loader.get_batch(4)
        assert e.value.why == "it was sampled with version 9, the trainer is at 3"
        assert "group 'g1'" in e.value.where
        loader.version = 9  # an error took nothing
        assert loader.get_batch(4).group_ids == ["g1"] * 4
    loader = RolloutDataLoader(made, batch_size=4, rollouts=RolloutConfig(bad="reject"))
    loader.version = 3
    assert len(batches(loader)) == 1
    assert loader.counts.future.groups == 1


def test_groups_without_variance_are_skipped() -> None:
    made = groups(12)
    for k, one in enumerate(made):
        one["reward"] = 1.0 if k // 4 % 3 else float(k % 2)
    config = RolloutConfig(zero_variance="skip")
    loader = RolloutDataLoader(made, batch_size=8, rollouts=config)
    found = batches(loader)
    assert [len(batch.rollout_ids) for batch in found] == [8, 8]
    assert loader.counts.zero_variance.groups == 8
    assert found[0].metadata["sampling"]["zero_variance"]["groups"] >= 2
    for batch in found:
        assert batch.advantages is not None
        assert all(row.any() for row in batch.advantages)


def test_the_last_batch_is_kept_or_dropped() -> None:
    made = groups(5)
    kept = batches(RolloutDataLoader(made, batch_size=8))
    assert [len(batch.input_ids) for batch in kept] == [8, 8, 4]
    loader = RolloutDataLoader(made, batch_size=8, rollouts=RolloutConfig(last="drop"))
    assert [len(batch.input_ids) for batch in batches(loader)] == [8, 8]
    assert loader.counts.short.rollouts == 4
    assert loader.counts.used.rollouts == 16


def test_epochs_repeats_and_rounds() -> None:
    made = groups(4)
    loader = RolloutDataLoader(made, batch_size=8, rollouts=RolloutConfig(epochs=2))
    found = ids(list(loader))
    assert found == [*found[:2], *found[:2]]
    assert ids(list(loader)) == found  # another iteration begins anew
    loader = RolloutDataLoader(made, batch_size=8, rollouts=RolloutConfig(repeats=3))
    found = ids(list(loader))
    assert found == [found[0]] * 3 + [found[3]] * 3
    loader.reset()
    assert ids(list(loader)) == found
    assert int(loader.get_num_batches()) == 6
    assert loader.get_num_batches().final


def test_groups_of_wrong_sizes(tmp_path: Path) -> None:
    made = groups(2)
    made[1]["group_size"] = 3
    with (
        RolloutDataLoader(made, batch_size=4) as loader,
        pytest.raises(BadRollout, match="group_size: wrong size"),
    ):
        loader.get_batch(4)
    loader = RolloutDataLoader(made, batch_size=4, rollouts=RolloutConfig(bad="reject"))
    assert len(batches(loader)) == 1
    assert loader.counts.wrong_size.groups == 1
    unsized = [one | {"group_size": None} for one in groups(2)]
    path = written(tmp_path / "d", unsized, seal=False)
    with (
        RolloutDataLoader(path, batch_size=4) as loader,
        pytest.raises(BadConfig, match="the size of group 'g0' is not known") as e,
    ):
        loader.get_batch(4)
    assert "group_size" in e.value.do
    with RolloutDataLoader(path, batch_size=4, rollouts=RolloutConfig(group_size=4)) as loader:
        assert loader.get_batch(4).group_ids == ["g0"] * 4


def test_bad_rollouts_are_counted_and_never_trained(tmp_path: Path) -> None:
    made = groups(4)
    made[2]["reward"] = float("nan")
    made[5]["logprobs"] = [-1.0]
    made[9]["completion_mask"] = [0] * len(made[9]["completion_ids"])
    with pytest.raises(BadRollout, match="reward not finite"):
        RolloutDataLoader(made, batch_size=4)
    config = RolloutConfig(bad="reject")
    loader = RolloutDataLoader(made, batch_size=4, rollouts=config)
    found = batches(loader)
    assert ids(found) == [[f"g3r{n}" for n in range(4)]]
    assert loader.counts.refused == 3
    assert loader.counts.incomplete.groups == 3
    for batch in found:
        assert batch.advantages is not None
        assert np.isfinite(batch.advantages).all()


@pytest.mark.parametrize("at", ["gather", "note"])
def test_an_error_takes_nothing(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    made = groups(6)
    expected = ids(batches(RolloutDataLoader(made, batch_size=8)))
    loader = RolloutDataLoader(made, batch_size=8)
    found = [loader.get_batch(8)]
    state = loader.state_dict()
    with monkeypatch.context() as patched:

        def fail(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        owner = plan_module.RolloutWindow if at == "gather" else plan_module.RolloutEngine
        patched.setattr(owner, at, fail)
        with pytest.raises(KeyboardInterrupt):
            loader.get_batch(8)
    assert loader.state_dict() == state
    found += list(loader)
    assert ids(found) == expected


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    made = groups(3)
    with RolloutDataLoader(made, batch_size=4) as loader:
        loader.get_batch(4)
        state = loader.state_dict()
    others = RolloutDataLoader(groups(2), batch_size=4)
    with pytest.raises(StateMismatch, match="other data or settings") as e:
        others.load_state_dict(state)
    assert "rollouts: 12 before, 8 now" in e.value.why
    config = RolloutConfig(zero_variance="skip")
    with pytest.raises(StateMismatch) as e:
        RolloutDataLoader(made, rollouts=config).load_state_dict(state)
    assert "zero_variance" in e.value.why
    with pytest.raises(StateMismatch, match="not a state as the loader gave it"):
        RolloutDataLoader(made).load_state_dict({**state, "step": 7})
    with RolloutDataLoader(made, batch_size=4) as loader:
        plan = loader._engine.groups
        told = {**plan.snapshot().as_json(), "ready": [["g", 0, [[0, 0, 99]]]]}
        with pytest.raises(StateMismatch, match="names a rollout that is not there"):
            plan.restore(told)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"stale": "keep"}, "stale is 'keep'"),
        ({"stale": "wait"}, "stale is 'wait' without max_staleness"),
        ({"group_size": 0}, "group_size is 0"),
        ({"max_staleness": -1}, "max_staleness is -1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"bad": "drop"}, "bad is 'drop'"),
        ({"reward_weights": {}}, "reward_weights is {}"),
        ({"reward_weights": {"a": float("nan")}}, "reward_weights"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        RolloutConfig(**wrong)


def test_data_that_is_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="rollout_data is int"):
        RolloutDataLoader(7)  # type: ignore[arg-type]
    (tmp_path / "x.txt").write_text("a")
    with pytest.raises(BadConfig, match=r"x\.txt is no file of rollouts"):
        RolloutDataLoader(str(tmp_path / "x.txt"))
    with pytest.raises(InputMissing, match="there is nothing at"):
        RolloutDataLoader(str(tmp_path / "none"), streaming=False)
    LogWriter.take(open_store(tmp_path / "d", make=True), {}, [], writer="test")
    with pytest.raises(BadConfig, match="is a dataset, and not of rollouts"):
        RolloutDataLoader(str(tmp_path / "d"))
    loader = RolloutDataLoader(groups(1))
    loader.close()
    with pytest.raises(BadConfig, match="the loader is closed"):
        loader.get_batch(1)


@pytest.mark.parametrize("asked", [2, 8])
def test_a_loader_that_is_told_another_size_does_not_wait(tmp_path: Path, asked: int) -> None:
    """Told a larger one it waited for ever, and of finished data it made no batch, in silence."""
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write_many(groups(3, size=4))
    run = LoaderRun(stall_s=5)
    config = RolloutConfig(group_size=asked)
    with pytest.raises(BadRollout, match="group_size: wrong size"):
        RolloutDataLoader(tmp_path / "d", rollouts=config, run=run).get_batch(4)
    RolloutWriter(tmp_path / "d").seal()
    config = RolloutConfig(group_size=asked, bad="reject")
    loader = RolloutDataLoader(tmp_path / "d", rollouts=config)
    assert list(loader) == []
    assert loader.counts.wrong_size.rollouts == 12


@pytest.mark.parametrize("streaming", [True, False])
def test_a_tree_of_other_files_is_refused_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    """It became a dataset of documents in the cache before it was refused, under another name."""
    monkeypatch.setattr("penstock.supply.sources.open.ConvertedSource", None)
    tree = tmp_path / "tree"
    (tree / "step").mkdir(parents=True)
    (tree / "step" / "a.jsonl").write_text("{}")
    with pytest.raises(BadConfig, match="tree is neither a dataset of rollouts nor files of them"):
        RolloutDataLoader(str(tree), streaming=streaming)


def test_what_stops_a_run_can_be_left_out_from_its_checkpoint_on(tmp_path: Path) -> None:
    """The error said bad="reject", which the state of the run refused."""
    made = groups(4, weight_version=0)
    for one in made[8:12]:
        one["weight_version"] = 9
    with RolloutWriter(tmp_path / "d") as writer:
        writer.write_many(made)
        writer.seal()
    loader = RolloutDataLoader(tmp_path / "d", rollouts=RolloutConfig(max_staleness=3))
    trained = loader.get_batch(4).rollout_ids
    state = loader.state_dict()
    loader.get_batch(4)
    loader.version = 0
    with pytest.raises(BadRollout, match="version from the future") as e:
        loader.get_batch(4)
    assert 'bad="reject"' in e.value.do
    config = RolloutConfig(max_staleness=3, bad="reject")
    again = RolloutDataLoader(tmp_path / "d", rollouts=config)
    again.load_state_dict(json.loads(json.dumps(state)))
    again.version = 0
    trained += [name for batch in again for name in batch.rollout_ids]
    assert sorted(trained) == sorted(one["rollout_id"] for one in made[:8] + made[12:])
    assert again.counts.future.groups == 1


def test_a_dataset_of_another_penstock_is_refused(tmp_path: Path) -> None:
    """The writer refused it, and the loader read it as if it were its own."""
    later = CONFIG | {"version": CONFIG["version"] + 1}
    store = open_store(tmp_path / "d", make=True)
    SharedLog.join(store, later, writer="test", tokenizer=None, check=lambda state: None)
    with pytest.raises(BadConfig, match="was begun by another penstock"):
        RolloutDataLoader(tmp_path / "d")


def test_a_rollout_that_is_too_long_is_named(tmp_path: Path) -> None:
    made = groups(2)
    made[5]["prompt_ids"] = [1] * 50
    longest = max(len(one["completion_ids"]) for one in made) + 3
    cap = 50 + len(made[5]["completion_ids"])
    assert cap > longest
    fits, small = BalanceConfig(max_tokens=cap), BalanceConfig(max_tokens=cap - 1)
    batch = RolloutDataLoader(made, balance=fits).get_batch(8)
    assert len(batch.rollout_ids) == 8
    with pytest.raises(BadInput, match="and a micro-batch at most") as e:
        RolloutDataLoader(made, balance=small).get_batch(8)
    assert e.value.where == "rollout 'g1r1'"
    assert 'bad="reject"' in e.value.do


def test_a_live_learner_goes_on_without_what_is_too_long(tmp_path: Path) -> None:
    """It is in the dataset, and would stop every resume."""
    made = groups(6)
    for k in (5, 14):
        made[k]["prompt_ids"] = [1] * 50
    path = written(tmp_path / "d", made, seal=False)

    def loader(state: Any = None, **options: Any) -> RolloutDataLoader:
        found = RolloutDataLoader(path, batch_size=4, **options)
        if state:
            found.load_state_dict(json.loads(json.dumps(state)))
        return found

    small, large = BalanceConfig(max_tokens=40), BalanceConfig(max_tokens=80)
    reject = RolloutConfig(bad="reject")
    first = loader(balance=small)
    assert first.get_batch(4).group_ids[0] == "g0"
    state = first.state_dict()
    for _ in range(2):
        with pytest.raises(BadInput, match="tokens, and a micro-batch at most 40"):
            first.get_batch(4)
    assert first.state_dict() == state
    assert loader(state, balance=large).get_batch(4).group_ids[0] == "g1"
    again = loader(state, balance=small, rollouts=reject)
    batch = again.get_batch(4)
    assert batch.group_ids[0] == "g2"
    assert batch.metadata["sampling"]["too_long"]["groups"] == 1
    # the batch before a state is planned again: with what fitted then
    larger = loader(again.state_dict(), balance=large, rollouts=reject)
    assert [larger.get_batch(4).group_ids[0] for _ in range(3)] == ["g3", "g4", "g5"]
    assert [again.get_batch(4).group_ids[0] for _ in range(2)] == ["g4", "g5"]
    assert again.counts.too_long.rollouts == 8
    assert again.counts.used.rollouts == 16 == again.counts.read - 8


def test_what_was_refused_is_counted_where_nothing_is_left() -> None:
    made = [one | {"reward": float("nan")} for one in groups(2)]
    loader = RolloutDataLoader(made, rollouts=RolloutConfig(bad="reject"))
    assert list(loader) == []
    assert (loader.counts.refused, loader.counts.read) == (8, 0)


def test_named_rewards_are_weighed() -> None:
    made = [
        one | {"reward": None, "rewards": {"right": float(k % 2), "short": 1.0}}
        for k, one in enumerate(groups(1))
    ]
    config = RolloutConfig(reward_weights={"right": 2.0, "short": 0.0})
    (batch,) = batches(
        RolloutDataLoader(
            made, batch_size=4, rollouts=config, advantages=AdvantageConfig(method="dr_grpo")
        )
    )
    assert sorted(batch.rewards.tolist()) == [0, 0, 2, 2]
    assert batch.advantages is not None
    assert {abs(value) for value in batch.advantages[batch.loss_mask].tolist()} == {1.0}


@pytest.mark.parametrize("passes", ["epochs", "ids"])
def test_a_group_that_comes_again_is_another_group(passes: str) -> None:
    """Three groups and a batch of four: the second pass begins within a batch. Or the ids of
    groups are those of prompts, which come again."""
    made = groups(3)
    config = RolloutConfig(epochs=2)
    if passes == "ids":
        made = [*made, *(one | {"rollout_id": one["rollout_id"] + "b"} for one in made)]
        config = RolloutConfig(group_size=4)
    options = AdvantageConfig(preset="nemo")  # leaves one out: a copy of it would show
    found = batches(RolloutDataLoader(made, batch_size=16, rollouts=config, advantages=options))
    alone = batches(RolloutDataLoader(groups(3), batch_size=4, advantages=options))
    expected = {}
    for batch in alone:
        assert batch.advantages is not None
        for name, row in zip(batch.rollout_ids, batch.advantages, strict=True):
            expected[name] = [value for value in row.tolist() if value]
    assert [batch.metadata["groups"] for batch in found] == [4, 2]
    for batch in found:
        assert batch.advantages is not None
        for name, row in zip(batch.rollout_ids, batch.advantages, strict=True):
            assert [value for value in row.tolist() if value] == expected[name.removesuffix("b")]


def test_ids_over_several_files(tmp_path: Path) -> None:
    made = groups(4)
    for k in range(2):
        lines = "".join(json.dumps(one) + "\n" for one in made[8 * k : 8 * k + 8])
        (tmp_path / f"{k}.jsonl").write_text(lines)
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write(json.dumps(made[0]) + "\n")  # the same again
    found = batches(RolloutDataLoader(tmp_path, batch_size=4))
    assert sorted(name for batch in found for name in batch.rollout_ids) == sorted(
        one["rollout_id"] for one in made
    )
    with (tmp_path / "1.jsonl").open("a") as file:
        file.write(json.dumps(made[1] | {"reward": 99.0}) + "\n")
    with pytest.raises(BadRollout, match="rollout_id: other content") as e:
        RolloutDataLoader(tmp_path)
    assert e.value.where == f"{tmp_path}/1.jsonl, row 9, rollout 'g0r1'"
    config = RolloutConfig(bad="reject")
    loader = RolloutDataLoader(tmp_path, batch_size=4, rollouts=config)
    assert len(batches(loader)) == 4
    assert loader.counts.refused == 1


def test_files_with_and_without_logprobs(tmp_path: Path) -> None:
    """They were joined without a word, and the log-probabilities of all were gone."""
    made = groups(4)
    for k, half in enumerate((made[:8], [one | {"logprobs": None} for one in made[8:]])):
        (tmp_path / f"{k}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in half))
    with pytest.raises(BadRollout, match="logprobs: logprobs missing") as e:
        RolloutDataLoader(tmp_path)
    assert "1.jsonl, row 0, rollout 'g2r0'" in e.value.where
    loader = RolloutDataLoader(tmp_path, batch_size=4, rollouts=RolloutConfig(bad="reject"))
    found = batches(loader)
    assert ids(found) == [[f"g{k}r{n}" for n in range(4)] for k in range(2)]
    assert all(batch.old_logprobs is not None for batch in found)
    assert loader.counts.refused == 8


def test_a_dataset_with_and_without_logprobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writers refuse such rollouts; earlier ones did not."""
    made = groups(4)
    path = written(tmp_path / "d", made[:6], seal=False)
    with monkeypatch.context() as patched:
        patched.setattr(RolloutWriter, "_read_kind", lambda *_: None)
        written(tmp_path / "d", [one | {"logprobs": None} for one in made[6:]])
    with RolloutDataLoader(path, batch_size=4) as loader:
        assert loader.get_batch(4).old_logprobs is not None
        with pytest.raises(BadRollout, match="logprobs: unlike others") as e:
            loader.get_batch(4)
        assert "group 'g1'" in e.value.where
        state = loader.state_dict()
    config = RolloutConfig(bad="reject")
    whole = RolloutDataLoader(path, batch_size=4, rollouts=config)
    assert ids(batches(whole)) == [[f"g0r{n}" for n in range(4)]]
    assert whole.counts.unlike.groups == 3
    assert whole.counts.unlike.rollouts == 12
    again = RolloutDataLoader(path, batch_size=4)
    again.load_state_dict(json.loads(json.dumps(state)))  # it knows what the first ones were like
    with again, pytest.raises(BadRollout, match="unlike others"):
        again.get_batch(4)


def test_a_refused_rollout_is_missed_by_its_group() -> None:
    """Also where nobody says how many a group has."""
    made = [one | {"group_size": None} for one in groups(3)]
    made[5]["reward"] = float("nan")
    loader = RolloutDataLoader(made, batch_size=4, rollouts=RolloutConfig(bad="reject"))
    assert ids(batches(loader)) == [[f"g{k}r{n}" for n in range(4)] for k in (0, 2)]
    assert loader.counts.refused == 1
    assert loader.counts.incomplete.rollouts == 3


def test_named_rewards_that_some_rollouts_lack(tmp_path: Path) -> None:
    """A record of the log may have none with a name that others have."""
    made = [
        one | {"reward": None, "rewards": {("right", "short")[k % 2]: float(k)}}
        for k, one in enumerate(groups(2))
    ]
    path = written(tmp_path / "d", made, 1)
    config = RolloutConfig(reward_weights={"right": 1.0, "short": 0.5})
    found = batches(RolloutDataLoader(path, batch_size=4, rollouts=config))
    told = {
        name: reward
        for batch in found
        for name, reward in zip(batch.rollout_ids, batch.rewards.tolist(), strict=True)
    }
    assert told == {
        one["rollout_id"]: k * (0.5 if k % 2 else 1.0) for k, one in enumerate(made)
    }  # fmt: skip
    config = RolloutConfig(reward_weights={"right": 1.0})
    with (
        RolloutDataLoader(path, batch_size=4, rollouts=config) as loader,
        pytest.raises(BadRollout, match="rewards: none of those that count is there") as e,
    ):
        loader.get_batch(4)
    assert e.value.why == "what counts is right; it has short"
    assert "rollout 'g0r1'" in e.value.where
    config = RolloutConfig(reward_weights={"right": 1.0}, bad="reject")
    for data in (path, made):
        loader = RolloutDataLoader(data, batch_size=4, rollouts=config)
        assert batches(loader) == []
        assert loader.counts.refused == 4
    with pytest.raises(BadConfig, match="no rollout has a reward called 'rihgt'") as f:
        RolloutDataLoader(made, rollouts=RolloutConfig(reward_weights={"rihgt": 1.0}))
    assert "right" in f.value.do


def test_rewards_whose_sum_is_no_number() -> None:
    most = float(np.finfo(np.float32).max)
    made = [one | {"reward": None, "rewards": {"a": most, "b": most}} for one in groups(1)]
    with (
        RolloutDataLoader(made, batch_size=4) as loader,
        pytest.raises(BadRollout, match=r"rewards: their sum is 6\.8"),
    ):
        loader.get_batch(4)


def test_other_rollouts_in_the_middle_are_other_data() -> None:
    made = groups(4)
    with RolloutDataLoader(made, batch_size=4) as loader:
        loader.get_batch(4)
        state = loader.state_dict()
    for k, changed in ((5, {"rollout_id": "x"}), (6, {"group_id": "y"}), (7, {"reward": 7.0})):
        others = [*made]
        others[k] = made[k] | changed
        with pytest.raises(StateMismatch, match="other data or settings"):
            RolloutDataLoader(others, batch_size=4).load_state_dict(state)


@given(
    seed=st.integers(0, 10_000),
    stale=st.sampled_from(["drop", "wait"]),
    most=st.integers(0, 3),
    size=st.sampled_from([1, 4, 9]),
    skips=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_every_rollout_has_one_fate_whatever_the_versions(
    seed: int, stale: str, most: int, size: int, skips: bool
) -> None:
    """Groups of all ages, some of which never fill, in pieces of three; and a resume anywhere."""
    rng = np.random.default_rng(seed)
    made = []
    for k in range(24):
        age = max(0, k // 2 - int(rng.integers(0, 4)))
        count = 4 if rng.random() < 0.85 else int(rng.integers(1, 4))
        equal = rng.random() < 0.3
        made += [
            rollout(f"g{k}r{n}", f"g{k}", weight_version=age, reward=0.0 if equal else float(n))
            for n in range(count)
        ]
    made = [made[k] for k in np.argsort(np.arange(len(made)) + rng.integers(0, 12, len(made)))]
    config = RolloutConfig(
        max_staleness=most, stale=stale, give_up_after=2, bad="reject",
        zero_variance="skip" if skips else "keep",
    )  # fmt: skip

    def run(states: list[Any], start: int = 0) -> tuple[list[list[str]], RolloutDataLoader]:
        loader = RolloutDataLoader(made, batch_size=size, rollouts=config)
        if states:
            loader.load_state_dict(json.loads(json.dumps(states[start])))
        found: list[list[str]] = []
        while True:
            loader.version = 4 + loader.step
            if not start:
                states.append(loader.state_dict())
            try:
                batch = loader.get_batch(size)
            except StopIteration:
                return found, loader
            found.append(batch.rollout_ids)
            assert stale == "wait" or batch.metadata["staleness_max"] <= most
            assert set(Counter(batch.group_ids).values()) == {4}
            assert batch.versions.max() <= loader.version

    states: list[Any] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources_module, "MEMORY_ROWS", 3)
        found, loader = run(states)
        counts = loader.counts
        trained = [name for names in found for name in names]
        assert len(trained) == len({*trained}) == counts.used.rollouts
        fates = (counts.used, counts.stale, counts.zero_variance, counts.incomplete, counts.future)
        assert sum(tally.rollouts for tally in fates) == counts.read == len(made)
        assert stale == "drop" or counts.stale.rollouts == 0
        start = int(rng.integers(1, len(states))) if len(states) > 1 else 0
        if start:
            again, second = run(states, start)
            assert again == found[start:]
            assert second.counts == counts
