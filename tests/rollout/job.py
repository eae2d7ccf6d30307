"""A writer and a learner as processes that may be killed at any instant.

usage: job.py write URL FOLDER NAME PAUSE_S
       job.py learn URL FOLDER RANK RANKS

Both go on until FOLDER has a file `stop`: the writer ends the group that it is at, the learner ends
when it has seen as many rollouts as the file says, once it says so.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from penstock.disk import replacing
from penstock.errors import ProducerStalled
from penstock.rollout.loader import RolloutDataLoader
from penstock.rollout.sources import LiveShards
from penstock.rollout.writer import RolloutWriter
from penstock.supply.settings import LoaderRun
from rollout.made import rollout

SIZE = 4


def write(url: str, folder: Path, name: str, pause_s: float) -> None:
    """Write groups, one after the other; what an earlier life of this process wrote is there."""
    with RolloutWriter(url) as writer:
        k = 0
        while writer.has(f"{name}-{k}-{SIZE - 1}"):
            k += 1
        # the last groups that are there are written again, as by one that knows no better
        k = max(0, k - 3)
        while not (folder / "stop").exists():
            group = f"{name}-{k}"
            made = [rollout(f"{group}-{n}", group) for n in range(SIZE)]
            if k % 3:
                writer.write_many(made)
            else:
                for one in made:
                    writer.write(one)
            k += 1
            time.sleep(pause_s)


def learn(url: str, folder: Path, rank: int, ranks: int) -> None:
    """Train on all rollouts; a checkpoint holds the loader's state and what was trained by then."""
    checkpoint = folder / f"checkpoint{rank}.json"
    run = LoaderRun(rank=rank, world_size=ranks)
    with RolloutDataLoader(url, batch_size=SIZE, run=run) as loader:
        shards = cast(LiveShards, loader.source).shards
        shards.config = replace(shards.config, stall_s=1.0)  # to look for `stop` now and then
        trained: list[str] = []
        seen = 0
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            trained, seen = saved["trained"], saved["seen"]
            loader.load_state_dict(saved["state"])
        total = None
        while total is None or seen < total:
            told = (folder / "stop").read_text() if (folder / "stop").exists() else ""
            total = int(told) if told else None
            try:
                batch = loader.get_batch(SIZE)
            except ProducerStalled:
                continue
            trained += batch.rollout_ids
            seen += batch.num_sequences
            if loader.step % 3 == 0 or seen == total:
                save(checkpoint, {"trained": trained, "seen": seen, "state": loader.state_dict()})
        save(checkpoint, {"trained": trained, "seen": seen, "state": loader.state_dict()})


def save(path: Path, made: dict[str, object]) -> None:
    with replacing(path) as out:
        out.write(json.dumps(made).encode())


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    else:
        learn(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
