"""Holds the metrics of a run against thresholds, so that "it learns" is a command with an exit status.

The thresholds are those of the run's own config (``health``), where it has the rewards that they name; otherwise those
that hold for every run. A file may be named instead.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

from omegaconf import OmegaConf
from rich import box
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from gdpo_nemo.config.health_checks import Check, Trail, read_checks
from gdpo_nemo.config.health_presets import preset_checks
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.reading import check_yaml, read_text
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.observe.drift_checks import DRIFTS
from gdpo_nemo.observe.history import WINDOW, History
from gdpo_nemo.observe.metric_registry import metrics, unit_of
from gdpo_nemo.observe.metrics import read_metrics

_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "open": "dim"}


@dataclass(frozen=True)
class Finding:
    """What one check found: pass, fail, warn (an advisory check failed) or open (the run has not got there)."""

    check: Check
    status: str
    value: float | None = None
    detail: str = ""


def load_thresholds(path: str | Path) -> list[Check]:
    """Read a file with ``window`` and ``checks``, as the section ``health`` has them.

    Raises:
        ConfigError: it does not exist or a check is not written as ``Check`` says.
    """
    try:
        text = read_text(path)
        check_yaml(text)
        content: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no text ({error.reason})") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML ({getattr(error, 'problem', None) or error})") from None
    checks = content.get("checks") if isinstance(content, dict) else None
    if not isinstance(checks, list) or not checks:
        raise ConfigError(f"{path}: has no list of checks")
    return read_checks(checks, content.get("window", WINDOW), str(path))


def thresholds_of(run_dir: str | Path) -> tuple[list[Check], str]:
    """The checks that are meant for a run, and where they come from, in words.

    Raises:
        ConfigError: the run's config.yaml cannot be read. RunError: the run has no training rows.
    """
    file = Path(run_dir) / "config.yaml"
    config = load_config(file) if file.is_file() else None
    history = _history(run_dir)
    rewards = {*history.components, *(config.gdpo.rewards if config else ())}
    checks = config_checks(config) if config else []
    strange = dict.fromkeys(
        c.component for c in checks if c.component and c.component not in rewards and not c.optional
    )
    strange.pop("total", None)
    if checks and not strange:
        return checks, "the thresholds of its config (health.checks)"
    why = f"; health.checks of its config is for other rewards ({', '.join(strange)})" if strange else ""
    return general_checks(
        config, list(config.gdpo.rewards) if config else history.components
    ), f"what holds for every run{why}"


def config_checks(config: Config) -> list[Check]:
    """The checks of a config: its preset's, and ``health.checks``, which replace those of the same metric, step and
    kind. Raises ConfigError."""
    health = config.health
    own = read_checks(health.checks, health.window, "health.checks")
    named = {(check.metric, check.at, check.of) for check in own}
    preset = preset_checks(health.preset, list(config.gdpo.rewards)) if health.preset else []
    return [*(check for check in preset if (check.metric, check.at, check.of) not in named), *own]


def general_checks(config: Config | None, rewards: Sequence[str]) -> list[Check]:
    """What a sound run of any model shows: the bounds that metrics have of themselves, those of ``reward/NAME/...``
    for each reward, and how far some may move."""
    precision = config.policy.precision if config else "bfloat16"
    bounds = [
        Check(key, metric.at, *metric.limits(precision), optional=not metric.required, advisory=metric.advisory)
        for metric in metrics().values()
        if metric.judged
        for key in metric.keys(rewards)
    ]
    return [*bounds, *(drift.check for drift in DRIFTS)]


def check_health(run_dir: str | Path, thresholds: str | Path | Sequence[Check]) -> list[Finding]:
    """Hold a run against thresholds (a file of them, or a list).

    Raises:
        RunError: the run has no training rows.
    """
    checks = load_thresholds(thresholds) if isinstance(thresholds, (str, Path)) else thresholds
    history = _history(run_dir)
    return [_find(check, history) for check in checks]


def _history(run_dir: str | Path) -> History:
    history = History.of(read_metrics(run_dir))
    if not history.training:
        raise RunError(f"{run_dir} holds no training steps to check")
    return history


def healthy(findings: Sequence[Finding]) -> bool:
    """No check failed and at least one was passed."""
    states = [finding.status for finding in findings]
    return "fail" not in states and "pass" in states


def findings_table(findings: Sequence[Finding]) -> Table:
    """The findings for the terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("metric", "unit", "at", "accepted", "found", ""):
        # A narrow terminal wraps the other columns: half a metric's name is of no use.
        table.add_column(head, justify="right" if head in ("at", "found") else "left", no_wrap=head == "metric")
    for finding in findings:
        check = finding.check
        found = "-" if finding.value is None else check.found(finding.value) or f"{finding.value:.4g}"
        verdict = Text(
            finding.status + (f": {finding.detail}" if finding.detail else ""), style=_STYLES[finding.status]
        )
        table.add_row(check.metric, unit_of(check.metric), str(check.at), check.bounds, found, verdict)
    return table


def _find(check: Check, history: History) -> Finding:
    steps, values = history.curve(check.metric)
    if not values:
        return Finding(check, "pass" if check.optional else _missed(check), detail="not in the metrics")
    if check.at == "every":
        return _find_every(check, history)
    if isinstance(check.at, int) and history.training[-1]["step"] < check.at:
        return Finding(check, "open", detail="not reached")
    if isinstance(check.at, int):
        value = history.at(check.metric, check.at, check.window)
    else:
        value = {"start": values[0], "end": history.last(check.metric, check.window)}.get(check.at)
    if value is None:
        return Finding(check, _missed(check), detail="not measured there")
    if check.accepts(value):
        return Finding(check, "pass", value)
    if check.component and check.metric.endswith("/dead_groups") and history.solved(check.component, check.window):
        return Finding(check, "pass", value, "constant at the best it has been: solved")
    return Finding(check, _missed(check), value)


def _find_every(check: Check, history: History) -> Finding:
    """Show the first value that misses, else the last. A gap in the metric is a miss: non-finite values are not
    written."""
    if check.of != "value":
        return _find_drift(check, history)
    gaps = [row["step"] for row in history.training if check.metric not in row]
    if gaps and not check.optional:
        return Finding(check, _missed(check), detail=f"missing or not finite at step {gaps[0]}")
    steps, values = history.trailing(check.metric, check.window)
    full = min(check.window, len(values)) - 1
    for step, value in list(zip(steps, values))[full:]:
        if not check.accepts(value):
            return Finding(check, _missed(check), value, f"at step {step}")
    return Finding(check, "pass", values[-1])


def _find_drift(check: Check, history: History) -> Finding:
    trail = Trail(check)
    judged = [(step, trail.add(value)) for step, value in zip(*history.curve(check.metric))]
    found = [(step, value) for step, value in judged if value is not None]
    for step, value in found:
        if not check.accepts(value):
            return Finding(check, _missed(check), value, f"at step {step}")
    return Finding(check, "pass", found[-1][1]) if found else Finding(check, "open", detail="too few steps")


def _missed(check: Check) -> str:
    return "warn" if check.advisory else "fail"
