"""Comparison of several runs: their settings, results after equal effort, and significance of the differences.

Runs whose settings differ only in the seed form one variant. Curves are trailing means over ``metrics.WINDOW`` steps.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdpo_nemo.config.schema import Config
from gdpo_nemo.observe.metrics import WINDOW, History, read_metrics
from gdpo_nemo.observe.run_files import read_run_config
from gdpo_nemo.utils.errors import ConfigError, RunError
from gdpo_nemo.utils.files import real_path

AXES = {"steps": "optimizer steps", "samples": "trained samples", "time": "seconds of training"}
"""Measures of training effort on the x axis, with their units."""
_IGNORED_SECTIONS = ("run.", "logger.", "checkpointing.", "health.")
"""Config sections that do not affect training."""
_LABEL = 48
"""Maximum length of a label that lists settings, in characters."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """Config and history of a run folder."""

    folder: Path
    settings: Settings
    """Flattened config: ``section.key`` -> value."""
    history: History

    @classmethod
    def read(cls, folder: str | Path) -> RunRecord:
        """Read a run, finished or not.

        Raises:
            ConfigError: if the folder has no readable config.
            RunError: if the run has no training steps.
        """
        folder = Path(folder)
        config = read_run_config(folder)
        history = History.of(read_metrics(folder))
        if not history.training:
            raise RunError(f"{folder}: no training steps to compare")
        # A config of an older version may lack a key, for which that version used the current default.
        return cls(folder, dict(_flat(asdict(Config()))) | dict(_flat(config)), history)

    @property
    def seed(self) -> Any:
        """Value of ``run.seed``."""
        return self.settings.get("run.seed")

    def effort(self, axis: str, steps: Sequence[int]) -> np.ndarray:
        """Return the total effort of the run after each step in ``steps``: float [steps]."""
        if axis == "steps":
            return np.asarray(steps, float)
        if axis == "samples":
            prompts = self.settings.get("gdpo.num_prompts_per_step")
            generations = self.settings.get("gdpo.num_generations_per_prompt")
            if not (isinstance(prompts, int) and isinstance(generations, int)):
                raise ConfigError(f"{self.folder}/config.yaml: the number of samples per step is not specified")
            return np.asarray(steps, float) * prompts * generations
        spent = {row["step"]: row.get("time/step", 0.0) for row in self.history.training}
        ends = dict(zip(spent, itertools.accumulate(spent.values())))
        return np.array([ends.get(step, 0.0) for step in steps], float)

    def curve(self, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (training effort, trailing mean) of a metric. The arrays are empty if the metric was not measured."""
        steps, values = self.history.trailing(metric, _window(metric))
        return self.effort(axis, steps), np.asarray(values, float)


def _window(metric: str) -> int:
    """Return the number of steps of a trailing mean. Validations are rare, so each one counts by itself."""
    return 1 if metric.startswith("validation/") else WINDOW


@dataclass(frozen=True)
class Variant:
    """Runs that differ only in their seed, sorted by seed."""

    label: str
    runs: tuple[RunRecord, ...]
    settings: Settings
    """This variant's values of the settings that differ between variants."""


@dataclass(frozen=True)
class Gap:
    """Difference of a metric between a variant and the baseline, for each seed."""

    variant: str
    metric: str
    seeds: tuple[Any, ...]
    at_end: np.ndarray
    """float [seeds]: differences of the trailing means after an equal number of steps."""
    over_run: np.ndarray
    """float [seeds]: differences of the means over the same number of steps."""


def _flat(section: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten a section to dotted keys. Lists are not flattened."""
    found: list[tuple[str, Any]] = []
    for key, value in section.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def differences(runs: Sequence[RunRecord], ignored: Sequence[str] = ()) -> list[str]:
    """Return the keys whose values differ between runs.

    Keys that do not affect training or that depend on the seed are excluded.

    Args:
        ignored: additional keys to ignore, or sections with a trailing dot.
    """
    excluded = tuple(key for key in ignored if key.endswith(".")) + _IGNORED_SECTIONS
    keys = dict.fromkeys(key for run in runs for key in run.settings if not key.startswith(excluded))
    seeds = [repr(run.seed) for run in runs]
    seed_repeats = len(set(seeds)) < len(seeds)
    found = []
    for key in keys:
        values = _values(runs, key)
        # True if the value depends only on the seed, which cannot be determined if each seed has only one run.
        with_seed = seed_repeats and len(set(zip(seeds, values))) == len(set(seeds))
        if len(set(values)) > 1 and not with_seed and key not in ignored:
            found.append(key)
    return found


def _values(runs: Sequence[RunRecord], key: str) -> list[str]:
    """Return the value of a key for each run.

    A path that contains the seed, such as ``models/small_42``, counts as equal for all seeds.
    """
    exact, masked = [], []
    for run in runs:
        value = run.settings.get(key)
        exact.append(repr(value))
        if isinstance(value, str):
            value = value.replace(str(run.seed), "${run.seed}")
        masked.append(repr(value))
    # Masking replaces too much if the seed is 0, because many paths contain this digit.
    return masked if len(set(masked)) < len(set(exact)) else exact


def variants_of(runs: Sequence[RunRecord], ignored: Sequence[str] = ()) -> list[Variant]:
    """Group runs by their settings, in the order of ``runs``. A folder that is specified twice is used only once.

    If two runs of a group have the same seed, each run becomes a separate variant.
    """
    runs = list({real_path(run.folder): run for run in runs}.values())
    keys = differences(runs, ignored)
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run, *values in zip(runs, *(_values(runs, key) for key in keys)):
        groups.setdefault(tuple(values), []).append(run)
    members = list(groups.values())
    if any(len(set(map(_seed, group))) < len(group) for group in members):
        members = [[run] for run in runs]
    variants = []
    for label, group in zip(_labels(members, keys), members):
        settings = {key: group[0].settings.get(key) for key in keys}
        variants.append(Variant(label, tuple(sorted(group, key=_seed)), settings))
    return variants


def _seed(run: RunRecord) -> str:
    return repr(run.seed)


def _labels(groups: Sequence[Sequence[RunRecord]], keys: Sequence[str]) -> list[str]:
    """Return a distinct label for each variant.

    Labels are the settings if they are short and distinct, otherwise the common prefixes of folder names, otherwise the
    folders.
    """
    settings, names = [], []
    for group in groups:
        values = [f"{key.split('.')[-1]}={shown(group[0].settings.get(key))}" for key in keys]
        settings.append(", ".join(values))
        names.append(_common_name([real_path(run.folder).name for run in group]))
    for labels in (settings, names):
        if len(set(labels)) == len(labels) and all(0 < len(label) <= _LABEL for label in labels):
            return labels
    return [str(group[0].folder) for group in groups]


def _common_name(names: Sequence[str]) -> str:
    """Return the common prefix of names, without partial numbers, for example ``gdpo`` for gdpo_42 and gdpo_43."""
    prefix = os.path.commonprefix(names)
    if any(name[len(prefix) : len(prefix) + 1].isdigit() for name in names):
        prefix = prefix.rstrip("0123456789")
    return prefix.rstrip("_-. ")


def shown(value: Any) -> str:
    """Format the value of a setting."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def components(variants: Sequence[Variant]) -> list[str]:
    """Return the metric keys of all reward components in any run, in order of first appearance."""
    metrics: dict[str, None] = {}
    for run in all_runs(variants):
        metrics |= dict.fromkeys(f"reward/{name}/mean" for name in run.history.components)
    return list(metrics)


def all_runs(variants: Iterable[Variant]) -> Iterator[RunRecord]:
    """Yield the runs of all variants."""
    for variant in variants:
        yield from variant.runs


def common_effort(variants: Sequence[Variant], axis: str) -> float:
    """Return the largest effort that all runs have reached."""
    ends = []
    for run in all_runs(variants):
        last = run.history.training[-1]["step"]
        ends.append(float(run.effort(axis, [last])[0]))
    return min(ends)


def values_at(variant: Variant, metric: str, axis: str, effort: float) -> np.ndarray:
    """Return the trailing mean of a metric for each run after ``effort``: float [runs].

    The mean is taken at the last step that finished within this effort. The result is NaN if no step finished within
    this effort.
    """
    found = []
    for run in variant.runs:
        spent, values = run.curve(metric, axis)
        reached_values = values[spent <= effort * (1 + 1e-9)]
        found.append(reached_values[-1] if len(reached_values) else np.nan)
    return np.array(found)


def steps_to(variant: Variant, metric: str, goal: float, last_step: float) -> np.ndarray:
    """Return the first step at which the full-window trailing mean reaches ``goal``: float [runs].

    The value is ``last_step`` + 1 if the run did not reach the goal by ``last_step``, and NaN without the metric.
    """
    window = _window(metric)
    found = []
    for run in variant.runs:
        steps, values = run.history.trailing(metric, window)
        curve = list(zip(steps, values))[window - 1 :]
        reached = (step for step, value in curve if value >= goal and step <= last_step)
        found.append(next(reached, last_step + 1) if steps else np.nan)
    return np.array(found, float)


def band(variant: Variant, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mean curve of a metric over the runs of a variant, and its standard error.

    Only the range in which all runs with the metric have values is included. The error is 0 for a single run.

    Returns:
        (training effort on the x axis, mean over the runs, standard error). Shape of each array: [points].
    """
    curves = [curve for run in variant.runs if len((curve := run.curve(metric, axis))[0])]
    if not curves:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    efforts = [effort for effort, _ in curves]
    grid = np.unique(np.concatenate(efforts))
    grid = grid[(grid >= max(x[0] for x in efforts)) & (grid <= min(x[-1] for x in efforts))]
    rows = np.stack([np.interp(grid, *curve) for curve in curves])
    return grid, rows.mean(axis=0), np.nan_to_num(standard_error(rows))


def standard_error(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over axis 0, or NaN for a single run."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    spread: np.ndarray = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return spread


def gaps(variants: Sequence[Variant], metrics: Sequence[str]) -> list[Gap]:
    """Compare each variant with the first variant after an equal number of steps, separately for each common seed."""
    effort = common_effort(variants, "steps")
    baseline, *others = variants
    baseline_runs = {repr(run.seed): run for run in baseline.runs}
    found = []
    for variant, metric in itertools.product(others, metrics):
        gaps_of_seeds, seeds = [], []
        for run in variant.runs:
            if repr(run.seed) in baseline_runs:
                other = baseline_runs[repr(run.seed)]
                gap = _end_and_mean(run, metric, effort) - _end_and_mean(other, metric, effort)
                if not np.isnan(gap).any():
                    gaps_of_seeds.append(gap)
                    seeds.append(run.seed)
        if seeds:
            at_end, over_run = np.transpose(gaps_of_seeds)
            found.append(Gap(variant.label, metric, tuple(seeds), at_end, over_run))
    return found


def _end_and_mean(run: RunRecord, metric: str, steps: float) -> np.ndarray:
    """Return (mean of the last values, mean) of a metric until ``steps``. Both are NaN without values."""
    values = [value for step, value in zip(*run.history.curve(metric)) if step <= steps]
    if not values:
        return np.full(2, np.nan)
    return np.array([np.mean(values[-_window(metric) :]), np.mean(values)])


def sign_flip_p(gap: np.ndarray) -> float:
    """Return the p-value of the exact two-sided paired randomization test.

    The p-value is the probability that random signs of the seeds' differences give a mean at least as far from 0 as the
    observed one. With n seeds, the p-value is at least 2 / 2**n. The p-value of a single seed is NaN. Only the first 16
    seeds are used.
    """
    gap = gap[:16]
    if len(gap) < 2:
        return float("nan")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(gap))))
    means = np.abs(signs @ gap)
    return float(np.mean(means >= abs(gap.sum()) - 1e-12 * np.abs(gap).sum()))
