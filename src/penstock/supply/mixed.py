"""A torch dataset of mixed shards: examples of any columns, drawn through the pool of the plan.

In:    directories of shards with ranges, a pool size, a seed
Out:   examples, one after the other; a state of a few kilobytes that goes on exactly
Keeps: each example once in a pass, over all workers of all ranks together; at most `max_memory_gb`
Never: shuffles by itself: the order is the plan's, of samples of length one
"""

import contextlib
import dataclasses
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa

from penstock.errors import BadConfig, MemoryLimit, PenstockError, StateMismatch
from penstock.store.caches import is_address, open_cache
from penstock.stream.plan import Plan, PlanConfig, Rows
from penstock.stream.pool import mix_key
from penstock.supply.choose import (
    check_state,
    check_tokenizers,
    count_shards,
    listed_weights,
    name_sources,
    open_source,
)
from penstock.supply.example_run import (
    STATE_BYTES,
    Began,
    ExampleWindow,
    Passes,
    Run,
    Share,
    read_by_workers,
    skip_rows,
)
from penstock.supply.examples import Example, ExampleSource, Seen, show_log
from penstock.supply.ranks import find_rank
from penstock.supply.settings import size_in_bytes
from penstock.supply.shards import SourceConfig, waiting_limits
from penstock.supply.window import Key
from penstock.work.values import MOST_SEED, checked_path, whole

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise BadConfig(
        "torch is not installed, and StreamingMixedShardDataset is a dataset of torch's",
        do='pip install "penstock[torch]", or use PretrainDataLoader, which needs no torch',
    ) from None

STATE_FORMAT: Final = 1
BLOCK_ROWS: Final = 4096
"""Examples planned at once, at most."""
PICKED: Final = 512
"""Examples copied out of their shards at once."""

Augment = Callable[[Example], Sequence[Example]]
State = dict[str, Any]

_log = logging.getLogger(__name__)


class StreamingMixedShardDataset(IterableDataset[Example]):
    """Examples of several directories of shards, mixed through one pool.

    Each iteration is one pass; `set_epoch` gives the next one another order. `state_dict` says
    where the pass stands, if it is iterated in this process (no workers, or inside a worker, as
    torchdata's StatefulDataLoader does). With workers, ask for `state_dict(batches=n)`.
    """

    def __init__(
        self,
        data_dirs: Sequence[str],
        shard_ranges: Sequence[str],
        pool_size: int = 2_000_000,
        refill_threshold: int = 1_500_000,
        max_memory_gb: float = 5.0,
        enable_augmentation: bool = True,
        max_examples_unaugmented: int | None = None,
        verbose: bool = False,
        random_seed: int | None = None,
        *,
        weights: Mapping[str, float] | Sequence[float] | None = None,
        epochs: int | None = 1,
        columns: Sequence[str] | None = None,
        augment: Augment | None = None,
        augmentation_factor: int | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        split: str = "train",
        rank: int | None = None,
        world_size: int | None = None,
        streaming: bool = True,
        stall_s: float | None = None,
        patience_s: float | None = None,
        cache_dir: str | None = None,
        cache_gb: float = 100.0,
    ) -> None:
        """`weights` are the number of chosen shards of each directory if none are given. With
        `augmentation_factor`, `augment` must give exactly so many. `batch_size` is that of the
        DataLoader: a worker takes blocks of so many. `drop_last` leaves out an incomplete round at
        the end, so that every rank and worker has as many examples. All workers of this process
        together may add `max_memory_gb`. Shards of buckets are kept in `cache_dir`."""
        super().__init__()
        self.rank, self.world_size = find_rank(rank, world_size)
        self.verbose = verbose
        self.enable_augmentation = enable_augmentation
        self.max_examples_unaugmented = max_examples_unaugmented
        self.augmentation_factor = augmentation_factor
        self.batch_size = batch_size
        self.max_memory_gb = max_memory_gb
        self._drop_last = drop_last
        self._augment = augment
        self._check_options()
        cache = None
        if cache_dir:
            cache_dir = checked_path("cache_dir", cache_dir)
            cache = open_cache(cache_dir, size_in_bytes("cache_gb", cache_gb))
        self._seed_is_drawn = random_seed is None
        seed = secrets.randbits(63) if random_seed is None else random_seed
        self.random_seed = whole("random_seed", seed, 0, MOST_SEED)
        """The seed of the order: the one given, or the one drawn."""
        self.config = PlanConfig(
            seq_len=1, pack="pad", buffer_pieces=1, pool_size=pool_size, epochs=epochs,
            refill_threshold=refill_threshold, pool_tokens=max(1, whole("pool_size", pool_size)),
        )  # fmt: skip
        self._discover_shards(
            data_dirs, shard_ranges, columns,
            SourceConfig(
                text_field="", split=split, streaming=streaming, cache=cache,
                **waiting_limits(stall_s, patience_s),
            ),
        )  # fmt: skip
        self._weights = self._find_weights(weights)
        self._passes = Passes(
            torch.zeros(Passes.size(), dtype=torch.int64).share_memory_(),  # type: ignore[no-untyped-call]
            torch.zeros(STATE_BYTES, dtype=torch.uint8).share_memory_(),  # type: ignore[no-untyped-call]
        )
        self._loaded: State | None = None
        """The state loaded last, for the pass that `Passes` gives it to."""
        self._loads = 0
        """Which load that was."""
        self._own: State | None = None
        """A state that was loaded in this worker, and for it alone."""
        self._run: Run | None = None
        self._process = os.getpid()
        self._rss_at_start = 0
        self._place = (0, 0)
        if verbose:
            show_log(_log)
        if verbose or self._seed_is_drawn:
            drawn = " (drawn: no random_seed was given)" if self._seed_is_drawn else ""
            _log.info("random_seed is %d%s", self.random_seed, drawn)

    def _check_options(self) -> None:
        for name in ("max_examples_unaugmented", "augmentation_factor", "batch_size"):
            value = getattr(self, name)
            least = 0 if name == "max_examples_unaugmented" else 1
            if value is not None and whole(name, value) < least:
                raise BadConfig(f"{name} is {value}", do=f"choose {least} or more, or None")
        size_in_bytes("max_memory_gb", self.max_memory_gb)

    def _discover_shards(
        self, data_dirs: Sequence[str], shard_ranges: Sequence[str],
        columns: Sequence[str] | None, config: SourceConfig,
    ) -> None:  # fmt: skip
        """Open the directories, each with its range of shards."""
        paths = [str(path) for path in name_sources(data_dirs).values()]
        ranges = [shard_ranges] if isinstance(shard_ranges, str) else list(shard_ranges)
        if len(ranges) != len(paths):
            raise BadConfig(
                f"{len(ranges)} shard_ranges for {len(paths)} data_dirs",
                do='give one for each, "all" for all shards',
            )
        seen: Seen = {}
        self.sources = []
        for path, chosen in zip(paths, ranges, strict=True):
            if os.path.isfile(path) and not path.endswith(".parquet"):
                raise BadConfig(
                    f"{path} is a file, not a directory of shards",
                    do=f"make shards of it: penstock shard --input {path} --parquet_dir …",
                )
            shards = open_source(
                path,
                dataclasses.replace(
                    config, shards=chosen, cache=config.cache if is_address(path) else None
                ),
            )
            if not config.streaming and not shards.is_closed:
                raise BadConfig(
                    "the dataset is not sealed",
                    where=path,
                    do="give streaming=True to train while it grows",
                )
            size = shards.ranged.size
            if size is not None and shards.is_sealed:
                shards.has_shard(size - 1)  # says so, if the range goes beyond what there is
            self.sources.append(ExampleSource(shards, columns, seen))
        if columns is None or "tokens" in columns:
            check_tokenizers([source.shards for source in self.sources])

    def _find_weights(self, weights: Mapping[str, float] | Sequence[float] | None) -> list[float]:
        if self.world_size > 1 and self._seed_is_drawn:
            raise BadConfig(
                f"there is no random_seed for {self.world_size} ranks",
                why="each would draw its own, and they would not share one stream",
                do="give all ranks the same random_seed",
            )
        if weights is not None:
            return listed_weights(weights, [source.name for source in self.sources])
        if len(self.sources) == 1:
            return [1.0]
        return count_shards([source.shards for source in self.sources])

    def __repr__(self) -> str:
        names = ", ".join(source.name for source in self.sources)
        return (
            f"StreamingMixedShardDataset({names}; pool_size {self.config.pool_size:,}, "
            f"random_seed {self.random_seed}, epoch {self.epoch})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """A worker gets all but the run: it makes its own."""
        return {**self.__dict__, "_run": None}

    # Iteration

    @property
    def epoch(self) -> int:
        return self._passes.epoch

    def set_epoch(self, epoch: int) -> None:
        """The order of the next iteration: another one for every epoch."""
        if epoch < 0:
            raise BadConfig(f"epoch is {epoch}", do="choose 0 or more")
        self._passes.set_epoch(epoch)

    def augment(self, example: Example) -> Sequence[Example]:
        """What an example becomes. Override it, or give the constructor a function.

        It must give the same for the same example; dice come from `self.rng()`.
        """
        return (example,) if self._augment is None else self._augment(example)

    def rng(self) -> np.random.Generator:
        """Dice for `augment`: the same ones for the same example of the same epoch."""
        return np.random.default_rng([self.random_seed & (2**63 - 1), *self._place])

    @property
    def _augments(self) -> bool:
        own = type(self).augment is not StreamingMixedShardDataset.augment
        return self.enable_augmentation and (own or self._augment is not None)

    def __iter__(self) -> Iterator[Example]:
        try:
            self._run = run = self._begin()
        except PenstockError as error:
            if get_worker_info() is None:
                raise
            return _raising(error)
        return self._examples(run)

    def _begin(self) -> Run:
        """A run for this process's share, from a loaded state or from the start."""
        info = get_worker_info()
        if self._process != os.getpid():  # a fork: clients and their threads stayed behind
            self._process, self._rss_at_start = os.getpid(), 0
            for source in self.sources:
                source.shards.reopen()
        if not self._rss_at_start:
            self._rss_at_start = psutil.Process().memory_info().rss
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        share = Share(self.batch_size or 1, self.rank, self.world_size, worker, workers)
        state = self._take_loaded()
        window = ExampleWindow(
            self.sources, int(self.max_memory_gb * 1e9 / workers), self._monitor_memory
        )
        run = Run(self._new_plan(state), window, share)
        if state is not None:
            self._check_share(state, share)
            run.taken, run.given = state["taken"], state["given"]
        return run

    def _take_loaded(self) -> State | None:
        """The loaded state, for the first pass after it was loaded, if its epoch is still wanted;
        a worker's own before that of all."""
        info, passes = get_worker_info(), self._passes
        if self._loads != passes.loads:  # by the main process, while this worker was there
            self._loaded, self._loads = passes.loaded(), passes.loads
            self.random_seed = self._loaded["random_seed"]
        is_first = passes.begin(info.id if info else -1, info.seed - info.id if info else -1)
        own, self._own = self._own, None
        state = own or (self._loaded if is_first else None)
        if state is not None and state["epoch"] != self.epoch:
            state = None
        began = Began.FROM_START if state is None else Began.FROM_LOADED
        passes.note((Began.FROM_OWN if own else began) if info else Began.HERE)
        return state

    def _check_share(self, state: State, share: Share) -> None:
        """Whether ours of the stream can go on where that of the state stopped."""
        saved, mine = state["share"], share.as_json()
        if saved == mine:
            return
        whole = saved["workers"] == 1 and not state["taken"] and not state["given"]
        if not whole:
            raise StateMismatch(
                "the state is of one share of the stream, and this is another",
                why="\n".join(
                    f"{key}: the state has {saved[key]}, this {value}"
                    for key, value in mine.items()
                    if saved[key] != value
                ),
                do="resume with as many ranks and workers and the same batch_size, or save a "
                "state between batches without workers, or state_dict(batches=…)",
            )

    def _new_plan(self, state: State | None) -> Plan:
        seed = mix_key(self.random_seed, self.epoch) if self.epoch else self.random_seed
        plan = Plan(self.sources, dataclasses.replace(self.config, seed=seed), self._weights)
        if state is not None:
            plan.restore(state["plan"])
            skip_rows(plan, state["row"] - plan.row)
        return plan

    def _examples(self, run: Run) -> Iterator[Example]:
        with contextlib.closing(run.window):
            while self._refill_pool(run):
                self._load_shards_proportionally(run)
                places = run.share.own(len(run.block.fills))[run.taken :]
                for first in range(0, len(places), PICKED):
                    lines = run.block.segments[places[first : first + PICKED]]
                    rows = run.block.first + places[first : first + PICKED]
                    picked = self._pick(run, lines)
                    for row, line, example in zip(rows.tolist(), lines, picked, strict=True):
                        yield from self._give(run, row, line, example)
            run.finish()

    def _give(self, run: Run, row: int, line: Any, example: Example) -> Iterator[Example]:
        """An example, or all that it becomes. The state moves before each is handed out."""
        if not self._augments:
            run.step()
            run.num_given += 1
            yield example
            return
        _, source, _, shard, number, _, _ = line.tolist()
        self._place = self.epoch, row
        try:
            made = list(self.augment(example))
        except Exception as error:
            error.add_note(f"in augment, {self.sources[source].where(shard, number)}")
            raise
        if self.augmentation_factor is not None and len(made) != self.augmentation_factor:
            raise BadConfig(
                f"augment gave {len(made)} examples, augmentation_factor is "
                f"{self.augmentation_factor}",
                where=self.sources[source].where(shard, number),
                do="let augment give as many for every example, or leave the factor out",
            )
        for k in range(run.given, len(made)):
            if k + 1 == len(made):
                run.step()
            else:
                run.given = k + 1
            run.num_given += 1
            yield made[k]
        if not made:
            run.step()

    def _refill_pool(self, run: Run) -> bool:
        """Plan the next block of examples; the plan refills its pools where they run low. A block
        ends there, so that it needs no more shards than the pools hold, and waits for none that it
        could do without."""
        plan, share, limit = run.plan, run.share, self.max_examples_unaugmented
        if run.ended:
            return False
        run.start = plan.snapshot()
        ready = min(BLOCK_ROWS, plan.drawable())
        count = max(1, ready // share.round) * share.round
        wanted = count if limit is None else min(count, limit - plan.row)
        try:
            rows = plan.take(max(0, wanted))
        except MemoryError as error:
            raise self._too_little(run, str(error)) from None
        run.ended = len(rows.fills) < count
        if run.ended and self._drop_last:
            whole = len(rows.fills) // share.round * share.round
            if left := len(rows.fills) - whole:
                _log.info("%d examples at the end fill no round, and are left out", left)
            rows = Rows(rows.first, rows.segments[:whole], rows.fills[:whole])
        run.block = rows
        return len(rows.fills) > 0

    def _load_shards_proportionally(self, run: Run) -> None:
        """Bring the shards that the plan has taken in, let go of those that have left."""
        pools, window = run.plan.pools, run.window
        cycles = sum(pool.cycle for pool in pools)
        if cycles != run.cycles:
            run.cycles, run.ahead, run.coming = cycles, set(), None
            run.keys = {
                (number, shard)
                for number, pool in enumerate(pools)
                for cohort in pool.cohorts
                for shard in range(cohort.first, cohort.last)
            }
            window.keep(run.keys | self._used(run))
            window.prefetch(sorted(run.keys))
            if self.verbose and run.share.worker == 0:
                self._tell(run)
            return
        if run.coming is None:
            coming = {(n, shard) for n, pool in enumerate(pools) for shard in pool.coming()}
            run.coming = coming - run.keys
        if not run.ahead and window.has_room(len(run.coming)):
            run.ahead = run.coming
            window.prefetch(sorted(run.ahead))
        if window.held > len(run.keys):
            window.keep(run.keys | self._used(run) | run.ahead)

    def _used(self, run: Run) -> set[Key]:
        """The shards of our examples of the block."""
        lines = run.block.segments[run.share.own(len(run.block.fills))]
        return set(zip(lines[:, 1].tolist(), lines[:, 3].tolist(), strict=True))

    def _tell(self, run: Run) -> None:
        """Where the examples since the last refill came from."""
        drawn = run.drawn()
        new, run.told = drawn - run.told, drawn
        total, weight = max(1, int(new.sum())), sum(self._weights)
        shares = [
            f"{source.name} {count:,} ({count / total:.1%}, weight {share / weight:.1%})"
            for source, count, share in zip(self.sources, new.tolist(), self._weights, strict=True)
        ]
        _log.info(
            "refill %d at example %d: %s; %d shards in the pool, %.0f MB decoded, process %.0f MB",
            run.cycles, run.row, ", ".join(shares), len(run.keys), run.window.held_bytes / 1e6,
            psutil.Process().memory_info().rss / 1e6,
        )  # fmt: skip

    def _pick(self, run: Run, lines: Any) -> list[Example]:
        """The examples of lines of the plan."""
        found: list[Example] = [{}] * len(lines)
        keys = lines[:, 1].astype(np.int64) << 32 | lines[:, 3]
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        for mine in np.split(order, starts[1:]):
            _, source, _, shard, _, _, _ = lines[mine[0]].tolist()
            decoded = run.window.bring((source, shard))
            rows = lines[mine, 4].astype(np.int64)
            try:
                examples = decoded.examples(rows)
            except UnicodeDecodeError:
                raise self.sources[source].wrong_text(shard, decoded, rows) from None
            except MemoryError as error:
                raise self._too_little(run, str(error)) from None
            for place, example in zip(mine.tolist(), examples, strict=True):
                found[place] = example
        return found

    def _monitor_memory(self, held_bytes: int, max_bytes: int) -> str:
        """What is wrong with the memory of this process; empty if nothing is."""
        process = psutil.Process()
        grown = process.memory_info().rss - self._rss_at_start
        if grown > max_bytes:  # perhaps it is only memory that the allocator has not given back
            pa.default_memory_pool().release_unused()
            grown = process.memory_info().rss - self._rss_at_start
        if max(held_bytes, grown) <= max_bytes:
            return ""
        info = get_worker_info()
        shared = f", one of {info.num_workers} equal parts for the workers" if info else ""
        return (
            f"the examples of the window take {held_bytes / 1e9:.3f} GB and the process has grown "
            f"by {grown / 1e9:.3f} GB, {max_bytes / 1e9:.3f} GB are allowed{shared}"
        )

    def _too_little(self, run: Run, why: str) -> MemoryLimit:
        return MemoryLimit(
            "there is no memory for the next examples",
            where=f"example {run.row} of the stream, {run.window.held} shards held, "
            f"{run.window.held_bytes / 1e9:.3f} GB",
            why=why,
            do="the state can be saved and resumed; give the process more memory, or the dataset "
            "a smaller pool_size",
        )

    # Counts and state

    @property
    def num_taken(self) -> int:
        """Examples taken by this process in this pass, before augmentation."""
        return self._run.num_taken if self._run else 0

    @property
    def num_given(self) -> int:
        """Examples handed out by this process in this pass: `num_taken` times the factor."""
        return self._run.num_given if self._run else 0

    def state_dict(self, *, batches: int | None = None) -> State:
        """Where the iteration in this process stands, as JSON. With `batches`, where one with
        workers stands of which so many batches of `batch_size` were taken, whatever the workers
        have read ahead."""
        run, loaded = self._standing()
        if batches is not None:
            return self._state_after(batches, run, loaded)
        if self._passes.began > Began.HERE and get_worker_info() is None:
            raise read_by_workers("this process cannot see what they have handed out")
        if loaded is not None:
            return loaded
        share = Share(self.batch_size or 1, self.rank, self.world_size, 0, 1)
        at, counts = (0, 0, 0, self._new_plan(None).state()), [0, 0]
        if run is not None:
            at = run.row, run.taken, run.given, run.start.as_json()
            counts, share = [run.num_taken, run.num_given], run.share
        return self._state(at, share, counts)

    def _standing(self) -> tuple[Run | None, State | None]:
        """The run that is under way in this process, or else the state that the pass began with or
        will begin with; neither if that is the first example."""
        began, in_worker = self._passes.began, get_worker_info() is not None
        if in_worker or began == Began.HERE:
            run, loaded = self._run, self._own
        else:
            run, loaded = None, None if began == Began.FROM_START else self._loaded
        if run is not None or (loaded is not None and loaded["epoch"] != self.epoch):
            loaded = None
        return run, loaded

    def _state_after(self, batches: int, run: Run | None, loaded: State | None) -> State:
        if self.batch_size is None or self._augments:
            raise BadConfig(
                "batches of this dataset cannot be counted",
                why="augmented examples fill batches in their own way"
                if self._augments
                else "it was not told the batch_size of the DataLoader",
                do="iterate without workers, or with torchdata's StatefulDataLoader"
                if self._augments
                else "give the dataset the DataLoader's batch_size",
            )
        if self._passes.began == Began.FROM_OWN:
            raise read_by_workers("each of them was given a state of its own")
        plan = self._new_plan(loaded)
        if run is not None:
            plan.restore(run.origin.as_json())
        skip_rows(plan, batches * self.batch_size * self.world_size)
        share = Share(self.batch_size, self.rank, self.world_size, 0, 1)
        return self._state((plan.row, 0, 0, plan.state()), share, [0, 0])

    def _state(self, at: tuple[int, int, int, State], share: Share, counts: list[int]) -> State:
        row, taken, given, plan = at
        return {
            "format": STATE_FORMAT,
            "random_seed": self.random_seed,
            "epoch": self.epoch,
            "config": self._settings(),
            "sources": [source.identity() for source in self.sources],
            "plan": plan,
            "row": row,
            "taken": taken,
            "given": given,
            "share": share.as_json(),
            "counts": counts,
        }

    def _settings(self) -> dict[str, Any]:
        """All that decides the order, beside the data and the seed."""
        return {
            "pool_size": self.config.pool_size,
            "refill_threshold": self.config.refill_threshold,
            "epochs": self.config.epochs,
            "weights": self._weights,
            "data_dirs": len(self.sources),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where the state was taken."""
        mine = self._settings()
        if not self._seed_is_drawn:
            mine["random_seed"] = self.random_seed
        saved = {**state.get("config", {}), "random_seed": state.get("random_seed")}
        check_state(
            state, STATE_FORMAT, saved, mine, self.sources, who="dataset",
            do="give the dataset what the state has, or start anew without the state",
        )  # fmt: skip
        self.random_seed = state["random_seed"]
        self._run = None
        if get_worker_info() is not None:  # what torchdata does: every worker has its own
            self._own = dict(state)
            self._passes.set_epoch(state["epoch"])
            return
        self._loaded = dict(state)
        self._passes.load(state)
        self._loads = self._passes.loads


def _raising(error: PenstockError) -> Iterator[Example]:
    """Fails at the first example: a worker that persists and fails before that just exits."""
    raise error
    yield
