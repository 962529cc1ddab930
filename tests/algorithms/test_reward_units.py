"""The unit of a reward: advantages that divide by a deviation of the rewards do not depend on it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.estimators import ESTIMATORS

LEAVE_ONE_OUT = {"leave_one_out": True}
BATCH = {"scale_rewards": "batch"}
BY_COMPONENT = {
    f"{name} {options}": (name, options)
    for name in ("gdpo", "mo_grpo", "gd2po", "dara", "sa_mrpo")
    for options in ({}, LEAVE_ONE_OUT, BATCH, LEAVE_ONE_OUT | BATCH)
}
"""Estimators that divide each component: each component has a unit of its own."""
BY_SUM = {
    "grpo": ("grpo", {}),
    "grpo leave_one_out": ("grpo", LEAVE_ONE_OUT),
    "grpo batch": ("grpo", LEAVE_ONE_OUT | BATCH),
    **{name: (name, {"batch_norm": True}) for name in ("dr_grpo", "rloo", "gpg", "reinforce_plus_plus", "dvao")},
}
"""Estimators that divide the sum, or only the advantages: all components share one unit."""

reward = st.sampled_from([0.0, 0.0, 0.25, 1.0])
batches = st.lists(st.tuples(*[reward] * 8), min_size=4, max_size=4)  # [samples of each of 4 groups of 4][a, b]
scales = st.sampled_from([1e-3, 0.5, 7.0, 100.0])
ONE_RIGHT = [(1, 0, 0, 0, 1, 1, 1, 0), (1, 1, 0, 0, 0, 0, 1, 1)] * 2


def advantages(drawn, scale_a, scale_b, estimator, options):
    columns = np.array(drawn, float).reshape(16, 2) * [scale_a, scale_b]
    bounds = {"bounds": {"a": (0.0, scale_a), "b": (0.0, scale_b)}} if estimator == "sa_mrpo" else {}
    return compute_advantages(
        {"a": columns[:, 0], "b": columns[:, 1]},
        np.repeat(range(4), 4),
        weights={"a": 1.0, "b": 0.5},
        estimator=estimator,
        epsilon=0.0,
        **options,
        **bounds,
    ).values.numpy()


@pytest.mark.parametrize("how", [*BY_COMPONENT, *BY_SUM])
@settings(max_examples=10)
@given(batches, scales, scales)
@example(ONE_RIGHT, 100.0, 100.0)
def test_advantages_do_not_depend_on_the_unit_of_a_reward(how, drawn, scale_a, scale_b):
    estimator, options = {**BY_COMPONENT, **BY_SUM}[how]
    if how in BY_SUM:
        scale_b = scale_a
    found = advantages(drawn, 1.0, 1.0, estimator, options)
    np.testing.assert_allclose(advantages(drawn, scale_a, scale_b, estimator, options), found, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=10)
@given(batches)
def test_a_penalty_with_a_negative_weight_equals_the_mirrored_reward(estimator, drawn):
    """The reward b, from 0 to 1, and the penalty 1 - b with the opposite weight."""
    columns = np.array(drawn, float).reshape(16, 2)
    found = [
        compute_advantages(
            {"a": columns[:, 0], "b": b}, np.repeat(range(4), 4), weights={"a": 1.0, "b": weight}, estimator=estimator
        ).values.numpy()
        for b, weight in ((columns[:, 1], 0.5), (1.0 - columns[:, 1], -0.5))
    ]
    np.testing.assert_allclose(*(values - values.mean() for values in found), atol=1e-9)


def test_leave_one_out_of_nemo_rl_depends_on_the_unit_up_to_the_sign():
    """Right answers, 1, of a group with one right answer and of one with two; the preset reproduces it."""
    columns = np.array([[1, 0, 0, 0], [1, 1, 0, 0]], float).ravel()
    found = [
        compute_advantages(
            {"a": columns * unit, "b": np.zeros(8)}, np.repeat([0, 1], 4), preset="nemo_rl", leave_one_out=True
        ).values.numpy()
        for unit in (1.0, 100.0)
    ]
    assert (found[0][4:6] > 0).all() and (found[1][4:6] < 0).all()
