"""Built-in weighting rules that read rewards and advantages, and the table of all rules (``gdpo.weighting``).

Formulas, sources, invariances and traps of the rules are in docs/weighting.md. The rules that read gradients are in
``weighting_gradients``.

n is the number of components. `Saw` and `Tchebycheff` do not count a component without rewards in the step, and give it
the factor 1.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.loss_selection import is_import_path
from gdpo_nemo.algorithms.rubrics import is_family
from gdpo_nemo.algorithms.weighting import RowRewards, RuleRefusal, StepAdvantages, StepRewards, WeightingRule
from gdpo_nemo.algorithms.weighting_gradients import GradNorm, Influence, Mgda
from gdpo_nemo.utils.errors import nearest


@dataclass
class Saw(WeightingRule):
    """SAW (arXiv 2606.07705): the factor is n CV_k / sum_l CV_l, with the coefficient of variation
    CV_k = std_k / (mean_k + delta) of the rewards r - lower + delta over the batch."""

    lower: Mapping[str, float] = field(default_factory=dict)
    """Smallest possible reward of each component; 0 by default."""

    name = "saw"
    can_be_zero = True
    _DELTA = 1e-8

    def __post_init__(self) -> None:
        _check_numbers("lower", self.lower)

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factors. Raises RuleRefusal for a component that has no coefficient of variation."""
        found = {}
        for name in batch.names:
            given = batch.present(name)
            if len(given) > 1:
                found[name] = self._variation(name, given)
        total = sum(found.values())
        if total <= self._DELTA:  # no component varies
            return dict.fromkeys(batch.names, 1.0)
        return {name: len(found) * found[name] / total if name in found else 1.0 for name in batch.names}

    def _variation(self, name: str, given: np.ndarray) -> float:
        lower = float(self.lower.get(name, 0.0))
        if given.min() < lower:
            raise RuleRefusal(
                f"component {name!r} has the reward {given.min():g}, below its lower bound {lower:g}, so its mean may "
                f"be near 0; set its smallest possible reward in lower: {{{name}: ...}}"
            )
        shifted = given - lower + self._DELTA
        mean, deviation = float(shifted.mean()), float(shifted.std(ddof=1))
        if deviation and mean < 1e3 * self._DELTA:
            raise RuleRefusal(
                f"component {name!r} has the mean {mean:.3g} above its lower bound, which is too near 0 for a "
                "coefficient of variation; scale it with gdpo.shaping"
            )
        return deviation / (mean + self._DELTA)


@dataclass
class Ctwa(WeightingRule):
    """CTWA (arXiv 2602.06869): the log of the factor rises by lr (target - c) as long as c < target, where c is the
    moving average of the covariance of the component's reward and the advantage within the groups."""

    target: float | Mapping[str, float] = 0.0
    """Covariance to reach, one number or a number for each component."""
    lr: float = 0.02
    """Step size of the log factors."""
    ema: float = 0.1
    """Share of the newest covariance in the moving average."""
    caps: Mapping[str, float] = field(default_factory=dict)
    """Mean rewards from which on a component's factor does not rise."""

    name = "ctwa"
    reads_advantages = True

    def __post_init__(self) -> None:
        targets = self.target if isinstance(self.target, Mapping) else {"": self.target}
        _check_numbers("target", targets)
        if not all(value > 0 for value in targets.values()) or not targets:
            raise ValueError(f"target must be set to a positive covariance, got {self.target!r}")
        _check_numbers("caps", self.caps)
        _check_range("lr", self.lr, 0.0, math.inf)
        _check_range("ema", self.ema, 0.0, 1.0)
        self._logs: dict[str, float] = {}
        self._averages: dict[str, float] = {}

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return exp of the log factors after the previous steps."""
        return {name: math.exp(self._logs.get(name, 0.0)) for name in batch.names}

    def observe(self, trained: StepAdvantages) -> None:
        """Move the averages and the log factors by the covariances of the step."""
        batch = trained.batch
        for name, weight in batch.weights.items():
            covariance = within_groups(batch.rewards.get(name), trained.advantages, batch.groups)
            if covariance is None:
                continue
            covariance *= math.copysign(1.0, weight)
            before = self._averages.get(name, covariance)
            self._averages[name] = before + self.ema * (covariance - before)
            target = self.target.get(name) if isinstance(self.target, Mapping) else self.target
            capped = batch.present(name).mean() * weight >= self.caps[name] * weight if name in self.caps else False
            if target is not None and not capped:
                deficit = max(target - self._averages[name], 0.0)
                self._logs[name] = self._logs.get(name, 0.0) + self.lr * deficit

    def state(self) -> dict[str, Any]:
        """Return log factors and averages."""
        return {"logs": dict(self._logs), "averages": dict(self._averages)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore log factors and averages."""
        self._logs, self._averages = dict(state["logs"]), dict(state["averages"])


def within_groups(column: np.ndarray | None, values: np.ndarray, groups: np.ndarray) -> float | None:
    """Return the mean over groups of the covariance (divided by the number of samples) of a reward and ``values``.

    Only samples with the reward count, and only groups with at least two of them. None without such a group.
    """
    if column is None:
        return None
    present = np.isfinite(column)
    if not present.any():
        return None
    _, ids = np.unique(groups[present], return_inverse=True)
    counts = np.bincount(ids)
    first, second = column[present], values[present]
    first = first - (np.bincount(ids, first) / counts)[ids]
    second = second - (np.bincount(ids, second) / counts)[ids]
    covariances = np.bincount(ids, first * second) / counts
    several = counts > 1
    return float(covariances[several].mean()) if several.any() else None


@dataclass
class Pow3r(WeightingRule):
    """POW3R (arXiv 2605.20164): weights move to criteria or components with contrast, and keep their sum.

    The weight is w_k alpha_k sum |w| / sum |w| alpha. With g_k = sqrt(v_k + epsilon), where v_k is the variance within
    a group, and the mean of g weighted by |w|, a step moves alpha_k by ``ema`` toward (1 - blend) + blend g_k / mean g,
    within ``low`` and ``high``. The criteria of each row have their own alpha, which acts when the row is sampled
    again. Components other than families have one alpha for all rows, with the mean of v over groups.
    """

    blend: float = 0.5
    """Share of the contrast; 0 keeps the weights."""
    ema: float = 0.2
    """Share of the newest contrast in the moving average."""
    low: float = 0.67
    """Smallest alpha."""
    high: float = 1.5
    """Largest alpha."""
    epsilon: float = 1e-4
    """Added to the variance."""
    min_valid: float = 0.75
    """Share of samples that must have the reward; alpha does not move below it."""

    name = "pow3r"
    weighs_criteria = True

    def __post_init__(self) -> None:
        for option in ("blend", "ema", "min_valid"):
            _check_range(option, getattr(self, option), 0.0, 1.0, closed=True)
        _check_range("epsilon", self.epsilon, 0.0, math.inf)
        _check_range("low", self.low, 0.0, 1.0)
        _check_range("high", self.high, 1.0, math.inf, closed=True)
        self._alphas: dict[str, float] = {}
        self._rows: dict[str, dict[str, float]] = {}

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factors after the previous steps, and move alpha by the contrast of this step."""
        sizes = {name: abs(weight) for name, weight in batch.weights.items() if not is_family(name)}
        variances = {}
        for name in sizes:
            column = batch.rewards.get(name)
            if column is not None and np.isfinite(column).sum() >= self.min_valid * len(column):
                variances[name] = within_groups(column, column, batch.groups)
        found = self._step(self._alphas, sizes, variances)
        return {name: found.get(name, 1.0) for name in batch.names}

    def criterion_factors(self, row: RowRewards) -> dict[str, float]:
        """Return the factors after the earlier samples of the row, and move alpha by the contrast of its samples."""
        sizes = {name: abs(weight) for name, weight in row.weights.items()}
        rewards = np.stack([row.rewards[name] for name in sizes])
        present = np.isfinite(rewards)
        counts = np.maximum(present.sum(axis=1, keepdims=True), 1)
        rewards = np.where(present, rewards, 0.0)
        centred = np.where(present, rewards - rewards.sum(axis=1, keepdims=True) / counts, 0.0)
        found = np.square(centred).sum(axis=1) / counts[:, 0]
        enough = present.sum(axis=1) >= max(2.0, self.min_valid * rewards.shape[1])
        variances = {name: float(found[j]) if enough[j] else None for j, name in enumerate(sizes)}
        return self._step(self._rows.setdefault(row.row, {}), sizes, variances)

    def _step(
        self, alphas: dict[str, float], sizes: Mapping[str, float], variances: Mapping[str, float | None]
    ) -> dict[str, float]:
        """Return the factors of a category, and move ``alphas`` of its members with a variance (equations 5 to 8)."""
        before = {name: alphas.get(name, 1.0) for name in sizes}
        contrasts = {name: math.sqrt(v + self.epsilon) for name, v in variances.items() if v is not None}
        total = sum(sizes[name] for name in contrasts)
        mean = sum(sizes[name] * contrast for name, contrast in contrasts.items()) / total if total else 1.0
        for name, contrast in contrasts.items() if total else ():
            goal = self._within((1 - self.blend) + self.blend * contrast / mean)
            alphas[name] = self._within((1 - self.ema) * before[name] + self.ema * goal)
        trained = sum(sizes[name] * alpha for name, alpha in before.items())
        kept = sum(sizes.values()) / trained if trained else 1.0
        return {name: alpha * kept for name, alpha in before.items()}

    def _within(self, alpha: float) -> float:
        return min(max(alpha, self.low), self.high)

    def state(self) -> dict[str, Any]:
        """Return alpha of each component, and of the criteria of each row."""
        return {"alphas": dict(self._alphas), "rows": {row: dict(alphas) for row, alphas in self._rows.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore alpha."""
        self._alphas = dict(state["alphas"])
        self._rows = {row: dict(alphas) for row, alphas in state["rows"].items()}


@dataclass
class Hypervolume(WeightingRule):
    """Hypervolume-guided weights (arXiv 2509.11452): the factor of all components is 0.5 + 1.5 tanh(gain).

    The gain is the volume that the point of the step's mean rewards adds to that of the earlier points, above the point
    of the first step.
    """

    name = "hypervolume"
    is_common = True
    most_components = 5

    def __post_init__(self) -> None:
        self._reference: dict[str, float] = {}
        self._points: list[list[float]] = []

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factor of the step, and record the point of the step if it adds volume."""
        means = batch.signed_means()
        if not self._reference and len(means) == len(batch.names):
            self._reference = means
            return dict.fromkeys(batch.names, 1.0)
        if set(means) != set(self._reference):
            return dict.fromkeys(batch.names, 1.0)
        point = [means[name] - start for name, start in self._reference.items()]
        gain = added_volume(point, self._points)
        if gain > 0:
            self._points = non_dominated([*self._points, point])
        return dict.fromkeys(batch.names, 0.5 + 1.5 * math.tanh(gain))

    def state(self) -> dict[str, Any]:
        """Return the reference point and the points of the front."""
        return {"reference": dict(self._reference), "points": [list(point) for point in self._points]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the reference point and the front."""
        self._reference, self._points = dict(state["reference"]), [list(point) for point in state["points"]]


def added_volume(point: Sequence[float], others: Sequence[list[float]]) -> float:
    """Return the volume between 0 and ``point`` in all coordinates that is not below any of the other points.

    This is the exclusive hypervolume of the algorithm WFG (While, Bradstreet and Barone 2012), to be maximised.
    """
    if min(point) <= 0:
        return 0.0
    limited = [list(map(min, point, other)) for other in others]
    inside = non_dominated([values for values in limited if min(values) > 0])
    covered = sum(added_volume(values, inside[number + 1 :]) for number, values in enumerate(inside))
    return max(math.prod(point) - covered, 0.0)


def non_dominated(points: Sequence[list[float]]) -> list[list[float]]:
    """Return the distinct points that no other point reaches in all coordinates, in descending order."""
    front: list[list[float]] = []
    for point in sorted(points, reverse=True):
        if not any(all(map(operator.ge, better, point)) for better in front):
            front.append(point)
    return front


@dataclass
class Tchebycheff(WeightingRule):
    """Weighted Tchebycheff: minimise the largest |w_k| (z_k - J_k), with the ideal reward z_k and the mean reward J_k.

    The gradient is that of the component with the largest distance, whose factor is n. With a temperature, the factors
    are n times the softmax of the distances divided by the temperature, the gradient of smooth Tchebycheff
    (arXiv 2402.19078).
    """

    ideal: Mapping[str, float] = field(default_factory=dict)
    """Best reward of each component. Missing components: the best reward of a sample so far."""
    temperature: float = 0.0
    """Temperature of the softmax; 0: only the largest distance."""

    name = "tchebycheff"
    can_be_zero = True

    def __post_init__(self) -> None:
        _check_numbers("ideal", self.ideal)
        _check_range("temperature", self.temperature, 0.0, math.inf, closed=True)
        self._best: dict[str, float] = {}

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factors from the distances of the step."""
        distances = {}
        for name, mean in batch.signed_means().items():
            sign = math.copysign(1.0, batch.weights[name])
            best = float((sign * batch.present(name)).max())
            self._best[name] = max(best, self._best.get(name, best))
            ideal = sign * self.ideal[name] if name in self.ideal else self._best[name]
            distances[name] = abs(batch.weights[name]) * (ideal - mean)
        if not distances:
            return dict.fromkeys(batch.names, 1.0)
        largest = max(distances.values())
        if self.temperature:
            shares = {name: math.exp((value - largest) / self.temperature) for name, value in distances.items()}
        else:
            shares = {name: float(value == largest) for name, value in distances.items()}
        total = sum(shares.values())
        return {name: len(shares) * shares[name] / total if name in shares else 1.0 for name in batch.names}

    def state(self) -> dict[str, Any]:
        """Return the best rewards so far."""
        return {"best": dict(self._best)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the best rewards."""
        self._best = dict(state["best"])


RULES: dict[str, type[WeightingRule]] = {
    rule.name: rule for rule in (Saw, Ctwa, Pow3r, Hypervolume, Tchebycheff, GradNorm, Mgda, Influence)
}
"""Built-in rules by their name in `gdpo.weighting`."""


def rule_of(weighting: Mapping[str, Any]) -> str:
    """Return the name or import path of the rule. Empty without a rule.

    Raises:
        ValueError: if options have no rule, or the rule is unknown. The message begins with the key within `gdpo`.
    """
    if not weighting:
        return ""
    rule = weighting.get("rule")
    if not isinstance(rule, str) or not rule:
        raise ValueError(f"weighting.rule: must be the name of a rule or an import path; {_known()}")
    if rule not in RULES and not is_import_path(rule):
        raise ValueError(f"weighting.rule: unknown rule {rule!r}{nearest(rule, RULES)}")
    return rule


def read_rule(weighting: Mapping[str, Any], components: Iterable[str]) -> WeightingRule | None:
    """Return a new built-in rule with the options of a config. None for a rule in a user's file, or without a rule.

    Args:
        components: names that options may contain.

    Raises:
        ValueError: if the rule or an option is invalid. The message begins with the key within `gdpo`.
    """
    name = rule_of(weighting)
    if name not in RULES:
        return None
    options = options_of(weighting)
    known = list(inspect.signature(RULES[name]).parameters)
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"weighting.{key}: not an option of {name}{nearest(str(key), known)}")
        for component in value if isinstance(value, Mapping) else ():
            if component not in components:
                raise ValueError(
                    f"weighting.{key}.{component}: not in gdpo.rewards{nearest(str(component), components)}"
                )
    try:
        return RULES[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"weighting: {name}: {error}") from None


def weighs_criteria(rewards: Iterable[str], weighting: Mapping[str, Any]) -> bool:
    """Return True if the rule has factors for the criteria of a family in `gdpo.rewards`."""
    rule = RULES.get(rule_of(weighting))
    return rule is not None and rule.weighs_criteria and any(map(is_family, rewards))


def options_of(weighting: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the rule."""
    return {key: value for key, value in weighting.items() if key != "rule"}


def _known() -> str:
    return f"known: {', '.join(sorted(RULES))}"


def _check_numbers(option: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ValueError(f"{option} must be a mapping of component to number, got {values!r}")
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{option} must be a finite number{f' for {name}' if name else ''}, got {value!r}")


def _check_range(option: str, value: Any, low: float, high: float, closed: bool = False) -> None:
    """Raise ValueError if a number is not above ``low`` (at least ``low`` if closed) and at most ``high``."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (low <= value if closed else low < value) or value > high:
        limit = "at least" if closed else "above"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise ValueError(f"{option} must be a number {limit} {low:g}{most}, got {value!r}")
