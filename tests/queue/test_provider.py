"""Providers: numbers and RNGs of batches, how far ahead they go, what makes a queue stale."""

import fcntl
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flow.queue_pair import Numbers, numbers_config
from penstock import ConsumerConfig, DataProviderBase, DatasetConsumer, SharedConfig
from penstock.errors import BadBatch, BadConfig, LogDamaged
from penstock.queue import provider as provider_module
from penstock.queue.folder import Queue, Split
from penstock.queue.provider import batch_rng
from penstock.work.events import Events


@contextmanager
def running(provider: DataProviderBase) -> Iterator[threading.Thread]:
    """A provider in a thread, stopped as a signal would stop it."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            provider.run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        provider.stopped_by = signal.SIGTERM
        thread.join()
    assert not failed, failed


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.005)


def made(config: SharedConfig, split: str = "train") -> list[int]:
    """Numbers of the files that are there."""
    folder = config.folder / "queue" / split
    return sorted(int(path.stem) for path in folder.glob("*.safetensors"))


class Random(Numbers):
    """Batches of random numbers."""

    def sample_batch(self, split: str, rng: np.random.Generator) -> dict[str, Any]:
        super().sample_batch(split, rng)
        x, y = rng.integers(0, 1 << 40, (2, self.batch_size, self.block_size))
        return {"x": x, "y": y}


def taken(config: SharedConfig, count: int) -> list[list[int]]:
    until(lambda: (config.folder / "queue").is_dir())
    with DatasetConsumer(config.folder, ConsumerConfig(stall_s=20)) as consumer:
        return [consumer.get_batch("train")[0].ravel().tolist() for _ in range(count)]


def test_a_restart_neither_repeats_nor_skips(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, backlog_batches=3)
    found = []
    for _ in range(5):
        with running(Random(config)):
            found += taken(config, 4)
    other = numbers_config(tmp_path / "other", backlog_batches=40)
    with running(Random(other)):
        assert found == taken(other, 20)
    assert len({tuple(row) for row in found}) == 20


def test_the_rng_is_of_seed_split_and_number() -> None:
    keys = [(seed, split, n) for seed in (0, 7, 2**64 - 1) for split in ("train", "val")
            for n in (0, 1, 2**40)]  # fmt: skip
    drawn = {tuple(batch_rng(*key).integers(0, 1 << 60, 4).tolist()) for key in keys}
    assert len(drawn) == len(keys)
    assert np.array_equal(batch_rng(7, "val", 3).random(9), batch_rng(7, "val", 3).random(9))


@pytest.mark.torch
def test_the_rng_may_be_that_of_torch(tmp_path: Path) -> None:
    import torch

    class Torch(Numbers):
        torch_rng = True

        def sample_batch(self, split: str, rng: torch.Generator) -> dict[str, Any]:
            super().sample_batch(split, rng)
            x = torch.randint(1 << 40, (self.batch_size, self.block_size), generator=rng)
            return {"x": x, "y": x}

    found = []
    for name in ("a", "b"):
        config = numbers_config(tmp_path / name)
        with running(Torch(config)):
            found.append(taken(config, 6))
    assert found[0] == found[1]
    assert len({tuple(row) for row in found[0]}) == 6


@pytest.mark.parametrize("each", [1, 3])
def test_it_goes_as_far_ahead_as_the_backlog_of_unread_batches(tmp_path: Path, each: int) -> None:
    config = numbers_config(tmp_path, backlog_batches=4, batches_per_file=each)
    with running(Numbers(config)):
        until(lambda: len(made(config)) * each >= 4 and len(made(config, "val")) * each >= 4)
        time.sleep(0.1)
        assert made(config) == list(range(0, 4, each))
        # what is read and kept for a checkpoint is not in its way
        settings = ConsumerConfig(delete="checkpointed", stall_s=20)
        with DatasetConsumer(config.folder, settings) as consumer:
            for _ in range(6):
                consumer.get_batch("train")
            until(lambda: len(made(config)) * each >= 10)
        time.sleep(0.1)
        assert made(config) == list(range(0, 10, each))
        assert made(config, "val") == list(range(0, 4, each))


def test_a_rank_that_waits_is_served_whatever_the_backlog(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, backlog_batches=1)
    with running(Numbers(config)):
        until(lambda: (config.folder / "queue" / "meta.json").exists())
        settings = ConsumerConfig(delete="checkpointed", rank=3, world_size=8, stall_s=20)
        with DatasetConsumer(config.folder, settings) as consumer:
            assert [int(consumer.get_batch("train")[0][0, 0]) for _ in range(3)] == [3, 11, 19]


def test_a_split_ends_where_the_provider_says(tmp_path: Path) -> None:
    for each in (1, 4):
        config = numbers_config(
            tmp_path / str(each), batches_per_file=each, train_batches=10, val_batches=0,
            backlog_batches=100,
        )  # fmt: skip
        assert Numbers(config).run() == {"train": 10, "val": 0}
        assert Numbers(config).run() == {"train": 0, "val": 0}
        with DatasetConsumer(config.folder) as consumer:
            assert [int(x[0, 0]) for x, _ in consumer.batches("train")] == list(range(10))
            assert list(consumer.batches("val")) == []


def test_a_split_that_has_ended_before_is_told(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=10, val_batches=0, backlog_batches=100)
    for ended in ([], [("train", 10), ("val", 0)]):
        heard: list[Any] = []
        with closing(Events("prepare")) as events:
            events.listen(heard.append)
            Numbers(config).run(events=events)
        assert [one["message"] for one in heard if one["kind"] == "warn"] == [
            f"split {name!r} has ended: all {count} batches are made" for name, count in ended
        ]


def test_what_is_removed_by_hand_is_made_again(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    Numbers(config).run()
    folder = config.folder / "queue" / "train"
    content = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    (folder / f"{2:020d}.safetensors").unlink()
    assert Numbers(config).run() == {"train": 1, "val": 0}
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == content


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[:-1],
    "zeros": lambda data: bytes(len(data)),
    "no data": lambda data: data[:-8] + bytes(8),
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "longer": lambda data: data + b"x",
    "not ours": lambda data: b"\x80\x04cos\nsystem\n.",
}


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("repeatable", [True, False])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_damaged_is_made_again_and_told(
    tmp_path: Path, each: int, repeatable: bool, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Random, "repeatable", repeatable)
    config = numbers_config(
        tmp_path, train_batches=10, val_batches=0, backlog_batches=100, batches_per_file=each
    )
    Random(config).run()
    folder = config.folder / "queue" / "train"
    content = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    for number in (each, 2 * each):
        name = f"{number:020d}.safetensors"
        (folder / name).write_bytes(WRONG[wrong](content[name]))
    events = Events("prepare", path=tmp_path / "events.jsonl")
    assert Random(config).run(events=events) == {"train": 2 * each, "val": 0}
    events.close()
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == content
    (line,) = [line for line in (tmp_path / "events.jsonl").read_text().splitlines()
               if '"warn"' in line and "has ended" not in line]  # fmt: skip
    assert (
        f"2 of the files that were there are not whole, as after a power cut; they are made "
        f"again: batch {each}, {2 * each}" in json.loads(line)["message"]
    )


def test_a_file_that_has_fewer_batches_than_it_must_have_is_made_again(tmp_path: Path) -> None:
    config = numbers_config(
        tmp_path, train_batches=7, val_batches=0, backlog_batches=100, batches_per_file=3
    )
    provider = Numbers(config)
    provider.run()
    folder = config.folder / "queue" / "train"
    content = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    layout = provider.about().layout("train", "")
    short = layout.encode(3, [provider.make_batch("train", n, layout.schema) for n in (3, 4)])
    (folder / layout.name(3)).write_bytes(b"".join(short))
    assert Numbers(config).run() == {"train": 3, "val": 0}
    assert {path.name: path.read_bytes() for path in folder.glob("*.safetensors")} == content


def test_a_file_that_is_removed_while_it_is_checked_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consumer releases batches while the provider reads them."""
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    Numbers(config).run()
    provider = Numbers(config)
    queue = Queue(config.folder)
    consumer = queue.split("train", provider.about(), consumer=True)
    made_then = Split.made

    def listed(self: Split) -> list[int]:
        found = made_then(self)
        if self.layout.split == "train":
            consumer.raise_floor(4)
        return found

    monkeypatch.setattr(Split, "made", listed)
    assert provider.run() == {"train": 0, "val": 0}
    assert made(config) == [4, 5]


def test_a_provider_that_is_stopped_while_it_checks_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    Numbers(config).run()
    damaged = config.folder / "queue" / "train" / f"{0:020d}.safetensors"
    damaged.write_bytes(b"")
    provider, looked = Numbers(config), []
    is_whole = Split.is_whole

    def note(self: Split, number: int, *rest: Any) -> bool:
        looked.append(number)
        provider.stopped_by = signal.SIGTERM
        return is_whole(self, number, *rest)

    monkeypatch.setattr(Split, "is_whole", note)
    assert provider.run() == {"train": 0, "val": 0}
    assert looked == [0]
    monkeypatch.undo()
    assert Numbers(config).run() == {"train": 1, "val": 0}


def test_changed_code_is_an_error_also_where_files_are_damaged(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    Numbers(config).run()
    damaged = config.folder / "queue" / "train" / f"{5:020d}.safetensors"
    damaged.write_bytes(b"")
    with pytest.raises(BadBatch, match="batch 4 of split 'train' comes out different"):
        Changed(config).run()
    assert damaged.read_bytes() == b""  # nothing of the changed code is among the others


def synced_by(action: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all that is synced meanwhile."""
    found, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        found.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    action()
    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_only_what_cannot_be_made_again_is_synced_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for repeatable in (True, False):
        monkeypatch.setattr(Numbers, "repeatable", repeatable)
        config = numbers_config(tmp_path / str(repeatable), backlog_batches=30)

        def fill(config: SharedConfig = config) -> None:
            with running(Numbers(config)):
                until(lambda: len(made(config)) == 30)

        names = synced_by(fill, monkeypatch)
        drafts = [name for name in names if name.startswith(".tmp-0-")]
        # meta.json and a floor of each split have temporary names too
        assert len(drafts) == 3 if repeatable else len(drafts) >= 33


def test_a_provider_that_has_made_all_has_synced_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = numbers_config(
        tmp_path, train_batches=7, val_batches=2, backlog_batches=100, batches_per_file=2
    )
    names = synced_by(Numbers(config).run, monkeypatch)
    synced = [name for name in names if name.endswith(".safetensors")]
    assert [int(name[:20]) for name in synced] == [0, 2, 4, 6, 0]
    assert names[-1] == "val"
    (config.folder / "queue" / "train" / f"{2:020d}.safetensors").unlink()
    split = Queue(config.folder).split("train", Numbers(config).about())
    names = synced_by(lambda: split.sync(7), monkeypatch)  # one is read and removed meanwhile
    assert [int(name[:20]) for name in names[:-1]] == [0, 4, 6]


@pytest.mark.parametrize("each", [1, 3])
def test_a_provider_may_use_its_arrays_again(tmp_path: Path, each: int) -> None:
    class Reusing(Numbers):
        def __init__(self, config: SharedConfig) -> None:
            super().__init__(config)
            self.array = np.zeros((1, 2), np.int64)

        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            self.array[:] = super().sample_batch(split, rng)["x"]
            return {"x": self.array, "y": self.array}

    config = numbers_config(
        tmp_path, batches_per_file=each, train_batches=7, val_batches=0, backlog_batches=100
    )
    Reusing(config).run()
    assert taken(config, 7) == [[number] * 2 for number in range(7)]


class Wrong(Numbers):
    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        batch = super().sample_batch(split, rng)
        return {**batch, "y": batch["y"].astype(np.int16)} if self.batch_number == 2 else batch


def test_a_batch_that_is_not_as_the_schema_says_is_not_written(tmp_path: Path) -> None:
    config = numbers_config(tmp_path)
    with pytest.raises(BadBatch, match="field 'y' is int16") as caught:
        Wrong(config).run()
    assert caught.value.where == "batch 2 of split 'train', from Wrong.sample_batch"
    assert set(made(config)) <= {0, 1}


def test_another_provider_is_refused_while_one_runs(tmp_path: Path) -> None:
    config = numbers_config(tmp_path)
    with running(Numbers(config)):
        until(lambda: made(config) != [])
        assert Queue(config.folder).has_provider()
        with pytest.raises(BadConfig, match="another provider fills this queue"):
            Numbers(config).run()
        with pytest.raises(BadConfig, match="another provider fills this queue"):
            Numbers(config).purge()
    assert not Queue(config.folder).has_provider()


class Vocabulary(Numbers):
    def build_meta(self) -> dict[str, Any]:
        return {**super().build_meta(), "vocab_size": 1001}


class Narrow(Numbers):
    def build_meta(self) -> dict[str, Any]:
        meta = super().build_meta()
        meta["batch_schema"][0]["dtype"] = "int32"
        return meta

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        batch = super().sample_batch(split, rng)
        return {**batch, "x": batch["x"].astype(np.int32)}


@pytest.mark.parametrize(
    ("changed", "kind", "told"),
    [
        ({}, Vocabulary, "meta.vocab_size: 1000 before, 1001 now"),
        ({}, Narrow, "meta.batch_schema: "),
        ({"mask_probability": 0.2}, Numbers, "mask_probability: None before, 0.2 now"),
        ({"block_size": 3}, Numbers, "block_size: 2 before, 3 now"),
        ({"batch_size": 2}, Numbers, "batch_size: 1 before, 2 now"),
        ({"seed": 1}, Numbers, "seed: 1337 before, 1 now"),
        ({"batches_per_file": 2}, Numbers, "batches_per_file: 1 before, 2 now"),
    ],
)
def test_stale_batches_are_refused_with_the_command_that_purges(
    tmp_path: Path, changed: dict[str, Any], kind: type[Numbers], told: str
) -> None:
    ends = {"train_batches": 3, "val_batches": 0}
    Numbers(numbers_config(tmp_path, **ends)).run()
    other = numbers_config(tmp_path, **ends, **changed)
    with pytest.raises(BadConfig, match="made under other settings") as caught:
        kind(other).run()
    assert told in caught.value.why
    assert caught.value.do.startswith("purge it: penstock prepare config.py --purge")
    kind(other).purge()
    assert made(other) == []
    assert kind(other).run() == {"train": 3, "val": 0}


def test_settings_of_the_trainer_and_the_queue_change_no_batch(tmp_path: Path) -> None:
    ends = {"train_batches": 3, "val_batches": 0}
    Numbers(numbers_config(tmp_path, **ends)).run()
    other = numbers_config(
        tmp_path, **ends, learning_rate=0.1, max_iters=7, backlog_batches=5, stall_s=9.0
    )
    assert Numbers(other).run() == {"train": 0, "val": 0}

    class Chosen(Numbers):
        data_settings = ("train_batches", "val_batches")

    chosen = numbers_config(tmp_path / "chosen", **ends)
    Chosen(chosen).run()
    more = numbers_config(tmp_path / "chosen", **ends, my_notes="none of a batch's business")
    assert Chosen(more).run() == {"train": 0, "val": 0}


class Changed(Numbers):
    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        batch = super().sample_batch(split, rng)
        return {**batch, "y": batch["y"] + 1}


class Shorter(Numbers):
    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        if self.batch_number:
            raise StopIteration
        return super().sample_batch(split, rng)


@pytest.mark.parametrize("kind", [Changed, Shorter])
def test_a_provider_that_makes_other_batches_than_before_is_refused(
    tmp_path: Path, kind: type[Numbers], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = numbers_config(tmp_path, train_batches=3, val_batches=0)
    Numbers(config).run()
    with pytest.raises(BadBatch, match="batch 2 of split 'train' comes out different") as caught:
        kind(config).run()
    assert "penstock prepare config.py --purge" in caught.value.do
    monkeypatch.setattr(kind, "repeatable", False)
    assert kind(config).run() == {"train": 0, "val": 0}


class Cursor(Numbers):
    """Reads on where it stands, whatever the number of the batch is."""

    batches = 9

    def __init__(self, config: SharedConfig) -> None:
        super().__init__(config)
        self._at = 0

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        self._at += 1
        if self._at > self.batches:
            raise StopIteration
        x = np.full((self.batch_size, self.block_size), self._at)
        return {"x": x, "y": x}


@pytest.mark.parametrize("batches", [9, 1])
def test_a_provider_that_counts_for_itself_is_refused_before_its_first_batch(
    tmp_path: Path, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the trainer has taken all of its batches nothing is left to compare with: started
    again, it would give them once more under new numbers."""
    monkeypatch.setattr(Cursor, "batches", batches)
    config = numbers_config(tmp_path, train_batches=3, val_batches=0)
    with pytest.raises(BadBatch, match="batch 0 of split 'train' is another one when") as caught:
        Cursor(config).run(splits=["train"])
    assert "take what to read from self.batch_number" in caught.value.do
    assert not list((config.folder / "queue" / "train").glob("*.safetensors"))
    monkeypatch.setattr(Cursor, "repeatable", False)
    assert Cursor(config).run(splits=["train"]) == {"train": batches}


@pytest.mark.parametrize("each", [1, 2])
def test_a_split_does_not_end_in_a_gap(tmp_path: Path, each: int) -> None:
    """A power cut took a file, and the provider that makes it again has no such batch: the end
    would be before batches that are there, and they would be lost without a word."""
    config = numbers_config(tmp_path, train_batches=9, val_batches=0, batches_per_file=each)
    Numbers(config).run(splits=["train"])
    folder = config.folder / "queue" / "train"
    (folder / f"{4:020d}.safetensors").unlink()
    (folder / "end.json").unlink()

    class Gap(Numbers):
        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            if self.batch_number == 4:
                raise StopIteration
            return super().sample_batch(split, rng)

    if each == 2:  # the last file has one batch, and without an end that is none
        (folder / f"{8:020d}.safetensors").unlink()
    with pytest.raises(BadBatch, match="batch 4 of split 'train' comes out different") as caught:
        Gap(config).run()
    assert f"there is a batch {8 if each == 1 else 6}: " in caught.value.why
    assert not (folder / "end.json").exists()
    assert Numbers(config).run()["train"] == (1 if each == 1 else 3)


@pytest.mark.parametrize(
    ("meta", "told"),
    [
        ([1], "build_meta gave list"),
        ({"itos": {0: "a"}}, r"build_meta\(\)\['itos'\] has the key 0"),
        ({"sizes": [np.int64(3)]}, r"build_meta\(\)\['sizes'\]\[0\] is"),
        ({"rate": float("nan")}, r"build_meta\(\)\['rate'\] is nan"),
        ({"vocab_size": 3}, "batch_schema is None"),
    ],
)
def test_meta_that_json_cannot_hold_is_refused(tmp_path: Path, meta: Any, told: str) -> None:
    class Meta(Numbers):
        def build_meta(self) -> dict[str, Any]:
            return meta  # type: ignore[no-any-return]

    with pytest.raises(BadConfig, match=told):
        Meta(numbers_config(tmp_path)).run()


def test_a_purge_that_was_killed_is_finished_by_the_next_provider(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=3, val_batches=0)
    Numbers(config).run()
    (config.folder / "queue" / "meta.json").unlink()  # the first that a purge removes
    (config.folder / "queue" / "train" / "old.pt").write_bytes(b"not ours")
    other = numbers_config(tmp_path, train_batches=2, val_batches=0, block_size=3)
    assert Numbers(other).run() == {"train": 2, "val": 0}
    assert made(other) == [0, 1]
    assert (config.folder / "queue" / "train" / "old.pt").exists()


def test_a_queue_that_was_changed_by_hand_is_refused(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=3, val_batches=0)
    Numbers(config).run()
    path = config.folder / "queue" / "meta.json"
    content = path.read_bytes()
    for wrong in (b"{}", b"x", content.replace(b"1000", b"2000")):
        path.write_bytes(wrong)
        with pytest.raises(LogDamaged, match="not as a provider writes it"):
            Numbers(config).run()
    path.write_bytes(content)
    (config.folder / "queue" / "train" / "end.json").write_bytes(b"[]")
    with pytest.raises(LogDamaged, match=r"end\.json of the queue is not as it was written"):
        Numbers(config).run()
    (config.folder / "queue" / "train" / "end.json").unlink()
    for floor in (config.folder / "queue" / "train" / "_floor").iterdir():
        floor.unlink()
    with pytest.raises(LogDamaged, match="does not say which batches are done with"):
        Numbers(config).run()


def test_a_failed_write_ends_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: Split, files: Any, **_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Split, "publish", publish)
    with pytest.raises(OSError, match="No space"):
        Numbers(numbers_config(tmp_path)).run()


def test_a_failed_write_is_told_whatever_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file fails while the next waits: the provider must neither go on nor let it appear,
    or its consumers would wait for the first for ever."""
    publish, waits = Split.publish, threading.Event()
    failed: list[list[str]] = []

    def fail_first(self: Split, files: Any, **how: Any) -> None:
        if not failed:
            failed.append([file.name for file in files])
            assert waits.wait(20)
            for file in files:
                file.close()
            raise OSError(28, "No space left on device")
        publish(self, files, **how)

    class Slow(Numbers):
        repeatable = False  # then files are synced, and wait for it

        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            if self.batch_number == 3:
                waits.set()
            return super().sample_batch(split, rng)

    monkeypatch.setattr(Split, "publish", fail_first)
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    with pytest.raises(OSError, match="No space"):
        Slow(config).run()
    assert failed == [[f"{0:020d}.safetensors"]]
    assert made(config) == []
    monkeypatch.setattr(Split, "publish", publish)
    assert Slow(config).run() == {"train": 6, "val": 0}
    assert made(config) == list(range(6))


@pytest.mark.parametrize("each", [1, 3])
def test_all_that_was_not_synced_before_the_end_was_known_is_made_again(
    tmp_path: Path, each: int
) -> None:
    """The end is durable before the files are; then the power is cut."""
    config = numbers_config(
        tmp_path, train_batches=10, val_batches=0, backlog_batches=100, batches_per_file=each
    )
    Numbers(config).run()
    for path in sorted((config.folder / "queue" / "train").glob("*.safetensors"))[1:]:
        path.unlink()
    assert Numbers(config).run() == {"train": 10 - each, "val": 0}
    assert made(config) == list(range(0, 10, each))


def test_another_end_than_before_is_refused(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    Numbers(config).run()
    for path in sorted((config.folder / "queue" / "train").glob("*.safetensors"))[1:]:
        path.unlink()
    with pytest.raises(BadBatch, match="batch 1 of split 'train' comes out different") as caught:
        Shorter(config).run()
    assert "there were 6 in all" in caught.value.why

    class Longer(Numbers):
        def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
            x = np.full((self.batch_size, self.block_size), self.batch_number)
            return {"x": x, "y": x}

    Longer(config).run(["train"])
    assert made(config) == list(range(6))  # the end holds


def test_settings_that_differ_in_type_alone_are_told(tmp_path: Path) -> None:
    """1 and 1.0 are one number to Python, and two to the fingerprint."""
    ends = {"train_batches": 3, "val_batches": 0}
    Numbers(numbers_config(tmp_path, **ends, level=1, steps=[1, 2])).run()
    with pytest.raises(BadConfig, match="made under other settings") as caught:
        Numbers(numbers_config(tmp_path, **ends, level=1.0, steps=[1, 3])).run()
    assert caught.value.why.splitlines() == [
        "level: 1 before, 1.0 now",
        "steps: [1, 2] before, [1, 3] now",
    ]


def test_a_provider_starts_while_somebody_asks_whether_one_runs(tmp_path: Path) -> None:
    """Who asks holds the lock for a moment."""
    config = numbers_config(tmp_path, train_batches=3, val_batches=0)
    Numbers(config).run()
    descriptor = os.open(config.folder / "queue" / "_provider", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    leaving = threading.Timer(0.005, os.close, [descriptor])
    leaving.start()
    assert Numbers(config).run() == {"train": 0, "val": 0}
    leaving.join()


def test_after_a_purge_a_resumed_trainer_gets_what_it_needs_and_no_more(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, backlog_batches=4)
    keep = ConsumerConfig(delete="checkpointed", stall_s=20)

    def take(state: Any, count: int) -> tuple[Any, list[int]]:
        until(lambda: (config.folder / "queue" / "meta.json").exists())
        with DatasetConsumer(config.folder, keep) as consumer:
            if state is not None:
                consumer.load_state_dict(state)
            found = [int(consumer.get_batch("train")[0][0, 0]) for _ in range(count)]
            return consumer.state_dict(), found

    with running(Numbers(config)):
        state, _ = take(None, 300)
    Numbers(config).purge()
    provider = Numbers(config)
    numbers: list[int] = []
    make = provider.sample_batch

    def noted(split: str, rng: Any) -> dict[str, Any]:
        numbers.append(provider.batch_number)
        return make(split, rng)

    provider.sample_batch = noted  # type: ignore[method-assign]
    with running(provider):
        until(lambda: made(config) != [])
        assert take(state, 5)[1] == list(range(300, 305))
    assert len(numbers) < 100


def test_few_files_wait_to_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "MOST_WAITING", 2)
    monkeypatch.setattr(Numbers, "repeatable", False)
    config = numbers_config(tmp_path, train_batches=20, val_batches=0, backlog_batches=100)
    assert Numbers(config).run() == {"train": 20, "val": 0}
    assert made(config) == list(range(20))


def test_it_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "TELL_S", 0.0)
    events = Events("prepare", path=tmp_path / "events.jsonl")
    config = numbers_config(tmp_path, train_batches=3, val_batches=0)
    Numbers(config).run(events=events)
    events.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "train 3" in lines[-1]["input"]
    assert lines[-1]["at"] > 0


def test_a_zombie_that_writes_what_is_done_with_leaves_nothing(tmp_path: Path) -> None:
    config = numbers_config(tmp_path, train_batches=6, val_batches=0, backlog_batches=100)
    provider = Numbers(config)
    provider.run()
    queue = Queue(config.folder)
    split = queue.split("train", provider.about())
    draft = split.draft(1, [provider.make_batch("train", 1, split.layout.schema)])
    split.raise_floor(4)
    assert made(config) == [4, 5]
    split.publish([draft], synced=False)
    assert made(config) == [4, 5]
    assert os.listdir(split.root / "_floor") != []
