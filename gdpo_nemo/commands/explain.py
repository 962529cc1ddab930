"""``gdpo-nemo explain KEY``: describe a config key from the schema's docstrings, or a metric from the registry."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Sequence
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from gdpo_nemo.algorithms.estimators import about_batch_norm, about_options
from gdpo_nemo.algorithms.ranges import Range, fields_of
from gdpo_nemo.commands.arguments import Commands
from gdpo_nemo.config.algorithm_choice import about_algorithms
from gdpo_nemo.config.allowed_values import CHOICES, CUSTOM_FUNCTIONS
from gdpo_nemo.config.load import nearest_key
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metric_registry import OWN, Metric, find_metric, metrics, nearest_metric
from gdpo_nemo.utils.errors import ConfigError

_ABOUT_ESTIMATORS = {"gdpo.options": about_options, "gdpo.batch_norm": about_batch_norm}
"""Functions that return what the registry of estimators adds to the description of a key."""
_METRIC = "metric"
_METRICS = f"{_METRIC}s"


def add(commands: Commands) -> None:
    """Register the command."""
    command = commands.add_parser("explain", help="explain a config key or a metric")
    command.add_argument(
        "key",
        nargs="?",
        default="",
        metavar="KEY",
        help="section, dotted key, metric/NAME, a word of the console such as parity, or metric for all metrics "
        "(default: all sections)",
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the description of a key, a section or a metric."""
    print(explain(arguments.key), end="")
    return 0


def explain(key: str = "") -> str:
    """Describe a section, a key or a metric.

    A section lists its keys. A key is described by its type, default, accepted values and meaning.

    Raises:
        ConfigError: if the key or metric does not exist. The message names the closest existing key or metric.
    """
    if key in (_METRIC, _METRICS):
        return _all_metrics() + "\n"
    if key.startswith(f"{_METRIC}/"):
        return _explain_metric(key.partition("/")[2]) + "\n"
    if not key:
        return _explain_section("", Config) + "\n"
    if key not in {section.name for section in keys_of(Config)} and (shown := _metrics_of_word(key)):
        return "\n\n".join(_explain_metric(metric.pattern) for metric in shown) + "\n"
    found = _find(key, key.split("."), Config)
    return (_explain_section(found.path, found.section) if found.section else _explain_key(found)) + "\n"


def _metrics_of_word(word: str) -> list[Metric]:
    """Return the metrics that the console labels with a word, and then the other metrics whose names begin with it."""
    found = [m for m in metrics().values() if word in (m.label, m.pattern, m.pattern.partition("/")[0])]
    return sorted(found, key=lambda metric: metric.label != word)


def _find(path: str, names: Sequence[str], section: type | None, prefix: str = "") -> Key:
    """Return the key at ``path``. ``names`` are the parts of the path after the section ``prefix``.

    For a key inside a free-form mapping, return the key of the mapping.
    """
    keys = {key.name: key for key in keys_of(section, prefix)} if section else {}
    if names[0] not in keys:
        near = nearest_key(path)
        raise ConfigError(f"{path}: unknown key" + (f", did you mean {near}?" if near else ""))
    found = keys[names[0]]
    if len(names) == 1 or found.type.startswith("mapping"):
        return found
    return _find(path, names[1:], found.section, found.path)


def _explain_section(path: str, section: type) -> str:
    lines = [path or "Sections", "", *_wrapped(about_section(section)), ""]
    for key in keys_of(section, path):
        lines.append(f"  {key.name} ..." if key.section else f"  {key.name} = {key.default}")
        lines += textwrap.wrap(key.about, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _explain_key(key: Key) -> str:
    lines = [key.path, f"  type     {key.type}", f"  default  {key.default}"]
    if key.choices:
        custom = ", or a custom function: file.py:name" if key.accepts_custom else ""
        lines.append(f"  accepts  {', '.join(key.choices)}{custom}")
    if key.range:
        lines.append(f"  range    {key.range}")
    return "\n".join([*lines, "", *_wrapped(key.about)])


def _all_metrics() -> str:
    lines = [
        "Metrics",
        "",
        *_wrapped(f"These are the keys of metrics.jsonl. Keys under {OWN} are logged by custom reward functions."),
        "",
    ]
    for metric in metrics().values():
        lines.append(f"  {metric.pattern}" + (f" [{metric.unit}]" if metric.unit else ""))
        lines += textwrap.wrap(metric.about, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _explain_metric(key: str) -> str:
    metric = find_metric(key)
    if metric is None and key.startswith(OWN):
        custom = f"Mean of the values that reward functions pass to log_metric under the name {key.removeprefix(OWN)}."
        return "\n".join([f"{_METRIC}/{key}", "", *_wrapped(custom)])
    if metric is None:
        raise ConfigError(_no_metric(key))
    lines = [f"{_METRIC}/{key}"]
    lines += [f"  key      {metric.pattern}"] * (metric.pattern != key)
    lines.append(f"  unit     {metric.unit or 'a plain number'}")
    if metric.is_checked:
        lines += [f"  healthy  {metric.bounds}, {_where(metric)}", f"  because  {metric.why}"]
        lines += [f"  try      {metric.remedy}"] * bool(metric.remedy)
    return "\n".join([*lines, f"  written  by {metric.source}", "", *_wrapped(metric.about_key(key))])


def _no_metric(key: str) -> str:
    near = nearest_metric(key)
    hint = f", did you mean {_METRIC}/{near}?" if near else f"; gdpo-nemo explain {_METRIC} lists all metrics"
    return f"{_METRIC}/{key}: unknown metric{hint}"


def _where(metric: Metric) -> str:
    return "at every step" if metric.at == "every" else f"at the {metric.at}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 114, initial_indent="  ", subsequent_indent="  ")


@dataclasses.dataclass(frozen=True)
class Key:
    """Description of a config key."""

    path: str
    """Dotted path from the root of the config."""
    section: type | None
    """Dataclass of the section, or None if the key is not a section."""
    type: str
    default: str
    choices: tuple[str, ...]
    """Accepted values. Empty if all values of the type are accepted."""
    accepts_custom: bool
    """True if the import path of a user-defined function is also accepted."""
    range: str
    """Accepted range of a number. Empty if every number is accepted."""
    about: str
    """Meaning of the key, from its docstring."""

    @property
    def name(self) -> str:
        """Last part of the key's dotted path."""
        return self.path.rpartition(".")[2]


def keys_of(section: type, prefix: str = "") -> list[Key]:
    """Return the keys of a section in schema order. ``prefix`` is the path of the section."""
    hints = get_type_hints(section)
    docs = _field_docs(section)
    ranges = {field.name: field.range for field in fields_of(section)}
    return [_key(field, hints[field.name], docs, ranges[field.name], prefix) for field in dataclasses.fields(section)]


def section_of(hint: Any) -> type | None:
    """Return the dataclass in a type hint, such as an optional type, or None if the hint contains no dataclass."""
    return next((h for h in (hint, *get_args(hint)) if isinstance(h, type) and dataclasses.is_dataclass(h)), None)


def about_section(section: type) -> str:
    """Return the docstring of a section as one paragraph."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split())


def _key(field: dataclasses.Field[Any], hint: Any, docs: dict[str, str], range_: Range | None, prefix: str) -> Key:
    path = f"{prefix}.{field.name}" if prefix else field.name
    section = section_of(hint)
    about = docs.get(field.name) or (about_section(section) if section else "")
    if path == "algorithm.type":
        about = f"{about_algorithms()} {about}"
    if path in _ABOUT_ESTIMATORS:
        about = f"{about} {_ABOUT_ESTIMATORS[path]()}"
    choices = CHOICES.get(path, ())
    return Key(
        path=path,
        section=section,
        type=_type_name(hint),
        default=_default(field),
        choices=choices,
        accepts_custom=path in CUSTOM_FUNCTIONS,
        range=str(range_ or ""),
        about=about,
    )


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None:
        return "null"
    if value == MISSING:
        return "(required)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type_name(hint: Any) -> str:
    names = {int: "integer", float: "number", bool: "true or false", str: "text", Any: "any"}
    if get_origin(hint) in (Union, UnionType):
        return f"{_type_name(get_args(hint)[0])}, or null"
    if get_origin(hint) is dict:
        return f"mapping of names to {_type_name(get_args(hint)[1])}"
    if get_origin(hint) is list:
        return f"list of {_type_name(get_args(hint)[0])}"
    return names.get(hint, getattr(hint, "__name__", str(hint)))


@cache
def _field_docs(section: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, read from the source because Python discards it."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    docs: dict[str, str] = {}
    for field, text in zip(body, body[1:]):
        if not (isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)):
            continue
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
