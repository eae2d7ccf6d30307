"""Advantages: known answers, the numbers of other frameworks, and what no order may change."""

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import plugins
from penstock.errors import BadConfig, BadInput
from penstock.plugins import register
from penstock.rollout import advantages as module
from penstock.rollout.advantages import (
    AGGREGATIONS,
    PRESETS,
    AdvantageConfig,
    Scored,
    compute_advantages,
    loss_weights,
    sequence_ratios,
)

from .oracles import draw, farthest, scored

METHODS = ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce++", "reinforce++_baseline", "gae")


def made(rewards: list[float], groups: Any, tokens: int = 1, **options: Any) -> list[float]:
    """The advantage of the first token of each rollout."""
    given = Scored.of(rewards, groups, [[1] * tokens] * len(rewards))
    found = compute_advantages(given, AdvantageConfig(**options)).advantages
    return [float(found[at]) for at in given.at[:-1]]


CASE_A: list[float] = [1, 0, 0, 1, 1, 1]
GROUPS_A = "aaaabb"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"method": "grpo", "preset": "verl"}, [0.866024, -0.866024, -0.866024, 0.866024, 0, 0]),
        ({"method": "dr_grpo", "preset": "verl"}, [0.5, -0.5, -0.5, 0.5, 0, 0]),
        ({"method": "rloo", "preset": "verl"}, [0.666667, -0.666667, -0.666667, 0.666667, 0, 0]),
        (
            {"method": "reinforce++_baseline", "preset": "verl"},
            [1.190238, -1.190238, -1.190238, 1.190238, 0, 0],
        ),
        (
            {"method": "reinforce++", "preset": "verl"},
            [0.687184, -1.374369, -1.374369, 0.687184, 0.687184, 0.687184],
        ),
    ],
)
def test_case_a_as_verl_has_it(options: dict[str, Any], expected: list[float]) -> None:
    assert made(CASE_A, list(GROUPS_A), 3, **options) == pytest.approx(expected, abs=6e-7)


def test_case_a_as_trl_and_nemo_have_it() -> None:
    first, ids = CASE_A[:4], [0] * 4
    signs = [1, -1, -1, 1]
    trl = [0.865875 * sign for sign in signs]
    assert made(first, ids, preset="trl") == pytest.approx(trl, abs=6e-7)
    nemo = [1.154698 * sign for sign in signs]
    assert made(first, ids, preset="nemo") == pytest.approx(nemo, abs=6e-7)


def test_case_b_leaves_one_out() -> None:
    rewards = np.arange(1.0, 7.0)
    given = Scored.of(rewards, [0] * 3 + [1] * 3, [[1]] * 6)
    mean, std = module._others(given, rewards)
    assert mean.tolist() == pytest.approx([2.5, 2, 1.5, 5.5, 5, 4.5])
    assert std.tolist() == pytest.approx([0.707107, 1.414214, 0.707107] * 2, abs=6e-7)


def test_case_b_gae() -> None:
    given = Scored.of([5.0], [0], [[1, 1, 1]], values=[[1, 2, 3]])
    config = AdvantageConfig(method="gae", lam=0, gamma=1, whiten="none")
    found = compute_advantages(given, config)
    assert found.advantages.tolist() == [1, 1, 2]
    assert found.returns.tolist() == [2, 3, 5]


def test_case_e_aggregations() -> None:
    mask, at = np.ones(8, np.bool_), np.array([0, 4, 8])
    mask[6:] = False
    losses = np.array([1.0, 2, 3, 4, 10, 20, 99, 99])
    found = [float((loss_weights(mask, at, mode) * losses).sum()) for mode in AGGREGATIONS]
    assert found == pytest.approx([6.666667, 20, 8.75, 5], abs=6e-7)
    assert loss_weights(mask, at, "seq-mean-token-sum-norm", norm=8).max() == 1 / 16


def test_case_e_sequence_ratios() -> None:
    moved = np.array([0.1, -0.1, 0, 0.2, 9.0, 0.2, -0.2])
    mask = np.array([1, 1, 1, 1, 0, 1, 1], np.bool_)  # what a tool wrote moves nothing
    found = sequence_ratios(moved, np.zeros(7), mask, np.array([0, 5, 7]))
    assert found.tolist() == pytest.approx([1.051271, 1.0], abs=6e-7)


def test_the_numbers_of_trl_verl_and_openrlhf() -> None:
    """As their own functions gave them: `make oracles` asks again, on 1,000 batches of each."""
    asked = set()
    for line in Path(__file__).with_name("expected.jsonl").read_text().splitlines():
        recorded = json.loads(line)
        for name, away in farthest(recorded["batch"], recorded["answer"]).items():
            assert away < 1e-6, name
            asked.add(name.removesuffix("/returns"))
    presets = {f"{p}/{m}" for p in ("trl", "verl", "openrlhf") for m in PRESETS[p]}
    assert asked == {*presets, "trl/grpo_batch", "verl/partition"}


def nemo_by_hand(rewards: list[float], groups: list[str], *, scales: bool) -> list[float]:
    """NeMo-RL's leave-one-out, rollout by rollout: it does not install where these tests run."""
    found = []
    for k, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, r in enumerate(rewards) if groups[j] == group and j != k]
        if not others:
            found.append(0.0)
            continue
        away = reward - float(np.mean(others))
        std = float(np.std(others, ddof=1)) if len(others) > 1 else 0.0
        found.append(away / (std + 1e-6) if scales and std > 1e-12 else away)
    return found


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize(("method", "scales"), [("grpo", True), ("dr_grpo", False)])
def test_the_numbers_of_nemo(seed: int, method: str, scales: bool) -> None:
    batch = draw(seed)
    found = made(batch["rewards"], batch["groups"], method=method, preset="nemo")
    expected = nemo_by_hand(batch["rewards"], batch["groups"], scales=scales)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@given(
    rewards=st.lists(
        st.one_of(st.floats(-1e30, 1e30), st.sampled_from([0.0, 1.0, 0.1, 1e-3, 1e6, -1e12])),
        min_size=2,
        max_size=12,
    ),
    size=st.integers(1, 6),
)
@settings(max_examples=200, deadline=None)
def test_leaving_one_out_loses_no_digit(rewards: list[float], size: int) -> None:
    """Beside exact fractions: one reward may be a trillion times the others."""
    groups = [k % (1 + len(rewards) // size) for k in range(len(rewards))]
    mean, std = module._others(Scored.of(rewards, groups, [[1]] * len(rewards)), np.array(rewards))
    for k, group in enumerate(groups):
        others = [Fraction(r) for j, r in enumerate(rewards) if groups[j] == group and j != k]
        if not others:
            assert (mean[k], std[k]) == (rewards[k], 0.0)
            continue
        middle = sum(others) / len(others)
        squares = sum((one - middle) ** 2 for one in others)
        most = float(max(map(abs, others)))
        assert mean[k] == pytest.approx(float(middle), rel=1e-12, abs=1e-14 * most)
        exact = float(squares / max(1, len(others) - 1)) ** 0.5 if len(others) > 1 else 0.0
        assert std[k] == pytest.approx(exact, rel=1e-7)
        assert (std[k] == 0) == (exact == 0)


def test_one_far_away_does_not_hide_the_others() -> None:
    rewards = [1000.0, 0.0, 0.001, 0.002]
    found = made(rewards, [0] * 4, preset="nemo")
    assert found[0] == pytest.approx((1000 - 0.001) / (0.001 + 1e-6), rel=1e-6)
    rewards = [1e6, 0.0, 0.001, 0.002]
    found = made(rewards, [0] * 4, preset="nemo")
    assert found[0] == pytest.approx((1e6 - 0.001) / (0.001 + 1e-6), rel=1e-6)


batches = st.integers(0, 10_000).map(draw)
options = st.builds(
    AdvantageConfig,
    method=st.sampled_from(METHODS),
    scale=st.sampled_from([None, "group", "batch", "none"]),
    leave_one_out=st.sampled_from([None, True, False]),
    epsilon=st.sampled_from([None, 0.0, 1e-4]),
    singleton=st.sampled_from([None, "zero", "reward"]),
    zero_variance=st.sampled_from(["keep", "leave_out"]),
    whiten=st.sampled_from([None, "unbiased", "clamped", "none"]),
    tools=st.sampled_from([None, "carry", "decay"]),
    gamma=st.sampled_from([1.0, 0.9, 0.0]),
)


@given(batch=batches, config=options, seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_the_order_of_rollouts_changes_nothing(
    batch: dict[str, Any], config: AdvantageConfig, seed: int
) -> None:
    order = np.random.default_rng(seed).permutation(len(batch["rewards"])).tolist()
    moved = {
        name: [batch[name][k] for k in order] for name in ("rewards", "groups", "masks", "values")
    }
    one, two = scored(batch), scored(moved)
    found, again = compute_advantages(one, config), compute_advantages(two, config)
    for before, after in (
        (found.advantages, again.advantages), (found.returns, again.returns)
    ):  # fmt: skip
        parts = np.split(before, one.at[1:-1])
        expected = np.concatenate([parts[k] for k in order])
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-5)


@given(batch=batches, config=options)
@settings(max_examples=200, deadline=None)
def test_every_number_is_finite_and_tools_get_none(
    batch: dict[str, Any], config: AdvantageConfig
) -> None:
    given_ = scored(batch)
    found = compute_advantages(given_, config)
    for array in (found.advantages, found.returns):
        assert np.isfinite(array).all()
        assert not array[~given_.mask].any()


@given(batch=batches, config=options)
@settings(max_examples=100, deadline=None)
def test_what_stands_at_masked_tokens_is_not_looked_at(
    batch: dict[str, Any], config: AdvantageConfig
) -> None:
    one = scored(batch)
    assert one.values is not None
    values = np.where(one.mask, one.values, np.nan)
    two = Scored(one.rewards, one.groups, one.at, one.mask, values)
    np.testing.assert_array_equal(
        compute_advantages(one, config).advantages, compute_advantages(two, config).advantages
    )


def test_uneven_groups_are_grouped_by_id() -> None:
    """A reshape would compare rollouts of different prompts."""
    rewards, groups = [1.0, 0, 9, 9, 1, 9], ["a", "a", "b", "b", "a", "b"]
    found = made(rewards, groups, method="dr_grpo")
    assert found == pytest.approx([1 / 3, -2 / 3, 0, 0, 1 / 3, 0])


def test_equal_rewards_give_exactly_0() -> None:
    rewards = [0.1] * 7 + [0.3] * 3
    for method in METHODS[:4]:
        found = made(rewards, [0] * 7 + [1] * 3, method=method, epsilon=0.0)
        assert found == [0.0] * 10, method
    found = made([0.1] * 7, [0] * 7, method="reinforce++")
    assert found == [0.0] * 7


def test_singletons() -> None:
    assert made([3.0, 1, 0], [0, 1, 1], singleton="zero")[0] == 0
    assert made([3.0, 1, 0], [0, 1, 1], singleton="reward", scale="none")[0] == 3
    for preset, expected in (("verl", 3.0), ("trl", 0.0), ("nemo", 0.0), ("openrlhf", 0.0)):
        assert made([3.0, 1, 0], [0, 1, 1], preset=preset)[0] == pytest.approx(expected, rel=2e-6)


def test_groups_without_variance_left_out_of_the_batch() -> None:
    rewards, groups = [1.0, 0, 5, 5], [0, 0, 1, 1]
    kept = made(rewards, groups, method="grpo", scale="batch")
    left = made(rewards, groups, method="grpo", scale="batch", zero_variance="leave_out")
    assert kept[0] == pytest.approx(0.5 / np.std(rewards, ddof=1), abs=1e-5)
    assert left[0] == pytest.approx(0.5 / np.std([1, 0], ddof=1), abs=1e-5)
    assert left[2:] == [0, 0]


def test_maxrl() -> None:
    found = made([1.0, 0, 0, 0, -1, 0], [0, 0, 0, 0, 1, 1], method="maxrl")
    assert found == pytest.approx([3, -1, -1, -1, 0, 0])


def test_tools_carry_or_decay() -> None:
    """Three tokens of a tool between two that were sampled."""
    given_ = Scored.of([1.0], [0], [[1, 0, 0, 0, 1]], values=[[0.5, 9, 9, 9, 0.25]])
    found = {}
    for tools in ("carry", "decay"):
        config = AdvantageConfig(method="gae", gamma=0.9, lam=1, whiten="none", tools=tools)
        found[tools] = compute_advantages(given_, config).advantages.tolist()
    last = 1 - 0.25
    assert found["carry"] == pytest.approx([0.9 * 1 - 0.5, 0, 0, 0, last])
    assert found["decay"] == pytest.approx([0.9**4 * 1 - 0.5, 0, 0, 0, last])


def test_rewards_of_single_tokens() -> None:
    given_ = Scored.of([0.0, 0.0], [0, 0], [[1, 1], [1, 1]])
    given_ = Scored(
        given_.rewards, given_.groups, given_.at, given_.mask, None, np.array([1.0, 1, 0, 1])
    )
    found = compute_advantages(given_, AdvantageConfig(method="dr_grpo"))
    assert found.advantages.tolist() == [0.5, 0.5, -0.5, -0.5]
    found = compute_advantages(given_, AdvantageConfig(method="reinforce++", whiten="none"))
    assert found.returns.tolist() == [2, 1, 1, 1]


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {kind: dict(found) for kind, found in plugins._known.items()}
    monkeypatch.setattr(plugins, "_known", known)


@pytest.mark.usefixtures("_own_registry")
def test_a_custom_advantage() -> None:
    @register("advantage", "signs")
    def signs(scored: Scored, config: AdvantageConfig) -> Any:
        return np.sign(scored.rewards)

    assert made([3.0, -2, 0], [0, 0, 0], 2, method="signs") == [1, -1, 0]

    @register("advantage", "three")
    def three(scored: Scored, config: AdvantageConfig) -> Any:
        return scored.mask, scored.mask, scored.mask

    with pytest.raises(BadConfig, match="neither a number for each rollout nor one for each") as e:
        made([1.0], [0], method="three")
    assert "it gave 3 arrays" in e.value.why

    @register("advantage", "short")
    def short(scored: Scored, config: AdvantageConfig) -> Any:
        return np.zeros(7)

    with pytest.raises(BadConfig) as e:
        made([1.0], [0], method="short")
    assert e.value.why == "it gave an array of (7,)"
    assert "short" in e.value.where

    @register("advantage", "nothing")
    def nothing(scored: Scored, config: AdvantageConfig) -> Any:
        with np.errstate(invalid="ignore"):
            return scored.rewards / np.array([1.0, 0.0])

    with pytest.raises(BadInput, match="the advantage of rollout 1 is not a finite number"):
        made([1.0, 0.0], [0, 0], 2, method="nothing")


@pytest.mark.usefixtures("_own_registry")
def test_what_a_custom_advantage_writes_into_stays_as_it_was() -> None:
    @register("advantage", "writes")
    def writes(scored: Scored, config: AdvantageConfig) -> Any:
        scored.rewards[:] -= scored.rewards.mean()
        scored.mask[:] = True
        return scored.rewards

    scored = Scored.of([1.0, 0.0], ["a", "a"], [[1, 0], [1, 1]])
    found = compute_advantages(scored, AdvantageConfig(method="writes"))
    assert scored.rewards.tolist() == [1, 0]
    assert scored.mask.tolist() == [True, False, True, True]
    assert found.advantages.tolist() == [0.5, 0, -0.5, -0.5]


@pytest.mark.usefixtures("_own_registry")
def test_a_custom_advantage_of_texts_is_refused() -> None:
    @register("advantage", "texts")
    def texts(scored: Scored, config: AdvantageConfig) -> Any:
        return ["good"] * len(scored.rewards)

    with pytest.raises(BadConfig, match="'texts' gives neither a number for each rollout") as e:
        made([1.0], [0], method="texts")
    assert "could not convert string" in e.value.why


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"method": "grop"}, "there is no advantage called 'grop'"),
        ({"preset": "trrl"}, "preset is 'trrl'"),
        ({"preset": "trl", "method": "gae"}, "trl has no gae"),
        ({"scale": "groups"}, "scale is 'groups'"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -1.0}, "lam is -1.0"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"epsilon": float("nan")}, "epsilon is nan"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig) as e:
        AdvantageConfig(**wrong).resolved()
    assert text in str(e.value)
    assert e.value.do


@pytest.mark.parametrize(
    ("rewards", "groups", "masks", "text"),
    [
        ([1.0, float("nan")], [0, 0], [[1], [1]], "a reward is nan"),
        ([float("inf"), 1.0], [0, 0], [[1], [1]], "a reward is inf"),
        ([1e300, 1.0], [0, 0], [[1], [1]], "a reward is 1e\\+300"),
        ([1.0, 1.0], [0, 0], [[1], [0]], "no token that was sampled"),
        ([1.0, 1.0], [0], [[1], [1]], "not of the same rollouts"),
    ],
)
def test_what_has_no_advantage_is_refused(
    rewards: list[float], groups: list[int], masks: list[list[int]], text: str
) -> None:
    with pytest.raises(BadInput, match=text):
        compute_advantages(Scored.of(rewards, groups, masks))


def test_values_that_are_missing_or_wrong_are_refused() -> None:
    config = AdvantageConfig(method="gae")
    with pytest.raises(BadInput, match="gae needs values"):
        compute_advantages(Scored.of([1.0], [0], [[1]]), config)
    with pytest.raises(BadInput, match="a value is nan"):
        compute_advantages(Scored.of([1.0], [0], [[1]], values=[[np.nan]]), config)
    for masks, values in (([[1]], [[1, 2]]), ([[1, 1], [1]], [[1], [1, 2]])):
        with pytest.raises(BadInput, match="values and masks are not of the same tokens"):
            Scored.of([1.0] * len(masks), [0] * len(masks), masks, values=values)
    one = Scored.of([1.0], [0], [[1]])
    with pytest.raises(BadInput, match="there are 2 numbers in values, 1 are needed"):
        compute_advantages(replace(one, values=np.ones(2)), config)


def test_numbers_that_batches_cannot_hold_are_refused() -> None:
    """In float32 they would be infinite."""
    most = float(np.finfo(np.float32).max)
    with pytest.raises(BadInput, match="the advantage of rollout 0 is not a finite number"):
        made([most, -most], [0, 0], method="dr_grpo", leave_one_out=True)
    assert made([most, -most], [0, 0], method="grpo") == pytest.approx([0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize("numbers", [[-5, -5, 7, 7], [10**12, 10**12, 3, 3]])
def test_groups_may_have_any_numbers(numbers: list[int]) -> None:
    one = Scored.of([1.0, 0, 3, 0], [0, 0, 1, 1], [[1]] * 4)
    for method in ("grpo", "rloo", "maxrl"):
        config = AdvantageConfig(method=method)
        other = replace(one, groups=np.array(numbers))
        expected = compute_advantages(one, config).advantages
        assert compute_advantages(other, config).advantages.tolist() == expected.tolist()


def test_masks_of_numbers_are_refused() -> None:
    one = Scored.of([1.0, 0], [0, 0], [[1, 0], [1]])
    with pytest.raises(BadInput, match="the mask is int64, and groups are int64"):
        compute_advantages(replace(one, mask=one.mask.astype(np.int64)))
    with pytest.raises(BadInput, match="the mask is bool, and groups are float64"):
        compute_advantages(replace(one, groups=np.zeros(2)))  # type: ignore[arg-type]


def test_aggregations_that_are_not_known_are_refused() -> None:
    with pytest.raises(BadConfig, match="the aggregation is 'token-men'"):
        loss_weights(np.ones(1, np.bool_), np.array([0, 1]), "token-men")
    for norm in (0.0, -1.0, float("nan")):
        with pytest.raises(BadConfig, match=f"norm is {norm}"):
            loss_weights(np.ones(1, np.bool_), np.array([0, 1]), AGGREGATIONS[3], norm=norm)


def test_nothing_is_nothing() -> None:
    empty = Scored.of([], [], [])
    for method in METHODS[:-1]:
        assert len(compute_advantages(empty, AdvantageConfig(method=method)).advantages) == 0


@pytest.mark.parametrize("method", ["grpo", "rloo", "gae", "reinforce++"])
def test_offsets_that_are_none_are_refused(method: str) -> None:
    """The kernels go where they say, also beyond what is there."""
    rewards, groups, mask = np.ones(2), np.zeros(2, np.int64), np.ones(4, np.bool_)
    for at in ([0, 9, 4], [-5, 2, 4], [1, 2, 4]):
        scored = Scored(rewards, groups, np.array(at), mask, np.zeros(4))
        with pytest.raises(BadInput, match="at does not go from 0 up"):
            compute_advantages(scored, AdvantageConfig(method=method))


@pytest.mark.parametrize("method", ["grpo", "rloo", "gae", "reinforce++"])
def test_numbers_of_all_types_will_do(method: str) -> None:
    config = AdvantageConfig(method=method)
    plain = Scored.of([1.0, 0.0], [0, 0], [[1, 0], [1, 1]], values=[[1, 2], [3, 4]])
    expected = compute_advantages(plain, config).advantages.tolist()
    wide = np.array([[1, 0], [1, 1]], np.bool_)
    others = [
        Scored(
            np.array([1, 0]), np.zeros(2, np.int32), np.array([0, 2, 4], np.int32), plain.mask,
            np.array([1, 2, 3, 4], np.float32),
        ),
        Scored(
            np.array([1.0, 7, 0, 7])[::2], plain.groups, plain.at, wide.repeat(2, 1).ravel()[::2],
            np.arange(1.0, 5),
        ),
    ]  # fmt: skip
    for other in others:
        assert compute_advantages(other, config).advantages.tolist() == expected


def test_shapes_and_words_are_refused() -> None:
    groups, at, mask = np.zeros(2, np.int64), np.array([0, 1, 2]), np.ones(2, np.bool_)
    with pytest.raises(BadInput, match="rewards has 2 dimensions"):
        compute_advantages(Scored(np.ones((2, 1)), groups, at, mask))
    words = np.array(["a", "b"])
    with pytest.raises(BadInput, match="are not numbers"):
        compute_advantages(Scored(words, groups, at, mask))


@pytest.mark.parametrize("method", ["grpo", "gae", "reinforce++"])
def test_rollouts_without_a_token_are_refused(method: str) -> None:
    scored = Scored.of([1.0], ["a"], [[]], values=[[]])
    with pytest.raises(BadInput, match="a rollout has no token that was sampled"):
        compute_advantages(scored, AdvantageConfig(method=method))
