"""Mix loaders of different kinds: documents, conversations, rollouts, each with its own plan.

In:    loaders by name, their shares of the rows or of the tokens, other shares from some batch on
Out:   batches of rows of all of them, where they are of one length; otherwise batches in turn
Keeps: the same batches on any number of ranks and from wherever a run was stopped; every loader's
       own order; shares within a row of what was asked for, at every batch
Never: looks into a row; takes anything of a loader for a batch that is not handed out

    shares ─▶ so many rows of each ─▶ looked at ahead ─▶ all there? ─▶ drawn, filled, one batch

What a loader is owed is counted in whole numbers, so that no rank rounds otherwise than another.
"""

import contextlib
import functools
import math
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from penstock.arrays import Bools, Int64s, offsets_of
from penstock.errors import BadConfig, StateMismatch
from penstock.options import differences, number, whole
from penstock.stream.plan import Rows
from penstock.supply.batch import RowBatch, TrainingBatch, replaceable
from penstock.supply.engine import KEPT_MARKS
from penstock.supply.explain import Span
from penstock.supply.ledger import Ledger
from penstock.supply.pretrain import (
    MOST_BATCHES,
    DataLoader,
    NumBatches,
    RowLoader,
    all_rows,
    no_more,
)
from penstock.supply.settings import check_checksum, with_checksum

STATE_FORMAT: Final = 1
UNITS: Final = ("rows", "tokens")
STOPS: Final = ("all", "first")
LASTS: Final = ("pad", "drop")
ONE: Final = 1 << 32
"""A share of everything: shares are whole numbers of this."""
MOST_COUNTED: Final = 1 << 20
"""Batches that `get_num_batches` goes through at most."""

Shares = Mapping[str, float]
Mark = dict[str, Any]
_SKIPPED: Final = TrainingBatch(np.zeros((0, 0), np.int32))
"""Stands for a batch that nobody made."""


class MixedBatch(RowBatch):
    """Rows of several loaders, one loader's after the other's."""

    @replaceable
    def __init__(self, parts: Mapping[str, RowBatch], metadata: dict[str, Any]) -> None:
        """`parts` are this rank's rows of each loader, by name."""
        found = list(parts.values())
        sources = {name: about["sources"] for name, about in metadata["parts"].items()}
        before = dict(zip(sources, offsets_of([*sources.values()]).tolist(), strict=False))
        segments, row = [], 0
        for name, part in parts.items():
            mine = part.segments.copy()
            mine[:, 0] += row
            mine[:, 1] += before.get(name, 0)
            segments.append(mine)
            row += len(part.input_ids)
        super().__init__(
            np.concatenate([part.input_ids for part in found]),
            np.concatenate(segments),
            np.concatenate([part.fills for part in found]),
            packed=any(part.packed for part in found),
            metadata=metadata,
            blocks=any(part._blocks for part in found),
        )
        self.parts = dict(parts)

    @functools.cached_property
    def labels(self) -> Int64s:
        """Targets, each where its token stands: -100 for what is not trained."""
        return np.concatenate([part.labels for part in self.parts.values()])

    @functools.cached_property
    def loss_mask(self) -> Bools:
        """Which labels are trained."""
        return np.concatenate([part.loss_mask for part in self.parts.values()])


class MixedDataLoader(DataLoader):
    """Batches of several loaders, mixed by weights: docs/mixture.md."""

    def __init__(
        self,
        loaders: Mapping[str, DataLoader],
        weights: Mapping[str, float] | Sequence[float] | None = None,
        unit: str = "rows",
        schedule: Mapping[int, Mapping[str, float] | Sequence[float]] | None = None,
        stop: str = "all",
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        last: str = "pad",
    ) -> None:
        """`weights` are shares of the `unit`, by default equal ones; `schedule` has batches from
        which others hold. `stop` with the `first` loader that ends, or when `all` have: what has
        ended gives no more, and the others share what is left. Rows of a batch: `batch_size` for
        each rank, or `global_batch_size`; by default what the loaders have."""
        if not isinstance(loaders, Mapping) or not loaders:
            raise BadConfig(f"loaders is {loaders!r:.80}", do='give a dict: {"code": loader, …}')
        for given, known, told in (
            (unit, UNITS, "unit"), (stop, STOPS, "stop"), (last, LASTS, "last")
        ):  # fmt: skip
            if given not in known:
                raise BadConfig(f"{told} is {given!r}", do=f"choose from {', '.join(known)}")
        self.loaders = dict(loaders)
        self.names = [str(name) for name in loaders]
        self.unit, self.stop, self.last = unit, stop, last
        self.rank, self.world_size = self._shared_rank()
        self.can_skip = self._can_mix_rows()
        """Whether rows are mixed, and batches can be passed over without being made."""
        self.global_batch_size = self._batch_rows(batch_size, global_batch_size)
        self._weights = self._shares("weights", weights)
        if schedule is not None and not isinstance(schedule, Mapping):
            raise BadConfig(f"schedule is {schedule!r:.80}", do="give a dict: {batch: weights, …}")
        self._stages = sorted(
            (whole("a batch of schedule", batch, 0), self._shares("schedule", shares))
            for batch, shares in (schedule or {}).items()
        )
        self._lock = threading.RLock()
        self._marks: deque[Mark] = deque(maxlen=KEPT_MARKS)
        self._begin()

    def _begin(self) -> None:
        count = len(self.names)
        self.step = self._began = self._given = 0
        self.is_over = False
        """Whether it was read to its end: iterated again, it begins the next epoch."""
        self.epoch = 0
        self._owed = [0] * count
        """What each loader has given too little, of ONE for each row or token."""
        self._rows, self._tokens = [0] * count, [0] * count
        """What each has given, over all ranks."""
        self._ended = [False] * count
        """Which of them give no more in this epoch."""
        self._changed: list[int] | None = None
        """Weights that somebody has chosen on the way."""
        self._changed_at = -1
        self._marks.clear()
        self._note()

    # What was asked for

    def _shared_rank(self) -> tuple[int, int]:
        found = {}
        for name, loader in self.loaders.items():
            if not isinstance(loader, DataLoader):
                raise BadConfig(
                    f"{name!r} is {loader!r:.80}", do="give loaders of penstock or your own"
                )
            if isinstance(loader, MixedDataLoader):
                raise BadConfig(
                    f"{name!r} is a mixture itself", do="give all of its loaders to this one"
                )
            found[name] = getattr(loader, "rank", 0), getattr(loader, "world_size", 1)
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name}: {rank} of {world}" for name, (rank, world) in found.items())
            raise BadConfig("the loaders are of different ranks", why=told, do="give all the same")
        if len(set(map(id, self.loaders.values()))) < len(self.loaders):
            raise BadConfig("one loader has two names", do="make a loader for each")
        return next(iter(found.values()))

    def _can_mix_rows(self) -> bool:
        """Whether rows of all loaders can stand in one batch."""
        found = list(self.loaders.values())
        for name, one in self.loaders.items():
            if isinstance(one, RowLoader) and one.config.lanes > 1 and self.world_size > 1:
                raise BadConfig(
                    f"{name!r} has {one.config.lanes} lanes, in a mixture on "
                    f"{self.world_size} ranks",
                    why="a rank knows the rows of its own lanes alone, and all must choose alike",
                    do="give it lanes=1, or mix its sources in one loader (weights)",
                )
            if isinstance(one, RowLoader) and self.world_size > 1:
                one.can_lane = False  # so that it does not advise them
        return (
            all(isinstance(one, RowLoader) and one.has_equal_rows for one in found)
            and len({one.config.seq_len for one in found if isinstance(one, RowLoader)}) == 1
        )

    def _batch_rows(self, each: int | None, total: int | None) -> int:
        """Rows of a batch over all ranks; 0 where loaders take turns with batches of their own."""
        if not self.can_skip:
            if each is not None or total is not None:
                raise BadConfig(
                    "a batch size was given, and the loaders take turns with batches of their own",
                    why="not all of them give rows of one length",
                    do="give the batch size to the loaders",
                )
            return 0
        if each is None and total is None:
            known = {one.global_batch_size for one in self._row_loaders}
            if len(known) > 1:
                raise BadConfig(
                    f"the loaders have batches of {sorted(known)} rows",
                    do="give batch_size, the rows of a batch of the mixture for each rank",
                )
            (total,) = known
        return all_rows(each, total, self.world_size)

    @property
    def _row_loaders(self) -> list[RowLoader]:
        return [one for one in self.loaders.values() if isinstance(one, RowLoader)]

    def _shares(self, told: str, given: Shares | Sequence[float] | None) -> list[int]:
        """Weights as whole numbers that add up to ONE."""
        if given is None:
            given = [1.0] * len(self.names)
        if isinstance(given, Mapping):
            if set(given) != set(self.names):
                raise BadConfig(
                    f"{told} are for {', '.join(map(repr, given))}",
                    do=f"give one for each of {', '.join(map(repr, self.names))}",
                )
            given = [given[name] for name in self.names]
        is_list = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
        if not is_list or len(given) != len(self.names):
            raise BadConfig(
                f"{told} are {given!r:.80}",
                do=f"give a number for each of {', '.join(map(repr, self.names))}",
            )
        found = [number(f"a number of {told}", one) for one in given]
        if min(found) < 0 or not 0 < sum(found) < math.inf:
            raise BadConfig(
                f"{told} are {found}", do="give numbers of 0 or more, not all of them 0"
            )
        at = [round(ONE * math.fsum(found[: k + 1]) / math.fsum(found)) for k in range(len(found))]
        return [b - a for a, b in zip([0, *at], at, strict=False)]

    def _stages_now(self) -> list[list[int]]:
        """The weights of the next batch, and those of all later stages."""
        found = [self._changed or self._weights]
        for first, shares in self._stages:
            if first > self.step:
                found.append(shares)
            elif first > self._changed_at:
                found = [shares]
        return found

    def _weights_now(self, without: Collection[int] = ()) -> list[int]:
        """The weights of the next batch, without those of loaders that have ended. Where all that
        have weight have ended, the first later stage holds in which others have some."""
        over = [has_ended or k in without for k, has_ended in enumerate(self._ended)]
        for weights in self._stages_now():
            left = [0 if is_over else one for one, is_over in zip(weights, over, strict=True)]
            if any(left):
                return left
        return [0] * len(over)

    def change_weights(self, weights: Shares | Sequence[float]) -> None:
        """From the next batch on other weights hold, until a later stage of the schedule; the state
        remembers it. Every rank must do the same at the same step."""
        shares = self._shares("weights", weights)
        with self._lock:
            self._changed, self._changed_at = shares, self.step
            self._marks.clear()
            self._note()

    # Batches

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self.get_iterator()

    def get_iterator(
        self, *, together: bool = True, goes_on: bool = False
    ) -> Iterator[TrainingBatch]:
        """Batches to the end. One that `goes_on` with an epoch ends with it, also if nothing is
        left of it. (`together` is for loaders that fill several at once.)"""
        if self.is_over:
            self.begin_epoch()
        return self._batches(0 if goes_on else self._given)

    def _batches(self, given: int) -> Iterator[TrainingBatch]:
        """Batches to the end; `given` were handed out when this was asked for."""
        batch = self._next(self.global_batch_size)
        if batch is None and 0 < given == self._given:
            # who counts batches does not ask for one after the last: this is the next epoch
            self.begin_epoch()
            batch = self._next(self.global_batch_size)
        while batch is not None:
            yield batch
            batch = self._next(self.global_batch_size)

    def get_batch(self, batch_size: int) -> TrainingBatch:
        count = whole("batch_size", batch_size, 1) * self.world_size
        if not self.can_skip:
            raise BadConfig(
                "get_batch of loaders that take turns",
                why="each has a batch size of its own",
                do="iterate over the mixture",
            )
        batch = self._next(count)
        if batch is None:
            raise no_more(self, self.epoch)
        return batch

    def begin_epoch(self) -> None:
        """After the last batch: the next epoch of the loaders that have ended; the others go on."""
        with self._lock:
            for k, loader in enumerate(self.loaders.values()):
                if self._ended[k] and isinstance(loader, RowLoader):
                    loader.begin_epoch()
            self._ended = [False] * len(self.names)
            self.is_over, self._began = False, self.step
            self.epoch += 1
            self._note()

    def go_to_epoch(self, epoch: int) -> None:
        """Go to the first batch of an epoch, without reading what comes before it."""
        if whole("epoch", epoch, 0) == self.epoch + 1 and self.is_over:
            return  # the next iteration begins it
        if epoch <= self.epoch and (epoch < self.epoch or self.is_over or self._began != self.step):
            self.reset()
        while self.epoch < epoch:
            self.skip(MOST_BATCHES)
            self.begin_epoch()

    def skip(self, batches: int, *, bring: bool = True) -> None:
        """Move on by so many batches, or to the end, without reading their tokens; their shards are
        brought all the same."""
        if not self.can_skip and whole("batches", batches, 0):
            raise BadConfig(
                "loaders that take turns skip nothing",
                why="how large a batch is shows when it is made",
                do="iterate over the mixture",
            )
        for _ in range(whole("batches", batches, 0)):
            if self._next(self.global_batch_size, make=False) is None:
                break

    def _next(self, count: int, make: bool = True) -> TrainingBatch | None:
        if self.is_over:  # where it stops with the first that ends, others would go on
            return None
        with self._lock, self._all_or_nothing():
            batch = self._mixed(count, make) if self.can_skip else self._turn()
            if batch is None:
                self.is_over = True
            else:
                self.step += 1
                self._given += 1
            self._note()
            return batch

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An error or an interrupt takes nothing, of any loader."""
        before = self._standing(), self.step, self.is_over, self._given
        try:
            with contextlib.ExitStack() as held:
                for loader in self._row_loaders:
                    held.enter_context(loader.all_or_nothing())
                yield
        except BaseException:
            standing, self.step, self.is_over, self._given = before
            self._stand(standing)
            raise

    def _mixed(self, count: int, make: bool) -> TrainingBatch | None:
        """Rows of all loaders, dealt out by what each is owed."""
        rows = self._look_ahead(count)
        if rows is None:
            return None
        loaders, sizes = self._row_loaders, [len(one.fills) for one in rows]
        first = count * self.rank // self.world_size
        last = count * (self.rank + 1) // self.world_size
        parts: dict[str, RowBatch] = {}
        told: dict[str, Any] = {}
        if (given := sum(sizes)) < count:  # the last batch of all
            empty = loaders[sizes.index(max(sizes))].padding(
                max(0, last - max(first, given)), counted=count - given
            )
        at = targets = 0
        for name, loader, ahead, size in zip(self.names, loaders, rows, sizes, strict=True):
            if not size:
                continue
            mine = max(first, at) - at, min(last, at + size) - at
            targets += loader.count_targets(ahead)
            told[name] = {"first_row": ahead.first, "rows": size, "sources": len(loader.sources)}
            part = loader.draw(ahead, mine if make and mine[0] < mine[1] else None)
            if part is not None:
                parts[name] = part
            at += size
        if at < last:
            parts[""] = empty
        tokens = [int(one.fills.sum()) for one in rows]
        self._settle(sizes, tokens)
        metadata = {
            "step": self.step, "rows": count, "parts": told, "num_tokens": sum(tokens),
            "num_loss_tokens": targets,
        }  # fmt: skip
        return MixedBatch(parts, metadata) if make else _SKIPPED

    def _look_ahead(self, count: int) -> list[Rows] | None:
        """The next rows of each loader, `count` in all; None after the last batch."""
        wanted = self._deal(count)
        if wanted is None:
            return None
        loaders = self._row_loaders
        rows = [one.rows_ahead(size) for one, size in zip(loaders, wanted, strict=True)]
        short = {k: one for k, one in enumerate(rows) if len(one.fills) < wanted[k]}
        if not short:
            return rows
        if self.stop == "all":
            return self._with_rests(count, short)
        for k, rest in short.items():
            self._end(k, rest)
        return None

    def _with_rests(self, count: int, rests: dict[int, Rows]) -> list[Rows] | None:
        """Rows of a batch in which some loaders end: all that these have, and more of the others.
        None if that is too little for a batch."""
        loaders = self._row_loaders
        while True:
            left = count - sum(len(rest.fills) for rest in rests.values())
            wanted = self._deal(left, without=rests) or [0] * len(loaders)
            rows = [
                rests[k] if k in rests else one.rows_ahead(wanted[k])
                for k, one in enumerate(loaders)
            ]
            ended = {k for k, one in enumerate(rows) if k in rests or len(one.fills) < wanted[k]}
            if len(ended) == len(rests):
                break
            rests = {k: rows[k] for k in ended}
        given = sum(len(one.fills) for one in rows)
        is_batch = given == count or (given > 0 and self.last == "pad")
        for k in rests:
            self._end(k, None if is_batch else rows[k])
        return rows if is_batch else None

    def _end(self, k: int, dropped: Rows | None) -> None:
        """A loader gives no more in this epoch; rows of it that no batch takes are counted."""
        self._ended[k] = True
        self._owed[k] = 0
        self._row_loaders[k].end_epoch(dropped)

    def _deal(self, count: int, without: Collection[int] = ()) -> list[int] | None:
        """How many of `count` rows each loader gives; None if none has a share.

        A loader gives what it is owed, in rows of as many tokens as its rows had so far.
        """
        weights = self._weights_now(without)
        total = sum(weights)
        if not total:
            return None
        means = [self._mean(k) for k in range(len(weights))]
        all_of_it = (
            count * total / sum(one / mean for one, mean in zip(weights, means, strict=True))
        )
        wanted = [
            (owed / ONE + all_of_it * one / total) / mean if one else 0.0
            for owed, one, mean in zip(self._owed, weights, means, strict=True)
        ]
        return _whole_parts(wanted, count, [one > 0 for one in weights])

    def _mean(self, k: int) -> float:
        """What a row of a loader counts: 1, or its tokens."""
        if self.unit == "rows":
            return 1.0
        if not self._rows[k]:
            return float(self._row_loaders[k].config.seq_len)
        return max(1, self._tokens[k]) / self._rows[k]

    def _settle(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Count what was given, and what each loader is owed after it."""
        given = rows if self.unit == "rows" else tokens
        weights = self._weights_now()
        total = sum(weights)
        all_of_it = sum(size for size, over in zip(given, self._ended, strict=True) if not over)
        for k, size in enumerate(given):
            self._rows[k] += rows[k]
            self._tokens[k] += tokens[k]
            if total and not self._ended[k]:
                self._owed[k] += weights[k] * all_of_it * ONE // total - size * ONE

    def _turn(self) -> TrainingBatch | None:
        """The next batch of the loader that is owed most."""
        while True:
            weights = self._weights_now()
            able = [k for k, one in enumerate(weights) if one]
            if not able:
                return None
            k = max(able, key=lambda k: (self._owed[k], weights[k], -k))
            name = self.names[k]
            loader = self.loaders[name]
            batch = next(_feed(loader), None)
            if batch is not None:
                break
            self._ended[k], self._owed[k] = True, 0
            if self.stop == "first":
                return None
        rows, tokens = _sizes(batch, name, self.world_size)
        sizes = [0] * len(self.names)
        sizes[k] = rows
        counts = [0] * len(self.names)
        counts[k] = tokens
        self._settle(sizes, counts)
        batch.metadata |= {
            "loader": name, "loader_step": batch.metadata.get("step"), "step": self.step
        }  # fmt: skip
        return batch

    def get_num_batches(self) -> NumBatches:
        """How many batches one epoch gives, as far as the data is known. It is `final` where the
        data is sealed and shares of rows say which loader ends first."""
        if not self.can_skip:
            return NumBatches(
                sum(one.get_num_batches() for one in self.loaders.values()), final=False
            )
        known = [one.count_rows() for one in self._row_loaders]
        final = all(one.final for one in known)
        if self.stop == "all":
            # of a stage that ends before its loaders do, who knows how much is left
            final = final and not self._stages
            weighted = [any(shares) for shares in zip(*self._stages_now(), strict=True)]
            rows = sum(one for one, has_weight in zip(known, weighted, strict=True) if has_weight)
            batches, rest = divmod(rows, self.global_batch_size)
            return NumBatches(batches + (rest > 0 and self.last == "pad"), final=final)
        if self.unit == "tokens" or self._changed is not None:
            least = min(
                (rows * ONE // one for rows, one in zip(known, self._weights, strict=True) if one)
            )
            return NumBatches(least // self.global_batch_size, final=False)
        return NumBatches(self._count_first(known), final=final)

    def _count_first(self, known: Sequence[int]) -> int:
        """Batches until one loader cannot give its rows."""
        kept = self._standing(), self.step
        try:
            self._owed, self._ended, self.step = [0] * len(known), [False] * len(known), 0
            given = [0] * len(known)
            while self.step < MOST_COUNTED:
                rows = self._deal(self.global_batch_size)
                if rows is None:
                    break
                given = [a + b for a, b in zip(given, rows, strict=True)]
                if any(a > b for a, b in zip(given, known, strict=True)):
                    break
                self._settle(rows, rows)
                self.step += 1
            return self.step
        finally:
            standing, self.step = kept
            self._stand(standing)

    def reset(self) -> None:
        with self._lock:
            for loader in self.loaders.values():
                loader.reset()
            self._begin()

    # Where it stands

    def _standing(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch, "owed": list(self._owed), "rows": list(self._rows),
            "tokens": list(self._tokens), "ended": list(self._ended),
            "changed": None if self._changed is None else [self._changed_at, *self._changed],
        }  # fmt: skip

    def _stand(self, at: Mapping[str, Any]) -> None:
        self.epoch = at["epoch"]
        self._owed, self._rows, self._tokens = (
            list(at["owed"]),
            list(at["rows"]),
            list(at["tokens"]),
        )
        self._ended = list(at["ended"])
        changed = at["changed"]
        self._changed_at, self._changed = (-1, None) if changed is None else (
            changed[0], list(changed[1:])
        )  # fmt: skip

    def _note(self) -> None:
        """Remember where it stands after this many batches: trainers fetch ahead."""
        steps = [loader.step for loader in self.loaders.values()]
        self._marks.append(
            {"step": self.step, "over": self.is_over, "steps": steps, "at": self._standing()}
        )

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        with self._lock:
            mark = self._marks[-1]
            if step is not None:
                mark = self._stood(whole("step", step, 0))
            states = {}
            for (name, loader), known in zip(self.loaders.items(), mark["steps"], strict=True):
                states[name] = loader.state_dict() if step is None else loader.state_dict(known)
            return with_checksum(
                {
                    "format": STATE_FORMAT, "step": mark["step"], "over": mark["over"],
                    "config": self._settings(), "at": mark["at"], "loaders": states,
                }
            )  # fmt: skip

    def _stood(self, step: int) -> Mark:
        for mark in self._marks:
            if mark["step"] == step:
                return mark
        raise BadConfig(
            f"the mixture does not know where it stood after {step} batches",
            why=f"it keeps {KEPT_MARKS} places, now those after {self._marks[0]['step']} to "
            f"{self._marks[-1]['step']} batches",
            do="ask for the state of a batch that was handed out lately",
        )

    def _settings(self) -> dict[str, Any]:
        return {
            "mixture": self.names, "weights": self._weights, "unit": self.unit,
            "schedule": [[batch, list(shares)] for batch, shares in self._stages],
            "stop": self.stop, "last": self.last, "global_batch_size": self.global_batch_size,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_checksum(state)
        told = "the state has {!r}, this mixture {!r}"
        if state.get("format") != STATE_FORMAT or "loaders" not in state:
            raise StateMismatch(
                "this is not the state of a mixture", do="give load_state_dict what state_dict gave"
            )
        if found := differences(state["config"], self._settings(), told=told):
            raise StateMismatch(
                "the state was made under other settings", why="\n".join(found),
                do="give the mixture what the state has, or start anew with reset()",
            )  # fmt: skip
        with self._lock:
            before = {name: loader.state_dict() for name, loader in self.loaders.items()}
            try:
                for name, loader in self.loaders.items():
                    loader.load_state_dict(state["loaders"][name])
            except BaseException:  # a state that one of them refuses changes nothing
                for name, loader in self.loaders.items():
                    loader.load_state_dict(before[name])
                raise
            self.step, self.is_over = state["step"], state["over"]
            self._given, self._began = 0, 0 if self.step == 0 else -1
            self._stand(state["at"])
            self._marks.clear()
            self._note()

    # What was in it

    def explain(self, batch: TrainingBatch) -> list[Span]:
        """Where every token of a batch of this mixture comes from; sources are named after their
        loader: `code/…`."""
        if isinstance(batch, MixedBatch):
            parts: Mapping[str, Any] = batch.parts
        else:
            parts = {batch.metadata["loader"]: batch}
        found, row = [], 0
        for name, part in parts.items():
            if name:
                explain = getattr(self.loaders[name], "explain", None)
                if explain is None:
                    raise BadConfig(f"the loader {name!r} explains nothing", do="give it explain()")
                found += [
                    replace(span, row=span.row + row, source=f"{name}/{span.source}")
                    for span in explain(part)
                ]
            row += len(part.input_ids)
        return found

    def ledger(self) -> list[Ledger]:
        """What became of every token read so far, by loader and source."""
        return [
            replace(line, source=f"{name}/{line.source}")
            for name, loader in self.loaders.items()
            if isinstance(loader, RowLoader)
            for line in loader.ledger()
        ]

    @property
    def given(self) -> dict[str, dict[str, int]]:
        """What each loader has given so far, over all ranks: `rows`, `tokens`."""
        return {
            name: {"rows": self._rows[k], "tokens": self._tokens[k]}
            for k, name in enumerate(self.names)
        }

    def close(self) -> None:
        for loader in self.loaders.values():
            loader.close()


def _whole_parts(wanted: Sequence[float], count: int, able: Sequence[bool]) -> list[int]:
    """Whole numbers near some others that add up to `count`; the first of several that are as far
    from it goes first.

    >>> _whole_parts([2.5, 0.7, 0.8], 4, [True] * 3)
    [2, 1, 1]
    >>> _whole_parts([-3.0, 7.0], 4, [True] * 2)
    [0, 4]
    """
    found = [max(0, math.floor(one)) for one in wanted]
    who = [k for k, one in enumerate(able) if one]
    while (missing := count - sum(found)) > 0:
        k = max(who, key=lambda k: wanted[k] - found[k])
        found[k] += max(1, missing // len(who) if missing > len(who) else 1)
    while (extra := sum(found) - count) > 0:
        k = min((k for k in who if found[k]), key=lambda k: wanted[k] - found[k])
        found[k] -= min(found[k], max(1, extra // len(who)))
    return found


def _feed(loader: DataLoader) -> Iterator[TrainingBatch]:
    """What a loader gives from where it stands, to the end of its epoch."""
    return loader.get_iterator(goes_on=True) if isinstance(loader, RowLoader) else iter(loader)


def _sizes(batch: TrainingBatch, name: str, ranks: int) -> tuple[int, int]:
    """Rows and tokens of a batch over all ranks."""
    about = batch.metadata
    rows = about.get("rows") or about.get("rollouts")
    tokens = about.get("num_tokens")
    if ranks > 1 and (rows is None or tokens is None):
        raise BadConfig(
            f"a batch of {name!r} does not say what all ranks have of it",
            why="each rank would count its own part, and choose another loader next",
            do='put "rows" and "num_tokens", over all ranks, into its metadata',
        )
    if rows is None:
        rows = len(batch.input_ids)
    return int(rows), int(batch.fills.sum() if tokens is None else tokens)
