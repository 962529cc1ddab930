"""Built-in weighting rules that read the gradients of the components' terms: MGDA, GradNorm and gradient influence.

The gradients are those of the last step that measured them (``gdpo.component_gradient_period``). They belong to terms
of weight 1 or -1: the weights of that step are divided out, so that a factor does not act on itself. Until the first
measurement, all factors are 1.

Factors have a floor above 0, because a component of weight 0 has no gradient to measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gdpo_nemo.algorithms.weighting import RuleRefusal, StepGradients, StepRewards, WeightingRule


@dataclass
class GradientRule(WeightingRule):
    """Base class of rules whose factors change when gradients are measured."""

    floor: float = 0.01
    """Smallest factor."""

    reads_gradients = True

    def __post_init__(self) -> None:
        if not _is_number(self.floor) or not 0 < self.floor < 1:
            raise ValueError(f"floor must be a number above 0 and below 1, got {self.floor!r}")
        self._factors: dict[str, float] = {}

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factors of the last measurement."""
        return {name: self._factors.get(name, 1.0) for name in batch.names}

    def observe_gradients(self, gradients: StepGradients) -> None:
        """Compute the factors of the next steps."""
        found = self.updated(gradients.names, gradients.products, self._current(gradients.names))
        self._factors |= {name: max(float(value), self.floor) for name, value in zip(gradients.names, found)}

    def _current(self, names: tuple[str, ...]) -> np.ndarray:
        return np.array([self._factors.get(name, 1.0) for name in names])

    def updated(self, names: tuple[str, ...], products: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Return the factors after a measurement, before the floor: float64 [components].

        Args:
            products: inner products of the gradients, float64 [components, components].
            factors: factors before the measurement.
        """
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return the factors."""
        return {"factors": dict(self._factors)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the factors."""
        self._factors = dict(state["factors"])


@dataclass
class Mgda(GradientRule):
    """MGDA (Désidéri 2012): n times the convex weights whose combined gradient has the smallest norm."""

    name = "mgda"

    def updated(self, names: tuple[str, ...], products: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Return n times the minimum-norm weights."""
        return len(names) * minimum_norm_weights(products)


def minimum_norm_weights(products: np.ndarray) -> np.ndarray:
    """Return the convex weights that minimise a' products a: float64 [components], with the sum 1.

    The solution u >= 0 of the least-squares problem |V u|^2 + (1 - sum u)^2 with V'V = products, divided by its sum,
    meets the optimality conditions of the minimum-norm point. It is computed by the active-set method of Lawson and
    Hanson (Solving Least Squares Problems, 1974, chapter 23), which ends after a finite number of steps.
    """
    count = len(products)
    scale = float(np.trace(products)) / count
    if scale <= 0:
        return np.full(count, 1.0 / count)
    matrix = products / scale + 1.0
    weights = np.zeros(count)
    active = np.zeros(count, bool)
    for _ in range(10 * count):
        slopes = np.where(active, -np.inf, 1.0 - matrix @ weights)
        if slopes.max() <= 1e-13:
            break
        active[slopes.argmax()] = True
        weights = _solve_active(matrix, weights, active)
    return np.asarray(weights / weights.sum())


def _solve_active(matrix: np.ndarray, weights: np.ndarray, active: np.ndarray) -> np.ndarray:
    """Return the solution on the active components. Components that reach 0 on the way leave ``active``."""
    while True:
        goal = np.zeros_like(weights)
        chosen = np.flatnonzero(active)
        goal[chosen] = np.linalg.lstsq(matrix[np.ix_(chosen, chosen)], np.ones(len(chosen)), rcond=None)[0]
        if goal[chosen].min() > 0:
            return goal
        falling = chosen[goal[chosen] <= 0]
        ratios = weights[falling] / np.maximum(weights[falling] - goal[falling], 1e-300)
        weights = weights + ratios.min() * (goal - weights)
        active[falling[ratios == ratios.min()]] = False
        weights[~active] = 0.0


@dataclass
class GradNorm(GradientRule):
    """GradNorm (arXiv 1711.02257): each measurement moves f_k by -lr sign(f_k G_k - T_k) G_k, and scales the sum to n.

    G_k is the norm of the component's gradient, and the target T_k is the mean of all f G, times the relative inverse
    training rate to the power ``alpha``. The rate is (best_k - mean_k) / (best_k - first mean_k) of the rewards.
    """

    lr: float = 0.025
    """Step size."""
    alpha: float = 0.0
    """Strength of the balance of training rates. 0 balances the norms only."""
    best: Mapping[str, float] = field(default_factory=dict)
    """Best reward of each component, required if alpha is not 0."""

    name = "gradnorm"

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("lr", "alpha"):
            value = getattr(self, option)
            if not _is_number(value) or value < 0 or (option == "lr" and not value):
                raise ValueError(f"{option} must be a positive number, got {value!r}")
        if not isinstance(self.best, Mapping) or not all(map(_is_number, self.best.values())):
            raise ValueError(f"best must be a mapping of component to number, got {self.best!r}")
        if bool(self.alpha) != bool(self.best):
            raise ValueError(
                "alpha requires best, the best reward of each component, and best has no effect without it"
            )
        self._first: dict[str, float] = {}
        self._left: dict[str, float] = {}

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factors of the last measurement, and record how far the rewards are from the best."""
        if self.alpha:
            for name, mean in batch.signed_means().items():
                if name not in self.best:
                    raise RuleRefusal(f"component {name!r} has no entry in best, which alpha requires")
                left = math.copysign(1.0, batch.weights[name]) * self.best[name] - mean
                if name not in self._first and left <= 0:
                    raise RuleRefusal(f"component {name!r} has its best reward in its first step; raise best")
                self._left[name] = max(left, 0.0) / self._first.setdefault(name, left)
        return super().factors(batch)

    def updated(self, names: tuple[str, ...], products: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Return the factors after one step of gradient descent on the distances from the targets."""
        norms = np.sqrt(np.diag(products))
        targets = np.full(len(names), (factors * norms).mean())
        if self.alpha:
            left = np.array([self._left.get(name, 1.0) for name in names])
            targets = targets * (left / left.mean()) ** self.alpha if left.any() else targets
        moved = factors - self.lr * np.sign(factors * norms - targets) * norms
        moved = np.maximum(moved, self.floor)
        return np.asarray(moved * len(names) / moved.sum())

    def state(self) -> dict[str, Any]:
        """Return the factors and the distances from the best rewards."""
        return super().state() | {"first": dict(self._first), "left": dict(self._left)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore factors and distances."""
        super().load_state(state)
        self._first, self._left = dict(state["first"]), dict(state["left"])


@dataclass
class Influence(GradientRule):
    """Gradient-based weights (arXiv 2509.11452): each measurement multiplies f_k by exp(rate I_k), and scales the sum
    to n. The influence I_k is the product of the component's gradient with the sum of all gradients."""

    rate: float = 0.1
    """Learning rate divided by the regularisation of the paper."""

    name = "influence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _is_number(self.rate) or self.rate <= 0:
            raise ValueError(f"rate must be a positive number, got {self.rate!r}")

    def updated(self, names: tuple[str, ...], products: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """Return the factors after one step of exponentiated gradient ascent."""
        logs = np.log(factors) + self.rate * products.sum(axis=1)
        raised = np.exp(logs - logs.max())
        return np.asarray(len(names) * raised / raised.sum())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
