"""Command-line arguments of a script: parsing of their values, and detection of their declarations."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any

from gdpo_nemo.utils.errors import ConfigError

ARGPARSE = "argparse.Namespace"
"""Name that represents the ``argparse`` namespace in lists of classes."""
_PARSE = ("parse_args", "parse_args_and_config", "parse_args_into_dataclasses", "parse_known_args")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_WORDS = {"true": True, "false": False, "none": None, "null": None}


def nodes_of[Node: ast.AST](tree: ast.AST, kind: type[Node]) -> Iterator[Node]:
    """Yield the syntax nodes of a kind."""
    for node in ast.walk(tree):
        if isinstance(node, kind):
            yield node


def called_name(call: ast.Call) -> str:
    """Return the name of the called function or class, without its module."""
    return ast.unparse(call.func).rpartition(".")[2]


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return the keyword arguments of a call, without ``**other``."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suffix for messages that suggests the known name closest to ``name`` (empty if no name is close)."""
    match = get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def check_names(names: Iterable[str], known: Sequence[str], problem: str, source: str = "") -> None:
    """Raise ConfigError if a name is unknown. The message lists all unknown names, with suggestions.

    Args:
        problem: predicate of the message.
        source: prefix of the message.
    """
    unknown = {name: did_you_mean(name, known) for name in names if name not in known}
    if len(unknown) == 1:
        [(name, suggestion)] = unknown.items()
        raise ConfigError(f"{source}{name}: {problem}{suggestion}")
    if unknown:
        listed = [f"{name} ({hint.removeprefix('; ')})" if hint else name for name, hint in unknown.items()]
        raise ConfigError(f"{source}{', '.join(listed)}: {problem}")


def read_command_line(words: Sequence[str]) -> dict[str, Any]:
    """Parse a command line into a mapping from option to value. Dashes in names become underscores.

    An option without a value is true, and an option with several values is a list. ``--no_NAME`` sets NAME to false.

    Raises:
        ConfigError: if an argument does not belong to an option.
    """
    found: dict[str, list[Any]] = {}
    name = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            option, equals, value = word[2:].partition("=")
            name = option.replace("-", "_")
            found[name] = [_typed(value)] if equals else []
        elif name is None:
            raise ConfigError(f"{word}: expected a script option (--NAME VALUE)")
        else:
            found[name].append(_typed(word))
    options: dict[str, Any] = {}
    for name, values in found.items():
        if name.startswith("no_") and not values:
            options[name.removeprefix("no_")] = False
        elif not values:
            options[name] = True
        else:
            options[name] = values[0] if len(values) == 1 else values
    return options


def _typed(word: str) -> Any:
    """Convert a command-line word to a number, boolean, None or JSON value if possible."""
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if _NUMBER.fullmatch(word):
        number = float(word)
        return int(word) if re.fullmatch(r"[-+]?\d{1,18}", word) else number
    if word[:1] in ("{", "["):
        try:
            return json.loads(word)
        except (ValueError, RecursionError):
            return word  # begins like JSON but is plain text
    return word


def declared(tree: ast.Module, value: Callable[[ast.expr], Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Map the ``argparse`` fields of a script to their values on the command line, or to their defaults.

    Args:
        value: function that evaluates an expression of the script.
        given: values on the command line, by option.
    """
    fields: dict[str, Any] = {}
    for call in _added_arguments(tree):
        if isinstance(call.func, ast.Attribute) and (names := option_names(call)):
            option = next((name for name in names if name in given), None)
            fields[names[0]] = _default(call, value) if option is None else given[option]
    return fields


def options_of(tree: ast.Module) -> set[str]:
    """Return the names of all ``argparse`` options and fields in a script."""
    return set(chain.from_iterable(map(option_names, _added_arguments(tree))))


def _added_arguments(tree: ast.Module) -> Iterator[ast.Call]:
    return (call for call in nodes_of(tree, ast.Call) if called_name(call) == "add_argument")


def option_names(call: ast.Call) -> list[str]:
    """Return the name of the field that ``add_argument`` fills, followed by the names of its options."""
    names = [str(node.value) for node in call.args if isinstance(node, ast.Constant)]
    long = [name for name in names if name.startswith("--")]
    options = [name.lstrip("-").replace("-", "_") for name in (*long, *names)]
    field = keywords_of(call).get("dest")
    return [str(field.value), *options] if isinstance(field, ast.Constant) else options


def _default(call: ast.Call, value: Callable[[ast.expr], Any]) -> Any:
    keywords = keywords_of(call)
    if "default" in keywords:
        return value(keywords["default"])
    action = keywords.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false"):
        return action.value == "store_false"
    return None


def parsed_kinds(node: ast.expr, follow: Callable[[str], ast.expr | ast.stmt | None]) -> list[str]:
    """Return the classes that an expression fills from the command line, in order.

    The expression calls a parser's method, or a script function that calls such a method. The list is empty for any
    other expression.

    Args:
        follow: function that returns the definition of a name, or the expression assigned to it.
    """
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Name):
        function = follow(node.func.id)
        for statement in nodes_of(function, ast.Return) if isinstance(function, ast.FunctionDef) else ():
            if statement.value is not None and (kinds := _classes(statement.value, function, follow)):
                return kinds
        return []
    return _classes(node, None, follow)


def _classes(node: ast.expr, inside: Any, follow: Callable[[str], ast.expr | ast.stmt | None]) -> list[str]:
    """Return the classes that ``parser.parse_...()`` fills. ``inside`` is the function that contains the call, or
    None."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARSE):
        return []
    maker: Any = node.func.value
    if isinstance(maker, ast.Name):
        maker = _assigned(inside, maker.id) or follow(maker.id)
    if isinstance(maker, ast.Call) and isinstance(maker.func, ast.Name):
        function = follow(maker.func.id)
        if isinstance(function, ast.FunctionDef):
            inside = function
            made = [call for call in nodes_of(function, ast.Call) if called_name(call).endswith("Parser")]
            maker = made[-1] if made else None
    if not isinstance(maker, ast.Call) or not called_name(maker).endswith("Parser"):
        return []
    if called_name(maker) == "ArgumentParser":
        return [ARGPARSE]
    return _listed(maker, inside)


def _listed(maker: ast.Call, inside: Any) -> list[str]:
    """Return the names of the classes that are passed to a parser's constructor."""
    classes = keywords_of(maker).get("dataclass_types", maker.args[0] if maker.args else None)
    if isinstance(classes, ast.Name):
        classes = _assigned(inside, classes.id) or classes
    if classes is None:
        return []
    elements = classes.elts if isinstance(classes, (ast.Tuple, ast.List)) else [classes]
    return [ast.unparse(kind).rpartition(".")[2] for kind in elements]


def _assigned(inside: Any, name: str) -> ast.expr | None:
    """Return the expression that a function assigns to a name."""
    for statement in nodes_of(inside, ast.Assign) if inside is not None else ():
        if name in map(ast.unparse, statement.targets):
            return statement.value
    return None
