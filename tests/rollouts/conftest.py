"""Worlds of the scheduler, closed when the test is over."""

from __future__ import annotations

import pytest
from engines_in_process import without_ray
from scheduler_world import World


@pytest.fixture
def world(monkeypatch):
    """``world(*overrides, **arguments)``: another ``World``."""
    without_ray(monkeypatch)
    made = []

    def make(*overrides, **arguments):
        made.append(World(*overrides, **arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()
