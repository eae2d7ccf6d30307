"""A queue whose provider and trainer are killed, and the oracle that judges what the model saw.

In:    a folder; faults for `penstock prepare` and `penstock train`
Out:   every batch that was lost or repeated, by what the trainer's last checkpoint holds
Keeps: the oracle outside: it reads the checkpoint with `json`, and knows batch n by its content

The trainer keeps what it has seen in its checkpoint, every four batches, as a model would.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock import DataProviderBase, SharedConfig

from .calls import Call, Fault
from .disk import digest, read_state
from .sweep import NO_FAULT, Ended, Running, Small, Warm

TRAIN: Final = 10
VAL: Final = 2
PROVIDER: Final = """
import numpy as np

from penstock import DataProviderBase

ENDS = {"train": train_batches, "val": val_batches}  # settings are globals


class Numbers(DataProviderBase):
    def build_meta(self):
        fields = [{"name": name, "dtype": "int32", "shape": [self.block_size]} for name in "xy"]
        return {"training_type": "MLM", "vocab_size": 1000, "batch_schema": fields}

    def sample_batch(self, split, rng):
        if self.batch_number >= ENDS[split]:
            raise StopIteration
        x = rng.integers(0, 1000, (self.batch_size, self.block_size), np.int32)
        return {"x": x, "y": np.full_like(x, self.batch_number)}
"""
TRAINER: Final = """
import contextlib
import hashlib
import json
import os

from penstock.disk import read_own, replacing


def train(config, consumer):
    folder = consumer.queue.root.parent / "out"
    path, model = folder / "model.json", {"seen": [], "val": 0, "state": None}
    with contextlib.suppress(FileNotFoundError):
        model = json.loads(read_own(path))
    if model["state"] is not None:
        consumer.load_state_dict(model["state"])
    for x, y in consumer.batches("train"):
        model["seen"].append([int(y[0, 0]), hashlib.sha256(x.tobytes()).hexdigest()])
        if len(model["seen"]) % 4 == 0:
            model["val"] += len(consumer.get_batch("val"))
            save(folder, path, model, consumer)
    save(folder, path, model, consumer)


def save(folder, path, model, consumer):
    if consumer.config.delete == "checkpointed":
        model["state"] = consumer.state_dict()
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    with replacing(path, sync=True) as file:
        os.write(file.fileno(), json.dumps(model).encode())
    for synced in (folder, folder.parent):
        descriptor = os.open(synced, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    if consumer.config.delete == "checkpointed":
        consumer.release(model["state"])
"""


class Numbers(DataProviderBase):
    """Batch n is full of n; as many as the settings say, or without end."""

    def build_meta(self) -> dict[str, Any]:
        fields = [{"name": name, "dtype": "int64", "shape": [self.block_size]} for name in "xy"]
        return {"vocab_size": 1000, "batch_schema": fields}

    def sample_batch(self, split: str, rng: Any) -> dict[str, Any]:
        end = self.config.get(f"{split}_batches")
        if end is not None and self.batch_number >= end:
            raise StopIteration
        x = np.full((self.batch_size, self.block_size), self.batch_number)
        return {"x": x, "y": x}


def numbers_config(folder: Path, **settings: Any) -> SharedConfig:
    """The config of such a provider."""
    values = {"dataset": "numbers", "batch_size": 1, "block_size": 2, **settings}
    return SharedConfig(values, root=folder, name="config.py")


def write_project(root: Path, **settings: Any) -> Path:
    """A provider, a trainer and a config; returns the config."""
    given = {
        "dataset": "numbers", "batch_size": 2, "block_size": 3, "backlog_batches": 100,
        "stall_s": 20.0, "train_batches": TRAIN, "val_batches": VAL, **settings,
    }  # fmt: skip
    (root / "data" / "numbers").mkdir(parents=True)
    (root / "data" / "numbers" / "prepare_streaming.py").write_text(PROVIDER)
    (root / "train.py").write_text(TRAINER)
    config = root / "config.py"
    config.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()))
    return config


def expected() -> list[list[Any]]:
    """What the trainer must have seen: numbers of batches and hashes of their content."""
    found: list[list[Any]] = []
    key = np.array([1337, 0], np.uint64)
    for number in range(TRAIN):
        rng = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, number]))
        x = rng.integers(0, 1000, (2, 3), np.int32)
        found.append([number, hashlib.sha256(x.tobytes()).hexdigest()])
    return found


@dataclass(slots=True)
class Pair(Small):
    """A provider and a trainer; either may be killed."""

    settings: dict[str, Any] = field(default_factory=dict)
    command: str = "prepare"
    """Which of the two `shard`, `strace` and `calls` are about."""
    filled: Path | None = None
    """A queue that holds everything, to begin with."""

    @classmethod
    def make(cls, warm: Warm, scratch: Path, command: str, **settings: Any) -> "Pair":
        pair = cls(warm, scratch, scratch / "none", settings=settings, command=command)
        scratch.mkdir()
        write_project(scratch / "project", **settings)
        folder = pair.folder("undisturbed")
        listed = scratch / "calls.json"
        ended = pair.penstock("prepare", folder, calls=listed)
        assert ended.code == 0, str(ended)
        if command == "train":
            pair.filled = scratch / "filled"
            shutil.copytree(folder, pair.filled)
            ended = pair.penstock("train", folder, calls=listed)
        else:
            ended = pair.penstock("train", folder)
        assert ended.code == 0, str(ended)
        pair.calls = [Call(*row) for row in json.loads(listed.read_text())]
        assert not pair.judge(folder)
        shutil.rmtree(folder.parents[1])
        return pair

    def folder(self, name: str) -> Path:
        """data/numbers of a copy of the project, in which one run happens."""
        root = self.scratch / name
        (root / "data").mkdir(parents=True)
        source = self.filled or self.scratch / "project" / "data" / "numbers"
        shutil.copytree(source, root / "data" / "numbers")
        return root / "data" / "numbers"

    def start(self, folder: Path, *, with_verify: bool = False, **options: Any) -> Running:
        return self.begin(self.command, folder, **options)

    def begin(self, command: str, folder: Path, **options: Any) -> Running:
        """`penstock prepare` or `train` on data in `folder`."""
        config, root = self.scratch / "project" / "config.py", folder.parents[1]
        if not (root / "train.py").exists():  # on a disk that has lost its power nothing is written
            shutil.copy(self.scratch / "project" / "train.py", root)
        argv = [command, str(config), "--root", str(root)]
        return self.warm.start([argv], folder=folder, input=self.input, **options)

    def penstock(
        self, command: str, folder: Path, fault: Fault = NO_FAULT, **options: Any
    ) -> Ended:
        ended = self.begin(command, folder, fault=fault, **options).wait()
        assert ended is not None
        return ended

    def seen(self, folder: Path) -> list[list[Any]]:
        """What is in the model by its last checkpoint."""
        path = folder / "out" / "model.json"
        found: list[list[Any]] = json.loads(path.read_bytes())["seen"] if path.exists() else []
        return found

    def faults(self, folder: Path, *, exact_hashes: bool = True) -> list[str]:
        """What is wrong once the provider and the trainer have been given to their ends."""
        found = []
        for command in ("prepare", "train"):
            ended = self.penstock(command, folder, seed=2)
            if ended.code != 0:
                found.append(f"{command} failed: {ended}")
        return found + self.judge(folder)

    def judge(self, folder: Path) -> list[str]:
        """Batches of the last checkpoint that are lost, repeated or wrong; files that are left."""
        seen = self.seen(folder)
        numbers = [number for number, _ in seen]
        found = [f"batch {n} lost" for n in range(TRAIN) if n not in numbers]
        found += [f"batch {n} repeated" for n in sorted({*numbers}) if numbers.count(n) > 1]
        if not found and seen != expected():
            found.append("the batches are not those that an undisturbed run sees")
        left = [
            os.path.join(at, name)
            for at, _, names in os.walk(folder / "queue")
            for name in names
            if name.startswith(".tmp-") or name.endswith(".safetensors")
        ]
        if self.settings.get("delete") == "consumed":  # what it lost it could not validate by
            left = [name for name in left if ".tmp-" in name]
        each = self.settings.get("batches_per_file", 1)
        if len(left) != sum(batches % each > 0 for batches in (TRAIN, VAL)):  # shorter last files
            found.append(f"left over: {left}")
        return found

    def after_kill(self, folder: Path, *, every: bool = False) -> list[str]:
        """What is wrong after the same commands were given again; the folder is used up. Equal
        states have equal futures: each is judged once, unless `every` asks for all."""
        key = digest(read_state(folder))
        if every or key not in self.judged:
            self.restarts += 1
            self.judged[key] = self.faults(folder)
        shutil.rmtree(folder.parents[1])
        return self.judged[key]


def points(pair: Pair, keep: int) -> Sequence[int]:
    """About so many of a run's calls, evenly."""
    count = len(pair.calls)
    return range(1, count + 1) if keep >= count else [1 + k * count // keep for k in range(keep)]
