"""One threshold on a metric, how its value comes about, and the reading of a list of them: the section ``health``, or a
file of the same form."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, fields
from typing import Any, Sequence

from gdpo_nemo.errors import ConfigError

BEFORE = 20
"""Steps that a check ``of: before`` compares with."""
_FEWEST = 10
"""Of them that there must be: a median of fewer says little."""
OF = {
    "value": ("", ""),
    "start": ("{:.4g} times its start", "{} times the start"),
    "before": ("{:.4g} times what it was", f"{{}} times the median of the {BEFORE} steps before"),
    "rise": ("{:+.4g} standard errors from its start", "a rise of {} standard errors"),
}
"""What a check may hold against its bounds, with the words for what is found and for the bounds."""


@dataclass(frozen=True)
class Check:
    """``metric`` with ``min`` and/or ``max`` at some point of a run."""

    metric: str
    at: int | str
    """A step (the trailing mean that ends there), ``start`` (the first row alone), ``end`` (the last trailing mean) or
    ``every`` (the trailing mean at every step, once the window is full)."""
    min: float | None = None
    max: float | None = None
    window: int = 5
    """Steps in the trailing mean; 1 takes single steps."""
    optional: bool = False
    """A run that never reports the metric passes, and steps that lack it are passed over."""
    advisory: bool = False
    """A miss is a warning."""
    of: str = "value"
    """What is judged: the trailing mean itself (``value``); how many times that of the first window it is (``start``);
    how many times the median of the ``BEFORE`` steps before the window (``before``); or by how many standard errors it
    is above the mean of the first window (``rise``; of two windows without overlap, whose steps count as
    independent)."""

    @property
    def bounds(self) -> str:
        """The accepted range in words."""
        if self.max is None:
            return OF[self.of][1].format(f"at least {self.min:g}") or f"at least {self.min:g}"
        limits = f"at most {self.max:g}" if self.min is None else f"{self.min:g} to {self.max:g}"
        return OF[self.of][1].format(limits) or limits

    def found(self, value: float) -> str:
        """A judged value in words; empty where it is the metric's own."""
        return OF[self.of][0].format(value)

    def accepts(self, value: float) -> bool:
        """Whether ``value`` lies in the range."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def component(self) -> str | None:
        """The reward component that the metric measures; None where it measures something else."""
        parts = self.metric.split("/")
        return "/".join(parts[1:-1]) if parts[0] == "reward" and len(parts) > 2 else None


class Trail:
    """The values of a check's metric, step by step, and what it makes of them."""

    def __init__(self, check: Check):
        self._check = check
        self._window: deque[float] = deque(maxlen=check.window)
        self._first: list[float] = []
        self._earlier: deque[float] = deque(maxlen=BEFORE)
        self._count = 0

    def add(self, value: float) -> float | None:
        """Take in the next step's value; return what is judged now, None where there is too little to go by."""
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
    return gain / error if error else math.copysign(math.inf, gain) if gain else 0.0


def read_checks(items: Sequence[Any], window: int, where: str) -> list[Check]:
    """Checks from their YAML; ``where`` names the list in messages. Raises ConfigError for one that is not written as
    in ``Check``."""
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigError(f"{where}: window must be at least 1")
    return [_read_check(item, window, f"{where}: check {number}") for number, item in enumerate(items, 1)]


def _read_check(item: Any, window: int, where: str) -> Check:
    names = [f.name for f in fields(Check)]
    if not isinstance(item, dict) or not {"metric", "at"} <= set(item) <= set(names):
        raise ConfigError(f"{where}: expected metric, at and some of {', '.join(names[2:])}")
    check = Check(**{"window": window, **item})
    numbers = [value for value in (check.min, check.max) if value is not None]
    if not numbers or not all(isinstance(v, (int, float)) and not isinstance(v, bool) and v == v for v in numbers):
        raise ConfigError(f"{where}: needs min or max, as numbers")
    if not isinstance(check.metric, str):
        raise ConfigError(f"{where}: metric is the name of a metric, got {check.metric!r}")
    if check.at not in ("start", "end", "every") and (isinstance(check.at, bool) or not isinstance(check.at, int)):
        raise ConfigError(f"{where}: at is a step number, start, end or every, got {check.at!r}")
    if isinstance(check.window, bool) or not isinstance(check.window, int) or check.window < 1:
        raise ConfigError(f"{where}: window must be at least 1")
    _check_of(check, where)
    return check


def _check_of(check: Check, where: str) -> None:
    if check.of not in OF:
        raise ConfigError(f"{where}: of is one of {', '.join(OF)}, got {check.of!r}")
    if check.of != "value" and check.at != "every":
        raise ConfigError(f"{where}: of: {check.of} is judged at every step, so it needs at: every")
    if check.of == "rise" and check.window < 2:
        raise ConfigError(f"{where}: of: rise needs a window of at least 2 steps")
