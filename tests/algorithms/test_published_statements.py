"""What is really true where papers and documentation say something else, and the numbers they get right."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from gdpo_nemo.algorithms import compute_advantages

GROUP = [0, 0, 0, 0]


def advantages(rewards, ids=None, **options):
    ids = [0] * len(rewards) if ids is None else ids
    return compute_advantages(np.asarray(rewards, dtype=float), ids, **options).values


def test_splitting_an_equal_total_over_two_rewards_gives_nothing():
    """Paper section 3.1 claims a signal for r1 = (1, 1, 0), r2 = (0, 0, 1)."""
    rewards = [[1, 0], [1, 0], [0, 1]]
    assert advantages(rewards, batch_norm=False).abs().max() < 1e-15
    assert advantages(rewards).abs().max() == 0


@given(arrays(float, st.integers(2, 12), elements=st.floats(-5, 5, width=16)), st.floats(-10, 10))
def test_two_equal_weights_and_a_constant_total_always_give_zero(first, total):
    rewards = np.stack([first, total - first], axis=1)
    assert advantages(rewards, batch_norm=False).abs().max() < 1e-9
    assert advantages(rewards).abs().max() == 0


def test_three_rewards_with_a_constant_total_do_carry_signal():
    values = advantages([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]], batch_norm=False, epsilon=0.0)
    torch.testing.assert_close(values, torch.tensor([1, -1, -1, 1]).double() * 0.13397459621556135)


def test_documented_motivating_example_is_zero_and_weights_help():
    """A tutorial motivates GDPO with format and correctness (0, 3), (1, 2), (2, 1), (3, 0)."""
    rewards = [[0, 3], [1, 2], [2, 1], [3, 0]]
    assert advantages(rewards, batch_norm=False).abs().max() == 0
    weighted = advantages(rewards, weights=[1, 2], batch_norm=False, epsilon=0.0)
    torch.testing.assert_close(
        weighted, torch.tensor([1.161895, 0.387298, -0.387298, -1.161895]).double(), rtol=0, atol=1e-6
    )
    assert advantages(rewards, weights=[1, 2], estimator="grpo").unique().numel() == 4


def test_one_reward_equals_grpo_only_up_to_one_scalar_per_batch():
    """Documentation says "equivalent"; batch norm enlarges by 1.08 here, and by 1.58 once half the groups are dead."""
    rewards = np.array([1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0])[:, None]
    ids = np.repeat(np.arange(4), 4)
    plain = advantages(rewards, ids, estimator="grpo", epsilon=0.0)
    normed = advantages(rewards, ids, preset="paper", batch_epsilon=0.0)
    torch.testing.assert_close(normed / plain, torch.full((16,), (15 / 12) ** 0.5).double(), rtol=1e-5, atol=0)
    rewards[8:] = 1
    plain = plain[:8]
    normed = advantages(rewards, ids, preset="paper", batch_epsilon=0.0)
    torch.testing.assert_close(normed[:8] / plain, torch.full((8,), (15 / 6) ** 0.5).double(), rtol=1e-5, atol=0)
    assert round((15 / 6) ** 0.5, 3) == 1.581
    assert normed[8:].abs().max() < 1e-15


def test_statistics_over_live_rows_do_not_enlarge_other_advantages_when_groups_die():
    rewards = np.array([[1], [0], [0], [0], [1], [1], [0], [0]])
    ids = np.repeat([0, 1], 4)
    alone = advantages(rewards, ids)
    joined = advantages(
        np.concatenate([rewards, np.ones((80, 1))]), np.concatenate([ids, np.repeat(np.arange(2, 12), 8)])
    )
    torch.testing.assert_close(joined[:8], alone, rtol=0, atol=0)
    assert joined[8:].abs().max() == 0


def test_the_eight_rollout_example():
    rewards = [[1, 3], [1, -3], [0, -3], [0, 3], [1, 1], [1, -1], [1, 0.5], [1, -3]]
    values = advantages(rewards, [0] * 4 + [1] * 4, preset="paper")
    expected = [1.527525, 0, -1.527525, 0, 0.797510, -0.184041, 0.552122, -1.165591]
    torch.testing.assert_close(values, torch.tensor(expected).double(), rtol=0, atol=1e-5)


def test_two_rollouts_show_the_sample_standard_deviation():
    """Table of the paper at G = 2: totals (0, 1) give 0.7071, (0, 2) give 1.4142 with GDPO and 0.7071 with GRPO."""
    one = [[0, 0], [1, 0]]
    two = [[0, 0], [1, 1]]
    half = 0.5**0.5
    for rewards, scale in ((one, half), (two, 2 * half)):
        expected = torch.tensor([-scale, scale]).double()
        torch.testing.assert_close(advantages(rewards, batch_norm=False, epsilon=0.0), expected)
        grpo = advantages(rewards, estimator="grpo", epsilon=0.0)
        torch.testing.assert_close(grpo, torch.tensor([-half, half]).double())


def test_the_trace_of_epsilon_of_opposed_rewards_does_not_become_an_advantage():
    """Rewards of different scale cancel up to epsilon; the formula as printed makes +-1 of what is left."""
    rewards = np.array([[0, 3], [0, 3], [3, -3], [3, -3], [0, 3], [3, -3], [0, 3], [3, -3]])
    ids = np.repeat([0, 1], 4)
    assert advantages(rewards, ids, batch_norm=False).abs().max() > 0
    assert advantages(rewards, ids).abs().max() == 0
    assert advantages(rewards, ids, preset="paper", batch_epsilon=1e-12).abs().max() > 0.5


def test_small_rewards_and_large_weights_are_not_taken_as_rounding_errors():
    rewards = np.array([[0, 1], [1, 1], [0, 0], [1, 0], [1, 1], [0, 1], [1, 0], [0, 0]])
    ids = np.repeat([0, 1], 4)
    for estimator in ("gdpo", "grpo", "dr_grpo", "dvao"):
        for rewards_scale, weight in ((1e-5, 1.0), (1.0, 1e4), (1.0, 1e-4)):
            values = advantages(
                rewards * rewards_scale,
                ids,
                weights=[weight, 2 * weight],
                estimator=estimator,
                batch_norm=True,
                epsilon=1e-12,
            )
            torch.testing.assert_close(values.std(), torch.tensor(1.0).double(), rtol=0, atol=1e-3)


def test_a_small_bonus_beside_large_opposed_rewards_survives_in_the_normalised_sum():
    rewards = [[0, 3000, 1], [3000, 0, 0], [0, 3000, 0], [3000, 0, 1]] * 2
    values = advantages(rewards, np.repeat([0, 1], 4), estimator="grpo", batch_norm=True)
    assert (values.sign() == torch.tensor([1, -1, -1, 1] * 2)).all()


@pytest.mark.parametrize("close", [0.999, 1 - 1e-5, 1 - 1e-7])
def test_opposed_rewards_of_unlike_weight_leave_the_heavier_one_at_full_size(close):
    """There is no threshold between weights that are close and weights that are equal: what is left is a reward, not
    noise."""
    rewards = np.array([[0, 1], [1, 0], [1, 0], [0, 1]] * 128)
    ids = np.repeat(np.arange(128), 4)
    expected = advantages(rewards, ids, weights=[1, 0.5], epsilon=1e-12, batch_epsilon=0.0)
    got = advantages(rewards, ids, weights=[1, close], epsilon=1e-12, batch_epsilon=0.0)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    assert advantages(rewards, ids, weights=[1, 1]).abs().max() == 0


def test_rewards_that_cancel_up_to_the_rounding_of_float64_give_0():
    rng = np.random.default_rng(0)
    first = rng.random(32)
    rewards = np.stack([first, 0.3 - 7.0 * first], axis=1)
    assert advantages(rewards, np.repeat(np.arange(4), 8)).abs().max() == 0
