"""Algorithms of single environments: the option ``env.NAME.algorithm``, and the config that results for each of them.

An environment with this option is trained as in a separate run, with its estimator, loss, weights and batch statistics.
All other environments share the algorithm and the batch statistics of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from gdpo_nemo.algorithms.loss_settings import LossSettings
from gdpo_nemo.config.schema import Config, GdpoConfig
from gdpo_nemo.utils.errors import ConfigError, nearest

TYPES = ("gdpo", "distillation")
"""Accepted values of ``type``, also for a run that has environments with an algorithm."""
OWN_KEYS = (
    "rewards", "estimator", "preset", "options", "batch_norm", "epsilon", "noise", "shaping", "family_scale",
    "group_by", "kl_in_reward", "credit", "discount", "turn_baseline",
)  # fmt: skip
"""Keys of the section ``gdpo`` that an environment may set. The others apply to whole steps."""
OTHERS = "others"
"""Part of a step that contains the samples of all environments without an algorithm, in metrics and checkpoints."""
_OWN = "algorithm"
_ADAPTIVE = ("use_adaptive_entropy", "entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")


@dataclass
class EnvironmentAlgorithm:
    """Value of ``env.NAME.algorithm``. A key that is not set has the run's value."""

    type: str | None = None
    """gdpo or distillation; null: algorithm.type of the run."""
    gdpo: GdpoConfig = field(default_factory=GdpoConfig)
    loss_fn: LossSettings = field(default_factory=LossSettings)


def own_algorithm(options: Any) -> Mapping[str, Any] | None:
    """Return the option ``algorithm`` of an environment, or None without this option."""
    return options[_OWN] if isinstance(options, Mapping) and _OWN in options else None


def own_configs(config: Config) -> dict[str, Config]:
    """Return the config of each environment with an algorithm, by the environment's name."""
    found = {}
    for name, options in config.env.items():
        own = own_algorithm(options)
        if own is not None:
            found[name] = _with_own(config, own)
    return found


def config_of(config: Config, environment: str) -> Config:
    """Return the config with which the samples of an environment are trained."""
    own = own_algorithm(config.env.get(environment))
    return config if own is None else _with_own(config, own)


def part_of(config: Config, environment: str) -> str:
    """Return the part of a step that an environment belongs to. Samples are only compared with those of their part.

    The part of an environment with an algorithm has its name, and that of all others is ``OTHERS``, or the name of the
    only other environment.
    """
    if own_algorithm(config.env.get(environment)) is not None:
        return environment
    others = [name for name, options in config.env.items() if own_algorithm(options) is None]
    return environment if len(others) == 1 else OTHERS


def configs_of_parts(config: Config) -> dict[str, Config]:
    """Return the config of each part of a step (``part_of``), in the order of the environments."""
    return {part_of(config, name): config_of(config, name) for name in config.env}


def trained_configs(config: Config) -> list[Config]:
    """Return the configs with which the run trains: that of the run, unless no environment uses it, and those of the
    environments with an algorithm."""
    return list(configs_of_parts(config).values()) or [config]


def default_rewards(env: Mapping[str, Any]) -> dict[str, Any]:
    """Return all weights that the environments' algorithms set, for a config without ``gdpo.rewards``. Empty unless
    every environment sets its weights."""
    weights: dict[str, Any] = {}
    for options in env.values():
        rewards = ((own_algorithm(options) or {}).get("gdpo") or {}).get("rewards")
        if not rewards:
            return {}
        weights = {**rewards, **weights}
    return weights


def check_own_keys(name: str, own: Mapping[str, Any]) -> None:
    """Check that an environment may set the keys of its algorithm.

    Args:
        name: name of the environment.
        own: value of ``env.NAME.algorithm`` with valid keys and types.

    Raises:
        ConfigError: if the type is not supported, or a key applies to the whole run.
    """
    where = f"env.{name}.{_OWN}"
    kind = own.get("type")
    if kind is not None and kind not in TYPES:
        raise ConfigError(f"{where}.type: {kind!r} is not supported for one environment; use {' or '.join(TYPES)}")
    for key in own.get("gdpo") or ():
        if key not in OWN_KEYS:
            hint = nearest(key, OWN_KEYS)
            raise ConfigError(f"{where}.gdpo.{key}: applies to the whole run; set gdpo.{key}, or another key{hint}")
    for key in own.get("loss_fn") or ():
        if key in _ADAPTIVE:
            raise ConfigError(f"{where}.loss_fn.{key}: applies to the whole run, and not with env.*.{_OWN}; remove it")


def check_whole_run(config: Config) -> None:
    """Check that the run's other settings support environments with an algorithm. Raises ConfigError."""
    if not own_configs(config):
        return
    gdpo, loss = config.gdpo, config.loss_fn
    conflicts = {
        f"algorithm.type {config.algorithm.type} (use gdpo or distillation)": config.algorithm.type not in TYPES,
        "gdpo.constraints": bool(gdpo.constraints),
        "gdpo.schedules": bool(gdpo.schedules),
        "gdpo.weighting": bool(gdpo.weighting),
        "gdpo.component_gradient_period": bool(gdpo.component_gradient_period),
        "loss_fn.use_adaptive_entropy": loss.use_adaptive_entropy,
        "policy.train_global_batch_size (use null, one update per iteration)": (
            config.policy.train_global_batch_size is not None
        ),
    }
    for what, is_set in conflicts.items():
        if is_set:
            raise ConfigError(f"env.{next(iter(own_configs(config)))}.{_OWN}: conflicts with {what}")


def check_rows_of(config: Config, environments: Iterable[str]) -> None:
    """Check that every environment with an algorithm has training rows. Raises ConfigError.

    Args:
        environments: environments of the training rows.
    """
    found = set(environments)
    for name in own_configs(config):
        if name not in found:
            raise ConfigError(f"env.{name}.{_OWN}: no row of data.train has the environment {name!r}; remove it")


def _with_own(config: Config, own: Mapping[str, Any]) -> Config:
    algorithm = replace(config.algorithm, type=own.get("type") or config.algorithm.type)
    gdpo = _replaced(config.gdpo, own.get("gdpo") or {})
    return replace(config, algorithm=algorithm, gdpo=gdpo, loss_fn=_replaced(config.loss_fn, own.get("loss_fn") or {}))


def _replaced(section: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a section with other values. A mapping replaces the fields of a section, and any other value."""
    changed = {}
    for key, value in values.items():
        now = getattr(section, key)
        changed[key] = _replaced(now, value) if is_dataclass(now) and isinstance(value, Mapping) else value
    return replace(section, **changed)
