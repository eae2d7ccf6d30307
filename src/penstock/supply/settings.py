"""What a loader is told, beside its plan: which documents, where and how it runs; and its states.

In:    arguments and states as users and files have them
Out:   plain numbers; BadConfig or StateMismatch that names what is wrong
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

import xxhash

from penstock.cache.disk import Cache
from penstock.cache.open import is_address, open_cache
from penstock.errors import BadConfig, StateMismatch
from penstock.options import checked_path, config_of, differences, gigabytes, number, whole
from penstock.stream.plan import MOST_SEQ_LEN, PlanConfig
from penstock.stream.source import Source
from penstock.supply.balance import BalanceConfig
from penstock.supply.diffusion import DiffusionConfig, Noise
from penstock.supply.host import HostCache, share_of_memory
from penstock.supply.ranks import find_hosts, find_rank
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events

UNSET: Final[Any] = type("Unset", (), {"__repr__": lambda self: "as in plan"})()
"""The default of arguments that `plan` may have too."""
SPLITS: Final = ("train", "val")
OBJECTIVES: Final = ("next_token", "diffusion")
MASKS: Final = ("auto", "block")
_ROW_TOKENS: Final = "tokens of a row (chunk_size, max_length of conversations, seq_len of a plan)"


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentConfig:
    """Which documents of the sources are taken, and what stands around each."""

    shard_ranges: str | Sequence[str] = "all"
    """Shards of each source: `all`, or numbers such as `0-9,20-29`; one for all, or one for each
    source."""
    split: str = "train"
    """`train` or `val`."""
    text_field: str = "text"
    """The column of text, in shards that hold no tokens."""
    columns: Sequence[str] | None = None
    """The columns of examples, in `StreamingMixedShardDataset`; by default all."""
    ban: Sequence[int] = ()
    """Documents that are left out, by doc_id."""
    bos: str | None = "auto"
    """The special token before a document. `auto`: the tokenizer's, if it has one."""
    eos: str | None = "auto"
    """The special token after a document. `auto`: the tokenizer's, if there is none before it."""
    other_length: bool = False
    """Whether rows may be of another length than the chunks were made for."""
    objective: str | DiffusionConfig = "next_token"
    """What `PretrainDataLoader` makes of rows: `next_token`, or `diffusion`, which hides tokens, by
    default as LLaDA does; a `DiffusionConfig` says how."""

    attention_mask: str = "auto"
    """What batches have as `attention_mask`. `auto`: 1 for tokens and 0 for padding where a row is
    a document, and none for packed rows, which position_ids keep apart. `block`: for packed rows
    too, rows by 1 by tokens by tokens, True where a token sees another of its own document."""

    def __post_init__(self) -> None:
        if self.attention_mask not in MASKS:
            raise BadConfig(
                f"attention_mask is {self.attention_mask!r}", do=f"choose from {', '.join(MASKS)}"
            )
        if not isinstance(self.objective, DiffusionConfig) and self.objective not in OBJECTIVES:
            raise BadConfig(
                f"objective is {self.objective!r}",
                do=f"choose from {', '.join(OBJECTIVES)}, or give a DiffusionConfig",
            )
        if self.split not in SPLITS:
            raise BadConfig(f"split is {self.split!r}", do=f"choose from {', '.join(SPLITS)}")
        object.__setattr__(self, "ban", _doc_ids(self.ban))

    def noise(self, tokenizer: Tokenizer | None, seed: int) -> Noise | None:
        """What is done to batches, if anything."""
        return None if self.objective == "next_token" else Noise(self.objective, tokenizer, seed)

    def ranges(self, count: int) -> list[str]:
        """The shards of each of so many sources."""
        given = self.shard_ranges
        found = [given] * count if isinstance(given, str) else list(given)
        if len(found) != count:
            raise BadConfig(
                f"{len(found)} shard_ranges for {count} sources",
                do='give one for each, "all" for all shards',
            )
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderRun:
    """Where and how a loader runs. Nothing here changes a batch."""

    rank: int | None = None
    """This process among those that train together; by default what torch.distributed or the
    environment says."""
    world_size: int | None = None
    """How many there are."""
    run_dir: str | None = None
    """A directory or bucket prefix of this run, which all ranks share."""
    record: str | None = None
    """A file that keeps what this run chose by itself when it began; a run's description has one
    beside it."""
    reader: str | None = None
    """The name under which this run holds shards that `penstock pull --max_disk` would remove."""
    events: Events | None = None
    """Where the ledger is told; by default a file in `run_dir`."""
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    """What work is, where `PlanConfig.batch_tokens` shares it out over ranks."""
    max_memory_gb: float = 5.0
    """Memory of a host for what its ranks decode; each has an equal part. Files that are mapped
    take none."""
    cache_dir: str | None = None
    """Where tokens of text and shards of buckets are kept: a directory, Redis, a bucket; by default
    a directory that the processes of the run share on this host, as long as it runs."""
    cache_gb: float = 100.0
    """How much of it may be used; by default half of what is free on the disk at most."""
    wait_s: float = 0.0
    """How long a path is waited for at which there is nothing yet; by default that is an error."""
    stall_s: float | None = None
    """Silence that is an error: by default 120 s of whoever makes the dataset, and half an hour of
    its input; a number is for both."""
    patience_s: float | None = None
    """For how long a bucket that does not answer is asked again; by default 60 s."""

    def __post_init__(self) -> None:
        for name in ("cache_dir", "run_dir", "record"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, checked_path(name, given) if given else None)
        if not isinstance(self.events, Events | None):
            raise BadConfig(f"events is {self.events!r:.80}", do='give Events("train", path=…)')
        object.__setattr__(self, "balance", config_of("balance", self.balance, BalanceConfig))
        gigabytes("max_memory_gb", self.max_memory_gb)
        gigabytes("cache_gb", self.cache_gb)
        for name in ("wait_s", "stall_s", "patience_s"):
            given = getattr(self, name)
            if given is not None and number(name, given) < 0:
                raise BadConfig(f"{name} is {given}", do="choose 0 or more seconds")

    def found_rank(self) -> tuple[int, int]:
        """The rank and the number of ranks."""
        return find_rank(self.rank, self.world_size)

    def found_hosts(self) -> int:
        """On how many hosts they run, as far as it is known."""
        return find_hosts(self.found_rank()[1])

    def waiting_limits(self) -> dict[str, Any]:
        """What was chosen, as a `SourceConfig` has it."""
        found = {"wait_s": number("wait_s", self.wait_s)}
        if self.stall_s is not None:
            found["stall_s"] = found["input_stall_s"] = number("stall_s", self.stall_s)
        if self.patience_s is not None:
            found["patience_s"] = number("patience_s", self.patience_s)
        return found

    def open_events(self, rank: int) -> Events | None:
        """Where the ledger is told: where the run says, or beside it."""
        run_dir = self.run_dir
        if self.events is not None or not run_dir or "://" in run_dir or rank:
            return self.events
        os.makedirs(run_dir, exist_ok=True)
        return Events("train", path=Path(run_dir) / "_events.jsonl")

    @property
    def folder(self) -> str:
        """The directory that was named for caches; empty if there is none, or it is elsewhere."""
        return "" if is_address(self.cache_dir or "") else self.cache_dir or ""

    def cache(self) -> Cache:
        """The cache that was named, or that of this host."""
        most = gigabytes("cache_gb", self.cache_gb)
        if not self.cache_dir:
            return HostCache(most, gigabytes("max_memory_gb", self.max_memory_gb))
        return open_cache(self.cache_dir, most)

    def memory(self) -> Callable[[], int]:
        """How many bytes this rank may hold, as long as the host has as many ranks as now."""
        most = gigabytes("max_memory_gb", self.max_memory_gb)
        return share_of_memory(most, *self.found_rank(), self.run_dir)


def _doc_ids(ban: Any) -> list[int]:
    """The documents that are left out, in order."""
    if isinstance(ban, str | bytes) or (
        not isinstance(ban, Sequence) and not hasattr(ban, "__iter__")
    ):
        raise BadConfig(f"ban is {ban!r}", do="give a list of doc_ids")
    return sorted({whole("a doc_id in ban", doc_id, 0, (1 << 64) - 1) for doc_id in ban})


def merged_plan(
    plan: PlanConfig | None, row_tokens: int, *, called: str = "chunk_size", **given: Any
) -> PlanConfig:
    """The plan's settings with those that were given beside it; what contradicts is refused. The
    tokens of a row are `called` so where they were given."""
    known = config_of("plan", plan, PlanConfig)
    whole(called, row_tokens, 1, MOST_SEQ_LEN)
    given = {name: value for name, value in given.items() if value is not UNSET}
    merged = replace(known, **{"seq_len": row_tokens, **given})
    defaults = {about.name: about.default for about in fields(PlanConfig)}
    for name in ("seq_len", *given):
        mine, theirs = getattr(merged, name), getattr(known, name)
        if theirs not in (mine, defaults[name]):
            told = called if name == "seq_len" else name
            raise BadConfig(
                f"{told} is {mine!r}, and plan says {name}={theirs!r}", do="give one of the two"
            )
    return merged


def with_checksum(state: dict[str, Any]) -> dict[str, Any]:
    """The state with a checksum of all that it says."""
    return {**state, "sum": _sum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Refuse a state of which something was changed or lost on the way."""
    if not isinstance(state, Mapping) or _sum(state) != state.get("sum"):
        raise StateMismatch(
            "this is not a state as the loader gave it",
            why="its checksum does not fit what it says: it was changed, cut, or is something else",
            do="use the state of another checkpoint",
        )


def _sum(state: Mapping[str, Any]) -> str:
    told = {key: value for key, value in state.items() if key != "sum"}
    try:
        text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError):
        return ""
    return xxhash.xxh3_64_hexdigest(text.encode())


def check_state(
    state: Mapping[str, Any], reads: int, mine: Mapping[str, Any], sources: Sequence[Source],
    *, who: str = "loader", do: str,
) -> None:  # fmt: skip
    """Refuse a state of another format, other settings or other data, and say what differs."""
    if not isinstance(state, Mapping) or state.get("format") == reads:
        check_checksum(state)
    if state.get("format") != reads:
        raise StateMismatch(
            f"the state is of format {state.get('format')}",
            why=f"this penstock reads format {reads}",
            do="use the penstock that made it",
        )
    saved = {"lanes": 1, **state["config"]}
    told = f"the state has {{!r}}, this {who} {{!r}}"
    mine = {"objective": None, "lanes": 1, **mine}
    found = differences({key: saved.get(key) for key in mine}, mine, told=told)
    found = [one.replace("seq_len:", f"{_ROW_TOKENS}:") for one in found]
    for source, seen in zip(sources, state["sources"], strict=False):
        if wrong := source.check_identity(seen):
            found.append(f'source "{source.name}": {wrong}')
    if found:
        raise StateMismatch(
            "the state was made under other data or settings", why="\n".join(found), do=do
        )
