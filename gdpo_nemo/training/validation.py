"""Checks of a config that do not run user code: the checks of the package ``config``, plus those of environments and
metrics."""

from __future__ import annotations

from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.objective_checks import check_weighted_components
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.validate import validate as validate_config
from gdpo_nemo.environments.registry import announced_components, plugin_of
from gdpo_nemo.utils.errors import ConfigError


def validate(config: Config, weights: bool = True) -> Resolved:
    """Check a config, and return it with the algorithm, layout and model that it determines.

    Args:
        weights: True if the model's folder must contain weights and a tokenizer. An estimate requires only its
            ``config.json``.

    Raises:
        ConfigError: if the config is invalid. The message names the key and the remedy.
    """
    resolved = validate_config(config, weights)
    if config.health.stop_on or config.health.disabled:
        _check_health(config)

    announced = {name: announced_components(name, options) for name, options in config.env.items()}
    if not resolved.algorithm.samples:
        return resolved
    _check_tools(config)
    _check_limits(config)
    check_weighted_components(config, announced)  # Other names are known only when user code has run.
    return resolved


def _check_tools(config: Config) -> None:
    """Check that the policy can read the results of tools. Raises ConfigError."""
    turns = config.rollout.turns.max_turns
    for name, options in config.env.items():
        if plugin_of(name, options) not in ("tools", "tool_class") or config.rollout.function is not None:
            continue
        if turns < 2:
            raise ConfigError(
                f"rollout.turns.max_turns: must be at least 2 so that the policy reads results of env.{name} ({turns})"
            )


_INNER_LIMITS = ("time_limit_s", "sample_limit_s")
"""Options of environments that limit a part of a verification."""


def _check_limits(config: Config) -> None:
    """Check that the time limit of a verification leaves time for the limits inside it. Raises ConfigError."""
    limit = config.rollout.env_timeout_s
    for name, options in config.env.items():
        if plugin_of(name, options) == "tool_class":  # its limit is that of a call between two turns
            continue
        for key in _INNER_LIMITS:
            inner = options.get(key) if options else None
            if isinstance(inner, (int, float)) and inner >= limit:
                raise ConfigError(f"env.{name}.{key}: must be below rollout.env_timeout_s, {limit:g} ({inner:g})")


def _check_health(config: Config) -> None:
    # This module reads the source files to find all metrics.
    from gdpo_nemo.observe.health import unknown_disabled, unknown_stops

    for name in unknown_disabled(config):
        raise ConfigError(f"health.disabled: {name} has no default check")
    for name in unknown_stops(config):
        raise ConfigError(
            f"health.stop_on: {name} is not checked at every step; add it to health.checks with at: every and bounds"
        )
