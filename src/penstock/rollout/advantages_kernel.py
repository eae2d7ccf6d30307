"""The kernels of `advantages`: over the tokens of sequences, and over the rewards of groups."""

from typing import Any

from penstock.simd import njit


@njit
def go_back(
    rewards: Any, values: Any, mask: Any, at: Any, gamma: Any, lam: Any, decays: Any,
    advantages: Any, returns: Any,
) -> None:  # fmt: skip
    """Advantages and returns of tokens, from the last token of each sequence to its first.

    Tokens that were not sampled are passed over; with `decays` they count as steps without value
    and reward. Both are 0 there in the results.
    """
    for row in range(len(at) - 1):
        next_value = 0.0
        carried = 0.0
        for t in range(at[row + 1] - 1, at[row] - 1, -1):
            if mask[t]:
                carried = rewards[t] + gamma * next_value - values[t] + gamma * lam * carried
                next_value = values[t]
                advantages[t] = carried
                returns[t] = carried + next_value
            else:
                advantages[t] = 0.0
                returns[t] = 0.0
                if decays:
                    carried = gamma * next_value + gamma * lam * carried
                    next_value = 0.0


@njit
def leave_out(scores: Any, order: Any, at: Any, means: Any, stds: Any) -> None:
    """Of each score, mean and standard deviation of the others of its group: `order` has group
    after group, which begin at `at`.

    What is before one and what is after it are put together. Taking one out of the sums of all
    loses digits: where the one is 1,000 and the others differ by 0.001, all of them.
    """
    for group in range(len(at) - 1):
        mean, squares = 0.0, 0.0
        for k in range(at[group], at[group + 1]):
            one = order[k]
            means[one], stds[one] = mean, squares
            away = scores[one] - mean
            mean += away / (k - at[group] + 1)
            squares += away * (scores[one] - mean)
        mean, squares = 0.0, 0.0
        for k in range(at[group + 1] - 1, at[group] - 1, -1):
            one = order[k]
            before, after = k - at[group], at[group + 1] - 1 - k
            away = mean - means[one]
            others = before + after
            if others > 0:
                stds[one] += squares + away * away * before * after / others
                means[one] += away * after / others
            else:
                means[one] = scores[one]
            stds[one] = (stds[one] / (others - 1)) ** 0.5 if others > 1 else 0.0
            away = scores[one] - mean
            mean += away / (after + 1)
            squares += away * (scores[one] - mean)
