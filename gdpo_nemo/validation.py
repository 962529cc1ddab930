"""Every check of a config that runs none of its author's code: the config by itself, and against what its environments
announce."""

from __future__ import annotations

from gdpo_nemo.config.algorithm_choice import samples
from gdpo_nemo.config.objective_checks import check_components
from gdpo_nemo.config.schema import Config
from gdpo_nemo.config.validate import validate as validate_alone
from gdpo_nemo.environments.preview import announced_components
from gdpo_nemo.environments.registry import plugin_of
from gdpo_nemo.errors import ConfigError


def validate(config: Config) -> list[str]:
    """Refuses what cannot run as written; returns notes on what runs but may surprise.

    Raises:
        ConfigError: names the key and the remedy.
    """
    notes = validate_alone(config)
    if config.health.stop_on:
        _check_stops(config)

    announced = [announced_components(name, options) for name, options in config.env.items()]
    if not samples(config):
        return notes
    _check_tools(config)
    known = [names for names in announced if names is not None]
    if len(known) == len(announced):  # else one of them would have to run its author's code, which is done at the start
        check_components(config, {component for names in known for component in names})
    return notes


def _check_tools(config: Config) -> None:
    """Refuse tools whose results the policy would never read."""
    turns = config.rollout.turns.max_turns
    limit = config.rollout.env_timeout_s
    for name, options in config.env.items():
        if plugin_of(name, options) not in ("tools", "tool_class") or config.rollout.function is not None:
            continue
        if turns < 2:
            raise ConfigError(
                f"rollout.turns.max_turns: must be at least 2 so that the policy reads results of env.{name} ({turns})"
            )
        own = options.get("time_limit_s") if plugin_of(name, options) == "tools" else None
        if isinstance(own, (int, float)) and own >= limit:
            raise ConfigError(f"env.{name}.time_limit_s: must be below rollout.env_timeout_s, {limit:g} ({own:g})")


def _check_stops(config: Config) -> None:
    from gdpo_nemo.observe.health_alerts import unknown_stops  # it reads the sources for what metrics there are

    for name in unknown_stops(config):
        raise ConfigError(
            f"health.stop_on: {name} is not judged at every step; add it to health.checks with at: every and its bounds"
        )
