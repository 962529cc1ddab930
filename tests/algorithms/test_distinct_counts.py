"""How many different advantages binary reward vectors can get: figure 3 of the GDPO paper, by enumeration."""

from itertools import chain, combinations_with_replacement
from math import comb

import numpy as np
import pytest

from gdpo_nemo.algorithms import compute_advantages

# (GRPO, GRPO without std, GDPO) for groups of 2, 3, ... 8, counted in exact arithmetic.
COUNTS = {
    2: [(2, 3, 3), (4, 6, 6), (7, 10, 14), (11, 15, 26), (16, 21, 38), (22, 28, 59), (29, 36, 81)],
    3: [(2, 4, 4), (6, 10, 10), (14, 20, 45), (27, 35, 118), (46, 56, 254), (72, 84, 537), (106, 120, 1002)],
    4: [(2, 5, 5), (8, 15, 15), (23, 35, 127), (52, 70, 460), (101, 126, 1641), (177, 210, 4705), (288, 330, 13574)],
}
CASES = [(n, size, expected) for n, row in COUNTS.items() for size, expected in enumerate(row, start=2)]


def all_groups(n: int, size: int) -> np.ndarray:
    """Every multiset of `size` reward vectors in {0, 1}^n: float [multisets, size, n]."""
    multisets = chain.from_iterable(combinations_with_replacement(range(2**n), size))
    codes = np.fromiter(multisets, dtype=np.int64).reshape(-1, size)
    return (codes[:, :, None] >> np.arange(n) & 1).astype(np.float64)


def distinct(rewards: np.ndarray, estimator: str, weights: list[float] | None = None) -> int:
    """Number of different sorted advantage vectors over all groups."""
    groups, size, n = rewards.shape
    ids = np.repeat(np.arange(groups), size)
    result = compute_advantages(
        rewards.reshape(-1, n), ids, weights=weights, estimator=estimator, batch_norm=False, epsilon=0.0
    )
    levels = np.rint(np.sort(result.values.numpy().reshape(groups, size)) * 1e7).astype(np.int64)
    multipliers = np.random.default_rng(0).integers(1, 2**62, size) | 1
    return len(np.unique((levels * multipliers).sum(axis=1)))


@pytest.mark.parametrize(("n", "size", "expected"), CASES)
def test_distinct_advantages_of_binary_groups_are_the_exact_counts(n, size, expected):
    rewards = all_groups(n, size)
    assert len(rewards) == comb(size + 2**n - 1, size)
    assert tuple(distinct(rewards, estimator) for estimator in ("grpo", "dr_grpo", "gdpo")) == expected


@pytest.mark.parametrize(("n", "size", "expected"), CASES)
def test_counts_without_std_follow_the_closed_form(n, size, expected):
    assert expected[1] == comb(size + n - 1, n)
    if n == 2:
        assert expected[0] == comb(size + 1, 2) - (size - 1)


@pytest.mark.parametrize(("weights", "size", "expected"), [([1, 0.5], 4, (14, 23)), ([1, 0.25], 8, (127, 148))])
def test_only_unequal_weights_separate_rewards_that_a_plain_sum_merges(weights, size, expected):
    rewards = all_groups(2, size)
    assert tuple(distinct(rewards, estimator, weights) for estimator in ("grpo", "gdpo")) == expected
