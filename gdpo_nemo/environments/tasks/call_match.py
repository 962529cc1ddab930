"""Exact match of function calls, with the rules of the Berkeley Function Calling Leaderboard (BFCL) for Python.

The rules are those of ``ast_checker.py`` in ShishirPatil/gorilla at 6ea57973. An answer lists the acceptable values of
each parameter, and ``""`` among these values makes the parameter optional. The calls are valid if there are as many
calls as answers, and each answer, in order, finds an unused call with these properties:

* the name is the same, all required parameters are present, and no other parameter than those of the answer is present;
* each value has the described type, where only an integer for a float is converted, or the type of the first acceptable
  value;
* each value is acceptable. Strings are compared without case, spaces and the characters ``,./-_*^``, also as items of
  lists and values of dictionaries.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[str, Mapping[str, Any]]
"""Name and parameters."""
Answer = Mapping[str, Mapping[str, Sequence[Any]]]
"""{name: {parameter: acceptable values}}, with one name."""

_TYPES: dict[str, type] = {
    "string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list, "dict": dict,
    "any": str, "number": float, "object": dict,
}  # fmt: skip
"""Types of BFCL's descriptions, and the two names of JSON schema that BFCL replaces."""
_NAMES: dict[type, str] = {str: "string", int: "integer", float: "float", bool: "boolean", list: "array", dict: "dict"}
_IGNORED = re.compile(r"[ ,./\-_*^]")


def calls_match(functions: Sequence[Mapping[str, Any]], made: Sequence[Call], answers: Sequence[Answer]) -> bool:
    """Return whether the calls are valid.

    Args:
        functions: descriptions, each with a name and a JSON schema ``parameters``, in which objects have the type dict.
        made: the calls to check.
        answers: the expected calls, in any order.
    """
    if len(made) != len(answers):
        return False
    unused = list(made)
    for answer in answers:
        ((name, acceptable),) = answer.items()
        schema = next((f["parameters"] for f in functions if f["name"] == name), None)
        if schema is None:
            raise ValueError(f"the function {name!r} of the answer is not described")
        found = (i for i, call in enumerate(unused) if call[0] == name and _call_matches(schema, call[1], acceptable))
        index = next(found, None)
        if index is None:
            return False
        del unused[index]
    return True


def exact_answers(calls: Sequence[Call]) -> tuple[list[dict[str, Any]], list[Answer]]:
    """Return descriptions and answers that accept only the values of ``calls``, for data without descriptions.

    Types are those of the values. Every parameter is required, except those with the value ``""``.
    """
    functions: dict[str, dict[str, Any]] = {}
    answers: list[Answer] = []
    for name, parameters in calls:
        function = functions.setdefault(name, {"name": name, "parameters": {"properties": {}, "required": []}})
        function["parameters"]["properties"] |= {key: _described(value) for key, value in parameters.items()}
        answers.append({name: {key: [_as_answer(value)] for key, value in parameters.items()}})
    return list(functions.values()), answers


def first_acceptable(acceptable: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the first acceptable value other than ``""`` of each parameter that has one."""
    found = {}
    for key, value in _first_values(acceptable).items():
        found[key] = list(map(_first_in_dict, value)) if isinstance(value, list) else _first_in_dict(value)
    return found


def _first_values(acceptable: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the first value other than ``""`` of each key that has one."""
    found = {}
    for key, values in acceptable.items():
        for value in values:
            if value != "":
                found[key] = value
                break
    return found


def _first_in_dict(value: Any) -> Any:
    """Return a dictionary's first acceptable values, which may be any type. Other values are unchanged."""
    return _first_values(value) if isinstance(value, dict) else value


def _described(value: Any) -> dict[str, Any]:
    described: dict[str, Any] = {"type": _NAMES.get(type(value), "any")}
    kinds = set(map(type, value)) if isinstance(value, list) else set()
    if len(kinds) == 1 and (kind := kinds.pop()) in _NAMES:
        described["items"] = {"type": _NAMES[kind]}
    return described


def _as_answer(value: Any) -> Any:
    """Return an acceptable value: in dictionaries, and in lists of dictionaries, each value is a list."""
    if isinstance(value, dict):
        return {key: [item] for key, item in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return list(map(_as_answer, value))
    return value


def _call_matches(
    schema: Mapping[str, Any], parameters: Mapping[str, Any], acceptable: Mapping[str, Sequence[Any]]
) -> bool:
    described = schema["properties"]
    return (
        parameters.keys() >= set(schema.get("required", ()))
        and parameters.keys() <= described.keys() & acceptable.keys()
        and all(_value_matches(described[key], value, acceptable[key]) for key, value in parameters.items())
        and all(key in parameters or "" in values for key, values in acceptable.items())
    )


def _value_matches(description: Mapping[str, Any], value: Any, acceptable: Sequence[Any]) -> bool:
    kind = _TYPES[description["type"]]
    item_type = description.get("items", {}).get("type") if kind is list else None
    item_kind = None if item_type is None else _TYPES[item_type]
    if kind is float and type(value) is int:
        value = float(value)
    answer_kind = _first_kind(acceptable)
    described = type(value) is kind
    if described and item_kind is not None and not _items_match(item_kind, value, acceptable):
        return False
    if not described or answer_kind not in (None, kind):
        # The answer has another type than the description, such as the name of a variable.
        return (described or type(value) is answer_kind) and value in acceptable
    if kind is dict:
        return any(_dict_matches(value, other) for other in acceptable if other != "")
    if kind is list and item_kind is dict:
        return any(
            len(value) == len(other) and all(map(_dict_matches, value, other))  # the empty list equals ""
            for other in acceptable
        )
    if kind is list:
        return _plain_items(value) in map(_plain_items, acceptable)
    return _plain(value) in map(_plain, acceptable)


def _first_kind(acceptable: Sequence[Any]) -> type | None:
    """Return the type of the first acceptable value other than ``""``, or None."""
    return next((type(value) for value in acceptable if value != ""), None)


def _items_match(kind: type, value: Sequence[Any], acceptable: Sequence[Any]) -> bool:
    """Return whether the items have the described type or, for one acceptable list, the type of its first item.

    As in BFCL, an acceptable value that is not a list allows items of any type.
    """
    for other in acceptable:
        if not isinstance(other, list):
            return True
        if all(type(item) is kind or type(item) is _first_kind(other) for item in value):
            return True
    return False


def _dict_matches(value: Any, acceptable: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(acceptable, dict):
        return False
    for key, item in value.items():
        if key not in acceptable or _plain(item) not in map(_plain, acceptable[key]):
            return False
    return all(key in value or "" in values for key, values in acceptable.items())


def _plain_items(values: Sequence[Any]) -> list[Any]:
    return list(map(_plain, values))


def _plain(value: Any) -> Any:
    """Return a string without case and the ignored characters. Other values are unchanged."""
    return _IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
