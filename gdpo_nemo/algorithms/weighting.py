"""Interface of weighting rules, which change the weights of reward components from step to step (``gdpo.weighting``).

A rule returns a factor for each component, and the component's weight in the step is its weight in ``gdpo.rewards``,
after constraints and schedules, times this factor (``component_weights.ComponentWeights``). The built-in rules are in
``weighting_rules`` and ``weighting_gradients``, and ``weighting_rules.read_rule`` reads a config.

A step uses a rule in this order::

    factors = rule.factors(batch)       # before the advantages, from the rewards of the step and the rule's state
    rule.observe(trained)               # after the advantages, for the factors of later steps
    rule.observe_gradients(gradients)   # after the first update, if the step measures gradients by component
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gdpo_nemo.utils.errors import GdpoError, NumericsFailed, UserCodeFailed, first_line
from gdpo_nemo.utils.exits import exits_contained


@dataclass(frozen=True)
class StepRewards:
    """Rewards of a step, from which a rule computes the factors of the step."""

    step: int
    """Number of the step, counted from 1."""
    weights: Mapping[str, float]
    """Weight of each component after constraints and schedules. Components of weight 0 are not included."""
    rewards: Mapping[str, np.ndarray]
    """Rewards by component, after shaping: float64 [samples], NaN if missing."""
    groups: np.ndarray
    """Group of each sample: int64 [samples]."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the components, in the order of `gdpo.rewards`."""
        return tuple(self.weights)

    def present(self, name: str) -> np.ndarray:
        """Return the rewards of a component without the missing ones: float64 [samples with the component]."""
        column = self.rewards.get(name)
        return np.zeros(0) if column is None else column[np.isfinite(column)]

    def signed_means(self) -> dict[str, float]:
        """Return the mean reward of each component of which the step has a reward. The mean is multiplied by -1 if the
        weight is negative, so that larger values are better."""
        found = {}
        for name, weight in self.weights.items():
            given = self.present(name)
            if len(given):
                found[name] = math.copysign(1.0, weight) * float(given.mean())
        return found


@dataclass(frozen=True)
class RowRewards:
    """Rewards of a row's criteria in a step, from which a rule computes the factors of the criteria."""

    row: str
    """Id of the row, which is the same in every epoch."""
    weights: Mapping[str, float]
    """Weight of each criterion of one family, by component."""
    rewards: Mapping[str, np.ndarray]
    """Rewards by component: float64 [samples of the row], NaN if missing."""


@dataclass(frozen=True)
class StepAdvantages:
    """Advantages of a step, from which a rule computes the factors of later steps."""

    batch: StepRewards
    """Rewards of the step."""
    advantages: np.ndarray
    """Advantage of each sample, the mean over its policy tokens: float64 [samples]."""
    terms: Mapping[str, np.ndarray]
    """Weighted term of each component before the batch norm: float64 [samples]."""


@dataclass(frozen=True)
class StepGradients:
    """Inner products of the gradients of the components' terms, each divided by the size of its weight in the step."""

    names: tuple[str, ...]
    products: np.ndarray
    """float64 [components, components]."""


class WeightingRule:
    """Base class of rules. The options of a built-in rule are the fields of its dataclass."""

    name: str
    """Name or import path in `gdpo.weighting`, for messages."""
    reads_advantages: ClassVar[bool] = False
    """True if the rule needs `observe` in every step."""
    reads_gradients: ClassVar[bool] = False
    """True if the rule needs `observe_gradients`, and therefore gdpo.component_gradient_period."""
    can_be_zero: ClassVar[bool] = False
    """True if a factor may be 0."""
    is_common: ClassVar[bool] = False
    """True if all components get the same factor."""
    most_components: ClassVar[int | None] = None
    """Largest number of components; None: no limit."""
    weighs_criteria: ClassVar[bool] = False
    """True if the rule has factors for the criteria of a family."""

    def factors(self, batch: StepRewards) -> Mapping[str, float]:
        """Return the factor of each component's weight in the step."""
        raise NotImplementedError

    def criterion_factors(self, row: RowRewards) -> dict[str, float]:
        """Return the factor of each criterion of a family in a row's group."""
        return dict.fromkeys(row.weights, 1.0)

    def observe(self, trained: StepAdvantages) -> None:
        """Receive the advantages of the step."""
        return

    def observe_gradients(self, gradients: StepGradients) -> None:
        """Receive the gradients by component of the step's first update."""
        return

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which `utils.state.to_json` must support."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        return


class CustomRule(WeightingRule):
    """Rule in a user's file: a function ``(batch, **options) -> factors``, or an instance of a class with this call.

    An instance may also define `observe` and `observe_gradients`. Its state is saved with that of other custom
    functions.

    Args:
        name: import path, for messages.
        function: the loaded function or instance.
    """

    can_be_zero = True

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]):
        self.name = name
        self._function = function
        self._options = dict(options)

    def factors(self, batch: StepRewards) -> Any:
        """Call the function."""
        return self._function(batch, **self._options)

    def observe(self, trained: StepAdvantages) -> None:
        """Call the method `observe` of the instance, if it has one."""
        self._notify("observe", trained)

    def observe_gradients(self, gradients: StepGradients) -> None:
        """Call the method `observe_gradients` of the instance, if it has one."""
        self._notify("observe_gradients", gradients)

    def _notify(self, method: str, value: Any) -> None:
        if hasattr(self._function, method):
            getattr(self._function, method)(value)


class RuleRunner:
    """Calls of a rule in the steps of a run. Every failure names the rule and the step.

    Args:
        rule: the rule of the run.
    """

    def __init__(self, rule: WeightingRule):
        self.rule = rule
        self._batch: StepRewards | None = None
        self._is_unobserved = False

    def factors(self, batch: StepRewards) -> dict[str, float]:
        """Return the factor of each component in ``batch.weights``, in this order.

        Raises:
            UserCodeFailed, NumericsFailed: if the rule fails, or a factor is missing, unknown, negative or not finite,
                or all factors are 0.
        """
        if self._is_unobserved and self.rule.reads_advantages:
            raise self._failed(batch.step, "has not received the advantages of the previous step")
        self._batch = batch
        self._is_unobserved = True
        found = self._call(batch.step, self.rule.factors, batch)
        if problem := _problem(found, batch.names):
            raise self._failed(batch.step, f"returned {problem}")
        return {name: float(found[name]) for name in batch.names}

    def criterion_factors(self, step: int, row: RowRewards) -> dict[str, float]:
        """Return the factor of each criterion of a family in a row's group."""
        return dict(self._call(step, self.rule.criterion_factors, row))

    def observe(self, advantages: np.ndarray, terms: Mapping[str, np.ndarray]) -> None:
        """Pass the advantages of the step to the rule, for the samples of `factors`."""
        assert self._batch is not None
        self._is_unobserved = False
        self._call(self._batch.step, self.rule.observe, StepAdvantages(self._batch, advantages, terms))

    def observe_gradients(self, gradients: StepGradients) -> None:
        """Pass the gradients by component to the rule."""
        assert self._batch is not None
        self._call(self._batch.step, self.rule.observe_gradients, gradients)

    def _call(self, step: int, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            # A value that is not finite is reported with the step.
            with np.errstate(all="ignore"), exits_contained():
                return method(*arguments)
        except GdpoError:
            raise
        except RuleRefusal as error:
            raise self._failed(step, str(error)) from None
        except Exception as error:
            raise self._failed(step, f"raised {first_line(error)}") from error

    def _failed(self, step: int, problem: str) -> GdpoError:
        kind = UserCodeFailed if isinstance(self.rule, CustomRule) else NumericsFailed
        return kind(f"gdpo.weighting: {self.rule.name}, step {step}: {problem}")


class RuleRefusal(ValueError):
    """A built-in rule is not defined for the rewards of a step. The message states the reason and the remedy."""


def _problem(found: Any, names: Sequence[str]) -> str | None:
    """Describe why the result of a rule is invalid. None if it is valid."""
    if not isinstance(found, Mapping):
        return f"{type(found).__name__}; expected a mapping of component to factor"
    if set(found) != set(names):
        listed = ", ".join(map(str, found)) or "none"
        return f"factors of other components ({listed}); expected {', '.join(names)}"
    for name in names:
        factor = found[name]
        is_number = isinstance(factor, (int, float, np.number)) and not isinstance(factor, bool)
        if not is_number or not 0 <= factor < math.inf:
            return f"{factor!r} for component {name!r}; a factor must be a finite number, and at least 0"
    if names and not any(found[name] for name in names):
        return "the factor 0 for every component; at least one must be positive"
    return None
