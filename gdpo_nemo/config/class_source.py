"""What a class declares and descends from, read from its source: nothing is run, so nothing is imported.

A base class is followed where the module defines it or imports it by name; others (of other packages, computed ones)
are passed over.
"""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gdpo_nemo.config.files import find_file
from gdpo_nemo.config.messages import nearest
from gdpo_nemo.config.reading import read_bytes
from gdpo_nemo.errors import ConfigError


class NotLiteral:
    """Stands for the value of an attribute that only running the module would show."""


@dataclass
class ClassSource:
    """What the source says of a class."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """Class attributes with their literal values or ``NotLiteral``; those of the bases included, the nearest one's
    first."""
    ancestry: list[str] = field(default_factory=list)
    """The class itself and the bases that could be followed, as ``module:name`` (or ``file.py:name``)."""


def read_class(place: str) -> ClassSource:
    """The class at ``file.py:Name`` or ``package.module:Name``.

    Raises:
        ConfigError: there is no such file, package or class, or the file is not valid Python.
    """
    module, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier() or not module:
        raise ConfigError(f"{place!r} is not written file.py:Class")
    found = ClassSource()
    if not _follow(module, name, None, found):
        tree = _module(module, None)
        if tree is None:
            raise ConfigError(f"no such {'file' if module.endswith('.py') else 'module'}: {module}")
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        raise ConfigError(f"{module} has no class {name}{nearest(name, names)}")
    return found


def _follow(module: str, name: str, beside: Path | None, found: ClassSource) -> bool:
    """Add the class ``name`` of a module, and its bases, to ``found``; False where its source is not to be had."""
    place = f"{module}:{name}"
    tree = _module(module, beside)
    if place in found.ancestry or tree is None:
        return tree is not None
    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    origins = _origins(tree)
    file = _file_of(module, beside)
    if module.endswith(".py") and file is not None:
        beside = file.parent
    if node is None:
        return name in origins and _follow(*origins[name], beside, found)
    found.ancestry.append(place)
    for statement in node.body:
        for target, value in _assigned(statement):
            found.attributes.setdefault(target, value)
    for base in node.bases:
        if isinstance(base, ast.Name):
            _follow(*origins.get(base.id, (module, base.id)), beside, found)
        elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id in origins:
            package, inner = origins[base.value.id]
            _follow(f"{package}.{inner}" if package else inner, base.attr, beside, found)
    return True


def _origins(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Names that a module imports -> (module, name there); whole modules come from module ''."""
    found: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: ("", alias.name) for alias in node.names}
    return found


def _assigned(node: ast.stmt) -> list[tuple[str, Any]]:
    """(name, value) of what a statement of a class body assigns."""
    targets: list[ast.expr]
    if isinstance(node, ast.Assign):
        targets, value = node.targets, node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        targets, value = [node.target], node.value
    else:
        return []
    try:
        found = ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        found = NotLiteral()
    return [(target.id, found) for target in targets if isinstance(target, ast.Name)]


def _module(module: str, beside: Path | None) -> ast.Module | None:
    file = _file_of(module, beside)
    return None if file is None else _parsed(file, os.stat(file).st_mtime_ns)


@lru_cache(maxsize=32)
def _parsed(file: Path, changed_ns: int) -> ast.Module:
    try:
        return ast.parse(read_bytes(file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} is not valid Python ({error})") from None


def _file_of(module: str, beside: Path | None) -> Path | None:
    """The file of a module; one that is loaded by its path may import what lies ``beside`` it."""
    if module.endswith(".py"):
        return find_file(module)
    first, *inner = module.split(".")
    if not first:
        return None
    candidates: list[Path] = []
    # Of the outermost package only: finding what is in it would import it.
    spec = find_spec(first)
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(folder) for folder in spec.submodule_search_locations]
    elif spec is not None and spec.has_location and spec.origin is not None:
        candidates.append(Path(spec.origin).with_suffix(""))
    if beside is not None:  # last, as when the file is loaded
        candidates.append(beside / first)
    for root in candidates:
        path = root.joinpath(*inner)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None
