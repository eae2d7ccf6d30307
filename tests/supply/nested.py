"""Options of loaders as tests vary them: in one flat dictionary, put where they belong."""

import dataclasses
from typing import Any

from penstock.stream.plan import PlanConfig
from penstock.supply.settings import DocumentConfig, LoaderRun

TABLES = {"plan": PlanConfig, "documents": DocumentConfig, "run": LoaderRun}
OWN = {
    False: {"batch_size", "epochs", "pack"},
    True: {"batch_size", "shard_ranges", "max_memory_gb", "pool_size", "refill_threshold"},
}
"""Arguments of all loaders of rows, or of the mixed one, though a table may have them too."""


def nested(*, mixed: bool = False, **options: Any) -> dict[str, Any]:
    """The arguments of a loader of rows, or of `StreamingMixedShardDataset` if `mixed`.

    >>> nested(rank=1, world_size=2, seed=3)["run"].rank
    1
    """
    found = dict(options)
    for table, kind in TABLES.items():
        fields = {about.name for about in dataclasses.fields(kind)} - OWN[mixed]
        inner = {name: found.pop(name) for name in sorted(fields & set(found))}
        if inner:
            given = found.get(table)
            found[table] = dataclasses.replace(given, **inner) if given else kind(**inner)
    return found
