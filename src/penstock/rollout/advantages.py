"""How much better each sampled token was than expected: GRPO, RLOO, REINFORCE++, GAE and others.

In:    rewards of rollouts, which of them share a prompt, which of their tokens were sampled; values
Out:   an advantage and a return for each token, 0 where it was not sampled
Keeps: groups are those of one id, of any size and in any order; the numbers of TRL, verl, NeMo-RL
       and OpenRLHF to six digits by `preset`
Never: gives a number that is not finite; loops over rollouts in Python

A group with one rollout, or with one reward in all of them, says nothing about what is better.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Bools, Floats, Int64s, offsets_of
from penstock.errors import BadConfig, BadInput
from penstock.kernels import Kernel
from penstock.options import check_numbers, config_of, suggest
from penstock.plugins import find, origin, register

_go_back = Kernel(
    "penstock.rollout.advantages_kernel",
    "go_back",
    "void(float64[::1], float64[::1], uint8[::1], int64[::1], float64, float64, int64,"
    " float64[::1], float64[::1])",
)

_leave_out = Kernel(
    "penstock.rollout.advantages_kernel",
    "leave_out",
    "void(float64[::1], int64[::1], int64[::1], float64[::1], float64[::1])",
)

MOST: Final = float(np.finfo(np.float32).max)
"""The largest number that a batch can hold."""
SCALES: Final = ("group", "batch", "none")
WHITENS: Final = ("unbiased", "clamped", "none")
WHITEN_EPSILON: Final = 1e-8
"""Added to the variance (`unbiased`), or the least that it counts as (`clamped`)."""
AGGREGATIONS: Final = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

Numbers = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """How rewards become advantages. What is None is as the preset has it for the method."""

    method: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce++, reinforce++_baseline, gae, maxrl, or a registered name."""
    preset: str | None = None
    """Reproduce the numbers of trl, verl, nemo or openrlhf."""
    scale: str | None = None
    """What a difference is divided by: the standard deviation of its `group`, of the `batch`, or
    `none`."""
    leave_one_out: bool | None = None
    """Whether a rollout is compared with the others of its group alone."""
    epsilon: float | None = None
    """Added to the standard deviation."""
    singleton: str | None = None
    """A group of one rollout: its advantage is `zero`, or its `reward` as it is."""
    zero_variance: str = "keep"
    """Groups in which all rewards are equal: `keep` them in what is computed over the batch, or
    `leave_out`, which gives them 0."""
    whiten: str | None = None
    """Over all sampled tokens: mean 0 and variance 1, `unbiased` or `clamped`; or `none`."""
    gamma: float = 1.0
    """What a later reward counts, for each token that it is later."""
    lam: float = 0.95
    """How far GAE trusts rewards more than values."""
    tools: str | None = None
    """Tokens between sampled ones: `carry` over them as if they were not there, or `decay`: count
    them as steps."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for name, known in (
            ("scale", SCALES), ("singleton", ("zero", "reward")), ("whiten", WHITENS),
            ("zero_variance", ("keep", "leave_out")), ("tools", ("carry", "decay")),
            ("preset", tuple(PRESETS)),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value not in known:
                raise BadConfig(f"{name} is {value!r}", do=suggest(value, known))
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadConfig(f"{name} is {getattr(self, name)}", do="choose from 0 to 1")
        if self.epsilon is not None and not 0 <= self.epsilon < np.inf:
            raise BadConfig(f"epsilon is {self.epsilon}", do="choose 0 or more")

    def resolved(self) -> "AdvantageConfig":
        """The same with every choice made: what was given, the preset's, the method's."""
        find("advantage", self.method)
        chosen = {**_DEFAULTS, **_METHODS.get(self.method, {})}
        if self.preset is not None:
            known = PRESETS[self.preset]
            if self.method not in known:
                raise BadConfig(
                    f"{self.preset} has no {self.method}",
                    why=f"it has {', '.join(known)}",
                    do="choose one of them, or no preset",
                )
            chosen |= known[self.method]
        return replace(
            self, **{name: v for name, v in chosen.items() if getattr(self, name) is None}
        )


_DEFAULTS: Final[dict[str, Any]] = {
    "scale": "group", "leave_one_out": False, "epsilon": 1e-6, "singleton": "zero",
    "whiten": "none", "tools": "carry",
}  # fmt: skip
_METHODS: Final[dict[str, dict[str, Any]]] = {
    "dr_grpo": {"scale": "none"},
    "rloo": {"scale": "none", "leave_one_out": True},
    "reinforce++": {"whiten": "unbiased"},
    "reinforce++_baseline": {"whiten": "unbiased"},
    "gae": {"whiten": "unbiased"},
}
_OPENRLHF: Final = {"whiten": "clamped", "tools": "decay"}

PRESETS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "trl": {"grpo": {"epsilon": 1e-4}, "dr_grpo": {}, "rloo": {}},
    "verl": {
        "grpo": {"singleton": "reward"},
        "dr_grpo": {"singleton": "reward"},
        "rloo": {"singleton": "reward"},
        "reinforce++": {},
        "reinforce++_baseline": {"singleton": "reward"},
        "gae": {},
    },
    "nemo": {
        "grpo": {"leave_one_out": True},
        "dr_grpo": {"leave_one_out": True},
        "rloo": {},
        "reinforce++": {"whiten": "clamped"},
        "reinforce++_baseline": {"whiten": "clamped"},
        "gae": {},
    },
    "openrlhf": {
        "grpo": {"epsilon": 1e-9},
        "dr_grpo": {},
        "rloo": {},
        "reinforce++": _OPENRLHF,
        "reinforce++_baseline": {"whiten": "clamped"},
        "gae": _OPENRLHF,
    },
}
"""What each framework does where it differs, by method; a method that it lacks is not here."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Some rollouts, as far as advantages need them; tokens are those of completions, end to end:
    rollout k has at[k] to at[k + 1]."""

    rewards: Floats
    groups: Int64s
    """A number for each rollout: those of one group have the same."""
    at: Int64s
    mask: Bools
    """Which tokens were sampled, and are trained."""
    values: Floats | None = None
    """What a critic expected at each token."""
    token_rewards: Floats | None = None
    """Rewards of single tokens; by default a rollout's reward is that of its last sampled token."""

    @classmethod
    def of(
        cls, rewards: npt.ArrayLike, groups: npt.ArrayLike, masks: Any, *, values: Any = None
    ) -> "Scored":
        """From lists: rewards, ids of groups, and for each rollout the mask of its tokens.

        >>> Scored.of([1.0, 0.0], ["a", "a"], [[1, 1], [1]]).at.tolist()
        [0, 2, 3]
        """
        sizes = [len(mask) for mask in masks]
        flat = [np.asarray(line, np.float64) for line in values] if values is not None else None
        if flat is not None and [len(line) for line in flat] != sizes:
            raise BadInput(
                "values and masks are not of the same tokens",
                why=f"values of {[len(line) for line in flat]} tokens, masks of {sizes}",
                do="give a value for each token of each rollout",
            )
        return cls(
            np.asarray(rewards, np.float64),
            numbered(np.asarray(groups)),
            offsets_of(sizes),
            np.concatenate([np.zeros(0, np.bool_), *(np.asarray(m, np.bool_) for m in masks)]),
            None if flat is None else np.concatenate([np.zeros(0), *flat]),
        )

    @property
    def rows(self) -> Int64s:
        """Of each token, which rollout it is of."""
        return np.repeat(np.arange(len(self.rewards)), np.diff(self.at))

    def spread(self, per_rollout: Numbers) -> Floats:
        """A number of each rollout at its sampled tokens, 0 at the others."""
        found: Floats = np.where(self.mask, np.repeat(per_rollout, np.diff(self.at)), 0.0)
        return found

    def scores(self) -> Floats:
        """The reward of each rollout, over all of its tokens."""
        if self.token_rewards is None:
            return self.rewards
        sums = np.bincount(self.rows, self.token_rewards, len(self.rewards))
        return sums.astype(np.float64)

    def rewards_of_tokens(self) -> Floats:
        """The reward of each token."""
        if self.token_rewards is not None:
            return self.token_rewards
        found = np.zeros(len(self.mask))
        sampled = np.flatnonzero(self.mask)
        last = np.searchsorted(sampled, self.at[1:]) - 1
        found[sampled[last]] = self.rewards
        return found


def numbered(ids: npt.NDArray[Any]) -> Int64s:
    """Ids as numbers from 0 on, in the order in which they come first.

    >>> numbered(np.array(["b", "a", "b"])).tolist()
    [0, 1, 0]
    """
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first, kind="stable")] = np.arange(len(first))
    return order[inverse.reshape(-1)]


@dataclass(frozen=True, slots=True)
class Advantages:
    """What each token gained."""

    advantages: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32]
    """What is left to come at each token, as the method has it; that of a critic is its target."""


Method = Callable[[Scored, AdvantageConfig], Any]
"""Gives a number for each rollout, or for each token, or advantages and returns."""


def compute_advantages(scored: Scored, config: AdvantageConfig | None = None) -> Advantages:
    """The advantages of some rollouts: all of a batch, over all ranks, since groups and whitening
    need all of it.

    >>> scored = Scored.of([1.0, 0.0, 0.0, 1.0], [7, 7, 7, 7], [[1], [1], [1], [1]])
    >>> compute_advantages(scored, AdvantageConfig(preset="verl")).advantages.round(6).tolist()
    [0.8660240173339844, -0.8660240173339844, -0.8660240173339844, 0.8660240173339844]
    """
    config = config_of("config", config, AdvantageConfig).resolved()
    scored = _plain(scored)
    _check(scored, config.method)
    plugin = find("advantage", config.method)
    # a copy: who writes into what it is given would change rewards and masks of the batch
    found = plugin.make(deepcopy(scored), config)
    pair = found if isinstance(found, tuple) else (found, found)
    if len(pair) != 2:
        raise _wrong_shape(plugin.make, config.method, f"it gave {len(pair)} arrays")
    advantages, returns = (_per_token(scored, one, config.method) for one in pair)
    return Advantages(advantages, returns)


def _per_token(scored: Scored, found: Any, method: str) -> npt.NDArray[np.float32]:
    try:
        array = np.asarray(found, np.float64)
    except (TypeError, ValueError) as error:
        raise _wrong_shape(find("advantage", method).make, method, str(error)) from None
    if array.shape == scored.rewards.shape:
        array = scored.spread(array)
    elif array.shape == scored.mask.shape:
        array = np.where(scored.mask, array, 0.0)
    else:
        make = find("advantage", method).make
        raise _wrong_shape(make, method, f"it gave an array of {array.shape}")
    fits = np.abs(array) <= MOST
    if not fits.all():
        row = int(scored.rows[np.flatnonzero(~fits)[0]])
        raise BadInput(
            f"the advantage of rollout {row} is not a finite number",
            where=f"advantage {method!r}",
            do="fix the function, or look at the rewards and values of its group",
        )
    return array.astype(np.float32)


def _wrong_shape(make: Callable[..., Any], method: str, why: str) -> BadConfig:
    return BadConfig(
        f"the advantage {method!r} gives neither a number for each rollout nor one for each token",
        where=origin(make),
        why=why,
        do="return one array of one of the two lengths, or two: advantages and returns",
    )


def _plain(scored: Scored) -> Scored:
    """The same in the types that it names, whatever numbers it was made of."""

    def floats(array: npt.ArrayLike | None) -> Floats:
        return np.ascontiguousarray(array, np.float64)

    try:
        made = replace(
            scored,
            rewards=floats(scored.rewards),
            groups=np.asarray(scored.groups),
            at=np.ascontiguousarray(scored.at, np.int64),
            mask=np.ascontiguousarray(scored.mask),
            values=None if scored.values is None else floats(scored.values),
            token_rewards=None if scored.token_rewards is None else floats(scored.token_rewards),
        )
    except (TypeError, ValueError) as error:
        raise BadInput(
            "rewards, groups, masks and values are not numbers", why=str(error),
            do="give arrays of one dimension; Scored.of makes them of lists",
        ) from None  # fmt: skip
    for name in ("rewards", "groups", "at", "mask", "values", "token_rewards"):
        array = getattr(made, name)
        if array is not None and array.ndim != 1:
            raise BadInput(
                f"{name} has {array.ndim} dimensions",
                do="give arrays of one dimension; Scored.of makes them of lists",
            )
    return made


def _check(scored: Scored, method: str) -> None:
    """Refuse what would give numbers that are none."""
    count, tokens = len(scored.rewards), len(scored.mask)
    starts = scored.at
    if len(starts) and (starts[0] != 0 or (np.diff(starts) < 0).any()):
        raise BadInput(
            "at does not go from 0 up",
            why=f"rollout k has the tokens at[k] to at[k + 1]; it is {starts[:8].tolist()}",
            do="give where each rollout begins, and the number of tokens at the end",
        )
    if len(scored.groups) != count or len(starts) != count + 1 or starts[-1] != tokens:
        raise BadInput(
            "rewards, groups and masks are not of the same rollouts",
            why=f"{count} rewards, {len(scored.groups)} groups, {len(scored.at) - 1} masks",
            do="give one of each for every rollout",
        )
    if scored.mask.dtype != np.bool_ or scored.groups.dtype.kind not in "iu":
        raise BadInput(
            f"the mask is {scored.mask.dtype}, and groups are {scored.groups.dtype}",
            do="give bools and whole numbers; Scored.of makes them of lists",
        )
    for name, array, size in (
        ("reward", scored.rewards, count),
        ("value", scored.values, tokens),
        ("token_reward", scored.token_rewards, tokens),
    ):
        if array is None:
            continue
        if len(array) != size:
            raise BadInput(
                f"there are {len(array)} numbers in {name}s, {size} are needed",
                do="give one for every rollout" if size == count else "give one for every token",
            )
        fits = np.abs(array) <= MOST
        if name == "value":
            fits |= ~scored.mask
        if not fits.all():
            at = int(np.flatnonzero(~fits)[0])
            raise BadInput(
                f"a {name} is {array[at]}",
                where=f"rollout {at if name == 'reward' else scored.rows[at]}",
                do="leave such rollouts out: they have no advantage",
            )
    if (empty := np.flatnonzero(sampled_tokens(scored) == 0)).size:
        raise BadInput(
            "a rollout has no token that was sampled",
            where=f"rollout {empty[0]}",
            do="leave it out: there is nothing to train",
        )
    if method == "gae" and scored.values is None:
        raise BadInput("gae needs values", do="write rollouts with values, or choose another")


def sampled_tokens(scored: Scored) -> Int64s:
    """How many tokens of each rollout were sampled."""
    ends = np.concatenate([[0], np.cumsum(scored.mask, dtype=np.int64)])
    found: Int64s = np.diff(ends[scored.at])
    return found


@dataclass(frozen=True, slots=True)
class _Groups:
    """What the rewards of each rollout's group are like."""

    size: Floats
    mean: Floats
    std: Floats
    """With Bessel's correction; 0 for one, and exactly 0 where all are equal."""
    varies: Bools


def _counted(scored: Scored) -> tuple[Int64s, int]:
    """The group of each rollout by a small number, and how many numbers there are."""
    groups = scored.groups
    if len(groups) and not 0 <= groups.min() <= groups.max() < 2 * len(groups):
        groups = numbered(groups)  # ids of another kind would take as much memory as they are large
    return groups, int(groups.max()) + 1 if len(groups) else 0


def _by_group(scored: Scored, scores: Floats) -> _Groups:
    groups, number = _counted(scored)
    size = np.bincount(groups, minlength=number)
    mean = np.bincount(groups, scores, number) / np.maximum(size, 1)
    least, most = np.full(number, np.inf), np.full(number, -np.inf)
    np.minimum.at(least, groups, scores)
    np.maximum.at(most, groups, scores)
    varies = most > least
    squares = np.bincount(groups, (scores - mean[groups]) ** 2, number)
    std = np.sqrt(np.where(varies, squares / np.maximum(size - 1, 1), 0.0))
    return _Groups(size[groups].astype(np.float64), mean[groups], std[groups], varies[groups])


def _others(scored: Scored, scores: Floats) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the others of each rollout's group; the latter is 0 where
    they are fewer than two, or all equal."""
    groups, number = _counted(scored)
    mean, std = np.empty(len(scores)), np.empty(len(scores))
    order = np.argsort(groups, kind="stable")
    at = offsets_of(np.bincount(groups, minlength=number))
    _leave_out(np.ascontiguousarray(scores), order, at, mean, std)
    return mean, std


def _baselined(scored: Scored, config: AdvantageConfig) -> Floats:
    """Differences of rewards to those of their groups, scaled."""
    scores = scored.scores()
    by = _by_group(scored, scores)
    mean, std = by.mean, by.std
    if config.leave_one_out:
        mean, std = _others(scored, scores)
    found = np.where(by.varies, scores - mean, 0.0)
    assert config.epsilon is not None
    if config.scale == "group":  # where nothing varies there is nothing to scale
        found = found / np.where(std > 0, std + config.epsilon, 1.0)
    elif config.scale == "batch":
        counted = scores if config.zero_variance == "keep" else scores[by.varies]
        whole = float(counted.std(ddof=1)) if len(counted) > 1 else 0.0
        found = found / (whole + config.epsilon or 1.0)
    if config.singleton == "reward":  # as if its mean were 0 and its deviation 1
        alone = scores / (1.0 + config.epsilon) if config.scale == "group" else scores
        found = np.where(by.size == 1, alone, found)
    return found


@register("advantage", "grpo")
def grpo(scored: Scored, config: AdvantageConfig) -> Any:
    """(r - mean) / std of the group."""
    return _whitened(scored, scored.spread(_baselined(scored, config)), config)


@register("advantage", "dr_grpo")
def dr_grpo(scored: Scored, config: AdvantageConfig) -> Any:
    """r - mean of the group."""
    return grpo(scored, config)


@register("advantage", "rloo")
def rloo(scored: Scored, config: AdvantageConfig) -> Any:
    """r - mean of the others of the group."""
    return grpo(scored, config)


@register("advantage", "maxrl")
def maxrl(scored: Scored, config: AdvantageConfig) -> Any:
    """(r - mean) / mean of the group; 0 where the mean is not above 0."""
    scores = scored.scores()
    by = _by_group(scored, scores)
    positive = by.mean > 0
    return np.where(
        positive & by.varies, (scores - by.mean) / np.where(positive, by.mean, 1.0), 0.0
    )


@register("advantage", "reinforce++")
def reinforce_plus_plus(scored: Scored, config: AdvantageConfig) -> Any:
    """What is to come from each token on, whitened over the batch."""
    rewards = scored.rewards_of_tokens()
    returns, _ = _back(scored, rewards, np.zeros(len(rewards)), config, lam=1.0)
    return _whitened(scored, returns, config), returns


@register("advantage", "reinforce++_baseline")
def reinforce_plus_plus_baseline(scored: Scored, config: AdvantageConfig) -> Any:
    """r - mean of the group, whitened over the tokens of the batch."""
    returns = scored.spread(_baselined(scored, replace(config, scale="none")))
    return _whitened(scored, returns, config), returns


@register("advantage", "gae")
def gae(scored: Scored, config: AdvantageConfig) -> Any:
    """Generalised advantage estimation over the values of a critic."""
    assert scored.values is not None
    values = np.where(scored.mask, scored.values, 0.0)
    found, returns = _back(scored, scored.rewards_of_tokens(), values, config, lam=config.lam)
    return _whitened(scored, found, config), returns


def _back(
    scored: Scored, rewards: Floats, values: Floats, config: AdvantageConfig, *, lam: float
) -> tuple[Floats, Floats]:
    advantages, returns = np.empty(len(rewards)), np.empty(len(rewards))
    _go_back(
        np.ascontiguousarray(rewards), np.ascontiguousarray(values), scored.mask.view(np.uint8),
        np.ascontiguousarray(scored.at), config.gamma, lam, int(config.tools == "decay"),
        advantages, returns,
    )  # fmt: skip
    return advantages, returns


def _whitened(scored: Scored, found: Floats, config: AdvantageConfig) -> Floats:
    """Mean 0 and variance 1 over the sampled tokens of the batch."""
    if config.whiten == "none":
        return found
    counted = scored.mask
    if config.zero_variance == "leave_out":
        varies = _by_group(scored, scored.scores()).varies
        counted = counted & np.repeat(varies, np.diff(scored.at))
    values = found[counted]
    if not len(values):
        return np.zeros(len(found))
    # verl and NeMo-RL divide sums by a little more: where all values are equal, it shows
    count = len(values) + (1e-8 if config.preset in ("verl", "nemo") else 0.0)
    mean = float(values.sum()) / count
    if config.preset is None and (values == values[0]).all():
        mean = float(values[0])
    variance = float(((values - mean) ** 2).sum()) / count
    if config.whiten == "unbiased":
        variance = variance * len(values) / max(len(values) - 1, 1) + WHITEN_EPSILON
    else:
        variance = max(variance, WHITEN_EPSILON)
    return np.where(counted, (found - mean) / np.sqrt(variance), 0.0)


# What a trainer needs beside them


def sequence_ratios(logprobs: Numbers, old_logprobs: Numbers, mask: Bools, at: Int64s) -> Floats:
    """GSPO's ratio of each rollout: the geometric mean of those of its sampled tokens.

    >>> new, old = np.array([0.1, -0.1, 0.0, 0.2, 0.2, -0.2]), np.zeros(6)
    >>> sequence_ratios(new, old, np.ones(6, bool), np.array([0, 4, 6])).round(6).tolist()
    [1.051271, 1.0]
    """
    moved = np.where(mask, np.asarray(logprobs, np.float64) - old_logprobs, 0.0)
    rows = np.repeat(np.arange(len(at) - 1), np.diff(at))
    sums = np.bincount(rows, moved, len(at) - 1)
    return np.exp(sums / np.maximum(np.bincount(rows, mask, len(at) - 1), 1))


def loss_weights(
    mask: Bools, at: Int64s, mode: str = "token-mean", *, norm: float | None = None
) -> Floats:
    """What each token's loss counts, so that their sum is the loss of the whole batch: whatever
    ranks and micro-batches it is cut into, and whatever their sizes.

    `norm`, for seq-mean-token-sum-norm, is by default the longest completion.

    >>> mask, at = np.ones(6, bool), np.array([0, 4, 6])
    >>> losses = np.array([1.0, 2, 3, 4, 10, 20])
    >>> [round(float((loss_weights(mask, at, mode) * losses).sum()), 6) for mode in AGGREGATIONS]
    [6.666667, 20.0, 8.75, 5.0]
    """
    if mode not in AGGREGATIONS:
        raise BadConfig(f"the aggregation is {mode!r}", do=suggest(mode, AGGREGATIONS))
    if norm is not None and not 0 < norm < np.inf:
        raise BadConfig(f"norm is {norm}", do="choose a number above 0")
    rows = np.repeat(np.arange(len(at) - 1), np.diff(at))
    trained = np.bincount(rows, mask, len(at) - 1)
    weights = np.ones(len(mask))
    if mode == "token-mean":
        weights /= max(trained.sum(), 1)
    else:
        weights /= max(int((trained > 0).sum()), 1)
    if mode == "seq-mean-token-mean":
        weights /= np.maximum(trained, 1)[rows]
    elif mode == "seq-mean-token-sum-norm":
        longest = int(np.diff(at).max()) if len(at) > 1 else 1
        weights /= longest if norm is None else norm
    return np.where(mask, weights, 0.0)
