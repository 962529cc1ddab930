"""Goals for the held-out means of reward components: a run that meets all of them ends (``gdpo.stop_when``)."""

from __future__ import annotations

from collections.abc import Mapping

from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.config.schema import GdpoConfig
from gdpo_nemo.training.checkpoints import RunState


class Goals:
    """Goals of a run.

    A goal is met if the mean of its component over the held-out prompts is better than the goal by at least
    ``gdpo.stop_errors`` standard errors. The run ends after ``gdpo.stop_patience`` consecutive validations in which all
    goals are met.
    """

    def __init__(self, gdpo: GdpoConfig):
        self._goals = dict(gdpo.stop_when)
        self._errors = gdpo.stop_errors
        self._patience = gdpo.stop_patience
        self._directions = directions(gdpo.rewards, gdpo.constraints, gdpo.schedules)

    def count(self, state: RunState) -> None:
        """Update ``RunState.goals_met`` after a validation, whose metrics are in ``state.metrics``."""
        if self._goals and not self.reached(state):
            state.goals_met = state.goals_met + 1 if self._are_met(state.metrics) else 0

    def restore(self, state: RunState) -> None:
        """Discard the count of a checkpoint if its last validation does not meet the goals, which may have changed."""
        if not self._are_met(state.metrics):
            state.goals_met = 0

    def reached(self, state: RunState) -> bool:
        """Return True if the run ends."""
        return bool(self._goals) and state.goals_met >= self._patience

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Return goals and means as text: ``correctness 0.93 ± 0.01 (goal 0.9)``."""
        parts = []
        for name, goal in self._goals.items():
            error = metrics.get(f"validation/{name}/error")
            spread = "" if error is None else f" ± {error:.2g}"
            parts.append(f"{name} {metrics[f'validation/{name}']:.4g}{spread} (goal {goal:g})")
        return ", ".join(parts)

    def _are_met(self, metrics: Mapping[str, float]) -> bool:
        return bool(self._goals) and all(self._is_met(name, goal, metrics) for name, goal in self._goals.items())

    def _is_met(self, name: str, goal: float, metrics: Mapping[str, float]) -> bool:
        mean, error = metrics.get(f"validation/{name}"), metrics.get(f"validation/{name}/error")
        if mean is None or (error is None and self._errors > 0):  # a single prompt has no standard error
            return False
        return self._directions.get(name, 1) * (mean - goal) >= self._errors * (error or 0.0)
