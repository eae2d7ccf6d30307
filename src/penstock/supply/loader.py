"""Feed the trainer: batches in the order of the plan, from any point on, on any number of ranks.

In:    one or more datasets, a tokenizer, how to mix and pack
Out:   `TrainingBatch` after batch; a state of a few kilobytes that goes on exactly
Keeps: the state moves with the batch that was handed out, never with what was read ahead
Never: shares anything between ranks but the logs; guesses that a dataset has ended
"""

import abc
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from penstock.errors import BadConfig, PenstockError
from penstock.store.caches import open_cache
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, PlanConfig, Rows, Snapshot
from penstock.supply.agree import Agreement
from penstock.supply.batch import Stack, TrainingBatch
from penstock.supply.choose import (
    check_length,
    check_state,
    check_tokenizers,
    count_shards,
    find_boundaries,
    listed_weights,
    name_sources,
    open_source,
    unknown_source,
)
from penstock.supply.explain import Span, explain_batch
from penstock.supply.fetch import Fetch
from penstock.supply.ledger import Ledger, count_ledger, count_segments
from penstock.supply.ranks import find_rank
from penstock.supply.release import needed_from, reader_name, release
from penstock.supply.settings import (
    UNSET,
    check_seal,
    doc_ids,
    merged_plan,
    seal_state,
    size_in_bytes,
)
from penstock.supply.shards import ShardSource, SourceConfig, waiting_limits
from penstock.supply.window import Key
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events
from penstock.work.values import checked_path, whole

STATE_FORMAT: Final = 2
BLOCK_ROWS: Final = 4096
"""Rows planned at once, if no new shards are needed for them."""
MOST_BATCH_TOKENS: Final = 1 << 36
STACK_ROWS: Final = 512
"""Rows filled at once."""
TELL_S: Final = 10.0
"""How often the ledger is among the events."""


class DataLoader(abc.ABC):
    """What every loader does."""

    @abc.abstractmethod
    def get_batch(self, batch_size: int) -> TrainingBatch:
        """The next `batch_size` rows of this rank. Raises StopIteration after the last."""

    @abc.abstractmethod
    def get_iterator(self) -> Iterator[TrainingBatch]:
        """Batches from where the loader stands to the end."""

    @abc.abstractmethod
    def get_num_batches(self) -> "NumBatches":
        """How many batches are known so far, and whether that is all."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Go back to the first batch."""

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, as JSON."""

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of memory and threads."""

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self.get_iterator()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, slots=True)
class NumBatches:
    """About how many batches the tokens known so far make, without padding and what is left out,
    and whether that is all that will come. Text of which nobody counted the tokens counts as 0."""

    known: int
    sealed: bool


class PretrainDataLoader(DataLoader):
    """Rows of `chunk_size` tokens from one dataset or a mixture, live or finished."""

    def __init__(
        self,
        path: str | Sequence[str] | Mapping[str, str | ShardSource],
        tokenizer: Any = None,
        chunk_size: int = 2048,
        streaming: bool = True,
        *,
        batch_size: int = 16,
        global_batch_size: int | None = None,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        weight_schedule: Mapping[int, Mapping[str, float] | Sequence[float]] | None = None,
        shard_ranges: str | Sequence[str] = "all",
        epochs: int | None = UNSET,
        source_epochs: Mapping[str, int] | None = None,
        seed: int = UNSET,
        pack: str = UNSET,
        plan: PlanConfig | None = None,
        bos: str | None = "auto",
        eos: str | None = "auto",
        ban: Sequence[int] = (),
        last: str = "pad",
        split: str = "train",
        other_length: bool = False,
        max_memory_gb: float = 5.0,
        text_field: str = "text",
        cache_dir: str | None = None,
        cache_gb: float = 100.0,
        run_dir: str | None = None,
        reader: str | None = None,
        events: Events | None = None,
        stall_s: float | None = None,
        patience_s: float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Where the rows come from and how they are made: docs/train.md.

        `epochs`, `seed` and `pack` may be given here or in `plan`. A loader with a name, `reader`,
        holds shards in a directory that `penstock pull --max_disk` fills from here on. `stall_s` is
        the silence that is an error: 120 s of whoever makes the dataset and half an hour of its
        input, or a number of seconds for both. A bucket that does not answer is asked again for
        `patience_s`, 60 s if nothing is said.
        """
        self.rank, self.world_size = find_rank(rank, world_size)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.global_batch_size = self.batch_size * self.world_size
        if global_batch_size is not None:
            self.global_batch_size = whole("global_batch_size", global_batch_size, 1)
        if self.global_batch_size < self.world_size:
            raise BadConfig(
                f"global_batch_size is {self.global_batch_size} for {self.world_size} ranks",
                do="give at least one row to each rank",
            )
        if last not in ("pad", "drop"):
            raise BadConfig(f"last is {last!r}", do="choose pad or drop")
        self._last = last
        self.config = merged_plan(plan, chunk_size, pack=pack, epochs=epochs, seed=seed)
        if self.global_batch_size * self.config.seq_len > MOST_BATCH_TOKENS:
            raise BadConfig(
                f"a batch has {self.global_batch_size:,} rows of {self.config.seq_len:,} tokens",
                do=f"choose batch_size and chunk_size below {MOST_BATCH_TOKENS:,} tokens together",
            )
        cache_dir, run_dir = (
            given and checked_path(name, given)
            for name, given in (("cache_dir", cache_dir), ("run_dir", run_dir))
        )
        self._ban = doc_ids(ban)
        self._max_bytes = size_in_bytes("max_memory_gb", max_memory_gb)
        self.tokenizer = None if tokenizer is None else Tokenizer.load(tokenizer)
        self._bos, self._eos, self._pad = find_boundaries(self.tokenizer, bos, eos)
        extra = int(self._bos >= 0) + int(self._eos >= 0)
        paths = name_sources(path)
        ranges = [shard_ranges] * len(paths) if isinstance(shard_ranges, str) else shard_ranges
        if len(ranges) != len(paths):
            raise BadConfig(
                f"{len(ranges)} shard_ranges for {len(paths)} sources", do="give one for each"
            )
        cache = open_cache(cache_dir, size_in_bytes("cache_gb", cache_gb)) if cache_dir else None
        self.sources = [
            open_source(
                url,
                SourceConfig(
                    name=name, tokenizer=self.tokenizer, shards=chosen, banned=self._ban,
                    split=split, extra_tokens=extra, text_field=text_field, streaming=streaming,
                    cache=cache, **waiting_limits(stall_s, patience_s),
                ),
                cache_dir=cache_dir,
                makes=self.rank == 0,
            )
            for (name, url), chosen in zip(paths.items(), ranges, strict=True)
        ]  # fmt: skip
        for source in self.sources:
            if not streaming and not source.is_closed:
                raise BadConfig(
                    "the dataset is not sealed",
                    where=source.url,
                    do="give streaming=True to train while it grows",
                )
            if not other_length:
                check_length(source, self.config.seq_len)
            if source.ranged.size is not None and source.is_sealed:
                source.has_shard(source.ranged.size - 1)  # says so, if there is no such shard
        check_tokenizers(self.sources)
        names = [source.name for source in self.sources]
        limits = {
            name: whole(f"source_epochs of {name!r}", limit, 1)
            for name, limit in (source_epochs or {}).items()
        }
        if unknown := sorted(set(limits) - set(names)):
            raise unknown_source(unknown[0], names)
        self._weights = self._find_weights(weights, names)
        self._stages = [
            (
                whole("a step of weight_schedule", step, 0) * self.global_batch_size,
                listed_weights(shares, names),
            )
            for step, shares in sorted((weight_schedule or {}).items())
        ]
        self._reader = reader_name(reader, run_dir)
        if reader is not None and self.rank == 0:
            release(self.sources, [0] * len(self.sources), self._reader, begins=True)
        self._epochs = [limits.get(name, self.config.epochs) for name in names]
        self._agreement = Agreement(self.config.behind, run_dir, self.world_size)
        self._agreement.bind(self._about())
        self._events = events
        if events is None and run_dir and "://" not in run_dir and self.rank == 0:
            os.makedirs(run_dir, exist_ok=True)
            self._events = Events("train", path=Path(run_dir) / "_events.jsonl")
        self._tell_at = 0.0
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False
        self._fetch = self._new_fetch()
        self._begin()

    def _new_fetch(self) -> Fetch:
        return Fetch(
            list(self.sources), max_bytes=self._max_bytes, bos=self._bos, eos=self._eos,
            pad=self._pad,
        )  # fmt: skip

    def _begin(self) -> None:
        self._plan = Plan(
            self.sources, self.config, self._weights, stages=self._stages, epochs=self._epochs,
            decide=self._agreement.decide,
        )  # fmt: skip
        self._block = Rows(0, np.zeros((0, layout.SEGMENT), np.int32), np.zeros(0, np.int32))
        self._block_state = self._plan.snapshot()
        self._stack: Stack | None = None
        self._taken = 0
        self._ended = False
        self.step = 0
        """Batches handed out."""
        self._end_padding = 0
        self._dropped = np.zeros((2, len(self.sources)), np.int64)
        self._cycles = -1
        self._fetching = True
        self._broken: tuple[Snapshot, int] | None = None

    def _find_weights(
        self, weights: Mapping[str, float] | Sequence[float] | None, names: list[str]
    ) -> list[float]:
        if weights is not None:
            return listed_weights(weights, names)
        if len(names) == 1:
            return [1.0]
        return count_shards(self.sources)

    def get_iterator(self) -> Iterator[TrainingBatch]:
        while (batch := self._next(self.global_batch_size)) is not None:
            yield batch

    def get_batch(self, batch_size: int) -> TrainingBatch:
        batch = self._next(whole("batch_size", batch_size, 1) * self.world_size)
        if batch is None:
            raise StopIteration
        return batch

    def _next(self, count: int) -> TrainingBatch | None:
        if self._closed:
            raise BadConfig("the loader is closed", do="make a new one")
        with self._own():
            self._settle()
            before = self._block_state, self._taken
            try:
                batch = self._made(count)
                if self._events is not None and (batch is None or time.monotonic() > self._tell_at):
                    self._tell(self._events)
                return batch
            except BaseException:
                # an error or an interrupt took nothing: the state is that of the batch before
                self._broken = before
                raise

    def _tell(self, events: Events) -> None:
        self._tell_at = time.monotonic() + TELL_S
        lines = [dataclasses.asdict(line) for line in self.ledger()]
        events.emit("ledger", step=self.step, sources=lines)

    def _own(self) -> "threading.RLock":
        """The lock of whoever uses the loader; a process that was forked has one of its own."""
        if self._pid != os.getpid():
            # a fork takes neither threads along nor clients of buckets
            self._pid, self._lock = os.getpid(), threading.RLock()
            self._fetch = self._new_fetch()
            for source in self.sources:
                source.reopen()
            self._broken = self._broken or (self._block_state, self._taken)
        return self._lock

    def _settle(self) -> None:
        """To the place of the last batch that was handed out, if something went wrong since."""
        if self._broken is not None:
            self._go_to(*self._broken)

    def _made(self, count: int) -> TrainingBatch | None:
        if self._taken == len(self._block.fills) and not self._ended:
            self._take_block(count)
        first, last = (count * r // self.world_size for r in (self.rank, self.rank + 1))
        left = len(self._block.fills) - self._taken
        if left >= count:
            if self._stack is None or self._stack.is_empty or self._stack.count != count:
                size = min(left // count, max(1, STACK_ROWS // count)) * count
                rows = _slice(self._block, self._taken, self._taken + size)
                self._stack = self._filled(rows, count, first, last)
            batch = self._stack.pop(self.step)
            self._taken += count
            self.step += 1
            return batch
        # rows that are left of another batch size, and the end
        rows = self._rows(count)
        short: TrainingBatch | None = None
        if len(rows.fills) == count or self._pads(rows):
            padded = np.zeros(count, np.int32)
            padded[: len(rows.fills)] = rows.fills
            whole = Rows(rows.first, rows.segments, padded)
            short = self._filled(whole, count, first, last).pop(self.step)
            self.step += 1
        if len(rows.fills) < count:
            self._count_end(rows, count)
        if short is None:  # the plan has looked ahead: look again
            for source in self.sources:
                source.check_end()
        return short

    def _filled(self, rows: Rows, count: int, first: int, last: int) -> "Stack":
        """Batches of `count` rows each, of which this rank has those from `first` to `last`."""
        mine = rows
        if last - first < count:
            batch, within = np.divmod(rows.segments[:, 0], count)
            held = (within >= first) & (within < last)
            segments = rows.segments[held]
            segments[:, 0] = (batch * (last - first) + within - first)[held]
            fills = np.ascontiguousarray(rows.fills.reshape(-1, count)[:, first:last]).reshape(-1)
            mine = Rows(rows.first, segments, fills)
        ids = self._fetch.fill(mine, 0, len(mine.fills), self.config.seq_len)
        return Stack(ids, mine, rows.first, count, last - first, packed=self.config.pack != "pad")

    def _rows(self, count: int) -> Rows:
        """The next `count` rows, fewer at the end."""
        parts: list[Rows] = []
        found = 0
        while found < count:
            left = len(self._block.fills) - self._taken
            if left == 0:
                if self._ended:
                    break
                self._take_block(count - found, parts)
                continue
            size = min(left, count - found)
            parts.append(_slice(self._block, self._taken, self._taken + size))
            self._taken += size
            found += size
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _take_block(self, least: int, begun: Sequence[Rows] = ()) -> None:
        """Plan on, no further than the shards that `least` rows need, so that no batch waits for a
        later one. `begun` are rows of blocks before it whose batch has not been made yet."""
        # a block begins where the one before ended: rows handed out of it are its state's `skip`
        self._block_state = self._plan.snapshot()
        count = max(least, BLOCK_ROWS // least * least)
        if self.config.pack == "concat" and not all(source.is_closed for source in self.sources):
            count = least  # a row that is begun would wait for a shard
        self._block = self._plan.take(count, least)
        self._stack = None
        self._taken = 0
        self._ended = len(self._block.fills) < least
        self._hold_window([*begun, self._block])

    def _hold_window(self, blocks: Sequence[Rows]) -> None:
        """Bring the shards of the window, let go of those that neither it nor `blocks` need."""
        cycles = sum(pool.cycle for pool in self._plan.pools)
        if cycles == self._cycles:
            return
        self._cycles = cycles
        window: list[Key] = [
            (number, shard)
            for number, pool in enumerate(self._plan.pools)
            for cohort in pool.cohorts
            for shard in range(cohort.first, cohort.last)
        ]
        # the next cohort is decoded while this one is trained on
        for number, pool in enumerate(self._plan.pools):
            if pool.ended or not pool.cohorts:
                continue
            size = pool.cohorts[-1].last - pool.cohorts[-1].first
            known = min(pool.shard + size, self.sources[number].num_known)
            window += [(number, shard) for shard in range(pool.shard, known)]
        segments = np.concatenate([rows.segments for rows in blocks])
        used = np.unique(segments[:, 1].astype(np.int64) << 32 | segments[:, 3]).tolist()
        needed = {(pair >> 32, pair & 0xFFFFFFFF) for pair in used}
        needed.update(self._plan.open_shards(), window)
        self._fetch.keep(needed)
        for number, source in enumerate(self.sources):
            source.forget_but({shard for one, shard in needed if one == number})
        if self._fetching:
            self._fetch.prefetch(window)

    def _pads(self, rows: Rows) -> bool:
        """Whether the last rows, fewer than a batch has, are padded to one; else they are
        skipped."""
        return self._last == "pad" and len(rows.fills) > 0

    def _count_end(self, rows: Rows, count: int) -> None:
        """Count what became of the last rows, fewer than `count`."""
        if self._pads(rows):
            self._end_padding += (count - len(rows.fills)) * self.config.seq_len
        else:
            self._dropped += count_segments(rows.segments, len(self.sources))
            self._end_padding -= int((self.config.seq_len - rows.fills).sum())

    def get_num_batches(self) -> NumBatches:
        tokens = 0
        for source, limit in zip(self.sources, self._epochs, strict=True):
            tokens += source.num_tokens() * (limit or 1)
        rows = tokens // self.config.seq_len
        sealed = all(source.is_closed for source in self.sources)
        return NumBatches(rows // self.global_batch_size, sealed)

    def reset(self) -> None:
        with self._own():
            self._fetch.keep(set())
            self._begin()

    def change_weights(self, weights: Mapping[str, float] | Sequence[float]) -> None:
        """From the next batch on other weights hold; the state remembers it. Every rank must do
        the same at the same step."""
        shares = listed_weights(weights, [source.name for source in self.sources])
        with self._own():
            self._settle()
            self._go_to(self._block_state, self._taken)
            self._plan.change_weights(shares)
            # a state that is taken now must know of the change
            self._block_state = self._plan.snapshot()
            self._block, self._taken = _slice(self._block, 0, 0), 0

    def _go_to(self, at: Snapshot | Mapping[str, Any], skip: int) -> None:
        """To a place in the stream: a saved state of the plan, and rows after it."""
        self._plan.restore(at.as_json() if isinstance(at, Snapshot) else at)
        self._block_state = self._plan.snapshot()
        self._block = self._plan.take(skip) if skip else _slice(self._block, 0, 0)
        self._stack = None
        self._taken = skip
        self._ended = False
        self._cycles = -1
        self._broken = None

    def state_dict(self) -> dict[str, Any]:
        with self._own():
            at, skip = self._broken or (self._block_state, self._taken)
            try:
                lines = self.ledger()
            except (PenstockError, OSError):  # what broke the last batch, again
                lines = []
            state = {
                "format": STATE_FORMAT,
                "step": self.step,
                "config": self._settings(),
                "sources": [source.identity() for source in self.sources],
                "plan": at.as_json(),
                "decided": self._agreement.state(at.asked),
                "skip": skip,
                "end_padding": self._end_padding,
                "dropped": self._dropped.tolist(),
                "ledger": [dataclasses.asdict(line) for line in lines],
            }
        return seal_state(state)

    def _about(self) -> str:
        """What this run is: its settings, and the data that it began with."""
        sources = [source.identity().get("dataset", source.url) for source in self.sources]
        return json.dumps([self._settings(), sources], sort_keys=True)

    def _settings(self) -> dict[str, Any]:
        """All that decides which rows come, beside the data."""
        return {
            **dataclasses.asdict(self.config),
            "sources": [source.name for source in self.sources],
            "weights": self._weights,
            "weight_schedule": [[row, list(shares)] for row, shares in self._stages],
            "source_epochs": self._epochs,
            "tokenizer": None if self.tokenizer is None else self.tokenizer.fingerprint,
            "bos": self._bos,
            "eos": self._eos,
            "ban": self._ban,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or state.get("format") == STATE_FORMAT:
            check_seal(state)
        check_state(
            state, STATE_FORMAT, state.get("config", {}), self._settings(), self.sources,
            do="give the loader what the state has, or start anew with reset()",
        )  # fmt: skip
        with self._own():
            self._agreement.restore(state["decided"])
            self._go_to(state["plan"], state["skip"])
            self.step = state["step"]
            self._end_padding = state["end_padding"]
            self._dropped[:] = state["dropped"]

    def release(self, state: Mapping[str, Any], reader: str | None = None) -> None:
        """Say that a checkpoint with this state is safe: `penstock pull --max_disk` may remove the
        shards that no resume from it will ask for. `reader` is the loader's own by default."""
        check_seal(state)
        if self.rank == 0:
            needed = needed_from(state["plan"], self._epochs, self.config.behind)
            release(self.sources, needed, self._reader if reader is None else reader)

    def explain(self, batch: TrainingBatch) -> list[Span]:
        """Where every token of a batch of this loader comes from."""
        return explain_batch(batch, self.sources, self.tokenizer, lead=int(self._bos >= 0))

    def skip(self, batches: int) -> None:
        """Move on by so many batches, or to the end, without reading their tokens."""
        left, each = whole("batches", batches, 0), self.global_batch_size
        with self._own():
            self._settle()
            self._fetching = False
            while left > 0:
                asked = min(left, max(1, BLOCK_ROWS // each))
                rows = self._rows(asked * each)
                full, rest = divmod(len(rows.fills), each)
                self.step += full
                left -= full
                if full < asked:
                    last = _slice(rows, full * each, full * each + rest)
                    self.step += self._pads(last)
                    self._count_end(last, each)
                    break
            self._fetching = True
            self._cycles = -1
            self._stack = None

    def ledger(self) -> list[Ledger]:
        """What became of every token read so far, by source."""
        with self._own():
            self._settle()
            return count_ledger(
                self._plan, self._block, self._taken, [source.name for source in self.sources],
                self._dropped, self._end_padding,
            )  # fmt: skip

    def close(self) -> None:
        if self._pid == os.getpid():
            self._fetch.close()
        self._closed = True


def _slice(rows: Rows, first: int, last: int) -> Rows:
    a, b = np.searchsorted(rows.segments[:, 0], (first, last)).tolist()
    segments = rows.segments[a:b]
    if first:
        segments = segments.copy()
        segments[:, 0] -= first
    return Rows(rows.first + first, segments, rows.fills[first:last])


def _joined(parts: list[Rows]) -> Rows:
    if not parts:
        return Rows(0, np.zeros((0, layout.SEGMENT), np.int32), np.zeros(0, np.int32))
    moved = []
    for part in parts:
        segments = part.segments.copy()
        segments[:, 0] += part.first - parts[0].first
        moved.append(segments)
    return Rows(
        parts[0].first, np.concatenate(moved), np.concatenate([part.fills for part in parts])
    )
