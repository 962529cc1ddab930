"""Custom estimators, rules, losses and corrections: loading and testing before any process starts.

torch is imported only if there is a custom loss or correction to test, so that a dry run stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_nemo.algorithms.loss_selection import Functions, is_import_path, loss_import_paths
from gdpo_nemo.algorithms.rewards import check_shaping, named_components, rule_name
from gdpo_nemo.algorithms.weighting import CustomRule, RuleRunner, StepGradients, StepRewards, WeightingRule
from gdpo_nemo.algorithms.weighting_rules import options_of, read_rule, rule_of
from gdpo_nemo.config.objective_checks import check_estimator, check_skipping
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.utils.errors import ConfigError, RunError, UserCodeFailed, first_line
from gdpo_nemo.utils.exits import exits_contained
from gdpo_nemo.utils.import_path import has_state, load_functions
from gdpo_nemo.utils.state import from_json, to_json

if TYPE_CHECKING:
    import torch

    from gdpo_nemo.algorithms import LossSettings, Terms, TokenFields

_LENGTHS = (5, 1, 7, 3)
"""Lengths in tokens of the sequences for the test of a loss. The minimum length is a single token."""


_ESTIMATOR, _SHAPING, _WEIGHTING = "gdpo.estimator", "gdpo.shaping", "gdpo.weighting"


class CustomFunctions:
    """Custom estimator, shaping rules and weighting rule of a run. Instances of classes keep their state from step to
    step.

    Only the call that computes a step's advantages may use this object, so that the state changes once per step.

    Raises:
        ConfigError: if a function cannot be loaded.
    """

    def __init__(self, gdpo: GdpoConfig):
        self._loaded = {key: _load(key, gdpo) for key in (_ESTIMATOR, _SHAPING, _WEIGHTING)}
        self.estimator = next(map(_contained, self._loaded[_ESTIMATOR].values()), None)
        """Custom estimator, or None for a built-in estimator."""
        self.rules = {name: _contained(function) for name, function in self._loaded[_SHAPING].items()}
        """Custom shaping rules by import path."""
        self.weighting = _weighting_rule(gdpo, self._loaded[_WEIGHTING])
        """Built-in or custom rule of ``gdpo.weighting``, or None."""

    def state(self) -> dict[str, Any]:
        """Return the state of each instance, by config key and import path, for a checkpoint.

        Raises:
            UserCodeFailed: if a method ``state`` fails.
        """
        return {label: _called(label, function.state) for label, function in self._with_state().items()}

    def load_state(self, states: Mapping[str, Any]) -> list[str]:
        """Restore the state of all instances. Return the instances that ``states`` does not contain.

        Raises:
            UserCodeFailed: if a method ``load_state`` fails.
        """
        missing = []
        for label, function in self._with_state().items():
            if label in states:
                _called(label, function.load_state, states[label])
            else:
                missing.append(label)
        return missing

    def _with_state(self) -> dict[str, Any]:
        """Return the instances with state by config key and import path."""
        found = {}
        for key, functions in self._loaded.items():
            for name, function in functions.items():
                if has_state(function):
                    found[f"{key}: {name}"] = function
        return found


def load_estimator(gdpo: GdpoConfig) -> Callable[..., Terms] | None:
    """Load the custom estimator in ``gdpo.estimator`` for use outside of a run's steps. None if it is built-in.

    Raises:
        ConfigError: if the function cannot be loaded, or has state.
    """
    return next(map(_contained, _without_state(_ESTIMATOR, gdpo).values()), None)


def load_shaping_rules(gdpo: GdpoConfig) -> dict[str, Callable[..., np.ndarray]]:
    """Load the custom functions in ``gdpo.shaping`` by import path. Errors are those of ``load_estimator``."""
    return {name: _contained(function) for name, function in _without_state(_SHAPING, gdpo).items()}


def _weighting_rule(gdpo: GdpoConfig, loaded: Mapping[str, Callable[..., Any]]) -> WeightingRule | None:
    """Return a new rule of ``gdpo.weighting``, or None."""
    for name, function in loaded.items():
        return CustomRule(name, function, options_of(gdpo.weighting))
    return read_rule(gdpo.weighting, gdpo.rewards)


def _load(key: str, gdpo: GdpoConfig) -> dict[str, Callable[..., Any]]:
    names = {
        _ESTIMATOR: [gdpo.estimator],
        _SHAPING: map(rule_name, gdpo.shaping),
        _WEIGHTING: [rule_of(gdpo.weighting)],
    }
    return load_functions(key, filter(is_import_path, names[key]), classes=True)


def _without_state(key: str, gdpo: GdpoConfig) -> dict[str, Callable[..., Any]]:
    found = _load(key, gdpo)
    for name, function in found.items():
        if has_state(function):
            raise ConfigError(f"{key}: {name} has state, which is only known in the steps of a run")
    return found


def _contained(function: Callable[..., Any]) -> Callable[..., Any]:
    contained = exits_contained()(function)
    contained.__name__ = getattr(function, "__name__", type(function).__name__)
    return contained


def _called(label: str, method: Callable[..., Any], *arguments: Any) -> Any:
    try:
        with exits_contained():
            return method(*arguments)
    except Exception as error:
        raise UserCodeFailed(f"{label}.{method.__name__} raised {first_line(error)}") from error


def check_own_functions(config: Config) -> list[str]:
    """Load the custom estimator, rules, loss and correction, and test each on a small input.

    Returns:
        A note for each function that returns different values for the same input.

    Raises:
        ConfigError: if a function cannot be loaded, raises an exception or returns invalid values, or its state cannot
            be saved and restored. The message names the config key.
    """
    gdpo = config.gdpo
    trials = []
    for key in (_ESTIMATOR, _SHAPING, _WEIGHTING):
        trials += [_Trial(key, name, function) for name, function in _load(key, gdpo).items()]
    _check_single_use(config, trials)
    for trial in trials:
        if trial.key == _ESTIMATOR:
            check_estimator(gdpo, trial.recorded())
        if trial.key == _WEIGHTING:
            _try_weighting(gdpo, trial)
    if rules := {trial.name: trial.recorded() for trial in trials if trial.key == _SHAPING}:
        _try_rules(gdpo, rules)
    if paths := loss_import_paths(config.loss_fn):
        functions = load_functions("loss_fn", paths)
        losses = [_Trial("loss_fn", name, function) for name, function in functions.items()]
        _try_loss(config.loss_fn, {trial.name: trial.recorded() for trial in losses})
        check_skipping(config, functions)
        trials += losses
    return [note for trial in trials if (note := trial.repeat())]


def _check_single_use(config: Config, trials: Sequence[_Trial]) -> None:
    """Check that no setting calls a function with state more than once per step. Raises ConfigError."""
    gdpo = config.gdpo
    also_rules = {
        "rollout.selection.enabled": config.rollout.selection.enabled,
        "gdpo.constraints": bool(gdpo.constraints),
        "gdpo.weighting": bool(gdpo.weighting),
        "gdpo.component_gradient_period": bool(gdpo.component_gradient_period),
        "algorithm.type": config.algorithm.type == "ppo",
    }
    names = [rule_name(rule) for rule in gdpo.shaping]
    for trial in trials:
        calls_again = {"gdpo.dynamic_sampling.enabled": gdpo.dynamic_sampling.enabled}
        if trial.key == _SHAPING:
            calls_again |= also_rules | {"gdpo.shaping: another rule": names.count(trial.name) > 1}
        for key, is_set in calls_again.items():
            if is_set and has_state(trial.function):
                raise ConfigError(
                    f"{key}: conflicts with {trial.key}: {trial.name}, whose state must change only once per step"
                )


class _Trial:
    """Test of a custom function: records its calls, and repeats the last call."""

    def __init__(self, key: str, name: str, function: Any):
        self.key = key
        self.name = name
        self.function = function
        self._last: tuple[list[Any], dict[str, Any], Any] | None = None
        """Arguments, options and result of the last call."""

    def recorded(self) -> Callable[..., Any]:
        """Return the function, with its calls recorded."""
        contained = _contained(self.function)

        @wraps(contained)
        def record(*arguments: Any, **options: Any) -> Any:
            before = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
            result = contained(*arguments, **options)
            self._last = before, options, result
            return result

        return record

    def repeat(self) -> str | None:
        """Call the function again with the same input. For an object with state, also call a restored copy of it.

        Returns:
            A note if the result differs.

        Raises:
            ConfigError: if the state cannot be saved, or the copy returns another result.
        """
        if self._last is None:
            return None
        arguments, options, expected = self._last
        copy: Any = self.function
        try:
            with exits_contained():
                if has_state(copy):
                    copy = load_functions(self.key, [self.name], classes=True)[self.name]
                    copy.load_state(from_json(to_json(self.function.state())))
                    expected = self.function(*arguments, **options)
                found = copy(*arguments, **options)
        except Exception as error:
            raise ConfigError(f"{self.key}: {self.name}, called again: {first_line(error)}") from error
        if _content(found) == _content(expected):
            return None
        if has_state(copy):
            raise ConfigError(
                f"{self.key}: {self.name} returns other values after its state was restored; state() must contain "
                "everything that changes from call to call"
            )
        return (
            f"{self.key}: {self.name} returns different values for the same input, so a resumed run may differ "
            "(docs/custom_algorithms.md, State)"
        )


def _content(result: Any) -> bytes:
    """Return the numbers in the result of a custom function, which was checked before."""
    values = getattr(result, "components", result)
    values = list(values.values()) if isinstance(values, Mapping) else values
    values = values[0] if isinstance(values, tuple) else values
    values = values.detach() if hasattr(values, "detach") else values
    return np.asarray(values).tobytes()


def _try_rules(gdpo: GdpoConfig, functions: Functions) -> None:
    """Test every shaping rule with rewards of 0 and 1 and with a missing reward."""
    rules = gdpo.shaping
    try:
        check_shaping(rules, sorted({*named_components(rules), *gdpo.rewards}), functions)
    except ValueError as error:
        raise ConfigError(f"gdpo.shaping: {error}") from None


def _try_weighting(gdpo: GdpoConfig, trial: _Trial) -> None:
    """Test a weighting rule in two steps with rewards of 0 and 1 in two groups."""
    draw = np.random.default_rng(0)
    runner = RuleRunner(CustomRule(trial.name, _observing(trial), options_of(gdpo.weighting)))
    weights = {name: weight for name, weight in gdpo.rewards.items() if weight}
    try:
        for step in (1, 2):
            rewards = {name: draw.integers(0, 2, 8).astype(np.float64) for name in weights}
            runner.factors(StepRewards(step, weights, rewards, np.repeat([0, 1], 4)))
            runner.observe(draw.normal(size=8), {name: draw.normal(size=8) for name in weights})
            runner.observe_gradients(StepGradients(tuple(weights), np.eye(len(weights))))
    except RunError as error:
        raise ConfigError(str(error)) from None


def _observing(trial: _Trial) -> Callable[..., Any]:
    """Return the recorded function of a trial, with the methods of its instance that observe steps."""
    recorded = trial.recorded()
    for method in ("observe", "observe_gradients"):
        if hasattr(trial.function, method):
            setattr(recorded, method, getattr(trial.function, method))
    return recorded


def _try_loss(settings: LossSettings, functions: Functions) -> None:
    """Test loss and correction with random log-probs. The log-probs are equal to, near or far from the sampler's
    log-probs."""
    import torch

    from gdpo_nemo.algorithms.policy_loss import importance_weights, policy_loss

    # The gradients of KL penalty and entropy bonus would hide that the loss has no gradient.
    settings = replace(settings, reference_policy_kl_penalty=0.0, entropy_bonus=0.0)
    total = 0.0
    for distance in (0.0, 0.3, 3.0):
        fields, logprobs = _tokens(distance)
        try:
            loss, _ = policy_loss(logprobs, None, fields, settings, functions=functions)
            if loss.requires_grad:
                total += float(torch.autograd.grad(loss, logprobs)[0].abs().sum())
            weights = importance_weights(fields, settings.off_policy, functions)
        except (ValueError, RuntimeError) as error:
            message = str(error)
            has_key = message.startswith("loss_fn.")
            raise ConfigError(message if has_key else f"loss_fn.{message}") from None
        if is_import_path(settings.off_policy.correction):
            _check_weights(weights, fields, settings)
    if not total:
        raise ConfigError(
            f"loss_fn.type: {settings.type} has no gradient, so the policy cannot learn; check whether the log-prob "
            "is detached"
        )


def _check_weights(weights: torch.Tensor, fields: TokenFields, settings: LossSettings) -> None:
    """Check that a correction's weights are not negative. The loss type gspo also requires that all weights in a
    sequence are equal."""
    mode = settings.off_policy.mode
    if (weights < 0).any():
        raise ConfigError(f"loss_fn.off_policy.mode: {mode} returned a negative weight, {float(weights.min()):g}")
    differs_by_token = not weights.allclose(fields.sequence_means(weights))
    if differs_by_token and settings.off_policy.level != "token" and settings.type == "gspo":
        raise ConfigError(f"loss_fn.off_policy.mode: the per-token weights of {mode} conflict with loss_fn.type gspo")


def _tokens(distance: float) -> tuple[TokenFields, torch.Tensor]:
    """Return the batch fields and log-probs of a few random sequences.

    Args:
        distance: standard deviation in nats of the differences from the log-probs of sampler, old policy and reference.
    """
    import torch

    from gdpo_nemo.algorithms import TokenFields, token_weights

    generator = torch.Generator().manual_seed(0)
    ids = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    count = len(ids)
    logprobs = -torch.rand(count, generator=generator) * 3
    noise = [distance * torch.randn(count, generator=generator) for _ in range(3)]
    fields = TokenFields(
        advantages=torch.tensor([1.0, -0.5, 0.0, -1.5])[ids],
        weights=torch.from_numpy(token_weights(_LENGTHS, "token_mean")).float()[ids],
        sequence_ids=ids,
        num_sequences=len(_LENGTHS),
        staleness=(torch.arange(count) % 3).int(),
        old_logprobs=logprobs + noise[0],
        sampler_logprobs=logprobs + noise[1],
        reference_logprobs=logprobs + noise[2],
    )
    return fields, logprobs.requires_grad_()
