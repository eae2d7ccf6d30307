"""Consumers: what they give, what they wait for, what they delete and when."""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flow.queue_pair import Numbers, numbers_config
from penstock import ConsumerConfig, DatasetConsumer, SharedConfig
from penstock.errors import (
    BadBatch,
    BadConfig,
    LogDamaged,
    NoDataset,
    ProducerStalled,
    StateMismatch,
    StoreFailed,
)
from penstock.queue.folder import Mark, Queue, read_mark

KEEP = ConsumerConfig(delete="checkpointed", stall_s=0.2)
SWEEP = ConsumerConfig(delete="consumed", stall_s=0.2)


def filled(folder: Path, train: int = 12, val: int = 3, **settings: Any) -> SharedConfig:
    """A queue with all its batches."""
    config = numbers_config(
        folder, train_batches=train, val_batches=val, backlog_batches=1000, **settings
    )
    Numbers(config).run()
    return config


def files(config: SharedConfig, split: str = "train") -> list[int]:
    folder = config.folder / "queue" / split
    return sorted(int(path.stem) for path in folder.glob("*.safetensors"))


def numbers(consumer: DatasetConsumer, count: int, split: str = "train") -> list[int]:
    return [int(consumer.get_batch(split)[0][0, 0]) for _ in range(count)]


def ranks(config: SharedConfig, count: int) -> list[DatasetConsumer]:
    settings = [
        ConsumerConfig(delete="checkpointed", stall_s=0.2, rank=rank, world_size=count)
        for rank in range(count)
    ]
    return [DatasetConsumer(config.folder, one) for one in settings]


def test_a_queue_that_is_not_there_fails_loudly(tmp_path: Path) -> None:
    with pytest.raises(NoDataset, match="Queue directory not found") as caught:
        DatasetConsumer(tmp_path / "data" / "none")
    assert "prepare.py" in caught.value.do
    (tmp_path / "queue").mkdir()
    with pytest.raises(ProducerStalled, match=r"no meta\.json for 0\.2 s"):
        DatasetConsumer(tmp_path, KEEP)


def test_pairs_dicts_meta_and_schema(tmp_path: Path) -> None:
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        x, y = consumer.get_batch("train")
        assert isinstance(x, np.ndarray)
        assert x.shape == y.shape == (1, 2)
        assert consumer.meta["vocab_size"] == 1000
        schema = consumer.schema("val")
        assert schema is not None
        assert [field["name"] for field in schema] == ["x", "y"]
        for ask in (consumer.schema, consumer.get_batch, consumer.position):
            with pytest.raises(BadConfig, match="split is 'test'"):
                ask("test")

    class Three(Numbers):
        def build_meta(self) -> dict[str, Any]:
            meta = super().build_meta()
            meta["batch_schema"].append({"name": "mask", "dtype": "bool", "shape": []})
            return meta

        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            return {**super().sample_batch(split, rng), "mask": np.ones(1, bool)}

    other = numbers_config(tmp_path / "three", train_batches=1, val_batches=0)
    Three(other).run()
    with DatasetConsumer(other.folder, KEEP) as consumer:
        batch = consumer.get_batch("train")
        assert [*batch] == ["x", "y", "mask"]


@pytest.mark.torch
def test_tensors_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        x, y = consumer.get_batch("train", "cpu")
        assert isinstance(x, torch.Tensor)
        assert y.dtype == torch.int64
        told: list[Any] = []

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            told.append("pinned")
            return tensor

        def move(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
            told.append((where, how))
            return tensor

        monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
        monkeypatch.setattr(torch.Tensor, "to", move)
        consumer.get_batch("train", "cuda")
        moved = ((torch.device("cuda"),), {"non_blocking": True})
        assert told == ["pinned", "pinned", moved, moved]


HOLDS: dict[str, tuple[Any, Any]] = {
    "array": (lambda x: x, lambda kept: kept),
    "row": (lambda x: x[0], lambda kept: kept),
    "view of a view": (lambda x: x[::2].T[:1], lambda kept: kept),
    "other type": (lambda x: x.view(np.uint8), lambda kept: kept.view(np.int64)),
    "memoryview": (memoryview, np.asarray),
    "tensor": (lambda x: __import__("torch").from_numpy(x)[:1], np.asarray),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_batches_that_a_trainer_holds_stay_as_they_were(tmp_path: Path, hold: str) -> None:
    """Memory is used again once nobody has anything of it."""
    keep, read = HOLDS[hold]
    config = filled(tmp_path, 12, 0)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        held = [(keep(y), n) for n in range(12) for _, y in [consumer.get_batch("train")]]
        assert [set(np.unique(read(kept))) for kept, _ in held] == [{n} for _, n in held]


def test_memory_of_batches_that_nobody_holds_is_used_again(tmp_path: Path) -> None:
    config = filled(tmp_path, 12, 0)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        at = {consumer.get_batch("train")[1].__array_interface__["data"][0] for _ in range(12)}
    assert len(at) <= 2


def test_without_torch_a_device_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = filled(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with (
        DatasetConsumer(config.folder, KEEP) as consumer,
        pytest.raises(BadConfig, match="torch is not installed"),
    ):
        consumer.get_batch("train", "cpu")


def test_it_waits_for_batches_and_says_who_is_silent(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, backlog_batches=2)
    provider = Numbers(config)
    thread = threading.Thread(target=provider.run)
    thread.start()
    while not (config.folder / "queue" / "meta.json").exists():
        time.sleep(0.005)
    settings = ConsumerConfig(delete="checkpointed", stall_s=20)
    with DatasetConsumer(config.folder, settings) as consumer:
        assert numbers(consumer, 20) == list(range(20))
    provider.stopped_by = 15
    thread.join()
    with DatasetConsumer(config.folder, KEEP) as consumer:
        with pytest.raises(ProducerStalled, match=r"did not come for 0\.2 s") as caught:
            numbers(consumer, 1000)
        assert caught.value.why == "no provider runs here"
        assert caught.value.do == "start it: penstock prepare config.py; it resumes where it was"
        with (
            Queue(config.folder).locked(),
            pytest.raises(ProducerStalled, match="did not come") as caught,
        ):
            consumer.get_batch("train")
        assert caught.value.why == "a provider runs here, and gives nothing"


@pytest.mark.parametrize("each", [1, 4])
def test_consumed_files_are_deleted_at_once(tmp_path: Path, each: int) -> None:
    config = filled(tmp_path, batches_per_file=each)
    with DatasetConsumer(config.folder, SWEEP) as consumer:
        for number in range(10):
            assert numbers(consumer, 1) == [number]
            assert files(config) == list(range((number + 1) // each * each, 12, each))
        with pytest.raises(BadConfig, match="has no state"):
            consumer.state_dict()
    with DatasetConsumer(config.folder, SWEEP) as consumer:  # the file that was begun is begun anew
        assert numbers(consumer, 2) == [10 // each * each, 10 // each * each + 1]
    with pytest.raises(BadConfig, match='delete is "consumed" on 2 ranks'):
        DatasetConsumer(config.folder, ConsumerConfig(rank=0, world_size=2))


@pytest.mark.parametrize("each", [1, 4])
def test_files_go_once_a_checkpoint_is_safe(tmp_path: Path, each: int) -> None:
    config = filled(tmp_path, batches_per_file=each)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        assert numbers(consumer, 5) == [0, 1, 2, 3, 4]
        assert numbers(consumer, 1, "val") == [0]
        state = json.loads(json.dumps(consumer.state_dict()))
        assert numbers(consumer, 3) == [5, 6, 7]
        assert files(config) == list(range(0, 12, each))
        consumer.release(state)
        assert files(config) == list(range(5 // each * each, 12, each))
        assert files(config, "val") == list(range(1 // each * each, 3, each))
    with DatasetConsumer(config.folder, KEEP) as consumer:
        consumer.load_state_dict(state)
        assert consumer.position("train") == 5
        assert numbers(consumer, 7) == [5, 6, 7, 8, 9, 10, 11]
        assert numbers(consumer, 2, "val") == [1, 2]
        with pytest.raises(StopIteration):
            consumer.get_batch("train")
        late = consumer.state_dict()
        consumer.release(late)
        consumer.release(state)  # an older one changes nothing
        assert len(files(config)) == 0
    with DatasetConsumer(config.folder, KEEP) as consumer:
        with pytest.raises(
            StateMismatch, match="batches 5 to 11 of split 'train' are deleted"
        ) as e:
            consumer.load_state_dict(state)
        assert e.value.do == "load that one; or begin anew: penstock prepare config.py --purge"


@pytest.mark.parametrize("way", ["claims", "consumed"])
def test_a_state_is_about_what_its_trainer_took(tmp_path: Path, way: str) -> None:
    """Another process evaluates on the held-out split, in its own way."""
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        numbers(consumer, 4)
        state = json.loads(json.dumps(consumer.state_dict()))
    with DatasetConsumer(config.folder, SWEEP) as other:
        if way == "claims":
            with other.claims("val") as claims:
                assert [claim.number for claim in claims if claim.ack()] == [0, 1, 2]
        else:
            assert numbers(other, 3, "val") == [0, 1, 2]
    with DatasetConsumer(config.folder, KEEP) as consumer:
        consumer.load_state_dict(state)
        consumer.release(state)
        assert consumer.position("val") == 3
        assert numbers(consumer, 2) == [4, 5]


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    config, other = filled(tmp_path / "a"), filled(tmp_path / "b", batch_size=2)
    with (
        DatasetConsumer(config.folder, KEEP) as consumer,
        DatasetConsumer(other.folder, KEEP) as stranger,
    ):
        state = consumer.state_dict()
        with pytest.raises(StateMismatch, match="made under other settings"):
            stranger.load_state_dict(state)
        with pytest.raises(StateMismatch, match="checksum"):
            consumer.load_state_dict({**state, "next": {"train": 3, "val": 0}})
        from penstock.supply.settings import with_checksum

        with pytest.raises(StateMismatch, match="not a state of a queue"):
            consumer.release(with_checksum({"format": 1}))


def test_every_rank_takes_its_own(tmp_path: Path) -> None:
    config = filled(tmp_path, 14, batches_per_file=3)
    four = ranks(config, 4)
    assert [numbers(one, 2) for one in four] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    states = [one.state_dict() for one in four]
    assert all(state == states[0] for state in states)
    four[1].release(states[1])  # only rank 0 deletes
    assert files(config) == [0, 3, 6, 9, 12]
    four[0].release(states[0])
    assert files(config) == [6, 9, 12]
    for one in four:
        one.close()
    two = ranks(config, 2)
    for one in two:
        one.load_state_dict(states[0])
    assert [numbers(one, 2) for one in two] == [[8, 10], [9, 11]]
    for one in two:
        one.close()


def test_all_ranks_end_at_the_same_step(tmp_path: Path) -> None:
    config = filled(tmp_path, 10, batches_per_file=4)
    four = ranks(config, 4)
    assert [numbers(one, 2) for one in four] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for one in four:  # 8 and 9 do not go round
        with pytest.raises(StopIteration) as ended:
            one.get_batch("train")
        told = "split 'train' has 10 batches and no more will come; the ranks have taken 8"
        assert str(ended.value) == told
    state = four[0].state_dict()
    for one in four:
        one.close()
    with DatasetConsumer(config.folder, KEEP) as alone:
        alone.load_state_dict(state)
        assert [int(x[0, 0]) for x, _ in alone.batches("train")] == [8, 9]


def test_a_config_that_is_not_the_queues_is_refused(tmp_path: Path) -> None:
    ends = {"train_batches": 3, "val_batches": 0}
    config = filled(tmp_path, 3, 0, mask_probability=0.5)
    same = numbers_config(
        tmp_path, **ends, mask_probability=0.5, backlog_batches=7, learning_rate=1.0
    )
    DatasetConsumer(config.folder, KEEP, expect=same).close()
    for changed, told in (
        ({"mask_probability": 0.25}, "mask_probability: 0.5 in the queue, 0.25 in the config"),
        ({"mask_probability": 0.5, "block_size": 4}, "block_size: 2 in the queue, 4 in the config"),
        ({"mask_probability": 0.5, "seed": 2}, "seed: 1337 in the queue, 2 in the config"),
    ):
        values = dict(numbers_config(tmp_path, **ends, **changed))
        other = SharedConfig(values, root=tmp_path, name="config/other.py")
        with pytest.raises(BadConfig, match="made under other settings") as caught:
            DatasetConsumer(config.folder, KEEP, expect=other)
        assert told in caught.value.why
        # that of the queue would fill it as before, and it would be refused again
        assert "penstock prepare config/other.py --purge" in caught.value.do


def test_a_setting_that_the_queue_does_not_know_is_refused_too(tmp_path: Path) -> None:
    ends = {"train_batches": 3, "val_batches": 0}
    config = filled(tmp_path / "a", 3, 0)
    for changed in ({"mask_probability": 0.25}, {"level": 1}):
        other = numbers_config(tmp_path / "a", **ends, **changed)
        with pytest.raises(BadConfig, match="made under other settings") as caught:
            DatasetConsumer(config.folder, KEEP, expect=other)
        ((name, value),) = changed.items()
        assert caught.value.why == f"{name}: None in the queue, {value} in the config"

    class Chosen(Numbers):
        data_settings = ("train_batches", "val_batches")

    chosen = numbers_config(tmp_path / "b", **ends)
    Chosen(chosen).run()
    more = numbers_config(tmp_path / "b", **ends, level=1)
    DatasetConsumer(chosen.folder, KEEP, expect=more).close()


def test_what_a_killed_trainer_left_is_removed_from_both_splits(tmp_path: Path) -> None:
    config = filled(tmp_path)
    litter = config.folder / "queue" / "val" / "_floor" / ".tmp-1-00"
    litter.write_bytes(b"")
    with DatasetConsumer(config.folder, KEEP) as consumer:
        numbers(consumer, 1)
    assert not litter.exists()


def test_two_trainers_do_not_take_the_same_batches(tmp_path: Path) -> None:
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as one, DatasetConsumer(config.folder, KEEP) as two:
        assert numbers(one, 2) == [0, 1]
        with pytest.raises(BadConfig, match=r"another process takes .* as rank 0"):
            two.get_batch("train")
        assert numbers(two, 1, "val") == [0]
        one.close()
        assert numbers(two, 1) == [0]


def test_a_rank_whose_batches_are_released_too_early_is_told_at_once(tmp_path: Path) -> None:
    config = filled(tmp_path)
    slow = ConsumerConfig(delete="checkpointed", stall_s=1000, rank=1, world_size=2)
    first, second = ranks(config, 2)[0], DatasetConsumer(config.folder, slow)
    numbers(first, 2)
    first.release(first.state_dict())
    with pytest.raises(BadBatch, match="batches 0 to 3 of split 'train' are deleted"):
        second.get_batch("train")
    first.close()
    second.close()


def test_a_mark_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = filled(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with DatasetConsumer(config.folder, KEEP) as consumer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StoreFailed, match=r"could not write rank-0\n.*\n.*ENOSPC") as caught:
            consumer.get_batch("train")
        assert "free some space" in caught.value.do
        monkeypatch.undo()
        assert numbers(consumer, 1) == [0]
    folder = config.folder / "queue" / "train" / "_read"
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path)
    with (
        DatasetConsumer(config.folder, KEEP) as consumer,
        pytest.raises(StoreFailed, match="_read is no folder"),
    ):
        consumer.get_batch("train")


def test_a_trainer_that_outlives_its_queue_is_told_so(tmp_path: Path) -> None:
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        assert numbers(consumer, 2) == [0, 1]
        Numbers(config).purge()
        filled(tmp_path, seed=5)
        with pytest.raises(LogDamaged, match="was purged while it was in use") as caught:
            consumer.get_batch("train")
        assert caught.value.do.startswith("start it again")


@pytest.mark.parametrize("again", [True, False], ids=["filled again", "empty"])
@pytest.mark.parametrize("keep", [KEEP, SWEEP], ids=["checkpointed", "consumed"])
def test_what_a_trainer_did_before_a_purge_is_not_done_in_the_new_queue(
    tmp_path: Path, keep: ConsumerConfig, again: bool
) -> None:
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, keep) as consumer:
        numbers(consumer, 6)
        state = consumer.state_dict() if keep is KEEP else None
        file = consumer._line("train")
        if keep is SWEEP:  # it has the file open that is purged
            file._file = file.split.open(6)
        Numbers(config).purge()
        if again:
            config = filled(tmp_path, seed=5)
        with pytest.raises(LogDamaged, match="was purged while it was in use"):
            consumer.release(state) if state else consumer.get_batch("train")
    if again:
        with DatasetConsumer(config.folder, keep, expect=config) as consumer:
            assert numbers(consumer, 12) == list(range(12))


def test_damaged_and_missing_files_stop_the_consumer(tmp_path: Path) -> None:
    config = filled(tmp_path)
    folder = config.folder / "queue" / "train"
    path = folder / f"{1:020d}.safetensors"
    whole = path.read_bytes()
    with DatasetConsumer(config.folder, KEEP) as consumer:
        numbers(consumer, 1)
        path.write_bytes(whole[:-1] + b"x")
        for _ in range(2):  # it is not skipped
            with pytest.raises(BadBatch, match="is not a file of batches"):
                consumer.get_batch("train")
        path.unlink()
        with pytest.raises(ProducerStalled, match="batch 1 of split 'train' did not come"):
            consumer.get_batch("train")
        path.write_bytes(whole)
        assert numbers(consumer, 1) == [1]
    four = ranks(config, 4)
    (folder / f"{2:020d}.safetensors").unlink()
    with pytest.raises(BadBatch, match="the file of batch 2 of split 'train' is missing"):
        four[2].get_batch("train")
    for one in four:
        one.close()


@pytest.mark.parametrize("kind", ["empty", "zeros", "body", "gone"])
@pytest.mark.parametrize("world", [1, 4])
def test_what_a_power_cut_damaged_is_waited_for_and_never_given(
    tmp_path: Path, kind: str, world: int
) -> None:
    """The trainer is first to start again."""
    config = filled(tmp_path)
    path = config.folder / "queue" / "train" / f"{2:020d}.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"zeros": bytes(len(whole)), "body": whole[:-16] + bytes(16)}.get(kind, b""))
    if kind == "gone":
        path.unlink()
    patient = [
        ConsumerConfig(delete="checkpointed", stall_s=20, rank=rank, world_size=world)
        for rank in range(world)
    ]
    consumers = [DatasetConsumer(config.folder, one) for one in patient]
    found: list[int] = []

    def take() -> None:
        for one in consumers:
            found.extend(numbers(one, 12 // world))

    thread = threading.Thread(target=take)
    thread.start()
    time.sleep(0.1)
    assert 2 not in found
    Numbers(config).run()
    thread.join()
    assert sorted(found) == list(range(12))
    for one in consumers:
        one.close()


def test_a_file_that_stays_damaged_is_refused_by_name(tmp_path: Path) -> None:
    config = filled(tmp_path)
    path = config.folder / "queue" / "train" / f"{0:020d}.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    with DatasetConsumer(config.folder, KEEP) as consumer:
        began = time.monotonic()
        with pytest.raises(BadBatch, match=f"{path.name} is not a file of batches") as caught:
            consumer.get_batch("train")
        assert time.monotonic() - began > 0.2
    assert caught.value.where == str(path)
    told = "start the provider anew: it checks its files, and makes this one again"
    assert caught.value.do == told


@pytest.mark.parametrize("way", ["gone", "cut"])
def test_a_provider_that_makes_earlier_batches_again_has_not_stalled(
    tmp_path: Path, way: str
) -> None:
    """A power cut took files that the trainer is done with, and that an older checkpoint needs."""
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        numbers(consumer, 9)
        state = consumer.state_dict()
    for path in (config.folder / "queue" / "train").glob("*.safetensors"):
        path.unlink() if way == "gone" else path.write_bytes(b"")

    class Slow(Numbers):
        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            time.sleep(0.1)
            return super().sample_batch(split, rng)

    with DatasetConsumer(config.folder, ConsumerConfig(delete="checkpointed", stall_s=0.5)) as one:
        one.load_state_dict(state)
        thread = threading.Timer(0.2, Slow(config).run)  # the trainer looks first
        thread.start()
        assert numbers(one, 3) == [9, 10, 11]  # a second of work comes before them
        thread.join()
    assert files(config) == list(range(12))


def test_what_a_power_cut_took_is_no_purge(tmp_path: Path) -> None:
    """An older checkpoint that is kept can still be loaded."""
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        numbers(consumer, 4)
        old = consumer.state_dict()
        numbers(consumer, 4)
        new = consumer.state_dict()
    for path in (config.folder / "queue" / "train").glob("*.safetensors"):
        path.unlink()
    with DatasetConsumer(config.folder, KEEP) as consumer:
        consumer.load_state_dict(new)
    Numbers(config).run()
    with DatasetConsumer(config.folder, KEEP) as consumer:
        consumer.load_state_dict(old)
        assert numbers(consumer, 8) == list(range(4, 12))
    # after a purge nobody needs what comes before the state
    Numbers(config).purge()
    other = numbers_config(tmp_path, train_batches=12, val_batches=3, backlog_batches=2)
    provider = Numbers(other)
    thread = threading.Thread(target=provider.run)
    thread.start()
    while not (config.folder / "queue" / "meta.json").exists():
        time.sleep(0.005)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        consumer.load_state_dict(new)
        assert numbers(consumer, 4) == [8, 9, 10, 11]
        assert min(files(config)) >= 8
    provider.stopped_by = 15
    thread.join()


def test_links_and_pipes_in_the_queue_are_not_followed(tmp_path: Path) -> None:
    config = filled(tmp_path)
    folder = config.folder / "queue" / "train"
    path = folder / f"{0:020d}.safetensors"
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with DatasetConsumer(config.folder, KEEP) as consumer:
        with pytest.raises(LogDamaged, match="is a symbolic link"):
            consumer.get_batch("train")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(StoreFailed, match="could not look at"):
            consumer.get_batch("train")


def test_a_split_is_taken_in_one_way(tmp_path: Path) -> None:
    config = filled(tmp_path)
    with DatasetConsumer(config.folder, KEEP) as consumer:
        numbers(consumer, 1)
        with pytest.raises(BadConfig, match="are taken by number, not by claims"):
            consumer.claims("train")
        consumer.claims("val").close()
        with pytest.raises(BadConfig, match="are taken by claims, not by number"):
            consumer.get_batch("val")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"delete": "never"}, "delete is 'never'"),
        ({"stall_s": 0}, "stall_s is 0"),
        ({"lease_s": float("nan")}, "lease_s is nan"),
        ({"rank": 1}, "one of rank and world_size"),
    ],
)
def test_settings_are_checked(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    config = filled(tmp_path, 1, 0)
    with pytest.raises(BadConfig, match=told):
        DatasetConsumer(config.folder, ConsumerConfig(**settings))


def test_marks_are_hints(tmp_path: Path) -> None:
    mark = Mark(tmp_path / "_read" / "rank-0")
    mark.write(7)
    assert read_mark(tmp_path / "_read" / "rank-0") == 7
    (tmp_path / "_read" / "rank-0").write_bytes(b"7")
    assert read_mark(tmp_path / "_read" / "rank-0") is None
    mark.close(remove=True)
    assert read_mark(tmp_path / "_read" / "rank-0") is None
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(StoreFailed, match="could not write link"):
        Mark(tmp_path / "link")
