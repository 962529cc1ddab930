"""From a name in the YAML section ``env`` to an environment: built in, installed as a plugin, or named by its place."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.config.algorithm_choice import samples
from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.config.objective_checks import check_components
from gdpo_nemo.config.objects import is_reference, load_object
from gdpo_nemo.config.schema import Config
from gdpo_nemo.environments.base import Environment, adapted, declared
from gdpo_nemo.errors import ConfigError

ENTRY_POINT_GROUP = "gdpo_nemo.environments"

_TASKS = Path(__file__).with_name("tasks")
_CLASS = re.compile(r"^class (\w+)\(Environment\):", re.MULTILINE)
_OTHER_NAMES = {
    "functions": "gdpo_nemo.environments.tasks.reward_functions:Functions",
    "nemo_gym": "gdpo_nemo.environments.nemo_gym.environment:NemoGym",
    "nemo_gym_agent": "gdpo_nemo.environments.nemo_gym.agent_environment:NemoGymAgent",
    "openenv": "gdpo_nemo.environments.openenv.openenv_episodes:OpenEnv",
}
"""Environments that are not called as their file."""


def _tasks() -> dict[str, str]:
    """The files of ``tasks`` that hold an environment, by their names; read as text, so that none of them is imported
    before it is wanted."""
    classes = {path.stem: _CLASS.search(path.read_text(encoding="utf-8")) for path in sorted(_TASKS.glob("*.py"))}
    places = {name: f"{__package__}.tasks.{name}:{found[1]}" for name, found in classes.items() if found}
    return {name: place for name, place in places.items() if place not in _OTHER_NAMES.values()}


BUILT_IN = {**_tasks(), **_OTHER_NAMES}
"""Environments of this package: where each one is."""


def environment_names() -> list[str]:
    """The names that need no place: built in or installed under the entry-point group ``gdpo_nemo.environments``."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def origin(point: EntryPoint) -> str:
    """Where an installed plugin comes from: its package and version, and the class in it."""
    package = getattr(point, "dist", None)
    return f"{package.name} {package.version} ({point.value})" if package else point.value


def load_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """The environment called ``name`` in the config, built from its options.

    The option ``plugin`` says what it is: a known name, ``file.py:Class`` or ``package.module.Class``; without it the
    environment's own name does. ``num_workers`` is the pool's business. Raises ConfigError for an unknown name, a class
    that cannot be imported or built, an object that is no environment, and ``num_workers`` where no worker would be
    used.
    """
    make = environment_class(name, options)
    options = dict(options or {})
    plugin = options.pop("plugin", name)
    # The pool's worker processes verify for an environment, unless servers do.
    if own_workers(name, options) and (declared(make).remote or declared(make).plays_with_endpoint):
        raise ConfigError(
            f"env.{name}.num_workers: has no effect, {plugin} does its work on servers and needs no worker processes"
        )
    options.pop("num_workers", None)
    try:
        environment = adapted(make(options))
    except ConfigError as error:
        raise ConfigError(f"env.{name}: {error}") from error
    except Exception as error:  # the constructor is the user's
        raise ConfigError(f"env.{name}: {plugin} could not be built: {first_line(error)}") from error
    _check(name, plugin, environment)
    return environment


def environment_class(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """What ``load_environment`` would build the environment from. Raises ConfigError where there is no such thing."""
    return find_plugin(name, plugin_of(name, options))


def judges_by_sample(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Whether the environment says ``by_sample``. False for what cannot be imported: its worker says why."""
    try:
        return declared(environment_class(name, options)).by_sample
    except ConfigError:
        return False


def plugin_of(name: str, options: Mapping[str, Any] | None) -> str:
    """What an environment's options say that it is. Raises ConfigError for options or a plugin of the wrong type."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"env.{name}: expected options as keys and values, got {options!r}")
    plugin = (options or {}).get("plugin", name)
    if not isinstance(plugin, str):
        raise ConfigError(f"env.{name}.plugin: must be a name or a place such as file.py:Class, not {plugin!r}")
    return plugin


def load_environments(section: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Environment]:
    """Every environment of the config section ``env``, by name. Raises as ``load_environment`` does."""
    return {name: load_environment(name, options) for name, options in section.items()}


def check_rewards(config: Config, environments: Mapping[str, Environment]) -> None:
    """Refuse weights of components that no environment gives, unless one cannot say yet which it does. Raises
    ConfigError."""
    if not samples(config):
        return
    if not any(environment.open_rewards for environment in environments.values()):
        check_components(config, [name for environment in environments.values() for name in environment.reward_names])


def own_workers(name: str, options: Mapping[str, Any] | None) -> int | None:
    """The option ``num_workers``: worker processes of this environment's own; None: it shares those of the others.

    Raises ConfigError where that is no positive integer.
    """
    number = (options or {}).get("num_workers")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 4096):
        raise ConfigError(f"env.{name}.num_workers: must be a number of processes, 1 to 4096, not {str(number)[:40]}")
    return number


def find_plugin(name: str, plugin: str) -> Any:
    """The class behind ``plugin``, for the environment ``name``. Raises ConfigError as ``load_environment`` does."""
    if plugin in BUILT_IN:
        return load_object(BUILT_IN[plugin])
    installed = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP, name=plugin)}
    if len(installed) > 1:
        places = " and ".join(origin(point) for point in installed.values())
        raise ConfigError(f"env.{name}: several packages call an environment {plugin!r}: {places}; write the place")
    for point in installed.values():
        try:
            return load_object(f"{point.module}:{point.attr}")
        except ConfigError as error:
            raise ConfigError(f"env.{name}: plugin {plugin}: {error}") from error
    if not is_reference(plugin):
        raise ConfigError(f"env.{name}: no environment is called {plugin!r}{nearest(plugin, environment_names())}")
    try:
        return load_object(plugin)
    except ConfigError as error:
        raise ConfigError(f"env.{name}.plugin: {error}") from error


def _check(name: str, plugin: str, environment: Environment) -> None:
    names = environment.reward_names
    if not (environment.verifies or environment.has_turns or environment.plays_with_endpoint):
        raise ConfigError(
            f"env.{name}: {plugin} is no environment: it has no method verify(trajectories) and no episode()"
        )
    if isinstance(names, str) or not names or not all(isinstance(component, str) for component in names):
        raise ConfigError(f"env.{name}: {plugin} is no environment: reward_names must be a tuple of names")
    if len(set(names)) != len(names):
        raise ConfigError(f"env.{name}: {plugin} names a reward twice: {', '.join(names)}")
