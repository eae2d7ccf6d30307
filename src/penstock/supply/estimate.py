"""What a run would ask of hosts, network and bucket, before it is begun.

In:    a run's description; how many hosts and ranks there will be, and how fast their network is
Out:   bytes and requests of a host, seconds to the first batch, and what will be the limit
Keeps: counts are those of the logs, dealt as the plan deals them; rates are measured ones
Never: reads a shard

The rates are of one process on one core: docs/scale.md has the arithmetic and the commands.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.errors import BadConfig
from penstock.options import number, whole
from penstock.stream.lanes import Deal, Lanes, check_enough, lane_config, padded_share
from penstock.stream.plan import PlanConfig
from penstock.supply.pretrain import PretrainDataLoader, all_rows
from penstock.supply.run_file import for_one_process, read_run, refuse_raw
from penstock.supply.sources.dataset import ShardSource

LOADER_TOKENS_PER_S: Final = 440e6
"""A rank's loader in its first pass, hashing included: benchmarks/bench_loader.py."""
HASHED_PER_S: Final = 20e9
"""Bytes of token files that a core hashes in a second, from memory."""
REQUESTS: Final = 3
"""For each shard of a bucket: its counts, which stand at its two ends, and all of it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run would ask of its hosts."""

    hosts: int
    ranks: int
    lanes: int
    gbit: float
    documents: int
    tokens: int | None
    """Of one epoch; None where nobody has counted them."""
    shards: int
    bytes: int
    """What is read of the shards: their token files, or their text where there are none."""
    is_final: bool
    """Whether the data is finished; else these are the counts so far."""
    host_bytes: int
    """Of the host that reads most, in an epoch."""
    all_bytes: int
    """Of all hosts together."""
    first_bytes: int
    """What a host needs before its first batch."""
    first_s: float
    host_requests: int
    """To a bucket, in an epoch."""
    padded: float
    """The share of all rows that will be padding because lanes do not end together."""
    network_tokens_per_s: float | None
    """What the network lets all ranks together have."""
    loader_tokens_per_s: float
    """What all loaders together make, a core for each."""
    trainer_tokens_per_s: float | None

    @property
    def limit(self) -> str:
        """What all others wait for."""
        rates = {
            "network": self.network_tokens_per_s,
            "loaders": self.loader_tokens_per_s,
            "trainer": self.trainer_tokens_per_s,
        }
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return min(known, key=lambda name: known[name])

    def __str__(self) -> str:
        tokens = "tokens not counted" if self.tokens is None else f"{self.tokens:,} tokens"
        so_far = "" if self.is_final else ", so far"
        lines = [
            f"{self.hosts:,} hosts, {self.ranks:,} ranks, lanes {self.lanes}, {self.gbit:g} Gbit/s",
            f"data         {self.documents:,} documents, {tokens}, {self.shards:,} shards, "
            f"{_size(self.bytes)}{so_far}",
            f"a host       {_size(self.host_bytes)} and {self.host_requests:,} requests an epoch",
            f"all hosts    {_size(self.all_bytes)}, "
            f"{self.all_bytes / max(1, self.bytes):.2f} times the data",
            f"first batch  after {_size(self.first_bytes)}, {self.first_s:.1f} s",
        ]
        if self.lanes > 1:
            lines.append(f"padding      {self.padded:.1%} of all rows, where lanes end apart")
        if self.network_tokens_per_s is not None:
            lines.append(f"network      {self.network_tokens_per_s:,.0f} tokens/s for all ranks")
        lines.append(f"loaders      {self.loader_tokens_per_s:,.0f} tokens/s, a core for each rank")
        if self.trainer_tokens_per_s is not None:
            lines.append(f"trainer      {self.trainer_tokens_per_s:,.0f} tokens/s")
        if self.limit == "trainer" and self.network_tokens_per_s is not None:
            used = (self.trainer_tokens_per_s or 0.0) / self.network_tokens_per_s
            lines.append(f"limit        the trainer; it uses {used:.1%} of the network")
        else:
            lines.append(f"limit        the {self.limit}")
        return "\n".join(lines)


def estimate(
    run: str | os.PathLike[str],
    *,
    hosts: int = 1,
    ranks_per_host: int = 8,
    gbit: float = 25.0,
    tokens_per_s: float | None = None,
) -> Estimate:
    """What a run would ask of so many hosts, each with a network of `gbit` Gbit/s; `run` is its
    TOML file. `tokens_per_s` is what the trainer takes, on all ranks together."""
    hosts, each = whole("hosts", hosts, 1, 1 << 20), whole("ranks_per_host", ranks_per_host, 1)
    for name, given in (("gbit", gbit), ("tokens_per_s", tokens_per_s)):
        if given is not None and not 0 < number(name, given) < math.inf:
            raise BadConfig(f"{name} is {given:g}", do="give a number above 0")
    options = read_run(run, bans=0)
    refuse_raw(options, run)
    sizes = options.pop("batch_size", None), options.get("global_batch_size")
    options["global_batch_size"] = all_rows(*sizes, hosts * each)
    options["run"] = replace(options["run"], rank=None, world_size=None)
    with PretrainDataLoader(**for_one_process(options)) as loader:
        sources, config, rows = loader.sources, loader.config, loader.global_batch_size
        weights, passes = loader.shares, loader.passes
    lanes, ranks = config.lanes, hosts * each
    for source in sources:
        check_enough(source, lanes)
    whole_batch = Lanes(lanes, rows, (0, rows))
    deals = [Deal(source, whole_batch) for source in sources]
    padded = padded_share(deals, whole_batch, passes)
    # all that the lanes of a host hold, and what of it stands in the pools first
    holds = [_bytes_of(deals, lane) for lane in range(lanes)]
    begins = [_first_bytes(deals, lane, config, weights) for lane in range(lanes)]
    own = [
        Lanes(lanes, rows, (rows * h // hosts, rows * (h + 1) // hosts)).own for h in range(hosts)
    ]
    host_bytes = [sum(holds[lane] for lane in mine) for mine in own]
    most = max(range(hosts), key=lambda h: host_bytes[h])
    shards = sum(len(deal.numbers(lane)) for deal in deals for lane in own[most])
    known = [(source, shard) for source in sources for shard in range(source.num_known)]
    counted = all(source.file(shard).tokens is not None for source, shard in known)
    tokens = sum(source.volume(shard) for source, shard in known) if counted else None
    first = max(sum(begins[lane] for lane in mine) for mine in own)
    a_second = gbit * 1e9 / 8
    return Estimate(
        hosts=hosts,
        ranks=ranks,
        lanes=lanes,
        gbit=gbit,
        documents=sum(source.rows(shard) for source, shard in known),
        tokens=tokens,
        shards=len(known),
        bytes=sum(source.stored_bytes(shard) for source, shard in known),
        is_final=all(source.is_closed for source in sources),
        host_bytes=host_bytes[most],
        all_bytes=sum(host_bytes),
        first_bytes=first,
        first_s=first / a_second + first / HASHED_PER_S,
        host_requests=REQUESTS * shards,
        padded=padded,
        network_tokens_per_s=None
        if tokens is None
        else tokens * a_second / max(1, host_bytes[most]),
        loader_tokens_per_s=LOADER_TOKENS_PER_S * ranks,
        trainer_tokens_per_s=tokens_per_s,
    )


def _shards(deal: Deal, lane: int) -> Iterable[tuple[ShardSource, int]]:
    source = deal.source
    assert isinstance(source, ShardSource)
    return ((source, int(shard)) for shard in deal.numbers(lane))


def _bytes_of(deals: Sequence[Deal], lane: int) -> int:
    return sum(
        source.stored_bytes(shard) for deal in deals for source, shard in _shards(deal, lane)
    )


def _first_bytes(
    deals: Sequence[Deal], lane: int, config: PlanConfig, weights: Sequence[float]
) -> int:
    """What the pools of a lane take in before the first row, by the counts of the log."""
    own = lane_config(config, lane) if config.lanes > 1 else config
    found = 0
    for deal, weight in zip(deals, weights, strict=True):
        share = weight / sum(weights)
        rows, tokens = round(own.pool_size * share), round(own.pool_tokens * share)
        for source, shard in _shards(deal, lane):
            found += source.stored_bytes(shard)
            rows -= source.rows(shard)
            tokens -= source.volume(shard) if source.has_counts else 0
            if config.ramp or rows <= 0 or tokens <= 0:
                break
    return found


def _size(count: float) -> str:
    """Bytes, as people say them.

    >>> _size(7_100_000_000_000)
    '7.1 TB'
    """
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
