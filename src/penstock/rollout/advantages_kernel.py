"""The kernel of `advantages`: go back over the tokens of sequences, one by one."""

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
