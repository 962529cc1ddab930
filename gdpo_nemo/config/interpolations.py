"""Bound on the size of a config after its interpolations (``${section.key}``) are expanded.

A few lines of nested interpolations may expand to billions of characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gdpo_nemo.utils.errors import ConfigError

MOST = 1_000_000
"""Maximum number of characters in a value with its nested values, after expanding interpolations."""
_MOST_COMPUTED = 8
"""Maximum number of nested references, such as ``${a.${b}}``, in a config.

The sizes of their targets are unknown.
"""
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:|oc\.dict\.\w+:)?\s*'?\"?(\.*[\w.\[\]-]+)[^${}]*\}")
_COMPUTED = re.compile(r"\$\{[^${}:]*\$\{|\$\{oc\.[a-z.]+:[^${}]*\$\{")


def check_interpolations(tree: Any) -> None:
    """Refuse a config whose interpolations expand to an excessive size.

    Args:
        tree: the config as plain dictionaries and lists, with unresolved interpolations.

    Raises:
        ConfigError: if a value expands to more than ``MOST`` characters, or if too many references contain references.
    """
    sizes = _Sizes(tree)
    sizes.of(())
    if sizes.computed > _MOST_COMPUTED:
        raise ConfigError(f"config: contains more than {_MOST_COMPUTED} nested references such as ${{a.${{b}}}}")


class _Sizes:
    """Sizes of config values in characters, by path. Each size is computed on first access."""

    def __init__(self, tree: Any):
        self._tree = tree
        self._known: dict[tuple[Any, ...], int] = {}
        self.computed = 0

    def of(self, path: tuple[Any, ...]) -> int:
        """Return the size of the value at ``path``.

        A missing value has size 0, as has a reference back to a value whose size is being computed.
        """
        if path in self._known:
            return self._known[path]
        self._known[path] = 0
        node = self._node(path)
        if isinstance(node, (Mapping, list)):
            names = node if isinstance(node, Mapping) else range(len(node))
            size = sum(self.of((*path, name)) + 1 for name in names)
        else:
            size = self._of_text(path, node) if isinstance(node, str) else 8
        if size > MOST:
            raise ConfigError(f"{'.'.join(map(str, path))}: its interpolations expand to more than {MOST:,} characters")
        self._known[path] = size
        return size

    def _of_text(self, path: tuple[Any, ...], text: str) -> int:
        if "${" not in text:
            return min(len(text), MOST)  # the maximum file size limits plain text
        self.computed += len(_COMPUTED.findall(text))
        return min(len(text), MOST) + sum(self.of(_named(path, name)) for name in _REFERENCE.findall(text))

    def _node(self, path: tuple[Any, ...]) -> Any:
        node = self._tree
        for name in path:
            if isinstance(node, Mapping):
                node = node.get(name, node.get(_number(name)))
            elif isinstance(node, list) and isinstance(number := _number(name), int) and number < len(node):
                node = node[number]
            else:
                return None
        return node


def _named(path: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Return the path that an interpolation at ``path`` refers to.

    An interpolation with leading dots is relative to ``path``.
    """
    up = len(name) - len(name.lstrip("."))
    base = path[: len(path) - up] if up else ()
    parts = [part for part in re.split(r"[.\[\]]+", name) if part]
    return (*base, *parts)


def _number(name: Any) -> Any:
    return int(name) if isinstance(name, str) and name.isdecimal() else name
