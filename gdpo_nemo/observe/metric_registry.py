"""What every metric means, in one place for console, plots, health, report, trackers and ``gdpo-nemo explain metric``.

A module that computes metrics describes them beside the code, in a literal ``METRICS``:

    METRICS = {
        "rollout/turns": ("turns", "Turns of a trajectory, mean over the step"),
        "grad_norm": ("", "Norm of the gradient before clipping", {"max": 100.0, "why": "..."}),
    }

with the key, its unit and its meaning, and where there is more to say the further fields of ``Metric``. ``NAME`` in a
key stands for any name. The literals are read from the source of the package: naming a metric imports neither torch nor
Ray, and nothing here depends on the rooms above that write them.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Iterable, Mapping

PACKAGE = Path(__file__).resolve().parents[1]
NAME = "NAME"
"""What stands in a pattern for the name of a component, an environment or a function."""
OWN = "reward_function/"
"""Before the names under which reward functions report numbers of their own (``log_metric``)."""
_GROUPS = ("", "reward", "advantage", "policy", "parity", "rollout", "staleness", "time", "throughput", "packing")
"""The order in which groups of metrics are shown; others follow by name."""


@dataclass(frozen=True)
class Metric:
    """One key of a row, or a family of keys with ``NAME`` in it."""

    pattern: str
    unit: str
    """Empty for a plain number."""
    about: str
    """What it is, in one line."""
    label: str = ""
    """What a display calls it; empty: by its key."""
    min: float | None = None
    max: float | Mapping[str, float] | None = None
    """The range of a sound run, which ``health`` judges by; a mapping has one bound for each ``policy.precision``."""
    at: str = "every"
    """Where it is judged: as ``Check.at``."""
    required: bool = False
    """A step without it fails: values that are not finite are not written."""
    why: str = ""
    """What a value out of the range means."""
    remedy: str = ""
    """What to try then, behind the word "try"."""
    advisory: bool = False
    """A value out of the range is a warning: ``health`` does not fail for it."""
    source: str = ""
    """The file that writes it, from the package on."""

    @property
    def group(self) -> str:
        """What stands before the first slash; empty for a key without one."""
        return self.pattern.partition("/")[0] if "/" in self.pattern else ""

    @property
    def judged(self) -> bool:
        """Whether ``health`` has a bound for it."""
        return self.min is not None or self.max is not None

    def limits(self, precision: str) -> tuple[float | None, float | None]:
        """Smallest and largest sound value of a run in this precision."""
        return self.min, self.max[precision] if isinstance(self.max, Mapping) else self.max

    @property
    def bounds(self) -> str:
        """The range of a sound run in words; empty where none is judged."""
        if isinstance(self.max, Mapping):
            return "at most " + ", ".join(f"{most:g} in {precision}" for precision, most in self.max.items())
        limits = (("at least", self.min), ("at most", self.max))
        return ", ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)

    def keys(self, names: Iterable[str]) -> list[str]:
        """The keys it stands for where its ``NAME`` is one of ``names``."""
        return [self.pattern.replace(NAME, name) for name in names] if NAME in self.pattern else [self.pattern]

    def matches(self, key: str) -> bool:
        """Whether it describes ``key``."""
        return self._match(key) is not None

    def about_key(self, key: str) -> str:
        """The meaning of one of its keys, with the name that stands for ``NAME`` there."""
        match = self._match(key)
        return self.about.replace(NAME, match[1]) if match and match.groups() else self.about

    def _match(self, key: str) -> re.Match[str] | None:
        return re.fullmatch(re.escape(self.pattern).replace(NAME, "(.+)"), key)


@cache
def metrics() -> Mapping[str, Metric]:
    """Every metric by its pattern, in the order of the reference."""
    found: dict[str, Metric] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nMETRICS = {" in text:
            found.update(read_entries(text, str(path.relative_to(PACKAGE.parent))))
    return {metric.pattern: metric for metric in sorted(found.values(), key=_place)}


def read_entries(text: str, source: str) -> dict[str, Metric]:
    """The entries of one module's text.

    Raises:
        ValueError: an entry is not written as the top of this file says.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "METRICS" for t in node.targets):
            entries = ast.literal_eval(node.value)
            return {key: _metric(key, entry, source) for key, entry in entries.items()}
    return {}


def find_metric(key: str) -> Metric | None:
    """What describes ``key``: its own entry, else the longest pattern that it matches; None for what nobody here
    writes."""
    entry = metrics().get(key)
    if entry is not None:
        return entry
    return max((m for m in metrics().values() if m.matches(key)), key=lambda m: len(m.pattern), default=None)


def label_of(key: str) -> str:
    """What a display calls a metric; its key where nothing else is said."""
    metric = find_metric(key)
    return metric.label if metric and metric.label else key


def unit_of(key: str) -> str:
    """The unit of a metric; empty for a plain number and for what is not known."""
    metric = find_metric(key)
    return metric.unit if metric else ""


def title_of(key: str) -> str:
    """Label and unit of a metric, for an axis: ``entropy [nats/token]``."""
    unit = unit_of(key)
    return f"{label_of(key)} [{unit}]" if unit else label_of(key)


def about_of(key: str) -> str:
    """The meaning of a metric; empty where nothing describes it."""
    metric = find_metric(key)
    return metric.about_key(key) if metric else ""


def description_of(key: str) -> str:
    """Meaning and unit of a metric in one line, for a tracker; empty where nothing describes it."""
    unit = unit_of(key)
    return f"{about_of(key)} [{unit}]" if unit else about_of(key)


def unknown_metrics(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Keys of rows that nothing describes, in order. Those of reward functions are their authors."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if not key.startswith(OWN) and find_metric(key) is None]


def nearest_metric(key: str) -> str | None:
    """The described metric that was probably meant."""
    patterns = list(metrics())
    return next(iter(get_close_matches(key, patterns, n=1, cutoff=0.5)), None)


def _metric(key: str, entry: object, source: str) -> Metric:
    if not isinstance(entry, tuple) or len(entry) not in (2, 3) or not all(isinstance(part, str) for part in entry[:2]):
        raise ValueError(f"{source}: METRICS[{key!r}] must be (unit, meaning) or (unit, meaning, further fields)")
    try:
        unit, about = entry[:2]
        fields: dict[str, Any] = dict(*entry[2:])
        return Metric(key, unit, about, source=source, **fields)
    except TypeError as error:
        raise ValueError(f"{source}: METRICS[{key!r}]: {error}") from None


def _place(metric: Metric) -> tuple[int, str]:
    """By group, then as written (``sorted`` is stable); first the step."""
    if metric.pattern == "step":
        return -1, ""
    return (_GROUPS.index(metric.group), "") if metric.group in _GROUPS else (len(_GROUPS), metric.group)
