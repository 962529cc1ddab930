"""What ``gdpo-nemo env list`` shows: every environment that has a name, its components, and where it comes from."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib.metadata import entry_points

from gdpo_nemo.config.objects import load_object
from gdpo_nemo.environments.base import declared
from gdpo_nemo.environments.registry import BUILT_IN, ENTRY_POINT_GROUP, find_plugin, load_environment, origin
from gdpo_nemo.environments.tasks import reward_functions as functions
from gdpo_nemo.errors import ConfigError


@dataclass(frozen=True)
class Listed:
    """One line of the list."""

    name: str
    components: tuple[str, ...] | None
    """None: they are named in the config, or the plugin cannot be loaded (see ``problem``)."""
    origin: str
    problem: str = ""
    """Why it cannot be used, in one line."""


def list_environments() -> list[Listed]:
    """Built-in environments, then installed plugins, both by name. A plugin that does not import is listed with why."""
    listed = [_listed(name, "built in") for name in sorted(BUILT_IN)]
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)):
        if point.name in BUILT_IN:
            listed.append(Listed(point.name, None, origin(point), "hidden by the built-in environment of this name"))
        else:
            listed.append(_listed(point.name, origin(point)))
    return listed


def list_functions() -> list[tuple[str, str]]:
    """The reward functions that have a name of their own, each with the first line of its documentation."""
    loaded = {name: load_object(place) for name, place in sorted(functions.BUILT_IN.items())}
    return [(name, (inspect.getdoc(function) or "").partition("\n")[0]) for name, function in loaded.items()]


def _listed(name: str, where: str) -> Listed:
    try:
        make = find_plugin(name, name)
    except ConfigError as error:
        return Listed(name, None, where, str(error))
    # Without options some cannot be built; their class may say what they give all the same.
    components = declared(make).reward_names
    try:
        return Listed(name, tuple(load_environment(name).reward_names), where)
    except ConfigError as error:
        silent = components is not None or name in BUILT_IN
        return Listed(name, components, where, "" if silent else str(error))
