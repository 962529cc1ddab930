"""What ``gdpo-nemo explain KEY`` prints: a config key from the docstrings of the schema, a metric from its entry in
``METRICS``."""

from __future__ import annotations

import argparse
import textwrap
from typing import Sequence

from gdpo_nemo.commands.config_docs import Key, about_section, keys_of
from gdpo_nemo.config.load import nearest_key
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError
from gdpo_nemo.observe.metric_registry import OWN, Metric, find_metric, metrics, nearest_metric

_METRIC = "metric"
_METRICS = f"{_METRIC}s"


def add(commands) -> None:
    """Register the command."""
    command = commands.add_parser("explain", help="what a config key or a metric means")
    command.add_argument(
        "key",
        nargs="?",
        default="",
        metavar="KEY",
        help="a section, a dotted key, metric/NAME, or metric for all metrics; none: all sections",
    )
    command.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what a key, a section or a metric means."""
    print(explain(arguments.key), end="")
    return 0


def explain(key: str = "") -> str:
    """Explains a section (its keys, one line each), a key (type, default, accepted values, meaning), or a metric.

    Raises:
        ConfigError: the key or the metric does not exist; the text names the nearest one.
    """
    if key in (_METRIC, _METRICS):
        return _all_metrics() + "\n"
    if key.startswith(f"{_METRIC}/"):
        return _explain_metric(key.partition("/")[2]) + "\n"
    if not key:
        return _explain_section("", Config) + "\n"
    found = _find(key, key.split("."), Config)
    return (_explain_section(found.path, found.section) if found.section else _explain_key(found)) + "\n"


def _find(path: str, names: Sequence[str], section: type | None, prefix: str = "") -> Key:
    """The key at ``path``, whose last ``names`` lie below the section ``prefix``; a key inside a free-form mapping
    stands for the mapping."""
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
        own = ", or one of your own: file.py:name" if key.takes_own else ""
        lines.append(f"  accepts  {', '.join(key.choices)}{own}")
    if key.range:
        lines.append(f"  range    {key.range}")
    return "\n".join([*lines, "", *_wrapped(key.about)])


def _all_metrics() -> str:
    lines = [
        "Metrics",
        "",
        *_wrapped(f"Keys of metrics.jsonl. Those under {OWN} are logged by reward functions of yours."),
        "",
    ]
    for metric in metrics().values():
        lines.append(f"  {metric.pattern}" + (f" [{metric.unit}]" if metric.unit else ""))
        lines += textwrap.wrap(metric.about, 110, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _explain_metric(key: str) -> str:
    metric = find_metric(key)
    if metric is None and key.startswith(OWN):
        own = f"What the run's reward functions gave to log_metric under the name {key.removeprefix(OWN)}, mean"
        return "\n".join([f"{_METRIC}/{key}", "", *_wrapped(own)])
    if metric is None:
        raise ConfigError(_no_metric(key))
    lines = [f"{_METRIC}/{key}"]
    lines += [f"  key      {metric.pattern}"] * (metric.pattern != key)
    lines.append(f"  unit     {metric.unit or 'a plain number'}")
    if metric.judged:
        lines += [f"  healthy  {metric.bounds}, {_where(metric)}", f"  because  {metric.why}"]
        lines += [f"  try      {metric.remedy}"] * bool(metric.remedy)
    return "\n".join([*lines, f"  written  by {metric.source}", "", *_wrapped(metric.about_key(key))])


def _no_metric(key: str) -> str:
    near = nearest_metric(key)
    hint = f", did you mean {_METRIC}/{near}?" if near else f"; gdpo-nemo explain {_METRIC} lists them"
    return f"{_METRIC}/{key}: unknown metric{hint}"


def _where(metric: Metric) -> str:
    return "at every step" if metric.at == "every" else f"at the {metric.at}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 114, initial_indent="  ", subsequent_indent="  ")
