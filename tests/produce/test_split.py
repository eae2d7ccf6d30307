"""Which documents are set aside: the share that was asked for, by doc_id alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.produce.columns import ValRule

IDS = np.random.default_rng(1).integers(0, 2**64, 100_000, dtype=np.uint64)


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.5, 0.99])
@pytest.mark.parametrize("ids", [IDS, np.arange(100_000, dtype=np.uint64)], ids=["random", "dense"])
def test_the_share_is_what_was_asked_for(
    fraction: float, ids: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> None:
    found = ValRule.of(0, fraction).is_val(ids).mean()
    sigma = (fraction * (1 - fraction) / len(ids)) ** 0.5
    assert abs(found - fraction) < 5 * sigma


def test_none_and_all() -> None:
    assert not ValRule.of(3, 0.0).is_val(IDS).any()
    assert ValRule.of(3, 1.0).is_val(IDS).all()


def test_another_seed_is_another_choice() -> None:
    first, second = ValRule.of(0, 0.5).is_val(IDS), ValRule.of(1, 0.5).is_val(IDS)
    assert 0.49 < (first == second).mean() < 0.51


def test_a_larger_share_holds_the_smaller() -> None:
    small, large = ValRule.of(5, 0.01).is_val(IDS), ValRule.of(5, 0.2).is_val(IDS)
    assert not (small & ~large).any()


WORD = 2**64 - 1


def slow_splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, WORD), st.integers(0, 2**63 - 1), st.floats(0, 1))
def test_the_rule_as_it_is_written_down(doc_id: int, seed: int, fraction: float) -> None:
    split = ValRule.of(seed, fraction)
    expected = slow_splitmix64(doc_id ^ split.salt) < split.threshold
    assert split.is_val(np.array([doc_id], np.uint64)).tolist() == [expected]


def test_golden() -> None:
    """The choice is part of the format: it may not change between two releases."""
    split = ValRule.of(7, 0.25)
    assert (split.salt, split.threshold) == (9692007884514770863, 2**62)
    assert split.is_val(np.arange(16, dtype=np.uint64)).nonzero()[0].tolist() == [9, 12, 14]
