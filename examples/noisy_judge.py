"""Environment whose judge is inexact: one component of another environment, with a random error.

    env:
      digit_sort: {plugin: examples/noisy_judge.py:NoisyJudge, task: digit_sort, component: length, error: 0.12}

``gdpo-nemo profile`` measures the standard deviation of the error by repeated verification, and ``gdpo.noise`` uses it
(docs/advantages.md, "Measured noise").
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from gdpo_nemo import Environment, Trajectory, Verdict, load_environment, read_options


class NoisyJudge(Environment):
    """Environment with the rewards of another one, one of them with an error.

    Components: those of the other environment, and ``exact``, the component without the error, for reporting.

    Options, in addition to those of the other environment:
        task (number_answer): name of the other environment.
        component (brief): component that the judge scores.
        error (0.12): standard deviation of the judge's error.
    """

    def __init__(self, options: Mapping[str, Any] | None = None):
        default = {"task": "number_answer", "component": "brief", "error": 0.12}
        given = dict(options or {})
        own = {name: given.pop(name) for name in default if name in given}
        chosen = read_options("noisy_judge", own, **default)
        self._other = load_environment(chosen.task, given)
        self._component: str = chosen.component
        self._error: float = chosen.error
        self.reward_names = (*self._other.reward_names, "exact")

    def rows(self, split: str, size: int | None, seed: int) -> list[Mapping[str, Any]]:
        """Return the rows of the other environment."""
        return self._other.rows(split, size, seed)

    def verify(self, trajectories: Sequence[Trajectory]) -> list[Verdict]:
        """Return one verdict per trajectory. Each call draws other errors."""
        return list(map(self._judged, self._other.verify(trajectories)))

    def _judged(self, verdict: Verdict) -> Verdict:
        exact = verdict.rewards[self._component]
        judged = exact + random.gauss(0.0, self._error)
        return Verdict({**verdict.rewards, self._component: judged, "exact": exact})
