"""A bound on what a config's interpolations come to, found before any of them is resolved.

Each ``${...}`` may name a value that holds two others, so a file of thirty lines can ask for gigabytes. Sizes are
computed once for each value, from the sizes of those it names.
"""

from __future__ import annotations

import re
from typing import Any, Mapping

from gdpo_nemo.errors import ConfigError

MOST = 1_000_000
"""Characters of a value, and of those below it, once its interpolations are written out."""
_MOST_COMPUTED = 8
"""References whose name holds another one, ``${a.${b}}``. What they name is not known here, so they may be few only."""
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:|oc\.dict\.\w+:)?\s*'?\"?(\.*[\w.\[\]-]+)[^${}]*\}")
_COMPUTED = re.compile(r"\$\{[^${}:]*\$\{|\$\{oc\.[a-z.]+:[^${}]*\$\{")


def check_interpolations(tree: Any) -> None:
    """Refuse a config whose interpolations are far larger than any config is.

    Args:
        tree: the config as plain dictionaries and lists, interpolations unresolved.

    Raises:
        ConfigError: names the first value that comes to more than ``MOST`` characters.
    """
    sizes = _Sizes(tree)
    sizes.of(())
    if sizes.computed > _MOST_COMPUTED:
        raise ConfigError(f"config: holds more than {_MOST_COMPUTED} references whose names are references")


class _Sizes:
    """Characters of every value, by its place, computed when first asked for."""

    def __init__(self, tree: Any):
        self._tree = tree
        self._known: dict[tuple[Any, ...], int] = {}
        self.computed = 0

    def of(self, place: tuple[Any, ...]) -> int:
        """Characters of the value at ``place``; 0 if there is none, or while it is being computed (a cycle)."""
        if place in self._known:
            return self._known[place]
        self._known[place] = 0
        node = self._node(place)
        if isinstance(node, (Mapping, list)):
            names = node if isinstance(node, Mapping) else range(len(node))
            size = sum(self.of((*place, name)) + 1 for name in names)
        else:
            size = self._of_text(place, node) if isinstance(node, str) else 8
        if size > MOST:
            raise ConfigError(f"{'.'.join(map(str, place))}: its interpolations come to more than {MOST:,} characters")
        self._known[place] = size
        return size

    def _of_text(self, place: tuple[Any, ...], text: str) -> int:
        if "${" not in text:
            return min(len(text), MOST)  # as long as the file that holds it, which has a bound of its own
        self.computed += len(_COMPUTED.findall(text))
        return min(len(text), MOST) + sum(self.of(_named(place, name)) for name in _REFERENCE.findall(text))

    def _node(self, place: tuple[Any, ...]) -> Any:
        node = self._tree
        for name in place:
            if isinstance(node, Mapping):
                node = node.get(name, node.get(_number(name)))
            elif isinstance(node, list) and isinstance(number := _number(name), int) and number < len(node):
                node = node[number]
            else:
                return None
        return node


def _named(place: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """The place that an interpolation at ``place`` names; leading dots go up from its own section."""
    up = len(name) - len(name.lstrip("."))
    base = place[: len(place) - up] if up else ()
    parts = [part for part in re.split(r"[.\[\]]+", name) if part]
    return (*base, *parts)


def _number(name: Any) -> Any:
    return int(name) if isinstance(name, str) and name.isdecimal() else name
