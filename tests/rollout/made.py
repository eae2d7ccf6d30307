"""Rollouts for tests, and what is in a dataset of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from penstock.store.log import Log

Record = dict[str, Any]


def rollout(name: str | int, group: str | int = 0, **changed: Any) -> Record:
    """A small rollout, the same for the same name and group."""
    rng = np.random.default_rng([hash_of(str(name)), hash_of(str(group))])
    tokens = int(rng.integers(1, 9))
    mask = (rng.random(tokens) < 0.8).astype(int)
    mask[0] = 1
    made: Record = {
        "rollout_id": str(name),
        "group_id": str(group),
        "group_size": 4,
        "prompt_ids": rng.integers(0, 300, 3).tolist(),
        "completion_ids": rng.integers(0, 300, tokens).tolist(),
        "completion_mask": mask.tolist(),
        "logprobs": (-rng.random(tokens)).astype(np.float32).tolist(),
        "reward": float(rng.integers(0, 9)) / 8,
        "weight_version": 0,
    }
    return made | changed


def hash_of(text: str) -> int:
    return int.from_bytes(text.encode()[-8:].rjust(8, b"\0"), "little")


def groups(count: int, size: int = 4, **changed: Any) -> list[Record]:
    """Whole groups, one after the other."""
    return [
        rollout(f"g{k}r{n}", f"g{k}", group_size=size, **changed)
        for k in range(count)
        for n in range(size)
    ]


def ids_in(url: str | Path) -> list[str]:
    """The ids of all rollouts of a dataset, in the order of its log."""
    log = Log.open(url)
    found: list[str] = []
    for file in log.state.split("train"):
        with log.store.open(file.name) as opened:
            found += pq.read_table(opened, columns=["rollout_id"]).column(0).to_pylist()
    return found
