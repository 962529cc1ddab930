"""Health checks of a run: bounds and drifts of metrics.

Findings are reported after a run, and as alerts during the run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich import box
from rich.table import Table
from rich.text import Text
from yaml import YAMLError

from gdpo_nemo.algorithms.component_weights import directions
from gdpo_nemo.config.health import Check, Trail, preset_checks, read_checks
from gdpo_nemo.config.load import load_config
from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metric_registry import find_metric, metrics, unit_of
from gdpo_nemo.observe.metrics import WINDOW, History, read_metrics
from gdpo_nemo.utils.errors import ConfigError, NumericsFailed, RunError
from gdpo_nemo.utils.files import check_yaml, read_text

_STYLES = {"pass": "green", "fail": "bold red", "warn": "yellow", "open": "dim", "skip": "dim"}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    ``status`` is pass, fail, warn (an advisory check failed), open (the run has not reached the step) or skip (the run
    does not measure an optional metric).
    """

    check: Check
    status: str
    value: float | None = None
    detail: str = ""


def load_thresholds(path: str | Path) -> list[Check]:
    """Read a thresholds file with ``window`` and ``checks``, in the format of the config section ``health``.

    Raises:
        ConfigError: if the file cannot be read or a check is invalid.
    """
    try:
        text = read_text(path)
        check_yaml(text)
        content: Any = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file ({error.reason})") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: invalid YAML ({getattr(error, 'problem', None) or error})") from None
    checks = content.get("checks") if isinstance(content, dict) else None
    if not isinstance(checks, list) or not checks:
        raise ConfigError(f"{path}: must contain a list of checks")
    return read_checks(checks, content.get("window", WINDOW), str(path))


def thresholds_of(run_dir: str | Path) -> tuple[list[Check], str]:
    """Return the checks that apply to a run, and a description of their origin.

    Raises:
        ConfigError: if the run's config.yaml cannot be read.
        RunError: if the run has no training rows.
    """
    file = Path(run_dir) / "config.yaml"
    config = load_config(file) if file.is_file() else None
    history = _history(run_dir)
    rewards = {*history.components, *(config.gdpo.rewards if config else ())}
    own = config_checks(config) if config else []
    unknown = dict.fromkeys(c.component for c in own if c.component and c.component not in rewards and not c.optional)
    unknown.pop("total", None)
    if unknown:
        own = []
    measured = set[str]().union(*history.training)
    defaults = _default_checks(config, list(config.gdpo.rewards) if config else history.components, own)
    checks = [*own, *(check for check in defaults if not check.optional or check.metric in measured)]
    if unknown:
        return checks, f"the default checks; health.checks in its config names other rewards ({', '.join(unknown)})"
    return checks, "health.checks in its config and the default checks" if own else "the default checks"


def config_checks(config: Config) -> list[Check]:
    """Return the checks in a config, from ``health.preset`` and ``health.checks``.

    An entry of ``health.checks`` replaces the preset's check of the same metric, step and kind.

    Raises:
        ConfigError: if a check is invalid.
    """
    health = config.health
    checks = read_checks(health.checks, health.window, "health.checks")
    gdpo = config.gdpo
    better = directions(gdpo.rewards, gdpo.constraints, gdpo.schedules)
    rewards = [name for name, direction in better.items() if direction > 0]  # the presets bound rewards from below
    preset = preset_checks(health.preset, rewards) if health.preset else []
    return [*_without_replaced(preset, checks), *checks]


def _without_replaced(checks: Iterable[Check], own: Iterable[Check]) -> list[Check]:
    """Return ``checks`` without those of the same metric, step and kind as a check in ``own``."""
    replaced = {(check.metric, check.at, check.of) for check in own}
    return [check for check in checks if (check.metric, check.at, check.of) not in replaced]


def general_checks(config: Config | None, rewards: Sequence[str]) -> list[Check]:
    """Return the default checks, which apply to every run.

    These are the registered bounds of the metrics, including ``reward/NAME/...`` for each reward, and ``DRIFTS``.
    """
    precision = config.policy.precision if config else "bfloat16"
    checks = []
    for metric in metrics().values():
        if metric.is_checked:
            least, most = metric.limits(precision)
            for key in metric.keys(rewards):
                check = Check(key, metric.at, least, most, optional=not metric.required, advisory=metric.advisory)
                checks.append(check)
    return [*checks, *(drift.check for drift in DRIFTS)]


def _default_checks(config: Config | None, rewards: Sequence[str], own: Sequence[Check]) -> list[Check]:
    """Return the default checks without those in ``health.disabled`` and those that a check in ``own`` replaces."""
    disabled = config.health.disabled if config else ()
    checks = _without_replaced(general_checks(config, rewards), own)
    return [check for check in checks if check.metric not in disabled]


def check_health(run_dir: str | Path, thresholds: str | Path | Sequence[Check]) -> list[Finding]:
    """Check a run against thresholds, which are the path of a thresholds file or a list of checks.

    Raises:
        RunError: if the run has no training rows.
    """
    checks = load_thresholds(thresholds) if isinstance(thresholds, (str, Path)) else thresholds
    history = _history(run_dir)
    return [_find(check, history) for check in checks]


def _history(run_dir: str | Path) -> History:
    history = History.of(read_metrics(run_dir))
    if not history.training:
        raise RunError(f"{run_dir} has no training steps to check")
    return history


def healthy(findings: Sequence[Finding]) -> bool:
    """Return whether no check failed and at least one check passed."""
    states = [finding.status for finding in findings]
    return "fail" not in states and "pass" in states


def verdict(findings: Sequence[Finding]) -> str:
    """Describe the result in one line, with the metric and the step of each failed check."""
    failed = dict.fromkeys(f"{f.check.metric} {f.detail}".strip() for f in findings if f.status == "fail")
    if failed:
        return f"not healthy: {'; '.join(failed)}"
    return "healthy" if healthy(findings) else "not healthy: no check could be applied"


def findings_table(findings: Sequence[Finding]) -> Table:
    """Format the findings as a table for the terminal."""
    table = Table(box=box.SIMPLE_HEAD)
    for head in ("metric", "unit", "at", "accepted", "found", ""):
        # On a narrow terminal, metric names stay on one line and all other columns are wrapped.
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
        return Finding(check, "skip" if check.optional else _failed_status(check), detail="not in the metrics")
    if check.at == "every":
        return _find_every(check, history)
    if isinstance(check.at, int) and history.training[-1]["step"] < check.at:
        return Finding(check, "open", detail="not reached")
    if isinstance(check.at, int):
        value = history.at(check.metric, check.at, check.window)
    else:
        value = {"start": values[0], "end": history.last(check.metric, check.window)}.get(check.at)
    if value is None:
        return Finding(check, _failed_status(check), detail="not measured at this step")
    if check.accepts(value):
        return Finding(check, "pass", value)
    if check.component and check.metric.endswith("/dead_groups") and history.solved(check.component, check.window):
        return Finding(check, "pass", value, "solved: constant at its best value")
    return Finding(check, _failed_status(check), value, _since(check, steps, values) if check.at == "end" else "")


def _since(check: Check, steps: Sequence[int], values: Sequence[float]) -> str:
    """Describe since which step every value has been outside the bounds. Empty if the last value is inside."""
    first = None
    for step, value in zip(reversed(steps), reversed(values)):
        if check.accepts(value):
            break
        first = step
    return "" if first is None else f"since step {first}"


def _find_every(check: Check, history: History) -> Finding:
    """Apply a check to every step.

    The finding contains the first value that fails, or the last value if all values pass.

    A step without the metric fails a required check, because non-finite values are not written.
    """
    if check.of != "value":
        return _find_drift(check, history)
    gaps = [row["step"] for row in history.training if check.metric not in row]
    if gaps and not check.optional:
        return Finding(check, _failed_status(check), detail=f"missing or not finite at step {gaps[0]}")
    steps, values = history.trailing(check.metric, check.window)
    full = min(check.window, len(values)) - 1
    for step, value in list(zip(steps, values))[full:]:
        if not check.accepts(value):
            return Finding(check, _failed_status(check), value, f"at step {step}")
    return Finding(check, "pass", values[-1])


def _find_drift(check: Check, history: History) -> Finding:
    trail, total = Trail(check), _TotalReward()
    last = None
    for row in (*history.training, *history.validation):
        value = total.value_of(check, row)
        quantity = None if value is None else trail.add(value)
        if quantity is None:
            continue
        if not check.accepts(quantity):
            return Finding(check, _failed_status(check), quantity, f"at step {row['step']}")
        last = quantity
    return Finding(check, "open", detail="too few steps") if last is None else Finding(check, "pass", last)


class _TotalReward:
    """Sum of the changes of ``reward/total/mean`` that do not come from a change of the weights.

    With ``gdpo.schedules`` or ``gdpo.constraints``, the weighted sum also changes if the rewards do not. The sum of
    w_k (mean_k - mean_k of the previous step) with the weights of each step equals the total reward, up to a constant,
    if the weights are constant.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        self._means: dict[str, float] = {}

    def value_of(self, check: Check, row: Mapping[str, Any]) -> float | None:
        """Return the value of a check's metric in a row, or None if the row does not contain it."""
        value = row.get(check.metric)
        if not isinstance(value, (int, float)):
            return None
        weights = {key.removesuffix("/weight"): w for key, w in row.items() if _COMPONENT_WEIGHT.fullmatch(key)}
        if (check.metric, check.of) != ("reward/total/mean", "rise") or not weights:
            return float(value)
        for name, weight in weights.items():
            mean = row.get(f"{name}/mean", self._means.get(name))
            if mean is not None:
                self._sum += weight * (mean - self._means.get(name, 0.0))
                self._means[name] = mean
        return self._sum


_COMPONENT_WEIGHT = re.compile("reward/.+/weight")


def _failed_status(check: Check) -> str:
    return "warn" if check.advisory else "fail"


@dataclass(frozen=True)
class Drift:
    """Check of a drift, with the meaning of a failure (``why``) and a remedy."""

    check: Check
    why: str
    remedy: str


def _warning(metric: str, of: str, window: int, why: str, remedy: str, **bounds: float) -> Drift:
    return Drift(Check(metric, "every", window=window, optional=True, advisory=True, of=of, **bounds), why, remedy)


DRIFTS = (
    # The demo's reward rises by at least 5.5 in 40 steps, even at staleness 4. Without off-policy correction, the
    # reward rises only by 2 at staleness 4.
    _warning(
        "reward/total/mean",
        "rise",
        20,
        "the total reward does not improve",
        "a larger learning rate, easier prompts, more samples per prompt; check the sign and the noise of the rewards",
        min=2.5,
    ),
    _warning(
        "policy/entropy",
        "start",
        5,
        "exploding: samples become noise",
        "a lower learning rate, a smaller loss_fn.entropy_bonus, off_policy corrections",
        max=3.0,
    ),
    # Healthy runs of the demo reach at most 5.2 at staleness 4, if a stale group contributes half of a batch.
    _warning(
        "grad_norm",
        "before",
        1,
        "a spike: one batch outweighs the previous batches",
        "optimizer.clip_grad, a lower learning rate; check the rewards of that step's samples",
        max=10.0,
    ),
    _warning(
        "rollout/mean_length",
        "start",
        5,
        "length drifts: the reward may favor short or long samples",
        "a length rule in gdpo.shaping, loss_fn.aggregation token_mean; check the samples",
        min=0.33,
        max=3.0,
    ),
    _warning(
        "parity/mean_abs",
        "start",
        5,
        "trainer and sampler drift apart as the weights change",
        "gdpo-nemo parity, policy.generation.vllm_cfg.head_dtype float32",
        max=20.0,
    ),
)


def advice(check: Check) -> tuple[str, str]:
    """Return the meaning of a failure of ``check`` and a remedy.

    Both texts are empty if the check is not registered.
    """
    for drift in DRIFTS:
        if (drift.check.metric, drift.check.of) == (check.metric, check.of):
            return drift.why, drift.remedy
    metric = find_metric(check.metric)
    return (metric.why, metric.remedy) if metric and check.of == "value" else ("", "")


_WARNINGS = frozenset(drift.check for drift in DRIFTS)
"""Default checks that never stop a run. A run stops on a drift only if the config contains a check of this drift."""


def live_checks(config: Config) -> list[Check]:
    """Return the checks that apply at every step.

    They are the checks of every step in the config, and the default checks that the config neither replaces nor
    disables.
    """
    own = config_checks(config)
    checks = [*own, *_default_checks(config, list(config.gdpo.rewards), own)]
    return [check for check in checks if check.at == "every"]


class HealthAlerts:
    """Health alerts of one run.

    An alert is repeated only if its metric returns to the accepted range and leaves this range again.

    Args:
        say: function that is called with the text of an alert.
        rows: metric rows of earlier steps.
    """

    def __init__(self, config: Config, say: Callable[[str], None], rows: Sequence[Mapping[str, Any]] = ()):
        self._say = say
        self._config = config
        self._stops = set(config.health.stop_on)
        self._before: Sequence[Mapping[str, Any]] = list(rows)
        self._outside: set[Check] = set()
        self._totals: dict[Check, _TotalReward] = {}

    @cached_property
    def _trails(self) -> dict[Check, Trail]:
        """History of values for each check.

        The histories are created at the first step, because the metric registry must read the source files.
        """
        health = self._config.health
        checks = live_checks(self._config) if health.alerts or self._stops else []
        return {check: Trail(check) for check in checks if health.alerts or self._stops_run(check)}

    def _stops_run(self, check: Check) -> bool:
        return check.metric in self._stops and check not in _WARNINGS

    def update(self, row: Mapping[str, Any]) -> None:
        """Check the row of a training step and report new alerts.

        Raises:
            NumericsFailed: if a metric in ``health.stop_on`` has left its range.
        """
        for earlier in self._before:
            self._outside = set(self._add_row(earlier))
        self._before = ()
        found = self._add_row(row)
        news = [check for check in found if check not in self._outside]
        self._outside = set(found)
        for check in news:
            self._say(_sentence(check, found[check]))
        stopping = [check for check in news if self._stops_run(check)]
        if stopping:
            raise NumericsFailed(f"health.stop_on: {_sentence(stopping[0], found[stopping[0]])}")

    def _add_row(self, row: Mapping[str, Any]) -> dict[Check, float]:
        """Add a row to the histories. Return the failed checks, each with the checked value."""
        missed = {}
        for check, trail in self._trails.items():
            value = self._totals.setdefault(check, _TotalReward()).value_of(check, row)
            if value is not None:
                quantity = trail.add(value)
                if quantity is not None and not check.accepts(quantity):
                    missed[check] = quantity
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


def unknown_disabled(config: Config) -> list[str]:
    """Return the metrics in ``health.disabled`` that have no default check."""
    known = {check.metric for check in general_checks(config, list(config.gdpo.rewards))}
    return [name for name in config.health.disabled if name not in known]


def unknown_stops(config: Config) -> Iterable[str]:
    """Return the metrics in ``health.stop_on`` that have no check at every step."""
    checked = {check.metric for check in live_checks(config) if check not in _WARNINGS}
    return [name for name in config.health.stop_on if name not in checked]
