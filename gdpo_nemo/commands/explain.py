"""What ``gdpo-nemo explain KEY`` prints, read from the docstrings of the schema so that it cannot drift from it."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from gdpo_nemo.config.choices import CHOICES, OWN_FUNCTIONS
from gdpo_nemo.config.load import nearest_key
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("explain", help="what a config key does")
    command.add_argument(
        "key", nargs="?", default="", metavar="KEY", help="a section or a dotted key; none: all sections"
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what a key or a section means."""
    print(explain(arguments.key), end="")
    return 0


def explain(key: str = "") -> str:
    """Explains a section (its keys, one line each) or a key (type, default, accepted values, meaning).

    Raises:
        ConfigError: the key does not exist; the text names the nearest one.
    """
    key, owner, hint = _find(key)
    section = _section_of(hint)
    text = _explain_section(key, section) if section else _explain_key(key, owner, hint)
    return text + "\n"


def _find(key: str) -> tuple[str, type | None, Any]:
    """The key, the dataclass that holds it and its type; a key inside a free-form mapping stands for the mapping."""
    found = []
    owner = None
    hint = Config
    for name in key.split(".") if key else []:
        section = _section_of(hint)
        if get_origin(hint) is dict:
            break
        if section is None or name not in (hints := get_type_hints(section)):
            near = nearest_key(key)
            raise ConfigError(f"{key}: unknown key" + (f", did you mean {near}?" if near else ""))
        found = [*found, name]
        owner = section
        hint = hints[name]
    return ".".join(found), owner, hint


def _section_of(hint: Any) -> type | None:
    return next((h for h in (hint, *get_args(hint)) if dataclasses.is_dataclass(h)), None)


def _explain_section(key: str, section: type) -> str:
    lines = [key or "Sections", "", *_wrapped(inspect.cleandoc(section.__doc__)), ""]
    docs = _field_docs(section)
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        inner = _section_of(hints[field.name])
        doc = docs.get(field.name) or (inspect.cleandoc(inner.__doc__) if inner else "")
        about = f"{field.name} ..." if inner else f"{field.name} = {_default(field)}"
        lines += [f"  {about}", *textwrap.wrap(doc, 110, initial_indent="      ", subsequent_indent="      ")]
    return "\n".join(lines)


def _explain_key(key: str, owner: type, hint: Any) -> str:
    name = key.rpartition(".")[2]
    field = next(f for f in dataclasses.fields(owner) if f.name == name)
    lines = [key, f"  type     {_type_name(hint)}", f"  default  {_default(field)}"]
    if key in CHOICES:
        own = ", or one of your own: file.py:name" if key in OWN_FUNCTIONS else ""
        lines.append(f"  accepts  {', '.join(CHOICES[key])}{own}")
    return "\n".join([*lines, "", *_wrapped(_field_docs(owner).get(name, ""))])


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 114, initial_indent="  ", subsequent_indent="  ")


def _default(field: dataclasses.Field) -> str:
    value = field.default_factory() if field.default is dataclasses.MISSING else field.default
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
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    docs = {}
    for field, text in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
