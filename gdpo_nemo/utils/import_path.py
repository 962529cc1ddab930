"""Import paths of user-defined classes and functions: parsing, checks without running the code, and loading."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gdpo_nemo.utils.errors import ConfigError, first_line, nearest
from gdpo_nemo.utils.exits import exits_contained, os_exit_blocked
from gdpo_nemo.utils.files import real_path
from gdpo_nemo.utils.import_trial import try_import
from gdpo_nemo.utils.source import ClassSource, find_file, parse_file, read_class
from gdpo_nemo.utils.user_modules import module_of

PICKLE = ".pkl"
"""Suffix of a file that contains a pickled dictionary of objects by name. The Python function ``train`` writes such a
file for functions without an import path."""
_ROW_FORMATS = "gdpo_nemo.data.row_formats."
_RENAMED = {
    "gdpo_nemo.interop.axolotl.data.": _ROW_FORMATS,  # up to version 0.1
    "gdpo_nemo.interop.nemo_rl.rows.": _ROW_FORMATS,
    "gdpo_nemo.tools.interop.axolotl.data.": _ROW_FORMATS,
    "gdpo_nemo.tools.interop.nemo_rl.rows.": _ROW_FORMATS,
    "gdpo_nemo.environments.tasks.gsm8k.solved_row": f"{_ROW_FORMATS}gsm8k",
}
"""Current beginning of an import path, by an earlier one. Configs of translators and of run folders name functions that
convert rows by the name of their time."""
_SUBSTITUTES = {"trl.experimental.openenv": "gdpo_nemo.rollouts.openenv"}
"""Module that replaces a module which user files import, if that module is not installed."""


@dataclass(frozen=True)
class ImportPath:
    """Import path of a Python object: ``file.py:name``, ``pkg.mod:name``, ``pkg.mod.name`` or ``file.pkl:name``."""

    text: str

    @staticmethod
    def matches(text: str) -> bool:
        """Return True if the text has the form of an import path."""
        return ":" in text or "." in text

    @property
    def module(self) -> str:
        """File or dotted module that defines the object. Empty if the text does not name one."""
        return self.text.rpartition(self._separator)[0]

    @property
    def name(self) -> str:
        """Name of the object in its module."""
        return self.text.rpartition(self._separator)[2]

    @property
    def _separator(self) -> str:
        return ":" if ":" in self.text else "."

    @property
    def is_in_file(self) -> bool:
        """True for ``file.py:name``."""
        return ":" in self.text and self.module.endswith(".py")

    @property
    def file(self) -> str | None:
        """Python file to load, or None for an installed package.

        The module is a ``.py`` file, or a dotted name such as ``pkg.rewards`` if ``pkg/rewards.py`` exists.
        """
        if self.module.endswith(".py"):
            return self.module
        file = self.module.replace(".", "/") + ".py"
        top = self.module.partition(".")[0]
        if top in sys.modules or find_file(file) is None:
            return None
        return None if importlib.util.find_spec(top) else file

    def absolute(self) -> str:
        """Return ``file.py:name`` with an absolute file path, so that other processes can use the import path.

        Any other text is returned unchanged.
        """
        found = find_file(self.module) if self.is_in_file else None
        return f"{real_path(found)}:{self.name}" if found else self.text

    def find_function(self, key: str, classes: bool = False) -> Path:
        """Return the path of the file in ``file.py:function``, without running the file.

        Args:
            key: config key that contains the import path, for messages.
            classes: True if the name may also be a class, whose instance is called like a function.

        Raises:
            ConfigError: if the file does not exist, is not valid Python, or has no such function.
        """
        path, body = self._parsed(key)
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == self.name:
                if isinstance(node, ast.ClassDef) and not classes:
                    raise ConfigError(f"{key}: {self.name} in {path} is a class; this key requires a function")
                return path
        raise ConfigError(f"{key}: {path} has no function {self.name}")

    def find_class(self, key: str) -> ast.ClassDef:
        """Return the syntax tree of the class ``file.py:Name``. Argument and errors are those of ``find_function``."""
        path, body = self._parsed(key)
        for node in body:
            if isinstance(node, ast.ClassDef) and node.name == self.name:
                return node
        raise ConfigError(f"{key}: {path} has no class {self.name}")

    def _parsed(self, key: str) -> tuple[Path, list[ast.stmt]]:
        if ":" not in self.text or not self.name.isidentifier():
            raise ConfigError(f"{key}: expected file.py:function, got {self.text!r}")
        path = find_file(self.module)
        if path is None:
            raise ConfigError(f"{key}: {self.module} not found")
        return path, parse_file(key, path).body

    def read_class(self) -> ClassSource:
        """Return the declarations of the class ``file.py:Name`` or ``package.module:Name``, without running its file.

        Raises:
            ConfigError: if the file, package or class does not exist, or the file is not valid Python.
        """
        if ":" not in self.text or not self.name.isidentifier() or not self.module:
            raise ConfigError(f"expected file.py:Class, got {self.text!r}")
        return read_class(self.module, self.name)

    def load(self) -> Any:
        """Return the object. A Python file (``find_file``) is imported as a module of ``user_modules``.

        Raises:
            ConfigError: if the module or the name does not exist, or the import fails.
        """
        if not self.module or not self.name:
            raise ConfigError(f"{self.text!r} does not name an object; write file.py:name or package.module.name")
        dotted = f"{self.module}.{self.name}"
        for before, now in _RENAMED.items():
            if dotted.startswith(before):
                return ImportPath(now + dotted.removeprefix(before)).load()
        if self.module.endswith(PICKLE):
            return _unpickled(self.module, self.name)
        file = self.file
        module = _load_module(self.module) if file is None else _load_file(file)
        if not hasattr(module, self.name):
            names = [known for known in vars(module) if not known.startswith("_")]
            raise ConfigError(f"{self.module} has no {self.name!r}{nearest(self.name, names)}")
        return getattr(module, self.name)


def _unpickled(file: str, name: str) -> Any:
    """Return an object from a pickled dictionary. The file is trusted, because it can run code like a module."""
    try:
        with os_exit_blocked():
            objects = pickle.loads(Path(file).read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no such file: {file}") from None
    except BaseException as error:  # unpickling imports modules, which may raise any exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise ConfigError(
            f"cannot read the objects in {file}: {first_line(error)}; these objects require the modules and the Python "
            "version that they were written with"
        ) from error
    if not isinstance(objects, dict):
        raise ConfigError(f"{file} contains {type(objects).__name__}, not a dictionary of objects by name")
    if name not in objects:
        raise ConfigError(f"{file} has no {name!r}{nearest(name, objects)}")
    return objects[name]


def load_functions(key: str, import_paths: Iterable[str], classes: bool = False) -> dict[str, Callable[..., Any]]:
    """Load user-defined functions and return them by import path.

    Args:
        key: config key that contains the import paths, for messages.
        classes: True if a path may name a class. The result then contains a new instance, which may have state.

    Raises:
        ConfigError: if a function cannot be loaded, or a class does not fit.
    """
    found = {}
    for import_path in import_paths:
        try:
            found[import_path] = ImportPath(import_path).load()
        except ConfigError as error:
            raise error.within(key) from error
        if isinstance(found[import_path], type):
            if not classes:
                raise ConfigError(f"{key}: {import_path} is a class; this key requires a function")
            found[import_path] = _instance(key, import_path, found[import_path])
        if not callable(found[import_path]):
            raise ConfigError(f"{key}: {import_path} is not callable")
    return found


def _instance(key: str, import_path: str, cls: type) -> Any:
    """Return an instance of a class that is used like a function. Raises ConfigError if the class does not fit."""
    missing = {"state", "load_state"} - set(dir(cls))
    if len(missing) == 1:
        raise ConfigError(f"{key}: {import_path} must define {missing.pop()}, because it defines the other of the pair")
    try:
        with exits_contained():
            return cls()
    except Exception as error:
        raise ConfigError(f"{key}: {import_path}() raised {first_line(error)}") from error


def has_state(function: Callable[..., Any]) -> bool:
    """Return True if a custom function is an object with the methods ``state`` and ``load_state``."""
    return hasattr(function, "state") and hasattr(function, "load_state")


def _not_importable(module: str, error: BaseException) -> ConfigError:
    reason = str(error) if isinstance(error, ConfigError) else first_line(error)
    return ConfigError(f"cannot import {module}: {reason}")


def _load_module(name: str) -> ModuleType:
    try:
        if name.partition(".")[0] != __package__.partition(".")[0]:
            try_import(name)
        with os_exit_blocked():
            return importlib.import_module(name)
    except BaseException as error:  # user code may raise any exception
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _not_importable(name, error) from error


def _load_file(file: str) -> ModuleType:
    path = find_file(file)
    if path is None:
        raise ConfigError(f"no such file: {file}")
    name = module_of(real_path(path))
    try:
        try_import(name)
        with os_exit_blocked():
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                if not _substitute(error):
                    raise
                return importlib.import_module(name)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise _not_importable(file, error) from error


def _substitute(missing: ModuleNotFoundError) -> bool:
    """Provide the substitute of a module that is not installed, or whose package is not installed.

    Returns:
        True if the substitute was added and the import can be repeated.
    """
    for name, substitute in _SUBSTITUTES.items():
        if missing.name in (name, name.partition(".")[0]) and name not in sys.modules:
            sys.modules[name] = importlib.import_module(substitute)
            return True
    return False
