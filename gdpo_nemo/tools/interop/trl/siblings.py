"""Modules beside a TRL script from which the script imports its dataclasses and rewards."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from gdpo_nemo.utils.files import read_text

_MOST_FILES = 50
"""Maximum number of modules that are read for a script."""


def module_file(importer: Path, statement: ast.ImportFrom) -> Path | None:
    """Return the file of the module from which a Python file imports, or None if the module is not beside the file.

    The module is searched in the file's folder, in the folder that contains the file's package, and in the working
    directory. A relative import is resolved as in a package.
    """
    parts = (statement.module or "").split(".")
    if statement.level:
        folders = [importer.parents[statement.level - 1]] if statement.level <= len(importer.parents) else []
    else:
        around = [folder.parent for folder in importer.parents if folder.name == parts[0]]
        folders = [importer.parent, *around, Path()]
    for folder in folders:
        for file in (folder.joinpath(*parts, "__init__.py"), folder.joinpath(*parts).with_suffix(".py")):
            if file.is_file():
                return file
    return None


def classes_of(tree: ast.Module, script: Path) -> dict[str, ast.ClassDef]:
    """Return the classes of a script and of all modules beside it that it imports, directly or indirectly, by name.

    A class of the script takes precedence over an imported class.
    """
    return _classes(tree, script, {script})


def _classes(tree: ast.Module, path: Path, read: set[Path]) -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.ImportFrom):
            continue
        for file in _files(path, statement):
            if file in read or len(read) >= _MOST_FILES:
                continue
            read.add(file)
            if (module := _parsed(file)) is not None:
                found |= _classes(module, file, read)
        found |= {name.asname: found[name.name] for name in statement.names if name.asname and name.name in found}
    return found | {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _files(path: Path, statement: ast.ImportFrom) -> Iterator[Path]:
    if (file := module_file(path, statement)) is not None:
        yield file


def _parsed(file: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # of syntax
            return ast.parse(read_text(file))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None  # the report names what cannot be read from this module
