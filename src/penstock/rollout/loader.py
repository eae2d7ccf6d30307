"""Rollouts for reinforcement learning: whole groups with their advantages, from files or live.

In:    rollouts in memory, in files, or in a dataset that inference workers write to; how rewards
       become advantages, how sequences are shared out
Out:   `RolloutBatch` after batch; a state of a few kilobytes that resumes exactly
Keeps: what the engine keeps; every rollout in one batch, or counted with the reason; advantages
       over the whole batch, whatever its ranks
Never: trains on a group in part, on a rollout twice, or on a number that is none

    shards ─▶ GroupPlan ─▶ groups of a batch ─▶ advantages ─▶ balance ─▶ this rank's sequences
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from penstock.options import config_of, whole
from penstock.rollout.advantages import AdvantageConfig
from penstock.rollout.batch import RolloutBatch, Share, make_batch
from penstock.rollout.plan import GROUP, Counts, RolloutConfig, RolloutEngine, StaleWindow
from penstock.rollout.sources import Given, open_rollouts
from penstock.stream.plan import Rows
from penstock.supply.balance import BalanceConfig
from penstock.supply.pretrain import EngineLoader, NumBatches, no_more
from penstock.supply.settings import LoaderRun
from penstock.supply.sources.open import find_boundaries
from penstock.tokenize.tokenizer import Tokenizer

STATE_FORMAT: Final = 1
WINDOW: Final = tuple(about.name for about in fields(StaleWindow))
"""Settings that may be others at a resume."""


class RolloutDataLoader(EngineLoader):
    """Batches of whole groups of rollouts, with advantages; of files, or while they are made."""

    _format = STATE_FORMAT
    _engine: RolloutEngine

    def __init__(
        self,
        rollout_data: Given,
        tokenizer: Any = None,
        compute_advantages: bool = True,
        *,
        batch_size: int = 16,
        pack: bool = False,
        rollouts: RolloutConfig | None = None,
        advantages: AdvantageConfig | None = None,
        balance: BalanceConfig | None = None,
        streaming: bool = True,
        run: LoaderRun | None = None,
    ) -> None:
        """`rollout_data` is a list of records, or a path: docs/rollouts.md.

        A batch has `batch_size` rollouts for each rank, and as many more as make its groups whole;
        with `pack` the sequences of a micro-batch are one row, end to end.
        """
        self.run = config_of("run", run, LoaderRun)
        self.config = config_of("rollouts", rollouts, RolloutConfig)
        advantages = config_of("advantages", advantages, AdvantageConfig)
        balance = config_of("balance", balance, BalanceConfig)
        self.rank, self.world_size = self.run.found_rank()
        self.batch_size = whole("batch_size", batch_size, 1)
        self.tokenizer = None if tokenizer is None else Tokenizer.load(tokenizer)
        self._share = Share(
            self.rank,
            self.world_size,
            advantages.resolved() if compute_advantages else None,
            balance,
            packed=bool(pack),
            pad=max(0, find_boundaries(self.tokenizer, None, None)[2]),
        )
        self.source = open_rollouts(
            rollout_data, self.tokenizer, self.run, bad=self.config.bad,
            retokenize=self.config.retokenize, streaming=streaming,
        )  # fmt: skip
        self.source.check_reward_names(self.config.reward_weights or ())
        self._engine = RolloutEngine(self.source, self.config, max_bytes=self.run.memory())
        self.version: int | None = None
        """The version of the weights that the trainer has; None: as many as batches were handed
        out. Set it before each batch, on every rank alike."""
        self._window = StaleWindow.of(self.config)
        self.changes: list[dict[str, Any]] = []
        """The resumes at which the window of staleness was another than before: the `step`, and of
        each setting what it was and what it became. States remember them."""
        self._note()

    def __iter__(self) -> Iterator[RolloutBatch]:
        return self.get_iterator()

    def get_iterator(self) -> Iterator[RolloutBatch]:
        with self._engine.own():
            if self.is_over:
                self._engine.begin_round()
                self.is_over = False
        return self._batches()

    def _batches(self) -> Iterator[RolloutBatch]:
        while (batch := self._next(self.batch_size)) is not None:
            yield batch

    def get_batch(self, batch_size: int) -> RolloutBatch:
        batch = self._next(whole("batch_size", batch_size, 1))
        if batch is None:
            raise no_more(self, self._engine.round)
        return batch

    def _next(self, count: int) -> RolloutBatch | None:
        with self.all_or_nothing():
            engine = self._engine
            engine.settle()
            plan = engine.groups
            plan.wanted = count * self.world_size
            plan.version = self._version()
            plan.window = self._window
            # otherwise it is an error, of the rollout
            plan.max_tokens = (
                self._share.balance.max_tokens if self.config.bad == "reject" else None
            )
            rows = engine.ahead(1)
            if not len(rows.fills):
                self.is_over = True
                return None
            batch = self._made(rows)
            engine.advance(1)
            self.step += 1
            self._note()
            return batch

    def _version(self) -> int | None:
        """The trainer's version, where it matters."""
        if self.version is not None:
            return whole("version", self.version, 0)
        return None if self.config.max_staleness is None else self.step

    def _made(self, rows: Rows) -> RolloutBatch:
        """This rank's part of a batch, with what was computed over all of it."""
        rollouts = self._engine.window.gather(rows.segments)
        plan = self._engine.groups
        metadata: dict[str, Any] = {
            "step": self.step,
            "first_row": rows.first,
            "rollouts": len(rollouts),
            "groups": int(rows.segments[-1, GROUP]) + 1,
            "sampling": sampling_of(plan.counts),
        }
        if plan.version is not None:
            behind = plan.version - rollouts.oldest
            metadata |= {
                "version": plan.version,
                "staleness_mean": float(behind.mean()),
                "staleness_max": int(behind.max()),
            }
        rewards = rollouts.totals(self.config.reward_weights)
        return make_batch(rollouts, rewards, rows.segments, self._share, metadata)

    def reset(self) -> None:
        super().reset()
        self.changes = []

    def _expected(self, state: Mapping[str, Any]) -> dict[str, Any]:
        known = state.get("config", {}) if isinstance(state, Mapping) else {}
        return self._settings() | {name: known[name] for name in WINDOW if name in known}

    def _adopt(self, state: Mapping[str, Any]) -> None:
        before, mine = state["config"], self._settings()
        found = {name: [before[name], mine[name]] for name in WINDOW if before[name] != mine[name]}
        self.changes = [*state.get("changes", [])]
        if found:
            self.changes.append({"step": state["step"], **found})

    def _also(self, step: int | None) -> dict[str, Any]:
        # those after an earlier step were not made yet
        known = [one for one in self.changes if step is None or one["step"] <= step]
        return {"changes": known} if known else {}

    def get_num_batches(self) -> NumBatches:
        """About how many batches the rollouts make that are known now, if all are used."""
        known = self.source.num_rollouts() * self.config.epochs * self.config.repeats
        count = known // (self.batch_size * self.world_size)
        return NumBatches(count, final=self.source.is_closed)

    @property
    def counts(self) -> Counts:
        """What became of all rollouts that were read so far."""
        return self._engine.groups.counts

    def _settings(self) -> dict[str, Any]:
        # not `bad`: who is stopped by what cannot be trained on goes on from there without it
        config = self.config
        weights = config.reward_weights
        names = (
            "group_size", "max_staleness", "stale", "give_up_after", "zero_variance", "partial",
            "max_open_groups", "epochs", "repeats", "last", "retokenize",
        )  # fmt: skip
        return {
            **{name: getattr(config, name) for name in names},
            "reward_weights": None if weights is None else dict(weights),
            "tokenizer": None if self.tokenizer is None else self.tokenizer.fingerprint,
        }


def sampling_of(counts: Counts) -> dict[str, Any]:
    """What became of groups so far, as JSON."""
    told: dict[str, Any] = {"rollouts_read": counts.read, "rollouts_refused": counts.refused}
    for name in (
        "used", "stale", "zero_variance", "incomplete", "future", "wrong_size", "unlike",
        "too_long", "short",
    ):  # fmt: skip
        tally = getattr(counts, name)
        if tally.groups or name == "used":
            told[name] = {
                "groups": tally.groups, "rollouts": tally.rollouts, "tokens": tally.tokens
            }  # fmt: skip
    if counts.bias is not None:
        told["bias"] = round(counts.bias, 4)
    return told
