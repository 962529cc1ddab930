"""Thresholds for metrics (config section ``health``), and published presets of thresholds (``health.preset``)."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from gdpo_nemo.utils.errors import ConfigError

BEFORE = 20
"""Number of steps before the window whose median is the base of a check with ``of: before``."""
_FEWEST = 10
"""Minimum number of steps before the window, because the median of fewer values is unreliable."""
OF = {
    "value": ("", ""),
    "start": ("{:.4g} times the start", "{} times the start"),
    "before": ("{:.4g} times the earlier median", f"{{}} times the median of the previous {BEFORE} steps"),
    "rise": ("{:+.4g} standard errors from the start", "a rise of {} standard errors"),
}
"""Quantities that a check can compare with its bounds. For each quantity, the first text formats the checked value and
the second text formats the bounds."""


@dataclass(frozen=True)
class Check:
    """Bounds for a metric (``min``, ``max`` or both) and the steps at which they apply."""

    metric: str
    at: int | str
    """Steps to check. A number: the trailing mean that ends at this step. ``start``: the first row only. ``end``: the
    last trailing mean. ``every``: the trailing mean at every step that has a full window."""
    min: float | None = None
    max: float | None = None
    window: int = 5
    """Number of steps in the trailing mean; 1 checks single steps."""
    optional: bool = False
    """True if a run without the metric passes the check. Steps without the metric are skipped."""
    advisory: bool = False
    """True if a violation is only a warning."""
    of: str = "value"
    """Quantity to check. ``value``: the trailing mean. ``start``: ratio of the trailing mean to the mean of the first
    window. ``before``: ratio of the trailing mean to the median of the ``BEFORE`` steps before the window. ``rise``:
    difference between the trailing mean and the mean of the first window, in standard errors. For ``rise``, the two
    windows do not overlap, and the steps are treated as independent."""

    @property
    def bounds(self) -> str:
        """Accepted range as text."""
        if self.max is None:
            return OF[self.of][1].format(f"at least {self.min:g}") or f"at least {self.min:g}"
        limits = f"at most {self.max:g}" if self.min is None else f"{self.min:g} to {self.max:g}"
        return OF[self.of][1].format(limits) or limits

    def found(self, value: float) -> str:
        """Describe a checked value for a message. Empty for ``of: value``, because the message already states the
        metric's value."""
        return OF[self.of][0].format(value)

    def accepts(self, value: float) -> bool:
        """Return whether ``value`` is within the bounds."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def component(self) -> str | None:
        """Reward component that the metric belongs to; None if it is not a metric of a component."""
        parts = self.metric.split("/")
        return "/".join(parts[1:-1]) if parts[0] == "reward" and len(parts) > 2 else None


class Trail:
    """Recent values of a check's metric, from which the checked quantity is computed at every step."""

    def __init__(self, check: Check):
        self._check = check
        self._window: deque[float] = deque(maxlen=check.window)
        self._first: list[float] = []
        self._earlier: deque[float] = deque(maxlen=BEFORE)
        self._count = 0

    def add(self, value: float) -> float | None:
        """Add the next step's value, and return the checked quantity. Returns None if there are too few values."""
        check = self._check
        if len(self._window) == check.window:
            self._earlier.append(self._window[0])
        self._window.append(value)
        self._count += 1
        if len(self._first) < check.window:
            self._first.append(value)
        if self._count < (2 * check.window if check.of == "rise" else check.window):
            return None
        mean = sum(self._window) / check.window
        if check.of == "start":
            return _ratio(mean, sum(self._first) / check.window)
        if check.of == "before":
            return _ratio(mean, statistics.median(self._earlier)) if len(self._earlier) >= _FEWEST else None
        return _rise(self._first, self._window) if check.of == "rise" else mean


def _ratio(value: float, base: float) -> float | None:
    return value / base if base > 0 else None


def _rise(first: Sequence[float], last: Sequence[float]) -> float:
    gain = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / len(first))
    if error:
        return gain / error
    return math.copysign(math.inf, gain) if gain else 0.0


def read_checks(items: Sequence[Any], window: int, where: str) -> list[Check]:
    """Parse checks from YAML values.

    Args:
        window: default for the window of a check, in steps.
        where: name of the list, for messages.

    Raises:
        ConfigError: if a value is not a valid ``Check``.
    """
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(f"{where}: window must be at least 1")
    return [_read_check(item, window, f"{where}: check {number}") for number, item in enumerate(items, 1)]


def _read_check(item: Any, window: int, where: str) -> Check:
    names = [f.name for f in fields(Check)]
    if not isinstance(item, dict) or not {"metric", "at"} <= set(item) <= set(names):
        raise ConfigError(f"{where}: expected the keys metric and at; optional keys: {', '.join(names[2:])}")
    check = Check(**{"window": window, **item})
    numbers = [value for value in (check.min, check.max) if value is not None]
    if not numbers or not all(isinstance(v, (int, float)) and not isinstance(v, bool) and v == v for v in numbers):
        raise ConfigError(f"{where}: requires min or max as a number")
    if not isinstance(check.metric, str):
        raise ConfigError(f"{where}: metric must be the name of a metric, got {check.metric!r}")
    if check.at not in ("start", "end", "every") and (isinstance(check.at, bool) or not isinstance(check.at, int)):
        raise ConfigError(f"{where}: at must be a step number, start, end or every, got {check.at!r}")
    if isinstance(check.window, bool) or not isinstance(check.window, int) or check.window < 1:
        raise ConfigError(f"{where}: window must be at least 1")
    _check_of(check, where)
    return check


def _check_of(check: Check, where: str) -> None:
    if check.of not in OF:
        raise ConfigError(f"{where}: of must be one of {', '.join(OF)}, got {check.of!r}")
    if check.of != "value" and check.at != "every":
        raise ConfigError(f"{where}: of: {check.of} requires at: every")
    if check.of == "rise" and check.window < 2:
        raise ConfigError(f"{where}: of: rise requires a window of at least 2 steps")


_AXOLOTL: tuple[dict[str, Any], ...] = (
    {"metric": "reward/NAME/mean", "at": 20, "min": 0.15},
    {"metric": "advantage/dead_groups", "at": "every", "max": 0.999},
    {"metric": "policy/entropy", "at": "every", "min": 0.01},
    {"metric": "grad_norm", "at": "every", "max": 10.0},
    {"metric": "policy/entropy", "at": "end", "min": 0.05, "max": 0.5, "advisory": True},
    {"metric": "grad_norm", "at": "end", "min": 0.001, "max": 1.0, "advisory": True},
)
"""Guidelines from Axolotl's GRPO documentation (docs/grpo.qmd and its agent reference). The reward is above 0.15 within
20 steps, and rewards vary on most steps. The entropy is 0.05 to 0.5 (below 0.01: collapsed), and the gradient norm is
0.001 to 1 (above 10: unstable). The reward threshold assumes rewards from 0 to 1."""
PRESETS = {"axolotl": _AXOLOTL}
_WINDOW = 5


def preset_checks(name: str, rewards: Sequence[str]) -> list[Check]:
    """Return the checks of a preset. A check of ``reward/NAME/...`` is repeated for each name in ``rewards``."""
    items: list[dict[str, Any]] = []
    for item in PRESETS[name]:
        metric = item["metric"]
        names = [metric.replace("NAME", reward) for reward in rewards] if "NAME" in metric else [metric]
        items += [{**item, "metric": metric} for metric in names]
    return read_checks(items, _WINDOW, f"health.preset: {name}")
