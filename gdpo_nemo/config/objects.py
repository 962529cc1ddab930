"""Finding the class or function that a text in the config names."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, NoReturn

from gdpo_nemo.config.files import find_file
from gdpo_nemo.config.import_trial import try_import
from gdpo_nemo.config.messages import first_line, nearest
from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.trl_openenv import offered
from gdpo_nemo.errors import ConfigError

PLUGIN_PREFIX = "gdpo_nemo_plugin_"
"""How the modules start that are loaded from files."""
PICKLE = ".pkl"
"""Suffix of a file with a pickled dictionary of objects by name, such as ``train`` writes for functions that have no
place."""


def is_reference(text: str) -> bool:
    """Whether the text names an object by place (``file.py:name``, ``pkg.mod:name``, ``pkg.mod.name``,
    ``file.pkl:name``)."""
    return ":" in text or "." in text


def load_object(reference: str) -> Any:
    """The object behind ``file.py:name``, ``pkg.mod:name``, ``pkg.mod.name`` or ``file.pkl:name``.

    A file (``find_file``) is imported with its own folder importable, as if it were run.
    Raises ConfigError, in one line, when the place or the name does not exist or the import fails.
    """
    place, _, name = reference.rpartition(":") if ":" in reference else reference.rpartition(".")
    if not place or not name:
        raise ConfigError(f"{reference!r} does not name an object; write file.py:name or package.module.name")
    if place.endswith(PICKLE):
        return _unpickled(place, name)
    file = file_of_module(place)
    module = _load_module(place) if file is None else _load_file(file)
    if not hasattr(module, name):
        names = [known for known in vars(module) if not known.startswith("_")]
        raise ConfigError(f"{place} has no {name!r}{nearest(name, names)}")
    return getattr(module, name)


def file_of_module(place: str) -> str | None:
    """Return the file that the part of a reference before the name is: itself, or the file of a module that no
    installed package has, as in ``rewards.correct`` beside ``rewards.py``. None: an installed package."""
    if place.endswith(".py"):
        return place
    file = place.replace(".", "/") + ".py"
    top = place.partition(".")[0]
    if top in sys.modules or find_file(file) is None:
        return None
    return None if importlib.util.find_spec(top) else file


def place_of(found: type) -> str:
    """The text by which ``load_object`` finds a class on any node: its file, where it was loaded from one."""
    module = sys.modules[found.__module__]
    home = module.__file__ if module.__name__.startswith(PLUGIN_PREFIX) else module.__name__
    return f"{home}:{found.__qualname__}"


def _unpickled(place: str, name: str) -> Any:
    """The object of that name in the dictionary in the file. Like a module, the file is code, and trusted."""
    try:
        with staying():
            objects = pickle.loads(Path(place).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no such file: {place}") from None
    except BaseException as error:  # an object's parts are imported, which may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"cannot read the objects in {place}: {first_line(error)}; they need the modules and the Python that they "
            "were written with"
        ) from error
    if not isinstance(objects, dict):
        raise ConfigError(f"{place} holds a {type(objects).__name__}, not objects by name")
    if name not in objects:
        raise ConfigError(f"{place} has no {name!r}{nearest(name, objects)}")
    return objects[name]


def load_functions(key: str, places: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """The functions of the user's own at these places, by place; ``key`` is where the config names them. Raises
    ConfigError."""
    found = {}
    for place in places:
        try:
            found[place] = load_object(place)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        if not callable(found[place]):
            raise ConfigError(f"{key}: {place} is not callable")
    return found


def absolute_place(name: str) -> str:
    """A place in a file (``file.py:name``) as other processes find it, whatever their working directory; any other
    name as it is."""
    file, colon, function = name.rpartition(":")
    found = find_file(file) if file.endswith(".py") else None
    return f"{real_path(found)}{colon}{function}" if found else name


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Have ``os._exit``, called by somebody's code in the block, raise SystemExit: it would end the process with the
    status that it is given, 0 for instance, and without a word. Processes that this code forks end as they like."""
    leave = os._exit
    here = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != here:
            leave(status)
        raise SystemExit(f"it calls os._exit({status!r})")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = leave


def _not_importable(place: str, error: BaseException) -> ConfigError:
    said = str(error) if isinstance(error, ConfigError) else first_line(error)
    return ConfigError(f"cannot import {place}: {said}")


def _load_module(place: str) -> ModuleType:
    try:
        if place.partition(".")[0] != __package__.partition(".")[0]:
            try_import(place)
        with staying():
            return importlib.import_module(place)
    except BaseException as error:  # the module is the user's: whatever its import raises is theirs to read
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _not_importable(place, error) from error


def _load_file(place: str) -> ModuleType:
    path = find_file(place)
    if path is None:
        raise ConfigError(f"no such file: {place}")
    path = real_path(path)
    name = PLUGIN_PREFIX + "_".join(part.replace(".", "_") for part in path.parts[1:])
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"cannot import {place}: no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        try_import(name, path)
        sys.modules[name] = module
        with staying():
            try:
                spec.loader.exec_module(module)
            except ModuleNotFoundError as error:
                if not offered(error):
                    raise
                spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _not_importable(place, error) from error
    return module
