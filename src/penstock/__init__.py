"""penstock turns raw files into training batches, while the data is still being made.

The public names, loaded when they are first used: `import penstock` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.ingest.formats import ReadConfig
    from penstock.plugins import register
    from penstock.prepare.chunk import ChunkConfig
    from penstock.prepare.dedup import DedupConfig
    from penstock.prepare.filters import FilterConfig, filter_rule
    from penstock.prepare.steps import DataProcessor, Decontaminate, Process
    from penstock.shard.follow import FollowConfig, Outcome, shard_jsonl
    from penstock.shard.produce import prepare_dataset
    from penstock.shard.verify import Fault, Verdict, verify
    from penstock.shard.write import ShardConfig
    from penstock.store.caches import open_cache
    from penstock.store.log import Log, LogState
    from penstock.stream.plan import PlanConfig
    from penstock.supply.batch import TrainingBatch
    from penstock.supply.ledger import Ledger
    from penstock.supply.loader import DataLoader, PretrainDataLoader
    from penstock.supply.mixed import StreamingMixedShardDataset
    from penstock.tokenize.chunks import chunk_boundaries
    from penstock.tokenize.counts import PretokenCounts
    from penstock.tokenize.pretokenize import pretokenize, stream_stories_from_chunk
    from penstock.tokenize.tokenizer import Tokenizer
    from penstock.tokenize.train import TrainConfig, train_tokenizer
    from penstock.work.run import RunConfig

_HOMES = {
    "ChunkConfig": "penstock.prepare.chunk",
    "DataLoader": "penstock.supply.loader",
    "DataProcessor": "penstock.prepare.steps",
    "Decontaminate": "penstock.prepare.steps",
    "DedupConfig": "penstock.prepare.dedup",
    "Fault": "penstock.shard.verify",
    "FilterConfig": "penstock.prepare.filters",
    "FollowConfig": "penstock.shard.follow",
    "Ledger": "penstock.supply.ledger",
    "Log": "penstock.store.log",
    "LogState": "penstock.store.log",
    "Outcome": "penstock.shard.follow",
    "PlanConfig": "penstock.stream.plan",
    "PretokenCounts": "penstock.tokenize.counts",
    "PretrainDataLoader": "penstock.supply.loader",
    "Process": "penstock.prepare.steps",
    "ReadConfig": "penstock.ingest.formats",
    "RunConfig": "penstock.work.run",
    "ShardConfig": "penstock.shard.write",
    "StreamingMixedShardDataset": "penstock.supply.mixed",
    "Tokenizer": "penstock.tokenize.tokenizer",
    "TrainConfig": "penstock.tokenize.train",
    "TrainingBatch": "penstock.supply.batch",
    "Verdict": "penstock.shard.verify",
    "chunk_boundaries": "penstock.tokenize.chunks",
    "filter_rule": "penstock.prepare.filters",
    "open_cache": "penstock.store.caches",
    "prepare_dataset": "penstock.shard.produce",
    "pretokenize": "penstock.tokenize.pretokenize",
    "register": "penstock.plugins",
    "shard_jsonl": "penstock.shard.follow",
    "stream_stories_from_chunk": "penstock.tokenize.pretokenize",
    "train_tokenizer": "penstock.tokenize.train",
    "verify": "penstock.shard.verify",
}

__all__ = [
    "ChunkConfig",
    "DataLoader",
    "DataProcessor",
    "Decontaminate",
    "DedupConfig",
    "Fault",
    "FilterConfig",
    "FollowConfig",
    "Ledger",
    "Log",
    "LogState",
    "Outcome",
    "PlanConfig",
    "PretokenCounts",
    "PretrainDataLoader",
    "Process",
    "ReadConfig",
    "RunConfig",
    "ShardConfig",
    "StreamingMixedShardDataset",
    "Tokenizer",
    "TrainConfig",
    "TrainingBatch",
    "Verdict",
    "chunk_boundaries",
    "filter_rule",
    "open_cache",
    "prepare_dataset",
    "pretokenize",
    "register",
    "shard_jsonl",
    "stream_stories_from_chunk",
    "train_tokenizer",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"penstock has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
