"""Pretraining: rows of tokens from one dataset or a mixture, live or finished.

In:    one or more datasets, a tokenizer, how to mix and pack
Out:   `TrainingBatch` after batch; a state of a few kilobytes that resumes exactly
Keeps: what the engine keeps: the state moves with the batch that was handed out
Never: shares anything between ranks but the logs; guesses that a dataset has ended
"""

import abc
import contextlib
import inspect
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from penstock.errors import BadConfig
from penstock.options import config_of, whole
from penstock.stream.plan import PlanConfig, Rows
from penstock.supply.agree import Agreement, choose_ramp, recorded_ramp
from penstock.supply.balance import next_rows, pick_rows
from penstock.supply.batch import RowBatch, Stack, TrainingBatch
from penstock.supply.engine import Engine, Share
from penstock.supply.explain import Span, explain_rows
from penstock.supply.fetch import Fetch
from penstock.supply.ledger import Ledger
from penstock.supply.release import needed_from, reader_name, release
from penstock.supply.settings import (
    UNSET,
    DocumentConfig,
    LoaderRun,
    check_checksum,
    check_state,
    merged_plan,
    with_checksum,
)
from penstock.supply.sources.open import (
    Paths,
    Recipe,
    check_tokenizers,
    find_boundaries,
    listed_weights,
    mix_sources,
    open_sources,
)
from penstock.tokenize.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_advised: set[frozenset[str]] = set()
"""Data of which this process was told what lanes would save."""

STATE_FORMAT: Final = 4
"""Another one wherever the same plan would give other rows: 4 since rows end with a pair."""
BATCH_SIZE: Final = 16
MOST_BATCH_TOKENS: Final = 1 << 36
MOST_BATCHES: Final = 1 << 40
"""More than any data has."""
STACK_ROWS: Final = 512
"""Rows filled at once."""
SPREAD: Final = 0.618034
"""The golden ratio: ranks that follow each other, as on a host, begin far apart, however many there
are."""
TELL_S: Final = 10.0
"""How often the ledger is among the events."""


class DataLoader(abc.ABC):
    """What every loader does. A custom one has the first four methods; to be resumed, it has the
    two that follow."""

    step = 0
    """Batches handed out."""
    run: LoaderRun
    rank: int
    world_size: int
    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        found = super().__new__(cls)
        found._made_of = arguments, options
        return found

    def __reduce__(self) -> Any:
        """A copy in another process, such as a worker of torch's DataLoader, is made as this one
        was, and goes to where it stands. It tells nobody of events and holds no shards back."""
        arguments, options = self._made_of
        takes_run = "run" in inspect.signature(type(self).__init__).parameters
        if takes_run and isinstance(getattr(self, "run", None), LoaderRun):
            run = replace(
                self.run, rank=self.rank, world_size=self.world_size, events=None, reader=None
            )
            options = {**options, "run": run}
        state = None
        with contextlib.suppress(NotImplementedError):
            state = self.state_dict()
        return _made_again, (type(self), arguments, options, state)

    @abc.abstractmethod
    def get_batch(self, batch_size: int) -> TrainingBatch:
        """The next `batch_size` rows of this rank. Raises StopIteration after the last."""

    @abc.abstractmethod
    def get_iterator(self) -> Iterator[TrainingBatch]:
        """Batches from where the loader stands to the end; after the end, the next epoch's."""

    @abc.abstractmethod
    def get_num_batches(self) -> int:
        """How many batches one iteration over the loader gives, from the first on, as far as the
        data is known; a `NumBatches` says whether it is `final`."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Go back to the first batch."""

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Where the loader stands, as JSON; with `step`, where it stood after so many batches: what
        a trainer needs that fetches ahead of what it trains."""
        raise _has_no(self, "state_dict")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state was taken."""
        raise _has_no(self, "load_state_dict")

    def close(self) -> None:  # noqa: B027  (a custom loader may have nothing to let go of)
        """Let go of memory and threads."""

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self.get_iterator()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _made_again(
    kind: type[DataLoader], arguments: Sequence[Any], options: Mapping[str, Any], state: Any
) -> DataLoader:
    made = kind(*arguments, **options)
    if state is not None:
        made.load_state_dict(state)
    return made


def _has_no(loader: DataLoader, method: str) -> NotImplementedError:
    return NotImplementedError(
        f"{type(loader).__name__} has no {method}: it cannot be resumed until it has one"
    )


def no_more(loader: DataLoader, epoch: int) -> StopIteration:
    """What `get_batch` raises after the last batch. In a generator of others it becomes a
    RuntimeError with this as its cause: Python lets no generator end by it."""
    return StopIteration(
        f"no batch is left: epoch {epoch} has ended, {loader.step:,} batches were handed out. "
        "Iterate over the loader for the next epoch, or call reset() for the first batch"
    )


class NumBatches(int):
    """A number of batches that also says whether it is `final`."""

    final: bool

    def __new__(cls, count: int, *, final: bool) -> "NumBatches":
        found = super().__new__(cls, count)
        found.final = final
        return found

    def __repr__(self) -> str:
        return f"{int(self)}{'' if self.final else ' so far'}"


class EngineLoader(DataLoader):
    """A loader over an engine: where it stands, its states, and errors that take nothing.

    A face makes `_engine`, and calls `_note` when it has.
    """

    _format: ClassVar[int]
    """Of its states."""
    _engine: Engine[Any]
    is_over = False
    """Whether it was read to its end: iterated again, it begins the next epoch."""
    _closed = False
    _given = 0
    """Batches handed out since a state was loaded."""

    @abc.abstractmethod
    def _settings(self) -> dict[str, Any]:
        """All that decides what comes in which batch, beside the data."""

    def _expected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that a state must have."""
        return self._settings()

    def _adopt(self, state: Mapping[str, Any]) -> None:
        """Take over what a state has chosen, before the engine goes to where it was taken."""

    def _also(self, step: int | None) -> dict[str, Any]:
        """What a state tells beside what is needed to resume."""
        return {}

    def _note(self, *, anew: bool = False) -> None:
        """Remember where the loader stands; `anew`, and nothing before it."""
        self._engine.note(self.step, is_over=self.is_over, anew=anew)

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """An error or an interrupt takes nothing: the state is that of the batch before."""
        if self._closed:
            raise BadConfig("the loader is closed", do="make a new one")
        engine = self._engine
        with engine.own():
            before, step = engine.mark(is_over=self.is_over), self.step
            given = self._given
            try:
                yield
            except BaseException:
                self.step, self.is_over = step, before.is_over
                engine.undo(before, step)
                self._put_back(given)
                raise

    def _put_back(self, given: int) -> None:
        """Forget what was made for a batch that failed; `given` is what it was before."""
        self._given = given

    def reset(self) -> None:
        with self._engine.own():
            self._engine.window.keep(set())
            self._engine.begin()
            self.step, self.is_over = 0, False
            self._note(anew=True)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        with self._engine.own():
            mark = self._engine.mark(is_over=self.is_over)
            if step is not None:
                mark = self._engine.stood(whole("step", step, 0))
            state = {
                "format": self._format,
                "step": self.step if step is None else step,
                "over": mark.is_over,
                "config": self._settings(),
                "sources": [source.identity() for source in self._engine.sources],
                **self._engine.state(mark),
                **self._also(step),
            }
        return with_checksum(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        sources = self._engine.sources
        addresses = [source.url for source in sources]
        check_state(
            state, self._format, self._expected(state), sources,
            do="give the loader what the state has, or start anew with reset()",
        )  # fmt: skip
        with self._engine.own():
            if addresses != [source.url for source in sources]:  # another generation
                self._engine.window.keep(set())
            self._adopt(state)
            self._engine.restore(state)
            self.step, self.is_over = state["step"], state["over"]
            self._note(anew=True)

    def close(self) -> None:
        self._engine.close()
        self._closed = True


def all_rows(batch_size: int | None, global_batch_size: int | None, world_size: int) -> int:
    """Rows of a batch over all ranks: of each rank `batch_size`, or of all `global_batch_size`.

    >>> all_rows(4, None, 2), all_rows(None, 6, 4), all_rows(None, None, 2)
    (8, 6, 32)
    """
    if batch_size is None and global_batch_size is None:
        batch_size = BATCH_SIZE
    each = None if batch_size is None else whole("batch_size", batch_size, 1) * world_size
    if global_batch_size is None:
        assert each is not None
        return each
    found = whole("global_batch_size", global_batch_size, 1)
    if each not in (None, found):
        raise BadConfig(
            f"batch_size is {batch_size} and global_batch_size is {found}",
            why=f"{world_size} ranks with {batch_size} rows each have {each}",
            do="give one of the two; global_batch_size holds for any number of ranks",
        )
    if found < world_size:
        raise BadConfig(
            f"global_batch_size is {found} for {world_size} ranks",
            do="give at least one row to each rank",
        )
    return found


class RowLoader(EngineLoader):
    """Rows of a plan as batches: what all loaders over shards have in common.

    A face says how many tokens a row has, what raw files become, what stands around a document,
    and which tokens are trained.
    """

    _format = STATE_FORMAT
    _engine: Engine[Fetch]

    can_skip = True
    """Whether batches can be passed over without being made."""
    can_lane = True
    """Whether the plan may have lanes."""

    def __init__(
        self,
        path: Paths,
        tokenizer: Any,
        streaming: bool,
        config: PlanConfig,
        *,
        batch_size: int | None,
        global_batch_size: int | None,
        documents: DocumentConfig | None,
        run: LoaderRun | None,
        recipe: Recipe | None = None,
    ) -> None:
        """`recipe` makes a dataset of raw files."""
        self.run = config_of("run", run, LoaderRun)
        documents = config_of("documents", documents, DocumentConfig)
        self.rank, self.world_size = self.run.found_rank()
        sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
        for name, size in sizes.items():
            if config.batch_tokens is not None and size is not None:
                raise BadConfig(
                    f"{name} beside batch_tokens",
                    why="the tokens say how many rows a batch has",
                    do=f"leave out {name}, or batch_tokens",
                )
        self.global_batch_size = all_rows(batch_size, global_batch_size, self.world_size)
        self.batch_size = -(-self.global_batch_size // self.world_size)
        """Rows of this rank's part of a batch, at most."""
        self.config = config
        if self.global_batch_size * self.config.seq_len > MOST_BATCH_TOKENS:
            raise BadConfig(
                f"a batch has {self.global_batch_size:,} rows of {self.config.seq_len:,} tokens",
                do=f"choose batch_size and chunk_size below {MOST_BATCH_TOKENS:,} tokens together",
            )
        # engines are made when the first text comes: from token files none ever does
        self.tokenizer = None if tokenizer is None else Tokenizer.load(tokenizer, ready=False)
        self._noise = documents.noise(self.tokenizer, self.config.seed)
        if config.batch_tokens is not None and config.batch_tokens < config.seq_len:
            raise BadConfig(
                f"batch_tokens is {config.batch_tokens:,}, and a row has up to {config.seq_len:,}",
                do="let a rank have one row at least",
            )
        if self._noise is not None and config.batch_tokens is not None:
            raise BadConfig(
                "batch_tokens with an objective that hides tokens",
                why="the noise of a row is that of its place in a batch of a fixed size",
                do="give batch_size",
            )
        self._ban = list(documents.ban)
        self._blocks = documents.attention_mask == "block"
        self._bos, self._eos, pad = find_boundaries(self.tokenizer, documents.bos, documents.eos)
        self.sources = open_sources(
            path, documents, self.run, tokenizer=self.tokenizer, streaming=streaming,
            seq_len=self.config.seq_len, extra_tokens=int(self._bos >= 0) + int(self._eos >= 0),
            cache=self.run.cache(), recipe=recipe, weighted=self.config.weights is not None,
        )  # fmt: skip
        check_tokenizers(self.sources)
        self._chooses_ramp = self.config.ramp is None
        self._mix = mix_sources(self.sources, self.config, self.global_batch_size)
        self._use_ramp(choose_ramp(self.config, self.sources, self.run, self._about()))
        self._reader = reader_name(self.run.reader, self.run.run_dir)
        if self.run.reader is not None and self.rank == 0:
            release(self.sources, [0] * len(self.sources), self._reader, begins=True)
        agreement = Agreement(self.config.behind, self.run.run_dir, self.world_size)
        agreement.bind(self._about())
        self._pad = pad
        self._engine = Engine(
            self.sources, self._mix, self._new_window, agreement=agreement, share=self._laned()
        )
        self._events = self.run.open_events(self.rank)
        self._tell_at = 0.0
        self._stack: Stack | None = None
        self._stack_rows = STACK_ROWS
        self._counted: tuple[list[int], list[int]] = [], []
        """The rows of each round, over so many shards of each source."""
        self._is_advised = self.config.lanes > 1
        self._epoch_began = 0
        self._given = 0
        """Of these, since a state was loaded."""
        self._note()

    def _laned(self) -> Share | None:
        """Which rows of a batch are this rank's, where it needs only the lanes of these."""
        lanes, rows = self.config.lanes, self.global_batch_size
        if lanes == 1:
            return None
        if rows < lanes:
            raise BadConfig(
                f"lanes is {lanes}, and a batch has {rows} rows over all ranks",
                why="every lane has a row of every batch",
                do=f"choose lanes of {rows} at most, or a larger global_batch_size",
            )
        return self._share(rows)

    def _advise_lanes(self) -> None:
        """Tell a run on several hosts, once, what each of them would not have to read."""
        self._is_advised = True
        hosts, about = self.run.found_hosts(), frozenset(source.url for source in self.sources)
        can_have = self.can_lane and self.config.last == "pad" and not self.config.batch_tokens
        if hosts == 1 or self.rank or not can_have or about in _advised:
            return
        shards = [range(source.num_known) for source in self.sources]
        stored = sum(
            source.stored_bytes(shard)
            for source, known in zip(self.sources, shards, strict=True)
            for shard in known
        )
        rows, ranks = self.global_batch_size, self.world_size
        most = min(rows, *map(len, shards))
        # lanes of as many rows each end together
        even = (lanes for lanes in range(ranks, most + 1, ranks) if rows % lanes == 0)
        lanes = max(even, default=most // ranks * ranks)
        if lanes:
            _advised.add(about)
            _log.warning(
                "each of %d hosts reads all %.1f GB of the data; with PlanConfig(lanes=%d) each "
                "would read %.1f GB (docs/scale.md)",
                hosts, stored / 1e9, lanes, stored / hosts / 1e9,
            )  # fmt: skip

    @property
    def _knows_all(self) -> bool:
        """Whether this rank plans the rows of all ranks."""
        return self.config.lanes == 1 or self.world_size == 1

    @property
    def _is_within(self) -> bool:
        """Whether it is not known to stand before the first batch of its epoch."""
        return self.is_over or self.step != self._epoch_began

    def _note(self, *, anew: bool = False) -> None:
        self._given = 0 if anew else self._given
        super()._note(anew=anew)

    @property
    def shares(self) -> list[float]:
        """The weights of the sources with which the run begins."""
        return list(self._mix.weights)

    @property
    def passes(self) -> list[int | None]:
        """The passes over each source in an epoch; None for no end."""
        return list(self._mix.epochs)

    @property
    def epoch(self) -> int:
        """How many epochs were read to their end before this one."""
        return self._engine.round

    def _new_window(self) -> Fetch:
        """What holds shards and fills rows."""
        return Fetch(
            list(self.sources), bos=self._bos, eos=self._eos, pad=self._pad,
            turn=self.rank * SPREAD % 1,
            max_bytes=self.run.memory(),
        )  # fmt: skip

    def _use_ramp(self, ramp: bool) -> None:
        self.config = replace(self.config, ramp=ramp)
        self._mix = replace(self._mix, config=self.config)

    def __iter__(self) -> Iterator[RowBatch]:
        return self.get_iterator()

    def get_iterator(self, *, together: bool = True, goes_on: bool = False) -> Iterator[RowBatch]:
        """Batches to the end. They are filled several `together`, unless others come between. One
        that `goes_on` with an epoch ends with it, also if nothing is left of it."""
        self._stack_rows = STACK_ROWS if together else 0
        if self.is_over:
            self.begin_epoch()
        return self._batches(0 if goes_on else self._given)

    def _batches(self, given: int) -> Iterator[RowBatch]:
        """Batches to the end; `given` were handed out when this was asked for."""
        count = self.global_batch_size
        batch = self._next(count)
        if batch is None and 0 < given == self._given:
            # who counts batches does not ask for one after the last: this is the next epoch
            self.begin_epoch()
            batch = self._next(count)
        while batch is not None:
            yield batch
            batch = self._next(count)

    def begin_epoch(self) -> None:
        """After the last batch: the next epoch."""
        with self._engine.own():
            self._engine.begin_round()
            self.is_over, self._epoch_began = False, self.step
            self._note()

    def get_batch(self, batch_size: int) -> RowBatch:
        if self.config.batch_tokens is not None:
            raise BadConfig(
                "get_batch of a loader with batch_tokens",
                why="the tokens say how many rows a batch has",
                do="iterate over the loader, or give no batch_tokens",
            )
        count = whole("batch_size", batch_size, 1) * self.world_size
        if self.config.lanes > 1 and count != self.global_batch_size:
            raise BadConfig(
                f"get_batch of {count} rows over all ranks with {self.config.lanes} lanes",
                why="rows of a batch are dealt to lanes by their place in a batch of "
                f"{self.global_batch_size}",
                do="iterate over the loader, or give no lanes",
            )
        batch = self._next(count)
        if batch is None:
            raise no_more(self, self.epoch)
        return batch

    def _next(self, count: int) -> RowBatch | None:
        """This rank's part of the next `count` rows; None after the last."""
        if not self._is_advised:
            self._advise_lanes()
        with self.all_or_nothing():
            engine = self._engine
            if engine.settle():
                self._stack = None
            batch = self._made(count)
            events = self._events if self._knows_all else None
            if events is not None and (batch is None or time.monotonic() > self._tell_at):
                self._tell_at = time.monotonic() + TELL_S
                ledger = engine.told_ledger()
                events.emit("ledger", step=self.step, sources=ledger)
            return batch

    def _put_back(self, given: int) -> None:
        self._stack, self._given = None, given

    def _made(self, count: int) -> RowBatch | None:
        engine, stack = self._engine, self._stack
        if self.config.batch_tokens is not None:
            return self._made_to_fit(self.config.batch_tokens)
        if stack is None or stack.is_empty or stack.count != count:
            rows = engine.ahead(count, self._stack_rows)
            if len(rows.fills) < count:
                return self._last_batch(rows, count)
            self._stack = stack = self._filled(rows, self._share(count))
        batch = stack.pop(self.step)
        if self._noise is not None:
            batch = self._noised(batch, self._share(count))
        self._hand_out(count, stack.masked)
        return batch

    def _made_to_fit(self, max_tokens: int, make: bool = True) -> RowBatch | None:
        """This rank's rows of a batch of as many tokens as fit; None after the last."""
        rows, rank = next_rows(self._engine.ahead, max_tokens, self.world_size, self.run.balance)
        count = len(rows.fills)
        if not count:
            self._end()
            return None
        mine = pick_rows(rows, np.flatnonzero(rank == self.rank))
        missing = max(0, self.world_size - count)  # ranks without a row, at the very end
        if missing:
            self._engine.end_padding += missing * self.config.seq_len
        if not make:
            batch = self.padding(0, counted=0)
        elif len(mine.fills):
            stack = self._stacked(mine, rows, count, len(mine.fills), int(mine.fills.max()))
            batch = stack.pop(self.step)
        else:
            batch = self.padding(1, counted=0)
            (told,) = self._told(rows, count, self._count_trained(rows, count))
            batch.metadata |= {"step": self.step, "first_row": rows.first, "rows": count, **told}
        self._hand_out(count, self._masked(rows))
        return batch

    def _share(self, count: int) -> Share:
        return Share(count, self.rank, self.world_size)

    def _hand_out(self, rows: int, masked: npt.NDArray[np.int64] | None) -> None:
        self._engine.advance(rows, masked)
        self.step += 1
        self._given += 1
        self._note()

    def _last_batch(self, rows: Rows, count: int) -> RowBatch | None:
        """What becomes of the last rows, fewer than a batch has."""
        batch: RowBatch | None = None
        masked: npt.NDArray[np.int64] | None = None
        if self._pads(rows):
            fills = np.zeros(count, np.int32)
            fills[: len(rows.fills)] = rows.fills
            stack = self._filled(Rows(rows.first, rows.segments, fills), self._share(count))
            batch = self._noised(stack.pop(self.step), self._share(count))
            masked = stack.masked
        self._count_end(rows, count, masked)
        self._given += batch is not None
        if batch is None:
            self._end()
        return batch

    def _end(self) -> None:
        """Nothing is left of this epoch."""
        self.is_over = True
        for source in self.sources:  # the plan has looked ahead: look again
            source.check_end()

    def _filled(self, rows: Rows, share: Share) -> Stack:
        """This rank's part of batches of `share.unit` rows each."""
        return self._stacked(
            share.of(rows), rows, share.unit, share.size, self.config.seq_len
        )  # fmt: skip

    def _stacked(self, mine: Rows, rows: Rows, count: int, each: int, width: int) -> Stack:
        """`mine` of `rows`, `each` of every `count`, as batches that are `width` tokens wide."""
        ids = self._engine.window.fill(mine, 0, len(mine.fills), width)
        counts = self._count_trained(rows, count)
        return Stack(
            ids, mine, rows.first, count, each, packed=self.config.pack != "pad",
            trained=self._mark_trained(mine, width), blocks=self._blocks,
            masked=None if counts is None else counts[:, :, 1],
            about=self._told(rows, count, counts),
        )  # fmt: skip

    def _told(
        self, rows: Rows, count: int, counts: npt.NDArray[np.int64] | None
    ) -> list[dict[str, int]]:
        """What all ranks have, of every batch of `count` rows, of which so many are trained."""
        if not self._knows_all:
            return [{} for _ in range(len(rows.fills) // count)]
        tokens = rows.fills.reshape(-1, count).sum(axis=1).tolist()
        targets = _targets(rows, count, counts).tolist()
        return [{"num_tokens": a, "num_loss_tokens": b}
                for a, b in zip(tokens, targets, strict=True)]  # fmt: skip

    def _mark_trained(self, rows: Rows, width: int) -> npt.NDArray[np.bool_] | None:
        """Which tokens of rows are trained, where that is not all of them."""
        return None

    def _count_trained(self, rows: Rows, count: int) -> npt.NDArray[np.int64] | None:
        """Tokens that are trained and that are not, but for those that begin a segment, of each
        source in every batch of `count` rows; None where all of them are trained."""
        return None

    def _masked(self, rows: Rows) -> npt.NDArray[np.int64] | None:
        """Tokens of rows that are no targets by the word of their shards, by source."""
        counts = self._count_trained(rows, len(rows.fills)) if len(rows.fills) else None
        return None if counts is None else counts[0, :, 1]

    def count_targets(self, rows: Rows) -> int:
        """Labels of rows that count."""
        count = len(rows.fills)
        return int(_targets(rows, count, self._count_trained(rows, count))[0])

    def _noised(self, batch: RowBatch, share: Share) -> RowBatch:
        """The batch as the objective wants it."""
        return batch if self._noise is None else self._noise(batch, share.part[0])

    # For a mixture of loaders, which deals rows out

    @property
    def has_equal_rows(self) -> bool:
        """Whether batches are rows of one length, as they stand in the plan."""
        return self._noise is None and self.config.batch_tokens is None and self.config.lanes == 1

    def rows_ahead(self, count: int) -> Rows:
        """The next `count` rows over all ranks, fewer at the end. Nothing moves."""
        self._stack = None
        return self._engine.ahead(count) if count else Rows.none()

    def draw(self, rows: Rows, part: tuple[int, int] | None) -> RowBatch | None:
        """Hand out rows that are ahead; makes those from `part[0]` to `part[1]`, or none."""
        share = Share(len(rows.fills), rows=part)
        batch = None
        if part is not None and share.size:
            batch = self._noised(self._filled(rows, share).pop(self.step), share)
        self._hand_out(len(rows.fills), self._masked(rows))
        return batch

    def padding(self, rows: int, *, counted: int) -> RowBatch:
        """Rows without a token, of which the ledger counts those of all ranks."""
        self._engine.end_padding += counted * self.config.seq_len
        ids = np.full((rows, self.config.seq_len), max(0, self._pad), np.int32)
        return RowBatch(
            ids, Rows.none().segments, np.zeros(rows, np.int32), packed=self.config.pack != "pad",
            metadata={}, blocks=self._blocks,
        )  # fmt: skip

    def end_epoch(self, dropped: Rows | None = None) -> None:
        """Nothing more is asked for in this epoch; rows that are ahead are counted as skipped."""
        if dropped is not None and len(dropped.fills):
            self._engine.count_end(dropped, 0)
            self._engine.advance(len(dropped.fills))
            self._note()
        self._end()

    def count_rows(self) -> NumBatches:
        """The rows of this epoch, or of the next one after its end, over all ranks, as far as the
        data is known."""
        with self._engine.own():
            final = all(source.is_closed for source in self.sources)
            known = [source.num_known for source in self.sources]
            round = self._engine.round + self.is_over
            if self._counted[0] != known or round >= len(self._counted[1]):
                # a round follows from those before it: twice as many, so that each is not the last
                self._counted = known, self._engine.count_rows(2 * round + 1)
            rows = self._counted[1][round]
            return NumBatches(rows, final=final and None not in self._mix.epochs)

    def _pads(self, rows: Rows) -> bool:
        """Whether the last rows, fewer than a batch has, are padded to one."""
        return self.config.last == "pad" and len(rows.fills) > 0

    def _count_end(self, rows: Rows, count: int, masked: npt.NDArray[np.int64] | None) -> None:
        pads = self._pads(rows)
        self._engine.count_end(rows, count if pads else 0)
        self._engine.advance(len(rows.fills), masked)
        self.step += pads
        self._note()

    def get_num_batches(self) -> NumBatches:
        """How many batches this iteration over the loader gives, from its first on; after its end,
        the next one. In another order other documents share rows, so epochs differ by a few.

        The plan is counted, so that it is exact for sealed data; text of which nobody has counted
        the tokens is tokenised for it. Of data that grows it is what the shards known now give;
        of passes without end, what one pass gives. Neither is `final`.
        """
        rows = self.count_rows()
        if self.config.batch_tokens is not None:  # the plan was counted in rows: an estimate
            each = max(1, self.config.batch_tokens // self.config.seq_len) * self.world_size
            return NumBatches(-(-rows // each), final=False)
        whole_ones, rest = divmod(rows, self.global_batch_size)
        pads = rest > 0 and self.config.last == "pad"
        return NumBatches(whole_ones + pads, final=rows.final)

    def reset(self) -> None:
        with self._engine.own():
            super().reset()
            self._stack, self._epoch_began = None, 0

    def go_to_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch, without reading what comes before it."""
        if whole("epoch", epoch, 0) == self.epoch + 1 and self.is_over:
            return  # the next iteration begins it
        if epoch <= self.epoch and (epoch < self.epoch or self._is_within):
            self.reset()
        while self.epoch < epoch:
            self.skip(MOST_BATCHES)
            self.begin_epoch()

    def change_weights(self, weights: Mapping[str, float] | Sequence[float]) -> None:
        """From the next batch on other weights hold; the state remembers it. Every rank must do
        the same at the same step."""
        shares = listed_weights(weights, self._mix.names)
        with self._engine.own():
            self._engine.change_weights(shares)
            self._stack = None
            self._note(anew=True)

    def _also(self, step: int | None) -> dict[str, Any]:
        return {"ledger": self._engine.told_ledger() if step is None else []}

    def _about(self) -> str:
        """What this run is: its settings, and the data that it began with."""
        sources = [source.identity().get("dataset", source.url) for source in self.sources]
        return json.dumps([self._settings(), sources], sort_keys=True)

    def _settings(self) -> dict[str, Any]:
        lanes, rows = self.config.lanes, self.global_batch_size
        return {
            **self._mix.settings(),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.fingerprint,
            "bos": self._bos,
            "eos": self._eos,
            "ban": self._ban,
            **({} if lanes == 1 else {"global_batch_size": rows}),
            **({"dealt": "by rows"} if rows % lanes else {}),  # other lanes than states before had
            **({} if self._noise is None else {"objective": self._noise.settings()}),
        }

    def _expected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        ramp = recorded_ramp(state) if self._chooses_ramp else self.config.ramp
        return {**self._settings(), "ramp": ramp}

    def _adopt(self, state: Mapping[str, Any]) -> None:
        ramp = bool(state["config"]["ramp"])
        if ramp != self.config.ramp:  # the choice of the run that began it
            self._use_ramp(ramp)
            self._engine.mix = self._mix
            self._engine.begin()
        self._stack = None
        self._epoch_began = 0 if state["step"] == 0 else -1

    def release(self, state: Mapping[str, Any], reader: str | None = None) -> None:
        """Say that a checkpoint with this state is safe: `penstock pull --max_disk` may remove the
        shards that no resume from it will ask for. `reader` is the loader's own by default."""
        check_checksum(state)
        if self.rank == 0:
            limits = [
                None if limit is None else limit * (state["round"] + 1)
                for limit in self._mix.epochs
            ]
            needed = [
                needed_from(saved["plan"], limits, self.config.behind)
                for saved in state.get("lanes", [state])
            ]
            release(
                self.sources,
                self._engine.first_shards(needed),
                self._reader if reader is None else reader,
            )

    def explain(self, batch: RowBatch) -> list[Span]:
        """Where every token of a batch of this loader comes from."""
        return self._explain(batch.segments)

    def explain_next(self) -> list[Span] | None:
        """The same of the next batch, over all ranks, without making it; None after the last."""
        rows = self.peek()
        if len(rows.fills) < self.global_batch_size and not self._pads(rows):
            return None
        return self._explain(rows.segments)

    def peek(self, batches: int = 1) -> Rows:
        """The rows of the next batches, over all ranks, without making them; fewer at the end."""
        if self.config.batch_tokens is not None:
            raise BadConfig("explain_next with batch_tokens", do="explain the batch itself")
        with self._engine.own():
            return self._engine.peek(whole("batches", batches, 1) * self.global_batch_size)

    def weights_at(self, row: int) -> list[float]:
        """The shares of the sources that hold for a row of the stream, in their order."""
        shares = self._engine.weights_at(row)
        return [share / sum(shares) for share in shares]

    @property
    def around(self) -> tuple[int, int]:
        """The tokens that stand before and after a document; -1 for none."""
        return self._bos, self._eos

    def _explain(self, segments: np.ndarray[Any, np.dtype[np.int32]]) -> list[Span]:
        return explain_rows(segments, self.sources, self.tokenizer, lead=int(self._bos >= 0))

    def skip(self, batches: int, *, bring: bool = False) -> None:
        """Move on by so many batches, or to the end, without reading their tokens. With `bring`
        their shards are brought, for batches that follow."""
        if not whole("batches", batches, 0):
            return
        if self.config.batch_tokens is not None:
            for _ in range(batches):
                with self.all_or_nothing():
                    if self._made_to_fit(self.config.batch_tokens, make=False) is None:
                        return
            return
        each = self.global_batch_size
        with self.all_or_nothing():
            engine, wanted = self._engine, batches * each
            skipped = engine.skip(wanted, each, bring=bring, masked=self._masked)
            self.step += skipped // each
            self._stack = None
            if skipped < wanted:
                rows = engine.ahead(each)
                self._count_end(rows, each, self._masked(rows) if self._pads(rows) else None)
            self._note()

    def ledger(self) -> list[Ledger]:
        """What became of every token read so far, by source."""
        with self._engine.own():
            return self._engine.ledger()


def _targets(rows: Rows, count: int, counts: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    """Labels that count in every batch of `count` rows: those of `counts`, or all but those that
    begin a segment."""
    found: npt.NDArray[np.int64]
    if counts is not None:
        found = counts[:, :, 0].sum(axis=1)
        return found
    tokens = rows.fills.reshape(-1, count).sum(axis=1)
    begun = np.bincount(rows.segments[:, 0] // count, minlength=len(tokens))
    found = tokens - begun
    return found


class PretrainDataLoader(RowLoader):
    """Rows of `chunk_size` tokens from one dataset or a mixture, live or finished."""

    def __init__(
        self,
        path: Paths,
        tokenizer: Any = None,
        chunk_size: int = 2048,
        streaming: bool = True,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        weights: Mapping[str, float] | Sequence[float] | None = UNSET,
        epochs: int | None = UNSET,
        seed: int = UNSET,
        pack: str = UNSET,
        plan: PlanConfig | None = None,
        documents: DocumentConfig | None = None,
        run: LoaderRun | None = None,
    ) -> None:
        """Where the rows come from and how they are made: docs/train.md.

        `batch_size` is the rows of each rank, 16 by default; or give `global_batch_size`, those of
        all ranks. `weights`, `epochs`, `seed` and `pack` may be given here or in `plan`.
        """
        config = merged_plan(plan, chunk_size, weights=weights, pack=pack, epochs=epochs, seed=seed)
        super().__init__(
            path, tokenizer, streaming, config, batch_size=batch_size,
            global_batch_size=global_batch_size, documents=documents, run=run,
        )  # fmt: skip
        for source in self.sources:
            if source.chat is not None:
                raise BadConfig(
                    "the dataset holds conversations",
                    where=source.url,
                    why="a loader of documents would train all of their tokens",
                    do="give it to ConversationDataLoader",
                )
