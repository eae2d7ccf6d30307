"""Share sequences out over ranks and micro-batches: equal work, and never more tokens than fit.

In:    lengths of sequences, or the rows that a plan has ahead; how many ranks; the most tokens of
       a micro-batch
Out:   of each sequence its rank and its micro-batch; of rows how many make a batch
Keeps: every sequence once; the cap; as many micro-batches on every rank; the same answer on every
       rank without a word between them, since it follows from the lengths alone
Never: cuts a sequence, asks anybody

Work is `linear * L + quadratic * L^2`: what a layer does for each token, and attention. The
default is that of a model 4,096 wide (6 * 4,096 to 1); with `quadratic=0` tokens alone count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32s, Int64s, offsets_of
from penstock.errors import BadConfig, BadInput
from penstock.kernels import Kernel
from penstock.options import check_numbers, config_of, whole
from penstock.plugins import find, origin, register
from penstock.stream.plan import Rows
from penstock.supply.balance_layout import Work

_karmarkar_karp = Kernel(
    "penstock.supply.balance_kernel",
    "karmarkar_karp",
    "void(int64[::1], int32[::1], int64, int64, Work, int32[::1])",
    Work,
)
_best_fit = Kernel(
    "penstock.supply.balance_kernel",
    "best_fit",
    "int64(int64[::1], int32[::1], int64, int64[::1], int32[::1])",
)
_fit_evenly = Kernel(
    "penstock.supply.balance_kernel",
    "fit_evenly",
    "int64(int64[::1], int64[::1], int32[::1], int64, int64[::1], int64[::1], int32[::1])",
)

MOST_PARTS: Final = 1 << 20
_FIRST_LOOK: Final = 32
"""Rows for each rank that are looked at first."""
_MOST_COST: Final = 1 << 62

Partition = Callable[[Int64s, int], npt.ArrayLike]
"""Of each item the part that it goes to, by costs and a number of parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceConfig:
    """What a sequence costs, and how many fit together."""

    max_tokens: int | None = None
    """Tokens of a micro-batch at most; None for one micro-batch, whatever it holds."""
    linear: int = 24_576
    """Cost of a token."""
    quadratic: int = 1
    """Cost of a pair of tokens in one sequence: attention."""
    multiple_of: int = 1
    """The number of micro-batches is a multiple of this, as pipelines ask for."""
    partition: str = "karmarkar_karp"
    """How costs are shared out over ranks, by name."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, least in (("linear", 0), ("quadratic", 0), ("multiple_of", 1)):
            whole(name, getattr(self, name), least, 1 << 30)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 1)
        if not self.linear and not self.quadratic:
            raise BadConfig(
                "linear and quadratic are both 0", do="give at least one of them: what work costs"
            )

    def costs(self, lengths: npt.ArrayLike) -> Int64s:
        """What sequences of these lengths cost.

        >>> BalanceConfig(linear=10).costs([1, 100]).tolist()
        [11, 11000]
        """
        found = np.asarray(lengths, np.int64)
        most = int(found.max()) if len(found) else 0
        if (self.linear + self.quadratic * most) * most * len(found) >= _MOST_COST:
            raise BadConfig(
                f"{len(found):,} sequences of up to {most:,} tokens cost more than a number holds",
                do="choose smaller costs, in the same proportion",
            )
        return self.linear * found + self.quadratic * found**2


@dataclass(frozen=True, slots=True)
class Balanced:
    """Where each sequence goes."""

    rank: Int32s
    micro: Int32s
    """The micro-batch within its rank, the dearest first."""
    ranks: int
    num_micro: int
    """Micro-batches of each rank. None is empty, unless there are fewer sequences than that."""

    def members(self, rank: int) -> list[Int64s]:
        """The sequences of each micro-batch of a rank, in the order in which they were given."""
        mine = np.flatnonzero(self.rank == rank)
        order = mine[np.argsort(self.micro[mine], kind="stable")]
        at = offsets_of(np.bincount(self.micro[mine], minlength=self.num_micro))
        return [order[at[k] : at[k + 1]] for k in range(self.num_micro)]


@register("partition", "karmarkar_karp")
def partition(costs: npt.ArrayLike, parts: int, *, equal_size: bool = False) -> Int32s:
    """The part of each item, so that the dearest part is cheap: Karmarkar and Karp's differencing.

    With `equal_size` parts have as many items, or one less. Part 0 is the dearest.

    >>> partition([8, 7, 6, 5, 4], 2).tolist()
    [1, 0, 1, 0, 0]
    """
    found = np.ascontiguousarray(costs, np.int64)
    whole("parts", parts, 1, MOST_PARTS)
    if len(found) and found.min() < 0:
        raise BadInput(f"a cost is {found.min()}", do="give costs of 0 or more")
    count = len(found)
    room = 2 * (2 * count + 2 * parts)
    out = np.zeros(count, np.int32)
    work = Work(
        sums=np.empty(room, np.int64),
        heads=np.empty(room, np.int32),
        tails=np.empty(room, np.int32),
        counts=np.empty(room, np.int32),
        follows=np.empty(count, np.int32),
        first=np.empty(count, np.int64),
        size=np.empty(count, np.int64),
        heap=np.empty(count, np.int64),
    )
    order = np.argsort(found, kind="stable").astype(np.int32)
    _karmarkar_karp(found, order, parts, int(equal_size), work, out)
    return out


def balance(lengths: npt.ArrayLike, ranks: int, config: BalanceConfig | None = None) -> Balanced:
    """Share sequences out over ranks, and those of each rank over micro-batches.

    >>> made = balance([7] * 8, 2, BalanceConfig(max_tokens=8))
    >>> made.num_micro, [len(one) for one in made.members(0)]
    (4, [1, 1, 1, 1])
    """
    config, ranks = config_of("config", config, BalanceConfig), whole("ranks", ranks, 1, MOST_PARTS)
    sizes = np.ascontiguousarray(lengths, np.int64)
    cap = config.max_tokens
    if len(sizes) and sizes.min() < 0:
        raise BadInput(f"a length is {sizes.min()}", do="give lengths of 0 or more")
    if cap is not None and len(sizes) and sizes.max() > cap:
        raise BadInput(
            f"a sequence has {sizes.max():,} tokens, and a micro-batch at most {cap:,}",
            where=f"sequence {int(sizes.argmax())}",
            do="give a larger max_tokens, or leave out or cut sequences that are longer",
        )
    costs = config.costs(sizes)
    rank = share_out(config.partition, costs, ranks)
    if cap is None:
        return Balanced(rank, np.zeros(len(sizes), np.int32), ranks, 1)
    dearest = np.argsort(-costs, kind="stable").astype(np.int32)
    bins = np.zeros(len(sizes), np.int32)
    needed = [_fitted(sizes, dearest[rank[dearest] == r], cap, bins) for r in range(ranks)]
    step = config.multiple_of
    num_micro = max(1, -(-max(needed) // step)) * step
    fed = _feed(rank, dearest, ranks, num_micro)
    for r in range(ranks):
        mine = dearest[rank[dearest] == r]
        if fed:
            _fitted(sizes, mine, cap, bins)
        _spread(sizes, costs, mine, cap, num_micro, bins)
        loads = np.bincount(bins[mine], costs[mine], num_micro)
        place = np.empty(num_micro, np.int32)
        place[np.argsort(-loads, kind="stable")] = np.arange(num_micro)
        bins[mine] = place[bins[mine]]
    return Balanced(rank, bins, ranks, num_micro)


def share_out(name: str, costs: Int64s, ranks: int) -> Int32s:
    """The rank of each sequence, as the partition of that name has it."""
    made: Any = find("partition", name).make
    found = np.array(made(costs, ranks))
    if (
        found.shape != costs.shape
        or found.dtype.kind not in "iu"
        or (len(found) and not 0 <= found.min() <= found.max() < ranks)
    ):
        raise BadConfig(
            f"the partition {name!r} does not give a part for each item",
            where=origin(made),
            why=f"it gave {found.dtype} of {found.shape} for {len(costs)} items and {ranks} parts",
            do="return numbers from 0 to parts - 1, one for each item",
        )
    return found.astype(np.int32)


def _fitted(sizes: Int64s, items: Int32s, cap: int, bins: Int32s) -> int:
    """Pack items, the longest first, into as few micro-batches as best fit finds."""
    rooms = np.zeros(len(items), np.int64)
    return int(_best_fit(sizes, np.ascontiguousarray(items), cap, rooms, bins))


def _feed(rank: Int32s, dearest: Int32s, ranks: int, least: int) -> bool:
    """Give ranks with fewer sequences than micro-batches the cheapest of those that have more; says
    whether any were moved. Where there are too few in all, some micro-batches stay empty."""
    counts = np.bincount(rank, minlength=ranks)
    moved = False
    for item in dearest[::-1].tolist():
        hungry = int(counts.argmin())
        if counts[hungry] >= least:
            break
        if counts[rank[item]] > least:
            counts[rank[item]] -= 1
            counts[hungry] += 1
            rank[item], moved = hungry, True
    return moved


def _spread(
    sizes: Int64s, costs: Int64s, items: Int32s, cap: int, num_micro: int, bins: Int32s
) -> None:
    """Share the sequences of a rank out over its micro-batches. They are in as few as fit: the
    answer if no other that is more even keeps the cap."""
    if len(items) <= num_micro:
        bins[items] = np.arange(len(items))
        return
    even = partition(costs[items], num_micro)
    if np.bincount(even, sizes[items], num_micro).max() <= cap:
        bins[items] = even
        return
    rooms, loads = np.zeros(num_micro, np.int64), np.zeros(num_micro, np.int64)
    tried = bins.copy()
    if _fit_evenly(sizes, costs, np.ascontiguousarray(items), cap, rooms, loads, tried):
        bins[items] = tried[items]
        return
    counts = np.bincount(bins[items], minlength=num_micro)
    for empty in np.flatnonzero(counts == 0).tolist():
        full = int(counts.argmax())
        last = items[bins[items] == full][-1]
        bins[last] = empty
        counts[full] -= 1
        counts[empty] += 1


# Batches of as many rows as fit


def next_rows(
    ahead: Callable[[int], Rows], max_tokens: int, ranks: int, config: BalanceConfig
) -> tuple[Rows, Int32s]:
    """Of the rows that a plan has `ahead`, those of the next batch and the rank of each: as many as
    keep `max_tokens` on every rank; none after the last."""
    look = _FIRST_LOOK * ranks
    while True:
        rows = ahead(look)
        ends = np.cumsum(rows.fills, dtype=np.int64)
        if len(ends) < look or ends[-1] >= max_tokens * ranks:
            break
        look *= 2
    count = int(np.searchsorted(ends, max_tokens * ranks, side="right"))
    costs = row_costs(rows, config)
    while count > ranks:
        rank = share_out(config.partition, costs[:count], ranks)
        if np.bincount(rank, rows.fills[:count], ranks).max() <= max_tokens:
            break
        count -= max(1, count // 64)  # the longest do not fit beside each other
    else:
        # a row for each: a plan has none that is longer than the cap
        count = min(len(ends), ranks)
        rank = np.arange(count, dtype=np.int32)
    last = int(np.searchsorted(rows.segments[:, 0], count))
    return Rows(rows.first, rows.segments[:last], rows.fills[:count]), rank


def row_costs(rows: Rows, config: BalanceConfig) -> Int64s:
    """What each row costs: its documents do not see each other."""
    costs = config.costs(rows.segments[:, 6])
    found = np.zeros(len(rows.fills), np.int64)
    np.add.at(found, rows.segments[:, 0], costs)
    return found


def pick_rows(rows: Rows, chosen: Int64s) -> Rows:
    """Some of the rows, as if there were no others."""
    place = np.full(len(rows.fills), -1, np.int32)
    place[chosen] = np.arange(len(chosen), dtype=np.int32)
    segments = rows.segments[place[rows.segments[:, 0]] >= 0].copy()
    segments[:, 0] = place[segments[:, 0]]
    return Rows(rows.first, segments, rows.fills[chosen])
