"""Calibration of the planner's rates from the metrics and samples of finished runs on this machine.

Each step of each run gives one observation per phase: measured seconds, number of units, and ideal seconds for the
step's sample lengths. Both coefficients of a phase are fitted if the ratio of ideal seconds to units varies enough.
Otherwise the assumed coefficients are scaled by a common factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

import numpy as np

from gdpo_nemo.config.changes import load_saved_config
from gdpo_nemo.config.layout import Resolved
from gdpo_nemo.config.model_checks import resolve
from gdpo_nemo.config.schema import Config
from gdpo_nemo.models.description import ModelDescription
from gdpo_nemo.observe.metrics import read_metrics
from gdpo_nemo.observe.run_files import is_number
from gdpo_nemo.observe.samples import read_columns, rollout_files, rollout_path
from gdpo_nemo.planning.hardware import Device, Phase, Rates
from gdpo_nemo.planning.shape import model_shape
from gdpo_nemo.planning.speed import Lengths, Work, generation_work, sync_work, training_work
from gdpo_nemo.utils.errors import ConfigError

WARM_UP = 1
"""Number of steps at the start of each run that the calibration ignores."""
_MEASURED = ("time/rollout", "time/train", "time/sync", "time/idle", "rollout/tokens")
_POSITIVE = ("time/rollout", "time/train", "time/sync", "rollout/tokens")
_MAX_METRIC = 1e12
"""Largest plausible metric (seconds of a phase, tokens of a step). Runs with larger values are rejected."""
_MIN_VARIATION = 1.3
"""Both coefficients are fitted only if the ratio of ideal seconds to units varies by more than this factor."""


@dataclass(frozen=True)
class Observation:
    """Measurement of one phase in one step."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Empirical distribution, which samples the measured values with replacement. It implements ``Distribution``."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Return the mean of the values."""
        return fmean(self.values)

    @property
    def longest(self) -> float:
        """Return the largest value."""
        return max(self.values)

    def sample_group(self, seed: int, prompt_index: int, samples: int) -> list[float]:
        """Return one value per sample of a group. See ``Distribution.sample_group``."""
        return Random((seed << 40) + prompt_index).choices(self.values, k=samples)


@dataclass
class Run:
    """Config of a finished run, with the metrics and sample lengths of each step."""

    name: str
    resolved: Resolved
    shape: ModelDescription
    rows: list[dict[str, Any]]
    lengths: list[Lengths]


def read_run(folder: str | Path, option: str = "--calibrate") -> Run:
    """Read the run in ``folder``. Error messages name the command-line option ``option``.

    Raises:
        ConfigError: if the folder does not contain a run with samples, valid metrics and enough steps, or the model is
            unknown.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"{option}: {folder} is not a run folder (config.yaml not found)")
    config = load_saved_config(folder / "config.yaml")
    rows = read_metrics(folder)
    rows = [row for row in rows if "time/train" in row][WARM_UP:]
    if not rows:
        raise ConfigError(f"{option}: {folder} has fewer than {WARM_UP + 1} steps in metrics.jsonl")
    for row in rows:
        _check_times(row, f"{option}: {folder}/metrics.jsonl")
    resolved = resolve(config)
    shape = model_shape(resolved)
    if shape is None:
        raise ConfigError(f"{option}: model {config.policy.model_name} of {folder} not found")
    return Run(str(folder), resolved, shape, rows, [_lengths(folder, row, option) for row in rows])


def _check_times(row: dict[str, Any], where: str) -> None:
    """Raise ConfigError if a time or token count of a metrics row is invalid. Error messages begin with ``where``."""
    for name in _MEASURED:
        value = row.get(name, 1.0)
        if not is_number(value) or not 0 <= value <= _MAX_METRIC:
            raise ConfigError(
                f"{where}: {name} of step {row['step']} must be a number from 0 to {_MAX_METRIC:g} ({value})"
            )
        if not value and name in _POSITIVE:
            raise ConfigError(f"{where}: {name} of step {row['step']} must be greater than 0")


def _lengths(folder: Path, row: dict[str, Any], option: str) -> Lengths:
    prompts, completions = _sample_lengths(folder, row, option)
    return Lengths(float(np.mean(prompts)), float(np.mean(completions)), float(max(completions)))


def _sample_lengths(folder: Path, row: dict[str, Any], option: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the token counts (prompts, completions) of a step's samples."""
    import pyarrow.compute as pc

    # The sample files of older runs are step_*.jsonl.
    path = dict(rollout_files(folder)).get(row["step"], rollout_path(folder, row["step"]))
    try:
        table = read_columns(path, ["prompt_ids", "completion_ids"])
        prompts, completions = (pc.list_value_length(column).to_numpy() for column in table.columns)
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{option}: {path} is not a rollout file ({type(error).__name__}: {error})") from None
    if not len(completions):
        raise ConfigError(f"{option}: {path} is empty")
    return prompts, completions


def sampled_lengths(run: Run) -> Measured:
    """Return the distribution of completion lengths over all steps of a run."""
    lengths: list[float] = []
    for row in run.rows:
        lengths += map(float, _sample_lengths(Path(run.name), row, "--run")[1])
    return Measured(tuple(lengths))


def calibrate(runs: Sequence[Run], device: Device, start: Rates) -> Rates:
    """Fit rates to the steps of ``runs``. Rates that cannot be determined keep their values from ``start``."""

    def phase(name: str, work: Callable[[Run, Lengths], Work], initial: Phase) -> Phase:
        observations = []
        for run in runs:
            for row, lengths in zip(run.rows, run.lengths):
                if name in row:
                    observations.append(Observation(work(run, lengths), row[name]))
        return fit(observations, initial) if observations else initial

    def median_fraction(value: Callable[[Config, Lengths], float]) -> float:
        return median(value(run.resolved.config, lengths) for run in runs for lengths in run.lengths)

    return replace(
        start,
        generation=phase(
            "time/rollout", lambda run, x: generation_work(run.resolved, run.shape, device, x), start.generation
        ),
        training=phase("time/train", lambda run, x: training_work(run.resolved, run.shape, device, x), start.training),
        sync=phase("time/sync", lambda run, x: sync_work(run.resolved, run.shape, device), start.sync),
        verify=_exposed_verification(runs),
        completion_share=median_fraction(lambda config, x: x.completion / config.policy.generation.max_new_tokens),
        longest_share=median_fraction(lambda config, x: x.longest / config.policy.generation.max_new_tokens),
        prompt_share=median_fraction(
            lambda config, x: (
                x.prompt / (config.policy.max_total_sequence_length - config.policy.generation.max_new_tokens)
            )
        ),
        measured=[run.name for run in runs],
    )


def _exposed_verification(runs: Sequence[Run]) -> float:
    """Return the median seconds of verification per sample that do not overlap with generation in on-policy runs."""
    waits = []
    for run in runs:
        if run.resolved.config.rollout.max_staleness:
            continue
        for row, lengths in zip(run.rows, run.lengths):
            if {"time/idle", "time/rollout", "rollout/tokens"} <= row.keys():
                wait = max(0.0, row["time/idle"] - row["time/rollout"])
                waits.append(wait * lengths.completion / row["rollout/tokens"])
    return median(waits) if waits else 0.0


def fit(observations: Sequence[Observation], start: Phase) -> Phase:
    """Fit a phase by the mean absolute relative error, which is robust against a few slow steps.

    If the observations do not determine both coefficients, the coefficients of ``start`` are scaled.
    """
    units = np.array([o.work.units for o in observations])
    ideal = np.array([o.work.ideal for o in observations])
    seconds = np.array([o.seconds for o in observations])
    ratios = ideal / units
    if len(observations) > 2 and ratios.max() > _MIN_VARIATION * ratios.min():
        fixed, factor = _least_absolute(np.stack([units, ideal], axis=1) / seconds[:, None])
        if fixed >= 0 and factor >= 0:
            return Phase(fixed, factor)
    scale = float(np.median(seconds / (start.fixed * units + start.factor * ideal)))
    return Phase(start.fixed * scale, start.factor * scale)


def _least_absolute(table: np.ndarray, rounds: int = 50) -> tuple[float, float]:
    """Return the x that minimizes the sum of |table x - 1|, by iteratively reweighted least squares."""
    weights = np.ones(len(table))
    for _ in range(rounds):
        x, *_ = np.linalg.lstsq(table * weights[:, None], weights, rcond=None)
        weights = 1 / np.sqrt(np.maximum(np.abs(table @ x - 1), 1e-6))
    return float(x[0]), float(x[1])
