"""The schema as text: every key with type, default, accepted values and meaning, read from the dataclasses and the
docstrings of their fields, so that what is printed cannot drift from what is accepted."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from gdpo_nemo.algorithms.ranges import Range, fields_of
from gdpo_nemo.config.choices import CHOICES, OWN_FUNCTIONS


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section."""

    path: str
    """Dotted, from the root of the config."""
    section: type | None
    """The dataclass behind it, where it is a section itself."""
    type: str
    default: str
    choices: tuple[str, ...]
    """The names it takes; empty where any value of its type will do."""
    takes_own: bool
    """Whether it also takes a function of the user's by its place."""
    range: str
    """Values that its numbers may have; empty if it has none."""
    about: str

    @property
    def name(self) -> str:
        """Its last part."""
        return self.path.rpartition(".")[2]


def keys_of(section: type, prefix: str = "") -> list[Key]:
    """The keys of a section in order; ``prefix`` is the section's own path."""
    hints = get_type_hints(section)
    docs = _field_docs(section)
    ranges = {field.name: field.range for field in fields_of(section)}
    return [_key(field, hints[field.name], docs, ranges[field.name], prefix) for field in dataclasses.fields(section)]


def section_of(hint: Any) -> type | None:
    """The dataclass in a type, such as that of an optional section; None where there is none."""
    return next((h for h in (hint, *get_args(hint)) if isinstance(h, type) and dataclasses.is_dataclass(h)), None)


def about_section(section: type) -> str:
    """The docstring of a section as one paragraph."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split())


def _key(field: dataclasses.Field, hint: Any, docs: dict[str, str], range_: Range | None, prefix: str) -> Key:
    path = f"{prefix}.{field.name}" if prefix else field.name
    section = section_of(hint)
    about = docs.get(field.name) or (about_section(section) if section else "")
    choices = CHOICES.get(path, ())
    return Key(
        path, section, _type_name(hint), _default(field), choices, path in OWN_FUNCTIONS, str(range_ or ""), about
    )


def _default(field: dataclasses.Field) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None:
        return "null"
    if value == MISSING:
        return "(must be set)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(hint: Any) -> str:
    names = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "any"}
    if get_origin(hint) is Union:
        return f"{_type_name(get_args(hint)[0])}, or null"
    if get_origin(hint) is dict:
        return f"mapping of names to {_type_name(get_args(hint)[1])}"
    if get_origin(hint) is list:
        return f"list of {_type_name(get_args(hint)[0])}"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


@cache
def _field_docs(section: type) -> dict[str, str]:
    """The string literal under each field of a dataclass, which Python itself throws away."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, text in zip(body, body[1:]):
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
