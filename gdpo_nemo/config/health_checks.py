"""One threshold on a metric, and the reading of a list of them: the section ``health``, or a file of the same form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Sequence

from gdpo_nemo.errors import ConfigError


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

    @property
    def bounds(self) -> str:
        """The accepted range in words."""
        if self.max is None:
            return f"at least {self.min:g}"
        return f"at most {self.max:g}" if self.min is None else f"{self.min:g} to {self.max:g}"

    def accepts(self, value: float) -> bool:
        """Whether ``value`` lies in the range."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)

    @property
    def component(self) -> str | None:
        """The reward component that the metric measures; None where it measures something else."""
        parts = self.metric.split("/")
        return "/".join(parts[1:-1]) if parts[0] == "reward" and len(parts) > 2 else None


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
    return check
