"""Which rollouts make up each batch: whole groups, in the order in which they were completed.

In:    the shards of a dataset of rollouts, in the order of its log; what is known of each rollout
Out:   batches as rows of segments (pass, shard, row in the shard): no tokens are touched
Keeps: a group is in one batch, whole; every rollout is in one batch or counted with a reason; the
       same batches on every rank, and wherever it was stopped and restored
Never: asks the clock, or how far the log has grown: a batch is made of the shortest part of the
       log that gives it, so ranks that have read on see the same

    read a shard ─▶ open groups ─▶ complete ones ─▶ not stale, and something to learn ─▶ a batch

A group is as stale as the version of the trainer is ahead of its oldest token. `drop` lets go of
what is too stale, and with it more long rollouts than short ones, since those take longer: how much
is counted. `wait` reads on until no group is open that would be too stale for the next batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Protocol, cast

import numpy as np

from penstock.arrays import Floats, Int32s, Int64s, offsets_of
from penstock.errors import BadConfig, BadRollout, StateMismatch
from penstock.options import check_numbers, number, whole
from penstock.rollout.check import MOST_FLOAT
from penstock.rollout.records import Checked, Rollouts
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, PlanConfig, Rows, Snapshot
from penstock.stream.source import Source
from penstock.supply.engine import Engine, Feeds, Mix
from penstock.supply.window import Decodes, Window

STALES: Final = ("drop", "wait")
GROUP: Final = 5
"""Where a segment has the number of its group in the batch: ids may come again, in another pass."""
AHEAD: Final = 8
"""Shards that are fetched before they are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """Which rollouts are trained on, and how they are put together."""

    group_size: int | None = None
    """Rollouts of a group, where they do not say it themselves. Without either a group is complete
    when the data is."""
    max_staleness: int | None = None
    """By how many versions the trainer may be ahead of a rollout; None for any."""
    stale: str = "drop"
    """What is too stale: `drop` it, or `wait` for groups before they are."""
    give_up_after: int = 8
    """Under `wait`: a group is given up when so many batches of other rollouts have come since its
    first one."""
    zero_variance: str = "keep"
    """Groups in which all rewards are equal: `keep` them, or `skip` to others."""
    partial: str = "drop"
    """Groups that are not complete when the data ends: `drop` or `use` them."""
    max_open_groups: int = 65_536
    """Groups of which some rollouts have come and others not."""
    epochs: int = 1
    """Passes over data that has ended."""
    repeats: int = 1
    """How often a batch is handed out, one time after the other."""
    last: str = "keep"
    """The last batch, with fewer rollouts than asked for: `keep` or `drop` it."""
    bad: str = "raise"
    """What cannot be trained on, a rollout or a group: `raise`, or `reject` it, counted."""
    retokenize: bool = False
    """Whether text becomes ids where a rollout has none. A tokenizer may cut it otherwise than it
    was sampled, so that ids are trained that the policy never chose, and there are no
    log-probabilities of theirs."""
    reward_weights: Mapping[str, float] | None = None
    """What each named reward counts; by default all count alike."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, known in (
            ("stale", STALES), ("zero_variance", ("keep", "skip")), ("partial", ("drop", "use")),
            ("last", ("keep", "drop")), ("bad", ("raise", "reject")),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in known:
                raise BadConfig(f"{name} is {value!r}", do=f"choose from {', '.join(known)}")
        for name, least in (
            ("give_up_after", 1), ("max_open_groups", 1), ("epochs", 1), ("repeats", 1)
        ):  # fmt: skip
            whole(name, getattr(self, name), least)
        if self.group_size is not None:
            whole("group_size", self.group_size, 1)
        if self.max_staleness is not None:
            whole("max_staleness", self.max_staleness, 0)
        if self.reward_weights is not None:
            if not isinstance(self.reward_weights, Mapping) or not self.reward_weights:
                raise BadConfig(
                    f"reward_weights is {self.reward_weights!r}", do="give weights by name"
                )
            for name, weight in self.reward_weights.items():
                number(f"reward_weights[{name!r}]", weight)
        if self.stale == "wait" and self.max_staleness is None:
            raise BadConfig("stale is 'wait' without max_staleness", do="give both")


@dataclass(frozen=True, slots=True)
class StaleWindow:
    """How old rollouts may be, and what is done about it; another one may hold after a resume."""

    max_staleness: int | None
    stale: str
    give_up_after: int

    @classmethod
    def of(cls, config: RolloutConfig) -> "StaleWindow":
        return cls(config.max_staleness, config.stale, config.give_up_after)


@dataclass(frozen=True, slots=True)
class Index:
    """What the plan knows of the rollouts of a shard."""

    rows: Int64s
    """Their rows in the shard; others were refused."""
    groups: list[str]
    sizes: Int32s
    """Rollouts of their groups, 0 where nobody said."""
    tokens: Int64s
    trained: Int64s
    """Tokens that were sampled."""
    oldest: Int64s
    newest: Int64s
    rewards: Floats
    kind: tuple[bool, bool]
    """Whether they have log-probabilities, and values."""
    refused: int = 0
    """Rows that are no rollouts that can be trained on."""


@dataclass(slots=True)
class Tally:
    """What became of some groups."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    """Sampled ones."""

    def add(self, group: "_Group") -> None:
        self.groups += 1
        self.rollouts += len(group.members)
        self.tokens += group.trained


@dataclass(slots=True)
class Counts:
    """What became of all rollouts so far."""

    read: int = 0
    """Rollouts."""
    refused: int = 0
    """Rollouts that cannot be trained on."""
    used: Tally = field(default_factory=Tally)
    stale: Tally = field(default_factory=Tally)
    zero_variance: Tally = field(default_factory=Tally)
    incomplete: Tally = field(default_factory=Tally)
    """Groups that did not fill: too stale, given up, or not complete at the end."""
    future: Tally = field(default_factory=Tally)
    """Groups of a version that the trainer has not reached."""
    wrong_size: Tally = field(default_factory=Tally)
    """Groups of which rollouts say different sizes, or with more rollouts than they have."""
    unlike: Tally = field(default_factory=Tally)
    """Groups with rollouts that have log-probabilities or values where the first ones of the data
    have none, or the other way round."""
    too_long: Tally = field(default_factory=Tally)
    """Groups with a rollout that fits into no micro-batch, where such are left out."""
    short: Tally = field(default_factory=Tally)
    """Groups of a last batch that was dropped."""

    @property
    def bias(self) -> float | None:
        """How many sampled tokens a rollout has that was dropped as stale or incomplete, for each
        that one has which was used: above 1, training sees too few long rollouts."""
        lost = self.stale.rollouts + self.incomplete.rollouts
        if not lost or not self.used.tokens:
            return None
        mean = (self.stale.tokens + self.incomplete.tokens) / lost
        return mean / (self.used.tokens / self.used.rollouts)

    @classmethod
    def restored(cls, told: Mapping[str, Any]) -> "Counts":
        found: dict[str, Any] = dict(told)
        for name, value in told.items():
            if isinstance(value, Mapping):
                found[name] = Tally(**value)
        return cls(**found)


@dataclass(slots=True)
class _Group:
    """A group as far as it has come."""

    name: str
    size: int
    """Rollouts that it is to have; 0 where it is not known."""
    began: int
    """Rollouts read before its first."""
    members: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Pass, shard, row in it, tokens."""
    rewards: list[float] = field(default_factory=list)
    trained: int = 0
    oldest: int = 1 << 62
    newest: int = -1
    wrong: bool = False
    kinds: set[tuple[bool, bool]] = field(default_factory=set)

    def add(self, turn: int, shard: int, at: int, index: Index) -> None:
        self.kinds.add(index.kind)
        self.members.append((turn, shard, int(index.rows[at]), int(index.tokens[at])))
        self.rewards.append(float(index.rewards[at]))
        self.trained += int(index.trained[at])
        self.oldest = min(self.oldest, int(index.oldest[at]))
        self.newest = max(self.newest, int(index.newest[at]))
        told = int(index.sizes[at])
        if told and self.size and told != self.size:
            # as many as the least of them: who waited for more would wait for ever
            self.wrong, self.size = True, min(told, self.size)
        self.size = self.size or told

    @property
    def longest(self) -> int:
        return max(member[3] for member in self.members)

    @property
    def is_full(self) -> bool:
        return 0 < self.size <= len(self.members)

    def as_json(self, count: int | None = None) -> list[Any]:
        """What it takes to find its first `count` members again."""
        return [self.name, self.began, [list(member[:3]) for member in self.members[:count]]]


class _InOrder:
    """What the engine asks of a pool, of shards that are read one after the other."""

    cohorts: tuple[Any, ...] = ()

    def __init__(self, plan: "GroupPlan") -> None:
        self._plan = plan

    @property
    def cycle(self) -> int:
        """Shards read so far."""
        return self._plan.shard

    def coming(self, known: int, *, closed: bool) -> range:
        """Shards to fetch ahead."""
        return range(self._plan.shard, min(self._plan.shard + AHEAD, known))


class GroupPlan:
    """The stream of batches. `take` gives the next ones.

    Set `wanted`, the rollouts of a batch at least, `version`, the trainer's, `window` and
    `max_tokens` before.
    """

    def __init__(self, source: Feeds, config: RolloutConfig, look: Callable[[int], Index]) -> None:
        self._source = source
        self._config = config
        self._look = look
        self.pools = [_InOrder(self)]
        self.row = 0
        """Batches given."""
        self.wanted = 1
        self.version: int | None = None
        self.window = StaleWindow.of(config)
        """That of a state until the next batch: what was handed out before is planned again."""
        self.max_tokens: int | None = None
        """Tokens of a rollout at most, where others are left out; likewise."""
        self._turn = 0
        self.shard = 0
        """The next one to be read."""
        self._open: dict[str, _Group] = {}
        self._ready: list[_Group] = []
        self._last: list[_Group] = []
        self._given = 0
        """How often the batch in `_last` was given."""
        self._kind: tuple[bool, bool] | None = None
        """That of the first rollouts: all others are to be like them."""
        self.counts = Counts()

    def allow(self, epochs: Any) -> None:
        """More passes, after the last batch."""
        self._turn, self.shard = 0, 0

    def take(self, count: int, least: int | None = None) -> Rows:
        """The next `least` batches, each as one row; fewer only at the end. Blocks until the
        rollouts are there. Never more: the next one depends on the trainer's version then."""
        first, segments, fills = self.row, [], []
        for batch in range(count if least is None else least):
            groups = self._repeated() or self._next()
            if not groups:
                break
            members = [member for group in groups for member in group.members]
            made = np.zeros((len(members), layout.SEGMENT), np.int32)
            made[:, 0] = batch
            made[:, [2, 3, 4, 6]] = members
            made[:, GROUP] = np.repeat(range(len(groups)), [len(one.members) for one in groups])
            segments.append(made)
            fills.append(int(made[:, 6].sum()))
            self._last = groups
            self._given += 1
            self.row += 1
        none = np.zeros((0, layout.SEGMENT), np.int32)
        return Rows(first, np.concatenate([none, *segments]), np.array(fills, np.int32))

    def _repeated(self) -> list[_Group]:
        """The last batch, if it is to be given again."""
        return self._last if self._last and self._given < self._config.repeats else []

    def _next(self) -> list[_Group]:
        """The groups of the next batch; none at the end."""
        self._last, self._given = [], 0
        while True:
            if (found := self._chosen(self.wanted)) is not None:
                return found
            if not self._read():
                break
        found = self._chosen(1, at_end=True) or []
        rollouts = sum(len(group.members) for group in found)
        if found and rollouts < self.wanted and self._config.last == "drop":
            for group in found:
                self._move(self.counts.used, self.counts.short, group)
            return []
        return found

    def _chosen(self, wanted: int, *, at_end: bool = False) -> list[_Group] | None:
        """Groups with so many rollouts, of those that are complete; None if they are too few, or if
        others must be waited for. No group is looked at that the batch does not need."""
        self._drop_open()
        if self.window.stale == "wait" and not at_end and self._has_urgent():
            return None
        order = list(range(len(self._ready)))
        if self.window.stale == "wait":
            order.sort(key=lambda k: self._ready[k].oldest)
        taken, gone, rollouts = [], set(), 0
        most = self.wanted if at_end else wanted
        for k in order:
            if rollouts >= most:
                break
            if (tally := self._unwanted(self._ready[k])) is not None:
                tally.add(self._ready[k])
                gone.add(k)
            else:
                taken.append(k)
                rollouts += len(self._ready[k].members)
        found = [self._ready[k] for k in taken] if rollouts >= wanted else None
        if found is not None:
            gone.update(taken)
            for group in found:
                self.counts.used.add(group)
        self._ready = [group for k, group in enumerate(self._ready) if k not in gone]
        return found

    def _unwanted(self, group: _Group) -> Tally | None:
        """Where a complete group is counted that is not to be used; None for one that is."""
        config, counts, version = self._config, self.counts, self.version
        if group.wrong:
            why = f"its rollouts say different sizes, or there are more than {group.size}"
            return self._refused(group, counts.wrong_size, "group_size", "wrong size", why)
        if group.kinds != {self._kind}:
            why = "some have log-probabilities or values, and others of the data have none"
            return self._refused(group, counts.unlike, "logprobs", "unlike others", why)
        if self.max_tokens is not None and group.longest > self.max_tokens:
            return counts.too_long
        if version is not None and group.newest > version:
            why = f"it was sampled with version {group.newest}, the trainer is at {version}"
            reason = "version from the future"
            return self._refused(group, counts.future, "weight_versions", reason, why)
        if self._is_stale(group) and self.window.stale == "drop":
            return counts.stale
        if config.zero_variance == "skip" and min(group.rewards) == max(group.rewards):
            return counts.zero_variance
        return None

    def _drop_open(self) -> None:
        """Let go of groups that are too stale before they are complete."""
        if self.window.stale == "drop" and self.window.max_staleness is not None:
            for name in [name for name, group in self._open.items() if self._is_stale(group)]:
                self.counts.incomplete.add(self._open.pop(name))

    def _is_stale(self, group: _Group, ahead: int = 0) -> bool:
        most, version = self.window.max_staleness, self.version
        return most is not None and version is not None and version + ahead - group.oldest > most

    def _has_urgent(self) -> bool:
        """Whether a group is open that would be too stale for the next batch; those that others
        have waited for long enough are given up."""
        patience = self.window.give_up_after * self.wanted
        found = False
        for name in [name for name, group in self._open.items() if self._is_stale(group, 1)]:
            if self.counts.read - self._open[name].began > patience:
                self.counts.incomplete.add(self._open.pop(name))
            else:
                found = True
        return found

    def _refused(self, group: _Group, tally: Tally, field: str, reason: str, why: str) -> Tally:
        """Where a group is counted that cannot be trained on, unless that is an error."""
        if self._config.bad == "raise":
            error = BadRollout(
                f"{field}: {reason}",
                where=f'source "{self._source.name}", group {group.name!r}',
                why=why,
                do="fix what writes rollouts, or let such groups be counted and left out "
                '(bad="reject")',
            )
            error.field, error.reason = field, reason.replace(" ", "_")
            raise error
        return tally

    @staticmethod
    def _move(source: Tally, target: Tally, group: _Group) -> None:
        target.add(group)
        source.groups -= 1
        source.rollouts -= len(group.members)
        source.tokens -= group.trained

    # Reading

    def _read(self) -> bool:
        """Take in the next shard; False after the last of the last pass."""
        while not self._source.wait_shard(self.shard):
            self._end_pass()
            if self._turn + 1 >= self._config.epochs or not self.shard:
                return False
            self._turn, self.shard = self._turn + 1, 0
            if self._ready:
                return True
        index = self._look(self.shard)
        if self._kind is None and index.groups:
            self._kind = index.kind
        self.counts.refused += index.refused
        for at, name in enumerate(index.groups):
            group = self._open.get(name)
            if group is None:
                size = self._config.group_size or 0
                group = self._open[name] = _Group(name, size, self.counts.read)
            group.add(self._turn, self.shard, at, index)
            self.counts.read += 1
            if group.is_full:
                self._ready.append(self._open.pop(name))
        self.shard += 1
        self._check_open()
        return True

    def _check_open(self) -> None:
        """Keep the number of open groups below its limit."""
        config = self._config
        if not self._source.is_closed:
            for group in self._open.values():
                if not group.size:
                    raise BadConfig(
                        f"the size of group {group.name!r} is not known",
                        where=f'source "{self._source.name}"',
                        why="more rollouts may come, and it does not say how many it is to have",
                        do="give group_size, to the loader or in each rollout",
                    )
        while len(self._open) > config.max_open_groups:
            oldest = next(iter(self._open.values()))
            why = (
                f"{len(self._open):,} groups are open; it has {len(oldest.members)} of "
                f"{oldest.size} rollouts"
            )
            incomplete = self.counts.incomplete
            self._refused(oldest, incomplete, "group_id", "group never fills", why).add(oldest)
            del self._open[oldest.name]

    def _end_pass(self) -> None:
        """What is open at the end of a pass is complete, or never will be."""
        for group in self._open.values():
            if not group.size or self._config.partial == "use":
                self._ready.append(group)
            else:
                self.counts.incomplete.add(group)
        self._open = {}

    def open_shards(self) -> set[tuple[int, int]]:
        """Shards of rollouts that are in no batch yet."""
        groups = [*self._open.values(), *self._ready, *self._last]
        return {(0, member[1]) for group in groups for member in group.members}

    # Where it stands

    def snapshot(self) -> "GroupSnapshot":
        counts = replace(self.counts)
        for about in fields(counts):
            value = getattr(counts, about.name)
            if isinstance(value, Tally):
                setattr(counts, about.name, replace(value))
        numbers = {
            "row": self.row,
            "wanted": self.wanted,
            "version": self.version,
            "window": asdict(self.window),
            "max_tokens": self.max_tokens,
            "turn": self._turn,
            "shard": self.shard,
            "given": self._given,
            "kind": None if self._kind is None else list(self._kind),
        }
        # groups that are open grow, others stay as they are
        opened = [(group, len(group.members)) for group in self._open.values()]
        return GroupSnapshot(
            self.row, [], [], [], numbers, opened, list(self._ready), list(self._last), counts
        )

    def check(self, state: Mapping[str, Any]) -> None:
        """What a state names is looked up, and refused, when it is restored."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved state. Shards that it names must be there."""
        self.row, self.wanted, self.version = state["row"], state["wanted"], state["version"]
        self.max_tokens = state.get("max_tokens")
        if "window" in state:  # states of before it could change have none
            self.window = StaleWindow(**state["window"])
        self._turn, self.shard, self._given = state["turn"], state["shard"], state["given"]
        self._kind = None if state["kind"] is None else tuple(state["kind"])
        indices: dict[int, tuple[Index, dict[int, int]]] = {}
        self._open = {told[0]: self._group(told, indices) for told in state["open"]}
        self._ready = [self._group(told, indices) for told in state["ready"]]
        self._last = [self._group(told, indices) for told in state["last"]]
        self.counts = Counts.restored(state["counts"])

    def _group(self, told: Any, indices: dict[int, tuple[Index, dict[int, int]]]) -> _Group:
        name, began, members = told
        group = _Group(name, self._config.group_size or 0, began)
        for turn, shard, row in members:
            if shard not in indices and self._source.wait_shard(shard):
                index = self._look(shard)
                places = {int(one): at for at, one in enumerate(index.rows)}
                indices[shard] = index, places
            if shard not in indices or row not in indices[shard][1]:
                raise StateMismatch(
                    "the state names a rollout that is not there",
                    why=f"group {name!r}, shard {shard}, row {row}",
                    do="use the state of another checkpoint",
                )
            index, places = indices[shard]
            group.add(turn, shard, places[row], index)
        return group


@dataclass(frozen=True, slots=True)
class GroupSnapshot(Snapshot):
    """Where a plan of groups stood."""

    numbers: dict[str, Any]
    opened: list[tuple[_Group, int]]
    ready: list[_Group]
    last: list[_Group]
    counts: Counts

    @property
    def asked(self) -> list[int]:
        return [0]

    def as_json(self) -> dict[str, Any]:
        return {
            **self.numbers,
            "open": [group.as_json(count) for group, count in self.opened],
            "ready": [group.as_json() for group in self.ready],
            "last": [group.as_json() for group in self.last],
            "counts": asdict(self.counts),
        }


class Holds(Feeds, Decodes[Checked], Protocol):
    """A source of rollouts."""

    def group_sizes(self, shard: int, rollouts: Rollouts) -> Int32s:
        """Of each rollout of a shard, how many its group has in all; 0 where it is not known."""


class RolloutWindow(Window[Checked]):
    """The rollouts of the shards that batches are made of."""

    content = "rollouts"

    def gather(self, segments: Int32s) -> Rollouts:
        """The rollouts that segments name, in their order."""
        shards = segments[:, 3]
        order = np.argsort(shards, kind="stable")
        parts = []
        for shard in sorted({*shards.tolist()}):
            checked = self.bring((0, shard))
            wanted = segments[order[shards[order] == shard], 4]
            parts.append(checked.rollouts.take(np.searchsorted(checked.rows, wanted)))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return Rollouts.concat(parts).take(back)


class RolloutEngine(Engine[RolloutWindow]):
    """The engine over a plan of groups: a row is a batch."""

    def __init__(
        self, source: Holds, config: RolloutConfig, *, max_bytes: Callable[[], int]
    ) -> None:
        self._source, self._config = source, config
        mix = Mix(PlanConfig(epochs=config.epochs), [source.name], [1.0], [], [config.epochs])
        super().__init__([source], mix, lambda: RolloutWindow([source], max_bytes=max_bytes))

    def _new_plan(self, sources: Sequence[Source], epochs: Sequence[int | None]) -> Plan:
        # all that the engine asks of a plan, a plan of groups answers
        return cast(Plan, GroupPlan(self._source, self._config, self._index))

    @property
    def groups(self) -> GroupPlan:
        """The plan."""
        return cast(GroupPlan, self.plan)

    def _index(self, shard: int) -> Index:
        checked = self.window.bring((0, shard))
        rollouts = checked.rollouts
        sizes = rollouts.group_size
        if self._config.group_size is None:
            sizes = self._source.group_sizes(shard, rollouts)
        trained = np.diff(offsets_of(rollouts.mask)[rollouts.completion_at])
        rewards = rollouts.totals(self._config.reward_weights)
        good = np.flatnonzero(np.abs(rewards) <= MOST_FLOAT)
        if len(good) < len(rewards) and self._config.bad == "raise":
            raise self._unrewarded(rollouts, rewards)
        names = rollouts.group_id.to_pylist()
        refused = sum(fault.reason != "duplicate" for fault in checked.faults)
        return Index(
            rows=checked.rows[good], groups=[names[row] for row in good.tolist()],
            sizes=sizes[good], tokens=rollouts.lengths[good], trained=trained[good],
            oldest=rollouts.oldest[good], newest=rollouts.newest[good], rewards=rewards[good],
            kind=rollouts.kind, refused=refused + len(rewards) - len(good),
        )  # fmt: skip

    def _unrewarded(self, rollouts: Rollouts, rewards: Floats) -> BadRollout:
        """The first rollout of some whose reward is no number, though each of its parts is one."""
        row = int(np.flatnonzero(~(np.abs(rewards) <= MOST_FLOAT))[0])
        named = {name: float(column[row]) for name, column in rollouts.rewards.items()}
        there = ", ".join(name for name, value in named.items() if value == value) or "none"
        asked = ", ".join(self._config.reward_weights or rollouts.rewards)
        error = BadRollout(
            f"rewards: their sum is {rewards[row]:g}" if rewards[row] == rewards[row]
            else "rewards: none of those that count is there",
            where=f'source "{self._source.name}", rollout {rollouts.rollout_id[row].as_py()!r}',
            why=f"what counts is {asked}; it has {there}",
            do='fix reward_weights, or let such rollouts be counted and left out (bad="reject")',
        )  # fmt: skip
        error.row, error.field, error.reason = row, "rewards", "no_reward"
        return error
