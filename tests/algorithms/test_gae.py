"""Generalized advantage estimation is its definition, a sum over all later errors, and TRL's and verl's recursion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms.ppo import discounted_sums, explained_variance, gae, whitened

FACTORS = st.floats(0, 1)
NUMBERS = st.floats(-10, 10)
STEPS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=12)


def by_definition(rewards, values, gamma, lam):
    """A_t = (1 - lam) sum_n lam^(n-1) A_t^(n) over all n-step advantages, the last of them with all remaining weight
    (arXiv 1506.02438 eq. 15 and 16, for a sequence that ends)."""
    count = len(rewards)
    found = []
    for t in range(count):
        total, left = 0.0, 1.0
        for n in range(1, count - t + 1):
            rest = sum(gamma**k * rewards[t + k] for k in range(n))
            bootstrap = gamma**n * values[t + n] if t + n < count else 0.0
            weight = left if t + n == count else left * (1 - lam)
            total += weight * (rest + bootstrap - values[t])
            left *= lam
        found.append(total)
    return np.array(found)


@given(STEPS, FACTORS, FACTORS)
def test_gae_is_the_weighted_mean_of_all_n_step_advantages(steps, gamma, lam):
    rewards, values = map(np.array, zip(*steps))
    advantages, returns = gae(rewards, values, gamma, lam)
    np.testing.assert_allclose(advantages, by_definition(rewards, values, gamma, lam), rtol=1e-9, atol=1e-8)
    np.testing.assert_allclose(returns, advantages + values, rtol=1e-12, atol=1e-12)


@given(STEPS, FACTORS)
def test_returns_with_lambda_1_are_the_discounted_rewards_for_all_values(steps, gamma):
    rewards, values = map(np.array, zip(*steps))
    _, returns = gae(rewards, values, gamma, 1.0)
    whole = [sum(gamma**k * reward for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
    np.testing.assert_allclose(returns, whole, rtol=1e-9, atol=1e-8)
    np.testing.assert_allclose(discounted_sums(rewards, gamma), whole, rtol=1e-9, atol=1e-8)


@given(STEPS, FACTORS)
def test_with_lambda_0_an_advantage_is_one_step_of_surprise(steps, gamma):
    rewards, values = map(np.array, zip(*steps))
    advantages, _ = gae(rewards, values, gamma, 0.0)
    np.testing.assert_allclose(advantages, rewards + gamma * np.append(values[1:], 0) - values, atol=1e-9)


def test_values_that_know_the_rewards_leave_no_advantage():
    rewards = np.array([0.0, 1.0, 0.0, 2.0])
    for lam in (0.0, 0.5, 1.0):
        advantages, returns = gae(rewards, np.array([3.0, 3.0, 2.0, 2.0]), 1.0, lam)
        np.testing.assert_array_equal(advantages, 0.0)
        np.testing.assert_array_equal(returns, [3, 3, 2, 2])


def test_a_sequence_without_actions_has_no_advantages():
    assert [len(part) for part in gae(np.zeros(0), np.zeros(0), 1.0, 0.95)] == [0, 0]


def recursion_on_a_padded_batch(rewards, values, mask, gamma, lam):
    """As TRL's PPOTrainer has it (trl/experimental/ppo before 1.13, which left it out), written down anew: values and
    rewards behind the end are 0, advantages are whitened over the batch with the unbiased variance."""
    last, columns = torch.zeros(len(rewards), dtype=torch.float64), []
    values, rewards = values.masked_fill(~mask, 0), rewards.masked_fill(~mask, 0)
    for t in reversed(range(rewards.size(1))):
        following = values[:, t + 1] if t + 1 < rewards.size(1) else 0.0
        last = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        columns.insert(0, last)
    advantages = torch.stack(columns, 1)
    returns = advantages + values
    chosen = advantages[mask]
    white = (advantages - chosen.mean()) / (chosen.var() + 1e-8).sqrt()
    return advantages, returns, white.masked_fill(~mask, 0)


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6), st.integers(0, 999), FACTORS, FACTORS)
def test_advantages_of_a_batch_are_those_of_trl(lengths, seed, gamma, lam):
    draw = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    rewards, values = (torch.randn(mask.shape, generator=draw, dtype=torch.float64) for _ in range(2))
    raw, returns, white = recursion_on_a_padded_batch(rewards, values, mask, gamma, lam)
    ours = [gae(r[:n].numpy(), v[:n].numpy(), gamma, lam) for r, v, n in zip(rewards, values, lengths)]
    for row, n, (advantages, of_one) in zip(range(len(lengths)), lengths, ours):
        np.testing.assert_allclose(advantages, raw[row, :n], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(of_one, returns[row, :n], rtol=1e-9, atol=1e-9)
    for row, n, part in zip(range(len(lengths)), lengths, whitened([advantages for advantages, _ in ours])):
        np.testing.assert_allclose(part, white[row, :n], rtol=1e-6, atol=1e-6)


def test_whitened_values_have_mean_0_and_deviation_1_over_all_parts():
    parts = whitened([np.array([1.0, 5.0]), np.array([2.0]), np.array([9.0, -3.0, 4.0])])
    together = np.concatenate(parts)
    assert [len(part) for part in parts] == [2, 1, 3]
    assert abs(together.mean()) < 1e-12 and together.std(ddof=1) == pytest.approx(1, abs=1e-8)
    assert np.abs(np.concatenate(whitened([np.full(4, 0.1), np.full(3, 0.1)]))).max() < 1e-9
    assert whitened([]) == [] and whitened([np.array([3.0])])[0] == 3.0


def test_explained_variance_is_1_for_the_truth_and_0_for_a_constant():
    targets = np.array([1.0, 2.0, 4.0])
    assert explained_variance(targets + 5, targets) == 1.0
    assert explained_variance(np.full(3, 7.0), targets) == 0.0
    assert explained_variance(-targets, targets) == -3.0
    assert np.isnan(explained_variance(targets, np.ones(3))) and np.isnan(explained_variance(np.zeros(0), np.zeros(0)))
