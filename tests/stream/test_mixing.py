"""How well a pass is mixed: a permutation where it fits the pool, else as the plain pool mixes."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.stream.plan import Plan, PlanConfig

from .sources import MadeSource

Shards = npt.NDArray[np.int64]


def drawn(num_shards: int, rows: int, **options: Any) -> list[Shards]:
    """The shards of the samples in the order of a plan, pass by pass."""
    config = PlanConfig(pack="pad", seq_len=4, **options)
    plan = Plan([MadeSource("a", [[3] * rows for _ in range(num_shards)])], config, [1.0])
    found = plan.take(1 << 30).segments
    places = found[:, 3].astype(np.int64) * rows + found[:, 4]
    each = num_shards * rows
    passes = []
    for number in range(config.epochs or 1):
        mine = slice(number * each, (number + 1) * each)
        assert (found[mine, 2] == number).all(), "a pass ends before the next begins"
        assert (np.sort(places[mine]) == np.arange(each)).all(), "each sample once"
        passes.append(found[mine, 3].astype(np.int64))
    return passes


def plain_pool(num_shards: int, rows: int, pool_size: int, threshold: int, seed: int) -> Shards:
    """Fill, shuffle, draw to the threshold, refill: a pool that holds its samples."""
    rng = np.random.default_rng(seed)
    pool: Shards = np.zeros(0, np.int64)
    found, shard = [], 0
    while len(pool) or shard < num_shards:
        while len(pool) < pool_size and shard < num_shards:
            pool = np.concatenate([pool, np.full(rows, shard)])
            shard += 1
        rng.shuffle(pool)
        stays = threshold if shard < num_shards or len(pool) > threshold else 0
        found.append(pool[stays:])
        pool = pool[:stays]
    return np.concatenate(found)


def unevenness(shards: Shards, num_shards: int, parts: int) -> list[float]:
    """How far the shares of the shards are from even in each part of a pass: the chi-square for
    each degree of freedom, 1 for a permutation."""
    found = []
    for part in np.array_split(shards, parts):
        counts = np.bincount(part, minlength=num_shards)
        expected = len(part) / num_shards
        kept = 1 - len(part) / len(shards)  # drawn without replacement
        found.append(((counts - expected) ** 2 / expected).sum() / (num_shards - 1) / kept)
    return found


@pytest.mark.parametrize("ramp", [False, None])
@pytest.mark.parametrize(("num_shards", "rows"), [(8, 5_000), (40, 500)])
def test_what_fits_the_pool_is_a_permutation(num_shards: int, rows: int, ramp: bool | None) -> None:
    """In every tenth of every pass; chi-square with n - 1 degrees of freedom, p > 0.0001 each."""
    most = 1 + 4.5 * np.sqrt(2 / (num_shards - 1)) + 6 / (num_shards - 1)
    options = {"pool_size": max(2 * num_shards * rows, 20_000), "ramp": ramp, "epochs": 3}
    passes = drawn(num_shards, rows, **options)
    for one in passes:
        assert max(unevenness(one, num_shards, 10)) < most
    assert not np.array_equal(passes[0], passes[1])


@pytest.mark.parametrize("times", [1.0, 1.5, 4.0, 12.0])
def test_a_larger_pass_is_mixed_as_by_the_plain_pool(times: float) -> None:
    """Over 10 seeds each: in no tenth of a pass is it more than a hundredth less even."""
    rows, pool_size = 100, 4_000
    num_shards = round(times * pool_size / rows)
    mine, plain = np.zeros(10), np.zeros(10)
    for seed in range(10):
        (one,) = drawn(num_shards, rows, pool_size=pool_size, ramp=False, seed=seed)
        mine += unevenness(one, num_shards, 10)
        other = plain_pool(num_shards, rows, pool_size, pool_size * 3 // 4, seed)
        plain += unevenness(other, num_shards, 10)
    noise = 10 * 4 * np.sqrt(2 / (num_shards - 1) / 10)
    assert (mine <= plain * 1.01 + noise).all(), (mine / 10, plain / 10)


def test_the_first_and_the_last_samples_come_from_all_over_the_pool() -> None:
    (found,) = drawn(40, 500, pool_size=20_000, ramp=False)
    for part in np.array_split(found, 20):
        assert len(np.unique(part)) == 40


def test_a_ramp_begins_with_one_shard_and_holds_in_the_first_pass_alone() -> None:
    first, second = drawn(40, 500, pool_size=20_000, ramp=True, epochs=2)
    assert set(first[:500]) == {0}
    assert len(np.unique(first[500:1000])) > 1
    assert len(np.unique(second[:500])) == 40
