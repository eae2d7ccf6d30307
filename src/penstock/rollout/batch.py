"""What a trainer gets of rollouts: token ids, and beside each what was sampled and gained.

In:    the rollouts of a batch, their advantages, which of them are this rank's
Out:   `RolloutBatch`: NumPy arrays, torch tensors on request; its micro-batches
Keeps: all arrays of tokens stand like `input_ids`: a number is where its token is
Never: imports torch unless asked for tensors

Labels are the sampled tokens; -100 is what a prompt, a tool or padding has.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bools, Int32s, Int64s, offsets_of
from penstock.errors import BadInput
from penstock.rollout.advantages import AdvantageConfig, Advantages, Scored, compute_advantages
from penstock.rollout.plan import GROUP
from penstock.rollout.records import Rollouts
from penstock.supply.balance import BalanceConfig, balance
from penstock.supply.batch import IGNORE, RowBatch, replaceable

Float32s = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Share:
    """What becomes of a batch, and whose part of it is made."""

    rank: int
    ranks: int
    advantages: AdvantageConfig | None
    """None for none."""
    balance: BalanceConfig
    packed: bool
    pad: int


class RolloutBatch(RowBatch):
    """Sequences of prompts and completions; one to a row, or packed end to end into one row."""

    _tensors = (
        *RowBatch._tensors, "advantages", "returns", "old_logprobs", "old_values", "rewards",
        "versions",
    )  # fmt: skip
    _others = (*RowBatch._others, "group_ids", "rollout_ids", "num_loss_tokens", "num_sequences")

    @replaceable
    def __init__(
        self, input_ids: Int32s, segments: Int32s, fills: Int32s, *, packed: bool,
        metadata: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__(input_ids, segments, fills, packed=packed, metadata=metadata)
        shape = input_ids.shape
        self.sampled: Bools = np.zeros(shape, np.bool_)
        """Tokens that the policy chose."""
        self.advantages: Float32s | None = None
        """Of each token, 0 where it was not sampled."""
        self.returns: Float32s | None = None
        self.old_logprobs: Float32s | None = None
        """As they were when they were sampled."""
        self.old_values: Float32s | None = None
        self.rewards: Float32s = np.zeros(0, np.float32)
        """Of each sequence."""
        self.group_ids: list[str] = []
        self.rollout_ids: list[str] = []
        self.versions: Int64s = np.zeros(0, np.int64)
        """The oldest version of the weights that a sequence was sampled with."""
        self.num_sequences = 0
        """Its sequences, likewise."""
        self.micro_batches: list[RolloutBatch] = []
        """The same sequences in parts that fit, the dearest first: as many on every rank."""

    def __repr__(self) -> str:
        return (
            f"RolloutBatch({len(self.rewards)} sequences, {int(self.fills.sum())} tokens, "
            f"{len(self.micro_batches)} micro-batches, step {self.metadata.get('step')})"
        )

    @functools.cached_property
    def labels(self) -> Int64s:
        """The sampled tokens, each where it stands; -100 elsewhere."""
        return np.where(self.sampled, self.input_ids, IGNORE).astype(np.int64)

    @property
    def loss_mask(self) -> Bools:
        """Which labels are trained."""
        return self.sampled

    @loss_mask.setter
    def loss_mask(self, mask: Bools) -> None:
        self.sampled = mask


def make_batch(
    rollouts: Rollouts, rewards: npt.NDArray[np.float64], segments: Int32s, share: Share,
    metadata: dict[str, Any],
) -> RolloutBatch:  # fmt: skip
    """A rank's part of a batch: advantages over all of it, sequences shared out over all ranks."""
    found = None
    if share.advantages is not None:
        values = None if rollouts.values is None else rollouts.values.astype(np.float64)
        groups = segments[:, GROUP].astype(np.int64)
        scored = Scored(rewards, groups, rollouts.completion_at, rollouts.mask, values)
        found = compute_advantages(scored, share.advantages)
    _check_fits(rollouts, share.balance.max_tokens)
    members = balance(rollouts.lengths, share.ranks, share.balance).members(share.rank)

    def made(rows: Int64s) -> RolloutBatch:
        return _laid(rollouts, rewards, found, rows, segments, share, metadata)

    batch = made(np.concatenate([np.zeros(0, np.int64), *members]))
    batch.micro_batches = [batch] if len(members) == 1 else [made(rows) for rows in members]
    return batch


def _check_fits(rollouts: Rollouts, cap: int | None) -> None:
    """Name the rollout that no micro-batch can hold."""
    if cap is None or rollouts.lengths.max() <= cap:
        return
    row = int(rollouts.lengths.argmax())
    raise BadInput(
        f"a rollout has {rollouts.lengths[row]:,} tokens, and a micro-batch at most {cap:,}",
        where=f"rollout {rollouts.rollout_id[row].as_py()!r}",
        why=f"its prompt has {np.diff(rollouts.prompt_at)[row]:,}, its completion "
        f"{np.diff(rollouts.completion_at)[row]:,}; nothing is cut",
        do="give a larger max_tokens, let the actor sample no more than it, or let such groups be "
        'counted and left out (bad="reject")',
    )


def _laid(
    rollouts: Rollouts, rewards: npt.NDArray[np.float64], found: Advantages | None, rows: Int64s,
    segments: Int32s, share: Share, metadata: dict[str, Any],
) -> RolloutBatch:  # fmt: skip
    packed = share.packed
    lengths = rollouts.lengths[rows]
    longest = int(lengths.max()) if len(lengths) else 0
    shape = (1, max(1, int(lengths.sum()))) if packed else (len(rows), max(1, longest))
    begins = offsets_of(lengths)[:-1] if packed else np.arange(len(rows)) * shape[1]
    mine = segments[rows].copy()
    mine[:, 0] = 0 if packed else np.arange(len(rows))
    mine[:, GROUP] = 0
    fills = np.array([lengths.sum()], np.int32) if packed else lengths.astype(np.int32)
    ids = np.full(shape, share.pad, np.int32)
    prompts, completions = np.diff(rollouts.prompt_at)[rows], np.diff(rollouts.completion_at)[rows]
    flat = ids.reshape(-1)
    flat[_places(begins, prompts)] = rollouts.prompt_ids[_places(rollouts.prompt_at[rows], prompts)]
    target = _places(begins + prompts, completions)
    source = _places(rollouts.completion_at[rows], completions)
    flat[target] = rollouts.completion_ids[source]
    batch = RolloutBatch(ids, mine, fills, packed=packed, metadata=metadata)
    batch.sampled.reshape(-1)[target] = rollouts.mask[source]

    def placed(values: Float32s | None) -> Float32s | None:
        if values is None:
            return None
        out = np.zeros(shape, np.float32)
        out.reshape(-1)[target] = values[source]
        return out

    batch.old_logprobs, batch.old_values = placed(rollouts.logprobs), placed(rollouts.values)
    if found is not None:
        batch.advantages, batch.returns = placed(found.advantages), placed(found.returns)
    picked = rows.tolist()
    batch.rewards = rewards[rows].astype(np.float32)
    batch.group_ids = [rollouts.group_id[row].as_py() for row in picked]
    batch.rollout_ids = [rollouts.rollout_id[row].as_py() for row in picked]
    batch.versions = rollouts.oldest[rows]
    batch.metadata["num_loss_tokens"] = int(rollouts.mask.sum())
    batch.metadata["num_tokens"] = int(rollouts.lengths.sum())
    batch.num_sequences = len(rollouts)
    return batch


def _places(begins: Int64s, sizes: Int64s) -> Int64s:
    """Positions of runs of numbers, end to end.

    >>> _places(np.array([10, 0]), np.array([2, 3])).tolist()
    [10, 11, 0, 1, 2]
    """
    at = offsets_of(sizes)
    return np.repeat(begins - at[:-1], sizes) + np.arange(at[-1])
