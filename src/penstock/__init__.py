"""penstock turns raw files into training batches, while the data is still being made.

The public names, loaded when they are first used: `import penstock` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.shard.follow import FollowConfig, Outcome, shard_jsonl
    from penstock.shard.verify import Fault, Verdict, verify
    from penstock.shard.write import ShardConfig
    from penstock.store.log import Log, LogState

_HOMES = {
    "Fault": "penstock.shard.verify",
    "FollowConfig": "penstock.shard.follow",
    "Log": "penstock.store.log",
    "LogState": "penstock.store.log",
    "Outcome": "penstock.shard.follow",
    "ShardConfig": "penstock.shard.write",
    "Verdict": "penstock.shard.verify",
    "shard_jsonl": "penstock.shard.follow",
    "verify": "penstock.shard.verify",
}

__all__ = [
    "Fault",
    "FollowConfig",
    "Log",
    "LogState",
    "Outcome",
    "ShardConfig",
    "Verdict",
    "shard_jsonl",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"penstock has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
