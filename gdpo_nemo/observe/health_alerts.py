"""The bounds of ``health`` while a run goes on: an alert where a metric leaves its range, with what that means and what
to try, and the end of the run where ``health.stop_on`` asks for it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Callable, Iterable, Mapping, Sequence

from gdpo_nemo.config.health_checks import Check, Trail
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import NumericsFailed
from gdpo_nemo.observe.drift_checks import DRIFTS, advice
from gdpo_nemo.observe.health_findings import config_checks, general_checks
from gdpo_nemo.observe.metric_registry import unit_of

_WARNINGS = frozenset(drift.check for drift in DRIFTS)
"""What ends no run: to stop on a drift, a config has a check of it of its own."""


def live_checks(config: Config) -> list[Check]:
    """What can be judged at every step: the config's own checks of that kind, and the bounds that metrics have of
    themselves where the config says nothing else about them."""
    own = config_checks(config)
    named = {(check.metric, check.of) for check in own}
    general = [c for c in general_checks(config, list(config.gdpo.rewards)) if (c.metric, c.of) not in named]
    return [check for check in (*own, *general) if check.at == "every"]


class HealthAlerts:
    """Follows the metrics of one run. An alert is repeated only after its metric was in the range again.

    Args:
        say: takes the sentence of an alert.
        rows: what the run recorded before.
    """

    def __init__(self, config: Config, say: Callable[[str], None], rows: Sequence[Mapping[str, Any]] = ()):
        self._say = say
        self._config = config
        self._stops = set(config.health.stop_on)
        self._before: Sequence[Mapping[str, Any]] = list(rows)
        self._outside: set[Check] = set()

    @cached_property
    def _trails(self) -> dict[Check, Trail]:
        """What every check has seen. At the first step, not at the start: to know all metrics takes reading the
        sources."""
        health = self._config.health
        checks = live_checks(self._config) if health.alerts or self._stops else []
        return {check: Trail(check) for check in checks if health.alerts or self._ends_the_run(check)}

    def _ends_the_run(self, check: Check) -> bool:
        return check.metric in self._stops and check not in _WARNINGS

    def update(self, row: Mapping[str, Any]) -> None:
        """Take in a recorded training step.

        Raises:
            NumericsFailed: a metric of ``health.stop_on`` has left its range.
        """
        for earlier in self._before:
            self._outside = set(self._take(earlier))
        self._before = ()
        found = self._take(row)
        news = [check for check in found if check not in self._outside]
        self._outside = set(found)
        for check in news:
            self._say(_sentence(check, found[check]))
        stopping = [check for check in news if self._ends_the_run(check)]
        if stopping:
            raise NumericsFailed(f"health.stop_on: {_sentence(stopping[0], found[stopping[0]])}")

    def _take(self, row: Mapping[str, Any]) -> dict[Check, float]:
        """The checks that the row misses, with the means that do."""
        missed = {}
        for check, trail in self._trails.items():
            value = row.get(check.metric)
            if isinstance(value, (int, float)):
                judged = trail.add(float(value))
                if judged is not None and not check.accepts(judged):
                    missed[check] = judged
        return missed


def _sentence(check: Check, value: float) -> str:
    unit = unit_of(check.metric)
    plain = f"{value:.4g}{f' {unit}' if unit and unit != 'share' else ''}"
    line = f"{check.metric} is {check.found(value) or plain}"
    line += f" over {check.window} steps" if check.window > 1 else ""
    line += f", accepted: {check.bounds}"
    why, remedy = advice(check)
    line += f" ({why})" if why else ""
    return f"{line}; try {remedy}" if remedy else line


def unknown_stops(config: Config) -> Iterable[str]:
    """Metrics of ``health.stop_on`` for which no step is ever judged."""
    judged = {check.metric for check in live_checks(config) if check not in _WARNINGS}
    return [name for name in config.health.stop_on if name not in judged]
