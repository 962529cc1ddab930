"""Package of the modules that are imported from user files.

Each folder is a subpackage, whose name encodes the folder's path. For example, ``/home/me/rewards.py`` is the module
``gdpo_nemo.utils.user_modules._2f_home_2f_me.rewards``. An ``import`` statement in such a module prefers modules of the
same folder, as in a script. Two folders can therefore contain different modules with the same name.

Every process can import these modules by name, because importing this package adds the finder below to
``sys.meta_path``. For example, ``multiprocessing`` imports them in its child processes.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

__path__: list[str] = []  # makes this module a package

PREFIX = f"{__name__}."
"""Name prefix of modules that are imported from user files."""


def module_of(file: Path) -> str:
    """Return the name of the module for a Python file.

    Args:
        file: absolute path.
    """
    name = f"{PREFIX}{_encoded(str(file.parent))}."
    # The import system finds another file if the name contains a dot, or if a package has the same name.
    found = PathFinder.find_spec(name + file.stem, [str(file.parent)])
    return name + (file.stem if found is not None and found.origin == str(file) else _encoded(file.name))


def is_built_in(owner: type) -> bool:
    """Return True if a class belongs to this project and not to user code."""
    return owner.__module__.startswith("gdpo_nemo.") and not owner.__module__.startswith(PREFIX)


def _encoded(text: str) -> str:
    """Encode a text as a part of a module name."""
    return re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", text)


def _decoded(name: str) -> str:
    return re.sub(r"_([0-9a-f]+)_", lambda found: chr(int(found[1], 16)), name)


class _Finder(MetaPathFinder):
    """Finder for user modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a folder or module, or None for names outside of this package."""
        if not fullname.startswith(PREFIX):
            return None
        folder, _, name = fullname.removeprefix(PREFIX).partition(".")
        if not name:
            spec = ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [_decoded(folder)]
            return spec
        found = PathFinder.find_spec(fullname, path) or _spec_of_file(fullname, Path(_decoded(folder), _decoded(name)))
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = _Loader(found.loader.name, found.loader.path)
        return found


def _spec_of_file(fullname: str, file: Path) -> ModuleSpec | None:
    return spec_from_file_location(fullname, file) if file.is_file() else None


class _Loader(SourceFileLoader):
    """Loader of user modules, whose ``import`` statements call ``_import``."""

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module."""
        folder = ".".join(self.name.split(".")[: PREFIX.count(".") + 1])
        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": partial(_import, folder)}
        super().exec_module(module)


def _import(
    folder: str,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """Import a module for an ``import`` statement in a user module, like the built-in ``__import__``.

    Args:
        folder: subpackage of the folder that contains the user module.
    """
    top = name.partition(".")[0]
    for place in () if level else _searched(folder):
        if _is_in_folder(place, top):
            found = __import__(f"{place}.{name}", globals, locals, fromlist or ())
            return found if fromlist else sys.modules[f"{place}.{top}"]
    return __import__(name, globals, locals, fromlist or (), level)


@cache
def _searched(folder: str) -> list[str]:
    """Return the subpackages of the folders in which a module looks for another one: its own folder, and, if this
    folder is a package, the folder that contains the package."""
    path = Path(_decoded(folder.removeprefix(PREFIX)))
    places = [folder]
    while (path / "__init__.py").is_file():
        path = path.parent
        places[1:] = [PREFIX + _encoded(str(path))]
    return places


def _is_in_folder(folder: str, top: str) -> bool:
    """Return True if the name of a top-level module refers to a module of the folder.

    The standard library and this project take precedence over the folder. The folder takes precedence over installed
    packages, except that a folder without ``__init__.py`` is a package only if no other package has its name.
    """
    if f"{folder}.{top}" in sys.modules:
        return True
    if top in sys.stdlib_module_names or top == __name__.partition(".")[0]:
        return False
    found = PathFinder.find_spec(top, [_decoded(folder.removeprefix(PREFIX))])
    if found is None:
        return False
    if found.loader is None:
        other = PathFinder.find_spec(top)
        return other is None or other.loader is None
    # A module that the main program has imported under its own name is not imported again.
    return getattr(getattr(sys.modules.get(top), "__spec__", None), "origin", None) != found.origin


sys.meta_path.insert(0, _Finder())  # the standard finder would find the modules without the loader
