"""Several runs side by side: which settings tell them apart, where each stood after equal effort, and whether the
differences are more than seeds make.

Runs whose settings differ in the seed alone are one variant. Curves are trailing means of ``history.WINDOW`` steps.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping, Sequence

import numpy as np

from gdpo_nemo.config.reading import real_path
from gdpo_nemo.config.schema import Config
from gdpo_nemo.errors import ConfigError, RunError
from gdpo_nemo.observe.history import WINDOW, History
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.run_files import read_run_config

AXES = {"steps": "optimizer steps", "samples": "trained samples", "time": "seconds of training"}
"""What effort is measured in."""
_NO_VARIANT = ("run.", "logger.", "checkpointing.")
"""Settings that leave what is trained as it is."""
_LABEL = 48
"""Characters of a label that lists settings."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """What a run folder says."""

    folder: Path
    settings: Settings
    """The config, flat: ``section.key`` -> value."""
    history: History

    @classmethod
    def read(cls, folder: str | Path) -> RunRecord:
        """Read a run, finished or not.

        Raises:
            ConfigError: the folder holds no config that can be read. RunError: it holds no training steps.
        """
        folder = Path(folder)
        config = read_run_config(folder)
        history = History.of(read_metrics(folder))
        if not history.training:
            raise RunError(f"{folder} holds no training steps to compare")
        # A version that did not know a key did what is its default today.
        return cls(folder, dict(_flat(asdict(Config()))) | dict(_flat(config)), history)

    @property
    def seed(self) -> Any:
        """``run.seed``."""
        return self.settings.get("run.seed")

    def effort(self, axis: str, steps: Sequence[int]) -> np.ndarray:
        """What the run had spent after each of these steps: float [steps]."""
        if axis == "steps":
            return np.asarray(steps, float)
        if axis == "samples":
            counts = [self.settings.get(f"gdpo.num_{name}") for name in ("prompts_per_step", "generations_per_prompt")]
            if not all(isinstance(count, int) for count in counts):
                raise ConfigError(f"{self.folder}/config.yaml does not say how many samples a step has")
            return np.asarray(steps, float) * counts[0] * counts[1]
        spent = {row["step"]: row.get("time/step", 0.0) for row in self.history.training}
        ends = dict(zip(spent, itertools.accumulate(spent.values())))
        return np.array([ends.get(step, 0.0) for step in steps], float)

    def curve(self, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """(effort, trailing mean) of a metric; empty where it was not measured."""
        steps, values = self.history.trailing(metric, 1 if metric.startswith("validation/") else WINDOW)
        return self.effort(axis, steps), np.asarray(values, float)


@dataclass(frozen=True)
class Variant:
    """Runs that differ in their seed alone, in the order of the seeds."""

    label: str
    runs: tuple[RunRecord, ...]
    settings: Settings
    """What tells it from the others."""


@dataclass(frozen=True)
class Gap:
    """A variant minus the baseline, seed by seed."""

    variant: str
    metric: str
    seeds: tuple[Any, ...]
    at_end: np.ndarray
    """float [seeds]: differences of the trailing means after equal effort."""
    over_run: np.ndarray
    """float [seeds]: differences of the means over all steps up to there."""


def _flat(section: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Keys with their sections; a list is one value."""
    found: list[tuple[str, Any]] = []
    for key, value in section.items():
        if isinstance(value, dict) and value:
            found += _flat(value, f"{before}{key}.")
        else:
            found.append((f"{before}{key}", value))
    return found


def differences(runs: Sequence[RunRecord], ignored: Sequence[str] = ()) -> list[str]:
    """Keys whose values tell the runs apart, but for what leaves the training as it is and what goes with the seed.

    Args:
        ignored: further keys that make no variant, or sections with a dot behind.
    """
    left_out = tuple(key for key in ignored if key.endswith(".")) + _NO_VARIANT
    keys = dict.fromkeys(key for run in runs for key in run.settings if not key.startswith(left_out))
    several = max(Counter(repr(run.seed) for run in runs).values()) > 1
    found = []
    for key in keys:
        values = _values(runs, key)
        # Something of its own for every seed. Where each seed has one run nothing shows what goes with it.
        with_seed = several and len({(repr(run.seed), value) for run, value in zip(runs, values)}) == len(
            {repr(run.seed) for run in runs}
        )
        if len(set(values)) > 1 and not with_seed and key not in ignored:
            found.append(key)
    return found


def _values(runs: Sequence[RunRecord], key: str) -> list[str]:
    """What each run has for a key; a path like ``models/small_${run.seed}`` is the same for all seeds."""
    raw = [run.settings.get(key) for run in runs]
    plain = [repr(value) for value in raw]
    paths = [repr(v.replace(str(r.seed), "${run.seed}") if isinstance(v, str) else v) for r, v in zip(runs, raw)]
    return min(plain, paths, key=lambda values: len(set(values)))  # a seed of 0 is part of many an address


def variants_of(runs: Sequence[RunRecord], ignored: Sequence[str] = ()) -> list[Variant]:
    """The runs grouped by their settings, in the order in which they were given; a run that was given twice counts
    once.

    Runs of equal settings and seed are no two seeds of one variant: then every run is a variant of its own.
    """
    runs = list({real_path(run.folder): run for run in runs}.values())
    keys = differences(runs, ignored)
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run, *values in zip(runs, *(_values(runs, key) for key in keys)):
        groups.setdefault(tuple(values), []).append(run)
    members = list(groups.values())
    if any(len({repr(run.seed) for run in group}) < len(group) for group in members):
        members = [[run] for run in runs]
    labels = _labels(members, keys)
    return [
        Variant(
            label, tuple(sorted(group, key=lambda run: repr(run.seed))), {k: group[0].settings.get(k) for k in keys}
        )
        for label, group in zip(labels, members)
    ]


def _labels(groups: Sequence[Sequence[RunRecord]], keys: Sequence[str]) -> list[str]:
    """What tells the variants apart, as short as it is clear: settings, else what the folders' names have in common,
    else the folders."""
    settings = [
        ", ".join(f"{key.split('.')[-1]}={shown(group[0].settings.get(key))}" for key in keys) for group in groups
    ]
    names = [_common_name([real_path(run.folder).name for run in group]) for group in groups]
    for labels in (settings, names):
        if len(set(labels)) == len(labels) and all(0 < len(label) <= _LABEL for label in labels):
            return labels
    return [str(group[0].folder) for group in groups]


def _common_name(names: Sequence[str]) -> str:
    """How all of these begin, without half a number: ``gdpo`` for gdpo_42 and gdpo_43."""
    prefix = os.path.commonprefix(names)
    if any(name[len(prefix) : len(prefix) + 1].isdigit() for name in names):
        prefix = prefix.rstrip("0123456789")
    return prefix.rstrip("_-. ")


def shown(value: Any) -> str:
    """A setting as text."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def components(variants: Sequence[Variant]) -> list[str]:
    """Metrics of the rewards that any run has, in the order in which they are met."""
    names = dict.fromkeys(name for variant in variants for run in variant.runs for name in run.history.components)
    return [f"reward/{name}/mean" for name in names]


def common_effort(variants: Sequence[Variant], axis: str) -> float:
    """The effort that every run has reached."""
    ends = []
    for variant in variants:
        for run in variant.runs:
            last = run.history.training[-1]["step"]
            ends.append(float(run.effort(axis, [last])[0]))
    return min(ends)


def values_at(variant: Variant, metric: str, axis: str, effort: float) -> np.ndarray:
    """float [runs]: the trailing mean when the effort was spent, of the last step that was finished by then; NaN for a
    run that has none."""
    found = []
    for run in variant.runs:
        spent, values = run.curve(metric, axis)
        until = values[spent <= effort * (1 + 1e-9)]
        found.append(until[-1] if len(until) else np.nan)
    return np.array(found)


def steps_to(variant: Variant, metric: str, goal: float, until: float) -> np.ndarray:
    """float [runs]: the first step at which the trailing mean, its window full, is at ``goal`` or above; ``until`` + 1
    for a run that was not there by step ``until``, NaN for one that did not measure it."""
    found = []
    for run in variant.runs:
        steps, values = run.history.trailing(metric, 1 if metric.startswith("validation/") else WINDOW)
        full = 0 if metric.startswith("validation/") else WINDOW - 1
        reached = (step for step, value in list(zip(steps, values))[full:] if value >= goal and step <= until)
        found.append(next(reached, until + 1) if steps else np.nan)
    return np.array(found, float)


def band(variant: Variant, metric: str, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(effort, mean over the runs, standard error) as far as all runs of the variant that measured it go; the error is
    0 for a single run."""
    curves = [curve for run in variant.runs if len((curve := run.curve(metric, axis))[0])]
    if not curves:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    end = min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= max(x[0] for x, _ in curves)) & (grid <= end)]
    rows = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, rows.mean(axis=0), np.nan_to_num(standard_error(rows))


def standard_error(values: np.ndarray) -> np.ndarray:
    """Of the mean over axis 0; NaN for a single run."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    spread: np.ndarray = values.std(axis=0, ddof=1) / np.sqrt(len(values))
    return spread


def gaps(variants: Sequence[Variant], metrics: Sequence[str]) -> list[Gap]:
    """Every variant against the first one, at equal steps, over the seeds that both have."""
    effort = common_effort(variants, "steps")
    baseline, *others = variants
    found = []
    for variant in others:
        theirs = {repr(run.seed): run for run in baseline.runs}
        pairs = [(run, theirs[repr(run.seed)]) for run in variant.runs if repr(run.seed) in theirs]
        for metric in metrics:
            ends, means, seeds = [], [], []
            for run, other in pairs:
                (a, b), (c, d) = (_end_and_mean(r, metric, effort) for r in (run, other))
                if not np.isnan([a, b, c, d]).any():
                    ends.append(a - c)
                    means.append(b - d)
                    seeds.append(run.seed)
            if seeds:
                found.append(Gap(variant.label, metric, tuple(seeds), np.array(ends), np.array(means)))
    return found


def _end_and_mean(run: RunRecord, metric: str, steps: float) -> tuple[float, float]:
    values = [value for step, value in zip(*run.history.curve(metric)) if step <= steps]
    if not values:
        return float("nan"), float("nan")
    window = 1 if metric.startswith("validation/") else WINDOW
    return float(np.mean(values[-window:])), float(np.mean(values))


def sign_flip_p(gap: np.ndarray) -> float:
    """How often a mean as far from 0 comes about if each seed's difference had its sign by chance: the exact two-sided
    paired randomisation test. With n seeds it is never below 2 / 2**n. NaN for a single seed, of which it says nothing.

    At most 16 seeds are enumerated; of more, the first 16 are taken.
    """
    gap = gap[:16]
    if len(gap) < 2:
        return float("nan")
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(gap))))
    means = np.abs(signs @ gap)
    return float(np.mean(means >= abs(gap.sum()) - 1e-12 * np.abs(gap).sum()))
