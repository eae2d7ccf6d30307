"""A torch dataset of mixed shards: examples of any columns, drawn through the pool of the plan.

In:    directories of shards with ranges, a pool size, a seed
Out:   examples, one after the other; a state of a few kilobytes that goes on exactly
Keeps: each example once in a pass, over all workers of all ranks together; at most `max_memory_gb`
Never: shuffles by itself: the order is the plan's, of samples of length one
"""

import contextlib
import dataclasses
import json
import logging
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import psutil
import pyarrow as pa

from penstock.errors import BadConfig, MemoryLimit, PenstockError
from penstock.options import MOST_SEED, config_of, gigabytes, whole
from penstock.stream.plan import PlanConfig, Rows
from penstock.stream.pool import mix_key
from penstock.supply.agree import choose_ramp, recorded_ramp
from penstock.supply.engine import BLOCK_ROWS, Engine, Share
from penstock.supply.example_run import (
    STATE_BYTES,
    Began,
    ExampleWindow,
    Passes,
    Run,
    read_by_workers,
)
from penstock.supply.run_folder import SharedFiles, launch_name
from penstock.supply.settings import (
    DocumentConfig,
    LoaderRun,
    check_state,
    with_checksum,
)
from penstock.supply.sources.examples import Example, ExampleSource, Seen, show_log
from penstock.supply.sources.open import (
    check_tokenizers,
    mix_sources,
    open_sources,
    refuse_repeats,
)

try:
    import torch
    from torch.utils.data import IterableDataset, get_worker_info
except ImportError:
    raise BadConfig(
        "torch is not installed, and StreamingMixedShardDataset is a dataset of torch's",
        do='pip install "penstock[torch]", or use PretrainDataLoader, which needs no torch',
    ) from None

STATE_FORMAT: Final = 3
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

    augmentation_factor: int | None = None
    """How many examples `augment` must give for each, if that is to be checked."""

    def __init__(
        self,
        data_dirs: Sequence[str],
        shard_ranges: Sequence[str],
        pool_size: int = 2_000_000,
        refill_threshold: int | None = None,
        max_memory_gb: float = 5.0,
        enable_augmentation: bool = True,
        max_examples_unaugmented: int | None = None,
        verbose: bool = False,
        random_seed: int | None = None,
        *,
        augment: Augment | None = None,
        batch_size: int | None = None,
        streaming: bool = True,
        plan: PlanConfig | None = None,
        documents: DocumentConfig | None = None,
        run: LoaderRun | None = None,
    ) -> None:
        """`refill_threshold` is three quarters of `pool_size` unless it is given: 1,500,000 of
        2,000,000. `batch_size` is that of the DataLoader: a worker takes blocks of so many. All
        ranks of this host with their workers may add `max_memory_gb`, beside what they map. With
        `plan=PlanConfig(last="drop")` an incomplete round at the end is left out, so that every
        rank and worker has as many examples.
        Shards of buckets are kept in the run's `cache_dir`; decoded ones that processes share lie
        there too, or in the temporary directory."""
        super().__init__()
        self.run = config_of("run", run, LoaderRun)
        documents = config_of("documents", documents, DocumentConfig)
        plan = config_of("plan", plan, PlanConfig)
        self.rank, self.world_size = self.run.found_rank()
        self.verbose = verbose
        self.enable_augmentation = enable_augmentation
        self.max_examples_unaugmented = max_examples_unaugmented
        self.batch_size = batch_size
        self.max_memory_gb = max_memory_gb
        self._augment = augment
        self._check_options()
        self._seed_is_drawn = random_seed is None
        seed = secrets.randbits(63) if random_seed is None else random_seed
        self.random_seed = whole("random_seed", seed, 0, MOST_SEED)
        """The seed of the order: the one given, or the one drawn."""
        if self.world_size > 1 and self._seed_is_drawn:
            raise BadConfig(
                f"there is no random_seed for {self.world_size} ranks",
                why="each would draw its own, and they would not share one stream",
                do="give all ranks the same random_seed",
            )
        if plan.lanes > 1:
            raise BadConfig(
                f"lanes is {plan.lanes} for StreamingMixedShardDataset",
                why="its workers take examples from one stream",
                do="give lanes=1, or train with PretrainDataLoader",
            )
        self._plan = dataclasses.replace(
            plan, seq_len=1, pack="pad", buffer_pieces=1, pool_size=pool_size,
            refill_threshold=refill_threshold, pool_tokens=max(1, whole("pool_size", pool_size)),
        )  # fmt: skip
        self._discover_shards(
            data_dirs,
            dataclasses.replace(documents, shard_ranges=shard_ranges, text_field=""),
            streaming=streaming,
        )  # fmt: skip
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
        self._has_own_place = bool(self.run.folder)
        self._files = self._shared_files()
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
        gigabytes("max_memory_gb", self.max_memory_gb)

    def _discover_shards(
        self, data_dirs: Sequence[str], documents: DocumentConfig, *, streaming: bool
    ) -> None:
        """Open the directories, each with its range of shards, and weigh them."""
        paths = [data_dirs] if isinstance(data_dirs, str) else [str(path) for path in data_dirs]
        for path in paths:
            if os.path.isfile(path) and not path.endswith(".parquet"):
                raise BadConfig(
                    f"{path} is a file, not a directory of shards",
                    do=f"make shards of it: penstock shard --input {path} --parquet_dir …",
                )
        shards = open_sources(
            paths, documents, self.run, streaming=streaming, cache=self.run.cache()
        )
        refuse_repeats(shards)
        columns = documents.columns
        if columns is None or "tokens" in columns:
            check_tokenizers(shards)
        seen: Seen = {}
        self.sources = [ExampleSource(one, columns, seen) for one in shards]
        self._mix = mix_sources(shards, self._plan, (self.batch_size or 1) * self.world_size)
        self._chooses_ramp = self._plan.ramp is None
        about = json.dumps([self._settings(), [source.url for source in shards]], sort_keys=True)
        self._use_ramp(choose_ramp(self._plan, shards, self.run, about))

    def _shared_files(self) -> SharedFiles:
        """Where processes share decoded shards: the ranks of a launch on this host do too."""
        place = self.run.folder or tempfile.gettempdir()
        try:
            name = launch_name(self.run.run_dir, "examples") if self.world_size > 1 else ""
        except OSError:
            name = ""
        return SharedFiles(name or secrets.token_hex(16), place)

    def _use_ramp(self, ramp: bool) -> None:
        self._plan = dataclasses.replace(self._plan, ramp=ramp)
        self._mix = dataclasses.replace(self._mix, config=self._plan)

    def __repr__(self) -> str:
        names = ", ".join(source.name for source in self.sources)
        return (
            f"StreamingMixedShardDataset({names}; pool_size {self._plan.pool_size:,}, "
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
        self._check_options()
        info = get_worker_info()
        if self._process != os.getpid():  # a fork: clients and their threads stayed behind
            self._process, self._rss_at_start = os.getpid(), 0
            for source in self.sources:
                source.reopen()
        if not self._rss_at_start:
            self._rss_at_start = _own_memory()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        is_shared = workers * self.world_size > 1 or self._has_own_place
        for source in self.sources:
            source.shared = self._files if is_shared else None
        state = self._take_loaded()
        run = self._new_run(worker, workers)
        if state is not None:
            run.restore(state)
        run.origin = run.engine.state()
        return run

    def _new_run(self, worker: int = 0, workers: int = 1) -> Run:
        """A run at the first example of the epoch."""
        seed = mix_key(self.random_seed, self.epoch) if self.epoch else self.random_seed
        engine = Engine(
            self.sources,
            dataclasses.replace(self._mix, config=dataclasses.replace(self._plan, seed=seed)),
            lambda: ExampleWindow(self.sources, self._memory() // workers, self._monitor_memory),
            max_rows=self.max_examples_unaugmented,
        )
        unit = (self.batch_size or 1) * self.world_size
        return Run(engine, Share(unit, self.rank, self.world_size, worker, workers))

    def _take_loaded(self) -> State | None:
        """The loaded state, for the first pass after it was loaded, if its epoch is still wanted;
        a worker's own before that of all."""
        info, passes = get_worker_info(), self._passes
        if self._loads != passes.loads:  # by the main process, while this worker was there
            self._loaded, self._loads = passes.loaded(), passes.loads
            self.random_seed = self._loaded["random_seed"]
            self._use_ramp(recorded_ramp(self._loaded))
        is_first = passes.begin(info.id if info else -1, info.seed - info.id if info else -1)
        own, self._own = self._own, None
        state = own or (self._loaded if is_first else None)
        if state is not None and state["epoch"] != self.epoch:
            state = None
        began = Began.FROM_START if state is None else Began.FROM_LOADED
        passes.note((Began.FROM_OWN if own else began) if info else Began.HERE)
        return state

    def _examples(self, run: Run) -> Iterator[Example]:
        with contextlib.closing(run.engine):
            while len((block := self._refill_pool(run)).fills):
                end = run.engine.row + len(block.fills)
                own = run.share.own(len(block.fills))[run.taken :]
                for first in range(0, len(own), PICKED):
                    lines = block.segments[own[first : first + PICKED]]
                    rows = block.first + own[first : first + PICKED]
                    picked = self._load_shards_proportionally(run, lines)
                    for row, line, example in zip(rows.tolist(), lines, picked, strict=True):
                        yield from self._give(run, row, line, example)
                # what is left of the last round is of others
                run.engine.advance(end - run.engine.row)
                run.taken = 0

    def _refill_pool(self, run: Run) -> Rows:
        """The next examples of the stream, over all ranks and workers; none at the end. The plan
        refills its pools where they run low, and the engine brings the shards that they take in."""
        engine, each = run.engine, run.share.round
        try:
            rows = engine.ahead(each, BLOCK_ROWS)
        except MemoryError as error:
            raise self._too_little(run, str(error)) from None
        if self.verbose and engine.cycles != run.cycles and run.share.worker == 0:
            run.cycles = engine.cycles
            self._tell(run)
        if self._plan.last == "drop" and 0 < len(rows.fills) < each:
            _log.info("%d examples at the end fill no round, and are left out", len(rows.fills))
            engine.count_end(rows, 0)
            engine.advance(len(rows.fills))
            rows = rows.part(0, 0)
        return rows

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

    def _tell(self, run: Run) -> None:
        """Where the examples since the last refill came from."""
        drawn = run.drawn()
        new, run.told = drawn - run.told, drawn
        total, weight = max(1, int(new.sum())), sum(self._mix.weights)
        wide = max(len(source.name) for source in self.sources)
        shares = [
            f"\n  {source.name:{wide}}  {count:9,} examples, {count / total:5.1%}, "
            f"its weight {share / weight:5.1%}"
            for source, count, share in zip(
                self.sources, new.tolist(), self._mix.weights, strict=True
            )
        ]
        window = run.engine.window
        _log.info(
            "refill %d at example %s, since the last:%s\n  %d shards in the pool, %.0f MB decoded, "
            "process %.0f MB; so far %.1f s to read, %.1f s to decode, %.1f s waited for it",
            run.cycles, f"{run.engine.row:,}", "".join(shares), len(run.engine.pooled),
            window.held_bytes / 1e6, psutil.Process().memory_info().rss / 1e6,
            sum(source.read_s for source in self.sources),
            sum(source.decode_s for source in self.sources), window.waited_s,
        )  # fmt: skip

    def _load_shards_proportionally(self, run: Run, lines: Any) -> list[Example]:
        """The examples of lines of the plan, out of the shards that it has taken in by weight."""
        found: list[Example] = [{}] * len(lines)
        keys = lines[:, 1].astype(np.int64) << 32 | lines[:, 3]
        order = np.argsort(keys, kind="stable")
        starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
        for mine in np.split(order, starts[1:]):
            _, source, _, shard, _, _, _ = lines[mine[0]].tolist()
            decoded = run.engine.window.bring((source, shard))
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

    def _memory(self) -> int:
        """How many bytes this rank may hold: the ranks of a host share what was given."""
        run = dataclasses.replace(
            self.run, rank=self.rank, world_size=self.world_size, max_memory_gb=self.max_memory_gb
        )
        return run.memory()()

    def _monitor_memory(self, held_bytes: int) -> str:
        """What is wrong with the memory of the workers of this rank; empty if nothing is."""
        max_bytes, info = self._memory(), get_worker_info()
        total, grown = self._count_memory(held_bytes)
        if total > max_bytes:  # perhaps it is only memory that the allocator has not given back
            pa.default_memory_pool().release_unused()
            total, grown = self._count_memory(held_bytes)
        if total <= max_bytes:
            return ""
        others = f"; all {info.num_workers} workers together {total / 1e9:.3f} GB" if info else ""
        return (
            f"the examples of the window take {held_bytes / 1e9:.3f} GB and the process has grown "
            f"by {grown / 1e9:.3f} GB{others}; {max_bytes / 1e9:.3f} GB are allowed"
        )

    def _count_memory(self, held_bytes: int) -> tuple[int, int]:
        """What the workers of this rank take together, and by how much this one has grown."""
        info, grown = get_worker_info(), _own_memory() - self._rss_at_start
        used = max(held_bytes, grown)
        if info is None:
            return used, grown
        who = info.seed - info.id
        return self._passes.count_memory(info.id, info.num_workers, who, used), grown

    def _too_little(self, run: Run, why: str) -> MemoryLimit:
        return MemoryLimit(
            "there is no memory for the next examples",
            where=f"example {run.engine.row} of the stream, {run.engine.window.held} shards held, "
            f"{run.engine.window.held_bytes / 1e9:.3f} GB",
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
        return self._state(run or self._new_run())

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
        begun = self._new_run()
        if loaded is not None:
            begun.restore(loaded)
        if run is not None:
            begun.engine.restore(run.origin)
        each = begun.share.round
        begun.engine.skip(batches * each, each)
        return self._state(begun)

    def _state(self, run: Run) -> State:
        return with_checksum(
            {
                "format": STATE_FORMAT,
                "random_seed": self.random_seed,
                "epoch": self.epoch,
                "config": self._settings(),
                "sources": [source.identity() for source in self.sources],
                **run.state(),
            }
        )

    def _settings(self) -> dict[str, Any]:
        """All that decides the order, beside the data."""
        settings = {**self._mix.settings(), "data_dirs": len(self.sources)}
        del settings["sources"], settings["seed"]
        return {**settings, "random_seed": self.random_seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration goes on where the state was taken."""
        mine = self._settings()
        if self._seed_is_drawn:
            del mine["random_seed"]
        if self._chooses_ramp:
            mine["ramp"] = recorded_ramp(state)
        check_state(
            state, STATE_FORMAT, mine, self.sources, who="dataset",
            do="give the dataset what the state has, or start anew without the state",
        )  # fmt: skip
        self.random_seed = state["random_seed"]
        self._use_ramp(bool(mine["ramp"]))
        self._run = None
        if get_worker_info() is not None:  # what torchdata does: every worker has its own
            self._own = dict(state)
            self._passes.set_epoch(state["epoch"])
            return
        self._loaded = dict(state)
        self._passes.load(state)
        self._loads = self._passes.loads


def _own_memory() -> int:
    """What this process takes, without what is mapped or shared, where the system tells it."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - getattr(memory, "shared", 0))


def _raising(error: PenstockError) -> Iterator[Example]:
    """Fails at the first example: a worker that persists and fails before that just exits."""
    raise error
    yield
