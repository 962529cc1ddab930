"""pass@k against all draws, and against the formula of its paper. Confidence intervals against published quantiles."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.algorithms.diagnostics import mean_pass_at_k, pass_at_k, student_factor


@pytest.mark.parametrize("direction, best", [(1, max), (-1, min)])
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=7), st.data())
def test_expected_best_of_k_is_the_mean_over_all_subsets(direction, best, values, data):
    k = data.draw(st.integers(1, len(values)))
    expected = np.mean([best(draw) for draw in combinations(values, k)])
    assert pass_at_k(values, k, direction) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=200), st.data())
def test_of_rewards_of_0_and_1_it_is_the_published_estimator(passed, data):
    n, c = len(passed), sum(passed)
    k = data.draw(st.integers(1, n))
    assert pass_at_k(list(map(float, passed)), k) == pytest.approx(1.0 - comb(n - c, k) / comb(n, k), abs=1e-9)


def test_prompts_with_fewer_than_k_verdicts_are_left_out_of_the_mean():
    rows = [[1.0, 0.0, None], [0.0, 0.0, 1.0], [None, 1.0, None]]
    assert mean_pass_at_k(rows, 1) == pytest.approx((1 / 2 + 1 / 3 + 1) / 3)
    assert mean_pass_at_k(rows, 2) == pytest.approx((1 + 2 / 3) / 2)
    assert mean_pass_at_k(rows, 3) == 1.0 and mean_pass_at_k([[None]], 1) is None


@pytest.mark.parametrize("k", [0, 4, -1])
def test_k_beyond_the_number_of_samples_is_refused(k):
    with pytest.raises(ValueError, match="k must be between 1 and the number of values"):
        pass_at_k([0.0, 1.0, 1.0], k)


def test_student_factor_is_the_published_quantile():
    published = {2: 12.7062, 3: 4.3027, 4: 3.1824, 6: 2.5706, 11: 2.2281, 31: 2.0423, 121: 1.9799}
    assert {count: student_factor(count) for count in published} == pytest.approx(published, abs=5e-5)
    assert np.isnan(student_factor(1))
