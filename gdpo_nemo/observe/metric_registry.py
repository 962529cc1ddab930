"""Registry of metrics: units, descriptions, bounds, and names in NeMo-RL and TRL (``logger.aliases``).

A module describes its metrics in a dictionary ``METRICS``: key -> (unit, description) or (unit, description, fields).
``fields`` sets further attributes of ``Metric``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
NAME = "NAME"
"""Placeholder in a pattern for a name, such as the name of a reward component or environment."""
OWN = "reward_function/"
"""Prefix of the metrics that reward functions report with ``log_metric``, and packages for verifiers report."""
_GROUPS = ("", "reward", "advantage", "policy", "parity", "rollout", "staleness", "time", "throughput", "packing")
"""Groups of metrics in display order. Other groups follow in alphabetical order."""


@dataclass(frozen=True)
class Metric:
    """Description of one metric, or of a family of metrics with ``NAME`` in their key."""

    pattern: str
    unit: str
    """Unit of the metric. Empty for a number without a unit."""
    about: str
    """One-line description."""
    label: str = ""
    """Name in displays. If empty, displays show the key."""
    min: float | None = None
    max: float | Mapping[str, float] | None = None
    """Largest value of a healthy run. A mapping contains one bound for each ``policy.precision``."""
    at: str = "every"
    """Steps at which the metric is checked, in the format of ``Check.at``."""
    required: bool = False
    """True if the check fails at a step without the metric. A non-finite value also counts as missing."""
    why: str = ""
    """Meaning of a value out of range."""
    remedy: str = ""
    """Remedy for a value out of range, shown after the word "try"."""
    advisory: bool = False
    """True if a value out of range is only a warning."""
    source: str = ""
    """Module that describes the metric, as a path that begins with ``gdpo_nemo/``."""

    @property
    def group(self) -> str:
        """Group of the metric: the key up to its first slash. Empty for a key without a slash."""
        return self.pattern.partition("/")[0] if "/" in self.pattern else ""

    @property
    def is_checked(self) -> bool:
        """True if the metric has a bound that the health check uses."""
        return self.min is not None or self.max is not None

    def limits(self, precision: str) -> tuple[float | None, float | None]:
        """Return the smallest and largest healthy value for a ``policy.precision``."""
        return self.min, self.max[precision] if isinstance(self.max, Mapping) else self.max

    @property
    def bounds(self) -> str:
        """Healthy range of the metric as text. Empty if the metric has no bounds."""
        if isinstance(self.max, Mapping):
            return "at most " + ", ".join(f"{most:g} in {precision}" for precision, most in self.max.items())
        limits = (("at least", self.min), ("at most", self.max))
        return ", ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)

    def keys(self, names: Iterable[str]) -> list[str]:
        """Return the keys of the metric with ``NAME`` replaced by each of ``names``."""
        return [self.pattern.replace(NAME, name) for name in names] if NAME in self.pattern else [self.pattern]

    def matches(self, key: str) -> bool:
        """Return True if ``key`` is the metric's key or belongs to the metric's family."""
        return self._match(key) is not None

    def about_key(self, key: str) -> str:
        """Return the description of one of the metric's keys, with ``NAME`` replaced."""
        match = self._match(key)
        return self.about.replace(NAME, match[1]) if match and match.groups() else self.about

    def _match(self, key: str) -> re.Match[str] | None:
        return re.fullmatch(re.escape(self.pattern).replace(NAME, "(.+)"), key)


@cache
def metrics() -> Mapping[str, Metric]:
    """Collect all metrics from the package's modules, by pattern, in the order of the reference page."""
    found: dict[str, Metric] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\nMETRICS = {" in text:
            found.update(read_entries(text, str(path.relative_to(PACKAGE.parent))))
    return {metric.pattern: metric for metric in sorted(found.values(), key=_sort_key)}


def read_entries(text: str, source: str) -> dict[str, Metric]:
    """Parse the dictionary ``METRICS`` in the source code of a module.

    Args:
        text: source code of the module.
        source: path of the module.

    Raises:
        ValueError: if an entry does not have the format described at the top of this file.
    """
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "METRICS" for t in node.targets):
            entries = ast.literal_eval(node.value)
            return {key: _metric(key, entry, source) for key, entry in entries.items()}
    return {}


def find_metric(key: str) -> Metric | None:
    """Find the metric for ``key``: the exact entry, or the longest matching pattern. Return None for an unknown key."""
    entry = metrics().get(key)
    if entry is not None:
        return entry
    return max((m for m in metrics().values() if m.matches(key)), key=lambda m: len(m.pattern), default=None)


def label_of(key: str) -> str:
    """Return the display name of a metric, or its key if the metric has no label."""
    metric = find_metric(key)
    return metric.label if metric and metric.label else key


def unit_of(key: str) -> str:
    """Return the unit of a metric. The unit is empty for a number without a unit or an unknown metric."""
    metric = find_metric(key)
    return metric.unit if metric else ""


def title_of(key: str) -> str:
    """Return the name and unit of a metric as an axis title: ``entropy [nats/token]``."""
    unit = unit_of(key)
    return f"{label_of(key)} [{unit}]" if unit else label_of(key)


def about_of(key: str) -> str:
    """Return the description of a metric, or an empty string for an unknown metric."""
    metric = find_metric(key)
    return metric.about_key(key) if metric else ""


def description_of(key: str) -> str:
    """Return the description and unit of a metric in one line, for trackers.

    Unknown metrics have an empty description.
    """
    unit = unit_of(key)
    return f"{about_of(key)} [{unit}]" if unit else about_of(key)


def unknown_metrics(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Return the keys in ``rows`` that have no description, in order, except metrics of reward functions."""
    keys = dict.fromkeys(chain.from_iterable(rows))
    return [key for key in keys if not key.startswith(OWN) and find_metric(key) is None]


def nearest_metric(key: str) -> str | None:
    """Return the pattern of the known metric with the name closest to ``key``, or None if no name is similar."""
    patterns = list(metrics())
    return next(iter(get_close_matches(key, patterns, n=1, cutoff=0.5)), None)


def _metric(key: str, entry: object, source: str) -> Metric:
    if not isinstance(entry, tuple) or len(entry) not in (2, 3) or not all(isinstance(part, str) for part in entry[:2]):
        raise ValueError(f"{source}: METRICS[{key!r}] must be (unit, description) or (unit, description, fields)")
    try:
        unit, about = entry[:2]
        fields: dict[str, Any] = dict(*entry[2:])
        return Metric(key, unit, about, source=source, **fields)
    except TypeError as error:
        raise ValueError(f"{source}: METRICS[{key!r}]: {error}") from None


def _sort_key(metric: Metric) -> tuple[int, str]:
    """Return a sort key that orders metrics by group, with ``step`` first.

    Within a group, metrics remain in source order.
    """
    if metric.pattern == "step":
        return -1, ""
    return (_GROUPS.index(metric.group), "") if metric.group in _GROUPS else (len(_GROUPS), metric.group)


ALIASES: dict[str, dict[str, str]] = {
    "nemo_rl": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/lr",
        "reward/total/mean": "train/reward",
        "policy/reference_kl": "train/kl_penalty",
        "policy/entropy": "train/approx_entropy",
        "policy/ratio_mean": "train/probs_ratio",
        "policy/ratio_min": "train/probs_ratio_min",
        "policy/ratio_max": "train/probs_ratio_max",
        "parity/kl": "train/gen_kl_error",
        "rollout/mean_length": "train/mean_gen_tokens_per_sample",
        "rollout/truncated": "train/truncation_rate",
        "rollout/turns": "train/avg_turns_per_sample",
        "time/step": "timing/train/total_step_time",
        "time/advantages": "timing/train/advantage_calculation",
        "validation/total": "validation/accuracy",
        "validation/mean_length": "validation/avg_length",
    },
    "trl": {
        "loss": "train/loss",
        "grad_norm": "train/grad_norm",
        "lr": "train/learning_rate",
        "reward/total/mean": "train/reward",
        "reward/NAME/mean": "train/rewards/NAME/mean",
        "reward/NAME/std": "train/rewards/NAME/std",
        "policy/reference_kl": "train/kl",
        "policy/entropy": "train/entropy",
        "policy/clip_fraction": "train/clip_ratio/region_mean",
        "policy/clip_low": "train/clip_ratio/low_mean",
        "policy/clip_high": "train/clip_ratio/high_mean",
        "parity/mean_abs": "train/sampling/sampling_logp_difference/mean",
        "parity/max_abs": "train/sampling/sampling_logp_difference/max",
        "rollout/mean_length": "train/completions/mean_length",
        "rollout/truncated": "train/completions/clipped_ratio",
        "time/step": "train/step_time",
        "validation/total": "eval/reward",
        "validation/mean_length": "eval/completions/mean_length",
        "validation/NAME": "eval/rewards/NAME/mean",
    },
}
"""Names of metrics in other programs, by program and by the key in this project."""
_NO_COMPONENTS = ("validation/env_failed",)
"""Keys that match a pattern with NAME but are not names of components."""


def alias_values(row: Mapping[str, Any], programs: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``row`` under the names that ``programs`` use."""
    values = {}
    for program in programs:
        for key, value in row.items():
            if name := _alias(key, program):
                values[name] = value
    return values


def _alias(key: str, program: str) -> str | None:
    table = ALIASES[program]
    if key in table or key in _NO_COMPONENTS:
        return table.get(key)
    for pattern, name in table.items():
        if NAME in pattern and (match := re.fullmatch(re.escape(pattern).replace(NAME, r"([^/]+(?:/\*)?)"), key)):
            return name.replace(NAME, match[1])
    return None
