"""Holds the metrics of a run against thresholds from a YAML file, so that "it learns" is a command with an exit status.

A threshold file has ``window`` (steps in a trailing mean) and ``checks``, each a ``metric`` with ``min`` and/or ``max`` and

* ``at``: a step number (the trailing mean that ends there), ``start`` (the first row alone), ``end`` (the last trailing
  mean) or ``every`` (the trailing mean at every step, once the window is full);
* ``window``: another window for this check; 1 takes single steps;
* ``optional: true``: a run that never reports the metric passes;
* ``advisory: true``: a miss is a warning.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Sequence

from omegaconf import OmegaConf
from rich import box
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.observe.history import WINDOW, History
from gdpo_nemo.observe.metrics import read_metrics

_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "open": "dim"}


@dataclass(frozen=True)
class Check:
    """One threshold."""

    metric: str
    at: int | str
    min: float | None = None
    max: float | None = None
    window: int = WINDOW
    optional: bool = False
    advisory: bool = False

    @property
    def bounds(self) -> str:
        """The accepted range in words."""
        if self.max is None:
            return f"at least {self.min:g}"
        return f"at most {self.max:g}" if self.min is None else f"{self.min:g} to {self.max:g}"

    def accepts(self, value: float) -> bool:
        """Whether ``value`` lies in the range."""
        return (self.min is None or value >= self.min) and (self.max is None or value <= self.max)


@dataclass(frozen=True)
class Finding:
    """What one check found: pass, fail, warn (an advisory check failed) or open (the run has not got there)."""

    check: Check
    status: str
    value: float | None = None
    detail: str = ""


def load_thresholds(path: str | Path) -> list[Check]:
    """Reads a threshold file.

    Raises:
        ConfigError: it does not exist or a check is not written as described above.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text ({error.reason})") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML ({getattr(error, 'problem', None) or error})") from None
    checks = content.get("checks") if isinstance(content, dict) else None
    if not isinstance(checks, list) or not checks:
        raise ConfigError(f"{path}: has no list of checks")
    return [_read_check(item, content.get("window", WINDOW), f"{path}: check {n}") for n, item in enumerate(checks, 1)]


def check_health(run_dir: str | Path, thresholds: str | Path | Sequence[Check]) -> list[Finding]:
    """Holds a run against thresholds (a file of them, or a list).

    Raises:
        RunError: the run has no training rows.
    """
    checks = load_thresholds(thresholds) if isinstance(thresholds, (str, Path)) else thresholds
    history = History.of(read_metrics(run_dir))
    if not history.training:
        raise RunError(f"{run_dir} holds no training steps to check")
    return [_find(check, history) for check in checks]


def healthy(findings: Sequence[Finding]) -> bool:
    """No check failed and at least one was passed."""
    states = [finding.status for finding in findings]
    return "fail" not in states and "pass" in states


def findings_table(findings: Sequence[Finding], title: str) -> Table:
    """The findings for the terminal."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("metric", "at", "accepted", "found", ""):
        table.add_column(head, justify="right" if head in ("at", "found") else "left")
    for finding in findings:
        check = finding.check
        found = "-" if finding.value is None else f"{finding.value:.4g}"
        verdict = Text(finding.status + (f": {finding.detail}" if finding.detail else ""), style=_STYLES[finding.status])
        table.add_row(check.metric, str(check.at), check.bounds, found, verdict)
    return table


def _read_check(item: Any, window: int, where: str) -> Check:
    names = [f.name for f in fields(Check)]
    if not isinstance(item, dict) or not {"metric", "at"} <= set(item) <= set(names):
        raise ConfigError(f"{where}: expected metric, at and some of {', '.join(names[2:])}")
    check = Check(**{"window": window, **item})
    numbers = [value for value in (check.min, check.max) if value is not None]
    if not numbers or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers):
        raise ConfigError(f"{where}: needs min or max, as numbers")
    if check.at not in ("start", "end", "every") and (isinstance(check.at, bool) or not isinstance(check.at, int)):
        raise ConfigError(f"{where}: at is a step number, start, end or every, got {check.at!r}")
    if not isinstance(check.window, int) or check.window < 1:
        raise ConfigError(f"{where}: window must be at least 1")
    return check


def _find(check: Check, history: History) -> Finding:
    steps, values = history.curve(check.metric)
    if not values:
        return Finding(check, "pass" if check.optional else _missed(check), detail="not in the metrics")
    if check.at == "every":
        return _find_every(check, history)
    if isinstance(check.at, int) and history.training[-1]["step"] < check.at:
        return Finding(check, "open", detail="not reached")
    value = {"start": values[0], "end": history.last(check.metric, check.window)}.get(check.at)
    value = history.at(check.metric, check.at, check.window) if isinstance(check.at, int) else value
    if value is None:
        return Finding(check, _missed(check), detail="not measured there")
    return Finding(check, "pass" if check.accepts(value) else _missed(check), value)


def _find_every(check: Check, history: History) -> Finding:
    """Shows the first value that misses, else the last. A gap in the metric is a miss: non-finite values are not written."""
    gaps = [row["step"] for row in history.training if check.metric not in row]
    if gaps:
        return Finding(check, _missed(check), detail=f"missing or not finite at step {gaps[0]}")
    steps, values = history.trailing(check.metric, check.window)
    full = min(check.window, len(values)) - 1
    for step, value in list(zip(steps, values))[full:]:
        if not check.accepts(value):
            return Finding(check, _missed(check), value, f"at step {step}")
    return Finding(check, "pass", values[-1])


def _missed(check: Check) -> str:
    return "warn" if check.advisory else "fail"
