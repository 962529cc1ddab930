"""Estimators of the reward sum against exact fractions, with missing rewards and components that are only logged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from gdpo_nemo.algorithms import ESTIMATORS, PRESETS, Terms, compute_advantages

EPSILON = 1e-6
Column = list[Fraction | None]
Table = tuple[list[int], dict[str, Column], dict[str, Fraction]]

quarters = st.integers(0, 4).map(lambda n: Fraction(n, 4))
"""Rewards in [0, 1], as `sa_mrpo` takes them; float64 holds them and their weighted sums exactly."""
weights = st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(-2)])


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Group ids in any order, two or three weighted components, and the weights; at least one row has a reward."""
    count = draw(st.integers(2, 12))
    ids = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    names = "abc"[: draw(st.integers(2, 3))]
    optional = st.one_of(quarters, quarters, st.none())
    columns = {name: draw(st.lists(optional, min_size=count, max_size=count)) for name in names}
    columns["a"][draw(st.integers(0, count - 1))] = draw(quarters)
    return ids, columns, {name: draw(weights) for name in names}


def advantages(table: Table, logged: Column | None = None, **options) -> np.ndarray:
    """Advantages of the table, with a further component of weight 0 if `logged` is given."""
    ids, columns, chosen = table
    rewards = {name: [None if r is None else float(r) for r in column] for name, column in columns.items()}
    scale = {name: float(weight) for name, weight in chosen.items()}
    if logged is not None:
        rewards["logged"] = [None if r is None else float(r) for r in logged]
        scale["logged"] = 0.0
    lengths = [3 + row % 4 for row in range(len(ids))]
    return compute_advantages(rewards, ids, weights=scale, lengths=lengths, **options).values.numpy()


def totals(table: Table) -> Column:
    """Weighted sum of each row's rewards; None for a row without any."""
    ids, columns, chosen = table
    rows = [{name: column[row] for name, column in columns.items()} for row in range(len(ids))]
    return [
        sum((chosen[name] * r for name, r in row.items() if r is not None), Fraction(0))
        if any(r is not None for r in row.values())
        else None
        for row in rows
    ]


def variance(values: Sequence[Fraction], ddof: int) -> Fraction:
    """Exact variance; 0 for too few values."""
    if len(values) <= ddof:
        return Fraction(0)
    mean = sum(values) / len(values)
    return sum(((value - mean) ** 2 for value in values), Fraction(0)) / (len(values) - ddof)


def by_group(table: Table, factor: Callable[[Sequence[Fraction], Sequence[Sequence[Fraction]]], float]) -> np.ndarray:
    """(total - mean of the group's totals) x factor(group, all groups); 0 for rows without a total."""
    ids = table[0]
    sums = totals(table)
    groups = {g: [t for t, i in zip(sums, ids) if i == g and t is not None] for g in set(ids)}
    everyone = list(groups.values())
    return np.array(
        [
            0.0 if t is None else float(t - sum(groups[i]) / len(groups[i])) * factor(groups[i], everyone)
            for t, i in zip(sums, ids)
        ]
    )


@settings(max_examples=80)
@given(tables(), st.sampled_from([0, 1]), st.sampled_from(["group", "batch", "none"]))
def test_grpo_equals_exact_fractions_at_every_ddof_and_scale(table, ddof, scale):
    def factor(group, groups):
        if scale == "none":
            return 1.0
        values = group if scale == "group" else [t for of_one in groups for t in of_one]
        return 1.0 / (sqrt(variance(values, ddof)) + EPSILON)

    got = advantages(table, estimator="grpo", ddof=ddof, scale_rewards=scale)
    np.testing.assert_allclose(got, by_group(table, factor), rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(tables(), st.sampled_from([0, 1]))
def test_gdpo_divides_by_the_exact_deviation_of_the_batch_at_every_ddof(table, ddof):
    """Each component by itself: the deviation of the rewards in the batch, not of what is left after centring."""
    ids, columns, chosen = table
    expected = np.zeros(len(ids))
    for name, column in columns.items():
        values = [r for r in column if r is not None]
        single = (ids, {name: column}, {name: Fraction(1)})
        scale = 1.0 / (sqrt(variance(values, ddof)) + EPSILON)
        expected += float(chosen[name]) * by_group(single, lambda group, groups, scale=scale: scale)
    got = advantages(table, estimator="gdpo", ddof=ddof, scale_rewards="batch", batch_norm=False)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=60)
@given(tables())
def test_estimators_without_a_deviation_equal_exact_fractions(table):
    def alpha(group, groups):
        live = sum(len(g) for g in groups if len(set(g)) > 1)
        return sum(map(len, groups)) / max(live, 1)

    formulas = {
        "dr_grpo": lambda group, groups: 1.0,
        "rloo": lambda group, groups: len(group) / max(len(group) - 1, 1),
        "gpg": alpha,
    }
    for estimator, factor in formulas.items():
        got = advantages(table, estimator=estimator)
        np.testing.assert_allclose(got, by_group(table, factor), rtol=1e-12, atol=1e-12, err_msg=estimator)


def raw(table, settings):
    """A custom estimator that asks the table which rows have a reward."""
    return Terms(table.weights[:, None] * table.columns, table.scored)


ALL = [
    *({"estimator": name} for name in ESTIMATORS),
    {"estimator": "reinforce_plus_plus", "minus_baseline": False},
    {"estimator": "gdpo", "batch_rows": "scored"},
    {"estimator": raw},
    *({"preset": name} for name in PRESETS),
]


def named(options: dict[str, object]) -> str:
    return "-".join(str(getattr(value, "__name__", value)) for value in options.values())


OPPOSED = (
    [0] * 5,
    {
        "a": [Fraction(0), Fraction(1), Fraction(1), None, None],
        "b": [Fraction(0), Fraction(1), Fraction(0), None, None],
    },
    {"a": Fraction(1), "b": Fraction(1)},
)
"""Its third row is one that gd2po drops, so that the retained share of the group counts."""


@st.composite
def logged_columns(draw: st.DrawFn) -> tuple[Table, Column]:
    """A table, and rewards that are only logged."""
    table = draw(tables())
    count = len(table[0])
    return table, draw(st.lists(st.one_of(quarters, st.none()), min_size=count, max_size=count))


@pytest.mark.parametrize("options", ALL, ids=named)
@settings(max_examples=20)
@given(logged_columns())
@example((OPPOSED, [Fraction(1)] * 5))
def test_a_component_of_weight_0_changes_no_advantage(options, case):
    """Rows that have only the logged reward are rows without a reward."""
    table, logged = case
    if options.get("preset") == "verl":  # which refuses missing rewards, except of what is only logged
        ids, columns, chosen = table
        table = (ids, {name: [r or Fraction(0) for r in column] for name, column in columns.items()}, chosen)
    np.testing.assert_array_equal(advantages(table, logged, **options), advantages(table, **options))


def test_kl_in_the_reward_leaves_out_rows_that_have_only_a_logged_reward():
    rewards = {"a": [1.0, 0.0, None, 1.0], "logged": [0.5, 0.5, 0.5, 0.5]}
    options = {"weights": {"a": 1.0, "logged": 0.0}, "kl": [0.1, 0.4, 9.0, 0.2], "kl_coefficient": 0.5}
    got = compute_advantages(rewards, [0] * 4, estimator="dr_grpo", **options).values
    totals_less_kl = np.array([1.0, 0.0, 1.0]) - 0.5 * np.array([0.1, 0.4, 0.2])
    np.testing.assert_allclose(got[[0, 1, 3]], totals_less_kl - totals_less_kl.mean(), rtol=0, atol=1e-12)
    assert got[2] == 0


def test_a_batch_that_has_only_logged_rewards_is_refused():
    rewards = {"a": [None, None], "b": [None, None], "logged": [1.0, 0.0]}
    with pytest.raises(ValueError, match="none of the 2 valid rows has a value for a, b$"):
        compute_advantages(rewards, [0, 0], weights={"a": 1.0, "b": 2.0, "logged": 0.0})
