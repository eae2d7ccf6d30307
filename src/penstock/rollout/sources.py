"""Where rollouts come from: memory, files, or a dataset that is still written to.

In:    what a user gives a loader
Out:   rollouts by shards, checked, in an order that only grows
Keeps: the same shards every time; a dataset's bytes are those of its log, or an error names them
Never: takes silence for the end
"""

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import xxhash

from penstock.arrays import Int32s, offsets_of
from penstock.errors import BadConfig, InputMissing
from penstock.options import checked_path, suggest
from penstock.rollout.check import (
    REASONS,
    Encodes,
    check_records,
    check_table,
    find_repeats,
    read_rollouts,
)
from penstock.rollout.records import CONFIG, KIND, Checked, Fault, Rollouts
from penstock.supply.settings import LoaderRun
from penstock.supply.sources.dataset import DatasetSource, OverShards, SourceConfig
from penstock.supply.sources.open import await_first, open_source
from penstock.tokenize.tokenizer import Tokenizer

SUFFIXES: Final = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather")
MEMORY_ROWS: Final = 4096
"""Rollouts in memory are read by so many at a time."""
POLL_S: Final = 0.1
"""How often the log is asked for more, at most."""

Given = Sequence[Mapping[str, Any]] | Rollouts | str | os.PathLike[str]
"""Or a table of Arrow's."""
Check = Callable[[Any, str], Checked]


class RolloutShards:
    """A source of rollouts, by shards: what is the same wherever they come from."""

    name = "rollouts"

    @property
    def url(self) -> str:
        return self.name

    def wait_shard(self, shard: int) -> bool:
        raise NotImplementedError

    def decode(self, shard: int) -> Checked:
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        return True

    @property
    def num_known(self) -> int:
        raise NotImplementedError

    def num_rollouts(self) -> int:
        """Rollouts that are there by now."""
        raise NotImplementedError

    def has_shard(self, shard: int) -> bool | None:
        return self.wait_shard(shard)

    def group_sizes(self, shard: int, rollouts: Rollouts) -> Int32s:
        """Of each rollout of a shard, how many its group has in all; 0 where it is not known."""
        return rollouts.group_size

    def check_reward_names(self, names: Iterable[str]) -> None:
        """Refuse names of rewards that no rollout has; more may come where data grows."""

    def rows(self, shard: int) -> int:
        return len(self.decode(shard).rows)

    def lengths(self, shard: int) -> Int32s:
        return self.decode(shard).rollouts.lengths.astype(np.int32)

    def stored_bytes(self, shard: int) -> int:
        return 1

    def volume(self, shard: int) -> int:
        return 1

    def forget(self, shard: int) -> None:
        """Nothing is remembered of a shard."""

    def forget_but(self, shards: set[int]) -> None:
        """Nor of several."""

    def reopen(self) -> None:
        """Nothing ends with a fork."""

    def identity(self) -> dict[str, str | int]:
        raise NotImplementedError

    def check_identity(self, seen: dict[str, str | int]) -> str:
        mine = self.identity()
        differ = [key for key in mine if seen.get(key) != mine[key]]
        return "; ".join(f"{key}: {seen.get(key)} before, {mine[key]} now" for key in differ)


class MemoryShards(RolloutShards):
    """Rollouts that are in memory, all of them."""

    def __init__(self, checked: Checked, name: str) -> None:
        self.name = name
        self._all = checked
        groups = checked.rollouts.groups()
        # a group that lacks one that was refused is not complete without it
        refused = Counter(one.group_id for one in checked.faults if one.reason != "duplicate")
        names = checked.rollouts.group_id.to_pylist() if refused else []
        lacks = np.array([refused[name] for name in names] or np.zeros(len(groups)), np.int64)
        self._sizes = np.bincount(groups, minlength=1)[groups] + lacks
        # one shard at least where something was refused: it is counted there
        self._count = -(-len(checked.rollouts) // MEMORY_ROWS) or min(1, len(checked.faults))

    def wait_shard(self, shard: int) -> bool:
        return shard < self._count

    @property
    def num_known(self) -> int:
        return self._count

    def num_rollouts(self) -> int:
        return len(self._all.rollouts)

    def decode(self, shard: int) -> Checked:
        first = shard * MEMORY_ROWS
        rows = np.arange(first, min(first + MEMORY_ROWS, len(self._all.rollouts)))
        rollouts = self._all.rollouts
        if len(rows) < len(rollouts):
            rollouts = rollouts.take(rows)
        faults = self._all.faults if shard == 0 else []
        return Checked(rollouts, np.arange(len(rows)), faults)

    def check_reward_names(self, names: Iterable[str]) -> None:
        known = self._all.rollouts.rewards
        for name in names:
            if name not in known:
                raise BadConfig(
                    f"no rollout has a reward called {name!r}", do=suggest(name, sorted(known))
                )

    def group_sizes(self, shard: int, rollouts: Rollouts) -> Int32s:
        first = shard * MEMORY_ROWS
        in_all = self._sizes[first : first + len(rollouts)]
        told = rollouts.group_size
        return np.where(told == 0, in_all, told).astype(np.int32)

    def identity(self) -> dict[str, str | int]:
        rollouts = self._all.rollouts
        hashed = xxhash.xxh3_64(rollouts.reward.tobytes())
        for column in (rollouts.rollout_id, rollouts.group_id):
            hashed.update("\0".join(column.to_pylist()).encode())
        tokens = int(rollouts.lengths.sum())
        return {"rollouts": len(rollouts), "tokens": tokens, "ids": hashed.hexdigest()}


class LiveShards(OverShards, RolloutShards):
    """The rollouts of a dataset, finished or still growing."""

    def __init__(self, shards: DatasetSource, check: Check) -> None:
        super().__init__(shards)
        self._check = check
        shards.poll_s = POLL_S
        opened = shards.log.state.opened
        config = opened.config if opened else {}
        if config.get("kind") == KIND and config != CONFIG:
            raise BadConfig(
                "the dataset of rollouts was begun by another penstock",
                where=shards.url,
                why=f"its settings are {config}, those of this penstock {CONFIG}",
                do="use the penstock that began it",
            )
        if config.get("kind") != KIND:
            raise BadConfig(
                f"{shards.url} is a dataset, and not of rollouts",
                where=shards.url,
                do="give a dataset that RolloutWriter writes, or files of rollouts",
            )

    def num_rollouts(self) -> int:
        return sum(self.shards.rows(shard) for shard in range(self.shards.num_known))

    def decode(self, shard: int) -> Checked:
        table = self.shards.read_table(shard)
        return self._check(table, self.shards.place(self.shards.file(shard)))


def open_rollouts(
    given: Given, tokenizer: Tokenizer | None, run: LoaderRun, *, bad: str, retokenize: bool,
    streaming: bool,
) -> RolloutShards:  # fmt: skip
    """The source behind what was given."""
    encodes: Encodes | None = tokenizer
    options: dict[str, Any] = {
        "bad": bad, "tokenizer": encodes, "retokenize": retokenize
    }  # fmt: skip
    if isinstance(given, Rollouts):
        return MemoryShards(Checked(given, np.arange(len(given))), "rollout_data")
    if isinstance(given, pa.Table | pa.RecordBatch):
        return MemoryShards(check_table(given, **options), "rollout_data")
    if not isinstance(given, str | os.PathLike):
        if not isinstance(given, Sequence):
            raise BadConfig(
                f"rollout_data is {type(given).__name__}",
                do="give a list of records, a table, or the path of files or of a dataset",
            )
        records: Any = given
        return MemoryShards(check_records(records, **options), "rollout_data")
    path = checked_path("rollout_data", given)
    files = _files(path)
    if files:
        parts = {file: read_rollouts(file, **options) for file in files}
        return MemoryShards(_joined(parts, bad), path)
    if os.path.isfile(path):
        read_rollouts(path)  # says which files there are
    if not streaming and "://" not in path and not os.path.exists(path):
        raise InputMissing(f"there is nothing at {path}", where=path, do="check the path")
    config = SourceConfig(tokenizer=tokenizer, streaming=streaming, **run.waiting_limits())
    if "://" not in path and not DatasetSource.is_first(path):
        if streaming:
            await_first(path, config.wait_s, config.stall_s)
        if not os.path.isdir(os.path.join(path, "_log")):  # nothing else is read, or made into one
            raise BadConfig(
                f"{path} is neither a dataset of rollouts nor files of them",
                where=path,
                do=f"give {', '.join(SUFFIXES[:4])} files, or a dataset that RolloutWriter writes",
            )
    source = open_source(path, config)
    assert isinstance(source, DatasetSource)

    def check(table: pa.Table, where: str) -> Checked:
        return check_table(table, where=where, **options)

    return LiveShards(source, check)


def _files(path: str) -> list[str]:
    """The files of rollouts that a path names, in their order; none for a dataset."""
    if "://" in path or os.path.isdir(os.path.join(path, "_log")):
        return []
    if os.path.isdir(path):
        names = sorted(os.listdir(path))
        return [str(Path(path) / name) for name in names if name.endswith(SUFFIXES)]
    if glob.has_magic(path) and not os.path.exists(path):
        return sorted(glob.glob(path))
    return [path] if path.endswith(SUFFIXES) and os.path.exists(path) else []


def _joined(parts: Mapping[str, Checked], bad: str) -> Checked:
    """The rollouts of several files as one: what holds within a file holds over all of them."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    faults = [fault for part in parts.values() for fault in part.faults]

    def refuse(file: str, row: int, reason: str, why: str) -> None:
        about, known = parts[file].rollouts, parts[file].rows
        fault = Fault(
            f"{file}, row {known[row]}", int(known[row]), REASONS[reason], reason, why,
            about.rollout_id[row].as_py(), about.group_id[row].as_py(),
        )  # fmt: skip
        if bad == "raise" and reason != "duplicate":
            raise fault.error()
        faults.append(fault)

    filled = {file: part.rollouts for file, part in parts.items() if len(part.rollouts)}
    for k, name in enumerate(("logprobs", "values")):
        if len({part.kind[k] for part in filled.values()}) == 2:
            for file in [file for file, part in filled.items() if not part.kind[k]]:
                why = f"rollouts of other files have {name}, this one has none"
                for row in range(len(filled.pop(file))):
                    refuse(file, row, f"{name}_missing", why)
    joined = Rollouts.concat([*filled.values()] or [next(iter(parts.values())).rollouts])
    repeats = find_repeats(joined)
    begins, files = offsets_of([len(part) for part in filled.values()]), list(filled)
    for row, reason in repeats.items():
        number = int(np.searchsorted(begins, row, side="right")) - 1
        told = "the same rollout" if reason == "duplicate" else "another rollout"
        where = files[number]
        refuse(where, row - int(begins[number]), reason, f"{told} of that id was given before")
    if repeats:
        joined = joined.take(np.setdiff1d(np.arange(len(joined)), list(repeats)))
    return Checked(joined, np.arange(len(joined)), faults)
