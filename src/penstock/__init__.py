"""penstock turns raw files into training batches, while the data is still being made.

The public names, loaded when they are first used: `import penstock` itself costs nothing.
`from penstock import *` loads all of them. Where torch is not installed, its two datasets are left
out; asked for by name, they say what to install.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.cache.open import open_cache
    from penstock.chat.audit import audit_template
    from penstock.chat.render import ChatConfig
    from penstock.ingest.formats import ReadConfig
    from penstock.ingest.lines import mark_done
    from penstock.mirror.config import SyncConfig, Synced
    from penstock.mirror.push_pull import pull, push
    from penstock.plugins import register
    from penstock.prepare.chunk import ChunkConfig
    from penstock.prepare.dedup import DedupConfig
    from penstock.prepare.filters import FilterConfig
    from penstock.prepare.steps import DataProcessor, Decontaminate, Process
    from penstock.produce.conversations import shard_conversations
    from penstock.produce.dataset import FollowConfig, Outcome, prepare_dataset, shard_jsonl
    from penstock.produce.tokenize import tokenize_dataset
    from penstock.produce.verify import Fault, Verdict, verify
    from penstock.produce.writer import ShardConfig
    from penstock.queue.config import SharedConfig, check_config, read_config
    from penstock.queue.consumer import ConsumerConfig, DatasetConsumer
    from penstock.queue.provider import DataProviderBase
    from penstock.rollout.advantages import (
        AdvantageConfig,
        Scored,
        compute_advantages,
        loss_weights,
        sequence_ratios,
    )
    from penstock.rollout.batch import RolloutBatch
    from penstock.rollout.loader import RolloutDataLoader
    from penstock.rollout.plan import RolloutConfig
    from penstock.rollout.writer import RolloutWriter
    from penstock.store.log import Log, LogState
    from penstock.stream.plan import PlanConfig
    from penstock.supply.balance import BalanceConfig, balance
    from penstock.supply.batch import TorchBatch, TrainingBatch, register_with_jax
    from penstock.supply.conversation import ConversationDataLoader
    from penstock.supply.diffusion import DiffusionConfig, corrupt
    from penstock.supply.estimate import Estimate, estimate
    from penstock.supply.explain import Span
    from penstock.supply.ledger import Ledger
    from penstock.supply.mixed_shards import StreamingMixedShardDataset
    from penstock.supply.mixture import MixedBatch, MixedDataLoader
    from penstock.supply.pretrain import DataLoader, PretrainDataLoader
    from penstock.supply.run_file import explain, read_run
    from penstock.supply.settings import DocumentConfig, LoaderRun
    from penstock.supply.torch_dataset import TorchDataset
    from penstock.tokenize.chunks import chunk_boundaries
    from penstock.tokenize.counts import PretokenCounts
    from penstock.tokenize.pretokenize import pretokenize, stream_stories_from_chunk
    from penstock.tokenize.tokenizer import Tokenizer
    from penstock.tokenize.train import TrainConfig, train_tokenizer
    from penstock.watch.workplace import WatchConfig
    from penstock.work.events import log_loss
    from penstock.work.run import RunConfig

_HOMES = {
    "AdvantageConfig": "penstock.rollout.advantages",
    "BalanceConfig": "penstock.supply.balance",
    "ChatConfig": "penstock.chat.render",
    "ChunkConfig": "penstock.prepare.chunk",
    "ConsumerConfig": "penstock.queue.consumer",
    "ConversationDataLoader": "penstock.supply.conversation",
    "DataLoader": "penstock.supply.pretrain",
    "DataProcessor": "penstock.prepare.steps",
    "DataProviderBase": "penstock.queue.provider",
    "DatasetConsumer": "penstock.queue.consumer",
    "Decontaminate": "penstock.prepare.steps",
    "DedupConfig": "penstock.prepare.dedup",
    "DiffusionConfig": "penstock.supply.diffusion",
    "DocumentConfig": "penstock.supply.settings",
    "Estimate": "penstock.supply.estimate",
    "Fault": "penstock.produce.verify",
    "FilterConfig": "penstock.prepare.filters",
    "FollowConfig": "penstock.produce.dataset",
    "Ledger": "penstock.supply.ledger",
    "MixedBatch": "penstock.supply.mixture",
    "MixedDataLoader": "penstock.supply.mixture",
    "LoaderRun": "penstock.supply.settings",
    "Log": "penstock.store.log",
    "LogState": "penstock.store.log",
    "Outcome": "penstock.produce.dataset",
    "PlanConfig": "penstock.stream.plan",
    "PretokenCounts": "penstock.tokenize.counts",
    "PretrainDataLoader": "penstock.supply.pretrain",
    "Process": "penstock.prepare.steps",
    "ReadConfig": "penstock.ingest.formats",
    "RolloutBatch": "penstock.rollout.batch",
    "RolloutConfig": "penstock.rollout.plan",
    "RolloutDataLoader": "penstock.rollout.loader",
    "RolloutWriter": "penstock.rollout.writer",
    "RunConfig": "penstock.work.run",
    "Scored": "penstock.rollout.advantages",
    "ShardConfig": "penstock.produce.writer",
    "SharedConfig": "penstock.queue.config",
    "Span": "penstock.supply.explain",
    "StreamingMixedShardDataset": "penstock.supply.mixed_shards",
    "SyncConfig": "penstock.mirror.config",
    "Synced": "penstock.mirror.config",
    "Tokenizer": "penstock.tokenize.tokenizer",
    "TorchBatch": "penstock.supply.batch",
    "TorchDataset": "penstock.supply.torch_dataset",
    "TrainConfig": "penstock.tokenize.train",
    "TrainingBatch": "penstock.supply.batch",
    "Verdict": "penstock.produce.verify",
    "WatchConfig": "penstock.watch.workplace",
    "audit_template": "penstock.chat.audit",
    "balance": "penstock.supply.balance",
    "check_config": "penstock.queue.config",
    "chunk_boundaries": "penstock.tokenize.chunks",
    "compute_advantages": "penstock.rollout.advantages",
    "corrupt": "penstock.supply.diffusion",
    "estimate": "penstock.supply.estimate",
    "explain": "penstock.supply.run_file",
    "log_loss": "penstock.work.events",
    "loss_weights": "penstock.rollout.advantages",
    "mark_done": "penstock.ingest.lines",
    "open_cache": "penstock.cache.open",
    "prepare_dataset": "penstock.produce.dataset",
    "pretokenize": "penstock.tokenize.pretokenize",
    "pull": "penstock.mirror.push_pull",
    "push": "penstock.mirror.push_pull",
    "read_config": "penstock.queue.config",
    "read_run": "penstock.supply.run_file",
    "register": "penstock.plugins",
    "register_with_jax": "penstock.supply.batch",
    "sequence_ratios": "penstock.rollout.advantages",
    "shard_conversations": "penstock.produce.conversations",
    "shard_jsonl": "penstock.produce.dataset",
    "stream_stories_from_chunk": "penstock.tokenize.pretokenize",
    "tokenize_dataset": "penstock.produce.tokenize",
    "train_tokenizer": "penstock.tokenize.train",
    "verify": "penstock.produce.verify",
}

__all__ = [
    "AdvantageConfig",
    "BalanceConfig",
    "ChatConfig",
    "ChunkConfig",
    "ConsumerConfig",
    "ConversationDataLoader",
    "DataLoader",
    "DataProcessor",
    "DataProviderBase",
    "DatasetConsumer",
    "Decontaminate",
    "DedupConfig",
    "DiffusionConfig",
    "DocumentConfig",
    "Estimate",
    "Fault",
    "FilterConfig",
    "FollowConfig",
    "Ledger",
    "LoaderRun",
    "Log",
    "LogState",
    "MixedBatch",
    "MixedDataLoader",
    "Outcome",
    "PlanConfig",
    "PretokenCounts",
    "PretrainDataLoader",
    "Process",
    "ReadConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutDataLoader",
    "RolloutWriter",
    "RunConfig",
    "Scored",
    "ShardConfig",
    "SharedConfig",
    "Span",
    "StreamingMixedShardDataset",
    "SyncConfig",
    "Synced",
    "Tokenizer",
    "TorchBatch",
    "TorchDataset",
    "TrainConfig",
    "TrainingBatch",
    "Verdict",
    "WatchConfig",
    "audit_template",
    "balance",
    "check_config",
    "chunk_boundaries",
    "compute_advantages",
    "corrupt",
    "estimate",
    "explain",
    "log_loss",
    "loss_weights",
    "mark_done",
    "open_cache",
    "prepare_dataset",
    "pretokenize",
    "pull",
    "push",
    "read_config",
    "read_run",
    "register",
    "register_with_jax",
    "sequence_ratios",
    "shard_conversations",
    "shard_jsonl",
    "stream_stories_from_chunk",
    "tokenize_dataset",
    "train_tokenizer",
    "verify",
]
if not TYPE_CHECKING and sys.modules.get("torch") is None and find_spec("torch") is None:
    __all__.remove("StreamingMixedShardDataset")
    __all__.remove("TorchDataset")


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"penstock has no {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(import_module(_HOMES[name]), name)
