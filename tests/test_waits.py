"""Deadlines that are learnt."""

from __future__ import annotations

from gdpo_nemo.waits import Patience


def test_a_deadline_follows_what_was_measured_within_its_bounds():
    patience = Patience(3600.0, 300.0)
    limits = []
    for seconds in (5.0, 5.0, 5.0, 80.0, 10.0, 900.0):
        patience.took(seconds)
        limits.append(patience.limit_s)
    assert limits == [3600.0, 3600.0, 300.0, 800.0, 800.0, 3600.0]


def test_a_deadline_of_the_user_that_is_shorter_stays():
    patience = Patience(60.0, 300.0)
    for _ in range(5):
        patience.took(1.0)
    assert patience.limit_s == 60.0
