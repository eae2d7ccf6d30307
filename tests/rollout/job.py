"""A writer and a learner as processes that may be killed at any instant.

usage: job.py write URL FOLDER NAME PAUSE_S
       job.py learn URL FOLDER RANK RANKS

The writer goes on until FOLDER has a file `stop`, and then ends the group that it, or an earlier
life of it, is at. The learner ends where the dataset does.
"""

import json
import sys
import time
from pathlib import Path

from penstock.disk import replacing
from penstock.rollout.loader import RolloutDataLoader
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
        while not (folder / "stop").exists() or writer.has(f"{name}-{k}-0"):
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
    run = LoaderRun(rank=rank, world_size=ranks, wait_s=240)
    with RolloutDataLoader(url, batch_size=SIZE, run=run) as loader:
        trained: list[str] = []
        if checkpoint.exists():
            saved = json.loads(checkpoint.read_text())
            trained = saved["trained"]
            loader.load_state_dict(saved["state"])
        for batch in loader:
            trained += batch.rollout_ids
            if loader.step % 3 == 0:
                save(checkpoint, {"trained": trained, "state": loader.state_dict()})
        save(checkpoint, {"trained": trained, "state": loader.state_dict()})


def save(path: Path, made: dict[str, object]) -> None:
    with replacing(path) as out:
        out.write(json.dumps(made).encode())


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], Path(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
    else:
        learn(sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
