"""Rollouts: what inference engines sampled and what came of it, as columns.

In:    columns that were checked
Out:   the same rollouts picked, joined, summed up, or as a table of Arrow's
Keeps: token ids as they were sampled; ids, masks and log-probabilities lie end to end: those of
       rollout k are at[k] to at[k + 1]
Never: loops over tokens in Python
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays import Bools, Floats, Int32s, Int64s, offsets_of, values_of
from penstock.errors import BadRollout
from penstock.prepare.wire import numbers, strings

Float32s = npt.NDArray[np.float32]

LISTS: Final = {
    "prompt_ids": pa.int32(), "completion_ids": pa.int32(), "completion_mask": pa.uint8(),
    "logprobs": pa.float32(), "values": pa.float32(), "weight_versions": pa.int64(),
}  # fmt: skip

SCHEMA: Final = pa.schema(
    [
        pa.field("rollout_id", pa.string(), nullable=False),
        pa.field("group_id", pa.string(), nullable=False),
        pa.field("group_size", pa.int32()),
        *(
            pa.field(name, pa.large_list(kind), nullable=name in ("logprobs", "values"))
            for name, kind in LISTS.items()
        ),
        pa.field("reward", pa.float64()),
        pa.field("rewards", pa.map_(pa.string(), pa.float64())),
        pa.field("temperature", pa.float32()),
        pa.field("top_p", pa.float32()),
        pa.field("finish_reason", pa.string()),
        pa.field("meta", pa.string()),
    ]
)
"""How rollouts lie in parquet files. `meta` is JSON."""


KIND: Final = "rollouts"
CONFIG: Final[dict[str, Any]] = {"kind": KIND, "shared": True, "version": 1}
"""What the log of a dataset of rollouts is opened with."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rollout that cannot be trained on."""

    where: str
    """The file and the line or row in it."""
    row: int
    """Its number among those that were given, from 0 on."""
    field: str
    reason: str
    why: str
    """What was found, and what was expected."""
    rollout_id: str = ""
    group_id: str = ""

    def error(self) -> BadRollout:
        """The same as an error."""
        error = BadRollout(
            f"{self.field}: {self.reason.replace('_', ' ')}",
            where=self.where + (f", rollout {self.rollout_id!r}" if self.rollout_id else ""),
            why=self.why,
            do='fix what writes rollouts, or let such ones be counted and left out (bad="reject")',
        )
        error.row, error.field, error.reason = self.row, self.field, self.reason
        return error

    def as_json(self) -> dict[str, Any]:
        """A line for a file of rejects."""
        return {
            "where": self.where, "row": self.row, "field": self.field, "reason": self.reason,
            "why": self.why, "rollout_id": self.rollout_id, "group_id": self.group_id,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Rollouts that can be trained on."""

    rollout_id: pa.StringArray
    group_id: pa.StringArray
    group_size: Int32s
    """Rollouts of its group in all; 0 where nobody said."""
    prompt_ids: Int32s
    prompt_at: Int64s
    completion_ids: Int32s
    completion_at: Int64s
    mask: Bools
    """Of each token of a completion, whether it was sampled; not so what a tool wrote."""
    logprobs: Float32s | None
    """Of each such token when it was sampled; 0 where it was not."""
    values: Float32s | None
    reward: Floats
    """Not a number where only named ones were given."""
    rewards: dict[str, Floats]
    """By name; not a number where a rollout has none of that name."""
    versions: Int64s
    version_at: Int64s
    temperature: Float32s
    top_p: Float32s
    finish_reason: pa.StringArray
    meta: pa.StringArray

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def lengths(self) -> Int64s:
        """Tokens of each rollout, prompt and completion."""
        found: Int64s = np.diff(self.prompt_at) + np.diff(self.completion_at)
        return found

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether they have log-probabilities, and values."""
        return self.logprobs is not None, self.values is not None

    @property
    def oldest(self) -> Int64s:
        """The oldest version of the weights that each rollout was sampled with."""
        if not len(self):
            return np.zeros(0, np.int64)
        found: Int64s = np.minimum.reduceat(self.versions, self.version_at[:-1])
        return found

    @property
    def newest(self) -> Int64s:
        """The newest one."""
        if not len(self):
            return np.zeros(0, np.int64)
        found: Int64s = np.maximum.reduceat(self.versions, self.version_at[:-1])
        return found

    def totals(self, weights: Mapping[str, float] | None = None) -> Floats:
        """The reward of each rollout: as it was given, else the sum of the named ones; with
        `weights` that of the named ones, each times its weight. One that is not there is left out;
        where none is there, it is not a number."""
        if weights is None and not self.rewards:
            return self.reward
        sums, given = np.zeros(len(self)), np.zeros(len(self), np.bool_)
        # one name after the other: a product of matrices rounds the same rewards in more than one
        # way, by where they stand, and a group without variance seems to have some
        for name in sorted(self.rewards if weights is None else weights):
            column = self.rewards.get(name)
            if column is not None:
                there = ~np.isnan(column)
                share = 1.0 if weights is None else weights[name]
                sums += np.where(there, column, 0.0) * share
                given |= there
        found = np.where(given, sums, np.nan)
        if weights is None:
            found = np.where(np.isnan(self.reward), found, self.reward)
        return found

    def groups(self) -> Int64s:
        """A number for each rollout, the same for those of one group, from 0 on as they come."""
        return values_of(self.group_id.dictionary_encode().indices, np.int32).astype(np.int64)

    def take(self, rows: Int64s) -> "Rollouts":
        """Some of them, in a new order."""
        rows = np.asarray(rows, np.int64)
        picks = numbers(rows)
        prompt, prompt_at = spans_of(self.prompt_at, rows)
        completion, completion_at = spans_of(self.completion_at, rows)
        version, version_at = spans_of(self.version_at, rows)
        return Rollouts(
            rollout_id=self.rollout_id.take(picks),
            group_id=self.group_id.take(picks),
            group_size=self.group_size[rows],
            prompt_ids=self.prompt_ids[prompt],
            prompt_at=prompt_at,
            completion_ids=self.completion_ids[completion],
            completion_at=completion_at,
            mask=self.mask[completion],
            logprobs=None if self.logprobs is None else self.logprobs[completion],
            values=None if self.values is None else self.values[completion],
            reward=self.reward[rows],
            rewards={name: column[rows] for name, column in self.rewards.items()},
            versions=self.versions[version],
            version_at=version_at,
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            finish_reason=self.finish_reason.take(picks),
            meta=self.meta.take(picks),
        )

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        arrays = [
            self.prompt_ids, self.completion_ids, self.mask, self.logprobs, self.values,
            self.prompt_at, self.completion_at, self.reward, self.versions,
        ]  # fmt: skip
        texts = (self.rollout_id, self.group_id, self.finish_reason, self.meta)
        held = sum(array.nbytes for array in arrays if array is not None)
        return int(held + sum(text.nbytes for text in texts))

    def to_table(self) -> pa.Table:
        """The same as Arrow has it, in the columns of SCHEMA."""

        def listed(name: str, values: npt.NDArray[Any], at: Int64s) -> pa.Array:
            inner = numbers(np.ascontiguousarray(values))
            kind = SCHEMA.field(name).type
            return pa.Array.from_buffers(
                kind, len(at) - 1, [None, pa.py_buffer(at)], children=[inner]
            )

        def nullable(values: npt.NDArray[Any], nulls: Bools) -> pa.Array:
            return pc.if_else(bools_of(~nulls), numbers(values), None)

        none = pa.nulls(len(self))
        mask = self.mask.view(np.uint8)
        columns = {
            "rollout_id": self.rollout_id,
            "group_id": self.group_id,
            "group_size": nullable(self.group_size, self.group_size == 0),
            "prompt_ids": listed("prompt_ids", self.prompt_ids, self.prompt_at),
            "completion_ids": listed("completion_ids", self.completion_ids, self.completion_at),
            "completion_mask": listed("completion_mask", mask, self.completion_at),
            "logprobs": none
            if self.logprobs is None
            else listed("logprobs", self.logprobs, self.completion_at),
            "values": none
            if self.values is None
            else listed("values", self.values, self.completion_at),
            "weight_versions": listed("weight_versions", self.versions, self.version_at),
            "reward": nullable(self.reward, np.isnan(self.reward)),
            "rewards": _named_as_map(self.rewards, len(self)),
            "temperature": nullable(self.temperature, np.isnan(self.temperature)),
            "top_p": nullable(self.top_p, np.isnan(self.top_p)),
            "finish_reason": self.finish_reason,
            "meta": self.meta,
        }
        arrays = [columns[about.name].cast(about.type) for about in SCHEMA]
        return pa.Table.from_arrays(arrays, schema=SCHEMA)

    @classmethod
    def concat(cls, parts: Sequence["Rollouts"]) -> "Rollouts":
        """Several as one; all with log-probabilities and values, or none."""
        if len(parts) == 1:
            return parts[0]
        names = sorted({name for part in parts for name in part.rewards})

        def joined(name: str) -> Any:
            return np.concatenate([getattr(part, name) for part in parts])

        def shifted(name: str) -> Int64s:
            sizes = [np.diff(getattr(part, name)) for part in parts]
            return offsets_of(np.concatenate(sizes))

        def texts(name: str) -> pa.StringArray:
            return pa.concat_arrays([getattr(part, name) for part in parts])

        def optional(name: str) -> Any:
            return None if any(getattr(part, name) is None for part in parts) else joined(name)

        columns: dict[str, Any] = {
            "rewards": {
                name: np.concatenate(
                    [part.rewards.get(name, np.full(len(part), np.nan)) for part in parts]
                )
                for name in names
            }
        }
        for make, of in (
            (texts, ("rollout_id", "group_id", "finish_reason", "meta")),
            (shifted, ("prompt_at", "completion_at", "version_at")),
            (optional, ("logprobs", "values")),
            (joined, ("group_size", "prompt_ids", "completion_ids", "mask", "reward", "versions",
                      "temperature", "top_p")),
        ):  # fmt: skip
            columns |= {name: make(name) for name in of}
        return cls(**columns)


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of some records."""

    rollouts: Rollouts
    rows: Int64s
    """Which of the records they are."""
    faults: list[Fault] = field(default_factory=list)
    """What is wrong with the others."""

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self.rollouts.nbytes

    @property
    def counts(self) -> dict[str, int]:
        """Faults by reason."""
        found: dict[str, int] = {}
        for fault in self.faults:
            found[fault.reason] = found.get(fault.reason, 0) + 1
        return found


def content_of(rollouts: Rollouts, row: int) -> bytes:
    """A hash of all that a rollout says, but for `meta`."""
    hashed = xxhash.xxh3_128()
    prompt = slice(rollouts.prompt_at[row], rollouts.prompt_at[row + 1])
    completion = slice(rollouts.completion_at[row], rollouts.completion_at[row + 1])
    versions = slice(rollouts.version_at[row], rollouts.version_at[row + 1])
    for array, span in (
        (rollouts.prompt_ids, prompt), (rollouts.completion_ids, completion),
        (rollouts.mask, completion), (rollouts.logprobs, completion),
        (rollouts.values, completion), (rollouts.versions, versions),
        *(
            (column, slice(row, row + 1))
            for column in (rollouts.reward, rollouts.group_size, rollouts.temperature,
                           rollouts.top_p)
        ),
    ):  # fmt: skip
        part = b"" if array is None else array[span].tobytes()
        hashed.update(len(part).to_bytes(8, "little") + part)
    # only its own: it is the same rollout beside others that have more
    own = {name: column[row] for name, column in rollouts.rewards.items()}
    named = [f"{name}={value!r}" for name, value in sorted(own.items()) if not np.isnan(value)]
    for text in (rollouts.group_id[row].as_py(), rollouts.finish_reason[row].as_py(), *named):
        hashed.update(text.encode() + b"\0")
    return hashed.digest()


def spans_of(at: Int64s, rows: Int64s) -> tuple[Int64s, Int64s]:
    """Where the values of some rows stand, end to end, and where each row's begin among them.

    >>> [array.tolist() for array in spans_of(np.array([0, 2, 5]), np.array([1, 0]))]
    [[2, 3, 4, 0, 1], [0, 3, 5]]
    """
    sizes = at[rows + 1] - at[rows]
    moved = offsets_of(sizes)
    return np.repeat(at[rows] - moved[:-1], sizes) + np.arange(moved[-1]), moved


def bools_of(mask: Bools) -> pa.BooleanArray:
    packed = np.packbits(mask, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(packed)])


def _named_as_map(named: Mapping[str, Floats], count: int) -> pa.MapArray:
    """Named rewards as a column of maps, without those that are not there."""
    names = list(named)
    table = np.array([named[name] for name in names]).reshape(len(names), count).T
    given = ~np.isnan(table)
    rows, columns = np.nonzero(given)
    at = offsets_of(np.bincount(rows, minlength=count)[:count]).astype(np.int32)
    keys = strings(names).take(numbers(columns.astype(np.int64))) if names else strings([])
    return pa.MapArray.from_arrays(numbers(at), keys, numbers(table[given]))
