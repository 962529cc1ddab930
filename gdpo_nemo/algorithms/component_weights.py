"""Weights of reward components that change during a run: constraints by dual ascent, and schedules by step.

    constraints:
      length: {at_least: 0.95}
    schedules:
      format: [[1, 0.0], [100, 1.0]]

A constraint maximises the other rewards subject to a bound on the mean of its component. The component's weight w is
the Lagrange multiplier of the constraint, with the sign of the direction in which the component is pushed. Each step
moves the weight by projected dual ascent, before the advantages are computed::

    w <- clip(w + lr (bound - mean), 0, max_weight)      at_least
    w <- clip(w + lr (bound - mean), -max_weight, 0)     at_most

mean is the component's mean over the batch, after shaping. A component that meets its bound therefore loses weight, and
has no weight while the other rewards alone meet the bound.

A schedule interpolates linearly between its points [step, weight]. The weight in `gdpo.rewards` is the first weight of
both: the multiplier at the start of the run, and the weight at step 1.

Both are weighting rules that set weights. Another rule may then multiply the weights of the step (``weighting``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.table import nearest
from gdpo_nemo.algorithms.weighting import RuleRunner, StepRewards, WeightingRule

METRICS = {
    "reward/NAME/at_least": ("reward", "Lower bound of component NAME's mean (gdpo.constraints)"),
    "reward/NAME/at_most": ("reward", "Upper bound of component NAME's mean (gdpo.constraints)"),
    "reward/NAME/samples": ("samples", "Samples with component NAME, whose mean is compared with the bound"),
    "reward/NAME/factor": ("", "Factor of gdpo.weighting in the weight of component NAME"),
}


@dataclass(frozen=True)
class Constraint:
    """Bound on the mean of a component. Exactly one of `at_least` and `at_most` is set."""

    at_least: float | None = None
    """Lower bound of the mean."""
    at_most: float | None = None
    """Upper bound of the mean."""
    lr: float = 0.1
    """Change of the weight per step and unit of reward by which the mean misses the bound."""
    max_weight: float = 10.0
    """Largest absolute value of the weight."""
    stop_after: int | None = None
    """Number of consecutive steps in which the mean meets the bound, after which the weight is 0 for the rest of the
    run. None: never."""

    def __post_init__(self) -> None:
        for name in ("at_least", "at_most", "lr", "max_weight"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and abs(value) < float("inf")):
                raise ValueError(f"{name} must be a finite number, got {value!r}")
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("write exactly one of at_least and at_most")
        for name in ("lr", "max_weight"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.stop_after is not None and not (type(self.stop_after) is int and self.stop_after > 0):
            raise ValueError(f"stop_after must be a positive number of steps, got {self.stop_after!r}")

    @property
    def kind(self) -> str:
        """Name of the bound: at_least or at_most."""
        return "at_most" if self.at_least is None else "at_least"

    @property
    def bound(self) -> float:
        """Value of the bound."""
        return float(getattr(self, self.kind))

    @property
    def limits(self) -> tuple[float, float]:
        """Smallest and largest weight."""
        return (0.0, self.max_weight) if self.kind == "at_least" else (-self.max_weight, 0.0)

    def is_met(self, mean: float) -> bool:
        """Return True if the mean meets the bound."""
        return mean >= self.bound if self.kind == "at_least" else mean <= self.bound

    def ascend(self, weight: float, mean: float) -> float:
        """Return the weight after a step of projected dual ascent."""
        return float(np.clip(weight + self.lr * (self.bound - mean), *self.limits))


def read_constraint(name: str, options: Any) -> Constraint:
    """Return the constraint of a component.

    Raises:
        ValueError: if an option is unknown or invalid. The message begins with the key within `gdpo`.
    """
    known = tuple(field.name for field in fields(Constraint))
    if not isinstance(options, Mapping):
        raise ValueError(f"constraints.{name}: must be a mapping such as {{at_least: 0.95}}, got {options!r}")
    for key in options:
        if key not in known:
            raise ValueError(f"constraints.{name}.{key}: unknown option; {nearest(str(key), known)}")
    try:
        return Constraint(**options)
    except ValueError as error:
        raise ValueError(f"constraints.{name}: {error}") from None


def read_schedule(name: str, points: Any) -> list[tuple[int, float]]:
    """Return the points (step, weight) of a component's schedule.

    Raises:
        ValueError: if the points are not pairs with ascending steps. The message begins with the key within `gdpo`.
    """
    if not isinstance(points, Sequence) or isinstance(points, str) or not points or not all(map(_is_point, points)):
        raise ValueError(f"schedules.{name}: must be a list of [step, weight] such as [[100, 1.0]], got {points!r}")
    steps = [step for step, _ in points]
    if steps[0] < 2 or any(later <= step for step, later in zip(steps, steps[1:])):
        raise ValueError(f"schedules.{name}: steps must ascend from 2 or later, got {steps}; step 1 is in rewards")
    return [(step, float(weight)) for step, weight in points]


def check_component_weights(
    rewards: Mapping[str, float], constraints: Mapping[str, Any], schedules: Mapping[str, Any]
) -> None:
    """Check the constraints and schedules of a config.

    Raises:
        ValueError: if one is invalid, or no component has a constant weight. The message begins with the key.
    """
    for section, changed in (("constraints", constraints), ("schedules", schedules)):
        for name in changed:
            if name not in rewards:
                raise ValueError(
                    f"{section}.{name}: the component must have its first weight in gdpo.rewards; "
                    f"{nearest(str(name), tuple(rewards))}"
                )
    for name, options in constraints.items():
        low, high = read_constraint(name, options).limits
        if name in schedules:
            raise ValueError(f"schedules.{name}: conflicts with constraints.{name}; remove one")
        if not low <= rewards[name] <= high:
            raise ValueError(f"rewards.{name}: must be from {low:g} to {high:g} with its constraint")
    for name, points in schedules.items():
        read_schedule(name, points)
    if (constraints or schedules) and not any(rewards[n] for n in rewards if n not in {*constraints, *schedules}):
        raise ValueError("rewards: at least one component without a constraint or schedule needs a weight")


def describe_weights(rewards: Mapping[str, float], constraints: Mapping[str, Any], schedules: Mapping[str, Any]) -> str:
    """Return the first weights as text, with constraints and schedules: `1 correctness + 0 length (at_least 0.95)`."""
    changes = {name: read_constraint(name, options) for name, options in constraints.items()}
    notes = {name: f" ({constraint.kind} {constraint.bound:g})" for name, constraint in changes.items()}
    for name, points in schedules.items():
        notes[name] = "".join(f", {weight:g} in step {step}" for step, weight in points).replace(", ", " (", 1) + ")"
    return " + ".join(f"{weight:g} {name}{notes.get(name, '')}" for name, weight in rewards.items())


def directions(
    rewards: Mapping[str, float], constraints: Mapping[str, Any], schedules: Mapping[str, Any], step: int = 1
) -> dict[str, int]:
    """Return 1 for each component whose larger rewards are better, and -1 if smaller rewards are better (penalties).

    The direction is the sign of the weight in ``step``. If this weight is 0, it is the sign of the next weight of the
    schedule that is not 0, or of the last one if none follows. A constraint has the direction of its bound. A component
    that never has a weight is only logged, and its larger rewards are considered better. This also applies to
    components without an entry: read the result with ``.get(name, 1)``.

    Args:
        rewards, constraints, schedules: the keys of the section `gdpo`, valid by `check_component_weights`.
        step: number of the step, counted from 1.
    """
    return {name: _direction(name, rewards, constraints, schedules, step) for name in rewards}


def _direction(
    name: str, rewards: Mapping[str, float], constraints: Mapping[str, Any], schedules: Mapping[str, Any], step: int
) -> int:
    if name in constraints:
        return 1 if read_constraint(name, constraints[name]).kind == "at_least" else -1
    points = [(1, rewards[name]), *read_schedule(name, schedules[name])] if name in schedules else [(1, rewards[name])]
    later = [weight for at, weight in points if at > step]
    earlier = [weight for at, weight in reversed(points) if at <= step]
    for weight in (_interpolate(points, step), *later, *earlier):
        if weight:
            return 1 if weight > 0 else -1
    return 1


def _interpolate(points: Sequence[tuple[int, float]], step: int) -> float:
    """Return the weight of a schedule in a step."""
    return float(np.interp(step, [at for at, _ in points], [weight for _, weight in points]))


class Schedules(WeightingRule):
    """Schedules of a run, as a weighting rule.

    Args:
        rewards, schedules: the keys of the section `gdpo`, valid by `check_component_weights`.
    """

    name = "schedules"

    def __init__(self, rewards: Mapping[str, float], schedules: Mapping[str, Any]) -> None:
        self._points = {name: [(1, rewards[name]), *read_schedule(name, points)] for name, points in schedules.items()}

    def weights(self, batch: StepRewards) -> dict[str, float]:
        """Return the weights of the components with a schedule."""
        return self.at(batch.step)

    def at(self, step: int) -> dict[str, float]:
        """Return the weights of the components with a schedule in a step."""
        return {name: _interpolate(points, step) for name, points in self._points.items()}


class Constraints(WeightingRule):
    """Constraints of a run, as a weighting rule.

    Args:
        rewards, constraints: the keys of the section `gdpo`, valid by `check_component_weights`.
    """

    name = "constraints"

    def __init__(self, rewards: Mapping[str, float], constraints: Mapping[str, Any]) -> None:
        self._constraints = {name: read_constraint(name, options) for name, options in constraints.items()}
        self.values = {name: rewards[name] for name in constraints}
        """Multiplier of each constraint, with the sign of its direction."""
        self._met = dict.fromkeys(constraints, 0)
        """Number of consecutive steps in which each constraint has been met."""
        self.metrics: dict[str, float] = {}
        """Metrics of the current step, which explain the weights."""

    def weights(self, batch: StepRewards) -> dict[str, float]:
        """Move the multipliers by the rewards of a step and return them.

        A multiplier does not move in a step without a reward of its component. It is 0 after ``stop_after`` steps.
        """
        self.metrics = {}
        for name, constraint in self._constraints.items():
            given = batch.present(name)
            if self._has_stopped(name):
                self.values[name] = 0.0
            elif len(given):
                mean = float(given.mean())
                self.values[name] = constraint.ascend(self.values[name], mean)
                self._met[name] = self._met[name] + 1 if constraint.is_met(mean) else 0
            self.metrics[f"reward/{name}/{constraint.kind}"] = constraint.bound
            self.metrics[f"reward/{name}/samples"] = float(len(given))
        return dict(self.values)

    def _has_stopped(self, name: str) -> bool:
        limit = self._constraints[name].stop_after
        return limit is not None and self._met[name] >= limit

    def state(self) -> dict[str, float]:
        """Return the multipliers, and the number of steps in which each constraint with ``stop_after`` has been met."""
        counts = {f"{name}/met": float(self._met[name]) for name, c in self._constraints.items() if c.stop_after}
        return self.values | counts

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the multipliers of the constraints that the run still has, within their current limits."""
        for name, constraint in self._constraints.items():
            if name in state:
                self.values[name] = float(np.clip(state[name], *constraint.limits))
            self._met[name] = int(state.get(f"{name}/met", 0))


class ComponentWeights:
    """Current weights of all components of a run: schedules and constraints set them, and one rule multiplies them.

    Args:
        rewards, constraints, schedules: the keys of the section `gdpo`, valid by `check_component_weights`.
        rule: rule of `gdpo.weighting`, or None.
    """

    def __init__(
        self,
        rewards: Mapping[str, float],
        constraints: Mapping[str, Any],
        schedules: Mapping[str, Any],
        rule: WeightingRule | None = None,
    ) -> None:
        self._directions = partial(directions, rewards, constraints, schedules)
        self._step = 1
        self._rewards = dict(rewards)
        self._constraints = Constraints(rewards, constraints)
        self._schedules = Schedules(rewards, schedules)
        self.rule = None if rule is None else RuleRunner(rule)
        """Rule that multiplies the weights; None without one."""
        self._factors: dict[str, float] = {}
        self.values = dict(rewards)
        """Weight of each component in the current step."""

    @property
    def changed(self) -> dict[str, float]:
        """Weights of the components with a constraint, schedule or factor."""
        names = {*self._constraints.values, *self._schedules.at(self._step), *self._factors}
        return {name: weight for name, weight in self.values.items() if name in names}

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the current step, which explain the weights."""
        return self._constraints.metrics | {f"reward/{name}/factor": value for name, value in self._factors.items()}

    @property
    def directions(self) -> dict[str, int]:
        """Result of `directions` for the current step."""
        return self._directions(self._step)

    def at(self, step: int) -> dict[str, float]:
        """Return `changed` in a step. The weights of the constraints and the factors are the current ones."""
        return self.changed | self._schedules.at(step)

    def update(self, step: int, columns: Mapping[str, np.ndarray], groups: np.ndarray | None = None) -> None:
        """Set the weights of a step.

        Args:
            step: number of the step, counted from 1.
            columns: rewards of the batch by component, [samples], NaN for a missing reward.
            groups: group of each sample, int64 [samples]. Only the rule reads it.

        Raises:
            GdpoError: if the rule fails (`weighting.RuleRunner`).
        """
        self._step = step
        batch = StepRewards(step, self._rewards, columns, np.zeros(0, np.int64) if groups is None else groups)
        self.values = self._rewards | self._constraints.weights(batch) | self._schedules.weights(batch)
        if self.rule is not None:
            batch = replace(batch, weights={name: weight for name, weight in self.values.items() if weight})
            self._factors = self.rule.factors(batch)
            self.values |= {name: weight * self._factors[name] for name, weight in batch.weights.items()}

    def state(self) -> dict[str, float]:
        """Return the weights of the constraints, for a checkpoint."""
        return self._constraints.state()

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore the weights of the constraints."""
        self._constraints.load_state(state)
        self.values |= self._constraints.values


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_point(point: Any) -> bool:
    return (
        isinstance(point, Sequence)
        and len(point) == 2
        and isinstance(point[0], int)
        and all(map(_is_number, point))
        and abs(point[1]) < float("inf")
    )
