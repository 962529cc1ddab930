"""Location of files named in a config, and static analysis of the Python classes in them.

The source is parsed without running it. A base class is followed if the module defines it or imports it by name. Other
base classes, such as computed base classes, are skipped.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gdpo_nemo.utils.errors import ConfigError, nearest
from gdpo_nemo.utils.files import read_bytes, read_text


def _repository(package: Path) -> Path:
    """Return the folder that contains ``configs/`` and ``examples/``: the checkout, or the copy in the wheel."""
    bundled = package / "bundled"
    return bundled if bundled.is_dir() else package.parent


REPOSITORY = _repository(Path(__file__).resolve().parents[1])
DEMO = REPOSITORY / "configs" / "gdpo_tiny_cpu.yaml"
"""Default config of a run."""


class NotLiteral:
    """Placeholder for an attribute whose value is only known when the module runs."""


@dataclass
class ClassSource:
    """Attributes and base classes that a class declares in its source."""

    attributes: dict[str, Any] = field(default_factory=dict)
    """Literal values or ``NotLiteral`` of class attributes, including inherited attributes, by name."""
    ancestry: list[str] = field(default_factory=list)
    """The class and its base classes whose source was found, as ``module:name`` or ``file.py:name``."""


def find_file(name: str | os.PathLike[str]) -> Path | None:
    """Find a file relative to the working directory, otherwise relative to the repository.

    Return None if the file is not found.
    """
    path = Path(os.path.expanduser(name))
    return next((candidate for candidate in (path, REPOSITORY / path) if candidate.is_file()), None)


def parse_file(key: str, path: Path) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        ConfigError: if the file cannot be read or is not valid Python.
    """
    try:
        return ast.parse(read_text(path))
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error.strerror})") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # ValueError for invalid UTF-8 or NUL bytes
        raise ConfigError(f"{key}: {path} is not valid Python ({error})") from None


def read_class(module: str, name: str) -> ClassSource:
    """Return the declarations of the class ``name`` in ``module``, which is a file or a dotted name.

    Raises:
        ConfigError: if the file, package or class does not exist, or the file is not valid Python.
    """
    found = ClassSource()
    if not _follow(module, name, None, found):
        tree = _module(module, None)
        if tree is None:
            raise ConfigError(f"no such {'file' if module.endswith('.py') else 'module'}: {module}")
        names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        raise ConfigError(f"{module} has no class {name}{nearest(name, names)}")
    return found


def _follow(module: str, name: str, beside: Path | None, found: ClassSource) -> bool:
    """Add a class and its base classes to ``found``. Return False if the source of the class is not available.

    Args:
        beside: folder from which a module that is loaded by its path may import files. None for other modules.
    """
    full_name = f"{module}:{name}"
    tree = _module(module, beside)
    if full_name in found.ancestry or tree is None:
        return tree is not None
    node = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    origins = _origins(tree)
    file = _file_of(module, beside)
    if module.endswith(".py") and file is not None:
        beside = file.parent
    if node is None:
        return name in origins and _follow(*origins[name], beside, found)
    found.ancestry.append(full_name)
    for statement in node.body:
        for target, value in assigned_values(statement):
            found.attributes.setdefault(target, value)
    for base in node.bases:
        if isinstance(base, ast.Name):
            _follow(*origins.get(base.id, (module, base.id)), beside, found)
        elif isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) and base.value.id in origins:
            package, inner = origins[base.value.id]
            _follow(f"{package}.{inner}" if package else inner, base.attr, beside, found)
    return True


def _origins(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return (origin module, name in that module) for each imported name of a module.

    An imported module has the origin ''.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in _imports(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: ("", alias.name) for alias in node.names}
    return found


def _imports(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, including the statements under ``if TYPE_CHECKING``.

    Packages with lazy imports, such as ``gdpo_nemo``, declare the origin of their names under this condition.
    """
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from node.body
        yield node


def assigned_values(node: ast.stmt) -> list[tuple[str, Any]]:
    """Return (name, value) for each name that a statement assigns. The value is ``NotLiteral`` if it is computed."""
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
    """Return the file of a module, or None if the file is not found. ``_follow`` describes the argument ``beside``."""
    if module.endswith(".py"):
        return find_file(module)
    first, *inner = module.split(".")
    if not first:
        return None
    candidates: list[Path] = []
    # find_spec is used only for the outermost package. For a submodule, find_spec would import the parent package.
    spec = find_spec(first)
    if spec is not None and spec.submodule_search_locations:
        candidates += [Path(folder) for folder in spec.submodule_search_locations]
    elif spec is not None and spec.has_location and spec.origin is not None:
        candidates.append(Path(spec.origin).with_suffix(""))
    if beside is not None:  # this folder has the lowest precedence, as when the file is loaded
        candidates.append(beside / first)
    for root in candidates:
        path = root.joinpath(*inner)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None
