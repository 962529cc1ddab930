"""Registry of environments: built-in, installed as plugins, or specified by an import path."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from gdpo_nemo.config.algorithm_choice import AlgorithmSpec
from gdpo_nemo.config.objective_checks import check_components
from gdpo_nemo.config.schema import GdpoConfig
from gdpo_nemo.environments.base import Environment, adapted, declared
from gdpo_nemo.utils.errors import ConfigError, first_line, nearest
from gdpo_nemo.utils.exits import exits_contained
from gdpo_nemo.utils.files import read_bytes
from gdpo_nemo.utils.import_path import PICKLE, ImportPath
from gdpo_nemo.utils.source import find_file

ENTRY_POINT_GROUP = "gdpo_nemo.environments"

_TASKS = Path(__file__).with_name("tasks")
_CLASS = re.compile(r"^class (\w+)\(Environment\):", re.MULTILINE)
_OTHER_NAMES = {
    "functions": "gdpo_nemo.environments.tasks.reward_functions:Functions",
    "nemo_gym": "gdpo_nemo.environments.nemo_gym.environment:NemoGym",
    "nemo_gym_agent": "gdpo_nemo.environments.nemo_gym.agent_environment:NemoGymAgent",
    "openenv": "gdpo_nemo.environments.openenv.episodes:OpenEnv",
    "verifiers": "gdpo_nemo.environments.verifiers.environment:Verifiers",
}
"""Built-in environments whose name differs from the name of their file."""


def _tasks() -> dict[str, str]:
    """Return the import paths of the environments in ``tasks``, by file name.

    The files are searched as text, so that a file is only imported when its environment is used.
    """
    found = {}
    for path in sorted(_TASKS.glob("*.py")):
        match = _CLASS.search(path.read_text(encoding="utf-8"))
        import_path = f"{__package__}.tasks.{path.stem}:{match[1]}" if match else None
        if import_path and import_path not in _OTHER_NAMES.values():
            found[path.stem] = import_path
    return found


BUILT_IN = {**_tasks(), **_OTHER_NAMES}
"""Import paths of the built-in environments, by name."""


def environment_names() -> list[str]:
    """Return the names of all built-in environments, and of plugins installed in the entry-point group
    ``gdpo_nemo.environments``."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def origin(point: EntryPoint) -> str:
    """Describe an installed plugin: package, version and class."""
    package = getattr(point, "dist", None)
    return f"{package.name} {package.version} ({point.value})" if package else point.value


def load_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Build the environment ``name`` of the config from its options.

    The option ``plugin`` selects the class: a registered name, ``file.py:Class`` or ``package.module.Class``. The
    default of ``plugin`` is the name of the environment. The option ``num_workers`` is used by the pool and is not
    passed to the class.

    Raises:
        ConfigError: if the name is unknown, the class cannot be imported or instantiated, the object is not an
            environment, or ``num_workers`` is set for an environment without worker processes.
    """
    make = environment_class(name, options)
    options = dict(options or {})
    plugin = options.pop("plugin", name)
    if dedicated_workers(name, options) and (declared(make).remote or declared(make).plays_with_endpoint):
        raise ConfigError(
            f"env.{name}.num_workers: has no effect, because {plugin} runs on servers without worker processes; "
            "remove it"
        )
    options.pop("num_workers", None)
    try:
        with exits_contained():
            environment = adapted(make(options))
    except ConfigError as error:
        raise error.within(f"env.{name}") from error
    except Exception as error:  # the constructor may be user code
        raise ConfigError(f"env.{name}: {plugin} could not be built: {first_line(error)}") from error
    _check_environment(name, plugin, environment)
    return environment


def environment_class(name: str, options: Mapping[str, Any] | None = None) -> Any:
    """Return the class or factory function of an environment. Raises ConfigError if the class is not found."""
    return find_plugin(name, plugin_of(name, options))


def verifies_by_sample(name: str, options: Mapping[str, Any] | None = None) -> bool:
    """Return the attribute ``by_sample`` of the environment's class. Return False if the class cannot be imported,
    because the worker reports this error later."""
    try:
        return declared(environment_class(name, options)).by_sample
    except ConfigError:
        return False


def is_remote(name: str, options: Mapping[str, Any]) -> bool:
    """Return the attribute ``remote`` of the environment's class. Return False if the class cannot be imported, because
    the worker reports this error later."""
    try:
        return declared(environment_class(name, options)).remote
    except ConfigError:
        return False


def plugin_of(name: str, options: Mapping[str, Any] | None) -> str:
    """Return the option ``plugin`` of an environment. The default is the environment's name. Raises ConfigError if the
    options or the plugin have the wrong type."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"env.{name}: expected options as keys and values, got {options!r}")
    plugin = (options or {}).get("plugin", name)
    if not isinstance(plugin, str):
        raise ConfigError(f"env.{name}.plugin: must be a name or an import path such as file.py:Class, not {plugin!r}")
    return plugin


def load_environments(section: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Environment]:
    """Build all environments of the config section ``env``. Raises the same exceptions as ``load_environment``."""
    return {name: load_environment(name, options) for name, options in section.items()}


def check_rewards(gdpo: GdpoConfig, algorithm: AlgorithmSpec, environments: Mapping[str, Environment]) -> None:
    """Check that the environments return every reward component to which the config assigns a weight, and that
    components with the same name have the same meaning.

    The first check is skipped if the components of an environment are unknown. Raises ConfigError.
    """
    if not algorithm.samples:
        return
    _check_origins(environments)
    if not any(environment.open_rewards for environment in environments.values()):
        names = chain.from_iterable(environment.reward_names for environment in environments.values())
        check_components(gdpo, list(names))


def _check_origins(environments: Mapping[str, Environment]) -> None:
    known: dict[str, tuple[str, str]] = {}
    for name, environment in environments.items():
        for component in environment.reward_names:
            package = environment.component_origins.get(component, "")
            other, other_package = known.setdefault(component, (name, package))
            if package != other_package:
                named, second = (name, other) if package else (other, name)
                raise ConfigError(
                    f"env.{named}.rewards: {component!r} is also a component of env.{second}; rename it "
                    f"({{NEW_NAME: {component}}}), or set {{{component}: {component}}} if both have the same meaning"
                )


def dedicated_workers(name: str, options: Mapping[str, Any] | None) -> int | None:
    """Return the option ``num_workers``, the number of dedicated worker processes. Return None if the environment uses
    the shared worker processes.

    Raises ConfigError if the option is not an integer from 1 to 4096.
    """
    number = (options or {}).get("num_workers")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 4096):
        raise ConfigError(f"env.{name}.num_workers: must be a number of processes, 1 to 4096, not {str(number)[:40]}")
    return number


def find_plugin(name: str, plugin: str) -> Any:
    """Return the class or factory function that ``plugin`` selects for the environment ``name``. Raises ConfigError in
    the same cases as ``load_environment``."""
    if plugin in BUILT_IN:
        return ImportPath(BUILT_IN[plugin]).load()
    installed = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP, name=plugin)}
    if len(installed) > 1:
        import_paths = " and ".join(map(origin, installed.values()))
        raise ConfigError(
            f"env.{name}: several packages provide an environment {plugin!r} ({import_paths}); set the import path"
        )
    for point in installed.values():
        try:
            return ImportPath(f"{point.module}:{point.attr}").load()
        except ConfigError as error:
            raise ConfigError(f"env.{name}: plugin {plugin}: {error}") from error
    if not ImportPath.matches(plugin):
        raise ConfigError(f"env.{name}: unknown environment {plugin!r}{nearest(plugin, environment_names())}")
    try:
        return ImportPath(plugin).load()
    except ConfigError as error:
        raise error.within(f"env.{name}.plugin") from error


def _check_environment(name: str, plugin: str, environment: Environment) -> None:
    names = environment.reward_names
    if not (environment.verifies or environment.has_turns or environment.plays_with_endpoint):
        raise ConfigError(
            f"env.{name}: {plugin} is not an environment; define a method verify(trajectories) or episode()"
        )
    if isinstance(names, str) or not names or not all(isinstance(component, str) for component in names):
        raise ConfigError(f"env.{name}: {plugin} is not an environment; reward_names must be a tuple of names")
    if len(set(names)) != len(names):
        raise ConfigError(f"env.{name}: {plugin} has a duplicate in reward_names ({', '.join(names)})")


def announced_components(name: str, options: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Return an environment's reward components without running user code, or None if this is not possible.

    User code is parsed, but not executed.

    Raises:
        ConfigError: if an environment or function has an unknown name, or if its file, class or package is not found.
    """
    plugin = plugin_of(name, options)
    options = dict(options or {})
    dedicated_workers(name, options)
    if plugin in BUILT_IN and declared(find_plugin(name, plugin)).instant:
        environment = load_environment(name, options)
        return None if environment.open_rewards else tuple(environment.reward_names)
    if plugin == "tools":
        _check_tools(name, options)
    if plugin == "tool_class" and isinstance(options.get("make"), str):
        _check_import_path(f"env.{name}.make", options["make"], "class", ())
    if plugin in ("functions", "tools", "tool_class") and isinstance(options.get("functions"), Mapping):
        from gdpo_nemo.environments.tasks.reward_functions import BUILT_IN as FUNCTIONS, is_url

        for component, entry in options["functions"].items():
            import_path = entry.get("function") if isinstance(entry, Mapping) else entry
            if isinstance(import_path, str) and import_path not in FUNCTIONS and not is_url(import_path):
                _check_import_path(f"env.{name}.functions.{component}", import_path, "reward function", FUNCTIONS)
        return tuple(map(str, options["functions"]))
    installed = plugin in BUILT_IN or any(entry_points(group=ENTRY_POINT_GROUP, name=plugin))
    if not installed:
        _check_import_path(f"env.{name}", plugin, "environment", environment_names())
    return None


def _check_tools(name: str, options: Mapping[str, Any]) -> None:
    references = options.get("tools")
    if not isinstance(references, list) or not references:
        raise ConfigError(f"env.{name}.tools: expected a list of functions such as [file.py:function] ({references!r})")
    for index, import_path in enumerate(references):
        if not isinstance(import_path, str):
            raise ConfigError(
                f"env.{name}.tools[{index}]: expected a function such as file.py:function ({import_path!r})"
            )
        _check_import_path(f"env.{name}.tools[{index}]", import_path, "tool", ())


def _check_import_path(key: str, import_path: str, kind: str, known: Any) -> None:
    if not ImportPath.matches(import_path):
        raise ConfigError(f"{key}: unknown {kind} {import_path!r}{nearest(import_path, known)}")
    path = ImportPath(import_path)
    module = path.module
    if module.endswith(PICKLE):
        if not Path(module).is_file():
            raise ConfigError(f"{key}: file not found ({module})")
        return
    module = path.file or module
    if not module.endswith(".py"):
        # Search for the top-level package only: a search for a submodule would import the package.
        if find_spec(module.partition(".")[0] or import_path) is None:
            raise ConfigError(f"{key}: package {module.partition('.')[0]} not found, required by {import_path}")
        return
    file = find_file(module)
    if file is None:
        raise ConfigError(f"{key}: file not found ({module})")
    try:
        body = ast.parse(read_bytes(file)).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}: {module} is not valid Python ({error})") from None
    names = _top_level_names(body)
    if names is not None and path.name not in names:
        raise ConfigError(f"{key}: {module} has no {path.name!r}{nearest(path.name, names)}")


def _top_level_names(body: list[ast.stmt]) -> set[str] | None:
    """Return the names that a module binds at top level, or None if the names are known only at run time."""
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
