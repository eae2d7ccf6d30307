"""Say which shards a run will never need again, so that `penstock pull --max_disk` may drop them.

In:    a state that was saved
Out:   `_position/<reader>.json` in each dataset's directory
Never: passes a shard that a resume from that state could ask for
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.mirror.disk_limit import announce, check_reader, write_position
from penstock.store.local import LocalStore
from penstock.supply.sources.dataset import DatasetSource, ShardSource


def needed_from(
    plan: Mapping[str, Any], epochs: Sequence[int | None], behind: str
) -> list[int | None]:
    """The first shard of each source that a saved plan may still read; None if it reads no more."""
    found: list[int | None] = []
    opened = plan["open"]
    pieces = [*plan["pieces"], *([opened] if opened[5] else [])]
    for number, (pool, limit) in enumerate(zip(plan["pools"], epochs, strict=True)):
        if behind == "repeat" or limit is None or pool["pass"] < limit - 1:
            found.append(0)  # another pass will come
            continue
        shards = [first for _, _, first, *_ in pool["cohorts"]]
        shards += [piece[2] for piece in pieces if piece[0] == number]
        # after the last pass there is no next shard: all that is left is in the pool
        shards += [pool["shard"]] if pool["pass"] < limit else []
        found.append(min(shards, default=None))
    return found


def reader_name(reader: str | None, run_dir: str | None) -> str:
    """What a run's positions are called: the same after a restart, another for another run.

    Without a name and a directory of its own, a run is the `trainer`, like all such runs.

    >>> reader_name("eval", None), reader_name(None, None), reader_name(None, "/runs/a")
    ('eval', 'trainer', 'trainer-704e1951')
    """
    if reader is not None:
        return check_reader(reader)
    if run_dir is None:
        return "trainer"
    place = run_dir if "://" in run_dir else os.path.abspath(run_dir)
    return f"trainer-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def release(
    sources: Sequence[ShardSource], needed: Sequence[int], reader: str, *, begins: bool = False
) -> None:
    """Write the positions of a reader; of one that `begins`, only where it has none yet."""
    for source, shard in zip(sources, needed, strict=True):
        if isinstance(source, DatasetSource) and isinstance(source.log.store, LocalStore):
            number = source.ranged.number(shard)
            if number is not None and source.config.split == "train":
                (announce if begins else write_position)(source.log.store.root, reader, number)
