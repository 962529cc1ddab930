"""What the section ``env`` says before any author's code runs: for ``--dry-run``, which must be instant and
harmless."""

from __future__ import annotations

import ast
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Mapping

from gdpo_nemo.config.files import find_file
from gdpo_nemo.config.messages import nearest
from gdpo_nemo.config.objects import PICKLE, file_of_module, is_reference
from gdpo_nemo.config.reading import read_bytes
from gdpo_nemo.environments.base import declared
from gdpo_nemo.environments.registry import (
    BUILT_IN,
    ENTRY_POINT_GROUP,
    environment_names,
    find_plugin,
    load_environment,
    own_workers,
    plugin_of,
)
from gdpo_nemo.environments.tasks.reward_functions import BUILT_IN as FUNCTIONS, is_url
from gdpo_nemo.errors import ConfigError


def announced_components(name: str, options: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The components that an environment's entry promises, or None where only its author's code or its servers could
    tell.

    Raises:
        ConfigError: no environment or function of the name; the file, the name in it, or the package is not there.
    """
    plugin = plugin_of(name, options)
    options = dict(options or {})
    own_workers(name, options)
    if plugin in BUILT_IN and declared(find_plugin(name, plugin)).instant:
        environment = load_environment(name, options)
        return None if environment.open_rewards else tuple(environment.reward_names)
    if plugin == "tools":
        _check_tools(name, options)
    if plugin == "tool_class" and isinstance(options.get("make"), str):
        _check_place(f"env.{name}.make", options["make"], "class", ())
    if plugin in ("functions", "tools", "tool_class") and isinstance(options.get("functions"), Mapping):
        for component, entry in options["functions"].items():
            place = entry.get("function") if isinstance(entry, Mapping) else entry
            if isinstance(place, str) and place not in FUNCTIONS and not is_url(place):
                _check_place(f"env.{name}.functions.{component}", place, "reward function", FUNCTIONS)
        return tuple(str(component) for component in options["functions"])
    installed = plugin in BUILT_IN or any(entry_points(group=ENTRY_POINT_GROUP, name=plugin))
    if not installed:
        _check_place(f"env.{name}", plugin, "environment", environment_names())
    return None


def _check_tools(name: str, options: Mapping[str, Any]) -> None:
    references = options.get("tools")
    if not isinstance(references, list) or not references:
        raise ConfigError(f"env.{name}.tools: expected a list of functions such as [file.py:function] ({references!r})")
    for index, place in enumerate(references):
        if not isinstance(place, str):
            raise ConfigError(f"env.{name}.tools[{index}]: expected a function such as file.py:function ({place!r})")
        _check_place(f"env.{name}.tools[{index}]", place, "tool", ())


def _check_place(key: str, place: str, what: str, known: Any) -> None:
    if not is_reference(place):
        raise ConfigError(f"{key}: no {what} is called {place!r}{nearest(place, known)}")
    module, _, name = place.rpartition(":") if ":" in place else place.rpartition(".")
    if module.endswith(PICKLE):
        if not Path(module).is_file():
            raise ConfigError(f"{key}: no such file: {module}")
        return
    module = file_of_module(module) or module
    if not module.endswith(".py"):
        if find_spec(module.partition(".")[0] or place) is None:  # only the package: finding what is in it would run it
            raise ConfigError(f"{key}: there is no package {module.partition('.')[0]}, wanted by {place}")
        return
    file = find_file(module)
    if file is None:
        raise ConfigError(f"{key}: no such file: {module}")
    try:
        body = ast.parse(read_bytes(file)).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {module} is not valid Python ({error})") from None
    names = _defined(body)
    if names is not None and name not in names:
        raise ConfigError(f"{key}: {module} has no {name!r}{nearest(name, names)}")


def _defined(body: list[ast.stmt]) -> set[str] | None:
    """Names that a module plainly binds; None where it does so in ways that only running it shows."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            names |= {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
        elif not isinstance(node, (ast.Expr, ast.Assert, ast.Pass)):
            return None
    return None if "*" in names else names
