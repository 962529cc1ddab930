"""The depth in flight: what staleness allows, and how the rule below that bound behaves."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gdpo_nemo.rollouts.depth import AutoDepth, outstanding_bound

OBSERVATIONS = st.lists(
    st.tuples(st.floats(0, 100), st.floats(0, 100), st.integers(0, 500)).map(lambda t: (t[0], t[0] + t[1], t[2])),
    max_size=60,
)


def played(rule: AutoDepth, observations) -> list[int]:
    return [rule.observe(*observation) for observation in observations]


@given(st.integers(1, 40), st.integers(0, 8), st.data(), OBSERVATIONS)
def test_the_depth_stays_between_a_batch_and_the_bound(groups, staleness, data, observations):
    bound = outstanding_bound(groups, staleness, data.draw(st.integers(1, staleness * groups + 1)))
    rule = AutoDepth(groups, bound)
    assert all(groups <= depth <= bound for depth in (rule.depth, *played(rule, observations)))


@given(OBSERVATIONS)
def test_equal_observations_give_equal_depths(observations):
    assert played(AutoDepth(8, 40), observations) == played(AutoDepth(8, 40), observations)


def test_a_trainer_that_waits_brings_the_depth_to_the_bound_in_a_few_versions():
    depths = played(AutoDepth(32, 160), [(6.0, 10.0, 0)] * 20)
    assert depths[0] == 64 and depths[-1] == 160 and depths == sorted(depths)


def test_groups_that_lie_ready_bring_the_depth_down_slowly():
    depths = played(AutoDepth(32, 160), [(6.0, 10.0, 0)] * 20 + [(0.0, 10.0, 100)] * 60)
    assert depths[20] == 160 and depths == sorted(depths[:20]) + sorted(depths[20:], reverse=True)
    assert min(depths) >= 32 and depths[-1] < 96
    assert all(later >= earlier - 50 for earlier, later in zip(depths, depths[1:]))


def test_a_wait_within_the_limit_and_no_surplus_change_nothing():
    assert set(played(AutoDepth(32, 160), [(0.4, 10.0, 3)] * 30)) == {64}


def test_a_cut_that_made_the_trainer_wait_is_taken_back_at_once_and_not_repeated():
    rule = AutoDepth(32, 160)
    played(rule, [(6.0, 10.0, 0)] * 20)
    before = rule.depth
    while rule.depth == before:
        rule.observe(0.0, 10.0, 40)
    cut = rule.depth
    assert rule.observe(2.0, 10.0, 0) > cut
    assert min(played(rule, [(0.0, 10.0, 40)] * 10)) > cut


def test_the_bound_is_the_synchronous_batch_at_staleness_0():
    assert outstanding_bound(16, 0, 1) == 16
    assert outstanding_bound(16, 2, 5) == 3 * 16 - 4


@pytest.mark.parametrize("staleness, window, words", [(0, 2, "between 1 and 1"), (1, 18, "between 1 and 17"),
                                                      (1, 0, "between 1 and 17")])  # fmt: skip
def test_a_window_that_leaves_no_room_for_a_batch_is_refused_with_the_range(staleness, window, words):
    with pytest.raises(ValueError, match=words):
        outstanding_bound(16, staleness, window)
    with pytest.raises(ValueError, match="below"):
        AutoDepth(16, 15)
