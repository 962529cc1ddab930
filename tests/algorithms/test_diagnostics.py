"""What the diagnosis of a batch measures, and when it raises its voice."""

import numpy as np
import pytest
import torch

from gdpo_nemo.algorithms import compute_advantages

IDS = np.repeat([0, 1], 4)


def diagnose(columns, ids=IDS, **options):
    return compute_advantages(columns, ids, **options).diagnostics


def test_statistics_per_component():
    columns = {"a": [1, 0, 1, 0, 1, 1, 1, 1], "b": [4, 2, 1, None, None, None, None, None], "c": [None] * 8}
    result = diagnose(columns)
    metrics = result.metrics()
    assert metrics["reward/a/mean"] == 0.75 and metrics["reward/a/dead_groups"] == 0.5
    assert np.isclose(metrics["reward/b/std"], np.std([4, 2, 1], ddof=1))
    assert metrics["reward/b/missing"] == 0.625 and metrics["reward/b/dead_groups"] == 0
    assert metrics["advantage/dead_groups"] == 0.5
    np.testing.assert_allclose(result.saturation, [0.75, 4 / 9, np.nan])
    assert [key for key in metrics if key.startswith("reward/c/")] == ["reward/c/missing", "reward/c/weight"]


def test_row_contains_shares_of_the_advantage_and_conflicts_of_components():
    """Of b's three rows that pull, a pulls the other way in two; c, where all agree, goes with a."""
    columns = {"a": [3, 1, 0, 0], "b": [0, 1, 1, 0], "c": [3, 1, 0, 0]}
    row = diagnose(columns, [0, 0, 0, 0]).metrics()
    terms = compute_advantages(columns, [0, 0, 0, 0]).components.numpy()
    a, b = np.sign(terms[:, 0]), np.sign(terms[:, 1])
    assert row["reward/a/conflicts"] == row["reward/b/conflicts"] == np.mean((a != b)[(a != 0) & (b != 0)]) > 0
    assert sum(row[f"reward/{name}/effective_weight"] for name in "abc") == pytest.approx(1)
    assert row["reward/b/effective_weight"] < 0.1 < 0.3 < row["reward/a/effective_weight"]
    assert row["reward/a/saturation"] == pytest.approx(1 / 3)
    assert "reward/a/conflicts" not in diagnose({"a": [1, 0]}, [0, 0]).metrics()


def test_unmeasurable_metrics_are_absent():
    metrics = diagnose({"a": [1.0, 2.0]}, [0, 0], valid=np.array([False, False])).metrics()
    assert set(metrics) == {"advantage/distinct", "advantage/distinct_if_summed", "reward/a/weight"}


def test_masked_rows_enter_no_statistic():
    columns = {"a": [1, 0, 1, 0, 1, 1, 0, 0], "b": [0, 0, 1, 1, 1, 0, 1, 0]}
    valid = np.array([True] * 4 + [False] * 4)
    short = {name: column[:4] for name, column in columns.items()}
    assert diagnose(columns, valid=valid).metrics() == diagnose(short, IDS[:4]).metrics()


def test_distinct_advantages_count_the_rows_that_summing_would_merge():
    """The totals are 1, 1, 1, 0: two levels, though the first rollout earned its 1 with the rarer reward."""
    result = diagnose({"a": [1, 0, 0, 0], "b": [0, 1, 1, 0]}, [0] * 4)
    assert (result.distinct, result.distinct_if_summed) == (3, 2)
    same = diagnose({"a": [1, 0, 0, 0], "b": [0, 1, 1, 0]}, [0] * 4, estimator="grpo")
    assert (same.distinct, same.distinct_if_summed) == (2, 2)


def test_effective_weights_are_shares_of_the_advantages_variance():
    rng = np.random.default_rng(0)
    columns = {"a": rng.random(4000), "b": rng.random(4000), "c": rng.random(4000)}
    ids = np.repeat(np.arange(500), 8)
    result = diagnose(columns, ids, weights={"a": 2, "b": 1, "c": 0})
    np.testing.assert_allclose(result.effective_weight, [0.8, 0.2, 0], atol=0.02)
    np.testing.assert_allclose(result.nominal_weight, [2 / 3, 1 / 3, 0])
    assert [result.metrics()[f"reward/{name}/weight"] for name in "abc"] == [2, 1, 0]
    assert np.isclose(result.effective_weight.sum(), 1)


def test_raw_scales_decide_under_grpo_and_not_under_gdpo():
    """A correctness in {-3, 3} beside a format in {0, 1}: the sum hardly sees the format."""
    rng = np.random.default_rng(1)
    columns = {"correct": rng.choice([-3, 3], 800), "format": rng.choice([0, 1], 800)}
    ids = np.repeat(np.arange(100), 8)
    grpo, gdpo = (diagnose(columns, ids, estimator=name) for name in ("grpo", "gdpo"))
    assert grpo.effective_weight[1] < 0.06 and abs(gdpo.effective_weight[1] - 0.5) < 0.05
    assert grpo.alerts[0].startswith("component 'format' is being ignored") and not gdpo.alerts


def test_pairs_of_components():
    opposed = diagnose({"a": [1, 0, 1, 0], "b": [0, 1, 0, 1], "c": [1, 0, 1, 0]}, [0] * 4, weights=[1, 1, 3])
    np.testing.assert_allclose(opposed.sign_conflicts, [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    np.testing.assert_allclose(opposed.correlation, [[1, -1, 1], [-1, 1, -1], [1, -1, 1]])


def test_alerts_name_components_that_train_nothing():
    columns = {"a": [1, 0, 1, 0] * 2, "dead": [1] * 4 + [0] * 4, "absent": [None] * 8, "logged": [1] * 8}
    alerts = diagnose(columns, weights={"a": 1, "dead": 1, "absent": 1, "logged": 0}).alerts
    assert alerts == [
        "component 'dead' is constant in every group (mean 0.5), so it has no training signal",
        "component 'absent' is missing in every row, so it has no training signal",
    ]


@pytest.mark.parametrize(
    "values, told",
    [
        ([0.0, 4e-10, 0.0, 1e-10], True),  # smaller than the range that counts as constant
        ([1e6, 1e6 + 1e-4, 1e6, 1e6], True),  # a small part of its offset
        ([0.3, 0.1 + 0.2, 0.3, 0.3], False),  # rounding
        ([0.5] * 4, False),
        ([0.0, 4e-7, 0.0, 1e-7], None),  # shrunk by epsilon
    ],
)
def test_a_component_below_the_range_that_counts_as_constant_is_reported(values, told):
    found = diagnose({"a": values + [0.25] * 4, "b": [0, 1] * 4}).alerts
    assert any("'a' differs within groups by at most 1e-09 x max(1, |reward|)" in line for line in found) == bool(told)
    assert any("'a' is constant in every group" in line for line in found) == (told is False)


@pytest.mark.parametrize(
    "estimator, weights, dead",
    [("gdpo", [1, 1, 1], [0]), ("gdpo", [0, 1, 1], [0, 1]), ("grpo", [1, 1, 1], [0, 2]), ("grpo", [1, 2, 1], [0])],
)
def test_a_group_is_dead_if_the_estimator_gives_none_of_its_samples_an_advantage(estimator, weights, dead):
    """The totals of group 2 are equal, so GRPO trains nothing, and GDPO does because of its three components."""
    rewards = np.array(
        [[1, 1, 1]] * 4 + [[1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]] + [[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 0]]
    )
    found = compute_advantages(rewards, np.repeat(range(3), 4), weights=weights, estimator=estimator)
    assert [g for g in range(3) if not found.has_advantage[4 * g : 4 * g + 4].any()] == dead
    assert found.diagnostics.metrics()["advantage/dead_groups"] == len(dead) / 3


def test_diagnosis_is_in_no_particular_row_order():
    rng = np.random.default_rng(2)
    rewards = rng.integers(0, 2, (64, 3)).astype(float)
    ids = np.repeat(np.arange(8), 8)
    order = rng.permutation(64)
    first = diagnose(rewards, ids).metrics()
    second = diagnose(rewards[order], ids[order]).metrics()
    assert first.keys() == second.keys()
    torch.testing.assert_close(list(first.values()), list(second.values()))


def test_the_description_names_components_conflicts_and_alerts():
    ids = np.repeat(np.arange(3), 4)
    columns = {"a": [1, 0, 1, 0] * 3, "b": [0, 1, 0, 1] * 3, "dead": [1] * 12, "absent": [None] * 12}
    lines = diagnose(columns, ids, weights=[1, 2, 1, 1]).describe().splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["a", "b", "dead", "absent"]
    assert "100.0%" in lines[3] and "nan" not in "".join(lines)
    assert lines[5].startswith("2 distinct advantages, 2 if the rewards were summed; 0.0% of the groups")
    assert lines[6] == (
        "'a' and 'b' pull in opposite directions in 100% of the samples in which both terms are non-zero "
        "(correlation -1.00)"
    )
    assert lines[7] == "component 'a' is outvoted: the advantage moves against it (weight 20%)"
    assert len(lines) == 10 and lines[8:] == diagnose(columns, ids, weights=[1, 2, 1, 1]).alerts[1:]


@pytest.mark.parametrize("groups, agree, reported", [(32, 0.5, 0.0), (32, 0.3, 1.0), (1, 0.0, 0.0)])
def test_components_are_opposed_only_if_their_signs_differ_more_often_than_by_chance(groups, agree, reported):
    rng = np.random.default_rng(0)
    found = []
    for _ in range(40):
        a = rng.integers(0, 2, 8 * groups)
        b = np.where(rng.random(len(a)) < agree, a, 1 - a)
        found.append("opposite" in diagnose({"a": a, "b": b}, np.repeat(np.arange(groups), 8)).describe())
    assert np.mean(found) == pytest.approx(reported, abs=0.05)


@pytest.mark.parametrize("estimator", ["gdpo", "mo_grpo"])
def test_a_reward_of_epsilons_scale_is_called_shrunk_and_a_larger_one_is_not(estimator):
    values = np.array([0.0, 1.0, 1.0, 0.0] * 3)
    rewards = {"tiny": 2e-6 * values, "fine": values[::-1] + np.arange(12) % 3}
    ids = np.repeat(np.arange(3), 4)
    result = compute_advantages(rewards, ids, estimator=estimator)
    z = compute_advantages(rewards, ids, estimator="mo_grpo", epsilon=1e-15).components[:, 0]
    kept = float((result.components[:, 0] / z).mean())
    assert result.diagnostics.shrinkage[0] == pytest.approx(1 - kept, abs=1e-3) and 0.3 < 1 - kept < 0.5
    (alert,) = [line for line in result.diagnostics.alerts if "epsilon" in line]
    assert "'tiny'" in alert and "46%" in alert
    calm = compute_advantages(rewards, ids, estimator=estimator, epsilon=1e-9).diagnostics.alerts
    assert not any("epsilon" in line for line in calm)


def test_shrinkage_is_of_z_scores_only():
    rewards = {"a": [0, 1e-6, 0, 1e-6], "b": [0, 0, 1, 1]}
    for estimator in ("grpo", "dr_grpo"):
        assert np.isnan(compute_advantages(rewards, [0] * 4, estimator=estimator).diagnostics.shrinkage).all()
