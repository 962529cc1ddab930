"""Families of criteria in the advantages: equal to components of fixed names, and independent of the order."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gdpo_nemo.algorithms import compute_advantages
from gdpo_nemo.algorithms.estimators import ESTIMATORS, Terms
from gdpo_nemo.utils.import_path import ImportPath

NAMES = sorted(ESTIMATORS)
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AS_ONE = ("dara", "gd2po", "sa_mrpo")
"""Estimators with statistics over the batch, which treat a family as one component."""


def batch(seed: int, groups: int = 5, samples: int = 6, criteria: int = 4):
    """Random verdicts with gaps, weights of both signs by group, and a component of all rows."""
    rng = np.random.default_rng(seed)
    count = groups * samples
    verdicts = rng.integers(0, 2, (count, criteria)).astype(float)
    verdicts[rng.random(verdicts.shape) < 0.1] = np.nan
    weights = np.repeat(rng.choice([-2.0, -1.0, 0.5, 1.0, 3.0], (groups, criteria)), samples, axis=0)
    return np.repeat(np.arange(groups), samples), rng.random(count), verdicts, weights


def advantages(ids, own, verdicts, weights, **options):
    given_weights = {"own": 0.5, "rubric/*": 2.0}
    return compute_advantages(
        {"own": own, "rubric/*": verdicts},
        ids,
        weights=given_weights,
        criterion_weights={"rubric/*": weights},
        lengths=np.arange(len(ids)) + 1.0,
        **options,
    )


@pytest.mark.parametrize("estimator", sorted(set(NAMES) - set(AS_ONE)))
@given(seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_a_rubric_that_all_rows_share_equals_fixed_components(estimator, seed):
    ids, own, verdicts, weights = batch(seed)
    weights[:] = weights[0]
    found = advantages(ids, own, verdicts, weights, family_scale="none", estimator=estimator)
    fixed = compute_advantages(
        {"own": own} | {f"c{j}": verdicts[:, j] for j in range(4)},
        ids,
        weights={"own": 0.5} | {f"c{j}": 2.0 * weights[0, j] for j in range(4)},
        lengths=np.arange(len(ids)) + 1.0,
        estimator=estimator,
    )
    np.testing.assert_allclose(found.values, fixed.values, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.criteria["rubric/*"], fixed.components[:, 1:], rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.components[:, 1], fixed.components[:, 1:].sum(axis=1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{"estimator": name} for name in NAMES] + [{"scale_rewards": "batch"}], ids=str)
@given(seed=st.integers(0, 1000))
@settings(max_examples=5)
def test_the_order_of_criteria_and_rows_changes_nothing(options, seed):
    ids, own, verdicts, weights = batch(seed)
    known = advantages(ids, own, verdicts, weights, **options).values.numpy()
    rng = np.random.default_rng(seed + 1)
    verdicts, weights = verdicts.copy(), weights.copy()
    for group in range(5):  # each row lists its criteria in another order
        order, rows = rng.permutation(4), ids == group
        verdicts[rows], weights[rows] = verdicts[rows][:, order], weights[rows][:, order]
    np.testing.assert_allclose(advantages(ids, own, verdicts, weights, **options).values, known, rtol=0, atol=1e-10)
    order = rng.permutation(len(ids))
    moved = compute_advantages(
        {"own": own[order], "rubric/*": verdicts[order]},
        ids[order],
        weights={"own": 0.5, "rubric/*": 2.0},
        criterion_weights={"rubric/*": weights[order]},
        **options,
    )
    np.testing.assert_allclose(moved.values, known[order], rtol=0, atol=1e-10)


def test_rows_with_3_and_with_40_criteria_are_advantages_of_their_own():
    """Neither the criteria of other rows nor empty slots change a row's z-scores and weights."""
    rng = np.random.default_rng(0)
    sizes, samples = (3, 40, 7), 8
    verdicts = np.full((len(sizes) * samples, max(sizes)), np.nan)
    weights = np.zeros_like(verdicts)
    for group, size in enumerate(sizes):
        rows = slice(group * samples, (group + 1) * samples)
        verdicts[rows, :size] = rng.integers(0, 2, (samples, size))
        weights[rows, :size] = rng.choice([-1.0, 1.0, 2.0], size)
    ids = np.repeat(np.arange(len(sizes)), samples)
    together = compute_advantages(
        {"r/*": verdicts}, ids, criterion_weights={"r/*": weights}, batch_norm=False
    ).values.numpy()
    for group, size in enumerate(sizes):
        rows = ids == group
        expected = np.zeros(samples)
        for j in range(size):
            column = verdicts[rows, j]
            deviation = column.std(ddof=1)
            share = weights[rows, j] / np.abs(weights[rows]).sum(axis=1)
            expected += share * (column - column.mean()) / (deviation + 1e-6)
        np.testing.assert_allclose(together[rows], expected, atol=1e-12)


@given(seed=st.integers(0, 1000), factor=st.floats(0.01, 100), copies=st.integers(2, 4))
@settings(max_examples=20)
def test_scale_sum_does_not_depend_on_the_size_of_a_rubric(seed, factor, copies):
    ids, own, verdicts, weights = batch(seed)
    known = advantages(ids, own, verdicts, weights).values
    np.testing.assert_allclose(advantages(ids, own, verdicts, weights * factor).values, known, atol=1e-9)
    repeated = advantages(ids, own, np.tile(verdicts, copies), np.tile(weights, copies)).values
    np.testing.assert_allclose(repeated, known, atol=1e-9)


def test_statistics_over_the_batch_are_those_of_the_family():
    ids, own, verdicts, weights = batch(3)
    found = advantages(ids, own, verdicts, np.abs(weights), scale_rewards="batch", batch_norm=False)
    spread = verdicts[~np.isnan(verdicts)].std(ddof=1)
    share = np.abs(weights) / np.abs(weights).sum(axis=1, keepdims=True)
    expected = np.zeros(len(ids))
    for group in range(5):
        rows = ids == group
        expected[rows] = np.nansum((verdicts[rows] - np.nanmean(verdicts[rows], axis=0)) * share[rows], axis=1)
    np.testing.assert_allclose(found.components[:, 1], 2.0 * expected / (spread + 1e-6), atol=1e-12)


@pytest.mark.parametrize("estimator", AS_ONE)
def test_estimators_with_batch_statistics_treat_a_family_as_one_component(estimator):
    """A family of one criterion per row equals a component."""
    ids, own, verdicts, _ = batch(5, criteria=1)
    found = advantages(ids, own, verdicts, np.ones_like(verdicts), estimator=estimator)
    fixed = compute_advantages({"own": own, "c": verdicts[:, 0]}, ids, weights=[0.5, 2.0], estimator=estimator)
    np.testing.assert_allclose(found.values, fixed.values, atol=1e-12)


@pytest.mark.parametrize("place", ["custom_estimator.py:squashed", "custom_estimator.py:Fading", "opo.py:opo"])
def test_custom_estimators_apply_the_weights_of_criteria(place):
    """A rubric that all rows share equals fixed components; Fading knows families by their score in the first step."""
    ids, own, verdicts, weights = batch(9)
    weights[:] = weights[0]
    function = ImportPath(str(EXAMPLES / place)).load()
    found = advantages(ids, own, verdicts, weights, family_scale="none", estimator=_made(function))
    fixed = compute_advantages(
        {"own": own} | {f"c{j}": verdicts[:, j] for j in range(4)},
        ids,
        weights={"own": 0.5} | {f"c{j}": 2.0 * weights[0, j] for j in range(4)},
        lengths=np.arange(len(ids)) + 1.0,
        estimator=_made(function),
    )
    np.testing.assert_allclose(found.values, fixed.values, rtol=0, atol=1e-12)


def _made(function):
    return function() if isinstance(function, type) else function


def test_a_custom_estimator_for_components_only_is_refused_with_a_family():
    def plain(table, settings):
        return Terms(table.columns * table.weights[:, None], table.scored)

    ids, own, verdicts, weights = batch(9)
    with pytest.raises(ValueError, match=r"returned components \(5, 5, 30\).* for 5 components of 30 sequences"):
        advantages(ids, own, verdicts, weights, estimator=plain)


def test_gd2po_drops_samples_whose_families_conflict_and_not_their_criteria():
    verdicts = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    found = compute_advantages({"r/*": verdicts}, [0] * 4, estimator="gd2po", batch_norm=False)
    assert (found.components[:, 0] != 0).any() and (found.criteria["r/*"] > 0).any(axis=1).sum() == 4


def test_diagnostics_have_one_entry_per_family():
    ids, own, verdicts, weights = batch(7)
    weights = np.abs(weights)
    weights[:, 3] *= -1
    found = advantages(ids, own, verdicts, weights).diagnostics
    assert found.names == ("own", "rubric/*") and found.weight.tolist() == [0.5, 2.0]
    row = found.metrics()
    judged = ~np.isnan(verdicts)
    best = np.where(weights > 0, 1.0, 0.0)
    assert row["reward/rubric/*/met"] == pytest.approx((verdicts == best)[judged].mean())
    assert row["reward/rubric/*/missing"] == pytest.approx(1 - judged.mean())
    scores = np.nansum(verdicts * weights, axis=1) / (np.abs(weights) * judged).sum(axis=1)
    assert row["reward/rubric/*/mean"] == pytest.approx(scores.mean())
    dead = [len(set(values[~np.isnan(values)])) < 2 for group in range(5) for values in verdicts[ids == group].T]
    assert row["reward/rubric/*/dead_groups"] == pytest.approx(np.mean(dead))
    assert not any("own/met" in key for key in row)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"criterion_weights": {"rubric/*": np.ones((6, 3))}}, r"must have the shape \(6, 2\)"),
        ({"criterion_weights": {"rubric/*": np.full((6, 2), np.nan)}}, "must be finite"),
        ({"criterion_weights": {"rubric/*": np.arange(12.0).reshape(6, 2)}}, "equal within each group"),
        ({"criterion_weights": {"rubrics/*": np.ones((6, 2))}}, r"did you mean 'rubric/\*'"),
        ({"family_scale": "mean"}, "family_scale must be sum or none"),
    ],
)
def test_invalid_weights_of_criteria_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        compute_advantages({"rubric/*": np.eye(6)[:, :2]}, [0, 0, 0, 1, 1, 1], **changes)


def test_1024_rubrics_of_40_criteria_take_less_than_a_second_and_a_gigabyte():
    rng = np.random.default_rng(0)
    verdicts = rng.integers(0, 2, (1024 * 16, 40)).astype(float)
    ids = np.repeat(np.arange(1024), 16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    compute_advantages({"rubric/*": verdicts}, ids)
    assert time.process_time() - start < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # kibibytes
